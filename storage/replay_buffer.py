"""`ReplayBuffer`: pairs of a state and its next state, the oldest overwritten first.

One rule: row `i` ever inserted stands in slot `i % buffer_size`; only `insert` turns one into
the other.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from .delivery import Delivery
from .errors import BufferEmptyError, FieldTypeError, SchemaError, UsageError
from .mini_batches import RowGather, make_generator
from .snapshot import Snapshotted, State


class ReplayBuffer(Snapshotted):
    """The last `buffer_size` pairs.

    Args:
        obs_dim: Shape of a state; a number for a vector.
        buffer_size: Pairs that fit.
        device: Where they are kept.
        generator: Draws the samples: a `torch.Generator`, a seed, or None for one of its own.

    Attributes:
        states, next_states: `[buffer_size, *obs_dim]` float32 on `device`; rows below `num_samples` are valid.
        step: Slot that is written next.
        num_samples: Pairs that are held.
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
        self.obs_dim = (obs_dim,) if isinstance(obs_dim, int) else tuple(obs_dim)
        self.buffer_size = buffer_size
        self.device = torch.device(device)
        self.rng = make_generator(generator)
        self.states = torch.zeros(buffer_size, *self.obs_dim, device=self.device)
        self.next_states = torch.zeros(buffer_size, *self.obs_dim, device=self.device)
        self.step = 0
        self.num_samples = 0
        self._lock = threading.RLock()
        self._delivery = Delivery(self.device)

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
            num_rows = len(states)
            skipped = max(0, num_rows - self.buffer_size)
            first = (self.step + skipped) % self.buffer_size
            until_end = min(num_rows - skipped, self.buffer_size - first)
            for kept, x in ((self.states, states), (self.next_states, next_states)):
                kept[first : first + until_end] = x[skipped : skipped + until_end]
                kept[: num_rows - skipped - until_end] = x[skipped + until_end :]
            self.step = (self.step + num_rows) % self.buffer_size
            self.num_samples = min(self.num_samples + num_rows, self.buffer_size)
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
            columns = {"states": self.states, "next_states": self.next_states}
            # Nothing is packed: that would copy the whole buffer for one sample.
            found = RowGather(columns, self._delivery, wide_row_bytes=0).gather(index.to(self.device))
            return found["states"], found["next_states"]

    def _get_state(self) -> State:
        with self._lock:
            arguments = {"obs_dim": list(self.obs_dim), "buffer_size": self.buffer_size}
            numbers = {"step": self.step, "num_samples": self.num_samples}
            held = slice(0, self.num_samples)
            tensors = {"states": self.states[held], "next_states": self.next_states[held]}
            return State(arguments, numbers, {**tensors, "rng": self.rng.get_state()})

    def _set_state(self, numbers: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        with self._lock:
            self.rng.set_state(tensors["rng"])
            self.step, self.num_samples = numbers["step"], numbers["num_samples"]
            for kept, name in ((self.states, "states"), (self.next_states, "next_states")):
                kept[: self.num_samples] = tensors[name]
