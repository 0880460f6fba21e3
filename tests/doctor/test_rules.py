"""Each rule of values, time and learning signals by itself.

It must not report a small change, and must find a defect in its trajectories and frames.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout_data import RolloutWriter, doctor
from rollout_data.tools.doctor.rule_table import RULES

LENGTH, RATE, NUM = 120, 50.0, 20
Episode = dict[str, Any]
Change = Callable[[list[Episode], float], None]
ALL = range(NUM)


def sound(rng: np.random.Generator) -> list[Episode]:
    """Return twenty episodes of noisy oscillations, with a clock and a body that stays near upright."""
    result = []
    for _ in ALL:
        time = np.arange(LENGTH)[:, None] / RATE
        joints = np.sin(3 * time + rng.uniform(0, 6, 6)) + 0.02 * rng.standard_normal((LENGTH, 6))
        turned = np.concatenate([np.ones((LENGTH, 1)), 0.1 * joints[:, :3]], 1)
        action = 0.4 * np.sin(5 * time + rng.uniform(0, 6, 3)) + 0.02 * rng.standard_normal(
            (LENGTH, 3)
        )
        result.append(
            {
                "observation": {
                    "joints": joints.astype(np.float32),
                    "quat": (turned / np.linalg.norm(turned, axis=1, keepdims=True)).astype(
                        np.float32
                    ),
                },
                "action": action.astype(np.float32),
                "reward": rng.normal(1, 0.1, LENGTH).astype(np.float32),
                "timestamp": time[:, 0],
            }
        )
    return result


def recorded(path: Path, episodes: list[Episode]) -> Path:
    """Record episodes. The key "said" of an episode has its notes, "terminated" its end."""
    box = {"low": [-4.0] * 3, "high": [4.0] * 3}
    with RolloutWriter(
        path, 1, durable=False, metadata={"frame_rate_hz": RATE, "action_space": box}
    ) as writer:
        for item in episodes:
            is_last = np.arange(LENGTH)[:, None] == LENGTH - 1
            is_end = item.get("terminated", False)
            rows = {
                name: item[name][:, None]
                for name in item
                if name not in ("observation", "said", "terminated")
            }
            observation = {name: values[:, None] for name, values in item["observation"].items()}
            notes = [[item.get("said")] if last else None for last in is_last[:, 0]]
            writer.add_rollout(
                observation=observation, terminated=is_last & is_end, truncated=is_last & (not is_end),
                episode=notes, **rows,
            )  # fmt: skip
    return path


def of(name: str, change: Callable[[np.ndarray, float], Any], numbers: Iterable[int]) -> Change:
    """Return a change of the rows of one field in some episodes, in place."""

    def changed(episodes: list[Episode], size: float) -> None:
        for number in numbers:
            item = episodes[number]
            change(item[name] if name in item else item["observation"][name], size)

    return changed


def put(rows: Any, column: Any = slice(None)) -> Callable[[np.ndarray, float], None]:
    return lambda values, size: values.__setitem__((rows, column), size)


def held_from(column: Any = ..., value: float = 0.25) -> Callable[[np.ndarray, float], None]:
    """Return a change that sets one value from a frame on."""
    return lambda values, size: values[int(size) :].__setitem__(
        ... if column is ... else (..., column), value
    )


def added(name: str, give: Callable[[Episode, float], np.ndarray]) -> Change:
    """Return a change that adds a field, which is a function of the others."""

    def changed(episodes: list[Episode], size: float) -> None:
        for episode in episodes:
            group, _, last = name.rpartition("/")
            (episode[group] if group else episode)[last] = give(episode, size)

    return changed


def ticks_or_halves(values: np.ndarray, size: float) -> None:
    values[:] = values.astype(np.float16) if size else np.round(values * 256) / 256


def turning(values: np.ndarray, size: float) -> None:
    angle = 0.12 * np.arange(LENGTH) + 0.01 * values[:, 3]
    values[:, 3] = (angle + np.pi) % (2 * np.pi) - np.pi if size else angle


def doubled(episodes: list[Episode], size: float) -> None:
    at = np.arange(LENGTH)
    at[7 :: int(size)] -= 1
    for item in episodes:
        item["action"] = item["action"][at]
        item["observation"] = {name: values[at] for name, values in item["observation"].items()}


def counting(episodes: list[Episode], size: float) -> None:
    """Add an encoder of one tick for each frame, in episode 7 of `size` ticks."""
    for number, episode in enumerate(episodes):
        episode["encoder"] = (
            (1 + np.arange(LENGTH) * int(size if number == 7 else 1)) % 256
        ).astype(np.uint8)


def delayed(episodes: list[Episode], size: float) -> None:
    rng = np.random.default_rng(0)
    for episode in episodes:
        episode["action"] = rng.normal(0, 0.5, (LENGTH, 3)).astype(np.float32)
        episode["observation"]["arm"] = np.roll(episode["action"], int(size), axis=0)


def rough(values: np.ndarray, size: float) -> None:
    values += np.random.default_rng(0).normal(0, size, values.shape).astype(np.float32)


def sparse(values: np.ndarray, size: float) -> None:
    values[:] = 0
    values[int(size)] = 1


def won_against_ends(episodes: list[Episode], size: float) -> None:
    for number, episode in enumerate(episodes):
        episode["terminated"] = number % 2 == 0
        episode["said"] = {"success": episode["terminated"] != (number < size)}


def won_before_the_end(episodes: list[Episode], size: float) -> None:
    for number, episode in enumerate(episodes):
        episode["success"] = np.arange(LENGTH) >= LENGTH - 1 - (size if 1 <= number <= 4 else 0)


def tasks(numbers: Iterable[int], task: str) -> Change:
    """Return a change that notes the task "walk", and another task in the first `size` of some episodes."""

    def changed(episodes: list[Episode], size: float) -> None:
        for episode in episodes:
            episode["said"] = {"task": "walk"}
        for number in list(numbers)[: int(size)]:
            episodes[number]["said"] = {"task": task}

    return changed


@dataclass(frozen=True)
class Case:
    """A change by a size, a harmless size, a size that is a defect, and the expected finding.

    Attributes:
        trajectories: Empty if the finding concerns the whole recording.
        frames: (start, stop) in each of the trajectories.
    """

    change: Change
    harmless: float
    wrong: float
    trajectories: Iterable[int] = ()
    frames: tuple[tuple[int, int], ...] = ()


WHOLE = ((0, LENGTH),)
CASES: dict[str, Case] = {
    "VAL01": Case(of("joints", put(7, 2), [3]), 0.5, np.nan, [3], ((7, 8),)),
    "VAL02": Case(of("action", held_from(1), ALL), LENGTH - 1, 0),
    "VAL03": Case(of("joints", held_from(2), ALL), LENGTH - 1, 0),
    "VAL04": Case(of("joints", held_from(4), range(16, 20)), 60, 0, range(16, 20), WHOLE),
    "VAL05": Case(of("joints", put(50, 1), [3]), 1.5, 5000.0, [3], ((50, 51),)),
    "VAL06": Case(of("joints", put(slice(10, 14), 1), [2, 3, 9]), 0.5, -9999.0, [2, 3, 9], ((10, 14),)),
    "VAL07": Case(of("action", lambda v, size: np.clip(v * np.float32(size), -0.9, 0.9, out=v), ALL), 0.3, 8),
    "VAL08": Case(of("joints", ticks_or_halves, ALL), 0, 1),
    "VAL09": Case(of("joints", put(slice(0, None, 4), 2), ALL), 1e-30, 1e-40),
    "VAL10": Case(of("joints", lambda v, size: v.__imul__(np.float32(size)), [2, 5]), 1.3, 57.3, [2, 5], WHOLE),
    "VAL11": Case(of("quat", lambda v, size: v.__imul__(np.float32(size)), [4, 5]), 1.001, 1.1, [4, 5], WHOLE),
    "VAL12": Case(
        of("quat", lambda v, size: v[40:60].__imul__(np.float32(size)), [4, 5]), 1, -1, [4, 5], ((39, 41), (59, 61))
    ),
    "VAL13": Case(
        of("quat", lambda v, size: put(...)(v, np.roll(v, int(size), axis=1)), [4, 5, 6]), 0, -1, [4, 5, 6], WHOLE
    ),
    "VAL14": Case(of("joints", turning, [1, 7]), 0, 1, [1, 7], ((26, 28), (78, 80))),
    "VAL15": Case(of("action", put(7, 2), [3]), 3.9, 4.5, [3], ((7, 8),)),
    "VAL16": Case(of("joints", lambda v, size: v[:, 5].__iadd__(np.float32(size)), range(10, 20)), 0.05, 3,
                  range(10, 20)),
    "VAL18": Case(of("joints", lambda v, size: v[:, 2].__iadd__(np.float32(size)), ALL), 100, 1e4),
    "VAL17": Case(counting, 1, 3, [7], ((84, 86),)),
    "TIM01": Case(of("timestamp", lambda v, size: v.__setitem__(30, v[29] + size), [2]), 0.019, -0.01, [2],
                  ((29, 31),)),
    "TIM02": Case(of("timestamp", lambda v, size: v.__iadd__(size / RATE * np.sin(2 * np.arange(LENGTH))), ALL),
                  0.05, 0.4),
    "TIM03": Case(of("timestamp", lambda v, size: v[60:].__iadd__(size / RATE), [3]), 0.2, 4.0, [3], ((59, 61),)),
    "TIM04": Case(doubled, 60, 9, ALL),
    "TIM05": Case(of("timestamp", lambda v, size: v.__imul__(size), ALL), 1.03, 1.2),
    "TIM06": Case(of("timestamp", lambda v, size: v.__imul__(size), [1, 2]), 1.001, 1000.0, [1, 2], WHOLE),
    "TIM07": Case(of("joints", lambda v, size: put(slice(30, 30 + int(size)))(v, 0.4), [6]), 4, 30, [6], ((30, 60),)),
    "TIM08": Case(delayed, 1, 8),
    "TIM09": Case(of("action", lambda v, size: put(slice(0, int(size)))(v, v[0]), range(6)), 20, 50, range(6),
                  ((0, 50),)),
    "TIM10": Case(of("action", lambda v, size: put(slice(-int(size), None))(v, v[-1]), range(6)), 20, 50, range(6),
                  ((71, LENGTH),)),
    "TIM12": Case(of("action", rough, [3, 9]), 0.01, 0.5, [3, 9], WHOLE),
    "TIM13": Case(added("camera_time", lambda one, size: one["timestamp"] * size + 1e-3), 1.001, 1.1, ALL),
    "LRN01": Case(added("observation/arm", lambda one, size: one["action"] + np.float32(size)), 0.01, 0),
    "LRN02": Case(added("observation/arm", lambda one, size: np.roll(one["action"], 1, axis=0) + np.float32(size)),
                  0.01, 0),
    "LRN03": Case(of("reward", held_from(value=0), ALL), LENGTH - 1, 0),
    "LRN04": Case(of("reward", sparse, ALL), LENGTH - 1, 0, ALL, ((0, 1),)),
    "LRN05": Case(won_against_ends, 2, 6, range(6)),
    "LRN06": Case(won_before_the_end, 10, 40, range(1, 5), ((80, LENGTH),)),
    "LRN07": Case(of("reward", lambda v, size: v.__setitem__(5, size), [8]), 1.1, 1e5, [8], WHOLE),
    "LRN08": Case(tasks(range(19), "run"), 10, 19),
    "LRN09": Case(tasks([3, 9], ""), 0, 2, [3, 9]),
    "LRN10": Case(of("action", held_from(), [8, 9]), 110, 0, [8, 9], WHOLE),
}  # fmt: skip


@pytest.mark.parametrize("code", CASES)
def test_a_defect_is_found_with_its_trajectories_and_a_small_change_is_not(
    code: str, tmp_path: Path
) -> None:
    case = CASES[code]
    for size, is_wrong in ((case.harmless, False), (case.wrong, True)):
        episodes = sound(np.random.default_rng(5))
        case.change(episodes, size)
        actual = doctor(recorded(tmp_path / str(is_wrong), episodes), only=[code, "FIL00"]).findings
        assert [finding.code for finding in actual] == [code] * is_wrong
    named = set(actual[0].trajectories)
    assert named == set(case.trajectories)
    assert set(actual[0].frames) == {(number, *span) for number in named for span in case.frames}


def test_each_rule_of_values_time_and_learning_has_a_case() -> None:
    assert set(CASES) == {
        rule.code for rule in RULES if rule.group in ("values", "time", "learning")
    }


def test_a_sound_recording_has_no_finding(tmp_path: Path) -> None:
    path = recorded(tmp_path / "a", sound(np.random.default_rng(1)))
    assert [finding.code for finding in doctor(path).findings if finding.code != "PRV01"] == []
