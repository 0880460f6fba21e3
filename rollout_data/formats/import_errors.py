"""Heuristics for two common import errors: copied actions, and rows that only reset a simulator.

A few rows of the first episodes are compared. The results are advice; the data stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from storage.core.fields import Field, Schema

from ..sources.file_source import FileSource

Array = np.ndarray[Any, Any]
#: Number of steps of an episode that are compared.
_NUM_STEPS = 256
#: Number of ends of episodes that are compared.
_NUM_ENDS = 8
#: Fields with more bytes per row, such as pictures, are not compared.
_MAX_ROW_BYTES = 1 << 12


def report_copied_actions(reader: FileSource) -> None:
    """Report copied actions of the first episode with two steps or more."""
    numbers = (number for number, info in enumerate(reader.episodes) if info.length > 1)
    number = next(numbers, None)
    if number is None:
        return

    def read(name: str, num_steps: int) -> Any:
        return reader.read(number, name, 0, num_steps)

    info = reader.episodes[number]
    where = f"the actions of {info.name!r} of {str(reader.path)!r}"
    for expected, got in copied_actions(info.schema, info.length, read):
        reader.advise("take as commands", where, expected, got)


def copied_actions(
    schema: Schema,
    length: int,
    read: Callable[[str, int], Any],
) -> Iterator[tuple[str, str]]:
    """Find actions that equal an observation of their step or of the next step, or that never change.

    Such actions were copied, as when an arm is led by hand, or command nothing.

    Args:
        schema: Fields of an episode.
        length: Steps of the episode.
        read: Returns the first steps of a field: (name, number of steps) -> rows.

    Yields:
        The expected and the actual content of a field, for an error.
    """
    num_steps = min(length, _NUM_STEPS)
    if num_steps < 2:
        return
    for name, action in _small_fields(schema, "action"):
        actions = read(name, num_steps)
        if (actions == actions[0]).all():
            yield f"{name!r} that changes", "the same in all steps"
        for seen, observation in _small_fields(schema, "observation"):
            if observation.shape != action.shape:
                continue
            rows = read(seen, num_steps).astype(actions.dtype)
            expected = f"{name!r} that differs from {seen!r}"
            if np.array_equal(actions, rows):
                yield expected, "those of the same step"
            if np.array_equal(actions[:-1], rows[1:]):
                yield expected, "those of the next step"


def report_reset_rows(reader: FileSource) -> None:
    """Report episodes that begin with the final observation of the previous episode and continue elsewhere."""
    num_resets = 0
    for number in range(1, min(len(reader.episodes), _NUM_ENDS + 1)):
        num_resets += _begins_with_reset(reader, number)
    if num_resets:
        where = f"the ends of {str(reader.path)!r}"
        got = f"the first one of the next episode, {num_resets} times"
        advice = "A step that only reset the simulator follows (autoreset), or the last observations are missing"
        reader.advise("believe", where, "observations of their own", got, advice)


def _begins_with_reset(reader: FileSource, number: int) -> bool:
    """Return whether an episode repeats the final observation of the previous one, and changes after it."""
    info = reader.episodes[number]
    final = reader.episodes[number - 1].final
    names = [name for name, _ in _small_fields(info.schema, "observation") if name in final]
    if not names:
        return False
    rows = reader.read_fields(number, names, 0, min(2, info.length))
    for name in names:
        if not np.array_equal(reader.read_final(number - 1, name), rows[name][0]):
            return False
    return any((values[0] != values[-1]).any() for values in rows.values())


def _small_fields(schema: Schema, group: str) -> list[tuple[str, Field]]:
    """Return the fields of a group whose rows are cheap to compare."""
    fields = schema.below(group).items()
    return [(name, field) for name, field in fields if 0 < field.row_bytes <= _MAX_ROW_BYTES]
