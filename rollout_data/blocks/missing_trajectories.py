"""Stand-ins for trajectories that are gone while a saved state plays them: their frames count, and cannot be read.

One rule: an index that holds a stand-in holds nothing else of that trajectory. Only resuming makes them.
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

#: (writer, number) of trajectories -> how many frames they had.
Lengths = Mapping[tuple[str, int], int]
NONE_GONE: Lengths = MappingProxyType({})
#: No file has this size.
_NUM_BYTES = -1


def lacking(index: TrajectoryIndex, lengths: Lengths) -> Lengths:
    """Which of these trajectories are not in an index, or not with all their frames."""
    places = zip(lengths, index.find(list(lengths)).tolist(), strict=True)
    return {key: lengths[key] for key, place in places if place < 0 or index.lengths[place] < lengths[key]}


def with_stand_ins(pinned: Iterable[Block], folders: Mapping[str, Path], gone: Lengths) -> list[Block]:
    """Replace the stand-ins among pinned blocks by those of `gone`; `folders`: by the label of their writers."""
    made = [block for block in pinned if not is_stand_in(block)]
    for (writer, number), length in gone.items():
        label = next((label for label in folders if writer.startswith(label)), next(iter(folders)))
        fragments = np.array([(number, 0, OPEN, 0, length, 0, -1, 0, -1)], FRAGMENT_DTYPE)
        path = folders[label] / f"rollout_{writer.removeprefix(label)}_*.h5"
        name = f"trajectory {number}"
        made.append(Block(path, writer, 0, fragments, file_bytes=_NUM_BYTES, name=name))
    return made


def is_stand_in(block: Block) -> bool:
    """True for the blocks that `with_stand_ins` makes."""
    return block.file_bytes == _NUM_BYTES


def beside_stand_ins(blocks: Iterable[Block], pinned: Iterable[Block]) -> list[Block]:
    """Leave out what blocks still hold of the trajectories that have a stand-in among `pinned`."""
    gone: dict[str, list[int]] = {}
    for block in filter(is_stand_in, pinned):
        gone.setdefault(block.writer, []).append(int(block.fragments["trajectory"][0]))
    return [
        replace(block, fragments=block.fragments[~np.isin(block.fragments["trajectory"], gone[block.writer])])
        if block.writer in gone
        else block
        for block in blocks
    ]
