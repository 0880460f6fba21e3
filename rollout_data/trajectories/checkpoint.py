"""Checkpoints of trajectories: all files and the index in a folder that is replaced as a whole.

One rule: a checkpoint lists exactly the files that are in it, and a crash leaves the old one or the new one.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from storage.durable import replace_folder

from .files import file_name, find_files, link_file, naming, write_trajectory
from .index import INDEX_NAME, LEGACY_INDEX_NAME, METADATA_NAME, Counters, Entry, write_index
from .rows import Rows


def save_to(folder: Path, entries: list[Entry], counters: Counters, rows_of: Callable[[Entry], Rows]) -> None:
    """Write entries and their index into `folder`, in the place of an earlier checkpoint.

    Args:
        folder: The checkpoint.
        entries: What is live.
        counters: What the buffer must know besides.
        rows_of: Gives the rows of an entry that has no file.
    """
    own = {INDEX_NAME, LEGACY_INDEX_NAME, METADATA_NAME}
    if folder.is_dir():
        own |= {path.name for path in find_files(folder.resolve()).values()}
    with replace_folder(folder, own) as made:
        for entry in entries:
            suffix = counters.file_format if entry.path is None else entry.path.suffix[1:]
            target = made / file_name(entry.trajectory_id, entry.weights_id, suffix)
            is_renamed = entry.block is not None and entry.block.trajectory_id != entry.trajectory_id
            if entry.path is None or is_renamed:  # a block names its trajectory: one of another id cannot be linked
                write_trajectory(target, entry.trajectory_id, entry.layout, rows_of(entry), entry.shape, entry.info)
            else:
                with naming(entry.trajectory_id, entry.path):
                    link_file(entry.path, target)
        write_index(made, entries, counters)


def shard(entries: list[Any], rank: int, world_size: int) -> list[Any]:
    """Give one rank's contiguous share; shares differ by one at most."""
    start, stop = (len(entries) * number // world_size for number in (rank, rank + 1))
    return entries[start:stop]
