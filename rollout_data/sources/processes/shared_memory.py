"""Shared memory: one process computes or copies data, and other local processes map the result.

Shared memory has no name. The system frees it when the last process that has it open ends, even
after a crash. Other processes open it through the files of such a process (`/proc/PID/fd`). If that
process has ended, they create their own memory.
"""

from __future__ import annotations

import mmap
import os
import pickle
import secrets
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

#: Location of shared memory: id of a process that has opened it, the file descriptor in that process,
#: and the first bytes of the memory, with which a reader recognizes it.
Spot = tuple[int, int, bytes]
_NAME = "rollout_data"
_TOKEN_BYTES = 16
_ALIGNMENT = 64


class SharedMemory:
    """Memory that several local processes map, divided into parts.

    Args:
        sizes: Sizes of the parts of new memory, in bytes.
        spot: Where to find the existing memory of another process; None creates memory.

    Raises:
        OSError: The existing memory was freed, or this system cannot create shared memory.
    """

    def __init__(self, sizes: Sequence[int] = (), spot: Spot | None = None) -> None:
        self._file = os.memfd_create(_NAME) if spot is None else _open_spot(spot)
        weakref.finalize(self, os.close, self._file).atexit = False
        if spot is None:
            os.ftruncate(self._file, _ALIGNMENT + sum(size + _ALIGNMENT for size in sizes))
            os.pwrite(self._file, secrets.token_bytes(_TOKEN_BYTES), 0)
        token = os.pread(self._file, _TOKEN_BYTES, 0)
        if spot is not None and token != spot[2]:
            raise FileNotFoundError(f"the file at {spot[:2]} is not the shared memory any more")
        self.spot: Spot = os.getpid(), self._file, token
        self._bytes = mmap.mmap(self._file, 0)
        self._used = _ALIGNMENT

    def take(self, num_bytes: int) -> np.ndarray:
        """Return the next part as uint8 `[num_bytes]`. Writes are visible to all processes."""
        first = self._used
        self._used = first + num_bytes - (first + num_bytes) % -_ALIGNMENT
        return np.frombuffer(self._bytes, np.uint8, num_bytes, first)


def _open_spot(spot: Spot) -> int:
    process, descriptor, _ = spot
    name = f"/proc/{process}/fd/{descriptor}"
    # A location from another machine may name any file here, and opening a pipe would block.
    if _NAME not in os.readlink(name):
        raise FileNotFoundError(f"{name} is not shared memory")
    return os.open(name, os.O_RDWR)


def shared_memory(sizes: Sequence[int]) -> SharedMemory | None:
    """Create shared memory for parts of these sizes in bytes; None if it cannot be created."""
    try:
        return SharedMemory(sizes)
    except (OSError, AttributeError):  # Too many files are open, or memfd is not supported.
        return None


def share(value: Any) -> SharedMemory | None:
    """Pickle a value into new shared memory; None if the memory cannot be created.

    Arrays are stored as raw bytes, so that readers can map them.
    """
    arrays: list[pickle.PickleBuffer] = []
    content = pickle.dumps(value, 5, buffer_callback=arrays.append)
    parts: list[Any] = [content, *(array.raw() for array in arrays)]
    sizes = np.array([len(part) for part in parts])
    parts = [np.array([len(parts)]).tobytes(), sizes.tobytes(), *parts]
    if (memory := shared_memory([len(part) for part in parts])) is not None:
        for part in parts:
            memory.take(len(part)).data[:] = part
    return memory


def shared_at(spot: Spot | None) -> tuple[Any, SharedMemory | None]:
    """Return the value that a process has shared, and the memory; (None, None) if it was freed.

    Arrays in the value are read-only views of the memory.
    """
    try:
        memory = SharedMemory(spot=spot) if spot is not None else None
    except OSError:  # The process released the memory, has ended, or is on another machine.
        memory = None
    if memory is None:
        return None, None
    num_parts = int(memory.take(8).view(np.int64)[0])
    sizes = memory.take(8 * num_parts).view(np.int64)
    content, *arrays = [memory.take(size).data.toreadonly() for size in sizes.tolist()]
    return pickle.loads(content, buffers=arrays), memory
