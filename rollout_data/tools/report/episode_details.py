"""Read the curves and images of single episodes, and of the first frames of each finding.

Only episodes with curves or images on the page are read a second time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from storage.errors import DataFileError

from ...sources.recordings.episode import Episode
from .embedded_data import Array, is_picture, pack_rows, thumbnail
from .summary import dimensions_of
from .survey import MEDIAN, WHOLE, Column, Survey, quantiles

#: Number of intervals in an episode's curve, each plotted as its minimum and maximum.
NUM_POINTS = 150
#: Number of intervals in the curve of one of the worst episodes.
NUM_FINE_POINTS = 600
#: Number of intervals in the curve of a finding, or of an episode shown only as an outlier.
NUM_SMALL_POINTS = 75
#: Width of the plot of a finding, in SVG units.
WIDTH = 600
#: Height of the plot of a finding, in SVG units.
HEIGHT = 192
#: Number of evenly spaced images shown of an episode, besides the images of findings.
NUM_PICTURES = 12
#: SVG dash patterns of the curves in the plot of a finding, which has one curve per pattern.
_DASHES = ("", "5 3", "1.5 2.5")
#: Minimum number of context frames before and after the frames of a finding.
_AROUND = 25


def _extremes(values: Array, num_stretches: int) -> list[Array]:
    """Return the minimum and the maximum of each of `num_stretches` intervals of rows.

    They are NaN for an interval without finite values. If there are fewer rows than intervals, the
    list contains only the rows themselves.
    """
    finite = np.where(np.isfinite(values), values, np.nan)
    if len(values) <= num_stretches:
        return [finite]
    edges = np.linspace(0, len(values), num_stretches, endpoint=False).astype(np.int64)
    return [np.fmin.reduceat(finite, edges), np.fmax.reduceat(finite, edges)]


class Closeups:
    """Reader of the curves and images of single episodes.

    Attributes:
        survey: Facts of the recording.
        columns: Dimensions to plot as curves.
    """

    def __init__(self, survey: Survey, columns: Sequence[Column]) -> None:
        self.survey = survey
        self.columns = columns

    def episode_curves(self, number: int, num_points: int) -> dict[str, Any]:
        """Return the curves of all columns of an episode, encoded by `pack_rows`."""
        episode = self.survey.recording[number]
        rows = self._rows(episode, self.columns, 0, episode.length)
        planes = np.stack(_extremes(rows, num_points))
        return pack_rows(planes.transpose(2, 0, 1))

    def _rows(self, episode: Episode, columns: Sequence[Column], start: int, stop: int) -> Array:
        """Read columns of the frames `start:stop` of an episode: float64 `[stop - start, columns]`.

        The column for all dimensions of a field has their median. Unreadable values are NaN.
        """
        rows = np.full((stop - start, len(columns)), np.nan)
        fields: dict[str, Array] = {}
        for place, (name, dimension) in enumerate(columns):
            if name not in fields:
                fields[name] = _read_flat(episode, name, start, stop)
            values = fields[name]
            if dimension >= values.shape[1]:
                continue
            rows[:, place] = np.median(values, 1) if dimension == WHOLE else values[:, dimension]
        return rows

    def pictures(self, number: int, frames: Sequence[int]) -> dict[str, list[tuple[int, str]]]:
        """Return images of an episode by field, each as (frame, data URL), in ascending order.

        Args:
            number: Index of the episode.
            frames: Frames to show in addition to `NUM_PICTURES` evenly spread frames.
        """
        episode = self.survey.recording[number]
        spread = np.linspace(0, episode.length - 1, NUM_PICTURES).round().astype(int).tolist()
        pictures: dict[str, list[tuple[int, str]]] = {}
        for name in self.survey.pictures:
            for frame in sorted({*frames, *spread}):
                url = self.picture(episode, name, frame)
                if url is not None:
                    pictures.setdefault(name, []).append((frame, url))
        return pictures

    def picture(self, episode: Episode, name: str, frame: int) -> str | None:
        """Return one frame of an image field as a data URL; None if it is missing or unreadable."""
        if name not in episode.schema or frame >= episode.length:
            return None
        if not is_picture(episode.schema[name].shape):
            return None
        with suppress(DataFileError):
            return thumbnail(np.asarray(episode.read(name, frame, frame + 1))[0])
        return None

    def evidence(self, finding: Mapping[str, Any]) -> dict[str, Any]:
        """Return the plot, or the images, of the first frames of a finding.

        Frames of the finding are shaded in the plot. If a finding has no episode, the curves are
        the medians of its field over the whole recording.
        """
        field = finding["field"]
        named_columns = self._named_columns(finding)
        columns = named_columns or self._columns_of(field)
        number, start, stop = _worst_place(finding)

        drawing: dict[str, Any] = {}
        if 0 <= number < len(self.survey.table):
            drawing["trajectory"] = number
            drawing["ticks"] = self._ticks(finding["trajectories"])
            if field in self.survey.pictures:
                drawing["pictures"] = self._compared_pictures(finding, number, start)
                return drawing
            subject = f"{_frames_text(start, stop)}trajectory {number}"
            episode = self.survey.recording[number]
            around = max(_AROUND, stop - start) if finding["frames"] else episode.length
            first = max(0, start - around)
            last = min(episode.length, stop + around)
            rows = self._rows(episode, columns, first, last)
            start -= first
            stop -= first
        elif field is None or not columns:
            return {}
        else:
            subject = "the whole recording"
            rows = np.stack([self.survey.course.levels[column][MEDIAN] for column in columns], 1)

        places = range(len(columns)) if named_columns else _salient_places(rows, start, stop)
        places = [place for place in places if np.isfinite(rows[:, place]).any()]
        names = [self.survey.name(columns[place]) for place in places]
        scale = WIDTH / max(1, len(rows))
        drawing["shade_x"] = round(start * scale)
        drawing["shade_width"] = round((stop - start) * scale)
        drawing["paths"] = []
        for place, dash in zip(places, _DASHES, strict=False):
            drawing["paths"].append({"d": svg_path(rows[:, place]), "dash": dash})
        drawing["names"] = names
        drawing["caption"] = f"{', '.join(names)}: {subject}" if names else subject
        return drawing

    def _named_columns(self, finding: Mapping[str, Any]) -> list[Column]:
        """Return the columns that a finding names. There are at most as many as line styles."""
        dimensions = dimensions_of(finding)
        columns = []
        for name, dimension in self.survey.course.columns:
            if name == finding["field"] and dimension in dimensions:
                columns.append((name, dimension))
        return columns[: len(_DASHES)]

    def _columns_of(self, field: str | None) -> list[Column]:
        """Return the plotted columns of a field and its components; all columns if it is None."""
        if field is None:
            return list(self.columns)
        return [column for column in self.columns if f"{column[0]}/".startswith(f"{field}/")]

    def _ticks(self, numbers: Sequence[int]) -> str:
        """Return an SVG path with a tick for each episode, at its position in the recording."""
        scale = len(self.survey.table)
        places = {round((number + 0.5) / scale * WIDTH) for number in numbers}
        return "".join(f"M{place} 0V10" for place in sorted(places))

    def _compared_pictures(
        self,
        finding: Mapping[str, Any],
        number: int,
        frame: int,
    ) -> list[dict[str, Any]]:
        """Return an image of a finding, and an image of an episode without the finding."""
        concerned = {*finding["trajectories"], number}
        others = (other for other in range(len(self.survey.table)) if other not in concerned)
        other = next(others, number)
        middle = self.survey.recording[other].length // 2

        pictures = []
        for shown_number, shown_frame in ((number, frame), (other, middle)):
            episode = self.survey.recording[shown_number]
            url = self.picture(episode, finding["field"], shown_frame)
            if url:
                caption = f"trajectory {shown_number}, frame {shown_frame}"
                pictures.append({"url": url, "caption": caption})
        return pictures


def _read_flat(episode: Episode, name: str, start: int, stop: int) -> Array:
    """Read frames of a field as `[stop - start, D]`, where D is 0 for an unreadable field."""
    with suppress(DataFileError):  # The doctor reports unreadable episodes.
        if name in episode.schema:
            return np.asarray(episode.read(name, start, stop)).reshape(stop - start, -1)
    return np.empty((stop - start, 0))


def _worst_place(finding: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return `(episode, start, stop)` of the first frames of a finding, or `(-1, 0, 0)`."""
    if finding["frames"]:
        number, start, stop = finding["frames"][0]
        return number, start, stop
    if finding["trajectories"]:
        return finding["trajectories"][0], 0, 0
    return -1, 0, 0


