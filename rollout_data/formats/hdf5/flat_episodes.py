"""Files in which the steps of all episodes stand one after the other, and flags tell where each ends.

One rule: an episode is a range of rows, and the row after its last one belongs to another.
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

from ...sources.episode_reader import EpisodeInfo, ForeignReader
from .hdf5_datasets import Files, Found, OpenFile
from .hdf5_episodes import Column

#: First part of a dataset's name -> ours.
_HEADS = {
    "observations": "observation",
    "obs": "observation",
    "actions": "action",
    "rewards": "reward",
    "terminals": "terminated",
    "timeouts": "truncated",
}
#: Flags are read in pieces of as many rows.
_FLAGS_AT_ONCE = 1 << 22
#: Each episode takes half a kilobyte.
_MAX_EPISODES = 1 << 20
Array = np.ndarray[Any, Any]


class Part(NamedTuple):
    """A run of rows of the datasets in a group."""

    group: str
    first: int
    num_rows: int


def our_name(path: str) -> str:
    """Return our name of a dataset."""
    head, *rest = path.split("/")
    return "/".join(part for part in (_HEADS.get(head, head), *rest) if part)


class FlatReader(ForeignReader):
    """Reads ranges of rows.

    Attributes:
        parts: Where the rows lie, in order.
        columns: Our name -> dataset in the group of each part.
        following: Names in `columns` of the observations after each step -> our name of the observation.
    """

    def __init__(self, path: Path, options: Mapping[str, Any]) -> None:
        self.files = Files()
        self.parts = list[Part]()
        self.columns: dict[str, Column] = {}
        self.following: dict[str, str] = {}
        super().__init__(path, options)

    @property
    @abstractmethod
    def file_path(self) -> Path:
        """The file with the rows."""

    @property
    def num_rows(self) -> int:
        return sum(part.num_rows for part in self.parts)

    def take(self, found: Mapping[str, Found], names: Mapping[str, str], group: str, part: Part | None = None) -> None:
        """Add the datasets of a group to the steps; those of a later group must be the same.

        Args:
            found: The datasets.
            names: Those to take -> our names.
            group: Which group they are in.
            part: Which rows; None for all.

        Raises:
            CorruptFileError: They differ in their rows, or from those of the groups before.
        """
        where = f"{group!r} of {str(self.file_path)!r}" if group else repr(str(self.file_path))
        num_rows = max((found[path].shape[0] for path in names), default=0)
        columns = {}
        for path, name in names.items():
            if (got := found[path].shape[0]) != num_rows:
                raise CorruptFileError("read", where, f"{num_rows} rows of {path!r}", str(got)).of("counts")
            shape = () if name == "reward" and found[path].shape[1:] == (1,) else found[path].shape[1:]
            columns[name] = Column(path, shape, found[path].kind)
        if self.parts and self.columns != columns:
            raise CorruptFileError("read", where, "the datasets of the groups before it", "others")
        observed = {name: our_name(re.sub("^next[/_]", "", name)) for name in columns if name.startswith("next")}
        self.following = {name: ours for name, ours in observed.items() if ours in columns.keys() - {name}}
        self.columns = columns
        self.parts.append(part or Part(group, 0, num_rows))

    def usable(self, found: Mapping[str, Found]) -> list[str]:
        """Name the datasets of numbers with rows; notes the others that look like steps."""
        usable = [path for path, one in found.items() if one.kind in DTYPES and one.shape]
        for path in found:
            if path not in usable and len(found[path].shape) > 0:
                self.problem("read the dataset", f"{path!r} of {str(self.file_path)!r}", "numbers", "another type")
        return usable

    def rows(self, name: str, start: int, stop: int) -> Array:
        """Read rows of a field, counted over all parts: `[stop - start, *shape]`."""
        column = self.columns[name]
        pieces = []
        with self.files.use(self.file_path) as file:
            for part in self.parts:
                low = max(start, 0)
                high = min(stop, part.num_rows)
                if low < high:
                    pieces.append(_piece(file, part, column, low, high))
                start = start - part.num_rows
                stop = stop - part.num_rows
        if not pieces:
            return np.empty((0, *column.shape), DTYPES[column.kind][1])
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def flags(self, name: str) -> Array:
        """Read a field of truth values of all steps: bool `[rows]`; all false if there is none."""
        num_rows = self.num_rows
        if name not in self.columns:
            return np.zeros(num_rows, bool)
        starts = range(0, num_rows, _FLAGS_AT_ONCE)
        pieces = [self.rows(name, start, min(start + _FLAGS_AT_ONCE, num_rows)) != 0 for start in starts]
        flat = np.concatenate(pieces).reshape(num_rows, -1) if pieces else np.zeros((0, 1), bool)
        if flat.shape[1] != 1:
            where = f"{name!r} of {str(self.file_path)!r}"
            raise CorruptFileError("read", where, "one value a step", f"{flat.shape[1]}")
        return flat[:, 0]

    def cut(self, stops: Array, terminated: Array | None, truncated: Array | None) -> list[EpisodeInfo]:
        """Make episodes of ranges of rows.

        Args:
            stops: int `[episodes]`, ascending: one past the last row of each.
            terminated: bool `[rows]`; None if it is not told.
            truncated: bool `[rows]`; None if it is not told.
        """
        if not len(stops):
            raise CorruptFileError("read", repr(str(self.path)), "a step", "none")
        if len(stops) > _MAX_EPISODES:
            raise CorruptFileError("read", repr(str(self.path)), f"at most {_MAX_EPISODES} episodes", f"{len(stops)}")
        flags = ("terminated", "truncated")
        fields = {name: (one.shape, one.kind) for name, one in self.columns.items() if name not in flags}
        schema = Schema(Field(name, *kind) for name, kind in fields.items())
        final = Schema(Field(ours, *fields[name]) for name, ours in self.following.items())
        starts = np.concatenate([[0], stops[:-1]])
        return [
            EpisodeInfo(
                str(number),
                stop - start,
                schema,
                final=final,
                terminated=None if terminated is None else bool(terminated[stop - 1]),
                truncated=None if truncated is None else bool(truncated[stop - 1]),
                source=start,
            )
            for number, (start, stop) in enumerate(zip(starts.tolist(), stops.tolist(), strict=True))
        ]

    def read(self, number: int, name: str, start: int, stop: int) -> Any:
        first: int = self.episodes[number].source
        return self.rows(name, first + start, first + stop)

    def read_final(self, number: int, name: str) -> Array:
        info = self.episodes[number]
        last: int = info.source + info.length
        (path,) = [following for following, ours in self.following.items() if ours == name]
        return np.asarray(self.rows(path, last - 1, last)[0])


def ends_of(ends: Array) -> Array:
    """Return one past the last row of each episode; rows after the last end are an episode too."""
    stops = np.flatnonzero(ends) + 1
    is_open = len(ends) > (stops[-1] if len(stops) else 0)
    return np.append(stops, len(ends)) if is_open else stops


def _piece(file: OpenFile, part: Part, column: Column, low: int, high: int) -> Array:
    found = file.survey(part.group)[column.path]
    if found.kind != column.kind or found.shape[0] < part.first + part.num_rows:
        raise CorruptFileError("read", f"{column.path!r} of {file.where}", "the dataset as it was", "another")
    rows: Array = file.rows(f"{part.group}/{column.path}", found, part.first + low, part.first + high)
    return rows.reshape(high - low, *column.shape)
