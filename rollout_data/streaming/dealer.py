"""The dealer: turns what is in the folders into passes, one after the other.

One rule: folders are looked at only between passes, by one process for all (`index/agreement.py`); within a pass, what
there is does not change.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch

from storage.errors import DataFileError, UsageError

from ..frames.source_base import Source
from ..frames.sources import blocks_of
from ..frames.store import CachedFrames, FrameStore
from ..index.agreement import Agree
from ..index.index import Block, TrajectoryIndex
from .cursor import Deal, Int64s
from .losses import leave_out
from .passes import Name, PassOptions, choose, pass_order, wait_for_trajectories

#: Passes of different epochs must never share a number.
_PASSES_AN_EPOCH = 1 << 20


class Dealer:
    """Orders the passes of one epoch.

    Args:
        source: The folders.
        options: Which trajectories, and in which order.
        epoch: Changes permutations and starts.
        keeps_on: Device to whose memory the frames are copied first; None leaves them in the files.
        skips: Leave out trajectories that are damaged, rather than raise.
        agree: How this process learns what is in the folders.
    """

    def __init__(
        self,
        source: Source,
        options: PassOptions,
        epoch: int,
        keeps_on: torch.device | None,
        skips: bool,
        agree: Agree,
    ) -> None:
        self.source, self.options, self.epoch, self.keeps_on = source, options, epoch, keeps_on
        self.skips, self.agree = skips, agree
        self._seen: Any = None

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

    def number_of(self, pass_number: int) -> int:
        """Number a pass among those of all epochs."""
        return pass_number + self.epoch * _PASSES_AN_EPOCH

    def resumed(self, number: int, upto: Mapping[str, int]) -> FrameStore:
        """Give what a pass that was begun elsewhere may use, as far as it is still there."""

        def look() -> Any:
            self.source.refresh()
            return self._sight()

        self.source.adopt(self.agree(number, look))
        return self.source.snapshot(upto=upto)

    def dealt(
        self,
        number: int,
        store: FrameStore,
        in_use: Int64s,
        before: Deal | None = None,
        bounds: tuple[Name, Name] | None = None,
    ) -> Deal:
        """Order pass `number` over the trajectories of a snapshot; `bounds`: see `choose`."""
        pool = choose(store.index, self.options, bounds)
        order, starts = pass_order(store.index, pool, self.options, self.number_of(number))
        if self.keeps_on is not None:
            store = self._cached(store, np.union1d(order, in_use[in_use >= 0]), before, self.keeps_on)
        return Deal(store.index.lengths, order, starts, number, store)

    def _begin(self, number: int, before: Deal | None, in_use: Int64s) -> tuple[Deal, Int64s]:
        """Look for new trajectories and order a pass; blocks that are in use stay readable."""
        index = before.source.index if before is not None else None

        def blocks_in_use() -> Collection[Block]:
            return blocks_of(index, in_use) if index is not None else ()

        def look() -> Any:
            self.source.refresh(blocks_in_use)
            if wanted := self.options.keep_latest_n_trajs:
                where = repr(", ".join(map(str, self.source.paths)))
                wait_for_trajectories(lambda: self._count_complete(blocks_in_use), wanted, self.options, where)
            return self._sight()

        self.source.adopt(self.agree(number, look))
        store = self.source.snapshot()
        has_moved = index is not None and index is not store.index
        numbers = _found_again(index, store.index, in_use) if index is not None and has_moved else in_use
        return self.dealt(number, store, numbers, before), numbers

    def _sight(self) -> Any:
        """Say what is there now; None if that was said already."""
        seen, self._seen = self._seen, self.source.sight()
        return None if self._seen is seen else self._seen

    def _count_complete(self, in_use: Any) -> int:
        self.source.refresh(in_use)
        return len(choose(self.source.snapshot().index, self.options))

    def _cached(self, store: FrameStore, trajectories: Int64s, before: Deal | None, device: torch.device) -> FrameStore:
        last = before.source if before is not None else None
        if isinstance(last, CachedFrames) and last.index is store.index and last.holds(trajectories):
            return last
        while True:
            try:
                return CachedFrames(store, trajectories, device)
            except DataFileError as problem:
                leave_out(self.source, store, trajectories, problem, self.skips)


def _found_again(before: TrajectoryIndex, now: TrajectoryIndex, trajectories: Int64s) -> Int64s:
    """Numbers of trajectories in another index; -1 for those that are gone, or have lost their last part."""
    numbers = now.find(before.keys(trajectories))
    has_shrunk = now.lengths[numbers] < before.lengths[trajectories] if len(now) else True
    return np.where(has_shrunk, -1, numbers)
