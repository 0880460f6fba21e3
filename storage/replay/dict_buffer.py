"""`DictBuffer`: a ring of nested observations, sampled uniformly; `ZBuffer`: a ring of latent vectors.

One rule: integers decide, one gather moves the bytes; both happen below. What is written and kept
is `RingBuffer`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..core import arguments
from ..core.fields import DTYPES, Field, Schema, dtype_name, unflatten
from ..core.random_indices import uniform
from ..core.records import Key, as_tensor, normal
from ..errors import SchemaError, UsageError
from ..ring.transition_sampler import TransitionRequest, TransitionSampler
from ..saving.hdf5_columns import Table
from .ring_buffer import RingBuffer, on_device

_PLAIN = TransitionRequest()
_NAME = "z"


class DictBuffer(RingBuffer):
    """The last `capacity` rows of nested records.

    Args:
        capacity: Rows that are kept.
        device: Where they are kept.
        nested_key_separator: Joins the levels of a key in saved files.
        num_envs: Rows that arrive per step, one of each environment: `extend` then takes
            `[steps * num_envs, *event]`, environments fastest. Only trajectories ask for it.
        end_key: Fields of which any that is not 0 ends a trajectory; a name, a tuple of nested names,
            or a list of those. Without, rows have nothing to do with each other.
        auto_unsqueeze: Whether a leaf `[n]` becomes `[n, 1]` instead of an error.
        narrow: Whether float64 is kept as float32.
        contiguous: Whether leaves of samples are contiguous; otherwise they are strided views of one
            new tensor per sample, which takes a third less time.
        output_device: Where samples are given; None for `device`.
        generator: Draws the samples: a `torch.Generator` on `device` or a seed. None: seeded from
            `torch.initial_seed()` and the number of objects made since that changed.

    Threads may extend and sample at once: no sample holds a torn row. On CUDA events order the streams.
    """

    _last_sampler: TransitionSampler | None = None
    #: Places in memory of the first rows of the last sample, and the number of rows from each on.
    _last_drawn: tuple[torch.Tensor, int] | None = None

    def __init__(
        self,
        capacity: int,
        device: torch.device | str = "cpu",
        nested_key_separator: str = "-",
        *,
        num_envs: int = 1,
        end_key: Key | list[Key] | None = None,
        auto_unsqueeze: bool = False,
        narrow: bool = False,
        contiguous: bool = False,
        output_device: torch.device | str | None = None,
        generator: torch.Generator | int | None = None,
    ) -> None:
        action = arguments.creating(self)
        self.num_envs = arguments.whole(action, "num_envs", num_envs, 1)
        self.end_key = normal(end_key, "end_key")
        self.auto_unsqueeze = arguments.flag(action, "auto_unsqueeze", auto_unsqueeze)
        self.narrow = arguments.flag(action, "narrow", narrow)
        self.contiguous = arguments.flag(action, "contiguous", contiguous)
        self.output_device = arguments.optional_device(action, "output_device", output_device)
        arguments.instance(action, "nested_key_separator", nested_key_separator, "as a str", str)
        super().__init__(capacity, device, generator)
        self.nested_key_separator = nested_key_separator
        if self.capacity % self.num_envs:
            raise UsageError(action, "", f"a capacity that num_envs={num_envs} divides", str(capacity))

    @property
    def storage(self) -> dict[str, Any] | None:
        """All slots of every field, `[capacity, *event]`, as a nested dict; None before the first `extend`.

        They share memory with the buffer, except with several environments, of which this is a copy. They are for
        reading: rows that are kept twice, and where trajectories end, do not follow what is written there.
        """
        with self._lock:
            ring = self._ring
            if ring is None:
                return None
            return unflatten({name: self._shown(ring.slots_view(name)) for name in ring.schema})

    @property
    def ind(self) -> Any:
        """Indices of the rows of the last `sample`, of any thread: `[batch_size]` int64; None before the first.

        `buffer.storage[key][buffer.ind]` equals that sample until its rows are overwritten.
        """
        with self._lock:
            if self._ring is None or self._last_drawn is None:
                return None
            ring, (first, num_rows) = self._ring, self._last_drawn
            lane = torch.div(first, ring.stride, rounding_mode="floor")
            steps = torch.arange(num_rows, device=ring.device)
            slots = ((first - lane * ring.stride).unsqueeze(1) + steps) % ring.num_slots
            return self._shown_index(slots.flatten(), lane.repeat_interleave(num_rows))

    def sample(self, batch_size: int) -> dict[str, Any]:
        """Draw rows uniformly with replacement: nested dict of `[batch_size, *event]`, the caller's own.

        Raises:
            UsageError: `batch_size` is below 1.
            BufferEmptyError: Nothing was added yet.
        """
        batch_size = arguments.whole(f"sample from a {type(self).__name__}", "batch_size", batch_size, 1)
        with self._lock:
            ring = self._filled("sample")
            self._order.wait(is_write=False)
            index = uniform(ring.num_live * ring.num_lanes, batch_size, self.generator)
            if ring.num_lanes > 1:  # lanes lie behind each other, each with slots that are not drawn
                lane = torch.div(index, ring.num_live, rounding_mode="floor")
                index = index.add_(lane * (ring.stride - ring.num_live))
            self._last_drawn = index, 1
            found = ring.gather(index, self.contiguous, nested=True)
            self._order.record(is_write=False)
            return on_device(found, self.output_device)

    def sample_transitions(
        self, batch_size: int, request: TransitionRequest | None = None, **options: Any
    ) -> dict[str, Any]:
        """Draw transitions uniformly over all that are complete; `next` is the following row.

        Args:
            batch_size: How many.
            request: What of them; instead, `options` are its fields: `next_keys`, `num_steps`,
                `num_frames`, `at_end`, ... (see `TransitionRequest`).

        Returns:
            Every field `[batch_size, *event]` of the first row, `next` with the fields of `next_keys`
            after the last step, and what the request asks for besides.

        Raises:
            UsageError: The buffer was created without `end_key`, or no transition is complete.
        """
        batch_size = arguments.whole(arguments.calling(self, "sample_transitions"), "batch_size", batch_size, 1)
        if request is not None:
            arguments.instance("sample transitions", "request", request, "as a TransitionRequest", TransitionRequest)
        if request is not None and options:
            raise UsageError("sample transitions", "", "a request or options", f"both, {', '.join(options)}")
        with self._lock:
            ring = self._filled("sample transitions")
            if self._boundaries is None:
                advice = "Create the buffer with end_key"
                raise UsageError("sample transitions", "", "fields that end trajectories", "no end_key", advice)
            if request is None:
                request = TransitionRequest.of(options) if options else _PLAIN
            sampler = self._last_sampler
            is_new = False
            if sampler is None or not sampler.serves(request, self._boundaries):
                names = [ring.names[place] for place, _ in self._end_places]
                sampler = self._last_sampler = TransitionSampler(self._boundaries, names, request)
                is_new = True
            self._order.wait(is_write=is_new)  # other streams wait for the factors of a new sampler
            found = sampler.sample(batch_size, self.generator, self.contiguous)
            self._order.record(is_write=is_new)
            return on_device(found, self.output_device)

    def get_full_buffer(self, order: str = "ring", copy: bool = True) -> dict[str, Any]:
        """Return every row: nested dict of `[len(self), *event]`.

        Args:
            order: "ring" as they lie, "time" oldest first.
            copy: Whether the caller owns them; otherwise they share memory with the buffer, where
                that is possible: not in order of time when the ring has closed.
        """
        arguments.choice("get the full buffer", "order", order, ("ring", "time"))
        arguments.flag("get the full buffer", "copy", copy)
        with self._lock:
            ring = self._ring
            if ring is None:
                return {}
            live = ring.num_live
            has_turned = order == "time" and ring.oldest % ring.num_slots != 0
            if has_turned and not copy:
                action = "show the full buffer in order of time"
                raise UsageError(action, "", "copy=True", "copy=False and a closed ring")
            self._order.wait(is_write=False)
            found = {}
            for name in ring.schema:
                rows = ring.slots_view(name)[:live]
                if has_turned:
                    rows = torch.cat([rows[ring.cursor :], rows[: ring.cursor]])
                elif copy:
                    rows = rows.clone(memory_format=torch.contiguous_format)
                found[name] = self._shown(rows)
            self._order.record(is_write=False)
            return unflatten(found)

    def _shown(self, rows: torch.Tensor) -> torch.Tensor:
        """Show `[slots, lanes, *event]` as the user sees it."""
        return rows.flatten(0, 1)

    def _shown_index(self, slots: torch.Tensor, lanes: torch.Tensor) -> Any:
        """Return the index of rows in what `_shown` returns."""
        return slots * self.num_envs + lanes

    def _forget(self) -> None:
        super()._forget()
        self._last_drawn = None


class ZBuffer(RingBuffer):
    """The last `capacity` vectors.

    Args:
        capacity: Vectors that are kept.
        dim: Size of one.
        device: Where they are kept.
        dtype: How they are kept.
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
        self.dim = arguments.whole("create a ZBuffer", "dim", dim, 1)
        self.dtype = dtype
        super().__init__(capacity, device, generator)
        self._vectors = self._create(Schema([Field(_NAME, (dim,), dtype_name(dtype))]), 1)

    @torch.no_grad()
    def add(self, z: Any) -> None:
        """Append `[n, dim]` of any n; of more than fit the newest are kept."""
        values = (z if isinstance(z, torch.Tensor) else as_tensor(z, "call ZBuffer.add", "")).detach()
        if values.dim() != 2 or values.shape[1] != self.dim or values.is_complex():
            raise SchemaError(
                "call ZBuffer.add", "", f"z of shape [n, {self.dim}]", f"{values.dtype} {list(values.shape)}"
            )
        with self._lock:
            self._order.wait(is_write=True)
            self._vectors.write([values.unsqueeze(1)])
            self._order.record(is_write=True)

    @torch.no_grad()
    def sample(self, num: int, device: torch.device | str | None = None) -> torch.Tensor:
        """Draw `[num, dim]` uniformly with replacement, on `device` or the buffer's own."""
        num = arguments.whole("call ZBuffer.sample", "num", num, 1)
        device = arguments.optional_device("call ZBuffer.sample", "device", device)
        with self._lock:
            ring = self._filled("call ZBuffer.sample")
            self._order.wait(is_write=False)
            found: torch.Tensor = ring.gather(uniform(len(self), num, self.generator), contiguous=True)[_NAME]
            self._order.record(is_write=False)
        return found if device is None else found.to(device)

    def _arguments(self) -> dict[str, Any]:
        return {"capacity": self.capacity, "dim": self.dim, "dtype": dtype_name(self.dtype)}

    @classmethod
    def _from_arguments(cls, arguments: Mapping[str, Any], device: torch.device) -> Any:
        return cls(**{**arguments, "dtype": DTYPES[arguments["dtype"]][0]}, device=device, generator=0)

    def _set_tables(self, numbers: Mapping[str, Any], tables: Mapping[str, Table]) -> None:
        schema = self._vectors.schema
        super()._set_tables(numbers, tables)
        if self._ring is None or self._ring.schema != schema:
            got = "none" if self._ring is None else repr(self._ring.schema)
            raise SchemaError("load vectors", expected=repr(schema), got=got)
        self._vectors = self._ring

    def _of_earlier(self, state: Mapping[str, Any]) -> dict[str, Any]:
        return super()._of_earlier({**state, "columns": {_NAME: state[_NAME].unsqueeze(1)}})
