"""Writer of D4RL files: flat datasets with the consecutive steps of all episodes.

All episodes have the same fields. Missing rewards raise an error without the option
`missing_reward`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from storage.core.fields import Field, Schema
from storage.errors import UsageError

from ...sources.episode_info import ABSENT
from ...writing.conversion_record import NOTE_DATASET, ConversionNote
from ..episode_writer import (
    Array,
    EpisodeToWrite,
    finals_of,
    has_open_end,
    has_unknown_end,
    shared_fields,
)
from .hdf5_writer import EpisodeRows, Form, Hdf5Writer, has_number, without_left_out, written_dtype

#: Maps each group of fields to the name of its dataset.
_DATASETS = {"observation": "observations", "action": "actions", "reward": "rewards"}
_FLAGS = ("terminals", "timeouts")


class D4rlWriter(Hdf5Writer):
    """Writer of the datasets `observations`, `actions`, `rewards`, `terminals` and `timeouts`.

    The dataset `next_observations` is also written if all episodes have a final observation.

    Options:
        missing_reward: Reward for episodes without rewards; None raises an error for such an
            episode.
    """

    format = "d4rl"
    #: The conversion record is in the group `metadata`, because readers do not treat datasets of
    #: that group as steps.
    NOTE: ClassVar[str] = f"metadata/{NOTE_DATASET}"
    OPTIONS: ClassVar[Mapping[str, Any]] = {"missing_reward": None}

    @classmethod
    def rows_of(cls, note: ConversionNote) -> dict[str, EpisodeRows]:
        lengths = {episode["id"]: episode["length"] for episode in note.episodes}
        rows = {}
        first = 0
        for name in note.written_ids():
            rows[name] = EpisodeRows("", first, lengths[name])
            first += lengths[name]
        return rows

    def begin(self) -> set[str]:
        rows = self.rows_of(self.conversion)
        self._first = {name: part.start for name, part in rows.items()}
        self._fields = shared_fields(self.episodes)
        if self.options["missing_reward"] is not None:
            self._fields = without_left_out(self._fields, ["reward"])
        self._has_next = all(bool(episode.final) for episode in self.episodes)

        forms = self._forms() if len(self.episodes) else {}
        has_observations = bool(forms)
        for name in _FLAGS:
            forms[name] = (np.dtype(bool), ())
        if has_observations and self._has_next:
            forms["next_observations"] = forms["observations"]
        num_rows = sum(episode.length for episode in self.episodes)
        datasets = {name: (dtype, (num_rows, *shape)) for name, (dtype, shape) in forms.items()}

        absent = {}
        for number, episode in enumerate(self.episodes):
            names = self._absent(episode)
            if names:
                absent[str(number)] = names
        contents = {}
        if absent:
            contents[f"metadata/{ABSENT}"] = np.bytes_(json.dumps(absent).encode())
        return self.make_file(datasets, contents, {"/": {}})

    def _absent(self, episode: EpisodeToWrite) -> list[str]:
        """Return the names of the fields and flags that are missing from an episode.

        The flag `timeouts` counts as missing if the source states no timeout. The written timeout
        then only separates the episode from the next episode.
        """
        flags: tuple[str, ...] = ()
        if has_open_end(episode):
            flags = ("timeouts",)
        elif has_unknown_end(episode):
            flags = _FLAGS
        return [*self._fields.absent(episode, self._read_name), *flags]

    def _read_name(self, name: str) -> str:
        """Return the name under which the reader of this format returns a field.

        If the parts of an observation or action are joined in one dataset, their names are returned
        unchanged.
        """
        head = name.partition("/")[0]
        if head not in _DATASETS:
            return _info(self._fields.schema[name])
        return name if len(self._fields.schema.below(head)) > 1 else head

    def _forms(self) -> dict[str, Form]:
        """Map the name of each dataset to the dtype and shape of a row.

        Raises:
            UsageError: Not all episodes have an observation, an action or a reward.
        """
        schema = self._fields.schema
        forms: dict[str, Form] = {}
        for head, dataset in _DATASETS.items():
            fields = list(schema.below(head).values())
            if len(fields) == 1:
                is_number = head == "reward" and fields[0].num_elements == 1
                shape = () if is_number else fields[0].shape
                forms[dataset] = (written_dtype(fields[0]), shape)
            elif fields:
                dtype = np.result_type(*map(written_dtype, fields))
                forms[dataset] = (dtype, (sum(field.num_elements for field in fields),))
        for field in _others(schema):
            forms[_info(field)] = (written_dtype(field), field.shape)
        if "rewards" not in forms and self.options["missing_reward"] is not None:
            forms["rewards"] = (np.dtype("<f4"), ())
        for head, dataset in _DATASETS.items():
            if dataset not in forms:
                raise self._missing(head, dataset)
        return forms

    def _missing(self, head: str, dataset: str) -> UsageError:
        """Return the error for a required dataset that cannot be written for all episodes."""
        lacking = [episode.id for episode in self.episodes if not episode.schema.below(head)]
        if lacking:
            got = f"episode {lacking[0]!r} has no {dataset}"
        else:
            left_out = self._fields.left_out.items()
            name, reason = next(item for item in left_out if item[0].partition("/")[0] == head)
            got = f"{name!r} is left out because {reason}"
        advice = "Select episodes with the same fields"
        if head == "reward":
            advice += ", or pass missing_reward=..."
        return UsageError(f"D4RL needs {dataset} in all episodes, but {got}. {advice}.")

    def add(self, episode: EpisodeToWrite) -> None:
        schema = self._fields.schema
        first = self._first[episode.id]
        for head, dataset in _DATASETS.items():
            names = list(schema.below(head))
            if len(names) == 1:
                self.copy(episode, names[0], dataset, first)
                change = f"{names[0]!r} is called {dataset!r}"
                self.changed(change, episode, names[0] != head)
            elif names:
                parts = {name: self._fields.read(episode, name) for name in names}
                self._file.write(dataset, self._joined(episode, parts), first)
            else:
                self.write_rewards(episode, dataset, first)
        for field in _others(schema):
            dataset = _info(field)
            self.copy(episode, field.name, dataset, first)
            change = "other fields are called infos/<name>"
            self.changed(change, episode, field.name != dataset)
        for change in self._fields.changes(episode):
            self.changed(change, episode)
        if "reward" in schema and has_number(episode, "reward"):
            self.reshaped("reward", (), episode)
        self._write_ends(episode, first)
        self._write_next_observations(episode, first)
        self._report(episode)
        self.note(episode)

    def _joined(self, episode: EpisodeToWrite, parts: Mapping[str, Array]) -> Array:
        """Concatenate the parts of an observation or action. A single part is not changed."""
        if len(parts) == 1:
            return next(iter(parts.values()))
        dtype = np.result_type(*(written_dtype(self._fields.schema[name]) for name in parts))
        return self.join(parts, dtype, episode)

    def _write_ends(self, episode: EpisodeToWrite, first: int) -> None:
        """Write `terminals` and `timeouts`. An episode without termination ends with a timeout."""
        is_terminated = bool(episode.terminated)
        is_last = np.zeros(episode.length, bool)
        is_last[-1] = True
        self._file.write("terminals", is_last & is_terminated, first)
        self._file.write("timeouts", is_last & (not is_terminated), first)

    def _write_next_observations(self, episode: EpisodeToWrite, first: int) -> None:
        if not self._has_next:
            return
        finals = finals_of(episode)
        parts = {}
        for name in self._fields.schema.below("observation"):
            parts[name] = self._following(episode, name, finals.get(name))
        self._file.write("next_observations", self._joined(episode, parts), first)

    def _following(self, episode: EpisodeToWrite, name: str, final: Array | None) -> Array:
        """Return the observation after each step: `[T, *shape]`."""
        rows = self._fields.read(episode, name)
        if final is None:
            change = "the last observation is written again"
            self.changed(f"{change} where a part of the final one is missing", episode)
            final = rows[-1]
        return np.concatenate([rows[1:], final[None]])

    def _report(self, episode: EpisodeToWrite) -> None:
        change = "the observation after the last step is left out, as not all episodes have one"
        self.changed(change, episode, episode.final and not self._has_next)
        change = "the end, which is unknown, is written as a timeout"
        self.changed(change, episode, has_unknown_end(episode))
        self.changed("the open end is written as a timeout", episode, has_open_end(episode))
        for head in _DATASETS:
            parts = list(self._fields.schema.below(head))
            change = f"the parts of the {head} are joined: {', '.join(parts)}"
            self.changed(change, episode, len(parts) > 1)
        change = "texts and metadata of episodes are left out"
        self.changed(change, episode, episode.texts or episode.metadata or episode.task)


def _others(schema: Schema) -> list[Field]:
    """Return the fields outside of the groups observation, action and reward."""
    return [field for name, field in schema.items() if name.split("/")[0] not in _DATASETS]


def _info(field: Field) -> str:
    """Return `infos/<name>`, the dataset of a field that is no observation, action or reward."""
    return f"infos/{field.name.removeprefix('infos/')}"
