"""A cache that evicts the items that were not used for the longest time."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

_Key = TypeVar("_Key", bound=Hashable)
_Item = TypeVar("_Item")


class LruCache(Generic[_Key, _Item]):
    """A thread-safe LRU cache, limited by the number of its items or by their total size.

    A pickled or copied cache is empty, since its items can be created again.

    Args:
        max_size: Maximum total size of the items.
        size_of: Function that returns the size of an item. With None, each item has the size 1.
        keeps_last: Whether a new item is cached even if its size exceeds `max_size`.
    """

    def __init__(
        self,
        max_size: int,
        size_of: Callable[[Any], int] | None = None,
        keeps_last: bool = False,
    ) -> None:
        self.max_size = max_size
        self.keeps_last = keeps_last
        self._size_of = size_of
        self._size = 0
        self._items: OrderedDict[_Key, _Item] = OrderedDict()
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.max_size, self._size_of, self.keeps_last)

    def get(self, key: _Key) -> _Item | None:
        """Return the cached item of a key; None if the key has no item."""
        with self._lock:
            item = self._items.get(key)
            if item is not None:
                self._items.move_to_end(key)
            return item

    def put(self, key: _Key, item: _Item) -> list[_Item]:
        """Cache an item, and return the items that were evicted from the cache.

        An earlier item of the same key is evicted. If the new item is too large for the cache, it
        is not cached, and only this item is returned.
        """
        size = self._size_of_item(item)
        if size > self.max_size and not self.keeps_last:
            return [item]
        evicted = []
        with self._lock:
            if key in self._items:
                evicted.append(self._remove(key))
            self._items[key] = item
            self._size += size
            while self._size > self.max_size and len(self._items) > 1:
                evicted.append(self._remove(next(iter(self._items))))
        return evicted

    def pop(self, key: _Key) -> _Item | None:
        """Remove and return the cached item of a key; None if the key has no item."""
        with self._lock:
            return self._remove(key) if key in self._items else None

    def clear(self) -> None:
        """Remove all items."""
        with self._lock:
            self._items.clear()
            self._size = 0

    def _remove(self, key: _Key) -> _Item:
        item = self._items.pop(key)
        self._size -= self._size_of_item(item)
        return item

    def _size_of_item(self, item: _Item) -> int:
        return 1 if self._size_of is None else self._size_of(item)
