"""Trajectories that are loaded from one folder and saved to another exist there.

None is lost without an error.
"""

from __future__ import annotations

import errno
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest

from rollout_data.trajectories.trajectory_replay_buffer import TrajectoryReplayBuffer
from storage.errors import RolloutDataWarning
from tests.trajectory_replay.recorded import drawn, equal, trajectory

FORMATS = ["h5", "pt"]


def saving(folder: Path, **options: Any) -> TrajectoryReplayBuffer:
    return TrajectoryReplayBuffer(auto_save=True, auto_save_path=folder, **options)


def check(folder: Path, numbers: list[int]) -> None:
    """Check that a folder has these trajectories with these ids."""
    actual = TrajectoryReplayBuffer(sample_window_size=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        actual.load_checkpoint(folder)
    assert actual.trajectory_ids == numbers
    assert all(equal(actual.get(number), trajectory(number, 2, 2)) for number in numbers)


def add(buffer: TrajectoryReplayBuffer, numbers: range) -> None:
    for number in numbers:
        assert buffer.add(trajectory(number, 2, 2)) == number


@pytest.fixture(params=["linked", "copied"])
def links(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Return whether the file system has links."""

    def refuse(*_: Any) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    if request.param == "copied":
        monkeypatch.setattr(os, "link", refuse)
    return bool(request.param == "linked")


@pytest.mark.parametrize("file_format", FORMATS)
def test_resuming_from_a_checkpoint_of_the_same_folder_keeps_its_files(
    tmp_path: Path, file_format: str, links: bool
) -> None:
    with saving(tmp_path / "auto", trajectory_format=file_format) as buffer:
        add(buffer, range(5))
        buffer.save_checkpoint(tmp_path / "checkpoint")
    files = sorted((tmp_path / "auto").iterdir())
    with saving(tmp_path / "auto", trajectory_format=file_format) as buffer:
        buffer.load_checkpoint(tmp_path / "checkpoint")
        check(tmp_path / "auto", [0, 1, 2, 3, 4])
        buffer.flush()
        check(tmp_path / "auto", [0, 1, 2, 3, 4])
        assert sorted((tmp_path / "auto").iterdir()) == files
        add(buffer, range(5, 7))
        shutil.rmtree(tmp_path / "checkpoint")
        drawn(buffer, 100)
    check(tmp_path / "auto", list(range(7)))


@pytest.mark.parametrize("file_format", FORMATS)
def test_loaded_trajectories_are_in_the_new_folder(
    tmp_path: Path, file_format: str, links: bool
) -> None:
    with saving(tmp_path / "old", trajectory_format=file_format) as buffer:
        add(buffer, range(5))
    with saving(tmp_path / "new", max_trajectories=4) as buffer:
        buffer.load_checkpoint(tmp_path / "old")
        buffer.flush()
        check(tmp_path / "new", [1, 2, 3, 4])
        add(buffer, range(5, 6))
        buffer.flush()
        check(tmp_path / "new", [2, 3, 4, 5])
        check(tmp_path / "old", [0, 1, 2, 3, 4])
        shutil.rmtree(tmp_path / "old")
        drawn(buffer, 100)
    check(tmp_path / "new", [2, 3, 4, 5])
    assert len(list((tmp_path / "new").iterdir())) == 4 + 2
    item = next((tmp_path / "new").glob("trajectory_2_*"))
    assert item.stat().st_nlink == 1


def test_trajectories_after_the_loaded_checkpoint_are_omitted_with_a_warning(
    tmp_path: Path,
) -> None:
    with saving(tmp_path / "auto") as buffer:
        add(buffer, range(3))
        buffer.save_checkpoint(tmp_path / "checkpoint")
        add(buffer, range(3, 5))
    with saving(tmp_path / "auto") as buffer:
        with pytest.warns(
            RolloutDataWarning,
            match="has 2 trajectories of an earlier run, which the new index omits",
        ):
            buffer.load_checkpoint(tmp_path / "checkpoint")
        add(buffer, range(5, 6))
    check(tmp_path / "auto", [0, 1, 2, 5])
    assert len(list((tmp_path / "auto").glob("*.h5"))) == 6


def test_other_trajectories_with_the_same_ids_are_not_overwritten(tmp_path: Path) -> None:
    with saving(tmp_path / "auto") as buffer:
        add(buffer, range(2))
    other = TrajectoryReplayBuffer()
    for number in range(10, 13):
        other.add(trajectory(number, 2, 2))
    other.save_checkpoint(tmp_path / "checkpoint")
    with saving(tmp_path / "auto") as buffer:
        with pytest.warns(RolloutDataWarning) as caught:
            buffer.load_checkpoint(tmp_path / "checkpoint")
        messages = [str(warning.message) for warning in caught]
        assert len(messages) == 2 and all(warning.filename == __file__ for warning in caught)
        assert (
            "2 trajectories of" in messages[0]
            and "have ids that other trajectories in" in messages[0]
        )
        assert "has 2 trajectories of an earlier run" in messages[1]
        check(tmp_path / "auto", [0, 1])
        assert set((drawn(buffer, 200) // 10_000).tolist()) == {10, 11, 12}
        buffer.add(trajectory(13, 2, 2))
    actual = TrajectoryReplayBuffer()
    actual.load_checkpoint(tmp_path / "auto")
    assert actual.trajectory_ids == [2, 3] and equal(actual.get(2), trajectory(12, 2, 2))


def test_a_load_that_fails_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = TrajectoryReplayBuffer()
    add(buffer, range(3))
    buffer.save_checkpoint(tmp_path / "checkpoint")
    link = os.link

    def vanishing(source: Path, target: Path) -> None:
        if "trajectory_2" in source.name:
            source.unlink()
        link(source, target)

    monkeypatch.setattr(os, "link", vanishing)
    with saving(tmp_path / "auto") as buffer:
        with pytest.raises(FileNotFoundError, match="of trajectory 2 is missing"):
            buffer.load_checkpoint(tmp_path / "checkpoint")
        assert len(buffer) == 0 and not list((tmp_path / "auto").glob("*.h5"))
        assert buffer.add(trajectory(9, 2, 2)) == 0


@pytest.mark.parametrize("is_distributed", [False, True])
def test_resumed_ranks_have_each_trajectory_once(tmp_path: Path, is_distributed: bool) -> None:
    ranks = [saving(tmp_path, rank=rank, world_size=2) for rank in range(2)]
    for count, number in ((1, 0), (4, 1)):
        for item in range(number, number + 2 * count, 2):
            assert ranks[number].add(trajectory(item, 2, 2)) == item
    for buffer in ranks:
        buffer.close()
    ranks = [saving(tmp_path, rank=rank, world_size=2) for rank in range(2)]
    for rank, buffer in enumerate(ranks):
        buffer.load_checkpoint(tmp_path, is_distributed, rank, 2)
        assert len(buffer) == ([2, 3][rank] if is_distributed else 5)
    for buffer in ranks:
        buffer.close()
    actual = TrajectoryReplayBuffer()
    actual.load_checkpoint(tmp_path)
    assert sorted(actual.trajectory_ids) == [0, 1, 3, 5, 7]


@pytest.mark.parametrize("limit", [None, 3])
def test_the_newest_of_several_ranks_are_the_newest_of_all(
    tmp_path: Path, limit: int | None
) -> None:
    ranks = [saving(tmp_path, rank=rank, world_size=2) for rank in range(2)]
    for number in range(10):
        assert ranks[number % 2].add(trajectory(number, 2, 2)) == number
    for buffer in ranks:
        buffer.close()
    actual = TrajectoryReplayBuffer(sample_window_size=4, max_trajectories=limit)
    actual.load_checkpoint(tmp_path)
    expected = list(range(10))[-(limit or 4) :]
    assert actual.trajectory_ids == expected
    assert set((drawn(actual, 300) // 10_000).tolist()) == set(expected)
    whole = TrajectoryReplayBuffer(sample_window_size=0)
    whole.load_checkpoint(tmp_path)
    assert whole.trajectory_ids == list(range(10))
    share = TrajectoryReplayBuffer(sample_window_size=0)
    share.load_checkpoint(tmp_path, True, 1, 2)
    assert share.trajectory_ids == [1, 3, 5, 7, 9]  # what this rank has saved
