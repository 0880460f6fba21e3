"""Ends of trajectories: the end flags of rows, and fields stored only for the last rows.

A row ends its trajectory if any value of an `end_key` field is not 0. `window_bounds.py` computes
the valid windows from the ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..core.deferred import HostCopy
from ..core.fields import Schema, signed
from ..core.memory import lasting
from ..core.records import listed, names_below
from ..errors import SchemaError
from .ring_store import RingStore

#: The end flags of a schema, as pairs: position of the field in the schema, and values per row.
Places = list[tuple[int, int]]
_FIRST_ROOM = 64
#: On a device, memory for one ended trajectory is first allocated per this number of rows.
_ROWS_PER_END = 64
#: Limit for one append on a device, as a share of the rows of the ring. Up to the limit, one slot
#: is reserved per new row, so that the host need not wait for the number of rows that end a
#: trajectory. A larger append waits for the number, which saves memory.
_MAX_SHARE_OF_RING = 1 / 4
_BOOL = np.dtype(np.bool_)
#: Names of termination flags. A nested key is compared by its last part.
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
#: Names of flags that are set at every end of a trajectory: at terminations and at time-outs.
_ANY_END = {"done", "dones", "is_last"}
#: Names of the mappings, next to an end flag, in which simulators store their time-out flags.
_INFOS = {"info", "infos", "extras"}


def end_places(schema: Schema, end_key: str | list[str] | None) -> Places:
    """Return the end flags: the fields that are not 0 in the last row of a trajectory.

    Raises:
        MissingFieldError: A key of `end_key` matches no field of the schema.
    """
    names = list(schema)
    paths = [name for key in listed(end_key) for name in names_below(schema, key, "end_key")]
    return [(names.index(name), schema[name].num_elements) for name in paths]


def find_ends(leaves: Sequence[Any], places: Places, num_lead: int = 2) -> Any:
    """Return whether each row ends its trajectory: `[n, lanes]` bool.

    A row ends its trajectory if any of its end flags is not 0.

    Args:
        leaves: Checked leaves `[n, lanes, *event]`, all arrays or all tensors. The result has the
            same type.
        places: End flags, as returned by `end_places`.
        num_lead: Number of axes before `event`: 2, or 1 if the leaves have no axis of lanes.
    """
    is_end: Any = None
    for place, width in places:
        leaf = leaves[place]
        lead = leaf.shape[:num_lead]
        flags = leaf.reshape(lead) if width == 1 else (leaf.reshape((*lead, width)) != 0).any(-1)
        if flags.dtype is not _BOOL and flags.dtype is not torch.bool:
            flags = flags != 0
        is_end = flags if is_end is None else is_end | flags
    if is_end is None:
        like = leaves[0]
        shape = tuple(leaves[0].shape[:num_lead])
        is_array = isinstance(like, np.ndarray)
        return np.zeros(shape, np.bool_) if is_array else like.new_zeros(shape, dtype=torch.bool)
    return is_end


@dataclass(frozen=True)
class EndKinds:
    """Names of end flags, sorted into termination flags, time-out flags and other flags.

    Attributes:
        terminations: Names of termination flags.
        time_outs: Names of time-out flags. A set time-out has no effect if a termination flag of
            the row is set too.
        others: Names of other end flags, such as `done`. A set flag means that the trajectory
            terminated, unless a time-out flag of the row is set.
    """

    terminations: tuple[str, ...]
    time_outs: tuple[str, ...]
    others: tuple[str, ...]

    @classmethod
    def of(cls, schema: Iterable[str], end_names: Sequence[str]) -> EndKinds:
        """Find the termination, time-out and other end flags of a schema by their names.

        Args:
            schema: Names of all fields. Termination and time-out flags that are missing from
                `end_names` are included if they are in the mapping of an end flag, or in its
                `info`, `infos` or `extras`.
            end_names: Names of the end flags.
        """
        parents = {name.rpartition("/")[0] for name in end_names}
        parents |= {f"{parent}/{infos}".lstrip("/") for parent in parents for infos in _INFOS}
        beside = [name for name in schema if name.rpartition("/")[0] in parents]
        terminations = tuple(name for name in beside if _last_part(name) in _TERMINATIONS)
        time_outs = tuple(name for name in beside if _last_part(name) in _TIME_OUTS)
        others = [name for name in end_names if name not in terminations + time_outs]
        if terminations:  # `done` is redundant: without a termination flag it means a time-out.
            others = [name for name in others if _last_part(name) not in _ANY_END]
        return cls(terminations, time_outs, tuple(others))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all flags of the three kinds."""
        return self.terminations + self.time_outs + self.others

    def missing_from(self, end_names: Sequence[str]) -> tuple[str, ...]:
        """Return termination and time-out flags that the user should add to `end_names`.

        The result is empty if `end_names` has another flag, such as `done`. Such a flag is set at
        every end, so no end is missed.
        """
        if any(name not in self.terminations + self.time_outs for name in end_names):
            return ()
        return tuple(name for name in self.terminations + self.time_outs if name not in end_names)

    def terminated(self, rows: Callable[[str], torch.Tensor]) -> torch.Tensor:
        """Return whether each row terminated its trajectory: `[n]` bool.

        The result may share memory with a field.

        Args:
            rows: Function that maps the name of a field to its values, `[n, *event]`.
        """
        by_itself, other = (_any_set(names, rows) for names in (self.terminations, self.others))
        if other is None and by_itself is not None:
            return by_itself
        cut = _any_set(self.time_outs, rows)
        if other is None:
            assert cut is not None  # At least one kind has a flag: here it is the time-outs.
            return torch.zeros_like(cut)
        if cut is not None:
            other = other & ~cut
        return other if by_itself is None else by_itself | other


