"""Record: write rollouts of 1024 environments x 24 steps x 2 KiB (50 MB), as a simulator returns
them.

The limit is a sequential write of the same bytes into a new file, 8 MiB at a time. It uses `fsync`
if our writer is durable. The time includes `flush()`, after which everything is published. Without
`fsync`, "copies, then write" is the time of the two copies alone: each step into the recorder's
memory, then all steps to the file.

The case of `RecordingWrapper` measures one step of CartPole environments. The limit is the same
step without recording. "add, by hand" records the results of each step with a `RolloutWriter`.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rollout_data import RecordingWrapper, RolloutWriter
from storage.core.durable_files import sync_path

from . import baselines, data, harness, peers
from .harness import LIMIT, OURS, PEER, Call, Case, Contender

#: 2 KiB per frame: 250 + 249 + 12 floats and the reward (4 bytes), and in addition the flag.
WIDTHS = {"observation": 250, "privileged_observation": 249, "action": 12}
REACH = 1 / 0.6
#: Promised maximum share of the time that the caller waits.
REACH_BLOCKED = 0.05
STEP_S = 0.010
FOLDER = data.DATA / "record"
WRITE_BYTES = 8 << 20
#: CartPole environments -> promised ratio to the step without recording.
REACH_WRAPPER = {8: 1.6, 64: 1.1}
#: Steps of the wrapped environments per repetition.
WRAPPED_STEPS = 500
#: Name -> (how it writes, the package that it needs).
PEERS = {
    "torch.save": (baselines.write_torch, ""),
    "tensordict memmap": (baselines.write_tensordict, "tensordict"),
    "HDF5 dataset per field": (baselines.write_datasets, ""),
    "HDF5 datasets, step by step": (baselines.append_datasets, ""),
    "pickle per env": (baselines.write_pickles, ""),
    "HDF5 group per env": (baselines.write_groups, ""),
}


def cases(quick: bool) -> Iterator[Case]:
    """Yield recording without and with `fsync`, step by step and at once, and the time inside
    `add`.
    """
    num_steps, num_envs = (4, 16) if quick else (24, 1024)
    rollout = data.generated(num_steps, num_envs, WIDTHS)
    num_bytes = num_steps * num_envs * data.row_bytes(rollout)
    names = (
        "HDF5 dataset per field",
        "HDF5 datasets, step by step",
        "torch.save",
        "tensordict memmap",
    )
    for is_durable in (False, True):
        name = "durable (fsync)" if is_durable else "not durable"
        yield Case(
            name,
            (
                _limit(rollout, is_durable),
                _writer("add, step by step", rollout, is_durable),
                _writer("add_rollout", rollout, is_durable, at_once=True),
                *([] if is_durable else [_floor(rollout)]),
                *_peers(rollout, names[:2] if is_durable else names, is_durable),
            ),
            num_bytes=num_bytes,
            num_repeats=11,
        )
    # In a separate case: after a thousand small files the disk is still busy when the next case
    # begins.
    few = _peers(rollout, ("pickle per env", "HDF5 group per env"))
    yield Case("not durable, env by env", (_limit(rollout, False), *few), num_bytes=num_bytes)
    yield _blocked(rollout, num_bytes)
    for num_envs in REACH_WRAPPER:
        yield wrapped(num_envs, 20 if quick else WRAPPED_STEPS)
    shutil.rmtree(FOLDER, ignore_errors=True)


def _emptied(folder: Path) -> Path:
    """Empty a folder and sync the disk, so that no contender waits for the bytes of another."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    sync_path(folder)
    return folder


def _limit(rollout: data.Rollout, is_durable: bool) -> Contender:
    flat = memoryview(
        torch.cat([value.reshape(-1).view(torch.uint8) for value in rollout.values()]).numpy()
    )

    def write() -> None:
        with open(FOLDER / "limit" / "flat.bin", "wb", buffering=0) as file:
            for start in range(0, len(flat), WRITE_BYTES):
                file.write(flat[start : start + WRITE_BYTES])
            if is_durable:
                os.fsync(file.fileno())

    return Contender("write", lambda: write, LIMIT, before=lambda: _emptied(FOLDER / "limit"))


def _floor(rollout: data.Rollout) -> Contender:
    """Copy each step, because the caller may reuse its memory, and then write.

    Doing both in turn cannot be faster.
    """
    num_steps = len(rollout["done"])
    sources = [value.reshape(num_steps, -1).view(torch.uint8).numpy() for value in rollout.values()]
    copies = [np.zeros_like(source) for source in sources]

    def write() -> None:
        for step in range(num_steps):
            for source, copy in zip(sources, copies, strict=True):
                copy[step] = source[step]
        with open(FOLDER / "floor" / "flat.bin", "wb", buffering=0) as file:
            for copy in copies:
                for start in range(0, copy.size, WRITE_BYTES):
                    file.write(copy.reshape(-1)[start : start + WRITE_BYTES].data)

    return Contender(
        "copies, then write", lambda: write, PEER, before=lambda: _emptied(FOLDER / "floor")
    )


