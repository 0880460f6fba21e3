"""Batches of windows: gather what a plan says, and view it as nested fields.

One rule: one gather for each kind of row moves the bytes; fields are views of the rows, except those that a
codec makes and next observations into which a true last one was put.
"""

from __future__ import annotations

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
        self._cuts = {
            field.name: Cut(self._layout, field.sources, field.is_joined) for field in plan.fields if field.rows
        }
        self._final_cuts = {
            field.name: Cut(store.layouts[FINAL], field.sources, field.is_joined)
            for field in plan.fields
            if field.is_next
        }
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
        rows = Rows(self._gather(at, allocate))
        flat: dict[str, torch.Tensor] = {}
        masks: dict[str, torch.Tensor] = {}
        next_masks: dict[str, torch.Tensor] = {}
        for field in self.plan.fields:
            values = self._values(field, rows, len(place), allocate) if field.rows else self._flag(field, at)
            if field.is_next:
                values = self._with_finals(field, values, at, allocate)
                next_masks[field.name.removeprefix(NEXT)] = self._mask(field, at)
            elif not self._mask_is_one or not masks:
                masks[field.name] = self._mask(field, at)
            flat[field.name] = values.contiguous() if self._contiguous else values
        batch = {**unflatten(flat), MASK: next(iter(masks.values())) if self._mask_is_one else unflatten(masks)}
        return {**batch, NEXT_MASK: unflatten(next_masks)} if next_masks else batch

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

    def _values(self, field: WindowField, rows: Rows, num_windows: int, allocate: Allocate) -> torch.Tensor:
        """Give a field that is stored as `[B, L, *shape]`."""
        cut = self._cuts[field.name]
        parts = []
        for part, chosen in zip(cut.parts or [cut], field.rows, strict=False):
            width = len(self.plan.shapes[self.plan.columns[part.column]].deltas)
            if isinstance(chosen, slice):
                grid = Grid((num_windows, len(field.deltas)), (width, chosen.step or 1), chosen.start)
                parts.append(part(rows, grid))
            else:
                parts.append(part(rows, Grid((num_windows, width), (width, 1))).index_select(1, chosen))
        return joined(parts, 2, allocate) if cut.parts else parts[0]

    def _with_finals(self, field: WindowField, values: torch.Tensor, at: _Places, allocate: Allocate) -> torch.Tensor:
        """Put true last observations among next ones, which then get memory of their own."""
        if at.least_after > field.reach[1]:
            return values
        window, step = np.nonzero(self._is_final(field, at))
        if not len(window):
            return values
        which, place = np.unique(self._trajectories[at.place[window]], return_inverse=True)
        columns = {self.store.layouts[FINAL].column_of[source].name for source in field.sources}
        rows = Rows({column: self.store.finals(column, which) for column in columns})
        finals = self._final_cuts[field.name](rows, Grid((len(which),), (1,)))
        own = allocate(values.shape, values.dtype).copy_(values)
        put(own, (torch.from_numpy(window), torch.from_numpy(step)), finals[torch.from_numpy(place.reshape(-1))])
        return own

    def _is_final(self, field: WindowField, at: _Places) -> np.ndarray:
        """bool `[B, L]`, the row is a true last observation that was recorded."""
        has_final: np.ndarray = self._has_final[field.sources[0].split("/")[0]][at.place]
        found: np.ndarray = (field.deltas == at.after[:, None]) & has_final[:, None]
        return found

    def _flag(self, field: WindowField, at: _Places) -> torch.Tensor:
        """`done` or `timeout`: bool `[B, L]`, True on a trajectory's last frame."""
        flag, last = np.zeros((len(at.anchor), len(field.deltas)), bool), field.reach[1] + 1
        if at.least_after <= last or self._has_single_frames:
            near = np.flatnonzero((at.after <= last) | (at.length == 1))
            after = at.after[near, None] - 1
            # The nearest frame stands for one outside, unless zeros do.
            is_last = field.deltas == after if self._is_zero else (field.deltas >= after) | (at.length[near, None] == 1)
            flag[near] = is_last if field.name == DONE else is_last & self._is_timeout[at.place[near], None]
        return torch.from_numpy(flag)

    def _mask(self, field: WindowField, at: _Places) -> torch.Tensor:
        """bool `[B, L]`, the frame exists, or a true last observation does."""
        inside = at.inside(field.deltas, *field.reach)
        return torch.from_numpy(inside | self._is_final(field, at) if field.is_next else inside)


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
