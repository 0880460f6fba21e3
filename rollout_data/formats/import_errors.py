"""Heuristics for two common import errors: copied actions, and autoreset rows.

An autoreset row records a step that only resets the simulator. A few rows of the first episodes are
compared. The result is advice; the data are not changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from storage.core.fields import Field, Schema

from ..sources.file_source import FileSource

Array = np.ndarray[Any, Any]
#: Number of compared steps of an episode.
_NUM_STEPS = 256
#: Number of episodes whose start is compared with the end of the episode before.
_NUM_ENDS = 8
#: Maximum bytes per row of a compared field. Pictures are larger and are not compared.
_MAX_ROW_BYTES = 1 << 12


def report_copied_actions(reader: FileSource) -> None:
    """Report actions that may be copied observations.

    Only the first episode with at least two steps is checked.
    """
    numbers = (number for number, info in enumerate(reader.episodes) if info.length > 1)
    number = next(numbers, None)
    if number is None:
        return

    def read(name: str, num_steps: int) -> Any:
        return reader.read(number, name, 0, num_steps)

    info = reader.episodes[number]
    for suspicion in copied_actions(info.schema, info.length, read):
        reader.advise(f"Episode {info.name!r} of {str(reader.path)!r}: {suspicion}")


def copied_actions(
    schema: Schema,
    length: int,
    read: Callable[[str, int], Any],
) -> Iterator[str]:
    """Find action fields that equal an observation of the same or the next step, or never change.

    Equal actions may be copies of observations, for example if an arm was guided by hand. Actions
    that never change have no effect.

    Args:
        schema: Fields of an episode.
        length: Steps of the episode.
        read: Function that reads the first steps of a field: (name, number of steps) -> rows.

    Yields:
        A sentence about each suspicious field.
    """
    num_steps = min(length, _NUM_STEPS)
    if num_steps < 2:
        return
    for name, action in _small_fields(schema, "action"):
        actions = read(name, num_steps)
        if (actions == actions[0]).all():
            yield f"{name!r} is the same in all {num_steps} compared steps."
        for seen, observation in _small_fields(schema, "observation"):
            if observation.shape != action.shape:
                continue
            rows = read(seen, num_steps).astype(actions.dtype)
            suspicion = "The actions may be copied observations."
            if np.array_equal(actions, rows):
                yield f"{name!r} equals {seen!r} of the same step. {suspicion}"
            if np.array_equal(actions[:-1], rows[1:]):
                yield f"{name!r} equals {seen!r} of the next step. {suspicion}"


def report_reset_rows(reader: FileSource) -> None:
    """Report episodes whose first row repeats the last observation of the previous episode."""
    num_resets = 0
    for number in range(1, min(len(reader.episodes), _NUM_ENDS + 1)):
        num_resets += _begins_with_reset(reader, number)
    if num_resets:
        episodes = f"{num_resets} episode" if num_resets == 1 else f"{num_resets} episodes"
        reader.advise(
            f"{episodes} of {str(reader.path)!r} start with the final observation of the previous "
            "episode. Their first step may only reset the simulator (autoreset)."
        )


def _begins_with_reset(reader: FileSource, number: int) -> bool:
    """Return whether the first step of an episode seems to only reset the simulator (autoreset).

    The row of such a step repeats the final observation of the previous episode, and the next row
    differs.
    """
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
    """Return the fields of a group with at most `_MAX_ROW_BYTES` bytes per row."""
    fields = schema.below(group).items()
    return [(name, field) for name, field in fields if 0 < field.row_bytes <= _MAX_ROW_BYTES]
