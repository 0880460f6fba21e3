"""Batches: carry out a plan, that is gather rows and view them as a `Transition`.

One rule: one gather per kind of row moves the bytes; everything after it is views, except coded
components (decoded into new memory) and true final observations (next observations then get
memory of their own, since the following row belongs to another trajectory).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from storage.core.buffer_pool import BufferPool
from storage.core.tree import map_leaves, unflatten

from ..format.header import DATA, FINAL, FINAL_OBSERVATION_ONLY
from ..format.schema import RowLayout, joined
from ..frames.store import FrameStore
from ..index.index import Runs
from ..transition import Transition
from .cursor import Bools, Int64s, Plan

#: Fields that have a place of their own in a `Transition`; all others are extras.
OBSERVATION, PRIVILEGED, ACTION, REWARD = "observation", "privileged_observation", "action", "reward"


_NOTHING = torch.empty(0, device="cpu")


@dataclass(frozen=True)
class BatchOptions:
    """How batches look.

    Attributes:
        device: Where they are delivered.
        flatten_observations: Join components along the last axis, rather than a dict of them.
        mark_first_frame: Mark the first frame delivered of a trajectory as done.
        contiguous: Copy every field into contiguous memory of its own, rather than views.
    """

    device: torch.device
    flatten_observations: bool = True
    mark_first_frame: bool = True
    contiguous: bool = False


@dataclass(eq=False)
class BatchReader:
    """Turns plans into batches; holds nothing but reusable memory."""

    options: BatchOptions
    pool: BufferPool = field(default_factory=BufferPool)

    def read(self, plan: Plan, envs: Int64s, stream_id: int = 0, without_time: bool = False) -> Transition:
        """Gather what a plan says for `envs` (ascending): a `Transition` of `[T, len(envs), ...]`.

        With `without_time` it gives the first step alone, `[len(envs), ...]`.
        """
        assert plan.parts, "a plan covers its envs"
        store: FrameStore = plan.parts[0].deal.source
        gathered = _Gathered(self, plan, envs, store)
        layout, steps = store.layouts[DATA], plan.num_steps
        flags = _flags(plan, envs, self.options.mark_first_frame)
        for lost in gathered.lost:
            for env, time, count in zip(_places(envs, lost.env, plan), lost.time, lost.num_frames, strict=True):
                flags["valid"][time : time + count, env] = False
        rows, following = gathered.rows, gathered.following()
        if without_time:
            rows = {name: part[:, 0] for name, part in rows.items()}
            following = {name: part[:, 0] for name, part in following.items()}
            flags = {name: flag[0] for name, flag in flags.items()}
        else:
            rows = {name: part[:, :steps].transpose(0, 1) for name, part in rows.items()}
            following = {name: part.transpose(0, 1) for name, part in following.items()}
        batch = view_rows(layout, rows, following, self.options.flatten_observations)
        tensors: dict[str, Any] = {name: torch.from_numpy(flag).to(self.options.device) for name, flag in flags.items()}
        batch = batch._replace(**tensors, stream_id=stream_id)
        return map_batch(lambda tensor: tensor.contiguous(), batch) if self.options.contiguous else batch


class _Gathered:
    """The rows of one plan: column -> `[N, T + 1, row_bytes]` uint8 on the target device."""

    def __init__(self, reader: BatchReader, plan: Plan, envs: Int64s, store: FrameStore) -> None:
        self.plan, self.envs, self.store, self.reader = plan, envs, store, reader
        self.length = plan.num_steps + 1
        self.device = reader.options.device
        is_lost = [part.deal.source.is_lost[part.pieces.trajectory] for part in plan.parts]
        #: Pieces of trajectories that cannot be read.
        self.lost = [_taken(part.pieces, lost) for part, lost in zip(plan.parts, is_lost, strict=True) if lost.any()]
        located = [self._locate(part.deal.source, part.pieces) for part in plan.parts]
        self.rows = {}
        for name, column in store.layouts[DATA].columns.items():
            out = self._allocate(len(envs) * self.length, column.row_bytes, store.device)
            is_whole = len(located) == 1 and not self.lost
            if self.lost:
                out.zero_()
            for part, runs in zip(plan.parts, located, strict=True):
                if len(runs.target):
                    part.deal.source.copy((DATA, name), runs, self.length if is_whole else 0, out)
            out = out.to(self.device, non_blocking=True)
            self.rows[name] = out.view(torch.uint8).view(len(envs), self.length, column.row_bytes)

    def _locate(self, store: FrameStore, pieces: Any) -> Runs:
        if self.lost:
            pieces = _taken(pieces, ~store.is_lost[pieces.trajectory])
        target = _places(self.envs, pieces.env, self.plan) * self.length + pieces.time
        order = target.argsort(kind="stable")
        return store.locate(pieces.trajectory[order], pieces.frame[order], pieces.num_frames[order], target[order])

    def _allocate(self, num_rows: int, row_bytes: int, device: torch.device) -> torch.Tensor:
        shape = (num_rows, row_bytes // 4)
        if device.type == "cpu" and self.device.type == "cuda":
            return torch.empty(shape, dtype=torch.int32, device="cpu", pin_memory=True)
        if device.type == "cpu":
            return self.reader.pool.empty(shape, torch.int32)
        return torch.empty(shape, dtype=torch.int32, device=device)

    def following(self) -> dict[str, torch.Tensor]:
        """The rows after each row, `[N, T, row_bytes]`, with true final observations put in."""
        ends = [(part, self._with_final(part)) for part in self.plan.parts]
        shifted = {name: rows[:, 1:] for name, rows in self.rows.items()}
        if not any(len(which) for _, which in ends):
            return shifted
        needed = {self.store.layouts[DATA].column_of[name].name for name in self.store.layouts[FINAL].schema}
        for name in needed:
            own = self._own(shifted[name])
            shifted[name] = own
        for part, which in ends:
            if len(which):
                self._put_finals(part, which, shifted)
        return shifted

    def _own(self, rows: torch.Tensor) -> torch.Tensor:
        """Copy `[N, T, row_bytes]` rows into memory of their own."""
        words = rows.view(torch.int32)
        if words.device.type == "cpu":
            return self.reader.pool.empty(words.shape, torch.int32).copy_(words).view(torch.uint8)
        return words.contiguous().view(torch.uint8)

    def _with_final(self, part: Any) -> Int64s:
        """Which ends of a part have a final observation that can be read."""
        store, trajectory = part.deal.source, part.ends.trajectory
        return ((store.index.final_row[trajectory] >= 0) & ~store.is_lost[trajectory]).nonzero()[0]

    def _put_finals(self, part: Any, which: Int64s, rows: dict[str, torch.Tensor]) -> None:
        store: FrameStore = part.deal.source
        env = torch.from_numpy(_places(self.envs, part.ends.env[which], self.plan)).to(self.device)
        time = torch.from_numpy(part.ends.time[which]).to(self.device)
        layout, final = store.layouts[DATA], store.layouts[FINAL]
        # Without a recorded privileged part, the next privileged observation is that of the stream.
        flags = store.index.flags[part.ends.trajectory[which]]
        is_whole = torch.from_numpy((flags & FINAL_OBSERVATION_ONLY) == 0).to(self.device)
        for name, column in final.columns.items():
            found = store.finals(name, part.ends.trajectory[which]).to(self.device)
            for each in column.offsets:
                target = _writable(layout.stored_view(each, rows[layout.column_of[each].name]))
                values = _writable(final.stored_view(each, found))
                if each.split("/")[0] == PRIVILEGED:
                    target[env[is_whole], time[is_whole]] = values[is_whole]
                else:
                    target[env, time] = values


def _taken(rows: Any, chosen: Bools) -> Any:
    return type(rows)(*(column[chosen] for column in rows))


def _places(envs: Int64s, chosen: Int64s, plan: Plan) -> Int64s:
    """Where some of `envs` (ascending) stand among them."""
    return chosen if len(envs) == len(plan.num_valid) else envs.searchsorted(chosen)


def _flags(plan: Plan, envs: Int64s, mark_first_frame: bool) -> dict[str, Bools]:
    """The flags of a plan by name, each bool `[T, len(envs)]`."""
    shape = (plan.num_steps, len(envs))
    is_last, timeout, is_first = np.zeros(shape, bool), np.zeros(shape, bool), np.zeros(shape, bool)
    for part in plan.parts:
        env = _places(envs, part.ends.env, plan)
        is_last[part.ends.time, env] = True
        timeout[part.ends.time, env] = part.deal.source.index.is_timeout(part.ends.trajectory)
    at = _places(envs, plan.first_env, plan)
    mine = (at < len(envs)) & (envs[np.minimum(at, len(envs) - 1)] == plan.first_env)
    is_first[plan.first_time[mine], at[mine]] = True
    done = is_last | is_first if mark_first_frame else is_last.copy()
    num_valid = plan.num_valid[envs]
    valid = np.ones(shape, bool)
    if len(num_valid) and int(num_valid.min()) < plan.num_steps:
        valid = np.arange(plan.num_steps)[:, None] < num_valid
    return {"done": done, "timeout": timeout, "is_first": is_first, "valid": valid, "is_last": is_last}


def view_rows(
    layout: RowLayout, rows: dict[str, torch.Tensor], following: dict[str, torch.Tensor], flatten: bool
) -> Transition:
    """View rows and the rows after them as a `Transition` without flags.

    Args:
        layout: What the rows hold.
        rows: Column -> `[..., row_bytes]` uint8.
        following: Likewise, of which only observations are taken.
        flatten: Join observation components along the last axis.
    """
    extras = {name: _field(layout, name, rows) for name in _extra_names(layout)}
    nothing = _NOTHING
    return Transition(
        observation=_group(layout, OBSERVATION, rows, flatten),
        privileged_observation=_group(layout, PRIVILEGED, rows, flatten),
        action=_group(layout, ACTION, rows, flatten=False),
        reward=_group(layout, REWARD, rows, flatten=False),
        done=nothing,
        timeout=nothing,
        next_observation=_group(layout, OBSERVATION, following, flatten),
        next_privileged_observation=_group(layout, PRIVILEGED, following, flatten),
        is_first=nothing,
        valid=nothing,
        extras=unflatten(extras) if extras else None,
    )


#: What torch can write single rows of, of those that it cannot; the same bytes.
_WRITABLE = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def _writable(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(_WRITABLE[tensor.dtype]) if tensor.dtype in _WRITABLE else tensor


@lru_cache(maxsize=128)
def _names_below(layout: RowLayout, group: str) -> list[str]:
    return list(layout.schema.below(group))


@lru_cache(maxsize=64)
def _extra_names(layout: RowLayout) -> tuple[str, ...]:
    """The fields that have no place of their own in a `Transition`."""
    groups = (OBSERVATION, PRIVILEGED, ACTION, REWARD)
    taken = {name for group in groups for name in layout.schema.below(group)}
    return tuple(name for name in layout.schema if name not in taken)


def _field(layout: RowLayout, name: str, rows: dict[str, torch.Tensor]) -> torch.Tensor:
    return layout.decoded(name, rows[layout.column_of[name].name])


def _group(layout: RowLayout, group: str, rows: dict[str, torch.Tensor], flatten: bool) -> Any:
    names = _names_below(layout, group)
    if not names:
        return None
    if names == [group]:
        return _field(layout, group, rows)
    if not flatten:
        return unflatten({name[len(group) + 1 :]: _field(layout, name, rows) for name in names})
    first = rows[layout.column_of[names[0]].name]
    view = layout.joined_view(names, first)
    return joined([_field(layout, name, rows) for name in names], first.dim() - 1) if view is None else view


def map_batch(function: Any, batch: Transition) -> Transition:
    """Apply `function` to every tensor of a batch."""
    values: Any = (value if value is None or isinstance(value, int) else map_leaves(function, value) for value in batch)
    return Transition(*values)
