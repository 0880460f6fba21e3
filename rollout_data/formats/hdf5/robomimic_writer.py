"""Writing robomimic's files: `data/demo_<i>` with `actions`, `obs/<key>` and other fields of an episode.

robomimic reads the same datasets from every demo, and takes a key of `obs` up to its first "/".
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from storage.core.fields import Field
from storage.errors import UsageError
from storage.saving.hdf5_files import MAX_HEAP_BYTES

from ...sources.episode_reader import ABSENT
from ...writing.conversion_record import ConversionNote
from ..episode_writer import (
    Array,
    EpisodeToWrite,
    SharedFields,
    finals_of,
    has_open_end,
    has_unknown_end,
    plain,
    shared_fields,
)
from .flattened_names import OBS_NAMES, REPEATED, flat_key
from .hdf5_writer import Hdf5Writer, Rows, written_dtype

_DEMO = re.compile(r"demo_\d+")
#: Our name of a group of fields -> its group in a demo.
_GROUPS = {"observation": "obs", "action": "action_dict", "reward": "rewards"}
#: robomimic's number for data that no simulator of its own makes.
_REAL = 4
Form = tuple[np.dtype[Any], tuple[int, ...]]


class Writer(Hdf5Writer):
    """Demos; ids such as "demo_7" stay, other episodes are numbered and keep their ids in `ep_meta`.

    Options:
        next_obs: Also write the following observations, which robomimic reads by default and which take as much again.
            False leaves out the observation after the last step.
        missing_reward: Reward of episodes without rewards; None writes no rewards then.
        obs_key: Name of an observation that has none.
        env_name, env_kwargs: Of `env_args`, where the recording does not say them.
    """

    format = "robomimic"
    HOLDS = frozenset(("control_mode", "env", "env_args", "env_name", "total"))
    #: Says in the report what is written of the ends of episodes.
    but_dones = ", but for `dones`, which readers do not take for it"
    OPTIONS: ClassVar[Mapping[str, Any]] = {
        "next_obs": True,
        "missing_reward": None,
        "obs_key": "state",
        "env_name": "",
        "env_kwargs": None,
    }

    @classmethod
    def effective(
        cls,
        options: Mapping[str, Any],
        path: Path,
        episodes: Sequence[EpisodeToWrite],
        metadata: Mapping[str, Any],
    ) -> dict[str, Any]:
        found = {**options, "env_name": _env_name(options, metadata)}
        if "next_obs" in found:
            found["next_obs"] = bool(found["next_obs"])
        if "env_kwargs" in found:
            found["env_kwargs"] = _env_kwargs(options, metadata)
        return found

    @classmethod
    def rows_of(cls, note: ConversionNote) -> dict[str, Rows]:
        return {name: Rows(f"data/{demo}") for name, demo in _demos_of(note.written_ids()).items()}

    def begin(self) -> set[str]:
        self._demos = _demos_of([episode.id for episode in self.episodes])
        self._writes_next = bool(self.options.get("next_obs"))
        self._fields = self.chosen_fields()
        self._check_names()
        datasets: dict[str, Form] = {}
        attributes: dict[str, dict[str, Any]] = {"/": self.about_root(), "data": self.about()}
        masks: dict[str, list[str]] = {}
        for episode in self.episodes:
            demo = self._demos[episode.id]
            group = f"data/{demo}"
            datasets.update({f"{group}/{at}": form for at, form in self.forms(episode).items()})
            attributes[group] = {"num_samples": episode.length, **self.about_episode(episode)}
            for mask in episode.metadata.get("mask", ()):
                masks.setdefault(f"mask/{mask}", []).append(demo)
        contents = {mask: np.array(demos, "S") for mask, demos in masks.items()}
        return self.make_file(datasets, contents, attributes)

    def chosen_fields(self) -> SharedFields:
        """Choose the fields of every demo; `dones` and made-up rewards are written whatever a demo has."""
        shared = shared_fields(self.episodes, has_one_form=False)
        written = {"dones"} if self.writes_dones else set()
        written |= {"reward"} if self.options.get("missing_reward") is not None else set()
        return replace(shared, left_out={name: why for name, why in shared.left_out.items() if name not in written})

    @property
    def writes_dones(self) -> bool:
        """Whether every demo has `dones`."""
        return True

    def key(self, name: str) -> str:
        """Return the key of an observation, of its name without "observation/"."""
        return flat_key(name)

    def _check_names(self) -> None:
        """Raise UsageError if there are no actions, or if two fields have one dataset."""
        names = list(self._fields.schema)
        if len(self.episodes) and not self._fields.schema.below("action"):
            reasons = [f"{name!r}: {why}" for name, why in self._fields.left_out.items() if name.startswith("action")]
            got = reasons[0] if reasons else "none"
            where = f"episodes of {str(self.path)!r} as {self.format}"
            raise UsageError("write", where, "actions in all episodes", got, "Select episodes of one kind")
        places: dict[str, str] = {}
        for name in names:
            if at := self.place(name):
                if at in places:
                    where = f"{places[at]!r} and {name!r} as {self.format}"
                    got = f"two for {at!r}"
                    raise UsageError("write", where, "one field for a dataset", got, "Rename one of them")
                places[at] = name

    def place(self, name: str) -> str:
        """Return the dataset of a field in a demo; "" if it has none."""
        head, _, rest = name.partition("/")
        if name == "observation":
            return f"obs/{self.options.get('obs_key', '')}".rstrip("/")
        if head == "observation":
            return f"obs/{self.key(rest)}"
        if name == "action":
            return "actions"
        if head == "reward":
            return "rewards" if self._fields.schema[name].num_elements == 1 else ""
        return f"{_GROUPS.get(head, head)}/{rest}".rstrip("/")

    def read_name(self, name: str) -> str:
        """Return the name under which a field is read."""
        key = self.options.get("obs_key")
        return f"observation/{key}" if name == "observation" and key else name

    def columns(self, episode: EpisodeToWrite) -> Iterator[tuple[Field, str]]:
        """Yield each field of a demo with its dataset."""
        for name, field in self._fields.schema.items():
            if (at := self.place(name)) and not (at == "dones" and self.writes_dones):
                yield episode.schema.get(name, field), at

    def forms(self, episode: EpisodeToWrite) -> dict[str, Form]:
        """Return dtype and shape of each dataset of a demo."""
        found: dict[str, Form] = {}
        for field, at in self.columns(episode):
            shape = () if at == "rewards" else field.shape
            found[at] = written_dtype(field), (episode.length, *shape)
            if self._has_next(field):
                found[f"next_{at}"] = found[at]
        if parts := self._action_parts(episode):
            dtype = np.result_type(*map(written_dtype, parts))
            found["actions"] = dtype, (episode.length, sum(part.num_elements for part in parts))
        if self.writes_dones:
            found["dones"] = np.dtype("<i8"), (episode.length,)
        if "rewards" not in found and self.options.get("missing_reward") is not None:
            found["rewards"] = np.dtype("<f8"), (episode.length,)
        return found | {at: (values.dtype, values.shape) for at, values in self.extras(episode).items()}

    def add(self, episode: EpisodeToWrite) -> None:
        group = f"data/{self._demos[episode.id]}"
        final = finals_of(episode) if self._writes_next else {}
        for field, at in self.columns(episode):
            self.copy(episode, field.name, f"{group}/{at}")
            if self._has_next(field):
                self._write_next(episode, field.name, f"{group}/next_{at}", final.get(field.name))
        if parts := self._action_parts(episode):
            rows = {part.name: episode.read(part.name) for part in parts}
            dtype = np.result_type(*map(written_dtype, parts))
            self._file.write(f"{group}/actions", self.join(rows, dtype, episode))
        if self.writes_dones:
            self._file.write(f"{group}/dones", self._dones(episode))
        self._write_missing_reward(episode, group)
        for at, values in self.extras(episode).items():
            self._file.write(f"{group}/{at}", values)
        self._report(episode)
        self.note(episode)

    def _write_next(self, episode: EpisodeToWrite, name: str, dataset: str, final: Array | None) -> None:
        """Write the observations after each step; the last one again if no later one is known."""
        self.copy(episode, name, dataset, steps=range(1, episode.length))
        if final is None:
            final = self._fields.read(episode, name, episode.length - 1, episode.length)[0]
            self.changed("the last observation is written again as `next_obs`: no later one is known", episode)
        self._file.write(dataset, final[None], episode.length - 1)

    def _dones(self, episode: EpisodeToWrite) -> Array:
        """Return the `dones` of an episode, or 1 in its last row if it was terminated."""
        if _has_dones(episode):
            return self.cast(episode.read("dones"), np.dtype("<i8"), "dones", episode).reshape(-1)
        self.changed("the field 'dones' is left out: it has several values a step", episode, "dones" in episode.schema)
        if not episode.terminated and not episode.truncated:
            why = "the episode has no end" if has_open_end(episode) else "the end of the episode is not known"
            self.changed(f"`dones` is 0 in all steps: {why}", episode)
        dones = np.zeros(episode.length, np.int64)
        dones[-1] = bool(episode.terminated)
        return dones

    def _write_missing_reward(self, episode: EpisodeToWrite, group: str) -> None:
        reward = self._fields.schema.get("reward")
        if reward is not None and reward.num_elements == 1:
            return
        made_up = self.options.get("missing_reward")
        if made_up is None:
            lost = "there are no `rewards`, which robomimic reads by default: missing_reward= fills them"
            self.changed(lost, episode, self.writes_dones and not self._fields.schema.below("reward"))
            return
        rewards: Any = np.full(episode.length, made_up, np.float64)
        has_own = "reward" in episode.schema and episode.schema["reward"].num_elements == 1
        if has_own:
            rewards = self.cast(episode.read("reward"), np.dtype("<f8"), "reward", episode).reshape(-1)
        self._file.write(f"{group}/rewards", rewards)
        self.changed("rewards are made up by missing_reward", episode, not has_own)

    def extras(self, episode: EpisodeToWrite) -> dict[str, Array]:
        """Return datasets of a demo that hold metadata."""
        return {}

    def about_root(self) -> dict[str, Any]:
        """Attributes of the file."""
        return {}

    def about(self) -> dict[str, Any]:
        """Attributes of `data`."""
        given = self.metadata.get("env_args")
        name = _env_name(self.options, self.metadata)
        made = {"env_name": name, "type": _REAL, "env_kwargs": _env_kwargs(self.options, self.metadata)}
        total = sum(episode.length for episode in self.episodes)
        about = {"total": total, "env_args": json.dumps(given if isinstance(given, dict) and given else made)}
        names = (name.partition("/")[2] for name in self._fields.schema.below("observation"))
        renamed = {self.key(name): name for name in names if self.key(name) != name}
        return {**about, **({OBS_NAMES: json.dumps(renamed)} if renamed else {})}

    def about_episode(self, episode: EpisodeToWrite) -> dict[str, Any]:
        """Attributes of a demo, besides its length."""
        told = {**({"lang": episode.task} if episode.task else {}), **plain(episode.metadata)}
        told = {name: value for name, value in told.items() if name not in (ABSENT, REPEATED)}
        if self._demos[episode.id] != episode.id:
            told["id"] = episode.id
        absent = self._fields.absent(episode, self.read_name)
        if self.writes_dones and has_unknown_end(episode) and not _has_dones(episode):
            absent = [*absent, "dones"]
        if absent:
            told[ABSENT] = absent
        observations = (field for field, _ in self.columns(episode) if self._has_next(field))
        lacking = [field.name for field in observations if field.name not in episode.final]
        if lacking:
            told[REPEATED] = [self.place(name).removeprefix("obs/") for name in lacking]
        return {"ep_meta": json.dumps(self.fitting(told, MAX_HEAP_BYTES, episode))}

    def _action_parts(self, episode: EpisodeToWrite) -> list[Field]:
        """Return the parts of the action, which are joined as `actions`."""
        return [episode.schema[name] for name in self._fields.schema if name.startswith("action/")]

    def _has_next(self, field: Field) -> bool:
        return self._writes_next and field.name.split("/")[0] == "observation"

    def _report(self, episode: EpisodeToWrite) -> None:
        fields = self._fields.schema
        key = self.options.get("obs_key")
        for change in self._fields.changes(episode):
            self.changed(change, episode)
        for name in fields.below("observation"):
            at = self.place(name).removeprefix("obs/")
            self.changed(f"{name!r} is called {at!r}", episode, "/" in name and at != name.partition("/")[2])
        parts = [field.name for field in self._action_parts(episode)]
        self.changed(f"the parts of the action are joined as `actions`: {', '.join(parts)}", episode, parts)
        self.changed(f"texts of steps are left out ({', '.join(episode.texts)})", episode, episode.texts)
        self.changed(f"the observation is called {key!r}", episode, "observation" in fields and key)
        has_terms = any(field.num_elements > 1 for field in fields.below("reward").values())
        self.changed("rewards of several terms are left out", episode, has_terms)
        if "reward" in fields and not has_terms:
            self.reshaped("reward", (), episode)
        tells_end = episode.terminated is not None or episode.truncated is not None
        self.changed(f"how an episode ended is left out{self.but_dones}", episode, tells_end)
        lost_final = episode.final and not self._writes_next
        self.changed("the observation after the last step is left out", episode, lost_final)


def _has_dones(episode: EpisodeToWrite) -> bool:
    return "dones" in episode.schema and episode.schema["dones"].num_elements == 1


def _env_name(options: Mapping[str, Any], metadata: Mapping[str, Any]) -> str:
    return options["env_name"] or str(metadata.get("env", ""))


def _env_kwargs(options: Mapping[str, Any], metadata: Mapping[str, Any]) -> Any:
    mode = metadata.get("control_mode", "unknown")
    return options["env_kwargs"] or ({} if mode == "unknown" else {"controller_configs": {"type": mode}})


def _demos_of(ids: Sequence[str]) -> dict[str, str]:
    """Return the demo of each episode: names of demos stay, other episodes are numbered."""
    are_demos = all(map(_DEMO.fullmatch, ids))
    return {one: one if are_demos else f"demo_{number}" for number, one in enumerate(ids)}
