"""`AsyncCheckpointSaver`: saves checkpoints in a background thread during training.

`save_async` copies every tensor before it returns. The copy shares no memory with the original.
Tensors that share memory in the original share memory in the copy. All tensors of a copy are in one
pooled buffer, because page faults make copies into new memory several times slower.
"""

from __future__ import annotations

import atexit
import copy
import json
import os
import queue
import threading
import traceback
import weakref
from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import torch

from ..codecs.lz4_frames import check_level
from ..core import arguments
from ..core.memory import BufferPool
from ..core.threads import Owned, Worker
from ..errors import BackgroundError, ClosedError, RolloutDataError, UsageError
from ..live.monitors import PerformanceMonitor
from .allowed_types import refused_part
from .checkpoint_files import SUFFIX, write_checkpoint

ON_FULL = ("block", "drop_oldest", "raise")
#: Alignment of tensors in the buffer, in bytes.
_ALIGNMENT = 64
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


class CheckpointError(BackgroundError, OSError):
    """A checkpoint could not be written. The original error is the `__cause__`."""


class QueueFullError(RolloutDataError, queue.Full):
    """The queue of checkpoints is full. The checkpoint was not saved."""


class AsyncCheckpointSaver(Owned):
    """Writer of checkpoints in a background thread.

    Args:
        max_queue_size: Number of checkpoints that can wait while another is written. Each waiting
            checkpoint uses memory for a copy of its tensors.
        on_full: Behaviour of `save_async` if the queue is full: wait ("block"), drop the oldest
            waiting checkpoint and cancel its future ("drop_oldest"), or raise ("raise").
        monitor: Receives the times of copies (`checkpoint/copy`) and writes (`checkpoint/write`).

    The error of a failed save is raised in its future, and once by the next `save_async`, `wait` or
    `shutdown`. Later checkpoints are still saved. Accepted checkpoints are also written if the
    program ends without `shutdown`. Thread-safe.
    """

    def __init__(
        self,
        max_queue_size: int = 3,
        on_full: str = "block",
        *,
        monitor: PerformanceMonitor | None = None,
    ) -> None:
        self.max_queue_size = arguments.whole("max_queue_size", max_queue_size, 1)
        self.on_full = arguments.choice("on_full", on_full, ON_FULL)
        #: Number of checkpoints that were dropped because the queue was full.
        self.num_dropped = 0
        if monitor is not None:
            expected = "a PerformanceMonitor or None"
            arguments.instance("monitor", monitor, expected, PerformanceMonitor)
        self._monitor = monitor or PerformanceMonitor()
        # Memory of earlier copies is reused, because new memory makes copies several times slower.
        self._pool = BufferPool(max_buffers=max_queue_size + 2)
        self._worker = Worker("checkpoints", max_pending=max_queue_size)
        self._owner = self._worker.owner
        #: Unwritten checkpoints, oldest first: the future, and a list that contains the copy.
        #: The list is cleared when the copy is written or dropped, to free its memory.
        self._waiting: list[tuple[Future[Path], list[Any]]] = []
        self._is_closed = False
        #: Lock held while a call waits for room in the queue and copies its checkpoint.
        self._saving = threading.Lock()
        _open_savers.add(self)

    def __exit__(self, failure: object = None, *_: object) -> None:
        try:
            super().__exit__()
        except CheckpointError:
            # An error of the `with` block is more important than the error of a save.
            if failure is None:
                raise

    @property
    def num_pending(self) -> int:
        """Number of accepted checkpoints that are not written yet."""
        return self._worker.num_pending

    def save_async(
        self,
        checkpoint: Any,
        path: str | os.PathLike[str],
        compress: bool = False,
        level: int = 0,
        meta: Any = None,
        *,
        weights_only: bool = True,
    ) -> Future[Path]:
        """Copy `checkpoint` and write the copy to `path` in the background, with `torch.save`.

        Args:
            checkpoint: Nested dicts, lists, tuples and sets of tensors on any device, numbers,
                texts, arrays and scalars of numpy, random states of torch, numpy and Python,
                `argparse.Namespace` and members of enums. Tensors that share memory are copied, and
                stored, once.
            path: Path of the file. An existing file is replaced atomically. Missing folders are
                created.
            compress: Whether to write an LZ4 frame to `path` + ".lz4" instead. Useful for
                repetitive data such as masks, images and integer counters; float32 weights hardly
                shrink.
            level: LZ4 level from 0 (fast) to 16 (smaller files, much slower).
            meta: JSON value that `load_checkpoint_meta` reads without the tensors.
            weights_only: Whether to raise an error for parts that `load_checkpoint` does not load
                by default. False saves any object that can be deep-copied and pickled; such a file
                is loaded with `weights_only=False`.

        Returns:
            A future of the written path. The caller may change `checkpoint` once this method has
            returned.

        Raises:
            CheckpointError: An earlier save failed. This call did not save its checkpoint.
            QueueFullError: The queue is full and `on_full` is "raise".
            ClosedError: The saver was shut down.
            UsageError: `path` is not a path, `meta` has no JSON form, or a part of the checkpoint
                could not be loaded. The message names the path of the part in the checkpoint.
        """
        self._owner.check()
        # The process may change its working directory before the file is written.
        target = arguments.path("", path).absolute()
        level = check_level(level)
        compress = arguments.flag("compress", compress)
        weights_only = arguments.flag("weights_only", weights_only)
        text = None if meta is None else _to_json(meta, target)
        if weights_only:
            _check_loadable(checkpoint, target)
        if compress:
            target = target.with_name(target.name + SUFFIX)
        with self._saving:
            self._wait_for_room(target)
            with self._monitor.timer("checkpoint/copy"):
                held = [copy_object(checkpoint, self._pool)]
            future = self._worker.submit(
                self._write, held, target, level if compress else None, text
            )
            self._waiting.append((future, held))
        return future

    def wait(self, timeout: float | None = None) -> None:
        """Wait until all checkpoints accepted before this call are written.

        Args:
            timeout: Maximum time to wait, in seconds; None for no limit.

        Raises:
            WaitTimeoutError: The checkpoints took longer than `timeout`. They will still be
                written.
            CheckpointError: A save failed.
        """
        if timeout is not None:
            timeout = arguments.real("timeout", timeout, ">= 0 seconds", lambda x: x >= 0)
        self._worker.drain(timeout)

    def shutdown(self, wait: bool = True) -> None:
        """Stop accepting checkpoints and write all accepted checkpoints. Idempotent.

        Args:
            wait: Whether to wait until all checkpoints are written. Otherwise the background thread
                continues to write after the call.

        Raises:
            CheckpointError: A save failed.
        """
        self._owner.check()
        wait = arguments.flag("wait", wait)
        self._is_closed = True
        if not wait:
            return self._worker.check()
        try:
            self._worker.close()
        finally:
            self._pool.clear()

    def close(self, wait: bool = True) -> None:
        """Write all accepted checkpoints and stop. The same as `shutdown`."""
        self.shutdown(wait)

    def _wait_for_room(self, path: Path) -> None:
        """Wait until a checkpoint may be added to the queue.

        The queue has room for one checkpoint that is being written, and for `max_queue_size`
        checkpoints that wait.
        """
        while True:
            if self._is_closed:
                raise ClosedError(f"{str(path)!r} is not saved: the saver was shut down.")
            self._worker.check()
            self._waiting = [(future, held) for future, held in self._waiting if not future.done()]
            if len(self._waiting) <= self.max_queue_size:
                return
            if self.on_full == "raise":
                raise QueueFullError(
                    f"{str(path)!r} is not saved: {self.max_queue_size} checkpoints are already "
                    "waiting in the queue. Save less often, or raise max_queue_size."
                )
            dropped = (held for future, held in self._waiting if future.cancel())
            if self.on_full == "drop_oldest" and (oldest := next(dropped, None)):
                oldest.clear()
                self.num_dropped += 1
            else:
                wait([future for future, _ in self._waiting], return_when=FIRST_COMPLETED)

    def _write(self, held: list[Any], path: Path, level: int | None, meta: bytes | None) -> Path:
        """Write a copy in the background thread, then free its memory.

        `held` is a list that contains the copy. It is cleared at the end.
        """
        try:
            with self._monitor.timer("checkpoint/write"):
                write_checkpoint(held[0], path, level, meta)
        except BaseException as cause:
            traceback.clear_frames(cause.__traceback__)
            problem = (str(cause) or repr(cause)).rstrip(".")
            error = CheckpointError(f"Checkpoint {str(path)!r} was not saved: {problem}.")
            error.errno = getattr(cause, "errno", None)
            raise error from cause
        finally:
            held.clear()
        return path


