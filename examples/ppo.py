"""A complete PPO loop on `storage.RolloutStorage`: `python examples/ppo.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import Tensor, nn

from storage import RolloutStorage


@dataclass(frozen=True)
class Settings:
    """Options of the training.

    The defaults learn InvertedDoublePendulum-v5 in one to two minutes.
    """

    num_envs: int = 32
    num_steps: int = 64
    num_updates: int = 150
    num_epochs: int = 10
    num_mini_batches: int = 8
    learning_rate: float = 1e-3
    gamma: float = 0.99
    lam: float = 0.95
    clip: float = 0.2
    reward_scale: float = 0.1
    seed: int = 1


def make_envs(task: str, num_envs: int) -> SyncVectorEnv:
    """Create environments that restart in the step that ends an episode.

    `infos["final_obs"]` has the true final observation.
    """
    makers = [lambda: gymnasium.make(task)] * num_envs
    return SyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP)


def network(num_inputs: int, num_outputs: int, width: int = 64) -> nn.Sequential:
    layers = (
        nn.Linear(num_inputs, width),
        nn.Tanh(),
        nn.Linear(width, width),
        nn.Tanh(),
        nn.Linear(width, num_outputs),
    )
    return nn.Sequential(*layers)


class ActorCritic(nn.Module):
    """A Gaussian policy with a state-independent width, and a value function."""

    def __init__(self, num_observations: int, num_actions: int) -> None:
        super().__init__()
        self.mean = network(num_observations, num_actions)
        self.value = network(num_observations, 1)
        self.log_std = nn.Parameter(torch.full((num_actions,), -0.5))
        with torch.no_grad():
            self.mean[-1].weight *= 0.01

    def distribution(self, observations: Tensor) -> torch.distributions.Normal:
        return torch.distributions.Normal(self.mean(observations), self.log_std.exp())

    @torch.no_grad()
    def act(self, observations: np.ndarray, explore: bool = False) -> np.ndarray:
        """Return the most likely or drawn actions in the form that environments accept."""
        distribution = self.distribution(torch.as_tensor(observations, dtype=torch.float32))
        return (distribution.sample() if explore else distribution.mean).numpy()


@torch.no_grad()
def collect(
    envs: SyncVectorEnv,
    policy: ActorCritic,
    storage: RolloutStorage,
    obs: Tensor,
    settings: Settings,
) -> Tensor:
    """Fill the storage with one rollout and estimate its advantages.

    Return the last observations.
    """
    low, high = envs.single_action_space.low, envs.single_action_space.high
    for _ in range(settings.num_steps):
        transition = storage.Transition()
        distribution = policy.distribution(obs)
        action = distribution.sample()
        next_obs, reward, terminated, truncated, infos = envs.step(
            np.clip(action.numpy(), low, high)
        )
        final_obs = torch.as_tensor(next_obs, dtype=torch.float32)
        next_obs = final_obs.clone()
        for env in np.flatnonzero(terminated | truncated):
            final_obs[env] = torch.as_tensor(infos["final_obs"][env])
        transition.observations = obs
        transition.actions = action
        transition.rewards = torch.as_tensor(reward, dtype=torch.float32) * settings.reward_scale
        transition.dones = torch.as_tensor(terminated | truncated)
        transition.time_outs = torch.as_tensor(truncated & ~terminated)
        transition.bootstrap_values = policy.value(final_obs)
        transition.values = policy.value(obs)
        transition.actions_log_prob = distribution.log_prob(action).sum(-1)
        transition.action_mean, transition.action_sigma = distribution.mean, distribution.stddev
        storage.add_transitions(transition)
        obs = next_obs
    storage.compute_returns(policy.value(obs), settings.gamma, settings.lam, truncation="final")
    return obs


def update(
    policy: ActorCritic,
    optimizer: torch.optim.Optimizer,
    storage: RolloutStorage,
    settings: Settings,
) -> None:
    """Take the clipped policy-gradient steps of one rollout (Schulman et al. 2017)."""
    for batch in storage.mini_batch_generator(settings.num_mini_batches, settings.num_epochs):
        distribution = policy.distribution(batch.obs)
        log_prob = distribution.log_prob(batch.actions).sum(-1, keepdim=True)
        ratio = torch.exp(log_prob - batch.old_actions_log_prob)
        clipped = ratio.clamp(1 - settings.clip, 1 + settings.clip)
        gain = torch.min(ratio * batch.advantages, clipped * batch.advantages).mean()
        value_loss = (policy.value(batch.obs) - batch.returns).square().mean()
        optimizer.zero_grad()
        (0.5 * value_loss - gain).backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
        optimizer.step()
    storage.clear()


def train(
    task: str, settings: Settings, report: Callable[[int, list[float]], bool | None]
) -> ActorCritic:
    """Learn a task.

    `report(update, returns)` receives the returns of the episodes that ended. It returns True to
    stop.
    """
    torch.manual_seed(settings.seed)
    envs = make_envs(task, settings.num_envs)
    num_observations, num_actions = (
        envs.single_observation_space.shape[0],
        envs.single_action_space.shape[0],
    )
    policy = ActorCritic(num_observations, num_actions)
    optimizer = torch.optim.Adam(policy.parameters(), lr=settings.learning_rate, eps=1e-5)
    storage = RolloutStorage(
        settings.num_envs,
        settings.num_steps,
        (num_observations,),
        None,
        (num_actions,),
        generator=settings.seed,
    )
    obs = torch.as_tensor(envs.reset(seed=settings.seed)[0], dtype=torch.float32)
    running = torch.zeros(settings.num_envs)
    for number in range(settings.num_updates):
        optimizer.param_groups[0]["lr"] = settings.learning_rate * (
            1 - number / settings.num_updates
        )
        obs = collect(envs, policy, storage, obs, settings)
        finished = []
        for reward, done in zip(storage.rewards[..., 0], storage.dones[..., 0].bool(), strict=True):
            running += reward / settings.reward_scale
            finished += running[done].tolist()
            running[done] = 0
        update(policy, optimizer, storage, settings)
        if report(number, finished):
            break
    envs.close()
    return policy


if __name__ == "__main__":
    torch.set_num_threads(1)  # small networks are slower with several threads
    train(
        "InvertedDoublePendulum-v5",
        Settings(),
        lambda number, returns: print(
            f"update {number}: {len(returns)} episodes, mean return {np.mean(returns or [0]):.0f}"
        ),
    )
