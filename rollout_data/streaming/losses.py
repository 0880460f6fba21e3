"""What becomes of trajectories that cannot be read: they are marked, reported once, and what is left is not `valid`.

One rule: a loss costs the trajectories that it concerns, and no other.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from storage.errors import DataFileError

from ..frames.cached import CachedFrames
from ..frames.source import Source
from ..frames.store import FrameStore
from ..index.index import Int64s, LostBlockError


def leave_out(
    source: Source, store: FrameStore, trajectories: Int64s, problem: DataFileError, skips: bool
) -> list[tuple[Int64s, DataFileError]]:
    """Mark those of some trajectories that cannot be read, and report why; what is left of them is not `valid`.

    Returns:
        Which ones, and why.

    Raises:
        DataFileError: `problem`, unless it concerns one of them and its file is gone or `skips` is True.
    """
    if isinstance(problem, LostBlockError):
        blocks = [number for number, block in enumerate(store.index.blocks) if block.key == problem.key]
        found: list[tuple[Int64s, DataFileError]] = [(store.index.trajectories_in(blocks), problem)]
    else:
        whys = {one: _damage(store, one) for one in trajectories.tolist()} if skips else {}
        found = [(np.array([one]), why) for one, why in whys.items() if why is not None]
    lost = [(left, why) for all_lost, why in found if len(left := all_lost[~store.is_lost[all_lost]])]
    if not lost:
        raise problem
    for left, why in lost:
        source.forget(why, len(left))
        store.is_lost[left] = True
    return lost


def count_lost(source: Source, store: FrameStore, keys: Sequence[tuple[str, int]], problem: DataFileError) -> None:
    """Mark and report trajectories that another process could not read, unless this was known."""
    found = store.index.find(keys)
    known = found[found >= 0]
    num_new = len(keys) - int(store.is_lost[known].sum())
    store.is_lost[known] = True
    if num_new:
        source.forget(problem, num_new)


def _damage(store: FrameStore, trajectory: int) -> DataFileError | None:
    """Say why a trajectory cannot be read; None if it can, or is known to be lost."""
    if not store.is_lost[trajectory]:
        try:
            CachedFrames(store, np.array([trajectory]), store.device)
        except DataFileError as problem:
            return problem
    return None
