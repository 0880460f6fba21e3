"""`load_path` and `save_path` of `TrajectoryReplayBuffer`."""

from __future__ import annotations

import pytest
import torch

from rollout_data import TrajectoryReplayBuffer
from storage.errors import DataFileError, UsageError


def trajectory(number, steps=4):
    return {
        "obs": torch.full((steps, 2, 3), float(number)),
        "rewards": torch.full((steps, 2), float(number)),
    }


def numbers(buffer):
    return sorted({int(buffer.get(name)["rewards"][0, 0]) for name in buffer.trajectory_ids})


def test_a_checkpoint_saved_under_save_path_is_loaded_from_load_path(tmp_path):
    with TrajectoryReplayBuffer(save_path=tmp_path / "a") as buffer:
        buffer.add_trajectories([trajectory(k) for k in range(3)])
        assert buffer.auto_save and buffer.auto_save_path == tmp_path / "a"
    with TrajectoryReplayBuffer(load_path=tmp_path / "a") as loaded:
        assert numbers(loaded) == [0, 1, 2] and loaded.total_samples == 24 and not loaded.auto_save


def test_a_run_is_resumed_in_its_own_folder(tmp_path):
    for run in range(3):
        load_path = tmp_path / "a" if run else None
        with TrajectoryReplayBuffer(load_path=load_path, save_path=tmp_path / "a") as buffer:
            buffer.add_trajectories([trajectory(run)])
            buffer.flush()
            assert numbers(buffer) == list(range(run + 1))
    with TrajectoryReplayBuffer(load_path=tmp_path / "a", save_path=tmp_path / "b") as buffer:
        assert numbers(buffer) == [0, 1, 2]
    with TrajectoryReplayBuffer(load_path=tmp_path / "b") as buffer:
        assert numbers(buffer) == [0, 1, 2]


def test_each_rank_loads_its_own_trajectories(tmp_path):
    with TrajectoryReplayBuffer(save_path=tmp_path / "a") as buffer:
        buffer.add_trajectories([trajectory(k) for k in range(5)])
    shares = [
        numbers(TrajectoryReplayBuffer(load_path=tmp_path / "a", rank=rank, world_size=2))
        for rank in range(2)
    ]
    assert (
        sorted(shares[0] + shares[1]) == [0, 1, 2, 3, 4]
        and abs(len(shares[0]) - len(shares[1])) == 1
    )


def test_the_two_names_of_the_folder_must_agree(tmp_path):
    with TrajectoryReplayBuffer(
        auto_save=True, auto_save_path=str(tmp_path), save_path=tmp_path
    ) as buffer:
        assert buffer.auto_save_path == tmp_path
    with pytest.raises(
        UsageError,
        match=r"^TrajectoryReplayBuffer: save_path is .* and auto_save_path is .* Pass only save_path",
    ):
        TrajectoryReplayBuffer(auto_save_path=tmp_path / "a", save_path=tmp_path / "b")


def test_a_missing_checkpoint_raises_with_its_path(tmp_path):
    with pytest.raises(DataFileError, match="none"):
        TrajectoryReplayBuffer(load_path=tmp_path / "none", save_path=tmp_path / "b")
