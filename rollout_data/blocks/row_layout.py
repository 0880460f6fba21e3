"""Layout of the fields in a stored row, and the tensors of a batch as parts of gathered rows.

All small fields of a frame are stored side by side in one packed row, the column "frames", so a
batch is one gather. Large fields and fields in chunks have columns of their own, so that other
fields are read without them. The bytes of each tensor in a row are computed once per layout. A
batch then needs one view per tensor. Uncoded fields and adjacent components become views of the
rows; all other fields become new tensors.
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

#: A field whose stored rows have at least this number of bytes has a column of its own.
LARGE_FIELD_BYTES = 4096
#: Name of the column that holds the packed row.
PACKED = "frames"
#: Rows are padded to a multiple of this number of bytes, so that every dtype can be viewed in
#: place.
ROW_ALIGNMENT = 8
#: Dtype that torch cannot concatenate with other dtypes -> signed dtype that torch can concatenate.
#: Values of uint64 fields must be below 2**63.
_JOINABLE = {torch.uint16: torch.int32, torch.uint32: torch.int64, torch.uint64: torch.int64}
#: Allocates a tensor on the CPU: (shape, dtype) -> tensor.
Allocate = Callable[[Sequence[int], torch.dtype], torch.Tensor]
#: Dtype whose rows torch cannot write by index -> dtype of the same size, as which rows are copied.
_WRITABLE = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


@dataclass(frozen=True)
class StoredColumn:
    """A column of a table: one row of fixed size per frame, with one or several fields.

    Attributes:
        name: "frames" for the packed row, otherwise the name of the only field.
        row_bytes: Size of a row, padding included.
        offsets: Field -> first byte of the field in the row.
        is_coded: Whether the rows are stored as chunks, which must be decoded.
    """

    name: str
    row_bytes: int
    offsets: Mapping[str, int]
    is_coded: bool = False


class RowLayout:
    """Columns and bytes of the fields of a schema.

    Args:
        schema: Decoded fields.
        apart: Names of small fields that get a column of their own.

    Attributes:
        schema: Decoded fields.
        stored: Stored fields, after their codecs.
        columns: Name -> column.
        column_of: Field -> column.
    """

    def __init__(self, schema: Schema, apart: Collection[str] = ()) -> None:
        for field in schema.values():
            check_codec(field)
            if field.num_elements == 0:
                raise SchemaError(
                    f"field {field.name!r} has shape {field.shape}, which has no values."
                )
        self.schema = schema
        self.stored = Schema(stored_field(field) for field in schema.values())
        self._codecs = {field.name: codec_of(field) for field in schema.values()}

        packed = []
        alone = []
        for field in self.stored.values():
            is_coded = self._codecs[field.name].chunks is not None
            if is_coded or field.name in apart or field.row_bytes >= LARGE_FIELD_BYTES:
                row_bytes = _padded(field.row_bytes)
                alone.append(StoredColumn(field.name, row_bytes, {field.name: 0}, is_coded))
            else:
                packed.append(field)
        columns = [_pack(packed), *alone] if packed else alone
        self.columns = {column.name: column for column in columns}
        self.column_of = {name: column for column in columns for name in column.offsets}

        #: Field -> first byte, end, dtype and shape. Computed once: views take a good part of the
        #: time of small batches.
        self._spans: dict[str, tuple[int, int, torch.dtype, tuple[int, ...]]] = {}
        for column in columns:
            for name, start in column.offsets.items():
                field = self.stored[name]
                stop = start + field.row_bytes
                self._spans[name] = (start, stop, field.torch_dtype, field.shape)

    @property
    def frame_bytes(self) -> int:
        """Bytes of a frame in all columns."""
        return sum(column.row_bytes for column in self.columns.values())

    def numpy_dtype(self, column: StoredColumn) -> np.dtype[Any]:
        """Return the structured dtype of a row of a column."""
        formats = []
        for name in column.offsets:
            field = self.stored[name]
            formats.append((field.numpy_dtype, field.shape))
        return np.dtype(
            {
                "names": list(column.offsets),
                "formats": formats,
                "offsets": list(column.offsets.values()),
                "itemsize": column.row_bytes,
            }
        )

    def stored_view(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        """View a field in rows of its column as `[..., *shape]` of its stored dtype.

        Args:
            name: The field.
            rows: Rows of the field's column, uint8 `[..., row_bytes]`.
        """
        start, stop, dtype, shape = self._spans[name]
        part = rows[..., start:stop]
        typed = part if dtype == torch.uint8 else part.view(dtype)
        return typed.view(*rows.shape[:-1], *shape) if len(shape) != 1 else typed

    def decoded(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        """Decode a field in rows of its column. Raw fields are views, coded fields new tensors."""
        stored = self.stored_view(name, rows)
        return self._codecs[name].decode(stored, self.schema[name].torch_dtype)

    def span_of(self, names: Sequence[str]) -> tuple[int, int, torch.dtype] | None:
        """Return the common bytes of fields in their row: (first byte, end, dtype).

        None if the fields are not adjacent, have several dtypes or columns, or are coded.
        """
        column = self.column_of[names[0]]
        dtype = self._spans[names[0]][2]
        start = stop = column.offsets[names[0]]
        for name in names:
            if self.column_of[name] is not column or column.offsets[name] != stop:
                return None
            if self._spans[name][2] != dtype:
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
    """Concatenate components along the last axis: `[..., D]`.

    Components of different dtypes are promoted as by torch.

    Args:
        parts: Components `[..., *shape]`.
        leading: Number of axes before the shape of each component.
        allocate: Returns the memory of the result; None for new memory.
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
    """Return the packed column of some fields. Each field is aligned to its item size."""
    offsets: dict[str, int] = {}
    end = 0
    for field in fields:
        size = field.numpy_dtype.itemsize
        offsets[field.name] = -(-end // size) * size
        end = offsets[field.name] + field.row_bytes
    return StoredColumn(PACKED, _padded(end), offsets)


class Grid(NamedTuple):
    """Rows of a leaf: its element `[i, j]` is in row `first + i * steps[0] + j * steps[1]`."""

    sizes: tuple[int, ...]
    steps: tuple[int, ...]
    first: int = 0


class FrameRows:
    """Gathered rows: column -> `[n, row_bytes / 4]` int32."""

    def __init__(self, columns: Mapping[str, torch.Tensor]) -> None:
        self._columns = columns
        self._typed: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def as_type(self, column: str, dtype: torch.dtype) -> torch.Tensor:
        """Return a view of the rows of a column as another dtype, cached for all its fields."""
        found = self._typed.get((column, dtype))
        if found is None:
            found = self._typed[column, dtype] = self._columns[column].view(dtype)
        return found


class FrameCut:
    """A tensor of a batch: one field, or several components joined along the last axis.

    Args:
        layout: Layout of the rows.
        names: Name of the field, or names of the components.
        is_joined: Whether the tensor is flat, `[..., D]`. Otherwise it has the shape of the field.

    Attributes:
        names: Name of the field, or names of the components.
        column: Column of the first name.
        parts: Components that must be concatenated, since they are not adjacent or are coded;
            otherwise empty.
    """

    def __init__(self, layout: RowLayout, names: Sequence[str], is_joined: bool = False) -> None:
        self._layout = layout
        self.names = tuple(names)
        self.column = layout.column_of[names[0]].name
        span = layout.span_of(names)
        self.parts = (
            [FrameCut(layout, [name]) for name in names] if span is None and is_joined else []
        )
        self._is_coded = span is None
        row_bytes = layout.columns[self.column].row_bytes
        # Coded values are decoded from bytes.
        start, stop, self._dtype = span or (0, row_bytes, torch.uint8)
        item_bytes = self._dtype.itemsize
        self._begin = start // item_bytes
        self._width = row_bytes // item_bytes
        is_flat = is_joined or span is None
        self._shape = ((stop - start) // item_bytes,) if is_flat else layout.stored[names[0]].shape
        self._strides = torch.empty(self._shape, device="meta").stride()

    def __call__(
        self, rows: FrameRows, grid: Grid, allocate: Allocate | None = None
    ) -> torch.Tensor:
        """Return the tensor of a batch, `[*grid.sizes, *shape]`: a view of the rows where possible.

        `allocate` returns memory for components that must be concatenated.
        """
        if self.parts:
            return joined([part(rows, grid) for part in self.parts], len(grid.sizes), allocate)
        typed = rows.as_type(self.column, self._dtype)
        width = self._width
        strides = (*[step * width for step in grid.steps], *self._strides)
        begin = typed.storage_offset() + grid.first * width + self._begin
        view = typed.as_strided((*grid.sizes, *self._shape), strides, begin)
        return self._layout.decoded(self.names[0], view) if self._is_coded else view


def leaves_of(layout: RowLayout, groups: Sequence[str], is_joined: bool) -> dict[str, FrameCut]:
    """Return the tensors of a batch by name.

    With `is_joined`, the components of each name in `groups` are joined to one tensor.
    """
    leaves: dict[str, list[str]] = {}
    for name in layout.schema:
        group = name.partition("/")[0]
        is_part = is_joined and group in groups and group != name
        leaves.setdefault(group if is_part else name, []).append(name)
    return {
        name: FrameCut(layout, parts, is_joined=parts != [name]) for name, parts in leaves.items()
    }


def put(values: torch.Tensor, at: tuple[torch.Tensor, ...], rows: torch.Tensor) -> None:
    """Write rows to the positions `at` of `values`, a contiguous tensor with memory of its own."""
    dtype = _WRITABLE.get(values.dtype, values.dtype)
    values.view(dtype)[at] = rows.view(dtype)
