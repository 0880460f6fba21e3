"""Prefetch: a background thread produces items ahead of the consumer and moves them to the device.

An exception of the source is raised in the consumer, at the position of the failed item. A consumer
that stops iterating stops the producer after the current item.
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from ..core import arguments
from ..core.threads import Owned, Unique, Worker
from ..errors import UsageError

T = TypeVar("T")


def to_device(item: Any, device: torch.device, pin: bool = True) -> Any:
    """Move all tensors in nested mappings, tuples, lists and dataclasses to a device.

    Other leaves are unchanged. With `pin`, copies from the CPU to CUDA are asynchronous, because
    they use pinned memory. Mappings keep their type if its constructor accepts a dict; other
    mappings become dicts. A mapping with a method `to`, such as a `TensorDict`, is moved by this
    method.
    """
    # Copies to the CPU are synchronous, since the host could read their result too early.
    is_async = device.type != "cpu"
    if isinstance(item, torch.Tensor):
        if device.type == "cuda" and item.device.type == "cpu" and pin:
            item = item.pin_memory()
        return item.to(device, non_blocking=is_async)
    is_tree = callable(getattr(item, "to", None)) and callable(getattr(item, "keys", None))
    # Call the method `to` of a `TensorDict` or a tensorclass, since it keeps the batch size.
    if is_tree and not isinstance(item, (dict, type)):
        return item.to(device, non_blocking=is_async)
    if isinstance(item, Mapping):
        moved = {key: to_device(value, device, pin) for key, value in item.items()}
        return moved if type(item) is dict else _made_like(item, moved)
    if isinstance(item, tuple) and hasattr(item, "_fields"):
        return type(item)(*(to_device(value, device, pin) for value in item))
    if isinstance(item, (tuple, list)):
        return type(item)(to_device(value, device, pin) for value in item)
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        values = {
            field.name: getattr(item, field.name)
            for field in dataclasses.fields(item)
            if field.init
        }
        return dataclasses.replace(
            item, **{name: to_device(value, device, pin) for name, value in values.items()}
        )
    return item


def _made_like(item: Mapping[Any, Any], moved: dict[Any, Any]) -> Mapping[Any, Any]:
    """Convert the dict `moved` to the mapping type of `item`.

    Returns `moved` itself if the constructor of the type does not accept a dict.
    """
    make: Any = type(item)
    try:
        made = make(item.default_factory, moved) if isinstance(item, defaultdict) else make(moved)
    except (TypeError, ValueError):
        return moved
    is_alike = len(made) == len(moved) and all(
        key in made and made[key] is value for key, value in moved.items()
    )
    return made if is_alike else moved


class PipelinedDataCollector(Unique, Generic[T]):
    """An iterable over `base_collector` whose items are produced ahead in a background thread.

    Args:
        base_collector: Any iterable, iterated in the background thread. Each iteration calls `iter`
            again. The iterable must not change an item after it yielded the item; `transform` may
            copy items.
        device: Device of the tensors of delivered items; see `to_device`.
        prefetch_count: Number of finished items that may wait in the queue, at least 1.
        pin: Whether copies to CUDA use pinned memory, which makes the copies asynchronous.
        transform: Function applied to each item in the background thread, before the copy.
        stamp: Function called in the background thread before each item is produced, for example
            to read the policy version. `last_stamp` is its result for the last delivered item.

    Raises:
        RuntimeError: An iteration begins while another iteration is open.

    Items are produced before the consumer requests them, so that they may be outdated. `last_lag`
    is the number of later items whose production had begun when the last item was delivered. It is
    at most `max_lag`.
    """

    def __init__(
        self,
        base_collector: Iterable[T],
        device: torch.device | str = "cpu",
        prefetch_count: int = 2,
        *,
        pin: bool = True,
        transform: Callable[[Any], Any] | None = None,
        stamp: Callable[[], Any] | None = None,
    ) -> None:
        if not isinstance(base_collector, Iterable) and not hasattr(base_collector, "__getitem__"):
            raise UsageError(
                f"base_collector must be an iterable, got {type(base_collector).__name__}."
            )
        self.base_collector = base_collector
        self.device = arguments.device("device", device)
        self.prefetch_count = arguments.whole("prefetch_count", prefetch_count, 1)
        self.pin = arguments.flag("pin", pin)
        for name, function in (("transform", transform), ("stamp", stamp)):
            if function is not None and not callable(function):
                raise UsageError(
                    f"{name} must be a function or None, got {type(function).__name__}."
                )
        self.transform = transform
        self.stamp = stamp
        #: Result of `stamp` for the last delivered item.
        self.last_stamp: Any = None
        #: Number of later items whose production had begun when the last item was delivered.
        self.last_lag = 0
        self._current: _Producer | None = None
        self._lock = threading.Lock()

    @property
    def max_lag(self) -> int:
        """Maximum number of items that are produced ahead of the consumer: `prefetch_count + 1`."""
        return self.prefetch_count + 1

    def __iter__(self) -> PrefetchedItems[T]:
        with self._lock:
            if self._current is not None and not self._current.is_stopped:
                self._current.worker.owner.check()
                raise RuntimeError("Another iteration over this collector is open. Close it first.")
            if self._current is not None:
                # Wait for the earlier thread, so that no two threads iterate over the collector.
                self._current.stop()
            self._current = _Producer(self)
            return PrefetchedItems(self, self._current)

    def close(self) -> None:
        """Stop the current iteration, if any, and wait for the item in production. Idempotent."""
        with self._lock:
            if self._current is not None:
                self._current.close()


class PrefetchedItems(Owned, Iterator[T]):
    """One iteration of a `PipelinedDataCollector`.

    `close` and the end of a `with` block stop the producer and wait for its thread. If the garbage
    collector deletes the iteration, nothing waits for the thread, since the garbage collector may
    run while the deleting thread holds a lock that the producer needs.
    """

    def __init__(self, collector: PipelinedDataCollector[T], producer: _Producer) -> None:
        self._collector = collector
        self._producer = producer
        self._owner = producer.worker.owner
        weakref.finalize(self, _abandon, weakref.ref(producer))
        self._num_delivered = 0
        self._futures: deque[Future[_Made]] = deque()
        self._fill()

    def __next__(self) -> T:
        self.check()
        made = _END if self._producer.is_stopped else self._futures[0].result()
        if made.failure is not None or made is _END or self._producer.is_stopped:
            self.close()
            # A StopIteration of a transform would end the loop of the consumer without an error.
            if isinstance(made.failure, StopIteration):
                raise RuntimeError(
                    "The source of prefetching raised StopIteration."
                ) from made.failure
            raise made.failure or StopIteration
        self._futures.popleft()
        self._num_delivered += 1
        self._fill()
        if made.copied is not None:
            _wait_for_copy(made.item, made.copied)
        self._collector.last_stamp = made.stamp
        self._collector.last_lag = max(0, self._producer.num_begun - self._num_delivered)
        delivered: T = made.item
        return delivered

    def _fill(self) -> None:
        while len(self._futures) < self._collector.max_lag:
            self._futures.append(self._producer.worker.submit(self._producer.make))

    def check(self) -> None:
        """Raise `UsageError` in a forked child process."""
        self._owner.check()

    def close(self) -> None:
        """Stop the producer and wait until its current item is finished. Idempotent."""
        self._producer.close()

    def abandon(self) -> Worker:
        """Stop the producer without a wait. `close` of the returned `Worker` waits for it."""
        self._producer.abandon()
        return self._producer.worker


class _Made(NamedTuple):
    """Produced item, its stamp and the CUDA event after its copy; or the error of the source."""

    item: Any = None
    copied: Any = None
    stamp: Any = None
    failure: BaseException | None = None


#: Marks the end of the source.
_END = _Made()


class _Producer:
    """Background production of the items of one iteration.

    The producer has no reference to the iteration. The iteration can therefore be deleted while the
    thread runs, and its deletion stops the producer.
    """

    def __init__(self, collector: PipelinedDataCollector[Any]) -> None:
        self._iterable: Iterable[Any] = collector.base_collector
        self._device = collector.device
        self._pin = collector.pin
        self._transform = collector.transform
        self._stamp = collector.stamp
        self.worker = Worker("prefetch", max_pending=collector.max_lag)
        self._thread = 0
        self._source: Iterator[Any] | None = None
        self._stream: torch.cuda.Stream | None = None
        self._is_over = False
        #: Whether the consumer has stopped the production.
        self.is_stopped = False
        #: Number of items whose production has begun.
        self.num_begun = 0

    def make(self) -> _Made:
        """Produce the next item. Runs in the background thread."""
        if self.is_stopped:
            self._forget_source()
        if self.is_stopped or self._is_over:
            return _END
        self._thread = threading.get_ident()
        try:
            if self._source is None:
                self._source = iter(self._iterable)
            self.num_begun += 1
            stamp = self._stamp() if self._stamp is not None else None
            item = next(self._source, _END)
            if item is _END:
                self.num_begun -= 1
                self._is_over = True
                return _END
            if self._transform is not None:
                item = self._transform(item)
            return self._moved(item, stamp)
        except BaseException as failure:  # noqa: BLE001 - raised in the consumer, at its position
            self._is_over = True
            return _Made(failure=failure)

    def _moved(self, item: Any, stamp: Any) -> _Made:
        if self._device.type != "cuda":
            return _Made(to_device(item, self._device, self._pin), None, stamp)
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            moved = to_device(item, self._device, self._pin)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(self._stream)
        return _Made(moved, copied, stamp)

    def close(self) -> None:
        """Stop the producer; raise `UsageError` in a forked child if the producer still runs."""
        if not self.is_stopped:
            self.worker.owner.check()
        self.stop()

    def stop(self) -> None:
        """Stop the production, delete the source in the background thread, and wait for the thread.

        A call from the background thread itself does not wait. Does nothing in a forked child.
        """
        if not self.worker.owner.is_own:
            return
        is_first_call = not self.is_stopped
        self.is_stopped = True
        if self._thread == threading.get_ident():
            return
        if is_first_call:
            self.worker.submit(self._forget_source)
        self.worker.close()

    def abandon(self) -> None:
        """Stop the production without a wait for the thread. Does nothing in a forked child."""
        if self.worker.owner.is_own:
            self.is_stopped = True
            self.worker.abandon()

    def _forget_source(self) -> None:
        """Delete the references to the source and to the functions of the caller.

        These objects may refer to the iteration, which could otherwise not be deleted.
        """
        self._source = None
        self._iterable = ()
        self._transform = None
        self._stamp = None


def _abandon(producer: weakref.ref[_Producer]) -> None:
    """Stop the producer of a deleted iteration without a wait, if the producer still exists."""
    existing_producer = producer()
    if existing_producer is not None:
        existing_producer.abandon()


def _wait_for_copy(item: Any, event: Any) -> None:
    """Make the current CUDA stream wait for the copy of an item.

    torch reuses the memory of the item only after the stream has done its work.
    """
    stream = torch.cuda.current_stream()
    stream.wait_event(event)
    for tensor in _tensors(item):
        if tensor.is_cuda:
            tensor.record_stream(stream)


def _tensors(item: Any) -> Iterator[torch.Tensor]:
    parts: Iterable[Any] = ()
    if isinstance(item, torch.Tensor):
        yield item
    elif isinstance(item, Mapping):
        parts = item.values()
    elif isinstance(item, (tuple, list)):
        parts = item
    elif dataclasses.is_dataclass(item):
        parts = [getattr(item, field.name) for field in dataclasses.fields(item)]
    for part in parts:
        yield from _tensors(part)
