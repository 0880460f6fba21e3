"""Which rows end a trajectory, as the fields say that a buffer's `end_key` names.

One rule: any value that is not 0, in any of those fields, ends it; where there are none, nothing does. What follows
from an end is decided in `windows.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..core.fields import Schema
from ..core.records import listed, names_below

#: Of each field that ends trajectories: its place among the fields, and how many values it has.
Places = list[tuple[int, int]]


def end_places(schema: Schema, end_key: str | list[str] | None) -> Places:
    """Find the fields that end trajectories; a key that names none is an error that lists what there is."""
    names = list(schema)
    found = [name for key in listed(end_key) for name in names_below(schema, key, "find the end flag")]
    return [(names.index(name), schema[name].num_elements) for name in found]


def row_ends(arrays: list[npt.NDArray[Any]], places: Places) -> bool | None:
    """Say whether one row of one lane ends its trajectory; None if its fields hold several values each."""
    is_end = False
    for place, width in places:
        if width != 1:
            return None
        if arrays[place].item():
            is_end = True
    return is_end


def array_ends(arrays: list[npt.NDArray[Any]], places: Places, num_lead: int) -> npt.NDArray[np.bool_]:
    """Say which rows end a trajectory: `[n]` bool with one leading axis, `[n, lanes]` with two."""
    if not places:
        return np.zeros(arrays[0].shape[:num_lead], np.bool_)
    found: npt.NDArray[Any] | None = None
    for place, width in places:
        flags = arrays[place]
        lead = flags.shape[:num_lead]
        flags = flags.reshape(lead) if width == 1 else (flags != 0).reshape(*lead, width).any(-1)
        if flags.dtype != bool:
            flags = flags != 0
        found = flags if found is None else found | flags
    assert found is not None
    return found


def tensor_ends(tensors: list[torch.Tensor], places: Places, num_lanes: int) -> torch.Tensor:
    """Say which rows end a trajectory: `[n, lanes]` bool, from checked leaves `[n, lanes, *event]`."""
    if not places:
        return tensors[0].new_zeros((len(tensors[0]), num_lanes), dtype=torch.bool)
    found: torch.Tensor | None = None
    for place, width in places:
        leaf = tensors[place]
        flags = leaf.reshape(-1, num_lanes) if width == 1 else (leaf != 0).flatten(2).any(-1)
        flags = flags if flags.dtype is torch.bool else flags != 0
        found = flags if found is None else found | flags
    assert found is not None
    return found
