"""`BlockScanner`: lists folders of block files and creates snapshots of their episodes.

If possible, all block files on this machine are mapped into one address range, so that one gather
reads from all files.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from storage.core.fields import Schema
from storage.errors import DataFileError, RolloutDataError

from ..blocks.block import Block
from ..blocks.block_folder import (
    LOOK_SHARE,
    BlockFolder,
    block_entries,
    counted_metadata,
    read_metadata,
)
from ..blocks.block_header import DATA, layouts_of
from ..blocks.folder_metadata import load_metadata
from ..blocks.row_layout import RowLayout
from ..blocks.trajectory_index import TrajectoryIndex
from ..remote.locations import RemoteFiles
from ..remote.remote_folder import RemoteFolder
from .origins import Origins, conventions
from .processes.shared_memory import SharedMemory, Spot, share, shared_at
from .rows.mapped_blocks import FileMap, MappedBlocks, can_map
from .rows.remote_blocks import RemoteBlocks
from .rows.row_source import RowSource
from .rows.unmapped_rows import BlockFiles
from .scanner import BlocksInUse, Choice, Scanner


class BlockScanner(Scanner):
    """Lists the blocks of local or remote folders and creates snapshots of their episodes."""

    format = "rollout-data"
    description = "block files"

    def __init__(self, source: Origins) -> None:
        self._source = source
        self._folders = [
            self._folder(path, label)
            for path, label in zip(source.paths, source.labels, strict=True)
        ]
        self._choices = [
            Choice(origin, label)
            for origin, label in zip(source.origins, source.labels, strict=True)
        ]
        #: For each folder, the blocks of an open recording; None if the folder is scanned instead.
        self._opened = [
            None if origin.opened is None else _Opened(origin.opened, label)
            for origin, label in zip(source.origins, source.labels, strict=True)
        ]
        #: Deleted blocks whose trajectories are still being read.
        self._pinned: list[Block] = []
        #: Blocks that another process has listed; None if this process lists the blocks.
        self._adopted: list[Block] | None = None
        self._files: FileMap | None = None
        self._last: RowSource | None = None
        #: The last snapshot for which a listing for other processes was built, and this listing.
        self._listing: tuple[RowSource | None, Any] = None, None
        #: The index whose arrays are in shared memory, and this memory. (None, None) if the index
        #: is not shared.
        self._shared: tuple[TrajectoryIndex | None, SharedMemory | None] = None, None
        self._broken: DataFileError | None = None
        self._next_release_s = 0.0
        self._has_warned = False

    @staticmethod
    def is_there(path: Path) -> bool:
        return bool(block_entries(path))

    def _folder(self, path: Path, label: str) -> BlockFolder:
        if self._source.is_remote:
            return RemoteFolder(
                RemoteFiles(path, self._source.remote), self._source.verify_on_open, label
            )
        return BlockFolder(path, self._source.verify_on_open, label)

    @property
    def metadata(self) -> dict[str, Any]:
        opened = self._opened[0]
        if opened is not None:
            return dict(opened.metadata)
        if self._source.is_remote:
            return self._remote_folders[0].metadata
        folder = self._folders[0]
        # After a scan the folder knows its blocks, and `read_metadata` would scan it again.
        stored = load_metadata(folder.data_dir) if self._last is not None else None
        return (
            read_metadata(folder.data_dir) if stored is None else counted_metadata(folder, stored)
        )

    @property
    def conventions(self) -> set[tuple[str, str]]:
        if self._source.is_remote:
            return conventions(folder.metadata for folder in self._remote_folders)
        stored = [load_metadata(folder.data_dir) for folder in self._folders]
        return conventions(metadata.context for metadata in stored if metadata is not None)

    @property
    def _remote_folders(self) -> list[RemoteFolder]:
        return [folder for folder in self._folders if isinstance(folder, RemoteFolder)]

    # Exchange of listings with other processes
    def listing(self) -> Any:
        snapshot = self.snapshot()
        if self._listing[0] is not snapshot:
            self._listing = snapshot, self._listing_of(snapshot)
        return self._listing[1]

    def _listing_of(self, snapshot: RowSource) -> Any:
        blocks = [
            (self._source.paths.index(block.path.parent), block) for block in snapshot.index.blocks
        ]
        return BlockScanner, self._source.schema, snapshot.index.num_present, blocks

    def shared(self, source: RowSource) -> Spot | None:
        index = source.index
        if self._shared[0] is not index:
            memory = share((self._listing_of(source), index))
            self._shared = index, memory
            stored, _ = shared_at(memory.spot if memory is not None else None)
            if stored is not None:
                # The arrays of `index` are replaced by the shared ones, which frees its own copy.
                vars(index).update({**vars(stored[1]), "blocks": index.blocks})
                for folder in self._folders:
                    folder.built = None
        memory = self._shared[1]
        return None if memory is None else memory.spot

    def adopt(self, listing: Any, spot: Spot | None) -> bool:
        if listing is not None and listing is self._listing[1]:
            return True
        stored, memory = shared_at(spot)
        if stored is None and listing is None:
            return False
        _, self._source.schema, num_present, placed = listing if stored is None else stored[0]
        paths = self._source.paths
        blocks = [replace(block, path=paths[folder] / block.path.name) for folder, block in placed]
        self._adopted = blocks[:num_present]
        self._pinned = blocks[num_present:]
        self._last = None
        if stored is not None:
            index = stored[1]
            index.blocks = tuple(blocks)
            # Keep the memory that this process has shared itself, since other processes map it.
            own = self._shared[1]
            is_own = own is not None and own.spot == spot
            self._shared = index, own if is_own else memory
        return True

    # Scans of the folders
    def refresh(self, in_use: BlocksInUse) -> None:
        has_changed = self._last is None or bool(self._pinned) or self._adopted is not None
        self._adopted = None
        for folder, opened in zip(self._folders, self._opened, strict=True):
            if opened is None:
                has_changed |= folder.refresh()
            for problem in folder.problems.values() if opened is None else opened.problems:
                self._source.report(problem)
        self._warn_without_sums()
        if not has_changed:
            return
        blocks = self._blocks()
        present = {block.key for block in blocks}
        before = self._last.index if self._last is not None else None
        if before is not None:
            self._source.count_lost(
                {block.key for block in before.blocks[: before.num_present]} - present, present
            )
        mapped = self._files.mapped if self._files is not None else ()
        deleted = [block for block in in_use() if block.key not in present]
        pinned = [block for block in deleted if block.identity in mapped]
        if (
            pinned != self._pinned
            or before is None
            or _identities(before.blocks) != _identities(blocks)
        ):
            self._pinned = pinned
            self._last = None
        self._source.lost.intersection_update(key for key, *_ in mapped)

    def _warn_without_sums(self) -> None:
        """Warn once if remote blocks have no checksum file, so that their rows are not verified."""
        num_blocks = sum(folder.num_without_sums for folder in self._remote_folders)
        if not num_blocks or self._has_warned:
            return
        self._has_warned = True
        paths = ", ".join(map(str, self._source.paths))
        self._source.advise(
            DataFileError(
                f"{num_blocks} blocks of {paths!r} have no file of checksums, so their rows are "
                "not verified. 'rollout-data push' writes the checksums."
            )
        )

    def release(self, in_use: BlocksInUse) -> None:
        start_s = time.monotonic()
        if self._files is None or start_s < self._next_release_s:
            return
        try:
            present = {
                f"{folder.data_dir}{os.sep}{name}"
                for folder in self._folders
                for name in folder.found_now()
            }
        except RolloutDataError:  # The folder cannot be listed; `refresh` raises this error.
            return
        deleted = {
            identity for identity in self._files.mapped if str(identity[0][0]) not in present
        }
        if deleted:
            self._source.count_lost(key for key, *_ in deleted)
            unused = deleted - _identities(in_use())
            if unused:
                self._files.unmap(unused)
        stop_s = time.monotonic()
        self._next_release_s = stop_s + max(1.0, (stop_s - start_s) / LOOK_SHARE)

    def _blocks(self) -> list[Block]:
        """Return the blocks of all folders, without the fragments of unselected trajectories."""
        if self._adopted is not None:
            return self._adopted
        blocks: list[Block] = []
        for folder, choice, opened in zip(self._folders, self._choices, self._opened, strict=True):
            choice.header_of = folder.header_of if folder.has_unknown_ends else None
            listed = (
                [folder.blocks[name] for name in sorted(folder.blocks)]
                if opened is None
                else opened.blocks
            )
            blocks += choice.of(listed)
        return blocks

    def snapshot(self, upto: Mapping[str, int] | None = None) -> RowSource:
        if self._last is not None and upto is None:
            return self._last
        for folder, opened in zip(self._folders, self._opened, strict=True):
            if opened is not None and opened.blocks:
                self._source.check_schema(opened.schema, folder.data_dir)
            elif folder.schema is not None and folder.blocks:
                self._source.check_schema(folder.schema, folder.data_dir)
        layouts = layouts_of(self._source.schema or self._folders[0].schema or Schema([]))
        blocks = self._blocks()
        if upto is not None:
            blocks = [
                block
                for block in blocks
                if block.is_edit or block.sequence <= upto.get(block.writer, -1)
            ]
        snapshot = self._rows_of(blocks, layouts)
        if upto is None:
            self._report_broken(snapshot.index)
            self._last = snapshot
        return snapshot

    def _rows_of(self, blocks: list[Block], layouts: Mapping[str, RowLayout]) -> RowSource:
        if not self._source.is_remote and can_map([*blocks, *self._pinned]):
            return self._mapped(blocks, layouts)
        index = self._index(blocks, [])
        if self._source.is_remote:
            return RemoteBlocks(index, layouts, self._remote_folders)
        return BlockFiles(index, layouts)

    def _mapped(self, blocks: list[Block], layouts: Mapping[str, RowLayout]) -> RowSource:
        """Map new block files into memory, and return a snapshot of the episodes of all blocks.

        Blocks that cannot be mapped are reported and left out.
        """
        files = self._files
        if files is None or files.layouts is not layouts or not files.has_room(blocks):
            # A new `FileMap` cannot map deleted blocks, so their trajectories become unreadable.
            files = FileMap(layouts, blocks, self._source.chunk_cache_bytes)
            self._files = files
        mapped = []
        for block in blocks:
            try:
                if not block.is_edit:  # Edits have no rows to map, and the next edit deletes them.
                    files.add(block)
                mapped.append(block)
            except FileNotFoundError:
                self._source.count_lost([block.key])
            except RolloutDataError as problem:
                self._source.report(problem)
        # The index cache is used only if it describes exactly the blocks of this snapshot.
        is_as_scanned = (
            self._adopted is None
            and not self._pinned
            and mapped == self._blocks()
            and not any(self._opened)
        )
        is_whole = is_as_scanned and len(self._folders) == 1 and self._choices[0].is_all
        built = self._folders[0].built if is_whole else None
        # Blocks that another process listed keep their numbers even if they cannot be mapped here,
        # since both processes use the same index.
        known = mapped if self._adopted is None else blocks
        self._next_release_s = 0.0
        return MappedBlocks(self._index(known, self._pinned, built), layouts, files)

    def _index(
        self,
        blocks: list[Block],
        pinned: list[Block],
        built: Mapping[str, np.ndarray] | None = None,
    ) -> TrajectoryIndex:
        """Return the trajectory index of these blocks, from shared memory if it is stored there."""
        shared = self._shared[0]
        wanted = (*blocks, *pinned)
        if shared is not None and (shared.blocks, shared.num_present) == (wanted, len(blocks)):
            return shared
        return TrajectoryIndex(wanted, len(blocks), built)

    def _report_broken(self, index: TrajectoryIndex) -> None:
        """Update the reported problem about trajectories whose blocks are missing.

        A warning is issued only the first time.
        """
        problems = self._source.problems
        if self._broken is not None and self._broken in problems:
            problems.remove(self._broken)
        if not index.num_broken:
            return
        problem = index.broken_problem(repr(", ".join(map(str, self._source.paths))))
        if self._broken is None:
            self._source.report(problem)
        else:
            problems.append(problem)
        self._broken = problem


class _Opened:
    """The blocks of an open recording, which are used instead of a scan of its folder.

    Args:
        source: Source of the recording.
        label: Prefix of writer names, as in `BlockFolder`.
    """

    def __init__(self, source: RowSource, label: str) -> None:
        self.schema: Schema = source.layouts[DATA].schema
        self.metadata: Mapping[str, Any] = source.metadata
        self.problems: list[RolloutDataError] = source.problems
        self.blocks = [replace(block, writer=label + block.writer) for block in source.blocks]


def _identities(blocks: Iterable[Block]) -> set[Any]:
    return {block.identity for block in blocks}
