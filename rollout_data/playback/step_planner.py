"""Where each env stands, which frames the next T steps read, and what the new state is.

One rule: pure arithmetic. `plan_steps` reads nothing and changes nothing; it returns a plan of integers and the state
after it, which the caller keeps once the plan was carried out. Python never loops over envs.
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
ALL = slice(None)  # envs


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
        left: int64 `[N]`, how many frames of it are to come: who looks at all envs need not look their lengths up.
        is_first: bool `[N]`, the next frame is the first one delivered of its trajectory.
        is_exhausted: bool `[N]`, nothing is left for this env.
        position: How many trajectories of the current pass have been dealt.
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

    def frames(self, deal: Deal, share: slice = ALL) -> Int64s:
        """The next frame of each env of a share: int64 `[N]`; beyond the end where nothing is left."""
        frames: Int64s = deal.lengths[self.trajectory[share]] - self.left[share]
        return frames


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
        is_full: That is T for all that move, also for those that the plan does not tell.
    """

    num_steps: int
    parts: tuple[DealPart, ...]
    first_time: Int64s
    first_env: Int64s
    num_valid: Int64s
    is_full: bool


#: Begins the pass after a deal: (deal, trajectories in use) -> (next deal, their numbers in it); None at the end.
#: The number of a trajectory that is gone is -1: its env goes on with another one.
NextPass = Callable[[Deal, Int64s], "tuple[Deal, Int64s] | None"]


def deal_next(state: StreamState, envs: Int64s, deal: Deal, next_pass: NextPass) -> tuple[StreamState, Deal]:
    """Move `envs` (ascending) to the next unused trajectories, and drop those they were at."""
    walk = _Walk(state, deal, next_pass, 0, share=slice(0))
    walk.refill(envs, 0)
    return walk.state_after(), walk.deal


def go_on_with(state: StreamState, before: Deal, deal: Deal, numbers: Int64s, next_pass: NextPass) -> Position:
    """Deal from another `deal` of the same pass, where what the envs play has other `numbers`; -1 is gone.

    Envs that are exhausted, or whose trajectory is gone, are dealt to at once.
    """
    walk = _Walk(state, before, next_pass, 0, share=slice(0))
    shown = np.where(state.is_exhausted & (numbers < 0), len(deal.lengths) - 1, numbers)
    walk.refill(walk.enter(deal, shown, state.is_exhausted.nonzero()[0], 0), 0)
    return Position(walk.state_after(), walk.deal)


def share_of(plan: Plan, envs: Int64s) -> Plan:
    """Return the part of a plan that concerns some envs (ascending), which it counts from 0."""
    place = np.full(len(plan.num_valid), -1)
    place[envs] = np.arange(len(envs))

    def mine(rows: Any) -> Any:
        chosen = place[rows.env] >= 0
        rows = type(rows)(*(column[chosen] for column in rows))
        return rows._replace(env=place[rows.env])

    parts = tuple(DealPart(part.deal, mine(part.pieces), mine(part.ends)) for part in plan.parts)
    chosen = place[plan.first_env] >= 0
    first_time = plan.first_time[chosen]
    first_env = place[plan.first_env[chosen]]
    return Plan(plan.num_steps, parts, first_time, first_env, plan.num_valid[envs], plan.is_full)


def plan_steps(
    state: StreamState, deal: Deal, num_steps: int, next_pass: NextPass, envs: Int64s | None = None, share: slice = ALL
) -> tuple[Plan, StreamState, Deal]:
    """Plan the next `num_steps` steps of all envs; the plan tells those in `share`, and counts them from 0.

    An env whose trajectory ends takes the next unused one at once, in the order of (time, env);
    so the outcome does not depend on how a run is cut into calls. Only `envs` advance (None: all).

    Returns:
        The plan, the state after it, and the pass that is current then.
    """
    if envs is None and int(state.left.min()) > num_steps:
        return *_undisturbed(state, deal, num_steps, share), deal
    walk = _Walk(state, deal, next_pass, num_steps, envs, share)
    walk.run()
    return walk.plan(), walk.state_after(), walk.deal


def _undisturbed(state: StreamState, deal: Deal, num_steps: int, share: slice) -> tuple[Plan, StreamState]:
    """Plan steps in which no trajectory ends: a batch of one step of 64 envs takes 100 us instead of 140."""
    trajectory = state.trajectory[share]
    env = np.arange(len(trajectory))
    none = np.zeros(len(trajectory), np.int64)
    pieces = Pieces(env, none, trajectory, state.frames(deal, share), none + (num_steps + 1))
    first = state.is_first[share].nonzero()[0]
    plan = Plan(num_steps, (DealPart(deal, pieces, _NO_ENDS),), none[: len(first)], first, none + num_steps, True)
    no = np.zeros(len(state.left), bool)
    return plan, StreamState(state.trajectory, state.left - num_steps, no, state.is_exhausted, state.position)


