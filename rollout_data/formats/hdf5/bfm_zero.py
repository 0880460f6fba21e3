"""Reader of ring buffers that BFM-Zero saves.

`buffer.hdf5` has flat datasets. `config.json` has the position of the next write. Rows are returned
in the order of writing. Classes named in the configuration are never imported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from storage.errors import CorruptFileError, SchemaError
from storage.saving.buffer_store import KEY_SEPARATOR, rows_written
from storage.saving.saved_folder import CONFIG_NAME

from ...sources.episode_info import EpisodeInfo
from ..format_detection import BFM_ZERO_BUFFER
from ..input_checks import file_inside, read_object
from .flat_episodes import FlatReader, RowRange, ends_of, our_name

#: Fields of a step that BFM-Zero stores in the group of the next observation.
_FIELDS_OF_STEP = ("next/reward", "next/terminated", "next/truncated")


class BfmZeroReader(FlatReader):
    """Reader of a saved ring buffer. In a full ring, the first episode may lack its beginning."""

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
            capacity = max(datasets[path].shape[0] for path in names)
            for part in _written_parts(config, capacity, file.where):
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
    names = {path: our_name(path.replace(separator, "/")) for path in paths}
    for path, name in list(names.items()):
        own_name = name.removeprefix("next/")
        if name in _FIELDS_OF_STEP and own_name not in names.values():
            names[path] = own_name
    return names


def _written_parts(config: Mapping[str, Any], capacity: int, where: str) -> list[RowRange]:
    """Return the ranges of written rows of a ring, oldest rows first."""
    position: Any = config.get("_idx")
    is_full: Any = config.get("_is_full")
    stated = config.get("capacity", capacity)
    try:
        if type(position) is not int or type(is_full) is not bool or stated != capacity:
            raise TypeError("numbers of other types, or of another capacity")
        total = rows_written(config, capacity if is_full else position, capacity, 1)
    except (SchemaError, TypeError, ValueError, ArithmeticError) as cause:
        raise CorruptFileError(
            f"{where} has {capacity} rows, but its configuration has _idx {position!r}, _is_full "
            f"{is_full!r} and capacity {stated!r}."
        ) from cause
    cursor = total % capacity
    parts = []
    if total >= capacity:
        parts.append(RowRange("", cursor, capacity - cursor))
    if cursor:
        parts.append(RowRange("", 0, cursor))
    return parts
