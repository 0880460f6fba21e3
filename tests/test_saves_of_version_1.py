"""Saves of version 1 load with their values and random state."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout_data import TrajectoryReplayBuffer
from storage import load_buffer, load_checkpoint, load_checkpoint_meta, load_store
from storage.errors import UsageError
from tests.saved_by_1 import SAVES, STORES, dataset_of, loader_of, recorded, replayed, state_of
from tests.trajectory_replay.recorded import check_sample, code


def old_state_of(store: Any) -> dict[str, Any]:
    """Return a state without the dtypes of the first step, which version 1 does not store.

    It accepts any matching dtype.
    """
    state = state_of(store.state_dict())
    state.get("numbers", {}).pop("taken_dtypes", None)
    return state


@pytest.mark.parametrize("name", STORES)
def test_a_store_saved_by_version_1_loads_unchanged(name: str) -> None:
    load = load_store if (SAVES / name / "columns.hdf5").exists() else load_buffer
    loaded, expected = load(SAVES / name), STORES[name]()
    assert type(loaded) is type(expected)
    assert old_state_of(loaded) == old_state_of(expected)


@pytest.mark.parametrize("name", STORES)
def test_a_state_dict_of_version_1_can_be_loaded(name: str) -> None:
    store, expected = STORES[name](), STORES[name]()
    store.load_state_dict(torch.load(SAVES / f"{name}.pt", weights_only=True))
    assert old_state_of(store) == old_state_of(expected)


@pytest.mark.parametrize("kind", ["h5", "pt", "pkl", "live"])
def test_trajectories_saved_by_version_1_load_unchanged(kind: str, tmp_path: Path) -> None:
    folder = shutil.copytree(SAVES / f"trajectories_{kind}", tmp_path / "copy")
    loaded = TrajectoryReplayBuffer(seed=3, sample_window_size=0, trusted=kind == "pkl")
    loaded.load_checkpoint(folder)
    assert loaded.trajectory_ids == [0, 1, 2] and loaded.total_samples == 24
    codes = check_sample(loaded.sample(500), 500)
    assert set(codes.tolist()) == set(
        torch.stack([code(number, 4, 2) for number in range(3)]).flatten().tolist()
    )
    if kind == "h5":
        assert torch.equal(codes, replayed().sample(500)["actions"][:, 0].long()), (
            "the random state of then"
        )


@pytest.mark.parametrize("name", ["plain", "lz4"])
def test_a_checkpoint_of_version_1_loads_unchanged(name: str) -> None:
    loaded = load_checkpoint(SAVES / f"checkpoint_{name}.pt")
    assert state_of(loaded) == state_of(
        {"weights": torch.arange(6.0), "steps": [1, 2], "best": None}
    )
    assert load_checkpoint_meta(SAVES / f"checkpoint_{name}.pt") == {"steps": 7}


def test_loader_states_of_version_1_raise_and_name_set_epoch(tmp_path: Path) -> None:
    states = json.loads((SAVES / "states.json").read_text())
    dataset = dataset_of(SAVES / "frames")
    with pytest.raises(
        UsageError, match=r"it has version 3, expected 4\. Call set_epoch to begin an epoch"
    ):
        dataset.load_state_dict(states["dataset"])
    dataset.set_epoch(1)
    assert dataset.get_batch(3).observation.shape[0] == 3
    loader = loader_of(SAVES / "frames")
    with pytest.raises(
        UsageError, match=r"the state has version 2, expected 3\. Call set_epoch to begin an epoch"
    ):
        loader.load_state_dict(states["loader"])
    loader.set_epoch(1)
    assert len(list(loader)) > 0


def test_a_block_of_version_1_equals_a_new_block(tmp_path: Path) -> None:
    recorded(tmp_path)
    then, now = (dataset_of(folder).get_batch(12) for folder in (SAVES / "frames", tmp_path))
    assert state_of(then.tensors()) == state_of(now.tensors())
