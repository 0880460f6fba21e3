"""Each wrong argument of a dataset raises one clear error at once."""

from __future__ import annotations

import math

import pytest
import torch

from rollout_data import RolloutDataset, RolloutWriter, record_demonstrations
from storage.errors import UsageError
from tests.files.recorded import record


@pytest.mark.parametrize(
    "wrong",
    [
        {"wait_timeout_s": None},
        {"wait_timeout_s": "x"},
        {"wait_timeout_s": -1},
        {"wait_timeout_s": math.nan},
        {"frame_rate_hz": "a"},
        {"frame_rate_hz": -3},
        {"frame_rate_hz": 0},
        {"frame_rate_hz": math.inf},
        {"starting_frame_range": (0, 10**30)},
        {"random_shuffle_traj_order": "no"},
        {"flatten_observations": None},
        {"mark_first_frame": "yes"},
        {"drop_last": 2},
        {"verify_on_open": "1"},
        {"contiguous": []},
    ],
)
def test_a_wrong_argument_raises_with_its_name(tmp_path, wrong):
    record(tmp_path, [5, 4])
    with pytest.raises(UsageError, match=f"^RolloutDataset: {next(iter(wrong))} must be "):
        RolloutDataset(tmp_path, 1, device="cpu", **wrong)


def test_wrong_arguments_of_calls_raise(tmp_path):
    record(tmp_path, [5, 4])
    dataset = RolloutDataset(tmp_path, 2, device="cpu", frame_rate_hz=10, drop_last=0, contiguous=1)
    first = dataset.get_batch()
    for env_ids in ({0, 1}, [None], "a", object()):
        with pytest.raises(UsageError, match="env_ids must be integer ids, got "):
            dataset.reset(env_ids)
    for state in (None, 5, "x"):
        with pytest.raises(UsageError, match=r"state must be the result of state_dict\(\), got "):
            dataset.load_state_dict(state)
    for times in ([0.0, 1.0, 2.0], "now", None):
        with pytest.raises(
            UsageError, match=r"time_s must be seconds of shape \(\) or \(2,\), got "
        ):
            dataset.get_batch_by_time(times)
    # No process was started again.
    assert not torch.equal(dataset.get_batch().observation, first.observation)


def test_an_invalid_frame_rate_in_the_metadata_raises(tmp_path):
    with RolloutWriter(tmp_path, 1, metadata={"frame_rate_hz": "fast"}) as writer:
        writer.add(observation=torch.zeros(1, 1), action=torch.zeros(1, 1), done=[True])
    with pytest.raises(UsageError, match="frame_rate_hz must be > 0 frames per second, got 'fast'"):
        RolloutDataset(tmp_path, 1, device="cpu").reference_length_s()
    assert (
        float(RolloutDataset(tmp_path, 1, device="cpu", frame_rate_hz=1).reference_length_s()) == 0
    )


@pytest.mark.parametrize(
    "wrong", [{"min_timesteps": math.nan}, {"min_timesteps": "a"}, {"seed": "x"}, {"seed": 1.5}]
)
def test_wrong_arguments_of_a_recording_raise(tmp_path, wrong):
    with pytest.raises(
        UsageError,
        match=f"^record_demonstrations: {next(iter(wrong))} must be ",
    ):
        record_demonstrations(None, None, tmp_path, **{"min_timesteps": 1, **wrong})


def test_a_path_with_a_nul_character_raises(tmp_path):
    with pytest.raises(UsageError, match=r"^RolloutWriter: data_dir contains a NUL character"):
        RolloutWriter(str(tmp_path / "a\0b"), 1)
