"""Datasets in torch's own `DataLoader`, and names after a star import.

A wrong call raises one clear error of ours.
"""

from __future__ import annotations

import builtins
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import rollout_data
from rollout_data import RolloutDataset, WindowDataset, WindowMixture
from storage.errors import MissingFieldError, UsageError
from tests.files.recorded import record


@pytest.fixture
def walk(tmp_path: Path) -> Path:
    record(tmp_path / "walk", [4, 5, 6])
    return tmp_path / "walk"


@pytest.mark.parametrize("options", [{}, {"as_dict": True}])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_loader_that_collates_whole_batches_raises(
    walk: Path, options: Any, num_workers: int
) -> None:
    def stream() -> RolloutDataset:
        # Iterators of rejected loaders must not be collected in the next forked worker. torch
        # raises there, and Python 3.11 can fail when that error is formatted within a parse.
        gc.collect()
        return RolloutDataset(walk, 2, device="cpu", num_transitions_per_env=3, **options)

    for batching in ({}, {"batch_size": 4}):
        with pytest.raises(UsageError, match=r"Use DataLoader\(dataset, batch_size=None\)"):
            next(iter(DataLoader(stream(), num_workers=num_workers, **batching)))
    batch = next(iter(DataLoader(stream(), batch_size=None, num_workers=num_workers)))
    observation = batch["observation"] if options else batch.observation
    assert observation.shape[:2] == (3, 2)
    own = DataLoader(stream(), batch_size=2, num_workers=num_workers, collate_fn=len)
    assert next(iter(own)) == 2, "a collate function of one's own is called"


def test_windows_in_a_collating_loader_raise_with_their_collate_function(walk: Path) -> None:
    windows = WindowDataset(walk, length=3)
    for dataset in (windows, WindowMixture([windows])):
        with pytest.raises(MissingFieldError, match=r"collate_fn=dataset\.collate"):
            next(iter(DataLoader(dataset)))
        assert next(iter(DataLoader(dataset, collate_fn=dataset.collate)))["observation"].shape[
            :2
        ] == (1, 3)


def test_a_star_import_leaves_the_function_open_alone(walk: Path) -> None:
    names: dict[str, Any] = {}
    exec("from rollout_data import *\nfrom storage import *", names)
    assert not names.keys() - {"__builtins__"} & set(dir(builtins)) and "open" not in names
    assert names["RolloutDataset"] is RolloutDataset and len(rollout_data.open(walk)) == 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
@pytest.mark.parametrize("device", ["cuda", "cuda:7", torch.device("cuda", 1)])
def test_an_unavailable_device_raises_at_construction(walk: Path, device: Any) -> None:
    windows = WindowDataset(walk, length=3)
    makers = [
        lambda: RolloutDataset(walk, 2, device=device),
        lambda: RolloutDataset(walk, 2, device="cpu").prefetch(device=device),
        lambda: rollout_data.WindowLoader(windows, 2, device=device),
        lambda: rollout_data.load_expert_trajectories("absent.txt", walk, 2, device),
    ]
    for make in makers:
        with pytest.raises(UsageError, match=r"device is 'cuda.*Choose 'cpu'"):
            make()
