"""Monitors of a training run: statistics of buffer items, event rates and durations of code.

A monitor records values when its methods are called and returns statistics on request. Monitors
start no thread and write no file. They keep a window of fixed size. All methods are thread-safe.
The result of `snapshot()` can be passed to any logger.
"""

from __future__ import annotations

import math
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..core import arguments
from ..core.arguments import real, whole
from ..errors import UsageError, nearest

#: Statistics of durations in `PerformanceMonitor.summary`, in addition to `count`.
_STATISTICS: dict[str, Callable[[npt.NDArray[np.float64]], Any]] = {
    "total": np.sum,
    "mean": np.mean,
    "std": np.std,
    "p50": lambda durations: np.percentile(durations, 50),
    "p95": lambda durations: np.percentile(durations, 95),
    "max": np.max,
}
#: Statistics of no values: number of values, sum, maximum, minimum.
_NOTHING: npt.NDArray[np.float64] = np.array([0.0, 0.0, -np.inf, np.inf])


class Monitor(ABC):
    """Base class of monitors: `snapshot()` returns numbers and `text()` returns one line."""

    @abstractmethod
    def snapshot(self) -> dict[str, int | float]:
        """Return the statistics as a new flat dict of Python numbers.

        Quantities that were never recorded are left out.
        """

    @abstractmethod
    def reset(self) -> None:
        """Remove all recorded values."""

    def text(self) -> str:
        """Return the snapshot as one line: `name=value` pairs, separated by spaces."""
        return " ".join(
            f"{name}={x if isinstance(x, int) else f'{x:.4g}'}"
            for name, x in self.snapshot().items()
        )

    def __str__(self) -> str:
        return f"{type(self).__name__}({self.text()})"


