"""A file that HDF5 reads through a guard: its global heaps are checked before the library walks them.

One rule: nothing but heaps is looked at here. The library follows the sizes of the objects in a heap, which holds
the text of attributes, without asking whether they lead on: with one flipped bit it goes round for ever.
"""

from __future__ import annotations

import io
import os
from typing import Any

_MAGIC = b"GCOL"
#: The header of a heap, and that of each object in it: index (2 bytes), count (2), nothing (4), size (8).
_HEAD_BYTES = 16
#: A block has one heap, for texts of 128 KiB at most; each further object takes time to look at.
MAX_HEAP_BYTES = 1 << 20


class GuardedFile(io.FileIO):
    """A file to be read by HDF5 (its file-object driver) that stops it at a heap which it could not leave.

    Only good for files whose superblock declares sizes of 8 bytes. Every heap is read from its beginning: what
    joins reads of neighbouring places in the library, its metadata accumulator, is empty until something is written.

    Args:
        path: The file; must not be a pipe, which would be waited for.

    Raises:
        OSError: While reading: a heap is damaged.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path, "rb")

    def readinto(self, out: Any) -> int:
        view, done, start = memoryview(out), 0, self.tell()
        while done < len(view) and (count := super().readinto(view[done:])):
            done += count
        view[done:] = bytes(len(view) - done)  # HDF5 takes the whole buffer, whatever was read
        if view[:4] == _MAGIC:
            self._check_heap(start)
        return len(view)

    def _check_heap(self, start: int) -> None:
        size = _number(os.pread(self.fileno(), 8, start + 8))
        if not size <= MAX_HEAP_BYTES:
            raise OSError(f"a heap of {size} bytes at {start}")
        heap = os.pread(self.fileno(), size, start)
        at = _HEAD_BYTES
        while at + _HEAD_BYTES <= size:
            num_bytes = _number(heap[at + 8 : at + _HEAD_BYTES])
            is_free = heap[at : at + 2] == b"\0\0"  # the rest that nobody uses: its size includes its header
            step = num_bytes if is_free else _HEAD_BYTES + -(-num_bytes // 8) * 8
            if not _HEAD_BYTES <= step <= len(heap) - at:
                raise OSError(f"an object of {num_bytes} bytes at {at} of the heap at {start}")
            at += step


def _number(data: bytes) -> int:
    return int.from_bytes(data, "little")
