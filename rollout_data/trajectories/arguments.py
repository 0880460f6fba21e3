"""The arguments of a `TrajectoryReplayBuffer`, checked before anything is touched.

One rule: what is wrong is a `UsageError` that names the argument.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from storage.core.records import is_count
from storage.errors import UsageError


def check_names(names: Any, parameter: str) -> tuple[str, ...]:
    """Give back a collection of flat names as a tuple."""
    is_list = isinstance(names, Iterable) and not isinstance(names, str)
    if not is_list or not all(isinstance(name, str) for name in names):
        raise UsageError("store trajectories", "", f"{parameter} as names of leaves", repr(names))
    return tuple(names)


def check_at_least(least: int, **values: Any) -> list[int]:
    """Give whole numbers, of Python or numpy, from `least` on as ints; raise for the first argument that is none."""
    found = []
    for name, value in values.items():
        if not is_count(value, least):
            raise UsageError("store or sample trajectories", "", f"{name} >= {least}", repr(value))
        found.append(int(value))
    return found


def check_seed(seed: Any) -> int:
    """Give a seed as an int that a `torch.Generator` takes."""
    if not is_count(seed, -(1 << 63)) or int(seed) >= 1 << 64:
        raise UsageError("draw trajectories", "", "seed as a whole number of 64 bits", repr(seed))
    return int(seed)


def check_rank(rank: Any, world_size: Any) -> tuple[int, int]:
    """Give both as ints; raise unless `world_size` >= 1 and `rank` is one of it."""
    if not is_count(world_size):
        raise UsageError("split trajectories", "", "world_size >= 1", repr(world_size))
    if not is_count(rank, 0) or int(rank) >= world_size:
        raise UsageError("split trajectories", "", f"a rank in [0, {world_size})", repr(rank))
    return int(rank), int(world_size)
