"""Data folders as one source of trajectories: what is there now, as an index and a store of rows.

One rule: a snapshot never changes; `refresh` makes a new one when the folders have. A file that
cannot be read is reported once, by name, and the rest goes on.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from storage.errors import DataFileError, RolloutDataError, RolloutDataWarning, UsageError
from storage.fields import Schema

from .block_folder import BlockFolder
from .block_header import layouts_of, read_header
from .chunk_files import CHUNK_CACHE_BYTES
from .formats.trajectory_folder import FolderScan, is_trajectory_folder, read_chunk_rows, scan_trajectory_folder
from .frames import FileFrames, FileMap, FrameStore, MappedFrames, Place, can_map
from .index import Block, Int64s, TrajectoryIndex
from .metadata import read_metadata

#: Gives the blocks of the trajectories that are being played; only asked if the folders have changed.
BlocksInUse = Callable[[], Collection[Block]]
DataDirs = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def absolute_paths(data_dir: DataDirs) -> list[Path]:
    """Give the folders of a `data_dir` argument so that they stay the same when the process goes elsewhere."""
    try:
        listed = [data_dir] if isinstance(data_dir, (str, os.PathLike)) else list(data_dir)
        return [Path(path).absolute() for path in listed]
    except TypeError as cause:
        raise UsageError("open the dataset", "", "a path or a list of paths", repr(data_dir)) from cause


def as_paths(data_dir: DataDirs) -> list[Path]:
    """Give the folders of a `data_dir` argument, absolute; each must exist."""
    paths = absolute_paths(data_dir)
    if not paths:
        raise UsageError("open the dataset", "", "at least one data folder", "none")
    for path in paths:
        if not path.is_dir():
            raise UsageError(
                "open the dataset", repr(str(path)), "a folder", "a file" if path.exists() else "nothing there"
            )
    return paths


class Source:
    """The blocks of one or several data folders.

    Attributes:
        problems: Everything that was left out or repaired, in the order in which it was found.
        num_vanished_blocks: Blocks that were removed while they were in use or being opened.
    """

    def __init__(
        self, data_dir: DataDirs, verify_on_open: bool = False, chunk_cache_bytes: int = CHUNK_CACHE_BYTES
    ) -> None:
        self.paths = as_paths(data_dir)
        self.problems: list[RolloutDataError] = []
        self.num_vanished_blocks = 0
        self._reported: set[str] = set()
        self._verify_on_open, self._chunk_cache_bytes = verify_on_open, chunk_cache_bytes
        self._schema: Schema | None = None
        self._open_folders()

    def _open_folders(self) -> None:
        raise UsageError("open the dataset", "", "a known kind of folder", type(self).__name__)

    @property
    def metadata(self) -> dict[str, Any]:
        """Contents of the first folder's metadata.json, with the established totals."""
        return {}

    def refresh(self, in_use: BlocksInUse = tuple) -> None:
        """Look at the folders again; blocks that are `in_use` stay readable although they are gone."""

    def snapshot(self, upto: Mapping[str, int] | None = None) -> FrameStore:
        """Give what is there now; with `upto` only blocks up to this sequence number of each writer."""
        raise UsageError("open the dataset", "", "a known kind of folder", type(self).__name__)

    def report(self, problem: RolloutDataError) -> None:
        """Warn of a problem, once."""
        if str(problem) not in self._reported:
            self._reported.add(str(problem))
            self.problems.append(problem)
            warnings.warn(str(problem), RolloutDataWarning, stacklevel=2)

    def _checked_schema(self, schema: Schema, where: str) -> Schema:
        if self._schema is None:
            self._schema = schema
        elif difference := self._schema.difference(schema):
            raise DataFileError(
                "open the folders together",
                repr(where),
                f"the fields of {str(self.paths[0])!r}",
                difference,
                "Open them as separate datasets",
            )
        return self._schema


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

    def refresh(self, in_use: BlocksInUse = tuple) -> None:
        has_changed = self._last is None or bool(self._pinned)
        for folder in self._folders:
            has_changed |= folder.refresh()
            for problem in folder.problems.values():
                self.report(problem)
        if not has_changed:
            return
        present = {block.path for block in self._blocks()}
        gone = [block for block in in_use() if block.path not in present]
        if self._last is None or gone != self._pinned or present != {block.path for block in self._last.index.blocks}:
            self.num_vanished_blocks += sum(block not in self._pinned for block in gone)
            self._pinned = gone
            self._last = None

    def _blocks(self) -> list[Block]:
        return [folder.blocks[name] for folder in self._folders for name in sorted(folder.blocks)]

    def snapshot(self, upto: Mapping[str, int] | None = None) -> FrameStore:
        if self._last is not None and upto is None:
            return self._last
        for folder in self._folders:
            if folder.schema is not None and folder.blocks:
                self._checked_schema(folder.schema, str(folder.data_dir))
        layouts = layouts_of(self._schema or self._folders[0].schema or Schema([]))
        blocks = self._blocks()
        if upto is not None:
            blocks = [block for block in blocks if block.sequence <= upto.get(block.writer, -1)]
        if not can_map([*blocks, *self._pinned]):
            self._last = FileFrames(
                TrajectoryIndex(blocks), layouts, lambda block, place: _read_block(block, place, layouts)
            )
            return self._last
        if self._files is None or self._files.layouts is not layouts or not self._files.has_room(blocks):
            # Blocks that are gone cannot be mapped again: what is played of them ends here.
            self._files, self._pinned = FileMap(layouts, blocks, self._chunk_cache_bytes), []
        mapped = self._mapped(blocks, self._files)
        is_as_cached = upto is None and mapped == blocks and not self._pinned and len(self._folders) == 1
        built = self._folders[0].built if is_as_cached else None
        index = TrajectoryIndex([*mapped, *self._pinned], built, num_present=len(mapped))
        store = MappedFrames(index, layouts, self._files)
        if upto is None:
            self._last = store
        return store

    def _mapped(self, blocks: list[Block], files: FileMap) -> list[Block]:
        """Map the blocks; give those that are still there."""
        kept = []
        for block in blocks:
            try:
                files.add(block)
                kept.append(block)
            except FileNotFoundError:
                self.num_vanished_blocks += 1
            except RolloutDataError as problem:
                self.report(problem)
        return kept


