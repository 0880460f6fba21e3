"""Passes over a dataset: their trajectories, the order of the trajectories, and their first frames.

The position of a trajectory in a pass and its first frame depend only on (seed, pass) and on the
trajectory. New, deleted or unreadable trajectories do not change the order of the other
trajectories. So a stream resumes from the name of the trajectory that was assigned last. One
process scans the folders for all processes (`sources/processes/process_group.py`): when a pass
begins and, with `refresh_s`, within a pass. After such a scan a pass has two sections, each with
its own order: the new trajectories, and the rest.
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

from ..blocks.trajectory_index import Int64s, TrajectoryIndex, stable_order
from ..sources.epoch import Epoch, num_upto
from ..sources.live_source import LiveSource
from ..sources.processes.listing_messages import ListingMessages
from ..sources.processes.process_group import Agree, current_shard
from ..sources.rows.cached_rows import CachedRows
from ..sources.rows.row_source import RowSource
from ..sources.scanner import BlocksInUse
from .step_planner import PassOrder, Position, switch_pass_order


class Undecided(Exception):
    """The next pass needs a scan of the folders first."""


#: Name of a trajectory: end time, writer and number (`TrajectoryIndex.name`). It is the same in every
#: snapshot. The position of a trajectory in the index of a snapshot may change from scan to scan.
Name = Sequence[Any]
#: Purposes of random keys. Keys with different purposes are independent: the order of a pass, and
#: the first frames of its trajectories.
_ORDER = 0
_STARTS = 1
_MOST_FRAMES = 1 << 62
#: Maximum number of batches between two scans.
_MOST_BATCHES = 1 << 20
_NONE = np.zeros(0, np.int64)
#: Pass k of epoch e has the number `k + e * _PASSES_AN_EPOCH` among the passes of all epochs. Passes
#: with different numbers have different random keys.
_PASSES_AN_EPOCH = 1 << 20


@dataclass(frozen=True)
class PassOptions:
    """Options of `RolloutDataset` that choose and order trajectories.

    Attributes:
        poll_interval_s: Seconds between scans while waiting for trajectories. The other options are
            documented in `RolloutDataset`.
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
    def waits_for_data(self) -> bool:
        """Whether the first pass waits for trajectories that may still be recorded."""
        return bool(self.keep_latest_n_trajs) or self.refresh_s is not None

    def has_pass(self, number: int) -> bool:
        """Return whether there is a pass with this number."""
        return self.is_endless or number < self.dataset_loops


class Section(NamedTuple):
    """Description of a subset of the trajectories of a pass, as plain data for a saved state.

    The trajectories themselves are computed by `members`, also from a later snapshot.

    Attributes:
        bounds: Names of the first and the last trajectory, in the order of completion; None for an
            empty section.
        last_assigned: Name of the trajectory that was assigned last; None before the first one.
        upto: Map from writer to the number of its last block. Only trajectories that are complete
            in the blocks up to this number belong to the section. None: no limit.
        since: Map from writer to the number of its last block. Trajectories that are complete in
            the blocks up to this number do not belong to the section. None: no limit.
    """

    bounds: list[Name] | None
    last_assigned: Name | None = None
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
    """Choose the trajectories of a pass: int64, in the order of completion.

    For a pass that has begun, pass the names of its first and its last trajectory as `bounds`. The
    result then has the trajectories from the first to the last that still exist.
    """
    is_eligible = index.is_present()
    if options.waits_for_data:
        is_eligible &= index.is_complete()
    eligible = np.flatnonzero(is_eligible)
    if bounds is None:
        return eligible[-options.keep_latest_n_trajs :]
    (first_end, first_writer, first_number), (end, writer, number) = bounds
    first = index.num_before(first_end, first_writer, first_number)
    stop = index.num_before(end, writer, number + 1)
    return eligible[eligible.searchsorted(first) : eligible.searchsorted(stop)]


