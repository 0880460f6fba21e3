"""Passes over a dataset: their trajectories, the order of these, and the frames at which they start.

The position of a trajectory in a pass and its first frame depend only on (seed, pass) and on the
trajectory. New, deleted or unreadable trajectories do not change the order of the others. So a
resume needs only the trajectory that was dealt last. One process scans the folders for all
processes (`sources/processes/process_group.py`): when a pass begins and, with `refresh_s`, within a
pass. After such a scan a pass has two sections, each with its own order: the new trajectories, and
the rest.
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
from ..blocks.trajectory_index import Int64s, TrajectoryIndex, stable_order
from ..sources.epoch import Epoch, num_upto
from ..sources.live_source import LiveSource
from ..sources.processes.listing_messages import ListingMessages
from ..sources.processes.process_group import Agree, current_shard
from ..sources.rows.cached_rows import CachedRows
from ..sources.rows.row_source import RowSource
from ..sources.scanner import BlocksInUse
from .step_planner import Deal, Position, go_on_with


class Undecided(Exception):
    """A scan of the folders is due; the trajectories of the pass are not known before it."""


#: End, writer and number of a trajectory (`TrajectoryIndex.name`).
Name = Sequence[Any]
#: Purposes of random keys: the order of a pass, and the first frames of its trajectories.
_ORDER = 0
_STARTS = 1
_MOST_FRAMES = 1 << 62
#: Batches between two scans, at most.
_MOST_BATCHES = 1 << 20
_NONE = np.zeros(0, np.int64)
#: Numbers reserved for the passes of one epoch, so that passes of different epochs have different
#: numbers.
_PASSES_AN_EPOCH = 1 << 20


@dataclass(frozen=True)
class PassOptions:
    """Options of `RolloutDataset` that choose and order trajectories.

    Attributes:
        poll_interval_s: Seconds between scans while waiting for trajectories. See `RolloutDataset`
            for the others.
    """

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
        """Whether trajectories may still be recorded, so that the first pass waits for them."""
        return bool(self.keep_latest_n_trajs) or self.refresh_s is not None

    def has_pass(self, number: int) -> bool:
        """Return whether there is a pass with this number."""
        return self.is_endless or number < self.dataset_loops


class Section(NamedTuple):
    """Trajectories of a pass from one scan; plain data.

    Attributes:
        bounds: Names of the first and the last trajectory, in the order of completion; None if
            there are none.
        dealt: Name of the trajectory that was dealt last; None if none was.
        upto: Only trajectories that are complete in the blocks up to this number of each writer;
            None: all.
        since: Only trajectories that are not; None: all.
    """

    bounds: list[Name] | None
    dealt: Name | None = None
    upto: Mapping[str, int] | None = None
    since: Mapping[str, int] | None = None


def frame_range(value: Any) -> tuple[int, int]:
    """Return a checked `starting_frame_range`."""
    try:
        start, stop = (operator.index(bound) for bound in value)
    except (TypeError, ValueError):
        start = stop = 0
    if not 0 <= start < stop <= _MOST_FRAMES:
        raise UsageError(
            "starting_frame_range must be (start, stop), two integers with 0 <= start < stop, "
            f"got {value!r}."
        )
    return start, stop


def choose(
    index: TrajectoryIndex, options: PassOptions, bounds: Sequence[Name] | None = None
) -> Int64s:
    """Return the trajectories that a pass delivers: int64, in the order of completion.

    `bounds` are the first and the last trajectory of a pass that has begun. Then only trajectories
    between them are returned, without deleted ones.
    """
    is_eligible = index.is_present()
    if options.are_data_coming:
        is_eligible &= index.is_complete()
    eligible = np.flatnonzero(is_eligible)
    if bounds is None:
        return eligible[-options.keep_latest_n_trajs :]
    (first_end, first_writer, first_number), (end, writer, number) = bounds
    first = index.num_before(first_end, first_writer, first_number)
    stop = index.num_before(end, writer, number + 1)
    return eligible[eligible.searchsorted(first) : eligible.searchsorted(stop)]


def members(index: TrajectoryIndex, options: PassOptions, section: Section) -> Int64s:
    """Return the trajectories of a section without deleted ones: int64, in the order of completion."""
    trajectories = choose(index, options, section.bounds)
    if section.upto is not None:
        trajectories = trajectories[_was_complete(index, trajectories, section.upto)]
    if section.since is not None:
        trajectories = trajectories[~_was_complete(index, trajectories, section.since)]
    return trajectories


def _was_complete(
    index: TrajectoryIndex, trajectories: Int64s, upto: Mapping[str, int]
) -> np.ndarray:
    """Return which trajectories are complete in the blocks up to a number of each writer: bool."""
    present = index.blocks[: index.num_present]
    then = TrajectoryIndex(
        [block for block in present if block.sequence <= upto.get(block.writer, -1)]
    )
    place = index.places_in(then, trajectories)
    return np.asarray((place >= 0) & np.append(then.is_complete(), False)[place])


def sections_at(deal: Deal, position: int) -> tuple[Section, Section | None]:
    """Return the sections of a deal after `position` trajectories: the rest, and the section of the last scan."""
    rest, fresh = deal.sections
    num_new = min(position, deal.num_fresh)
    if fresh is not None and num_new:
        fresh = fresh._replace(dealt=deal.source.index.name(int(deal.order[num_new - 1])))
    if position > num_new:
        rest = rest._replace(dealt=deal.source.index.name(int(deal.order[position - 1])))
    return rest, fresh


def _bounds(index: TrajectoryIndex, pool: Int64s) -> list[Name] | None:
    """Return the names of the first and the last trajectory; None without trajectories."""
    if not len(pool):
        return None
    return [index.name(int(pool[0])), index.name(int(pool[-1]))]


def pass_order(
    index: TrajectoryIndex, pool: Int64s, options: PassOptions, number: int
) -> tuple[Int64s, Int64s]:
    """Return the trajectories of a pass in their order, and the first frame of each.

    The first frame is uniform over the part of `starting_frame_range` within the trajectory; 0 if
    that part is empty.
    """
    epoch = Epoch(options.seed, number)
    low, high = options.starting_frame_range
    starts = np.zeros(len(pool), np.int64)
    if high > 1:
        room = np.minimum(high, index.lengths[pool]) - low
        keys = epoch.with_purpose(_STARTS).keys(index, pool)
        bits = (keys >> np.uint64(64 - RANDOM_BITS)).view(np.int64)
        starts = np.where(room > 0, low + scaled(bits, np.maximum(room, 1)), 0)
    if not options.random_shuffle_traj_order:
        return pool, starts
    place = stable_order(_sort_keys(epoch.with_purpose(_ORDER).keys(index, pool)))
    if high > 1:
        starts = starts[place]
    return pool[place], starts


def num_dealt(
    index: TrajectoryIndex, order: Int64s, options: PassOptions, number: int, last: Name
) -> int:
    """Return the number of trajectories of a pass up to the one that was dealt `last`, which may be deleted."""
    end, writer, trajectory = last
    if not options.random_shuffle_traj_order:
        return int(np.searchsorted(order, index.num_before(end, writer, trajectory + 1)))
    places = np.flatnonzero(order == index.find([(writer, trajectory)])[0])
    if len(places):
        return int(places[0]) + 1
    epoch = Epoch(options.seed, number).with_purpose(_ORDER)
    key = _sort_keys(epoch.key_of_name(writer, trajectory))[0]
    return num_upto(order, _sort_keys(epoch.keys(index, order)), key, index.num_before(*last))


def _sort_keys(keys: np.ndarray) -> np.ndarray:
    """Return the sort keys of a pass: the upper halves of random keys. Equal keys keep the order of the pool."""
    upper: np.ndarray = keys >> np.uint64(32)
    return upper


def wait_for_trajectories(
    source: LiveSource, wanted: int, options: PassOptions, in_use: BlocksInUse = tuple
) -> None:
    """Scan the folders until a pass can use `wanted` trajectories; with 0 scan once.

    Raises:
        WaitTimeoutError: There are fewer after `wait_timeout_s`.
    """

    def count() -> int:
        source.refresh(in_use)
        return len(choose(source.snapshot().index, options)) if wanted else 0

    num_usable = count()
    if num_usable >= wanted:
        return
    deadline_s = time.monotonic() + options.wait_timeout_s
    with tqdm(
        total=wanted, initial=num_usable, desc="waiting for trajectories", unit="traj"
    ) as bar:
        while num_usable < wanted:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise _not_in_time(source, wanted, num_usable, options)
            time.sleep(min(options.poll_interval_s, left_s))
            num_usable = count()
            bar.update(min(num_usable, wanted) - bar.n)


def _not_in_time(
    source: LiveSource, wanted: int, num_usable: int, options: PassOptions
) -> WaitTimeoutError:
    where = ", ".join(map(str, source.paths))
    if source.missing is None:
        problem = f"{where!r} has {num_usable} complete trajectories, expected {wanted}."
    else:
        problem = source.missing.message
    options_to_change = "increase wait_timeout_s"
    if options.keep_latest_n_trajs:
        options_to_change += " or decrease keep_latest_n_trajs"
    error = WaitTimeoutError(
        f"{problem} The wait ended after {options.wait_timeout_s:g} s. "
        f"Record more trajectories, {options_to_change}."
    )
    error.__cause__ = source.missing
    return error


@dataclass(eq=False)
class Dealer:
    """Orders the passes of one epoch.

    Attributes:
        source: The folders.
        options: Options that choose and order trajectories.
        epoch: Number of the epoch; each has other permutations and first frames.
        keeps_on: Device to which the frames are copied first; None to read them from the files.
        skips: Whether damaged trajectories are skipped; if not, they raise.
        agree: Exchanges the result of a scan between the processes.
        is_cut_off: Whether other ranks cannot exchange scans. Then the folders must not change from
            pass to pass.
        is_shared: Whether several processes share frames in memory: one copies them, and the others
            map the copy.
    """

    source: LiveSource
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
            raise UsageError(f"{self._where} has no trajectories left for the next pass.")
        return begun

    @property
    def _where(self) -> str:
        return repr(", ".join(map(str, self.source.paths)))

    def number_of(self, pass_number: int) -> int:
        """Return the number of a pass among the passes of all epochs."""
        return pass_number + self.epoch * _PASSES_AN_EPOCH

    def resumed(self, turn: int, upto: Mapping[str, int], played: Lengths) -> RowSource:
        """Return a snapshot for a pass that began in another process, with all trajectories that are `played`."""
        self._agreed(turn, 0, tuple)
        snapshot = self.source.snapshot(upto)
        missing = lacking(snapshot.index, played)
        if missing and len(snapshot.index):
            return self.source.snapshot(upto, missing)
        return snapshot

    def dealt(
        self,
        number: int,
        turn: int,
        snapshot: RowSource,
        in_use: Int64s,
        sections: tuple[Section, Section | None],
        before: Deal | None = None,
    ) -> Deal:
        """Return the rest of pass `number` in a snapshot: first the section of the last scan, then the other one."""
        rest, fresh = sections
        ordinal = self.number_of(number)
        order, starts = self._left_of(snapshot.index, rest, ordinal)
        new, new_starts = self._left_of(snapshot.index, fresh, ordinal)
        if len(new):
            order = np.concatenate([new, order])
            starts = np.concatenate([new_starts, starts])
        snapshot = self._kept(turn, snapshot, (order, in_use), before)
        return Deal(
            snapshot.index.lengths, order, starts, number, snapshot, turn, sections, len(new)
        )

    def _left_of(
        self, index: TrajectoryIndex, section: Section | None, number: int
    ) -> tuple[Int64s, Int64s]:
        """Return the trajectories of a section that were not dealt yet, in order, and their first frames."""
        if section is None or section.bounds is None:
            return _NONE, _NONE
        order, starts = pass_order(
            index, members(index, self.options, section), self.options, number
        )
        done = (
            0
            if section.dealt is None
            else num_dealt(index, order, self.options, number, section.dealt)
        )
        return order[done:], starts[done:]

    def needed(self, position: Position) -> Int64s:
        """Return the trajectories that stay readable after their files are deleted.

        These are the played ones and, with `refresh_s`, the rest of the deal, which is used until
        the next scan.
        """
        played = position.state.trajectory
        rest = (
            position.deal.order[position.state.position :]
            if self.options.refresh_s is not None
            else _NONE
        )
        return np.union1d(played[played >= 0], rest)

    def is_due(self, position: Position, is_alone: bool) -> bool:
        """Return whether a scan within the pass is due. It is not before the section of the last scan was dealt."""
        wait_s = self.options.refresh_s
        if wait_s is None or position.state.position < position.deal.num_fresh:
            return False
        if is_alone:
            return time.monotonic() - self._looked_s >= wait_s / 2
        return position.left == 0

    def refreshed(self, position: Position) -> Position:
        """Scan within a pass. New trajectories are dealt next, before the rest; none is dealt twice."""
        state, deal, _ = position
        snapshot, in_use, left = self._seen(deal.turn + 1, 0, deal, state.trajectory)
        if snapshot.index is deal.source.index:
            return Position(state, replace(deal, turn=deal.turn + 1), left)
        rest, fresh = sections_at(deal, state.position)
        # Also of writers whose blocks are not listed now, but may be listed again.
        since = dict(fresh.since or {}) if fresh is not None else {}
        for writer, sequence in deal.source.index.writers_upto().items():
            since[writer] = max(sequence, since.get(writer, -1))
        pool = choose(snapshot.index, self.options)
        if self.options.keep_latest_n_trajs and rest.bounds is not None and len(pool):
            first, last = rest.bounds
            first = max(list(first), snapshot.index.name(int(pool[0])))
            rest = rest._replace(bounds=[first, last])
        pool = pool[~_was_complete(snapshot.index, pool, since)]
        rest = rest._replace(upto=rest.upto or since)
        sections = (rest, Section(_bounds(snapshot.index, pool), since=since))
        new = self.dealt(deal.number, deal.turn + 1, snapshot, in_use, sections, deal)
        return go_on_with(state, deal, new, in_use, self.following)._replace(left=left)

    def _begin(self, number: int, before: Deal | None, in_use: Int64s) -> tuple[Deal, Int64s]:
        """Scan for trajectories and order a pass; return it and the numbers of the trajectories `in_use` in it."""
        turn = before.turn + 1 if before is not None else 0
        wanted = self.options.keep_latest_n_trajs or int(self.options.refresh_s is not None)
        snapshot, in_use, _ = self._seen(turn, wanted, before, in_use)
        pool = choose(snapshot.index, self.options)
        order, starts = pass_order(snapshot.index, pool, self.options, self.number_of(number))
        sections = (Section(_bounds(snapshot.index, pool)), None)
        snapshot = self._kept(turn, snapshot, (order, in_use), before)
        return Deal(
            snapshot.index.lengths, order, starts, number, snapshot, turn, sections, 0
        ), in_use

    def _seen(
        self, turn: int, wanted: int, before: Deal | None, in_use: Int64s
    ) -> tuple[RowSource, Int64s, int]:
        """Synchronize the snapshot across processes.

        Returns:
            The snapshot; the numbers in it of the trajectories `in_use`, which stay readable; and
            the number of batches until the next scan.
        """
        index = before.source.index if before is not None else None
        blocks_in_use = (
            partial(index.blocks_of, in_use[in_use >= 0]) if index is not None else tuple
        )
        left = self._agreed(turn, wanted, blocks_in_use)
        snapshot = self.source.snapshot()
        if self.options.refresh_s is not None and not self.source.holds_blocks:
            raise UsageError(
                "refresh_s requires block files, and "
                f"{self._where} has the format {self.source.format!r}. "
                "Convert it with rollout_data.convert(path, new_path), or omit refresh_s."
            )
        if self.is_cut_off and index is not None and _content(index) != _content(snapshot.index):
            raise UsageError(
                f"{self._where} changed before this pass. Workers of a plain DataLoader cannot "
                "follow changes in several ranks. "
                "Use rollout_data.loader(dataset, num_workers=...)."
            )
        if before is not None and index is not None and index is not snapshot.index:
            was_lost = before.source.is_lost[in_use]
            in_use = _found_again(index, snapshot.index, in_use)
            snapshot.is_lost[in_use[was_lost & (in_use >= 0)]] = True
        return snapshot, in_use, left

    def _agreed(self, turn: int, wanted: int, in_use: BlocksInUse) -> int:
        """Load the listing of the process that scans for all; return the number of batches until the next scan."""
        message, left, spot = self.agree(turn, partial(self._look, wanted, in_use))
        listing = self._listings.restore(message)
        if listing is not None:
            self.source.adopt(listing, spot)
            self._listings.last = self.source.listing()  # of the shared memory, not of the message
        return int(left)

    def _look(self, wanted: int, in_use: BlocksInUse) -> Any:
        """Scan the folders until they have `wanted` trajectories.

        Returns:
            The listing, None if it has not changed; the number of batches that others may plan
            before the next scan; and the shared memory with the index for other processes of this
            machine.
        """
        wait_for_trajectories(self.source, wanted, self.options, in_use)
        now_s = time.monotonic()
        self._looked_s = now_s
        fitting = (
            self._num_batches
            * (self.options.refresh_s or 0.0)
            / 2
            / max(now_s - self._agreed_s, 1e-9)
        )
        self._num_batches = max(1, int(min(fitting, 2 * self._num_batches, _MOST_BATCHES)))
        self._agreed_s = now_s
        spot = None
        if self.is_shared or current_shard().total > 1:
            spot = self.source.shared(self.source.snapshot())
        return self._listings.shorten(self.source.listing()), self._num_batches, spot

    def _kept(
        self, turn: int, snapshot: RowSource, used: tuple[Int64s, Int64s], before: Deal | None
    ) -> RowSource:
        """Copy the frames of a pass into memory, or map the copy of another process of this machine."""
        device = self.keeps_on
        if device is None:
            return snapshot
        trajectories = np.setdiff1d(np.concatenate(used), -1)
        last = before.source if before is not None else None
        copies: list[CachedRows] = []
        if (
            isinstance(last, CachedRows)
            and last.index is snapshot.index
            and last.holds(trajectories)
        ):
            copies.append(last)

        def copy_once() -> Any:
            """Copy the frames if this process has no copy; return the shared memory of the copy."""
            while not copies:
                try:
                    copies.append(CachedRows(snapshot, trajectories, device, self.is_shared))
                except DataFileError as problem:
                    self.source.leave_out(snapshot, trajectories, problem, self.skips)
            return copies[0].shared() if self.is_shared else None

        shared_copy = self.agree(f"frames_{turn}", copy_once) if self.is_shared else copy_once()
        if not copies:
            mapped = CachedRows.mapped(snapshot, shared_copy)
            if mapped is not None and mapped.holds(trajectories):
                return mapped
        copy_once()
        return copies[0]


def _content(index: TrajectoryIndex) -> Any:
    """Return a value that differs between two scans if their trajectories or edits differ."""
    return (
        index.writers_upto(),
        index.num_present,
        [block.identity for block in index.blocks if block.is_edit],
    )


def _found_again(before: TrajectoryIndex, now: TrajectoryIndex, trajectories: Int64s) -> Int64s:
    """Return the numbers of trajectories in another index; -1 for deleted and for shortened trajectories."""
    numbers = before.places_in(now, trajectories)
    has_shrunk = now.lengths[numbers] < before.lengths[trajectories] if len(now) else True
    return np.where(has_shrunk, -1, numbers)
