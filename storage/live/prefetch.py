"""Prefetch: items made by a thread, ahead of who consumes them, and already on the device.

One rule: whatever happens on one side reaches the other: an exception appears at its place in
the order, the end ends, and a consumer that leaves stops the producer within one item.
"""

from __future__ import annotations

import atexit
import dataclasses
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar

import torch

from ..core.duplicates import Unique
from ..core.threads import OwnCondition
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
    if _moves_itself(item):
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


def _moves_itself(item: Any) -> bool:
    """True for a `TensorDict`, a tensorclass and what else has their two methods; they have a batch size to keep."""
    if isinstance(item, (dict, type)):
        return False
    return callable(getattr(item, "to", None)) and callable(getattr(item, "keys", None))


def _made_like(item: Mapping[Any, Any], moved: dict[Any, Any]) -> Mapping[Any, Any]:
    """Make a mapping of the type of `item` from a dict; that dict where its constructor does not take one."""
    make: Any = type(item)
    try:
        made = make(item.default_factory, moved) if isinstance(item, defaultdict) else make(moved)
    except (TypeError, ValueError):
        return moved
    is_alike = len(made) == len(moved) and all(key in made and made[key] is value for key, value in moved.items())
    return made if is_alike else moved


class _Stopped(Exception):
    """The consumer has left."""


class _Channel:
    """A bounded queue between one producer and one consumer, either of which may leave."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._items: deque[Any] = deque()
        self._changed = self.owner = OwnCondition("items that are made ahead")
        self.is_stopped = self.has_begun = self._is_running = False
        #: Items that the producer has begun, and that the consumer has got.
        self.num_begun = self.num_got = 0

    def begin(self) -> bool:
        """Note that the producer runs; False if it need not."""
        with self._changed:
            if not self.is_stopped:
                self.has_begun = self._is_running = True
            return self.has_begun

    def end(self) -> None:
        """Note that the producer touches the source no more."""
        with self._changed:
            self._is_running = False
            self._changed.notify_all()

    def put(self, item: Any) -> None:
        """Append an item, waiting for room; `_Stopped` if the consumer has left."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._items) < self._size or self.is_stopped)
            if self.is_stopped:
                raise _Stopped
            self._items.append(item)
            self._changed.notify_all()

    def get(self) -> Any:
        with self._changed:
            self._changed.wait_for(lambda: bool(self._items) or self.is_stopped)
            if self.is_stopped:
                raise _Stopped
            self._changed.notify_all()
            self.num_got += 1
            return self._items.popleft()

    def lag(self) -> int:
        """How many items have been begun after the last one that was got."""
        return max(0, self.num_begun - self.num_got)

    def stop(self, is_awaited: bool = False) -> None:
        """Let the producer end; if it is awaited, return when it has."""
        with self._changed:
            self._changed.notify_all()
            self.is_stopped = True
            self._items.clear()
            if is_awaited:  # not by `Thread.join`, which a Ctrl-C makes take a thread for one that has ended
                self._changed.wait_for(lambda: not self._is_running)


