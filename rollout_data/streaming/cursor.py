"""Where each env stands, which frames the next T steps read, and what the new state is.

One rule: pure arithmetic. `plan_steps` reads nothing and changes nothing; it returns a plan of integers and the state
after it, which the caller keeps once the plan was carried out. Python never loops over envs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..index.index import Int64s, counted_from, stable_order

Bools = np.ndarray[Any, np.dtype[np.bool_]]

_ENV_BITS = 32


@dataclass(frozen=True, eq=False)
class Deal:
    """What a pass hands out, and in which order.

    Attributes:
        lengths: int64 `[M]`, frames of every trajectory that may be referred to.
        order: int64 `[K]`, the trajectories of this pass in the order of dealing.
        starts: int64 `[K]`, the frame at which each of them starts.
        number: Which pass this is, from 0.
        source: Whatever the trajectory numbers refer to; never looked at here.
        turn: How often the processes had agreed on what is there, before this.
        sections: What `order` is made of (`passes.py`); the first `num_fresh` of it are the newest look's.
    """

    lengths: Int64s
    order: Int64s
    starts: Int64s
    number: int = 0
    source: Any = None
    turn: int = 0
    sections: Any = None
    num_fresh: int = 0


class StreamState(NamedTuple):
    """Where each env stands.

    Attributes:
        trajectory: int64 `[N]`, the trajectory that is being delivered; -1 before the first.
        frame: int64 `[N]`, the next frame of it.
        is_first: bool `[N]`, that frame is the first one delivered of its trajectory.
        is_exhausted: bool `[N]`, nothing is left for this env; `frame` is beyond the end.
        position: How many trajectories of the current pass have been dealt.
    """

    trajectory: Int64s
    frame: Int64s
    is_first: Bools
    is_exhausted: Bools
    position: int = 0

    @classmethod
    def fresh(cls, num_envs: int) -> StreamState:
        no = np.zeros(num_envs, bool)
        return cls(np.full(num_envs, -1, np.int64), np.zeros(num_envs, np.int64), no, no.copy())


class Position(NamedTuple):
    """Where the stream of all ranks stands: immutable, so that keeping one costs nothing.

    Attributes:
        left: Where several processes read with `refresh_s`: batches until they agree on what is there again.
    """

    state: StreamState
    deal: Deal
    left: int = 0


class Pieces(NamedTuple):
    """Consecutive frames of one trajectory each: `num_frames` of it, delivered to `env` from `time` on."""

    env: Int64s
    time: Int64s
    trajectory: Int64s
    frame: Int64s
    num_frames: Int64s


class Ends(NamedTuple):
    """The last frames of trajectories: delivered to `env` at step `time`."""

    env: Int64s
    time: Int64s
    trajectory: Int64s


class DealPart(NamedTuple):
    """The part of a plan whose trajectory numbers refer to one deal."""

    deal: Deal
    pieces: Pieces
    ends: Ends


class Plan(NamedTuple):
    """What T steps read and mark; times are `0..T`, where time T is only looked at.

    Attributes:
        parts: One for each deal that was used; together their pieces, which are in the order of (env, time), cover
            `[N, T + 1]` once. An exhausted env repeats its last frame, and the end of its trajectory, to the end.
        first_time, first_env: int64 `[F]`, where trajectories start.
        num_valid: int64 `[N]`, steps before the env was exhausted; T where it was not.
    """

    num_steps: int
    parts: tuple[DealPart, ...]
    first_time: Int64s
    first_env: Int64s
    num_valid: Int64s


#: Begins the pass after a deal: (deal, trajectories in use) -> (next deal, their numbers in it); None at the end.
#: The number of a trajectory that is gone is -1: its env goes on with another one.
NextPass = Callable[[Deal, Int64s], "tuple[Deal, Int64s] | None"]


def deal_next(state: StreamState, envs: Int64s, deal: Deal, next_pass: NextPass) -> tuple[StreamState, Deal]:
    """Give each of `envs` (ascending) the next unused trajectory, dropping what they were at."""
    walk = _Walk(state, deal, next_pass, num_steps=0)
    walk.refill(envs, 0)
    return walk.state_after(), walk.deal


def go_on_with(state: StreamState, before: Deal, deal: Deal, numbers: Int64s, next_pass: NextPass) -> Position:
    """Deal from another `deal` of the same pass, where what the envs play has other `numbers`; -1 is gone.

    Envs that are exhausted, or whose trajectory is gone, are dealt to at once.
    """
    walk = _Walk(state, before, next_pass, num_steps=0)
    shown = np.where(state.is_exhausted & (numbers < 0), len(deal.lengths) - 1, numbers)
    walk.enter(deal, shown, state.is_exhausted.nonzero()[0], 0)
    return Position(walk.state_after(), walk.deal)


def share_of(plan: Plan, envs: Int64s) -> Plan:
    """Give the part of a plan that concerns some envs (ascending), which it counts from 0."""
    place = np.full(len(plan.num_valid), -1)
    place[envs] = np.arange(len(envs))

    def mine(rows: Any) -> Any:
        chosen = place[rows.env] >= 0
        rows = type(rows)(*(column[chosen] for column in rows))
        return rows._replace(env=place[rows.env])

    parts = tuple(DealPart(part.deal, mine(part.pieces), mine(part.ends)) for part in plan.parts)
    chosen = place[plan.first_env] >= 0
    first_time, first_env = plan.first_time[chosen], place[plan.first_env[chosen]]
    return Plan(plan.num_steps, parts, first_time, first_env, plan.num_valid[envs])


def plan_steps(
    state: StreamState, deal: Deal, num_steps: int, next_pass: NextPass, envs: Int64s | None = None
) -> tuple[Plan, StreamState, Deal]:
    """Plan the next `num_steps` steps.

    An env whose trajectory ends takes the next unused one at once, in the order of (time, env);
    so the outcome does not depend on how a run is cut into calls. Only `envs` advance (None: all).

    Returns:
        The plan, the state after it, and the pass that is current then.
    """
    left = deal.lengths[state.trajectory] - state.frame
    if envs is None and int(left.min()) > num_steps:
        return *_undisturbed(state, deal, num_steps), deal
    walk = _Walk(state, deal, next_pass, num_steps, envs)
    walk.run()
    return walk.plan(), walk.state_after(), walk.deal


def _undisturbed(state: StreamState, deal: Deal, num_steps: int) -> tuple[Plan, StreamState]:
    """Plan steps in which no trajectory ends: a batch of one step of 64 envs takes 100 us instead of 140."""
    env = np.arange(len(state.frame))
    none, no = np.zeros(len(env), np.int64), np.zeros(len(env), bool)
    pieces = Pieces(env, none, state.trajectory, state.frame, none + (num_steps + 1))
    first_env = state.is_first.nonzero()[0]
    plan = Plan(num_steps, (DealPart(deal, pieces, _NO_ENDS),), none[: len(first_env)], first_env, none + num_steps)
    return plan, StreamState(state.trajectory, state.frame + num_steps, no, state.is_exhausted, state.position)


class _Walk:
    """The running variables of one plan: where each env is, and which segments were begun."""

    def __init__(
        self, state: StreamState, deal: Deal, next_pass: NextPass, num_steps: int, envs: Int64s | None = None
    ) -> None:
        self.deal, self.next_pass, self.num_steps = deal, next_pass, num_steps
        self.trajectory, self.frame = state.trajectory.copy(), state.frame.copy()
        self.is_first, self.is_exhausted = state.is_first.copy(), state.is_exhausted.copy()
        self.num_valid = np.where(state.is_exhausted, 0, num_steps)
        self.position = state.position
        self.envs = np.arange(len(self.frame)) if envs is None else envs  # that move
        #: When each env was at `frame`; those that do not move are there at the end.
        self.begin = np.full(len(self.frame), num_steps)
        self.begin[self.envs] = 0
        self.parts: list[DealPart] = []
        #: Of the part that is open: env, time, trajectory and frame where each segment begins.
        self.begun = [(self.envs, self.begin[self.envs], self.trajectory[self.envs], self.frame[self.envs])]
        self.ends: list[Ends] = []
        first = state.is_first.nonzero()[0]
        self.firsts = [(np.zeros(len(first), np.int64), first)]

    def run(self) -> None:
        """End segments in the order of (time, env) until all open ones outlast the last step."""
        ends = self._ends(self.envs)
        while len(ends):
            times, envs = ends >> _ENV_BITS, ends & ((1 << _ENV_BITS) - 1)
            num_dealt = self._num_in_order(times)
            # Without a trajectory left, the pass ends at the first of these times.
            closed = num_dealt or int(np.count_nonzero(times == times[0]))
            envs, times = envs[:closed], times[:closed]
            self.ends.append(Ends(envs, times - 1, self.trajectory[envs]))
            if num_dealt:
                self._deal(envs, times)
                ends = np.sort(np.concatenate([ends[closed:], self._ends(envs)]))
            else:
                self.refill(envs, int(times[0]))
                ends = self._ends(self.envs)  # in the next pass, trajectories may have grown or gone

    def _ends(self, envs: Int64s) -> Int64s:
        """Which segments of `envs` end by the last step: the time after the last frame, and below it the env; sorted.

        As one number they are sorted in vector instructions.
        """
        end = self.begin[envs] + self.deal.lengths[self.trajectory[envs]] - self.frame[envs]
        chosen = ((end <= self.num_steps) & ~self.is_exhausted[envs]).nonzero()[0]
        return np.sort(end[chosen] << _ENV_BITS | envs[chosen])

    def _num_in_order(self, times: Int64s) -> int:
        """How many of these ends, ascending, can be served at once.

        All are, up to the first that is not before the end of a trajectory dealt to another of them:
        from there on the new one may be served first.
        """
        chosen = slice(self.position, self.position + len(times))
        order = self.deal.order[chosen]
        if times[0] == times[-1]:
            return len(order)
        new_ends = times[: len(order)] + self.deal.lengths[order] - self.deal.starts[chosen]
        late = (times[1 : len(order)] >= np.minimum.accumulate(new_ends)[:-1]).nonzero()[0]
        return 1 + int(late[0]) if len(late) else len(order)

    def _deal(self, envs: Int64s, times: Int64s) -> None:
        """Give `envs` the next trajectories of the pass, from `times` on; there are enough."""
        chosen = slice(self.position, self.position + len(envs))
        begun = envs, times, self.deal.order[chosen], self.deal.starts[chosen]
        _, self.begin[envs], self.trajectory[envs], self.frame[envs] = begun
        self.is_first[envs], self.is_exhausted[envs] = True, False
        self.position += len(envs)
        self.firsts.append((times, envs))
        self.begun.append(begun)

    def refill(self, envs: Int64s, time: int) -> None:
        """Deal trajectories to `envs`, in this order, from `time` on."""
        while len(envs):
            taken = min(len(envs), len(self.deal.order) - self.position)
            self._deal(envs[:taken], np.full(taken, time))
            envs = envs[taken:]
            if len(envs):
                begun = self.next_pass(self.deal, self.trajectory)
                if begun is None:
                    self.frame[envs] = self.deal.lengths[self.trajectory[envs]]
                    self.begin[envs] = self.num_valid[envs] = time
                    self.is_exhausted[envs] = True
                    return
                envs = self._enter(*begun, envs, time)

    def enter(self, deal: Deal, numbers: Int64s, waiting: Int64s, time: int) -> None:
        """Go on with another deal, and deal to `waiting` and the envs whose trajectory is not in it any more."""
        self.refill(self._enter(deal, numbers, waiting, time), time)

    def _enter(self, deal: Deal, numbers: Int64s, waiting: Int64s, time: int) -> Int64s:
        """Go on with another deal; gives `waiting` and the envs whose trajectory is not in it any more."""
        is_lost = (numbers < 0) & ~self.is_exhausted
        is_lost[waiting] = False
        if deal.source is not self.deal.source:
            self._close_part(time)
            # Of these, the segments of envs that are dealt to at this time have no frames.
            frame = (self.frame + time - self.begin)[self.envs]
            self.begun = [(self.envs, np.full(len(frame), time), numbers[self.envs], frame)]
        self.deal, self.trajectory, self.position = deal, numbers.copy(), 0
        return np.concatenate([waiting, np.flatnonzero(is_lost)])

    def _close_part(self, stop: int) -> None:
        """Put the segments that were begun into the plan, each up to the next of its env, or to time `stop`."""
        env, time, trajectory, frame = _joined(self.begun)
        order = stable_order(env)  # those of an env were begun one after the other
        env, time = env[order], time[order]
        end = np.full(len(env), stop)
        np.copyto(end[:-1], time[1:], where=env[1:] == env[:-1])
        pieces = Pieces(env, time, trajectory[order], frame[order], end - time)
        if not (has_frames := end > time).all():
            pieces = Pieces(*(column[has_frames] for column in pieces))
        self.parts.append(DealPart(self.deal, pieces, Ends(*_joined(self.ends or [_NO_ENDS]))))
        self.begun, self.ends = [], []

    def plan(self) -> Plan:
        """Close what is open behind the look at time T, and give the plan."""
        self._repeat_last(self.envs[self.is_exhausted[self.envs]])
        self._close_part(self.num_steps + 1)
        times, envs = _joined(self.firsts)
        inside = times < self.num_steps
        return Plan(self.num_steps, tuple(self.parts), times[inside], envs[inside], self.num_valid)

    def _repeat_last(self, envs: Int64s) -> None:
        """An exhausted env shows its last frame again at every time that is left."""
        if not len(envs):
            return
        count = self.num_steps + 1 - self.begin[envs]
        env, time = np.repeat(envs, count), counted_from(self.begin[envs], count)
        trajectory = self.trajectory[env]
        self.begun.append((env, time, trajectory, self.deal.lengths[trajectory] - 1))
        within = time < self.num_steps
        self.ends.append(Ends(env[within], time[within], trajectory[within]))

    def state_after(self) -> StreamState:
        """Where the envs stand after the last step."""
        steps = np.where(self.is_exhausted, 0, self.num_steps - self.begin)
        is_first = self.is_first & (steps == 0) & ~self.is_exhausted
        return StreamState(self.trajectory, self.frame + steps, is_first, self.is_exhausted, self.position)


def _joined(rows: Sequence[tuple[Int64s, ...]]) -> tuple[Int64s, ...]:
    if len(rows) == 1:
        return rows[0]
    return tuple(np.concatenate(column) for column in zip(*rows, strict=True))


_EMPTY = np.zeros(0, np.int64)
_NO_ENDS = Ends(_EMPTY, _EMPTY, _EMPTY)
