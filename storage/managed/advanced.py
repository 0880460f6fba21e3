"""`AdvancedReplayBuffer`: items drawn by priority, with importance weights, and limits of age and use.

One rule: checking and drawing are one step under one lock, and an item that is stale or used up is removed before
the next draw. Items and batches of tensors are two forms of the same rows.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, isinf
from typing import Any

import torch

from ..core import arguments
from ..core.memory import own, tensor_of
from ..core.tree import map_leaves
from ..errors import BufferEmptyError, SchemaError, UsageError
from ..live.rates import RateLimitedError
from ..prioritized.limits import UNKNOWN, RowLimits
from ..prioritized.ring import Draw, PrioritizedRing, Update
from ..prioritized.rows import PriorityRule
from ..saving.store import State
from .buffer import ManagedBuffer
from .ids import UNIQUE_ID, Request, earliest, leading_size, listed, plain_number, without_given
from .items import Items, from_json, put_leaf, to_json
from .used_data import UsedData, UsedQueue, checked_data_id


@dataclass(frozen=True)
class Push:
    """Checked items, and their priorities and iterations; None where none was given.

    Attributes:
        items: The items.
        given: Priorities `[n]` as `own` gives them, and the largest.
        collected: `[n]` int64.
    """

    items: Items
    given: tuple[Any, float] | None
    collected: torch.Tensor | None


class AdvancedReplayBuffer(ManagedBuffer):
    """The last items, drawn in proportion to priority ** alpha (Schaul et al. 2016).

    Args:
        replay_buffer_size: Items that fit.
        replay_start_size: Items that must have been added before any is drawn.
        max_use: An item is removed when it was drawn so often; `inf` or None for no limit.
        max_staleness: An item is removed when the learner is this many iterations past its `collect_iter`.
        min_sample_ratio: Items there must be, for each that is asked for.
        alpha, beta, anneal_step, eps: See `PriorityRule`.
        enable_track_used_data: Whether `used_data()` tells which `data_id`s are not needed any more.
        **options: As for `ManagedBuffer`: `name`, `device`, `output_device`, `generator`, `monitor`,
            `rate_limiter`.

    An item is a nested mapping, as for `NaiveReplayBuffer`. Three leaves mean something: `priority`
    (finite, >= 0; the largest so far if it is missing or None), `collect_iter` (an int, or a list of
    them, of which the least counts; without it an item is never stale) and `data_id`.

    Two fronts share everything: items in lists (`push`, `sample`, `update`) and batches of tensors
    (`extend_tensors`, `sample_tensors`, `update_priorities`), which take a hundredth of the time. Batches
    are in the order of the slots; shuffle them before cutting them up.
    """

    def __init__(
        self,
        replay_buffer_size: int,
        replay_start_size: int = 0,
        max_use: float | None = inf,
        max_staleness: float | None = inf,
        min_sample_ratio: float = 1.0,
        alpha: float = 0.6,
        beta: float = 0.4,
        anneal_step: float = 1e5,
        eps: float = 1e-5,
        enable_track_used_data: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(replay_buffer_size, **options)
        self.replay_start_size = arguments.whole("create a buffer", "replay_start_size", replay_start_size, 0)
        self.min_sample_ratio = arguments.real(
            "create a buffer", "min_sample_ratio", min_sample_ratio, ">= 0", lambda ratio: 0 <= ratio < inf
        )
        self.rule = PriorityRule(alpha, beta, anneal_step, eps)
        self._limits_given = {"max_use": max_use, "max_staleness": max_staleness}
        self._ring = self._make_ring()
        self._used = UsedData() if enable_track_used_data else None

    @property
    def max_priority(self) -> float:
        """The largest priority so far, without eps; 1 at first."""
        return self._ring.rows.max_priority

    @property
    def beta(self) -> float:
        """Exponent of the next draw's importance weights."""
        return self._ring.rows.beta

    @property
    def num_dead_updates(self) -> int:
        """Updates so far of items that were gone."""
        return self._ring.num_dead_updates

    def count(self) -> int:
        """Items that are neither overwritten nor removed."""
        return len(self._ring)

    @torch.no_grad()
    def extend_tensors(
        self, batch: Mapping[str, Any], priorities: Any = None, collect_iter: Any = None
    ) -> torch.Tensor:
        """Add many items at once.

        Args:
            batch: Nested mapping of `[n, *event]` tensors or arrays; copied.
            priorities: `[n]` or one number; None for the largest so far.
            collect_iter: `[n]` integers, or one for all; None if that is not known.

        Returns:
            `[min(n, size)]` int64, the ids of those that stay.
        """
        if not isinstance(batch, Mapping):
            raise SchemaError("add a batch", "", "a mapping", type(batch).__name__)
        start_s, num_rows = time.monotonic(), leading_size(batch)

        def work() -> tuple[Push, torch.Tensor]:
            read = self._read_batch(batch, priorities, collect_iter)
            return read, self.write(read)

        done = self._when_admitted(num_rows, True, work)
        assert done is not None
        self.note_push(num_rows, done[0], start_s)
        return done[1]

    @torch.no_grad()
    def sample(
        self, size: int, cur_learner_iter: int = 0, sample_range: slice | None = None, replace: bool = True
    ) -> list[dict[str, Any]] | None:
        """Remove stale items, then draw by priority, one item from each of `size` intervals of equal mass.

        Args:
            size: How many; 0 gives []. An item may come more than once.
            cur_learner_iter: Where the learner is; what staleness counts from.
            sample_range: Only these, counted by age: `slice(-100, None)` the newest hundred.
            replace: Has no effect here.

        Returns:
            Copies of items, each with `replay_unique_id`, `replay_buffer_idx`, `priority`, `use` (with this
            draw and the copies before it in the list), `staleness` (-1 if that is not known) and `IS`, the
            importance weight in (0, 1]. None if there are not enough items, or the rate limiter refuses.
        """
        return super().sample(size, cur_learner_iter, sample_range, replace)

    def has(self, request: Request) -> bool:
        self._drop(self._ring.limits.stale(request.iteration))
        if request.size == 0:
            return True
        if request.sample_range is None:
            return self._is_enough(request, self.count()) and self._ring.rows.total > 0
        slots = self._slots_in(request)
        return self._is_enough(request, len(slots)) and self._ring.rows.has_mass(slots)

    def take(self, request: Request) -> list[Any] | None:
        start_s = time.monotonic()
        drawn = None if request.size == 0 else self._draw(request)
        if drawn is None:
            return [] if request.size == 0 else None
        slots, limits = drawn.places, self._ring.limits
        extra = {
            **self._ids_of(drawn.ids, slots),
            "priority": self._ring.rows.priorities[slots].tolist(),
            "use": limits.uses_with(slots).tolist(),
            "staleness": limits.staleness(slots, request.iteration).tolist(),
            "IS": drawn.importance.tolist(),
        }
        found = self._store.items(slots, extra, self.output_device)
        self._finish(drawn, request, start_s)
        return found

    def sample_tensors(
        self, batch_size: int, cur_learner_iter: int = 0
    ) -> tuple[dict[str, Any], torch.Tensor, torch.Tensor]:
        """Draw as `sample` does, as a batch.

        Returns:
            (batch, weights, ids): a nested dict of `[batch_size, *event]`, views of new tensors (objects
            that are numbers as tensors, others as lists); importance weights `[batch_size]` float32 in
            (0, 1]; ids `[batch_size]` int64 for `update_priorities`.

        Raises:
            BufferEmptyError: There are not enough items, or the rate limiter refuses (a `ValueError`).
        """
        request = Request.checked(batch_size, cur_learner_iter, least=1)
        try:
            found = self._when_admitted(request.size, False, lambda: self.take_tensors(request))
        except RateLimitedError:
            expected, got = "draws that the rate limiter lets pass", f"a batch of {batch_size}"
            raise BufferEmptyError("sample from", repr(self.name), expected, got, "Add items first") from None
        if found is None:
            expected, got = f"items for a batch of {batch_size}", f"{self.count()} of {self.push_count} that were added"
            raise BufferEmptyError("sample from", repr(self.name), expected, got, "Add items first")
        return found

    def take_tensors(self, request: Request) -> tuple[dict[str, Any], torch.Tensor, torch.Tensor] | None:
        """Do what `sample_tensors` does; None if there are not enough. The lock is held, the limiter was asked."""
        start_s = time.monotonic()
        drawn = self._draw(request)
        if drawn is None:
            return None
        batch = self._batch(drawn.places)
        self._finish(drawn, request, start_s)
        weights, ids = drawn.importance.float(), drawn.ids
        if self.output_device is not None:
            ids, weights = ids.to(self.output_device), weights.to(self.output_device)
        return batch, weights, ids

    def update(self, info: Mapping[str, Any]) -> int:
        """Take what a learner found about items of a sample.

        Args:
            info: `replay_unique_id` (a list of ids) with `priority` (as many finite numbers >= 0); and
                `used_id`, the `data_id`s of a sample that is done with. Both may be missing.

        Returns:
            How many priorities were applied. Items that are gone are left out, and counted in
            `num_dead_updates`; of an item that is named twice the last priority stays.

        Raises:
            KeyError: An id is of another buffer.
            ValueError: A priority is negative or not finite, or there are not as many; nothing is changed.
        """
        return super().update(info)

    def update_priorities(self, ids: Any, priorities: Any) -> int:
        """Set the priorities of items to `priorities + eps`.

        Args:
            ids: `[n]` int64, as `sample_tensors` gives them.
            priorities: `[n]` finite numbers >= 0, or one for all.

        Returns:
            As for `update`.
        """
        with self._lock:
            return self.apply_update(self.read_priorities(ids, priorities))

    def used_data(self) -> UsedQueue:
        """Give the queue of `data_id`s that no item and no sample needs any more; each comes once.

        Raises:
            UsageError: Not created with `enable_track_used_data`.
        """
        if self._used is None:
            raise UsageError("track used data", f"of {self.name!r}", "enable_track_used_data=True", "False")
        return self._used.queue

    def check_valid(self) -> tuple[bool, str]:
        """Check what must always hold: (whether it does, what does not)."""
        with self._lock:
            ids = self._ring.limits.row_ids[self._ring.limits.valid_slots()]
            if bool(((ids < self._store.oldest) | (ids >= self._store.total)).any()):
                return False, "an item that is overwritten counts"
            return self._ring.check_valid()

    # Coming and going.

    def read(self, items: Sequence[Any]) -> Push:
        plain, priorities, iterations = [], [], []
        for item in items:
            if not isinstance(item, Mapping):
                raise SchemaError("add an item", "", "a mapping", type(item).__name__)
            one = dict(without_given(item))
            priorities.append(one.pop("priority", None))
            if "collect_iter" in one:  # a number in any form; never a column
                one["collect_iter"] = plain_number(one["collect_iter"])
            iterations.append(earliest(one.get("collect_iter")))
            if self._used is not None and "data_id" in one:
                one["data_id"] = checked_data_id(one["data_id"])
            plain.append(one)
        is_known = any(iteration != UNKNOWN for iteration in iterations)
        collected = torch.tensor(iterations, dtype=torch.int64, device=self.device) if is_known else None
        return Push(self._store.read_items(plain), self._filled_in(priorities), collected)

    def write(self, read: Push) -> torch.Tensor:
        """Add checked items; give the ids of those that stay."""
        items, num_passed = read.items, max(0, read.items.num_rows - self.replay_buffer_size)
        slots = self._store.slots(self._store.next_ids(items.num_rows))
        gone = self._store.values(slots, "data_id")  # overwritten
        ids = self._store.write(items)
        given = None if read.given is None else (read.given[0][num_passed:], read.given[1])
        self._ring.register(ids, given, None if read.collected is None else read.collected[num_passed:])
        if self._used is not None:
            first = (items.objects or [])[:num_passed]  # overwritten by others of the same push
            passed = [one["data_id"] for one in first if one.get("data_id") is not None]
            self._used.replace(gone + passed, passed + self._store.values(slots, "data_id"))
        return ids

    def read_update(self, info: Mapping[str, Any]) -> tuple[Update, list[Any]]:
        if not isinstance(info, Mapping):
            raise UsageError("update", repr(self.name), "a mapping", type(info).__name__)
        rows, priorities = self._rows_of(info.get(UNIQUE_ID)), info.get("priority")
        update = self._ring.checked_update(*([], []) if priorities is None else (rows, priorities))
        return update, [checked_data_id(one) for one in listed(info.get("used_id"))]

    def read_priorities(self, ids: Any, priorities: Any) -> tuple[Update, list[Any]]:
        """Check what `update_priorities` is given; give what `apply_update` takes."""
        return self._ring.checked_update(ids, priorities), []

    def apply_update(self, read: tuple[Update, list[Any]]) -> int:
        update, used = read
        if self._used is not None:
            self._used.release(used)
        return self._ring.update(update)

    def _read_batch(self, batch: Mapping[str, Any], priorities: Any, collect_iter: Any) -> Push:
        items = self._store.read_batch(batch)
        given = None if priorities is None else self._ring.rows.checked(priorities, items.num_rows)
        if collect_iter is None:
            return Push(items, given, None)
        collected = torch.as_tensor(collect_iter, device=self.device)
        if collected.is_floating_point() or collected.dtype is torch.bool:
            raise UsageError("add a batch", "", "collect_iter of integers", str(collected.dtype))
        if collected.dim() > 1 or (collected.dim() and len(collected) != items.num_rows):
            expected = f"a collect_iter, or {items.num_rows} of them"
            raise UsageError("add a batch", "", expected, f"shape {list(collected.shape)}")
        return Push(items, given, collected.long().expand(items.num_rows))

    def _filled_in(self, priorities: list[Any]) -> tuple[Any, float] | None:
        """Check priorities of items; those that are None become the largest so far."""
        known = [plain_number(value) for value in priorities if value is not None]
        if not known:
            return None
        _, largest = self._ring.rows.checked(known, len(known))
        highest, values = self.max_priority, []
        for value in priorities:
            values.append(highest if value is None else float(value))
            highest = max(highest, values[-1])
        return own(torch.tensor(values, dtype=torch.float64, device=self.device)), largest

    def _push_values(self, read: Push) -> dict[str, Any]:
        return {"priority": self.max_priority if read.given is None else read.given[0]}

    def _drop(self, slots: torch.Tensor | None) -> None:
        """Remove the items in some slots, those that are still there; None is none."""
        if slots is None:
            return
        found = self._ring.drop(slots)
        if self._used is not None:
            self._used.replace(self._store.values(found, "data_id"), ())
        self._store.forget_objects(found)

    def _clear(self) -> None:
        if self._used is not None:
            self._used.replace(self._store.values(self._ring.limits.valid_slots(), "data_id"), ())
        super()._clear()
        self._ring.clear()

    def _release(self) -> None:
        super()._release()
        self._ring = self._make_ring()

    def _make_ring(self) -> PrioritizedRing:
        size = self.replay_buffer_size
        return PrioritizedRing(
            size, 1, self.rule, self.device, RowLimits(size, **self._limits_given, device=self.device)
        )

    # Drawing.

    def _is_enough(self, request: Request, num_rows: int) -> bool:
        return num_rows >= self.min_sample_ratio * request.size and self.push_count >= self.replay_start_size

    def _slots_in(self, request: Request) -> torch.Tensor:
        """List the slots of the items in a range by age, oldest first."""
        ids = torch.arange(self._store.oldest, self._store.total, device=self.device)
        slots = self._store.slots(ids)
        slots = slots[tensor_of(self._ring.limits.holds(own(slots), own(ids)))]
        return slots[list(request.among(len(slots)))]

    def _draw(self, request: Request) -> Draw | None:
        """Remove what is stale, and draw; None if there is not enough."""
        self._drop(self._ring.limits.stale(request.iteration))
        among = None if request.sample_range is None else self._slots_in(request)
        if not self._is_enough(request, self.count() if among is None else len(among)):
            return None
        return self._ring.draw(request.size, self.rng, among)

    def _finish(self, drawn: Draw, request: Request, start_s: float) -> None:
        """Count the uses of what was drawn, and remove what was used up."""
        slots, limits = drawn.places, self._ring.limits
        if self.monitor is not None:
            staleness = limits.staleness(slots, request.iteration)
            self.monitor.note_sample(
                len(slots),
                time=time.monotonic() - start_s,
                use=limits.uses_with(slots),
                priority=self._ring.rows.priorities[slots],
                staleness=staleness[staleness >= 0],
            )
        used_up = limits.use(slots)
        if self._used is not None:
            self._used.hold(self._store.values(slots, "data_id"))
        self._drop(used_up)

    def _batch(self, slots: torch.Tensor) -> dict[str, Any]:
        """Gather slots as a nested dict of tensors; objects that are numbers become tensors, others lists."""
        device, objects = self.output_device, self._store.objects(slots)
        batch = self._store.columns(slots, nested=True)
        if device is not None:
            batch = map_leaves(lambda leaf: leaf.to(device, non_blocking=True), batch)
        for name in dict.fromkeys(name for one in objects or () for name in one):
            values = [one.get(name) for one in objects or ()]
            is_number = all(isinstance(value, (bool, int, float)) for value in values)
            put_leaf(batch, name, torch.tensor(values, device=device or self.device) if is_number else values)
        return batch

    # Saving.

    def _arguments(self) -> dict[str, Any]:
        limits = {name: None if x is None or isinf(x) else x for name, x in self._limits_given.items()}
        found = super()._arguments() | {"replay_start_size": self.replay_start_size, **limits, **vars(self.rule)}
        tracking = {"enable_track_used_data": self._used is not None}
        return found | {"min_sample_ratio": self.min_sample_ratio, **tracking}

    def _get_state(self) -> State:
        numbers, tensors = self._ring.state(self._store.num_live)
        used = None if self._used is None else to_json(self._used.to_json(), "that are data_ids").decode()
        return self._state_with(self._store, {**numbers, "used_data": used}, tensors)

    def _built(self, numbers: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        store, ring, text = (
            self._store_of(self.replay_buffer_size, numbers, tensors),
            self._make_ring(),
            numbers["used_data"],
        )
        ring.restore(store.num_live, numbers, tensors)
        if (text is None) != (self._used is None):
            raise SchemaError("load a state", "", f"tracked data: {self._used is not None}", f"{text is not None}")
        used = None if text is None else UsedData.from_json(from_json(text.encode(), "that are data_ids"))
        return {"_store": store, "_ring": ring, "_used": used}
