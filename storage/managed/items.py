"""`ItemStore`: items in memory, by row: one column per leaf of numbers, and one list for all other leaves.

One rule: it keeps copies of what it is given, and gives copies. Tensors and arrays of numbers are columns of a ring;
every other leaf is an object. Which rows count, and which are drawn, is decided elsewhere.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..core.devices import StreamOrder
from ..core.fields import Field, Schema
from ..core.memory import as_given
from ..core.records import COMPLEX_DTYPES, dense, make_field
from ..core.tree import check_same_names, unflatten
from ..errors import CorruptFileError, FieldTypeError, SchemaError
from ..ring.ring import RingStore

_ACTION = "add an item"
#: Objects that need no copy.
_CONSTANTS = (str, int, float, bool, bytes, type(None))
#: Key of a JSON object that stands for something else than a dict.
_TAG = "__is__"


@dataclass(frozen=True)
class Items:
    """Checked items.

    Attributes:
        num_rows: How many.
        columns: `[n, *event]` each, in the order of the schema.
        objects: Of each item, flat name -> value; None if no item has any.
        schema: The columns.
        arrays: Names of the columns that came as arrays of numpy, and are given back as such.
    """

    num_rows: int
    columns: list[torch.Tensor]
    objects: list[dict[str, Any]] | None
    schema: Schema
    arrays: frozenset[str]


class ItemStore:
    """The last `capacity` items.

    Args:
        capacity: Items that fit.
        device: Where columns are kept.
        schema: The columns; None to take those of the first items.
        arrays: Names of the columns that are given as arrays of numpy.

    All items have the same columns. Other leaves may come and go.
    """

    def __init__(
        self,
        capacity: int,
        device: torch.device | str = "cpu",
        schema: Schema | None = None,
        arrays: frozenset[str] = frozenset(),
    ) -> None:
        self.capacity, self.device = capacity, torch.device(device)
        self.schema, self.arrays = schema, arrays
        #: Counts the items also as long as there are no columns.
        self._ring = RingStore(capacity, 1, schema or Schema([]), self.device, num_guards=0)
        #: Per slot, the objects of its item; empty until an item has any.
        self._objects: list[dict[str, Any] | None] = []
        self._order = StreamOrder(self.device)

    @property
    def total(self) -> int:
        """Items that were ever written, since creation or `clear`; the next id."""
        return self._ring.total

    @property
    def num_live(self) -> int:
        """Items that are not overwritten."""
        return self._ring.num_live

    @property
    def oldest(self) -> int:
        """Id of the oldest item that is not overwritten."""
        return self._ring.oldest

    def slots(self, ids: torch.Tensor) -> torch.Tensor:
        """Say where the items of `[n]` ids are."""
        slots: torch.Tensor = self._ring.slot(ids)
        return slots

    def next_ids(self, num_rows: int) -> torch.Tensor:
        """List the ids that new items will have, those that stay."""
        total = self.total + num_rows
        return torch.arange(total - min(num_rows, self.capacity), total, device=self.device)

    def like(self, items: Items) -> ItemStore:
        """Give what checks further items of one call: itself, or, before the first item, a store made for `items`."""
        return self if self.schema is not None else ItemStore(1, "cpu", items.schema, items.arrays)

    def read_items(self, items: Sequence[Any]) -> Items:
        """Check items; nothing is written.

        Raises:
            MissingFieldError, SchemaError, FieldTypeError: Naming the first leaf that does not fit.
        """
        parts = [_split_leaves(item) for item in items]
        if not parts:
            return Items(0, [], None, self.schema or Schema([]), self.arrays)
        schema, arrays = self._declared(parts[0][0], 0)
        for columns, _ in parts:
            check_same_names(schema, columns, _ACTION)
        stacked = [
            torch.stack([_fit(field, columns[name], 0) for columns, _ in parts]) for name, field in schema.items()
        ]
        objects = [part[1] for part in parts]
        return Items(len(parts), stacked, objects if any(objects) else None, schema, arrays)

    def read_batch(self, batch: Mapping[str, Any]) -> Items:
        """Check a nested mapping of `[n, *event]` tensors and arrays; nothing is written."""
        leaves, objects = _split_leaves(batch)
        if objects or not leaves:
            got = f"{next(iter(objects))!r}" if objects else "no leaf"
            raise FieldTypeError("add a batch", "", "leaves that are tensors or arrays", got, "Use push() for items")
        num_rows = next(iter(leaves.values())).shape[:1]
        for name, leaf in leaves.items():
            if not num_rows or leaf.shape[:1] != num_rows:
                raise SchemaError("add a batch", f"with {name!r}", "leaves of equal length", f"{list(leaf.shape)}")
        schema, arrays = self._declared(leaves, 1)
        check_same_names(schema, leaves, "add a batch")
        columns = [_fit(field, leaves[name], 1) for name, field in schema.items()]
        return Items(len(columns[0]), columns, None, schema, arrays)

    def write(self, items: Items) -> torch.Tensor:
        """Append checked items; of more than fit the newest stay. Gives the ids of those, on the device."""
        ids = self.next_ids(items.num_rows)
        if not items.num_rows:
            return ids
        if self.schema is None:
            self.schema, self.arrays = items.schema, items.arrays
            self._ring = RingStore(self.capacity, 1, items.schema, self.device, num_guards=0)
        if items.columns:
            self._order.wait(is_write=True)
            self._ring.write([column.unsqueeze(1) for column in items.columns])
            self._order.record(is_write=True)
        else:
            self._ring.total += items.num_rows
        if items.objects is not None and not self._objects:
            self._objects = [None] * self.capacity
        if self._objects:
            new = [{}] * len(ids) if items.objects is None else items.objects[-len(ids) :]
            for slot, objects in zip(self.slots(ids).tolist(), new, strict=True):
                self._objects[slot] = _copied(objects) or None
        return ids

    def columns(self, slots: torch.Tensor, contiguous: bool = False, nested: bool = False) -> dict[str, Any]:
        """Copy the columns of `[n]` slots: `[n, *event]` by flat name, or nested."""
        if not self.schema:
            return {}
        self._order.wait(is_write=False)
        found = self._ring.gather(slots, contiguous, nested)
        self._order.record(is_write=False)
        return found

    def objects(self, slots: torch.Tensor) -> list[dict[str, Any]] | None:
        """Copy the objects of `[n]` slots; None if no item ever had any."""
        return [_copied(self._objects[slot] or {}) for slot in slots.tolist()] if self._objects else None

    def values(self, slots: torch.Tensor, name: str) -> list[Any]:
        """List one object of `[n]` slots, where it is there and not None; not copied."""
        found = [(self._objects[slot] or {}).get(name) for slot in slots.tolist()] if self._objects else []
        return [value for value in found if value is not None]

    def forget_objects(self, slots: torch.Tensor) -> None:
        """Delete the objects of `[n]` slots, whose items were removed."""
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
        lists = {
            name: list(leaf.cpu().numpy() if name in self.arrays else leaf.to(device or self.device).unbind(0))
            for name, leaf in self.columns(slots).items()
        }
        found = _rows(unflatten({**lists, **extra}), len(slots))
        for item, objects in zip(found, self.objects(slots) or (), strict=False):
            for name, value in objects.items():
                put_leaf(item, name, value)
        return found

    def clear(self) -> None:
        """Forget every item; columns and their memory stay."""
        self._ring.clear()
        self._objects = []

    def moved(self, first: int, capacity: int) -> ItemStore:
        """Copy the items from id `first` on to a new store of `capacity`, where they are counted from 0."""
        made = ItemStore(capacity, self.device, self.schema, self.arrays)
        if self.schema is not None:
            slots = self.slots(torch.arange(first, self.total, device=self.device))
            columns = list(self.columns(slots).values())
            made.write(Items(len(slots), columns, self.objects(slots), self.schema, self.arrays))
        return made

    def state(self, where: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Give numbers, and tensors that may share memory; objects are JSON. Raise if they cannot be."""
        schema = None if self.schema is None else self.schema.to_json()
        views = [self._ring.slots_view(name)[: self.num_live, 0] for name in self.schema or ()]
        tensors = {f"column/{place}": view for place, view in enumerate(views)}
        if self._objects:
            text = to_json([one or {} for one in self._objects[: self.num_live]], where)
            tensors["objects"] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        return {"total": self.total, "schema": schema, "arrays": sorted(self.arrays)}, tensors

    @classmethod
    def of_state(
        cls,
        capacity: int,
        device: torch.device,
        numbers: Mapping[str, Any],
        tensors: Mapping[str, torch.Tensor],
        where: str,
    ) -> ItemStore:
        """Make a store from what `state` gave; raise `SchemaError` or `CorruptFileError` if it is not that."""
        total = numbers["total"]
        if not isinstance(total, int) or not 0 <= total < 1 << 62:
            raise SchemaError("load a state", "", "a total >= 0", repr(total))
        schema = None if numbers["schema"] is None else Schema(map(_field_of, numbers["schema"]))
        live, columns = min(total, capacity), {}
        for place, (name, field) in enumerate((schema or {}).items()):
            leaf = columns[name] = tensors[f"column/{place}"].unsqueeze(1)
            if leaf.dtype != field.torch_dtype or leaf.shape != (live, 1, *field.shape):
                expected = f"{field.dtype} {[live, *field.shape]}"
                raise SchemaError("load a state", f"with {name!r}", expected, f"{leaf.dtype} {list(leaf[:, 0].shape)}")
        made = cls(capacity, device, schema, frozenset(numbers["arrays"]))
        made._ring.put_slots(0, columns)
        made._ring.total = total
        if "objects" in tensors:
            objects = from_json(tensors["objects"].cpu().numpy().tobytes(), where)
            if not isinstance(objects, list) or len(objects) != live or not all(isinstance(x, dict) for x in objects):
                raise CorruptFileError("read objects", where, f"{live} of them", "others")
            made._objects = [*(one or None for one in objects), *[None] * (capacity - live)]
        return made

    def _declared(self, leaves: Mapping[str, Any], num_lead: int) -> tuple[Schema, frozenset[str]]:
        """Give the columns, and which are arrays; before the first item, those of `leaves`."""
        if self.schema is not None:
            return self.schema, self.arrays
        tensors = {name: _tensor(name, leaf) for name, leaf in leaves.items()}
        arrays = frozenset(name for name, leaf in leaves.items() if not isinstance(leaf, torch.Tensor))
        return Schema(make_field(name, x.shape[num_lead:], x.dtype) for name, x in tensors.items()), arrays


