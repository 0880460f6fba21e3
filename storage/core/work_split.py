"""Work split over threads where that was measured to be faster, and only there.

One rule: whether one thread or several do a piece of work is decided by how long such work took here, per
byte; short calls stay in the calling thread, because handing work over costs as much as doing it. Threads take
some pieces at a time until none is left: one that starts late, or is held up by a neighbour, does fewer.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from ..errors import UsageError

#: A call that one thread does in less than this is not split: waking another takes 50 to 100 us.
MIN_SPLIT_S = 0.0004
#: Nor one of pieces that each take less than this: then threads wait for the interpreter's lock.
MIN_PIECE_S = 0.00002
#: What a thread takes at a time lasts about this long: short beside a call, long beside taking it.
TAKEN_S = 0.0002
#: After so many calls the way that was slower is tried again: machines change their mind. Several threads are tried
#: more often where they lose little, as where a neighbour is busy; as seldom as 64 where they took twice the time.
CALLS_BETWEEN_TRIALS, CALLS_BETWEEN_SPLITS, MOST_CALLS_BETWEEN_SPLITS = 32, 8, 64
#: What trying several threads may cost the calls between two trials, as a part of their time.
_TRIAL_COST = 0.02
#: Several threads must take at most this part of the time of one: the fastest calls hide what waiting costs the others.
MIN_GAIN = 0.9
#: The fastest of so many calls counts, so that one that was interrupted decides nothing.
_NUM_KEPT = 4


class _Pool:
    """Threads of this process; a fork leaves them behind, so that the child starts its own."""

    def __init__(self) -> None:
        self._pid, self._pool = 0, ThreadPoolExecutor(1)

    def submit(self, work: Callable[[], None]) -> Future[None]:
        if self._pid != os.getpid():
            self._pid, self._pool = os.getpid(), ThreadPoolExecutor(max(1, num_processors() - 1), "codec")
        return self._pool.submit(work)


_pool = _Pool()


def num_processors() -> int:
    """Processors that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


class WorkSplit:
    """Runs pieces of work in one thread or in several, as measured.

    Args:
        num_threads: At most so many; None takes torch's number of threads (1 in a DataLoader worker).
    """

    def __init__(self, num_threads: int | None = None) -> None:
        if num_threads is not None and (int(num_threads) != num_threads or num_threads < 1):
            raise UsageError("split work", "", "num_threads >= 1, or None", repr(num_threads))
        self.num_threads = num_threads
        self._times: dict[tuple[Hashable, bool], deque[float]] = {}
        self._num_calls: dict[Hashable, int] = {}

    def run(self, function: Callable[[int, int], None], num_pieces: int, num_bytes: int, kind: Hashable = "") -> int:
        """Call `function(start, stop)` for parts that cover `range(num_pieces)`; give the number of threads.

        Args:
            function: Does the pieces `start:stop`, perhaps beside others that do other pieces; must release the
                interpreter lock to gain anything.
            num_pieces: How many pieces of about equal size there are.
            num_bytes: How much they are together.
            kind: Times are kept apart by this.

        Raises:
            Whatever `function` raises, when no part is under way any more; the others are left undone.
        """
        limit = self.num_threads if self.num_threads is not None else torch.get_num_threads()
        limit = min(limit, num_processors(), num_pieces)
        splits = limit > 1 and self._is_worth_it(kind, num_bytes, num_pieces)
        started_s = time.perf_counter()
        if splits:
            piece_s = min(self._times[kind, False]) * num_bytes / num_pieces
            step = max(1, min(num_pieces // limit, int(TAKEN_S / max(piece_s, 1e-9))))
            _in_parts(function, num_pieces, step, limit)
        else:
            function(0, num_pieces)
        self._keep(kind, splits, (time.perf_counter() - started_s) / max(1, num_bytes))
        return limit if splits else 1

    def _is_worth_it(self, kind: Hashable, num_bytes: int, num_pieces: int) -> bool:
        alone, together = (self._times.get((kind, splits), ()) for splits in (False, True))
        if not alone or min(alone) * num_bytes < max(MIN_SPLIT_S, MIN_PIECE_S * num_pieces):
            return False
        calls = self._num_calls[kind] = self._num_calls.get(kind, 0) + 1
        if len(together) < _NUM_KEPT or len(alone) < _NUM_KEPT:
            return len(together) <= len(alone)
        is_faster = min(together) < MIN_GAIN * min(alone)
        if is_faster:
            return calls % CALLS_BETWEEN_TRIALS != 0
        wait = int((self._times[kind, True][-1] / min(alone) - 1) / _TRIAL_COST)
        return calls % min(max(wait, CALLS_BETWEEN_SPLITS), MOST_CALLS_BETWEEN_SPLITS) == 0

    def _keep(self, kind: Hashable, splits: bool, seconds_per_byte: float) -> None:
        self._times.setdefault((kind, splits), deque(maxlen=_NUM_KEPT)).append(seconds_per_byte)


def _in_parts(function: Callable[[int, int], None], num_pieces: int, step: int, num_threads: int) -> None:
    """Do pieces in several threads, each of which takes `step` at a time."""
    waiting = deque(range(0, num_pieces, step))

    def work() -> None:
        try:
            while True:
                try:
                    start = waiting.popleft()
                except IndexError:
                    return
                function(start, min(start + step, num_pieces))
        except BaseException:  # Ctrl-C too: what the others would do is not wanted any more
            waiting.clear()
            raise

    others: list[Future[None]] = []
    failure: BaseException | None = None
    try:
        for _ in range(1, num_threads):
            others.append(_pool.submit(work))
    except RuntimeError:  # while the interpreter exits no thread takes work any more
        pass
    try:
        work()
    except BaseException as error:  # noqa: BLE001 - raised below, when nobody writes to the output any more
        failure = error
    for other in others:
        if not other.cancel():  # one that has not begun has nothing left to do
            failure = other.exception() or failure
    if failure is not None:
        raise failure
