"""record_demonstrations: run a policy in parallel environments and record what happens.

One rule: this is the loop only. What a step means is the adapter's (`gym_adapter.py`), what is
kept is the writer's.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from storage.errors import UsageError

from .block_folder import BlockFolder
from .block_header import TERMINATED, TRUNCATED
from .gym_adapter import EnvAdapter, PolicyAdapter, adapt_env, copied, named
from .index import TrajectoryIndex
from .writer import RolloutWriter


@dataclass(frozen=True)
class RecordingSummary:
    """What a call of `record_demonstrations` did.

    Attributes:
        data_dir: Where the data are.
        num_frames, num_trajectories: In the dataset now, what was there before included.
        num_new_frames, num_new_trajectories: Recorded and kept by this call.
        num_steps: Steps of all envs that it took.
        num_nonfinite_rewards: NaN or infinite rewards among them.
        mean_return: Mean sum of rewards (of the first reward) over all trajectories that ended, kept
            or not; NaN if none did.
        duration_s: Wall-clock time.
    """

    data_dir: Path
    num_frames: int
    num_trajectories: int
    num_new_frames: int
    num_new_trajectories: int
    num_steps: int
    num_nonfinite_rewards: int
    mean_return: float
    duration_s: float


def record_demonstrations(
    env: Any,
    policy: Any,
    data_dir: str | os.PathLike[str],
    *,
    min_timesteps: int = 0,
    min_trajectories: int = 0,
    success_only: bool = False,
    obs_segments: Mapping[str, Sequence[int]] | None = None,
    obs_disassemble_mapping: Mapping[str, str] | None = None,
    keep_unfinished: bool = True,
    metadata: Mapping[str, Any] | None = None,
    seed: int | None = None,
    show_progress: bool = True,
    **writer_options: Any,
) -> RecordingSummary:
    """Record a policy until a dataset holds at least so many frames and trajectories.

    A folder that holds data already is continued: its frames and the trajectories that ended count. The parts of a
    `spaces.Tuple` are recorded under the names "0", "1", ...

    Args:
        env: A gymnasium vector env (any autoreset mode), or a batched simulator with `num_envs` and
            `step(actions) -> obs, privileged_obs, rewards, dones, infos` (`infos["time_outs"]`).
        policy: Observation -> actions; or an object with `act_inference` or `act`. A torch module gets
            tensors, anything else the observation as the environment gives it.
        data_dir: The data folder.
        min_timesteps: Frames that the dataset holds at least when this returns.
        min_trajectories: Trajectories that it holds at least, those in progress not counted.
        success_only: Keep only trajectories that end by a timeout (see `RolloutWriter`).
        obs_segments: Component -> shape, to cut a flat observation into components.
        obs_disassemble_mapping: Component -> codec.
        keep_unfinished: Keep the trajectories in progress at the end as open ones.
        metadata: More context for metadata.json.
        seed: Of the environments' first reset. A folder that is continued makes another seed of it and of the
            number of trajectories that it holds, so that the same call does not record the same episodes again.
        show_progress: Draw a progress bar.
        writer_options: Further options of `RolloutWriter`.

    Returns:
        A summary. `Ctrl-C` publishes what was recorded and then raises `KeyboardInterrupt` as usual.
    """
    for name, value in (("min_timesteps", min_timesteps), ("min_trajectories", min_trajectories)):
        if isinstance(value, bool) or not isinstance(value, Real) or math.isnan(value):
            raise UsageError("record", "", f"{name} a number", repr(value))
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, Integral)):
        raise UsageError("record", "", "seed an integer or None", repr(seed))
    if min_timesteps <= 0 and min_trajectories <= 0:
        raise UsageError("record", "", "min_timesteps or min_trajectories above 0", "neither")
    adapter, actor = adapt_env(env), PolicyAdapter(policy)
    start_s = time.monotonic()
    frames_before, trajectories_before, ended_before = _count(Path(data_dir))
    goals = (min_timesteps - frames_before, min_trajectories - ended_before)
    if max(goals) <= 0:
        return RecordingSummary(
            Path(data_dir), frames_before, trajectories_before, 0, 0, 0, 0, float("nan"), time.monotonic() - start_s
        )
    if seed is not None and seed >= 0 and trajectories_before:
        seed = int(np.random.SeedSequence((seed, trajectories_before)).generate_state(1)[0] >> 1)
    observation, privileged = adapter.start(seed)
    context = {
        "env": adapter.name,
        "policy": actor.name,
        "min_timesteps": min_timesteps,
        "min_episodes": min_trajectories,
        "use_critic_obs": privileged is not None,
        **(metadata or {}),
    }
    with RolloutWriter(
        data_dir,
        adapter.num_envs,
        obs_segments=obs_segments,
        obs_disassemble_mapping=obs_disassemble_mapping,
        metadata=context,
        success_only=success_only,
        **writer_options,
    ) as writer:
        loop = _Loop(adapter, actor, writer, count_unfinished=keep_unfinished)
        loop.run(observation, privileged, goals, show_progress)
        if not keep_unfinished:
            writer.discard(np.arange(adapter.num_envs))
    return RecordingSummary(
        data_dir=Path(data_dir),
        num_frames=frames_before + writer.num_frames,
        num_trajectories=trajectories_before + writer.num_trajectories,
        num_new_frames=writer.num_frames,
        num_new_trajectories=writer.num_trajectories,
        num_steps=loop.num_steps,
        num_nonfinite_rewards=writer.num_nonfinite_rewards,
        mean_return=loop.returns.mean,
        duration_s=time.monotonic() - start_s,
    )


class _Loop:
    """The steps of a recording."""

    def __init__(
        self, adapter: EnvAdapter, actor: PolicyAdapter, writer: RolloutWriter, count_unfinished: bool
    ) -> None:
        self._adapter, self._actor, self._writer = adapter, actor, writer
        self._count_unfinished = count_unfinished
        self.returns = _Returns(adapter.num_envs)
        self.num_steps = 0

    def run(self, observation: Any, privileged: Any, goals: tuple[int, int], show_progress: bool) -> None:
        """Step until both goals (frames, trajectories) are reached."""
        shown = int(goals[1] > 0)
        unit = (" frames", " trajectories")[shown]
        with tqdm(total=goals[shown], desc="recording", unit=unit, disable=not show_progress) as bar:
            while any(have < goal for have, goal in zip(self._progress(), goals, strict=True)):
                # Copies: a simulator may write its next observation into the same memory.
                before = {"observation": named(copied(observation)), "privileged_observation": copied(privileged)}
                step = self._adapter.step(self._actor(observation))
                finals = {"final_observation": named(step.record.pop("final_observation", None))}
                self._writer.add(**before, action=named(step.action), **finals, **step.record)
                observation, privileged = step.observation, step.privileged_observation
                self.returns.add(step.record)
                self.num_steps += 1
                bar.update(min(self._progress()[shown], goals[shown]) - bar.n)

    def _progress(self) -> tuple[int, int]:
        writer = self._writer
        return writer.num_frames if self._count_unfinished else writer.num_finished_frames, writer.num_trajectories


class _Returns:
    """Mean return of the trajectories that ended."""

    def __init__(self, num_envs: int) -> None:
        self._running = np.zeros(num_envs)
        self._sum = 0.0
        self._count = 0

    @property
    def mean(self) -> float:
        return self._sum / self._count if self._count else float("nan")

    def add(self, record: Mapping[str, Any]) -> None:
        reward = _array(record["reward"]).reshape(len(self._running), -1)[:, 0]
        mask = record.get("env_mask")
        self._running += reward if mask is None else np.where(mask, reward, 0)
        ends = [_array(record[name]).reshape(-1) != 0 for name in ("done", "terminated", "truncated") if name in record]
        done = np.logical_or.reduce(ends) & (True if mask is None else mask)
        self._sum += float(self._running[done].sum())
        self._count += int(done.sum())
        self._running[done] = 0


def _array(value: Any) -> np.ndarray:
    return value.detach().cpu().float().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)


def _count(data_dir: Path) -> tuple[int, int, int]:
    """Count what a folder holds: frames, trajectories, and those of them that ended; nothing if it is not there."""
    if not data_dir.is_dir():
        return 0, 0, 0
    folder = BlockFolder(data_dir)
    folder.refresh()
    index = TrajectoryIndex(list(folder.blocks.values()), folder.built)
    return index.num_frames, len(index), int(((index.flags & (TERMINATED | TRUNCATED)) != 0).sum())
