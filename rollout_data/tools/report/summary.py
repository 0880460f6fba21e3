"""Build the head, cards, findings and table of the page as plain values for its templates.

Numbers and rule codes are copied from the diagnosis. This module formats them as text.
"""

from __future__ import annotations

import json
import math
import os
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..doctor.batched_reading import Array
from ..doctor.provenance import masked
from .embedded_data import digits
from .survey import WHOLE, Column, Survey

#: Symbol of each severity on the page, the worst severity first.
SIGNS = {"error": "●", "warning": "▲", "info": "○"}
#: Text on the first card for the worst severity of the findings.
_VERDICTS = {
    "error": "● Not as it is",
    "warning": "▲ With care",
    "info": "○ Yes",
    "good": "✓ Yes",
}
#: Keys of the metadata that the head of the page shows, if they exist.
_CONTEXT = (
    "env", "env_id", "env_name", "robot_type", "policy", "version", "frame_rate_hz", "fps", "date",
)  # fmt: skip
#: Weight of a finding in the order of episodes, by severity. An outlier score weighs at most 500, so
#: that it never outweighs a warning.
_WEIGHT = {"error": 1e6, "warning": 1e3, "info": 0.0}
#: Maximum number of characters of a metadata value in the head.
_MAX_TEXT = 120
#: Fraction of values at the minimum or maximum above which a chart is labelled "at a limit".
_MIN_AT_LIMIT = 0.05
#: Units of sizes in bytes, the largest first.
_SIZES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))
#: Units of durations in seconds, the largest first.
_TIMES = ((3600.0, "h"), (60.0, "min"), (1.0, "s"))
Findings = Sequence[Mapping[str, Any]]


def rate_hz(survey: Survey) -> float | None:
    """Return the frame rate in the metadata; None if it is missing or not positive."""
    metadata = survey.recording.metadata
    rate = metadata.get("frame_rate_hz", metadata.get("fps"))
    if isinstance(rate, (int, float)) and 0 < rate < math.inf:
        return float(rate)
    return None


def count_text(number: int, word: str) -> str:
    """Format a count with a noun in singular or plural: "1 trajectory", "2 trajectories"."""
    if number == 1 or word == "info":
        return f"{number:,} {word}"
    if word.endswith("y"):
        return f"{number:,} {word[:-1]}ies"
    return f"{number:,} {word}s"


def head(survey: Survey, page_time: str) -> list[dict[str, str]]:
    """Return the entries in the head of the page: metadata as names and values, without secrets.

    Args:
        survey: Facts of the recording.
        page_time: Date and time of writing the page.
    """
    metadata = survey.recording.metadata
    times = survey.table["time"][~np.isnat(survey.table["time"])]
    values: dict[str, Any] = {
        "format": survey.recording.format,
        "recorded": str(times.max())[:16].replace("T", " ") if len(times) else None,
    }
    for name in _CONTEXT:
        values[name.replace("_", " ")] = metadata.get(name)
    values["page made"] = page_time

    entries = []
    for name, value in values.items():
        if value is None or value == "":
            continue
        text = value if isinstance(value, str) else json.dumps(value, default=str)
        entries.append({"name": name, "value": masked(text, name)[:_MAX_TEXT]})
    return entries


def cards(survey: Survey, diagnosis: Mapping[str, Any]) -> list[dict[str, str]]:
    """Build the cards at the top of the page.

    They show the verdict, counts, size, ends, the fraction of frames without errors or warnings,
    and skipped rules.
    """
    ends = Counter(survey.table["ends"].tolist())
    ends_text = ", ".join(f"{count:,} {name}" for name, count in ends.most_common())
    untouched = math.floor(1000 * _untouched_share(survey, diagnosis["findings"])) / 10
    return [
        _verdict_card(diagnosis["findings"]),
        _card("card", "trajectories", f"{len(survey.table):,}", _lengths_text(survey)),
        _card("card", "frames", f"{survey.num_frames:,}", _duration_text(survey)),
        _size_card(survey),
        _card("card", "ends", ends_text, ""),
        _card(
            "card",
            "frames untouched",
            f"{untouched}%",
            "no error or warning in their trajectories",
        ),
        _skipped_card(diagnosis["skipped"]),
    ]


def _card(css_class: str, label: str, value: str, note: str) -> dict[str, str]:
    return {"kind": css_class, "label": label, "value": value, "note": note}


def _verdict_card(findings: Findings) -> dict[str, str]:
    counts = Counter(finding["severity"] for finding in findings)
    present = [severity for severity in SIGNS if counts[severity]]
    worst = present[0] if present else "good"
    texts = [f"{SIGNS[word]} {count_text(counts[word], word)}" for word in present]
    note = ", ".join(texts) or "no rule found anything"
    return _card(f"card verdict {worst}", "May I train on this?", _VERDICTS[worst], note)


def _lengths_text(survey: Survey) -> str:
    lengths = survey.table["length"]
    low, median, high = (f"{value:,.0f}" for value in np.quantile(lengths, (0, 0.5, 1)))
    if low == high:
        return f"{count_text(int(lengths[0]), 'frame')} each"
    return f"{low} to {high} frames, median {median}"


