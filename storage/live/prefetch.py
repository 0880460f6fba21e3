"""Prefetch: items made by a thread, ahead of who consumes them, and already on the device.

One rule: whatever happens on one side reaches the other: an exception appears at its place in
the order, the end ends, and a consumer that leaves stops the producer within one item.
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
    """Move every tensor in nested mappings, tuples, lists and dataclasses to `device`; other leaves stay.

    From the CPU to CUDA the copy goes through pinned memory (`pin`), the only asynchronous way. Mappings keep their
    type where it can be made from a dict of the same keys, and arrive as dicts where not. A mapping other than a dict
    that has a `to` of its own, as a `TensorDict` has, moves itself: by `item.to(device, non_blocking=True)`.
    """
    if isinstance(item, torch.Tensor):
        if device.type == "cuda" and item.device.type == "cpu" and pin:
            item = item.pin_memory()
        return item.to(device, non_blocking=True)
    is_tree = callable(getattr(item, "to", None)) and callable(getattr(item, "keys", None))
    if is_tree and not isinstance(item, (dict, type)):  # a TensorDict, a tensorclass: they have a batch size to keep
        return item.to(device, non_blocking=True)
    if isinstance(item, Mapping):
        moved = {key: to_device(value, device, pin) for key, value in item.items()}
        return moved if type(item) is dict else _made_like(item, moved)
    if isinstance(item, tuple) and hasattr(item, "_fields"):
        return type(item)(*(to_device(value, device, pin) for value in item))
    if isinstance(item, (tuple, list)):
        return type(item)(to_device(value, device, pin) for value in item)
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        values = {field.name: getattr(item, field.name) for field in dataclasses.fields(item) if field.init}
        return dataclasses.replace(item, **{name: to_device(value, device, pin) for name, value in values.items()})
    return item


def _made_like(item: Mapping[Any, Any], moved: dict[Any, Any]) -> Mapping[Any, Any]:
    """Make a mapping of the type of `item` from a dict; that dict where its constructor does not take one."""
    make: Any = type(item)
    try:
        made = make(item.default_factory, moved) if isinstance(item, defaultdict) else make(moved)
    except (TypeError, ValueError):
        return moved
    is_alike = len(made) == len(moved) and all(key in made and made[key] is value for key, value in moved.items())
    return made if is_alike else moved


class PipelinedDataCollector(Unique, Generic[T]):
    """Iterate over `base_collector` with up to `prefetch_count` items made ahead by a thread.

    Args:
        base_collector: The source, any iterable; iterated in the producer's thread. Iterating again starts it anew.
            It must not change an item after it has yielded it (`transform` may copy).
        device: Where the tensors of an item (nested mappings, tuples, lists, dataclasses) are moved to: `to_device`.
        prefetch_count: How many finished items may wait, at least 1.
        pin: Copy to CUDA through pinned memory, asynchronously to the consumer's work.
        transform: Applied to each item in the producer's thread, before the move.
        stamp: Called in the producer's thread as an item is begun; its value (a policy version, say)
            is in `last_stamp` when the item is delivered. On-policy data are as old as the queue is
            long: `last_lag` items, at most `max_lag`.

    Raises:
        RuntimeError: A second iteration is begun while one is going on.
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
        action = "create PipelinedDataCollector"
        if not isinstance(base_collector, Iterable) and not hasattr(base_collector, "__getitem__"):
            raise UsageError(action, "", "base_collector as an iterable", type(base_collector).__name__)
        self.base_collector = base_collector
        self.device = arguments.device(action, "device", device)
        self.prefetch_count = arguments.whole(action, "prefetch_count", prefetch_count, 1)
        self.pin = arguments.flag(action, "pin", pin)
        for name, function in (("transform", transform), ("stamp", stamp)):
            if function is not None and not callable(function):
                raise UsageError(action, "", f"{name} as a function or None", type(function).__name__)
        self.transform = transform
        self.stamp = stamp
        #: What `stamp` gave for the item delivered last.
        self.last_stamp: Any = None
        #: How many later items had been begun when that item was delivered.
        self.last_lag = 0
        self._current: _Producer | None = None
        self._lock = threading.Lock()

    @property
    def max_lag(self) -> int:
        """How many items a delivered one may be older than the newest one begun."""
        return self.prefetch_count + 1

    def __iter__(self) -> PrefetchedItems[T]:
        with self._lock:
            if self._current is not None and not self._current.is_stopped:
                self._current.worker.owner.check()
                raise RuntimeError("cannot iterate twice at once: one iteration is going on. Close it first.")
            if self._current is not None:
                self._current.stop()  # returns when the thread has ended: a source is never iterated by two
            self._current = _Producer(self)
            return PrefetchedItems(self, self._current)

    def close(self) -> None:
        """Stop the iteration that is going on, if any, and wait for the item being made. Idempotent."""
        with self._lock:
            if self._current is not None:
                self._current.close()


