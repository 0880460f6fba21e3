"""Trajectory folders that are deleted or damaged while they are played: the loss is reported, and
the rest streams.
"""

from __future__ import annotations

import os
import resource
import shutil
import warnings

import numpy as np
import pytest

from rollout_data import RolloutDataset, WindowDataset
from storage.errors import DataFileError, RolloutDataWarning
from tests.files.recorded import record
from tests.formats.folders import NaiveFolder

GARBAGE = b"no pickle at all"


@pytest.fixture
def five(tmp_path):
    """Five trajectories of ten frames, each in two chunks."""
    folder = NaiveFolder(tmp_path / "data")
    for number in range(5):
        folder.chunk(number, 0, 5)
        folder.chunk(number, 5, 10, done=True)
    return folder.data_dir


def opened(data_dir, num_envs=1, **options):
    return RolloutDataset(data_dir, num_envs, device="cpu", **options)


def played(batch):
    """Return (trajectory, frame) of every valid step, env by env."""
    values = batch.observation[..., 0].T[batch.valid.T].long() - 100_000
    return [(int(v) // 1000, int(v) % 1000) for v in values]


def drained(dataset, num_steps=4):
    batches = []
    while True:
        try:
            batches.append(dataset.get_batch(num_steps))
        except StopIteration:
            return [frame for batch in batches for frame in played(batch)]


def delete(data_dir, number):
    shutil.rmtree(data_dir / f"trajectory_{number}")


def spoil(data_dir, number):
    (data_dir / f"trajectory_{number}" / "traj_000005_000010.pickle").write_bytes(GARBAGE)


def spoil_rows_unseen(data_dir, number):
    """Truncate the rows of the second chunk without a change of its size and time."""
    path = data_dir / f"trajectory_{number}" / "traj_000005_000010.pickle"
    stat = path.stat()
    path.write_bytes(GARBAGE.ljust(stat.st_size, b"\0"))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def whole(*numbers):
    return [(number, frame) for number in numbers for frame in range(10)]


@pytest.mark.filterwarnings("ignore::storage.errors.RolloutDataWarning")
@pytest.mark.parametrize("loops", [1, 2])
@pytest.mark.parametrize("lose", [delete, spoil, spoil_rows_unseen])
def test_a_lost_chunk_is_reported_and_other_trajectories_are_streamed(five, lose, loops):
    dataset = opened(five, dataset_loops=loops)
    assert played(dataset.get_batch(12)) == [*whole(0), (1, 0), (1, 1)]
    lose(five, 1)
    lose(five, 3)
    with pytest.warns(
        RolloutDataWarning,
        match=r"Trajectory 0 of writer '0:trajectory_1' cannot be read.*pickle'",
    ):
        rest = drained(dataset)
    # Frames that were read before the loss was found stay delivered. The first chunk still exists
    # at the next pass.
    left = [] if lose is delete else [(number, frame) for number in (1, 3) for frame in range(5)]
    second = sorted([*whole(0, 2, 4), *left]) if loops == 2 else []
    first = rest[: len(rest) - len(second)]
    assert rest[len(first) :] == second
    assert [frame for frame in first if frame[0] in (2, 4)] == whole(2, 4)
    for number, start in ((1, 2), (3, 0)):
        of_lost = [frame for frame in first if frame[0] == number]
        assert of_lost == whole(number)[start : start + len(of_lost)] and len(of_lost) < 5
    problems = [problem for problem in dataset.problems if "cannot be read" in str(problem)]
    assert all(isinstance(problem, DataFileError) for problem in dataset.problems)
    assert any("trajectory_1" in str(problem) for problem in problems)
    assert dataset.source.num_vanished_blocks >= 2


@pytest.mark.parametrize("lose", [delete, spoil, spoil_rows_unseen])
def test_the_rest_of_a_lost_trajectory_is_not_valid_and_other_envs_continue(five, lose):
    dataset = opened(five, 2)
    assert played(dataset.get_batch(3)) == [*whole(0)[:3], *whole(1)[:3]]
    lose(five, 0)
    with pytest.warns(RolloutDataWarning, match="trajectory_0"):
        batch = dataset.get_batch(5)
    assert played(batch) == whole(1)[3:8] and not batch.valid[:, 0].any()
    batch = dataset.get_batch(5)
    assert played(batch) == [*whole(2)[:3], *whole(1)[8:], *whole(3)[:3]]
    assert batch.valid[:, 0].tolist() == [False, False, True, True, True]
    assert batch.is_last[:, 0].tolist() == [False, True, False, False, False]
    assert batch.is_first[:, 0].tolist() == [False, False, True, False, False]
    assert (
        len(dataset.problems)
        == dataset.source.num_vanished_blocks
        == dataset.num_lost_trajectories
        == 1
    )


def test_exhausted_envs_repeat_a_readable_frame(five):
    dataset = opened(five, 5)
    dataset.get_batch(2)
    for number in range(4):
        delete(five, number)
    with pytest.warns(RolloutDataWarning):
        batch = dataset.get_batch(6)
    assert played(batch) == whole(4)[2:8]
    assert batch.valid.sum(dim=0).tolist() == [0, 0, 0, 0, 6]
    assert played(dataset.get_batch(6)) == whole(4)[8:]
    with pytest.raises(StopIteration):
        dataset.get_batch()


def test_steps_of_some_envs_continue_after_a_loss(five):
    dataset = opened(five, 2)
    buffer = dataset.get_buffer()
    for _ in range(3):
        dataset.fill_transition(buffer, [0])
    delete(five, 0)
    shown = []
    with pytest.warns(RolloutDataWarning, match="trajectory_0"):
        for _ in range(13):
            dataset.fill_transition(buffer, [0])
            shown.append(int(buffer.observation[0, 0]) - 100_000 if buffer.valid[0] else None)
    assert shown == [3, *[None] * 6, *(2000 + frame for frame in range(6))]


@pytest.mark.parametrize("cache", ["none", "ram"])
@pytest.mark.parametrize("lose", [delete, spoil, spoil_rows_unseen])
def test_reset_after_a_loss_plays_the_remaining_trajectories(five, lose, cache):
    dataset = opened(five, cache=cache)
    dataset.get_batch(2)
    lose(five, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RolloutDataWarning)
        dataset.reset()
        rest = drained(dataset)
    assert [frame for frame in rest if frame[0] != 0] == whole(1, 2, 3, 4)
    # Frames in memory are still played. Trajectories that were deleted before the reset do not
    # exist.
    assert bool(dataset.problems) == (
        lose is spoil or (lose is spoil_rows_unseen and cache == "none")
    )


def test_a_temporary_read_error_raises_and_loses_no_trajectory(five):
    dataset = opened(five)
    dataset.get_batch(2)
    limits, lowest = resource.getrlimit(resource.RLIMIT_NOFILE), os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))  # no file can be opened
    try:
        with pytest.raises(
            DataFileError,
            match=r"Trajectory 0 of .*trajectory_0' cannot be read.*Too many open files",
        ):
            dataset.get_batch(10)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert drained(dataset) == [*whole(0)[2:], *whole(1, 2, 3, 4)]
    assert not dataset.problems and dataset.source.num_vanished_blocks == 0