def put_leaf(item: dict[str, Any], name: str, value: Any) -> None:
    """Set the leaf of a flat name in a nested dict."""
    *parents, last = name.split("/")
    for parent in parents:
        item = item.setdefault(parent, {})
    item[last] = value


def to_json(value: Any, where: str) -> bytes:
    """Write an object as JSON; tuples come back as tuples.

    Raises:
        FieldTypeError: It holds something else than None, bool, int, float, str, list, tuple and
            dict of str.
    """
    return json.dumps(_encoded(value, where), separators=(",", ":")).encode()


def from_json(data: bytes, where: str) -> Any:
    """Read what `to_json` wrote; raise `CorruptFileError` if it is not that."""
    try:
        return _decoded(json.loads(data))
    except (ValueError, TypeError, KeyError, RecursionError) as cause:
        raise CorruptFileError("read objects", where, "JSON as it was written", str(cause)) from cause


def _split_leaves(item: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Walk an item: flat names of its tensors and arrays of numbers, and of all other leaves. Nothing is copied."""
    if not isinstance(item, Mapping):
        raise SchemaError(_ACTION, "", "a mapping", type(item).__name__)
    columns: dict[str, Any] = {}
    objects: dict[str, Any] = {}

    def split(node: Mapping[Any, Any], prefix: str) -> None:
        for key, value in node.items():
            if not isinstance(key, str) or not key or "/" in key:
                where = f"under {prefix or 'the top'!r}"
                raise SchemaError("name a leaf", where, "a non-empty str without '/'", repr(key))
            is_array = isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biufc"
            if is_array or isinstance(value, torch.Tensor):
                columns[prefix + key] = value
            elif isinstance(value, Mapping) and value:
                split(value, f"{prefix}{key}/")
            else:
                objects[prefix + key] = value

    split(item, "")
    return columns, objects


def _copied(objects: Mapping[str, Any]) -> dict[str, Any]:
    return {name: x if isinstance(x, _CONSTANTS) else copy.deepcopy(x) for name, x in objects.items()}


def _rows(tree: Mapping[str, Any], num_rows: int) -> list[dict[str, Any]]:
    """Turn a nested dict of lists into a list of nested dicts."""
    parts = [_rows(part, num_rows) if isinstance(part, dict) else part for part in tree.values()]
    keys = tuple(tree)
    return [dict(zip(keys, values)) for values in zip(*parts)] if parts else [{} for _ in range(num_rows)]  # noqa: B905


def _tensor(name: str, leaf: Any) -> torch.Tensor:
    return dense(name, leaf if isinstance(leaf, torch.Tensor) else as_given(np.asarray(leaf)), _ACTION)


def _fit(field: Field, leaf: Any, num_lead: int) -> torch.Tensor:
    """Give a leaf in the field's dtype, or raise."""
    value = _tensor(field.name, leaf)
    if value.dtype is field.torch_dtype and value.shape[num_lead:] == field.shape:
        return value
    where, words = f"with {field.name!r}", f"{field.dtype} of shape {list(field.shape)}"
    if tuple(value.shape[num_lead:]) != field.shape:
        raise SchemaError(_ACTION, where, words, f"shape {list(value.shape[num_lead:])}")
    if not torch.can_cast(value.dtype, field.torch_dtype):
        raise FieldTypeError(_ACTION, where, words, str(value.dtype), "Convert it first")
    return value.to(field.torch_dtype)


def _field_of(given: Mapping[str, Any]) -> Field:
    """Build a field from `Schema.to_json`'s form, of any dtype that a buffer can hold."""
    is_complex = given.get("dtype") in COMPLEX_DTYPES
    return make_field(given["name"], given["shape"], given["dtype"]) if is_complex else Field.from_json(given)


def _encoded(value: Any, where: str) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list:
        return [_encoded(x, where) for x in value]
    if type(value) is tuple:
        return {_TAG: "tuple", "of": [_encoded(x, where) for x in value]}
    if type(value) is dict and all(type(key) is str for key in value):
        found = {key: _encoded(x, where) for key, x in value.items()}
        return {_TAG: "dict", "of": found} if _TAG in value else found
    expected = "objects of None, bool, int, float, str, list, tuple and dict of str"
    advice = "Keep numbers in tensors or arrays, and other objects elsewhere"
    raise FieldTypeError("save objects", where, expected, f"a {type(value).__name__}", advice)


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return [_decoded(x) for x in value]
    if isinstance(value, dict):
        kind = value.get(_TAG)
        if kind is None:
            return {key: _decoded(x) for key, x in value.items()}
        if kind == "tuple":
            return tuple(_decoded(x) for x in value["of"])
        if kind == "dict":
            return {key: _decoded(x) for key, x in value["of"].items()}
        raise ValueError(f"no kind {kind!r}")
    return value
