"""Replay: add transitions to a ring of 10^6, and draw them with the next observations.

Each observation is stored once.

A transition has 348 floats of observation, 17 of action, a reward and two flags, as in MuJoCo's
Humanoid. The limit of adding is one copy of the same packed bytes into one array. The limit of
sampling is one gather of a row and the next observation into one reused output, with the indices
given; rows store each observation once. Peers that accept rows of many environments receive them at
once.

Transitions of several steps and stacks of several frames are drawn from a ring of 200,000 rows.
Their limit is one gather of all needed rows with the indices given. The draw of one step is also
measured. cpprb and SB3 sum the rewards of n steps, cpprb when a row is added. tianshou stacks
frames.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle
from typing import Any

import numpy as np
import torch

from storage import DictBuffer

from . import peers
from .harness import LIMIT, OURS, PEER, Call, Case, Contender

OBS, ACTIONS = 348, 17
FLOATS = OBS + ACTIONS + 1
#: Row sizes -> promised time divided by the limit.
REACH_EXTEND = {1: 5.0, 64: 2.0, 1024: 1.25}
REACH_SAMPLE = 1.25
MAX_EXTEND_ONE_S = 10e-6
#: Field of cpprb and tianshou -> our field.
PEER_FIELDS = {
    "obs": "observation",
    "act": "action",
    "rew": "reward",
    "terminated": "terminated",
    "truncated": "truncated",
}
#: Steps of an n-step transition, frames of a stack, and sizes of these batches.
NUM_STEPS, NUM_FRAMES, MULTI_STEP_BATCHES = 3, 4, (32, 256)
#: Rows of their ring. Several copies of a ring of 10^6 rows would need too much memory.
MULTI_STEP_ROWS = 200_000
#: One row in this number of rows ends a trajectory.
LENGTH = 1000
#: Indices that are drawn before the clock starts: more rows than fit into any cache or its page
#: tables.
NUM_INDICES = 1 << 21


def cases(quick: bool) -> Iterator[Case]:
    """Yield adding and sampling at three sizes each."""
    capacity = 10_000 if quick else MULTI_STEP_ROWS
    buffer = filled(capacity)
    for batch_size in MULTI_STEP_BATCHES:
        yield multi_step(buffer, batch_size)
    capacity = 10_000 if quick else 1_000_000
    buffer = filled(capacity)
    for num_rows in (1, 64) if quick else (1, 64, 1024):
        yield extending(buffer, num_rows)
    for batch_size in (256,) if quick else (256, 1024, 4096):
        yield sampling(buffer, batch_size)


def filled(capacity: int) -> DictBuffer:
    """Create a full ring."""
    buffer = DictBuffer(capacity=capacity, end_key=["terminated", "truncated"], generator=0)
    for _ in range(capacity // 10_000):
        buffer.extend(rows(10_000))
    return buffer


def rows(num_rows: int) -> dict[str, torch.Tensor]:
    """Create random transitions."""
    return {
        "observation": torch.randn(num_rows, OBS),
        "action": torch.randn(num_rows, ACTIONS),
        "reward": torch.randn(num_rows, 1),
        "terminated": torch.rand(num_rows, 1) < 1 / LENGTH,
        "truncated": torch.rand(num_rows, 1) < 1 / LENGTH,
    }


def extending(buffer: DictBuffer, num_rows: int) -> Case:
    """Add rows."""
    data, capacity = rows(num_rows), buffer.capacity

    def bare() -> Call:
        packed, row = torch.zeros(capacity, FLOATS + 1), torch.ones(num_rows, FLOATS + 1)
        starts = cycle(range(0, capacity - num_rows, num_rows))

        def copy() -> None:
            start = next(starts)
            packed[start : start + num_rows].copy_(row)

        return copy

    def plain() -> Call:
        without_ends = DictBuffer(capacity=capacity)
        for _ in range(capacity // 10_000):  # memory that was never written would cause page faults
            without_ends.extend(rows(10_000))
        return lambda: without_ends.extend(data)

    return Case(
        f"extend {num_rows}",
        (
            Contender("copy packed rows", bare, LIMIT),
            Contender(
                "DictBuffer",
                plain,
                OURS,
                reach=REACH_EXTEND.get(num_rows),
                reach_s=MAX_EXTEND_ONE_S if num_rows == 1 else None,
            ),
            Contender("DictBuffer with end_key", lambda: lambda: buffer.extend(data), OURS),
            Contender("SB3", lambda: _sb3(capacity, num_rows).extending(num_rows), PEER),
            Contender("cpprb", lambda: _cpprb(capacity, data).extending(data), PEER),
            Contender("tianshou", lambda: _tianshou(capacity, data).extending(data), PEER),
            Contender("torchrl", lambda: _torchrl(capacity, data).extending(data), PEER),
        ),
        num_bytes=num_rows * (FLOATS * 4 + 2),
    )


def sampling(buffer: DictBuffer, batch_size: int) -> Case:
    """Draw transitions."""
    data, capacity = rows(1), buffer.capacity

    def bare() -> Call:
        rows_in_memory, out = torch.randn(capacity, FLOATS), torch.empty(batch_size, FLOATS + OBS)
        pairs = rows_in_memory.as_strided((capacity - 1, FLOATS + OBS), (FLOATS, 1))
        indices = cycle(
            torch.randint(capacity - 1, (NUM_INDICES // batch_size, batch_size)).unbind()
        )
        return lambda: torch.index_select(pairs, 0, next(indices), out=out)

    return Case(
        f"sample {batch_size}",
        (
            Contender("gather rows and the next observations", bare, LIMIT),
            Contender(
                "DictBuffer",
                lambda: lambda: buffer.sample_transitions(batch_size),
                OURS,
                reach=REACH_SAMPLE,
            ),
            Contender("SB3", lambda: _sb3(capacity).sampling(batch_size), PEER),
            Contender("cpprb", lambda: _cpprb(capacity, data).sampling(batch_size), PEER),
            Contender("tianshou", lambda: _tianshou(capacity, data).sampling(batch_size), PEER),
            Contender("torchrl", lambda: _torchrl(capacity, data).sampling(batch_size), PEER),
        ),
        num_bytes=batch_size * (FLOATS + OBS) * 4,
        warm_up_s=0.0 if capacity < 100_000 else 8.0,
    )


def multi_step(buffer: DictBuffer, batch_size: int) -> Case:
    """Draw transitions of `NUM_STEPS` steps and stacks of `NUM_FRAMES` frames."""
    data, capacity = rows(1), buffer.capacity
    num_rows = NUM_STEPS + 1

    def bare() -> Call:
        rows_in_memory = torch.randn(capacity, FLOATS)
        out = torch.empty(batch_size, num_rows * FLOATS)
        pieces = rows_in_memory.as_strided(
            (capacity - num_rows + 1, num_rows * FLOATS), (FLOATS, 1)
        )
        indices = cycle(
            torch.randint(len(pieces), (NUM_INDICES // batch_size, batch_size)).unbind()
        )
        return lambda: torch.index_select(pieces, 0, next(indices), out=out)

    def ours(**options: Any) -> Call:
        return lambda: buffer.sample_transitions(batch_size, **options)

    def stacked_by_tianshou() -> Call:
        return _tianshou(capacity, data, stack_num=NUM_FRAMES).sampling(batch_size)

    return Case(
        f"sample {batch_size} of several rows",
        (
            Contender(f"gather {num_rows} rows", bare, LIMIT),
            Contender("DictBuffer, one step", lambda: ours(), OURS),
            Contender(f"DictBuffer, {NUM_STEPS} steps", lambda: ours(num_steps=NUM_STEPS), OURS),
            Contender(
                f"DictBuffer, {NUM_FRAMES} frames", lambda: ours(num_frames=NUM_FRAMES), OURS
            ),
            Contender(
                f"cpprb, {NUM_STEPS} steps",
                lambda: _cpprb(capacity, data, NUM_STEPS).sampling(batch_size),
                PEER,
            ),
            Contender(
                f"SB3, {NUM_STEPS} steps",
                lambda: _sb3(capacity, num_steps=NUM_STEPS).sampling(batch_size),
                PEER,
            ),
            Contender(f"tianshou, {NUM_FRAMES} frames", stacked_by_tianshou, PEER),
        ),
        num_bytes=batch_size * num_rows * FLOATS * 4,
        warm_up_s=0.0 if capacity < 100_000 else 2.0,
    )


class _Peer:
    """A filled buffer of another library, with functions that write to it and draw from it."""

    def __init__(self, extend: Any, sample: Any) -> None:
        self._extend, self._sample = extend, sample

    def extending(self, data: Any) -> Call:
        return lambda: self._extend(data)

    def sampling(self, batch_size: int) -> Call:
        return lambda: self._sample(batch_size)


def _fill(columns: list[np.ndarray]) -> None:
    """Write random numbers to memory that a peer has only reserved: pages that were never written
    are all read from one page.
    """
    for column in columns:
        flat = column.reshape(len(column), -1)
        filler = np.random.default_rng(0).standard_normal(
            (max(1, (1 << 22) // flat.shape[1]), flat.shape[1])
        )
        for start in range(0, len(flat), len(filler)):
            part = flat[start : start + len(filler)]
            part[:] = filler[: len(part)]


def _sb3(capacity: int, num_envs: int = 1, num_steps: int = 1) -> _Peer:
    buffers, spaces = (
        peers.load("stable-baselines3", "common.buffers"),
        peers.load("gymnasium", "spaces"),
    )
    box = spaces.Box(-1, 1, (OBS,), np.float32), spaces.Box(-1, 1, (ACTIONS,), np.float32)
    options: dict[str, Any] = {"handle_timeout_termination": False, "n_envs": num_envs}
    if num_steps == 1:
        buffer = buffers.ReplayBuffer(capacity, *box, optimize_memory_usage=True, **options)
    else:
        buffer = buffers.NStepReplayBuffer(capacity, *box, n_steps=num_steps, **options)
    buffer.full, buffer.pos = True, 0
    _fill([buffer.observations, buffer.actions, buffer.rewards])
    observation, action = (
        np.ones((num_envs, OBS), np.float32),
        np.ones((num_envs, ACTIONS), np.float32),
    )
    zero, infos = np.zeros(num_envs, np.float32), [{}] * num_envs

    def extend(_: int) -> None:
        buffer.add(observation, observation, action, zero, zero, infos)

    return _Peer(extend, buffer.sample)


def _cpprb(capacity: int, data: dict[str, torch.Tensor], num_steps: int = 1) -> _Peer:
    cpprb = peers.load("cpprb")
    columns = {
        "obs": {"shape": OBS},
        "act": {"shape": ACTIONS},
        "rew": {},
        "terminated": {},
        "truncated": {},
    }
    options: dict[str, Any] = {"next_of": "obs"}
    if num_steps > 1:
        columns |= {"next_obs": {"shape": OBS}, "done": {}}
        options = {"Nstep": {"size": num_steps, "gamma": 0.99, "rew": "rew", "next": "next_obs"}}
    buffer = cpprb.ReplayBuffer(capacity, columns, **options)

    def extend(_: Any) -> None:
        done = {"done": arrays["terminated"]} if num_steps > 1 else {}
        buffer.add(**arrays, **done, next_obs=arrays["obs"])

    arrays = {name: data[key].numpy() for name, key in PEER_FIELDS.items()}
    for _ in range(capacity // len(arrays["obs"]) if len(arrays["obs"]) > 1 else 0):
        extend(None)
    if len(arrays["obs"]) == 1:
        filler = rows(10_000)
        arrays_of_one, arrays = (
            arrays,
            {name: filler[key].numpy() for name, key in PEER_FIELDS.items()},
        )
        for _ in range(capacity // 10_000):
            extend(None)
        arrays = arrays_of_one
    return _Peer(extend, buffer.sample)


def _tianshou(capacity: int, data: dict[str, torch.Tensor], stack_num: int = 1) -> _Peer:
    tianshou = peers.load("tianshou", "data")
    num_envs = len(data["reward"])
    buffer = tianshou.VectorReplayBuffer(
        capacity, num_envs, stack_num=stack_num, ignore_obs_next=True
    )
    arrays = {name: data[key].numpy() for name, key in PEER_FIELDS.items()}
    arrays |= {name: array[:, 0] for name, array in arrays.items() if name not in ("obs", "act")}
    batch = tianshou.Batch(**arrays, obs_next=arrays["obs"], info=tianshou.Batch())

    def extend(_: Any) -> None:
        buffer.add(batch)

    extend(data)
    for part in buffer.buffers:
        part._size = part.maxsize
    _fill([buffer._meta.obs, buffer._meta.act, buffer._meta.rew])
    return _Peer(extend, lambda batch_size: buffer.sample(batch_size))


def _torchrl(capacity: int, data: dict[str, torch.Tensor]) -> _Peer:
    torchrl, tensordict = peers.load("torchrl", "data"), peers.load("tensordict")
    buffer = torchrl.ReplayBuffer(storage=torchrl.LazyTensorStorage(capacity), batch_size=1)

    def extend(data: dict[str, torch.Tensor]) -> None:
        following = {"observation": data["observation"]}
        buffer.extend(
            tensordict.TensorDict({**data, "next": following}, batch_size=[len(data["reward"])])
        )

    for _ in range(capacity // 10_000):
        extend(rows(10_000))
    return _Peer(extend, buffer.sample)
