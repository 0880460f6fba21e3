"""Plan the fields and frames of windows, and read batches of windows.

The plan is made once, when a dataset is opened. Each batch then needs a few table look-ups, and one
gather per kind of row. Most fields are views of the rows. Fields decoded by a codec are copies, and
so are next observations that contain a recorded final observation.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from storage.core.fields import unflatten
from storage.errors import (
    CorruptFileError,
    DataFileError,
    MissingFieldError,
    UsageError,
    nearest,
)

from ..blocks.block_header import DATA, FINAL, FINAL_OBSERVATION_ONLY
from ..blocks.row_layout import Allocate, FrameCut, FrameRows, Grid, RowLayout, joined, put
from ..blocks.trajectory_index import Int64s, LostBlockError
from ..sources.rows.row_source import RowSource
from .window_index import WindowShape

MASK = "mask"
NEXT_MASK = "next_mask"
#: Names of the boolean fields that are computed from the end of a trajectory instead of stored.
DONE, TIMEOUT = "done", "timeout"
FLAGS = (DONE, TIMEOUT)
#: Fields, or groups of components, that can have a recorded final observation.
OBSERVATIONS = ("observation", "privileged_observation")
NEXT = "next_"
#: Largest distance in frames between two frames of a window, or between two windows.
MAX_FRAMES = (1 << 31) - 1


@dataclass(frozen=True, eq=False)
class WindowField:
    """One tensor of a batch of windows.

    Attributes:
        name: Name in the batch, levels joined by "/".
        sources: The field that is read, or the components that are joined, in schema order.
        deltas: int64 `[L]`, frames relative to the anchor.
        rows: For each source, a slice or an int64 tensor `[L]`. It selects the frames of this field
            from the frames that are read per window. Empty for `done` and `timeout`.
        is_next: Whether the field is a next observation.
        is_joined: Whether the field consists of components joined along the last axis. This may be
            a single component.
    """

    name: str
    sources: tuple[str, ...]
    deltas: Int64s
    rows: tuple[Any, ...]
    is_next: bool
    is_joined: bool

    @cached_property
    def reach(self) -> tuple[int, int]:
        """Smallest and largest distance of a frame of this field from the anchor, in frames."""
        return int(self.deltas.min()), int(self.deltas.max())


@dataclass(frozen=True, eq=False)
class WindowPlan:
    """The fields of a batch of windows, and the frames to read for them.

    Attributes:
        fields: Recorded fields in schema order, then `done` and `timeout`, then next observations.
        shapes: The frames of a window to read, relative to its anchor. Columns from which the same
            frames are read share a shape.
        columns: Map from the name of each column that is read to the index of its shape.
    """

    fields: tuple[WindowField, ...]
    shapes: tuple[WindowShape, ...]
    columns: Mapping[str, int]

    @cached_property
    def columns_of(self) -> tuple[tuple[str, ...], ...]:
        """For each shape, the names of the columns from which its frames are read."""
        numbers = range(len(self.shapes))
        return tuple(
            tuple(name for name, shape in self.columns.items() if shape == number)
            for number in numbers
        )

    @property
    def reach(self) -> tuple[int, int]:
        """Smallest and largest distance of a frame from the anchor, without next observations."""
        ends = [field.reach for field in self.fields if not field.is_next]
        return min(low for low, _ in ends), max(high for _, high in ends)


def plan_windows(
    layout: RowLayout,
    length: int,
    delta: Mapping[str, Int64s] | None,
    fields: Sequence[str] | None,
    next_observations: bool,
    flatten_observations: bool = False,
) -> WindowPlan:
    """Choose the fields of a batch, and the frames and columns to read for them.

    The options are documented in `WindowDataset`.

    Raises:
        MissingFieldError: A name is not a field.
        UsageError: No field is selected; next observations are requested without an observation; or
            components to be joined have different frames.
    """
    known = [*layout.schema, *(flag for flag in FLAGS if flag not in layout.schema)]
    delta_lists = delta or {}
    for name in delta_lists:
        _fields_below("delta", name, known)
    chosen = (
        set(known)
        if fields is None
        else {field_name for name in fields for field_name in _fields_below("fields", name, known)}
    )
    names = [name for name in known if name in chosen]
    if not names:
        raise UsageError(f"fields is empty. Choose some of {', '.join(known)}.")
    wanted = [("", name, _deltas_of(name, delta_lists, length)) for name in names]
    if next_observations:
        nexts = [
            (NEXT, name, deltas + 1)
            for _, name, deltas in wanted
            if name.split("/")[0] in OBSERVATIONS
        ]
        if not nexts:
            raise UsageError(
                "next_observations requires an observation, and fields has only "
                f"{', '.join(names)}."
            )
        wanted += nexts
    shapes, columns = _shapes(layout, wanted)
    window_fields: dict[str, WindowField] = {}
    for prefix, source, deltas in wanted:
        group, *component = source.split("/")
        is_joined = flatten_observations and bool(component) and group in OBSERVATIONS
        name = prefix + (group if is_joined else source)
        rows: tuple[Any, ...] = ()
        if source in layout.schema:
            rows = (_select(deltas, shapes[columns[layout.column_of[source].name]].deltas),)
        first = window_fields.get(name)
        if first is None:
            window_fields[name] = WindowField(
                name, (source,), deltas, rows, bool(prefix), is_joined
            )
        elif np.array_equal(deltas, first.deltas):
            window_fields[name] = replace(
                first, sources=(*first.sources, source), rows=first.rows + rows
            )
        else:
            raise UsageError(
                f"flatten_observations requires equal deltas: {source!r} has {deltas.tolist()}, "
                f"and {first.sources[0]!r} has {first.deltas.tolist()}."
            )
    return WindowPlan(tuple(window_fields.values()), shapes, columns)


def _shapes(
    layout: RowLayout, wanted: Sequence[tuple[str, str, Int64s]]
) -> tuple[tuple[WindowShape, ...], dict[str, int]]:
    """Choose the columns to read for the fields of a batch, and the frames to read from each.

    Args:
        layout: Layout of the rows.
        wanted: For each field: prefix of its name in the batch, recorded field, and deltas.

    Returns:
        The attributes `shapes` and `columns` of a `WindowPlan`.
    """
    needed: dict[str, list[int]] = {}
    for _, source, deltas in wanted:
        if source in layout.schema:
            needed.setdefault(layout.column_of[source].name, []).extend(deltas.tolist())
    shapes: dict[bytes, WindowShape] = {}
    columns = {}
    for name, deltas_of_column in needed.items():
        shape = WindowShape.of(deltas_of_column, fills_gaps=not layout.columns[name].is_coded)
        shapes.setdefault(shape.deltas.tobytes(), shape)
        columns[name] = list(shapes).index(shape.deltas.tobytes())
    return tuple(shapes.values()), columns


def _select(deltas: Int64s, read: Int64s) -> slice | torch.Tensor:
    """Return the indices of `deltas` in the sorted array `read`, as a slice if possible."""
    places = np.searchsorted(read, deltas)
    steps = np.diff(places)
    if not len(steps):
        return slice(int(places[0]), int(places[0]) + 1)
    if (steps == steps[0]).all() and steps[0] > 0:
        return slice(int(places[0]), int(places[-1]) + 1, int(steps[0]))
    return torch.from_numpy(places.astype(np.int64))


def _fields_below(argument: str, name: str, known: Sequence[str]) -> list[str]:
    """Return the fields that a user's argument names: the field `name`, or all of a group `name`.

    Raises:
        MissingFieldError: There is no such field or group.
    """
    names = [
        candidate for candidate in known if candidate == name or candidate.startswith(f"{name}/")
    ]
    if not names:
        groups = {candidate.split("/")[0] for candidate in known}
        raise MissingFieldError(
            f"{argument} has the unknown field {name!r}. "
            f"The fields are {nearest(name, {*known, *groups})}."
        )
    return names


def _deltas_of(name: str, delta_lists: Mapping[str, Int64s], length: int) -> Int64s:
    """Return the frames of a field in a window, relative to the anchor.

    They are listed in `delta_lists` under the name of the field or of its nearest parent group.
    Without such a list they are `0 .. length - 1`.
    """
    parts = name.split("/")
    for size in range(len(parts), 0, -1):
        deltas = delta_lists.get("/".join(parts[:size]))
        if deltas is not None:
            return deltas
    return np.arange(length)


def checked_delta(delta: Mapping[str, Iterable[int]] | None) -> dict[str, Int64s] | None:
    """Check the argument `delta` and convert each of its lists to int64 `[L]`.

    Raises:
        UsageError: `delta` is not a mapping of fields to lists of integers, or a list is empty.
    """
    if delta is None:
        return None
    if not isinstance(delta, Mapping) or not all(isinstance(name, str) for name in delta):
        raise UsageError(
            f"delta must be a dict of fields and their lists of integers, got {delta!r}."
        )
    checked = {}
    for name, values in delta.items():
        try:
            listed = [operator.index(value) for value in values]
        except TypeError:
            raise UsageError(
                f"delta of field {name!r} must be a list of integers, got {values!r}."
            ) from None
        if not listed or max(map(abs, listed)) > MAX_FRAMES:
            raise UsageError(
                f"delta of field {name!r} must have at least one integer in "
                f"{-MAX_FRAMES}:{MAX_FRAMES + 1}, got {values!r}."
            )
        checked[name] = np.array(listed, np.int64)
    return checked


def damaged_frame(
    snapshot: RowSource, plan: WindowPlan, trajectory: int, anchor: int, length: int
) -> DataFileError | None:
    """Find the first damaged frame of a window, and return an error that names the frame.

    If the file was deleted, the error says so. If no frame is damaged, the result is None.
    """
    trajectories = np.array([trajectory])
    for column, number in plan.columns.items():
        frames = np.unique(np.clip(anchor + plan.shapes[number].deltas, 0, length - 1))
        for frame in frames.tolist():
            try:
                snapshot.column_rows(
                    column, trajectories, np.array([frame]), np.ones_like(trajectories)
                )
            except DataFileError as problem:
                return _named_damage(snapshot, column, (trajectory, frame), problem)
    return None


def _named_damage(
    snapshot: RowSource, column: str, at: tuple[int, int], problem: DataFileError
) -> DataFileError:
    trajectory, frame = at
    cause = problem.__cause__ if isinstance(problem, LostBlockError) else problem
    if not isinstance(cause, DataFileError):  # The file was deleted, so no frame is damaged.
        return problem
    episode = snapshot.name_of(trajectory)
    path = str(snapshot.file_of_row(column, trajectory, frame))
    named = CorruptFileError(
        f"frame {frame} of episode {episode!r} in {path!r} cannot be read: {cause.message} "
        'Pass on_error="skip" to skip windows with this frame.',
        kind=cause.kind,
        episode=cause.episode,
    )
    named.__cause__ = problem
    return named


class WindowReader:
    """Reads batches of windows from selected trajectories of a snapshot.

    Args:
        snapshot: Source of the rows.
        plan: Fields of a batch, and the frames to read for them.
        trajectories: int64 `[K]`, numbers of the selected trajectories in the snapshot.
        padding: "zero" replaces frames outside of a trajectory by zeros.
        mask_is_one: Whether a batch has one mask for all fields. Otherwise each field has a mask.
        contiguous: Whether every field is copied to its own contiguous memory.
    """

    def __init__(
        self,
        snapshot: RowSource,
        plan: WindowPlan,
        trajectories: Int64s,
        padding: str,
        mask_is_one: bool,
        contiguous: bool,
    ) -> None:
        self.snapshot = snapshot
        self.plan = plan
        self._trajectories = trajectories
        self._is_zero = padding == "zero"
        self._mask_is_one = mask_is_one
        self._contiguous = contiguous
        self._layout = snapshot.layouts[DATA]
        index = snapshot.index
        self._lengths = index.lengths[trajectories]
        self._is_timeout = index.is_timeout()[trajectories]
        final = index.final_row[trajectories] >= 0
        is_whole = (index.flags[trajectories] & FINAL_OBSERVATION_ONLY) == 0
        self._has_final = {OBSERVATIONS[0]: final, OBSERVATIONS[1]: final & is_whole}
        #: For each stored field: its parts, and whether they are joined. A part is a recorded field
        #: or component. It is described by a tuple: function that views it in the rows of a batch,
        #: number of frames per window, distances in rows between windows and between frames, first
        #: row, and indices of the frames to select from the view (None: all).
        self._cuts = {field.name: self._cut(field) for field in plan.fields if field.rows}
        self._final_cuts = {
            field.name: FrameCut(snapshot.layouts[FINAL], field.sources, field.is_joined)
            for field in plan.fields
            if field.is_next
        }
        #: Whether any trajectory has only one frame. If none has, flags are computed only for
        #: windows near the end of a trajectory.
        self._has_single_frames = bool((self._lengths == 1).any())

    def read(self, place: Int64s, anchor: Int64s, allocate: Allocate) -> dict[str, Any]:
        """Read a batch of B windows.

        Args:
            place: int64 `[B]`, trajectory of each window, as an index into `trajectories`.
            anchor: int64 `[B]`, anchor of each window.
            allocate: Function that returns a new tensor of a shape and a dtype.

        Returns:
            A nested dict of `[B, L, *shape]` tensors and masks.
        """
        at = _Places(place, anchor, self._lengths[place])
        rows = FrameRows(self._gather(at, allocate))
        flat: dict[str, torch.Tensor] = {}
        masks: dict[str, torch.Tensor] = {}
        next_masks: dict[str, torch.Tensor] = {}
        for field in self.plan.fields:
            values = (
                self._values(field, rows, len(place), allocate)
                if field.rows
                else self._flag(field, at)
            )
            if field.is_next:
                values = self._with_finals(field, values, at, allocate)
                next_masks[field.name.removeprefix(NEXT)] = self._mask(field, at)
            elif not self._mask_is_one or not masks:
                masks[field.name] = self._mask(field, at)
            flat[field.name] = values.contiguous() if self._contiguous else values
        batch = {
            **unflatten(flat),
            MASK: next(iter(masks.values())) if self._mask_is_one else unflatten(masks),
        }
        return {**batch, NEXT_MASK: unflatten(next_masks)} if next_masks else batch

    def _gather(self, at: _Places, allocate: Allocate) -> dict[str, torch.Tensor]:
        """Read the rows of a batch of B windows from the files.

        Returns:
            Map from column to int32 tensor `[B * W, row_bytes / 4]`, with W frames per window.
        """
        memory: dict[str, torch.Tensor] = {}
        for number, shape in enumerate(self.plan.shapes):
            out: dict[str, torch.Tensor] = {}
            for name in self.plan.columns_of[number]:
                num_words = self._layout.columns[name].row_bytes // 4
                out[name] = allocate((len(at.anchor) * len(shape.deltas), num_words), torch.int32)
            memory |= out
            if not len(at.anchor):
                continue
            rows = shape.rows(self._trajectories[at.place], at.anchor)
            reaches_outside = at.reaches_outside(*shape.reach)
            if reaches_outside:
                rows = shape.cut(rows, at.length)
            self.snapshot.read_rows(rows, shape.unit, out)
            if self._is_zero and reaches_outside:
                is_outside = ~at.inside(shape.deltas, *shape.reach).ravel()
                for values in out.values():
                    values.numpy()[is_outside] = 0
        return memory

    def _cut(self, field: WindowField) -> tuple[list[Any], bool]:
        cut = FrameCut(self._layout, field.sources, field.is_joined)
        parts = []
        for part, chosen in zip(cut.parts or [cut], field.rows, strict=False):
            width = len(self.plan.shapes[self.plan.columns[part.column]].deltas)
            if isinstance(chosen, slice):
                parts.append(
                    (part, len(field.deltas), (width, chosen.step or 1), chosen.start, None)
                )
            else:
                parts.append((part, width, (width, 1), 0, chosen))
        return parts, bool(cut.parts)

    def _values(
        self, field: WindowField, rows: FrameRows, num_windows: int, allocate: Allocate
    ) -> torch.Tensor:
        """Return the values of a stored field, `[B, L, *shape]`, from the rows that were read."""
        pieces = []
        parts, is_joined = self._cuts[field.name]
        for part, length, steps, first, chosen in parts:
            values = part(rows, Grid((num_windows, length), steps, first))
            pieces.append(values if chosen is None else values.index_select(1, chosen))
        return joined(pieces, 2, allocate) if is_joined else pieces[0]

    def _with_finals(
        self, field: WindowField, values: torch.Tensor, at: _Places, allocate: Allocate
    ) -> torch.Tensor:
        """Insert recorded final observations into next observations after the end of a trajectory.

        If the batch needs none, return `values` unchanged. Otherwise return a changed copy.
        """
        if at.least_after > field.reach[1]:
            return values
        window, step = np.nonzero(self._is_final(field, at))
        if not len(window):
            return values
        which, place = np.unique(self._trajectories[at.place[window]], return_inverse=True)
        columns = {self.snapshot.layouts[FINAL].column_of[source].name for source in field.sources}
        rows = FrameRows({column: self.snapshot.final_rows(column, which) for column in columns})
        finals = self._final_cuts[field.name](rows, Grid((len(which),), (1,)))
        own = allocate(values.shape, values.dtype).copy_(values)
        put(
            own,
            (torch.from_numpy(window), torch.from_numpy(step)),
            finals[torch.from_numpy(place.reshape(-1))],
        )
        return own

    def _is_final(self, field: WindowField, at: _Places) -> np.ndarray:
        """Return whether each next observation is a recorded final observation, bool `[B, L]`."""
        has_final: np.ndarray = self._has_final[field.sources[0].split("/")[0]][at.place]
        is_final: np.ndarray = (field.deltas == at.after[:, None]) & has_final[:, None]
        return is_final

    def _flag(self, field: WindowField, at: _Places) -> torch.Tensor:
        """Compute `done` or `timeout`, bool `[B, L]`, which are True only on last frames."""
        flag = np.zeros((len(at.anchor), len(field.deltas)), bool)
        last = field.reach[1] + 1
        if at.least_after <= last or self._has_single_frames:
            near = np.flatnonzero((at.after <= last) | (at.length == 1))
            after = at.after[near, None] - 1
            # Frames outside of the trajectory are zeros, or copies of the nearest frame, which have
            # the flags of this frame.
            is_last = (
                field.deltas == after
                if self._is_zero
                else (field.deltas >= after) | (at.length[near, None] == 1)
            )
            flag[near] = (
                is_last if field.name == DONE else is_last & self._is_timeout[at.place[near], None]
            )
        return torch.from_numpy(flag)

    def _mask(self, field: WindowField, at: _Places) -> torch.Tensor:
        """Return whether each frame or next observation was recorded, bool `[B, L]`."""
        inside = at.inside(field.deltas, *field.reach)
        return torch.from_numpy(inside | self._is_final(field, at) if field.is_next else inside)


class _Places:
    """Where the B windows of a batch are: trajectories and anchors, int64 `[B]` each.

    Attributes:
        place: Index of the trajectory among the selected trajectories.
        anchor: Anchor frame.
        length: Number of frames of the trajectory.
        after: Distance from the anchor to the first frame after the trajectory.
        least_after: The smallest `after` of the batch, an int.
    """

    def __init__(self, place: Int64s, anchor: Int64s, length: Int64s) -> None:
        self.place = place
        self.anchor = anchor
        self.length = length
        self.after = length - anchor
        self.least_after = int(self.after.min(initial=MAX_FRAMES))

    def reaches_outside(self, low: int, high: int) -> bool:
        """Return whether a frame from `anchor + low` to `anchor + high` is outside a trajectory."""
        return high >= self.least_after or (
            low < 0 and low < -int(self.anchor.min(initial=MAX_FRAMES))
        )

    def inside(self, deltas: Int64s, low: int, high: int) -> np.ndarray:
        """Return whether the frames `anchor + deltas` are inside their trajectories, bool `[B, L]`.

        The result is a new array. `low` and `high` are the smallest and the largest of `deltas`.
        """
        inside = np.ones((len(self.anchor), len(deltas)), bool)
        if self.reaches_outside(low, high):
            cut = np.flatnonzero((-self.anchor > low) | (self.after <= high))
            inside[cut] = (deltas >= -self.anchor[cut, None]) & (deltas < self.after[cut, None])
        return inside
