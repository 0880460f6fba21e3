"""Row writing: the rows of a block go to its file and their checksums into a table, piece by piece.

One rule: a piece is a run of whole fragments; it is gathered and checked part by part, and a part is
written soon, while it is in the processor's cache. Whoever has time does the next of either.
"""

from __future__ import annotations

import ctypes
import sys
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from storage.core.buffer_pool import BufferPool
from storage.core.checksums import crc32
from storage.saving.hdf5 import write_at

from .coded_rows import CodedRows
from .header import row_ranges
from .row_source import RowSource

#: What stays in the second-level cache from the gathering to the writing: with 4 MiB both took a third longer.
PART_BYTES = 1 << 20
_SYNC_FILE_RANGE_WRITE = 2
_parts = BufferPool(max_buffers=8)


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
        sync_range = _system_call("sync_file_range", ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
        self._sync_range = sync_range if starts_writeback else None
        self._pieces: deque[_Piece] = deque()
        #: Parts to be written: bytes, place in the file, the memory that may hold them.
        self._gathered: deque[tuple[memoryview, int, np.ndarray]] = deque()
        self._free: list[np.ndarray] = []
        self._num_threads = 0
        self._part_bytes = PART_BYTES
        self.checksums: dict[str, np.ndarray] = {}
        for table, columns in tables.items():
            values = self.checksums[table] = np.zeros((len(fragments), len(columns)), "<u4")
            for position, (name, source) in enumerate(columns.items()):
                ranges = row_ranges(table, fragments)
                if isinstance(source, CodedRows):
                    ranges = source.table.byte_ranges(*ranges)
                self._part_bytes = max(self._part_bytes, source.row_bytes)
                _make_room(descriptor, offsets[f"{table}/{name}"], source.num_rows * source.row_bytes)
                self._pieces += _pieces(source, offsets[f"{table}/{name}"], ranges, values[:, position])

    def work(self, before_each: Callable[[], object] = lambda: None, num_ahead: int = 1) -> None:
        """Gather and write until nothing is left, calling `before_each` before each. A failure ends the work of all.

        Args:
            before_each: Called often.
            num_ahead: So many parts may wait to be written, by another thread if there is one. A file takes writes
                from one thread at a time: where one writes most of the parts and the other gathers most of them,
                they wait for each other, and for the interpreter's lock, less than where both do both.
        """
        self._num_threads += 1
        try:
            while self._pieces or self._gathered:
                before_each()
                limit = num_ahead if self._num_threads > 1 else 1
                if len(self._gathered) >= limit or not self._pieces:
                    self._write_one()
                    continue
                with suppress(IndexError):  # another thread took the last one
                    self._gather(self._pieces.popleft(), limit)
        except BaseException:  # Ctrl-C too: the other threads must not go on
            self._pieces.clear()
            self._gathered.clear()
            raise

    def _gather(self, piece: _Piece, limit: int) -> None:
        """Put the parts of a piece together and check them, writing others while `limit` wait to be written."""
        row_bytes = piece.source.row_bytes
        rows_a_part = self._part_bytes // row_bytes
        is_long = len(piece.first) == 1 and piece.last[0] > piece.start + rows_a_part
        checksum = 0
        for low in range(piece.start, piece.stop, rows_a_part):
            while len(self._gathered) >= limit:
                self._write_one()
            high = min(piece.stop, low + rows_a_part)
            try:
                memory = self._free.pop()
            except IndexError:
                memory = _parts.take(self._part_bytes).numpy()
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
            self._gathered.append((part, piece.offset + low * row_bytes, memory))
        if is_long:
            piece.checksums[piece.places[0]] = checksum

    def _write_one(self) -> None:
        """Write the part that has waited longest, if there still is one."""
        try:
            part, offset, memory = self._gathered.popleft()
        except IndexError:  # another thread took it
            return
        write_at(self._descriptor, part, offset)
        if self._sync_range is not None:
            self._sync_range(self._descriptor, offset, len(part), _SYNC_FILE_RANGE_WRITE)
        self._free.append(memory)


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


def _make_room(descriptor: int, offset: int, num_bytes: int) -> None:
    """Have the disk's blocks of a large range allocated at once, which makes writing it a tenth faster.

    Not `os.posix_fallocate`, which writes to every block where the file system cannot do better.
    """
    allocate = _system_call("fallocate64", ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    if num_bytes >= PART_BYTES and allocate is not None:
        allocate(descriptor, 0, offset, num_bytes)


@lru_cache(maxsize=2)
def _system_call(name: str, *kinds: Any) -> Callable[..., object] | None:
    """Give a function of the system for which Python has no name; None where it lacks.

    What it returns does not matter: it only hastens what follows, which reports errors.
    """
    function = getattr(ctypes.CDLL(None), name, None) if sys.platform.startswith("linux") else None
    if function is not None:
        function.argtypes = kinds
    return function
