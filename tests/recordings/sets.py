"""Robomimic files for tests: values encode episode, frame and column, as in
`tests/data/formats`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np


def state(episode: int, length: int) -> np.ndarray:
    """float64 `[length, 3]`: 1000 * episode + 10 * frame + column."""
    return 1000.0 * episode + 10.0 * np.arange(length)[:, None] + np.arange(3)


def action(episode: int, length: int) -> np.ndarray:
    """float32 `[length, 2]`: -(100 * episode + frame) - column / 8."""
    return (-(100 * episode + np.arange(length)[:, None]) - np.arange(2) / 8).astype(np.float32)


def reward(episode: int, length: int) -> np.ndarray:
    """float64 `[length]`: 100 * episode + frame + 0.25."""
    return 100.0 * episode + np.arange(length) + 0.25


def write_demos(
    path: Path,
    lengths: Mapping[int, int] | Sequence[int],
    without_reward: Sequence[int] = (),
    without_final: Sequence[int] = (),
    masks: Mapping[str, Sequence[int]] | None = None,
    more: Mapping[int, Mapping[str, Any]] | None = None,
) -> Path:
    """Write demos by their numbers, with further datasets `more` for some of them.

    Return the path.
    """
    listed = dict(lengths) if isinstance(lengths, Mapping) else dict(enumerate(lengths))
    with h5py.File(path, "w") as file:
        data = file.create_group("data")
        data.attrs["total"] = sum(listed.values())
        data.attrs["env_args"] = json.dumps({"env_name": "Lift", "type": 1, "env_kwargs": {}})
        for number, length in listed.items():
            demo = data.create_group(f"demo_{number}")
            demo.attrs["num_samples"] = length
            demo["actions"] = action(number, length)
            demo["obs/low"] = state(number, length)
            if number not in without_final:
                demo["next_obs/low"] = state(number, length + 1)[1:]
            if number not in without_reward:
                demo["rewards"] = reward(number, length)
            for name, values in (more or {}).get(number, {}).items():
                if name in demo:
                    del demo[name]
                demo[name] = values
        for name, numbers in (masks or {}).items():
            file[f"mask/{name}"] = np.array([f"demo_{number}" for number in numbers], "S")
    return path
