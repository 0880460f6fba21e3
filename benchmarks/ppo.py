"""PPO: the work of a learner's storage between two updates: add steps, estimate advantages, draw
mini-batches.

A rollout has 24 steps of 4096 environments. An observation has 48 floats, the critic's observation
120, an action 12, with mean and deviation, and one reward. The limit of adding copies the same
tensors into the same places. The limit of mini-batches packs the fields of all rows, draws the
permutations, and gathers the batches into two reused outputs in turn. The limit of advantages is
one pass in C over the same arrays; it is skipped without a compiler. SB3 stores neither a second
observation nor the distribution, so its one observation is as wide as both.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from storage import RolloutStorage, Transition, rollout_advantage
from storage.adapters.rsl_rl import RslRlStorage

from . import peers
from .harness import LIMIT, OURS, PEER, Call, Case, Contender

OBS, CRITIC, ACTIONS = 48, 120, 12
NUM_MINI_BATCHES, NUM_EPOCHS = 4, 5
GAMMA, LAM = 0.99, 0.95
#: Steps of different content that are added in turn, so that not all of them are in the cache.
NUM_SOURCES = 4
#: (T, N) -> promised time divided by the compiled pass.
REACH_GAE = {(24, 4096): 8.0, (1000, 1): 10.0, (1000, 64): 20.0}

_C_PASS = """
void gae(long T, long N, const float* restrict r, const float* restrict v, const float* restrict last,
         const unsigned char* restrict d, float g, float l, float* restrict adv, float* restrict ret) {
  for (long n = 0; n < N; ++n) adv[(T - 1) * N + n] = 0;
  for (long t = T - 1; t >= 0; --t) {
    const float* next_v = t == T - 1 ? last : v + (t + 1) * N;
    const float* next_a = t == T - 1 ? adv + t * N : adv + (t + 1) * N;
    for (long n = 0; n < N; ++n) {
      float alive = (float)(1 - d[t * N + n]);
      float a = r[t * N + n] + g * alive * (next_v[n] + l * next_a[n]) - v[t * N + n];
      adv[t * N + n] = a;
      ret[t * N + n] = a + v[t * N + n];
    }
  }
}
"""


def cases(quick: bool) -> Iterator[Case]:
    """Yield adding, mini-batches, and advantages for short, long, narrow and wide rollouts."""
    T, N = (4, 64) if quick else (24, 4096)
    yield adding(T, N)
    yield drawing(T, N)
    yield using(T, N)
    for num_steps in (24, 100) if quick else (24, 64, 1000, 2048):
        for num_envs in (1, 64) if quick else (1, 64, 4096):
            yield estimating(num_steps, num_envs)


def transitions(num_envs: int) -> list[Transition]:
    """Create a few steps of random numbers."""
    return [
        Transition(
            observations=torch.randn(num_envs, OBS),
            critic_observations=torch.randn(num_envs, CRITIC),
            actions=torch.randn(num_envs, ACTIONS),
            rewards=torch.randn(num_envs),
            dones=torch.rand(num_envs) < 0.02,
            values=torch.randn(num_envs, 1),
            actions_log_prob=torch.randn(num_envs),
            action_mean=torch.randn(num_envs, ACTIONS),
            action_sigma=torch.rand(num_envs, ACTIONS),
        )
        for _ in range(NUM_SOURCES)
    ]


def filled(num_steps: int, num_envs: int) -> RolloutStorage:
    """Fill a storage of ours."""
    storage = RolloutStorage(num_envs, num_steps, (OBS,), (CRITIC,), (ACTIONS,), generator=0)
    _add_all(storage, transitions(num_envs))
    storage.compute_returns(torch.zeros(num_envs), GAMMA, LAM)
    return storage


def adding(num_steps: int, num_envs: int) -> Case:
    """Add all steps of a rollout."""

    def bare() -> Call:
        storage, steps = filled(num_steps, num_envs), transitions(num_envs)
        names = {
            name: {"action_mean": "mu", "action_sigma": "sigma"}.get(name, name)
            for name in vars(steps[0])
        }
        filled_names = [name for name, value in vars(steps[0]).items() if value is not None]
        columns = [getattr(storage, names[name]) for name in filled_names]
        rows = [[getattr(step, name).view(num_envs, -1) for name in filled_names] for step in steps]

        def copy() -> None:
            for t in range(num_steps):
                for column, row in zip(columns, rows[t % NUM_SOURCES], strict=True):
                    column[t].copy_(row)

        return copy

    def ours() -> Call:
        storage, steps = filled(num_steps, num_envs), transitions(num_envs)
        return lambda: _add_all(storage, steps)

    return Case(
        f"add T={num_steps} N={num_envs}",
        (
            Contender("copy each field", bare, LIMIT),
            Contender("add_transitions", ours, OURS, reach=1.15 if num_envs == 4096 else None),
            Contender(
                "our adapter for rsl_rl",
                lambda: _rsl_adding(num_steps, num_envs, is_ours=True),
                OURS,
            ),
            Contender("rsl_rl", lambda: _rsl_adding(num_steps, num_envs), PEER),
            Contender("SB3", lambda: _sb3_adding(num_steps, num_envs), PEER),
        ),
        num_bytes=num_steps * num_envs * (4 * (OBS + CRITIC + 3 * ACTIONS + 3) + 1),
    )


def drawing(num_steps: int, num_envs: int) -> Case:
    """Draw all mini-batches of all epochs of one update.

    A caller that keeps a batch while it asks for the next one needs two outputs. The caches are
    smaller than 40 MB of outputs and 82 MB of rows.
    """
    width, num_rows = OBS + CRITIC + 3 * ACTIONS + 4, num_steps * num_envs

    def limit() -> Call:
        draw = _gathering(num_rows, [OBS, CRITIC, ACTIONS, ACTIONS, ACTIONS, 1, 1, 1, 1])
        return lambda: _exhaust(draw())

    def ours(**options: Any) -> Call:
        storage = filled(num_steps, num_envs)
        return lambda: _exhaust(
            storage.mini_batch_generator(NUM_MINI_BATCHES, NUM_EPOCHS, **options)
        )

    is_wide = num_envs == 4096
    return Case(
        f"mini-batches {NUM_MINI_BATCHES}x{NUM_EPOCHS} T={num_steps} N={num_envs}",
        (
            Contender("pack rows, gather them", limit, LIMIT),
            Contender("new permutation per epoch", ours, OURS, reach=1.35 if is_wide else None),
            Contender(
                "one permutation for all epochs",
                lambda: ours(reshuffle="once"),
                OURS,
                reach=0.35 if is_wide else None,
            ),
            Contender(
                "our adapter for rsl_rl",
                lambda: _rsl_drawing(num_steps, num_envs, is_ours=True),
                OURS,
            ),
            Contender("rsl_rl", lambda: _rsl_drawing(num_steps, num_envs), PEER),
            Contender("SB3", lambda: _sb3_drawing(num_steps, num_envs), PEER),
            Contender("torchrl", lambda: _torchrl_drawing(num_steps, num_envs), PEER),
        ),
        num_bytes=NUM_EPOCHS * num_rows * width * 4,
    )


def using(num_steps: int, num_envs: int) -> Case:
    """Draw all mini-batches of all epochs, and pass both observations of each through one
    `Linear`.
    """
    num_rows = num_steps * num_envs
    actor, critic = torch.nn.Linear(OBS, 64), torch.nn.Linear(CRITIC, 64)

    def limit() -> Call:
        draw = _gathering(num_rows, [OBS, CRITIC, ACTIONS, ACTIONS, ACTIONS, 1, 1, 1, 1])
        obs, critic_obs = (
            torch.randn(num_rows // NUM_MINI_BATCHES, OBS),
            torch.randn(num_rows // NUM_MINI_BATCHES, CRITIC),
        )

        @torch.no_grad()
        def draw_and_use() -> None:
            for _ in draw():
                actor(obs), critic(critic_obs)

        return draw_and_use

    def ours(contiguous: bool) -> Call:
        storage = filled(num_steps, num_envs)

        @torch.no_grad()
        def draw_and_use() -> None:
            for batch in storage.mini_batch_generator(NUM_MINI_BATCHES, NUM_EPOCHS):
                actor(batch.obs.contiguous() if contiguous else batch.obs)
                critic(batch.critic_obs.contiguous() if contiguous else batch.critic_obs)

        return draw_and_use

    return Case(
        f"mini-batches {NUM_MINI_BATCHES}x{NUM_EPOCHS} through one Linear T={num_steps} N={num_envs}",
        (
            Contender("pack rows, gather them, contiguous input", limit, LIMIT),
            Contender("mini_batch_generator", lambda: ours(False), OURS),
            Contender("contiguous copy of the batch", lambda: ours(True), OURS),
        ),
        num_bytes=NUM_EPOCHS * num_rows * (OBS + CRITIC) * 4,
    )


def estimating(num_steps: int, num_envs: int) -> Case:
    """Estimate advantages and returns of one rollout."""
    rewards, values = torch.randn(2, num_steps, num_envs, 1)
    dones = (torch.rand(num_steps, num_envs, 1) < 0.02).to(torch.uint8)
    last = torch.randn(num_envs, 1)
    advantages, returns = torch.empty_like(rewards), torch.empty_like(rewards)

    def ours() -> None:
        rollout_advantage(rewards, values, last, dones, GAMMA, LAM, out=advantages, returns=returns)

    def loop() -> None:
        advantage = torch.zeros_like(last)
        for t in reversed(range(num_steps)):
            next_values = last if t == num_steps - 1 else values[t + 1]
            alive = 1.0 - dones[t].float()
            delta = rewards[t] + alive * GAMMA * next_values - values[t]
            advantage = delta + alive * GAMMA * LAM * advantage
            returns[t] = advantage + values[t]
        torch.sub(returns, values, out=advantages)

    def torchrl() -> Call:
        if num_steps * num_envs > 1_000_000:
            raise peers.PeerMissing("torchrl: takes 5 to 17 seconds for each call of this size")
        functional = peers.load("torchrl", "objectives.value.functional")
        ends = dones.bool().transpose(0, 1)
        inputs = [x.transpose(0, 1) for x in (values, torch.cat([values[1:], last[None]]), rewards)]
        return lambda: functional.vec_generalized_advantage_estimate(
            GAMMA, LAM, *inputs, ends, ends
        )

    def sb3() -> Call:
        buffer = _sb3_buffer(num_steps, num_envs)
        ended = dones[-1].flatten().numpy().astype(bool)
        return lambda: buffer.compute_returns_and_advantage(last, ended)

    return Case(
        f"advantages T={num_steps} N={num_envs}",
        (
            Contender(
                "one pass in C",
                lambda: _compiled(rewards, values, last, dones, advantages, returns),
                LIMIT,
            ),
            Contender(
                "rollout_advantage", lambda: ours, OURS, reach=REACH_GAE.get((num_steps, num_envs))
            ),
            Contender("loop of tensor operations", lambda: loop, PEER),
            Contender("SB3", sb3, PEER),
            Contender("torchrl", torchrl, PEER),
        ),
        num_bytes=num_steps * num_envs * 17,
        num_repeats=5,
    )


def _add_all(storage: RolloutStorage, steps: list[Transition]) -> None:
    storage.clear()
    for t in range(storage.num_transitions_per_env):
        storage.add_transitions(steps[t % NUM_SOURCES])


def _gathering(num_rows: int, widths: list[int]) -> Callable[[], Iterator[torch.Tensor]]:
    """Draw mini-batches with as few copies as possible in one thread."""
    size = num_rows // NUM_MINI_BATCHES
    columns = [torch.randn(num_rows, width) for width in widths]
    packed, outputs = torch.empty(num_rows, sum(widths)), torch.empty(2, size, sum(widths))

    def draw() -> Iterator[torch.Tensor]:
        torch.cat(columns, 1, out=packed)
        for _ in range(NUM_EPOCHS):
            order = torch.randperm(num_rows, dtype=torch.int32)
            for i in range(NUM_MINI_BATCHES):
                yield torch.index_select(
                    packed, 0, order[i * size : (i + 1) * size], out=outputs[i % 2]
                )

    return draw


def _exhaust(batches: Iterator[Any]) -> None:
    for _ in batches:
        pass


def _compiled(*tensors: torch.Tensor) -> Call:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise peers.PeerMissing("no C compiler here")
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "gae.c"), Path(folder, "gae.so")
        source.write_text(_C_PASS, encoding="utf-8")
        options = ["-O3", "-march=native", "-ffast-math", "-shared", "-fPIC"]
        subprocess.run([compiler, *options, str(source), "-o", str(library)], check=True)
        function = ctypes.CDLL(str(library)).gae
    rewards, values, last, dones, advantages, returns = (
        ctypes.c_void_p(x.data_ptr()) for x in tensors
    )
    sizes = [ctypes.c_long(size) for size in tensors[0].shape[:2]]
    factors = ctypes.c_float(GAMMA), ctypes.c_float(LAM)
    # The closure references the tensors, so that their memory is not reused.
    return lambda: (
        function(*sizes, rewards, values, last, dones, *factors, advantages, returns),
        tensors,
    )


def rsl_filled(
    num_steps: int, num_envs: int, hidden: Callable[[], Any] | None = None, is_ours: bool = False
) -> tuple[Any, list[Any]]:
    """Fill a storage of rsl_rl, or ours behind its interface, with the same fields.

    With `hidden`, add recurrent states.
    """
    storage_module = peers.load("rsl-rl-lib", "storage")
    tensordict = peers.load("tensordict")
    steps = []
    for step in transitions(num_envs):
        made = storage_module.RolloutStorage.Transition()
        observed = {"policy": step.observations, "critic": step.critic_observations}
        made.observations = tensordict.TensorDict(observed, batch_size=[num_envs])
        for name in ("actions", "rewards", "dones", "values", "actions_log_prob"):
            setattr(made, name, getattr(step, name))
        made.distribution_params = (step.action_mean, step.action_sigma)
        if hidden is not None:
            made.hidden_states = hidden()
        steps.append(made)
    kind = RslRlStorage if is_ours else storage_module.RolloutStorage
    storage = kind("rl", num_envs, num_steps, steps[0].observations, (ACTIONS,))
    for t in range(num_steps):
        storage.add_transition(steps[t % NUM_SOURCES])
    # As in their PPO.
    storage.returns, storage.advantages = (
        storage.values.clone(),
        storage.values.clone(),
    )
    return storage, steps


def _rsl_adding(num_steps: int, num_envs: int, is_ours: bool = False) -> Call:
    storage, steps = rsl_filled(num_steps, num_envs, is_ours=is_ours)

    def add() -> None:
        storage.clear()
        for t in range(num_steps):
            storage.add_transition(steps[t % NUM_SOURCES])

    return add


def _rsl_drawing(num_steps: int, num_envs: int, is_ours: bool = False) -> Call:
    storage, _ = rsl_filled(num_steps, num_envs, is_ours=is_ours)
    return lambda: _exhaust(storage.mini_batch_generator(NUM_MINI_BATCHES, NUM_EPOCHS))


def _sb3_buffer(num_steps: int, num_envs: int) -> Any:
    buffers, spaces = (
        peers.load("stable-baselines3", "common.buffers"),
        peers.load("gymnasium", "spaces"),
    )
    observation = spaces.Box(-1, 1, (OBS + CRITIC,), np.float32)
    return buffers.RolloutBuffer(
        num_steps, observation, spaces.Box(-1, 1, (ACTIONS,), np.float32), n_envs=num_envs
    )


def _sb3_adding(num_steps: int, num_envs: int) -> Call:
    buffer = _sb3_buffer(num_steps, num_envs)
    steps = [
        (
            torch.cat([step.observations, step.critic_observations], 1).numpy(),
            step.actions.numpy(),
            step.rewards.numpy(),
            step.dones.numpy(),
            step.values,
            step.actions_log_prob,
        )
        for step in transitions(num_envs)
    ]

    def add() -> None:
        buffer.reset()
        for t in range(num_steps):
            buffer.add(*steps[t % NUM_SOURCES])

    return add


def _sb3_drawing(num_steps: int, num_envs: int) -> Call:
    buffer, size = _sb3_buffer(num_steps, num_envs), num_steps * num_envs // NUM_MINI_BATCHES
    buffer.full = True

    def draw() -> None:
        for _ in range(NUM_EPOCHS):
            _exhaust(buffer.get(size))

    return draw


def _torchrl_drawing(num_steps: int, num_envs: int) -> Call:
    data, tensordict = peers.load("torchrl", "data"), peers.load("tensordict")
    num_rows, storage = num_steps * num_envs, filled(num_steps, num_envs)
    (batch,) = storage.mini_batch_generator(1, 1)
    columns = {name: x.contiguous() for name, x in batch._asdict().items() if x is not None}
    buffer = data.ReplayBuffer(
        storage=data.LazyTensorStorage(num_rows),
        sampler=data.replay_buffers.samplers.SamplerWithoutReplacement(),
        batch_size=num_rows // NUM_MINI_BATCHES,
    )
    buffer.extend(tensordict.TensorDict(columns, batch_size=[num_rows]))

    def draw() -> None:
        for _ in range(NUM_MINI_BATCHES * NUM_EPOCHS):
            buffer.sample()

    return draw
