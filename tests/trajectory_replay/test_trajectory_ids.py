"""If two ranks use the same id, one trajectory gets a new id. The next save loads again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rollout_data.trajectories.trajectory_replay_buffer import TrajectoryReplayBuffer
from tests.trajectory_replay.recorded import equal, trajectory

INDEX_NAME = "trajectory_index.json"


def save_ranks(folder: Path, file_format: str) -> Path:
    """Save two ranks with equal counters: ids 0 and 1 each, of the trajectories 0, 1 and 10, 11."""
    for rank in range(2):
        buffer = TrajectoryReplayBuffer(trajectory_format=file_format)
        for number in range(2):
            buffer.add(trajectory(10 * rank + number, 2 + rank, 2))
        buffer.save_checkpoint(folder / f"rank_{rank}")
    return folder


def check(folder: Path, numbers: list[int], **options: Any) -> None:
    buffer = TrajectoryReplayBuffer()
    buffer.load_checkpoint(folder, **options)
    actual = [buffer.get(name) for name in buffer.trajectory_ids]
    assert len(actual) == len(numbers)
    assert all(
        equal(*pair)
        for pair in zip(
            actual, [trajectory(number, 2 + number // 10, 2) for number in numbers], strict=True
        )
    )


@pytest.mark.parametrize("auto_save", [False, True])
@pytest.mark.parametrize("file_format", ["h5", "pt"])
def test_ranks_with_equal_ids_are_saved_and_loaded_again(
    tmp_path: Path, file_format: str, auto_save: bool
) -> None:
    saved = save_ranks(tmp_path / "ranks", file_format)
    saving = {"auto_save": True, "auto_save_path": tmp_path / "auto"} if auto_save else {}
    with TrajectoryReplayBuffer(**saving) as buffer:
        buffer.load_checkpoint(saved)
        assert buffer.trajectory_ids == [0, 1, 2, 3]
        buffer.save_checkpoint(tmp_path / "again")
    check(tmp_path / "again", [0, 1, 10, 11])
    check(saved, [0, 1, 10, 11])


@pytest.mark.parametrize("file_format", ["h5", "pt"])
def test_the_index_has_the_file_name_of_a_trajectory_with_a_new_id(
    tmp_path: Path, file_format: str
) -> None:
    saved = save_ranks(tmp_path, file_format)
    options = {"auto_save": True, "auto_save_path": saved, "rank": 1, "world_size": 2}
    with TrajectoryReplayBuffer(**options, trajectory_format=file_format) as buffer:
        buffer.load_checkpoint(saved)
        buffer.add(trajectory(12, 3, 2))
    check(saved / "rank_1", [10, 11, 12])
    check(saved, [0, 1, 10, 11, 12])


def test_an_id_listed_twice_in_an_index_is_one_trajectory(tmp_path: Path) -> None:
    folder = save_ranks(tmp_path / "ranks", "h5") / "rank_0"
    index = json.loads((folder / INDEX_NAME).read_text())
    del index["crc32"]
    index["trajectory_id_list"] += [0, 1]
    (folder / INDEX_NAME).write_text(json.dumps(index))
    options = {"auto_save": True, "auto_save_path": folder, "max_trajectories": 2}
    with TrajectoryReplayBuffer(**options) as buffer:
        buffer.load_checkpoint(folder)
        assert buffer.trajectory_ids == [0, 1]
        buffer.add(trajectory(2, 2, 2))
    check(folder, [1, 2])


@pytest.mark.parametrize("nums_before", [(0, 4), (4, 0), (5, 5), (7, 3)])
def test_ranks_use_different_ids_after_a_load_whatever_each_added_before(
    tmp_path: Path, nums_before: tuple[int, int]
) -> None:
    source = TrajectoryReplayBuffer()
    for number in range(4):
        source.add(trajectory(number, 2, 2))
    source.save_checkpoint(tmp_path)
    ids: list[int] = []
    for rank, num_before in enumerate(nums_before):
        buffer = TrajectoryReplayBuffer(rank=rank, world_size=2)
        for number in range(num_before):
            buffer.add(trajectory(number, 2, 2))
        before = set(buffer.trajectory_ids)
        buffer.load_checkpoint(tmp_path, is_distributed=True, local_rank=rank, world_size=2)
        loaded = set(buffer.trajectory_ids)
        for number in range(4):
            buffer.add(trajectory(number, 2, 2))
        new = set(buffer.trajectory_ids) - loaded
        assert len(new) == 4 and min(new) > max(before | set(source.trajectory_ids))
        ids += new
    assert len(set(ids)) == 8
