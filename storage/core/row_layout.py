"""How a row of several fields lies in memory: small fields side by side, so that a sample is one gather.

One rule: bytes and offsets are decided here and nowhere else. A gather of one packed row per
transition costs what the bytes cost; one gather per field costs 1.4-1.75 times that at batches of
256 to 4096. Rows of `WIDE_ROW_BYTES` or more move at memory speed by themselves and lie apart.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .fields import Field, Schema

#: From this size on a field lies apart.
WIDE_ROW_BYTES = 4096


@dataclass(frozen=True)
class Part:
    """Where one field lies in its group's row."""

    field: Field
    #: In bytes.
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
