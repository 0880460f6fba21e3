"""`RowStore`: rows of one schema that threads and CUDA streams share, and `RowFront`, the base of classes on one.

Samplers are beside it: `draw_uniformly` here, windows in `window_sampler.py`, transitions in
`transition_sampler.py` and priorities in the room `prioritized`. Public buffers check their
arguments and name the results.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..core.fields import Schema, flatten
from ..core.memory import StreamOrder, lasting, sent, sent_together
from ..core.random_indices import uniform
from ..core.records import RecordReader, Rows
from ..errors import SchemaError, UsageError
from .ring_store import RingStore
from .trajectory_ends import Places, find_ends
from .window_bounds import Boundaries

#: The least share of accepted candidates that is saved.
_LEAST_SHARE = 1e-3


@dataclass(frozen=True)
class RowOptions:
    """Options of a `RowStore`.

    Attributes:
        num_slots: Rows per lane.
        find_ends: Returns the fields of a schema that end trajectories; None if rows are
            independent.
        num_guards: Rows that are stored twice; see `RingStore`.
        keeps_segments: Whether ended trajectories are listed; see `Boundaries`.
    """

    num_slots: int
    find_ends: Callable[[Schema], Places] | None = None
    num_guards: int = 1
    keeps_segments: bool = False


@dataclass(frozen=True)
class RowState:
    """The rows of a store and their trajectories.

    Attributes:
        total: Rows per lane that were ever written.
        num_lanes: Lanes.
        columns: `[num_live, num_lanes, *event]` per field, in the order of the slots; views.
        oldest_ages: Age of each lane's oldest row; None if rows are independent.
        accepted_share: Share of candidates that recent draws accepted.
        final_keys: `[num]` int64, keys of the rows with a final observation; None if there are
            none.
        final_columns: `[num, *event]` per field.
    """

    total: int
    num_lanes: int
    columns: dict[str, torch.Tensor]
    oldest_ages: list[int] | None
    accepted_share: float
    final_keys: torch.Tensor | None
    final_columns: dict[str, torch.Tensor]


class RowStore:
    """Rows of one schema in memory; the newest overwrite the oldest.

    Args:
        options: Size and trajectories.
        reader: Checks records; it has no schema yet.
        device: Device of the rows.
        generator: Draws the samples.

    Attributes:
        ring: The rows; None before the first record.
        boundaries: Where trajectories end; None before the first record or if rows are independent.
        reader: Checks records.
        lock: Must be held by callers of every method but `extend` and `clear`.
        order: Order of CUDA streams.
        generator: Draws the samples.
    """

    ring: RingStore | None = None
    boundaries: Boundaries | None = None

    def __init__(
        self,
        options: RowOptions,
        reader: RecordReader,
        device: torch.device,
        generator: torch.Generator,
    ) -> None:
        self.options = options
        self.reader = reader
        self.device = device
        self.generator = generator
        self.lock = threading.RLock()
        self.order = StreamOrder(device)
        self._final_reader = reader.renewed()
        self._end_places: Places = []

    def emptied(self, num_slots: int | None = None) -> RowStore:
        """Return a store without rows and schema that shares the lock, the generator and the order of streams."""
        options = self.options
        if num_slots is not None:
            options = RowOptions(
                num_slots, options.find_ends, options.num_guards, options.keeps_segments
            )
        store = RowStore(options, self.reader.renewed(), self.device, self.generator)
        store.lock = self.lock
        store.order = self.order
        return store

    @property
    def num_live(self) -> int:
        """Live rows of all lanes."""
        return 0 if self.ring is None else self.ring.num_live * self.ring.num_lanes

    @property
    def num_bytes(self) -> int:
        """Reserved memory, in bytes."""
        return sum(part.num_bytes for part in (self.ring, self.boundaries) if part is not None)

    @property
    def end_names(self) -> list[str]:
        """Names of the fields that end trajectories."""
        return (
            [] if self.ring is None else [self.ring.names[place] for place, _ in self._end_places]
        )

    def extend(self, data: Any, final: Any = None) -> None:
        """Check records and append them; of more than fit the newest are kept.

        Args:
            data: Nested mapping of leaves as the reader expects them. The first one fixes the
                schema.
            final: Observations after the last rows of trajectories, as long as `data`; only rows
                that end count.

        Raises:
            MissingFieldError, SchemaError, FieldTypeError: A leaf does not fit; nothing is written.
        """
        with self.lock:
            ring = self.ring
            if final is None and ring is not None and ring.takes_arrays:
                arrays = self.reader.read_again(data)
                if arrays is not None:
                    if self.boundaries is not None:
                        num_lead = 1 if ring.num_lanes == 1 else 2
                        self.boundaries.note(find_ends(arrays, self._end_places, num_lead))
                    ring.write(arrays)
                    return
                rows = self.reader.read(data)
            else:
                rows = self.reader.rows_again(data) or self.reader.read(data)
            if rows is None:
                return
            places = self._end_places if ring is not None else self._find_ends(rows.schema)
            last_rows = None if final is None else self._read_final(final, rows, places)
            if not rows.num_rows:
                return
            if ring is None:
                ring = self.create(rows.schema, rows.tensors[0].shape[1])
            with self.order.writes:
                self._write(ring, rows, last_rows)

    def create(self, schema: Schema, num_lanes: int) -> RingStore:
        """Fix the schema and allocate the memory; nothing is changed if that fails."""
        options = self.options
        places = self._find_ends(schema)
        ring = RingStore(options.num_slots, num_lanes, schema, self.device, options.num_guards)
        if options.find_ends is not None:
            self.boundaries = Boundaries(ring, options.keeps_segments)
        self._end_places = places
        self.ring = ring
        self.reader.freeze(schema, num_lanes)
        return ring

    def clear(self) -> None:
        """Remove every row; keep the schema and the memory."""
        with self.lock, self.order.writes:
            if self.ring is not None:
                self.ring.clear()
            if self.boundaries is not None:
                self.boundaries.clear()

    def state(self) -> RowState | None:
        """Return the rows and their trajectories; None before the first record. Tensors may share memory."""
        ring = self.ring
        if ring is None:
            return None
        self.order.wait(is_write=False)
        columns = {name: ring.slots_view(name)[: ring.num_live] for name in ring.schema}
        boundaries = self.boundaries
        if boundaries is None:
            return RowState(ring.total, ring.num_lanes, columns, None, 1.0, None, {})
        lanes = torch.arange(ring.num_lanes, device=ring.device)
        # The first rows of the oldest trajectory may be gone, so that its age does not follow from
        # the rows.
        ages = boundaries.age(lanes, torch.full_like(lanes, ring.oldest))
        final_keys = None
        final_columns: dict[str, torch.Tensor] = {}
        if boundaries.finals is not None:
            final_keys, final_columns = boundaries.finals.live()
        share = boundaries.share
        return RowState(
            ring.total, ring.num_lanes, columns, ages.tolist(), share, final_keys, final_columns
        )

    @lasting
    def load(
        self,
        schema: Schema,
        num_lanes: int,
        total: int,
        parts: Iterable[tuple[int, Mapping[str, torch.Tensor]]],
        numbers: Mapping[str, Any],
    ) -> RingStore:
        """Fill an empty store.

        Args:
            schema: Fields of a row.
            num_lanes: Lanes.
            total: Rows per lane that were ever written.
            parts: First slot and `[n, num_lanes, *event]` per field.
            numbers: `oldest_ages` and `accepted_share` of `RowState`. Without, the oldest rows
                begin trajectories.

        Raises:
            SchemaError: A number does not fit.
        """
        num_slots = self.options.num_slots
        with self.order.writes:
            ring = self.ring or self.create(schema, num_lanes)
            for first, columns in parts:
                ring.put_slots(first, columns)
            ring.total = total
            boundaries = self.boundaries
            if boundaries is not None:
                boundaries.share = _accepted_share(numbers)
                oldest_ages = _oldest_ages(numbers, num_lanes, ring.oldest)
                num_live = ring.num_live
                ends = find_ends(
                    [ring.slots_view(name)[:num_live] for name in ring.schema], self._end_places
                )
                if num_live == num_slots:
                    ends = ends.roll(-(total % num_slots), 0)
                ring.total = ring.oldest
                boundaries.next_ages.copy_(oldest_ages)
                boundaries.note(ends)
                ring.total = total
        return ring

    @lasting
    def load_finals(self, keys: torch.Tensor, columns: Mapping[str, torch.Tensor]) -> None:
        """Restore final observations, `final_keys` and `final_columns` of `RowState`, after `load`.

        Raises:
            SchemaError: They are not of rows that ended a trajectory.
        """
        ring = self.ring
        boundaries = self.boundaries
        if ring is None or boundaries is None:
            raise SchemaError(
                "load final rows", "", "a buffer with end_key, and rows", "one without"
            )
        lane, row_id = ring.named(keys.long().to(ring.device))
        is_live = (row_id >= ring.oldest) & (row_id < ring.total)
        if not bool((is_live & boundaries.ended(lane, row_id)).all()):
            raise SchemaError(
                "load final rows", "", "keys of rows that ended a trajectory", "others"
            )
        with self.order.writes:
            boundaries.restore_finals(Schema(ring.schema[name] for name in columns), keys, columns)

    def _find_ends(self, schema: Schema) -> Places:
        find = self.options.find_ends
        return [] if find is None else find(schema)

    def _read_final(self, final: Any, rows: Rows, places: Places) -> Rows:
        """Check final observations."""
        if not places:
            raise UsageError("add final rows", "", "a buffer with end_key", "one without")
        finals = None if self.boundaries is None else self.boundaries.finals
        num_lanes = rows.tensors[0].shape[1]
        reader = self._final_reader
        if finals is None:
            reader = reader.renewed(num_lanes)
            reader.schema = rows.schema if self.reader.schema is None else self.reader.schema
            read = reader.read(final, list(flatten(final)))
        else:
            if reader.schema is not finals.schema:
                reader.freeze(finals.schema, num_lanes)
            read = reader.rows_again(final) or reader.read(final)
        if read is None or read.num_rows != rows.num_rows:
            got = "none" if read is None else str(read.num_rows)
            raise SchemaError(
                "add final rows", "", f"{rows.num_rows} rows, as many as data has", got
            )
        return read

    def _write(self, ring: RingStore, rows: Rows, last_rows: Rows | None) -> None:
        tensors = rows.tensors
        if self.order.is_needed:
            final_tensors = [] if last_rows is None else last_rows.tensors
            on_device = sent_together([*tensors, *final_tensors], self.device)
            tensors = on_device[: len(tensors)]
            if last_rows is not None:
                last_rows = Rows(last_rows.num_rows, on_device[len(tensors) :], last_rows.schema)
        if self.boundaries is not None:
            self.boundaries.note(find_ends(tensors, self._end_places), last_rows)
        ring.write(tensors)


def draw_uniformly(ring: RingStore, num_draws: int, generator: torch.Generator) -> torch.Tensor:
    """Draw places of live rows uniformly with replacement: `[num_draws]` int64, for `RingStore.gather`.

    The generator may be on the CPU although the rows are not.
    """
    places = uniform(ring.num_live * ring.num_lanes, num_draws, generator)
    if not ring.is_on_cpu:
        places = sent(places, ring.device)
    if ring.num_lanes > 1:  # Each lane has slots without live rows behind its live rows.
        lane = torch.div(places, ring.num_live, rounding_mode="floor")
        places = places.add_(lane * (ring.stride - ring.num_live))
    return places


class RowFront:
    """Base of the public classes whose rows are in a `RowStore`."""

    _rows: RowStore
    _lock: threading.RLock
    _order: StreamOrder

    def _use(self, rows: RowStore) -> None:
        self._rows = rows
        self._lock = rows.lock
        self._order = rows.order

    @property
    def generator(self) -> torch.Generator:
        """Draws the samples."""
        return self._rows.generator

    @generator.setter
    def generator(self, generator: torch.Generator) -> None:
        self._rows.generator = generator

    @property
    def rng(self) -> torch.Generator:
        """Another name of `generator`."""
        return self._rows.generator

    @rng.setter
    def rng(self, generator: torch.Generator) -> None:
        self._rows.generator = generator


def _accepted_share(numbers: Mapping[str, Any]) -> float:
    """Return the share of candidates that recent draws accepted."""
    share = float(numbers.get("accepted_share", 1.0))
    if not 0 < share <= 1:
        raise SchemaError("load a state", "", "an accepted_share above 0, at most 1", str(share))
    return max(share, _LEAST_SHARE)


def _oldest_ages(numbers: Mapping[str, Any], num_lanes: int, most: int) -> torch.Tensor:
    """Return the ages of each lane's oldest row; in saves without them it begins its trajectory."""
    listed: Sequence[int] = numbers.get("oldest_ages", [0] * num_lanes)
    ages = torch.tensor(listed, device="cpu")
    if (
        ages.dtype is not torch.int64
        or ages.shape != (num_lanes,)
        or not bool(((ages >= 0) & (ages <= most)).all())
    ):
        expected = f"oldest_ages of {num_lanes} lanes, 0 to {most}"
        raise SchemaError("load a state", "", expected, repr(listed)[:100])
    return ages
