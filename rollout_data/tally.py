"""Counting what a recording keeps.

One rule: counts follow from the marks of the frames alone, and a count is never changed: counting gives another one,
so that whoever keeps it has that of before or that of after, also if a Ctrl-C falls into the counting.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from .block_header import DROPPED, ENDS
from .cutting import PRESENT

#: Steps that are counted together cost less than one by one; more of them would keep a caller waiting.
MAX_UNCOUNTED = 32


@dataclass(frozen=True, eq=False)
class Tally:
    """Kept frames and trajectories.

    Attributes:
        lengths: `[N]` int64: frames of the trajectories in progress.
        success_only: Those are not kept, or not yet.
        num_trajectories, num_finished_frames: Kept trajectories that have ended, and their frames.
        num_counted: Steps of the block being filled that are counted.
    """

    lengths: np.ndarray
    success_only: bool = False
    num_trajectories: int = 0
    num_finished_frames: int = 0
    num_counted: int = 0

    @property
    def num_frames(self) -> int:
        return self.num_finished_frames + (0 if self.success_only else int(self.lengths.sum()))

    def with_steps(self, marks: np.ndarray) -> Tally:
        """Count those of the `[T, N]` marks of the block being filled that are not counted yet."""
        if len(marks) == self.num_counted:
            return self
        new = marks[self.num_counted :]
        start, num_trajectories, num_frames, lengths = 0, self.num_trajectories, self.num_finished_frames, self.lengths
        for step in np.flatnonzero((new & ENDS).any(axis=1)).tolist():
            lengths = lengths + np.count_nonzero(new[start : step + 1] & PRESENT, axis=0)
            ended = np.flatnonzero(new[step] & ENDS)
            kept = ended[((new[step, ended] & DROPPED) == 0) & (lengths[ended] > 0)]
            num_trajectories, num_frames = num_trajectories + len(kept), num_frames + int(lengths[kept].sum())
            lengths[ended] = 0
            start = step + 1
        lengths = lengths + np.count_nonzero(new[start:] & PRESENT, axis=0)
        return Tally(lengths, self.success_only, num_trajectories, num_frames, len(marks))

    def with_ends(self, env_ids: np.ndarray, flag: int) -> Tally:
        """Count the trajectories in progress of these envs as ended."""
        lengths = self.lengths.copy()
        lengths[env_ids] = 0
        if flag & DROPPED:
            return replace(self, lengths=lengths)
        num_frames = self.num_finished_frames + int(self.lengths[env_ids].sum())
        num_trajectories = self.num_trajectories + int(np.count_nonzero(self.lengths[env_ids]))
        return replace(self, lengths=lengths, num_finished_frames=num_frames, num_trajectories=num_trajectories)

    def with_next_block(self) -> Tally:
        """Go on to a block of which nothing is counted."""
        return replace(self, num_counted=0)
