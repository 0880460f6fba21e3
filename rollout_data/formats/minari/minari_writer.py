"""Writing Minari's HDF5 datasets: `data/main_data.hdf5` with T + 1 observations of each episode, and `metadata.json`.

One rule: nothing is made up. Where the observation after the last step is not known, the last step is left out and its
observation takes that place; rewards that are missing are refused.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from storage.core.durable_files import sync_path
from storage.core.fields import Field, Schema, unflatten
from storage.errors import UsageError

from ...sources.episode_reader import ABSENT
from ...writing.conversion_record import ConversionNote
from ...writing.target_files import file_sum
from ..episode_writer import EpisodeToWrite, SharedFields, finals_of, has_unknown_end, occupied, shared_fields
from ..hdf5.hdf5_writer import Hdf5Writer, Rows, written_dtype

_HEADS = {"observation": "observations", "action": "actions", "reward": "rewards"}
_WITH_LAST = ("observations", "infos")
_FLAGS = ("terminations", "truncations")
_METADATA = "data/metadata.json"


class Writer(Hdf5Writer):
    """A dataset of Minari; a `path` such as ".../door/human-v0" is its id.

    Options:
        dataset_id: Of Minari; None takes the last two parts of the path.
        missing_reward: What episodes without rewards get; None refuses them.
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
            raise occupied(path, f"a dataset without its file {str(cls.file_at(path))!r}")
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
    def rows_of(cls, note: ConversionNote) -> dict[str, Rows]:
        return {name: Rows(f"episode_{number}") for number, name in enumerate(note.written_ids())}

    def begin(self) -> set[str]:
        datasets: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = {}
        attributes: dict[str, dict[str, Any]] = {}
        self._groups = {episode.id: f"episode_{number}" for number, episode in enumerate(self.episodes)}
        shared = shared_fields(self.episodes)
        is_made = self.options["missing_reward"] is not None
        left_out = {name: why for name, why in shared.left_out.items() if not (is_made and name == "reward")}
        kept = Schema(field for field in shared.schema.values() if _place(field))
        self._fields = SharedFields(kept, shared.texts, left_out)
        for episode in self.episodes:
            group = self._groups[episode.id]
            length = self._length(episode)
            if not _has_reward(episode) and self.options["missing_reward"] is None:
                advice = "Say missing_reward=, or select episodes with one reward a step"
                raise UsageError(
                    "write", f"episode {episode.id!r} as Minari", "one reward a step", "none or several", advice
                )
            absent = self._fields.absent(episode)
            if length == episode.length and has_unknown_end(episode):
                absent += _FLAGS
            datasets |= {f"{group}/{name}": (np.dtype(bool), (length,)) for name in _FLAGS}
            datasets[f"{group}/rewards"] = np.dtype("<f8"), (length,)
            for field in self._fields.schema.values():
                at = _place(field)
                shape = () if at == "rewards" else field.shape
                num_rows = length + (at.split("/")[0] in _WITH_LAST)
                datasets[f"{group}/{at}"] = written_dtype(field), (num_rows, *shape)
            for head in ("observation", "action"):
                if not self._fields.schema.below(head):  # Minari reads both groups of every episode
                    attributes[f"{group}/{_HEADS[head]}"] = {}
            seed = episode.metadata.get("seed")
            attributes[group] = {"id": len(attributes), "total_steps": length}
            attributes[group] |= {"seed": int(seed)} if isinstance(seed, (int, np.integer)) else {}
            attributes[group] |= {ABSENT: json.dumps(absent)} if absent else {}
        return self.make_file(datasets, {}, attributes)

    def _length(self, episode: EpisodeToWrite) -> int:
        """Steps that are written: without the last one where what follows it is not known."""
        has_final = self._has_final(episode)
        if not has_final and episode.length == 1:
            advice = "Select episodes of two steps or more"
            where = f"episode {episode.id!r} as Minari"
            expected = "the observation after its only step"
            raise UsageError("write", where, expected, "none", advice)
        return episode.length if has_final else episode.length - 1

    def _has_final(self, episode: EpisodeToWrite) -> bool:
        """Return whether the observation after the last step is known, but for fields that the episode lacks."""
        names = self._fields.schema.below("observation").keys() & episode.schema.keys()
        return set(episode.final) >= names

    def add(self, episode: EpisodeToWrite) -> None:
        group = self._groups[episode.id]
        length = self._length(episode)
        finals = finals_of(episode)
        lost = "fields besides observation, action and one reward are left out, unless they are infos"
        self.changed(lost, episode, not all(map(_place, episode.schema.values())))
        for name, field in self._fields.schema.items():
            at = _place(field)
            num_rows = length + (at.split("/")[0] in _WITH_LAST)
            self.copy(episode, name, f"{group}/{at}", steps=range(min(num_rows, episode.length)))
            if length == episode.length and name in finals:
                self._file.write(f"{group}/{at}", finals[name][None], length)
            elif at.split("/")[0] == "observations" and length == episode.length:  # the episode lacks it
                self._file.write(f"{group}/{at}", self._fields.read(episode, name, 0, 1), length)
        self._write_missing_reward(episode, f"{group}/rewards", length)
        for change in self._fields.changes(episode):
            self.changed(change, episode)
        if _has_reward(episode):
            self.reshaped("reward", (), episode)
        what = "the last step is left out, as the observation after it is not known"
        self.changed(what, episode, length < episode.length)
        self._write_ends(episode, length)
        self.note(episode)

    def _write_missing_reward(self, episode: EpisodeToWrite, dataset: str, length: int) -> None:
        """Write rewards of an episode if not all episodes have rewards."""
        if "reward" in self._fields.schema and _has_reward(episode):
            return
        rewards: Any = np.full(length, self.options["missing_reward"], np.float64)
        if _has_reward(episode):
            rewards = self.cast(episode.read("reward", 0, length), np.dtype("<f8"), "reward", episode).reshape(-1)
        self._file.write(dataset, rewards)
        self.changed("rewards are made up by missing_reward", episode, not _has_reward(episode))

    def _write_ends(self, episode: EpisodeToWrite, length: int) -> None:
        is_last = np.arange(length) == length - 1
        is_whole = length == episode.length
        for at, flag in zip(_FLAGS, (episode.terminated, episode.truncated), strict=True):
            self._file.write(f"{self._groups[episode.id]}/{at}", is_last & (bool(flag) and is_whole))
        is_unknown = not is_whole or has_unknown_end(episode)
        self.changed("neither terminated nor truncated, as the end is not known", episode, is_unknown)
        lost = episode.texts or episode.task or episode.metadata.keys() - {"seed"}
        self.changed("texts and metadata of episodes are left out, but for the seed", episode, lost)

    def finish(self) -> None:
        if not self.episodes:
            super().finish()
            return
        place = self.path / _METADATA
        temporary = place.with_name(f".{place.name}")
        temporary.write_text(json.dumps(self._about(), indent=2), "utf-8")
        sync_path(temporary)
        files = {_METADATA: file_sum(temporary)}
        self._file.finish(files, is_last=False)
        os.replace(temporary, place)
        sync_path(place.parent)
        self._file.finish(files, is_last=True)

    def _about(self) -> dict[str, Any]:
        """Return the description of the dataset."""
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
    parts_of_path = [one for one in path.parts[-2:] if one != os.sep]
    return options["dataset_id"] or "/".join(parts_of_path)


