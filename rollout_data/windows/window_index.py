"""Which windows there are: trajectories of a split, windows of a trajectory, frames of a window.

One rule: pure arithmetic on lengths; nothing here reads a frame. A window belongs to one frame of a
trajectory, its anchor `t`, and reads the frames `t + delta` of that trajectory only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any, Literal, get_args

import numpy as np

from storage.core.arguments import choice, real
from storage.errors import OutOfRangeError, UsageError

from ..blocks.trajectory_index import Int64s, TrajectoryIndex, counted_from, mixed, share_of
from ..sources.epoch import Epoch
from ..sources.rows.row_source import Rows

Padding = Literal["none", "repeat", "edge", "zero"]
Split = Literal["train", "validation"]
CREATE = "create a WindowDataset"
#: Bits of a time within a turn of `arrivals`; turns are counted above them, in int64.
_TURN_BITS = 60


@dataclass(frozen=True)
class SplitOptions:
    """Which trajectories belong to a dataset; see `WindowDataset`."""

    split: str | None = None
    validation_fraction: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.split is not None:
            choice(CREATE, "split", self.split, get_args(Split))
        part = self.validation_fraction
        real(CREATE, "validation_fraction", part, "in [0, 1]", lambda fraction: 0 <= fraction <= 1)


def choose_trajectories(
    index: TrajectoryIndex, options: SplitOptions, first_of_training: list[Any] | None = None
) -> tuple[Int64s, list[Any]]:
    """Return the trajectories of a split, int64, ascending, and which is the first for training.

    Each trajectory has a number that is a function of (seed, writer, number within the writer), in
    whichever folder it lies; those with the smallest ones are for validation. So the two splits
    share nothing and leave nothing out, few trajectories change sides when a folder grows or
    another one is read with it, and copies of a folder stand together, save for one trajectory that
    the fraction may cut off. Packing gives trajectories another writer, hence other splits. With
    the `first_of_training` of another time the split is as it was then.
    """
    present = np.flatnonzero(index.is_present())
    if options.split is None:
        return present, []
    keys = index.random_keys(present, options.seed, with_folder=False)
    if first_of_training is None:
        order = np.lexsort((present, keys))
        num_for_validation = share_of(len(present), options.validation_fraction)
        first = order[num_for_validation : num_for_validation + 1].tolist()
        first_of_training = (
            [int(keys[first[0]]), *index.name(int(present[first[0]]))] if first else []
        )
    is_training = np.zeros(len(present), bool)
    if first_of_training:
        key, *name = first_of_training
        is_training = (keys > key) | ((keys == key) & (present >= index.num_before(*name)))
    return present[is_training == (options.split == "train")], first_of_training


class WindowIndex:
    """The windows of some trajectories, numbered from 0.

    Args:
        index: Where the trajectories are.
        trajectories: int64 `[K]`, which of them, ascending.
        first_delta, last_delta: The least and the greatest delta of a window.
        stride: Frames between anchors.
        pads: Whether windows may reach beyond their trajectory. If so, every `stride`-th frame is
            an anchor; if not, every `stride`-th of those whose window lies inside.
    """

    def __init__(
        self,
        index: TrajectoryIndex,
        trajectories: Int64s,
        first_delta: int,
        last_delta: int,
        stride: int,
        pads: bool,
    ) -> None:
        self._index = index
        self.trajectories = trajectories
        self.stride = stride
        self.lengths = index.lengths[trajectories]
        self.first_anchor = 0 if pads else max(0, -first_delta)
        #: Frames that a trajectory has at least, of which there is a window.
        self.least_length = self.first_anchor + 1 + (0 if pads else max(0, last_delta))
        num_anchors = self.lengths - (self.least_length - 1)
        self.first_window = np.append(0, np.cumsum(np.maximum(0, -(-num_anchors // stride))))

    def __len__(self) -> int:
        return int(self.first_window[-1])

    def find(self, windows: Int64s) -> tuple[Int64s, Int64s]:
        """Return the place in `trajectories` and the anchor of each window, int64 `[B]` both."""
        place = self.first_window.searchsorted(windows, side="right") - 1
        return place, self.first_anchor + (windows - self.first_window[place]) * self.stride

    # What stays the same when trajectories come and go

    def random_keys(self, epoch: Epoch) -> np.ndarray:
        """Return the key of each window in an epoch, uint64: a function of the epoch and of the window's name."""
        keys = epoch.keys(self._index, self.trajectories)
        counts = np.diff(self.first_window)
        step = counted_from(np.zeros_like(counts), counts)
        return mixed(np.repeat(keys, counts) + step.astype(np.uint64))

    def name(self, window: int) -> list[Any]:
        """Name a window: its trajectory (see `TrajectoryIndex.name`), and its number in there."""
        place = int(np.searchsorted(self.first_window, window, side="right")) - 1
        return [
            *self._index.name(int(self.trajectories[place])),
            window - int(self.first_window[place]),
        ]

    def num_upto(self, end_time_ns: int, writer: str, number: int, step: int) -> int:
        """Count the windows up to the one of this name, whether or not it is here."""
        bounds = [self._index.num_before(end_time_ns, writer, number + more) for more in (0, 1)]
        first, stop = np.searchsorted(self.trajectories, bounds)
        return int(self.first_window[first] + (step + 1) * (stop - first))


