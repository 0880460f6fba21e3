"""The table of episodes as a structured array, one row per episode, and its filters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from storage.errors import UsageError, nearest

from .episode_info import EpisodeInfo, end_of

#: Default values of the columns that are read from the metadata of episodes.
_FROM_METADATA: dict[str, Any] = {"env": -1, "end_time_ns": 0, "writer": ""}
_DTYPES: dict[str, Any] = {
    "env": np.int64,
    "length": np.int64,
    "return": np.float64,
    "success": np.int8,
}
COLUMNS = ("id", "env", "length", "return", "ends", "success", "task", "time", "writer")


def column_of(infos: Sequence[EpisodeInfo], name: str) -> np.ndarray[Any, Any]:
    """Build one column of the episode table from the descriptions of episodes.

    No rows are read, so the column "return" (sum of rewards) is NaN.
    """
    success = {None: -1, False: 0, True: 1}
    value_of: dict[str, Callable[[EpisodeInfo], Any]] = {
        "id": lambda info: info.name,
        "length": lambda info: info.length,
        "return": lambda info: np.nan,
        "ends": end_of,
        "success": lambda info: success[info.success],
        "task": lambda info: info.task,
    }
    if name in value_of:
        return _typed(name, [value_of[name](info) for info in infos])
    key = "end_time_ns" if name == "time" else name
    default = _FROM_METADATA[key]
    values = [info.metadata.get(key) for info in infos]
    return _typed(name, [value if type(value) is type(default) else default for value in values])


def _typed(name: str, values: Sequence[Any]) -> np.ndarray[Any, Any]:
    """Convert the values of a column to its dtype. The time 0 means unknown and becomes NaT."""
    if name == "time":
        return np.array([np.datetime64(value or "NaT", "ns") for value in values], "datetime64[ns]")
    return np.array(values, _DTYPES.get(name, str))


def as_table(column: Callable[[str], np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """Build the episode table from a function that returns a column by name.

    Returns:
        Structured array `[num_episodes]`: `id` text; `env` int64, -1 if unknown; `length` int64;
        `return` float64; `ends` text, see `end_of`; `success` int8: 1, 0, or -1 if unknown; `task`
        text; `time` of the end, datetime64[ns], NaT if unknown; `writer` text.
    """
    columns = {name: column(name) for name in COLUMNS}
    table = np.zeros(len(columns["id"]), [(name, values.dtype) for name, values in columns.items()])
    for name, values in columns.items():
        table[name] = values
    return table


def kept_rows(table: np.ndarray[Any, Any], columns: Mapping[str, Any]) -> np.ndarray[Any, Any]:
    """Return `[num_episodes]` bool: whether each row of the table matches all conditions.

    Args:
        table: Result of `as_table`.
        columns: Maps columns to a value, a list of values, or a function that returns whether to
            keep a value.

    Raises:
        UsageError: A column does not exist.
    """
    kept = np.ones(len(table), bool)
    for name, wanted in columns.items():
        if name not in COLUMNS:
            raise UsageError(f"unknown column {name!r}, expected one of {nearest(name, COLUMNS)}.")
        values = table[name]
        if callable(wanted):
            kept &= np.array([bool(wanted(value)) for value in values], bool)
        elif isinstance(wanted, (list, tuple, set, frozenset, np.ndarray)):
            kept &= np.isin(values, list(wanted))
        else:
            kept &= values == wanted
    return kept
