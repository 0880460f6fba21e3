"""Checkpoints: saved by a thread while training goes on.

One rule: what is saved is the moment of the call. `save_async` copies every tensor before it returns
(and does nothing else that takes time); the file is written beside its place, flushed and renamed, so
that a crash leaves the previous checkpoint or the new one.
"""

from __future__ import annotations

import atexit
import json
import os
import queue
import traceback
import weakref
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from ..codecs.lz4_frames import check_level
from ..core.buffer_pool import BufferPool
from ..core.duplicates import Unique
from ..core.durable import as_path
from ..core.threads import BackgroundWorker, OwnCondition
from ..errors import BackgroundError, ClosedError, RolloutDataError, UsageError, WaitTimeoutError, nearest
from ..live.monitors import PerformanceMonitor
from .files import (
    SUFFIX,
    MissingCheckpointError,
    load_checkpoint,
    load_checkpoint_meta,
    load_checkpoint_parallel,
    write_checkpoint,
)
from .object_copy import copy_object

__all__ = [
    "AsyncCheckpointSaver",
    "CheckpointError",
    "MissingCheckpointError",
    "QueueFullError",
    "load_checkpoint",
    "load_checkpoint_meta",
    "load_checkpoint_parallel",
]

ON_FULL = ("block", "drop_oldest", "raise")


class CheckpointError(BackgroundError, OSError):
    """A checkpoint could not be written; the failure itself is the `__cause__`."""

    __str__ = RolloutDataError.__str__


class QueueFullError(RolloutDataError, queue.Full):
    """As many checkpoints wait as may; nothing was saved."""


@dataclass(eq=False)
class _Task:
    """A checkpoint to be written, and who waits for it."""

    obj: Any
    path: Path
    level: int | None
    meta: bytes | None
    number: int
    future: Future[Path] = field(default_factory=Future)


