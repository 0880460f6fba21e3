"""Encoding of nested results as memory buffers, so that Ray copies shared memory once.

The tensors of a sample are often views of the same memory. `pack` returns this memory once, as an
array of uint8, and the position of each tensor in it. Pickling the tensors would copy the memory
once per tensor. Leaves that are not tensors are unchanged. This module does not use Ray.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..core.fields import DTYPES
from ..core.memory import BufferPool, as_given
from ..core.records import COMPLEX_DTYPES, dense

#: Overlapping tensors are sent as one memory range if they fill at least this share of the range.
#: Otherwise each tensor is copied and sent separately.
_LEAST_SHARE = 0.5
#: Alignment of buffers in bytes: the size of the largest item, complex128.
#: The start of a memory range is rounded down to a multiple, which stays in the allocation.
_ALIGNMENT = 16
_DTYPES = DTYPES | COMPLEX_DTYPES
_NAMES = {dtype: name for name, (dtype, _) in _DTYPES.items()}


#: Position of a tensor:
#: (number of the buffer, first byte, dtype, shape, strides in bytes, whether it was an array).
#: Ray pickles a tuple in half the time of a named tuple.
Place = tuple[int, int, str, tuple[int, ...], tuple[int, ...], bool]
#: Packed result: (buffers of uint8, positions of the tensors, nested result without tensors).
#: In the nested result, `...` marks each tensor. Positions are in the order of these marks.
Packed = tuple[list[npt.NDArray[np.uint8]], list[Place], Any]


class _Memory:
    """Memory at an address, which `np.asarray` views as a writable array `[num_bytes]` of uint8.

    The object, and arrays made from it, keep `owner` alive, the object that owns the memory.
    """

    def __init__(self, address: int, num_bytes: int, owner: Any) -> None:
        self.owner = owner
        self.__array_interface__ = {
            "data": (address, False),
            "shape": (num_bytes,),
            "typestr": "|u1",
            "version": 3,
        }


def is_numbers(leaf: Any) -> bool:
    """Return whether a leaf is a tensor, or an array of numbers."""
    return isinstance(leaf, torch.Tensor) or (
        isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufc"
    )


def map_tree(
    function: Callable[[Any], Any], tree: Any, is_leaf: Callable[[Any], bool] = is_numbers
) -> Any:
    """Apply a function to the leaves of nested mappings, lists and tuples, by default to numbers.

    `is_leaf` returns whether a value is such a leaf. All other values are unchanged, but mappings
    become dicts.
    """
    if is_leaf(tree):
        return function(tree)
    if hasattr(tree, "items") and hasattr(tree, "keys"):  # A `TensorDict` is not a `Mapping`.
        return {key: map_tree(function, value, is_leaf) for key, value in tree.items()}
    return (
        type(tree)(map_tree(function, x, is_leaf) for x in tree)
        if type(tree) in (list, tuple)
        else tree
    )


def pack(tree: Any, pool: BufferPool | None = None) -> Packed:
    """Convert a nested result to memory buffers. Memory of several CPU tensors is stored once.

    The buffers are views of the memory of the tensors. With a `pool`, they are copies in memory of
    the pool.
    """
    leaves: list[Any] = []

    def mark(leaf: Any) -> Any:
        leaves.append(leaf)
        return ...

    marked = map_tree(mark, tree)
    tensors = [dense(as_given(leaf), "a leaf of the tree").cpu() for leaf in leaves]
    tensors = [x if x.data_ptr() % x.element_size() == 0 else x.clone() for x in tensors]
    buffers: list[npt.NDArray[np.uint8]] = []
    places: dict[int, Place] = {}

    def put(group: list[int], start: int, stop: int) -> None:
        start -= start % _ALIGNMENT
        for index in group:
            x = tensors[index]
            is_array = isinstance(leaves[index], np.ndarray)
            size = x.element_size()
            first = x.data_ptr() - start if x.numel() else 0
            strides = tuple(stride * size for stride in x.stride())
            places[index] = len(buffers), first, _NAMES[x.dtype], tuple(x.shape), strides, is_array
        owner = [tensors[index] for index in group]
        buffer = (
            np.asarray(_Memory(start, stop - start, owner))
            if stop > start
            else np.empty(0, np.uint8)
        )
        if pool is not None:
            buffers.append(pool.take(len(buffer)).numpy())
            buffers[-1][:] = buffer
        else:
            buffers.append(buffer)

    for group, start, stop in _overlapping([_extent(x) for x in tensors]):
        if sum(tensors[index].nbytes for index in group) >= _LEAST_SHARE * (stop - start):
            put(group, start, stop)
            continue
        for index in group:
            tensors[index] = tensors[index].clone(memory_format=torch.contiguous_format)
            put([index], *_extent(tensors[index]))
    return buffers, [places[index] for index in range(len(leaves))], marked


def unpack(packed: Packed, copy: bool = False) -> Any:
    """Convert memory buffers back to a nested result, whose tensors are views of the buffers.

    With `copy`, the tensors are views of copies of the buffers.
    """
    buffers, places, tree = packed
    memories = [
        x.copy() if copy else np.asarray(_Memory(x.ctypes.data, x.nbytes, x)) for x in buffers
    ]
    in_order = iter(places)

    def cut(_: Any) -> Any:
        buffer, start, name, shape, strides, is_array = next(in_order)
        array: npt.NDArray[Any] = np.ndarray(
            shape, _DTYPES[name][1], memories[buffer], start, strides
        )
        if is_array:
            return array
        tensor = torch.from_numpy(array)
        return tensor.view(torch.bfloat16) if name == "bfloat16" else tensor

    return map_tree(cut, tree, lambda leaf: leaf is ...)


def join(trees: Sequence[Any]) -> Any:
    """Concatenate the tensors of nested results of the same form along their first axis.

    Lists are concatenated too. Other leaves are taken from the first result. If one of several
    results is None, None is returned. A single result is returned unchanged.
    """
    first = trees[0]
    if len(trees) == 1:
        return first
    if any(tree is None for tree in trees):
        return None
    if isinstance(first, dict):
        return {key: join([tree[key] for tree in trees]) for key in first}
    if isinstance(first, tuple):
        return tuple(join(parts) for parts in zip(*trees, strict=True))
    if isinstance(first, list):
        return [item for tree in trees for item in tree]
    if isinstance(first, np.ndarray):
        return np.concatenate(trees)
    return torch.cat(list(trees)) if isinstance(first, torch.Tensor) else first


def _extent(x: torch.Tensor) -> tuple[int, int]:
    """Return the address range (start, stop) of a tensor; start equals stop if it is empty."""
    reach = (
        1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
        if x.numel()
        else 0
    )
    return x.data_ptr(), x.data_ptr() + reach * x.element_size()


def _overlapping(extents: Sequence[tuple[int, int]]) -> list[tuple[list[int], int, int]]:
    """Group overlapping address ranges. Return (indices in `extents`, start, stop) per group.

    Tensors whose ranges overlap use the same allocation.
    """
    groups: list[tuple[list[int], int, int]] = []
    for number in sorted(range(len(extents)), key=extents.__getitem__):
        start, stop = extents[number]
        if groups and start < groups[-1][2]:
            group, first, last = groups[-1]
            groups[-1] = [*group, number], first, max(last, stop)
        else:
            groups.append(([number], start, stop))
    return groups
