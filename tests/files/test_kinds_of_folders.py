"""Detection of the kind of folder: mixed folders, folders that are empty at first, and fields that
change.
"""

from __future__ import annotations

import os
import warnings

import numpy as np
import pytest

from rollout_data import RolloutDataset, WindowDataset
from rollout_data.blocks.block_folder import INDEX_CACHE_NAME, save_index_cache
from rollout_data.sources.live_source import LiveSource
from storage.errors import DataFileError, RolloutDataWarning, UsageError
from tests.files.recorded import record
from tests.formats.folders import NaiveFolder, values


def opened(data_dir, num_envs=1, **options):
    return RolloutDataset(data_dir, num_envs, device="cpu", **options)


def when_waiting(monkeypatch, *actions):
    """Call these functions in turn, each time that a dataset would wait for more data."""
    left = list(actions)
    monkeypatch.setattr("time.sleep", lambda _: left.pop(0)() if left else None)


def refuse_to_list(refused, monkeypatch):
    """Deny listing of one folder. Tests may run as root, for which the system would allow it."""
    scandir = os.scandir

    def refuse(path="."):
        if str(path) == str(refused):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr("os.scandir", refuse)


# Both kinds at once


def test_block_files_beside_trajectory_folders_are_reported(tmp_path):
    folder = NaiveFolder(tmp_path)
    folder.chunk(0, 0, 4, done=True)
    record(tmp_path, [4, 4], flush_every=4)
    dataset = opened(tmp_path, dataset_loops=3)
    with pytest.warns(
        RolloutDataWarning,
        match=r"trajectory folders and 2 block files\. Only the trajectory fold",
    ):
        assert dataset.num_trajectories == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error", RolloutDataWarning)
        dataset.get_batch(10)
    assert sum("block files" in str(problem) for problem in dataset.problems) == 1
    assert all(isinstance(problem, DataFileError) for problem in dataset.problems)


def test_an_empty_trajectory_folder_hides_no_block_file(tmp_path):
    record(tmp_path, [4, 4], flush_every=4)
    (tmp_path / "trajectory_x").mkdir()
    dataset = opened(tmp_path)
    assert dataset.num_trajectories == 2 and not dataset.problems


# Folders that fill later


@pytest.mark.parametrize("has_folder", [True, False])
def test_a_stream_waits_for_the_first_chunks_of_an_empty_folder(tmp_path, monkeypatch, has_folder):
    folder = NaiveFolder(tmp_path)
    if has_folder:
        (tmp_path / "trajectory_0").mkdir()
    dataset = opened(tmp_path, keep_latest_n_trajs=2, wait_timeout_s=30)
    when_waiting(
        monkeypatch,
        lambda: (tmp_path / "trajectory_0").mkdir(exist_ok=True),
        lambda: folder.chunk(0, 0, 3, done=True),
        lambda: folder.chunk(1, 0, 3, done=True),
    )
    assert dataset.get_batch(3).action[:, 0, 0].tolist() == [300_000, 300_001, 300_002]
    assert dataset.num_trajectories == 2 and not dataset.problems


def test_a_stream_waits_for_the_first_blocks_of_an_empty_folder(tmp_path, monkeypatch):
    dataset = opened(tmp_path, keep_latest_n_trajs=2, wait_timeout_s=30)
    when_waiting(
        monkeypatch, lambda: None, lambda: record(tmp_path, [4]), lambda: record(tmp_path, [4])
    )
    assert len(dataset.get_batch(3).action) == 3
    assert dataset.num_trajectories == 2 and not dataset.problems
    assert [field["name"] for field in dataset.metadata["fields"]][:1] == ["observation"]


def test_an_empty_folder_has_the_format_of_the_other_folders(tmp_path):
    folder = NaiveFolder(tmp_path / "a")
    folder.chunk(0, 0, 3, done=True)
    (tmp_path / "b").mkdir()
    dataset = opened([tmp_path / "b", tmp_path / "a"], dataset_loops=0)
    assert dataset.num_trajectories == 1
    NaiveFolder(tmp_path / "b").chunk(5, 0, 3, done=True)
    dataset.get_batch(9)
    assert dataset.num_trajectories == 2


