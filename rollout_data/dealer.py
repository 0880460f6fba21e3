"""The dealer: turns what is in the folders into passes, one after the other.

One rule: folders are looked at only between passes; within one, what there is does not change.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import torch

from storage.errors import UsageError

from .cursor import Deal, Int64s, StreamState, deal_without
from .file_frames import LostBlockError
from .frames import CachedFrames, FrameStore
from .index import Block, TrajectoryIndex
from .passes import PassOptions, choose, deal_order, wait_for_trajectories
from .sharding import Shard
from .source_base import BlocksInUse, Source
from .sources import blocks_of

#: Passes of different epochs must never share a number.
_PASSES_AN_EPOCH = 1 << 20


class Dealer:
    """Orders the passes that one process delivers.

    Args:
        source: The folders.
        options: Which trajectories, and in which order.
        shard: The share of this process.
        epoch: Changes permutations and starts.
        keeps_on: Device to whose memory the frames are copied first; None leaves them in the files.
    """

    def __init__(
        self, source: Source, options: PassOptions, shard: Shard, epoch: int, keeps_on: torch.device | None
    ) -> None:
        self.source, self.options, self.shard, self.epoch, self.keeps_on = source, options, shard, epoch, keeps_on

    def first(self) -> Deal:
        """Give the first pass."""
        return self._begin(0, None, np.zeros(0, np.int64))[0]

    def following(self, deal: Deal, in_use: Int64s) -> tuple[Deal, Int64s] | None:
        """Give the pass after `deal` and the numbers of the trajectories `in_use` in it; None if there is none.

        Raises:
            UsageError: No trajectory is left.
        """
        if not self.options.has_pass(deal.number + 1):
            return None
        begun = self._begin(deal.number + 1, deal, in_use)
        if not len(begun[0].order):
            paths = ", ".join(map(str, self.source.paths))
            raise UsageError("begin the next pass", f"over {paths!r}", "at least one trajectory", "none left")
        return begun

    def without(self, lost: LostBlockError, state: StreamState, deal: Deal) -> tuple[StreamState, Deal]:
        """Go on without the trajectories of a block that is lost; their envs take the next ones."""
        self.source.forget(lost)
        blocks = deal.source.index.blocks
        numbers = [lost.block]
        if lost.block >= len(blocks) or blocks[lost.block].path != lost.path:  # it was lost in the pass after this one
            numbers = [number for number, block in enumerate(blocks) if block.path == lost.path]
        return deal_without(state, deal, deal.source.index.trajectories_in(numbers), self.following)

    def dealt(self, number: int, store: FrameStore, in_use: Int64s, before: Deal | None = None) -> Deal:
        """Order pass `number` over the trajectories of a snapshot."""
        lengths = store.index.lengths
        pool = choose(store.index, self.options)
        seed_of_pass = number + self.epoch * _PASSES_AN_EPOCH
        order, starts = deal_order(pool, lengths, self.options, seed_of_pass, self.shard)
        if self.keeps_on is not None:
            store = self._cached(store, np.union1d(order, in_use[in_use >= 0]), before, self.keeps_on)
        return Deal(lengths, order, starts, number, store)

    def _begin(self, number: int, before: Deal | None, in_use: Int64s) -> tuple[Deal, Int64s]:
        """Look for new trajectories and order a pass; blocks that are in use stay readable."""
        index = before.source.index if before is not None else None

        def blocks_in_use() -> Collection[Block]:
            return blocks_of(index, in_use) if index is not None else ()

        self.source.refresh(blocks_in_use)
        if self.options.keep_latest_n_trajs:
            where = repr(", ".join(map(str, self.source.paths)))
            wanted = self.options.keep_latest_n_trajs
            wait_for_trajectories(lambda: self._count_complete(blocks_in_use), wanted, self.options, where)
        store = self.source.snapshot()
        has_moved = index is not None and index is not store.index
        numbers = _found_again(index, store.index, in_use) if index is not None and has_moved else in_use
        try:
            return self.dealt(number, store, numbers, before), numbers
        except LostBlockError as lost:  # while it was copied to memory
            self.source.forget(lost)
            return self._begin(number, before, in_use)

    def _count_complete(self, in_use: BlocksInUse) -> int:
        self.source.refresh(in_use)
        return len(choose(self.source.snapshot().index, self.options))

    @staticmethod
    def _cached(store: FrameStore, trajectories: Int64s, before: Deal | None, device: torch.device) -> FrameStore:
        last = before.source if before is not None else None
        if isinstance(last, CachedFrames) and last.index is store.index and last.holds(trajectories):
            return last
        return CachedFrames(store, trajectories, device)


def _found_again(before: TrajectoryIndex, now: TrajectoryIndex, trajectories: Int64s) -> Int64s:
    """Numbers of trajectories in another index; -1 for those that are gone, or have lost their last part."""
    numbers = now.find(before.keys(trajectories))
    has_shrunk = now.lengths[numbers] < before.lengths[trajectories] if len(now) else True
    return np.where(has_shrunk, -1, numbers)
