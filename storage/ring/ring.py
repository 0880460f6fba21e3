"""`RingStore`: fields of rows in fixed memory, the newest overwriting the oldest.

One rule: this is the only place that wraps an index. Rows have ids, counted from 0 since creation
or `clear`; lane and id name a row, `id % num_slots` is its slot, and it is live while
`id >= total - num_slots`. All lanes are written in lock-step, so that one `total` counts for all.

Inside, a lane's rows are consecutive (`[lanes, slots, row]`), so that a window is one piece of
memory; they are shown time first. Behind the last slot `num_guards` copies of the first slots
follow, so that windows of up to `num_guards + 1` rows never break where the ring closes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy.typing as npt
import torch

from ..core.buffer_pool import BufferPool
from ..core.fields import Schema
from ..core.host_arrays import zeroed
from ..core.modes import lasting
from ..core.records import names_below
from ..core.row_cut import RowCut, Rows, Target
from ..core.row_layout import Group, lay_out
from ..errors import UsageError
from .held_steps import HeldSteps

#: From this size of a written leaf on torch copies with several threads; below, numpy starts sooner.
_MIN_TORCH_BYTES = 256 * 1024
#: So many ways of cutting rows are remembered, with the memory that is ready for them.
_MAX_CUTS = 8


class RingStore:
    """Memory for the live rows of some fields.

    Args:
        num_slots: Rows per lane.
        num_lanes: Streams that are written in lock-step.
        schema: The fields of a row.
        device: Where the memory is.
        num_guards: Rows that are kept twice, for windows across the end of the memory.
    """

    @lasting
    def __init__(
        self, num_slots: int, num_lanes: int, schema: Schema, device: torch.device | str = "cpu", num_guards: int = 1
    ) -> None:
        if num_slots < 1 or num_lanes < 1:
            raise UsageError("create a ring", "", "at least one slot and one lane", f"{num_slots} and {num_lanes}")
        self.num_slots, self.num_lanes = int(num_slots), int(num_lanes)
        self.schema = schema
        self.device = torch.device(device)
        self.num_guards = min(int(num_guards), self.num_slots)
        #: Rows per lane that were ever written.
        self.total = 0
        self.groups: list[Group] = lay_out(schema)
        #: Rows of one lane in memory.
        self.stride = self.num_slots + self.num_guards
        self._pool = BufferPool()
        self._bases = [
            zeroed((self.num_lanes, self.stride, group.width), group.unit, self.device) for group in self.groups
        ]
        self._sources: dict[tuple[int, int, int], torch.Tensor] = {}
        self._cuts: dict[Any, RowCut] = {}
        found: dict[str, torch.Tensor] = {}
        for group, base in zip(self.groups, self._bases, strict=True):
            found.update(group.views(base))
        self._columns = {name: found[name] for name in schema}
        self.names = tuple(schema)
        self._arrays = [_array(column) for column in self._columns.values()]
        #: Whether `write_arrays` may be used: the memory is on the CPU, and numpy knows every dtype.
        self.takes_arrays = all(array is not None for array in self._arrays)
        self._known_arrays = [array for array in self._arrays if array is not None]
        self._lane_arrays = [array[0] for array in self._known_arrays]
        self._has_scalars = any(array.ndim == 1 for array in self._lane_arrays)
        #: The newest steps of many lanes, where side by side they take fewer writes than fields.
        takes_steps = num_lanes > 1 and self.takes_arrays and len(self.groups) < len(schema)
        self._held = HeldSteps(schema, self.groups, self._bases) if takes_steps else None

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
        """Slot that the next row goes to."""
        return self.total % self.num_slots

    @property
    def num_bytes(self) -> int:
        """Memory that is reserved for rows."""
        held_bytes = self._held.num_bytes if self._held is not None else 0
        return held_bytes + sum(base.numel() * base.element_size() for base in self._bases)

    def write(self, tensors: list[torch.Tensor]) -> None:
        """Write checked leaves, `[n, lanes, *event]` in the schema's order; any n, the last slots win."""
        self.settle()
        num_rows = len(tensors[0]) if tensors else 0
        first = max(0, num_rows - self.num_slots)
        while first < num_rows:
            slot = self.slot(self.total + first)
            last = min(num_rows, first + self.num_slots - slot)
            stop = slot + last - first
            for column, array, leaf in zip(self._columns.values(), self._arrays, tensors, strict=True):
                _copy(column, array, slot, stop, leaf[first:last])
            self._copy_guards(slot, stop)
            first = last
        self.total += num_rows

    def write_arrays(self, leaves: list[npt.NDArray[Any]]) -> None:
        """Write leaves of the right dtypes: `[n, *event]` in a ring of one lane, else `[n, lanes, *event]`.

        n is at most `num_slots`.
        """
        num_rows, slot = len(leaves[0]), self.total % self.num_slots
        if slot + num_rows > self.num_slots:
            num_first = self.num_slots - slot
            self.write_arrays([leaf[:num_first] for leaf in leaves])
            self.write_arrays([leaf[num_first:] for leaf in leaves])
            return
        if self.num_lanes == 1:
            # A number takes half the time of a slice, but numpy puts no array of one item in the place of a scalar.
            into = slot if num_rows == 1 and not self._has_scalars else slice(slot, slot + num_rows)
            for array, leaf in zip(self._lane_arrays, leaves, strict=True):
                array[into] = leaf
        elif num_rows == 1 and self._held is not None:
            self._held.add(slot, leaves)
            # The first slots are kept twice, and after the last one the next step lies elsewhere.
            if self._held.num >= self._held.most or slot < self.num_guards or slot == self.num_slots - 1:
                self._held.settle()
        else:
            self.settle()
            for array, leaf in zip(self._known_arrays, leaves, strict=True):
                array[:, slot : slot + num_rows] = leaf.swapaxes(0, 1)
        if slot < self.num_guards:
            self._copy_guards(slot, slot + num_rows)
        self.total += num_rows

    def settle(self) -> None:
        """Write the steps that are held back; whoever reads memory calls it first."""
        if self._held is not None and self._held.num:
            self._held.settle()

    def _settle_for(self, places: torch.Tensor, length: int) -> None:
        """Write the steps that are held back if windows of so many rows reach them."""
        held = self._held
        if held is not None and held.num and held.touches(places.numpy() % self.stride, length):
            held.settle()

    def hold_nothing_back(self) -> None:
        """From now on write every step at once: somebody outside sees the memory."""
        if self._held is not None:
            self._held.most = 1

    def clear(self) -> None:
        """Forget every row; the memory stays."""
        self.settle()
        self.total = 0

    def slot(self, row_id: Any) -> Any:
        """Say where rows lie: an int, or a tensor of ids."""
        return row_id % self.num_slots

    def place(self, lane: Any, row_id: Any) -> Any:
        """Give positions in memory, which `gather` and `windows` take: of rows, or of windows' first rows.

        Tensors or arrays; with one lane `lane` may be None.
        """
        place = row_id % self.num_slots
        return place if self.num_lanes == 1 else place + lane * self.stride

    def gather(self, places: torch.Tensor, contiguous: bool = False, nested: bool = False) -> dict[str, Any]:
        """Copy rows: `[len(places), *event]` per field, views of one new tensor per group; by flat name, or nested."""
        cut = self.cut_of(self.names, (), contiguous, nested)
        return cut(self.rows(places, cut))

    def cut_of(
        self,
        keys: Sequence[str],
        next_keys: Sequence[str],
        contiguous: bool = False,
        nested: bool = True,
        apart: bool = False,
    ) -> RowCut:
        """Give what cuts the fields of some keys, and below `next` those of some one row later; planned once."""
        asked = tuple(keys), tuple(next_keys), contiguous, nested, apart
        found = self._cuts.get(asked)
        if found is None:
            targets = [
                Target(row, name, f"next/{name}" if row else name)
                for row in (0, 1)
                for key in (keys, next_keys)[row]
                for name in names_below(self.schema, key, "sample windows")
            ]
            if len(self._cuts) >= _MAX_CUTS:
                self._cuts.clear()
            found = self._cuts[asked] = self.cut(targets, contiguous, nested, apart)
        return found

    def cut(
        self, targets: Sequence[Target], contiguous: bool = False, nested: bool = True, apart: bool = False
    ) -> RowCut:
        """Make what cuts `rows`, or with `apart` those of `windows`, into fields; once for many samples."""
        if not apart and not self.num_guards and any(target.row for target in targets):
            raise UsageError("cut rows", "and those that follow", "a ring with guards", "one without")
        return RowCut(self.groups, targets, contiguous, nested, self.device, apart, self._pool)

    def rows(self, places: torch.Tensor, cut: RowCut) -> list[Rows | None]:
        """Copy what `cut` needs of rows, and of those that follow them: of each group, packed."""
        if self._held is not None:
            self._settle_for(places, cut.reach)
        return [
            cut.gather(place, self._source(place, width), places) if width else None
            for place, width in enumerate(cut.widths)
        ]

    def windows(self, places: torch.Tensor, length: int, cut: RowCut, never_wraps: bool = False) -> list[Rows | None]:
        """Copy what `cut`, made with `apart`, needs of windows, and of the same windows one row later.

        Args:
            places: Of the first rows.
            length: Rows of a window.
            cut: What is wanted.
            never_wraps: The caller knows that no window reaches across the end of the memory.

        Returns:
            Of each group `[len(places) * length, width]`, packed, time fastest; then the same one row later.
        """
        reach = length + cut.reach - 1
        is_one_piece = never_wraps or reach <= self.num_guards + 1
        if is_one_piece:
            self._settle_for(places, reach)
            starts = [places, places]
        else:
            self.settle()
            rows_of = self._unrolled(places, reach)
            starts = [rows_of[:, :length].flatten(), rows_of[:, reach - length :].flatten()]
        found: list[Rows | None] = [None] * (2 * len(self.groups))
        for place, (group, wanted) in enumerate(zip(self.groups, cut.wanted, strict=True)):
            rows = [row for row in (0, 1) if wanted[row]]
            if rows:
                units = (length if is_one_piece else 1) * group.width
                # To look a row later at the same places takes less time than to count the places up.
                sources = [self._source(place, units, skipped=row if is_one_piece else 0) for row in rows]
                at = [place + row * len(self.groups) for row in rows]
                moved = cut.gather_near(at, sources, [starts[row] for row in rows])
                for one, part in zip(at, moved, strict=True):
                    found[one] = part
        return found

    def column(self, name: str) -> torch.Tensor:
        """Give a field as rows in memory order, `[lanes * stride, *event]`, sharing memory; `place` indexes it."""
        self.settle()
        return self._columns[name].flatten(0, 1)

    def slots_view(self, name: str) -> torch.Tensor:
        """Show the slots of a field, `[num_slots, lanes, *event]`, sharing memory."""
        self.settle()
        return self._columns[name][:, : self.num_slots].transpose(0, 1)

    def ids(self) -> torch.Tensor:
        """List the live ids, oldest first."""
        return torch.arange(self.oldest, self.total, device=self.device)

    def copy_slots(
        self, first: int, last: int, out: Mapping[str, torch.Tensor] | None = None
    ) -> dict[str, torch.Tensor]:
        """Copy slots `first` to `last` of every field: new tensors `[last - first, lanes, *event]`, or into `out`."""
        parts = {name: self.slots_view(name)[first:last] for name in self.schema}
        if out is None:
            return {name: part.clone(memory_format=torch.contiguous_format) for name, part in parts.items()}
        return {name: out[name][: last - first].copy_(part) for name, part in parts.items()}

    def put_slots(self, first: int, leaves: Mapping[str, torch.Tensor]) -> None:
        """Fill slots from `first` on as they were saved; `total` is the caller's to set."""
        for name, leaf in leaves.items():
            self.slots_view(name)[first : first + len(leaf)].copy_(leaf)
            self._copy_guards(first, first + len(leaf))

    def check_valid(self) -> tuple[bool, str]:
        """Check what must always hold: (whether it does, which part does not)."""
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
        """List the places of each window's rows, `[windows, length]`, across the end of the memory."""
        lane = torch.div(places, self.stride, rounding_mode="floor") * self.stride
        steps = torch.arange(length, device=places.device)
        return ((places - lane).unsqueeze(1) + steps) % self.num_slots + lane.unsqueeze(1)

    def _source(self, place: int, units: int, skipped: int = 0) -> torch.Tensor:
        """See a group's memory as all pieces of so many units that start some rows behind a row."""
        found = self._sources.get((place, units, skipped))
        if found is None:
            width, base = self.groups[place].width, self._bases[place]
            num_rows = self.num_lanes * self.stride - -(-units // width) + 1 - skipped
            found = base.as_strided((num_rows, units), (width, 1), skipped * width)
            self._sources[place, units, skipped] = found
        return found


def _array(column: torch.Tensor) -> npt.NDArray[Any] | None:
    return None if column.device.type != "cpu" or column.dtype is torch.bfloat16 else column.numpy()


def _copy(column: torch.Tensor, array: npt.NDArray[Any] | None, slot: int, stop: int, leaf: torch.Tensor) -> None:
    """Write `[n, lanes, *event]` into slots of a `[lanes, slots, *event]` column."""
    is_small = leaf.device.type == "cpu" and leaf.dtype is column.dtype and leaf.nbytes < _MIN_TORCH_BYTES
    if array is not None and is_small:
        array[:, slot:stop] = leaf.numpy().swapaxes(0, 1)
        return
    column[:, slot:stop].copy_(leaf.transpose(0, 1), non_blocking=leaf.device.type == "cuda")
