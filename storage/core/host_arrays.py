"""Tensors on the CPU as arrays of numpy: the same memory, and small operations in a third of the time.

One rule: code between `own` and `tensor_of` uses only what arrays and tensors have in common, so
that it is the same on the CPU and on CUDA, where both functions do nothing.
"""

from __future__ import annotations

from math import prod
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from .buffer_pool import MIN_POOLED_BYTES, BufferPool


def zeroed(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocate zeros that are drawn from at random; much of it on huge pages, of which that costs a quarter less.

    On the CPU, zeros of the system itself, which it gives when a page is first written.
    """
    if device.type != "cpu" or prod(shape) * dtype.itemsize < MIN_POOLED_BYTES:
        return torch.zeros(shape, dtype=dtype, device=device)
    pool = BufferPool(1)
    found = pool.empty(shape, dtype)
    return found if pool.num_allocated else found.zero_()


def column_of(size: int, value: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Make a number per place, `[size]`, all alike; on the CPU on huge pages, as places are asked for at random."""
    if value == 0:
        return zeroed((size,), dtype, device)
    if device.type != "cpu":
        return torch.full((size,), value, dtype=dtype, device=device)
    return BufferPool(1).empty((size,), dtype).fill_(value)


def library(device: torch.device) -> ModuleType:
    """Give the library whose functions take what `own` gives: numpy on the CPU, else torch."""
    return np if device.type == "cpu" else torch


def own(tensor: torch.Tensor) -> Any:
    """Show a tensor as an array if it is on the CPU; memory is shared."""
    return tensor.numpy() if tensor.is_cpu else tensor


def tensor_of(values: Any) -> torch.Tensor:
    """Show what `own` gave, or what was computed from it, as a tensor; memory is shared."""
    return values if isinstance(values, torch.Tensor) else torch.from_numpy(values)


def float32_tensor(values: Any) -> torch.Tensor:
    """Copy what `own` gives to a tensor of float32."""
    return values.float() if isinstance(values, torch.Tensor) else torch.from_numpy(values.astype(np.float32))


def take_rows(source: Any, index: Any, out: Any) -> None:
    """Copy rows of what `own` gives to `out`; indices are in range."""
    if isinstance(source, torch.Tensor):
        torch.index_select(source, 0, index, out=out)
    else:
        source.take(index, axis=0, out=out, mode="clip")  # "raise" would copy twice


def as_given(value: Any) -> torch.Tensor:
    """View what a caller gave as a tensor: a tensor where it is, anything else on the CPU; Python's floats as float64.

    `torch.as_tensor` alone moves even a tensor to the default device and rounds floats to the default dtype.
    """
    if isinstance(value, torch.Tensor):
        return value
    return torch.as_tensor(viewable(np.asarray(value)), device="cpu")


def on_host(value: Any) -> npt.NDArray[Any]:
    """Give a tensor, array or list as an array; bfloat16 as float32."""
    if not isinstance(value, torch.Tensor):
        return np.asarray(value)
    value = value.detach()
    array: npt.NDArray[Any] = (value.float() if value.dtype == torch.bfloat16 else value).cpu().numpy()
    return array


def viewable(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Give an array that torch can view: itself, or a copy if it is backwards, unaligned, byte-swapped or read-only."""
    is_odd = any(stride < 0 or (array.itemsize and stride % array.itemsize) for stride in array.strides)
    if not is_odd and array.dtype.isnative and array.flags.writeable and array.flags.aligned:
        return array
    return np.array(array, array.dtype.newbyteorder("="), order="C")
