"""Writer of the older layout: files `trajectory_K/traj_START_END.pickle` and `metadata.json`.

The original reader reads every file in a trajectory folder. Chunks are therefore written outside of
it and renamed. The original reader orders trajectories by the modification times of their folders.
These times are therefore set in the order of the episodes.
"""

from __future__ import annotations

import json
import os
import pickle
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from storage.core.durable_files import replace_file
from storage.core.fields import Schema
from storage.errors import UsageError

from ...sources.episode_info import ABSENT
from ..episode_writer import (
    DERIVED,
    Array,
    EpisodeToWrite,
    ForeignWriter,
    SharedFields,
    has_unknown_end,
    shared_fields,
)
from .trajectory_chunks import DONES, TIMEOUTS

_KEYS = {
    "observation": "observations",
    "privileged_observation": "privileged_observations",
    "action": "actions",
}
#: Only codec of this layout: values that are multiples of 1/255, stored as uint8.
_COUNTS = "normalized_image"
#: Seconds between the modification times of consecutive folders.
_STEP_S = 1


class TrajectoryFolderWriter(ForeignWriter):
    """Writer of trajectory folders with float32 arrays.

    Each component of an observation is stored under the key `obs_<name>`.

    Options:
        env, policy: Names for `metadata.json`.
        missing_reward: Reward of every frame in episodes without rewards. None raises an error for
            such episodes.
    """

    format = "trajectory-folders"
    HOLDS = None
    OPTIONS: ClassVar[Mapping[str, Any]] = {"env": "", "policy": "", "missing_reward": None}

    MADE = ("trajectory_*",)
    LAST = "metadata.json"

    @classmethod
    def is_finished(cls, path: Path) -> bool:
        return (path / "metadata.json").exists()

    @classmethod
    def effective(
        cls,
        options: Mapping[str, Any],
        path: Path,
        episodes: Sequence[EpisodeToWrite],
        metadata: Mapping[str, Any],
    ) -> dict[str, Any]:
        return {**options, **{name: _named(name, options, metadata) for name in ("env", "policy")}}

    def begin(self) -> set[str]:
        self._folders = {
            source.id: self.path / f"trajectory_{number}"
            for number, source in enumerate(self.episodes)
        }
        self._fields = self._chosen_fields()
        for episode in self.episodes:
            if "action" not in self._fields.schema or not self._fields.schema.below("observation"):
                reasons = [f"{name!r}: {why}" for name, why in self._fields.left_out.items()]
                got = "; ".join(reasons) or repr(episode.schema)
                raise UsageError(
                    f"episode {episode.id!r} cannot be written as a trajectory folder: {got}. "
                    "All episodes need an observation and an action with the same dtype and shape."
                )
            parts = Counter(
                _component(name.partition("/")[2])
                for name in self._fields.schema.below("observation")
            )
            if twice := [part for part, count in parts.items() if count > 1]:
                raise UsageError(
                    f"episode {episode.id!r} cannot be written as a trajectory folder, because "
                    f"several observations are called {twice[0]!r} without '/'. Rename them."
                )
            if "reward" not in self._fields.schema and self.options["missing_reward"] is None:
                reason = self._fields.left_out.get("reward")
                got = f"a reward that cannot be written: {reason}" if reason else "no reward"
                raise UsageError(
                    f"episode {episode.id!r} has {got}. Pass missing_reward=... for the episodes "
                    "without rewards."
                )
        self.path.mkdir(parents=True, exist_ok=True)
        for left in self.path.glob(".tmp_*"):
            left.unlink()
        return {source.id for source in self.episodes if self._file(source).exists()}

    def _file(self, episode: EpisodeToWrite) -> Path:
        return self._folders[episode.id] / f"traj_{0:06d}_{episode.length:06d}.pickle"

    def _name(self, episode: EpisodeToWrite) -> str:
        """Return the path of an episode's file, relative to the target."""
        return self._file(episode).relative_to(self.path).as_posix()

    def _chosen_fields(self) -> SharedFields:
        """Choose the fields that every chunk contains.

        A component that is stored as uint8 is left out if an episode lacks it, because uint8 has no
        NaN.
        """
        shared = shared_fields(self.episodes)
        coded = [name for name, field in shared.schema.items() if _COUNTS in field.codec]
        lacking = {
            name for episode in self.episodes for name in coded if name not in episode.schema
        }
        left_out = {**shared.left_out, **dict.fromkeys(sorted(lacking), "not all episodes have it")}
        if self.options["missing_reward"] is not None:
            left_out.pop("reward", None)
        written = [name for name in shared.schema if _is_written(name) and name not in lacking]
        kept = Schema(shared.schema[name] for name in written)
        return SharedFields(kept, shared.texts, left_out)

    def add(self, episode: EpisodeToWrite) -> None:
        folder = self._folders[episode.id]
        chunk = self._chunk(episode)
        temporary = self.path / f".tmp_{folder.name}.pickle"
        with replace_file(self._file(episode), temporary=temporary) as new:
            with open(new, "wb") as out:
                pickle.dump(chunk, out, protocol=4)
            self.note(episode, {self._name(episode): new})
            folder.mkdir(exist_ok=True)
        self.written.add(episode.id)
        if episode.texts or episode.task or episode.metadata:
            self.changed("texts and metadata of episodes are left out", episode)
        if episode.final:
            self.changed("the observation after the last step is left out", episode)

    def _chunk(self, episode: EpisodeToWrite) -> dict[str, Any]:
        length = episode.length
        chunk: dict[str, Any] = {}
        for change in self._fields.changes(episode):
            self.changed(change, episode)
        for name in episode.schema:
            self.changed(f"the field {name!r} is left out", episode, not _is_written(name))
        for name, field in self._fields.schema.items():
            head, _, rest = name.partition("/")
            flat = np.array(self._fields.read(episode, name)).reshape(length, -1)
            if len(field.shape) > 1 and name in (*_KEYS, "reward"):
                self.changed(f"{name!r} is flattened", episode)
            elif name in (*_KEYS, "reward"):
                self.reshaped(name, (field.num_elements,), episode)
            if head == "observation" and rest:
                if _COUNTS in field.codec and field.dtype != "uint8":
                    # Values are multiples of 1/255, so the stored bytes are recovered exactly.
                    flat = np.rint(flat * 255).astype(np.uint8)
                chunk[f"obs_{_component(rest)}"] = self._narrowed(
                    flat, name, episode, keeps_bytes=True
                )
                if field.dtype == "uint8":
                    self.changed(f"{name!r} is read as float32, a 255th of each value", episode)
                if "/" in rest:
                    self.changed(f"{name!r} is called {_component(rest)!r}", episode)
            elif name in _KEYS:
                chunk[_KEYS[name]] = self._narrowed(flat, name, episode)
        if "reward" in episode.schema:
            rewards = np.array(episode.read("reward")).reshape(length, -1)
            chunk["rewards"] = self._narrowed(rewards, "reward", episode)
        else:
            widths = (
                other.schema["reward"].num_elements
                for other in self.episodes
                if "reward" in other.schema
            )
            shape = length, next(widths, 1)
            chunk["rewards"] = np.full(shape, self.options["missing_reward"], np.float32)
            self.changed("rewards are made up by missing_reward", episode)
        chunk["values"] = np.zeros_like(chunk["rewards"])
        is_last = np.arange(length) == length - 1
        has_end = bool(episode.terminated) or bool(episode.truncated)
        chunk["dones"] = (is_last & has_end).astype(np.uint8)[:, None]
        chunk["timeouts"] = is_last & bool(episode.truncated)
        what = "`dones` and `timeouts` are False in all steps: the end of the episode is not known"
        self.changed(what, episode, has_unknown_end(episode))
        return chunk

    def _absent(self, episode: EpisodeToWrite) -> list[str]:
        """Return the names of the fields and flags that an episode lacks."""
        return [
            *self._fields.absent(episode, _read_name),
            *((DONES, TIMEOUTS[0]) if has_unknown_end(episode) else ()),
        ]

    def _narrowed(
        self, values: Array, name: str, episode: EpisodeToWrite, keeps_bytes: bool = False
    ) -> Array:
        """Convert values to float32, which the original reader needs. `keeps_bytes` keeps uint8."""
        if values.dtype == np.float32 or (keeps_bytes and values.dtype == np.uint8):
            return values
        self.changed(f"{values.dtype} is written as float32", episode)
        return self.cast(values, np.dtype(np.float32), name, episode)

    def close(self) -> None:
        if not self.is_complete or self.is_finished(self.path):
            return
        episodes = [episode for episode in self.episodes if episode.id in self.written]
        first = self._fields.schema if episodes else Schema([])
        components = {
            _component(name.partition("/")[2]): field
            for name, field in first.items()
            if name.startswith("observation/")
        }
        metadata = self.fitting_metadata()
        about = {
            **{name: value for name, value in metadata.items() if name not in DERIVED},
            "config": metadata.get("config"),
            "env": _named("env", self.options, self.metadata),
            "policy": _named("policy", self.options, self.metadata),
            "rollout_storage_length": max((episode.length for episode in episodes), default=0),
            "success_traj_only": False,
            "min_timesteps": 0,
            "min_episodes": 0,
            "use_critic_obs": "privileged_observation" in first,
            "total_timesteps": sum(episode.length for episode in episodes),
            "total_trajectories": len(episodes),
        }
        absent = {self._folders[episode.id].name: self._absent(episode) for episode in episodes}
        if noted := {folder: names for folder, names in absent.items() if names}:
            about[ABSENT] = noted
        if components:
            about["obs_segments"] = {name: list(field.shape) for name, field in components.items()}
            coded = [
                name
                for name, field in components.items()
                if _COUNTS in field.codec or field.dtype == "uint8"
            ]
            about["obs_disassemble_mapping"] = dict.fromkeys(coded, _COUNTS)
        folders = [self._folders[episode.id] for episode in episodes]
        last_s = max((folder.stat().st_mtime for folder in folders), default=0)
        for number, folder in enumerate(folders):
            time_s = last_s - _STEP_S * (len(folders) - number)
            os.utime(folder, (time_s, time_s))
            for file in folder.iterdir():
                os.utime(file, (time_s, time_s))
        with replace_file(self.path / "metadata.json") as temporary:
            temporary.write_text(json.dumps(about, indent=1), "utf-8")
            # The files are recorded again, because their modification times have changed.
            files = {self._name(episode): self._file(episode) for episode in episodes}
            self.note_files({**files, "metadata.json": temporary})
        self.note_finish()


def _named(name: str, options: Mapping[str, Any], metadata: Mapping[str, Any]) -> str:
    return options[name] or str(metadata.get(name, ""))


def _is_written(name: str) -> bool:
    """Return whether a chunk can contain a field named `name`."""
    return name in _KEYS or name == "reward" or name.startswith("observation/")


def _read_name(name: str) -> str:
    """Return the name of a field in the reader of this layout."""
    head, separator, rest = name.partition("/")
    return f"{head}{separator}{_component(rest)}"


def _component(name: str) -> str:
    """Return the component name in a chunk, which has no nested names: "/" becomes "_"."""
    return name.replace("/", "_")
