"""Returns and advantages as pure functions: GAE, n-step returns, discounted sums, normalization.

Every backward recursion is `x[t] = terms[t] + decay[t] * x[t + 1]`, which `_write_sums` computes.
Time is the first axis. With one reward, `[T, N]` with dones `[T, N]` is accepted too. Steps after a
done, even with NaN, do not change steps before the done. Results have no gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch

from ..core.arguments import choice, whole
from ..core.deferred import DeferredErrors
from ..core.fields import REAL_DTYPES, Field
from ..core.memory import sent
from ..core.records import fit
from ..errors import FieldTypeError, SchemaError, UsageError, nearest

#: A discount or a trace decay: one number, or `[R]`.
Scalar = float | torch.Tensor

#: Rules for the bootstrap value at a time-out: no value, the step's own value, or the step's
#: `bootstrap_values`.
TRUNCATION_RULES = ("cut", "value", "final")
#: Axes over which advantages are normalized, by name of the normalization.
NORMALIZATIONS = {"global": (0, 1, 2), "per_reward": (0, 1)}
_NUMPY_FLOATS = {torch.float32: np.float32, torch.float64: np.float64}
_NUMPY_DTYPES = frozenset(
    (torch.uint8, torch.bool, torch.int64, torch.int32, torch.int16, torch.int8, *_NUMPY_FLOATS)
)
#: Numbers per piece on the CPU. 256 KiB of float32 stay in the L2 cache between several passes.
_PIECE_SIZE = 1 << 16
#: Numbers per piece on CUDA. Pieces are larger, since starting a call takes longer.
_PIECE_SIZE_CUDA = 1 << 20
#: Numbers that an elementwise numpy call processes in the time that starting the call takes.
_CALL_SIZE_NUMPY = 5_000
_CALL_SIZE_TORCH = 10_000
_CALL_SIZE_CUDA = 250_000


@torch.no_grad()
def generalized_advantage(
    rewards: torch.Tensor,
    values: torch.Tensor,
    next_values: torch.Tensor,
    dones: torch.Tensor,
    gamma: Scalar,
    lam: Scalar,
) -> torch.Tensor:
    """Compute advantages by exponentially weighted TD errors (Schulman et al. 2016, eq. 16).

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
        UsageError: An argument is not as above. `SchemaError` and `FieldTypeError` are subclasses.
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
    """Compute advantages of a rollout, whose next values are its own values one step later.

    Equals `generalized_advantage` with next values `values[t + 1]` where not done, else 0. The next
    value of the last step is `last_values`, `[N, R]`. The result is written to `out`, a contiguous
    tensor that shares no memory with the arguments; None allocates it. Advantages plus values are
    written to `returns`, unless it is None. Errors are raised before any tensor is written.
    """
    _check_rollout(
        rewards, dones=dones, values=values, last_values=last_values, out=out, returns=returns
    )
    advantages = _like(rewards) if out is None else out
    if not advantages.is_contiguous():
        raise SchemaError(f"out must be contiguous, got strides {advantages.stride()}.")
    gamma = checked_factor("gamma", gamma, rewards.shape[-1])
    lam = checked_factor("lam", lam, rewards.shape[-1])
    return _write_sums(advantages, _Terms(rewards, dones, values, last_values), gamma, lam, returns)


def discounted_sums(rewards: torch.Tensor, dones: torch.Tensor, gamma: Scalar) -> torch.Tensor:
    """Compute the discounted sum of rewards from each step to the end of its trajectory.

    A trajectory without a done ends with the rollout.

    Arguments and result are as for `generalized_advantage`.
    """
    _check_rollout(rewards, dones=dones)
    return _write_sums(
        _like(rewards), _Terms(rewards, dones), checked_factor("gamma", gamma, rewards.shape[-1])
    )


