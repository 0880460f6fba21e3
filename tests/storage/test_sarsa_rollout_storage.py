"""`SarsaRolloutStorage`: the next observation is right at every step, also at dones."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from storage import (
    MissingFieldError,
    SarsaRolloutStorage,
    SchemaError,
    UsageError,
    unpad_trajectories,
)
from tests.storage.rollouts import (
    ACTIONS,
    assert_same,
    broken,
    everything,
    make_storage,
    make_transition,
)

# added to every value of a true final observation, so that it can be told from the one after the
# reset
FINAL = 0.5


def filled(dones, critic=True, give_finals=True, always=False, **more):
    """Fill a storage; the observation after step t is that of step t + 1, plus `FINAL` where done."""
    num_steps, num_envs = dones.shape
    storage = make_storage(
        num_envs,
        num_steps,
        SarsaRolloutStorage,
        **({} if critic else {"critic_obs_shape": None}),
        **more,
    )
    for step in range(num_steps):
        transition, later = (
            make_transition(step, num_envs, 1, dones[step]),
            make_transition(step + 1, num_envs),
        )
        if step == num_steps - 1 or always or (give_finals and dones[step].any()):
            shift = FINAL * dones[step].float().reshape(-1, 1)
            transition.next_observations = later.observations + shift
            transition.next_critic_observations = later.critic_observations + shift
        storage.add_transitions(transition)
    storage.compute_returns(torch.zeros(num_envs), 0.9, 0.9)
    return storage


def check_rows(obs, next_obs, done):
    """Check that `next_obs` is `obs` one step later, plus `FINAL` at dones."""
    expected = obs + 1 + FINAL * done.reshape(-1, 1)
    torch.testing.assert_close(next_obs, expected, atol=1e-3, rtol=0)


def dones_of(storage, obs):
    """Return the dones of rows, by the step and env in their observations."""
    step = obs[:, 0].floor().long()
    env = ((obs[:, 0] - step) * 100).round().long()
    return storage.dones[step, env, 0].float()


@pytest.mark.parametrize("critic", [True, False])
@given(st.integers(1, 6), st.integers(1, 5), st.sampled_from([0.0, 0.4, 1.0]), st.integers(0, 50))
def test_i08_the_next_observation_is_the_true_final_one_at_every_done(
    critic, num_steps, num_envs, rate, seed
):
    dones = torch.rand(num_steps, num_envs, generator=torch.Generator().manual_seed(seed)) < rate
    storage = filled(dones, critic)
    for batch in storage.mini_batch_generator(1, 2):
        check_rows(batch.obs, batch.next_obs, dones_of(storage, batch.obs))
        if critic:
            check_rows(batch.critic_obs, batch.next_critic_obs, dones_of(storage, batch.obs))
        else:
            assert batch.next_critic_obs is batch.next_obs and batch.critic_obs is batch.obs


@given(st.integers(1, 6), st.integers(2, 5), st.sampled_from([0.0, 0.4, 1.0]), st.integers(0, 50))
def test_i06_recurrent_batches_pad_the_next_observations_like_the_observations(
    num_steps, num_envs, rate, seed
):
    dones = torch.rand(num_steps, num_envs, generator=torch.Generator().manual_seed(seed)) < rate
    storage = filled(dones)
    start = 0
    for batch in storage.recurrent_mini_batch_generator(2, 1):
        assert (
            batch.next_obs.shape == batch.obs.shape
            and batch.next_critic_obs.shape == batch.critic_obs.shape
        )
        assert not batch.next_obs[~batch.masks].any()
        obs, later = (unpad_trajectories(x, batch.masks) for x in (batch.obs, batch.next_obs))
        part = slice(start, start + obs.shape[1])
        check_rows(obs.flatten(0, 1), later.flatten(0, 1), dones[:, part].float().flatten())
        start = part.stop


def test_i07_without_critic_observations_the_last_step_works():
    storage = filled(torch.zeros(3, 2, dtype=torch.bool), critic=False)
    assert storage.next_critic_observations is None and storage.all_critic_observations is None


def test_the_shifted_tensors_are_views_of_one_memory():
    storage = filled(torch.zeros(3, 2, dtype=torch.bool))
    assert storage.all_observations.shape == (4, 2, 3)
    assert storage.next_observations.data_ptr() == storage.all_observations[1:].data_ptr()
    assert storage.observations.data_ptr() == storage.all_observations.data_ptr()
    assert torch.equal(storage.observations[1:], storage.next_observations[:-1])


def test_the_last_step_needs_its_next_observations():
    storage = make_storage(2, 1, SarsaRolloutStorage)
    before = everything(storage)
    with pytest.raises(MissingFieldError) as caught:
        storage.add_transitions(make_transition(0, 2))
    assert str(caught.value) == (
        "SarsaRolloutStorage.add_transitions: field 'next_observations' is missing. The last step of "
        "a rollout needs it."
    )
    assert_same(before, everything(storage))


def test_wrong_next_observations_change_nothing():
    storage = make_storage(2, 3, SarsaRolloutStorage)
    before = everything(storage)
    right = torch.zeros(2, 5)
    for wrong in (torch.zeros(2, 4), torch.zeros(2, 3, dtype=torch.complex64), {"a": right}):
        with pytest.raises(SchemaError):
            storage.add_transitions(
                make_transition(0, 2, next_observations=wrong, next_critic_observations=right)
            )
    with pytest.raises(MissingFieldError):
        storage.add_transitions(make_transition(0, 2, next_observations=torch.zeros(2, 3)))
    with pytest.raises(MissingFieldError):
        good = make_transition(
            0, 2, next_observations=torch.zeros(2, 3), next_critic_observations=right
        )
        storage.add_transitions(broken(good, "actions", None))
    assert_same(before, everything(storage))
    assert not storage.all_observations.any()


def test_without_the_final_observation_a_done_is_marked_as_not_valid():
    dones = torch.tensor([[0, 1], [1, 0], [0, 1]], dtype=torch.bool)
    storage = filled(dones, give_finals=False, emit_next_valid=True)
    (batch,) = storage.mini_batch_generator(1, 1)
    step = batch.obs[:, 0].floor()
    is_hidden = (dones_of(storage, batch.obs) == 1) & (step < 2)  # the last step's was given
    assert torch.equal(batch.next_valid.flatten(), ~is_hidden)
    torch.testing.assert_close(
        batch.next_obs[is_hidden], batch.obs[is_hidden] + 1, atol=1e-3, rtol=0
    )
    (batch,) = filled(dones, emit_next_valid=True).mini_batch_generator(1, 1)
    assert batch.next_valid.all()
    assert next(filled(dones).mini_batch_generator(1, 1)).next_valid is None


def test_strict_next_false_returns_the_shifted_observations():
    dones = torch.tensor([[0, 1], [1, 0], [0, 0]], dtype=torch.bool)
    storage = filled(dones, strict_next=False, emit_next_valid=True)
    (batch,) = storage.mini_batch_generator(1, 1)
    torch.testing.assert_close(batch.next_obs, batch.obs + 1, atol=1e-3, rtol=0)
    assert torch.equal(batch.next_valid.flatten(), dones_of(storage, batch.obs) == 0)


def test_final_observations_of_an_earlier_rollout_are_not_used_again():
    storage = filled(torch.ones(3, 2, dtype=torch.bool))
    storage.clear()
    for step in range(3):
        later = make_transition(step + 1, 2)
        transition = make_transition(step, 2, 1, torch.zeros(2))
        if step == 2:
            transition.next_observations = later.observations
            transition.next_critic_observations = later.critic_observations
        storage.add_transitions(transition)
    storage.compute_returns(torch.zeros(2), 0.9, 0.9)
    for batch in storage.mini_batch_generator(1, 1):
        check_rows(batch.obs, batch.next_obs, torch.zeros(6))


def test_validate_finds_observations_that_do_not_follow():
    storage = make_storage(2, 4, SarsaRolloutStorage, validate=True)

    def step(number, done=None, shift=0.0):
        later = make_transition(number + 1, 2)
        return make_transition(
            number,
            2,
            1,
            done,
            next_observations=later.observations + shift,
            next_critic_observations=later.critic_observations,
        )

    storage.add_transitions(step(0))
    storage.add_transitions(step(1, done=torch.tensor([1, 0]), shift=torch.tensor([[9.0], [0.0]])))
    storage.add_transitions(step(2, shift=7.0))
    before = everything(storage)
    with pytest.raises(SchemaError) as caught:
        storage.add_transitions(step(3))
    assert str(caught.value) == (
        "SarsaRolloutStorage.add_transitions: observations of step 3, env 0, differ from "
        "next_observations of step 2."
    )
    assert_same(before, everything(storage))


def test_nested_observations_have_nested_next_observations():
    storage = SarsaRolloutStorage(
        2, 2, {"a": (1,), "b": {"c": ((2,), "uint8")}}, None, (ACTIONS,), generator=0
    )
    for step in range(2):
        x = {
            "a": torch.full((2, 1), float(step)),
            "b": {"c": torch.full((2, 2), step, dtype=torch.uint8)},
        }
        later = {"a": x["a"] + 1, "b": {"c": x["b"]["c"] + 1}}
        transition = make_transition(step, 2, 1, torch.ones(2), critic_observations=None)
        storage.add_transitions(
            broken(broken(transition, "observations", x), "next_observations", later)
        )
    storage.compute_returns(torch.zeros(2), 0.9, 0.9)
    for batch in storage.mini_batch_generator(2, 1):
        assert torch.equal(batch.next_obs["a"], batch.obs["a"] + 1)
        assert (
            torch.equal(batch.next_obs["b"]["c"], batch.obs["b"]["c"] + 1)
            and batch.next_obs["b"]["c"].dtype == torch.uint8
        )


def test_a_partial_rollout_needs_the_next_observations_of_its_last_step():
    storage = make_storage(2, 4, SarsaRolloutStorage)
    for step in range(2):
        storage.add_transitions(make_transition(step, 2))
    storage.compute_returns(torch.zeros(2), 0.9, 0.9, allow_partial=True)
    for call in (storage.mini_batch_generator, storage.recurrent_mini_batch_generator):
        with pytest.raises(
            UsageError, match="next observations of step 1, the last step, are missing"
        ):
            call(1, 1)
    later = make_transition(3, 2)
    more = {
        "next_observations": later.observations,
        "next_critic_observations": later.critic_observations,
    }
    storage.add_transitions(make_transition(2, 2, **more))
    storage.compute_returns(torch.zeros(2), 0.9, 0.9, allow_partial=True)
    (batch,) = storage.mini_batch_generator(1, 1)
    check_rows(batch.obs, batch.next_obs, torch.zeros(6))


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "uint64"])
def test_final_observations_of_unsigned_integers_are_inserted(dtype):
    storage = SarsaRolloutStorage(2, 3, ((2,), dtype), None, (ACTIONS,), generator=0)
    for step in range(3):
        x = torch.full((2, 2), 10 * step).to(getattr(torch, dtype))
        final = torch.full((2, 2), 10 * step + 5).to(x.dtype)
        transition = make_transition(step, 2, 1, torch.ones(2), critic_observations=None)
        storage.add_transitions(
            broken(broken(transition, "observations", x), "next_observations", final)
        )
    storage.compute_returns(torch.zeros(2), 0.9, 0.9)
    batches = [*storage.mini_batch_generator(1, 1), *storage.recurrent_mini_batch_generator(1, 1)]
    for batch in batches:
        assert (
            batch.next_obs.dtype == getattr(torch, dtype)
            and batch.next_obs.shape == batch.obs.shape
        )
        is_data = slice(None) if batch.masks is None else batch.masks
        assert torch.equal(batch.next_obs.long()[is_data], batch.obs.long()[is_data] + 5)
        assert batch.masks is None or not batch.next_obs.long()[~batch.masks].any()


@pytest.mark.parametrize("dtype", ["float32", "uint16", "int64"])
@pytest.mark.parametrize("shape", [(), (2,)])
def test_validate_compares_numbers_of_every_dtype(dtype, shape):
    storage = SarsaRolloutStorage(
        2, 3, (shape, dtype), None, (ACTIONS,), validate=True, generator=0
    )
    first, wrong = (torch.full((2, *shape), x).to(getattr(torch, dtype)) for x in (1, 2))
    transition = make_transition(
        0, 2, critic_observations=None, observations=first, next_observations=first
    )
    storage.add_transitions(transition)
    with pytest.raises(
        SchemaError, match="observations of step 1, env 0, differ from next_observations of step 0"
    ):
        storage.add_transitions(broken(transition, "observations", wrong))
    storage.add_transitions(transition)


def test_validate_treats_nan_as_equal_to_nan_only():
    storage = make_storage(2, 4, SarsaRolloutStorage, critic_obs_shape=None, validate=True)
    odd = torch.tensor([[float("nan"), 1.0, 2.0], [0.0, float("nan"), float("inf")]])
    transition = make_transition(
        0, 2, critic_observations=None, observations=odd, next_observations=odd
    )
    storage.add_transitions(transition)
    storage.add_transitions(transition)
    storage.add_transitions(broken(transition, "observations", odd.double()))
    with pytest.raises(SchemaError, match="observations of step 3, env 0, differ"):
        storage.add_transitions(broken(transition, "observations", odd.nan_to_num(nan=7.0)))


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("name", ["all_observations", "next_observations"])
def test_assigning_to_a_shifted_column_writes_into_it(name, nested):
    storage = SarsaRolloutStorage(
        2, 3, {"a": (3,), "b": (1,)} if nested else (3,), None, (ACTIONS,), generator=0
    )
    first = 1 if name == "next_observations" else 0
    wanted = torch.rand(4, 2, 3)
    value = {"a": wanted[first:], "b": wanted[first:, :, :1]} if nested else wanted[first:]
    setattr(storage, name, value)
    whole = storage.all_observations["a"] if nested else storage.all_observations
    assert torch.equal(whole[first:], wanted[first:]) and (first == 0 or not whole[0].any())
    assert torch.equal(
        (storage.observations["a"] if nested else storage.observations)[1:], wanted[1:3]
    )
    before = whole.clone()
    wrong = {"a": value["a"], "b": torch.ones(2, 2, 1)} if nested else torch.ones(2, 2, 3)
    for bad in (wrong, None):
        with pytest.raises(SchemaError, match=f"'{name}"):
            setattr(storage, name, bad)
    assert torch.equal(whole, before) and name not in vars(storage)
    with pytest.raises(SchemaError, match="next_critic_observations"):
        storage.next_critic_observations = torch.ones(3, 2, 3)
