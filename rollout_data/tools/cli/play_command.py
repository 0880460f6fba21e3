"""An episode in the terminal: a line of bars for each dimension of its fields.

One rule: memory holds a part of a field at a time, whatever the length of the episode.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from storage.errors import UsageError, nearest

from ...formats.encoded_images import axes_of
from ...formats.open_recording import open as open_recording
from ...remote.locations import DataDir
from ...sources.episode import Episode, end_of
from ...sources.recording import Recording

BARS, ASCII_BARS, NOT_FINITE = "▁▂▃▄▅▆▇█", "_.,-=+*#", "!"
#: Dimensions that are shown of a field that was not asked for by its name.
_MAX_DIMENSIONS = 12
_PART_BYTES = 64 << 20
Array = np.ndarray[Any, Any]


def play(
    source: DataDir, episode: str | None = None, fields: Sequence[str] = (), *, width: int = 80, bars: str = BARS
) -> str:
    """Draw an episode in lines of text.

    Args:
        source, episode, fields: As of `describe_episode`, whose errors it raises.
        width: Letters in a line.
        bars: From low to high; `ASCII_BARS` for terminals without others.
    """
    return "\n".join(episode_as_text(describe_episode(source, episode, fields, width), width, bars))


def chosen_episode(source: DataDir, episode: str | None = None) -> tuple[Recording, int]:
    """Return a recording and the place of an episode in it.

    Args:
        source: A path of any format, or a `Recording`.
        episode: Its id, or its place where no id is so; None is the first.

    Raises:
        UsageError: There is no such episode.
    """
    recording = source if isinstance(source, Recording) else open_recording(source)
    wanted = episode or "0"
    ids = recording.ids
    if not ids:
        raise UsageError("play", repr(str(recording.path)), "an episode", "none")
    if wanted not in ids and wanted.isdecimal() and int(wanted) < len(ids):
        return recording, int(wanted)
    return recording, ids.index(recording.select(wanted).ids[0])


def describe_episode(
    source: DataDir, episode: str | None = None, fields: Sequence[str] = (), num_values: int = 80
) -> dict[str, Any]:
    """Collect what is known of an episode, and a curve for each dimension of its numeric fields.

    Args:
        source, episode: As of `chosen_episode`.
        fields: Names of fields, or what they begin with; none is all, of each the first 12 dimensions. Pictures have
            one curve, of their mean.
        num_values: Values of a curve at most: of each part of the episode the one that is furthest from the middle of
            the curve; NaN if any is not finite.

    Raises:
        UsageError: There is no such episode or field.
        DataFileError: It cannot be read.
    """
    recording, place = chosen_episode(source, episode)
    info = recording.info(place)
    one = recording[place]
    there = one.keys()
    for name in fields:
        if not any(f"{known}/".startswith(f"{name}/") for known in there):
            raise UsageError("play the field", f"of episode {one.id!r}", nearest(name, there), repr(name))
    starts, most = (tuple(f"{name}/" for name in fields), None) if fields else ("", _MAX_DIMENSIONS)
    chosen = [name for name in one.schema if f"{name}/".startswith(starts)]
    curves = [curve for name in chosen for curve in _curves(one, name, num_values, most)]
    return {
        "path": str(recording.path),
        "id": one.id,
        "number": place,
        "num_episodes": len(recording),
        "length": one.length,
        "ends": end_of(info),
        "success": one.success,
        "task": one.task,
        "texts": {name: list(dict.fromkeys(one.read(name))) for name in one.texts},
        "curves": curves,
    }


def _curves(episode: Episode, name: str, num_values: int, max_dimensions: int | None) -> list[dict[str, Any]]:
    shape = episode.schema[name].shape
    bounds = _bounds(episode.length, num_values)
    if 0 in shape:
        return []
    if axes_of(shape):
        means = [[np.mean(episode.read(name, start, start + 1), dtype=np.float64)] for start in bounds[:-1].tolist()]
        return [{"name": f"{name}, mean", **_extremes(np.array(means), np.array(means))[0]}]
    part = max(1, _PART_BYTES // max(1, 8 * math.prod(shape) * int(np.diff(bounds).max())))
    lows = []
    highs = []
    for first in range(0, len(bounds) - 1, part):
        inner = bounds[first : first + part + 1]
        rows = np.asarray(episode.read(name, int(inner[0]), int(inner[-1])), np.float64).reshape(-1, math.prod(shape))
        rows = np.where(np.isfinite(rows), rows, np.nan)[:, :max_dimensions]
        lows.append(np.minimum.reduceat(rows, inner[:-1] - inner[0]))
        highs.append(np.maximum.reduceat(rows, inner[:-1] - inner[0]))
    found = _extremes(np.concatenate(lows), np.concatenate(highs))
    indices = [str(list(index)).replace(" ", "") if shape else "" for index in np.ndindex(shape)]
    curves = [{"name": name + index, **curve} for index, curve in zip(indices, found, strict=False)]
    if len(indices) > len(curves):
        curves[-1]["more"] = f"{len(indices) - len(curves)} more: --field {name}"
    return curves


def _bounds(length: int, num_parts: int) -> Array:
    """Cut frames into parts of at least one."""
    return np.unique(np.linspace(0, length, min(length, num_parts) + 1).astype(np.int64))


def _extremes(low: Array, high: Array) -> list[dict[str, Any]]:
    """Return a curve for each dimension of the least and largest values of parts, `[parts, dimensions]`."""
    found = []
    for least, largest in zip(low.T, high.T, strict=True):
        known = np.concatenate([least, largest])[~np.isnan([least, largest]).ravel()]
        middle = (known / max(1, len(known))).sum() if len(known) else np.nan
        values = np.where(largest / 2 - middle >= -least / 2, largest, least)
        bounds = [float(known.min()), float(known.max())] if len(known) else [None, None]
        found.append({"min": bounds[0], "max": bounds[1], "values": values.tolist()})
    return found


def episode_as_text(about: dict[str, Any], width: int = 80, bars: str = BARS) -> list[str]:
    """Draw `describe_episode`'s answer in lines of `width` letters."""
    success = {True: ", success", False: ", failure", None: ""}[about["success"]]
    ends = {"unknown": "end unknown", "open": "cut"}.get(about["ends"], about["ends"])
    lines = [
        f"{about['id']}: {about['length']:,} frames, {ends}{success} "
        f"({about['number'] + 1:,} of {about['num_episodes']:,})"
    ]
    told = {"task": [about["task"]] if about["task"] else [], **about["texts"]}
    lines += [
        f"{name}: {' | '.join(' '.join(text.split()) for text in texts)}" for name, texts in told.items() if texts
    ]
    names = [curve["name"] for curve in about["curves"]]
    room = min(max(map(len, names), default=0), max(6, width // 3))
    num_bars = max(1, width - room - 1 - (24 if width >= 60 else 0))
    for curve in about["curves"]:
        name = curve["name"] if len(curve["name"]) <= room else ".." + curve["name"][2 - room :]
        line = f"{name:<{room}} {_bars(curve, num_bars, bars):<{num_bars}}"
        if width >= 60 and curve["min"] is not None:
            line += f" {curve['min']:.4g} .. {curve['max']:.4g}"
        lines += [line.rstrip(), *([f"{'':<{room}} {curve['more']}"] if "more" in curve else [])]
    return [line if len(line) <= width else line[: max(0, width - 2)] + ".." for line in lines]


def _bars(curve: dict[str, Any], num_bars: int, bars: str) -> str:
    values = np.array(curve["values"], np.float64)[:, None]
    starts = _bounds(len(values), num_bars)[:-1]
    least, largest = (one.reduceat(values, starts) for one in (np.minimum, np.maximum))
    low, high = ((curve[end] or 0.0) / 2 for end in ("min", "max"))  # the whole difference may not be finite
    drawn = _extremes(least, largest)[0]["values"]
    levels = [(value / 2 - low) / (high - low) if high > low else 0.5 for value in drawn]
    return "".join(
        NOT_FINITE if math.isnan(value) else bars[round(level * (len(bars) - 1))]
        for value, level in zip(drawn, levels, strict=True)
    )