@torch.no_grad()
def n_step_returns(
    rewards: torch.Tensor,
    values: torch.Tensor,
    last_values: torch.Tensor,
    dones: torch.Tensor,
    gamma: Scalar,
    num_steps: int,
) -> torch.Tensor:
    """Compute n-step returns: `num_steps` discounted rewards plus the discounted value after them.

    A sum ends at the first done, without a value after the done. A sum that reaches the end of the
    rollout uses `last_values`, `[N, R]`. The remaining arguments and the result are as for
    `generalized_advantage`.
    """
    _check_rollout(rewards, dones=dones, values=values, last_values=last_values)
    num_steps = whole("num_steps", num_steps, 1)
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
    """Rewards, values and flags of steps, and memory for their returns and advantages.

    Flags are `[rows, B, 1]`, and all other tensors `[rows, B, R]`.
    """

    rewards: torch.Tensor
    values: torch.Tensor
    dones: torch.Tensor
    time_outs: torch.Tensor
    returns: torch.Tensor
    advantages: torch.Tensor
    bootstrap_values: torch.Tensor | None

    @property
    def cut(self) -> torch.Tensor:
        """Return whether each step is cut by a time-out: `[rows, B, 1]` bool.

        A time-out flag on a step that is not done is ignored.
        """
        return (self.dones != 0) & (self.time_outs != 0)


def check_rules(x: Signals, normalize: str | None, truncation: str) -> None:
    """Raise `UsageError` for unknown rules, and on the CPU for missing bootstrap values."""
    if normalize is not None and normalize not in NORMALIZATIONS:
        options = nearest(normalize, NORMALIZATIONS)
        raise UsageError(f"normalize must be None or one of {options}, got {normalize!r}.")
    choice("truncation", truncation, TRUNCATION_RULES)
    if truncation != "final" or x.rewards.is_cuda:
        return
    if bool(_without_bootstrap(x, x.cut).any()):
        raise _missing_bootstrap("missing" if x.bootstrap_values is None else "NaN")


def write_returns(
    x: Signals,
    last_values: torch.Tensor,
    gamma: Scalar,
    lam: Scalar,
    normalize: str | None,
    truncation: str,
    deferred: DeferredErrors | None = None,
) -> None:
    """Write returns and advantages of steps in the order of time. Arguments are not checked.

    On CUDA, missing bootstrap values count as 0. `deferred` receives the error, so that a later
    call raises it.
    """
    rewards = x.rewards
    bootstrap = {"value": x.values, "final": x.bootstrap_values}.get(truncation)
    cut = x.cut if truncation != "cut" else None
    if cut is not None and truncation == "final" and deferred is not None:
        is_absent = _without_bootstrap(x, cut)
        deferred.note(
            is_absent.sum(),
            lambda count: (
                _missing_bootstrap(f"missing for {count} steps of an earlier call")
                if count
                else None
            ),
        )
        cut = cut ^ is_absent
    if cut is not None and bootstrap is not None:
        # Without time-outs, the CPU skips the addition. On a device this check would make the host
        # wait; adding zeros takes only three kernel launches.
        may_be_cut = not rewards.is_cpu or bool(cut.any())
        if may_be_cut:
            # `where` ignores a NaN in the bootstrap value of a step that was not cut. The product
            # of this NaN and 0 would be NaN.
            rewards = torch.where(cut, rewards + bootstrap * _as(gamma, rewards), rewards)
    _write_sums(
        x.advantages, _Terms(rewards, x.dones, x.values, last_values), gamma, lam, x.returns
    )
    if normalize is not None:
        _normalize(x.advantages, NORMALIZATIONS[normalize])


def _without_bootstrap(x: Signals, cut: torch.Tensor) -> torch.Tensor:
    """Return whether each step is cut by a time-out and has no bootstrap value: a bool tensor."""
    return cut if x.bootstrap_values is None else cut & x.bootstrap_values.isnan()


def _missing_bootstrap(problem: str) -> UsageError:
    return UsageError(
        f"bootstrap_values are {problem} at time-outs, and truncation 'final' needs them. Add them "
        "with each transition, or use truncation 'value'."
    )


def _normalize(advantages: torch.Tensor, axes: tuple[int, ...]) -> None:
    """Scale advantages to mean 0 and deviation 1 over axes, in place. A single number becomes 0."""
    count = prod(advantages.shape[axis] for axis in axes)
    if count < 2:
        advantages.zero_()
        return
    advantages -= advantages.mean(axes, keepdim=True)
    norm = torch.linalg.vector_norm(advantages, dim=axes, keepdim=True)
    advantages /= norm / (count - 1) ** 0.5 + 1e-8


def checked_last_values(last_values: torch.Tensor, num_envs: int, num_rewards: int) -> torch.Tensor:
    """Return last values as float32 `[N, R]`, from `[N, R]`, or from `[N]` with one reward."""
    field = Field("last_values", (num_envs, num_rewards))
    shapes = (field.shape, (num_envs,)) if num_rewards == 1 else (field.shape,)
    return fit(field, last_values, shapes=shapes).to(torch.float32).view(field.shape)


