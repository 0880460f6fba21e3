"""`Epoch`: the order of one epoch, and the share of each rank.

Every item has a random key, a function of the seed, the number of the epoch and the item's name.
Items are delivered in the order of their keys. New and deleted items therefore do not change the
order of other items. The last delivered key is the position to resume from, for any number of
ranks. Keys are computed by integer arithmetic, so they are equal on every processor.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np

from ..blocks.trajectory_index import Int64s, TrajectoryIndex, name_keys, random_keys
from .processes.process_group import Shard

#: Rule by which ranks share the last batches, see `rank_batches`.
Even = Literal["pad", "drop", "none"]


class Epoch(NamedTuple):
    """An epoch of windows, or a pass of playback.

    Attributes:
        seed: The seed that the user chose.
        number: Number of the epoch, from 0. A pass has its number among the passes of all epochs.
        purposes: Numbers that make keys for several purposes independent.
    """

    seed: int
    number: int
    purposes: tuple[int, ...] = ()

    def with_purpose(self, *purposes: int) -> Epoch:
        """Return the same epoch with keys for another purpose."""
        return self._replace(purposes=(*self.purposes, *purposes))

    @property
    def key_seed(self) -> int:
        """Seed of `random_keys`: a 64-bit integer that depends on all attributes."""
        entropy = [self.seed, self.number, *self.purposes]
        return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0])

    def keys(self, index: TrajectoryIndex, trajectories: Int64s) -> np.ndarray:
        """Return the keys of trajectories: uint64 `[K]`."""
        return index.random_keys(trajectories, self.key_seed)

    def key_of_name(self, writer: str, number: int) -> np.ndarray:
        """Return the key of a trajectory that may be deleted: uint64 `[1]`."""
        return random_keys(
            name_keys([writer], np.zeros(1, np.int64), np.array([number])), self.key_seed
        )

    def generator(self) -> np.random.Generator:
        """Return a generator for draws with replacement, whose k-th draw is a function of k."""
        return np.random.default_rng([self.seed, self.number, *self.purposes])


def num_upto(items: Int64s, keys: np.ndarray, key: int, num_before: int) -> int:
    """Return the number of items up to and including an item that may be deleted.

    Args:
        items: int64 `[K]`, numbers of the items, in order.
        keys: `[K]`, keys of the items, ascending. Items of equal keys are in the order of numbers.
        key: Key of the item.
        num_before: Items with the same key count only if their number is below this number.
    """
    first = np.searchsorted(keys, key)
    stop = np.searchsorted(keys, key, side="right")
    return int(first + np.count_nonzero(items[first:stop] < num_before))


def rank_batches(
    start: int, stop: int, batch_size: int, shard: Shard, even: str, drop_last: bool
) -> Int64s:
    """Return the positions of the batches of one rank: int64 `[K, 2]`, half-open.

    The positions `start:stop` of an epoch are divided into batches of all ranks, and each batch
    into one part per rank.

    Args:
        batch_size: Items of a complete batch of one rank.
        even: "pad" gives all ranks equally many items; parts beyond `stop` continue with the first
            items of the epoch. "drop" leaves the remainder out. "none" gives the remainder to the
            first ranks, so parts may be empty.
        drop_last: Whether an incomplete last batch is left out.
    """
    size = batch_size * shard.total
    if drop_last:
        stop -= (stop - start) % size
    first = np.arange(start, stop, size)
    share, rest = np.divmod(np.minimum(size, stop - first), shard.total)
    if even == "pad":
        share += rest > 0
    if even != "none":
        rest = np.zeros_like(rest)
    ranks = np.array([[shard.number], [shard.number + 1]])
    bounds: Int64s = (first + ranks * share + np.minimum(ranks, rest))[:, share + rest > 0].T
    return bounds
