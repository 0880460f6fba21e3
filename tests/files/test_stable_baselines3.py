"""Vectorized environments of stable-baselines3, recorded in each way: the same ends and final
observations.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

gymnasium = pytest.importorskip("gymnasium")
pytest.importorskip(
    "stable_baselines3", reason="stable-baselines3 is not installed: make test-trainers"
)

from stable_baselines3.common.monitor import Monitor  # noqa: E402
from stable_baselines3.common.vec_env import DummyVecEnv  # noqa: E402

from rollout_data import RecordingWrapper, RolloutDataset, RolloutWriter, record_demonstrations  # noqa: E402

N, LIMIT = 2, 4


class Counter(gymnasium.Env):
    """Env 0 terminates after three steps; env 1 continues until its time limit of four."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)

    def __init__(self, number: int) -> None:
        self.number, self.count = number, 0

    def observed(self) -> np.ndarray:
        return np.array([self.number, self.count], np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict | None = None
    ) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.count = 0
        return self.observed(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.count += 1
        return self.observed(), 1.0, self.number == 0 and self.count == 3, False, {}


def make() -> DummyVecEnv:
    def one(number: int) -> Any:
        return lambda: Monitor(gymnasium.wrappers.TimeLimit(Counter(number), LIMIT))

    return DummyVecEnv([one(number) for number in range(N)])


def act(_: Any = None) -> np.ndarray:
    return np.zeros((N, 1), np.float32)


def by_writer(folder: Any) -> None:
    env = make()
    seen = env.reset()
    with RolloutWriter(folder, N, durable=False) as writer, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Monitor's "episode", which is not recorded
        for _ in range(12):
            following, rewards, dones, infos = env.step(act())
            writer.add(obs=seen, actions=act(), rewards=rewards, dones=dones, infos=infos)
            seen = following


def by_wrapper(folder: Any) -> None:
    env = RecordingWrapper(make(), folder, durable=False)
    env.reset()
    for _ in range(12):
        env.step(act())
    env.close()


def by_demonstrations(folder: Any) -> None:
    record_demonstrations(make(), act, folder, min_timesteps=24, durable=False, show_progress=False)


@pytest.mark.parametrize("way", [by_writer, by_wrapper, by_demonstrations])
def test_ends_and_final_observations_equal_those_of_the_environments(tmp_path, way) -> None:
    way(tmp_path)
    ends = {0: [], 1: []}
    for batch in RolloutDataset(tmp_path, 1, device="cpu"):
        if batch.is_last.item():
            env, count = batch.observation.flatten().tolist()
            ends[int(env)].append(
                (count, batch.timeout.item(), batch.next_observation.flatten().tolist())
            )
    assert ends[0] == [(2, False, [0, 3])] * 4
    assert ends[1] == [(3, True, [1, 4])] * 3