def _duration_text(survey: Survey) -> str:
    rate = rate_hz(survey)
    if rate is None:
        return "rate unknown"
    return f"{_scaled(survey.num_frames / rate, _TIMES)} at {rate:g} Hz"


def _size_card(survey: Survey) -> dict[str, str]:
    row_bytes = sum(field.row_bytes for field in survey.recording.schema.values())
    raw = survey.num_frames * row_bytes
    stored = stored_bytes(survey.recording.path)
    share = stored / max(1, raw)
    note = f"{share:.0%} of the values uncompressed ({_scaled(raw, _SIZES)})"
    return _card("card", "size", _scaled(stored, _SIZES), note)


def _untouched_share(survey: Survey, findings: Findings) -> float:
    """Return the fraction of frames in trajectories without an error or warning."""
    touched: set[int] = set()
    for finding in findings:
        if finding["severity"] != "info":
            touched.update(finding["trajectories"])
    num_touched = int(survey.table["length"][sorted(touched)].sum())
    return 1 - num_touched / survey.num_frames


def _skipped_card(skipped: Findings) -> dict[str, str]:
    codes_by_reason: dict[str, list[str]] = {}
    for rule in skipped:
        codes_by_reason.setdefault(rule["why"], []).append(rule["code"])
    texts = [f"{reason} ({', '.join(codes)})" for reason, codes in codes_by_reason.items()]
    return _card("card skipped", "rules skipped", str(len(skipped)), "; ".join(texts))


def stored_bytes(path: Any) -> int:
    """Return the size of a local file or folder in bytes; 0 for a URL."""
    if os.path.isfile(path):
        return os.path.getsize(path)
    num_bytes = 0
    for folder, _, names in os.walk(path):
        num_bytes += sum(os.path.getsize(os.path.join(folder, name)) for name in names)
    return num_bytes


def _scaled(value: float, units: Sequence[tuple[float, str]]) -> str:
    """Format a value with a unit: the largest unit that does not exceed it, else the smallest."""
    reached = [unit for unit in units if value >= unit[0]]
    size, name = reached[0] if reached else units[-1]
    if value >= 100 * size:
        return f"{value / size:,.0f} {name}"
    return f"{value / size:.3g} {name}"


def finding_view(
    place: int,
    finding: Mapping[str, Any],
    evidence: Mapping[str, Any],
    name: str,
) -> dict[str, Any]:
    """Return the content of a finding on the page, as values for its template.

    Args:
        place: Index of the finding in the list of findings.
        finding: Finding as in `Diagnosis.as_dict`.
        evidence: Plot or images, as in `Closeups.evidence`. Its entries are added to the content.
        name: Name of the recording.
    """
    severity = finding["severity"]
    code = finding["code"]
    numbers = finding["trajectories"]
    field = f" · {finding['field']}" if finding["field"] else ""
    target = shlex.quote(name + "-repaired")
    command = finding["script"]
    if not command and finding["repair"] != "-":
        command = f"rollout-data repair {shlex.quote(name)} --to {target} --only {code}"
    return {
        "place": place,
        "id": f"finding-{place}",
        "kind": f"finding {severity}",
        "sign": f"{SIGNS[severity]} {severity}",
        "heading": f"{code} {finding['name']}{field}",
        "message": finding["message"] or finding["title"],
        "advice": finding["advice"],
        "command": command,
        "look": f"Show {count_text(len(numbers), 'trajectory')}" if numbers else "",
        "opens": place if numbers else None,
        "names": [],
        "trajectory": numbers[0] if numbers else None,
        **evidence,
    }


def worst_first(survey: Survey, findings: Findings) -> Array:
    """Return the episodes ordered by errors, then by warnings, then by outlier score."""
    weights = np.nan_to_num(np.minimum(survey.oddness, 500.0))
    for finding in findings:
        weights[finding["trajectories"]] += _WEIGHT[finding["severity"]]
    return np.argsort(-weights, kind="stable")


def table(
    survey: Survey,
    findings: Findings,
    order: Array,
) -> tuple[list[dict[str, str]], dict[str, list[Any]]]:
    """Build the table of episodes: headings and values.

    Args:
        survey: Facts of the recording.
        findings: Findings, the worst first.
        order: Indices of the episodes in the table, in the order of its rows.

    Returns:
        The headings, and the values of each column. The table does not show the columns "facts"
        and "rank": "facts" describes an episode in a sentence, and "rank" is its place in `order`.
    """
    rows = survey.table[order]
    numbers = order.tolist()
    codes = _codes_of_episodes(findings)
    success = {1: "yes", 0: "no"}
    columns: dict[str, list[Any]] = {
        "number": numbers,
        "findings": [", ".join(codes.get(number, ())) for number in numbers],
        "name": rows["id"].tolist(),
        "writer": rows["writer"].tolist(),
        "env": [None if env < 0 else env for env in rows["env"].tolist()],
        "task": rows["task"].tolist(),
        "length": rows["length"].tolist(),
        "end": rows["ends"].tolist(),
        "success": [success.get(value) for value in rows["success"].tolist()],
        "return": digits(rows["return"], 7),
        "robust z": digits(survey.oddness[order], 3),
    }
    heads = [{"key": key, "label": key, "sort": key} for key in columns]
    heads[0]["label"] = "#"
    heads[1]["sort"] = "rank"

    facts = []
    oddest = survey.oddest[order].tolist()
    for values, measure in zip(zip(*columns.values(), strict=True), oddest, strict=True):
        facts.append(_facts(dict(zip(columns, values, strict=True)), measure))
    return heads, {**columns, "facts": facts, "rank": list(range(len(order)))}


