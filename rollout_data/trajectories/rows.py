"""Trajectories as rows: `[T, B, ...]` tensors packed as block files hold them, and cut into fields again.

One rule: rows stand env after env, time within each, in the format of block files, so that a
trajectory moves between a file and memory as bytes. Which trajectories there are is not known here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from storage.core.buffer_pool import BufferPool
from storage.core.fields import Field, Schema, dtype_name
from storage.core.host_arrays import as_given
from storage.core.row_cut import RowCut, Target
from storage.core.row_layout import Group, lay_out
from storage.core.tree import flatten, unflatten
from storage.errors import SchemaError

from ..format.schema import PACKED, RowLayout

#: The leaves that say how many steps a trajectory has, first come first.
LENGTH_NAMES = ("rewards", "actions", "prev_logprobs")
#: So many ways of cutting rows of one layout are remembered.
MAX_CUTS = 64
#: Leaves of a trajectory that are no tensors.
INFO_TYPES = (str, int, float, bool, list)
Rows = dict[str, torch.Tensor]


class TrajectoryLayout:
    """How the fields of a trajectory lie in rows; one for each set of fields.

    Attributes:
        schema: The fields.
        names: Their names.
        layout: Where each stands in a row, as in a block file.
        row_bytes: Size of a row, over all columns.
        widths: Row size of each column, in int32 words.
        groups: How rows of each column are cut.
    """

    def __init__(self, schema: Schema) -> None:
        self.schema, self.names = schema, tuple(schema)
        self.layout = RowLayout(schema)
        self.row_bytes = self.layout.frame_bytes
        self.widths = {name: column.row_bytes // 4 for name, column in self.layout.columns.items()}
        self.groups = [self._group(name) for name in self.layout.columns]

    def pack(self, tensors: Mapping[str, torch.Tensor], pool: BufferPool) -> Rows:
        """Copy `[T, B, *shape]` tensors into rows: column -> `[B * T, words]` int32 on the CPU."""
        num_steps, num_envs = next(iter(tensors.values())).shape[:2]
        rows: Rows = {}
        for name, column in self.layout.columns.items():
            words = rows[name] = pool.empty((num_envs * num_steps, self.widths[name]), torch.int32)
            if sum(self.schema[one].row_bytes for one in column.offsets) < column.row_bytes:
                words.zero_()  # files get no bytes that nobody wrote
            cells = words.view(torch.uint8).view(num_envs, num_steps, column.row_bytes)
            for one in column.offsets:
                self.layout.stored_view(one, cells).copy_(tensors[one].detach().transpose(0, 1))
        return rows

    def cut(self, rows: Rows) -> dict[str, torch.Tensor]:
        """See rows of all columns as all fields, `[n, *shape]`, sharing their memory."""
        plan, columns = _shared_cutting(self, self.names, False, False)
        return plan([None if name is None else plan.seen(place, rows[name]) for place, name in enumerate(columns)])

    def _group(self, name: str) -> Group:
        """Say how rows are cut; memory and files order fields alike, as the schema is sorted by item size."""
        column = self.layout.columns[name]
        [group] = lay_out(Schema(self.schema[one] for one in column.offsets), wide_row_bytes=1 << 62)
        assert {part.field.name: part.start for part in group.parts} == column.offsets
        return group


def cutting(
    layout: TrajectoryLayout, names: tuple[str, ...], contiguous: bool, nested: bool
) -> tuple[RowCut, list[str | None]]:
    """Plan how rows are gathered and cut into these fields; name each column, None where it is not needed."""
    plan = RowCut(layout.groups, [Target(0, name, name) for name in names], contiguous, nested)
    return plan, [name if width else None for name, width in zip(layout.widths, plan.widths, strict=True)]


#: For rows that were gathered elsewhere: a layout is shared by buffers with locks of their own.
_shared_cutting = lru_cache(MAX_CUTS)(cutting)


def layout_of(tensors: Mapping[str, torch.Tensor], where: str) -> TrajectoryLayout:
    """Give the layout of `[T, B, *shape]` tensors."""
    return layout_for(
        Field(name, tuple(x.shape[2:]), dtype_name(x.dtype, f"of {name!r} {where}")) for name, x in tensors.items()
    )


def layout_for(fields: Iterable[Field]) -> TrajectoryLayout:
    """Give the layout of some fields, whatever their order: equal fields have one layout."""
    # Large items first: then no gaps are needed, and memory and files agree about where fields stand.
    return _layout_for(tuple(sorted(fields, key=lambda field: (-field.numpy_dtype.itemsize, field.name))))


@lru_cache(maxsize=256)
def _layout_for(fields: tuple[Field, ...]) -> TrajectoryLayout:
    if any(field.name == PACKED for field in fields):
        raise SchemaError("store the leaf", repr(PACKED), "another name: this is that of the packed rows", repr(PACKED))
    return TrajectoryLayout(Schema(fields))


@dataclass(frozen=True)
class Trajectory:
    """A trajectory taken apart.

    Attributes:
        tensors: Flat name -> `[T, B, *shape]`.
        info: Flat name -> what is no tensor.
    """

    tensors: dict[str, torch.Tensor]
    info: dict[str, Any]

    @property
    def shape(self) -> tuple[int, int]:
        num_steps, num_envs = next(iter(self.tensors.values())).shape[:2]
        return int(num_steps), int(num_envs)


def take_apart(
    trajectory: Any, drop_first: Collection[str], drop_last: Collection[str], where: str = "of a trajectory"
) -> Trajectory:
    """Check a nested mapping or dataclass of `[T, B, ...]` leaves; nothing is copied.

    Args:
        trajectory: Tensors or arrays; str, numbers and lists are kept as they are, None is left out.
        drop_first: Leaves that may have rows for the moment before the first step of each of e epochs,
            `T + e` rows: these are left out.
        drop_last: Likewise for the moment after the last step.
        where: Names the trajectory in errors.

    Raises:
        SchemaError: A leaf has other leading sizes, or there is no tensor.
    """
    tensors: dict[str, torch.Tensor] = {}
    info: dict[str, Any] = {}
    tree = _as_mapping(trajectory)
    if not isinstance(tree, Mapping):
        expected = "a nested mapping or a dataclass"
        raise SchemaError("store the leaves", where, expected, type(trajectory).__name__)
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
    size = _size_of(tensors, {*drop_first, *drop_last}, where)
    for name, tensor in tensors.items():
        if tensor.shape[:2] != size:
            tensors[name] = _aligned(name, tensor, size, name in drop_first, name in drop_last, where)
    return Trajectory(tensors, info)


def put_together(tensors: Mapping[str, Any], info: Mapping[str, Any]) -> dict[str, Any]:
    """Nest flat names again: the inverse of `take_apart`."""
    return unflatten({**info, **tensors})


def _as_mapping(tree: Any) -> Any:
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return {field.name: _as_mapping(getattr(tree, field.name)) for field in dataclasses.fields(tree)}
    if isinstance(tree, Mapping):
        return {key: _as_mapping(value) for key, value in tree.items()}
    return tree


def _size_of(tensors: Mapping[str, torch.Tensor], longer: Collection[str], where: str) -> tuple[int, int]:
    """Say how many steps and envs there are, by the first leaf that tells."""
    if not tensors:
        raise SchemaError("store the leaves", where, "at least one tensor", "none")
    for name, tensor in tensors.items():
        if tensor.ndim < 2 or not tensor.shape[0] or not tensor.shape[1]:
            raise SchemaError("store the leaf", f"{name!r} {where}", "[T, B, ...]", f"shape {list(tensor.shape)}")
    names = [name for name in (*LENGTH_NAMES, *tensors) if name in tensors]
    first = next((name for name in names if name not in longer), names[0])
    num_steps, num_envs = tensors[first].shape[:2]
    return int(num_steps), int(num_envs)


def _aligned(
    name: str, tensor: torch.Tensor, size: tuple[int, int], drops_first: bool, drops_last: bool, where: str
) -> torch.Tensor:
    """Leave out the rows of a longer leaf that belong to no step."""
    num_steps, num_envs = size
    num_epochs = tensor.shape[0] - num_steps
    is_longer = num_epochs > 0 and num_steps % num_epochs == 0 and tensor.shape[1] == num_envs
    if not is_longer or not (drops_first or drops_last):
        advice = f"Declare {name!r} in drop_first or drop_last" if is_longer else ""
        got = f"shape {list(tensor.shape)}"
        expected = f"[{num_steps}, {num_envs}, ...] like the others"
        raise SchemaError("store the leaf", f"{name!r} {where}", expected, got, advice)
    epochs = tensor.unflatten(0, (num_epochs, num_steps // num_epochs + 1))
    return (epochs[:, 1:] if drops_first else epochs[:, :-1]).reshape(num_steps, *tensor.shape[1:])