class AsyncCheckpointSaver(Unique):
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
        if isinstance(max_queue_size, bool) or not isinstance(max_queue_size, int) or max_queue_size < 1:
            raise UsageError("save checkpoints", "", "max_queue_size >= 1", repr(max_queue_size))
        if on_full not in ON_FULL:
            raise UsageError("save checkpoints", "", f"on_full one of {nearest(str(on_full), ON_FULL)}", repr(on_full))
        self.max_queue_size, self.on_full = max_queue_size, on_full
        #: Checkpoints given up by "drop_oldest".
        self.num_dropped = 0
        self._monitor = monitor or PerformanceMonitor()
        # Memory of earlier copies is used again: fresh memory would make copying several times slower.
        self._pool = BufferPool(max_buffers=max_queue_size + 2)
        self._tasks: deque[_Task] = deque()
        self._numbers = count()
        #: Numbers of those that have not ended: waiting, being copied or being written.
        self._pending: set[int] = set()
        self._is_closed = False
        self._failure: CheckpointError | None = None
        self._changed = OwnCondition("a checkpoint saver")
        self._worker = BackgroundWorker("checkpoints", max_pending=1 << 30)  # how many may wait is decided here
        _open_savers.add(self)

    def __enter__(self) -> AsyncCheckpointSaver:
        return self

    def __exit__(self, failure: object, *_: object) -> None:
        try:
            self.shutdown()
        except CheckpointError:
            if failure is None:  # otherwise that one matters more
                raise

    @property
    def num_pending(self) -> int:
        """Checkpoints that were accepted and have not ended."""
        with self._changed:
            return len(self._pending)

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
        self._changed.check()
        target = as_path(path, "save the checkpoint").absolute()  # wherever the process is when it is written
        check_level(level)
        text = None if meta is None else _to_json(meta, target)
        if compress:
            target = target.with_name(target.name + SUFFIX)
        number, task = next(self._numbers), None
        try:
            self._take_place(target, number)
            with self._monitor.timer("checkpoint/copy"):
                task = _Task(copy_object(obj, self._pool), target, level if compress else None, text, number)
            with self._changed:
                self._tasks.append(task)
            self._worker.submit(self._save_next)
        except BaseException:  # Ctrl-C too: `wait` would wait for ever for what was never handed over
            with self._changed:
                if task is not None and task in self._tasks:
                    self._tasks.remove(task)
            self._end_one(number, None)
            raise
        return task.future

    def wait(self, timeout: float | None = None) -> None:
        """Wait until everything accepted before this call is written.

        Args:
            timeout: Seconds to wait at most; None for as long as it takes.

        Raises:
            WaitTimeoutError: It took longer; nothing is given up.
            CheckpointError: A save failed.
        """
        with self._changed:
            own = self._pending.copy()
            if not self._changed.wait_for(lambda: own.isdisjoint(self._pending), timeout):
                got = f"{len(own & self._pending)} not written yet"
                raise WaitTimeoutError("wait for checkpoints", "", f"all of them within {timeout} s", got)
            self._raise_failure()

    def shutdown(self, wait: bool = True) -> None:
        """Accept nothing more and write everything accepted; idempotent. Does nothing in a forked child.

        Args:
            wait: Return when all is written; otherwise at once, while the thread goes on.

        Raises:
            CheckpointError: A save failed.
        """
        if not self._changed.is_own:
            return
        with self._changed:
            self._changed.notify_all()
            self._is_closed = True
        if wait:
            with self._changed:
                self._changed.wait_for(lambda: not self._pending)
            self._worker.close()
            self._pool.clear()
            _open_savers.discard(self)
        with self._changed:
            self._raise_failure()

    def _take_place(self, target: Path, number: int) -> None:
        """Wait until one more may be saved, which then is pending."""
        with self._changed:
            self._check(target)
            # One is being written and does not wait.
            while len(self._pending) > self.max_queue_size:
                if self.on_full == "raise":
                    expected = f"at most {self.max_queue_size} waiting"
                    raise QueueFullError("save the checkpoint", repr(str(target)), expected, "as many already")
                if self.on_full == "drop_oldest" and self._tasks:
                    self._drop_oldest()
                else:
                    self._changed.wait()
                    self._check(target)
            self._pending.add(number)

    def _drop_oldest(self) -> None:
        dropped = self._tasks[0]
        del self._tasks[0]  # no call between these, and so no Ctrl-C
        self._pending -= {dropped.number}
        self.num_dropped += 1
        try:
            dropped.future.cancel()
        except BaseException:  # a Ctrl-C: whoever waits for it would wait for ever
            dropped.future.cancel()
            raise

    def _check(self, target: Path) -> None:
        if self._is_closed:
            raise ClosedError("save the checkpoint", repr(str(target)), "an open saver", "one that was shut down")
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def _end_one(self, number: int, failure: CheckpointError | None) -> None:
        with self._changed:
            self._changed.notify_all()
            self._pending.discard(number)
            self._failure = self._failure or failure

    def _save_next(self) -> None:
        with self._changed:
            if not self._tasks:
                return  # it was given up
            task = self._tasks.popleft()
        failure = None
        try:
            if task.future.set_running_or_notify_cancel():
                with self._monitor.timer("checkpoint/write"):
                    write_checkpoint(task.obj, task.path, task.level, task.meta)
                task.obj = None
                task.future.set_result(task.path)
        except BaseException as cause:  # noqa: BLE001 - handed to the caller, never swallowed
            traceback.clear_frames(cause.__traceback__)  # or else it would hold the copy
            task.obj = None
            got = (str(cause) or repr(cause)).rstrip(".")
            failure = CheckpointError("save the checkpoint", repr(str(task.path)), "", got)
            failure.__cause__ = cause
            task.future.set_exception(failure)
        self._end_one(task.number, failure)


_open_savers: weakref.WeakSet[AsyncCheckpointSaver] = weakref.WeakSet()


def _finish_open_savers() -> None:
    failure = None
    for saver in list(_open_savers):
        try:
            saver.shutdown()
        except CheckpointError as error:
            failure = error
    if failure is not None:
        raise failure


# Registered after the hook of `background`, hence run before it: the thread of a saver still works.
atexit.register(_finish_open_savers)


def _to_json(meta: Any, target: Path) -> bytes:
    try:
        return json.dumps(meta).encode()
    except (TypeError, ValueError) as cause:
        raise UsageError("save the checkpoint", repr(str(target)), "a meta that JSON can hold", str(cause)) from cause
