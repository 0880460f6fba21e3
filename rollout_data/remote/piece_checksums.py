"""Checksum files of remote blocks: a checksum for each small piece, to check partial reads.

A block is divided into spans: the rows of each column, and the bytes between columns. A span is
divided into units: one row, or several complete rows if rows are small. A unit is divided into one
or several pieces, and each piece has a checksum. Readers fetch only the checksums of the pieces
that they fetch, so reading single rows costs little.

The file is `<block>.sums`: a head, the table of spans, then the checksum of each piece,
little-endian. `push` writes it. A folder that another tool has uploaded may have no such files.

A stored checksum is the CRC-32 of the piece XOR the key. The key is the CRC-32 of all CRC-32
values. Readers keep the key of the file that they opened, so pieces of a replaced block do not
match checksums of the new block.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from storage.core.durable_files import crc32
from storage.core.fields import Schema
from storage.errors import CorruptFileError

from ..blocks.block import Block
from ..blocks.block_header import layouts_of

ENDING = ".sums"
#: Head of the file: magic, bytes of the block, number of spans, key, CRC-32 of head and spans.
_HEAD = struct.Struct("<8sQIII")
_MAGIC = b"RDSUMS03"
_SPAN = np.dtype([("start", "<u8"), ("stop", "<u8"), ("unit_bytes", "<u4"), ("piece_bytes", "<u4")])
#: Minimum bytes of rows per checksum. Checksums of 4 bytes then add at most 4 %.
_LEAST_BYTES = 96
#: Maximum bytes of a piece. Equals the minimum of `RemoteOptions.chunk_bytes`.
_MOST_BYTES = 4096
#: Bytes of a piece outside of rows, such as in the header.
_OTHER_BYTES = 1024
_PART_BYTES = 1 << 20
_MAX_SPANS = 1 << 16
#: Bytes of the first request to a checksum file, which are kept in memory: head, spans, and all
#: checksums of a small block.
FIRST_BYTES = 4096


class Span(NamedTuple):
    """A part of a block whose units and pieces have one size, see the module.

    Attributes:
        start, stop: Byte range in the block.
        unit_bytes: Bytes of a unit.
        piece_bytes: Bytes of a piece. The last piece of a unit may be shorter.
    """

    start: int
    stop: int
    unit_bytes: int
    piece_bytes: int

    @property
    def pieces_per_unit(self) -> int:
        """Number of pieces per unit."""
        return -(-self.unit_bytes // self.piece_bytes)

    @property
    def num_pieces(self) -> int:
        """Number of pieces in the span."""
        units, rest = divmod(self.stop - self.start, self.unit_bytes)
        return units * self.pieces_per_unit + -(-rest // self.piece_bytes)

    def piece_at(self, place: int) -> int:
        """Return which piece of the span contains byte `place` of the block, counted from 0."""
        unit, rest = divmod(place - self.start, self.unit_bytes)
        return unit * self.pieces_per_unit + rest // self.piece_bytes

    def first_byte(self, piece: int) -> int:
        """Return the byte offset in the block of a piece. For `piece == num_pieces`, return `stop`."""
        unit, rest = divmod(piece, self.pieces_per_unit)
        return min(self.start + unit * self.unit_bytes + rest * self.piece_bytes, self.stop)


def spans_of(block: Block, schema: Schema) -> list[Span]:
    """Divide a block into spans: the rows of each column without chunks, and the bytes between."""
    layouts = layouts_of(schema)
    tables = []
    for (table, name), (start, num_rows) in block.places.items():
        column = layouts[table].columns[name]
        if num_rows and not column.is_coded:
            tables.append((start, num_rows, column.row_bytes))
    spans: list[Span] = []
    end = 0
    for start, num_rows, row_bytes in sorted(tables):
        spans += _plain(end, start)
        end = start + num_rows * row_bytes
        unit = row_bytes * rows_of_a_unit(row_bytes)
        num_pieces = -(-unit // _MOST_BYTES)
        spans.append(Span(start, end, unit, -(-unit // num_pieces)))
    return spans + _plain(end, block.file_bytes)


def rows_of_a_unit(row_bytes: int) -> int:
    """Compute the number of rows of a unit, which must have at least `_LEAST_BYTES` bytes."""
    return -(-_LEAST_BYTES // row_bytes)


def _plain(start: int, stop: int) -> list[Span]:
    return [Span(start, stop, _OTHER_BYTES, _OTHER_BYTES)] if start < stop else []


def sums_of(path: Path, spans: list[Span]) -> bytes:
    """Compute the content of the checksum file for a local block at `path`."""
    sums: list[int] = []
    with open(path, "rb") as file:
        for span in spans:
            step = max(1, _PART_BYTES // span.unit_bytes) * span.unit_bytes
            for start in range(span.start, span.stop, step):
                data = memoryview(file.read(min(step, span.stop - start)))
                part = Span(0, len(data), span.unit_bytes, span.piece_bytes)
                bounds = [part.first_byte(piece) for piece in range(part.num_pieces + 1)]
                sums += [crc32(data[low:high]) for low, high in pairwise(bounds)]
    listed = np.array(sums, "<u4")
    key = crc32(listed.tobytes())
    table = np.array(spans, _SPAN).tobytes()
    num_bytes = spans[-1].stop if spans else 0
    head = _HEAD.pack(_MAGIC, num_bytes, len(spans), key, 0)[:-4]
    return (
        head + crc32(head + table).to_bytes(4, "little") + table + _combined(listed, key).tobytes()
    )


def _combined(sums: np.ndarray, key: int) -> np.ndarray:
    """Convert CRC-32 values to stored checksums, or stored checksums to CRC-32 values: XOR `key`."""
    combined: np.ndarray = sums ^ np.array(key, "<u4")
    return combined


def parse(content: bytes, where: str) -> tuple[list[Span], np.ndarray]:
    """Parse and check the content of a checksum file; `where` names the file for errors.

    Returns:
        The spans, and the CRC-32 of each piece, uint32 `[num_pieces]`.

    Raises:
        CorruptFileError: The file is damaged.
    """
    spans, place = _parse_spans(content, where)
    listed = content[place:]
    num_pieces = sum(span.num_pieces for span in spans)
    if len(listed) != 4 * num_pieces:
        raise _damaged(where)
    key = _key_of(content)
    sums = _combined(np.frombuffer(listed, "<u4"), key)
    if crc32(sums.tobytes()) != key:
        raise _damaged(where)
    return spans, sums


def _key_of(content: bytes) -> int:
    """Return the key from the head of a checksum file."""
    key: int = _HEAD.unpack_from(content)[3]
    return key


def _parse_spans(content: bytes, where: str) -> tuple[list[Span], int]:
    """Parse and check head and spans of a checksum file.

    Returns:
        The spans, and the byte offset of the checksums in the file.
    """
    stop = _stop_of_spans(content, where)
    head = content[: _HEAD.size]
    table = content[_HEAD.size : stop]
    _, num_bytes, _, _, sum_of_head = _HEAD.unpack(head)
    if len(content) < stop or crc32(head[:-4] + table) != sum_of_head:
        raise _damaged(where)
    spans = [Span(*map(int, row)) for row in np.frombuffer(table, _SPAN).tolist()]
    ends = [0, *(span.stop for span in spans)]
    for span, end in zip(spans, ends, strict=False):
        is_adjacent = span.start == end < span.stop
        has_valid_sizes = 0 < span.piece_bytes <= min(span.unit_bytes, _PART_BYTES)
        if not is_adjacent or not has_valid_sizes:
            raise _damaged(where)
    if ends[-1] != num_bytes:
        raise _damaged(where)
    return spans, stop


def _stop_of_spans(content: bytes, where: str) -> int:
    """Compute the byte offset at which the table of spans ends, from the head of a checksum file."""
    if len(content) < _HEAD.size:
        raise _damaged(where)
    magic, _, num_spans, _, _ = _HEAD.unpack_from(content)
    if magic != _MAGIC or num_spans > _MAX_SPANS:
        raise _damaged(where)
    return int(_HEAD.size + num_spans * _SPAN.itemsize)


def _damaged(where: str) -> CorruptFileError:
    return CorruptFileError(
        f"The checksum file {where} is damaged. Push the block again to replace it."
    )


class _Header(NamedTuple):
    """The beginning of a checksum file: its spans, and where the checksums start.

    Attributes:
        spans: Spans of the block.
        first_pieces: Number of the first piece of each span, counted over all spans, then the
            total number of pieces.
        offset: Byte offset of the checksums in the file.
        content: First bytes of the file.
    """

    spans: list[Span]
    first_pieces: list[int]
    offset: int
    content: bytes


class _Pieces(NamedTuple):
    """A range of pieces within one span.

    Attributes:
        span: The span.
        first_piece: Number of the span's first piece, counted over all spans.
        start, stop: Range of pieces, counted within the span.
    """

    span: Span
    first_piece: int
    start: int
    stop: int


class PieceSums:
    """The checksum file of one block, which is fetched in parts on demand. Thread-safe.

    Only the first bytes of the file are kept in memory: the table of spans, and at least
    `FIRST_BYTES`.

    Args:
        path: The block.
        num_bytes: Listed size of the block in bytes.
        file_bytes: Size of the checksum file in bytes.
        load: Function that fetches bytes `start:stop` of the checksum file.
    """

    def __init__(
        self, path: Path, num_bytes: int, file_bytes: int, load: Callable[[int, int], bytes]
    ) -> None:
        self._path = path
        self._num_bytes = num_bytes
        self._file_bytes = file_bytes
        self._load = load
        self._lock = threading.Lock()
        self._header: _Header | None = None

    @property
    def path(self) -> Path:
        """Path of the checksum file."""
        return self._path.with_name(self._path.name + ENDING)

    def _opened(self) -> _Header:
        """Return head and spans of the checksum file, which the first call fetches.

        Raises:
            CorruptFileError: The file is damaged, or belongs to a block of another size.
        """
        with self._lock:
            if self._header is None:
                where = repr(str(self.path))
                content = self._load(0, min(FIRST_BYTES, self._file_bytes))
                stop = min(_stop_of_spans(content, where), self._file_bytes)
                if stop > len(content):
                    content += self._load(len(content), stop)
                spans, offset = _parse_spans(content, where)
                first_pieces = np.cumsum([0, *(span.num_pieces for span in spans)]).tolist()
                if self._file_bytes != offset + 4 * first_pieces[-1]:
                    raise _damaged(where)
                if spans[-1].stop != self._num_bytes:
                    raise CorruptFileError(
                        f"The checksum file {where} belongs to a block of {spans[-1].stop} bytes, "
                        f"expected {self._num_bytes} bytes. Push the block again."
                    )
                self._header = _Header(spans, first_pieces, offset, content)
            return self._header

    def _pieces(self, start: int, stop: int) -> Iterator[_Pieces]:
        """Yield, span by span, the pieces that overlap bytes `start:stop` of the block."""
        header = self._opened()
        for span, first_piece in zip(header.spans, header.first_pieces, strict=False):
            low = max(start, span.start)
            high = min(stop, span.stop)
            if low < high:
                yield _Pieces(span, first_piece, span.piece_at(low), span.piece_at(high - 1) + 1)

    def bounds(self, start: int, stop: int) -> tuple[int, int]:
        """Return the byte range of all pieces that overlap bytes `start:stop` of the block."""
        parts = list(self._pieces(start, stop))
        if not parts:
            return start, stop
        first = parts[0]
        last = parts[-1]
        return first.span.first_byte(first.start), last.span.first_byte(last.stop)

    def inner(self, start: int, stop: int) -> tuple[int, int]:
        """Return the byte range of all pieces that lie inside bytes `start:stop` of the block.

        The range is empty if no piece lies inside.
        """
        low = self.bounds(start, start + 1)[0]
        high = self.bounds(stop - 1, stop)[1]
        first = low if low == start else self.bounds(start, start + 1)[1]
        end = high if high == stop else self.bounds(stop - 1, stop)[0]
        return first, max(first, end)

    def range_of_sums(self, start: int, stop: int) -> tuple[int, int]:
        """Return the byte range in the checksum file of the checksums of some pieces.

        `start:stop` is the byte range of these pieces in the block.
        """
        parts = list(self._pieces(start, stop))
        first = parts[0]
        last = parts[-1]
        offset = self._opened().offset
        low = offset + 4 * (first.first_piece + first.start)
        high = offset + 4 * (last.first_piece + last.stop)
        return low, high

    def in_memory(self, low: int, high: int) -> bytes:
        """Return bytes `low:high` of the checksum file, as far as they are in memory.

        Only the first bytes of the file are in memory, so the result may be shorter or empty.
        """
        return self._opened().content[low:high]

    def check(self, data: bytes, start: int, sums: bytes) -> None:
        """Check complete pieces of the block against their checksums.

        Args:
            data: Bytes of the pieces.
            start: Byte offset of `data` in the block.
            sums: Stored checksums of these pieces, from the checksum file.

        Raises:
            CorruptFileError: A checksum is wrong, or the checksum file is damaged.
        """
        view = memoryview(data)
        key = _key_of(self._opened().content)
        stored_checksums = iter(_combined(np.frombuffer(sums, "<u4"), key).tolist())
        for part in self._pieces(start, start + len(data)):
            bounds = [part.span.first_byte(piece) for piece in range(part.start, part.stop + 1)]
            for low, high in pairwise(bounds):
                checksum = crc32(view[low - start : high - start])
                stored = next(stored_checksums)
                if checksum != stored:
                    parse(self._load(0, self._file_bytes), repr(str(self.path)))
                    raise CorruptFileError(
                        f"Bytes {low}:{high} of the block {str(self._path)!r} are damaged: "
                        f"expected checksum {stored:08x}, got {checksum:08x}. Read them again. If "
                        "the error remains, push an intact copy."
                    )
