"""The `repr` of stores, datasets and batches: class, size, capacity, device and fields.

`Shown` reads the attributes of an object, so that no class needs its own `repr`. It reads no data,
opens no file and copies nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import is_dataclass
from typing import Any

import torch

from ..errors import RolloutDataError
from .fields import Field, Schema

#: Names under which classes store the capacity of an object.
_CAPACITIES = ("capacity", "replay_buffer_size", "buffer_size", "max_size")
#: Names of properties to show in addition to plain attributes.
_PROPERTIES = ("num_transitions_per_env",)
#: Packages whose objects are searched for a schema.
_OURS = ("storage.", "rollout_data.")
_MAX_FIELDS = 16
_MAX_FACTS = 10
#: Levels of attributes that are searched for a schema.
_DEPTH = 3


class Shown:
    """Base class whose `repr` lists attributes and fields in a few lines."""

    def __repr__(self) -> str:
        return described(self)


def described(thing: Any) -> str:
    """Return a description of a store, dataset or batch: its attributes, and one line per field."""
    batch = _batch_items(thing)
    if batch is None:
        facts = list(_facts(thing))
        lines = _field_lines(_schema_of(thing, _DEPTH) or {})
    else:
        facts = list(batch.items())
        lines = list(_tensors(batch))
    shown = [f"{name}={value}" for name, value in facts if _is_fact(value)]
    left_out = len(lines) - _MAX_FIELDS
    if left_out > 0:
        lines = [*lines[:_MAX_FIELDS], f"and {left_out} more"]
    return "\n  ".join([f"{type(thing).__name__}({', '.join(shown[:_MAX_FACTS])})", *lines])


def _batch_items(thing: Any) -> dict[str, Any] | None:
    """Return the values by name of a dataclass, mapping or named tuple; None for other objects."""
    if is_dataclass(thing):
        return vars(thing)
    if isinstance(thing, Mapping):
        return dict(thing)
    if hasattr(thing, "_asdict"):
        values: dict[str, Any] = thing._asdict()
        return values
    return None


def _facts(thing: Any) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) for the length of a store or dataset, then for its public attributes."""
    capacity = ""
    for name in _CAPACITIES:
        if isinstance(getattr(thing, name, None), int):
            capacity = name
            break
    with suppress(RolloutDataError, TypeError):  # The object may be closed or have no length.
        of_capacity = f" of {getattr(thing, capacity):,}" if capacity else ""
        yield "len", f"{len(thing):,}{of_capacity}"
    for name in _PROPERTIES:
        if name in dir(type(thing)):
            yield name, getattr(thing, name)
    for name, value in vars(thing).items():
        if name[0] != "_" and name not in (capacity, *_PROPERTIES):
            yield name, value


def _is_fact(value: Any) -> bool:
    """Return whether a value is shown: a short plain value that is neither False nor ""."""
    if isinstance(value, (list, tuple)):
        return 0 < len(value) <= 4 and all(
            isinstance(item, (int, str, os.PathLike)) for item in value
        )
    is_plain = isinstance(value, (int, float, str, torch.device, os.PathLike)) or hasattr(
        value, "origin"
    )
    return is_plain and value is not False and value != ""


def _tensors(tree: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in tree.items():
        if isinstance(value, torch.Tensor):
            yield f"{prefix}{name}: {_words(str(value.dtype).removeprefix('torch.'), value.shape)}"
        elif isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
            yield from _tensors(value, f"{prefix}{name}/")


def _field_lines(schema: Mapping[str, Field]) -> list[str]:
    return [
        f"{name}: {'texts' if field.is_text else _words(field.dtype, field.shape)}"
        for name, field in schema.items()
    ]


def _words(dtype: str, shape: Any) -> str:
    return f"{dtype}{list(shape)}"


def _schema_of(thing: Any, depth: int) -> Schema | None:
    """Return the schema of an object, or else the schema of one of its parts; None for no schema.

    Parts are attributes, or first items of lists in attributes, whose class is in this project.
    Parts of parts are searched up to `depth` levels down.
    """
    attributes = getattr(thing, "__dict__", {})
    schema = attributes.get("schema")
    if isinstance(schema, Schema) and len(schema):
        return schema
    if depth == 0:
        return None
    for value in attributes.values():
        for part in value[:1] if isinstance(value, list) else [value]:
            if type(part).__module__.startswith(_OURS):
                schema = _schema_of(part, depth - 1)
                if schema is not None:
                    return schema
    return None
