"""The complete path: learn a task, record it, stream the recording, learn from the stream.

`make demo` runs it. `--quick` runs every step in seconds to show that the installation works; it
learns little. Open `report.html` in the folder `--out` first: it is a page about the recording in
`data/`. `report.png` shows how well the task was learned.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from ppo import ActorCritic, Settings, make_envs, network, train
from report import Episodes, Report, Speed
from torch import nn
from torch.utils.data import DataLoader
from tqdm import tqdm

from rollout_data import (
    RolloutDataError,
    RolloutDataset,
    RolloutWriter,
    Transition,
    record_demonstrations,
)
from rollout_data import report as write_report
from rollout_data.tools.cli.command_line import main as command_line

#: A pole on a cart; the policy pushes the cart. PPO learns it in about 25 updates, faster than
#: other MuJoCo tasks.
TASK = "InvertedPendulum-v5"
#: Smallest ratios of mean returns with which the full run exits with 0.
MIN_EXPERT_OVER_RANDOM = 5.0
MIN_CLONE_OVER_EXPERT = 0.9
#: Training stops after this number of consecutive updates with a mean return of at least
#: `GOOD_RETURN`.
NUM_GOOD_UPDATES = 3
#: The largest possible return is 1,000: one for each step.
GOOD_RETURN = 950.0
DEFAULTS = Settings()


@dataclass(frozen=True)
class Plan:
    """Sizes of all steps."""

    ppo: Settings = DEFAULTS
    num_trajectories: int = 64
    num_record_envs: int = 32
    num_stream_envs: int = 32
    num_stream_steps: int = 32
    num_passes: int = 12
    num_episodes: int = 10


QUICK = Plan(
    ppo=replace(DEFAULTS, num_envs=8, num_updates=6),
    num_trajectories=48,
    num_record_envs=8,
    num_passes=2,
)


def learn(plan: Plan, report: Report) -> ActorCritic:
    """(a) Learn the task by PPO on `RolloutStorage`."""
    with tqdm(total=plan.ppo.num_updates, desc="PPO", unit=" updates") as bar:
        latest: deque[float] = deque(maxlen=NUM_GOOD_UPDATES)

        def note(update: int, returns: list[float]) -> bool:
            bar.update()
            report.curve += [
                ((update + 1) * plan.ppo.num_envs * plan.ppo.num_steps, value) for value in returns
            ]
            if returns:
                latest.append(float(np.mean(returns)))
                bar.set_postfix_str(f"return {latest[-1]:.0f}")
            return len(latest) == NUM_GOOD_UPDATES and min(latest) >= GOOD_RETURN

        expert = train(TASK, plan.ppo, note)
    print(
        f"the expert's mean return over the last {len(latest)} updates of training: {np.mean(latest):.0f}"
    )
    return expert


def record(expert: ActorCritic, plan: Plan, data_dir: Path) -> float:
    """(b) Record the expert with `RolloutWriter`, which `record_demonstrations` uses too.

    Return the seconds.

    Its actions are drawn as in training: an expert that never strays does not show how to come
    back.
    """
    envs = make_envs(TASK, plan.num_record_envs)
    start = time.perf_counter()
    record_demonstrations(
        envs,
        partial(expert.act, explore=True),
        data_dir,
        min_trajectories=plan.num_trajectories,
        keep_unfinished=False,
        metadata={"env": TASK, "policy": "PPO"},
        seed=7,
    )
    duration_s = time.perf_counter() - start
    envs.close()
    return duration_s


def stream(
    data_dir: Path, num_envs: int, num_steps: int, num_passes: int
) -> DataLoader[Transition]:
    """Stream the recording as batches `[T, N, ...]`.

    Each environment plays its own trajectories.
    """
    dataset = RolloutDataset(
        data_dir,
        num_envs,
        dataset_loops=num_passes,
        random_shuffle_traj_order=True,
        device="cpu",
        num_transitions_per_env=num_steps,
    )
    return DataLoader(dataset, batch_size=None)


def clone(data_dir: Path, plan: Plan) -> nn.Module:
    """(d) Learn the actions of the recorded expert from the stream alone."""
    loader = stream(data_dir, plan.num_stream_envs, plan.num_stream_steps, plan.num_passes)
    first = RolloutDataset(data_dir, 1, device="cpu")
    frame = first.get_batch()
    student = network(frame.observation.shape[-1], frame.action.shape[-1])
    optimizer = torch.optim.Adam(student.parameters(), lr=1e-3)
    num_batches = (
        plan.num_passes * first.num_frames / (plan.num_stream_envs * plan.num_stream_steps)
    )
    slower = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda number: max(0.01, 1 - number / num_batches)
    )
    for batch in tqdm(loader, desc="cloning", unit=" batches", total=round(num_batches)):
        error = (student(batch.observation.float()) - batch.action).square().mean(-1)
        loss = (error * batch.valid).sum() / batch.valid.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        slower.step()
    return student


def measure(data_dir: Path, plan: Plan, recording_s: float, report: Report) -> None:
    """Measure streaming, and writing the same frames again, each compared with the cheapest way to
    move the same bytes.
    """
    small, wide = (plan.num_stream_steps, plan.num_stream_envs), (128, plan.num_stream_envs)

    def play(num_steps: int, num_envs: int) -> None:
        for _ in stream(data_dir, num_envs, num_steps, 1):
            pass

    small_s, wide_s = (
        min(timed(lambda size=size: play(*size)) for _ in range(3)) for size in (small, wide)
    )
    batches = list(stream(data_dir, wide[1], wide[0], 1))
    names = ("observation", "action", "reward")
    columns = {name: torch.cat([getattr(batch, name) for batch in batches]) for name in names}
    valid = torch.cat([batch.valid for batch in batches])
    num_delivered, num_moved = int(valid.sum()), valid.numel()
    frame_bytes = sum(value[0, 0].numel() * value.element_size() for value in columns.values())

    def speed(num_frames: int, duration_s: float) -> Speed:
        return Speed(num_frames, num_frames * frame_bytes, duration_s)

    packed = torch.ones(num_moved * frame_bytes, dtype=torch.uint8)
    target = torch.empty_like(packed)
    copying_s = min(timed(lambda: target.copy_(packed)) for _ in range(5))
    folder = data_dir.with_name("copy")
    done = torch.zeros_like(valid)
    done[-1] = True

    def write() -> None:
        with RolloutWriter(folder, valid.shape[1]) as writer:
            writer.add_rollout(**columns, done=done)

    shutil.rmtree(folder, ignore_errors=True)
    writing_s = min(timed(write) for _ in range(3))
    raw_writing_s = min(timed(lambda: write_raw(folder / "raw.bin", packed)) for _ in range(3))
    shutil.rmtree(folder)
    report.speeds = {
        f"memcpy of the same frames, {frame_bytes} bytes each": (speed(num_moved, copying_s), None),
        f"DataLoader, batches of {small}": (
            speed(num_delivered, small_s),
            speed(num_moved, copying_s),
        ),
        f"DataLoader, batches of {wide}": (
            speed(num_delivered, wide_s),
            speed(num_moved, copying_s),
        ),
        "one raw write with fsync": (speed(num_moved, raw_writing_s), None),
        "RolloutWriter, durable, until closed": (
            speed(num_moved, writing_s),
            speed(num_moved, raw_writing_s),
        ),
        "recording, simulation included": (speed(num_delivered, recording_s), None),
    }


def write_raw(path: Path, data: torch.Tensor) -> None:
    with open(path, "wb", buffering=0) as file:
        file.write(data.numpy())
        os.fsync(file.fileno())


def page_about(data_dir: Path, out: Path) -> str:
    """(f) Write the page about the recording, and print its path."""
    try:
        return f"written {write_report(data_dir, out)}: open it first, in a browser; it shows what was recorded"
    except RolloutDataError as missing:
        return f"no page about the recording: {missing}"


def timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def evaluate(
    act: Callable[[np.ndarray], np.ndarray] | None, num_episodes: int, seed: int = 1000
) -> Episodes:
    """(e) Play one episode in each environment, with fixed seeds."""
    envs = make_envs(TASK, num_episodes)
    envs.action_space.seed(seed)
    observation, _ = envs.reset(seed=seed)
    returns, is_running, path = np.zeros(num_episodes), np.ones(num_episodes, bool), []
    while is_running.any():
        if is_running[0]:
            path.append(observation[0].copy())
        action = envs.action_space.sample() if act is None else act(observation)
        observation, reward, terminated, truncated, _ = envs.step(action)
        returns += reward * is_running
        is_running &= ~(terminated | truncated)
    envs.close()
    return Episodes(returns, np.array(path))


def main(arguments: list[str] | None = None) -> int:
    """Run all steps. Return 1 if a policy is worse than required (not with `--quick`)."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=Path("demo"), help="folder for the recording and the report"
    )
    parser.add_argument("--quick", action="store_true", help="a few seconds, without learning much")
    options = parser.parse_args(arguments)
    plan = QUICK if options.quick else Plan()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # small networks are slower with several threads
    data_dir = options.out / "data"
    shutil.rmtree(data_dir, ignore_errors=True)
    options.out.mkdir(parents=True, exist_ok=True)
    report = Report(TASK)
    expert = learn(plan, report)
    recording_s = record(expert, plan, data_dir)
    command_line(["info", str(data_dir)])  # (c) the output of `rollout-data info`
    student = clone(data_dir, plan)
    measure(data_dir, plan, recording_s, report)

    def act(observation: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return student(torch.as_tensor(observation, dtype=torch.float32)).numpy()

    players = {"random": None, "expert (PPO)": expert.act, "clone": act}
    for name in tqdm(players, desc="evaluating", unit=" policies"):
        report.episodes[name] = evaluate(players[name], plan.num_episodes)
    print(report.tables())
    print(f"written {report.draw(options.out / 'report.png')}")
    print(page_about(data_dir, options.out / "report.html"))
    if options.quick:
        return 0
    random, best, copy = (episodes.returns.mean() for episodes in report.episodes.values())
    is_learned = best >= MIN_EXPERT_OVER_RANDOM * random and copy >= MIN_CLONE_OVER_EXPERT * best
    print(f"mean return: random {random:.0f}, expert {best:.0f}, clone {copy:.0f}")
    print("the clone plays like the expert" if is_learned else "NOT LEARNED: see the table")
    return int(not is_learned)


if __name__ == "__main__":
    sys.exit(main())
