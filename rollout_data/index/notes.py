"""What is known of episodes besides their frames, and the texts of frames, gathered from the blocks of an index.

One rule: a block is asked when its notes are, and its tables are then kept; the notes themselves are read each time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..format.header import BlockHeader, corrupt, read_header
from ..format.notes import EPISODES, TEXTS, text_id
from .index import Block, Identity, Int64s, TrajectoryIndex
from .stand_ins import is_stand_in


class Notes:
    """The notes of block files.

    Args:
        read: Gives the header of a block.
    """

    def __init__(self, read: Callable[[Block], BlockHeader] = lambda block: read_header(block.path)) -> None:
        self._read = read
        self._headers: dict[Identity, BlockHeader | None] = {}
        self._tasks: tuple[TrajectoryIndex | None, Int64s] = None, np.zeros(0, np.int64)

    def of(self, index: TrajectoryIndex, trajectory: int) -> dict[str, Any]:
        """Give what was said of an episode, the later over the earlier: a new dict.

        Raises:
            LostBlockError: One of its blocks is gone.
            CorruptFileError: A note is damaged.
        """
        numbers = index.fragment_block[slice(*index.first_fragment[trajectory : trajectory + 2])]
        said: dict[str, Any] = {}
        for number in sorted(set(numbers.tolist()), key=lambda one: index.blocks[one].sequence):
            try:
                if (header := self._header(index.blocks[number])) is None:
                    continue
            except FileNotFoundError:
                raise index.lost_block(number, "none") from None
            for _, text in header.read_notes(EPISODES, int(index.number[trajectory])):
                said |= parsed(header, text)
        return said

    def column(self, index: TrajectoryIndex, name: str) -> list[Any]:
        """Give what was said under a name, for each trajectory; None where nothing was, or the block is gone."""
        found: list[Any] = [None] * len(index)
        order = np.lexsort((index.number, index.writer))
        bounds = np.searchsorted(index.writer[order], np.arange(len(index.writers) + 1))
        number_of = {writer: number for number, writer in enumerate(index.writers)}
        for block, header in self._noted(index.blocks, EPISODES):
            writer = number_of[block.writer]
            mine = order[bounds[writer] : bounds[writer + 1]]
            keys = header.notes[EPISODES].keys
            places = np.searchsorted(index.number[mine], keys)
            for place, (key, text) in zip(places.tolist(), header.read_notes(EPISODES), strict=True):
                if place < len(mine) and index.number[mine[place]] == key and name in (said := parsed(header, text)):
                    found[mine[place]] = said[name]
        return found

    def tasks(self, index: TrajectoryIndex) -> Int64s:
        """Give the `text_id` of the task of each trajectory, int64 `[M]`; 0 where none is known."""
        if self._tasks[0] is not index:
            tasks = [task if isinstance(task, str) else "" for task in self.column(index, "task")]
            self._tasks = index, np.array([text_id(task) for task in tasks], np.int64)
        return self._tasks[1]

    def texts(self, index: TrajectoryIndex) -> dict[int, str]:
        """Give all texts of frames and the tasks of all episodes, by their `text_id`; 0 is ""."""
        found = {0: ""}
        for _, header in self._noted(index.blocks, TEXTS):
            found.update(header.read_notes(TEXTS))
        tasks = {task for task in self.column(index, "task") if isinstance(task, str)}
        return found | {text_id(task): task for task in tasks}

    def _noted(self, blocks: Sequence[Block], kind: str) -> Iterator[tuple[Block, BlockHeader]]:
        """Yield the blocks that have notes of a kind, each writer's in order; those that are gone are left out."""
        for block in sorted(blocks, key=lambda one: one.sequence):
            try:
                header = self._header(block)
            except FileNotFoundError:
                continue
            if header is not None and len(header.notes[kind].keys):
                yield block, header

    def _header(self, block: Block) -> BlockHeader | None:
        """Give the header of a block; None if it has no notes."""
        if block.identity not in self._headers:
            if is_stand_in(block):
                raise FileNotFoundError(str(block.path))
            header = self._read(block) if block.places else None  # other systems' files have none
            self._headers[block.identity] = header if header is not None and header.notes else None
        return self._headers[block.identity]


def parsed(header: BlockHeader, text: str) -> Mapping[str, Any]:
    """Read a note of an episode.

    Raises:
        CorruptFileError: It is no JSON object.
    """
    try:
        said = json.loads(text)
    except (ValueError, RecursionError) as cause:
        raise corrupt(header.path, "notes of episodes as JSON", f"{type(cause).__name__}: {cause}") from None
    if not isinstance(said, dict):
        raise corrupt(header.path, "notes of episodes as JSON objects", type(said).__name__)
    return said
