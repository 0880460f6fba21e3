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
from .fields import Schema

#: Names of attributes that contain the capacity of an object, and of further properties to show.
_CAPACITIES, _PROPERTIES = (
    ("capacity", "replay_buffer_size", "buffer_size", "max_size"),
    ("num_transitions_per_env",),
)
_MAX_FIELDS = 16
_MAX_FACTS = 10
#: Depth of the search for fields in the attributes of an object.
_DEPTH = 3


class Shown:
    """Base class whose `repr` lists attributes and fields in a few lines."""

    def __repr__(self) -> str:
        return described(self)


def described(thing: Any) -> str:
    """Return a description of a store, dataset or batch: its attributes, and one line per field."""
    batch = (
        dict(thing)
        if isinstance(thing, Mapping)
        else thing._asdict()
        if hasattr(thing, "_asdict")
        else None
    )
    batch = vars(thing) if is_dataclass(thing) else batch
    facts = [
        f"{name}={value}"
        for name, value in (_facts(thing) if batch is None else batch.items())
        if _is_fact(value)
    ]
    lines = list(_tensors(batch or {}))
    if batch is None and (schema := _schema_of(thing, _DEPTH)) is not None:
        lines = [
            f"{name}: {'texts' if field.is_text else _words(field.dtype, field.shape)}"
            for name, field in schema.items()
        ]
    left_out = len(lines) - _MAX_FIELDS
    lines = [*lines[:_MAX_FIELDS], *([f"and {left_out} more"] if left_out > 0 else [])]
    return "\n  ".join([f"{type(thing).__name__}({', '.join(facts[:_MAX_FACTS])})", *lines])


def _facts(thing: Any) -> Iterator[tuple[str, Any]]:
    """Yield pairs (name, value) of an object: its length, then its public attributes."""
    most = next((name for name in _CAPACITIES if isinstance(getattr(thing, name, None), int)), "")
    with suppress(RolloutDataError, TypeError):  # The object may be closed or lack a length.
        yield "len", f"{len(thing):,} of {getattr(thing, most):,}" if most else f"{len(thing):,}"
    yield from ((name, getattr(thing, name)) for name in _PROPERTIES if name in dir(type(thing)))
    yield from (
        (name, value)
        for name, value in vars(thing).items()
        if name[0] != "_" and name not in (most, *_PROPERTIES)
    )


def _is_fact(value: Any) -> bool:
    """Return whether to show a value: a short plain value that is neither False nor ""."""
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


def _words(dtype: str, shape: Any) -> str:
    return f"{dtype}{list(shape)}"


def _schema_of(thing: Any, depth: int) -> Schema | None:
    """Return the schema of an object; if it has none, of an attribute up to `depth` levels down."""
    attributes = getattr(thing, "__dict__", {})
    if isinstance(schema := attributes.get("schema"), Schema) and len(schema):
        return schema
    parts = [
        part
        for value in attributes.values()
        for part in (value[:1] if isinstance(value, list) else [value])
    ]
    inner = [
        part for part in parts if type(part).__module__.startswith(("storage.", "rollout_data."))
    ]
    for value in inner if depth else ():
        if (deeper := _schema_of(value, depth - 1)) is not None:
            return deeper
    return None
