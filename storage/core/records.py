"""Checks of user records against a schema, before any data are written.

A record is a nested mapping of tensors or arrays, or a `TensorDict`. `fit` checks one leaf.
`RecordReader` checks whole records of rows. A lane is one of several streams of rows that are
written at the same time, such as one environment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import isfinite, prod
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ..errors import FieldTypeError, MissingFieldError, SchemaError, nearest
from .deferred import DeferredErrors
from .fields import DTYPES, Field, Schema, check_same_names, dtype_name, flatten, signed
from .memory import as_given

#: Name of a leaf inside a nested mapping: "key", ("outer", "key"), or "outer/key".
Key = str | tuple[str, ...]
#: Names of the dtypes that are accepted for a leaf:
#: "exact": only the dtype of the field.
#: "safe": dtypes that torch casts to the dtype of the field.
#: "in range": the dtypes of "safe", but each number must be in the range of the field's dtype.
#: "floating": any floating dtype, but each number must be in the range of the field's dtype.
#: "flag": bool, or any dtype of real numbers.
Cast = Literal["exact", "safe", "in range", "floating", "flag"]
COMPLEX_DTYPES: dict[str, tuple[torch.dtype, np.dtype[Any]]] = {
    "complex64": (torch.complex64, np.dtype("<c8")),
    "complex128": (torch.complex128, np.dtype("<c16")),
}
#: Maximum bytes of a record that is read as numpy arrays.
#: torch copies larger records faster, with several threads.
_MAX_FORM_BYTES = 4 * 1024 * 1024


def flat_name(key: Key, argument: str = "a field name") -> str:
    """Return the flat name of a key: `("next", "done")` -> `"next/done"`.

    `argument` is the name of the user's argument in errors.
    """
    parts = (key,) if isinstance(key, str) else key
    if (
        not isinstance(parts, (tuple, list))
        or not parts
        or not all(isinstance(part, str) and part for part in parts)
    ):
        raise SchemaError(
            f"{argument} must be a non-empty str or a tuple of non-empty strs, got {key!r}."
        )
    return "/".join(parts)


def listed(keys: Key | list[Key] | list[str] | None) -> list[Key]:
    """Return keys as a list: [] for None, one key for a str or a tuple, all keys of a list."""
    if keys is None:
        return []
    return list(keys) if isinstance(keys, list) else [keys]


def normal(keys: Key | list[Key] | list[str] | None, argument: str) -> str | list[str] | None:
    """Convert keys to flat names for JSON: None, one name, or a list of names."""
    if keys is None:
        return None
    return (
        [flat_name(key, argument) for key in keys]
        if isinstance(keys, list)
        else flat_name(keys, argument)
    )


def names_below(schema: Mapping[str, Any], key: Key, argument: str) -> list[str]:
    """Return the flat names of the leaves that a key selects: a leaf, or all leaves of a mapping.

    Raises:
        MissingFieldError: The schema has no such leaf. The message names the argument and all
            fields.
    """
    wanted = flat_name(key, argument)
    names = [name for name in schema if name == wanted or name.startswith(wanted + "/")]
    if not names:
        raise MissingFieldError(
            f"{argument} {wanted!r} is an unknown field. The fields are {nearest(wanted, schema)}."
        )
    return names


@dataclass(frozen=True)
class ComplexField(Field):
    """A field of complex numbers. Buffers in memory support it; recordings do not."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(int(size) for size in self.shape))

    @property
    def torch_dtype(self) -> torch.dtype:
        return COMPLEX_DTYPES[self.dtype][0]

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        return COMPLEX_DTYPES[self.dtype][1]


def make_field(name: str, shape: Sequence[int], dtype: Any) -> Field:
    """Build a field of a dtype that buffers support: a torch dtype, a numpy dtype or its name."""
    text = str(dtype).removeprefix("torch.")
    if text in COMPLEX_DTYPES:
        return ComplexField(name, tuple(shape), text)
    return Field(
        name, tuple(shape), text if text in DTYPES else dtype_name(dtype, f"field {name!r}")
    )


