"""`LiveSource`: the growing folders or files of a dataset, and snapshots of their episodes.

A snapshot never changes. After a `refresh`, a new snapshot has the changes of the folders.
Unreadable data are marked and reported once. Only the trajectories concerned are lost.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from storage.core import arguments
from storage.core.fields import Schema
from storage.errors import DataFileError, MissingFolderError, UnansweredError, UsageError

from ..blocks.block_folder import block_entries, read_metadata
from ..blocks.block_header import layouts_of
from ..blocks.missing_trajectories import NONE_GONE, Lengths
from ..blocks.trajectory_index import Int64s, LostBlockError, TrajectoryIndex
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

#: Groups of trajectories that cannot be read, each group with its error.
Losses = list[tuple[Int64s, DataFileError]]


class LiveSource(Origins):
    """The folders or files of a dataset, which are scanned to create snapshots of their episodes.

    The format of an empty folder is detected by a later scan.

    Args:
        is_awaited: Whether the folders may be missing at first. Until they exist, the dataset has
            no trajectories.
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
        #: Error of a missing folder at the last scan, if `is_awaited`; else None.
        self.missing: MissingFolderError | None = None
        try:
            self._create_scanner(_common_scanner(self.origins))
        except MissingFolderError as missing:
            if not is_awaited:
                raise
            self.missing = missing

    def _create_scanner(self, scanner: type[Scanner] | None) -> None:
        if self._scanner is None and scanner is not None:
            # A weak reference avoids a cycle, so that files are unmapped with the last snapshot.
            self._scanner = scanner(weakref.proxy(self))

    @property
    def holds_blocks(self) -> bool:
        """Whether the data are folders of block files."""
        return isinstance(self._scanner, BlockScanner)

    @property
    def format(self) -> str:
        """Name of the format; "" as long as all folders are empty."""
        return "" if self._scanner is None else self._scanner.format

    @property
    def metadata(self) -> dict[str, Any]:
        """Content of the first folder's metadata.json, with the established totals."""
        return read_metadata(self.paths[0]) if self._scanner is None else self._scanner.metadata

    @property
    def conventions(self) -> set[tuple[str, str]]:
        """Control modes and quaternion orders in the metadata; see `origins.conventions`."""
        return set() if self._scanner is None else self._scanner.conventions

    def refresh(self, in_use: BlocksInUse = tuple) -> None:
        """Scan the folders again. Deleted blocks that are `in_use` stay readable."""
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
        """Unmap deleted blocks that are not `in_use`, to free their disk space.

        Called between batches. The call is cheap, since it seldom lists the folders. Reading an
        unmapped block from an earlier snapshot raises `LostBlockError`.
        """
        if self._scanner is not None:
            self._scanner.release(in_use)

    def snapshot(
        self, upto: Mapping[str, int] | None = None, gone: Lengths = NONE_GONE
    ) -> RowSource:
        """Return the episodes of the last scan.

        Args:
            upto: Writer -> last block number to include; None includes all blocks.
            gone: Deleted trajectories that still count: (writer, number) -> frames.
        """
        if self._scanner is None:
            return BlockFiles(TrajectoryIndex([]), layouts_of(Schema([])))
        return self._scanner.snapshot(upto, gone)

    def listing(self) -> Any:
        """Return the last scan, for `adopt` in another process; the same object if unchanged."""
        return None if self._scanner is None else self._scanner.listing()

    def shared(self, snapshot: RowSource) -> Spot | None:
        """Return shared memory with the index of a snapshot, for other local processes, or None."""
        return None if self._scanner is None else self._scanner.shared(snapshot)

    def adopt(self, listing: Any, spot: Spot | None = None) -> bool:
        """Use the listing and the shared index of another process instead of a scan.

        Returns:
            Whether there was a listing or an index.
        """
        if listing is not None:
            self._create_scanner(listing[0])
        return self._scanner is not None and self._scanner.adopt(listing, spot)

    def forget(self, problem: DataFileError, keys: Iterable[tuple[str, int]]) -> None:
        """Report trajectories that cannot be read. Later scans skip a lost block."""
        lost = {(writer, number) for writer, number in keys}
        if isinstance(problem, LostBlockError):
            # Two passes may have the same trajectory of a lost block, which is counted once.
            lost -= self._lost_with_blocks
            self._lost_with_blocks |= lost
        self.num_lost_trajectories += len(lost)
        if isinstance(problem, LostBlockError):
            self.count_lost([problem.key])
            if self._scanner is not None:
                self._scanner.leave_out(problem.key)
        self.report(problem)

    def leave_out(
        self, snapshot: RowSource, trajectories: Int64s, problem: DataFileError, skips: bool
    ) -> Losses:
        """Mark and report unreadable trajectories. Their remaining frames are not `valid`.

        Returns:
            The newly marked trajectories, with their errors.

        Raises:
            DataFileError: `problem`, if it concerns none of the trajectories, or if no block was
                lost and `skips` is False. A store that denies access or does not answer concerns
                none of them.
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
        """Find the first readable trajectory; leave out all unreadable trajectories before it.

        Raises:
            DataFileError: No trajectory can be read, or a store denies access or does not answer.
        """
        for trajectory in trajectories.tolist():
            if snapshot.is_lost[trajectory]:
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
        """Mark and report trajectories that another process could not read, except known losses."""
        numbers = snapshot.index.find(keys)
        is_new = [number < 0 or not snapshot.is_lost[number] for number in numbers.tolist()]
        snapshot.is_lost[numbers[numbers >= 0]] = True
        if any(is_new):
            self.forget(problem, [key for key, new in zip(keys, is_new, strict=True) if new])


def _damage(snapshot: RowSource, trajectory: int) -> DataFileError | None:
    """Return the error of reading a trajectory; None if it is readable or known to be lost."""
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
    """Return the scanner class of all locations; None as long as all folders are empty.

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
    """Return the scanner class of a location; None if the location is missing or empty."""
    if origin.opened is not None:
        return origin.opened.scanner or FileScanner
    if arguments.is_url(origin.path):
        return BlockScanner
    if origin.format is not None:
        scanner_of_format = {
            scanner.format: scanner for scanner in (trajectory_folders(), BlockScanner)
        }
        return scanner_of_format.get(origin.format, FileScanner)
    if origin.path.is_file():
        return FileScanner
    has_blocks = any(entry.name.startswith("rollout_") for entry in block_entries(origin.path))
    if not has_blocks and FileScanner.is_there(origin.path):
        return FileScanner
    scanners = (trajectory_folders(), BlockScanner)
    return next((scanner for scanner in scanners if scanner.is_there(origin.path)), None)
