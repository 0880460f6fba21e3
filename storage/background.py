"""The one worker-thread helper: bounded queue, back-pressure, error hand-over, clean stop.

One rule: a job's failure is never lost. It is raised to the caller at the next `submit`,
`drain` or `close`, as the cause of a `BackgroundError`. No daemon thread is cut off in the
middle of a job: `close()` runs what was accepted, and an exit hook closes what was forgotten.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections import deque
from collections.abc import Callable

from .errors import BackgroundError, ClosedError

_Job = Callable[[], object]


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
        #: Jobs that were ever accepted, and those of them that were run or discarded; the same order for both.
        self._num_accepted = self._num_ended = 0
        self._closed = False
        self._failure: BaseException | None = None
        #: Entered by itself: at the end of `Condition.__enter__`, which is Python, a Ctrl-C would leave it taken.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._thread: threading.Thread | None = None

    @property
    def num_pending(self) -> int:
        """Jobs that were accepted and have not ended."""
        with self._lock:
            return self._num_accepted - self._num_ended

    def submit(self, job: _Job) -> None:
        """Queue `job`; block while the queue is full; raise an earlier job's failure instead."""
        with self._lock:
            if self._closed:
                raise ClosedError("queue a job", f"for {self.name}", "an open worker", "a closed one")
            self._changed.wait_for(lambda: len(self._jobs) < self.max_pending or self._failure is not None)
            self._raise_failure()
            if self._thread is None:
                self._start()
            self._jobs.append(job)
            self._num_accepted += 1
            self._changed.notify_all()

    def wait_for_room(self, num_pending: int, timeout: float) -> bool:
        """Wait until at most so many jobs are pending; tell whether they are, or the time is over."""
        with self._lock:
            return self._changed.wait_for(lambda: self._num_accepted - self._num_ended <= num_pending, timeout)

    def check(self) -> None:
        """Raise an earlier job's failure, if there is one."""
        if self._failure is not None:  # asked often, and nearly always there is none: no lock for that
            with self._lock:
                self._raise_failure()

    def drain(self) -> None:
        """Wait until every job accepted before this call has ended; raise the failure of any."""
        with self._lock:
            num_accepted = self._num_accepted
            self._changed.wait_for(lambda: self._num_ended >= num_accepted)
            self._raise_failure()

    def close(self) -> None:
        """Run what was accepted, stop the thread, raise the failure of any job. Idempotent."""
        with self._lock:
            self._closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        _open_workers.discard(self)
        with self._lock:
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
            failure, self._failure = self._failure, None
            raise BackgroundError(f"finish the background work of {self.name}", "", "", str(failure)) from failure

    def _run(self) -> None:
        while True:
            with self._lock:
                if self._thread is not threading.current_thread():
                    return
                self._changed.wait_for(lambda: bool(self._jobs) or self._closed)
                if not self._jobs:
                    return
                job = self._jobs.popleft()
                self._changed.notify_all()
            failure: BaseException | None = None
            try:
                job()
            except BaseException as error:  # noqa: BLE001 - handed to the consumer, never swallowed
                failure = error
            del job
            with self._lock:
                self._num_ended += 1
                if failure is not None:
                    self._failure = self._failure or failure
                    self.num_discarded += len(self._jobs)
                    self._num_ended += len(self._jobs)
                    self._jobs.clear()
                self._changed.notify_all()


_open_workers: weakref.WeakSet[BackgroundWorker] = weakref.WeakSet()


def _close_open_workers() -> None:
    for worker in list(_open_workers):
        worker.close()


# Daemon threads are still alive while exit hooks run, so accepted jobs are finished here.
atexit.register(_close_open_workers)