def test_loading_a_state_of_a_deleted_trajectory_raises_with_its_name(five):
    dataset = opened(five)
    dataset.get_batch(2)
    delete(five, 0)
    with pytest.warns(RolloutDataWarning):
        dataset.get_batch(3)
    state = dataset.state_dict()
    with pytest.raises(
        ValueError, match="trajectory 0 of writer '0:trajectory_0' no longer exists"
    ):
        opened(five).load_state_dict(state)


def test_windows_name_the_lost_chunk(five):
    windows = WindowDataset(five, 2)
    delete(five, 2)
    with pytest.raises(DataFileError, match=r"Trajectory 0 of writer '0:trajectory_2'"):
        windows[2 * 9]
    assert windows[0]["observation"].shape == (2, 3)


def test_prefetch_continues_after_a_loss(five):
    dataset = opened(five, num_transitions_per_env=5)
    batches = iter(dataset.prefetch(1))
    assert played(next(batches)) == whole(0)[:5]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RolloutDataWarning)
        delete(five, 3)
        seen = {number for batch in batches for number, _ in played(batch)}
    assert seen >= {0, 1, 2, 4}


@pytest.mark.filterwarnings("ignore::storage.errors.RolloutDataWarning")
def test_missing_blocks_that_are_read_file_by_file_are_skipped(tmp_path, without_maps):
    record(tmp_path, [4] * 4, flush_every=4)
    dataset = opened(tmp_path, 1, dataset_loops=2)
    dataset.get_batch(2)
    for path in sorted(tmp_path.glob("rollout_*.h5"))[1:3]:
        path.unlink()
    rest = []
    while True:
        try:
            batch = dataset.get_batch(3)
        except StopIteration:
            break
        rest += [tuple(map(int, value[:2])) for value in batch.observation[batch.valid]]
    item = [(0, 0), (0, 1), (0, 2), (0, 3)]
    last = [(3, 0), (3, 1), (3, 2), (3, 3)]
    assert rest == [*item[2:], *last, *item, *last]
    assert dataset.source.num_vanished_blocks == 2
    assert [type(problem).__name__ for problem in dataset.problems] == ["LostBlockError"] * 2


def test_a_trajectory_that_has_shrunk_is_left_out_of_the_next_pass(tmp_path):
    folder = NaiveFolder(tmp_path / "data")
    folder.chunk(0, 0, 2, done=True)
    folder.chunk(1, 0, 5)
    folder.chunk(1, 5, 20, done=True)
    dataset = opened(folder.data_dir, 2, dataset_loops=0)
    dataset.get_batch(1)
    (folder.data_dir / "trajectory_1" / "traj_000005_000020.pickle").unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RolloutDataWarning)
        batches = [dataset.get_batch(3) for _ in range(6)]
    for batch in batches:
        assert bool(batch.valid.all())
        number, frame = np.divmod(batch.observation[..., 0].long().numpy() - 100_000, 1000)
        assert (frame < np.where(number == 0, 2, 5)).all()
        assert (batch.is_last.numpy() == (frame == np.where(number == 0, 1, 4))).all()


def test_a_chunk_that_was_replaced_by_a_folder_is_lost(five):
    dataset = opened(five)
    dataset.get_batch(2)
    for path in (five / "trajectory_0").iterdir():
        path.unlink()
        path.mkdir()
    with pytest.warns(RolloutDataWarning, match=r"trajectory_0.*has changed since it was opened"):
        assert [frame for frame in drained(dataset) if frame[0] != 0] == whole(1, 2, 3, 4)


@pytest.mark.parametrize("cache", ["none", "ram"])
def test_rows_that_are_lost_before_the_first_batch_are_left_out(five, cache):
    dataset = opened(five, cache=cache)
    assert dataset.num_trajectories == 5
    spoil_rows_unseen(five, 1)
    spoil_rows_unseen(five, 2)
    with pytest.warns(RolloutDataWarning, match="Trajectory 0 of writer"):
        rest = drained(dataset, 10)
    assert rest == whole(0, 3, 4)
    assert dataset.source.num_vanished_blocks == 2
