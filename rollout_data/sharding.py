"""Which share of the trajectories this process delivers: the only place that asks.

One rule: ranks and DataLoader workers together are one list of shards; shards are disjoint and
complete because each takes every n-th trajectory of an order that all of them compute alike.
"""

from __future__ import annotations

import operator
from typing import Any, Literal, NamedTuple

import torch
from torch.utils.data import get_worker_info

from storage.errors import UsageError
from storage.modes import lasting

#: "auto" asks torch.distributed, "none" reads everything in each process, (rank, world size) says it outright.
ShardChoice = Literal["auto", "none"] | tuple[int, int]


class Shard(NamedTuple):
    """Number `number` of `total` shards."""

    number: int
    total: int


def checked_shard(value: Any) -> Shard | None:
    """Check a `shard` argument; None stands for "auto"."""
    if isinstance(value, str) and value in ("auto", "none"):
        return None if value == "auto" else Shard(0, 1)
    try:
        shard = None if isinstance(value, str) else Shard(*map(operator.index, value))
    except TypeError:
        shard = None
    if shard is None or not 0 <= shard.number < shard.total:
        expected = "shard 'auto', 'none' or (rank, world size) with 0 <= rank < world size"
        raise UsageError("share the data out", "", expected, repr(value))
    return shard


def current_shard(chosen: Shard | None = None) -> Shard:
    """Give the shard of this rank (`chosen`, or else torch.distributed, if initialized) and DataLoader worker."""
    rank, world_size = (0, 1) if chosen is None else chosen
    if chosen is None and torch.distributed.is_available() and torch.distributed.is_initialized():
        rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    worker = get_worker_info()
    if worker is None:
        return Shard(rank, world_size)
    return Shard(rank * worker.num_workers + worker.id, world_size * worker.num_workers)


class FirstEpoch:
    """Remembers the epoch of DataLoader workers that asked first, in all processes that were made from this one.

    Workers that go with their epoch tell nobody what they have done; so the first ones leave word.
    """

    @lasting
    def __init__(self) -> None:
        self._number = torch.zeros(1, dtype=torch.int64, device="cpu").share_memory_()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._number.share_memory_()  # a copy's own; in spawned workers it is shared already

    def is_now(self) -> bool:
        """Tell whether nobody has asked in another epoch. Outside of workers there is one epoch."""
        worker = get_worker_info()
        epoch = 0 if worker is None else (worker.seed - worker.id) % (1 << 62) + 1
        taken = int(self._number[0])
        if taken == 0:
            self._number[0] = epoch
        return taken in (0, epoch)


def is_in_worker() -> bool:
    """True inside a DataLoader worker process, where CUDA must not be touched."""
    return get_worker_info() is not None
