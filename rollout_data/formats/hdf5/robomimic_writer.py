"""Writer of robomimic files: groups `data/demo_<i>` with `actions`, `obs/<key>` and other fields.

robomimic reads the same datasets from every demo. A key of `obs` must not contain "/".
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from storage.core.fields import Field
from storage.errors import UsageError
from storage.saving.hdf5_files import MAX_HEAP_BYTES

from ...sources.episode_info import ABSENT
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
from .hdf5_writer import EpisodeRows, Form, Hdf5Writer, has_number, without_left_out, written_dtype

_DEMO = re.compile(r"demo_\d+")
#: Maps the first part of field names to the HDF5 group of such fields in a demo.
_GROUPS = {"observation": "obs", "action": "action_dict", "reward": "rewards"}
#: Value of `type` in `env_args` for environments that robomimic does not simulate.
_REAL = 4


class RobomimicWriter(Hdf5Writer):
    """Writer of one HDF5 file with a group per episode, called a demo.

    Ids such as "demo_7" are kept if all episodes have such an id. Otherwise the demos are numbered,
    and `ep_meta` has the ids.

    Options:
        next_obs: Also write the observations after each step, which robomimic reads by default and
            which double the size. False leaves out the observation after the last step.
        missing_reward: Reward for episodes without rewards; None writes no rewards then.
        obs_key: Key of an observation without a name.
        env_name: Name of the environment in `env_args`, if the recording does not state it.
        env_kwargs: Arguments of the environment in `env_args`, if the recording does not state
            them.
    """

    format = "robomimic"
    HOLDS = frozenset(("control_mode", "env", "env_args", "env_name", "total"))
    #: End of the report line which says that the ends of episodes are left out.
    ends_exception = ", except `dones`, which readers do not use as the end"
    #: Whether every demo has `dones`.
    writes_dones = True
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
        effective = {**options, "env_name": _env_name(options, metadata)}
        if "next_obs" in effective:
            effective["next_obs"] = bool(effective["next_obs"])
        if "env_kwargs" in effective:
            effective["env_kwargs"] = _env_kwargs(options, metadata)
        return effective

    @classmethod
    def rows_of(cls, note: ConversionNote) -> dict[str, EpisodeRows]:
        demos = _demos_of(note.written_ids())
        return {name: EpisodeRows(f"data/{demo}") for name, demo in demos.items()}

    def begin(self) -> set[str]:
        self._demos = _demos_of([episode.id for episode in self.episodes])
        self._writes_next = bool(self.options.get("next_obs"))
        self._missing_reward = self.options.get("missing_reward")
        self._fields = self._chosen_fields()
        self._check_names()
        datasets: dict[str, Form] = {}
        attributes: dict[str, dict[str, Any]] = {
            "/": self.root_attributes(),
            "data": self.data_attributes(),
        }
        masks: dict[str, list[str]] = {}
        for episode in self.episodes:
            demo = self._demos[episode.id]
            group = f"data/{demo}"
            for dataset, form in self._forms(episode).items():
                datasets[f"{group}/{dataset}"] = form
            attributes[group] = {
                "num_samples": episode.length,
                **self.episode_attributes(episode),
            }
            for mask in episode.metadata.get("mask", ()):
                masks.setdefault(f"mask/{mask}", []).append(demo)
        contents = {mask: np.array(demos, "S") for mask, demos in masks.items()}
        return self.make_file(datasets, contents, attributes)

    def _chosen_fields(self) -> SharedFields:
        """Choose the fields of every demo.

        `dones` and filled rewards are written to every demo, so they are not reported as left out.
        """
        shared = shared_fields(self.episodes, has_one_form=False)
        made = set()
        if self.writes_dones:
            made.add("dones")
        if self._missing_reward is not None:
            made.add("reward")
        return without_left_out(shared, made)

    def key(self, name: str) -> str:
        """Return the key in `obs` for an observation name without the prefix "observation/"."""
        return flat_key(name)

    def _check_names(self) -> None:
        """Raise `UsageError` if there are no actions, or if two fields have the same dataset."""
        schema = self._fields.schema
        if len(self.episodes) and not schema.below("action"):
            got = "no episode has an action"
            for name, reason in self._fields.left_out.items():
                if name.startswith("action"):
                    got = f"{name!r} is left out because {reason}"
                    break
            raise UsageError(
                f"{self.format} needs actions in all episodes, but {got}. Select episodes with "
                "the same fields."
            )
        owners: dict[str, str] = {}
        for name in schema:
            dataset = self._dataset_of(name)
            if dataset in owners:
                raise UsageError(
                    f"fields {owners[dataset]!r} and {name!r} would both become dataset "
                    f"{dataset!r} of {self.format}. Rename one of the fields."
                )
            if dataset:
                owners[dataset] = name

    def _dataset_of(self, name: str) -> str:
        """Return the dataset of a field in a demo; "" if the format cannot store the field."""
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

    def _read_name(self, name: str) -> str:
        """Return the name under which the reader of this format returns a field."""
        key = self.options.get("obs_key")
        return f"observation/{key}" if name == "observation" and key else name

    def _columns(self, episode: EpisodeToWrite) -> Iterator[tuple[Field, str]]:
        """Yield (field, name of the dataset) for each field that is copied to a demo."""
        for name, field in self._fields.schema.items():
            dataset = self._dataset_of(name)
            is_made = dataset == "dones" and self.writes_dones
            if dataset and not is_made:
                yield episode.schema.get(name, field), dataset

    def _forms(self, episode: EpisodeToWrite) -> dict[str, Form]:
        """Map the name of each dataset of a demo to its dtype and shape."""
        length = episode.length
        forms: dict[str, Form] = {}
        for field, dataset in self._columns(episode):
            shape = () if dataset == "rewards" else field.shape
            forms[dataset] = (written_dtype(field), (length, *shape))
            if self._has_next(field):
                forms[f"next_{dataset}"] = forms[dataset]
        parts = self._action_parts(episode)
        if parts:
            num_elements = sum(part.num_elements for part in parts)
            forms["actions"] = (_joined_dtype(parts), (length, num_elements))
        if self.writes_dones:
            forms["dones"] = (np.dtype("<i8"), (length,))
        if "rewards" not in forms and self._missing_reward is not None:
            forms["rewards"] = (np.dtype("<f8"), (length,))
        for dataset, values in self.extras(episode).items():
            forms[dataset] = (values.dtype, values.shape)
        return forms

    def add(self, episode: EpisodeToWrite) -> None:
        group = f"data/{self._demos[episode.id]}"
        final = finals_of(episode) if self._writes_next else {}
        for field, dataset in self._columns(episode):
            name = field.name
            self.copy(episode, name, f"{group}/{dataset}")
            if self._has_next(field):
                self._write_next(episode, name, f"{group}/next_{dataset}", final.get(name))
        parts = self._action_parts(episode)
        if parts:
            rows = {part.name: episode.read(part.name) for part in parts}
            actions = self.join(rows, _joined_dtype(parts), episode)
            self._file.write(f"{group}/actions", actions)
        if self.writes_dones:
            self._file.write(f"{group}/dones", self._dones(episode))
        self._write_missing_reward(episode, f"{group}/rewards")
        for dataset, values in self.extras(episode).items():
            self._file.write(f"{group}/{dataset}", values)
        self._report(episode)
        self.note(episode)

    def _write_next(
        self,
        episode: EpisodeToWrite,
        name: str,
        dataset: str,
        final: Array | None,
    ) -> None:
        """Write the observation after each step, `next_obs`.

        The last observation is repeated if no later observation is known.
        """
        last = episode.length - 1
        self.copy(episode, name, dataset, steps=range(1, episode.length))
        if final is None:
            final = self._fields.read(episode, name, last, episode.length)[0]
            change = "the last observation is written again as `next_obs`: no later one is known"
            self.changed(change, episode)
        self._file.write(dataset, final[None], last)

    def _dones(self, episode: EpisodeToWrite) -> Array:
        """Return the recorded `dones`, or zeros with a final 1 if the episode terminated."""
        if has_number(episode, "dones"):
            dones = episode.read("dones")
            return self.cast(dones, np.dtype("<i8"), "dones", episode).reshape(-1)
        change = "the field 'dones' is left out: it has several values a step"
        self.changed(change, episode, "dones" in episode.schema)
        if not episode.terminated and not episode.truncated:
            why = "the end of the episode is not known"
            if has_open_end(episode):
                why = "the episode has no end"
            self.changed(f"`dones` is 0 in all steps: {why}", episode)
        dones = np.zeros(episode.length, np.int64)
        dones[-1] = bool(episode.terminated)
        return dones

    def _write_missing_reward(self, episode: EpisodeToWrite, dataset: str) -> None:
        """Write the rewards of an episode, unless they were copied as a field of all demos."""
        schema = self._fields.schema
        if "reward" in schema and schema["reward"].num_elements == 1:
            return
        if self._missing_reward is not None:
            self.write_rewards(episode, dataset)
            return
        change = "there are no `rewards`, which robomimic reads by default"
        change += ": missing_reward= fills them"
        self.changed(change, episode, self.writes_dones and not schema.below("reward"))

    def extras(self, episode: EpisodeToWrite) -> dict[str, Array]:
        """Map names of datasets to metadata of a demo that are stored as arrays."""
        return {}

    def root_attributes(self) -> dict[str, Any]:
        """Return the attributes of the file."""
        return {}

    def data_attributes(self) -> dict[str, Any]:
        """Return the attributes of the group `data`."""
        env_args = self.metadata.get("env_args")
        if not isinstance(env_args, dict) or not env_args:
            env_args = {
                "env_name": _env_name(self.options, self.metadata),
                "type": _REAL,
                "env_kwargs": _env_kwargs(self.options, self.metadata),
            }
        attributes: dict[str, Any] = {
            "total": sum(episode.length for episode in self.episodes),
            "env_args": json.dumps(env_args),
        }
        renamed = {}
        for field in self._fields.schema.below("observation"):
            name = field.partition("/")[2]
            key = self.key(name)
            if key != name:
                renamed[key] = name
        if renamed:
            attributes[OBS_NAMES] = json.dumps(renamed)
        return attributes

    def episode_attributes(self, episode: EpisodeToWrite) -> dict[str, Any]:
        """Return the attributes of a demo, except its length."""
        metadata: dict[str, Any] = {"lang": episode.task} if episode.task else {}
        metadata |= plain(episode.metadata)
        metadata.pop(ABSENT, None)
        metadata.pop(REPEATED, None)
        if self._demos[episode.id] != episode.id:
            metadata["id"] = episode.id
        absent = self._fields.absent(episode, self._read_name)
        has_dones = has_number(episode, "dones")
        if self.writes_dones and has_unknown_end(episode) and not has_dones:
            absent = [*absent, "dones"]
        if absent:
            metadata[ABSENT] = absent
        repeated = []
        for field, dataset in self._columns(episode):
            if self._has_next(field) and field.name not in episode.final:
                repeated.append(dataset.removeprefix("obs/"))
        if repeated:
            metadata[REPEATED] = repeated
        return {"ep_meta": json.dumps(self.fitting(metadata, MAX_HEAP_BYTES, episode))}

    def _action_parts(self, episode: EpisodeToWrite) -> list[Field]:
        """Return the parts of the action, which are joined as `actions`."""
        names = [name for name in self._fields.schema if name.startswith("action/")]
        return [episode.schema[name] for name in names]

    def _has_next(self, field: Field) -> bool:
        """Return whether the observation after each step is also written for this field."""
        return self._writes_next and field.name.split("/")[0] == "observation"

    def _report(self, episode: EpisodeToWrite) -> None:
        schema = self._fields.schema
        for change in self._fields.changes(episode):
            self.changed(change, episode)
        for name in schema.below("observation"):
            key = self._dataset_of(name).removeprefix("obs/")
            is_renamed = "/" in name and key != name.partition("/")[2]
            self.changed(f"{name!r} is called {key!r}", episode, is_renamed)
        parts = [field.name for field in self._action_parts(episode)]
        change = f"the parts of the action are joined as `actions`: {', '.join(parts)}"
        self.changed(change, episode, parts)
        change = f"texts of steps are left out ({', '.join(episode.texts)})"
        self.changed(change, episode, episode.texts)
        obs_key = self.options.get("obs_key")
        change = f"the observation is called {obs_key!r}"
        self.changed(change, episode, "observation" in schema and obs_key)
        rewards = schema.below("reward").values()
        has_terms = any(field.num_elements > 1 for field in rewards)
        self.changed("rewards of several terms are left out", episode, has_terms)
        if "reward" in schema and not has_terms:
            self.reshaped("reward", (), episode)
        has_end = episode.terminated is not None or episode.truncated is not None
        self.changed(f"how an episode ended is left out{self.ends_exception}", episode, has_end)
        change = "the observation after the last step is left out"
        self.changed(change, episode, episode.final and not self._writes_next)


def _joined_dtype(parts: Sequence[Field]) -> np.dtype[Any]:
    return np.result_type(*map(written_dtype, parts))


def _env_name(options: Mapping[str, Any], metadata: Mapping[str, Any]) -> str:
    return options["env_name"] or str(metadata.get("env", ""))


def _env_kwargs(options: Mapping[str, Any], metadata: Mapping[str, Any]) -> Any:
    if options["env_kwargs"]:
        return options["env_kwargs"]
    mode = metadata.get("control_mode", "unknown")
    return {} if mode == "unknown" else {"controller_configs": {"type": mode}}


def _demos_of(ids: Sequence[str]) -> dict[str, str]:
    """Map the id of each episode to the name of its demo.

    Ids are kept if all of them are names of demos. Otherwise all demos are numbered.
    """
    if all(map(_DEMO.fullmatch, ids)):
        return {name: name for name in ids}
    return {name: f"demo_{number}" for number, name in enumerate(ids)}
