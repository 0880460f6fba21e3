"""Names of the published descriptions of `RolloutDataset`, and learners that start before their collector."""

from __future__ import annotations

import pickle
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

import rollout_data
from rollout_data import RolloutDataset, RolloutWriter, loader
from storage.errors import (
    FieldTypeError,
    MissingFieldError,
    SchemaError,
    UsageError,
    WaitTimeoutError,
)
from tests.files.recorded import record

OLDER = Path(__file__).parents[1] / "data" / "trajectory_folders"
ANNOUNCED = [{"keep_latest_n_trajs": 2}, {"refresh_s": 0.5}]


def stream(data_dir, num_envs=1, **options):
    return RolloutDataset(data_dir, num_envs, device="cpu", **options)


# get_frame_range


@pytest.mark.parametrize(
    ("name", "frames"),
    [
        ("traj_000000_000200.pickle", (0, 200)),
        ("traj_200_350.pkl", (200, 350)),
        ("/data/walk/trajectory_3/traj_000200_000350.pickle", (200, 350)),
        (Path("trajectory_3") / "traj_000007_000008.pickle", (7, 8)),
    ],
)
def test_get_frame_range_of_a_chunk_file_is_the_range_in_its_name(tmp_path, name, frames):
    assert stream(tmp_path / "no folder is read").get_frame_range(name) == frames


def test_get_frame_range_of_a_recorded_trajectory_is_its_whole_length(tmp_path):
    record(tmp_path, [4, 7, 2])
    recording, dataset = rollout_data.open(tmp_path), stream(tmp_path)
    assert [dataset.get_frame_range(name) for name in recording.ids] == [(0, 4), (0, 7), (0, 2)]
    names = rollout_data.open(OLDER / "components").ids
    assert [stream(OLDER / "components").get_frame_range(name) for name in names] == [
        (0, 5),
        (0, 4),
    ]


def test_a_trajectory_name_in_two_folders_raises_and_full_names_work(tmp_path):
    for folder, length in (("first", 3), ("second", 5)):
        with RolloutWriter(tmp_path / folder, 1, writer_name="w", durable=False) as writer:
            done = np.arange(length)[:, None] == length - 1
            writer.add_rollout(
                observation=np.zeros((length, 1, 2)), action=np.zeros((length, 1, 1)), done=done
            )
    dataset = stream([tmp_path / "first", tmp_path / "second"])
    with pytest.raises(
        UsageError, match=r"'w:0' is not the name of one trajectory\. Pass '0:w:0' or '1:w:0'"
    ):
        dataset.get_frame_range("w:0")
    assert dataset.get_frame_range("0:w:0") == (0, 3) and dataset.get_frame_range("1:w:0") == (0, 5)


@pytest.mark.parametrize("name", ["traj_1_2.txt", "nobody:0", "w", "w:-1", "", 3, None])
def test_unknown_trajectory_names_raise_with_the_call(tmp_path, name):
    record(tmp_path, [2])
    with pytest.raises(
        UsageError,
        match=r"RolloutDataset\.get_frame_range: filename .* or 'traj_START_END\.pickle'",
    ):
        stream(tmp_path).get_frame_range(name)


# assemble_obs_components


def test_components_of_a_chunk_are_joined_in_the_order_of_batches():
    folder = OLDER / "components"
    dataset = stream(folder)
    for number in range(2):
        chunks = sorted(folder.glob(f"trajectory_{number}/*"))
        parts = [
            dataset.assemble_obs_components(pickle.loads(path.read_bytes())) for path in chunks
        ]
        length = sum(len(part) for part in parts)
        assert torch.equal(torch.cat(parts), dataset.get_batch(length).observation[:, 0])


def test_components_of_a_recording_may_have_any_of_their_names(tmp_path):
    rows = {
        "proprio": np.arange(12, dtype=np.float32).reshape(4, 1, 3),
        "depth": np.linspace(0, 1, 24, dtype=np.float32).reshape(4, 1, 2, 3),
    }
    with RolloutWriter(
        tmp_path, 1, obs_disassemble_mapping={"depth": "normalized_image"}, durable=False
    ) as writer:
        writer.add_rollout(
            observation=rows, action=np.zeros((4, 1, 1)), done=np.arange(4)[:, None] == 3
        )
    dataset = stream(tmp_path)
    expected = dataset.get_batch(4).observation[:, 0]
    episode = rollout_data.open(tmp_path)[0].observation
    counts = np.rint(rows["depth"][:, 0] * 255).astype(np.uint8)
    components = [
        {"observation": episode},
        {"observation/depth": episode["depth"], "observation/proprio": episode["proprio"]},
        {
            "depth": torch.as_tensor(episode["depth"]),
            "proprio": episode["proprio"].astype(np.float64),
        },
        {
            "obs_depth": counts.reshape(4, 6),
            "obs_proprio": episode["proprio"],
            "actions": np.zeros((4, 1)),
        },
    ]
    for traj_data in components:
        actual = dataset.assemble_obs_components(traj_data)
        assert torch.equal(actual, expected) and actual.dtype is torch.float32


def test_an_observation_without_components_is_returned_as_it_is(tmp_path):
    record(tmp_path, [3])
    values = np.arange(9, dtype=np.float32).reshape(3, 3)
    for name in ("observations", "observation", "obs"):
        for value in (values, (values,)):
            actual = stream(tmp_path).assemble_obs_components({name: value})
            assert actual.tolist() == values.tolist()
    actual += 1
    assert values[0, 0] == 0, "the result is new memory"


