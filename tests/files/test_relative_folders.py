"""A relative path keeps its meaning if the process changes its working directory."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path

import pytest
import torch

from rollout_data import RolloutDataset, TrajectoryReplayBuffer, WindowDataset
from storage.errors import UsageError
from tests.files.recorded import drain, record
from tests.trajectory_replay.recorded import drawn, trajectory

SAMPLES = Path(__file__).parents[1] / "data" / "trajectory_folders"


@pytest.fixture(params=["blocks", "trajectory folders"])
def elsewhere(request, tmp_path, monkeypatch):
    """Change to a folder with `walk` in it. Return a second folder, which has another `walk`."""
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    if request.param == "blocks":
        record(tmp_path / "here" / "walk", [5, 7, 3], metadata={"task": "walk"})
        record(tmp_path / "there" / "walk", [2], metadata={"task": "another"})
    else:
        shutil.copytree(SAMPLES / "ant", tmp_path / "here" / "walk")
        shutil.copytree(SAMPLES / "components", tmp_path / "there" / "walk")
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "there"


def same(one, another):
    return len(one) == len(another) and all(
        torch.equal(a.observation, b.observation) for a, b in zip(one, another, strict=True)
    )


@pytest.mark.each_value
@pytest.mark.parametrize("folders", ["walk", ["walk"], [Path("walk")]])
def test_a_relative_path_of_a_dataset_does_not_follow_the_working_directory(
    elsewhere, folders, monkeypatch
):
    expected = drain(RolloutDataset(Path("walk").absolute(), 1, device="cpu"), 4)
    late, early = (RolloutDataset(folders, 1, device="cpu") for _ in range(2))
    frames, metadata = early.num_frames, early.metadata
    monkeypatch.chdir(elsewhere)
    assert early.data_dir == folders and early.metadata == metadata == late.metadata
    early.source.refresh()
    assert early.num_frames == late.num_frames == frames
    for dataset in (early, late, pickle.loads(pickle.dumps(late))):
        assert same(drain(dataset, 4), expected) and dataset.problems == []


def test_relative_paths_of_windows_and_statistics_do_not_follow_the_working_directory(
    elsewhere, tmp_path, monkeypatch
):
    dataset, walk = WindowDataset("walk", 2), Path("walk").absolute()
    first = dataset[0]
    metadata = dataset.metadata
    there = sorted((elsewhere / "walk").rglob("*"))
    monkeypatch.chdir(elsewhere)
    assert dataset.metadata == metadata and dataset.data_dir == "walk"
    # Paths of folders of other formats stay.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    dataset.statistics(progress=False)
    assert sorted((elsewhere / "walk").rglob("*")) == there
    assert len([*walk.glob(".statistics_*.npz"), *(tmp_path / "cache").rglob("*.npz")]) == 1
    for copy in (dataset, pickle.loads(pickle.dumps(dataset))):
        assert torch.equal(copy[0]["observation"], first["observation"]) and len(copy) == len(
            dataset
        )


@pytest.mark.parametrize("make", [lambda where: RolloutDataset(where, 1), WindowDataset])
@pytest.mark.parametrize("wrong", [None, 5, [5]])
def test_a_value_that_is_not_a_path_raises(make, wrong):
    with pytest.raises(UsageError, match=r"data_dir must be a path or a list of paths, got"):
        make(wrong)


@pytest.mark.parametrize("file_format", ["h5", "pt"])
def test_trajectories_are_saved_to_one_folder_and_read_from_it(tmp_path, monkeypatch, file_format):
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path)
    kept = {"auto_save": True, "enable_cache": False, "trajectory_format": file_format}
    with TrajectoryReplayBuffer(auto_save_path="auto", **kept) as buffer:
        buffer.add(trajectory(0))
        buffer.flush()
        monkeypatch.chdir(tmp_path / "there")
        buffer.add(trajectory(1))
        buffer.flush()
        assert set((drawn(buffer, 200) // 10_000).tolist()) == {0, 1}
        assert buffer.auto_save_path == tmp_path / "auto"
    monkeypatch.chdir(tmp_path)
    with TrajectoryReplayBuffer(auto_save_path="second", **kept) as buffer:
        buffer.load_checkpoint("auto")
        monkeypatch.chdir(tmp_path / "there")
        assert set((drawn(buffer, 200) // 10_000).tolist()) == {0, 1}
    assert list((tmp_path / "there").iterdir()) == []
