"""`ItemStore`: ring of items in memory. Functions to check items and to parse item ids.

Each numeric leaf has a column in a ring. All other leaves are objects, stored by slot. All items
have the same columns, but may have different objects. Items are copied when they are added and when
they are returned. The id of an item is `<name>_<row>`: the name of the buffer, and the number of
items that were added before since the last `clear`. An id is split at the last "_", since a name
may contain "_".
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch

from ..core.fields import Schema, check_same_names, flatten, unflatten
from ..core.memory import StreamOrder, as_given, on_device, sent_together
from ..core.records import dense, fit, make_field
from ..errors import (
    CorruptFileError,
    FieldTypeError,
    MissingFieldError,
    SchemaError,
    UsageError,
    nearest,
)
from ..ring.ring_store import RingStore
from ..saving.saved_store import checked_count, checked_tensor

UNIQUE_ID = "replay_unique_id"
SLOT = "replay_buffer_idx"
#: Leaves that `sample` adds to an item. `push` removes these leaves.
SAMPLE_LEAVES = frozenset({UNIQUE_ID, SLOT, "staleness", "use", "IS"})
#: Immutable types of objects, which are not copied.
_CONSTANTS = (str, int, float, bool, bytes, type(None))
#: Key that marks a JSON object as an encoded tuple, or as an encoded dict that has this key.
_TAG = "__is__"


class Form(NamedTuple):
    """The columns of items, and the names of the columns that are returned as numpy arrays."""

    schema: Schema
    arrays: frozenset[str]


class Items(NamedTuple):
    """Checked items, as numeric columns and objects.

    Attributes:
        num_rows: Number of items, n.
        columns: Numeric leaves `[n, *event]`, in the order of the schema.
        objects: Objects of each item by flat name; None if no item has objects.
        form: Form of the columns.
    """

    num_rows: int
    columns: list[torch.Tensor]
    objects: list[dict[str, Any]] | None
    form: Form


class UnknownNameError(MissingFieldError):
    """An id or a call names a buffer that does not exist (a `KeyError`)."""


def raise_unknown(name: Any, known: Iterable[str]) -> NoReturn:
    """Raise `UnknownNameError`: no buffer has this name."""
    options = nearest(str(name), known)
    raise UnknownNameError(f"buffer_name must be one of {options}, got {name!r}.")


def split_unique_id(unique_id: Any) -> tuple[str, int]:
    """Split an id into the buffer's name and the row. Raises `UsageError` for an invalid id."""
    name, _, row = unique_id.rpartition("_") if isinstance(unique_id, str) else ("", "", "")
    is_row = row.isascii() and row.isdigit()
    if not name or not is_row:
        raise UsageError(f"ids must have the form '<name>_<row>', got {unique_id!r}.")
    return name, int(row)


def as_items(data: Any) -> list[Any]:
    """Convert pushed data, one item or several items, to a list."""
    return [data] if isinstance(data, Mapping) else several(data)


def several(data: Any) -> list[Any]:
    """Convert several items to a list. Raises `SchemaError` for a single item, str or number."""
    if isinstance(data, (Mapping, str, bytes)) or not isinstance(data, Iterable):
        raise SchemaError(f"data must be a list of items, got {type(data).__name__}.")
    return list(data)


def listed(values: Any) -> list[Any]:
    """Convert values to a list.

    None becomes `[]`, and a single value `[value]`. A tensor or array becomes a flat list of Python
    numbers.
    """
    if values is None:
        return []
    if isinstance(values, (torch.Tensor, np.ndarray, np.generic)):
        return list(values.reshape(-1).tolist())
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        return [values]
    return list(values)


def plain_number(value: Any) -> Any:
    """Convert a tensor or array of one number to a Python number. Other values are unchanged."""
    is_array = isinstance(value, (torch.Tensor, np.ndarray, np.generic))
    return value.item() if is_array and math.prod(value.shape) == 1 else value


