"""Index arithmetic of windows: choose trajectories, number their windows, list window frames.

All functions use trajectory lengths only and read no frame. A window belongs to one frame `t` of a
trajectory, its anchor, and reads only the frames `t + delta` of that trajectory.
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
#: A random time is an int64 number. Its low bits are the time within a turn, and its high bits are
#: the number of the turn; see `arrivals`. This is the number of low bits.
_TURN_BITS = 60


@dataclass(frozen=True)
class SplitOptions:
    """Options that divide trajectories into training and validation; see `WindowDataset`."""

    split: str | None = None
    validation_fraction: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.split is not None:
            choice("split", self.split, get_args(Split))
        part = self.validation_fraction
        real("validation_fraction", part, "in [0, 1]", lambda fraction: 0 <= fraction <= 1)


def choose_trajectories(
    index: TrajectoryIndex, options: SplitOptions, first_of_training: list[Any] | None = None
) -> tuple[Int64s, list[Any]]:
    """Divide trajectories into training and validation, and return those of the requested split.

    Each trajectory has a key, a function of (seed, writer, number within the writer) that does not
    depend on the folder. Trajectories with the smallest keys are for validation, all others for
    training, so the splits are disjoint and complete. Few trajectories move to the other split when
    a folder grows or another folder is added. Copies of a folder have the same splits, except for
    one trajectory at the boundary. Packing changes the writers, and therefore the splits.

    Returns:
        The trajectories of the split, int64 ascending; and the first training trajectory, in the
        order of the keys, as [key, *name]. Pass the second result as `first_of_training` to
        restore the same split later, when the folder has other trajectories.
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
    """Numbering of the windows of selected trajectories, from 0.

    Args:
        index: Index of all trajectories.
        trajectories: int64 `[K]`, positions of the selected trajectories in the index, ascending.
        first_delta, last_delta: Smallest and largest delta of a window.
        stride: Frames between anchors.
        pads: Whether windows may extend beyond their trajectory. If True, every `stride`-th frame
            is an anchor. If False, only frames whose window is inside the trajectory are anchors,
            every `stride`-th from the first such frame on.
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
        #: Length of the shortest trajectory that has a window.
        self.least_length = self.first_anchor + 1 + (0 if pads else max(0, last_delta))
        num_anchors = self.lengths - (self.least_length - 1)
        self.first_window = np.append(0, np.cumsum(np.maximum(0, -(-num_anchors // stride))))

    def __len__(self) -> int:
        return int(self.first_window[-1])

    def find(self, windows: Int64s) -> tuple[Int64s, Int64s]:
        """Return the index into `trajectories` and the anchor of each window, int64 `[B]` each."""
        place = self.first_window.searchsorted(windows, side="right") - 1
        return place, self.first_anchor + (windows - self.first_window[place]) * self.stride

    # Keys and names of windows do not change when trajectories are added or deleted.

    def random_keys(self, epoch: Epoch) -> np.ndarray:
        """Return the sort key of each window, uint64: a hash of the epoch and the window's name."""
        keys = epoch.keys(self._index, self.trajectories)
        counts = np.diff(self.first_window)
        step = counted_from(np.zeros_like(counts), counts)
        return mixed(np.repeat(keys, counts) + step.astype(np.uint64))

    def name(self, window: int) -> list[Any]:
        """Return the name of a window: trajectory name, then window number in the trajectory.

        Window numbers change when trajectories are added or deleted, names do not.
        """
        place = int(np.searchsorted(self.first_window, window, side="right")) - 1
        return [
            *self._index.name(int(self.trajectories[place])),
            window - int(self.first_window[place]),
        ]

    def num_upto(self, end_time_ns: int, writer: str, number: int, step: int) -> int:
        """Return the number of windows up to and including a name, in the order of names.

        The window with this name may have been deleted.

        Args:
            end_time_ns, writer, number: Name of the trajectory.
            step: Number of the window in the trajectory.
        """
        bounds = [self._index.num_before(end_time_ns, writer, number + more) for more in (0, 1)]
        first, stop = np.searchsorted(self.trajectories, bounds)
        return int(self.first_window[first] + (step + 1) * (stop - first))


def arrivals(keys: np.ndarray, mean: Fraction, turn: int) -> tuple[Int64s, Int64s]:
    """Draw items with replacement: each item arrives at random times, and each arrival is a draw.

    The order of the draws is the order of the arrival times. Time is divided into turns of equal
    length. This function computes the arrivals of one turn.

    The arrivals of an item depend only on its key, so deleting an item changes no other draw. All
    arrivals together are a Poisson process: each arrival belongs to each item with equal
    probability, independently of all other arrivals. All arithmetic uses integers, so that every
    processor draws the same items.

    Args:
        keys: uint64 `[n]`, key of each item in this turn.
        mean: Mean number of arrivals of an item in a turn.
        turn: Number of the turn, 0, 1, ... Later turns have larger times.

    Returns:
        For each of the K arrivals, the index of its item (ascending) and its time: int64 `[K]` each.
    """
    # Divide the turn into 2**num_halvings parts, so that an item has on average at most one arrival
    # per part. The table of the Poisson distribution then stays short.
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
    """Return the number of the turn that contains a time from `arrivals`."""
    return time >> _TURN_BITS


