"""Compare two recordings: their lengths, returns, dimensions and findings.

The page is about the first recording. A finding is new if only the first recording has it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..doctor.batched_reading import Array
from .figures import Figure, histogram, plotly_text
from .summary import SIGNS, count_text
from .survey import Survey, quantiles

#: Levels of the 19 quantiles, from 5 % to 95 %, by which the values of two recordings are compared.
_SHARES = tuple(share / 20 for share in range(1, 20))
#: Labels and levels of the quantiles in the table of dimensions.
_LISTED_SHARES = {"1 %": 0.01, "median": 0.5, "99 %": 0.99}
#: Maximum number of dimensions that get a histogram.
_NUM_DRAWN = 12
#: Maximum number of dimensions that the table lists.
_NUM_LISTED = 100


class _Distance(NamedTuple):
    """Distance between the values of a dimension in two recordings.

    Attributes:
        name: Name of the dimension.
        distance: Mean absolute difference of 19 quantiles, divided by the 1 % to 99 % range of all
            values.
        values: Values of the dimension in each recording, in ascending order.
    """

    name: str
    distance: float
    values: tuple[Array, Array]


def compare_surveys(
    surveys: Sequence[Survey],
    names: Sequence[str],
    findings: Sequence[Any],
) -> dict[str, Any]:
    """Return the content of the comparison section of the page as plain values.

    Args:
        surveys: Facts of each of the two recordings.
        names: Names of the recordings on the page.
        findings: Findings of each recording, as in `Diagnosis.as_dict`.
    """
    first_name, second_name = names
    if second_name == first_name:
        second_name = f"{second_name} (2)"
    both = (first_name, second_name)
    distances = sorted(_distances(*surveys), key=lambda row: -row.distance)
    listed = [_distance_row(row) for row in distances[:_NUM_LISTED]]

    heads = ["", "distance"]
    heads += [f"{name}: {label}" for name in both for label in _LISTED_SHARES]
    lists = [
        _unshared_findings(f"Findings new in {first_name}", findings[0], findings[1]),
        _unshared_findings(f"Findings gone, only in {second_name}", findings[1], findings[0]),
        *_unshared_dimensions(surveys, both),
    ]
    hint = "The mean difference of 19 quantiles over the range of both"
    return {
        "heads": [{"text": name} for name in ("", *both)],
        "facts": _facts(surveys, findings),
        "lists": lists,
        "figures": _figures(surveys, both, distances[:_NUM_DRAWN]),
        "hint": f"{hint}; {len(listed)} of {len(distances)} dimensions.",
        "columns": [{"text": text} for text in heads],
        "fields": listed,
    }


def _figures(
    surveys: Sequence[Survey],
    names: tuple[str, str],
    distances: Sequence[_Distance],
) -> list[Figure]:
    """Return histograms of the lengths, the returns and the most different dimensions."""
    drawn: list[Figure] = []
    measures = (("Lengths", "frames", "length"), ("Returns", "sum of rewards", "return"))
    for title, unit, column in measures:
        values = [survey.table[column].astype(np.float64) for survey in surveys]
        groups = dict(zip(names, values, strict=True))
        drawn.append(histogram(f"{title} of both", unit, groups, as_share=True))
    for row in distances:
        title = f"{row.name}: distance {row.distance:.3g}"
        groups = dict(zip(names, row.values, strict=True))
        drawn.append(histogram(title, plotly_text(row.name), groups, as_share=True))

    figures = []
    for place, figure in enumerate(drawn):
        if figure:
            figures.append({**figure, "key": f"compared-{place}"})
    return figures


def _row(name: str, *values: str) -> dict[str, Any]:
    return {"name": name, "values": [{"text": value} for value in values]}


def _distance_row(row: _Distance) -> dict[str, Any]:
    levels: list[float] = []
    for values in row.values:
        levels += quantiles(values[None], tuple(_LISTED_SHARES.values()))[:, 0].tolist()
    return _row(row.name, f"{row.distance:.5g}", *(f"{level:.5g}" for level in levels))


def _facts(surveys: Sequence[Survey], findings: Sequence[Any]) -> list[dict[str, Any]]:
    lengths = [np.median(survey.table["length"]) for survey in surveys]
    returns = [quantiles(survey.table["return"][None], (0.5,))[0, 0] for survey in surveys]
    return [
        _row("trajectories", *(f"{len(survey.table):,}" for survey in surveys)),
        _row("frames", *(f"{survey.num_frames:,}" for survey in surveys)),
        _row("findings", *map(_severities_text, findings)),
        _row("median length", *(f"{length:,.0f}" for length in lengths)),
        _row("median return", *(f"{value:,.6g}" for value in returns)),
    ]


def _severities_text(findings: Sequence[Mapping[str, Any]]) -> str:
    counts = Counter(finding["severity"] for finding in findings)
    return ", ".join(f"{sign} {count_text(counts[word], word)}" for word, sign in SIGNS.items())


def _unshared_findings(
    title: str,
    findings: Sequence[Mapping[str, Any]],
    others: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Return a list for the page: the findings of one recording that the other does not have.

    The other recording has the findings `others`. Two findings are the same if they have the same
    rule code and the same field.
    """
    other_keys = {(finding["code"], finding["field"]) for finding in others}
    items = []
    for finding in findings:
        severity = finding["severity"]
        code = finding["code"]
        field = finding["field"]
        if (code, field) in other_keys:
            continue
        where = f" · {field}" if field else ""
        text = f"{code} {finding['name']}{where}: {finding['message']}"
        items.append({"kind": severity, "sign": f"{SIGNS[severity]} {severity}", "text": text})
    return {"title": f"{title}: {len(items)}", "items": items}


def _unshared_dimensions(
    surveys: Sequence[Survey],
    names: tuple[str, str],
) -> Iterator[dict[str, Any]]:
    """Yield a list for the page: the dimensions that only one of the recordings has.

    There is one list per recording, except for a recording without such dimensions.
    """
    dimensions = []
    for survey in surveys:
        dimensions.append({survey.name(column) for column in survey.course.columns})
    first, second = dimensions
    for name, unshared in zip(names, (first - second, second - first), strict=True):
        if unshared:
            items = [{"text": dimension} for dimension in sorted(unshared)]
            yield {"title": f"Dimensions only in {name}", "items": items}


def _distances(survey: Survey, other: Survey) -> Iterator[_Distance]:
    """Compute the distance of each dimension that has values in both recordings."""
    other_columns = {other.name(column): column for column in other.course.columns}
    for column in survey.course.columns:
        name = survey.name(column)
        if name not in other_columns:
            continue
        first = survey.values(column)
        second = other.values(other_columns[name])
        if not len(first) or not len(second):
            continue
        difference = np.abs(quantiles(first[None], _SHARES) - quantiles(second[None], _SHARES))
        mean = difference.mean()
        low, high = quantiles(np.concatenate([first, second])[None], (0.01, 0.99))[:, 0]
        distance = mean / (high - low) if high > low else mean > 0
        yield _Distance(name, float(distance), (first, second))
