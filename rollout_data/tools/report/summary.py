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

from ..doctor.batched_reading import Array
from ..doctor.provenance import masked
from .embedded_data import digits
from .survey import WHOLE, Column, Survey

SIGNS = {"error": "●", "warning": "▲", "info": "○"}
#: What the head shows of the metadata, if it is there.
_CONTEXT = ("env", "env_id", "env_name", "robot_type", "policy", "version", "frame_rate_hz", "fps", "date")
_WEIGHT = {"error": 1e6, "warning": 1e3, "info": 0.0}
_MAX_TEXT = 120
_MIN_AT_LIMIT = 0.05
_SIZES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))
_TIMES = ((3600.0, "h"), (60.0, "min"), (1.0, "s"))
Findings = Sequence[Mapping[str, Any]]


def rate_hz(survey: Survey) -> float | None:
    """The rate that the metadata tell."""
    found = survey.recording.metadata.get("frame_rate_hz", survey.recording.metadata.get("fps"))
    return float(found) if isinstance(found, (int, float)) and 0 < found < math.inf else None


def counted(number: int, word: str) -> str:
    """Return how many: "1 trajectory", "2 trajectories"."""
    many = word[:-1] + "ies" if word.endswith("y") else word if word == "info" else word + "s"
    return f"{number:,} {word if number == 1 else many}"


def about(survey: Survey, made: str) -> list[dict[str, str]]:
    """What the head says of the recording."""
    known = survey.recording.metadata
    times = survey.table["time"][~np.isnat(survey.table["time"])]
    recorded = str(times.max())[:16].replace("T", " ") if len(times) else None
    said = {"format": survey.recording.format, "recorded": recorded}
    said |= {name.replace("_", " "): known.get(name) for name in _CONTEXT} | {"page made": made}
    texts = {
        name: value if isinstance(value, str) else json.dumps(value, default=str)
        for name, value in said.items()
        if value is not None and value != ""
    }
    return [{"name": name, "value": masked(text, name)[:_MAX_TEXT]} for name, text in texts.items()]


def cards(survey: Survey, diagnosis: Mapping[str, Any]) -> list[dict[str, str]]:
    """The cards: verdict, counts, size, ends, what no finding touches, what was skipped."""
    findings = diagnosis["findings"]
    lengths = survey.table["length"]
    num_frames = survey.num_frames
    counts = Counter(one["severity"] for one in findings)
    worst = next((severity for severity in SIGNS if counts[severity]), "good")
    verdict = {"error": "● Not as it is", "warning": "▲ With care", "info": "○ Yes", "good": "✓ Yes"}[worst]
    found = ", ".join(f"{SIGNS[one]} {counted(counts[one], one)}" for one in SIGNS if counts[one])
    touched = {number for one in findings if one["severity"] != "info" for number in one["trajectories"]}
    untouched = 1 - int(lengths[sorted(touched)].sum()) / num_frames
    rate = rate_hz(survey)
    ends = Counter(survey.table["ends"].tolist())
    raw = num_frames * sum(field.row_bytes for field in survey.recording.schema.values())
    stored = stored_bytes(survey.recording.path)
    reasons: dict[str, list[str]] = {}
    for one in diagnosis["skipped"]:
        reasons.setdefault(one["why"], []).append(one["code"])
    least, middle, most = (f"{value:,.0f}" for value in np.quantile(lengths, (0, 0.5, 1)))
    spread = (
        f"{counted(int(lengths[0]), 'frame')} each" if least == most else f"{least} to {most} frames, median {middle}"
    )
    ratio = f"{stored / max(1, raw):.0%} of the values uncompressed ({_scaled(raw, _SIZES)})"
    lasting = f"{_scaled(num_frames / rate, _TIMES)} at {rate:g} Hz" if rate else "rate unknown"
    skipped = "; ".join(f"{why} ({', '.join(codes)})" for why, codes in reasons.items())
    listed = [
        (f"card verdict {worst}", "May I train on this?", verdict, found or "no rule found anything"),
        ("card", "trajectories", f"{len(lengths):,}", spread),
        ("card", "frames", f"{num_frames:,}", lasting),
        ("card", "size", _scaled(stored, _SIZES), ratio),
        ("card", "ends", ", ".join(f"{count:,} {name}" for name, count in ends.most_common()), ""),
        (
            "card",
            "frames untouched",
            f"{math.floor(1000 * untouched) / 10}%",
            "no error or warning in their trajectories",
        ),
        ("card skipped", "rules skipped", str(len(diagnosis["skipped"])), skipped),
    ]
    return [dict(zip(("kind", "label", "value", "note"), one, strict=True)) for one in listed]


def stored_bytes(path: Any) -> int:
    """Size of a file, or of all files of a folder; 0 where it is not on this machine."""
    if os.path.isfile(path):
        return os.path.getsize(path)
    return sum(os.path.getsize(os.path.join(folder, name)) for folder, _, names in os.walk(path) for name in names)