def _frames_text(start: int, stop: int) -> str:
    if stop - start == 0:
        return ""
    if stop - start == 1:
        return f"frame {start} of "
    return f"frames {start} to {stop - 1} of "


def svg_path(values: Array) -> str:
    """Plot values from left to right as an SVG path, with gaps at NaN and infinite values."""
    points = np.concatenate(list(_extremes(values[:, None], NUM_SMALL_POINTS)), 1)
    finite = points[np.isfinite(points)]
    levels = points.reshape(-1)
    if np.ptp(finite):
        levels = (levels - finite.min()) / np.ptp(finite)
    else:
        levels = 0.5 + 0 * levels  # The product is NaN for unknown values.
    centers = (np.arange(len(points)) + 0.5) / len(points) * WIDTH
    x = np.repeat(centers, points.shape[1])
    y = HEIGHT * (0.95 - 0.9 * levels)

    path = ""
    command = "M"
    for right, down in zip(x.tolist(), y.tolist(), strict=True):
        if not np.isfinite(down):
            command = "M"
            continue
        path += f"{command}{right:.0f} {down:.0f}"
        command = "L"
    return path


def _salient_places(rows: Array, start: int, stop: int) -> list[int]:
    """Return the indices of the columns whose values in `start:stop` differ most from the median.

    Columns with NaN or infinities rank first. The result has at most one column per dash pattern.
    """
    if not rows.size:
        return []
    finite = np.where(np.isfinite(rows), rows, np.nan)
    inside = finite[start:stop] if stop > start else finite
    low, median, high = quantiles(finite.T, (0.0, 0.5, 1.0))
    deviations = np.fmax.reduce(np.abs(inside - median)) / np.maximum(high - low, 1e-30)
    scores = np.isnan(inside).mean(0) * 9 + np.nan_to_num(deviations)
    ranked = np.argsort(-scores, kind="stable")[: len(_DASHES)].tolist()
    return [place for place in ranked if scores[place] >= 0.8 * scores.max()]
