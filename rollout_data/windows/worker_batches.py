"""Transfer of batches from `DataLoader` workers through shared memory that is reused.

A worker has several slots of shared memory. A slot is written again only after the worker and the
consumer have deleted all its tensors. Without reuse, every batch would need a new file, a mapping
and page faults, which take several times as long as the gather.

Processor time per batch in ms, summed over the processes of a `DataLoader` with two workers, on a
virtual machine with two cores (medians of five alternating runs):

| batch | these slots | torch's own transfer |
|---|---|---|
| 256 windows of 10 frames, 5.0 MB | 2.6 | 14.0 |
| 32 windows of 10 frames, 0.6 MB | 1.7 | 7.0 |
| 1024 windows of 16 frames, 32 MB | 8.8 | 57.9 |
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from math import prod
from multiprocessing import active_children
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

from storage.core.arguments import is_whole
from storage.core.fields import flatten, map_leaves, unflatten
from storage.core.memory import BufferPool
from storage.core.object_summary import Shown, described
from storage.core.threads import Owner
from storage.errors import (
    DataFileError,
    MissingFieldError,
    OutOfRangeError,
    UnansweredError,
    UsageError,
)

from ..blocks.row_layout import Allocate
from ..blocks.trajectory_index import Int64s
from ..sources.epoch import Epoch
from ..sources.processes.process_group import is_in_worker
from ..sources.processes.shared_memory import SharedMemory, Spot, shared_memory
from .skipped_windows import OnError

#: Maximum number of slots per worker. If all are in use, a batch uses torch's own transfer.
NUM_PLACES = 8
_ALIGNMENT = 64
#: Bytes of a slot before the batch. The first byte is 1 while the batch is in transfer or in use.
_HEADER_BYTES = 4096
_IS_LENT = 0


class WindowBatch(dict[str, Any]):
    """Nested dict of tensors, with a helpful error if torch's default collate function is used."""

    def __missing__(self, key: object) -> Any:
        text = f"the batch has no field {key!r}. The fields are {', '.join(self)}."
        if not isinstance(key, str):
            text += " Pass collate_fn=dataset.collate to the DataLoader."
        raise MissingFieldError(text)

    __repr__ = described

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the batch as a plain dict, so that a reader of the pickle does not need this class."""
        return dict, (dict(self),)


class WindowBatches(Shown, Dataset[dict[str, Any]], ABC):
    """Base class of map-style datasets that read a batch of windows in one call."""

    #: Whether damaged data raise an error, or windows with damaged data are skipped.
    on_error: OnError = "raise"
    #: Names of attributes that are not pickled. An unpickled dataset creates them again.
    _not_pickled: tuple[str, ...] = ("_pool", "_shared")

    def _open(self) -> None:
        # A prefetching loader holds several batches at once, each with a buffer per column. 24
        # buffers are enough for them.
        self._pool = BufferPool(24)
        self._shared = WorkerMemory()

    def __getstate__(self) -> dict[str, Any]:
        return {
            name: value for name, value in self.__dict__.items() if name not in self._not_pickled
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of windows."""

    def __getitem__(self, window: int) -> dict[str, Any]:
        """Return one window: a nested dict of `[L, *shape]` tensors.

        Raises:
            IndexError: The number is out of range; negative numbers count from the end.
        """
        if not is_whole(window) or not -len(self) <= window < len(self):
            error_class = OutOfRangeError if is_whole(window) else UsageError
            raise error_class(
                f"window must be an integer in {-len(self)}:{len(self)}, got {window!r}."
            )
        try:
            batch = self.read([window], self._pool.empty)
        except UnansweredError:
            raise
        except DataFileError as problem:
            raise self.damage([window], problem) from problem
        sample: dict[str, Any] = map_leaves(lambda tensor: tensor[0], batch)
        return sample

    def __getitems__(self, windows: Sequence[int] | np.ndarray) -> dict[str, Any]:
        """Return a batch: a nested dict of `[B, L, *shape]` tensors, in the order of `windows`.

        The caller owns the tensors.

        Raises:
            IndexError: A number is out of range.
            CorruptFileError: A chunk of a coded component is damaged; the message names the chunk.
        """
        return self.batch(windows)

    def batch(
        self, windows: Sequence[int] | np.ndarray, on_error: OnError | None = None
    ) -> dict[str, Any]:
        """Return a batch of windows, with another rule for damaged data than that of the dataset.

        Args:
            windows: Numbers of the windows.
            on_error: "raise" or "skip". None: the rule of the dataset.

        Raises:
            DataFileError: A window is damaged and not skipped; the message names file, episode and
                frame.
        """
        try:
            return self._read_batch(windows)
        except UnansweredError:
            raise
        except DataFileError as problem:
            if (on_error or self.on_error) == "raise":
                raise self.damage(windows, problem) from problem
        kept = self.readable(windows, on_error)
        try:
            return self._read_batch(kept)
        except UnansweredError:
            raise
        except DataFileError:
            # Each window of `kept` is readable alone. One remote read of several windows also reads
            # the rows between them, which may be damaged.
            return self._read_one_by_one(kept)

    def _read_batch(self, windows: Sequence[int] | np.ndarray) -> dict[str, Any]:
        if is_in_worker():
            batch: dict[str, Any] = self._shared.make(lambda allocate: self.read(windows, allocate))
            return batch
        return WindowBatch(self.read(windows, self._pool.empty))

    def _read_one_by_one(self, windows: Int64s) -> dict[str, Any]:
        return WindowBatch(self.collate([self[window] for window in windows.tolist()]))

    @abstractmethod
    def readable(self, windows: Sequence[int] | np.ndarray, on_error: OnError | None) -> Int64s:
        """Return the windows that can be read, and record the others as skipped.

        Raises:
            DataFileError: No window of the dataset is readable.
        """

    @abstractmethod
    def damage(self, windows: Sequence[int] | np.ndarray, problem: DataFileError) -> DataFileError:
        """Return an error that names the first damaged window, after a batch could not be read.

        `problem` is the error of reading the batch. If each window can be read alone, return it.
        """

    @abstractmethod
    def read(self, windows: Sequence[int] | np.ndarray, allocate: Allocate) -> dict[str, Any]:
        """Read a batch of windows into tensors that `allocate(shape, dtype)` creates."""

    def ahead(self, epoch: Epoch | None) -> Callable[[int, int], None]:
        """Return a function that prefetches the windows at positions `start:stop` of an epoch.

        The caller calls it as `function(start, stop)` before each read. By default it does nothing.
        If `epoch` is None, the windows are read in the order of their numbers.
        """
        return lambda start, stop: None

    @staticmethod
    def collate(batch: Any) -> Any:
        """Function for `DataLoader(dataset, collate_fn=dataset.collate)`.

        It converts a batch to a plain dict, which torch's pytree requires. A list of single windows
        is stacked.
        """
        if not isinstance(batch, list):
            # A batch in shared memory keeps its class, which sends it without a copy.
            return dict(batch) if type(batch) is WindowBatch else batch
        if not batch or not all(isinstance(window, Mapping) for window in batch):
            raise UsageError(
                "collate requires a batch or a list of windows, got a list of "
                f"{len(batch)} items that are not windows."
            )
        flat = [flatten(window) for window in batch]
        return unflatten({name: torch.stack([window[name] for window in flat]) for name in flat[0]})


