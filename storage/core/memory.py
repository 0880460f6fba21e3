"""Tensor memory: reused buffers, copies to devices, numpy views, and access by CUDA streams.

`BufferPool` reuses the memory of large CPU tensors. A buffer is free once Python's reference count
shows that no tensor, view or array over it is alive. Fresh memory costs a page fault per 4 KiB,
which is 2-5 times the cost of filling it. A reused buffer has no page faults. A new buffer of 3 MiB
or more requests 2 MiB pages.

`own` returns a CPU tensor as a numpy array and other tensors unchanged. Code with many small calls
uses it, because small numpy calls take a third of the time of torch calls. `tensor_of` is the
inverse.

`StreamOrder` orders the reads and writes of memory that several CUDA streams use. Streams wait for
CUDA events, and the host never waits. On the CPU no order is needed.
"""

from __future__ import annotations

import mmap
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from math import prod
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from ..errors import UsageError
from . import arguments
from .deferred import DeferredErrors
from .fields import DTYPES, map_leaves

#: Minimum size of a pooled buffer in bytes. The C allocator already reuses smaller memory.
MIN_POOLED_BYTES = 128 * 1024
#: Minimum size in bytes of a buffer that is aligned to huge pages and requests them.
MIN_HUGE_BYTES = 3 * 1024 * 1024
_HUGE_PAGE_BYTES = 2 * 1024 * 1024
_MADV_HUGEPAGE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)
#: Numpy dtypes by torch dtype, without bfloat16, which numpy lacks.
_NUMPY_DTYPES = {kind: dtype for kind, dtype in DTYPES.values() if kind is not torch.bfloat16}
_FLOATS = (torch.float32, torch.float64)
#: Alignment in bytes of tensors that are copied together in one buffer.
_PART_BYTES = 16
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def lasting(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Decorate a function that creates long-lived tensors: disable inference mode and gradients.

    Tensors that are created in inference mode can only be changed in inference mode. A policy may
    create a buffer in this mode by its first call, and write to it outside of this mode later.
    """

    @wraps(function)
    def made(*arguments: _Arguments.args, **options: _Arguments.kwargs) -> _Result:
        with torch.inference_mode(False), torch.no_grad():
            return function(*arguments, **options)

    return made


def _references(buffers: Sequence[object]) -> list[int]:
    """Return the reference count of each buffer.

    The counts include the references from the list `buffers` and from this call.
    """
    return list(map(sys.getrefcount, buffers))


#: Reference count of a free buffer, to which only the list of the pool refers.
#: The count is measured, because it depends on the version of Python.
_FREE_REFERENCES = _references([object()])[0]


def _counts_are_exact() -> bool:
    """Return whether reference counts are exact: CPython with the global interpreter lock."""
    gil_enabled = getattr(sys, "_is_gil_enabled", None)
    return sys.implementation.name == "cpython" and (gil_enabled is None or bool(gil_enabled()))


class BufferPool:
    """Pool of CPU memory whose buffers are reused once no tensor refers to them.

    Args:
        max_buffers: Maximum number of buffers in the pool, free or in use. Further buffers are
            ordinary memory and are released when their tensors are deleted.

    A tensor of the pool may be kept, sliced, reshaped, viewed as another dtype or converted to an
    array for any time. Its memory is reused only after the last of these objects is deleted.
    Thread-safe. Without exact reference counts (PyPy, free-threaded builds) nothing is pooled.
    A pickled pool is loaded empty.
    """

    def __init__(self, max_buffers: int = 8) -> None:
        self.max_buffers = arguments.whole("max_buffers", max_buffers, 0)
        self.num_reused = 0
        self.num_allocated = 0
        self._buffers: list[npt.NDArray[Any]] = []
        self._lock = threading.Lock()
        self._is_exact = _counts_are_exact()

    def take(self, num_bytes: int) -> torch.Tensor:
        """Return a CPU tensor `[num_bytes]` uint8 of arbitrary content, from pooled memory."""
        num_bytes = arguments.whole("num_bytes", num_bytes, 0)
        return self.empty((num_bytes,), torch.uint8)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a contiguous tensor like `torch.empty(shape, dtype=dtype)`, from pooled memory."""
        try:
            num_bytes = int(prod(shape) * dtype.itemsize)
        except (TypeError, AttributeError, ValueError) as cause:
            raise UsageError(
                f"shape must be integers and dtype a torch.dtype, got {shape!r} and {dtype!r}."
            ) from cause
        if num_bytes < MIN_POOLED_BYTES or not self._is_exact:
            return torch.empty(tuple(shape), dtype=dtype, device="cpu")
        # The torch storage of the result gets the requested size, even if the buffer is larger.
        numpy_dtype = _NUMPY_DTYPES.get(dtype)
        if numpy_dtype is None:
            return torch.from_numpy(self._lend(num_bytes)).view(dtype).view(tuple(shape))
        # An array of the final dtype and shape takes half the time of two views by torch.
        return torch.from_numpy(np.ndarray(tuple(shape), numpy_dtype, self._lend(num_bytes)))

    def clear(self) -> None:
        """Remove all buffers from the pool. Tensors and arrays over these buffers stay valid."""
        with self._lock:
            self._buffers.clear()

    @property
    def num_kept(self) -> int:
        """Number of buffers in the pool, free or in use."""
        return len(self._buffers)

    @property
    def num_lent(self) -> int:
        """Number of buffers in the pool that a tensor, view or array still refers to."""
        with self._lock:
            return sum(count > _FREE_REFERENCES for count in _references(self._buffers))

    def __reduce__(self) -> tuple[Any, ...]:
        return BufferPool, (self.max_buffers,)

    def _lend(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        """Return an array `[num_bytes]` uint8 in a free buffer, or else in a new buffer.

        The smallest free buffer that is large enough is used, if it has at most twice the size.
        """
        with self._lock:
            counts = _references(self._buffers)
            free = [place for place, count in enumerate(counts) if count <= _FREE_REFERENCES]
            lent = -1
            size = 2 * num_bytes + 1
            for place in free:
                if num_bytes <= (nbytes := self._buffers[place].nbytes) < size:
                    lent = place
                    size = nbytes
            if lent >= 0:
                self.num_reused += 1
                return self._buffers[lent][:num_bytes]
            buffer = _allocate(num_bytes)
            self.num_allocated += 1
            if len(counts) >= self.max_buffers and free:
                del self._buffers[free[0]]
            if len(self._buffers) < self.max_buffers:
                self._buffers.append(buffer)
            return buffer[:num_bytes]


def _allocate(num_bytes: int) -> npt.NDArray[np.uint8]:
    """Allocate at least `num_bytes` bytes directly from the operating system."""
    is_huge = num_bytes >= MIN_HUGE_BYTES
    page = _HUGE_PAGE_BYTES if is_huge else mmap.PAGESIZE
    size = -(-num_bytes // page) * page
    # One extra page leaves room to align the start of the buffer to a huge page.
    room = size + page if is_huge else size
    if hasattr(mmap, "MAP_PRIVATE") and hasattr(mmap, "MAP_ANONYMOUS"):
        mapped = mmap.mmap(-1, room, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    else:
        mapped = mmap.mmap(-1, room)
    if is_huge and _MADV_HUGEPAGE is not None:
        try:
            mapped.madvise(_MADV_HUGEPAGE)
        except OSError:  # The kernel has no huge pages. Ordinary pages are only slower.
            pass
    start = -np.frombuffer(mapped, dtype=np.uint8).ctypes.data % page
    # Use `offset` instead of a slice. Slices of the result must refer to the result, whose
    # references the pool counts.
    return np.frombuffer(mapped, dtype=np.uint8, count=size, offset=start)


def filled(
    shape: tuple[int, ...], value: float, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return a new tensor filled with one value.

    Large CPU tensors use huge pages, with which random access takes a quarter less time. Zeros on
    the CPU take no memory until a page is first written.
    """
    if device.type != "cpu" or prod(shape) * dtype.itemsize < MIN_POOLED_BYTES:
        return torch.full(shape, value, dtype=dtype, device=device)
    pool = BufferPool(1)
    tensor = pool.empty(shape, dtype)
    return tensor if value == 0 and pool.num_allocated else tensor.fill_(value)


def sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor to a device. Copies from the CPU to CUDA are asynchronous."""
    if device.type != "cuda" or not tensor.is_cpu:
        return tensor.to(device)
    # A pinned tensor is copied too, since the caller may change it before the transfer ends.
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor).to(device, non_blocking=True)


def sent_together(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Copy tensors to a device. One asynchronous transfer sends all host tensors to CUDA.

    Memory is allocated per call, so that each call may pass tensors of other shapes.
    """
    on_host = [tensor for tensor in tensors if tensor.is_cpu]
    if device.type != "cuda" or not on_host:
        return [tensor.to(device) for tensor in tensors]
    starts = []
    num_bytes = 0
    for tensor in on_host:
        starts.append(num_bytes)
        num_bytes += -(-tensor.nbytes // _PART_BYTES) * _PART_BYTES

    def parts(block: torch.Tensor) -> list[torch.Tensor]:
        return [
            block[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for start, tensor in zip(starts, on_host, strict=True)
        ]

    # torch's allocator reuses this pinned memory only after the copy has completed.
    pinned = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    torch._foreach_copy_(parts(pinned), on_host)
    there = iter(parts(pinned.to(device, non_blocking=True)))
    return [next(there) if tensor.is_cpu else tensor.to(device) for tensor in tensors]


def on_device(tree: dict[str, Any], device: torch.device | None) -> dict[str, Any]:
    """Copy a nested dict of tensors to a device. With `device=None`, return `tree` unchanged.

    One asynchronous transfer sends all host tensors to CUDA.
    """
    if device is None:
        return tree
    leaves: list[torch.Tensor] = []
    map_leaves(leaves.append, tree)
    moved = iter(sent_together(leaves, device))
    tensors: dict[str, Any] = map_leaves(lambda _: next(moved), tree)
    return tensors


class PackedCopy:
    """Copier of CPU tensors to CUDA: each call copies tensors of the same shapes in one transfer.

    The tensors are packed into a pinned buffer, which is copied asynchronously. A buffer is packed
    again only after its last copy has completed. If all buffers are being copied, a new buffer is
    allocated. With `MAX_BUFFERS` buffers, the host waits instead.

    Args:
        shapes: Shape of each tensor.
        dtypes: Dtype of each tensor on the device; tensors of other dtypes are converted on the
            host.
        device: CUDA device.

    Attributes:
        num_waits: Number of calls that waited for a buffer whose copy was still running.
    """

    MAX_BUFFERS = 3

    @lasting
    def __init__(
        self, shapes: Sequence[torch.Size], dtypes: Sequence[torch.dtype], device: torch.device
    ) -> None:
        self.num_waits = 0
        self._device = device
        self._parts = []
        self._num_bytes = 0
        for shape, dtype in zip(shapes, dtypes, strict=True):
            start = self._num_bytes
            stop = start + prod(shape) * dtype.itemsize
            self._parts.append((start, stop, shape, dtype))
            self._num_bytes = -(-stop // _PART_BYTES) * _PART_BYTES
        self._block = torch.empty(self._num_bytes, dtype=torch.uint8, device=device)
        self._block_parts = self._cut(self._block)
        #: Pinned buffers, the least recently used first: memory, its views for each tensor, and
        #: the event at the end of its last copy.
        self._buffers: deque[tuple[torch.Tensor, list[torch.Tensor], torch.cuda.Event]] = deque()

    def __call__(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copy tensors to the device and return the copies, which the next call overwrites.

        If other streams read the copies, order these reads before the next call.
        """
        buffer, parts, copied = self._free_buffer()
        torch._foreach_copy_(parts, list(tensors))
        self._block.copy_(buffer, non_blocking=True)
        copied.record(torch.cuda.current_stream(self._device))
        self._buffers.append((buffer, parts, copied))
        return self._block_parts

    def _free_buffer(self) -> tuple[torch.Tensor, list[torch.Tensor], torch.cuda.Event]:
        if self._buffers and self._buffers[0][2].query():  # type: ignore[no-untyped-call]
            return self._buffers.popleft()
        if len(self._buffers) < self.MAX_BUFFERS:
            return self._new_buffer()
        self.num_waits += 1
        self._buffers[0][2].synchronize()
        return self._buffers.popleft()

    @lasting
    def _new_buffer(self) -> tuple[torch.Tensor, list[torch.Tensor], torch.cuda.Event]:
        buffer = torch.empty(self._num_bytes, dtype=torch.uint8, pin_memory=True)
        return buffer, self._cut(buffer), torch.cuda.Event()  # type: ignore[no-untyped-call]

    def _cut(self, block: torch.Tensor) -> list[torch.Tensor]:
        return [
            block[start:stop].view(dtype).view(shape) for start, stop, shape, dtype in self._parts
        ]


class StreamOrder:
    """Synchronization of the CUDA streams that read and write the memory of one object.

    Use `with order.reads:` or `with order.writes:` around each access, under the object's lock. A
    reading stream waits for the last write. A writing stream waits for the last write and for all
    reads since then. The host never waits. Contexts inside of a `writes` context have no effect.
    The constructor of the object counts as a write by the stream that was current when the
    `StreamOrder` was created.

    Args:
        device: Device of the memory. On the CPU nothing is done.

    Attributes:
        is_needed: Whether the device is a CUDA device.
        reads: Context manager for code that reads the memory.
        writes: Context manager for code that writes the memory.
        deferred: Errors of earlier accesses on the device. A later call raises them, because the
            host does not wait.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.deferred = DeferredErrors()
        self.is_needed = device.type == "cuda"
        self.reads = _StreamAccess(self, is_write=False)
        self.writes = _StreamAccess(self, is_write=True)
        #: Event after the last write, by the id of the writing stream.
        #: A stream does not wait for its own events, since its work runs in order.
        self._written: dict[int, torch.cuda.Event] = {}
        #: Event after the last read of each stream since the last write, by the id of the stream.
        self._read: dict[int, torch.cuda.Event] = {}
        #: Number of nested `writes` contexts.
        self._num_writes = 0
        #: Stream that created the object; None after the first access.
        self._creator = torch.cuda.current_stream(device) if self.is_needed else None

    def wait(self, is_write: bool) -> None:
        """Make the current stream wait for earlier accesses of other streams."""
        if not self.is_needed or self._num_writes:
            return
        stream = torch.cuda.current_stream(self._device)
        if self._creator is not None:
            self._record_creation(stream)
        for writer, event in self._written.items():
            if writer != stream.cuda_stream:
                stream.wait_event(event)
        if is_write:
            for reader, event in self._read.items():
                if reader != stream.cuda_stream:
                    stream.wait_event(event)

    def _record_creation(self, stream: torch.cuda.Stream) -> None:
        """Record the constructor of the object as a write of the stream that ran it.

        The first access calls this method, because the constructor has ended by then. If `stream`
        ran the constructor, its accesses are in order anyway, and nothing is recorded.
        """
        creator = self._creator
        self._creator = None
        if creator is not None and creator.cuda_stream != stream.cuda_stream:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(creator)
            self._written[creator.cuda_stream] = event

    def record(self, is_write: bool) -> None:
        """Record that the current stream has read or written, so that others can wait for it."""
        if not self.is_needed or self._num_writes:
            return
        stream = torch.cuda.current_stream(self._device)
        events = self._written if is_write else self._read
        event = events.get(stream.cuda_stream) or torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(stream)
        if is_write:
            self._written = {stream.cuda_stream: event}
            self._read.clear()
        else:
            self._read[stream.cuda_stream] = event

    def enter(self, is_write: bool) -> None:
        """Begin a write or a read: the current stream waits for earlier accesses of others."""
        self.wait(is_write)
        self._num_writes += is_write

    def exit(self, is_write: bool, is_done: bool) -> None:
        """End a write or a read. After an error, `is_done` is False and nothing is recorded."""
        self._num_writes -= is_write
        if is_done:
            self.record(is_write)

    def keep(self, tensors: Iterable[torch.Tensor]) -> None:
        """Prevent reuse of the memory of tensors until the work of the current stream is done."""
        if self.is_needed:
            stream = torch.cuda.current_stream(self._device)
            for tensor in tensors:
                if tensor.is_cuda:
                    tensor.record_stream(stream)


class _StreamAccess:
    """Context manager for code that reads or writes memory of several CUDA streams. Reentrant."""

    __slots__ = ("_is_write", "_order")

    def __init__(self, order: StreamOrder, is_write: bool) -> None:
        self._order = order
        self._is_write = is_write

    def __enter__(self) -> None:
        if self._order.is_needed:
            self._order.enter(self._is_write)

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        if self._order.is_needed:
            self._order.exit(self._is_write, error_type is None)


def writes_in_order(method: Callable[..., _Result]) -> Callable[..., _Result]:
    """Decorate a method that writes the memory of its object: run it in `self._order.writes`.

    `self._order` is the `StreamOrder` of the object. The method waits for earlier accesses of other
    streams. Later accesses of other streams wait for the method.
    """

    @wraps(method)
    def ordered(self: Any, *arguments: Any, **options: Any) -> _Result:
        with self._order.writes:
            return method(self, *arguments, **options)

    return ordered


def library(device: torch.device) -> ModuleType:
    """Return the faster module for small calls on a device: numpy on the CPU, else torch."""
    return np if device.type == "cpu" else torch


def own(tensor: torch.Tensor) -> Any:
    """Return a CPU tensor as an array that shares its memory; return other tensors unchanged."""
    return tensor.numpy() if tensor.is_cpu else tensor


def own_float64(tensor: torch.Tensor) -> Any:
    """Return real numbers in float64, without gradients: an array on the CPU, else a tensor."""
    if tensor.is_cpu and tensor.dtype in _FLOATS:  # `astype` takes a fifth of the time of torch.
        return (tensor.detach() if tensor.requires_grad else tensor).numpy().astype(np.float64)
    return own(tensor.detach().double())


def float32_of(values: Any) -> torch.Tensor:
    """Return an array or tensor as a float32 tensor. A float32 tensor is not copied."""
    return (
        values.float()
        if isinstance(values, torch.Tensor)
        else torch.from_numpy(values.astype(np.float32))
    )


def tensor_of(values: Any) -> torch.Tensor:
    """Return an array or tensor as a tensor that shares its memory."""
    return values if isinstance(values, torch.Tensor) else torch.from_numpy(values)


def add_multiple(values: Any, others: Any, factor: int) -> Any:
    """Compute `values + others * factor` of arrays or tensors, in one operation for tensors."""
    if isinstance(values, torch.Tensor):
        return torch.add(values, others, alpha=factor)
    return values + others * factor


def take_rows(source: Any, index: Any, out: Any) -> None:
    """Copy rows of an array or tensor to `out`; the caller ensures that indices are in range."""
    if isinstance(source, torch.Tensor):
        torch.index_select(source, 0, index, out=out)
    else:
        # The default mode "raise" is slower, since it writes to a temporary array first.
        source.take(index, 0, out, "clip")


def last_copies(index: Any, values: Any, capacity: int, order: torch.Tensor | None = None) -> Any:
    """Replace each value by the last value of the same index, so that any write order works.

    torch writes `target[index] = values` in no defined order on a GPU, so that any of several
    values of one index could remain. With the result of this function the last value remains.
    Arrays are returned unchanged, since numpy writes in order.

    Args:
        index: `[n]` integers below `capacity`, possibly with duplicates.
        values: `[n, ...]`.
        capacity: Upper limit of the indices.
        order: `[n]` int64 tensor of 0, 1, ..., n - 1, if the caller already has one.
    """
    if not isinstance(values, torch.Tensor):
        return values
    if order is None:
        order = torch.arange(len(index), device=index.device)
    last = order.new_empty(capacity).scatter_reduce_(0, index, order, "amax", include_self=False)
    return values.index_select(0, last.index_select(0, index))


def as_given(value: Any) -> torch.Tensor:
    """Convert a value to a tensor without a change of its device or precision.

    Tensors are returned unchanged. Other values go to the CPU, and Python floats become float64.
    `torch.as_tensor` without further arguments would move tensors to the default device and round
    Python floats to the default dtype.
    """
    if isinstance(value, torch.Tensor):
        return value
    return torch.as_tensor(viewable(np.asarray(value)), device="cpu")


def on_host(value: Any) -> npt.NDArray[Any]:
    """Convert a tensor, array or list to a numpy array. bfloat16 becomes float32."""
    if not isinstance(value, torch.Tensor):
        return np.asarray(value)
    value = value.detach()
    array: npt.NDArray[Any] = (
        (value.float() if value.dtype == torch.bfloat16 else value).cpu().numpy()
    )
    return array


def viewable(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return an array whose memory torch can share: the array itself if possible, else a copy."""
    has_odd_strides = any(
        stride < 0 or (array.itemsize and stride % array.itemsize) for stride in array.strides
    )
    if (
        not has_odd_strides
        and array.dtype.isnative
        and array.flags.writeable
        and array.flags.aligned
    ):
        return array
    return np.array(array, array.dtype.newbyteorder("="), order="C")
