"""Reader of ManiSkill files: groups `traj_<id>` in `<name>.h5`, described in `<name>.json`.

Observations and states have T + 1 rows. The last row is the state after the last action.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from ...sources.episode_info import EpisodeInfo
from ..format_detection import MANISKILL_TRAJECTORY
from ..input_checks import file_inside, read_object
from .hdf5_datasets import OpenFile
from .hdf5_episodes import Hdf5Reader, LayoutMaker

#: Maps the dtype of depth pictures to their unit.
_DEPTH_UNITS = {"int16": "mm", "uint16": "mm", "float32": "m"}


class ManiskillReader(Hdf5Reader):
    """Reader of the trajectories of a file, in the order of their numbers.

    Options:
        on_bad_index: "refuse" raises an error if the JSON file lists other trajectories than the
            HDF5 file; "rebuild" reads the trajectories in the HDF5 file.
    """

    format = "maniskill"
    OPTIONS: ClassVar[Mapping[str, Any]] = {"on_bad_index": "refuse"}
    STEPS: ClassVar[Mapping[str, str]] = {
        "actions": "action",
        "rewards": "reward",
        "obs": "observation",
    }
    WITH_FINAL = ("obs",)
    ENDS: ClassVar[Mapping[str, str]] = {"terminated": "terminated", "truncated": "truncated"}
    GROUPS = ("obs",)

    def scan(self) -> Sequence[EpisodeInfo]:
        self.metadata["units"] = {}
        self.metadata["env_name"] = ""
        with self.files.use(self.path) as file:
            names = file.numbered("", MANISKILL_TRAJECTORY)
        self._descriptions = self._read_descriptions(names)
        episodes = self.collect(self.path, "", names)
        return self.checked_some(episodes, "trajectory")

    def _read_descriptions(self, names: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Read the JSON file: map trajectories to descriptions; add other values to metadata."""
        path = self.path.with_suffix(".json")
        if not path.exists():
            self.problem(
                f"{str(path)!r} is missing. The trajectories are read without their descriptions."
            )
            return {}
        content = read_object(file_inside(path.parent, path.name))
        stated = content.pop("episodes", None)
        rows = []
        if isinstance(stated, list):
            rows = [row for row in stated if isinstance(row, dict)]
        descriptions = {f"{MANISKILL_TRAJECTORY}{row.get('episode_id')}": row for row in rows}
        is_repeated = len(descriptions) != len(rows)
        if is_repeated or descriptions.keys() != set(names):
            num_present = len(descriptions.keys() & set(names))
            self.distrust(
                f"{str(path)!r} describes {len(rows)} trajectories. {num_present} of them are among "
                f"the {len(names)} trajectories of {self.path.name!r}."
            )

        self.metadata = {**content, **self.metadata}
        env = content.get("env_info")
        self.metadata["env_name"] = str(env.get("env_id", "")) if isinstance(env, dict) else ""
        modes = {str(row["control_mode"]) for row in rows if "control_mode" in row}
        if len(modes) == 1:
            self.metadata["control_mode"] = modes.pop()
        return descriptions

    def add_dataset(self, maker: LayoutMaker, path: str) -> None:
        super().add_dataset(maker, path)
        kind = maker.datasets[path].kind
        is_depth = path.startswith("obs/") and path.endswith("/depth")
        if is_depth and kind in _DEPTH_UNITS:
            name = path.replace("obs", "observation", 1)
            self.metadata["units"][name] = _DEPTH_UNITS[kind]

    def facts(self, file: OpenFile, node: Any, length: int) -> dict[str, Any]:
        metadata = dict(self._descriptions.get(file.name(node), {}))
        stated = metadata.pop("success", None)
        if stated in (0, 1):
            success: bool | None = bool(stated)
        else:
            success = self.flag(file, node, "success", length)
        num_steps = metadata.get("elapsed_steps", length)
        if num_steps != length:
            self.problem(
                f"{file.place(node)} has {length} steps, but 'elapsed_steps' is {num_steps}. The "
                "number is ignored.",
                kind="counts",
            )
        ends = super().facts(file, node, length)
        return {"metadata": metadata, "success": success, **ends}
