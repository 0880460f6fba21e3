"""Folders of saved stores: `config.json` and one HDF5 file per table.

A table is a set of columns with equal numbers of rows. All files of a folder contain the same save
id, a random text. If another process replaces the folder during a read, the read is repeated.
Errors about the content name the folder.
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
#: Name of the only table of a store, unless the store is a `BufferStore`.
COLUMNS = "columns"
#: Name of the table with the rows of a `BufferStore`.
ROWS = "buffer"
#: Name of the table with the final observations of a `BufferStore`.
FINALS = "finals"
#: Suffix of the files of tables.
SUFFIX = ".hdf5"
_OWN_NAMES = frozenset({CONFIG_NAME, *(table + SUFFIX for table in (COLUMNS, ROWS, FINALS))})
#: Errors that Python and torch raise if a damaged file contains values of wrong types or sizes.
NONSENSE = (
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RuntimeError,
    TypeError,
    ValueError,
)
#: Maximum number of attempts to load a folder that other processes replace during each attempt.
_MAX_LOADS = 1000
#: Maximum number of attempts to open a config while its folder is replaced.
_MAX_CONFIG_READS = 10
_Made = TypeVar("_Made")


class MissingSaveError(DataFileError, FileNotFoundError):
    """A folder to be loaded does not exist."""


def write_folder(
    folder: str | os.PathLike[str],
    tables: Mapping[str, Mapping[str, torch.Tensor]],
    config: Mapping[str, Any],
) -> None:
    """Write a store to a folder atomically, and replace an earlier save.

    Args:
        folder: Folder to write.
        tables: Columns of each table, by the name of the table. Each table becomes one file.
        config: Content of `config.json`.

    Raises:
        DataFileError: The path is a file, or a folder with other content.
        WriteError: The disk is full.
    """
    save_id = secrets.token_hex(8)
    with replace_folder(folder, _OWN_NAMES) as new:
        for name, columns in tables.items():
            write_columns(new / f"{name}{SUFFIX}", columns, save_id)
        write_json(new / CONFIG_NAME, {**config, SAVE_ID: save_id})


def read_config(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Read `config.json` of a folder, even while another process replaces the folder."""
    for _ in range(_MAX_CONFIG_READS):
        try:
            return read_json(existing_folder(folder) / CONFIG_NAME)
        except (FileNotFoundError, NotADirectoryError) as error:
            # Retry, since another process may be replacing the folder.
            cause = error
    raise MissingSaveError(
        f"{str(folder)!r} does not exist, or does not contain the file {CONFIG_NAME}."
    ) from cause


def check_version(
    folder: str | os.PathLike[str], config: Mapping[str, Any], name: str, version: int
) -> None:
    """Check that a config has the format `name` and the version `version`."""
    if config.get("format") != name or config.get("version") != version:
        raise ForeignFileError(
            f"{str(folder)!r} has the format {config.get('format')!r} of version "
            f"{config.get('version')}, expected {name!r} of version {version}. Update this package "
            "if the version is newer."
        )


def load_one_save(path: str | os.PathLike[str], load: Callable[[dict[str, Any]], _Made]) -> _Made:
    """Load a folder whose files are all from one save, even if another process replaces it.

    Args:
        path: Folder to load.
        load: Function that maps the config to the loaded object. It raises an error if a file has
            the id of another save. It is called again if the folder was replaced.
    """
    num_loads = 0
    while True:
        place = existing_folder(path)
        config = read_config(path)
        num_loads += 1
        try:
            with as_damage(path):
                return load(config)
        except (RolloutDataError, OSError):
            # While a folder is replaced, its content has another path for a moment.
            has_same_place = existing_folder(path) == place
            is_same_save = has_same_place and read_config(path).get(SAVE_ID) == config.get(SAVE_ID)
            if is_same_save or num_loads == _MAX_LOADS:
                raise


@contextmanager
def as_damage(path: str | os.PathLike[str]) -> Iterator[None]:
    """Convert errors that damaged content causes to `CorruptFileError`, and name the folder."""
    try:
        yield
    except RolloutDataError as error:
        if str(path) not in error.message:
            error.message = f"{str(path)!r} cannot be loaded: {error.message}"
        raise
    except (*NONSENSE, OSError) as cause:
        # A wrong size in a damaged file causes ENOMEM, if memory of this size cannot be mapped.
        is_no_memory = isinstance(cause, OSError) and cause.errno == errno.ENOMEM
        is_damage = is_no_memory or isinstance(cause, NONSENSE)
        if not is_damage or isinstance(cause, torch.cuda.OutOfMemoryError):
            raise
        raise CorruptFileError(
            f"{str(path)!r} is damaged: {type(cause).__name__}: {cause}."
        ) from cause


def device_for(saved: Any, wanted: torch.device | str | None) -> torch.device:
    """Return the device onto which a store is loaded: `wanted`, by default the saved device.

    If the saved device does not exist, the result is the CPU, and a warning is issued.
    """
    if wanted is not None:
        return arguments.device("device", wanted)
    device = torch.device(saved if isinstance(saved, str) else "cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        warnings.warn(
            f"The saved device {saved!r} does not exist. The buffer is loaded onto the CPU.",
            RolloutDataWarning,
            stacklevel=3,
        )
        return torch.device("cpu")
    return device