def checked_factor(
    name: str,
    factor: Scalar,
    num_rewards: int,
    deferred: DeferredErrors | None = None,
    note_valid: Callable[[Scalar], None] | None = None,
) -> Scalar:
    """Check that a discount or trace decay is in [0, 1], and return it: a number, or `[R]`.

    A factor on CUDA is checked there. `deferred` receives the error, so that a later call raises
    it. `note_valid` is called with the factor once the host knows that it is valid. If `deferred`
    is None, the host waits for the check.
    """
    if isinstance(factor, (float, int)) and 0 <= factor <= 1:
        return factor
    checked = fit(Field(name, (num_rewards,)), factor, shapes=((num_rewards,), ()))
    is_inside = (checked >= 0) & (checked <= 1)
    if deferred is not None and checked.is_cuda:

        def read(num_outside: int) -> UsageError | None:
            if num_outside:
                return UsageError(
                    f"{name} was outside [0, 1] in an earlier call. Discard its returns."
                )
            if note_valid is not None:
                note_valid(checked)
            return None

        deferred.note((~is_inside).sum(), read)
    elif not bool(is_inside.all()):
        raise UsageError(f"{name} must be in [0, 1], got {factor}.")
    return checked


class CheckedFactors:
    """The checked discount and trace decay of a storage.

    A tensor on CUDA is checked there, and the host learns later that it is valid. From then on, the
    same tensor is not checked again until it changes.

    Args:
        num_rewards: R.
        device: Device of the storage.
        deferred: Receives the errors of factors on CUDA; None for a storage on the CPU.
    """

    def __init__(
        self, num_rewards: int, device: torch.device, deferred: DeferredErrors | None
    ) -> None:
        self._num_rewards = num_rewards
        self._device = device
        self._deferred = deferred
        #: Valid tensors by name: the tensor, its `_version` at the check, and the factor on the
        #: device. The entry keeps the tensor alive, so `is` cannot mistake another one for it.
        self._checked: dict[str, tuple[torch.Tensor, int, Scalar]] = {}

    def on_device(self, name: str, factor: Scalar) -> Scalar:
        """Return a checked factor: a number unchanged, a tensor on the device."""
        if self._deferred is None:
            return checked_factor(name, factor, self._num_rewards)
        if not isinstance(factor, torch.Tensor) or not factor.is_cuda or factor.is_inference():
            return self._checked_on_device(name, factor)
        entry = self._checked.get(name)
        if entry is not None and entry[0] is factor and entry[1] == factor._version:
            return entry[2]
        version = factor._version

        def note_valid(checked: Scalar) -> None:
            self._checked[name] = (factor, version, _on(self._device, checked))

        return self._checked_on_device(name, factor, note_valid)

    def _checked_on_device(
        self, name: str, factor: Scalar, note_valid: Callable[[Scalar], None] | None = None
    ) -> Scalar:
        checked = checked_factor(name, factor, self._num_rewards, self._deferred, note_valid)
        return _on(self._device, checked)


def _on(device: torch.device, factor: Scalar) -> Scalar:
    return sent(factor, device) if isinstance(factor, torch.Tensor) else factor


# -- the recursion -------------------------------------------------------------------------------


class _Terms(NamedTuple):
    """The numbers from which the terms of the recursion are computed.

    Without values, the term of a step is its reward. With values, it is the TD error
    `rewards + discount * next_values - values`.

    Attributes:
        rewards: `[T, N, R]`.
        dones: Flags of the last steps of trajectories, `[T, N, 1]`.
        values: `[T, N, R]`; None without values.
        ahead: The next values: `[T, N, R]` for all steps, or `[N, R]` only for the last step. The
            other next values are then `values[t + 1]`, and 0 at dones.
    """

    rewards: Any
    dones: Any
    values: Any = None
    ahead: Any = None


