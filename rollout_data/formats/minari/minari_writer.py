"""Writer of Minari's HDF5 datasets: `data/main_data.hdf5` and `data/metadata.json`.

An episode has T + 1 observations. If the observation after the last step is unknown, the last step
is left out, and its observation becomes the final observation. Missing rewards raise an error
without the option `missing_reward`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from storage.core.durable_files import replace_file
from storage.core.fields import Field, Schema, unflatten
from storage.errors import UsageError

from ...sources.episode_info import ABSENT
from ...writing.conversion_record import ConversionNote
from ...writing.target_files import file_sum
from ..episode_writer import (
    EpisodeToWrite,
    SharedFields,
    finals_of,
    has_unknown_end,
    occupied,
    shared_fields,
)
from ..hdf5.hdf5_writer import (
    EpisodeRows,
    Form,
    Hdf5Writer,
    has_number,
    without_left_out,
    written_dtype,
)

#: Maps field names, or their first parts, to the names of HDF5 groups or datasets of an episode.
_GROUPS = {"observation": "observations", "action": "actions", "reward": "rewards"}
#: Groups with T + 1 rows for T steps, because they include the final observation.
_WITH_FINAL = ("observations", "infos")
_FLAGS = ("terminations", "truncations")
_METADATA = "data/metadata.json"


class MinariWriter(Hdf5Writer):
    """Writer of a Minari dataset. For a `path` ".../door/human-v0" the id is "door/human-v0".

    Options:
        dataset_id: Id of the dataset; None means the last two components of the path.
        missing_reward: Reward for episodes without rewards; None raises an error for such an
            episode.
    """

    format = "minari"
    OPTIONS: ClassVar[Mapping[str, Any]] = {"dataset_id": None, "missing_reward": None}

    @classmethod
    def file_at(cls, path: Path) -> Path:
        return path / "data" / "main_data.hdf5"

    @classmethod
    def is_finished(cls, path: Path) -> bool:
        return (path / _METADATA).exists()

    @classmethod
    def noted(cls, path: Path) -> ConversionNote | None:
        note = super().noted(path)
        if note is None and cls.is_finished(path):
            raise occupied(path, f"is a dataset without its file {str(cls.file_at(path))!r}")
        return note

    @classmethod
    def effective(
        cls,
        options: Mapping[str, Any],
        path: Path,
        episodes: Sequence[EpisodeToWrite],
        metadata: Mapping[str, Any],
    ) -> dict[str, Any]:
        return {**options, "dataset_id": _dataset_id(options, path)}

    @classmethod
    def rows_of(cls, note: ConversionNote) -> dict[str, EpisodeRows]:
        ids = note.written_ids()
        return {name: EpisodeRows(f"episode_{number}") for number, name in enumerate(ids)}

    def begin(self) -> set[str]:
        episodes = enumerate(self.episodes)
        self._groups = {episode.id: f"episode_{number}" for number, episode in episodes}
        self._fields = self._chosen_fields()
        datasets: dict[str, Form] = {}
        attributes: dict[str, dict[str, Any]] = {}
        for number, episode in enumerate(self.episodes):
            group = self._groups[episode.id]
            length = self._length(episode)
            self._check_reward(episode)
            for dataset, form in self._forms(length).items():
                datasets[f"{group}/{dataset}"] = form
            # Minari requires groups of observations and actions in every episode, even empty ones.
            for head in ("observation", "action"):
                if not self._fields.schema.below(head):
                    attributes[f"{group}/{_GROUPS[head]}"] = {}
            attributes[group] = self._attributes(number, episode, length)
        return self.make_file(datasets, {}, attributes)

    def _chosen_fields(self) -> SharedFields:
        """Return the fields that all episodes share and that Minari can store."""
        shared = shared_fields(self.episodes)
        if self.options["missing_reward"] is not None:
            shared = without_left_out(shared, ["reward"])
        schema = Schema(field for field in shared.schema.values() if _dataset_of(field))
        return replace(shared, schema=schema)

    def _check_reward(self, episode: EpisodeToWrite) -> None:
        """Raise `UsageError` if an episode has no rewards, and `missing_reward` is None."""
        if has_number(episode, "reward") or self.options["missing_reward"] is not None:
            return
        raise UsageError(
            f"episode {episode.id!r} does not have one reward per step, which Minari needs. Pass "
            "missing_reward=..., or select episodes with rewards."
        )

    def _forms(self, length: int) -> dict[str, Form]:
        """Map the name of each dataset of an episode to its dtype and shape."""
        forms: dict[str, Form] = {name: (np.dtype(bool), (length,)) for name in _FLAGS}
        forms["rewards"] = (np.dtype("<f8"), (length,))
        for field in self._fields.schema.values():
            dataset = _dataset_of(field)
            shape = () if dataset == "rewards" else field.shape
            num_rows = length + _has_final(dataset)
            forms[dataset] = (written_dtype(field), (num_rows, *shape))
        return forms

    def _attributes(self, number: int, episode: EpisodeToWrite, length: int) -> dict[str, Any]:
        """Return the attributes of an episode."""
        attributes: dict[str, Any] = {"id": number, "total_steps": length}
        seed = episode.metadata.get("seed")
        if isinstance(seed, (int, np.integer)):
            attributes["seed"] = int(seed)
        absent = self._fields.absent(episode)
        if length == episode.length and has_unknown_end(episode):
            absent += _FLAGS
        if absent:
            attributes[ABSENT] = json.dumps(absent)
        return attributes

    def _length(self, episode: EpisodeToWrite) -> int:
        """Return the number of steps to write.

        The last step is left out if the observation after it is unknown.
        """
        names = self._fields.schema.below("observation").keys() & episode.schema.keys()
        if set(episode.final) >= names:
            return episode.length
        if episode.length == 1:
            raise UsageError(
                f"episode {episode.id!r} has one step and no final observation, which Minari "
                "needs. Select episodes of at least two steps."
            )
        return episode.length - 1

    def add(self, episode: EpisodeToWrite) -> None:
        group = self._groups[episode.id]
        length = self._length(episode)
        finals = finals_of(episode)
        is_whole = length == episode.length
        change = "fields besides observation, action and one reward are left out"
        has_other = not all(map(_dataset_of, episode.schema.values()))
        self.changed(f"{change}, unless they are infos", episode, has_other)
        for name, field in self._fields.schema.items():
            dataset = _dataset_of(field)
            num_rows = min(length + _has_final(dataset), episode.length)
            self.copy(episode, name, f"{group}/{dataset}", steps=range(num_rows))
            if not is_whole:
                continue
            if name in finals:
                self._file.write(f"{group}/{dataset}", finals[name][None], length)
            elif dataset.split("/")[0] == "observations":  # The episode lacks this field.
                filled = self._fields.read(episode, name, 0, 1)
                self._file.write(f"{group}/{dataset}", filled, length)
        has_reward = has_number(episode, "reward")
        if "reward" not in self._fields.schema or not has_reward:
            self.write_rewards(episode, f"{group}/rewards", num_steps=length)
        for change in self._fields.changes(episode):
            self.changed(change, episode)
        if has_reward:
            self.reshaped("reward", (), episode)
        change = "the last step is left out, as the observation after it is not known"
        self.changed(change, episode, not is_whole)
        self._write_ends(episode, length)
        self.note(episode)

    def _write_ends(self, episode: EpisodeToWrite, length: int) -> None:
        is_last = np.arange(length) == length - 1
        is_whole = length == episode.length
        group = self._groups[episode.id]
        for name, flag in zip(_FLAGS, (episode.terminated, episode.truncated), strict=True):
            self._file.write(f"{group}/{name}", is_last & (bool(flag) and is_whole))
        is_unknown = not is_whole or has_unknown_end(episode)
        change = "neither terminated nor truncated, as the end is not known"
        self.changed(change, episode, is_unknown)
        change = "texts and metadata of episodes are left out, but for the seed"
        lost = episode.texts or episode.task or episode.metadata.keys() - {"seed"}
        self.changed(change, episode, lost)

    def finish(self) -> None:
        if not self.episodes:
            super().finish()
            return
        path = self.path / _METADATA
        with replace_file(path, temporary=path.with_name(f".{path.name}")) as new:
            new.write_text(json.dumps(self._description(), indent=2), "utf-8")
            files = {_METADATA: file_sum(new)}
            self._file.finish(files, is_last=False)
        self._file.finish(files, is_last=True)

    def _description(self) -> dict[str, Any]:
        """Return the content of `metadata.json`."""
        spaces = unflatten(dict(self._fields.schema))
        return {
            "dataset_id": _dataset_id(self.options, self.path),
            "data_format": "hdf5",
            "minari_version": "0.5.4",
            "jpeg_encoding": False,
            "total_episodes": len(self.episodes),
            "total_steps": sum(map(self._length, self.episodes)),
            "observation_space": json.dumps(_space(spaces.get("observation", {}))),
            "action_space": json.dumps(_space(spaces.get("action", {}))),
        }


def _dataset_id(options: Mapping[str, Any], path: Path) -> str:
    parts = [part for part in path.parts[-2:] if part != os.sep]
    return options["dataset_id"] or "/".join(parts)


def _has_final(dataset: str) -> bool:
    """Return whether a dataset has T + 1 rows for T steps."""
    return dataset.split("/")[0] in _WITH_FINAL


def _dataset_of(field: Field) -> str:
    """Return the dataset of a field in the group of an episode; "" if Minari cannot store it."""
    head, _, rest = field.name.partition("/")
    if head == "reward":
        is_number = not rest and field.num_elements <= 1
        return "rewards" if is_number else ""
    if head not in _GROUPS and head != "infos":
        return ""
    return f"{_GROUPS.get(head, head)}/{rest}".rstrip("/")


def _space(tree: Any) -> dict[str, Any]:
    """Return the gymnasium space of fields as Minari's JSON: a box, or a dict of spaces.

    Args:
        tree: A field, or a dict that maps names to trees.
    """
    if isinstance(tree, Field):
        return _box(tree)
    return {"type": "Dict", "subspaces": {name: _space(below) for name, below in tree.items()}}


def _box(field: Field) -> dict[str, Any]:
    """Return the box space of a field that allows all values of its dtype."""
    dtype = written_dtype(field)
    low: float = -np.inf
    high: float = np.inf
    if dtype.kind in "iu":
        low = np.iinfo(dtype).min
        high = np.iinfo(dtype).max
    elif dtype.kind == "b":
        low = 0
        high = 1
    return {
        "type": "Box",
        "dtype": str(dtype),
        "shape": list(field.shape),
        "low": np.full(field.shape, low).tolist(),
        "high": np.full(field.shape, high).tolist(),
    }