class WorkerMemory:
    """Shared memory for the batches of one worker. Not thread-safe.

    Attributes:
        places: Slots of shared memory, each for one batch; free slots are reused.
    """

    def __init__(self) -> None:
        # Register the function for transfers between processes only. `copy` and `pickle` must
        # create plain dicts instead.
        ForkingPickler.register(_SharedBatch, _departing)
        self.places: list[_SharedPlace] = []
        self._place_bytes = 0

    def make(self, read: Callable[[Allocate], dict[str, Any]]) -> Any:
        """Read a batch into shared memory if a slot is free, otherwise into ordinary memory.

        `read(allocate)` returns the batch as a nested dict. It creates its tensors with `allocate`.
        """
        place = self._free_place()
        num_bytes = 0
        memory = torch.empty(0, dtype=torch.uint8, device="cpu") if place is None else place.lend()
        # Addresses of all memory in which tensors of the batch were allocated.
        allocated = {memory.data_ptr()}

        def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
            """Allocate a tensor in the slot, or in ordinary memory if the slot is full."""
            nonlocal num_bytes
            start = num_bytes
            size = prod(shape) * dtype.itemsize
            num_bytes += -(-size // _ALIGNMENT) * _ALIGNMENT
            if size and num_bytes <= len(memory):
                return memory[start : start + size].view(dtype).view(tuple(shape))
            tensor = torch.empty(tuple(shape), dtype=dtype, device="cpu")
            allocated.add(tensor.untyped_storage().data_ptr())
            return tensor

        def put(tensor: torch.Tensor) -> torch.Tensor:
            """Copy a tensor that is not in the slot into the slot, if it fits."""
            if tensor.untyped_storage().data_ptr() in allocated:
                return tensor
            inside = empty(tensor.shape, tensor.dtype)
            return inside.copy_(tensor) if num_bytes <= len(memory) else tensor

        batch = map_leaves(put, read(empty))
        self._place_bytes = max(self._place_bytes, num_bytes)
        return WindowBatch(batch) if place is None else _SharedBatch(batch, place)

    def _free_place(self) -> _SharedPlace | None:
        """Return a free slot, created if necessary; None if all slots are in use."""
        free = next((place for place in self.places if place.is_free()), None)
        if free is not None and free.num_bytes >= self._place_bytes:
            return free
        number = self.places.index(free) if free is not None else len(self.places)
        if number == NUM_PLACES or not self._place_bytes:
            return free
        if (memory := shared_memory([_HEADER_BYTES + self._place_bytes])) is None:
            return free
        self.places[number : number + 1] = [_SharedPlace(memory, self._place_bytes)]
        return self.places[number]


class _SharedPlace:
    """Slot of shared memory for one batch. Its memory is reserved when the slot is created."""

    def __init__(self, memory: SharedMemory, num_bytes: int) -> None:
        self.memory = memory
        self.num_bytes = num_bytes
        self._bytes = memory.take(_HEADER_BYTES + num_bytes)
        self.flags = self._bytes[:_HEADER_BYTES]
        self._part: weakref.ref[np.ndarray] | None = None

    def is_free(self) -> bool:
        """Return whether all tensors in the slot were deleted, by the worker and by the consumer."""
        return (self._part is None or self._part() is None) and not self.flags[_IS_LENT]

    def lend(self) -> torch.Tensor:
        """Return the memory of the slot for a new batch: uint8 `[num_bytes]`, without the header.

        torch regards the tensor as ordinary memory. If a view of it is sent to another process
        without its batch, torch copies the view.
        """
        part = self._bytes[_HEADER_BYTES:]
        self._part = weakref.ref(part)
        return torch.from_numpy(part)

    def spot(self, leaf: Any) -> Any:
        """Convert a tensor in the slot to its position, which is sent instead of the data.

        Other leaves are returned unchanged: tensors in other memory, with gradients, or with lazy
        conjugation or negation.
        """
        if type(leaf) is not torch.Tensor or leaf.layout != torch.strided:
            return leaf
        if leaf.untyped_storage().data_ptr() != self._bytes.ctypes.data + _HEADER_BYTES:
            return leaf
        if leaf.requires_grad or leaf.is_conj() or leaf.is_neg():
            return leaf
        return _Spot(leaf.dtype, int(leaf.storage_offset()), tuple(leaf.shape), leaf.stride())


class _Spot(NamedTuple):
    """Position of a tensor in a slot. Offset and strides are numbers of elements."""

    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class _SharedBatch(WindowBatch):
    """Batch in a slot of shared memory.

    The process to which the batch is sent receives a nested dict of views of the same memory.
    """

    def __init__(self, batch: Mapping[str, Any], place: _SharedPlace) -> None:
        super().__init__(batch)
        self.place: _SharedPlace | None = place


def _departing(batch: _SharedBatch) -> tuple[Any, ...]:
    place = batch.place
    batch.place = None
    if place is None:  # The batch was sent before, so its receiver may free the slot at any time.
        return batch.__reduce__()
    form = map_leaves(place.spot, batch)
    place.flags[_IS_LENT] = 1
    return _arrive, (place.memory.spot, _HEADER_BYTES + place.num_bytes, form)


#: Slots of worker processes that this process has mapped to receive batches.
mapped: dict[Spot, np.ndarray] = {}


def _arrive(spot: Spot, num_bytes: int, form: dict[str, Any]) -> dict[str, Any]:
    """Unpickle a batch that a worker has sent, as views of the slot in shared memory.

    The slot becomes free when all views are deleted.
    """
    memory = (
        mapped[spot]
        if spot in mapped
        else _keep_mapped(spot, SharedMemory(spot=spot).take(num_bytes))
    )
    part = memory[_HEADER_BYTES:]
    storage = torch.from_numpy(part).untyped_storage()
    weakref.finalize(part, _release, memory, Owner("a batch")).atexit = False

    def view(leaf: Any) -> Any:
        if not isinstance(leaf, _Spot):
            return leaf
        return torch.empty(0, dtype=leaf.dtype, device="cpu").set_(
            storage, leaf.offset, leaf.shape, leaf.stride
        )

    arrived: dict[str, Any] = map_leaves(view, form)
    return arrived


def _keep_mapped(spot: Spot, memory: np.ndarray) -> np.ndarray:
    """Keep a slot mapped, so that the next batch in it is not mapped again. Return its memory.

    The slot is unmapped when the `Process` object of its worker is deleted.
    """
    for process in active_children():
        if process.pid == spot[0]:
            mapped[spot] = memory
            weakref.finalize(process, mapped.pop, spot, None).atexit = False
    return memory


def _release(memory: np.ndarray, consumer: Owner) -> None:
    if consumer.is_own:  # A forked child must not free the slot.
        memory[_IS_LENT] = 0