class NaturalMonitor(Monitor):
    """Event rate per second of wall time over the last `window_s` seconds.

    Args:
        window_s: Length of the time window in seconds, above 0.
        num_slices: Number of slices of the window. The window moves by one slice at a time, so its
            length varies by one slice.
        clock: Function that returns monotonic time in seconds.
    """

    def __init__(
        self,
        window_s: float = 10.0,
        num_slices: int = 100,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.window_s = real("window_s", window_s, "> 0", lambda x: 0 < x < math.inf)
        self.num_slices = whole("num_slices", num_slices, 1)
        if not callable(clock):
            raise UsageError(f"clock must be a function that returns seconds, got {clock!r}.")
        self._clock = clock
        self._lock = threading.Lock()
        self.reset()

    def record(self, num_events: int = 1) -> None:
        """Record `num_events` (>= 0) events at the current time."""
        num_events = whole("num_events", num_events, 0)
        with self._lock:
            self._slices[self._move() % self.num_slices] += num_events
            self._total += num_events

    @property
    def total(self) -> int:
        """Number of events since creation or `reset`."""
        return self._total

    @property
    def rate(self) -> float:
        """Events per second over the window, or since creation or `reset` if that is shorter."""
        with self._lock:
            first_slice = self._move() - self.num_slices + 1
            window_start_s = max(0, first_slice * self.window_s / self.num_slices)
            covered_s = self._clock() - self._started - window_start_s
            return sum(self._slices) / covered_s if covered_s > 0 else 0.0

    def snapshot(self) -> dict[str, int | float]:
        """Return `rate` (events per second) and `total`."""
        return {"rate": self.rate, "total": self.total}

    def reset(self) -> None:
        """Remove all events and restart the clock."""
        with self._lock:
            self._started = self._clock()
            self._newest = 0
            self._total = 0
            self._slices = [0] * self.num_slices

    def _move(self) -> int:
        """Move the window to the current time; return the number of its newest slice.

        Slices are numbered from the start. The counts of slices that left the window are removed.
        """
        current = int((self._clock() - self._started) * self.num_slices / self.window_s)
        for number in range(max(self._newest + 1, current - self.num_slices + 1), current + 1):
            self._slices[number % self.num_slices] = 0
        self._newest = max(self._newest, current)
        return self._newest


class TickMonitor(Monitor):
    """Mean, maximum and minimum of quantities, such as priority, over the last `window` ticks.

    A tick is one call of `record`, with one value per item or one value for all items of the call.
    Means are over items, not over ticks.
    """

    #: Recorded quantities: `time` is in seconds, `size` in items, `use` in draws per item, and
    #: `staleness` in iterations of the learner.
    FIELDS: tuple[str, ...] = ("time", "size", "use", "priority", "staleness")

    def __init__(self, window: int = 100) -> None:
        self.window = whole("window", window, 1)
        self._lock = threading.Lock()
        self.reset()

    def record(self, **values: Any) -> None:
        """Record one tick: a number, sequence, array or tensor per quantity, all finite.

        A call that raises an error records nothing. An empty sequence contains no value to record.

        Raises:
            UsageError: The quantity is not one of `FIELDS`, or a value is not a finite number.
        """
        tick = {name: _summary(name, value, self.FIELDS) for name, value in values.items()}
        with self._lock:
            place = self._num_ticks % self.window
            self._num_ticks += 1
            for name, ticks in self._ticks.items():
                ticks[place] = tick.get(name, _NOTHING)

    @property
    def num_ticks(self) -> int:
        """Number of calls of `record` since creation or `reset`."""
        return self._num_ticks

    def snapshot(self) -> dict[str, int | float]:
        """Return `ticks` and, per quantity, `<quantity>_mean`, `_max` and `_min` over the window.

        `ticks` counts since creation or `reset`.
        """
        with self._lock:
            values: dict[str, int | float] = {"ticks": self._num_ticks}
            for name, ticks in self._ticks.items():
                counts, sums, highs, lows = ticks.T
                if counts.any():
                    values[f"{name}_mean"] = float(sums.sum() / counts.sum())
                    values[f"{name}_max"] = float(highs.max())
                    values[f"{name}_min"] = float(lows.min())
        return values

    def reset(self) -> None:
        """Remove all ticks."""
        with self._lock:
            self._num_ticks = 0
            self._ticks = {name: np.tile(_NOTHING, (self.window, 1)) for name in self.FIELDS}


class InTickMonitor(TickMonitor):
    """Statistics of the items pushed into a buffer, one tick per push."""


class OutTickMonitor(TickMonitor):
    """Statistics of the items sampled from a buffer, one tick per sample."""


class BufferMonitor(Monitor):
    """Rates and statistics of the pushes and samples of a managed buffer.

    Args:
        window_s: Length in seconds of the window of the rates.
        window: Number of the last pushes, and of the last samples, whose values are kept.

    Attributes:
        pushed, sampled: Rates in items per second (`NaturalMonitor`).
        in_ticks, out_ticks: Statistics of pushes and of samples (`TickMonitor`).
    """

    def __init__(self, window_s: float = 10.0, window: int = 100) -> None:
        self.pushed = NaturalMonitor(window_s)
        self.sampled = NaturalMonitor(window_s)
        self.in_ticks = InTickMonitor(window)
        self.out_ticks = OutTickMonitor(window)
        monitors: tuple[Monitor, ...] = self.pushed, self.sampled, self.in_ticks, self.out_ticks
        self._parts = dict(zip(("pushed", "sampled", "in", "out"), monitors, strict=True))

    def note_push(self, num_items: int, **values: Any) -> None:
        """Record a push of `num_items` items; see `InTickMonitor.record` for `values`."""
        self.pushed.record(num_items)
        self.in_ticks.record(size=num_items, **values)

    def note_sample(self, num_items: int, **values: Any) -> None:
        """Record a sample of `num_items` items; see `OutTickMonitor.record` for `values`."""
        self.sampled.record(num_items)
        self.out_ticks.record(size=num_items, **values)

    def snapshot(self) -> dict[str, int | float]:
        """Return the snapshots of all four monitors: `pushed/rate`, `out/staleness_max`, ..."""
        return {
            f"{part}/{name}": x
            for part, monitor in self._parts.items()
            for name, x in monitor.snapshot().items()
        }

    def text(self) -> str:
        """Return the text of all four monitors as one line."""
        return "; ".join(f"{part}: {monitor.text()}" for part, monitor in self._parts.items())

    def reset(self) -> None:
        """Remove all recorded values of the four monitors."""
        for monitor in self._parts.values():
            monitor.reset()


class PerformanceMonitor(Monitor):
    """Recorder of the durations of named pieces of code.

    Args:
        window: Number of durations that are kept per name, newest first; at least 1.
    """

    def __init__(self, window: int = 1000) -> None:
        self.window = whole("window", window, 1)
        self._lock = threading.Lock()
        self._durations: dict[str, deque[float]] = {}

    def record(self, key: str, duration: float) -> None:
        """Record a duration in seconds (finite, >= 0) under `key`, which may be a new name."""
        if not isinstance(key, str) or not key:
            raise UsageError(f"key must be a non-empty str, got {key!r}.")
        expected = "finite seconds >= 0"
        value = real("duration", duration, expected, lambda x: 0 <= x < math.inf)
        with self._lock:
            self._durations.setdefault(key, deque(maxlen=self.window)).append(value)

    @contextmanager
    def timer(self, key: str, device: torch.device | str | None = None) -> Iterator[None]:
        """Record the duration of the block, also if the block raises.

        Args:
            key: Name of the duration.
            device: CUDA device to synchronize before and after the block. Otherwise the duration
                includes only the launches of kernels, not their execution.
        """
        _wait_for(device)
        start = time.perf_counter()
        try:
            yield
        finally:
            _wait_for(device)
            self.record(key, time.perf_counter() - start)

    @property
    def timings(self) -> dict[str, list[float]]:
        """The last `window` durations of each name in seconds, oldest first, as new lists."""
        with self._lock:
            return {key: list(durations) for key, durations in self._durations.items()}

    def report(self) -> dict[str, float]:
        """Return mean and standard deviation per name in seconds: `<name>_mean`, `<name>_std`."""
        rows = self.summary().items()
        return {f"{key}_{name}": float(row[name]) for key, row in rows for name in ("mean", "std")}

    def summary(self) -> dict[str, dict[str, int | float]]:
        """Return statistics of the last `window` durations of each name, in seconds.

        The statistics are `count`, `total`, `mean`, `std`, `p50`, `p95` and `max`. `std` is the
        population standard deviation: 0 for a single duration. Percentiles are interpolated
        linearly.
        """
        copies = {key: np.array(durations) for key, durations in self.timings.items()}
        return {
            key: {
                "count": len(values),
                **{name: float(of(values)) for name, of in _STATISTICS.items()},
            }
            for key, values in copies.items()
        }

    def snapshot(self) -> dict[str, int | float]:
        """Return the summary as a flat dict: `<name>/<statistic>`."""
        return {
            f"{key}/{name}": value
            for key, row in self.summary().items()
            for name, value in row.items()
        }

    def text(self) -> str:
        """Return mean, 95th percentile and count of each name as one line."""
        rows = self.summary().items()
        return "; ".join(
            f"{key} {_seconds(row['mean'])} (p95 {_seconds(row['p95'])}, n={row['count']})"
            for key, row in rows
        )

    def reset(self) -> None:
        """Remove all names and durations."""
        with self._lock:
            self._durations.clear()


def plot_snapshots(
    snapshots: Sequence[Mapping[str, int | float]],
    path: str | Path,
    names: Sequence[str] | None = None,
    x: str | None = None,
) -> None:
    """Draw one small chart per name over a list of snapshots, and save the picture.

    Args:
        snapshots: Results of `snapshot()`, in order. The caller may have added further numbers.
        path: Path of the picture; its suffix selects the format.
        names: Names to draw; None for every name but `x`. Snapshots without a name leave a gap.
        x: Name of the values on the horizontal axis; None for the position in the list.

    Raises:
        UsageError: There is no name to draw, or a name is in no snapshot.
        ImportError: matplotlib (the extra `plot`) is not installed.
    """
    path = arguments.path("path", path)
    expected = "as a list of mappings"
    for snapshot in arguments.instance("snapshots", snapshots, expected, Iterable):
        arguments.instance("snapshots", snapshot, expected, Mapping)
    known = list(dict.fromkeys(name for snapshot in snapshots for name in snapshot))
    if names is None:
        names = [name for name in known if name != x]
    names = arguments.names("names", names)
    for name in names:
        arguments.choice("names", name, known)
    if x is not None:
        arguments.choice("x", x, known)
    if not names:
        raise UsageError("names is empty. Pass at least one name to draw.")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 1.6 * len(names) + 0.6), layout="constrained")
    FigureCanvasAgg(figure)
    along = [i if x is None else snapshot.get(x, math.nan) for i, snapshot in enumerate(snapshots)]
    for axes, name in zip(
        figure.subplots(len(names), 1, sharex=True, squeeze=False)[:, 0], names, strict=True
    ):
        axes.plot(
            along,
            [snapshot.get(name, math.nan) for snapshot in snapshots],
            ".-",
            linewidth=1,
            markersize=3,
        )
        axes.set_ylabel(name, fontsize=8)
    axes.set_xlabel("snapshot" if x is None else x)
    figure.savefig(path, dpi=110)


def _summary(name: str, value: Any, names: Sequence[str]) -> npt.NDArray[np.float64]:
    """Return the number, sum, maximum and minimum of recorded values: `[4]` float64."""
    if name not in names:
        raise UsageError(f"unknown name {name!r}. The names are {nearest(name, names)}.")
    try:
        if isinstance(value, torch.Tensor):
            value = value.detach().to("cpu", torch.float64)
        values = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError) as cause:
        raise UsageError(f"{name!r} must be numbers, got {type(value).__name__}.") from cause
    if not values.size:
        return _NOTHING
    summary = np.array([values.size, values.sum(), values.max(), values.min()])
    if not np.isfinite(summary).all():
        numbers = repr(values.reshape(-1).tolist())[:60]
        raise UsageError(f"{name!r} must be finite numbers, got {numbers}.")
    return summary


def _wait_for(device: torch.device | str | None) -> None:
    if device is not None and torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def _seconds(value: float) -> str:
    scale, unit = next(
        (pair for pair in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")) if value >= pair[0]),
        (1e-9, "ns"),
    )
    return f"{value / scale:.3g} {unit}"
