"""Wrong arguments, deleted and damaged files: one clear error each."""

from __future__ import annotations

import pickle
import warnings

import numpy as np
import pytest
from torch.utils.data import DataLoader

from rollout_data import (
    RolloutDataset,
    RolloutDataWarning,
    WindowDataset,
    WindowLoader,
    WindowMixture,
)
from rollout_data.blocks.block_header import open_block
from storage.errors import (
    CorruptFileError,
    DataFileError,
    MissingFieldError,
    RolloutDataError,
    UsageError,
)
from tests.files import coded, recorded


@pytest.fixture
def folder(tmp_path):
    recorded.record(tmp_path, [5, 7, 9], flush_every=6, writer_name="w")
    return tmp_path


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"length": 0}, UsageError, "length"),
        ({"stride": 1.5}, UsageError, "stride"),
        ({"padding": "zeros"}, UsageError, "padding must be one of 'zero'"),
        ({"delta": {"acton": [0]}}, MissingFieldError, "'action'"),
        ({"delta": {"action": []}}, UsageError, "at least one integer"),
        ({"delta": {"action": [0.5]}}, UsageError, "a list of integers"),
        (
            {"delta": {"action": 3}},
            UsageError,
            "delta of field 'action' must be a list of integers, got 3",
        ),
        ({"delta": {"action": [1 << 31]}}, UsageError, "integer in -2147483647:2147483648"),
        ({"delta": [0, 1]}, UsageError, "a dict of fields"),
        ({"delta": {3: [0]}}, UsageError, "a dict of fields"),
        ({"length": 10**13}, UsageError, "length"),
        ({"stride": 10**30}, UsageError, "stride"),
        ({"validation_fraction": "x"}, UsageError, "in \\[0, 1\\], got 'x'"),
        ({"validation_fraction": None}, UsageError, "in \\[0, 1\\], got None"),
        ({"fields": "action"}, UsageError, "fields must be a collection of field names"),
        (
            {"fields": ["actions"]},
            MissingFieldError,
            "unknown field 'actions'. The fields are 'action'",
        ),
        ({"fields": []}, UsageError, "fields is empty. Choose some of"),
        ({"split": "test"}, UsageError, "split"),
        ({"split": "train", "validation_fraction": 1.5}, UsageError, "in \\[0, 1\\]"),
        (
            {"fields": ["action"], "next_observations": True},
            UsageError,
            "requires an observation, and fields has only ",
        ),
    ],
)
def test_wrong_arguments_raise_with_their_name(folder, options, error, text):
    with pytest.raises(error, match=text):
        WindowDataset(folder, **options)


def test_a_folder_without_recordings_raises(tmp_path):
    with pytest.raises(UsageError, match="has no recorded trajectories"):
        WindowDataset(tmp_path)
    with pytest.raises(UsageError, match="a folder"):
        WindowDataset(tmp_path / "nowhere")


def test_a_block_that_vanishes_stays_readable_but_a_copy_cannot_open_it(folder):
    dataset = WindowDataset(folder, 2)
    expected = dataset.__getitems__(range(len(dataset)))["observation"].clone()
    moved = pickle.dumps(dataset)
    for path in sorted(folder.glob("rollout_*.h5"))[-1:]:
        path.unlink()
    assert (dataset.__getitems__(range(len(dataset)))["observation"] == expected).all()
    with pytest.raises(
        DataFileError, match=r"have changed since the dataset was opened\. Open the dataset again"
    ):
        pickle.loads(moved)
    assert 0 < len(WindowDataset(folder, 2)) < len(dataset)


