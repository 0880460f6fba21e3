"""Workers: read batches of 64 environments x 8 frames of 128 x 128 RGB (25 MB) in several ways.

The frames are stored raw, as lz4, as zstd, and as PNG in a set of LeRobot. So decoding a batch
costs from nothing to hundreds of milliseconds. Decoded frames are not cached. The limit is torch's
own transfer: two workers that send zeros of the same bytes. "waits" counts only the time in which a
learner of 50 ms per batch waits for the next batch. The learner sleeps, as if a device did the
work. Each repetition starts new workers and ends them.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from rollout_data import RolloutDataset, loader

from . import data
from .harness import LIMIT, OURS, Call, Case, Contender
from .images import convert_to_lerobot, image_set, record_rgb

NUM_ENVS, NUM_FRAMES = 64, 8
NUM_EPISODES, NUM_STEPS = 16, 40
LEARNER_S = 0.05
#: Name of the stored frames -> codec of our files; None for PNG in a set of LeRobot.
CODINGS = {"raw": "raw", "lz4": "lz4", "zstd": "zstd", "PNG": None}
#: Batches before and after the clock starts. PNG has fewer, because one takes as long as 20 others.
WARM_BATCHES, TIMED_BATCHES, TIMED_PNG = 4, 12, 4

Batches = Callable[[], Iterator[Any]]


def cases(quick: bool) -> Iterator[Case]:
    """Yield each way of storing, without a learner and with one."""
    num_episodes, num_steps = (2, 24) if quick else (NUM_EPISODES, NUM_STEPS)
    tag = "quick" if quick else "long"
    rendered = cache(lambda: image_set(num_episodes, num_steps)["rgb"])
    folders = {}
    for name, codec in CODINGS.items():
        if codec is not None:
            folders[name] = data.made_once(
                f"workers-{tag}-{name}",
                lambda path, codec=codec: record_rgb(path, rendered(), codec),
            )
    folders["PNG"] = (
        data.made_once(
            f"workers-{tag}-PNG", lambda path: convert_to_lerobot(folders["raw"], path / "set")
        )
        / "set"
    )
    num_envs = 4 if quick else NUM_ENVS
    for name, folder in folders.items():
        for learner_s in (0.0, LEARNER_S):
            yield _case(name, folder, num_envs, learner_s, quick)


def _case(name: str, folder: Path, num_envs: int, learner_s: float, quick: bool) -> Case:
    num_bytes = num_envs * (NUM_FRAMES + 1) * 128 * 128 * 3
    num_timed = TIMED_PNG if name == "PNG" else TIMED_BATCHES
    num_timed = 2 if quick else num_timed

    def dataset() -> RolloutDataset:
        return RolloutDataset(
            folder,
            num_envs,
            dataset_loops=0,
            random_shuffle_traj_order=True,
            num_transitions_per_env=NUM_FRAMES,
            device="cpu",
            flatten_observations=False,
            chunk_cache_bytes=0,
        )

    def transport() -> Iterator[Any]:
        return iter(DataLoader(_Zeros(num_bytes), batch_size=None, num_workers=2))

    ways: dict[str, Batches] = {
        "no workers": lambda: iter(dataset()),
        "prefetch()": lambda: iter(dataset().prefetch()),
        "loader, 1 worker": lambda: iter(loader(dataset(), num_workers=1)),
        "loader, 2 workers": lambda: iter(loader(dataset(), num_workers=2)),
    }
    contenders = [_timed("zeros from 2 workers", transport, LIMIT, learner_s, num_timed)]
    for way, batches in ways.items():
        contenders.append(_timed(way, batches, OURS, learner_s, num_timed))
    beside = f"waits of a learner of {learner_s * 1e3:.0f} ms" if learner_s else "no learner"
    return Case(f"{name}, {beside}", tuple(contenders), num_bytes=num_bytes, num_repeats=5)


def _timed(name: str, batches: Batches, role: str, learner_s: float, num_timed: int) -> Contender:
    """Time batches of a new iterator; count the processor time of this process and its workers."""
    processor_s: list[tuple[float, float]] = []

    def call() -> float:
        own_s, children_s = _processor_s()
        iterator = batches()
        for _ in range(WARM_BATCHES):
            next(iterator)
            time.sleep(learner_s)
        waited_s = 0.0
        for _ in range(num_timed):
            start_s = time.perf_counter()
            next(iterator)
            waited_s += time.perf_counter() - start_s
            time.sleep(learner_s)
        del iterator
        gc.collect()
        own_stop_s, children_stop_s = _processor_s()
        num_batches = num_timed + WARM_BATCHES
        processor_s.append(
            ((own_stop_s - own_s) / num_batches, (children_stop_s - children_s) / num_batches)
        )
        return waited_s / num_timed

    def note() -> str:
        own_s, children_s = np.median(processor_s, axis=0) * 1e3
        return f"processor: {own_s:.0f} ms here, {children_s:.0f} ms in workers"

    def prepare() -> Call:
        call()
        processor_s.clear()
        return call

    return Contender(name, prepare, role, own_clock=True, note=note)


def _processor_s() -> tuple[float, float]:
    """Return the processor time of this process and of its ended children, in seconds."""
    used = os.times()
    return used.user + used.system, used.children_user + used.children_system


class _Zeros(IterableDataset[torch.Tensor]):
    """Endless batches of zeros."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            yield torch.zeros(self.num_bytes, dtype=torch.uint8)
