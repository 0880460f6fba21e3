"""Workloads run at small sizes: every row of ours has a figure, and all baselines write the same
values.
"""

from __future__ import annotations

import time
from pathlib import Path

import h5py
import numpy as np
import pytest

from benchmarks import (
    baselines,
    data,
    harness,
    picture_sets,
    prioritized,
    record,
    replay,
    startup,
)
from benchmarks.harness import LIMIT, OURS, PEER, Case, Contender
from benchmarks.images import record_rgb


def check_measured(case: Case) -> None:
    timings = harness.measure(case)
    assert [timing.failed for timing in timings if timing.failed] == []
    assert all(timing.median_s for timing in timings if timing.role != PEER)


@pytest.mark.parametrize("write", [baselines.write_datasets, baselines.append_datasets])
def test_datasets_of_the_baseline_have_the_rollout(tmp_path: Path, write) -> None:
    rollout = data.generated(4, 3, {"observation": 2, "action": 1})
    write(tmp_path, rollout)
    with h5py.File(tmp_path / "data.hdf5") as file:
        assert set(file) == set(rollout)
        for name, value in rollout.items():
            assert np.array_equal(file[name][...], value.numpy())


def test_draws_of_several_rows_are_measured() -> None:
    check_measured(replay.multi_step(replay.filled(10_000), 32))


def test_items_and_windows_with_priorities_are_measured() -> None:
    check_measured(prioritized.pushing(1000))
    check_measured(prioritized.adding_windows(100))
    check_measured(prioritized.learning_windows(100))


def test_recorded_environments_are_measured() -> None:
    pytest.importorskip("gymnasium")
    check_measured(record.wrapped(8, 5))


def test_the_table_of_a_recording_is_measured(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(data, "DATA", tmp_path)
    check_measured(startup.tabulating(2000))


def test_a_picture_set_of_four_times_the_cache_decodes_only_the_needed_pictures(
    tmp_path: Path,
) -> None:
    pytest.importorskip("PIL")
    rollout_data = pytest.importorskip("rollout_data")
    pytest.importorskip("pyarrow")
    frames = np.random.default_rng(0).integers(0, 255, (2, 20, 128, 128, 3), np.uint8)
    record_rgb(tmp_path / "own", frames, "lz4")
    rollout_data.convert(tmp_path / "own", tmp_path / "set", "lerobot", progress=False)
    cache_bytes = frames.nbytes // picture_sets.TIMES_CACHE
    measured = picture_sets.read_set("ours", tmp_path / "set", cache_bytes, 4, time.perf_counter)
    # Opening decodes one picture to read its size.
    assert measured["num_first"] <= 4 * picture_sets.LENGTH + 1
    assert measured["num_next"] <= 4 * picture_sets.LENGTH


def test_notes_are_stored_with_timings_and_processor_time_excludes_waits(monkeypatch) -> None:
    monkeypatch.setattr(harness, "clock", time.process_time)
    contenders = (
        Contender("sleep", lambda: lambda: time.sleep(0.01), LIMIT),
        Contender("sleep too", lambda: lambda: time.sleep(0.01), OURS, note=lambda: "3 pictures"),
    )
    timings = harness.measure(Case("wait", contenders, num_repeats=5))
    assert timings[1].note == "3 pictures"
    assert timings[0].median_s < 0.005
