"""Plans of batches: the frames that each env delivers in the next T steps, and the next state.

`plan_steps` is pure arithmetic: it reads no file and changes no argument. The caller keeps the new
state after it has read the frames of the plan. Python never loops over envs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..blocks.trajectory_index import Int64s, counted_from, stable_order

Bools = np.ndarray[Any, np.dtype[np.bool_]]

_ENV_BITS = 32
_ENV = (1 << _ENV_BITS) - 1
#: Slice that selects all envs.
ALL = slice(None)


@dataclass(frozen=True, eq=False)
class PassOrder:
    """The trajectories of a pass, in the order in which they are assigned to envs.

    Attributes:
        lengths: Number of frames of every trajectory of the snapshot, then of the `missing`
            trajectories (see `PassScheduler.missing`): int64 `[M]`. The number of a trajectory is
            its index into `lengths`.
        trajectories: Trajectories of this pass in order, int64 `[K]`.
        starts: First frame of each of these trajectories, int64 `[K]`.
        number: Number of the pass, from 0.
        source: Snapshot (`RowSource`) in which the trajectories have these numbers. This file does
            not read from it.
        turn: Number of earlier scans that the processes synchronized.
        sections: The two sections of the pass; see `sections_at` in `passes.py`.
        num_fresh: Number of new trajectories of the last scan. They are the first `trajectories`.
    """

    lengths: Int64s
    trajectories: Int64s
    starts: Int64s
    number: int = 0
    source: Any = None
    turn: int = 0
    sections: Any = None
    num_fresh: int = 0


class StreamState(NamedTuple):
    """The cursors of all envs.

    Attributes:
        trajectory: Trajectory that each env plays, int64 `[N]`; -1 before the first one.
        left: Frames of that trajectory that are not delivered yet, int64 `[N]`.
        is_first: Whether the next frame is the first delivered frame of its trajectory, bool `[N]`.
        is_exhausted: Whether the env has no further frame in this epoch, bool `[N]`.
        position: Number of trajectories of the pass that were assigned to envs.
    """

    trajectory: Int64s
    left: Int64s
    is_first: Bools
    is_exhausted: Bools
    position: int = 0

    @classmethod
    def fresh(cls, num_envs: int) -> StreamState:
        no = np.zeros(num_envs, bool)
        return cls(np.full(num_envs, -1, np.int64), np.zeros(num_envs, np.int64), no, no.copy())

    def frames(self, pass_order: PassOrder, share: slice = ALL) -> Int64s:
        """Return the number of the next frame of each env in `share`: int64 `[N]`.

        For an exhausted env it is the number of frames of the trajectory.
        """
        frames: Int64s = pass_order.lengths[self.trajectory[share]] - self.left[share]
        return frames


class Position(NamedTuple):
    """Position of the stream of all ranks after a batch. Immutable.

    Attributes:
        state: Cursors of the envs.
        pass_order: The current pass.
        left: With `refresh_s` and several processes, the number of batches until the next scan.
    """

    state: StreamState
    pass_order: PassOrder
    left: int = 0


class Pieces(NamedTuple):
    """Runs of consecutive frames, as arrays with one element per run.

    A run consists of the frames `frame` to `frame + num_frames` of `trajectory`. They are delivered
    to `env` at the steps from `time` on.
    """

    env: Int64s
    time: Int64s
    trajectory: Int64s
    frame: Int64s
    num_frames: Int64s


class Ends(NamedTuple):
    """The last frames of trajectories, each delivered to `env` at step `time`."""

    env: Int64s
    time: Int64s
    trajectory: Int64s


class PlanPart(NamedTuple):
    """Part of a plan whose trajectory numbers refer to one `PassOrder`."""

    pass_order: PassOrder
    pieces: Pieces
    ends: Ends


class Plan(NamedTuple):
    """The frames and flags of T steps of N envs.

    Frames are planned for the times 0 to T. The frames at time T are the next observations of the
    last step.

    Attributes:
        num_steps: T.
        parts: One part per `PassOrder`. The pieces of a part are sorted by (env, time). Together
            the parts have exactly one frame for each env and time. An exhausted env repeats its
            last frame, with the end of its trajectory.
        first_time, first_env: Time and env of the first frame of each trajectory that starts in
            these steps, int64 `[F]`.
        num_valid: Number of steps before the env was exhausted, at most T, int64 `[N]`.
        is_full: Whether no env that advances is exhausted before time T. This includes the envs of
            other ranks.
    """

    num_steps: int
    parts: tuple[PlanPart, ...]
    first_time: Int64s
    first_env: Int64s
    num_valid: Int64s
    is_full: bool


#: Function that begins the next pass. It maps (current pass, trajectories in use) to (next pass,
#: numbers of these trajectories in it, -1 if deleted), or to None after the last pass.
NextPass = Callable[[PassOrder, Int64s], "tuple[PassOrder, Int64s] | None"]


def assign_next(
    state: StreamState, envs: Int64s, pass_order: PassOrder, next_pass: NextPass
) -> tuple[StreamState, PassOrder]:
    """Assign the next trajectories to `envs` (ascending), and skip the rest of their current ones.

    Returns:
        The new state, and the pass of that state.
    """
    builder = _PlanBuilder(state, pass_order, next_pass, 0, share=slice(0))
    builder.refill(envs, 0)
    return builder.state_after(), builder.pass_order


def switch_pass_order(
    state: StreamState,
    before: PassOrder,
    pass_order: PassOrder,
    numbers: Int64s,
    next_pass: NextPass,
) -> Position:
    """Continue a pass with another order, after a scan within the pass.

    Exhausted envs, and envs whose trajectory was deleted, get the next trajectories at once.

    Args:
        state: Cursors of all envs.
        before: Order of the pass so far.
        pass_order: New order of the unassigned trajectories of the pass.
        numbers: int64 `[N]`, number in `pass_order` of the trajectory that each env plays; -1 if it
            was deleted. Exhausted envs must have a number >= 0.
        next_pass: Function that begins the next pass.
    """
    builder = _PlanBuilder(state, before, next_pass, 0, share=slice(0))
    builder.refill(builder.enter(pass_order, numbers, state.is_exhausted.nonzero()[0], 0), 0)
    return Position(builder.state_after(), builder.pass_order)


def share_of(plan: Plan, envs: Int64s) -> Plan:
    """Return a plan with only some envs of `plan` (ascending), numbered from 0 in the result."""
    place = np.full(len(plan.num_valid), -1)
    place[envs] = np.arange(len(envs))

    def mine(rows: Any) -> Any:
        chosen = place[rows.env] >= 0
        rows = type(rows)(*(column[chosen] for column in rows))
        return rows._replace(env=place[rows.env])

    parts = tuple(
        PlanPart(part.pass_order, mine(part.pieces), mine(part.ends)) for part in plan.parts
    )
    chosen = place[plan.first_env] >= 0
    first_time = plan.first_time[chosen]
    first_env = place[plan.first_env[chosen]]
    return Plan(plan.num_steps, parts, first_time, first_env, plan.num_valid[envs], plan.is_full)


def plan_steps(
    state: StreamState,
    pass_order: PassOrder,
    num_steps: int,
    next_pass: NextPass,
    envs: Int64s | None = None,
    share: slice = ALL,
) -> tuple[Plan, StreamState, PassOrder]:
    """Plan the next `num_steps` steps of all envs.

    An env whose trajectory ends gets the next unassigned trajectory at once. If several trajectories
    end, the order of (time, env) decides. So the number of steps per call does not change the
    result.

    Args:
        state: Cursors of all envs.
        pass_order: The current pass.
        num_steps: Number of steps T.
        next_pass: Function that begins the next pass.
        envs: Envs that advance; None: all.
        share: Envs whose frames this process reads.

    Returns:
        The plan of the envs in `share`, numbered from 0; the state of all envs after it; and the
        pass of that state.
    """
    if envs is None and int(state.left.min()) > num_steps:
        return *_plan_without_ends(state, pass_order, num_steps, share), pass_order
    builder = _PlanBuilder(state, pass_order, next_pass, num_steps, envs, share)
    builder.run()
    return builder.plan(), builder.state_after(), builder.pass_order


def _plan_without_ends(
    state: StreamState, pass_order: PassOrder, num_steps: int, share: slice
) -> tuple[Plan, StreamState]:
    """Plan steps in which no trajectory ends.

    With this special case, a batch of one step of 64 envs takes 100 us instead of 140 us.
    """
    trajectory = state.trajectory[share]
    env = np.arange(len(trajectory))
    none = np.zeros(len(trajectory), np.int64)
    pieces = Pieces(env, none, trajectory, state.frames(pass_order, share), none + (num_steps + 1))
    first = state.is_first[share].nonzero()[0]
    plan = Plan(
        num_steps,
        (PlanPart(pass_order, pieces, _NO_ENDS),),
        none[: len(first)],
        first,
        none + num_steps,
        True,
    )
    no = np.zeros(len(state.left), bool)
    return plan, StreamState(
        state.trajectory, state.left - num_steps, no, state.is_exhausted, state.position
    )


class _PlanBuilder:
    """Computation of one plan.

    It starts from the cursors of all envs and assigns trajectories in the order of (time, env). An
    assigned trajectory begins a segment: a run of frames of one trajectory for one env. The ends of
    trajectories are computed for all envs, since they decide which env gets the next trajectory.
    Pieces are built only for the envs of `share`.
    """

    def __init__(
        self,
        state: StreamState,
        pass_order: PassOrder,
        next_pass: NextPass,
        num_steps: int,
        envs: Int64s | None = None,
        share: slice = ALL,
    ) -> None:
        self.pass_order = pass_order
        self.next_pass = next_pass
        self.num_steps = num_steps
        self.position = state.position
        self.before = state
        self.trajectory = state.trajectory.copy()
        self.is_exhausted = state.is_exhausted.copy()
        #: Time after the last frame of each env's trajectory, int64 `[N]`. It is `num_steps` later
        #: for envs that do not advance, so that none of their frames counts as delivered.
        self.end = state.left.copy()
        self.is_first = np.zeros(len(self.end), bool) if num_steps else state.is_first.copy()
        self.is_full = not (state.is_exhausted if envs is None else state.is_exhausted[envs]).any()
        if envs is not None or not self.is_full:
            stays = np.ones(len(self.end), bool)
            stays[ALL if envs is None else envs] = state.is_exhausted[ALL if envs is None else envs]
            self.end[stays] += num_steps
            self.is_first |= state.is_first & stays
        self.share = slice(*share.indices(len(self.end)))
        self.planned_envs = np.arange(self.share.stop - self.share.start) if envs is None else envs
        self.parts: list[PlanPart] = []
        first = state.is_first[self.share].nonzero()[0]
        #: First frames of trajectories in the share, as arrays (env, time).
        self.firsts: list[tuple[Int64s, ...]] = [(first, np.zeros_like(first))]
        #: Segments, as arrays of the env and of the time, trajectory and frame of their beginning.
        self.begun: list[tuple[Int64s, ...]] = []
        #: Envs that become exhausted, and the time from which each has no frame, as arrays.
        self.stops: list[tuple[Int64s, ...]] = []
        self._open_part(0)

    def run(self) -> None:
        """Assign the next trajectories at all ends of trajectories up to the last step."""
        while len(first := self._ends_within()):
            ends, assigned_at, ended_at = self._order_ends(first)
            times = ends >> _ENV_BITS
            envs = ends & _ENV
            num_assigned = min(len(ends), len(self.pass_order.trajectories) - self.position)
            stop = num_assigned
            # At most ends, the trajectory ends that the env has played so far. At the ends
            # `ended_at`, a trajectory ends that was assigned at the end `assigned_at` of this plan.
            trajectory = self.trajectory[envs]
            trajectory[ended_at] = self.pass_order.trajectories[self.position + assigned_at]
            is_last = np.ones(num_assigned, bool)
            is_last[assigned_at[ended_at < num_assigned]] = False
            self._assign(envs[:num_assigned], times[:num_assigned], is_last)
            # If the trajectories of the pass do not suffice, the next pass begins at the first end
            # that gets no trajectory.
            if num_assigned < len(ends):
                stop = int(np.searchsorted(ends, ends[num_assigned] | _ENV))
            self.ends.append((envs[:stop], times[:stop] - 1, trajectory[:stop]))
            if stop == num_assigned:
                return
            self.refill(envs[num_assigned:stop], int(times[num_assigned]))

    def _ends_within(self) -> Int64s:
        """Return the ends of the current trajectories up to the last step, sorted by (time, env).

        An end is an int64 `time << 32 | env`. numpy sorts such integers faster than pairs.
        """
        env = (self.end <= self.num_steps).nonzero()[0]
        env = env[~self.is_exhausted[env]]
        keys: Int64s = self.end[env] << _ENV_BITS | env
        keys.sort()
        return keys

    def _order_ends(self, first: Int64s) -> tuple[Int64s, Int64s, Int64s]:
        """Compute all ends up to the last step, including ends of newly assigned trajectories.

        At the n-th end an env gets the n-th unassigned trajectory. If that trajectory is so short
        that it also ends up to the last step, its end is inserted, and all later ends get another
        trajectory. So the ends are computed again until they do not change: 4 to 5 times for
        trajectories of 300 frames. An end depends only on earlier ends, so the result is unique.

        Args:
            first: Ends of the current trajectories, as returned by `_ends_within`.

        Returns:
            All ends, sorted. For each short trajectory, the index of the end at which it is
            assigned. For each short trajectory, the index of its own end.
        """
        ends = first
        short_ends = _EMPTY
        num_known = 0
        limit = (self.num_steps + 1) << _ENV_BITS
        while True:
            if len(ends) > num_known:
                num_known = len(ends) + len(ends) // 4
                chosen = slice(self.position, self.position + num_known)
                spans = (
                    self.pass_order.lengths[self.pass_order.trajectories[chosen]]
                    - self.pass_order.starts[chosen]
                )
                short = (spans <= self.num_steps).nonzero()[0]
                spans = spans[short] << _ENV_BITS
            num_short = int(np.searchsorted(short, len(ends)))
            previous_short_ends = short_ends
            short_ends = ends[short[:num_short]] + spans[:num_short]
            in_time = short_ends < limit
            short_ends = short_ends[in_time]
            if np.array_equal(short_ends, previous_short_ends):
                return ends, short[:num_short][in_time], np.searchsorted(ends, short_ends)
            # A stable sort merges the two sorted runs: 5,000 ends take 4 us, and 145 us with the
            # default sort.
            ends = np.concatenate([first, np.sort(short_ends)])
            ends.sort(kind="stable")

    def _assign(self, envs: Int64s, times: Int64s, is_last: Any = ALL) -> None:
        """Assign the next trajectories of the pass to `envs`, from `times` on.

        `envs` may contain an env several times. Then `is_last` is a mask of its last assignment.
        """
        chosen = slice(self.position, self.position + len(envs))
        trajectory = self.pass_order.trajectories[chosen]
        frame = self.pass_order.starts[chosen]
        self.position += len(envs)
        self.begun.append((envs, times, trajectory, frame))
        envs, times, trajectory, frame = (column[is_last] for column in self.begun[-1])
        self.trajectory[envs] = trajectory
        self.end[envs] = times + self.pass_order.lengths[trajectory] - frame
        self.is_first[envs] = times == self.num_steps
        self.is_exhausted[envs] = False

    def refill(self, envs: Int64s, time: int) -> None:
        """Assign the next trajectories to `envs`, in this order, from `time` on.

        If the trajectories of the pass do not suffice, the next pass begins. After the last pass
        the remaining envs become exhausted.
        """
        while len(envs):
            taken = min(len(envs), len(self.pass_order.trajectories) - self.position)
            self._assign(envs[:taken], np.full(taken, time))
            envs = envs[taken:]
            if len(envs):
                begun = self.next_pass(self.pass_order, self.trajectory)
                if begun is None:
                    self.end[envs] = self.num_steps
                    self.is_first[envs] = False
                    self.is_exhausted[envs] = True
                    self.stops.append((envs, np.full(len(envs), time)))
                    self.is_full &= time >= self.num_steps
                    return
                envs = self.enter(*begun, envs, time)

    def enter(self, pass_order: PassOrder, numbers: Int64s, waiting: Int64s, time: int) -> Int64s:
        """Switch to another pass order at `time`.

        Args:
            pass_order: The new pass order.
            numbers: int64 `[N]`, number in the new order of the trajectory that each env plays; -1
                if it was deleted.
            waiting: Envs that need a trajectory.
            time: Time from which the new order is used.

        Returns:
            The envs that need a trajectory: `waiting`, and envs whose trajectory was deleted.
        """
        is_lost = (numbers < 0) & ~self.is_exhausted
        is_lost[waiting] = False
        is_other = pass_order.source is not self.pass_order.source
        if is_other:  # In another snapshot, trajectories may have more frames, or be deleted.
            self._close_part(time)
            self.end += pass_order.lengths[numbers] - self.pass_order.lengths[self.trajectory]
        self.pass_order = pass_order
        self.trajectory = numbers.copy()
        self.position = 0
        if is_other:
            # The current segments continue in the new part. A segment whose env gets another
            # trajectory at this time has no frames there.
            self._open_part(time)
        return np.concatenate([waiting, np.flatnonzero(is_lost)])

    def _open_part(self, time: int) -> None:
        """Begin a part of the plan. Its trajectory numbers refer to the current pass order."""
        env = self.planned_envs
        trajectory = self.trajectory[self.share]
        frame = self.pass_order.lengths[trajectory] - self.end[self.share] + time
        #: Segments of the share that continue from the previous part, in the form of `begun`.
        self.played = env, np.full(len(env), time), trajectory[env], frame[env]
        self.num_begun = len(self.begun)
        self.ends: list[tuple[Int64s, ...]] = [_NO_ENDS]

    def _select_share(self, rows: Sequence[tuple[Int64s, ...]]) -> tuple[Int64s, ...]:
        """Concatenate tuples of columns, and select the rows of the envs in the share.

        The first column contains the env. In the result the envs of the share are numbered from 0.
        """
        env, *others = _joined(rows)
        if self.share.stop - self.share.start == len(self.trajectory):
            return env, *others
        chosen = ((env >= self.share.start) & (env < self.share.stop)).nonzero()[0]
        return env[chosen] - self.share.start, *(column[chosen] for column in others)

    def _close_part(self, stop: int) -> None:
        """End the current part of the plan at time `stop`, and convert its segments to pieces.

        A segment ends where the next segment of its env begins, or at `stop`.
        """
        begun = self._select_share(self.begun[self.num_begun :] or [_NO_SEGMENTS])
        self.firsts.append(begun[:2])
        env, time, trajectory, frame = _joined([self.played, begun])
        # A stable order keeps the segments of an env in the order of time.
        order = stable_order(env)
        env = env[order]
        time = time[order]
        end = np.full(len(env), stop)
        np.copyto(end[:-1], time[1:], where=env[1:] == env[:-1])
        pieces = Pieces(env, time, trajectory[order], frame[order], end - time)
        if not (has_frames := end > time).all():
            pieces = Pieces(*(column[has_frames] for column in pieces))
        self.parts.append(PlanPart(self.pass_order, pieces, Ends(*self._select_share(self.ends))))

    def plan(self) -> Plan:
        """End all segments after time T, and return the plan."""
        num_valid = np.where(self.before.is_exhausted[self.share], 0, self.num_steps)
        if self.stops or not self.is_full:
            self._repeat_last(num_valid)
        self._close_part(self.num_steps + 1)
        env, time = _joined(self.firsts)
        inside = time < num_valid[env]  # Repeated frames of exhausted envs are never first frames.
        firsts = time[inside], env[inside]
        return Plan(self.num_steps, tuple(self.parts), *firsts, num_valid, self.is_full)

    def _repeat_last(self, num_valid: Int64s) -> None:
        """Add segments in which exhausted envs of the share repeat their last frame.

        Each remaining time gets a segment. `num_valid` is changed in place.
        """
        envs, times = self._select_share(self.stops or [_NO_STOPS])
        num_valid[envs] = times
        envs = self.planned_envs[self.is_exhausted[self.share][self.planned_envs]]
        count = self.num_steps + 1 - num_valid[envs]
        env = np.repeat(envs + self.share.start, count)
        time = counted_from(num_valid[envs], count)
        trajectory = self.trajectory[env]
        self.begun.append((env, time, trajectory, self.pass_order.lengths[trajectory] - 1))
        within = time < self.num_steps
        self.ends.append((env[within], time[within], trajectory[within]))

    def state_after(self) -> StreamState:
        """Return the state after the last step."""
        return StreamState(
            self.trajectory,
            self.end - self.num_steps,
            self.is_first,
            self.is_exhausted,
            self.position,
        )


def _joined(rows: Sequence[tuple[Int64s, ...]]) -> tuple[Int64s, ...]:
    if len(rows) == 1:
        return rows[0]
    return tuple(np.concatenate(column) for column in zip(*rows, strict=True))


_EMPTY = np.zeros(0, np.int64)
_NO_ENDS = Ends(_EMPTY, _EMPTY, _EMPTY)
_NO_SEGMENTS = (_EMPTY,) * 4
_NO_STOPS = (_EMPTY,) * 2
