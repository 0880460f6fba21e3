"""Records as users give them -> leaves that fit a schema.

One rule: everything is checked here, before the first byte is written; nothing is written here.
A record is a nested mapping (a `TensorDict` counts) of tensors or arrays that all begin with the
same leading axes: `[n, *event]`, or `[n, lanes, *event]`.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ..errors import FieldTypeError, MissingFieldError, SchemaError
from .fields import DTYPES, Field, Schema, dtype_name
from .host_arrays import as_given
from .tree import check_same_names

#: Name of a leaf inside a nested mapping: "key", ("outer", "key"), or "outer/key".
Key = str | tuple[str, ...]
_ACTION = "add rows"
COMPLEX_DTYPES: dict[str, tuple[torch.dtype, np.dtype[Any]]] = {
    "complex64": (torch.complex64, np.dtype("<c8")),
    "complex128": (torch.complex128, np.dtype("<c16")),
}
#: Above this size torch's copies, with several threads, are worth their start.
MAX_FORM_BYTES = 4 * 1024 * 1024


def flat_name(key: Key) -> str:
    """Give the flat name of a key: `("next", "done")` -> `"next/done"`."""
    parts = (key,) if isinstance(key, str) else key
    if not isinstance(parts, (tuple, list)) or not parts or not all(isinstance(part, str) and part for part in parts):
        raise SchemaError("name a leaf", "", "a str or a tuple of them", repr(key))
    return "/".join(parts)


def listed(keys: Key | list[Key] | list[str] | None) -> list[Key]:
    """List keys: None is no key, a str or a tuple is one, a list is several."""
    if keys is None:
        return []
    return list(keys) if isinstance(keys, list) else [keys]


def normal(keys: Key | list[Key] | list[str] | None) -> str | list[str] | None:
    """Give keys as flat names, which JSON can hold: None, one, or a list."""
    if keys is None:
        return None
    return [flat_name(key) for key in keys] if isinstance(keys, list) else flat_name(keys)


def names_below(schema: Mapping[str, Any], key: Key, action: str) -> list[str]:
    """List the leaves that a key means: itself, or all below it. None is an error that lists what there is."""
    wanted = flat_name(key)
    found = [name for name in schema if name == wanted or name.startswith(wanted + "/")]
    if not found:
        raise MissingFieldError(action, f"of {wanted!r}", "one of " + ", ".join(map(repr, schema)), repr(wanted))
    return found


def leaves(record: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Walk a record: flat names and leaves, in order. Leaves are not copied."""
    if not hasattr(record, "items"):
        raise SchemaError(_ACTION, "", "a nested mapping of tensors", type(record).__name__)
    for key, value in record.items():
        if not isinstance(key, str) or not key or "/" in key:
            raise SchemaError("name a leaf", f"under {prefix or 'the top'!r}", "a non-empty str without '/'", repr(key))
        if isinstance(value, torch.Tensor):
            yield prefix + key, value
        elif isinstance(value, Mapping) or (hasattr(value, "items") and hasattr(value, "keys")):
            yield from leaves(value, f"{prefix}{key}/")
        else:
            yield prefix + key, value


