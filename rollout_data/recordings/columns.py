"""Many episodes at once: columns of the table, which fields each has, and rows of several side by side.

One rule: our own folders are asked as a whole, by arrays; other readers episode by episode.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from storage.core.fields import Schema
from storage.errors import CorruptFileError

from ..foreign.reader import ForeignReader
from ..format.header import DATA
from ..index.index import End, Int64s
from ..index.notes import Notes
from .own import ABSENT, FolderReader
from .table import column_of

Array = np.ndarray[Any, Any]
_ENDS = np.array(["open", "terminated", "truncated", "unknown"])


class ReaderColumns:
    """Of any reader."""

    def __init__(self, reader: ForeignReader) -> None:
        self._reader = reader

    def column(self, name: str) -> Array:
        """A column of the table of all episodes; returns are NaN."""
        return column_of(self._reader.episodes, name)

    def schemas(self) -> tuple[Int64s, list[Schema]]:
        """Which fields each episode has: int64 `[num_episodes]`, places in the list of schemas."""
        places: dict[Schema, int] = {}
        which = [places.setdefault(info.schema, len(places)) for info in self._reader.episodes]
        return np.array(which, np.int64), list(places)

    def read(self, numbers: Int64s, names: Sequence[str], starts: Int64s, counts: Int64s) -> dict[str, Any]:
        """Read some steps of each of several episodes, one after the other: name -> `[sum of counts, *shape]`."""
        pieces = zip(numbers.tolist(), starts.tolist(), (starts + counts).tolist(), strict=True)
        parts = [self._reader.read_fields(number, names, start, stop) for number, start, stop in pieces]
        return parts[0] if len(parts) == 1 else {name: np.concatenate([part[name] for part in parts]) for name in names}


class OwnColumns(ReaderColumns):
    """Of a folder of our own: from its index and its notes; episode by episode where a note is damaged."""

    def __init__(self, reader: FolderReader) -> None:
        super().__init__(reader)
        self._store = reader.store
        fields = [one for one in reader.store.layouts[DATA].schema.values() if not one.is_text]
        self._schema = Schema(fields)

    def column(self, name: str) -> Array:
        if self._columns is None:
            return super().column(name)
        index = self._store.index
        named = np.array([writer[writer.find(":") + 1 :] for writer in index.writers] or [""])[index.writer]
        if name == "id":
            return np.char.add(np.char.add(named, ":"), index.number.astype(str))
        if name == "ends":
            found: Array = _ENDS[np.where((index.end == End.UNKNOWN) & index.is_end_unknown(), 3, index.end)]
            return found
        if name in ("length", "return"):
            return index.lengths if name == "length" else np.full(len(index), np.nan)
        if name == "success":
            return np.array([int(one) if isinstance(one, bool) else -1 for one in self._noted(name)], np.int8)
        # What is noted of a converted episode comes before what the file says.
        known = {"env": index.env.astype(np.int64), "writer": named, "time": index.end_time_ns}
        values = known.get(name, np.full(len(index), ""))
        told = self._noted("end_time_ns" if name == "time" else name)
        kind = str if values.dtype.kind == "U" else int
        if any(type(one) is kind for one in told):
            values = np.array([a if type(a) is kind else b for a, b in zip(told, values.tolist(), strict=True)])
        return (
            np.where(values == 0, np.datetime64("NaT"), values.astype("datetime64[ns]")) if name == "time" else values
        )

    def schemas(self) -> tuple[Int64s, list[Schema]]:
        if self._columns is None:
            return super().schemas()
        places: dict[Schema, int] = {}
        which = [places.setdefault(self._without(names or ()), len(places)) for names in self._noted(ABSENT)]
        return np.array(which, np.int64), list(places)

    def _noted(self, name: str) -> list[Any]:
        """Give what was noted under a name, for each episode; None where nothing was."""
        return (self._columns or {}).get(name) or [None] * len(self._store.index)

    @cached_property
    def _columns(self) -> dict[str, list[Any]] | None:
        """What was noted under all names that are asked for, each note parsed once; None if one is damaged."""
        try:
            return Notes().columns(self._store, {"env", "writer", "end_time_ns", "success", "task", ABSENT})
        except CorruptFileError:
            return None

    def _without(self, absent: Sequence[str]) -> Schema:
        return Schema(one for one in self._schema.values() if one.name not in absent) if absent else self._schema

    def read(self, numbers: Int64s, names: Sequence[str], starts: Int64s, counts: Int64s) -> dict[str, Any]:
        column_of, found = self._store.layouts[DATA].column_of, dict[str, Any]()
        for column in {column_of[name].name: column_of[name] for name in names}.values():
            rows = self._store.rows(column.name, numbers, starts, counts)
            found |= {name: self._store.array((DATA, name), rows) for name in names if name in column.offsets}
        return found
