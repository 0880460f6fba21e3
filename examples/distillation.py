"""Distillation with `storage.ActionLabelRollout`: the teacher observes everything, the student does
not.

`python examples/distillation.py` first learns CartPole-v1 by PPO with velocities (the teacher).
Then a student with a GRU imitates it without velocities: the student acts, and the teacher labels
the student's observations (DAgger, Ross et al. 2011). The example prints both returns and draws
`demo/distillation.png`.

Result with the defaults (seed 1, 20 starts without exploration): a mean return of 500, the largest
possible, for the teacher and for the student, and 23 for random actions. It takes 20 seconds on one
core. The curve shows returns with exploration.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from gymnasium.vector import SyncVectorEnv
from recurrent_ppo import NUM_ALL, NUM_VISIBLE, VISIBLE, Policy, draw, forget, make_envs, show, step
from torch import Tensor, nn
from tqdm import tqdm, trange

from storage import ActionLabelRollout, HiddenStates, RolloutStorage, unpad_trajectories


@dataclass(frozen=True)
class Settings:
    """Options of the training. The defaults take about a minute."""

    num_envs: int = 32
    num_steps: int = 32
    num_teacher_updates: int = 60
    num_student_updates: int = 60
    #: Rollouts in the student's storage.
    num_rollouts_kept: float = 4.0
    num_epochs: int = 2
    num_mini_batches: int = 4
    learning_rate: float = 2e-3
    num_test_episodes: int = 20
    seed: int = 1


class Teacher(nn.Module):
    """A policy and a value function over the whole observation."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.logit = nn.Sequential(
            nn.Linear(NUM_ALL, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh()
        )
        self.logit.append(nn.Linear(width, 1))
        self.value = nn.Sequential(nn.Linear(NUM_ALL, width), nn.Tanh(), nn.Linear(width, 1))

    def distribution(self, observations: Tensor) -> torch.distributions.Bernoulli:
        return torch.distributions.Bernoulli(logits=self.logit(observations))


def teach(settings: Settings) -> Teacher:
    """Learn the teacher by PPO. `ppo.py` explains PPO."""
    teacher, envs = Teacher(), make_envs(settings.num_envs)
    optimizer = torch.optim.Adam(teacher.parameters(), lr=settings.learning_rate)
    sizes = settings.num_envs, settings.num_steps, (NUM_ALL,), None, (1,)
    # No mean, no deviation
    storage = RolloutStorage(*sizes, generator=settings.seed, policy_outputs={})
    obs = torch.as_tensor(envs.reset(seed=settings.seed)[0], dtype=torch.float32)
    for _ in trange(settings.num_teacher_updates, desc="teacher"):
        with torch.no_grad():
            for _ in range(settings.num_steps):
                transition = storage.Transition(observations=obs, values=teacher.value(obs))
                distribution = teacher.distribution(obs)
                transition.actions = distribution.sample()
                transition.actions_log_prob = distribution.log_prob(transition.actions)
                obs, final_obs, rewards, transition.dones, transition.time_outs = step(
                    envs, transition.actions
                )
                transition.rewards, transition.bootstrap_values = (
                    0.1 * rewards,
                    teacher.value(final_obs),
                )
                storage.add_transitions(transition)
            storage.compute_returns(teacher.value(obs), 0.99, 0.95, truncation="final")
        for batch in storage.mini_batch_generator(settings.num_mini_batches, 5):
            log_prob = teacher.distribution(batch.obs).log_prob(batch.actions)
            ratio = torch.exp(log_prob - batch.old_actions_log_prob)
            gain = torch.min(
                ratio * batch.advantages, ratio.clamp(0.8, 1.2) * batch.advantages
            ).mean()
            optimizer.zero_grad()
            (0.5 * (teacher.value(batch.obs) - batch.returns).square().mean() - gain).backward()
            optimizer.step()
        storage.clear()
    envs.close()
    return teacher