def test_a_source_without_a_known_format_is_empty_and_raises_on_use(tmp_path):
    source = LiveSource(tmp_path)
    source.refresh()
    assert len(source.snapshot().index) == 0
    with pytest.raises(UsageError, match="has 0 trajectories for 1 envs"):
        opened(tmp_path).get_batch()
    with pytest.raises(UsageError, match=r"^WindowDataset: .* has no recorded trajectories"):
        WindowDataset(tmp_path)


def test_a_source_without_a_known_format_reports_its_problems(tmp_path):
    source = LiveSource(tmp_path)
    record(tmp_path, [4])
    (tmp_path / "text.h5").write_text("hello")
    with pytest.warns(RolloutDataWarning, match="text.h5"):
        source.refresh()
    assert source.num_problems == len(source.problems) == 1


def test_an_unreadable_folder_raises_at_the_next_pass(tmp_path, monkeypatch):
    folder = NaiveFolder(tmp_path / "data")
    folder.chunk(0, 0, 3, done=True)
    dataset = opened(folder.data_dir, dataset_loops=0)
    dataset.get_batch(2)
    refuse_to_list(folder.data_dir, monkeypatch)
    for _ in range(2):
        with pytest.raises(
            DataFileError, match=r"The data folder '.*data' cannot be listed.*Permission denied"
        ):
            dataset.get_batch(2)
    monkeypatch.undo()
    assert dataset.get_batch(2).action[:, 0, 0].tolist() == [300_002, 300_000]


def test_a_folder_inside_an_inaccessible_folder_raises_a_clear_error(tmp_path, monkeypatch):
    refuse_to_list(tmp_path / "secret", monkeypatch)
    with pytest.raises(
        DataFileError, match=r"The data folder '.*secret' cannot be listed.*Permission denied"
    ):
        opened(tmp_path / "secret").get_batch()


# Fields that change while they are watched


@pytest.mark.filterwarnings("ignore::storage.errors.RolloutDataWarning")
def test_a_majority_of_chunks_with_another_width_does_not_exclude_the_played_chunks(tmp_path):
    folder = NaiveFolder(tmp_path / "data")
    folder.chunk(0, 0, 3, done=True)
    dataset = opened(folder.data_dir, dataset_loops=0)
    dataset.get_batch(2)
    for number in (1, 2):
        folder.chunk(number, 0, 9, done=True, observations=values(1, number, 0, 9, 7))
    folder.chunk(3, 0, 2, done=True)
    batch = dataset.get_batch(8)
    assert batch.action[:, 0, 0].tolist() == [
        300_002, 300_000, 300_001, 300_002, 303_000, 303_001, 300_000, 300_001
    ]  # fmt: skip
    named = [str(problem) for problem in dataset.problems]
    assert [f"trajectory_{number}" in text for number, text in zip((1, 2), named, strict=True)] == [
        True,
        True,
    ]
    assert all("observations float32[7]" in text for text in named)


@pytest.mark.filterwarnings("ignore::storage.errors.RolloutDataWarning")
def test_damage_of_all_chunks_is_reported_at_the_next_pass(tmp_path):
    folder = NaiveFolder(tmp_path / "data")
    path = folder.chunk(0, 0, 3, done=True)
    dataset = opened(folder.data_dir, dataset_loops=0)
    dataset.get_batch(2)
    path.write_bytes(b"garbage")
    with pytest.raises(UsageError, match="has no trajectories left for the next pass"):
        dataset.get_batch(2)
    assert path.name in str(dataset.problems[0]) and dataset.source.num_vanished_blocks == 1
    folder.chunk(0, 0, 3, done=True)
    assert dataset.get_batch(2).action[:, 0, 0].tolist() == [300_002, 300_000]


@pytest.mark.filterwarnings("ignore::storage.errors.RolloutDataWarning")
def test_metadata_that_appear_later_are_reported_and_change_nothing(tmp_path):
    folder = NaiveFolder(tmp_path / "data")
    parts = {"obs_b": np.zeros((3, 2), np.float32), "obs_a": np.ones((3, 1), np.float32)}
    folder.chunk(0, 0, 3, done=True, drop=("observations",), **parts)
    dataset = opened(folder.data_dir, dataset_loops=0)
    first = dataset.get_batch(2)
    (folder.data_dir / "metadata.json").write_text(
        '{"obs_segments": {"a": [1], "b": [2]}, "env": "walk"}'
    )
    folder.chunk(1, 0, 3, done=True, drop=("observations",), **parts)
    second = dataset.get_batch(6)
    assert (second.observation[0] == first.observation[0]).all()
    assert ["metadata.json" in str(problem) for problem in dataset.problems] == [True]
    assert "pen the dataset again" in str(dataset.problems[0])
    assert dataset.metadata["env"] == "walk"


