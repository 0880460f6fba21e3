"""Single defects, made in the arrays of a sound recording before it is written in any format.

A function changes the world, and returns the numbers of the episodes that the doctor must name;
None for the whole recording.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.doctor.worlds import Array, Ep, Rng, World

Named = set[int] | None
_NOT_FLAT = ("own", "robomimic", "lerobot", "minari")
_TIMED = ("own", "robomimic", "isaaclab")


@dataclass(frozen=True)
class Made:
    """A defect: the code of its rule, the sound world, the change, and the formats that can hold it."""

    code: str
    world: str
    change: Callable[[World, Rng], Named]
    formats: Sequence[str] = ("own", "robomimic", "minari", "lerobot", "d4rl", "folders")


VALUES: dict[str, Made] = {}


def defect(
    code: str, world: str = "walker", formats: Sequence[str] | None = None, **variants: Any
) -> Any:
    """Register a defect, or one for each variant: name -> further argument."""

    def register(change: Callable[..., Named]) -> Callable[..., Named]:
        name = change.__name__
        for suffix, extra in (variants or {"": None}).items():
            call = change if not variants else (lambda w, r, g=extra: change(w, r, g))
            full = f"{name}_{suffix}".rstrip("_")
            VALUES[full] = Made(code, world, call, formats or Made.formats)
        return change

    return register


def some(rng: Rng, world: World, count: int = 1) -> list[int]:
    return sorted(rng.choice(len(world), count, replace=False).tolist())


def _each(
    world: World, name: str, change: Callable[[Array, Ep], Array], finals: bool = True
) -> None:
    """Replace a field of all episodes, and its part of final observations."""
    for episode in world.episodes:
        episode.fields[name] = change(episode.fields[name], episode)
        if finals and episode.final and name in episode.final:
            episode.final[name] = change(episode.final[name][None], episode)[0]


def _column(world: World, name: str, dim: int, change: Callable[[Array, Ep], Any]) -> None:
    def changed(values: Array, one: Ep) -> Array:
        values = values.copy()
        values[:, dim] = change(values[:, dim], one)
        return values

    _each(world, name, changed)


# Values


@defect("VAL01", nan=np.nan, inf=np.inf, minus_inf=-np.inf)
def not_finite(world: World, rng: Rng, value: float) -> Named:
    chosen = some(rng, world, 2)
    for number in chosen:
        rows = world[number].fields["observation"]
        rows[int(rng.integers(len(rows))), int(rng.integers(rows.shape[1]))] = value
    return set(chosen)


@defect("VAL01")
def nan_action(world: World, rng: Rng) -> Named:
    (number,) = some(rng, world)
    world[number].fields["action"][-3:] = np.nan
    return {number}


@defect("VAL01", formats=("own", "minari", "d4rl"))
def nan_reward(world: World, rng: Rng) -> Named:
    (number,) = some(rng, world)
    world[number].fields["reward"][3] = np.nan
    return {number}


@defect("VAL02")
def dead_action(world: World, rng: Rng) -> Named:
    _column(world, "action", int(rng.integers(6)), lambda values, _: 0.0)
    return None


@defect("VAL03")
def constant_observation(world: World, rng: Rng) -> Named:
    _column(world, "observation", 4, lambda values, _: 0.73)
    return None


@defect("VAL18")
def nearly_held_joint(world: World, rng: Rng) -> Named:
    _column(world, "observation", 4, lambda values, _: 1.57 + 1e-4 * np.tanh(values))
    return None


@defect("VAL04", field=None)
def died_sensor(world: World, rng: Rng, _: Any) -> Named:
    first = 16
    for episode in world.episodes[first:]:
        episode.fields["observation"][:, 5] = episode.final["observation"][5] = 0.4  # type: ignore[index]
    return set(range(first, len(world)))


@defect("VAL05", "arm", _NOT_FLAT)
def outlier(world: World, rng: Rng) -> Named:
    (number,) = some(rng, world)
    rows = world[number].fields["observation/joint_pos"]
    rows[int(rng.integers(5, len(rows) - 5)), 3] = 4000.0
    return {number}


@defect("VAL06", "arm", _NOT_FLAT, minus_9999=-9999.0, uint16_max=65535.0)
def placeholder(world: World, rng: Rng, value: float) -> Named:
    chosen = some(rng, world, 3)
    for number in chosen:
        start = int(rng.integers(2, 30))
        world[number].fields["observation/ee_pos"][start : start + 4] = value
    return set(chosen)


@defect("VAL07")
def saturated_action(world: World, rng: Rng) -> Named:
    _each(world, "action", lambda values, _: np.clip(values * 4, -0.9, 0.9).astype(np.float32))
    return None


@defect("VAL08", float16=np.float16, bfloat16=None)
def narrowed(world: World, rng: Rng, kind: Any) -> Named:
    def cast(values: Array, _: Ep) -> Array:
        if kind is None:
            return (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
        return values.astype(kind).astype(np.float32)

    _each(world, "observation", cast)
    return None


@defect("VAL09")
def denormals(world: World, rng: Rng) -> Named:
    for episode in world.episodes:
        episode.fields["observation"][::4, 2] = np.float32(1e-40)
    return None


@defect("VAL10", "arm", _NOT_FLAT, degrees=57.29578, millimetres=1000.0, centimetres=100.0)
def scale_jumps(world: World, rng: Rng, factor: float) -> Named:
    chosen = some(rng, world, 3)
    name = "observation/joint_pos" if factor < 100 else "observation/ee_pos"
    for number in chosen:
        world[number].fields[name] = (world[number].fields[name] * factor).astype(np.float32)
        world[number].final[name] = (world[number].final[name] * factor).astype(np.float32)  # type: ignore[index]
    return set(chosen)


@defect("VAL11", "arm", _NOT_FLAT)
def quaternion_norm(world: World, rng: Rng) -> Named:
    chosen = some(rng, world, 4)
    for number in chosen:
        world[number].fields["observation/ee_quat"] *= np.float32(1.1)
    return set(chosen)


@defect("VAL12", "arm", _NOT_FLAT)
def quaternion_flips(world: World, rng: Rng) -> Named:
    chosen = some(rng, world, 5)
    for number in chosen:
        rows = world[number].fields["observation/ee_quat"]
        rows[len(rows) // 3 : len(rows) // 2] *= -1
    return set(chosen)


@defect("VAL13", "arm", _NOT_FLAT)
def quaternion_order(world: World, rng: Rng) -> Named:
    chosen = some(rng, world, 6)
    for number in chosen:
        item = world[number]
        item.fields["observation/ee_quat"] = np.roll(item.fields["observation/ee_quat"], -1, 1)
        item.final["observation/ee_quat"] = np.roll(item.final["observation/ee_quat"], -1)  # type: ignore[index]
    return set(chosen)


@defect("VAL14")
def wraps(world: World, rng: Rng) -> Named:
    for episode in world.episodes:
        angle = np.cumsum(rng.normal(0.12, 0.03, episode.length + 1)) + rng.uniform(-3, 3)
        angle = (angle + np.pi) % (2 * np.pi) - np.pi
        episode.fields["observation"][:, 3], episode.final["observation"][3] = angle[:-1], angle[-1]  # type: ignore[index]
    return None


@defect("VAL15", formats=("own",))
def out_of_bounds(world: World, rng: Rng) -> Named:
    world.metadata["action_space"] = {
        "type": "Box",
        "low": [-1.0] * 6,
        "high": [1.0] * 6,
        "shape": [6],
    }
    (number,) = some(rng, world)
    world[number].fields["action"][5:9] *= 1.0
    world[number].fields["action"][7, 2] = 1.7
    return {number}


@defect("VAL16")
def drift(world: World, rng: Rng) -> Named:
    for episode in world.episodes[12:]:
        episode.fields["observation"][:, 6] += 2.5
        episode.final["observation"][6] += 2.5  # type: ignore[index]
    return None


@defect("VAL17", formats=("own", "robomimic", "lerobot"), uint8=np.uint8, int16=np.int16)
def integer_overflow(world: World, rng: Rng, kind: Any) -> Named:
    step = 9 if kind == np.uint8 else 3001
    for episode in world.episodes:
        values = (1 + step * np.arange(episode.length) + rng.integers(0, 3, episode.length)).astype(
            np.int64
        )
        episode.fields["encoder"] = values.astype(kind)[:, None]
    return None


# Time


def _time(world: World, change: Callable[[Array], Array], chosen: Sequence[int]) -> Named:
    for number in chosen:
        world[number].fields["timestamp"] = change(world[number].fields["timestamp"].copy())
    return set(chosen)


@defect("TIM01", "arm", _TIMED, backwards=-0.2, twice=None)
def not_increasing(world: World, rng: Rng, jump: float | None) -> Named:
    def change(time: Array) -> Array:
        time[20] = time[19] if jump is None else time[19] + jump
        return time

    return _time(world, change, some(rng, world, 2))


@defect("TIM02", "arm", _TIMED)
def jitter(world: World, rng: Rng) -> Named:
    def change(time: Array) -> Array:
        return np.cumsum(rng.uniform(0.6, 1.4, len(time)) / 20)

    _time(world, change, range(len(world)))
    return None


@defect("TIM03", "arm", _TIMED)
def dropped_frames(world: World, rng: Rng) -> Named:
    chosen = some(rng, world, 3)
    for number in chosen:
        item, start = world[number], int(rng.integers(10, 30))
        keep = np.ones(item.length, bool)
        keep[start : start + 4] = False
        item.fields = {name: values[keep] for name, values in item.fields.items()}
    return set(chosen)


@defect("TIM04", formats=("own", "robomimic", "minari", "d4rl", "folders"))
def repeated_frames(world: World, rng: Rng) -> Named:
    for item in world.episodes:
        at = np.arange(item.length)
        at[7::9] -= 1
        item.fields = {name: values[at] for name, values in item.fields.items()}
    return None


@defect("TIM05", "arm", ("own",))
def wrong_rate(world: World, rng: Rng) -> Named:
    world.metadata["frame_rate_hz"] = 30.0
    return None


@defect("TIM06", "arm", _TIMED, milliseconds=1e3, nanoseconds=1e9)
def time_unit(world: World, rng: Rng, factor: float) -> Named:
    return _time(world, lambda time: time * factor, some(rng, world, 2))


@defect("TIM07", "arm", _NOT_FLAT)
def frozen_sensor(world: World, rng: Rng) -> Named:
    (number,) = some(rng, world)
    for name in ("observation/joint_pos",):
        rows = world[number].fields[name]
        rows[15:35] = rows[15]
    return {number}


@defect("TIM08", "arm", ("own", "robomimic", "lerobot"))
def lag(world: World, rng: Rng) -> Named:
    for episode in world.episodes:
        joints = episode.fields["observation/joint_pos"]
        noisy = np.concatenate([joints[8:], np.repeat(joints[-1:], 8, 0)]) + rng.normal(
            0, 1e-3, joints.shape
        )
        episode.fields["action"] = noisy.astype(np.float32)
    return None


def _idle(world: World, rng: Rng, is_start: bool) -> Named:
    chosen = some(rng, world, 10)
    for number in chosen:
        item = world[number]
        at = 0 if is_start else item.length - 1
        still = {
            name: np.repeat(values[at : at + 1], 45, 0) for name, values in item.fields.items()
        }
        for name, values in still.items():
            if name.startswith("observation") and values.shape[1] > 1:
                still[name] = (values + rng.normal(0, 2e-4, values.shape)).astype(np.float32)
        still["reward"] = np.zeros(45, np.float32)
        pieces = (still, item.fields) if is_start else (item.fields, still)
        last = item.fields["reward"][-1]
        item.fields = {
            name: np.concatenate([piece[name] for piece in pieces]) for name in item.fields
        }
        item.fields["reward"][:] = 0
        item.fields["reward"][-1] = last
        item.fields["timestamp"] = np.arange(item.length) / 20
    return set(chosen)


@defect("TIM09", "arm", _NOT_FLAT)
def idle_start(world: World, rng: Rng) -> Named:
    return _idle(world, rng, is_start=True)


@defect("TIM10", "arm", _NOT_FLAT)
def idle_end(world: World, rng: Rng) -> Named:
    return _idle(world, rng, is_start=False)


@defect("TIM12", "arm", _NOT_FLAT)
def jerky(world: World, rng: Rng) -> Named:
    chosen = some(rng, world, 2)
    for number in chosen:
        action = world[number].fields["action"]
        action[:, :7] += rng.normal(0, 0.6, (len(action), 7)).astype(np.float32)
    return set(chosen)


@defect("TIM13", "arm", _TIMED)
def clocks_apart(world: World, rng: Rng) -> Named:
    chosen = some(rng, world, 3)
    for number, episode in enumerate(world.episodes):
        time = episode.fields["timestamp"]
        episode.fields["camera_timestamp"] = time * (1.1 if number in chosen else 1.0) + 1e-4
    return set(chosen)


# Learning signals


@defect("LRN01", "arm", ("own", "robomimic", "lerobot"))
def action_is_state(world: World, rng: Rng) -> Named:
    for episode in world.episodes:
        episode.fields["action"] = episode.fields["observation/joint_pos"].copy()
    return None


@defect("LRN02", "arm", ("own", "robomimic", "lerobot"))
def action_is_next_state(world: World, rng: Rng) -> Named:
    for episode in world.episodes:
        joints, last = (
            episode.fields["observation/joint_pos"],
            episode.final["observation/joint_pos"],
        )  # type: ignore[index]
        episode.fields["action"] = np.concatenate([joints[1:], last[None]])
    return None


@defect("LRN03")
def reward_zero(world: World, rng: Rng) -> Named:
    _each(world, "reward", lambda values, _: values * 0)
    return None


@defect("LRN04", "arm")
def reward_late(world: World, rng: Rng) -> Named:
    late = 0.0
    for episode in world.episodes:
        reward = np.zeros(episode.length, np.float32)
        late, reward[0] = float(episode.fields["reward"][-1]), late
        episode.fields["reward"] = reward
    return None


@defect("LRN05", "arm", ("own", "lerobot"))
def success_contradicts(world: World, rng: Rng) -> Named:
    chosen = some(rng, world, 9)
    for number in chosen:
        world[number].said["success"] = not world[number].said["success"]
    return set(chosen)


@defect("LRN06", "arm", ("own", "robomimic"))
def after_success(world: World, rng: Rng) -> Named:
    chosen = some(rng, world, 8)
    for number, episode in enumerate(world.episodes):
        wins = np.zeros(episode.length, bool)
        wins[-1] = episode.said["success"]
        if number in chosen:
            episode.said["success"], episode.end = True, "terminated"
            wins[episode.length // 2 :] = True
            episode.fields["reward"][-1] = 1
        episode.fields["success"] = wins
    return set(chosen)


@defect("LRN07")
def return_outlier(world: World, rng: Rng) -> Named:
    (number,) = some(rng, world)
    world[number].fields["reward"] = (world[number].fields["reward"] * 400).astype(np.float32)
    return {number}


@defect("LRN08", "arm", ("own", "lerobot"))
def task_imbalance(world: World, rng: Rng) -> Named:
    for number, episode in enumerate(world.episodes):
        episode.said["task"] = "open the drawer" if number == 5 else "pick up the cube"
    return None


@defect("LRN09", "arm", ("own",))
def unknown_task(world: World, rng: Rng) -> Named:
    (number,) = some(rng, world)
    world.metadata["tasks"] = ["pick up the cube", "open the drawer", "close the drawer"]
    for place, episode in enumerate(world.episodes):
        index = 7 if place == number else place % 3
        episode.fields["task_index"] = np.full(episode.length, index)
    return {number}


@defect("LRN09", "arm", ("own",))
def empty_task(world: World, rng: Rng) -> Named:
    chosen = some(rng, world, 2)
    for number in chosen:
        world[number].said["task"] = ""
    return set(chosen)


@defect("LRN10")
def frozen_action(world: World, rng: Rng) -> Named:
    (number,) = some(rng, world)
    action = world[number].fields["action"]
    action[:] = action[0]
    return {number}
