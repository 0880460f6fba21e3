"""`BatchReader`: gathers the rows of a plan as a `Transition`. `ReadAhead`: prefetches later rows.

One gather per column copies the rows of a batch, time first. The fields of the batch are views of
these rows, with two exceptions. Coded components are decoded into new memory. Next observations are
copied if the batch has a recorded final observation. `ReadAhead` advises the kernel while probed
pages are not in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from storage.core.fields import map_leaves, unflatten
from storage.core.memory import BufferPool, sent, sent_together
from storage.errors import SchemaError, UsageError

from ..blocks.annotation_table import TASK
from ..blocks.annotations import Notes
from ..blocks.block_header import DATA, FINAL, FINAL_OBSERVATION_ONLY
from ..blocks.row_layout import FrameRows, Grid, RowLayout, leaves_of, put
from ..blocks.trajectory_index import Int64s, TrajectoryIndex, counted_from
from ..sources.rows.row_source import Rows, RowSource
from .step_planner import Bools, Ends, PassOrder, Pieces, Plan, PlanPart, StreamState, plan_steps
from .transition import Transition

OBSERVATION = "observation"
PRIVILEGED = "privileged_observation"
#: Fields with an attribute of `Transition`. All other fields are extras.
_NAMED = (OBSERVATION, PRIVILEGED, "action", "reward")
#: Flags of a batch. `end_unknown` exists only if the ends of some trajectories may be unknown.
_FLAGS = ("done", "timeout", "is_first", "valid", "is_last", "end_unknown")
#: Number of rows that are probed to find out whether the files are in the page cache.
_NUM_SAMPLES = 16
#: Number of batches until the next probe, by whether the files are in the page cache.
_BATCHES_BETWEEN_PROBES = {True: 64, False: 16}


@dataclass(frozen=True)
class BatchOptions:
    """Options of `RolloutDataset` for the form of batches.

    Attributes:
        notes: Reader of the tasks of episodes; None without the option `texts`. The other options
            are documented in `RolloutDataset`.
    """

    device: torch.device
    flatten_observations: bool = True
    mark_first_frame: bool = True
    contiguous: bool = False
    notes: Notes | None = None


class BatchReader:
    """Reads plans as batches, in reused memory."""

    def __init__(self, options: BatchOptions) -> None:
        self.options = options
        # A batch needs up to a dozen buffers (with `contiguous`), so 24 are enough for two batches.
        self._pool = BufferPool(24)
        self._layouts: Mapping[str, RowLayout] | None = None

    def _use_layouts(self, layouts: Mapping[str, RowLayout]) -> None:
        """Compute the offsets of the fields in rows of these layouts, if the layouts have changed."""
        if layouts is self._layouts:
            return
        joins = self.options.flatten_observations
        self._layouts = layouts
        self._cuts = leaves_of(layouts[DATA], (OBSERVATION, PRIVILEGED), joins)
        self._final_cuts = leaves_of(layouts[FINAL], (OBSERVATION, PRIVILEGED), joins)

    def read(self, plan: Plan, stream_id: int = 0, without_time: bool = False) -> Transition:
        """Read the batch of a plan, `[T, N, ...]`.

        Args:
            plan: The plan.
            stream_id: Value of the field `stream_id`.
            without_time: Whether the batch has no axis of time, `[N, ...]`. The plan must have one
                step.
        """
        assert plan.parts, "a plan covers its envs"
        self._use_layouts(plan.parts[0].pass_order.source.layouts)
        flags = _flags(plan, self.options.mark_first_frame)
        rows = self._gather(plan, flags[_FLAGS.index("valid")])
        # Distances in rows between steps and between envs. Rows are time first. But with a single
        # step, the two rows of an env (observation and next observation) are adjacent.
        steps = (len(plan.num_valid), 1) if plan.num_steps > 1 else (1, 2)
        grid = (
            Grid((len(plan.num_valid),), steps[1:])
            if without_time
            else Grid(flags.shape[1:], steps)
        )
        following = grid._replace(first=steps[0])
        own = {name: cut(rows, grid) for name, cut in self._cuts.items()}
        if self.options.notes is not None:
            tasks = (
                _tasks(plan, self.options.notes)[..., 0]
                if without_time
                else _tasks(plan, self.options.notes).T
            )
            own.setdefault(
                TASK, sent(torch.from_numpy(np.ascontiguousarray(tasks)), self.options.device)
            )
        nexts = {name: self._cuts[name](rows, following) for name in self._final_cuts}
        has_own: set[str] = set()
        for part in plan.parts:
            self._write_final_observations(part, nexts, has_own, without_time)
        tensors = sent(
            torch.from_numpy(flags[:, 0] if without_time else flags), self.options.device
        ).unbind()
        batch = _transition(own, nexts, tensors, stream_id)
        return map_batch(self._contiguous_copy, batch) if self.options.contiguous else batch

    def _gather(self, plan: Plan, valid: Bools) -> FrameRows:
        """Read the rows of a plan and send them to the device of the batches.

        Rows of unreadable trajectories are zeros, and their flags in `valid` are set to False.
        """
        snapshot: RowSource = plan.parts[0].pass_order.source
        num_envs = len(plan.num_valid)
        length = plan.num_steps + 1
        parts: list[tuple[RowSource, Rows]] = []
        num_lost = 0
        for source, pieces in ((part.pass_order.source, part.pieces) for part in plan.parts):
            lost = pieces.trajectory >= len(source.index)
            lost[~lost] = source.is_lost[pieces.trajectory[~lost]]
            if lost.any():
                for env, time, _, _, count in zip(
                    *(column[lost] for column in pieces), strict=True
                ):
                    valid[time : time + count, env] = False
                num_lost += 1
                pieces = Pieces(*(column[~lost] for column in pieces))
            target = pieces.env * length + pieces.time
            parts.append((source, Rows(pieces.trajectory, pieces.frame, pieces.num_frames, target)))
        covers = len(parts) == 1 and not num_lost
        memory: dict[str, torch.Tensor] = {}
        windows: dict[str, torch.Tensor] = {}
        for name, column in snapshot.layouts[DATA].columns.items():
            memory[name] = self._allocate(num_envs * length, column.row_bytes // 4, snapshot.device)
            if num_lost:
                memory[name].zero_()
            if plan.num_steps == 1:
                windows[name] = memory[name].view(num_envs, length, -1)
            else:
                windows[name] = memory[name].view(length, num_envs, -1).transpose(0, 1)
        for source, rows in parts:
            if len(rows.target):
                source.read_rows(rows, length if covers else 0, windows)
        return FrameRows(
            {name: rows.to(self.options.device, non_blocking=True) for name, rows in memory.items()}
        )

    def _allocate(self, num_rows: int, num_words: int, device: torch.device) -> torch.Tensor:
        if device.type == "cpu" and self.options.device.type != "cuda":
            return self._pool.empty((num_rows, num_words), torch.int32)
        return torch.empty(
            (num_rows, num_words), dtype=torch.int32, device=device, pin_memory=device.type == "cpu"
        )

    def _write_final_observations(
        self, part: PlanPart, nexts: dict[str, Any], has_own: set[str], without_time: bool
    ) -> None:
        """Insert recorded final observations into next observations where trajectories end.

        Args:
            part: Part of the plan, with the ends.
            nexts: Next observations by field name. A field is replaced by a copy before its first
                change, since it shares memory with the observations.
            has_own: Names of the fields that were replaced. New names are added.
            without_time: Whether the tensors have no axis of time.
        """
        snapshot: RowSource = part.pass_order.source
        index = snapshot.index
        ends = _without_missing(part.ends, part)
        if not len(ends.trajectory):
            return
        which = (
            (index.final_row[ends.trajectory] >= 0) & ~snapshot.is_lost[ends.trajectory]
        ).nonzero()[0]
        if not len(which):
            return
        trajectory = ends.trajectory[which]
        device = self.options.device
        columns = list(snapshot.layouts[FINAL].columns)
        # Without a recorded final privileged observation, the next frame of the stream is kept.
        has_privileged = (index.flags[trajectory] & FINAL_OBSERVATION_ONLY) == 0
        privileged = has_privileged.nonzero()[0]
        places = [ends.time[which], ends.env[which]][without_time:]
        on_host = [*places, privileged, *(place[privileged] for place in places)]
        finals = [snapshot.final_rows(name, trajectory) for name in columns]
        there = sent_together([*finals, *map(torch.from_numpy, on_host)], device)
        rows = FrameRows(dict(zip(columns, there, strict=False)))
        at, (chosen, *at_privileged) = (
            there[len(columns) :][: len(places)],
            there[len(columns) + len(places) :],
        )
        for name, cut in self._final_cuts.items():
            if name not in has_own:
                nexts[name] = self._copied(nexts[name])
                has_own.add(name)
            values = cut(rows, Grid((len(which),), (1,)))
            if name.split("/")[0] == PRIVILEGED and not has_privileged.all():
                put(nexts[name], tuple(at_privileged), values[chosen])
            else:
                put(nexts[name], tuple(at), values)

    def _copied(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type != "cpu":
            return tensor.clone(memory_format=torch.contiguous_format)
        return self._pool.empty(tensor.shape, tensor.dtype).copy_(tensor)

    def _contiguous_copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor if it is contiguous and fills its memory, otherwise a contiguous copy."""
        is_own = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
        return tensor if is_own else self._copied(tensor)

    def empty(self, snapshot: RowSource, num_steps: int | None, num_envs: int) -> Transition:
        """Create a batch of zeros, `[num_steps, num_envs, ...]`, whose fields share no memory.

        If `num_steps` is None, the batch has no axis of time.
        """
        self._use_layouts(snapshot.layouts)
        sizes = (num_envs,) if num_steps is None else (num_steps, num_envs)
        rows = FrameRows({
            name: torch.zeros((1, column.row_bytes // 4), dtype=torch.int32, device=self.options.device)
            for name, column in snapshot.layouts[DATA].columns.items()
        })  # fmt: skip
        own = {name: cut(rows, Grid(sizes, (0,) * len(sizes))) for name, cut in self._cuts.items()}
        if self.options.notes is not None:
            own.setdefault(TASK, torch.zeros(sizes, dtype=torch.int64, device=self.options.device))
        flags = torch.zeros(
            (len(_FLAGS) - (not snapshot.index.has_unknown_ends), *sizes),
            dtype=torch.bool,
            device=self.options.device,
        )
        return map_batch(
            self._copied, _transition(own, {name: own[name] for name in self._final_cuts}, flags)
        )

    def frames_at(
        self, pass_order: PassOrder, trajectory: Int64s, position: np.ndarray, linear: bool
    ) -> Transition:
        """Read one frame from each of K trajectories, as a batch `[K, ...]`.

        Args:
            pass_order: Pass with the trajectory numbers.
            trajectory: int64 `[K]`, number of each trajectory.
            position: float64 `[K]`, frame numbers, which may lie between two frames.
            linear: Whether floating-point fields are interpolated between the two neighbouring
                frames. Otherwise, and for other fields, the nearest frame is read.
        """
        nearest = self._single(pass_order, trajectory, np.floor(position + 0.5))
        if not linear:
            return nearest
        lower = np.floor(position)
        below, above = (self._single(pass_order, trajectory, frame) for frame in (lower, lower + 1))
        weight = sent(torch.from_numpy(position - lower), self.options.device)
        return Transition(
            *(_mix(*values, weight) for values in zip(below, above, nearest, strict=True))
        )

    def _single(self, pass_order: PassOrder, trajectory: Int64s, frame: np.ndarray) -> Transition:
        at = np.minimum(frame.astype(np.int64), pass_order.lengths[trajectory] - 1)
        none = np.zeros(0, np.int64)
        state = StreamState(
            trajectory, pass_order.lengths[trajectory] - at, at == 0, np.zeros(len(at), bool)
        )
        # No further trajectory is assigned in this pass, so exactly the frames `at` are read.
        only = PassOrder(pass_order.lengths, none, none, pass_order.number, pass_order.source)
        return self.read(plan_steps(state, only, 1, lambda *_: None)[0], without_time=True)


_PiecesOrEnds = TypeVar("_PiecesOrEnds", Pieces, Ends)


def _without_missing(rows: _PiecesOrEnds, part: PlanPart) -> _PiecesOrEnds:
    """Return the pieces or ends in `rows` whose trajectory is not missing.

    `PassScheduler.missing` describes missing trajectories.
    """
    is_listed = rows.trajectory < len(part.pass_order.source.index)
    return rows if is_listed.all() else type(rows)(*(column[is_listed] for column in rows))


def _flags(plan: Plan, mark_first_frame: bool) -> Bools:
    """Compute the flags of a plan in the order of `_FLAGS`: bool `[num_flags, T, N]`."""
    has_unknown = any(part.pass_order.source.index.has_unknown_ends for part in plan.parts)
    flags = np.zeros((len(_FLAGS) - (not has_unknown), plan.num_steps, len(plan.num_valid)), bool)
    done, timeout, is_first, valid, is_last = flags[:5]
    for part in plan.parts:
        env, time, _ = part.ends
        if len(env):
            # The end of a missing trajectory is unknown. It stays marked as a timeout, like that of
            # a trajectory whose recording was cut.
            done[time, env] = is_last[time, env] = timeout[time, env] = True
            env, time, trajectory = _without_missing(part.ends, part)
            index = part.pass_order.source.index
            timeout[time, env] = index.is_timeout(trajectory)
            if has_unknown:
                flags[5, time, env] = index.is_end_unknown(trajectory)
    if len(plan.first_env):
        is_first[plan.first_time, plan.first_env] = True
        done[plan.first_time, plan.first_env] |= mark_first_frame
    np.less(np.arange(plan.num_steps)[:, None], plan.num_valid, out=valid)
    return flags


def _tasks(plan: Plan, notes: Notes) -> np.ndarray:
    """Return the `text_id` of the task of each transition, int64 `[N, T]`; 0 without a task."""
    num_envs = len(plan.num_valid)
    length = plan.num_steps + 1
    tasks = np.zeros(num_envs * length, np.int64)
    for part in plan.parts:
        env, time, trajectory, _, count = _without_missing(part.pieces, part)
        tasks[counted_from(env * length + time, count)] = notes.tasks(part.pass_order.source)[
            trajectory
        ].repeat(count)
    return tasks.reshape(num_envs, length)[:, :-1]


def _transition(
    own: Mapping[str, Any], nexts: Mapping[str, Any], flags: Iterable[Any], stream_id: int = 0
) -> Any:
    tree = unflatten(own)
    following = unflatten(nexts)
    named: dict[str, Any] = {name: tree.pop(name, None) for name in _NAMED}
    named |= {f"next_{name}": following.get(name) for name in (OBSERVATION, PRIVILEGED)}
    named |= zip(_FLAGS, flags, strict=False)
    return Transition(**named, stream_id=stream_id, extras=tree or None)


def map_batch(function: Any, batch: Transition) -> Transition:
    """Apply `function` to every tensor of a batch."""
    values: Any = (
        value if value is None or isinstance(value, int) else map_leaves(function, value)
        for value in batch
    )
    return Transition(*values)


def write_into(buffer: Transition, batch: Transition, rows: torch.Tensor | None) -> None:
    """Copy every tensor of `batch` into the tensor of `buffer` with the same name.

    `rows` are the rows of the buffer to write; None: all rows.
    """
    if not isinstance(buffer, Transition):
        raise UsageError(
            f"buffer must be a Transition, got {type(buffer).__name__}. "
            "Pass the result of get_buffer()."
        )
    for name, target, source in zip(Transition._fields, buffer, batch, strict=True):
        if isinstance(source, (torch.Tensor, Mapping)):
            _write(name, target, source, rows)


def _write(name: str, target: Any, source: Any, rows: torch.Tensor | None) -> None:
    if isinstance(source, Mapping):
        for key, value in source.items():
            if target is not None and key not in target:
                raise SchemaError(
                    f"buffer has no field '{name}/{key}'. Pass the result of get_buffer()."
                )
            _write(f"{name}/{key}", None if target is None else target[key], value, rows)
        return
    if target is None:
        return
    shape = target.shape if rows is None else (len(rows), *target.shape[1:])
    if tuple(shape) != tuple(source.shape):
        raise SchemaError(
            f"field {name!r} of the buffer has shape {tuple(shape)}, "
            f"expected {tuple(source.shape)}."
        )
    if rows is None:
        target.copy_(source)
    else:
        target[sent(rows, target.device)] = source.to(target.device, target.dtype)


def _mix(below: Any, above: Any, nearest: Any, weight: torch.Tensor) -> Any:
    if isinstance(below, Mapping):
        return {key: _mix(value, above[key], nearest[key], weight) for key, value in below.items()}
    if not isinstance(below, torch.Tensor) or not below.dtype.is_floating_point:
        return nearest
    share = weight.to(below.dtype).view(-1, *[1] * (below.dim() - 1))
    return torch.lerp(below, above, share.expand_as(below))


class ReadAhead:
    """Prefetches the rows that a stream reads next, from disk or over a network."""

    def __init__(self, num_envs: int) -> None:
        self._index: TrajectoryIndex | None = None
        #: Range of frames that was prefetched last for each env, int64 `[N]`. Frames are numbered
        #: through all trajectories.
        self._begin = np.zeros(num_envs, np.int64)
        self._end = np.zeros(num_envs, np.int64)
        self._num_batches = 0
        self._is_warm = True

    def before(self, plan: Plan) -> None:
        """Prefetch the frames of a plan and the frames that follow, before the plan is read.

        Frames that were prefetched before are left out.
        """
        for part in plan.parts:
            source = part.pass_order.source
            self._probe(source)
            if not self._is_warm:
                self._prefetch(source, _without_missing(part.pieces, part))

    def _probe(self, source: RowSource) -> None:
        """Check every few batches whether the files are in the page cache."""
        if source.index is not self._index:
            self._index = source.index
            self._end[:] = 0
            self._num_batches = 0
        if self._num_batches % _BATCHES_BETWEEN_PROBES[self._is_warm] == 0 and len(source.index):
            frames = np.linspace(0, source.index.num_frames - 1, _NUM_SAMPLES).astype(np.int64)
            # Frames are numbered through all trajectories, so these are frames of trajectory 0 that
            # reach beyond its end into the others.
            rows = Rows(np.zeros_like(frames), frames, np.ones_like(frames), np.arange(len(frames)))
            self._is_warm = source.is_resident(rows)
        self._num_batches += 1

    def _prefetch(self, source: RowSource, pieces: Pieces) -> None:
        index = source.index
        is_there = ~source.is_lost[pieces.trajectory]
        if index.num_present < len(index.blocks):
            is_there &= (
                index.fragment_block[index.first_fragment[pieces.trajectory]] < index.num_present
            )
        pieces = Pieces(*(column[is_there] for column in pieces))
        env, _, trajectory, frame, count = pieces
        start = index.first_frame[trajectory] + frame
        stop = index.first_frame[trajectory + 1]
        needed = np.minimum(start + 2 * count, stop)
        is_due = (start < self._begin[env]) | (needed > self._end[env])
        if not is_due.any():
            return
        # Envs that are due soon are included. Otherwise nearly every batch of single frames would
        # have an env that is due.
        num_frames = source.stretch_bytes(len(self._end)) // source.layouts[DATA].frame_bytes
        is_due_soon = np.minimum(needed + num_frames // 4, stop) > self._end[env]
        due = np.flatnonzero(is_due | is_due_soon)
        stretch = np.maximum(num_frames, 2 * count[due])
        # Skip the frames that were prefetched before.
        continues = (start[due] >= self._begin[env[due]]) & (start[due] < self._end[env[due]])
        first = np.where(continues, self._end[env[due]], start[due])
        last = np.minimum(start[due] + stretch, stop[due])
        is_wanted = last > first
        due = due[is_wanted]
        first = first[is_wanted]
        last = last[is_wanted]
        self._begin[env[due]] = start[due]
        self._end[env[due]] = last
        frame_within = first - index.first_frame[trajectory[due]]
        source.prefetch(
            Rows(trajectory[due], frame_within, last - first, np.arange(len(due)) * (1 << 32))
        )
