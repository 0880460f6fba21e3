"""Ends of trajectories: which rows are one, and what is kept of those.

One rule: any value that is not 0, in any field that `end_key` names, ends a trajectory. What follows from an end is
decided in `windows.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..core.fields import Schema
from ..core.memory import lasting
from ..core.records import listed, names_below
from ..errors import SchemaError
from .ring import RingStore

#: Of each field that ends trajectories: its place among the fields, and how many values it has.
Places = list[tuple[int, int]]
_FIRST_ROOM = 64
_BOOL = np.dtype(np.bool_)
#: Names of flags of ends by themselves, and of flags of time limits; of a nested key the last part.
_TERMINATIONS = {"terminated", "terminateds", "termination", "terminations", "terminal", "terminals", "is_terminal"}
_TIME_OUTS = {"truncated", "truncateds", "truncation", "truncations", "is_truncated"}
_TIME_OUTS |= {"timeout", "timeouts", "time_out", "time_outs", "TimeLimit.truncated"}
#: Names of flags of ends of any kind.
_ANY_END = {"done", "dones", "is_last"}
#: Mappings beside an end flag in which simulators keep their time-outs.
_INFOS = {"info", "infos", "extras"}


def end_places(schema: Schema, end_key: str | list[str] | None) -> Places:
    """Find the fields that end trajectories; a key that names none is an error that lists what there is."""
    names = list(schema)
    action = "find what ends a trajectory"
    found = [name for key in listed(end_key) for name in names_below(schema, key, action, "end_key")]
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
        if flags.dtype is not _BOOL and flags.dtype is not torch.bool:
            flags = flags != 0
        found = flags if found is None else found | flags
    if found is None:
        like, shape = leaves[0], tuple(leaves[0].shape[:num_lead])
        is_array = isinstance(like, np.ndarray)
        return np.zeros(shape, np.bool_) if is_array else like.new_zeros(shape, dtype=torch.bool)
    return found


@dataclass(frozen=True)
class EndKinds:
    """Fields that say whether a trajectory ended by itself, or was cut.

    Attributes:
        terminations: Flags of ends by themselves.
        time_outs: Flags of time limits; they count only where no termination is set.
        others: Further end flags: an end by itself unless a time-out is set.
    """

    terminations: tuple[str, ...]
    time_outs: tuple[str, ...]
    others: tuple[str, ...]

    @classmethod
    def of(cls, schema: Iterable[str], end_names: Sequence[str]) -> EndKinds:
        """Sort the end flags of a schema, and the flags beside them that say more about the same ends."""
        parents = {name.rpartition("/")[0] for name in end_names}
        parents |= {f"{parent}/{infos}".lstrip("/") for parent in parents for infos in _INFOS}
        beside = [name for name in schema if name.rpartition("/")[0] in parents]
        terminations = tuple(name for name in beside if _last_part(name) in _TERMINATIONS)
        time_outs = tuple(name for name in beside if _last_part(name) in _TIME_OUTS)
        others = [name for name in end_names if name not in terminations + time_outs]
        if terminations:  # `done` is then either of both kinds
            others = [name for name in others if _last_part(name) not in _ANY_END]
        return cls(terminations, time_outs, tuple(others))

    @property
    def names(self) -> tuple[str, ...]:
        """All of these fields."""
        return self.terminations + self.time_outs + self.others

    def unnamed(self, end_names: Sequence[str]) -> tuple[str, ...]:
        """Return the fields that say more of ends than `end_names`, of which none is set at ends of every kind."""
        if any(name not in self.terminations + self.time_outs for name in end_names):
            return ()
        return tuple(name for name in self.terminations + self.time_outs if name not in end_names)

    def terminated(self, rows: Callable[[str], torch.Tensor]) -> torch.Tensor:
        """Return which rows ended a trajectory by themselves: `[n]` bool, which may share memory with a field.

        Args:
            rows: Gives a field of these rows, `[n, *event]`.
        """
        by_itself, other = (_any_set(names, rows) for names in (self.terminations, self.others))
        if other is None and by_itself is not None:
            return by_itself
        cut = _any_set(self.time_outs, rows)
        if other is None:
            assert cut is not None  # at least one of these fields ends trajectories
            return torch.zeros_like(cut)
        if cut is not None:
            other = other & ~cut
        return other if by_itself is None else by_itself | other


def _last_part(name: str) -> str:
    return name.rpartition("/")[2]


def _any_set(names: Iterable[str], rows: Callable[[str], torch.Tensor]) -> torch.Tensor | None:
    """Return in which rows any value of any of these fields is not 0: `[n]` bool; None without fields.

    It may share memory with a field.
    """
    found: torch.Tensor | None = None
    for name in names:
        leaf = rows(name).flatten(1)
        flags = leaf.squeeze(1) if leaf.shape[1] == 1 else (leaf != 0).any(1)
        flags = flags if flags.dtype is torch.bool else flags != 0
        found = flags if found is None else found | flags
    return found


class EndedRows:
    """Fields that are kept of rows that ended a trajectory, beside a ring, because they are few.

    They are named by lane and id, and die with the row. Keys grow with every append, so that finding one is a binary
    search.

    Args:
        ring: The ring that the rows belong to.
        schema: The fields.
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

    @property
    def num_bytes(self) -> int:
        """Memory that is reserved."""
        return sum(x.nbytes for x in (self._keys, *self._columns.values()))

    @lasting
    def append(self, lane: torch.Tensor, row_id: torch.Tensor, leaves: Mapping[str, torch.Tensor]) -> None:
        """Keep rows: `[num, *event]` per field, sorted by (id, lane) and newer than all that are kept."""
        stop = self._last + len(lane)
        if stop > len(self._keys):
            live = self._live()
            num_kept, num_more = live.stop - live.start, max(_FIRST_ROOM, live.stop - live.start + 2 * len(lane))

            def moved(x: torch.Tensor) -> torch.Tensor:
                return torch.cat([x[live], x.new_zeros((num_more, *x.shape[1:]))])

            self._keys, self._columns = moved(self._keys), {name: moved(x) for name, x in self._columns.items()}
            self._first, self._last, stop = 0, num_kept, num_kept + len(lane)
        self._keys[self._last : stop] = self._ring.key(lane, row_id)
        for name, leaf in leaves.items():
            self._columns[name][self._last : stop] = leaf
        self._last = stop

    def find(self, lane: torch.Tensor, row_id: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Look rows up: (whether a row is kept, where it lies), both shaped like `lane`."""
        keys = self._keys[self._first : self._last]
        if not len(keys):
            return torch.zeros_like(lane, dtype=torch.bool), torch.zeros_like(lane)
        wanted = self._ring.key(lane, row_id)
        place = torch.searchsorted(keys, wanted).clamp_(max=len(keys) - 1)
        return keys[place] == wanted, place + self._first

    def take(self, name: str, place: torch.Tensor) -> torch.Tensor:
        """Copy a field of rows: `[len(place), *event]`."""
        return self._columns[name].index_select(0, place)

    def clear(self) -> None:
        """Forget everything."""
        self._first, self._last = 0, 0

    def keys(self) -> torch.Tensor:
        """Show the keys of what is live, `id * num_lanes + lane`, sharing memory."""
        return self._keys[self._live()]

    def live(self) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """Show what is live: lane, id and fields, which share memory."""
        live = self._live()
        return *self._ring.named(self._keys[live]), {name: x[live] for name, x in self._columns.items()}

    def check(self, keys: torch.Tensor, leaves: Mapping[str, torch.Tensor]) -> None:
        """Raise `SchemaError` if keys and fields are not as `keys` and `live` give them."""
        action = "load final rows"
        if keys.dtype is not torch.int64 or keys.dim() != 1:
            raise SchemaError(action, "", "their keys as [num] int64", f"{keys.dtype} {list(keys.shape)}")
        for name, leaf in leaves.items():
            field, shape = self.schema[name], [len(keys), *self.schema[name].shape]
            if list(leaf.shape) != shape or leaf.dtype is not field.torch_dtype:
                expected = f"{field.torch_dtype} {shape}"
                raise SchemaError(action, f"with {name!r}", expected, f"{leaf.dtype} {list(leaf.shape)}")
        if not bool((keys[1:] > keys[:-1]).all()):
            raise SchemaError(action, "", "ascending keys", "others")

    def _live(self) -> slice:
        keys = self._keys[self._first : self._last]
        self._first += int(torch.searchsorted(keys, self._ring.oldest * self._ring.num_lanes))
        return slice(self._first, self._last)
