"""Checksums of the pieces of a block, in a file beside it: every piece that is fetched is compared with its own.

The file is `<block>.sums`: a head, a table of spans, then the checksum of each piece, little-endian. `push` writes it;
a copy of a folder made by other tools may lack it. Pieces of rows begin and end with rows, and readers fetch only the
checksums of the pieces that they fetch, so that both cost little where single rows are read.

A checksum is the CRC-32 of the piece, combined by XOR with the CRC-32 of all of them, the key. Readers keep the key of
the file that they opened, so that pieces of a block that was replaced do not pass with the checksums of the new one.
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
#: Magic, bytes of the block, number of spans, the key, CRC-32 of the head up to here and of the spans.
_HEAD = struct.Struct("<8sQIII")
_MAGIC = b"RDSUMS03"
_SPAN = np.dtype([("start", "<u8"), ("stop", "<u8"), ("unit_bytes", "<u4"), ("piece_bytes", "<u4")])
#: Least bytes of whole rows that share a checksum: it takes at most 4 of 96 bytes more.
_LEAST_BYTES = 96
#: Bytes of a piece at most; the least `chunk_bytes` that `RemoteOptions` takes.
_MOST_BYTES = 4096
#: Bytes of a piece outside rows.
_OTHER_BYTES = 1024
_PART_BYTES = 1 << 20
_MAX_SPANS = 1 << 16
#: Bytes of the file that are fetched first: the table of spans, and all checksums of a small block.
FIRST_BYTES = 4096
_DAMAGED = "Push the block again: its checksums are made anew"


class Span(NamedTuple):
    """A part of a block with pieces of one size.

    Attributes:
        start, stop: Bytes of the block.
        unit_bytes: Bytes that are cut into pieces, one unit after the other: whole rows.
        piece_bytes: Bytes of a piece; the last one of a unit may be shorter.
    """

    start: int
    stop: int
    unit_bytes: int
    piece_bytes: int

    @property
    def pieces_per_unit(self) -> int:
        return -(-self.unit_bytes // self.piece_bytes)

    @property
    def num_pieces(self) -> int:
        units, rest = divmod(self.stop - self.start, self.unit_bytes)
        return units * self.pieces_per_unit + -(-rest // self.piece_bytes)

    def piece_at(self, place: int) -> int:
        """Return the number of the piece with a byte of the block."""
        unit, rest = divmod(place - self.start, self.unit_bytes)
        return unit * self.pieces_per_unit + rest // self.piece_bytes

    def first_byte(self, piece: int) -> int:
        """Return the byte of the block with which a piece begins; the end for the piece behind the last."""
        unit, rest = divmod(piece, self.pieces_per_unit)
        return min(self.start + unit * self.unit_bytes + rest * self.piece_bytes, self.stop)


def spans_of(block: Block, schema: Schema) -> list[Span]:
    """Choose the pieces of a block with these fields."""
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
    """Return how many rows share a checksum; 1 where a row has one or several."""
    return -(-_LEAST_BYTES // row_bytes)


def _plain(start: int, stop: int) -> list[Span]:
    return [Span(start, stop, _OTHER_BYTES, _OTHER_BYTES)] if start < stop else []


def sums_of(path: Path, spans: list[Span]) -> bytes:
    """Compute the content of the file of checksums of a block on this machine."""
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
    return head + crc32(head + table).to_bytes(4, "little") + table + _combined(listed, key).tobytes()


def _combined(sums: np.ndarray, key: int) -> np.ndarray:
    """Combine checksums with the key of their file, or undo that."""
    combined: np.ndarray = sums ^ np.array(key, "<u4")
    return combined


def parse(content: bytes, where: str) -> tuple[list[Span], np.ndarray]:
    """Check a whole file of checksums; return the pieces, and the CRC-32 of each, uint32.

    Raises:
        CorruptFileError: It is damaged.
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
    """Return the key in the beginning of a file of checksums."""
    key: int = _HEAD.unpack_from(content)[3]
    return key


def _parse_spans(content: bytes, where: str) -> tuple[list[Span], int]:
    """Check the beginning of a file of checksums; return the spans, and where the checksums begin."""
    stop = _stop_of_spans(content, where)
    head = content[: _HEAD.size]
    table = content[_HEAD.size : stop]
    _, num_bytes, _, _, sum_of_head = _HEAD.unpack(head)
    if len(content) < stop or crc32(head[:-4] + table) != sum_of_head:
        raise _damaged(where)
    spans = [Span(*map(int, row)) for row in np.frombuffer(table, _SPAN).tolist()]
    ends = [0, *(span.stop for span in spans)]
    for span, end in zip(spans, ends, strict=False):
        is_sound = span.start == end < span.stop and 0 < span.piece_bytes <= min(span.unit_bytes, _PART_BYTES)
        if not is_sound:
            raise _damaged(where)
    if ends[-1] != num_bytes:
        raise _damaged(where)
    return spans, stop