class PipelinedDataCollector(Unique, Generic[T]):
    """Iterate over `iterable` with up to `prefetch_count` items made ahead by a thread.

    Args:
        iterable: The source; iterated in the producer's thread. Iterating again starts it anew.
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
        iterable: Iterable[T],
        device: torch.device | str = "cpu",
        prefetch_count: int = 2,
        *,
        pin: bool = True,
        transform: Callable[[Any], Any] | None = None,
        stamp: Callable[[], Any] | None = None,
    ) -> None:
        if isinstance(prefetch_count, bool) or not isinstance(prefetch_count, int) or prefetch_count < 1:
            raise UsageError("prefetch", "", "prefetch_count >= 1", repr(prefetch_count))
        self.iterable, self.device, self.prefetch_count = iterable, torch.device(device), prefetch_count
        self.pin, self.transform, self.stamp = pin, transform, stamp
        #: What `stamp` gave for the item delivered last.
        self.last_stamp: Any = None
        #: How many later items had been begun when that item was delivered.
        self.last_lag = 0
        self._current: tuple[_Channel, threading.Thread] | None = None
        self._lock = threading.Lock()

    @property
    def max_lag(self) -> int:
        """How many items a delivered one may be older than the newest one begun."""
        return self.prefetch_count + 1

    def __iter__(self) -> PrefetchedItems[T]:
        with self._lock:
            if self._current is not None and not self._current[0].is_stopped:
                self._current[0].owner.check()
                raise RuntimeError("cannot iterate twice at once: one iteration is going on. Close it first.")
            if self._current is not None:
                _stop(*self._current)  # a source is never iterated by two threads
            channel = _Channel(self.prefetch_count)
            producer = _Producer(self.iterable, self.device, self.pin, self.transform, self.stamp, channel)
            thread = threading.Thread(target=producer.run, name="prefetch", daemon=True)
            try:
                items = PrefetchedItems(self, channel, thread)  # first: whatever comes now, dropping it ends the thread
                self._current = channel, thread
                _running[thread] = channel
                thread.start()
            except BaseException:  # a Ctrl-C: nothing goes on
                channel.stop()
                raise
        return items

    def close(self) -> None:
        """Stop the iteration that is going on, if any, and wait for the item being made. Idempotent."""
        with self._lock:
            if self._current is not None:
                _stop(*self._current)


class PrefetchedItems(Unique, Iterator[T]):
    """One iteration of a `PipelinedDataCollector`; dropping it, or leaving its loop, stops the producer."""

    def __init__(self, collector: PipelinedDataCollector[T], channel: _Channel, thread: threading.Thread) -> None:
        self._collector, self._channel = collector, channel
        self._finish = weakref.finalize(self, _stop, channel, thread)

    def __next__(self) -> T:
        try:
            item, event, stamp, failure = self._channel.get()
        except _Stopped:
            raise StopIteration from None
        if failure is not None or event is _END:
            self.close()
            if isinstance(failure, StopIteration):  # of a transform: it would end the consumer's loop in silence
                raise RuntimeError("cannot go on prefetching: the source raised StopIteration.") from failure
            raise failure if failure is not None else StopIteration
        if event is not None:
            _hand_over(item, event)
        self._collector.last_stamp, self._collector.last_lag = stamp, self._channel.lag()
        delivered: T = item
        return delivered

    def check(self) -> None:
        """Raise in a forked child."""
        self._channel.owner.check()

    def close(self) -> None:
        """Stop the producer and wait for the item that it is making. Idempotent."""
        self._finish()


class _Producer:
    """Runs in the thread; holds nothing of the collector, so that dropping that ends it."""

    def __init__(
        self,
        iterable: Iterable[Any],
        device: torch.device,
        pin: bool,
        transform: Callable[[Any], Any] | None,
        stamp: Callable[[], Any] | None,
        channel: _Channel,
    ) -> None:
        self._iterable, self._device, self._pin = iterable, device, pin
        self._transform, self._stamp, self._channel = transform, stamp, channel

    def run(self) -> None:
        if not self._channel.begin():
            return
        try:
            self._produce()
            self._channel.put((None, _END, None, None))
        except _Stopped:
            return
        except BaseException as failure:  # noqa: BLE001 - raised in the consumer, at its position
            try:
                self._channel.put((None, None, None, failure))
            except _Stopped:
                return
        finally:
            self._channel.end()

    def _produce(self) -> None:
        is_cuda = self._device.type == "cuda"
        stream: Any = torch.cuda.Stream(self._device) if is_cuda else None  # type: ignore[no-untyped-call]
        source = iter(self._iterable)
        while not self._channel.is_stopped:
            self._channel.num_begun += 1
            stamp = self._stamp() if self._stamp is not None else None
            try:
                item = next(source)
            except StopIteration:
                self._channel.num_begun -= 1
                return
            if self._transform is not None:
                item = self._transform(item)
            event = None
            if stream is None:
                item = to_device(item, self._device, self._pin)
            else:
                with torch.cuda.stream(stream):
                    item = to_device(item, self._device, self._pin)
                    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                    event.record(stream)
            self._channel.put((item, event, stamp, None))
            del item


_END = object()
#: Producers of iterations that nobody has closed.
_running: weakref.WeakKeyDictionary[threading.Thread, _Channel] = weakref.WeakKeyDictionary()


def _stop(channel: _Channel, thread: threading.Thread) -> None:
    if not channel.owner.is_own:
        return
    # The garbage collector may have chosen the thread itself, and a Ctrl-C the time before it was started.
    is_other = thread is not threading.current_thread()
    channel.stop(is_awaited=is_other)
    if is_other and channel.has_begun:
        thread.join()


def _stop_all() -> None:
    """End the producers before the interpreter does: torch does not survive being cut off in a thread."""
    for thread, channel in list(_running.items()):
        _stop(channel, thread)


atexit.register(_stop_all)


def _hand_over(item: Any, event: Any) -> None:
    """Let the consumer's stream wait for the copy, and tell the allocator who uses the memory."""
    stream = torch.cuda.current_stream()
    stream.wait_event(event)
    for tensor in _tensors(item):
        if tensor.is_cuda:
            tensor.record_stream(stream)


def _tensors(item: Any) -> Iterator[torch.Tensor]:
    if isinstance(item, torch.Tensor):
        yield item
    elif isinstance(item, Mapping):
        for value in item.values():
            yield from _tensors(value)
    elif isinstance(item, (tuple, list)):
        for value in item:
            yield from _tensors(value)
    elif dataclasses.is_dataclass(item):
        for field in dataclasses.fields(item):
            yield from _tensors(getattr(item, field.name))
