"""Checkpoints: saved by a thread while training goes on.

One rule: what is saved is the moment of the call: `save_async` copies every tensor before it returns.
"""

from __future__ import annotations

import atexit
import json
import os
import queue
import threading
import traceback
import weakref
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path
from typing import Any

from ..codecs.lz4 import check_level
from ..core import arguments
from ..core.memory import BufferPool
from ..core.threads import Owned, Worker
from ..errors import BackgroundError, ClosedError, RolloutDataError, UsageError
from ..live.monitors import PerformanceMonitor
from .files import SUFFIX, write_checkpoint
from .object_copy import copy_object

ON_FULL = ("block", "drop_oldest", "raise")


class CheckpointError(BackgroundError, OSError):
    """A checkpoint could not be written; the failure itself is the `__cause__`."""


class QueueFullError(RolloutDataError, queue.Full):
    """As many checkpoints wait as may; nothing was saved."""


class AsyncCheckpointSaver(Owned):
    """Save checkpoints in the background.

    Args:
        max_queue_size: How many checkpoints may wait while one is being written. Each that waits is a
            copy of its tensors in memory.
        on_full: When that many wait, `save_async` waits for a place ("block"), gives up the one that
            waits longest, whose future is cancelled ("drop_oldest"), or raises ("raise").
        monitor: Told how long copying (`checkpoint/copy`) and writing (`checkpoint/write`) take.

    A failed save raises at the next `save_async`, `wait` or `shutdown`, once, and in its future; those
    behind it are saved all the same. What was accepted is also written when the program ends without
    `shutdown`. Methods may be called from any thread.
    """

    def __init__(
        self, max_queue_size: int = 3, on_full: str = "block", *, monitor: PerformanceMonitor | None = None
    ) -> None:
        self.max_queue_size = arguments.whole("save checkpoints", "max_queue_size", max_queue_size, 1)
        self.on_full = arguments.choice("save checkpoints", "on_full", on_full, ON_FULL)
        #: Checkpoints given up by "drop_oldest".
        self.num_dropped = 0
        self._monitor = monitor or PerformanceMonitor()
        # Memory of earlier copies is used again: fresh memory would make copying several times slower.
        self._pool = BufferPool(max_buffers=max_queue_size + 2)
        self._worker = Worker("checkpoints", max_pending=max_queue_size)
        self._owner = self._worker.owner
        #: Futures of checkpoints that may wait, oldest first, each with a list that holds its copy until it is written.
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
        """Checkpoints that were accepted and have not ended."""
        return self._worker.num_pending

    def save_async(
        self, obj: Any, path: str | os.PathLike[str], compress: bool = False, level: int = 0, meta: Any = None
    ) -> Future[Path]:
        """Copy `obj` as it is now and write the copy to `path` in the background, by `torch.save`.

        Args:
            obj: Nested dicts, lists, tuples, named tuples, dataclasses of tensors on any device and of
                anything else that can be deep-copied and pickled. Tensors that share memory are copied,
                and stored, once.
            path: The file; an earlier one is replaced as a whole. Missing folders are made.
            compress: Write an LZ4 frame to `path` + ".lz4" instead. Worth it for what repeats itself
                (masks, images, integer counters); weights in float32 hardly shrink.
            level: Of LZ4: 0 fast, 3 to 12 smaller and much slower.
            meta: JSON-able; `load_checkpoint_meta` reads it without the tensors.

        Returns:
            A future of the path that was written. When this method returns, `obj` may be changed.

        Raises:
            CheckpointError: An earlier save failed; nothing was saved now.
            QueueFullError: With `on_full="raise"`.
            ClosedError: After `shutdown`.
            UsageError: `path` is none, or `meta` is not what JSON can hold.
        """
        self._owner.check()
        target = arguments.path("save the checkpoint", "", path).absolute()  # the process may go elsewhere
        check_level(level)
        text = None if meta is None else _to_json(meta, target)
        if compress:
            target = target.with_name(target.name + SUFFIX)
        with self._saving:
            self._wait_for_room(target)
            with self._monitor.timer("checkpoint/copy"):
                held = [copy_object(obj, self._pool)]
            future = self._worker.submit(self._write, held, target, level if compress else None, text)
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
        self._worker.drain(timeout)

    def shutdown(self, wait: bool = True) -> None:
        """Accept nothing more and write everything accepted; idempotent.

        Args:
            wait: Return when all is written; otherwise at once, while the thread goes on.

        Raises:
            CheckpointError: A save failed.
        """
        self._owner.check()
        self._is_closed = True
        if not wait:
            return self._worker.check()
        try:
            self._worker.close()
        finally:
            self._pool.clear()

    close = shutdown

    def _wait_for_room(self, path: Path) -> None:
        """Wait until one more may be saved: one is being written, and `max_queue_size` may wait."""
        while True:
            if self._is_closed:
                raise ClosedError("save the checkpoint", repr(str(path)), "an open saver", "one that was shut down")
            self._worker.check()
            self._waiting = [(future, held) for future, held in self._waiting if not future.done()]
            if len(self._waiting) <= self.max_queue_size:
                return
            if self.on_full == "raise":
                expected = f"at most {self.max_queue_size} waiting"
                raise QueueFullError("save the checkpoint", repr(str(path)), expected, "as many already")
            dropped = (held for future, held in self._waiting if future.cancel())
            if self.on_full == "drop_oldest" and (oldest := next(dropped, None)):
                oldest.clear()
                self.num_dropped += 1
            else:
                wait([future for future, _ in self._waiting], return_when=FIRST_COMPLETED)

    def _write(self, held: list[Any], path: Path, level: int | None, meta: bytes | None) -> Path:
        """Write the copy that a list holds, in the thread; afterwards nothing holds it, no traceback either."""
        try:
            with self._monitor.timer("checkpoint/write"):
                write_checkpoint(held[0], path, level, meta)
        except BaseException as cause:
            traceback.clear_frames(cause.__traceback__)
            got = (str(cause) or repr(cause)).rstrip(".")
            raise CheckpointError("save the checkpoint", repr(str(path)), "", got) from cause
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


def _to_json(meta: Any, target: Path) -> bytes:
    try:
        return json.dumps(meta).encode()
    except (TypeError, ValueError) as cause:
        raise UsageError("save the checkpoint", repr(str(target)), "a meta that JSON can hold", str(cause)) from cause
