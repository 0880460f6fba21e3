"""All workers of a machine share one copy of the frames, which ends with the last process."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import rollout_data
from rollout_data import RolloutDataset, RolloutWriter
from tests.files.recorded import record

pytestmark = pytest.mark.skipif(
    not hasattr(os, "memfd_create"), reason="this system has no memory files"
)
NUM_FRAMES, WIDTH = 2000, 1000  # 8 MB
BYTES = NUM_FRAMES * WIDTH * 4


def record_much(data_dir):
    with RolloutWriter(data_dir, num_envs=50, durable=False) as writer:
        for step in range(NUM_FRAMES // 50):
            rows = (50 * step + torch.arange(50.0))[:, None] + torch.zeros(50, WIDTH)
            writer.add(
                observation=rows,
                action=rows[:, :1],
                reward=rows[:, 0],
                done=torch.full((50,), step % 10 == 9),
            )


def batches_of(dataset, plain, **options):
    if plain:
        return torch.utils.data.DataLoader(dataset, batch_size=None, **options)
    return rollout_data.loader(dataset, **options)


def shared_bytes(process_id):
    """Return the bytes of large memory files that a process has mapped: all, and its share of
    shared ones.
    """
    sizes, name = {"Size": 0, "Pss": 0}, ""
    for line in Path(f"/proc/{process_id}/smaps").read_text().splitlines():
        key, *rest = line.split()
        if not key.endswith(":"):
            name = rest[-2] if rest[-1] == "(deleted)" else ""
        elif key[:-1] in sizes and name == "/memfd:rollout_data":
            sizes[key[:-1]] += int(rest[0]) * 1024
    return sizes["Size"], sizes["Pss"]


@pytest.mark.parametrize(
    ("context", "plain"), [("fork", True), ("fork", False), ("spawn", True), ("forkserver", False)]
)
def test_all_workers_read_one_copy_of_the_frames(tmp_path, context, plain):
    record_much(tmp_path)
    options = {"num_transitions_per_env": 5, "random_shuffle_traj_order": True, "device": "cpu"}
    expected = [batch.observation for batch in RolloutDataset(tmp_path, 10, **options)]
    dataset = RolloutDataset(tmp_path, 10, cache="ram", **options)
    read = iter(batches_of(dataset, plain, num_workers=2, multiprocessing_context=context))
    actual = [next(read).observation for _ in range(4)]
    workers = multiprocessing.active_children()
    sizes = [shared_bytes(process.pid) for process in [*workers, multiprocessing.current_process()]]
    assert len(workers) == 2 and all(size > BYTES for size, _ in sizes[:2])
    assert sum(share for _, share in sizes) < 1.1 * BYTES
    actual += [batch.observation for batch in read]
    assert len(actual) == len(expected) and all(map(torch.equal, actual, expected))
    del read, actual


def test_a_loader_shares_the_frames_that_a_dataset_has_in_memory(tmp_path):
    record_much(tmp_path)
    direct, cached = (
        RolloutDataset(tmp_path, 10, num_transitions_per_env=5, device="cpu", cache=cache)
        for cache in ("none", "ram")
    )
    direct.get_batch(5), cached.get_batch(5)
    state = cached.state_dict()
    cached.load_state_dict(state)
    read = iter(rollout_data.loader(cached, num_workers=2))
    actual = [next(read).observation for _ in range(3)]
    processes = [*multiprocessing.active_children(), multiprocessing.current_process()]
    assert 0 < sum(shared_bytes(process.pid)[1] for process in processes) < 1.1 * BYTES
    assert all(torch.equal(batch, direct.get_batch(5).observation) for batch in actual)


@pytest.mark.parametrize("plain", [True, False], ids=["DataLoader", "loader"])
def test_every_pass_has_the_frames_recorded_before_its_start(tmp_path, plain):
    record(tmp_path, [3] * 8)
    options = {"num_transitions_per_env": 3, "device": "cpu", "cache": "ram", "dataset_loops": 4}
    read = iter(batches_of(RolloutDataset(tmp_path, 4, **options), plain, num_workers=2))
    actual = [next(read)]
    record(tmp_path, [3] * 4, first_number=8)
    actual += list(read)
    numbers = torch.cat([batch.observation[0, :, 0] for batch in actual]).tolist()
    known, new = list(range(8)), list(range(12))
    if plain:  # workers have read ahead, except in the last pass
        assert numbers[:8] == known and numbers[-12:] == new
    else:
        assert numbers == known + 3 * new


READ = """
import sys, torch, rollout_data
from rollout_data import RolloutDataset
from tests.files.test_shared_frames import batches_of

if __name__ == "__main__":
    dataset = RolloutDataset(sys.argv[1], 10, 0, num_transitions_per_env=5, device="cpu", cache="ram")
    batches = batches_of(dataset, sys.argv[3] == "plain", num_workers=2, multiprocessing_context=sys.argv[2])
    for number, batch in enumerate(batches):
        if number == 3:
            workers = torch.multiprocessing.active_children()
            print(*[process.pid for process in workers], flush=True)
"""


def is_alive(process_id):
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    ("victim", "context", "plain"),
    [
        ("parent", "fork", "loader"),
        ("worker", "fork", "plain"),
        ("all", "spawn", "loader"),
    ],
)
def test_a_killed_process_leaves_no_shared_memory(tmp_path, short_folder, victim, context, plain):
    data_dir, temporary = tmp_path / "data", short_folder
    record_much(data_dir)
    script = tmp_path / "read.py"
    script.write_text(READ)
    before = set(os.listdir("/dev/shm"))
    environment = {
        **os.environ,
        "TMPDIR": str(temporary),
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    command = [sys.executable, str(script), str(data_dir), context, plain]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, env=environment, text=True, **pipes) as read:
        workers = [int(number) for number in read.stdout.readline().split()]
        assert len(workers) == 2
        for process_id in {
            "parent": [read.pid],
            "worker": workers[:1],
            "all": [read.pid, *workers],
        }[victim]:
            os.kill(process_id, signal.SIGKILL)
        assert read.wait(100) != 0
        end_s = time.monotonic() + 60  # torch's workers check for their parent every five seconds
        while any(map(is_alive, workers)) and time.monotonic() < end_s:
            time.sleep(0.05)
        assert not any(map(is_alive, workers))
    actual = set(os.listdir("/dev/shm")) - before
    others = {
        name
        for name in actual
        if (item := re.match(r"torch_(\d+)_", name)) and is_alive(int(item[1]))
    }
    left = [*temporary.rglob("*"), *map(Path("/dev/shm").joinpath, actual - others)]
    assert not [path for path in left if "rollout" in path.name]
    # Python leaves the sockets through which its processes send descriptors. torch leaves a folder
    # with a template.
    assert sum(path.stat().st_size for path in left if path.is_file()) < BYTES / 100
