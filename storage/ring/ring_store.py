"""`RingStore`: ring of rows in fixed memory. The newest rows overwrite the oldest.

Only this file computes slots modulo `num_slots`. The id of a row counts the rows of its lane since
the creation or the last `clear`. A lane and an id identify a row. The slot of a row is
`id % num_slots`. A row is live while `id >= total - num_slots`. All lanes are written in lock-step,
so one `total` is valid for every lane.

The rows of a lane are consecutive in memory, `[lanes, slots, row]`, so that a window (consecutive
rows of a lane) is one contiguous piece. Results are time first. Guards are copies of the first
`num_guards` slots. They follow the last slot. A window of up to `num_guards + 1` rows that crosses
the last slot is therefore contiguous too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..core import arguments
from ..core.fields import Schema
from ..core.lru_cache import LruCache
from ..core.memory import BufferPool, add_multiple, filled, lasting, sent_together, tensor_of
from ..core.packed_rows import Cut, Group, Target, lay_out
from ..core.records import names_below
from ..errors import UsageError

#: Size in bytes from which a leaf is copied by torch, with several threads. numpy copies smaller
#: leaves with less overhead.
_MIN_TORCH_BYTES = 256 * 1024
#: Maximum number of cached plans (`Cut`) that list the fields to copy from sampled rows.
_MAX_CUTS = 8


class RingStore:
    """Memory for the live rows of a schema.

    Args:
        num_slots: Capacity in rows per lane.
        num_lanes: Number of lanes (streams that are written in lock-step).
        schema: Fields of a row.
        device: Device of the memory.
        num_guards: Number of rows per lane that are stored twice, for windows across the end.
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
        self.num_slots = arguments.whole("num_slots", num_slots, 1)
        self.num_lanes = arguments.whole("num_lanes", num_lanes, 1)
        arguments.instance("schema", schema, "a Schema", Schema)
        self.schema = schema
        self.names = tuple(schema)
        self.device = arguments.device("device", device)
        self.is_on_cpu = self.device.type == "cpu"
        self.num_guards = min(arguments.whole("num_guards", num_guards, 0), self.num_slots)
        #: Number of rows per lane that were written since the creation or the last `clear`.
        self.total = 0
        self.groups: list[Group] = lay_out(schema)
        #: Rows of memory per lane: slots and guards.
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
        self._cuts: LruCache[Any, Cut] = LruCache(_MAX_CUTS)
        columns: dict[str, torch.Tensor] = {}
        for group, base in zip(self.groups, self._bases, strict=True):
            columns.update(group.views(base))
        #: Memory of each field, `[lanes, stride, *event]`. `_slots` are its views, time first.
        #: `_arrays` are these views as numpy arrays, None for dtypes that numpy lacks.
        self._columns = {name: columns[name] for name in schema}
        self._flat_columns = {name: columns[name].flatten(0, 1) for name in schema}
        self._slots = [column.transpose(0, 1) for column in self._columns.values()]
        self._arrays: list[Any] = [_array(slots) for slots in self._slots]
        #: Whether `write` accepts arrays: the memory is on the CPU, and numpy has every dtype.
        self.takes_arrays = all(array is not None for array in self._arrays)
        self._row_arrays = [
            array[:, 0] if array is not None and self.num_lanes == 1 else array
            for array in self._arrays
        ]

    @property
    def num_live(self) -> int:
        """Number of live rows per lane."""
        return min(self.total, self.num_slots)

    @property
    def oldest(self) -> int:
        """Id of the oldest live row."""
        return self.total - self.num_live

    @property
    def cursor(self) -> int:
        """Slot that the next row is written to."""
        return self.total % self.num_slots

    @property
    def num_bytes(self) -> int:
        """Reserved memory, in bytes."""
        return sum(base.numel() * base.element_size() for base in self._bases)

    def spans(self, num_rows: int) -> list[tuple[slice, slice]]:
        """Return the slots for the next `num_rows` rows, as pairs of slices (slots, rows).

        `slots` selects slots of the ring, and `rows` selects the new rows to write to them. There
        are two pairs if the new rows wrap around at the last slot.
        """
        return spans(self.total, num_rows, self.num_slots)

    def write(self, leaves: Sequence[Any]) -> None:
        """Write rows of checked leaves, `[n, lanes, *event]` in the order of the schema.

        If n exceeds `num_slots`, only the last `num_slots` rows are stored. Leaves are tensors on
        the device of the ring, or arrays if `takes_arrays`. Arrays for a ring of one lane are
        `[n, *event]`.
        """
        num_rows = len(leaves[0]) if leaves else 0
        for slots, rows in self.spans(num_rows):
            num_written = rows.stop - rows.start
            parts = leaves if num_written == num_rows else [leaf[rows] for leaf in leaves]
            if not self.is_on_cpu:
                columns = [column[slots] for column in self._slots]
                # Host tensors are copied first: the caller may change them before the transfer.
                there = sent_together(parts, self.device)
                torch._foreach_copy_(columns, there, non_blocking=True)
            elif isinstance(parts[0], torch.Tensor):
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
        """Return the slot of a row id, or the slots of a tensor of row ids."""
        return row_id % self.num_slots

    def place(self, lane: Any, row_id: Any) -> Any:
        """Return the positions of rows in memory, int64: `lane * stride + slot`.

        The arguments are both tensors or both arrays, and so is the result. `lane` may be None if
        the ring has one lane.
        """
        place = row_id % self.num_slots
        return place if self.num_lanes == 1 else add_multiple(place, lane, self.stride)

    def key(self, lane: torch.Tensor, row_id: torch.Tensor) -> torch.Tensor:
        """Return one number per row that identifies it in all lanes: `row_id * num_lanes + lane`.

        Keys are ordered by step, then by lane.
        """
        return row_id * self.num_lanes + lane

    def named(self, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Split keys of rows, as made by `key`, into lanes and row ids."""
        row_id = torch.div(keys, self.num_lanes, rounding_mode="floor")
        return keys - row_id * self.num_lanes, row_id

    def gather(self, places: Any, contiguous: bool = False, nested: bool = False) -> dict[str, Any]:
        """Copy the rows at positions `places`: `[len(places), *event]` by field name.

        Args:
            places: Positions in memory, as returned by `place`.
            contiguous: Whether fields are contiguous. Otherwise they are views of one new tensor
                per group of fields.
            nested: Whether the result is a nested dict instead of a dict by flat name.
        """
        return self.rows(places, self.cut_of(self.names, (), contiguous, nested))

    def cut_of(
        self,
        keys: tuple[str, ...],
        next_keys: tuple[str, ...],
        contiguous: bool = False,
        nested: bool = True,
        apart: bool = False,
    ) -> Cut:
        """Return the plan for copying some fields of sampled rows or windows. Plans are cached.

        Args:
            keys: Fields to copy from each row.
            next_keys: Fields to copy from the row after each row. The result has them below `next`.
            contiguous, nested: As for `gather`.
            apart: True for a plan for `windows`, False for a plan for `rows`. If False, a row and
                the row after it are copied as one piece of memory.
        """
        cut_key = keys, next_keys, contiguous, nested, apart
        cut = self._cuts.get(cut_key)
        if cut is None:
            targets = [
                Target(row, name, f"next/{name}" if row else name)
                for row, (argument, wanted) in enumerate(
                    (("output_key_t", keys), ("output_key_tp1", next_keys))
                )
                for key in wanted
                for name in names_below(self.schema, key, argument)
            ]
            if next_keys and not apart and not self.num_guards:
                raise UsageError("next_keys without apart=True requires num_guards >= 1, got 0.")
            cut = Cut(self.groups, targets, contiguous, nested, apart, self.device)
            self._cuts.put(cut_key, cut)
        return cut

    def rows(self, places: Any, cut: Cut) -> dict[str, Any]:
        """Copy fields of single rows and of the rows that follow them.

        Args:
            places: Positions of the rows in memory, `[n]`: a tensor or, on the CPU, an array.
            cut: Plan with the fields to copy, from `cut_of` with `apart=False`.

        Returns:
            `[n, *event]` by field name.
        """
        return cut(
            [
                self._take(place, width, 0, places) if width else None
                for place, width in enumerate(cut.widths)
            ]
        )

    def windows(
        self, places: Any, length: int, cut: Cut, never_wraps: bool = False
    ) -> dict[str, Any]:
        """Copy fields of windows of rows and of the windows that begin one row later.

        Args:
            places: Positions of the first rows in memory: a tensor or, on the CPU, an array.
            length: Number of rows of a window.
            cut: Plan with the fields to copy, from `cut_of` with `apart=True`.
            never_wraps: Whether the caller guarantees that no window crosses the end of the memory.

        Returns:
            `[len(places) * length, *event]` by field name, time fastest.
        """
        reach = length + cut.reach - 1
        starts = [places, places]
        is_one_piece = never_wraps or reach <= self.num_guards + 1
        if not is_one_piece:
            rows_of = self._unrolled(tensor_of(places), reach)
            starts = [rows_of[:, :length].flatten(), rows_of[:, reach - length :].flatten()]
        windows: list[Any] = [None] * (2 * len(self.groups))
        for place, group in enumerate(self.groups):
            units = (length if is_one_piece else 1) * group.width
            for row in (0, 1):
                if cut.wanted[place][row]:
                    # Skipping one row of the source takes less time than adding 1 to each position.
                    rows = self._take(place, units, row * is_one_piece, starts[row])
                    windows[place + row * len(self.groups)] = rows.reshape(-1, group.width)
        return cut(windows)

    def column(self, name: str) -> torch.Tensor:
        """Return a view of a field, `[lanes * stride, *event]`, indexed by position in memory."""
        return self._flat_columns[name]

    def slots_view(self, name: str) -> torch.Tensor:
        """Return a view of the slots of a field, `[num_slots, lanes, *event]`."""
        return self._columns[name][:, : self.num_slots].transpose(0, 1)

    def ids(self) -> torch.Tensor:
        """Return the ids of the live rows, oldest first: `[num_live]` int64."""
        return torch.arange(self.oldest, self.total, device=self.device)

    def put_slots(self, first: int, leaves: Mapping[str, torch.Tensor]) -> None:
        """Load saved rows `[n, lanes, *event]` into the slots from `first` on.

        `total` does not change.
        """
        for name, leaf in leaves.items():
            self.slots_view(name)[first : first + len(leaf)].copy_(leaf)
            self._copy_guards(first, first + len(leaf))

    def check_valid(self) -> tuple[bool, str]:
        """Check the invariants. Returns whether all hold, and a text about the first violation."""
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
        """Return the positions of all rows of windows: `[num_windows, length]`.

        A window that reaches the last slot of its lane continues at the first slot.
        """
        lane = torch.div(places, self.stride, rounding_mode="floor") * self.stride
        steps = torch.arange(length, device=places.device)
        return ((places - lane).unsqueeze(1) + steps) % self.num_slots + lane.unsqueeze(1)

    def _take(self, place: int, units: int, skipped: int, index: Any) -> Any:
        """Copy one piece of memory per position. A piece is one row or several consecutive rows.

        On the CPU numpy copies small results, because it has less overhead per call. It copies each
        piece as a single item. Pieces may overlap. Large results are in pooled memory.

        Args:
            place: Number of the group of fields, an index into `groups`.
            units: Length of a piece in units of the group (`Group.unit`).
            skipped: Number of rows to skip between the row at a position and its piece.
            index: Positions of rows in memory, `[n]`.

        Returns:
            `[n, units]`: an array on the CPU, else a tensor.
        """
        source, items = self._sources.get((place, units, skipped)) or self._source(
            place, units, skipped
        )
        num_rows = index.shape[0]
        if items is None:
            return source.index_select(0, index)
        if num_rows * units * source.itemsize < _MIN_TORCH_BYTES:
            rows = items(index if isinstance(index, np.ndarray) else index.numpy())
            return rows.view(self._units[place]).reshape(num_rows, units)
        out = self._pool.empty((num_rows, units), source.dtype)
        return torch.index_select(source, 0, tensor_of(index), out=out).numpy()

    def _source(
        self, place: int, units: int, skipped: int
    ) -> tuple[torch.Tensor, Callable[..., Any] | None]:
        """Create and cache views of the memory from which pieces of rows are copied by position.

        Args:
            place: Number of the group of fields, an index into `groups`.
            units: Length of a piece in units of the group (`Group.unit`).
            skipped: Number of rows to skip between the row at a position and its piece.

        Returns:
            A view `[num, units]` of the memory whose row i is the piece of position i, so its rows
            overlap; and a numpy function that maps positions to copies of pieces. The function is
            None on other devices than the CPU.
        """
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
            # `take` is faster, but if pieces overlap, it first copies the whole memory.
            items = pieces.take if units == group.width else pieces.__getitem__
        self._sources[place, units, skipped] = tensor, items
        return tensor, items


def spans(first: int, num_rows: int, num_slots: int) -> list[tuple[slice, slice]]:
    """Return the slots to which new rows are written, as pairs of slices (slots, rows).

    The new rows are numbered 0 to `num_rows - 1`. Row 0 has the id `first`. The rows of a pair are
    written to the slots of the pair. There are two pairs if the rows wrap around at the last slot.
    If `num_rows` exceeds `num_slots`, the pairs cover only the last `num_slots` rows.
    """
    slot = first % num_slots
    if slot + num_rows <= num_slots:
        return [(slice(slot, slot + num_rows), slice(0, num_rows))]
    ranges = []
    start = max(0, num_rows - num_slots)
    while start < num_rows:
        slot = (first + start) % num_slots
        count = min(num_rows - start, num_slots - slot)
        ranges.append((slice(slot, slot + count), slice(start, start + count)))
        start += count
    return ranges


def cells(keys: Any, num_slots: int, num_lanes: int) -> Any:
    """Return the numbers of the cells in which rows are stored, from the keys of the rows.

    A cell is one slot of one lane. Its number is `lane * num_slots + slot`. A key is
    `row_id * num_lanes + lane`. The result is a tensor or an array, like `keys`.
    """
    return (
        keys % num_slots
        if num_lanes == 1
        else keys % num_lanes * num_slots + keys // num_lanes % num_slots
    )


def keys_in(places: Any, total: int, num_slots: int, num_lanes: int) -> Any:
    """Return the keys of the rows that are stored in cells, from the numbers of the cells.

    This is the inverse of `cells` for live rows. Cells that were never written get keys below 0.

    Args:
        places: Numbers of cells, a tensor or an array.
        total: Number of rows per lane that were written.
        num_slots: Number of slots per lane.
        num_lanes: Number of lanes.
    """
    cursor = total % num_slots
    slots = places if num_lanes == 1 else places % num_slots
    ids = add_multiple(slots, slots >= cursor, -num_slots) + (total - cursor)
    return ids if num_lanes == 1 else ids * num_lanes + places // num_slots


def _array(slots: torch.Tensor) -> npt.NDArray[Any] | None:
    return None if slots.device.type != "cpu" or slots.dtype is torch.bfloat16 else slots.numpy()


def _write(
    column: torch.Tensor, array: npt.NDArray[Any] | None, slots: slice, leaf: torch.Tensor
) -> None:
    """Write a leaf `[n, lanes, *event]` into slots of a column `[slots, lanes, *event]`."""
    is_small = (
        leaf.device.type == "cpu" and leaf.dtype is column.dtype and leaf.nbytes < _MIN_TORCH_BYTES
    )
    if array is not None and is_small:
        array[slots] = leaf.numpy()
    else:
        column[slots].copy_(leaf)
