"""`AdvancedReplayBuffer`: prioritized replay with importance weights and limits of age and use.

Each call holds the lock of the buffer. A draw first removes stale items, which reached
`max_staleness`. After the draw it removes the drawn items that reached `max_use`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import inf, isinf
from typing import Any

import numpy as np
import torch

from ..core import arguments
from ..core.fields import flatten
from ..core.memory import float32_of, on_device, own, sent
from ..core.records import numbers
from ..errors import BufferEmptyError, SchemaError, UsageError
from ..prioritized.prioritized_ring import UNKNOWN, Draw, PrioritizedRing
from ..prioritized.priority_rules import Limits, PriorityRule
from ..saving.saved_store import State
from .item_store import (
    UNIQUE_ID,
    Items,
    from_json,
    listed,
    plain_number,
    put_leaf,
    read_batch,
    read_items,
    to_json,
)
from .managed_buffer import Act, ManagedBuffer, Request
from .used_data import UsedData, UsedQueue, checked_data_id

_Batch = tuple[dict[str, Any], torch.Tensor, torch.Tensor]
#: Description of tracked objects in errors.
_DATA = "the data_ids"


class AdvancedReplayBuffer(ManagedBuffer):
    """Buffer of items that are drawn in proportion to priority ** alpha (Schaul et al. 2016).

    Args:
        replay_buffer_size: Capacity in items.
        replay_start_size: Number of items that must have been added before the first draw.
        max_use: Number of draws after which an item is removed; `inf` or None for no limit.
        max_staleness: Number of learner iterations after `collect_iter` at which an item is
            removed; `inf` or None for no limit.
        min_sample_ratio: Required number of items in the buffer per drawn item.
        alpha, beta, anneal_step, eps: See `PriorityRule`.
        enable_track_used_data: Whether `used_data()` lists `data_id`s that are no longer used.
        **options: As for `ManagedBuffer`: `name`, `device`, `output_device`, `generator`,
            `monitor`, `rate_limiter`.

    An item is a nested mapping, as for `NaiveReplayBuffer`. Three leaves have a meaning:

    - `priority`: a finite number >= 0. A missing priority or None means the largest so far.
    - `collect_iter`: learner iteration at collection, an int or a list of ints. The minimum of a
      list is used. An item without this leaf is never stale.
    - `data_id`: see `used_data`.

    There are two interfaces: lists of items (`push`, `sample`, `update`) and batches of tensors
    (`extend_tensors`, `sample_tensors`, `update_priorities`). Batches take about a hundredth of the
    time of lists. The rows of a batch are sorted by slot, so shuffle them before splitting the
    batch.
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
        arguments.options(self, options)
        super().__init__(replay_buffer_size, **options)
        self.replay_start_size = arguments.whole("replay_start_size", replay_start_size, 0)
        self.min_sample_ratio = arguments.real(
            "min_sample_ratio", min_sample_ratio, ">= 0", lambda ratio: 0 <= ratio < inf
        )
        self.rule = PriorityRule(alpha, beta, anneal_step, eps)
        self._limits = Limits(max_use, max_staleness)
        self._ring = self._make_ring()
        is_tracked = arguments.flag("enable_track_used_data", enable_track_used_data)
        self._used = UsedData() if is_tracked else None

    @property
    def max_priority(self) -> float:
        """Largest priority so far, without eps; initially 1."""
        return self._ring.max_priority

    @property
    def beta(self) -> float:
        """Exponent of the next draw's importance weights."""
        return self._ring.beta

    @property
    def num_dead_updates(self) -> int:
        """Number of priority updates for items that were already removed or overwritten."""
        return self._ring.num_dead_updates

    def count(self) -> int:
        """Return the number of items that are neither overwritten nor removed."""
        return len(self._ring)

    # Adding items.

    @torch.no_grad()
    def extend_tensors(
        self, batch: Mapping[str, Any], priorities: Any = None, collect_iter: Any = None
    ) -> torch.Tensor:
        """Add a batch of items.

        Args:
            batch: Nested mapping of `[n, *event]` tensors or arrays, which are copied.
            priorities: Priorities `[n]`, or one number; None for the largest priority so far.
            collect_iter: Learner iterations at collection, `[n]` integers or one integer; None if
                unknown.

        Returns:
            Ids of the stored items, `[min(n, replay_buffer_size)]` int64.
        """
        if not isinstance(batch, Mapping):
            raise SchemaError(f"batch must be a mapping, got {type(batch).__name__}.")
        start_s = time.monotonic()
        leaf: Any = next(iter(flatten(batch).values()), 0)

        def prepare() -> Act:
            items = read_batch(batch, self._store.form)
            checked = None if priorities is None else self._ring.checked(priorities, items.num_rows)
            collected = self._checked_iterations(collect_iter, items.num_rows)
            return partial(self._write, items, checked, collected, start_s)

        ids: torch.Tensor = self._call(len(leaf) if np.ndim(leaf) else 0, True, prepare)
        return ids

    def prepare_push(self, items: Sequence[Any], start_s: float) -> Act:
        leaves_of_items = []
        priorities = []
        iterations = []
        for item in items:
            if not isinstance(item, Mapping):
                raise SchemaError(
                    f"data must be a mapping or a list of mappings, got {type(item).__name__}."
                )
            leaves = dict(item)
            priorities.append(leaves.pop("priority", None))
            # A tensor would become a column, which all items must have. A Python number is stored
            # as an object of its item.
            if "collect_iter" in leaves:
                leaves["collect_iter"] = plain_number(leaves["collect_iter"])
            iterations.append(_earliest(leaves.get("collect_iter")))
            if self._used is not None and "data_id" in leaves:
                leaves["data_id"] = checked_data_id(leaves["data_id"])
            leaves_of_items.append(leaves)
        collected = None
        if any(iteration != UNKNOWN for iteration in iterations):
            collected = sent(torch.tensor(iterations, dtype=torch.int64, device="cpu"), self.device)
        rows = read_items(leaves_of_items, self._store.form)
        return partial(self._write, rows, self._filled_priorities(priorities), collected, start_s)

    def _write(
        self,
        items: Items,
        priorities: tuple[Any, float | None] | None,
        collected: torch.Tensor | None,
        start_s: float,
    ) -> torch.Tensor:
        """Add checked items and return the ids of the stored items.

        Args:
            items: n checked items.
            priorities: Checked priorities `[n]` and their maximum; None for the largest so far.
            collected: Learner iterations at collection, `[n]`; None if unknown.
            start_s: Start of the call in seconds, on the clock of `time.monotonic()`.
        """
        # Number of first items that later items of the same push would overwrite.
        num_passed = max(0, items.num_rows - self.replay_buffer_size)
        if self._used is not None:
            pushed = [objects.get("data_id") for objects in items.objects or ()]
            slots = self._store.ring.slot(self._store.next_ids(items.num_rows))
            self._used.replace(
                [*self._store.values(slots, "data_id"), *pushed[:num_passed]], pushed
            )
        of_stored = None if priorities is None else (priorities[0][num_passed:], priorities[1])
        collected_of_stored = None if collected is None else collected[num_passed:]
        with self._store.order.writes:
            ids = self._store.write(items)
            self._ring.register(ids, self._store.ring.total, of_stored, collected_of_stored)
        if self.monitor is not None:
            priority = self.max_priority if priorities is None else priorities[0]
            self._note_push(items.num_rows, start_s, priority=priority)
        return ids

    def _checked_iterations(self, collect_iter: Any, num_rows: int) -> torch.Tensor | None:
        """Check `collect_iter` and return it as `[num_rows]` int64 on the device; None for None."""
        if collect_iter is None:
            return None
        iterations = sent(numbers("collect_iter", collect_iter), self.device)
        if iterations.is_floating_point() or iterations.dtype is torch.bool:
            raise UsageError(f"collect_iter must have an integer dtype, got {iterations.dtype}.")
        if iterations.dim() > 1 or (iterations.dim() and len(iterations) != num_rows):
            raise UsageError(
                f"collect_iter has shape {list(iterations.shape)}, expected [] or [{num_rows}]."
            )
        return iterations.long().expand(num_rows)

    def _filled_priorities(self, priorities: list[Any]) -> tuple[Any, float | None] | None:
        """Check the priorities of pushed items, and replace each None by the largest so far.

        Returns the priorities `[n]` and their maximum. Returns None if all priorities are None.
        """
        stated = [plain_number(value) for value in priorities if value is not None]
        if not stated:
            return None
        _, largest = self._ring.checked(stated, len(stated))
        highest = self.max_priority
        values = []
        for value in priorities:
            values.append(highest if value is None else float(value))
            highest = max(highest, values[-1])
        filled = torch.tensor(values, dtype=torch.float64, device="cpu")
        return own(sent(filled, self.device)), largest

    # Drawing.

    @torch.no_grad()
    def sample(
        self,
        size: int,
        cur_learner_iter: int = 0,
        sample_range: slice | None = None,
        replace: bool = True,
    ) -> list[dict[str, Any]] | None:
        """Remove stale items, then draw items by priority with systematic sampling.

        One item is drawn from each of `size` intervals of equal probability mass.

        Args:
            size, cur_learner_iter, sample_range: As for `NaiveReplayBuffer.sample`.
            replace: No effect, because an item may always be drawn more than once.

        Returns:
            Copies of items. None if there are not enough items, or the rate limiter rejects the
            sample. `sample` adds these leaves to each copy: `replay_unique_id`,
            `replay_buffer_idx`, `priority`, `use` (number of draws, this draw included),
            `staleness` (learner iterations since the collection, -1 if unknown) and `IS`
            (importance weight in (0, 1]). If an item is drawn repeatedly, the `use` of each copy is
            one more than that of the previous copy.
        """
        return super().sample(size, cur_learner_iter, sample_range, replace)

    def sample_tensors(
        self, batch_size: int, cur_learner_iter: int = 0
    ) -> tuple[dict[str, Any], torch.Tensor, torch.Tensor]:
        """Draw a batch of tensors, in the way of `sample`.

        Returns:
            (batch, weights, ids). `batch` is a nested dict of `[batch_size, *event]` tensors, in
            new memory but not always contiguous. An object of the items becomes a tensor if it is a
            number in every drawn item; otherwise it becomes a list of `batch_size` values.
            `weights` are the importance weights, `[batch_size]` float32 in (0, 1]. `ids`,
            `[batch_size]` int64, are the argument of `update_priorities`.

        Raises:
            BufferEmptyError: There are not enough items, or the rate limiter rejects the sample (a
                `ValueError`).
        """
        batch_size = arguments.whole("batch_size", batch_size, 1)
        request = Request.checked(batch_size, cur_learner_iter)._replace(are_tensors=True)
        batch: _Batch | None = self._call(batch_size, False, lambda: self.prepare_sample(request))
        if batch is None:
            text = (
                f"buffer {self.name!r} has {self.count()} of {self.push_count} added items left, "
                f"too few for a batch of {batch_size}. Add items first."
            )
            if self.rate_limiter is not None:
                text += " The rate limiter may also delay samples."
            raise BufferEmptyError(text)
        return batch

    def prepare_sample(self, request: Request) -> Act | None:
        self._drop(self._ring.stale(request.iteration))
        if request.size == 0:
            return list
        self._ring.order.deferred.raise_arrived()
        among = None if request.sample_range is None else self._slots_in(request)
        num_rows = self.count() if among is None else len(among)
        has_started = self.push_count >= self.replay_start_size
        has_enough = num_rows >= self.min_sample_ratio * request.size
        if not (has_started and has_enough and self._ring.has_mass(among)):
            return None
        return partial(self._draw, request, among)

    def _slots_in(self, request: Request) -> torch.Tensor:
        """Return the slots of the items in the requested range of ages, oldest first."""
        ids = self._store.ring.ids()
        live = self._ring.valid_places(self._store.ring.slot(ids))
        slots: torch.Tensor = live[list(request.ages(len(live)))]
        return slots

    def _draw(self, request: Request, among: torch.Tensor | None) -> Any:
        """Draw items, count their uses and remove items that reached `max_use`."""
        start_s = time.monotonic()
        # Draws exclude each other like writes, since all draws share working memory.
        with self._store.order.writes:
            drawn = self._ring.draw(request.size, self.rng, among)
            assert drawn is not None
            sample: Any = (
                self._batch_of(drawn) if request.are_tensors else self._items_of(drawn, request)
            )
            measures = None if self.monitor is None else self._measures(drawn, request)
            used_up = self._ring.use(drawn.places)
        if self.monitor is not None and measures is not None:
            measures["staleness"] = measures["staleness"][measures["staleness"] >= 0]
            self.monitor.note_sample(request.size, time=time.monotonic() - start_s, **measures)
        if self._used is not None:
            self._used.hold(self._store.values(drawn.places, "data_id"))
        self._drop(used_up)
        return sample

    def _measures(self, drawn: Draw, request: Request) -> dict[str, torch.Tensor]:
        """Return the priority, the number of uses and the staleness of drawn items: `[n]` each.

        The uses include this draw, although the caller counts it later.
        """
        slots = drawn.places
        ring = self._ring
        return {
            "priority": ring.priorities[slots],
            "use": ring.uses_with(slots),
            "staleness": ring.staleness(slots, request.iteration),
        }

    def _items_of(self, drawn: Draw, request: Request) -> list[dict[str, Any]]:
        measures = {**self._measures(drawn, request), "IS": drawn.importance}
        extra = self._ids_of(drawn.ids, drawn.places)
        extra |= {name: values.tolist() for name, values in measures.items()}
        return self._store.items(drawn.places, extra, self.output_device)

    def _batch_of(self, drawn: Draw) -> _Batch:
        batch = self._store.columns(drawn.places, nested=True)
        objects = self._store.objects(drawn.places)
        lists = {}
        for name in dict.fromkeys(name for of_item in objects for name in of_item):
            values = [of_item.get(name) for of_item in objects]
            if all(isinstance(value, (bool, int, float)) for value in values):
                put_leaf(batch, name, sent(torch.tensor(values, device="cpu"), self.device))
            else:
                lists[name] = values
        sample: dict[str, Any] = {
            "batch": batch,
            "weights": float32_of(drawn.importance),
            "ids": drawn.ids,
        }
        sample = on_device(sample, self.output_device)
        for name, values in lists.items():
            put_leaf(sample["batch"], name, values)
        return sample["batch"], sample["weights"], sample["ids"]

    # Updating.

    def update_priorities(self, ids: Any, priorities: Any) -> Any:
        """Set the priorities of items to `priorities + eps`.

        Args:
            ids: Ids of `sample_tensors`, `[n]` int64.
            priorities: Finite numbers >= 0, `[n]`, or one number for all items.

        Returns:
            Number of updated items, as for `update`. On a GPU the result is a 0-d tensor, and
            `int()` of it waits for the GPU.
        """
        with self._lock:
            return self.prepare_priorities(ids, priorities)()

    def prepare_update(self, info: Mapping[str, Any]) -> Callable[[], int]:
        if not isinstance(info, Mapping):
            raise UsageError(f"info must be a mapping, got {type(info).__name__}.")
        rows = self._rows_of(info.get(UNIQUE_ID))
        priorities = info.get("priority")
        if priorities is None:
            rows = []
            priorities = []
        update = self.prepare_priorities(rows, priorities)
        used = [checked_data_id(data_id) for data_id in listed(info.get("used_id"))]

        def apply() -> int:
            if self._used is not None:
                self._used.release(used)
            return update()

        return apply

    def prepare_priorities(self, ids: Any, priorities: Any) -> Callable[[], int]:
        """Check the arguments of `update_priorities` and return a function that applies them."""
        return self._ring.prepare_update(ids, priorities)

    def used_data(self) -> UsedQueue:
        """Return a queue of the `data_id`s that no item and no sample uses any more.

        The queue has each id at most once.

        Raises:
            UsageError: The buffer was created without `enable_track_used_data`.
        """
        if self._used is None:
            raise UsageError(
                f"buffer {self.name!r} does not track used data. "
                "Create it with enable_track_used_data=True."
            )
        return self._used.queue

    def check_valid(self) -> tuple[bool, str]:
        """Check the invariants. Returns whether all hold, and a text about the first violation."""
        with self._lock:
            return self._ring.check_valid()

    # Removing and saving.

    def _drop(self, slots: torch.Tensor | None) -> None:
        """Remove the items in some slots, and release their data. None removes no item."""
        if slots is None:
            return
        dropped = self._ring.drop(slots)
        if self._used is not None:
            self._used.replace(self._store.values(dropped, "data_id"), ())
        self._store.forget_objects(dropped)

    def _clear(self) -> None:
        if self._used is not None:
            slots = self._store.ring.slot(self._store.ring.ids())
            self._used.replace(self._store.values(slots, "data_id"), ())
        super()._clear()
        self._ring.clear()

    def _make_ring(self) -> PrioritizedRing:
        return PrioritizedRing(
            self.replay_buffer_size, 1, self.rule, self.device, self._limits, self._store.order
        )

    def _arguments(self) -> dict[str, Any]:
        # JSON has no infinity.
        limits = {
            name: None if x is None or isinf(x) else x for name, x in vars(self._limits).items()
        }
        return {
            **super()._arguments(),
            "replay_start_size": self.replay_start_size,
            **limits,
            **vars(self.rule),
            "min_sample_ratio": self.min_sample_ratio,
            "enable_track_used_data": self._used is not None,
        }

    def raise_deferred(self, wait: bool = False) -> None:
        with self._lock:
            if wait:
                self._ring.send_draws()
            self._ring.order.deferred.raise_arrived(wait)

    def _get_state(self) -> State:
        state = super()._get_state()
        numbers, tensors = self._ring.state(self._store.ring.num_live)
        used = None if self._used is None else to_json(self._used.to_json(), _DATA).decode()
        numbers = {**state.numbers, **numbers, "used_data": used}
        return State(state.arguments, numbers, {**state.tensors, **tensors})

    def _set_state(self, numbers: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        text = numbers["used_data"]
        if (text is None) != (self._used is None):
            raise SchemaError(
                f"enable_track_used_data is {self._used is not None} in this buffer and "
                f"{text is not None} in the state. Create the buffer with the argument that was "
                "saved."
            )
        super()._set_state(numbers, tensors)
        self._ring.send_draws()
        ring = self._make_ring()
        ring.restore(min(numbers["total"], self.replay_buffer_size), numbers, tensors)
        self._ring = ring
        self._used = None if text is None else UsedData.from_json(from_json(text.encode(), _DATA))


def _earliest(collect_iter: Any) -> int:
    """Return the least learner iteration in `collect_iter`, an integer or a list of integers.

    Returns `UNKNOWN` for None or an empty list.
    """
    iterations = [plain_number(value) for value in listed(collect_iter) if value is not None]
    if not all(map(arguments.is_whole, iterations)):
        raise UsageError(f"collect_iter must be integers, got {repr(collect_iter)[:60]}.")
    return min(iterations, default=UNKNOWN)
