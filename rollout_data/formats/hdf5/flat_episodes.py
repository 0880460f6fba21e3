"""Base of readers of flat datasets: the steps of all episodes in sequence, with end flags.

An episode is a range of rows. The row after its last row belongs to the next episode.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from storage.core.fields import DTYPES, Field, Schema
from storage.errors import CorruptFileError

from ...sources.episode_info import EpisodeInfo
from ...sources.file_source import FileSource
from .hdf5_datasets import DatasetInfo, Files, OpenFile
from .hdf5_episodes import DatasetColumn, row_shape

#: Maps the first part of dataset names to the first part of field names.
_OUR_NAMES = {
    "observations": "observation",
    "obs": "observation",
    "actions": "action",
    "rewards": "reward",
    "terminals": "terminated",
    "timeouts": "truncated",
}
#: Number of rows of flags that are read at a time.
_FLAGS_AT_ONCE = 1 << 22
#: Maximum number of episodes of a file. An episode needs 0.5 kB of memory.
_MAX_EPISODES = 1 << 20
Array = np.ndarray[Any, Any]


class RowRange(NamedTuple):
    """Consecutive rows of all datasets in a group.

    Attributes:
        group: Path of the group; "" for the root.
        first: First row.
        num_rows: Number of rows.
    """

    group: str
    first: int
    num_rows: int


def our_name(path: str) -> str:
    """Return the field name of a dataset: "observation/a" for "observations/a"."""
    head, *rest = path.split("/")
    parts = (_OUR_NAMES.get(head, head), *rest)
    return "/".join(filter(None, parts))


class FlatReader(FileSource):
    """Base of readers whose episodes are ranges of rows in shared datasets.

    Attributes:
        parts: Row ranges of all steps, in order. Each range is in one group.
        columns: Maps field names to datasets. Their paths are relative to the group of a part.
        following: Maps fields with the observation after a step to the field with the observation
            before it, such as "next_observations" to "observation".
    """

    def __init__(self, path: Path, options: Mapping[str, Any]) -> None:
        self.files = Files()
        self.parts: list[RowRange] = []
        self.columns: dict[str, DatasetColumn] = {}
        self.following: dict[str, str] = {}
        super().__init__(path, options)

    @property
    @abstractmethod
    def file_path(self) -> Path:
        """The HDF5 file with the rows of all episodes."""

    @property
    def num_rows(self) -> int:
        """Total number of rows of all parts."""
        return sum(part.num_rows for part in self.parts)

    def add_group(
        self,
        datasets: Mapping[str, DatasetInfo],
        names: Mapping[str, str],
        group: str,
        part: RowRange | None = None,
    ) -> None:
        """Append the rows of an HDF5 group to the steps. All groups must have the same datasets.

        Args:
            datasets: Maps dataset names of the group to their descriptions.
            names: Maps the name of each dataset to read to the name of its field.
            group: Path of the group.
            part: Rows to read; None means all rows.

        Raises:
            CorruptFileError: The datasets have different numbers of rows, or differ from the
                datasets of the previous groups.
        """
        where = repr(str(self.file_path))
        if group:
            where = f"{group!r} of {where}"
        num_rows = max((datasets[path].shape[0] for path in names), default=0)
        columns = {}
        for path, name in names.items():
            info = datasets[path]
            if info.shape[0] != num_rows:
                raise CorruptFileError(
                    f"{where} has {info.shape[0]} rows of {path!r}, expected {num_rows}.",
                    kind="counts",
                )
            columns[name] = DatasetColumn(path, row_shape(name, info), info.kind)
        if self.parts and self.columns != columns:
            raise CorruptFileError(f"{where} has different datasets from the previous groups.")
        self.columns = columns
        self.following = _following(columns)
        self.parts.append(part or RowRange(group, 0, num_rows))

    def usable(self, datasets: Mapping[str, DatasetInfo]) -> list[str]:
        """Return the names of numeric datasets. Other datasets with rows are reported."""
        usable = []
        where = repr(str(self.file_path))
        for path, info in datasets.items():
            if info.kind in DTYPES and info.shape:
                usable.append(path)
            elif info.shape:
                self.problem(f"{path!r} of {where} contains no numbers. The dataset is left out.")
        return usable

    def read_rows(self, name: str, start: int, stop: int) -> Array:
        """Read rows of a field, `[stop - start, *shape]`. Rows are numbered across all parts."""
        column = self.columns[name]
        pieces = []
        first = 0
        with self.files.use(self.file_path) as file:
            for part in self.parts:
                low = max(start - first, 0)
                high = min(stop - first, part.num_rows)
                if low < high:
                    pieces.append(_rows_of_part(file, part, column, low, high))
                first += part.num_rows
        if not pieces:
            return np.empty((0, *column.shape), DTYPES[column.kind][1])
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def flags(self, name: str) -> Array:
        """Read a flag field of all steps: bool `[rows]`; all False if the field does not exist."""
        num_rows = self.num_rows
        if name not in self.columns:
            return np.zeros(num_rows, bool)
        flags = np.zeros((num_rows, 1), bool)
        for start in range(0, num_rows, _FLAGS_AT_ONCE):
            stop = min(start + _FLAGS_AT_ONCE, num_rows)
            values = self.read_rows(name, start, stop).reshape(stop - start, -1)
            if values.shape[1] != 1:
                raise CorruptFileError(
                    f"{name!r} of {str(self.file_path)!r} has {values.shape[1]} values per step, "
                    "expected 1."
                )
            flags[start:stop] = values != 0
        return flags[:, 0]

    def cut(
        self,
        stops: Array,
        terminated: Array | None,
        truncated: Array | None,
    ) -> list[EpisodeInfo]:
        """Divide the rows into episodes, and return the descriptions of the episodes.

        Args:
            stops: int `[episodes]`, ascending: one past the last row of each episode.
            terminated: bool `[rows]`; None if unknown.
            truncated: bool `[rows]`; None if unknown.
        """
        where = repr(str(self.path))
        if not len(stops):
            raise CorruptFileError(f"{where} has no steps.")
        if len(stops) > _MAX_EPISODES:
            raise CorruptFileError(
                f"{where} has {len(stops)} episodes, expected at most {_MAX_EPISODES}."
            )
        columns = self.columns.items()
        fields = {name: Field(name, column.shape, column.kind) for name, column in columns}
        final = []
        for name, observation in self.following.items():
            column = self.columns[name]
            final.append(Field(observation, column.shape, column.kind))
        final_schema = Schema(final)
        fields.pop("terminated", None)
        fields.pop("truncated", None)
        schema = Schema(fields.values())

        episodes = []
        start = 0
        for number, stop in enumerate(stops.tolist()):
            last = stop - 1
            info = EpisodeInfo(
                name=str(number),
                length=stop - start,
                schema=schema,
                final=final_schema,
                terminated=None if terminated is None else bool(terminated[last]),
                truncated=None if truncated is None else bool(truncated[last]),
                source=start,
            )
            episodes.append(info)
            start = stop
        return episodes

    def read(self, number: int, name: str, start: int, stop: int) -> Any:
        first: int = self.episodes[number].source
        return self.read_rows(name, first + start, first + stop)

    def read_final(self, number: int, name: str) -> Array:
        info = self.episodes[number]
        stop: int = info.source + info.length
        sources = {observation: column for column, observation in self.following.items()}
        return np.asarray(self.read_rows(sources[name], stop - 1, stop)[0])


def _following(columns: Mapping[str, DatasetColumn]) -> dict[str, str]:
    """Map each field with observations after a step to the field with those before the step."""
    following = {}
    for name in columns:
        if name.startswith("next"):
            # Names such as "next_observations" and "next/observation" both occur.
            observation = our_name(re.sub("^next[/_]", "", name))
            if observation in columns and observation != name:
                following[name] = observation
    return following


def ends_of(ends: Array) -> Array:
    """Return the index after the last row of each episode. Rows after the last end form an episode.

    Args:
        ends: bool `[rows]`: whether an episode ends with the row.
    """
    stops = np.flatnonzero(ends) + 1
    last = stops[-1] if len(stops) else 0
    return np.append(stops, len(ends)) if len(ends) > last else stops


def _rows_of_part(
    file: OpenFile, part: RowRange, column: DatasetColumn, low: int, high: int
) -> Array:
    """Read the rows `low:high` of a part. Rows are counted from the first row of the part."""
    info = file.datasets(part.group)[column.path]
    if info.kind != column.kind or info.shape[0] < part.first + part.num_rows:
        raise CorruptFileError(
            f"{column.path!r} of {file.where} has changed since it was opened. Open the recording "
            "again."
        )
    path = f"{part.group}/{column.path}"
    rows: Array = file.rows(path, info, part.first + low, part.first + high)
    return rows.reshape(high - low, *column.shape)
