"""WindowLoader: shuffled batches of windows, read ahead by a thread of this process.

One rule: the order is a function of (seed, epoch), so that where a loader stands is two integers: the epoch and
the number of batches that were delivered.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from storage.errors import RolloutDataWarning, UsageError
from storage.prefetch import PipelinedDataCollector

from .dataset_arguments import whole
from .index import Int64s
from .sharding import current_shard
from .window_batch import collate_windows
from .window_dataset import WindowDataset
from .window_mixture import WindowMixture

_VERSION = 1


class WindowLoader:
    """Iterate over the windows of a dataset in batches; one iteration is one epoch.

    A gather takes less time than handing its result from a worker process over, so a thread reads ahead instead.
    Leaving an iteration and beginning another one goes on with the same epoch; going on with the old one as well
    raises, so `zip(loader, loader)` does. Ranks of torch.distributed share an epoch: disjoint and complete.

    Args:
        dataset: A `WindowDataset`, or a `WindowMixture`, whose epochs are draws with replacement, by weight.
        batch_size: B.
        shuffle: A new permutation for each (seed, epoch); False goes through the windows in order.
        seed: See above.
        drop_last: Leave out a last batch of less than B windows.
        device: Where batches are delivered.
        num_ahead: Batches that are read ahead.

    A loader whose epochs have no batch warns (`RolloutDataWarning`), unless its dataset has no window and did.

    Raises:
        UsageError: An argument is wrong; an iteration goes on after another one was begun.
    """

    def __init__(
        self,
        dataset: WindowDataset | WindowMixture,
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        device: torch.device | str = "cpu",
        num_ahead: int = 2,
    ) -> None:
        self.dataset, self.batch_size = dataset, whole("batch_size", batch_size, 1)
        self.shuffle, self.seed, self.drop_last = bool(shuffle), whole("seed", seed, 0), bool(drop_last)
        self.device, self.num_ahead = torch.device(device), whole("num_ahead", num_ahead, 1)
        self._epoch = self._num_delivered = 0
        if len(dataset) and not len(self):
            shard = current_shard()
            share = f"rank {shard.number} of {shard.total} has" if shard.total > 1 else "there are"
            about = f"batch_size {self.batch_size}, drop_last {self.drop_last}"
            text = f"a WindowLoader has no batch: {share} too few of {len(dataset)} windows ({about})"
            warnings.warn(text, RolloutDataWarning, stacklevel=2)
        #: Counts iterations that were begun and jumps: an iteration from before is over.
        self._turn = 0

    @property
    def epoch(self) -> int:
        """The epoch that the next batch belongs to."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch."""
        self._epoch, self._num_delivered = whole("epoch", epoch, 0), 0
        self._turn += 1

    def __len__(self) -> int:
        """Count the batches of an epoch of this rank."""
        shard = current_shard()
        num_windows = len(range(shard.number, len(self.dataset), shard.total))
        return num_windows // self.batch_size if self.drop_last else -(-num_windows // self.batch_size)

    def order(self, epoch: int) -> Int64s:
        """Give the windows of an epoch of this rank in order, int64."""
        shard, size = current_shard(), len(self.dataset)
        if not self.shuffle:
            order = np.arange(size)
        else:
            generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([self.seed, epoch])))
            if isinstance(self.dataset, WindowMixture):
                order = self.dataset.draw(size, generator)
            else:
                order = generator.permutation(size)
        return order[shard.number :: shard.total]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        epoch, num_batches = self._epoch, len(self)
        self._turn += 1
        turn = self._turn
        batches = _Batches(self.dataset, self.order(epoch), self.batch_size, self._num_delivered, num_batches)
        items = iter(PipelinedDataCollector(batches, self.device, self.num_ahead))
        try:
            for batch in items:
                self._num_delivered += 1
                yield batch
                del batch
                if self._turn != turn:
                    got = "another one that was begun since, or a loader that was set to another place"
                    raise UsageError("go on with an iteration", "over a WindowLoader", "one at a time", got)
            self._epoch, self._num_delivered = epoch + 1, 0
        finally:
            items.close()

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands after the last batch that was delivered: plain integers."""
        return {"version": _VERSION, "epoch": self._epoch, "num_delivered": self._num_delivered, **self._settings()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken: the next batches are the same.

        Raises:
            UsageError: The state belongs to other windows, another order or another share of them.
        """
        for name, value in {"version": _VERSION, **self._settings()}.items():
            if state.get(name) != value:
                raise UsageError("resume the loader", "", f"{name} = {value}", repr(state.get(name)))
        self._epoch = whole("epoch", state["epoch"], 0)
        self._num_delivered = whole("num_delivered", state["num_delivered"], 0)
        self._turn += 1

    def _settings(self) -> dict[str, Any]:
        shard = current_shard()
        return {
            "num_windows": len(self.dataset),
            "batch_size": self.batch_size,
            "shuffle": self.shuffle,
            "seed": self.seed,
            "drop_last": self.drop_last,
            "rank": shard.number,
            "world_size": shard.total,
        }


class _Batches:
    """The batches `start` to `stop` of an order."""

    def __init__(
        self, dataset: WindowDataset | WindowMixture, order: Int64s, batch_size: int, start: int, stop: int
    ) -> None:
        self._dataset, self._order, self._batch_size = dataset, order, batch_size
        self._range = range(start, stop)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for number in self._range:
            first = number * self._batch_size
            yield collate_windows(self._dataset.__getitems__(self._order[first : first + self._batch_size]))
