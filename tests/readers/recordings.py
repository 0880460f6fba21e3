"""Recordings for the classes of other systems: several cameras under one name, open ends, missing fields."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np

import rollout_data
from rollout_data import RolloutWriter

LENGTHS = (5, 3, 4)
CAMERAS = {"front": 10, "wrist": 90}


def observed(episode: int, frame: int) -> dict[str, Any]:
    """Return an observation of one environment: `state` and two pictures whose values encode episode and frame."""
    images = {
        name: np.full((1, 40, 48, 3), first + 20 * episode + frame, np.uint8)
        for name, first in CAMERAS.items()
    }
    return {"state": np.full((1, 3), 100 * episode + frame, np.float32), "images": images}


def record(folder: Path, is_open: bool = False) -> Any:
    """Record three episodes; with `is_open` the last one has no end."""
    with RolloutWriter(folder, 1, durable=False) as writer:
        for episode, length in enumerate(LENGTHS):
            for frame in range(length):
                has_end = not (is_open and episode == len(LENGTHS) - 1)
                is_end = frame == length - 1 and has_end
                final = {"final_observation": observed(episode, length)} if is_end else {}
                writer.add(
                    observation=observed(episode, frame),
                    action=np.full((1, 2), 10 * episode + frame, np.float32),
                    reward=np.full(1, 10 * episode + frame, np.float32),
                    terminated=[is_end and episode != 1],
                    truncated=[is_end and episode == 1],
                    **final,
                )
    return rollout_data.open(folder)


def record_with_gaps(path: Path) -> Any:
    """Write demos. The second demo lacks a flag, a float and an integer."""
    with h5py.File(path, "w") as file:
        file.create_group("data").attrs["env_args"] = json.dumps(
            {"env_name": "Lift", "type": 1, "env_kwargs": {}}
        )
        for number, length in enumerate(LENGTHS):
            rows = np.arange(length) + 10.0 * number
            demo = file.create_group(f"data/demo_{number}")
            demo["actions"] = np.stack([rows, -rows], 1).astype(np.float32)
            demo["rewards"] = rows
            low = np.stack([np.append(rows, rows[-1] + 1)] * 3, 1)
            demo["obs/low"], demo["next_obs/low"] = low[:-1], low[1:]
            if number != 1:
                demo["obs/touch"], demo["next_obs/touch"] = low[:-1, :2], low[1:, :2]
                demo["obs/is_held"], demo["next_obs/is_held"] = low[:-1, 0] > 0, low[1:, 0] > 0
                demo["count"] = rows.astype(np.int64)
    return rollout_data.open(path)
