"""The trajectory index compared with a naive table of frames, and the trajectories that it leaves
out.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollout_data.blocks.block import Block
from rollout_data.blocks.block_header import (  # fmt: skip
    DROPPED,
    FIRST,
    FRAGMENT_DTYPE,
    OPEN,
    TENTATIVE,
    TERMINATED,
    TRUNCATED,
    layouts_of,
)
from rollout_data.blocks.trajectory_index import End, LostBlockError, TrajectoryIndex
from rollout_data.sources.rows.row_source import Rows
from rollout_data.sources.rows.unmapped_rows import UnmappedRows
from storage.core.fields import Field, Schema


def block(number, rows, writer="w"):
    """Return a block of fragments `(trajectory, start, length, flags, end_time)` with rows in this
    order.
    """
    table = np.zeros(len(rows), FRAGMENT_DTYPE)
    at = 0
    for k, (trajectory, start, length, flags, end) in enumerate(rows):
        table[k] = (trajectory, 0, flags, start, length, at, -1, end, -1)
        at += length
    return Block(Path(f"{writer}{number}"), writer, number, table)


@st.composite
def recordings(draw):
    """Draw trajectories, divided into fragments and blocks in order.

    Return also their frames by block and row.
    """
    num_blocks = draw(st.integers(1, 4))
    content = [[] for _ in range(num_blocks)]
    frames, ends = {}, {}
    clock = 0
    for trajectory in range(draw(st.integers(1, 6))):
        cuts = draw(st.lists(st.integers(0, 4), min_size=num_blocks, max_size=num_blocks))
        start = 0
        for number, length in enumerate(cuts):
            if length:
                clock += 1
                content[number].append(
                    [trajectory, start, length, FIRST if start == 0 else 0, clock]
                )
                start += length
        if start:
            last = max(number for number, length in enumerate(cuts) if length)
            content[last][-1][3] |= draw(st.sampled_from([TERMINATED, TRUNCATED, OPEN, 0]))
            ends[trajectory] = clock
    order = draw(st.permutations(range(num_blocks)))
    for number, rows in enumerate(content):
        at = 0
        for trajectory, start, length, _, _ in rows:
            for k in range(length):
                frames[trajectory, start + k] = (number, at + k)
            at += length
    blocks = [block(number, content[number]) for number in order]
    return blocks, frames, sorted(ends, key=lambda trajectory: ends[trajectory])


@given(recordings(), st.data())
def test_every_frame_of_every_trajectory_is_located(recording, data):
    blocks, frames, order = recording
    index = TrajectoryIndex(blocks)
    assert index.number.tolist() == order
    assert index.num_broken == index.num_dropped == 0
    assert index.num_frames == len(frames)
    if not order:
        return
    wanted = data.draw(st.lists(st.integers(0, len(order) - 1), min_size=1, max_size=6))
    trajectory = np.array(wanted)
    frame = np.array([data.draw(st.integers(0, index.lengths[t] - 1)) for t in wanted])
    count = np.array(
        [
            data.draw(st.integers(1, index.lengths[t] - f))
            for t, f in zip(wanted, frame, strict=True)
        ]
    )
    target = np.cumsum(count) - count
    runs = index.locate(trajectory, frame, count, target)
    assert (np.diff(runs.target) > 0).all() and runs.num_rows.sum() == count.sum()
    result = {}
    for to, number, row, length in zip(*runs, strict=True):
        for k in range(length):
            result[to + k] = (index.blocks[number].sequence, row + k)
    expected = [
        frames[order[t], f + k]
        for t, f, c in zip(wanted, frame, count, strict=True)
        for k in range(c)
    ]
    assert [result[k] for k in range(len(expected))] == expected


@given(recordings())
def test_the_arrays_of_an_index_build_the_same_index(recording):
    index = TrajectoryIndex(recording[0])
    again = TrajectoryIndex(recording[0], built=index.arrays())
    for name, values in index.arrays().items():
        assert np.array_equal(values, again.arrays()[name]), name
    assert again.end.tolist() == index.end.tolist()


def test_fragments_that_follow_each_other_in_a_block_are_one_run():
    index = TrajectoryIndex(
        [block(0, [(0, 0, 4, FIRST, 1), (0, 4, 3, TERMINATED, 2), (1, 0, 2, FIRST | OPEN, 3)])]
    )
    assert len(index.fragment_row) == 2
    zero = np.zeros(1, np.int64)
    assert index.locate(zero, zero, zero + 7, zero).num_rows.tolist() == [7]


@pytest.mark.parametrize("missing", [0, 1])
def test_a_trajectory_with_a_missing_part_is_left_out_and_counted(missing):
    blocks = [
        block(0, [(0, 0, 3, FIRST, 1), (1, 0, 3, FIRST | TERMINATED, 1)]),
        block(1, [(0, 3, 3, 0, 2)]),
        block(2, [(0, 6, 3, TERMINATED, 3), (2, 0, 1, FIRST | TERMINATED, 4)]),
    ]
    del blocks[missing]
    index = TrajectoryIndex(blocks)
    assert 0 not in index.number.tolist()
    assert index.num_broken == 1


def test_a_missing_end_leaves_an_open_trajectory():
    index = TrajectoryIndex([block(0, [(0, 0, 3, FIRST, 1)])])
    assert index.lengths.tolist() == [3]
    assert index.is_complete().tolist() == [False]
    assert index.is_timeout().tolist() == [True]


def test_an_unknown_end_differs_from_a_timeout_and_plays_as_a_timeout():
    flags = [TERMINATED, TRUNCATED, OPEN, 0, TERMINATED | TRUNCATED]
    rows = [(number, 0, 2, FIRST | flag, number) for number, flag in enumerate(flags)]
    index = TrajectoryIndex([block(0, rows)])
    assert index.end.tolist() == [
        End.TERMINATED,
        End.TRUNCATED,
        End.UNKNOWN,
        End.UNKNOWN,
        End.TRUNCATED,
    ]
    assert index.is_timeout().tolist() == [False, True, True, True, True]


def test_blocks_of_one_file_differ_by_their_names():
    first, second = (
        block(0, [(0, 0, 3, FIRST | TERMINATED, 1)]),
        block(1, [(1, 0, 2, FIRST | TERMINATED, 2)]),
    )
    blocks = [
        replace(item, path=Path("many.h5"), name=name)
        for item, name in ((first, "demo_0"), (second, "demo_1"))
    ]
    assert len({block.key for block in blocks}) == len({block.identity for block in blocks}) == 2

    class OneFile(UnmappedRows):
        def read_block(self, block, place):
            if block.name == "demo_1":
                raise FileNotFoundError
            return np.arange(3, dtype=np.float32)[:, None].repeat(2, 1).view(np.uint8)

    source = OneFile(TrajectoryIndex(blocks), layouts_of(Schema([Field("observation", (2,))])))
    out = torch.zeros(2, 2, dtype=torch.int32)
    zero = np.zeros(1, np.int64)
    source.read_rows(Rows(zero, zero + 1, zero + 2, zero), 0, {"frames": out})
    assert out.view(torch.float32).tolist() == [[1, 1], [2, 2]]
    with pytest.raises(LostBlockError, match="Trajectory 1 of writer 'w' cannot be read") as lost:
        source.read_rows(Rows(zero + 1, zero, zero + 1, zero), 0, {"frames": out})
    assert lost.value.key == (Path("many.h5"), "demo_1") and lost.value.block == 1


def test_dropped_and_undecided_trajectories_are_not_in_the_index():
    index = TrajectoryIndex(
        [
            block(
                0,
                [
                    (0, 0, 3, FIRST | TENTATIVE, 1),
                    (1, 0, 3, FIRST | TENTATIVE, 2),
                    (2, 0, 3, FIRST | TENTATIVE, 3),
                ],
            ),
            block(1, [(0, 3, 0, DROPPED, 4), (1, 3, 2, TENTATIVE | TRUNCATED, 5)]),
        ]
    )
    assert index.number.tolist() == [1]
    assert index.num_dropped == 1


def test_an_end_marker_without_frames_ends_its_trajectory():
    index = TrajectoryIndex([block(0, [(0, 0, 3, FIRST, 1)]), block(1, [(0, 3, 0, OPEN, 2)])])
    assert index.lengths.tolist() == [3]
    assert index.is_complete().tolist() == [True]


def test_trajectories_are_ordered_by_completion_then_writer_then_number():
    index = TrajectoryIndex(
        [
            block(
                0,
                [
                    (1, 0, 1, FIRST | TERMINATED, 5),
                    (0, 0, 1, FIRST | TERMINATED, 5),
                    (2, 0, 1, FIRST | TERMINATED, 1),
                ],
            ),
            block(0, [(7, 0, 1, FIRST | TERMINATED, 5)], writer="a"),
        ]
    )
    assert index.keys(np.arange(4)) == [("w", 2), ("a", 7), ("w", 0), ("w", 1)]


def test_trajectories_are_found_by_key_in_another_snapshot():
    old = TrajectoryIndex(
        [block(0, [(0, 0, 1, FIRST | TERMINATED, 5), (1, 0, 1, FIRST | TERMINATED, 6)])]
    )
    new = TrajectoryIndex([*old.blocks, block(1, [(2, 0, 1, FIRST | TERMINATED, 1)])])
    assert new.find(old.keys(np.array([0, 1]))).tolist() == [1, 2]
    assert new.find([("w", 9), ("other", 0)]).tolist() == [-1, -1]


def test_an_empty_index_has_no_trajectory():
    index = TrajectoryIndex([])
    assert len(index) == index.num_frames == len(index.fragment_row) == 0
    assert index.find([("w", 0)]).tolist() == [-1]
    assert len(index.is_present()) == 0