def arrivals(keys: np.ndarray, mean: Fraction, turn: int) -> tuple[Int64s, Int64s]:
    """Draw how often each of some things arrives within one turn, and when.

    The arrivals of a thing are a function of its key alone. All together are a Poisson process, in
    which each arrival is that of any of the things with equal probability, independently of the
    others: draws with replacement. Integers only, so that every processor draws the same.

    Args:
        keys: uint64 `[n]`, one for each thing and turn.
        mean: Arrivals of each thing in a turn, on average.
        turn: Number of the turn, 0, 1, ...: its times lie between those of its neighbours.

    Returns:
        Number of the thing, ascending, and time of each arrival: int64 `[K]` each.
    """
    # A turn is cut into 2**num_halvings parts, in each of which a thing arrives once at most, on
    # average.
    num_halvings = max(0, math.ceil(mean) - 1).bit_length()
    parts = np.arange(1 << num_halvings, dtype=np.uint64)
    part_keys = mixed(keys[:, None] + parts).ravel()
    counts = _poisson_bounds(mean / len(parts)).searchsorted(part_keys, side="right")
    place = np.repeat(np.arange(len(part_keys)), counts)
    number = counted_from(np.zeros_like(counts), counts).astype(np.uint64)
    within = mixed(part_keys[place] + number) >> np.uint64(64 - _TURN_BITS + num_halvings)
    part = place & (len(parts) - 1)
    times = (turn << _TURN_BITS) + (part << (_TURN_BITS - num_halvings)) + within.astype(np.int64)
    return place >> num_halvings, times


def turn_of(time: int) -> int:
    """Return the turn of `arrivals` that a time belongs to."""
    return time >> _TURN_BITS


