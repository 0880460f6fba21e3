"""Checksums of the pieces of a block, in a file beside it: every piece that is fetched is compared with its own.

The file is `<block>.sums`: a head, then the CRC-32 of each piece, little-endian. `push` writes it; a copy of a folder
made by other tools may lack it.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np

from storage.core.durable import crc32
from storage.errors import CorruptFileError

ENDING = ".sums"
#: Magic, bytes of a piece, bytes of the block, CRC-32 of the checksums, CRC-32 of the head up to here.
_HEAD = struct.Struct("<8sIQII")
_MAGIC = b"RDSUMS01"
#: A piece is as small as this many of them allow: what is fetched grows by less than a piece at each end of a range.
_NUM_PIECES, _LEAST_BYTES, _MOST_BYTES = 1 << 14, 256, 4096
_PART_BYTES = 1 << 20


def piece_bytes_of(num_bytes: int, chunk_bytes: int) -> int:
    """Choose the size of the pieces of a block: a power of two, at most `chunk_bytes`."""
    wanted = max(_LEAST_BYTES, num_bytes // _NUM_PIECES)
    return min(1 << (wanted - 1).bit_length(), _MOST_BYTES, 1 << (chunk_bytes.bit_length() - 1))


def sums_of(path: Path, piece_bytes: int) -> bytes:
    """Compute the content of the file of checksums of a block on this machine."""
    sums: list[int] = []
    num_bytes = 0
    with open(path, "rb") as file:
        while data := file.read(_PART_BYTES):  # a multiple of a piece
            num_bytes += len(data)
            sums += _sums(memoryview(data), piece_bytes)
    listed = np.array(sums, "<u4").tobytes()
    head = _HEAD.pack(_MAGIC, piece_bytes, num_bytes, crc32(listed), 0)[:-4]
    return head + crc32(head).to_bytes(4, "little") + listed


def _sums(data: memoryview, piece_bytes: int) -> list[int]:
    return [crc32(data[start : start + piece_bytes]) for start in range(0, len(data), piece_bytes)]


def parse(content: bytes, where: str) -> tuple[int, int, np.ndarray]:
    """Check a file of checksums.

    Returns:
        Bytes of a piece, bytes of the block, and the checksums, uint32.

    Raises:
        CorruptFileError: It is damaged.
    """
    head, listed = content[: _HEAD.size], content[_HEAD.size :]
    if len(head) == _HEAD.size:
        magic, piece_bytes, num_bytes, sum_of_all, sum_of_head = _HEAD.unpack(head)
        is_intact = magic == _MAGIC and sum_of_head == crc32(head[:-4]) and sum_of_all == crc32(listed)
        if is_intact and 0 < piece_bytes <= _PART_BYTES and len(listed) == 4 * -(-num_bytes // piece_bytes):
            return piece_bytes, num_bytes, np.frombuffer(listed, "<u4")
    advice = "Push the block again: its checksums are made anew"
    raise CorruptFileError("read the checksums", where, "an intact file of checksums", "a damaged one", advice)


class PieceSums:
    """The checksums of one block, fetched when they are first needed; for several threads.

    Args:
        path: The block.
        num_bytes: Its size, as it was listed.
        load: Fetches the whole file of checksums.
    """

    def __init__(self, path: Path, num_bytes: int, load: Callable[[], bytes]) -> None:
        self._path, self._num_bytes, self._load = path, num_bytes, load
        self._lock = threading.Lock()
        self._known: tuple[int, list[int]] | None = None

    def _loaded(self) -> tuple[int, list[int]]:
        with self._lock:
            if self._known is None:
                where = repr(f"{self._path}{ENDING}")
                piece_bytes, num_bytes, sums = parse(self._load(), where)
                if num_bytes != self._num_bytes:
                    expected, got = f"those of a block of {self._num_bytes} bytes", f"of {num_bytes}"
                    raise CorruptFileError("read the checksums", where, expected, got, "Push the block again")
                self._known = piece_bytes, sums.tolist()
            return self._known

    def bounds(self, start: int, stop: int) -> tuple[int, int]:
        """Widen a range of bytes to whole pieces."""
        piece_bytes, _ = self._loaded()
        return start // piece_bytes * piece_bytes, min(-(-stop // piece_bytes) * piece_bytes, self._num_bytes)

    def check(self, data: bytes, start: int) -> None:
        """Compare whole pieces that begin at byte `start` of the block.

        Raises:
            CorruptFileError: One has another checksum.
        """
        piece_bytes, sums = self._loaded()
        first = start // piece_bytes
        for number, got in enumerate(_sums(memoryview(data), piece_bytes), first):
            if got != sums[number]:
                low, expected = number * piece_bytes, f"checksum {sums[number]:08x}"
                where = f"in bytes {low}:{min(low + piece_bytes, self._num_bytes)} of {str(self._path)!r}"
                advice = "Read it again; if that does not help, publish the block again from where it is intact"
                raise CorruptFileError("read the block", where, expected, f"{got:08x}", advice)