_open_savers: weakref.WeakSet[AsyncCheckpointSaver] = weakref.WeakSet()


def _finish_open_savers() -> None:
    failure = None
    for saver in list(_open_savers):
        try:
            saver.__exit__()
        except CheckpointError as error:
            failure = error
    if failure is not None:
        raise failure


# Python waits for the threads of pools before it calls this function, so that all accepted
# checkpoints are written. The function raises the error of a failed save.
atexit.register(_finish_open_savers)


def _check_loadable(checkpoint: Any, target: Path) -> None:
    refused = refused_part(checkpoint)
    if refused is None:
        return
    part, description = refused
    raise UsageError(
        f"{part} of {str(target)!r} is {description}, which load_checkpoint does not load by "
        "default. Save its numbers or its state_dict(), or pass weights_only=False to save and to "
        "load it."
    )


def _to_json(meta: Any, target: Path) -> bytes:
    try:
        return json.dumps(meta).encode()
    except (TypeError, ValueError) as cause:
        raise UsageError(f"meta of {str(target)!r} cannot be written as JSON: {cause}.") from cause


# -- copies ------------------------------------------------------------------------------------


def copy_object(obj: Any, pool: BufferPool) -> Any:
    """Copy any object, such as a nested dict, with its tensors on the CPU.

    Args:
        obj: Any object. Its tensors may be on any device, share storage or occur more than once.
        pool: Memory pool for the copied tensors.

    Returns:
        A copy with the same structure, on the CPU. Tensors are detached, and parameters remain
        parameters. Strides are kept unless they leave gaps. Other leaves are copied by
        `copy.deepcopy`, which may raise its own errors.
    """
    # The second argument maps the `id` of a tensor to its copy, which `deepcopy` then uses.
    return copy.deepcopy(obj, dict[int, Any](_copy_tensors(_find_tensors(obj), pool)))


