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
    """Position of one field in the row of its group, in bytes."""

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
        """Return rows `[..., width]` of this group as fields `[..., *event]` that share their memory."""
        found = {}
        for part in self.parts:
            dtype = part.field.torch_dtype
            cells = rows.view(dtype)[
                ..., part.start // dtype.itemsize : part.stop // dtype.itemsize
            ]
            found[part.field.name] = cells.reshape(*rows.shape[:-1], *part.field.shape)
        return found


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
    # A row starts where its largest item may stand; rows of some size also move four bytes at a
    # time.
    step = max(largest, 4 if start >= 32 else 1)
    num_bytes = max(-(-start // step), 1) * step
    unit = torch.float32 if num_bytes % 4 == 0 else torch.uint8
    return Group(tuple(parts), num_bytes // unit.itemsize, unit)


class Target(NamedTuple):
    """A field that is wanted: of the first (0) or the second (1) of two rows side by side; its name in the result."""

    row: int
    field: str
    name: str


class _FieldPlace(NamedTuple):
    """One leaf of the result, or, where `view` is -1, one more dict.

    Attributes:
        node, key: Which dict of the result it goes into, and as what.
        view: Which rows, seen as which dtype, it is cut from.
        items: Which items of each row, and their shape if it has more than one axis.
        make: Makes a tensor of what was cut.
    """

    node: int
    key: str
    view: int = -1
    items: tuple[slice, slice] = (slice(None), slice(None))
    shape: tuple[int, ...] | None = None
    make: Callable[[Any], torch.Tensor] = torch.from_numpy


class Cut:
    """How rows of some groups become a nested dict of fields that share their memory; decided once for many samples.

    Args:
        groups: What lies side by side; the rows of each come apart.
        targets: What is wanted, in the order of the result; of two with one name the later one
            counts.
        contiguous: Whether the fields are copied out of the rows instead.
        nested: Whether "a/b" is given as `{"a": {"b": ...}}`.
        apart: Whether second rows are gathered on their own, and stand behind those of all groups,
            instead of side by side with the first ones.
        device: Where the rows are. On the CPU numpy cuts them, in half the time of torch.

    Attributes:
        targets: What is wanted, each name once.
        wanted: For each group, whether first and whether second rows are wanted.
        widths: For each group, how much is wanted from the start of a row on, in its units; without
            `apart` more than a row where the next is wanted too, up to the last field of that.
        reach: How many rows behind each other are wanted, 1 or 2.
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
        #: Which rows are seen as which dtype of numpy or torch.
        self._views: list[tuple[int, Any]] = []
        self._leaves: list[_FieldPlace] = []
        if nested:
            unflatten(
                dict.fromkeys((target.name for target in self.targets), 0)
            )  # raises where names clash
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
        """Cut rows `[n, width]` of all groups, and, with `apart`, second rows of all; None where nothing is wanted.

        Rows are arrays on the CPU, elsewhere tensors.
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
        """Return how much of a row, and of the one behind it, is wanted."""
        group, (own, following) = self._groups[place], self.wanted[place]
        if self._apart or not following:
            return group.width if own or following else 0
        parts = (self._parts[target.field] for target in self.targets if target.row)
        stop = max(part.stop for at, part in parts if at == place)
        # As each of the dtypes, rows have a whole number of items.
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
    """Return a new tensor that may be changed in place, also by tensors with gradients."""
    found: torch.Tensor = torch.from_numpy(cells) if isinstance(cells, np.ndarray) else cells.data
    found = found.contiguous() if contiguous else found
    return found.view(torch.bfloat16) if is_bfloat16 else found