def members(index: TrajectoryIndex, options: PassOptions, section: Section) -> Int64s:
    """Return the existing trajectories of a section: int64, in the order of completion."""
    trajectories = choose(index, options, section.bounds)
    if section.upto is not None:
        trajectories = trajectories[_was_complete(index, trajectories, section.upto)]
    if section.since is not None:
        trajectories = trajectories[~_was_complete(index, trajectories, section.since)]
    return trajectories


def _was_complete(
    index: TrajectoryIndex, trajectories: Int64s, upto: Mapping[str, int]
) -> np.ndarray:
    """Return whether each trajectory was complete at an earlier scan: `[len(trajectories)]` bool.

    `upto` maps each writer to the number of its last block at that scan.
    """
    present = index.blocks[: index.num_present]
    then = TrajectoryIndex(
        [block for block in present if block.sequence <= upto.get(block.writer, -1)]
    )
    place = index.places_in(then, trajectories)
    return np.asarray((place >= 0) & np.append(then.is_complete(), False)[place])


def sections_at(pass_order: PassOrder, position: int) -> tuple[Section, Section | None]:
    """Return the sections of a pass, with the trajectories that were assigned last.

    Args:
        pass_order: The pass.
        position: Number of trajectories of `pass_order` that were assigned to envs.

    Returns:
        The section with the older trajectories, and the section with the new trajectories of the
        last scan; the second is None if no scan within the pass found any.
    """
    rest, fresh = pass_order.sections
    num_new = min(position, pass_order.num_fresh)
    if fresh is not None and num_new:
        fresh = fresh._replace(
            last_assigned=pass_order.source.index.name(int(pass_order.trajectories[num_new - 1]))
        )
    if position > num_new:
        rest = rest._replace(
            last_assigned=pass_order.source.index.name(int(pass_order.trajectories[position - 1]))
        )
    return rest, fresh


def _bounds(index: TrajectoryIndex, pool: Int64s) -> list[Name] | None:
    """Return the names of the first and the last trajectory in `pool`; None if it is empty."""
    if not len(pool):
        return None
    return [index.name(int(pool[0])), index.name(int(pool[-1]))]


