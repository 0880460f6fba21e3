"""Returns and advantages as pure functions: GAE, n-step returns, discounted sums, normalization.

One rule: every backward recursion here is `x[t] = terms[t] + decay[t] * x[t + 1]`, which only `_write_sums` runs.
Time is the first axis everywhere; one reward needs no axis of its own: `[T, N]` with dones `[T, N]` is as good.
What comes after a done changes nothing before it, even if it is NaN. What is computed are targets: no gradient flows
through them. Storages are not known here.
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch

from ..core.arguments import choice, whole
from ..core.deferred import DeferredErrors
from ..core.fields import REAL_DTYPES, Field
from ..core.memory import sent
from ..core.records import fit
from ..errors import FieldTypeError, SchemaError, UsageError

#: A discount or a trace decay: one number, or `[R]`.
Scalar = float | torch.Tensor

_ACTION = "compute returns"
#: What a step bootstraps from that was cut by a time-out: nothing, its own value, or its bootstrap value.
TRUNCATION_RULES = ("cut", "value", "final")
#: Axes over which advantages are normalized, by the name of the rule.
NORMALIZATIONS = {"global": (0, 1, 2), "per_reward": (0, 1)}
_NUMPY_FLOATS = {torch.float32: np.float32, torch.float64: np.float64}
_NUMPY_DTYPES = frozenset((torch.uint8, torch.bool, torch.int64, torch.int32, torch.int16, torch.int8, *_NUMPY_FLOATS))
#: Numbers that are swept several times: 256 KiB of float32 stay in the L2 cache; on CUDA starting takes longer.
_PIECE_SIZE, _PIECE_SIZE_CUDA = 1 << 16, 1 << 20
#: How many numbers an elementwise call takes through in the time that it takes to start.
_CALL_SIZE_NUMPY, _CALL_SIZE_TORCH, _CALL_SIZE_CUDA = 5_000, 10_000, 250_000


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
    _check_rollout(rewards, dones=dones, values=values, next_values=next_values)
    gamma = checked_factor("gamma", gamma, rewards.shape[-1])
    lam = checked_factor("lam", lam, rewards.shape[-1])
    return _write_sums(_like(rewards), _Terms(rewards, dones, values, next_values), gamma, lam)


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

    The same as `generalized_advantage` with `next_values[t] = values[t + 1]` (`last_values` `[N, R]` at the end) where
    not done, else 0. `out` (contiguous, and none of the other tensors) takes the result; `returns` takes the advantages
    plus the values. What is wrong with the arguments is raised before either is written.
    """
    _check_rollout(rewards, dones=dones, values=values, last_values=last_values, out=out, returns=returns)
    advantages = _like(rewards) if out is None else out
    if not advantages.is_contiguous():
        raise SchemaError(_ACTION, "", "a contiguous out", f"one with strides {advantages.stride()}")
    gamma = checked_factor("gamma", gamma, rewards.shape[-1])
    lam = checked_factor("lam", lam, rewards.shape[-1])
    return _write_sums(advantages, _Terms(rewards, dones, values, last_values), gamma, lam, returns)


