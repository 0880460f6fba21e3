"""`LiveTrajectories`: table of the trajectories in a buffer, used to draw random steps.

A trajectory is live until the buffer removes it. The table has one row per trajectory with the
location of its rows: in the cache, in a file or in other memory. The table row is updated when the
rows move, so the time to add a trajectory does not depend on the number of trajectories.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import compress, islice
from typing import Any

import numpy as np
import torch

from storage.core.fields import Field
from storage.core.random_indices import uniform
from storage.core.records import Key
from storage.errors import BufferEmptyError, SchemaError

from ..blocks.row_layout import RowLayout
from ..sources.rows import mapped_files
from .row_gatherer import RowGatherer
from .trajectory_cache import TrajectoryCache
from .trajectory_files import Entry
from .trajectory_rows import Rows
from .trajectory_snapshot import (
    CACHED,
    ELSEWHERE,
    MAPPED,
    TABLE_DTYPE,
    Int64s,
    TrajectorySnapshot,
)

#: Minimum number of free table rows after the table has grown.
_MIN_FREE_ROWS = 64


class LiveTrajectories:
    """Trajectories in a buffer. The caller of a method must hold the lock of the buffer.

    Args:
        window_size: Number of newest trajectories to sample from; 0 means all.
        capacity: Maximum number of live trajectories; 0 means no limit.
        cache: Cache of rows, or None.
        trusted: Whether pickles may be read, which can run code.

    Attributes:
        capacity, cache: The arguments of the same names.
        entries: Map from trajectory id to entry, oldest first.
        fields: Map from name to field, for the fields of all past and present trajectories. The
            dtype and shape of a field never change.
        num_samples: Number of steps of all live trajectories.
        gatherer: Reader of the rows.
    """

    def __init__(
        self, window_size: int, capacity: int, cache: TrajectoryCache | None, trusted: bool
    ) -> None:
        self._window_size = window_size
        self.capacity = capacity
        self.cache = cache
        self.entries: dict[int, Entry] = {}
        self.fields: dict[str, Field] = {}
        self.num_samples = 0
        self.gatherer = RowGatherer(cache, trusted)
        self._layouts: dict[RowLayout, int] = {}
        #: One row per trajectory, in the order of adding. Rows from `_stop` on are free. The oldest
        #: `_num_removed` of all trajectories that were ever added have no row any more.
        self._table = np.zeros(_MIN_FREE_ROWS, TABLE_DTYPE)
        self._stop = 0
        self._num_removed = 0
        #: The latest snapshot, after the minimum policy version that was requested for it. It is
        #: returned again until the table changes.
        self._latest: tuple[int | None, TrajectorySnapshot] | None = None

    def append(self, entry: Entry, rows: Rows | None = None) -> None:
        """Add a trajectory to the table. If the buffer has a cache, copy the rows into the cache.

        If the capacity is exceeded, the oldest trajectory is removed.
        """
        add_fields(self.fields, entry.layout.schema.values())
        if self._stop == len(self._table):
            self._grow_table()
        entry.position = self._num_removed + self._stop
        self._stop += 1
        self.entries[entry.trajectory_id] = entry
        self.num_samples += entry.num_samples
        if self.capacity and len(self.entries) > self.capacity:
            self._remove_oldest()
        moved_ids = [entry.trajectory_id]
        if self.cache is not None and rows is not None:
            moved_ids = self.cache.put_rows(entry.trajectory_id, {entry.layout: rows})
        self.note_moved(moved_ids)

    def note_moved(self, trajectory_ids: Iterable[int]) -> None:
        """Update the table after the rows of trajectories were moved to a file or to the cache.

        Ids of trajectories that the buffer has removed are ignored.
        """
        for trajectory_id in trajectory_ids:
            entry = self.entries.get(trajectory_id)
            if entry is None:
                continue
            is_mappable = entry.block is not None and mapped_files.is_supported
            location = MAPPED if is_mappable else ELSEWHERE
            first = 0
            if self.cache is not None and trajectory_id in self.cache:
                location = CACHED
                first = self.cache.find(trajectory_id)[0].first
            layout = self._layouts.setdefault(entry.layout, len(self._layouts))
            table_row = entry.position - self._num_removed
            self._table[table_row] = entry.num_samples, layout, location, first
        self._latest = None

    def clear_cache(self) -> None:
        """Free the memory of the cache."""
        if self.cache is not None:
            cached_ids = self.cache.ids
            self.cache.clear()
            self.note_moved(cached_ids)

    def snapshot(self, min_weights_version: int | None = None) -> TrajectorySnapshot:
        """Return a snapshot of the newest trajectories, from which steps are drawn.

        Args:
            min_weights_version: Minimum policy version of the trajectories. None: any version.

        Raises:
            BufferEmptyError: No trajectory has this policy version or a later version.
        """
        if self._latest is not None and self._latest[0] == min_weights_version:
            return self._latest[1]

        size = min(self._window_size or len(self.entries), len(self.entries))
        entries = list(islice(reversed(self.entries.values()), size))
        entries.reverse()
        table = self._table[self._stop - size : self._stop]
        if min_weights_version is not None:
            is_recent = [entry.is_recent(min_weights_version) for entry in entries]
            table = table[np.array(is_recent, bool)]
            entries = list(compress(entries, is_recent))
        if not entries and min_weights_version is None:
            raise BufferEmptyError("the buffer is empty. Call add() first.")
        if not entries:
            raise BufferEmptyError(
                f"no trajectory has the weights_version {min_weights_version} or later."
            )
        snapshot = TrajectorySnapshot(entries, table, list(self._layouts))
        self._latest = (min_weights_version, snapshot)
        return snapshot

    def sample(
        self,
        num_steps: int,
        rng: torch.Generator,
        keys: Collection[Key] | None,
        min_weights_version: int | None,
        contiguous: bool,
    ) -> dict[str, Any]:
        """Draw random steps of the newest trajectories, with replacement.

        Arguments and errors are documented in `TrajectoryReplayBuffer.sample`.
        """
        snapshot = self.snapshot(min_weights_version)
        names = snapshot.names if keys is None else snapshot.names_of(keys)
        state = rng.get_state()
        try:
            samples = uniform(snapshot.num_samples, num_steps, rng).numpy()
            run, row = snapshot.locate(samples)
            if self._fill_cache(snapshot, run):
                snapshot = self.snapshot(min_weights_version)
                run, row = snapshot.locate(samples)
            return self.gatherer.gather(snapshot, run, row, names, contiguous)
        except BaseException:  # Ctrl-C must also restore the random state.
            rng.set_state(state)
            raise

    def _fill_cache(self, snapshot: TrajectorySnapshot, run: Int64s) -> bool:
        """Add sampled trajectories to the cache until the cache is full.

        Returns:
            Whether a trajectory was added. The snapshot is then outdated.
        """
        cache = self.cache
        if cache is None or cache.is_full:
            return False
        if snapshot.is_one_location and snapshot.location[0] == CACHED:
            return False
        uncached_runs = np.unique(run[snapshot.location[run] != CACHED])
        for number in uncached_runs.tolist():
            if cache.is_full:
                break
            entry = snapshot.entries[number]
            rows = self.gatherer.trajectory_rows(entry)
            self.note_moved(cache.put_rows(entry.trajectory_id, {entry.layout: rows}))
        return len(uncached_runs) > 0

    def _remove_oldest(self) -> None:
        oldest = self.entries.pop(next(iter(self.entries)))
        self.num_samples -= oldest.num_samples
        if self.cache is not None:
            self.cache.drop(oldest.trajectory_id)
        self.gatherer.unmap(oldest)

    def _grow_table(self) -> None:
        """Enlarge the table, and remove the table rows of removed trajectories.

        The new table has at least as many free rows as used rows.
        """
        num_live = len(self.entries)
        num_removed = self._stop - num_live
        free_rows = np.zeros(max(_MIN_FREE_ROWS, num_live), TABLE_DTYPE)
        self._table = np.concatenate([self._table[num_removed:], free_rows])
        self._stop = num_live
        self._num_removed += num_removed


def add_fields(known: dict[str, Field], fields: Iterable[Field]) -> None:
    """Add fields to a map, and check that fields of the same name have the same dtype and shape.

    Args:
        known: Map from name to field. It is changed in place.
        fields: Fields to add.

    Raises:
        SchemaError: A field in `known` has a different dtype or shape.
    """
    for field in fields:
        expected = known.setdefault(field.name, field)
        if (expected.dtype, expected.shape) != (field.dtype, field.shape):
            raise SchemaError(
                f"field {field.name!r} has {field.dtype}{list(field.shape)} per step, expected "
                f"{expected.dtype}{list(expected.shape)}."
            )