def _codes_of_episodes(findings: Findings) -> dict[int, list[str]]:
    """Return texts such as "▲ VAL05" for the findings of each episode, without duplicates."""
    codes: dict[int, list[str]] = {}
    for finding in findings:
        text = f"{SIGNS[finding['severity']]} {finding['code']}"
        for number in finding["trajectories"]:
            listed = codes.setdefault(number, [])
            if text not in listed:
                listed.append(text)
    return codes


def _facts(row: Mapping[str, Any], measure: str) -> str:
    """Format the table row of an episode as one line of text.

    Args:
        row: Value of the episode in each column.
        measure: Name of the measure in which the episode differs most from the other episodes.
    """
    facts = [count_text(row["length"], "frame"), f"end: {row['end']}"]
    if row["success"]:
        facts.append(f"success: {row['success']}")
    if row["return"] is not None:
        facts.append(f"return {row['return']:,.7g}")
    if row["task"]:
        facts.append(f"task “{row['task']}”")
    if row["robust z"]:
        facts.append(f"oddest in {measure} (robust z {row['robust z']:g})")
    if row["findings"]:
        facts.append(row["findings"])
    return "; ".join(facts)


def options(
    values: Mapping[str, Sequence[Any]],
    findings: Findings,
) -> dict[str, list[dict[str, str]]]:
    """Return the choices for the filters above the table of episodes.

    Args:
        values: Map from column of the table to values.
        findings: As in `Diagnosis.as_dict`.
    """
    choices: dict[str, list[dict[str, str]]] = {}
    for name in ("end", "task"):
        choices[f"{name}_options"] = []
        for text in sorted(set(values[name])):
            choice = {"value": f"={text}", "text": text or "(none)"}
            choices[f"{name}_options"].append(choice)
    choices["finding_options"] = []
    for place, finding in enumerate(findings):
        sign = SIGNS[finding["severity"]]
        text = f"{sign} {finding['code']} {finding['field'] or finding['name']}"
        choices["finding_options"].append({"value": str(place), "text": text})
    return choices


def marks(survey: Survey) -> dict[Column, list[str]]:
    """Return labels for the chart of each dimension, which describe unusual values.

    A label is "not finite", "constant", or like "12% at a limit". The last one means that 12 % of
    the values equal the minimum or the maximum.
    """
    texts: dict[Column, list[str]] = {}
    for column in survey.course.columns:
        if column[1] != WHOLE:
            texts[column] = _marks_of(survey, column)
    return texts


def _marks_of(survey: Survey, column: Column) -> list[str]:
    name, dimension = column
    facts = survey.scan.facts[name]
    values = survey.values(column)
    low = facts.low[:, dimension].min()
    high = facts.high[:, dimension].max()
    at_limit = float(np.isin(values, (low, high)).mean()) if len(values) else 0.0

    texts = []
    if not np.isfinite(high - low):
        texts.append("not finite")
    if low == high:
        texts.append("constant")
    if at_limit > _MIN_AT_LIMIT and facts.is_continuous[dimension]:
        texts.append(f"{at_limit:.0%} at a limit")
    return texts


def dimensions_of(finding: Mapping[str, Any]) -> set[int]:
    """Return the dimensions that the evidence of a finding names, if any."""
    evidence = finding["evidence"]
    dimensions = evidence.get("dimensions", evidence.get("dimension"))
    if not isinstance(dimensions, (list, tuple)):
        dimensions = [dimensions]
    return {dimension for dimension in dimensions if isinstance(dimension, int)}


def finding_marks(
    findings: Findings,
    column: Column,
    name: str,
    views: Sequence[Mapping[str, Any]],
) -> list[dict[str, str]]:
    """Return the labels of findings for the chart of a dimension, such as "▲ VAL05".

    A finding gets a label if its evidence names the dimension, or if its plot shows the dimension.

    Args:
        findings: As in `Diagnosis.as_dict`.
        column: Dimension of the chart.
        name: Name of the dimension.
        views: Content of each finding on the page; see `finding_view`.
    """
    listed = []
    for finding, view in zip(findings, views, strict=True):
        if finding["field"] != column[0]:
            continue
        if column[1] in dimensions_of(finding) or name in view["names"]:
            severity = finding["severity"]
            text = f"{SIGNS[severity]} {finding['code']}"
            listed.append({"kind": f"mark {severity}", "text": text})
    return listed
