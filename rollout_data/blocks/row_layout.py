"""Row layout: which bytes of a stored row belong to which field; cuts: the leaves of a batch, made of gathered rows.

One rule: pure arithmetic on a `Schema`. All small fields of a frame stand side by side in one
packed row (column "frames"), so that a batch is one gather; a field whose row is large, or that is
kept in chunks, gets a column of its own, so that reading the others does not drag it along. Where a leaf lies is
decided once for each layout; a batch then costs one view a leaf. Values that are stored as they are, and components
side by side, are views of the rows; all others lie in memory of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
import torch

from storage.codecs.codec_chains import check_codec, codec_of, stored_field
from storage.core.fields import Field, Schema
from storage.errors import SchemaError

#: A field whose stored row has at least this many bytes is kept apart from the packed row.
LARGE_FIELD_BYTES = 4096
#: Name of the column that holds the packed row.
PACKED = "frames"
#: Rows are padded to this many bytes, so that every dtype can be viewed in place.
ROW_ALIGNMENT = 8
#: What torch can join with other dtypes, of those that it cannot; the same values, but for uint64 beyond 2**63.
_JOINABLE = {torch.uint16: torch.int32, torch.uint32: torch.int64, torch.uint64: torch.int64}
#: Gives memory of a shape and dtype on the CPU.
Allocate = Callable[[Sequence[int], torch.dtype], torch.Tensor]
#: What torch can write single rows of, of those that it cannot; the same bytes.
_WRITABLE = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


@dataclass(frozen=True)
class StoredColumn:
    """One fixed-size row per frame, holding one or several fields.

    Attributes:
        name: "frames", or the name of the one field that it holds.
        row_bytes: Size of a row, padded to a multiple of 8 in the packed column.
        offsets: Field name -> first byte of the field within the row.
        is_coded: The file holds chunks, which decode to such rows.
    """

    name: str
    row_bytes: int
    offsets: Mapping[str, int]
    is_coded: bool = False


class RowLayout:
    """Where each field of a schema stands.

    Args:
        schema: The fields as users see them.
        apart: Fields that are kept apart from the packed row although they are small.

    Attributes:
        schema: The fields as users see them.
        stored: The same fields as they are stored (after their codecs).
        columns: Column name -> `StoredColumn`.
        column_of: Field name -> its `StoredColumn`.
    """

    def __init__(self, schema: Schema, apart: Collection[str] = ()) -> None:
        for field in schema.values():
            check_codec(field)
            if field.num_elements == 0:
                raise SchemaError("store the field", repr(field.name), "a row of at least one value", str(field.shape))
        self.schema = schema
        self.stored = Schema(stored_field(field) for field in schema.values())
        coded = {field.name for field in schema.values() if codec_of(field).chunks is not None}
        apart = {*coded, *apart}
        alone = {f.name for f in self.stored.values() if f.row_bytes >= LARGE_FIELD_BYTES or f.name in apart}
        small = [f for f in self.stored.values() if f.name not in alone]
        columns = [_pack(small)] if small else []
        columns += [
            StoredColumn(f.name, _padded(f.row_bytes), {f.name: 0}, f.name in coded)
            for f in self.stored.values()
            if f.name in alone
        ]
        self.columns = {column.name: column for column in columns}
        self.column_of = {name: column for column in columns for name in column.offsets}
        # Looked up once: in a small batch the views of the fields are a good part of the time.
        self._codecs = {field.name: codec_of(field) for field in schema.values()}
        self._spans = {
            name: (start, start + self.stored[name].row_bytes, self.stored[name].torch_dtype, self.stored[name].shape)
            for column in columns
            for name, start in column.offsets.items()
        }

    @property
    def frame_bytes(self) -> int:
        """Bytes of one frame over all columns."""
        return sum(column.row_bytes for column in self.columns.values())

    def numpy_dtype(self, column: StoredColumn) -> np.dtype[Any]:
        """Structured dtype of the packed row, or the plain dtype of a large field's row."""
        return np.dtype(
            {
                "names": list(column.offsets),
                "formats": [(self.stored[name].numpy_dtype, self.stored[name].shape) for name in column.offsets],
                "offsets": list(column.offsets.values()),
                "itemsize": column.row_bytes,
            }
        )

    def stored_view(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        """View one field in `rows` (uint8 `[..., row_bytes]` of its column) as `[..., *shape]` of its stored dtype."""
        start, stop, dtype, shape = self._spans[name]
        part = rows[..., start:stop]
        typed = part if dtype == torch.uint8 else part.view(dtype)
        return typed.view(*rows.shape[:-1], *shape) if len(shape) != 1 else typed

    def decoded(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        """Return one field in `rows` as users see it: a view for raw fields, a new tensor for coded ones."""
        return self._codecs[name].decode(self.stored_view(name, rows), self.schema[name].torch_dtype)

    def span_of(self, names: Sequence[str]) -> tuple[int, int, torch.dtype] | None:
        """Where fields stand in their row, (first byte, end, dtype); None unless adjacent, stored as users see them."""
        column = self.column_of[names[0]]
        dtype = self._spans[names[0]][2]
        start = stop = column.offsets[names[0]]
        for name in names:
            if self.column_of[name] is not column or column.offsets[name] != stop or self._spans[name][2] != dtype:
                return None
            if self.stored[name].dtype != self.schema[name].dtype:
                return None
            stop = self._spans[name][1]
        return start, stop, dtype


def joined(
    parts: Sequence[torch.Tensor],
    leading: int,
    allocate: Callable[[Sequence[int], torch.dtype], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Join components `[..., *shape]` with `leading` axes before their shapes along the last axis: `[..., D]`.

    Components of several dtypes are promoted as torch does. The result lies in new memory, or in what
    `allocate(shape, dtype)` gives.
    """
    if len({part.dtype for part in parts}) > 1:
        parts = [part.to(_JOINABLE.get(part.dtype, part.dtype)) for part in parts]
    rows = [part.flatten(leading) if part.dim() > leading else part.unsqueeze(-1) for part in parts]
    if allocate is None:
        return torch.cat(rows, dim=-1)
    dtype = reduce(torch.promote_types, (part.dtype for part in rows))
    shape = (*rows[0].shape[:-1], sum(part.shape[-1] for part in rows))
    return torch.cat(rows, dim=-1, out=allocate(shape, dtype))


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // ROW_ALIGNMENT) * ROW_ALIGNMENT


def _pack(fields: list[Field]) -> StoredColumn:
    """Lay fields one after the other, each aligned to its item size."""
    offsets: dict[str, int] = {}
    end = 0
    for field in fields:
        size = field.numpy_dtype.itemsize
        offsets[field.name] = -(-end // size) * size
        end = offsets[field.name] + field.row_bytes
    return StoredColumn(PACKED, _padded(end), offsets)


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
        self._layout = layout
        self.names = tuple(names)
        self.column = layout.column_of[names[0]].name
        span = layout.span_of(names)
        self.parts = [FrameCut(layout, [name]) for name in names] if span is None and is_joined else []
        self._is_coded = span is None
        row_bytes = layout.columns[self.column].row_bytes
        start, stop, self._dtype = span or (0, row_bytes, torch.uint8)  # coded values are decoded from bytes
        item_bytes = self._dtype.itemsize
        self._begin = start // item_bytes
        self._width = row_bytes // item_bytes
        is_flat = is_joined or span is None
        self._shape = ((stop - start) // item_bytes,) if is_flat else layout.stored[names[0]].shape
        self._strides = torch.empty(self._shape, device="meta").stride()

    def __call__(self, rows: FrameRows, grid: Grid, allocate: Allocate | None = None) -> torch.Tensor:
        """Return the leaf as `[*grid.sizes, *shape]`; what has to be joined in memory that `allocate` gives."""
        if self.parts:
            return joined([part(rows, grid) for part in self.parts], len(grid.sizes), allocate)
        typed = rows.as_type(self.column, self._dtype)
        width = self._width
        strides = (*[step * width for step in grid.steps], *self._strides)
        begin = typed.storage_offset() + grid.first * width + self._begin
        view = typed.as_strided((*grid.sizes, *self._shape), strides, begin)
        return self._layout.decoded(self.names[0], view) if self._is_coded else view


def leaves_of(layout: RowLayout, groups: Sequence[str], is_joined: bool) -> dict[str, FrameCut]:
    """Return all fields of a layout by their names in a batch; with `is_joined` each of `groups` is one leaf."""
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
