"""Which fields a window has, which frames of each, and what has to be read for them.

One rule: decided once, when a dataset is opened; a batch is then a few table look-ups. Fields that
stand side by side in one row are read together.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from storage.errors import MissingFieldError, UsageError, nearest

from ..format.schema import RowLayout
from ..index.index import Int64s
from .index import WindowShape

#: Fields that are not stored: they follow from where a trajectory ends, and how.
DONE, TIMEOUT = "done", "timeout"
FLAGS = (DONE, TIMEOUT)
#: Groups of fields whose true last row may be recorded.
OBSERVATIONS = ("observation", "privileged_observation")
NEXT = "next_"
#: The greatest distance of two frames of a window, or of two windows.
MAX_FRAMES = (1 << 31) - 1


@dataclass(frozen=True, eq=False)
class WindowField:
    """One tensor of a batch of windows.

    Attributes:
        name: Name in the batch, levels joined by "/".
        sources: The field that is read, or the components that are joined, in the order of the schema.
        deltas: int64 `[L]`, frames relative to the anchor.
        rows: For each source, which of the rows that are read of its column: a slice, or int64 `[L]`. Flags have none.
        is_next: It is a next observation.
        is_joined: Components are joined along the last axis, even if there is only one.
    """

    name: str
    sources: tuple[str, ...]
    deltas: Int64s
    rows: tuple[Any, ...]
    is_next: bool
    is_joined: bool

    @cached_property
    def reach(self) -> tuple[int, int]:
        """The least and the greatest delta."""
        return int(self.deltas.min()), int(self.deltas.max())


@dataclass(frozen=True, eq=False)
class WindowPlan:
    """What a batch of windows is made of.

    Attributes:
        fields: In the order of the schema, then flags, then next observations.
        shapes: Frames to read; columns that need the same ones share one.
        columns: Column -> position in `shapes`.
    """

    fields: tuple[WindowField, ...]
    shapes: tuple[WindowShape, ...]
    columns: Mapping[str, int]

    @property
    def reach(self) -> tuple[int, int]:
        """The least and the greatest delta of fields that are not next observations."""
        ends = [field.reach for field in self.fields if not field.is_next]
        return min(low for low, _ in ends), max(high for _, high in ends)


def plan_windows(
    layout: RowLayout,
    length: int,
    delta: Mapping[str, Int64s] | None,
    fields: Sequence[str] | None,
    next_observations: bool,
    flatten_observations: bool = False,
) -> WindowPlan:
    """Plan windows.

    Args:
        layout: The fields that are stored.
        length: Fields without an entry in `delta` have the frames `0 .. length - 1` from the anchor on.
        delta: Field, or what its name begins with ("observation") -> frames relative to the anchor.
        fields: Names, or what they begin with; None is all.
        next_observations: Add `next_observation` and `next_privileged_observation` of the observations chosen.
        flatten_observations: Join the components of each of them.

    Raises:
        MissingFieldError: A name is not a field.
        UsageError: No field is left, no observation where the next ones are wanted, or components are to be joined
            that have other frames.
    """
    known = [*layout.schema, *(flag for flag in FLAGS if flag not in layout.schema)]
    given = delta or {}
    for name in given:
        _below(name, known, "shift the field")
    chosen = set(known) if fields is None else {one for name in _listed(fields) for one in _below(name, known)}
    names = [name for name in known if name in chosen]
    if not names:
        raise UsageError("read windows", "", f"some of the fields {', '.join(known)}", "none")
    wanted = [("", name, _deltas_of(name, given, length)) for name in names]
    if next_observations:
        nexts = [(NEXT, name, deltas + 1) for _, name, deltas in wanted if _is_observation(name, layout)]
        if not nexts:
            raise UsageError("read next observations", "", "an observation among the fields", ", ".join(names))
        wanted += nexts
    shapes, columns = _shapes(layout, wanted)
    found: dict[str, WindowField] = {}
    for prefix, source, deltas in wanted:
        group, *component = source.split("/")
        is_joined = flatten_observations and bool(component) and group in OBSERVATIONS
        name = prefix + (group if is_joined else source)
        rows: tuple[Any, ...] = ()
        if source in layout.schema:
            rows = (_rows(deltas, shapes[columns[layout.column_of[source].name]].deltas),)
        first = found.get(name)
        if first is None:
            found[name] = WindowField(name, (source,), deltas, rows, bool(prefix), is_joined)
        elif np.array_equal(deltas, first.deltas):
            found[name] = replace(first, sources=(*first.sources, source), rows=first.rows + rows)
        else:
            got = f"{deltas.tolist()}, and {first.deltas.tolist()} of {first.sources[0]!r}"
            raise UsageError("join the component", repr(source), "the same frames of all components", got)
    return WindowPlan(tuple(found.values()), shapes, columns)


def _is_observation(name: str, layout: RowLayout) -> bool:
    return name.split("/")[0] in OBSERVATIONS and name in layout.schema


def _shapes(
    layout: RowLayout, wanted: Sequence[tuple[str, str, Int64s]]
) -> tuple[tuple[WindowShape, ...], dict[str, int]]:
    """Which frames are read of each column; see `WindowPlan`."""
    needed: dict[str, list[int]] = {}
    for _, source, deltas in wanted:
        if source in layout.schema:
            needed.setdefault(layout.column_of[source].name, []).extend(deltas.tolist())
    shapes: dict[bytes, WindowShape] = {}
    columns = {}
    for name, deltas_of_column in needed.items():
        shape = WindowShape.of(deltas_of_column, fills_gaps=not layout.columns[name].is_coded)
        shapes.setdefault(shape.deltas.tobytes(), shape)
        columns[name] = list(shapes).index(shape.deltas.tobytes())
    return tuple(shapes.values()), columns


def _rows(deltas: Int64s, read: Int64s) -> slice | torch.Tensor:
    """Where `deltas` stand among those that are `read`: a slice where that is possible."""
    places = np.searchsorted(read, deltas)
    steps = np.diff(places)
    if not len(steps):
        return slice(int(places[0]), int(places[0]) + 1)
    if (steps == steps[0]).all() and steps[0] > 0:
        return slice(int(places[0]), int(places[-1]) + 1, int(steps[0]))
    return torch.from_numpy(places.astype(np.int64))


def _listed(fields: Sequence[str]) -> list[str]:
    if isinstance(fields, str) or not all(isinstance(name, str) for name in fields):
        raise UsageError("choose fields", "", "a list of names", repr(fields))
    return list(fields)


def _below(name: str, known: Sequence[str], action: str = "read the field") -> list[str]:
    """Fields called `name` or `name/...`."""
    found = [one for one in known if one == name or one.startswith(f"{name}/")]
    if not found:
        groups = {one.split("/")[0] for one in known}
        raise MissingFieldError(action, repr(name), nearest(name, {*known, *groups}), "no such field")
    return found


def _deltas_of(name: str, given: Mapping[str, Int64s], length: int) -> Int64s:
    """The deltas of the longest entry that the name begins with."""
    parts = name.split("/")
    for size in range(len(parts), 0, -1):
        found = given.get("/".join(parts[:size]))
        if found is not None:
            return found
    return np.arange(length)


def checked_delta(delta: Mapping[str, Iterable[int]] | None) -> dict[str, Int64s] | None:
    """Give lists of frames relative to the anchor as int64 `[L]` each.

    Raises:
        UsageError: There is no list for each field, or one is empty or has something else than whole numbers.
    """
    if delta is None:
        return None
    if not isinstance(delta, Mapping) or not all(isinstance(name, str) for name in delta):
        raise UsageError("shift fields", "", "a dict of fields and their lists of whole numbers", repr(delta))
    checked = {}
    for name, values in delta.items():
        try:
            listed = [operator.index(value) for value in values]
        except TypeError:
            raise UsageError("shift the field", repr(name), "a list of whole numbers", repr(values)) from None
        if not listed or max(map(abs, listed)) > MAX_FRAMES:
            raise UsageError("shift the field", repr(name), f"at least one number, up to {MAX_FRAMES}", repr(values))
        checked[name] = np.array(listed, np.int64)
    return checked
