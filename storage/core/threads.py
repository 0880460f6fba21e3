"""The one worker-thread helper: bounded queue, back-pressure, error hand-over, clean stop.

One rule: a job's failure is never lost. It is raised to the caller at the next `submit`,
`drain` or `close`, as the cause of a `BackgroundError`. No daemon thread is cut off in the
middle of a job: `close()` runs what was accepted, and an exit hook closes what was forgotten.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING

from ..errors import BackgroundError, ClosedError, UsageError

_Job = Callable[[], object]


class InterruptibleCondition(threading.Condition):
    """A condition that no Ctrl-C leaves taken: entering and leaving it are those of its lock, which are not Python.

    `Condition.__enter__` itself is, and is interrupted behind the call that takes the lock, before the `with` block.

    Whoever changes what others wait for notifies them first and changes it then, all of it under the lock: a Ctrl-C
    that falls into `notify_all` has changed nothing, and one behind the change has let everybody know.
    """

    if not TYPE_CHECKING:  # both are looked up before the first of them is called
        __enter__ = property(attrgetter("_lock.__enter__"))
        __exit__ = property(attrgetter("_lock.__exit__"))


class OwnCondition(InterruptibleCondition):
    """The condition of an object with a thread, `what`. Taking it in a forked child raises a `UsageError`.

    There is no such thread there, and a lock that another thread held during the fork stays taken.
    """

    def __init__(self, what: str) -> None:
        super().__init__()
        self._what, self._process = what, os.getpid()

    @property
    def is_own(self) -> bool:
        """Whether this is the process that made it."""
        return self._process == os.getpid()

    def check(self) -> None:
        """Raise in a forked child."""
        if not self.is_own:
            expected, got = f"a call in the process {self._process} that made it", f"its child {os.getpid()}"
            raise UsageError(f"use {self._what}", "", expected, got, "Make another one in this process")

    if not TYPE_CHECKING:
        __enter__ = property(lambda self: self.check() or self._lock.__enter__)


def finish(change: Callable[[], object]) -> None:
    """Make a change of several steps: after a Ctrl-C in between once more, which must do no more than once."""
    try:
        change()
    except BaseException:  # Ctrl-C, and whatever else a signal's handler raises; what failed by itself fails again
        change()
        raise


class BackgroundWorker:
    """Run jobs one after another in a thread of their own.

    Args:
        name: Names the thread, and the worker in errors.
        max_pending: How many jobs may wait; `submit` blocks beyond that (back-pressure).

    After a job failed, the jobs behind it are discarded (they may build on it) and counted in
    `num_discarded`; `submit` raises the failure once and then accepts jobs again.
    """

    def __init__(self, name: str, max_pending: int = 2) -> None:
        self.name = name
        self.max_pending = max(1, int(max_pending))
        self.num_discarded = 0
        self._jobs: deque[_Job] = deque()
        #: Jobs that were run or discarded, and whether one is run now. With those that wait, `_jobs`, they are all that
        #: were ever accepted: a count of these would be untrue if a Ctrl-C came before it. Written by the thread only.
        self._num_ended, self._is_running = 0, False
        self._closed = False
        self._failure: BaseException | None = None
        self._changed = OwnCondition(name)
        self._thread: threading.Thread | None = None

    @property
    def num_pending(self) -> int:
        """Jobs that were accepted and have not ended."""
        with self._changed:
            return len(self._jobs) + self._is_running

    def submit(self, job: _Job) -> None:
        """Queue `job`; block while the queue is full; raise an earlier job's failure instead."""
        with self._changed:
            self._changed.wait_for(
                lambda: len(self._jobs) < self.max_pending or self._failure is not None or self._closed
            )
            if self._closed:
                raise ClosedError("queue a job", f"for {self.name}", "an open worker", "a closed one")
            self._raise_failure()
            if self._thread is None:
                self._start()
            self._changed.notify_all()  # first: of a job that a Ctrl-C left behind it nobody would hear
            self._jobs.append(job)

    def wait_for_room(self, num_pending: int) -> None:
        """Wait until at most so many jobs are pending."""
        with self._changed:
            self._changed.wait_for(lambda: self.num_pending <= num_pending)

    def check(self) -> None:
        """Raise an earlier job's failure, if there is one, or that this is a forked child."""
        self._changed.check()
        if self._failure is not None:  # asked often, and nearly always there is none: no lock for that
            with self._changed:
                self._raise_failure()

    def drain(self) -> None:
        """Wait until every job accepted before this call has ended; raise the failure of any."""
        with self._changed:
            num_accepted = self._num_ended + self.num_pending
            self._changed.wait_for(lambda: self._num_ended >= num_accepted)
            self._raise_failure()

    def close(self) -> None:
        """Run what was accepted, stop the thread, raise the failure of any job. Idempotent; does nothing in a child."""
        if not self._changed.is_own:
            return
        with self._changed:
            self._changed.notify_all()
            self._closed = True
            thread = None if self._thread is threading.current_thread() else self._thread
            if thread is not None:
                # Not left to `join`, which a Ctrl-C makes take the thread for one that has ended.
                self._changed.wait_for(lambda: not self.num_pending)
        if thread is not None:
            thread.join()
        _open_workers.discard(self)
        with self._changed:
            self._raise_failure()

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, name=self.name, daemon=True)
        _open_workers.add(self)
        try:
            self._thread = thread
            thread.start()
        except BaseException:  # a Ctrl-C: if it runs after all it finds that another is wanted
            self._thread = None
            raise

    def _raise_failure(self) -> None:
        if self._failure is not None:
            error = BackgroundError(f"finish the background work of {self.name}", "", "", str(self._failure))
            failure, self._failure = self._failure, None  # not before: a Ctrl-C in a call would lose it
            raise error from failure

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._thread is not threading.current_thread():
                    return
                self._changed.wait_for(lambda: bool(self._jobs) or self._closed)
                if not self._jobs:
                    return
                job, self._is_running = self._jobs.popleft(), True
                self._changed.notify_all()
            failure: BaseException | None = None
            try:
                job()
            except BaseException as error:  # noqa: BLE001 - handed to the consumer, never swallowed
                failure = error
            del job
            with self._changed:
                self._num_ended, self._is_running = self._num_ended + 1, False
                if failure is not None:
                    self._failure = self._failure or failure
                    self.num_discarded += len(self._jobs)
                    self._num_ended += len(self._jobs)
                    self._jobs.clear()
                self._changed.notify_all()


_open_workers: weakref.WeakSet[BackgroundWorker] = weakref.WeakSet()


def _close_open_workers() -> None:
    failure = None
    for worker in list(_open_workers):
        try:
            worker.close()
        except BackgroundError as error:  # the next one must still be closed
            failure = error
    if failure is not None:
        raise failure


# Daemon threads are still alive while exit hooks run, so accepted jobs are finished here.
atexit.register(_close_open_workers)