class _Walk:
    """The running variables of one plan: where each env is, and which segments were begun.

    It looks at the ends of the trajectories of all envs, which are few, and lays out those of `share`.
    """

    def __init__(
        self,
        state: StreamState,
        deal: Deal,
        next_pass: NextPass,
        num_steps: int,
        envs: Int64s | None = None,
        share: slice = ALL,
    ) -> None:
        self.deal = deal
        self.next_pass = next_pass
        self.num_steps = num_steps
        self.position = state.position
        self.before = state
        self.trajectory = state.trajectory.copy()
        self.is_exhausted = state.is_exhausted.copy()
        #: The time after the last frame of what each env plays; those that do not move have as many left at the end.
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
        self.parts: list[DealPart] = []
        first = state.is_first[self.share].nonzero()[0]
        self.firsts: list[tuple[Int64s, ...]] = [(first, np.zeros_like(first))]  # of the share: env and time
        self.begun: list[tuple[Int64s, ...]] = []
        self.stops: list[tuple[Int64s, ...]] = []  # envs for which nothing is left, and from when on
        self._open_part(0)

    def run(self) -> None:
        """End segments in the order of (time, env) until all open ones outlast the last step."""
        while len(first := self._within()):
            ends, makers, made = self._in_order(first)
            times = ends >> _ENV_BITS
            envs = ends & _ENV
            stop = num_dealt = min(len(ends), len(self.deal.order) - self.position)
            trajectory = self.trajectory[envs]
            is_last = np.ones(num_dealt, bool)
            trajectory[made] = self.deal.order[self.position + makers]
            is_last[makers[made < num_dealt]] = False
            self._deal(envs[:num_dealt], times[:num_dealt], is_last)
            if num_dealt < len(ends):  # no trajectory is left: the pass ends at the next of these times
                stop = int(np.searchsorted(ends, ends[num_dealt] | _ENV))
            self.ends.append((envs[:stop], times[:stop] - 1, trajectory[:stop]))
            if stop == num_dealt:
                return
            self.refill(envs[num_dealt:stop], int(times[num_dealt]))

    def _within(self) -> Int64s:
        """Which segments end by the last step: the time after the last frame, and below it the env; sorted.

        As one number they are sorted in vector instructions.
        """
        env = (self.end <= self.num_steps).nonzero()[0]
        env = env[~self.is_exhausted[env]]
        keys: Int64s = self.end[env] << _ENV_BITS | env
        keys.sort()
        return keys

    def _in_order(self, first: Int64s) -> tuple[Int64s, Int64s, Int64s]:
        """Put the ends of what is dealt by the last step between the `first` ones, as far as the pass goes.

        The n-th end deals the n-th trajectory. One that is short ends in time too, and those behind that end deal
        later ones: this is repeated until it changes nothing, 4 to 5 times for trajectories of 300 frames. As an end
        depends on earlier ones only, there is one such order.

        Returns:
            All ends, sorted; which of them deal what ends in time, and where these ends are.
        """
        ends = first
        made = _EMPTY
        num_known = 0
        limit = (self.num_steps + 1) << _ENV_BITS
        while True:
            if len(ends) > num_known:
                num_known = len(ends) + len(ends) // 4
                chosen = slice(self.position, self.position + num_known)
                spans = self.deal.lengths[self.deal.order[chosen]] - self.deal.starts[chosen]
                short = (spans <= self.num_steps).nonzero()[0]
                spans = spans[short] << _ENV_BITS
            num_short = int(np.searchsorted(short, len(ends)))
            made_before = made
            made = ends[short[:num_short]] + spans[:num_short]
            in_time = made < limit
            made = made[in_time]
            if np.array_equal(made, made_before):
                return ends, short[:num_short][in_time], np.searchsorted(ends, made)
            # Of two sorted runs a stable sort makes one: 5,000 in 4 us, where sorting them takes 145.
            ends = np.concatenate([first, np.sort(made)])
            ends.sort(kind="stable")

    def _deal(self, envs: Int64s, times: Int64s, is_last: Any = ALL) -> None:
        """Move `envs` to the next trajectories of the pass, from `times` on; of each env one `is_last`."""
        chosen = slice(self.position, self.position + len(envs))
        trajectory = self.deal.order[chosen]
        frame = self.deal.starts[chosen]
        self.position += len(envs)
        self.begun.append((envs, times, trajectory, frame))
        envs, times, trajectory, frame = (column[is_last] for column in self.begun[-1])
        self.trajectory[envs], self.end[envs] = trajectory, times + self.deal.lengths[trajectory] - frame
        self.is_first[envs], self.is_exhausted[envs] = times == self.num_steps, False

    def refill(self, envs: Int64s, time: int) -> None:
        """Deal trajectories to `envs`, in this order, from `time` on."""
        while len(envs):
            taken = min(len(envs), len(self.deal.order) - self.position)
            self._deal(envs[:taken], np.full(taken, time))
            envs = envs[taken:]
            if len(envs):
                begun = self.next_pass(self.deal, self.trajectory)
                if begun is None:
                    self.end[envs], self.is_first[envs], self.is_exhausted[envs] = self.num_steps, False, True
                    self.stops.append((envs, np.full(len(envs), time)))
                    self.is_full &= time >= self.num_steps
                    return
                envs = self.enter(*begun, envs, time)

    def enter(self, deal: Deal, numbers: Int64s, waiting: Int64s, time: int) -> Int64s:
        """Go on with another deal; gives `waiting` and the envs whose trajectory is not in it any more."""
        is_lost = (numbers < 0) & ~self.is_exhausted
        is_lost[waiting] = False
        is_other = deal.source is not self.deal.source
        if is_other:  # in which trajectories may have grown or gone
            self._close_part(time)
            self.end += deal.lengths[numbers] - self.deal.lengths[self.trajectory]
        self.deal, self.trajectory, self.position = deal, numbers.copy(), 0
        if is_other:
            self._open_part(time)  # of this, the segments of envs that are dealt to at this time have no frames
        return np.concatenate([waiting, np.flatnonzero(is_lost)])

    def _open_part(self, time: int) -> None:
        """Go on with what is played, as part of the plan whose trajectory numbers are those of this deal."""
        env = self.shown
        trajectory = self.trajectory[self.share]
        frame = self.deal.lengths[trajectory] - self.end[self.share] + time
        #: Env, time, trajectory and frame where segments begin: those that go on, of the share; then `begun`, of all.
        self.played = env, np.full(len(env), time), trajectory[env], frame[env]
        self.num_begun = len(self.begun)
        self.ends: list[tuple[Int64s, ...]] = [_NO_ENDS]

    def _of_share(self, rows: Sequence[tuple[Int64s, ...]]) -> tuple[Int64s, ...]:
        """Join rows whose first column is the env, and give those of the share, in which it is counted from 0."""
        env, *others = _joined(rows)
        if self.share.stop - self.share.start == len(self.trajectory):
            return env, *others
        chosen = ((env >= self.share.start) & (env < self.share.stop)).nonzero()[0]
        return env[chosen] - self.share.start, *(column[chosen] for column in others)

    def _close_part(self, stop: int) -> None:
        """Put the segments that were begun into the plan, each up to the next of its env, or to time `stop`."""
        begun = self._of_share(self.begun[self.num_begun :] or [_NO_SEGMENTS])
        self.firsts.append(begun[:2])
        env, time, trajectory, frame = _joined([self.played, begun])
        order = stable_order(env)  # those of an env were begun one after the other
        env = env[order]
        time = time[order]
        end = np.full(len(env), stop)
        np.copyto(end[:-1], time[1:], where=env[1:] == env[:-1])
        pieces = Pieces(env, time, trajectory[order], frame[order], end - time)
        if not (has_frames := end > time).all():
            pieces = Pieces(*(column[has_frames] for column in pieces))
        self.parts.append(DealPart(self.deal, pieces, Ends(*self._of_share(self.ends))))

    def plan(self) -> Plan:
        """Close what is open behind the look at time T, and give the plan."""
        num_valid = np.where(self.before.is_exhausted[self.share], 0, self.num_steps)
        if self.stops or not self.is_full:
            self._repeat_last(num_valid)
        self._close_part(self.num_steps + 1)
        env, time = _joined(self.firsts)
        inside = time < num_valid[env]  # of what exhausted envs repeat, nothing is first
        firsts = time[inside], env[inside]
        return Plan(self.num_steps, tuple(self.parts), *firsts, num_valid, self.is_full)

    def _repeat_last(self, num_valid: Int64s) -> None:
        """An exhausted env of the share shows its last frame again at every time that is left."""
        envs, times = self._of_share(self.stops or [_NOWHERE])
        num_valid[envs] = times
        envs = self.shown[self.is_exhausted[self.share][self.shown]]
        count = self.num_steps + 1 - num_valid[envs]
        env = np.repeat(envs + self.share.start, count)
        time = counted_from(num_valid[envs], count)
        trajectory = self.trajectory[env]
        self.begun.append((env, time, trajectory, self.deal.lengths[trajectory] - 1))
        within = time < self.num_steps
        self.ends.append((env[within], time[within], trajectory[within]))

    def state_after(self) -> StreamState:
        """Where the envs stand after the last step."""
        return StreamState(self.trajectory, self.end - self.num_steps, self.is_first, self.is_exhausted, self.position)


def _joined(rows: Sequence[tuple[Int64s, ...]]) -> tuple[Int64s, ...]:
    if len(rows) == 1:
        return rows[0]
    return tuple(np.concatenate(column) for column in zip(*rows, strict=True))


_EMPTY = np.zeros(0, np.int64)
_NO_ENDS = Ends(_EMPTY, _EMPTY, _EMPTY)
_NO_SEGMENTS = (_EMPTY,) * 4
_NOWHERE = (_EMPTY,) * 2
