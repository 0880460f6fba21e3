"""Packed rows: several fields in one memory block, and their conversion to a dict of fields.

The values of all small fields of a row are adjacent, so that one gather copies the rows of a batch.
One gather per field takes 1.4-1.75 times as long at batches of 256 to 4096. Fields of
`WIDE_ROW_BYTES` or more per row are stored separately, since their gather is limited by memory
speed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from .fields import Field, Schema, unflatten

#: Minimum bytes per row of a field that is stored separately.
WIDE_ROW_BYTES = 4096
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Part:
    """Position of one field in a packed row: bytes `start` to `stop - 1`."""

    field: Field
    start: int
    stop: int


@dataclass(frozen=True)
class Group:
    """Fields that are adjacent in one memory block.

    Attributes:
        parts: Positions of the fields. Fields with the largest items come first, so that each item
            is aligned to its size.
        width: Number of elements of dtype `unit` in a packed row.
        unit: Dtype in which packed rows are stored and copied, float32 or uint8. It only determines
            the size of the copied elements; nothing is computed in this dtype.
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
    """Divide the fields of a schema into groups that are stored together.

    All narrow fields form one group. Each wide field is a group of its own.
    """
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
    # Rows are aligned to their largest item. Rows of 32 bytes or more are aligned to at least
    # 4 bytes, so that they are copied in units of 4 bytes.
    step = max(largest, 4 if start >= 32 else 1)
    num_bytes = max(-(-start // step), 1) * step
    unit = torch.float32 if num_bytes % 4 == 0 else torch.uint8
    return Group(tuple(parts), num_bytes // unit.itemsize, unit)


class Target(NamedTuple):
    """One field of a sample: the row and field that it is read from, and its name in the sample.

    Attributes:
        row: 0 to read the drawn row, 1 to read the row that follows it.
        field: Flat name of the field in the schema.
        name: Flat name of the field in the sample.
    """

    row: int
    field: str
    name: str


class _FieldPlace(NamedTuple):
    """One step in building a nested dict of fields: set one key to a tensor or to a new dict.

    Attributes:
        node: Number of the dict that gets the key. The result is dict 0. New dicts are numbered in
            the order of creation.
        key: Key in this dict.
        view: Index in `Cut._views` of the packed rows, viewed as the dtype of the field. -1 to set
            the key to a new dict.
        items: Index of the field in this view: all rows, and the columns of the field.
        shape: Shape of the field per row. None if it has one axis and needs no reshape.
        make: Function that converts the indexed part of the view to a tensor.
    """

    node: int
    key: str
    view: int = -1
    items: tuple[slice, slice] = (slice(None), slice(None))
    shape: tuple[int, ...] | None = None
    make: Callable[[Any], torch.Tensor] = torch.from_numpy


class Cut:
    """Plan that converts packed rows to a dict of fields. One plan serves many samples.

    The caller gathers packed rows and passes them to the plan. The fields of the result are views
    of these rows. The result may also have fields of the rows that follow the drawn rows.

    Args:
        groups: Groups of fields that are adjacent in memory.
        targets: Fields of the result, in order. A later target replaces an earlier target of the
            same name.
        contiguous: Whether the fields of the result are contiguous copies instead of views.
        nested: Whether "a/b" becomes `{"a": {"b": ...}}` in the result.
        apart: Whether the caller gathers the following rows separately, and passes them after the
            rows of all groups. Otherwise a row and its following row are gathered as one piece.
        device: Device of the rows. On the CPU numpy slices the rows, in half the time of torch.

    Attributes:
        targets: Fields of the result, with distinct names.
        wanted: Pair of bools for each group: whether the result has fields of the drawn rows, and
            of the following rows.
        widths: For each group, number of elements of dtype `Group.unit` to gather from the start of
            a row. If `apart` is False, this includes the following row up to its last field in the
            result.
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
        #: Views of the packed rows in each call: (index in the argument `rows`, dtype of the view).
        self._views: list[tuple[int, Any]] = []
        self._leaves: list[_FieldPlace] = []
        if nested:
            # Names such as "a" and "a/b" conflict; `unflatten` raises an error for them.
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
            rows: One item per group: its packed rows `[n, width]`, or None if the result has no
                field of the group. With `apart`, one item per group for the following rows comes
                after these items. Items are arrays on the CPU, and tensors on other devices.
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
        """Return the number of elements to gather per row of the group at index `place`."""
        group, (own, following) = self._groups[place], self.wanted[place]
        if self._apart or not following:
            return group.width if own or following else 0
        parts = (self._parts[target.field] for target in self.targets if target.row)
        stop = max(part.stop for at, part in parts if at == place)
        # Round up, so that the gathered rows can be viewed as every dtype of the group.
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
    """Convert the values of one field, an array or a tensor, to the tensor for the user.

    The result is detached from autograd, so that the user may change it in place.
    """
    tensor: torch.Tensor = torch.from_numpy(cells) if isinstance(cells, np.ndarray) else cells.data
    tensor = tensor.contiguous() if contiguous else tensor
    return tensor.view(torch.bfloat16) if is_bfloat16 else tensor
