"""All workers of a machine share one index, with every start method.

It ends with the last process.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

import rollout_data
from rollout_data import RolloutDataset, RolloutWriter, WindowDataset
from rollout_data.sources.processes.shared_memory import share, shared_at

pytestmark = pytest.mark.skipif(
    not hasattr(os, "memfd_create"), reason="this system has no memory files"
)
FEW, MANY, NUM_WORKERS = 1000, 300_000, 2
#: Bytes per trajectory, of 170, that a stream or windows need in addition to the index.
MOST_BYTES = 80


def record_short(data_dir, num_trajectories):
    """Record trajectories of one frame, and the index cache."""
    rows, done = (
        torch.zeros(1, num_trajectories, 1),
        torch.ones(1, num_trajectories, dtype=torch.bool),
    )
    with RolloutWriter(data_dir, num_trajectories, durable=False) as writer:
        writer.add_rollout(observation=rows, action=rows, reward=rows[..., 0], done=done)
    return data_dir


def played(data_dir, **options):
    dataset = RolloutDataset(data_dir, 8, 0, True, device="cpu", num_transitions_per_env=1)
    return rollout_data.loader(dataset, **options)


def windows(data_dir, **options):
    dataset = WindowDataset(data_dir, 1)
    return torch.utils.data.DataLoader(dataset, 8, collate_fn=dataset.collate, **options)


def private_bytes(batches):
    """Return the private memory of the workers of a loader, after all of them have read."""
    read = iter(batches)
    for _ in range(2 * NUM_WORKERS):
        next(read)
    sizes = []
    for process in multiprocessing.active_children():
        rows = [
            line.split()
            for line in Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()[1:]
        ]
        sizes.append(1024 * sum(int(row[1]) for row in rows if row[0] == "Anonymous:"))
    del read
    return sizes


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Return the private memory of a worker with a small index."""
    few = record_short(tmp_path_factory.mktemp("few"), FEW)
    return private_bytes(played(few, num_workers=1, multiprocessing_context="spawn"))[0]


@pytest.mark.parametrize(("batches_of", "context"), [(played, "spawn"), (windows, "forkserver")])
def test_started_workers_map_the_index_of_their_parent_process(
    tmp_path, alone, batches_of, context
):
    many = record_short(tmp_path, MANY)
    sizes = private_bytes(
        batches_of(many, num_workers=NUM_WORKERS, multiprocessing_context=context)
    )
    assert len(sizes) == NUM_WORKERS
    assert sum(sizes) - NUM_WORKERS * alone < NUM_WORKERS * MOST_BYTES * MANY


def test_shared_memory_exists_until_its_last_process_ends(tmp_path):
    context, before = multiprocessing.get_context("fork"), set(os.listdir("/dev/shm"))
    here, there = context.Pipe()

    def keep():
        memory = share({"frames": np.arange(1000), "none": np.zeros(0), "name": "walk"})
        there.send(memory.spot)
        signal.pause()

    process = context.Process(target=keep)
    process.start()
    spot = here.recv()
    actual, _ = shared_at(spot)
    os.kill(process.pid, signal.SIGKILL)
    process.join(10)
    assert (
        actual["name"] == "walk"
        and (actual["frames"] == np.arange(1000)).all()
        and not len(actual["none"])
    )
    assert not actual["frames"].flags.writeable
    assert shared_at(spot) == (None, None)  # it is not opened again, and no file has its name
    assert set(os.listdir("/dev/shm")) <= before


def test_a_reused_file_descriptor_is_not_read_as_shared_memory(tmp_path):
    memory = share(1)
    process_id, file, token = memory.spot
    with open(tmp_path / "other", "wb") as other:
        assert shared_at((process_id, other.fileno(), token)) == (None, None)
    assert shared_at((process_id, file, bytes(16))) == (None, None)
    assert shared_at(memory.spot)[0] == 1
