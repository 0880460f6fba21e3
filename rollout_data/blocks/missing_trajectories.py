"""Placeholder blocks for deleted trajectories that the saved state of a dataset still needs.

A placeholder is a block without a file. An index counts the frames of the placeholder, but readers
cannot read them. An index with a placeholder has no other fragment of the same trajectory.
Only resuming from a saved state creates placeholders.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import numpy as np

from .block import Block
from .block_header import FRAGMENT_DTYPE, OPEN
from .trajectory_index import TrajectoryIndex

#: Maps (writer, number) of a trajectory to its number of frames.
Lengths = Mapping[tuple[str, int], int]
NONE_GONE: Lengths = MappingProxyType({})
#: `file_bytes` of a placeholder, since no file has a negative size.
_NUM_BYTES = -1


def lacking(index: TrajectoryIndex, lengths: Lengths) -> Lengths:
    """Return the entries of `lengths` whose trajectory has fewer frames in the index, or none."""
    missing = {}
    places = index.find(list(lengths)).tolist()
    for (key, length), place in zip(lengths.items(), places, strict=True):
        if place < 0 or index.lengths[place] < length:
            missing[key] = length
    return missing


def with_stand_ins(
    pinned: Iterable[Block],
    folders: Mapping[str, Path],
    gone: Lengths,
) -> list[Block]:
    """Return the blocks in `pinned` that have files, and a placeholder for each deleted trajectory.

    Args:
        pinned: Blocks that a saved state needs; earlier placeholders among them are removed.
        folders: Maps the prefix of a folder's writer names to the folder.
        gone: Deleted trajectories, each of which gets a placeholder.
    """
    made = [block for block in pinned if not is_stand_in(block)]
    for (writer, number), length in gone.items():
        label = next((label for label in folders if writer.startswith(label)), next(iter(folders)))
        fragments = np.array([(number, 0, OPEN, 0, length, 0, -1, 0, -1)], FRAGMENT_DTYPE)
        path = folders[label] / f"rollout_{writer.removeprefix(label)}_*.h5"
        name = f"trajectory {number}"
        made.append(Block(path, writer, 0, fragments, file_bytes=_NUM_BYTES, name=name))
    return made


def is_stand_in(block: Block) -> bool:
    """Return whether a block is a placeholder created by `with_stand_ins`."""
    return block.file_bytes == _NUM_BYTES


def beside_stand_ins(blocks: Iterable[Block], pinned: Iterable[Block]) -> list[Block]:
    """Return the blocks, without fragments of trajectories that have a placeholder in `pinned`."""
    gone: dict[str, list[int]] = {}
    for block in filter(is_stand_in, pinned):
        gone.setdefault(block.writer, []).append(int(block.fragments["trajectory"][0]))
    kept = []
    for block in blocks:
        if block.writer in gone:
            is_gone = np.isin(block.fragments["trajectory"], gone[block.writer])
            block = replace(block, fragments=block.fragments[~is_gone])
        kept.append(block)
    return kept
