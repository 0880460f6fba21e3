"""`ManagedBuffer`, what all buffers of items share, and `NaiveReplayBuffer`, which draws them uniformly.

One rule: a call is checked as a whole, and let pass by the rate limiter, before anything is changed; all of that
under the buffer's lock. A manager does the same with several buffers at once, by `attempt`.
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
from .item_store import SLOT, UNIQUE_ID, ItemStore, UnknownNameError, as_items, read_items, several, split_unique_id

_Self = TypeVar("_Self", bound="ManagedBuffer")
#: Does what was checked, and cannot fail.
Act = Callable[[], Any]


class Request(NamedTuple):
    """What `sample`, or `sample_tensors`, is asked for; see `ManagedBuffer.sample`."""

    size: int
    iteration: int = 0
    sample_range: slice | None = None
    replace: bool = False
    are_tensors: bool = False

    @classmethod
    def checked(cls, action: str, size: Any, iteration: Any, sample_range: Any = None, replace: Any = False) -> Request:
        """Check the arguments of a call, named by `action` in errors; numbers of numpy become Python's."""
        size = arguments.whole(action, "size", size, 0)
        if not arguments.is_whole(iteration):
            raise UsageError(action, expected="cur_learner_iter as an int", got=repr(iteration))
        if sample_range is not None and not isinstance(sample_range, slice):
            raise UsageError(action, expected="sample_range as a slice or None", got=repr(sample_range))
        return cls(size, int(iteration), sample_range, arguments.flag(action, "replace", replace))

    def among(self, num_rows: int) -> range:
        """Return the ages in the range asked for, of `num_rows` items, 0 for the oldest."""
        return range(num_rows)[self.sample_range or slice(None)]


