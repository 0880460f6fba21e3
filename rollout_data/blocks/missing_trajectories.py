"""Placeholders for deleted trajectories that a saved state plays.

Their frames are counted, but cannot be read.

An index with a placeholder has no other fragment of the trajectory. Only resuming a state creates
placeholders.
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

#: (writer, number) of trajectories -> number of their frames.
Lengths = Mapping[tuple[str, int], int]
NONE_GONE: Lengths = MappingProxyType({})
#: Size that marks a placeholder, since no file has it.
_NUM_BYTES = -1


def lacking(index: TrajectoryIndex, lengths: Lengths) -> Lengths:
    """Return the trajectories that are missing from an index, or miss frames there."""
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
    """Return pinned blocks with new placeholders instead of the old ones.

    Args:
        pinned: Blocks that a state needs, with the placeholders of an earlier state.
        folders: Label of writers -> folder.
        gone: Trajectories that get a placeholder.
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
    """Return whether a block is a placeholder of `with_stand_ins`."""
    return block.file_bytes == _NUM_BYTES


def beside_stand_ins(blocks: Iterable[Block], pinned: Iterable[Block]) -> list[Block]:
    """Return blocks without the fragments of trajectories that have a placeholder among `pinned`."""
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
