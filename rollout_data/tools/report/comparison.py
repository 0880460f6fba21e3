"""Two recordings beside each other: lengths and returns, dimensions by how far they lie apart, findings new and gone.

One rule: the first recording is the one that the page is about; "new" is what it has and the other has not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..doctor.batched_reading import Array
from .figures import Figure, histogram, shown
from .summary import SIGNS, counted
from .survey import Survey, quantiles

_SHARES = tuple(share / 20 for share in range(1, 20))
_ENDS = (0.01, 0.5, 0.99)
_NUM_DRAWN = 12
_NUM_LISTED = 100


def compared(surveys: Sequence[Survey], names: Sequence[str], findings: Sequence[Any]) -> dict[str, Any]:
    """Collect what the page says of two recordings.

    Args:
        surveys: Of both.
        names: What the page calls them.
        findings: Of each, as `Diagnosis.as_dict` has them.
    """
    both = (names[0], names[1] if names[1] != names[0] else f"{names[1]} (2)")
    drawn: list[Figure] = []
    for title, unit, column in (("Lengths", "frames", "length"), ("Returns", "sum of rewards", "return")):
        values = (survey.table[column].astype(np.float64) for survey in surveys)
        drawn.append(histogram(f"{title} of both", unit, dict(zip(both, values, strict=True)), as_share=True))
    rows = sorted(_distances(*surveys), key=lambda row: -row[1])
    for name, distance, *pair in rows[:_NUM_DRAWN]:
        title = f"{name}: distance {distance:.3g}"
        drawn.append(histogram(title, shown(name), dict(zip(both, pair, strict=True)), as_share=True))
    listed = [
        _row(
            name, f"{distance:.5g}", *(f"{end:.5g}" for values in pair for end in quantiles(values[None], _ENDS)[:, 0])
        )
        for name, distance, *pair in rows[:_NUM_LISTED]
    ]
    heads = ["", "distance", *(f"{name}: {end}" for name in both for end in ("1 %", "median", "99 %"))]
    columns = [{survey.name(column) for column in survey.course.columns} for survey in surveys]
    only = [[{"text": name} for name in sorted(columns[at] - columns[1 - at])] for at in (0, 1)]
    return {
        "heads": [{"text": name} for name in ("", *both)],
        "facts": _facts(surveys, findings),
        "lists": [
            _list(f"Findings new in {both[0]}", findings[0], findings[1]),
            _list(f"Findings gone, only in {both[1]}", findings[1], findings[0]),
            *({"title": f"Dimensions only in {both[at]}", "items": only[at]} for at in (0, 1) if only[at]),
        ],
        "figures": [{**figure, "key": f"compared-{place}"} for place, figure in enumerate(drawn) if figure],
        "hint": f"The mean difference of 19 quantiles over the range of both; {len(listed)} of {len(rows)} dimensions.",
        "columns": [{"text": text} for text in heads],
        "fields": listed,
    }


def _row(name: str, *values: str) -> dict[str, Any]:
    return {"name": name, "values": [{"text": value} for value in values]}


def _facts(surveys: Sequence[Survey], findings: Sequence[Any]) -> list[dict[str, Any]]:
    counts = [Counter(finding["severity"] for finding in listed) for listed in findings]
    middles = [quantiles(survey.table["return"][None], (0.5,))[0, 0] for survey in surveys]
    return [
        _row("trajectories", *(f"{len(survey.table):,}" for survey in surveys)),
        _row("frames", *(f"{survey.num_frames:,}" for survey in surveys)),
        _row("findings", *(", ".join(f"{SIGNS[one]} {counted(count[one], one)}" for one in SIGNS) for count in counts)),
        _row("median length", *(f"{np.median(survey.table['length']):,.0f}" for survey in surveys)),
        _row("median return", *(f"{middle:,.6g}" for middle in middles)),
    ]


def _list(title: str, findings: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """List the findings whose code and field others have not."""
    there = {(one["code"], one["field"]) for one in others}
    items = []
    for one in findings:
        if (one["code"], one["field"]) not in there:
            field = f" · {one['field']}" if one["field"] else ""
            text = f"{one['code']} {one['name']}{field}: {one['message']}"
            items.append({"kind": one["severity"], "sign": f"{SIGNS[one['severity']]} {one['severity']}", "text": text})
    return {"title": f"{title}: {len(items)}", "items": items}


def _distances(one: Survey, other: Survey) -> Iterator[tuple[str, float, Array, Array]]:
    """Of each dimension of both the mean difference of 19 quantiles over the range of both (1 to 99 %)."""
    there = {other.name(column): column for column in other.course.columns}
    for column in one.course.columns:
        name = one.name(column)
        first = one.values(column)
        second = other.values(there[name]) if name in there else first[:0]
        if len(first) and len(second):
            apart = np.abs(quantiles(first[None], _SHARES) - quantiles(second[None], _SHARES)).mean()
            low, high = quantiles(np.concatenate([first, second])[None], (0.01, 0.99))[:, 0]
            yield name, float(apart / (high - low)) if high > low else float(apart > 0), first, second
