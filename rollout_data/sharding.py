"""Which share of the trajectories this process delivers: the only place that asks.

One rule: ranks and DataLoader workers together are one list of shards; shards are disjoint and
complete because each takes every n-th trajectory of an order that all of them compute alike.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.utils.data import get_worker_info


class Shard(NamedTuple):
    """Number `number` of `total` shards."""

    number: int
    total: int


def current_shard() -> Shard:
    """Give the shard of this rank (torch.distributed, if initialized) and DataLoader worker."""
    rank, world_size = 0, 1
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    worker = get_worker_info()
    if worker is None:
        return Shard(rank, world_size)
    return Shard(rank * worker.num_workers + worker.id, world_size * worker.num_workers)


def worker_epoch() -> int:
    """Give a number above 0 that the DataLoader workers of one epoch have in common; 0 outside of workers."""
    worker = get_worker_info()
    return 0 if worker is None else (worker.seed - worker.id) % (1 << 62) + 1


def is_in_worker() -> bool:
    """True inside a DataLoader worker process, where CUDA must not be touched."""
    return get_worker_info() is not None
