"""`ManagedBuffer`: base class of buffers of items. `NaiveReplayBuffer`: draws items uniformly.

A call holds the buffer's lock. It changes nothing before all arguments are checked and the rate
limiter admits the call. `call_if_admitted` does the same for several buffers of a manager at once.
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
from ..core.memory import StreamOrder
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
#: Function that performs a push, sample or update whose arguments were already checked.
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
        cls, size: Any, iteration: Any, sample_range: Any = None, replace: Any = False
    ) -> Request:
        """Check the arguments of a call and return them, with numpy numbers as Python numbers."""
        size = arguments.whole("size", size, 0)
        if not arguments.is_whole(iteration):
            raise UsageError(f"cur_learner_iter must be an integer, got {iteration!r}.")
        if sample_range is not None and not isinstance(sample_range, slice):
            raise UsageError(f"sample_range must be a slice or None, got {sample_range!r}.")
        return cls(size, int(iteration), sample_range, arguments.flag("replace", replace))

    def ages(self, num_rows: int) -> range:
        """Return the ages in `sample_range`, for a buffer of `num_rows` items.

        Age 0 is the oldest item, and age `num_rows - 1` the newest.
        """
        return range(num_rows)[self.sample_range or slice(None)]


class ManagedBuffer(Store):
    """Base class of buffers of items, protected by one lock.

    Args:
        replay_buffer_size: Capacity in items, at least 1.
        name: First part of the ids of items; any non-empty string.
        device: Device of stored tensors.
        output_device: Device of samples; None for `device`.
        generator: Random generator of the samples: a `torch.Generator` on `device` or a seed. None:
            seeded from `torch.initial_seed()` and the number of objects created since that seed
            changed.
        monitor: Monitor that counts pushes and samples; None for no monitor.
        rate_limiter: `RateLimiter` that admits, delays or rejects pushes and samples, or a mapping
            of its arguments; None for no limit.
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
        self.replay_buffer_size = arguments.whole("replay_buffer_size", replay_buffer_size, 1)
        if not isinstance(name, str) or not name:
            raise UsageError(f"name must be a non-empty str, got {name!r}.")
        self.name = name
        self.device = arguments.device("device", device)
        self.output_device = None
        if output_device is not None:
            self.output_device = arguments.device("output_device", output_device)
        self.rng = generator_on(generator, self.device)
        self.monitor = monitor
        if monitor is not None:
            arguments.instance("monitor", monitor, "a BufferMonitor or None", BufferMonitor)
        self.rate_limiter = (
            RateLimiter(**rate_limiter) if isinstance(rate_limiter, Mapping) else rate_limiter
        )
        if rate_limiter is not None:
            expected = "a RateLimiter, its arguments or None"
            arguments.instance("rate_limiter", self.rate_limiter, expected, RateLimiter)
        self._lock = threading.RLock()
        self._is_closed = False
        self._order = StreamOrder(self.device)
        self._store = self._make_store(self.replay_buffer_size)

    def push(self, data: Any) -> None:
        """Add copies of an item, or of a list of items.

        Raises:
            MissingFieldError, SchemaError, FieldTypeError: A leaf does not match earlier items. The
                message names the first such leaf. Nothing is added.
            RateLimitedError: The rate limiter rejects the push.
            ClosedError: The buffer is closed.
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
        """Number of items added since the creation or the last `clear`."""
        return self._store.ring.total

    def sample_check(
        self,
        size: int,
        cur_learner_iter: int = 0,
        sample_range: slice | None = None,
        replace: bool = False,
    ) -> bool:
        """Return whether `sample` with these arguments would return items without waiting.

        Stale items are removed.
        """
        request = Request.checked(size, cur_learner_iter, sample_range, replace)
        with self._lock:
            is_admitted = self.rate_limiter is None or self.rate_limiter.may_sample(request.size)
            has_enough = self.prepare_sample(request) is not None
            return has_enough and is_admitted and not self._is_closed

    def sample(
        self,
        size: int,
        cur_learner_iter: int = 0,
        sample_range: slice | None = None,
        replace: bool = False,
    ) -> list[Any] | None:
        """Draw items, uniformly or by the distribution of the subclass.

        Args:
            size: Number of items; 0 returns [].
            cur_learner_iter: Current iteration of the learner, for buffers with staleness.
            sample_range: Range of item ages to draw from: `slice(0, 5)` for the five oldest items,
                `slice(-5, None)` for the five newest; None for all items.
            replace: Whether an item may be drawn more than once.

        Returns:
            A list of copies. None if the range has fewer than `size` items (with `replace`, no
            items), or if the rate limiter rejects the sample.
        """
        request = Request.checked(size, cur_learner_iter, sample_range, replace)
        items: list[Any] | None = self._call(
            request.size, False, lambda: self.prepare_sample(request)
        )
        return items

    def update(self, info: Mapping[str, Any]) -> int:
        """Update the priorities of sampled items and release their data.

        Only prioritized buffers change. Other buffers only check the ids.

        Args:
            info: Mapping with optional entries: `replay_unique_id`, a list of ids; `priority`, a
                finite number >= 0 for each id; `used_id`, the `data_id`s of a sample that is no
                longer used.

        Returns:
            Number of applied priorities. Priorities of removed items are skipped and counted in
            `num_dead_updates`. For a repeated id the last priority is used.

        Raises:
            KeyError: An id belongs to another buffer.
            ValueError: A priority is negative or not finite, or the numbers of priorities and ids
                differ. Nothing is changed.
        """
        with self._lock:
            return self.prepare_update(info)()

    def clear(self) -> None:
        """Remove every item. Ids of new items start at 0 again."""
        with self._lock:
            self._clear()
            if self.rate_limiter is not None:
                self.rate_limiter.reset()

    def start(self) -> None:
        """Do nothing, because buffers have no threads. Code may call `start` on all its objects."""

    def close(self) -> None:
        """Release all items and wake waiting threads. Idempotent.

        Later pushes and samples raise `ClosedError`.
        """
        self._is_closed = True  # Set before the limiter wakes threads, which check this flag.
        if self.rate_limiter is not None:
            self.rate_limiter.close()
        with self._lock:
            self._clear()
            self._store = self._make_store(self.replay_buffer_size)

    def __enter__(self: _Self) -> _Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Steps of a call, which `call_when_admitted` and the manager combine. Callers of the
    # `prepare_...` methods hold the lock.

    def as_list(self, data: Any) -> list[Any]:
        """Convert pushed data, one item or several items, to a list."""
        return as_items(data)

    @abstractmethod
    def prepare_push(self, items: Sequence[Any], start_s: float) -> Act:
        """Check items and return a function that adds them.

        `start_s` is the start of the call in seconds, on the clock of `time.monotonic()`.
        """

    @abstractmethod
    def prepare_sample(self, request: Request) -> Act | None:
        """Remove stale items and return a function that draws the requested items.

        Returns None if there are too few items.
        """

    def prepare_update(self, info: Mapping[str, Any]) -> Callable[[], int]:
        """Check an update and return a function that applies the update.

        The function returns the number of updated items.
        """
        if isinstance(info, Mapping):
            self._rows_of(info.get(UNIQUE_ID))
        return lambda: 0

    def wait_until_admitted(self, num_items: int, is_push: bool, start_s: float) -> bool:
        """Wait, without locks, until the limiter would admit `num_items` items.

        Returns True then, and False if the limiter rejects the items.
        """
        if self.rate_limiter is None or self.rate_limiter.wait(num_items, is_push, start_s):
            return True
        self._check_open(is_push)
        return False

    # Saving.

    @contextmanager
    def unchanged_on_failure(self) -> Iterator[None]:
        """Restore attributes, random state and the limiter's counts after an error in the block."""
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
        """Return the constructor arguments to save, as JSON values."""
        limiter = None if self.rate_limiter is None else self.rate_limiter.to_json()
        return {
            "replay_buffer_size": self.replay_buffer_size,
            "name": self.name,
            "rate_limiter": limiter,
        }

    def _get_state(self) -> State:
        limiter = None if self.rate_limiter is None else self.rate_limiter.state_dict()
        numbers, tensors = self._saved_items().state(f"the objects of buffer {self.name!r}")
        return State(self._arguments(), numbers | {"rate_limiter": limiter}, tensors)

    def _saved_items(self) -> ItemStore:
        """Return the store whose items are saved."""
        return self._store

    def _set_state(self, numbers: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        store = self._make_store(self._store.capacity)
        self._store = store.restore(numbers, tensors, f"the objects of buffer {self.name!r}")
        if self.rate_limiter is not None and numbers["rate_limiter"] is not None:
            self.rate_limiter.load_state_dict(numbers["rate_limiter"])

    # Methods for subclasses.

    def _make_store(self, capacity: int) -> ItemStore:
        """Return an empty store, whose reads and writes are ordered among CUDA streams."""
        return ItemStore(capacity, self.device, self._order)

    def _clear(self) -> None:
        self._store.clear()

    def _push(self, items: Sequence[Any]) -> None:
        start_s = time.monotonic()
        self._call(len(items), True, lambda: self.prepare_push(items, start_s))

    def _call(self, num_items: int, is_push: bool, prepare: Callable[[], Act | None]) -> Any:
        """Push `num_items` items to this buffer, or sample them, once the limiter admits them.

        Args:
            num_items: Number of items.
            is_push: True to push items, False to sample items.
            prepare: Function that checks the arguments, called with the lock held. It returns a
                function that performs the call, or None if there are too few items.

        Returns:
            The result of the function that performs the call. None if there are too few items to
            sample, or if the limiter rejects the sample.
        """
        if self.rate_limiter is not None:
            results = call_when_admitted({self: num_items}, is_push, lambda: [prepare()])
            return None if results is None else results[0]
        with self._lock:
            self._check_open(is_push)
            act = prepare()
            return None if act is None else act()

    def _uniformly(
        self, request: Request, num_items: int, items_at: Callable[[torch.Tensor], list[Any]]
    ) -> Act | None:
        """Prepare a uniform draw from `num_items` items.

        `items_at` copies items by their ages `[n]`; age 0 is the oldest item.
        """
        ages = request.ages(num_items)
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
        """Return the unique ids and the slots of sampled items, by name of the added leaf."""
        prefix = self.name + "_"
        return {UNIQUE_ID: [f"{prefix}{row}" for row in ids.tolist()], SLOT: slots.tolist()}

    def _rows_of(self, unique_ids: Any) -> list[int]:
        """Return the row numbers in `unique_ids`, which is one id, several ids or None.

        Raises:
            UnknownNameError: An id belongs to another buffer.
        """
        if unique_ids is None:
            return []
        rows: list[int] = []
        for unique_id in [unique_ids] if isinstance(unique_ids, str) else unique_ids:
            name, row = split_unique_id(unique_id)
            if name != self.name:
                raise UnknownNameError(
                    f"the id {unique_id!r} does not belong to buffer {self.name!r}."
                )
            rows.append(row)
        return rows

    def _check_open(self, is_push: bool) -> None:
        if self._is_closed:
            raise ClosedError(f"buffer {self.name!r} is closed. Create a new buffer.")


class NaiveReplayBuffer(ManagedBuffer):
    """Buffer of the last `replay_buffer_size` items, with uniform sampling.

    An item is a nested mapping. Its tensors and arrays are stored in columns. The first item fixes
    the shapes and dtypes of the columns. Other leaves are copied as objects. `sample` returns
    items, or None. Each item has the leaves `replay_unique_id` (`<name>_<row>`) and
    `replay_buffer_idx` (the slot).

    Args:
        replay_buffer_size: Capacity in items.
        deepcopy: No effect, because items are always copied in and out. The argument exists for
            compatibility.
        **options: As for `ManagedBuffer`: `name`, `device`, `output_device`, `generator`,
            `monitor`, `rate_limiter`.
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
    """Acquire the locks of some buffers until the end of a `with` block.

    All threads acquire locks in the same order, so that they cannot deadlock.
    """
    with ExitStack() as stack:
        for buffer in sorted(buffers, key=id):
            stack.enter_context(buffer._lock)
        return stack.pop_all()


def call_if_admitted(
    numbers: Mapping[ManagedBuffer, int], is_push: bool, prepare: Callable[[], list[Act | None]]
) -> tuple[list[Any] | None, ManagedBuffer | None]:
    """Push to several buffers, or sample from them, if all of their limiters admit it at once.

    Nothing happens if a limiter rejects its items or delays them, or if there are too few items.
    The counts of all limiters are then restored before the locks are released.

    Args:
        numbers: Number of items by buffer.
        is_push: True to push items, False to sample items.
        prepare: Function that checks all arguments, called with the locks held. It returns, for
            each buffer, a function that performs the call, or None if there are too few items.

    Returns:
        (results, refusing). `results` are the results in the order of `numbers`, or None if nothing
        was done. `refusing` is the buffer whose limiter did not admit its items, or None.
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


def call_when_admitted(
    numbers: Mapping[ManagedBuffer, int], is_push: bool, prepare: Callable[[], list[Act | None]]
) -> list[Any] | None:
    """Push to several buffers, or sample from them, as soon as all of their limiters admit it.

    The arguments are those of `call_if_admitted`. Returns the results in the order of `numbers`.
    Returns None if there are too few items to sample, or if a limiter rejects a sample.

    Raises:
        RateLimitedError: A limiter rejects a push.
        ClosedError: A buffer is closed.
    """
    start_s = time.monotonic()
    while True:
        results, refusing = call_if_admitted(numbers, is_push, prepare)
        if refusing is None:
            return results
        if refusing.wait_until_admitted(numbers[refusing], is_push, start_s):
            continue
        if is_push:
            raise RateLimitedError(
                f"the rate limiter of buffer {refusing.name!r} rejects {numbers[refusing]} items, "
                "since too few items were sampled. Sample first, or increase `tolerance` of the "
                "limiter."
            )
        return None
