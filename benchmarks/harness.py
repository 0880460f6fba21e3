"""Time contenders in alternation. Print a table; write JSON and a chart.

Every figure is a ratio to a limit, which is measured in the same process and alternates with the
figure. A workload is a module with a function `cases(quick)` that yields `Case` objects.
`benchmarks/__main__.py` lists all workloads.

A minimal workload:

    def cases(quick: bool) -> Iterator[Case]:
        source, target = torch.ones(1 << 20), torch.empty(1 << 20)
        yield Case(
            "copy 4 MiB",
            num_bytes=4 << 20,
            contenders=(
                Contender("copy_", lambda: lambda: target.copy_(source), LIMIT),
                Contender("clone", lambda: lambda: source.clone(), OURS, reach=1.5),
                Contender("numpy", lambda: lambda: source.numpy().copy(), PEER),
            ),
        )
"""

from __future__ import annotations

import gc
import os
import statistics
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from tqdm import tqdm

from .peers import PeerMissing

OURS, LIMIT, PEER = "ours", "limit", "peer"
#: A repetition calls a short function until it lasts this long, in seconds, so that the clock is
#: precise enough.
MIN_REPETITION_S = 0.02
MAX_CALLS = 2000
WARM_UP_STRETCH_S = 0.5
#: A contender that needs more seconds than this per call is repeated only `MIN_REPEATS` times.
SLOW_CALL_S = 1.0
MIN_REPEATS = 5

#: Clock of all figures: wall time, or with `--processor-time` the processor time of this process.
clock: Callable[[], float] = time.perf_counter

Call = Callable[[], object]
Result = TypeVar("Result")


@dataclass(frozen=True)
class Contender:
    """One implementation of the work of a case."""

    name: str
    #: Not timed: prepares the work and returns the timed function. Raises `PeerMissing` with the
    #: reason to skip the contender.
    prepare: Callable[[], Call]
    role: str = OURS
    #: Not timed, called before every repetition, which is then a single call: clears a folder, or
    #: drops the page cache.
    before: Call | None = None
    #: Promise: at most this multiple of the limit, or at most this many seconds per call.
    reach: float | None = None
    reach_s: float | None = None
    #: Whether the call returns its own seconds, instead of being timed.
    own_clock: bool = False
    #: Not timed, called at the end of the case.
    close: Call | None = None
    #: Text of the last column of the table, such as counts. Called before `close`.
    note: Callable[[], str] | None = None


@dataclass(frozen=True)
class Case:
    """Work that several contenders do. One of them is the limit."""

    name: str
    contenders: tuple[Contender, ...]
    #: Bytes that one call moves, for the throughput column; 0 for no throughput.
    num_bytes: int = 0
    num_repeats: int = 7
    #: Maximum seconds of warm-up calls of a short function, until calls get no faster. In virtual
    #: machines, unused gigabytes are at first up to 30 times slower.
    warm_up_s: float = 0.0

    def __post_init__(self) -> None:
        assert [contender.role for contender in self.contenders].count(LIMIT) == 1, self.name


@dataclass
class Timing:
    """Measurements of one contender in one case."""

    case: str
    name: str
    role: str
    num_bytes: int = 0
    reach: float | None = None
    reach_s: float | None = None
    #: Seconds per call, one value per repetition.
    times_s: list[float] = field(default_factory=list)
    ratio: float | None = None
    #: Reason for a missing figure.
    skipped: str = ""
    failed: str = ""
    note: str = ""

    @property
    def median_s(self) -> float | None:
        return statistics.median(self.times_s) if self.times_s else None

    @property
    def is_reached(self) -> bool | None:
        """Whether the promise was kept; None without a promise or a measurement."""
        if self.median_s is None or (self.reach is None and self.reach_s is None):
            return None
        below_ratio = self.reach is None or (self.ratio is not None and self.ratio <= self.reach)
        return below_ratio and (self.reach_s is None or self.median_s <= self.reach_s)


