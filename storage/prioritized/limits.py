"""`RowLimits`: which rows of a store still count: not overwritten, not too old, not used too often.

One rule: it decides which rows are over, and removes them only here. No check looks at rows that are not
concerned: the oldest collection is the root of a tree, and only blocks with a stale row are looked into.
Places and ids come and go as `own` gives them.
"""

from __future__ import annotations

from math import inf, isinf
from typing import Any

import torch

from ..core import arguments
from ..core.memory import filled, lasting, own
from .sum_tree import MinTree

#: `collected` of a row that does not say when; it is never stale.
UNKNOWN = (1 << 62) - 1
#: `row_ids` of a slot without a row that counts; ids are >= 0.
NONE = -(1 << 62)
#: Iterations are told apart up to here, either side of 0, as float64 does.
_MAX_ITERATION = 1 << 52
#: Uses that are counted together.
_MAX_WAITING = 1 << 14


class _OldestTree(MinTree):
    """The least iteration per slot, less `_MAX_ITERATION`; 0 where none is known."""

    NEUTRAL = 0.0


class RowLimits:
    """Counters of `capacity` slots. Slots without a row are zeros, which take no memory before they are written.

    Args:
        capacity: Slots, numbered from 0.
        max_use: A row that was drawn so often is over; `inf` or None for no limit.
        max_staleness: A row that was collected this many learner iterations ago is over; `inf` or None for no limit.
        device: Where the counters are.

    Attributes:
        num_valid: Rows that count.
    """

    @lasting
    def __init__(
        self,
        capacity: int,
        max_use: float | None = inf,
        max_staleness: float | None = inf,
        device: torch.device | str = "cpu",
    ) -> None:
        self.max_use, self.max_staleness = inf, inf
        if max_use is not None:
            self.max_use = arguments.real("limit rows", "max_use", max_use, ">= 1, or inf", lambda x: x >= 1)
        if max_staleness is not None:
            self.max_staleness = arguments.real(
                "limit rows", "max_staleness", max_staleness, ">= 0, or inf", lambda x: x >= 0
            )
        device = torch.device(device)
        #: Ids, with the bits of `NONE` turned over, and iterations, with those of `UNKNOWN`.
        self._flipped_ids = filled((capacity,), 0, torch.int64, device)
        self._flipped_collected = filled((capacity,), 0, torch.int64, device)
        self._uses = filled((capacity,), 0, torch.int64, device)
        #: Uses that are still to be counted: counting 4096 at once takes 4 % of a draw and its update.
        self._used: list[torch.Tensor] = []
        self._num_used = 0
        self.num_valid = 0
        self._own_ids = own(self._flipped_ids)
        self._oldest = None if isinf(self.max_staleness) else _OldestTree(capacity, device)

    def row_ids(self, num_slots: int | None = None) -> torch.Tensor:
        """Copy the ids of the rows in the first slots, int64; `NONE` where no row counts. None is all slots."""
        return self._flipped_ids[:num_slots] ^ NONE

    def collected(self, num_slots: int | None = None) -> torch.Tensor:
        """Copy the iterations in which the rows in the first slots were collected, int64; `UNKNOWN` if not known."""
        return self._flipped_collected[:num_slots] ^ UNKNOWN

    @property
    def uses(self) -> torch.Tensor:
        """How often the row in each slot was drawn, `[capacity]` int64, sharing memory."""
        if self._used:
            used = torch.cat(self._used)
            self._uses.scatter_add_(0, used, torch.ones_like(used))
            self._used, self._num_used = [], 0
        return self._uses

    def add(self, index: torch.Tensor, ids: torch.Tensor, collected: torch.Tensor | None) -> None:
        """Let `[n]` different slots count, unused; `collected` is `[n]` int64, None if that is not known."""
        self.num_valid += len(index) - int((self._flipped_ids[index] != 0).sum())
        self._flipped_ids[index] = ids ^ NONE
        self.uses[index] = 0
        self._flipped_collected[index] = 0 if collected is None else collected ^ UNKNOWN
        if self._oldest is not None:
            whens = torch.zeros_like(index) if collected is None else _since_first(collected)
            self._oldest.write(index, whens.double())

    def holds(self, places: Any, ids: Any) -> Any:
        """Tell which of `[n]` slots hold the rows of these ids; any integer may be asked for."""
        found = self._own_ids[places] == ids ^ NONE
        found &= ids >= 0  # `NONE` is no id
        return found

    def ids(self, places: Any) -> Any:
        """Copy the ids of the rows in `[n]` slots."""
        return self._own_ids[places] ^ NONE

    def valid_slots(self) -> torch.Tensor:
        """List the slots that have a row that counts, ascending."""
        return self._flipped_ids.nonzero().squeeze(1)

    def remove(self, index: torch.Tensor) -> torch.Tensor:
        """Let `[n]` rows not count any more; give those that did, each once, ascending."""
        found: torch.Tensor = torch.unique(index[self._flipped_ids[index] != 0])
        self.num_valid -= len(found)
        self._flipped_ids[found] = 0
        if self._oldest is not None and len(found):
            self._oldest.fill(found, 0.0)
        return found

    def stale(self, iteration: int) -> torch.Tensor | None:
        """List the slots whose rows are over by `iteration`; None if none is."""
        bound = min(iteration - self.max_staleness - _MAX_ITERATION, -1)
        if self._oldest is None or self._oldest.reduce() > bound:
            return None
        return self._oldest.at_most(bound)

    def use(self, index: torch.Tensor) -> torch.Tensor | None:
        """Count one use per copy of `[n]` rows; list those that were used as often as they may, or None.

        `index` is kept, and must not be changed.
        """
        self._used.append(index)
        self._num_used += index.shape[0]
        if not isinf(self.max_use):
            return index[self.uses[index] >= self.max_use]
        if self._num_used >= _MAX_WAITING:
            _ = self.uses
        return None

    def uses_with(self, index: torch.Tensor) -> torch.Tensor:
        """Count the uses of `[n]` slots before `use` counts them, each copy's own included; copies stand together."""
        counts = torch.unique_consecutive(index, return_counts=True)[1]
        firsts = (counts.cumsum(0) - counts).repeat_interleave(counts)
        numbers: torch.Tensor = torch.arange(1, len(index) + 1, device=index.device) - firsts
        return numbers + self.uses[index]

    def staleness(self, index: torch.Tensor, iteration: int) -> torch.Tensor:
        """Say how many iterations ago `[n]` rows were collected: int64, -1 if that is not known."""
        collected = self._flipped_collected[index] ^ UNKNOWN
        found: torch.Tensor = torch.where(collected == UNKNOWN, -1, iteration - collected)
        return found

    def clear(self) -> None:
        """Let no row count."""
        self._flipped_ids.zero_()
        self.num_valid = 0
        if self._oldest is not None:
            self._oldest.clear()

    def restore(self, row_ids: torch.Tensor, uses: torch.Tensor | None, collected: torch.Tensor | None) -> None:
        """Take over, as a new object, the counters of the first `[n]` slots; None where they are not counted."""
        num_slots = len(row_ids)
        self._flipped_ids[:num_slots] = row_ids ^ NONE
        self.num_valid = int((row_ids != NONE).sum())
        if uses is not None:
            self._uses[:num_slots] = uses
        if collected is not None:
            self._flipped_collected[:num_slots] = collected ^ UNKNOWN
            if self._oldest is not None:
                self._oldest.rebuild(torch.where(row_ids != NONE, _since_first(collected), 0).double())


def _since_first(collected: torch.Tensor) -> torch.Tensor:
    """Say how far `[n]` iterations are before the last that is told apart, negative; 0 for `UNKNOWN`."""
    return collected.clamp(-_MAX_ITERATION, _MAX_ITERATION) - _MAX_ITERATION
