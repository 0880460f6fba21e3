"""The page: reads a recording, has it examined, chooses what fits, and writes one HTML file.

One rule: the file asks for nothing and runs only the two scripts that its policy names by their checksums.
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
from itertools import count
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
from ...sources.recording import Recording
from ..doctor.examination import diagnose
from ..doctor.rule_table import RULES
from ..doctor.scan import Collector, Scan
from . import summary
from .comparison import compared
from .embedded_data import as_json, as_visible_json, compressed, packed
from .episode_details import NUM_FINE_POINTS, NUM_POINTS, NUM_SMALL_POINTS, Closeups
from .figures import NUM_ODD, figures, frames_of, shown
from .survey import Course, Survey

#: Size of the file at most; what does not fit is left out and counted on the page.
MAX_PAGE_BYTES = 4_800_000
NUM_WORST = 60
NUM_RANDOM = 20
NUM_FINE = 20
MAX_DRAWN = 64
NUM_PICKED = 4
MAX_ROWS = 5000
#: Group of fields -> its axis in the curves of an episode.
AXES = {"observation": "y", "action": "y2", "other": "y3"}
_POLICY = (
    "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src {}; base-uri 'none'; form-action 'none'"
)


def report(
    path: DataDir,
    out: str | os.PathLike[str] | None = None,
    compare: DataDir | None = None,
    *,
    absolute_paths: bool = False,
    progress: bool = False,
) -> Path:
    """Write a page that shows a recording of any format, what the doctor found in it, and the episodes concerned.

    The page is one file below 5 MB, opens without a network, and holds the JSON of the diagnosis for scripts.

    Args:
        path: A file or folder of any format, or a `Recording`.
        out: The page, which replaces a file of that name; not inside the recording. None is a page in the working
            directory that is named after the recording: `walk.html` of `data/walk` or `data/walk.hdf5`.
        compare: Another recording to set beside it.
        absolute_paths: Let texts name the place of the recording on this machine; otherwise only its own name.
        progress: Show progress bars.

    Returns:
        The path of the page.

    Raises:
        UsageError: There is nothing at a path, or no episode; `out` lies inside a recording; a package of the extra
            `report` is missing.
        DataFileError: A recording cannot be opened.
    """
    action = "call rollout_data.report"
    absolute_paths = arguments.flag(action, "absolute_paths", absolute_paths)
    progress = arguments.flag(action, "progress", progress)
    plotly = _plotly()
    given = {"path": path} if compare is None else {"path": path, "compare": compare}
    recordings = [one if isinstance(one, Recording) else open_source(action, name, one) for name, one in given.items()]
    target = arguments.path(action, "out", _page_name(recordings[0]) if out is None else out)
    for recording in recordings:
        if not len(recording):
            raise UsageError(action, f"of {str(recording.path)!r}", "an episode at least", "none")
        if recording.path.resolve() in (target.resolve(), *target.resolve().parents):
            advice = "Write it beside the recording"
            raise UsageError(action, "", "out at a place outside of the recording", repr(str(target)), advice)
    with np.errstate(all="ignore"):  # what is not finite is drawn as unknown
        made = Page(recordings, absolute_paths, progress)
        text = made.text(*plotly)
    with replace_file(target) as new:
        new.write_bytes(text.encode())
    return target


def _page_name(recording: Recording) -> str:
    """Return the name of the page of a recording: the recording's own, without the ending of a file."""
    path = recording.path
    is_file = not isinstance(path, RemotePath) and path.is_file()
    name = path.stem if is_file else path.name
    return f"{name or 'report'}.html"


