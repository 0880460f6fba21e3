"""Build charts of lengths and returns, as plotly traces and layouts.

A colour such as "@1" is an index into a palette. The page replaces it by the colour of the dark or
the light palette.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..doctor.batched_reading import Array
from .embedded_data import LARGEST, digits
from .survey import Survey

Figure = dict[str, Any]
#: Maximum number of episodes plotted as points. More are plotted as a density with outliers.
_MAX_POINTS = 400
#: Number of outliers plotted as points over a density.
NUM_ODD = 20
_NUM_BINS = 40
#: Maximum number of tasks for which a histogram has one group of bars per task.
_MAX_GROUPS = 7
#: Maximum number of characters of a name in a chart. Longer names are shortened.
_MAX_NAME = 40
#: Fill patterns of plotly for the groups of a histogram, in the order of the groups.
_PATTERNS = ("", "/", "x", ".", "-", "\\", "+")


def plotly_text(text: str) -> str:
    """Escape a name for plotly, and shorten it to 40 characters."""
    if len(text) > _MAX_NAME:
        text = text[: _MAX_NAME - 1] + "…"
    return html.escape(text, quote=False)


def groups_of(table: Array) -> tuple[str, dict[str, Array]]:
    """Divide episodes by task if there are 2 to `_MAX_GROUPS` tasks, otherwise by their end.

    Returns:
        "task" or "end", and for each group name whether each episode is in the group, bool
        `[episodes]`.
    """
    tasks = sorted(set(table["task"].tolist()))
    if 2 <= len(tasks) <= _MAX_GROUPS:
        return "task", {name or "(none)": table["task"] == name for name in tasks}
    ends = sorted(set(table["ends"].tolist()))
    return "end", {name or "(none)": table["ends"] == name for name in ends}


def _bin_edges(values: Array) -> Array:
    """Compute the edges of histogram bins. A small range of integers has one bin per integer."""
    low = float(values.min())
    high = float(values.max())
    are_integers = bool((values == np.round(values)).all())
    if high - low < _NUM_BINS and are_integers:
        return np.arange(low - 0.5, high + 1)
    if high <= low:
        return np.array([low - 0.5, low + 0.5])
    num_bins = min(_NUM_BINS, max(8, len(values) // 4))
    return np.linspace(low, high, num_bins + 1)


def _centers(edges: Array) -> list[float]:
    centers: list[float] = digits((edges[1:] + edges[:-1]) / 2, 8)
    return centers


def histogram(
    title: str,
    unit: str,
    groups: Mapping[str, Array],
    as_share: bool = False,
) -> Figure:
    """Build a histogram of several groups of values; {} if no value is finite.

    Args:
        title: Title of the chart.
        unit: Title of the horizontal axis.
        groups: Map from group name to values, float64 `[n]`.
        as_share: Overlay the shares of the groups instead of stacking their counts.
    """
    finite = {}
    for name, values in groups.items():
        finite[name] = values[np.isfinite(values)].clip(-LARGEST, LARGEST)
    all_values = np.concatenate(list(finite.values()))
    if not len(all_values):
        return {}

    edges = _bin_edges(all_values)
    centers = _centers(edges)
    traces = []
    for place, (name, values) in enumerate(finite.items()):
        heights = np.histogram(values, edges)[0] / 1
        if as_share:
            heights = heights / max(1, len(values))
        traces.append(_bars(place, name, centers, digits(heights), 0.65 if as_share else 1))

    subject = "values" if as_share else "episodes"
    label = f"{title}: {len(all_values):,} {subject} {_range_text(all_values)}"
    layout = {
        "barmode": "overlay" if as_share else "stack",
        "bargap": 0.04,
        "showlegend": len(groups) > 1,
    }
    axes = (unit, "share" if as_share else "episodes")
    return _figure(title, label, traces, axes, layout)


def _bars(place: int, name: str, x: list[float], y: list[float], opacity: float) -> Figure:
    """Build the bars of the group `name`. Its index `place` selects the colour and the pattern."""
    pattern = {
        "shape": _PATTERNS[place % len(_PATTERNS)],
        "fillmode": "overlay",
        "fgopacity": 0.6,
        "size": 7,
    }
    return {
        "type": "bar",
        "x": x,
        "y": y,
        "name": plotly_text(name),
        "marker": {"color": f"@{place}", "pattern": pattern, "line": {"width": 0}},
        "opacity": opacity,
    }


def _range_text(values: Array) -> str:
    low = f"{values.min():,.6g}"
    high = f"{values.max():,.6g}"
    return f"from {low} to {high}, median {np.median(values):,.6g}"


def _figure(
    title: str,
    label: str,
    traces: list[Any],
    axes: tuple[str, str],
    layout: Mapping[str, Any],
) -> Figure:
    """Build a chart from plotly traces. `axes` are the titles of the x and the y axis."""
    x_title, y_title = axes
    full_layout = {
        "xaxis": {"title": {"text": x_title}},
        "yaxis": {"title": {"text": y_title}},
        **layout,
    }
    return {
        "title": title,
        "label": label,
        "marks": [],
        "figure": {"traces": traces, "layout": full_layout},
    }


def _by_group(survey: Survey, title: str, unit: str, column: str) -> Figure:
    group_word, groups = groups_of(survey.table)
    values = survey.table[column].astype(np.float64)
    grouped = {name: values[is_member] for name, is_member in groups.items()}
    return histogram(f"{title} by {group_word}", unit, grouped)


def length_against_return(survey: Survey) -> Figure:
    """Build a scatter plot of length and return; {} if fewer than two episodes have a return.

    More than 400 episodes are plotted as a density with outliers.
    """
    lengths = survey.table["length"].astype(np.float64)
    returns = survey.table["return"]
    returns = np.where(np.isfinite(returns), returns.clip(-LARGEST, LARGEST), np.nan)
    known = np.flatnonzero(np.isfinite(returns))
    if len(known) < 2:
        return {}

    is_density = len(known) > _MAX_POINTS
    points = known
    traces = []
    if is_density:
        points = known[np.argsort(-survey.oddness[known], kind="stable")[:NUM_ODD]]
        traces.append(_density(lengths[known], returns[known]))
    texts = []
    for number in points.tolist():
        texts.append(f"trajectory {number}, oddest in {plotly_text(survey.oddest[number])}")
    symbol = "circle-open" if is_density else "circle"
    traces.append(
        {
            "type": "scatter",
            "mode": "markers",
            "x": digits(lengths[points], 8),
            "y": digits(returns[points], 8),
            "text": texts,
            "hovertemplate": "%{text}<br>length %{x}, return %{y}<extra></extra>",
            "customdata": points.tolist(),
            "marker": {"color": "@1", "size": 7, "symbol": symbol, "opacity": 0.8},
            "name": "oddest" if is_density else "episodes",
        }
    )
    title = "Length against return"
    label = f"{title} of {len(known):,} episodes; a click on a point opens the episode"
    return _figure(title, label, traces, ("frames", "sum of rewards"), {"showlegend": False})


def _density(x: Array, y: Array) -> Figure:
    """Build a heat map of the logarithm of point counts. Empty cells are transparent."""
    counts, x_edges, y_edges = np.histogram2d(x, y, (_NUM_BINS, _NUM_BINS))
    # The logarithm of 1 is 0, the colour of the background. The offset of 0.3 makes a cell with a
    # single episode visible.
    logarithms = np.log10(np.maximum(counts, 1)) + 0.3
    levels = np.where(counts > 0, logarithms, np.nan).T
    return {
        "type": "heatmap",
        "x": _centers(x_edges),
        "y": _centers(y_edges),
        "z": [digits(row) for row in levels],
        "colorscale": [[0, "@8"], [1, "@0"]],
        "showscale": False,
        "hoverinfo": "skip",
        "name": "density",
    }


def figures(survey: Survey) -> list[Figure]:
    """Build the charts of the recording, from top to bottom. Charts without data are left out."""
    candidates = (
        _by_group(survey, "Lengths", "frames", "length"),
        _by_group(survey, "Returns", "sum of rewards", "return"),
        length_against_return(survey),
    )
    drawn = []
    for place, figure in enumerate(candidates):
        if figure:
            drawn.append({**figure, "key": f"figure-{place}"})
    return drawn


def episode_marks(
    number: int,
    findings: Sequence[Mapping[str, Any]],
    table: Array,
) -> dict[str, Any]:
    """Build the marks in the plot of an episode: shaded frames of findings, and the end."""
    findings_at: dict[tuple[int, int], list[Mapping[str, Any]]] = {}
    for finding in findings:
        for place, start, stop in finding["frames"]:
            if place == number and stop > start:
                findings_at.setdefault((start, stop), []).append(finding)

    success = {1: ", success ✓", 0: ", failure ✗"}.get(int(table["success"][number]), "")
    end_text = f"end: {table['ends'][number]}{success}"
    above = {"y": 1, "yref": "paper", "yanchor": "bottom", "showarrow": False}
    last_frame = int(table["length"][number]) - 1
    notes = [{**above, "x": last_frame, "xanchor": "right", "text": end_text}]
    shapes = []
    for (start, stop), listed in findings_at.items():
        shapes.append(_shaded_frames(start, stop, listed[0]["severity"]))
        codes = ", ".join(dict.fromkeys(finding["code"] for finding in listed))
        notes.append({**above, "x": start, "xanchor": "left", "text": codes, "font": {"size": 11}})

    places = list(findings_at)
    return {
        "places": places,
        "start": places[0][0] if places else 0,
        "shapes": shapes,
        "annotations": notes[:9],
    }


def _shaded_frames(start: int, stop: int, severity: str) -> Figure:
    return {
        "type": "rect",
        "x0": start - 0.5,
        "x1": stop - 0.5,
        "y0": 0,
        "y1": 1,
        "yref": "paper",
        "fillcolor": "@0" if severity == "info" else "@1",
        "opacity": 0.25,
        "line": {"width": 0},
        "layer": "below",
    }
