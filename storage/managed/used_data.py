"""`UsedData`: which data is not needed any more: in no item of the buffer, and in no sample at work.

One rule: an id of data is given out once, when the last item with it is gone and the last sample that
holds it was released. What is done with the data, for example deleting its file, is up to the caller.
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
    """Ids of data that is not needed any more: a `queue.Queue`; iterating takes out what there is."""

    def __iter__(self) -> Iterator[Any]:
        while True:
            try:
                yield self.get_nowait()
            except queue.Empty:
                return

    def __len__(self) -> int:
        return self.qsize()

    def withdraw(self, data_id: Any) -> None:
        """Take an id out again, if it is there: it is needed again."""
        with self.mutex:
            self.unfinished_tasks -= self.queue.pop(data_id, 0)

    # What `queue.Queue` asks of a kind of queue, under its lock.

    def _init(self, maxsize: int) -> None:
        self.queue: Any = OrderedDict()

    def _put(self, item: Any) -> None:
        self.queue[item] = 1

    def _get(self) -> Any:
        return self.queue.popitem(last=False)[0]


class UsedData:
    """Count the users of data. Not locked: the buffer's lock is held. None is no data."""

    def __init__(self) -> None:
        self.queue = UsedQueue()
        #: Id -> items in the buffer that have it, and samples at work that hold it.
        self._stored: Counter[Any] = Counter()
        self._held: Counter[Any] = Counter()

    def replace(self, gone: Iterable[Any], new: Iterable[Any]) -> None:
        """Note the data of items that are gone and of new ones; what is in both is not given out in between."""
        for data_id in new:
            if data_id is not None:
                self._stored[data_id] += 1
                self.queue.withdraw(data_id)
        for data_id in gone:
            if data_id is not None:
                self._leave(self._stored, data_id)

    def hold(self, data_ids: Iterable[Any]) -> None:
        """Note a sample that holds these data, each once however often it is in the sample."""
        self._held.update(set(data_ids) - {None})

    def release(self, data_ids: Iterable[Any]) -> None:
        """Note that one sample of each of these data is done with; others are ignored."""
        for data_id in dict.fromkeys(data_ids):
            if data_id in self._held:
                self._leave(self._held, data_id)

    def _leave(self, users: Counter[Any], data_id: Any) -> None:
        """Count one user less, and give the id out if it was the last one."""
        users[data_id] -= 1
        if users[data_id] <= 0:
            del users[data_id]
        if data_id not in self._stored and data_id not in self._held:
            self.queue.put(data_id)

    def to_json(self) -> dict[str, Any]:
        """Take apart; ids are objects."""
        stored, held = ([list(pair) for pair in users.items()] for users in (self._stored, self._held))
        return {"queue": list(self.queue.queue), "stored": stored, "held": held}

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> UsedData:
        """Put together what `to_json` gave."""
        made = cls()
        for data_id in state["queue"]:
            made.queue.put(data_id)
        for users, pairs in ((made._stored, state["stored"]), (made._held, state["held"])):
            users.update({data_id: int(count) for data_id, count in pairs})
        return made


def checked_data_id(given: Any) -> Any:
    """Return an id as Python's; refuse what cannot be counted, such as a tensor of several numbers."""
    data_id = plain_number(given)
    try:
        hash([] if isinstance(data_id, torch.Tensor) else data_id)
    except TypeError:
        raise UsageError("track data", expected="a data_id that is hashable", got=repr(given)[:60]) from None
    return data_id
