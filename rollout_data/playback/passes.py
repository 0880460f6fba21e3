"""Passes over a dataset: which trajectories, in which order, starting where.

One rule: where a trajectory stands in a pass, and where it starts, is a function of (seed, pass) and of itself.
Trajectories that come, go or cannot be read move no other, so that resuming needs only the one that was dealt last.
One process scans the folders for all (`sources/process_group.py`): when a pass begins and, with `refresh_s`,
within it. A pass then has two sections, each with an order of its own: what came at the newest look, and what is left.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from tqdm import tqdm

from storage.core.random_indices import RANDOM_BITS, scaled
from storage.errors import DataFileError, UsageError, WaitTimeoutError

from ..blocks.missing_trajectories import Lengths, lacking
from ..blocks.trajectory_index import Int64s, TrajectoryIndex, name_keys, random_keys, stable_order
from ..sources.cached_frames import CachedFrames
from ..sources.frame_store import FrameStore
from ..sources.listing_messages import ListingMessages
from ..sources.process_group import Agree, current_shard
from ..sources.source import BlocksInUse, Source
from .step_planner import Deal, Position, go_on_with


class Undecided(Exception):
    """It is time to look at the folders, and what a pass may use is not decided yet."""


#: The call that options of passes come from, for errors.
CREATE = "create a RolloutDataset"
#: End, writer and number of a trajectory (`TrajectoryIndex.name`).
Name = Sequence[Any]
_ORDER = 0
_STARTS = 1
_MOST_FRAMES = 1 << 62
_MOST_BATCHES = 1 << 20
_NONE = np.zeros(0, np.int64)
#: Passes of different epochs must never share a number.
_PASSES_AN_EPOCH = 1 << 20


@dataclass(frozen=True)
class PassOptions:
    """Which trajectories a pass delivers, and how; see `RolloutDataset`. `poll_interval_s`: how often to look."""

    dataset_loops: int = 1
    random_shuffle_traj_order: bool = False
    keep_latest_n_trajs: int = 0
    starting_frame_range: tuple[int, int] = (0, 1)
    seed: int = 0
    wait_timeout_s: float = 60.0
    poll_interval_s: float = 0.25
    refresh_s: float | None = None

    @property
    def is_endless(self) -> bool:
        return self.dataset_loops < 1

    @property
    def are_data_coming(self) -> bool:
        """Whether trajectories may still be recorded, so that it is worth waiting for the first ones."""
        return bool(self.keep_latest_n_trajs) or self.refresh_s is not None

    def has_pass(self, number: int) -> bool:
        """Return whether there is a pass of this number."""
        return self.is_endless or number < self.dataset_loops


class Section(NamedTuple):
    """Trajectories of a pass that were found at one look; plain data.

    Attributes:
        bounds: The first and the last one, in the order of completion; None if there is none.
        dealt: Which was dealt last, None if none was.
        upto, since: Blocks of each writer by which they were complete, and those by which they were not; None: all.
    """

    bounds: list[Name] | None
    dealt: Name | None = None
    upto: Mapping[str, int] | None = None
    since: Mapping[str, int] | None = None


def frame_range(given: Any) -> tuple[int, int]:
    """Check a `starting_frame_range`."""
    try:
        start, stop = (operator.index(bound) for bound in given)
    except (TypeError, ValueError):
        start = stop = 0
    if not 0 <= start < stop <= _MOST_FRAMES:
        expected = "starting_frame_range (start, stop), whole numbers with 0 <= start < stop"
        raise UsageError(CREATE, "", expected, repr(given))
    return start, stop


def choose(index: TrajectoryIndex, options: PassOptions, bounds: Sequence[Name] | None = None) -> Int64s:
    """Which trajectories a pass delivers: int64, in the order of completion.

    `bounds` are the first and the last one of a pass that has begun: those between them that are still there.
    """
    is_eligible = index.is_present()
    if options.are_data_coming:
        is_eligible &= index.is_complete()
    found = np.flatnonzero(is_eligible)
    if bounds is None:
        return found[-options.keep_latest_n_trajs :]
    (first_end, first_writer, first_number), (end, writer, number) = bounds
    first = index.num_before(first_end, first_writer, first_number)
    stop = index.num_before(end, writer, number + 1)
    return found[found.searchsorted(first) : found.searchsorted(stop)]


def members(index: TrajectoryIndex, options: PassOptions, section: Section) -> Int64s:
    """Which trajectories of a section are still there: int64, in the order of completion."""
    found = choose(index, options, section.bounds)
    if section.upto is not None:
        found = found[_was_complete(index, found, section.upto)]
    if section.since is not None:
        found = found[~_was_complete(index, found, section.since)]
    return found


def _was_complete(index: TrajectoryIndex, trajectories: Int64s, upto: Mapping[str, int]) -> np.ndarray:
    """bool, for each of these: it was complete by blocks up to this number of each writer."""
    present = index.blocks[: index.num_present]
    then = TrajectoryIndex([block for block in present if block.sequence <= upto.get(block.writer, -1)])
    place = index.places_in(then, trajectories)
    return np.asarray((place >= 0) & np.append(then.is_complete(), False)[place])


def sections_at(deal: Deal, position: int) -> tuple[Section, Section | None]:
    """Return the sections of a deal of which `position` trajectories were dealt: the rest, and the newest look's."""
    rest, fresh = deal.sections
    num_new = min(position, deal.num_fresh)
    if fresh is not None and num_new:
        fresh = fresh._replace(dealt=deal.source.index.name(int(deal.order[num_new - 1])))
    if position > num_new:
        rest = rest._replace(dealt=deal.source.index.name(int(deal.order[position - 1])))
    return rest, fresh


