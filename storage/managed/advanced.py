"""`AdvancedReplayBuffer`: items drawn by priority, with importance weights, and limits of age and use.

One rule: checking and drawing are one step under one lock. What is drawn, and why something is not,
is decided in `prioritized_store.py`; here are the two fronts, lists of items and batches of tensors.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Any

import torch

from ..core.arguments import check_count
from ..core.host_arrays import float32_tensor, own, tensor_of
from ..errors import BufferEmptyError, SchemaError, UsageError
from ..live.rates import RateLimitedError
from ..prioritized.limits import RowLimits
from ..prioritized.rows import PrioritizedRows, PriorityRule
from ..saving.store import State
from .buffer import ManagedBuffer
from .item_ids import UNIQUE_ID, check_iteration, finite_or_none, listed, without_given
from .prioritized_store import Draw, PrioritizedStore, Push
from .used_data import UsedData, UsedQueue, checked_data_id


class AdvancedReplayBuffer(ManagedBuffer):
    """The last items, drawn in proportion to priority ** alpha (Schaul et al. 2016).

    Args:
        replay_buffer_size: Items that fit.
        replay_start_size: Items that must have been added before any is drawn.
        max_use: An item is removed when it was drawn so often; `inf` or None for no limit.
        max_staleness: An item is removed when the learner is so many iterations past its `collect_iter`.
        min_sample_ratio: Items there must be, for each that is asked for.
        alpha, beta, anneal_step, eps: See `PriorityRule`.
        enable_track_used_data: Whether `used_data()` tells which `data_id`s nobody needs any more.
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
        self.replay_start_size = check_count("create a buffer", "replay_start_size", replay_start_size, 0)
        is_number = isinstance(min_sample_ratio, (int, float)) and not isinstance(min_sample_ratio, bool)
        if not is_number or not 0 <= min_sample_ratio < inf:
            raise UsageError("create a buffer", "", "min_sample_ratio >= 0", repr(min_sample_ratio))
        self.min_sample_ratio = float(min_sample_ratio)
        self.rule = PriorityRule(alpha, beta, anneal_step, eps)
        self._limits_given = (max_use, max_staleness)
        self._data = self._make_data(UsedData() if enable_track_used_data else None)

    @property
    def max_priority(self) -> float:
        """The largest priority so far, without eps; 1 at first."""
        return self._data.rows.max_priority

    @property
    def beta(self) -> float:
        """Exponent of the next draw's importance weights."""
        return self._data.rows.beta

    @property
    def num_dead_updates(self) -> int:
        """Updates so far of items that were gone."""
        return self._data.num_dead_updates

    def count(self) -> int:
        """Items that are neither overwritten nor removed."""
        return self._data.limits.num_valid

    @torch.no_grad()
    def extend_tensors(
        self, batch: Mapping[str, Any], priorities: Any = None, collect_iter: Any = None
    ) -> torch.Tensor:
        """Add many items at once.

        Args:
            batch: Nested mapping of `[n, *event]` tensors or arrays; copied.
            priorities: `[n]` or one number; None for the largest so far.
            collect_iter: `[n]` integers, or one for all; None if nobody knows.

        Returns:
            `[min(n, size)]` int64, the ids of those that stay.
        """
        if not isinstance(batch, Mapping):
            raise SchemaError("add a batch", "", "a mapping", type(batch).__name__)
        start_s, num_rows = time.perf_counter(), _leading_size(batch)
        with self._admitted(num_rows, is_push=True):
            read = self._data.read_batch(batch, priorities, collect_iter)
            ids = self._data.write(read)
        if self.monitor is not None:
            self.monitor.note_push(num_rows, time=time.perf_counter() - start_s, **self._push_values(read))
        return ids

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
            draw and the copies before it in the list), `staleness` (-1 if nobody knows) and `IS`, the
            importance weight in (0, 1]. None if there are not enough items, or the rate limiter refuses.
        """
        return super().sample(size, cur_learner_iter, sample_range, replace)

    def _has(self, size: int, iteration: int, sample_range: slice | None = None, replace: bool = False) -> bool:
        self._data.drop_stale(iteration)
        if size == 0:
            return True
        if sample_range is None:
            return self._is_enough(size, self.count()) and self._data.rows.total > 0
        slots = self._data.slots_in(sample_range)
        return self._is_enough(size, len(slots)) and self._data.rows.has_mass(slots)

    def _take(
        self, size: int, iteration: int, sample_range: slice | None = None, replace: bool = False
    ) -> list[dict[str, Any]] | None:
        start_s = time.perf_counter()
        drawn = self._draw(size, iteration, sample_range)
        if drawn is None or not size:
            return None if drawn is None else []
        slots = drawn.slots
        extra = {
            **self._ids_of(slots),
            "priority": self._data.rows.priorities.index_select(0, slots).tolist(),
            "use": self._data.uses_with(slots).tolist(),
            "staleness": self._data.limits.staleness(slots, iteration).tolist(),
            "IS": drawn.importance.tolist(),
        }
        found = self._store.items(slots, extra, self.output_device)
        self._finish(drawn, iteration, start_s)
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
        check_count("sample", "batch_size", batch_size, 1)
        check_iteration(cur_learner_iter)
        if self.rate_limiter is None:  # nothing to take back
            with self._lock:
                self._check_open("sample from")
                return self._take_tensors(batch_size, cur_learner_iter)
        try:
            with self._admitted(batch_size, is_push=False):
                return self._take_tensors(batch_size, cur_learner_iter)
        except RateLimitedError:
            expected, got = "draws that the rate limiter lets pass", f"a batch of {batch_size}"
            raise BufferEmptyError("sample from", repr(self.name), expected, got, "Add items first") from None

    def _take_tensors(self, batch_size: int, iteration: int) -> tuple[dict[str, Any], torch.Tensor, torch.Tensor]:
        start_s = time.perf_counter()
        drawn = self._draw(batch_size, iteration, None)
        if drawn is None:
            expected, got = f"items for a batch of {batch_size}", f"{self.count()} of {self.push_count} that were added"
            raise BufferEmptyError("sample from", repr(self.name), expected, got, "Add items first")
        ids = tensor_of(self._store.ids(drawn.places))
        batch = self._data.batch(drawn.slots, self.output_device)
        self._finish(drawn, iteration, start_s)
        weights = float32_tensor(drawn.importance)
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
            return self._data.update(*self._read_priorities(ids, priorities))

    def _read_priorities(self, ids: Any, priorities: Any) -> tuple[torch.Tensor, Any, float]:
        if type(ids) is torch.Tensor and ids.dtype is torch.int64 and ids.dim() == 1 and ids.device == self.device:
            return ids, *self._data.rows.checked_own(priorities, ids.shape[0])
        rows = torch.as_tensor(ids, device=self.device)
        if rows.dim() != 1 or (rows.shape[0] and (rows.is_floating_point() or rows.dtype is torch.bool)):
            raise UsageError("update priorities", "", "ids [n] of integers", f"{rows.dtype} {list(rows.shape)}")
        return rows.long(), *self._data.rows.checked_own(priorities, rows.shape[0])

    def used_data(self) -> UsedQueue:
        """Give the queue of `data_id`s that nobody needs any more; each comes once.

        Raises:
            UsageError: Not created with `enable_track_used_data`.
        """
        if self._data.used is None:
            raise UsageError("track used data", f"of {self.name!r}", "enable_track_used_data=True", "False")
        return self._data.used.queue

    def check_valid(self) -> tuple[bool, str]:
        """Check what must always hold: (whether it does, what does not)."""
        with self._lock:
            return self._data.check_valid()

    def _make_data(self, used: UsedData | None) -> PrioritizedStore:
        size = self.replay_buffer_size
        limits = RowLimits(size, *self._limits_given, self.device)
        return PrioritizedStore(self._store, PrioritizedRows(size, self.rule, self.device), limits, used)

    def _clear(self) -> None:
        self._data.clear()

    def _release(self) -> None:
        super()._release()
        self._data = self._make_data(self._data.used)

    def _read(self, items: Sequence[Any]) -> Push:
        return self._data.read_items([without_given(item) for item in items])

    def _write(self, read: Push) -> None:
        self._data.write(read)

    def _push_values(self, read: Push) -> dict[str, Any]:
        return {"priority": self.max_priority if read.priorities is None else read.priorities}

    def _is_enough(self, size: int, num_rows: int) -> bool:
        return num_rows >= self.min_sample_ratio * size and self.push_count >= self.replay_start_size

    def _draw(self, size: int, iteration: int, sample_range: slice | None) -> Draw | None:
        """Check and draw; None if there is not enough. Everything after this is certain to happen."""
        self._data.drop_stale(iteration)
        if size == 0:
            nothing = torch.empty(0, dtype=torch.int64, device=self.device)
            return Draw(nothing, own(nothing), own(nothing.double()))
        among = None if sample_range is None else self._data.slots_in(sample_range)
        if not self._is_enough(size, self.count() if among is None else len(among)):
            return None
        return self._data.draw(size, among, self.rng)

    def _finish(self, drawn: Draw, iteration: int, start_s: float) -> None:
        """Count the uses of what was drawn, and remove what was used up."""
        slots = drawn.slots
        if self.monitor is not None and len(slots):
            staleness = self._data.limits.staleness(slots, iteration)
            self.monitor.note_sample(
                len(slots),
                time=time.perf_counter() - start_s,
                use=self._data.uses_with(slots),
                priority=self._data.rows.priorities.index_select(0, slots),
                staleness=staleness[staleness >= 0],
            )
        self._data.use(slots)

    def _read_update(self, info: Mapping[str, Any]) -> tuple[Any, ...]:
        """Check an update; give what `_apply_update` takes."""
        if not isinstance(info, Mapping):
            raise UsageError("update", repr(self.name), "a mapping", type(info).__name__)
        rows = torch.tensor(self._rows_of(info.get(UNIQUE_ID)), dtype=torch.int64, device=self.device)
        priorities = info.get("priority")
        used = [checked_data_id(one) for one in listed(info.get("used_id"))]
        if priorities is None:
            return rows[:0], *self._data.rows.checked_own([], 0), used
        return rows, *self._data.rows.checked_own(priorities, len(rows)), used

    def _apply_update(self, read: tuple[Any, ...]) -> int:
        *update, used = read
        if self._data.used is not None:
            self._data.used.release(used)
        return self._data.update(*update)

    def _arguments(self) -> dict[str, Any]:
        rule, (max_use, max_staleness) = self.rule, self._limits_given
        return {
            **super()._arguments(),
            "replay_start_size": self.replay_start_size,
            "max_use": finite_or_none(max_use),
            "max_staleness": finite_or_none(max_staleness),
            "min_sample_ratio": self.min_sample_ratio,
            "alpha": rule.alpha,
            "beta": rule.beta,
            "anneal_step": rule.anneal_step,
            "eps": rule.eps,
            "enable_track_used_data": self._data.used is not None,
        }

    def _get_state(self) -> State:
        numbers, tensors = self._store_state(self._store)
        own_numbers, own_tensors = self._data.state()
        return State(self._arguments(), {**numbers, **own_numbers}, {**tensors, **own_tensors})

    def _prepare(self, numbers: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Callable[[], None]:
        store = self._checked_store(numbers, tensors, self.replay_buffer_size)
        data = self._data.checked_state(min(store[0], self.replay_buffer_size), numbers, tensors)

        def take_over() -> None:
            self._restore_counts(numbers, tensors)
            self._store.restore(*store)
            self._data.restore(data, numbers)

        return take_over


def _leading_size(batch: Mapping[str, Any]) -> int:
    """Say how many rows a batch has, before it is checked."""
    leaf: Any = batch
    while isinstance(leaf, Mapping):
        leaf = next(iter(leaf.values()), ())
    try:
        return len(leaf)
    except TypeError:
        return 0
