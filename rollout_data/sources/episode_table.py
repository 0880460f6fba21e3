"""The table of episodes, one row per episode, and filters of its rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from storage.errors import UsageError, nearest

from .episode_info import EpisodeInfo, end_of

#: Columns from the metadata of an episode -> value if the metadata do not have it.
_FROM_METADATA: dict[str, Any] = {"env": -1, "end_time_ns": 0, "writer": ""}
_DTYPES: dict[str, Any] = {
    "env": np.int64,
    "length": np.int64,
    "return": np.float64,
    "success": np.int8,
}
COLUMNS = ("id", "env", "length", "return", "ends", "success", "task", "time", "writer")


def column_of(infos: Sequence[EpisodeInfo], name: str) -> np.ndarray[Any, Any]:
    """Return a column of the table, see `as_table`. Returns are NaN, since no row is read."""
    success = {None: -1, False: 0, True: 1}
    give: dict[str, Callable[[EpisodeInfo], Any]] = {
        "id": lambda info: info.name,
        "length": lambda info: info.length,
        "return": lambda info: np.nan,
        "ends": end_of,
        "success": lambda info: success[info.success],
        "task": lambda info: info.task,
    }
    if name in give:
        return _typed(name, [give[name](info) for info in infos])
    key = "end_time_ns" if name == "time" else name
    none = _FROM_METADATA[key]
    values = [info.metadata.get(key) for info in infos]
    return _typed(name, [value if type(value) is type(none) else none for value in values])


def _typed(name: str, values: Sequence[Any]) -> np.ndarray[Any, Any]:
    """Convert a column to its dtype. A time of 0 is unknown and becomes NaT."""
    dtype = _DTYPES.get(name)
    if name == "time":
        return np.array([np.datetime64(one or "NaT", "ns") for one in values], "datetime64[ns]")
    return (
        np.array(values, dtype)
        if dtype
        else np.array(list(values), str)
        if len(values)
        else np.zeros(0, "U1")
    )


def as_table(column: Callable[[str], np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """Build the table from its columns.

    Returns:
        Structured array `[num_episodes]`: `id` text; `env` int64, -1 if unknown; `length` int64;
        `return` float64; `ends` text, see `end_of`; `success` int8, 1, 0 or -1 if unknown; `task`
        text; `time` datetime64[ns] of the end, NaT if unknown; `writer` text.
    """
    columns = {name: column(name) for name in COLUMNS}
    table = np.zeros(len(columns["id"]), [(name, values.dtype) for name, values in columns.items()])
    for name, values in columns.items():
        table[name] = values
    return table


def kept_rows(table: np.ndarray[Any, Any], columns: Mapping[str, Any]) -> np.ndarray[Any, Any]:
    """Return which rows match a filter, bool `[num_episodes]`.

    The filter has, for each column, a value, several values, or a function that accepts values.

    Raises:
        UsageError: There is no such column.
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