def _writer(name: str, rollout: data.Rollout, is_durable: bool, at_once: bool = False) -> Contender:
    """Record one rollout with a writer that stays open, as in the middle of a run."""
    num_steps, num_envs = rollout["done"].shape
    folder = FOLDER / f"{name}-{is_durable}"
    writers: list[RolloutWriter] = []

    def write() -> None:
        if at_once:
            writers[0].add_rollout(**rollout)
        else:
            for step in range(num_steps):
                writers[0].add(**{name: value[step] for name, value in rollout.items()})
        writers[0].flush()

    def prepare() -> Call:
        writers.append(RolloutWriter(_emptied(folder), num_envs, durable=is_durable))
        for _ in range(3):
            write()
        return write

    def before() -> None:
        for path in folder.glob("rollout_*.h5"):
            path.unlink()
        sync_path(folder)

    return Contender(
        name, prepare, OURS, before=before, reach=REACH, close=lambda: writers.pop().close()
    )


def _peers(
    rollout: data.Rollout, names: tuple[str, ...], is_durable: bool = False
) -> tuple[Contender, ...]:
    return tuple(_peer(name, rollout, is_durable, *PEERS[name]) for name in names)


def _peer(
    name: str,
    rollout: data.Rollout,
    is_durable: bool,
    write: Callable[[Path, data.Rollout], None],
    needs: str = "",
) -> Contender:
    folder = FOLDER / name

    def write_all() -> None:
        write(folder, rollout)
        if is_durable:
            for path in folder.iterdir():
                sync_path(path)

    def prepare() -> Call:
        if needs:
            peers.load(needs)
        return write_all

    return Contender(name, prepare, PEER, before=lambda: _emptied(folder))


def _blocked(rollout: data.Rollout, num_bytes: int) -> Case:
    """Compare the time inside `add` with the time of a loop whose environment takes 10 ms per step.

    The environment sleeps, like one whose simulator runs on another device.
    """
    num_steps, num_envs = rollout["done"].shape
    num_rollouts = 4
    total_s: list[float] = []
    writers: list[RolloutWriter] = []

    def step_all(num_steps_to_do: int, pause_s: float) -> float:
        blocked_s = 0.0
        for step in range(num_steps_to_do):
            time.sleep(pause_s)
            transition = {name: value[step % num_steps] for name, value in rollout.items()}
            start = time.perf_counter()
            writers[0].add(**transition)
            blocked_s += time.perf_counter() - start
        return blocked_s

    def prepare() -> Call:
        writers.append(RolloutWriter(_emptied(FOLDER / "blocked"), num_envs))
        # Repeat until all its memory was used once.
        step_all(2 * num_rollouts * num_steps, 0.0)
        return play

    def play() -> float:
        start = time.perf_counter()
        blocked_s = step_all(num_rollouts * num_steps, STEP_S)
        total_s.append(time.perf_counter() - start)
        return blocked_s

    return Case(
        f"time inside add, {num_rollouts} rollouts, {STEP_S * 1e3:g} ms per step",
        (
            Contender(
                "inside add",
                prepare,
                OURS,
                own_clock=True,
                reach=REACH_BLOCKED,
                close=lambda: writers.pop().close(),
            ),
            Contender("whole loop", lambda: lambda: total_s[-1], LIMIT, own_clock=True),
        ),
        num_bytes=num_bytes * num_rollouts,
    )


def wrapped(num_envs: int, num_steps: int) -> Case:
    """Return the seconds per step of recorded CartPole environments, and of environments without
    recording.
    """
    open_envs: list[Any] = []

    def bare() -> Any:
        gymnasium = peers.load("gymnasium")
        vector = peers.load("gymnasium", "vector")
        mode = vector.AutoresetMode.SAME_STEP
        envs = vector.SyncVectorEnv(
            [lambda: gymnasium.make("CartPole-v1")] * num_envs, autoreset_mode=mode
        )
        envs.action_space.seed(0)
        return envs

    def stepping(envs: Any, record: Callable[..., None] | None = None) -> Call:
        open_envs.append(envs)
        actions = [envs.action_space.sample() for _ in range(64)]
        observation, _ = envs.reset(seed=0)

        def call() -> float:
            nonlocal observation
            start_s = harness.clock()
            for step in range(num_steps):
                action = actions[step % len(actions)]
                following, reward, terminated, truncated, _ = envs.step(action)
                if record is not None:
                    record(
                        observation=observation,
                        action=action,
                        reward=reward,
                        terminated=terminated,
                        truncated=truncated,
                    )
                observation = following
            return (harness.clock() - start_s) / num_steps

        call()
        return call

    def recorded() -> Call:
        folder = _emptied(FOLDER / "wrapped")
        return stepping(RecordingWrapper(bare(), folder, autoreset="same_step", durable=False))

    def by_hand() -> Call:
        writer = RolloutWriter(_emptied(FOLDER / "by-hand"), num_envs, durable=False)
        open_envs.append(writer)
        return stepping(bare(), writer.add)

    def close() -> None:
        while open_envs:
            open_envs.pop().close()

    return Case(
        f"RecordingWrapper, a step of {num_envs} CartPoles",
        (
            Contender("bare step", lambda: stepping(bare()), LIMIT, own_clock=True),
            Contender(
                "RecordingWrapper",
                recorded,
                OURS,
                own_clock=True,
                reach=REACH_WRAPPER[num_envs],
                close=close,
            ),
            Contender("add, by hand", by_hand, OURS, own_clock=True),
        ),
    )
