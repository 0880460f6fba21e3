"""`UsedData`: reference counts of data that items and samples use.

A `data_id` is released once its last item was removed and its last sample was released. The caller
can then delete the data, for example a file.
"""

from __future__ import annotations

import queue
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from ..errors import UsageError
from .item_store import plain_number


class UsedQueue(queue.Queue[Any]):
    """Queue of ids of data that is no longer used. Iteration removes the ids from the queue."""

    def __iter__(self) -> Iterator[Any]:
        while True:
            try:
                yield self.get_nowait()
            except queue.Empty:
                return

    def __len__(self) -> int:
        return self.qsize()

    def withdraw(self, data_id: Any) -> None:
        """Remove an id whose data is used again. An id that is not in the queue is ignored."""
        with self.mutex:
            self.unfinished_tasks -= self.queue.pop(data_id, 0)

    # `queue.Queue` calls these methods under its lock.

    def _init(self, maxsize: int) -> None:
        self.queue: Any = OrderedDict()

    def _put(self, item: Any) -> None:
        self.queue[item] = 1

    def _get(self) -> Any:
        return self.queue.popitem(last=False)[0]


class UsedData:
    """Reference counts of data by id. The id None is ignored.

    Not thread-safe: callers hold the buffer's lock.
    """

    def __init__(self) -> None:
        self.queue = UsedQueue()
        #: Number of items in the buffer with each id.
        self._stored: Counter[Any] = Counter()
        #: Number of unreleased samples with each id.
        self._held: Counter[Any] = Counter()

    def replace(self, removed: Iterable[Any], new: Iterable[Any]) -> None:
        """Update the counts with the ids of removed items and of new items.

        An id that is both in `removed` and in `new` is not released.
        """
        for data_id in new:
            if data_id is not None:
                self._stored[data_id] += 1
                self.queue.withdraw(data_id)
        for data_id in removed:
            if data_id is not None:
                self._leave(self._stored, data_id)

    def hold(self, data_ids: Iterable[Any]) -> None:
        """Add one sample to the count of each id. A repeated id is counted once."""
        self._held.update(set(data_ids) - {None})

    def release(self, data_ids: Iterable[Any]) -> None:
        """Subtract one sample from the count of each id. Ids without samples are ignored."""
        for data_id in dict.fromkeys(data_ids):
            if data_id in self._held:
                self._leave(self._held, data_id)

    def _leave(self, users: Counter[Any], data_id: Any) -> None:
        """Decrement the count of an id. Release the id if no item and no sample uses it."""
        users[data_id] -= 1
        if users[data_id] <= 0:
            del users[data_id]
        if data_id not in self._stored and data_id not in self._held:
            self.queue.put(data_id)

    def to_json(self) -> dict[str, Any]:
        """Return the queue and the counts as lists. The caller encodes the ids in them."""
        stored = [list(pair) for pair in self._stored.items()]
        held = [list(pair) for pair in self._held.items()]
        return {"queue": list(self.queue.queue), "stored": stored, "held": held}

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> UsedData:
        """Build the counts from the result of `to_json`."""
        used = cls()
        for data_id in state["queue"]:
            used.queue.put(data_id)
        used._stored.update({data_id: int(count) for data_id, count in state["stored"]})
        used._held.update({data_id: int(count) for data_id, count in state["held"]})
        return used


def checked_data_id(value: Any) -> Any:
    """Check a `data_id` and convert a tensor of one number to a Python number.

    Raises:
        UsageError: The id is not hashable, or is a tensor of several numbers.
    """
    data_id = plain_number(value)
    try:
        hash([] if isinstance(data_id, torch.Tensor) else data_id)
    except TypeError:
        raise UsageError(f"data_id must be hashable, got {repr(value)[:60]}.") from None
    return data_id
