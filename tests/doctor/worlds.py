"""Sound recordings in memory, like those of users. `sets.py` writes them to folders."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Rng = np.random.Generator
Array = np.ndarray


@dataclass
class Ep:
    """One episode: its fields, end, final observation and notes."""

    fields: dict[str, Any]
    end: str = "terminated"  # "terminated", "truncated", "both", "open"
    final: dict[str, Array] | None = None
    said: dict[str, Any] = field(default_factory=dict)
    env: int = 0

    @property
    def length(self) -> int:
        return len(self.fields["action"])

    def cut(self, start: int, stop: int) -> None:
        self.fields = {name: values[start:stop] for name, values in self.fields.items()}


@dataclass
class World:
    """A recording: its episodes in order, and its metadata."""

    episodes: list[Ep]
    metadata: dict[str, Any] = field(default_factory=dict)

    def __getitem__(self, number: int) -> Ep:
        return self.episodes[number]

    def __len__(self) -> int:
        return len(self.episodes)

    def copy(self) -> World:
        return copy.deepcopy(self)

    def arrays(self, name: str) -> Iterator[Array]:
        return (episode.fields[name] for episode in self.episodes)


def about(env: str, rate: float = 20.0) -> dict[str, Any]:
    return {
        "env": env,
        "policy": "scripted",
        "policy_version": 3,
        "software": "rollout-data 0.1",
        "frame_rate_hz": rate,
    }


def smooth(rng: Rng, length: int, width: int, knots: int = 5) -> Array:
    """Return a smooth path through random points: float64 `[length, width]`."""
    points = rng.normal(size=(knots + 2, width))
    at = np.linspace(0, knots - 1e-6, length)
    left = at.astype(int)
    part = (at - left)[:, None]
    ease = part * part * part * (part * (6 * part - 15) + 10)
    return points[left] * (1 - ease) + points[left + 1] * ease


def walker(rng: Rng, num: int = 24, limit: int = 100, dims: int = 17) -> World:
    """A simulated robot with a noisy policy: dense reward, early falls, a time limit."""
    width, mixing = 6, rng.normal(size=(6, dims)) * 0.06
    speeds = rng.uniform(0.03, 0.15, dims)
    episodes = []
    for _ in range(num):
        length = limit if rng.random() < 0.5 else int(rng.integers(limit // 2, limit))
        action = np.clip(
            np.tanh(rng.normal(0, 0.6, (length, width)) + smooth(rng, length, width) * 0.3), -1, 1
        )
        state, phase = np.zeros((length + 1, dims)), rng.uniform(0, 6.3, dims)
        low = np.zeros(dims)
        for t in range(length + 1):
            low = 0.8 * low + (action[t - 1] @ mixing if t else rng.normal(0, 0.1, dims))
            state[t] = np.sin(speeds * t + phase) + low + rng.normal(0, 0.01, dims)
        state = state.astype(np.float32)
        fields = {
            "observation": state[:-1],
            "action": action.astype(np.float32),
            "reward": (1 + 0.1 * state[1:, 0] - 0.05 * (action**2).sum(1)).astype(np.float32),
        }
        end = "truncated" if length == limit else "terminated"
        episodes.append(Ep(fields, end, {"observation": state[-1]}))
    return World(episodes, about("Walker"))


def quaternions(rng: Rng, length: int) -> Array:
    """Return quaternions wxyz of a turning body that stays near upright: float64 `[length, 4]`."""
    angle = 0.3 * smooth(rng, length, 3)
    actual = np.concatenate([np.full((length, 1), 1.0), 0.5 * angle], 1)
    return actual / np.linalg.norm(actual, axis=1, keepdims=True)


def arm(rng: Rng, num: int = 24) -> World:
    """Demonstrations with an arm: smooth, successes at the end, several tasks, two gripper commands, clock."""
    tasks, mixing = (
        ["pick up the cube", "open the drawer", "close the drawer"],
        rng.normal(size=(7, 3)) * 0.2,
    )
    episodes = []
    for number in range(num):
        length = int(rng.integers(50, 90))
        joints = 0.5 * smooth(rng, length + 2, 7) + rng.normal(0, 1e-4, (length + 2, 7))
        closes = int(rng.integers(length // 3, 2 * length // 3))
        gripper = np.where(np.arange(length + 1) < closes, 0.08, 0.0)[:, None]
        parts = {
            "observation/joint_pos": joints[:-1],
            "observation/joint_vel": np.diff(joints, axis=0) * 20,
            "observation/ee_pos": np.tanh(joints[:-1] @ mixing) + 0.4,
            "observation/ee_quat": quaternions(rng, length + 1),
            "observation/gripper": gripper,
        }
        parts = {name: values.astype(np.float32) for name, values in parts.items()}
        command = np.diff(joints[:-1], axis=0) * 10 + rng.normal(0, 0.01, (length, 7))
        command = np.concatenate(
            [command, np.where(np.arange(length) < closes - 1, 1.0, -1.0)[:, None]], 1
        )
        wins = rng.random() < 0.8
        fields = {name: values[:-1] for name, values in parts.items()}
        fields |= {"action": command.astype(np.float32), "reward": np.zeros(length, np.float32)}
        fields["reward"][-1] = wins
        fields["timestamp"] = (np.arange(length) / 20 + rng.normal(0, 2e-4, length)).astype(
            np.float64
        )
        final = {name: values[-1] for name, values in parts.items()}
        notes = {"task": tasks[number % 3], "success": bool(wins)}
        episodes.append(Ep(fields, "terminated" if wins else "truncated", final, notes))
    return World(episodes, about("ArmCell"))


def pixels(rng: Rng, path: Array, size: int, noise: float, camera: int = 0) -> Array:
    """Return pictures of a moving ball on a warm texture: uint8 `[T, size, size, 3]`."""
    place = np.random.default_rng(7 + camera)
    rough = place.uniform(0, 60, (size // 4, size // 4, 1)).repeat(4, 0).repeat(4, 1)
    back = (
        np.array([150, 90, 50])
        + rough * np.array([1, 0.8, 0.5])
        + place.uniform(0, 25, (size, size, 1))
    )
    grid = np.arange(size)
    at = (np.tanh(path[:, :2]) * 0.35 + 0.5) * size
    ball = (grid[None, :, None] - at[:, 0, None, None]) ** 2 + (
        grid[None, None, :] - at[:, 1, None, None]
    ) ** 2
    frames = np.where(ball[..., None] < (size / 6) ** 2, np.array([40, 60, 200.0]), back[None])
    return np.clip(frames + (rng.normal(0, noise, frames.shape) if noise else 0), 0, 250).astype(
        np.uint8
    )


def cameras(rng: Rng, num: int = 10, noise: float = 2.0, size: int = 32) -> World:
    """An arm with two cameras."""
    world = arm(rng, num)
    for episode in world.episodes:
        episode.cut(0, 40)
        episode.fields["reward"] = np.where(np.arange(40) == 39, episode.said["success"], 0).astype(
            np.float32
        )
        assert episode.final is not None
        for camera, name in enumerate(("front", "wrist")):
            path = episode.fields["observation/joint_pos"][:, 2 * camera :]
            frames = pixels(rng, np.concatenate([path, path[-1:]]), size, noise, camera)
            episode.fields[f"observation/{name}"], episode.final[f"observation/{name}"] = (
                frames[:-1],
                frames[-1],
            )
    return world


def ant(rng: Rng) -> World:
    """Half of the observations are always 0, contact forces are rare and large."""
    world = walker(rng, dims=27)
    for episode in world.episodes:
        num = episode.length + 1
        forces = np.where(rng.random((num, 8)) < 0.02, rng.standard_t(1.5, (num, 8)) * 20, 0)
        rows = np.concatenate([forces, np.zeros((num, 30))], 1).astype(np.float32)
        episode.fields["observation"] = np.concatenate(
            [episode.fields["observation"], rows[:-1]], 1
        )
        episode.final = {"observation": np.concatenate([episode.final["observation"], rows[-1]])}  # type: ignore[index]
    return world


def lidar(rng: Rng) -> World:
    """Rays that often hit nothing and return the maximum."""
    world = walker(rng, 12)
    for episode in world.episodes:
        rays = np.minimum(4 + 3 * smooth(rng, episode.length, 24), 5).clip(0.1).astype(np.float32)
        episode.fields["observation/rays"] = rays
        episode.fields["observation/state"], episode.final = episode.fields.pop("observation"), None
    return world


def mountain_car(rng: Rng) -> World:
    """A constant reward of -1, three actions, and a start in the valley."""
    episodes = []
    for _ in range(20):
        x, v = rng.uniform(-0.6, -0.4), 0.0
        rows, actions = [(x, v)], []
        while len(actions) < 200 and x < 0.5:
            action = 2 if v >= 0 else 0
            action = int(rng.integers(3)) if rng.random() < 0.2 else action
            v = float(np.clip(v + (action - 1) * 0.001 - 0.0025 * np.cos(3 * x), -0.07, 0.07))
            x = float(np.clip(x + v, -1.2, 0.6))
            v = 0.0 if x == -1.2 and v < 0 else v
            actions.append(action)
            rows.append((x, v))
        state = np.array(rows, np.float32)
        fields = {
            "observation": state[:-1],
            "action": np.array(actions)[:, None],
            "reward": -np.ones(len(actions), "f4"),
        }
        episodes.append(
            Ep(fields, "terminated" if x >= 0.5 else "truncated", {"observation": state[-1]})
        )
    return World(episodes, about("MountainCar-v0", 30))


def bandit(rng: Rng) -> World:
    """Episodes of one frame."""
    episodes = []
    for _ in range(200):
        choice = int(rng.integers(10))
        fields = {
            "observation": rng.normal(size=(1, 4)).astype(np.float32),
            "action": np.array([[choice]]),
        }
        fields["reward"] = np.array([float(rng.random() < choice / 10)], np.float32)
        episodes.append(Ep(fields, "terminated"))
    return World(episodes, about("Bandit"))


def grid_world(rng: Rng) -> World:
    """A discrete world of 16 places. Episodes are equal by chance."""
    episodes = []
    for _ in range(60):
        x = y = 0
        cells, actions = [], []
        while len(actions) < 30 and (x, y) != (3, 3):
            cells.append(4 * x + y)
            action = int(rng.integers(2)) if rng.random() < 0.9 else int(rng.integers(4))
            x = int(np.clip(x + (action == 0) - (action == 2), 0, 3))
            y = int(np.clip(y + (action == 1) - (action == 3), 0, 3))
            actions.append(action)
        fields = {
            "observation": np.eye(16, dtype=np.float32)[cells],
            "action": np.array(actions)[:, None],
        }
        wins = (x, y) == (3, 3)
        fields["reward"] = np.zeros(len(actions), np.float32)
        fields["reward"][-1] = wins
        final = {"observation": np.eye(16, dtype=np.float32)[4 * x + y]}
        episodes.append(Ep(fields, "terminated" if wins else "truncated", final))
    return World(episodes, about("Grid"))


def slow_sensor(rng: Rng) -> World:
    """One sensor has a new value every fifth frame."""
    world = walker(rng, 16)
    for episode in world.episodes:
        slow = np.repeat(
            smooth(rng, -(-episode.length // 5), 3, 8)
            + rng.normal(0, 0.05, (-(-episode.length // 5), 3)),
            5,
            0,
        )
        episode.fields["observation/slow"] = slow[: episode.length].astype(np.float32)
        episode.fields["observation/state"], episode.final = episode.fields.pop("observation"), None
    return world


def curriculum(rng: Rng) -> World:
    """Episodes become longer, returns higher, and places farther away."""
    world = walker(rng, 40)
    for number, episode in enumerate(world.episodes):
        episode.cut(0, 25 + 2 * number)
        episode.fields["observation"] = episode.fields["observation"].copy()
        episode.fields["observation"][:, 2] += number / 20
        episode.final = None
        episode.end = "terminated"
    return world


def vectorized(rng: Rng) -> World:
    """Four simulators side by side: the last episode of each is cut off."""
    world = walker(rng, 24)
    for number, episode in enumerate(world.episodes):
        episode.env = number % 4
        if number >= 20:
            episode.end, episode.final = "open", None
    return world


def position_targets(rng: Rng) -> World:
    """Actions are the next joint positions, with a gripper."""
    world = arm(rng)
    for episode in world.episodes:
        joints = episode.fields["observation/joint_pos"]
        following = np.concatenate([joints[1:], episode.final["observation/joint_pos"][None]])  # type: ignore[index]
        noisy = following + rng.normal(0, 5e-4, following.shape)
        episode.fields["action"] = np.concatenate(
            [noisy, episode.fields["action"][:, 7:]], 1
        ).astype(np.float32)
    return world


#: Name -> function that returns a sound recording.
WORLDS: dict[str, Callable[[Rng], World]] = {
    "walker": walker,
    "arm": arm,
    "cameras": cameras,
    "noiseless": lambda rng: cameras(rng, noise=0),
    "ant": ant,
    "lidar": lidar,
    "mountain_car": mountain_car,
    "bandit": bandit,
    "grid_world": grid_world,
    "slow_sensor": slow_sensor,
    "curriculum": curriculum,
    "vectorized": vectorized,
    "position_targets": position_targets,
}
