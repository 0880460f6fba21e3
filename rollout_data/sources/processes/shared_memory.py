"""Memory that the processes of one machine share: what one of them has computed or copied, the others map.

One rule: shared memory has no name. It belongs to the processes that have it open, and is gone with
the last of them, however that ends. Others open it through a process that has it (`/proc/PID/fd`),
or make their own where that is gone.
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

#: Where shared memory is found: a process that has it open, its descriptor there, and the first
#: bytes in it.
Spot = tuple[int, int, bytes]
_NAME = "rollout_data"
_TOKEN_BYTES = 16
_ALIGNMENT = 64


class SharedMemory:
    """Shared memory for parts of these sizes in bytes, or that at a `spot`.

    Raises:
        OSError: It is not there any more, or this system has none to give.
    """

    def __init__(self, sizes: Sequence[int] = (), spot: Spot | None = None) -> None:
        name = "/proc/{}/fd/{}".format(*spot[:2]) if spot is not None else ""
        if name and _NAME not in os.readlink(name):  # of another machine: opening it might wait
            raise FileNotFoundError(f"{name} is another file")
        self._file = os.open(name, os.O_RDWR) if name else os.memfd_create(_NAME)
        weakref.finalize(self, os.close, self._file).atexit = False
        if spot is None:
            os.ftruncate(self._file, _ALIGNMENT + sum(size + _ALIGNMENT for size in sizes))
            os.pwrite(self._file, secrets.token_bytes(_TOKEN_BYTES), 0)
        token = os.pread(self._file, _TOKEN_BYTES, 0)
        if spot is not None and token != spot[2]:
            raise FileNotFoundError(f"{name} is another file now")
        self.spot: Spot = os.getpid(), self._file, token
        self._bytes = mmap.mmap(self._file, 0)
        self._used = _ALIGNMENT

    def take(self, num_bytes: int) -> np.ndarray:
        """Return the next part, uint8; all processes see what one writes."""
        first = self._used
        self._used = first + num_bytes - (first + num_bytes) % -_ALIGNMENT
        return np.frombuffer(self._bytes, np.uint8, num_bytes, first)


def shared_memory(sizes: Sequence[int]) -> SharedMemory | None:
    """Make memory for parts of these sizes; None where it cannot be made."""
    try:
        return SharedMemory(sizes)
    except (OSError, AttributeError):  # too many files are open, or a system without such files
        return None


def share(value: Any) -> SharedMemory | None:
    """Put a value that can be pickled into shared memory, its arrays as they are; None where it cannot be made."""
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
    """Return what a process has shared, its arrays read-only views, and the memory; (None, None) if it is gone."""
    try:
        memory = SharedMemory(spot=spot) if spot is not None else None
    except OSError:  # that process has gone on, or away, or is one of another machine
        memory = None
    if memory is None:
        return None, None
    num_parts = int(memory.take(8).view(np.int64)[0])
    sizes = memory.take(8 * num_parts).view(np.int64)
    content, *arrays = [memory.take(size).data.toreadonly() for size in sizes.tolist()]
    return pickle.loads(content, buffers=arrays), memory