class PrefetchedItems(Owned, Iterator[T]):
    """One iteration of a `PipelinedDataCollector`.

    `close` and the `with` block stop the producer and wait for its thread. Dropping the iteration stops the producer
    without waiting: the garbage collector may drop it inside any call, also one that holds a lock which the thread
    needs.
    """

    def __init__(self, collector: PipelinedDataCollector[T], producer: _Producer) -> None:
        self._collector = collector
        self._producer = producer
        self._owner = producer.worker.owner
        weakref.finalize(self, _abandon, weakref.ref(producer))
        self._num_got = 0
        self._futures: deque[Future[_Made]] = deque()
        self._fill()

    def __next__(self) -> T:
        self.check()
        made = _END if self._producer.is_stopped else self._futures[0].result()
        if made.failure is not None or made is _END or self._producer.is_stopped:
            self.close()
            if isinstance(made.failure, StopIteration):  # of a transform: it would end the consumer's loop in silence
                raise RuntimeError("cannot go on prefetching: the source raised StopIteration.") from made.failure
            raise made.failure or StopIteration
        self._futures.popleft()
        self._num_got += 1
        self._fill()
        if made.copied is not None:
            _hand_over(made.item, made.copied)
        self._collector.last_stamp = made.stamp
        self._collector.last_lag = max(0, self._producer.num_begun - self._num_got)
        delivered: T = made.item
        return delivered

    def _fill(self) -> None:
        while len(self._futures) < self._collector.max_lag:
            self._futures.append(self._producer.worker.submit(self._producer.make))

    def check(self) -> None:
        """Raise in a forked child."""
        self._owner.check()

    def close(self) -> None:
        """Stop the producer and wait for the item that it is making. Idempotent."""
        self._producer.close()

    def abandon(self) -> Worker:
        """Stop the producer without waiting, as dropping the iteration does. Return its worker, which can be closed."""
        self._producer.abandon()
        return self._producer.worker


class _Made(NamedTuple):
    """An item, the event of its copy to CUDA, its stamp; or the failure of making it."""

    item: Any = None
    copied: Any = None
    stamp: Any = None
    failure: BaseException | None = None


#: Stands behind the last item.
_END = _Made()


class _Producer:
    """Makes the items of one iteration; holds neither that nor the collector, so that dropping them ends it."""

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
        #: Whether no more items are made.
        self.is_stopped = False
        #: Items that were begun.
        self.num_begun = 0

    def make(self) -> _Made:
        """Make the next item, in the thread."""
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
        """Stop; raise in a forked child where there is something to stop."""
        if not self.is_stopped:
            self.worker.owner.check()
        self.stop()

    def stop(self) -> None:
        """Make no more items, close the source in its thread, and wait for the thread unless this is it.

        Does nothing in a forked child.
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
        """Make no more items and let the thread end by itself. Does nothing in a forked child."""
        if self.worker.owner.is_own:
            self.is_stopped = True
            self.worker.abandon()

    def _forget_source(self) -> None:
        """Drop what belongs to the caller, and may hold what drops this one."""
        self._source = None
        self._iterable = ()
        self._transform = None
        self._stamp = None


def _abandon(producer: weakref.ref[_Producer]) -> None:
    """Abandon the producer of an iteration that was dropped; one that was dropped with it has ended its thread."""
    there = producer()
    if there is not None:
        there.abandon()


def _hand_over(item: Any, event: Any) -> None:
    """Let the consumer's stream wait for the copy, and tell the allocator who uses the memory."""
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