@lru_cache(maxsize=64)
def _poisson_bounds(mean: Fraction) -> np.ndarray:
    """Compute the table for drawing Poisson variables from uniform random numbers: uint64 `[K]`.

    Entry n is 2**64 times the probability that the variable is at most n, rounded down. To draw a
    variable, draw a uniform random uint64, and count the entries that are at most this number. The
    table is computed with 192-bit integers, so that it is equal on every processor.
    """
    term = 1 << 192
    terms = []
    while term:
        terms.append(term)
        term = term * mean.numerator // (mean.denominator * len(terms))
    total = sum(terms)
    bounds = [(below << 64) // total for below in accumulate(terms)]
    return np.array([bound for bound in bounds if bound < 1 << 64], np.uint64)


def checked_windows(numbers: Sequence[int] | np.ndarray, num_windows: int) -> Int64s:
    """Check window numbers and return them as int64 `[B]`. Negative numbers count from the end.

    Raises:
        IndexError: A number is out of range.
        UsageError: `numbers` is not a list of integers.
    """
    windows = np.asarray(numbers)
    if windows.size == 0:
        return np.zeros(0, np.int64)
    if windows.ndim != 1 or windows.dtype.kind not in "iu":
        raise UsageError(
            f"windows must be a list of integers, got dtype {windows.dtype}, shape {windows.shape}."
        )
    # As uint64, negative numbers are larger than any limit. So one maximum checks both limits.
    if windows.dtype == np.int64 and int(windows.view(np.uint64).max()) < num_windows:
        return windows
    low = int(windows.min())
    high = int(windows.max())
    if low < -num_windows or high >= num_windows:
        wrong = high if high >= num_windows else low
        raise OutOfRangeError(f"windows must be in {-num_windows}:{num_windows}, got {wrong}.")
    windows = windows.astype(np.int64, copy=False)
    return np.where(windows < 0, windows + num_windows, windows)


@dataclass(frozen=True, eq=False)
class WindowShape:
    """Frames of a window relative to its anchor, grouped into runs of consecutive frames.

    Attributes:
        deltas: int64 `[W]`, ascending: distances of the frames of a window from its anchor.
        first: int64 `[R]`, distance of the first frame of each run from the anchor.
        count: int64 `[R]`, number of frames of each run.
        target: int64 `[R]`, index into `deltas` of the first frame of each run.
        unit: Greatest common divisor of the lengths of the runs.
    """

    deltas: Int64s
    first: Int64s
    count: Int64s
    target: Int64s
    unit: int

    @cached_property
    def reach(self) -> tuple[int, int]:
        """Smallest and largest distance from the anchor, in frames."""
        return int(self.deltas[0]), int(self.deltas[-1])

    @classmethod
    def of(cls, deltas: Sequence[int], fills_gaps: bool) -> WindowShape:
        """Build the shape of windows that need the frames at the distances `deltas`.

        With `fills_gaps`, the shape also contains all frames between these frames, unless this more
        than doubles their number. One long run is read faster than many short runs.
        """
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
        """Return the frames of B windows as runs of consecutive frames.

        Runs may extend beyond the start or the end of a trajectory. Call `cut` to replace the
        frames outside.

        Args:
            trajectory: int64 `[B]`, trajectory of each window.
            anchor: int64 `[B]`, anchor of each window.
        """
        target, counts = self._targets(len(anchor))
        if len(self.first) == 1:
            return Rows(trajectory, anchor + self.first, counts, target)
        start = (anchor[:, None] + self.first).ravel()
        return Rows(np.repeat(trajectory, len(self.first)), start, counts, target)

    def cut(self, rows: Rows, lengths: Int64s) -> Rows:
        """Replace frames outside of their trajectory by the nearest frames inside.

        A run that contains frames outside is divided into one run per frame.

        Args:
            rows: Runs of B windows, from the method `rows`.
            lengths: int64 `[B]`, length of the trajectory of each window.
        """
        trajectory, start, counts, target = rows
        lengths = np.repeat(lengths, len(self.first))
        is_cut = (start < 0) | (start + counts > lengths)
        num_pieces = np.where(is_cut, counts, 1)
        run = np.repeat(np.arange(len(counts)), num_pieces)
        target = counted_from(target, num_pieces)
        frame = np.clip(counted_from(start, num_pieces), 0, lengths[run] - 1)
        return Rows(trajectory[run], frame, np.where(is_cut, 1, counts)[run], target)

    @lru_cache(maxsize=8)  # noqa: B019 - the cache keeps shapes in memory, and shapes are small
    def _targets(self, num_windows: int) -> tuple[Int64s, Int64s]:
        """Return where the runs of a batch of windows are written, and their lengths.

        Returns:
            The first output row of each run, and its number of frames: int64 `[num_windows * R]`
            each.
        """
        target = (np.arange(num_windows)[:, None] * len(self.deltas) + self.target).ravel()
        return target, np.tile(self.count, num_windows)
