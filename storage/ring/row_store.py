"""`RowStore`: rows of one schema, shared by threads and CUDA streams. `RowFront`: base of buffers.

A `RowStore` does not sample. `draw_uniformly` of this file draws single rows, `window_sampler.py`
windows and `transition_sampler.py` transitions. `storage/prioritized/` draws by priority.
Public buffers derive from `RowFront`, check their arguments and name the results.
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

#: Lower limit for the share of accepted candidates (of rejection sampling) in a loaded state. With
#: a smaller share the first draw would test very many candidates.
_LEAST_SHARE = 1e-3


@dataclass(frozen=True)
class RowOptions:
    """Options of a `RowStore`.

    Attributes:
        num_slots: Capacity in rows per lane.
        find_ends: Function that returns the end flags in a schema, as `end_places` does; None if
            rows are independent.
        num_guards: Number of rows that are stored twice; see `RingStore`.
        keeps_segments: Whether `Boundaries` keeps a list of the ended trajectories. Draws by
            trajectory require the list.
    """

    num_slots: int
    find_ends: Callable[[Schema], Places] | None = None
    num_guards: int = 1
    keeps_segments: bool = False


@dataclass(frozen=True)
class RowState:
    """State of a `RowStore` to save: live rows, ages of the oldest rows, final observations.

    Attributes:
        total: Number of rows per lane that were ever written.
        num_lanes: Number of lanes (streams that are written in lock-step).
        columns: Live rows `[num_live, num_lanes, *event]` by field name, in the order of the slots;
            views.
        oldest_ages: Age of each lane's oldest row, in rows since the start of its trajectory; None
            if rows are independent.
        accepted_share: Share of candidates that the rejection sampling of recent draws accepted;
            see `window_bounds.py`.
        final_keys: `[num]` int64, keys of the rows with a final observation; None if the buffer
            stores no final observations.
        final_columns: Final observations `[num, *event]` by field name.
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
        options: Capacity, end flags of trajectories and guards.
        reader: Reader that checks records; without a schema.
        device: Device of the rows.
        generator: Random generator of the samples.

    Attributes:
        ring: Memory of the rows; None before the first record.
        boundaries: Ends of trajectories; None before the first record or if rows are independent.
        reader: Reader that checks records.
        lock: Lock that callers hold during every method except `extend` and `clear`.
        order: Order of reads and writes among CUDA streams.
        generator: Random generator of the samples.
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
        """Return a new store with the same options, without rows and without a schema.

        The new store shares the lock, the generator and the order of CUDA streams.
        """
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
        """Number of live rows, summed over all lanes."""
        return 0 if self.ring is None else self.ring.num_live * self.ring.num_lanes

    @property
    def num_bytes(self) -> int:
        """Reserved memory, in bytes."""
        return sum(part.num_bytes for part in (self.ring, self.boundaries) if part is not None)

    @property
    def end_names(self) -> list[str]:
        """Names of the end flags: fields that are not 0 in the last row of a trajectory."""
        return (
            [] if self.ring is None else [self.ring.names[place] for place, _ in self._end_places]
        )

    def extend(self, data: Any, final: Any = None) -> None:
        """Check records and append them. Only the newest `num_slots` rows per lane are kept.

        Args:
            data: Nested mapping of leaves, shaped as the reader expects. The first record fixes
                the schema.
            final: Observations after the last rows of trajectories, with as many rows as `data`.
                Only the rows at which a trajectory ends are used.

        Raises:
            MissingFieldError, SchemaError, FieldTypeError: A leaf does not match the schema.
                Nothing is written.
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
        """Fix the schema and allocate the ring. If an error is raised, the store is unchanged."""
        options = self.options
        places = self._find_ends(schema)
        ring = RingStore(options.num_slots, num_lanes, schema, self.device, options.num_guards)
        if options.find_ends is not None:
            self.boundaries = Boundaries(ring, options.keeps_segments, self.order.deferred)
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
        """Return the state to save, or None before the first record.

        Tensors of the state may share memory with the store.
        """
        ring = self.ring
        if ring is None:
            return None
        columns = {name: ring.slots_view(name)[: ring.num_live] for name in ring.schema}
        boundaries = self.boundaries
        if boundaries is None:
            return RowState(ring.total, ring.num_lanes, columns, None, 1.0, None, {})
        lanes = torch.arange(ring.num_lanes, device=ring.device)
        # Save the ages of the oldest rows: the first rows of their trajectories may be overwritten,
        # so the live rows do not determine the ages.
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
        """Load rows into an empty store and return its ring.

        Args:
            schema: Fields of a row.
            num_lanes: Number of lanes.
            total: Number of rows per lane that were ever written.
            parts: Pairs of a first slot and the rows from this slot on, `[n, num_lanes, *event]`
                by field name.
            numbers: `oldest_ages` and `accepted_share` of `RowState`. Without `oldest_ages`, the
                oldest rows begin trajectories.

        Raises:
            SchemaError: `oldest_ages` or `accepted_share` is out of range.
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
        """Restore saved final observations. Call `load` first.

        Args:
            keys: `final_keys` of `RowState`.
            columns: `final_columns` of `RowState`.

        Raises:
            SchemaError: A key is not the key of a live row that ended a trajectory.
        """
        ring = self.ring
        boundaries = self.boundaries
        if ring is None or boundaries is None:
            raise SchemaError(
                "the state has final observations, and this buffer has no end_key or no rows. "
                "Load it into a buffer with the end_key of the saved buffer."
            )
        lane, row_id = ring.named(keys.long().to(ring.device))
        is_live = (row_id >= ring.oldest) & (row_id < ring.total)
        if not bool((is_live & boundaries.ended(lane, row_id)).all()):
            raise SchemaError(
                "the state is damaged: it has final observations of rows that do not end a trajectory."
            )
        with self.order.writes:
            boundaries.restore_finals(Schema(ring.schema[name] for name in columns), keys, columns)

    def _find_ends(self, schema: Schema) -> Places:
        find = self.options.find_ends
        return [] if find is None else find(schema)

    def _read_final(self, final: Any, rows: Rows, places: Places) -> Rows:
        """Check final observations and return them as rows."""
        if not places:
            raise UsageError(
                "final requires a buffer with end_key. Create the buffer with end_key."
            )
        finals = None if self.boundaries is None else self.boundaries.finals
        num_lanes = rows.tensors[0].shape[1]
        reader = self._final_reader
        if finals is None:
            reader = reader.renewed(num_lanes)
            reader.schema = rows.schema if self.reader.schema is None else self.reader.schema
            read = reader.read(final, list(flatten(final)), "final")
        else:
            if reader.schema is not finals.schema:
                reader.freeze(finals.schema, num_lanes)
            read = reader.rows_again(final) or reader.read(final, argument="final")
        if read is None or read.num_rows != rows.num_rows:
            num_finals = 0 if read is None else read.num_rows
            raise SchemaError(f"final has {num_finals} rows, and data has {rows.num_rows}.")
        return read

    def _write(self, ring: RingStore, rows: Rows, last_rows: Rows | None) -> None:
        tensors = rows.tensors
        if not ring.is_on_cpu:
            final_tensors = [] if last_rows is None else last_rows.tensors
            on_device = sent_together([*tensors, *final_tensors], self.device)
            tensors = on_device[: len(tensors)]
            if last_rows is not None:
                last_rows = Rows(last_rows.num_rows, on_device[len(tensors) :], last_rows.schema)
        if self.boundaries is not None:
            self.boundaries.note(find_ends(tensors, self._end_places), last_rows)
        ring.write(tensors)