@torch.no_grad()
def _write_sums(
    out: torch.Tensor,
    terms: _Terms,
    discount: Scalar,
    trace: Scalar = 1.0,
    returns: torch.Tensor | None = None,
) -> torch.Tensor:
    """Write to `out` the sum of the terms of each step and the following steps up to the next done.

    Each further step is discounted by `discount * trace`. `returns` receives the sums plus the
    values, unless it is None. `out` is contiguous. Steps are processed in pieces that stay in the
    cache, from the last piece to the first. `lib` is numpy if numpy supports the dtypes and the
    device, otherwise torch. Calls of numpy take half the time.
    """
    lib, (sums, totals, rewards, dones, values, ahead) = _arrays(out, returns, *terms)
    rows = max(1, (_PIECE_SIZE_CUDA if out.is_cuda else _PIECE_SIZE) // max(1, prod(out.shape[1:])))
    # As in torch, infinities and NaN cause no warnings.
    with np.errstate(over="ignore", invalid="ignore"):
        gamma = _broadcast_factor(discount, out, lib)
        lam = _broadcast_factor(trace, out, lib)
        memory = lib.empty_like(sums[:rows])
        for start in reversed(range(0, len(sums), rows)):
            stop = min(start + rows, len(sums))
            piece = sums[start:stop]
            decay = memory[: stop - start]
            _write_alive(dones[start:stop], gamma, decay)
            if values is None:
                piece[...] = rewards[start:stop]
            else:
                if ahead.ndim == sums.ndim:
                    lib.multiply(ahead[start:stop], gamma, out=piece)
                else:
                    after = ahead if stop == len(sums) else values[stop]
                    _discounted(lib, decay[:-1], values[start + 1 : stop], piece[:-1])
                    _discounted(lib, decay[-1], after, piece[-1])
                piece += rewards[start:stop]
                piece -= values[start:stop]
            decay *= lam
            if stop < len(sums):
                piece[-1] += _discounted(lib, decay[-1], sums[stop])
            _scan(lib, piece, decay)
            # Add the values now, while both pieces are still in the cache.
            if totals is not None:
                lib.add(piece, values[start:stop], out=totals[start:stop])
    # In numpy, 0 * NaN and 0 * inf are NaN. A number that is not finite therefore passes dones and
    # reaches the first step.
    if lib is np and not bool(lib.isfinite(sums[:1]).all()):
        _write_step_by_step(out, terms, _as(discount, out), _as(trace, out))
        if returns is not None:
            torch.add(out, terms.values, out=returns)
    return out


def _write_step_by_step(
    out: torch.Tensor, terms: _Terms, discount: torch.Tensor, trace: torch.Tensor
) -> None:
    """Compute the sums of `_write_sums` step by step, so that a NaN does not pass a done."""
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
    """Compute `x[t] += decay[t] * x[t + 1]` from the last step to the first, in place.

    `x` and `decay` are contiguous `[T, ...]`. `decay` is overwritten. A loop over the steps is slow
    for few envs, since every step takes a call. Recursive doubling (Hillis and Steele 1986) makes
    it shorter: after k passes over all steps, `x[t]` is a sum over 2^k steps. The loop then
    processes 2^k steps per call. Doubling stops when a pass takes longer than the calls that it
    saves. 1000 steps of 1 env take 50 us instead of 1300 us.
    """
    num_steps = len(x)
    width = prod(x.shape[1:])
    if num_steps < 2 or not width:
        return
    if lib is np:
        call_size = _CALL_SIZE_NUMPY
    else:
        call_size = _CALL_SIZE_CUDA if x.is_cuda else _CALL_SIZE_TORCH
    longest = num_steps / (3 + 3 * num_steps * width / call_size)
    x = x.reshape(num_steps, width)
    decay = decay.reshape(num_steps, width)
    reach = 1
    if reach < longest:
        product = lib.empty_like(x)
        spare = lib.empty_like(x)
    # `reach` is the number of steps in the sum `x[t]`.
    while reach < longest:
        n = num_steps - reach
        _discounted(lib, decay[:n], x[reach:], product[:n])
        lib.add(x[:n], product[:n], out=x[:n])
        n -= reach  # The products of later steps are not needed.
        lib.multiply(decay[:n], decay[reach : reach + n], out=spare[:n])
        decay, spare = spare, decay
        reach *= 2
    later = x[num_steps - reach :]
    change = lib.empty_like(x[:reach])
    for start in range(num_steps - 2 * reach, -1, -reach):
        row = x[start : start + reach]
        _discounted(lib, decay[start : start + reach], later, change)
        lib.add(row, change, out=row)
        later = row
    rest = num_steps % reach
    if rest:
        x[:rest] += _discounted(lib, decay[:rest], x[reach : reach + rest])


def _discounted(lib: Any, decay: Any, later: Any, out: Any = None) -> Any:
    """Return `decay * later`, where `later` are sums or values one step later.

    At a done, `decay` is 0, and a NaN after the done must not change the sums before it. With
    torch, these products are set to 0. With numpy, this would take a quarter longer, so
    `_write_sums` checks its result for NaN instead. On a device, such a check would wait.
    """
    product = lib.multiply(decay, later, out=out)
    return product if lib is np else product.masked_fill_(decay == 0, 0)


def _write_alive(dones: Any, factor: Any, out: Any) -> None:
    """Write `factor` to `out` for steps that are not done, and 0 for other steps."""
    if dones.shape == out.shape:
        out[...] = dones
    else:
        # A single call that broadcasts flags over the last axis takes 3 times as long.
        for head in range(out.shape[-1]):
            out[..., head] = dones[..., 0]
    # `dones` are 0 or 1, so `factor - factor * dones` is exactly `factor` or 0. Comparing them with
    # 0 takes 5 times as long in torch, and equally long in numpy.
    out *= -factor
    out += factor


def _arrays(out: torch.Tensor, *others: torch.Tensor | None) -> tuple[Any, list[Any]]:
    """Return numpy and arrays over the memory of the tensors, or torch and the tensors.

    Torch is returned if a tensor is on a device or has a dtype that numpy lacks.
    """
    tensors = [out, *others]
    if out.dtype not in _NUMPY_FLOATS:
        return torch, tensors
    if all(x is None or (x.is_cpu and x.dtype in _NUMPY_DTYPES) for x in tensors):
        return np, [None if x is None else x.numpy(force=True) for x in tensors]
    return torch, tensors


def _broadcast_factor(factor: Scalar, like: torch.Tensor, lib: Any) -> Any:
    """Return a factor in a form that broadcasts fast over `like`, `[T, N, R]`.

    The result is one number or `[N, R]`. Broadcasting a factor `[R]` takes ten times as long.
    """
    if lib is np and not isinstance(factor, torch.Tensor):
        return np.asarray(factor, _NUMPY_FLOATS[like.dtype])
    placed = _as(factor, like)
    if placed.numel() == 1:
        placed = placed.reshape(())
    else:
        placed = placed.expand(like.shape[1:]).contiguous()
    return placed.numpy(force=True) if lib is np else placed


def _as(factor: Scalar, like: torch.Tensor) -> torch.Tensor:
    if isinstance(factor, torch.Tensor):
        return factor.to(like.device, like.dtype)
    # `torch.tensor` would copy the number from the host and wait. `full` does not wait.
    return torch.full((), factor, dtype=like.dtype, device=like.device)


# -- checks --------------------------------------------------------------------------------------


def _check_rollout(rewards: torch.Tensor, **others: torch.Tensor | None) -> None:
    """Check that rewards are `[T, N, R]` or `[T, N]`, and that the other shapes match."""
    is_dense = isinstance(rewards, torch.Tensor) and rewards.layout is torch.strided
    if not is_dense or not rewards.is_floating_point() or rewards.dim() not in (2, 3):
        raise SchemaError(
            f"rewards must be floating-point numbers of shape (T, N, R), got {_words(rewards)}."
        )
    whole_shape = tuple(rewards.shape)
    flags = (*whole_shape[:-1], 1) if len(whole_shape) == 3 else whole_shape
    shapes = {"last_values": whole_shape[1:], "dones": flags}
    for name, x in others.items():
        if x is None and name in ("out", "returns"):
            continue
        if (
            not isinstance(x, torch.Tensor)
            or x.dtype not in REAL_DTYPES
            or x.layout is not torch.strided
        ):
            raise FieldTypeError(f"{name} must be a dense tensor of real numbers, got {_words(x)}.")
        shape = shapes.get(name, whole_shape)
        if x.shape != shape:
            raise SchemaError(f"{name} has shape {tuple(x.shape)}, expected {tuple(shape)}.")


def _like(rewards: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(rewards, memory_format=torch.contiguous_format)


def _words(x: Any) -> str:
    return (
        f"{x.layout} {x.dtype} of shape {tuple(x.shape)}"
        if isinstance(x, torch.Tensor)
        else type(x).__name__
    )
