"""DQN with prioritized replay: `python examples/prioritized_dqn.py` learns Acrobot with and without
priorities.

The two runs differ in one number: `alpha` determines how strongly the error of a transition changes
its probability (Schaul et al. 2016). 0 draws uniformly. `demo/prioritized_dqn.png` shows the mean
of several seeds.
"""

from __future__ import annotations

import copy
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from torch import Tensor, nn

from storage import AdvancedReplayBuffer


@dataclass(frozen=True)
class Settings:
    """Options of the training. The defaults learn Acrobot-v1 in about half a minute per seed."""

    task: str = "Acrobot-v1"
    num_envs: int = 8
    num_steps: int = 2500
    num_random_steps: int = 125
    exploration_steps: int = 400
    final_exploration: float = 0.05
    updates_per_step: int = 2
    batch_size: int = 64
    capacity: int = 20_000
    width: int = 128
    learning_rate: float = 5e-4
    gamma: float = 0.99
    target_rate: float = 0.01
    alpha: float = 0.6
    beta: float = 0.4
    seed: int = 0


class DQN:
    """Double Q-learning with a slow target network (van Hasselt et al. 2016)."""

    def __init__(self, num_observations: int, num_actions: int, settings: Settings) -> None:
        self.settings, width = settings, settings.width
        layers = nn.Linear(num_observations, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()
        self.values = nn.Sequential(*layers, nn.Linear(width, num_actions))
        self.target = copy.deepcopy(self.values).requires_grad_(False)
        self.optimizer = torch.optim.Adam(self.values.parameters(), lr=settings.learning_rate)

    @torch.no_grad()
    def act(self, observation: Tensor, exploration: float) -> Tensor:
        """Choose the best action `[N]`, or a random one with the probability `exploration`."""
        best = self.values(observation)
        chosen = best.argmax(-1)
        return torch.where(
            torch.rand(len(chosen)) < exploration,
            torch.randint(best.shape[-1], chosen.shape),
            chosen,
        )

    def errors(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the temporal-difference errors `[B]` of a batch."""
        with torch.no_grad():
            best = self.values(batch["next_obs"]).argmax(-1, keepdim=True)
            future = self.target(batch["next_obs"]).gather(-1, best).squeeze(-1)
            goal = batch["reward"] + self.settings.gamma * future * ~batch["terminated"]
        return (
            self.values(batch["obs"]).gather(-1, batch["action"].unsqueeze(-1)).squeeze(-1) - goal
        )

    def step(self, loss: Tensor) -> None:
        """Take a gradient step, and move the target network towards the network."""
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.values.parameters(), 10.0)
        self.optimizer.step()
        with torch.no_grad():
            for slow, quick in zip(self.target.parameters(), self.values.parameters(), strict=True):
                slow.lerp_(quick, self.settings.target_rate)


def make_envs(settings: Settings) -> VectorEnv:
    """Create environments that restart in the step that ends an episode."""
    makers = [lambda: gymnasium.make(settings.task)] * settings.num_envs
    return SyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP)


class Play:
    """Environments, and the returns of their episodes."""

    def __init__(self, settings: Settings) -> None:
        self.envs = make_envs(settings)
        self.observation = torch.as_tensor(self.envs.reset(seed=settings.seed)[0])
        self.running = np.zeros(settings.num_envs)
        #: (frames so far, return) of every episode.
        self.curve: list[tuple[int, float]] = []
        self.num_frames = 0

    def step(self, action: Tensor) -> dict[str, Tensor]:
        """Act. Return the transitions `[N, ...]` with true next observations."""
        reached, reward, terminated, truncated, infos = self.envs.step(action.numpy())
        self.num_frames += len(action)
        following, done = torch.as_tensor(reached), terminated | truncated
        last = following.clone()
        # after an end, `following` is the first observation of the next episode
        for env in np.flatnonzero(done):
            last[env] = torch.as_tensor(infos["final_obs"][env])
            self.curve.append((self.num_frames, self.running[env] + reward[env]))
        self.running = np.where(done, 0, self.running + reward)
        observation, self.observation = self.observation, following
        return {
            "obs": observation,
            "action": action,
            "reward": torch.as_tensor(reward, dtype=torch.float32),
            "terminated": torch.as_tensor(terminated),
            "next_obs": last,
        }


def exploration(settings: Settings, number: int) -> float:
    """Return the probability of a random action in a step."""
    if number < settings.num_random_steps:
        return 1.0
    return max(
        settings.final_exploration,
        1.0 - (number - settings.num_random_steps) / settings.exploration_steps,
    )


def train(settings: Settings) -> tuple[list[tuple[int, float]], AdvancedReplayBuffer]:
    """Learn a task. Return (frames so far, return) of every episode, and the buffer."""
    torch.manual_seed(settings.seed)
    play = Play(settings)
    num_actions = int(play.envs.single_action_space.n)
    learner = DQN(play.observation.shape[-1], num_actions, settings)
    num_updates = settings.num_steps * settings.updates_per_step
    replay = AdvancedReplayBuffer(
        settings.capacity,
        alpha=settings.alpha,
        beta=settings.beta,
        anneal_step=num_updates,
        generator=settings.seed,
    )
    for number in range(settings.num_steps):
        replay.extend_tensors(
            play.step(learner.act(play.observation, exploration(settings, number)))
        )
        if number < settings.num_random_steps:
            continue
        for _ in range(settings.updates_per_step):
            batch, weights, ids = replay.sample_tensors(settings.batch_size)
            errors = learner.errors(batch)
            losses = nn.functional.huber_loss(errors, torch.zeros_like(errors), reduction="none")
            learner.step((weights * losses).mean())
            replay.update_priorities(ids, errors.detach().abs())
    play.envs.close()
    return play.curve, replay


def smooth(curve: list[tuple[int, float]], num_frames: int, width: int) -> np.ndarray:
    """Return the mean return of the episodes of the last `width` frames, at 100 positions."""
    frames, returns = np.array(curve).T
    recent = [
        returns[(frames > at - width) & (frames <= at)]
        for at in np.linspace(width, num_frames, 100)
    ]
    return np.array([returns.mean() if len(returns) else np.nan for returns in recent])


def draw(curves: dict[str, list[list[tuple[int, float]]]], settings: Settings, path: Path) -> None:
    """Draw the mean over the seeds and each seed, with and without priorities."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    num_frames = settings.num_steps * settings.num_envs
    width = num_frames // 5
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for (name, several), colour in zip(curves.items(), ("#7f7f7f", "#1f77b4"), strict=True):
        lines = np.stack([smooth(curve, num_frames, width) for curve in several])
        places = np.linspace(width, num_frames, lines.shape[1])
        axes.plot(places, lines.T, color=colour, alpha=0.25, linewidth=1)
        axes.plot(
            places,
            lines.mean(0),
            color=colour,
            linewidth=2.5,
            label=f"{name}, mean of {len(lines)} seeds",
        )
    axes.set(
        title=f"DQN on {settings.task}", xlabel="frames", ylabel=f"return, mean over {width} frames"
    )
    axes.legend(loc="upper left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(is_quick: bool) -> None:
    quick = Settings(
        task="CartPole-v1",
        num_steps=150,
        num_random_steps=30,
        exploration_steps=60,
        updates_per_step=1,
        width=32,
    )
    settings, num_seeds = (quick, 1) if is_quick else (Settings(), 3)
    curves: dict[str, list[list[tuple[int, float]]]] = {}
    for name, alpha in (("uniform", 0.0), ("prioritized", settings.alpha)):
        for seed in range(num_seeds):
            curve, replay = train(replace(settings, alpha=alpha, seed=seed))
            curves.setdefault(name, []).append(curve)
            late = [
                value
                for frames, value in curve
                if frames > 0.75 * settings.num_steps * settings.num_envs
            ]
            print(
                f"{name:<12} seed {seed}: {len(curve):>4} episodes, mean return of the last quarter "
                f"{np.mean(late or [0]):>5.0f}; {replay.count()} transitions, "
                f"largest priority {replay.max_priority:.2f}"
            )
    draw(curves, settings, Path("demo/prioritized_dqn.png"))
    print("demo/prioritized_dqn.png")


if __name__ == "__main__":
    main("--quick" in sys.argv)
