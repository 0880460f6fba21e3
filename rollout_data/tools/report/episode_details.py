"""Curves and pictures of single episodes, and of the worst place of each finding.

One rule: only the episodes that are shown are read again, and no frame more than once for its picture.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from storage.errors import DataFileError

from ...sources.episode import Episode
from .embedded_data import Array, is_picture, packed, picture
from .summary import dimensions_of
from .survey import MEDIAN, WHOLE, Column, Survey, quantiles

#: Points of a curve of an episode, of one of the worst, and of a finding; each is the least and greatest of its frames.
NUM_POINTS, NUM_FINE_POINTS, NUM_SMALL_POINTS = 150, 600, 75
#: Of small drawings.
WIDTH, HEIGHT = 600, 192
NUM_PICTURES = 12
#: Of the few curves of a small drawing.
_DASHES = ("", "5 3", "1.5 2.5")
#: Frames that are shown on either side of a finding's.
_AROUND = 25


def _stretches(values: Array, num_points: int) -> list[Array]:
    """The least and greatest of at most `num_points` stretches, NaN if there is none; the values if they are fewer."""
    finite = np.where(np.isfinite(values), values, np.nan)
    if len(values) <= num_points:
        return [finite]
    edges = np.linspace(0, len(values), num_points, endpoint=False).astype(np.int64)
    return [np.fmin.reduceat(finite, edges), np.fmax.reduceat(finite, edges)]


class Closeups:
    """Reads what is shown of single episodes.

    Attributes:
        survey: Of the recording.
        columns: What is drawn, as (field, dimension).
    """

    def __init__(self, survey: Survey, columns: Sequence[Column]) -> None:
        self.survey = survey
        self.columns = columns

    def episode_curves(self, number: int, num_points: int) -> dict[str, Any]:
        """Pack the curves of all columns of an episode; what it lacks is unknown."""
        episode = self.survey.recording[number]
        rows = self._rows(episode, self.columns, 0, episode.length)
        return packed(np.stack(_stretches(rows, num_points)).transpose(2, 0, 1))

    def _rows(self, episode: Episode, columns: Sequence[Column], start: int, stop: int) -> Array:
        """`[stop - start, columns]`, a whole as the median of its dimensions; NaN where nothing can be read."""
        rows = np.full((stop - start, len(columns)), np.nan)
        read = dict[str, Array]()
        for at, (name, place) in enumerate(columns):
            if name not in read:
                read[name] = np.empty((stop - start, 0))
                with suppress(DataFileError):  # the doctor names it
                    if name in episode.schema:
                        read[name] = np.asarray(episode.read(name, start, stop)).reshape(stop - start, -1)
            if place < read[name].shape[1]:
                rows[:, at] = np.median(read[name], 1) if place == WHOLE else read[name][:, place]
        return rows

    def pictures(self, number: int, frames: Sequence[int]) -> dict[str, list[tuple[int, str]]]:
        """Return pictures of an episode, of some frames and of others spread over it: field -> (frame, data URL)."""
        episode = self.survey.recording[number]
        found = dict[str, list[tuple[int, str]]]()
        spread = np.linspace(0, episode.length - 1, NUM_PICTURES).round().astype(int).tolist()
        for name in self.survey.pictures:
            for frame in sorted({*frames, *spread}):
                if (made := self.picture(episode, name, frame)) is not None:
                    found.setdefault(name, []).append((frame, made))
        return found

    def picture(self, episode: Episode, name: str, frame: int) -> str | None:
        """Return one picture as a data URL; None if there is none, or it cannot be read."""
        if name in episode.schema and is_picture(episode.schema[name].shape) and frame < episode.length:
            with suppress(DataFileError):
                return picture(np.asarray(episode.read(name, frame, frame + 1))[0])
        return None

    def evidence(self, finding: Mapping[str, Any]) -> dict[str, Any]:
        """Draw the worst place of a finding: pictures, or curves with its frames shaded; else the field as a whole."""
        places = finding["frames"]
        numbers = finding["trajectories"]
        field = finding["field"]
        number, start, stop = places[0] if places else (numbers[0] if numbers else -1, 0, 0)
        found = dict[str, Any]()
        named = dimensions_of(finding)
        what = "the whole recording"
        columns = [one for one in self.survey.course.columns if one[0] == field and one[1] in named][: len(_DASHES)]
        is_named = bool(columns)
        if not is_named:
            columns = [one for one in self.columns if field is None or f"{one[0]}/".startswith(f"{field}/")]
        if 0 <= number < len(self.survey.table):
            found = {"trajectory": number, "ticks": self._ticks(numbers)}
            if field in self.survey.pictures:
                return {**found, "pictures": self._compared_pictures(finding, number, start)}
            frames = {0: "", 1: f"frame {start} of "}.get(stop - start, f"frames {start} to {stop - 1} of ")
            what = f"{frames}trajectory {number}"
            episode = self.survey.recording[number]
            around = max(_AROUND, stop - start) if places else episode.length
            first = max(0, start - around)
            last = min(episode.length, stop + around)
            rows = self._rows(episode, columns, first, last)
            start = start - first
            stop = stop - first
        elif field is None or not columns:
            return {}
        else:
            rows = np.stack([self.survey.course.levels[one][MEDIAN] for one in columns], 1)
        telling = range(len(columns)) if is_named else _telling(rows, start, stop)
        shown = [one for one in telling if np.isfinite(rows[:, one]).any()]
        names = [self.survey.name(columns[one]) for one in shown]
        paths = [{"d": path(rows[:, one]), "dash": dash} for one, dash in zip(shown, _DASHES, strict=False)]
        scale = WIDTH / max(1, len(rows))
        shade = {"shade_x": round(start * scale), "shade_width": round((stop - start) * scale)}
        caption = ": ".join(filter(None, [", ".join(names), what]))
        return {**found, **shade, "paths": paths, "names": names, "caption": caption}

    def _ticks(self, numbers: Sequence[int]) -> str:
        """Draw where in the recording some episodes are, as an SVG path."""
        places = {round((number + 0.5) / len(self.survey.table) * WIDTH) for number in numbers}
        return "".join(f"M{place} 0V10" for place in sorted(places))

    def _compared_pictures(self, finding: Mapping[str, Any], number: int, frame: int) -> list[dict[str, Any]]:
        concerned = {*finding["trajectories"], number}
        sound = next((other for other in range(len(self.survey.table)) if other not in concerned), number)
        made = []
        for one, at in ((number, frame), (sound, self.survey.recording[sound].length // 2)):
            url = self.picture(self.survey.recording[one], finding["field"], at)
            made += [{"url": url, "caption": f"trajectory {one}, frame {at}"}] if url else []
        return made


def path(values: Array) -> str:
    """Draw values from left to right as an SVG path, at most two points to a stretch; gaps where they are unknown."""
    points = np.concatenate(list(_stretches(values[:, None], NUM_SMALL_POINTS)), 1)
    finite = points[np.isfinite(points)]
    levels = (points.reshape(-1) - finite.min()) / np.ptp(finite) if np.ptp(finite) else 0.5 + 0 * points.reshape(-1)
    x = np.repeat((np.arange(len(points)) + 0.5) / len(points) * WIDTH, points.shape[1])
    y = HEIGHT * (0.95 - 0.9 * levels)
    drawn = ""
    pen = "M"
    for across, down in zip(x.tolist(), y.tolist(), strict=True):
        drawn += f"{pen}{across:.0f} {down:.0f}" if np.isfinite(down) else ""
        pen = "L" if np.isfinite(down) else "M"
    return drawn


def _telling(rows: Array, start: int, stop: int) -> list[int]:
    """Choose the few columns that stand out most in some rows."""
    if not rows.size:
        return []
    finite = np.where(np.isfinite(rows), rows, np.nan)
    inside = finite[start:stop] if stop > start else finite
    low, middle, high = quantiles(finite.T, (0.0, 0.5, 1.0))
    apart = np.fmax.reduce(np.abs(inside - middle)) / np.maximum(high - low, 1e-30)
    scores = np.isnan(inside).mean(0) * 9 + np.nan_to_num(apart)
    ranked = np.argsort(-scores, kind="stable")[: len(_DASHES)].tolist()
    return [place for place in ranked if scores[place] >= 0.8 * scores.max()]