class Page:
    """What stands on the page of a recording, and perhaps of another one beside it."""

    def __init__(self, recordings: Sequence[Recording], absolute_paths: bool, progress: bool) -> None:
        self.names = [one.path.name for one in recordings]
        self._progress = progress
        hidden = [] if absolute_paths else [one.path for one in recordings]
        kinds: list[type[Collector]] = [Course, *(kind for rule in RULES for kind in rule.collectors)]
        has_pictures = any(rule.needs == "G" for rule in RULES)
        how: dict[str, Any] = {"collectors": kinds, "with_pictures": has_pictures, "progress": progress}
        scans = [Scan(one.path, one, **how) for one in recordings]
        self.diagnoses = [_without(hidden, diagnose(scan, RULES, {}).as_dict()) for scan in scans]
        for scan in scans:
            if len(scan.unreadable) == scan.num_episodes:
                cause = scan.unreadable[0][1]
                got = f"none of {scan.num_episodes:,}"
                expected = "an episode that can be read"
                raise DataFileError("report", f"of {str(scan.path)!r}", expected, got, str(cause)) from cause
        self.surveys = [Survey(scan) for scan in scans]
        self.survey = self.surveys[0]
        self.findings = self.diagnoses[0]["findings"]
        for one in self.findings:  # rows of the page are places: trajectories that opening leaves out have none
            one["trajectories"] = one["trajectories"][: len(one["trajectories"]) - len(one["left_out"])]
        self.order = summary.worst_first(self.survey, self.findings)
        self.marks = summary.marks(self.survey)
        weights = {column: len(listed) - 2 * ("constant" in listed) for column, listed in self.marks.items()}
        for one in (one for one in self.findings if one["severity"] != "info"):
            for column in {(one["field"], place) for place in summary.dimensions_of(one)} & weights.keys():
                weights[column] += 1
        self.columns = self.survey.chosen(weights, MAX_DRAWN)
        self.closeups = Closeups(self.survey, self.columns)
        self.notes: list[str] = []

    def text(self, plotly: str, checksum: str) -> str:
        """Write the page, with the compressed script that draws charts."""
        folder = resources.files(__package__)
        style, script, frame = (folder.joinpath(f"page.{end}").read_text("utf-8") for end in ("css", "js", "html"))
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
        opened = [one["trajectory"] for one in content["findings"] if one["trajectory"] is not None]
        shown, content["sheet"] = self._episodes(opened, MAX_PAGE_BYTES - used)
        content["notes"] = [{"text": note} for note in self.notes]
        parts |= {"page": as_visible_json(content), "shown": as_visible_json(shown)}
        return re.sub(r"{{(\w+)}}", lambda match: parts[match[1]], frame)

    def _content(self) -> dict[str, Any]:
        """What is shown at once."""
        survey = self.survey
        order = self.order[:MAX_ROWS]
        columns, values = summary.table(survey, self.findings, order)
        if len(order) < len(self.order):
            self.notes.append(f"The table holds the {len(order):,} worst of {len(self.order):,} episodes.")
        name = self.names[0]
        evidence = map(self.closeups.evidence, self.findings)
        views = [summary.finding_view(*one, name) for one in zip(count(), self.findings, evidence)]
        bands, fields = self._bands(views)
        findings = [one["findings"] for one in self.diagnoses]
        both = [compared(self.surveys, self.names, findings)] if len(self.surveys) > 1 else []
        made = f"{datetime.datetime.now():%Y-%m-%d %H:%M}"
        return {
            "title": name,
            "about": summary.about(survey, made),
            "cards": summary.cards(survey, self.diagnoses[0]),
            "is_sound": not self.findings,
            "findings": views,
            "figures": figures(survey),
            "fields": fields,
            "bands": bands,
            "columns": columns,
            "table": values,
            **summary.options(values, self.findings),
            "num_rows": summary.counted(len(self.order), "trajectory"),
            **self._curves(),
            "rate_hz": summary.rate_hz(survey),
            "compare": both,
            "compared": [figure for one in both for figure in one["figures"]],
        }

    def _bands(self, findings: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Pack the charts of dimensions, and say what stands at each."""
        course = self.survey.course
        views = []
        if len(self.columns) < len(course.columns):
            text = f"{len(self.columns)} of {len(course.columns)} dimensions are drawn, those of narrow fields first."
            self.notes.append(text)
        for place, column in enumerate(self.columns):
            name = self.survey.name(column)
            found = course.levels[column]
            listed = summary.marked_by(self.findings, column, name, findings)
            listed += [{"kind": "mark", "text": text} for text in self.marks.get(column, [])]
            ends = (np.fmin.reduce(found[0]), np.fmax.reduce(found[-1]))
            label = "; ".join([f"{name}: {ends[0]:.5g} to {ends[1]:.5g}", *(mark["text"] for mark in listed)])
            views.append({"title": name, "label": label, "key": f"band-{place}", "marks": listed})
        if not views:
            return [], []
        pack = packed(np.stack([course.levels[column] for column in self.columns]))
        return [{"keys": [view["key"] for view in views], "size": course.bucket_size, "pack": pack}], views

    def _curves(self) -> dict[str, Any]:
        """Name the curves of episodes, with their axes, and for actions the observations of the same name."""
        schema = self.survey.scan.schema
        curves = list[dict[str, Any]]()
        groups: dict[str, list[dict[str, str]]] = {name: [] for name in AXES}
        for field, place in self.columns:
            head, _, rest = field.partition("/")
            group = head if head in AXES else "other"
            twin = (f"observation/{rest}" if rest else "observation", place)
            has_twin = group == "action" and twin in self.columns and schema[twin[0]].shape == schema[field].shape
            name = self.survey.name((field, place))
            is_picked = len(groups[group]) < NUM_PICKED
            about = {"name": name, "label": shown(name), "axis": AXES[group], "is_picked": is_picked}
            curves.append({**about, "twin": self.columns.index(twin) if has_twin else None})
            groups[group].append({"name": name})
        which = f"those that findings open, the {NUM_WORST} worst, the {NUM_ODD} oddest and {NUM_RANDOM} random ones"
        why = f"There are curves of some trajectories ({which}), not of this one."
        offered = [{"group": group, "names": names} for group, names in groups.items() if names]
        has_twins = any(curve["twin"] is not None for curve in curves)
        return {"curves": curves, "episode": {"why": why, "groups": offered, "has_twins": has_twins}}

    def _episodes(self, opened: Sequence[int], budget: int) -> tuple[dict[int, Any], list[dict[str, Any]]]:
        """Read the episodes that findings open, the worst and some others, as many as fit; and the contact sheet."""
        worst = self.order[:NUM_WORST]
        others = self.order[NUM_WORST:]
        oddest = np.argsort(-self.survey.oddness, kind="stable")[:NUM_ODD]
        random = np.random.default_rng(0).permutation(others)[:NUM_RANDOM]
        num_points = dict.fromkeys(map(int, [*opened, *worst, *random]), NUM_POINTS)
        num_points |= dict.fromkeys(list(num_points)[:NUM_FINE], NUM_FINE_POINTS)
        chosen = list(dict.fromkeys([*num_points, *map(int, oddest)]))
        found: dict[int, Any] = {}
        for number in tqdm(chosen, desc="draw", unit=" episodes", disable=not self._progress):
            curves = self.closeups.episode_curves(number, num_points.get(number, NUM_SMALL_POINTS))
            one = {"why": "", "curves": curves, "pictures": [], **frames_of(number, self.findings, self.survey.table)}
            budget -= len(as_visible_json(one)) + len(f'"{number}":,')
            if budget < 0:
                self.notes.append(f"Curves of {len(chosen) - len(found):,} of {len(chosen):,} episodes did not fit.")
                break
            found[number] = one
        return found, self._pictures(found, budget)

    def _pictures(self, found: dict[int, Any], budget: int) -> list[dict[str, Any]]:
        """Add pictures to episodes, as many as fit; give the contact sheet."""
        sheet: dict[str, list[dict[str, Any]]] = {}
        shown = tqdm(found.items() if self.survey.pictures else (), desc="pictures", disable=not self._progress)
        for place, (number, one) in enumerate(shown):
            made = self.closeups.pictures(number, [start for start, _ in one["places"]])
            middle = {name: frames[len(frames) // 2][1] for name, frames in made.items()}
            budget -= sum(len(url) + 20 for frames in made.values() for _, url in frames) + len(as_json(middle)) + 99
            if budget < 0:
                self.notes.append(f"Pictures of {len(found) - place:,} of {len(found):,} episodes did not fit.")
                break
            one["pictures"] = [{"name": name, "frames": frames} for name, frames in made.items()]
            for name, url in middle.items():
                thumb = {"number": number, "url": url, "label": f"{name} of trajectory {number}"}
                sheet.setdefault(name, []).append(thumb)
        return [{"name": name, "thumbs": thumbs} for name, thumbs in sheet.items()]


def _without(paths: Sequence[Path], content: Any) -> Any:
    """Return plain values whose texts do not name the folders that some paths lie in."""
    text = json.dumps(content)
    for path in paths:
        folder = str(path.parent).rstrip(os.sep) + os.sep
        name = re.escape(json.dumps(path.name)[1:-1])
        pattern = re.escape(json.dumps(folder)[1:-1])
        text = re.sub(rf"(?<!\w)/(?={name}\b)" if folder == "/" else pattern, "", text)  # names of fields have "/" too
    return json.loads(text)


@lru_cache(maxsize=1)  # compressing takes half a second
def _plotly() -> tuple[str, str]:
    """Return the script of plotly, compressed, and its checksum."""
    package = optional("plotly", "plotly", "report", "the charts of the page")
    text = resources.files(package).joinpath("package_data/plotly.min.js").read_text(encoding="utf-8")
    return compressed(text.encode()), _checksum(text)


def _checksum(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