# Blocks that are missing


def long_recording(data_dir, num_blocks):
    """Record one trajectory over all blocks, and another in the last block."""
    record(data_dir, [4 * num_blocks, 4], flush_every=4)
    return sorted(data_dir.glob("rollout_*.h5"))


@pytest.mark.parametrize("has_cache", [True, False])
def test_trajectories_with_a_missing_block_are_reported_once(tmp_path, has_cache):
    paths = long_recording(tmp_path, 4)
    paths[1].unlink()
    paths[2].unlink()
    if has_cache:
        save_index_cache(tmp_path)
    else:
        (tmp_path / INDEX_CACHE_NAME).unlink()
    dataset = opened(tmp_path, dataset_loops=3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dataset.get_batch(10)
    (problem,) = dataset.problems
    assert len(caught) == 1 and isinstance(problem, DataFileError)
    assert "1 incomplete trajectories" in str(problem)
    assert "Missing blocks: 1:3 of writer '" in str(problem)
    with pytest.warns(RolloutDataWarning, match="incomplete trajectories"):
        assert len(WindowDataset(tmp_path).problems) == 1


@pytest.mark.filterwarnings("ignore::storage.errors.RolloutDataWarning")
def test_vanished_blocks_are_counted_and_incomplete_trajectories_reported(tmp_path):
    paths = long_recording(tmp_path, 3)
    record(tmp_path, [4, 4], first_number=7, flush_every=4)
    dataset = opened(tmp_path, dataset_loops=0)
    dataset.reset()
    assert dataset.source.num_vanished_blocks == 0 and not dataset.problems
    paths[1].unlink()
    dataset.reset()
    assert dataset.source.num_vanished_blocks == 1
    (problem,) = dataset.problems
    assert "1 incomplete trajectories" in str(problem)
    for path in set(tmp_path.glob("rollout_*.h5")) - set(paths):
        path.unlink()
    dataset.reset()
    assert dataset.source.num_vanished_blocks == 3
    assert len(dataset.problems) == 1


def test_a_source_determines_its_format_in_its_own_refresh(tmp_path):
    item, two = LiveSource(tmp_path), LiveSource(tmp_path)
    record(tmp_path, [4])
    item.refresh()
    assert len(item.snapshot().index) == 1 and len(two.snapshot().index) == 0
    two.refresh()
    assert len(two.snapshot().index) == 1


@pytest.mark.parametrize("is_mapped", [True, False])
def test_trajectories_recorded_after_a_saved_state_are_played_in_the_next_pass(
    tmp_path, request, is_mapped
):
    if not is_mapped:
        request.getfixturevalue("without_maps")
    record(tmp_path, [4])
    dataset = opened(tmp_path, dataset_loops=2)
    dataset.get_batch(2)
    state = dataset.state_dict()
    record(tmp_path, [3], first_number=5)
    resumed = opened(tmp_path, dataset_loops=2)
    resumed.load_state_dict(state)
    batch = resumed.get_batch(9)
    assert batch.observation[:, 0, 0].tolist() == [0, 0, 0, 0, 0, 0, 5, 5, 5]


@pytest.mark.parametrize("is_mapped", [True, False])
def test_a_replaced_block_is_read_at_the_next_pass(tmp_path, request, is_mapped):
    if not is_mapped:
        request.getfixturevalue("without_maps")
    record(tmp_path / "data", [4], writer_name="w")
    record(tmp_path / "other", [2, 3], first_number=5, writer_name="w")
    dataset = opened(tmp_path / "data", dataset_loops=2)
    dataset.get_batch(2)
    (path,) = (tmp_path / "other").glob("rollout_*.h5")
    os.replace(path, tmp_path / "data" / path.name)
    rest = dataset.get_batch(7).observation[:, 0, 0].tolist()
    assert rest[2:] == [5, 5, 6, 6, 6] and dataset.num_trajectories == 2
