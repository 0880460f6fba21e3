"""Returns and advantages as pure functions: GAE, n-step returns, discounted sums, normalization.

One rule: every backward recursion here is `x[t] = terms[t] + decay[t] * x[t + 1]`, and `scans.py` runs it.
Time is the first axis everywhere; one reward needs no axis of its own: `[T, N]` with dones `[T, N]` is as good.
What comes after a done changes nothing before it, even if it is NaN. What is computed are targets: no gradient flows
through them. Storages are not known here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ..core.arguments import whole
from ..core.fields import DTYPES
from ..core.host_arrays import as_given
from ..errors import FieldTypeError, SchemaError, UsageError, nearest
from .scans import Scalar, like_of, write_sums

_ACTION = "compute returns"
_REAL = frozenset(dtype for dtype, _ in DTYPES.values())
#: What `boot[t]` is where a time-out cut the trajectory, by the name of the rule.
TRUNCATION_RULES = {"cut": "0", "value": "values[t]", "final": "bootstrap_values[t]"}
#: Axes over which advantages are normalized, by the name of the rule.
NORMALIZATIONS: dict[str | None, tuple[int, ...] | None] = {"global": (0, 1, 2), "per_reward": (0, 1), None: None}


@torch.no_grad()
def generalized_advantage(
    rewards: torch.Tensor,
    values: torch.Tensor,
    next_values: torch.Tensor,
    dones: torch.Tensor,
    gamma: Scalar,
    lam: Scalar,
) -> torch.Tensor:
    """Estimate advantages by exponentially weighted TD errors (Schulman et al. 2016, eq. 16).

    Args:
        rewards: `[T, N, R]` of a floating dtype, reward of the step that starts at t.
        values: `[T, N, R]`, value of the observation at t.
        next_values: `[T, N, R]`, value to bootstrap from after step t; 0 where terminated.
        dones: `[T, N, 1]`, True on the last step of a trajectory; bool, or numbers that are 0 or 1.
        gamma: Discount per step, in [0, 1]; a number or `[R]`.
        lam: Trace decay, in [0, 1]; a number or `[R]`.

    Returns:
        `[T, N, R]` of the dtype and on the device of `rewards`; a new tensor.

    Raises:
        UsageError: An argument is not as above; also SchemaError and FieldTypeError, which are such.
    """
    _check_rollout(rewards, dones, {"values": values, "next_values": next_values})
    gamma, lam = _factor("gamma", gamma, rewards), _factor("lam", lam, rewards)
    out = torch.empty_like(rewards, memory_format=torch.contiguous_format)
    write_sums(out, rewards, dones, gamma, lam, values, next_values)
    return out


def rollout_advantage(
    rewards: torch.Tensor,
    values: torch.Tensor,
    last_values: torch.Tensor,
    dones: torch.Tensor,
    gamma: Scalar,
    lam: Scalar,
    out: torch.Tensor | None = None,
    returns: torch.Tensor | None = None,
) -> torch.Tensor:
    """Estimate advantages of a rollout, whose next values are its own values one step later.

    The same as `generalized_advantage` with `next_values[t] = values[t + 1]` (`last_values`
    `[N, R]` at the end) where not done, else 0; but nothing of that size is built. Value that a
    time-out leaves behind is added to the rewards first: `with_bootstrap`. `out` (contiguous, and none of
    the other tensors) takes the result; `returns` takes the returns, which are the advantages plus the values.
    What is wrong with the arguments is raised before either is written.
    """
    given = {"values": values, "last_values": last_values, "out": out, "returns": returns}
    _check_rollout(rewards, dones, {name: x for name, x in given.items() if x is not None})
    advantages = torch.empty_like(rewards, memory_format=torch.contiguous_format) if out is None else out
    if not advantages.is_contiguous():
        raise SchemaError(_ACTION, "", "a contiguous out", f"one with strides {advantages.stride()}")
    gamma, lam = _factor("gamma", gamma, rewards), _factor("lam", lam, rewards)
    write_sums(advantages, rewards, dones, gamma, lam, values, last_values=last_values, returns=returns)
    return advantages


def with_bootstrap(
    rewards: torch.Tensor,
    values: torch.Tensor,
    dones: torch.Tensor,
    time_outs: torch.Tensor,
    gamma: Scalar,
    truncation: str,
    bootstrap_values: torch.Tensor | None = None,
) -> torch.Tensor:
    """Add to the reward of each timed-out step the discounted value of what it was cut from.

    Args:
        rewards, values: `[T, N, R]`.
        dones, time_outs: `[T, N, 1]`; a time-out counts only where done.
        gamma: Discount per step; a number or `[R]`.
        truncation: "cut": nothing (the caller did it already); "value": the value of the last
            observation before the cut; "final": `bootstrap_values`, the value of the true final one.
        bootstrap_values: `[T, N, R]`, needed by "final".

    Returns:
        `rewards` itself if there is nothing to add, else a new tensor.
    """
    given = {"values": values, "time_outs": time_outs, "bootstrap_values": bootstrap_values}
    _check_rollout(rewards, dones, {name: x for name, x in given.items() if x is not None})
    check_bootstrap(dones, time_outs, truncation, bootstrap_values)
    if truncation == "cut":
        return rewards
    gamma = _factor("gamma", gamma, rewards)
    cut = (dones != 0) & (time_outs != 0)
    source = values if truncation == "value" else bootstrap_values
    if source is None or not bool(cut.any()):
        return rewards
    # where, not multiplication: masked rows may hold anything, NaN too.
    return torch.where(cut, rewards + source * like_of(gamma, rewards), rewards)


def check_bootstrap(
    dones: torch.Tensor, time_outs: torch.Tensor, truncation: str, bootstrap_values: torch.Tensor | None
) -> None:
    """Raise `UsageError` if `with_bootstrap` could not follow its rule, on steps in any order."""
    check_rules(None, truncation)
    if truncation != "final":
        return
    cut = (dones != 0) & (time_outs != 0)
    is_absent = cut if bootstrap_values is None else cut & bootstrap_values.isnan()
    if bool(is_absent.any()):
        expected = "bootstrap_values, the values of the true final observations, wherever a time-out cut"
        advice = "Add them with each transition, or use truncation 'value'"
        got = "none" if bootstrap_values is None else "NaN"
        raise UsageError(_ACTION, "with truncation 'final'", expected, got, advice)


@torch.no_grad()
def discounted_sums(rewards: torch.Tensor, dones: torch.Tensor, gamma: Scalar) -> torch.Tensor:
    """Sum the discounted rewards from each step to the end of its trajectory or of the rollout.

    Args:
        rewards: `[T, N, R]`.
        dones: `[T, N, 1]`, 1 on the last step of a trajectory, else 0.
        gamma: Discount per step; a number or `[R]`.

    Returns:
        `[T, N, R]`, a new tensor.
    """
    _check_rollout(rewards, dones, {})
    gamma = _factor("gamma", gamma, rewards)
    out = torch.empty_like(rewards, memory_format=torch.contiguous_format)
    write_sums(out, rewards, dones, gamma)
    return out


@torch.no_grad()
def n_step_returns(
    rewards: torch.Tensor,
    values: torch.Tensor,
    last_values: torch.Tensor,
    dones: torch.Tensor,
    gamma: Scalar,
    num_steps: int,
) -> torch.Tensor:
    """Sum up to `num_steps` discounted rewards and the discounted value of where they lead.

    Args:
        rewards, values: `[T, N, R]`.
        last_values: `[N, R]`, value of the observation after the rollout.
        dones: `[T, N, 1]`; a sum ends at the first done and bootstraps nothing there.
        gamma: Discount per step; a number or `[R]`.
        num_steps: At least 1; sums that reach the end of the rollout bootstrap from `last_values`.

    Returns:
        `[T, N, R]`, a new tensor.
    """
    _check_rollout(rewards, dones, {"values": values, "last_values": last_values})
    num_steps = whole("compute n-step returns", "num_steps", num_steps, 1)
    ended, discount = dones != 0, like_of(_factor("gamma", gamma, rewards), rewards)
    ahead = torch.cat([values[1:], last_values.unsqueeze(0)]).masked_fill_(ended, 0)
    returns = torch.addcmul(rewards, discount, ahead)
    for _ in range(min(num_steps, len(rewards)) - 1):
        ahead[:-1] = returns[1:]
        ahead[:-1].masked_fill_(ended[:-1], 0)
        torch.addcmul(rewards, discount, ahead, out=returns)
    return returns


def normalize_(advantages: torch.Tensor, how: str | None) -> torch.Tensor:
    """Bring `[T, N, R]` in place to mean 0 and standard deviation 1 (unbiased, plus 1e-8).

    Args:
        advantages: Changed in place.
        how: "global" over everything, "per_reward" for each of the R apart, None for not at all.
            Where fewer than two numbers are taken together the result is 0, never NaN.
    """
    check_rules(how)
    if not _is_rollout(advantages) or advantages.dim() != 3:
        raise SchemaError("normalize advantages", "", "floating numbers of shape [T, N, R]", _words(advantages))
    axes = NORMALIZATIONS[how]
    if axes is None or not advantages.numel():
        return advantages
    count = advantages.numel() if len(axes) == 3 else advantages.shape[0] * advantages.shape[1]
    if count < 2:
        return advantages.zero_()
    advantages -= advantages.mean(axes, keepdim=True)
    norm = torch.linalg.vector_norm(advantages, dim=axes, keepdim=True)
    advantages /= norm / (count - 1) ** 0.5 + 1e-8
    return advantages


def check_rules(normalize: str | None, truncation: str = "cut") -> None:
    """Raise `UsageError` if one is no key of `NORMALIZATIONS` or `TRUNCATION_RULES`."""
    if not isinstance(normalize, str | None) or normalize not in NORMALIZATIONS:
        options = nearest(str(normalize), filter(None, NORMALIZATIONS))
        raise UsageError("normalize advantages", "", f"None, {options}", repr(normalize))
    if not isinstance(truncation, str) or truncation not in TRUNCATION_RULES:
        options = nearest(str(truncation), TRUNCATION_RULES)
        raise UsageError(_ACTION, "", f"truncation {options}", repr(truncation))


def checked_last_values(last_values: torch.Tensor, num_envs: int, num_rewards: int) -> torch.Tensor:
    """Give `[N, R]` float32 from that, or from `[N]` with one reward; raise `SchemaError` on anything else."""
    given = _real_tensor("last_values", last_values)
    if given.dim() == 1 and num_rewards == 1:
        given = given.unsqueeze(-1)
    if tuple(given.shape) != (num_envs, num_rewards):
        expected, got = f"last_values of shape {[num_envs, num_rewards]}", f"{given.dtype} of shape {list(given.shape)}"
        raise SchemaError(_ACTION, "", expected, got)
    return given.to(torch.float32)


def checked_factor(name: str, factor: Scalar, num_rewards: int) -> torch.Tensor:
    """Give a discount or a trace decay as float32, `[]` or `[R]`; raise if it is neither or not in [0, 1]."""
    return _exact_factor(name, factor, num_rewards).to(torch.float32)


def _exact_factor(name: str, factor: Scalar, num_rewards: int) -> torch.Tensor:
    checked = _real_tensor(name, factor)
    if checked.shape not in (torch.Size([]), torch.Size([num_rewards])):
        expected = f"{name} a number or of shape [{num_rewards}]"
        raise SchemaError(_ACTION, "", expected, f"shape {list(checked.shape)}")
    if not bool(((checked >= 0) & (checked <= 1)).all()):
        raise UsageError(_ACTION, "", f"{name} in [0, 1]", str(factor))
    return checked


def _real_tensor(name: str, value: Any) -> torch.Tensor:
    """Give what a caller handed in as a dense tensor of real numbers; raise `FieldTypeError` if it is none."""
    try:
        # Numbers of Python's are float64 whatever the default dtype is: in half precision 0.99 is another discount.
        is_array = isinstance(value, (torch.Tensor, np.ndarray))
        given = as_given(value) if is_array else torch.tensor(value, dtype=torch.float64, device="cpu")
    except (TypeError, ValueError, RuntimeError) as cause:
        got = type(value).__name__
        raise FieldTypeError(_ACTION, "", f"{name} a number or a tensor of numbers", got) from cause
    if given.is_complex() or given.is_meta or given.is_quantized or given.layout is not torch.strided:
        got = f"{given.layout} {given.dtype} on {given.device}"
        raise FieldTypeError(_ACTION, "", f"{name} a dense tensor of real numbers", got)
    return given


def _factor(name: str, factor: Scalar, rewards: torch.Tensor) -> Scalar:
    """Check a discount or a trace decay, as `checked_factor` does, without rounding it."""
    if isinstance(factor, (float, int)) and 0 <= factor <= 1:
        return factor
    return _exact_factor(name, factor, rewards.shape[-1])


def _check_rollout(rewards: torch.Tensor, dones: torch.Tensor, others: Mapping[str, torch.Tensor]) -> None:
    """Refuse rewards that are not `[T, N, R]`, dones that are not `[T, N, 1]`, and others that are not like either."""
    if not _is_rollout(rewards):
        raise SchemaError(_ACTION, "", "rewards, floating numbers of shape [T, N, R]", _words(rewards))
    whole = tuple(rewards.shape)
    flags = (*whole[:-1], 1) if len(whole) == 3 else whole
    shapes = {"last_values": whole[1:], "dones": flags, "time_outs": flags}
    for name, x in {"dones": dones, **others}.items():
        if not isinstance(x, torch.Tensor) or x.dtype not in _REAL or x.layout is not torch.strided:
            raise FieldTypeError(_ACTION, "", f"{name}, a dense tensor of real numbers", _words(x))
        if x.shape != shapes.get(name, whole):
            raise SchemaError(_ACTION, "", f"{name} of shape {list(shapes.get(name, whole))}", str(list(x.shape)))


def _is_rollout(x: Any) -> bool:
    is_dense = isinstance(x, torch.Tensor) and x.layout is torch.strided
    return is_dense and x.is_floating_point() and x.dim() in (2, 3)


def _words(x: Any) -> str:
    return f"{x.layout} {x.dtype} of shape {list(x.shape)}" if isinstance(x, torch.Tensor) else type(x).__name__
