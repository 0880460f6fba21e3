"""Chunks of a trajectory folder that are read while they are being written."""

from __future__ import annotations

import os
import time

import pytest

from rollout_data import RolloutDataset
from tests.formats.folders import NaiveFolder


@pytest.mark.parametrize("part", [0.0, 0.3, 0.99])
def test_a_chunk_that_is_being_written_is_read_at_the_next_pass(tmp_path, part):
    folder = NaiveFolder(tmp_path / "data")
    folder.chunk(0, 0, 4, done=True)
    folder.chunk(1, 0, 4)
    path = folder.chunk(1, 4, 8, done=True)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(part * len(whole))])
    dataset = RolloutDataset(folder.data_dir, 2, dataset_loops=0, device="cpu")
    dataset.get_batch(4)
    assert dataset.problems == [] and dataset.num_frames == 8
    path.write_bytes(whole)
    dataset.get_batch(4)
    assert dataset.problems == [] and dataset.num_frames == 12


@pytest.mark.filterwarnings("ignore::storage.errors.RolloutDataWarning")
@pytest.mark.parametrize(
    "why", ["it is old", "it is not the last", "it was whole", "it is garbage"]
)
def test_a_truncated_chunk_without_a_writer_is_reported(tmp_path, why):
    folder = NaiveFolder(tmp_path / "data")
    folder.chunk(0, 0, 4, done=True)
    paths = [folder.chunk(1, 0, 4), folder.chunk(1, 4, 8, done=True)]
    path = paths[0] if why == "it is not the last" else paths[1]
    dataset = RolloutDataset(folder.data_dir, 2, dataset_loops=0, device="cpu")
    if why == "it was whole":
        dataset.get_batch(4)
    whole = path.read_bytes()
    path.write_bytes(whole + b"more" if why == "it is garbage" else whole[:200])
    if why == "it is old":
        os.utime(path, ns=(0, time.time_ns() - 3600 * 10**9))
    dataset.get_batch(9)
    assert any(path.name in str(problem) for problem in dataset.problems)
