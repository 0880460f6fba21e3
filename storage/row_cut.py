"""From places to a nested dict of tensors: gather packed rows, cut them into fields; all of it decided beforehand.

One rule: nothing is looked up, sorted or compared per sample that could have been when the cut was made. A gather of
some hundred rows empties the processor's caches, after which each further call of Python takes a microsecond, and
these are most of what a small sample costs beyond its bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from .buffer_pool import BufferPool
from .row_layout import Group, Part
from .tree import unflatten

#: `[n, width]` as they were gathered: an array on the CPU, a tensor elsewhere.
Rows = Any
#: From so many bytes on rows come from a pool: the C allocator may map and unmap such blocks each time, which made a
#: sample of 256 rows 10 times slower where other libraries had shaped its heap.
MIN_POOLED_ROWS = 128 * 1024
#: What rows move as.
_UNITS: dict[torch.dtype, np.dtype[Any]] = {
    torch.float32: np.dtype("f4"),
    torch.int32: np.dtype("i4"),
    torch.uint8: np.dtype("u1"),
}
#: What is gathered before the same is gathered again a row later: a good half of a processor's own cache.
_TURN_BYTES = 3 << 19
#: What stands in for bfloat16, which numpy does not know.
_BITS = np.dtype("<i2")


class Target(NamedTuple):
    """A field that is wanted: of the first (0) or the second (1) of two rows side by side; its name in the result."""

    row: int
    field: str
    name: str


class _Step(NamedTuple):
    """One leaf of the result, or (`view` below 0) one more dict."""

    #: Which dict it goes into, and as what.
    node: int
    key: str
    #: Which of the views it is cut from, which part of it, and what makes it a tensor.
    view: int = -1
    part: Any = None
    make: Callable[[npt.NDArray[Any]], torch.Tensor] = torch.from_numpy


class RowCut:
    """How gathered rows of some groups become a nested dict of fields, which share the rows' memory.

    Args:
        groups: What lies side by side; the rows of each come apart.
        targets: What is wanted, in the order of the result; of two with one name the later one counts.
        contiguous: Whether the fields are copied out of the rows instead.
        nested: Whether "a/b" is given as `{"a": {"b": ...}}`.
        device: Where the rows are.
        apart: Whether second rows are handed in as arrays of their own, behind those of all groups, instead of
            side by side with the first ones.

    Attributes:
        targets: What is wanted, each name once.
        wanted: For each group, whether first and whether second rows are wanted.
        lengths: For each group, how many consecutive rows are wanted side by side: 0, 1 or 2.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        targets: Sequence[Target],
        contiguous: bool = False,
        nested: bool = True,
        device: torch.device | str = "cpu",
        apart: bool = False,
    ) -> None:
        self._groups, self._contiguous, self._nested, self._apart = groups, contiguous, nested, apart
        self.targets = list({target.name: target for target in targets}.values())
        found = {part.field.name: (place, part) for place, group in enumerate(groups) for part in group.parts}
        asked = {(found[target.field][0], target.row) for target in self.targets}
        self.wanted = [((place, 0) in asked, (place, 1) in asked) for place in range(len(groups))]
        self.lengths = [2 if following else int(own) for own, following in self.wanted]
        #: Of which group, and as which dtype, rows are seen.
        self._views: list[tuple[int, np.dtype[Any]]] = []
        self._steps: list[_Step] = []
        self._is_on_cpu = torch.device(device).type == "cpu"
        if self._is_on_cpu:
            self._plan(found)

    def __call__(self, rows: Sequence[Rows]) -> dict[str, Any]:
        """Cut `[n, width]` rows, one of each group (None where nothing is wanted)."""
        if not self._is_on_cpu:
            return self._by_torch(rows)
        views = [rows[place].view(dtype) for place, dtype in self._views]
        nodes: list[dict[str, Any]] = [{}]
        for node, key, view, part, make in self._steps:
            if view >= 0:
                nodes[node][key] = make(views[view][part])
            else:
                nodes.append({})
                nodes[node][key] = nodes[-1]
        return nodes[0]

    def _plan(self, found: dict[str, tuple[int, Part]]) -> None:
        """List the steps that `__call__` takes."""
        if self._nested:
            unflatten(dict.fromkeys((target.name for target in self.targets), 0))  # raises where names clash
        nodes: dict[tuple[str, ...], int] = {(): 0}
        for target in self.targets:
            *parents, last = target.name.split("/") if self._nested else [target.name]
            for depth in range(len(parents)):
                path = tuple(parents[: depth + 1])
                if path not in nodes:
                    self._steps.append(_Step(nodes[path[:-1]], path[-1]))
                    nodes[path] = len(nodes)
            place, part = found[target.field]
            start = part.start
            if target.row and self._apart:
                place += len(self._groups)
            elif target.row:
                start += self._groups[place].row_bytes
            is_bfloat16 = part.field.dtype == "bfloat16"
            dtype = _BITS if is_bfloat16 else part.field.numpy_dtype
            if (place, dtype) not in self._views:
                self._views.append((place, dtype))
            view = self._views.index((place, dtype))
            first = start // dtype.itemsize
            columns = (slice(None), slice(first, first + part.field.num_elements))
            make = _maker(part.field.shape, is_bfloat16, self._contiguous)
            self._steps.append(_Step(nodes[tuple(parents)], last, view, columns, make))

    def _by_torch(self, rows: Sequence[Rows]) -> dict[str, Any]:
        """Do the same on a device."""
        found: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]] = ({}, {})
        names = [[target.field for target in self.targets if target.row == row] for row in (0, 1)]
        for place, (group, wanted) in enumerate(zip(self._groups, self.wanted, strict=True)):
            if wanted[1] and not self._apart:
                parts = group.pair_views(rows[place], names[1], self._contiguous)
                found[0].update(parts[0])
                found[1].update(parts[1])
                continue
            for row in (0, 1):
                if wanted[row]:
                    moved = rows[place + row * len(self._groups)]
                    found[row].update(group.views(moved, self._contiguous, names[row]))
        flat = {target.name: found[target.row][target.field] for target in self.targets}
        return unflatten(flat) if self._nested else flat