def read_items(items: Sequence[Any], form: Form | None) -> Items:
    """Check items against the form of earlier items. Without it, the first item sets the form.

    Raises:
        MissingFieldError, SchemaError, FieldTypeError: A leaf does not match the form. The message
            names the first such leaf.
    """
    parts = [_split_leaves(item, SAMPLE_LEAVES) for item in items]
    if not parts:
        return Items(0, [], None, form or Form(Schema([]), frozenset()))
    form = form or _form_of(parts[0][0], 0)
    fitted = [_fitted(leaves, form, 0) for leaves, _ in parts]
    objects = [objects for _, objects in parts]
    columns = [torch.stack(leaves) for leaves in zip(*fitted, strict=True)]
    return Items(len(parts), columns, objects if any(objects) else None, form)


def read_batch(batch: Mapping[str, Any], form: Form | None) -> Items:
    """Check a batch of items, a nested mapping of `[n, *event]` tensors and arrays.

    Raises:
        MissingFieldError, SchemaError, FieldTypeError: As for `read_items`.
    """
    leaves, objects = _split_leaves(batch)
    if objects or not leaves:
        if not objects:
            raise FieldTypeError("batch has no fields.")
        raise FieldTypeError(
            f"field {next(iter(objects))!r} of batch must be a tensor or an array. "
            "Use push() for items."
        )
    lead = next(iter(leaves.values())).shape[:1]
    for name, leaf in leaves.items():
        if not lead or leaf.shape[:1] != lead:
            raise SchemaError(
                f"fields of batch must have equal lengths, and {name!r} has shape "
                f"{list(leaf.shape)}."
            )
    form = form or _form_of(leaves, 1)
    return Items(lead[0], _fitted(leaves, form, 1), None, form)


