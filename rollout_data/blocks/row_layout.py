"""Layout of fields in stored rows, and the tensors of a batch as views of gathered rows.

All small fields of a frame are stored side by side in one row of the column "frames", so one gather
reads all of them. Large fields and fields in chunks have columns of their own, so that other
fields are read without them. A field below a name that batches concatenate, such as
"observation/joint_pos", is a component. Tensors of unencoded fields, and of components that are
adjacent in the row, are views of the gathered rows. All other tensors are new.
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

#: A field with at least this number of bytes per stored row has a column of its own.
LARGE_FIELD_BYTES = 4096
#: Name of the column in which all small fields of a frame are stored side by side.
PACKED = "frames"
#: The size of a row in bytes is a multiple of this number, so that rows can be viewed as any dtype.
ROW_ALIGNMENT = 8
#: Maps dtypes that torch cannot concatenate with other dtypes to signed dtypes that it can. Values
#: of uint64 fields must be below 2**63.
_JOINABLE = {torch.uint16: torch.int32, torch.uint32: torch.int64, torch.uint64: torch.int64}
#: Function that allocates a CPU tensor with a shape and a dtype.
Allocate = Callable[[Sequence[int], torch.dtype], torch.Tensor]
#: Maps dtypes that torch cannot assign by index to dtypes of the same size that it can.
_WRITABLE = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


@dataclass(frozen=True)
class StoredColumn:
    """A column of a block: one row of fixed size per frame, with one or several fields.

    Attributes:
        name: "frames" for the packed row, otherwise the name of the only field.
        row_bytes: Bytes of a row, padding included.
        offsets: Maps fields to the offset of their first byte in the row.
        is_coded: Whether the rows are stored as compressed chunks.
    """

    name: str
    row_bytes: int
    offsets: Mapping[str, int]
    is_coded: bool = False


class RowLayout:
    """Assignment of the fields of a schema to columns, and to bytes in the rows of a column.

    Args:
        schema: Fields as users see them.
        apart: Names of fields that get a column of their own even if they are small.

    Attributes:
        schema: Fields as users see them.
        stored: Fields with the dtype and shape that their codecs store.
        columns: Maps names to columns.
        column_of: Maps names of fields to their columns.
    """

    def __init__(self, schema: Schema, apart: Collection[str] = ()) -> None:
        for field in schema.values():
            check_codec(field)
            if field.num_elements == 0:
                raise SchemaError(
                    f"field {field.name!r} has shape {field.shape}, expected at least one value "
                    "per frame."
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

        #: Maps each field to its first and stop byte in a row, dtype and shape. Computed once,
        #: since small batches spend much of their time on creating views.
        self._spans: dict[str, tuple[int, int, torch.dtype, tuple[int, ...]]] = {}
        for column in columns:
            for name, start in column.offsets.items():
                field = self.stored[name]
                stop = start + field.row_bytes
                self._spans[name] = (start, stop, field.torch_dtype, field.shape)

    @property
    def frame_bytes(self) -> int:
        """Total bytes of a frame over all columns."""
        return sum(column.row_bytes for column in self.columns.values())

    def numpy_dtype(self, column: StoredColumn) -> np.dtype[Any]:
        """Return the structured numpy dtype of the rows of a column."""
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
        """Return a view of a field in rows of its column: `[..., *shape]` of the stored dtype.

        Args:
            name: The field.
            rows: Rows of the field's column, uint8 `[..., row_bytes]`.
        """
        start, stop, dtype, shape = self._spans[name]
        part = rows[..., start:stop]
        typed = part if dtype == torch.uint8 else part.view(dtype)
        return typed.view(*rows.shape[:-1], *shape) if len(shape) != 1 else typed

    def decoded(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        """Return a decoded field from rows of its column. Without a codec, it is a view of them."""
        stored = self.stored_view(name, rows)
        return self._codecs[name].decode(stored, self.schema[name].torch_dtype)

    def span_of(self, names: Sequence[str]) -> tuple[int, int, torch.dtype] | None:
        """Return a triple (first byte, end, dtype) for the bytes of adjacent fields in a row.

        The result is None if one view cannot show the fields: they are not adjacent, have
        different dtypes or columns, or have a codec.
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
    """Flatten the shapes of components and concatenate them along the last axis: `[..., D]`.

    Components of different dtypes are promoted as by torch.

    Args:
        parts: Components `[..., *shape]`.
        leading: Number of axes before the shape of each component.
        allocate: Function that allocates the result; None lets torch allocate it.
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
    """Build the column that stores several fields side by side, each aligned to its item size."""
    offsets: dict[str, int] = {}
    end = 0
    for field in fields:
        size = field.numpy_dtype.itemsize
        offsets[field.name] = -(-end // size) * size
        end = offsets[field.name] + field.row_bytes
    return StoredColumn(PACKED, _padded(end), offsets)


class Grid(NamedTuple):
    """Positions of the gathered rows in a batch with one or two leading axes.

    Element `[i, j]` of the batch is row `first + i * steps[0] + j * steps[1]`. `sizes` are the
    sizes of the leading axes, such as (windows, frames).
    """

    sizes: tuple[int, ...]
    steps: tuple[int, ...]
    first: int = 0


class FrameRows:
    """The gathered rows of a batch, and cached views of them as other dtypes.

    Args:
        columns: Maps columns to their n rows, int32 `[n, row_bytes / 4]`. The values are raw
            bytes, not numbers.
    """

    def __init__(self, columns: Mapping[str, torch.Tensor]) -> None:
        self._columns = columns
        self._typed: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def as_type(self, column: str, dtype: torch.dtype) -> torch.Tensor:
        """Return a view of a column's rows as another dtype. Views are cached."""
        rows = self._typed.get((column, dtype))
        if rows is None:
            rows = self._typed[column, dtype] = self._columns[column].view(dtype)
        return rows


class FrameCut:
    """Function object that extracts one tensor of a batch from the gathered rows.

    The tensor is one field, or the concatenation of several components.

    Args:
        layout: Layout of the rows.
        names: Name of the field, or names of the components.
        is_joined: Whether components are concatenated to `[..., D]`. Otherwise the tensor has the
            shape of the field.

    Attributes:
        names: Name of the field, or names of the components.
        column: Name of the column that stores the field or the first component.
        parts: Components to concatenate, if they are not adjacent or have a codec; otherwise
            empty, since one view is enough.
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
        # Codecs decode from bytes, so a field with a codec is viewed as uint8.
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
        """Return the tensor, `[*grid.sizes, *shape]`, as a view of the rows if possible.

        `allocate` allocates the result if components must be concatenated.
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
    """Map the name of each tensor of a batch to a function that extracts it from gathered rows.

    With `is_joined`, the components of each name in `groups` are concatenated to one tensor.
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
    """Assign `values[at] = rows` for any dtype, also unsigned ones, which torch does not support.

    `values` must be contiguous.
    """
    dtype = _WRITABLE.get(values.dtype, values.dtype)
    values.view(dtype)[at] = rows.view(dtype)