def measure(case: Case) -> list[Timing]:
    """Time the contenders of a case in alternation.

    A contender that raises is reported and left out.
    """
    timings = [
        Timing(case.name, entry.name, entry.role, case.num_bytes, entry.reach, entry.reach_s)
        for entry in case.contenders
    ]
    calls: list[Call | None] = []
    for contender, timing in zip(case.contenders, timings, strict=True):
        calls.append(_guarded(timing, contender.prepare))
    counts = [
        _calls_per_repetition(*parts, case.warm_up_s)
        for parts in zip(case.contenders, timings, calls, strict=True)
    ]
    order = list(range(len(timings)))
    gc.collect()
    gc.disable()
    try:
        for repeat in range(max(case.num_repeats, MIN_REPEATS)):
            for position in order[repeat % len(order) :] + order[: repeat % len(order)]:
                timing, call = timings[position], calls[position]
                if call is None or timing.failed or _is_done(timing):
                    continue
                elapsed_s = _guarded(
                    timing,
                    lambda p=position, c=call: _repeat(case.contenders[p], c, counts[p], clock),
                )
                if elapsed_s is not None:
                    timing.times_s.append(elapsed_s)
    finally:
        gc.enable()
    for contender, timing in zip(case.contenders, timings, strict=True):
        if contender.note is not None and timing.times_s:
            timing.note = _guarded(timing, contender.note) or ""
    for contender, timing in zip(case.contenders, timings, strict=True):
        if contender.close is not None:
            _guarded(timing, contender.close)
    limit_s = next(timing for timing in timings if timing.role == LIMIT).median_s
    for timing in timings:
        if timing.median_s is not None and limit_s:
            timing.ratio = timing.median_s / limit_s
    return timings


def run(cases: Iterable[Case], name: str) -> list[Timing]:
    """Measure all cases of a workload.

    If the data of a case cannot be created, report it and end the workload.
    """
    timings: list[Timing] = []
    waiting = iter(cases)
    bar = tqdm(desc=name, unit=" cases")
    while True:
        try:
            case = next(waiting)
        except StopIteration:
            break
        except PeerMissing as error:
            timings.append(Timing(name, "all cases", LIMIT, skipped=str(error)))
            break
        except Exception as error:  # noqa: BLE001 - one workload must not end the others
            timings.append(Timing(name, "making the cases", OURS, failed=_describe(error)))
            break
        bar.set_postfix_str(case.name)
        timings += measure(case)
        bar.update()
    bar.close()
    return timings


def _guarded(timing: Timing, call: Callable[[], Result]) -> Result | None:
    try:
        return call()
    except PeerMissing as error:
        timing.skipped = str(error)
    except Exception as error:  # noqa: BLE001 - a contender that raises is reported in the table
        timing.failed = _describe(error)
        if os.environ.get("BENCHMARKS_TRACEBACK"):
            traceback.print_exc()
    return None


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _is_done(timing: Timing) -> bool:
    return len(timing.times_s) >= MIN_REPEATS and timing.times_s[0] > SLOW_CALL_S


def _calls_per_repetition(
    contender: Contender, timing: Timing, call: Call | None, warm_up_s: float
) -> int:
    """Warm up, and return how many calls a repetition needs to be long enough."""
    if call is None:
        return 0
    if contender.before is not None or contender.own_clock:
        return 1
    # Wall time also with `--processor-time`: a call that waits is not repeated 2,000 times.
    wall = time.perf_counter
    first_s = _guarded(timing, lambda: _repeat(contender, call, 1, wall))
    if first_s is None or first_s > SLOW_CALL_S:
        return 1
    if warm_up_s:
        _guarded(timing, lambda: _warm_up(call, warm_up_s))
    second_s = _guarded(timing, lambda: _repeat(contender, call, 1, wall)) or first_s
    return max(1, min(MAX_CALLS, int(MIN_REPETITION_S / max(second_s, 1e-9))))


def _warm_up(call: Call, at_most_s: float) -> None:
    """Call until a series of calls is less than a tenth faster than the fastest series before."""
    stop_s, fastest_s = time.perf_counter() + at_most_s, float("inf")
    while time.perf_counter() < stop_s:
        start_s, num_calls = time.perf_counter(), 0
        while time.perf_counter() < start_s + WARM_UP_STRETCH_S:
            call()
            num_calls += 1
        per_call_s = (time.perf_counter() - start_s) / num_calls
        if per_call_s > 0.9 * fastest_s:
            return
        fastest_s = per_call_s


def _repeat(contender: Contender, call: Call, num_calls: int, clock: Callable[[], float]) -> float:
    if contender.before is not None:
        contender.before()
    if contender.own_clock:
        return float(call())  # type: ignore[arg-type]
    start = clock()
    for _ in range(num_calls):
        call()
    return (clock() - start) / num_calls
