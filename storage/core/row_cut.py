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

from .buffer_pool import BufferPool, Reused
from .modes import lasting
from .row_layout import Group, Part
from .tree import unflatten

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
_BYTES = np.dtype("u1")
#: So many sizes of samples have memory ready for them, of each group; larger ones than this share that of the pool, as
#: beside them to make it ready is next to nothing.
_MAX_READY, _MAX_READY_BYTES = 8, 4 << 20

#: What memory is for: the place of a cut, how many rows of which width and dtype, and the width as which they are cut.
_Key = tuple[int, int, int, torch.dtype, int]


class Rows(NamedTuple):
    """Rows of one group.

    Attributes:
        tensor: As they were gathered: `[n, width]`, each a row, two side by side or a window.
        leaves: The fields that are cut from them, `[rows, *shape]`, which share their memory; on the CPU as arrays.
        array: `tensor` as an array, where it is to be filled.
    """

    tensor: torch.Tensor
    leaves: list[Any]
    array: npt.NDArray[Any] | None = None

    def fill(self, source: torch.Tensor, index: torch.Tensor) -> None:
        """Copy rows `index` of `source`, `[any, width]`."""
        array = self.array
        if array is None or array.nbytes >= MIN_POOLED_ROWS or not source.is_contiguous():
            torch.index_select(source, 0, index, out=self.tensor)
        else:  # few rows: numpy starts sooner and waits less for each; but for "clip" it would fill a copy first
            source.numpy().take(index.numpy(), 0, array, "clip")


class Target(NamedTuple):
    """A field that is wanted: of the first (0) or the second (1) of two rows side by side; its name in the result."""

    row: int
    field: str
    name: str


class _Step(NamedTuple):
    """One leaf of the result, or (`place` below 0) one more dict."""

    #: Which dict it goes into, and as what.
    node: int
    key: str
    #: Which rows it is cut from, which of their leaves it is, and what makes it a tensor.
    place: int = -1
    leaf: int = 0
    make: Callable[[Any], torch.Tensor] = torch.from_numpy


