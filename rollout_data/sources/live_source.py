"""`LiveSource`: the growing folders or files of a dataset, and snapshots of their episodes.

A snapshot never changes. `refresh` scans the folders, and the next snapshot contains the changes.
Unreadable trajectories are marked and reported once; all other trajectories are read.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from storage.core import arguments
from storage.core.fields import Schema
from storage.errors import DataFileError, MissingFolderError, UnansweredError, UsageError

from ..blocks.block_folder import block_entries, entries_of, read_metadata
from ..blocks.block_header import METADATA_NAME, layouts_of
from ..blocks.trajectory_index import (
    Int64s,
    LostBlockError,
    TrajectoryIndex,
    lost_trajectories,
)
from ..remote.locations import DataDirs, Origin, RemoteOptions
from .block_scanner import BlockScanner
from .file_scanner import FileScanner
from .format_registry import trajectory_folders
from .origins import Origins, mixed_conventions
from .processes.shared_memory import Spot
from .rows.cached_rows import CachedRows
from .rows.chunk_decoder import CHUNK_CACHE_BYTES
from .rows.row_source import RowSource
from .rows.unmapped_rows import BlockFiles
from .scanner import BlocksInUse, Scanner

#: Unreadable trajectories: pairs of trajectory numbers, int64, and the error of reading them.
Losses = list[tuple[Int64s, DataFileError]]


class LiveSource(Origins):
    """Scans the folders or files of a dataset and creates snapshots of their episodes.

    The format of an empty folder is detected when a later scan finds data in it.

    Args:
        is_awaited: Whether the folders may be missing at first. Until the folders exist, the
            dataset has no trajectories.
    """

    def __init__(
        self,
        data_dir: DataDirs,
        verify_on_open: bool = False,
        chunk_cache_bytes: int = CHUNK_CACHE_BYTES,
        remote: RemoteOptions | None = None,
        *,
        is_awaited: bool = False,
    ) -> None:
        super().__init__(data_dir, verify_on_open, chunk_cache_bytes, remote)
        self._scanner: Scanner | None = None
        self._has_compared = False
        self.is_awaited = is_awaited
        #: The error of the last scan, if a folder was missing that may be created later; or None.
        self.missing: MissingFolderError | None = None
        try:
            self._create_scanner(_common_scanner(self.origins))
        except MissingFolderError as missing:
            if not is_awaited:
                raise
            self.missing = missing

    def _create_scanner(self, scanner: type[Scanner] | None) -> None:
        if self._scanner is None and scanner is not None:
            # A weak reference avoids a reference cycle, which would delay unmapping the files.
            self._scanner = scanner(weakref.proxy(self))

    @property
    def holds_blocks(self) -> bool:
        """Whether the data are folders of block files."""
        return isinstance(self._scanner, BlockScanner)

    @property
    def format(self) -> str:
        """Name of the data format; "" as long as all folders are empty."""
        return "" if self._scanner is None else self._scanner.format

    @property
    def metadata(self) -> dict[str, Any]:
        """Content of the first folder's metadata.json, with total counts of frames and episodes."""
        return read_metadata(self.paths[0]) if self._scanner is None else self._scanner.metadata

    @property
    def conventions(self) -> set[tuple[str, str]]:
        """Control modes and quaternion orders in the metadata: pairs (key, value)."""
        return set() if self._scanner is None else self._scanner.conventions

    def refresh(self, in_use: BlocksInUse = tuple) -> None:
        """Scan the folders again. Deleted blocks that `in_use` returns stay readable."""
        self.missing = None
        try:
            self._scan(in_use)
        except MissingFolderError as missing:
            if not self.is_awaited or self._has_compared:
                raise
            self.missing = missing

    def _scan(self, in_use: BlocksInUse) -> None:
        if self._scanner is None:
            self._create_scanner(_common_scanner(self.origins))
        if self._scanner is None:
            return
        self._scanner.refresh(in_use)
        if not self._has_compared:
            for remark in mixed_conventions(self.conventions):
                self.advise(remark)
        self._has_compared = True

    def release(self, in_use: BlocksInUse = tuple) -> None:
        """Unmap deleted blocks to free their disk space, except blocks that `in_use` returns.

        Called between batches. Most calls are cheap, since folders are listed at most once per
        second. Reading an unmapped block from an earlier snapshot raises `LostBlockError`.
        """
        if self._scanner is not None:
            self._scanner.release(in_use)

    def snapshot(self, upto: Mapping[str, int] | None = None) -> RowSource:
        """Return a snapshot of the episodes that the last scan found.

        Args:
            upto: Maps writers to the sequence number of the last block to include; None includes
                all blocks.
        """
        if self._scanner is None:
            return BlockFiles(TrajectoryIndex([]), layouts_of(Schema([])))
        return self._scanner.snapshot(upto)

    def listing(self) -> Any:
        """Return the result of the last scan, which other processes use instead of scanning.

        If nothing changed, the same object is returned.
        """
        return None if self._scanner is None else self._scanner.listing()

    def shared(self, snapshot: RowSource) -> Spot | None:
        """Copy a snapshot's index into shared memory; return its location, None if impossible."""
        return None if self._scanner is None else self._scanner.shared(snapshot)

    def adopt(self, listing: Any, spot: Spot | None = None) -> bool:
        """Use the result of another process's scan instead of scanning.

        Args:
            listing: Result of `listing` in the other process; None if there is none.
            spot: Result of `shared` in the other process; None if there is none.

        Returns:
            Whether a listing or an index in shared memory was used.
        """
        if listing is not None:
            self._create_scanner(listing[0])
        return self._scanner is not None and self._scanner.adopt(listing, spot)

    def forget(self, problem: DataFileError, keys: Iterable[tuple[str, int]]) -> None:
        """Count and report unreadable trajectories; later scans skip a deleted block.

        Args:
            problem: Error of reading the trajectories.
            keys: (writer, number) of each trajectory.
        """
        lost = {(writer, number) for writer, number in keys}
        if isinstance(problem, LostBlockError):
            # Several passes may report the same trajectory of a deleted block. Count it once.
            lost -= self._lost_with_blocks
            self._lost_with_blocks |= lost
        self.num_lost_trajectories += len(lost)
        if isinstance(problem, LostBlockError):
            self.count_lost([problem.key])
            if self._scanner is not None:
                self._scanner.leave_out(problem.key)
        self.report(problem)

    def note_missing(self, keys: Iterable[tuple[str, int]]) -> list[LostBlockError]:
        """Count and report trajectories that no longer exist; return an error for each new one.

        Args:
            keys: (writer, number) of trajectories that a saved state of playback names, but that
                the snapshot does not contain.
        """
        errors = []
        for writer, number in keys:
            if (writer, number) in self._lost_with_blocks:
                continue
            folders = [place for place, label in enumerate(self.labels) if writer.startswith(label)]
            folder = folders[0] if folders else 0
            name = f"rollout_{writer.removeprefix(self.labels[folder])}_*.h5"
            files = self.paths[folder] / name
            error = lost_trajectories([(writer, number)], files)
            error.key = files, f"trajectory {number}"
            self.forget(error, [(writer, number)])
            errors.append(error)
        return errors

    def leave_out(
        self, snapshot: RowSource, trajectories: Int64s, problem: DataFileError, skips: bool
    ) -> Losses:
        """Mark unreadable trajectories in a snapshot and report them.

        The remaining frames of a marked trajectory are no longer `valid` in batches.

        Args:
            snapshot: The snapshot that was read.
            trajectories: Trajectories that may be unreadable, int64 `[K]`.
            problem: Error of reading them.
            skips: Whether to mark damaged trajectories, too. Trajectories of deleted blocks are
                always marked.

        Returns:
            The newly marked trajectories, with their errors.

        Raises:
            DataFileError: No trajectory was marked, for example because a store denies access or
                does not answer. The error is `problem`.
        """
        if isinstance(problem, UnansweredError):
            raise problem
        damaged: Losses = []
        if isinstance(problem, LostBlockError):
            blocks = [
                number
                for number, block in enumerate(snapshot.index.blocks)
                if block.key == problem.key
            ]
            damaged.append((snapshot.index.trajectories_in(blocks), problem))
        elif skips:
            for trajectory in trajectories.tolist():
                error = _damage(snapshot, trajectory)
                if error is not None:
                    damaged.append((np.array([trajectory]), error))
        losses: Losses = []
        for numbers, error in damaged:
            new = numbers[~snapshot.is_lost[numbers]]
            if len(new):
                losses.append((new, error))
        if not losses:
            raise problem
        for numbers, error in losses:
            self.forget(error, snapshot.index.keys(numbers))
            snapshot.is_lost[numbers] = True
        return losses

    def check_readable(self, snapshot: RowSource, trajectories: Int64s, skips: bool) -> None:
        """Check that at least one of these trajectories can be read.

        Trajectories are tried in order up to the first readable one; unreadable ones are marked.

        Raises:
            DataFileError: No trajectory can be read, or a store denies access or does not answer.
        """
        for trajectory in trajectories.tolist():
            is_missing = trajectory >= len(snapshot.index)
            if is_missing or snapshot.is_lost[trajectory]:
                continue
            try:
                snapshot.probe(trajectory)
                return
            except DataFileError as problem:
                self.leave_out(snapshot, np.array([trajectory]), problem, skips)
        paths = ", ".join(map(str, self.paths))
        message = f"None of the {len(trajectories)} trajectories of {paths!r} can be read."
        if not self.problems:
            raise DataFileError(message)
        cause = self.problems[-1]
        raise DataFileError(f"{message} The last error: {cause.message}") from cause

    def note_loss(
        self, snapshot: RowSource, keys: Sequence[tuple[str, int]], problem: DataFileError
    ) -> None:
        """Mark and report trajectories that another process could not read.

        Trajectories that are already marked are ignored.

        Args:
            snapshot: The snapshot in which to mark the trajectories.
            keys: (writer, number) of each trajectory.
            problem: Error that the other process raised.
        """
        numbers = snapshot.index.find(keys)
        is_new = [
            key not in self._lost_with_blocks if number < 0 else not snapshot.is_lost[number]
            for key, number in zip(keys, numbers.tolist(), strict=True)
        ]
        snapshot.is_lost[numbers[numbers >= 0]] = True
        if any(is_new):
            self.forget(problem, [key for key, new in zip(keys, is_new, strict=True) if new])


