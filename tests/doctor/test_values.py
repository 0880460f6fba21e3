"""Each case changes a sound recording a little, which no rule may mention, and clearly, which its rule must find."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout_data import RolloutWriter, doctor

LENGTH, RATE = 120, 50.0
Episode = dict[str, Any]


def sound(rng: np.random.Generator) -> list[Episode]:
    """Sixteen episodes of noisy oscillations with a clock and a body that stays near upright."""
    found = []
    for _ in range(16):
        time = np.arange(LENGTH)[:, None] / RATE
        joints = np.sin(3 * time + rng.uniform(0, 6, 6)) + 0.02 * rng.standard_normal((LENGTH, 6))
        turned = np.concatenate([np.ones((LENGTH, 1)), 0.1 * joints[:, :3]], 1)
        found.append(
            {
                "observation": {
                    "joints": joints.astype(np.float32),
                    "quat": (turned / np.linalg.norm(turned, axis=1, keepdims=True)).astype(np.float32),
                },
                "action": rng.normal(0, 0.5, (LENGTH, 3)).astype(np.float32),
                "reward": rng.normal(1, 0.1, LENGTH).astype(np.float32),
                "timestamp": time[:, 0],
            }
        )
    return found


def recorded(path: Path, episodes: list[Episode]) -> Path:
    with RolloutWriter(path, num_envs=1, durable=False, metadata={"frame_rate_hz": RATE}) as writer:
        for one in episodes:
            ends = np.arange(LENGTH)[:, None] == LENGTH - 1
            rows = {name: values[:, None] for name, values in one.items() if name != "observation"}
            observation = {name: values[:, None] for name, values in one["observation"].items()}
            writer.add_rollout(observation=observation, truncated=ends, **rows)
    return path


def joints(change: Callable[[np.ndarray, float], None]) -> Callable[[Episode, float], None]:
    return lambda episode, size: change(episode["observation"]["joints"], size)


def put(rows: Any, column: Any) -> Callable[[np.ndarray, float], None]:
    def change(values: np.ndarray, size: float) -> None:
        values[rows, column] = size

    return change


def late(episode: Episode, size: float) -> None:
    episode["timestamp"][60:] += size / RATE


def turn(episode: Episode, size: float) -> None:
    episode["observation"]["quat"] = np.roll(episode["observation"]["quat"], int(size), axis=1)


#: Code -> changes an episode by a size, the trajectories, a size that is nothing, and one that is a defect.
CASES: dict[str, tuple[Callable[[Episode, float], None], list[int], float, float]] = {
    "VAL01": (joints(put(7, 2)), [3], 0.5, np.nan),
    "VAL05": (joints(put(50, 1)), [3], 1.5, 5000.0),
    "VAL06": (joints(put(slice(10, 14), 1)), [2, 3, 9], 0.5, -9999.0),
    "VAL10": (joints(lambda values, size: values.__imul__(np.float32(size))), [2, 5], 1.3, 57.3),
    "VAL11": (lambda e, size: e["observation"]["quat"].__imul__(np.float32(size)), [4, 5], 1.001, 1.1),
    "VAL12": (lambda e, size: e["observation"]["quat"][40:60].__imul__(np.float32(size)), [4, 5], 1.0, -1.0),
    "VAL13": (turn, [4, 5, 6], 0, -1),
    "TIM01": (lambda e, size: e["timestamp"].__setitem__(30, e["timestamp"][29] + size), [2], 0.019, -0.01),
    "TIM03": (late, [3], 0.2, 4.0),
    "TIM06": (lambda e, size: e["timestamp"].__imul__(size), [1, 2], 1.001, 1000.0),
    "TIM07": (joints(lambda values, size: put(slice(30, 30 + int(size)), slice(None))(values, 0.4)), [6], 4, 30),
    "LRN07": (lambda e, size: e["reward"].__setitem__(5, size), [8], 1.1, 1e5),
    "LRN10": (lambda e, size: e["action"][int(size) :].__setitem__(slice(None), 0.25), [8, 9], 110, 0),
}


@pytest.mark.parametrize("code", CASES)
def test_a_defect_is_found_with_its_trajectories_and_a_small_change_is_not(code: str, tmp_path: Path) -> None:
    change, numbers, harmless, wrong = CASES[code]
    for size, is_wrong in ((harmless, False), (wrong, True)):
        episodes = sound(np.random.default_rng(5))
        for number in numbers:
            change(episodes[number], size)
        found = doctor(recorded(tmp_path / str(is_wrong), episodes), only=[code]).findings
        named = {number for one in found for number in one.trajectories}
        assert named == (set(numbers) if is_wrong else set())


def test_no_rule_says_anything_of_a_sound_recording(tmp_path: Path) -> None:
    assert [
        one.code for one in doctor(recorded(tmp_path / "a", sound(np.random.default_rng(1)))).at_least("warning")
    ] == []
