"""Work in other threads: `Worker` runs jobs in order, `each` runs independent calls in parallel.

The error of a job is raised in the caller. An object with threads belongs to the process that
created it. A forked child has the object, but not its threads. In a forked child, the methods of
the object raise an error, and the end of its `with` block does nothing. Accepted jobs run before
the interpreter exits. A job that is submitted during the exit runs in the thread of the caller.
"""

from __future__ import annotations

import os
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, NoReturn, ParamSpec, TypeVar

import torch

from ..errors import ClosedError, UsageError, WaitTimeoutError
from .arguments import whole

_Self = TypeVar("_Self", bound="Owned")
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
_Arguments = ParamSpec("_Arguments")
#: Minimum bytes of work per thread, since starting a thread takes time.
MIN_BYTES = 1 << 20
#: Minimum bytes of work per piece, since threads wait for the interpreter lock between pieces.
_MIN_PIECE_BYTES = 1 << 14
#: Parts per thread. If a thread starts late, the other threads process some of its parts.
_NUM_PARTS = 4


def num_processors() -> int:
    """Return the number of processors that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


class Owner:
    """Process that created an object with threads, locks or connections.

    A forked child has no copies of the threads, and must not use the locks and connections.

    Args:
        description: Description of the object in the error of `check`, such as "a connection".
    """

    def __init__(self, description: str) -> None:
        self._description = description
        self._process = os.getpid()

    @property
    def is_own(self) -> bool:
        """Whether the current process created the object."""
        return self._process == os.getpid()

    def check(self) -> None:
        """Raise `UsageError` in a forked child."""
        if not self.is_own:
            raise UsageError(
                f"the thread of {self._description} runs only in process {self._process}, not in "
                f"its child {os.getpid()}. Create a new object in the child process."
            )


class OwnCondition(threading.Condition):
    """Condition variable of an object with a thread. Acquiring it in a forked child is an error."""

    def __init__(self, owner: Owner) -> None:
        super().__init__()
        self._owner = owner

    def __enter__(self) -> bool:
        self._owner.check()
        return super().__enter__()


class Unique:
    """Base class of objects with files or threads; pickling or copying them raises an error."""

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            f"a {type(self).__name__} owns files or threads and cannot be pickled or copied. "
            "Create a new object."
        )


class Owned(Unique):
    """Base class of objects with threads; `close` raises in a forked child.

    The end of a `with` block does nothing in a forked child.

    Attributes:
        _owner: The process that created the object; set by the subclass.
    """

    _owner: Owner

    @abstractmethod
    def close(self) -> None:
        """Stop the threads."""

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._owner.is_own:
            self.close()


class Worker:
    """A background thread that runs jobs one after another.

    Args:
        name: Name of the thread, and of its work in errors.
        max_pending: Number of jobs that may wait behind the running job; further calls of `submit`
            wait.

    The next `submit`, `drain` or `close` raises the first error of a job, once. Later jobs still
    run. Methods may be called from any thread except the worker's, and raise `UsageError` in a
    forked child.
    """

    def __init__(self, name: str, max_pending: int = 2) -> None:
        self.name = name
        self.max_pending = max_pending
        self.owner = Owner(name)
        self._pool: ThreadPoolExecutor | None = None
        self._accepted: set[Future[Any]] = set()
        self._failure: BaseException | None = None
        self._is_closed = False

    @property
    def num_pending(self) -> int:
        """Number of accepted jobs that have not ended."""
        return len(self._pending())

    def submit(
        self,
        job: Callable[_Arguments, _Result],
        /,
        *arguments: _Arguments.args,
        **options: _Arguments.kwargs,
    ) -> Future[_Result]:
        """Queue a job and return its future. Waits while the queue is full.

        Raises the error of an earlier job, if there is one. The new job is then not queued.

        Raises:
            ClosedError: After `close`.
        """
        # Wait only if the queue may be full, since the check of each job takes 4 us.
        if len(self._accepted) > self.max_pending:
            self.wait_for_room(self.max_pending)
        self.check()
        if self._is_closed:
            raise ClosedError(f"the thread of {self.name} is closed.")
        try:
            if self._pool is None:
                pool = ThreadPoolExecutor(1, self.name)
                # Start the thread with an empty job. A Ctrl-C during the start then loses no job.
                pool.submit(int).result()
                self._pool = pool
            future = self._pool.submit(self._run, job, *arguments, **options)
        except RuntimeError as cause:
            if "shutdown" not in str(cause):
                raise
            # The interpreter exits, and all earlier jobs have ended. Run the job in this thread.
            future = Future()
            try:
                future.set_result(self._run(job, *arguments, **options))
            except BaseException as failure:  # noqa: BLE001 - stored in the future
                future.set_exception(failure)
        self._accepted.add(future)
        future.add_done_callback(self._accepted.discard)
        return future

    def wait_for_room(self, num_pending: int) -> None:
        """Wait until at most `num_pending` jobs are pending."""
        while len(pending := self._pending()) > num_pending:
            wait(pending, return_when=FIRST_COMPLETED)

    def check(self) -> None:
        """Raise the error of an earlier job, if a job failed."""
        self.owner.check()
        if self._failure is not None:
            failure = self._failure
            self._failure = None
            raise failure

    def drain(self, timeout: float | None = None) -> None:
        """Wait until all accepted jobs have ended; raise the error of a failed job.

        Raises:
            WaitTimeoutError: The jobs took longer than `timeout` seconds. They continue to run.
        """
        if left := wait(self._pending(), timeout).not_done:
            raise WaitTimeoutError(
                f"The jobs of {self.name} did not finish within {timeout} s. Pending jobs: "
                f"{len(left)}."
            )
        self.check()

    def close(self) -> None:
        """Run all accepted jobs and stop the thread. Idempotent.

        Raises the error of a failed job.
        """
        pending = self._pending()
        self._is_closed = True
        # A Ctrl-C during the wait of `shutdown` would make it assume that the thread has ended.
        wait(pending)
        if self._pool is not None:
            self._pool.shutdown()
        self.check()

    def abandon(self) -> None:
        """Accept no more jobs; the thread ends after the accepted jobs. Does not wait.

        The garbage collector may call this method in a thread that holds any lock. Therefore it
        acquires no lock.
        """
        self._is_closed = True
        # A pool ends its thread once nothing refers to the pool.
        self._pool = None

    def _pending(self) -> list[Future[Any]]:
        self.owner.check()
        return [future for future in tuple(self._accepted) if not future.done()]

    def _run(
        self,
        job: Callable[_Arguments, _Result],
        /,
        *arguments: _Arguments.args,
        **options: _Arguments.kwargs,
    ) -> _Result:
        try:
            return job(*arguments, **options)
        except BaseException as failure:
            self._failure = self._failure or failure
            raise


def each(
    function: Callable[[_Item], _Result], items: Iterable[_Item], num_threads: int
) -> list[_Result]:
    """Call a function with every item in up to `num_threads` threads; return the results in order.

    Raises:
        The error of the first failed call in order, once no call is running. Calls that have not
        started are skipped.
    """
    listed = list(items)
    num_threads = min(num_threads, len(listed))
    if num_threads > 1:
        with ThreadPoolExecutor(num_threads, getattr(function, "__name__", "each")) as pool:
            try:
                futures = [pool.submit(function, item) for item in listed]
                return [future.result() for future in futures]
            except RuntimeError as cause:
                # No thread can start while the interpreter exits. Continue in this thread.
                if "shutdown" not in str(cause):
                    raise
            finally:
                pool.shutdown(cancel_futures=True)
    return [function(item) for item in listed]


def each_part(
    function: Callable[[int, int], object],
    num_pieces: int,
    num_bytes: int,
    num_threads: int | None = None,
) -> int:
    """Split `range(num_pieces)` and call `function(start, stop)` for each part, in threads.

    Args:
        function: Function that processes the pieces `start` to `stop - 1`. Several threads are
            faster only if it releases the global interpreter lock.
        num_pieces: Number of pieces of about equal size.
        num_bytes: Bytes of all pieces together. If this number or the size of one piece is small,
            one call processes all pieces.
        num_threads: Maximum number of threads; None for torch's number (1 in a DataLoader worker).

    Returns:
        The number of threads.

    Raises:
        The error of `function`, once no part is running. Parts that have not started are skipped.
    """
    limit = torch.get_num_threads() if num_threads is None else whole("num_threads", num_threads, 1)
    num_threads = min(limit, num_processors(), num_pieces, num_bytes // MIN_BYTES)
    if num_threads < 2 or num_bytes < _MIN_PIECE_BYTES * num_pieces:
        function(0, num_pieces)
        return 1
    step = -(-num_pieces // (_NUM_PARTS * num_threads))
    parts = [(start, min(start + step, num_pieces)) for start in range(0, num_pieces, step)]
    each(lambda part: function(*part), parts, num_threads)
    return num_threads