def _find_tensors(obj: Any) -> dict[int, torch.Tensor]:
    """Return the dense tensors in an object, by their `id`.

    Sparse and quantized tensors, tensor subclasses and meta tensors are left out, since `deepcopy`
    copies them.
    """
    tensors: dict[int, torch.Tensor] = {}
    seen: set[int] = set()
    waiting = [obj]
    while waiting:
        node = waiting.pop()
        if id(node) in seen or isinstance(
            node, (str, bytes, int, float, type, ModuleType, FunctionType)
        ):
            continue
        seen.add(id(node))
        if isinstance(node, torch.Tensor):
            is_plain = (
                type(node) in (torch.Tensor, torch.nn.Parameter) and node.layout is torch.strided
            )
            if is_plain and not node.is_quantized and node.device.type != "meta":
                tensors[id(node)] = node
        elif isinstance(node, Mapping):
            waiting.extend(node.values())
            waiting.extend(getattr(node, "__dict__", {}).values())
        elif isinstance(node, (list, tuple, set, frozenset)):
            waiting.extend(node)
        else:
            waiting.extend(getattr(node, "__dict__", {}).values())
    return tensors


def _copy_tensors(tensors: Mapping[int, torch.Tensor], pool: BufferPool) -> dict[int, torch.Tensor]:
    """Copy tensors and return each copy by the `id` of the original.

    Tensors that share a storage are copied together: one copy of the bytes from the start of the
    first tensor to the end of the last tensor.
    """
    copies: dict[int, torch.Tensor] = {}
    groups: dict[tuple[str, int], dict[int, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        # torch conjugates and negates lazily. Compute the numbers, since only the memory is copied.
        plain = tensor.detach().resolve_conj().resolve_neg()
        if plain.numel():
            groups.setdefault((str(plain.device), plain.untyped_storage().data_ptr()), {})[key] = (
                plain
            )
        else:
            copies[key] = torch.empty(plain.shape, dtype=plain.dtype, device="cpu")
    spans = [_span(group) for group in groups.values()]
    buffer = pool.take(sum(span.room for span in spans if not span.is_on_cuda)).numpy()
    start = 0
    for span in spans:
        if span.is_on_cuda:
            target = torch.empty(span.num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        else:
            # Slice the array, so that the storage of the tensor has the size of the slice.
            # A slice of a tensor would have the storage of the whole buffer.
            target = torch.from_numpy(buffer[start : start + span.num_bytes])
            start += span.room
        copies |= _copy_span(span, target)
    for device in {span.device for span in spans if span.is_on_cuda}:
        torch.cuda.current_stream(device).synchronize()
    parameters = {
        key: x.requires_grad for key, x in tensors.items() if isinstance(x, torch.nn.Parameter)
    }
    return copies | {
        key: torch.nn.Parameter(copies[key], needs) for key, needs in parameters.items()
    }


class _Span(NamedTuple):
    """A byte range of memory that contains one or more tensors.

    Attributes:
        tensors: Tensors in the range, by the `id` of the original tensor.
        start: First byte of the range in the storage of the tensors.
        num_bytes: Size of the range.
        device: Device of the storage.
    """

    tensors: Mapping[int, torch.Tensor]
    start: int
    num_bytes: int
    device: torch.device

    @property
    def room(self) -> int:
        return -(-self.num_bytes // _ALIGNMENT) * _ALIGNMENT

    @property
    def is_on_cuda(self) -> bool:
        return self.device.type == "cuda"


def _span(group: dict[int, torch.Tensor]) -> _Span:
    """Return the byte range of tensors that share a storage.

    A single tensor with gaps between its elements is first copied to memory without gaps.
    """
    starts = []
    stops = []
    for key, tensor in group.items():
        reach = sum(
            (int(size) - 1) * int(stride)
            for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
        if len(group) == 1 and reach >= tensor.numel():
            group[key] = tensor = tensor.contiguous()
            reach = tensor.numel() - 1
        starts.append(int(tensor.storage_offset()) * tensor.itemsize)
        stops.append(starts[-1] + (reach + 1) * tensor.itemsize)
    start = min(starts)
    if len(group) > 1:
        # Align the range, so that each tensor in the copy starts at a multiple of its element size.
        start = start // _ALIGNMENT * _ALIGNMENT
    return _Span(group, start, max(stops) - start, tensor.device)


def _copy_span(span: _Span, target: torch.Tensor) -> dict[int, torch.Tensor]:
    """Copy a byte range to `target`, and return a view of `target` for each tensor, by `id`.

    `target` is `[num_bytes]` uint8 on the CPU. If it is pinned, the copy is asynchronous.
    """
    # torch copies wide elements a quarter faster than bytes.
    word = next(dtype for dtype in _WORDS if (span.start | span.num_bytes) % dtype.itemsize == 0)
    source = torch.empty(0, dtype=word, device=span.device)
    place = span.start // word.itemsize
    size = span.num_bytes // word.itemsize
    source.set_(next(iter(span.tensors.values())).untyped_storage(), place, (size,), (1,))
    target.view(word).copy_(source, non_blocking=True)
    storage = target.untyped_storage()
    return {
        key: torch.empty(0, dtype=tensor.dtype, device="cpu").set_(
            storage,
            tensor.storage_offset() - span.start // tensor.itemsize,
            tensor.shape,
            tensor.stride(),
        )
        for key, tensor in span.tensors.items()
    }
