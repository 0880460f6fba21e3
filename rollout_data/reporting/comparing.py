"""Two recordings beside each other: lengths and returns, dimensions by how far they lie apart, findings new and gone.

One rule: the first recording is the one that the page is about; "new" is what it has and the other has not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..diagnosis.reading import Array
from .figures import Figure, histogram, shown
from .summary import SIGNS, counted
from .survey import Survey, quantiles

_SHARES = tuple(share / 20 for share in range(1, 20))
_ENDS = (0.01, 0.5, 0.99)
_NUM_DRAWN, _NUM_LISTED = 12, 100


def compared(one: Survey, other: Survey, names: Sequence[str], findings: Sequence[Any]) -> dict[str, Any]:
    """Collect what the page says of two recordings.

    Args:
        one, other: The recordings.
        names: What the page calls them.
        findings: Of each, as `Diagnosis.as_dict` has them.
    """
    first_name, second_name = names if names[0] != names[1] else (names[0], f"{names[1]} (2)")
    both = (first_name, second_name)
    drawn: list[Figure] = []
    for title, unit, column in (("Lengths", "frames", "length"), ("Returns", "sum of rewards", "return")):
        values = [survey.table[column].astype(np.float64) for survey in (one, other)]
        drawn.append(histogram(f"{title} of both", unit, dict(zip(both, values, strict=True)), as_share=True))
    rows = sorted(_distances(one, other), key=lambda row: -row[1])
    for name, distance, first, second in rows[:_NUM_DRAWN]:
        title = f"{name}: distance {distance:.3g}"
        drawn.append(histogram(title, shown(name), dict(zip(both, (first, second), strict=True)), as_share=True))
    listed = [
        (name, [distance, *quantiles(first[None], _ENDS)[:, 0], *quantiles(second[None], _ENDS)[:, 0]])
        for name, distance, first, second in rows[:_NUM_LISTED]
    ]
    heads = ["", "distance", *(f"{name}: {end}" for name in both for end in ("1 %", "median", "99 %"))]
    columns = [{survey.name(column) for column in survey.course.columns} for survey in (one, other)]
    lists = [
        _list(f"Findings new in {first_name}", _missing_in(findings[0], findings[1])),
        _list(f"Findings gone, only in {second_name}", _missing_in(findings[1], findings[0])),
        *(
            {"title": f"Dimensions only in {name}", "items": _items(sorted(columns[at] - columns[1 - at]))}
            for at, name in enumerate(both)
        ),
    ]
    return {
        "heads": [{"text": name} for name in ("", *both)],
        "facts": [_row(name, values) for name, values in _facts(one, other, findings)],
        "lists": [*lists[:2], *(one for one in lists[2:] if one["items"])],
        "figures": [{**figure, "key": f"compared-{place}"} for place, figure in enumerate(drawn) if figure],
        "hint": f"The mean difference of 19 quantiles over the range of both; {len(listed)} of {len(rows)} dimensions.",
        "columns": [{"text": text} for text in heads],
        "fields": [_row(name, [f"{value:.5g}" for value in values]) for name, values in listed],
    }


def _facts(one: Survey, other: Survey, findings: Sequence[Any]) -> list[tuple[str, list[str]]]:
    both = (one, other)
    counts = [Counter(finding["severity"] for finding in listed) for listed in findings]
    return [
        ("trajectories", [f"{len(survey.table):,}" for survey in both]),
        ("frames", [f"{survey.num_frames:,}" for survey in both]),
        ("findings", [", ".join(f"{SIGNS[kind]} {counted(count[kind], kind)}" for kind in SIGNS) for count in counts]),
        (
            "median length",
            [f"{np.median(survey.table['length']):,.0f}" if len(survey.table) else "–" for survey in both],
        ),
        ("median return", [f"{quantiles(survey.table['return'][None], (0.5,))[0, 0]:,.6g}" for survey in both]),
    ]


def _row(name: str, values: Sequence[str]) -> dict[str, Any]:
    return {"name": name, "values": [{"text": value} for value in values]}


def _items(names: Sequence[str]) -> list[dict[str, str]]:
    return [{"kind": "", "sign": "", "text": name} for name in names]


def _list(title: str, findings: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    items = [
        {
            "kind": one["severity"],
            "sign": f"{SIGNS[one['severity']]} {one['severity']}",
            "text": f"{one['code']} {one['name']}"
            + (f" · {one['field']}" if one["field"] else "")
            + f": {one['message']}",
        }
        for one in findings
    ]
    return {"title": f"{title}: {len(items)}", "items": items}


def _distances(one: Survey, other: Survey) -> list[tuple[str, float, Array, Array]]:
    """Of each dimension of both the mean difference of 19 quantiles over the range of both (1 to 99 %)."""
    there, found = {other.name(column): column for column in other.course.columns}, []
    for column in one.course.columns:
        name, first = one.name(column), one.values(column)
        second = other.values(there[name]) if name in there else first[:0]
        if len(first) and len(second):
            apart = np.abs(quantiles(first[None], _SHARES) - quantiles(second[None], _SHARES)).mean()
            low, high = quantiles(np.concatenate([first, second])[None], (0.01, 0.99))[:, 0]
            found.append((name, float(apart / (high - low)) if high > low else float(apart > 0), first, second))
    return found


def _missing_in(findings: Any, others: Any) -> list[Mapping[str, Any]]:
    there = {(one["code"], one["field"]) for one in others}
    return [one for one in findings if (one["code"], one["field"]) not in there]
