"""Record of windows that were skipped because of damaged data, shared by all worker processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from storage.errors import DataFileError

from ..sources.processes.process_group import Board

OnError = Literal["raise", "skip"]


class WindowLosses:
    """Windows of a dataset that this process or its worker processes have skipped.

    A window that several processes have skipped counts once.

    Attributes:
        known: Names of windows that this process skipped, as text.
    """

    def __init__(self) -> None:
        self.known: set[str] = set()
        self._board = Board()
        self._num_heard = 0

    def add(self, name: Sequence[Any], problem: DataFileError) -> None:
        """Record a skipped window with its error, and share the record with other processes."""
        key = repr(list(name))
        self.known.add(key)
        self._board.write(key, str(problem), is_final=True)

    def __contains__(self, name: Sequence[Any]) -> bool:
        return repr(list(name)) in self.known

    def __len__(self) -> int:
        return len(self._board.names())

    def new_problems(self) -> list[DataFileError]:
        """Return the errors that any process recorded since the last call, without duplicates."""
        names = self._board.names()[self._num_heard :]
        self._num_heard += len(names)
        texts = dict.fromkeys(str(self._board.read(name)) for name in names)
        return [DataFileError(text) for text in texts]
