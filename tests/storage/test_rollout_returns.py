"""`RolloutStorage`: returns, truncation rules, normalization, statistics."""

from __future__ import annotations

import pytest
import torch

from storage import (
    BufferEmptyError,
    UsageError,
)
from tests.storage.rollouts import (
    assert_same,
    broken,
    everything,
    fill,
    make_storage,
    make_transition,
)


def random_fill(storage, seed=0, done_rate=0.3, **more):
    generator = torch.Generator().manual_seed(seed)
    B, R = storage.num_envs, storage.num_rewards
    for step in range(storage.num_transitions_per_env):
        done = torch.rand(B, generator=generator) < done_rate
        cut = done & (torch.rand(B, generator=generator) < 0.5)
        rewards, values, final = torch.randn(3, B, R, generator=generator)
        transition = make_transition(step, B, R, done, rewards=rewards, values=values, **more)
        storage.add_transitions(
            broken(broken(transition, "time_outs", cut), "bootstrap_values", final)
        )
    return storage


def naive_returns(storage, last_values, gamma, lam, truncation):
    T = storage.num_transitions_per_env
    r, v, final = storage.rewards, storage.values, storage.bootstrap_values
    done, cut = storage.dones.bool(), storage.time_outs
    advantage, actual = torch.zeros_like(last_values), []
    for t in reversed(range(T)):
        after = last_values if t == T - 1 else v[t + 1]
        boot = torch.where(done[t], torch.zeros_like(after), after)
        if truncation != "cut":
            boot = torch.where(cut[t], v[t] if truncation == "value" else final[t], boot)
        advantage = r[t] + gamma * boot - v[t] + gamma * lam * (~done[t]).float() * advantage
        actual.append(advantage + v[t])
    return torch.stack(actual[::-1])


