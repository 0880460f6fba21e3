"""Reading of episode metadata and frame texts from the annotations in blocks.

The annotation tables of a block are read at their first use and cached. The annotations are read
from the file at each use.
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
from .trajectory_index import Int64s, TrajectoryIndex


class AnnotatedSource(Protocol):
    """Interface of episode sources that have annotations: block folders, or files of other formats.

    Attributes:
        index: Index of the trajectories.
        read_header: Function that returns the header of a block.
        episode_tasks: Task of each trajectory; None for blocks, which store it as an annotation.
        read_texts: Function that returns the texts of all text fields; None for blocks.
    """

    index: TrajectoryIndex
    read_header: Callable[[Block], BlockHeader]
    episode_tasks: Sequence[str] | None
    read_texts: Callable[[], Iterable[str]] | None


class Notes:
    """Reader of the annotations of blocks. A pickled reader loses its caches."""

    def __init__(self) -> None:
        #: Cached headers by identity of the block; None for a block without annotations.
        self._headers: dict[Identity, BlockHeader | None] = {}
        #: The last index, and the id of each trajectory's task description, int64 `[M]`.
        self._tasks: tuple[TrajectoryIndex | None, Int64s] = (None, np.zeros(0, np.int64))
        #: The last index, and for each writer the position of its edit in the blocks of this index.
        self._edits: tuple[TrajectoryIndex | None, dict[str, int]] = (None, {})
        #: Annotations of edits, by identity of the edit. They are kept in memory, since the next
        #: edit removes the file.
        self._kept: dict[Identity, tuple[tuple[int, str], ...]] = {}

    def keep_edits(self, source: AnnotatedSource) -> None:
        """Read the annotations of all edits into memory, since the next edit removes the files.

        An edit is a block without frames that drops or annotates trajectories.

        Raises:
            FileNotFoundError: A newer edit has already replaced an edit of the index.
        """
        for block in source.index.blocks:
            if not block.is_edit:
                continue
            with suppress(CorruptFileError):  # A later read of the annotation raises this error.
                self._kept[block.identity] = tuple(self._of_episodes(source, block))

    def kept(self, block: Block) -> Block:
        """Return an edit with its annotations attached, so that its file is no longer needed.

        An edit is a block without frames that drops or annotates trajectories. `keep_edits` must
        have read its annotations before. Other blocks are returned unchanged.
        """
        notes = self._kept.get(block.identity)
        return block if notes is None else replace(block, notes=notes)

    def __reduce__(self) -> tuple[Any, ...]:
        return Notes, ()

    def of(self, source: AnnotatedSource, trajectory: int) -> dict[str, Any]:
        """Return the metadata of an episode as a new dict. Later annotations replace earlier ones.

        Raises:
            LostBlockError: A block of the episode was deleted.
            CorruptFileError: An annotation is damaged.
        """
        index = source.index
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
                for _, text in self._of_episodes(source, block, key):
                    metadata |= parsed(block.path, text)
            except FileNotFoundError:
                raise index.lost_block(number) from None
        return metadata

    def _of_episodes(
        self,
        source: AnnotatedSource,
        block: Block,
        key: int | None = None,
    ) -> Iterable[tuple[int, str]]:
        """Return (trajectory number, JSON text) for each episode annotation in a block.

        With `key`, only annotations of the trajectory with this number are returned.
        """
        kept = self._kept.get(block.identity, block.notes)
        if kept is not None:
            return [(number, text) for number, text in kept if key is None or number == key]
        header = self._header(source, block)
        return () if header is None else header.read_notes(EPISODES, key)

    def column(self, source: AnnotatedSource, name: str) -> list[Any]:
        """Return a list with the value of the metadata key `name` for each trajectory.

        The value is None if the trajectory has no such key, or if its block was deleted.
        """
        return self.columns(source, {name}).get(name) or [None] * len(source.index)

    def columns(self, source: AnnotatedSource, names: Set[str]) -> dict[str, list[Any]]:
        """Return columns of episode metadata: map each key to a list with a value per trajectory.

        The value is None if a trajectory does not have the key. Keys that no trajectory has are
        left out.
        """
        index = source.index
        columns = dict[str, list[Any]]()
        # After sorting by writer and number, each writer's trajectories are one contiguous range.
        order = np.lexsort((index.number, index.writer))
        bounds = np.searchsorted(index.writer[order], np.arange(len(index.writers) + 1))
        ranges = {}
        for number, writer in enumerate(index.writers):
            ranges[writer] = order[bounds[number] : bounds[number + 1]]

        for block in sorted(index.blocks, key=lambda block: block.sequence):
            try:
                notes = list(self._of_episodes(source, block))
            except FileNotFoundError:  # The block was deleted after the folder was listed.
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

    def tasks(self, source: AnnotatedSource) -> Int64s:
        """Return the `text_id` of the task of each of M trajectories, int64 `[M]`.

        The id of an unknown task is 0.
        """
        if self._tasks[0] is not source.index:
            ids = [text_id(task) for task in self._task_texts(source)]
            self._tasks = (source.index, np.array(ids, np.int64))
        return self._tasks[1]

    def texts(self, source: AnnotatedSource) -> dict[int, str]:
        """Map each `text_id` to its text, for all frame texts and tasks; 0 is the id of ""."""
        texts = {0: ""}
        for header in self._headers_with(source, TEXTS):
            with suppress(FileNotFoundError):  # The block was deleted after its header was read.
                texts.update(header.read_notes(TEXTS))
        others = set(self._task_texts(source))
        if source.read_texts is not None:
            others.update(source.read_texts())
        for text in others:
            texts[text_id(text)] = text
        return texts

    def _task_texts(self, source: AnnotatedSource) -> Sequence[str]:
        """Return the task of each trajectory; "" for an unknown task."""
        if source.episode_tasks is not None:
            return source.episode_tasks
        return [task if isinstance(task, str) else "" for task in self.column(source, TASK)]

    def _headers_with(self, source: AnnotatedSource, kind: str) -> Iterator[BlockHeader]:
        """Yield the header of each block that has annotations of this kind.

        The blocks are ordered by sequence number, that is, from old to new. Deleted blocks are left
        out.
        """
        for block in sorted(source.index.blocks, key=lambda block: block.sequence):
            try:
                header = self._header(source, block)
            except FileNotFoundError:
                continue
            if header is not None and len(header.notes[kind].keys):
                yield header

    def _header(self, source: AnnotatedSource, block: Block) -> BlockHeader | None:
        """Return the header of a block, cached; None if the block has no annotations."""
        if block.identity not in self._headers:
            # Blocks without `places` are files of other formats, which have no annotations.
            header = source.read_header(block) if block.places else None
            has_notes = header is not None and header.notes
            self._headers[block.identity] = header if has_notes else None
        return self._headers[block.identity]


def _positions(index: TrajectoryIndex, trajectories: Int64s, keys: Int64s) -> Int64s:
    """Find K trajectories of one writer: return their positions in the index, int64 `[K]`.

    The position is -1 if the writer has no trajectory with this number.

    Args:
        index: The index.
        trajectories: Index positions of the writer's trajectories, in the order of their numbers.
        keys: Trajectory numbers within the writer, int64 `[K]`.
    """
    if not len(trajectories):
        return np.full(len(keys), -1)
    numbers = index.number[trajectories]
    places = np.searchsorted(numbers, keys)
    places[places == len(trajectories)] = 0
    return np.where(numbers[places] == keys, trajectories[places], -1)


def parsed(path: Path, text: str) -> Mapping[str, Any]:
    """Parse the JSON text of an episode annotation; `path` is the block file, for errors.

    Raises:
        CorruptFileError: The text is no JSON object.
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
