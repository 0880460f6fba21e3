"""Counts of kept frames and trajectories: the same whether steps share their marks or not."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rollout_data.format.header import DROPPED, TERMINATED
from rollout_data.writing.cut import PRESENT
from rollout_data.writing.tally import Tally

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


@given(
    numbers=st.lists(st.integers(0, len(MARKS) - 1), max_size=80),
    asked=st.sets(st.integers(0, 79)),
    success=st.booleans(),
)
def test_steps_that_are_counted_together_count_like_any_others(numbers, asked, success):
    tally, marks = Tally(np.zeros(3, np.int64), success), np.zeros((0, 3), np.uint8)
    for place, number in enumerate(numbers):
        marks = np.concatenate([marks, MARKS[number]])
        if place in asked:
            tally = tally.with_steps(marks)
            if place % 2:
                tally, marks = tally.with_next_block(), marks[:0]
    tally = tally.with_steps(marks)
    num_frames, *others = naive_counts([MARKS[number] for number in numbers])
    assert (tally.num_finished_frames, tally.num_trajectories) == tuple(others)
    assert tally.num_frames == (others[0] if success else num_frames)


@given(numbers=st.lists(st.integers(0, len(MARKS) - 1), min_size=1, max_size=20), is_kept=st.booleans())
def test_ends_by_themselves_count_once_however_often_they_come(numbers, is_kept):
    marks = np.concatenate([MARKS[number] for number in numbers])
    flag, env_ids = TERMINATED if is_kept else DROPPED, np.array([0, 2])
    before = Tally(np.zeros(3, np.int64)).with_steps(marks)
    once = before.with_ends(env_ids, flag)
    open_lengths = before.lengths[env_ids]
    assert once.num_frames == before.num_frames - (0 if is_kept else open_lengths.sum())
    assert once.num_trajectories == before.num_trajectories + is_kept * np.count_nonzero(open_lengths)
    twice = once.with_ends(env_ids, flag)
    assert (twice.num_frames, twice.num_trajectories) == (once.num_frames, once.num_trajectories)
    assert once.with_steps(marks) is once
