"""Spaces of observations and actions, as metadata describe them: mappings, or JSON texts as Minari writes them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from .batched_reading import Array


def boxes(metadata: Mapping[str, Any], group: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield (field, description) of each box in the space of "observation" or "action", or of a single field."""
    spaces = metadata.get("spaces")
    for space in (metadata.get(f"{group}_space"), spaces.get(group) if isinstance(spaces, Mapping) else None):
        yield from _boxes(group, space)


def _boxes(name: str, space: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    try:
        about = json.loads(space) if isinstance(space, str) else space
    except ValueError:
        return
    if isinstance(about, Mapping) and (about.keys() & {"low", "high"} or about.get("type") == "Box"):
        yield name, about
    elif isinstance(about, Mapping):
        below = about.get("subspaces", about.get("spaces", about))
        for key, part in below.items() if isinstance(below, Mapping) else ():
            yield from _boxes(f"{name}/{key}", part) if isinstance(part, Mapping) else ()


def declared_bounds(scan: Any, name: str) -> tuple[Array, Array] | None:
    """Return the bounds of the declared space of a field, each `[D]`; None if there is none."""
    size = scan.schema[name].num_elements
    for group in dict.fromkeys((name, name.partition("/")[0])):
        for field, about in boxes(scan.metadata, group):
            ends = [about.get("low"), about.get("high")]
            try:
                arrays = [np.asarray(one, np.float64).reshape(-1) for one in ends if one is not None]
                low, high = (np.broadcast_to(one, (size,)) for one in arrays)
            except (TypeError, ValueError):
                continue
            if field == name:
                return low, high
    return None
