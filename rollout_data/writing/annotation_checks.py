"""Notes: what a caller says of whole episodes, and texts of frames, checked and brought into the form of a block.

One rule: everything is checked before anything is kept. What is said of episodes becomes JSON, a text becomes its
number (`blocks/annotation_table.py`).
"""

from __future__ import annotations

import json
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from storage.core.fields import Schema
from storage.errors import FieldTypeError, SchemaError, UsageError

from ..blocks.annotation_table import MAX_NOTE_BYTES, text_id
from ..blocks.block_header import ENDS

#: Names in the notes of an episode whose values have a type that readers rely on.
_TYPES: dict[str, type] = {"task": str, "success": bool}


@dataclass(frozen=True, eq=False)
class StepNotes:
    """The notes of a rollout.

    Attributes:
        episodes: (step, env, JSON object) in the order of time.
        texts: `text_id` -> UTF-8 of every text of its frames.
    """

    episodes: tuple[tuple[int, int, bytes], ...] = ()
    texts: Mapping[int, bytes] = field(default_factory=dict)

    def steps(self, start: int, stop: int) -> StepNotes:
        """Return those of the steps `start:stop`."""
        inside = tuple((step - start, env, data) for step, env, data in self.episodes if start <= step < stop)
        return StepNotes(inside, self.texts)

    @property
    def num_bytes(self) -> int:
        return sum(len(data) for *_, data in self.episodes) + sum(map(len, self.texts.values()))


NO_NOTES = StepNotes()


def is_texts(value: Any) -> bool:
    """Return whether a value is a text, or a list or array of texts."""
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "UT" or (value.dtype == object and value.size > 0 and is_texts(value.flat[0]))
    if isinstance(value, (list, tuple)) and len(value):
        return is_texts(value[0])
    return isinstance(value, str)


def as_ids(action: str, name: str, value: Any, lead: tuple[int, ...], texts: dict[int, bytes]) -> np.ndarray:
    """Return the numbers of texts, int64 of shape `lead`, and note the texts; one text is that of all frames.

    Raises:
        SchemaError, UsageError: Another shape, something else among the texts, or a text that is too long.
    """
    listed = np.empty((), object)
    if isinstance(value, str):
        listed[()] = value
    else:
        listed = np.array(value, object)
        if listed.shape not in (lead, (*lead, 1)):
            raise SchemaError(action, f"with the texts {name!r}", f"one text, or shape {lead}", str(listed.shape))
    ids: dict[str, int] = {}
    for text in listed.reshape(-1).tolist():
        if isinstance(text, str) and text in ids:
            continue
        try:
            data = text.encode()
        except (AttributeError, UnicodeEncodeError):
            data = None
        if not isinstance(text, str) or data is None or len(data) > MAX_NOTE_BYTES:
            expected = f"texts of Unicode, each of at most {MAX_NOTE_BYTES} bytes"
            got = type(text).__name__ if not isinstance(text, str) else ascii(text[:20])
            raise UsageError(action, f"with the texts {name!r}", expected, got)
        ids[text] = text_id(text)
        texts[ids[text]] = data
    numbers = np.array([ids[text] for text in listed.reshape(-1).tolist()], np.int64)
    return np.broadcast_to(numbers[0], lead).copy() if listed.shape == () else numbers.reshape(lead)


def check_kinds(action: str, schema: Schema, texts: Container[str]) -> None:
    """Raise `FieldTypeError` where texts are given for a field of numbers, or numbers for one of texts."""
    for name, item in schema.items():
        if item.is_text != (name in texts):
            expected, got = ("texts", "numbers")[:: 1 if item.is_text else -1]
            raise FieldTypeError(action, f"with the field {name!r}", f"{expected}, as in the first record", got)


def episode_notes(action: str, given: Any, marks: np.ndarray, is_step: bool) -> tuple[tuple[int, int, bytes], ...]:
    """Check what is said of episodes in a record whose marks are `[T, N]`; see `RolloutWriter.add`.

    Raises:
        UsageError: It has another form, cannot be JSON, or is said of an env that has no frame.
    """
    num_envs = marks.shape[1]
    found = []
    for step, of_step in enumerate([given] if is_step else _listed(action, given, len(marks), "step")):
        one_by_one = [of_step] if num_envs == 1 and isinstance(of_step, Mapping) else of_step
        for env, said in enumerate(() if of_step is None else _listed(action, one_by_one, num_envs, "environment")):
            if said is None or (isinstance(said, Mapping) and not said):
                continue
            if not marks[step, env]:
                where = f"with episode= of environment {env}"
                raise UsageError(action, where, "a frame of it in the same step", "none, by env_mask")
            found.append((step, env, episode_json(said, action, "with episode=")))
    return tuple(found)


def _listed(action: str, given: Any, count: int, of: str) -> Sequence[Any]:
    is_list = isinstance(given, (list, tuple)) or (isinstance(given, np.ndarray) and given.dtype == object)
    if not is_list or len(given) != count:
        got = f"{len(given)} values" if is_list else type(given).__name__
        one = " (one mapping for a single environment)" if of == "environment" else ""
        raise UsageError(action, "with episode=", f"a list with a mapping or None for each {of}, {count}{one}", got)
    found: Sequence[Any] = given
    return found


def episode_json(said: Any, action: str, where: str) -> bytes:
    """Check what is said of an episode, and write it as JSON.

    Raises:
        UsageError: It has another form, or cannot be JSON.
    """
    if not isinstance(said, Mapping) or not all(isinstance(name, str) for name in said):
        raise UsageError(action, where, "mappings with names that are texts", repr(said)[:80])
    said = {name: value.item() if isinstance(value, np.bool_) else value for name, value in said.items()}
    for name, kind in _TYPES.items():
        if not isinstance(said.get(name), (kind, type(None))):
            raise UsageError(action, where, f"{name!r} as a {kind.__name__} or None", repr(said[name])[:80])
    try:
        data = json.dumps(said, default=_plain).encode()
    except (TypeError, ValueError, RecursionError) as cause:
        expected = "texts, numbers, lists and mappings of them"
        raise UsageError(action, where, expected, f"{type(cause).__name__}: {cause}") from cause
    return data


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, (np.ndarray, torch.Tensor)):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} has no form in JSON")


class NoteCount:
    """How much was said of the episodes in progress, so that a reader can refuse more.

    Args:
        num_envs: N.
    """

    def __init__(self, num_envs: int) -> None:
        self._num_bytes = np.zeros(num_envs, np.int64)
        self._is_used = False

    def add(self, action: str, marks: np.ndarray, notes: StepNotes) -> None:
        """Count the notes of a rollout with these marks `[T, N]`.

        Raises:
            UsageError: They are too many; nothing is counted then.
        """
        self._is_used |= bool(notes.episodes)
        if not self._is_used:
            return
        counts = self._num_bytes.copy()
        start = 0
        is_end = marks & ENDS > 0
        for step, env, data in notes.episodes:
            counts[is_end[start:step].any(axis=0)] = 0
            start = step
            counts[env] += len(data)
            if counts[env] > MAX_NOTE_BYTES:
                expected = f"at most {MAX_NOTE_BYTES} bytes said of an episode"
                got = f"{counts[env]} of env {env}"
                raise UsageError(action, "with episode=", expected, got, "Record what is large as a field")
        counts[is_end[start:].any(axis=0)] = 0
        self._num_bytes = counts

    def end(self, env_ids: np.ndarray) -> None:
        """Begin anew with the next episodes of these envs."""
        self._num_bytes[env_ids] = 0
