"""`PrioritizedRing`: which rows of a ring count and how likely they are drawn, asked by row id.

One rule: a limit is a weight. A row that is overwritten, stale or used up has weight 0, so that priorities and
limits compose. Ids are a ring's keys, and places its cells. What a row holds is in a `RingStore`; nothing is
locked here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from ..core import arguments
from ..core.memory import library, own, tensor_of
from ..errors import SchemaError, UsageError
from ..ring.ring import cells
from .limits import NONE, RowLimits
from .rows import PrioritizedRows, PriorityRule

#: What is saved per place.
_COLUMNS = {"weights": torch.float64, "priorities": torch.float64, "row_ids": torch.int64}
_USE_COLUMNS = {"uses": torch.int64, "collected": torch.int64}
_LARGEST = torch.finfo(torch.float64).max


class Draw(NamedTuple):
    """Rows that were drawn.

    Attributes:
        places: `[n]` int64; copies of a row stand together.
        ids: `[n]` int64.
        importance: `[n]` float64, weights for the loss in (0, 1].
    """

    places: torch.Tensor
    ids: torch.Tensor
    importance: torch.Tensor


class Update(NamedTuple):
    """A checked update: ids and priorities `[n]`, as `own` gives them, and the largest priority."""

    ids: Any
    priorities: Any
    largest: float


class PrioritizedRing:
    """Priorities and limits of the rows of a ring.

    Args:
        num_slots: Rows per lane.
        num_lanes: Streams that are written in lock-step.
        rule: How priorities are used.
        device: Where everything is.
        limits: Which rows are over, for `num_slots * num_lanes` places; None for no limit, then uses are not counted.

    Attributes:
        num_dead_updates: Updates so far of rows that were gone.
    """

    def __init__(
        self, num_slots: int, num_lanes: int, rule: PriorityRule, device: torch.device, limits: RowLimits | None = None
    ) -> None:
        self.num_slots, self.num_lanes, self.device = num_slots, num_lanes, device
        self.rows = PrioritizedRows(num_slots * num_lanes, rule, device)
        self.limits = RowLimits(num_slots * num_lanes, device=device) if limits is None else limits
        self.num_dead_updates = 0
        self._columns = _COLUMNS if limits is None else _COLUMNS | _USE_COLUMNS
        self._library = library(device)

    def __len__(self) -> int:
        """Rows that count."""
        return self.limits.num_valid

    def places(self, ids: Any) -> Any:
        """Say where `[n]` rows are; a tensor or what `own` gives."""
        return cells(ids, self.num_slots, self.num_lanes)

    def register(
        self, ids: torch.Tensor, given: tuple[Any, float] | None = None, collected: torch.Tensor | None = None
    ) -> None:
        """Let new rows be drawn, each in the place of the row that it overwrites.

        Args:
            ids: `[n]` int64, of different places.
            given: Priorities `[n]` and the largest, as `rows.checked` gives them; None for the largest so far.
            collected: `[n]` int64, iterations in which they were collected; None if that is not known.
        """
        if not len(ids):
            return
        places = self.places(ids)
        if given is None:
            self.rows.fill(own(places), self.rows.max_priority)
        else:
            self.rows.set(own(places), given[0])
            self.rows.max_priority = max(self.rows.max_priority, given[1])
        self.limits.add(places, ids, collected)

    def drop(self, places: torch.Tensor) -> torch.Tensor:
        """Remove the rows at `[n]` places; give the places of those that counted, each once."""
        found = self.limits.remove(places)
        if len(found):
            self.rows.weigh(own(found), 0.0)
        return found

    def clear(self) -> None:
        """Remove every row, and forget the largest priority and all draws."""
        self.rows.clear()
        self.limits.clear()

    def draw(self, num_draws: int, generator: torch.Generator, among: torch.Tensor | None = None) -> Draw | None:
        """Draw rows, one from each of `num_draws` intervals of equal mass; None if no row has a weight.

        Args:
            num_draws: How many.
            generator: On the ring's device.
            among: `[m]` places, only these; None for all.
        """
        rows = self.rows
        drawn = rows.draw(num_draws, generator) if among is None else rows.draw_among(among, num_draws, generator)
        if drawn is None:
            return None
        places, importance = drawn
        return Draw(tensor_of(places), tensor_of(self.limits.ids(places)), tensor_of(importance))

    def checked_update(self, ids: Any, priorities: Any) -> Update:
        """Check `[n]` ids and finite priorities >= 0, `[n]` or one for all; nothing is changed.

        Raises:
            UsageError: They are not that.
        """
        found = torch.as_tensor(ids, device=self.device)
        num_ids = found.numel()
        if found.dim() != 1 or (num_ids and (found.is_floating_point() or found.dtype is torch.bool)):
            raise UsageError("update priorities", "", "ids [n] of integers", f"{found.dtype} {list(found.shape)}")
        return Update(own(found.long()), *self.rows.checked(priorities, num_ids))

    def update(self, update: Update) -> int:
        """Set the priorities of rows, plus eps; give how many were still there, and count the others."""
        ids, priorities, largest = update
        places = self.places(ids)
        is_live = self.limits.holds(places, ids)
        num_live = int(self._library.count_nonzero(is_live))
        if num_live < len(ids):
            self.num_dead_updates += len(ids) - num_live
            places, priorities = places[is_live], priorities[is_live]
            largest = float(priorities.max()) if num_live else 0.0
        if num_live:
            self.rows.update(places, priorities, largest)
        return num_live

    def state(self, num_places: int) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Give numbers, and tensors of the first `num_places` places; they may share memory."""
        rows, limits = self.rows, self.limits
        tensors = {"weights": rows.weights(num_places), "priorities": rows.priorities[:num_places]}
        tensors |= {"row_ids": limits.row_ids(num_places), "uses": limits.uses[:num_places]}
        tensors["collected"] = limits.collected(num_places)
        numbers = {name: getattr(rows, name) for name in ("max_priority", "num_draws")}
        numbers["num_dead_updates"] = self.num_dead_updates
        return numbers, {name: tensors[name] for name in self._columns}

    def restore(self, num_places: int, numbers: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        """Take over, as a new ring, what `state` gave; raise `SchemaError`, before a change, if it does not fit."""
        for name, dtype in self._columns.items():
            if tensors[name].shape != (num_places,) or tensors[name].dtype != dtype:
                got = f"{tensors[name].dtype} {list(tensors[name].shape)}"
                raise SchemaError("load a state", f"with {name!r}", f"{dtype} [{num_places}]", got)
        weights, row_ids = tensors["weights"], tensors["row_ids"]
        is_weight = torch.isfinite(weights) & (weights >= 0) & ((weights == 0) | (row_ids != NONE))
        if not bool(is_weight.all()):
            raise SchemaError("load a state", "with 'weights'", "finite weights >= 0 of rows", "others")
        for name in ("max_priority", "num_draws", "num_dead_updates"):
            if not arguments.is_real(numbers[name]) or not 0 <= numbers[name] <= _LARGEST:
                raise SchemaError("load a state", f"with {name!r}", "a finite number >= 0", repr(numbers[name]))
        self.rows.restore(weights, tensors["priorities"])
        self.rows.max_priority, self.rows.num_draws = float(numbers["max_priority"]), int(numbers["num_draws"])
        self.limits.restore(row_ids, tensors.get("uses"), tensors.get("collected"))
        self.num_dead_updates = int(numbers["num_dead_updates"])

    def check_valid(self) -> tuple[bool, str]:
        """Check what must always hold: (whether it does, what does not)."""
        row_ids = self.limits.row_ids()
        is_valid = row_ids != NONE
        if bool((self.rows.weights()[~is_valid] > 0).any()):
            return False, "a row that is gone has a weight"
        if int(is_valid.sum()) != len(self):
            return False, "the count is not the number of rows"
        places = self.limits.valid_slots()
        if not torch.equal(self.places(row_ids[places]), places):
            return False, "an id is not that of its place"
        return self.rows.check_valid()
