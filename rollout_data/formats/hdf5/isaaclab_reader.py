"""Reader of Isaac Lab files: robomimic files without rewards and without ends of episodes.

A row of `states` is the state after the step. `initial_state` has one row. Quaternions are returned
as stored unless an order is requested.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from storage.errors import UsageError

from ...sources.episode_info import EpisodeInfo
from .hdf5_datasets import OpenFile
from .hdf5_episodes import DatasetColumn, EpisodeGroup, LayoutMaker
from .robomimic_reader import RobomimicReader

_ORDERS = ("wxyz", "xyzw")
#: Suffix of the names of pose arrays `[..., 7]`: a position, then a quaternion.
_POSE = "root_pose"
_POSE_SIZE = 7


class IsaacLabReader(RobomimicReader):
    """Reader of the demos of a file. Success and seed are read from attributes.

    Options:
        quaternions: Order of the returned quaternions of `root_pose`: "wxyz" or "xyzw". None keeps
            the stored order. `metadata["quaternion_order"]` is the order of the returned values.
    """

    format = "isaaclab"
    OPTIONS: ClassVar[Mapping[str, Any]] = {"quaternions": None}
    METADATA = ("initial_state",)
    ATTRIBUTES = ("success", "task")

    def read_file_metadata(self, file: OpenFile, data: Any) -> None:
        super().read_file_metadata(file, data)
        root = file.attributes(file.open(""))
        self.metadata = {**root, **self.metadata}
        stored = "xyzw" if root.get("format_version", 0) else "wxyz"
        wanted = self.options["quaternions"]
        if wanted not in (None, *_ORDERS):
            raise UsageError(f"quaternions must be one of {', '.join(_ORDERS)}, got {wanted!r}.")
        self._is_reordered = wanted not in (None, stored)
        self.metadata["quaternion_order"] = wanted or stored

    def add_dataset(self, maker: LayoutMaker, path: str) -> None:
        if path.startswith("obs/datagen_info/"):  # Internal data of Isaac Lab Mimic.
            maker.add_other(path)
        else:
            super().add_dataset(maker, path)

    def facts(self, file: OpenFile, node: Any, length: int) -> dict[str, Any]:
        success = file.attribute(node, "success")
        task = file.attribute(node, "task")  # Only our writer adds this attribute.
        return {
            "success": None if success is None else bool(success),
            "task": task if isinstance(task, str) else "",
        }

    def read_metadata(self, source: EpisodeGroup) -> dict[str, Any]:
        metadata = super().read_metadata(source)
        for name, value in metadata.items():
            if name.endswith(_POSE):
                metadata[name] = self._reordered(value)
        return metadata

    def read_rows(self, info: EpisodeInfo, column: DatasetColumn, start: int, stop: int) -> Any:
        rows = super().read_rows(info, column, start, stop)
        return self._reordered(rows) if column.path.endswith(_POSE) else rows

    def _reordered(self, poses: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return poses with quaternions in the requested order."""
        if not self._is_reordered or poses.shape[-1:] != (_POSE_SIZE,):
            return poses
        shift = -1 if self.metadata["quaternion_order"] == "xyzw" else 1
        quaternions = np.roll(poses[..., 3:], shift, axis=-1)
        return np.concatenate([poses[..., :3], quaternions], axis=-1)