class FolderSource(Source):
    """Folders of the older `trajectory_K/traj_START_END.pickle` layout."""

    @property
    def metadata(self) -> dict[str, Any]:
        return dict(self._scans[0].metadata)

    def _open_folders(self) -> None:
        self._scans = [scan_trajectory_folder(path) for path in self.paths]
        self._last = self._store()

    def refresh(self, in_use: BlocksInUse = tuple) -> None:
        scans = [scan_trajectory_folder(old.data_dir, previous=old) for old in self._scans]
        if [scan.chunk_paths for scan in scans] != [old.chunk_paths for old in self._scans]:
            present = {path for scan in scans for path in scan.chunk_paths}
            self.num_vanished_blocks += sum(block.path not in present for block in in_use())
            self._scans = scans
            self._last = self._store()

    def _store(self) -> FrameStore:
        """Index the chunks of all scans; each chunk is a block."""
        chunks: dict[Path, tuple[FolderScan, int]] = {}
        blocks: list[Block] = []
        for number, scan in enumerate(self._scans):
            for problem in scan.problems:
                self.report(problem)
            self._checked_schema(scan.schema, str(scan.data_dir))
            fragments = scan.fragments.copy()
            folder_of = [_key(scan, path) for path in scan.chunk_paths]
            fragments["trajectory"] = _numbers_within(np.array(folder_of)[scan.chunk_of], fragments["trajectory"])
            parts = np.split(fragments, np.searchsorted(scan.chunk_of, np.arange(1, len(scan.chunk_paths))))
            for chunk, path in enumerate(scan.chunk_paths):
                chunks[path] = (scan, chunk)
                blocks.append(Block(path, f"{number}:{folder_of[chunk]}", chunk, parts[chunk]))

        def read(block: Block, place: Place) -> np.ndarray:
            scan, chunk = chunks[block.path]
            return read_chunk_rows(scan, chunk, columns=[place[1]])[place[1]]

        return FileFrames(TrajectoryIndex(blocks), layouts_of(self._schema or Schema([])), read)

    def snapshot(self, upto: Mapping[str, int] | None = None) -> FrameStore:
        return self._last


def _key(scan: FolderScan, chunk_path: Path) -> str:
    """Name a trajectory folder so that it is the same after another scan."""
    return chunk_path.parent.relative_to(scan.data_dir).as_posix()


def _numbers_within(folder: np.ndarray, trajectory: Int64s) -> Int64s:
    """Number trajectories within their folder, 0 in all but the folders that hold several."""
    _, folder_number = np.unique(folder, return_inverse=True)
    pairs, position = np.unique(np.stack([folder_number, trajectory]), axis=1, return_inverse=True)
    return np.arange(pairs.shape[1])[position.reshape(-1)] - np.searchsorted(pairs[0], folder_number)


def open_source(data_dir: DataDirs, verify_on_open: bool = False, chunk_cache_bytes: int = CHUNK_CACHE_BYTES) -> Source:
    """Open folders of block files, or of the older trajectory layout; `chunk_cache_bytes`: see `WindowDataset`."""
    paths = as_paths(data_dir)
    kinds = {path: is_trajectory_folder(path) for path in paths}
    if len(set(kinds.values())) > 1:
        old = [str(path) for path, is_old in kinds.items() if is_old]
        raise UsageError(
            "open the folders together",
            "",
            "folders of one kind",
            f"trajectory folders in {', '.join(old)} beside block files",
        )
    return FolderSource(paths) if kinds[paths[0]] else BlockSource(paths, verify_on_open, chunk_cache_bytes)


def _read_block(block: Block, place: Place, layouts: Mapping[str, Any]) -> np.ndarray:
    """Map or decode one kind of row of one block, where blocks cannot be mapped side by side."""
    offset, num_rows = block.places[place]
    column = layouts[place[0]].columns[place[1]]
    if column.is_coded:
        return read_header(block.path).read_rows(*place, 0, num_rows)
    row_bytes = column.row_bytes
    if num_rows == 0:
        return np.zeros((0, row_bytes), np.uint8)
    return np.memmap(block.path, np.uint8, "r", offset, (num_rows, row_bytes))


def writers_upto(index: TrajectoryIndex) -> dict[str, int]:
    """Writer -> the last sequence number that a snapshot knows: with `snapshot(upto=...)` the same again."""
    found: dict[str, int] = {}
    for block in index.blocks[: index.num_present]:
        found[block.writer] = max(found.get(block.writer, -1), block.sequence)
    return found


def blocks_of(index: TrajectoryIndex, trajectories: Int64s) -> list[Block]:
    """The blocks that hold frames or final observations of these trajectories."""
    bounds = np.searchsorted(index.fragment_frame, index.first_frame)
    parts = [index.fragment_block[bounds[t] : bounds[t + 1]] for t in np.unique(trajectories).tolist()]
    finals = index.final_block[trajectories]
    used = np.unique(np.concatenate([finals[finals >= 0], *parts]))
    return [index.blocks[block] for block in used.tolist()]
