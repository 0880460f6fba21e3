"""Save checkpoints in a background thread during training.

`save_async` copies every tensor before it returns. The copy shares no memory with the original.
Tensors that share memory in the original share it in the copy. Page faults make copies into new
memory several times slower. So all tensors of a copy are in one pooled buffer.
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
    """A checkpoint could not be written; the failure itself is the `__cause__`."""


class QueueFullError(RolloutDataError, queue.Full):
    """The queue of checkpoints is full; nothing was saved."""


class AsyncCheckpointSaver(Owned):
    """Save checkpoints in the background.

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
        self.max_queue_size = arguments.whole(
            "save checkpoints", "max_queue_size", max_queue_size, 1
        )
        self.on_full = arguments.choice("save checkpoints", "on_full", on_full, ON_FULL)
        #: Number of checkpoints dropped by "drop_oldest".
        self.num_dropped = 0
        if monitor is not None:
            expected = "as a PerformanceMonitor or None"
            arguments.instance("save checkpoints", "monitor", monitor, expected, PerformanceMonitor)
        self._monitor = monitor or PerformanceMonitor()
        # Reuses the memory of earlier copies; new memory makes copies several times slower.
        self._pool = BufferPool(max_buffers=max_queue_size + 2)
        self._worker = Worker("checkpoints", max_pending=max_queue_size)
        self._owner = self._worker.owner
        #: Futures of checkpoints that may wait, oldest first, each with a list that holds its copy
        #: until it is written.
        self._waiting: list[tuple[Future[Path], list[Any]]] = []
        self._is_closed = False
        #: Held while a call waits for its place and copies.
        self._saving = threading.Lock()
        _open_savers.add(self)

    def __exit__(self, failure: object = None, *_: object) -> None:
        try:
            super().__exit__()
        except CheckpointError:
            if failure is None:  # otherwise that one matters more
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
            path: The file; an earlier one is replaced as a whole. Missing folders are made.
            compress: Write an LZ4 frame to `path` + ".lz4" instead. Worth it for what repeats
                itself (masks, images, integer counters); weights in float32 hardly shrink.
            level: Of LZ4: 0 fast, up to 16 smaller and much slower.
            meta: JSON-able; `load_checkpoint_meta` reads it without the tensors.
            weights_only: Refuse what `load_checkpoint` would refuse by default. False saves
                anything that can be deep-copied and pickled, to be loaded with
                `weights_only=False`.

        Returns:
            A future of the path that was written. When this method returns, `checkpoint` may be
            changed.

        Raises:
            CheckpointError: An earlier save failed; nothing was saved now.
            QueueFullError: With `on_full="raise"`.
            ClosedError: After `shutdown`.
            UsageError: `path` is no path, JSON cannot hold `meta`, or a part of the checkpoint
                would not be loaded: the text names its path in the checkpoint.
        """
        self._owner.check()
        target = arguments.path(
            "save the checkpoint", "", path
        ).absolute()  # the process may go elsewhere
        level = check_level("save the checkpoint", level)
        compress = arguments.flag("save the checkpoint", "compress", compress)
        weights_only = arguments.flag("save the checkpoint", "weights_only", weights_only)
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
        """Wait until everything accepted before this call is written.

        Args:
            timeout: Seconds to wait at most; None for as long as it takes.

        Raises:
            WaitTimeoutError: It took longer; nothing is given up.
            CheckpointError: A save failed.
        """
        if timeout is not None:
            timeout = arguments.real(
                "wait for checkpoints", "timeout", timeout, ">= 0 seconds", lambda x: x >= 0
            )
        self._worker.drain(timeout)

    def shutdown(self, wait: bool = True) -> None:
        """Accept no further checkpoints and write the accepted ones; idempotent.

        Args:
            wait: Return when all is written; otherwise at once, while the thread goes on.

        Raises:
            CheckpointError: A save failed.
        """
        self._owner.check()
        wait = arguments.flag("shut the saver down", "wait", wait)
        self._is_closed = True
        if not wait:
            return self._worker.check()
        try:
            self._worker.close()
        finally:
            self._pool.clear()

    def close(self, wait: bool = True) -> None:
        """Accept no further checkpoints and write the accepted ones; see `shutdown`."""
        self.shutdown(wait)

    def _wait_for_room(self, path: Path) -> None:
        """Wait until one more may be saved: one is being written, and `max_queue_size` may wait."""
        while True:
            if self._is_closed:
                raise ClosedError(
                    "save the checkpoint",
                    repr(str(path)),
                    "an open saver",
                    "one that was shut down",
                )
            self._worker.check()
            self._waiting = [(future, held) for future, held in self._waiting if not future.done()]
            if len(self._waiting) <= self.max_queue_size:
                return
            if self.on_full == "raise":
                expected = f"at most {self.max_queue_size} waiting"
                raise QueueFullError(
                    "save the checkpoint", repr(str(path)), expected, "as many already"
                )
            dropped = (held for future, held in self._waiting if future.cancel())
            if self.on_full == "drop_oldest" and (oldest := next(dropped, None)):
                oldest.clear()
                self.num_dropped += 1
            else:
                wait([future for future, _ in self._waiting], return_when=FIRST_COMPLETED)

    def _write(self, held: list[Any], path: Path, level: int | None, meta: bytes | None) -> Path:
        """Write the copy in `held`, in the thread; no reference to the copy remains."""
        try:
            with self._monitor.timer("checkpoint/write"):
                write_checkpoint(held[0], path, level, meta)
        except BaseException as cause:
            traceback.clear_frames(cause.__traceback__)
            got = (str(cause) or repr(cause)).rstrip(".")
            error = CheckpointError("save the checkpoint", repr(str(path)), "", got)
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


# Everything that was accepted has been written by then; this raises what failed.
atexit.register(_finish_open_savers)


def _check_loadable(checkpoint: Any, target: Path) -> None:
    if (refused := refused_part(checkpoint)) is None:
        return
    path, got = refused
    expected = f"what load_checkpoint loads by default as {path}"
    advice = (
        "Save its numbers or its state_dict(), or pass weights_only=False to save and to load it"
    )
    raise UsageError("save the checkpoint", repr(str(target)), expected, got, advice)


def _to_json(meta: Any, target: Path) -> bytes:
    try:
        return json.dumps(meta).encode()
    except (TypeError, ValueError) as cause:
        raise UsageError(
            "save the checkpoint", repr(str(target)), "a meta that JSON can hold", str(cause)
        ) from cause


# -- copies ------------------------------------------------------------------------------------


def copy_object(obj: Any, pool: BufferPool) -> Any:
    """Return a copy of a nested dict, list, tuple, named tuple, dataclass or other object.

    Args:
        obj: Anything. Tensors in it may be on any device, share storage or occur more than once.
        pool: Where the memory of tensors that are on the CPU comes from.

    Returns:
        The same structure, on the CPU. Tensors are detached; parameters stay parameters, strides
        stay unless they leave gaps. Other leaves are deep-copied, with the errors of
        `copy.deepcopy`.
    """
    # deepcopy uses the copy in the memo for every occurrence of an object.
    return copy.deepcopy(obj, dict[int, Any](_copy_tensors(_find_tensors(obj), pool)))


def _find_tensors(obj: Any) -> dict[int, torch.Tensor]:
    """Return by `id` the tensors in plain memory; deepcopy copies the others."""
    found: dict[int, torch.Tensor] = {}
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
                found[id(node)] = node
        elif isinstance(node, Mapping):
            waiting.extend(node.values())
            waiting.extend(getattr(node, "__dict__", {}).values())
        elif isinstance(node, (list, tuple, set, frozenset)):
            waiting.extend(node)
        else:
            waiting.extend(getattr(node, "__dict__", {}).values())
    return found


def _copy_tensors(found: Mapping[int, torch.Tensor], pool: BufferPool) -> dict[int, torch.Tensor]:
    """Copy tensors by `id`: of each storage once, the bytes from its first to its last tensor."""
    copies: dict[int, torch.Tensor] = {}
    groups: dict[tuple[str, int], dict[int, torch.Tensor]] = {}
    for key, tensor in found.items():
        # Lazy conjugates and negatives store other numbers than their values, and a flag.
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
            # Tensors over slices of an array have storages of their own; slices of a tensor have
            # not.
            target = torch.from_numpy(buffer[start : start + span.num_bytes])
            start += span.room
        copies |= _copy_span(span, target)
    for device in {span.device for span in spans if span.is_on_cuda}:
        torch.cuda.current_stream(device).synchronize()
    parameters = {
        key: x.requires_grad for key, x in found.items() if isinstance(x, torch.nn.Parameter)
    }
    return copies | {
        key: torch.nn.Parameter(copies[key], needs) for key, needs in parameters.items()
    }


class _Span(NamedTuple):
    """A byte range of one storage, and its tensors by `id`."""

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
    """Return the byte range of tensors in their storage; a tensor with gaps is packed first."""
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
    if (
        len(group) > 1
    ):  # aligned down, so that every dtype's offset stays a whole number of its elements
        start = start // _ALIGNMENT * _ALIGNMENT
    return _Span(group, start, max(stops) - start, tensor.device)


def _copy_span(span: _Span, target: torch.Tensor) -> dict[int, torch.Tensor]:
    """Copy a span to `target`, `[num_bytes]` uint8 on the CPU, without waiting if that is pinned."""
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
