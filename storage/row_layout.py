"""How a row of several fields lies in memory: small fields side by side, so that a sample is one gather.

One rule: bytes and offsets are decided here and nowhere else. A gather of one packed row per
transition costs what the bytes cost; one gather per field costs 1.4-1.75 times that at batches of
256 to 4096. Rows of `WIDE_ROW_BYTES` or more move at memory speed by themselves and lie apart.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from functools import cached_property

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

    def holds(self, names: Container[str] | None) -> bool:
        """Tell whether a field of these lies here; None stands for all."""
        return names is None or any(part.field.name in names for part in self.parts)

    def views(
        self, rows: torch.Tensor, contiguous: bool = False, names: Container[str] | None = None
    ) -> dict[str, torch.Tensor]:
        """See `[..., width]` rows of this group as fields `[..., *event]` that share their memory."""
        as_bytes: torch.Tensor | None = None
        found = {}
        for name, dtype, is_unit, start, size, shape in self._plan:
            if names is not None and name not in names:
                continue
            if is_unit:
                typed = rows.narrow(-1, start, size)
            elif not size:
                typed = torch.empty((*rows.shape[:-1], 0), dtype=dtype, device=rows.device)
            else:
                as_bytes = rows.view(torch.uint8) if as_bytes is None else as_bytes
                typed = as_bytes.narrow(-1, start, size).view(dtype)
            if shape is not None:
                typed = typed.view(*rows.shape[:-1], *shape)
            found[name] = typed.contiguous() if contiguous else typed
        return found

    @cached_property
    def _plan(self) -> list[tuple[str, torch.dtype, bool, int, int, tuple[int, ...] | None]]:
        """Name, dtype, whether it is the unit's, start and size in units or bytes, shape where it is not `[size]`."""
        plan = []
        for part in self.parts:
            field = part.field
            step = self.unit.itemsize if field.torch_dtype is self.unit else 1
            shape = field.shape if len(field.shape) != 1 else None
            start, size = part.start // step, (part.stop - part.start) // step
            plan.append((field.name, field.torch_dtype, field.torch_dtype is self.unit, start, size, shape))
        return plan


def lay_out(schema: Schema, wide_row_bytes: int = WIDE_ROW_BYTES) -> list[Group]:
    """Put each field into a group: all narrow ones into one, each wide one into its own."""
    narrow = [field for field in schema.values() if field.row_bytes < wide_row_bytes]
    groups = [[field] for field in schema.values() if field.row_bytes >= wide_row_bytes]
    return [_pack(fields) for fields in ([narrow] if narrow else []) + groups]


def in_order(schema: Schema, found: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Sort fields as the schema has them."""
    return {name: found[name] for name in schema if name in found}


def _pack(fields: list[Field]) -> Group:
    ordered = sorted(fields, key=lambda field: -field.numpy_dtype.itemsize)
    largest = ordered[0].numpy_dtype.itemsize
    parts, start = [], 0
    for field in ordered:
        parts.append(Part(field, start, start + field.row_bytes))
        start += field.row_bytes
    # A row starts where its largest item may stand; rows of some size also move four bytes at a time.
    step = max(largest, 4 if start >= 32 else 1)
    num_bytes = max(-(-start // step) * step, 1)
    unit = torch.float32 if num_bytes % 4 == 0 else torch.uint8
    return Group(tuple(parts), num_bytes // unit.itemsize, unit)
