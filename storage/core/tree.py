"""Nested mappings <-> flat names joined by "/": the one way this project walks a record.

One rule: keys are non-empty strings without "/", so that flat names and nested paths map
one to one. Leaves are whatever is not a mapping; nothing here looks inside them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..errors import MissingFieldError, SchemaError


def flatten(tree: Any, prefix: str = "", keeps_empty: bool = False) -> dict[str, Any]:
    """Turn a nested mapping into flat names: `{"a": {"b": x}}` -> `{"a/b": x}`. Leaves are not copied.

    What has `keys` and `items` is a mapping too, as a `TensorDict` is. With `keeps_empty` an empty one is a leaf.
    """
    if not hasattr(tree, "items"):
        raise SchemaError("read a record", "", "a nested mapping of tensors", type(tree).__name__)
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if not isinstance(key, str) or not key or "/" in key:
            raise SchemaError("name a leaf", f"under {prefix or 'the top'!r}", "a non-empty str without '/'", repr(key))
        is_tree = not isinstance(value, torch.Tensor) and hasattr(value, "items") and hasattr(value, "keys")
        if is_tree and not (keeps_empty and not value.keys()):
            flat.update(flatten(value, f"{prefix}{key}/", keeps_empty))
        else:
            flat[prefix + key] = value
    return flat


def unflatten(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Turn flat names into a nested dict: the inverse of `flatten`. Leaves are not copied."""
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
                raise SchemaError("nest the leaf", repr(name), "a mapping above it", f"a leaf at {parent!r}")
        if last in node:
            raise SchemaError("nest the leaf", repr(name), "each place used once", "two values")
        node[last] = value
    return tree


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """Apply `function` to every leaf of nested mappings; a bare leaf is a tree of one."""
    if isinstance(tree, Mapping):
        return {key: map_leaves(function, value) for key, value in tree.items()}
    return function(tree)


def check_same_names(expected: Mapping[str, Any], got: Mapping[str, Any], action: str) -> None:
    """Raise `MissingFieldError` naming the first field that only one of two flat mappings has."""
    for name in expected:
        if name not in got:
            raise MissingFieldError(action, f"without the field {name!r}", ", ".join(expected), ", ".join(got))
    for name in got:
        if name not in expected:
            raise MissingFieldError(action, f"with the field {name!r}", ", ".join(expected), ", ".join(got))
