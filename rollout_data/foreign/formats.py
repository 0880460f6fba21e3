"""The formats that are read and written, and which one a path has.

One rule: a format is detected by its content; the first that matches, in the order of the table, is taken.
"""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from storage.errors import ForeignFileError, RolloutDataError, UsageError, nearest

from .reader import ForeignReader
from .traps import look_for_copies, look_for_resets
from .writer import ForeignWriter

#: Format -> the module of this folder with its class `Reader`; in the order in which they are tried.
FORMATS: dict[str, str] = {
    "lerobot": "lerobot.reader",
    "rlinf": "arrays.rlinf",
    "rlds": "records.rlds",
    "zarr": "arrays.zarr_files",
    "mcap": "records.mcap_files",
    "minari": "minari.reader",
    "libero": "hdf5.libero",
    "isaaclab": "hdf5.isaaclab",
    "robomimic": "hdf5.robomimic",
    "aloha": "hdf5.aloha",
    "maniskill": "hdf5.maniskill",
    "humenv": "hdf5.humenv",
    "d4rl": "hdf5.d4rl",
    "bfm_zero": "hdf5.ring",
    "ogbench": "arrays.ogbench",
    "motion": "arrays.motion",
}

#: Format -> the module of this folder with its class `Writer`.
WRITERS: dict[str, str] = {
    "lerobot": "lerobot.writer",
    "robomimic": "writers.robomimic",
    "isaaclab": "writers.isaaclab",
    "minari": "writers.minari",
    "d4rl": "writers.d4rl",
    "rlinf": "writers.rlinf",
    "trajectory-folders": "writers.trajectory_folders",
}

#: The same, of formats that are written to be looked at, and are not read.
EXPORTS: dict[str, str] = {"rerun": "writers.rerun"}


def reader_class(name: str) -> type[ForeignReader]:
    """Give the reader of a format."""
    if name not in FORMATS:
        raise UsageError("open", "", f"format {nearest(name, FORMATS)}", repr(name))
    found: type[ForeignReader] = import_module(f".{FORMATS[name]}", __package__).Reader
    return found


def writer_class(name: str) -> type[ForeignWriter]:
    """Give the writer of a format."""
    known = {**WRITERS, **EXPORTS}
    if name not in known:
        raise UsageError("write", "", f"format {nearest(name, known)}", repr(name))
    found: type[ForeignWriter] = import_module(f".{known[name]}", __package__).Writer
    return found


def detect(path: Path) -> str | None:
    """Name the format of a file or folder; None if it is none of them."""
    return next((name for name in FORMATS if reader_class(name).detect(path)), None)


def open_foreign(path: Path, format: str | None = None, **options: Any) -> ForeignReader:
    """Open a file or folder of another system.

    Raises:
        ForeignFileError: It has no known format.
        UsageError: The format has no such option.
    """
    chosen = format or detect(path)
    if chosen is None:
        raise ForeignFileError(
            "open", repr(str(path)), f"one of {', '.join(FORMATS)}", "something else", "Name its format="
        )
    kind = reader_class(chosen)
    if unknown := [name for name in options if name not in kind.OPTIONS]:
        known = nearest(unknown[0], kind.OPTIONS) if kind.OPTIONS else "no option"
        raise UsageError("open", repr(str(path)), f"{known} (of {chosen})", repr(unknown[0]))
    reader = kind(path, options)
    for look in (look_for_copies, look_for_resets):
        with suppress(RolloutDataError):  # reading the episode raises it again
            look(reader)
    return reader