def _scaled(value: float, units: Sequence[tuple[float, str]]) -> str:
    """Return a number in the largest unit that it reaches, else in the least."""
    unit, name = next((one for one in units if value >= one[0]), units[-1])
    return f"{value / unit:,.0f} {name}" if value >= 100 * unit else f"{value / unit:.3g} {name}"


def finding_view(place: int, finding: Mapping[str, Any], evidence: Mapping[str, Any], name: str) -> dict[str, Any]:
    """What the page shows of a finding."""
    severity = finding["severity"]
    numbers = finding["trajectories"]
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
        "command": finding["script"] or (command if finding["repair"] != "-" else ""),
        "look": f"Show {counted(len(numbers), 'trajectory')}" if numbers else "",
        "opens": place if numbers else None,
        "names": [],
        "trajectory": numbers[0] if numbers else None,
        **evidence,
    }


def worst_first(survey: Survey, findings: Findings) -> Array:
    """Order of the episodes: by errors, then warnings, then how odd they are."""
    weights = np.nan_to_num(np.minimum(survey.oddness, 500.0))
    for one in findings:
        weights[one["trajectories"]] += _WEIGHT[one["severity"]]
    return np.argsort(-weights, kind="stable")


def table(survey: Survey, findings: Findings, order: Array) -> tuple[list[dict[str, str]], dict[str, list[Any]]]:
    """The columns of the table, and their values in the order given, with those that are not shown."""
    rows = survey.table[order]
    touched = dict[int, dict[str, bool]]()
    for one in findings:  # the worst first
        for number in one["trajectories"]:
            touched.setdefault(number, {})[f"{SIGNS[one['severity']]} {one['code']}"] = True
    success = {1: "yes", 0: "no"}
    numbers = order.tolist()
    columns: dict[str, list[Any]] = {
        "number": numbers,
        "findings": [", ".join(touched.get(number, ())) for number in numbers],
        "name": rows["id"].tolist(),
        "writer": rows["writer"].tolist(),
        "env": [None if env < 0 else env for env in rows["env"].tolist()],
        "task": rows["task"].tolist(),
        "length": rows["length"].tolist(),
        "end": rows["ends"].tolist(),
        "success": [success.get(one) for one in rows["success"].tolist()],
        "return": digits(rows["return"], 7),
        "robust z": digits(survey.oddness[order], 3),
    }
    heads = [{"key": key, "label": key, "sort": key} for key in columns]
    heads[0]["label"], heads[1]["sort"] = "#", "rank"
    oddest = survey.oddest[order].tolist()
    told = zip(*columns.values(), strict=True)
    facts = [_facts(dict(zip(columns, row, strict=True)), one) for row, one in zip(told, oddest, strict=True)]
    return heads, {**columns, "facts": facts, "rank": list(range(len(order)))}


def _facts(row: Mapping[str, Any], oddest: str) -> str:
    """Return the row of an episode in the table as one line."""
    listed = [counted(row["length"], "frame"), f"end: {row['end']}"]
    listed += [f"success: {row['success']}"] if row["success"] else []
    listed += [f"return {row['return']:,.7g}"] if row["return"] is not None else []
    listed += [f"task “{row['task']}”"] if row["task"] else []
    listed += [f"oddest in {oddest} (robust z {row['robust z']:g})"] if row["robust z"] else []
    return "; ".join([*listed, *filter(None, [row["findings"]])])


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
            facts = survey.scan.facts[name]
            values = survey.values((name, place))
            low = facts.low[:, place].min()
            high = facts.high[:, place].max()
            at_limit = float(np.isin(values, (low, high)).mean()) if len(values) else 0.0
            said = {
                "not finite": not np.isfinite(high - low),
                "constant": low == high,
                f"{at_limit:.0%} at a limit": at_limit > _MIN_AT_LIMIT and facts.is_continuous[place],
            }
            found[name, place] = [text for text, is_so in said.items() if is_so]
    return found


def dimensions_of(finding: Mapping[str, Any]) -> set[int]:
    """Return the dimensions that a finding names, if it does."""
    said = finding["evidence"].get("dimensions", finding["evidence"].get("dimension"))
    return {one for one in (said if isinstance(said, (list, tuple)) else [said]) if isinstance(one, int)}


def marked_by(
    findings: Findings, column: Column, name: str, views: Sequence[Mapping[str, Any]]
) -> list[dict[str, str]]:
    """Return the marks of the findings that name a column, or show it as their evidence."""
    return [
        {"kind": f"mark {one['severity']}", "text": f"{SIGNS[one['severity']]} {one['code']}"}
        for one, view in zip(findings, views, strict=True)
        if one["field"] == column[0] and (column[1] in dimensions_of(one) or name in view["names"])
    ]
