"""Batches that a thread or worker processes read, with the state of what was delivered.

One rule: the process that takes the batches plans them, knows where the stream stands, and looks at the folders when a
pass begins and all batches before were delivered, so that the stream does not depend on how far it was read ahead. A
thread reads what was planned; workers plan the same, and read.
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

from ..sources.cached_frames import CachedFrames
from ..sources.process_group import Board, Look
from .passes import Undecided
from .rollout_stream import RolloutStream
from .step_planner import Plan, Position
from .transition import Transition

_TOLD, _END = "told", object()
#: Iterations of the process from which this one was forked: to end them would end its workers.
_of_parents: list[Any] = []


class PrefetchedBatches(Unique):
    """Iterate over a dataset while a thread reads ahead; made by `RolloutDataset.prefetch`.

    Iteration continues where the dataset stands; where its epoch is over, it begins the next one. While it goes on,
    the dataset belongs to the thread: do not read from it; a second iteration is refused (`UsageError`). The dataset
    stands behind the last batch that was delivered.
    """

    def __init__(self, dataset: RolloutStream, num_batches: int = 2, device: torch.device | str | None = None) -> None:
        self.dataset = dataset
        self._plans: deque[tuple[Plan, Position]] = deque()
        self._items: PrefetchedItems[Any] | None = None
        target = device if device is not None else dataset.device
        self._collector: PipelinedDataCollector[Any] = PipelinedDataCollector(self._read(), target, num_batches)

    def _read(self) -> Iterator[Any]:
        """Read what was planned, in the thread; None where nothing is."""
        dataset = self.dataset
        while True:
            batch = None
            if self._plans:
                batch = dataset.read(*self._plans.popleft(), without_time=dataset.num_transitions_per_env is None)
            yield batch.tensors() if batch is not None and dataset.as_dict else batch
            del batch

    def __iter__(self) -> Iterator[Transition]:
        dataset = self.dataset
        collector = self._collector
        dataset.wait_for_left_reader()
        if dataset.lent_to is not None:
            dataset.lent_to.check()
            advice = "Leave that loop or close() it, or make another dataset"
            raise UsageError("prefetch", "from a dataset", "no other thread that reads ahead of it", "one", advice)
        if dataset.is_over():
            dataset.reset()
        steps = dataset.num_transitions_per_env or 1
        ahead = deque[Position]()
        self._plans.clear()
        collector.base_collector = self._read()
        items = self._items = dataset.lent_to = iter(collector)
        try:
            while True:
                try:
                    while len(ahead) < collector.max_lag:
                        plan, position = dataset.plan_next(steps, after=ahead[-1] if ahead else None)
                        self._plans.append((plan, position))
                        ahead.append(position)
                except (Undecided, DatasetExhausted):
                    if not ahead:
                        return
                if (batch := next(items, _END)) is _END:  # it was closed
                    return
                if batch is not None:
                    dataset.commit(ahead.popleft())
                    yield cast(Transition, batch)
        finally:  # perhaps called by the garbage collector, which must not wait for the thread
            dataset.left_reader = items.abandon()
            self._give_back(items)

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands after the last delivered batch; see `RolloutDataset.state_dict`."""
        if self._items is not None:
            self._items.check()
        return self.dataset.state_dict()

    def close(self) -> None:
        """Stop reading ahead. Idempotent."""
        self._collector.close()
        self._give_back(self._items)

    def _give_back(self, items: PrefetchedItems[Any] | None) -> None:
        """Let the dataset be read by others, unless they do already."""
        if self.dataset.lent_to is items:
            self.dataset.lent_to = None


class _WithLosses(IterableDataset[Any]):
    """What a worker reads: batches, and what could not be read since the one before."""

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
    """Read a dataset with worker processes, and know where it stands; one iteration is one epoch.

    The batches are those of `iter(dataset)`, in that order, for any number of workers, also beside live writers.
    What workers could not read is in the dataset's `problems` and `num_lost_trajectories`, as if it had read itself.
    Do not read from the dataset while an iteration goes on; then it stands behind the last batch that was delivered.
    With workers, going on with an iteration after a newer one was begun raises `UsageError`. A worker that is killed
    ends it with a `RuntimeError`: `BackgroundError`, or torch's, which may come at any time; a state then goes on with
    the next batch.

    Args:
        dataset: A `RolloutDataset`.
        num_workers: Worker processes; 0 reads in this one.
        **options: Of `torch.utils.data.DataLoader`: `prefetch_factor`, `multiprocessing_context`, `pin_memory` ...
    """

    def __init__(self, dataset: RolloutStream, num_workers: int = 0, **options: Any) -> None:
        action = "call rollout_data.loader"
        if not isinstance(dataset, RolloutStream):
            advice = "WindowLoader reads windows"
            raise UsageError(action, "", "dataset as a RolloutDataset", type(dataset).__name__, advice)
        self.dataset = dataset
        self.num_workers = whole(action, "num_workers", num_workers, 0)
        # A DataLoader without a generator draws from torch's own.
        self._options = {"generator": generator_on(None), **options}
        dataset.is_for_workers |= self.num_workers > 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the number of the next epoch; see `RolloutDataset.set_epoch`."""
        self.dataset.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands after the last batch that was delivered; see `RolloutDataset.state_dict`."""
        return self.dataset.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken, by this or any other number of workers and ranks."""
        self.dataset.load_state_dict(state)

    def __iter__(self) -> Iterator[Transition]:
        stream = iter(self.dataset)
        yield from stream if self.num_workers == 0 else self._read()

    def _read(self) -> Iterator[Any]:
        dataset, agree, board = self.dataset, self.dataset.agree, Board()

        def tell(number: int | str, look: Look) -> Any:
            seen = agree(number, look)
            board.write(f"{_TOLD}_{number}", (seen, None))
            return seen

        readers = copy.deepcopy(dataset)
        readers.follow(dataset.state_dict(), partial(board.agree, _TOLD, is_told=True))
        begun = dataset.position.deal
        seen = dataset.source.listing(), 0, dataset.source.shared(dataset.source.snapshot())
        board.write(f"{_TOLD}_{begun.turn}", (seen, None))
        if isinstance(begun.source, CachedFrames):
            board.write(f"{_TOLD}_frames_{begun.turn}", (begun.source.shared(), None))
        options = {
            **self._options,
            "collate_fn": partial(_collated, self._options.get("collate_fn") or default_convert),
        }
        batches = iter(DataLoader(_WithLosses(readers), batch_size=None, num_workers=self.num_workers, **options))
        dataset.agree, owner = tell, Owner("an iteration over a loader")
        try:
            while (position := dataset.next_position()) is not None:
                batch, losses = self._next(batches)
                for loss in losses:
                    dataset.source.note_loss(dataset.position.deal.source, *loss)
                dataset.commit(position)
                dataset.release(position)
                yield batch
                owner.check()
                if dataset.agree is not tell:
                    raise UsageError("go on with an iteration", "over a loader", "one at a time", "a newer one")
        finally:
            if dataset.agree is tell:
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
            if str(cause).startswith("Caught ") or isinstance(cause, RolloutDataError):  # of a worker that lives
                raise
            where = f"of {self.dataset.data_dir!r}"
            advice = "load_state_dict(state_dict()) goes on with the next batch"
            raise BackgroundError("read a batch", where, "living workers", str(cause), advice) from cause


loader = RolloutLoader
