"""The folder of one save: `config.json` and one HDF5 file per table, replaced as a whole and read as a whole.

One rule: all files of a folder carry the id of one save. A folder that another process replaces while it is read is
read again, and whatever is wrong with its content is reported with its name.
"""

from __future__ import annotations

import errno
import os
import secrets
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from ..core import arguments
from ..core.durable_files import existing_folder, read_json, replace_folder, write_json
from ..errors import CorruptFileError, DataFileError, ForeignFileError, RolloutDataError, RolloutDataWarning
from .hdf5_columns import SAVE_ID, write_columns

CONFIG_NAME = "config.json"
#: Tables of stores in general; of rows, and of final observations.
COLUMNS, ROWS, FINALS = "columns", "buffer", "finals"
_OWN_NAMES = frozenset({CONFIG_NAME, *(f"{table}.hdf5" for table in (COLUMNS, ROWS, FINALS))})
#: What values of wrong kinds make Python and torch raise.
NONSENSE = (ArithmeticError, AttributeError, LookupError, MemoryError, RuntimeError, TypeError, ValueError)
#: A folder that is saved anew each time while it is read is read so often; a read takes about as long as a save.
_MAX_READS, _MAX_LOOKS = 1000, 10
_Made = TypeVar("_Made")


class MissingFolderError(DataFileError, FileNotFoundError):
    """A folder that should be loaded is not there."""


def write_folder(
    folder: str | os.PathLike[str], tables: Mapping[str, Mapping[str, torch.Tensor]], config: Mapping[str, Any]
) -> None:
    """Write a folder; it takes the place of an earlier save.

    Args:
        folder: The folder.
        tables: Name of a file without its ending -> its columns.
        config: The content of `config.json`.

    Raises:
        DataFileError: There is a file, or a folder with anything else in it.
        WriteError: The disk is full.
    """
    save_id = secrets.token_hex(8)
    with replace_folder(folder, _OWN_NAMES) as new:
        for name, columns in tables.items():
            write_columns(new / f"{name}.hdf5", columns, save_id)
        write_json(new / CONFIG_NAME, {**config, SAVE_ID: save_id})


def read_config(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a folder's `config.json`."""
    for _ in range(_MAX_LOOKS):
        try:
            return read_json(existing_folder(folder) / CONFIG_NAME)
        except FileNotFoundError as error:  # perhaps it was replaced at this moment: look again
            cause = error
    raise MissingFolderError("load", repr(str(folder)), f"a folder with {CONFIG_NAME}", "none") from cause


def check_version(folder: str | os.PathLike[str], config: Mapping[str, Any], known: str, version: int) -> None:
    """Raise `ForeignFileError` if a config says that it is of another format or version."""
    if config.get("format") != known or config.get("version") != version:
        got = f"{config.get('format')} {config.get('version')}"
        raise ForeignFileError("load", repr(str(folder)), f"{known} {version}", got, "Update this package")


def load_one_save(path: str | os.PathLike[str], load: Callable[[dict[str, Any]], _Made]) -> _Made:
    """Load a folder by its config; again, as long as another process saves meanwhile and the files are not of one save.

    Args:
        path: The folder.
        load: Loads what a config says; raises if a file is of another save.
    """
    num_reads = 0
    while True:
        place = existing_folder(path)
        config = read_config(path)
        num_reads = num_reads + 1
        try:
            with as_damage(path):
                return load(config)
        except (RolloutDataError, OSError):
            is_there = existing_folder(path) == place  # not between the two renames of a saver
            is_same = is_there and read_config(path).get(SAVE_ID) == config.get(SAVE_ID)
            if is_same or num_reads == _MAX_READS:
                raise


@contextmanager
def as_damage(path: str | os.PathLike[str]) -> Iterator[None]:
    """Report what a folder's content makes Python raise as damage to the folder, and name it in every error."""
    try:
        yield
    except RolloutDataError as error:
        if str(path) not in error.where:
            error.where = f"{error.where} from {str(path)!r}".strip()
        raise
    except (*NONSENSE, OSError) as cause:
        is_no_memory = isinstance(cause, OSError) and cause.errno == errno.ENOMEM  # mapping so much was refused
        is_damage = is_no_memory or isinstance(cause, NONSENSE)
        if not is_damage or isinstance(cause, torch.cuda.OutOfMemoryError):
            raise
        got = f"{type(cause).__name__}: {cause}"
        raise CorruptFileError("load", repr(str(path)), "what save() wrote", got) from cause


def device_for(saved: Any, wanted: torch.device | str | None) -> torch.device:
    """Choose where to load to: the argument wins; a device that is not here becomes the CPU, with a warning."""
    if wanted is not None:
        return arguments.device("load", "device", wanted)
    found = torch.device(saved if isinstance(saved, str) else "cpu")
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        warnings.warn(f"{saved!r} is not here; the buffer is loaded onto the CPU", RolloutDataWarning, stacklevel=3)
        return torch.device("cpu")
    return found
