"""The folder of one save: `config.json` and one HDF5 file per table, replaced and read as a whole.

All files of a folder have the id of one save. If another process replaces the folder during a read,
the read is repeated. Errors in its content name the folder.
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
from ..errors import (
    CorruptFileError,
    DataFileError,
    ForeignFileError,
    RolloutDataError,
    RolloutDataWarning,
)
from .hdf5_columns import SAVE_ID, write_columns

CONFIG_NAME = "config.json"
#: Table of a store that is not a `BufferStore`.
COLUMNS = "columns"
#: Table of the rows of a `BufferStore`.
ROWS = "buffer"
#: Table of the final observations of a `BufferStore`.
FINALS = "finals"
_OWN_NAMES = frozenset({CONFIG_NAME, *(f"{table}.hdf5" for table in (COLUMNS, ROWS, FINALS))})
#: Errors that Python and torch raise for values of wrong types.
NONSENSE = (
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RuntimeError,
    TypeError,
    ValueError,
)
#: Reads of a folder that is saved again during each read. A read takes about as long as a save.
_MAX_READS = 1000
#: Attempts to open a config while its folder is replaced.
_MAX_LOOKS = 10
_Made = TypeVar("_Made")


class MissingFolderError(DataFileError, FileNotFoundError):
    """A folder to be loaded does not exist."""


def write_folder(
    folder: str | os.PathLike[str],
    tables: Mapping[str, Mapping[str, torch.Tensor]],
    config: Mapping[str, Any],
) -> None:
    """Write a folder atomically; replace an earlier save.

    Args:
        folder: The folder.
        tables: Name of a file without its ending -> its columns.
        config: The content of `config.json`.

    Raises:
        DataFileError: The path is a file, or a folder with other content.
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
        except FileNotFoundError as error:  # perhaps the folder was being replaced: try again
            cause = error
    raise MissingFolderError(
        "load", repr(str(folder)), f"a folder with {CONFIG_NAME}", "none"
    ) from cause


def check_version(
    folder: str | os.PathLike[str], config: Mapping[str, Any], name: str, version: int
) -> None:
    """Raise `ForeignFileError` if a config has another format than `name`, or another version."""
    if config.get("format") != name or config.get("version") != version:
        got = f"{config.get('format')} {config.get('version')}"
        raise ForeignFileError(
            "load", repr(str(folder)), f"{name} {version}", got, "Update this package"
        )


def load_one_save(path: str | os.PathLike[str], load: Callable[[dict[str, Any]], _Made]) -> _Made:
    """Load a folder by its config. Repeat the load if another process replaced the folder meanwhile.

    Args:
        path: The folder.
        load: Loads the save of a config; raises if a file has the id of another save.
    """
    num_reads = 0
    while True:
        place = existing_folder(path)
        config = read_config(path)
        num_reads += 1
        try:
            with as_damage(path):
                return load(config)
        except (RolloutDataError, OSError):
            has_same_place = (
                existing_folder(path) == place
            )  # not between the two renames of a saver
            is_same_save = has_same_place and read_config(path).get(SAVE_ID) == config.get(SAVE_ID)
            if is_same_save or num_reads == _MAX_READS:
                raise


@contextmanager
def as_damage(path: str | os.PathLike[str]) -> Iterator[None]:
    """Convert errors that wrong content of a folder causes to `CorruptFileError`; name the folder in every error."""
    try:
        yield
    except RolloutDataError as error:
        if str(path) not in error.where:
            error.where = f"{error.where} from {str(path)!r}".strip()
        raise
    except (*NONSENSE, OSError) as cause:
        # A wrong size: the system refused to map that many bytes.
        is_no_memory = isinstance(cause, OSError) and cause.errno == errno.ENOMEM
        is_damage = is_no_memory or isinstance(cause, NONSENSE)
        if not is_damage or isinstance(cause, torch.cuda.OutOfMemoryError):
            raise
        got = f"{type(cause).__name__}: {cause}"
        raise CorruptFileError("load", repr(str(path)), "what save() wrote", got) from cause


def device_for(saved: Any, wanted: torch.device | str | None) -> torch.device:
    """Return the device for a load: `wanted`, or the saved device if it exists, or the CPU with a warning."""
    if wanted is not None:
        return arguments.device("load", "device", wanted)
    device = torch.device(saved if isinstance(saved, str) else "cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        warnings.warn(
            f"{saved!r} is not here; the buffer is loaded onto the CPU",
            RolloutDataWarning,
            stacklevel=3,
        )
        return torch.device("cpu")
    return device
