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
#: All envs.
ALL = slice(None)


@dataclass(frozen=True, eq=False)
class PassOrder:
    """The trajectories of a pass, in the order in which they are assigned to envs.

    Attributes:
        lengths: Frames of every trajectory of the snapshot, then of the trajectories that are
            missing (`PassScheduler.missing`), int64 `[M]`.
        trajectories: Trajectories of this pass in order, int64 `[K]`.
        starts: First frame of each of these trajectories, int64 `[K]`.
        number: Number of the pass, from 0.
        source: Snapshot (`RowSource`) with these trajectory numbers; not used in this file.
        turn: Number of earlier scans that the processes synchronized.
        sections: The sections that `trajectories` joins; see `passes.py`.
        num_fresh: Number of trajectories that the last scan found. They come first.
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
        """Return the next frame of each env of a share: int64 `[N]`; beyond the end if the env is exhausted."""
        frames: Int64s = pass_order.lengths[self.trajectory[share]] - self.left[share]
        return frames


class Position(NamedTuple):
    """The position of the stream of all ranks after a batch. Immutable.

    Attributes:
        left: With `refresh_s` and several processes, the number of batches until the next scan.
    """

    state: StreamState
    pass_order: PassOrder
    left: int = 0


class Pieces(NamedTuple):
    """Runs of consecutive frames, as arrays with one element per run.

    A run has `num_frames` frames of a trajectory. `env` gets them from step `time` on.
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
    """The frames and flags of T steps, at times 0 to T. Time T is that of the last next observations.

    Attributes:
        parts: One part per `PassOrder`. Their pieces are sorted by (env, time) and cover `[N, T + 1]`
            once. An exhausted env repeats its last frame and the end of its trajectory.
        first_time, first_env: Times and envs at which trajectories start, int64 `[F]`.
        num_valid: Number of steps before the env was exhausted, at most T, int64 `[N]`.
        is_full: Whether `num_valid` is T for all moving envs, including envs of other shares.
    """

    num_steps: int
    parts: tuple[PlanPart, ...]
    first_time: Int64s
    first_env: Int64s
    num_valid: Int64s
    is_full: bool


#: Function that begins the next pass: (pass order, trajectories in use) -> (next pass order,
#: numbers of these trajectories in it; -1 if deleted), or None after the last pass.
NextPass = Callable[[PassOrder, Int64s], "tuple[PassOrder, Int64s] | None"]


def assign_next(
    state: StreamState, envs: Int64s, pass_order: PassOrder, next_pass: NextPass
) -> tuple[StreamState, PassOrder]:
    """Assign the next trajectories to `envs` (ascending). The rest of their current ones is skipped."""
    walk = _Walk(state, pass_order, next_pass, 0, share=slice(0))
    walk.refill(envs, 0)
    return walk.state_after(), walk.pass_order


def switch_pass_order(
    state: StreamState,
    before: PassOrder,
    pass_order: PassOrder,
    numbers: Int64s,
    next_pass: NextPass,
) -> Position:
    """Return the position in another order of the same pass.

    `numbers` are the numbers of the played trajectories in the new order; -1 if deleted, except for
    exhausted envs. Exhausted envs, and envs with a deleted trajectory, get the next trajectories at
    once.
    """
    walk = _Walk(state, before, next_pass, 0, share=slice(0))
    walk.refill(walk.enter(pass_order, numbers, state.is_exhausted.nonzero()[0], 0), 0)
    return Position(walk.state_after(), walk.pass_order)


