"""`ManagedBuffer`: what all buffers share: checked pushes, uniform samples, ids, rates, monitors, saved state.

One rule: a call is checked as a whole, and let pass by the rate limiter, before anything is changed; all of that
under the buffer's lock. A manager does the same with several buffers at once, by `try_together`.
"""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

import torch

from ..core import arguments
from ..core.samplers import distinct, generator_on, uniform
from ..errors import ClosedError, UsageError
from ..live.rates import RateLimitedError, RateLimiter
from ..saving.store import State, Store
from .ids import SLOT, UNIQUE_ID, Request, UnknownNameError, as_items, split_unique_id
from .items import ItemStore
from .monitor import BufferMonitor

_Self = TypeVar("_Self", bound="ManagedBuffer")
_Found = TypeVar("_Found")


class ManagedBuffer(Store):
    """Items by row, under one lock, drawn uniformly unless a subclass overrides `has` and `take`.

    Args:
        replay_buffer_size: Items that fit, at least 1.
        name: First part of the ids that items get; any non-empty string.
        device: Where tensors are kept.
        output_device: Where samples are given; None for where they are kept.
        generator: Draws the samples: a `torch.Generator` on `device`, a seed, or None for one of its
            own that is seeded once from torch's.
        monitor: Is told of pushes and samples; None for no monitor.
        rate_limiter: Lets pushes and samples pass, wait, or not; or the arguments of one.
    """

    def __init__(
        self,
        replay_buffer_size: int,
        *,
        name: str = "buffer",
        device: torch.device | str = "cpu",
        output_device: torch.device | str | None = None,
        generator: torch.Generator | int | None = None,
        monitor: BufferMonitor | None = None,
        rate_limiter: RateLimiter | Mapping[str, Any] | None = None,
    ) -> None:
        self.replay_buffer_size = arguments.whole("create a buffer", "replay_buffer_size", replay_buffer_size, 1)
        if not isinstance(name, str) or not name:
            raise UsageError("create a buffer", "", "a name that is a non-empty str", repr(name))
        self.name = name
        self.device = torch.device(device)
        self.output_device = None if output_device is None else torch.device(output_device)
        self.rng = generator_on(generator, self.device)
        self.monitor = monitor
        self.rate_limiter = RateLimiter(**rate_limiter) if isinstance(rate_limiter, Mapping) else rate_limiter
        self._lock = threading.RLock()
        self._is_closed = False
        self._store = ItemStore(self.replay_buffer_size, self.device)

    def push(self, data: Any) -> None:
        """Add an item, or a list of items; copies are kept.

        Raises:
            MissingFieldError, SchemaError, FieldTypeError: Naming the first leaf that does not fit the
                items before; nothing is added.
            RateLimitedError: The rate limiter did not let it pass.
            ClosedError: After `close`.
        """
        self._push(self.as_list(data))

    def append(self, data: Any) -> None:
        """Add one item."""
        self.push([data])

    def extend(self, data: Iterable[Any]) -> None:
        """Add several items."""
        self.push(list(data))

    def count(self) -> int:
        """Items that can be given."""
        return self._store.num_live

    def __len__(self) -> int:
        return self.count()

    @property
    def push_count(self) -> int:
        """Items that were ever added, since creation or `clear`."""
        return self._store.total

    def sample_check(
        self, size: int, cur_learner_iter: int = 0, sample_range: slice | None = None, replace: bool = False
    ) -> bool:
        """Tell whether `sample` with these arguments would give items now, without waiting; stale items are removed."""
        request = Request.checked(size, cur_learner_iter, sample_range, replace)
        with self._lock:
            passes = self.rate_limiter is None or self.rate_limiter.may_sample(request.size)
            return self.has(request) and passes and not self._is_closed

    def sample(
        self, size: int, cur_learner_iter: int = 0, sample_range: slice | None = None, replace: bool = False
    ) -> list[Any] | None:
        """Draw items; uniformly, unless the buffer says otherwise.

        Args:
            size: How many; 0 gives [].
            cur_learner_iter: Where the learner is, for buffers that know staleness.
            sample_range: Only these, counted by age: `slice(0, 5)` the five oldest, `slice(-5, None)` the
                five newest; None for all.
            replace: Whether an item may be drawn more than once.

        Returns:
            A list of copies; None if there are fewer than `size`, or none, or the rate limiter refuses.
        """
        request = Request.checked(size, cur_learner_iter, sample_range, replace)
        try:
            return self._when_admitted(request.size, False, lambda: self.take(request))
        except RateLimitedError:
            return None

    def update(self, info: Mapping[str, Any]) -> int:
        """Take what a learner found; gives the number of items that it was applied to."""
        with self._lock:
            return self.apply_update(self.read_update(info))

    def clear(self) -> None:
        """Forget every item; ids count from 0 again."""
        with self._lock:
            self._clear()
            if self.rate_limiter is not None:
                self.rate_limiter.reset()

    def start(self) -> None:
        """Do nothing: no buffer needs a thread. For callers that start what they use."""

    def close(self) -> None:
        """Release all items and threads that wait; pushing and sampling raise from now on. May be called twice."""
        self._is_closed = True  # first: threads that the limiter releases must see it
        if self.rate_limiter is not None:
            self.rate_limiter.close()
        with self._lock:
            self._clear()
            self._release()

    def __enter__(self: _Self) -> _Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # The steps of a call, for `try_together` and the manager. The lock is held in all but `wait`.

    @property
    def lock(self) -> threading.RLock:
        """Lock of all methods."""
        return self._lock

    def admit(self, num_items: int, is_push: bool) -> bool:
        """Count what the limiter lets pass at once; False if it does not."""
        self._check_open(is_push)
        limiter = self.rate_limiter
        return limiter is None or (limiter.insert if is_push else limiter.sample)(num_items, waits=False)

    def undo(self, num_items: int, is_push: bool) -> None:
        """Take back what `admit` counted."""
        if self.rate_limiter is not None:
            self.rate_limiter.undo(*((num_items, 0) if is_push else (0, num_items)))

    def wait(self, num_items: int, is_push: bool, start_s: float) -> None:
        """Wait until the limiter would let it pass, or raise `RateLimitedError`. No lock is held."""
        if self.rate_limiter is None or self.rate_limiter.wait(num_items, is_push, start_s):
            return
        self._check_open(is_push)
        advice = "Sample first, or raise the tolerance"
        raise RateLimitedError("push into", repr(self.name), "draws to keep up", f"{num_items} more items", advice)

    def as_list(self, data: Any) -> list[Any]:
        """List what was pushed: one item, or several."""
        return as_items(data)

    @abstractmethod
    def read(self, items: Sequence[Any]) -> Any:
        """Check items; give what `write` takes."""

    @abstractmethod
    def write(self, read: Any) -> Any:
        """Add checked items."""

    def note_push(self, num_items: int, read: Any, start_s: float) -> None:
        """Tell the monitor of a push that began at `start_s` of `time.monotonic()`."""
        if self.monitor is not None:
            self.monitor.note_push(num_items, time=time.monotonic() - start_s, **self._push_values(read))

    def has(self, request: Request) -> bool:
        """Tell whether there are enough for `take`."""
        return request.size == 0 or len(request.among(self.count())) >= (1 if request.replace else request.size)

    def take(self, request: Request) -> list[Any] | None:
        """Check and draw; None if there are not enough."""
        if request.size == 0 or not self.has(request):
            return [] if request.size == 0 else None
        start_s, ages = time.monotonic(), request.among(self.count())
        drawn = (uniform if request.replace else distinct)(len(ages), request.size, self.rng)
        found = self._items_at(ages.start + drawn * ages.step)
        if self.monitor is not None:
            self.monitor.note_sample(request.size, time=time.monotonic() - start_s)
        return found

    def read_update(self, info: Mapping[str, Any]) -> Any:
        """Check an update; give what `apply_update` takes."""
        if isinstance(info, Mapping):
            self._rows_of(info.get(UNIQUE_ID))

    def apply_update(self, read: Any) -> int:
        """Take a checked update."""
        return 0

    def built(self, numbers: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Build new contents, attribute by attribute, from a state; raise if it does not fit. Nothing is changed."""
        torch.Generator(self.rng.device).set_state(self._rng_state(tensors))
        if self.rate_limiter is not None and numbers["rate_limiter"] is not None:
            RateLimiter(**self.rate_limiter.to_json()).load_state_dict(numbers["rate_limiter"])
        return self._built(numbers, tensors)

    def adopt(self, built: Mapping[str, Any], numbers: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        """Replace the contents, the limiter's counts and the random state by those of a state; cannot fail."""
        if self.rate_limiter is not None and numbers["rate_limiter"] is not None:
            self.rate_limiter.load_state_dict(numbers["rate_limiter"])
        self.rng.set_state(self._rng_state(tensors))
        vars(self).update(built)

    # For subclasses.

    def _items_at(self, ages: torch.Tensor) -> list[Any]:
        """Copy the items of `[n]` ages, 0 for the oldest."""
        raise NotImplementedError

    def _built(self, numbers: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        return {"_store": self._store_of(self.replay_buffer_size, numbers, tensors)}

    def _push_values(self, read: Any) -> dict[str, Any]:
        """Say what a monitor is told of a push."""
        return {}

    def _clear(self) -> None:
        self._store.clear()

    def _release(self) -> None:
        """Free the memory."""
        self._store = ItemStore(self.replay_buffer_size, self.device)

    def _push(self, items: Sequence[Any]) -> None:
        start_s = time.monotonic()

        def work() -> tuple[Any]:
            read = self.read(items)
            self.write(read)
            return (read,)

        (read,) = self._when_admitted(len(items), True, work) or (None,)
        self.note_push(len(items), read, start_s)

    def _when_admitted(self, number: int, is_push: bool, work: Callable[[], _Found | None]) -> _Found | None:
        """Do `together` with this buffer alone."""
        if self.rate_limiter is not None:
            return together({self: number}, is_push, work)
        with self._lock:
            self._check_open(is_push)
            return work()

    def _check_open(self, is_push: bool) -> None:
        if self._is_closed:
            action = "push into" if is_push else "sample from"
            raise ClosedError(action, repr(self.name), "an open buffer", "a closed one", "Make a new one")

    def _ids_of(self, ids: torch.Tensor, slots: torch.Tensor) -> dict[str, list[Any]]:
        """Name items as samples do."""
        prefix = self.name + "_"
        return {UNIQUE_ID: [f"{prefix}{row}" for row in ids.tolist()], SLOT: slots.tolist()}

    def _rows_of(self, unique_ids: Any) -> list[int]:
        """Give the row ids that are in unique ids (None is none); raise if one is of another buffer."""
        rows: list[int] = []
        for unique_id in [unique_ids] if isinstance(unique_ids, str) else [] if unique_ids is None else unique_ids:
            name, row = split_unique_id(unique_id)
            if name != self.name:
                raise UnknownNameError("update", "a buffer", f"ids of {self.name!r}", repr(unique_id))
            rows.append(row)
        return rows

    def _rng_state(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Give the saved random state, or the own one if it is of a generator on another kind of device."""
        own = self.rng.get_state()
        return tensors["rng"].cpu() if tensors["rng"].shape == own.shape else own

    def _store_of(self, capacity: int, numbers: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> ItemStore:
        return ItemStore.of_state(capacity, self.device, numbers, tensors, f"of {self.name!r}")

    def _arguments(self) -> dict[str, Any]:
        """Give the arguments that make an equal buffer, as JSON."""
        limiter = None if self.rate_limiter is None else self.rate_limiter.to_json()
        return {"replay_buffer_size": self.replay_buffer_size, "name": self.name, "rate_limiter": limiter}

    def _state_with(self, store: ItemStore, *more: Mapping[str, Any]) -> State:
        """Give the state of items, the limiter and the generator, and more numbers and tensors."""
        limiter = None if self.rate_limiter is None else self.rate_limiter.state_dict()
        numbers, tensors = store.state(f"of {self.name!r}")
        more_numbers, more_tensors = more or ({}, {})
        numbers |= {"rate_limiter": limiter, **more_numbers}
        return State(self._arguments(), numbers, {**tensors, **more_tensors})

    def _get_state(self) -> State:
        return self._state_with(self._store)

    def _set_state(self, numbers: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        self.adopt(self.built(numbers, tensors), numbers, tensors)

    def _take_state(self, numbers: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        if isinstance(tensors.get("rng"), torch.Tensor):
            tensors = {**tensors, "rng": self._rng_state(tensors)}
        super()._take_state(numbers, tensors)

    @classmethod
    def _from_arguments(cls, arguments: Mapping[str, Any], device: torch.device) -> Any:
        made: Any = cls
        return made(**arguments, device=device, generator=0)  # the saved random state comes next


def try_together(
    numbers: Mapping[ManagedBuffer, int], is_push: bool, work: Callable[[], _Found | None]
) -> tuple[_Found | None, ManagedBuffer | None]:
    """Do `work` under the locks of some buffers if all of their limiters let so many items of each pass at once.

    What they counted is taken back, before the locks are released, if `work` raises or gives None.

    Args:
        numbers: Items of each buffer; in the same order in every thread.
        is_push: Whether they are pushed or sampled.
        work: What is to be done.

    Returns:
        What `work` gave, and the buffer whose limiter does not let it pass, or None.
    """
    with ExitStack() as locks, ExitStack() as undo:
        for buffer in numbers:
            locks.enter_context(buffer.lock)
        for buffer, number in numbers.items():
            if not buffer.admit(number, is_push):
                return None, buffer
            undo.callback(buffer.undo, number, is_push)
        found = work()
        if found is not None:
            undo.pop_all()
        return found, None


def together(numbers: Mapping[ManagedBuffer, int], is_push: bool, work: Callable[[], _Found | None]) -> _Found | None:
    """Do what `try_together` does, waiting, with no lock held, for limiters that let others wait.

    Raises:
        RateLimitedError: A limiter refuses, or its time is over.
        ClosedError: A buffer is closed.
    """
    start_s = time.monotonic()
    while True:
        found, refusing = try_together(numbers, is_push, work)
        if refusing is None:
            return found
        refusing.wait(numbers[refusing], is_push, start_s)
