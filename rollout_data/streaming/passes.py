"""Passes over a dataset: which trajectories, in which order, starting where.

One rule: where a trajectory stands in a pass, and where it starts, is a function of (seed, pass) and of itself.
Trajectories that come or go move no other, so that resuming needs no more than the one that was dealt last.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tqdm import tqdm

from storage.errors import UsageError, WaitTimeoutError

from ..index.index import Int64s, TrajectoryIndex, random_keys

#: End, writer and number of a trajectory (`TrajectoryIndex.name`).
Name = Sequence[Any]
_ORDER, _STARTS = 0, 1
_MOST_FRAMES = 1 << 62


@dataclass(frozen=True)
class PassOptions:
    """Which trajectories a pass delivers, and how.

    Attributes:
        dataset_loops: Number of passes; below 1 they never end.
        random_shuffle_traj_order: A permutation for each pass, rather than the recorded order.
        keep_latest_n_trajs: Only the newest complete ones; 0 is all.
        starting_frame_range: Half-open range from which a trajectory's first frame is drawn.
        seed: Decides permutations and starting frames.
        wait_timeout_s: How long to wait until `keep_latest_n_trajs` exist.
        poll_interval_s: How often to look.
    """

    dataset_loops: int = 1
    random_shuffle_traj_order: bool = False
    keep_latest_n_trajs: int = 0
    starting_frame_range: tuple[int, int] = (0, 1)
    seed: int = 0
    wait_timeout_s: float = 60.0
    poll_interval_s: float = 0.25

    @property
    def is_endless(self) -> bool:
        return self.dataset_loops < 1

    def has_pass(self, number: int) -> bool:
        """True if there is a pass of this number."""
        return self.is_endless or number < self.dataset_loops


def frame_range(given: Any) -> tuple[int, int]:
    """Check a `starting_frame_range`."""
    try:
        start, stop = (operator.index(bound) for bound in given)
        is_right = 0 <= start < stop <= _MOST_FRAMES
    except (TypeError, ValueError):
        is_right = False
    if not is_right:
        raise UsageError(
            "open the dataset",
            "",
            "starting_frame_range (start, stop), whole numbers with 0 <= start < stop",
            repr(given),
        )
    return start, stop


def choose(index: TrajectoryIndex, options: PassOptions, bounds: tuple[Name, Name] | None = None) -> Int64s:
    """Which trajectories a pass delivers: int64, in the order of completion.

    `bounds` are the first and the last one of a pass that has begun: those between them that are still there.
    """
    is_eligible = index.is_present()
    if options.keep_latest_n_trajs:
        is_eligible &= index.is_complete()
    found = np.flatnonzero(is_eligible)
    if bounds is None:
        return found[-options.keep_latest_n_trajs :]
    (first_end, first_writer, first_number), (end, writer, number) = bounds
    first, stop = index.num_before(first_end, first_writer, first_number), index.num_before(end, writer, number + 1)
    return found[(found >= first) & (found < stop)]


def pass_order(index: TrajectoryIndex, pool: Int64s, options: PassOptions, number: int) -> tuple[Int64s, Int64s]:
    """Order a pass: its trajectories, and the frame at which each starts.

    A start is uniform over the part of `starting_frame_range` that lies within the trajectory; 0
    if none of it does.
    """
    order = pool
    if options.random_shuffle_traj_order:
        order = pool[np.argsort(index.random_keys(pool, _seed(options, number, _ORDER)), kind="stable")]
    low, high = options.starting_frame_range
    starts = np.zeros(len(order), np.int64)
    if high > 1:
        room = np.minimum(high, index.lengths[order]) - low
        draws = (index.random_keys(order, _seed(options, number, _STARTS)) >> np.uint64(11)) * 2.0**-53
        starts = np.where(room > 0, low + (draws * np.maximum(room, 1)).astype(np.int64), 0)
    return order, starts


def num_dealt(index: TrajectoryIndex, order: Int64s, options: PassOptions, number: int, last: Name) -> int:
    """How many of a pass's trajectories come no later than the one that was dealt `last`, which may be gone."""
    if not options.random_shuffle_traj_order:
        return int(np.searchsorted(order, index.num_before(last[0], last[1], last[2] + 1)))
    seed = _seed(options, number, _ORDER)
    key = random_keys([last[1]], np.zeros(1, np.int64), np.array([last[2]]), seed)[0]
    found = np.flatnonzero(order == index.find([(last[1], last[2])])[0])
    return int(found[0]) + 1 if len(found) else int(np.searchsorted(index.random_keys(order, seed), key))


def _seed(options: PassOptions, number: int, purpose: int) -> int:
    return int(np.random.SeedSequence([options.seed, number, purpose]).generate_state(1, np.uint64)[0])


def wait_for_trajectories(count_now: Callable[[], int], wanted: int, options: PassOptions, where: str) -> None:
    """Poll until `wanted` complete trajectories exist.

    Raises:
        WaitTimeoutError: They did not come within `wait_timeout_s`.
    """
    found = count_now()
    if found >= wanted:
        return
    deadline = time.monotonic() + options.wait_timeout_s
    with tqdm(total=wanted, initial=found, desc="waiting for trajectories", unit="traj") as bar:
        while found < wanted:
            left = deadline - time.monotonic()
            if left <= 0:
                raise WaitTimeoutError(
                    "read the newest trajectories",
                    f"of {where}",
                    f"{wanted} complete ones within {options.wait_timeout_s:g} s",
                    str(found),
                    "Record more, wait longer (wait_timeout_s) or keep fewer (keep_latest_n_trajs)",
                )
            time.sleep(min(options.poll_interval_s, left))
            found = count_now()
            bar.update(min(found, wanted) - bar.n)