def _has_reward(episode: EpisodeToWrite) -> bool:
    return "reward" in episode.schema and episode.schema["reward"].num_elements == 1


def _place(field: Field) -> str:
    """Where a field goes in an episode's group; "" if nowhere."""
    head, _, rest = field.name.partition("/")
    if head == "reward":
        return "" if rest or field.num_elements > 1 else "rewards"
    return f"{_HEADS.get(head, head)}/{rest}".rstrip("/") if head in _HEADS or head == "infos" else ""


def _space(tree: Any) -> dict[str, Any]:
    """Describe fields as Minari writes a gymnasium space: a box of all numbers of the dtype, or a dict of spaces."""
    if isinstance(tree, Field):
        return _box(tree)
    return {"type": "Dict", "subspaces": {name: _space(below) for name, below in tree.items()}}


def _box(field: Field) -> dict[str, Any]:
    dtype = written_dtype(field)
    whole = np.iinfo(dtype) if dtype.kind in "iu" else None
    low, high = (whole.min, whole.max) if whole is not None else (0, 1) if dtype.kind == "b" else (-np.inf, np.inf)
    bounds = {name: np.full(field.shape, bound).tolist() for name, bound in (("low", low), ("high", high))}
    return {"type": "Box", "dtype": str(dtype), "shape": list(field.shape), **bounds}
