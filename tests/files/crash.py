"""Recorders that are killed at random instants, and checks of their folders.

A recorder works in `<folder>/data` and counts in `<folder>/added` the frames whose `add` has
returned.
"""

from __future__ import annotations

import subprocess
import time
import warnings
from pathlib import Path

import numpy as np

from rollout_data.writing.rollout_writer import RolloutWriter
from tests import killed
from tests.files.notes_there import notes_of
from tests.files.readback import blocks_of, end_of, trajectories_of
from tests.killed import Counter

WORK = "tests.files.crash:record_until_killed"
BLOCK_BYTES = 6000
#: Maximum number of frames that a recorder has added when it is killed: some blocks.
MOST_ADDED = 600


def step_of(
    rng: np.random.Generator, num_envs: int, ages: np.ndarray, numbers: np.ndarray
) -> dict[str, np.ndarray]:
    """Create one step in which every value encodes its env, trajectory and frame.

    Advance the counters.
    """
    observation = np.stack([np.arange(num_envs), numbers, ages], axis=-1).astype(np.float64)
    done = rng.random(num_envs) < 0.1
    timeout = done & (rng.random(num_envs) < 0.5)
    final = observation + [0, 0, 1]
    ages += 1
    ages[done], numbers[done] = 0, numbers[done] + 1
    values = {
        "observation": observation,
        "action": observation[:, 2] * 2,
        "reward": observation[:, 2],
    }
    return {**values, "done": done, "timeout": timeout, "final_observation": final}


def record_until_killed(folder: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_envs = int(rng.integers(1, 5))
    ages, numbers = np.zeros(num_envs, np.int64), np.zeros(num_envs, np.int64)
    added = Counter(folder / "added")
    options = {
        "block_bytes": BLOCK_BYTES,
        "durable": bool(seed % 2),
        "max_pending_blocks": 1 + seed % 3,
    }
    count = 0
    with RolloutWriter(folder / "data", num_envs, **options) as writer:
        while True:
            notes = [
                {"number": int(n)} if age == 0 else None
                for n, age in zip(numbers, ages, strict=True)
            ]
            writer.add(**step_of(rng, num_envs, ages, numbers), episode=notes, mode="slow")
            count += num_envs
            added.set(count)
            if seed % 4 == 0:
                time.sleep(0.0005)  # so that most kills are between blocks


def kill_one(process: subprocess.Popen, folder: Path, seed: int) -> dict[str, int]:
    """Kill a recorder at a random instant, and check its folder. Return the result."""
    killed.kill_one_at(process, folder, seed, folder / "added", MOST_ADDED)
    return check_what_is_left(folder / "data", Counter.read(folder / "added"))


def interrupt_one(process: subprocess.Popen, folder: Path, seed: int) -> int:
    """Press Ctrl-C at a random instant. All added frames must be published. Return their number."""
    killed.interrupt_one(process, folder, seed, progress=folder / "added")
    added, data = Counter.read(folder / "added"), folder / "data"
    published = check_recording(data) if data.exists() else 0
    assert added <= published <= added + 4, (added, published)
    left = [*data.glob(".rollout_*"), *data.glob(".tmp_*")]
    # A recorder that is interrupted while it starts may leave an empty journal.
    assert not left or not published, left
    return published


def check_what_is_left(folder: Path, added: int) -> dict[str, int]:
    published = check_recording(folder) if folder.exists() else 0
    temporaries = list(folder.glob(".tmp_*"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        writer = RolloutWriter(folder, 1)
    lost = sum(dead.num_lost_frames for dead in writer.recovered)
    assert [f"{lost} frames are lost" in str(warning.message) for warning in caught] == [
        True
    ] * len(writer.recovered)
    writer.close()
    left = [
        path.name
        for path in folder.iterdir()
        if path.name.startswith(".") and path.name != ".index.npz"
    ]
    assert left == [], left
    assert added <= published + lost <= added + 4, (added, published, lost)
    headers = blocks_of(folder)
    if headers:
        frame_bytes = headers[0].layouts["data"].frame_bytes
        assert lost * frame_bytes <= BLOCK_BYTES, "at most one block is lost"
    return {
        "published": published,
        "lost": lost,
        "blocks": len(headers),
        "temporaries": len(temporaries),
    }


def check_recording(folder: Path) -> int:
    """Check every value of every frame. Return the number of frames."""
    num_frames, (notes, store) = 0, notes_of(folder)
    keys = store.index.keys(np.arange(len(store.index)))
    noted = dict(zip(keys, notes.column(store, "number"), strict=True))
    for trajectory in trajectories_of(folder):
        observation = trajectory.column("observation")
        assert (observation[:, 0] == trajectory.env).all() and (
            observation[:, 1] == observation[0, 1]
        ).all()
        assert observation[:, 2].tolist() == list(range(trajectory.length)), "no frame is torn out"
        assert trajectory.column("action").tolist() == (observation[:, 2] * 2).tolist()
        if end_of(trajectory) not in ("", "open"):
            assert trajectory.finals["observation"].tolist() == [
                trajectory.env,
                observation[0, 1],
                trajectory.length,
            ]
        assert noted[trajectory.writer, trajectory.number] == observation[0, 1], (
            "what was said is there with the first frame"
        )
        num_frames += trajectory.length
    return num_frames