def _stop_of_spans(content: bytes, where: str) -> int:
    """Return the byte behind the table of spans, as the head declares it."""
    if len(content) < _HEAD.size:
        raise _damaged(where)
    magic, _, num_spans, _, _ = _HEAD.unpack_from(content)
    if magic != _MAGIC or num_spans > _MAX_SPANS:
        raise _damaged(where)
    return int(_HEAD.size + num_spans * _SPAN.itemsize)


def _damaged(where: str) -> CorruptFileError:
    return CorruptFileError("read the checksums", where, "an intact file of checksums", "a damaged one", _DAMAGED)


class PieceSums:
    """The checksums of one block, fetched in parts when they are needed; for several threads.

    Only the beginning of the file is kept, `FIRST_BYTES`.

    Args:
        path: The block.
        num_bytes: Its size, as it was listed.
        file_bytes: Size of the file of checksums.
        load: Fetches bytes `start:stop` of the file of checksums.
    """

    def __init__(self, path: Path, num_bytes: int, file_bytes: int, load: Callable[[int, int], bytes]) -> None:
        self._path = path
        self._num_bytes = num_bytes
        self._file_bytes = file_bytes
        self._load = load
        self._lock = threading.Lock()
        self._known: tuple[list[Span], list[int], int, bytes] | None = None

    @property
    def path(self) -> Path:
        """The file of checksums."""
        return self._path.with_name(self._path.name + ENDING)

    def _opened(self) -> tuple[list[Span], list[int], int, bytes]:
        """Return the spans, the number of the first piece of each, where the checksums begin, and the first bytes."""
        with self._lock:
            if self._known is None:
                where = repr(str(self.path))
                content = self._load(0, min(FIRST_BYTES, self._file_bytes))
                if (stop := min(_stop_of_spans(content, where), self._file_bytes)) > len(content):
                    content += self._load(len(content), stop)
                spans, place = _parse_spans(content, where)
                firsts = np.cumsum([0, *(span.num_pieces for span in spans)]).tolist()
                if self._file_bytes != place + 4 * firsts[-1]:
                    raise _damaged(where)
                if spans[-1].stop != self._num_bytes:
                    expected = f"those of a block of {self._num_bytes} bytes"
                    got = f"of {spans[-1].stop}"
                    raise CorruptFileError("read the checksums", where, expected, got, "Push the block again")
                self._known = spans, firsts, place, content
            return self._known

    def _pieces(self, start: int, stop: int) -> Iterator[tuple[Span, int, int, int]]:
        """Yield each span that shares bytes with a range: the number of its first piece, and those that share bytes."""
        spans, firsts, _, _ = self._opened()
        for span, first in zip(spans, firsts, strict=False):
            low = max(start, span.start)
            high = min(stop, span.stop)
            if low < high:
                yield span, first, span.piece_at(low), span.piece_at(high - 1) + 1

    def bounds(self, start: int, stop: int) -> tuple[int, int]:
        """Widen a range of bytes to whole pieces."""
        found = list(self._pieces(start, stop))
        if not found:
            return start, stop
        return found[0][0].first_byte(found[0][2]), found[-1][0].first_byte(found[-1][3])

    def inner(self, start: int, stop: int) -> tuple[int, int]:
        """Narrow a range of bytes to whole pieces; both numbers are the same if there is none."""
        low = self.bounds(start, start + 1)[0]
        high = self.bounds(stop - 1, stop)[1]
        first = low if low == start else self.bounds(start, start + 1)[1]
        end = high if high == stop else self.bounds(stop - 1, stop)[0]
        return first, max(first, end)

    def place(self, start: int, stop: int) -> tuple[int, int]:
        """Return where the checksums of whole pieces lie in the file of checksums."""
        found = list(self._pieces(start, stop))
        begin = self._opened()[2]
        return begin + 4 * (found[0][1] + found[0][2]), begin + 4 * (found[-1][1] + found[-1][3])

    def kept(self, low: int, high: int) -> bytes:
        """Return those of the bytes `low:high` of the file of checksums that are kept: none, or the first of them."""
        return self._opened()[3][low:high]

    def check(self, data: bytes, start: int, sums: bytes) -> None:
        """Compare whole pieces that begin at byte `start` of the block with their checksums.

        Raises:
            CorruptFileError: One has another checksum, or the checksums are damaged.
        """
        view = memoryview(data)
        key = _key_of(self._opened()[3])
        expected = iter(_combined(np.frombuffer(sums, "<u4"), key).tolist())
        for span, _, first, last in self._pieces(start, start + len(data)):
            bounds = [span.first_byte(piece) for piece in range(first, last + 1)]
            for low, high in pairwise(bounds):
                got = crc32(view[low - start : high - start])
                known = next(expected)
                if got != known:
                    parse(self._load(0, self._file_bytes), repr(str(self.path)))
                    where = f"in bytes {low}:{high} of {str(self._path)!r}"
                    advice = "Read it again; if that does not help, publish the block again from where it is intact"
                    raise CorruptFileError("read the block", where, f"checksum {known:08x}", f"{got:08x}", advice)
