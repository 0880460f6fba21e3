"""Backward recursions over time, `x[t] += decay[t] * x[t + 1]`, and what feeds them.

One rule: `scan_piece_` is the only code that runs one: row by row, and where rows are narrow and many,
first by recursive doubling (Hillis and Steele 1986), after which what were several rows are one. There a decay
of 0 ends a trajectory, which NaN and infinity pass: where some came, `scan_exactly_` does it anew. Time is
the first axis. What is called `lib` is numpy, where numpy can compute it, or torch: numpy's calls take half
the time. What the numbers mean is decided in `returns.py`.
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


def scan_(x: torch.Tensor, decay: torch.Tensor) -> None:
    """Run `x[t] += decay[t] * x[t + 1]` from the last step to the first, in place; `decay` is spent."""
    lib, (sums, weight) = arrays(x, decay)
    num_steps, rows = len(sums), rows_per_piece(sums)
    with as_quiet_as_torch():
        for start in reversed(range(0, num_steps, rows)):
            stop = min(start + rows, num_steps)
            if stop < num_steps:
                sums[stop - 1 : stop] += weight[stop - 1] * sums[stop]
            scan_piece_(lib, sums[start:stop], weight[start:stop])


def met_only_finite(lib: Any, x: Any) -> bool:
    """Whether all that was scanned into `x` was finite: what is not reaches the first step, past any decay."""
    first = x[:1]
    return bool(lib.count_nonzero(lib.isfinite(first)) == prod(first.shape))  # in half the time of all()


def scan_exactly_(x: torch.Tensor, dones: torch.Tensor, factor: Scalar) -> None:
    """Run `x[t] += factor * x[t + 1]` where not done, in place: whatever stands after a done stays there."""
    ended, decay = dones != 0, like_of(factor, x)
    for step in range(len(x) - 2, -1, -1):
        x[step] += (decay * x[step + 1]).masked_fill_(ended[step], 0)


def scan_piece_(lib: Any, x: Any, decay: Any) -> None:
    """Scan contiguous `[T, ...]` without neighbours; `decay` is spent."""
    num_steps, width = len(x), prod(x.shape[1:])
    if num_steps < 2 or not width:
        return
    costs = _COST_NUMPY if lib is np else _COST_CUDA if x.is_cuda else _COST_TORCH
    x, decay, reach = x.reshape(num_steps, width), decay.reshape(num_steps, width), 1
    if num_rounds := _num_rounds(num_steps, width, *costs):
        decay, reach = _double_(lib, x, decay, num_rounds)
    _scan_by_rows_(lib, x, decay, reach)


@lru_cache(maxsize=256)
def _num_rounds(num_steps: int, width: int, call: float, element: float) -> int:
    """How often to double the reach before what is left is scanned: as the measured costs say."""

    def cost(rounds: int) -> float:
        reach = 1 << rounds
        by_doubling = 3 * rounds * (call + num_steps * width * element)
        return by_doubling + 2 * (num_steps / reach - 1) * (call + reach * width * element)

    return min(range(num_steps.bit_length()), key=cost)


def _double_(lib: Any, x: Any, decay: Any, num_rounds: int) -> tuple[Any, int]:
    """Make `x[t]` the sum of the next `reach` steps; give the products of their decays, and `reach`."""
    reach, product, spare = 1, lib.empty_like(x), lib.empty_like(x)
    for _ in range(num_rounds):
        n = len(x) - reach
        lib.multiply(decay[:n], x[reach:], out=product[:n])
        lib.add(x[:n], product[:n], out=x[:n])
        n -= reach  # products of steps after these are never asked for
        lib.multiply(decay[:n], decay[reach : reach + n], out=spare[:n])
        decay, spare, reach = spare, decay, 2 * reach
    return decay, reach


def _scan_by_rows_(lib: Any, x: Any, decay: Any, reach: int) -> None:
    """Run `x[t] += decay[t] * x[t + reach]` from the last step to the first, `reach` steps at a time."""
    later = x[-reach:]
    product = lib.empty_like(later)
    first = len(x) % reach
    for start in range(len(x) - 2 * reach, -1, -reach):
        row = x[start : start + reach]
        lib.multiply(decay[start : start + reach], later, out=product)
        lib.add(row, product, out=row)
        later = row
    if first:
        row, product = x[:first], product[:first]
        lib.multiply(decay[:first], x[reach : reach + first], out=product)
        lib.add(row, product, out=row)


def write_alive(dones: Any, factor: Any, out: Any) -> None:
    """Write `factor` where not done, else 0."""
    # For flags of 0 and 1 this is as exact as a comparison; torch does it 5 times as fast, numpy as fast.
    if dones.shape[-1] == 1 < out.shape[-1] <= _MANY_HEADS:
        for head in range(out.shape[-1]):  # 3 times as fast as one call that repeats each flag a few times
            out[..., head] = dones[..., 0]
    else:
        out[...] = dones
    out *= -factor
    out += factor


def decay_of(dones: torch.Tensor, like: torch.Tensor, factor: Scalar) -> torch.Tensor:
    """Give `factor` where not done, else 0: a new contiguous tensor of the shape of `like`, `[T, N, R]`."""
    decay = torch.empty_like(like, memory_format=torch.contiguous_format)
    lib, (weight, flags) = arrays(decay, dones)
    write_alive(flags, factor_of(factor, like, lib), weight)
    return decay


def arrays(first: torch.Tensor, *others: torch.Tensor | None) -> tuple[Any, list[Any]]:
    """Give numpy and arrays over the memory of the tensors; or torch and the tensors, where numpy cannot do it."""
    tensors = [first, *others]
    # A list and no generator, no function either: that takes half the time, of a small scan a fiftieth.
    are_numpy = [x is None or (x.is_cpu and x.dtype in _NUMPY_DTYPES) for x in tensors]
    if first.dtype not in _NUMPY_FLOATS or not all(are_numpy):
        return torch, tensors
    return np, [x if x is None else x.numpy(force=True) for x in tensors]


def as_quiet_as_torch() -> np.errstate:
    """Let infinities and NaN go through numpy's functions without a warning, as they go through torch's."""
    return np.errstate(over="ignore", invalid="ignore")


def rows_per_piece(x: Any) -> int:
    """How many steps of `[T, ...]` are worked on at a time, so that they stay in the cache through all passes."""
    limit = _CHUNK_ELEMENTS_CUDA if isinstance(x, torch.Tensor) and x.is_cuda else _CHUNK_ELEMENTS
    width: int = prod(x.shape[1:])
    return max(1, limit // max(1, width))


def factor_of(factor: Scalar, like: torch.Tensor, lib: Any) -> Any:
    """Give one number, or one for each place in a row: repeating short rows would cost ten times as much."""
    if lib is np and not isinstance(factor, torch.Tensor):
        return np.asarray(factor, _NUMPY_FLOATS[like.dtype])
    found = like_of(factor, like)
    found = found if found.dim() == 0 else found.expand(like.shape[1:]).contiguous()
    return found.numpy(force=True) if lib is np else found


def like_of(factor: Scalar, like: torch.Tensor) -> torch.Tensor:
    """Give a factor as a tensor of the dtype and on the device of `like`."""
    return torch.as_tensor(factor, dtype=like.dtype, device=like.device)
