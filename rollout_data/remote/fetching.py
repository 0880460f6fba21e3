"""Requests of byte ranges, many at once, that end: with bytes, or with one error.

One rule: nobody waits for a request longer than its time-out. A request that fails or hangs is sent again a bounded
number of times; the thread of one that hangs is given up and keeps no other from being sent. What is requested, and
of which store, is not known here.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from storage.errors import CorruptFileError, DataFileError, RolloutDataError

#: Seconds before a request that failed is sent again, doubled each time.
FIRST_PAUSE_S = 0.05
#: What no further attempt would change.
FINAL = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError, RolloutDataError)


class FetchError(DataFileError):
    """Bytes of a file behind a network did not come, however often they were asked for."""


class Request:
    """Bytes `start:stop` of a file, on their way; `Fetcher.wait` gives what `use` makes of them."""

    def __init__(self, url: str, start: int, stop: int, use: Callable[[bytes], Any]) -> None:
        self.url, self.start, self.stop, self.use = url, start, stop, use
        self.is_done, self.value, self.error = False, None, None  # type: bool, Any, Exception | None
        #: Counts attempts; what an attempt that was given up brings is ignored.
        self.num_attempts = 0
        self.begun_s, self.process = 0.0, os.getpid()


class Fetcher:
    """Sends requests, `num_requests` at once, each from a thread that ends when none is left.

    Args:
        read: Gives bytes `start:stop` of a URL.
        num_requests: How many are under way at once.
        timeout_s: How long an attempt may take.
        num_retries: How often a request is sent again.

    Attributes:
        num_sent: Attempts that were begun.
    """

    def __init__(
        self, read: Callable[[str, int, int], bytes], num_requests: int, timeout_s: float, num_retries: int
    ) -> None:
        self._read, self._num_requests = read, num_requests
        self._timeout_s, self._num_retries = timeout_s, num_retries
        self.num_sent = 0
        self._begin()

    def _begin(self) -> None:
        self._process, self._changed = os.getpid(), threading.Condition()
        self._queue: deque[Request] = deque()
        self._running: set[Request] = set()
        self._num_threads = 0

    def submit(self, url: str, start: int, stop: int, use: Callable[[bytes], Any] = bytes) -> Request:
        """Queue a request; `use` is called with its bytes in a thread, and again where an attempt is repeated."""
        if self._process != os.getpid():  # a fork has no threads
            self._begin()
        request = Request(url, start, stop, use)
        with self._changed:
            self._send(request)
        return request

    def wait(self, request: Request) -> Any:
        """Wait for a request and give what was made of its bytes.

        Raises:
            FileNotFoundError: There is no such file.
            CorruptFileError: The file is shorter, or what `use` says of the bytes.
            FetchError: It failed, or took too long, each time.
        """
        if self._process != os.getpid():
            self._begin()
        with self._changed:
            if request.process != os.getpid() and not request.is_done:  # its thread is in another process
                request.process, request.error = os.getpid(), None
                self._send(request)
            while not request.is_done:
                self._give_up_overdue()
                if request.error is not None and not request.is_done:
                    self._again(request)
                if not request.is_done:
                    self._changed.wait(min(0.5, self._timeout_s))
        if request.error is not None:
            raise request.error
        return request.value

    def forget(self, request: Request) -> None:
        """Do not send a request any more, unless it is under way."""
        request.is_done = True

    def _send(self, request: Request) -> None:
        self._queue.append(request)
        if self._num_threads < self._num_requests:
            self._num_threads += 1
            threading.Thread(target=self._work, name="rollout-data fetch", daemon=True).start()

    def _give_up_overdue(self) -> None:
        now_s = time.monotonic()
        for request in [one for one in self._running if now_s - one.begun_s > self._timeout_s]:
            self._running.discard(request)
            request.num_attempts += 1
            self._fail(request, TimeoutError(f"no answer within {self._timeout_s} s"))
            self._num_threads -= 1
            if self._queue:
                self._send(self._queue.popleft())

    def _again(self, request: Request) -> None:
        """Send a request that has failed again, after a pause."""
        pause_s = FIRST_PAUSE_S * 2 ** (request.num_attempts - 1)
        self._changed.wait_for(lambda: False, pause_s)
        if request.error is not None and not request.is_done:
            request.error = None
            self._send(request)

    def _fail(self, request: Request, cause: Exception) -> None:
        """Keep what went wrong: it is final, or the request is sent again when it is waited for."""
        request.error = cause
        if isinstance(cause, FINAL):
            request.is_done = True
        elif request.num_attempts > self._num_retries:
            where = f"{request.start}:{request.stop} of {request.url!r}"
            got = f"{type(cause).__name__}: {cause}" if str(cause) else type(cause).__name__
            expected, advice = "an answer", "Try again, or see to the connection and the rights to read"
            what = f"{got}, {request.num_attempts} times"
            request.error = FetchError("fetch the bytes", where, expected, what, advice)
            request.error.__cause__, request.is_done = cause, True
        self._changed.notify_all()

    def _work(self) -> None:
        changed = self._changed
        while True:
            with changed:
                if not self._queue:
                    self._num_threads -= 1
                    return
                request = self._queue.popleft()
                if request.is_done:
                    continue
                request.begun_s, attempt = time.monotonic(), request.num_attempts
                self._running.add(request)
                self.num_sent += 1
            value, failure = None, None  # type: Any, Exception | None
            try:
                data = self._read(request.url, request.start, request.stop)
                if len(data) != request.stop - request.start:
                    where, got = f"{request.start}:{request.stop} of {request.url!r}", f"{len(data)}"
                    raise CorruptFileError("fetch the bytes", where, f"{request.stop - request.start} bytes", got)
                value = request.use(data)
            except Exception as cause:  # noqa: BLE001 - whatever a store raises reaches who waits
                failure = cause
            with changed:
                if request.num_attempts != attempt:
                    return  # it was given up, and another thread has this one's place
                self._running.discard(request)
                request.num_attempts += 1
                if failure is None:
                    request.value, request.is_done = value, True
                    changed.notify_all()
                else:
                    self._fail(request, failure)
