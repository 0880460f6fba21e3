"""A file in memory that holds only what was written: HDF5 writes a block's tables into it.

One rule: HDF5 never touches the disk while a block is written. A disk that is full in the middle of
its closing leaves the library in a state from which it crashes at the end of the process.
"""

from __future__ import annotations

import io
from typing import Any


class SparseFile(io.RawIOBase):
    """What was written where, for HDF5's file-object driver; gaps read as zeros and take no memory.

    Attributes:
        writes: (offset, bytes), in the order of writing; later ones lie over earlier ones.
        size: Length of the file.
    """

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[tuple[int, bytes]] = []
        self.size = 0
        self._position = 0

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.size}[whence]
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def truncate(self, size: int | None = None) -> int:
        self.size = self._position if size is None else size
        return self.size

    def write(self, data: Any) -> int:
        self.writes.append((self._position, bytes(data)))
        self._position += len(data)
        self.size = max(self.size, self._position)
        return len(data)

    def readinto(self, out: Any) -> int:
        view = memoryview(out).cast("B")
        count = min(len(view), max(0, self.size - self._position))
        view[:count] = bytes(count)
        for offset, data in self.writes:
            low, high = max(offset, self._position), min(offset + len(data), self._position + count)
            if low < high:
                view[low - self._position : high - self._position] = data[low - offset : high - offset]
        self._position += count
        return count