def _last_part(name: str) -> str:
    return name.rpartition("/")[2]


def _any_set(names: Iterable[str], rows: Callable[[str], torch.Tensor]) -> torch.Tensor | None:
    """Return whether each row has a value other than 0 in any of the fields: `[n]` bool.

    The result is None if `names` is empty. It may share memory with a field.
    """
    is_set: torch.Tensor | None = None
    for name in names:
        leaf = rows(name).flatten(1)
        flags = leaf.squeeze(1) if leaf.shape[1] == 1 else (leaf != 0).any(1)
        flags = flags if flags.dtype is torch.bool else flags != 0
        is_set = flags if is_set is None else is_set | flags
    return is_set


class EndedRows:
    """Storage of fields that exist only in the last row of a trajectory, such as final observations.

    The last row of a trajectory is called an ended row. Ended rows are stored in a separate ring, in
    the order of their keys (`RingStore.key`). On the CPU this ring grows before a live ended row
    would be overwritten. On other devices the host receives the number of ended rows with a delay.
    It grows the ring when more than half of the slots are in use. A live ended row is overwritten
    only if many trajectories end at once.

    Args:
        ring: Ring of all rows. An ended row is live while its row in this ring is live.
        schema: Fields that are stored for ended rows.

    Attributes:
        num_places: Number of slots for ended rows.
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
        #: Running number of the next ended row: an int on the CPU, elsewhere a tensor. The row is
        #: stored in slot `_count % num_places + 1`.
        self._count: Any = (
            0 if self._is_on_cpu else torch.zeros((), dtype=torch.int64, device=ring.device)
        )
        #: Running number of the oldest live ended row. Used only on the CPU.
        self._first = 0
        #: Key of the ended row in each slot, -1 if the slot is free. Slots are numbered from 1. Slot
        #: 0 means "no slot". On a device, rows that ended no trajectory are written to slot 0.
        self._keys = torch.full((self.num_places + 1,), -1, dtype=torch.int64, device=ring.device)
        self._columns = {
            name: torch.zeros(
                (self.num_places + 1, *field.shape), dtype=field.torch_dtype, device=ring.device
            )
            for name, field in schema.items()
        }
        #: On a device: pending copy of the number of live ended rows to the host, or None.
        self._copied_count: HostCopy | None = None
        #: On a device: upper bound of the number of live ended rows. It is the last copied number
        #: and one per row written since. The number of a pending copy is added later.
        self._max_live = 0

    @property
    def num_bytes(self) -> int:
        """Reserved memory, in bytes."""
        return sum(x.nbytes for x in (self._keys, *self._columns.values()))

    @lasting
    def make_room(self, ended: torch.Tensor) -> torch.Tensor | None:
        """Grow the memory for ended rows before `append` if it could overflow.

        On a device the number of ended rows is unknown to the host. If `ended` has more rows than
        there are slots, the memory grows by one slot per row. If `ended` has more than a quarter of
        the rows of the ring as well, the host waits for the number of ended rows, and the memory
        grows only for these.

        Args:
            ended: `[n, lanes]` bool, whether each row that will be written ends a trajectory.

        Returns:
            The key of the ended row in each slot after the growth, from slot 0 on, -1 for a free
            slot. None if the memory did not grow.
        """
        has_places = ended.numel() <= self.num_places
        is_large = ended.numel() > _MAX_SHARE_OF_RING * self._num_rows
        if self._is_on_cpu or (is_large and not has_places):
            num_more = int(ended.sum())
            if int(self.num_live(len(ended))) + num_more <= self.num_places:
                return None
        elif not has_places:
            num_more = ended.numel()
        else:
            num_more = 0
            if self._copied_count is None or not self._copied_count.has_arrived:
                return None
            count = int(self._copied_count)
            self._copied_count = None
            self._max_live += count
            if 2 * count <= self.num_places or self.num_places >= self._num_rows:
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
    ) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None]:
        """Store the fields of ended rows, before `RingStore.write` writes the rows themselves.

        Args:
            ended: `[n, lanes]` bool, whether each row ends a trajectory.
            leaves: `[n, lanes, *event]` by field name.

        Returns:
            A tuple (rows, slots, overwritten). `rows` are numbers of new rows, `step * lanes + lane`:
            of the ended rows on the CPU, of all new rows elsewhere. `slots` is the slot of each of
            these rows, 0 for a row that ended no trajectory. `overwritten` is None on the CPU, where
            no live row is overwritten. Elsewhere it is a pair of tensors: the key of the row that
            was in each of these slots, -1 if the slot was free, and whether that row was live.
        """
        flags = ended.flatten()
        first_key = self._ring.total * self._ring.num_lanes
        overwritten = None
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
            overwritten = (before, before >= self._oldest_key(len(ended)))
            self._count += rank[-1]
        self._keys[places] = keys
        for name, leaf in leaves.items():
            column = self._columns[name]
            values = signed(leaf.to(column.dtype)).flatten(0, 1)
            signed(column)[places] = values[rows] if self._is_on_cpu else values
        self._max_live += len(flags)
        # Copy the number of live rows to the host only if half of the slots could be in use.
        may_be_full = not self._is_on_cpu and 2 * self._max_live > self.num_places
        if may_be_full and self._copied_count is None:
            self._copied_count = HostCopy(self.num_live(len(ended)))
            self._max_live = 0
        return rows, places, overwritten

    def num_live(self, num_more: int = 0) -> Any:
        """Return the number of ended rows that are still live after `num_more` more steps.

        The result is an int on the CPU, elsewhere a tensor.
        """
        oldest_key = self._oldest_key(num_more)
        if not self._is_on_cpu:
            return (self._keys >= oldest_key).sum()
        first = self._first
        keys = self._keys[1:].numpy()
        while first < self._count:  # At most two pieces, as slots wrap around once.
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
        """Return the slots in which some live ended rows are stored, selected by age.

        Args:
            num_live: Number of live ended rows, as returned by `num_live()`.
            number: Numbers of ended rows among the live ones, from 0 for the oldest: `[n]` int64.
        """
        places: torch.Tensor = (number + (self._count - num_live)) % self.num_places + 1
        return places

    def named(self, place: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the lanes and the row ids of the ended rows that are stored in slots `place`."""
        return self._ring.named(self._keys[place])

    def take(self, name: str, place: torch.Tensor) -> torch.Tensor:
        """Copy a field of the ended rows in slots `place`: `[len(place), *event]`."""
        return self._columns[name].index_select(0, place)

    def clear(self) -> None:
        """Remove every ended row."""
        self._keys.fill_(-1)
        self._set_count(0, 0)

    def live(self) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the live ended rows to save: their keys, and copies of their fields.

        The keys are `[num]` int64 in ascending order. The key of a row is `id * num_lanes + lane`.
        The fields are `[num, *event]` by name.
        """
        order = self._keys.argsort()
        order = order[self._keys[order] >= self._oldest_key(0)]
        return self._keys[order], {name: self.take(name, order) for name in self.schema}

    @lasting
    def restore(self, keys: torch.Tensor, leaves: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Replace all ended rows by saved rows.

        Args:
            keys: Ascending keys `[num]` int64, as returned by `live`.
            leaves: `[num, *event]` by field name, as returned by `live`.

        Returns:
            The key of the ended row in each slot, from slot 0 on; -1 for slot 0.

        Raises:
            SchemaError: Keys or leaves have a wrong shape, dtype or order.
        """
        if keys.dtype is not torch.int64 or keys.dim() != 1:
            raise SchemaError(
                f"the keys of final observations have dtype {keys.dtype} and shape "
                f"{list(keys.shape)}, expected int64 [num]."
            )
        for name, leaf in leaves.items():
            field = self.schema[name]
            shape = [len(keys), *self.schema[name].shape]
            if list(leaf.shape) != shape or leaf.dtype is not field.torch_dtype:
                raise SchemaError(
                    f"field {name!r} of final observations has dtype {leaf.dtype} and shape "
                    f"{list(leaf.shape)}, expected {field.torch_dtype} {shape}."
                )
        if not bool((keys[1:] > keys[:-1]).all()):
            raise SchemaError(
                "the state is damaged: the keys of final observations are not ascending."
            )
        device = self._ring.device
        # On a device the host learns late that more slots are needed. Twice as many leave time.
        num_needed = len(keys) if self._is_on_cpu else min(2 * len(keys), self._num_rows)
        self.num_places = max(self.num_places, num_needed)
        self._keys = torch.full((self.num_places + 1,), -1, dtype=torch.int64, device=device)
        self._keys[1 : len(keys) + 1] = keys.to(device)
        for name, leaf in leaves.items():
            column = self._columns[name]
            self._columns[name] = column.new_zeros((self.num_places + 1, *column.shape[1:]))
            self._columns[name][1 : len(keys) + 1] = leaf.to(device)
        self._set_count(len(keys), len(keys))
        self._max_live = len(keys)
        return self._keys[: len(keys) + 1]

    def _oldest_key(self, num_more: int) -> int:
        """Return the smallest key of the rows that stay live after `num_more` more steps."""
        ring = self._ring
        return max(0, ring.total + num_more - ring.num_slots) * ring.num_lanes

    def _set_count(self, count: int, num_live: Any) -> None:
        if self._is_on_cpu:
            self._count = count
            self._first = count - num_live
        else:
            self._count.fill_(count)
