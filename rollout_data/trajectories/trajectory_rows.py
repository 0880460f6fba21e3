"""Convert trajectories between `[T, B, ...]` tensors and packed rows, as block files store them.

A packed row contains all fields of one step of one environment. Rows are ordered by environment,
then by time. Block files have the same order, so rows are read and written without conversion.
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
from ..sources.trajectory_checkpoints.checkpoint_file import split_epochs

#: The number of steps of a trajectory is the length of the first of these leaves that it has.
LENGTH_NAMES = ("rewards", "actions", "prev_logprobs")
#: Types of leaves that are stored as metadata of a trajectory.
INFO_TYPES = (str, int, float, bool, list)
#: Map from the name of a column to its rows, int32 `[B * T, words]` on the CPU.
Rows = dict[str, torch.Tensor]


def layout_of(tensors: Mapping[str, torch.Tensor], where: str) -> RowLayout:
    """Return the row layout for the tensors `[T, B, *shape]` of a trajectory.

    `where` names the trajectory in errors.
    """
    fields = []
    for name, tensor in tensors.items():
        dtype = dtype_name(tensor.dtype, f"{name!r} {where}")
        fields.append(Field(name, tuple(tensor.shape[2:]), dtype))
    return layout_for(fields)


def layout_for(fields: Iterable[Field]) -> RowLayout:
    """Return the row layout for fields. It does not depend on the order of the fields.

    So trajectories with the same fields have equal layouts, and layouts can be dict keys.
    """
    ordered = sorted(fields, key=lambda field: (-field.numpy_dtype.itemsize, field.name))
    return _layout_for(tuple(ordered))


@lru_cache(maxsize=256)
def _layout_for(fields: tuple[Field, ...]) -> RowLayout:
    if any(field.name == PACKED for field in fields):
        raise SchemaError(
            f"the field name {PACKED!r} is reserved for packed rows. Rename the field."
        )
    return RowLayout(Schema(fields))


def pack(layout: RowLayout, tensors: Mapping[str, torch.Tensor], pool: BufferPool) -> Rows:
    """Copy tensors `[T, B, *shape]` into new rows, allocated from `pool`."""
    num_steps, num_envs = next(iter(tensors.values())).shape[:2]
    rows: Rows = {}
    for name, column in layout.columns.items():
        words = pool.empty((num_envs * num_steps, column.row_bytes // 4), torch.int32)
        rows[name] = words
        num_bytes = sum(layout.schema[field].row_bytes for field in column.offsets)
        if num_bytes < column.row_bytes:
            words.zero_()  # Files contain the padding bytes, so these must not be arbitrary memory.
        cells = words.view(torch.uint8).view(num_envs, num_steps, column.row_bytes)
        for field in column.offsets:
            values = tensors[field].detach().transpose(0, 1)
            layout.stored_view(field, cells).copy_(values)
    return rows


def unpack(layout: RowLayout, rows: Rows, shape: tuple[int, int]) -> dict[str, torch.Tensor]:
    """Copy the rows of a trajectory with `shape` (T, B) into new tensors `[T, B, *field.shape]`."""
    num_steps, num_envs = shape
    tensors = {}
    for name in layout.schema:
        column = rows[layout.column_of[name].name].view(torch.uint8)
        values = layout.stored_view(name, column)
        steps = values.reshape(num_envs, num_steps, *values.shape[1:]).transpose(0, 1)
        tensors[name] = steps.clone(memory_format=torch.contiguous_format)
    return tensors


class FlatTrajectory(NamedTuple):
    """A trajectory as two flat dicts: its tensors, and its metadata.

    Attributes:
        tensors: Map from flat name to tensor `[T, B, *shape]`.
        info: Map from flat name to metadata leaf, such as a text or a number.
        shape: Number of steps and of environments, (T, B).
    """

    tensors: dict[str, torch.Tensor]
    info: dict[str, Any]
    shape: tuple[int, int]


def flatten_trajectory(
    trajectory: Any,
    drop_first: Collection[str],
    drop_last: Collection[str],
    where: str = "of a trajectory",
) -> FlatTrajectory:
    """Flatten a nested trajectory, check its shapes and remove additional rows, without copies.

    Args:
        trajectory: Nested mapping or dataclass of tensors or arrays. Texts, numbers and lists are
            metadata leaves. A leaf that is None is ignored.
        drop_first: Names of leaves that may have `T + e` rows for e epochs: an additional row
            before the first step of each epoch. The additional rows are removed.
        drop_last: Names of leaves that may have `T + e` rows for e epochs: an additional row after
            the last step of each epoch. The additional rows are removed.
        where: Name of the trajectory in errors.

    Raises:
        SchemaError: The leading sizes of leaves differ, or there is no tensor.
    """
    tree = _as_mapping(trajectory)
    if not isinstance(tree, Mapping):
        raise SchemaError(
            f"trajectory must be a nested mapping or a dataclass, got {type(trajectory).__name__}."
        )
    tensors: dict[str, torch.Tensor] = {}
    info: dict[str, Any] = {}
    for name, leaf in flatten(tree).items():
        value = _without_array(leaf)
        if isinstance(value, (np.ndarray, torch.Tensor)):
            tensors[name] = as_given(value)
        elif isinstance(value, INFO_TYPES):
            info[name] = value
        elif value is not None:
            raise SchemaError(
                f"field {name!r} {where} must be a tensor, an array, a str, a number or a list, "
                f"got {type(value).__name__}."
            )

    shape = _shape_of(tensors, {*drop_first, *drop_last}, where)
    for name, tensor in tensors.items():
        if tensor.shape[:2] == shape:
            continue
        is_declared = name in drop_first or name in drop_last
        epochs = _epochs(name, tensor, shape, is_declared, where)
        steps = epochs[:, 1:] if name in drop_first else epochs[:, :-1]
        tensors[name] = steps.reshape(shape[0], *tensor.shape[1:])
    return FlatTrajectory(tensors, info, shape)


def _without_array(leaf: Any) -> Any:
    """Convert a numpy scalar or an array without axes to a Python value. Return others unchanged."""
    is_array = isinstance(leaf, (np.ndarray, torch.Tensor))
    if isinstance(leaf, np.generic) or (is_array and leaf.ndim == 0):
        return leaf.item()
    return leaf


def _as_mapping(tree: Any) -> Any:
    """Convert dataclasses and mappings at any depth to dicts."""
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        tree = {field.name: getattr(tree, field.name) for field in dataclasses.fields(tree)}
    if isinstance(tree, Mapping):
        return {key: _as_mapping(value) for key, value in tree.items()}
    return tree


def _shape_of(
    tensors: Mapping[str, torch.Tensor],
    longer: Collection[str],
    where: str,
) -> tuple[int, int]:
    """Return the shape (T, B) of a trajectory, from the first two axes of one of its leaves.

    Leaves in `longer` may have more than T rows. They are used only if there is no other leaf.
    """
    if not tensors:
        raise SchemaError(f"the fields {where} include no tensor.")
    for name, tensor in tensors.items():
        if tensor.ndim < 2 or not tensor.shape[0] or not tensor.shape[1]:
            raise SchemaError(
                f"field {name!r} {where} has shape {list(tensor.shape)}, expected [T, B, ...]."
            )
    names = [name for name in (*LENGTH_NAMES, *tensors) if name in tensors]
    exact_names = [name for name in names if name not in longer]
    name = exact_names[0] if exact_names else names[0]
    num_steps, num_envs = tensors[name].shape[:2]
    return int(num_steps), int(num_envs)


def _epochs(
    name: str,
    tensor: torch.Tensor,
    shape: tuple[int, int],
    is_declared: bool,
    where: str,
) -> torch.Tensor:
    """Split a leaf `[T + e, B, ...]` into its e epochs: a view `[e, T / e + 1, B, ...]`.

    Args:
        name: Name of the leaf.
        tensor: The leaf, with one additional row per epoch.
        shape: (T, B) of the trajectory.
        is_declared: Whether the leaf is named in `drop_first` or `drop_last`.
        where: Name of the trajectory in errors.

    Raises:
        SchemaError: The number of rows is wrong, or the leaf is not declared to have more rows.
    """
    num_steps, num_envs = shape
    epochs = split_epochs(tensor, num_steps) if tensor.shape[1] == num_envs else None
    if epochs is not None and is_declared:
        return epochs
    message = (
        f"field {name!r} {where} has shape {list(tensor.shape)}, expected "
        f"[{num_steps}, {num_envs}, ...]."
    )
    if epochs is not None:
        message += f" Declare {name!r} in drop_first or drop_last."
    raise SchemaError(message)
