"""A collector that saves trajectories and checkpoints until it is killed, and checks of its
folders.
"""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path

import torch

from rollout_data.trajectories.trajectory_replay_buffer import TrajectoryReplayBuffer
from tests.killed import Counter
from tests.trajectory_replay.recorded import drawn, equal, trajectory

WORK = "tests.trajectory_replay.crash:collect_until_killed"


def collect_until_killed(folder: Path, seed: int) -> None:
    torch.set_num_threads(1)
    begun, saved, kept, limit = (
        Counter(folder / f".{name}") for name in ("begun", "saved", "kept", "limit")
    )
    max_trajectories = 3 if seed % 5 % 2 else None
    limit.set(max_trajectories or 0)
    buffer = TrajectoryReplayBuffer(
        auto_save=True,
        auto_save_path=folder / "auto",
        trajectory_format=["h5", "pt"][seed % 2],
        max_pending_saves=1 + seed % 4,
        cache_size=2,
        max_trajectories=max_trajectories,
    )
    number = 0
    while True:
        begun.set(number + 1)
        buffer.add(trajectory(number, 2 + number % 4, 2))
        number += 1
        if seed % 3 == 0:
            buffer.flush()
            saved.set(number)
        if number % 4 == 0:
            buffer.save_checkpoint(folder / "checkpoint")
            saved.set(number)
            kept.set(number)


def check_what_is_left(folder: Path) -> tuple[int, int]:
    """Check that both folders load, and are not older than the completed saves.

    Return their numbers of trajectories.

    A folder has the newest trajectories up to some trajectory: the maximum number, or all.
    """
    begun, saved, kept, limit = (
        Counter.read(folder / f".{name}") for name in ("begun", "saved", "kept", "limit")
    )
    held = []
    for name, least in (("auto", saved), ("checkpoint", kept)):
        try:
            buffer = TrajectoryReplayBuffer(sample_window_size=0)
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # every file that is listed is there
                buffer.load_checkpoint(folder / name)
        except FileNotFoundError:
            assert not least, f"{name} held {least}"
            held.append(0)
            continue
        stop = max(buffer.trajectory_ids, default=-1) + 1
        assert least <= stop <= begun
        assert buffer.trajectory_ids == list(range(max(0, stop - limit) if limit else 0, stop))
        if limit and len([*(folder / name).glob("trajectory_[0-9]*")]) > limit + 1:
            assert len(buffer) == limit
        for number in buffer.trajectory_ids:
            assert equal(buffer.get(number), trajectory(number, 2 + number % 4, 2))
        if len(buffer):
            drawn(buffer, 50)
        held.append(len(buffer))
    shutil.rmtree(folder)
    return held[0], held[1]
