"""Trajectories in which every value encodes its trajectory, env and step."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from rollout_data.trajectories.trajectory_replay_buffer import TrajectoryReplayBuffer


def code(number: int, num_steps: int, num_envs: int) -> torch.Tensor:
    """Number the steps of a trajectory: `[T, B]` int64, trajectory * 10000 + env * 100 + step."""
    steps, envs = torch.meshgrid(torch.arange(num_steps), torch.arange(num_envs), indexing="ij")
    return number * 10_000 + envs * 100 + steps


def trajectory(
    number: int, num_steps: int = 5, num_envs: int = 3, without: Collection[str] = ()
) -> dict[str, Any]:
    value = code(number, num_steps, num_envs)
    made: dict[str, Any] = {
        "rewards": value[..., None].float(),
        "actions": torch.stack([value, -value], -1).double(),
        "dones": value[..., None] % 2 == 0,
        "curr_obs": {
            "states": value[..., None].float().expand(num_steps, num_envs, 7),
            "images": (value[..., None, None] % 251)
            .to(torch.uint8)
            .expand(num_steps, num_envs, 64, 70),
        },
        "half": value.bfloat16(),
        "model_weights_id": f"w{number}",
        "max_episode_length": 8,
        "task": ["walk", "run"],
        "nothing": None,
    }
    return {name: leaf for name, leaf in made.items() if name not in without}


def check_sample(sample: dict[str, Any], number: int) -> torch.Tensor:
    """Check that every row is one step of one trajectory in all fields.

    Return the codes of the steps.
    """
    value = sample["actions"][:, 0].long()
    assert value.shape == (number,)
    if "rewards" in sample:
        assert torch.equal(sample["rewards"].flatten().long(), value)
    assert torch.equal(sample["actions"][:, 1].long(), -value)
    assert torch.equal(sample["dones"].flatten(), value % 2 == 0)
    assert (sample["curr_obs"]["states"].long() == value[:, None]).all()
    assert (sample["curr_obs"]["images"].long() == (value % 251)[:, None, None]).all()
    assert torch.equal(sample["half"], value.bfloat16())
    return value


def drawn(buffer: TrajectoryReplayBuffer, number: int) -> torch.Tensor:
    return check_sample(buffer.sample(number), number)


def equal(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Return whether nested trajectories are equal. None equals a missing value."""
    a, b = ({key: value for key, value in item.items() if value is not None} for item in (a, b))
    if a.keys() != b.keys():
        return False
    for key, value in a.items():
        other = b[key]
        same = equal(value, other) if isinstance(value, dict) else None
        if same is None:
            both = isinstance(value, torch.Tensor)
            same = (
                torch.equal(value, other) and value.dtype == other.dtype if both else value == other
            )
        if not same:
            return False
    return True
