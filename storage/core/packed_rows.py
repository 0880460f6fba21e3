"""Packed rows: the memory layout of several fields, and the conversion of rows to a dict of fields.

Small fields are adjacent in one packed row, so that a batch takes one gather. One gather per field
takes 1.4-1.75 times as long at batches of 256 to 4096. Fields of `WIDE_ROW_BYTES` or more per row
are stored separately, since their gather is limited by memory speed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from .fields import Field, Schema, unflatten

#: Bytes per row from which a field is stored separately.
WIDE_ROW_BYTES = 4096
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Part:
    """Position in bytes of one field in a packed row of its `Group`."""

    field: Field
    start: int
    stop: int


@dataclass(frozen=True)
class Group:
    """Fields that are adjacent in one memory block.

    Attributes:
        parts: Positions of the fields, the largest items first, so that each is aligned to its
            size.
        width: Row size in units of `unit`.
        unit: Dtype of copies of rows. Copies keep every bit; nothing is computed in this dtype.
    """

    parts: tuple[Part, ...]
    width: int
    unit: torch.dtype

    @property
    def row_bytes(self) -> int:
        return self.width * self.unit.itemsize

    def views(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the fields of packed rows, by name: views `[..., *event]`.

        `rows` is `[..., width]`, packed rows of this group.
        """
        views = {}
        for part in self.parts:
            dtype = part.field.torch_dtype
            cells = rows.view(dtype)[
                ..., part.start // dtype.itemsize : part.stop // dtype.itemsize
            ]
            views[part.field.name] = cells.reshape(*rows.shape[:-1], *part.field.shape)
        return views


def lay_out(schema: Schema) -> list[Group]:
    """Return groups of the fields: one group of all narrow fields, and one group per wide field."""
    narrow = [field for field in schema.values() if field.row_bytes < WIDE_ROW_BYTES]
    groups = [[field] for field in schema.values() if field.row_bytes >= WIDE_ROW_BYTES]
    return [_pack(fields) for fields in ([narrow] if narrow else []) + groups]


