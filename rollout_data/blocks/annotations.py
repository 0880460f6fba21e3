"""What is known of episodes besides their frames, and the texts of frames, gathered from the blocks of an index.

One rule: a block is asked when its notes are, and its tables are then kept; the notes themselves are read each time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from storage.errors import CorruptFileError

from .annotation_table import EPISODES, TASK, TEXTS, text_id
from .block import Block, Identity
from .block_header import BlockHeader, corrupt
from .missing_trajectories import is_stand_in
from .trajectory_index import Int64s, TrajectoryIndex


class Noted(Protocol):
    """What has notes: the blocks of an index, or other files, whose reader tells the tasks.

    Attributes:
        index: Which trajectories there are.
        read_header: Gives the header of a block.
        episode_tasks: The task of each trajectory, of other files than blocks.
        read_texts: Returns the texts of all text fields, of other files than blocks.
    """

    index: TrajectoryIndex
    read_header: Callable[[Block], BlockHeader]
    episode_tasks: Sequence[str] | None
    read_texts: Callable[[], Iterable[str]] | None


class Notes:
    """The notes of block files; a copy asks them anew."""

    def __init__(self) -> None:
        self._headers: dict[Identity, BlockHeader | None] = {}
        self._tasks: tuple[TrajectoryIndex | None, Int64s] = None, np.zeros(0, np.int64)
        self._edits: tuple[TrajectoryIndex | None, dict[str, int]] = None, {}
        #: Notes of episodes in blocks of edits, which the next edit removes.
        self._kept: dict[Identity, tuple[tuple[int, str], ...]] = {}

    def keep_edits(self, noted: Noted) -> None:
        """Read the notes of all edits now, so that they stay readable after the next edit.

        Raises:
            FileNotFoundError: An edit is gone: a newer one took its place meanwhile.
        """
        for block in noted.index.blocks:
            with suppress(CorruptFileError):  # reading the note raises it again
                if block.is_edit:
                    self._kept[block.identity] = tuple(self._of_episodes(noted, block))

    def kept(self, block: Block) -> Block:
        """Return a block with the notes that `keep_edits` read of it; a block without such as it is."""
        notes = self._kept.get(block.identity)
        return block if notes is None else replace(block, notes=notes)

    def __reduce__(self) -> tuple[Any, ...]:
        return Notes, ()

    def of(self, noted: Noted, trajectory: int) -> dict[str, Any]:
        """Return what was said of an episode, the later over the earlier: a new dict.

        Raises:
            LostBlockError: One of its blocks is gone.
            CorruptFileError: A note is damaged.
        """
        index = noted.index
        if self._edits[0] is not index:
            self._edits = index, index.edits()
        numbers = set(index.fragment_block[slice(*index.first_fragment[trajectory : trajectory + 2])].tolist())
        numbers |= {self._edits[1].get(index.writers[int(index.writer[trajectory])], -1)} - {-1}
        said: dict[str, Any] = {}
        for number in sorted(numbers, key=lambda one: index.blocks[one].sequence):
            try:
                for _, text in self._of_episodes(noted, index.blocks[number], int(index.number[trajectory])):
                    said |= parsed(index.blocks[number].path, text)
            except FileNotFoundError:
                raise index.lost_block(number, "none") from None
        return said

    def _of_episodes(self, noted: Noted, block: Block, key: int | None = None) -> Iterable[tuple[int, str]]:
        """Return (trajectory number, text) of the notes of episodes in a block, of one trajectory or of all."""
        kept = self._kept.get(block.identity, block.notes)
        if kept is not None:
            return [(number, text) for number, text in kept if key is None or number == key]
        header = self._header(noted, block)
        return () if header is None else header.read_notes(EPISODES, key)

    def column(self, noted: Noted, name: str) -> list[Any]:
        """Return what was said under a name, for each trajectory; None where nothing was, or the block is gone."""
        return self.columns(noted, {name}).get(name) or [None] * len(noted.index)

    def columns(self, noted: Noted, names: Set[str]) -> dict[str, list[Any]]:
        """Return such a column for each of some names under which something was said."""
        index = noted.index
        found = dict[str, list[Any]]()
        order = np.lexsort((index.number, index.writer))
        bounds = np.searchsorted(index.writer[order], np.arange(len(index.writers) + 1))
        number_of = {writer: number for number, writer in enumerate(index.writers)}
        for block in sorted(index.blocks, key=lambda one: one.sequence):
            try:
                notes = list(self._of_episodes(noted, block))
            except FileNotFoundError:  # removed since it was listed
                continue
            if not notes:
                continue
            writer = number_of[block.writer]
            mine = order[bounds[writer] : bounds[writer + 1]]
            keys = np.array([number for number, _ in notes], np.int64)
            places = np.searchsorted(index.number[mine], keys)
            places[places == len(mine)] = 0
            targets = np.where(index.number[mine][places] == keys, mine[places], -1) if len(mine) else keys * 0 - 1
            for target, (_, text) in zip(targets.tolist(), notes, strict=True):
                said = parsed(block.path, text) if target >= 0 else {}
                for name in names & said.keys():
                    found.setdefault(name, [None] * len(index))[target] = said[name]
        return found

    def tasks(self, noted: Noted) -> Int64s:
        """Return the `text_id` of the task of each trajectory, int64 `[M]`; 0 where none is known."""
        if self._tasks[0] is not noted.index:
            self._tasks = noted.index, np.array([*map(text_id, self._told(noted))], np.int64)
        return self._tasks[1]

    def texts(self, noted: Noted) -> dict[int, str]:
        """Return all texts of frames and the tasks of all episodes, by their `text_id`; 0 is ""."""
        found = {0: ""}
        for _, header in self._noted(noted, TEXTS):
            with suppress(FileNotFoundError):  # removed since its header was read
                found.update(header.read_notes(TEXTS))
        told = set(self._told(noted)) | set(noted.read_texts() if noted.read_texts is not None else ())
        return found | {text_id(text): text for text in told}

    def _told(self, noted: Noted) -> Sequence[str]:
        """Return the task of each trajectory; "" where none is known."""
        if noted.episode_tasks is not None:
            return noted.episode_tasks
        return [task if isinstance(task, str) else "" for task in self.column(noted, TASK)]

    def _noted(self, noted: Noted, kind: str) -> Iterator[tuple[Block, BlockHeader]]:
        """Yield the blocks that have notes of a kind, each writer's in order; those that are gone are left out."""
        for block in sorted(noted.index.blocks, key=lambda one: one.sequence):
            try:
                header = self._header(noted, block)
            except FileNotFoundError:
                continue
            if header is not None and len(header.notes[kind].keys):
                yield block, header

    def _header(self, noted: Noted, block: Block) -> BlockHeader | None:
        """Return the header of a block; None if it has no notes."""
        if block.identity not in self._headers:
            if is_stand_in(block):
                raise FileNotFoundError(str(block.path))
            header = noted.read_header(block) if block.places else None  # other systems' files have none
            self._headers[block.identity] = header if header is not None and header.notes else None
        return self._headers[block.identity]


def parsed(path: Path, text: str) -> Mapping[str, Any]:
    """Read a note of an episode in a block; errors name the file.

    Raises:
        CorruptFileError: It is no JSON object.
    """
    try:
        said = json.loads(text)
    except (ValueError, RecursionError) as cause:
        raise corrupt(path, "notes of episodes as JSON", f"{type(cause).__name__}: {cause}") from None
    if not isinstance(said, dict):
        raise corrupt(path, "notes of episodes as JSON objects", type(said).__name__)
    return said
