"""`ManagedBuffer`, the base class of buffers of items, and `NaiveReplayBuffer`, which draws them uniformly.

A call changes nothing before all of its arguments are checked and the rate limiter admits it, under
the buffer's lock. A manager does the same with several buffers at once, by `attempt`.
"""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, TypeVar

import torch

from ..core import arguments
from ..core.random_indices import distinct, generator_on, uniform
from ..errors import ClosedError, UsageError
from ..live.monitors import BufferMonitor
from ..live.rate_limiter import RateLimitedError, RateLimiter
from ..saving.saved_store import State, Store
from .item_store import (
    SLOT,
    UNIQUE_ID,
    ItemStore,
    UnknownNameError,
    as_items,
    read_items,
    several,
    split_unique_id,
)

_Self = TypeVar("_Self", bound="ManagedBuffer")
#: Performs a checked call; cannot fail.
Act = Callable[[], Any]


class Request(NamedTuple):
    """The arguments of `sample` or `sample_tensors`; see `ManagedBuffer.sample`."""

    size: int
    iteration: int = 0
    sample_range: slice | None = None
    replace: bool = False
    are_tensors: bool = False

    @classmethod
    def checked(
        cls, action: str, size: Any, iteration: Any, sample_range: Any = None, replace: Any = False
    ) -> Request:
        """Check the arguments of a call; errors name the `action`. numpy numbers become Python numbers."""
        size = arguments.whole(action, "size", size, 0)
        if not arguments.is_whole(iteration):
            raise UsageError(action, expected="cur_learner_iter as an int", got=repr(iteration))
        if sample_range is not None and not isinstance(sample_range, slice):
            raise UsageError(
                action, expected="sample_range as a slice or None", got=repr(sample_range)
            )
        return cls(size, int(iteration), sample_range, arguments.flag(action, "replace", replace))

    def among(self, num_rows: int) -> range:
        """Return the ages in the requested range of `num_rows` items, 0 for the oldest."""
        return range(num_rows)[self.sample_range or slice(None)]