def _pack(fields: list[Field]) -> Group:
    ordered = sorted(fields, key=lambda field: -field.numpy_dtype.itemsize)
    largest = ordered[0].numpy_dtype.itemsize
    parts = []
    start = 0
    for field in ordered:
        parts.append(Part(field, start, start + field.row_bytes))
        start += field.row_bytes
    # Rows are aligned to their largest item. Rows of 32 bytes or more are also aligned to 4 bytes,
    # so that they are copied in units of 4 bytes.
    step = max(largest, 4 if start >= 32 else 1)
    num_bytes = max(-(-start // step), 1) * step
    unit = torch.float32 if num_bytes % 4 == 0 else torch.uint8
    return Group(tuple(parts), num_bytes // unit.itemsize, unit)


class Target(NamedTuple):
    """A field to copy.

    Attributes:
        row: Row from which the field is copied: 0 for the row itself, 1 for the following row.
        field: Flat name of the field in the schema.
        name: Flat name of the field in the result.
    """

    row: int
    field: str
    name: str


class _FieldPlace(NamedTuple):
    """Instruction to create one leaf of the result, or a nested dict if `view` is -1.

    Attributes:
        node: Number of the parent dict, in the order of creation.
        key: Key in the parent dict.
        view: Position in `Cut._views`: packed rows, viewed as one dtype.
        items: Slices of the view that contain the field.
        shape: Shape of the field per row; None for one axis.
        make: Function that converts the slices to a tensor.
    """

    node: int
    key: str
    view: int = -1
    items: tuple[slice, slice] = (slice(None), slice(None))
    shape: tuple[int, ...] | None = None
    make: Callable[[Any], torch.Tensor] = torch.from_numpy


class Cut:
    """Plan that converts packed rows to a dict of fields. It is computed once for many samples.

    The fields are views of the packed rows. A plan may also copy fields of the following rows.

    Args:
        groups: Groups of fields that are adjacent in memory.
        targets: Fields to copy, in the order of the result. A later target replaces an earlier
            target of the same name.
        contiguous: Whether the fields are contiguous copies instead of views.
        nested: Whether "a/b" becomes `{"a": {"b": ...}}` in the result.
        apart: Whether following rows are gathered separately, and passed after the rows of all
            groups. Otherwise a row and the following row are gathered as one piece.
        device: Device of the rows. On the CPU numpy slices the rows, in half the time of torch.

    Attributes:
        targets: Fields to copy, with distinct names.
        wanted: For each group, whether fields of the rows, and of the following rows, are copied.
        widths: For each group, number of units to gather from the start of a row. If `apart` is
            False, this includes the following row up to its last copied field.
        reach: Number of consecutive rows to gather, 1 or 2.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        targets: Sequence[Target],
        contiguous: bool = False,
        nested: bool = True,
        apart: bool = False,
        device: torch.device = _CPU,
    ) -> None:
        self._groups = groups
        self._contiguous = contiguous
        self._apart = apart
        self._is_on_cpu = device.type == "cpu"
        self.targets = list({target.name: target for target in targets}.values())
        self._parts = {
            part.field.name: (place, part)
            for place, group in enumerate(groups)
            for part in group.parts
        }
        asked = {(self._parts[target.field][0], target.row) for target in self.targets}
        self.wanted = [((place, 0) in asked, (place, 1) in asked) for place in range(len(groups))]
        self.reach = 1 + any(following for _, following in self.wanted)
        self.widths = [self._width(place) for place in range(len(groups))]
        #: Views to create: position of the packed rows, and dtype of numpy or torch.
        self._views: list[tuple[int, Any]] = []
        self._leaves: list[_FieldPlace] = []
        if nested:
            # Raises an error if two names conflict.
            unflatten(dict.fromkeys((target.name for target in self.targets), 0))
        nodes: dict[tuple[str, ...], int] = {(): 0}
        for target in self.targets:
            *parents, key = target.name.split("/") if nested else [target.name]
            for depth, parent in enumerate(parents):
                path = tuple(parents[: depth + 1])
                if path not in nodes:
                    self._leaves.append(_FieldPlace(nodes[path[:-1]], parent))
                    nodes[path] = len(nodes)
            self._leaves.append(self._leaf(target, nodes[tuple(parents)], key))

    def __call__(self, rows: Sequence[Any]) -> dict[str, Any]:
        """Convert packed rows to a dict of fields.

        Args:
            rows: Packed rows `[n, width]` of each group; with `apart`, followed by the following
                rows of each group. None for a group without copied fields. Arrays on the CPU,
                elsewhere tensors.
        """
        views = [rows[place].view(dtype) for place, dtype in self._views]
        nodes: list[dict[str, Any]] = [{}]
        for node, key, view, items, shape, make in self._leaves:
            if view < 0:
                nodes.append({})
                nodes[node][key] = nodes[-1]
            else:
                cells = views[view][items]
                nodes[node][key] = make(
                    cells if shape is None else cells.reshape((len(cells), *shape))
                )
        return nodes[0]

    def _width(self, place: int) -> int:
        """Return the number of units to gather per row of a group; see `widths`."""
        group, (own, following) = self._groups[place], self.wanted[place]
        if self._apart or not following:
            return group.width if own or following else 0
        parts = (self._parts[target.field] for target in self.targets if target.row)
        stop = max(part.stop for at, part in parts if at == place)
        # Round up, so that the width is a whole number of items of every dtype.
        largest = max(
            group.unit.itemsize, *(part.field.numpy_dtype.itemsize for part in group.parts)
        )
        return group.width + -(-stop // largest) * largest // group.unit.itemsize

    def _leaf(self, target: Target, node: int, key: str) -> _FieldPlace:
        place, part = self._parts[target.field]
        start = part.start
        field = part.field
        if target.row and self._apart:
            place += len(self._groups)
        elif target.row:
            start += self._groups[place].row_bytes
        is_bfloat16 = self._is_on_cpu and field.torch_dtype is torch.bfloat16
        view = place, field.numpy_dtype if self._is_on_cpu else field.torch_dtype
        if view not in self._views:
            self._views.append(view)
        first = start // field.numpy_dtype.itemsize
        items = slice(None), slice(first, first + field.num_elements)
        is_plain = self._is_on_cpu and not self._contiguous and not is_bfloat16
        make = torch.from_numpy if is_plain else partial(_tensor, is_bfloat16, self._contiguous)
        return _FieldPlace(
            node,
            key,
            self._views.index(view),
            items,
            None if len(field.shape) == 1 else field.shape,
            make,
        )


def _tensor(is_bfloat16: bool, contiguous: bool, cells: Any) -> torch.Tensor:
    """Convert slices of packed rows to a tensor.

    The tensor is detached from autograd, so that the user may change it in place.
    """
    tensor: torch.Tensor = torch.from_numpy(cells) if isinstance(cells, np.ndarray) else cells.data
    tensor = tensor.contiguous() if contiguous else tensor
    return tensor.view(torch.bfloat16) if is_bfloat16 else tensor
