"""`ReplayBuffer`: ring buffer of pairs of a state and its next state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ..core import arguments
from ..core.fields import Field, Schema
from ..core.random_indices import generator_on
from ..core.records import RecordReader, fit
from ..errors import BufferEmptyError, SchemaError
from ..ring.row_store import RowFront, RowOptions, RowStore, draw_uniformly
from ..saving.saved_store import State, Store, checked_count, checked_tensor

_NAMES = ("states", "next_states")


class ReplayBuffer(RowFront, Store):
    """Ring buffer of the last `buffer_size` pairs of a state and its next state.

    Args:
        obs_dim: Shape of a state, or the number of elements of a vector.
        buffer_size: Number of pairs.
        device: Device of the pairs.
        generator: Random generator of the samples: a `torch.Generator` or a seed. None: seeded from
            `torch.initial_seed()` and the number of objects created since that seed changed.
    """

    def __init__(
        self,
        obs_dim: int | Sequence[int],
        buffer_size: int,
        device: torch.device | str = "cpu",
        *,
        generator: torch.Generator | int | None = None,
    ) -> None:
        self.buffer_size = arguments.whole("buffer_size", buffer_size, 1)
        sizes = obs_dim if isinstance(obs_dim, Sequence) else (obs_dim,)
        self.obs_dim = tuple(arguments.whole("obs_dim", size, 0) for size in sizes)
        self.device = arguments.device("device", device)
        # A generator of the caller may be on the CPU although the pairs are not.
        is_given = isinstance(generator, torch.Generator)
        generator = generator_on(generator, None if is_given else self.device)
        reader = RecordReader(1, False, False, False)
        self._use(
            RowStore(RowOptions(self.buffer_size, num_guards=0), reader, self.device, generator)
        )
        self._ring = self._rows.create(Schema(Field(name, self.obs_dim) for name in _NAMES), 1)

    @property
    def states(self) -> torch.Tensor:
        """Memory of the states: `[buffer_size, *obs_dim]` float32.

        The first `num_samples` rows contain states. The other rows were never written.
        """
        self._order.wait(is_write=False)
        return self._ring.slots_view("states")[:, 0]

    @property
    def next_states(self) -> torch.Tensor:
        """Memory of the next states: `[buffer_size, *obs_dim]` float32."""
        self._order.wait(is_write=False)
        return self._ring.slots_view("next_states")[:, 0]

    @property
    def step(self) -> int:
        """Slot that the next pair is written to."""
        return self._ring.cursor

    @property
    def num_samples(self) -> int:
        """Number of stored pairs."""
        return self._ring.num_live

    def __len__(self) -> int:
        return self.num_samples

    @torch.no_grad()
    def insert(self, states: torch.Tensor, next_states: torch.Tensor) -> None:
        """Append pairs `[n, *obs_dim]`. Only the last `buffer_size` pairs are kept.

        Raises:
            SchemaError: A shape is wrong, or the numbers of states and next states differ. Nothing
                is written.
            FieldTypeError: A dtype cannot be converted to float32 without loss. Nothing is written.
        """
        schema = self._ring.schema
        first = fit(schema["states"], states, num_lead=1)
        following = fit(schema["next_states"], next_states, num_lead=1)
        if len(first) != len(following):
            raise SchemaError(
                f"next_states has {len(following)} rows, and states has {len(first)}."
            )
        with self._lock, self._order.writes:
            self._ring.write([first.unsqueeze(1), following.unsqueeze(1)])

    def feed_forward_generator(
        self, num_mini_batch: int, mini_batch_size: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield `num_mini_batch` mini-batches, drawn uniformly with replacement.

        A mini-batch is a tuple of states and next states, `[mini_batch_size, *obs_dim]` each. It is
        drawn and copied by the call of `next`, from the pairs that are stored at that moment.

        Raises:
            UsageError: An argument is out of range. Raised by this call, not by the first `next`.
            BufferEmptyError: There are no pairs. Raised by this call, not by the first `next`.
        """
        num_mini_batch = arguments.whole("num_mini_batch", num_mini_batch, 0)
        mini_batch_size = arguments.whole("mini_batch_size", mini_batch_size, 1)
        self._check_filled()
        return (self.sample(mini_batch_size) for _ in range(num_mini_batch))

    @torch.no_grad()
    def sample(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw `size` pairs uniformly with replacement: states and next states `[size, *obs_dim]`.

        Raises:
            BufferEmptyError: There are no pairs.
        """
        size = arguments.whole("size", size, 1)
        with self._lock:
            self._check_filled()
            with self._order.reads:
                pairs = self._ring.gather(draw_uniformly(self._ring, size, self._rows.generator))
            return pairs["states"], pairs["next_states"]

    def _check_filled(self) -> None:
        if not self._ring.total:
            raise BufferEmptyError("the buffer is empty. Call insert() first.")

    def _get_state(self) -> State:
        rows = self._rows.state()
        assert rows is not None
        arguments = {"obs_dim": list(self.obs_dim), "buffer_size": self.buffer_size}
        return State(arguments, {"total": rows.total}, rows.columns)

    def _set_state(self, numbers: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        total = checked_count(numbers, "total", 0, 1 << 62)
        shape = [min(total, self.buffer_size), 1, *self.obs_dim]
        columns = {name: checked_tensor(tensors, name, torch.float32, shape) for name in _NAMES}
        # Load into the existing memory, because callers may keep views of it.
        self._rows.load(self._ring.schema, 1, total, [(0, columns)], {})
