"""Counting what a recording keeps.

One rule: counts follow from the marks of the frames alone, at the time they are added.
"""

from __future__ import annotations

from itertools import chain, groupby

import numpy as np

from .block_header import DROPPED, ENDS
from .cutting import PRESENT

_MAX_PENDING = 32


class Tally:
    """Counts kept frames and trajectories from the marks of the frames."""

    def __init__(self, num_envs: int, success_only: bool) -> None:
        self._success_only = success_only
        self._pending: list[np.ndarray] = []
        self._num_trajectories = self._num_kept = 0
        self._lengths = np.zeros(num_envs, np.int64)  # frames of the trajectories in progress

    @property
    def num_trajectories(self) -> int:
        self._settle()
        return self._num_trajectories

    @property
    def num_finished_frames(self) -> int:
        self._settle()
        return self._num_kept

    @property
    def num_frames(self) -> int:
        self._settle()
        return self._num_kept if self._success_only else self._num_kept + int(self._lengths.sum())

    def count(self, bits: np.ndarray) -> None:
        """Count `[T, N]` marks, which must not change any more: many steps are counted at once, later."""
        self._pending.append(bits)
        if len(self._pending) >= _MAX_PENDING:
            self._settle()

    def _settle(self) -> None:
        pending, self._pending = self._pending, []
        for _, same in groupby(pending, key=id):
            bits, *others = same
            if others and not (bits & ENDS).any():  # steps that end nothing often share one array
                self._lengths += (1 + len(others)) * np.count_nonzero(bits & PRESENT, axis=0)
                continue
            for step in chain(bits, *others):
                self._lengths += (step & PRESENT) > 0
                ended = np.flatnonzero(step & ENDS)
                if len(ended):
                    self._end(ended, step[ended])

    def end(self, env_ids: np.ndarray, flag: int) -> None:
        self._settle()
        self._end(env_ids, np.full(len(env_ids), flag))

    def _end(self, env_ids: np.ndarray, flags: np.ndarray) -> None:
        kept = env_ids[((flags & DROPPED) == 0) & (self._lengths[env_ids] > 0)]
        self._num_trajectories += len(kept)
        self._num_kept += int(self._lengths[kept].sum())
        self._lengths[env_ids] = 0
