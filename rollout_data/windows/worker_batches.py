"""Batches on their way from `DataLoader` workers: memory that both processes keep mapped, used again and again.

One rule: a place is written only after the worker has dropped the last tensor over it, and so has the consumer. Sending
fresh tensors costs a file, a mapping and its page faults for every batch, several times what gathering it costs.
"""

from __future__ import annotations

import os
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
from storage.errors import DataFileError, MissingFieldError, OutOfRangeError, UnansweredError, UsageError

from ..blocks.row_layout import Allocate
from ..blocks.trajectory_index import Int64s
from ..sources.processes.process_group import is_in_worker
from ..sources.processes.shared_memory import SharedMemory, Spot, shared_memory
from .skipped_windows import OnError

#: Batches of one worker that may be under way or in use at once; with more, batches travel as usual.
NUM_PLACES = 8
_ALIGNMENT = 64
#: Bytes before the batch, the first of which tells whether it is on its way or in use.
_HEADER_BYTES = 4096
_IS_LENT = 0


def collate_windows(batch: Any) -> Any:
    """Return a batch as a plain dict, which torch's pytree looks into; stack a list of single windows into one."""
    if not isinstance(batch, list):
        return dict(batch) if type(batch) is WindowBatch else batch  # what a worker shares becomes one on its way
    if not batch or not all(isinstance(window, Mapping) for window in batch):
        raise UsageError("collate", "", "a batch or a list of windows", f"a list of {len(batch)} others")
    flat = [flatten(window) for window in batch]
    return unflatten({name: torch.stack([window[name] for window in flat]) for name in flat[0]})


