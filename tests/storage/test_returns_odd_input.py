"""Returns of NaN, infinity and wrong arguments: no value crosses a done, and no argument is
broadcast.
"""

from __future__ import annotations

import inspect
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from storage import (
    SchemaError,
    UsageError,
    discounted_sums,
    generalized_advantage,
    n_step_returns,
    rollout_advantage,
)
from tests.storage.test_returns import random_rollout


def loop_until_done(terms, dones, factor):
    """Sum discounted terms to the end of each trajectory, with a plain `if`."""
    sums = terms.double().clone()
    for t, env in itertools.product(reversed(range(len(terms) - 1)), range(terms.shape[1])):
        if not dones[t, env, 0]:
            sums[t, env] += factor * sums[t + 1, env]
    return sums


def n_step_loop(rewards, values, last_values, dones, gamma, num_steps):
    ahead = torch.cat([values, last_values.unsqueeze(0)]).double()
    result = torch.zeros(rewards.shape, dtype=torch.float64)
    for t, env in itertools.product(range(len(rewards)), range(rewards.shape[1])):
        weight = 1.0
        for k in range(t, min(t + num_steps, len(rewards))):
            result[t, env] += weight * rewards[k, env]
            weight *= gamma
            if dones[k, env, 0]:
                break
        else:
            result[t, env] += weight * ahead[k + 1, env]
    return result


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16]
)  # by numpy, by torch
@given(data=st.data())
def test_steps_after_a_done_never_change_returns_before_it_even_if_they_are_nan(dtype, data):
    num_steps, num_envs = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 4))
    rate = data.draw(st.sampled_from([0.0, 0.3, 1.0]))
    rewards, values, last_values, dones = random_rollout(num_steps, num_envs, 1, rate, num_steps)
    odd = st.sampled_from([float("nan"), float("inf"), -float("inf")])
    for x in (rewards, values, last_values):
        for _ in range(data.draw(st.integers(0, 2))):
            x.view(-1)[data.draw(st.integers(0, x.numel() - 1))] = data.draw(odd)
    rewards, values, last_values = (x.to(dtype) for x in (rewards, values, last_values))
    ahead = torch.where(dones.bool(), 0, torch.cat([values[1:], last_values.unsqueeze(0)]).double())
    errors = rewards.double() + 0.9 * ahead - values.double()
    returns = torch.empty_like(values)
    steps = data.draw(st.integers(1, num_steps + 1))
    advantages = rollout_advantage(rewards, values, last_values, dones, 0.9, 0.8, returns=returns)
    general = generalized_advantage(rewards, values, ahead.to(dtype), dones, 0.9, 0.8)
    sums = discounted_sums(rewards, dones, 0.9)
    few = n_step_returns(rewards, values, last_values, dones, 0.9, steps)
    expected = loop_until_done(errors, dones, 0.9 * 0.8)
    checks = [
        (advantages, expected),
        (general, expected),
        (returns, expected + values.double()),
        (sums, loop_until_done(rewards, dones, 0.9)),
        (few, n_step_loop(rewards, values, last_values, dones, 0.9, steps)),
    ]
    tolerance = 0.3 if dtype == torch.bfloat16 else 1e-4
    for got, wanted in checks:
        torch.testing.assert_close(
            got.double(), wanted, atol=tolerance, rtol=tolerance, equal_nan=True, check_dtype=False
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_steps_after_a_done_never_change_returns_before_it_in_blockwise_computation(dtype, odd):
    rewards, values, last_values, _ = (x.to(dtype) for x in random_rollout(4, 70_000))
    dones = torch.zeros(4, 70_000, 1, dtype=torch.bool)
    dones[1] = True
    expected = rollout_advantage(rewards, values, last_values, dones, 0.9, 0.8)
    rewards[2, 5], values[3, 6], last_values[7] = odd, odd, odd
    got = rollout_advantage(rewards, values, last_values, dones, 0.9, 0.8)
    assert torch.equal(got[:2], expected[:2]) and torch.equal(got[:, 8:], expected[:, 8:])
    assert not got[2, 5:8].isfinite().any()


@pytest.mark.parametrize("last", [float("nan"), float("inf")])
def test_last_values_are_ignored_after_a_done_at_the_last_step(last):
    rewards, values, last_values, dones = random_rollout(5, 2)
    dones[-1] = 1
    expected = rollout_advantage(rewards, values, last_values, dones, 0.9, 0.8)
    odd = torch.full_like(last_values, last)
    torch.testing.assert_close(rollout_advantage(rewards, values, odd, dones, 0.9, 0.8), expected)
    got = n_step_returns(rewards, values, odd, dones, 0.9, 9)
    assert torch.equal(got, n_step_returns(rewards, values, last_values, dones, 0.9, 9))


WRONG_ARGUMENTS = {
    "dones without heads": (
        {"dones": torch.zeros(4, 3)},
        r"dones has shape .*, expected \(4, 3, 1\)",
    ),
    "dones of another env": (
        {"dones": torch.zeros(4, 1, 1)},
        r"dones has shape .*, expected \(4, 3, 1\)",
    ),
    "dones as a list": (
        {"dones": [0, 1]},
        "dones must be a dense tensor of real numbers, got list",
    ),
    "sparse dones": (
        {"dones": torch.zeros(4, 3, 1).to_sparse()},
        "dones must be a dense tensor of real numbers",
    ),
    "rewards as a list": (
        {"rewards": [1.0]},
        "rewards must be floating-point numbers of shape .*, got list",
    ),
    "flat rewards": (
        {"rewards": torch.zeros(4, 3)},
        r"dones has shape \(4, 3, 1\), expected \(4, 3\)",
    ),
    "one axis": (
        {"rewards": torch.zeros(4)},
        r"rewards must be floating-point numbers of shape \(T, N, R\)",
    ),
    "whole rewards": (
        {"rewards": torch.zeros(4, 3, 2).long()},
        "rewards must be floating-point numbers of shape",
    ),
    "other values": (
        {"values": torch.zeros(4, 3, 1)},
        r"values has shape .*, expected \(4, 3, 2\)",
    ),
    "complex values": (
        {"values": torch.zeros(4, 3, 2) + 0j},
        "values must be a dense tensor of real numbers",
    ),
    "one last value": (
        {"last_values": torch.zeros(3, 1)},
        r"last_values.* has shape .*, expected \(3, 2\)",
    ),
    "a discount for three": (
        {"gamma": [0.1, 0.2, 0.3]},
        r"field 'gamma' has shape \(3,\), expected \(2,\) or \(\)",
    ),
    "a large discount": ({"gamma": 1.5}, r"gamma must be in \[0, 1\], got 1\.5"),
    "no trace": (
        {"lam": None},
        "field 'lam' must be a tensor or an array of numbers, got NoneType",
    ),
    "half a step": ({"num_steps": 1.5}, "num_steps must be an integer >= 1, got 1.5"),
    "a true step": ({"num_steps": True}, "num_steps must be an integer >= 1, got True"),
    "no step": ({"num_steps": "2"}, "num_steps must be an integer >= 1, got '2'"),
}


@pytest.mark.parametrize("name", WRONG_ARGUMENTS)
@pytest.mark.parametrize(
    "function", [generalized_advantage, rollout_advantage, discounted_sums, n_step_returns]
)
def test_wrong_arguments_of_the_functions_are_refused_and_none_is_broadcast(function, name):
    wrong, text = WRONG_ARGUMENTS[name]
    rewards, values, last_values, dones = random_rollout(4, 3, 2)
    arguments = {
        "rewards": rewards,
        "values": values,
        "next_values": values,
        "last_values": last_values,
        "dones": dones,
    }
    arguments |= {"gamma": 0.9, "lam": 0.8, "num_steps": 2}
    taken = {
        key: x for key, x in arguments.items() if key in inspect.signature(function).parameters
    }
    assert function(**taken).shape == rewards.shape
    if not wrong.keys() <= taken.keys():
        return
    with pytest.raises(UsageError, match=text):
        function(**{**taken, **wrong})


@pytest.mark.parametrize(
    "function", [generalized_advantage, rollout_advantage, discounted_sums, n_step_returns]
)
def test_a_single_reward_needs_no_reward_axis(function):
    rewards, values, last_values, dones = random_rollout(40, 3)
    arguments = {
        "rewards": rewards,
        "values": values,
        "next_values": values,
        "last_values": last_values,
        "dones": dones,
    }
    flat = {name: x.squeeze(-1) for name, x in arguments.items()}
    others = {"gamma": 0.9, "lam": 0.8, "num_steps": 2}
    names = inspect.signature(function).parameters
    whole, short = (
        {key: x for key, x in {**item, **others}.items() if key in names}
        for item in (arguments, flat)
    )
    assert torch.equal(function(**short), function(**whole).squeeze(-1))


def test_wrong_results_are_refused_before_either_is_written():
    rewards, values, last_values, dones = random_rollout(4, 3)
    out = torch.zeros(4, 3, 1)
    for wrong in (torch.zeros(4, 3), torch.zeros(4, 1, 1)):
        with pytest.raises(SchemaError, match=r"returns has shape .*, expected \(4, 3, 1\)"):
            rollout_advantage(rewards, values, last_values, dones, 0.9, 0.8, out=out, returns=wrong)
        with pytest.raises(SchemaError, match=r"out has shape .*, expected \(4, 3, 1\)"):
            rollout_advantage(rewards, values, last_values, dones, 0.9, 0.8, out=wrong)
    assert not out.any()


def test_discounts_may_be_lists_and_arrays():
    rewards, values, last_values, dones = random_rollout(6, 3, 2)
    gamma, lam = [0.9, 0.5], np.array([0.8, 0.7])
    for function, given_in in (
        (rollout_advantage, (rewards, values, last_values, dones)),
        (generalized_advantage, (rewards, values, values, dones)),
    ):
        expected = function(*given_in, torch.tensor(gamma), torch.tensor(lam))
        torch.testing.assert_close(function(*given_in, gamma, lam), expected)
    torch.testing.assert_close(
        discounted_sums(rewards, dones, gamma), discounted_sums(rewards, dones, torch.tensor(gamma))
    )
