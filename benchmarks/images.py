"""Synthetic images: a moving camera over a small scene, rendered by casting one ray per pixel.

The scene has a floor with a checker of 0.5 m tiles in two colours and a grain of 2 cm (brightness
uniform in +-6 %), a sky with a vertical gradient, and five coloured balls that move. The camera
drives an arc at 0.5 m/s, with 25 frames per second. RGB is 128 x 128 uint8. Depth is 64 x 64
float32, in metres along the ray, at most 10 m. The noisy set adds Gaussian noise with a standard
deviation of 0.3 % of the depth.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
from tqdm import trange

import rollout_data
from rollout_data import RolloutWriter

from . import peers

FRAME_RATE_HZ, SPEED, FAR = 25.0, 0.5, 10.0
CAMERA_HEIGHT, FIELD_OF_VIEW = 1.2, 1.0
TILE, GRAIN, GRAIN_STRENGTH = 0.5, 0.02, 0.06
NUM_BALLS, NOISE = 5, 0.003
#: Names and frame shapes of the set.
SHAPES = {"rgb": (128, 128, 3), "depth_clean": (64, 64), "depth_noisy": (64, 64)}


def image_set(num_trajectories: int, num_frames: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Render trajectories: name -> `[num_trajectories, num_frames, *shape]`."""
    generator = np.random.default_rng(seed)
    images = {
        name: np.empty(
            (num_trajectories, num_frames, *shape), np.uint8 if name == "rgb" else np.float32
        )
        for name, shape in SHAPES.items()
    }
    for trajectory in trange(num_trajectories, desc="images", leave=False):
        scene = _Scene(generator)
        for frame in range(num_frames):
            time_s = frame / FRAME_RATE_HZ
            images["rgb"][trajectory, frame] = scene.colours(time_s, 128)
            images["depth_clean"][trajectory, frame] = scene.depth(time_s, 64)
    depth = images["depth_clean"]
    noise = generator.standard_normal(depth.shape, np.float32)
    np.multiply(depth, 1 + NOISE * noise, out=images["depth_noisy"])
    return images


def record_rgb(folder: Path, frames: np.ndarray, codec: str) -> None:
    """Record RGB images `[num_episodes, num_steps, *shape]`, one environment per episode."""
    num_episodes, num_steps = frames.shape[:2]
    with RolloutWriter(
        folder,
        num_episodes,
        durable=False,
        metadata={"frame_rate_hz": int(FRAME_RATE_HZ)},
        obs_disassemble_mapping={"rgb": codec},
    ) as writer:
        for step in range(num_steps):
            writer.add(
                observation={"rgb": frames[:, step]},
                action=np.full((num_episodes, 1), step, np.float32),
                done=np.full(num_episodes, step == num_steps - 1),
            )


def convert_to_lerobot(recording: Path, target: Path) -> None:
    """Convert a recording to a LeRobot set of PNG images, which replaces `target`."""
    peers.load("pyarrow")
    shutil.rmtree(target, ignore_errors=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    rollout_data.convert(recording, target, "lerobot", progress=False)


class _Scene:
    """Positions of all objects at a time."""

    def __init__(self, generator: np.random.Generator) -> None:
        self.heading, self.turn = generator.uniform(0, 6.28), generator.uniform(-0.3, 0.3)
        self.centre = generator.uniform((-3, -3, 0.2), (3, 3, 0.8), (NUM_BALLS, 3))
        self.velocity = generator.uniform(-0.5, 0.5, (NUM_BALLS, 2))
        self.radius = generator.uniform(0.2, 0.7, NUM_BALLS)
        self.colour = generator.uniform(60, 255, (NUM_BALLS, 3))
        self.tiles = generator.uniform(40, 220, (2, 3))
        self.start = generator.uniform(-1, 1, 2)

    def depth(self, time_s: float, size: int) -> np.ndarray:
        """`[size, size]` metres along each pixel's ray."""
        return self._hits(time_s, size)[0].astype(np.float32)

    def colours(self, time_s: float, size: int) -> np.ndarray:
        """`[size, size, 3]` uint8."""
        distance, ball, rays, origin = self._hits(time_s, size)
        point = origin + rays * distance[..., None]
        sky = 255 - 120 * np.clip(rays[..., 2:], 0, 1) * np.array([1.0, 0.6, 0.2])
        tile = (np.floor(point[..., :2] / TILE).sum(-1).astype(np.int64)) & 1
        cell = np.floor(point[..., :2] / GRAIN).astype(np.int64)
        hashed = (cell[..., 0] * 73856093 ^ cell[..., 1] * 19349663) * 2654435761 & 0xFFFF
        floor = self.tiles[tile] * (1 + GRAIN_STRENGTH * (hashed / 32768.0 - 1))[..., None]
        picture = np.where((rays[..., 2:] < 0) & (distance[..., None] < FAR), floor, sky)
        for number in range(NUM_BALLS):
            is_ball = ball == number
            normal = (point[is_ball] - self._balls(time_s)[number]) / self.radius[number]
            light = 0.35 + 0.65 * np.clip(normal @ np.array([0.4, 0.3, 0.866]), 0, 1)
            picture[is_ball] = self.colour[number] * light[:, None]
        return np.clip(np.rint(picture), 0, 255).astype(np.uint8)

    def _balls(self, time_s: float) -> np.ndarray:
        centre = self.centre.copy()
        centre[:, :2] += self.velocity * time_s
        return centre

    def _hits(
        self, time_s: float, size: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return distance, number of the ball (-1 for none) and direction of each ray, and the
        position of the camera.
        """
        heading = self.heading + self.turn * time_s
        forward = np.array([np.cos(heading), np.sin(heading), -0.25])
        side = np.array([-np.sin(heading), np.cos(heading), 0.0])
        origin = np.array([*(self.start + SPEED * time_s * forward[:2]), CAMERA_HEIGHT])
        grid = np.linspace(-FIELD_OF_VIEW / 2, FIELD_OF_VIEW / 2, size)
        rays = (
            forward + grid[None, :, None] * side - grid[:, None, None] * np.array([0.0, 0.0, 1.0])
        )
        rays /= np.linalg.norm(rays, axis=-1, keepdims=True)
        with np.errstate(divide="ignore"):
            distance = np.where(rays[..., 2] < 0, -CAMERA_HEIGHT / rays[..., 2], FAR)
        distance, ball = np.minimum(distance, FAR), np.full((size, size), -1)
        for number, centre in enumerate(self._balls(time_s)):
            towards = centre - origin
            along = rays @ towards
            inside = self.radius[number] ** 2 - (towards @ towards - along**2)
            reached = along - np.sqrt(np.maximum(inside, 0))
            is_hit = (inside > 0) & (reached > 0.05) & (reached < distance)
            distance, ball = np.where(is_hit, reached, distance), np.where(is_hit, number, ball)
        return distance, ball, rays, origin
