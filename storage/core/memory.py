"""Memory: reused buffers for large results, tensors that are kept, tensors as arrays, and streams that share memory.

One rule: a pooled buffer is handed out again only if no tensor, view or array over it is alive, which Python's own
reference count says. Fresh large memory costs a page fault per 4 KiB, which is 2-5 times the cost of filling it; a
reused buffer costs none, and a new one of 3 MiB or more asks for 2 MiB pages.

Small calls of numpy take a third of the time of torch's. Code that does many writes one set of lines for both: `own`
gives an array on the CPU and the tensor itself elsewhere, and `tensor_of` goes back.

Events order streams of CUDA, and the host never waits; on the CPU there is nothing to order.
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
from .fields import DTYPES

#: Below this size the C allocator recycles memory by itself, so that pooling gains nothing.
MIN_POOLED_BYTES = 128 * 1024
#: From this size on a buffer is aligned to, and asks for, huge pages.
MIN_HUGE_BYTES = 3 * 1024 * 1024
_HUGE_PAGE_BYTES = 2 * 1024 * 1024
_MADV_HUGEPAGE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)
#: What numpy can make as well as torch.
_NUMPY_DTYPES = {kind: dtype for kind, dtype in DTYPES.values() if kind is not torch.bfloat16}
_FLOATS = (torch.float32, torch.float64)
#: Tensors that travel together start at multiples of this many bytes.
_PART_BYTES = 16
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def lasting(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Decorate what makes tensors that are kept: it is called outside of inference mode, and without gradients.

    torch forbids writing to tensors made in inference mode once it is over, and a policy may make the first call in it
    and the next one outside.
    """

    @wraps(function)
    def made(*arguments: _Arguments.args, **options: _Arguments.kwargs) -> _Result:
        with torch.inference_mode(False), torch.no_grad():
            return function(*arguments, **options)

    return made


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
    (PyPy, free-threaded builds), every call allocates plainly. A pickled pool arrives empty.
    """

    def __init__(self, max_buffers: int = 8) -> None:
        self.max_buffers = arguments.whole(arguments.creating(self), "max_buffers", max_buffers, 0)
        self.num_reused = 0
        self.num_allocated = 0
        self._buffers: list[npt.NDArray[Any]] = []
        self._lock = threading.Lock()
        self._is_exact = _counts_are_exact()

    def take(self, num_bytes: int) -> torch.Tensor:
        """Return `[num_bytes]` uint8 on the CPU with arbitrary content."""
        num_bytes = arguments.whole("call BufferPool.take", "num_bytes", num_bytes, 0)
        return self.empty((num_bytes,), torch.uint8)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a contiguous tensor like `torch.empty(shape, dtype=dtype)`, from pooled memory."""
        try:
            num_bytes = int(prod(shape) * dtype.itemsize)
        except (TypeError, AttributeError, ValueError) as cause:
            expected = "shape as integers and dtype as a torch.dtype"
            raise UsageError("call BufferPool.empty", "", expected, f"{shape!r} and {dtype!r}") from cause
        if num_bytes < MIN_POOLED_BYTES or not self._is_exact:
            return torch.empty(tuple(shape), dtype=dtype, device="cpu")
        # The array holds a slice that holds its buffer; the tensor's storage is exactly as large as asked.
        kind = _NUMPY_DTYPES.get(dtype)
        if kind is None:
            return torch.from_numpy(self._lend(num_bytes)).view(dtype).view(tuple(shape))
        return torch.from_numpy(np.ndarray(tuple(shape), kind, self._lend(num_bytes)))  # in half the time

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
        """Buffers in the pool that something still refers to."""
        with self._lock:
            return sum(count > _FREE_REFERENCES for count in _references(self._buffers))

    def __reduce__(self) -> tuple[Any, ...]:
        return BufferPool, (self.max_buffers,)

    def _lend(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        """Return the first bytes of a free buffer: the smallest that wastes at most half of itself."""
        with self._lock:
            counts = _references(self._buffers)
            free = [place for place, count in enumerate(counts) if count <= _FREE_REFERENCES]
            found = -1
            size = 2 * num_bytes + 1
            for place in free:
                if num_bytes <= (nbytes := self._buffers[place].nbytes) < size:
                    found = place
                    size = nbytes
            if found >= 0:
                self.num_reused += 1
                return self._buffers[found][:num_bytes]
            buffer = _allocate(num_bytes)
            self.num_allocated += 1
            if len(counts) >= self.max_buffers and free:
                del self._buffers[free[0]]
            if len(self._buffers) < self.max_buffers:
                self._buffers.append(buffer)
            return buffer[:num_bytes]


def _allocate(num_bytes: int) -> npt.NDArray[np.uint8]:
    """Map private anonymous memory for at least `num_bytes`; nothing is touched yet."""
    is_huge = num_bytes >= MIN_HUGE_BYTES
    page = _HUGE_PAGE_BYTES if is_huge else mmap.PAGESIZE
    size = -(-num_bytes // page) * page
    # One page more than needed, never touched, buys the alignment that huge pages want.
    room = size + page if is_huge else size
    if hasattr(mmap, "MAP_PRIVATE") and hasattr(mmap, "MAP_ANONYMOUS"):
        mapped = mmap.mmap(-1, room, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    else:
        mapped = mmap.mmap(-1, room)
    if is_huge and _MADV_HUGEPAGE is not None:
        try:
            mapped.madvise(_MADV_HUGEPAGE)
        except OSError:  # a kernel without huge pages: ordinary ones work as well, only slower
            pass
    start = -np.frombuffer(mapped, dtype=np.uint8).ctypes.data % page
    # frombuffer with an offset, not a slice: slices of this array must hold this array itself.
    return np.frombuffer(mapped, dtype=np.uint8, count=size, offset=start)


def filled(shape: tuple[int, ...], value: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocate numbers, all alike, that are asked for at random; much of it on huge pages, which takes a quarter less.

    Zeros on the CPU are those of the system itself, which it gives when a page is first written.
    """
    if device.type != "cpu" or prod(shape) * dtype.itemsize < MIN_POOLED_BYTES:
        return torch.full(shape, value, dtype=dtype, device=device)
    pool = BufferPool(1)
    found = pool.empty(shape, dtype)
    return found if value == 0 and pool.num_allocated else found.fill_(value)


def sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor on a device; host memory travels to CUDA as a pinned copy, and the host does not wait."""
    if device.type != "cuda" or not tensor.is_cpu:
        return tensor.to(device)
    # A copy even of pinned memory: the caller may change it before it has arrived.
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor).to(device, non_blocking=True)


def sent_together(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Return tensors on a device; those on the host travel to CUDA in one pinned copy, and the host does not wait.

    Unlike `PackedCopy` this takes fresh memory, for calls of any shapes.
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

    # Pinned memory is used again only after its copy: torch's allocator sees to that.
    pinned = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    torch._foreach_copy_(parts(pinned), on_host)
    there = iter(parts(pinned.to(device, non_blocking=True)))
    return [next(there) if tensor.is_cpu else tensor.to(device) for tensor in tensors]


class PackedCopy:
    """Copy host tensors of fixed shapes and dtypes to a CUDA device again and again, each time in one piece.

    The tensors are packed into a pinned buffer, which travels asynchronously. A buffer is packed again only after its
    last copy has completed. Up to `MAX_BUFFERS` buffers are allocated while earlier ones are busy; then the host waits.

    Args:
        shapes: Shape of each tensor.
        dtypes: Dtype of each tensor on the device; tensors of other dtypes are converted on the host.
        device: CUDA device.

    Attributes:
        num_waits: Calls that waited for a busy buffer.
    """

    MAX_BUFFERS = 3

    @lasting
    def __init__(self, shapes: Sequence[torch.Size], dtypes: Sequence[torch.dtype], device: torch.device) -> None:
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
        #: Pinned buffers, the least recently packed one first: memory, its parts, and the event of its copy.
        self._buffers: deque[tuple[torch.Tensor, list[torch.Tensor], torch.cuda.Event]] = deque()

    def __call__(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the tensors on the device. The next call overwrites them: read them first, in order of streams."""
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
        return [block[start:stop].view(dtype).view(shape) for start, stop, shape, dtype in self._parts]


class LateNumber:
    """Read a number that a device computes, without waiting for it: its copy to the host is read once it has arrived.

    One copy is under way at a time. Devices other than CUDA have no pinned memory; there it is read at once.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_asynchronous = device.type == "cuda"
        self._copied: torch.cuda.Event | None = None
        self._number: torch.Tensor | None = None
        self._about: Any = None
        self._waiting: tuple[torch.Tensor, Any] | None = None

    @property
    def is_free(self) -> bool:
        """Whether no copy is under way."""
        return self._number is None

    @lasting
    def send(self, number: torch.Tensor, about: Any = None) -> None:
        """Copy a tensor of one integer. While an earlier copy is under way, the last one waits for the next `receive`.

        Args:
            number: One integer.
            about: Returned with the number.
        """
        if self._number is not None:
            self._waiting = number, about
            return
        self._about = about
        if not self._is_asynchronous:
            self._number = number.detach().reshape(1).cpu()
            return
        self._number = torch.empty(1, dtype=torch.int64, pin_memory=True)
        self._number.copy_(number.reshape(1), non_blocking=True)
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._copied.record(torch.cuda.current_stream(self._device))

    def receive(self) -> tuple[int, Any] | None:
        """Return the number and what it is about, once; None if no copy has arrived."""
        if self._number is None:
            return None
        if self._copied is not None and not self._copied.query():  # type: ignore[no-untyped-call]
            return None
        found = int(self._number), self._about
        self._number = self._copied = self._about = None
        if self._waiting is not None:
            number, about = self._waiting
            self._waiting = None
            if self._is_asynchronous:  # another stream may have made it
                number.record_stream(torch.cuda.current_stream(self._device))
            self.send(number, about)
        return found


class StreamOrder:
    """Order the writes and reads of one object's memory among CUDA streams.

    Use `with order.reads:` or `with order.writes:` around each access, under the object's lock. A reader waits for the
    last write. A writer waits for the last write and for all reads since then. The host never waits.

    Args:
        device: Device of the memory. On the CPU nothing is done.

    Attributes:
        is_needed: Whether the device has streams.
        reads: Context of a read.
        writes: Context of a write.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.is_needed = device.type == "cuda"
        self.reads = _StreamAccess(self, is_write=False)
        self.writes = _StreamAccess(self, is_write=True)
        #: Stream -> event of its last write or read. A stream does not wait for itself: its work runs in order.
        self._written: dict[int, torch.cuda.Event] = {}
        self._read: dict[int, torch.cuda.Event] = {}

    def wait(self, is_write: bool) -> None:
        """Let the current stream wait for earlier accesses of other streams."""
        if not self.is_needed:
            return
        stream = torch.cuda.current_stream(self._device)
        for writer, event in self._written.items():
            if writer != stream.cuda_stream:
                stream.wait_event(event)
        if is_write:
            for reader, event in self._read.items():
                if reader != stream.cuda_stream:
                    stream.wait_event(event)

    def record(self, is_write: bool) -> None:
        """Note that the work of the current stream has been launched."""
        if not self.is_needed:
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

    def keep(self, tensors: Iterable[torch.Tensor]) -> None:
        """Keep the memory of tensors that will be dropped until the current stream has done its work."""
        if self.is_needed:
            stream = torch.cuda.current_stream(self._device)
            for tensor in tensors:
                if tensor.is_cuda:
                    tensor.record_stream(stream)


class _StreamAccess:
    """Context of one access of a `StreamOrder`. It may be used again, and nested."""

    __slots__ = ("_is_write", "_order")

    def __init__(self, order: StreamOrder, is_write: bool) -> None:
        self._order = order
        self._is_write = is_write

    def __enter__(self) -> None:
        if self._order.is_needed:
            self._order.wait(self._is_write)

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        if self._order.is_needed and error_type is None:
            self._order.record(self._is_write)


def writes_in_order(method: Callable[..., _Result]) -> Callable[..., _Result]:
    """Decorate a method that writes memory of its object, whose `StreamOrder` is `_order`.

    The method waits for the work of other streams on that memory, and they wait for the method.
    """

    @wraps(method)
    def ordered(self: Any, *arguments: Any, **options: Any) -> _Result:
        with self._order.writes:
            return method(self, *arguments, **options)

    return ordered


def library(device: torch.device) -> ModuleType:
    """Return the library whose functions take what `own` gives: numpy on the CPU, else torch."""
    return np if device.type == "cpu" else torch


def own(tensor: torch.Tensor) -> Any:
    """Show a tensor as an array if it is on the CPU; memory is shared."""
    return tensor.numpy() if tensor.is_cpu else tensor


def own_float64(tensor: torch.Tensor) -> Any:
    """Copy a tensor of real numbers as float64, without gradients, as `own` does."""
    if tensor.is_cpu and tensor.dtype in _FLOATS:  # with numpy in a fifth of the time
        return (tensor.detach() if tensor.requires_grad else tensor).numpy().astype(np.float64)
    return own(tensor.detach().double())


def float32_of(values: Any) -> torch.Tensor:
    """Copy what `own` gave as a tensor of float32."""
    return values.float() if isinstance(values, torch.Tensor) else torch.from_numpy(values.astype(np.float32))


def tensor_of(values: Any) -> torch.Tensor:
    """Show what `own` gave, or what was computed from it, as a tensor; memory is shared."""
    return values if isinstance(values, torch.Tensor) else torch.from_numpy(values)


def add_multiple(values: Any, others: Any, factor: int) -> Any:
    """Return `values + others * factor` of what `own` gives; of tensors in one operation."""
    if isinstance(values, torch.Tensor):
        return torch.add(values, others, alpha=factor)
    return values + others * factor


def take_rows(source: Any, index: Any, out: Any) -> None:
    """Copy rows of what `own` gives to `out`; indices are in range."""
    if isinstance(source, torch.Tensor):
        torch.index_select(source, 0, index, out=out)
    else:
        source.take(index, 0, out, "clip")  # "raise" would copy twice


def last_copies(index: Any, values: Any, capacity: int) -> Any:
    """Set every copy of a place to the value of its last copy, so that the order of writing does not matter.

    `[n]` places below `capacity` and values as `own` gives them. numpy writes in order, so arrays stay as they are.
    """
    if not isinstance(values, torch.Tensor):
        return values
    order = torch.arange(len(index), device=index.device)
    last = order.new_empty(capacity).scatter_reduce_(0, index, order, "amax", include_self=False)
    return values.index_select(0, last.index_select(0, index))


def as_given(value: Any) -> torch.Tensor:
    """View what a caller gave as a tensor: a tensor where it is, anything else on the CPU; Python's floats as float64.

    `torch.as_tensor` alone moves even a tensor to the default device and rounds floats to the default dtype.
    """
    if isinstance(value, torch.Tensor):
        return value
    return torch.as_tensor(viewable(np.asarray(value)), device="cpu")


def on_host(value: Any) -> npt.NDArray[Any]:
    """Return a tensor, array or list as an array; bfloat16 as float32."""
    if not isinstance(value, torch.Tensor):
        return np.asarray(value)
    value = value.detach()
    array: npt.NDArray[Any] = (value.float() if value.dtype == torch.bfloat16 else value).cpu().numpy()
    return array


def viewable(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return an array that torch can view: a copy if it is backwards, unaligned, byte-swapped or read-only."""
    is_odd = any(stride < 0 or (array.itemsize and stride % array.itemsize) for stride in array.strides)
    if not is_odd and array.dtype.isnative and array.flags.writeable and array.flags.aligned:
        return array
    return np.array(array, array.dtype.newbyteorder("="), order="C")
