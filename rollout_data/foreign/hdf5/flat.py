"""Files in which the steps of all episodes stand one after the other, and flags tell where each ends.

One rule: an episode is a range of rows, and the row after its last one belongs to another.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from storage.core.fields import DTYPES, Field, Schema
from storage.errors import CorruptFileError

from ..reader import EpisodeInfo, ForeignReader
from .files import Files, Found, OpenFile

#: Flags are read in pieces of as many rows.
_FLAGS_AT_ONCE = 1 << 22
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Part:
    """A run of rows of the datasets in a group."""

    group: str
    first: int
    num_rows: int


@dataclass
class Steps:
    """All steps of a file.

    Attributes:
        parts: Where they lie, in order.
        fields: Name of ours -> dataset in the group of each part.
        shapes: Name of ours -> shape of a row.
        kinds: Name of ours -> key of `DTYPES`.
        final: Names in `fields` that are the observations after each step -> our name of the observation.
    """

    parts: list[Part] = field(default_factory=list)
    fields: dict[str, str] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)
    final: dict[str, str] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        return sum(part.num_rows for part in self.parts)


class FlatReader(ForeignReader):
    """Reads ranges of rows."""

    def __init__(self, path: Path, options: Mapping[str, Any]) -> None:
        self.files, self.steps = Files(), Steps()
        super().__init__(path, options)

    @property
    @abstractmethod
    def file_path(self) -> Path:
        """The file with the rows."""

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
        rows = {path: found[path].shape[0] for path in names}
        num_rows = max(rows.values(), default=0)
        for path, got in rows.items():
            if got != num_rows:
                raise CorruptFileError("read", where, f"{num_rows} rows of {path!r}", str(got))
        fields = {name: path for path, name in names.items()}
        kinds = {name: found[path].kind for path, name in names.items()}
        shapes = {name: _row_shape(name, found[path].shape[1:]) for path, name in names.items()}
        if self.steps.parts and (self.steps.fields, self.steps.shapes, self.steps.kinds) != (fields, shapes, kinds):
            raise CorruptFileError("read", where, "the datasets of the groups before it", "others")
        self.steps.fields, self.steps.shapes, self.steps.kinds = fields, shapes, kinds
        self.steps.parts.append(part or Part(group, 0, num_rows))

    def usable(self, found: Mapping[str, Found]) -> list[str]:
        """Name the datasets of numbers with rows; notes the others that look like steps."""
        usable = [path for path, one in found.items() if one.kind in DTYPES and one.shape]
        for path in found:
            if path not in usable and len(found[path].shape) > 0:
                self.problem("read the dataset", f"{path!r} of {str(self.file_path)!r}", "numbers", "another type")
        return usable

    def rows(self, name: str, start: int, stop: int) -> Array:
        """Read rows of a field, counted over all parts: `[stop - start, *shape]`."""
        pieces = []
        with self.files.use(self.file_path) as file:
            for part in self.steps.parts:
                low, high = max(start, 0), min(stop, part.num_rows)
                if low < high:
                    pieces.append(self._piece(file, part, name, low, high))
                start, stop = start - part.num_rows, stop - part.num_rows
        if not pieces:
            return np.empty((0, *self.steps.shapes[name]), DTYPES[self.steps.kinds[name]][1])
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def _piece(self, file: OpenFile, part: Part, name: str, low: int, high: int) -> Array:
        path = self.steps.fields[name]
        found = file.survey(part.group)[path]
        if found.kind != self.steps.kinds[name] or found.shape[0] < part.first + part.num_rows:
            raise CorruptFileError("read", f"{path!r} of {file.where}", "the dataset as it was", "another")
        rows: Array = file.rows(f"{part.group}/{path}", found, part.first + low, part.first + high)
        return rows.reshape(high - low, *self.steps.shapes[name])

    def flags(self, name: str) -> Array:
        """Read a field of truth values of all steps: bool `[rows]`; all false if there is none."""
        num_rows = self.steps.num_rows
        if name not in self.steps.fields:
            return np.zeros(num_rows, bool)
        starts = range(0, num_rows, _FLAGS_AT_ONCE)
        pieces = [self.rows(name, start, min(start + _FLAGS_AT_ONCE, num_rows)) != 0 for start in starts]
        flat = np.concatenate(pieces).reshape(num_rows, -1) if pieces else np.zeros((0, 1), bool)
        if flat.shape[1] != 1:
            raise CorruptFileError(
                "read", f"{name!r} of {str(self.file_path)!r}", "one value a step", f"{flat.shape[1]}"
            )
        return flat[:, 0]

    def cut(self, stops: Array, terminated: Array | None, truncated: Array | None) -> list[EpisodeInfo]:
        """Make episodes of ranges of rows.

        Args:
            stops: int `[episodes]`, ascending: one past the last row of each.
            terminated: bool `[rows]`; None if it is not told.
            truncated: bool `[rows]`; None if it is not told.
        """
        flags = [name for name in self.steps.fields if name in ("terminated", "truncated")]
        schema = Schema(
            Field(name, self.steps.shapes[name], self.steps.kinds[name])
            for name in self.steps.fields
            if name not in flags
        )
        final = Schema(Field(ours, schema[name].shape, schema[name].dtype) for name, ours in self.steps.final.items())
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
        (path,) = [following for following, ours in self.steps.final.items() if ours == name]
        return np.asarray(self.rows(path, last - 1, last)[0])


def ends_of(ends: Array) -> Array:
    """Give one past the last row of each episode; rows after the last end are an episode too."""
    stops = np.flatnonzero(ends) + 1
    is_open = len(ends) > (stops[-1] if len(stops) else 0)
    return np.append(stops, len(ends)) if is_open else stops


def _row_shape(name: str, shape: Sequence[int]) -> tuple[int, ...]:
    """Give the shape of a row; one reward is a number."""
    return () if name == "reward" and tuple(shape) == (1,) else tuple(shape)
