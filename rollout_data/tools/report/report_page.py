"""`report`: examine a recording and write an HTML page about it.

The page loads no other files. Its content security policy allows only its own two scripts.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import html
import json
import os
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from storage.core import arguments
from storage.core.durable_files import replace_file
from storage.errors import DataFileError, UsageError

from ...formats.input_checks import optional
from ...formats.open_recording import open_source
from ...remote.locations import DataDir, RemotePath
from ...sources.recordings.recording import Recording
from ..doctor.examination import diagnose
from ..doctor.rule_table import RULES
from ..doctor.scan import Collector, Scan
from . import summary
from .comparison import compare_surveys
from .embedded_data import as_json, as_visible_json, compress, pack_rows
from .episode_details import NUM_FINE_POINTS, NUM_POINTS, NUM_SMALL_POINTS, Closeups
from .figures import NUM_ODD, episode_marks, figures, plotly_text
from .survey import Column, Course, Survey

#: Maximum bytes of the page. Episodes that do not fit are left out and counted on the page.
MAX_PAGE_BYTES = 4_800_000
#: Number of worst episodes whose curves are on the page.
NUM_WORST = 60
#: Number of random episodes whose curves are on the page, in addition to the worst episodes.
NUM_RANDOM = 20
#: Number of episodes whose curves have the higher resolution `NUM_FINE_POINTS`.
NUM_FINE = 20
#: Maximum number of dimensions that get a chart.
MAX_DRAWN = 64
#: Number of curves per group (observation, action, other) that are visible at first.
NUM_PICKED = 4
#: Maximum number of rows in the table of episodes.
MAX_ROWS = 5000
#: plotly axis of each group of fields in the plot of an episode.
AXES = {"observation": "y", "action": "y2", "other": "y3"}
#: Content security policy. The checksums of the scripts are inserted at `{}`.
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "img-src data:",
        "style-src 'unsafe-inline'",
        "script-src {}",
        "base-uri 'none'",
        "form-action 'none'",
    )
)


def report(
    path: DataDir,
    out: str | os.PathLike[str] | None = None,
    compare: DataDir | None = None,
    *,
    absolute_paths: bool = False,
    progress: bool = False,
) -> Path:
    """Write an HTML page about the data, the findings and the episodes of a recording.

    The page is one file below 5 MB and opens without a network. It contains the JSON of the
    diagnosis for scripts.

    Args:
        path: A file or folder of any format, or a `Recording`.
        out: Path of the page, outside of the recording. An existing file is replaced. None writes
            the page to the working directory, named after the recording: `walk.html` for
            `data/walk` or `data/walk.hdf5`.
        compare: A second recording, which the page compares with the first one.
        absolute_paths: Show the full path of the recording. By default only its last part is shown.
        progress: Show progress bars.

    Returns:
        Path of the page.

    Raises:
        UsageError: A path does not exist, or a recording has no episode. `out` is inside a
            recording. A package of the extra `report` is missing.
        DataFileError: A recording cannot be opened.
    """
    absolute_paths = arguments.flag("absolute_paths", absolute_paths)
    progress = arguments.flag("progress", progress)
    plotly = _plotly()
    recordings = [_opened("path", path)]
    if compare is not None:
        recordings.append(_opened("compare", compare))
    target = arguments.path("out", _page_name(recordings[0]) if out is None else out)
    for recording in recordings:
        _check_recording(recording, target)

    with np.errstate(all="ignore"):  # Charts have gaps at NaN and infinite results.
        page = Page(recordings, absolute_paths, progress)
        text = page.text(*plotly)
    with replace_file(target) as new_file:
        new_file.write_bytes(text.encode())
    return target


def _opened(argument: str, path: DataDir) -> Recording:
    return path if isinstance(path, Recording) else open_source(argument, path)


def _page_name(recording: Recording) -> str:
    """Return the default file name of the page: the name of the recording and ".html"."""
    path = recording.path
    is_file = not isinstance(path, RemotePath) and path.is_file()
    name = path.stem if is_file else path.name
    return f"{name or 'report'}.html"


def _check_recording(recording: Recording, target: Path) -> None:
    """Raise `UsageError` if a recording has no episode, or if `target` is inside of it."""
    if not len(recording):
        raise UsageError(f"{str(recording.path)!r} has no episodes to report.")
    if recording.path.resolve() in (target.resolve(), *target.resolve().parents):
        raise UsageError(
            f"out is {str(target)!r}, which lies in the recording. Choose a path outside of it."
        )


class Page:
    """Content of the page about a recording, with an optional comparison.

    Attributes:
        names: Name of each recording on the page.
        diagnoses: Diagnosis of each recording, as in `Diagnosis.as_dict`.
        surveys: Facts of each recording.
        survey: Facts of the first recording, the subject of the page.
        findings: Findings of the first recording.
        order: Indices of the episodes, int64 `[num_episodes]`, the worst episode first.
        marks: Map from column to the labels of its chart, such as "constant".
        columns: Dimensions that get a chart.
        closeups: Reader of the curves and images of episodes.
        notes: Sentences about data that the page omits.
    """

    def __init__(
        self,
        recordings: Sequence[Recording],
        absolute_paths: bool,
        progress: bool,
    ) -> None:
        self.names = [recording.path.name for recording in recordings]
        self._progress = progress
        scans = [_scan(recording, progress) for recording in recordings]
        hidden = [] if absolute_paths else [recording.path for recording in recordings]
        self.diagnoses = [_without(hidden, diagnose(scan, RULES, {}).as_dict()) for scan in scans]
        for scan in scans:
            _check_readable(scan)
        self.surveys = [Survey(scan) for scan in scans]
        self.survey = self.surveys[0]
        self.findings = self.diagnoses[0]["findings"]
        for finding in self.findings:
            # Remove the damaged trajectories that are not in the opened recording. The page has no
            # row for them.
            num_shown = len(finding["trajectories"]) - len(finding["left_out"])
            finding["trajectories"] = finding["trajectories"][:num_shown]
        self.order = summary.worst_first(self.survey, self.findings)
        self.marks = summary.marks(self.survey)
        self.columns = self.survey.most_important(self._weights(), MAX_DRAWN)
        self.closeups = Closeups(self.survey, self.columns)
        self.notes: list[str] = []

    def _weights(self) -> dict[Column, int]:
        """Return the importance of the chart of each dimension.

        It is the number of labels and findings of the dimension. Constant dimensions are the least
        important.
        """
        weights: dict[Column, int] = {}
        for column, texts in self.marks.items():
            weights[column] = len(texts) - 2 * ("constant" in texts)
        for finding in self.findings:
            if finding["severity"] == "info":
                continue
            for dimension in summary.dimensions_of(finding):
                column = (finding["field"], dimension)
                if column in weights:
                    weights[column] += 1
        return weights

    def text(self, plotly: str, checksum: str) -> str:
        """Build the HTML text of the page.

        Args:
            plotly: Script of plotly, compressed by `compress`.
            checksum: Checksum of the plotly script in the content security policy.
        """
        folder = resources.files(__package__)
        style = folder.joinpath("page.css").read_text("utf-8")
        script = folder.joinpath("page.js").read_text("utf-8")
        frame = folder.joinpath("page.html").read_text("utf-8")
        content = self._content()
        parts = {
            "title": html.escape(f"{self.names[0]}: report"),
            "style": style,
            "script": script,
            "policy": _POLICY.format(f"{_checksum(script)} {checksum}"),
            "plotly": plotly,
            "diagnosis": as_json(self.diagnoses[0]),
        }
        used = len(frame) + sum(map(len, parts.values())) + len(as_visible_json(content))

        views = content["findings"]
        opened = [view["trajectory"] for view in views if view["trajectory"] is not None]
        episodes, sheet = self._episodes(opened, MAX_PAGE_BYTES - used)
        content["sheet"] = sheet
        content["notes"] = [{"text": note} for note in self.notes]
        parts["page"] = as_visible_json(content)
        parts["shown"] = as_visible_json(episodes)
        return re.sub(r"{{(\w+)}}", lambda match: parts[match[1]], frame)

    def _content(self) -> dict[str, Any]:
        """Return the content of the page, except the curves and images of single episodes."""
        survey = self.survey
        order = self.order[:MAX_ROWS]
        columns, values = summary.table(survey, self.findings, order)
        if len(order) < len(self.order):
            shown = f"{len(order):,} worst of {len(self.order):,} episodes"
            self.notes.append(f"The table holds the {shown}.")
        name = self.names[0]
        views = []
        for place, finding in enumerate(self.findings):
            evidence = self.closeups.evidence(finding)
            views.append(summary.finding_view(place, finding, evidence, name))
        bands, fields = self._bands(views)
        comparisons = []
        if len(self.surveys) > 1:
            findings = [diagnosis["findings"] for diagnosis in self.diagnoses]
            comparisons.append(compare_surveys(self.surveys, self.names, findings))
        page_time = f"{datetime.datetime.now():%Y-%m-%d %H:%M}"
        return {
            "title": name,
            "about": summary.head(survey, page_time),
            "cards": summary.cards(survey, self.diagnoses[0]),
            "is_sound": not self.findings,
            "findings": views,
            "figures": figures(survey),
            "fields": fields,
            "bands": bands,
            "columns": columns,
            "table": values,
            **summary.options(values, self.findings),
            "num_rows": summary.count_text(len(self.order), "trajectory"),
            **self._curves(),
            "rate_hz": summary.rate_hz(survey),
            "compare": comparisons,
            "compared": comparisons[0]["figures"] if comparisons else [],
        }

    def _bands(
        self,
        findings: Sequence[Mapping[str, Any]],
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Build the charts of dimensions, which show value ranges over the course of the recording.

        Args:
            findings: Contents of the findings on the page; see `summary.finding_view`.

        Returns:
            The encoded values of all charts, as a list of at most one entry, and the title and the
            labels of each chart.
        """
        course = self.survey.course
        if len(self.columns) < len(course.columns):
            counts = f"{len(self.columns)} of {len(course.columns)} dimensions"
            self.notes.append(f"{counts} are drawn, those of narrow fields first.")
        if not self.columns:
            return [], []

        views = []
        for place, column in enumerate(self.columns):
            name = self.survey.name(column)
            listed = summary.finding_marks(self.findings, column, name, findings)
            listed += [{"kind": "mark", "text": text} for text in self.marks.get(column, [])]
            levels = course.levels[column]
            low = np.fmin.reduce(levels[0])
            high = np.fmax.reduce(levels[-1])
            texts = [f"{name}: {low:.5g} to {high:.5g}", *(mark["text"] for mark in listed)]
            key = f"band-{place}"
            views.append({"title": name, "label": "; ".join(texts), "key": key, "marks": listed})
        pack = pack_rows(np.stack([course.levels[column] for column in self.columns]))
        keys = [view["key"] for view in views]
        return [{"keys": keys, "size": course.bucket_size, "pack": pack}], views

    def _curves(self) -> dict[str, Any]:
        """Describe the curves that the page draws for a single episode, as values for `page.js`.

        A curve of an action may have a twin: the same dimension of the observation with the same
        name and shape. The page can draw both over each other.
        """
        curves = list[dict[str, Any]]()
        groups: dict[str, list[dict[str, str]]] = {name: [] for name in AXES}
        for column in self.columns:
            head = column[0].partition("/")[0]
            group = head if head in AXES else "other"
            name = self.survey.name(column)
            curve = {
                "name": name,
                "label": plotly_text(name),
                "axis": AXES[group],
                "is_picked": len(groups[group]) < NUM_PICKED,
                "twin": self._twin_of(column),
            }
            curves.append(curve)
            groups[group].append({"name": name})

        which = f"the {NUM_WORST} worst, the {NUM_ODD} oddest and {NUM_RANDOM} random ones"
        some = f"some trajectories (those that findings open, {which})"
        choices = [{"group": group, "names": names} for group, names in groups.items() if names]
        episode = {
            "why": f"There are curves of {some}, not of this one.",
            "groups": choices,
            "has_twins": any(curve["twin"] is not None for curve in curves),
        }
        return {"curves": curves, "episode": episode}

    def _twin_of(self, column: Column) -> int | None:
        """Find the observation that the page can draw over the curve of an action.

        Returns its index in `columns`; None if no observation has the same name and shape.
        """
        field, dimension = column
        head, _, rest = field.partition("/")
        twin_field = f"observation/{rest}" if rest else "observation"
        twin = (twin_field, dimension)
        if head != "action" or twin not in self.columns:
            return None
        schema = self.survey.scan.schema
        if schema[twin_field].shape != schema[field].shape:
            return None
        return self.columns.index(twin)

    def _episodes(
        self,
        opened: Sequence[int],
        budget: int,
    ) -> tuple[dict[int, Any], list[dict[str, Any]]]:
        """Read the curves and images of the episodes that the page shows in detail.

        These are the episodes to which findings link, the worst, some random and the oddest ones.

        Args:
            opened: Episodes to which findings link. They are read first.
            budget: Maximum number of bytes of JSON. Episodes that do not fit are left out.

        Returns:
            The content of each episode, by episode index, and the contact sheet: for each image
            field a thumbnail of each episode.
        """
        num_points = self._points_of_episodes(opened)
        episodes: dict[int, Any] = {}
        progress = tqdm(num_points, desc="draw", unit=" episodes", disable=not self._progress)
        for number in progress:
            episode = {
                "why": "",
                "curves": self.closeups.episode_curves(number, num_points[number]),
                "pictures": [],
                **episode_marks(number, self.findings, self.survey.table),
            }
            budget -= len(as_visible_json(episode)) + len(f'"{number}":,')
            if budget < 0:
                num_left = len(num_points) - len(episodes)
                counts = f"{num_left:,} of {len(num_points):,} episodes"
                self.notes.append(f"Curves of {counts} did not fit.")
                break
            episodes[number] = episode
        return episodes, self._pictures(episodes, budget)

    def _points_of_episodes(self, opened: Sequence[int]) -> dict[int, int]:
        """Choose the episodes that the page shows in detail, and the resolution of their curves.

        Returns a map from episode index to the number of points of a curve, in the order of reading.
        """
        worst = self.order[:NUM_WORST]
        random = np.random.default_rng(0).permutation(self.order[NUM_WORST:])[:NUM_RANDOM]
        oddest = np.argsort(-self.survey.oddness, kind="stable")[:NUM_ODD]
        num_points = dict.fromkeys(map(int, [*opened, *worst, *random]), NUM_POINTS)
        for number in list(num_points)[:NUM_FINE]:
            num_points[number] = NUM_FINE_POINTS
        for number in oddest.tolist():
            num_points.setdefault(number, NUM_SMALL_POINTS)
        return num_points

    def _pictures(self, episodes: dict[int, Any], budget: int) -> list[dict[str, Any]]:
        """Add images to episodes until `budget` bytes are used.

        Returns the contact sheet: for each image field a thumbnail of each episode.

        Args:
            episodes: Content of each episode, by episode index. It is changed in place.
            budget: Maximum number of bytes of JSON.
        """
        if not self.survey.pictures:
            return []
        thumbs: dict[str, list[dict[str, Any]]] = {}
        progress = tqdm(episodes.items(), desc="pictures", disable=not self._progress)
        for place, (number, episode) in enumerate(progress):
            frames = [start for start, _ in episode["places"]]
            pictures = self.closeups.pictures(number, frames)
            middle = {name: shown[len(shown) // 2][1] for name, shown in pictures.items()}
            num_bytes = sum(len(url) + 20 for shown in pictures.values() for _, url in shown)
            budget -= num_bytes + len(as_json(middle)) + 99
            if budget < 0:
                counts = f"{len(episodes) - place:,} of {len(episodes):,} episodes"
                self.notes.append(f"Pictures of {counts} did not fit.")
                break
            for name, shown in pictures.items():
                episode["pictures"].append({"name": name, "frames": shown})
            for name, url in middle.items():
                label = f"{name} of trajectory {number}"
                thumb = {"number": number, "url": url, "label": label}
                thumbs.setdefault(name, []).append(thumb)
        return [{"name": name, "thumbs": listed} for name, listed in thumbs.items()]


def _scan(recording: Recording, progress: bool) -> Scan:
    """Create a scan for all rules and for the page. It reads no data yet."""
    collectors: list[type[Collector]] = [Course]
    for rule in RULES:
        collectors += rule.collectors
    return Scan(
        recording.path,
        recording,
        collectors=collectors,
        with_pictures=any(rule.needs == "G" for rule in RULES),
        progress=progress,
    )


def _check_readable(scan: Scan) -> None:
    """Raise `DataFileError` if all episodes are unreadable."""
    if len(scan.unreadable) < scan.num_episodes:
        return
    cause = scan.unreadable[0][1]
    raise DataFileError(
        f"{str(scan.path)!r} has {scan.num_episodes:,} episodes, and none is readable. {cause}"
    ) from cause


def _without(paths: Sequence[Path], content: Any) -> Any:
    """Remove the parent folders of `paths` from all texts in a JSON value.

    So the page does not reveal where a recording is stored.
    """
    text = json.dumps(content)
    for path in paths:
        folder = str(path.parent).rstrip(os.sep) + os.sep
        pattern = re.escape(json.dumps(folder)[1:-1])
        if folder == "/":
            # Field names contain "/" too. So remove it only before the name of the recording.
            name = re.escape(json.dumps(path.name)[1:-1])
            pattern = rf"(?<!\w)/(?={name}\b)"
        text = re.sub(pattern, "", text)
    return json.loads(text)


@lru_cache(maxsize=1)  # Compression takes half a second.
def _plotly() -> tuple[str, str]:
    """Return the compressed script of plotly, and the checksum of the script."""
    package = optional("plotly", "plotly", "report", "the charts of the page")
    text = resources.files(package).joinpath("package_data/plotly.min.js").read_text("utf-8")
    return compress(text.encode()), _checksum(text)


def _checksum(script: str) -> str:
    """Return the SHA-256 checksum of a script, as written in a content security policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
