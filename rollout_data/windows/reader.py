"""Batches of windows: gather what a plan says, and view it as nested fields.

One rule: one gather for each kind of row moves the bytes; fields are views of the rows, except those that a
codec makes and next observations into which a true last one was put.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np
import torch

from storage.core.tree import unflatten

from ..format.header import DATA, FINAL, FINAL_OBSERVATION_ONLY
from ..format.schema import RowLayout, joined
from ..frames.store import FrameStore, MappedFrames
from ..index.index import Int64s, Runs
from .fields import DONE, NEXT, OBSERVATIONS, WindowField, WindowPlan
from .index import WindowShape

#: Gives memory of a shape and dtype.
Allocate = Callable[[Sequence[int], torch.dtype], torch.Tensor]
MASK, NEXT_MASK = "mask", "next_mask"


class WindowReader:
    """Reads windows of a store.

    Args:
        store: Where the frames are.
        plan: What a window is made of.
        trajectories: int64 `[K]`, which trajectories may be read.
        padding: See `WindowDataset`.
        mask_is_one: The batch has one mask for all fields, rather than one for each.
        contiguous: Give every field contiguous memory of its own.
    """

    def __init__(
        self,
        store: FrameStore,
        plan: WindowPlan,
        trajectories: Int64s,
        padding: str,
        mask_is_one: bool,
        contiguous: bool,
    ) -> None:
        self.store, self.plan = store, plan
        self._trajectories = trajectories
        self._is_zero, self._mask_is_one, self._contiguous = padding == "zero", mask_is_one, contiguous
        self._layout, index = store.layouts[DATA], store.index
        self._lengths, self._is_timeout = index.lengths[trajectories], index.is_timeout()[trajectories]
        final = index.final_row[trajectories] >= 0
        is_whole = (index.flags[trajectories] & FINAL_OBSERVATION_ONLY) == 0
        self._has_final = {OBSERVATIONS[0]: final, OBSERVATIONS[1]: final & is_whole}
        self._first_frame = index.first_frame[trajectories]
        self._next_fragment, self._row_shift = index.fragment_frame[1:], index.fragment_row - index.fragment_frame[:-1]
        self._has_chunks = any(self._layout.columns[name].is_coded for name in plan.columns)
        self._of_batch: dict[tuple[int, int], tuple[Int64s, Int64s]] = {}
        self._views = {field.name: _view([field], plan, self._layout, is_flat=False) for field in plan.fields}
        self._views |= {name: _view(fields, plan, self._layout, is_flat=True) for name, fields in plan.joins.items()}
        name_of = {field.name: name for name, fields in plan.joins.items() for field in fields}
        #: What a batch has, and the fields that are given as they are.
        self._names = list(dict.fromkeys(name_of.get(field.name, field.name) for field in plan.fields))
        self._singles = [field for field in plan.fields if field.name not in name_of]
        own = [field for field in plan.fields if not field.is_next]
        #: Name in a mask -> a field that it is that of; joined components have the same.
        self._of_mask = {name_of.get(field.name, field.name): field for field in own}
        self._of_next_mask = {
            name_of.get(field.name, field.name).removeprefix(NEXT): field for field in plan.fields if field.is_next
        }
        self._reach = {field.name: (int(field.deltas.min()), int(field.deltas.max())) for field in plan.fields}
        self._reach_read = [shape.reach for shape in plan.shapes]
        #: What most batches have no frame of.
        self._has_single_frames = bool((self._lengths == 1).any())

    def read(self, place: Int64s, anchor: Int64s, allocate: Allocate) -> dict[str, Any]:
        """Read windows: a nested dict of `[B, L, *shape]` tensors, with masks.

        Args:
            place: int64 `[B]`, positions in `trajectories`.
            anchor: int64 `[B]`, frames within them.
            allocate: Gives the memory of the result.
        """
        at = _Places(place, anchor, self._lengths[place])
        rows = _Rows(self._gather(at, allocate), len(at.anchor))
        flat = {field.name: self._field(field, rows, at) for field in self._singles}
        if self.plan.joins:
            flat |= {name: self._joined(name, fields, rows, at, allocate) for name, fields in self.plan.joins.items()}
            flat = {name: flat[name] for name in self._names}
        if self._contiguous:
            flat = {name: value.contiguous() for name, value in flat.items()}
        return {**unflatten(flat), **self._masks(at)}

    def _gather(self, at: _Places, allocate: Allocate) -> dict[str, torch.Tensor]:
        """Column -> `[B * W, row_bytes / 4]` int32."""
        located = [
            self._locate(shape, reach, at) for shape, reach in zip(self.plan.shapes, self._reach_read, strict=True)
        ]
        rows = {}
        for name, number in self.plan.columns.items():
            shape, (runs, others) = self.plan.shapes[number], located[number]
            num_words = self._layout.columns[name].row_bytes // 4
            out = rows[name] = allocate((len(at.anchor) * len(shape.deltas), num_words), torch.int32)
            if len(at.anchor):
                self.store.copy((DATA, name), runs, shape.unit, out)
            if others is not None:
                self.store.copy((DATA, name), others, 0, out)
            if self._is_zero and at.reaches_outside(*self._reach_read[number]):
                out.numpy()[~at.inside(shape.deltas, *self._reach_read[number]).ravel()] = 0
        return rows

    def _locate(self, shape: WindowShape, reach: tuple[int, int], at: _Places) -> tuple[Runs, Runs | None]:
        """Give runs that cover all windows, and others that are to be copied after them.

        Most windows lie in one run. Where it is so, it is found in one search, and what stands at the places of
        the other windows is overwritten: half the time of treating all alike.
        """
        trajectory = self._trajectories[at.place]
        if len(shape.first) > 1 or self._has_chunks or not isinstance(self.store, MappedFrames):
            return self.store.locate(*shape.pieces(trajectory, at.length, at.anchor)), None
        index, length = self.store.index, len(shape.deltas)
        start = at.anchor + reach[0]
        frame = self._first_frame[at.place] + start
        reaches_outside = at.reaches_outside(*reach)
        if reaches_outside:
            frame = np.clip(frame, 0, index.num_frames - 1)
        fragment = np.searchsorted(index.fragment_frame, frame, side="right") - 1
        is_whole = frame + length <= self._next_fragment[fragment]
        if reaches_outside:
            is_whole &= (start >= 0) & (start + length <= at.length)
        target, count = self._targets(len(frame), length)
        runs = Runs(target, index.fragment_block[fragment], self._row_shift[fragment] + frame, count)
        odd = np.flatnonzero(~is_whole)
        if not len(odd):
            return runs, None
        if 2 * len(odd) > len(frame):
            return self.store.locate(*shape.pieces(trajectory, at.length, at.anchor)), None
        which, first, frames, target = shape.pieces(trajectory[odd], at.length[odd], at.anchor[odd])
        window, row = np.divmod(target, length)
        others = self.store.locate(which, first, frames, odd[window] * length + row)
        some = int(np.argmax(is_whole))
        runs.block[odd], runs.row[odd] = runs.block[some], runs.row[some]
        return runs, others

    def _targets(self, num_windows: int, length: int) -> tuple[Int64s, Int64s]:
        """First rows and sizes of windows in a batch, the same again and again."""
        found = self._of_batch.get((num_windows, length))
        if found is None:
            self._of_batch.clear()
            found = np.arange(num_windows) * length, np.full(num_windows, length)
            self._of_batch[num_windows, length] = found
        return found

    def _field(self, field: WindowField, rows: _Rows, at: _Places) -> torch.Tensor:
        if not field.column:
            return self._flag(field, at)
        has_final = self._has_final_at(field, at) if field.is_next else None
        if (view := self._views[field.name]) is not None and (has_final is None or not has_final.any()):
            return view(rows)
        num_frames, of_column = len(self.plan.shapes[self.plan.columns[field.column]].deltas), rows.of[field.column]
        part = of_column.view(torch.uint8).view(len(at.anchor), num_frames, 4 * of_column.shape[1])
        part = part.index_select(1, field.rows) if isinstance(field.rows, torch.Tensor) else part[:, field.rows]
        if has_final is not None and has_final.any():
            part = self._with_finals(field, part, at, *np.nonzero(has_final))
        return self._layout.decoded(field.source, part)

    def _joined(
        self, name: str, fields: Sequence[WindowField], rows: _Rows, at: _Places, allocate: Allocate
    ) -> torch.Tensor:
        """Components as one `[B, L, D]`: a view where they stand side by side."""
        has_final = self._has_final_at(fields[0], at) if fields[0].is_next else None
        if (view := self._views[name]) is not None and (has_final is None or not has_final.any()):
            return view(rows)
        return joined([self._field(field, rows, at) for field in fields], 2, allocate)

    def _flag(self, field: WindowField, at: _Places) -> torch.Tensor:
        """`done` or `timeout`: bool `[B, L]`, True on a trajectory's last frame."""
        flag = np.zeros((len(at.anchor), len(field.deltas)), bool)
        if at.least_after <= self._reach[field.name][1] + 1 or self._has_single_frames:
            near = np.flatnonzero((at.after <= self._reach[field.name][1] + 1) | (at.length == 1))
            last = at.after[near, None] - 1
            # The nearest frame stands for one outside, unless zeros do.
            is_last = field.deltas == last if self._is_zero else (field.deltas >= last) | (at.length[near, None] == 1)
            flag[near] = is_last if field.source == DONE else is_last & self._is_timeout[at.place[near], None]
        return torch.from_numpy(flag)

    def _with_finals(
        self, field: WindowField, rows: torch.Tensor, at: _Places, window: Int64s, step: Int64s
    ) -> torch.Tensor:
        """Put true last observations into `rows[window, step]`; in memory of their own."""
        final = self.store.layouts[FINAL]
        column = final.column_of[field.source]
        which, place = np.unique(self._trajectories[at.place[window]], return_inverse=True)
        values = self.store.finals(column.name, which).numpy()[place.reshape(-1)]
        start, source = self._layout.column_of[field.source].offsets[field.source], column.offsets[field.source]
        size = self._layout.stored[field.source].row_bytes
        rows = rows.clone(memory_format=torch.contiguous_format)
        rows.numpy()[window, step, start : start + size] = values[:, source : source + size]
        return rows

    def _has_final_at(self, field: WindowField, at: _Places) -> np.ndarray:
        """bool `[B, L]`, the row is a true last observation."""
        return at.is_final(field.deltas) & self._final_of(field, at)

    def _final_of(self, field: WindowField, at: _Places) -> np.ndarray:
        """bool `[B, 1]`: the true last observation was recorded."""
        return self._has_final[field.source.split("/")[0]][at.place][:, None]

    def _masks(self, at: _Places) -> dict[str, Any]:
        if self._mask_is_one:
            found: dict[str, Any] = {MASK: torch.from_numpy(self._inside(next(iter(self._of_mask.values())), at))}
        else:
            own = {name: torch.from_numpy(self._inside(field, at)) for name, field in self._of_mask.items()}
            found = {MASK: unflatten(own)}
        nexts = {}
        for name, field in self._of_next_mask.items():
            nexts[name] = torch.from_numpy(self._inside(field, at) | self._has_final_at(field, at))
        return {**found, NEXT_MASK: unflatten(nexts)} if nexts else found

    def _inside(self, field: WindowField, at: _Places) -> np.ndarray:
        """bool `[B, L]`, the frame exists; a new array."""
        return at.inside(field.deltas, *self._reach[field.name])