class ManagedBuffer(Store):
    """Items by row, under one lock.

    Args:
        replay_buffer_size: Items that fit, at least 1.
        name: First part of the ids of items; any non-empty string.
        device: Device of stored tensors.
        output_device: Device of samples; None for `device`.
        generator: Draws the samples: a `torch.Generator` on `device` or a seed. None: seeded from
            `torch.initial_seed()` and the number of objects made since that changed.
        monitor: Records pushes and samples; None for no monitor.
        rate_limiter: Admits pushes and samples, delays them or refuses them; or the arguments of
            one.
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
        action = arguments.creating(self)
        self.replay_buffer_size = arguments.whole(
            action, "replay_buffer_size", replay_buffer_size, 1
        )
        if not isinstance(name, str) or not name:
            raise UsageError(action, expected="a name that is a non-empty str", got=repr(name))
        self.name = name
        self.device = arguments.device(action, "device", device)
        self.output_device = None
        if output_device is not None:
            self.output_device = arguments.device(action, "output_device", output_device)
        self.rng = generator_on(generator, self.device, action)
        self.monitor = monitor
        if monitor is not None:
            arguments.instance(
                action, "monitor", monitor, "as a BufferMonitor or None", BufferMonitor
            )
        self.rate_limiter = (
            RateLimiter(**rate_limiter) if isinstance(rate_limiter, Mapping) else rate_limiter
        )
        if rate_limiter is not None:
            expected = "as a RateLimiter, its arguments or None"
            arguments.instance(action, "rate_limiter", self.rate_limiter, expected, RateLimiter)
        self._lock = threading.RLock()
        self._is_closed = False
        self._store = ItemStore(self.replay_buffer_size, self.device)

    def push(self, data: Any) -> None:
        """Add copies of an item, or of a list of items.

        Raises:
            MissingFieldError, SchemaError, FieldTypeError: A leaf does not fit earlier items. The
                text names the first such leaf; nothing is added.
            RateLimitedError: The rate limiter refuses the push.
            ClosedError: After `close`.
        """
        self._push(self.as_list(data))

    def append(self, data: Any) -> None:
        """Add one item."""
        self._push([data])

    def extend(self, data: Iterable[Any]) -> None:
        """Add several items."""
        self._push(several(data))

    def count(self) -> int:
        """Return the number of items."""
        return self._store.ring.num_live

    def __len__(self) -> int:
        return self.count()

    @property
    def push_count(self) -> int:
        """Items added since creation or the last `clear`."""
        return self._store.ring.total

    def sample_check(
        self,
        size: int,
        cur_learner_iter: int = 0,
        sample_range: slice | None = None,
        replace: bool = False,
    ) -> bool:
        """Return whether `sample` with these arguments would return items now, without waiting; remove stale items."""
        action = arguments.calling(self, "sample_check")
        request = Request.checked(action, size, cur_learner_iter, sample_range, replace)
        with self._lock:
            passes = self.rate_limiter is None or self.rate_limiter.may_sample(request.size)
            return self.prepare_sample(request) is not None and passes and not self._is_closed

    def sample(
        self,
        size: int,
        cur_learner_iter: int = 0,
        sample_range: slice | None = None,
        replace: bool = False,
    ) -> list[Any] | None:
        """Draw items, uniformly unless a subclass states another law.

        Args:
            size: Number of items; 0 returns [].
            cur_learner_iter: Current iteration of the learner, for buffers with staleness.
            sample_range: Draw among these items only, by age: `slice(0, 5)` the five oldest,
                `slice(-5, None)` the five newest; None for all.
            replace: Whether an item may be drawn more than once.

        Returns:
            A list of copies; None if there are fewer than `size` items (with `replace`, none), or
            if the rate limiter refuses.
        """
        request = Request.checked(
            arguments.calling(self, "sample"), size, cur_learner_iter, sample_range, replace
        )
        items: list[Any] | None = self._alone(
            request.size, False, lambda: self.prepare_sample(request)
        )
        return items

    def update(self, info: Mapping[str, Any]) -> int:
        """Update the priorities of sampled items and release their data; changes prioritized buffers only.

        Args:
            info: `replay_unique_id` (a list of ids) with `priority` (as many finite numbers >= 0);
                and `used_id`, the `data_id`s of a sample that is not used any more. Both may be
                missing.

        Returns:
            Number of applied priorities. Removed items are skipped and counted in
            `num_dead_updates`. If an item is named twice, its last priority stays.

        Raises:
            KeyError: An id is of another buffer.
            ValueError: A priority is negative or not finite, or there are more or fewer priorities
                than ids; nothing is changed.
        """
        with self._lock:
            return self.prepare_update(info)()

    def clear(self) -> None:
        """Remove every item; ids count from 0 again."""
        with self._lock:
            self._clear()
            if self.rate_limiter is not None:
                self.rate_limiter.reset()

    def start(self) -> None:
        """Do nothing: no buffer needs a thread. For callers that start every object before they use it."""

    def close(self) -> None:
        """Release all items and waiting threads; later pushes and samples raise `ClosedError`. Idempotent."""
        self._is_closed = True  # before the limiter releases threads, which must see it
        if self.rate_limiter is not None:
            self.rate_limiter.close()
        with self._lock:
            self._clear()
            self._store = ItemStore(self.replay_buffer_size, self.device)

    def __enter__(self: _Self) -> _Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # The steps of a call, for `together` and the manager. Callers of the `prepare_...` methods hold
    # the lock.

    def as_list(self, data: Any) -> list[Any]:
        """Return pushed data, one item or several, as a list."""
        return as_items(data)

    @abstractmethod
    def prepare_push(self, items: Sequence[Any], start_s: float) -> Act:
        """Check items; return a function that adds them. The call began at `start_s` of `time.monotonic()`."""

    @abstractmethod
    def prepare_sample(self, request: Request) -> Act | None:
        """Remove stale items; return a function that draws, or None if there are too few items."""

    def prepare_update(self, info: Mapping[str, Any]) -> Callable[[], int]:
        """Check an update; return a function that applies it and returns the number of updated items."""
        if isinstance(info, Mapping):
            self._rows_of(info.get(UNIQUE_ID))
        return lambda: 0

    def passes(self, num_items: int, is_push: bool, start_s: float) -> bool:
        """Wait, without locks, until the limiter would admit this many items; return False if it refuses them."""
        if self.rate_limiter is None or self.rate_limiter.wait(num_items, is_push, start_s):
            return True
        self._check_open(is_push)
        return False

    # Saving.

    @contextmanager
    def unchanged_on_failure(self) -> Iterator[None]:
        """Restore attributes, random state and the limiter's counts if the block raises."""
        limiter = self.rate_limiter
        counts = None if self.rate_limiter is None else self.rate_limiter.state_dict()
        with super().unchanged_on_failure():
            try:
                yield
            except BaseException:
                if limiter is not None and counts is not None:
                    limiter.load_state_dict(counts)
                raise

    def _arguments(self) -> dict[str, Any]:
        """Return the arguments of an equal buffer, as JSON."""
        limiter = None if self.rate_limiter is None else self.rate_limiter.to_json()
        return {
            "replay_buffer_size": self.replay_buffer_size,
            "name": self.name,
            "rate_limiter": limiter,
        }

    def _get_state(self) -> State:
        limiter = None if self.rate_limiter is None else self.rate_limiter.state_dict()
        numbers, tensors = self._saved_items().state(f"of {self.name!r}")
        return State(self._arguments(), numbers | {"rate_limiter": limiter}, tensors)

    def _saved_items(self) -> ItemStore:
        """Return the store of the items that are saved."""
        return self._store

    def _set_state(self, numbers: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        store = ItemStore(self._store.capacity, self.device)
        self._store = store.restore(numbers, tensors, f"of {self.name!r}")
        if self.rate_limiter is not None and numbers["rate_limiter"] is not None:
            self.rate_limiter.load_state_dict(numbers["rate_limiter"])

    # For subclasses.

    def _clear(self) -> None:
        self._store.clear()

    def _push(self, items: Sequence[Any]) -> None:
        start_s = time.monotonic()
        self._alone(len(items), True, lambda: self.prepare_push(items, start_s))

    def _alone(self, num_items: int, is_push: bool, prepare: Callable[[], Act | None]) -> Any:
        """Return the result of `together` for this buffer only; None if nothing was done."""
        if self.rate_limiter is not None:
            results = together({self: num_items}, is_push, lambda: [prepare()])
            return None if results is None else results[0]
        with self._lock:
            self._check_open(is_push)
            act = prepare()
            return None if act is None else act()

    def _uniformly(
        self, request: Request, num_items: int, items_at: Callable[[torch.Tensor], list[Any]]
    ) -> Act | None:
        """Prepare a uniform draw among `num_items` items; `items_at` copies items by age `[n]`, 0 for the oldest."""
        ages = request.among(num_items)
        if request.size == 0:
            return list
        num_needed = 1 if request.replace else request.size
        if len(ages) < num_needed:
            return None
        draw = uniform if request.replace else distinct

        def take() -> list[Any]:
            start_s = time.monotonic()
            drawn = draw(len(ages), request.size, self.rng)
            items = items_at(ages.start + drawn * ages.step)
            if self.monitor is not None:
                self.monitor.note_sample(request.size, time=time.monotonic() - start_s)
            return items

        return take

    def _note_push(self, num_items: int, start_s: float, **values: Any) -> None:
        if self.monitor is not None:
            self.monitor.note_push(num_items, time=time.monotonic() - start_s, **values)

    def _ids_of(self, ids: torch.Tensor, slots: torch.Tensor) -> dict[str, list[Any]]:
        """Return the leaves of samples that name items, by flat name: ids and slots."""
        prefix = self.name + "_"
        return {UNIQUE_ID: [f"{prefix}{row}" for row in ids.tolist()], SLOT: slots.tolist()}

    def _rows_of(self, unique_ids: Any) -> list[int]:
        """Return the rows of one or several unique ids, [] for None; raise if an id is of another buffer."""
        if unique_ids is None:
            return []
        rows: list[int] = []
        for unique_id in [unique_ids] if isinstance(unique_ids, str) else unique_ids:
            name, row = split_unique_id(unique_id)
            if name != self.name:
                raise UnknownNameError(
                    "update", "a buffer", f"ids of {self.name!r}", repr(unique_id)
                )
            rows.append(row)
        return rows

    def _check_open(self, is_push: bool) -> None:
        if self._is_closed:
            action = "push into" if is_push else "sample from"
            raise ClosedError(
                action, repr(self.name), "an open buffer", "a closed one", "Make a new one"
            )


class NaiveReplayBuffer(ManagedBuffer):
    """The last `replay_buffer_size` items, drawn uniformly.

    Args:
        replay_buffer_size: Items that fit.
        deepcopy: Has no effect: items are always copied in and out. Kept for callers that pass it.
        **options: As for `ManagedBuffer`: `name`, `device`, `output_device`, `generator`,
            `monitor`, `rate_limiter`.

    An item is a nested mapping. Its tensors and arrays are stored in columns. The first item fixes
    the shapes and dtypes of the columns. Other leaves are copied as objects. `sample` returns
    items, or None. Each item has the leaves `replay_unique_id` (`<name>_<row>`) and
    `replay_buffer_idx` (the slot).
    """

    def __init__(self, replay_buffer_size: int, deepcopy: bool = False, **options: Any) -> None:
        arguments.options(self, options)
        super().__init__(replay_buffer_size, **options)

    def prepare_push(self, items: Sequence[Any], start_s: float) -> Act:
        rows = read_items(items, self._store.form)

        def write() -> None:
            self._store.write(rows)
            self._note_push(rows.num_rows, start_s)

        return write

    def prepare_sample(self, request: Request) -> Act | None:
        return self._uniformly(request, self.count(), self._items_at)

    def _items_at(self, ages: torch.Tensor) -> list[Any]:
        ids = self._store.ring.oldest + ages
        slots = self._store.ring.slot(ids)
        return self._store.items(slots, self._ids_of(ids, slots), self.output_device)


def locked(buffers: Iterable[ManagedBuffer]) -> ExitStack:
    """Acquire the locks of some buffers, in the same order in all threads, until the end of a `with`."""
    with ExitStack() as stack:
        for buffer in sorted(buffers, key=id):
            stack.enter_context(buffer._lock)
        return stack.pop_all()


def attempt(
    numbers: Mapping[ManagedBuffer, int], is_push: bool, prepare: Callable[[], list[Act | None]]
) -> tuple[list[Any] | None, ManagedBuffer | None]:
    """Push to or sample from some buffers if the limiters of all of them admit the items now.

    If nothing is done, the counts of the limiters are restored before the locks are released.

    Args:
        numbers: Items of each buffer.
        is_push: Whether the items are pushed or sampled.
        prepare: Checks all arguments, with the locks held. Returns a function for each buffer that
            performs the call, or None for a buffer with too few items.

    Returns:
        The results, or None if nothing was done; and the buffer whose limiter refuses, or None.
    """
    with locked(numbers) as stack:
        undo = stack.enter_context(ExitStack())
        for buffer, number in numbers.items():
            buffer._check_open(is_push)
            limiter = buffer.rate_limiter
            if limiter is None:
                continue
            acquire = limiter.insert if is_push else limiter.sample
            if not acquire(number, waits=False):
                return None, buffer
            if is_push:
                undo.callback(limiter.undo, number, 0)
            else:
                undo.callback(limiter.undo, 0, number)
        acts = prepare()
        if None in acts:
            return None, None
        results = [act() for act in acts if act is not None]
        undo.pop_all()
    return results, None


def together(
    numbers: Mapping[ManagedBuffer, int], is_push: bool, prepare: Callable[[], list[Act | None]]
) -> list[Any] | None:
    """Call `attempt` until all limiters admit the items; return the results.

    None if there are too few items to sample, or if a limiter refuses a sample.

    Raises:
        RateLimitedError: A limiter refuses a push.
        ClosedError: A buffer is closed.
    """
    start_s = time.monotonic()
    while True:
        results, refusing = attempt(numbers, is_push, prepare)
        if refusing is None:
            return results
        if refusing.passes(numbers[refusing], is_push, start_s):
            continue
        if is_push:
            got = f"{numbers[refusing]} more items"
            advice = "Sample first, or raise the tolerance"
            raise RateLimitedError(
                "push into", repr(refusing.name), "draws to keep up", got, advice
            )
        return None
