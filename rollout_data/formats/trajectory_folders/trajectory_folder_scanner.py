"""`TrajectoryFolderScanner`: lists the chunk files of trajectory folders, one block per file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from storage.core.fields import Schema
from storage.errors import DataFileError

from ...blocks.block import Block, Key
from ...blocks.block_folder import block_entries
from ...blocks.block_header import DATA, layouts_of
from ...blocks.row_layout import RowLayout
from ...blocks.trajectory_index import TrajectoryIndex
from ...sources.episode_info import ABSENT
from ...sources.origins import Origins, conventions
from ...sources.processes.shared_memory import Spot
from ...sources.rows.row_source import GONE, Place, RowSource
from ...sources.rows.unmapped_rows import UnmappedRows
from ...sources.scanner import BlocksInUse, Choice, Scanner
from ..import_errors import copied_actions
from .trajectory_folder import FolderScan, numbers_within, read_chunk_rows, scan_trajectory_folder
from .trajectory_listing import ChunkFile, is_trajectory_folder

#: Keys in metadata.json that only DAgger datasets have. The actions of such a dataset are labels of
#: a teacher, not executed actions.
_DAGGER = {"training_policy_logdir", "update_times_scale", "action_sample_std"}


class TrajectoryFolderScanner(Scanner):
    """Scanner of trajectory folders: files `trajectory_K/traj_START_END.pickle`.

    Each chunk is one block. An unreadable chunk is left out until its file changes. The fields of
    the first scan with chunks are kept.
    """

    format = "trajectory-folders"
    description = "trajectory folders"

    def __init__(self, source: Origins) -> None:
        self._source = source
        self._unreadable: set[ChunkFile] = set()
        self._mixed: set[Path] = set()
        #: Scans that open recordings have already made, in the order of the folders; None for a
        #: folder without an open recording.
        self._opened = [
            None if origin.opened is None else origin.opened.listing[1][0]
            for origin in source.origins
        ]
        self._scans = [
            scan_trajectory_folder(path) if scan is None else scan
            for path, scan in zip(source.paths, self._opened, strict=True)
        ]
        self._listing = (TrajectoryFolderScanner, self._scans)
        self._last = self._rows()
        self._report_left_out()
        labelled = [scan.data_dir for scan in self._scans if _DAGGER & scan.metadata.keys()]
        if labelled:
            where = repr(str(labelled[0]))
            source.advise(
                DataFileError(
                    f"{where} is a DAgger dataset. Its actions are labels of a teacher, not the "
                    "actions that were executed."
                )
            )
        for scan in self._scans:
            self._report_copies(scan)

    @staticmethod
    def is_there(path: Path) -> bool:
        # An empty folder `trajectory_K` may be a recording that has just started. If there are
        # block files, an empty folder is not sufficient, so that the blocks are read.
        return is_trajectory_folder(path, with_chunk=bool(block_entries(path)))

    @property
    def metadata(self) -> dict[str, Any]:
        return dict(self._scans[0].metadata)

    @property
    def conventions(self) -> set[tuple[str, str]]:
        return conventions(scan.metadata for scan in self._scans)

    def refresh(self, in_use: BlocksInUse) -> None:
        scans = []
        for old, opened in zip(self._scans, self._opened, strict=True):
            scan = opened
            if scan is None:
                scan = scan_trajectory_folder(old.data_dir, previous=old, without=self._unreadable)
            scans.append(scan)
        has_changed = list(map(_contents, scans)) != list(map(_contents, self._scans))
        self._scans = scans
        if has_changed:
            present = {(file.path, "") for scan in scans for file in scan.known}
            listed = {block.key for block in self._last.index.blocks}
            self._source.count_lost(listed - present, present)
            self._last = self._rows()
            self._listing = (TrajectoryFolderScanner, scans)
        self._report_left_out()

    def listing(self) -> Any:
        return self._listing

    def adopt(self, listing: Any, spot: Spot | None) -> bool:
        if listing is not None and listing is not self._listing:
            _, self._scans = self._listing = listing
            self._last = self._rows()
        return listing is not None

    def leave_out(self, key: Key) -> None:
        self._unreadable.update(
            file for scan in self._scans for file in scan.known if file.path == key[0]
        )

    def snapshot(self, upto: Mapping[str, int] | None = None) -> RowSource:
        return self._last

    def _report_copies(self, scan: FolderScan) -> None:
        """Report actions that may be copied observations, from the first fragment with 2 frames."""
        candidates = np.flatnonzero(scan.fragments["length"] > 1)
        if not len(candidates):
            return
        fragment = scan.fragments[candidates[0]]
        chunk = int(scan.chunk_of[candidates[0]])
        layout = layouts_of(scan.schema)[DATA]

        def read(name: str, num_frames: int) -> np.ndarray:
            column = layout.column_of[name].name
            start = fragment["row"]
            rows = read_chunk_rows(scan, chunk, columns=[column])[column]
            rows = rows[start : start + num_frames]
            values: np.ndarray = layout.decoded(name, torch.from_numpy(rows)).numpy()
            return values

        with suppress(DataFileError, OSError):  # Reading the chunk raises this error later.
            for problem in copied_actions(layout.schema, int(fragment["length"]), read):
                path = str(scan.chunk_paths[chunk])
                self._source.advise(DataFileError(f"{path!r}: {problem}"))

    def _report_left_out(self) -> None:
        for scan in self._scans:
            for problem in scan.problems:
                self._source.report(problem)
        for path in self._source.paths:
            entries = [] if path in self._mixed else block_entries(path)
            count = sum(entry.name.startswith("rollout_") for entry in entries)
            if count:
                self._mixed.add(path)
                noun = "block files" if count > 1 else "block file"
                problem = DataFileError(
                    f"{str(path)!r} contains trajectory folders and {count} {noun}. Only the "
                    f"trajectory folders are read. Move the {noun} to another folder."
                )
                self._source.report(problem)

    def _rows(self) -> ChunkRows:
        chunks: dict[Key, tuple[FolderScan, int]] = {}
        blocks: list[Block] = []
        for number, scan in enumerate(self._scans):
            if scan.signature:
                self._source.check_schema(scan.schema, scan.data_dir)
            blocks_of_scan = _blocks_of(scan, f"{number}:")
            for chunk, block in enumerate(blocks_of_scan):
                chunks[block.key] = scan, chunk
            blocks += Choice(self._source.origins[number], f"{number}:").of(blocks_of_scan)

        layouts = layouts_of(self._source.schema or Schema([]))
        return ChunkRows(TrajectoryIndex(blocks), layouts, chunks)


def _blocks_of(scan: FolderScan, label: str) -> list[Block]:
    """Return one block per chunk of a scan. The writer name of a block is its trajectory folder.

    Args:
        scan: Scan of a data folder.
        label: Prefix of writer names, which distinguishes several data folders.
    """
    folder_of_chunk = []
    for path in scan.chunk_paths:
        folder_of_chunk.append(path.parent.relative_to(scan.data_dir).as_posix())
    fragments = scan.fragments.copy()
    folder_of_fragment = np.array(folder_of_chunk)[scan.chunk_of]
    fragments["trajectory"] = numbers_within(folder_of_fragment, fragments["trajectory"])
    first_fragments = np.searchsorted(scan.chunk_of, np.arange(1, len(scan.chunk_paths)))
    fragments_of_chunk = np.split(fragments, first_fragments)

    files = {file.path: file for file in scan.known}
    blocks = []
    for chunk, path in enumerate(scan.chunk_paths):
        notes = []
        absent = scan.absent.get(path.parent)
        if absent:
            note = json.dumps({ABSENT: absent})
            numbers = np.unique(fragments_of_chunk[chunk]["trajectory"])
            notes = [(number, note) for number in numbers.tolist()]
        block = Block(
            path,
            f"{label}{folder_of_chunk[chunk]}",
            chunk,
            fragments_of_chunk[chunk],
            file_bytes=files[path].num_bytes,
            mtime_ns=files[path].mtime_ns,
            notes=tuple(notes),
        )
        blocks.append(block)
    return blocks


class ChunkRows(UnmappedRows):
    """Source of the rows in the chunks of trajectory folders.

    Args:
        chunks: Maps block keys to the scan with the chunk, and the position in `scan.chunk_paths`.
    """

    def __init__(
        self,
        index: TrajectoryIndex,
        layouts: Mapping[str, RowLayout],
        chunks: Mapping[Key, tuple[FolderScan, int]],
    ) -> None:
        super().__init__(index, layouts, losses=(*GONE, DataFileError))
        self._chunks = chunks

    def read_block(self, block: Block, place: Place) -> np.ndarray:
        scan, chunk = self._chunks[block.key]
        return read_chunk_rows(scan, chunk, columns=[place[1]])[place[1]]


def _contents(scan: FolderScan) -> Any:
    """Return the parts of a scan that differ if the readable data have changed."""
    return scan.chunk_paths, list(scan.known), scan.absent
