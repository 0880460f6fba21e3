"""Retention: delete blocks that hold nothing but old trajectories.

One rule: whole blocks, oldest first per writer. Deleting from the front leaves no trajectory
without its end (and no dropped one without the note that it is dropped); one that loses its
beginning is left out by every reader.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from storage.core import arguments
from storage.errors import UsageError

from ..blocks.block_folder import BlockFolder, save_index_cache
from ..blocks.trajectory_index import TrajectoryIndex
from ..sources.recordings_in_folder import check_single
from .conversion_record import note_replaced
from .writer_journal import journal_path

#: What `prune` can limit.
LIMITS = ("trajectories", "frames", "bytes")


def prune(
    data_dir: str | os.PathLike[str],
    *,
    trajectories: int | None = None,
    frames: int | None = None,
    bytes: int | None = None,
    dry_run: bool = False,
    progress: bool = False,
) -> list[Path]:
    """Delete the blocks that the newest trajectories do not need; writers and readers may be at work.

    A block stays or goes as a whole: beyond the limits there is what shares blocks with the newest trajectories, and
    with those that living writers have in progress. The newest trajectory always stays; one that was dropped does not
    count.

    Args:
        data_dir: The data folder.
        trajectories: How many complete ones are kept, in the order of completion.
        frames: How many frames are kept, of whole trajectories.
        bytes: How many bytes of files. At least one limit must be given; all that are given hold.
        dry_run: Delete nothing.
        progress: Show a progress bar.

    Returns:
        The files, oldest first for each writer.

    Raises:
        UsageError: No limit is given, one is no integer >= 1, or the folder holds recordings and is none itself.
    """
    action = "call rollout_data.prune"
    limits = checked_limits(action, {"trajectories": trajectories, "frames": frames, "bytes": bytes})
    dry_run = arguments.flag(action, "dry_run", dry_run)
    folder = BlockFolder.at(arguments.path(action, "data_dir", data_dir))
    if not folder.blocks:
        check_single(action, folder.data_dir)
    index = folder.index
    is_growing = [journal_path(folder.data_dir, writer).exists() for writer in index.writers]
    is_kept = ~index.is_complete() & np.array(is_growing, bool)[index.writer]
    is_kept[_first_kept(index, limits) :] = True
    old: list[Path] = []
    edits = index.edits()
    for number, writer in enumerate(index.writers):
        known = index.number[index.writer == number]
        if writer in edits:
            known = np.append(known, index.blocks[edits[writer]].fragments["trajectory"])
        kept = set(index.number[is_kept & (index.writer == number)].tolist())
        mine = (one for one in index.blocks if one.writer == writer and not one.is_edit)
        for block in sorted(mine, key=lambda one: one.sequence):
            found = block.fragments["trajectory"]
            # Beyond the newest known ones are tentative ones, which the index does not list yet.
            if (found > known.max(initial=-1)).any() or not kept.isdisjoint(found.tolist()):
                break
            old.append(block.path)
    if old and not dry_run:
        note_replaced(folder.data_dir, old)
    for path in tqdm([] if dry_run else old, desc="prune", unit=" blocks", disable=not progress):
        path.unlink(missing_ok=True)
        path.with_name(path.name + ".sums").unlink(missing_ok=True)  # of a folder that was copied from a bucket
    if old and not dry_run:
        save_index_cache(data_dir)
    return old


def checked_limits(action: str, given: Any) -> dict[str, int]:
    """Check the limits of `prune`: name -> the most that is kept; None is no limit."""
    expected = f"at least one of {', '.join(LIMITS)}"
    if not isinstance(given, Mapping) or given.keys() - {*LIMITS}:
        raise UsageError(action, "", f"a mapping with {expected}", repr(given))
    limits = {name: arguments.whole(action, name, limit, 1) for name, limit in given.items() if limit is not None}
    if not limits:
        raise UsageError(action, "", expected, "none of them")
    return limits


def _first_kept(index: TrajectoryIndex, limits: Mapping[str, int]) -> int:
    """Find the oldest of the newest trajectories that are within all limits."""
    frames = np.diff(index.fragment_frame)
    block = index.fragment_block
    num_used = np.bincount(block, frames, len(index.blocks))
    frame_bytes = np.array([one.file_bytes for one in index.blocks]) / np.maximum(num_used, 1)
    ends = np.append(0, np.cumsum(frames * frame_bytes[block]))
    sizes = np.diff(ends[np.searchsorted(index.fragment_frame, index.first_frame)])
    weights = dict(zip(LIMITS, (index.is_complete(), index.lengths, sizes), strict=True))
    fitting = [np.searchsorted(np.cumsum(weights[name][::-1]), limit, "right") for name, limit in limits.items()]
    return max(0, len(index) - max(1, int(min(fitting))))
