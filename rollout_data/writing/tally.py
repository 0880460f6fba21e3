"""Counting what a recording keeps.

One rule: counts follow from the marks of the frames alone, and a count is never changed: counting gives another one,
so that whoever keeps it has that of before or that of after, also if a Ctrl-C falls into the counting.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace

import numpy as np

from storage.errors import RolloutDataWarning

from ..format.header import DROPPED, ENDS
from .cut import PRESENT

#: Steps that are counted together cost less than one by one; more of them would keep a caller waiting.
MAX_UNCOUNTED = 32
#: Most environments have time limits of 1,000 steps: where nothing has ended in twice as many, ends are not told.
MAX_STEPS_WITHOUT_END = 2000


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
        is_present, ends = (new & PRESENT) > 0, new & ENDS
        start, num_trajectories, num_frames = 0, self.num_trajectories, self.num_finished_frames
        lengths = self.lengths.copy()
        for step in ends.any(axis=1).nonzero()[0].tolist():
            lengths += is_present[step] if step == start else is_present[start : step + 1].sum(axis=0)
            ended = ends[step].nonzero()[0]
            kept = lengths[ended] * ((new[step][ended] & DROPPED) == 0)
            num_trajectories, num_frames = num_trajectories + np.count_nonzero(kept), num_frames + int(kept.sum())
            lengths[ended] = 0
            start = step + 1
        lengths += is_present[start:].sum(axis=0)
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

    def warn_if_endless(self, num_accepted: int, folder: str) -> None:
        """Warn if all accepted frames are of trajectories in progress."""
        if int(self.lengths.sum()) >= num_accepted:
            text = (
                f"no trajectory has ended in more than {MAX_STEPS_WITHOUT_END} steps in {folder!r}: say where they end"
            )
            warnings.warn(f"{text}, by done= or by terminated= and truncated=", RolloutDataWarning, stacklevel=4)

    def with_next_block(self) -> Tally:
        """Go on to a block of which nothing is counted."""
        return replace(self, num_counted=0)
