"""What no file says and importers get wrong: actions that were copied, and rows that only reset a simulator.

One rule: a few rows of the first episodes are compared; what is found is reported, and nothing is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from storage.core.fields import Field, Schema

from ..sources.episode_reader import ForeignReader

Array = np.ndarray[Any, Any]
#: Steps of an episode and ends that are looked at, in fields whose rows have at most this many bytes.
_NUM_STEPS, _NUM_ENDS, _MAX_BYTES = 256, 8, 1 << 12


def copied_actions(schema: Schema, length: int, read: Callable[[str, int], Any]) -> Iterator[tuple[str, str]]:
    """Report actions that are the observations of their steps or the next ones, or always the same.

    They were copied, as when an arm is led by hand, or command nothing.

    Args:
        schema: The fields of an episode.
        length: Its steps.
        read: Gives the first steps of a field.

    Yields:
        What actions should be, and what they are.
    """
    steps = min(length, _NUM_STEPS)
    for name, action in _small(schema, "action") if steps > 1 else ():
        actions = read(name, steps)
        if (actions == actions[0]).all():
            yield f"{name!r} that changes", "the same in all steps"
        for seen in [other for other, one in _small(schema, "observation") if one.shape == action.shape]:
            rows = read(seen, steps).astype(actions.dtype)
            for shift, which in ((0, "the same"), (1, "the next")):
                if np.array_equal(actions[: steps - shift], rows[shift:]):
                    yield f"{name!r} that differs from {seen!r}", f"those of {which} step"


def look_for_copies(reader: ForeignReader) -> None:
    """Report the `copied_actions` of the first episode of two steps."""
    number = next((number for number, info in enumerate(reader.episodes) if info.length > 1), None)
    if number is not None:
        info = reader.episodes[number]
        where = f"the actions of {info.name!r} of {str(reader.path)!r}"
        for found in copied_actions(info.schema, info.length, lambda name, count: reader.read(number, name, 0, count)):
            reader.advise("take as commands", where, *found)


def look_for_resets(reader: ForeignReader) -> None:
    """Report episodes that begin with the final observation of the one before, and go on elsewhere."""
    infos = reader.episodes[: _NUM_ENDS + 1]
    count = 0
    for number in range(1, len(infos)):
        names = [name for name, one in _small(infos[number].schema, "observation") if name in infos[number - 1].final]
        rows = reader.read_fields(number, names, 0, min(2, infos[number].length))
        is_same = [np.array_equal(reader.read_final(number - 1, name), rows[name][0]) for name in names]
        count += any(is_same) and all(is_same) and any((one[0] != one[-1]).any() for one in rows.values())
    if count:
        where = f"the ends of {str(reader.path)!r}"
        got = f"the first one of the next episode, {count} times"
        advice = "A step that only reset the simulator follows (autoreset), or the last observations are missing"
        reader.advise("believe", where, "observations of their own", got, advice)


def _small(schema: Schema, group: str) -> list[tuple[str, Field]]:
    return [(name, one) for name, one in schema.below(group).items() if 0 < one.row_bytes <= _MAX_BYTES]