@lru_cache(maxsize=64)
def _poisson_bounds(mean: Fraction) -> np.ndarray:
    """Return uint64 `[K]`: as many of them as a Poisson variable of this mean is are at most a random uint64.

    `bounds[n]` is 2**64 times the probability of n or less, rounded down, in fixed-point arithmetic
    of 192 bits.
    """
    term = 1 << 192
    terms = []
    while term:
        terms.append(term)
        term = term * mean.numerator // (mean.denominator * len(terms))
    total = sum(terms)
    bounds = [(below << 64) // total for below in accumulate(terms)]
    return np.array([bound for bound in bounds if bound < 1 << 64], np.uint64)


def checked_windows(action: str, given: Sequence[int] | np.ndarray, num_windows: int) -> Int64s:
    """Check window numbers: int64 `[B]`, negative ones counted from the end.

    Raises:
        IndexError: One lies outside.
        UsageError: They are no whole numbers.
    """
    windows = np.asarray(given)
    if windows.size == 0:
        return np.zeros(0, np.int64)
    if windows.ndim != 1 or windows.dtype.kind not in "iu":
        raise UsageError(
            action,
            "",
            "windows as a list of whole numbers",
            f"{windows.dtype}, shape {windows.shape}",
        )
    if (
        windows.dtype == np.int64 and int(windows.view(np.uint64).max()) < num_windows
    ):  # none is negative
        return windows
    low = int(windows.min())
    high = int(windows.max())
    if low < -num_windows or high >= num_windows:
        wrong = high if high >= num_windows else low
        raise OutOfRangeError(action, "", f"windows in {-num_windows}:{num_windows}", str(wrong))
    windows = windows.astype(np.int64, copy=False)
    return np.where(windows < 0, windows + num_windows, windows)


@dataclass(frozen=True, eq=False)
class WindowShape:
    """Which frames around the anchor are read, as consecutive runs.

    Attributes:
        deltas: int64 `[W]`, ascending: the frames that are read, relative to the anchor.
        first, count, target: int64 `[R]`: `count` frames from `anchor + first` on are rows `target`
            of the window.
        unit: A number of rows that divides every run.
    """

    deltas: Int64s
    first: Int64s
    count: Int64s
    target: Int64s
    unit: int

    @cached_property
    def reach(self) -> tuple[int, int]:
        """The least and the greatest delta."""
        return int(self.deltas[0]), int(self.deltas[-1])

    @classmethod
    def of(cls, deltas: Sequence[int], fills_gaps: bool) -> WindowShape:
        """Cut deltas into runs; with `fills_gaps`, frames between are read too if they are few."""
        wanted = np.unique(np.asarray(deltas, np.int64))
        span = int(wanted[-1] - wanted[0]) + 1
        if fills_gaps and span <= 2 * len(wanted):
            wanted = np.arange(wanted[0], wanted[-1] + 1)
        starts = np.flatnonzero(np.diff(wanted, prepend=wanted[0] - 2) != 1)
        count = np.diff(np.append(starts, len(wanted)))
        return cls(
            wanted, wanted[starts], count, starts.astype(np.int64), int(np.gcd.reduce(count))
        )

    def rows(self, trajectory: Int64s, anchor: Int64s) -> Rows:
        """Return the frames of windows, given the trajectory and anchor of each, int64 `[B]`.

        Frames that do not exist are among them, see `cut`.
        """
        target, counts = self._targets(len(anchor))
        if len(self.first) == 1:
            return Rows(trajectory, anchor + self.first, counts, target)
        start = (anchor[:, None] + self.first).ravel()
        return Rows(np.repeat(trajectory, len(self.first)), start, counts, target)

    def cut(self, rows: Rows, lengths: Int64s) -> Rows:
        """Replace frames outside of trajectories of these `lengths`, int64 `[B]`, by the nearest ones in them.

        A run that reaches outside becomes one for each frame.
        """
        trajectory, start, counts, target = rows
        lengths = np.repeat(lengths, len(self.first))
        is_cut = (start < 0) | (start + counts > lengths)
        num_pieces = np.where(is_cut, counts, 1)
        run = np.repeat(np.arange(len(counts)), num_pieces)
        target = counted_from(target, num_pieces)
        frame = np.clip(counted_from(start, num_pieces), 0, lengths[run] - 1)
        return Rows(trajectory[run], frame, np.where(is_cut, 1, counts)[run], target)

    @lru_cache(maxsize=8)  # noqa: B019 - a shape is small, and lives as long as its dataset
    def _targets(self, num_windows: int) -> tuple[Int64s, Int64s]:
        """First rows and sizes of the runs of a batch."""
        target = (np.arange(num_windows)[:, None] * len(self.deltas) + self.target).ravel()
        return target, np.tile(self.count, num_windows)
