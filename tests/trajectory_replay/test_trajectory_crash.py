"""kill -9 during asynchronous saving: the previous state or the new one loads (200 times in the soak tests)."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

from rollout_data.trajectories.trajectory_replay_buffer import TrajectoryReplayBuffer
from storage.errors import BackgroundError
from tests.killed import kill_one_at, workers
from tests.trajectory_replay.crash import WORK, check_what_is_left
from tests.trajectory_replay.recorded import trajectory
from tests.watch import watching


def test_killed_collectors_leave_folders_that_load(tmp_path: Path) -> None:
    with workers(WORK) as process:
        held = []
        for seed in range(6):
            kill_one_at(process, tmp_path / str(seed), seed, tmp_path / str(seed) / ".begun")
            held.append(check_what_is_left(tmp_path / str(seed)))
    assert any(auto for auto, _ in held)


def test_the_folder_loads_the_kept_trajectories_after_every_file_operation(tmp_path: Path) -> None:
    """Also if memory has dropped all trajectories that are on disk."""
    seen: list[list[int]] = []

    def look() -> None:
        if not (tmp_path / "trajectory_index.json").exists():
            assert not seen
            return
        actual = TrajectoryReplayBuffer(sample_window_size=0)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # every file that is listed is there
            actual.load_checkpoint(tmp_path)
        seen.append(actual.trajectory_ids)
        assert len(actual) == 3 or len(list(tmp_path.glob("*.h5"))) <= 4

    def before_each_change(event: str, arguments: tuple[Any, ...]) -> None:
        if (
            event in ("os.rename", "os.remove")
            and Path(str(arguments[event == "os.rename"])).parent == tmp_path
        ):
            look()

    with (
        watching(before_each_change),
        TrajectoryReplayBuffer(
            auto_save=True, auto_save_path=tmp_path, max_trajectories=3
        ) as buffer,
    ):
        for number in range(20):
            buffer.add(trajectory(number, 2, 2))
        buffer.flush()
        assert buffer.trajectory_ids == [17, 18, 19]
        look()
    stops = [max(ids) + 1 for ids in seen]
    assert stops == sorted(stops) and stops[-1] == 20 and len(seen) > 20
    assert all(
        ids == list(range(max(0, stop - 3), stop)) for ids, stop in zip(seen, stops, strict=True)
    )
    assert len(list(tmp_path.glob("*.h5"))) == 3


@pytest.mark.parametrize(("limit", "expected"), [(None, [0, 1, 2, 3]), (3, [1, 2, 3]), (2, [2, 3])])
def test_a_trajectory_whose_write_is_retried_keeps_its_order(
    tmp_path: Path, limit: int | None, expected: list[int]
) -> None:
    (tmp_path / "trajectory_1_w1.h5").mkdir()  # in the way
    with TrajectoryReplayBuffer(
        auto_save=True, auto_save_path=tmp_path, max_trajectories=limit
    ) as buffer:
        buffer.add_trajectories([trajectory(number, 2, 2) for number in range(4)])
        with pytest.raises(BackgroundError):
            buffer.flush()
        (tmp_path / "trajectory_1_w1.h5").rmdir()
    actual = TrajectoryReplayBuffer()
    actual.load_checkpoint(tmp_path)
    assert actual.trajectory_ids == expected
    assert len(list(tmp_path.glob("*.h5"))) == len(expected)
