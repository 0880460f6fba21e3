"""`prune`: deletion of blocks that contain only old trajectories.

Of each writer, the oldest blocks are deleted first. A trajectory therefore loses its first frames
first, and readers skip trajectories without their first frames. The fragment which states that a
trajectory was dropped comes after its frames. It is therefore never deleted before them, and a
dropped trajectory cannot reappear.
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
from ..sources.recordings.recordings_in_folder import check_single
from .conversion_record import note_replaced
from .writer_journal import journal_path

#: Names of the arguments of `prune` that are limits.
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
    """Delete the oldest blocks of a data folder; keep the newest trajectories within all limits.

    A block is kept if a kept or unfinished trajectory has frames in it, so more data than the
    limits may remain. The newest complete trajectory is always kept. Dropped trajectories do not
    count. Safe to call while writers and readers are running.

    Args:
        data_dir: Data folder.
        trajectories: Maximum number of complete trajectories to keep.
        frames: Maximum number of frames to keep, counted in complete trajectories.
        bytes: Maximum bytes of block files to keep, counted in complete trajectories.
        dry_run: Return the files without deleting them.
        progress: Show a progress bar.

    Returns:
        The deleted files, oldest first within each writer.

    Raises:
        UsageError: No limit is passed, a limit is not an integer >= 1, or the folder only contains
            folders with recordings.
    """
    limits = checked_limits({"trajectories": trajectories, "frames": frames, "bytes": bytes})
    dry_run = arguments.flag("dry_run", dry_run)
    folder = BlockFolder.at(arguments.path("data_dir", data_dir))
    if not folder.blocks:
        check_single(folder.data_dir)
    is_needed = _needed_trajectories(folder, limits)
    paths: list[Path] = []
    for number in range(len(folder.index.writers)):
        paths += _unneeded_files(folder.index, number, is_needed)
    if not dry_run:
        _delete(folder.data_dir, paths, progress)
    return paths


def checked_limits(limits: Any) -> dict[str, int]:
    """Check limits of `prune` by name; return those that are not None.

    Raises:
        UsageError: No limit is passed, a name is unknown, or a limit is not an integer >= 1.
    """
    expected = f"at least one of {', '.join(LIMITS)}"
    if not isinstance(limits, Mapping) or limits.keys() - {*LIMITS}:
        raise UsageError(f"retention must be a mapping with {expected}, got {limits!r}.")
    checked = {}
    for name, limit in limits.items():
        if limit is not None:
            checked[name] = arguments.whole(name, limit, 1)
    if not checked:
        raise UsageError(f"no limit was passed. Pass {expected}.")
    return checked


def _needed_trajectories(folder: BlockFolder, limits: Mapping[str, int]) -> np.ndarray:
    """Return `[M]` bool: whether each of M trajectories is within the limits or in progress."""
    index = folder.index
    is_writer_running = [journal_path(folder.data_dir, writer).exists() for writer in index.writers]
    is_needed: np.ndarray = ~index.is_complete() & np.array(is_writer_running, bool)[index.writer]
    is_needed[_first_kept(index, limits) :] = True
    return is_needed


def _unneeded_files(index: TrajectoryIndex, number: int, is_needed: np.ndarray) -> list[Path]:
    """Return the files of a writer's oldest blocks, before its first block with needed frames."""
    writer = index.writers[number]
    is_of_writer = index.writer == number
    listed = index.number[is_of_writer]
    edits = index.edits()
    if writer in edits:
        listed = np.append(listed, index.blocks[edits[writer]].fragments["trajectory"])
    newest_listed = listed.max(initial=-1)
    needed = set(index.number[is_needed & is_of_writer].tolist())
    blocks = [block for block in index.blocks if block.writer == writer and not block.is_edit]
    blocks.sort(key=lambda block: block.sequence)
    paths = []
    for block in blocks:
        trajectories = block.fragments["trajectory"]
        if (trajectories > newest_listed).any():
            # The block has frames of an unfinished trajectory, which the index does not list yet.
            break
        if not needed.isdisjoint(trajectories.tolist()):
            break
        paths.append(block.path)
    return paths


def _delete(data_dir: Path, paths: list[Path], progress: bool) -> None:
    """Delete blocks and rewrite the index cache.

    If the folder is the target of a conversion, its record states that they are removed on purpose.
    """
    if paths:
        note_replaced(data_dir, paths)
    for path in tqdm(paths, desc="prune", unit=" blocks", disable=not progress):
        path.unlink(missing_ok=True)
        # A folder that was downloaded from a bucket also contains the checksum files of `push`.
        path.with_name(path.name + ".sums").unlink(missing_ok=True)
    if paths:
        save_index_cache(data_dir)


def _first_kept(index: TrajectoryIndex, limits: Mapping[str, int]) -> int:
    """Return the position of the oldest trajectory to keep, so that no limit is exceeded."""
    frames = np.diff(index.fragment_frame)
    block = index.fragment_block
    num_used = np.bincount(block, frames, len(index.blocks))
    block_bytes = np.array([listed.file_bytes for listed in index.blocks])
    frame_bytes = block_bytes / np.maximum(num_used, 1)
    ends = np.append(0, np.cumsum(frames * frame_bytes[block]))
    sizes = np.diff(ends[np.searchsorted(index.fragment_frame, index.first_frame)])
    weights = dict(zip(LIMITS, (index.is_complete(), index.lengths, sizes), strict=True))
    num_fitting = len(index)
    for name, limit in limits.items():
        sums = np.cumsum(weights[name][::-1])
        num_fitting = min(num_fitting, int(np.searchsorted(sums, limit, "right")))
    return max(0, len(index) - max(1, num_fitting))
