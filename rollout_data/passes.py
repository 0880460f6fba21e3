"""Passes over a dataset: which trajectories, in which order, starting where.

One rule: order and starts are a function of (seed, pass) and of the trajectories there are; no
generator is kept, so that resuming needs no more than the number of the pass.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from tqdm import tqdm

from storage.errors import UsageError, WaitTimeoutError

from .index import Int64s, TrajectoryIndex
from .sharding import Shard

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


def choose(index: TrajectoryIndex, options: PassOptions) -> Int64s:
    """Which trajectories a pass delivers, over all shards: int64, in the order of completion."""
    is_eligible = index.is_present()
    if options.keep_latest_n_trajs == 0:
        return np.flatnonzero(is_eligible)
    return np.flatnonzero(is_eligible & index.is_complete())[-options.keep_latest_n_trajs :]


def deal_order(pool: Int64s, lengths: Int64s, options: PassOptions, number: int, shard: Shard) -> tuple[Int64s, Int64s]:
    """Order a pass: the trajectories of this shard, and the frame at which each starts.

    A start is uniform over the part of `starting_frame_range` that lies within the trajectory; 0
    if none of it does.
    """
    order = pool
    if options.random_shuffle_traj_order:
        order = pool[_generator(options.seed, number, _ORDER).permutation(len(pool))]
    low, high = options.starting_frame_range
    room = np.minimum(high, lengths[order]) - low
    starts = np.zeros(len(order), np.int64)
    if high > 1:
        draws = _generator(options.seed, number, _STARTS).random(len(order))
        starts = np.where(room > 0, low + (draws * np.maximum(room, 1)).astype(np.int64), 0)
    return order[shard.number :: shard.total], starts[shard.number :: shard.total]


def _generator(seed: int, number: int, purpose: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, number, purpose])))


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
