"""Writer of trajectory folders: files `trajectory_K/traj_START_END.pickle` and `metadata.json`.

The files can be read by the original reader of this format. The original reader reads every file in
a trajectory folder, so chunks are written outside of the folder and renamed. It orders trajectories
by the modification times of their folders, so the times are set in the order of the episodes.
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
#: The only codec of this format: values that are multiples of 1/255, stored as uint8.
_COUNTS = "normalized_image"
#: Seconds between the modification times of consecutive folders. Readers sort folders by them.
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
        self._folders = {}
        for number, episode in enumerate(self.episodes):
            self._folders[episode.id] = self.path / f"trajectory_{number}"
        self._fields = self._chosen_fields()
        if self.episodes:
            self._check_fields(self.episodes[0])
        self.path.mkdir(parents=True, exist_ok=True)
        for temporary in self.path.glob(".tmp_*"):
            temporary.unlink()
        return {episode.id for episode in self.episodes if self._file(episode).exists()}

    def _check_fields(self, episode: EpisodeToWrite) -> None:
        """Check that the chosen fields can be written. Errors name `episode`.

        Raises:
            UsageError: There is no action, no observation or no reward, or two names are equal.
        """
        schema = self._fields.schema
        left_out = self._fields.left_out
        observations = schema.below("observation")
        if "action" not in schema or not observations:
            reasons = [f"{name!r}: {reason}" for name, reason in left_out.items()]
            got = "; ".join(reasons) or repr(episode.schema)
            raise UsageError(
                f"episode {episode.id!r} cannot be written as a trajectory folder: {got}. All "
                "episodes need an observation and an action with the same dtype and shape."
            )
        names = Counter(_component(name.partition("/")[2]) for name in observations)
        repeated = [name for name, count in names.items() if count > 1]
        if repeated:
            raise UsageError(
                f"episode {episode.id!r} cannot be written as a trajectory folder, because several "
                f"observations are called {repeated[0]!r} without '/'. Rename them."
            )
        if "reward" not in schema and self.options["missing_reward"] is None:
            reason = left_out.get("reward")
            got = f"a reward that cannot be written: {reason}" if reason else "no reward"
            raise UsageError(
                f"episode {episode.id!r} has {got}. Pass missing_reward=... for the episodes "
                "without rewards."
            )

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
        lacking = set()
        for episode in self.episodes:
            lacking |= set(coded) - episode.schema.keys()
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
        """Return the arrays to write for an episode, by key. Report changes of the data."""
        chunk: dict[str, Any] = {}
        for change in self._fields.changes(episode):
            self.changed(change, episode)
        for name in episode.schema:
            self.changed(f"the field {name!r} is left out", episode, not _is_written(name))
        for name in self._fields.schema:
            if name != "reward":
                chunk[_key_of(name)] = self._flat_rows(episode, name)

        chunk["rewards"] = self._rewards(episode)
        chunk["values"] = np.zeros_like(chunk["rewards"])
        is_last = np.arange(episode.length) == episode.length - 1
        has_end = bool(episode.terminated) or bool(episode.truncated)
        chunk["dones"] = (is_last & has_end).astype(np.uint8)[:, None]
        chunk["timeouts"] = is_last & bool(episode.truncated)
        change = (
            "`dones` and `timeouts` are False in all steps: the end of the episode is not known"
        )
        self.changed(change, episode, has_unknown_end(episode))
        return chunk

    def _flat_rows(self, episode: EpisodeToWrite, name: str) -> Array:
        """Return the rows of a field as `[T, num_elements]`, float32 or uint8."""
        field = self._fields.schema[name]
        rows = np.array(self._fields.read(episode, name)).reshape(episode.length, -1)
        _, _, component = name.partition("/")
        if not component:
            self._report_shape(episode, name)
            return self._narrowed(rows, name, episode)

        if _COUNTS in field.codec and field.dtype != "uint8":
            # Values are multiples of 1/255, so the stored bytes are recovered exactly.
            rows = np.rint(rows * 255).astype(np.uint8)
        rows = self._narrowed(rows, name, episode, keeps_bytes=True)
        if field.dtype == "uint8":
            self.changed(f"{name!r} is read as float32, a 255th of each value", episode)
        if "/" in component:
            self.changed(f"{name!r} is called {_component(component)!r}", episode)
        return rows

    def _report_shape(self, episode: EpisodeToWrite, name: str) -> None:
        field = self._fields.schema[name]
        if len(field.shape) > 1:
            self.changed(f"{name!r} is flattened", episode)
        else:
            self.reshaped(name, (field.num_elements,), episode)

    def _rewards(self, episode: EpisodeToWrite) -> Array:
        """Return the rewards of an episode: float32 `[T, R]`."""
        if "reward" in self._fields.schema:
            self._report_shape(episode, "reward")
        if "reward" in episode.schema:
            rewards = np.array(episode.read("reward")).reshape(episode.length, -1)
            return self._narrowed(rewards, "reward", episode)

        width = 1
        for other in self.episodes:
            if "reward" in other.schema:
                width = other.schema["reward"].num_elements
                break
        self.changed("rewards are made up by missing_reward", episode)
        return np.full((episode.length, width), self.options["missing_reward"], np.float32)

    def _absent(self, episode: EpisodeToWrite) -> list[str]:
        """Return the names of the fields and flags that an episode lacks."""
        names = [*self._fields.absent(episode, _read_name)]
        if has_unknown_end(episode):
            names += [DONES, TIMEOUTS[0]]
        return names

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
        content = self._metadata_of(episodes)
        self._set_times(episodes)
        with replace_file(self.path / "metadata.json") as temporary:
            temporary.write_text(json.dumps(content, indent=1), "utf-8")
            # The files are recorded again, because their modification times have changed.
            files = {self._name(episode): self._file(episode) for episode in episodes}
            self.note_files({**files, "metadata.json": temporary})
        self.note_finish()

    def _metadata_of(self, episodes: Sequence[EpisodeToWrite]) -> dict[str, Any]:
        """Return the content of `metadata.json` for the written episodes."""
        schema = self._fields.schema if episodes else Schema([])
        metadata = self.fitting_metadata()
        content = {name: value for name, value in metadata.items() if name not in DERIVED}
        content |= {
            "config": metadata.get("config"),
            "env": _named("env", self.options, self.metadata),
            "policy": _named("policy", self.options, self.metadata),
            "rollout_storage_length": max((episode.length for episode in episodes), default=0),
            "success_traj_only": False,
            "min_timesteps": 0,
            "min_episodes": 0,
            "use_critic_obs": "privileged_observation" in schema,
            "total_timesteps": sum(episode.length for episode in episodes),
            "total_trajectories": len(episodes),
        }

        absent = {}
        for episode in episodes:
            names = self._absent(episode)
            if names:
                absent[self._folders[episode.id].name] = names
        if absent:
            content[ABSENT] = absent

        components = {}
        for name, field in schema.items():
            if name.startswith("observation/"):
                components[_component(name.partition("/")[2])] = field
        if components:
            content["obs_segments"] = {
                name: list(field.shape) for name, field in components.items()
            }
            mapping = {}
            for name, field in components.items():
                if _COUNTS in field.codec or field.dtype == "uint8":
                    mapping[name] = _COUNTS
            content["obs_disassemble_mapping"] = mapping
        return content

    def _set_times(self, episodes: Sequence[EpisodeToWrite]) -> None:
        """Set the modification times of the folders and files in the order of the episodes."""
        folders = [self._folders[episode.id] for episode in episodes]
        last_s = max((folder.stat().st_mtime for folder in folders), default=0)
        for number, folder in enumerate(folders):
            time_s = last_s - _STEP_S * (len(folders) - number)
            os.utime(folder, (time_s, time_s))
            for file in folder.iterdir():
                os.utime(file, (time_s, time_s))


def _named(name: str, options: Mapping[str, Any], metadata: Mapping[str, Any]) -> str:
    return options[name] or str(metadata.get(name, ""))


def _key_of(name: str) -> str:
    """Return the key of the array in a chunk that contains a field."""
    head, _, component = name.partition("/")
    return f"obs_{_component(component)}" if component else _KEYS[head]


def _is_written(name: str) -> bool:
    """Return whether a chunk can contain a field named `name`."""
    return name in _KEYS or name == "reward" or name.startswith("observation/")


def _read_name(name: str) -> str:
    """Return the name under which the reader of this format returns a field."""
    head, separator, rest = name.partition("/")
    return f"{head}{separator}{_component(rest)}"


def _component(name: str) -> str:
    """Return the name of an observation component in a chunk. Names are not nested: "/" is "_"."""
    return name.replace("/", "_")
