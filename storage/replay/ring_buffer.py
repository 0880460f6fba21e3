"""`RingBuffer`: what every buffer on a ring shares: checked writes, ends, final rows, saved state.

One rule: this file only says in which order things happen. What fits is decided in `core/records.py`,
where rows lie in `ring/ring_store.py`, where trajectories end in `ring/window_bounds.py`, how the state is kept in
`saving/buffer_store.py`. Every public method takes the one lock, checks everything, then acts.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from ..core import arguments
from ..core.fields import Schema, flatten, map_leaves
from ..core.memory import StreamOrder, sent_together, writes_in_order
from ..core.random_indices import generator_on
from ..core.records import RecordReader, Rows
from ..errors import BufferEmptyError, SchemaError, UsageError
from ..ring.ring_store import RingStore
from ..ring.trajectory_ends import Places, end_places, find_ends
from ..ring.window_bounds import Boundaries
from ..saving.buffer_store import ROW_KEY, BufferStore, rows_written
from ..saving.hdf5_columns import Table
from ..saving.saved_folder import FINALS, ROWS
from ..saving.saved_store import State


class RingBuffer(BufferStore):
    """Rows on a ring under one lock: everything but how they are given back.

    Args:
        capacity, device, generator: As for `DictBuffer`.
    """

    #: Arguments that make an equal buffer, by the names of its attributes.
    _ARGUMENTS: ClassVar[tuple[str, ...]] = (
        "capacity",
        "num_envs",
        "end_key",
        "auto_unsqueeze",
        "narrow",
        "contiguous",
    )
    #: What fills it.
    _WRITER: ClassVar[str] = "extend"
    #: Whether leaves come as `[n, lanes, *event]`.
    _has_lane_axis: bool = False
    # Options of buffers that have them, set before `__init__`.
    num_envs: int = 1
    end_key: str | list[str] | None = None
    auto_unsqueeze: bool = False
    narrow: bool = False
    contiguous: bool = False
    output_device: torch.device | None = None

    def __init__(
        self, capacity: int, device: torch.device | str, generator: torch.Generator | int | None = None
    ) -> None:
        action = arguments.creating(self)
        self.capacity = arguments.whole(action, "capacity", capacity, 1)
        self.device = arguments.device(action, "device", device)
        self.generator = generator_on(generator, self.device, action)
        self._lock = threading.RLock()
        self._order = StreamOrder(self.device)
        self._forget()

    # What it holds.

    def __len__(self) -> int:
        """Rows that are held."""
        return 0 if self._ring is None else self._ring.num_live * self.num_envs

    @property
    def total(self) -> int:
        """Rows that were ever added since the creation or `clear`; row ids count to here."""
        return 0 if self._ring is None else self._ring.total * self.num_envs

    @property
    def _idx(self) -> int:
        return 0 if self._ring is None else self._ring.cursor * self.num_envs

    @property
    def _is_full(self) -> bool:
        return self._ring is not None and self._ring.num_live == self._ring.num_slots

    @property
    def num_bytes(self) -> int:
        """Memory that is reserved for rows and all that belongs to them."""
        return sum(x.num_bytes for x in (self._ring, self._boundaries) if x is not None)

    # Writing.

    def extend(self, data: Any, *, final: Any = None) -> None:
        """Append rows; of more than fit the newest are kept.

        Args:
            data: Nested mapping whose leaves are `[n, *event]`, any n. The first one fixes keys,
                shapes and dtypes. Nothing of it is kept: the rows are copied.
            final: What was observed after the last step of trajectories that end in these rows:
                leaves of some fields, as long as those of `data`; only rows that end count.

        Raises:
            MissingFieldError, SchemaError, FieldTypeError: Naming the leaf that does not fit;
                nothing is written.
        """
        with self._lock:
            ring = self._ring
            is_short = final is None and ring is not None and ring.takes_arrays
            arrays = self._reader.read_again(data) if is_short else None
            if arrays is not None and ring is not None:
                if self._boundaries is not None:
                    self._boundaries.note(find_ends(arrays, self._end_places, 1 if ring.num_lanes == 1 else 2))
                ring.write(arrays)
                return
            rows = None if is_short else self._reader.rows_again(data)
            if rows is None:
                rows = self._reader.read(data)
            if rows is None:
                return
            places = self._end_places if ring is not None else self._find_ends(rows.schema)
            last = None if final is None else self._read_final(final, rows, places)
            if rows.num_rows == 0:
                return
            if ring is None:
                ring = self._create(rows.schema, rows.tensors[0].shape[1])
            self._order.wait(is_write=True)
            tensors = rows.tensors
            if self._order.is_needed:
                sent = sent_together([*tensors, *(() if last is None else last.tensors)], self.device)
                tensors = sent[: len(tensors)]
                last = None if last is None else Rows(last.num_rows, sent[len(tensors) :], last.schema)
            if self._boundaries is not None:
                self._boundaries.note(find_ends(tensors, self._end_places), last)
            ring.write(tensors)
            self._order.record(is_write=True)

    def clear(self) -> None:
        """Forget every row; keys, shapes and the memory stay."""
        with self._lock:
            self._order.wait(is_write=True)
            for part in (self._ring, self._boundaries):
                if part is not None:
                    part.clear()
            self._order.record(is_write=True)

    # Inside.

    @property
    def _has_lanes_in_file(self) -> bool:
        return self.num_envs > 1

    @property
    def _num_slots(self) -> int:
        return self.capacity // self.num_envs

    def _arguments(self) -> dict[str, Any]:
        """Return the arguments that make an equal buffer, as JSON."""
        return {name: getattr(self, name) for name in self._ARGUMENTS}

    @classmethod
    def _of_flat(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        found = {name: config[name] for name in cls._ARGUMENTS if name in config}
        if not {"format", "generator"} & config.keys() and isinstance(found.get("end_key"), list):
            found["end_key"] = tuple(found["end_key"])  # earlier systems have one key, perhaps nested
        return found

    def _forget(self) -> None:
        """Forget rows, fields and memory."""
        num_lanes = None if self._has_lane_axis else self.num_envs
        self._reader = RecordReader(num_lanes, self._has_lane_axis, self.auto_unsqueeze, self.narrow)
        self._final_reader = RecordReader(num_lanes, self._has_lane_axis, self.auto_unsqueeze, self.narrow)
        self._ring: RingStore | None = None
        self._boundaries: Boundaries | None = None
        self._end_places: Places = []

    def _find_ends(self, schema: Schema) -> Places:
        """Find the fields that end trajectories; none if rows have nothing to do with each other."""
        return end_places(schema, self.end_key)

    def _make_ring(self, schema: Schema, num_lanes: int) -> tuple[RingStore, Boundaries | None]:
        ring = RingStore(self._num_slots, num_lanes, schema, self.device)
        return ring, Boundaries(ring) if self._find_ends(schema) else None

    def _create(self, schema: Schema, num_lanes: int) -> RingStore:
        """Allocate; nothing is changed if that fails."""
        places = self._find_ends(schema)
        ring, self._boundaries = self._make_ring(schema, num_lanes)
        self._end_places = places
        self._ring = ring
        self._reader.freeze(schema, num_lanes)
        return ring

    def _read_final(self, final: Any, rows: Rows, places: Places) -> Rows:
        """Check final observations."""
        if not places:
            raise UsageError("add final rows", "", "a buffer with end_key", "one without")
        known = None if self._boundaries is None else self._boundaries.finals
        reader = self._final_reader
        if known is None:
            reader = RecordReader(rows.tensors[0].shape[1], self._has_lane_axis, self.auto_unsqueeze, self.narrow)
            reader.schema = rows.schema if self._reader.schema is None else self._reader.schema
            read = reader.read(final, list(flatten(final)))
        else:
            if reader.schema is not known.schema:
                reader.freeze(known.schema, rows.tensors[0].shape[1])
            read = reader.rows_again(final) or reader.read(final)
        if read is None or read.num_rows != rows.num_rows:
            got = "none" if read is None else str(read.num_rows)
            raise SchemaError("add final rows", "", f"{rows.num_rows} rows, as many as data has", got)
        return read

    def _filled(self, action: str) -> RingStore:
        if self._ring is None or not self._ring.total:
            advice = f"Call {self._WRITER}() first"
            raise BufferEmptyError(action, f"from a {type(self).__name__}", "rows", "none", advice)
        return self._ring

    def _get_state(self) -> State:
        ring = self._ring
        boundaries = self._boundaries
        finals = None if boundaries is None else boundaries.finals
        numbers: dict[str, Any] = {
            "total": 0 if ring is None else ring.total,
            "_idx": self._idx,
            "_is_full": self._is_full,
            "accepted_share": 1.0 if boundaries is None else boundaries.share,
            "num_lanes": None if ring is None else ring.num_lanes,
            "has_finals": finals is not None,
        }
        tensors: dict[str, torch.Tensor] = {}
        if ring is None:
            return State(self._arguments(), numbers, tensors)
        self._order.wait(is_write=False)
        if boundaries is not None:
            lanes = torch.arange(ring.num_lanes, device=ring.device)
            # Where the oldest row stands in its trajectory, whose first rows may be gone; more than a ring is as much.
            ages = boundaries.age(lanes, torch.full_like(lanes, ring.oldest)).clamp(max=ring.num_slots)
            numbers["oldest_ages"] = ages.tolist()
        for name in ring.schema:
            rows = ring.slots_view(name)[: ring.num_live]
            tensors[f"{ROWS}/{name}"] = rows if self._has_lanes_in_file else rows.squeeze(1)
        if finals is not None:
            if ROW_KEY in finals.schema:
                raise SchemaError("save final rows", "", f"fields of other names than {ROW_KEY!r}", "one of that name")
            keys, columns = finals.live()
            tensors[f"{FINALS}/{ROW_KEY}"] = keys.unsqueeze(1)
            tensors |= {f"{FINALS}/{name}": rows for name, rows in columns.items()}
        return State(self._arguments(), numbers, tensors)

    @writes_in_order
    def _set_tables(self, numbers: Mapping[str, Any], tables: Mapping[str, Table]) -> None:
        self._forget()
        if ROWS not in tables or not tables[ROWS].shapes:
            return
        rows = tables[ROWS]
        num_slots = self._num_slots
        num_lead = 2 if self._has_lanes_in_file else 1
        live = rows.num_rows
        num_lanes = next(iter(rows.shapes.values()))[1] if num_lead == 2 else 1
        if live > num_slots:
            raise SchemaError("load rows", expected=f"at most {num_slots} rows, the capacity", got=f"{live} rows")
        total = rows_written(numbers, live, num_slots, self.num_envs)
        ring = self._create(rows.schema(num_lead), num_lanes)
        for first, part in rows.rows():
            ring.put_slots(first, {name: x if num_lead == 2 else x.unsqueeze(1) for name, x in part.items()})
        ring.total = total
        boundaries = self._boundaries
        if boundaries is not None:
            boundaries.share = _accepted_share(numbers)
            oldest_ages = _oldest_ages(numbers, num_lanes, min(ring.oldest, num_slots))
            ends = find_ends([ring.slots_view(name)[:live] for name in ring.schema], self._end_places)
            ring.total = ring.oldest
            boundaries.next_ages.copy_(oldest_ages)
            boundaries.note(ends.roll(-(ring.total % num_slots), 0) if live == num_slots else ends)
            ring.total = total
        if FINALS in tables:
            if boundaries is None:
                raise SchemaError("load final rows", "", "a buffer with end_key, and rows", "one without")
            columns = {name: tables[FINALS].read(name) for name in tables[FINALS].shapes}
            keys = columns.pop(ROW_KEY).flatten()
            lane, row_id = ring.named(keys.long().to(ring.device))
            is_live = (row_id >= ring.oldest) & (row_id < total)
            if not bool((is_live & boundaries.ended(lane, row_id)).all()):
                raise SchemaError("load final rows", "", "keys of rows that ended a trajectory", "others")
            boundaries.restore_finals(Schema(ring.schema[name] for name in columns), keys, columns)

    def _of_earlier(self, state: Mapping[str, Any]) -> dict[str, Any]:
        columns = {name: x if self._has_lanes_in_file else x.squeeze(1) for name, x in state.get("columns", {}).items()}
        return super()._of_earlier({**state, "columns": columns})


def on_device(tree: dict[str, Any], device: torch.device | None) -> dict[str, Any]:
    """Bring a nested dict of tensors to a device; None is wherever they are."""
    if device is None:
        return tree
    is_to_host = device.type == "cpu"  # whoever reads there does not wait for an asynchronous copy
    found: dict[str, Any] = map_leaves(lambda leaf: leaf.to(device, non_blocking=not is_to_host), tree)
    return found


def _accepted_share(numbers: Mapping[str, Any]) -> float:
    """Return the share of candidates that were accepted lately."""
    share = float(numbers.get("accepted_share", 1.0))
    if not 0 < share <= 1:
        raise SchemaError("load a state", "", "an accepted_share above 0, at most 1", str(share))
    return max(share, 1e-3)  # no smaller one is ever saved


def _oldest_ages(numbers: Mapping[str, Any], num_lanes: int, most: int) -> torch.Tensor:
    """Return the ages of each lane's oldest row; in saves without them it begins its trajectory."""
    ages = torch.tensor(numbers.get("oldest_ages", [0] * num_lanes), device="cpu")
    if ages.dtype is not torch.int64 or ages.shape != (num_lanes,) or not bool(((ages >= 0) & (ages <= most)).all()):
        expected = f"oldest_ages of {num_lanes} lanes, 0 to {most}"
        raise SchemaError("load a state", "", expected, repr(numbers["oldest_ages"])[:100])
    return ages