# Functions for one leaf.


def numbers(name: str, value: Any) -> torch.Tensor:
    """Convert numbers to a tensor without gradients. A tensor stays on its device.

    `name` is the name of the user's argument in errors.
    """
    try:
        return as_given(value).detach()
    except (TypeError, ValueError, RuntimeError) as cause:
        raise FieldTypeError(
            f"{name} must be a tensor or an array of numbers, got {repr(value)[:60]}."
        ) from cause


def as_tensor(value: Any, subject: str) -> torch.Tensor:
    """Convert an array, number or nested list to a tensor on the CPU, as a view if possible.

    `subject` is the subject of errors, such as "field 'reward'".
    """
    try:
        if type(value) is np.ndarray and value.flags.behaved:
            # `from_numpy` takes a fifth of the time of `as_given`.
            return torch.from_numpy(value)
    # torch rejects byte-swapped arrays, negative strides, and dtypes that it does not have.
    except (TypeError, ValueError):
        pass
    try:
        return as_given(np.asarray(value))
    except (TypeError, ValueError, RuntimeError) as cause:
        raise FieldTypeError(
            f"{subject} must be a tensor or an array of numbers, got {type(value).__name__}: "
            f"{cause}."
        ) from cause


def dense(value: torch.Tensor, subject: str) -> torch.Tensor:
    """Check that a tensor is dense, and return it without gradients and lazy operations.

    `subject` is the subject of errors, such as "field 'reward'".

    Raises:
        FieldTypeError: The tensor is sparse, quantized, nested or on the meta device.
    """
    if (
        value.layout is not torch.strided
        or value.device.type == "meta"
        or value.is_quantized
        or value.is_nested
    ):
        if value.is_nested:
            form = "a nested tensor"
        elif value.is_quantized:
            form = "a quantized tensor"
        elif value.device.type == "meta":
            form = "a tensor without data on the device 'meta'"
        else:
            form = f"a tensor of layout {value.layout}"
        raise FieldTypeError(f"{subject} must be a dense tensor, got {form}.")
    # torch conjugates and negates lazily, by a flag of the tensor.
    # Compute the numbers, since callers copy only the memory.
    resolved: torch.Tensor = value.detach().resolve_conj().resolve_neg()
    return resolved


def fit(
    field: Field,
    value: Any,
    cast: Cast = "safe",
    *,
    num_lead: int = 0,
    shapes: Sequence[tuple[int, ...]] = (),
    deferred: DeferredErrors | None = None,
) -> torch.Tensor:
    """Check a leaf and return it as a dense tensor that can be copied into memory of a field.

    Args:
        field: Field with name, shape and dtype.
        value: Tensor on any device, array, or nested lists.
        cast: Accepted dtypes; see `Cast`. Only "in range" and "floating" convert the dtype.
        num_lead: Number of leading axes, of any size, before the field's shape.
        shapes: Accepted shapes after the leading axes; by default the field's shape.
        deferred: Collector of errors about out-of-range numbers on CUDA; such numbers become 0.
            None: the host waits for the device and raises the error immediately.

    Raises:
        SchemaError: The shape is wrong. The message names the field.
        FieldTypeError: The dtype or a number is not accepted. The message names the field.
    """
    subject = f"field {field.name!r}"
    shapes = shapes or (field.shape,)
    if not isinstance(value, torch.Tensor):
        value = as_tensor(value, subject)
    shape = tuple(value.shape[num_lead:])
    if shape not in shapes:
        rows = " per row" if num_lead else ""
        expected = " or ".join(str(tuple(expected_shape)) for expected_shape in shapes)
        raise SchemaError(f"{subject} has shape {shape}{rows}, expected {expected}.")
    tensor = dense(value, subject)
    is_accepted = tensor.dtype is field.torch_dtype
    if cast == "flag":
        is_accepted = not tensor.is_complex()
    elif cast == "floating":
        is_accepted = tensor.is_floating_point()
    elif cast != "exact":
        is_accepted = torch.can_cast(tensor.dtype, field.torch_dtype)
    if not is_accepted:
        dtype = str(tensor.dtype).removeprefix("torch.")
        expected = "bool or real numbers" if cast == "flag" else field.dtype
        raise FieldTypeError(
            f"{subject} has dtype {dtype}, expected {expected}. Convert the values first."
        )
    if cast in ("in range", "floating") and tensor.dtype not in always_fit(field.torch_dtype):
        return _in_range(tensor, field, deferred if tensor.is_cuda else None)
    return tensor