class _Leaf(NamedTuple):
    """Where a field stands in rows, in items of its dtype, and its shape and strides."""

    dtype: Any
    first: int
    last: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class RowCut:
    """How rows of some groups are gathered, and become a nested dict of fields that share their memory.

    Args:
        groups: What lies side by side; the rows of each come apart.
        targets: What is wanted, in the order of the result; of two with one name the later one counts.
        contiguous: Whether the fields are copied out of the rows instead.
        nested: Whether "a/b" is given as `{"a": {"b": ...}}`.
        device: Where the rows are.
        apart: Whether second rows are gathered on their own, and stand behind those of all groups, instead of side by
            side with the first ones.
        pool: Where memory comes from.

    Attributes:
        targets: What is wanted, each name once.
        wanted: For each group, whether first and whether second rows are wanted.
        widths: For each group, how much is wanted from the start of a row on, in its units; without `apart` more than
            a row where the next is wanted too, up to the last field of that.
        reach: How many rows behind each other are wanted, 1 or 2.

    What it gathers lies in memory that is used again when nobody holds a field of it any more. It is called, from
    the gathering to the cutting, under the lock of what it gathers from.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        targets: Sequence[Target],
        contiguous: bool = False,
        nested: bool = True,
        device: torch.device | str = "cpu",
        apart: bool = False,
        pool: BufferPool | None = None,
    ) -> None:
        self._groups, self._contiguous, self._nested, self._apart = groups, contiguous, nested, apart
        self._pool = BufferPool() if pool is None else pool
        self._is_on_cpu = torch.device(device).type == "cpu"
        self.targets = list({target.name: target for target in targets}.values())
        found = {part.field.name: (place, part) for place, group in enumerate(groups) for part in group.parts}
        asked = {(found[target.field][0], target.row) for target in self.targets}
        self.wanted = [((place, 0) in asked, (place, 1) in asked) for place in range(len(groups))]
        self.reach = 1 + any(following for _, following in self.wanted)
        self.widths = [self._width(place, found) for place in range(len(groups))]
        #: What is cut from rows: those of each group, then, with `apart`, the second ones of each.
        self._leaves: list[list[_Leaf]] = [[] for _ in range(2 * len(groups))]
        self._steps: list[_Step] = []
        #: What was asked for last of each group, and the memory that is ready for what was asked for twice.
        self._last: dict[int, _Key] = {}
        self._ready: dict[_Key, Reused[Rows]] = {}
        self._plan(found)

    def __call__(self, rows: Sequence[Rows | None]) -> dict[str, Any]:
        """Cut rows of all groups, and, with `apart`, second rows of all; None where nothing is wanted."""
        leaves = [() if one is None else one.leaves for one in rows]
        nodes: list[dict[str, Any]] = [{}]
        for node, key, place, leaf, make in self._steps:
            if place >= 0:
                nodes[node][key] = make(leaves[place][leaf])
            else:
                nodes.append({})
                nodes[node][key] = nodes[-1]
        return nodes[0]

    def seen(self, place: int, rows: torch.Tensor) -> Rows:
        """Take rows `[n, width]` that were gathered elsewhere."""
        return Rows(rows, self._leaves_of(place, rows.numpy() if self._is_on_cpu else rows))

    def gather(self, place: int, source: torch.Tensor, index: torch.Tensor) -> Rows:
        """Copy rows of `source`, `[n, width]`, which sees a group's memory; on a device into a new tensor."""
        if not self._is_on_cpu:
            return self.seen(place, torch.index_select(source, 0, index))
        rows = self.room(place, index.shape[0], source, source.shape[1])
        rows.fill(source, index)
        return rows

    def gather_near(
        self, places: Sequence[int], sources: Sequence[torch.Tensor], starts: Sequence[torch.Tensor]
    ) -> list[Rows]:
        """Copy windows, rows of `sources`, for several lists of starts; those at one position lie near each other.

        They are gathered in turns of so many as stay in a processor's cache, so that memory is waited for once.

        Args:
            places: Whether a list is for first rows (the group's number) or for second ones (behind all groups).
            sources: For each list, a group's memory, `[n, length * width]`.
            starts: Indices into it.
        """
        num = starts[0].shape[0]
        width = self._groups[places[0] % len(self._groups)].width
        if not self._is_on_cpu:
            lists = zip(places, sources, starts, strict=True)
            return [self.seen(place, source.index_select(0, start).view(-1, width)) for place, source, start in lists]
        rows = [self.room(place, num, source, width) for place, source in zip(places, sources, strict=True)]
        per_turn = num if len(starts) == 1 else max(1, _TURN_BYTES // (sources[0].shape[1] * sources[0].element_size()))
        if num <= per_turn:
            for source, start, one in zip(sources, starts, rows, strict=True):
                one.fill(source, start)
            return rows
        for first in range(0, num, per_turn):
            turn = slice(first, first + per_turn)
            for source, start, one in zip(sources, starts, rows, strict=True):
                torch.index_select(source, 0, start[turn], out=one.tensor[turn])
        return rows

    def room(self, place: int, num: int, source: torch.Tensor, row_width: int) -> Rows:
        """Give memory for `num` rows of `source` on the CPU, seen as rows of `row_width`."""
        key = place, num, source.shape[1], source.dtype, row_width
        ready = self._ready.get(key)
        if ready is not None:
            return ready.take()
        unit = _UNITS[source.dtype]
        make, num_bytes = partial(self._room, key, unit), num * source.shape[1] * unit.itemsize
        # What is asked for only once shares the memory of the pool.
        if key != self._last.get(place) or num_bytes > _MAX_READY_BYTES:
            self._last[place] = key
            return make(self._pool.array((num_bytes,), _BYTES, MIN_POOLED_ROWS))[0]
        if len(self._ready) >= _MAX_READY * len(self._leaves):
            del self._ready[next(iter(self._ready))]
        ready = self._ready[key] = Reused(num_bytes, make)
        return ready.take()

    @lasting
    def _room(
        self, key: _Key, unit: np.dtype[Any], memory: npt.NDArray[np.uint8]
    ) -> tuple[Rows, list[npt.NDArray[Any]]]:
        place, num, width, _, row_width = key
        array = memory.view(unit).reshape(num, width)
        rows = Rows(torch.from_numpy(array), self._leaves_of(place, array.reshape(-1, row_width)), array)
        return rows, rows.leaves

    def _leaves_of(self, place: int, rows: Any) -> list[Any]:
        """See `[n, width]` rows, an array or a tensor, as the fields that are cut from them."""
        views = {leaf.dtype: rows.view(leaf.dtype) for leaf in self._leaves[place]}
        if isinstance(rows, torch.Tensor):  # in a third of the time of a slice and another shape of it
            return [
                view.as_strided((len(rows), *leaf.shape), (view.stride(0), *leaf.strides), leaf.first)
                for leaf, view in ((leaf, views[leaf.dtype]) for leaf in self._leaves[place])
            ]
        return [
            views[leaf.dtype][:, leaf.first : leaf.last].reshape(len(rows), *leaf.shape) for leaf in self._leaves[place]
        ]

    def _width(self, place: int, found: dict[str, tuple[int, Part]]) -> int:
        """Say how much of a row, and of the one behind it, is wanted."""
        group, (own, following) = self._groups[place], self.wanted[place]
        if self._apart or not following:
            return group.width if own or following else 0
        parts = (found[target.field] for target in self.targets if target.row)
        stop = max(part.stop for at, part in parts if at == place)
        # As each of the dtypes, rows have a whole number of items.
        largest = max(group.unit.itemsize, *(part.field.numpy_dtype.itemsize for part in group.parts))
        return group.width + -(-stop // largest) * largest // group.unit.itemsize

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
            is_bits = self._is_on_cpu and part.field.dtype == "bfloat16"
            dtype = _BITS if is_bits else part.field.numpy_dtype if self._is_on_cpu else part.field.torch_dtype
            first, leaves = start // dtype.itemsize, self._leaves[place]
            strides = torch.empty(part.field.shape, device="meta").stride()
            leaves.append(_Leaf(dtype, first, first + part.field.num_elements, part.field.shape, strides))
            is_plain = self._is_on_cpu and not is_bits and not self._contiguous
            make = torch.from_numpy if is_plain else partial(_made, is_bits, self._contiguous)
            self._steps.append(_Step(nodes[tuple(parents)], last, place, len(leaves) - 1, make))


def _made(is_bits: bool, contiguous: bool, leaf: Any) -> torch.Tensor:
    if isinstance(leaf, torch.Tensor):
        found = leaf.data  # a tensor of its own: it may be changed in place, also by something that has gradients
        return found.contiguous() if contiguous else found
    found = torch.from_numpy(np.ascontiguousarray(leaf) if contiguous else leaf)
    return found.view(torch.bfloat16) if is_bits else found
