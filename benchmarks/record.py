"""Record: write rollouts of 1024 environments x 24 steps x 2 KiB, 50 MB each, as they come from a simulator.

The limit is one sequential write of the same bytes into a new file, with `fsync` where ours is durable. Time counts
until everything is published, `flush()` included.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from rollout_data import RolloutWriter

from . import baselines, data, peers
from .harness import LIMIT, OURS, PEER, Call, Case, Contender

#: 2 KiB per frame: 250 + 249 + 12 floats, the reward (4 bytes); the flag comes on top.
WIDTHS = {"observation": 250, "privileged_observation": 249, "action": 12}
REACH = 1 / 0.6
#: The caller may be kept waiting for this part of the time.
REACH_BLOCKED = 0.05
STEP_S = 0.010
FOLDER = data.DATA / "record"


def cases(quick: bool) -> Iterator[Case]:
    """Yield recording without and with `fsync`, step by step and at once, and the time that `add` keeps the caller."""
    num_steps, num_envs = (4, 16) if quick else (24, 1024)
    rollout = data.generated(num_steps, num_envs, WIDTHS)
    num_bytes = num_steps * num_envs * data.row_bytes(rollout)
    flat = torch.cat([value.reshape(-1).view(torch.uint8) for value in rollout.values()]).numpy()
    for is_durable in (False, True):
        writers = [_writer("add, step by step", rollout, is_durable), _writer("add_rollout", rollout, is_durable, True)]
        others = [] if is_durable else [
            _peer("torch.save", baselines.write_torch, rollout),
            _peer("tensordict memmap", baselines.write_tensordict, rollout, needs="tensordict"),
            _peer("pickle per env", baselines.write_pickles, rollout),
            _peer("HDF5 group per env", baselines.write_groups, rollout),
        ]  # fmt: skip
        limit = Contender("one write", lambda sync=is_durable: lambda: _write(flat, sync), LIMIT, before=_clear)
        name = "durable (fsync)" if is_durable else "not durable"
        yield Case(name, (limit, *writers, *others), num_bytes=num_bytes, num_repeats=11)
    yield _blocked(rollout, num_bytes)
    shutil.rmtree(FOLDER, ignore_errors=True)


def _clear() -> None:
    """Empty the folder and let the disk come to rest, so that nobody pays for another's bytes."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    os.sync()


def _write(flat: object, is_durable: bool) -> None:
    with open(FOLDER / "flat.bin", "wb", buffering=0) as file:
        file.write(flat)  # type: ignore[call-overload]
        if is_durable:
            os.fsync(file.fileno())


def _writer(name: str, rollout: data.Rollout, is_durable: bool, at_once: bool = False) -> Contender:
    """Record one rollout with a writer that is already open, as it is in the middle of a run."""
    writers: list[RolloutWriter] = []
    num_steps, num_envs = rollout["done"].shape

    def before() -> None:
        while writers:
            writers.pop().close()
        _clear()
        writers.append(RolloutWriter(FOLDER, num_envs, durable=is_durable))

    def call() -> None:
        if at_once:
            writers[0].add_rollout(**rollout)
        else:
            for step in range(num_steps):
                writers[0].add(**{name: value[step] for name, value in rollout.items()})
        writers[0].flush()

    def close() -> None:
        while writers:
            writers.pop().close()

    return Contender(name, lambda: call, OURS, before=before, reach=REACH, close=close)


def _peer(name: str, write: Callable[[Path, data.Rollout], None], rollout: data.Rollout, needs: str = "") -> Contender:
    def prepare() -> Call:
        if needs:
            peers.load(needs)
        return lambda: write(FOLDER, rollout)

    return Contender(name, prepare, PEER, before=_clear)


def _blocked(rollout: data.Rollout, num_bytes: int) -> Case:
    """Compare the time inside `add` with the whole time of a loop whose environment takes 10 ms per step.

    The environment sleeps, like one whose simulator runs on another device.
    """
    num_steps, num_envs = rollout["done"].shape
    num_rollouts = 4
    total_s: list[float] = []

    def play() -> float:
        _clear()
        blocked_s = 0.0
        start = time.perf_counter()
        with RolloutWriter(FOLDER, num_envs) as writer:
            for step in range(num_steps * num_rollouts):
                time.sleep(STEP_S)
                before_add = time.perf_counter()
                writer.add(**{name: value[step % num_steps] for name, value in rollout.items()})
                blocked_s += time.perf_counter() - before_add
            total_s.append(time.perf_counter() - start)
        return blocked_s

    def whole_loop() -> float:
        if not total_s:
            play()
        return total_s[-1]

    return Case(
        f"time inside add, {num_rollouts} rollouts, {STEP_S * 1e3:g} ms per step",
        (
            Contender("whole loop", lambda: whole_loop, LIMIT, own_clock=True),
            Contender("inside add", lambda: play, OURS, own_clock=True, reach=REACH_BLOCKED),
        ),
        num_bytes=num_bytes * num_rollouts,
    )
