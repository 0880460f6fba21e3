"""Checks of episode metadata and frame texts, and their conversion to annotations.

Metadata of an episode are stored as JSON. A text is stored once, and frames refer to it by an id
(`blocks/annotation_table.py`).
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

#: Keys in the metadata of an episode that must have a certain type, since readers use their values.
_TYPES: dict[str, type] = {"task": str, "success": bool}


@dataclass(frozen=True, eq=False)
class StepNotes:
    """Annotations of a rollout: metadata of episodes and texts of frames.

    Attributes:
        episodes: (step, env, JSON object) for each metadata record, in the order of time.
        texts: Maps the `text_id` of each text of the frames to its UTF-8 bytes.
    """

    episodes: tuple[tuple[int, int, bytes], ...] = ()
    texts: Mapping[int, bytes] = field(default_factory=dict)

    def steps(self, start: int, stop: int) -> StepNotes:
        """Return the annotations of steps `start:stop`.

        The result contains all texts. A block may contain texts that none of its frames refers to.
        """
        episodes = tuple(
            (step - start, env, data) for step, env, data in self.episodes if start <= step < stop
        )
        return StepNotes(episodes, self.texts)

    @property
    def num_bytes(self) -> int:
        """Total bytes of all metadata and texts."""
        return sum(len(data) for *_, data in self.episodes) + sum(map(len, self.texts.values()))


NO_NOTES = StepNotes()


def is_texts(value: Any) -> bool:
    """Return whether a value of a record is a str, or a list or array of str."""
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "UT" or (
            value.dtype == object and value.size > 0 and is_texts(value.flat[0])
        )
    if isinstance(value, (list, tuple)) and len(value):
        return is_texts(value[0])
    return isinstance(value, str)


def text_ids(name: str, value: Any, lead: tuple[int, ...], texts: dict[int, bytes]) -> np.ndarray:
    """Convert texts of a field to ids, int64 of shape `lead`.

    Args:
        name: Name of the field.
        value: One text for all frames, or texts of shape `lead` or `[*lead, 1]`.
        lead: Leading shape of the record, `(N,)` or `(T, N)`.
        texts: Output mapping, to which the id and the UTF-8 bytes of each text are added.

    Raises:
        SchemaError: The texts have another shape.
        UsageError: A value is no text, or a text is too long.
    """
    listed = np.empty((), object)
    if isinstance(value, str):
        listed[()] = value
    else:
        listed = np.array(value, object)
        if listed.shape not in (lead, (*lead, 1)):
            raise SchemaError(
                f"text field {name!r} has shape {listed.shape}, expected one text or shape {lead}."
            )
    ids: dict[str, int] = {}
    for text in listed.reshape(-1).tolist():
        if isinstance(text, str) and text in ids:
            continue
        try:
            data = text.encode()
        except (AttributeError, UnicodeEncodeError):
            data = None
        if not isinstance(text, str) or data is None or len(data) > MAX_NOTE_BYTES:
            got = type(text).__name__ if not isinstance(text, str) else ascii(text[:20])
            raise UsageError(
                f"text field {name!r} must contain Unicode texts of at most {MAX_NOTE_BYTES} "
                f"bytes, got {got}."
            )
        ids[text] = text_id(text)
        texts[ids[text]] = data
    numbers = np.array([ids[text] for text in listed.reshape(-1).tolist()], np.int64)
    return np.broadcast_to(numbers[0], lead).copy() if listed.shape == () else numbers.reshape(lead)


def check_text_fields(schema: Schema, texts: Container[str]) -> None:
    """Check that each field has texts or numbers, as in the first record of the writer.

    Args:
        schema: Fields of the first record.
        texts: Names of the fields that have texts in this record.
    """
    for name, declared in schema.items():
        is_text = name in texts
        if declared.is_text != is_text:
            expected = "texts" if declared.is_text else "numbers"
            got = "texts" if is_text else "numbers"
            raise FieldTypeError(
                f"field {name!r} has {got}, expected {expected} as in the first record."
            )


def episode_notes(
    episode: Any, marks: np.ndarray, is_step: bool
) -> tuple[tuple[int, int, bytes], ...]:
    """Check the metadata of episodes in a record and convert them to JSON.

    Args:
        episode: Argument `episode` of `RolloutWriter.add`, or of `add_rollout`.
        marks: Marks of the frames, uint8 `[T, N]`; 0 if an env has no frame in a step.
        is_step: Whether the record is a single step.

    Returns:
        (step, env, JSON object) for each metadata record.

    Raises:
        UsageError: The form is invalid, a value is not JSON, or an env has no frame.
    """
    num_envs = marks.shape[1]
    notes = []
    steps = [episode] if is_step else _checked_list(episode, len(marks), "step")
    for step, step_values in enumerate(steps):
        if step_values is None:
            continue
        if num_envs == 1 and isinstance(step_values, Mapping):
            step_values = [step_values]
        for env, metadata in enumerate(_checked_list(step_values, num_envs, "environment")):
            if metadata is None or (isinstance(metadata, Mapping) and not metadata):
                continue
            if not marks[step, env]:
                raise UsageError(
                    f"episode= has a value for environment {env}, which env_mask leaves out of "
                    "this step. Pass None for it."
                )
            notes.append((step, env, episode_json(metadata)))
    return tuple(notes)


def _checked_list(values: Any, count: int, item: str) -> Sequence[Any]:
    """Check that a part of the argument `episode` is a list or object array of `count` values.

    Args:
        values: The part.
        count: Number of steps or of environments.
        item: "step" or "environment", for the error.

    Returns:
        `values`, unchanged.

    Raises:
        UsageError: `values` is no list, or has another number of values.
    """
    is_object_array = isinstance(values, np.ndarray) and values.dtype == object
    is_list = isinstance(values, (list, tuple)) or is_object_array
    if not is_list or len(values) != count:
        got = f"{len(values)} values" if is_list else type(values).__name__
        hint = ", or one mapping for a single environment" if item == "environment" else ""
        raise UsageError(
            f"episode must be a list of {count} values, a mapping or None for each {item}{hint}, "
            f"got {got}."
        )
    checked: Sequence[Any] = values
    return checked


def episode_json(metadata: Any) -> bytes:
    """Check the metadata of an episode and convert it to a JSON object.

    Raises:
        UsageError: `metadata` is no mapping with names of type str, or a value is not JSON.
    """
    if not isinstance(metadata, Mapping) or not all(isinstance(name, str) for name in metadata):
        raise UsageError(
            "the metadata of an episode must be a mapping with str names, got "
            f"{repr(metadata)[:80]}."
        )
    values = {
        name: value.item() if isinstance(value, np.bool_) else value
        for name, value in metadata.items()
    }
    for name, type_of_value in _TYPES.items():
        if not isinstance(values.get(name), (type_of_value, type(None))):
            raise UsageError(
                f"{name!r} of the metadata of an episode must be {type_of_value.__name__} or "
                f"None, got {repr(values[name])[:80]}."
            )
    try:
        data = json.dumps(values, default=_plain).encode()
    except (TypeError, ValueError, RecursionError) as cause:
        raise UsageError(
            "the metadata of an episode must be JSON values: texts, numbers, lists and mappings. "
            f"{type(cause).__name__}: {cause}."
        ) from cause
    return data


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, (np.ndarray, torch.Tensor)):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is no JSON value")


class NoteCount:
    """Counter of the bytes of metadata of each unfinished episode, which limits their size.

    Args:
        num_envs: Number of envs, N.
    """

    def __init__(self, num_envs: int) -> None:
        self._num_bytes = np.zeros(num_envs, np.int64)
        self._is_used = False

    def add(self, marks: np.ndarray, notes: StepNotes) -> None:
        """Add the bytes of a rollout's metadata to the counts of its episodes.

        Args:
            marks: Marks of the frames with the ends of episodes, uint8 `[T, N]`.
            notes: Annotations of the rollout.

        Raises:
            UsageError: An episode has too many bytes of metadata. The counts are unchanged.
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
                raise UsageError(
                    f"the episode of environment {env} has {counts[env]} bytes of metadata, "
                    f"expected at most {MAX_NOTE_BYTES}. Record large values as a field."
                )
        counts[is_end[start:].any(axis=0)] = 0
        self._num_bytes = counts

    def end(self, env_ids: np.ndarray) -> None:
        """Reset the counts of some envs to zero, since their episodes have ended."""
        self._num_bytes[env_ids] = 0
