"""Recordings whose every value encodes its origin, for tests of readers.

A frame's observation is `[trajectory, frame, 1000 * trajectory + frame]`; actions and rewards are
functions of it, so that a wrong index shows by arithmetic. Final observations have a half frame.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rollout_data import RolloutWriter


@dataclass(frozen=True)
class Recorded:
    """One trajectory that was recorded."""

    number: int
    length: int
    end: str  # "terminated", "truncated" or "open"
    has_final: bool


def observation_of(trajectory, frame):
    return np.array([trajectory, frame, 1000 * trajectory + frame], np.float32)


def record(
    data_dir: Path,
    lengths: list[int],
    num_envs: int = 1,
    ends: list[str] | None = None,
    with_final: bool | str = False,  # "observation": without a privileged part
    first_number: int = 0,
    flush_every: int | None = None,
    **options,
) -> list[Recorded]:
    """Record trajectories of these lengths, assigned to envs that become free.

    Return them in the order of completion.

    The last trajectory of an env is "open" only if `ends` contains "open". Envs without a
    trajectory are masked.
    """
    ends = ends or ["terminated"] * len(lengths)
    queue = [
        Recorded(first_number + k, n, e, bool(with_final) and e != "open")
        for k, (n, e) in enumerate(zip(lengths, ends, strict=True))
    ]
    current: list[Recorded | None] = [None] * num_envs
    frame = [0] * num_envs
    done_list = []
    with RolloutWriter(data_dir, num_envs, durable=False, **options) as writer:
        step = 0
        while True:
            for env in range(num_envs):
                if current[env] is None and queue:
                    current[env], frame[env] = queue.pop(0), 0
            if all(item is None for item in current):
                break
            observation = np.zeros((num_envs, 3), np.float32)
            final = np.zeros((num_envs, 3), np.float32)
            done, timeout, mask = (np.zeros(num_envs, bool) for _ in range(3))
            for env, item in enumerate(current):
                if item is None:
                    continue
                mask[env] = True
                observation[env] = observation_of(item.number, frame[env])
                final[env] = observation_of(item.number, frame[env] + 0.5)
                if frame[env] == item.length - 1 and item.end != "open":
                    done[env], timeout[env] = True, item.end == "truncated"
            extra = {"final_observation": final} if with_final else {}
            if with_final and with_final != "observation":
                extra["final_privileged_observation"] = -final
            writer.add(
                observation=observation,
                privileged_observation=-observation,
                action=observation[:, :2] * 10,
                reward=observation[:, 2],
                done=done,
                timeout=timeout,
                env_mask=mask,
                **extra,
            )
            for env, item in enumerate(current):
                if item is not None:
                    frame[env] += 1
                    if frame[env] == item.length:
                        done_list.append(item)
                        # An open trajectory stays open, so nothing may follow it in its env.
                        current[env] = None
                        if item.end == "open" and queue:
                            raise ValueError("an open trajectory must be the last of the recording")
            step += 1
            if flush_every and step % flush_every == 0:
                writer.flush()
    return done_list


def frames_of(batch):
    """Return (step, env, trajectory, frame) of every valid transition of a batch."""
    steps, envs = batch.valid.nonzero(as_tuple=True)
    values = batch.observation[steps, envs]
    return [
        (int(t), int(n), int(v[0]), int(v[1])) for t, n, v in zip(steps, envs, values, strict=True)
    ]


def drain(dataset, num_steps):
    """Return all batches until the end."""
    batches = []
    while True:
        try:
            batches.append(dataset.get_batch(num_steps))
        except StopIteration:
            return batches
