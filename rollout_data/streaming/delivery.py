"""Batches that a thread or worker processes read, with the state of what was delivered.

One rule: the process that takes the batches knows where the stream stands, and looks at the folders when a pass begins;
threads and workers plan the same, and read.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, default_convert

from storage.core.arguments import whole
from storage.core.threads import Unique
from storage.errors import UsageError
from storage.live.prefetch import PipelinedDataCollector, PrefetchedItems

from ..index.agreement import Board, Deferred, Look, Undecided
from .resume import Position
from .stream import RolloutStream

_TOLD = "told"


class PrefetchedBatches(Unique):
    """Iterate over a dataset while a thread reads ahead; made by `RolloutDataset.prefetch`.

    Iteration continues where the dataset stands; where its epoch is over, it begins the next one. While it goes on,
    the dataset belongs to the thread: do not read from it; a second iteration is refused (`UsageError`). After leaving
    the loop, or `close()`, the dataset is put back to what was delivered.
    """

    def __init__(self, dataset: RolloutStream, num_batches: int = 2, device: torch.device | str | None = None) -> None:
        self.dataset = dataset
        self._delivered: Position | None = None
        self._items: PrefetchedItems[Any] | None = None
        target = torch.device(device) if device is not None else dataset.device
        self._reader = _Reader(dataset)
        self._collector: PipelinedDataCollector[Any] = PipelinedDataCollector(self._reader, target, num_batches)

    def __iter__(self) -> Iterator[Any]:
        if self.dataset.lent_to is not None:
            self.dataset.lent_to.check()
            advice = "Leave that loop or close() it, or make another dataset"
            raise UsageError("prefetch", "from a dataset", "no other thread that reads ahead of it", "one", advice)
        if self.dataset.is_over():
            self.dataset.reset()
        self._delivered = self.dataset.position
        self._reader.begin()
        items = self._items = self.dataset.lent_to = iter(self._collector)
        try:
            with items:
                for batch, position in items:
                    if isinstance(batch, Undecided):
                        self._reader.decide(batch)
                    if position is None:
                        continue
                    self._delivered = position.value
                    yield batch
        finally:
            self._put_back(items)

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands after the last delivered batch; see `RolloutDataset.state_dict`."""
        if self._delivered is None:
            return self.dataset.state_dict()
        return self.dataset.state_at(self._delivered)

    def close(self) -> None:
        """Stop reading ahead. Idempotent."""
        self._collector.close()
        if self._items is not None:
            self._put_back(self._items)

    def _put_back(self, items: PrefetchedItems[Any]) -> None:
        """Put the dataset back to what was delivered, unless it belongs to another iteration."""
        if self.dataset.lent_to is not items:
            return
        assert self._delivered is not None
        self.dataset.agree = self._reader.deferred.agree
        self.dataset.go_to(self._delivered)
        self.dataset.lent_to = None


class _Boxed:
    """Keeps a position from being looked into as if it were part of the batch."""

    def __init__(self, value: Position) -> None:
        self.value = value


class _Reader:
    """The dataset as (batch, position after it); at the begin of a pass a question, then Nones.

    Only the thread that takes the batches looks at the folders: when all batches before were delivered, so that the
    stream does not depend on how far it was read ahead; and ranks agree there by a collective call.
    """

    def __init__(self, dataset: RolloutStream) -> None:
        self.dataset = dataset

    def begin(self) -> None:
        """Be ready for an iteration."""
        self._has_asked = False
        self.deferred = self.dataset.agree = Deferred(self.dataset.agree)

    def decide(self, wanted: Undecided) -> None:
        """Answer the thread."""
        self.deferred.decide(wanted)
        self._has_asked = False

    def __iter__(self) -> Iterator[tuple[Any, _Boxed | None]]:
        while True:
            try:
                batch = self.dataset.get_batch(self.dataset.num_transitions_per_env)
            except StopIteration:
                return
            except Undecided as wanted:
                self._has_asked = True
                yield wanted, None
                while self._has_asked:
                    yield None, None
                continue
            yield batch, _Boxed(self.dataset.position)
            del batch


class _WithLosses(IterableDataset[Any]):
    """What a worker reads: batches, and what could not be read since the one before."""

    def __init__(self, stream: RolloutStream) -> None:
        self.stream = stream

    def __iter__(self) -> Iterator[Any]:
        for batch in self.stream:
            yield batch, self.stream.take_losses()


def _collated(collate: Callable[[Any], Any], item: tuple[Any, Any]) -> tuple[Any, Any]:
    return collate(item[0]), item[1]


class RolloutLoader:
    """Read a dataset with worker processes, and know where it stands; one iteration is one epoch.

    The batches are those of `iter(dataset)`, in that order, for any number of workers, also beside live writers.
    What workers could not read is in the dataset's `problems` and `num_lost_trajectories`, as if it had read itself.
    Do not read from the dataset while an iteration goes on; then it stands behind the last batch that was delivered.
    With workers, going on with an iteration after a newer one was begun raises `UsageError`.

    Args:
        dataset: A `RolloutDataset`.
        num_workers: Worker processes; 0 reads in this one.
        **options: Of `torch.utils.data.DataLoader`: `prefetch_factor`, `multiprocessing_context`, `pin_memory` ...
    """

    def __init__(self, dataset: RolloutStream, num_workers: int = 0, **options: Any) -> None:
        self.dataset, self.num_workers = dataset, whole("open the dataset", "num_workers", num_workers, 0)
        self._options = options

    def set_epoch(self, epoch: int) -> None:
        """Choose the number of the next epoch; see `RolloutDataset.set_epoch`."""
        self.dataset.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands after the last batch that was delivered; see `RolloutDataset.state_dict`."""
        return self.dataset.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken, by this or any other number of workers and ranks."""
        self.dataset.load_state_dict(state)

    def __iter__(self) -> Iterator[Any]:
        stream = iter(self.dataset)
        yield from stream if self.num_workers == 0 else self._read()

    def _read(self) -> Iterator[Any]:
        dataset, agree, board = self.dataset, self.dataset.agree, Board()

        def tell(number: int, look: Look) -> Any:
            seen = agree(number, look)
            board.write(f"{_TOLD}_{number}", (seen, None))
            return seen

        readers = copy.deepcopy(dataset)
        readers.follow(dataset.state_dict(), board.agree(_TOLD, is_told=True))
        dataset.agree = tell
        board.write(f"{_TOLD}_{dataset.position.deal.number}", (dataset.source.sight(), None))
        options = {
            **self._options,
            "collate_fn": partial(_collated, self._options.get("collate_fn") or default_convert),
        }
        batches = iter(DataLoader(_WithLosses(readers), batch_size=None, num_workers=self.num_workers, **options))
        try:
            while (position := dataset.next_position()) is not None:
                batch, losses = next(batches)
                for loss in losses:
                    dataset.lose(*loss)
                dataset.commit(position)
                yield batch
                if dataset.agree is not tell:
                    raise UsageError("go on with an iteration", "over a loader", "one at a time", "a newer one")
        finally:
            if dataset.agree is tell:
                dataset.agree = agree
            board.end()
            del batches


loader = RolloutLoader
