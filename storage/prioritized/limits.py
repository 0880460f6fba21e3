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
#: Uses that are counted together.
_MAX_WAITING = 1 << 14


class RowLimits:
    """Counters of `capacity` slots.

    Args:
        capacity: Slots, numbered from 0.
        max_use: A row that was drawn so often is over; `inf` or None for no limit.
        max_staleness: A row that was collected this many learner iterations ago is over; `inf` or None for no limit.
        device: Where the counters are.

    Attributes:
        row_ids: `[capacity]` int64, id of the row in a slot; `NONE` if there is none that counts.
        collected: `[capacity]` int64, iteration in which it was collected; `UNKNOWN` if that is not known.
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
        self.row_ids = filled((capacity,), NONE, torch.int64, device)
        self._uses = filled((capacity,), 0, torch.int64, device)
        #: Uses that are still to be counted: counting 4096 at once takes 4 % of a draw and its update.
        self._used: list[torch.Tensor] = []
        self._num_used = 0
        self.collected = filled((capacity,), UNKNOWN, torch.int64, device)
        self.num_valid = 0
        self._own_row_ids = own(self.row_ids)
        self._oldest = None if isinf(self.max_staleness) else MinTree(capacity, device)

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
        self.num_valid += len(index) - int((self.row_ids[index] != NONE).sum())
        self.row_ids[index] = ids
        self.uses[index] = 0
        self.collected[index] = UNKNOWN if collected is None else collected
        if self._oldest is not None:
            whens = torch.full_like(index, inf, dtype=torch.float64) if collected is None else collected.double()
            self._oldest.write(index, whens)

    def holds(self, places: Any, ids: Any) -> Any:
        """Tell which of `[n]` slots hold the rows of these ids; any integer may be asked for."""
        found = self._own_row_ids[places] == ids
        found &= ids >= 0  # `NONE` is no id
        return found

    def ids(self, places: Any) -> Any:
        """Copy the ids of the rows in `[n]` slots."""
        return self._own_row_ids[places]

    def valid_slots(self) -> torch.Tensor:
        """List the slots that have a row that counts, ascending."""
        return (self.row_ids != NONE).nonzero().squeeze(1)

    def remove(self, index: torch.Tensor) -> torch.Tensor:
        """Let `[n]` rows not count any more; give those that did, each once, ascending."""
        found: torch.Tensor = torch.unique(index[self.row_ids[index] != NONE])
        self.num_valid -= len(found)
        self.row_ids[found] = NONE
        if self._oldest is not None and len(found):
            self._oldest.fill(found, inf)
        return found

    def stale(self, iteration: int) -> torch.Tensor | None:
        """List the slots whose rows are over by `iteration`; None if none is."""
        bound = iteration - self.max_staleness
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
        collected = self.collected[index]
        found: torch.Tensor = torch.where(collected == UNKNOWN, -1, iteration - collected)
        return found

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
