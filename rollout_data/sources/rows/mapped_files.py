"""`Arena`: many files mapped into one reserved address range, as one tensor of rows.

The rows of every file start at a multiple of the row size from the base of the arena. A row number
therefore addresses a row of any file, and one gather reads from all files. Addresses between files
read as zeros. Only Linux supports this (`is_supported`); other systems use `unmapped_rows.py`.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import weakref
from math import gcd
from pathlib import Path
from typing import Any

import numpy as np
import torch

from storage.errors import CorruptFileError, RolloutDataError, UsageError

from ...blocks.trajectory_index import Int64s

PAGE_BYTES = mmap.PAGESIZE
_MAP_FIXED = 0x10
_MAP_NOTHING = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # 0x4000 is MAP_NORESERVE.
_MADV_RANDOM = 1
_MADV_WILLNEED = 3
_MADV_DONTNEED = 4
#: Minimum bytes of address space to reserve, with room for later files. A process has 128 TiB.
_MIN_RESERVED_BYTES = 1 << 36
_GROWTH = 4
#: Minimum bytes of address space to reserve if the process has a limit (ulimit -v).
_LEAST_RESERVED_BYTES = 1 << 30


def _load_libc() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux") or ctypes.sizeof(ctypes.c_void_p) < 8:
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *3 * [ctypes.c_int], ctypes.c_longlong]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    return libc


_libc: Any = _load_libc()
is_supported = _libc is not None


def _map(
    address: int | None, num_bytes: int, flags: int, descriptor: int = -1, offset: int = 0
) -> int:
    got = _libc.mmap(address, num_bytes, mmap.PROT_READ, flags, descriptor, offset)
    if got in (None, ctypes.c_void_p(-1).value):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return int(got)


def _reserve(needed_bytes: int) -> tuple[int, int]:
    """Reserve address space for at least `needed_bytes`; return (address, reserved bytes)."""
    num_bytes = max(_MIN_RESERVED_BYTES, _GROWTH * needed_bytes)
    while True:
        try:
            return _map(None, num_bytes, _MAP_NOTHING), num_bytes
        except OSError as cause:
            if num_bytes // 2 < max(_LEAST_RESERVED_BYTES, 2 * needed_bytes):
                raise UsageError(
                    f"the dataset needs {num_bytes >> 30} GiB of address space: {cause}. Raise the "
                    "limit (ulimit -v) or close other datasets."
                ) from cause
            num_bytes //= 2


class Arena:
    """A reserved address range into which files are mapped, so that one tensor contains all rows.

    Args:
        row_bytes: Bytes of a row, a multiple of 4; or 1 to map entire files as bytes.
        needed_bytes: Bytes of the files that will be mapped first. Several times this size is
            reserved for later files.

    Attributes:
        bytes_view: uint8 `[reserved_rows * row_bytes]`. Writing to it crashes the process, since
            the memory is read-only. Rows outside mapped files are zero.
        words_view: The same memory as a CPU tensor, int32 `[reserved_rows, row_bytes / 4]`.
    """

    def __init__(self, row_bytes: int, needed_bytes: int = 0) -> None:
        self.row_bytes = row_bytes
        self._base, self._bytes = _reserve(needed_bytes)
        self._end = self._base
        # Do not unmap at exit, when a thread may still read; the system unmaps the memory anyway.
        weakref.finalize(self, _libc.munmap, self._base, self._bytes).atexit = False
        num_rows = self._bytes // row_bytes
        buffer: Any = (ctypes.c_byte * (num_rows * row_bytes)).from_address(self._base)
        self.bytes_view = np.frombuffer(buffer, np.uint8)
        if row_bytes > 1:
            self.words_view = torch.from_numpy(self.bytes_view.view(np.int32)).view(
                num_rows, row_bytes // 4
            )

    @property
    def free_bytes(self) -> int:
        """Bytes of address space that are still free."""
        return self._base + self._bytes - self._end

    def map_file(self, path: Path, offset: int, num_rows: int) -> int:
        """Map `num_rows` rows from byte `offset` of a file on.

        Returns:
            Number of the first mapped row in the arena.

        Raises:
            FileNotFoundError: The file does not exist.
            CorruptFileError: The file is truncated.
            UsageError: The reserved address space is used up.
            RolloutDataError: The rows cannot be aligned with the rows of other files.
        """
        if num_rows == 0:
            return 0
        inner = offset % PAGE_BYTES
        start = self._first_page(inner)
        length = inner + num_rows * self.row_bytes
        with open(path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            needed = offset + num_rows * self.row_bytes
            if needed > size:  # Reading mapped memory beyond the end of the file kills the process.
                raise CorruptFileError(
                    f"{str(path)!r} is truncated: it has {size} of {needed} bytes."
                )
            if start + length + PAGE_BYTES > self._base + self._bytes:
                raise UsageError(
                    f"the blocks exceed the {self._bytes >> 30} GiB reserved for them, at "
                    f"{str(path)!r}. Open the dataset again."
                )
            _map(start, length, mmap.MAP_PRIVATE | _MAP_FIXED, file.fileno(), offset - inner)
        self._end = start + -(-length // PAGE_BYTES) * PAGE_BYTES
        if self.row_bytes > 1:
            _libc.madvise(start, length, _MADV_RANDOM)
        first, rest = divmod(start + inner - self._base, self.row_bytes)
        assert rest == 0
        return first

    def unmap(self, first_row: int, num_rows: int) -> None:
        """Unmap the rows of a file, which frees the disk space if the file was deleted.

        The rows read as zeros afterwards. `first_row` is the result of `map_file`.
        """
        if num_rows:
            _map(*self._pages(first_row, num_rows), _MAP_NOTHING | _MAP_FIXED)

    def will_need(self, first_rows: Int64s, num_rows: Int64s) -> None:
        """Request that the kernel reads runs of rows from disk in the background.

        Args:
            first_rows: First row of each run, int64 `[R]`.
            num_rows: Number of rows of each run, int64 `[R]`.
        """
        for first, count in zip(first_rows.tolist(), num_rows.tolist(), strict=True):
            _libc.madvise(*self._pages(first, count), _MADV_WILLNEED)

    def let_go(self) -> None:
        """Release the mapped pages of all rows. Later reads get them from the page cache."""
        _libc.madvise(self._base, self._end - self._base, _MADV_DONTNEED)

    def is_resident(self, row: int) -> bool:
        """Return whether the first page of a row is in memory; True if the system cannot tell."""
        page = self._pages(row, 0)[0]
        state = ctypes.c_ubyte()
        return _libc.mincore(page, PAGE_BYTES, ctypes.byref(state)) != 0 or bool(state.value & 1)

    def _pages(self, first_row: int, num_rows: int) -> tuple[int, int]:
        """Return address and size in bytes of the memory pages that contain these rows."""
        start = self._base + first_row * self.row_bytes
        inner = start % PAGE_BYTES
        return start - inner, inner + num_rows * self.row_bytes

    def _first_page(self, inner: int) -> int:
        """Return the address of the first free page to which a file can be mapped.

        The mapped rows must start at multiples of the row size from the base of the arena.

        Args:
            inner: Byte offset in the page of the first row to map.

        Raises:
            RolloutDataError: No page has such an address.
        """
        unit = gcd(self.row_bytes, PAGE_BYTES)
        missing = (self._base - self._end - inner) % self.row_bytes
        if missing % unit:
            raise RolloutDataError(
                f"Rows of {self.row_bytes} bytes that start at byte {inner} of a page cannot be "
                "aligned with the rows of other files."
            )
        # Skip pages until the rows are aligned: the bytes of the skipped pages must equal `missing`,
        # modulo the row size.
        num_units = self.row_bytes // unit
        pages_per_unit = pow(PAGE_BYTES // unit, -1, num_units)
        num_pages = missing // unit * pages_per_unit % num_units
        return self._end + num_pages * PAGE_BYTES
