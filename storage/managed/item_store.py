"""Items: the forms in which they are given, their ids, and `ItemStore`, which keeps them in memory.

One rule: copies are kept of what is given, and copies are given: a column of a ring per leaf of numbers, and a list by
slot of all other leaves, the objects. All items have the same columns; objects may come and go. Which rows count, and
which are drawn, is decided elsewhere. An id is `<name>_<row>`, cut at its last "_": names may hold any character.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch

from ..core.fields import Schema, check_same_names, flatten, map_leaves, unflatten
from ..core.memory import StreamOrder, as_given
from ..core.records import dense, fit, make_field
from ..errors import CorruptFileError, FieldTypeError, MissingFieldError, SchemaError, UsageError, nearest
from ..ring.ring_store import RingStore
from ..saving.saved_store import checked_count, checked_tensor

UNIQUE_ID = "replay_unique_id"
SLOT = "replay_buffer_idx"
#: Leaves that a sample adds to an item; they are not stored when the item is pushed back.
GIVEN = frozenset({UNIQUE_ID, SLOT, "staleness", "use", "IS"})
_ACTION = "add an item"
#: Objects that need no copy.
_CONSTANTS = (str, int, float, bool, bytes, type(None))
#: Key of a JSON object that stands for something else than a dict.
_TAG = "__is__"


class Form(NamedTuple):
    """The columns of items, and the names of those that came as arrays of numpy and are given back as such."""

    schema: Schema
    arrays: frozenset[str]


class Items(NamedTuple):
    """Checked items: columns `[n, *event]` in the order of the schema; objects by flat name, None if there are none."""

    num_rows: int
    columns: list[torch.Tensor]
    objects: list[dict[str, Any]] | None
    form: Form


class UnknownNameError(MissingFieldError):
    """An id, or a call, names a buffer that is not there (a `KeyError`)."""


def raise_unknown(name: Any, known: Iterable[str]) -> NoReturn:
    """Raise the error that no buffer has this name."""
    raise UnknownNameError("find a buffer", expected=f"buffer_name one of {nearest(str(name), known)}", got=repr(name))


def split_unique_id(unique_id: Any) -> tuple[str, int]:
    """Return the buffer's name and the row of an id; raise `UsageError` if it is none."""
    name, _, row = unique_id.rpartition("_") if isinstance(unique_id, str) else ("", "", "")
    if not name or not (row.isascii() and row.isdigit()):
        raise UsageError("read an id", expected="'<name>_<row>'", got=repr(unique_id))
    return name, int(row)


def as_items(data: Any) -> list[Any]:
    """List what was pushed: one item, or several."""
    return [data] if isinstance(data, Mapping) else several(data)


def several(data: Any) -> list[Any]:
    """List several items; one item, a text or a number is an error."""
    if isinstance(data, (Mapping, str, bytes)) or not isinstance(data, Iterable):
        raise SchemaError("push", expected="data as a list of items", got=type(data).__name__)
    return list(data)


def listed(values: Any) -> list[Any]:
    """List values of any form: tensors and arrays as numbers, None as nothing, a single value as one."""
    if values is None:
        return []
    if isinstance(values, (torch.Tensor, np.ndarray, np.generic)):
        return list(values.reshape(-1).tolist())
    return list(values) if isinstance(values, Iterable) and not isinstance(values, (str, bytes)) else [values]


def plain_number(value: Any) -> Any:
    """Return a single number of torch or numpy as Python's."""
    is_one = isinstance(value, (torch.Tensor, np.ndarray, np.generic)) and math.prod(value.shape) == 1
    return value.item() if is_one else value


def read_items(items: Sequence[Any], form: Form | None) -> Items:
    """Check items; `form` is that of the items before, None if there are none.

    Raises:
        MissingFieldError, SchemaError, FieldTypeError: Naming the first leaf that does not fit.
    """
    parts = [_split_leaves(item, GIVEN) for item in items]
    if not parts:
        return Items(0, [], None, form or Form(Schema([]), frozenset()))
    form = form or _form_of(parts[0][0], 0)
    fitted = [_fitted(leaves, form, 0) for leaves, _ in parts]
    objects = [objects for _, objects in parts]
    columns = [torch.stack(leaves) for leaves in zip(*fitted, strict=True)]
    return Items(len(parts), columns, objects if any(objects) else None, form)


def read_batch(batch: Mapping[str, Any], form: Form | None) -> Items:
    """Check a nested mapping of `[n, *event]` tensors and arrays as `read_items` checks items."""
    leaves, objects = _split_leaves(batch)
    if objects or not leaves:
        got = f"{next(iter(objects))!r}" if objects else "no leaf"
        raise FieldTypeError("add a batch", "", "leaves that are tensors or arrays", got, "Use push() for items")
    lead = next(iter(leaves.values())).shape[:1]
    for name, leaf in leaves.items():
        if not lead or leaf.shape[:1] != lead:
            raise SchemaError("add a batch", f"with {name!r}", "leaves of equal length", f"{list(leaf.shape)}")
    form = form or _form_of(leaves, 1)
    return Items(lead[0], _fitted(leaves, form, 1), None, form)


