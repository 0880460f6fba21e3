"""`EpisodeReplayBuffer`: the last whole episodes, given whole or in windows.

One rule: the steps of an episode are consecutive rows, and episodes are removed whole; a window lies inside one
episode. The number of steps is not limited: memory doubles when the live ones need it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from ..core import arguments
from ..core.samplers import uniform
from ..core.tree import unflatten
from ..errors import SchemaError, UsageError
from ..saving.store import State
from .buffer import ManagedBuffer
from .ids import SLOT, UNIQUE_ID, without_given
from .items import Items, ItemStore

_FIRST_STEPS = 256


@dataclass(frozen=True)
class _Episode:
    """Where an episode lies: id of its first row, number of steps, and whether it came as a stack."""

    first: int
    length: int
    is_stack: bool


class EpisodeReplayBuffer(ManagedBuffer):
    """The last `replay_buffer_size` episodes, each as likely as any other.

    Args:
        replay_buffer_size: Episodes that fit, of any length.
        **options: As for `ManagedBuffer`: `name`, `device`, `output_device`, `generator`, `monitor`,
            `rate_limiter` (which counts episodes).

    An episode is a list of steps, each an item as for `NaiveReplayBuffer`, or a stack: a nested mapping
    of `[T, *event]` tensors and arrays. It comes back in the form in which it was pushed; the steps, or
    the stack, bring the `replay_unique_id` and `replay_buffer_idx` of the episode. `sample` gives whole
    episodes.
    """

    def __init__(self, replay_buffer_size: int, **options: Any) -> None:
        super().__init__(replay_buffer_size, **options)
        self._store = ItemStore(_FIRST_STEPS, self.device)
        self._episodes: deque[_Episode] = deque()
        #: Episodes that were ever added.
        self._total = 0

    @property
    def episode_len(self) -> list[int]:
        """Steps of each episode that is there, oldest first."""
        with self._lock:
            return [episode.length for episode in self._episodes]

    @property
    def push_count(self) -> int:
        """Episodes that were ever added, since creation or `clear`."""
        return self._total

    def count(self) -> int:
        """Episodes that are there."""
        return len(self._episodes)

    def push(self, data: Any) -> None:
        """Add an episode (a list of steps, or a stack), or a list of episodes that are lists of steps.

        Raises:
            MissingFieldError, SchemaError, FieldTypeError: A step does not fit those before; nothing is added.
            UsageError: An episode has no steps.
        """
        self.extend(self.as_list(data))

    def as_list(self, data: Any) -> list[Any]:
        """List what was pushed: one episode, or several."""
        if isinstance(data, (str, bytes)) or not isinstance(data, Iterable):
            raise SchemaError("push", "", "an episode or a list of episodes", type(data).__name__)
        if isinstance(data, Mapping):
            return [data]
        listed = list(data)
        return [listed] if listed and all(isinstance(step, Mapping) for step in listed) else listed

    def append(self, data: Any) -> None:
        """Add one episode."""
        self.extend([data])

    def extend(self, data: Iterable[Any]) -> None:
        """Add several episodes, each a list of steps or a stack."""
        if isinstance(data, (Mapping, str, bytes)) or not isinstance(data, Iterable):
            raise SchemaError("push", repr(self.name), "a list of episodes", type(data).__name__)
        self._push(list(data))

    def sample_windows(self, num_windows: int, length: int) -> dict[str, Any]:
        """Draw windows of consecutive steps of one episode, uniformly over all that there are.

        Returns:
            Nested dict of `[num_windows, length, *event]`, new tensors. Objects are left out.

        Raises:
            ValueError: No episode is so long.
        """
        arguments.whole("sample windows", "num_windows", num_windows, 1)
        arguments.whole("sample windows", "length", length, 1)
        with self._lock:
            self._check_open(is_push=False)
            lengths = np.array([episode.length for episode in self._episodes], np.int64)
            ends = np.maximum(lengths - length + 1, 0).cumsum()
            if not len(ends) or not ends[-1]:
                longest = f"a longest episode of {lengths.max(initial=0)}"
                raise UsageError("sample windows", f"from {self.name!r}", f"an episode of {length} steps", longest)
            number = uniform(int(ends[-1]), num_windows, self.rng).cpu().numpy()
            episode = ends.searchsorted(number, side="right")
            starts = np.array([one.first for one in self._episodes], np.int64)
            first = starts[episode] + number - np.concatenate([[0], ends])[episode]
            rows = torch.from_numpy(first[:, None] + np.arange(length)).to(self.device).flatten()
            columns = self._store.columns(self._store.slots(rows))
        device = self.output_device or self.device
        return unflatten(
            {name: leaf.view(num_windows, length, *leaf.shape[1:]).to(device) for name, leaf in columns.items()}
        )

    def read(self, items: Sequence[Any]) -> list[tuple[Items, bool]]:
        """Check episodes against the steps that are there and against each other; and say which are stacks."""
        read: list[tuple[Items, bool]] = []
        for episode in items:
            is_stack = isinstance(episode, Mapping)
            if not is_stack and (isinstance(episode, (str, bytes)) or not isinstance(episode, Iterable)):
                raise SchemaError("push", repr(self.name), "a list of steps, or a stack", type(episode).__name__)
            store = self._store.like(read[0][0]) if read else self._store
            if is_stack:
                rows = store.read_batch(without_given(episode))
            else:
                rows = store.read_items([without_given(step) for step in episode])
            if not rows.num_rows:
                raise UsageError("push", repr(self.name), "an episode of at least one step", "none")
            read.append((rows, is_stack))
        return read

    def write(self, read: list[tuple[Items, bool]]) -> None:
        for rows, is_stack in read:
            if self.count() == self.replay_buffer_size:
                self._episodes.popleft()
            self._make_room(rows.num_rows)
            self._episodes.append(_Episode(self._store.total, rows.num_rows, is_stack))
            self._store.write(rows)
            self._total += 1

    def _first_live(self) -> int:
        """Give the id of the oldest step of an episode that is there."""
        return self._episodes[0].first if self._episodes else self._store.total

    def _make_room(self, num_rows: int) -> None:
        """Move to a larger store if live steps would be overwritten."""
        first, capacity = self._first_live(), self._store.capacity
        while capacity < self._store.total - first + num_rows:
            capacity *= 2
        if capacity > self._store.capacity:
            self._store = self._store.moved(first, capacity)
            self._episodes = deque(_Episode(e.first - first, e.length, e.is_stack) for e in self._episodes)

    def _items_at(self, ages: torch.Tensor) -> list[Any]:
        return [self._episode(age) for age in ages.tolist()]

    def _episode(self, age: int) -> Any:
        """Copy an episode, 0 for the oldest."""
        episode = self._episodes[age]
        number = self._total - self.count() + age
        given = {UNIQUE_ID: f"{self.name}_{number}", SLOT: number % self.replay_buffer_size}
        rows = torch.arange(episode.first, episode.first + episode.length, device=self.device)
        slots = self._store.slots(rows)
        if not episode.is_stack:
            return self._store.items(slots, {n: [v] * episode.length for n, v in given.items()}, self.output_device)
        leaves = self._store.columns(slots, contiguous=True)
        device = self.output_device or self.device
        stack = {n: x.cpu().numpy() if n in self._store.arrays else x.to(device) for n, x in leaves.items()}
        return {**unflatten(stack), **given}

    def _clear(self) -> None:
        super()._clear()
        self._episodes.clear()
        self._total = 0

    def _release(self) -> None:
        self._store = ItemStore(_FIRST_STEPS, self.device)

    def _get_state(self) -> State:
        first = self._first_live()
        episodes = torch.tensor([[e.length, e.is_stack] for e in self._episodes], dtype=torch.int64, device=self.device)
        store = self._store.moved(first, max(1, self._store.total - first))
        return self._state_with(store, {"num_episodes": self._total}, {"episodes": episodes.view(-1, 2)})

    def _built(self, numbers: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        total, num_episodes, listed = numbers["total"], numbers["num_episodes"], tensors["episodes"].tolist()
        ends = list(accumulate(length for length, _ in listed))
        is_whole = (ends or [0])[-1] == total and all(length > 0 for length, _ in listed)
        if not is_whole or len(listed) != min(num_episodes, self.replay_buffer_size):
            raise SchemaError("load a state", "with 'episodes'", f"episodes of {total} steps", str(listed)[:60])
        places = zip(ends, listed, strict=True)
        episodes = deque(_Episode(end - length, length, bool(is_stack)) for end, (length, is_stack) in places)
        store = self._store_of(max(_FIRST_STEPS, total), numbers, tensors)
        return {"_store": store, "_episodes": episodes, "_total": num_episodes}
