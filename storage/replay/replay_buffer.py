"""`ReplayBuffer`: pairs of a state and its next state, the oldest overwritten first.

One rule: a pair lies side by side in a `RingStore`, so that a sample is one gather; where it lies
is the ring's affair.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ..core import arguments
from ..core.fields import Field, Schema
from ..core.memory import StreamOrder, sent
from ..core.random_indices import generator_on, uniform
from ..core.records import fit
from ..errors import BufferEmptyError, SchemaError
from ..ring.ring_store import RingStore
from ..saving.saved_store import State, Store, checked_count, checked_tensor

_NAMES = ("states", "next_states")


class ReplayBuffer(Store):
    """The last `buffer_size` pairs.

    Args:
        obs_dim: Shape of a state; a number for a vector.
        buffer_size: Pairs that fit.
        device: Where they are kept.
        generator: Draws the samples: a `torch.Generator` or a seed. None: seeded from
            `torch.initial_seed()` and the number of objects made since that changed.

    Attributes:
        states, next_states: `[buffer_size, *obs_dim]` float32 on `device`; rows below `num_samples` are valid.
    """

    def __init__(
        self,
        obs_dim: int | Sequence[int],
        buffer_size: int,
        device: torch.device | str = "cpu",
        *,
        generator: torch.Generator | int | None = None,
    ) -> None:
        action = arguments.creating(self)
        self.buffer_size = arguments.whole(action, "buffer_size", buffer_size, 1)
        sizes = obs_dim if isinstance(obs_dim, Sequence) else (obs_dim,)
        self.obs_dim = tuple(arguments.whole(action, "obs_dim", size, 0) for size in sizes)
        self.device = arguments.device(action, "device", device)
        is_given = isinstance(generator, torch.Generator)  # and may be on the CPU
        self.rng = generator_on(generator, None if is_given else self.device, action)
        schema = Schema(Field(name, self.obs_dim) for name in _NAMES)
        self._ring = RingStore(self.buffer_size, 1, schema, self.device, num_guards=0)
        self.states, self.next_states = (self._ring.slots_view(name)[:, 0] for name in _NAMES)
        self._lock = threading.RLock()
        self._order = StreamOrder(self.device)

    @property
    def step(self) -> int:
        """Slot that is written next."""
        return self._ring.cursor

    @property
    def num_samples(self) -> int:
        """Pairs that are held."""
        return self._ring.num_live

    def __len__(self) -> int:
        return self.num_samples

    @torch.no_grad()
    def insert(self, states: torch.Tensor, next_states: torch.Tensor) -> None:
        """Append pairs `[n, *obs_dim]`; of more than fit the last `buffer_size` are kept.

        Raises:
            SchemaError, FieldTypeError: Shapes differ or are wrong, or a dtype would lose; nothing is written.
        """
        schema = self._ring.schema
        given = [
            fit("call ReplayBuffer.insert", schema[name], x, num_lead=1)
            for name, x in zip(_NAMES, (states, next_states), strict=True)
        ]
        if len(given[0]) != len(given[1]):
            raise SchemaError("call ReplayBuffer.insert", "", f"{len(given[0])} next_states", str(len(given[1])))
        with self._lock:
            self._order.wait(is_write=True)
            self._ring.write([x.unsqueeze(1) for x in given])
            self._order.record(is_write=True)

    def feed_forward_generator(
        self, num_mini_batch: int, mini_batch_size: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield `num_mini_batch` pairs of `[mini_batch_size, *obs_dim]`, uniform with replacement.

        Each is drawn when it is asked for, from what the buffer then holds, into new memory.

        Raises:
            UsageError, BufferEmptyError: At the call, not at the first `next`.
        """
        num_mini_batch = arguments.whole(
            "call ReplayBuffer.feed_forward_generator", "num_mini_batch", num_mini_batch, 0
        )
        mini_batch_size = arguments.whole(
            "call ReplayBuffer.feed_forward_generator", "mini_batch_size", mini_batch_size, 1
        )
        if not self.num_samples:
            raise BufferEmptyError(
                "call ReplayBuffer.feed_forward_generator", "", "states", "an empty buffer", "Call insert() first"
            )
        return (self.sample(mini_batch_size) for _ in range(num_mini_batch))

    @torch.no_grad()
    def sample(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw one of the pairs that `feed_forward_generator` yields; `BufferEmptyError` if nothing was inserted."""
        size = arguments.whole("call ReplayBuffer.sample", "size", size, 1)
        with self._lock:
            if not self.num_samples:
                raise BufferEmptyError(
                    "call ReplayBuffer.sample", "", "states", "an empty buffer", "Call insert() first"
                )
            self._order.wait(is_write=False)
            found = self._ring.gather(sent(uniform(self.num_samples, size, self.rng), self.device))
            self._order.record(is_write=False)
            return found["states"], found["next_states"]

    def _get_state(self) -> State:
        self._order.wait(is_write=False)
        arguments = {"obs_dim": list(self.obs_dim), "buffer_size": self.buffer_size}
        tensors = {name: self._ring.slots_view(name)[: self.num_samples] for name in _NAMES}
        return State(arguments, {"total": self._ring.total}, tensors)

    def _set_state(self, numbers: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        total = checked_count(numbers, "total", 0, 1 << 62)
        shape = [min(total, self.buffer_size), 1, *self.obs_dim]
        self._order.wait(is_write=True)
        self._ring.put_slots(0, {name: checked_tensor(tensors, name, torch.float32, shape) for name in _NAMES})
        self._ring.total = total
        self._order.record(is_write=True)
