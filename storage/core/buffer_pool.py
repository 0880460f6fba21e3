"""Reused memory for large results: a buffer returns to its pool once no tensor refers to it.

One rule: a buffer is handed out again only if no tensor, view or array over it is alive, which
Python's own reference count says. Fresh large memory costs a page fault per 4 KiB, which is
2-5 times the cost of filling it; a reused buffer costs none, and a new one of 3 MiB or more asks
for 2 MiB pages. What goes into the buffers is decided elsewhere.
"""

from __future__ import annotations

import mmap
import sys
import threading
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import torch

#: What pooled memory is asked for as most often.
_NUMPY_DTYPES: dict[torch.dtype, np.dtype[Any]] = {
    torch.float32: np.dtype("f4"),
    torch.int32: np.dtype("i4"),
    torch.uint8: np.dtype("u1"),
}
#: Below this size the C allocator recycles memory by itself, so that pooling gains nothing.
MIN_POOLED_BYTES = 64 * 1024
#: From this size on a buffer is aligned to, and asks for, huge pages.
MIN_HUGE_BYTES = 3 * 1024 * 1024
_HUGE_PAGE_BYTES = 2 * 1024 * 1024
_MADV_HUGEPAGE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)


def _references(buffers: Sequence[object]) -> list[int]:
    """Count who holds each of the buffers, the list and this call included."""
    return list(map(sys.getrefcount, buffers))


#: What an object counts that only its list holds; asked of this interpreter, as versions differ.
_FREE_REFERENCES = _references([object()])[0]


def _counts_are_exact() -> bool:
    """Whether reference counts tell who holds an array: CPython with the global lock."""
    gil_enabled = getattr(sys, "_is_gil_enabled", None)
    return sys.implementation.name == "cpython" and (gil_enabled is None or bool(gil_enabled()))


class BufferPool:
    """Hand out CPU memory and take it back by itself.

    Args:
        max_buffers: How many buffers are kept for reuse at most, free and lent ones together.
            Beyond that buffers are ordinary memory, given back to the system when dropped.

    A tensor from here is the caller's like any other: it may be kept, sliced, reshaped, viewed as
    another dtype or turned into an array for any time; its memory is reused only after the last of
    those is gone. All methods may be called from any thread. Where reference counts do not tell
    (PyPy, free-threaded builds), every call allocates plainly.
    """

    def __init__(self, max_buffers: int = 8) -> None:
        self.max_buffers = int(max_buffers)
        self.num_reused = 0
        self.num_allocated = 0
        self._buffers: list[np.ndarray[Any, Any]] = []
        self._lock = threading.Lock()
        self._is_exact = _counts_are_exact()

    def take(self, num_bytes: int) -> torch.Tensor:
        """Give `[num_bytes]` uint8 on the CPU with arbitrary content."""
        if num_bytes < MIN_POOLED_BYTES or not self._is_exact:
            return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
        # The slice holds its buffer, the tensor's storage holds the slice; the storage is exactly as large as asked.
        return torch.from_numpy(self._lend(num_bytes))

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Give a contiguous tensor like `torch.empty(shape, dtype=dtype)`, from pooled memory."""
        num_bytes = prod(shape) * dtype.itemsize
        if num_bytes < MIN_POOLED_BYTES or not self._is_exact:
            return torch.empty(tuple(shape), dtype=dtype, device="cpu")
        kind = _NUMPY_DTYPES.get(dtype)
        if kind is None:
            return self.take(num_bytes).view(dtype).view(tuple(shape))
        return torch.from_numpy(np.ndarray(tuple(shape), kind, self._lend(num_bytes)))  # 2 us less, of 4

    def clear(self) -> None:
        """Forget every buffer; lent ones live on until their holders drop them."""
        with self._lock:
            self._buffers.clear()

    @property
    def num_kept(self) -> int:
        """Buffers in the pool, lent or free."""
        return len(self._buffers)

    @property
    def num_lent(self) -> int:
        """Buffers in the pool that somebody holds."""
        with self._lock:
            return sum(not self._is_free(place) for place in range(len(self._buffers)))

    def __getstate__(self) -> dict[str, Any]:
        """Buffers are scratch memory: a pickled pool arrives empty."""
        return {"max_buffers": self.max_buffers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        BufferPool.__init__(self, state["max_buffers"])

    def _is_free(self, place: int) -> bool:
        return _references(self._buffers)[place] <= _FREE_REFERENCES

    def _lend(self, num_bytes: int) -> np.ndarray[Any, Any]:
        """Give the first bytes of a free buffer: the smallest that wastes at most half of itself."""
        with self._lock:
            found, size = -1, 2 * num_bytes + 1
            for place, references in enumerate(_references(self._buffers)):
                if references <= _FREE_REFERENCES and num_bytes <= (nbytes := self._buffers[place].nbytes) < size:
                    found, size = place, nbytes
            if found >= 0:
                self.num_reused += 1
                return self._buffers[found][:num_bytes]
            buffer = _allocate(num_bytes)
            self.num_allocated += 1
            self._keep(buffer)
            return buffer[:num_bytes]

    def _keep(self, new: np.ndarray[Any, Any]) -> None:
        """Add `new`; if the pool is full, in the place of the oldest free buffer."""
        if len(self._buffers) >= self.max_buffers:
            free = next(filter(self._is_free, range(len(self._buffers))), None)
            if free is not None:
                del self._buffers[free]
        if len(self._buffers) < self.max_buffers:
            self._buffers.append(new)


def _allocate(num_bytes: int) -> np.ndarray[Any, Any]:
    """Map private anonymous memory for at least `num_bytes`; nothing is touched yet."""
    if num_bytes < MIN_HUGE_BYTES:
        size = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        return np.frombuffer(_map(size), dtype=np.uint8)
    size = -(-num_bytes // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
    # One page more than needed, never touched, buys the alignment that huge pages want.
    mapped = _map(size + _HUGE_PAGE_BYTES)
    if _MADV_HUGEPAGE is not None:
        try:
            mapped.madvise(_MADV_HUGEPAGE)
        except OSError:  # a kernel without huge pages: ordinary ones work as well, only slower
            pass
    start = -np.frombuffer(mapped, dtype=np.uint8).ctypes.data % _HUGE_PAGE_BYTES
    # frombuffer with an offset, not a slice: slices of this array must hold this array itself.
    return np.frombuffer(mapped, dtype=np.uint8, count=size, offset=start)


def _map(size: int) -> mmap.mmap:
    if hasattr(mmap, "MAP_PRIVATE") and hasattr(mmap, "MAP_ANONYMOUS"):
        return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return mmap.mmap(-1, size)
