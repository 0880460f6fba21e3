"""Trajectories as users give them, and as rows of block files.

One rule: rows stand env after env, time within each, as in a block file, so that a trajectory moves between a file
and memory as bytes. Which trajectories there are is not known here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch

from storage.core.fields import Field, Schema, dtype_name, flatten
from storage.core.memory import BufferPool, as_given
from storage.errors import SchemaError

from ..blocks.row_layout import PACKED, RowLayout

#: The leaves that say how many steps a trajectory has; the first of them that is there counts.
LENGTH_NAMES = ("rewards", "actions", "prev_logprobs")
#: Types of leaves that belong to the trajectory as a whole.
INFO_TYPES = (str, int, float, bool, list)
#: Column -> `[B * T, words]` int32 on the CPU.
Rows = dict[str, torch.Tensor]


def layout_of(tensors: Mapping[str, torch.Tensor], where: str) -> RowLayout:
    """Return the layout of `[T, B, *shape]` tensors."""
    return layout_for(
        Field(name, tuple(x.shape[2:]), dtype_name(x.dtype, f"of {name!r} {where}")) for name, x in tensors.items()
    )


def layout_for(fields: Iterable[Field]) -> RowLayout:
    """Return the layout of some fields; equal fields in any order have the same one, which may be a key of a dict."""
    return _layout_for(tuple(sorted(fields, key=lambda field: (-field.numpy_dtype.itemsize, field.name))))


@lru_cache(maxsize=256)
def _layout_for(fields: tuple[Field, ...]) -> RowLayout:
    if any(field.name == PACKED for field in fields):
        raise SchemaError("store the leaf", repr(PACKED), "another name: this is that of the packed rows", repr(PACKED))
    return RowLayout(Schema(fields))


def pack(layout: RowLayout, tensors: Mapping[str, torch.Tensor], pool: BufferPool) -> Rows:
    """Copy `[T, B, *shape]` tensors into rows; their memory comes from `pool`."""
    num_steps, num_envs = next(iter(tensors.values())).shape[:2]
    rows: Rows = {}
    for name, column in layout.columns.items():
        words = rows[name] = pool.empty((num_envs * num_steps, column.row_bytes // 4), torch.int32)
        if sum(layout.schema[one].row_bytes for one in column.offsets) < column.row_bytes:
            words.zero_()  # padding goes to files too
        cells = words.view(torch.uint8).view(num_envs, num_steps, column.row_bytes)
        for one in column.offsets:
            layout.stored_view(one, cells).copy_(tensors[one].detach().transpose(0, 1))
    return rows


def unpack(layout: RowLayout, rows: Rows, shape: tuple[int, int]) -> dict[str, torch.Tensor]:
    """Copy rows of a trajectory of `shape` (T, B) into `[T, B, *field]` tensors."""
    found = {}
    for name in layout.schema:
        cells = layout.stored_view(name, rows[layout.column_of[name].name].view(torch.uint8))
        steps = cells.reshape(*shape[::-1], *cells.shape[1:]).transpose(0, 1)
        found[name] = steps.clone(memory_format=torch.contiguous_format)
    return found


class Leaves(NamedTuple):
    """A trajectory taken apart: flat name -> `[T, B, *shape]`, flat name -> what is no tensor, and (T, B)."""

    tensors: dict[str, torch.Tensor]
    info: dict[str, Any]
    shape: tuple[int, int]


def take_apart(
    trajectory: Any,
    drop_first: Collection[str],
    drop_last: Collection[str],
    where: str = "of a trajectory",
    action: str = "store the leaves",
) -> Leaves:
    """Check a nested mapping or dataclass of `[T, B, ...]` leaves; nothing is copied.

    Args:
        trajectory: Tensors or arrays; str, numbers and lists are kept as they are, None is left out.
        drop_first: Leaves that may have rows for the moment before the first step of each of e epochs,
            `T + e` rows: these are left out.
        drop_last: Likewise for the moment after the last step.
        where: Names the trajectory in errors.
        action: The call that stores it, for errors.

    Raises:
        SchemaError: A leaf has other leading sizes, or there is no tensor.
    """
    tree = _as_mapping(trajectory)
    if not isinstance(tree, Mapping):
        expected = "trajectory as a nested mapping or a dataclass"
        raise SchemaError(action, "", expected, type(trajectory).__name__)
    tensors: dict[str, torch.Tensor] = {}
    info: dict[str, Any] = {}
    for name, leaf in flatten(tree).items():
        if isinstance(leaf, np.generic) or (isinstance(leaf, (np.ndarray, torch.Tensor)) and leaf.ndim == 0):
            leaf = leaf.item()
        if isinstance(leaf, (np.ndarray, torch.Tensor)):
            tensors[name] = as_given(leaf)
        elif isinstance(leaf, INFO_TYPES):
            info[name] = leaf
        elif leaf is not None:
            expected = "a tensor, an array, a str, a number or a list"
            raise SchemaError("store the leaf", f"{name!r} {where}", expected, type(leaf).__name__)
    shape = _shape_of(tensors, {*drop_first, *drop_last}, where)
    for name, tensor in tensors.items():
        if tensor.shape[:2] != shape:
            epochs = _epochs(name, tensor, shape, name in drop_first or name in drop_last, where)
            epochs = epochs[:, 1:] if name in drop_first else epochs[:, :-1]
            tensors[name] = epochs.reshape(shape[0], *tensor.shape[1:])
    return Leaves(tensors, info, shape)


def _as_mapping(tree: Any) -> Any:
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        tree = {field.name: getattr(tree, field.name) for field in dataclasses.fields(tree)}
    return {key: _as_mapping(value) for key, value in tree.items()} if isinstance(tree, Mapping) else tree


def _shape_of(tensors: Mapping[str, torch.Tensor], longer: Collection[str], where: str) -> tuple[int, int]:
    """Return how many steps and envs there are, by the first leaf that tells."""
    if not tensors:
        raise SchemaError("store the leaves", where, "at least one tensor", "none")
    for name, tensor in tensors.items():
        if tensor.ndim < 2 or not tensor.shape[0] or not tensor.shape[1]:
            raise SchemaError("store the leaf", f"{name!r} {where}", "[T, B, ...]", f"shape {list(tensor.shape)}")
    names = [name for name in (*LENGTH_NAMES, *tensors) if name in tensors]
    num_steps, num_envs = tensors[next((name for name in names if name not in longer), names[0])].shape[:2]
    return int(num_steps), int(num_envs)


def _epochs(name: str, tensor: torch.Tensor, shape: tuple[int, int], is_declared: bool, where: str) -> torch.Tensor:
    """View a leaf with a row more in each epoch as `[epochs, rows of one, B, ...]`."""
    num_steps, num_envs = shape
    num_epochs = tensor.shape[0] - num_steps
    is_longer = num_epochs > 0 and num_steps % num_epochs == 0 and tensor.shape[1] == num_envs
    if not is_longer or not is_declared:
        advice = f"Declare {name!r} in drop_first or drop_last" if is_longer else ""
        expected = f"[{num_steps}, {num_envs}, ...] like the others"
        raise SchemaError("store the leaf", f"{name!r} {where}", expected, f"shape {list(tensor.shape)}", advice)
    return tensor.reshape(num_epochs, num_steps // num_epochs + 1, *tensor.shape[1:])