def draw_uniformly(ring: RingStore, num_draws: int, generator: torch.Generator) -> torch.Tensor:
    """Draw live rows uniformly with replacement. Return their positions, `[num_draws]` int64.

    `RingStore.gather` copies the rows at these positions. The generator may be on the CPU although
    the rows are on another device.
    """
    places = uniform(ring.num_live * ring.num_lanes, num_draws, generator)
    if not ring.is_on_cpu:
        places = sent(places, ring.device)
    if ring.num_lanes > 1:  # Each lane has unused positions in memory behind its live rows.
        lane = torch.div(places, ring.num_live, rounding_mode="floor")
        places = places.add_(lane * (ring.stride - ring.num_live))
    return places


class RowFront:
    """Base of the public classes that keep their rows in a `RowStore`."""

    _rows: RowStore
    _lock: threading.RLock
    _order: StreamOrder

    def _use(self, rows: RowStore) -> None:
        self._rows = rows
        self._lock = rows.lock
        self._order = rows.order

    @property
    def generator(self) -> torch.Generator:
        """Random generator of the samples."""
        return self._rows.generator

    @generator.setter
    def generator(self, generator: torch.Generator) -> None:
        self._rows.generator = generator

    @property
    def rng(self) -> torch.Generator:
        """Alias of `generator`."""
        return self._rows.generator

    @rng.setter
    def rng(self, generator: torch.Generator) -> None:
        self._rows.generator = generator


def _accepted_share(numbers: Mapping[str, Any]) -> float:
    """Read the share of candidates that rejection sampling accepted from a saved state.

    The result is at least `_LEAST_SHARE`, and 1 for a state without a share.
    """
    share = float(numbers.get("accepted_share", 1.0))
    if not 0 < share <= 1:
        raise SchemaError(
            f"accepted_share of the state must be above 0 and at most 1, got {share}."
        )
    return max(share, _LEAST_SHARE)


def _oldest_ages(numbers: Mapping[str, Any], num_lanes: int, most: int) -> torch.Tensor:
    """Read from a saved state how many rows precede each lane's oldest row in its trajectory.

    The result is `[num_lanes]` int64, 0 for a state without these ages.
    """
    listed: Sequence[int] = numbers.get("oldest_ages", [0] * num_lanes)
    ages = torch.tensor(listed, device="cpu")
    if (
        ages.dtype is not torch.int64
        or ages.shape != (num_lanes,)
        or not bool(((ages >= 0) & (ages <= most)).all())
    ):
        raise SchemaError(
            f"oldest_ages of the state must be {num_lanes} integers in 0:{most + 1}, got "
            f"{repr(listed)[:100]}."
        )
    return ages