def test_a_damaged_block_is_reported_and_its_trajectories_are_left_out(folder):
    paths = sorted(folder.glob("rollout_*.h5"))
    whole = WindowDataset(folder, 2)
    paths[0].write_bytes(paths[0].read_bytes()[:-4096])
    with pytest.warns(RolloutDataWarning):
        dataset = WindowDataset(folder, 2)
    damaged, lacking = dataset.problems
    assert isinstance(damaged, RolloutDataError) and paths[0].name in damaged.message
    assert isinstance(lacking, DataFileError) and "has 1 incomplete traj" in lacking.message
    assert 0 < dataset.num_trajectories < whole.num_trajectories


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"length": 10},
            "length 10 and stride 1 requires 10 frames, and the longest of 3 trajectories has 9. Decrease length",
        ),
        (
            {"delta": {"action": [-6, 0]}, "length": 5, "stride": 2},
            "length 5 and stride 2 requires 11 frames",
        ),
        (
            {"split": "validation", "padding": "zero"},
            "split 'validation' has none of 3 trajectories (validation_fraction=0.1)",
        ),
        (
            {"split": "train", "validation_fraction": 1},
            "split 'train' has none of 3 trajectories (validation_fraction=1)",
        ),
    ],
)
def test_a_dataset_without_windows_warns_once_with_the_reason(folder, options, text):
    with pytest.warns(RolloutDataWarning) as caught:
        dataset = WindowDataset(folder, **options)
    assert len(caught) == 1 and text in str(caught[0].message) and caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        copy = pickle.loads(pickle.dumps(dataset))
        assert len(copy) == 0 and copy.__getitems__([])["action"].shape[0] == 0
        assert (
            list(WindowLoader(dataset, 4)) == []
            and list(DataLoader(dataset, 4, collate_fn=dataset.collate)) == []
        )
    with pytest.raises(
        UsageError,
        match=r"^WindowMixture: the datasets have no windows",
    ):
        WindowMixture([dataset, dataset])


def test_a_trajectory_of_window_length_has_a_window_without_a_warning(folder):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(WindowDataset(folder, 9)) == 1
        assert (
            len(WindowDataset(folder, 4, delta={"action": [-5, 0]}, fields=["action", "reward"]))
            == 1
        )
        assert len(WindowDataset(folder, 99, padding="repeat")) == 21


def test_a_window_loader_of_another_dataset_raises(folder):
    with pytest.raises(UsageError, match="dataset must be a WindowDataset or a WindowMixture, got"):
        WindowLoader(RolloutDataset(folder, num_envs=1), batch_size=1)


def test_a_loader_without_a_batch_warns(folder):
    dataset = WindowDataset(folder, 9)
    with pytest.warns(
        RolloutDataWarning,
        match=r"no batch: 1 windows are too few \(batch_size 4, drop_last T",
    ):
        assert list(WindowLoader(dataset, 4, drop_last=True)) == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(WindowLoader(dataset, 4)) == len(WindowLoader(dataset, 1, drop_last=True)) == 1


@pytest.mark.parametrize("number", [2**64 - 1, 2**63])
def test_indices_of_windows_do_not_overflow(folder, number):
    dataset = WindowDataset(folder, 2)
    with pytest.raises(IndexError, match=f"WindowDataset: windows must be in .*, got {number}"):
        dataset.__getitems__(np.array([number], np.uint64))
    assert len(dataset.__getitems__(np.array([0, 1], np.uint64))["reward"]) == 2


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_damaged_chunk_raises_with_its_name(tmp_path, num_workers):
    coded.record(tmp_path, codecs={"rgb": "lz4"})
    path = sorted(tmp_path.glob("rollout_*.h5"))[0]
    table = open_block(path).chunks["data"]["observation/rgb"]
    content = bytearray(path.read_bytes())
    start, stop = int(table.places[0]), int(table.places[1])
    content[start:stop] = bytes(np.random.default_rng(0).integers(0, 256, stop - start, np.uint8))
    path.write_bytes(content)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dataset = WindowDataset(tmp_path, 2, fields=["observation/rgb"])
    loader = DataLoader(dataset, len(dataset), collate_fn=dataset.collate, num_workers=num_workers)
    with pytest.raises(
        CorruptFileError, match=r"(?s)(^|\.CorruptFileError: )frame .*observation/rgb"
    ) as raised:
        list(loader)
    again = pickle.loads(pickle.dumps(raised.value))
    assert str(again) == str(raised.value) == raised.value.message
    assert str(raised.value).startswith("Caught CorruptFileError in" if num_workers else "frame ")
