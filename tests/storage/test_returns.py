"""Returns equal a naive loop for every pattern of flags, and the closed form in the limits."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from storage import (
    SchemaError,
    UsageError,
    discounted_sums,
    generalized_advantage,
    n_step_returns,
    rollout_advantage,
)
from tests.storage.rollouts import make_storage, make_transition


def naive_advantage(rewards, values, next_values, dones, gamma, lam):
    """Compute advantages with two loops over plain floats in float64, as the reference."""
    num_steps, num_envs, num_rewards = rewards.shape
    gamma, lam = (
        torch.as_tensor(x, dtype=torch.float64).expand(num_rewards).tolist() for x in (gamma, lam)
    )
    result = torch.zeros(rewards.shape, dtype=torch.float64)
    for env, head in itertools.product(range(num_envs), range(num_rewards)):
        advantage = 0.0
        for t in reversed(range(num_steps)):
            alive = 0.0 if dones[t, env, 0] else 1.0
            delta = float(rewards[t, env, head]) + gamma[head] * float(next_values[t, env, head])
            advantage = (
                delta - float(values[t, env, head]) + gamma[head] * lam[head] * alive * advantage
            )
            result[t, env, head] = advantage
    return result


def random_rollout(num_steps, num_envs, num_rewards=1, done_rate=0.2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, num_steps, num_envs, num_rewards, generator=generator)
    last_values = torch.randn(num_envs, num_rewards, generator=generator)
    dones = (torch.rand(num_steps, num_envs, 1, generator=generator) < done_rate).to(torch.uint8)
    return rewards, values, last_values, dones


def stored(rewards, **more):
    """Create a storage with these rewards, and with further fields `[T, N, ...]`."""
    num_steps, num_envs, num_rewards = rewards.shape
    storage = make_storage(num_envs, num_steps, num_rewards=num_rewards)
    for step in range(num_steps):
        values = {name: x[step] for name, x in {"rewards": rewards, **more}.items()}
        storage.add_transitions(make_transition(step, num_envs, num_rewards, **values))
    return storage


def next_values_of(values, last_values, dones):
    return torch.cat([values[1:], last_values.unsqueeze(0)]) * (1 - dones.float())


@pytest.mark.parametrize("num_steps", [1, 2, 3, 4, 5, 6])
def test_advantages_equal_the_naive_loop_for_every_pattern_of_dones(num_steps):
    patterns = torch.tensor(
        list(itertools.product([0, 1], repeat=num_steps)), dtype=torch.uint8
    ).T.unsqueeze(-1)
    rewards, values, last_values, _ = random_rollout(num_steps, patterns.shape[1])
    got = rollout_advantage(rewards, values, last_values, patterns, 0.9, 0.8)
    expected = naive_advantage(
        rewards, values, next_values_of(values, last_values, patterns), patterns, 0.9, 0.8
    )
    torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("truncation", ["cut", "value", "final"])
@pytest.mark.parametrize("num_steps", [1, 2, 3, 4, 5, 6])
def test_every_pattern_of_both_end_flags_follows_the_truncation_rule(num_steps, truncation):
    # 0 goes on, 1 terminated, 2 timed out
    patterns = torch.tensor(list(itertools.product([0, 1, 2], repeat=num_steps))).T.unsqueeze(-1)
    rewards, values, last_values, _ = random_rollout(num_steps, patterns.shape[1])
    final = torch.randn_like(values)
    dones, time_outs = (patterns > 0).to(torch.uint8), patterns == 2
    boot = {"cut": torch.zeros_like(values), "value": values, "final": final}[truncation]
    next_values = torch.where(time_outs, boot, next_values_of(values, last_values, dones))
    expected = naive_advantage(rewards, values, next_values, dones, 0.9, 0.8)
    storage = stored(
        rewards, values=values, dones=dones, time_outs=time_outs, bootstrap_values=final
    )
    storage.compute_returns(last_values, 0.9, 0.8, truncation=truncation, normalize=None)
    torch.testing.assert_close(storage.advantages.double(), expected, atol=1e-5, rtol=1e-5)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 70),
    st.integers(1, 9),
    st.integers(1, 3),
    st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    st.sampled_from([0.0, 0.5, 0.99, 1.0]),
    st.sampled_from([0.0, 0.95, 1.0]),
)
def test_both_forms_equal_the_naive_loop_for_any_shape(
    num_steps, num_envs, num_rewards, done_rate, gamma, lam
):
    rewards, values, last_values, dones = random_rollout(
        num_steps, num_envs, num_rewards, done_rate, num_steps
    )
    next_values = next_values_of(values, last_values, dones)
    expected = naive_advantage(rewards, values, next_values, dones, gamma, lam)
    for got in (
        rollout_advantage(rewards, values, last_values, dones, gamma, lam),
        generalized_advantage(rewards, values, next_values, dones, gamma, lam),
    ):
        torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=1e-5)


#: Long and narrow ones, which are scanned by doubling, and wide ones, which are cut into pieces of
#: one or more steps.
LARGE = [
    (1000, 1, 1),
    (2048, 3, 2),
    (700, 40, 1),
    (64, 4096, 1),
    (24, 9000, 2),
    (5, 70_000, 1),
    (3, 9000, 9),
]


@pytest.mark.parametrize("shape", LARGE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])  # by numpy, by torch
def test_large_rollouts_equal_a_loop_of_tensors(shape, dtype):
    rewards, values, last_values, dones = random_rollout(*shape, done_rate=0.02)
    rewards, values, last_values = (x.to(dtype) for x in (rewards, values, last_values))
    next_values = next_values_of(values, last_values, dones).to(dtype)
    expected = rewards.double() + 0.9 * next_values.double() - values.double()
    for t in reversed(range(len(expected) - 1)):
        expected[t] += 0.9 * 0.8 * expected[t + 1] * (dones[t] == 0)
    returns = torch.empty_like(rewards)
    tolerance = 1e-5 if dtype == torch.float32 else 0.3
    for got in (
        rollout_advantage(rewards, values, last_values, dones, 0.9, 0.8, returns=returns),
        generalized_advantage(rewards, values, next_values, dones, 0.9, 0.8),
    ):
        torch.testing.assert_close(got.double(), expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(
        returns.double(), expected + values.double(), atol=tolerance, rtol=tolerance
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes_are_computed_by_torch(dtype):
    rewards, values, last_values, dones = (x.to(dtype) for x in random_rollout(9, 4))
    got = rollout_advantage(rewards, values, last_values, dones, 0.9, 0.8)
    expected = naive_advantage(
        rewards, values, next_values_of(values, last_values, dones), dones, 0.9, 0.8
    )
    assert got.dtype == dtype
    tolerance = 1e-9 if dtype == torch.float64 else 0.2
    torch.testing.assert_close(
        got.double(), expected, atol=tolerance, rtol=tolerance, check_dtype=False
    )


@pytest.mark.parametrize("num_rewards", [1, 2, 9])
@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int64, torch.float32, torch.float16]
)
def test_dones_of_any_dtype_end_every_reward_head(dtype, num_rewards):
    rewards, values, last_values, dones = random_rollout(40, 5, num_rewards)
    expected = naive_advantage(
        rewards, values, next_values_of(values, last_values, dones), dones, 0.9, 0.8
    )
    got = rollout_advantage(rewards, values, last_values, dones.to(dtype), 0.9, 0.8)
    torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=1e-5)


def test_results_are_written_into_out_even_if_values_require_gradients():
    rewards, values, last_values, dones = random_rollout(30, 4)
    expected = rollout_advantage(rewards, values, last_values, dones, 0.9, 0.8)
    out, table = torch.empty_like(rewards), torch.zeros(30, 4, 3)
    got = rollout_advantage(
        rewards,
        values.clone().requires_grad_(),
        last_values,
        dones,
        0.9,
        0.8,
        out=out,
        returns=table[..., 1:2],
    )
    assert got is out and torch.equal(out, expected)
    assert torch.equal(table[..., 1:2], expected + values) and not table[..., ::2].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])  # by numpy, by torch
def test_returns_have_no_gradient(dtype):
    rewards, values, last_values, dones = (x.to(dtype) for x in random_rollout(30, 4))

    def targets():
        return (
            generalized_advantage(rewards, values, values, dones, 0.9, 0.8),
            rollout_advantage(rewards, values, last_values, dones, 0.9, 0.8),
            discounted_sums(rewards, dones, 0.9),
            n_step_returns(rewards, values, last_values, dones, 0.9, 3),
        )

    expected = targets()
    for x in (rewards, values, last_values):
        x.requires_grad_()
    for got, same in zip(targets(), expected, strict=True):
        assert not got.requires_grad and torch.equal(got, same)


def test_a_non_contiguous_out_tensor_raises():
    rewards, values, last_values, dones = random_rollout(4, 3)
    with pytest.raises(SchemaError) as caught:
        rollout_advantage(
            rewards, values, last_values, dones, 0.9, 0.8, out=torch.zeros(4, 3, 2)[..., :1]
        )
    text = "rollout_advantage: out must be contiguous, got strides (6, 2, 1)."
    assert str(caught.value) == text


def test_gamma_zero_returns_the_reward_minus_the_value():
    rewards, values, last_values, dones = random_rollout(7, 5, 2)
    got = rollout_advantage(rewards, values, last_values, dones, 0.0, 0.9)
    torch.testing.assert_close(got, rewards - values)


def test_lambda_zero_gives_the_one_step_error():
    rewards, values, last_values, dones = random_rollout(7, 5)
    expected = rewards + 0.9 * next_values_of(values, last_values, dones) - values
    torch.testing.assert_close(
        rollout_advantage(rewards, values, last_values, dones, 0.9, 0.0), expected
    )


def test_lambda_one_gives_the_discounted_sum_minus_the_value():
    rewards, values, last_values, dones = random_rollout(30, 5)
    rewards_and_tail = rewards.clone()
    rewards_and_tail[-1] += 0.9 * last_values * (1 - dones[-1].float())
    expected = discounted_sums(rewards_and_tail, dones, 0.9) - values
    got = rollout_advantage(rewards, values, last_values, dones, 0.9, 1.0)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_gamma_and_lambda_one_sum_the_rewards_to_the_end():
    rewards = torch.ones(10, 1, 1)
    got = discounted_sums(rewards, torch.zeros(10, 1, 1), 1.0).flatten()
    assert got.tolist() == list(range(10, 0, -1))


def test_each_reward_head_has_its_own_discount():
    rewards, values, last_values, dones = random_rollout(20, 4, 3)
    gamma, lam = torch.tensor([0.0, 0.5, 0.99]), torch.tensor([0.9, 0.0, 1.0])
    together = rollout_advantage(rewards, values, last_values, dones, gamma, lam)
    for head in range(3):
        part = slice(head, head + 1)
        alone = rollout_advantage(
            rewards[..., part],
            values[..., part],
            last_values[..., part],
            dones,
            float(gamma[head]),
            float(lam[head]),
        )
        torch.testing.assert_close(together[..., part], alone, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("num_steps", [1, 2, 3, 7, 100])
def test_n_step_returns_equal_the_naive_loop(num_steps):
    rewards, values, last_values, dones = random_rollout(12, 6, 2)
    got = n_step_returns(rewards, values, last_values, dones, 0.9, num_steps)
    for t, env, head in itertools.product(range(12), range(6), range(2)):
        total, weight, k = 0.0, 1.0, t
        while True:
            total += weight * float(rewards[k, env, head])
            weight *= 0.9
            is_done, k = bool(dones[k, env, 0]), k + 1
            if is_done:
                break
            if k == 12 or k == t + num_steps:
                total += weight * float(last_values[env, head] if k == 12 else values[k, env, head])
                break
        assert float(got[t, env, head]) == pytest.approx(total, abs=1e-5)


def test_inputs_are_not_changed():
    inputs = random_rollout(50, 3)
    copies = [x.clone() for x in inputs]
    rewards, values, last_values, dones = inputs
    rollout_advantage(rewards, values, last_values, dones, 0.9, 0.8)
    generalized_advantage(rewards, values, values, dones, 0.9, 0.8)
    n_step_returns(rewards, values, last_values, dones, 0.9, 3)
    discounted_sums(rewards, dones, 0.9)
    assert all(torch.equal(x, copy) for x, copy in zip(inputs, copies, strict=True))


def test_views_with_strides_are_fine():
    rewards, values, last_values, dones = random_rollout(50, 6)
    part = slice(None, None, 2)
    got = rollout_advantage(
        rewards[:, part], values[:, part], last_values[part], dones[:, part], 0.9, 0.8
    )
    whole = rollout_advantage(rewards, values, last_values, dones, 0.9, 0.8)
    torch.testing.assert_close(got, whole[:, part], atol=1e-6, rtol=1e-6)


def test_nan_in_one_env_stays_in_that_env():
    rewards, values, last_values, dones = random_rollout(1000, 3, done_rate=0)
    rewards[500, 1] = float("nan")
    got = rollout_advantage(rewards, values, last_values, dones, 0.9, 0.8)
    assert (
        got[:501, 1].isnan().all()
        and not got[501:, 1].isnan().any()
        and not got[:, [0, 2]].isnan().any()
    )


def test_infinities_stay_in_their_env_without_a_warning(recwarn):
    rewards, values, last_values, dones = random_rollout(300, 3, done_rate=0)
    # Infinity times 0 is no number, of which numpy would warn
    rewards[200, 1], dones[150, 1] = (
        float("inf"),
        1,
    )
    for got in (
        rollout_advantage(rewards, values, last_values, dones, 0.9, 0.8),
        discounted_sums(rewards, dones, 0.9),
    ):
        assert (
            got[151:201, 1].isposinf().all()
            and got[201:, 1].isfinite().all()
            and got[:, [0, 2]].isfinite().all()
        )
    assert not recwarn.list


def test_wrong_shapes_and_rules_give_exact_errors():
    rewards, values, last_values, dones = random_rollout(4, 3)
    with pytest.raises(SchemaError) as caught:
        rollout_advantage(rewards, values, last_values[:2], dones, 0.9, 0.8)
    assert str(caught.value) == (
        "rollout_advantage: last_values has shape (2, 1), expected (3, 1)."
    )
    with pytest.raises(SchemaError) as caught:
        generalized_advantage(rewards, values[:2], values, dones, 0.9, 0.8)
    assert str(caught.value) == (
        "generalized_advantage: values has shape (2, 3, 1), expected (4, 3, 1)."
    )
    with pytest.raises(UsageError, match="num_steps must be >= 1, got 0"):
        n_step_returns(rewards, values, last_values, dones, 0.9, 0)


def normalized(x, how):
    storage = stored(x, values=torch.zeros_like(x))
    storage.compute_returns(torch.zeros(x.shape[1:]), 0.0, 0.0, normalize=how)
    assert torch.equal(storage.returns, x)
    return storage.advantages


def test_normalizing_gives_mean_zero_and_deviation_one():
    x = torch.randn(20, 6, 3) * torch.tensor([1.0, 10.0, 100.0]) + 5
    torch.testing.assert_close(
        normalized(x, "global"), (x - x.mean()) / (x.std() + 1e-8), atol=1e-5, rtol=1e-5
    )
    apart = (x - x.mean((0, 1))) / (x.std((0, 1)) + 1e-8)
    torch.testing.assert_close(normalized(x, "per_reward"), apart, atol=1e-5, rtol=1e-5)
    assert torch.equal(normalized(x, None), x)


@pytest.mark.parametrize("how", ["global", "per_reward"])
def test_normalizing_fewer_than_two_numbers_gives_zero(how):
    assert normalized(torch.full((1, 1, 1), 3.0), how).item() == 0
    assert normalized(torch.full((2, 2, 1), 3.0), how).eq(0).all()
