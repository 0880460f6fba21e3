"""`PrioritizedRing`: priorities and limits of the rows of a ring, and draws by priority.

The weight of a row is `priority ** alpha`, or 0 for a row that must not be drawn. Ids are the keys of a `RingStore` and
places its cells. The id in a place follows from the number of written rows. Nothing is locked here. Large arrays start
as zeros, which take no memory before they are written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from math import inf, isinf, prod
from typing import Any, NamedTuple

import torch

from ..core import arguments
from ..core.memory import (
    LateNumber,
    StreamOrder,
    filled,
    last_copies,
    lasting,
    library,
    own,
    own_float64,
    sent,
    tensor_of,
    writes_in_order,
)
from ..core.records import numbers
from ..errors import SchemaError, UsageError
from ..ring.ring_store import cells, keys_in
from ..saving.saved_store import checked_count, checked_tensor
from .priority_rules import Limits, PriorityRule
from .sum_tree import LeastWeight, MinTree, SumTree, least_positive

#: Sums of all weights stay below this, far from the largest float64.
_MAX_SUM = 1e300
#: The least importance weight, as float32, and the least weight of a priority above 0: rounding makes no 0 of them.
_LEAST_IMPORTANCE, _LEAST_WEIGHT = torch.finfo(torch.float32).tiny, torch.finfo(torch.float64).tiny
#: Up to this alpha the least float64 above 0 has a weight far above `_LEAST_WEIGHT`.
_LARGEST_SAFE_ALPHA = 0.9
#: `collected` of a row that does not say when; it is never stale.
UNKNOWN = (1 << 62) - 1
#: Saved as the id of a place without a row that counts; ids are >= 0.
_NO_ROW = -(1 << 62)
#: Iterations are told apart up to here, either side of 0, as float64 does.
_MAX_ITERATION = 1 << 52
#: Uses that are counted together: counting 4096 at once takes 4 % of a draw and its update.
_MAX_WAITING = 1 << 14
#: On a device the host looks after so many draws whether there was mass.
_DRAWS_PER_LOOK = 16
#: What is saved per place.
_COLUMNS = {"weights": torch.float64, "priorities": torch.float64, "row_ids": torch.int64}
_USE_COLUMNS = {"uses": torch.int64, "collected": torch.int64}
_LARGEST = torch.finfo(torch.float64).max


class Draw(NamedTuple):
    """Rows that were drawn.

    Attributes:
        places: `[n]` int64; copies of a row stand together.
        ids: `[n]` int64.
        importance: `[n]` float64, weights for the loss in (0, 1], as `own` gives them.
    """

    places: torch.Tensor
    ids: torch.Tensor
    importance: Any


class _OldestTree(MinTree):
    """The least iteration per place, less `_MAX_ITERATION`; 0 where none is known."""

    NEUTRAL = 0.0


class PrioritizedRing:
    """Priorities and limits of the rows of a ring.

    Args:
        num_slots: Rows per lane.
        num_lanes: Streams that are written in lock-step.
        rule: How priorities are used.
        device: Where everything is.
        limits: When rows are over; None for no limit, then uses are not saved.

    Attributes:
        priorities: `[num_slots * num_lanes]` float64, as they were set.
        num_draws: Draws so far, which decide `beta`.

    On a device the host does not wait for what only the device knows. Priorities there that are not finite, negative
    or too large leave those of their rows as they are, and a later draw or update raises; so does a draw after one
    that found no row with a weight.
    """

    @lasting
    def __init__(
        self, num_slots: int, num_lanes: int, rule: PriorityRule, device: torch.device, limits: Limits | None = None
    ) -> None:
        self._num_slots = num_slots
        self._num_lanes = num_lanes
        self._num_places = num_slots * num_lanes
        self.rule = rule
        self.device = device
        self._library = library(device)
        self._order = StreamOrder(device)
        self._is_on_cpu = device.type == "cpu"
        self.num_draws = 0
        #: The largest priority, and updates of rows that were gone; tensors on other devices than the CPU.
        self._largest: Any = 1.0 if self._is_on_cpu else torch.ones((), dtype=torch.float64, device=device)
        self._num_dead: Any = 0 if self._is_on_cpu else torch.zeros((), dtype=torch.int64, device=device)
        #: Rows per lane that were ever written, and rows that count; None where only the device knows.
        self._total = 0
        self._num_valid: int | None = 0
        self._weights = SumTree(self._num_places, device)
        #: On a device one leaf more, without weight, which takes what is written nowhere.
        self._num_leaves = self._num_places + (not self._is_on_cpu)
        self._least = LeastWeight(self._weights)
        #: Of one row; all weights can be summed.
        self._largest_priority = rule.largest_priority(_MAX_SUM / self._num_places)
        all_priorities = filled((self._num_leaves,), 0, torch.float64, device)
        self.priorities = all_priorities[: self._num_places]
        self._counts = filled((self._num_places,), 0, torch.bool, device)
        self._own_priorities = own(all_priorities)
        self._own_counts = own(self._counts)
        #: On a device: whether a draw may find a row, and priorities that were wrong, in all and when last raised.
        self._has_mass = False
        self._late_mass = LateNumber(device)
        self._num_wrong: Any = 0
        self._num_wrong_raised = 0
        self._late_wrong = LateNumber(device)
        self._has_limits = limits is not None
        self._columns = _COLUMNS | _USE_COLUMNS if self._has_limits else _COLUMNS
        limits = limits or Limits()
        self._max_use = inf if limits.max_use is None else limits.max_use
        self._max_staleness = inf if limits.max_staleness is None else limits.max_staleness
        num_limited = self._num_places if self._has_limits else 0
        self._uses = filled((num_limited,), 0, torch.int64, device)
        #: Draws whose uses are still to be counted.
        self._used: list[torch.Tensor] = []
        self._num_used = 0
        #: Iterations, with the bits of `UNKNOWN` turned over.
        self._flipped_collected = filled((num_limited,), 0, torch.int64, device)
        self._oldest = None if isinf(self._max_staleness) else _OldestTree(self._num_places, device)

    def __len__(self) -> int:
        """Rows that count. If rows were dropped on a device, this waits for it."""
        return int(self._counts.sum()) if self._num_valid is None else self._num_valid

    @property
    def max_priority(self) -> float:
        """The largest priority ever noted, 1 at first; what new rows get. On a device this waits."""
        return float(self._largest)

    @property
    def num_dead_updates(self) -> int:
        """Updates so far of rows that were gone. On a device this waits."""
        return int(self._num_dead)

    def take_over_updates(self, other: PrioritizedRing) -> None:
        """Count the updates of another ring's rows that were gone as this one's."""
        self._num_dead = other._num_dead

    def set_num_dead_updates(self, num_dead: int) -> None:
        """Set the number of updates so far of rows that were gone."""
        self._set_numbers(self.max_priority, num_dead)

    @property
    def beta(self) -> float:
        """Exponent of the next draw's importance weights."""
        rule = self.rule
        share = min(1.0, self.num_draws / rule.anneal_step) if rule.anneal_step else 0.0
        return rule.beta + (1.0 - rule.beta) * share

    def places(self, ids: Any) -> Any:
        """Return where `[n]` rows are; a tensor or what `own` gives."""
        return cells(ids, self._num_slots, self._num_lanes)

    @writes_in_order
    def those_that_count(self, places: torch.Tensor) -> torch.Tensor:
        """Pick of `[n]` places those whose rows count, in their order."""
        found: torch.Tensor = places[self._counts[places]]
        return found

    # Coming and going.

    @writes_in_order
    def register(
        self,
        ids: torch.Tensor,
        total: int,
        given: tuple[Any, float] | None = None,
        collected: torch.Tensor | None = None,
    ) -> None:
        """Let new rows be drawn, each in the place of the row that it overwrites.

        Args:
            ids: `[n]` int64, of different places.
            total: Rows per lane that were ever written, with these.
            given: Priorities `[n]` and the largest, as `checked` gives them; None for the largest so far.
            collected: `[n]` int64, iterations in which they were collected; None if that is not known.
        """
        self._total = total
        if not len(ids):
            return
        places = self.places(ids)
        if self._is_on_cpu:
            if given is None:
                given = own(torch.full(ids.shape, self._largest, dtype=torch.float64, device="cpu")), 0.0
            self._set(own(places), *given)
            assert self._num_valid is not None
            self._num_valid += len(ids) - int(self._counts[places].sum())
        else:
            self._register_on_device(places, given)
        self._counts.index_fill_(0, places, True)
        if self._has_limits:
            self.uses.index_fill_(0, places, 0)
            if collected is None:
                self._flipped_collected.index_fill_(0, places, 0)
            else:
                self._flipped_collected[places] = collected ^ UNKNOWN
        if self._oldest is not None:
            whens = torch.zeros_like(ids) if collected is None else _since_first(collected)
            self._oldest.write(places, whens.double())

    def _register_on_device(self, places: torch.Tensor, given: tuple[Any, float | None] | None) -> None:
        if given is None:
            self._set(places, self._largest.expand(len(places)), None)
        else:
            is_right = self._is_right(given[0])
            priorities = torch.where(is_right, given[0], self._largest)
            self._set(places, priorities, priorities.max())
            self._count_wrong((~is_right).sum())
        if self._num_valid is not None:
            self._num_valid = min(self._total, self._num_slots) * self._num_lanes

    @writes_in_order
    def renew(self, ids: torch.Tensor, counts: torch.Tensor, dropped: torch.Tensor, total: int) -> None:
        """Let some of `[n]` new rows be drawn, and let the others and older ones not.

        Args:
            ids: `[n]` int64, of different places.
            counts: `[n]` bool, which may be drawn.
            dropped: `[m]` int64, ids of older rows.
            total: Rows per lane that were ever written, with the new ones.
        """
        if self._is_on_cpu:
            self.drop(self.places(torch.cat([ids, dropped])))
            self.register(ids[counts], total)
            return
        self._total = total
        self._num_valid = None
        places = self.places(ids)
        self._set(places, self._largest.expand(len(ids)), None, counts)
        self._counts[places] = counts
        gone = self.places(dropped)
        self._counts.index_fill_(0, gone, False)
        self._weights.fill(gone, 0.0)

    @writes_in_order
    def drop(self, places: torch.Tensor) -> torch.Tensor:
        """Remove the rows at `[n]` places; give the places of those that counted, each once, ascending."""
        found: torch.Tensor = torch.unique(self.those_that_count(places))
        if len(found):
            if self._is_on_cpu:
                assert self._num_valid is not None
                self._num_valid -= len(found)
            else:
                self._num_valid = None
            self._counts[found] = False
            old = self._weights.exchange(own(found), 0.0)
            self._least.note(own(found), old, old * 0)
            if self._oldest is not None:
                self._oldest.fill(found, 0.0)
        return found

    def stale(self, iteration: int) -> torch.Tensor | None:
        """List the places whose rows are over by `iteration`; None if none is."""
        return None if self._oldest is None else self._stale(self._oldest, iteration)

    @writes_in_order
    def _stale(self, oldest: _OldestTree, iteration: int) -> torch.Tensor | None:
        bound = min(iteration - self._max_staleness - _MAX_ITERATION, -1)
        return None if oldest.reduce() > bound else oldest.at_most(bound)

    @writes_in_order
    def clear(self) -> None:
        """Remove every row, and forget the largest priority and all draws."""
        self._weights.clear()
        self._least = LeastWeight(self._weights)
        self._counts.zero_()
        self._total = 0
        self._num_valid = 0
        self.num_draws = 0
        self._has_mass = False
        if self._is_on_cpu:
            self._largest = 1.0
        else:
            self._largest = torch.ones_like(self._largest)
        if self._oldest is not None:
            self._oldest.clear()

    # Draws.

    def has_mass(self, among: torch.Tensor | None) -> bool:
        """Return whether a row at one of `[n]` places, or of all, may be drawn; on a device, as far as is known."""
        if among is None and not self._is_on_cpu:
            return self._has_mass or self._look_for_mass()
        if among is None:
            return bool(self._least.value() < inf)
        return bool((self._weights.read(among) > 0).any())

    @writes_in_order
    def _look_for_mass(self) -> bool:
        """Wait for a device once, to learn whether a draw would find a row."""
        self._has_mass = bool(self._weights.total() > 0)
        return self._has_mass

    @writes_in_order
    def draw(self, num_draws: int, generator: torch.Generator, among: torch.Tensor | None = None) -> Draw | None:
        """Draw rows, one from each of `num_draws` intervals of equal mass; None if no row has a weight.

        The importance weight of a row with probability P is (P / P_min) ** -beta.

        Args:
            num_draws: How many.
            generator: On the ring's device.
            among: `[m]` places, only these, which takes time in proportion to m; None for all.
        """
        if among is None:
            if not self._is_on_cpu:
                self._read_numbers()
                if not self.has_mass(None):
                    return None
            drawn = self._weights.draw_weights(num_draws, generator)
            least = self._least.value()
            if not self._is_on_cpu and self.num_draws % _DRAWS_PER_LOOK == 0:
                self._late_mass.send((least < inf).long())
        else:
            weights = self._weights.read(among)
            some = SumTree(len(among), self.device)
            least = float(least_positive(weights))
            some.rebuild(weights)
            drawn = some.draw_weights(num_draws, generator)
        if drawn is None:
            return None
        places, weights = drawn
        if among is not None:
            places = own(among)[places]
        # Not the other way round: that overflows where weights are hardly above 0.
        importance = ((least / weights) ** self.beta).clip(_LEAST_IMPORTANCE, 1.0)
        self.num_draws += 1
        ids = keys_in(places, self._total, self._num_slots, self._num_lanes)
        return Draw(tensor_of(places), tensor_of(ids), importance)

    @property
    def uses(self) -> torch.Tensor:
        """How often the row in each place was drawn, `[num_slots * num_lanes]` int64, sharing memory."""
        if self._used:
            used = torch.cat(self._used)
            self._uses.scatter_add_(0, used, torch.ones_like(used))
            self._used = []
            self._num_used = 0
        return self._uses

    @writes_in_order
    def use(self, places: torch.Tensor) -> torch.Tensor | None:
        """Count one use per copy of `[n]` rows; list those that were used as often as they may, or None.

        `places` is kept, and must not be changed.
        """
        if not self._has_limits:
            return None
        self._used.append(places)
        self._num_used += len(places)
        if not isinf(self._max_use):
            return places[self.uses[places] >= self._max_use]
        if self._num_used >= _MAX_WAITING:
            _ = self.uses
        return None

    @writes_in_order
    def uses_with(self, places: torch.Tensor) -> torch.Tensor:
        """Count the uses of `[n]` rows before `use` counts them, each copy's own included; copies stand together."""
        counts = torch.unique_consecutive(places, return_counts=True)[1]
        firsts = (counts.cumsum(0) - counts).repeat_interleave(counts)
        numbers: torch.Tensor = torch.arange(1, len(places) + 1, device=self.device) - firsts
        return numbers + self.uses[places]

    @writes_in_order
    def staleness(self, places: torch.Tensor, iteration: int) -> torch.Tensor:
        """Return how many iterations ago `[n]` rows were collected: int64, -1 if that is not known."""
        collected = self._flipped_collected[places] ^ UNKNOWN
        found: torch.Tensor = torch.where(collected == UNKNOWN, -1, iteration - collected)
        return found

    # Priorities.

    def checked(self, priorities: Any, num_rows: int) -> tuple[Any, float | None]:
        """Return `[num_rows]` float64 of priorities of any form, or of one for all, as `own` does; and the largest.

        Numbers that are on a device are not looked at, and the largest is None.

        Raises:
            UsageError: A priority is negative or not finite, too large to be summed, or there are not as many.
        """
        action = "take priorities"
        try:
            given = priorities
            if not isinstance(given, torch.Tensor):
                given = torch.as_tensor(given, dtype=torch.float64, device="cpu")
        except (TypeError, ValueError, RuntimeError) as cause:
            raise UsageError(action, "", "priorities as numbers", type(priorities).__name__) from cause
        if given.is_complex() or given.layout is not torch.strided:
            raise UsageError(action, "", "real numbers", f"{given.layout} {given.dtype}")
        if not given.is_cpu and given.device != self.device:
            given = given.to(self.device)
        found = own_float64(given) if self._is_on_cpu or not given.is_cpu else given.detach().double()
        if found.ndim and found.shape != (num_rows,):
            if prod(found.shape) != num_rows:
                raise UsageError(action, "", f"{num_rows} of them", f"shape {list(found.shape)}")
            found = found.reshape(num_rows)
        if not num_rows:
            return own(torch.zeros(0, dtype=torch.float64, device=self.device)), 0.0
        if not given.is_cpu:
            return found.expand(num_rows), None
        least = float(found.min())
        largest = float(found.max())
        if not 0 <= least <= largest < inf:  # a NaN spoils both
            wrong = next(x for x in found.reshape(-1).tolist() if not 0 <= x < inf)
            raise UsageError(action, "", "finite numbers >= 0", str(wrong))
        if largest + self.rule.eps > self._largest_priority:
            raise UsageError(action, "", "numbers whose weights can be summed", str(largest))
        if not self._is_on_cpu:
            return sent(found, self.device).expand(num_rows), largest
        return found if found.ndim else own(tensor_of(found).expand(num_rows)), largest

    def prepare_update(self, ids: Any, priorities: Any) -> Callable[[], Any]:
        """Check `[n]` ids and finite priorities >= 0, `[n]` or one for all.

        Returns:
            What sets the priorities plus eps, counts the rows that are gone, and gives how many were still there: an
            int, on a device a tensor.

        Raises:
            UsageError: They are not that.
        """
        found = ids if isinstance(ids, torch.Tensor) else numbers("update priorities", "ids", ids)
        if found.dim() != 1 or (len(found) and (found.is_floating_point() or found.dtype is torch.bool)):
            raise UsageError("update priorities", "", "ids [n] of integers", f"{found.dtype} {list(found.shape)}")
        found = found if found.dtype is torch.int64 else found.long()
        if found.device != self.device:
            found = sent(found, self.device)
        return partial(self._update, own(found), *self.checked(priorities, len(found)))

    @writes_in_order
    def _update(self, ids: Any, priorities: Any, largest: float | None) -> Any:
        if not self._is_on_cpu:
            return self._update_on_device(ids, priorities, is_checked=largest is not None)
        assert largest is not None and self._num_valid is not None
        places = self.places(ids)
        num_written = min(self._total, self._num_slots) * self._num_lanes
        stop = self._total * self._num_lanes
        is_live = ids < stop
        is_live &= ids >= stop - num_written
        if self._num_valid < num_written:  # looking at 4096 of 10^6 rows takes 4 % of a draw and its update
            is_live &= self._own_counts[places]
        num_live = int(self._library.count_nonzero(is_live))
        if num_live < len(ids):
            self._num_dead += len(ids) - num_live
            places = places[is_live]
            priorities = priorities[is_live]
            largest = float(priorities.max()) if num_live else 0.0
        if num_live:
            self._set(places, priorities + self.rule.eps, largest)
        return num_live

    def _update_on_device(self, ids: torch.Tensor, priorities: torch.Tensor, is_checked: bool) -> torch.Tensor:
        self._read_numbers()
        places = self.places(ids)
        stop = self._total * self._num_lanes
        is_live = (ids < stop) & (ids >= stop - min(self._total, self._num_slots) * self._num_lanes)
        if self._num_valid is None:
            is_live &= self._counts.index_select(0, places)
        num_live = is_live.sum()
        self._num_dead = self._num_dead + (len(ids) - num_live)
        is_written = is_live
        if not is_checked:
            is_written = is_live & self._is_right(priorities)
            self._count_wrong(num_live - is_written.sum())
        places = torch.where(is_written, places, self._num_places)
        priorities = torch.where(is_written, priorities, 0.0)
        if len(ids):
            self._set(places, priorities + self.rule.eps, priorities.max(), is_written)
        return num_live

    def _is_right(self, priorities: torch.Tensor) -> torch.Tensor:
        """Return which priorities are as `checked` wants them."""
        largest = min(self._largest_priority - self.rule.eps, _LARGEST)
        return priorities.clamp(0, largest) == priorities

    def _count_wrong(self, num_wrong: torch.Tensor) -> None:
        """Count priorities that were not taken; a later call raises."""
        self._num_wrong = self._num_wrong + num_wrong
        self._late_wrong.send(self._num_wrong)

    def _read_numbers(self) -> None:
        """Raise for what earlier calls found on the device."""
        received = self._late_wrong.receive()
        if received is not None and received[0] > self._num_wrong_raised:
            num_wrong = received[0] - self._num_wrong_raised
            self._num_wrong_raised = received[0]
            got = f"{num_wrong} others at earlier calls, which were left out"
            raise UsageError("take priorities", "", "finite numbers >= 0 whose weights can be summed", got)
        received = self._late_mass.receive()
        if received is not None and not received[0]:
            self._has_mass = False
            got = "none at an earlier call, whose batch must not be used"
            raise UsageError("draw by priority", "", "a row with a weight above 0", got)

    def _set(self, places: Any, priorities: Any, largest: Any, counts: torch.Tensor | None = None) -> None:
        """Let `[n]` rows be drawn with `[n]` checked priorities; of a row named twice the last counts.

        Args:
            places: Of the rows.
            priorities: Of the rows.
            largest: Of these priorities; None if the largest so far is not below it.
            counts: On a device: `[n]` bool, rows that may be drawn. The others get no weight. All that are in the
                place behind the last are among them.
        """
        priorities = last_copies(places, priorities, self._num_leaves)
        weights = self.rule.weights(priorities)
        if self.rule.alpha > _LARGEST_SAFE_ALPHA:
            weights = weights.clip(min=priorities.clip(max=_LEAST_WEIGHT))
        if counts is not None:
            weights = torch.where(counts, weights, 0.0)
        self._own_priorities[places] = priorities
        if self._is_on_cpu:
            self._least.note(places, self._weights.exchange(places, weights), weights)
        else:
            self._weights.put(places, weights)
        if self._is_on_cpu:
            self._largest = max(self._largest, largest)
        elif largest is not None:
            self._largest = torch.maximum(self._largest, largest)

    # Saving.

    @writes_in_order
    def state(self, num_places: int) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Return numbers, and tensors of the first `num_places` places; they may share memory."""
        first = slice(num_places)
        tensors = {"weights": self._weights.leaves_view()[first].clone(), "priorities": self.priorities[first]}
        tensors |= {"row_ids": torch.where(self._counts[first], self._ids(num_places), _NO_ROW)}
        if self._has_limits:
            tensors |= {"uses": self.uses[first], "collected": self._flipped_collected[first] ^ UNKNOWN}
        numbers = {name: getattr(self, name) for name in ("max_priority", "num_draws", "num_dead_updates")}
        return numbers, {name: tensors[name] for name in self._columns}

    @writes_in_order
    def restore(self, num_places: int, numbers: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        """Take over, as a new ring, what `state` gave, with the `total` of rows in the numbers.

        Raises:
            SchemaError: It does not fit; nothing was changed.
        """
        for name, dtype in self._columns.items():
            checked_tensor(tensors, name, dtype, [num_places])
        for name in ("max_priority", "num_draws", "num_dead_updates"):
            if not arguments.is_real(numbers[name]) or not 0 <= numbers[name] <= _LARGEST:
                raise SchemaError("load a state", f"with {name!r}", "a finite number >= 0", repr(numbers[name]))
        self._total = checked_count(numbers, "total", 0, UNKNOWN // self._num_lanes)
        weights = tensors["weights"]
        row_ids = tensors["row_ids"]
        counts = row_ids != _NO_ROW
        if not bool((torch.isfinite(weights) & (weights >= 0) & ((weights == 0) | counts)).all()):
            raise SchemaError("load a state", "with 'weights'", "finite weights >= 0 of rows", "others")
        if not bool(((row_ids == self._ids(num_places)) | ~counts).all()):
            raise SchemaError("load a state", "with 'row_ids'", "the ids of the rows in their places", "others")
        self._weights.rebuild(weights)
        self._least.note_first(num_places)
        self.priorities[:num_places] = tensors["priorities"]
        self._set_numbers(float(numbers["max_priority"]), int(numbers["num_dead_updates"]))
        self.num_draws = int(numbers["num_draws"])
        self._counts[:num_places] = counts
        self._num_valid = int(counts.sum())
        if not self._is_on_cpu and self._num_valid < min(self._total, self._num_slots) * self._num_lanes:
            self._num_valid = None
        if "uses" in self._columns:
            self._uses[:num_places] = tensors["uses"]
            self._flipped_collected[:num_places] = tensors["collected"] ^ UNKNOWN
            if self._oldest is not None:
                self._oldest.rebuild(torch.where(counts, _since_first(tensors["collected"]), 0).double())

    def _set_numbers(self, largest: float, num_dead: int) -> None:
        if self._is_on_cpu:
            self._largest = largest
            self._num_dead = num_dead
        else:
            self._largest = torch.full_like(self._largest, largest)
            self._num_dead = torch.full_like(self._num_dead, num_dead)

    def check_valid(self) -> tuple[bool, str]:
        """Check what must always hold: (whether it does, what does not)."""
        if bool((self._weights.blocks_view().flatten()[self._num_places :] > 0).any()):
            return False, "a place behind the last has a weight"
        weights = self._weights.leaves_view()
        if bool((weights[~self._counts] > 0).any()):
            return False, "a row that is gone has a weight"
        if int(self._counts.sum()) != len(self):
            return False, "the count is not the number of rows"
        if bool((self._ids(self._num_places)[self._counts] < 0).any()):
            return False, "a row that was never written counts"
        least = float(least_positive(weights))
        if float(self._least.value()) != least:
            return False, f"the least weight is {least}, not {self._least.value()}"
        return self._weights.check_valid()

    def _ids(self, num_places: int) -> torch.Tensor:
        """List the ids of the first places; below 0 where no row was written."""
        places = torch.arange(num_places, device=self.device)
        found: torch.Tensor = keys_in(places, self._total, self._num_slots, self._num_lanes)
        return found


def _since_first(collected: torch.Tensor) -> torch.Tensor:
    """Return how far `[n]` iterations are before the last that is told apart, negative; 0 for `UNKNOWN`."""
    return collected.clamp(-_MAX_ITERATION, _MAX_ITERATION) - _MAX_ITERATION
