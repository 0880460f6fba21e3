"""The formats that are read and written, and which one a path has.

One rule: a format is detected by its content; where several match, one that is a kind of another is taken, and others
are refused.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from storage.errors import ForeignFileError, RolloutDataError, UsageError, nearest

from ..sources.episode_reader import ForeignReader
from ..sources.natural_order import natural
from .episode_writer import ForeignWriter
from .hdf5.hdf5_datasets import hdf5_names
from .import_errors import look_for_copies, look_for_resets

#: Format -> the module of this folder with its class `Reader`; in the order in which they are tried.
FORMATS: dict[str, str] = {
    "lerobot": "lerobot.lerobot_reader",
    "rlinf": "rlinf.rlinf_reader",
    "rlds": "records.rlds_reader",
    "zarr": "arrays.zarr_replay_buffer",
    "mcap": "records.mcap_reader",
    "minari": "minari.minari_reader",
    "libero": "hdf5.libero",
    "isaaclab": "hdf5.isaaclab_reader",
    "robomimic": "hdf5.robomimic_reader",
    "aloha": "hdf5.aloha",
    "maniskill": "hdf5.maniskill",
    "humenv": "hdf5.humenv",
    "d4rl": "hdf5.d4rl_reader",
    "bfm_zero": "hdf5.bfm_zero",
    "ogbench": "arrays.ogbench",
    "motion": "arrays.motion_clips",
}

#: Format -> the module of this folder with its class `Writer`.
WRITERS: dict[str, str] = {
    "lerobot": "lerobot.lerobot_writer",
    "robomimic": "hdf5.robomimic_writer",
    "isaaclab": "hdf5.isaaclab_writer",
    "minari": "minari.minari_writer",
    "d4rl": "hdf5.d4rl_writer",
    "rlinf": "rlinf.rlinf_writer",
    "trajectory-folders": "trajectory_folders.trajectory_folder_writer",
}

#: The same, of formats that are written to be looked at, and are not read.
EXPORTS: dict[str, str] = {"rerun": "rerun_writer"}

#: Entries of a folder without a format that are looked at, to say what is in it.
_MAX_ENTRIES = 20


def _class(name: str, kind: str, table: Mapping[str, str], action: str) -> Any:
    if not isinstance(name, str) or name not in table:
        raise UsageError(action, "", f"format {nearest(name, table)}", repr(name))
    return getattr(import_module(f".{table[name]}", __package__), kind)


def reader_class(name: str) -> type[ForeignReader]:
    """Give the reader of a format."""
    found: type[ForeignReader] = _class(name, "Reader", FORMATS, "open")
    return found


def writer_class(name: str) -> type[ForeignWriter]:
    """Give the writer of a format."""
    found: type[ForeignWriter] = _class(name, "Writer", {**WRITERS, **EXPORTS}, "write")
    return found


def detect(path: Path) -> str | None:
    """Name the first format that a file or folder may have; None if it has none of them."""
    return _detect(path) or _detect(only_file(path))


def _detect(path: Path) -> str | None:
    return next((name for name in FORMATS if reader_class(name).detect(path)), None)


def holds_files_of_others(folder: Path) -> bool:
    """Return whether a folder has HDF5 files, all of them recordings of other systems."""
    names = hdf5_names(folder)[:_MAX_ENTRIES] if folder.is_dir() else []
    return bool(names) and all(_detect(folder / name) for name in names)


def only_file(path: Path) -> Path:
    """Return the HDF5 file of a folder if it is the only recording in it; any other path is returned as it is."""
    with suppress(OSError):
        names = hdf5_names(path) if path.is_dir() else []
        if len(names) != 1 or _detect(path):
            return path
        others = [one for one in path.iterdir() if one.name != names[0] and not one.is_symlink()]
        is_alone = not any(_may_be_recording(one) for one in others[:_MAX_ENTRIES])
        if is_alone and _detect(path / names[0]):
            return path / names[0]
    return path


def _may_be_recording(path: Path) -> bool:
    """Return whether an entry of a folder is a recording, or a part of one, of any system or ours."""
    if path.name.startswith("trajectory_") or detect(path):
        return True
    return path.is_dir() and any(name.startswith("rollout_") for name in os.listdir(path))


def _only_format(path: Path) -> str:
    """Name the format of a file or folder.

    Raises:
        ForeignFileError: It has none, or may have several; tells which, and those of the entries of a folder.
    """
    kinds = {name: kind for name in FORMATS if (kind := reader_class(name)).detect(path)}
    found = [
        name
        for name, kind in kinds.items()
        if not any(issubclass(one, kind) for one in kinds.values() if one is not kind)
    ]
    if len(found) == 1:
        return found[0]
    where, expected, advice = repr(str(path)), f"one of {', '.join(FORMATS)}", "Name its format="
    if found:
        raise ForeignFileError("open", where, "one format", f"what may be {' or '.join(found)}", advice)
    entries = sorted(path.iterdir(), key=lambda one: natural(one.name))[:_MAX_ENTRIES] if path.is_dir() else []
    known = {one.name: detect(one) for one in entries if not one.is_symlink()}
    if inside := [f"{name!r} ({form})" for name, form in known.items() if form]:
        raise ForeignFileError("open", where, expected, f"a folder of {', '.join(inside)}", "Open one of them")
    raise ForeignFileError("open", where, expected, "something else", advice)


def open_foreign(path: Path, format: str | None = None, **options: Any) -> ForeignReader:
    """Open a file or folder of another system.

    Raises:
        ForeignFileError: It has no known format, or may have several.
        UsageError: The format has no such option.
    """
    path = only_file(path)
    chosen = format or _only_format(path)
    kind = reader_class(chosen)
    if unknown := [name for name in options if name not in kind.OPTIONS]:
        known = nearest(unknown[0], kind.OPTIONS) if kind.OPTIONS else "no option"
        raise UsageError("open", repr(str(path)), f"{known} (of {chosen})", repr(unknown[0]))
    reader = kind(path, options)
    for look in (look_for_copies, look_for_resets):
        with suppress(RolloutDataError):  # reading the episode raises it again
            look(reader)
    return reader
