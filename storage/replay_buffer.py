"""`ReplayBuffer`: pairs of a state and its next state, the oldest overwritten first.

One rule: a pair lies side by side in a `RingStore`, so that a sample is one gather; where it lies
is the ring's affair.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from .delivery import Delivery
from .errors import BufferEmptyError, FieldTypeError, SchemaError, UsageError
from .fields import Field, Schema
from .mini_batches import make_generator
from .ring import RingStore
from .snapshot import Snapshotted, State

_NAMES = ("states", "next_states")


class ReplayBuffer(Snapshotted):
    """The last `buffer_size` pairs.

    Args:
        obs_dim: Shape of a state; a number for a vector.
        buffer_size: Pairs that fit.
        device: Where they are kept.
        generator: Draws the samples: a `torch.Generator`, a seed, or None for one of its own.

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
        if not isinstance(buffer_size, int) or buffer_size < 1:
            raise UsageError("create a replay buffer", "", "buffer_size >= 1", repr(buffer_size))
        self.obs_dim = (obs_dim,) if isinstance(obs_dim, int) else tuple(map(int, obs_dim))
        self.buffer_size = int(buffer_size)
        self.device = torch.device(device)
        self.rng = make_generator(generator)
        schema = Schema(Field(name, self.obs_dim) for name in _NAMES)
        self._ring = RingStore(buffer_size, 1, schema, self.device, num_guards=0)
        self.states, self.next_states = (self._ring.slots_view(name)[:, 0] for name in _NAMES)
        self._lock = threading.RLock()
        self._delivery = Delivery(self.device)

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
        for name, x in (("states", states), ("next_states", next_states)):
            if x.shape != (len(states), *self.obs_dim) or x.is_meta:
                expected = f"{name} of shape [{len(states)}, {', '.join(map(str, self.obs_dim))}]"
                raise SchemaError("insert states", "", expected, str(list(x.shape)))
            if not torch.can_cast(x.dtype, torch.float32):
                raise FieldTypeError("insert states", "", f"{name} that fit into float32", str(x.dtype), "Convert them")
        with self._lock:
            self._ring.write([x.detach().to(torch.float32).unsqueeze(1) for x in (states, next_states)])
            self._delivery.note_write()

    def feed_forward_generator(
        self, num_mini_batch: int, mini_batch_size: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield `num_mini_batch` pairs of `[mini_batch_size, *obs_dim]`, uniform with replacement.

        Each is drawn when it is asked for, from what the buffer then holds, into new memory.

        Raises:
            UsageError, BufferEmptyError: At the call, not at the first `next`.
        """
        for name, value, least in (("num_mini_batch", num_mini_batch, 0), ("mini_batch_size", mini_batch_size, 1)):
            if not isinstance(value, int) or value < least:
                raise UsageError("generate mini-batches", "", f"{name} >= {least}", repr(value))
        if not self.num_samples:
            raise BufferEmptyError("generate mini-batches", "", "states", "an empty buffer", "Call insert() first")
        return (self._draw(mini_batch_size) for _ in range(num_mini_batch))

    @torch.no_grad()
    def _draw(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        with self._lock:
            self._delivery.wait_for_writes()
            index = torch.randint(self.num_samples, (size,), generator=self.rng, device=self.rng.device)
            found = self._ring.gather(index.to(self.device))
            return found["states"], found["next_states"]

    @classmethod
    def _from_arguments(cls, arguments: Mapping[str, Any], device: torch.device) -> Any:
        return cls(**arguments, device=device, generator=0)  # the saved random state comes next

    def _get_state(self) -> State:
        with self._lock:
            arguments = {"obs_dim": list(self.obs_dim), "buffer_size": self.buffer_size}
            tensors = self._ring.copy_slots(0, self.num_samples)
            return State(arguments, {"total": self._ring.total}, {**tensors, "rng": self.rng.get_state()})

    def _set_state(self, numbers: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        with self._lock:
            self.rng.set_state(tensors["rng"])
            self._ring.put_slots(0, {name: tensors[name] for name in _NAMES})
            self._ring.total = int(numbers["total"])
