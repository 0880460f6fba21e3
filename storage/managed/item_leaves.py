"""Leaves of items: which become columns, and how the others are copied and written down.

One rule: tensors and arrays of numbers are columns, everything else is an object that is copied in
and copied out. Objects are saved as JSON, never as code; what JSON cannot hold cannot be saved.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ..errors import CorruptFileError, FieldTypeError, SchemaError

#: What needs no copy.
_CONSTANTS = (str, int, float, bool, bytes, type(None))
#: Key of a JSON object that stands for something else than a dict.
_TAG = "__is__"


def split_leaves(item: Mapping[Any, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Walk an item: flat names of its tensors and arrays, and of all other leaves. Nothing is copied.

    Raises:
        SchemaError: A key is not a non-empty str without "/", or `item` is not a mapping.
    """
    if not isinstance(item, Mapping):
        raise SchemaError("add an item", "", "a mapping", type(item).__name__)
    columns: dict[str, Any] = {}
    objects: dict[str, Any] = {}
    _split(item, "", columns, objects)
    return columns, objects


def copied(value: Any) -> Any:
    """Copy an object, unless it cannot change."""
    return value if isinstance(value, _CONSTANTS) else copy.deepcopy(value)


def put_leaf(item: dict[str, Any], name: str, value: Any) -> None:
    """Set the leaf of a flat name in a nested dict."""
    *parents, last = name.split("/")
    for parent in parents:
        item = item.setdefault(parent, {})
    item[last] = value


def to_json(value: Any, where: str = "") -> bytes:
    """Write an object as JSON; tuples come back as tuples.

    Raises:
        FieldTypeError: It holds something else than None, bool, int, float, str, list, tuple and
            dict of str.
    """
    return json.dumps(_encoded(value, where), separators=(",", ":")).encode()


def from_json(data: bytes, where: str = "") -> Any:
    """Read what `to_json` wrote.

    Raises:
        CorruptFileError: It is not that.
    """
    try:
        return _decoded(json.loads(data))
    except (ValueError, TypeError, KeyError, RecursionError) as cause:
        raise CorruptFileError("read objects", where, "JSON as it was written", str(cause)) from cause


def _split(node: Mapping[Any, Any], prefix: str, columns: dict[str, Any], objects: dict[str, Any]) -> None:
    for key, value in node.items():
        if not isinstance(key, str) or not key or "/" in key:
            raise SchemaError("name a leaf", f"under {prefix or 'the top'!r}", "a non-empty str without '/'", repr(key))
        if isinstance(value, torch.Tensor) or (
            isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biufc"
        ):
            columns[prefix + key] = value
        elif isinstance(value, Mapping) and value:
            _split(value, f"{prefix}{key}/", columns, objects)
        else:
            objects[prefix + key] = value


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
