"""Row layout: which bytes of a stored row belong to which field.

One rule: pure arithmetic on a `Schema`. All small fields of a frame stand side by side in one
packed row (column "frames"), so that a batch is one gather; a field whose row is large, or that is
kept in chunks, gets a column of its own, so that reading the others does not drag it along.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
import torch

from storage.codecs.codecs import check_codec, codec_of, stored_field
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

    Attributes:
        schema: The fields as users see them.
        stored: The same fields as they are stored (after their codecs).
        columns: Column name -> `StoredColumn`.
        column_of: Field name -> its `StoredColumn`.
    """

    def __init__(self, schema: Schema) -> None:
        for field in schema.values():
            check_codec(field)
            if field.num_elements == 0:
                raise SchemaError("store the field", repr(field.name), "a row of at least one value", str(field.shape))
        self.schema = schema
        self.stored = Schema(stored_field(field) for field in schema.values())
        coded = {field.name for field in schema.values() if codec_of(field).chunks is not None}
        alone = {f.name for f in self.stored.values() if f.row_bytes >= LARGE_FIELD_BYTES or f.name in coded}
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
        """Give one field in `rows` as users see it: a view for raw fields, a new tensor for coded ones."""
        return self._codecs[name].decode(self.stored_view(name, rows), self.schema[name].torch_dtype)

    def span_of(self, names: Sequence[str]) -> tuple[int, int, torch.dtype] | None:
        """Where fields stand in their row, (first byte, end, dtype); None unless adjacent, stored as users see them."""
        column, dtype = self.column_of[names[0]], self._spans[names[0]][2]
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
