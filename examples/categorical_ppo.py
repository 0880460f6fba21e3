"""PPO with a categorical policy: `python examples/categorical_ppo.py` learns CartPole-v1.

`policy_outputs` declares the logits of the policy once, so no mean and deviation are needed. An
update stops at a divergence from the acting policy, which is computed exactly from the stored
logits.

Result with the defaults (seed 1, 20 starts without exploration): a mean return of 500, the largest
possible. It takes 6 seconds on one core. `ppo.py` explains the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from gymnasium.vector import SyncVectorEnv
from ppo import network
from recurrent_ppo import make_envs, step
from torch import Tensor, nn
from torch.distributions import Categorical, kl_divergence

from storage import RolloutStorage

NUM_OBSERVATIONS, NUM_CHOICES = 4, 2


@dataclass(frozen=True)
class Settings:
    """Options of the training."""

    num_envs: int = 32
    num_steps: int = 64
    num_updates: int = 22
    num_epochs: int = 8
    num_mini_batches: int = 4
    learning_rate: float = 2e-3
    gamma: float = 0.99
    lam: float = 0.95
    clip: float = 0.2
    max_divergence: float = 0.03
    reward_scale: float = 0.1
    seed: int = 1


class ActorCritic(nn.Module):
    """Logits of the choices, and a value function."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = network(NUM_OBSERVATIONS, NUM_CHOICES)
        self.value = network(NUM_OBSERVATIONS, 1)


def make_storage(settings: Settings) -> RolloutStorage:
    """Create a storage with one integer per action, and with logits instead of a mean and a
    deviation.
    """
    sizes = settings.num_envs, settings.num_steps, (NUM_OBSERVATIONS,), None
    outputs = {"logits": (NUM_CHOICES,)}
    return RolloutStorage(
        *sizes, ((), torch.int64), generator=settings.seed, policy_outputs=outputs
    )


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
    for _ in range(settings.num_steps):
        transition = storage.Transition(observations=obs, values=policy.value(obs))
        choice = Categorical(logits=policy.logits(obs))
        transition.actions = choice.sample()
        transition.actions_log_prob = choice.log_prob(transition.actions)
        transition.policy_outputs = {"logits": choice.logits}
        obs, final_obs, rewards, transition.dones, transition.time_outs = step(
            envs, transition.actions
        )
        transition.rewards = rewards * settings.reward_scale
        transition.bootstrap_values = policy.value(final_obs)
        storage.add_transitions(transition)
    storage.compute_returns(policy.value(obs), settings.gamma, settings.lam, truncation="final")
    return obs


def update(
    policy: ActorCritic,
    optimizer: torch.optim.Optimizer,
    storage: RolloutStorage,
    settings: Settings,
) -> None:
    """Take clipped policy-gradient steps (Schulman et al. 2017) until the divergence from the
    acting policy is too large.
    """
    for batch in storage.mini_batch_generator(settings.num_mini_batches, settings.num_epochs):
        choice = Categorical(logits=policy.logits(batch.obs))
        before = Categorical(logits=batch.policy_outputs["logits"])
        if kl_divergence(before, choice).mean() > settings.max_divergence:
            break
        ratio = torch.exp(choice.log_prob(batch.actions).unsqueeze(-1) - batch.old_actions_log_prob)
        clipped = ratio.clamp(1 - settings.clip, 1 + settings.clip)
        gain = torch.min(ratio * batch.advantages, clipped * batch.advantages).mean()
        value_loss = (policy.value(batch.obs) - batch.returns).square().mean()
        optimizer.zero_grad()
        (0.5 * value_loss - gain).backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
        optimizer.step()
    storage.clear()


def train(settings: Settings, report: Callable[[int, list[float]], None]) -> ActorCritic:
    """Learn the task.

    `report(update, lengths)` is called with the lengths of the episodes that ended in each update.
    """
    torch.manual_seed(settings.seed)
    envs, policy, storage = make_envs(settings.num_envs), ActorCritic(), make_storage(settings)
    optimizer = torch.optim.Adam(policy.parameters(), lr=settings.learning_rate)
    obs = torch.as_tensor(envs.reset(seed=settings.seed)[0], dtype=torch.float32)
    lengths = torch.zeros(settings.num_envs)
    for number in range(settings.num_updates):
        optimizer.param_groups[0]["lr"] = settings.learning_rate * (
            1 - number / settings.num_updates
        )
        obs = collect(envs, policy, storage, obs, settings)
        finished: list[float] = []
        for done in storage.dones[..., 0].bool():
            lengths += 1
            finished += lengths[done].tolist()
            lengths[done] = 0
        update(policy, optimizer, storage, settings)
        report(number, finished)
    envs.close()
    return policy


@torch.no_grad()
def returns_of(policy: ActorCritic, num_episodes: int = 20, seed: int = 1000) -> np.ndarray:
    """Return the return of one episode from each of `num_episodes` starts, with the more likely
    action.
    """
    envs = make_envs(num_episodes)
    obs = torch.as_tensor(envs.reset(seed=seed)[0], dtype=torch.float32)
    returns, is_running = torch.zeros(num_episodes), torch.ones(num_episodes, dtype=torch.bool)
    while is_running.any():
        obs, _, rewards, dones, _ = step(envs, policy.logits(obs).argmax(-1))
        returns += rewards * is_running
        is_running &= ~dones
    envs.close()
    return returns.numpy()


if __name__ == "__main__":
    torch.set_num_threads(1)  # small networks are slower with several threads
    learned = train(
        Settings(),
        lambda number, lengths: print(
            f"update {number}: {len(lengths)} episodes, {np.mean(lengths or [0]):.0f} steps"
        ),
    )
    print(f"without exploration: {returns_of(learned).mean():.0f} of 500")