@dataclass
class Lesson:
    """A student, its environments and their state."""

    student: Policy
    teacher: Teacher
    envs: SyncVectorEnv
    storage: ActionLabelRollout
    obs: Tensor
    state: Tensor | None
    #: Steps of the running episodes, and of those that ended.
    lengths: Tensor
    finished: list[float] = field(default_factory=list)

    @torch.no_grad()
    def collect(self, num_steps: int) -> None:
        """Act with the student. The teacher's action labels each step."""
        for _ in range(num_steps):
            seen, state = self.obs[:, VISIBLE], self.state
            transition = self.storage.Transition(
                observations=seen, hidden_states=HiddenStates(actor=state)
            )
            features, state = self.student.features(seen.unsqueeze(0), state)
            distribution = self.student.distribution(features[0])
            transition.actions = distribution.sample()
            transition.actions_log_prob = distribution.log_prob(transition.actions)
            transition.action_labels = torch.sigmoid(self.teacher.logit(self.obs))
            transition.values = torch.zeros(len(self.obs))  # not needed here
            self.obs, _, transition.rewards, dones, _ = step(self.envs, transition.actions)
            transition.dones = dones
            self.storage.add_transitions(transition)
            self.state = forget(state, dones)
            self.lengths += 1
            self.finished += self.lengths[dones].tolist()
            self.lengths[dones] = 0
        self.storage.clear()  # Begins the next rollout. The newest rollouts stay.


def distill(teacher: Teacher, settings: Settings, curve: list[tuple[int, float]]) -> Policy:
    """Learn the student. `curve` receives (update, mean return of the episodes that ended)."""
    student, envs = Policy(has_memory=True), make_envs(settings.num_envs)
    optimizer = torch.optim.Adam(student.parameters(), lr=settings.learning_rate)
    sizes = settings.num_envs, settings.num_steps, (NUM_VISIBLE,), None, (1,)
    options = {"buffer_dilation_ratio": settings.num_rollouts_kept, "generator": settings.seed}
    storage = ActionLabelRollout(*sizes, **options, policy_outputs={})
    obs = torch.as_tensor(envs.reset(seed=settings.seed)[0], dtype=torch.float32)
    lengths = torch.zeros(settings.num_envs)
    lesson = Lesson(student, teacher, envs, storage, obs, student.start(settings.num_envs), lengths)
    with tqdm(total=settings.num_student_updates, desc="student") as bar:
        for number in range(settings.num_student_updates):
            lesson.collect(settings.num_steps)
            for batch in storage.recurrent_mini_batch_generator(
                settings.num_mini_batches, settings.num_epochs
            ):
                features, _ = student.features(batch.obs, batch.hidden_states.actor)
                logits = student.logit(unpad_trajectories(features, batch.masks))
                optimizer.zero_grad()
                nn.functional.binary_cross_entropy_with_logits(
                    logits, batch.action_labels
                ).backward()
                nn.utils.clip_grad_norm_(student.parameters(), 0.5)
                optimizer.step()
            bar.update()
            if lesson.finished:
                curve.append((number, float(np.mean(lesson.finished))))
                bar.set_postfix_str(f"mean return {curve[-1][1]:.0f}")
                lesson.finished.clear()
    envs.close()
    return student


@torch.no_grad()
def returns_of(policy: Teacher | Policy | None, num_episodes: int, seed: int = 1000) -> np.ndarray:
    """Return the return of one episode from each of `num_episodes` starts, without exploration.

    None acts at random.
    """
    envs, generator = make_envs(num_episodes), torch.Generator().manual_seed(seed)
    obs = torch.as_tensor(envs.reset(seed=seed)[0], dtype=torch.float32)
    state = policy.start(num_episodes) if isinstance(policy, Policy) else None
    returns, is_running = torch.zeros(num_episodes), torch.ones(num_episodes, dtype=torch.bool)
    while is_running.any():
        if isinstance(policy, Policy):
            features, state = policy.features(obs[None, :, VISIBLE], state)
            actions = policy.logit(features[0]) > 0
        elif policy is not None:
            actions = policy.logit(obs) > 0
        else:
            actions = torch.rand(num_episodes, generator=generator) < 0.5
        obs, _, rewards, dones, _ = step(envs, actions)
        returns += rewards * is_running
        is_running &= ~dones
        state = forget(state, dones)
    envs.close()
    return returns.numpy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="a few updates: to see that everything runs"
    )
    settings = Settings()
    if parser.parse_args().quick:
        settings = Settings(
            num_envs=8,
            num_steps=16,
            num_teacher_updates=4,
            num_student_updates=6,
            num_test_episodes=4,
        )
    torch.manual_seed(settings.seed)
    curve: list[tuple[int, float]] = []
    teacher = teach(settings)
    student = distill(teacher, settings, curve)
    policies = {"teacher, sees velocities": teacher, "student, GRU": student, "random": None}
    results = {
        name: returns_of(policy, settings.num_test_episodes) for name, policy in policies.items()
    }
    show(results)
    path = Path("demo/distillation.png")
    draw({"student": curve}, path, "CartPole-v1, velocities hidden: the student while it imitates")
    print(f"written {path}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
