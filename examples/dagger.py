"""DAgger (Ross et al. 2011) while data is collected: two processes with one folder between them.

`python examples/dagger.py` starts a collector. It balances poles with the student's newest policy,
and records the teacher's actions as labels. The student learns from the growing folder
(`refresh_s`) and writes its policy beside it. Neither process waits for the other. The example
prints, for each round, for how many steps the student keeps a pole upright.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from rollout_data import RolloutDataset, RolloutWriter, loader


@dataclass(frozen=True)
class Settings:
    """Options of the training."""

    num_rounds: int = 12
    round_s: float = 1.5
    num_envs: int = 64
    longest: int = 300
    seed: int = 0


QUICK = Settings(num_rounds=4, round_s=0.8, num_envs=32, longest=200)
FOLDER = Path("demo") / "dagger"


class Poles:
    """Carts that balance poles (Barto et al. 1983): `state` is `[N, 4]`, position, speed, angle and its speed."""

    def __init__(self, settings: Settings, seed: int) -> None:
        self.settings, self.rng = settings, torch.Generator().manual_seed(seed)
        self.state, self.age = (
            torch.zeros(settings.num_envs, 4),
            torch.zeros(settings.num_envs, dtype=torch.long),
        )
        self.restart(self.age == 0)

    def restart(self, which: torch.Tensor) -> None:
        """Reset some poles to a small angle."""
        self.state[which] = torch.empty(int(which.sum()), 4).uniform_(-0.1, 0.1, generator=self.rng)
        self.age[which] = 0

    def step(self, force: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Push the carts for 20 ms.

        Return the poles that fell, and the poles that stood long enough.
        """
        speed, angle, turn = self.state[:, 1], self.state[:, 2], self.state[:, 3]
        push = (10 * force.clamp(-1, 1) + 0.05 * turn.square() * angle.sin()) / 1.1
        bend = (9.8 * angle.sin() - angle.cos() * push) / (
            0.5 * (4 / 3 - 0.1 * angle.cos().square() / 1.1)
        )
        rates = torch.stack([speed, push - 0.05 * bend * angle.cos() / 1.1, turn, bend], 1)
        self.state, self.age = self.state + 0.02 * rates, self.age + 1
        has_fallen = (self.state[:, 0].abs() > 2.4) | (self.state[:, 2].abs() > 0.21)
        return has_fallen, ~has_fallen & (self.age >= self.settings.longest)


def teacher(state: torch.Tensor) -> torch.Tensor:
    """Return the force of a good controller: `[N, 1]`."""
    return (state @ torch.tensor([[0.3], [0.5], [5.0], [1.0]])).clamp(-1, 1)


def new_student(settings: Settings) -> nn.Sequential:
    torch.manual_seed(settings.seed)
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1), nn.Tanh())


def collect(settings: Settings, is_over: multiprocessing.synchronize.Event) -> None:
    """Act with the newest student and record the teacher's labels, until the learner has
    finished.
    """
    torch.set_num_threads(1)
    poles, student, policy, loaded_ns = (
        Poles(settings, settings.seed + 1),
        new_student(settings),
        FOLDER / "policy",
        0,
    )
    with RolloutWriter(FOLDER, settings.num_envs, durable=False, block_age_s=0.2) as writer:
        while not is_over.is_set():
            if policy.exists() and (changed_ns := policy.stat().st_mtime_ns) != loaded_ns:
                student.load_state_dict(torch.load(policy, weights_only=True))
                loaded_ns = changed_ns
            state = poles.state
            with torch.no_grad():
                has_fallen, has_stood = poles.step(student(state)[:, 0])
            done = has_fallen | has_stood
            writer.add(
                observation=state, action=teacher(state), reward=1.0 - done.float(), terminated=done
            )
            poles.restart(done)
            time.sleep(0.001)


def steps_upright(student: nn.Module, settings: Settings) -> float:
    """Return the mean number of steps for which the student keeps poles upright, at most
    `settings.longest`.
    """
    poles = Poles(settings, settings.seed + 2)
    stands, total = torch.ones(settings.num_envs, dtype=torch.bool), 0
    with torch.no_grad():
        for _ in range(settings.longest):
            stands &= ~poles.step(student(poles.state)[:, 0])[0]
            total += int(stands.sum())
    return total / settings.num_envs


def learn(settings: Settings) -> None:
    """Learn from all recorded data, new data first.

    Write a policy for the collector after each round.
    """
    student = new_student(settings)
    optimizer = torch.optim.Adam(student.parameters(), lr=3e-3)
    dataset = RolloutDataset(
        FOLDER,
        settings.num_envs,
        0,
        True,
        device="cpu",
        num_transitions_per_env=8,
        refresh_s=0.4,
        seed=settings.seed,
    )
    batches, num_batches = iter(loader(dataset)), 0
    print(
        f"round 0: {steps_upright(student, settings):.0f} of {settings.longest} steps upright, nothing learned yet"
    )
    for number in range(1, settings.num_rounds + 1):
        end_s = time.monotonic() + settings.round_s
        while time.monotonic() < end_s:
            batch = next(batches)
            loss = (student(batch.observation) - batch.action).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            num_batches += 1
        torch.save(student.state_dict(), FOLDER / "policy.new")
        os.replace(FOLDER / "policy.new", FOLDER / "policy")
        print(
            f"round {number}: {steps_upright(student, settings):.0f} of {settings.longest} steps upright, "
            f"{dataset.num_trajectories:,} trajectories known in pass {dataset.num_dataset_looped}, loss {loss:.4f}"
        )


def main() -> None:
    settings = QUICK if "--quick" in sys.argv else Settings()
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / "policy").unlink(missing_ok=True)  # of an earlier run, whose recordings stay
    context = multiprocessing.get_context("spawn")
    is_over = context.Event()
    collector = context.Process(target=collect, args=(settings, is_over))
    collector.start()
    try:
        learn(settings)
    finally:
        is_over.set()
        collector.join()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
