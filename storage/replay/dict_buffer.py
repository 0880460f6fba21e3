"""`DictBuffer`: ring of nested observations with uniform sampling. `ZBuffer`: ring of vectors."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

import torch

from ..core import arguments
from ..core.fields import DTYPES, Field, Schema, dtype_name, unflatten
from ..core.memory import on_device, sent
from ..core.records import Key, RecordReader, as_tensor, listed, normal
from ..errors import SchemaError, UsageError
from ..ring.ring_store import RingStore
from ..ring.row_store import RowOptions, draw_uniformly
from ..ring.trajectory_ends import end_places
from ..ring.transition_sampler import TransitionRequest, TransitionSampler
from ..saving.buffer_store import KEY_SEPARATOR
from ..saving.hdf5_columns import Table
from .row_buffer import RowBuffer

_PLAIN = TransitionRequest()
#: Name of the only field of a `ZBuffer`.
_NAME = "z"


class DictBuffer(RowBuffer):
    """Ring buffer of the last `capacity` rows of nested records.

    Args:
        capacity: Number of rows.
        device: Device of the rows.
        nested_key_separator: Text that joins the levels of a key in saved files.
        num_envs: Number of environments that add one row each per step. Leaves of `extend` are
            `[steps * num_envs, *event]`, environments fastest. Required only for trajectories.
        end_key: Fields that end a trajectory in a row with any value other than 0: a name, a tuple
            of nested names, or a list of names and tuples. None: rows are independent.
        auto_unsqueeze: Whether a leaf `[n]` becomes `[n, 1]` instead of an error.
        narrow: Whether float64 is stored as float32.
        contiguous: Whether leaves of samples are contiguous. Otherwise leaves are strided views of
            one new tensor per sample, which takes a third less time.
        output_device: Device of samples; None for `device`.
        generator: Random generator of the samples: a `torch.Generator` on `device` or a seed. None:
            seeded from `torch.initial_seed()` and the number of objects created since that seed
            changed.

    Thread-safe: no sample contains a partly written row. CUDA streams are ordered by events.
    """

    _ARGUMENTS: ClassVar[tuple[str, ...]] = (
        "capacity",
        "num_envs",
        "end_key",
        "auto_unsqueeze",
        "narrow",
        "contiguous",
    )
    _last_sampler: TransitionSampler | None = None
    #: The last sample: position in memory of the first row of each window, and number of rows per
    #: window. A sample of single rows has windows of one row.
    _last_drawn: tuple[torch.Tensor, int] | None = None

    def __init__(
        self,
        capacity: int,
        device: torch.device | str = "cpu",
        nested_key_separator: str = KEY_SEPARATOR,
        *,
        num_envs: int = 1,
        end_key: Key | list[Key] | None = None,
        auto_unsqueeze: bool = False,
        narrow: bool = False,
        contiguous: bool = False,
        output_device: torch.device | str | None = None,
        generator: torch.Generator | int | None = None,
    ) -> None:
        self.num_envs = arguments.whole("num_envs", num_envs, 1)
        self.end_key = normal(end_key, "end_key")
        self.auto_unsqueeze = arguments.flag("auto_unsqueeze", auto_unsqueeze)
        self.narrow = arguments.flag("narrow", narrow)
        self.contiguous = arguments.flag("contiguous", contiguous)
        self.output_device = arguments.optional_device("output_device", output_device)
        arguments.instance("nested_key_separator", nested_key_separator, "a str", str)
        self.capacity = arguments.whole("capacity", capacity, 1)
        if self.capacity % self.num_envs:
            raise UsageError(f"capacity must be a multiple of num_envs={num_envs}, got {capacity}.")
        super().__init__(self._row_options(), self._reader(), device, generator)
        self.nested_key_separator = nested_key_separator

    @property
    def storage(self) -> dict[str, Any] | None:
        """Nested dict of all slots, `[capacity, *event]` by field; None before the first `extend`.

        Tensors share memory with the buffer, or are copies if `num_envs > 1`. Do not write to the
        tensors: the buffer would not update its guard rows and its trajectory ends.
        """
        with self._lock:
            ring = self._rows.ring
            if ring is None:
                return None
            self._order.wait(is_write=False)
            return unflatten(
                {name: self._in_public_shape(ring.slots_view(name)) for name in ring.schema}
            )

    @property
    def ind(self) -> Any:
        """Positions in `storage` of the rows of the last sample: `[batch_size]` int64.

        None before the first `sample`. `buffer.storage[key][buffer.ind]` equals the sample until
        its rows are overwritten. If several threads sample, this is the sample of any thread.
        """
        with self._lock:
            ring = self._rows.ring
            if ring is None or self._last_drawn is None:
                return None
            first, num_rows = self._last_drawn
            lane = torch.div(first, ring.stride, rounding_mode="floor")
            steps = torch.arange(num_rows, device=ring.device)
            slots = ((first - lane * ring.stride).unsqueeze(1) + steps) % ring.num_slots
            return self._public_index(slots.flatten(), lane.repeat_interleave(num_rows))

    @property
    def num_short_draws(self) -> int:
        """Number of samples on a GPU in which some rows are repeated.

        Rows are repeated if rejection sampling finds too few valid rows among its random
        candidates; see `window_bounds.py`. The GPU reports this with a delay, so recent samples
        may be missing from the number. Always 0 on the CPU.
        """
        boundaries = self._rows.boundaries
        return 0 if boundaries is None else boundaries.num_short_draws

    @property
    def num_lost_finals(self) -> int:
        """Number of final observations that were dropped because the memory for them was full.

        Reading this property waits for the device. Always 0 on the CPU.
        """
        boundaries = self._rows.boundaries
        return 0 if boundaries is None else int(boundaries.num_lost_finals)

    def sample(self, batch_size: int) -> dict[str, Any]:
        """Draw and copy rows, uniformly with replacement: nested dict of `[batch_size, *event]`.

        Raises:
            UsageError: `batch_size` is below 1.
            BufferEmptyError: The buffer has no rows.
        """
        batch_size = arguments.whole("batch_size", batch_size, 1)
        with self._lock:
            ring = self._filled()
            with self._order.reads:
                places = draw_uniformly(ring, batch_size, self._rows.generator)
                self._last_drawn = places, 1
                batch = ring.gather(places, self.contiguous, nested=True)
            return on_device(batch, self.output_device)

    def sample_transitions(
        self, batch_size: int, request: TransitionRequest | None = None, **options: Any
    ) -> dict[str, Any]:
        """Draw transitions uniformly with replacement from all complete transitions.

        Args:
            batch_size: Number of transitions.
            request: Contents of a transition.
            options: Fields of a `TransitionRequest`, such as `next_keys`, `num_steps`,
                `num_frames` or `at_end`, instead of `request`.

        Returns:
            A nested dict. It has every field of the first row of each transition, `[batch_size,
            *event]`. Below `next` it has the fields of `next_keys` after the last step.
            `discount` and `next_valid` are included if requested.

        Raises:
            UsageError: The buffer was created without `end_key`, or no transition is complete.
        """
        batch_size = arguments.whole("batch_size", batch_size, 1)
        if request is None:
            request = TransitionRequest.of(options) if options else _PLAIN
        elif options:
            raise UsageError(
                f"request and the options {', '.join(options)} exclude each other. "
                "Set these options in the request."
            )
        arguments.instance("request", request, "a TransitionRequest", TransitionRequest)
        with self._lock:
            self._filled()
            sampler = self._last_sampler
            if sampler is None or not sampler.serves(request, self._rows.boundaries):
                sampler = self._last_sampler = self._new_sampler(request)
            with self._order.reads:
                batch = sampler.sample(batch_size, self._rows.generator, self.contiguous)
            return on_device(batch, self.output_device)

    def get_full_buffer(self, order: str = "ring", copy: bool = True) -> dict[str, Any]:
        """Return every row: nested dict of `[len(self), *event]`.

        Args:
            order: "ring" for the order of the slots, "time" for oldest first.
            copy: Whether to copy the rows. Otherwise the tensors share memory with the buffer. With
                order "time", a copy is required once rows have been overwritten.
        """
        arguments.choice("order", order, ("ring", "time"))
        arguments.flag("copy", copy)
        with self._lock:
            ring = self._rows.ring
            if ring is None:
                return {}
            has_turned = order == "time" and ring.oldest % ring.num_slots != 0
            if has_turned and not copy:
                raise UsageError(
                    "order='time' requires copy=True, since new rows have overwritten the oldest."
                )
            columns = {}
            with self._order.reads:
                for name in ring.schema:
                    rows = ring.slots_view(name)[: ring.num_live]
                    if has_turned:
                        rows = torch.cat([rows[ring.cursor :], rows[: ring.cursor]])
                    elif copy:
                        rows = rows.clone(memory_format=torch.contiguous_format)
                    columns[name] = self._in_public_shape(rows)
            return unflatten(columns)

    def _row_options(self) -> RowOptions:
        find_ends = partial(end_places, end_key=self.end_key) if listed(self.end_key) else None
        return RowOptions(self.capacity // self.num_envs, find_ends)

    def _reader(self) -> RecordReader:
        return RecordReader(self.num_envs, False, self.auto_unsqueeze, self.narrow)

    def _new_sampler(self, request: TransitionRequest) -> TransitionSampler:
        boundaries = self._rows.boundaries
        if boundaries is None:
            raise UsageError(
                "the buffer has no end_key, so the ends of trajectories are unknown. "
                "Create it with end_key."
            )
        # The sampler writes its reward weights to the device. Other CUDA streams must wait for that
        # write.
        with self._order.writes:
            return TransitionSampler(boundaries, self._rows.end_names, request)

    def _in_public_shape(self, rows: torch.Tensor) -> torch.Tensor:
        """Reshape rows `[slots, lanes, *event]` to the shape that callers of the buffer get.

        Here this is `[slots * lanes, *event]`. Subclasses may keep the lanes apart.
        """
        return rows.flatten(0, 1)

    def _public_index(self, slots: torch.Tensor, lanes: torch.Tensor) -> Any:
        """Return an index that selects the rows in `slots` of `lanes` from the public shape.

        Both arguments are `[n]` int64.
        """
        return slots * self.num_envs + lanes

    def _set_tables(self, numbers: Mapping[str, Any], tables: Mapping[str, Table]) -> None:
        super()._set_tables(numbers, tables)
        self._last_drawn = None


class ZBuffer(RowBuffer):
    """Ring buffer of the last `capacity` vectors.

    Args:
        capacity: Number of vectors.
        dim: Number of elements of a vector.
        device: Device of the vectors.
        dtype: Dtype of the vectors.
        generator: As for `DictBuffer`.
    """

    _ARGUMENTS = ("capacity", "dim", "dtype")
    _WRITER = "add"

    def __init__(
        self,
        capacity: int,
        dim: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        *,
        generator: torch.Generator | int | None = None,
    ) -> None:
        self.dim = arguments.whole("dim", dim, 1)
        self.dtype = dtype
        self.capacity = arguments.whole("capacity", capacity, 1)
        super().__init__(
            RowOptions(self.capacity), RecordReader(1, False, False, False), device, generator
        )
        self._vectors = self._rows.create(Schema([Field(_NAME, (dim,), dtype_name(dtype))]), 1)

    @torch.no_grad()
    def add(self, z: Any) -> None:
        """Append vectors `[n, dim]`. Only the newest `capacity` vectors are kept."""
        values = (z if isinstance(z, torch.Tensor) else as_tensor(z, "z")).detach()
        if values.dim() != 2 or values.shape[1] != self.dim or values.is_complex():
            raise SchemaError(
                f"z has dtype {values.dtype} and shape {list(values.shape)}, "
                f"expected real numbers [n, {self.dim}]."
            )
        with self._lock, self._order.writes:
            self._vectors.write([values.unsqueeze(1)])

    @torch.no_grad()
    def sample(self, num: int, device: torch.device | str | None = None) -> torch.Tensor:
        """Draw vectors `[num, dim]` uniformly with replacement.

        The result is on `device`, or on the device of the buffer if `device` is None.
        """
        num = arguments.whole("num", num, 1)
        device = arguments.optional_device("device", device)
        with self._lock:
            ring: RingStore = self._filled()
            with self._order.reads:
                places = draw_uniformly(ring, num, self._rows.generator)
                vectors: torch.Tensor = ring.gather(places, contiguous=True)[_NAME]
        return vectors if device is None else sent(vectors, device)

    def _arguments(self) -> dict[str, Any]:
        return {"capacity": self.capacity, "dim": self.dim, "dtype": dtype_name(self.dtype)}

    @classmethod
    def _from_arguments(cls, arguments: Mapping[str, Any], device: torch.device) -> Any:
        return cls(
            **{**arguments, "dtype": DTYPES[arguments["dtype"]][0]}, device=device, generator=0
        )

    def _set_tables(self, numbers: Mapping[str, Any], tables: Mapping[str, Table]) -> None:
        schema = self._vectors.schema
        super()._set_tables(numbers, tables)
        ring = self._rows.ring
        if ring is None or ring.schema != schema:
            saved = "no vectors" if ring is None else repr(ring.schema)
            raise SchemaError(f"the state has {saved}, expected {schema!r}.")
        self._vectors = ring

    def _of_earlier(self, state: Mapping[str, Any]) -> dict[str, Any]:
        return super()._of_earlier({**state, "columns": {_NAME: state[_NAME].unsqueeze(1)}})
