"""`NaiveReplayBuffer`: the last items, each as likely as any other.

One rule: a sample without replacement names no item twice; a range counts by age, not by slot.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..core.samplers import distinct, uniform
from ..saving.store import State
from .buffer import ManagedBuffer
from .item_ids import without_given
from .items import Items


class NaiveReplayBuffer(ManagedBuffer):
    """The last `replay_buffer_size` items, drawn uniformly.

    Args:
        replay_buffer_size: Items that fit.
        deepcopy: Has no effect: items are always copied in and out. Kept for callers that pass it.
        **options: As for `ManagedBuffer`: `name`, `device`, `output_device`, `generator`, `monitor`,
            `rate_limiter`.

    An item is a nested mapping. Its tensors and arrays are kept in columns, whose shapes and dtypes the
    first item fixes; other leaves are copied as they are. `sample` gives items, or None; they bring `replay_unique_id`
    (`<name>_<row>`) and `replay_buffer_idx` (the slot).
    """

    def __init__(self, replay_buffer_size: int, deepcopy: bool = False, **options: Any) -> None:
        super().__init__(replay_buffer_size, **options)

    def _take(
        self, size: int, iteration: int, sample_range: slice | None = None, replace: bool = False
    ) -> list[dict[str, Any]] | None:
        start_s, ages = time.perf_counter(), range(self.count())[sample_range or slice(None)]
        place = draw_places(len(ages), size, replace, self.rng)
        if place is None or not size:
            return None if place is None else []
        slots = (self._store.oldest + ages.start + place * ages.step) % self.replay_buffer_size
        found = self._store.items(slots, self._ids_of(slots), self.output_device)
        if self.monitor is not None:
            self.monitor.note_sample(size, time=time.perf_counter() - start_s)
        return found

    def _read(self, items: Sequence[Any]) -> Items:
        return self._store.read_items([without_given(item) for item in items])

    def _write(self, read: Items) -> None:
        self._store.write(read)

    def _get_state(self) -> State:
        return State(self._arguments(), *self._store_state(self._store))

    def _prepare(self, numbers: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Callable[[], None]:
        checked = self._checked_store(numbers, tensors, self.replay_buffer_size)

        def take_over() -> None:
            self._restore_counts(numbers, tensors)
            self._store.restore(*checked)

        return take_over


def draw_places(num_rows: int, size: int, replace: bool, generator: torch.Generator) -> torch.Tensor | None:
    """Draw `size` of `num_rows` places uniformly: `[size]` int64; None if there are not enough."""
    if size == 0:
        return torch.empty(0, dtype=torch.int64, device=generator.device)
    if num_rows < (1 if replace else size):
        return None
    return uniform(num_rows, size, generator) if replace else distinct(num_rows, size, generator)
