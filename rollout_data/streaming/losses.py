"""Trajectories that turn out to be unreadable while they are played.

One rule: a loss costs one trajectory and moves no other: what is left of it is delivered with `valid=False`.
"""

from __future__ import annotations

import numpy as np
import torch

from storage.errors import DataFileError

from ..format.header import DATA, FINAL
from ..frames.source_base import Source
from ..frames.store import FrameStore
from ..index.index import Int64s, LostBlockError


def leave_out(source: Source, store: FrameStore, trajectories: Int64s, problem: DataFileError, skips: bool) -> None:
    """Mark those of some trajectories that cannot be read, and report why.

    Raises:
        DataFileError: `problem`, unless it concerns one of them and its file is gone or `skips` is True.
    """
    if isinstance(problem, LostBlockError):
        blocks = [number for number, block in enumerate(store.index.blocks) if block.path == problem.path]
        lost = store.index.trajectories_in(blocks)
    else:
        lost = np.array([one for one in trajectories.tolist() if skips and not _can_read(store, one)], np.int64)
    lost = lost[~store.is_lost[lost]]
    if not len(lost):
        raise problem
    source.forget(problem, len(lost))
    store.is_lost[lost] = True


def _can_read(store: FrameStore, trajectory: int) -> bool:
    if store.is_lost[trajectory]:
        return True
    one, length = np.array([trajectory]), store.index.lengths[[trajectory]]
    runs = store.locate(one, np.zeros(1, np.int64), length, np.zeros(1, np.int64))
    try:
        for name, column in store.layouts[DATA].columns.items():
            rows = torch.empty((int(length[0]), column.row_bytes // 4), dtype=torch.int32, device=store.device)
            store.copy((DATA, name), runs, 0, rows)
        for name in store.layouts[FINAL].columns if store.index.final_row[trajectory] >= 0 else ():
            store.finals(name, one)
    except DataFileError:
        return False
    return True
