"""`RowBuffer`: base class of buffers that keep their rows in a `RowStore` and can be saved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch

from ..core import arguments
from ..core.random_indices import generator_on
from ..core.records import RecordReader
from ..errors import BufferEmptyError, SchemaError
from ..ring.ring_store import RingStore
from ..ring.row_store import RowFront, RowOptions, RowStore
from ..saving.buffer_store import ROW_KEY, BufferStore, rows_written
from ..saving.hdf5_columns import Table
from ..saving.saved_folder import FINALS, ROWS
from ..saving.saved_store import State


class RowBuffer(RowFront, BufferStore):
    """Base class of row buffers: adds, clears and saves rows under one lock.

    Subclasses draw samples. `BufferStore` saves and loads the state.

    Args:
        options: Capacity, end flags, and number of guards (rows that are stored twice).
        reader: Reader that checks records.
        device, generator: As for `DictBuffer`.
    """

    #: Names of the constructor arguments to save. The attributes have the same names.
    _ARGUMENTS: ClassVar[tuple[str, ...]]
    #: Name of the method that adds rows, for errors.
    _WRITER: ClassVar[str] = "extend"
    # Defaults for subclasses without these options.
    num_envs: int = 1
    output_device: torch.device | None = None

    def __init__(
        self,
        options: RowOptions,
        reader: RecordReader,
        device: torch.device | str,
        generator: torch.Generator | int | None = None,
    ) -> None:
        self.device = arguments.device("device", device)
        self._use(RowStore(options, reader, self.device, generator_on(generator, self.device)))

    def __len__(self) -> int:
        """Return the number of live rows."""
        ring = self._rows.ring
        return 0 if ring is None else ring.num_live * self.num_envs

    @property
    def total(self) -> int:
        """Number of rows added since the creation or the last `clear`."""
        ring = self._rows.ring
        return 0 if ring is None else ring.total * self.num_envs

    @property
    def num_bytes(self) -> int:
        """Memory reserved for rows and their trajectories, in bytes."""
        return self._rows.num_bytes

    def extend(self, data: Any, *, final: Any = None) -> None:
        """Append copies of rows. Only the newest `capacity` rows are kept.

        Args:
            data: Nested mapping of leaves `[n, *event]`, any n. The first call fixes keys, shapes
                and dtypes.
            final: Observations after the last steps of trajectories that end in these rows: leaves
                of some fields, with as many rows as `data`. Only the rows at which a trajectory
                ends are used.

        Raises:
            MissingFieldError, SchemaError, FieldTypeError: A leaf does not match the schema. The
                message names the leaf. Nothing is written.
        """
        self._rows.extend(data, final)

    def clear(self) -> None:
        """Remove every row; keep keys, shapes and the memory."""
        self._rows.clear()

    @property
    def _idx(self) -> int:
        ring = self._rows.ring
        return 0 if ring is None else ring.cursor * self.num_envs

    @property
    def _is_full(self) -> bool:
        ring = self._rows.ring
        return ring is not None and ring.num_live == ring.num_slots

    @property
    def _has_lanes_in_file(self) -> bool:
        return self.num_envs > 1

    def _filled(self) -> RingStore:
        """Return the ring. Raises `BufferEmptyError` if the ring has no rows."""
        ring = self._rows.ring
        if ring is None or not ring.total:
            raise BufferEmptyError(f"the buffer is empty. Call {self._WRITER}() first.")
        return ring

    def _arguments(self) -> dict[str, Any]:
        """Return the constructor arguments to save, as JSON values."""
        return {name: getattr(self, name) for name in self._ARGUMENTS}

    @classmethod
    def _of_flat(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        known = {name: config[name] for name in cls._ARGUMENTS if name in config}
        is_earlier_system = "format" not in config and "generator" not in config
        if is_earlier_system and isinstance(known.get("end_key"), list):
            # Earlier systems save a single end_key. If it is nested, JSON has turned its tuple into
            # a list, which would mean several end flags.
            known["end_key"] = tuple(known["end_key"])
        return known

    def _get_state(self) -> State:
        rows = self._rows.state()
        numbers: dict[str, Any] = {"total": 0, "_idx": self._idx, "_is_full": self._is_full}
        numbers |= {"accepted_share": 1.0, "num_lanes": None, "has_finals": False}
        if rows is None:
            return State(self._arguments(), numbers, {})
        numbers |= {
            "total": rows.total,
            "accepted_share": rows.accepted_share,
            "num_lanes": rows.num_lanes,
        }
        if rows.oldest_ages is not None:
            numbers["oldest_ages"] = rows.oldest_ages
        tensors = {}
        for name, column in rows.columns.items():
            tensors[f"{ROWS}/{name}"] = column if self._has_lanes_in_file else column.squeeze(1)
        if rows.final_keys is not None:
            numbers["has_finals"] = True
            if ROW_KEY in rows.final_columns:
                raise SchemaError(
                    f"the field name {ROW_KEY!r} is reserved. Rename the field in final."
                )
            tensors[f"{FINALS}/{ROW_KEY}"] = rows.final_keys.unsqueeze(1)
            tensors |= {f"{FINALS}/{name}": column for name, column in rows.final_columns.items()}
        return State(self._arguments(), numbers, tensors)

    def _set_tables(self, numbers: Mapping[str, Any], tables: Mapping[str, Table]) -> None:
        rows = self._rows.emptied()
        if ROWS in tables and tables[ROWS].shapes:
            self._load_rows(rows, numbers, tables[ROWS])
            if FINALS in tables:
                columns = {name: tables[FINALS].read(name) for name in tables[FINALS].shapes}
                rows.load_finals(columns.pop(ROW_KEY).flatten(), columns)
        self._use(rows)

    def _load_rows(self, rows: RowStore, numbers: Mapping[str, Any], table: Table) -> None:
        num_slots = rows.options.num_slots
        num_lead = 2 if self._has_lanes_in_file else 1
        num_lanes = next(iter(table.shapes.values()))[1] if num_lead == 2 else 1
        if table.num_rows > num_slots:
            raise SchemaError(
                f"the state has {table.num_rows} rows, and the capacity is {num_slots}."
            )
        total = rows_written(numbers, table.num_rows, num_slots, self.num_envs)
        rows.load(table.schema(num_lead), num_lanes, total, lane_parts(table, num_lead), numbers)

    def _of_earlier(self, state: Mapping[str, Any]) -> dict[str, Any]:
        columns = {
            name: x if self._has_lanes_in_file else x.squeeze(1)
            for name, x in state.get("columns", {}).items()
        }
        return super()._of_earlier({**state, "columns": columns})


def lane_parts(table: Table, num_lead: int) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
    """Yield the rows of a saved table in pieces, so that the whole table is never in memory twice.

    Args:
        table: Table of saved rows.
        num_lead: Number of axes before `event` in the table: 2 with an axis of lanes, else 1.

    Yields:
        Pairs (number of the first row of the piece, columns). The columns are `[n, lanes, *event]`
        by field name, where n is the number of rows of the piece.
    """
    for first, part in table.rows():
        yield first, {name: x if num_lead == 2 else x.unsqueeze(1) for name, x in part.items()}