class ManagedBuffer(Store):
    """Items by row, under one lock.

    Args:
        replay_buffer_size: Items that fit, at least 1.
        name: First part of the ids that items get; any non-empty string.
        device: Where tensors are kept.
        output_device: Where samples are given; None for where they are kept.
        generator: Draws the samples: a `torch.Generator` on `device` or a seed. None: seeded from
            `torch.initial_seed()` and the number of objects made since that changed.
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
        action = arguments.creating(self)
        self.replay_buffer_size = arguments.whole(action, "replay_buffer_size", replay_buffer_size, 1)
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
            arguments.instance(action, "monitor", monitor, "as a BufferMonitor or None", BufferMonitor)
        self.rate_limiter = RateLimiter(**rate_limiter) if isinstance(rate_limiter, Mapping) else rate_limiter
        if rate_limiter is not None:
            expected = "as a RateLimiter, its arguments or None"
            arguments.instance(action, "rate_limiter", self.rate_limiter, expected, RateLimiter)
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
        self._push([data])

    def extend(self, data: Iterable[Any]) -> None:
        """Add several items."""
        self._push(several(data))

    def count(self) -> int:
        """Items that can be given."""
        return self._store.ring.num_live

    def __len__(self) -> int:
        return self.count()

    @property
    def push_count(self) -> int:
        """Items that were ever added, since creation or `clear`."""
        return self._store.ring.total

    def sample_check(
        self, size: int, cur_learner_iter: int = 0, sample_range: slice | None = None, replace: bool = False
    ) -> bool:
        """Return whether `sample` with these arguments has items now, without waiting; removes stale items."""
        request = Request.checked(
            arguments.calling(self, "sample_check"), size, cur_learner_iter, sample_range, replace
        )
        with self._lock:
            passes = self.rate_limiter is None or self.rate_limiter.may_sample(request.size)
            return self.prepare_sample(request) is not None and passes and not self._is_closed

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
        request = Request.checked(arguments.calling(self, "sample"), size, cur_learner_iter, sample_range, replace)
        found: list[Any] | None = self._alone(request.size, False, lambda: self.prepare_sample(request))
        return found

    def update(self, info: Mapping[str, Any]) -> int:
        """Take what a learner found about items of a sample; only prioritized buffers change.

        Args:
            info: `replay_unique_id` (a list of ids) with `priority` (as many finite numbers >= 0); and
                `used_id`, the `data_id`s of a sample that is done with. Both may be missing.

        Returns:
            How many priorities were applied. Items that are gone are left out, and counted in
            `num_dead_updates`; of an item that is named twice the last priority stays.

        Raises:
            KeyError: An id is of another buffer.
            ValueError: A priority is negative or not finite, or there are not as many; nothing is changed.
        """
        with self._lock:
            return self.prepare_update(info)()

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
            self._store = ItemStore(self.replay_buffer_size, self.device)

    def __enter__(self: _Self) -> _Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # The steps of a call, for `together` and the manager; the lock is held, but for the first.

    def as_list(self, data: Any) -> list[Any]:
        """List what was pushed: one item, or several."""
        return as_items(data)

    @abstractmethod
    def prepare_push(self, items: Sequence[Any], start_s: float) -> Act:
        """Check items; give what adds them. The call began at `start_s` of `time.monotonic()`."""

    @abstractmethod
    def prepare_sample(self, request: Request) -> Act | None:
        """Remove what is stale; give what draws, or None if there are not enough."""

    def prepare_update(self, info: Mapping[str, Any]) -> Callable[[], int]:
        """Check an update; give what applies it and tells to how many items."""
        if isinstance(info, Mapping):
            self._rows_of(info.get(UNIQUE_ID))
        return lambda: 0

    def passes(self, num_items: int, is_push: bool, start_s: float) -> bool:
        """Wait, with no lock held, until the limiter would let this many items pass; False if it refuses them."""
        if self.rate_limiter is None or self.rate_limiter.wait(num_items, is_push, start_s):
            return True
        self._check_open(is_push)
        return False

    # Saving.

    @contextmanager
    def unchanged_on_failure(self) -> Iterator[None]:
        """Do as `Store` does, with the limiter's counts."""
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
        """Return the arguments that make an equal buffer, as JSON."""
        limiter = None if self.rate_limiter is None else self.rate_limiter.to_json()
        return {"replay_buffer_size": self.replay_buffer_size, "name": self.name, "rate_limiter": limiter}

    def _get_state(self) -> State:
        limiter = None if self.rate_limiter is None else self.rate_limiter.state_dict()
        numbers, tensors = self._saved_items().state(f"of {self.name!r}")
        return State(self._arguments(), numbers | {"rate_limiter": limiter}, tensors)

    def _saved_items(self) -> ItemStore:
        """Return the items as they are saved."""
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
        """Do `together` with this buffer alone; give the result, None if there is none."""
        if self.rate_limiter is not None:
            found = together({self: num_items}, is_push, lambda: [prepare()])
            return None if found is None else found[0]
        with self._lock:
            self._check_open(is_push)
            act = prepare()
            return None if act is None else act()

    def _uniformly(self, request: Request, num_items: int, items_at: Callable[[torch.Tensor], list[Any]]) -> Act | None:
        """Prepare a uniform draw among `num_items` items; `items_at` copies those of `[n]` ages, 0 for the oldest."""
        ages = request.among(num_items)
        if request.size == 0:
            return list
        if len(ages) < (1 if request.replace else request.size):
            return None

        def take() -> list[Any]:
            start_s = time.monotonic()
            drawn = (uniform if request.replace else distinct)(len(ages), request.size, self.rng)
            found = items_at(ages.start + drawn * ages.step)
            if self.monitor is not None:
                self.monitor.note_sample(request.size, time=time.monotonic() - start_s)
            return found

        return take

    def _note_push(self, num_items: int, start_s: float, **values: Any) -> None:
        if self.monitor is not None:
            self.monitor.note_push(num_items, time=time.monotonic() - start_s, **values)

    def _ids_of(self, ids: torch.Tensor, slots: torch.Tensor) -> dict[str, list[Any]]:
        """Name items as samples do."""
        prefix = self.name + "_"
        return {UNIQUE_ID: [f"{prefix}{row}" for row in ids.tolist()], SLOT: slots.tolist()}

    def _rows_of(self, unique_ids: Any) -> list[int]:
        """Return the rows of unique ids (None is none); raise if one is of another buffer."""
        rows: list[int] = []
        for unique_id in [unique_ids] if isinstance(unique_ids, str) else [] if unique_ids is None else unique_ids:
            name, row = split_unique_id(unique_id)
            if name != self.name:
                raise UnknownNameError("update", "a buffer", f"ids of {self.name!r}", repr(unique_id))
            rows.append(row)
        return rows

    def _check_open(self, is_push: bool) -> None:
        if self._is_closed:
            action = "push into" if is_push else "sample from"
            raise ClosedError(action, repr(self.name), "an open buffer", "a closed one", "Make a new one")


