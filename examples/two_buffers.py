"""Two buffers with one manager: `python examples/two_buffers.py` learns MountainCar with
demonstrations.

Three quarters of every batch are steps of the agent. One quarter are demonstrations, which were
recorded to block files. The demonstrations raise the values of their actions above the other values
by a margin (Hester et al. 2018). `demo/two_buffers.png` compares this with the same learner without
demonstrations.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from prioritized_dqn import DQN, Play, Settings, exploration, make_envs, smooth
from torch import Tensor, nn

from rollout_data import RolloutDataset, RolloutWriter
from storage import BufferManager

MARGIN, MARGIN_WEIGHT = 0.8, 0.5
RATIO = {"agent": 0.75, "demo": 0.25}


def record_demonstrations(folder: Path, settings: Settings, num_steps: int) -> None:
    """Record a simple rule that swings the car up: push in the direction of movement, and the wrong
    way one time in ten.
    """
    envs = make_envs(settings)
    observation, _ = envs.reset(seed=settings.seed + 1000)
    generator = np.random.default_rng(settings.seed)
    with RolloutWriter(folder, settings.num_envs, durable=False) as writer:
        for _ in range(num_steps):
            action = np.where(observation[:, 1] > 0, 2, 0)
            action = np.where(
                generator.random(settings.num_envs) < 0.1,
                generator.integers(0, 3, settings.num_envs),
                action,
            )
            reached, reward, terminated, truncated, infos = envs.step(action)
            final = reached.copy()
            for env in np.flatnonzero(terminated | truncated):
                final[env] = infos["final_obs"][env]
            writer.add(
                observation=observation,
                action=action,
                reward=reward.astype(np.float32),
                terminated=terminated,
                truncated=truncated,
                final_observation=final,
            )
            observation = reached
    envs.close()


def demonstrations(folder: Path, num_envs: int) -> list[dict[str, Tensor]]:
    """Read every transition of a folder, as items for a buffer."""
    items = []
    for batch in RolloutDataset(
        folder, num_envs, num_transitions_per_env=50, mark_first_frame=False, device="cpu"
    ):
        is_valid = batch.valid
        fields = {
            "obs": batch.observation[is_valid],
            "action": batch.action[is_valid],
            "reward": batch.reward[is_valid],
            "terminated": (batch.done & ~batch.timeout)[is_valid],
            "next_obs": batch.next_observation[is_valid],
        }
        items += [dict(zip(fields, row, strict=True)) for row in zip(*fields.values(), strict=True)]
    return items


def margin_loss(values: Tensor, action: Tensor) -> Tensor:
    """Return by how much the values of other actions exceed that of the demonstrated action minus a
    margin: `[B]`.
    """
    other = values + MARGIN
    other = other.scatter(-1, action.unsqueeze(-1), values.gather(-1, action.unsqueeze(-1)))
    return other.max(-1).values - values.gather(-1, action.unsqueeze(-1)).squeeze(-1)


def train(
    settings: Settings, items: list[dict[str, Tensor]]
) -> tuple[list[tuple[int, float]], BufferManager]:
    """Learn with or without demonstrations.

    Return (frames so far, return) of every episode, and the manager.
    """
    torch.manual_seed(settings.seed)
    play = Play(settings)
    learner = DQN(play.observation.shape[-1], int(play.envs.single_action_space.n), settings)
    names = ["agent", "demo"] if items else ["agent"]
    shared = {"alpha": settings.alpha, "beta": settings.beta, "generator": settings.seed}
    buffers = {name: {**shared, "replay_buffer_size": settings.capacity} for name in names}
    ratio = RATIO if items else {"agent": 1.0}
    manager = BufferManager(
        {"buffer_name": names, "sample_ratio": ratio, **buffers}, generator=settings.seed
    )
    if items:
        manager.push_data(items, "demo")
    for number in range(settings.num_steps):
        step = play.step(learner.act(play.observation, exploration(settings, number)))
        manager.push_data(
            [dict(zip(step, row, strict=True)) for row in zip(*step.values(), strict=True)], "agent"
        )
        if number >= settings.num_random_steps:
            for _ in range(settings.updates_per_step):
                update(learner, manager)
    play.envs.close()
    return play.curve, manager


def update(learner: DQN, manager: BufferManager) -> None:
    """Take one step on a batch of all buffers, and update their priorities."""
    items = manager.sample(learner.settings.batch_size)
    if items is None:
        return
    batch = {
        name: torch.stack([item[name] for item in items])
        for name in items[0]
        if torch.is_tensor(items[0][name])
    }
    weights = torch.tensor([item["IS"] for item in items], dtype=torch.float32)
    is_demo = torch.tensor([item["replay_unique_id"].startswith("demo_") for item in items])
    errors = learner.errors(batch)
    losses = nn.functional.huber_loss(errors, torch.zeros_like(errors), reduction="none")
    losses = losses + MARGIN_WEIGHT * is_demo * margin_loss(
        learner.values(batch["obs"]), batch["action"]
    )
    learner.step((weights * losses).mean())
    priorities = errors.detach().abs().tolist()
    manager.update(
        {"replay_unique_id": [item["replay_unique_id"] for item in items], "priority": priorities}
    )


def draw(curves: dict[str, list[tuple[int, float]]], settings: Settings, path: Path) -> None:
    """Draw the learning curve with and without demonstrations."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    num_frames = settings.num_steps * settings.num_envs
    width = max(num_frames // 12, 60 * settings.num_envs)
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for (name, curve), colour in zip(curves.items(), ("#7f7f7f", "#1f77b4"), strict=True):
        frames, returns = np.array(curve).T
        axes.plot(frames, returns, ".", color=colour, alpha=0.25, markersize=4)
        axes.plot(
            np.linspace(width, num_frames, 100),
            smooth(curve, num_frames, width),
            color=colour,
            label=name,
        )
    axes.set(
        title=f"Double DQN on {settings.task}, one manager",
        xlabel="frames",
        ylabel="return of an episode",
    )
    axes.legend(loc="upper left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(is_quick: bool) -> None:
    settings = Settings(task="MountainCar-v0", num_steps=2500, updates_per_step=1)
    if is_quick:
        settings = replace(
            settings, num_steps=250, num_random_steps=30, exploration_steps=60, width=32
        )
    with tempfile.TemporaryDirectory() as folder:
        record_demonstrations(Path(folder), settings, 100 if is_quick else 600)
        items = demonstrations(Path(folder), settings.num_envs)
    print(f"{len(items)} demonstrated transitions read from block files")
    curves = {}
    for name, chosen in (("agent alone", []), ("agent 0.75, demonstrations 0.25", items)):
        curves[name], manager = train(settings, chosen)
        late = [
            value
            for frames, value in curves[name]
            if frames > 0.75 * settings.num_steps * settings.num_envs
        ]
        held = ", ".join(f"{each} {manager.count(each)}" for each in manager.buffer_name)
        print(
            f"{name:<32} mean return of the last quarter {np.mean(late or [0]):>5.0f}; held: {held}"
        )
        manager.close()
    draw(curves, settings, Path("demo/two_buffers.png"))
    print("demo/two_buffers.png")


if __name__ == "__main__":
    main("--quick" in sys.argv)
