"""robomimic's own dataset class reads our files under the default configuration of its algorithms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rollout_data
from tests.readers.recordings import CAMERAS, LENGTHS, record, record_with_gaps

dataset = pytest.importorskip(
    "robomimic.utils.dataset", reason="its tests need robomimic: make test-readers"
)

ALGORITHMS = ("bc", "bcq", "iql")


def opened(path: Path, algorithm: str, low: list[str], pictures: list[str]) -> Any:
    """Open a file as robomimic's training does, with the defaults of an algorithm."""
    from robomimic.config import config_factory
    from robomimic.utils import obs_utils

    train = config_factory(algorithm).train
    obs_utils.initialize_obs_utils_with_obs_specs({"obs": {"low_dim": low, "rgb": pictures}})
    return dataset.SequenceDataset(
        hdf5_path=str(path),
        obs_keys=[*low, *pictures],
        dataset_keys=train.dataset_keys,
        load_next_obs=train.hdf5_load_next_obs,
        frame_stack=train.get("frame_stack", 1),
        seq_length=train.seq_length,
        pad_frame_stack=True,
        pad_seq_length=True,
        get_pad_mask=False,
        goal_mode=train.goal_mode,
        hdf5_cache_mode=train.hdf5_cache_mode,
        hdf5_use_swmr=train.hdf5_use_swmr,
        hdf5_normalize_obs=train.hdf5_normalize_obs,
    )


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_cameras_and_an_open_end_are_read_under_the_default_configuration(tmp_path, algorithm):
    rollout_data.convert(
        record(tmp_path / "ours", is_open=True), tmp_path / "x.hdf5", "robomimic", progress=False
    )
    read = opened(tmp_path / "x.hdf5", algorithm, ["state"], ["images_front", "images_wrist"])
    assert len(read) == sum(LENGTHS)
    rows = [(episode, frame) for episode, length in enumerate(LENGTHS) for frame in range(length)]
    for item, (episode, frame) in zip(
        (read[number] for number in range(len(read))), rows, strict=True
    ):
        is_last = frame == LENGTHS[episode] - 1
        assert item["obs"]["state"].tolist() == [[100 * episode + frame] * 3]
        assert item["actions"].tolist() == [[10 * episode + frame] * 2]
        assert item["rewards"].tolist() == [10 * episode + frame]
        assert item["dones"].tolist() == [int(is_last and episode == 0)]
        following = frame if is_last and episode == 2 else frame + 1
        for camera, first in CAMERAS.items():
            pixels = np.asarray(item["obs"][f"images_{camera}"])
            assert pixels.shape == (1, 40, 48, 3) and (pixels == first + 20 * episode + frame).all()
            if "next_obs" in item:
                assert (
                    np.asarray(item["next_obs"][f"images_{camera}"])
                    == first + 20 * episode + following
                ).all()
    assert ("next_obs" in read[0]) == (algorithm != "bc")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_missing_flags_and_floats_are_read_as_false_and_nan(tmp_path, algorithm):
    source = record_with_gaps(tmp_path / "gaps.hdf5")
    rollout_data.convert(source, tmp_path / "x.hdf5", "robomimic", progress=False)
    read = opened(tmp_path / "x.hdf5", algorithm, ["low", "touch", "is_held"], [])
    assert len(read) == sum(LENGTHS)
    inside, after = read[LENGTHS[0]], read[LENGTHS[0] + LENGTHS[1]]
    assert np.isnan(inside["obs"]["touch"]).all() and not np.asarray(inside["obs"]["is_held"]).any()
    assert (
        after["obs"]["touch"].tolist() == [[20, 20]] and np.asarray(after["obs"]["is_held"]).all()
    )


def test_demonstrations_without_rewards_and_ends_are_read_under_the_default_configuration(tmp_path):
    pytest.importorskip("pyarrow", reason="LeRobot's files need the extra formats")
    rollout_data.convert(
        record(tmp_path / "ours"), tmp_path / "le", "lerobot", progress=False, fps=10
    )
    source = rollout_data.open(tmp_path / "le")
    rollout_data.convert(
        source, tmp_path / "x.hdf5", "robomimic", progress=False, missing_reward=0.0
    )
    read = opened(tmp_path / "x.hdf5", "iql", ["state"], ["images.front", "images.wrist"])
    assert [read[number]["dones"].tolist() for number in range(len(read))] == [[0]] * sum(LENGTHS)
    assert read[4]["next_obs"]["state"].tolist() == [[4, 4, 4]] == read[4]["obs"]["state"].tolist()
