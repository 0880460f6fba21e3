"""Copies of stores: `pickle`, `copy.deepcopy` and `copy.copy` give a store of its own that goes on like the first.

One rule: a copy is made from what makes an empty store and from `state_dict()`, never attribute by attribute: locks
cannot be copied, and of two tensors over one memory each would get its own. So attributes that a subclass adds are
copied only if its state has them.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, NoReturn

from ..errors import UsageError


class Duplicable(ABC):
    """Gives a store `pickle`, `copy.deepcopy` and `copy.copy`."""

    _lock: threading.RLock

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Copy everything."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` of an equal store gave."""

    @abstractmethod
    def _recipe(self) -> dict[str, Any]:
        """Say what makes an equal, empty store."""

    @classmethod
    @abstractmethod
    def _from_recipe(cls, recipe: Mapping[str, Any]) -> Any:
        """Make an empty store, without drawing from torch's own generator; its state comes next."""

    def __reduce__(self) -> tuple[Any, ...]:
        with self._lock:
            return _remade, (type(self), self._recipe(), self.state_dict())


class Unique:
    """Refuses copies of what owns files or threads, in words instead of those of the first lock inside."""

    _instead: ClassVar[str] = "Make another one"

    def __reduce__(self) -> NoReturn:
        raise UsageError(f"pickle or copy a {type(self).__name__}, which owns files or threads", advice=self._instead)


def _remade(kind: type[Duplicable], recipe: Mapping[str, Any], state: Mapping[str, Any]) -> Any:
    made = kind._from_recipe(recipe)
    made.load_state_dict(state)
    return made
