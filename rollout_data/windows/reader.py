"""Batches of windows: gather what a plan says, and view it as nested fields.

One rule: one gather for each kind of row moves the bytes; fields are views of the rows, except those that a
codec makes and next observations into which a true last one was put.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from storage.core.tree import unflatten

from ..format.header import DATA, FINAL, FINAL_OBSERVATION_ONLY
from ..format.schema import joined
from ..frames.cut import Allocate, Cut, Grid, Rows, put
from ..frames.store import FrameStore
from ..index.index import Int64s
from .fields import DONE, MAX_FRAMES, NEXT, OBSERVATIONS, WindowField, WindowPlan

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
        name_of = {field.name: name for name, fields in plan.joins.items() for field in fields}
        #: Name in a batch -> the fields that are joined under it, or the one field.
        self._leaves: dict[str, list[WindowField]] = {}
        for field in plan.fields:
            self._leaves.setdefault(name_of.get(field.name, field.name), []).append(field)
        sources = {
            name: [field.source for field in fields] for name, fields in self._leaves.items() if fields[0].column
        }
        self._cuts = {name: Cut(self._layout, those, name in plan.joins) for name, those in sources.items()}
        nexts = [name for name, fields in self._leaves.items() if fields[0].is_next]
        self._final_cuts = {name: Cut(store.layouts[FINAL], sources[name], name in plan.joins) for name in nexts}
        own = [field for field in plan.fields if not field.is_next]
        #: Name in a mask -> a field that it is that of; joined components have the same.
        self._of_mask = {name_of.get(field.name, field.name): field for field in own}
        self._of_next_mask = {
            name_of.get(field.name, field.name).removeprefix(NEXT): field for field in plan.fields if field.is_next
        }
        self._reach = {field.name: (int(field.deltas.min()), int(field.deltas.max())) for field in plan.fields}
        #: Most batches have no frame of such a trajectory.
        self._has_single_frames = bool((self._lengths == 1).any())

    def read(self, place: Int64s, anchor: Int64s, allocate: Allocate) -> dict[str, Any]:
        """Read windows: a nested dict of `[B, L, *shape]` tensors, with masks.

        Args:
            place: int64 `[B]`, positions in `trajectories`.
            anchor: int64 `[B]`, frames within them.
            allocate: Gives the memory of the result.
        """
        at = _Places(place, anchor, self._lengths[place])
        rows, flat = Rows(self._gather(at, allocate)), {}
        for name, fields in self._leaves.items():
            if name not in self._cuts:
                flat[name] = self._flag(fields[0], at)
                continue
            values = self._leaf(self._cuts[name], fields, rows, at, allocate)
            values = self._next(name, values, at, allocate) if name in self._final_cuts else values
            flat[name] = values.contiguous() if self._contiguous else values
        return {**unflatten(flat), **self._masks(at)}

    def _gather(self, at: _Places, allocate: Allocate) -> dict[str, torch.Tensor]:
        """Column -> `[B * W, row_bytes / 4]` int32."""
        located = []
        for shape in self.plan.shapes if len(at.anchor) else ():
            pieces = shape.pieces(self._trajectories[at.place], at.anchor)
            outside = at.reaches_outside(*shape.reach)
            located.append(self.store.locate(*(shape.cut(pieces, at.length) if outside else pieces)))
        rows = {}
        for name, number in self.plan.columns.items():
            shape = self.plan.shapes[number]
            num_words = self._layout.columns[name].row_bytes // 4
            out = rows[name] = allocate((len(at.anchor) * len(shape.deltas), num_words), torch.int32)
            if located:
                self.store.copy((DATA, name), located[number], shape.unit, out)
            if self._is_zero and at.reaches_outside(*shape.reach):
                out.numpy()[~at.inside(shape.deltas, *shape.reach).ravel()] = 0
        return rows

    def _leaf(
        self, cut: Cut, fields: Sequence[WindowField], rows: Rows, at: _Places, allocate: Allocate
    ) -> torch.Tensor:
        """Give a field, or components joined, as `[B, L, *shape]`."""
        if cut.parts:
            parts = zip(cut.parts, fields, strict=True)
            return joined([self._leaf(part, [field], rows, at, allocate) for part, field in parts], 2, allocate)
        field, num = fields[0], len(at.anchor)
        width = len(self.plan.shapes[self.plan.columns[field.column]].deltas)
        if isinstance(field.rows, slice):
            grid = Grid((num, len(field.deltas)), (width, field.rows.step or 1), field.rows.start)
            return cut(rows, grid)
        return cut(rows, Grid((num, width), (width, 1))).index_select(1, field.rows)

    def _next(self, name: str, values: torch.Tensor, at: _Places, allocate: Allocate) -> torch.Tensor:
        """Put true last observations among next ones, which then get memory of their own."""
        fields = self._leaves[name]
        if at.least_after > self._reach[fields[0].name][1]:
            return values
        window, step = np.nonzero(self._has_final_at(fields[0], at))
        if not len(window):
            return values
        which, place = np.unique(self._trajectories[at.place[window]], return_inverse=True)
        cut = self._final_cuts[name]
        columns = {self.store.layouts[FINAL].column_of[field.source].name for field in fields}
        finals = cut(Rows({column: self.store.finals(column, which) for column in columns}), Grid((len(which),), (1,)))
        own = allocate(values.shape, values.dtype).copy_(values)
        put(own, (torch.from_numpy(window), torch.from_numpy(step)), finals[torch.from_numpy(place.reshape(-1))])
        return own

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

    def _has_final_at(self, field: WindowField, at: _Places) -> np.ndarray:
        """bool `[B, L]`, the row is a true last observation that was recorded."""
        has_final: np.ndarray = self._has_final[field.source.split("/")[0]][at.place]
        found: np.ndarray = (field.deltas == at.after[:, None]) & has_final[:, None]
        return found

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


class _Places:
    """Where windows stand, int64 `[B]` each: place of the trajectory, anchor, frames of the trajectory.

    `after` is the delta of the frame after the last one.
    """

    def __init__(self, place: Int64s, anchor: Int64s, length: Int64s) -> None:
        self.place, self.anchor, self.length, self.after = place, anchor, length, length - anchor
        self.least_after = int(self.after.min(initial=MAX_FRAMES))

    def reaches_outside(self, low: int, high: int) -> bool:
        """Whether any frame from delta `low` to `high` does not exist."""
        return high >= self.least_after or (low < 0 and low < -int(self.anchor.min(initial=MAX_FRAMES)))

    def inside(self, deltas: Int64s, low: int, high: int) -> np.ndarray:
        """bool `[B, L]`, the frame exists; a new array. The deltas are from `low` to `high`."""
        inside = np.ones((len(self.anchor), len(deltas)), bool)
        if self.reaches_outside(low, high):
            cut = np.flatnonzero((-self.anchor > low) | (self.after <= high))
            inside[cut] = (deltas >= -self.anchor[cut, None]) & (deltas < self.after[cut, None])
        return inside
