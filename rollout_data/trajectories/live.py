"""Which trajectories are live, oldest first, and the windows that may be drawn from.

One rule: what is counted is what is live; a window is made again only after something changed, from numbers
that are kept meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import compress, islice

import numpy as np

from storage.errors import BufferEmptyError, SchemaError
from storage.fields import Field

from .cache import TrajectoryCache
from .files import id_in_name
from .index import Entry
from .table import TrajectoryTable
from .window import Window

#: Windows of so many different conditions are kept.
_MAX_WINDOWS = 8


class LiveTrajectories:
    """The live trajectories of a buffer; called under its lock.

    Args:
        window_size: How many of the newest may be drawn from; 0 for all.
        capacity: How many are kept; None for any number.

    Attributes:
        entries: Id -> entry, oldest first.
        fields: Every field that any of them had, so that none changes its dtype or shape.
        num_samples: Steps of all.
    """

    def __init__(self, window_size: int, capacity: int | None) -> None:
        self._window_size, self._capacity = window_size, capacity
        self.entries: dict[int, Entry] = {}
        self.fields: dict[str, Field] = {}
        self.num_samples = 0
        self._table = TrajectoryTable()
        self._windows: dict[int | None, Window] = {}

    def append(self, entry: Entry) -> list[Entry]:
        """Make an entry live; give those, the oldest, that are not any more."""
        check_fields(self.fields, entry.layout.schema.values())
        self.entries[entry.trajectory_id] = entry
        self.num_samples += entry.num_samples
        self._table.append(entry)
        num_over = 0 if self._capacity is None else len(self.entries) - self._capacity
        ids = list(islice(self.entries, max(0, num_over)))
        self._table.drop_first(ids)
        gone = [self.entries.pop(one) for one in ids]
        self.num_samples -= sum(one.num_samples for one in gone)
        self._windows.clear()
        return gone

    def kept(self, entries: list[Entry]) -> list[Entry]:
        """Say which of these, oldest first, would be live if they were appended now, with nothing before.

        Those that several ranks have saved come one rank after the other: their ids, which all ranks count up
        side by side, tell when; not so if ranks have given the same ids, for which new ones stand here. One
        folder tells by the order in which it lists them.
        """
        paths = [entry.path for entry in entries if entry.path is not None]
        ids = [entry.trajectory_id for entry in entries]
        if len({path.parent for path in paths}) > 1 and ids == [id_in_name(path) for path in paths]:
            entries = sorted(entries, key=lambda entry: entry.trajectory_id)
        return entries if self._capacity is None else entries[-self._capacity :]

    def moved(self, trajectory_id: int) -> None:
        """Note that a trajectory, if it is live, lies elsewhere than before."""
        if self._table.moved(trajectory_id):
            self._windows.clear()

    def window(self, cache: TrajectoryCache | None, min_weights_version: int | None) -> Window:
        """Give what may be drawn from.

        Raises:
            BufferEmptyError: Nothing.
        """
        window = self._windows.get(min_weights_version)
        if window is None:
            rows = self._table.newest(self._window_size, self.entries, cache)
            entries = list(islice(reversed(self.entries.values()), len(rows)))[::-1]
            if min_weights_version is not None:
                is_recent = [entry.is_recent(min_weights_version) for entry in entries]
                rows, entries = rows[np.array(is_recent, bool)], list(compress(entries, is_recent))
            if not entries:
                got = "none" if min_weights_version is None else f"none of version {min_weights_version} or later"
                raise BufferEmptyError("sample", "", "at least one trajectory", got)
            if len(self._windows) >= _MAX_WINDOWS:
                self._windows.clear()
            window = self._windows[min_weights_version] = Window(entries, rows, self._table.layouts)
        return window


def check_fields(known: dict[str, Field], fields: Iterable[Field]) -> None:
    """Raise `SchemaError` if a field has another dtype or shape than it is known with; note new ones."""
    for one in fields:
        before = known.setdefault(one.name, one)
        if (before.dtype, before.shape) != (one.dtype, one.shape):
            expected, got = (f"{each.dtype}{list(each.shape)} per step" for each in (before, one))
            raise SchemaError("store the leaf", repr(one.name), expected, got)
