"""`RingStore`: fields of rows in fixed memory; the newest rows overwrite the oldest.

Only this file wraps indices. The id of a row is its number since the creation or the last `clear`.
A lane and an id identify a row. Its slot is `id % num_slots`. It is live while `id >= total -
num_slots`. All lanes are written in lock-step, so that one `total` counts for all.

In memory the rows of a lane are consecutive, `[lanes, slots, row]`, so that a window is one piece.
Results are time first. Copies of the first `num_guards` slots follow the last slot, so that windows
of up to `num_guards + 1` rows are one piece across the end of the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..core import arguments
from ..core.fields import Schema
from ..core.memory import BufferPool, add_multiple, filled, lasting, sent_together, tensor_of
from ..core.packed_rows import Cut, Group, Target, lay_out
from ..core.records import names_below
from ..errors import UsageError

#: Bytes of a leaf from which torch copies it, with several threads. numpy needs less time to start.
_MIN_TORCH_BYTES = 256 * 1024
#: Number of remembered `Cut`s.
_MAX_CUTS = 8


class RingStore:
    """Memory for the live rows of some fields.

    Args:
        num_slots: Rows per lane.
        num_lanes: Streams that are written in lock-step.
        schema: The fields of a row.
        device: Device of the memory.
        num_guards: Rows that are stored twice, for windows across the end of the memory.
    """

    @lasting
    def __init__(
        self,
        num_slots: int,
        num_lanes: int,
        schema: Schema,
        device: torch.device | str = "cpu",
        num_guards: int = 1,
    ) -> None:
        self.num_slots = arguments.whole("create a ring", "num_slots", num_slots, 1)
        self.num_lanes = arguments.whole("create a ring", "num_lanes", num_lanes, 1)
        arguments.instance("create a ring", "schema", schema, "as a Schema", Schema)
        self.schema = schema
        self.names = tuple(schema)
        self.device = arguments.device("create a ring", "device", device)
        self.is_on_cpu = self.device.type == "cpu"
        self.num_guards = min(
            arguments.whole("create a ring", "num_guards", num_guards, 0), self.num_slots
        )
        #: Rows per lane that were ever written.
        self.total = 0
        self.groups: list[Group] = lay_out(schema)
        #: Rows of one lane in memory.
        self.stride = self.num_slots + self.num_guards
        self._pool = BufferPool(max(8, 2 * len(self.groups)))
        self._bases = [
            filled((self.num_lanes, self.stride, group.width), 0, group.unit, self.device)
            for group in self.groups
        ]
        self._units = [np.dtype(str(group.unit).removeprefix("torch.")) for group in self.groups]
        self._sources: dict[
            tuple[int, int, int], tuple[torch.Tensor, Callable[..., Any] | None]
        ] = {}
        self._cuts: dict[Any, Cut] = {}
        found: dict[str, torch.Tensor] = {}
        for group, base in zip(self.groups, self._bases, strict=True):
            found.update(group.views(base))
        #: `[lanes, stride, *event]`, and time first for writing; as arrays where numpy can.
        self._columns = {name: found[name] for name in schema}
        self._slots = [column.transpose(0, 1) for column in self._columns.values()]
        self._arrays: list[Any] = [_array(slots) for slots in self._slots]
        #: Whether arrays can be written: the memory is on the CPU, and numpy knows every dtype.
        self.takes_arrays = all(array is not None for array in self._arrays)
        self._row_arrays = [
            array[:, 0] if array is not None and self.num_lanes == 1 else array
            for array in self._arrays
        ]

    @property
    def num_live(self) -> int:
        """Live rows per lane."""
        return min(self.total, self.num_slots)

    @property
    def oldest(self) -> int:
        """Id of the oldest live row."""
        return self.total - self.num_live

    @property
    def cursor(self) -> int:
        """Slot of the next row."""
        return self.total % self.num_slots

    @property
    def num_bytes(self) -> int:
        """Reserved memory, in bytes."""
        return sum(base.numel() * base.element_size() for base in self._bases)

    def spans(self, num_rows: int) -> list[tuple[slice, slice]]:
        """Return the slots of the next `num_rows` rows; see the function `spans`."""
        return spans(self.total, num_rows, self.num_slots)

    def write(self, leaves: Sequence[Any]) -> None:
        """Write checked leaves, `[n, lanes, *event]` in the order of the schema.

        Of more than `num_slots` rows the last are kept. Leaves are tensors, or arrays if
        `takes_arrays`. Arrays for a ring of one lane are `[n, *event]`.
        """
        num_rows = len(leaves[0]) if leaves else 0
        if not self.is_on_cpu:
            leaves = sent_together(leaves, self.device)
        for slots, rows in self.spans(num_rows):
            parts = (
                leaves if rows.stop - rows.start == num_rows else [leaf[rows] for leaf in leaves]
            )
            if isinstance(parts[0], torch.Tensor):
                for column, array, part in zip(self._slots, self._arrays, parts, strict=True):
                    _write(column, array, slots, part)
            else:
                for array, part in zip(self._row_arrays, parts, strict=True):
                    array[slots] = part
            if slots.start < self.num_guards:
                self._copy_guards(slots.start, slots.stop)
        self.total += num_rows

    def clear(self) -> None:
        """Remove every row; keep the memory."""
        self.total = 0

    def slot(self, row_id: Any) -> Any:
        """Return the slot of an id, or the slots of a tensor of ids."""
        return row_id % self.num_slots

    def place(self, lane: Any, row_id: Any) -> Any:
        """Return the places of rows in memory, for `gather` and `windows`: tensors or arrays.

        With one lane `lane` may be None.
        """
        place = row_id % self.num_slots
        return place if self.num_lanes == 1 else add_multiple(place, lane, self.stride)

    def key(self, lane: torch.Tensor, row_id: torch.Tensor) -> torch.Tensor:
        """Return the keys of rows, `row_id * num_lanes + lane`: ordered by step, then by lane."""
        return row_id * self.num_lanes + lane

    def named(self, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the lanes and ids of rows from their keys: the inverse of `key`."""
        row_id = torch.div(keys, self.num_lanes, rounding_mode="floor")
        return keys - row_id * self.num_lanes, row_id

    def gather(
        self, places: torch.Tensor, contiguous: bool = False, nested: bool = False
    ) -> dict[str, Any]:
        """Copy rows: `[len(places), *event]` per field, views of one new tensor per group; by flat name, or nested."""
        return self.rows(places, self.cut_of(self.names, (), contiguous, nested))

    def cut_of(
        self,
        keys: tuple[str, ...],
        next_keys: tuple[str, ...],
        contiguous: bool = False,
        nested: bool = True,
        apart: bool = False,
    ) -> Cut:
        """Return the remembered plan of a copy: the fields of `keys`, and of `next_keys` one row later, below `next`.

        `windows` needs a plan made with `apart`, `rows` one without.
        """
        asked = keys, next_keys, contiguous, nested, apart
        found = self._cuts.get(asked)
        if found is None:
            targets = [
                Target(row, name, f"next/{name}" if row else name)
                for row, (argument, wanted) in enumerate(
                    (("output_key_t", keys), ("output_key_tp1", next_keys))
                )
                for key in wanted
                for name in names_below(self.schema, key, "sample windows", argument)
            ]
            if next_keys and not apart and not self.num_guards:
                raise UsageError(
                    "cut rows", "and those that follow", "a ring with guards", "one without"
                )
            if len(self._cuts) >= _MAX_CUTS:
                self._cuts.clear()
            found = self._cuts[asked] = Cut(
                self.groups, targets, contiguous, nested, apart, self.device
            )
        return found

    def rows(self, places: Any, cut: Cut) -> dict[str, Any]:
        """Copy the fields of rows at places, and of the rows that follow them; places are a result of `own`."""
        return cut(
            [
                self._take(place, width, 0, places) if width else None
                for place, width in enumerate(cut.widths)
            ]
        )

    def windows(
        self, places: Any, length: int, cut: Cut, never_wraps: bool = False
    ) -> dict[str, Any]:
        """Copy the fields of windows, and of the same windows one row later, `[len(places) * length, *event]`.

        Args:
            places: Places of the first rows: a tensor, or a result of `own`.
            length: Rows of a window.
            cut: Fields to copy, made with `apart`.
            never_wraps: Whether the caller knows that no window reaches across the end of the
                memory.
        """
        reach = length + cut.reach - 1
        starts = [places, places]
        is_one_piece = never_wraps or reach <= self.num_guards + 1
        if not is_one_piece:
            rows_of = self._unrolled(tensor_of(places), reach)
            starts = [rows_of[:, :length].flatten(), rows_of[:, reach - length :].flatten()]
        found: list[Any] = [None] * (2 * len(self.groups))
        for place, group in enumerate(self.groups):
            units = (length if is_one_piece else 1) * group.width
            for row in (0, 1):
                if cut.wanted[place][row]:
                    # An offset of the source takes less time than an addition to all places.
                    rows = self._take(place, units, row * is_one_piece, starts[row])
                    found[place + row * len(self.groups)] = rows.reshape(-1, group.width)
        return cut(found)

    def column(self, name: str) -> torch.Tensor:
        """Return a field as rows in memory order, `[lanes * stride, *event]`, sharing memory; `place` indexes it."""
        return self._columns[name].flatten(0, 1)

    def slots_view(self, name: str) -> torch.Tensor:
        """Return the slots of a field, `[num_slots, lanes, *event]`, sharing memory."""
        return self._columns[name][:, : self.num_slots].transpose(0, 1)

    def ids(self) -> torch.Tensor:
        """Return the live ids, oldest first: `[num_live]` int64."""
        return torch.arange(self.oldest, self.total, device=self.device)

    def put_slots(self, first: int, leaves: Mapping[str, torch.Tensor]) -> None:
        """Fill slots from `first` on; the caller sets `total`."""
        for name, leaf in leaves.items():
            self.slots_view(name)[first : first + len(leaf)].copy_(leaf)
            self._copy_guards(first, first + len(leaf))

    def check_valid(self) -> tuple[bool, str]:
        """Check the invariants: return (whether all hold, a description of the first that does not)."""
        for base in self._bases:
            guards = base[:, self.num_slots :].view(torch.uint8)
            written = min(self.num_live, self.num_guards)
            if not torch.equal(guards[:, :written], base[:, :written].view(torch.uint8)):
                return False, "the guards differ from the first slots"
        return (True, "") if self.total >= 0 else (False, "total is below 0")

    def _copy_guards(self, slot: int, stop: int) -> None:
        stop = min(stop, self.num_guards)
        if slot < stop:
            for base in self._bases:
                base[:, self.num_slots + slot : self.num_slots + stop] = base[:, slot:stop]

    def _unrolled(self, places: torch.Tensor, length: int) -> torch.Tensor:
        """Return the places of each window's rows, `[windows, length]`, also across the end of the memory."""
        lane = torch.div(places, self.stride, rounding_mode="floor") * self.stride
        steps = torch.arange(length, device=places.device)
        return ((places - lane).unsqueeze(1) + steps) % self.num_slots + lane.unsqueeze(1)

    def _take(self, place: int, units: int, skipped: int, index: Any) -> Any:
        """Copy pieces of `units` units of a group that start `skipped` rows after the rows at `index`: `[n, units]`.

        On the CPU the result is an array: numpy needs less time to start. It copies pieces, which
        may overlap, as single items. Large results are in pooled memory.
        """
        source, items = self._sources.get((place, units, skipped)) or self._source(
            place, units, skipped
        )
        num_rows = index.shape[0]
        if items is None:
            return source.index_select(0, index)
        if num_rows * units * source.itemsize < _MIN_TORCH_BYTES:
            found = items(index if isinstance(index, np.ndarray) else index.numpy())
            return found.view(self._units[place]).reshape(num_rows, units)
        out = self._pool.empty((num_rows, units), source.dtype)
        return torch.index_select(source, 0, tensor_of(index), out=out).numpy()

    def _source(
        self, place: int, units: int, skipped: int
    ) -> tuple[torch.Tensor, Callable[..., Any] | None]:
        """Return overlapping pieces of a group, `[num, units]`, and on the CPU the function that copies some."""
        group = self.groups[place]
        base = self._bases[place]
        num_rows = self.num_lanes * self.stride - -(-units // group.width) + 1 - skipped
        tensor = base.as_strided((num_rows, units), (group.width, 1), skipped * group.width)
        items = None
        if self.is_on_cpu:
            item = np.dtype((np.void, units * group.unit.itemsize))
            memory = base.view(torch.uint8).numpy()
            skipped_bytes = skipped * group.row_bytes
            pieces: Any = np.ndarray((num_rows,), item, memory, skipped_bytes, (group.row_bytes,))
            # `take` would first copy pieces that are not contiguous.
            items = pieces.take if units == group.width else pieces.__getitem__
        self._sources[place, units, skipped] = tensor, items
        return tensor, items


def spans(first: int, num_rows: int, num_slots: int) -> list[tuple[slice, slice]]:
    """Return (slots, rows) pairs for rows from id `first` on: two pairs where the ring closes.

    Of more than `num_slots` rows the last are kept.
    """
    slot = first % num_slots
    if slot + num_rows <= num_slots:  # The common case.
        return [(slice(slot, slot + num_rows), slice(0, num_rows))]
    found = []
    start = max(0, num_rows - num_slots)
    while start < num_rows:
        slot = (first + start) % num_slots
        count = min(num_rows - start, num_slots - slot)
        found.append((slice(slot, slot + count), slice(start, start + count)))
        start += count
    return found


def cells(keys: Any, num_slots: int, num_lanes: int) -> Any:
    """Return the cells of rows with these keys, among `num_lanes * num_slots` lane by lane: a tensor or an array."""
    return (
        keys % num_slots
        if num_lanes == 1
        else keys % num_lanes * num_slots + keys // num_lanes % num_slots
    )


def keys_in(places: Any, total: int, num_slots: int, num_lanes: int) -> Any:
    """Return the keys of the rows in cells after `total` writes; below 0 in cells that were never written."""
    cursor = total % num_slots
    slots = places if num_lanes == 1 else places % num_slots
    ids = slots + (total - cursor) - num_slots * (slots >= cursor)
    return ids if num_lanes == 1 else ids * num_lanes + places // num_slots


def _array(slots: torch.Tensor) -> npt.NDArray[Any] | None:
    return None if slots.device.type != "cpu" or slots.dtype is torch.bfloat16 else slots.numpy()


def _write(
    column: torch.Tensor, array: npt.NDArray[Any] | None, slots: slice, leaf: torch.Tensor
) -> None:
    """Write `[n, lanes, *event]` into slots of a column that is seen time first."""
    is_small = (
        leaf.device.type == "cpu" and leaf.dtype is column.dtype and leaf.nbytes < _MIN_TORCH_BYTES
    )
    if array is not None and is_small:
        array[slots] = leaf.numpy()
    else:
        column[slots].copy_(leaf, non_blocking=leaf.device.type == "cuda")
