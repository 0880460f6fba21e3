"""Trajectory replay: 1024 steps of 100 trajectories, drawn from memory and from files.

A trajectory has [64, 16] steps with 235 floats of observation, 12 of action, flags and values: 1 KB
per step, 108 MB in total. The limit of sampling from memory is one bare gather of packed rows, with
indices that were drawn before. The limit of files in memory is the same gather from one mapped
file. The limit of files on the disk reads the same rows with eight threads. The limit of adding is
one copy of the same bytes.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from typing import Any

import numpy as np
import torch

from rollout_data import TrajectoryReplayBuffer

from . import data, peers
from .harness import LIMIT, OURS, PEER, Call, Case, Contender
from .report import OUT

FOLDER = OUT / "trajectory_replay"
NUM_STEPS, NUM_ENVS, NUM_TRAJECTORIES = 64, 16, 100
#: int32 words of a packed row of `trajectory`.
NUM_WORDS = 264
BATCH = 1024
MAX_CACHED = 1.5
NUM_INDICES = 1 << 21
NUM_READERS = 8


def cases(quick: bool) -> Iterator[Case]:
    """Yield sampling from memory, from files in memory and from the disk, and adding."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    number = 10 if quick else NUM_TRAJECTORIES
    cached = TrajectoryReplayBuffer(sample_window_size=number)
    part = TrajectoryReplayBuffer(
        auto_save=True, auto_save_path=FOLDER / "part", cache_size=number // 10
    )
    for _ in range(number):
        example = trajectory()
        cached.add(example)
        part.add(example)
    part.flush()
    yield from_memory(cached, number)
    yield from_files(part, number)
    yield from_disk(part, number)
    yield adding()
    part.close()
    shutil.rmtree(FOLDER)


def trajectory() -> dict[str, Any]:
    """Create a random trajectory like those of a locomotion learner."""
    size = (NUM_STEPS, NUM_ENVS)
    return {
        "curr_obs": {"states": torch.randn(*size, 235)},
        "actions": torch.randn(*size, 12),
        "rewards": torch.randn(*size, 1),
        "prev_logprobs": torch.randn(*size, 12),
        "prev_values": torch.randn(*size, 1),
        "versions": torch.zeros(*size, 1),
        "dones": torch.zeros(*size, 1, dtype=torch.bool),
        "terminations": torch.zeros(*size, 1, dtype=torch.bool),
        "truncations": torch.zeros(*size, 1, dtype=torch.bool),
    }


