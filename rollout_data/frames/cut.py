"""Cuts: the leaves of a batch, as tensors made of gathered rows.

One rule: where a leaf lies is decided once for each layout; a batch then costs one view a leaf. Values that are
stored as they are, and components side by side, are views of the rows; all others lie in memory of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from ..format.schema import RowLayout, joined

#: Gives memory of a shape and dtype on the CPU.
Allocate = Callable[[Sequence[int], torch.dtype], torch.Tensor]
#: What torch can write single rows of, of those that it cannot; the same bytes.
_WRITABLE = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


class Grid(NamedTuple):
    """Which rows a leaf is cut from: `[i, j]` of it from row `first + i * steps[0] + j * steps[1]`."""

    sizes: tuple[int, ...]
    steps: tuple[int, ...]
    first: int = 0


class FrameRows:
    """Gathered rows: column -> `[n, row_bytes / 4]` int32."""

    def __init__(self, columns: Mapping[str, torch.Tensor]) -> None:
        self._columns = columns
        self._typed: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def as_type(self, column: str, dtype: torch.dtype) -> torch.Tensor:
        """View the rows of a column as another dtype; the leaves of one column share this view."""
        found = self._typed.get((column, dtype))
        if found is None:
            found = self._typed[column, dtype] = self._columns[column].view(dtype)
        return found


class FrameCut:
    """One leaf: a field, or the components of an observation joined along the last axis.

    Args:
        layout: What the rows hold.
        names: The field, or the components.
        is_joined: Give `[..., D]`, rather than the shape of the field.

    Attributes:
        parts: What has to be joined, because it does not lie side by side or is coded; otherwise empty.
    """

    def __init__(self, layout: RowLayout, names: Sequence[str], is_joined: bool = False) -> None:
        self._layout, self.names, self.column = layout, tuple(names), layout.column_of[names[0]].name
        span = layout.span_of(names)
        self.parts = [FrameCut(layout, [name]) for name in names] if span is None and is_joined else []
        self._is_coded, row_bytes = span is None, layout.columns[self.column].row_bytes
        start, stop, self._dtype = span or (0, row_bytes, torch.uint8)  # coded values are decoded from bytes
        item_bytes = self._dtype.itemsize
        self._begin, self._width = start // item_bytes, row_bytes // item_bytes
        is_flat = is_joined or span is None
        self._shape = ((stop - start) // item_bytes,) if is_flat else layout.stored[names[0]].shape
        self._strides = torch.empty(self._shape, device="meta").stride()

    def __call__(self, rows: FrameRows, grid: Grid, allocate: Allocate | None = None) -> torch.Tensor:
        """Give the leaf as `[*grid.sizes, *shape]`; what has to be joined in memory that `allocate` gives."""
        if self.parts:
            return joined([part(rows, grid) for part in self.parts], len(grid.sizes), allocate)
        typed, width = rows.as_type(self.column, self._dtype), self._width
        strides = (*[step * width for step in grid.steps], *self._strides)
        begin = typed.storage_offset() + grid.first * width + self._begin
        view = typed.as_strided((*grid.sizes, *self._shape), strides, begin)
        return self._layout.decoded(self.names[0], view) if self._is_coded else view


def leaves_of(layout: RowLayout, groups: Sequence[str], is_joined: bool) -> dict[str, FrameCut]:
    """Give all fields of a layout by their names in a batch; with `is_joined` each of `groups` is one leaf."""
    leaves: dict[str, list[str]] = {}
    for name in layout.schema:
        group = name.partition("/")[0]
        is_part = is_joined and group in groups and group != name
        leaves.setdefault(group if is_part else name, []).append(name)
    return {name: FrameCut(layout, parts, is_joined=parts != [name]) for name, parts in leaves.items()}


def put(values: torch.Tensor, at: tuple[torch.Tensor, ...], rows: torch.Tensor) -> None:
    """Write `rows` to the places `at` of a leaf that has contiguous memory of its own."""
    kind = _WRITABLE.get(values.dtype, values.dtype)
    values.view(kind)[at] = rows.view(kind)