def share_of(plan: Plan, envs: Int64s) -> Plan:
    """Return the part of a plan for some envs (ascending). The result numbers them from 0."""
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

    An env whose trajectory ends gets the next unused one at once, in the order of (time, env). So
    the number of steps per call does not change the result. Only `envs` advance (None: all).

    Returns:
        The plan of the envs in `share`, numbered from 0; the state of all envs after it; and the
        pass of that state.
    """
    if envs is None and int(state.left.min()) > num_steps:
        return *_plan_without_ends(state, pass_order, num_steps, share), pass_order
    walk = _Walk(state, pass_order, next_pass, num_steps, envs, share)
    walk.run()
    return walk.plan(), walk.state_after(), walk.pass_order


def _plan_without_ends(
    state: StreamState, pass_order: PassOrder, num_steps: int, share: slice
) -> tuple[Plan, StreamState]:
    """Plan steps in which no trajectory ends.

    A batch of one step of 64 envs takes 100 us this way, and 140 us the general way.
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


class _Walk:
    """Computation of one plan: the cursors of all envs and the segments that began.

    A segment is a run of frames of one trajectory for one env. The ends of trajectories are
    computed for all envs, since they decide which env gets the next trajectory. Pieces are built
    only for the envs of `share`.
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
        #: The time after the last frame of each env's trajectory. Envs that do not move end
        #: `num_steps` later.
        self.end = state.left.copy()
        self.is_first = np.zeros(len(self.end), bool) if num_steps else state.is_first.copy()
        self.is_full = not (state.is_exhausted if envs is None else state.is_exhausted[envs]).any()
        if envs is not None or not self.is_full:
            stays = np.ones(len(self.end), bool)
            stays[ALL if envs is None else envs] = state.is_exhausted[ALL if envs is None else envs]
            self.end[stays] += num_steps
            self.is_first |= state.is_first & stays
        self.share = slice(*share.indices(len(self.end)))
        self.shown = np.arange(self.share.stop - self.share.start) if envs is None else envs
        self.parts: list[PlanPart] = []
        first = state.is_first[self.share].nonzero()[0]
        #: (env, time) of the first frame of each trajectory in the share.
        self.firsts: list[tuple[Int64s, ...]] = [(first, np.zeros_like(first))]
        #: Segments that began: env, time, trajectory and frame.
        self.begun: list[tuple[Int64s, ...]] = []
        #: Exhausted envs, and the times from which on they are exhausted.
        self.stops: list[tuple[Int64s, ...]] = []
        self._open_part(0)

    def run(self) -> None:
        """End segments in the order of (time, env) until all open segments outlast the last step."""
        while len(first := self._ends_within()):
            ends, makers, made = self._order_ends(first)
            times = ends >> _ENV_BITS
            envs = ends & _ENV
            stop = num_assigned = min(len(ends), len(self.pass_order.trajectories) - self.position)
            trajectory = self.trajectory[envs]
            is_last = np.ones(num_assigned, bool)
            trajectory[made] = self.pass_order.trajectories[self.position + makers]
            is_last[makers[made < num_assigned]] = False
            self._assign(envs[:num_assigned], times[:num_assigned], is_last)
            # No trajectory is left: the pass ends at the next end.
            if num_assigned < len(ends):
                stop = int(np.searchsorted(ends, ends[num_assigned] | _ENV))
            self.ends.append((envs[:stop], times[:stop] - 1, trajectory[:stop]))
            if stop == num_assigned:
                return
            self.refill(envs[num_assigned:stop], int(times[num_assigned]))

    def _ends_within(self) -> Int64s:
        """Return the ends up to the last step, sorted by time, then env: int64 `time << 32 | env`.

        numpy sorts single integers with vector instructions.
        """
        env = (self.end <= self.num_steps).nonzero()[0]
        env = env[~self.is_exhausted[env]]
        keys: Int64s = self.end[env] << _ENV_BITS | env
        keys.sort()
        return keys

    def _order_ends(self, first: Int64s) -> tuple[Int64s, Int64s, Int64s]:
        """Order all ends up to the last step, while the pass has trajectories left.

        At the n-th end an env gets the n-th trajectory. A short trajectory also ends by the last
        step, which shifts the trajectories of all later ends. So the ends are computed again until
        they do not change: 4 to 5 times for trajectories of 300 frames. An end depends only on
        earlier ends, so exactly one such order exists.

        Returns:
            All ends, sorted. Indices of the ends at which a short trajectory was assigned. Indices
            of the ends of these short trajectories.
        """
        ends = first
        made = _EMPTY
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
            made_before = made
            made = ends[short[:num_short]] + spans[:num_short]
            in_time = made < limit
            made = made[in_time]
            if np.array_equal(made, made_before):
                return ends, short[:num_short][in_time], np.searchsorted(ends, made)
            # A stable sort merges two sorted runs: 5,000 ends take 4 us, another sort takes 145.
            ends = np.concatenate([first, np.sort(made)])
            ends.sort(kind="stable")

    def _assign(self, envs: Int64s, times: Int64s, is_last: Any = ALL) -> None:
        """Assign the next trajectories of the pass to `envs`, from `times` on.

        An env may get several trajectories; `is_last` selects its last one.
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

        Begins another pass if the trajectories do not suffice.
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
        """Switch to another pass order at `time`; return the envs that need a trajectory.

        These are the `waiting` envs and the envs with a deleted trajectory. `numbers` are the
        numbers of the trajectories of all envs in the new order; -1 if deleted.
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
            # Envs that get a trajectory at this time have a segment without frames in this part.
            self._open_part(time)
        return np.concatenate([waiting, np.flatnonzero(is_lost)])

    def _open_part(self, time: int) -> None:
        """Begin a part of the plan with the trajectory numbers of the current pass order."""
        env = self.shown
        trajectory = self.trajectory[self.share]
        frame = self.pass_order.lengths[trajectory] - self.end[self.share] + time
        #: Segments of the share that continue from the part before: env, time, trajectory and
        #: frame.
        self.played = env, np.full(len(env), time), trajectory[env], frame[env]
        self.num_begun = len(self.begun)
        self.ends: list[tuple[Int64s, ...]] = [_NO_ENDS]

    def _select_share(self, rows: Sequence[tuple[Int64s, ...]]) -> tuple[Int64s, ...]:
        """Join rows whose first column is the env; select the share and number its envs from 0."""
        env, *others = _joined(rows)
        if self.share.stop - self.share.start == len(self.trajectory):
            return env, *others
        chosen = ((env >= self.share.start) & (env < self.share.stop)).nonzero()[0]
        return env[chosen] - self.share.start, *(column[chosen] for column in others)

    def _close_part(self, stop: int) -> None:
        """Add the segments to the plan, each up to the next segment of its env, or to time `stop`."""
        begun = self._select_share(self.begun[self.num_begun :] or [_NO_SEGMENTS])
        self.firsts.append(begun[:2])
        env, time, trajectory, frame = _joined([self.played, begun])
        order = stable_order(
            env
        )  # A stable order keeps the segments of an env in the order of time.
        env = env[order]
        time = time[order]
        end = np.full(len(env), stop)
        np.copyto(end[:-1], time[1:], where=env[1:] == env[:-1])
        pieces = Pieces(env, time, trajectory[order], frame[order], end - time)
        if not (has_frames := end > time).all():
            pieces = Pieces(*(column[has_frames] for column in pieces))
        self.parts.append(PlanPart(self.pass_order, pieces, Ends(*self._select_share(self.ends))))

    def plan(self) -> Plan:
        """End the open segments after time T, and return the plan."""
        num_valid = np.where(self.before.is_exhausted[self.share], 0, self.num_steps)
        if self.stops or not self.is_full:
            self._repeat_last(num_valid)
        self._close_part(self.num_steps + 1)
        env, time = _joined(self.firsts)
        inside = time < num_valid[env]  # Repeated frames of exhausted envs are never first frames.
        firsts = time[inside], env[inside]
        return Plan(self.num_steps, tuple(self.parts), *firsts, num_valid, self.is_full)

    def _repeat_last(self, num_valid: Int64s) -> None:
        """Let exhausted envs of the share repeat their last frame at every remaining time."""
        envs, times = self._select_share(self.stops or [_NO_STOPS])
        num_valid[envs] = times
        envs = self.shown[self.is_exhausted[self.share][self.shown]]
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
