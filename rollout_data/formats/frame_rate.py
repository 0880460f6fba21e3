"""The frame rate of a target that has one rate for all episodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from storage.core.arguments import is_real
from storage.errors import DataFileError, UnansweredError, UsageError

from .episode_writer import EpisodeToWrite

#: Keys of metadata that state a rate in Hz, the preferred one first.
RATE_KEYS = ("frame_rate_hz", "fps")
#: Last part of the name of a field of recorded times in seconds.
_TIME_NAMES = ("timestamp", "timestamps")
_TIME_DTYPES = ("float32", "float64")
#: Rates that differ by more than this share contradict each other.
_MAX_DIFFERENCE = 0.01
#: Rates this close to an integer, as rounded times give them, are that integer.
_ROUNDING = 5e-4
#: Steps that differ from the median by more than this share of it are pauses and lost frames.
_MAX_STEP_DIFFERENCE = 0.5
_UNKNOWN = (None, "", "unknown")


class Statement(NamedTuple):
    """A rate that a recording states.

    Attributes:
        rate_hz: Frames per second.
        where: The statement, for errors: "fps of the recording".
        episode: Id of the episode; "" if the statement is about all of them.
        is_certain: False for times whose steps vary too much to tell the rate within 1 %.
    """

    rate_hz: float
    where: str
    episode: str = ""
    is_certain: bool = True

    def __str__(self) -> str:
        return f"{self.rate_hz:.6g} Hz ({self.where})"


def frame_rate(
    episodes: Sequence[EpisodeToWrite], metadata: Mapping[str, Any], fps: float | None
) -> tuple[float, dict[str, set[str]]]:
    """Return the rate of all episodes in Hz, and what was rounded: line of the report -> ids of episodes.

    The rate is `fps`, or the first that is stated: `frame_rate_hz` in the metadata of the recording or of its
    episodes, `fps` there, the field `timestamp` in seconds.

    Raises:
        UsageError: The rate of an episode is not known, or two statements, `fps` included, differ by more than 1 %.
    """
    of_all = list(_stated(metadata, "the recording", has_fps=fps is not None))
    stated = list(of_all)
    for episode in episodes:
        where = f"episode {episode.id!r}"
        stated += _stated(episode.metadata, where, episode.id, has_fps=fps is not None)
    stated.sort(key=lambda one: RATE_KEYS.index(one.where.split()[0]))
    measured = [one for episode in episodes for one in _measured(episode)]
    certain = [*stated, *(one for one in measured if one.is_certain)]
    if fps is not None:
        certain.insert(0, Statement(float(fps), "the argument fps"))
    if not certain and measured:
        median_hz = float(np.median([one.rate_hz for one in measured]))
        certain = [Statement(_rounded(median_hz, _MAX_DIFFERENCE), measured[0].where)]
    if not certain:
        raise _unknown("the recording", "the recording")
    rate_hz = certain[0].rate_hz
    _check_alike(certain)
    if fps is None and not of_all:
        known = {one.episode for one in stated}
        for episode in episodes:
            if episode.id not in known and not _times(episode):
                raise _unknown(f"episode {episode.id!r}", "the episode")
    report: dict[str, set[str]] = {}
    for one in stated:
        if one.rate_hz != rate_hz:
            line = f"frames are written as {rate_hz:g} a second instead of {one.rate_hz:g}"
            report.setdefault(line, set()).update([one.episode] if one.episode else [each.id for each in episodes])
    return rate_hz, report


def _stated(metadata: Mapping[str, Any], where: str, episode: str = "", has_fps: bool = False) -> Iterator[Statement]:
    """Yield the rates in metadata; values that are no rates are errors, unless the caller says fps=."""
    for key in RATE_KEYS:
        value: Any = metadata.get(key)
        if isinstance(value, np.ndarray) and value.size == 1:
            value = value.item()
        if is_real(value) and 0 < float(value) < float("inf"):
            yield Statement(float(value), f"{key} of {where}", episode)
        elif not has_fps and not any(value is one or value == one for one in _UNKNOWN):
            raise UsageError("take the frame rate", f"{key} of {where}", "a number > 0", repr(value)[:80], "Say fps=")


def _unknown(what: str, whose: str) -> UsageError:
    expected = f"a frame rate, as {RATE_KEYS[0]!r} in the metadata of {whose}"
    return UsageError(f"write {what}", "as LeRobot", expected, "none", "Say fps=")


def _times(episode: EpisodeToWrite) -> list[str]:
    """Return the names of the fields of recorded times in seconds."""
    return [
        name
        for name, field in episode.schema.items()
        if name.rpartition("/")[2] in _TIME_NAMES and field.num_elements == 1 and field.dtype in _TIME_DTYPES
    ]


def _measured(episode: EpisodeToWrite) -> Iterator[Statement]:
    """Yield the rates of the recorded times of an episode: of its usual steps, the mean.

    The median is no rate: steps of times that are rounded to milliseconds are 33 or 34 ms at 30 Hz.
    """
    for name in _times(episode):
        try:
            times = np.asarray(episode.read(name), np.float64).reshape(-1)
        except UnansweredError:
            raise
        except DataFileError:  # `add` raises it again
            continue
        steps = np.diff(times)
        median = float(np.median(steps)) if len(steps) else 0.0
        if not 0 < median < float("inf") or not np.isfinite(steps).all():
            continue
        usual = steps[np.abs(steps - median) <= _MAX_STEP_DIFFERENCE * median]
        mean = float(usual.mean())
        error = float(usual.std()) / mean / np.sqrt(len(usual))
        is_certain = error < _MAX_DIFFERENCE / 2 and 2 * len(usual) > len(steps)
        where = f"{name!r} of episode {episode.id!r}"
        yield Statement(_rounded(1 / mean, error), where, episode.id, is_certain)


def _rounded(rate_hz: float, error: float) -> float:
    """Return the nearest integer if the rate, whose relative error is known, may be that."""
    nearest = round(rate_hz)
    tolerance = min(max(_ROUNDING, error), _MAX_DIFFERENCE)
    return float(nearest) if nearest and abs(rate_hz / nearest - 1) < tolerance else rate_hz


def _check_alike(statements: Sequence[Statement]) -> None:
    """Raise if two statements contradict each other."""
    lowest = min(statements, key=lambda one: one.rate_hz)
    highest = max(statements, key=lambda one: one.rate_hz)
    if highest.rate_hz <= lowest.rate_hz * (1 + _MAX_DIFFERENCE):
        return
    first = statements[0]
    is_high = highest.rate_hz > first.rate_hz * (1 + _MAX_DIFFERENCE)
    other = highest if is_high else lowest
    advice = "Select episodes of one rate, or correct the one that is wrong"
    raise UsageError("write the recording", "at one frame rate", str(first), str(other), advice)
