"""Draw an episode as text: one line of bar characters per dimension of its fields.

Such a line is called a curve. The episode is divided into as many parts of successive frames as
the curve has values. To limit memory, at most 64 MiB of a field are read at a time.
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
from ...sources.episode_info import end_of
from ...sources.recordings.episode import Episode
from ...sources.recordings.recording import Recording

#: Bar characters for values from low to high.
BARS = "▁▂▃▄▅▆▇█"
#: Bar characters for a terminal that cannot encode `BARS`.
ASCII_BARS = "_.,-=+*#"
#: Character that represents NaN and infinite values.
NOT_FINITE = "!"
#: Maximum number of dimensions per field that are shown, if the caller names no fields.
_MAX_DIMENSIONS = 12
#: Maximum bytes of a field in memory at once, if it were float64.
_PART_BYTES = 64 << 20
#: Minimum line width in characters for printing minimum and maximum after a curve.
_MIN_RANGE_WIDTH = 60
#: Number of characters for the printed minimum and maximum.
_RANGE_WIDTH = 24
Array = np.ndarray[Any, Any]


def play(
    source: DataDir,
    episode: str | None = None,
    fields: Sequence[str] = (),
    *,
    width: int = 80,
    bars: str = BARS,
) -> str:
    """Return a drawing of an episode as text, with one line per curve.

    Args:
        source: A path of any format, or a `Recording`.
        episode: Id or position of the episode; None means the first episode.
        fields: Names of fields or groups of fields. Without names, the first 12 dimensions of every
            field are drawn.
        width: Line width in characters.
        bars: Bar characters from low to high, such as `BARS` or `ASCII_BARS`.

    Raises:
        UsageError: There is no such episode or field.
        DataFileError: The episode cannot be read.
    """
    about = describe_episode(source, episode, fields, width)
    return "\n".join(episode_as_text(about, width, bars))


def chosen_episode(source: DataDir, episode: str | None = None) -> tuple[Recording, int]:
    """Open a recording and find an episode. Returns the recording and the episode's position.

    Args:
        source: A path of any format, or a `Recording`.
        episode: Id of the episode, or its position if no episode has this id. None means the first
            episode.

    Raises:
        UsageError: There is no such episode.
    """
    recording = source if isinstance(source, Recording) else open_recording(source)
    wanted = episode or "0"
    ids = recording.ids
    if not ids:
        raise UsageError(f"{str(recording.path)!r} has no episodes.")
    if wanted not in ids and wanted.isdecimal() and int(wanted) < len(ids):
        return recording, int(wanted)
    # `select` raises `UsageError` if there is no such episode.
    selected_id = recording.select(wanted).ids[0]
    return recording, ids.index(selected_id)


def describe_episode(
    source: DataDir,
    episode: str | None = None,
    fields: Sequence[str] = (),
    num_values: int = 80,
) -> dict[str, Any]:
    """Return facts about an episode as a dict, with a curve per dimension of its numeric fields.

    Args:
        source: A path of any format, or a `Recording`.
        episode: Id or position of the episode; None means the first episode.
        fields: Names of fields or groups of fields. Without names, the first 12 dimensions of every
            field are returned. An image field has one curve, with the mean of the first image of
            each part.
        num_values: Maximum number of values of a curve. The episode is divided into as many parts.
            The value of a part is its minimum or its maximum, whichever is further from the mean of
            the curve. It is NaN if the part has NaN or infinite values.

    Raises:
        UsageError: There is no such episode or field.
        DataFileError: The episode cannot be read.
    """
    recording, place = chosen_episode(source, episode)
    chosen = recording[place]
    max_dimensions = None if fields else _MAX_DIMENSIONS
    curves = []
    for name in _chosen_fields(chosen, fields):
        curves += _curves(chosen, name, num_values, max_dimensions)
    return {
        "path": str(recording.path),
        "id": chosen.id,
        "number": place,
        "num_episodes": len(recording),
        "length": chosen.length,
        "ends": end_of(recording.info(place)),
        "success": chosen.success,
        "task": chosen.task,
        "texts": {name: list(dict.fromkeys(chosen.read(name))) for name in chosen.texts},
        "curves": curves,
    }


def _chosen_fields(episode: Episode, prefixes: Sequence[str]) -> list[str]:
    """Return the numeric fields that have a name in `prefixes`, or are in a group of this name.

    The field "observation/depth" is in the group "observation". All fields are returned if
    `prefixes` is empty.

    Raises:
        UsageError: A name in `prefixes` is neither a field nor a group.
    """
    if not prefixes:
        return list(episode.schema)
    known = episode.keys()
    for prefix in prefixes:
        if not any(_is_below(name, prefix) for name in known):
            raise UsageError(
                f"episode {episode.id!r} has no field {prefix!r}. "
                f"Choose from {nearest(prefix, known)}."
            )
    return [name for name in episode.schema if any(_is_below(name, prefix) for prefix in prefixes)]


def _is_below(name: str, prefix: str) -> bool:
    return f"{name}/".startswith(f"{prefix}/")


def _curves(
    episode: Episode,
    name: str,
    num_values: int,
    max_dimensions: int | None,
) -> list[dict[str, Any]]:
    """Return the curves of a field, one for each of its first `max_dimensions` dimensions.

    If `max_dimensions` is None, all dimensions have a curve. An image field has a single curve.
    """
    shape = episode.schema[name].shape
    bounds = _bounds(episode.length, num_values)
    if 0 in shape:
        return []
    if axes_of(shape):
        means = _picture_means(episode, name, bounds[:-1].tolist())
        return [{"name": f"{name}, mean", **_furthest(means, means)[0]}]

    minima, maxima = _part_extremes(episode, name, bounds, max_dimensions)
    indices = list(np.ndindex(shape))
    curves = []
    for index, curve in zip(indices, _furthest(minima, maxima), strict=False):
        index_text = str(list(index)).replace(" ", "") if shape else ""
        curves.append({"name": name + index_text, **curve})
    num_left = len(indices) - len(curves)
    if num_left:
        curves[-1]["more"] = f"{num_left} more: --field {name}"
    return curves


def _picture_means(episode: Episode, name: str, frames: Sequence[int]) -> Array:
    """Return the mean value of each image at the indices `frames`: float64 `[len(frames), 1]`."""
    means = []
    for frame in frames:
        picture = episode.read(name, frame, frame + 1)
        means.append([np.mean(picture, dtype=np.float64)])
    return np.array(means)


def _part_extremes(
    episode: Episode,
    name: str,
    bounds: Array,
    max_dimensions: int | None,
) -> tuple[Array, Array]:
    """Return the minimum and the maximum of each part of an episode: `[parts, dimensions]` each.

    Both are NaN for a part with NaN or infinite values.

    Args:
        episode: Episode to read.
        name: Name of a numeric field.
        bounds: First frame of each part, then the end of the last part, int64 `[parts + 1]`.
        max_dimensions: Maximum number of dimensions; None means all.
    """
    width = math.prod(episode.schema[name].shape)
    part_bytes = 8 * width * int(np.diff(bounds).max())
    num_parts = max(1, _PART_BYTES // max(1, part_bytes))
    minima = []
    maxima = []
    for first in range(0, len(bounds) - 1, num_parts):
        inner = bounds[first : first + num_parts + 1]
        values = episode.read(name, int(inner[0]), int(inner[-1]))
        rows = np.asarray(values, np.float64).reshape(-1, width)
        rows = np.where(np.isfinite(rows), rows, np.nan)[:, :max_dimensions]
        starts = inner[:-1] - inner[0]
        minima.append(np.minimum.reduceat(rows, starts))
        maxima.append(np.maximum.reduceat(rows, starts))
    return np.concatenate(minima), np.concatenate(maxima)


def _bounds(length: int, num_parts: int) -> Array:
    """Divide `length` frames into at most `num_parts` parts of about the same length.

    Returns the first frame of each part, then `length`: int64 `[parts + 1]`.
    """
    return np.unique(np.linspace(0, length, min(length, num_parts) + 1).astype(np.int64))


def _furthest(minima: Array, maxima: Array) -> list[dict[str, Any]]:
    """Build a curve per dimension from the minimum and the maximum of each part of an episode.

    The value of a part in the curve is its minimum or its maximum, whichever is further from the
    mean of the curve. So the curve shows short peaks.

    Args:
        minima: Minimum of each part, `[parts, dimensions]`.
        maxima: Maximum of each part, `[parts, dimensions]`.
    """
    curves = []
    for low, high in zip(minima.T, maxima.T, strict=True):
        extremes = np.concatenate([low, high])
        known = extremes[~np.isnan(extremes)]
        curve: dict[str, Any] = {"min": None, "max": None}
        middle = np.nan
        if len(known):
            curve = {"min": float(known.min()), "max": float(known.max())}
            # Not `mean()`, because the sum of large values may overflow.
            middle = (known / len(known)).sum()
        is_high_further = high / 2 - middle >= -low / 2
        curves.append({**curve, "values": np.where(is_high_further, high, low).tolist()})
    return curves


def episode_as_text(about: dict[str, Any], width: int = 80, bars: str = BARS) -> list[str]:
    """Convert the result of `describe_episode` to lines of at most `width` characters."""
    lines = [_head_line(about)]
    task = [about["task"]] if about["task"] else []
    texts = {"task": task, **about["texts"]}
    for name, values in texts.items():
        if values:
            lines.append(f"{name}: {' | '.join(' '.join(text.split()) for text in values)}")

    has_range = width >= _MIN_RANGE_WIDTH
    longest = max((len(curve["name"]) for curve in about["curves"]), default=0)
    name_width = min(longest, max(6, width // 3))
    num_bars = max(1, width - name_width - 1 - (_RANGE_WIDTH if has_range else 0))
    for curve in about["curves"]:
        name = curve["name"]
        if len(name) > name_width:
            name = ".." + name[2 - name_width :]
        line = f"{name:<{name_width}} {_bars(curve, num_bars, bars):<{num_bars}}"
        if has_range and curve["min"] is not None:
            line += f" {curve['min']:.4g} .. {curve['max']:.4g}"
        lines.append(line.rstrip())
        if "more" in curve:
            lines.append(f"{'':<{name_width}} {curve['more']}")
    return [_cut(line, width) for line in lines]


def _head_line(about: dict[str, Any]) -> str:
    success = {True: ", success", False: ", failure", None: ""}[about["success"]]
    end = {"unknown": "end unknown", "open": "cut"}.get(about["ends"], about["ends"])
    place = f"({about['number'] + 1:,} of {about['num_episodes']:,})"
    return f"{about['id']}: {about['length']:,} frames, {end}{success} {place}"


def _cut(line: str, width: int) -> str:
    return line if len(line) <= width else line[: max(0, width - 2)] + ".."


def _bars(curve: dict[str, Any], num_bars: int, bars: str) -> str:
    """Convert a curve to a line of at most `num_bars` bar characters, chosen from `bars`."""
    values = np.array(curve["values"], np.float64)[:, None]
    starts = _bounds(len(values), num_bars)[:-1]
    minima = np.minimum.reduceat(values, starts)
    maxima = np.maximum.reduceat(values, starts)
    # Halved, because the difference of two large finite values may overflow.
    low = (curve["min"] or 0.0) / 2
    high = (curve["max"] or 0.0) / 2

    text = ""
    for value in _furthest(minima, maxima)[0]["values"]:
        if math.isnan(value):
            text += NOT_FINITE
            continue
        level = (value / 2 - low) / (high - low) if high > low else 0.5
        text += bars[round(level * (len(bars) - 1))]
    return text