@pytest.mark.parametrize(
    ("traj_data", "error", "text"),
    [
        (
            {},
            MissingFieldError,
            "no field 'obs_proprio' or 'observation/proprio' or 'proprio'. It has no fields",
        ),
        (
            {"obs_proprio": np.zeros((2, 4))},
            SchemaError,
            r"field 'obs_proprio' of traj_data has shape \[2, 4\], expected \[T, 3\]",
        ),
        (
            {"obs_proprio": np.zeros((2, 3), complex)},
            FieldTypeError,
            "field 'obs_proprio' of traj_data has dtype torch.complex128, expected float32",
        ),
        (
            {
                "obs_proprio": np.zeros((2, 3)),
                "obs_depth": np.zeros((2, 6)),
                "obs_cmd": np.zeros((3, 2)),
            },
            SchemaError,
            "the same number of frames",
        ),
        ([1], UsageError, "traj_data must be a mapping of arrays, got list"),
    ],
)
def test_wrong_components_raise_an_error_that_names_them(traj_data, error, text):
    with pytest.raises(error, match=rf"RolloutDataset\.assemble_obs_components.*{text}"):
        stream(OLDER / "components").assemble_obs_components(traj_data)


# Learners that start first


def recorded_at_the_first_look(monkeypatch, folder, lengths):
    """Record into a folder when a dataset begins to wait for it."""
    started = threading.Event()

    def sleep(_seconds):
        if not started.is_set():
            started.set()
            record(folder, lengths)

    monkeypatch.setattr("time.sleep", sleep)  # the wait is replaced, so that the test takes no time
    return started


@pytest.mark.parametrize("options", ANNOUNCED)
def test_read_dataset_directory_waits_for_the_folder_of_the_collector(
    tmp_path, monkeypatch, options
):
    waited = recorded_at_the_first_look(monkeypatch, tmp_path / "later", [3, 4])
    batch = stream(tmp_path / "later", **options).get_batch(7)
    assert waited.is_set() and batch.observation[:, 0, 0].tolist() == [0, 0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize("options", ANNOUNCED)
def test_a_learner_waits_for_each_of_several_folders(tmp_path, monkeypatch, options):
    record(tmp_path / "first", [3, 3])
    waited = recorded_at_the_first_look(monkeypatch, tmp_path / "second", [4])
    dataset = stream([tmp_path / "first", tmp_path / "second"], **options)
    assert dataset.num_trajectories == 0 and dataset.read_dataset_directory() and waited.is_set()
    assert dataset.num_trajectories == 3


@pytest.mark.parametrize("num_workers", [0, 2])
def test_workers_of_a_loader_wait_for_the_folder(tmp_path, num_workers):
    dataset = stream(
        tmp_path / "later", keep_latest_n_trajs=2, num_transitions_per_env=7, wait_timeout_s=60
    )
    collector = threading.Timer(0.2, record, (tmp_path / "later", [3, 4]))
    collector.start()
    batch = next(iter(loader(dataset, num_workers=num_workers)))
    collector.join()
    assert batch.observation[:, 0, 0].tolist() == [0, 0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize("options", ANNOUNCED)
@pytest.mark.parametrize("call", ["get_batch", "read_dataset_directory"])
def test_a_folder_that_is_not_created_in_time_raises_with_its_path(tmp_path, options, call):
    dataset = stream(tmp_path / "none", wait_timeout_s=0, **options)
    with pytest.raises(WaitTimeoutError, match=r"none'.* The wait ended after 0 s\. Record more"):
        getattr(dataset, call)()


@pytest.mark.parametrize("call", ["get_batch", "read_dataset_directory"])
def test_a_missing_folder_raises_at_once_unless_new_data_are_expected(tmp_path, monkeypatch, call):
    waited = recorded_at_the_first_look(monkeypatch, tmp_path / "none", [3])
    with pytest.raises(UsageError, match="none' does not exist") as caught:
        getattr(stream(tmp_path / "none"), call)()
    assert not waited.is_set() and isinstance(caught.value, FileNotFoundError)


def test_a_removed_folder_raises_at_once(tmp_path, monkeypatch):
    record(tmp_path / "walk", [3, 3])
    dataset = stream(tmp_path / "walk", keep_latest_n_trajs=2, dataset_loops=0)
    dataset.get_batch()
    for path in [*(tmp_path / "walk").iterdir()]:
        path.unlink()
    (tmp_path / "walk").rmdir()
    waited = recorded_at_the_first_look(monkeypatch, tmp_path / "walk", [3])
    with pytest.raises(UsageError, match="does not exist"):
        dataset.reset()
        dataset.get_batch(9)
    assert not waited.is_set()


def test_read_dataset_directory_waits_for_as_many_trajectories_as_the_environments_need(
    tmp_path, monkeypatch
):
    record(tmp_path, [3, 3])
    assert stream(tmp_path, 2).read_dataset_directory() is True
    assert stream(tmp_path, 4, dataset_loops=2).read_dataset_directory() is True
    with pytest.raises(
        WaitTimeoutError, match=r"has 2 complete trajectories, expected 3. The wait ended after 0 s"
    ):
        stream(tmp_path, 3, wait_timeout_s=0).read_dataset_directory()
    dataset = stream(tmp_path, 3)
    waited = recorded_at_the_first_look(monkeypatch, tmp_path, [3])
    assert dataset.read_dataset_directory() is True and waited.is_set()


def test_read_dataset_directory_moves_no_cursor(tmp_path):
    record(tmp_path, [4, 4])
    dataset = stream(tmp_path)
    first = dataset.get_batch(2)
    state = dataset.state_dict()
    record(tmp_path, [4], first_number=2)
    assert dataset.read_dataset_directory() and dataset.state_dict() == state
    assert first.observation[:, 0, 1].tolist() == [0, 1] and dataset.get_batch(2).observation[
        :, 0, 1
    ].tolist() == [
        2,
        3,
    ]
