"""Read-ahead: have the frames that come next fetched from the disk while the learner computes.

One rule: this is advice to the kernel; without it every batch is the same, but later. It is given only while a few
sampled pages are not all in memory.
"""

from __future__ import annotations

import numpy as np

from ..format.header import DATA
from ..frames.store import FrameStore, MappedFrames
from ..index.index import TrajectoryIndex
from .cursor import Int64s, Plan

#: How much of a trajectory is asked for at once.
_STRETCH_BYTES = 256 * 1024
#: How many rows are looked at to see whether the files are in memory, and how often.
_NUM_SAMPLES = 64
_BATCHES_BETWEEN_LOOKS = {True: 64, False: 16}


class ReadAhead:
    """Advises the kernel about the rows that a stream reads next."""

    def __init__(self, num_envs: int) -> None:
        self._index: TrajectoryIndex | None = None
        self._begin = np.zeros(num_envs, np.int64)
        self._end = np.zeros(num_envs, np.int64)
        self._num_batches = 0
        self._is_warm = True

    def before(self, plan: Plan) -> None:
        """Ask for the frames of a plan and those after them, as far as they were not asked for."""
        for part in plan.parts:
            store = part.deal.source
            if isinstance(store, MappedFrames):
                self._look(store)
                if not self._is_warm:
                    self._advise(
                        store, part.pieces.env, part.pieces.trajectory, part.pieces.frame, part.pieces.num_frames
                    )

    def _look(self, store: MappedFrames) -> None:
        """See now and then whether the files are in memory."""
        if store.index is not self._index:
            self._index = store.index
            self._end[:] = 0
            self._num_batches = 0
        if self._num_batches % _BATCHES_BETWEEN_LOOKS[self._is_warm] == 0 and store.index.num_frames:
            frames = np.linspace(0, store.index.num_frames - 1, _NUM_SAMPLES).astype(np.int64)
            self._is_warm = all(
                mapped.is_resident(row)
                for place, mapped in store.files.arenas.items()
                if place[0] == DATA
                for row in store.row_numbers(place, frames).tolist()
            )
        self._num_batches += 1

    def _advise(self, store: FrameStore, env: Int64s, trajectory: Int64s, frame: Int64s, count: Int64s) -> None:
        index = store.index
        start = index.first_frame[trajectory] + frame
        stop = index.first_frame[trajectory + 1]
        begin, end, needed = self._begin[env], self._end[env], np.minimum(start + 2 * count, stop)
        is_due = (start < begin) | (needed > end)
        if not is_due.any():
            return
        # Envs that are due soon are included: with single frames some env would be due at nearly every batch.
        num_frames = _STRETCH_BYTES // store.layouts[DATA].frame_bytes
        new = np.flatnonzero(is_due | (np.minimum(needed + num_frames // 4, stop) > end))
        stretch = np.maximum(num_frames, 2 * count[new])
        # What was asked for already is not asked for again.
        is_next = (start[new] >= self._begin[env[new]]) & (start[new] < self._end[env[new]])
        first = np.where(is_next, self._end[env[new]], start[new])
        last = np.minimum(start[new] + stretch, stop[new])
        wanted = last > first
        new, first, last = new[wanted], first[wanted], last[wanted]
        self._begin[env[new]], self._end[env[new]] = start[new], last
        inside = first - index.first_frame[trajectory[new]]
        store.will_need(store.locate(trajectory[new], inside, last - first, np.arange(len(new)) * (1 << 32)))
