"""Metadata of episodes and texts of frames, from the annotations in the blocks of an index.

The tables of a block are read at their first use and kept. The annotations themselves are read each
time.
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
    """A source of episodes with annotations: the blocks of an index, or files of other formats.

    Attributes:
        index: Index of the trajectories.
        read_header: Function that returns the header of a block.
        episode_tasks: Task of each trajectory, only for files of other formats.
        read_texts: Function that returns the texts of all text fields, only for files of other
            formats.
    """

    index: TrajectoryIndex
    read_header: Callable[[Block], BlockHeader]
    episode_tasks: Sequence[str] | None
    read_texts: Callable[[], Iterable[str]] | None


class Notes:
    """Reader of the annotations of blocks. A pickled copy starts without its caches."""

    def __init__(self) -> None:
        #: Identity of a block -> header; None for a block without annotations.
        self._headers: dict[Identity, BlockHeader | None] = {}
        #: The last index, and the `text_id` of the task of each of its trajectories.
        self._tasks: tuple[TrajectoryIndex | None, Int64s] = (None, np.zeros(0, np.int64))
        #: The last index, and writer -> number of the block of its edit.
        self._edits: tuple[TrajectoryIndex | None, dict[str, int]] = (None, {})
        #: Identity of an edit -> its annotations, in memory because the next edit removes the file.
        self._kept: dict[Identity, tuple[tuple[int, str], ...]] = {}

    def keep_edits(self, noted: Noted) -> None:
        """Read the annotations of all edits now, so that they stay readable after the next edit.

        Raises:
            FileNotFoundError: An edit was replaced by a newer one meanwhile.
        """
        for block in noted.index.blocks:
            if not block.is_edit:
                continue
            with suppress(CorruptFileError):  # Reading the annotation later raises it again.
                self._kept[block.identity] = tuple(self._of_episodes(noted, block))

    def kept(self, block: Block) -> Block:
        """Return an edit with the annotations that `keep_edits` read; other blocks unchanged."""
        notes = self._kept.get(block.identity)
        return block if notes is None else replace(block, notes=notes)

    def __reduce__(self) -> tuple[Any, ...]:
        return Notes, ()

    def of(self, noted: Noted, trajectory: int) -> dict[str, Any]:
        """Return the metadata of an episode as a new dict. Later annotations replace earlier ones.

        Raises:
            LostBlockError: A block of the episode was deleted.
            CorruptFileError: An annotation is damaged.
        """
        index = noted.index
        if self._edits[0] is not index:
            self._edits = (index, index.edits())
        first, stop = index.first_fragment[trajectory : trajectory + 2]
        blocks = set(index.fragment_block[first:stop].tolist())
        edit = self._edits[1].get(index.writers[int(index.writer[trajectory])])
        if edit is not None:
            blocks.add(edit)

        metadata: dict[str, Any] = {}
        key = int(index.number[trajectory])
        for number in sorted(blocks, key=lambda block: index.blocks[block].sequence):
            block = index.blocks[number]
            try:
                for _, text in self._of_episodes(noted, block, key):
                    metadata |= parsed(block.path, text)
            except FileNotFoundError:
                raise index.lost_block(number) from None
        return metadata

    def _of_episodes(
        self,
        noted: Noted,
        block: Block,
        key: int | None = None,
    ) -> Iterable[tuple[int, str]]:
        """Return (trajectory number, JSON) of the episode annotations in a block.

        With `key`, only annotations of the trajectory with this number are returned.
        """
        kept = self._kept.get(block.identity, block.notes)
        if kept is not None:
            return [(number, text) for number, text in kept if key is None or number == key]
        header = self._header(noted, block)
        return () if header is None else header.read_notes(EPISODES, key)

    def column(self, noted: Noted, name: str) -> list[Any]:
        """Return the value of one metadata name for each trajectory.

        The value is None for a trajectory without the name, or if its block was deleted.
        """
        return self.columns(noted, {name}).get(name) or [None] * len(noted.index)

    def columns(self, noted: Noted, names: Set[str]) -> dict[str, list[Any]]:
        """Return name -> `column(name)`. Names without a value in any trajectory are left out."""
        index = noted.index
        columns = dict[str, list[Any]]()
        # Sorted by writer and number, the trajectories of each writer are one range.
        order = np.lexsort((index.number, index.writer))
        bounds = np.searchsorted(index.writer[order], np.arange(len(index.writers) + 1))
        ranges = {}
        for number, writer in enumerate(index.writers):
            ranges[writer] = order[bounds[number] : bounds[number + 1]]

        for block in sorted(index.blocks, key=lambda block: block.sequence):
            try:
                notes = list(self._of_episodes(noted, block))
            except FileNotFoundError:  # The block was removed after it was listed.
                continue
            if not notes:
                continue
            keys = np.array([key for key, _ in notes], np.int64)
            targets = _positions(index, ranges[block.writer], keys)
            for target, (_, text) in zip(targets.tolist(), notes, strict=True):
                if target < 0:
                    continue
                metadata = parsed(block.path, text)
                for name in names & metadata.keys():
                    column = columns.setdefault(name, [None] * len(index))
                    column[target] = metadata[name]
        return columns

    def tasks(self, noted: Noted) -> Int64s:
        """Return the `text_id` of the task of each trajectory, int64 `[M]`.

        0 for an unknown task.
        """
        if self._tasks[0] is not noted.index:
            ids = [text_id(task) for task in self._task_texts(noted)]
            self._tasks = (noted.index, np.array(ids, np.int64))
        return self._tasks[1]

    def texts(self, noted: Noted) -> dict[int, str]:
        """Return all texts of frames and all tasks by their `text_id`; 0 is ""."""
        texts = {0: ""}
        for header in self._headers_with(noted, TEXTS):
            with suppress(FileNotFoundError):  # The block was removed after its header was read.
                texts.update(header.read_notes(TEXTS))
        others = set(self._task_texts(noted))
        if noted.read_texts is not None:
            others.update(noted.read_texts())
        for text in others:
            texts[text_id(text)] = text
        return texts

    def _task_texts(self, noted: Noted) -> Sequence[str]:
        """Return the task of each trajectory; "" for an unknown task."""
        if noted.episode_tasks is not None:
            return noted.episode_tasks
        return [task if isinstance(task, str) else "" for task in self.column(noted, TASK)]

    def _headers_with(self, noted: Noted, kind: str) -> Iterator[BlockHeader]:
        """Yield the headers of blocks with annotations of a kind, in the order of each writer.

        Deleted blocks are left out.
        """
        for block in sorted(noted.index.blocks, key=lambda block: block.sequence):
            try:
                header = self._header(noted, block)
            except FileNotFoundError:
                continue
            if header is not None and len(header.notes[kind].keys):
                yield header

    def _header(self, noted: Noted, block: Block) -> BlockHeader | None:
        """Return the header of a block; None if it has no annotations."""
        if block.identity not in self._headers:
            if is_stand_in(block):
                raise FileNotFoundError(str(block.path))
            # Files of other formats have neither columns nor annotations.
            header = noted.read_header(block) if block.places else None
            has_notes = header is not None and header.notes
            self._headers[block.identity] = header if has_notes else None
        return self._headers[block.identity]


def _positions(index: TrajectoryIndex, trajectories: Int64s, keys: Int64s) -> Int64s:
    """Return the positions in an index of trajectory numbers of one writer; -1 for unknown numbers.

    Args:
        index: The index.
        trajectories: Positions of the writer's trajectories, in the order of their numbers.
        keys: Numbers within the writer.
    """
    if not len(trajectories):
        return np.full(len(keys), -1)
    numbers = index.number[trajectories]
    places = np.searchsorted(numbers, keys)
    places[places == len(trajectories)] = 0
    return np.where(numbers[places] == keys, trajectories[places], -1)


def parsed(path: Path, text: str) -> Mapping[str, Any]:
    """Parse the metadata of an episode in a block.

    Raises:
        CorruptFileError: The text is no JSON object. The error names the file.
    """
    try:
        metadata = json.loads(text)
    except (ValueError, RecursionError) as cause:
        problem = f"an annotation of an episode is not JSON, {type(cause).__name__}: {cause}"
        raise corrupt(path, problem) from None
    if not isinstance(metadata, dict):
        name = type(metadata).__name__
        raise corrupt(path, f"an annotation of an episode is not a JSON object but {name}")
    return metadata
