"""Playback of remote files: the batches of local files, prefetched for the cursors."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("fsspec")

from benchmarks.lagging import LaggingFileSystem
from rollout_data import RemoteOptions, RolloutDataset, loader
from tests.files.recorded import drain, record

from .places import coded, in_memory, lagging, uneven


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return uneven(tmp_path_factory.mktemp("remote") / "walk")


def equal(first, second) -> bool:
    item, two = first.tensors(), second.tensors()
    return item.keys() == two.keys() and all(_equal(item[name], two[name]) for name in item)


def _equal(one, two) -> bool:
    if isinstance(one, dict):
        return all(_equal(one[name], two[name]) for name in one)
    return torch.equal(one, two)


def both(folder, url, **options):
    arguments = {
        "num_envs": 4,
        "device": "cpu",
        "random_shuffle_traj_order": True,
        "seed": 3,
        **options,
    }
    small = RemoteOptions(chunk_bytes=4096, num_chunks=3)
    return RolloutDataset(folder, **arguments), RolloutDataset(url, remote=small, **arguments)


@pytest.mark.each_value
@pytest.mark.parametrize(
    "options", [{}, {"cache": "ram"}, {"starting_frame_range": (0, 9)}], ids=str
)
@pytest.mark.parametrize("num_steps", [1, 7])
def test_batches_equal_those_of_the_local_files(folder, num_steps, options):
    near, far = both(folder, in_memory(folder, "played"), **options)
    for expected, got in zip(drain(near, num_steps), drain(far, num_steps), strict=True):
        assert equal(expected, got)


def test_coded_components_play_as_from_the_local_files(tmp_path):
    folder = coded(tmp_path / "images")
    near, far = both(folder, in_memory(folder, "played-images"))
    for expected, got in zip(drain(near, 5), drain(far, 5), strict=True):
        assert equal(expected, got)


def test_a_state_resumes_with_the_next_batch(folder):
    near, far = both(folder, in_memory(folder, "played-resume"))
    for _ in range(5):
        near.get_batch(3), far.get_batch(3)
    _, other = both(folder, in_memory(folder, "played-resume"))
    other.load_state_dict(far.state_dict())
    for expected, got in zip(drain(near, 3), drain(other, 3), strict=True):
        assert equal(expected, got)


def test_rows_are_prefetched_before_envs_need_them(tmp_path):
    record(tmp_path / "long", [900] * 4, num_envs=4)
    near, far = both(tmp_path / "long", lagging(tmp_path / "long"))
    far.get_batch(3)
    before = len(LaggingFileSystem.requests)
    for _ in range(4):
        far.get_batch(3)
    # Many steps come by one request for each env
    assert len(LaggingFileSystem.requests) - before <= 8
    drain(far, 3)
    row_bytes = 36
    fetched = sum(
        stop - start
        for _, start, stop in LaggingFileSystem.requests
        if stop and stop - start < 60_000
    )
    assert fetched < 2 * 4 * 900 * row_bytes
    assert len(drain(near, 3)) == 300


def test_workers_play_the_same_batches(folder):
    near, far = both(folder, lagging(folder), num_transitions_per_env=5)
    for expected, got in zip(loader(near), loader(far, num_workers=2), strict=True):
        assert equal(expected, got)