@dataclass(frozen=True)
class ComplexField(Field):
    """A field of complex numbers, which buffers in memory hold and recordings do not."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(int(size) for size in self.shape))

    @property
    def torch_dtype(self) -> torch.dtype:
        return COMPLEX_DTYPES[self.dtype][0]

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        return COMPLEX_DTYPES[self.dtype][1]


def make_field(name: str, shape: Sequence[int], dtype: Any) -> Field:
    """Declare a field of any dtype that a buffer can hold, given as torch's, numpy's or by name."""
    text = str(dtype).removeprefix("torch.")
    if text in COMPLEX_DTYPES:
        return ComplexField(name, tuple(shape), text)
    return Field(name, tuple(shape), text if text in DTYPES else dtype_name(dtype, f"of {name!r}"))


@dataclass(frozen=True)
class Rows:
    """Leaves that fit: `[n, lanes, *event]` each, in the order of the schema."""

    num_rows: int
    tensors: list[torch.Tensor]
    schema: Schema


class _Leaf(NamedTuple):
    """Where a leaf of a record is, and what it is."""

    node: int
    key: str
    is_array: bool
    dtype: np.dtype[Any]
    #: Without the leading axes.
    event: tuple[int, ...]


class Form:
    """The form of a record on the CPU: names, kinds, dtypes and shapes of its leaves.

    This is the one fast path of reading records. A record of the same form as the last one, which was checked
    completely, needs no further check: a row of four fields takes 4 to 8 us instead of 45 to 100.

    Args:
        record: What was read: a nested mapping of tensors and arrays.
        names: Its leaves, in the order in which they are wanted.
        num_lead: How many leading axes leaves have.

    Raises:
        TypeError: The form does not say all, as of lists, subclasses of tensors, or tensors on a GPU.
    """

    def __init__(self, record: Any, names: Iterable[str], num_lead: int) -> None:
        self.num_lead = num_lead
        #: Nested mappings, the record itself first: parent, key, type and number of keys.
        self._nodes = [(0, "", type(record), len(record.keys()))]
        found: dict[str, _Leaf] = {}
        waiting = [(0, "", record)]
        for number, prefix, node in waiting:
            for key, value in node.items():
                if type(value) in (torch.Tensor, np.ndarray):
                    is_array = isinstance(value, np.ndarray)
                    array = value if is_array else value.numpy()
                    found[prefix + key] = _Leaf(number, key, is_array, array.dtype, array.shape[num_lead:])
                else:
                    self._nodes.append((number, key, type(value), len(value.keys())))
                    waiting.append((len(self._nodes) - 1, f"{prefix}{key}/", value))
        self._leaves = [found.pop(name) for name in names]
        if found:
            raise TypeError("a record with other leaves")
        self.dtypes = [leaf.dtype for leaf in self._leaves]
        #: Leading sizes of the last record, and with them the shapes of its leaves.
        self.lead: tuple[int, ...] = ()
        self._shapes: list[Any] = [None] * len(self._leaves)

    def arrays(self, record: Any) -> list[npt.NDArray[Any]] | None:
        """Give the leaves of a record of this form as arrays that share memory; None if it has another one."""
        nodes = [record]
        found = []
        try:
            for parent, key, kind, num_keys in self._nodes:
                if key:
                    nodes.append(nodes[parent].get(key))  # not by [], which of a defaultdict adds a key
                node = nodes[-1]
                if type(node) is not kind or len(node if isinstance(node, dict) else node.keys()) != num_keys:
                    return None
            for number, (place, key, is_array, dtype, event) in enumerate(self._leaves):
                value = nodes[place].get(key)
                if is_array and type(value) is not np.ndarray:  # a masked array, for example
                    return None
                array = value if is_array else value.numpy()
                if array.shape != self._shapes[number]:
                    if number or array.shape[self.num_lead :] != event:
                        return None
                    self.lead = array.shape[: self.num_lead]
                    self._shapes = [self.lead + leaf.event for leaf in self._leaves]
                if array.dtype is not dtype:
                    return None
                found.append(array)
        except (AttributeError, KeyError, RuntimeError, TypeError):  # for example a tensor with gradients
            return None
        return found


class RecordReader:
    """Turn records into `Rows`; remembers the schema once it is `freeze`d.

    Args:
        num_lanes: Second axis of the store; None until the first record shows it.
        has_lane_axis: Whether leaves are `[n, lanes, *event]`; otherwise they are `[n * lanes, *event]`.
        auto_unsqueeze: Whether a leaf without event axes becomes `[..., 1]` instead of an error.
        narrow: Whether float64 is kept as float32.
    """

    def __init__(self, num_lanes: int | None, has_lane_axis: bool, auto_unsqueeze: bool, narrow: bool) -> None:
        self.num_lanes = num_lanes
        self.has_lane_axis = has_lane_axis
        self.auto_unsqueeze = auto_unsqueeze
        self.narrow = narrow
        self.schema: Schema | None = None
        self._form: Form | None = None
        #: Leading sizes of the last record of the form, and what its arrays are to look like; None if they do not fit.
        self._lead: tuple[int, ...] | None = None
        self._shapes: list[tuple[int, ...]] | None = None
        self._is_reshaped = auto_unsqueeze or has_lane_axis or num_lanes != 1
        #: Dtypes of the fields as arrays; and the same if some of those of the form differ.
        self._dtypes: list[np.dtype[Any]] | None = None
        self._converted: list[np.dtype[Any]] | None = None
        self._max_form_rows = 0

    def freeze(self, schema: Schema, num_lanes: int) -> None:
        """From now on every record must have these fields."""
        self.schema, self.num_lanes, self._form = schema, num_lanes, None
        is_known = all(field.torch_dtype is not torch.bfloat16 for field in schema.values())
        self._dtypes = [field.numpy_dtype for field in schema.values()] if is_known and schema else None
        self._max_form_rows = MAX_FORM_BYTES // max(1, sum(field.row_bytes for field in schema.values()))

    def read_again(self, record: Any) -> list[npt.NDArray[Any]] | None:
        """Give the leaves of a small record that has the form of the last one, in the fields' dtypes; else None.

        They are `[n, *event]` with one lane, else `[n, lanes, *event]`, and share memory where nothing is converted.
        """
        form = self._form
        found = form.arrays(record) if form is not None else None
        if form is None or found is None:
            return None
        if form.lead is not self._lead:
            self._lead, self._shapes = form.lead, self._shapes_with(form.lead)
        if self._shapes is None:
            return None
        if self._is_reshaped:
            found = [array.reshape(shape) for array, shape in zip(found, self._shapes, strict=True)]
        if self._converted is not None:
            with np.errstate(all="ignore"):  # torch converts without a warning too
                found = [array.astype(dtype, copy=False) for array, dtype in zip(found, self._converted, strict=True)]
        return found

    def _shapes_with(self, lead: tuple[int, ...]) -> list[tuple[int, ...]] | None:
        """List the shapes of arrays with these leading sizes; None if they do not fit or are not small."""
        assert self.schema is not None and self.num_lanes is not None
        lanes, num = self.num_lanes, prod(lead)
        is_whole = lead[1:] == (lanes,) if self.has_lane_axis else len(lead) == 1 and num % lanes == 0
        if not is_whole or not 0 < num <= self._max_form_rows:
            return None
        shape = (num,) if lanes == 1 else (num // lanes, lanes)
        return [(*shape, *field.shape) for field in self.schema.values()]

    def _note_form(self, record: Any) -> None:
        """Remember the form of a record that fits."""
        self._form = None
        if self.schema is None or self._dtypes is None:
            return
        try:
            form = Form(record, self.schema, 2 if self.has_lane_axis else 1)
        except (AttributeError, KeyError, RuntimeError, TypeError):
            return
        self._form = form
        self._converted = None if all(map(operator.is_, form.dtypes, self._dtypes)) else self._dtypes

    def read(self, record: Any, names: list[str] | None = None) -> Rows | None:
        """Check a record completely; None if it has no leaf.

        Args:
            record: The record.
            names: Only these fields of the schema must be, and may be, there.

        Raises:
            MissingFieldError, SchemaError, FieldTypeError: Naming the first leaf that does not fit.
        """
        flat = {name: self._tensor(name, value) for name, value in leaves(record)}
        if not flat:
            return None
        schema = self.schema
        if schema is not None:
            if names is not None:
                schema = Schema(schema[name] for name in names)
            check_same_names(schema, flat, _ACTION)
        shaped = {name: self._with_lead(name, value) for name, value in flat.items()}
        self._check_lead(shaped)
        if schema is None:
            schema = Schema(declare(name, value) for name, value in shaped.items())
        if names is None:
            self._note_form(record)
        num_rows = len(next(iter(shaped.values())))
        return Rows(num_rows, [_fit(field, shaped[name]) for name, field in schema.items()], schema)

    def _tensor(self, name: str, value: Any) -> torch.Tensor:
        if not isinstance(value, torch.Tensor):
            value = as_tensor(value, _ACTION, f"with {name!r}")
        found = dense(name, value, _ACTION)
        if self.narrow and found.dtype == torch.float64:
            found = found.to(torch.float32)
        return found

    def _with_lead(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """View a leaf as `[n, lanes, *event]`."""
        num_lead = 2 if self.has_lane_axis else 1
        axes = "[n, lanes, *event]" if self.has_lane_axis else "[n, *event]"
        if value.dim() == num_lead and self.auto_unsqueeze:
            value = value.unsqueeze(-1)
        if value.dim() <= num_lead:
            advice = "Add a trailing axis, x.unsqueeze(-1), or create the buffer with auto_unsqueeze=True"
            expected = f"{axes} with at least one event axis"
            raise SchemaError(_ACTION, f"with {name!r}", expected, f"shape {list(value.shape)}", advice)
        if self.has_lane_axis:
            return value
        lanes = self.num_lanes or 1
        if len(value) % lanes:
            raise SchemaError(_ACTION, f"with {name!r}", f"a multiple of {lanes} envs", f"{len(value)} rows")
        return value.unsqueeze(1) if lanes == 1 else value.reshape(len(value) // lanes, lanes, *value.shape[1:])

    def _check_lead(self, shaped: Mapping[str, torch.Tensor]) -> None:
        (first, like), *others = shaped.items()
        for name, value in others:
            if value.shape[:2] != like.shape[:2]:
                expected = f"leading sizes {list(like.shape[:2])} like {first!r}"
                raise SchemaError(_ACTION, f"with {name!r}", expected, str(list(value.shape[:2])))
        if self.num_lanes is not None and like.shape[1] != self.num_lanes:
            raise SchemaError(_ACTION, f"with {first!r}", f"{self.num_lanes} lanes", str(like.shape[1]))
        if like.shape[1] < 1:
            raise SchemaError(_ACTION, f"with {first!r}", "at least one lane", "0")


def dense(name: str, value: torch.Tensor, action: str) -> torch.Tensor:
    """Give a leaf as bytes in memory say it, without gradients; `FieldTypeError` if they do not say it alone."""
    if value.layout is not torch.strided or value.device.type == "meta" or value.is_quantized:
        got = f"{value.layout}{' quantized' if value.is_quantized else ''} on {value.device}"
        raise FieldTypeError(action, f"with {name!r}", "a dense tensor", got)
    # Of x.conj() and its imaginary part memory holds another number, and a flag.
    found: torch.Tensor = value.detach().resolve_conj().resolve_neg()
    return found


def as_tensor(value: Any, action: str, where: str) -> torch.Tensor:
    """View what is no tensor as one, on the CPU."""
    try:
        return as_given(np.asarray(value))
    except (TypeError, ValueError, RuntimeError) as cause:
        got = f"{type(value).__name__}: {cause}"
        raise FieldTypeError(action, where, "a tensor or an array of numbers", got) from cause


def declare(name: str, value: torch.Tensor) -> Field:
    """Declare the field that a first leaf, `[n, lanes, *event]`, shows."""
    return make_field(name, value.shape[2:], value.dtype)


def _fit(field: Field, value: torch.Tensor) -> torch.Tensor:
    words = f"{field.dtype} rows of shape {list(field.shape)}"
    if tuple(value.shape[2:]) != field.shape:
        raise SchemaError(_ACTION, f"with {field.name!r}", words, f"shape {list(value.shape[2:])}")
    if not torch.can_cast(value.dtype, field.torch_dtype):
        raise FieldTypeError(_ACTION, f"with {field.name!r}", words, str(value.dtype), "Convert it first")
    return value
