"""TD3 on a MuJoCo task with `storage.DictBuffer`: `python examples/off_policy.py` draws demo/off_policy.png.

The buffer stores each observation once. The next observation of a last step is the true final
observation, not that of a reset.
"""

from __future__ import annotations

import copy
import sys
from dataclasses import dataclass
from pathlib import Path

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import Tensor, nn

from storage import DictBuffer


@dataclass(frozen=True)
class Settings:
    """Options of the training. The defaults learn InvertedDoublePendulum-v5 in a few minutes."""

    task: str = "InvertedDoublePendulum-v5"
    num_envs: int = 4
    num_steps: int = 8000
    num_random_steps: int = 250
    updates_per_step: int = 4
    batch_size: int = 256
    capacity: int = 200_000
    width: int = 128
    learning_rate: float = 1e-3
    gamma: float = 0.99
    exploration: float = 0.1
    target_rate: float = 0.005
    reward_scale: float = 0.1
    seed: int = 1


def network(num_inputs: int, num_outputs: int, width: int) -> nn.Sequential:
    layers = (
        nn.Linear(num_inputs, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, num_outputs),
    )
    return nn.Sequential(*layers)


class TD3:
    """Twin critics, a delayed actor and smoothed targets (Fujimoto et al. 2018)."""

    def __init__(self, num_observations: int, num_actions: int, settings: Settings) -> None:
        self.settings = settings
        self.actor = nn.Sequential(
            network(num_observations, num_actions, settings.width), nn.Tanh()
        )
        self.critics = nn.ModuleList(
            network(num_observations + num_actions, 1, settings.width) for _ in range(2)
        )
        self.targets = copy.deepcopy(nn.ModuleList([self.actor, self.critics])).requires_grad_(
            False
        )
        self.actor_optimizer = torch.optim.Adam(self.actor.parameters(), lr=settings.learning_rate)
        self.critic_optimizer = torch.optim.Adam(
            self.critics.parameters(), lr=settings.learning_rate
        )
        self.num_updates = 0

    def update(self, batch: dict) -> None:
        """Take one step on a batch of transitions."""
        observation, action, following = (
            batch["observation"],
            batch["action"],
            batch["next"]["observation"],
        )
        target_actor, target_critics = self.targets
        with torch.no_grad():
            noise = (0.2 * torch.randn_like(action)).clamp(-0.5, 0.5)
            next_action = (target_actor(following) + noise).clamp(-1, 1)
            next_value = torch.min(
                *(critic(torch.cat([following, next_action], -1)) for critic in target_critics)
            )
            # Only a terminated episode has no future value; a truncated one would have continued.
            target = batch["reward"] + self.settings.gamma * next_value * ~batch["terminated"]
        pair = torch.cat([observation, action], -1)
        loss = sum(nn.functional.mse_loss(critic(pair), target) for critic in self.critics)
        step(self.critic_optimizer, loss)
        self.num_updates += 1
        if self.num_updates % 2 == 0:
            step(
                self.actor_optimizer,
                -self.critics[0](torch.cat([observation, self.actor(observation)], -1)).mean(),
            )
            with torch.no_grad():
                online = [*self.actor.parameters(), *self.critics.parameters()]
                for slow, quick in zip(self.targets.parameters(), online, strict=True):
                    slow.lerp_(quick, self.settings.target_rate)


def step(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def train(settings: Settings) -> tuple[list[tuple[int, float]], DictBuffer]:
    """Learn a task. Return (frames so far, return) of every episode, and the buffer."""
    torch.manual_seed(settings.seed)
    makers = [lambda: gymnasium.make(settings.task)] * settings.num_envs
    envs = SyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP)
    envs.action_space.seed(settings.seed)
    high = float(envs.single_action_space.high[0])
    learner = TD3(
        envs.single_observation_space.shape[0], envs.single_action_space.shape[0], settings
    )
    ends = ["terminated", "truncated"]
    buffer = DictBuffer(
        capacity=settings.capacity,
        num_envs=settings.num_envs,
        end_key=ends,
        auto_unsqueeze=True,
        generator=settings.seed,
    )
    observation = torch.as_tensor(envs.reset(seed=settings.seed)[0], dtype=torch.float32)
    running, curve = np.zeros(settings.num_envs), []
    for number in range(settings.num_steps):
        if number < settings.num_random_steps:
            action = torch.as_tensor(envs.action_space.sample() / high)
        else:
            with torch.no_grad():
                action = learner.actor(observation)
            action = (action + settings.exploration * torch.randn_like(action)).clamp(-1, 1)
        reached, reward, terminated, truncated, infos = envs.step(action.numpy() * high)
        following = torch.as_tensor(reached, dtype=torch.float32)
        # After an end, `following` is the first observation of the next episode.
        final = following.clone()
        for env in np.flatnonzero(terminated | truncated):
            final[env] = torch.as_tensor(infos["final_obs"][env], dtype=torch.float32)
            curve.append((number * settings.num_envs, running[env] + reward[env]))
        running = np.where(terminated | truncated, 0, running + reward)
        scaled = torch.as_tensor(reward * settings.reward_scale, dtype=torch.float32)
        data = {"observation": observation, "action": action, "reward": scaled}
        buffer.extend(
            {**data, "terminated": terminated, "truncated": truncated}, final={"observation": final}
        )
        observation = following
        if number >= settings.num_random_steps:
            for _ in range(settings.updates_per_step):
                learner.update(buffer.sample_transitions(settings.batch_size))
    envs.close()
    return curve, buffer


def draw(curve: list[tuple[int, float]], settings: Settings, path: Path) -> None:
    """Draw the return of every episode over the frames."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    frames, returns = np.array(curve).T
    width = max(1, len(returns) // 30)
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    axes.plot(frames, returns, ".", color="#1f77b4", alpha=0.3, markersize=4, label="an episode")
    mean = np.convolve(returns, np.ones(width) / width, "valid")
    axes.plot(frames[width - 1 :], mean, color="#1f77b4", label=f"mean of {width}")
    axes.set(
        title=f"TD3 on {settings.task}, replay from DictBuffer",
        xlabel="frames",
        ylabel="return of an episode",
    )
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    quick = Settings(
        num_steps=200, num_random_steps=60, updates_per_step=1, batch_size=64, width=32
    )
    chosen = quick if "--quick" in sys.argv else Settings()
    episodes, memory = train(chosen)
    draw(episodes, chosen, Path("demo/off_policy.png"))
    early, late = episodes[: len(episodes) // 5], episodes[-max(1, len(episodes) // 20) :]
    print(
        f"{len(episodes)} episodes; mean return of the first fifth {np.mean([value for _, value in early]):.0f}"
    )
    print(f"mean return of the last twentieth {np.mean([value for _, value in late]):.0f}")
    print(
        f"{len(memory)} transitions in memory, {memory.num_bytes / memory.capacity:.1f} bytes each; demo/off_policy.png"
    )
