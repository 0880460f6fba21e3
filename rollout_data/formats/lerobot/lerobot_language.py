"""Arrow types of columns of language, as plain values for metadata, and their texts in JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from storage.errors import UsageError

from ..parquet import arrow, plain_type

#: Metadata key of a recording: field of texts -> the Arrow type of its column.
ARROW_TYPES = "arrow_types"
_LISTS = ("list", "large_list")
_PRIMITIVES = (
    "null", "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float", "double",
    "string", "large_string",
)  # fmt: skip
#: Types of columns of plain texts.
TEXT_TYPES = ("string", "large_string")
#: Arrow's extension type of JSON texts, and its description.
_JSON_TYPE, _JSON = "arrow.json", "json"
#: Name of a primitive in the package `datasets`, where it differs.
_HUB_NAMES = {"float": "float32", "double": "float64"}


def describe(kind: Any) -> Any:
    """Describe an Arrow type by plain values, as in `{"list": {"struct": {"role": "string"}}}`; None if JSON cannot."""
    pyarrow, _ = arrow()
    if isinstance(kind, pyarrow.BaseExtensionType):
        return _JSON if kind.extension_name == _JSON_TYPE else describe(kind.storage_type)
    if pyarrow.types.is_struct(kind):
        fields = {field.name: describe(field.type) for field in kind}
        return {"struct": fields} if None not in fields.values() and len(fields) == kind.num_fields else None
    for name, is_list in zip(_LISTS, (pyarrow.types.is_list, pyarrow.types.is_large_list), strict=True):
        if is_list(kind):
            values = describe(kind.value_type)
            return None if values is None else {name: values}
    return str(kind) if str(kind) in _PRIMITIVES else None


def fits_json(kind: Any) -> bool:
    """Return whether values of an Arrow type can be texts in JSON: no times in nanoseconds, no two keys of one name."""
    pyarrow, _ = arrow()
    if isinstance(kind, pyarrow.BaseExtensionType):
        return fits_json(kind.storage_type)
    fields = [kind.field(place) for place in range(kind.num_fields)]
    has_own_names = not pyarrow.types.is_struct(kind) or len({field.name for field in fields}) == len(fields)
    return has_own_names and getattr(kind, "unit", "") != "ns" and all(fits_json(field.type) for field in fields)


def has_unknown(described: Any) -> bool:
    """Return whether a part of a description is Arrow's null, the type of values that were all missing."""
    if isinstance(described, Mapping):
        return any(map(has_unknown, described.values()))
    return bool(described == "null")


def arrow_type(described: Any) -> Any:
    """Return the Arrow type that `describe` described.

    Raises:
        UsageError: The description is of another form.
    """
    pyarrow, _ = arrow()
    if isinstance(described, str) and described in _PRIMITIVES:
        return pyarrow.type_for_alias(described)
    if described == _JSON:
        return pyarrow.json_()
    if isinstance(described, Mapping) and len(described) == 1:
        [(name, inner)] = described.items()
        if name == "struct" and isinstance(inner, Mapping):
            return pyarrow.struct([(str(field), arrow_type(kind)) for field, kind in inner.items()])
        if name in _LISTS:
            return (pyarrow.list_ if name == "list" else pyarrow.large_list)(arrow_type(inner))
    expected = "a list, a struct or a primitive, as written by this library"
    raise UsageError("take the Arrow type", f"in the metadata {ARROW_TYPES!r}", expected, repr(described)[:80])


def column_of_texts(texts: Sequence[str], kind: Any, where: str) -> Any:
    """Return the Arrow array of texts in JSON.

    Raises:
        UsageError: A text is not JSON of this type, or has a key for which the type has no field.
    """
    pyarrow, _ = arrow()
    try:
        values = {text: json.loads(text) for text in texts}
        rows = pyarrow.array([values[text] for text in texts], plain_type(kind))
        if lost := next(filter(None, (_lost_key(value, rows.type) for value in values.values())), ""):
            raise ValueError(f"the key {lost!r}, for which it has no field")
        return rows.cast(kind)
    except (ValueError, TypeError, pyarrow.ArrowException) as cause:
        raise UsageError("write the texts", where, f"JSON of the type {kind}", str(cause)[:200]) from cause


def _lost_key(value: Any, kind: Any) -> str:
    """Return a key of a JSON value for which an Arrow type has no field; "" if there is none."""
    pyarrow, _ = arrow()
    if isinstance(value, list) and kind.num_fields == 1:
        return next(filter(None, (_lost_key(one, kind.field(0).type) for one in value)), "")
    for name, inner in value.items() if isinstance(value, dict) and pyarrow.types.is_struct(kind) else ():
        place = kind.get_field_index(name)
        lost = str(name) if place < 0 else _lost_key(inner, kind.field(place).type)
        if lost:
            return lost
    return ""


def hub_feature(described: Any) -> Any:
    """Describe a type as the package `datasets` does, in forms that its old releases know."""
    if isinstance(described, str):
        described = "string" if described == _JSON else described
        return {"dtype": _HUB_NAMES.get(described, described), "_type": "Value"}
    [(name, inner)] = described.items()
    if name == "struct":
        return {field: hub_feature(kind) for field, kind in inner.items()}
    return [hub_feature(inner)]
