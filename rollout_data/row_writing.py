"""Row writing: the rows of a block go to its file and their checksums into a table, piece by piece.

One rule: a piece is a run of whole fragments, and whoever has time takes the next one. At most a part
of a piece is gathered, checked and written at a time, while it is in the processor's cache.
"""

from __future__ import annotations

import ctypes
import os
import sys
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np

from storage.buffer_pool import BufferPool
from storage.checksums import crc32

from .block_header import row_ranges
from .coded_rows import CodedRows
from .row_source import RowSource

#: What stays in the second-level cache from the gathering to the writing: with 4 MiB both took a third longer.
PART_BYTES = 1 << 20
_SYNC_FILE_RANGE_WRITE = 2
_parts = BufferPool(max_buffers=4)


@dataclass(frozen=True, eq=False)
class _Piece:
    """Rows `start:stop` of a column and the fragments that lie in them, in the order of rows."""

    source: RowSource
    offset: int
    start: int
    stop: int
    first: list[int]
    last: list[int]
    checksums: np.ndarray
    places: list[int]


class RowWriting:
    """Write rows to a file, by any number of threads together.

    Args:
        descriptor: Of the file.
        tables: Table -> column -> its rows.
        offsets: "table/column" -> where its rows begin in the file.
        fragments: `[F]` of `FRAGMENT_DTYPE`.
        starts_writeback: Ask the system to move each part on to the disk at once, so that a later
            flush has little left to do.

    Attributes:
        checksums: Table -> `[F, columns]` uint32, CRC-32 of each fragment's rows or chunks; complete when
            every `work()` has returned.
    """

    def __init__(
        self,
        descriptor: int,
        tables: Mapping[str, Mapping[str, RowSource]],
        offsets: Mapping[str, int],
        fragments: np.ndarray,
        starts_writeback: bool,
    ) -> None:
        self._descriptor = descriptor
        self._sync_range = _sync_file_range() if starts_writeback else None
        self._pieces: deque[_Piece] = deque()
        self._part_bytes = PART_BYTES
        self.checksums: dict[str, np.ndarray] = {}
        for table, columns in tables.items():
            values = self.checksums[table] = np.zeros((len(fragments), len(columns)), "<u4")
            for position, (name, source) in enumerate(columns.items()):
                ranges = row_ranges(table, fragments)
                if isinstance(source, CodedRows):
                    ranges = source.table.byte_ranges(*ranges)
                self._part_bytes = max(self._part_bytes, source.row_bytes)
                self._pieces += _pieces(source, offsets[f"{table}/{name}"], ranges, values[:, position])

    def work(self, before_each: Callable[[], object] = lambda: None) -> None:
        """Write pieces until none is left, calling `before_each` before each. A failure ends the work of all."""
        memory = _parts.take(self._part_bytes).numpy()
        try:
            while self._pieces:
                before_each()
                try:
                    piece = self._pieces.popleft()
                except IndexError:  # another thread took the last one
                    return
                self._write(piece, memory)
        except BaseException:  # Ctrl-C too: the other threads must not go on
            self._pieces.clear()
            raise

    def _write(self, piece: _Piece, memory: np.ndarray) -> None:
        row_bytes = piece.source.row_bytes
        rows_a_part = len(memory) // row_bytes
        is_long = len(piece.first) == 1 and piece.last[0] > piece.start + rows_a_part
        checksum = 0
        for low in range(piece.start, piece.stop, rows_a_part):
            high = min(piece.stop, low + rows_a_part)
            out = memory[: (high - low) * row_bytes].reshape(high - low, row_bytes)
            part = piece.source.read(low, high, out).reshape(-1).data
            if is_long:
                begin, end = max(piece.first[0], low) - low, max(low, min(piece.last[0], high)) - low
                checksum = crc32(part[begin * row_bytes : end * row_bytes], checksum)
            elif low == piece.start and piece.first:  # then all of them lie in this part
                bounds = zip(piece.first, piece.last, strict=True)
                piece.checksums[piece.places] = [
                    crc32(part[(first - low) * row_bytes : (last - low) * row_bytes]) for first, last in bounds
                ]
            write_at(self._descriptor, part, piece.offset + low * row_bytes)
            if self._sync_range is not None:
                self._sync_range(self._descriptor, piece.offset + low * row_bytes, len(part))
        if is_long:
            piece.checksums[piece.places[0]] = checksum


def write_at(descriptor: int, data: memoryview, offset: int) -> None:
    """Write all of `data` to the file at `offset`."""
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


def _pieces(
    source: RowSource, offset: int, ranges: tuple[np.ndarray, np.ndarray], checksums: np.ndarray
) -> list[_Piece]:
    """Cut the rows of a column at starts of fragments, into pieces of a part at most, or of one fragment."""
    if not source.num_rows:
        return []
    first, last = ranges
    order = np.flatnonzero(last > first)
    order = order[np.argsort(first[order], kind="stable")]
    first_row, end_row, places = first[order].tolist(), last[order].tolist(), order.tolist()
    rows_a_part = max(1, PART_BYTES // source.row_bytes)
    numbers, rows = [0], [0]
    while numbers[-1] < len(order):
        number = max(numbers[-1] + 1, bisect_right(end_row, rows[-1] + rows_a_part))
        numbers.append(number)
        rows.append(first_row[number] if number < len(order) else source.num_rows)
    if not len(order):
        numbers, rows = [0, 0], [0, source.num_rows]
    return [
        _Piece(source, offset, start, stop, first_row[a:b], end_row[a:b], checksums, places[a:b])
        for (start, stop), (a, b) in zip(pairwise(rows), pairwise(numbers), strict=True)
    ]


@lru_cache(maxsize=1)
def _sync_file_range() -> Callable[[int, int, int], object] | None:
    """Give the system's call that starts writing back a range of a file without waiting; None where it lacks.

    Python has no name for it. What it returns does not matter: the flush that follows reports errors.
    """
    if not sys.platform.startswith("linux"):
        return None
    function = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if function is None:
        return None
    function.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return lambda descriptor, start, count: function(descriptor, start, count, _SYNC_FILE_RANGE_WRITE)
