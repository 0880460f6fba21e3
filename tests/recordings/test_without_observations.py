"""Recordings of actions and simulator states only: they convert, merge and stream."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np

import rollout_data
from rollout_data import RolloutDataset, convert, loader, merge


def test_demonstrations_without_observations_convert_merge_and_stream(tmp_path: Path) -> None:
    path = tmp_path / "demo.hdf5"
    rows = np.arange(42, dtype=np.float64).reshape(2, 7, 3)
    with h5py.File(path, "w") as file:
        file.create_group("data").attrs["env"] = "Can"
        for number in range(2):
            file[f"data/demo_{number}/actions"] = rows[number, :, :2]
            file[f"data/demo_{number}/states"] = rows[number]
    done = convert(path, tmp_path / "own", progress=False)
    assert (done.num_episodes, done.problems) == (2, [])
    assert merge([path], tmp_path / "merged").num_trajectories == 2
    for source in (path, tmp_path / "own", tmp_path / "merged"):
        for episode, expected in zip(rollout_data.open(source), rows, strict=True):
            assert episode.observation is None
            np.testing.assert_array_equal(episode["states"], expected)
        batches = list(loader(RolloutDataset(source, 1, device="cpu", num_transitions_per_env=7)))
        assert [batch.observation for batch in batches] == [None, None]
        np.testing.assert_array_equal(
            np.stack([batch.action[:, 0] for batch in batches]), rows[..., :2]
        )


def test_minari_has_a_group_of_observations_in_every_episode(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "demo.hdf5", "w") as file:
        for number in range(2):
            file[f"data/demo_{number}/actions"] = np.full((4, 2), number, np.float32)
            file[f"data/demo_{number}/states"] = np.zeros((4, 3))
    target = tmp_path / "lab" / "raw-v0"
    convert(tmp_path / "demo.hdf5", target, "minari", missing_reward=0.0, progress=False)
    with h5py.File(target / "data" / "main_data.hdf5") as file:
        assert [list(file[f"episode_{number}/observations"]) for number in range(2)] == [[], []]
    back = rollout_data.open(target)
    assert [episode["action"][:, 0].tolist() for episode in back] == [
        [0] * 4,
        [1] * 4,
    ] and not back.problems
