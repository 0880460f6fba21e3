"""Read the curves and images of single episodes, and of the first frames of each finding.

The episodes that the page shows are read a second time, after the doctor has read all data. Here, a
column is a dimension of a field; see `survey.Column`.
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
#: SVG dash patterns of the curves in the plot of a finding. A plot has at most one curve for each.
_DASHES = ("", "5 3", "1.5 2.5")
#: Minimum number of frames in the plot of a finding before and after the frames of the finding.
_AROUND = 25


def _extremes(values: Array, num_intervals: int) -> list[Array]:
    """Divide the rows of a curve into intervals, and compute the extremes of each interval.

    Returns:
        Two arrays, the minima and the maxima, `[num_intervals, columns]` each. They are NaN for an
        interval without finite values. If there are no more rows than intervals, the list contains
        a single array: the rows, with NaN for infinite values.
    """
    finite = np.where(np.isfinite(values), values, np.nan)
    if len(values) <= num_intervals:
        return [finite]
    edges = np.linspace(0, len(values), num_intervals, endpoint=False).astype(np.int64)
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
        """Return the curves of all `columns` in an episode, encoded by `pack_rows`.

        A curve is divided into at most `num_points` intervals.
        """
        episode = self.survey.recording[number]
        rows = self._rows(episode, self.columns, 0, episode.length)
        planes = np.stack(_extremes(rows, num_points))
        return pack_rows(planes.transpose(2, 0, 1))

    def _rows(self, episode: Episode, columns: Sequence[Column], start: int, stop: int) -> Array:
        """Read columns of the frames `start:stop` of an episode: float64 `[stop - start, columns]`.

        Values that cannot be read are NaN. A column with the index `WHOLE` represents all
        dimensions of its field, so it gets their median.
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
        """Return images of an episode for each image field, as pairs (frame, data URL).

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
        """Return the image of a field in one frame as a data URL.

        Returns None if the image is missing or unreadable.
        """
        if name not in episode.schema or frame >= episode.length:
            return None
        if not is_picture(episode.schema[name].shape):
            return None
        with suppress(DataFileError):
            return thumbnail(np.asarray(episode.read(name, frame, frame + 1))[0])
        return None

    def evidence(self, finding: Mapping[str, Any]) -> dict[str, Any]:
        """Return the plot or the images that show a finding, as values for the template.

        The plot has curves of the first frame range of the finding, which is shaded. If the
        finding names no episode, the curves are the medians over the course of the recording. A
        finding about an image field has images instead. The result is {} if there is nothing to
        show.
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
        """Return the dimensions that the evidence of a finding names, to plot them as curves.

        Curves of a plot differ by their dash pattern, so there is at most one for each pattern.
        """
        dimensions = dimensions_of(finding)
        columns = []
        for name, dimension in self.survey.course.columns:
            if name == finding["field"] and dimension in dimensions:
                columns.append((name, dimension))
        return columns[: len(_DASHES)]

    def _columns_of(self, field: str | None) -> list[Column]:
        """Return the dimensions of a field and its components, to plot them as curves.

        If `field` is None, all dimensions are returned.
        """
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
    """Read frames of a field as `[stop - start, D]`.

    D is 0 if the field cannot be read or the episode does not have it.
    """
    with suppress(DataFileError):  # The page already has a finding about unreadable episodes.
        if name in episode.schema:
            return np.asarray(episode.read(name, start, stop)).reshape(stop - start, -1)
    return np.empty((stop - start, 0))


def _worst_place(finding: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return the first frame range of a finding as (episode, start, stop).

    Without frames, the range (0, 0) of its first episode is returned. Without episodes, the result
    is (-1, 0, 0).
    """
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
        # A constant curve is drawn in the middle, and keeps its gaps.
        levels = np.where(np.isfinite(levels), 0.5, np.nan)
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
    """Choose the columns of `rows` that show a finding in the frames `start:stop` best.

    These are the columns whose values in these frames differ most from their median over all rows,
    relative to their range. Columns with NaN or infinite values in these frames come first. Returns
    the indices of at most one column for each dash pattern.
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
