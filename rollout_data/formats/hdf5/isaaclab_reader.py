"""Isaac Lab's files: robomimic's tree without rewards and ends; `states` follow the step, `initial_state` has one row.

One rule: quaternions are given as stored, unless their order is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from storage.errors import UsageError

from ...sources.episode_reader import EpisodeInfo
from .hdf5_datasets import OpenFile
from .hdf5_episodes import Column, LayoutMaker, Source
from .robomimic_reader import Reader as RobomimicReader

_ORDERS = ("wxyz", "xyzw")
_POSE = "root_pose"


class Reader(RobomimicReader):
    """Demos with the numbers that the file gives them; `success` and `seed` are what their attributes say.

    Options:
        quaternions: "wxyz" or "xyzw": the order in which those of `root_pose` are given; None keeps what is stored,
            which `metadata["quaternion_order"]` tells.
    """

    format = "isaaclab"
    OPTIONS: ClassVar[Mapping[str, Any]] = {"quaternions": None}
    ASIDE = ("initial_state",)
    KNOWN = ("success", "task")

    def describe(self, file: OpenFile, data: Any) -> None:
        super().describe(file, data)
        root = file.attributes(file.open(""))
        self.metadata = {**root, **self.metadata}
        stored = "xyzw" if root.get("format_version", 0) else "wxyz"
        wanted = self.options["quaternions"]
        if wanted not in (None, *_ORDERS):
            raise UsageError("open", repr(str(self.path)), f"quaternions of {', '.join(_ORDERS)}", repr(wanted))
        self._turns = wanted not in (None, stored)
        self.metadata["quaternion_order"] = wanted or stored

    def put(self, maker: LayoutMaker, path: str) -> None:
        if path.startswith("obs/datagen_info/"):  # Mimic keeps it for itself: no observation
            maker.add_other(path)
        else:
            super().put(maker, path)

    def about(self, file: OpenFile, node: Any, length: int) -> dict[str, Any]:
        success = file.attribute(node, "success")
        task = file.attribute(node, "task")  # not Isaac Lab's, but what our writer adds
        return {"success": None if success is None else bool(success), "task": task if isinstance(task, str) else ""}

    def aside(self, source: Source) -> dict[str, Any]:
        told = super().aside(source)
        return {name: self._turned(value) if name.endswith(_POSE) else value for name, value in told.items()}

    def rows(self, info: EpisodeInfo, column: Column, start: int, stop: int) -> Any:
        rows = super().rows(info, column, start, stop)
        return self._turned(rows) if column.path.endswith(_POSE) else rows

    def _turned(self, poses: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Bring the quaternions, at 3:7 of the last axis, into the order that is asked for."""
        if not self._turns or poses.shape[-1:] != (7,):
            return poses
        shift = -1 if self.metadata["quaternion_order"] == "xyzw" else 1
        return np.concatenate([poses[..., :3], np.roll(poses[..., 3:], shift, axis=-1)], axis=-1)
