"""Read the bounds of observations and actions that the metadata declare.

The metadata may describe a space as gymnasium does: a box with "low" and "high", or a mapping of
nested spaces. Minari stores this description as a JSON text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from .batched_reading import Array


def boxes(metadata: Mapping[str, Any], group: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield pairs (field name, description) for each box space that the metadata declare.

    Args:
        metadata: Metadata of the recording. A space of the observations is the entry
            "observation_space", or the entry "observation" of the mapping "spaces".
        group: "observation", "action", or the name of a field.
    """
    yield from _boxes_of(group, metadata.get(f"{group}_space"))
    spaces = metadata.get("spaces")
    if isinstance(spaces, Mapping):
        yield from _boxes_of(group, spaces.get(group))


def _boxes_of(name: str, space: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield pairs (field name, description) for each box space in a possibly nested space.

    A nested space in the space `name` describes the field "name/key".
    """
    if isinstance(space, str):
        try:
            space = json.loads(space)
        except ValueError:
            return
    if not isinstance(space, Mapping):
        return
    if "low" in space or "high" in space or space.get("type") == "Box":
        yield name, space
        return
    subspaces = space.get("subspaces", space.get("spaces", space))
    if not isinstance(subspaces, Mapping):
        return
    for key, subspace in subspaces.items():
        if isinstance(subspace, Mapping):
            yield from _boxes_of(f"{name}/{key}", subspace)


def declared_bounds(scan: Any, name: str) -> tuple[Array, Array] | None:
    """Return the bounds of a field that the metadata declare; None if they declare none.

    The result is a pair (lower bounds, upper bounds), `[D]` each.
    """
    size = scan.schema[name].num_elements
    for group in dict.fromkeys((name, name.partition("/")[0])):
        for field, box in boxes(scan.metadata, group):
            if field != name or box.get("low") is None or box.get("high") is None:
                continue
            try:
                low = np.asarray(box["low"], np.float64).reshape(-1)
                high = np.asarray(box["high"], np.float64).reshape(-1)
                return np.broadcast_to(low, (size,)), np.broadcast_to(high, (size,))
            except (TypeError, ValueError):
                continue
    return None
