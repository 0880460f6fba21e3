"""The table of episodes: one row each, and which rows a filter keeps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from storage.errors import RolloutDataError, UsageError, nearest

from ..foreign.reader import EpisodeInfo
from .episode import Episode

#: What metadata of an episode may tell, with what stands where they do not.
_FROM_METADATA: dict[str, Any] = {"env": -1, "end_time_ns": 0, "writer": ""}
COLUMNS = ("id", "env", "length", "return", "ends", "success", "task", "time", "writer")


def end_of(info: EpisodeInfo) -> str:
    """Name how an episode ended: "terminated", "truncated", "unknown", or "open" if the recording was cut there."""
    if info.terminated or info.truncated:
        return "terminated" if info.terminated else "truncated"
    is_known = None not in (info.terminated, info.truncated) or info.metadata.get("ends") == "open"
    return "open" if is_known else "unknown"


def table_of(infos: Sequence[EpisodeInfo]) -> np.ndarray[Any, Any]:
    """Make the table without returns, which are NaN: nothing is read.

    Returns:
        Structured array `[num_episodes]`: `id` text; `env` int64, -1 if unknown; `length` int64; `return` float64;
        `ends` text, see `end_of`; `success` int8, 1, 0 or -1 if unknown; `task` text; `time` datetime64[ns] of the
        end, NaT if unknown; `writer` text.
    """
    rows = []
    for info in infos:
        about: dict[str, Any] = dict(_FROM_METADATA)
        about |= {name: told for name, none in about.items() if type(told := info.metadata.get(name)) is type(none)}
        success = -1 if info.success is None else int(info.success)
        time = np.datetime64(about["end_time_ns"] or "NaT", "ns")
        ends = end_of(info)
        rows.append((info.name, about["env"], info.length, np.nan, ends, success, info.task, time, about["writer"]))
    texts = [np.array([row[place] for row in rows] or [""], str).dtype for place in (0, 4, 6, 8)]
    kinds = [texts[0], np.int64, np.int64, np.float64, texts[1], np.int8, texts[2], "datetime64[ns]", texts[3]]
    return np.array(rows, np.dtype(list(zip(COLUMNS, kinds, strict=True))))


def with_returns(table: np.ndarray[Any, Any], episodes: Sequence[Episode]) -> np.ndarray[Any, Any]:
    """Give a copy of a table with the sum of the rewards of each episode, NaN without; reads all rewards."""
    found: np.ndarray[Any, Any] = table.copy()
    found["return"] = [_return(episode) for episode in episodes]
    return found


def _return(episode: Episode) -> float:
    try:
        reward = episode.reward
    except RolloutDataError:  # reading the episode raises it again
        return np.nan
    return np.nan if reward is None or isinstance(reward, Mapping) else float(np.sum(reward, dtype=np.float64))


def kept_rows(table: np.ndarray[Any, Any], columns: Mapping[str, Any]) -> np.ndarray[Any, Any]:
    """bool `[num_episodes]`: rows in which each column has the value, one of the values, or what a function accepts.

    Raises:
        UsageError: There is no such column.
    """
    kept = np.ones(len(table), bool)
    for name, wanted in columns.items():
        if name not in COLUMNS:
            raise UsageError("filter episodes", "", f"a column {nearest(name, COLUMNS)}", repr(name))
        values = table[name]
        if isinstance(wanted, Callable):  # type: ignore[arg-type]
            kept &= np.array([bool(wanted(value)) for value in values], bool)
        elif isinstance(wanted, (list, tuple, set, frozenset, np.ndarray)):
            kept &= np.isin(values, list(wanted))
        else:
            kept &= values == wanted
    return kept