class NaiveReplayBuffer(ManagedBuffer):
    """The last `replay_buffer_size` items, drawn uniformly.

    Args:
        replay_buffer_size: Items that fit.
        deepcopy: Has no effect: items are always copied in and out. Kept for callers that pass it.
        **options: As for `ManagedBuffer`: `name`, `device`, `output_device`, `generator`, `monitor`,
            `rate_limiter`.

    An item is a nested mapping. Its tensors and arrays are kept in columns, whose shapes and dtypes the
    first item fixes; other leaves are copied as they are. `sample` gives items, or None; they bring `replay_unique_id`
    (`<name>_<row>`) and `replay_buffer_idx` (the slot).
    """

    def __init__(self, replay_buffer_size: int, deepcopy: bool = False, **options: Any) -> None:
        arguments.options(self, options)
        super().__init__(replay_buffer_size, **options)

    def prepare_push(self, items: Sequence[Any], start_s: float) -> Act:
        read = read_items(items, self._store.form)

        def write() -> None:
            self._store.write(read)
            self._note_push(read.num_rows, start_s)

        return write

    def prepare_sample(self, request: Request) -> Act | None:
        return self._uniformly(request, self.count(), self._items_at)

    def _items_at(self, ages: torch.Tensor) -> list[Any]:
        ids = self._store.ring.oldest + ages
        slots = self._store.ring.slot(ids)
        return self._store.items(slots, self._ids_of(ids, slots), self.output_device)


def locked(buffers: Iterable[ManagedBuffer]) -> ExitStack:
    """Take the locks of some buffers, in the same order in all threads, until the end of a `with`."""
    with ExitStack() as stack:
        for buffer in sorted(buffers, key=id):
            stack.enter_context(buffer._lock)
        return stack.pop_all()


def attempt(
    numbers: Mapping[ManagedBuffer, int], is_push: bool, prepare: Callable[[], list[Act | None]]
) -> tuple[list[Any] | None, ManagedBuffer | None]:
    """Do something with some buffers if the limiters of all of them let the numbers of items pass at once.

    What the limiters counted is taken back, before the locks are released, if it is not done.

    Args:
        numbers: Items of each buffer.
        is_push: Whether they are pushed or sampled.
        prepare: Checks everything, with the locks held; gives what does it, None for what cannot be done.

    Returns:
        The results, None if it was not done; and the buffer whose limiter does not let it pass, or None.
    """
    with locked(numbers) as stack:
        undo = stack.enter_context(ExitStack())
        for buffer, number in numbers.items():
            buffer._check_open(is_push)
            if (limiter := buffer.rate_limiter) is None:
                continue
            if not (limiter.insert if is_push else limiter.sample)(number, waits=False):
                return None, buffer
            undo.callback(limiter.undo, *((number, 0) if is_push else (0, number)))
        acts = prepare()
        if None in acts:
            return None, None
        found = [act() for act in acts if act is not None]
        undo.pop_all()
    return found, None


def together(
    numbers: Mapping[ManagedBuffer, int], is_push: bool, prepare: Callable[[], list[Act | None]]
) -> list[Any] | None:
    """Do what `attempt` does, waiting for limiters; None if a sample cannot be drawn or a limiter refuses it.

    Raises:
        RateLimitedError: A limiter refuses a push.
        ClosedError: A buffer is closed.
    """
    start_s = time.monotonic()
    while True:
        found, refusing = attempt(numbers, is_push, prepare)
        if refusing is None:
            return found
        if refusing.passes(numbers[refusing], is_push, start_s):
            continue
        if is_push:
            got = f"{numbers[refusing]} more items"
            advice = "Sample first, or raise the tolerance"
            raise RateLimitedError("push into", repr(refusing.name), "draws to keep up", got, advice)
        return None
