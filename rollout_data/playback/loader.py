"""Prefetching of batches by a thread or worker processes. The state is that of delivered batches.

The process that receives the batches plans them and knows the position of the stream. It scans the
folders when a pass begins, after it has delivered all earlier batches. So the stream does not
depend on the number of prefetched batches. A thread reads the planned batches. Workers compute the
same plans and read them.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, IterableDataset, default_convert

from storage.core.arguments import whole
from storage.core.object_summary import Shown
from storage.core.random_indices import generator_on
from storage.core.threads import Owner, Unique
from storage.errors import BackgroundError, DatasetExhausted, RolloutDataError, UsageError
from storage.live.prefetch import PipelinedDataCollector, PrefetchedItems

from ..sources.processes.process_group import Board, ScanFolders
from ..sources.rows.cached_rows import CachedRows
from .passes import Undecided
from .rollout_stream import RolloutStream
from .step_planner import Plan, Position
from .transition import Transition

#: Prefix of the messages from the planning process to its workers.
_MESSAGE = "scan"
#: Returned by `next` at the end of an iterator.
_END = object()
#: Iterators over DataLoaders that a forked process has copied from its parent. A deleted iterator
#: stops its workers, which belong to the parent. So the copies are never deleted.
_of_parents: list[Any] = []


class PrefetchedBatches(Unique):
    """Iterable over a dataset that a thread prefetches; created by `RolloutDataset.prefetch`.

    An iteration starts at the position of the dataset, or with the next epoch if an epoch is over.
    Only the thread may read from the dataset during the iteration. A second iteration raises
    `UsageError`. The position of the dataset is after the last delivered batch.
    """

    def __init__(
        self, dataset: RolloutStream, num_batches: int = 2, device: torch.device | str | None = None
    ) -> None:
        self.dataset = dataset
        self._plans: deque[tuple[Plan, Position]] = deque()
        self._items: PrefetchedItems[Any] | None = None
        target = device if device is not None else dataset.device
        self._collector: PipelinedDataCollector[Any] = PipelinedDataCollector(
            self._read(), target, num_batches
        )

    def _read(self) -> Iterator[Any]:
        """Yield the planned batches in the thread, and None while no plan is waiting."""
        dataset = self.dataset
        while True:
            batch = None
            if self._plans:
                batch = dataset.read(
                    *self._plans.popleft(), without_time=dataset.num_transitions_per_env is None
                )
            yield batch.tensors() if batch is not None and dataset.as_dict else batch
            del batch

    def __iter__(self) -> Iterator[Transition]:
        dataset = self.dataset
        collector = self._collector
        dataset.wait_for_abandoned_reader()
        if dataset.prefetch_thread is not None:
            dataset.prefetch_thread.check()
            raise UsageError(
                "another thread already reads ahead of this dataset. Leave its loop, close() it "
                "or open another dataset."
            )
        if dataset.is_over():
            dataset.reset()
        steps = dataset.num_transitions_per_env or 1
        ahead = deque[Position]()
        self._plans.clear()
        collector.base_collector = self._read()
        items = iter(collector)
        self._items = items
        dataset.prefetch_thread = items
        try:
            while True:
                try:
                    while len(ahead) < collector.max_lag:
                        plan, position = dataset.plan_next(
                            steps, after=ahead[-1] if ahead else None
                        )
                        self._plans.append((plan, position))
                        ahead.append(position)
                except (Undecided, DatasetExhausted):
                    if not ahead:
                        return
                batch = next(items, _END)
                # The iterator ends only if `close` was called.
                if batch is _END:
                    return
                if batch is not None:
                    dataset.commit(ahead.popleft())
                    yield cast(Transition, batch)
        finally:
            # May run in the garbage collector, which must not wait for the thread.
            dataset.abandoned_reader = items.abandon()
            self._release_dataset(items)

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last delivered batch; see `RolloutDataset.state_dict`."""
        if self._items is not None:
            self._items.check()
        return self.dataset.state_dict()

    def close(self) -> None:
        """Stop prefetching. Idempotent."""
        self._collector.close()
        self._release_dataset(self._items)

    def _release_dataset(self, items: PrefetchedItems[Any] | None) -> None:
        """Allow other iterations over the dataset.

        Does nothing if the thread of `items` no longer reads it, for example after a newer iteration.
        """
        if self.dataset.prefetch_thread is items:
            self.dataset.prefetch_thread = None


class _WithLosses(IterableDataset[Any]):
    """Batches of a worker, each with the trajectories that became unreadable since the last."""

    def __init__(self, stream: RolloutStream) -> None:
        self.stream = stream

    def __iter__(self) -> Iterator[Any]:
        for batch in self.stream:
            losses = self.stream.losses
            self.stream.losses = []
            yield batch, losses


