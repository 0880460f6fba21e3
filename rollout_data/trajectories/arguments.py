"""The arguments of a `TrajectoryReplayBuffer`, checked before anything is touched.

One rule: what is wrong is a `UsageError` that names the argument.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

from storage.errors import UsageError


def check_names(names: Any, parameter: str) -> tuple[str, ...]:
    """Give back a collection of flat names as a tuple."""
    is_list = isinstance(names, Iterable) and not isinstance(names, str)
    if not is_list or not all(isinstance(name, str) for name in names):
        raise UsageError("store trajectories", "", f"{parameter} as names of leaves", repr(names))
    return tuple(names)


def check_at_least(least: int, **values: Any) -> None:
    """Raise unless every argument is a whole number from `least` on."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise UsageError("store or sample trajectories", "", f"{name} >= {least}", repr(value))


def check_seed(seed: Any) -> int:
    """Give a seed as an int that a `torch.Generator` takes."""
    try:
        number = None if isinstance(seed, bool) else operator.index(seed)
    except TypeError:
        number = None
    if number is None or not -(1 << 63) <= number < 1 << 64:
        raise UsageError("draw trajectories", "", "seed as a whole number of 64 bits", repr(seed))
    return number


def check_rank(rank: int, world_size: int) -> None:
    """Raise unless `world_size` >= 1 and `rank` is one of it."""
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise UsageError("split trajectories", "", "world_size >= 1", repr(world_size))
    if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < world_size:
        raise UsageError("split trajectories", "", f"a rank in [0, {world_size})", repr(rank))
