"""`RingBuffer`: what every buffer on a ring shares: checked writes, ends, final rows, saved state.

One rule: this file only says in which order things happen. What fits is decided in `core/records.py`,
where rows lie in `ring/ring.py`, where trajectories end in `ring/windows.py`, what is written to disk in
`buffer_files.py`. Every public method takes the one lock, checks everything, then acts.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, TypeVar

import numpy.typing as npt
import torch

from ..core.fields import Schema
from ..core.host_arrays import as_given
from ..core.modes import lasting
from ..core.records import Key, RecordReader, Rows, declare, is_count, leaves, normal
from ..core.samplers import generator_on
from ..core.stream_order import StreamOrder
from ..core.tree import map_leaves
from ..errors import BufferEmptyError, SchemaError, UsageError
from ..ring.end_flags import Places, array_ends, end_places, row_ends, tensor_ends
from ..ring.final_rows import FinalRows
from ..ring.ring import RingStore
from ..ring.windows import Boundaries
from .buffer_files import FolderBuffer, accepted_share, all_or_nothing, load_ring, oldest_ages, save_ring

_Self = TypeVar("_Self", bound="RingBuffer")
#: Step and lane of rows that end a trajectory, and what was observed after them.
_Ended = tuple[torch.Tensor, torch.Tensor, Schema, dict[str, torch.Tensor]]


class RingBuffer(FolderBuffer):
    """Rows on a ring under one lock: everything but how they are given back.

    Args:
        As for `DictBuffer`.
    """

    _ARGUMENTS: ClassVar[tuple[str, ...]] = (
        "capacity",
        "num_envs",
        "end_key",
        "auto_unsqueeze",
        "narrow",
        "contiguous",
    )
    #: Whether leaves come as `[n, lanes, *event]`.
    _has_lane_axis: bool = False

    def __init__(
        self,
        *,
        capacity: int,
        device: torch.device | str = "cpu",
        nested_key_separator: str = "-",
        num_envs: int = 1,
        end_key: Key | list[Key] | None = None,
        auto_unsqueeze: bool = False,
        narrow: bool = False,
        contiguous: bool = False,
        output_device: torch.device | str | None = None,
        generator: torch.Generator | int | None = None,
    ) -> None:
        for name, value in (("capacity", capacity), ("num_envs", num_envs)):
            if not is_count(value):
                raise UsageError("create a buffer", "", f"{name} >= 1", repr(value))
        if capacity % num_envs:
            raise UsageError("create a buffer", "", f"a capacity that {num_envs} envs divide", str(capacity))
        self.capacity = int(capacity)
        self.device = torch.device(device)
        self.output_device = None if output_device is None else torch.device(output_device)
        self.nested_key_separator = nested_key_separator
        self.num_envs = int(num_envs)
        self.end_key = normal(end_key)
        self.contiguous = bool(contiguous)
        self.auto_unsqueeze, self.narrow = auto_unsqueeze, narrow
        self.generator = generator_on(generator, self.device)
        self._reader = self._new_reader()
        self._ring: RingStore | None = None
        self._boundaries: Boundaries | None = None
        self._finals: FinalRows | None = None
        self._end_places: Places = []
        self._lock = threading.RLock()
        self._order = StreamOrder(self.device)

    # What it holds.

    def __len__(self) -> int:
        """Rows that are held."""
        return 0 if self._ring is None else self._ring.num_live * self._rows_per_slot

    @property
    def total(self) -> int:
        """Rows that were ever added since the creation or `clear`; row ids count to here."""
        return 0 if self._ring is None else self._ring.total * self._rows_per_slot

    @property
    def _idx(self) -> int:
        return 0 if self._ring is None else self._ring.cursor * self._rows_per_slot

    @property
    def _is_full(self) -> bool:
        return self._ring is not None and self._ring.num_live == self._ring.num_slots

    @property
    def num_bytes(self) -> int:
        """Memory that is reserved for rows and all that belongs to them."""
        return sum(x.num_bytes for x in (self._ring, self._boundaries, self._finals) if x is not None)

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
            arrays = self._reader.read_again(data) if final is None else None
            ring = self._ring
            if arrays is not None and ring is not None and ring.takes_arrays and len(arrays[0]) <= ring.num_slots:
                if self._boundaries is not None:
                    self._note(arrays, self._boundaries, ring)
                ring.write_arrays(arrays)
                return
            rows = self._reader.read(data)
            if rows is None:
                return
            end_places = self._end_places if self._ring is not None else self._find_ends(rows.schema)
            last = None if final is None else self._read_final(final, rows, end_places)
            if rows.num_rows == 0:
                return
            if self._ring is None:
                self._create(rows.schema, rows.tensors[0].shape[1])
            self._write(rows, last)

    def clear(self) -> None:
        """Forget every row; keys, shapes and the memory stay."""
        with self._lock:
            for part in (self._ring, self._boundaries, self._finals):
                if part is not None:
                    part.clear()

    # Keeping.

    def state_dict(self) -> dict[str, Any]:
        """Copy everything: rows as they lie, counters, random state; plain containers of tensors."""
        with self._lock:
            state: dict[str, Any] = {"config": self._config(), "generator": self.generator.get_state().clone()}
            if self._ring is not None:
                state.update(self._counters())
                state["columns"] = self._ring.copy_slots(0, self._ring.num_live)
                if self._finals is not None:
                    state["final_keys"], state["final_columns"] = self._finals.live()
            return state

    @lasting
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` of an equal buffer gave; nothing is changed if it does not fit.

        Raises:
            SchemaError: It does not fit.
        """
        with self._lock, all_or_nothing(self):
            mine, its = self._config(), state["config"]
            for key in mine:
                if its.get(key) != mine[key]:
                    raise SchemaError("load a state", "", f"one with {key}={mine[key]!r}", repr(its.get(key)))
            self.generator.set_state(state["generator"].cpu())
            self._ring = self._boundaries = self._finals = None
            self._reader = self._new_reader()
            if "columns" not in state:
                return
            columns = {name: as_given(leaf) for name, leaf in state["columns"].items()}
            num_lanes, total = int(state["num_lanes"]), int(state["total"])
            lead = (min(total, self._num_slots), num_lanes)
            for name, leaf in columns.items():
                if tuple(leaf.shape[:2]) != lead:
                    expected = f"{lead[0]} rows of {lead[1]} lanes"
                    raise SchemaError("load a state", f"with {name!r}", expected, f"shape {list(leaf.shape)}")
            schema = Schema(declare(name, leaf) for name, leaf in columns.items())
            self._restore(schema, num_lanes, total, state, [(0, columns)])
            if "final_keys" in state:
                self._restore_finals(state["final_keys"], state["final_columns"])

    def save(self, folder: str | os.PathLike[str], nested_key_separator: str | None = None) -> None:
        """Write everything to a folder, atomically; one that exists is replaced.

        Args:
            folder: Gets `buffer.hdf5` and `config.json`.
            nested_key_separator: Joins levels of keys, instead of the buffer's own.
        """
        with self._lock:
            save_ring(self, folder, nested_key_separator or self.nested_key_separator)

    @classmethod
    def _of_save(
        cls: type[_Self], path: str | os.PathLike[str], config: dict[str, Any], device: torch.device | str | None
    ) -> _Self:
        return load_ring(cls, path, config, device)

    # Inside.

    @property
    def _rows_per_slot(self) -> int:
        return self.num_envs

    @property
    def _has_lanes_in_file(self) -> bool:
        return self.num_envs > 1

    @property
    def _num_slots(self) -> int:
        return self.capacity // self.num_envs

    def _config(self) -> dict[str, Any]:
        """Give the arguments that make an equal buffer, as JSON; device and separator are added by whoever saves."""
        return {name: getattr(self, name) for name in RingBuffer._ARGUMENTS}

    def _recipe(self) -> dict[str, Any]:
        where = {"device": self.device, "output_device": self.output_device}
        arguments = self._arguments({**self._config(), "format": ""})
        return {**arguments, **where, "nested_key_separator": self.nested_key_separator}

    @classmethod
    def _from_recipe(cls, recipe: Mapping[str, Any]) -> Any:
        return cls(**recipe, generator=0)  # the random state comes next

    @classmethod
    def _arguments(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Pick the arguments that a saved config has; earlier systems have fewer."""
        wanted = [name for kind in cls.__mro__ for name in vars(kind).get("_ARGUMENTS", ())]
        found = {name: config[name] for name in wanted if name in config}
        if "format" not in config and isinstance(found.get("end_key"), list):
            found["end_key"] = tuple(found["end_key"])  # earlier systems have one key, perhaps nested
        return found

    def _new_reader(self) -> RecordReader:
        num_lanes = None if self._has_lane_axis else self.num_envs
        return RecordReader(num_lanes, self._has_lane_axis, self.auto_unsqueeze, self.narrow)

    def _find_ends(self, schema: Schema) -> Places:
        """Find the fields that end trajectories; none if rows have nothing to do with each other."""
        return end_places(schema, self.end_key)

    def _end_names(self) -> list[str]:
        assert self._ring is not None
        names = list(self._ring.schema)
        return [names[place] for place, _ in self._end_places]

    def _make_ring(self, schema: Schema, num_lanes: int) -> tuple[RingStore, Boundaries | None]:
        ring = RingStore(self._num_slots, num_lanes, schema, self.device)
        return ring, Boundaries(ring) if self._find_ends(schema) else None

    def _create(self, schema: Schema, num_lanes: int) -> None:
        """Allocate; nothing is changed if that fails."""
        places = self._find_ends(schema)
        ring, boundaries = self._make_ring(schema, num_lanes)
        self._end_places, self._ring, self._boundaries, self._finals = places, ring, boundaries, None
        self._reader.freeze(schema, num_lanes)

    def _write(self, rows: Rows, final: _Ended | None) -> None:
        ring = self._ring
        assert ring is not None
        self._order.wait(is_write=True)
        ends = tensor_ends(rows.tensors, self._end_places, ring.num_lanes) if self._boundaries is not None else None
        if final is not None and len(final[0]):
            step, lane, schema, leaves = final
            if self._finals is None:
                self._finals = FinalRows(ring, schema)
            self._finals.append(lane, step + ring.total, leaves)
        if self._boundaries is not None and ends is not None:
            self._boundaries.note(ends)
        ring.write(rows.tensors)
        self._order.record(is_write=True)

    def _note(self, arrays: list[npt.NDArray[Any]], boundaries: Boundaries, ring: RingStore) -> None:
        """Note which rows end a trajectory, of those that `read_again` gave and that are about to be written."""
        is_one = ring.num_lanes == 1 and len(arrays[0]) == 1
        is_end = row_ends(arrays, self._end_places) if is_one else None
        if is_end is None:
            boundaries.note_arrays(array_ends(arrays, self._end_places, 1 if ring.num_lanes == 1 else 2))
        else:
            boundaries.note_row(is_end)

    def _read_final(self, final: Any, rows: Rows, places: Places) -> _Ended:
        """Check final observations; give step, lane and leaves of the rows that end a trajectory."""
        if not places:
            raise UsageError("add final rows", "", "a buffer with end_key", "one without")
        reader = RecordReader(rows.tensors[0].shape[1], self._has_lane_axis, self.auto_unsqueeze, self.narrow)
        reader.schema = rows.schema if self._reader.schema is None else self._reader.schema
        names = [name for name, _ in leaves(final)] if self._finals is None else list(self._finals.schema)
        read = reader.read(final, names)
        if read is None or read.num_rows != rows.num_rows:
            got = "none" if read is None else str(read.num_rows)
            raise SchemaError("add final rows", "", f"{rows.num_rows} rows, as many as data has", got)
        step, lane = tensor_ends(rows.tensors, places, rows.tensors[0].shape[1]).nonzero(as_tuple=True)
        ended = {
            name: leaf[step.to(leaf.device), lane.to(leaf.device)]
            for name, leaf in zip(read.schema, read.tensors, strict=True)
        }
        return step.to(self.device), lane.to(self.device), read.schema, ended

    def _filled(self, action: str) -> RingStore:
        if self._ring is None or not self._ring.total:
            raise BufferEmptyError(action, f"from a {type(self).__name__}", "rows", "none", "Call extend() first")
        return self._ring

    def _counters(self) -> dict[str, Any]:
        """Give what the rows themselves do not say, as JSON."""
        ring, boundaries = self._ring, self._boundaries
        found: dict[str, Any] = {
            "total": 0 if ring is None else ring.total,
            "accepted_share": 1.0 if boundaries is None else boundaries.rejection.share,
            "num_lanes": None if ring is None else ring.num_lanes,
        }
        if ring is not None and boundaries is not None:
            lanes = torch.arange(ring.num_lanes, device=ring.device)
            # Where the oldest row stands in its trajectory, whose first rows may be gone; more than a ring is as much.
            ages = boundaries.age(lanes, torch.full_like(lanes, ring.oldest)).clamp(max=ring.num_slots)
            found["oldest_ages"] = ages.tolist()
        return found

    def _restore(
        self,
        schema: Schema,
        num_lanes: int,
        total: int,
        counters: Mapping[str, Any],
        parts: Iterable[tuple[int, Mapping[str, torch.Tensor]]],
    ) -> None:
        """Fill a new ring with rows as they lay, `[slots, lanes, *event]`, and find where trajectories end."""
        self._create(schema, num_lanes)
        ring, boundaries = self._ring, self._boundaries
        assert ring is not None
        for first, part in parts:
            ring.put_slots(first, part)
        ring.total = total
        if boundaries is None:
            return
        live, oldest = ring.num_live, ring.oldest
        boundaries.rejection.share = accepted_share(counters)
        boundaries.next_ages.copy_(oldest_ages(counters, num_lanes, min(oldest, ring.num_slots)))
        columns = [ring.slots_view(name)[:live] for name in ring.schema]
        ends = tensor_ends(columns, self._end_places, num_lanes)
        ring.total = oldest
        boundaries.note(ends.roll(-(oldest % ring.num_slots), 0) if live == ring.num_slots else ends)
        ring.total = total

    def _restore_finals(self, keys: torch.Tensor, columns: Mapping[str, torch.Tensor]) -> None:
        ring, boundaries = self._ring, self._boundaries
        if ring is None or boundaries is None:
            raise SchemaError("load final rows", "", "a buffer with end_key, and rows", "one without")
        self._finals = FinalRows(ring, Schema(ring.schema[name] for name in columns))
        self._finals.restore(keys, columns, boundaries)

    def _given(self, tree: dict[str, Any]) -> dict[str, Any]:
        """Bring a result to the device that results go to."""
        return tree if self.output_device is None else on_device(tree, self.output_device)


def on_device(tree: dict[str, Any], device: torch.device | None) -> dict[str, Any]:
    """Bring a nested dict of tensors to a device; None is wherever they are."""
    return tree if device is None else map_leaves(lambda leaf: leaf.to(device, non_blocking=True), tree)