def _damage(snapshot: RowSource, trajectory: int) -> DataFileError | None:
    """Read an entire trajectory to check it; return the error if it is damaged, otherwise None.

    The result is None, too, if the trajectory is already marked as lost.
    """
    if snapshot.is_lost[trajectory]:
        return None
    try:
        CachedRows(snapshot, np.array([trajectory]), snapshot.device)
    except UnansweredError:
        raise
    except DataFileError as problem:
        return problem
    return None


def _common_scanner(origins: Sequence[Origin]) -> type[Scanner] | None:
    """Return the scanner class that can read all locations; None if all folders are empty.

    Raises:
        UsageError: The locations have several formats, or only some locations are URLs.
    """
    is_remote = [arguments.is_url(origin.path) for origin in origins]
    if any(is_remote) and not all(is_remote):
        raise UsageError("local folders and URLs cannot be mixed in one dataset.")
    if all(is_remote):
        return BlockScanner
    scanners = {origin.path: scanner_of(origin) for origin in origins}
    known = {path: scanner for path, scanner in scanners.items() if scanner is not None}
    if len(set(known.values())) > 1:
        kinds = [f"{scanner.description} in {path}" for path, scanner in known.items()]
        raise UsageError(
            f"the folders have different formats: {'; '.join(kinds)}. Convert them to one format, "
            "or mix their windows with a WindowMixture."
        )
    return next(iter(known.values()), None)