class _Rows:
    """The rows that were gathered, by column, and views of them that several fields share."""

    def __init__(self, of: dict[str, torch.Tensor], num_windows: int) -> None:
        self.of, self.num_windows = of, num_windows
        self._typed: dict[tuple[str, torch.dtype], tuple[torch.Tensor, int]] = {}

    def typed(self, column: str, dtype: torch.dtype) -> tuple[torch.Tensor, int]:
        """View the rows of a column as another dtype: the view and where it begins in its memory."""
        found = self._typed.get((column, dtype))
        if found is None:
            view = self.of[column].view(dtype)
            found = self._typed[column, dtype] = view, int(view.storage_offset())
        return found


class _Places:
    """Where windows stand, int64 `[B]` each: place of the trajectory, anchor, frames of the trajectory.

    `after` is the delta of the frame after the last one.
    """

    def __init__(self, place: Int64s, anchor: Int64s, length: Int64s) -> None:
        self.place, self.anchor, self.length, self.after = place, anchor, length, length - anchor
        #: The least of them.
        self.least_anchor, self.least_after = (int(anchor.min()), int(self.after.min())) if len(anchor) else (0, 1)

    def reaches_outside(self, low: int, high: int) -> bool:
        """Whether any frame from delta `low` to `high` does not exist."""
        return low < -self.least_anchor or high >= self.least_after

    def inside(self, deltas: Int64s, low: int, high: int) -> np.ndarray:
        """bool `[B, L]`, the frame exists; a new array. The deltas are from `low` to `high`."""
        inside = np.ones((len(self.anchor), len(deltas)), bool)
        if self.reaches_outside(low, high):
            cut = np.flatnonzero((-self.anchor > low) | (self.after <= high))
            inside[cut] = (deltas >= -self.anchor[cut, None]) & (deltas < self.after[cut, None])
        return inside

    def is_final(self, deltas: Int64s) -> np.ndarray:
        """bool `[B, L]`, the frame is the one after the last."""
        return deltas == self.after[:, None]


