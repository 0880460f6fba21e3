"""Batches of a dataset, read ahead by a thread, with the state of what was delivered."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from storage.duplicates import Unique
from storage.errors import UsageError
from storage.prefetch import PipelinedDataCollector, PrefetchedItems

from .resume import Position, position_of, state_at
from .transition import Transition

if TYPE_CHECKING:
    from .rollout_dataset import RolloutDataset


class PrefetchedBatches(Unique):
    """Iterate over a dataset while a thread reads ahead; made by `RolloutDataset.prefetch`.

    Iteration continues where the dataset stands. While it goes on, the dataset belongs to the
    thread: do not read from it; a second iteration is refused (`UsageError`). After leaving the loop, or
    `close()`, the dataset is put back to what was delivered.
    """

    def __init__(self, dataset: RolloutDataset, num_batches: int = 2, device: torch.device | str | None = None) -> None:
        self.dataset = dataset
        self._delivered: Position | None = None
        self._items: PrefetchedItems[Any] | None = None
        target = torch.device(device) if device is not None else dataset.device
        self._collector: PipelinedDataCollector[Any] = PipelinedDataCollector(_Reader(dataset), target, num_batches)

    def __iter__(self) -> Iterator[Transition]:
        if self.dataset._lent_to is not None:
            advice = "Leave that loop or close() it, or make another dataset"
            raise UsageError("prefetch", "from a dataset", "no other thread that reads ahead of it", "one", advice)
        self.dataset._ensure_started()
        self._delivered = position_of(self.dataset)
        items = self._items = self.dataset._lent_to = iter(self._collector)
        try:
            for batch, position in items:
                self._delivered = position.value
                yield batch
        finally:
            self._end(items)

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands after the last delivered batch; see `RolloutDataset.state_dict`."""
        if self._delivered is None:
            return self.dataset.state_dict()
        return state_at(self.dataset, self._delivered)

    def close(self) -> None:
        """Stop reading ahead. Idempotent."""
        if self._items is not None:
            self._end(self._items)
        self._collector.close()

    def _end(self, items: PrefetchedItems[Any]) -> None:
        """End an iteration, unless it has ended and the dataset belongs to another one."""
        items.close()
        if self.dataset._lent_to is items:
            assert self._delivered is not None
            self.dataset._go_to(self._delivered)
            self.dataset._lent_to = None


class _Boxed:
    """Keeps a position from being looked into as if it were part of the batch."""

    def __init__(self, value: Position) -> None:
        self.value = value


class _Reader:
    """The dataset as (batch, position after it)."""

    def __init__(self, dataset: RolloutDataset) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[tuple[Transition, _Boxed]]:
        while True:
            try:
                batch = self.dataset.get_batch(self.dataset.num_transitions_per_env)
            except StopIteration:
                return
            yield batch, _Boxed(position_of(self.dataset))
            del batch
