"""Who reads what: the rank of this process, and the DataLoader worker in it: the only place that asks.

One rule: the rank is asked in the process that trains and travels with the dataset from there; a worker process that
was not forked has no process group, and would take itself for rank 0 of 1.
"""

from __future__ import annotations

import operator
from typing import Any, Literal, NamedTuple

import torch
from torch.utils.data import get_worker_info

from storage.errors import UsageError

#: "auto" asks torch.distributed, "none" reads everything in each process, (rank, world size) says it outright.
ShardChoice = Literal["auto", "none"] | tuple[int, int]


class Shard(NamedTuple):
    """Number `number` of `total` shares."""

    number: int
    total: int

    def part_of(self, size: int) -> slice:
        """Give the share of `size` things in a row: all shares together are all of them, each once."""
        return slice(self.number * size // self.total, (self.number + 1) * size // self.total)


ALONE = Shard(0, 1)


def checked_shard(value: Any) -> Shard | None:
    """Check a `shard` argument; None stands for "auto"."""
    if isinstance(value, str) and value in ("auto", "none"):
        return None if value == "auto" else ALONE
    try:
        shard = None if isinstance(value, str) else Shard(*map(operator.index, value))
    except TypeError:
        shard = None
    if shard is None or not 0 <= shard.number < shard.total:
        expected = "shard 'auto', 'none' or (rank, world size) with 0 <= rank < world size"
        raise UsageError("share the data out", "", expected, repr(value))
    return shard


def current_shard(chosen: Shard | None = None) -> Shard:
    """Give the share that was `chosen`, or else that of this rank (torch.distributed, if initialized)."""
    if chosen is not None:
        return chosen
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return Shard(torch.distributed.get_rank(), torch.distributed.get_world_size())
    return ALONE


def current_worker() -> Shard:
    """Give the number of this DataLoader worker among those of its loader; 0 of 1 outside of workers."""
    worker = get_worker_info()
    return ALONE if worker is None else Shard(worker.id, worker.num_workers)


def is_in_worker() -> bool:
    """True inside a DataLoader worker process, where CUDA must not be touched."""
    return get_worker_info() is not None