class ItemStore:
    """The last `capacity` items.

    Args:
        capacity: Items that fit.
        device: Where columns are kept.
        form: The columns; None for those of the first items.
    """

    def __init__(self, capacity: int, device: torch.device, form: Form | None = None) -> None:
        self.capacity = capacity
        self.device = device
        self.form = form
        #: Computes ids and slots, and counts the items also while there are no columns.
        self.ring = RingStore(capacity, 1, form.schema if form else Schema([]), device, num_guards=0)
        #: By slot, the objects of items that have any.
        self._objects: dict[int, dict[str, Any]] = {}
        self._order = StreamOrder(device)

    def next_ids(self, num_rows: int) -> torch.Tensor:
        """List the ids that new items will have, those that stay."""
        total = self.ring.total + num_rows
        return torch.arange(total - min(num_rows, self.capacity), total, device=self.device)

    def write(self, items: Items) -> torch.Tensor:
        """Append checked items; of more than fit the newest stay. Gives the ids of those, on the device."""
        ids = self.next_ids(items.num_rows)
        if not items.num_rows:
            return ids
        if self.form is None:
            self.form = items.form
            self.ring = RingStore(self.capacity, 1, items.form.schema, self.device, num_guards=0)
        if items.columns:
            self._order.wait(is_write=True)
            self.ring.write([column.unsqueeze(1) for column in items.columns])
            self._order.record(is_write=True)
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
        self, slots: torch.Tensor, device: torch.device | None = None, contiguous: bool = False, nested: bool = False
    ) -> dict[str, Any]:
        """Copy the columns of `[n]` slots to a device: `[n, *event]` by flat name, or nested."""
        if not self.ring.names:
            return {}
        self._order.wait(is_write=False)
        found = self.ring.gather(slots, contiguous, nested)
        self._order.record(is_write=False)
        return found if device is None else map_leaves(lambda leaf: leaf.to(device), found)

    def given(self, name: str, column: torch.Tensor) -> Any:
        """Return a copied column as it came: as an array or a tensor."""
        return column.cpu().numpy() if self.form is not None and name in self.form.arrays else column

    def objects(self, slots: torch.Tensor) -> list[dict[str, Any]]:
        """Copy the objects of `[n]` slots; empty if no item has any."""
        return [_copied(self._objects.get(slot, {})) for slot in slots.tolist()] if self._objects else []

    def values(self, slots: torch.Tensor, name: str) -> list[Any]:
        """List one object of `[n]` slots, None where it is missing; not copied."""
        return [self._objects.get(slot, {}).get(name) for slot in slots.tolist()] if self._objects else []

    def items(
        self, slots: torch.Tensor, extra: Mapping[str, Sequence[Any]], device: torch.device | None = None
    ) -> list[dict[str, Any]]:
        """Copy the items in `[n]` slots to a device, and add more leaves to them, n values each."""
        columns = self.columns(slots, device)
        lists = {name: list(self.given(name, column)) for name, column in columns.items()}
        found = _rows(unflatten({**lists, **extra}), len(slots))
        for item, objects in zip(found, self.objects(slots), strict=False):
            for name, value in objects.items():
                put_leaf(item, name, value)
        return found

    def forget_objects(self, slots: torch.Tensor) -> None:
        """Delete the objects of `[n]` slots, whose items were removed."""
        for slot in slots.tolist() if self._objects else ():
            self._objects.pop(slot, None)

    def clear(self) -> None:
        """Forget every item; columns and their memory stay."""
        self.ring.clear()
        self._objects = {}

    def moved(self, first: int, capacity: int) -> ItemStore:
        """Copy the items from id `first` on to a new store, where they are counted from 0."""
        made = ItemStore(capacity, self.device, self.form)
        if self.form is not None:
            slots = self.ring.slot(torch.arange(first, self.ring.total, device=self.device))
            made.write(Items(len(slots), list(self.columns(slots).values()), self.objects(slots) or None, self.form))
        return made

    def state(self, where: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Return numbers, and tensors that may share memory; raise if an object cannot be JSON."""
        schema, arrays = self.form or (None, frozenset())
        num_live = self.ring.num_live
        views = [self.ring.slots_view(name)[:num_live, 0] for name in schema or ()]
        tensors = {f"column/{place}": view for place, view in enumerate(views)}
        if self._objects:
            text = to_json([self._objects.get(slot, {}) for slot in range(num_live)], where)
            tensors["objects"] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        written = None if schema is None else schema.to_json()
        return {"total": self.ring.total, "schema": written, "arrays": sorted(arrays)}, tensors

    def restore(self, numbers: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], where: str) -> ItemStore:
        """Take over, as an empty store, what `state` gave; raise if it is not that. Gives itself."""
        total = checked_count(numbers, "total", 0, 1 << 62)
        num_live = min(total, self.capacity)
        columns = {}
        if numbers["schema"] is not None:
            schema = Schema(make_field(one["name"], one["shape"], one["dtype"]) for one in numbers["schema"])
            for place, (name, field) in enumerate(schema.items()):
                shape = [num_live, *field.shape]
                columns[name] = checked_tensor(tensors, f"column/{place}", field.torch_dtype, shape).unsqueeze(1)
            self.form = Form(schema, frozenset(numbers["arrays"]))
            self.ring = RingStore(self.capacity, 1, schema, self.device, num_guards=0)
        self.ring.put_slots(0, columns)
        self.ring.total = total
        if "objects" in tensors:
            objects = from_json(tensors["objects"].cpu().numpy().tobytes(), where)
            is_list = isinstance(objects, list) and len(objects) == num_live
            if not is_list or not all(type(one) is dict for one in objects):
                raise CorruptFileError("read objects", where, f"{num_live} of them", "others")
            self._objects = {slot: one for slot, one in enumerate(objects) if one}
        return self


def put_leaf(item: dict[str, Any], name: str, value: Any) -> None:
    """Set the leaf of a flat name in a nested dict."""
    *parents, last = name.split("/")
    for parent in parents:
        item = item.setdefault(parent, {})
    item[last] = value


def to_json(value: Any, where: str) -> bytes:
    """Write an object as JSON from which `from_json` makes an equal one; tuples stay tuples.

    Raises:
        FieldTypeError: It holds something else than None, bool, int, float, str, list, tuple and dict of str.
    """
    return json.dumps(_encoded(value, where), separators=(",", ":")).encode()


def from_json(data: bytes, where: str) -> Any:
    """Read what `to_json` wrote; raise `CorruptFileError` if it is not that."""
    try:
        return _decoded(json.loads(data))
    except (ValueError, TypeError, KeyError, RecursionError) as cause:
        raise CorruptFileError("read objects", where, "JSON as it was written", str(cause)) from cause


def _split_leaves(item: Any, skipped: frozenset[str] = frozenset()) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the tensors and arrays of numbers of an item, and all other leaves, by flat name. Nothing is copied."""
    columns: dict[str, Any] = {}
    objects: dict[str, Any] = {}
    for name, leaf in flatten(item, keeps_empty=True).items():
        if name in skipped:
            continue
        is_array = isinstance(leaf, (np.ndarray, np.generic)) and leaf.dtype.kind in "biufc"
        (columns if is_array or isinstance(leaf, torch.Tensor) else objects)[name] = leaf
    return columns, objects


def _form_of(leaves: Mapping[str, Any], num_lead: int) -> Form:
    """Declare the columns that first leaves show."""
    tensors = {name: dense(name, as_given(leaf), _ACTION) for name, leaf in leaves.items()}
    arrays = frozenset(name for name, leaf in leaves.items() if not isinstance(leaf, torch.Tensor))
    return Form(Schema(make_field(name, x.shape[num_lead:], x.dtype) for name, x in tensors.items()), arrays)


def _fitted(leaves: Mapping[str, Any], form: Form, num_lead: int) -> list[torch.Tensor]:
    """Return leaves in the order and the dtypes of the columns, or raise."""
    check_same_names(form.schema, leaves, _ACTION)
    return [
        fit(_ACTION, field, leaves[name], num_lead=num_lead).to(field.torch_dtype)
        for name, field in form.schema.items()
    ]


def _copied(objects: Mapping[str, Any]) -> dict[str, Any]:
    return {name: x if isinstance(x, _CONSTANTS) else copy.deepcopy(x) for name, x in objects.items()}


def _rows(tree: Mapping[str, Any], num_rows: int) -> list[dict[str, Any]]:
    """Turn a nested dict of lists into a list of nested dicts."""
    parts = [_rows(part, num_rows) if isinstance(part, dict) else part for part in tree.values()]
    keys = tuple(tree)
    return [dict(zip(keys, values)) for values in zip(*parts)] if parts else [{} for _ in range(num_rows)]  # noqa: B905


def _encoded(value: Any, where: str) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) in (list, tuple):
        found = [_encoded(one, where) for one in value]
        return found if type(value) is list else {_TAG: "tuple", "of": found}
    if type(value) is dict and all(type(key) is str for key in value):
        fields = {key: _encoded(one, where) for key, one in value.items()}
        return {_TAG: "dict", "of": fields} if _TAG in value else fields
    expected = "objects of None, bool, int, float, str, list, tuple and dict of str"
    advice = "Keep numbers in tensors or arrays, and other objects elsewhere"
    raise FieldTypeError("save objects", where, expected, f"a {type(value).__name__}", advice)


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return [_decoded(one) for one in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(_TAG)
    if kind == "tuple":
        return tuple(map(_decoded, value["of"]))
    if kind not in (None, "dict"):
        raise ValueError(f"no kind {kind!r}")
    fields = value if kind is None else value["of"]
    return {key: _decoded(one) for key, one in fields.items()}
