"""How a row of several fields lies in memory: small fields side by side, so that a sample is one gather.

One rule: bytes and offsets are decided here and nowhere else. A gather of one packed row per
transition costs what the bytes cost; one gather per field costs 1.4-1.75 times that at batches of
256 to 4096. Rows of `WIDE_ROW_BYTES` or more move at memory speed by themselves and lie apart.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import Any

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
class _Cut:
    """How the fields of one dtype are cut from rows: sizes of all pieces, and which of them are fields."""

    dtype: torch.dtype
    sizes: list[int]
    #: First or second row, field, place among the pieces, shape where it is not `[size]`.
    picks: list[tuple[int, str, int, tuple[int, ...] | None]]


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

    def views(
        self, rows: torch.Tensor, contiguous: bool = False, names: Collection[str] | None = None
    ) -> dict[str, torch.Tensor]:
        """See `[..., width]` rows of this group as fields `[..., *event]` that share their memory."""
        return self._cut(rows, self._plan(names, ()), contiguous)[0]

    def pair_views(
        self, pairs: torch.Tensor, names: Collection[str], contiguous: bool = False
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """See `[..., 2 * width]` pairs of rows as all fields of the first and some of the second."""
        return self._cut(pairs, self._plan(None, names), contiguous)

    def _cut(
        self, rows: torch.Tensor, plan: list[_Cut], contiguous: bool
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        found: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]] = ({}, {})
        for cut in plan:
            typed = rows if cut.dtype is self.unit else rows.view(cut.dtype)
            # One call per dtype; "unsafe" only means that autograd takes the parts for tensors of their own, which
            # may be changed in place like any other, also by something that has gradients. Nobody keeps `rows`.
            pieces = typed.unsafe_split_with_sizes(cut.sizes, -1)
            for row, name, place, shape in cut.picks:
                piece = pieces[place]
                if shape is not None:  # `data` makes it a tensor of its own again
                    piece = piece.view(*rows.shape[:-1], *shape).data
                found[row][name] = piece.contiguous() if contiguous else piece
        return found

    def _plan(self, names: Collection[str] | None, next_names: Collection[str]) -> list[_Cut]:
        """Say how to cut a row, or two rows side by side where `next_names` asks for fields of the second."""
        key = None if names is None else tuple(names), tuple(next_names)
        plan = self._plans.get(key)
        if plan is None:
            wanted = [(0, part) for part in self.parts if names is None or part.field.name in names]
            wanted += [(1, part) for part in self.parts if part.field.name in next_names]
            num_bytes = self.row_bytes * (2 if key[1] else 1)
            dtypes = dict.fromkeys(part.field.torch_dtype for _, part in wanted)
            plan = self._plans[key] = [
                self._plan_cut(
                    dtype, [(row, part) for row, part in wanted if part.field.torch_dtype is dtype], num_bytes
                )
                for dtype in dtypes
            ]
        return plan

    def _plan_cut(self, dtype: torch.dtype, wanted: list[tuple[int, Part]], num_bytes: int) -> _Cut:
        sizes: list[int] = []
        picks: list[tuple[int, str, int, tuple[int, ...] | None]] = []
        reached = 0
        for row, part in wanted:
            start, stop = row * self.row_bytes + part.start, row * self.row_bytes + part.stop
            if start > reached:  # a piece that nobody wants; each takes a quarter of a microsecond, also an empty one
                sizes.append((start - reached) // dtype.itemsize)
            sizes.append((stop - start) // dtype.itemsize)
            shape = part.field.shape
            picks.append((row, part.field.name, len(sizes) - 1, shape if len(shape) != 1 else None))
            reached = stop
        if num_bytes > reached:
            sizes.append((num_bytes - reached) // dtype.itemsize)
        return _Cut(dtype, sizes, picks)

    @cached_property
    def _plans(self) -> dict[Any, list[_Cut]]:
        return {}


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
