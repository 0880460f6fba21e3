"""`EpisodeReplayBuffer`: buffer of the last episodes, sampled as whole episodes or as windows.

The steps of an episode are consecutive rows. The number of steps is not limited: the memory doubles
if it is too small for the live steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch

from ..core import arguments
from ..core.fields import unflatten
from ..core.random_indices import uniform
from ..errors import SchemaError, UsageError
from ..saving.saved_store import State
from .item_store import SAMPLE_LEAVES, SLOT, UNIQUE_ID, Items, ItemStore, read_batch, read_items
from .managed_buffer import Act, ManagedBuffer, Request

#: Capacity of the first store, in steps.
_FIRST_STEPS = 256


class _Episode(NamedTuple):
    """Rows of an episode.

    Attributes:
        first: Id of the first row.
        length: Number of steps.
        is_stack: Whether the episode was pushed as a stack of `[T, *event]` leaves.
    """

    first: int
    length: int
    is_stack: bool


class EpisodeReplayBuffer(ManagedBuffer):
    """Buffer of the last `replay_buffer_size` episodes, with uniform sampling.

    An episode is a list of steps or a stack. A step is an item as for `NaiveReplayBuffer`. A stack
    is a nested mapping of `[T, *event]` tensors and arrays. `sample` returns whole episodes in the
    form in which they were pushed. The steps, or the stack, have the leaves `replay_unique_id` and
    `replay_buffer_idx` of the episode. `push` accepts one episode, or a list of episodes that are
    lists of steps.

    Args:
        replay_buffer_size: Capacity in episodes of any length.
        **options: As for `ManagedBuffer`: `name`, `device`, `output_device`, `generator`,
            `monitor`, `rate_limiter` (which counts episodes).
    """

    def __init__(self, replay_buffer_size: int, **options: Any) -> None:
        arguments.options(self, options)
        super().__init__(replay_buffer_size, **options)
        self._store = self._make_store(_FIRST_STEPS)
        self._episodes: deque[_Episode] = deque()
        #: Number of episodes added since the creation or the last `clear`.
        self._total = 0

    @property
    def episode_len(self) -> list[int]:
        """Number of steps of each live episode, oldest first."""
        with self._lock:
            return [episode.length for episode in self._episodes]

    @property
    def push_count(self) -> int:
        """Number of episodes added since the creation or the last `clear`."""
        return self._total

    def count(self) -> int:
        """Return the number of live episodes."""
        return len(self._episodes)

    def as_list(self, data: Any) -> list[Any]:
        """Convert pushed data, one episode or several episodes, to a list."""
        listed = super().as_list(data)
        is_steps = (
            not isinstance(data, Mapping)
            and listed
            and all(isinstance(step, Mapping) for step in listed)
        )
        return [listed] if is_steps else listed

    def sample_windows(self, num_windows: int, length: int) -> dict[str, Any]:
        """Draw windows of consecutive steps of one episode, uniformly from all windows.

        Returns:
            Nested dict of `[num_windows, length, *event]`, new tensors. Objects are omitted.

        Raises:
            ValueError: Every episode is shorter than `length`.
        """
        num_windows = arguments.whole("num_windows", num_windows, 1)
        length = arguments.whole("length", length, 1)
        with self._lock:
            self._check_open(is_push=False)
            lengths = np.array(self.episode_len, np.int64)
            # Windows are numbered consecutively, first those of the oldest episode.
            num_windows_of = np.maximum(lengths - length + 1, 0)
            ends = num_windows_of.cumsum()
            if not len(ends) or not ends[-1]:
                raise UsageError(
                    f"the longest episode of {self.name!r} has {lengths.max(initial=0)} steps, too "
                    f"few for windows of {length}. Sample shorter windows, or add longer episodes."
                )
            window = uniform(int(ends[-1]), num_windows, self.rng).cpu().numpy()
            episode = ends.searchsorted(window, side="right")
            window_in_episode = window - (ends - num_windows_of)[episode]
            first_rows = np.array([live.first for live in self._episodes], np.int64)
            starts = first_rows[episode] + window_in_episode
            rows = torch.from_numpy(starts[:, None] + np.arange(length)).to(self.device).flatten()
            columns = self._store.columns(self._store.ring.slot(rows), self.output_device)
        return unflatten(
            {
                name: leaf.view(num_windows, length, *leaf.shape[1:])
                for name, leaf in columns.items()
            }
        )

    def prepare_push(self, items: Sequence[Any], start_s: float) -> Act:
        """Check episodes against stored steps and each other, and return a function to add them."""
        read: list[tuple[Items, bool]] = []
        for episode in items:
            form = self._store.form or (read[0][0].form if read else None)
            is_stack = isinstance(episode, Mapping)
            if is_stack:
                rows = read_batch(
                    {name: leaf for name, leaf in episode.items() if name not in SAMPLE_LEAVES},
                    form,
                )
            elif isinstance(episode, Iterable) and not isinstance(episode, (str, bytes)):
                rows = read_items(list(episode), form)
            else:
                raise SchemaError(
                    "an episode must be a list of steps or a mapping of stacked steps, got "
                    f"{type(episode).__name__}."
                )
            if not rows.num_rows:
                raise UsageError("an episode has no steps.")
            read.append((rows, is_stack))

        def write() -> None:
            for rows, is_stack in read:
                self._write(rows, is_stack)
            self._note_push(len(read), start_s)

        return write

    def _write(self, rows: Items, is_stack: bool) -> None:
        """Add an episode. If the store is too small, copy all live steps to a larger store."""
        if self.count() == self.replay_buffer_size:
            self._episodes.popleft()
        first = self._first_live()
        capacity = self._store.capacity
        while capacity < self._store.ring.total - first + rows.num_rows:
            capacity *= 2
        if capacity > self._store.capacity:
            self._store = self._store.moved(first, capacity)
            self._episodes = deque(
                live._replace(first=live.first - first) for live in self._episodes
            )
        self._episodes.append(_Episode(self._store.ring.total, rows.num_rows, is_stack))
        self._store.write(rows)
        self._total += 1

    def _first_live(self) -> int:
        """Return the id of the first step of the oldest live episode."""
        return self._episodes[0].first if self._episodes else self._store.ring.total

    def prepare_sample(self, request: Request) -> Act | None:
        return self._uniformly(
            request, self.count(), lambda ages: [self._episode(age) for age in ages.tolist()]
        )

    def _episode(self, age: int) -> Any:
        """Copy one live episode. Episodes are numbered by `age`: 0 is the oldest episode."""
        first, length, is_stack = self._episodes[age]
        number = self._total - self.count() + age
        ids = {UNIQUE_ID: f"{self.name}_{number}", SLOT: number % self.replay_buffer_size}
        slots = self._store.ring.slot(torch.arange(first, first + length, device=self.device))
        if not is_stack:
            ids_of_steps = {name: [value] * length for name, value in ids.items()}
            return self._store.items(slots, ids_of_steps, self.output_device)
        columns = self._store.columns(slots, self.output_device, contiguous=True)
        leaves = {name: self._store.as_pushed(name, column) for name, column in columns.items()}
        return unflatten(leaves) | ids

    def _clear(self) -> None:
        super()._clear()
        self._episodes.clear()
        self._total = 0

    def _saved_items(self) -> ItemStore:
        first = self._first_live()
        return self._store.moved(first, max(1, self._store.ring.total - first))

    def _get_state(self) -> State:
        state = super()._get_state()
        lengths = [(live.length, live.is_stack) for live in self._episodes]
        episodes = torch.tensor(lengths, dtype=torch.int64, device=self.device)
        tensors = {**state.tensors, "episodes": episodes.view(-1, 2)}
        return State(state.arguments, {**state.numbers, "num_episodes": self._total}, tensors)

    def _set_state(self, numbers: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        total = numbers["total"]
        self._total = numbers["num_episodes"]
        listed = tensors["episodes"].tolist()
        stops = list(accumulate(length for length, _ in listed))
        is_whole = (stops or [0])[-1] == total and all(length > 0 for length, _ in listed)
        if not is_whole or len(listed) != min(self._total, self.replay_buffer_size):
            raise SchemaError(
                f"'episodes' of the state must add up to {total} steps, got {str(listed)[:60]}."
            )
        places = zip(stops, listed, strict=True)
        self._episodes = deque(
            _Episode(stop - length, length, bool(is_stack)) for stop, (length, is_stack) in places
        )
        self._store = self._make_store(max(_FIRST_STEPS, total))
        super()._set_state(numbers, tensors)
