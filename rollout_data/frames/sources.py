"""Data folders as one source of trajectories: what is there now, as an index and a store of rows.

One rule: a snapshot never changes; `refresh` makes a new one when the folders have. A file that
cannot be read is reported once, by name, and the rest goes on.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from storage.core.fields import Schema
from storage.errors import DataFileError, RolloutDataError, UsageError

from ..foreign.trajectory_folder import FolderScan, read_chunk_rows, scan_trajectory_folder
from ..foreign.trajectory_listing import ChunkFile, is_trajectory_folder
from ..format.header import layouts_of, read_header
from ..format.schema import RowLayout
from ..index.folder import BlockFolder, block_names, read_metadata
from ..index.index import Block, Int64s, Key, LostBlockError, TrajectoryIndex
from .coded import CHUNK_CACHE_BYTES
from .source import BlocksInUse, DataDirs, Source, as_paths
from .store import GONE, FileFrames, FileMap, FrameStore, MappedFrames, Place, can_map

#: Between batches the folders are looked at for this share of the time at most, and once a second.
_LOOK_SHARE = 0.005


class BlockSource(Source):
    """Folders of block files."""

    @property
    def metadata(self) -> dict[str, Any]:
        return read_metadata(self.paths[0])

    def _open_folders(self) -> None:
        labels = [""] if len(self.paths) == 1 else [f"{number}:" for number in range(len(self.paths))]
        self._folders = [
            BlockFolder(path, self._verify_on_open, label) for path, label in zip(self.paths, labels, strict=True)
        ]
        self._pinned: list[Block] = []
        self._files: FileMap | None = None
        self._last: FrameStore | None = None
        self._broken: DataFileError | None = None
        self._look_due_s = 0.0
        self._adopted: list[Block] | None = None
        self._sight: tuple[FrameStore | None, Any] = None, None

    def sight(self) -> Any:
        if self._sight[0] is not (store := self.snapshot()):
            index, folders = store.index, [path.resolve() for path in self.paths]
            blocks = [(folders.index(block.path.parent.resolve()), block) for block in index.blocks]
            self._sight = store, (self._schema, index.num_present, blocks)
        return self._sight[1]

    def adopt(self, sight: Any) -> None:
        if sight is None or sight is self._sight[1]:
            return
        self._schema, num_present, placed = sight
        blocks = [replace(block, path=self.paths[folder] / block.path.name) for folder, block in placed]
        self._adopted, self._pinned, self._last = blocks[:num_present], blocks[num_present:], None

    def refresh(self, in_use: BlocksInUse = tuple) -> None:
        has_changed = self._last is None or bool(self._pinned) or self._adopted is not None
        self._adopted = None
        for folder in self._folders:
            has_changed |= folder.refresh()
            for problem in folder.problems.values():
                self.report(problem)
        if not has_changed:
            return
        blocks = self._blocks()
        present, before = {block.key for block in blocks}, self._last.index if self._last is not None else None
        if before is not None:
            self._count_lost({block.key for block in before.blocks[: before.num_present]} - present, present)
        mapped = self._files.mapped if self._files is not None else ()
        gone = [block for block in in_use() if block.key not in present and block.identity in mapped]
        is_same = before is not None and _identities(before.blocks) == _identities(blocks)
        if gone != self._pinned or not is_same:
            self._pinned, self._last = gone, None
        self._lost.intersection_update(block.key for block in gone)

    def release(self, in_use: BlocksInUse = tuple) -> None:
        if self._files is None or (start_s := time.monotonic()) < self._look_due_s:
            return
        try:
            present = {f"{one.data_dir}{os.sep}{name}" for one in self._folders for name in block_names(one.data_dir)}
        except RolloutDataError:  # the folder itself cannot be looked at: `refresh` tells
            return
        if gone := {identity for identity in self._files.mapped if str(identity[0][0]) not in present}:
            self._count_lost(key for key, *_ in gone)
            if unused := gone - _identities(in_use()):
                self._files.unmap(unused)
        stop_s = time.monotonic()
        self._look_due_s = stop_s + max(1.0, (stop_s - start_s) / _LOOK_SHARE)

    def _blocks(self) -> list[Block]:
        if self._adopted is not None:
            return self._adopted
        return [folder.blocks[name] for folder in self._folders for name in sorted(folder.blocks)]

    def snapshot(self, upto: Mapping[str, int] | None = None) -> FrameStore:
        if self._last is not None and upto is None:
            return self._last
        for folder in self._folders:
            if folder.schema is not None and folder.blocks:
                self._check_schema(folder.schema, str(folder.data_dir))
        layouts = layouts_of(self._schema or self._folders[0].schema or Schema([]))
        blocks = self._blocks()
        if upto is not None:
            blocks = [block for block in blocks if block.sequence <= upto.get(block.writer, -1)]
        if can_map([*blocks, *self._pinned]):
            store: FrameStore = self._mapped_frames(blocks, layouts, is_all=upto is None)
        else:
            store = FileFrames(TrajectoryIndex(blocks), layouts, partial(_read_block, layouts=layouts))
        if upto is None:
            self._report_broken(store.index)
            self._last = store
        return store

    def _mapped_frames(self, blocks: list[Block], layouts: Mapping[str, RowLayout], is_all: bool) -> FrameStore:
        if self._files is None or self._files.layouts is not layouts or not self._files.has_room(blocks):
            # Blocks that are gone cannot be mapped again: what is played of them counts as lost.
            self._files = FileMap(layouts, blocks, self._chunk_cache_bytes)
        mapped = self._mapped(blocks, self._files)
        is_as_cached = is_all and mapped == blocks and not self._pinned and len(self._folders) == 1
        built = self._folders[0].built if is_as_cached else None
        index = TrajectoryIndex([*mapped, *self._pinned], built, num_present=len(mapped))
        self._look_due_s = 0.0
        return MappedFrames(index, layouts, self._files)

    def _mapped(self, blocks: list[Block], files: FileMap) -> list[Block]:
        """Map the blocks; give those that are still there, or were where another process has looked."""
        kept = []
        for block in blocks:
            try:
                files.add(block)
                kept.append(block)
            except FileNotFoundError:
                self._count_lost([block.key])
            except RolloutDataError as problem:
                self.report(problem)
        return kept if self._adopted is None else blocks

    def _report_broken(self, index: TrajectoryIndex) -> None:
        """Keep one problem for the trajectories that lack a block now; warn at the first of them only."""
        problem = _lacking_blocks(index, repr(", ".join(map(str, self.paths)))) if index.num_broken else None
        if self._broken is not None and self._broken in self.problems:
            self.problems.remove(self._broken)
        if problem is not None and self._broken is not None:
            self.problems.append(problem)
        elif problem is not None:
            self.report(problem)
        self._broken = problem or self._broken


class FolderSource(Source):
    """Folders of the older `trajectory_K/traj_START_END.pickle` layout.

    A chunk is a block. One that cannot be read is left out until it has changed, and the fields stay those of the
    first chunks that were found.
    """

    @property
    def metadata(self) -> dict[str, Any]:
        return dict(self._scans[0].metadata)

    def _open_folders(self) -> None:
        self._unreadable: set[ChunkFile] = set()
        self._mixed: set[Path] = set()
        self._scans = self._sight = [scan_trajectory_folder(path) for path in self.paths]
        self._last = self._store()
        self._report_left_out()

    def refresh(self, in_use: BlocksInUse = tuple) -> None:
        scans = [scan_trajectory_folder(old.data_dir, previous=old, without=self._unreadable) for old in self._scans]
        is_same = all(
            new.chunk_paths == old.chunk_paths and list(new.known) == list(old.known)
            for new, old in zip(scans, self._scans, strict=True)
        )
        self._scans = scans
        if not is_same:
            present = {(file.path, "") for scan in scans for file in scan.known}
            self._count_lost({block.key for block in self._last.index.blocks} - present, present)
            self._last, self._sight = self._store(), scans
        self._report_left_out()

    def sight(self) -> Any:
        return self._sight

    def adopt(self, sight: Any) -> None:
        if sight is not None and sight is not self._sight:
            self._scans = self._sight = sight
            self._last = self._store()

    def forget(self, problem: DataFileError, num_trajectories: int) -> None:
        super().forget(problem, num_trajectories)
        if isinstance(problem, LostBlockError):
            path = problem.key[0]
            self._unreadable.update(scan.files[path] for scan in self._scans if path in scan.files)

    def snapshot(self, upto: Mapping[str, int] | None = None) -> FrameStore:
        return self._last

    def _report_left_out(self) -> None:
        for scan in self._scans:
            for problem in scan.problems:
                self.report(problem)
        for path in self.paths:
            names = [] if path in self._mixed else block_names(path)
            if count := sum(name.startswith("rollout_") for name in names):
                self._mixed.add(path)
                got = f"{count} block file{'s' if count > 1 else ''} beside trajectory folders"
                advice = "Only the trajectory folders are read; move one or the other to a folder of their own"
                self.report(DataFileError("read all of", repr(str(path)), "data of one kind", got, advice))

    def _store(self) -> FrameStore:
        chunks: dict[Key, tuple[FolderScan, int]] = {}
        blocks: list[Block] = []
        for number, scan in enumerate(self._scans):
            if scan.signature:
                self._check_schema(scan.schema, str(scan.data_dir))
            fragments = scan.fragments.copy()
            folder_of = [path.parent.relative_to(scan.data_dir).as_posix() for path in scan.chunk_paths]
            fragments["trajectory"] = _numbers_within(np.array(folder_of)[scan.chunk_of], fragments["trajectory"])
            parts = np.split(fragments, np.searchsorted(scan.chunk_of, np.arange(1, len(scan.chunk_paths))))
            for chunk, path in enumerate(scan.chunk_paths):
                blocks.append(Block(path, f"{number}:{folder_of[chunk]}", chunk, parts[chunk]))
                chunks[blocks[-1].key] = scan, chunk

        def read(block: Block, place: Place) -> np.ndarray:
            scan, chunk = chunks[block.key]
            return read_chunk_rows(scan, chunk, columns=[place[1]])[place[1]]

        losses = (*GONE, DataFileError)
        return FileFrames(TrajectoryIndex(blocks), layouts_of(self._schema or Schema([])), read, losses)


class UndecidedSource(Source):
    """Folders in which there is nothing yet; passes everything on to what they turn out to be."""

    @property
    def metadata(self) -> dict[str, Any]:
        return read_metadata(self.paths[0]) if self._found is None else self._found.metadata

    def _open_folders(self) -> None:
        self._found: Source | None = None

    def refresh(self, in_use: BlocksInUse = tuple) -> None:
        self._decide(_kind_of_all(self.paths) if self._found is None else None)
        if self._found is not None:
            self._found.refresh(in_use)
            self._take_counts(self._found)

    def release(self, in_use: BlocksInUse = tuple) -> None:
        if self._found is not None:
            self._found.release(in_use)
            self._take_counts(self._found)

    def sight(self) -> Any:
        return None if self._found is None else self._found.sight()

    def adopt(self, sight: Any) -> None:
        if sight is not None:
            self._decide(FolderSource if isinstance(sight, list) else BlockSource)
        if self._found is not None:
            self._found.adopt(sight)

    def forget(self, problem: DataFileError, num_trajectories: int) -> None:
        assert self._found is not None
        self._found.forget(problem, num_trajectories)
        self._take_counts(self._found)

    def snapshot(self, upto: Mapping[str, int] | None = None) -> FrameStore:
        if self._found is not None:
            return self._found.snapshot(upto)
        return FrameStore(TrajectoryIndex([]), layouts_of(Schema([])))

    def _decide(self, kind: type[Source] | None) -> None:
        if self._found is None and kind is not None:
            self._found = kind(self.paths, self._verify_on_open, self._chunk_cache_bytes)
            self.problems = self._found.problems

    def _take_counts(self, found: Source) -> None:
        self.num_vanished_blocks, self.num_problems = found.num_vanished_blocks, found.num_problems
        self.num_lost_trajectories = found.num_lost_trajectories


def open_source(data_dir: DataDirs, verify_on_open: bool = False, chunk_cache_bytes: int = CHUNK_CACHE_BYTES) -> Source:
    """Open folders of block files, or of the older trajectory layout; `chunk_cache_bytes`: see `WindowDataset`."""
    paths = as_paths(data_dir)
    return (_kind_of_all(paths) or UndecidedSource)(paths, verify_on_open, chunk_cache_bytes)


def _kind_of_all(paths: Sequence[Path]) -> type[Source] | None:
    """Tell how folders are read, None as long as all are empty."""
    kinds = {path: kind for path in paths if (kind := _kind_of(path)) is not None}
    if len(set(kinds.values())) > 1:
        old = ", ".join(str(path) for path, kind in kinds.items() if kind is FolderSource)
        got = f"trajectory folders in {old} beside block files"
        raise UsageError("open the folders together", "", "folders of one kind", got)
    return next(iter(kinds.values()), None)


def _kind_of(path: Path) -> type[Source] | None:
    """Tell how a folder is read: an empty trajectory folder beside block files says nothing."""
    has_blocks = bool(block_names(path))
    if is_trajectory_folder(path, with_chunk=has_blocks):
        return FolderSource
    return BlockSource if has_blocks else None


def _identities(blocks: Iterable[Block]) -> set[Any]:
    return {block.identity for block in blocks}


def _lacking_blocks(index: TrajectoryIndex, where: str) -> DataFileError:
    missing = TrajectoryIndex(index.blocks).missing_blocks()
    named = [f"{', '.join(_range(*gap) for gap in gaps[:4])} of writer {writer!r}" for writer, gaps in missing.items()]
    more = f" and of {len(named) - 3} more" if len(named) > 3 else ""
    got = f"{index.num_broken} without all of their blocks, where there is no block {'; '.join(named[:3])}{more}"
    advice = "They are left out; bring the blocks back, unless they were removed on purpose"
    return DataFileError("read all trajectories", f"of {where}", "whole ones", got, advice)


def _range(start: int, stop: int) -> str:
    return f"{start}" if stop == start + 1 else f"{start}:{stop}"


def _numbers_within(folder: np.ndarray, trajectory: Int64s) -> Int64s:
    """Number trajectories within their folder, 0 in all but the folders that hold several."""
    _, folder_number = np.unique(folder, return_inverse=True)
    pairs, position = np.unique(np.stack([folder_number, trajectory]), axis=1, return_inverse=True)
    return np.arange(pairs.shape[1])[position.reshape(-1)] - np.searchsorted(pairs[0], folder_number)


def _read_block(block: Block, place: Place, layouts: Mapping[str, RowLayout]) -> np.ndarray:
    """Map or decode one kind of row of one block, where blocks cannot be mapped side by side."""
    offset, num_rows = block.places[place]
    column = layouts[place[0]].columns[place[1]]
    if column.is_coded:
        return read_header(block.path).read_rows(*place, 0, num_rows)
    if num_rows == 0:
        return np.zeros((0, column.row_bytes), np.uint8)
    return np.memmap(block.path, np.uint8, "r", offset, (num_rows, column.row_bytes))
