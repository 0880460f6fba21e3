"""Language columns of LeRobot datasets: their Arrow types as plain values, their values as JSON.

A language column contains nested lists and structs, such as the messages of a dialogue. Recordings
have the values of such a column as JSON texts. The description of the Arrow type is stored in the
metadata of the recording, so that a writer can restore the column.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from storage.errors import UsageError

from ..parquet import arrow, plain_type

#: Metadata key of a recording: maps text fields to the described Arrow types of their columns.
ARROW_TYPES = "arrow_types"
_LISTS = ("list", "large_list")
_PRIMITIVES = (
    "null", "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float", "double", "string", "large_string",
)  # fmt: skip
#: Types of columns of plain texts.
TEXT_TYPES = ("string", "large_string")
#: Name of Arrow's extension type of JSON texts.
_JSON_EXTENSION = "arrow.json"
#: Name of this extension type in type descriptions.
_JSON = "json"
#: Maps Arrow names of primitive types to other names in the package `datasets`.
_HUB_NAMES = {"float": "float32", "double": "float64"}


def describe(value_type: Any) -> Any:
    """Describe an Arrow type by plain values, as in `{"list": {"struct": {"role": "string"}}}`.

    Returns:
        The description, or None if JSON cannot represent values of the type.
    """
    pyarrow, _ = arrow()
    if isinstance(value_type, pyarrow.BaseExtensionType):
        if value_type.extension_name == _JSON_EXTENSION:
            return _JSON
        return describe(value_type.storage_type)
    if pyarrow.types.is_struct(value_type):
        fields = {field.name: describe(field.type) for field in value_type}
        has_distinct_names = len(fields) == value_type.num_fields
        is_described = has_distinct_names and None not in fields.values()
        return {"struct": fields} if is_described else None
    for name in _LISTS:
        is_list = getattr(pyarrow.types, f"is_{name}")
        if is_list(value_type):
            values = describe(value_type.value_type)
            return None if values is None else {name: values}
    name = str(value_type)
    return name if name in _PRIMITIVES else None


def fits_json(value_type: Any) -> bool:
    """Return whether the values of an Arrow type can be converted to JSON texts.

    Times in nanoseconds and structs with duplicate field names cannot be converted.
    """
    pyarrow, _ = arrow()
    if isinstance(value_type, pyarrow.BaseExtensionType):
        return fits_json(value_type.storage_type)
    fields = [value_type.field(place) for place in range(value_type.num_fields)]
    names = {field.name for field in fields}
    if pyarrow.types.is_struct(value_type) and len(names) < len(fields):
        return False
    if getattr(value_type, "unit", "") == "ns":
        return False
    return all(fits_json(field.type) for field in fields)


def has_unknown(description: Any) -> bool:
    """Return whether a type contains "null", Arrow's type of columns with only missing values."""
    if isinstance(description, Mapping):
        return any(map(has_unknown, description.values()))
    return bool(description == "null")


def arrow_type(description: Any) -> Any:
    """Convert a type description in plain values, such as `{"list": "string"}`, to the Arrow type.

    Raises:
        UsageError: The description is invalid.
    """
    pyarrow, _ = arrow()
    if isinstance(description, str) and description in _PRIMITIVES:
        return pyarrow.type_for_alias(description)
    if description == _JSON:
        return pyarrow.json_()
    if isinstance(description, Mapping) and len(description) == 1:
        [(name, inner)] = description.items()
        if name == "struct" and isinstance(inner, Mapping):
            fields = [(str(field), arrow_type(part)) for field, part in inner.items()]
            return pyarrow.struct(fields)
        if name == "list":
            return pyarrow.list_(arrow_type(inner))
        if name == "large_list":
            return pyarrow.large_list(arrow_type(inner))
    raise UsageError(
        f"the metadata {ARROW_TYPES!r} have an invalid Arrow type: {repr(description)[:80]}. A "
        "type is a list, a struct or the name of a primitive type."
    )


def column_of_texts(texts: Sequence[str], column_type: Any, where: str) -> Any:
    """Parse JSON texts into an Arrow array of type `column_type`.

    Raises:
        UsageError: A text is not JSON of this type, or has a key for which the type has no field.
    """
    pyarrow, _ = arrow()
    try:
        values = {text: json.loads(text) for text in texts}
        rows = pyarrow.array([values[text] for text in texts], plain_type(column_type))
        for value in values.values():
            key = _key_without_field(value, rows.type)
            if key:
                raise ValueError(f"the type has no field for the key {key!r}")
        return rows.cast(column_type)
    except (ValueError, TypeError, pyarrow.ArrowException) as cause:
        reason = str(cause)[:200].rstrip(".")
        raise UsageError(
            f"the texts {where} are no JSON of type {column_type}: {reason}."
        ) from cause


def _key_without_field(value: Any, value_type: Any) -> str:
    """Return a key of a JSON value for which an Arrow type has no field; "" if there is none."""
    pyarrow, _ = arrow()
    if isinstance(value, list) and value_type.num_fields == 1:
        keys = (_key_without_field(item, value_type.field(0).type) for item in value)
        return next(filter(None, keys), "")
    if not isinstance(value, dict) or not pyarrow.types.is_struct(value_type):
        return ""
    for name, inner in value.items():
        place = value_type.get_field_index(name)
        if place < 0:
            return str(name)
        key = _key_without_field(inner, value_type.field(place).type)
        if key:
            return key
    return ""


def hub_feature(description: Any) -> Any:
    """Convert a type description to a feature description of the package `datasets`.

    Only descriptions that old releases of `datasets` can read are used.
    """
    if isinstance(description, str):
        name = "string" if description == _JSON else description
        return {"dtype": _HUB_NAMES.get(name, name), "_type": "Value"}
    [(name, inner)] = description.items()
    if name == "struct":
        return {field: hub_feature(part) for field, part in inner.items()}
    return [hub_feature(inner)]
