"""A subclass of the template that only returns single frames has every method of a dataset."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from rollout_data import RolloutDataset, RolloutFileBase
from storage.errors import UsageError
from tests.files.recorded import record


class Counted(NamedTuple):
    observation: torch.Tensor
    timeout: torch.Tensor | None


class Counters(RolloutFileBase):
    """Env n counts from 100 * n, frame by frame.

    A reset env starts at its next hundred thousand.
    """

    def __init__(self, num_envs, has_timeouts=True):
        super().__init__("nowhere", num_envs, "cpu")
        self.has_timeouts = has_timeouts
        self.num_resets = 0

    def reset_all(self):
        self.num_resets += 1
        self.count = self.all_env_ids * 100

    def refresh_handlers(self, env_ids):
        self.count[env_ids] += 100_000

    def get_buffer(self, num_transitions_per_env=None):
        shape = (
            (self.num_envs,)
            if num_transitions_per_env is None
            else (num_transitions_per_env, self.num_envs)
        )
        timeout = torch.zeros(shape, dtype=torch.bool) if self.has_timeouts else None
        return Counted(torch.zeros(shape, dtype=torch.int64), timeout)

    def fill_transition(self, buffer, env_ids=None):
        ids = self.all_env_ids if env_ids is None else env_ids
        buffer.observation[ids] = self.count[ids]
        self.count[ids] += 1


def test_batches_are_filled_step_by_step_and_reset_is_lazy():
    stream = Counters(3)
    assert stream.num_resets == 0
    assert stream.get_batch(2).observation.tolist() == [[0, 100, 200], [1, 101, 201]]
    assert stream.get_batch().observation.tolist() == [2, 102, 202]
    assert stream.num_resets == 1


def test_reset_with_some_ids_refreshes_and_with_all_ids_resets():
    stream = Counters(3)
    stream.get_batch(2)
    stream.reset(torch.tensor([1]))
    assert stream.get_batch().observation.tolist() == [2, 100_102, 202]
    stream.reset([2, 0, 1])
    assert stream.num_resets == 2


def test_iteration_resets_and_yields_batches_of_the_chosen_length():
    stream = Counters(2)
    stream.get_batch()
    stream.num_transitions_per_env = 2
    iterator = iter(stream)
    assert iterator is stream
    assert next(iterator).observation.tolist() == [[0, 100], [1, 101]]


@pytest.mark.parametrize("has_timeouts", [True, False])
def test_the_info_of_a_transition_batch_has_time_outs_if_there_are_any(has_timeouts):
    observation, action, reward, done, info = Counters(2, has_timeouts).get_transition_batch()
    assert list(info) == (["time_outs"] if has_timeouts else []) + ["end_unknown", "transition"]
    assert info["end_unknown"].tolist() == [False, False]
    assert observation is info["transition"].observation and observation.tolist() == [0, 100]
    assert action is reward is done is None, "fields that a batch does not have"


def test_attributes_are_as_documented():
    stream = Counters(3)
    assert (
        stream.data_dir == "nowhere"
        and stream.num_envs == 3
        and stream.device == torch.device("cpu")
    )
    assert stream.all_env_ids.tolist() == [0, 1, 2] and stream.all_env_ids.dtype == torch.int64


@pytest.mark.parametrize("num_envs", [0, -1, 1.5, True])
def test_num_envs_must_be_a_positive_whole_number(num_envs):
    with pytest.raises(UsageError, match=r"num_envs must be .*in 1:16777217"):
        RolloutDataset("nowhere", num_envs)


@pytest.mark.parametrize("num_steps", [0, -1, 1.5, True])
def test_num_steps_must_be_a_positive_whole_number(num_steps):
    with pytest.raises(UsageError, match=r"num_transitions_per_env must be .*>= 1"):
        Counters(1).get_batch(num_steps)


def test_a_reader_without_times_raises():
    with pytest.raises(UsageError, match="Counters does not support reading by time"):
        Counters(1).get_batch_by_time(0.0)


def test_get_batch_by_time_moves_no_cursor(tmp_path):
    record(tmp_path, [5, 3], metadata={"frame_rate_hz": 10.0})
    dataset = RolloutDataset(tmp_path, 2, device="cpu")
    dataset.get_batch()
    batch, valid = dataset.get_batch_by_time(torch.tensor([0.26, 0.26]))
    assert batch.observation[:, :2].tolist() == [[0, 3], [1, 2]]
    assert valid.tolist() == [True, False]
    assert batch.done.tolist() == [False, True]
    assert batch.next_observation[0, :2].tolist() == [0, 4]
    only, valid = dataset.get_batch_by_time([0.1], [1])
    assert only.observation[:, :2].tolist() == [[1, 1]] and valid.tolist() == [True]
    assert torch.allclose(dataset.reference_length_s(), torch.tensor([0.4, 0.2]))
    assert dataset.get_batch().observation[:, 1].tolist() == [1, 1]


def test_get_batch_by_time_interpolates_between_frames(tmp_path):
    record(tmp_path, [5, 3])
    dataset = RolloutDataset(tmp_path, 2, device="cpu", frame_rate_hz=10.0, interpolation="linear")
    batch, valid = dataset.get_batch_by_time([0.325, -1.0])
    assert torch.allclose(batch.observation[0], torch.tensor([0.0, 3.25, 3.25]))
    assert batch.observation[1].tolist() == [1, 0, 1000]
    assert valid.tolist() == [True, False]


def test_an_unknown_frame_rate_raises(tmp_path):
    record(tmp_path, [5])
    with pytest.raises(UsageError, match=r"has no frame_rate_hz. Pass frame_rate_hz"):
        RolloutDataset(tmp_path, 1, device="cpu").get_batch_by_time(0.0)
