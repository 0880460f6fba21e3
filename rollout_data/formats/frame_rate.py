"""Choose the frame rate of a written dataset if its format has one rate for all episodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from storage.core.arguments import is_real
from storage.errors import DataFileError, UnansweredError, UsageError

from .episode_writer import EpisodeToWrite

#: Metadata keys of a frame rate in Hz, in order of precedence.
RATE_KEYS = ("frame_rate_hz", "fps")
#: Fields with such a name, or with such a last part of the name, contain times in seconds.
_TIME_NAMES = ("timestamp", "timestamps")
_TIME_DTYPES = ("float32", "float64")
#: Relative difference above which two rates contradict each other.
_MAX_DIFFERENCE = 0.01
#: Relative difference to an integer below which a rate is rounded to the integer. Recorded times
#: are often rounded.
_ROUNDING = 5e-4
#: Largest relative difference between a regular time step and the median step. Irregular steps are
#: pauses or dropped frames.
_MAX_STEP_DIFFERENCE = 0.5
#: Metadata values that mean an unknown rate.
_UNKNOWN = (None, "", "unknown")


class Statement(NamedTuple):
    """A frame rate found in a recording.

    Attributes:
        rate_hz: Frames per second.
        where: Source of the rate for errors, such as "fps of the recording".
        episode: Id of the episode; "" if the rate is a statement about all episodes.
        is_certain: False if the rate is measured and its error may exceed 1 %.
    """

    rate_hz: float
    where: str
    episode: str = ""
    is_certain: bool = True

    def __str__(self) -> str:
        return f"{self.rate_hz:.6g} Hz ({self.where})"


def frame_rate(
    episodes: Sequence[EpisodeToWrite],
    metadata: Mapping[str, Any],
    fps: float | None,
) -> tuple[float, dict[str, set[str]]]:
    """Return the frame rate to write in Hz, and report lines about episodes with other rates.

    The rate is the argument `fps`. If it is None, the rate is the first known value in this order:
    `frame_rate_hz` in metadata, `fps` in metadata, a field `timestamp` in seconds. Metadata of the
    recording and of its episodes are searched.

    Returns:
        The rate in Hz, and a dict that maps each report line to the ids of its episodes.

    Raises:
        UsageError: The rate of an episode is unknown, or two known rates (including the argument
            `fps`) differ by more than 1 %.
    """
    of_recording = list(_stated_rates(metadata, "the recording", has_fps=fps is not None))
    stated = list(of_recording)
    measured: list[Statement] = []
    for episode in episodes:
        where = f"episode {episode.id!r}"
        stated += _stated_rates(episode.metadata, where, episode.id, has_fps=fps is not None)
        measured += _measured_rates(episode)
    stated.sort(key=_priority)

    statements = [*stated, *(rate for rate in measured if rate.is_certain)]
    if fps is not None:
        statements.insert(0, Statement(float(fps), "the argument fps"))
    if not statements and measured:
        median_hz = float(np.median([rate.rate_hz for rate in measured]))
        statements.append(Statement(_rounded(median_hz, _MAX_DIFFERENCE), measured[0].where))
    if not statements:
        raise _unknown_rate("the recording")
    _check_same_rate(statements)

    if fps is None and not of_recording:
        known = {rate.episode for rate in stated}
        for episode in episodes:
            if episode.id not in known and not _time_fields(episode):
                raise _unknown_rate(f"episode {episode.id!r}")

    rate_hz = statements[0].rate_hz
    report: dict[str, set[str]] = {}
    for rate in stated:
        if rate.rate_hz != rate_hz:
            line = f"frames are written as {rate_hz:g} a second instead of {rate.rate_hz:g}"
            ids = [rate.episode] if rate.episode else [episode.id for episode in episodes]
            report.setdefault(line, set()).update(ids)
    return rate_hz, report


def _priority(statement: Statement) -> int:
    """Return the precedence of a rate as a sort key; 0 is the highest precedence."""
    return RATE_KEYS.index(statement.where.split()[0])


def _stated_rates(
    metadata: Mapping[str, Any],
    where: str,
    episode: str = "",
    has_fps: bool = False,
) -> Iterator[Statement]:
    """Yield the rates in metadata.

    Raises:
        UsageError: A value is not a valid rate, and `has_fps` is false.
    """
    for key in RATE_KEYS:
        value: Any = metadata.get(key)
        if isinstance(value, np.ndarray) and value.size == 1:
            value = value.item()
        if is_real(value) and 0 < float(value) < float("inf"):
            yield Statement(float(value), f"{key} of {where}", episode)
        elif not has_fps and not any(value is word or value == word for word in _UNKNOWN):
            raise UsageError(
                f"{key} of {where} must be a number > 0, got {repr(value)[:80]}. Pass fps=... to "
                "replace it."
            )


def _unknown_rate(owner: str) -> UsageError:
    return UsageError(
        f"the frame rate of {owner} is unknown. Pass fps=..., or set {RATE_KEYS[0]!r} in the "
        "metadata."
    )


def _time_fields(episode: EpisodeToWrite) -> list[str]:
    """Return the names of the fields of an episode with recorded times in seconds."""
    names = []
    for name, field in episode.schema.items():
        is_number = field.num_elements == 1 and field.dtype in _TIME_DTYPES
        if is_number and name.rpartition("/")[2] in _TIME_NAMES:
            names.append(name)
    return names


def _measured_rates(episode: EpisodeToWrite) -> Iterator[Statement]:
    """Yield the rate of each time field of an episode: the inverse mean of the regular time steps.

    The median would be biased: at 30 Hz, times rounded to milliseconds have steps of 33 and 34 ms.
    """
    for name in _time_fields(episode):
        try:
            times = np.asarray(episode.read(name), np.float64).reshape(-1)
        except UnansweredError:
            raise
        except DataFileError:  # Writing the episode raises this error later.
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
    """Round a rate to an integer if the rounding is within the relative `error` of the rate."""
    nearest = round(rate_hz)
    tolerance = min(max(_ROUNDING, error), _MAX_DIFFERENCE)
    return float(nearest) if nearest and abs(rate_hz / nearest - 1) < tolerance else rate_hz


def _check_same_rate(statements: Sequence[Statement]) -> None:
    """Raise `UsageError` if two rates contradict each other."""
    lowest = min(statements, key=lambda statement: statement.rate_hz)
    highest = max(statements, key=lambda statement: statement.rate_hz)
    if highest.rate_hz <= lowest.rate_hz * (1 + _MAX_DIFFERENCE):
        return
    first = statements[0]
    is_high = highest.rate_hz > first.rate_hz * (1 + _MAX_DIFFERENCE)
    other = highest if is_high else lowest
    raise UsageError(
        f"the frame rates {first} and {other} differ, but a LeRobot set has one rate. Select "
        "episodes of one rate, or correct the wrong rate."
    )
