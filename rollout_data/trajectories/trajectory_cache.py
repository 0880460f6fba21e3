"""`TrajectoryCache`: the newest trajectories in memory, side by side in one block per layout.

One rule: the rows of a trajectory are one piece, and the place of a removed one is used again.
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

#: A cache without a limit begins with room for this many trajectories like its first.
_FIRST_ROOM = 8
_GROWTH = 1.5


class RowBlock:
    """Rows of one layout, of any number of trajectories, each in one piece.

    Attributes:
        layout: What a row holds.
        capacity: Rows that there is memory for.
        words: Column -> its rows, `[capacity, words]` int32; not to be held across calls.
    """

    def __init__(self, layout: RowLayout, capacity: int) -> None:
        self.layout = layout
        #: First row -> end, of the pieces in use, sorted.
        self._pieces: dict[int, int] = {}
        self.words: Rows = {}
        self._make_room(capacity)

    def put(self, rows: Rows) -> int:
        """Copy rows in; give the number of the first."""
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
        """Copy the rows of a piece out."""
        return {name: words[first : self._pieces[first]].clone() for name, words in self.words.items()}

    def free(self, first: int) -> None:
        """Release the rows of a piece."""
        del self._pieces[first]

    @property
    def _end(self) -> int:
        return next(reversed(self._pieces.values()), 0)

    def _place(self, num_rows: int) -> int:
        """Find room: behind the last piece, in the first gap that is large enough, or in more memory."""
        end = self._end
        before = 0
        if end + num_rows <= self.capacity:
            return end
        for first, stop in self._pieces.items():
            if first - before >= num_rows:
                return before
            before = stop
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
    """Where a trajectory, or the fields of it that have one length, stand."""

    block: RowBlock
    first: int


class TrajectoryCache(Shown):
    """Keep the newest trajectories in memory, first in, first out.

    Args:
        max_size: How many trajectories; 0 for any number.

    What is put in may have any keys; those of a trajectory that went are never seen in another. Memory
    is that of the rows, not of as many rows as the longest has. Methods may be called from any thread.

    Raises:
        UsageError: `max_size` < 0 (a `ValueError`).
    """

    def __init__(self, max_size: int) -> None:
        self.max_size = whole("create a TrajectoryCache", "max_size", max_size, 0)
        self.lock = threading.RLock()
        self._blocks: dict[RowLayout, RowBlock] = {}
        self._entries: dict[int, list[Cached]] = {}
        self._pool = BufferPool()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, trajectory_id: object) -> bool:
        return trajectory_id in self._entries

    @property
    def is_full(self) -> bool:
        """Whether the next one takes the place of the oldest."""
        return 0 < self.max_size <= len(self._entries)

    @property
    def ids(self) -> list[int]:
        """What is cached, oldest first."""
        with self.lock:
            return list(self._entries)

    @property
    def nbytes(self) -> int:
        """Bytes of the rows that there is memory for."""
        with self.lock:
            return sum(block.capacity * block.layout.frame_bytes for block in self._blocks.values())

    def put(self, trajectory_id: int, trajectory: Mapping[str, Any]) -> None:
        """Copy a nested mapping of `[n, ...]` tensors in; keys may differ in n. The oldest makes room.

        An id that is here already is replaced and becomes the newest.
        """
        what = "cache the trajectory"
        if not is_whole(trajectory_id):
            raise UsageError(what, "", "trajectory_id as an integer", repr(trajectory_id))
        if not isinstance(trajectory, Mapping):
            got = type(trajectory).__name__
            raise UsageError(what, str(trajectory_id), "a nested mapping of tensors", got)
        by_length: dict[int, dict[str, torch.Tensor]] = {}
        for name, leaf in flatten(trajectory).items():
            tensor = as_given(leaf) if isinstance(leaf, (torch.Tensor, np.ndarray)) else None
            if tensor is None or not tensor.ndim or not len(tensor):
                got = type(leaf).__name__ if tensor is None else f"shape {list(tensor.shape)}"
                raise UsageError(what, f"{trajectory_id}, key {name!r}", "rows [n, ...]", got)
            by_length.setdefault(len(tensor), {})[name] = tensor.unsqueeze(1)
        if not by_length:
            raise UsageError(what, str(trajectory_id), "at least one tensor", "none")
        layouts = [layout_of(tensors, f"of trajectory {trajectory_id}") for tensors in by_length.values()]
        parts = zip(layouts, by_length.values(), strict=True)
        self.put_rows(trajectory_id, {layout: pack(layout, tensors, self._pool) for layout, tensors in parts})

    def put_rows(self, trajectory_id: int, parts: Mapping[RowLayout, Rows]) -> list[int]:
        """Copy packed rows in; the oldest trajectory makes room. Give the ids of what came and went."""
        moved = [trajectory_id]
        with self.lock:
            self.drop(trajectory_id)
            if self.is_full:
                moved.append(next(iter(self._entries)))
                self.drop(moved[-1])
            entry = []
            for layout, rows in parts.items():
                if layout not in self._blocks:
                    num_rows = len(next(iter(rows.values())))
                    self._blocks[layout] = RowBlock(layout, num_rows * (self.max_size or _FIRST_ROOM))
                block = self._blocks[layout]
                entry.append(Cached(block, block.put(rows)))
            self._entries[trajectory_id] = entry
        return moved

    def get(self, trajectory_id: int) -> dict[str, Any]:
        """Copy a trajectory out, as it was put in: nested, `[n, ...]`. A `KeyError` if it is not here."""
        flat: dict[str, torch.Tensor] = {}
        with self.lock:
            for block, first in self.find(trajectory_id):
                rows = block.rows(first)
                found = unpack(block.layout, rows, (len(next(iter(rows.values()))), 1))
                flat.update({name: tensor.squeeze(1) for name, tensor in found.items()})
        return unflatten(flat)

    def find(self, trajectory_id: int) -> list[Cached]:
        """Return where a trajectory stands; valid while the lock is held."""
        entry = self._entries.get(trajectory_id) if is_whole(trajectory_id) else None
        if entry is None:
            kept = f"one of {len(self._entries)} cached ids"
            raise MissingFieldError("find the trajectory", "in the cache", kept, repr(trajectory_id))
        return entry

    def drop(self, trajectory_id: int) -> None:
        """Remove a trajectory, if it is here."""
        with self.lock:
            for block, first in self._entries.pop(trajectory_id, ()):
                block.free(first)

    def clear(self) -> None:
        """Remove everything and give the memory back."""
        with self.lock:
            self._entries.clear()
            self._blocks.clear()
