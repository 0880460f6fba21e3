"""Promises of the guide of streams that no other test of streams proves."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

import rollout_data
from rollout_data import RolloutDataset
from storage.errors import RolloutDataWarning, UsageError
from tests.files.recorded import record

OLDER = Path(__file__).parents[1] / "data" / "trajectory_folders"


def opened(data_dir, num_envs=2, **options):
    return RolloutDataset(data_dir, num_envs, device="cpu", **options)


def starts(batch):
    """Return the (trajectory, frame) of each environment in the first step of a batch."""
    return batch.observation[0, :, :2].int().tolist()


def demos(path, pictures=(True, True, True), **fields):
    """Write three robomimic demos of three frames, some of them with a camera, each with these fields."""
    with h5py.File(path, "w") as file:
        for number, has_picture in enumerate(pictures):
            demo = file.create_group(f"data/demo_{number}")
            demo["actions"] = np.full((3, 2), number, np.float32)
            demo["obs/low"] = np.zeros((3, 4), np.float32)
            if has_picture:
                demo["obs/camera"] = np.zeros((3, 8, 8, 3), np.uint8)
            for name, values in fields.items():
                demo[name] = values
    return path


def test_get_batch_continues_a_stream_and_iter_resets_it(tmp_path):
    record(tmp_path, [9, 9, 9, 9])
    dataset = opened(tmp_path)
    assert starts(dataset.get_batch(2)) == [[0, 0], [1, 0]]
    assert starts(dataset.get_batch(2)) == [[0, 2], [1, 2]]
    assert starts(dataset.get_batch(1)) == [[0, 4], [1, 4]]
    dataset.num_transitions_per_env = 2
    assert starts(next(iter(dataset))) == [[0, 0], [1, 0]]


def test_an_episode_without_the_camera_of_most_episodes_is_left_out_and_named(tmp_path):
    dataset = opened(
        demos(tmp_path / "demos.hdf5", pictures=(True, True, False)), 1, flatten_observations=False
    )
    with pytest.warns(RolloutDataWarning, match="'demo_2'"):
        batch = dataset.get_batch(6)
    assert batch.action[:, 0, 0].tolist() == [0, 0, 0, 1, 1, 1]
    assert batch.observation["camera"].shape == (6, 1, 8, 8, 3)
    assert ["demo_2" in str(problem) for problem in dataset.problems] == [True]


def test_fields_with_the_names_of_batch_flags_are_left_out_of_streams(tmp_path):
    path = demos(tmp_path / "demos.hdf5", valid=np.full(3, 7), score=np.arange(3.0))
    batch = opened(path, 1).get_batch(3)
    assert batch.valid.dtype == torch.bool and batch.valid.all()
    assert batch.extras.keys() == {"score"}
    assert rollout_data.open(path)[0]["valid"].tolist() == [7, 7, 7]


def test_texts_of_other_formats_are_numbers_in_batches(tmp_path):
    dataset = opened(
        demos(tmp_path / "demos.hdf5", words=np.array([b"left", b"right", b"left"])), 1
    )
    numbers = dataset.get_batch(3).extras["words"].flatten().tolist()
    assert [dataset.texts[number] for number in numbers] == ["left", "right", "left"]


def test_a_deleted_trajectory_that_had_not_begun_is_left_out_of_a_resumed_stream(tmp_path):
    paths = []
    for number in range(6):
        record(tmp_path, [4], first_number=number)
        paths += sorted(set(tmp_path.glob("*.h5")) - set(paths))
    first = opened(tmp_path, num_transitions_per_env=2)
    first.get_batch(2)
    paths[3].unlink()
    resumed = opened(tmp_path, num_transitions_per_env=2)
    resumed.load_state_dict(first.state_dict())
    batches = list(iter(lambda: next(resumed, None), None))
    played = {int(number) for batch in batches for number in batch.observation[..., 0][batch.valid]}
    assert played == {0, 1, 2, 4, 5} and not resumed.problems


def test_trajectory_folders_cannot_be_refreshed():
    with pytest.raises(UsageError, match="omit refresh_s"):
        opened(OLDER / "components", refresh_s=5).get_batch(1)


@pytest.mark.filterwarnings("always::storage.errors.RolloutDataWarning")
def test_workers_of_a_plain_data_loader_name_a_damaged_trajectory_in_a_warning_only(
    tmp_path, capfd, monkeypatch
):
    monkeypatch.setattr(
        warnings, "showwarning", lambda text, *_: print(text, file=sys.stderr, flush=True)
    )
    with rollout_data.RolloutWriter(
        tmp_path, 1, obs_disassemble_mapping={"depth": "lz4"}, frames_per_chunk=2, durable=False
    ) as writer:
        for frame in range(8):
            depth = np.random.default_rng(frame).random((1, 16, 16), np.float32)
            done = [frame % 4 == 3]
            writer.add(observation={"depth": depth}, action=np.zeros((1, 1), np.float32), done=done)
    (path,) = tmp_path.glob("*.h5")
    data = bytearray(path.read_bytes())
    data[data.index(depth[0, 3].tobytes())] ^= 1
    path.write_bytes(data)
    dataset = opened(tmp_path, 1, on_error="skip")
    for _ in torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=1):
        pass  # pytest would raise the warning in the worker
    assert "chunk" in capfd.readouterr().err
    assert not dataset.problems and dataset.num_lost_trajectories == 0
