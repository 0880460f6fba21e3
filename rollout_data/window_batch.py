"""Batches on their way from `DataLoader` workers: memory that both processes keep mapped, used again and again.

One rule: a place in shared memory is written only after the consumer has dropped the last tensor over it. Sending
fresh tensors costs a file, a mapping and its page faults for every batch, several times what gathering it costs.
"""

from __future__ import annotations

import os
import secrets
import weakref
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import torch

from storage.errors import UsageError
from storage.tree import flatten, unflatten

#: Batches of one worker that may be under way or in use at once; with more, batches travel as usual.
NUM_PLACES = 8
_ALIGNMENT = 64
#: Bytes before the first place: whether the consumer has mapped the memory, then whether each place is lent.
_HEADER_BYTES = 4096
#: (name, offset in the place, dtype, shape, stride) of each tensor of a batch.
_Spec = tuple[tuple[str, int, torch.dtype, tuple[int, ...], tuple[int, ...]], ...]


def collate_windows(batch: Any) -> Any:
    """Give a batch as it is; stack a list of single windows into one."""
    if not isinstance(batch, list):
        return batch
    if not batch or not all(isinstance(window, Mapping) for window in batch):
        raise UsageError("collate", "", "a batch or a list of windows", f"a list of {len(batch)} others")
    flat = [flatten(window) for window in batch]
    return unflatten({name: torch.stack([window[name] for window in flat]) for name in flat[0]})


class SharedMemory:
    """Where a worker puts its batches. Belongs to one process and thread."""

    def __init__(self) -> None:
        self._memory: torch.Tensor | None = None
        self._bytes = np.zeros(0, np.uint8)
        self._place_bytes = 0
        self._key = ""
        self._taken: list[tuple[int, int]] = []

    def make(self, read: Callable[[Callable[[Sequence[int], torch.dtype], torch.Tensor]], dict[str, Any]]) -> Any:
        """Make a batch with `read(allocate)`: something that is pickled quickly and arrives as the batch."""
        place = self._free_place()
        writer = _Place(self._memory, _HEADER_BYTES + place * self._place_bytes, self._place_bytes if place >= 0 else 0)
        flat = flatten(read(writer.empty))
        spec = tuple((name, *writer.put(tensor)) for name, tensor in flat.items())
        if place < 0 or writer.num_bytes > self._place_bytes:
            if writer.num_bytes > self._place_bytes:
                self._begin(writer.num_bytes)
            return unflatten(flat)
        self._bytes[1 + place] = 1
        assert self._memory is not None
        return _SharedBatch(self._key, place, self._place_bytes, spec, None if self._bytes[0] else self._memory)

    def _free_place(self) -> int:
        """The first place that nobody uses, -1 if there is none."""
        if self._memory is None:
            return -1
        free = np.flatnonzero(self._bytes[1 : 1 + NUM_PLACES] == 0)
        return int(free[0]) if len(free) else -1

    def _begin(self, place_bytes: int) -> None:
        """Have places of at least this size; pages that are never written cost nothing."""
        self._place_bytes = -(-place_bytes // _HEADER_BYTES) * _HEADER_BYTES
        storage = torch.UntypedStorage._new_shared(_HEADER_BYTES + NUM_PLACES * self._place_bytes)
        self._memory = torch.empty(0, dtype=torch.uint8).set_(storage)
        self._bytes = self._memory.numpy()
        self._bytes[:_HEADER_BYTES] = 0
        self._key = f"{os.getpid()}-{secrets.token_hex(8)}"


class _Place:
    """Hands out the bytes of one place, one tensor after the other."""

    def __init__(self, memory: torch.Tensor | None, start: int, size: int) -> None:
        self._memory, self._start, self._size = memory, start, size
        self._first = memory.data_ptr() + start if memory is not None else 0
        #: What the batch needs.
        self.num_bytes = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        num_bytes = prod(shape) * dtype.itemsize
        start = self.num_bytes
        self.num_bytes += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        if self._memory is None or self.num_bytes > self._size or not num_bytes:
            return torch.empty(tuple(shape), dtype=dtype)
        begin = self._start + start
        return self._memory[begin : begin + num_bytes].view(dtype).view(tuple(shape))

    def put(self, tensor: torch.Tensor) -> tuple[int, torch.dtype, tuple[int, ...], tuple[int, ...]]:
        """Say where a tensor lies; it is copied in if it lies elsewhere."""
        offset = tensor.data_ptr() - self._first
        if not 0 <= offset < self._size or self._memory is None:
            offset = self.num_bytes
            inside = self.empty(tensor.shape, tensor.dtype)
            if self.num_bytes <= self._size:
                tensor = inside.copy_(tensor) if tensor.numel() else inside
        return offset, tensor.dtype, tuple(tensor.shape), tensor.stride()


class _SharedBatch:
    """A batch in shared memory, to be pickled; arrives as a nested dict of tensors."""

    def __init__(self, key: str, place: int, place_bytes: int, spec: _Spec, memory: torch.Tensor | None) -> None:
        self._parts = key, place, place_bytes, spec, memory

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrive, self._parts


#: Shared memory of workers by its key, in the process that consumes.
_mapped: dict[str, np.ndarray] = {}


def _arrive(key: str, place: int, place_bytes: int, spec: _Spec, memory: torch.Tensor | None) -> dict[str, Any]:
    """View a batch where it lies; its place is free when the last of its tensors is gone."""
    found = _mapped.get(key)
    if found is None:
        assert memory is not None, "the first batches bring the memory along"
        for other in [other for other in _mapped if not _is_alive(int(other.partition("-")[0]))]:
            del _mapped[other]
        found = _mapped[key] = memory.numpy()
        found[0] = 1
    start = _HEADER_BYTES + place * place_bytes
    part = found[start : start + place_bytes]
    storage = torch.from_numpy(part).untyped_storage()
    weakref.finalize(part, _release, found, place).atexit = False
    flat = {
        name: torch.empty(0, dtype=dtype).set_(storage, offset // dtype.itemsize, shape, stride)
        for name, offset, dtype, shape, stride in spec
    }
    return unflatten(flat)


def _release(memory: np.ndarray, place: int) -> None:
    memory[1 + place] = 0


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True
