"""Ends of trajectories: the rows that end one, and fields that are stored for those rows.

A row ends a trajectory if any value of a field of `end_key` is not 0. `window_bounds.py` uses the
ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..core.fields import Schema, signed
from ..core.memory import LateNumber, lasting
from ..core.records import listed, names_below
from ..errors import SchemaError
from .ring_store import RingStore

#: Position in the schema and number of values of each field that ends trajectories.
Places = list[tuple[int, int]]
_FIRST_ROOM = 64
#: On a device there is room at first for the ends of trajectories of this many rows.
_ROWS_PER_END = 64
_BOOL = np.dtype(np.bool_)
#: Names of flags of ends by themselves, and of flags of time limits; of a nested key the last part.
_TERMINATIONS = {
    "terminated",
    "terminateds",
    "termination",
    "terminations",
    "terminal",
    "terminals",
    "is_terminal",
}
_TIME_OUTS = {"truncated", "truncateds", "truncation", "truncations", "is_truncated"}
_TIME_OUTS |= {"timeout", "timeouts", "time_out", "time_outs", "TimeLimit.truncated"}
#: Names of flags of ends of any kind.
_ANY_END = {"done", "dones", "is_last"}
#: Mappings beside an end flag in which simulators keep their time-outs.
_INFOS = {"info", "infos", "extras"}


def end_places(schema: Schema, end_key: str | list[str] | None) -> Places:
    """Return the fields that end trajectories; raise `MissingFieldError` for a key without fields."""
    names = list(schema)
    action = "find what ends a trajectory"
    found = [
        name for key in listed(end_key) for name in names_below(schema, key, action, "end_key")
    ]
    return [(names.index(name), schema[name].num_elements) for name in found]


def find_ends(leaves: Sequence[Any], places: Places, num_lead: int = 2) -> Any:
    """Return which rows end a trajectory: `[n, lanes]` bool, from checked leaves `[n, lanes, *event]`.

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
        like = leaves[0]
        shape = tuple(leaves[0].shape[:num_lead])
        is_array = isinstance(like, np.ndarray)
        return np.zeros(shape, np.bool_) if is_array else like.new_zeros(shape, dtype=torch.bool)
    return found