def order_trajectories(
    index: TrajectoryIndex, pool: Int64s, options: PassOptions, number: int
) -> tuple[Int64s, Int64s]:
    """Compute the order of a pass and the first frame of each trajectory.

    A first frame is drawn uniformly from the frames of `starting_frame_range` that the trajectory
    has. It is 0 if the trajectory has none of them.

    Args:
        index: Index of all trajectories.
        pool: int64, trajectories of the pass in the order of completion.
        options: Options of the order and of the first frames.
        number: Number of the pass among the passes of all epochs.

    Returns:
        The trajectories of `pool` in the order of the pass, and their first frames: int64 each.
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


def num_assigned(
    index: TrajectoryIndex, order: Int64s, options: PassOptions, number: int, last: Name
) -> int:
    """Return the number of trajectories in `order` up to and including `last`.

    `last` is the name of a trajectory. If it was deleted, the result counts the trajectories before
    its former place.
    """
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
    """Return the upper halves of random keys, by which the trajectories of a pass are sorted.

    Trajectories with equal sort keys stay in the order of completion.
    """
    upper: np.ndarray = keys >> np.uint64(32)
    return upper


def wait_for_trajectories(
    source: LiveSource, wanted: int, options: PassOptions, in_use: BlocksInUse = tuple
) -> None:
    """Scan the folders until a pass can use `wanted` trajectories. If it is 0, scan once.

    Raises:
        WaitTimeoutError: The folders have fewer trajectories after `wait_timeout_s`.
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
class PassScheduler:
    """Orders the passes of one epoch and scans the folders for them.

    Attributes:
        source: The folders.
        options: Options that choose and order trajectories.
        epoch: Number of the epoch, which changes permutations and first frames.
        keeps_on: Device to which all frames are copied before reading; None: read from the files.
        skips: Whether damaged trajectories are skipped. Otherwise they raise an error.
        agree: Function that exchanges the result of a scan between the processes.
        is_cut_off: Whether ranks cannot exchange scans. Then the folders must not change from pass
            to pass.
        is_shared: Whether several processes share frames in memory. One process copies them, and
            the other processes map the copy.
        missing: Trajectories that envs played when a loaded state was saved, and that were deleted
            or shortened since then. Maps (writer, number) to the former number of frames. In plans
            they have the numbers after the last trajectory of a snapshot. Their remaining frames
            are delivered with `valid=False`, so that the order of all other frames stays the same.
    """

    source: LiveSource
    options: PassOptions
    epoch: int
    keeps_on: torch.device | None
    skips: bool
    agree: Agree
    is_cut_off: bool
    is_shared: bool
    missing: dict[tuple[str, int], int] = field(default_factory=dict)
    _listings: ListingMessages = field(default_factory=ListingMessages)
    _last_scan_s: float = 0.0
    _last_synchronized_s: float = 0.0
    _num_batches: int = 1

    def first(self) -> PassOrder:
        """Begin the first pass."""
        return self._begin(0, None, np.zeros(0, np.int64))[0]

    def following(self, pass_order: PassOrder, in_use: Int64s) -> tuple[PassOrder, Int64s] | None:
        """Begin the pass after `pass_order`.

        Args:
            pass_order: The current pass.
            in_use: int64, numbers of the trajectories that envs play.

        Returns:
            The next pass, and the numbers that the trajectories `in_use` have in its snapshot, -1
            for deleted trajectories. None after the last pass.

        Raises:
            UsageError: No trajectory is left.
        """
        if not self.options.has_pass(pass_order.number + 1):
            return None
        begun = self._begin(pass_order.number + 1, pass_order, in_use)
        if not len(begun[0].trajectories):
            raise UsageError(f"{self._where} has no trajectories left for the next pass.")
        return begun

    @property
    def _where(self) -> str:
        return repr(", ".join(map(str, self.source.paths)))

    def number_of(self, pass_number: int) -> int:
        """Return the number of a pass among the passes of all epochs."""
        return pass_number + self.epoch * _PASSES_AN_EPOCH

    def resumed(
        self, turn: int, upto: Mapping[str, int], played: Mapping[tuple[str, int], int]
    ) -> RowSource:
        """Open the snapshot of a pass from a saved state.

        Played trajectories that were deleted or shortened are added to `missing`.

        Args:
            turn: Number of earlier scans that the processes synchronized.
            upto: Map from writer to the number of its last block in the snapshot.
            played: Trajectories that envs played: map from (writer, number) to number of frames.
        """
        self._synchronize(turn, 0, tuple)
        snapshot = self.source.snapshot(upto)
        if self.source.holds_blocks and len(snapshot.index):
            numbers = snapshot.index.find(list(played)).tolist()
            for (key, length), number in zip(played.items(), numbers, strict=True):
                if number < 0 or snapshot.index.lengths[number] < length:
                    self.missing[key] = length
        return snapshot

    def numbers_of(self, index: TrajectoryIndex, keys: Sequence[tuple[str, int]]) -> Int64s:
        """Return the number of each trajectory, int64; -1 if it is neither listed nor `missing`."""
        number_of = {key: len(index) + place for place, key in enumerate(self.missing)}
        pairs = zip(keys, index.find(keys).tolist(), strict=True)
        return np.array([number_of.get(key, number) for key, number in pairs], np.int64)

    def keys_of(self, index: TrajectoryIndex, numbers: Int64s) -> list[tuple[str, int]]:
        """Return (writer, number) of trajectories, listed or `missing`."""
        missing = list(self.missing)
        listed = iter(index.keys(numbers[numbers < len(index)]))
        return [
            missing[number - len(index)] if number >= len(index) else next(listed)
            for number in numbers.tolist()
        ]

    def _lengths(self, index: TrajectoryIndex) -> Int64s:
        """Return the lengths of all trajectories of a snapshot, then of the `missing` ones."""
        if not self.missing:
            return index.lengths
        return np.append(index.lengths, list(self.missing.values()))

    def _without_missing(self, index: TrajectoryIndex, pool: Int64s, in_use: Int64s) -> Int64s:
        """Return `pool` without shortened trajectories that envs still play as `missing` ones."""
        if not self.missing:
            return pool
        played = self.keys_of(index, in_use[in_use >= len(index)])
        return np.setdiff1d(pool, index.find(played))

    def rest_of_pass(
        self,
        number: int,
        turn: int,
        snapshot: RowSource,
        in_use: Int64s,
        sections: tuple[Section, Section | None],
        before: PassOrder | None = None,
    ) -> PassOrder:
        """Create the order of the unassigned trajectories of a pass.

        The new trajectories of the last scan come first.

        Args:
            number: Number of the pass in the epoch.
            turn: Number of earlier scans that the processes synchronized.
            snapshot: Snapshot of the last scan.
            in_use: int64, numbers of the trajectories that envs play.
            sections: Sections of the pass, as returned by `sections_at`.
            before: The pass before the scan, whose copied frames are reused if possible.
        """
        rest, fresh = sections
        ordinal = self.number_of(number)
        order, starts = self._unassigned(snapshot.index, rest, ordinal, in_use)
        new, new_starts = self._unassigned(snapshot.index, fresh, ordinal, in_use)
        if len(new):
            order = np.concatenate([new, order])
            starts = np.concatenate([new_starts, starts])
        snapshot = self._with_cached_rows(turn, snapshot, (order, in_use), before)
        lengths = self._lengths(snapshot.index)
        return PassOrder(lengths, order, starts, number, snapshot, turn, sections, len(new))

    def _unassigned(
        self, index: TrajectoryIndex, section: Section | None, number: int, in_use: Int64s
    ) -> tuple[Int64s, Int64s]:
        """Return the unassigned trajectories of a section, in order, and their first frames."""
        if section is None or section.bounds is None:
            return _NONE, _NONE
        pool = self._without_missing(index, members(index, self.options, section), in_use)
        order, starts = order_trajectories(index, pool, self.options, number)
        done = (
            0
            if section.last_assigned is None
            else num_assigned(index, order, self.options, number, section.last_assigned)
        )
        return order[done:], starts[done:]

    def needed(self, position: Position) -> Int64s:
        """Return the trajectories whose files must stay open if they are deleted: int64.

        These are the played trajectories. With `refresh_s` they include the unassigned trajectories
        of the pass, which are assigned until the next scan.
        """
        played = position.state.trajectory
        rest = (
            position.pass_order.trajectories[position.state.position :]
            if self.options.refresh_s is not None
            else _NONE
        )
        is_listed = (played >= 0) & (played < len(position.pass_order.source.index))
        return np.union1d(played[is_listed], rest)

    def is_due(self, position: Position, is_alone: bool) -> bool:
        """Return whether a scan within the pass is due.

        No scan is due before all trajectories of the last scan are assigned.
        """
        wait_s = self.options.refresh_s
        if wait_s is None or position.state.position < position.pass_order.num_fresh:
            return False
        if is_alone:
            return time.monotonic() - self._last_scan_s >= wait_s / 2
        return position.left == 0

    def refreshed(self, position: Position) -> Position:
        """Scan within a pass, and return the position in the new order of the pass.

        New trajectories are assigned before the older ones. No trajectory is assigned twice.
        """
        state, pass_order, _ = position
        snapshot, in_use, left = self._next_snapshot(
            pass_order.turn + 1, 0, pass_order, state.trajectory
        )
        if snapshot.index is pass_order.source.index:
            return Position(state, replace(pass_order, turn=pass_order.turn + 1), left)
        rest, fresh = sections_at(pass_order, state.position)
        # Keep writers whose blocks are not listed now: a later scan may list them again.
        since = dict(fresh.since or {}) if fresh is not None else {}
        for writer, sequence in pass_order.source.index.writers_upto().items():
            since[writer] = max(sequence, since.get(writer, -1))
        pool = choose(snapshot.index, self.options)
        if self.options.keep_latest_n_trajs and rest.bounds is not None and len(pool):
            first, last = rest.bounds
            first = max(list(first), snapshot.index.name(int(pool[0])))
            rest = rest._replace(bounds=[first, last])
        pool = pool[~_was_complete(snapshot.index, pool, since)]
        rest = rest._replace(upto=rest.upto or since)
        sections = (rest, Section(_bounds(snapshot.index, pool), since=since))
        new = self.rest_of_pass(
            pass_order.number, pass_order.turn + 1, snapshot, in_use, sections, pass_order
        )
        # An exhausted env repeats a frame with `valid=False`. If its trajectory was deleted, it
        # repeats a frame of any other trajectory instead.
        is_deleted = state.is_exhausted & (in_use < 0)
        in_use = np.where(is_deleted, len(snapshot.index) - 1, in_use)
        return switch_pass_order(state, pass_order, new, in_use, self.following)._replace(left=left)

    def _begin(
        self, number: int, before: PassOrder | None, in_use: Int64s
    ) -> tuple[PassOrder, Int64s]:
        """Scan the folders and begin pass `number`; see `following` for `in_use` and the result."""
        turn = before.turn + 1 if before is not None else 0
        wanted = self.options.keep_latest_n_trajs or int(self.options.refresh_s is not None)
        snapshot, in_use, _ = self._next_snapshot(turn, wanted, before, in_use)
        pool = self._without_missing(snapshot.index, choose(snapshot.index, self.options), in_use)
        order, starts = order_trajectories(
            snapshot.index, pool, self.options, self.number_of(number)
        )
        sections = (Section(_bounds(snapshot.index, pool)), None)
        snapshot = self._with_cached_rows(turn, snapshot, (order, in_use), before)
        lengths = self._lengths(snapshot.index)
        return PassOrder(lengths, order, starts, number, snapshot, turn, sections), in_use

    def _next_snapshot(
        self, turn: int, wanted: int, before: PassOrder | None, in_use: Int64s
    ) -> tuple[RowSource, Int64s, int]:
        """Return the snapshot of the next scan, which is the same in all processes.

        Args:
            turn: Number of the scan.
            wanted: Number of trajectories to wait for; 0: do not wait.
            before: The current pass; None before the first pass.
            in_use: int64, numbers in `before` of the trajectories that envs play. They stay readable
                in the new snapshot.

        Returns:
            The snapshot; the numbers of the trajectories `in_use` in it, -1 for deleted ones; and
            the number of batches until the next scan.
        """
        earlier = None if before is None else before.source
        blocks_in_use: BlocksInUse = tuple
        if earlier is not None:
            is_listed = (in_use >= 0) & (in_use < len(earlier.index))
            blocks_in_use = partial(earlier.index.blocks_of, in_use[is_listed])
        num_batches = self._synchronize(turn, wanted, blocks_in_use)
        snapshot = self.source.snapshot()
        if self.options.refresh_s is not None and not self.source.holds_blocks:
            raise UsageError(
                "refresh_s requires block files, and "
                f"{self._where} has the format {self.source.format!r}. "
                "Convert it with rollout_data.convert(path, new_path), or omit refresh_s."
            )
        if earlier is None or earlier.index is snapshot.index:
            return snapshot, in_use, num_batches
        if self.is_cut_off and _content(earlier.index) != _content(snapshot.index):
            raise UsageError(
                f"{self._where} changed before this pass. Workers of a plain DataLoader cannot "
                "follow changes in several ranks. "
                "Use rollout_data.loader(dataset, num_workers=...)."
            )
        return snapshot, _moved_to(snapshot, earlier, in_use), num_batches

    def _synchronize(self, turn: int, wanted: int, in_use: BlocksInUse) -> int:
        """Get the listing of the folders from the process that scans, and use it from now on.

        Returns:
            The number of batches until the next scan.
        """
        message, left, spot = self.agree(turn, partial(self._scan, wanted, in_use))
        listing = self._listings.restore(message)
        if listing is not None:
            self.source.adopt(listing, spot)
            # Keep the listing that is in shared memory, so that the listing in the message is freed.
            self._listings.last = self.source.listing()
        return int(left)

    def _scan(self, wanted: int, in_use: BlocksInUse) -> Any:
        """Scan the folders until they have `wanted` trajectories.

        Returns:
            The listing (None if unchanged), the number of batches that other processes may plan
            before the next scan, and the shared memory with the index for processes of this machine.
        """
        wait_for_trajectories(self.source, wanted, self.options, in_use)
        now_s = time.monotonic()
        self._last_scan_s = now_s
        fitting = (
            self._num_batches
            * (self.options.refresh_s or 0.0)
            / 2
            / max(now_s - self._last_synchronized_s, 1e-9)
        )
        self._num_batches = max(1, int(min(fitting, 2 * self._num_batches, _MOST_BATCHES)))
        self._last_synchronized_s = now_s
        spot = None
        if self.is_shared or current_shard().total > 1:
            spot = self.source.shared(self.source.snapshot())
        return self._listings.shorten(self.source.listing()), self._num_batches, spot

    def _with_cached_rows(
        self, turn: int, snapshot: RowSource, used: tuple[Int64s, Int64s], before: PassOrder | None
    ) -> RowSource:
        """Copy the frames of a pass into memory, or map the copy of another process of this machine.

        Args:
            turn: Number of the scan.
            snapshot: Snapshot of the pass.
            used: int64 arrays of trajectories whose frames are needed.
            before: The pass before; its copy is reused if it has all frames.

        Returns:
            A source that reads from the copy, or `snapshot` if frames are read from the files.
        """
        device = self.keeps_on
        if device is None:
            return snapshot
        trajectories = np.setdiff1d(np.concatenate(used), -1)
        trajectories = trajectories[trajectories < len(snapshot.index)]
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
    """Return a value that two indices share only if they list the same trajectories and edits."""
    return (
        index.writers_upto(),
        index.num_present,
        [block.identity for block in index.blocks if block.is_edit],
    )


