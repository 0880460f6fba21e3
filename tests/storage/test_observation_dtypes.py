"""Dtypes of observations: integers and bool keep the dtype of the first step.

Floating numbers become float32.
"""

from __future__ import annotations

import copy
import itertools
import pickle

import numpy as np
import pytest
import torch

from storage import (
    ActionLabelRollout,
    FieldTypeError,
    MissingFieldError,
    QueueRolloutStorage,
    RolloutStorage,
    SarsaRolloutStorage,
    load_store,
)

KINDS = [RolloutStorage, QueueRolloutStorage, ActionLabelRollout, SarsaRolloutStorage]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool]
T, B = 3, 4


def make(kind=RolloutStorage, obs=(2, 3), critic=None, **more):
    return kind(B, T, obs, critic, (1,), generator=0, **more)


def pixels(step: int, dtype: torch.dtype, shape=(2, 3)) -> torch.Tensor:
    numbers = torch.arange(B * 6).view(B, *shape) % 2 + step
    return (numbers % 2).bool() if dtype is torch.bool else numbers.to(dtype)


def transition(storage, step: int, obs, critic=None, **more):
    made = storage.Transition(
        observations=obs, critic_observations=critic, actions=torch.zeros(B, 1)
    )
    made.rewards, made.dones = torch.full((B,), float(step)), torch.zeros(B)
    made.values, made.actions_log_prob = torch.zeros(B, 1), torch.zeros(B)
    made.action_mean = made.action_sigma = torch.zeros(B, 1)
    if isinstance(storage, ActionLabelRollout):
        made.action_labels = torch.zeros(B, 1)
    if isinstance(storage, SarsaRolloutStorage):
        made.next_observations, made.next_critic_observations = obs, critic
    for name, value in more.items():
        setattr(made, name, value)
    return made


def filled(kind, dtype, **more):
    storage = make(kind, **more)
    for step in range(T):
        storage.add_transitions(transition(storage, step, pixels(step, dtype)))
    storage.compute_returns(torch.zeros(B, 1), 0.9, 0.9)
    return storage


