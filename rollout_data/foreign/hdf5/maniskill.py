"""ManiSkill's files: `traj_<id>` in `<name>.h5`, and what happened in them in `<name>.json`.

One rule: observations and states have T + 1 rows, of which the last one follows the last action.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from storage.core import arguments
from storage.errors import CorruptFileError

from ..guards import file_inside, read_object
from ..reader import EpisodeInfo
from .episodes import Hdf5Reader, Layout, LayoutMaker
from .files import Found, OpenFile, matches, numbered

_TRAJECTORY = "traj_"
_FIELDS = {"actions": "action", "rewards": "reward", "success": "success", "fail": "fail"}
_ENDS = ("terminated", "truncated")
_DEPTH_UNITS = {"int16": "mm", "uint16": "mm", "float32": "m"}


class Reader(Hdf5Reader):
    """Trajectories in the order of their numbers.

    Options:
        on_bad_index: "refuse" a file whose JSON lists other trajectories, or "rebuild": give those of the file.
    """

    format = "maniskill"
    OPTIONS: ClassVar[Mapping[str, Any]] = {"on_bad_index": "refuse"}
    GROUPS = ("obs",)

    @classmethod
    def detect(cls, path: Path) -> bool:
        return matches(path, lambda file: bool(numbered(list(file.links(file.open(""))), _TRAJECTORY)))

    def scan(self) -> Sequence[EpisodeInfo]:
        choices = ("refuse", "rebuild")
        arguments.choice("open the trajectories", "on_bad_index", self.options["on_bad_index"], choices)
        self.metadata.update(lossy=[], units={}, control_mode="unknown", env_name="")
        with self.files.use(self.path) as file:
            names = numbered(list(file.links(file.open(""))), _TRAJECTORY)
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
        found = {f"{_TRAJECTORY}{one.get('episode_id')}": one for one in rows}
        if set(found) != set(names) or len(found) != len(rows):
            where, got = (
                f"the episodes of {str(path)!r}",
                f"{len(rows)}, of which {len(set(found) & set(names))} are there",
            )
            advice = 'Open it with on_bad_index="rebuild" to read those of the file'
            error = CorruptFileError(
                "believe", where, f"the {len(names)} trajectories of {self.path.name!r}", got, advice
            )
            if self.options["on_bad_index"] == "refuse":
                raise error
            self.problems.append(error)
        env = about.get("env_info")
        modes = {str(one["control_mode"]) for one in rows if "control_mode" in one}
        self.metadata.update(about)
        self.metadata["env_name"] = str(env.get("env_id", "")) if isinstance(env, dict) else ""
        self.metadata["control_mode"] = modes.pop() if len(modes) == 1 else "unknown"
        return found

    def layout(self, file: OpenFile, group: str, found: Mapping[str, Found]) -> tuple[int, Layout]:
        node = file.group(group)
        length = self.num_actions(file, node)
        maker = LayoutMaker(self, found, length, file.place(node))
        for path in found:
            head, _, rest = path.partition("/")
            if head == "obs":
                name = f"observation/{rest}".rstrip("/")
                maker.add_after(name, path)
                if rest.split("/")[-1] == "depth" and found[path].kind in _DEPTH_UNITS:
                    self.metadata["units"][name] = _DEPTH_UNITS[found[path].kind]
            elif head in _FIELDS:
                maker.add(f"{_FIELDS[head]}/{rest}".rstrip("/"), path)
            elif head not in _ENDS:
                maker.add_with_last(path)
        return length, maker.layout

    def about(self, file: OpenFile, node: Any, length: int) -> dict[str, Any]:
        told = dict(self._listed.get(file.name(node), {}))
        ends = {name: self.flag(file, node, name, length) for name in _ENDS}
        said = told.pop("success", None)
        success = self.flag(file, node, "success", length) if said not in (0, 1) else bool(said)
        if (steps := told.get("elapsed_steps", length)) != length:
            self.problem("believe", f"'elapsed_steps' of {file.place(node)}", str(length), str(steps))
        return {"metadata": told, "success": success, **ends}
