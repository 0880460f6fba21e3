"""Folders of the older trajectory layout as a source of trajectories.

One rule: a chunk is a block. One that cannot be read is left out until it has changed, and the
fields stay those of the first chunks that were found.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from storage.core.fields import Schema
from storage.errors import DataFileError

from ..foreign.trajectory_folder import FolderScan, read_chunk_rows, scan_trajectory_folder
from ..foreign.trajectory_listing import ChunkFile
from ..format.header import layouts_of
from ..index.folder import block_names
from ..index.index import Block, Int64s, LostBlockError, TrajectoryIndex
from .file_store import GONE, FileFrames
from .source_base import BlocksInUse, Source
from .store import FrameStore, Place


class FolderSource(Source):
    """Folders of the older `trajectory_K/traj_START_END.pickle` layout."""

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
            present = {file.path for scan in scans for file in scan.known}
            self._count_lost({block.path for block in self._last.index.blocks} - present, present)
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
            path = problem.path
            self._unreadable.update(scan.files[path] for scan in self._scans if path in scan.files)

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
        """Index the chunks of all scans; each chunk is a block."""
        chunks: dict[Path, tuple[FolderScan, int]] = {}
        blocks: list[Block] = []
        for number, scan in enumerate(self._scans):
            if scan.signature:
                self._check_schema(scan.schema, str(scan.data_dir))
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

        losses = (*GONE, DataFileError)
        return FileFrames(TrajectoryIndex(blocks), layouts_of(self._schema or Schema([])), read, losses)

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