def discounted_sums(rewards: torch.Tensor, dones: torch.Tensor, gamma: Scalar) -> torch.Tensor:
    """Sum the discounted rewards from each step to the end of its trajectory or of the rollout.

    Arguments and result are as for `generalized_advantage`.
    """
    _check_rollout(rewards, dones=dones)
    return _write_sums(_like(rewards), _Terms(rewards, dones), checked_factor("gamma", gamma, rewards.shape[-1]))


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

    A sum ends at the first done and bootstraps nothing there; one that reaches the end of the rollout bootstraps from
    `last_values` `[N, R]`. Other arguments and the result are as for `generalized_advantage`.
    """
    _check_rollout(rewards, dones=dones, values=values, last_values=last_values)
    num_steps = whole("compute n-step returns", "num_steps", num_steps, 1)
    ended = dones != 0
    discount = _as(checked_factor("gamma", gamma, rewards.shape[-1]), rewards)
    ahead = torch.cat([values[1:], last_values.unsqueeze(0)]).masked_fill_(ended, 0)
    returns = torch.addcmul(rewards, discount, ahead)
    for _ in range(min(num_steps, len(rewards)) - 1):
        ahead[:-1] = returns[1:]
        ahead[:-1].masked_fill_(ended[:-1], 0)
        torch.addcmul(rewards, discount, ahead, out=returns)
    return returns


# -- for storages ---------------------------------------------------------------------------------


class Signals(NamedTuple):
    """The columns that returns are computed from and written to: `[rows, B, R]`, flags `[rows, B, 1]`."""

    rewards: torch.Tensor
    values: torch.Tensor
    dones: torch.Tensor
    time_outs: torch.Tensor
    returns: torch.Tensor
    advantages: torch.Tensor
    bootstrap_values: torch.Tensor | None

    @property
    def cut(self) -> torch.Tensor:
        """Where a time-out cut the trajectory: it counts only where done."""
        return (self.dones != 0) & (self.time_outs != 0)


def check_rules(x: Signals, normalize: str | None, truncation: str) -> None:
    """Raise `UsageError` if `write_returns` cannot follow these rules; only the CPU looks at values here."""
    if normalize is not None:
        choice("normalize advantages", "None or", normalize, NORMALIZATIONS)
    if choice(_ACTION, "truncation", truncation, TRUNCATION_RULES) != "final" or x.rewards.is_cuda:
        return
    if bool(_without_bootstrap(x, x.cut).any()):
        raise _missing_bootstrap("none" if x.bootstrap_values is None else "NaN")


def write_returns(
    x: Signals,
    last_values: torch.Tensor,
    gamma: Scalar,
    lam: Scalar,
    normalize: str | None,
    truncation: str,
    deferred: DeferredErrors | None = None,
) -> None:
    """Write returns and advantages of steps in the order of time; everything is checked already.

    On CUDA, time-outs without bootstrap values add nothing, and their error goes to `deferred`.
    """
    rewards = x.rewards
    source = {"value": x.values, "final": x.bootstrap_values}.get(truncation)
    cut = x.cut if truncation != "cut" else None
    if cut is not None and truncation == "final" and deferred is not None:
        is_absent = _without_bootstrap(x, cut)
        deferred.note(is_absent.sum(), lambda count: _missing_bootstrap(f"none for {count} of an earlier call"))
        cut = cut ^ is_absent
    # Only the CPU looks for time-outs first: on a device looking costs a wait, and adding costs three launches.
    if cut is not None and source is not None and not (rewards.is_cpu and not bool(cut.any())):
        # where, not multiplication: masked rows may hold anything, NaN too.
        rewards = torch.where(cut, rewards + source * _as(gamma, rewards), rewards)
    _write_sums(x.advantages, _Terms(rewards, x.dones, x.values, last_values), gamma, lam, x.returns)
    if normalize is not None:
        _normalize(x.advantages, NORMALIZATIONS[normalize])


def _without_bootstrap(x: Signals, cut: torch.Tensor) -> torch.Tensor:
    """Return where a time-out cut and no bootstrap value was added."""
    return cut if x.bootstrap_values is None else cut & x.bootstrap_values.isnan()


def _missing_bootstrap(got: str) -> UsageError:
    expected = "bootstrap_values, the values of the true final observations, wherever a time-out cut"
    advice = "Add them with each transition, or use truncation 'value'"
    return UsageError(_ACTION, "with truncation 'final'", expected, got, advice)


def _normalize(advantages: torch.Tensor, axes: tuple[int, ...]) -> None:
    """Bring to mean 0 and standard deviation 1 over some axes; to 0 where fewer than two numbers are taken together."""
    count = prod(advantages.shape[axis] for axis in axes)
    if count < 2:
        advantages.zero_()
        return
    advantages -= advantages.mean(axes, keepdim=True)
    norm = torch.linalg.vector_norm(advantages, dim=axes, keepdim=True)
    advantages /= norm / (count - 1) ** 0.5 + 1e-8


def checked_last_values(last_values: torch.Tensor, num_envs: int, num_rewards: int) -> torch.Tensor:
    """Return `[N, R]` float32 from that, or from `[N]` with one reward."""
    field = Field("last_values", (num_envs, num_rewards))
    shapes = (field.shape, (num_envs,)) if num_rewards == 1 else (field.shape,)
    return fit(_ACTION, field, last_values, shapes=shapes).to(torch.float32).view(field.shape)


def checked_factor(name: str, given: Scalar, num_rewards: int, deferred: DeferredErrors | None = None) -> Scalar:
    """Check a discount or a trace decay: a number, or `[R]`, in [0, 1].

    `deferred` takes the error of a factor on CUDA; without it the host waits for the device.
    """
    if isinstance(given, (float, int)) and 0 <= given <= 1:
        return given
    checked = fit(_ACTION, Field(name, (num_rewards,)), given, shapes=((num_rewards,), ()))
    is_inside = (checked >= 0) & (checked <= 1)
    if deferred is not None and checked.is_cuda:
        got = "other numbers in an earlier call"
        deferred.note((~is_inside).sum(), lambda count: UsageError(_ACTION, "", f"{name} in [0, 1]", got))
    elif not bool(is_inside.all()):
        raise UsageError(_ACTION, "", f"{name} in [0, 1]", str(given))
    return checked


class CheckedFactors:
    """The discount and the trace decay of a storage. Tensors on its CUDA device are checked again only if they change.

    Args:
        num_rewards: R.
        device: Device of the storage.
        deferred: Takes the errors of factors on CUDA; None for a storage on the CPU.
    """

    def __init__(self, num_rewards: int, device: torch.device, deferred: DeferredErrors | None) -> None:
        self._num_rewards = num_rewards
        self._device = device
        self._deferred = deferred
        #: Name -> the tensor that was checked, its version then, and the factor on the device.
        #: The reference keeps the memory of the tensor from being reused.
        self._checked: dict[str, tuple[torch.Tensor, int, Scalar]] = {}

    def on_device(self, name: str, given: Scalar) -> Scalar:
        """Check a factor; return a number as it is, and a tensor on the device."""
        if self._deferred is None:
            return checked_factor(name, given, self._num_rewards)
        if isinstance(given, torch.Tensor) and given.is_cuda and not given.is_inference():
            known = self._checked.get(name)
            if known is None or known[0] is not given or known[1] != given._version:
                known = given, given._version, self._checked_on_device(name, given)
                self._checked[name] = known
            return known[2]
        return self._checked_on_device(name, given)

    def _checked_on_device(self, name: str, given: Scalar) -> Scalar:
        checked = checked_factor(name, given, self._num_rewards, self._deferred)
        return sent(checked, self._device) if isinstance(checked, torch.Tensor) else checked


# -- the recursion -------------------------------------------------------------------------------


class _Terms(NamedTuple):
    """What is summed up to the next done; tensors, or arrays over their memory.

    Without values the rewards; with values `rewards + discount * next_values - values`, where the next values are
    `ahead` `[T, N, R]`, or the values one step later and after the last one `ahead` `[N, R]`.
    """

    rewards: Any
    dones: Any
    values: Any = None
    ahead: Any = None


@torch.no_grad()
def _write_sums(
    out: torch.Tensor, terms: _Terms, discount: Scalar, trace: Scalar = 1.0, returns: torch.Tensor | None = None
) -> torch.Tensor:
    """Write into contiguous `out` the sums, discounted by `discount * trace`, and into `returns` these plus the values.

    Time is worked on in pieces that stay in the cache, from the last to the first. `lib` is numpy, where numpy can
    compute it, or torch: numpy's calls take half the time.
    """
    lib, (x, total, *given) = _arrays(out, returns, *terms)
    r, d, v, ahead = given
    rows = max(1, (_PIECE_SIZE_CUDA if out.is_cuda else _PIECE_SIZE) // max(1, prod(out.shape[1:])))
    with np.errstate(over="ignore", invalid="ignore"):  # as quiet as torch where infinities and NaN go through
        gamma = _place_factor(discount, out, lib)
        lam = _place_factor(trace, out, lib)
        decay = lib.empty_like(x[:rows])
        for start in reversed(range(0, len(x), rows)):
            stop = min(start + rows, len(x))
            piece = x[start:stop]
            weight = decay[: stop - start]
            _write_alive(d[start:stop], gamma, weight)
            if v is None:
                piece[...] = r[start:stop]
            else:
                if ahead.ndim == x.ndim:
                    lib.multiply(ahead[start:stop], gamma, out=piece)
                else:
                    _decay(lib, weight[:-1], v[start + 1 : stop], piece[:-1])
                    _decay(lib, weight[-1], ahead if stop == len(x) else v[stop], piece[-1])
                piece += r[start:stop]
                piece -= v[start:stop]
            weight *= lam
            if stop < len(x):
                piece[-1] += _decay(lib, weight[-1], x[stop])
            _scan(lib, piece, weight)
            if total is not None:  # here, while both are still in the cache
                lib.add(piece, v[start:stop], out=total[start:stop])
    # numpy's products let a number that is not finite through a decay of 0: it has then reached the first step.
    if lib is np and not bool(lib.isfinite(x[:1]).all()):
        _write_step_by_step(out, terms, _as(discount, out), _as(trace, out))
        if returns is not None:
            torch.add(out, terms.values, out=returns)
    return out


def _write_step_by_step(out: torch.Tensor, terms: _Terms, discount: torch.Tensor, trace: torch.Tensor) -> None:
    """Do what `_write_sums` does so that whatever stands after a done, NaN too, stays there."""
    ended = terms.dones != 0
    ahead = terms.ahead
    out.copy_(terms.rewards)
    if ahead is not None:
        if ahead.dim() < out.dim():
            ahead = torch.cat([terms.values[1:], ahead.unsqueeze(0)]).masked_fill_(ended, 0)
        out.add_(ahead * discount).sub_(terms.values)
    for step in range(len(out) - 2, -1, -1):
        out[step] += (discount * trace * out[step + 1]).masked_fill_(ended[step], 0)


def _scan(lib: Any, x: Any, decay: Any) -> None:
    """Run `x[t] += decay[t] * x[t + 1]` from the last step of contiguous `[T, ...]` to the first; `decay` is spent.

    First by recursive doubling (Hillis and Steele 1986), after which what were several rows are one, then row by row:
    1000 steps of 1 env take 50 us instead of 1300. Doubling ends where its passes over all numbers would take longer
    than the calls that they save.
    """
    num_steps = len(x)
    width = prod(x.shape[1:])
    if num_steps < 2 or not width:
        return
    call_size = _CALL_SIZE_NUMPY if lib is np else _CALL_SIZE_CUDA if x.is_cuda else _CALL_SIZE_TORCH
    longest = num_steps / (3 + 3 * num_steps * width / call_size)
    x = x.reshape(num_steps, width)
    decay = decay.reshape(num_steps, width)
    reach = 1
    if reach < longest:
        product = lib.empty_like(x)
        spare = lib.empty_like(x)
    while reach < longest:  # x[t] becomes the sum of twice as many steps
        n = num_steps - reach
        _decay(lib, decay[:n], x[reach:], product[:n])
        lib.add(x[:n], product[:n], out=x[:n])
        n -= reach  # products of steps after these are never asked for
        lib.multiply(decay[:n], decay[reach : reach + n], out=spare[:n])
        decay, spare, reach = spare, decay, 2 * reach
    later = x[num_steps - reach :]
    change = lib.empty_like(x[:reach])
    for start in range(num_steps - 2 * reach, -1, -reach):
        row = x[start : start + reach]
        _decay(lib, decay[start : start + reach], later, change)
        lib.add(row, change, out=row)
        later = row
    if rest := num_steps % reach:
        x[:rest] += _decay(lib, decay[:rest], x[reach : reach + rest])


def _decay(lib: Any, decay: Any, later: Any, out: Any = None) -> Any:
    """Multiply; with torch, a decay of 0 gives 0 even for NaN.

    numpy's products are checked afterwards, as a mask would cost a quarter more. On a device checking would wait.
    """
    product = lib.multiply(decay, later, out=out)
    return product if lib is np else product.masked_fill_(decay == 0, 0)


def _write_alive(dones: Any, factor: Any, out: Any) -> None:
    """Write `factor` where not done, else 0."""
    if dones.shape == out.shape:
        out[...] = dones
    else:
        for head in range(out.shape[-1]):  # 3 times as fast as one call that repeats each flag a few times
            out[..., head] = dones[..., 0]
    # For flags of 0 and 1 this is as exact as a comparison; torch does it 5 times as fast, numpy as fast.
    out *= -factor
    out += factor


def _arrays(out: torch.Tensor, *others: torch.Tensor | None) -> tuple[Any, list[Any]]:
    """Return numpy and arrays over the memory of the tensors; or torch and the tensors, where numpy cannot do it."""
    tensors = [out, *others]
    if out.dtype in _NUMPY_FLOATS and all(x is None or (x.is_cpu and x.dtype in _NUMPY_DTYPES) for x in tensors):
        return np, [None if x is None else x.numpy(force=True) for x in tensors]
    return torch, tensors


def _place_factor(factor: Scalar, like: torch.Tensor, lib: Any) -> Any:
    """Return one number, or one for each place in a row: repeating short rows would cost ten times as much."""
    if lib is np and not isinstance(factor, torch.Tensor):
        return np.asarray(factor, _NUMPY_FLOATS[like.dtype])
    found = _as(factor, like)
    if found.numel() == 1:
        found = found.reshape(())
    found = found if found.dim() == 0 else found.expand(like.shape[1:]).contiguous()
    return found.numpy(force=True) if lib is np else found


def _as(factor: Scalar, like: torch.Tensor) -> torch.Tensor:
    if isinstance(factor, torch.Tensor):
        return factor.to(like.device, like.dtype)
    return torch.full((), factor, dtype=like.dtype, device=like.device)  # a copy from the host would wait


# -- checks --------------------------------------------------------------------------------------


def _check_rollout(rewards: torch.Tensor, **others: torch.Tensor | None) -> None:
    """Refuse rewards that are not `[T, N, R]`, and others that do not have the shape that goes with their name."""
    is_dense = isinstance(rewards, torch.Tensor) and rewards.layout is torch.strided
    if not is_dense or not rewards.is_floating_point() or rewards.dim() not in (2, 3):
        raise SchemaError(_ACTION, "", "rewards, floating numbers of shape [T, N, R]", _words(rewards))
    everything = tuple(rewards.shape)
    flags = (*everything[:-1], 1) if len(everything) == 3 else everything
    shapes = {"last_values": everything[1:], "dones": flags}
    for name, x in others.items():
        if x is None and name in ("out", "returns"):
            continue
        if not isinstance(x, torch.Tensor) or x.dtype not in REAL_DTYPES or x.layout is not torch.strided:
            raise FieldTypeError(_ACTION, "", f"{name}, a dense tensor of real numbers", _words(x))
        if x.shape != shapes.get(name, everything):
            raise SchemaError(_ACTION, "", f"{name} of shape {list(shapes.get(name, everything))}", str(list(x.shape)))


def _like(rewards: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(rewards, memory_format=torch.contiguous_format)


def _words(x: Any) -> str:
    return f"{x.layout} {x.dtype} of shape {list(x.shape)}" if isinstance(x, torch.Tensor) else type(x).__name__