def _moved_to(snapshot: RowSource, earlier: RowSource, in_use: Int64s) -> Int64s:
    """Convert numbers of trajectories that envs play to their numbers in a new snapshot.

    Trajectories that were unreadable in the earlier snapshot are marked as unreadable in the new
    one. Numbers beyond an index are those of missing trajectories, see `PassScheduler.missing`.

    Returns:
        int64; -1 for trajectories that were deleted or shortened.
    """
    is_missing = in_use >= len(earlier.index)
    listed = in_use[~is_missing]
    was_lost = earlier.is_lost[listed]
    new_numbers = _numbers_in(earlier.index, snapshot.index, listed)
    snapshot.is_lost[new_numbers[was_lost & (new_numbers >= 0)]] = True
    moved = in_use + (len(snapshot.index) - len(earlier.index))
    moved[~is_missing] = new_numbers
    return moved


def _numbers_in(before: TrajectoryIndex, now: TrajectoryIndex, trajectories: Int64s) -> Int64s:
    """Convert numbers of trajectories in the index `before` to their numbers in the index `now`.

    The result is -1 for a trajectory that was deleted or shortened.
    """
    numbers = before.places_in(now, trajectories)
    has_shrunk = now.lengths[numbers] < before.lengths[trajectories] if len(now) else True
    return np.where(has_shrunk, -1, numbers)
