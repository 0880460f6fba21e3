"""Cameras over the arms of Reacher-v5: colour, depth and segmentation, drawn by MuJoCo or by a synthetic renderer.

One rule: with either renderer, a call gives the same three arrays for a list of environments;
nothing is learned here. MuJoCo draws without a screen where EGL or OSMesa is installed (Mesa is
enough, a GPU is not needed); elsewhere `SyntheticCamera` draws flat shapes seen from above, with
numpy alone.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

SIZE = 64
#: Of the drawn target, instead of 9 mm, which would be two pixels wide. It touches nothing in
#: either case.
TARGET_RADIUS = 0.015
Images = dict[str, np.ndarray]


class Camera(Protocol):
    """Draws the environments as they are now."""

    #: Who draws, for people.
    name: str

    def __call__(self, envs: Sequence[Any]) -> Images:
        """Give `rgb` `[N, 64, 64, 3]` uint8, `depth` `[N, 64, 64]` float32 in metres, `segmentation` `[N, 64, 64]`
        int16, the number of the geom that is seen, -1 for none."""


def make_camera(kind: str = "auto") -> Camera:
    """Make the camera "mujoco" or "synthetic"; "auto" is the first that works. Call it before MuJoCo is imported."""
    found = None if kind == "synthetic" else _offscreen_backend()
    if found is not None:
        os.environ["MUJOCO_GL"] = found[0]
        return MujocoCamera(found[1])
    if kind == "mujoco":
        raise SystemExit(
            "MuJoCo cannot draw here: install EGL or OSMesa (Mesa), or take --camera synthetic"
        )
    return SyntheticCamera(
        "as asked for" if kind == "synthetic" else "as MuJoCo found no way to draw"
    )


class MujocoCamera:
    """MuJoCo's own renderer, without a window."""

    def __init__(self, driver: str) -> None:
        self.name = f"MuJoCo, drawn by {driver}"
        self._renderer: Any = None

    def __call__(self, envs: Sequence[Any]) -> Images:
        import mujoco

        if self._renderer is None:
            self._open(envs[0].unwrapped.model)
        drawn: dict[str, list[np.ndarray]] = {"rgb": [], "depth": [], "segmentation": []}
        for env in envs:
            self._renderer.update_scene(env.unwrapped.data, self._view)
            drawn["rgb"].append(self._renderer.render())
            self._renderer.enable_depth_rendering()
            drawn["depth"].append(self._renderer.render())
            self._renderer.disable_depth_rendering()
            self._renderer.enable_segmentation_rendering()
            what = self._renderer.render()
            self._renderer.disable_segmentation_rendering()
            is_geom = what[..., 1] == int(mujoco.mjtObj.mjOBJ_GEOM)
            drawn["segmentation"].append(np.where(is_geom, what[..., 0], -1).astype(np.int16))
        return {name: np.stack(images) for name, images in drawn.items()}

    def _open(self, model: Any) -> None:
        import mujoco

        # All arms have one model, so that one renderer draws them all. Rounder shapes would cost
        # three times as much.
        model.vis.quality.numslices, model.vis.quality.numstacks, model.vis.quality.offsamples = (
            12,
            6,
            4,
        )
        model.vis.headlight.ambient[:], model.vis.headlight.diffuse[:] = 0.35, 0.6
        model.vis.map.znear, model.vis.map.zfar = 0.05, 5.0
        model.geom("target").size[:] = TARGET_RADIUS
        self._view = mujoco.MjvCamera()
        self._view.lookat[:], self._view.distance = (0.0, 0.0, 0.0), 0.62
        self._view.azimuth, self._view.elevation = 90.0, -65.0
        self._renderer = mujoco.Renderer(model, SIZE, SIZE)
        self._renderer.scene.flags[mujoco.mjtRndFlag.mjRND_REFLECTION] = 0


