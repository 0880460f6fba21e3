"""One backward recursion over time, `x[t] = terms[t] + decay[t] * x[t + 1]`, for returns and advantages.

One rule: `write_sums` is the only code that runs it: in pieces of time that stay in the cache, from the last to the
first; within a piece first by recursive doubling where rows are narrow and many (Hillis and Steele 1986), after which
what were several rows are one, then row by row. A decay of 0 ends a trajectory, which NaN and infinity pass: where
some came, `_write_exactly` does it anew. Time is the first axis. `lib` is numpy, where numpy can compute it, or torch:
numpy's calls take half the time. What the numbers mean is decided in `returns.py`.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import Any

import numpy as np
import torch

#: A discount or a trace decay: one number, or `[R]`.
Scalar = float | torch.Tensor

_CHUNK_ELEMENTS = 1 << 16  # 256 KiB of float32: what is swept several times stays in the L2 cache
_CHUNK_ELEMENTS_CUDA = 1 << 20  # there starting a sweep takes longer than what it sweeps
_NUMPY_FLOATS = {torch.float32: np.float32, torch.float64: np.float64}
_NUMPY_DTYPES = frozenset((torch.uint8, torch.bool, torch.int64, torch.int32, torch.int16, torch.int8, *_NUMPY_FLOATS))
_MANY_HEADS = 8  # from here on repeating a flag for every reward head is done fast enough in one call
# Measured cost of one elementwise call and of one element in it, in microseconds, on two machines.
_COST_NUMPY = (0.65, 0.00020)
_COST_TORCH = (1.5, 0.00015)
_COST_CUDA = (5.0, 0.000005)


@torch.no_grad()
def write_sums(
    out: torch.Tensor,
    rewards: torch.Tensor,
    dones: torch.Tensor,
    discount: Scalar,
    trace: Scalar = 1.0,
    values: torch.Tensor | None = None,
    next_values: torch.Tensor | None = None,
    last_values: torch.Tensor | None = None,
    returns: torch.Tensor | None = None,
) -> None:
    """Write into contiguous `out` the sums of terms that are discounted by `discount * trace`, up to the next done.

    The terms are the rewards; with values they are `rewards + discount * next_values - values`, where the next values
    are `next_values`, or the values one step later: `last_values` at the end, 0 where done. `returns` takes
    `out + values`.
    """
    lib, (x, r, d, v, ahead, last, sums) = _arrays(out, rewards, dones, values, next_values, last_values, returns)
    rows = _rows_per_piece(x)
    # numpy is as quiet as torch where infinities and NaN go through.
    with np.errstate(over="ignore", invalid="ignore"):
        gamma, lam = _factor_of(discount, out, lib), _factor_of(trace, out, lib)
        decay = lib.empty_like(x[:rows])
        for start in reversed(range(0, len(x), rows)):
            stop = min(start + rows, len(x))
            piece, weight = x[start:stop], decay[: stop - start]
            _write_alive(d[start:stop], gamma, weight)
            if v is None:
                piece[...] = r[start:stop]
            else:
                if ahead is not None:
                    lib.multiply(ahead[start:stop], gamma, out=piece)
                else:
                    lib.multiply(weight[:-1], v[start + 1 : stop], out=piece[:-1])
                    lib.multiply(weight[-1], last if stop == len(x) else v[stop], out=piece[-1])
                piece += r[start:stop]
                piece -= v[start:stop]
            weight *= lam
            if stop < len(x):
                lib.add(piece[-1], weight[-1] * x[stop], out=piece[-1])
            _scan_piece(lib, piece, weight)
            if sums is not None:  # here, while both are still in the cache
                lib.add(piece, v[start:stop], out=sums[start:stop])
    # What is not finite reaches the first step, past any decay.
    if bool(lib.count_nonzero(lib.isfinite(x[:1])) < prod(x[:1].shape)):
        _write_exactly(out, rewards, dones, (discount, trace), values, next_values, last_values)
        if returns is not None and values is not None:
            torch.add(out, values, out=returns)


def _write_exactly(
    out: torch.Tensor,
    rewards: torch.Tensor,
    dones: torch.Tensor,
    factors: tuple[Scalar, Scalar],
    values: torch.Tensor | None,
    next_values: torch.Tensor | None,
    last_values: torch.Tensor | None,
) -> None:
    """Do the same step by step, so that whatever stands after a done stays there."""
    ended, (discount, trace) = dones != 0, (like_of(factor, out) for factor in factors)
    out.copy_(rewards)
    if values is not None:
        ahead = next_values
        if ahead is None:
            assert last_values is not None
            ahead = torch.cat([values[1:], last_values.unsqueeze(0)]).masked_fill_(ended, 0)
        out.add_(ahead * discount).sub_(values)
    decay = discount * trace
    for step in range(len(out) - 2, -1, -1):
        out[step] += (decay * out[step + 1]).masked_fill_(ended[step], 0)


def like_of(factor: Scalar, like: torch.Tensor) -> torch.Tensor:
    """Give a factor as a tensor of the dtype and on the device of `like`."""
    return torch.as_tensor(factor, dtype=like.dtype, device=like.device)


def _scan_piece(lib: Any, x: Any, decay: Any) -> None:
    """Run `x[t] += decay[t] * x[t + 1]` from the last step of contiguous `[T, ...]` to the first; `decay` is spent."""
    num_steps, width = len(x), prod(x.shape[1:])
    if num_steps < 2 or not width:
        return
    costs = _COST_NUMPY if lib is np else _COST_CUDA if x.is_cuda else _COST_TORCH
    x, decay, reach = x.reshape(num_steps, width), decay.reshape(num_steps, width), 1
    product, spare = lib.empty_like(x), lib.empty_like(x)
    for _ in range(_num_doublings(num_steps, width, *costs)):  # x[t] becomes the sum of twice as many steps
        n = num_steps - reach
        lib.multiply(decay[:n], x[reach:], out=product[:n])
        lib.add(x[:n], product[:n], out=x[:n])
        n -= reach  # products of steps after these are never asked for
        lib.multiply(decay[:n], decay[reach : reach + n], out=spare[:n])
        decay, spare, reach = spare, decay, 2 * reach
    for stop in range(num_steps - reach, 0, -reach):
        start = max(0, stop - reach)
        row, change = x[start:stop], product[: stop - start]
        lib.multiply(decay[start:stop], x[start + reach : stop + reach], out=change)
        lib.add(row, change, out=row)


@lru_cache(maxsize=256)
def _num_doublings(num_steps: int, width: int, call: float, element: float) -> int:
    """How often to double before what is left is scanned row by row: as the measured costs say."""

    def cost(doublings: int) -> float:
        reach = 1 << doublings
        by_doubling = 3 * doublings * (call + num_steps * width * element)
        return by_doubling + 2 * (num_steps / reach - 1) * (call + reach * width * element)

    return min(range(num_steps.bit_length()), key=cost)


def _write_alive(dones: Any, factor: Any, out: Any) -> None:
    """Write `factor` where not done, else 0."""
    # For flags of 0 and 1 this is as exact as a comparison; torch does it 5 times as fast, numpy as fast.
    if dones.shape[-1] == 1 < out.shape[-1] <= _MANY_HEADS:
        for head in range(out.shape[-1]):  # 3 times as fast as one call that repeats each flag a few times
            out[..., head] = dones[..., 0]
    else:
        out[...] = dones
    out *= -factor
    out += factor


def _arrays(out: torch.Tensor, *others: torch.Tensor | None) -> tuple[Any, list[Any]]:
    """Give numpy and arrays over the memory of the tensors; or torch and the tensors, where numpy cannot do it."""
    tensors = [out, *others]
    are_numpy = [x is None or (x.is_cpu and x.dtype in _NUMPY_DTYPES) for x in tensors]
    if out.dtype not in _NUMPY_FLOATS or not all(are_numpy):
        return torch, tensors
    return np, [x if x is None else x.numpy(force=True) for x in tensors]


def _rows_per_piece(x: Any) -> int:
    """How many steps of `[T, ...]` are worked on at a time, so that they stay in the cache through all passes."""
    limit = _CHUNK_ELEMENTS_CUDA if isinstance(x, torch.Tensor) and x.is_cuda else _CHUNK_ELEMENTS
    width: int = prod(x.shape[1:])
    return max(1, limit // max(1, width))


def _factor_of(factor: Scalar, like: torch.Tensor, lib: Any) -> Any:
    """Give one number, or one for each place in a row: repeating short rows would cost ten times as much."""
    if lib is np and not isinstance(factor, torch.Tensor):
        return np.asarray(factor, _NUMPY_FLOATS[like.dtype])
    found = like_of(factor, like)
    found = found if found.dim() == 0 else found.expand(like.shape[1:]).contiguous()
    return found.numpy(force=True) if lib is np else found
