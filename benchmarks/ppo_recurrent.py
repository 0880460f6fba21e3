"""Recurrent PPO: split a rollout into padded trajectories, and draw mini-batches of whole
environments.

A rollout has 24 steps of 4096 environments. In each step one trajectory in fifty ends. Observations
are those of `ppo`; actor and critic have the states of a GRU of 128 units. With the indices given,
the limit gathers the padded observations once from one packed row per transition. It copies the
other fields once. All outputs are reused.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from storage import HiddenStates, RolloutStorage
from storage.onpolicy.mini_batches import find_segments

from .harness import LIMIT, OURS, PEER, Call, Case, Contender
from .ppo import (
    ACTIONS,
    CRITIC,
    GAMMA,
    LAM,
    NUM_EPOCHS,
    NUM_MINI_BATCHES,
    NUM_SOURCES,
    OBS,
    rsl_filled,
    transitions,
)

UNITS = 128


def cases(quick: bool) -> Iterator[Case]:
    """Yield all mini-batches of one update, for few and for many environments."""
    for num_steps, num_envs in ((4, 64),) if quick else ((24, 64), (24, 4096)):
        yield drawing(num_steps, num_envs)


def drawing(num_steps: int, num_envs: int) -> Case:
    """Draw all mini-batches of all epochs of one update."""
    num_rows = num_steps * num_envs
    width = OBS + CRITIC

    def limit() -> Call:
        storage = filled(num_steps, num_envs)
        source = find_segments(storage.dones).source
        packed, out = torch.randn(num_rows, width), torch.empty(len(source), width)
        others = torch.randn(num_rows, 3 * ACTIONS + 4)
        copy = torch.empty_like(others)
        return lambda: (torch.index_select(packed, 0, source, out=out), copy.copy_(others))

    def ours() -> Call:
        storage = filled(num_steps, num_envs)
        return lambda: _exhaust(
            storage.recurrent_mini_batch_generator(NUM_MINI_BATCHES, NUM_EPOCHS)
        )

    def rsl() -> Call:
        def states() -> tuple[torch.Tensor, torch.Tensor]:
            return torch.zeros(1, num_envs, UNITS), torch.zeros(1, num_envs, UNITS)

        storage, _ = rsl_filled(num_steps, num_envs, states)
        return lambda: _exhaust(
            storage.recurrent_mini_batch_generator(NUM_MINI_BATCHES, NUM_EPOCHS)
        )

    return Case(
        f"mini-batches {NUM_MINI_BATCHES}x{NUM_EPOCHS} T={num_steps} N={num_envs}",
        (
            Contender("gather padded rows once", limit, LIMIT),
            Contender("recurrent_mini_batch_generator", ours, OURS),
            Contender("rsl_rl", rsl, PEER),
        ),
        num_bytes=num_rows * 4 * (width + 3 * ACTIONS + 4),
    )


def filled(num_steps: int, num_envs: int) -> RolloutStorage:
    """Fill a storage of ours, with recurrent states."""
    storage = RolloutStorage(num_envs, num_steps, (OBS,), (CRITIC,), (ACTIONS,), generator=0)
    steps = transitions(num_envs)
    for t in range(num_steps):
        step = steps[t % NUM_SOURCES]
        step.hidden_states = HiddenStates(
            torch.zeros(1, num_envs, UNITS), torch.zeros(1, num_envs, UNITS)
        )
        storage.add_transitions(step)
    storage.compute_returns(torch.zeros(num_envs), GAMMA, LAM)
    return storage


def _exhaust(batches: Iterator[Any]) -> None:
    for _ in batches:
        pass
