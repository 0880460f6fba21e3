"""`UnmappedRows`: base class for rows of files that are read on demand and cached."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from storage.errors import DataFileError, UnansweredError

from ...blocks.block import Block
from ...blocks.block_header import DATA, read_header
from ...blocks.row_layout import RowLayout
from ...blocks.trajectory_index import LostBlockError, Runs, TrajectoryIndex
from .chunk_decoder import CHUNK_CACHE_BYTES, row_cache
from .row_source import GONE, Place, RowSource

#: Number of rows to try in a large damaged block. If none of them is readable, the block counts as
#: entirely damaged.
_NUM_SAMPLES = 8
_MANY_ROWS = 64


class UnmappedRows(RowSource):
    """Rows of files that are not memory-mapped, mostly of other formats.

    They are read on demand and cached. Small rows are read by complete blocks. Large rows, such as
    images, are decoded in small groups, so that a random window decodes only the groups it needs.

    A subclass implements `read_block`. If parts of its files can be read, it also implements
    `read_part` and `group_of`, and sets `reads_parts`.

    Args:
        index: Index of the trajectories.
        layouts: Maps tables to row layouts.
        losses: Classes of errors that mean a permanent loss; converted to `LostBlockError`.
        max_cached_bytes: Size of the cache of complete blocks, in bytes.
        max_group_bytes: Size of the cache of groups of rows, in bytes.
    """

    #: Whether parts of a block can be read. Then the intact rows of a damaged block are read.
    reads_parts = False

    def __init__(
        self,
        index: TrajectoryIndex,
        layouts: Mapping[str, RowLayout],
        losses: tuple[type[Exception], ...] = GONE,
        max_cached_bytes: int = 1 << 30,
        max_group_bytes: int = CHUNK_CACHE_BYTES,
    ) -> None:
        super().__init__(index, layouts)
        self._losses = losses
        self._group_sizes: dict[tuple[int, Place], tuple[int | None, int]] = {}
        #: Errors of damaged rows in partly readable blocks. Maps (block, column) to errors by row.
        self._damaged: dict[tuple[int, Place], dict[int, DataFileError]] = {}
        #: (block, column) pairs without any readable row.
        self._broken: set[tuple[int, Place]] = set()
        self._cache = row_cache(max_cached_bytes, keeps_last=True)
        self._cached_groups = row_cache(max_group_bytes)

    @abstractmethod
    def read_block(self, block: Block, place: Place) -> np.ndarray:
        """Read all rows of one column of a block: uint8 `[num_rows, row_bytes]`."""

    def read_part(self, block: Block, place: Place, start: int, stop: int) -> np.ndarray:
        """Read rows `start:stop` of one column of a block: uint8 `[stop - start, row_bytes]`.

        Called only if `reads_parts` is True.
        """
        return self.read_block(block, place)[start:stop]

    def group_of(self, block: Block, place: Place) -> tuple[int | None, int]:
        """Return how many rows of a block are decoded together.

        Returns:
            Number of rows per group, and position of the block's first row in its group, since a
            block may start within a group. (None, 0) means that complete blocks are read. Other
            results require that `reads_parts` is True.
        """
        return None, 0

    def _copy(self, place: Place, runs: Runs, length: int, out: torch.Tensor) -> None:
        windows = (out if out.dim() == 3 else out[None]).view(torch.uint8).numpy()
        for to, block, row, count in zip(*(column.tolist() for column in runs), strict=True):
            window, begin = divmod(to, windows.shape[1])
            target = windows[window, begin : begin + count]
            group_rows, first_in_group = self._group_size(block, place)
            if group_rows is None:
                target[:] = self._rows_of_block(block, place, row, count)
            else:
                self._copy_groups(block, place, row, group_rows, first_in_group, target)

    def _group_size(self, block: int, place: Place) -> tuple[int | None, int]:
        """Return how many rows of a block are decoded together, from a cache."""
        key = block, place
        if key not in self._group_sizes:
            with self._losses_named(block):
                self._group_sizes[key] = self.group_of(self.index.blocks[block], place)
        return self._group_sizes[key]

    def _rows_of_block(self, block: int, place: Place, first: int, count: int) -> np.ndarray:
        """Return `count` rows of a block from row `first` on; read and cache the complete block."""
        rows: np.ndarray | None = self._cache.get((block, place))
        if rows is None:
            rows = self._read(block, place)
            self._cache.put((block, place), rows)
        damaged = self._damaged.get((block, place), {})
        for number in sorted(damaged):
            if first <= number < first + count:
                raise self._lost(block, damaged[number]) from damaged[number]
        return rows[first : first + count]

    def _copy_groups(
        self,
        block: int,
        place: Place,
        first: int,
        group_rows: int,
        first_in_group: int,
        out: np.ndarray,
    ) -> None:
        """Copy rows of a block, from row `first` on, to `out`. They are decoded in groups.

        Adjacent groups that are not cached are read together.
        """
        about = self.index.blocks[block]
        num_rows = int(about.fragments["length"].sum())
        stop = first + len(out)
        start_of = range(-first_in_group, num_rows, group_rows)
        groups = range(
            (first + first_in_group) // group_rows, (stop - 1 + first_in_group) // group_rows + 1
        )
        kept: dict[int, Any] = {
            group: self._cached_groups.get((block, place, group)) for group in groups
        }
        missing = [group for group in groups if kept[group] is None]
        for some in _neighbours(missing):
            low = max(start_of[some[0]], 0)
            high = min(start_of[some[-1]] + group_rows, num_rows)
            rows = self._read_part_safely(block, place, low, high)
            for group in some:
                begin = max(start_of[group], 0) - low
                kept[group] = rows[begin : start_of[group] + group_rows - low].copy()
                self._cached_groups.put((block, place, group), kept[group])
        for group, rows in kept.items():
            begin = max(start_of[group], 0)
            low = max(first, begin)
            high = min(stop, begin + len(rows))
            out[low - first : high - first] = rows[low - begin : high - begin]

    def _read_part_safely(self, block: int, place: Place, start: int, stop: int) -> np.ndarray:
        with self._losses_named(block):
            return self.read_part(self.index.blocks[block], place, start, stop)

    def _read(self, block: int, place: Place) -> np.ndarray:
        with self._losses_named(block):
            try:
                return self.read_block(self.index.blocks[block], place)
            except UnansweredError:
                raise
            except DataFileError:
                if DataFileError not in self._losses:
                    raise
                is_broken = (block, place) in self._broken
                intact = None if is_broken else self._intact_rows(block, place)
                if intact is None:
                    self._broken.add((block, place))
                    raise
                return intact

    @contextmanager
    def _losses_named(self, block: int) -> Iterator[None]:
        """Convert errors that occur while reading a block, so that they name its trajectories."""
        try:
            yield
        except UnansweredError:
            raise
        except DataFileError as cause:
            if DataFileError not in self._losses:
                raise
            raise self._lost(block, cause) from cause
        except self._losses as cause:
            raise self.index.lost_block(block, self._reason(block, cause)) from cause
        except OSError as cause:
            lost = self.index.lost_block(block, self._reason(block, cause))
            raise DataFileError(f"{lost.message} Try again, or reset these envs.") from cause

    def _lost(self, block: int, cause: DataFileError) -> LostBlockError:
        return self.index.lost_block(block, self._reason(block, cause), is_gone=False)

    def _reason(self, block: int, cause: Exception) -> str:
        """Return a sentence that explains why a file cannot be read; "" if it was removed."""
        if isinstance(cause, DataFileError):
            return cause.message
        if isinstance(cause, FileNotFoundError):
            return ""
        problem = (cause.strerror if isinstance(cause, OSError) else None) or cause
        return f"{str(self.index.blocks[block].path)!r} cannot be read: {problem}."

    def _intact_rows(self, block: int, place: Place) -> np.ndarray | None:
        """Read a damaged block row by row; damaged rows become zeros, their errors are recorded.

        Returns:
            The rows; None if no row is intact.
        """
        about = self.index.blocks[block]
        num_rows = int(about.fragments["length"].sum())
        if not self.reads_parts or place[0] != DATA or num_rows < 2:
            return None
        damaged: dict[int, DataFileError] = {}
        rows = np.zeros((num_rows, self.layouts[DATA].columns[place[1]].row_bytes), np.uint8)

        def read(start: int, stop: int) -> bool:
            """Read rows `start:stop`, without damaged rows; return whether any row was read.

            After an error, each half is read separately.
            """
            try:
                rows[start:stop] = self.read_part(about, place, start, stop)
                return True
            except UnansweredError:
                raise
            except DataFileError as cause:
                if stop - start == 1:
                    damaged[start] = cause
                    return False
            middle = (start + stop) // 2
            is_first_read = read(start, middle)
            return read(middle, stop) or is_first_read

        samples = range(0, num_rows, -(-num_rows // _NUM_SAMPLES)) if num_rows > _MANY_ROWS else ()
        if samples and not any(read(row, row + 1) for row in samples):
            return None
        damaged.clear()
        if not read(0, num_rows):
            return None
        self._damaged[block, place] = damaged
        return rows


def _neighbours(numbers: Sequence[int]) -> list[list[int]]:
    """Divide ascending numbers into lists of consecutive numbers."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return runs


class BlockFiles(UnmappedRows):
    """Rows of local block files without a common memory map; each file is read separately."""

    has_local_blocks = True

    def read_block(self, block: Block, place: Place) -> np.ndarray:
        offset, num_rows = block.places[place]
        column = self.layouts[place[0]].columns[place[1]]
        if column.is_coded:
            return read_header(block.path).read_rows(*place, 0, num_rows)
        if num_rows == 0:
            return np.zeros((0, column.row_bytes), np.uint8)
        return np.memmap(block.path, np.uint8, "r", offset, (num_rows, column.row_bytes))
