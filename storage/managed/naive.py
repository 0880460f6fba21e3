"""`NaiveReplayBuffer`: the last items, each as likely as any other.

One rule: a sample without replacement names no item twice; a range counts by age, not by slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .buffer import ManagedBuffer
from .ids import without_given
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

    def read(self, items: Sequence[Any]) -> Items:
        return self._store.read_items([without_given(item) for item in items])

    def write(self, read: Items) -> None:
        self._store.write(read)

    def _items_at(self, ages: torch.Tensor) -> list[Any]:
        ids = self._store.oldest + ages
        slots = self._store.slots(ids)
        return self._store.items(slots, self._ids_of(ids, slots), self.output_device)
