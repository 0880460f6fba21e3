"""`Field` and `Schema`: names, shapes and dtypes of stored arrays. Flat names of nested fields.

A flat name joins the keys of a nested mapping by "/". Keys are non-empty strings without "/", so
each flat name has exactly one nested path. A leaf is any value that is not a mapping. `flatten` and
`unflatten` convert between nested mappings and dicts by flat name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from math import prod
from typing import Any

import numpy as np
import torch

from ..errors import FieldTypeError, MissingFieldError, SchemaError, nearest

#: Dtypes of fields by name: the torch dtype, and a numpy dtype for the same bytes.
#: numpy does not have bfloat16, whose bytes are therefore stored as little-endian uint16.
DTYPES: dict[str, tuple[torch.dtype, np.dtype[Any]]] = {
    "bool": (torch.bool, np.dtype("bool")),
    "uint8": (torch.uint8, np.dtype("u1")),
    "int8": (torch.int8, np.dtype("i1")),
    "int16": (torch.int16, np.dtype("<i2")),
    "uint16": (torch.uint16, np.dtype("<u2")),
    "int32": (torch.int32, np.dtype("<i4")),
    "uint32": (torch.uint32, np.dtype("<u4")),
    "int64": (torch.int64, np.dtype("<i8")),
    "uint64": (torch.uint64, np.dtype("<u8")),
    "float16": (torch.float16, np.dtype("<f2")),
    "bfloat16": (torch.bfloat16, np.dtype("<u2")),
    "float32": (torch.float32, np.dtype("<f4")),
    "float64": (torch.float64, np.dtype("<f8")),
}
#: Maximum number of axes of a field. HDF5 supports 32, including the axes of rows and lanes.
MAX_DIMENSIONS = 30
#: Maximum number of fields of a schema.
#: A recorded file supports about a quarter, since its description of the fields is limited.
MAX_FIELDS = 4096
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
REAL_DTYPES = frozenset(torch_dtype for torch_dtype, _ in DTYPES.values())
_NAME_OF_TORCH = {torch_dtype: name for name, (torch_dtype, _) in DTYPES.items()}
_NAME_OF_NUMPY = {
    numpy_dtype: name for name, (_, numpy_dtype) in DTYPES.items() if name != "bfloat16"
}


def dtype_name(dtype: Any, owner: str = "") -> str:
    """Return the portable name of a torch or numpy dtype, for example "float32".

    Args:
        dtype: A torch dtype, a numpy dtype or its name.
        owner: Description of the values of this dtype in errors, such as "field 'reward'".

    Raises:
        FieldTypeError: `dtype` is not in `DTYPES`, such as complex, object or strings.
    """
    name = None
    if isinstance(dtype, torch.dtype):
        name = _NAME_OF_TORCH.get(dtype)
    elif dtype is not None:  # numpy would convert None to float64.
        with suppress(TypeError, ValueError):
            name = _NAME_OF_NUMPY.get(np.dtype(dtype).newbyteorder("<"))
    if name is None:
        of_owner = f" of {owner}" if owner else ""
        raise FieldTypeError(
            f"dtype {str(dtype).removeprefix('torch.')}{of_owner} is not supported. Convert the "
            f"values to one of {', '.join(DTYPES)}."
        )
    return name


def signed(tensor: torch.Tensor) -> torch.Tensor:
    """View unsigned integers of 2 to 8 bytes as signed integers of the same size.

    torch cannot set single elements of uint16, uint32 and uint64 tensors. Write to the view
    instead, which shares the memory.
    """
    dtype = _SIGNED.get(tensor.dtype)
    return tensor if dtype is None else tensor.view(dtype)


@dataclass(frozen=True)
class Field:
    """One named array column.

    Attributes:
        name: Flat name, nested levels joined by "/": "observation/depth".
        shape: Shape of one row, without time and env; () for a scalar.
        dtype: A key of `DTYPES`: the dtype of values that users pass and receive.
        codec: Name of the codec of rows; "raw" for unchanged bytes.
        fill: Value of rows that are not written yet.
        is_text: Whether each value is an index into a list of texts. The list is stored
            separately and has each text once.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    codec: str = "raw"
    fill: float = 0
    is_text: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not all(self.name.split("/")):
            raise SchemaError(
                f"the name of a field must be non-empty strings joined by '/', got {self.name!r}."
            )
        if not isinstance(self.dtype, str) or self.dtype not in DTYPES:
            raise FieldTypeError(
                f"field {self.name!r} has the unknown dtype {self.dtype!r}. The dtypes are "
                f"{nearest(str(self.dtype), DTYPES)}."
            )
        try:
            object.__setattr__(self, "shape", tuple(int(size) for size in self.shape))
        except (TypeError, ValueError) as cause:
            raise SchemaError(
                f"the shape of field {self.name!r} must be integers, got {self.shape!r}."
            ) from cause
        if len(self.shape) > MAX_DIMENSIONS:
            raise SchemaError(
                f"field {self.name!r} has {len(self.shape)} dimensions, expected at most "
                f"{MAX_DIMENSIONS}."
            )
        if any(size < 0 for size in self.shape):
            raise SchemaError(
                f"the shape of field {self.name!r} must be sizes >= 0, got {self.shape}."
            )

    @property
    def torch_dtype(self) -> torch.dtype:
        """Dtype of tensors of this field."""
        return DTYPES[self.dtype][0]

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """Numpy dtype of the same bytes; uint16 for bfloat16."""
        return DTYPES[self.dtype][1]

    @property
    def num_elements(self) -> int:
        """Number of values in one row: the product of the shape, 1 for a scalar."""
        return prod(self.shape)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row before compression by the codec."""
        return self.num_elements * self.numpy_dtype.itemsize

    def to_json(self) -> dict[str, Any]:
        """Return the attributes, without `fill`, as a JSON object."""
        about = {
            "name": self.name,
            "shape": list(self.shape),
            "dtype": self.dtype,
            "codec": self.codec,
        }
        return {**about, "text": True} if self.is_text else about

    @classmethod
    def from_json(cls, item: Mapping[str, Any]) -> Field:
        """Build a field from the result of `to_json`. Unknown keys are ignored."""
        try:
            codec, is_text = str(item.get("codec", "raw")), item.get("text") is True
            return cls(
                str(item["name"]), tuple(item["shape"]), str(item["dtype"]), codec, is_text=is_text
            )
        except (KeyError, TypeError) as cause:
            raise SchemaError(
                f"a field needs name, shape and dtype, got {dict(item)!r}."
            ) from cause


class Schema(Mapping[str, Field]):
    """An ordered, immutable set of at most `MAX_FIELDS` fields by name."""

    def __init__(self, fields: Iterable[Field]) -> None:
        listed: list[Any] = [None]
        if isinstance(fields, Iterable):
            listed = list(islice(fields, MAX_FIELDS + 1))
        if not all(isinstance(field, Field) for field in listed):
            raise SchemaError(f"fields must be an iterable of Field, got {repr(fields)[:60]}.")
        if len(listed) > MAX_FIELDS:
            raise SchemaError(f"a schema has at most {MAX_FIELDS} fields, got more.")
        self._fields: dict[str, Field] = {field.name: field for field in listed}
        if len(self._fields) != len(listed):
            counts = Counter(field.name for field in listed)
            twice = sorted(name for name, count in counts.items() if count > 1)
            raise SchemaError(f"duplicate field names: {', '.join(twice)}.")

    def __getitem__(self, name: str) -> Field:
        try:
            return self._fields[name]
        except KeyError:
            raise MissingFieldError(
                f"unknown field {name!r}. The fields are {nearest(name, self._fields)}."
            ) from None

    def __contains__(self, name: object) -> bool:
        return name in self._fields

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Schema) and list(self._fields.values()) == list(
            other._fields.values()
        )

    def __hash__(self) -> int:
        return hash(tuple(self._fields.values()))

    def __repr__(self) -> str:
        return f"Schema({', '.join(f'{f.name}: {f.dtype}{list(f.shape)}' for f in self.values())})"

    def below(self, prefix: str) -> dict[str, Field]:
        """Return the fields named `prefix` or `prefix/...`, in order."""
        return {
            name: f
            for name, f in self._fields.items()
            if name == prefix or name.startswith(prefix + "/")
        }

    def difference(self, other: Schema) -> str:
        """Return a description of the first difference from `other`; "" for equal schemas."""
        for name in self:
            if name not in other:
                return f"field {name!r} is missing"
            if self[name] != other[name]:
                return f"field {name!r} is {_words(other[name])} instead of {_words(self[name])}"
        extra = [name for name in other if name not in self]
        if extra:
            return f"field {extra[0]!r} is new"
        return "" if list(self) == list(other) else "the fields have another order"

    def to_json(self) -> list[dict[str, Any]]:
        """Return a JSON list that describes the fields in order."""
        return [field.to_json() for field in self.values()]

    @classmethod
    def from_json(cls, items: Sequence[Mapping[str, Any]]) -> Schema:
        """Build a schema from the result of `to_json`."""
        return cls(Field.from_json(item) for item in items)


def _words(field: Field) -> str:
    form = "texts" if field.is_text else f"{field.dtype}{list(field.shape)}"
    return form if field.codec == "raw" else f"{form} coded as {field.codec}"


def flatten(
    tree: Any, prefix: str = "", keeps_empty: bool = False, takes_flat: bool = False
) -> dict[str, Any]:
    """Convert a nested mapping to a dict by flat name: `{"a": {"b": x}}` becomes `{"a/b": x}`.

    Leaves are not copied. An object with the methods `keys` and `items`, such as a `TensorDict`, is
    a mapping too. With `keeps_empty`, an empty mapping is a leaf. With `takes_flat`, a key may
    itself be a flat name, as in `{"a/b": x}`.
    """
    if not hasattr(tree, "items"):
        raise SchemaError(
            f"a record must be a nested mapping of tensors, got {type(tree).__name__}."
        )
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        is_flat = takes_flat and isinstance(key, str) and all(key.split("/"))
        if not is_flat and (not isinstance(key, str) or not key or "/" in key):
            parent = f" of {prefix[:-1]!r}" if prefix else ""
            raise SchemaError(f"the keys{parent} must be non-empty strs without '/', got {key!r}.")
        is_tree = (
            not isinstance(value, torch.Tensor)
            and hasattr(value, "items")
            and hasattr(value, "keys")
        )
        if is_tree and not (keeps_empty and not value.keys()):
            below = flatten(value, f"{prefix}{key}/", keeps_empty, takes_flat)
        else:
            below = {prefix + key: value}
        if twice := below.keys() & flat.keys():
            raise SchemaError(f"field {sorted(twice)[0]!r} has two values.")
        flat.update(below)
    return flat


def unflatten(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a dict by flat name to a nested dict: `{"a/b": x}` becomes `{"a": {"b": x}}`."""
    tree: dict[str, Any] = {}
    for name, value in flat.items():
        if "/" not in name and name not in tree:
            tree[name] = value
            continue
        *parents, last = name.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
            if not isinstance(node, dict):
                raise SchemaError(
                    f"field {name!r} cannot be nested, because {parent!r} is a field itself."
                )
        if last in node:
            raise SchemaError(f"field {name!r} has two values.")
        node[last] = value
    return tree


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """Apply `function` to every leaf of nested mappings, or to `tree` if it is not a mapping."""
    if isinstance(tree, Mapping):
        return {key: map_leaves(function, value) for key, value in tree.items()}
    return function(tree)


def check_same_names(expected: Mapping[str, Any], got: Mapping[str, Any]) -> None:
    """Raise `MissingFieldError` for the first field that only one of two flat mappings has."""
    problem = ""
    for name in expected:
        if name not in got:
            problem = f"field {name!r} is missing"
            break
    else:
        for name in got:
            if name not in expected:
                problem = f"unknown field {name!r}"
                break
    if problem:
        raise MissingFieldError(
            f"{problem}: expected the fields {', '.join(expected)}, got {', '.join(got)}."
        )