def _bounds(index: TrajectoryIndex, pool: Int64s) -> list[Name] | None:
    return [index.name(int(pool[0])), index.name(int(pool[-1]))] if len(pool) else None


def pass_order(index: TrajectoryIndex, pool: Int64s, options: PassOptions, number: int) -> tuple[Int64s, Int64s]:
    """Order a pass: its trajectories, and the frame at which each starts.

    A start is uniform over the part of `starting_frame_range` that lies within the trajectory; 0
    if none of it does.
    """
    low, high = options.starting_frame_range
    starts = np.zeros(len(pool), np.int64)
    if high > 1:
        room = np.minimum(high, index.lengths[pool]) - low
        keys = index.random_keys(pool, _seed(options, number, _STARTS))
        bits = (keys >> np.uint64(64 - RANDOM_BITS)).view(np.int64)
        starts = np.where(room > 0, low + scaled(bits, np.maximum(room, 1)), 0)
    if not options.random_shuffle_traj_order:
        return pool, starts
    place = stable_order(_keys(index.random_keys(pool, _seed(options, number, _ORDER))))
    return pool[place], starts[place] if high > 1 else starts


def num_dealt(index: TrajectoryIndex, order: Int64s, options: PassOptions, number: int, last: Name) -> int:
    """How many of a pass's trajectories come no later than the one that was dealt `last`, which may be gone."""
    if not options.random_shuffle_traj_order:
        return int(np.searchsorted(order, index.num_before(last[0], last[1], last[2] + 1)))
    found = np.flatnonzero(order == index.find([(last[1], last[2])])[0])
    if len(found):
        return int(found[0]) + 1
    seed = _seed(options, number, _ORDER)
    key = _keys(random_keys(name_keys([last[1]], np.zeros(1, np.int64), np.array([last[2]])), seed))[0]
    keys = _keys(index.random_keys(order, seed))
    first = np.searchsorted(keys, key)
    stop = np.searchsorted(keys, key, side="right")
    return int(first) + int(np.count_nonzero(order[first:stop] < index.num_before(*last)))


def _keys(keys: np.ndarray) -> np.ndarray:
    """By what a pass is ordered: the upper half of each trajectory's random key; then comes its place in the pool."""
    upper: np.ndarray = keys >> np.uint64(32)
    return upper


