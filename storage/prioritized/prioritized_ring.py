"""`PrioritizedRing`: priorities and limits of the rows of a ring, and draws by priority.

The weight of a row is `priority ** alpha`, or 0 for a row that must not be drawn. A row has an id
and a position: its key in the `RingStore` (`RingStore.key`), and the index of its cell
(`ring_store.cells`). Ids are not stored, since the number of written rows determines the id of the
row at each position. The caller holds the lock. Large arrays start as zeros, which take no memory
before they are written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from math import inf, isinf, prod
from typing import Any, NamedTuple

import torch

from ..core import arguments
from ..core.memory import (
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
from .sum_tree import MinTree, SumTree, least_positive

#: Upper limit of the sum of all weights, far below the largest float64.
_MAX_SUM = 1e300
#: Lower limits of importance weights and of the weights of priorities above 0. With the limits,
#: none of these numbers is rounded to 0.
_LEAST_IMPORTANCE, _LEAST_WEIGHT = torch.finfo(torch.float32).tiny, torch.finfo(torch.float64).tiny
#: Largest alpha (exponent of priorities) with which every float64 priority above 0 has a weight
#: above `_LEAST_WEIGHT`. Up to this alpha, weights need no comparison with the lower limit.
_LARGEST_SAFE_ALPHA = 0.9
#: Stored for a row if the learner iteration that collected it is unknown. The row is never stale.
UNKNOWN = (1 << 62) - 1
#: Id that is saved for a position without a valid row. All other saved ids are >= 0.
_NO_ROW = -(1 << 62)
#: Limit of the absolute value of learner iterations. Below it, float64 represents the difference of
#: two iterations exactly.
_MAX_ITERATION = 1 << 52
#: Number of drawn rows that are noted before their uses are counted in one operation. Counting 4096
#: drawn rows at each draw would take 4 % of the time of a draw and its priority update.
_MAX_WAITING = 1 << 14
#: Maximum number of draws on a device whose checks are copied to the host together.
_DRAWS_PER_REPORT = 16
#: Saved columns, with one number per position, and their dtypes.
_COLUMNS = {"weights": torch.float64, "priorities": torch.float64, "row_ids": torch.int64}
_USE_COLUMNS = {"uses": torch.int64, "collected": torch.int64}
_LARGEST = torch.finfo(torch.float64).max


class Draw(NamedTuple):
    """Drawn rows.

    Attributes:
        places: `[n]` int64, positions of the rows; copies of a row are consecutive.
        ids: `[n]` int64, ids of the rows.
        importance: `[n]`, weights of the loss in (0, 1]: a float64 array on the CPU, else a float32
            tensor.
    """

    places: torch.Tensor
    ids: torch.Tensor
    importance: Any


class _OldestTree(MinTree):
    """Tree that finds the rows that were collected in the earliest learner iterations.

    Its number for a row is `iteration - _MAX_ITERATION`, which is below 0. The number is 0 for a
    row with an unknown iteration, so the tree never finds such a row.
    """

    NEUTRAL = 0.0


class PrioritizedRing:
    """Priorities of the rows of a ring, and limits of the age and the use of the rows.

    Args:
        num_slots: Rows per lane.
        num_lanes: Number of streams that are written in lock-step.
        rule: Exponents of priorities and importance weights.
        device: Device of all tensors.
        limits: Limits of age and use; None for no limit. Without limits, uses are not saved.
        order: Order of reads and writes among CUDA streams; None for an order of its own.

    Attributes:
        order: Order of reads and writes among CUDA streams.
        priorities: `[num_slots * num_lanes]` float64, before the exponent.
        num_draws: Number of draws so far, which determines `beta`.

    On a CUDA device the host does not wait for the checks of a call. The device skips priorities
    that are negative, not finite or too large, and counts them. It also notes draws that found no
    weight above 0. When these numbers have arrived on the host, the next draw or update raises an
    error. No error is lost: the device keeps the numbers until they are copied to the host.
    """

    @lasting
    def __init__(
        self,
        num_slots: int,
        num_lanes: int,
        rule: PriorityRule,
        device: torch.device,
        limits: Limits | None = None,
        order: StreamOrder | None = None,
    ) -> None:
        self._num_slots = num_slots
        self._num_lanes = num_lanes
        self._num_places = num_slots * num_lanes
        self.rule = rule
        self.device = device
        self._library = library(device)
        self.order = self._order = order or StreamOrder(device)
        self._is_on_cpu = device.type == "cpu"
        self.num_draws = 0
        #: Largest priority so far: a number on the CPU, else a tensor.
        self._largest: Any = (
            1.0 if self._is_on_cpu else torch.ones((), dtype=torch.float64, device=device)
        )
        #: On the CPU, number of priority updates whose row was already removed. On a device, number
        #: of all priority updates: the device counts the updates of live rows in `_totals[0]`.
        self._num_dead = 0
        #: Numbers on a device that are copied to the host together: first `_totals`, then the least
        #: weight above 0 at each draw since the last copy, which is inf if all weights were 0.
        self._report = torch.zeros(2 + _DRAWS_PER_REPORT, dtype=torch.float64, device=device)
        #: Two counters on the device: priority updates of live rows, and valid priorities among
        #: the priorities that the host has not checked.
        self._totals = self._report[:2]
        self._least_weights = self._report[2:]
        #: Number of draws since `_report` was last copied to the host.
        self._num_unsent = 0
        #: Number of priorities that were checked on the device and not on the host.
        self._num_unchecked = 0
        #: Number of these priorities that were invalid and for which an error was raised.
        self._num_invalid = 0
        #: Priority that an update on a device writes for entries to skip. It becomes 0 when the
        #: update adds `rule.eps`.
        self._minus_eps = torch.full((1,), -rule.eps, dtype=torch.float64, device=device)
        #: Number of rows per lane that were ever written.
        self._total = 0
        #: Number of valid rows; None if the host would have to wait for the number.
        self._num_valid: int | None = 0
        self._weights = SumTree(self._num_places, device)
        #: Length of the priorities in memory. On a device it includes one unused element at the
        #: end. Updates of removed rows and invalid priorities are written to this element, because
        #: filtering them would make the host wait.
        self._num_leaves = self._num_places + (not self._is_on_cpu)
        #: Largest accepted priority. If all rows had it, the sum of weights would be `_MAX_SUM`.
        self._largest_priority = rule.largest_priority(_MAX_SUM / self._num_places)
        all_priorities = filled((self._num_leaves,), 0, torch.float64, device)
        self.priorities = all_priorities[: self._num_places]
        self._is_valid = filled((self._num_places,), 0, torch.bool, device)
        self._own_priorities = own(all_priorities)
        self._own_is_valid = own(self._is_valid)
        #: On a device, whether the last check of the host found a weight above 0.
        self._has_mass = False
        self._has_limits = limits is not None
        self._columns = _COLUMNS | _USE_COLUMNS if self._has_limits else _COLUMNS
        limits = limits or Limits()
        self._max_use = inf if limits.max_use is None else limits.max_use
        self._max_staleness = inf if limits.max_staleness is None else limits.max_staleness
        #: How often the row at each position was drawn; None until draws are counted.
        self._uses: torch.Tensor | None = None
        #: Positions of drawn rows that are not counted in `_uses` yet.
        self._used: list[torch.Tensor] = []
        #: Number of positions in `_used`.
        self._num_used = 0
        #: Learner iteration that collected the row at each position, XOR `UNKNOWN`. With XOR,
        #: memory of zeros means that all iterations are unknown. None until one is known.
        self._flipped_collected: torch.Tensor | None = None
        # On the CPU, allocate the counts of draws at once: zeros take no memory until written.
        if self._has_limits and (self._is_on_cpu or not isinf(self._max_use)):
            self._count_uses()
        self._oldest = None if isinf(self._max_staleness) else _OldestTree(self._num_places, device)

    def __len__(self) -> int:
        """Return the number of valid rows. The host may wait for a device."""
        return int(self._is_valid.sum()) if self._num_valid is None else self._num_valid

    @property
    def max_priority(self) -> float:
        """Largest priority so far, 1 at first. New rows get it. Waits for a device."""
        return float(self._largest)

    @property
    def num_dead_updates(self) -> int:
        """Number of priority updates that came after their row was removed or overwritten.

        On a device the host waits.
        """
        return self._num_dead if self._is_on_cpu else self._num_dead - int(self._totals[0])

    def set_num_dead_updates(self, num_dead: int) -> None:
        """Set `num_dead_updates`, to continue the count of an earlier object."""
        if not self._is_on_cpu:
            self._totals[0].zero_()
        self._num_dead = num_dead

    @property
    def beta(self) -> float:
        """Exponent of the next draw's importance weights."""
        rule = self.rule
        share = min(1.0, self.num_draws / rule.anneal_step) if rule.anneal_step else 0.0
        return rule.beta + (1.0 - rule.beta) * share

    def places(self, ids: Any) -> Any:
        """Convert `[n]` row ids to positions. Returns an array for an array, else a tensor."""
        return cells(ids, self._num_slots, self._num_lanes)

    @writes_in_order
    def valid_places(self, places: torch.Tensor) -> torch.Tensor:
        """Return the positions in `places` whose row may be drawn, in the same order."""
        valid: torch.Tensor = places[self._is_valid[places]]
        return valid

    # Adding and removing rows.

    @writes_in_order
    def register(
        self,
        ids: torch.Tensor,
        total: int,
        priorities: tuple[Any, float] | None = None,
        collected: torch.Tensor | None = None,
    ) -> None:
        """Add new rows, which may be drawn from now on.

        Each new row replaces the row at its position.

        Args:
            ids: `[n]` int64, of different positions.
            total: Rows per lane that were ever written, the new rows included.
            priorities: Result of `checked`: priorities `[n]` and their maximum. None: new rows get
                the largest priority so far.
            collected: `[n]` int64, learner iterations in which the rows were collected; None if
                unknown.
        """
        self._total = total
        if not len(ids):
            return
        places = self.places(ids)
        if self._is_on_cpu:
            if priorities is None:
                priorities = (
                    own(torch.full(ids.shape, self._largest, dtype=torch.float64, device="cpu")),
                    0.0,
                )
            self._set(own(places), *priorities)
            assert self._num_valid is not None
            self._num_valid += len(ids) - int(self._is_valid[places].sum())
        else:
            self._register_on_device(places, priorities)
        self._is_valid.index_fill_(0, places, True)
        if self._uses is not None:
            self._count_uses().index_fill_(0, places, 0)
        if collected is not None:
            self._iterations()[places] = collected ^ UNKNOWN
        elif self._flipped_collected is not None:
            self._flipped_collected.index_fill_(0, places, 0)
        if self._oldest is not None:
            tree_numbers = torch.zeros_like(ids) if collected is None else _tree_numbers(collected)
            self._oldest.write(places, tree_numbers.double())

    def _register_on_device(
        self, places: torch.Tensor, priorities_and_largest: tuple[Any, float | None] | None
    ) -> None:
        if priorities_and_largest is None:
            self._set(places, self._largest.expand(len(places)), None)
        else:
            is_accepted = self._are_accepted(priorities_and_largest[0])
            priorities = torch.where(is_accepted, priorities_and_largest[0], self._largest.view(1))
            self._set(places, priorities, priorities.max())
            self._totals[1].add_(is_accepted.sum())
            self._num_unchecked += len(places)
            self._send_report()
        if self._num_valid is not None:
            self._num_valid = min(self._total, self._num_slots) * self._num_lanes

    @writes_in_order
    def renew(
        self, ids: torch.Tensor, is_drawable: torch.Tensor, dropped: torch.Tensor, total: int
    ) -> None:
        """Add `[n]` new rows, only some of which may be drawn, and remove some older rows.

        Each new row replaces the row at its position.

        Args:
            ids: `[n]` int64, ids of the new rows, of different positions.
            is_drawable: `[n]` bool, whether each new row may be drawn.
            dropped: `[m]` int64, ids of the older rows to remove.
            total: Rows per lane that were ever written, the new rows included.
        """
        if self._is_on_cpu:
            self.drop(self.places(torch.cat([ids, dropped])))
            self.register(ids[is_drawable], total)
            return
        self._total = total
        self._num_valid = None
        places = self.places(ids)
        self._set(places, self._largest.expand(len(ids)), None, is_drawable)
        self._is_valid[places] = is_drawable
        dropped_places = self.places(dropped)
        self._is_valid.index_fill_(0, dropped_places, False)
        self._weights.put(dropped_places, 0.0)

    @writes_in_order
    def drop(self, places: torch.Tensor) -> torch.Tensor:
        """Remove the rows at `[n]` positions.

        Returns the positions at which a valid row was removed, without repetitions.
        """
        valid: torch.Tensor = torch.unique(self.valid_places(places))
        if len(valid):
            if self._is_on_cpu:
                assert self._num_valid is not None
                self._num_valid -= len(valid)
            else:
                self._num_valid = None
            self._is_valid[valid] = False
            self._weights.put(own(valid), 0.0)
            if self._oldest is not None:
                self._oldest.put(own(valid), 0.0)
        return valid

    def stale(self, iteration: int) -> torch.Tensor | None:
        """Return the positions of rows that are stale at a learner iteration; None if none is.

        A row is stale if it was collected at least `max_staleness` iterations earlier.
        """
        return None if self._oldest is None else self._stale(self._oldest, iteration)

    @writes_in_order
    def _stale(self, oldest: _OldestTree, iteration: int) -> torch.Tensor | None:
        bound = min(iteration - self._max_staleness - _MAX_ITERATION, -1)
        return None if oldest.reduce() > bound else oldest.at_most(bound)

    @writes_in_order
    def clear(self) -> None:
        """Remove all rows; reset the largest priority to 1 and the number of draws to 0."""
        self._weights.clear()
        self._is_valid.zero_()
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
        """Return whether any row can be drawn, that is, has a weight above 0.

        On a device a result True for all rows is remembered, since a check would wait. If all rows
        are removed later, the next draw detects this on the device, and a later call raises.

        Args:
            among: Positions of the rows to check; None for all rows.
        """
        if among is None and not self._is_on_cpu:
            return self._has_mass or self._check_mass()
        if among is None:
            return bool(self._weights.least() < inf)
        return bool((self._weights.read(among) > 0).any())

    @writes_in_order
    def _check_mass(self) -> bool:
        """Wait for the device and return whether some weight is above 0."""
        self._has_mass = bool(self._weights.total() > 0)
        return self._has_mass

    @writes_in_order
    def draw(
        self, num_draws: int, generator: torch.Generator, among: torch.Tensor | None = None
    ) -> Draw | None:
        """Draw rows, one per interval of equal mass. Return None if all weights are 0.

        The importance weight of a row with probability P is `(P / P_min) ** -beta`, where P_min is
        the least probability above 0 of a row. This method raises no errors of earlier calls. The
        caller raises them first, so that a call for several rings raises before the first draw.

        Args:
            num_draws: Number of draws.
            generator: Random generator on the device of the ring.
            among: `[m]` positions to draw from, in time proportional to m; None for all rows.
        """
        # Updates copy the checks of draws too. While a copy is pending, wait for more draws.
        if not self._is_on_cpu and (
            not self._order.deferred.num_pending or self._num_unsent == _DRAWS_PER_REPORT
        ):
            self.send_draws()
        tree = self._weights
        least_weight: torch.Tensor | None = None
        if among is not None:
            tree = SumTree(len(among), self.device)
            tree.rebuild(self._weights.read(among))
        elif not self._is_on_cpu:
            if not self.has_mass(None):
                return None
            # The draw writes the least weight above 0 here: inf shows that no row could be drawn.
            least_weight = self._least_weights[self._num_unsent]
            self._num_unsent += 1
        drawn = tree.draw_weights(num_draws, generator, least_weight)
        if drawn is None:
            return None
        places, weights, least = drawn
        if among is not None:
            places = own(among)[places]
        importance = self._importance(least, weights)
        self.num_draws += 1
        ids = keys_in(places, self._total, self._num_slots, self._num_lanes)
        return Draw(tensor_of(places), tensor_of(ids), importance)

    def _importance(self, least: Any, weights: Any) -> Any:
        """Return the importance weights `(weights / least) ** -beta` of drawn rows.

        They are computed as `(least / weights) ** beta`, since `weights / least` may overflow. On a
        device, a weight of 0 means that `SumTree` replaced the drawn row by the row of the least
        weight. The quotient is then infinite and the result 1, as for the least weight.
        """
        if self._is_on_cpu:
            return ((least / weights) ** self.beta).clip(_LEAST_IMPORTANCE, 1.0)
        importance = torch.empty(weights.shape, dtype=torch.float32, device=self.device)
        torch.pow(least / weights, self.beta, out=importance)
        return importance.clamp_(_LEAST_IMPORTANCE, 1.0)

    def use(self, places: torch.Tensor) -> torch.Tensor | None:
        """Count that the row at each of `[n]` positions was drawn once more.

        Returns the positions of rows that were drawn `max_use` times; None without this limit. The
        ring keeps the tensor `places`, so the caller must not change it. On a device without
        `max_use`, counting starts with the first call of `uses_with`.
        """
        return None if self._uses is None else self._use(places)

    @writes_in_order
    def _use(self, places: torch.Tensor) -> torch.Tensor | None:
        self._used.append(places)
        self._num_used += len(places)
        if not isinf(self._max_use):
            return places[self._count_uses()[places] >= self._max_use]
        if self._num_used >= _MAX_WAITING:
            self._count_uses()
        return None

    @lasting
    def _count_uses(self) -> torch.Tensor:
        """Return how often the row at each position was drawn: `[num_places]` int64.

        The result is the memory of the ring itself, not a copy.
        """
        if self._uses is None:
            self._uses = filled((self._num_places,), 0, torch.int64, self.device)
        if self._used:
            used = torch.cat(self._used)
            self._uses.scatter_add_(0, used, torch.ones_like(used))
            self._used = []
            self._num_used = 0
        return self._uses

    @lasting
    def _iterations(self) -> torch.Tensor:
        if self._flipped_collected is None:
            self._flipped_collected = filled((self._num_places,), 0, torch.int64, self.device)
        return self._flipped_collected

    @writes_in_order
    def uses_with(self, places: torch.Tensor) -> torch.Tensor:
        """Return how often each of `[n]` drawn rows was drawn, including the current draw.

        Call this method before `use` counts the current draw. If a row was drawn several times, its
        copies must be consecutive in `places`. Each copy has one use more than the previous copy.
        """
        counts = torch.unique_consecutive(places, return_counts=True)[1]
        firsts = (counts.cumsum(0) - counts).repeat_interleave(counts)
        numbers: torch.Tensor = torch.arange(1, len(places) + 1, device=self.device) - firsts
        return numbers + self._count_uses()[places]

    @writes_in_order
    def staleness(self, places: torch.Tensor, iteration: int) -> torch.Tensor:
        """Return the number of learner iterations since each of `[n]` rows was collected.

        The result is `[n]` int64, -1 for a row with an unknown iteration.
        """
        if self._flipped_collected is None:
            return torch.full_like(places, -1)
        collected = self._flipped_collected[places] ^ UNKNOWN
        staleness: torch.Tensor = torch.where(collected == UNKNOWN, -1, iteration - collected)
        return staleness

    # Priorities.

    def checked(self, priorities: Any, num_rows: int) -> tuple[Any, float | None]:
        """Check priorities that the caller passed, and return them with their maximum.

        Args:
            priorities: `[num_rows]` numbers of any type, or one number for all rows.
            num_rows: Number of rows.

        Returns:
            (priorities, largest). Priorities that are on the host become float64 `[num_rows]`, and
            `largest` is their maximum. Priorities on a device are not checked here and keep a
            floating dtype, and `largest` is None.

        Raises:
            UsageError: A priority is negative, not finite or too large to be summed, or the number
                of priorities is wrong. Or an error of an earlier call has arrived; it is raised
                before the caller changes a row.
        """
        self._order.deferred.raise_arrived()
        try:
            tensor = priorities
            if not isinstance(tensor, torch.Tensor):
                tensor = torch.as_tensor(tensor, dtype=torch.float64, device="cpu")
        except (TypeError, ValueError, RuntimeError) as cause:
            raise UsageError(
                f"priorities must be numbers, got {type(priorities).__name__}."
            ) from cause
        if tensor.is_complex() or tensor.layout is not torch.strided:
            raise UsageError(
                f"priorities must be real and dense, got {tensor.dtype}, {tensor.layout}."
            )
        if not tensor.is_cpu and tensor.device != self.device:
            tensor = tensor.to(self.device)
        if self._is_on_cpu:
            values = own_float64(tensor)
        elif tensor.is_cpu or not tensor.is_floating_point():
            values = tensor.detach().double()
        else:
            values = tensor.detach()  # A later operation on the device converts it.
        if values.ndim and values.shape != (num_rows,):
            if prod(values.shape) != num_rows:
                raise UsageError(
                    f"priorities have shape {list(values.shape)}, expected [{num_rows}]."
                )
            values = values.reshape(num_rows)
        if not num_rows:
            return own(torch.zeros(0, dtype=torch.float64, device=self.device)), 0.0
        if not tensor.is_cpu:
            return values.expand(num_rows), None
        least = float(values.min())
        largest = float(values.max())
        if not 0 <= least <= largest < inf:  # With a NaN, `least` and `largest` are NaN.
            wrong = next(x for x in values.reshape(-1).tolist() if not 0 <= x < inf)
            raise UsageError(f"priorities must be finite and >= 0, got {wrong}.")
        if largest + self.rule.eps > self._largest_priority:
            raise UsageError(
                f"the priority {largest} is too large, since the sum of all weights would overflow."
            )
        if not self._is_on_cpu:
            return sent(values, self.device).expand(num_rows), largest
        return values if values.ndim else own(tensor_of(values).expand(num_rows)), largest

    def prepare_update(self, ids: Any, priorities: Any) -> Callable[[], Any]:
        """Check the arguments of a priority update, and return a function that applies it.

        Args:
            ids: `[n]` integer ids of rows.
            priorities: Finite numbers >= 0: `[n]`, or one number for all rows.

        Returns:
            A function that sets the priorities to `priorities + eps` and counts updates of removed
            rows. It returns the number of updated rows: an int, on a device a 0-d tensor.

        Raises:
            UsageError: The ids or the priorities are invalid.
        """
        row_ids = ids if isinstance(ids, torch.Tensor) else numbers("ids", ids)
        if row_ids.dim() != 1 or (
            len(row_ids) and (row_ids.is_floating_point() or row_ids.dtype is torch.bool)
        ):
            raise UsageError(
                f"ids must be integers [n], got {row_ids.dtype} {list(row_ids.shape)}."
            )
        row_ids = row_ids if row_ids.dtype is torch.int64 else row_ids.long()
        if row_ids.device != self.device:
            row_ids = sent(row_ids, self.device)
        return partial(self._update, own(row_ids), *self.checked(priorities, len(row_ids)))

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
        # Check for removed rows only if there are some: for 4096 of 10^6 rows the check takes 4 %
        # of the time of a draw and its update.
        if self._num_valid < num_written:
            is_live &= self._own_is_valid[places]
        num_live = int(self._library.count_nonzero(is_live))
        if num_live < len(ids):
            self._num_dead += len(ids) - num_live
            places = places[is_live]
            priorities = priorities[is_live]
            largest = float(priorities.max()) if num_live else 0.0
        if num_live:
            self._set(places, priorities + self.rule.eps, largest)
        return num_live

    def _update_on_device(
        self, ids: torch.Tensor, priorities: torch.Tensor, is_checked: bool
    ) -> torch.Tensor:
        stop = self._total * self._num_lanes
        start = stop - min(self._total, self._num_slots) * self._num_lanes
        # Three flags per updated row: the row is live, its priority is valid, both are true. If the
        # host has checked the priorities, only the first flag is needed.
        flags = torch.empty(
            (1 if is_checked else 3, len(ids)), dtype=torch.bool, device=self.device
        )
        is_live = flags[0]
        is_written = flags[-1]
        torch.eq(ids.clamp(start, stop - 1), ids, out=is_live)
        places = self.places(ids)
        if self._num_valid is None or not self._total:
            is_live &= self._is_valid.index_select(0, places)
        if not is_checked:
            self._are_accepted(priorities, flags[1])
            torch.logical_and(is_live, flags[1], out=is_written)
        totals = flags.sum(1)
        counted = totals[:2]
        self._totals[: len(counted)].add_(counted)
        self._num_dead += len(ids)
        if not is_checked:
            self._num_unchecked += len(ids)
            self._send_report()
        if len(ids):
            places = torch.where(is_written, places, self._num_places)
            priorities = torch.where(is_written, priorities, self._minus_eps)
            largest = priorities.max()
            order = self._weights.numbers(len(ids))
            priorities = last_copies(places, priorities + self.rule.eps, self._num_leaves, order)
            # With alpha 0, the priority 0 of a skipped update would get the weight 0 ** 0 = 1.
            is_drawable = None if self.rule.alpha else places < self._num_places
            self._set(places, priorities, largest, is_drawable)
        return totals[-1]

    def _are_accepted(
        self, priorities: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return whether each priority is valid: finite, >= 0 and not too large, `[n]` bool."""
        largest = min(
            self._largest_priority - self.rule.eps, torch.finfo(priorities.dtype).max, _LARGEST
        )
        return torch.eq(priorities.clamp(0, largest), priorities, out=out)

    @writes_in_order
    def send_draws(self) -> None:
        """Start to copy the checks of recent draws from the device to the host.

        A later call raises an error if a draw found no weight above 0.
        """
        if self._num_unsent:
            self._send_report()

    def _send_report(self) -> None:
        read = partial(self._read_report, self._num_unchecked, self._num_unsent)
        self._order.deferred.note(self._report, read)
        self._num_unsent = 0

    def _read_report(
        self, num_unchecked: int, num_draws: int, report: list[float]
    ) -> UsageError | None:
        """Return the error to raise for earlier calls with invalid priorities or without rows.

        The device could not raise these errors itself. Returns None if all calls were valid.

        Args:
            num_unchecked: Number of priorities that only the device had checked by then.
            num_draws: Number of draws since the previous report.
            report: Numbers of the device: counters, then the least weight of each draw.
        """
        texts = []
        num_invalid = num_unchecked - int(report[1])
        if num_invalid > self._num_invalid:
            texts.append(
                f"earlier calls passed {num_invalid - self._num_invalid} invalid priorities, which "
                "were ignored. Priorities must be finite and >= 0."
            )
            self._num_invalid = num_invalid
        num_empty = sum(map(isinf, report[2 : 2 + num_draws]))
        if num_empty:
            self._has_mass = False
            calls, batches = "an earlier call", "its batch"
            if num_empty > 1:
                calls, batches = f"{num_empty} earlier calls", "their batches"
            texts.append(f"{calls} found no row with a weight above 0. Discard {batches}.")
        return UsageError(" ".join(texts)) if texts else None

    def _set(
        self, places: Any, priorities: Any, largest: Any, is_drawable: torch.Tensor | None = None
    ) -> None:
        """Set the priorities and weights of `[n]` rows.

        Args:
            places: `[n]` positions of the rows; on a device, `num_places` for skipped entries.
            priorities: `[n]` checked priorities. If a position is repeated, its last priority stays
                on the CPU; on a device, equal positions must have equal priorities.
            largest: Maximum of `priorities`; None if it is not above the largest priority so far.
            is_drawable: `[n]` bool, only on a device: whether each row may be drawn. Other rows get
                the weight 0. None: all rows; skipped entries must then have the priority 0.
        """
        weights = self.rule.weights(priorities)
        if self.rule.alpha > _LARGEST_SAFE_ALPHA:
            weights = weights.clip(min=priorities.clip(max=_LEAST_WEIGHT))
        if is_drawable is not None:
            weights = torch.where(is_drawable, weights, 0.0)
        self._own_priorities[places] = priorities
        self._weights.put(places, weights)
        if self._is_on_cpu:
            self._largest = max(self._largest, largest)
        elif largest is not None:
            self._largest = torch.maximum(self._largest, largest)

    # Saving.

    @writes_in_order
    def state(self, num_places: int) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Return the state to save: numbers, and one tensor per column.

        The tensors contain the first `num_places` positions. They may share memory with the ring.
        """
        self.send_draws()
        first = slice(num_places)
        tensors = {
            "weights": self._weights.leaves_view()[first].clone(),
            "priorities": self.priorities[first],
        }
        tensors |= {"row_ids": torch.where(self._is_valid[first], self._ids(num_places), _NO_ROW)}
        if self._has_limits:
            zeros = torch.zeros(num_places, dtype=torch.int64, device=self.device)
            flipped = zeros if self._flipped_collected is None else self._flipped_collected[first]
            tensors |= {
                "uses": zeros if self._uses is None else self._count_uses()[first],
                "collected": flipped ^ UNKNOWN,
            }
        numbers = {
            name: getattr(self, name) for name in ("max_priority", "num_draws", "num_dead_updates")
        }
        return numbers, {name: tensors[name] for name in self._columns}

    @writes_in_order
    def restore(
        self, num_places: int, numbers: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
    ) -> None:
        """Load the result of `state` into a new ring.

        Args:
            num_places: Length of the columns in `tensors`.
            numbers: Numbers of `state`, and `total`, the rows per lane that were ever written.
            tensors: Columns of `state`.

        Raises:
            SchemaError: The state does not fit; nothing was changed.
        """
        for name, dtype in self._columns.items():
            checked_tensor(tensors, name, dtype, [num_places])
        for name in ("max_priority", "num_draws", "num_dead_updates"):
            if not arguments.is_real(numbers[name]) or not 0 <= numbers[name] <= _LARGEST:
                raise SchemaError(
                    f"{name} of the state must be finite and >= 0, got {numbers[name]!r}."
                )
        self._total = checked_count(numbers, "total", 0, UNKNOWN // self._num_lanes)
        is_valid = tensors["row_ids"] != _NO_ROW
        self._check_rows(tensors, is_valid)
        self._weights.rebuild(tensors["weights"])
        self.priorities[:num_places] = tensors["priorities"]
        self._set_numbers(float(numbers["max_priority"]), int(numbers["num_dead_updates"]))
        self.num_draws = int(numbers["num_draws"])
        self._is_valid[:num_places] = is_valid
        self._num_valid = int(is_valid.sum())
        num_written = min(self._total, self._num_slots) * self._num_lanes
        # None makes updates on a device check whether each row is valid.
        if not self._is_on_cpu and self._num_valid < num_written:
            self._num_valid = None
        if "uses" in self._columns:
            if bool(tensors["uses"].any()):
                self._count_uses()[:num_places] = tensors["uses"]
            if bool((tensors["collected"] != UNKNOWN).any()):
                self._iterations()[:num_places] = tensors["collected"] ^ UNKNOWN
            if self._oldest is not None:
                self._oldest.rebuild(
                    torch.where(is_valid, _tree_numbers(tensors["collected"]), 0).double()
                )

    def _check_rows(self, tensors: Mapping[str, torch.Tensor], is_valid: torch.Tensor) -> None:
        """Raise `SchemaError` if the weights or ids of a loaded state are impossible."""
        weights = tensors["weights"]
        row_ids = tensors["row_ids"]
        are_possible = torch.isfinite(weights) & (weights >= 0) & ((weights == 0) | is_valid)
        if not bool(are_possible.all()):
            raise SchemaError(
                "weights of the state must be finite and >= 0, and 0 at positions without a row."
            )
        if not bool(((row_ids == self._ids(len(row_ids))) | ~is_valid).all()):
            raise SchemaError(
                "row_ids of the state must be the ids of the newest rows at their positions, and "
                f"{_NO_ROW} at positions without a row."
            )

    def _set_numbers(self, largest: float, num_dead: int) -> None:
        if self._is_on_cpu:
            self._largest = largest
        else:
            self._largest = torch.full_like(self._largest, largest)
        self.set_num_dead_updates(num_dead)

    def check_valid(self) -> tuple[bool, str]:
        """Check the invariants: return (whether all hold, description of the first violation)."""
        weights = self._weights.leaves_view()
        if bool((weights[~self._is_valid] > 0).any()):
            return False, "a removed row has a weight above 0"
        if int(self._is_valid.sum()) != len(self):
            return False, "the count is not the number of rows"
        if bool((self._ids(self._num_places)[self._is_valid] < 0).any()):
            return False, "a row that was never written is valid"
        least = float(least_positive(weights))
        if float(self._weights.least()) != least:
            return False, f"the least weight is {least}, not {self._weights.least()}"
        return self._weights.check_valid()

    def _ids(self, num_places: int) -> torch.Tensor:
        """Return the row ids at the first `num_places` positions; below 0 if no row was written."""
        places = torch.arange(num_places, device=self.device)
        ids: torch.Tensor = keys_in(places, self._total, self._num_slots, self._num_lanes)
        return ids


def _tree_numbers(collected: torch.Tensor) -> torch.Tensor:
    """Convert `[n]` learner iterations to numbers <= 0 for `_OldestTree`; `UNKNOWN` becomes 0."""
    return collected.clamp(-_MAX_ITERATION, _MAX_ITERATION) - _MAX_ITERATION