def scanner_of(origin: Origin) -> type[Scanner] | None:
    """Return the scanner class that can read a location; None if it is missing or empty."""
    if origin.opened is not None:
        return origin.opened.scanner or FileScanner
    if arguments.is_url(origin.path):
        return BlockScanner
    if origin.format == BlockScanner.format:
        return BlockScanner
    if origin.format is not None:
        folders = trajectory_folders()
        return folders if origin.format == folders.format else FileScanner
    if origin.path.is_file():
        return FileScanner
    if _has_only_blocks(origin.path):
        return BlockScanner
    has_blocks = any(entry.name.startswith("rollout_") for entry in block_entries(origin.path))
    if not has_blocks and FileScanner.is_there(origin.path):
        return FileScanner
    scanners = (trajectory_folders(), BlockScanner)
    return next((scanner for scanner in scanners if scanner.is_there(origin.path)), None)


def is_block_folder(origin: Origin) -> bool:
    """Return whether a location is a folder of block files on this machine, or an empty folder."""
    return not arguments.is_url(origin.path) and scanner_of(origin) in (BlockScanner, None)


def _has_only_blocks(folder: Path) -> bool:
    """Return whether a folder contains only block files and metadata.

    Such a folder needs no detection of its format, which would import the modules of all formats.
    """
    names = {entry.name for entry in entries_of(folder) if not entry.name.startswith(".")}
    blocks = {name for name in names if name.startswith("rollout_") and name.endswith(".h5")}
    return bool(blocks) and names <= {*blocks, METADATA_NAME}