def _maker(shape: tuple[int, ...], is_bfloat16: bool, contiguous: bool) -> Callable[[npt.NDArray[Any]], torch.Tensor]:
    """Give what turns `[n, elements]` of rows into a tensor `[n, *shape]`."""
    is_plain = len(shape) == 1 and not is_bfloat16 and not contiguous
    return torch.from_numpy if is_plain else partial(_made, shape, is_bfloat16, contiguous)


def _made(shape: tuple[int, ...], is_bfloat16: bool, contiguous: bool, part: npt.NDArray[Any]) -> torch.Tensor:
    part = part.reshape(len(part), *shape)
    leaf = torch.from_numpy(np.ascontiguousarray(part) if contiguous else part)
    return leaf.view(torch.bfloat16) if is_bfloat16 else leaf


def gather_rows(source: torch.Tensor, places: torch.Tensor, pool: BufferPool) -> Rows:
    """Copy `[len(places), width]` rows of `source` into memory of `pool`; on a device, into a new tensor."""
    if source.device.type != "cpu":
        return torch.index_select(source, 0, places)
    rows = pool.array((places.shape[0], source.shape[1]), _UNITS[source.dtype], MIN_POOLED_ROWS)
    torch.index_select(source, 0, places, out=torch.from_numpy(rows))
    return rows


def gather_near(source: torch.Tensor, places: Sequence[torch.Tensor], pool: BufferPool) -> list[Rows]:
    """Do what `gather_rows` does for several lists of places, of which those at one position lie near each other.

    They are gathered in turns of so many rows as stay in a processor's cache, so that memory is waited for once.
    """
    num_rows, per_turn = len(places[0]), max(1, _TURN_BYTES // (source.shape[1] * source.element_size()))
    if num_rows <= per_turn or len(places) == 1 or source.device.type != "cpu":
        return [gather_rows(source, one, pool) for one in places]
    found = [pool.array((num_rows, source.shape[1]), _UNITS[source.dtype], MIN_POOLED_ROWS) for _ in places]
    outs = [torch.from_numpy(rows) for rows in found]
    for first in range(0, num_rows, per_turn):
        turn = slice(first, first + per_turn)
        for place, out in zip(places, outs, strict=True):
            torch.index_select(source, 0, place[turn], out=out[turn])
    return found
