"""The charts of the page as plotly takes them, from one table of figures.

One rule: names that a file gives are shown as text, never as the markup that plotly knows. A colour is "@" and its
place in the palette of the page, so that dark and light are the business of the page alone.
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
#: More episodes than this are drawn as a density, and only the oddest as points.
_MAX_POINTS, NUM_ODD = 400, 20
_NUM_BINS = 40
_MAX_GROUPS = 7
_MAX_NAME = 40
_PATTERNS = ("", "/", "x", ".", "-", "\\", "+")


def shown(text: str) -> str:
    """Return a name as plotly shows it literally, cut if it is long."""
    return html.escape(text if len(text) <= _MAX_NAME else text[: _MAX_NAME - 1] + "…", quote=False)


def groups_of(table: Array) -> tuple[str, dict[str, Array]]:
    """Divide episodes by task if there are a few, else by how they end: what by, and name -> bool `[episodes]`."""
    tasks = sorted(set(table["task"].tolist()))
    by, names = ("task", tasks) if 2 <= len(tasks) <= _MAX_GROUPS else ("ends", sorted(set(table["ends"].tolist())))
    return ("task" if by == "task" else "end"), {name or "(none)": table[by] == name for name in names}


def _edges(found: Array) -> Array:
    """Cut a range into bins, one for each number where these are a few whole ones."""
    low = float(found.min())
    high = float(found.max())
    if high - low < _NUM_BINS and bool((found == np.round(found)).all()):
        return np.arange(low - 0.5, high + 1)
    count = min(_NUM_BINS, max(8, len(found) // 4))
    return np.linspace(low, high, count + 1) if high > low else np.array([low - 0.5, low + 0.5])


def histogram(title: str, unit: str, groups: Mapping[str, Array], as_share: bool = False) -> Figure:
    """Draw values of several groups: stacked counts, or shares of each group over each other."""
    finite = {name: values[np.isfinite(values)].clip(-LARGEST, LARGEST) for name, values in groups.items()}
    found = np.concatenate(list(finite.values()) or [np.zeros(0)])
    if not len(found):
        return {}
    edges = _edges(found)
    traces = []
    centers = digits((edges[1:] + edges[:-1]) / 2, 8)
    for place, (name, values) in enumerate(finite.items()):
        heights = np.histogram(values, edges)[0] / (max(1, len(values)) if as_share else 1)
        pattern = {"shape": _PATTERNS[place % len(_PATTERNS)], "fillmode": "overlay", "fgopacity": 0.6, "size": 7}
        marker = {"color": f"@{place}", "pattern": pattern, "line": {"width": 0}}
        trace = {"type": "bar", "x": centers, "y": digits(heights), "name": shown(name), "marker": marker}
        traces.append({**trace, "opacity": 0.65 if as_share else 1})
    middle, low, high = (f"{value:,.6g}" for value in (np.median(found), found.min(), found.max()))
    label = f"{title}: {len(found):,} {'values' if as_share else 'episodes'} from {low} to {high}, median {middle}"
    layout = {"barmode": "overlay" if as_share else "stack", "bargap": 0.04, "showlegend": len(groups) > 1}
    return _figure(title, label, traces, (unit, "share" if as_share else "episodes"), layout)


def _figure(title: str, label: str, traces: list[Any], axes: tuple[str, str], layout: Mapping[str, Any]) -> Figure:
    named = {axis: {"title": {"text": text}} for axis, text in zip(("xaxis", "yaxis"), axes, strict=True)}
    return {"title": title, "label": label, "marks": [], "figure": {"traces": traces, "layout": {**named, **layout}}}


def _by_group(survey: Survey, title: str, unit: str, column: str) -> Figure:
    by, groups = groups_of(survey.table)
    values = survey.table[column].astype(np.float64)
    return histogram(f"{title} by {by}", unit, {name: values[chosen] for name, chosen in groups.items()})


def length_against_return(survey: Survey) -> Figure:
    """Each episode as a point, or their density with the oddest as points that open them."""
    x = survey.table["length"].astype(np.float64)
    y = survey.table["return"]
    y = np.where(np.isfinite(y), y.clip(-LARGEST, LARGEST), np.nan)
    known = np.flatnonzero(np.isfinite(y))
    if len(known) < 2:
        return {}
    points = known
    traces = list[Figure]()
    if len(known) > _MAX_POINTS:
        points = known[np.argsort(-survey.oddness[known], kind="stable")[:NUM_ODD]]
        counts, xs, ys = np.histogram2d(x[known], y[known], (_NUM_BINS, _NUM_BINS))
        drawn = np.where(counts > 0, np.log10(np.maximum(counts, 1)) + 0.3, np.nan).T
        middles = [digits((edges[1:] + edges[:-1]) / 2, 8) for edges in (xs, ys)]
        heat = {"type": "heatmap", "x": middles[0], "y": middles[1], "z": [digits(row) for row in drawn]}
        traces.append(
            {**heat, "colorscale": [[0, "@8"], [1, "@0"]], "showscale": False, "hoverinfo": "skip", "name": "density"}
        )
    marker = {"color": "@1", "size": 7, "symbol": "circle-open" if traces else "circle", "opacity": 0.8}
    texts = [f"trajectory {number}, oddest in {shown(survey.oddest[number])}" for number in points.tolist()]
    dots = {"type": "scatter", "mode": "markers", "x": digits(x[points], 8), "y": digits(y[points], 8), "text": texts}
    hover = {"hovertemplate": "%{text}<br>length %{x}, return %{y}<extra></extra>", "customdata": points.tolist()}
    traces.append({**dots, **hover, "marker": marker, "name": "oddest" if traces else "episodes"})
    label = f"Length against return of {len(known):,} episodes; a click on a point opens the episode"
    return _figure("Length against return", label, traces, ("frames", "sum of rewards"), {"showlegend": False})


def figures(survey: Survey) -> list[Figure]:
    """Draw what there is to draw, in reading order."""
    drawn = (
        _by_group(survey, "Lengths", "frames", "length"),
        _by_group(survey, "Returns", "sum of rewards", "return"),
        length_against_return(survey),
    )
    return [{**made, "key": f"figure-{place}"} for place, made in enumerate(drawn) if made]


def frames_of(number: int, findings: Sequence[Mapping[str, Any]], table: Array) -> dict[str, Any]:
    """What is marked in the curves of an episode: frames of findings, and its end."""
    spans: dict[tuple[int, int], list[Mapping[str, Any]]] = {}
    for one in findings:
        for place, start, stop in one["frames"]:
            if place == number and stop > start:
                spans.setdefault((start, stop), []).append(one)
    end = f"end: {table['ends'][number]}" + {1: ", success ✓", 0: ", failure ✗"}.get(int(table["success"][number]), "")
    over = {"y": 1, "yref": "paper", "yanchor": "bottom", "showarrow": False}
    notes = [{**over, "x": int(table["length"][number]) - 1, "xanchor": "right", "text": end}]
    shapes = []
    for (start, stop), listed in spans.items():
        color = "@0" if listed[0]["severity"] == "info" else "@1"
        span = {"type": "rect", "x0": start - 0.5, "x1": stop - 0.5, "y0": 0, "y1": 1, "yref": "paper"}
        shapes.append({**span, "fillcolor": color, "opacity": 0.25, "line": {"width": 0}, "layer": "below"})
        codes = ", ".join(dict.fromkeys(one["code"] for one in listed))
        notes.append({**over, "x": start, "xanchor": "left", "text": codes, "font": {"size": 11}})
    places = list(spans)
    return {"places": places, "start": places[0][0] if places else 0, "shapes": shapes, "annotations": notes[:9]}
