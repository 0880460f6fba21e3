"""Retention: delete blocks that hold nothing but old trajectories.

One rule: whole blocks, oldest first per writer. Deleting from the front leaves no trajectory
without its end (and no dropped one without the note that it is dropped); one that loses its
beginning is left out by every reader.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from storage.errors import UsageError

from .block_folder import BlockFolder, save_index_cache
from .index import TrajectoryIndex


def apply_retention(data_dir: str | os.PathLike[str], keep_latest_n: int) -> list[Path]:
    """Delete the blocks that the latest N complete trajectories, and what is newer, do not need.

    Args:
        data_dir: The data folder; writers and readers may be at work in it.
        keep_latest_n: N >= 1, in the order of completion.

    Returns:
        The deleted files.
    """
    if keep_latest_n < 1:
        raise UsageError("apply retention", f"to {str(data_dir)!r}", "keep_latest_n >= 1", str(keep_latest_n))
    folder = BlockFolder(data_dir)
    folder.refresh()
    blocks = list(folder.blocks.values())
    index = TrajectoryIndex(blocks, folder.built)
    complete = np.flatnonzero(index.is_complete())
    if len(complete) <= keep_latest_n:
        return []
    first_kept = int(complete[-keep_latest_n])
    kept = {(index.writers[writer], int(number)) for writer, number in zip(
        index.writer[first_kept:].tolist(), index.number[first_kept:].tolist(), strict=True)}  # fmt: skip
    deleted = []
    for writer in index.writers:
        for block in sorted((one for one in blocks if one.writer == writer), key=lambda one: one.sequence):
            if any((writer, number) in kept for number in np.unique(block.fragments["trajectory"]).tolist()):
                break
            if _is_still_growing(block.fragments["trajectory"], writer, index):
                break
            block.path.unlink(missing_ok=True)
            deleted.append(block.path)
    if deleted:
        save_index_cache(data_dir)
    return deleted


def _is_still_growing(numbers: np.ndarray, writer: str, index: TrajectoryIndex) -> bool:
    """Whether a block holds a part of a tentative trajectory, which the index does not list yet."""
    known = index.number[index.writer == index.writers.index(writer)]
    newest = int(known.max()) if len(known) else -1
    return bool((numbers > newest).any())
