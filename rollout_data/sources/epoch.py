"""`Epoch`: the shuffled order of one epoch, and the batches of each rank.

Every item (a window or trajectory) has a pseudorandom key, computed from the seed, the number of
the epoch and the name of the item. Items are read in the order of their keys, so new and deleted
items do not change the order of other items. The last key that was read is the position to resume
from, for any number of ranks. Keys are computed by integer arithmetic, so they are equal on every
processor.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np

from ..blocks.trajectory_index import Int64s, TrajectoryIndex, name_keys, random_keys
from .processes.process_group import Shard

#: How ranks divide an incomplete last batch: repeat items, drop the remainder, or divide unevenly.
Even = Literal["pad", "drop", "none"]


class Epoch(NamedTuple):
    """Source of the pseudorandom keys of an epoch of windows, or of a pass of playback.

    Attributes:
        seed: The seed that the user chose.
        number: Number of the epoch, from 0; for playback, number of the pass over all epochs.
        purposes: Numbers that make the keys for several purposes independent of each other.
    """

    seed: int
    number: int
    purposes: tuple[int, ...] = ()

    def with_purpose(self, *purposes: int) -> Epoch:
        """Return a copy of this epoch with other keys, for a second, independent random order."""
        return self._replace(purposes=(*self.purposes, *purposes))

    @property
    def key_seed(self) -> int:
        """The 64-bit seed of all keys, computed from seed, number and purposes."""
        entropy = [self.seed, self.number, *self.purposes]
        return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0])

    def keys(self, index: TrajectoryIndex, trajectories: Int64s) -> np.ndarray:
        """Return the pseudorandom keys that order K trajectories in this epoch, uint64 `[K]`."""
        return index.random_keys(trajectories, self.key_seed)

    def key_of_name(self, writer: str, number: int) -> np.ndarray:
        """Return the pseudorandom key of the trajectory with this writer and number, uint64 `[1]`.

        Unlike `keys`, this also works for a deleted trajectory, at which reading may resume.
        """
        return random_keys(
            name_keys([writer], np.zeros(1, np.int64), np.array([number])), self.key_seed
        )

    def generator(self) -> np.random.Generator:
        """Return the random generator of this epoch, for sampling with replacement."""
        return np.random.default_rng([self.seed, self.number, *self.purposes])


def num_upto(items: Int64s, keys: np.ndarray, key: int, num_before: int) -> int:
    """Return how many items of an epoch come before the position from which to resume.

    The position is stated as a key, since the item at this position may have been deleted.

    Args:
        items: Numbers of the items in the order of the epoch, int64 `[K]`.
        keys: Keys of the items, ascending, `[K]`. Items with equal keys are sorted by number.
        key: Key of the position. Items with lower keys lie before it.
        num_before: Items with the key `key` lie before the position if their number is lower.
    """
    first = np.searchsorted(keys, key)
    stop = np.searchsorted(keys, key, side="right")
    return int(first + np.count_nonzero(items[first:stop] < num_before))


def rank_batches(
    start: int, stop: int, batch_size: int, shard: Shard, even: str, drop_last: bool
) -> Int64s:
    """Return which positions of the epoch form the K batches of a rank, int64 `[K, 2]`.

    A row contains the start and stop of a batch.

    Positions `start:stop` of the epoch are divided into batches over all ranks, and each batch into
    one part per rank.

    Args:
        start: First position to divide.
        stop: One past the last position to divide.
        batch_size: Number of items of a complete batch of one rank.
        shard: Rank and world size.
        even: How an incomplete batch is divided. "pad" assigns equally many items to all ranks;
            positions beyond `stop` mean the first items of the epoch. "drop" leaves out the
            remainder. "none" assigns the remainder to the first ranks, so parts may be empty.
        drop_last: Whether to leave out an incomplete last batch.
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
