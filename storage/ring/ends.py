"""Ends of trajectories: which rows are one, and what was observed after them.

One rule: any value that is not 0, in any field that `end_key` names, ends a trajectory. What follows from an end is
decided in `windows.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ..core.fields import Schema, signed
from ..core.modes import lasting
from ..core.records import listed, names_below
from ..errors import SchemaError
from .ring import RingStore
from .windows import Boundaries

#: Of each field that ends trajectories: its place among the fields, and how many values it has.
Places = list[tuple[int, int]]
_FIRST_ROOM = 64


def end_places(schema: Schema, end_key: str | list[str] | None) -> Places:
    """Find the fields that end trajectories; a key that names none is an error that lists what there is."""
    names = list(schema)
    found = [name for key in listed(end_key) for name in names_below(schema, key, "find the end flag")]
    return [(names.index(name), schema[name].num_elements) for name in found]


def find_ends(leaves: Sequence[Any], places: Places, num_lead: int = 2) -> Any:
    """Say which rows end a trajectory: `[n, lanes]` bool, from checked leaves `[n, lanes, *event]`.

    Arrays give an array, tensors a tensor. With `num_lead=1` there is no axis of lanes.
    """
    found: Any = None
    for place, width in places:
        leaf = leaves[place]
        lead = leaf.shape[:num_lead]
        flags = leaf.reshape(lead) if width == 1 else (leaf.reshape((*lead, width)) != 0).any(-1)
        flags = flags if flags.dtype in (bool, torch.bool) else flags != 0
        found = flags if found is None else found | flags
    if found is None:
        like, shape = leaves[0], tuple(leaves[0].shape[:num_lead])
        is_array = isinstance(like, np.ndarray)
        return np.zeros(shape, np.bool_) if is_array else like.new_zeros(shape, dtype=torch.bool)
    return found


class FinalRows:
    """The true last observations of trajectories, beside a ring, because they are few.

    A final row belongs to the row that ended a trajectory, named by lane and id, and dies with it. Keys grow with
    every append, so that finding one is a binary search.

    Args:
        ring: The ring that the rows belong to.
        schema: The fields that are kept of a final row.
    """

    @lasting
    def __init__(self, ring: RingStore, schema: Schema) -> None:
        self._ring = ring
        self.schema = schema
        self._first, self._last = 0, 0
        self._keys = torch.zeros(0, dtype=torch.int64, device=ring.device)
        self._columns = {
            name: torch.zeros((0, *field.shape), dtype=field.torch_dtype, device=ring.device)
            for name, field in schema.items()
        }

    def __len__(self) -> int:
        """Final rows in memory, dead ones that were not yet dropped included."""
        return self._last - self._first

    @property
    def num_bytes(self) -> int:
        """Memory that is reserved."""
        return sum(x.numel() * x.element_size() for x in (self._keys, *self._columns.values()))

    def append(self, lane: torch.Tensor, row_id: torch.Tensor, leaves: Mapping[str, torch.Tensor]) -> None:
        """Keep rows: `[num, *event]` per field, sorted by (id, lane) and newer than all that are kept."""
        num_new = len(lane)
        if self._last + num_new > len(self._keys):
            self._move(num_new)
        self._keys[self._last : self._last + num_new] = self._key(lane, row_id)
        for name, leaf in leaves.items():
            self._columns[name][self._last : self._last + num_new] = leaf
        self._last += num_new

    def find(self, lane: torch.Tensor, row_id: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Look rows up: (whether there is a final row, where it lies), both shaped like `lane`."""
        keys = self._keys[self._first : self._last]
        if not len(keys):
            return torch.zeros_like(lane, dtype=torch.bool), torch.zeros_like(lane)
        wanted = self._key(lane, row_id)
        place = torch.searchsorted(keys, wanted).clamp_(max=len(keys) - 1)
        return keys[place] == wanted, place + self._first

    def take(self, name: str, place: torch.Tensor) -> torch.Tensor:
        """Copy final rows of a field: `[len(place), *event]`."""
        return self._columns[name].index_select(0, place)

    def holding(self, names: Iterable[str]) -> FinalRows | None:
        """Give these final rows if they have all of some fields."""
        return self if all(name in self.schema for name in names) else None

    def clear(self) -> None:
        """Forget everything."""
        self._first, self._last = 0, 0

    def live(self) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Show what is live: keys and fields, sharing memory."""
        self._drop_dead()
        kept = slice(self._first, self._last)
        return self._keys[kept], {name: x[kept] for name, x in self._columns.items()}

    def restore(self, keys: torch.Tensor, leaves: Mapping[str, torch.Tensor], boundaries: Boundaries) -> None:
        """Take back what `live` gave.

        Raises:
            SchemaError: It is not of rows that ended a trajectory here, or has other shapes or dtypes.
        """
        ring, action = self._ring, "load final rows"
        if keys.dtype is not torch.int64 or keys.dim() != 1:
            raise SchemaError(action, "", "their keys as [num] int64", f"{keys.dtype} {list(keys.shape)}")
        for name, leaf in leaves.items():
            field, shape = self.schema[name], [len(keys), *self.schema[name].shape]
            if list(leaf.shape) != shape or leaf.dtype is not field.torch_dtype:
                expected = f"{field.torch_dtype} {shape}"
                raise SchemaError(action, f"with {name!r}", expected, f"{leaf.dtype} {list(leaf.shape)}")
        keys = keys.to(ring.device)
        lane, row_id = keys % ring.num_lanes, torch.div(keys, ring.num_lanes, rounding_mode="floor")
        is_ended = (row_id >= ring.oldest) & (row_id < ring.total) & boundaries.ended(lane, row_id)
        if not bool(is_ended.all()) or not bool((keys[1:] > keys[:-1]).all()):
            raise SchemaError(action, "", "ascending keys of rows that ended a trajectory", "others")
        self.clear()
        self.append(lane, row_id, leaves)

    def _key(self, lane: torch.Tensor, row_id: torch.Tensor) -> torch.Tensor:
        return row_id * self._ring.num_lanes + lane

    def _drop_dead(self) -> None:
        keys = self._keys[self._first : self._last]
        self._first += int(torch.searchsorted(keys, self._ring.oldest * self._ring.num_lanes))

    @lasting
    def _move(self, num_new: int) -> None:
        keys, columns = self.live()
        num_kept, num_more = len(keys), max(_FIRST_ROOM, len(keys) + 2 * num_new)

        def moved(x: torch.Tensor) -> torch.Tensor:
            return torch.cat([x, x.new_zeros((num_more, *x.shape[1:]))])

        self._keys, self._columns = moved(keys), {name: moved(x) for name, x in columns.items()}
        self._first, self._last = 0, num_kept


def may_follow(finals: FinalRows | None, is_marked: bool, lane: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """Say of rows that ended a trajectory whether something is given behind them: what was observed, or a mark."""
    if is_marked or finals is None:
        return torch.full_like(lane, is_marked, dtype=torch.bool)
    return finals.find(lane, last)[0]


def put_finals(
    ring: RingStore,
    finals: FinalRows | None,
    following: Mapping[str, torch.Tensor],
    lane: torch.Tensor,
    last: torch.Tensor,
    ended: torch.Tensor,
) -> None:
    """Where a trajectory ended, replace what follows: by its final observation, else by the last row itself.

    Args:
        ring, finals: Where rows come from.
        following: `[n, *event]` per field, one row after each of `last`.
        lane, last: `[n]`, the last rows.
        ended: `[n]` bool, which of them ended a trajectory.
    """
    rows = ended.nonzero().squeeze(1)
    if not len(rows):
        return
    lane, last = lane[rows], last[rows]
    places = ring.place(lane, last)
    if finals is not None:
        is_known, at = finals.find(lane, last)
    for name, leaf in following.items():
        own = ring.column(name).index_select(0, places)
        if finals is not None:
            signed(own)[is_known] = signed(finals.take(name, at[is_known]))
        signed(leaf)[rows] = signed(own)
