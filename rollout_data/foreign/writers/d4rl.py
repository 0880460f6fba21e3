"""Writing D4RL's files: all episodes one after the other, in flat arrays.

One rule: every episode has the same fields; a reward that is missing is refused, never made up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from storage.core.fields import Field
from storage.errors import UsageError

from ..writer import Array, EpisodeToWrite, finals_of
from .hdf5_file import EpisodeFile, Hdf5Writer, written_dtype

_FLAT = {"observation": "observations", "action": "actions", "reward": "rewards"}


class Writer(Hdf5Writer):
    """`observations`, `actions`, `rewards`, `terminals`, `timeouts`, `next_observations` if all have a final one.

    Options:
        missing_reward: What episodes without rewards get; None refuses them.
    """

    format = "d4rl"
    OPTIONS: ClassVar[Mapping[str, Any]] = {"missing_reward": None}

    def begin(self) -> set[str]:
        lengths = [episode.length for episode in self.episodes]
        num_rows, first = sum(lengths), np.cumsum([0, *lengths])[:-1].tolist()
        self._first = dict(zip([episode.id for episode in self.episodes], first, strict=True))
        forms = [self._form(episode) for episode in self.episodes]
        for episode, form in zip(self.episodes, forms, strict=True):
            if form != forms[0]:
                differing = sorted(name for name in {*form, *forms[0]} if form.get(name) != forms[0].get(name))
                where, got = f"episode {episode.id!r} as D4RL", f"another {', '.join(differing)}"
                raise UsageError("write", where, "the same fields in all episodes", got, "Select episodes of one kind")
        self._has_next = all(bool(episode.final) for episode in self.episodes)
        flags = {name: (np.dtype(bool), ()) for name in ("terminals", "timeouts")}
        following = {"next_observations": forms[0]["observations"]} if forms and self._has_next else {}
        datasets = {
            name: (dtype, (num_rows, *shape))
            for name, (dtype, shape) in {**(forms or [{}])[0], **flags, **following}.items()
        }
        self._file = EpisodeFile(self.path, datasets, {}, {"/": {}})
        return self._file.written

    def _form(self, episode: EpisodeToWrite) -> dict[str, tuple[np.dtype[Any], tuple[int, ...]]]:
        """Name -> dtype and shape of a row, of what an episode fills."""
        form: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = {}
        for head, at in _FLAT.items():
            fields = list(episode.schema.below(head).values())
            if len(fields) == 1:
                is_number = head == "reward" and fields[0].num_elements == 1
                form[at] = written_dtype(fields[0]), () if is_number else fields[0].shape
            elif fields:
                form[at] = np.result_type(*map(written_dtype, fields)), (sum(field.num_elements for field in fields),)
        for field in _others(episode):
            form[_info(field)] = written_dtype(field), field.shape
        if "rewards" not in form:
            if self.options["missing_reward"] is None:
                advice = "Say missing_reward=, or select episodes with rewards"
                raise UsageError("write", f"episode {episode.id!r} as D4RL", "rewards", "none", advice)
            form["rewards"] = np.dtype("<f4"), ()
        if missing := [at for at in ("observations", "actions") if at not in form]:
            raise UsageError("write", f"episode {episode.id!r} as D4RL", missing[0], "none")
        return form

    def add(self, episode: EpisodeToWrite) -> None:
        first, length = self._first[episode.id], episode.length
        for head, at in _FLAT.items():
            names = list(episode.schema.below(head))
            if len(names) == 1:
                self.copy(episode, names[0], at, first)
            elif names:
                self._file.write(at, _joined([np.asarray(episode.read(name)) for name in names]), first)
            else:
                self._file.write(at, np.full(length, self.options["missing_reward"]), first)
            self.changed("rewards are made up by missing_reward", episode, not names)
            self.changed(f"{''.join(names)!r} is called {at!r}", episode, len(names) == 1 and names[0] != head)
        for field in _others(episode):
            self.copy(episode, field.name, _info(field), first)
            self.changed("other fields are called infos/<name>", episode, field.name != _info(field))
        self._write_ends(episode, first)
        self._file.note(episode.id)

    def _write_ends(self, episode: EpisodeToWrite, first: int) -> None:
        last, ends = np.zeros(episode.length, bool), bool(episode.terminated)
        last[-1] = True
        self._file.write("terminals", last & ends, first)
        self._file.write("timeouts", last & ~np.bool_(ends), first)
        names = list(episode.schema.below("observation"))
        if self._has_next:
            finals = finals_of(episode)
            rows = [np.concatenate([np.asarray(episode.read(name))[1:], finals[name][None]]) for name in names]
            self._file.write("next_observations", _joined(rows), first)
        lost = "the observation after the last step is left out, as not all episodes have one"
        self.changed(lost, episode, episode.final and not self._has_next)
        is_unknown = episode.terminated is None and episode.truncated is None
        self.changed("the end, which is unknown, is written as a timeout", episode, is_unknown)
        joined = f"the parts of the observation are joined: {', '.join(names)}"
        self.changed(joined, episode, names != ["observation"])
        lost = "texts and metadata of episodes are left out"
        self.changed(lost, episode, episode.texts or episode.metadata or episode.task)


def _others(episode: EpisodeToWrite) -> list[Field]:
    return [field for name, field in episode.schema.items() if name.split("/")[0] not in _FLAT]


def _info(field: Field) -> str:
    """Name the dataset of a field that D4RL has no place of its own for."""
    return f"infos/{field.name.removeprefix('infos/')}"


def _joined(columns: list[Array]) -> Array:
    """Put parts of rows side by side, as numbers in a row; a single part stays as it is."""
    if len(columns) == 1:
        return columns[0]
    return np.concatenate([one.reshape(len(one), math.prod(one.shape[1:])) for one in columns], axis=1)
