"""For minutes: one process records, another plays the newest trajectories, and neither grows. `make soak` runs it."""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path

import pytest
import torch

from rollout_data import RolloutDataset, RolloutWriter

NUM_ENVS, NUM_KEPT, LENGTH = 16, 64, 50
#: What the reading process may grow by after its first tenth of the time.
MAX_GROWTH_BYTES = 200 << 20
#: Room for everything recorded; the test ends early rather than fill a disk.
MAX_RECORDED_BYTES = 2 << 30


def memory_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def record(folder: Path, is_over: multiprocessing.synchronize.Event) -> None:
    """Write trajectories whose frames say which they are: (env, number of the trajectory, frame)."""
    torch.set_num_threads(1)
    with RolloutWriter(folder, NUM_ENVS, durable=False, block_age_s=0.5) as writer:
        step = 0
        while not is_over.is_set():
            observation = torch.empty(NUM_ENVS, 3)
            observation[:, 0] = torch.arange(NUM_ENVS)
            observation[:, 1], observation[:, 2] = step // LENGTH, step % LENGTH
            done = torch.full((NUM_ENVS,), step % LENGTH == LENGTH - 1)
            writer.add(observation=observation, action=-observation, reward=observation[:, 2], done=done)
            step += 1
            time.sleep(0.0005)


@pytest.mark.soak
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
def test_recording_and_playing_at_once_neither_tears_nor_grows(tmp_path: Path) -> None:
    duration_s = float(os.environ.get("SOAK_S", "60"))
    context = multiprocessing.get_context("spawn")
    is_over = context.Event()
    recorder = context.Process(target=record, args=(tmp_path, is_over))
    recorder.start()
    try:
        play(tmp_path, duration_s, recorder)
    finally:
        is_over.set()
        recorder.join()
    assert recorder.exitcode == 0


def play(folder: Path, duration_s: float, recorder: multiprocessing.process.BaseProcess) -> None:
    while not folder.exists() or not list(folder.glob("rollout_*.h5")):
        assert recorder.is_alive()
        time.sleep(0.05)
    dataset = RolloutDataset(folder, NUM_ENVS, dataset_loops=0, keep_latest_n_trajs=NUM_KEPT, device="cpu")
    start, after_warming, newest = time.monotonic(), 0, 0.0
    while (elapsed_s := time.monotonic() - start) < duration_s:
        batch = dataset.get_batch(20)
        check(batch.observation, batch.next_observation, batch.done, batch.is_first)
        assert torch.equal(batch.action, -batch.observation)
        newest = max(newest, float(batch.observation[..., 1].max()))
        if not after_warming and elapsed_s > duration_s / 10:
            after_warming = memory_bytes()
        if sum(path.stat().st_size for path in folder.glob("rollout_*.h5")) > MAX_RECORDED_BYTES:
            break
    assert newest > 0 and not dataset.problems
    assert memory_bytes() - after_warming < MAX_GROWTH_BYTES


def check(observation: torch.Tensor, following: torch.Tensor, done: torch.Tensor, is_first: torch.Tensor) -> None:
    """Within a trajectory the next frame is the following number of the same environment and trajectory."""
    is_inside = ~(done & ~is_first) & (observation[..., 2] < LENGTH - 1)
    assert torch.equal(following[is_inside], observation[is_inside] + torch.tensor([0.0, 0.0, 1.0]))
    assert (observation[..., 2][is_first] == 0).all()