@cache
def always_fit(wanted: torch.dtype) -> frozenset[torch.dtype]:
    """Return the dtypes whose numbers all fit into the range of the dtype `wanted`."""
    low, high = _limits(wanted)
    dtypes = [dtype for dtype, _ in DTYPES.values() if torch.can_cast(dtype, wanted)]
    return frozenset(
        dtype for dtype in dtypes if low <= _limits(dtype)[0] and _limits(dtype)[1] <= high
    )


def _limits(dtype: torch.dtype) -> tuple[float, float]:
    if dtype is torch.bool:
        return 0, 1
    limits = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    return limits.min, limits.max


def _in_range(value: torch.Tensor, field: Field, deferred: DeferredErrors | None) -> torch.Tensor:
    """Convert numbers to the field's dtype, and check that they are in the range of this dtype.

    With `deferred`, numbers outside of the range become 0, and a later call raises the error.

    Raises:
        FieldTypeError: There is no `deferred`, and a number would wrap around or become infinite.
    """
    low, high = _limits(field.torch_dtype)
    limits = f"the range of {field.dtype} ({low} to {high})"
    if field.torch_dtype.is_floating_point:
        wide = value if value.is_floating_point() else value.double()
        kept = wide.to(field.torch_dtype)
        # A finite sum proves in one pass that no number is infinite.
        if deferred is None and isfinite(kept.sum().item()):
            return kept
        is_lost = kept.isinf() & wide.isfinite()
    else:
        # uint64 is viewed as int64: numbers of 2**63 and more become negative.
        wide = signed(value) if value.dtype is torch.uint64 else value.long()
        kept = value.to(field.torch_dtype)
        lowest = 0 if value.dtype is torch.uint64 else low
        is_lost = (wide < lowest) | (wide > min(high, 2**63 - 1))
    if deferred is not None:
        deferred.note(
            is_lost.sum(),
            lambda count: (
                FieldTypeError(
                    f"field {field.name!r} had numbers outside {limits} in an earlier call, which "
                    f"were stored as 0. Their count is {count}."
                )
                if count
                else None
            ),
        )
        return kept.masked_fill_(is_lost, 0)
    if bool(is_lost.any()):
        number = wide[is_lost][0].item()
        if value.dtype is torch.uint64:
            number %= 2**64
        raise FieldTypeError(f"field {field.name!r} contains {number}, outside {limits}.")
    return kept


# Functions for records with several leaves.


@dataclass(frozen=True)
class Rows:
    """Checked leaves of a record with n rows: `[n, lanes, *event]`, in the order of the schema."""

    num_rows: int
    tensors: list[torch.Tensor]
    schema: Schema


class _Leaf(NamedTuple):
    """Place, dtype and shape of one array in the last checked record, to recognize its form.

    Attributes:
        node: Index of the mapping that contains the leaf, in `RecordReader._nodes`.
        key: Key of the leaf in this mapping.
        dtype: Dtype of the leaf.
        event: Shape of the leaf without the leading axes.
        shape: Shape of the field per row.
        target: Dtype of the field.
    """

    node: int
    key: str
    dtype: np.dtype[Any]
    event: tuple[int, ...]
    shape: tuple[int, ...]
    target: np.dtype[Any]


