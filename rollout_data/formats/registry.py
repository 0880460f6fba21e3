"""The readable and writable formats, and detection of the format of a path.

A format is detected from the content of a path. If several formats match, the most specific format
is chosen (`Format.refines`). Other ambiguities are errors. The module of a reader or writer is
imported at its first use.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, NamedTuple

from storage.errors import ForeignFileError, RolloutDataError, UsageError, nearest

from ..sources.recordings.recordings_in_folder import recordings_in, several_error
from . import format_detection as detection
from .hdf5.hdf5_datasets import hdf5_names
from .import_errors import report_copied_actions, report_reset_rows

if TYPE_CHECKING:
    from ..sources.file_source import FileSource
    from .episode_writer import ForeignWriter


class Format(NamedTuple):
    """A readable format.

    Attributes:
        reader: Class of the reader, as "module below `formats`:class".
        is_format: Function of `format_detection` that recognizes paths of the format.
        refines: Name of a more general format that also matches every path of this format.
    """

    reader: str
    is_format: Callable[[Path], bool]
    refines: str = ""


#: Readable formats by name, in the order in which detection tries them.
FORMATS: dict[str, Format] = {
    "lerobot": Format("lerobot.lerobot_reader:LerobotReader", detection.is_lerobot),
    "rlinf": Format("rlinf.rlinf_reader:RlinfReader", detection.is_rlinf),
    "rlds": Format("records.rlds_reader:RldsReader", detection.is_rlds),
    "zarr": Format(
        "arrays.zarr_replay_buffer:ZarrReplayBufferReader", detection.is_zarr_replay_buffer
    ),
    "mcap": Format("records.mcap_reader:McapReader", detection.is_mcap),
    "minari": Format("minari.minari_reader:MinariReader", detection.is_minari),
    "libero": Format("hdf5.libero:LiberoReader", detection.is_libero, refines="robomimic"),
    "isaaclab": Format(
        "hdf5.isaaclab_reader:IsaacLabReader", detection.is_isaaclab, refines="robomimic"
    ),
    "robomimic": Format("hdf5.robomimic_reader:RobomimicReader", detection.is_robomimic),
    "aloha": Format("hdf5.aloha:AlohaReader", detection.is_aloha),
    "maniskill": Format("hdf5.maniskill:ManiskillReader", detection.is_maniskill),
    "humenv": Format("hdf5.humenv:HumenvReader", detection.is_humenv),
    "d4rl": Format("hdf5.d4rl_reader:D4rlReader", detection.is_d4rl),
    "bfm_zero": Format("hdf5.bfm_zero:BfmZeroReader", detection.is_bfm_zero),
    "ogbench": Format("arrays.ogbench:OgbenchReader", detection.is_ogbench),
    "motion": Format("arrays.motion_clips:MotionReader", detection.is_motion),
}

#: Maps format names to classes of writers, as "module below `formats`:class".
WRITERS: dict[str, str] = {
    "lerobot": "lerobot.lerobot_writer:LerobotWriter",
    "robomimic": "hdf5.robomimic_writer:RobomimicWriter",
    "isaaclab": "hdf5.isaaclab_writer:IsaacLabWriter",
    "minari": "minari.minari_writer:MinariWriter",
    "d4rl": "hdf5.d4rl_writer:D4rlWriter",
    "rlinf": "rlinf.rlinf_writer:RlinfWriter",
    "trajectory-folders": "trajectory_folders.trajectory_folder_writer:TrajectoryFolderWriter",
}

#: Maps names of write-only formats for viewers to classes of writers.
EXPORTS: dict[str, str] = {"rerun": "rerun_writer:RerunWriter"}

#: Maximum number of inspected entries of a folder.
_MAX_ENTRIES = 20


def _import_class(name: str, classes: Mapping[str, str]) -> Any:
    if not isinstance(name, str) or name not in classes:
        raise UsageError(f"format {name!r} is unknown. Known formats: {nearest(name, classes)}.")
    return resolve_name(f"{__package__}.{classes[name]}")


def reader_class(name: str) -> type[FileSource]:
    """Import and return the reader of a format."""
    readers = {known: format.reader for known, format in FORMATS.items()}
    reader: type[FileSource] = _import_class(name, readers)
    return reader


def writer_class(name: str) -> type[ForeignWriter]:
    """Import and return the writer of a format."""
    writer: type[ForeignWriter] = _import_class(name, {**WRITERS, **EXPORTS})
    return writer


def has_format(path: Path, name: str) -> bool:
    """Return whether a file or folder has a format. An unreadable path has no format."""
    with suppress(RolloutDataError, OSError):
        return FORMATS[name].is_format(path)
    return False


def detect(path: Path) -> str | None:
    """Return the first format that matches a file or folder; None if no format matches."""
    return _detect(path) or _detect(only_file(path))


def _detect(path: Path) -> str | None:
    return next((name for name in FORMATS if has_format(path, name)), None)


def holds_files_of_others(folder: Path) -> bool:
    """Return whether a folder contains HDF5 files, and all of them have a format in `FORMATS`."""
    names = hdf5_names(folder)[:_MAX_ENTRIES] if folder.is_dir() else []
    return bool(names) and all(_detect(folder / name) for name in names)


def only_file(path: Path) -> Path:
    """Return the HDF5 file in a folder that contains no other recording, otherwise `path`."""
    with suppress(OSError):
        names = hdf5_names(path) if path.is_dir() else []
        if len(names) != 1 or _detect(path):
            return path
        entries = [entry for entry in path.iterdir() if entry.name != names[0]]
        others = [entry for entry in entries if not entry.is_symlink()]
        is_alone = not any(_may_be_recording(entry) for entry in others[:_MAX_ENTRIES])
        if is_alone and _detect(path / names[0]):
            return path / names[0]
    return path


def _may_be_recording(path: Path) -> bool:
    """Return whether a folder entry may be a recording of any format, or a part of a recording."""
    if path.name.startswith("trajectory_") or detect(path):
        return True
    return path.is_dir() and any(name.startswith("rollout_") for name in os.listdir(path))


def _only_format(path: Path) -> str:
    """Return the format of a file or folder.

    Raises:
        ForeignFileError: The path has no format, or several formats. The error names the formats.
        UsageError: The path is a folder of recordings that include block folders. The error names
            the recordings.
    """
    matching = [name for name in FORMATS if has_format(path, name)]
    refined = {FORMATS[name].refines for name in matching}
    candidates = [name for name in matching if name not in refined]
    if len(candidates) == 1:
        return candidates[0]

    if candidates:
        raise ForeignFileError(
            f"{str(path)!r} matches {' and '.join(candidates)}. Name one of them: "
            f"open(path, format={candidates[0]!r})."
        )

    recordings = recordings_in(path)
    if recordings:
        are_foreign = all(detect(entry) for entry in recordings)
        error_type = ForeignFileError if are_foreign else UsageError
        raise several_error(path, recordings, error_type)
    raise ForeignFileError(
        f"{str(path)!r} has no known format. Pass format=... to name one of {', '.join(FORMATS)}."
    )


def open_foreign(path: Path, format: str | None = None, **options: Any) -> FileSource:
    """Open a file or folder of another system.

    Raises:
        ForeignFileError: The path has no known format, or several formats match.
        UsageError: The format has no option of a given name.
    """
    path = only_file(path)
    chosen = format or _only_format(path)
    reader_type = reader_class(chosen)
    unknown = [name for name in options if name not in reader_type.OPTIONS]
    if unknown:
        known = "has no options"
        if reader_type.OPTIONS:
            known = f"has the options {nearest(unknown[0], reader_type.OPTIONS)}"
        raise UsageError(
            f"option {unknown[0]!r} is unknown. The format {chosen!r} of {str(path)!r} {known}."
        )

    reader = reader_type(path, options)
    for check in (report_copied_actions, report_reset_rows):
        with suppress(RolloutDataError):  # Reading the episode raises this error later.
            check(reader)
    return reader