@pytest.mark.parametrize(("kind", "dtype"), [*itertools.product(KINDS, INTEGERS)])
def test_an_undeclared_observation_keeps_integers_and_bool_of_the_first_step(kind, dtype, tmp_path):
    storage = filled(kind, dtype)
    expected = torch.stack([pixels(step, dtype) for step in range(T)])
    assert storage.observations.dtype is dtype
    if kind is not SarsaRolloutStorage:  # there each next observation is that of the following step
        assert torch.equal(storage.observations, expected)
    for batch in [
        *storage.mini_batch_generator(2, 1),
        *storage.recurrent_mini_batch_generator(2, 1),
    ]:
        assert batch.obs.dtype is dtype and batch.critic_obs is batch.obs
        if kind is SarsaRolloutStorage:
            assert batch.next_obs.dtype is dtype
    storage.save(tmp_path / "kept")
    fresh = make(kind)
    fresh.load_state_dict(storage.state_dict())
    for other in (
        fresh,
        load_store(tmp_path / "kept"),
        copy.deepcopy(storage),
        pickle.loads(pickle.dumps(storage)),
    ):
        assert (
            torch.equal(other.observations, storage.observations)
            and other.observations.dtype is dtype
        )
        other.clear()
        if other.step < T:
            with pytest.raises(FieldTypeError, match="field 'observations' has dtype "):
                other.add_transitions(transition(other, 0, pixels(0, torch.float32)))
            other.add_transitions(transition(other, 0, pixels(0, dtype)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_floating_observations_become_float32(dtype):
    storage = make()
    values = torch.tensor([0.1, 0.7, 2.5, 9.0, 1.0, 0.0], dtype=dtype).view(2, 3).expand(B, 2, 3)
    storage.add_transitions(transition(storage, 0, values))
    assert storage.observations.dtype is torch.float32
    assert torch.equal(storage.observations[0], values.float())
    other = torch.float64 if dtype is torch.float32 else torch.float32
    storage.add_transitions(transition(storage, 1, values.to(other)))


@pytest.mark.parametrize(
    ("first", "later"), [*itertools.permutations([*INTEGERS, torch.float32, torch.float64], 2)]
)
def test_another_dtype_in_a_later_step_is_refused(first, later):
    storage = make()
    storage.add_transitions(transition(storage, 0, pixels(0, first)))
    before = storage.state_dict()
    if first.is_floating_point and later.is_floating_point:
        storage.add_transitions(transition(storage, 1, pixels(1, later)))
        return
    with pytest.raises(FieldTypeError, match="field 'observations' has dtype "):
        storage.add_transitions(transition(storage, 1, pixels(1, later)))
    after = storage.state_dict()
    assert after["numbers"] == before["numbers"]
    assert all(
        torch.equal(x, before["tensors"][name])
        for name, x in after["tensors"].items()
        if x.dtype != torch.float32
    )
    storage.clear()
    with pytest.raises(FieldTypeError):
        storage.add_transitions(transition(storage, 0, pixels(0, later)))


@pytest.mark.parametrize("kind", KINDS)
def test_critic_observations_and_components_have_their_own_dtypes(kind):
    obs = {"camera": (2, 3), "state": 4, "depth": ((2, 3), "float16"), "flags": {"contact": (1,)}}
    storage = make(kind, obs, {"ids": (1,), "state": (2,)})
    seen = {
        "camera": pixels(0, torch.uint8),
        "state": torch.rand(B, 4, dtype=torch.float64),
        "depth": torch.rand(B, 2, 3).half(),
        "flags": {"contact": np.ones((B, 1), bool)},
    }
    critic = {"ids": torch.arange(B).view(B, 1), "state": torch.rand(B, 2)}
    storage.add_transitions(transition(storage, 0, seen, critic))
    assert {name: x.dtype for name, x in storage.observations.items() if name != "flags"} == {
        "camera": torch.uint8,
        "state": torch.float32,
        "depth": torch.float16,
    }
    assert storage.observations["flags"]["contact"].dtype is torch.bool
    assert storage.critic_observations["ids"].dtype is torch.int64
    assert torch.equal(storage.critic_observations["ids"][0], critic["ids"])
    with pytest.raises(FieldTypeError, match="field 'critic_observations/ids' has dtype "):
        critic["ids"] = critic["ids"].int()
        storage.add_transitions(transition(storage, 1, seen, critic))


def test_a_declared_dtype_accepts_all_numbers_that_fit():
    storage = make(obs=((2, 3), "float32"))
    for step, dtype in enumerate((torch.uint8, torch.float32, torch.int64)):
        storage.add_transitions(transition(storage, step, pixels(step, dtype)))
    assert storage.observations.dtype is torch.float32


@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.uint8, torch.bool, torch.float16, torch.float64]
)
def test_rewards_values_and_log_probabilities_are_stored_as_float32(dtype):
    storage = make()
    numbers = torch.tensor([0, 1, 1, 0]).to(dtype)
    more = {"rewards": numbers, "values": numbers.view(B, 1), "actions_log_prob": numbers}
    for step in range(T):
        storage.add_transitions(transition(storage, step, pixels(step, torch.uint8), **more))
    for kept in (storage.rewards, storage.values, storage.actions_log_prob):
        assert kept.dtype is torch.float32 and kept.flatten().tolist() == [0.0, 1.0, 1.0, 0.0] * T


def test_a_failed_first_step_fixes_no_dtype():
    storage = make()
    with pytest.raises(MissingFieldError):
        storage.add_transitions(transition(storage, 0, pixels(0, torch.uint8), rewards=None))
    assert storage.observations.dtype is torch.float32 and storage.step == 0
    storage.add_transitions(transition(storage, 0, pixels(0, torch.float32)))
    assert storage.observations.dtype is torch.float32


def test_tensors_of_other_fields_stay_the_same_at_the_first_step():
    storage = make()
    rewards, mu = storage.rewards, storage.mu
    storage.add_transitions(transition(storage, 0, pixels(0, torch.uint8)))
    assert (
        storage.rewards.data_ptr() == rewards.data_ptr() and storage.mu.data_ptr() == mu.data_ptr()
    )


def test_a_state_of_another_dtype_is_refused_after_the_first_step():
    storage = make()
    storage.add_transitions(transition(storage, 0, pixels(0, torch.float32)))
    with pytest.raises(ValueError, match="obs_shape"):
        storage.load_state_dict(filled(RolloutStorage, torch.uint8).state_dict())


def test_a_copy_of_a_storage_without_steps_has_no_fixed_dtype():
    fresh = copy.deepcopy(make())
    fresh.add_transitions(transition(fresh, 0, pixels(0, torch.uint8)))
    assert fresh.observations.dtype is torch.uint8
