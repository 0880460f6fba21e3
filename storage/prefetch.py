"""Prefetch: items made by a thread, ahead of who consumes them, and already on the device.

One rule: whatever happens on one side reaches the other: an exception appears at its place in
the order, the end ends, and a consumer that leaves stops the producer within one item.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar

import torch

from .errors import UsageError

T = TypeVar("T")


def to_device(item: Any, device: torch.device, pin: bool = True) -> Any:
    """Move every tensor in nested mappings, tuples and lists to `device`; other leaves stay.

    From the CPU to CUDA the copy goes through pinned memory (`pin`), the only asynchronous way.
    """
    if isinstance(item, torch.Tensor):
        if device.type == "cuda" and item.device.type == "cpu" and pin:
            item = item.pin_memory()
        return item.to(device, non_blocking=True)
    if isinstance(item, Mapping):
        return {key: to_device(value, device, pin) for key, value in item.items()}
    if isinstance(item, tuple) and hasattr(item, "_fields"):
        return type(item)(*(to_device(value, device, pin) for value in item))
    if isinstance(item, (tuple, list)):
        return type(item)(to_device(value, device, pin) for value in item)
    return item


class _Stopped(Exception):
    """The consumer has left."""


class _Channel:
    """A bounded queue between one producer and one consumer, either of which may leave."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._items: deque[Any] = deque()
        self._changed = threading.Condition()
        self._is_stopped = False

    def put(self, item: Any) -> None:
        """Append an item, waiting for room; `_Stopped` if the consumer has left."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._items) < self._size or self._is_stopped)
            if self._is_stopped:
                raise _Stopped
            self._items.append(item)
            self._changed.notify_all()

    def get(self) -> Any:
        with self._changed:
            self._changed.wait_for(lambda: bool(self._items) or self._is_stopped)
            if self._is_stopped:
                raise _Stopped
            item = self._items.popleft()
            self._changed.notify_all()
            return item

    def stop(self) -> None:
        with self._changed:
            self._is_stopped = True
            self._items.clear()
            self._changed.notify_all()

    @property
    def is_stopped(self) -> bool:
        return self._is_stopped


class PipelinedDataCollector(Generic[T]):
    """Iterate over `iterable` with up to `prefetch_count` items made ahead by a thread.

    Args:
        iterable: The source; iterated in the producer's thread. Iterating again starts it anew.
        device: Where the tensors of an item (nested mappings, tuples, lists) are moved to.
        prefetch_count: How many finished items may wait, at least 1.
        pin: Copy to CUDA through pinned memory, asynchronously to the consumer's work.
        transform: Applied to each item in the producer's thread, before the move.
        stamp: Called in the producer's thread as an item is begun; its value (a policy version, say)
            is in `last_stamp` when the item is delivered. On-policy data are as old as the queue is
            long: at most `max_lag` items.

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
        if prefetch_count < 1:
            raise UsageError("prefetch", "", "prefetch_count >= 1", str(prefetch_count))
        self.iterable, self.device, self.prefetch_count = iterable, torch.device(device), int(prefetch_count)
        self.pin, self.transform, self.stamp = pin, transform, stamp
        self.last_stamp: Any = None
        self._channel: _Channel | None = None
        self._lock = threading.Lock()

    @property
    def max_lag(self) -> int:
        """How many items a delivered one may be older than the newest one begun."""
        return self.prefetch_count + 1

    def __iter__(self) -> Iterator[T]:
        with self._lock:
            if self._channel is not None and not self._channel.is_stopped:
                raise RuntimeError("cannot iterate twice at once: one iteration is going on. Close it first.")
            channel = self._channel = _Channel(self.prefetch_count)
        thread = threading.Thread(target=self._produce, args=(channel,), name="prefetch", daemon=True)
        _running[thread] = channel
        thread.start()
        return self._consume(channel, thread)

    def close(self) -> None:
        """Stop the iteration that is going on, if any; the producer ends within one item."""
        with self._lock:
            if self._channel is not None:
                self._channel.stop()

    def _consume(self, channel: _Channel, thread: threading.Thread) -> Iterator[T]:
        try:
            while True:
                item, event, stamp, failure = channel.get()
                if failure is not None:
                    raise failure
                if event is _END:
                    return
                if event is not None:
                    _hand_over(item, event)
                self.last_stamp = stamp
                yield item
                del item
        except _Stopped:
            return
        finally:
            channel.stop()
            thread.join()

    def _produce(self, channel: _Channel) -> None:
        stream: Any = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None  # type: ignore[no-untyped-call]
        try:
            source = iter(self.iterable)
            while not channel.is_stopped:
                stamp = self.stamp() if self.stamp is not None else None
                try:
                    item = next(source)
                except StopIteration:
                    break
                if self.transform is not None:
                    item = self.transform(item)
                event = None
                if stream is None:
                    item = to_device(item, self.device, self.pin)
                else:
                    with torch.cuda.stream(stream):
                        item = to_device(item, self.device, self.pin)
                        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                        event.record(stream)
                channel.put((item, event, stamp, None))
                del item
            channel.put((None, _END, None, None))
        except _Stopped:
            return
        except BaseException as failure:  # noqa: BLE001 - raised in the consumer, at its position
            try:
                channel.put((None, None, None, failure))
            except _Stopped:
                return


_END = object()
#: Producers of iterations that nobody has closed.
_running: weakref.WeakKeyDictionary[threading.Thread, _Channel] = weakref.WeakKeyDictionary()


def _stop_all() -> None:
    """End the producers before the interpreter does: torch does not survive being cut off in a thread."""
    for thread, channel in list(_running.items()):
        channel.stop()
        thread.join()


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