def _seed(options: PassOptions, number: int, purpose: int) -> int:
    return int(np.random.SeedSequence([options.seed, number, purpose]).generate_state(1, np.uint64)[0])


def wait_for_trajectories(source: Source, wanted: int, options: PassOptions, in_use: BlocksInUse = tuple) -> None:
    """Look at the folders until a pass may use `wanted` trajectories; with 0 look once.

    Raises:
        WaitTimeoutError: They did not come within `wait_timeout_s`.
    """

    def count() -> int:
        source.refresh(in_use)
        return len(choose(source.snapshot().index, options)) if wanted else 0

    found = count()
    if found >= wanted:
        return
    deadline = time.monotonic() + options.wait_timeout_s
    with tqdm(total=wanted, initial=found, desc="waiting for trajectories", unit="traj") as bar:
        while found < wanted:
            left = deadline - time.monotonic()
            if left <= 0:
                raise _not_in_time(source, wanted, found, options)
            time.sleep(min(options.poll_interval_s, left))
            found = count()
            bar.update(min(found, wanted) - bar.n)


def _not_in_time(source: Source, wanted: int, found: int, options: PassOptions) -> WaitTimeoutError:
    where = ", ".join(map(str, source.paths))
    expected = f"{wanted} complete ones within {options.wait_timeout_s:g} s"
    got = str(found) if source.missing is None else f"no folder {source.missing.where}"
    keeping = " or keep fewer (keep_latest_n_trajs)" if options.keep_latest_n_trajs else ""
    advice = f"Record more, wait longer (wait_timeout_s){keeping}"
    error = WaitTimeoutError("read the newest trajectories", f"of {where!r}", expected, got, advice)
    error.__cause__ = source.missing
    return error


