"""A training run that is killed repeatedly, and whose result equals that of an uninterrupted run.

`python examples/checkpoint_resume.py` clones a teacher (a fixed random network) in another process,
which saves compressed checkpoints in the background. The process is killed by `kill -9` at random
instants and restarted until the training is complete. Then the same training runs without kills.
The two results are compared bit by bit. `Learner.state` contains everything that the next step
depends on. The example draws demo/checkpoint_resume.png.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from storage import AsyncCheckpointSaver, PerformanceMonitor, load_checkpoint, load_checkpoint_meta


@dataclass(frozen=True)
class Settings:
    """Options of the training."""

    num_steps: int = 3000
    steps_per_checkpoint: int = 50
    num_kills: int = 5
    longest_life_s: float = 4.0
    width: int = 512
    batch_size: int = 128
    num_inputs: int = 48
    num_actions: int = 12
    learning_rate: float = 3e-4
    seed: int = 0


QUICK = Settings(
    num_steps=300, steps_per_checkpoint=20, num_kills=2, longest_life_s=0.3, width=32, batch_size=16
)


def network(settings: Settings) -> nn.Sequential:
    width = settings.width
    layers = nn.Linear(settings.num_inputs, width), nn.ELU(), nn.Linear(width, width), nn.ELU()
    return nn.Sequential(*layers, nn.Linear(width, settings.num_actions))


class Learner:
    """The policy, its optimizer, its random state and its progress."""

    def __init__(self, settings: Settings) -> None:
        torch.manual_seed(settings.seed)
        self.settings, self.teacher, self.policy = settings, network(settings), network(settings)
        self.optimizer = torch.optim.AdamW(self.policy.parameters(), lr=settings.learning_rate)
        self.rng = torch.Generator().manual_seed(settings.seed)
        self.losses = torch.zeros(settings.num_steps)
        self.step = 0

    def learn(self) -> None:
        """Take one step on observations of the generator."""
        observation = torch.randn(
            self.settings.batch_size, self.settings.num_inputs, generator=self.rng
        )
        with torch.no_grad():
            action = self.teacher(observation)
        loss = (self.policy(observation) - action).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.losses[self.step] = loss.detach()
        self.step += 1

    def state(self) -> dict[str, Any]:
        """Return everything that the next step depends on, without copies."""
        return {
            "policy": self.policy.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "rng": self.rng.get_state(),
            "losses": self.losses,
            "step": self.step,
        }

    def go_on_from(self, state: dict[str, Any]) -> None:
        self.policy.load_state_dict(state["policy"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.rng.set_state(state["rng"])
        self.losses, self.step = state["losses"], state["step"]


def train(path: Path, settings: Settings) -> None:
    """Train from the last checkpoint, if there is one, to the end."""
    torch.set_num_threads(1)
    learner, monitor = Learner(settings), PerformanceMonitor()
    try:
        learner.go_on_from(load_checkpoint(path))
    except FileNotFoundError:
        pass
    with AsyncCheckpointSaver(max_queue_size=1, monitor=monitor) as saver:
        while learner.step < settings.num_steps:
            with monitor.timer("learn"):
                learner.learn()
            if learner.step % settings.steps_per_checkpoint == 0:
                saver.save_async(learner.state(), path, compress=True, meta={"step": learner.step})
    print(monitor.text())


def step_of(path: Path) -> int:
    """Read the step of the last checkpoint without its tensors."""
    try:
        return load_checkpoint_meta(path)["step"]
    except FileNotFoundError:
        return 0


def run_and_kill(path: Path, settings: Settings, arguments: list[str]) -> list[int]:
    """Start the training repeatedly. Return the steps at which it resumed after a kill."""
    rng, resumed = random.Random(settings.seed), []
    while True:
        process = subprocess.Popen([sys.executable, __file__, "--train", str(path), *arguments])
        if len(resumed) == settings.num_kills:
            exit_code = process.wait()
            assert exit_code == 0
            return resumed
        before = step_of(path)
        while step_of(path) == before and process.poll() is None:
            time.sleep(0.002)  # each life must reach a new checkpoint
        time.sleep(rng.random() * settings.longest_life_s)
        if process.poll() is not None:
            assert process.returncode == 0
            return resumed
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        resumed.append(step_of(path))
        print(f"killed; the checkpoint holds step {resumed[-1]} of {settings.num_steps}")


def equal(a: Any, b: Any) -> bool:
    """Compare two states bit by bit."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    return len(a) == len(b) and all(map(equal, a, b)) if isinstance(a, (list, tuple)) else a == b


def draw(losses: torch.Tensor, resumed: list[int], path: Path) -> None:
    """Draw the loss over the steps, and the steps at which the run resumed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    axes.semilogy(losses, color="#1f77b4", linewidth=1)
    for number, step in enumerate(resumed):
        axes.axvline(
            step,
            color="#d62728",
            linestyle="--",
            linewidth=1,
            label=None if number else "resumed after kill -9",
        )
    axes.set(title="One run out of many lives", xlabel="steps", ylabel="loss")
    if resumed:
        axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(settings: Settings, arguments: list[str]) -> None:
    killed, whole = Path("demo/killed.pt"), Path("demo/whole.pt")
    for path in (killed, whole):
        path.with_name(path.name + ".lz4").unlink(missing_ok=True)
    resumed = run_and_kill(killed, settings, arguments)
    subprocess.run([sys.executable, __file__, "--train", str(whole), *arguments], check=True)
    resumed_state, other = load_checkpoint(killed), load_checkpoint(whole)
    size = killed.with_name(killed.name + ".lz4").stat().st_size
    loss = f"loss {resumed_state['losses'][0]:.4f} -> {resumed_state['losses'][-1]:.5f}"
    print(f"killed {len(resumed)} times, {loss}, checkpoint {size:,} bytes")
    print(f"equal to the run without a kill, bit by bit: {equal(resumed_state, other)}")
    draw(resumed_state["losses"], resumed, Path("demo/checkpoint_resume.png"))


if __name__ == "__main__":
    flags = ["--quick"] if "--quick" in sys.argv else []
    chosen = QUICK if flags else Settings()
    if "--train" in sys.argv:
        train(Path(sys.argv[sys.argv.index("--train") + 1]), chosen)
    else:
        main(chosen, flags)