@dataclass(frozen=True)
class EndKinds:
    """Fields that show whether a trajectory terminated or was truncated.

    Attributes:
        terminations: Flags of terminations.
        time_outs: Flags of time limits; ignored where a termination is set.
        others: Further end flags: a termination unless a time-out is set.
    """

    terminations: tuple[str, ...]
    time_outs: tuple[str, ...]
    others: tuple[str, ...]

    @classmethod
    def of(cls, schema: Iterable[str], end_names: Sequence[str]) -> EndKinds:
        """Return the kinds of the end flags, and of related flags in the same mapping of the schema."""
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
        """Return whether each row terminated its trajectory: `[n]` bool, possibly a view of a field.

        Args:
            rows: Function that returns a field of these rows, `[n, *event]`.
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
    """Return whether any value of the fields is not 0 in each row: `[n]` bool, or None without fields.

    The result may share memory with a field.
    """
    found: torch.Tensor | None = None
    for name in names:
        leaf = rows(name).flatten(1)
        flags = leaf.squeeze(1) if leaf.shape[1] == 1 else (leaf != 0).any(1)
        flags = flags if flags.dtype is torch.bool else flags != 0
        found = flags if found is None else found | flags
    return found


class EndedRows:
    """Fields that are stored only for rows that ended a trajectory, such as final observations.

    The rows are stored in a separate ring, in the order of their keys. On the CPU this ring grows
    before a live row would be overwritten. On other devices the host reads the number of ended rows
    later, and grows the ring when half of its places are in use. A live row is overwritten only if
    many trajectories end at once.

    Args:
        ring: The ring that the rows belong to.
        schema: The fields.

    Attributes:
        num_places: Rows that fit.
    """

    @lasting
    def __init__(self, ring: RingStore, schema: Schema) -> None:
        self._ring = ring
        self.schema = schema
        self._is_on_cpu = ring.device.type == "cpu"
        self._num_rows = ring.num_slots * ring.num_lanes
        self.num_places = _FIRST_ROOM
        if not self._is_on_cpu:
            expected = max(self._num_rows // _ROWS_PER_END, 2 * ring.num_lanes)
            self.num_places = max(_FIRST_ROOM, min(self._num_rows, expected))
        #: Rows that were ever kept; a tensor on other devices than the CPU.
        self._count: Any = (
            0 if self._is_on_cpu else torch.zeros((), dtype=torch.int64, device=ring.device)
        )
        #: On the CPU: number of the oldest live row.
        self._first = 0
        #: Places count from 1. Place 0 takes the rows that did not end, and stands for "no place".
        self._keys = torch.full((self.num_places + 1,), -1, dtype=torch.int64, device=ring.device)
        self._columns = {
            name: torch.zeros(
                (self.num_places + 1, *field.shape), dtype=field.torch_dtype, device=ring.device
            )
            for name, field in schema.items()
        }
        self._late_number = LateNumber(ring.device)

    @property
    def num_bytes(self) -> int:
        """Reserved memory, in bytes."""
        return sum(x.nbytes for x in (self._keys, *self._columns.values()))

    @lasting
    def make_room(self, ended: torch.Tensor) -> torch.Tensor | None:
        """Grow before rows are kept, if needed. A device is asked only about more rows than there are places.

        Args:
            ended: `[n, lanes]` bool.

        Returns:
            The keys by their new places from 0 on, -1 for a place without a row; None if no place
            has changed.
        """
        if self._is_on_cpu or ended.numel() > self.num_places:
            num_more = int(ended.sum())
            if int(self.num_live(len(ended))) + num_more <= self.num_places:
                return None
        else:
            num_more = 0
            received = self._late_number.receive()
            if (
                received is None
                or 2 * received[0] <= self.num_places
                or self.num_places >= self._num_rows
            ):
                return None
        num_more = max(num_more, self.num_places)
        num_live = self.num_live()
        order = torch.cat([self._keys.new_zeros(1), self._keys[1:].argsort() + 1])
        keys = self._keys[order]
        self._keys = torch.cat([keys, keys.new_full((num_more,), -1)])
        for name, column in self._columns.items():
            moved = signed(column).index_select(0, order)
            room = moved.new_zeros((num_more, *column.shape[1:]))
            self._columns[name] = torch.cat([moved, room]).view(column.dtype)
        self._set_count(self.num_places, num_live)
        self.num_places += num_more
        return keys

    def append(
        self, ended: torch.Tensor, leaves: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Keep the rows that ended of those that are about to be written.

        Args:
            ended: `[n, lanes]` bool.
            leaves: `[n, lanes, *event]` per field.

        Returns:
            Numbers among the `n * lanes` rows, of those that ended on the CPU and of all elsewhere;
            their places; and, not on the CPU, the keys of live rows that were overwritten, -1 for
            others.
        """
        flags = ended.flatten()
        first_key = self._ring.total * self._ring.num_lanes
        lost = None
        if self._is_on_cpu:
            rows = flags.nonzero().squeeze(1)
            numbers = torch.arange(self._count, self._count + len(rows), device="cpu")
            places = numbers % self.num_places + 1
            keys = rows + first_key
            self._count += len(rows)
        else:
            rows = torch.arange(len(flags), device=flags.device)
            rank = flags.cumsum(0)
            places = torch.where(flags, (rank + (self._count - 1)) % self.num_places + 1, 0)
            keys = torch.where(flags, rows + first_key, -1)
            before = self._keys.index_select(0, places)
            lost = torch.where(before >= self._oldest_key(len(ended)), before, -1)
            self._count += rank[-1]
        self._keys[places] = keys
        for name, leaf in leaves.items():
            column = self._columns[name]
            values = signed(leaf.to(column.dtype)).flatten(0, 1)
            signed(column)[places] = values[rows] if self._is_on_cpu else values
        if not self._is_on_cpu and self._late_number.is_free:
            self._late_number.send(self.num_live(len(ended)))
        return rows, places, lost

    def num_live(self, num_more: int = 0) -> Any:
        """Return how many rows are live after `num_more` more steps: an int on the CPU, elsewhere a tensor."""
        oldest_key = self._oldest_key(num_more)
        if not self._is_on_cpu:
            return (self._keys >= oldest_key).sum()
        first = self._first
        keys = self._keys[1:].numpy()
        while first < self._count:  # twice at most: places go on from the last to the first
            start = first % self.num_places
            piece = keys[start : min(start + self._count - first, self.num_places)]
            num_dead = int(piece.searchsorted(oldest_key))
            first += num_dead
            if num_dead < len(piece):
                break
        if not num_more:
            self._first = first
        return self._count - first

    def places(self, num_live: Any, number: torch.Tensor) -> torch.Tensor:
        """Return the places of live rows by their number, 0 for the oldest of `num_live`."""
        found: torch.Tensor = (number + (self._count - num_live)) % self.num_places + 1
        return found

    def named(self, place: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the lane and the id of the rows at places."""
        return self._ring.named(self._keys[place])

    def take(self, name: str, place: torch.Tensor) -> torch.Tensor:
        """Copy a field of rows: `[len(place), *event]`."""
        return self._columns[name].index_select(0, place)

    def clear(self) -> None:
        """Remove every row."""
        self._keys.fill_(-1)
        self._set_count(0, 0)

    def live(self) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Copy the keys of live rows, `id * num_lanes + lane`, ascending, and their fields."""
        order = self._keys.argsort()
        order = order[self._keys[order] >= self._oldest_key(0)]
        return self._keys[order], {name: self.take(name, order) for name in self.schema}

    @lasting
    def restore(self, keys: torch.Tensor, leaves: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Keep, as the only ones, rows as `live` gives them; return the keys by their places from 0 on.

        Raises:
            SchemaError: They are not as `live` gives them.
        """
        action = "load final rows"
        if keys.dtype is not torch.int64 or keys.dim() != 1:
            raise SchemaError(
                action, "", "their keys as [num] int64", f"{keys.dtype} {list(keys.shape)}"
            )
        for name, leaf in leaves.items():
            field = self.schema[name]
            shape = [len(keys), *self.schema[name].shape]
            if list(leaf.shape) != shape or leaf.dtype is not field.torch_dtype:
                expected = f"{field.torch_dtype} {shape}"
                raise SchemaError(
                    action, f"with {name!r}", expected, f"{leaf.dtype} {list(leaf.shape)}"
                )
        if not bool((keys[1:] > keys[:-1]).all()):
            raise SchemaError(action, "", "ascending keys", "others")
        device = self._ring.device
        self.num_places = max(self.num_places, len(keys))
        self._keys = torch.full((self.num_places + 1,), -1, dtype=torch.int64, device=device)
        self._keys[1 : len(keys) + 1] = keys.to(device)
        for name, leaf in leaves.items():
            column = self._columns[name]
            self._columns[name] = column.new_zeros((self.num_places + 1, *column.shape[1:]))
            self._columns[name][1 : len(keys) + 1] = leaf.to(device)
        self._set_count(len(keys), len(keys))
        return self._keys[: len(keys) + 1]

    def _oldest_key(self, num_more: int) -> int:
        """Return the least key of a row that is live after `num_more` more steps."""
        ring = self._ring
        return max(0, ring.total + num_more - ring.num_slots) * ring.num_lanes

    def _set_count(self, count: int, num_live: Any) -> None:
        if self._is_on_cpu:
            self._count = count
            self._first = count - num_live
        else:
            self._count.fill_(count)
