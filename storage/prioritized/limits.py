"""`RowLimits`: which rows of a store still count: not overwritten, not too old, not used too often.

One rule: it only says which; whoever asks removes them from wherever else they are. No check looks
at rows that are not concerned: the oldest collection is the root of a tree, and only blocks that
hold a stale row are looked into.
"""

from __future__ import annotations

from math import inf, isinf
from typing import Any

import torch

from ..core.host_arrays import column_of, own
from ..core.modes import lasting
from ..errors import UsageError
from .sum_tree import MinTree

#: `collected` of a row that does not say when; it is never stale.
UNKNOWN = (1 << 62) - 1
#: `row_ids` of a slot without a row that counts; no id is like this.
NONE = -(1 << 62)
#: Uses that are counted together.
_MAX_USED = 1 << 14


class RowLimits:
    """Counters of `capacity` slots.

    Args:
        capacity: Slots, numbered from 0.
        max_use: A row that was drawn so often is over; `inf` or None for no limit.
        max_staleness: A row that was collected so many learner iterations ago is over; `inf` or None for no limit.
        device: Where the counters are.
    """

    @lasting
    def __init__(
        self,
        capacity: int,
        max_use: float | None = inf,
        max_staleness: float | None = inf,
        device: torch.device | str = "cpu",
    ) -> None:
        self.max_use = _limit("max_use", max_use, 1)
        self.max_staleness = _limit("max_staleness", max_staleness, 0)
        device = torch.device(device)
        #: Id of the row that is in a slot; `NONE` if there is none that counts.
        self.row_ids = column_of(capacity, NONE, torch.int64, device)
        self.own_row_ids = own(self.row_ids)
        self._uses = column_of(capacity, 0, torch.int64, device)
        #: Uses that are still to be counted, and how many: nobody may ever ask for them.
        self._used: list[torch.Tensor] = []
        self._num_used = 0
        self.collected = column_of(capacity, UNKNOWN, torch.int64, device)
        self.num_valid = 0
        self._oldest = None if isinf(self.max_staleness) else MinTree(capacity, device)

    @property
    def uses(self) -> torch.Tensor:
        """How often the row in each slot was used, `[capacity]` int64, sharing memory."""
        if self._used:
            used = torch.cat(self._used)
            self._uses.scatter_add_(0, used, torch.ones_like(used))
            self._used, self._num_used = [], 0
        return self._uses

    def add(self, index: torch.Tensor, ids: torch.Tensor, collected: torch.Tensor | None) -> None:
        """Let `[n]` different slots count, unused; `collected` is `[n]` int64, None if nobody knows."""
        self.num_valid += index.shape[0] - int(self.is_valid(index).sum())
        self.row_ids.index_copy_(0, index, ids)
        self.uses.index_fill_(0, index, 0)
        if collected is None:
            self.collected.index_fill_(0, index, UNKNOWN)
        else:
            self.collected.index_copy_(0, index, collected)
        if self._oldest is not None:
            if collected is None:
                self._oldest.fill(index, inf)
            else:
                self._oldest.write(index, collected.double())

    def holds(self, slots: Any, ids: Any) -> Any:
        """Tell which of `[n]` slots still hold the rows of these ids, whatever ids those are; as `own` gives them."""
        found = self.own_row_ids[slots] == ids
        found &= ids >= 0  # `NONE` is no id
        return found

    def is_valid(self, index: torch.Tensor) -> torch.Tensor:
        """Tell which of `[n]` slots have a row that counts."""
        return self.row_ids.index_select(0, index) != NONE

    def valid_slots(self) -> torch.Tensor:
        """List the slots that have a row that counts."""
        return (self.row_ids != NONE).nonzero().squeeze(1)

    def remove(self, index: torch.Tensor) -> torch.Tensor:
        """Let `[n]` rows not count any more; give those that did, each once, ascending."""
        found: torch.Tensor = torch.unique(index[self.is_valid(index)])
        self.num_valid -= found.shape[0]
        self.row_ids.index_fill_(0, found, NONE)
        if self._oldest is not None and len(found):
            self._oldest.fill(found, inf)
        return found

    def stale(self, iteration: int) -> torch.Tensor | None:
        """List the slots whose rows are over by `iteration`; None if none is."""
        bound = iteration - self.max_staleness
        if self._oldest is None or self._oldest.reduce() > bound:
            return None
        return self._oldest.at_most(bound)

    def use(self, index: torch.Tensor) -> None:
        """Count one use per copy of `[n]` rows; `index` is kept for a while."""
        self._used.append(index)
        self._num_used += index.shape[0]
        if self._num_used > _MAX_USED:
            _ = self.uses

    def used_up(self, index: torch.Tensor) -> torch.Tensor | None:
        """List those of `[n]` slots whose rows were used as often as they may; None if there is no limit."""
        if isinf(self.max_use):
            return None
        return index[self.uses.index_select(0, index) >= self.max_use]

    def staleness(self, index: torch.Tensor, iteration: int) -> torch.Tensor:
        """Say how many iterations ago `[n]` rows were collected: int64, -1 if nobody knows."""
        collected = self.collected.index_select(0, index)
        return torch.where(collected == UNKNOWN, -1, iteration - collected)

    def clear(self) -> None:
        """Let no row count."""
        self.row_ids.fill_(NONE)
        self.num_valid = 0
        if self._oldest is not None:
            self._oldest.clear()

    def restore(self, row_ids: torch.Tensor, uses: torch.Tensor, collected: torch.Tensor) -> None:
        """Take over the counters of all slots."""
        for mine, its in ((self.row_ids, row_ids), (self.uses, uses), (self.collected, collected)):
            mine.copy_(its)
        is_valid = row_ids != NONE
        self.num_valid = int(is_valid.sum())
        if self._oldest is not None:
            self._oldest.rebuild(torch.where(is_valid & (collected != UNKNOWN), collected.double(), inf))


def copy_numbers(index: torch.Tensor) -> torch.Tensor:
    """Number the copies of each value in an ascending `[n]` tensor: 1 for the first, 2 for the second, ..."""
    place = torch.arange(len(index), device=index.device)
    is_new = torch.ones_like(index, dtype=torch.bool)
    is_new[1:] = index[1:] != index[:-1]
    return place - torch.cummax(torch.where(is_new, place, 0), 0).values + 1 if len(index) else place


def _limit(name: str, value: float | None, least: int) -> float:
    found = inf if value is None else value
    if isinstance(found, bool) or not isinstance(found, (int, float)) or not found >= least:
        raise UsageError("limit rows", "", f"{name} >= {least}, or inf", repr(value))
    return found
