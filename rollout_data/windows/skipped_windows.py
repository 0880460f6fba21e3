"""Windows skipped because of damaged data, counted once over all worker processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from storage.errors import DataFileError

from ..sources.processes.process_group import Board

OnError = Literal["raise", "skip"]


class WindowLosses:
    """The skipped windows of a dataset, over all its worker processes.

    Attributes:
        known: Names of windows that this process skipped.
    """

    def __init__(self) -> None:
        self.known: set[str] = set()
        self._board = Board()
        self._num_heard = 0

    def add(self, name: Sequence[Any], problem: DataFileError) -> None:
        """Record that the window with this name cannot be read."""
        key = repr(list(name))
        self.known.add(key)
        self._board.write(key, str(problem), is_final=True)

    def __contains__(self, name: Sequence[Any]) -> bool:
        return repr(list(name)) in self.known

    def __len__(self) -> int:
        return len(self._board.names())

    def new_problems(self) -> list[DataFileError]:
        """Return the problems recorded since the last call."""
        names = self._board.names()[self._num_heard :]
        self._num_heard += len(names)
        texts = dict.fromkeys(str(self._board.read(name)) for name in names)
        return [DataFileError(text) for text in texts]