def _view(
    fields: Sequence[WindowField], plan: WindowPlan, layout: RowLayout, is_flat: bool
) -> Callable[[_Rows], torch.Tensor] | None:
    """Make a function that views gathered rows as raw fields that stand side by side; None where that cannot be.

    It gives `[B, L, D]` if flat, otherwise `[B, L, *shape]` of the first field. Slices, views and look-ups one after
    the other take 15 us a field, this 2; behind a gather, which leaves none of the interpreter in the processor's
    cache, all of that takes three times as long.
    """
    first = fields[0]
    if not first.column or not isinstance(first.rows, slice):
        return None
    name, row_bytes = first.column, layout.columns[first.column].row_bytes
    blank = torch.empty((1, row_bytes), dtype=torch.uint8, device="cpu")
    if (row := layout.joined_view([each.source for each in fields], blank)) is None:
        return None
    shape = tuple(row.shape[1:]) if is_flat else layout.stored[first.source].shape
    width, dtype = row_bytes // row.element_size(), row.dtype
    begin = first.rows.start * width + int(row.storage_offset())
    inner = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
    num_frames = len(plan.shapes[plan.columns[name]].deltas)
    strides = (num_frames * width, (first.rows.step or 1) * width, *inner)
    sizes = (len(first.deltas), *shape)

    def view(rows: _Rows) -> torch.Tensor:
        typed, offset = rows.typed(name, dtype)
        return typed.as_strided((rows.num_windows, *sizes), strides, offset + begin)

    return view
