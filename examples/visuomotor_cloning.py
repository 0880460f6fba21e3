"""Visuomotor cloning: an arm is recorded with its camera images, from which a network learns to
move it.

An expert that knows angles and targets steers Reacher-v5, while cameras (`arm_cameras.py`) render
every step as colour, depth and segmentation. `RolloutWriter` stores the compressed images.
`WindowDataset` streams frame stacks and action chunks. A small convolutional network learns the
actions of the expert. `python examples/visuomotor_cloning.py` takes about two minutes. `--quick`
takes some seconds, and learns little. The example draws demo/visuomotor_cloning.png.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from arm_cameras import SIZE, Camera, Images, make_camera
from torch import Tensor, nn
from tqdm import tqdm
from visuomotor_report import Report, Speed

from rollout_data import RolloutWriter, WindowDataset, WindowLoader
from rollout_data.tools.cli.info_command import describe

TASK, NUM_STEPS = "Reacher-v5", 50
#: Codecs of the images. Depth loses less than a hundredth of a millimetre, and the others lose
#: nothing. "auto" compares a few codecs.
CODECS = {"rgb": "delta+lz4", "depth": "uint16+delta+lz4", "segmentation": "auto"}
#: Past frames in the input of the network, and steps of an action chunk.
SEEN, ANSWER = ("rgb", "depth"), "expert_action"
STACK, CHUNK = (-4, -2, 0), 4
#: Minimum share of the expert's advantage over random actions. Below it the full run exits with 1.
MIN_SHARE = 0.9


@dataclass(frozen=True)
class Plan:
    """Sizes of all steps.

    `noise` is the standard deviation of the noise that is added to the expert's actions.
    """

    num_episodes: int = 320
    num_envs: int = 32
    noise: float = 0.08
    num_epochs: int = 5
    batch_size: int = 64
    learning_rate: float = 1e-3
    num_test_episodes: int = 40
    num_measured: int = 5


QUICK = Plan(num_episodes=16, num_envs=8, num_epochs=1, num_test_episodes=8, num_measured=1)
Act = Callable[[list[Any]], np.ndarray]


def make_arms(num_envs: int, seed: int) -> list[Any]:
    """Create arms at the start of an episode. The target of each arm depends only on its seed."""
    envs = [gymnasium.make(TASK) for _ in range(num_envs)]
    for number, env in enumerate(envs):
        env.reset(seed=seed + number)
    return envs


def step(envs: list[Any], actions: np.ndarray) -> np.ndarray:
    """Move every arm. Return the rewards, float32 `[N]`."""
    return np.array(
        [env.step(action)[1] for env, action in zip(envs, actions, strict=True)], np.float32
    )


def expert(envs: list[Any]) -> np.ndarray:
    """Return the torques of a damped spring towards the angles that reach the target, in the
    shorter direction: float32 `[N, 2]`.
    """
    angles, target = np.split(np.array([env.unwrapped.data.qpos for env in envs]), 2, axis=1)
    speeds = np.array([env.unwrapped.data.qvel[:2] for env in envs])
    upper, lower = 0.1, 0.11  # metres
    ways = []
    for side in (1, -1):  # the elbow may bend in either direction
        cosine = (np.square(target).sum(-1) - upper**2 - lower**2) / (2 * upper * lower)
        elbow = side * np.arccos(np.clip(cosine, -1, 1))
        shoulder = np.arctan2(target[:, 1], target[:, 0])
        shoulder = (
            shoulder
            - np.arctan2(lower * np.sin(elbow), upper + lower * np.cos(elbow))
            - angles[:, 0]
        )
        ways.append(
            np.stack([np.arctan2(np.sin(shoulder), np.cos(shoulder)), elbow - angles[:, 1]], -1)
        )
    is_first = np.abs(ways[0]).sum(-1) < np.abs(ways[1]).sum(-1)
    return np.clip(0.3 * np.where(is_first[:, None], *ways) - 0.05 * speeds, -1, 1).astype(
        np.float32
    )


def play(camera: Camera, plan: Plan, num_episodes: int) -> Iterator[dict[str, Any]]:
    """Yield the steps of all arms as arguments of `RolloutWriter.add`.

    Noise is added to the actions. The expert's action without noise is also stored, so that the
    network learns how to return after an error.
    """
    rng = np.random.default_rng(0)
    for seed in range(0, num_episodes, plan.num_envs):
        envs = make_arms(plan.num_envs, seed)
        for number in range(NUM_STEPS):
            images, wanted = camera(envs), expert(envs)
            action = np.clip(wanted + plan.noise * rng.standard_normal(wanted.shape), -1, 1).astype(
                np.float32
            )
            timeout = np.full(len(envs), number == NUM_STEPS - 1)
            reward = step(envs, action)
            yield {
                "observation": images,
                "action": action,
                ANSWER: wanted,
                "reward": reward,
                "timeout": timeout,
            }


def record(camera: Camera, plan: Plan, folder: Path, report: Report) -> None:
    """(a) Record the expert with compressed images."""
    about = {"env": TASK, "policy": "damped spring", "camera": camera.name}
    start_s, num_frames = time.perf_counter(), plan.num_episodes * NUM_STEPS
    with (
        RolloutWriter(
            folder, plan.num_envs, obs_disassemble_mapping=CODECS, metadata=about
        ) as writer,
        tqdm(total=num_frames, desc="recording", unit=" frames") as bar,
    ):
        for step in play(camera, plan, plan.num_episodes):
            writer.add(**step)
            bar.update(plan.num_envs)
    duration_s = time.perf_counter() - start_s
    frame_bytes = sum(
        report.note_component(name, images) for name, images in step["observation"].items()
    )
    report.sizes = describe(str(folder))["coded"]
    report.speeds["recording, simulated and drawn"] = Speed(num_frames, frame_bytes, duration_s)


def windows(folder: Path, split: str | None = None) -> WindowDataset:
    """(b) Open a recording as frame stacks and action chunks.

    Positions outside an episode repeat its first or last frame.
    """
    fields = [*(f"observation/{name}" for name in SEEN), ANSWER]
    delta = {"observation": STACK, ANSWER: range(CHUNK)}
    return WindowDataset(folder, delta=delta, padding="repeat", fields=fields, split=split)


class Policy(nn.Module):
    """Network from a stack of images to a chunk of actions."""

    def __init__(self, dataset: WindowDataset) -> None:
        super().__init__()
        statistics = dataset.statistics()
        for name in (*(f"observation/{name}" for name in SEEN), ANSWER):
            own = name.rpartition("/")[2]
            self.register_buffer(f"{own}_mean", statistics[name].mean)
            self.register_buffer(f"{own}_std", statistics[name].std)
        self.layers = nn.Sequential(
            nn.Conv2d(4 * len(STACK), 16, 5, stride=2, padding=2),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 16, 3, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(16 * (SIZE // 4) ** 2, 256),
            nn.ReLU(),
            nn.Linear(256, 256),
            nn.ReLU(),
            nn.Linear(256, CHUNK * 2),
            nn.Unflatten(1, (CHUNK, 2)),
        )

    def forward(self, rgb: Tensor, depth: Tensor) -> Tensor:
        """Return `[B, CHUNK, 2]` for `rgb` `[B, K, 64, 64, 3]` uint8 and `depth` `[B, K, 64, 64]`
        float32.
        """
        images = torch.empty(*depth.shape[:2], 4, SIZE, SIZE)
        images[:, :, :3] = ((rgb - self.rgb_mean) / self.rgb_std).movedim(-1, 2)
        images[:, :, 3] = (depth - self.depth_mean) / self.depth_std
        return self.layers(images.flatten(1, 2)) * self.expert_action_std + self.expert_action_mean

    def loss(self, batch: dict[str, Any]) -> Tensor:
        """Return the mean squared error over existing steps, in units of the actions' standard
        deviation.
        """
        error = (self(**batch["observation"]) - batch[ANSWER]) / self.expert_action_std
        is_there = batch["mask"][ANSWER]
        return (error.square().mean(-1) * is_there).sum() / is_there.sum()


def clone(folder: Path, plan: Plan, report: Report) -> Policy:
    """(c) Learn from the stream. A tenth of the episodes is for validation."""
    lessons, tests = windows(folder, "train"), windows(folder, "validation")
    policy, loader = Policy(lessons), WindowLoader(lessons, plan.batch_size, shuffle=True)
    num_batches = plan.num_epochs * len(loader)
    optimizer = torch.optim.Adam(policy.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, plan.learning_rate, num_batches, pct_start=0.1
    )
    with tqdm(total=num_batches, desc="cloning", unit=" batches") as bar:
        for _ in range(plan.num_epochs):
            for batch in loader:
                loss = policy.loss(batch)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
                report.losses.append(loss.item())
                bar.update()
            with torch.no_grad():
                errors = float(
                    np.mean([policy.loss(batch).item() for batch in WindowLoader(tests, 128)])
                )
            report.tests.append((len(report.losses), errors))
            bar.set_postfix_str(f"loss of other episodes {errors:.3f}")
    return policy


class Clone:
    """Policy on camera images: predicts a chunk, takes its first action, and predicts again."""

    def __init__(self, policy: Policy, camera: Camera) -> None:
        self.policy, self.camera = policy, camera
        self.shown: deque[Images] = deque(maxlen=1 - min(STACK))

    def __call__(self, envs: list[Any]) -> np.ndarray:
        self.shown.append(self.camera(envs))
        while len(self.shown) < 1 - min(STACK):
            self.shown.append(self.shown[0])
        stacks = {
            name: np.stack([self.shown[delta - 1][name] for delta in STACK], axis=1)
            for name in SEEN
        }
        with torch.no_grad():
            chunks = self.policy(
                **{name: torch.from_numpy(stack) for name, stack in stacks.items()}
            )
        return chunks[:, 0].clamp(-1, 1).numpy()


def evaluate(plan: Plan, policy: Policy, camera: Camera, report: Report) -> None:
    """(d) Play episodes that were not recorded with random actions, with the expert, and from
    images.
    """
    rng, by_images = np.random.default_rng(1), Clone(policy, camera)
    acts: dict[str, Act] = {
        "random": lambda envs: rng.uniform(-1, 1, (len(envs), 2)),
        "expert": expert,
    }
    acts["clone, from images"] = by_images
    for name, act in tqdm(acts.items(), desc="evaluating", unit=" policies"):
        envs = make_arms(plan.num_test_episodes, 1_000_000)
        rewards = []
        for number in range(NUM_STEPS):
            rewards.append(step(envs, act(envs)))
            if act is by_images and number % 4 == 0:
                report.strip.append(
                    (number, {kind: images[0] for kind, images in by_images.shown[-1].items()})
                )
        report.returns[name] = np.sum(rewards, axis=0, dtype=np.float64)


def measure(camera: Camera, plan: Plan, folder: Path, report: Report) -> None:
    """(e) Write the same steps compressed and raw, and stream them, without simulating or
    rendering.
    """
    steps = list(play(camera, plan, plan.num_envs))
    num_frames, frame_bytes = plan.num_envs * NUM_STEPS, sum(report.frame_bytes.values())
    seen_bytes = len(STACK) * sum(report.frame_bytes[name] for name in SEEN)
    speeds: dict[str, dict[str, Speed]] = {"RolloutWriter": {}, "WindowLoader": {}}
    for kind, codecs in {"raw": None, "coded": CODECS}.items():
        written_s, streamed_s = [], []
        for number in tqdm(range(plan.num_measured), desc=f"measuring, {kind}", unit=" runs"):
            place, start_s = folder / f"{kind}_{number}", time.perf_counter()
            with RolloutWriter(place, plan.num_envs, obs_disassemble_mapping=codecs) as writer:
                for step in steps:
                    writer.add(**step)
            written_s.append(time.perf_counter() - start_s)
            loader, start_s = (
                WindowLoader(windows(place), plan.batch_size, shuffle=True),
                time.perf_counter(),
            )
            for _ in loader:
                pass
            streamed_s.append(time.perf_counter() - start_s)
        speeds["RolloutWriter"][kind] = Speed(num_frames, frame_bytes, float(np.median(written_s)))
        speeds["WindowLoader"][kind] = Speed(num_frames, seen_bytes, float(np.median(streamed_s)))
    report.speeds |= {
        f"{name}, {kind}": speed for name, kinds in speeds.items() for kind, speed in kinds.items()
    }
    shutil.rmtree(folder)


def main(arguments: list[str] | None = None) -> int:
    """Run all steps. Return 1 if the clone is worse than required (not with `--quick`)."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=Path("demo"), help="folder for the recording and the picture"
    )
    parser.add_argument(
        "--camera", choices=("auto", "mujoco", "synthetic"), default="auto", help="who draws"
    )
    parser.add_argument("--quick", action="store_true", help="some seconds, without learning much")
    options = parser.parse_args(arguments)
    plan, folder = QUICK if options.quick else Plan(), options.out / "visuomotor"
    torch.manual_seed(0)
    torch.set_num_threads(1)  # two threads wait for each other, too long while other programs run
    shutil.rmtree(folder, ignore_errors=True)
    camera = make_camera(options.camera)
    report = Report(TASK, camera.name, CODECS)
    record(camera, plan, folder / "data", report)
    policy = clone(folder / "data", plan, report)
    evaluate(plan, policy, camera, report)
    measure(camera, plan, folder / "copies", report)
    print(report.tables())
    print(f"written {report.draw(options.out / 'visuomotor_cloning.png')}")
    if options.quick:
        return 0
    is_learned = report.share() >= MIN_SHARE
    print("the clone plays like the expert" if is_learned else "NOT LEARNED: see the table")
    return int(not is_learned)


if __name__ == "__main__":
    sys.exit(main())
