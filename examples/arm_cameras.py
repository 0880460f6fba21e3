"""Cameras over the arms of Reacher-v5: colour, depth and segmentation, rendered by MuJoCo or
synthetically.

Both renderers return the same three arrays for a list of environments. MuJoCo renders without a
screen if EGL or OSMesa is installed; Mesa is enough, no GPU is needed. Otherwise `SyntheticCamera`
draws flat shapes from above with numpy.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

SIZE = 64
#: Radius of the drawn target in metres. Its own 9 mm would be two pixels wide. The target touches
#: nothing.
TARGET_RADIUS = 0.015
Images = dict[str, np.ndarray]


class Camera(Protocol):
    """Renderer of the environments in their present state."""

    #: Name of the renderer for the report.
    name: str

    def __call__(self, envs: Sequence[Any]) -> Images:
        """Return `rgb` `[N, 64, 64, 3]` uint8, `depth` `[N, 64, 64]` float32 in metres, and
        `segmentation` `[N, 64, 64]` int16: the number of the visible geom, or -1.
        """


def make_camera(kind: str = "auto") -> Camera:
    """Create the camera "mujoco" or "synthetic"; "auto" is the first that works. Call this before
    MuJoCo is imported.
    """
    backend = None if kind == "synthetic" else _offscreen_backend()
    if backend is not None:
        os.environ["MUJOCO_GL"] = backend[0]
        return MujocoCamera(backend[1])
    if kind == "mujoco":
        raise SystemExit(
            "MuJoCo cannot draw here: install EGL or OSMesa (Mesa), or take --camera synthetic"
        )
    return SyntheticCamera(
        "as asked for" if kind == "synthetic" else "as MuJoCo found no way to draw"
    )


class MujocoCamera:
    """MuJoCo's renderer, without a window."""

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
            image = self._renderer.render()
            self._renderer.disable_segmentation_rendering()
            is_geom = image[..., 1] == int(mujoco.mjtObj.mjOBJ_GEOM)
            drawn["segmentation"].append(np.where(is_geom, image[..., 0], -1).astype(np.int16))
        return {name: np.stack(images) for name, images in drawn.items()}

    def _open(self, model: Any) -> None:
        import mujoco

        # All arms have the same model, so one renderer draws them all. Rounder shapes would take
        # three times as long.
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
    """Renderer of the arm as flat shapes, from 0.6 m above.

    `reason` states why MuJoCo is not used.
    """

    HEIGHT, HALF_WIDTH = 0.6, 0.26
    #: Colour, height above the ground in metres, and MuJoCo's number of root, links, fingertip and
    #: target.
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
            # Covered share of a pixel, computed from the distance between its centre and the edge.
            distance = _distance(places, start, stop) - radius
            cover = np.clip(0.5 - distance / (axis[1] - axis[0]), 0, 1)
            rgb += cover[..., None] * (np.array(colour) - rgb)
            depth[cover >= 0.5] = self.HEIGHT - height
            segmentation[cover >= 0.5] = number
        return {"rgb": np.rint(rgb).astype(np.uint8), "depth": depth, "segmentation": segmentation}


def _distance(places: np.ndarray, start: np.ndarray, stop: np.ndarray) -> np.ndarray:
    """Return the distances of points `[H, W, 2]` to the lines from `start` to `stop` `[N, 2]`: `[N,
    H, W]`.
    """
    along = (stop - start)[:, None, None]
    offset = places[None] - start[:, None, None]
    part = (offset * along).sum(-1) / np.maximum((along * along).sum(-1), 1e-12)
    return np.linalg.norm(offset - np.clip(part, 0, 1)[..., None] * along, axis=-1)


def _offscreen_backend() -> tuple[str, str] | None:
    """Return a value of MUJOCO_GL with which MuJoCo renders here, and its driver; None if there is
    none.
    """
    # Each driver is tried in a new process, because a driver that fails may crash.
    script = (
        "import mujoco; drawn = mujoco.Renderer(mujoco.MjModel.from_xml_string('<mujoco/>'), 8, 8); drawn.render();"
        "from OpenGL import GL; print(GL.glGetString(GL.GL_RENDERER).decode())"
    )
    chosen = os.environ.get("MUJOCO_GL")
    usual = ("egl", "osmesa") if sys.platform == "linux" else ("",)
    for backend in (chosen,) if chosen else usual:
        environment = os.environ | {"MUJOCO_GL": backend}
        done = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True
        )
        if done.returncode == 0:
            return backend, done.stdout.strip()
    return None
