"""Counts of kept frames and trajectories: the same whether steps share their marks or not."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rollout_data.block_header import DROPPED, TERMINATED
from rollout_data.cutting import PRESENT
from rollout_data.tally import Tally

MARKS = [
    np.full((1, 3), PRESENT, np.uint8),
    np.full((2, 3), PRESENT, np.uint8),
    np.array([[PRESENT, 0, PRESENT | TERMINATED]], np.uint8),
    np.array([[PRESENT | DROPPED, PRESENT, 0], [0, PRESENT | TERMINATED, PRESENT]], np.uint8),
]


def naive_counts(steps: list[np.ndarray]) -> tuple[int, int, int]:
    finished = trajectories = 0
    lengths = [0, 0, 0]
    for bits in (row for marks in steps for row in marks):
        for env, mark in enumerate(bits):
            lengths[env] += bool(mark & PRESENT)
            if mark & (TERMINATED | DROPPED):
                kept = 0 if mark & DROPPED else lengths[env]
                finished, trajectories, lengths[env] = finished + kept, trajectories + (kept > 0), 0
    return finished + sum(lengths), finished, trajectories


@given(numbers=st.lists(st.integers(0, len(MARKS) - 1), max_size=80))
def test_steps_that_share_their_marks_count_like_any_others(numbers):
    tally = Tally(3, success_only=False)
    for number in numbers:
        tally.count(MARKS[number])
    counts = tally.num_frames, tally.num_finished_frames, tally.num_trajectories
    assert counts == naive_counts([MARKS[number] for number in numbers])
