"""robomimic's files: `data/demo_<i>` with `actions`, `obs/<key>`, and perhaps `next_obs`, `rewards`, `dones`, `states`.

One rule: `dones` marks successes or last steps, depending on how a file was made, so it is a field and not an end.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import h5py
import numpy as np

from storage.errors import DataFileError, RolloutDataWarning

from ...sources.episode_reader import ABSENT, EpisodeInfo
from ..format_detection import ROBOMIMIC_DATA, ROBOMIMIC_DEMO
from ..input_checks import parse_attribute
from .flattened_names import OBS_NAMES, REPEATED, flat_key
from .hdf5_datasets import OpenFile
from .hdf5_episodes import Hdf5Reader, Layout, LayoutMaker

#: Limits of the comparison with the next ones while a file is opened: episodes, bytes of observations, rows at a time.
_COMPARED_EPISODES, _COMPARED_BYTES, _COMPARED_ROWS = 50, 1 << 24, 256
_MAX_MASK_BYTES = 1 << 24


class Reader(Hdf5Reader):
    """Demos in the order of their numbers; where a demo has `next_obs`, its last row is the final observation.

    Options:
        keep_next_obs: Also give `next_obs/<key>` as fields. Otherwise only its last row is given, and a problem tells
            if the other rows are not the next ones of `obs`.
        terminated_from_dones: Take a 1 in the last row of `dones` for a termination.
    """

    format = "robomimic"
    OPTIONS: ClassVar[Mapping[str, Any]] = {"keep_next_obs": False, "terminated_from_dones": False}
    STEPS: ClassVar[Mapping[str, str]] = {"actions": "action", "rewards": "reward", "obs": "observation"}
    STATED = "num_samples"
    GROUPS = ("obs",)
    KNOWN: ClassVar[tuple[str, ...]] = ("ep_meta",)

    def scan(self) -> Sequence[EpisodeInfo]:
        self._masks: dict[str, list[str]] = {}  # name -> its demos
        self._masks_of: dict[str, list[str]] = {}  # demo -> names
        self._compared: set[tuple[str, str]] = set()
        self._obs_names: dict[str, str] = {}  # key of `obs` -> name of the observation
        with self.files.use(self.path) as file:
            data = file.group(ROBOMIMIC_DATA)
            names = file.numbered(ROBOMIMIC_DATA, ROBOMIMIC_DEMO)
            self.describe(file, data)
            self._obs_names = _original_names(self.metadata.pop(OBS_NAMES, None))
            self._read_masks(file)
            episodes = self.collect(self.path, ROBOMIMIC_DATA, names)
            total = file.attribute(data, "total")
        self.checked_some(episodes, "a demo")
        if total is not None and not self.problems and total != (got := self.num_steps(episodes)):
            expected = f"{got} steps, as the demos have"
            self.problem("believe", f"'total' of {str(self.path)!r}", expected, str(total)).of("counts")
        present = {one.name for one in episodes}
        known = set(names)
        for mask, listed in self._masks.items():
            if lost := [name for name in listed if name not in known]:
                self.problem("select", f"by mask {mask!r} of {str(self.path)!r}", "demos", lost[0]).of("split")
        self.splits = {mask: [name for name in listed if name in present] for mask, listed in self._masks.items()}
        self._compare_some(episodes)
        return episodes

    def num_steps(self, episodes: Sequence[EpisodeInfo]) -> int:
        """Add up the rows of all demos."""
        return sum(one.length for one in episodes)

    def describe(self, file: OpenFile, data: Any) -> None:
        """Fill the metadata of the whole from the attributes of `data`; texts that are JSON are parsed."""
        self.metadata = {**file.attributes(data), **self.metadata}
        known = parse_attribute(self.metadata.get("env_args"), "env_args")
        about = {"env_name": str(known.get("env_name", "")), "control_mode": _control_mode(known)}
        self.metadata.update(about, env_args=known)

    def put(self, maker: LayoutMaker, path: str) -> None:
        seen = path.removeprefix("next_")
        if seen == path or not path.startswith("next_obs") or seen not in maker.found:
            if path.startswith("obs/"):
                maker.add(self._name_of(maker, path), path)
            else:
                super().put(maker, path)
            return
        if self.options.get("keep_next_obs"):
            maker.add(path, path)
        maker.check_rows(path)
        maker.add_final(self._name_of(maker, seen), path, -1)

    def _name_of(self, maker: LayoutMaker, path: str) -> str:
        """Return the name of the observation in a dataset: the one that our writer flattened, if it did."""
        key = path.removeprefix("obs/")
        original = self._obs_names.get(key, key)
        return path.replace("obs", "observation", 1) if f"obs/{original}" in maker.found else f"observation/{original}"

    def about(self, file: OpenFile, node: Any, length: int) -> dict[str, Any]:
        name = h5py.h5i.get_name(node).decode().rpartition("/")[2]
        told = parse_attribute(file.attribute(node, "ep_meta"), "ep_meta")
        if masks := self._masks_of.get(name):
            told["mask"] = masks
        task = told.get("lang", "")
        success = told.get("success")
        repeated = told.pop(REPEATED, None)
        found: dict[str, Any] = {"metadata": told, "task": task if isinstance(task, str) else ""}
        found["success"] = success if isinstance(success, bool) else None
        if isinstance(repeated, list):
            names = [self._obs_names.get(key, key) for key in map(str, repeated)]
            found["repeated"] = {"observation", *(f"observation/{one}" for one in names)}
        is_told = "dones" not in (told.get(ABSENT) or ())
        if self.options.get("terminated_from_dones") and is_told:
            found["terminated"] = self.flag(file, node, "dones", length)
        return found

    def _read_masks(self, file: OpenFile) -> None:
        masks = file.open("mask")
        for mask, found in (file.survey("mask") if isinstance(masks, h5py.h5g.GroupID) else {}).items():
            listed = file.whole(f"mask/{mask}", found, _MAX_MASK_BYTES)
            if isinstance(listed, list):
                self._masks[mask] = listed
                for name in dict.fromkeys(listed):
                    self._masks_of.setdefault(name, []).append(mask)

    def _compare_some(self, episodes: Sequence[EpisodeInfo]) -> None:
        """Compare `next_obs` with `obs` in the first episodes."""
        left = _COMPARED_BYTES
        for info in episodes[:_COMPARED_EPISODES]:
            left -= 2 * info.length * sum(one.row_bytes for one in info.final.values())
            for name in info.final if left >= 0 else ():
                self.compare(info, name)

    def read_final(self, number: int, name: str) -> Any:
        info = self.episodes[number]
        if (info.name, name) not in self._compared and (problem := self.compare(info, name)):
            warnings.warn(str(problem), RolloutDataWarning, stacklevel=2)
        return super().read_final(number, name)

    def compare(self, info: EpisodeInfo, name: str) -> DataFileError | None:
        """Note if the rows of `next_obs`, of which only the last is given, are not the next rows of `obs`."""
        layout: Layout = info.source.layout
        self._compared.add((info.name, name))
        following = layout.final[name]
        keeps_all = self.options.get("keep_next_obs", False)
        if following.first == 0 or name not in layout.columns or keeps_all or following.kind == "text":
            return None
        for start in range(0, info.length - 1, _COMPARED_ROWS):
            stop = min(start + _COMPARED_ROWS, info.length - 1)
            now = self.rows(info, layout.columns[name], start + 1, stop + 1)
            if not np.array_equal(
                now, then := self.rows(info, following, start, stop), equal_nan=now.dtype.kind == "f"
            ):
                step = start + int(np.argmax((now != then).reshape(len(now), -1).any(1)))
                where = f"{following.path!r} of {info.name!r} of {str(self.path)!r}"
                advice = "Open it with keep_next_obs=True to read them"
                wrong = self.problem("leave out", where, f"row {step} as row {step + 1} of obs", "others", advice)
                return wrong.of("next", info.name)
        return None


def _original_names(text: Any) -> dict[str, str]:
    """Read the names of observations that our writer flattened; an entry that does not fit its key is ignored."""
    names = parse_attribute(text, OBS_NAMES)
    texts = {key: name for key, name in names.items() if isinstance(name, str)}
    return {key: name for key, name in texts.items() if all(name.split("/")) and flat_key(name) == key}


def _control_mode(env_args: Mapping[str, Any]) -> str:
    """Return how actions control the robot, in robosuite's words; "unknown" if the file does not."""
    settings: Any = env_args.get("env_kwargs")
    return _mode_of(settings.get("controller_configs") if isinstance(settings, dict) else None) or "unknown"


def _mode_of(settings: Any) -> str:
    """Return the mode of a controller, and of the parts of one that is made of several."""
    if not isinstance(settings, dict) or not isinstance(settings.get("type"), str):
        return ""
    delta = {True: "delta", False: "absolute"}.get(settings.get("control_delta", ""), "")
    parts = settings.get("body_parts")
    each = [f"{name} {_mode_of(one)}" for name, one in sorted(parts.items())] if isinstance(parts, dict) else []
    return " ".join(filter(None, [settings["type"], str(settings.get("input_type", delta)), ", ".join(each)])).strip()