class WindowBatch(dict[str, Any]):
    """A nested dict of tensors that knows what torch's default collate does not: that it is a batch already."""

    def __missing__(self, key: object) -> Any:
        advice = "" if isinstance(key, str) else "Give the DataLoader collate_fn=dataset.collate"
        raise MissingFieldError("read the field", f"{key!r} of a batch", ", ".join(self), "no such field", advice)

    __repr__ = described

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy is a plain dict."""
        return dict, (dict(self),)


class WindowBatches(Shown, Dataset[dict[str, Any]], ABC):
    """A map-style dataset that reads whole batches at once, into memory which a pickled copy makes anew."""

    #: What happens to windows whose data are damaged; see `WindowDataset`.
    on_error: OnError = "raise"
    #: Attributes that are not pickled, but made by `_open`.
    _made_anew: tuple[str, ...] = ("_pool", "_shared")

    def _open(self) -> None:
        # Enough for the batches of a prefetching loader with several kinds of rows.
        self._pool, self._shared = BufferPool(24), WorkerMemory()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in self._made_anew}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()

    @abstractmethod
    def __len__(self) -> int:
        """Count the windows."""

    def __getitem__(self, window: int) -> dict[str, Any]:
        """Return one window: a nested dict of `[L, *shape]` tensors.

        Raises:
            IndexError: There is no such window; negative numbers count from the end.
        """
        if not is_whole(window) or not -len(self) <= window < len(self):
            kind = OutOfRangeError if is_whole(window) else UsageError
            action = f"read a window of a {type(self).__name__}"
            raise kind(action, "", f"a whole number in {-len(self)}:{len(self)}", repr(window))
        try:
            batch = self.read([window], self._pool.empty)
        except UnansweredError:
            raise
        except DataFileError as problem:
            raise self.damage([window], problem) from problem
        found: dict[str, Any] = map_leaves(lambda tensor: tensor[0], batch)
        return found

    def __getitems__(self, windows: Sequence[int] | np.ndarray) -> dict[str, Any]:
        """Return a batch: a nested dict of `[B, L, *shape]` tensors, in the order of `windows`; the caller's.

        Raises:
            IndexError: There is no such window.
            CorruptFileError: A chunk of a coded component is damaged; the text names it.
        """
        return self.batch(windows)

    def batch(self, windows: Sequence[int] | np.ndarray, on_error: OnError | None = None) -> dict[str, Any]:
        """Return a batch as `__getitems__` does; `on_error` None is that of the dataset.

        Raises:
            DataFileError: A window is damaged and not skipped; names the file, the episode and the frame.
        """
        try:
            return self._made(windows)
        except UnansweredError:
            raise
        except DataFileError as problem:
            if (on_error or self.on_error) == "raise":
                raise self.damage(windows, problem) from problem
        kept = self.readable(windows, on_error)
        try:
            return self._made(kept)
        except UnansweredError:
            raise
        except DataFileError:  # behind a network, damaged rows between those of two windows are fetched with them
            return self._made_one_by_one(kept)

    def _made(self, windows: Sequence[int] | np.ndarray) -> dict[str, Any]:
        if is_in_worker():
            batch: dict[str, Any] = self._shared.make(lambda allocate: self.read(windows, allocate))
            return batch
        return WindowBatch(self.read(windows, self._pool.empty))

    def _made_one_by_one(self, windows: Int64s) -> dict[str, Any]:
        return WindowBatch(collate_windows([self[window] for window in windows.tolist()]))

    @abstractmethod
    def readable(self, windows: Sequence[int] | np.ndarray, on_error: OnError | None) -> Int64s:
        """Leave out the windows that cannot be read, which are counted.

        Raises:
            DataFileError: Nothing of the data can be read any more.
        """

    @abstractmethod
    def damage(self, windows: Sequence[int] | np.ndarray, problem: DataFileError) -> DataFileError:
        """Build the error for windows that cannot be read because of a problem, of the first one that is damaged."""

    @abstractmethod
    def read(self, windows: Sequence[int] | np.ndarray, allocate: Allocate) -> dict[str, Any]:
        """Read a batch into memory that `allocate(shape, dtype)` gives; otherwise like `__getitems__`."""

    def ahead(self, seed: Sequence[int] | None) -> Callable[[int, int], None]:
        """Return what is told the positions `start:stop` of an epoch before they are read; here it does nothing.

        `seed` is that of `shuffled`; None goes by the numbers of the windows.
        """
        return lambda start, stop: None

    #: For `DataLoader(dataset, collate_fn=dataset.collate)`: a batch is one already; lists of windows are stacked.
    collate = staticmethod(collate_windows)


class WorkerMemory:
    """Where a worker puts its batches. Belongs to one process and thread.

    Attributes:
        places: One for each batch that is under way or in use, and those that are free.
    """

    def __init__(self) -> None:
        # Only what goes to another process goes by its place; copies are ordinary ones.
        ForkingPickler.register(_SharedBatch, _departing)
        self.places: list[_SharedPlace] = []
        self._place_bytes = 0

    def make(self, read: Callable[[Allocate], dict[str, Any]]) -> Any:
        """Make a batch with `read(allocate)`: a nested dict that is pickled quickly where it has a place."""
        place, num_bytes = self._free_place(), 0  # that the batch needs
        memory = torch.empty(0, dtype=torch.uint8, device="cpu") if place is None else place.lend()
        given = {memory.data_ptr()}  # where the storages begin that tensors were given from

        def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
            """Return the next bytes of the place; ordinary memory where they do not suffice."""
            nonlocal num_bytes
            start = num_bytes
            size = prod(shape) * dtype.itemsize
            num_bytes += -(-size // _ALIGNMENT) * _ALIGNMENT
            if size and num_bytes <= len(memory):
                return memory[start : start + size].view(dtype).view(tuple(shape))
            tensor = torch.empty(tuple(shape), dtype=dtype, device="cpu")
            given.add(tensor.untyped_storage().data_ptr())
            return tensor

        def put(tensor: torch.Tensor) -> torch.Tensor:
            """Copy in what lies elsewhere and is small enough."""
            if tensor.untyped_storage().data_ptr() in given:
                return tensor
            inside = empty(tensor.shape, tensor.dtype)
            return inside.copy_(tensor) if num_bytes <= len(memory) else tensor

        batch = map_leaves(put, read(empty))
        self._place_bytes = max(self._place_bytes, num_bytes)
        return WindowBatch(batch) if place is None else _SharedBatch(batch, place)

    def _free_place(self) -> _SharedPlace | None:
        """A place that is not in use: a new one if there is none that is large enough, None if that cannot be."""
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
    """Shared memory for one batch. All of it is taken from the system at once, so there are as few as will do."""

    def __init__(self, memory: SharedMemory, num_bytes: int) -> None:
        self.memory = memory
        self.num_bytes = num_bytes
        self._bytes = memory.take(_HEADER_BYTES + num_bytes)
        self.flags = self._bytes[:_HEADER_BYTES]
        self._part: weakref.ref[np.ndarray] | None = None

    def is_free(self) -> bool:
        """Neither this process nor the consumer holds a tensor over it."""
        return (self._part is None or self._part() is None) and not self.flags[_IS_LENT]

    def lend(self) -> torch.Tensor:
        """Return the memory, uint8 `[n]`, as one that torch takes for ordinary: it copies what is sent singly."""
        part = self._bytes[_HEADER_BYTES:]
        self._part = weakref.ref(part)
        return torch.from_numpy(part)

    def spot(self, leaf: Any) -> Any:
        """Return where a tensor lies; anything that lies elsewhere, or has more to it than values, stays as it is."""
        if type(leaf) is not torch.Tensor or leaf.layout != torch.strided:
            return leaf
        if leaf.untyped_storage().data_ptr() != self._bytes.ctypes.data + _HEADER_BYTES:
            return leaf
        if leaf.requires_grad or leaf.is_conj() or leaf.is_neg():
            return leaf
        return _Spot(leaf.dtype, int(leaf.storage_offset()), tuple(leaf.shape), leaf.stride())


class _Spot(NamedTuple):
    """Where in its place a tensor lies; the offset and the strides count its elements."""

    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class _SharedBatch(WindowBatch):
    """A batch in shared memory: arrives in another process as a nested dict of the same tensors, whatever was done."""

    def __init__(self, batch: Mapping[str, Any], place: _SharedPlace) -> None:
        super().__init__(batch)
        self.place: _SharedPlace | None = place


def _departing(batch: _SharedBatch) -> tuple[Any, ...]:
    place = batch.place
    batch.place = None
    if place is None:  # sent before: the receiver may drop it, which frees the place
        return batch.__reduce__()
    form = map_leaves(place.spot, batch)
    place.flags[_IS_LENT] = 1
    return _arrive, (place.memory.spot, _HEADER_BYTES + place.num_bytes, form)


#: Shared memory of workers, in the process that consumes.
mapped: dict[Spot, np.ndarray] = {}


def _arrive(spot: Spot, num_bytes: int, form: dict[str, Any]) -> dict[str, Any]:
    """View a batch where it lies; its place is free when the last of its tensors is gone."""
    found = mapped[spot] if spot in mapped else _kept(spot, SharedMemory(spot=spot).take(num_bytes))
    part = found[_HEADER_BYTES:]
    storage = torch.from_numpy(part).untyped_storage()
    weakref.finalize(part, _release, found, os.getpid()).atexit = False

    def view(leaf: Any) -> Any:
        if not isinstance(leaf, _Spot):
            return leaf
        return torch.empty(0, dtype=leaf.dtype, device="cpu").set_(storage, leaf.offset, leaf.shape, leaf.stride)

    arrived: dict[str, Any] = map_leaves(view, form)
    return arrived


def _kept(spot: Spot, memory: np.ndarray) -> np.ndarray:
    """Keep a worker's memory mapped as long as the loader keeps the worker."""
    for process in active_children():
        if process.pid == spot[0]:
            mapped[spot] = memory
            weakref.finalize(process, mapped.pop, spot, None).atexit = False
    return memory


def _release(memory: np.ndarray, process: int) -> None:
    if os.getpid() == process:  # in a fork the batch is only a copy of a name
        memory[_IS_LENT] = 0
