"""Numbers of the live trajectories, one row each: how many steps, which layout, where the rows lie.

One rule: what changed is noted at once and looked up when a window is wanted, so that adding a trajectory
costs the same however many there are.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from .cache import Cached, TrajectoryCache
from .index import Entry
from .rows import TrajectoryLayout

#: Where a trajectory's rows are: in the cache, in a mapped file, or elsewhere (to be read whole).
CACHED, MAPPED, ELSEWHERE = range(3)
#: `first` is the row in the block of the cache; 0 where the rows are not cached.
ROW_DTYPE = np.dtype([("size", "i8"), ("first", "i8"), ("layout", "i4"), ("source", "i1")])
Rows = npt.NDArray[np.void]
_FIRST_ROOM = 64


class TrajectoryTable:
    """Rows of `ROW_DTYPE`, oldest trajectory first; grows at the end, shrinks at the front.

    Attributes:
        layouts: What the column `layout` counts.
    """

    def __init__(self) -> None:
        self.layouts: list[TrajectoryLayout] = []
        self._numbers: dict[TrajectoryLayout, int] = {}
        self._rows = np.zeros(_FIRST_ROOM, ROW_DTYPE)
        self._start = self._stop = 0
        #: Id -> how many rows there were before it since the beginning.
        self._order: dict[int, int] = {}
        self._num_dropped = 0
        self._moved: set[int] = set()

    def append(self, entry: Entry) -> None:
        """Add a row; where the trajectory lies is looked up later."""
        if self._stop == len(self._rows):
            self._make_room()
        number = self._numbers.setdefault(entry.layout, len(self.layouts))
        if number == len(self.layouts):
            self.layouts.append(entry.layout)
        self._rows[self._stop] = (entry.num_samples, 0, number, ELSEWHERE)
        self._order[entry.trajectory_id] = self._num_dropped + self._stop - self._start
        self._stop += 1
        self._moved.add(entry.trajectory_id)

    def drop_first(self, trajectory_ids: Iterable[int]) -> None:
        """Remove the oldest rows, which are those of `trajectory_ids`."""
        for one in trajectory_ids:
            place = self._order.pop(one)
            assert place == self._num_dropped, "the oldest go first"
            self._moved.discard(one)
            self._start += 1
            self._num_dropped += 1

    def moved(self, trajectory_id: int) -> bool:
        """Note that a trajectory lies elsewhere than before; tell whether it has a row."""
        if trajectory_id not in self._order:
            return False
        self._moved.add(trajectory_id)
        return True

    def newest(self, number: int, entries: dict[int, Entry], cache: TrajectoryCache | None) -> Rows:
        """Copy the rows of the newest trajectories, of all if `number` is 0."""
        for one in self._moved:
            row = self._rows[self._start + self._order[one] - self._num_dropped]
            row["source"], row["first"] = _place(entries[one], cache)
        self._moved.clear()
        start = self._start if not number else max(self._start, self._stop - number)
        return self._rows[start : self._stop].copy()

    def _make_room(self) -> None:
        live = self._rows[self._start : self._stop]
        larger = np.zeros(max(_FIRST_ROOM, 2 * len(live)), ROW_DTYPE)
        larger[: len(live)] = live
        self._rows, self._start, self._stop = larger, 0, len(live)


def _place(entry: Entry, cache: TrajectoryCache | None) -> tuple[int, int]:
    if cache is not None and entry.trajectory_id in cache:
        return CACHED, cached_part(entry, cache).first
    return (MAPPED if entry.block is not None else ELSEWHERE), 0


def cached_part(entry: Entry, cache: TrajectoryCache) -> Cached:
    """Say where an entry's rows stand in the cache: in one part, as all fields have one length."""
    [part] = cache.find(entry.trajectory_id)
    return part