@dataclass(eq=False)
class Dealer:
    """Orders the passes of one epoch.

    Attributes:
        source: The folders.
        options: Which trajectories, and in which order.
        epoch: Changes permutations and starts.
        keeps_on: Device to whose memory the frames are copied first; None leaves them in the files.
        skips: Leave out trajectories that are damaged, rather than raise.
        agree: How this process learns what is in the folders.
        is_cut_off: Other ranks cannot be asked what they see: the folders must not change from pass to pass.
        is_shared: Frames in memory are those of several processes: one copies them, and the others map its copy.
    """

    source: Source
    options: PassOptions
    epoch: int
    keeps_on: torch.device | None
    skips: bool
    agree: Agree
    is_cut_off: bool
    is_shared: bool
    _listings: ListingMessages = field(default_factory=ListingMessages)
    _looked_s: float = 0.0
    _agreed_s: float = 0.0
    _num_batches: int = 1

    def first(self) -> Deal:
        """Return the first pass."""
        return self._begin(0, None, np.zeros(0, np.int64))[0]

    def following(self, deal: Deal, in_use: Int64s) -> tuple[Deal, Int64s] | None:
        """Return the pass after `deal` and the numbers of the trajectories `in_use` in it; None if there is none.

        Raises:
            UsageError: No trajectory is left.
        """
        if not self.options.has_pass(deal.number + 1):
            return None
        begun = self._begin(deal.number + 1, deal, in_use)
        if not len(begun[0].order):
            raise UsageError("begin the next pass", f"over {self._where}", "at least one trajectory", "none left")
        return begun

    @property
    def _where(self) -> str:
        return repr(", ".join(map(str, self.source.paths)))

    def number_of(self, pass_number: int) -> int:
        """Number a pass among those of all epochs."""
        return pass_number + self.epoch * _PASSES_AN_EPOCH

    def resumed(self, turn: int, upto: Mapping[str, int], played: Lengths) -> FrameStore:
        """Return what a pass begun elsewhere may use, as far as it still exists, and all that is `played`."""
        self._agreed(turn, 0, tuple)
        store = self.source.snapshot(upto)
        gone = lacking(store.index, played)
        return self.source.snapshot(upto, gone) if gone and len(store.index) else store

    def dealt(
        self,
        number: int,
        turn: int,
        store: FrameStore,
        in_use: Int64s,
        sections: tuple[Section, Section | None],
        before: Deal | None = None,
    ) -> Deal:
        """Order what is left of the sections of pass `number` in a snapshot: the newest look's, then the rest."""
        (rest, fresh), ordinal = sections, self.number_of(number)
        (order, starts), (new, new_starts) = (self._left_of(store.index, one, ordinal) for one in (rest, fresh))
        if len(new):
            order = np.concatenate([new, order])
            starts = np.concatenate([new_starts, starts])
        store = self._kept(turn, store, (order, in_use), before)
        return Deal(store.index.lengths, order, starts, number, store, turn, sections, len(new))

    def _left_of(self, index: TrajectoryIndex, section: Section | None, number: int) -> tuple[Int64s, Int64s]:
        """Order what was not dealt yet of a section."""
        if section is None or section.bounds is None:
            return _NONE, _NONE
        order, starts = pass_order(index, members(index, self.options, section), self.options, number)
        done = 0 if section.dealt is None else num_dealt(index, order, self.options, number, section.dealt)
        return order[done:], starts[done:]

    def needed(self, position: Position) -> Int64s:
        """Trajectories whose files are kept when they are gone: what is played and, up to the next look, the rest."""
        played = position.state.trajectory
        rest = position.deal.order[position.state.position :] if self.options.refresh_s is not None else _NONE
        return np.union1d(played[played >= 0], rest)

    def is_due(self, position: Position, is_alone: bool) -> bool:
        """Return whether it is time to look within a pass; what came at the last look was dealt."""
        wait_s = self.options.refresh_s
        if wait_s is None or position.state.position < position.deal.num_fresh:
            return False
        return time.monotonic() - self._looked_s >= wait_s / 2 if is_alone else position.left == 0

    def refreshed(self, position: Position) -> Position:
        """Look within a pass: what is new is dealt next, before the rest, and what was dealt is not dealt again."""
        state, deal, _ = position
        store, in_use, left = self._seen(deal.turn + 1, 0, deal, state.trajectory)
        if store.index is deal.source.index:
            return Position(state, replace(deal, turn=deal.turn + 1), left)
        rest, fresh = sections_at(deal, state.position)
        since = dict(fresh.since or {}) if fresh is not None else {}  # of blocks that may be shown again, too
        for writer, sequence in deal.source.index.writers_upto().items():
            since[writer] = max(sequence, since.get(writer, -1))
        pool = choose(store.index, self.options)
        if self.options.keep_latest_n_trajs and rest.bounds is not None and len(pool):
            rest = rest._replace(bounds=[max(list(rest.bounds[0]), store.index.name(int(pool[0]))), rest.bounds[1]])
        pool = pool[~_was_complete(store.index, pool, since)]
        sections = rest._replace(upto=rest.upto or since), Section(_bounds(store.index, pool), since=since)
        new = self.dealt(deal.number, deal.turn + 1, store, in_use, sections, deal)
        return go_on_with(state, deal, new, in_use, self.following)._replace(left=left)

    def _begin(self, number: int, before: Deal | None, in_use: Int64s) -> tuple[Deal, Int64s]:
        """Look for new trajectories and order a pass."""
        turn = before.turn + 1 if before is not None else 0
        wanted = self.options.keep_latest_n_trajs or int(self.options.refresh_s is not None)
        store, in_use, _ = self._seen(turn, wanted, before, in_use)
        pool = choose(store.index, self.options)
        order, starts = pass_order(store.index, pool, self.options, self.number_of(number))
        sections = Section(_bounds(store.index, pool)), None
        store = self._kept(turn, store, (order, in_use), before)
        return Deal(store.index.lengths, order, starts, number, store, turn, sections, 0), in_use

    def _seen(self, turn: int, wanted: int, before: Deal | None, in_use: Int64s) -> tuple[FrameStore, Int64s, int]:
        """Agree on what is there; give it, the numbers of what is `in_use`, which stays readable, and `left`."""
        index = before.source.index if before is not None else None
        blocks_in_use = partial(index.blocks_of, in_use[in_use >= 0]) if index is not None else tuple
        left = self._agreed(turn, wanted, blocks_in_use)
        store = self.source.snapshot()
        if self.options.refresh_s is not None and not self.source.holds_blocks:
            advice = "Convert it first: rollout_data.convert(path, new_path); or leave out refresh_s"
            got = f"data of the format {self.source.format!r}"
            raise UsageError("refresh", f"a pass over {self._where}", "block files", got, advice)
        if self.is_cut_off and index is not None and _content(index) != _content(store.index):
            expected = "folders that stay as they are, behind a plain DataLoader in several ranks"
            advice = "Use rollout_data.loader(dataset, num_workers=...), which asks rank 0"
            raise UsageError("begin the next pass", f"over {self._where}", expected, "a change", advice)
        if before is not None and index is not None and index is not store.index:
            was_lost = before.source.is_lost[in_use]
            in_use = _found_again(index, store.index, in_use)
            store.is_lost[in_use[was_lost & (in_use >= 0)]] = True
        return store, in_use, left

    def _agreed(self, turn: int, wanted: int, in_use: BlocksInUse) -> int:
        """Take over what the process that looks for all has seen; give the batches until the next look."""
        told, left, spot = self.agree(turn, partial(self._look, wanted, in_use))
        if (listing := self._listings.restore(told)) is not None:
            self.source.adopt(listing, spot)
            self._listings.last = self.source.listing()  # of the shared memory, not of the message
        return int(left)

    def _look(self, wanted: int, in_use: BlocksInUse) -> Any:
        """Look at the folders, until they hold `wanted` trajectories.

        Returns:
            What is there, None if that was said; how many batches others may plan before the next look; and where
            others of this machine find the index.
        """

        wait_for_trajectories(self.source, wanted, self.options, in_use)
        self._looked_s = now_s = time.monotonic()
        fitting = self._num_batches * (self.options.refresh_s or 0.0) / 2 / max(now_s - self._agreed_s, 1e-9)
        self._num_batches = max(1, int(min(fitting, 2 * self._num_batches, _MOST_BATCHES)))
        self._agreed_s = now_s
        spot = self.source.shared(self.source.snapshot()) if self.is_shared or current_shard().total > 1 else None
        return self._listings.shorten(self.source.listing()), self._num_batches, spot

    def _kept(self, turn: int, store: FrameStore, used: tuple[Int64s, Int64s], before: Deal | None) -> FrameStore:
        """Copy the frames that are used into memory, or map what another process of this machine has copied."""
        if (device := self.keeps_on) is None:
            return store
        trajectories = np.setdiff1d(np.concatenate(used), -1)
        last = before.source if before is not None else None
        made: list[CachedFrames] = []
        if isinstance(last, CachedFrames) and last.index is store.index and last.holds(trajectories):
            made.append(last)

        def make() -> Any:
            while not made:
                try:
                    made.append(CachedFrames(store, trajectories, device, self.is_shared))
                except DataFileError as problem:
                    self.source.leave_out(store, trajectories, problem, self.skips)
            return made[0].shared() if self.is_shared else None

        told = self.agree(f"frames_{turn}", make) if self.is_shared else make()
        if not made and (found := CachedFrames.mapped(store, told)) is not None and found.holds(trajectories):
            return found
        make()
        return made[0]


def _content(index: TrajectoryIndex) -> Any:
    return index.writers_upto(), index.num_present, [block.identity for block in index.blocks if block.is_edit]


def _found_again(before: TrajectoryIndex, now: TrajectoryIndex, trajectories: Int64s) -> Int64s:
    """Numbers of trajectories in another index; -1 for those that are gone, or have lost their last part."""
    numbers = before.places_in(now, trajectories)
    has_shrunk = now.lengths[numbers] < before.lengths[trajectories] if len(now) else True
    return np.where(has_shrunk, -1, numbers)
