"""`EpisodeReplayBuffer`: the last whole episodes, given whole or in windows.

One rule: the steps of an episode are consecutive rows; an episode goes as a whole when it is one too
many, and a window lies inside one episode. How many steps fit is not fixed: memory doubles when the
live ones need it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..core.arguments import check_count
from ..core.samplers import uniform
from ..core.tree import unflatten
from ..errors import SchemaError, UsageError
from ..saving.store import State
from .buffer import ManagedBuffer
from .item_ids import SLOT, UNIQUE_ID, without_given
from .items import Items, ItemStore
from .naive import draw_places

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
        self.extend(self.as_episodes(data))

    @staticmethod
    def as_episodes(data: Any) -> list[Any]:
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
        episodes = list(data)
        self._add(episodes, len(episodes))

    def sample_windows(self, num_windows: int, length: int) -> dict[str, Any]:
        """Draw windows of consecutive steps of one episode, uniformly over all that there are.

        Returns:
            Nested dict of `[num_windows, length, *event]`, new tensors. Objects are left out.

        Raises:
            ValueError: No episode is so long.
        """
        check_count("sample windows", "num_windows", num_windows, 1)
        check_count("sample windows", "length", length, 1)
        with self._lock:
            self._check_open("sample from")
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
            columns = self._store.columns(rows % self._store.capacity)
        device = self.output_device or self.device
        return unflatten(
            {name: leaf.view(num_windows, length, *leaf.shape[1:]).to(device) for name, leaf in columns.items()}
        )

    def _make_store(self) -> ItemStore:
        return ItemStore(_FIRST_STEPS, self.device)

    def _clear(self) -> None:
        self._store.clear()
        self._episodes.clear()
        self._total = 0

    def _read(self, items: Sequence[Any]) -> list[tuple[Items, bool]]:
        """Check episodes against what is there and against each other."""
        read, first = [], None
        for episode in items:
            is_stack = isinstance(episode, Mapping)
            if not is_stack and (isinstance(episode, (str, bytes)) or not isinstance(episode, Iterable)):
                raise SchemaError("push", repr(self.name), "a list of steps, or a stack", type(episode).__name__)
            store = self._store if first is None else _like(first)
            rows = store.read_batch(without_given(episode)) if is_stack else None
            rows = store.read_items([without_given(step) for step in episode]) if rows is None else rows
            if not rows.num_rows:
                raise UsageError("push", repr(self.name), "an episode of at least one step", "none")
            first = rows if self._store.schema is None and first is None else first
            read.append((rows, is_stack))
        return read

    def _write(self, read: list[tuple[Items, bool]]) -> None:
        for rows, is_stack in read:
            if self.count() == self.replay_buffer_size:
                self._episodes.popleft()
            self._make_room(rows.num_rows)
            self._episodes.append(_Episode(self._store.total, rows.num_rows, is_stack))
            self._store.write(rows)
            self._total += 1

    def _make_room(self, num_rows: int) -> None:
        """Move to a larger store if live steps would be overwritten."""
        first = self._episodes[0].first if self._episodes else self._store.total
        num_needed, capacity = self._store.total - first + num_rows, self._store.capacity
        if num_needed <= capacity:
            return
        while capacity < num_needed:
            capacity *= 2
        schema, arrays = self._store.schema, self._store.arrays
        self._store = self._store.moved(first, capacity)
        self._store.schema, self._store.arrays = schema, arrays
        self._episodes = deque(_Episode(e.first - first, e.length, e.is_stack) for e in self._episodes)

    def _take(
        self, size: int, iteration: int, sample_range: slice | None = None, replace: bool = False
    ) -> list[Any] | None:
        start_s, ages = time.perf_counter(), range(self.count())[sample_range or slice(None)]
        place = draw_places(len(ages), size, replace, self.rng)
        if place is None or not size:
            return None if place is None else []
        found = [self._episode(ages.start + number * ages.step) for number in place.tolist()]
        if self.monitor is not None:
            self.monitor.note_sample(size, time=time.perf_counter() - start_s)
        return found

    def _episode(self, age: int) -> Any:
        """Copy an episode, 0 for the oldest."""
        episode = self._episodes[age]
        number = self._total - self.count() + age
        given = {UNIQUE_ID: f"{self.name}_{number}", SLOT: number % self.replay_buffer_size}
        rows = torch.arange(episode.first, episode.first + episode.length, device=self.device) % self._store.capacity
        if not episode.is_stack:
            return self._store.items(rows, {n: [v] * episode.length for n, v in given.items()}, self.output_device)
        leaves = self._store.columns(rows, contiguous=True)
        device = self.output_device or self.device
        stack = {n: x.cpu().numpy() if n in self._store.arrays else x.to(device) for n, x in leaves.items()}
        return {**unflatten(stack), **given}

    def _get_state(self) -> State:
        first = self._episodes[0].first if self._episodes else self._store.total
        numbers, tensors = self._store_state(self._store.moved(first, max(1, self._store.total - first)))
        numbers["num_episodes"] = self._total
        tensors["episodes"] = torch.tensor(
            [[e.length, e.is_stack] for e in self._episodes], dtype=torch.int64, device=self.device
        ).view(-1, 2)
        return State(self._arguments(), numbers, tensors)

    def _prepare(self, numbers: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Callable[[], None]:
        total, capacity = numbers["total"], max(_FIRST_STEPS, int(numbers["total"]))
        checked = self._checked_store(numbers, tensors, capacity)
        listed, num_episodes = tensors["episodes"].tolist(), numbers["num_episodes"]
        is_whole = sum(length for length, _ in listed) == total and all(length > 0 for length, _ in listed)
        if not is_whole or not len(listed) == min(num_episodes, self.replay_buffer_size):
            raise SchemaError("load a state", "with 'episodes'", f"episodes of {total} steps", str(listed)[:60])
        store = ItemStore(capacity, self.device)
        store.restore(*checked)

        def take_over() -> None:
            self._restore_counts(numbers, tensors)
            ends = np.cumsum([length for length, _ in listed]).tolist()
            places = zip(ends, listed, strict=True)
            self._episodes = deque(_Episode(end - length, length, bool(is_stack)) for end, (length, is_stack) in places)
            self._store, self._total = store, num_episodes

        return take_over


def _like(items: Items) -> ItemStore:
    """Make a store that only takes what fits some items."""
    made = ItemStore(1)
    made.schema, made.arrays = items.schema, items.arrays
    return made
