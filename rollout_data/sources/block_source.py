"""Folders of block files as a kind of source: mapped side by side where that is possible."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from storage.core.fields import Schema
from storage.errors import DataFileError, RolloutDataError

from ..blocks.block import Block
from ..blocks.block_folder import LOOK_SHARE, BlockFolder, block_entries, counted_metadata, read_metadata
from ..blocks.block_header import DATA, layouts_of
from ..blocks.folder_metadata import load_metadata
from ..blocks.missing_trajectories import NONE_GONE, Lengths, beside_stand_ins, is_stand_in, with_stand_ins
from ..blocks.row_layout import RowLayout
from ..blocks.trajectory_index import TrajectoryIndex
from ..remote.locations import RemoteFiles
from ..remote.remote_folder import RemoteFolder
from .cached_frames import FileFrames, read_block
from .frame_store import FileMap, FrameStore, MappedFrames, can_map
from .remote_frames import RemoteFrames
from .shared_memory import SharedMemory, Spot, share, shared_at
from .source_kind import BlocksInUse, Choice, Kind, Origins, conventions


class Blocks(Kind):
    """Folders of block files."""

    format = "rollout-data"
    about = "block files"

    def __init__(self, source: Origins) -> None:
        self._source = source
        self._folders = [self._folder(path, label) for path, label in zip(source.paths, source.labels, strict=True)]
        self._choices = [Choice(origin, label) for origin, label in zip(source.origins, source.labels, strict=True)]
        #: Of each folder: what an open recording has found; None: the folder is looked at.
        self._opened = [
            None if origin.opened is None else _Opened(origin.opened, label)
            for origin, label in zip(source.origins, source.labels, strict=True)
        ]
        #: Blocks that are gone and in use; blocks that another process has seen.
        self._pinned: list[Block] = []
        self._adopted: list[Block] | None = None
        self._files: FileMap | None = None
        self._last: FrameStore | None = None
        self._listing: tuple[FrameStore | None, Any] = None, None
        self._shared: tuple[TrajectoryIndex | None, SharedMemory | None] = None, None
        self._broken: DataFileError | None = None
        self._look_due_s = 0.0
        self._has_warned = False

    @staticmethod
    def is_there(path: Path) -> bool:
        return bool(block_entries(path))

    def _folder(self, path: Path, label: str) -> BlockFolder:
        if self._source.is_remote:
            return RemoteFolder(RemoteFiles(path, self._source.remote), self._source.verify_on_open, label)
        return BlockFolder(path, self._source.verify_on_open, label)

    @property
    def metadata(self) -> dict[str, Any]:
        if (opened := self._opened[0]) is not None:
            return dict(opened.metadata)
        if self._source.is_remote:
            return self.remote[0].metadata
        folder = self._folders[0]
        # After a look the headers are known: counting them anew would read each block twice.
        found = load_metadata(folder.data_dir) if self._last is not None else None
        return read_metadata(folder.data_dir) if found is None else counted_metadata(folder, found)

    @property
    def conventions(self) -> set[tuple[str, str]]:
        local = [load_metadata(folder.data_dir) for folder in self._folders] if not self._source.is_remote else []
        return conventions([*(one.metadata for one in self.remote), *(one.context for one in local if one is not None)])

    @property
    def remote(self) -> list[RemoteFolder]:
        return [folder for folder in self._folders if isinstance(folder, RemoteFolder)]

    def listing(self) -> Any:
        if self._listing[0] is not (store := self.snapshot()):
            self._listing = store, self._listing_of(store)
        return self._listing[1]

    def _listing_of(self, store: FrameStore) -> Any:
        blocks = [(self._source.paths.index(block.path.parent), block) for block in store.index.blocks]
        return Blocks, self._source.schema, store.index.num_present, blocks

    def shared(self, store: FrameStore) -> Spot | None:
        if self._shared[0] is not store.index:
            self._shared = store.index, share((self._listing_of(store), store.index))
            found, _ = shared_at(self._shared[1].spot if self._shared[1] is not None else None)
            if found is not None:  # what this process has of its own is given up, but for its blocks
                vars(store.index).update({**vars(found[1]), "blocks": store.index.blocks})
                for folder in self._folders:
                    folder.built = None
        memory = self._shared[1]
        return None if memory is None else memory.spot

    def adopt(self, listing: Any, spot: Spot | None) -> bool:
        if listing is not None and listing is self._listing[1]:
            return True
        found, memory = shared_at(spot)
        if found is None and listing is None:
            return False
        _, self._source.schema, num_present, placed = listing if found is None else found[0]
        paths = self._source.paths
        blocks = [replace(block, path=paths[folder] / block.path.name) for folder, block in placed]
        self._adopted, self._pinned, self._last = blocks[:num_present], blocks[num_present:], None
        if found is not None:
            found[1].blocks = tuple(blocks)
            is_own = self._shared[1] is not None and self._shared[1].spot == spot  # others find it where it is
            self._shared = found[1], self._shared[1] if is_own else memory
        return True

    def refresh(self, in_use: BlocksInUse) -> None:
        has_changed = self._last is None or bool(self._pinned) or self._adopted is not None
        self._adopted = None
        for folder, opened in zip(self._folders, self._opened, strict=True):
            has_changed |= opened is None and folder.refresh()
            for problem in folder.problems.values() if opened is None else opened.problems:
                self._source.report(problem)
        self._warn_without_sums()
        if not has_changed:
            return
        blocks = self._blocks()
        present = {block.key for block in blocks}
        before = self._last.index if self._last is not None else None
        if before is not None:
            self._source.count_lost({block.key for block in before.blocks[: before.num_present]} - present, present)
        mapped = self._files.mapped if self._files is not None else ()
        gone = [one for one in in_use() if one.key not in present and (one.identity in mapped or is_stand_in(one))]
        if gone != self._pinned or before is None or _identities(before.blocks) != _identities(blocks):
            self._pinned = gone
            self._last = None
        self._source.lost.intersection_update(key for key, *_ in mapped)

    def _warn_without_sums(self) -> None:
        """Warn once of blocks behind a network whose pieces are compared with nothing."""
        num = sum(folder.num_without_sums for folder in self.remote)
        if num and not self._has_warned:
            self._has_warned = True
            where = repr(", ".join(map(str, self._source.paths)))
            expected = "checksums of their pieces beside them"
            advice = "'rollout-data push' writes them"
            action = f"compare what is fetched of {num} blocks"
            self._source.advise(DataFileError(action, f"of {where}", expected, "none", advice))

    def release(self, in_use: BlocksInUse) -> None:
        if self._files is None or (start_s := time.monotonic()) < self._look_due_s:
            return
        try:
            present = {f"{one.data_dir}{os.sep}{name}" for one in self._folders for name in one.found_now()}
        except RolloutDataError:  # the folder itself cannot be looked at: `refresh` tells
            return
        if gone := {identity for identity in self._files.mapped if str(identity[0][0]) not in present}:
            self._source.count_lost(key for key, *_ in gone)
            if unused := gone - _identities(in_use()):
                self._files.unmap(unused)
        stop_s = time.monotonic()
        self._look_due_s = stop_s + max(1.0, (stop_s - start_s) / LOOK_SHARE)

    def _blocks(self) -> list[Block]:
        if self._adopted is not None:
            return self._adopted
        listed = []
        for folder, choice, opened in zip(self._folders, self._choices, self._opened, strict=True):
            choice.header_of = folder.header_of if folder.has_unknown_ends else None
            listed.append([folder.blocks[name] for name in sorted(folder.blocks)] if opened is None else opened.blocks)
        return [block for choice, blocks in zip(self._choices, listed, strict=True) for block in choice.of(blocks)]

    def snapshot(self, upto: Mapping[str, int] | None = None, gone: Lengths = NONE_GONE) -> FrameStore:
        if self._last is not None and upto is None:
            return self._last
        if upto is not None:
            folders = {folder.label: folder.data_dir for folder in self._folders}
            self._pinned = with_stand_ins(self._pinned, folders, gone)
            self._last = None if gone else self._last
        for folder, opened in zip(self._folders, self._opened, strict=True):
            if opened is not None and opened.blocks:
                self._source.check_schema(opened.schema, folder.data_dir)
            elif folder.schema is not None and folder.blocks:
                self._source.check_schema(folder.schema, folder.data_dir)
        layouts = layouts_of(self._source.schema or self._folders[0].schema or Schema([]))
        blocks = self._blocks()
        if upto is not None:
            blocks = [block for block in blocks if block.is_edit or block.sequence <= upto.get(block.writer, -1)]
        store = self._frames(beside_stand_ins(blocks, self._pinned), layouts)
        if upto is None:
            self._report_broken(store.index)
            self._last = store
        return store

    def _frames(self, blocks: list[Block], layouts: Mapping[str, RowLayout]) -> FrameStore:
        if not self._source.is_remote and can_map([*blocks, *self._pinned]):
            return self._mapped_frames(blocks, layouts)
        index = self._index(blocks, list(filter(is_stand_in, self._pinned)))
        if self._source.is_remote:
            return RemoteFrames(index, layouts, self.remote)
        return FileFrames(index, layouts, partial(read_block, layouts=layouts))

    def _mapped_frames(self, blocks: list[Block], layouts: Mapping[str, RowLayout]) -> FrameStore:
        files = self._files
        if files is None or files.layouts is not layouts or not files.has_room(blocks):
            # Blocks that are gone cannot be mapped again: what is played of them counts as lost.
            files = self._files = FileMap(layouts, blocks, self._source.chunk_cache_bytes)
        mapped = []
        for block in blocks:
            try:
                if not block.is_edit:  # those have no rows, and their files may be gone
                    files.add(block)
                mapped.append(block)
            except FileNotFoundError:
                self._source.count_lost([block.key])
            except RolloutDataError as problem:
                self._source.report(problem)
        is_as_found = self._adopted is None and not self._pinned and mapped == self._blocks() and not any(self._opened)
        is_whole = is_as_found and len(self._folders) == 1 and self._choices[0].is_all
        built = self._folders[0].built if is_whole else None
        # What another process has seen is numbered as there, whether or not it could be mapped here.
        known = mapped if self._adopted is None else blocks
        self._look_due_s = 0.0
        return MappedFrames(self._index(known, self._pinned, built), layouts, files)

    def _index(
        self, blocks: list[Block], pinned: list[Block], built: Mapping[str, np.ndarray] | None = None
    ) -> TrajectoryIndex:
        """Return the index of some blocks: the one that is shared, if it is of these."""
        shared = self._shared[0]
        wanted = (*blocks, *pinned)
        if shared is not None and (shared.blocks, shared.num_present) == (wanted, len(blocks)):
            return shared
        return TrajectoryIndex(wanted, len(blocks), built)

    def _report_broken(self, index: TrajectoryIndex) -> None:
        """Keep one problem for the trajectories that lack a block now; warn at the first of them only."""
        problems = self._source.problems
        if self._broken is not None and self._broken in problems:
            problems.remove(self._broken)
        if index.num_broken:
            problem = index.broken_problem(repr(", ".join(map(str, self._source.paths))))
            if self._broken is None:
                self._source.report(problem)
            else:
                problems.append(problem)
            self._broken = problem


class _Opened:
    """The blocks of an open recording, whose folder is not looked at again.

    Args:
        reader: Of the recording.
        label: Goes before the writers' names, as in `BlockFolder`.
    """

    def __init__(self, reader: Any, label: str) -> None:
        self.schema: Schema = reader.store.layouts[DATA].schema
        self.metadata: Mapping[str, Any] = reader.metadata
        self.problems: list[RolloutDataError] = reader.problems
        self.blocks = [replace(block, writer=label + block.writer) for block in reader.blocks]


def _identities(blocks: Iterable[Block]) -> set[Any]:
    return {block.identity for block in blocks}
