"""`ItemStore`: items in memory, by row: one column per tensor leaf, one list for everything else.

One rule: it holds what it is given and gives copies of it. Which rows count, and which are drawn,
is decided elsewhere. Rows have ids, counted from 0 since creation or `clear`; `id % capacity` is the
slot; the newest overwrites the oldest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..core.fields import Field, Schema
from ..core.host_arrays import as_given
from ..core.records import dense, make_field
from ..core.stream_order import StreamOrder
from ..core.tree import check_same_names, unflatten
from ..errors import FieldTypeError, SchemaError
from ..ring.ring import RingStore
from .item_leaves import copied, put_leaf, split_leaves

_ACTION = "add an item"
#: Objects of the items of one call: flat name -> value, for each item; None if no item has any.
Objects = list[dict[str, Any]] | None


@dataclass(frozen=True)
class Items:
    """Checked items: `[n, *event]` per column in the order of the schema, and their objects."""

    num_rows: int
    columns: list[torch.Tensor]
    objects: Objects
    schema: Schema
    #: Names of the columns that came as arrays of numpy, and are given back as such.
    arrays: frozenset[str]


class ItemStore:
    """The last `capacity` items.

    Args:
        capacity: Items that fit.
        device: Where columns are kept.

    The first items fix which leaves are tensors or arrays, their shapes and dtypes; all later ones
    must have the same. Other leaves may come and go.
    """

    def __init__(self, capacity: int, device: torch.device | str = "cpu") -> None:
        self.capacity = capacity
        self.device = torch.device(device)
        #: Items that were ever written.
        self.total = 0
        self.schema: Schema | None = None
        self.arrays: frozenset[str] = frozenset()
        self._ring: RingStore | None = None
        #: Per slot, the objects of its item; empty until an item has any.
        self._objects: list[dict[str, Any] | None] = []
        self._order = StreamOrder(self.device)

    @property
    def num_live(self) -> int:
        """Items that are not overwritten."""
        return min(self.total, self.capacity)

    @property
    def oldest(self) -> int:
        """Id of the oldest item that is not overwritten."""
        return self.total - self.num_live

    def read_items(self, items: Sequence[Any]) -> Items:
        """Check items; nothing is written.

        Raises:
            MissingFieldError, SchemaError, FieldTypeError: Naming the first leaf that does not fit.
        """
        parts = [split_leaves(item) for item in items]
        objects = [part[1] for part in parts]
        if not parts:
            return Items(0, [], None, self.schema or Schema([]), self.arrays)
        first = parts[0][0]
        schema = self.schema or Schema(_declare(name, leaf, 0) for name, leaf in first.items())
        arrays = self.arrays if self.schema is not None else _arrays(first)
        for columns, _ in parts:
            check_same_names(schema, columns, _ACTION)
        stacked = [_stack(field, [columns[name] for columns, _ in parts]) for name, field in schema.items()]
        return Items(len(parts), stacked, objects if any(objects) else None, schema, arrays)

    def read_batch(self, batch: Mapping[str, Any]) -> Items:
        """Check a nested mapping of `[n, *event]` tensors and arrays; nothing is written."""
        leaves, objects = split_leaves(batch)
        if objects or not leaves:
            got = f"{next(iter(objects))!r}" if objects else "no leaf"
            raise FieldTypeError("add a batch", "", "leaves that are tensors or arrays", got, "Use push() for items")
        tensors = {name: _tensor(name, leaf) for name, leaf in leaves.items()}
        for name, tensor in tensors.items():
            like = next(iter(tensors.values()))
            if not tensor.dim() or not like.dim() or len(tensor) != len(like):
                raise SchemaError("add a batch", f"with {name!r}", "leaves of equal length", f"{list(tensor.shape)}")
        schema = self.schema or Schema(_declare(name, tensor, 1) for name, tensor in tensors.items())
        check_same_names(schema, tensors, "add a batch")
        columns = [_fit(field, tensors[name], 1) for name, field in schema.items()]
        return Items(
            len(columns[0]), columns, None, schema, self.arrays if self.schema is not None else _arrays(leaves)
        )

    def write(self, items: Items) -> torch.Tensor:
        """Append checked items; of more than fit the newest stay. Gives the kept ones' ids, on the device."""
        if not items.num_rows:
            return torch.empty(0, dtype=torch.int64, device=self.device)
        if self.schema is None:
            self.schema, self.arrays = items.schema, items.arrays
        if self._ring is None and self.schema:
            self._ring = RingStore(self.capacity, 1, items.schema, self.device, num_guards=0)
        kept = min(items.num_rows, self.capacity)
        if self._ring is not None:
            self._order.wait(is_write=True)
            self._ring.write([column.unsqueeze(1) for column in items.columns])
            self._order.record(is_write=True)
        self.total += items.num_rows
        if items.objects is not None and not self._objects:
            self._objects = [None] * self.capacity
        if self._objects:
            new = items.objects[-kept:] if items.objects is not None and kept else [{}] * kept
            for row_id, objects in zip(range(self.total - kept, self.total), new, strict=True):
                found = {name: copied(value) for name, value in objects.items()}
                self._objects[row_id % self.capacity] = found or None
        return torch.arange(self.total - kept, self.total, device=self.device)

    def ids(self, slots: Any) -> Any:
        """Give the ids of the items that lie in `[n]` slots, a tensor or an array; below 0 where nobody wrote."""
        cursor = self.total % self.capacity
        return slots + (self.total - cursor) - self.capacity * (slots >= cursor)

    def columns(self, slots: torch.Tensor, contiguous: bool = False, nested: bool = False) -> dict[str, Any]:
        """Copy the columns of `[n]` slots: `[n, *event]` by flat name, or nested."""
        if self._ring is None:
            return {}
        self._order.wait(is_write=False)
        found = self._ring.gather(slots, contiguous, nested)
        self._order.record(is_write=False)
        return found

    def objects(self, slots: torch.Tensor) -> Objects:
        """Copy the objects of `[n]` slots; None if no item ever had any."""
        if not self._objects:
            return None
        found = (self._objects[slot] for slot in slots.tolist())
        return [{} if one is None else {name: copied(value) for name, value in one.items()} for one in found]

    def object_view(self, slot: int, name: str) -> Any:
        """Show one object of a slot; None if it has none of that name."""
        one = self._objects[slot] if self._objects else None
        return None if one is None else one.get(name)

    def forget_objects(self, slots: torch.Tensor) -> None:
        """Let go of the objects of `[n]` slots, whose items are not asked for any more."""
        if self._objects:
            for slot in slots.tolist():
                self._objects[slot] = None

    def items(
        self, slots: torch.Tensor, extra: Mapping[str, Sequence[Any]], device: torch.device | None = None
    ) -> list[dict[str, Any]]:
        """Copy items: one gather per block of columns, then split.

        Args:
            slots: `[n]`.
            extra: More leaves, n values each.
            device: Where tensors are given; None for where they are.
        """
        columns = self.columns(slots)
        lists = {name: self._split(name, leaf, device) for name, leaf in columns.items()}
        found = _rows(unflatten({**lists, **extra}), len(slots))
        for item, objects in zip(found, self.objects(slots) or (), strict=False):
            for name, value in objects.items():
                put_leaf(item, name, value)
        return found

    def clear(self) -> None:
        """Forget every item; leaves, shapes and the memory stay."""
        self.total = 0
        self._objects = []
        if self._ring is not None:
            self._ring.clear()

    def live_columns(self) -> dict[str, torch.Tensor]:
        """Show all columns as they lie: flat name -> `[num_live, *event]`, sharing memory."""
        ring = self._ring
        return {} if ring is None else {name: ring.slots_view(name)[: self.num_live, 0] for name in ring.schema}

    def live_objects_view(self) -> Objects:
        """Show the objects of all slots as they lie."""
        return [one or {} for one in self._objects[: self.num_live]] if self._objects else None

    def restore(
        self, total: int, schema: Schema | None, arrays: frozenset[str], columns: Mapping[str, Any], objects: Objects
    ) -> None:
        """Take over what another store showed; `columns` must fit `schema`."""
        live = min(total, self.capacity)
        ring = RingStore(self.capacity, 1, schema, self.device, num_guards=0) if schema else None
        if ring is not None:
            ring.put_slots(0, {name: columns[name].unsqueeze(1) for name in ring.schema})
            ring.total = total
        self.schema, self.arrays, self.total, self._ring = schema, arrays, total, ring
        filled = [one or None for one in objects or ()]
        self._objects = [*filled, *[None] * (self.capacity - live)] if objects is not None else []

    def moved(self, first: int, capacity: int) -> ItemStore:
        """Copy the items from id `first` on to a new store of `capacity`, where they are counted from 0."""
        made = ItemStore(capacity, self.device)
        if self.schema is None:
            return made
        slots = torch.arange(first, self.total, device=self.device) % self.capacity
        columns = list(self.columns(slots).values())
        objects = [self._objects[slot] or {} for slot in slots.tolist()] if self._objects else None
        made.write(Items(len(slots), columns, objects, self.schema, self.arrays))
        return made

    def _split(self, name: str, leaf: torch.Tensor, device: torch.device | None) -> list[Any]:
        if name in self.arrays:
            return list(leaf.cpu().numpy())
        return list((leaf if device is None else leaf.to(device)).unbind(0))