class ItemStore:
    """Ring of the last `capacity` items.

    Args:
        capacity: Number of items.
        device: Device of the columns.
        order: Order of reads and writes among CUDA streams.
        form: Form of the columns; None to use the form of the first items.
    """

    def __init__(
        self,
        capacity: int,
        device: torch.device,
        order: StreamOrder,
        form: Form | None = None,
    ) -> None:
        self.capacity = capacity
        self.device = device
        self.form = form
        #: Columns of the items. Without columns, the ring still counts items and computes slots.
        self.ring = RingStore(
            capacity, 1, form.schema if form else Schema([]), device, num_guards=0
        )
        #: Objects by flat name, for each slot whose item has objects.
        self._objects: dict[int, dict[str, Any]] = {}
        self.order = order

    def next_ids(self, num_rows: int) -> torch.Tensor:
        """Return the ids that the next `num_rows` items will have.

        If there are more than `capacity` items, only the ids of the last `capacity` are returned,
        because a write then does not store the first items.
        """
        total = self.ring.total + num_rows
        num_stored = min(num_rows, self.capacity)
        return torch.arange(total - num_stored, total, device=self.device)

    def write(self, items: Items) -> torch.Tensor:
        """Append checked items and return the ids of the stored items, on the device.

        If there are more than `capacity` items, only the newest items are stored.
        """
        ids = self.next_ids(items.num_rows)
        if not items.num_rows:
            return ids
        if self.form is None:
            self.form = items.form
            self.ring = RingStore(self.capacity, 1, items.form.schema, self.device, num_guards=0)
        if items.columns:
            with self.order.writes:
                columns = sent_together(items.columns, self.device)
                self.ring.write([column.unsqueeze(1) for column in columns])
        else:
            self.ring.total += items.num_rows
        slots = self.ring.slot(ids)
        self.forget_objects(slots)
        if items.objects is not None:
            for slot, objects in zip(slots.tolist(), items.objects[-len(ids) :], strict=True):
                if objects:
                    self._objects[slot] = _copied(objects)
        return ids

    def columns(
        self,
        slots: torch.Tensor,
        device: torch.device | None = None,
        contiguous: bool = False,
        nested: bool = False,
    ) -> dict[str, Any]:
        """Copy the columns of slots `[n]` to a device: `[n, *event]` by flat name, or nested."""
        if not self.ring.names:
            return {}
        with self.order.reads:
            columns = self.ring.gather(slots, contiguous, nested)
        return on_device(columns, device)

    def as_pushed(self, name: str, column: torch.Tensor) -> Any:
        """Convert a copied column to the type of its pushed leaf: a numpy array or a tensor."""
        return (
            column.cpu().numpy() if self.form is not None and name in self.form.arrays else column
        )

    def objects(self, slots: torch.Tensor) -> list[dict[str, Any]]:
        """Copy the objects of slots `[n]`; `[]` if no item has objects."""
        if not self._objects:
            return []
        return [_copied(self._objects.get(slot, {})) for slot in slots.tolist()]

    def values(self, slots: torch.Tensor, name: str) -> list[Any]:
        """Return the object `name` of each slot `[n]`, without copies.

        An entry is None if the item has no such object. `[]` if no item of the store has objects.
        """
        if not self._objects:
            return []
        return [self._objects.get(slot, {}).get(name) for slot in slots.tolist()]

    def items(
        self,
        slots: torch.Tensor,
        extra: Mapping[str, Sequence[Any]],
        device: torch.device | None = None,
    ) -> list[dict[str, Any]]:
        """Copy the items of slots `[n]` to a device, and add the leaves `extra`, n values each."""
        columns = self.columns(slots, device)
        lists = {name: list(self.as_pushed(name, column)) for name, column in columns.items()}
        items = _rows(unflatten({**lists, **extra}), len(slots))
        for item, objects in zip(items, self.objects(slots), strict=False):
            for name, value in objects.items():
                put_leaf(item, name, value)
        return items

    def forget_objects(self, slots: torch.Tensor) -> None:
        """Delete the objects of slots `[n]` after their items were removed."""
        if not self._objects:
            return
        for slot in slots.tolist():
            self._objects.pop(slot, None)

    def clear(self) -> None:
        """Remove every item; keep the columns and their memory."""
        self.ring.clear()
        self._objects = {}

    def moved(self, first: int, capacity: int) -> ItemStore:
        """Copy the items from id `first` on to a new store, in which ids start at 0."""
        store = ItemStore(capacity, self.device, self.order, self.form)
        if self.form is not None:
            with self.order.writes:
                slots = self.ring.slot(torch.arange(first, self.ring.total, device=self.device))
                columns = list(self.columns(slots).values())
                store.write(Items(len(slots), columns, self.objects(slots) or None, self.form))
                self.order.keep(self.ring.slots_view(name) for name in self.form.schema)
        return store

    def state(self, subject: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Return the state to save: numbers, and tensors that may be views of this store.

        Raises:
            FieldTypeError: An object has no JSON form. The message starts with `subject`.
        """
        schema, arrays = self.form or (None, frozenset())
        num_live = self.ring.num_live
        views = [self.ring.slots_view(name)[:num_live, 0] for name in schema or ()]
        tensors = {f"column/{place}": view for place, view in enumerate(views)}
        if self._objects:
            text = to_json([self._objects.get(slot, {}) for slot in range(num_live)], subject)
            tensors["objects"] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        written = None if schema is None else schema.to_json()
        return {"total": self.ring.total, "schema": written, "arrays": sorted(arrays)}, tensors

    def restore(
        self, numbers: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], subject: str
    ) -> ItemStore:
        """Load a result of `state` into this empty store and return the store.

        Raises:
            CorruptFileError: The objects are damaged.
            SchemaError: The numbers are invalid, or the tensors do not match the numbers.
        """
        total = checked_count(numbers, "total", 0, 1 << 62)
        num_live = min(total, self.capacity)
        columns = {}
        if numbers["schema"] is not None:
            fields = numbers["schema"]
            schema = Schema(
                make_field(field["name"], field["shape"], field["dtype"]) for field in fields
            )
            for place, (name, field) in enumerate(schema.items()):
                shape = [num_live, *field.shape]
                columns[name] = checked_tensor(
                    tensors, f"column/{place}", field.torch_dtype, shape
                ).unsqueeze(1)
            self.form = Form(schema, frozenset(numbers["arrays"]))
            self.ring = RingStore(self.capacity, 1, schema, self.device, num_guards=0)
        self.ring.put_slots(0, columns)
        self.ring.total = total
        if "objects" in tensors:
            objects = from_json(tensors["objects"].cpu().numpy().tobytes(), subject)
            is_list = isinstance(objects, list) and len(objects) == num_live
            if not is_list or not all(type(of_item) is dict for of_item in objects):
                raise CorruptFileError(
                    f"{subject} are damaged: expected a list of {num_live} dicts."
                )
            self._objects = {slot: of_item for slot, of_item in enumerate(objects) if of_item}
        return self


def put_leaf(item: dict[str, Any], name: str, value: Any) -> None:
    """Set the leaf with a flat name in a nested dict."""
    *parents, last = name.split("/")
    for parent in parents:
        item = item.setdefault(parent, {})
    item[last] = value


def to_json(value: Any, subject: str) -> bytes:
    """Encode an object as JSON for `from_json`, which preserves tuples.

    Raises:
        FieldTypeError: The object contains a type other than None, bool, int, float, str, list,
            tuple, and dict with str keys.
    """
    return json.dumps(_encoded(value, subject), separators=(",", ":")).encode()


def from_json(data: bytes, subject: str) -> Any:
    """Decode the JSON of `to_json`. Raises `CorruptFileError` for invalid bytes."""
    try:
        return _decoded(json.loads(data))
    except (ValueError, TypeError, KeyError, RecursionError) as cause:
        raise CorruptFileError(f"{subject} are damaged: {cause}.") from cause


def _split_leaves(
    item: Any, skipped: frozenset[str] = frozenset()
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split an item into numeric tensors and arrays, and other leaves: two dicts by flat name.

    Nothing is copied.
    """
    columns: dict[str, Any] = {}
    objects: dict[str, Any] = {}
    for name, leaf in flatten(item, keeps_empty=True).items():
        if name in skipped:
            continue
        is_array = isinstance(leaf, (np.ndarray, np.generic)) and leaf.dtype.kind in "biufc"
        if is_array or isinstance(leaf, torch.Tensor):
            columns[name] = leaf
        else:
            objects[name] = leaf
    return columns, objects


def _form_of(leaves: Mapping[str, Any], num_lead: int) -> Form:
    """Return the form of items from the leaves of the first item.

    `num_lead` is the number of batch axes of the leaves: 0 for an item, 1 for a batch of items.
    """
    tensors = {name: dense(as_given(leaf), f"field {name!r}") for name, leaf in leaves.items()}
    schema = Schema(make_field(name, x.shape[num_lead:], x.dtype) for name, x in tensors.items())
    arrays = frozenset(name for name, leaf in leaves.items() if not isinstance(leaf, torch.Tensor))
    return Form(schema, arrays)


def _fitted(leaves: Mapping[str, Any], form: Form, num_lead: int) -> list[torch.Tensor]:
    """Check leaves and convert them to the dtypes of the columns, in the order of the columns.

    Raises:
        MissingFieldError, SchemaError, FieldTypeError: A leaf does not match its column.
    """
    check_same_names(form.schema, leaves)
    return [
        fit(field, leaves[name], num_lead=num_lead).to(field.torch_dtype)
        for name, field in form.schema.items()
    ]


def _copied(objects: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: x if isinstance(x, _CONSTANTS) else copy.deepcopy(x) for name, x in objects.items()
    }


def _rows(tree: Mapping[str, Any], num_rows: int) -> list[dict[str, Any]]:
    """Convert a nested dict of lists into a list of nested dicts."""
    parts = [_rows(part, num_rows) if isinstance(part, dict) else part for part in tree.values()]
    if not parts:
        return [{} for _ in range(num_rows)]
    keys = tuple(tree)
    return [dict(zip(keys, values)) for values in zip(*parts)]  # noqa: B905


def _encoded(value: Any, subject: str) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) in (list, tuple):
        entries = [_encoded(entry, subject) for entry in value]
        return entries if type(value) is list else {_TAG: "tuple", "of": entries}
    if type(value) is dict and all(type(key) is str for key in value):
        fields = {key: _encoded(entry, subject) for key, entry in value.items()}
        return {_TAG: "dict", "of": fields} if _TAG in value else fields
    raise FieldTypeError(
        f"{subject} contain a {type(value).__name__}, which cannot be saved. Use None, bool, int, "
        "float, str, list, tuple and dict of str; keep numbers in tensors or arrays."
    )


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return [_decoded(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    tag = value.get(_TAG)
    if tag == "tuple":
        return tuple(map(_decoded, value["of"]))
    if tag not in (None, "dict"):
        raise ValueError(f"unknown type {tag!r}")
    fields = value if tag is None else value["of"]
    return {key: _decoded(entry) for key, entry in fields.items()}
