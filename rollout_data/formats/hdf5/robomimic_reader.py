"""Reader of robomimic files: groups `data/demo_<i>` with `actions`, `obs/<key>` and more.

`dones` marks successes or last steps, depending on the origin of a file. It therefore becomes a
field and does not determine the end.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import h5py
import numpy as np

from storage.errors import DataFileError, RolloutDataWarning

from ...sources.episode_info import ABSENT, EpisodeInfo
from ..format_detection import ROBOMIMIC_DATA, ROBOMIMIC_DEMO
from ..input_checks import parse_attribute
from .flattened_names import OBS_NAMES, REPEATED, flat_key
from .hdf5_datasets import OpenFile
from .hdf5_episodes import Hdf5Reader, Layout, LayoutMaker

#: Number of episodes whose `next_obs` is compared with `obs` when a file is opened.
_COMPARED_EPISODES = 50
#: Number of bytes of observations that are compared when a file is opened.
_COMPARED_BYTES = 1 << 24
#: Number of rows that are compared at a time.
_COMPARED_ROWS = 256
_MAX_MASK_BYTES = 1 << 24


class RobomimicReader(Hdf5Reader):
    """Reader of demos in the order of their numbers.

    The last row of `next_obs` is the final observation.

    Options:
        keep_next_obs: Also return `next_obs/<key>` as fields. False reads only the last row, and
            reports a problem if other rows differ from the next rows of `obs`.
        terminated_from_dones: Treat an episode as terminated if the last row of `dones` is 1.
    """

    format = "robomimic"
    OPTIONS: ClassVar[Mapping[str, Any]] = {
        "keep_next_obs": False,
        "terminated_from_dones": False,
    }
    STEPS: ClassVar[Mapping[str, str]] = {
        "actions": "action",
        "rewards": "reward",
        "obs": "observation",
    }
    STATED = "num_samples"
    GROUPS = ("obs",)
    ATTRIBUTES: ClassVar[tuple[str, ...]] = ("ep_meta",)

    def scan(self) -> Sequence[EpisodeInfo]:
        #: Maps each mask (a named subset of the demos) to the names of its demos.
        self._masks: dict[str, list[str]] = {}
        #: Maps each demo to the names of its masks.
        self._masks_of: dict[str, list[str]] = {}
        #: (episode, field) pairs whose `next_obs` was compared with `obs`.
        self._compared: set[tuple[str, str]] = set()
        #: Maps each renamed key of `obs` to the original name of the observation.
        self._obs_names: dict[str, str] = {}
        with self.files.use(self.path) as file:
            data = file.group(ROBOMIMIC_DATA)
            names = file.numbered(ROBOMIMIC_DATA, ROBOMIMIC_DEMO)
            self.read_file_metadata(file, data)
            self._obs_names = _original_names(self.metadata.pop(OBS_NAMES, None))
            self._read_masks(file)
            episodes = self.collect(self.path, ROBOMIMIC_DATA, names)
            total = file.attribute(data, "total")
        self.checked_some(episodes, "demo")
        num_steps = self.num_steps(episodes)
        is_wrong = total is not None and not self.problems and total != num_steps
        if is_wrong:
            self.problem(
                f"{str(self.path)!r} has {num_steps} steps, but its attribute 'total' is {total}. "
                "The attribute is ignored.",
                kind="counts",
            )
        self._set_splits(names, {info.name for info in episodes})
        self._compare_first(episodes)
        return episodes

    def _set_splits(self, names: Sequence[str], present: set[str]) -> None:
        """Set the splits of the recording from the masks, the named subsets of demos in the file.

        Args:
            names: All demos of the file.
            present: Demos that were read.
        """
        known = set(names)
        for mask, demos in self._masks.items():
            unknown = [name for name in demos if name not in known]
            if unknown:
                self.problem(
                    f"Mask {mask!r} of {str(self.path)!r} names {unknown[0]!r}, which does not "
                    "exist. The name is ignored.",
                    kind="split",
                )
            self.splits[mask] = [name for name in demos if name in present]

    def num_steps(self, episodes: Sequence[EpisodeInfo]) -> int:
        """Return the total number of rows of all demos."""
        return sum(info.length for info in episodes)

    def read_file_metadata(self, file: OpenFile, data: Any) -> None:
        """Read the attributes of `data` as metadata of the file. JSON texts are parsed."""
        self.metadata = {**file.attributes(data), **self.metadata}
        env_args = parse_attribute(self.metadata.get("env_args"), "env_args")
        self.metadata["env_name"] = str(env_args.get("env_name", ""))
        self.metadata["control_mode"] = _control_mode(env_args)
        self.metadata["env_args"] = env_args

    def add_dataset(self, maker: LayoutMaker, path: str) -> None:
        observation = path.removeprefix("next_")
        is_next = path.startswith("next_obs") and observation in maker.datasets
        if is_next:
            if self.options.get("keep_next_obs"):
                maker.add(path, path)
            maker.check_rows(path)
            maker.add_final(self._name_of(maker, observation), path, -1)
        elif path.startswith("obs/"):
            maker.add(self._name_of(maker, path), path)
        else:
            super().add_dataset(maker, path)

    def _name_of(self, maker: LayoutMaker, path: str) -> str:
        """Return the observation name of a dataset. A "/" that the writer replaced is restored."""
        key = path.removeprefix("obs/")
        original = self._obs_names.get(key, key)
        if f"obs/{original}" in maker.datasets:
            return path.replace("obs", "observation", 1)
        return f"observation/{original}"

    def facts(self, file: OpenFile, node: Any, length: int) -> dict[str, Any]:
        name = file.name(node).rpartition("/")[2]
        metadata = parse_attribute(file.attribute(node, "ep_meta"), "ep_meta")
        masks = self._masks_of.get(name)
        if masks:
            metadata["mask"] = masks
        task = metadata.get("lang", "")
        success = metadata.get("success")
        repeated = metadata.pop(REPEATED, None)
        facts: dict[str, Any] = {
            "metadata": metadata,
            "task": task if isinstance(task, str) else "",
            "success": success if isinstance(success, bool) else None,
        }
        if isinstance(repeated, list):
            keys = map(str, repeated)
            names = {f"observation/{self._obs_names.get(key, key)}" for key in keys}
            facts["repeated"] = {"observation", *names}
        has_dones = "dones" not in (metadata.get(ABSENT) or ())
        if has_dones and self.options.get("terminated_from_dones"):
            facts["terminated"] = self.flag(file, node, "dones", length)
        return facts

    def _read_masks(self, file: OpenFile) -> None:
        if not isinstance(file.open("mask"), h5py.h5g.GroupID):
            return
        for mask, info in file.datasets("mask").items():
            demos = file.read_small(f"mask/{mask}", info, _MAX_MASK_BYTES)
            if isinstance(demos, list):
                self._masks[mask] = demos
                for name in dict.fromkeys(demos):
                    self._masks_of.setdefault(name, []).append(mask)

    def _compare_first(self, episodes: Sequence[EpisodeInfo]) -> None:
        """Check the `next_obs` of the first episodes, up to `_COMPARED_BYTES` bytes."""
        bytes_left = _COMPARED_BYTES
        for info in episodes[:_COMPARED_EPISODES]:
            row_bytes = sum(field.row_bytes for field in info.final.values())
            bytes_left -= 2 * info.length * row_bytes
            if bytes_left >= 0:
                for name in info.final:
                    self._compare(info, name)

    def read_final(self, number: int, name: str) -> Any:
        info = self.episodes[number]
        if (info.name, name) not in self._compared:
            problem = self._compare(info, name)
            if problem is not None:
                warnings.warn(str(problem), RolloutDataWarning, stacklevel=2)
        return super().read_final(number, name)

    def _compare(self, info: EpisodeInfo, name: str) -> DataFileError | None:
        """Check that `next_obs` repeats the next rows of `obs`, unless it is read as a field.

        Returns:
            The reported problem if a row differs; None if all rows are equal or are not compared.
        """
        self._compared.add((info.name, name))
        layout: Layout = info.source.layout
        following = layout.final[name]
        is_delivered = following.first == 0 or self.options.get("keep_next_obs", False)
        if is_delivered or name not in layout.columns or following.kind == "text":
            return None
        for start in range(0, info.length - 1, _COMPARED_ROWS):
            stop = min(start + _COMPARED_ROWS, info.length - 1)
            rows = self.read_rows(info, layout.columns[name], start + 1, stop + 1)
            next_rows = self.read_rows(info, following, start, stop)
            if np.array_equal(rows, next_rows, equal_nan=rows.dtype.kind == "f"):
                continue
            is_different = (rows != next_rows).reshape(len(rows), -1).any(1)
            step = start + int(np.argmax(is_different))
            message = (
                f"Row {step} of {following.path!r} of {info.name!r} of {str(self.path)!r} differs "
                f"from row {step + 1} of obs. Open the file with keep_next_obs=True to read next_obs."
            )
            return self.problem(message, kind="next", episode=info.name)
        return None


def _original_names(text: Any) -> dict[str, str]:
    """Parse the attribute that maps flattened keys of `obs` to the original observation names."""
    names = {}
    for key, name in parse_attribute(text, OBS_NAMES).items():
        if isinstance(name, str) and all(name.split("/")) and flat_key(name) == key:
            names[key] = name
    return names


def _control_mode(env_args: Mapping[str, Any]) -> str:
    """Return the control mode of actions in robosuite's terms, or "unknown"."""
    settings: Any = env_args.get("env_kwargs")
    controller = settings.get("controller_configs") if isinstance(settings, dict) else None
    return _mode_of(controller) or "unknown"


def _mode_of(settings: Any) -> str:
    """Return the mode of a controller and of its parts; "" if the mode is unknown."""
    if not isinstance(settings, dict) or not isinstance(settings.get("type"), str):
        return ""
    delta = {True: "delta", False: "absolute"}.get(settings.get("control_delta", ""), "")
    words = [settings["type"], str(settings.get("input_type", delta))]
    parts = settings.get("body_parts")
    if isinstance(parts, dict):
        modes = [f"{name} {_mode_of(part)}" for name, part in sorted(parts.items())]
        words.append(", ".join(modes))
    return " ".join(filter(None, words)).strip()
