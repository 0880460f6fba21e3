"""`TrajectoryCache`: keep the newest trajectories in memory and remove the oldest first.

All trajectories with the same fields share one allocation, so that one call gathers steps of many
trajectories. The rows of a trajectory are contiguous. The memory of removed trajectories is reused.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from storage.core.arguments import is_whole, whole
from storage.core.fields import flatten, unflatten
from storage.core.memory import BufferPool, as_given, lasting
from storage.core.object_summary import Shown
from storage.errors import MissingFieldError, UsageError

from ..blocks.row_layout import RowLayout
from .trajectory_rows import Rows, layout_of, pack, unpack

#: Number of trajectories for which a cache without a limit first allocates memory. All are assumed
#: to have the length of the first trajectory.
_FIRST_ROOM = 8
#: Minimum factor by which the memory grows when it is full.
_GROWTH = 1.5


class RowMemory:
    """Memory for the rows of trajectories with the same row layout.

    The rows of a trajectory are consecutive. They are called a piece.

    Attributes:
        layout: Layout of a row.
        capacity: Number of allocated rows.
        words: Map from the name of a column to its rows, int32 `[capacity, words]`. The tensors are
            replaced when the memory grows.
    """

    def __init__(self, layout: RowLayout, capacity: int) -> None:
        self.layout = layout
        #: Map from the first row of each piece to its stop row, in ascending order.
        self._pieces: dict[int, int] = {}
        self.words: Rows = {}
        self._make_room(capacity)

    def put(self, rows: Rows) -> int:
        """Copy the rows of a trajectory into free rows. Return the index of the first row."""
        num_rows = len(next(iter(rows.values())))
        first = self._place(num_rows)
        for name, words in rows.items():
            self.words[name][first : first + num_rows].copy_(words)
        is_last = first >= self._end
        self._pieces[first] = first + num_rows
        if not is_last:
            self._pieces = dict(sorted(self._pieces.items()))
        return first

    def rows(self, first: int) -> Rows:
        """Return a copy of the rows of the trajectory that starts at row `first`."""
        stop = self._pieces[first]
        return {name: words[first:stop].clone() for name, words in self.words.items()}

    def free(self, first: int) -> None:
        """Free the rows of the trajectory that starts at row `first`, for use by others."""
        del self._pieces[first]

    @property
    def _end(self) -> int:
        return next(reversed(self._pieces.values()), 0)

    def _place(self, num_rows: int) -> int:
        """Find `num_rows` consecutive free rows, and return the index of the first of them.

        If the memory has too few consecutive free rows, the memory grows.
        """
        end = self._end
        if end + num_rows <= self.capacity:
            return end
        free_start = 0
        for first, stop in self._pieces.items():
            if first - free_start >= num_rows:
                return free_start
            free_start = stop
        self._make_room(max(end + num_rows, int(self.capacity * _GROWTH)))
        return end

    @lasting
    def _make_room(self, capacity: int) -> None:
        self.capacity = capacity
        for name, column in self.layout.columns.items():
            larger = BufferPool(1).empty((capacity, column.row_bytes // 4), torch.int32)
            if name in self.words:
                larger[: len(self.words[name])] = self.words[name]
            self.words[name] = larger


class Cached(NamedTuple):
    """Location of the rows of a cached trajectory.

    Fields with different numbers of steps are in different rows. Such a trajectory has one location
    per number of steps.

    Attributes:
        memory: Memory that contains the rows.
        first: Index of the first row in `memory`.
    """

    memory: RowMemory
    first: int


class TrajectoryCache(Shown):
    """Cache of the newest trajectories in memory. Thread-safe.

    Trajectories may have different keys and lengths.

    Args:
        max_size: Maximum number of trajectories; 0 means no limit. If the cache is full, adding a
            trajectory removes the oldest trajectory.

    Raises:
        UsageError: `max_size` < 0 (a `ValueError`).
    """

    def __init__(self, max_size: int) -> None:
        self.max_size = whole("max_size", max_size, 0)
        self.lock = threading.RLock()
        self._memories: dict[RowLayout, RowMemory] = {}
        self._entries: dict[int, list[Cached]] = {}
        self._pool = BufferPool()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, trajectory_id: object) -> bool:
        return trajectory_id in self._entries

    @property
    def is_full(self) -> bool:
        """Whether adding a trajectory removes the oldest trajectory."""
        return 0 < self.max_size <= len(self._entries)

    @property
    def ids(self) -> list[int]:
        """Ids of the cached trajectories, oldest first."""
        with self.lock:
            return list(self._entries)

    @property
    def nbytes(self) -> int:
        """Number of allocated bytes, including free rows."""
        with self.lock:
            memories = self._memories.values()
            return sum(memory.capacity * memory.layout.frame_bytes for memory in memories)

    def put(self, trajectory_id: int, trajectory: Mapping[str, Any]) -> None:
        """Copy a trajectory into the cache. A full cache removes its oldest trajectory.

        A cached trajectory with the same id is replaced, and becomes the newest trajectory.

        Args:
            trajectory_id: Id of the trajectory.
            trajectory: Nested mapping of tensors `[n, ...]`; n may differ between the tensors.
        """
        if not is_whole(trajectory_id):
            raise UsageError(f"trajectory_id must be an integer, got {trajectory_id!r}.")
        if not isinstance(trajectory, Mapping):
            raise UsageError(
                f"trajectory must be a nested mapping of tensors, got {type(trajectory).__name__}."
            )

        by_length = _by_length(trajectory_id, trajectory)
        parts = {}
        for tensors in by_length.values():
            layout = layout_of(tensors, f"of trajectory {trajectory_id}")
            parts[layout] = pack(layout, tensors, self._pool)
        self.put_rows(trajectory_id, parts)

    def put_rows(self, trajectory_id: int, parts: Mapping[RowLayout, Rows]) -> list[int]:
        """Copy the packed rows of a trajectory into the cache.

        Args:
            trajectory_id: Id of the trajectory.
            parts: Map from row layout to the rows with this layout. There are several layouts if
                fields have different numbers of steps.

        Returns:
            Ids of the added trajectory and, if the cache was full, of the removed trajectory.
        """
        changed_ids = [trajectory_id]
        with self.lock:
            self.drop(trajectory_id)
            if self.is_full:
                oldest_id = next(iter(self._entries))
                self.drop(oldest_id)
                changed_ids.append(oldest_id)
            entry = []
            for layout, rows in parts.items():
                if layout not in self._memories:
                    num_rows = len(next(iter(rows.values())))
                    self._memories[layout] = RowMemory(
                        layout, num_rows * (self.max_size or _FIRST_ROOM)
                    )
                memory = self._memories[layout]
                entry.append(Cached(memory, memory.put(rows)))
            self._entries[trajectory_id] = entry
        return changed_ids

    def get(self, trajectory_id: int) -> dict[str, Any]:
        """Return a copy of a cached trajectory as a nested dict of tensors `[n, ...]`.

        Raises:
            MissingFieldError: The trajectory is not cached (a `KeyError`).
        """
        flat: dict[str, torch.Tensor] = {}
        with self.lock:
            for memory, first in self.find(trajectory_id):
                rows = memory.rows(first)
                num_rows = len(next(iter(rows.values())))
                for name, tensor in unpack(memory.layout, rows, (num_rows, 1)).items():
                    flat[name] = tensor.squeeze(1)
        return unflatten(flat)

    def find(self, trajectory_id: int) -> list[Cached]:
        """Return the row locations of a cached trajectory. They are valid while `lock` is held.

        Raises:
            MissingFieldError: The trajectory is not cached (a `KeyError`).
        """
        entry = self._entries.get(trajectory_id) if is_whole(trajectory_id) else None
        if entry is None:
            raise MissingFieldError(
                f"trajectory_id {trajectory_id!r} is not in the cache, which has "
                f"{len(self._entries)} trajectories."
            )
        return entry

    def drop(self, trajectory_id: int) -> None:
        """Remove a trajectory from the cache. Does nothing if the trajectory is not cached."""
        with self.lock:
            for memory, first in self._entries.pop(trajectory_id, ()):
                memory.free(first)

    def clear(self) -> None:
        """Remove all trajectories and free the memory."""
        with self.lock:
            self._entries.clear()
            self._memories.clear()


def _by_length(
    trajectory_id: int, trajectory: Mapping[str, Any]
) -> dict[int, dict[str, torch.Tensor]]:
    """Group the tensors of a trajectory by their number of steps n.

    The result maps n to a dict of tensors `[n, 1, ...]` by flat name.

    Raises:
        UsageError: A leaf is no tensor or has no rows, or the trajectory has no leaves.
    """
    by_length: dict[int, dict[str, torch.Tensor]] = {}
    for name, leaf in flatten(trajectory).items():
        if not isinstance(leaf, (torch.Tensor, np.ndarray)):
            raise UsageError(
                f"field {name!r} of trajectory {trajectory_id} must be a tensor or an array, got "
                f"{type(leaf).__name__}."
            )
        tensor = as_given(leaf)
        if not tensor.ndim or not len(tensor):
            raise UsageError(
                f"field {name!r} of trajectory {trajectory_id} has shape {list(tensor.shape)}, "
                "expected [n, ...] with n >= 1."
            )
        by_length.setdefault(len(tensor), {})[name] = tensor.unsqueeze(1)
    if not by_length:
        raise UsageError(f"trajectory {trajectory_id} has no tensors.")
    return by_length