def _rows(tree: Mapping[str, Any], num_rows: int) -> list[dict[str, Any]]:
    """Turn a nested dict of lists into a list of nested dicts."""
    parts = [_rows(part, num_rows) if isinstance(part, dict) else part for part in tree.values()]
    keys = tuple(tree)
    return [dict(zip(keys, values)) for values in zip(*parts)] if parts else [{} for _ in range(num_rows)]  # noqa: B905


def _arrays(leaves: Mapping[str, Any]) -> frozenset[str]:
    return frozenset(name for name, leaf in leaves.items() if not isinstance(leaf, torch.Tensor))


def _declare(name: str, leaf: Any, num_lead: int) -> Field:
    tensor = _tensor(name, leaf)
    return make_field(name, tensor.shape[num_lead:], tensor.dtype)


def _tensor(name: str, leaf: Any) -> torch.Tensor:
    if not isinstance(leaf, torch.Tensor):
        leaf = as_given(np.asarray(leaf))
    return dense(name, leaf, _ACTION)


def _stack(field: Field, leaves: list[Any]) -> torch.Tensor:
    """Put checked leaves of several items together: `[n, *event]`."""
    tensors = [_fit(field, _tensor(field.name, leaf), 0) for leaf in leaves]
    return torch.stack(tensors) if len(tensors) > 1 else tensors[0].unsqueeze(0)


def _fit(field: Field, value: torch.Tensor, num_lead: int) -> torch.Tensor:
    """Give a leaf in the field's dtype, or raise."""
    words = f"{field.dtype} of shape {list(field.shape)}"
    if tuple(value.shape[num_lead:]) != field.shape:
        got = f"shape {list(value.shape[num_lead:])}"
        raise SchemaError(_ACTION, f"with {field.name!r}", words, got)
    if not torch.can_cast(value.dtype, field.torch_dtype):
        raise FieldTypeError(_ACTION, f"with {field.name!r}", words, str(value.dtype), "Convert it first")
    return value.to(field.torch_dtype)
