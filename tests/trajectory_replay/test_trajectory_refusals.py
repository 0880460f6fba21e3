"""`TrajectoryReplayBuffer`: rejected arguments and their errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollout_data.trajectories.trajectory_cache import TrajectoryCache
from rollout_data.trajectories.trajectory_replay_buffer import TrajectoryReplayBuffer
from storage.errors import ClosedError, SchemaError, UsageError
from storage.live.monitors import PerformanceMonitor
from tests.trajectory_replay.recorded import trajectory


def filled(number: int = 5, **options: Any) -> TrajectoryReplayBuffer:
    buffer = TrajectoryReplayBuffer(**options)
    for item in range(number):
        buffer.add(trajectory(item, 2 + item % 3, 2), weights_version=item)
    return buffer


def test_every_call_of_a_closed_buffer_raises(tmp_path: Path) -> None:
    buffer = filled()
    buffer.close()
    buffer.close()
    for ask in (
        lambda: buffer.get(0),
        lambda: buffer.about(0),
        lambda: buffer.load_checkpoint(tmp_path / "none"),
    ):
        with pytest.raises(ClosedError, match="the buffer is closed"):
            ask()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_trajectories": 0}, "max_trajectories must be >= 1, got 0"),
        ({"auto_save": True, "auto_save_path": None}, "auto_save requires auto_save_path"),
    ],
)
def test_invalid_limits_and_paths_raise(options: Any, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        TrajectoryReplayBuffer(**options)


def test_a_value_that_is_not_a_trajectory_raises() -> None:
    for what in (5, [1, 2], None):
        with pytest.raises(
            SchemaError, match="add: trajectory must be a nested mapping or a dataclass"
        ):
            filled(0).add(what)


@pytest.mark.parametrize("seed", ["a", 1.5, None, True, 1 << 64, -(1 << 63) - 1])
def test_a_seed_that_is_not_a_64_bit_integer_raises(seed: Any) -> None:
    with pytest.raises(
        UsageError,
        match=r"^TrajectoryReplayBuffer: seed must be an integer of 64 bits, got ",
    ):
        TrajectoryReplayBuffer(seed=seed)


def test_seeds_may_be_numpy_integers_of_64_bits() -> None:
    assert TrajectoryReplayBuffer(seed=np.int64(5)).seed == 5
    assert TrajectoryReplayBuffer(seed=(1 << 64) - 1).seed == (1 << 64) - 1


def test_every_number_may_be_a_numpy_number(tmp_path: Path) -> None:
    numbers = {
        "cache_size": 2,
        "sample_window_size": 3,
        "max_trajectories": 4,
        "max_pending_saves": 2,
        "rank": 1,
    }
    options = {name: np.int64(number) for name, number in numbers.items()} | {
        "world_size": np.uint8(2)
    }
    saving = {"auto_save": True, "auto_save_path": tmp_path / "auto"}
    with filled(5, **options, **saving) as buffer:
        assert buffer.trajectory_ids == [3, 5, 7, 9]
        assert len(buffer.sample(np.int32(7))["rewards"]) == 7
        buffer.save_checkpoint(tmp_path / "a")
    again = TrajectoryReplayBuffer()
    again.load_checkpoint(tmp_path / "a", True, np.int64(1), np.int64(2))
    assert again.trajectory_ids == [7, 9] and again.add(trajectory(0)) == 12
    assert TrajectoryCache(np.int64(2)).max_size == 2


@pytest.mark.parametrize("wrong", [True, np.True_, 2.0, "2", None])
@pytest.mark.parametrize(
    "name", ["cache_size", "sample_window_size", "max_pending_saves", "rank", "world_size"]
)
def test_a_count_that_is_not_an_integer_raises(name: str, wrong: Any) -> None:
    with pytest.raises(UsageError, match=rf"{name} must be .*, got "):
        TrajectoryReplayBuffer(**{name: wrong})


@pytest.mark.parametrize("path", [5, None, b"folder", ["folder"]])
def test_a_value_that_is_not_a_path_raises(path: Any) -> None:
    buffer = filled(1)
    for call in (buffer.load_checkpoint, buffer.save_checkpoint):
        with pytest.raises(
            UsageError,
            match=r"^TrajectoryReplayBuffer\.(load|save)_checkpoint: directory must be a str or a path object, got ",
        ):
            call(path)
    if path is not None:
        with pytest.raises(UsageError, match=r"must be a str or a path"):
            TrajectoryReplayBuffer(auto_save=True, auto_save_path=path)


def test_field_names_that_are_not_a_collection_raise() -> None:
    with pytest.raises(UsageError, match="drop_last must be a collection of field names, got 5"):
        TrajectoryReplayBuffer(drop_last=5)  # type: ignore[arg-type]


@pytest.mark.parametrize("saves", [False, True])
def test_a_failed_sample_leaves_the_random_state(tmp_path: Path, saves: bool) -> None:
    options = {"auto_save": True, "auto_save_path": tmp_path, "cache_size": 1} if saves else {}
    with TrajectoryReplayBuffer(**options) as buffer:
        for number in range(3):
            buffer.add(trajectory(number, without=["half"] if number == 1 else []))
        state = buffer.rng.get_state()
        for key in ("nothing", "half"):  # none has it, one does not
            with pytest.raises(KeyError, match=f"trajectory .* has no field .{key}."):
                buffer.sample(200, keys=["rewards", key])
            assert torch.equal(buffer.rng.get_state(), state)
        for number in range(3):
            buffer.add(trajectory(number, without=["half"]))
        with pytest.raises(KeyError):
            buffer.sample(200, keys=["nothing"])
        assert torch.equal(buffer.rng.get_state(), state)


def test_a_monitor_records_the_time_of_each_call(tmp_path: Path) -> None:
    monitor = PerformanceMonitor()
    with TrajectoryReplayBuffer(
        auto_save=True, auto_save_path=tmp_path / "auto", monitor=monitor
    ) as buffer:
        for number in range(3):
            buffer.add(trajectory(number))
        buffer.add_trajectories([trajectory(3), trajectory(4)])
        for _ in range(7):
            buffer.sample(5)
        buffer.save_checkpoint(tmp_path / "a")
        buffer.load_checkpoint(tmp_path / "a")
    counts = {name: row["count"] for name, row in monitor.summary().items()}
    expected = {"add": 4, "sample": 7, "write": 5, "save_checkpoint": 1, "load_checkpoint": 1}
    assert counts == {f"trajectories/{name}": count for name, count in expected.items()}


def test_a_monitor_records_failed_calls_and_is_optional() -> None:
    monitor = PerformanceMonitor()
    for buffer in (filled(1, monitor=monitor), filled(1)):
        with pytest.raises(KeyError):
            buffer.sample(3, keys=["nothing"])
        assert len(buffer.sample(3)["rewards"]) == 3
    assert monitor.summary()["trajectories/sample"]["count"] == 2