class RecordReader:
    """Reader that checks records and converts their leaves to tensors `[n, lanes, *event]`.

    `read` checks a record completely and stores its form: names, types, dtypes and event shapes of
    the leaves. `read_again` and `rows_again` compare a record with this form and skip the other
    checks. A row of four fields then takes 4 to 8 us instead of 45 to 100 us. `read_again` returns
    arrays for small records on the CPU. `rows_again` returns tensors for other records too.
    `freeze` fixes the schema, which until then may differ between records.

    Args:
        num_lanes: Number of lanes, such as environments. Lanes are the second axis of the store.
            None: the first record determines the number, and `freeze` sets it.
        has_lane_axis: Whether leaves of records are `[n, lanes, *event]`. Otherwise they are
            `[n * lanes, *event]`.
        auto_unsqueeze: Whether a leaf without event axes gets one of size 1. Otherwise it is an
            error.
        narrow: Whether float64 is converted to float32.
    """

    def __init__(
        self, num_lanes: int | None, has_lane_axis: bool, auto_unsqueeze: bool, narrow: bool
    ) -> None:
        self.num_lanes = num_lanes
        self._first_num_lanes = num_lanes
        self.has_lane_axis = has_lane_axis
        self.num_lead = 2 if has_lane_axis else 1
        self.auto_unsqueeze = auto_unsqueeze
        self.narrow = narrow
        self.schema: Schema | None = None
        #: Mappings in the last checked record. The first item is the record itself.
        #: Items: (index of the parent mapping, key in the parent, type, number of keys).
        self._nodes: list[tuple[int, str, Any, int]] = []
        #: Leaves of the last checked record, in the order of the schema.
        #: The list is empty if numpy cannot read all leaves.
        self._leaves: list[_Leaf] = []
        #: Whether an item of `_leaves` has another dtype than its field.
        self._is_converted = False
        #: Leaves of the last checked record as tensors:
        #: (index of the mapping, key, type, dtype, event shape, shape of the field).
        #: The list is empty unless all leaves are tensors on one device in the fields' dtypes.
        self._tensor_leaves: list[
            tuple[int, str, type[torch.Tensor], torch.dtype, tuple[int, ...], tuple[int, ...]]
        ] = []
        self._tensor_device: torch.device | None = None
        #: For each item of `_tensor_leaves`: expected shape of the tensor, and its shape in `Rows`.
        #: The expected shape begins with `_tensor_lead`, the leading sizes of the last record.
        self._tensor_shapes: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        self._tensor_lead: tuple[int, ...] = ()
        #: For each item of `_leaves`: expected shape of the array, and its shape in the result.
        #: The expected shape begins with the leading sizes of the last record.
        self._shapes: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    def renewed(self, num_lanes: int | None = None) -> RecordReader:
        """Return a reader with the same options and without a schema.

        `num_lanes` None means the number that was passed to the constructor of this reader.
        """
        num_lanes = self._first_num_lanes if num_lanes is None else num_lanes
        return RecordReader(num_lanes, self.has_lane_axis, self.auto_unsqueeze, self.narrow)

    def freeze(self, schema: Schema, num_lanes: int) -> None:
        """Fix the schema and the number of lanes for all later records."""
        self.schema = schema
        self.num_lanes = num_lanes
        self._leaves = []
        self._tensor_leaves = []

    def read_again(self, record: Any) -> list[npt.NDArray[Any]] | None:
        """Read a small record quickly, as arrays, if it has the form of the last checked record.

        Returns:
            Arrays in the order of the schema and in the fields' dtypes: `[n, *event]` with one
            lane, otherwise `[n, lanes, *event]`. An array without dtype conversion shares memory
            with the record. None if the record is large, not on the CPU, or has another form.
        """
        if not self._leaves:
            return None
        arrays: list[npt.NDArray[Any]] = []
        try:
            nodes = self._nodes_of(record)
            if nodes is None:
                return None
            for number, leaf in enumerate(self._leaves):
                place, key, dtype = leaf[:3]
                value = nodes[place].get(key)
                # A masked array has no `numpy`. The AttributeError leads to a complete check.
                array = value if type(value) is np.ndarray else value.numpy()
                shape, target = self._shapes[number]
                if array.shape != shape:
                    if number or not self._set_shapes(array):
                        return None
                    shape, target = self._shapes[0]
                if array.dtype is not dtype:
                    return None
                arrays.append(array if shape == target else array.reshape(target))
        except (AttributeError, KeyError, RuntimeError, TypeError):
            # For example, `numpy` of a tensor with gradients raises RuntimeError.
            return None
        if self._is_converted:
            # numpy must not warn about conversions, since torch does not.
            with np.errstate(all="ignore"):
                arrays = [
                    array.astype(leaf.target, copy=False)
                    for array, leaf in zip(arrays, self._leaves, strict=True)
                ]
        return arrays

    def rows_again(self, record: Any) -> Rows | None:
        """Read a record quickly if it has the form of the last checked record, else return None."""
        schema = self.schema
        arrays = self.read_again(record)
        if arrays is not None and schema is not None:
            tensors = [torch.from_numpy(array) for array in arrays]
            if self.num_lanes == 1:
                tensors = [tensor.unsqueeze(1) for tensor in tensors]
            return Rows(len(tensors[0]), tensors, schema)
        if not self._tensor_leaves or schema is None:
            return None
        row_tensors: list[torch.Tensor] = []
        try:
            nodes = self._nodes_of(record)
            if nodes is None:
                return None
            device = self._tensor_device
            for number, (place, key, tensor_type, dtype, _, _) in enumerate(self._tensor_leaves):
                value: Any = nodes[place].get(key)
                if type(value) is not tensor_type or value.dtype is not dtype:
                    return None
                if not number and not self._set_tensor_shapes(value.shape[: self.num_lead]):
                    return None
                shape, target = self._tensor_shapes[number]
                if (
                    value.shape != shape
                    or value.device != device
                    or value.is_neg()
                    or value.layout is not torch.strided
                ):
                    return None
                value = value.detach() if value.requires_grad else value
                row_tensors.append(value if shape == target else value.view(target))
        except (AttributeError, KeyError, RuntimeError, TypeError):
            return None  # For example, `view` of a transposed tensor raises RuntimeError.
        return Rows(self._tensor_shapes[0][1][0], row_tensors, schema)

    def _nodes_of(self, record: Any) -> list[Any] | None:
        """Return all mappings in a record; None if the form of the last checked record differs."""
        nodes: list[Any] = [record]
        for parent, key, kind, num_keys in self._nodes:
            if key:
                # `[]` would add a missing key to a defaultdict.
                nodes.append(nodes[parent].get(key))
            node = nodes[-1]
            if (
                type(node) is not kind
                or len(node if isinstance(node, dict) else node.keys()) != num_keys
            ):
                return None
        return nodes

    def _set_tensor_shapes(self, lead: tuple[int, ...]) -> bool:
        """Set the expected shapes of tensors for a record with these leading sizes.

        Returns False and sets nothing if there is no row, or if the sizes do not match the number
        of lanes.
        """
        if lead != self._tensor_lead:
            rows = self._rows_of_lead(lead)
            if rows is None:
                return False
            self._tensor_lead = lead
            self._tensor_shapes = [
                ((*lead, *event), (*rows, *shape)) for *_, event, shape in self._tensor_leaves
            ]
        return True

    def _rows_of_lead(self, lead: tuple[int, ...]) -> tuple[int, int] | None:
        """Return (number of rows, number of lanes) for the leading sizes of a leaf.

        Returns None if there is no row, or if the sizes do not match the number of lanes.
        """
        lanes = self.num_lanes or 1
        if self.has_lane_axis:
            return (lead[0], lanes) if lead[0] and lead[1:] == (lanes,) else None
        return (lead[0] // lanes, lanes) if lead[0] and lead[0] % lanes == 0 else None

    def read(
        self, record: Any, names: list[str] | None = None, argument: str = "data"
    ) -> Rows | None:
        """Check a record completely and return its `Rows`; None if the record has no leaf.

        Args:
            record: Nested mapping of tensors or arrays.
            names: Names of the fields that the record must have, if these are not all fields of the
                schema. Other fields are an error.
            argument: Name of the record in errors.

        Raises:
            MissingFieldError, SchemaError, FieldTypeError: A leaf does not match the schema. The
                message names the first such leaf.
        """
        if not hasattr(record, "items"):
            raise SchemaError(
                f"{argument} must be a nested mapping of tensors, got {type(record).__name__}."
            )
        flat = {name: self._tensor(name, value) for name, value in flatten(record).items()}
        if not flat:
            return None
        schema = self.schema
        if schema is not None:
            if names is not None:
                schema = Schema(schema[name] for name in names)
            check_same_names(schema, flat)
        shaped = {name: self._with_lead(name, value) for name, value in flat.items()}
        self._check_lead(shaped)
        if schema is None:
            schema = Schema(
                make_field(name, value.shape[2:], value.dtype) for name, value in shaped.items()
            )
        tensors = [fit(field, shaped[name], num_lead=2) for name, field in schema.items()]
        if self.schema is not None and names is None:
            self._note_form(record, self.schema)
        return Rows(len(tensors[0]), tensors, schema)

    def _tensor(self, name: str, value: Any) -> torch.Tensor:
        if not isinstance(value, torch.Tensor):
            value = as_tensor(value, f"field {name!r}")
        leaf = dense(value, f"field {name!r}")
        return leaf.to(torch.float32) if self.narrow and leaf.dtype == torch.float64 else leaf

    def _with_lead(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Reshape a leaf to `[n, lanes, *event]`."""
        if value.dim() == self.num_lead and self.auto_unsqueeze:
            value = value.unsqueeze(-1)
        if value.dim() <= self.num_lead:
            axes = "[n, lanes, *event]" if self.has_lane_axis else "[n, *event]"
            raise SchemaError(
                f"field {name!r} has shape {tuple(value.shape)}, expected {axes} with at least one "
                "event axis. Add an axis with x.unsqueeze(-1), or create the buffer with "
                "auto_unsqueeze=True."
            )
        if self.has_lane_axis:
            return value
        lanes = self.num_lanes or 1
        if len(value) % lanes:
            raise SchemaError(
                f"field {name!r} has {len(value)} rows, expected a multiple of {lanes} "
                "environments."
            )
        return (
            value.unsqueeze(1)
            if lanes == 1
            else value.reshape(len(value) // lanes, lanes, *value.shape[1:])
        )

    def _check_lead(self, shaped: Mapping[str, torch.Tensor]) -> None:
        (first, like), *others = shaped.items()
        for name, value in others:
            if value.shape[:2] != like.shape[:2]:
                raise SchemaError(
                    f"field {name!r} has leading sizes {tuple(value.shape[:2])}, expected "
                    f"{tuple(like.shape[:2])} as in field {first!r}."
                )
        if like.shape[1] < 1 or self.num_lanes not in (None, like.shape[1]):
            expected = self.num_lanes or "at least 1"
            raise SchemaError(f"field {first!r} has {like.shape[1]} lanes, expected {expected}.")

    def _note_form(self, record: Any, schema: Schema) -> None:
        """Store the form of a checked record, so that such records need no complete check."""
        nodes = [(0, "", type(record), len(record.keys()))]
        waiting = [(0, "", record)]
        form: dict[str, tuple[int, str, Any]] = {}
        self._leaves = []
        self._tensor_leaves = []
        try:
            for number, prefix, node in waiting:
                for key, value in node.items():
                    if isinstance(value, (torch.Tensor, np.ndarray)):
                        form[prefix + key] = number, key, value
                    else:
                        nodes.append((number, key, type(value), len(value.keys())))
                        waiting.append((len(nodes) - 1, f"{prefix}{key}/", value))
            named = [(*form[name], field) for name, field in schema.items()]
        except (AttributeError, KeyError, RuntimeError, TypeError):
            # The record contains a list. Such records are always checked completely.
            return
        self._nodes = nodes
        self._note_tensors(named)
        self._note_arrays(named)

    def _note_tensors(self, named: list[tuple[int, str, Any, Field]]) -> None:
        """Store the form of tensor leaves, so that records of this form need no complete check.

        Stores nothing unless all leaves are tensors on one device, in the dtypes of their fields,
        and not complex.
        """
        devices = {value.device for _, _, value, _ in named if isinstance(value, torch.Tensor)}
        leaves = []
        for node, key, value, field in named:
            is_plain = (
                isinstance(value, torch.Tensor)
                and value.dtype is field.torch_dtype
                and not value.is_complex()
            )
            if not is_plain or len(devices) != 1:
                return
            leaves.append(
                (
                    node,
                    key,
                    type(value),
                    value.dtype,
                    tuple(value.shape[self.num_lead :]),
                    field.shape,
                )
            )
        self._tensor_leaves = leaves
        self._tensor_device = devices.pop()
        self._tensor_lead = ()

    def _note_arrays(self, named: list[tuple[int, str, Any, Field]]) -> None:
        """Store the form of the leaves as arrays, if numpy can read all leaves without a copy."""
        leaves = []
        for node, key, value, field in named:
            leaf = _leaf_of(node, key, value, field, self.num_lead)
            if leaf is None:
                return
            leaves.append(leaf)
        self._leaves = leaves
        self._is_converted = any(leaf.dtype is not leaf.target for leaf in leaves)
        self._shapes = [((-1,), (-1,))] * len(leaves)

    def _set_shapes(self, first: npt.NDArray[Any]) -> bool:
        """Set the expected shapes of arrays for a record whose first leaf is `first`.

        Returns False if the record has no row or is larger than `_MAX_FORM_BYTES`, or if its sizes
        do not match the number of lanes.
        """
        lead = first.shape[: self.num_lead]
        lanes = self.num_lanes or 1
        num_rows = prod(lead)
        has_all_lanes = lead[1:] == (lanes,) if self.has_lane_axis else num_rows % lanes == 0
        row_bytes = sum(prod(leaf.shape) * leaf.target.itemsize for leaf in self._leaves)
        if not has_all_lanes or not 0 < num_rows * max(1, row_bytes) <= _MAX_FORM_BYTES:
            return False
        rows = (num_rows,) if lanes == 1 else (num_rows // lanes, lanes)
        self._shapes = [((*lead, *leaf.event), (*rows, *leaf.shape)) for leaf in self._leaves]
        return first.shape == self._shapes[0][0]


def _leaf_of(node: int, key: str, value: Any, field: Field, num_lead: int) -> _Leaf | None:
    """Return the form of a leaf as an array; None if numpy cannot read it without a copy.

    This applies to subclasses of tensors, GPU tensors, and bfloat16, which numpy does not have.
    """
    if field.torch_dtype is torch.bfloat16 or type(value) not in (torch.Tensor, np.ndarray):
        return None
    try:
        array = value if isinstance(value, np.ndarray) else value.numpy()
    except (RuntimeError, TypeError):
        return None
    return _Leaf(node, key, array.dtype, array.shape[num_lead:], field.shape, field.numpy_dtype)
