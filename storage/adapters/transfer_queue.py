"""`TransferQueueBuffer`: buffer of rows in TransferQueue, a distributed store for Ray.

TransferQueue stores the rows and sends them between machines. All clients of a partition share its
rows. Each row has a key, and each field is a column, so that other clients can read and write
single fields. Levels of field names are joined by "/". To sample on the machine that stores the
rows, use `storage.remote.RemoteBuffer`.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

import torch

from ..core import arguments
from ..core.fields import flatten, unflatten
from ..core.memory import as_given
from ..core.random_indices import generator_on, uniform
from ..errors import BufferEmptyError


class TransferQueueBuffer:
    """Buffer of the rows in one partition of TransferQueue, to which all clients may add.

    Args:
        partition: Name of the partition.
        seed: Seed of the draws of this client. None uses `torch.initial_seed()` and the number of
            objects created since that seed changed.

    The constructor calls `transfer_queue.init()`, which connects to the queue of this process's Ray
    cluster. If there is no queue, it starts one, and waits until the cluster has a processor for
    each actor of the queue.
    """

    def __init__(self, partition: str, seed: int | None = None) -> None:
        import transfer_queue

        self.partition = partition
        self._rng = generator_on(seed)
        self._queue = transfer_queue
        self._collector = secrets.token_hex(8)
        self._num_added = 0
        self._queue.init()

    def __len__(self) -> int:
        return len(self._keys())

    def extend(self, rows: Mapping[str, Any]) -> None:
        """Add a nested mapping of `[n, *event]` tensors or arrays."""
        from tensordict import TensorDict

        columns = {name: as_given(leaf) for name, leaf in flatten(rows).items()}
        first = self._num_added
        num_rows = len(next(iter(columns.values())))
        keys = [f"{self._collector}_{number}" for number in range(first, first + num_rows)]
        self._queue.kv_batch_put(keys, self.partition, TensorDict(columns, [num_rows]))
        self._num_added += num_rows

    def sample(self, batch_size: int) -> dict[str, Any]:
        """Draw rows uniformly with replacement: a nested dict of new `[batch_size, ...]` leaves."""
        keys = self._keys()
        size = arguments.whole("batch_size", batch_size, 1)
        if not keys:
            raise BufferEmptyError(f"partition {self.partition!r} is empty.")
        drawn, rows = torch.unique(uniform(len(keys), size, self._rng), return_inverse=True)
        received = self._queue.kv_batch_get(
            [keys[number] for number in drawn.tolist()], self.partition
        )
        return unflatten(
            {name: torch.stack(leaf.unbind())[rows] for name, leaf in received.items()}
        )

    def clear(self) -> None:
        """Delete the rows of all clients."""
        if keys := self._keys():
            self._queue.kv_clear(keys, self.partition)

    def _keys(self) -> list[str]:
        return list(self._queue.kv_list(self.partition).get(self.partition, ()))
