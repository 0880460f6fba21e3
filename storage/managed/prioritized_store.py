"""`PrioritizedStore`: items, their priorities, and what keeps them from being drawn.

One rule: a constraint is a weight. A row that is stale or used up has weight 0 like one that was
never written, so that priorities, staleness and use limits compose. Nothing is locked here: the
buffer that owns this holds its lock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from ..core.host_arrays import library, own, tensor_of
from ..core.tree import map_leaves
from ..errors import SchemaError, UsageError
from ..prioritized.limits import NONE, UNKNOWN, RowLimits, copy_numbers
from ..prioritized.rows import PrioritizedRows
from .item_ids import plain_number
from .item_leaves import from_json, put_leaf, to_json
from .items import Items, ItemStore
from .used_data import UsedData, checked_data_id

_ROW_TENSORS = {"weights": torch.float64, "priorities": torch.float64, "row_ids": torch.int64}
_ROW_TENSORS |= {"uses": torch.int64, "collected": torch.int64}
#: What slots have that nobody wrote, where it is not 0.
_BLANK = {"row_ids": NONE, "collected": UNKNOWN}
_LARGEST = torch.finfo(torch.float64).max


@dataclass(frozen=True)
class Push:
    """Checked items, and what decides about them; None stands for what nobody said."""

    items: Items
    #: `[n]` float64.
    priorities: torch.Tensor | None
    largest: float
    #: `[n]` int64.
    collected: torch.Tensor | None


class Draw(NamedTuple):
    """`[n]` slots that were drawn, ascending; the same and their importance weights, float64, as `own` gives them."""

    slots: torch.Tensor
    places: Any
    importance: Any


class PrioritizedStore:
    """Items with priorities and limits.

    Args:
        items: Where they lie.
        rows: Their priorities.
        limits: Which of them count.
        used: Who needs their data; None if nobody asks.
    """

    def __init__(self, items: ItemStore, rows: PrioritizedRows, limits: RowLimits, used: UsedData | None) -> None:
        self.items, self.rows, self.limits, self.used = items, rows, limits, used
        self.device = items.device
        self._library = library(self.device)
        #: Updates of items that were gone.
        self.num_dead_updates = 0

    # Coming and going.

    def read_items(self, given: Sequence[Mapping[str, Any]]) -> Push:
        """Check items; nothing is changed."""
        plain, priorities, iterations = [], [], []
        for item in given:
            if not isinstance(item, Mapping):
                raise SchemaError("add an item", "", "a mapping", type(item).__name__)
            own = dict(item)
            priorities.append(own.pop("priority", None))
            if "collect_iter" in own:  # a number, however it is given; never a column
                own["collect_iter"] = plain_number(own["collect_iter"])
            iterations.append(_earliest(own.get("collect_iter")))
            if self.used is not None and "data_id" in own:
                own["data_id"] = checked_data_id(own["data_id"])
            plain.append(own)
        items = self.items.read_items(plain)
        values, largest = self._filled_in(priorities)
        is_known = any(iteration != UNKNOWN for iteration in iterations)
        collected = torch.tensor(iterations, dtype=torch.int64, device=self.device) if is_known else None
        return Push(items, values, largest, collected)

    def read_batch(self, batch: Mapping[str, Any], priorities: Any, collect_iter: Any) -> Push:
        """Check a batch of `[n, *event]` leaves; nothing is changed."""
        items = self.items.read_batch(batch)
        values, largest = (None, 0.0) if priorities is None else self.rows.checked(priorities, items.num_rows)
        collected = None
        if collect_iter is not None:
            collected = torch.as_tensor(collect_iter, device=self.device)
            if collected.is_floating_point() or collected.dtype is torch.bool:
                raise UsageError("add a batch", "", "collect_iter of integers", str(collected.dtype))
            if collected.dim() > 1 or (collected.dim() and len(collected) != items.num_rows):
                expected = f"a collect_iter, or {items.num_rows} of them"
                raise UsageError("add a batch", "", expected, f"shape {list(collected.shape)}")
            collected = collected.long().expand(items.num_rows)
        return Push(items, values, largest, collected)

    def write(self, push: Push) -> torch.Tensor:
        """Add checked items; give the ids of those that stay."""
        capacity = self.items.capacity
        kept = min(push.items.num_rows, capacity)
        total = self.items.total + push.items.num_rows
        slots = torch.arange(total - kept, total, device=self.device) % capacity
        gone = [] if self.used is None else self._data_ids(slots[self.limits.is_valid(slots)])  # overwritten
        ids = self.items.write(push.items)
        if not kept:
            return ids
        if push.priorities is None:
            self.rows.fill(slots, self.rows.max_priority)
        else:
            self.rows.set(slots, push.priorities[-kept:])
            self.rows.note(push.largest)
        self.limits.add(slots, ids, None if push.collected is None else push.collected[-kept:])
        if self.used is not None:
            first = (push.items.objects or [])[: push.items.num_rows - kept]  # overwritten by others of the same push
            passed = [one["data_id"] for one in first if one.get("data_id") is not None]
            self.used.replace(gone + passed, passed + self._data_ids(slots))
        return ids

    def drop(self, slots: torch.Tensor | None) -> None:
        """Remove the items in some slots, those that are still there; None is none."""
        if slots is None or not len(slots):
            return
        found = self.limits.remove(slots)
        self.rows.remove(found)
        if self.used is not None:
            self.used.replace(self._data_ids(found), ())
        self.items.forget_objects(found)

    def drop_stale(self, iteration: int) -> None:
        """Remove what is too old for an iteration."""
        self.drop(self.limits.stale(iteration))

    def clear(self) -> None:
        """Forget every item, and every priority and use."""
        if self.used is not None:
            self.used.replace(self._data_ids(self.limits.valid_slots()), ())
        self.items.clear()
        self.rows.clear()
        self.limits.clear()

    # Drawing.

    def slots_in(self, sample_range: slice) -> torch.Tensor:
        """List the slots of items in a range by age, oldest first."""
        slots = torch.arange(self.items.oldest, self.items.total, device=self.device) % self.items.capacity
        slots = slots[self.limits.is_valid(slots)]
        wanted = range(len(slots))[sample_range]
        if not wanted:
            return slots[:0]
        return slots.index_select(0, torch.arange(wanted.start, wanted.stop, wanted.step, device=self.device))

    def draw(self, size: int, among: torch.Tensor | None, generator: torch.Generator) -> Draw | None:
        """Draw slots; None if nothing has a weight."""
        if among is not None:
            drawn = self.rows.draw_among(among, size, generator)
            return None if drawn is None else Draw(drawn[0], own(drawn[0]), own(drawn[1]))
        found = self.rows.draw_own(size, generator)
        return None if found is None else Draw(tensor_of(found[0]), *found)

    def uses_with(self, slots: torch.Tensor) -> torch.Tensor:
        """Count the uses of `[n]` drawn slots before `use`, each copy's own included."""
        return self.limits.uses.index_select(0, slots).add_(copy_numbers(slots))

    def use(self, slots: torch.Tensor) -> None:
        """Count that slots were given away, and remove what is used up; `gather` them before."""
        self.limits.use(slots)
        if self.used is not None:
            self.used.hold(self._data_ids(slots))
        self.drop(self.limits.used_up(slots))

    def batch(self, slots: torch.Tensor, device: torch.device | None) -> dict[str, Any]:
        """Gather slots as a nested dict of tensors; objects that are numbers become tensors, others lists."""
        batch = self.items.columns(slots, nested=True)
        if device is not None:
            batch = map_leaves(lambda leaf: leaf.to(device, non_blocking=True), batch)
        objects = self.items.objects(slots)
        if objects is None:
            return batch
        for name in dict.fromkeys(name for one in objects for name in one):
            values = [one.get(name) for one in objects]
            is_number = all(isinstance(value, (bool, int, float)) for value in values)
            put_leaf(batch, name, torch.tensor(values, device=device or self.device) if is_number else values)
        return batch

    # What a learner found.

    def update(self, ids: torch.Tensor, priorities: Any, largest: float) -> int:
        """Set checked priorities, as `own` gives them, of items, those that are still there; gives their number."""
        rows, values = own(ids), priorities
        slots = rows % self.items.capacity
        if self.limits.num_valid == self.items.num_live:  # nothing was removed; no need to look at each
            is_live = rows >= self.items.oldest
            is_live &= rows < self.items.total
        else:
            is_live = self.limits.holds(slots, rows)
        num_live = int(self._library.count_nonzero(is_live))
        if num_live < rows.shape[0]:
            slots, values = slots[is_live], values[is_live]
            self.num_dead_updates += rows.shape[0] - num_live
            largest = float(values.max()) if num_live else 0.0
        if num_live:
            self.rows.update_own(slots, values, largest)
        return num_live

    # Saving.

    def state(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Take everything but the items apart: numbers and tensors."""
        live = self.items.num_live
        rows, limits = self.rows, self.limits
        tensors = {
            "weights": rows.weights(),
            "priorities": rows.priorities,
            "row_ids": limits.row_ids,
            "uses": limits.uses,
            "collected": limits.collected,
        }
        numbers = {
            "max_priority": rows.max_priority,
            "num_draws": rows.num_draws,
            "num_dead_updates": self.num_dead_updates,
            "used_data": None if self.used is None else to_json(self.used.to_json(), "that are data_ids").decode(),
        }
        return numbers, {name: tensor[:live] for name, tensor in tensors.items()}

    def checked_state(
        self, live: int, numbers: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
    ) -> tuple[dict[str, torch.Tensor], UsedData | None]:
        """Check what `state` gave, for `live` rows; give what `restore` takes. Nothing is changed."""
        found = {}
        for name, dtype in _ROW_TENSORS.items():
            if tensors[name].shape != (live,) or tensors[name].dtype != dtype:
                got = f"{tensors[name].dtype} {list(tensors[name].shape)}"
                raise SchemaError("load a state", f"with {name!r}", f"{dtype} [{live}]", got)
            whole = torch.full((self.items.capacity,), _BLANK.get(name, 0), dtype=dtype, device=self.device)
            whole[:live] = tensors[name]
            found[name] = whole
        bad = ~(torch.isfinite(found["weights"]) & (found["weights"] >= 0))
        if bool((bad | ((found["row_ids"] == NONE) & (found["weights"] > 0))).any()):
            raise SchemaError("load a state", "with 'weights'", "finite weights >= 0 of items", "others")
        for name in ("max_priority", "num_draws", "num_dead_updates"):
            value = numbers[name]
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= _LARGEST:
                raise SchemaError("load a state", f"with {name!r}", "a finite number >= 0", repr(value))
        text = numbers["used_data"]
        if (text is None) != (self.used is None):
            raise SchemaError("load a state", "", f"tracked data: {self.used is not None}", f"{text is not None}")
        return found, None if text is None else UsedData.from_json(from_json(text.encode()))

    def restore(self, checked: tuple[dict[str, torch.Tensor], UsedData | None], numbers: Mapping[str, Any]) -> None:
        """Take over a checked state; the items are restored by whoever calls."""
        found, self.used = checked
        self.rows.restore(found["weights"], found["priorities"])
        self.rows.max_priority, self.rows.num_draws = float(numbers["max_priority"]), int(numbers["num_draws"])
        self.limits.restore(found["row_ids"], found["uses"], found["collected"])
        self.num_dead_updates = int(numbers["num_dead_updates"])

    def check_valid(self) -> tuple[bool, str]:
        """Check what must always hold: (whether it does, what does not)."""
        is_valid = self.limits.row_ids != NONE
        if bool((self.rows.weights()[~is_valid] > 0).any()):
            return False, "an item that was removed has a weight"
        if int(is_valid.sum()) != self.limits.num_valid:
            return False, "the count is not the number of items"
        slots = self.limits.valid_slots()
        if not torch.equal(self.limits.row_ids[slots], self.items.ids(slots)):
            return False, "an id is not that of its slot"
        return self.rows.check_valid()

    def _filled_in(self, given: list[Any]) -> tuple[torch.Tensor | None, float]:
        """Check priorities of items; those that are missing get the largest so far."""
        if all(value is None for value in given):
            return None, 0.0
        known = [plain_number(value) for value in given if value is not None]
        _, largest = self.rows.checked(known, len(known))
        highest, values = self.rows.max_priority, []
        for value in given:
            values.append(highest if value is None else float(value))
            highest = max(highest, values[-1])
        return torch.tensor(values, dtype=torch.float64, device=self.device), largest

    def _data_ids(self, slots: torch.Tensor) -> list[Any]:
        found = (self.items.object_view(slot, "data_id") for slot in slots.tolist())
        return [data_id for data_id in found if data_id is not None]


def _earliest(given: Any) -> int:
    """Read when an item was collected: an int, or several of which the first counts."""
    if given is None:
        return UNKNOWN
    values = given.tolist() if isinstance(given, (torch.Tensor, np.ndarray, np.generic)) else given
    flat = values if isinstance(values, (list, tuple)) else [values]
    known = [plain_number(value) for value in flat if value is not None]
    if not all(isinstance(value, int) and not isinstance(value, bool) for value in known):
        raise UsageError("add an item", "", "a collect_iter of integers", repr(given)[:60])
    return min(known, default=UNKNOWN)
