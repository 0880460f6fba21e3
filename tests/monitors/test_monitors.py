"""Monitors report the events in their window, from any thread, with constant memory."""

from __future__ import annotations

import json
import math
import sys
import threading
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from storage.errors import UsageError
from storage.live.monitors import (
    InTickMonitor,
    Monitor,
    NaturalMonitor,
    OutTickMonitor,
    PerformanceMonitor,
    plot_snapshots,
)

NUMBERS = st.floats(-1e6, 1e6)


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def in_threads(work: Any, num_threads: int = 4) -> None:
    threads = [threading.Thread(target=work) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@given(st.lists(st.tuples(st.floats(0, 3), st.integers(0, 50)), min_size=1, max_size=60))
def test_the_rate_counts_events_of_the_window_within_one_slice(
    steps: list[tuple[float, int]],
) -> None:
    clock = Clock()
    monitor = NaturalMonitor(window_s=4.0, num_slices=8, clock=clock)
    events = []
    for wait_s, number in steps:
        clock.now_s += wait_s
        monitor.record(number)
        events.append((clock.now_s, number))
    elapsed = clock.now_s - 100.0
    assert monitor.total == sum(number for _, number in events)
    if elapsed < 1e-6:
        assert monitor.rate == 0 or elapsed > 0
        return
    covered = min(elapsed, 4.0)
    surely = sum(number for when, number in events if when > clock.now_s - 3.5 + 1e-9)
    possibly = sum(number for when, number in events if when >= clock.now_s - 4.0 - 1e-9)
    assert surely / (covered + 1e-6) - 1e-6 <= monitor.rate <= possibly / min(elapsed, 3.5) + 1e-3


def test_the_rate_is_exact_for_a_steady_stream_and_zero_after_silence() -> None:
    clock = Clock()
    monitor = NaturalMonitor(window_s=10.0, clock=clock)
    for _ in range(1000):
        clock.now_s += 0.05
        monitor.record(2)
    assert monitor.rate == pytest.approx(40, rel=0.02)
    clock.now_s += 1e6
    assert monitor.snapshot() == {"rate": 0.0, "total": 2000}


@given(
    st.integers(1, 7),
    st.lists(
        st.dictionaries(st.sampled_from(OutTickMonitor.FIELDS), st.lists(NUMBERS, max_size=5)),
        max_size=25,
    ),
)
def test_ticks_equal_a_list_of_the_last_ticks(
    window: int, ticks: list[dict[str, list[float]]]
) -> None:
    monitor = OutTickMonitor(window)
    for tick in ticks:
        monitor.record(**tick)
    expected: dict[str, float] = {"ticks": len(ticks)}
    for name in OutTickMonitor.FIELDS:
        values = [value for tick in ticks[-window:] for value in tick.get(name, [])]
        if values:
            expected |= {
                f"{name}_mean": math.fsum(values) / len(values),
                f"{name}_max": max(values),
                f"{name}_min": min(values),
            }
    assert monitor.snapshot() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    "make", [float, np.float32, torch.tensor, lambda x: torch.tensor([[x]]), lambda x: (x,)]
)
def test_a_tick_accepts_numbers_arrays_and_tensors(make: Any) -> None:
    monitor = InTickMonitor(4)
    monitor.record(time=make(0.25), priority=make(2.0))
    snapshot = monitor.snapshot()
    assert snapshot == {
        "ticks": 1,
        **{f"time_{part}": 0.25 for part in ("mean", "max", "min")},
        **{f"priority_{part}": 2.0 for part in ("mean", "max", "min")},
    }
    assert all(type(value) in (int, float) for value in snapshot.values())


@pytest.mark.parametrize(
    "values", [{"tiem": 1}, {"time": math.nan}, {"time": 1, "use": [1, math.inf]}, {"time": "x"}]
)
def test_an_invalid_tick_changes_nothing(values: dict[str, Any]) -> None:
    monitor = InTickMonitor(4)
    monitor.record(time=1)
    before = monitor.snapshot()
    with pytest.raises(UsageError, match=r"^InTickMonitor.record: "):
        monitor.record(**values)
    assert monitor.snapshot() == before


@given(st.integers(1, 9), st.lists(st.floats(0, 100), min_size=1, max_size=40))
def test_the_report_summarizes_the_window(window: int, durations: list[float]) -> None:
    monitor = PerformanceMonitor(window)
    for duration in durations:
        monitor.record("step", duration)
    last = deque(durations, maxlen=window)
    assert monitor.summary()["step"] == pytest.approx(
        {
            "count": len(last),
            "total": sum(last),
            "mean": np.mean(last),
            "std": np.std(last),
            "p50": np.percentile(last, 50),
            "p95": np.percentile(last, 95),
            "max": max(last),
        }
    )


def test_a_new_name_needs_no_registration_and_reset_removes_it() -> None:
    monitor = PerformanceMonitor()
    with monitor.timer("sample"), monitor.timer("gather", device="cpu"):
        pass
    monitor.record("learn", 0.5)
    report = monitor.summary()
    assert list(report) == ["gather", "sample", "learn"]
    assert 0 <= report["gather"]["max"] <= report["sample"]["max"]
    assert (
        report["learn"]["mean"] == report["learn"]["p95"] == 0.5 and report["learn"]["std"] == 0.0
    )
    monitor.reset()
    assert monitor.summary() == {} and monitor.snapshot() == {} and monitor.text() == ""


