"""The head, the cards, the findings and the table of the page, as plain values that its templates show.

One rule: texts here are for people; numbers and codes are those of the diagnosis.
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

from ..diagnosis.provenance import masked
from ..diagnosis.reading import Array
from .packing import digits
from .survey import WHOLE, Column, Survey

SIGNS = {"error": "●", "warning": "▲", "info": "○"}
#: What the head shows of the metadata, if it is there.
_CONTEXT = ("env", "env_id", "env_name", "robot_type", "policy", "version", "frame_rate_hz", "fps", "date")
_WEIGHT = {"error": 1e6, "warning": 1e3, "info": 0.0}
_MAX_TEXT = 120
_MIN_AT_LIMIT = 0.05
Findings = Sequence[Mapping[str, Any]]


def rate_hz(survey: Survey) -> float | None:
    """The rate that the metadata tell."""
    found = survey.recording.metadata.get("frame_rate_hz", survey.recording.metadata.get("fps"))
    return float(found) if isinstance(found, (int, float)) and 0 < found < math.inf else None


def counted(number: int, word: str) -> str:
    """Say how many: "1 trajectory", "2 trajectories"."""
    many = word[:-1] + "ies" if word.endswith("y") else word if word == "info" else word + "s"
    return f"{number:,} {word if number == 1 else many}"


def about(survey: Survey, made: str) -> list[dict[str, str]]:
    """What the head says of the recording."""
    known, times = survey.recording.metadata, survey.table["time"][~np.isnat(survey.table["time"])]
    said = {
        "format": survey.recording.format,
        "recorded": str(times.max())[:16].replace("T", " ") if len(times) else "",
    }
    for name in _CONTEXT:
        value = known.get(name)
        said[name.replace("_", " ")] = (
            value if isinstance(value, str) else "" if value is None else json.dumps(value, default=str)
        )
    said["page made"] = made
    return [{"name": name, "value": masked(value, name)[:_MAX_TEXT]} for name, value in said.items() if value]


def cards(survey: Survey, diagnosis: Mapping[str, Any]) -> list[dict[str, str]]:
    """The cards: verdict, counts, size, ends, what no finding touches, what was skipped."""
    findings, table = diagnosis["findings"], survey.table
    counts = Counter(one["severity"] for one in findings)
    worst = next((severity for severity in SIGNS if counts[severity]), "good")
    verdict = {"error": "Not as it is", "warning": "With care", "info": "Yes", "good": "Yes"}[worst]
    found = ", ".join(f"{SIGNS[one]} {counted(counts[one], one)}" for one in SIGNS if counts[one])
    touched = {number for one in findings if one["severity"] != "info" for number in one["trajectories"]}
    num_touched = int(table["length"][[number for number in touched if number < len(table)]].sum())
    rate, ends = rate_hz(survey), Counter(table["ends"].tolist())
    raw = survey.num_frames * sum(field.row_bytes for field in survey.recording.schema.values())
    stored = stored_bytes(survey.recording.path)
    share = 1 - num_touched / max(1, survey.num_frames)
    reasons: dict[str, list[str]] = {}
    for one in diagnosis["skipped"]:
        reasons.setdefault(one["why"], []).append(one["code"])
    skipped = "; ".join(f"{why} ({', '.join(codes)})" for why, codes in reasons.items())
    lengths = table["length"] if len(table) else np.zeros(1, np.int64)
    listed = [
        (
            "May I train on this?",
            f"{'✓' if worst == 'good' else SIGNS[worst]} {verdict}",
            found or "no rule found anything",
        ),
        (
            "trajectories",
            f"{len(table):,}",
            f"{lengths.min():,} to {lengths.max():,} frames, median {np.median(lengths):,.0f}",
        ),
        (
            "frames",
            f"{survey.num_frames:,}",
            _duration(survey.num_frames / rate) + f" at {rate:g} Hz" if rate else "rate unknown",
        ),
        ("size", size(stored), f"{stored / max(1, raw):.0%} of the values uncompressed ({size(raw)})"),
        ("ends", ", ".join(f"{count:,} {name}" for name, count in ends.most_common()) or "none", ""),
        (
            "frames untouched",
            f"{math.floor(1000 * share) / 1000:.1%}",
            "in trajectories that no error or warning names",
        ),
        ("rules skipped", str(len(diagnosis["skipped"])), skipped),
    ]
    kinds = [f"card verdict {worst}"] + ["card"] * (len(listed) - 2) + ["card skipped"]
    return [
        {"label": label, "value": value, "note": note, "kind": kind}
        for (label, value, note), kind in zip(listed, kinds, strict=True)
    ]


def stored_bytes(path: Any) -> int:
    """Size of a file, or of all files of a folder; 0 where it is not on this machine."""
    if os.path.isfile(path):
        return os.path.getsize(path)
    return sum(os.path.getsize(os.path.join(folder, name)) for folder, _, names in os.walk(path) for name in names)


def _duration(seconds: float) -> str:
    return next(
        (f"{seconds / unit:.3g} {name}" for name, unit in (("h", 3600), ("min", 60)) if seconds >= unit),
        f"{seconds:.3g} s",
    )


def size(num_bytes: int) -> str:
    """Give a number of bytes for people."""
    return f"{num_bytes / 1e9:,.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:,.2f} MB"


def finding_view(place: int, finding: Mapping[str, Any], name: str, evidence: Mapping[str, Any]) -> dict[str, Any]:
    """What the page shows of a finding."""
    severity, numbers = finding["severity"], finding["trajectories"]
    field = f" · {finding['field']}" if finding["field"] else ""
    command = f"rollout-data repair {shlex.quote(name)} --to {shlex.quote(name + '-repaired')} --only {finding['code']}"
    return {
        "place": place,
        "id": f"finding-{place}",
        "kind": f"finding {severity}",
        "sign": f"{SIGNS[severity]} {severity}",
        "heading": f"{finding['code']} {finding['name']}{field}",
        "message": finding["message"] or finding["title"],
        "advice": finding["advice"],
        "command": command if finding["repair"] != "-" else "",
        "look": f"Show {counted(len(numbers), 'trajectory')}" if numbers else "",
        "names": [],
        "trajectory": numbers[0] if numbers else None,
        **evidence,
    }


def worst_first(survey: Survey, findings: Findings) -> Array:
    """Order of the episodes: by errors, then warnings, then how odd they are."""
    weights = np.nan_to_num(np.minimum(survey.oddness, 500.0))
    for one in findings:
        listed = np.array([number for number in one["trajectories"] if number < len(weights)], np.int64)
        weights[listed] += _WEIGHT[one["severity"]]
    return np.argsort(-weights, kind="stable")


def table(survey: Survey, findings: Findings, order: Array) -> tuple[list[dict[str, str]], dict[str, list[Any]]]:
    """The columns of the table, without those that tell nothing, and their values in the order given."""
    rows, touched = survey.table[order], dict[int, list[str]]()
    for one in findings:
        for number in one["trajectories"]:
            touched.setdefault(number, []).append(f"{SIGNS[one['severity']]} {one['code']}")
    success = {1: "yes", 0: "no"}
    columns: dict[str, tuple[str, list[Any]]] = {
        "number": ("#", order.tolist()),
        "findings": (
            "findings",
            [", ".join(sorted(set(touched.get(number, [])), key="●▲○".find)) for number in order.tolist()],
        ),
        "id": ("name", rows["id"].tolist()),
        "writer": ("writer", rows["writer"].tolist()),
        "env": ("env", [None if env < 0 else env for env in rows["env"].tolist()]),
        "task": ("task", rows["task"].tolist()),
        "length": ("length", rows["length"].tolist()),
        "end": ("end", rows["ends"].tolist()),
        "success": ("success", [success.get(one) for one in rows["success"].tolist()]),
        "return": ("return", digits(rows["return"], 7)),
        "oddness": ("robust z", digits(survey.oddness[order], 3)),
    }
    always = {"number", "id", "length", "end", "findings"}
    shown = [name for name, (_, values) in columns.items() if name in always or len(set(values)) > 1]
    found = {name: values for name, (_, values) in columns.items()}
    found["facts"] = [_facts(found, place, survey.oddest[number]) for place, number in enumerate(order.tolist())]
    found["rank"] = list(range(len(order)))
    heads = [{"key": name, "label": columns[name][0], "sort": "rank" if name == "findings" else name} for name in shown]
    return heads, found


def _facts(found: Mapping[str, list[Any]], place: int, oddest: str) -> str:
    row = {name: values[place] for name, values in found.items() if name != "facts"}
    listed = [counted(row["length"], "frame"), f"end: {row['end']}"]
    listed += [f"success: {row['success']}"] if row["success"] else []
    listed += [f"return {row['return']:,}"] if row["return"] is not None else []
    listed += [f"task “{row['task']}”"] if row["task"] else []
    listed += [f"oddest in {oddest} (robust z {row['oddness']:g})"] if row["oddness"] else []
    return "; ".join([*listed, *([row["findings"]] if row["findings"] else [])])


def options(values: Mapping[str, Sequence[Any]], findings: Findings) -> dict[str, list[dict[str, str]]]:
    """What the filters of the table offer."""
    found = {
        f"{name}_options": [{"value": f"={one}", "text": one or "(none)"} for one in sorted(set(values[name]))]
        for name in ("end", "task")
    }
    texts = [f"{SIGNS[one['severity']]} {one['code']} {one['field'] or one['name']}" for one in findings]
    return {**found, "finding_options": [{"value": str(place), "text": text} for place, text in enumerate(texts)]}


def marks(survey: Survey) -> dict[Column, list[str]]:
    """Column -> what is marked at its chart: not finite, constant, the share of its values at a limit."""
    found: dict[Column, list[str]] = {}
    for name, place in survey.course.columns:
        if place != WHOLE:
            facts, values = survey.scan.facts[name], survey.values((name, place))
            low, high = facts.low[:, place].min(), facts.high[:, place].max()
            at_limit = float(np.isin(values, (low, high)).mean()) if len(values) else 0.0
            said = {
                "not finite": not np.isfinite(high - low),
                "constant": low == high,
                f"{at_limit:.0%} at a limit": at_limit > _MIN_AT_LIMIT and facts.is_continuous[place],
            }
            found[name, place] = [text for text, is_so in said.items() if is_so]
    return found


def dimensions_of(finding: Mapping[str, Any]) -> set[int]:
    """Give the dimensions that a finding names, if it does."""
    said = finding["evidence"].get("dimensions", finding["evidence"].get("dimension"))
    return {one for one in (said if isinstance(said, (list, tuple)) else [said]) if isinstance(one, int)}


def marked_by(
    findings: Findings, column: Column, name: str, views: Sequence[Mapping[str, Any]]
) -> list[dict[str, str]]:
    """Give the marks of the findings that name a column, or show it as their evidence."""
    return [
        {"kind": f"mark {one['severity']}", "text": f"{SIGNS[one['severity']]} {one['code']}"}
        for one, view in zip(findings, views, strict=True)
        if one["field"] == column[0] and (column[1] in dimensions_of(one) or name in view["names"])
    ]
