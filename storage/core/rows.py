"""Rows of several fields: how they lie in memory, and how gathered rows become a nested dict of fields again.

One rule: bytes and offsets are decided here and nowhere else. Small fields lie side by side: a gather of one packed row
per transition costs what the bytes cost; one gather per field costs 1.4-1.75 times that at batches of 256 to 4096.
Rows of `WIDE_ROW_BYTES` or more move at memory speed by themselves and lie apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from .fields import Field, Schema
from .tree import unflatten

#: From this size on a field lies apart.
WIDE_ROW_BYTES = 4096


@dataclass(frozen=True)
class Part:
    """Where one field lies in its group's row, in bytes."""

    field: Field
    start: int
    stop: int


@dataclass(frozen=True)
class Group:
    """Fields that lie side by side in one memory block.

    Attributes:
        parts: The fields, the largest items first, so that each is aligned to its own size.
        width: Row size in units of `unit`.
        unit: Dtype as which rows move; they are moved, not computed with, and keep every bit.
    """

    parts: tuple[Part, ...]
    width: int
    unit: torch.dtype

    @property
    def row_bytes(self) -> int:
        return self.width * self.unit.itemsize

    def views(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """See `[..., width]` rows of this group as fields `[..., *event]` that share their memory."""
        found = {}
        for part in self.parts:
            dtype = part.field.torch_dtype
            cells = rows.view(dtype)[..., part.start // dtype.itemsize : part.stop // dtype.itemsize]
            found[part.field.name] = cells.reshape(*rows.shape[:-1], *part.field.shape)
        return found


def lay_out(schema: Schema, wide_row_bytes: int = WIDE_ROW_BYTES) -> list[Group]:
    """Put each field into a group: all narrow ones into one, each wide one into its own."""
    narrow = [field for field in schema.values() if field.row_bytes < wide_row_bytes]
    groups = [[field] for field in schema.values() if field.row_bytes >= wide_row_bytes]
    return [_pack(fields) for fields in ([narrow] if narrow else []) + groups]


def _pack(fields: list[Field]) -> Group:
    ordered = sorted(fields, key=lambda field: -field.numpy_dtype.itemsize)
    largest = ordered[0].numpy_dtype.itemsize
    parts, start = [], 0
    for field in ordered:
        parts.append(Part(field, start, start + field.row_bytes))
        start += field.row_bytes
    # A row starts where its largest item may stand; rows of some size also move four bytes at a time.
    step = max(largest, 4 if start >= 32 else 1)
    num_bytes = max(-(-start // step), 1) * step
    unit = torch.float32 if num_bytes % 4 == 0 else torch.uint8
    return Group(tuple(parts), num_bytes // unit.itemsize, unit)


class Target(NamedTuple):
    """A field that is wanted: of the first (0) or the second (1) of two rows side by side; its name in the result."""

    row: int
    field: str
    name: str


class _Leaf(NamedTuple):
    """One leaf of the result: what it is cut from, and where it stands there, in items of its dtype.

    Attributes:
        node: Which dict of the result it goes into, and as what: `key`.
        place: Which rows it is cut from.
    """

    node: int
    key: str
    place: int
    dtype: torch.dtype
    first: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Cut:
    """How rows of some groups become a nested dict of fields that share their memory; decided once for many samples.

    Args:
        groups: What lies side by side; the rows of each come apart.
        targets: What is wanted, in the order of the result; of two with one name the later one counts.
        contiguous: Whether the fields are copied out of the rows instead.
        nested: Whether "a/b" is given as `{"a": {"b": ...}}`.
        apart: Whether second rows are gathered on their own, and stand behind those of all groups, instead of side by
            side with the first ones.

    Attributes:
        targets: What is wanted, each name once.
        wanted: For each group, whether first and whether second rows are wanted.
        widths: For each group, how much is wanted from the start of a row on, in its units; without `apart` more than
            a row where the next is wanted too, up to the last field of that.
        reach: How many rows behind each other are wanted, 1 or 2.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        targets: Sequence[Target],
        contiguous: bool = False,
        nested: bool = True,
        apart: bool = False,
    ) -> None:
        self._groups, self._contiguous, self._nested, self._apart = groups, contiguous, nested, apart
        self.targets = list({target.name: target for target in targets}.values())
        found = {part.field.name: (place, part) for place, group in enumerate(groups) for part in group.parts}
        asked = {(found[target.field][0], target.row) for target in self.targets}
        self.wanted = [((place, 0) in asked, (place, 1) in asked) for place in range(len(groups))]
        self.reach = 1 + any(following for _, following in self.wanted)
        self.widths = [self._width(place, found) for place in range(len(groups))]
        #: For each dict of the result but the outer one, the dict that it is in and its key there.
        self._nodes: list[tuple[int, str]] = []
        self._leaves: list[_Leaf | int] = []
        self._plan(found)

    def __call__(self, rows: Sequence[torch.Tensor | None]) -> dict[str, Any]:
        """Cut rows `[n, width]` of all groups, and, with `apart`, second rows of all; None where nothing is wanted."""
        nodes: list[dict[str, Any]] = [{}]
        #: Rows as items of a dtype; their number, stride and offset.
        views: dict[tuple[int, torch.dtype], tuple[torch.Tensor, int, int, Any]] = {}
        for leaf in self._leaves:
            if isinstance(leaf, int):
                parent, key = self._nodes[leaf]
                nodes.append({})
                nodes[parent][key] = nodes[-1]
                continue
            node, key, place, dtype, first, shape, strides = leaf
            found = views.get((place, dtype))
            if found is None:
                whole = rows[place]
                assert whole is not None
                view = whole.view(dtype)
                found = views[place, dtype] = view, view.shape[0], view.stride(0), view.storage_offset()
            view, num_rows, stride, offset = found
            part = view.as_strided((num_rows, *shape), (stride, *strides), offset + first)
            # `data` is a tensor of its own: it may be changed in place, also by something that has gradients.
            nodes[node][key] = part.contiguous().data if self._contiguous else part.data
        return nodes[0]

    def _width(self, place: int, found: dict[str, tuple[int, Part]]) -> int:
        """Say how much of a row, and of the one behind it, is wanted."""
        group, (own, following) = self._groups[place], self.wanted[place]
        if self._apart or not following:
            return group.width if own or following else 0
        parts = (found[target.field] for target in self.targets if target.row)
        stop = max(part.stop for at, part in parts if at == place)
        # As each of the dtypes, rows have a whole number of items.
        largest = max(group.unit.itemsize, *(part.field.numpy_dtype.itemsize for part in group.parts))
        return group.width + -(-stop // largest) * largest // group.unit.itemsize

    def _plan(self, found: dict[str, tuple[int, Part]]) -> None:
        if self._nested:
            unflatten(dict.fromkeys((target.name for target in self.targets), 0))  # raises where names clash
        nodes: dict[tuple[str, ...], int] = {(): 0}
        for target in self.targets:
            *parents, key = target.name.split("/") if self._nested else [target.name]
            for depth in range(len(parents)):
                path = tuple(parents[: depth + 1])
                if path not in nodes:
                    self._leaves.append(len(self._nodes))
                    self._nodes.append((nodes[path[:-1]], path[-1]))
                    nodes[path] = len(nodes)
            place, part = found[target.field]
            start = part.start + (0 if self._apart else target.row * self._groups[place].row_bytes)
            place += target.row * len(self._groups) if self._apart else 0
            dtype, shape = part.field.torch_dtype, part.field.shape
            strides = torch.empty(shape, device="meta").stride()
            self._leaves.append(
                _Leaf(nodes[tuple(parents)], key, place, dtype, start // dtype.itemsize, shape, strides)
            )