def test_a_timer_counts_a_block_that_raises() -> None:
    monitor = PerformanceMonitor()
    with pytest.raises(KeyError), monitor.timer("fails"):
        raise KeyError
    assert monitor.summary()["fails"]["count"] == 1


@pytest.mark.parametrize("seconds", [-1, math.nan, math.inf, "a", None])
def test_an_invalid_duration_raises(seconds: Any) -> None:
    monitor = PerformanceMonitor()
    with pytest.raises(UsageError, match="duration must be finite seconds >= 0, got"):
        monitor.record("step", seconds)
    assert monitor.summary() == {}


def test_memory_does_not_grow_with_the_number_of_records() -> None:
    def held(monitor: Any) -> int:
        parts = [
            part
            for value in vars(monitor).values()
            for part in (value.values() if type(value) is dict else [value])
        ]
        return sum(
            part.nbytes if isinstance(part, np.ndarray) else sys.getsizeof(part) for part in parts
        )

    clock = Clock()
    natural, ticks, performance = (
        NaturalMonitor(clock=clock),
        OutTickMonitor(10),
        PerformanceMonitor(10),
    )
    sizes = []
    for count in range(3000):
        clock.now_s += 0.01
        natural.record(1 << 20)
        ticks.record(time=1.0, use=[1, 2])
        performance.record("x", 1.0)
        if count in (20, 2999):
            sizes.append((held(ticks), held(performance), held(natural)))
    assert all(last <= first + 16 for first, last in zip(*sizes, strict=True)), (
        "numbers grow, by some bytes"
    )


def test_threads_lose_no_record_and_no_thread_is_started() -> None:
    before = set(threading.enumerate())
    natural, ticks, performance = NaturalMonitor(), InTickMonitor(50), PerformanceMonitor(100_000)

    def work() -> None:
        for value in range(500):
            natural.record()
            # A torn tick would mix the values of two calls.
            ticks.record(time=value, use=value)
            performance.record(f"key {value % 3}", 1.0)
            snapshot = ticks.snapshot()
            assert all(
                snapshot[f"time_{part}"] == snapshot[f"use_{part}"]
                for part in ("mean", "max", "min")
            )
            performance.summary()

    in_threads(work)
    assert natural.total == ticks.num_ticks == 2000
    assert sum(row["count"] for row in performance.summary().values()) == 2000
    assert set(threading.enumerate()) <= before


def test_the_text_is_one_line_and_the_snapshot_is_json() -> None:
    ticks, natural, performance = (
        OutTickMonitor(),
        NaturalMonitor(clock=Clock()),
        PerformanceMonitor(),
    )
    ticks.record(time=0.001234567, use=[1, 2, 3])
    performance.record("sample", 0.0021)
    assert (
        ticks.text()
        == "ticks=1 time_mean=0.001235 time_max=0.001235 time_min=0.001235 use_mean=2 use_max=3 use_min=1"
    )
    assert natural.text() == "rate=0 total=0"
    assert performance.text() == "sample 2.1 ms (p95 2.1 ms, n=1)"
    assert str(natural) == "NaturalMonitor(rate=0 total=0)"
    for monitor in (ticks, natural, performance):
        assert json.loads(json.dumps(monitor.snapshot(), allow_nan=False)) == monitor.snapshot()


@pytest.mark.parametrize(
    "make", [OutTickMonitor, InTickMonitor, PerformanceMonitor, lambda x: NaturalMonitor(1.0, x)]
)
@pytest.mark.parametrize("window", [0, -1, 1.5, True])
def test_a_window_without_capacity_raises(make: Any, window: Any) -> None:
    with pytest.raises(UsageError, match=">= 1"):
        make(window)


def test_an_invalid_window_s_or_num_events_raises() -> None:
    for window_s in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(UsageError, match="window_s must be > 0"):
            NaturalMonitor(window_s)
    with pytest.raises(UsageError, match=r"NaturalMonitor.record: num_events must be >= 0, got -1"):
        NaturalMonitor().record(-1)


def test_snapshots_are_plotted_into_a_file(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    monitor, history = InTickMonitor(), []
    for step in range(5):
        if step > 1:
            monitor.record(time=step)
        history.append({"step": 10 * step} | monitor.snapshot())
    plot_snapshots(history, tmp_path / "a.png", x="step")
    plot_snapshots(history, tmp_path / "b.png", names=["time_mean"])
    for name in "ab":
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UsageError, match="names must be one of 'time_mean'"):
        plot_snapshots(history, tmp_path / "c.png", names=["tim_mean"])
    with pytest.raises(UsageError, match="at least one name"):
        plot_snapshots([], tmp_path / "c.png")
    assert not (tmp_path / "c.png").exists()


def test_a_monitor_without_snapshot_cannot_be_created() -> None:
    class Half(Monitor):
        def reset(self) -> None:
            """Do nothing."""

    with pytest.raises(TypeError, match="snapshot"):
        Half()