@pytest.mark.parametrize("truncation", ["cut", "value", "final"])
@pytest.mark.parametrize("shape", [(1, 1, 1), (5, 7, 1), (4, 30, 3)])
def test_i09_returns_follow_the_truncation_rule(truncation, shape):
    B, T, R = shape
    storage = random_fill(make_storage(B, T, num_rewards=R))
    last = torch.randn(B, R)
    storage.compute_returns(last, 0.97, 0.9, truncation=truncation, normalize=None)
    expected = naive_returns(storage, last, 0.97, 0.9, truncation)
    torch.testing.assert_close(storage.returns, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(storage.advantages, expected - storage.values, atol=1e-5, rtol=1e-5)


def test_truncation_final_needs_the_values_of_the_final_observations():
    storage = fill(make_storage(), time_outs=torch.ones(4), dones=torch.ones(6, 4))
    before = everything(storage)
    with pytest.raises(UsageError) as caught:
        storage.compute_returns(torch.zeros(4, 1), 0.9, 0.9, truncation="final")
    text = "bootstrap_values are missing at time-outs, and truncation 'final' needs them."
    assert text in str(caught.value)
    assert_same(before, everything(storage))


def test_a_bootstrap_value_of_an_earlier_rollout_is_not_used_again():
    storage = make_storage(num_steps=2)
    fill(storage, time_outs=torch.ones(4), dones=torch.ones(6, 4), bootstrap_values=torch.ones(4))
    storage.compute_returns(torch.zeros(4), 0.9, 0.9, truncation="final")
    storage.clear()
    fill(storage, time_outs=torch.ones(4), dones=torch.ones(6, 4))
    with pytest.raises(UsageError, match="bootstrap_values are NaN"):
        storage.compute_returns(torch.zeros(4), 0.9, 0.9, truncation="final")


@pytest.mark.parametrize(
    "arguments, text",
    [
        (
            {"last_values": torch.zeros(3, 1)},
            "field 'last_values' has shape (3, 1), expected (4, 1) or (4,).",
        ),
        ({"gamma": 1.5}, "gamma must be in [0, 1], got 1.5."),
        (
            {"lam": torch.zeros(2)},
            "field 'lam' has shape (2,), expected (1,) or ().",
        ),
        (
            {"normalize": "all"},
            "normalize must be None or one of 'global', 'per_reward', got 'all'.",
        ),
        ({"truncation": "none"}, "truncation must be one of 'cut', 'final', 'value', got 'none'."),
    ],
)
def test_wrong_arguments_of_compute_returns_change_nothing(arguments, text):
    storage = random_fill(make_storage())
    before = everything(storage)
    all_arguments = {"last_values": torch.zeros(4, 1), "gamma": 0.9, "lam": 0.9, **arguments}
    with pytest.raises(UsageError) as caught:
        storage.compute_returns(**all_arguments)
    assert text in str(caught.value)
    assert_same(before, everything(storage))


def test_returns_of_a_partial_rollout_need_an_option():
    storage = fill(make_storage(), count=4)
    for call in (
        lambda: storage.compute_returns(torch.zeros(4), 0.9, 0.9),
        lambda: storage.mini_batch_generator(1, 1),
    ):
        with pytest.raises(
            UsageError,
            match=r"the rollout has 4 of 6 steps\. Add the missing steps, or call",
        ):
            call()
    storage.compute_returns(torch.zeros(4), 0.9, 0.9, allow_partial=True, normalize=None)
    assert not storage.returns[4:].any()
    steps = torch.cat([batch.obs[:, 0] for batch in storage.mini_batch_generator(2, 1)])
    assert len(steps) == 16 and steps.max() < 4
    storage.add_transitions(make_transition(4, 4))
    with pytest.raises(UsageError):
        storage.mini_batch_generator(1, 1)


def test_compute_returns_of_an_empty_storage_raises():
    storage = make_storage()
    for call in (
        lambda: storage.mini_batch_generator(1, 1),
        lambda: storage.compute_returns(torch.zeros(4), 0.9, 0.9),
        storage.get_statistics,
    ):
        with pytest.raises(
            BufferEmptyError, match=r"the storage is empty\. Call add_transitions\(\) first"
        ):
            call()


def test_i14_each_reward_head_may_be_normalized_apart_and_one_number_gives_zero():
    storage = random_fill(make_storage(5, 9, num_rewards=3))
    storage.compute_returns(torch.zeros(5, 3), 0.9, 0.9, normalize="per_reward")
    torch.testing.assert_close(storage.advantages.mean((0, 1)), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(
        storage.advantages.flatten(0, 1).std(0), torch.ones(3), atol=1e-4, rtol=0
    )
    storage.compute_returns(torch.zeros(5, 3), 0.9, 0.9)
    assert (
        abs(float(storage.advantages.mean())) < 1e-5
        and abs(float(storage.advantages.std()) - 1) < 1e-4
    )
    single = random_fill(make_storage(1, 1))
    single.compute_returns(torch.zeros(1, 1), 0.9, 0.9)
    assert single.advantages.item() == 0


def test_i05_statistics_change_nothing():
    dones = torch.tensor([[0, 0, 0, 1], [1, 0, 0, 1], [0, 0, 0, 0]])
    storage = fill(make_storage(num_steps=3), dones)
    before = everything(storage)
    length, reward = storage.get_statistics()
    # segments: 2+1, 3, 3, 1+1+1
    assert float(length) == pytest.approx(12 / 7) and float(reward) == pytest.approx(
        float(storage.rewards.mean())
    )
    assert length.dtype == reward.dtype == torch.float32
    assert_same(before, everything(storage))


@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_steps_after_a_done_do_not_change_returns_before_it(odd):
    dones = torch.tensor([[0, 0], [1, 0], [0, 1]])
    storage, other = (fill(make_storage(2, 3), dones) for _ in range(2))
    storage.values[2, 0] = storage.rewards[2, 0] = odd
    for item, last in ((storage, odd), (other, 0.0)):
        item.compute_returns(torch.tensor([0.0, last]), 0.9, 0.9, normalize=None)
    assert torch.equal(storage.returns[:2], other.returns[:2]) and torch.equal(
        storage.returns[:, 1], other.returns[:, 1]
    )
    assert (
        torch.equal(storage.advantages[:2], other.advantages[:2])
        and not storage.returns[2, 0].isfinite()
    )
