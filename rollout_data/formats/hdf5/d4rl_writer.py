"""Writing D4RL's files: all episodes one after the other, in flat arrays.

One rule: every episode has the same fields; a reward that is missing is refused, never made up.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from storage.core.fields import Field, Schema
from storage.errors import UsageError

from ...sources.episode_reader import ABSENT
from ...writing.conversion_record import NOTE_DATASET, ConversionNote
from ..episode_writer import Array, EpisodeToWrite, finals_of, has_open_end, has_unknown_end, shared_fields
from .hdf5_writer import Hdf5Writer, Rows, written_dtype

_FLAT = {"observation": "observations", "action": "actions", "reward": "rewards"}


class Writer(Hdf5Writer):
    """`observations`, `actions`, `rewards`, `terminals`, `timeouts`, `next_observations` if all have a final one.

    Options:
        missing_reward: What episodes without rewards get; None refuses them.
    """

    format = "d4rl"
    #: A group that readers of this format do not take for steps.
    NOTE: ClassVar[str] = f"metadata/{NOTE_DATASET}"
    OPTIONS: ClassVar[Mapping[str, Any]] = {"missing_reward": None}

    @classmethod
    def rows_of(cls, note: ConversionNote) -> dict[str, Rows]:
        lengths = {one["id"]: one["length"] for one in note.episodes}
        found = dict[str, Rows]()
        first = 0
        for name in note.written_ids():
            found[name] = Rows("", first, lengths[name])
            first += lengths[name]
        return found

    def begin(self) -> set[str]:
        num_rows = sum(episode.length for episode in self.episodes)
        self._first = {name: rows.start for name, rows in self.rows_of(self.conversion).items()}
        self._fields = shared_fields(self.episodes)
        if self.options["missing_reward"] is not None:
            left_out = {name: why for name, why in self._fields.left_out.items() if name != "reward"}
            self._fields = replace(self._fields, left_out=left_out)
        form = self._form() if len(self.episodes) else {}
        self._has_next = all(bool(episode.final) for episode in self.episodes)
        flags = {name: (np.dtype(bool), ()) for name in ("terminals", "timeouts")}
        following = {"next_observations": form["observations"]} if form and self._has_next else {}
        rows = {**form, **flags, **following}
        datasets = {name: (dtype, (num_rows, *shape)) for name, (dtype, shape) in rows.items()}
        absent = {number: self._absent(episode) for number, episode in enumerate(self.episodes)}
        noted = json.dumps({str(number): names for number, names in absent.items() if names})
        contents = {f"metadata/{ABSENT}": np.bytes_(noted.encode())} if any(absent.values()) else {}
        return self.make_file(datasets, contents, {"/": {}})

    def _absent(self, episode: EpisodeToWrite) -> list[str]:
        """Return the fields and flags that an episode lacks; a timeout that only separates episodes is none."""
        flags = ["terminals", "timeouts"] if has_unknown_end(episode) else []
        if has_open_end(episode):
            flags = ["timeouts"]
        return [*self._fields.absent(episode, self._read_name), *flags]

    def _read_name(self, name: str) -> str:
        """Return the name under which a field is read; joined parts of an observation or action keep theirs."""
        head = name.partition("/")[0]
        if head not in _FLAT:
            return _info(self._fields.schema[name])
        return name if len(self._fields.schema.below(head)) > 1 else head

    def _form(self) -> dict[str, tuple[np.dtype[Any], tuple[int, ...]]]:
        """Return dtype and shape of a row of each dataset.

        Raises:
            UsageError: There are no observations, actions or rewards that all episodes have.
        """
        form: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = {}
        for head, at in _FLAT.items():
            fields = list(self._fields.schema.below(head).values())
            if len(fields) == 1:
                is_number = head == "reward" and fields[0].num_elements == 1
                form[at] = written_dtype(fields[0]), () if is_number else fields[0].shape
            elif fields:
                form[at] = np.result_type(*map(written_dtype, fields)), (sum(field.num_elements for field in fields),)
        for field in _others(self._fields.schema):
            form[_info(field)] = written_dtype(field), field.shape
        if "rewards" not in form and self.options["missing_reward"] is not None:
            form["rewards"] = np.dtype("<f4"), ()
        for head, at in _FLAT.items():
            if at not in form:
                reasons = [why for name, why in self._fields.left_out.items() if name.partition("/")[0] == head]
                lacking = [episode.id for episode in self.episodes if not episode.schema.below(head)]
                got = f"none in episode {lacking[0]!r}" if lacking else reasons[0]
                advice = "Select episodes of one kind" + (", or say missing_reward=" if head == "reward" else "")
                raise UsageError("write", f"{str(self.path)!r} as D4RL", f"{at} in all episodes", got, advice)
        return form

    def add(self, episode: EpisodeToWrite) -> None:
        first = self._first[episode.id]
        for head, at in _FLAT.items():
            names = list(self._fields.schema.below(head))
            if len(names) == 1:
                self.copy(episode, names[0], at, first)
            elif names:
                self._file.write(
                    at, self._joined(episode, {name: self._fields.read(episode, name) for name in names}), first
                )
            else:
                self._write_rewards(episode, first)
            self.changed(f"{''.join(names)!r} is called {at!r}", episode, len(names) == 1 and names[0] != head)
        for field in _others(self._fields.schema):
            self.copy(episode, field.name, _info(field), first)
            self.changed("other fields are called infos/<name>", episode, field.name != _info(field))
        for change in self._fields.changes(episode):
            self.changed(change, episode)
        if "reward" in self._fields.schema and self._fields.schema["reward"].num_elements == 1:
            self.reshaped("reward", (), episode)
        self._write_ends(episode, first)
        self.note(episode)

    def _write_rewards(self, episode: EpisodeToWrite, first: int) -> None:
        """Write the rewards of an episode of a recording in which not all have some."""
        field = episode.schema.get("reward")
        if field is not None and field.num_elements == 1:
            rewards = self.cast(episode.read("reward"), np.dtype("<f4"), "reward", episode)
            self._file.write("rewards", rewards.reshape(-1), first)
            return
        self._file.write("rewards", np.full(episode.length, self.options["missing_reward"]), first)
        self.changed("rewards are made up by missing_reward", episode)

    def _joined(self, episode: EpisodeToWrite, rows: Mapping[str, Array]) -> Array:
        """Put parts of rows side by side, as numbers in a row; a single part stays as it is."""
        if len(rows) == 1:
            return next(iter(rows.values()))
        dtype = np.result_type(*(written_dtype(self._fields.schema[name]) for name in rows))
        return self.join(rows, dtype, episode)

    def _write_ends(self, episode: EpisodeToWrite, first: int) -> None:
        last = np.zeros(episode.length, bool)
        ends = bool(episode.terminated)
        last[-1] = True
        self._file.write("terminals", last & ends, first)
        self._file.write("timeouts", last & ~np.bool_(ends), first)
        names = list(self._fields.schema.below("observation"))
        if self._has_next:
            finals = finals_of(episode)
            rows = {name: self._following(episode, name, finals.get(name)) for name in names}
            self._file.write("next_observations", self._joined(episode, rows), first)
        lost = "the observation after the last step is left out, as not all episodes have one"
        self.changed(lost, episode, episode.final and not self._has_next)
        self.changed("the end, which is unknown, is written as a timeout", episode, has_unknown_end(episode))
        self.changed("the open end is written as a timeout", episode, has_open_end(episode))
        for head in _FLAT:
            parts = list(self._fields.schema.below(head))
            self.changed(f"the parts of the {head} are joined: {', '.join(parts)}", episode, len(parts) > 1)
        lost = "texts and metadata of episodes are left out"
        self.changed(lost, episode, episode.texts or episode.metadata or episode.task)

    def _following(self, episode: EpisodeToWrite, name: str, final: Array | None) -> Array:
        """Return the observations after each step: `[T, *shape]`."""
        rows = self._fields.read(episode, name)
        if final is None:
            self.changed("the last observation is written again where a part of the final one is missing", episode)
            final = rows[-1]
        return np.concatenate([rows[1:], final[None]])


def _others(schema: Schema) -> list[Field]:
    return [field for name, field in schema.items() if name.split("/")[0] not in _FLAT]


def _info(field: Field) -> str:
    """Name the dataset of a field that D4RL has no place of its own for."""
    return f"infos/{field.name.removeprefix('infos/')}"
