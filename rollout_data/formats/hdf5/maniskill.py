"""ManiSkill's files: `traj_<id>` in `<name>.h5`, and what happened in them in `<name>.json`.

One rule: observations and states have T + 1 rows, of which the last one follows the last action.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from ...sources.episode_reader import EpisodeInfo
from ..format_detection import MANISKILL_TRAJECTORY
from ..input_checks import file_inside, read_object
from .hdf5_datasets import OpenFile
from .hdf5_episodes import Hdf5Reader, LayoutMaker

_DEPTH_UNITS = {"int16": "mm", "uint16": "mm", "float32": "m"}


class Reader(Hdf5Reader):
    """Trajectories in the order of their numbers.

    Options:
        on_bad_index: "refuse" a file whose JSON lists other trajectories, or "rebuild": give those of the file.
    """

    format = "maniskill"
    OPTIONS: ClassVar[Mapping[str, Any]] = {"on_bad_index": "refuse"}
    STEPS: ClassVar[Mapping[str, str]] = {"actions": "action", "rewards": "reward", "obs": "observation"}
    AFTER = ("obs",)
    ENDS: ClassVar[Mapping[str, str]] = {name: name for name in ("terminated", "truncated")}
    GROUPS = ("obs",)

    def scan(self) -> Sequence[EpisodeInfo]:
        self.metadata.update(units={}, env_name="")
        with self.files.use(self.path) as file:
            names = file.numbered("", MANISKILL_TRAJECTORY)
        self._listed = self._read_list(names)
        return self.checked_some(self.collect(self.path, "", names), "a trajectory")

    def _read_list(self, names: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Read the JSON file; give what it says of each trajectory."""
        path = self.path.with_suffix(".json")
        if not path.exists():
            self.problem("read", repr(str(path)), "what happened in the trajectories", "no such file")
            return {}
        about = read_object(file_inside(path.parent, path.name))
        listed = about.pop("episodes", None)
        rows = [one for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
        found = {f"{MANISKILL_TRAJECTORY}{one.get('episode_id')}": one for one in rows}
        if set(found) != set(names) or len(found) != len(rows):
            got = f"{len(rows)}, of which {len(set(found) & set(names))} are there"
            expected = f"the {len(names)} trajectories of {self.path.name!r}"
            self.distrust(f"the episodes of {str(path)!r}", expected, got)
        env = about.get("env_info")
        modes = {str(one["control_mode"]) for one in rows if "control_mode" in one}
        self.metadata = {**about, **self.metadata}
        self.metadata["env_name"] = str(env.get("env_id", "")) if isinstance(env, dict) else ""
        if len(modes) == 1:
            self.metadata["control_mode"] = modes.pop()
        return found

    def put(self, maker: LayoutMaker, path: str) -> None:
        super().put(maker, path)
        name = path.replace("obs", "observation", 1)
        kind = maker.found[path].kind
        if path.startswith("obs/") and path.endswith("/depth") and kind in _DEPTH_UNITS:
            self.metadata["units"][name] = _DEPTH_UNITS[kind]

    def about(self, file: OpenFile, node: Any, length: int) -> dict[str, Any]:
        told = dict(self._listed.get(file.name(node), {}))
        said = told.pop("success", None)
        success = self.flag(file, node, "success", length) if said not in (0, 1) else bool(said)
        if (steps := told.get("elapsed_steps", length)) != length:
            self.problem("believe", f"'elapsed_steps' of {file.place(node)}", str(length), str(steps)).of("counts")
        return {"metadata": told, "success": success, **super().about(file, node, length)}