def _collated(collate: Callable[[Any], Any], item: tuple[Any, Any]) -> tuple[Any, Any]:
    return collate(item[0]), item[1]


class RolloutLoader(Shown):
    """Resumable loader that reads a dataset with worker processes. One iteration is one epoch.

    For any number of workers, the batches and their order are the same as of `iter(dataset)`, also
    beside live writers. The dataset's `problems` and `num_lost_trajectories` include the data that
    workers cannot read. Do not read from the dataset during an iteration. The position of the
    dataset is after the last delivered batch. With workers, an iteration raises `UsageError` after
    a newer iteration has begun. If a worker is killed, the iteration raises `BackgroundError` or
    torch's `RuntimeError`. `state_dict()` is then still the state after the last delivered batch.

    Args:
        dataset: A `RolloutDataset`.
        num_workers: Number of worker processes; 0: this process reads.
        **options: For `torch.utils.data.DataLoader`: `prefetch_factor`, `multiprocessing_context`,
            `pin_memory` ...
    """

    def __init__(self, dataset: RolloutStream, num_workers: int = 0, **options: Any) -> None:
        if not isinstance(dataset, RolloutStream):
            raise UsageError(
                f"dataset must be a RolloutDataset, got {type(dataset).__name__}. "
                "Use WindowLoader for windows."
            )
        self.dataset = dataset
        self.num_workers = whole("num_workers", num_workers, 0)
        # A DataLoader without a generator would draw from torch's global generator.
        self._options = {"generator": generator_on(None), **options}
        dataset.is_for_workers |= self.num_workers > 0

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch; see `RolloutDataset.set_epoch`."""
        self.dataset.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last delivered batch; see `RolloutDataset.state_dict`."""
        return self.dataset.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a `state_dict`, with any number of workers and ranks."""
        self.dataset.load_state_dict(state)

    def __iter__(self) -> Iterator[Transition]:
        stream = iter(self.dataset)
        yield from stream if self.num_workers == 0 else self._read()

    def _read(self) -> Iterator[Any]:
        """Yield the batches of worker processes. This process sends them the results of its scans."""
        dataset = self.dataset
        agree = dataset.agree
        board = Board()

        def agree_and_send(number: int | str, scan: ScanFolders) -> Any:
            """Get the result of a scan from the process that scans, and send it to the workers."""
            result = agree(number, scan)
            board.write(f"{_MESSAGE}_{number}", (result, None))
            return result

        readers = copy.deepcopy(dataset)
        readers.follow(dataset.state_dict(), partial(board.agree, _MESSAGE, loader_scans=True))
        pass_order = dataset.position.pass_order
        last_scan = (dataset.source.listing(), 0, dataset.source.shared(dataset.source.snapshot()))
        board.write(f"{_MESSAGE}_{pass_order.turn}", (last_scan, None))
        if isinstance(pass_order.source, CachedRows):
            board.write(f"{_MESSAGE}_frames_{pass_order.turn}", (pass_order.source.shared(), None))
        options = {
            **self._options,
            "collate_fn": partial(_collated, self._options.get("collate_fn") or default_convert),
        }
        batches = iter(
            DataLoader(
                _WithLosses(readers), batch_size=None, num_workers=self.num_workers, **options
            )
        )
        dataset.agree = agree_and_send
        owner = Owner("an iteration over a loader")
        try:
            while (position := dataset.next_position()) is not None:
                batch, losses = self._next(batches)
                for loss in losses:
                    dataset.source.note_loss(dataset.position.pass_order.source, *loss)
                dataset.commit(position)
                dataset.release(position)
                yield batch
                owner.check()
                if dataset.agree is not agree_and_send:
                    raise UsageError(
                        "this iteration ended, since a newer iteration over the loader has begun. "
                        "Iterate once at a time."
                    )
        finally:
            if dataset.agree is agree_and_send:
                dataset.agree = agree
            if owner.is_own:
                board.end()
            else:
                _of_parents.append(batches)
            del batches

    def _next(self, batches: Iterator[Any]) -> Any:
        try:
            return next(batches)
        except (OSError, EOFError, RuntimeError) as cause:
            # torch adds "Caught " to errors that were raised in a worker. The worker is alive then.
            if str(cause).startswith("Caught ") or isinstance(cause, RolloutDataError):
                raise
            raise BackgroundError(
                f"a worker that reads {str(self.dataset.data_dir)!r} has died: {cause}. "
                "Call load_state_dict(state_dict()) to resume with the next batch."
            ) from cause


loader = RolloutLoader
