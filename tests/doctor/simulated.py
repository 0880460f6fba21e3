"""Recordings of the environments of gymnasium, if it is installed. The doctor must find nothing in them."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.doctor.worlds import Ep, Rng, World, about

MUJOCO = (
    "Ant-v5",
    "HalfCheetah-v5",
    "Hopper-v5",
    "Walker2d-v5",
    "Humanoid-v5",
    "Swimmer-v5",
    "Reacher-v5",
)
MUJOCO = (*MUJOCO, "Pusher-v5", "InvertedPendulum-v5", "InvertedDoublePendulum-v5")
CLASSIC = ("CartPole-v1", "Pendulum-v1", "MountainCar-v0", "MountainCarContinuous-v0", "Acrobot-v1")
TABLES = ("FrozenLake-v1", "Taxi-v4", "CliffWalking-v1", "Blackjack-v1")


def simulate(name: str, rng: Rng, num_frames: int = 1500, max_episodes: int = 30) -> World:
    """Run a policy of noise around slow waves. The last episode is cut off."""
    import gymnasium

    env = gymnasium.make(name)
    is_discrete = not hasattr(env.action_space, "low")
    episodes, left = [], num_frames
    while left > 0 and len(episodes) < max_episodes:
        seen, _ = env.reset(seed=int(rng.integers(1 << 30)))
        rows, actions, rewards = [_flat(seen)], list[Any](), list[float]()
        phase, speed, end = rng.uniform(0, 6, 64), rng.uniform(0.05, 0.3, 64), "open"
        while end == "open" and left > 0:
            if is_discrete:
                action = np.array(rng.integers(env.action_space.n))  # type: ignore[attr-defined]
            else:
                low, high = env.action_space.low, env.action_space.high  # type: ignore[attr-defined]
                wave = np.sin(phase + speed * len(actions))[: len(low)] * 0.5 + rng.normal(
                    0, 0.3, len(low)
                )
                action = np.clip(wave * high, low, high).astype(np.float32)
            seen, reward, terminated, truncated, _ = env.step(
                action if not is_discrete else int(action)
            )
            rows.append(_flat(seen))
            actions.append(np.atleast_1d(action))
            rewards.append(float(reward))
            end = "terminated" if terminated else "truncated" if truncated else "open"
            left -= 1
        fields = {"observation": np.stack(rows[:-1]), "action": np.stack(actions)}
        fields["reward"] = np.array(rewards, np.float32)
        episodes.append(Ep(fields, end, {"observation": rows[-1]} if end != "open" else None))
    env.close()
    return World(episodes, about(name, 1 / getattr(env.unwrapped, "dt", 0.05)))


def _flat(seen: Any) -> np.ndarray:
    parts = [
        np.asarray(item).reshape(-1) for item in (seen if isinstance(seen, tuple) else (seen,))
    ]
    actual = np.concatenate(parts)
    return actual.astype(np.float32) if actual.dtype.kind == "f" else actual
