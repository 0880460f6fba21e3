"""A folder whose only recording is one HDF5 file opens as that file."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest

import rollout_data
from rollout_data import RolloutWriter
from storage.errors import DataFileError


def write(folder: Path, name: str) -> Path:
    """Convert a recording of two episodes to a file in a folder."""
    with RolloutWriter(folder.with_name(f"{folder.name}_ours"), 1, durable=False) as writer:
        for frame in range(6):
            row = np.full((1, 2), frame, np.float32)
            writer.add(observation=row, action=row, reward=row[:, 0], terminated=[frame % 3 == 2])
    folder.mkdir()
    path = folder / f"set.{'h5' if name == 'isaaclab' else 'hdf5'}"
    rollout_data.convert(folder.with_name(f"{folder.name}_ours"), path, name, progress=False)
    return path


@pytest.mark.parametrize("name", ["robomimic", "isaaclab", "d4rl"])
def test_a_folder_with_one_file_opens_streams_and_converts_as_that_file(tmp_path, name):
    path = write(tmp_path / "set", name)
    (tmp_path / "set" / "README.md").write_text("about")
    (tmp_path / "set" / ".cache").mkdir()
    recording, expected = rollout_data.open(tmp_path / "set"), rollout_data.open(path)
    assert (recording.format, recording.ids) == (name, expected.ids)
    assert np.array_equal(recording[1].action, expected[1].action)
    assert rollout_data.open(tmp_path / "set", format=name).ids == expected.ids
    batch = rollout_data.RolloutDataset(tmp_path / "set", num_envs=1).get_batch(6)
    assert batch.action[:, 0, 0].tolist() == [0, 1, 2, 3, 4, 5]
    assert len(rollout_data.WindowDataset(tmp_path / "set", length=2)) == 4
    assert (
        rollout_data.convert(tmp_path / "set", tmp_path / "own", progress=False).num_episodes == 2
    )
    codes = {finding.code for finding in rollout_data.doctor(tmp_path / "set").findings}
    assert not codes & {"FIL02", "FIL06"}


def test_a_folder_with_two_files_is_refused_by_their_names(tmp_path):
    path = write(tmp_path / "set", "robomimic")
    (tmp_path / "set" / "other.hdf5").write_bytes(path.read_bytes())
    with pytest.raises(DataFileError):
        rollout_data.open(tmp_path / "set")
    (tmp_path / "set" / "other.hdf5").unlink()
    inner = tmp_path / "set" / "inner"
    write(tmp_path / "more", "robomimic").parent.rename(inner)
    with pytest.raises(DataFileError):
        rollout_data.open(tmp_path / "set")


def test_a_block_file_under_another_name_is_recognized(tmp_path):
    write(tmp_path / "set", "robomimic")
    ours = tmp_path / "set_ours"
    (block,) = ours.glob("*.h5")
    block.rename(ours / "renamed.h5")
    assert rollout_data.open(ours).format == "rollout-data"


def test_a_folder_with_one_damaged_file_raises(tmp_path):
    path = write(tmp_path / "set", "robomimic")
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(DataFileError):
        rollout_data.open(tmp_path / "set")[0].action  # noqa: B018
    assert not h5py.is_hdf5(tmp_path / "set")
