"""Reader of ring buffers that BFM-Zero saves.

`buffer.hdf5` has flat datasets. `config.json` has the position of the next write. Rows are returned
in the order of writing. Classes named in the configuration are never imported. `load_buffer`, which
loads such files into memory, uses the same rules for dataset names and the number of written rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from storage.errors import CorruptFileError, SchemaError
from storage.saving.buffer_store import KEY_SEPARATOR, column_name, rows_written
from storage.saving.saved_folder import CONFIG_NAME

from ...sources.episode_info import EpisodeInfo
from ..format_detection import BFM_ZERO_BUFFER
from ..input_checks import file_inside, read_object
from .flat_episodes import FlatReader, RowRange, ends_of, our_name

#: Fields of a step that BFM-Zero stores in the group of the next observation.
_FIELDS_OF_STEP = ("next/reward", "next/terminated", "next/truncated")


class BfmZeroReader(FlatReader):
    """Reader of a saved ring buffer. A full ring may have overwritten the start of episode 0."""

    format = "bfm_zero"

    @property
    def file_path(self) -> Path:
        return self.path / BFM_ZERO_BUFFER

    def scan(self) -> Sequence[EpisodeInfo]:
        file_inside(self.path, BFM_ZERO_BUFFER)
        config = read_object(file_inside(self.path, CONFIG_NAME))
        self.metadata = {**config, **self.metadata}
        separator = str(config.get("nested_key_separator", "")) or KEY_SEPARATOR
        with self.files.use(self.file_path) as file:
            datasets = file.datasets("")
            names = _names(self.usable(datasets), separator)
            if not names:
                raise CorruptFileError(f"{file.where} has no datasets with steps.")
            num_rows = max(datasets[path].shape[0] for path in names)
            for part in _written_parts(config, num_rows, file.where):
                self.add_group(datasets, names, "", part)
        terminated = self.flags("terminated")
        truncated = self.flags("truncated")
        return self.cut(
            ends_of(terminated | truncated),
            terminated if "terminated" in self.columns else None,
            truncated if "truncated" in self.columns else None,
        )


def _names(paths: Sequence[str], separator: str) -> dict[str, str]:
    """Map the name of each dataset to the name of its field."""
    names = {path: our_name(column_name(path, separator)) for path in paths}
    for path, name in list(names.items()):
        own_name = name.removeprefix("next/")
        if name in _FIELDS_OF_STEP and own_name not in names.values():
            names[path] = own_name
    return names


def _written_parts(config: Mapping[str, Any], num_rows: int, where: str) -> list[RowRange]:
    """Return the ranges of written rows of a ring, oldest rows first.

    Args:
        config: Content of `config.json`.
        num_rows: Number of rows in the file.
        where: Name of the file in errors.
    """
    position = config.get("_idx")
    is_full = config.get("_is_full")
    capacity: Any = config.get("capacity", num_rows)
    try:
        if type(position) is not int or type(is_full) is not bool or type(capacity) is not int:
            raise TypeError("_idx and capacity must be integers, and _is_full a bool")
        total = rows_written(config, num_rows, capacity, rows_per_slot=1)
    except (SchemaError, TypeError, ValueError, ArithmeticError) as cause:
        raise CorruptFileError(
            f"{where} has {num_rows} rows, but its configuration has _idx {position!r}, _is_full "
            f"{is_full!r} and capacity {capacity!r}."
        ) from cause
    if total < capacity:
        return [RowRange("", 0, total)]
    cursor = total % capacity
    parts = [RowRange("", cursor, capacity - cursor)]
    if cursor:
        parts.append(RowRange("", 0, cursor))
    return parts