class SyntheticCamera:
    """A stand-in that draws the arm as flat shapes, from 0.6 m above; `reason` says why it does."""

    HEIGHT, HALF_WIDTH = 0.6, 0.26
    #: Colour and height above the ground in metres of root, links, fingertip, target, with MuJoCo's
    #: numbers of them.
    SHAPES = (
        (9, (230, 51, 51), 0.025),
        (6, (0, 102, 153), 0.02),
        (7, (0, 102, 153), 0.02),
        (8, (0, 204, 153), 0.021),
        (5, (230, 102, 153), 0.03),
    )
    GROUND = (0, (190, 190, 190), 0.0)

    def __init__(self, reason: str) -> None:
        self.name = f"the synthetic renderer (flat shapes; {reason})"

    def __call__(self, envs: Sequence[Any]) -> Images:
        joints = np.array([env.unwrapped.data.qpos for env in envs])
        axis = np.linspace(-self.HALF_WIDTH, self.HALF_WIDTH, SIZE)
        places = np.stack(np.meshgrid(axis, axis[::-1]), -1)  # [64, 64, 2], y upwards
        zero = np.zeros((len(envs), 2))
        angles = np.cumsum(joints[:, :2], axis=1)
        elbow = 0.1 * np.stack([np.cos(angles[:, 0]), np.sin(angles[:, 0])], -1)
        tip = elbow + 0.11 * np.stack([np.cos(angles[:, 1]), np.sin(angles[:, 1])], -1)
        target = joints[:, 2:4]
        bars = [
            (target, target, TARGET_RADIUS),
            (zero, elbow, 0.01),
            (elbow, tip, 0.01),
            (tip, tip, 0.01),
        ]
        bars.append((zero, zero, 0.011))
        number, colour, height = self.GROUND
        shape = (len(envs), SIZE, SIZE)
        rgb = np.broadcast_to(np.array(colour, np.float64), (*shape, 3)).copy()
        depth = np.full(shape, self.HEIGHT - height, np.float32)
        segmentation = np.full(shape, number, np.int16)
        for (number, colour, height), (start, stop, radius) in zip(self.SHAPES, bars, strict=True):
            # How much of a pixel is covered, from the distance of its middle to the edge.
            distance = _distance(places, start, stop) - radius
            cover = np.clip(0.5 - distance / (axis[1] - axis[0]), 0, 1)
            rgb += cover[..., None] * (np.array(colour) - rgb)
            depth[cover >= 0.5] = self.HEIGHT - height
            segmentation[cover >= 0.5] = number
        return {"rgb": np.rint(rgb).astype(np.uint8), "depth": depth, "segmentation": segmentation}


def _distance(places: np.ndarray, start: np.ndarray, stop: np.ndarray) -> np.ndarray:
    """Distance of places `[H, W, 2]` to the lines from `start` to `stop`, `[N, 2]`: `[N, H, W]`."""
    along = (stop - start)[:, None, None]
    offset = places[None] - start[:, None, None]
    part = (offset * along).sum(-1) / np.maximum((along * along).sum(-1), 1e-12)
    return np.linalg.norm(offset - np.clip(part, 0, 1)[..., None] * along, axis=-1)


def _offscreen_backend() -> tuple[str, str] | None:
    """Find a value of MUJOCO_GL with which MuJoCo can draw here, and the driver that does it; None if there is none."""
    # Each is tried in a process of its own: drivers that cannot do it fail in ways of their own, a
    # crash among them.
    script = (
        "import mujoco; drawn = mujoco.Renderer(mujoco.MjModel.from_xml_string('<mujoco/>'), 8, 8); drawn.render();"
        "from OpenGL import GL; print(GL.glGetString(GL.GL_RENDERER).decode())"
    )
    given = os.environ.get("MUJOCO_GL")
    usual = ("egl", "osmesa") if sys.platform == "linux" else ("",)
    for backend in (given,) if given else usual:
        environment = os.environ | {"MUJOCO_GL": backend}
        done = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True
        )
        if done.returncode == 0:
            return backend, done.stdout.strip()
    return None
