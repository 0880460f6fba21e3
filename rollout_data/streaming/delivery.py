"""RolloutLoader: batches of a `RolloutDataset`, read by worker processes, with the state of what was delivered.

One rule: this process plans every batch as it delivers it, so that it knows where the stream stands, and looks at the
folders when a pass begins; its workers plan the same, and read.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader

from storage.core.arguments import whole
from storage.errors import UsageError

from ..index.agreement import Board, Look
from .rollout_dataset import RolloutDataset

_TOLD = "told"


class RolloutLoader:
    """Read a dataset with worker processes, and know where it stands; one iteration is one epoch.

    The batches are those of `iter(dataset)`, in that order, for any number of workers, also beside live writers.
    Do not read from the dataset while an iteration goes on; then it stands behind the last batch that was delivered.
    With workers, going on with an iteration after a newer one was begun raises `UsageError`.

    Args:
        dataset: What to read.
        num_workers: Worker processes; 0 reads in this one.
        **options: Of `torch.utils.data.DataLoader`: `prefetch_factor`, `multiprocessing_context`, `pin_memory` ...
    """

    def __init__(self, dataset: RolloutDataset, num_workers: int = 0, **options: Any) -> None:
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
        batches = iter(DataLoader(readers, batch_size=None, num_workers=self.num_workers, **self._options))
        try:
            while (position := dataset.next_position()) is not None:
                batch = next(batches)
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