def _indices(num_rows: int) -> Iterator[torch.Tensor]:
    return cycle(torch.randint(num_rows, (NUM_INDICES // BATCH, BATCH)).unbind())


def _gathering(rows: torch.Tensor) -> Call:
    out, indices = torch.empty(BATCH, NUM_WORDS, dtype=torch.int32), _indices(len(rows))
    return lambda: torch.index_select(rows, 0, next(indices), out=out)


def from_memory(buffer: TrajectoryReplayBuffer, number: int) -> Case:
    """Sample with all trajectories cached."""
    num_rows = number * NUM_STEPS * NUM_ENVS
    contenders = (
        Contender(
            "gather packed rows",
            lambda: _gathering(torch.ones(num_rows, NUM_WORDS, dtype=torch.int32)),
            LIMIT,
        ),
        Contender(
            "TrajectoryReplayBuffer", lambda: lambda: buffer.sample(BATCH), OURS, reach=MAX_CACHED
        ),
        Contender(
            "with contiguous tensors", lambda: lambda: buffer.sample(BATCH, contiguous=True), OURS
        ),
        Contender("trajectory by trajectory", lambda: _by_trajectory(number), PEER),
        Contender("torchrl", lambda: _torchrl(number), PEER),
    )
    return Case(f"sample {BATCH}, all cached", contenders, BATCH * NUM_WORDS * 4, warm_up_s=4.0)


def from_files(buffer: TrajectoryReplayBuffer, number: int) -> Case:
    """Sample with a tenth of the trajectories cached and the files in the page cache."""
    contenders = (
        Contender("gather from one mapped file", lambda: _gathering(_one_file(number)), LIMIT),
        Contender("TrajectoryReplayBuffer", lambda: lambda: buffer.sample(BATCH), OURS),
        Contender("a torch.save file per trajectory", lambda: _by_file(number), PEER),
    )
    return Case(
        f"sample {BATCH}, a tenth cached, files in memory", contenders, BATCH * NUM_WORDS * 4
    )


def from_disk(buffer: TrajectoryReplayBuffer, number: int) -> Case:
    """Sample with a tenth of the trajectories cached and no file in the page cache.

    The limit reads as many rows as are not cached.
    """

    def reading() -> Call:
        rows, path = _one_file(number), FOLDER / "rows"
        wanted, row_bytes = _indices(len(rows)), NUM_WORDS * 4
        file, pool = os.open(path, os.O_RDONLY), ThreadPoolExecutor(NUM_READERS)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)

        def read() -> None:
            places = (next(wanted)[: BATCH * 9 // 10] * row_bytes).tolist()
            jobs = [
                pool.submit(_read_all, file, places[k::NUM_READERS], row_bytes)
                for k in range(NUM_READERS)
            ]
            for job in jobs:
                job.result()

        return read

    contenders = (
        Contender(
            "pread of the rows by 8 threads", reading, LIMIT, before=lambda: data.forget(FOLDER)
        ),
        Contender(
            "TrajectoryReplayBuffer",
            lambda: lambda: buffer.sample(BATCH),
            OURS,
            before=lambda: _forget_of(buffer),
        ),
    )
    return Case(
        f"sample {BATCH}, a tenth cached, files on the disk", contenders, BATCH * NUM_WORDS * 4
    )


def adding() -> Case:
    """Add a trajectory. The file is written in the background at the speed of the disk."""
    example, buffer = trajectory(), TrajectoryReplayBuffer(sample_window_size=20)
    saving = TrajectoryReplayBuffer(
        auto_save=True, auto_save_path=FOLDER / "add", max_trajectories=20
    )
    row = torch.ones(NUM_STEPS * NUM_ENVS, NUM_WORDS)
    target = torch.zeros_like(row)
    contenders = (
        Contender("copy packed rows", lambda: lambda: target.copy_(row), LIMIT),
        Contender("add", lambda: lambda: buffer.add(example), OURS),
        Contender(
            "add, auto-saved",
            lambda: lambda: saving.add(example),
            OURS,
            before=saving.flush,
            close=saving.close,
        ),
    )
    return Case("add a trajectory", contenders, row.nbytes, num_repeats=15)


def _one_file(number: int) -> torch.Tensor:
    path, shape = FOLDER / "rows", (number * NUM_STEPS * NUM_ENVS, NUM_WORDS)
    np.ones(shape, np.int32).tofile(path)
    return torch.from_numpy(np.memmap(path, np.int32, "c", shape=shape))


def _read_all(file: int, places: list[int], row_bytes: int) -> None:
    for place in places:
        os.pread(file, row_bytes, place)


def _forget_of(buffer: TrajectoryReplayBuffer) -> None:
    buffer._live.gatherer.unmap_all()  # pages that are mapped stay in memory
    data.forget(FOLDER)


def _flat(steps: dict[str, Any]) -> dict[str, torch.Tensor]:
    flat = {name: leaf for name, leaf in steps.items() if name != "curr_obs"} | steps["curr_obs"]
    return {name: leaf.flatten(0, 1) for name, leaf in flat.items()}


def _by_trajectory(number: int) -> Call:
    """Store a dict of tensors per trajectory, and index rows in each, as simple buffers do."""
    stored = [_flat(trajectory()) for _ in range(number)]
    indices = _indices(number * NUM_STEPS * NUM_ENVS)
    return lambda: _pick(lambda place: stored[place], next(indices))


def _by_file(number: int) -> Call:
    folder = FOLDER / "torch"
    folder.mkdir(parents=True, exist_ok=True)
    for place in range(number):
        torch.save(_flat(trajectory()), folder / f"{place}.pt")
    indices = _indices(number * NUM_STEPS * NUM_ENVS)
    return lambda: _pick(
        lambda place: torch.load(folder / f"{place}.pt", weights_only=True), next(indices)
    )


def _pick(load: Any, indices: torch.Tensor) -> dict[str, torch.Tensor]:
    places, rows = indices // (NUM_STEPS * NUM_ENVS), indices % (NUM_STEPS * NUM_ENVS)
    parts = []
    for place in places.unique().tolist():
        whole = load(place)
        chosen = rows[places == place]
        parts.append({name: leaf[chosen] for name, leaf in whole.items()})
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _torchrl(number: int) -> Call:
    torchrl, tensordict = peers.load("torchrl", "data"), peers.load("tensordict")
    num_rows = number * NUM_STEPS * NUM_ENVS
    buffer = torchrl.ReplayBuffer(storage=torchrl.LazyTensorStorage(num_rows), batch_size=BATCH)
    for _ in range(number):
        buffer.extend(tensordict.TensorDict(_flat(trajectory()), batch_size=[NUM_STEPS * NUM_ENVS]))
    return lambda: buffer.sample()
