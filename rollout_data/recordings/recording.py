"""A recording: the episodes of one file or folder of any format, or some of them.

One rule: nothing is read before it is asked for, and nothing is ever written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np

from storage.core.fields import Schema
from storage.errors import RolloutDataError

from ..foreign.reader import ForeignReader
from .episode import Episode


class Recording(Sequence[Episode]):
    """Episodes in the order of their numbers; made by `rollout_data.open`.

    `recording[i]`, also with a negative number, is an episode; a slice is a recording.

    Attributes:
        format: Name of its format.
        path: The file or folder.
        metadata: Of the whole: what the file says.
    """

    def __init__(self, reader: ForeignReader, numbers: np.ndarray | None = None) -> None:
        self._reader = reader
        self._numbers = np.arange(len(reader.episodes)) if numbers is None else numbers
        self.format, self.path, self.metadata = reader.format, Path(reader.path), reader.metadata

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, index: int) -> Episode: ...
    @overload
    def __getitem__(self, index: slice) -> Recording: ...
    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return Recording(self._reader, self._numbers[index])
        number = int(self._numbers[index])
        return Episode(self._reader, number, self._reader.episodes[number])

    def __iter__(self) -> Iterator[Episode]:
        return (self[number] for number in range(len(self)))

    @property
    def problems(self) -> list[RolloutDataError]:
        """What was left out, repaired or inferred, as exceptions that were not raised."""
        return self._reader.problems

    @property
    def schema(self) -> Schema:
        """The fields of the first episode that has each of them."""
        fields = {name: item for episode in self._reader.episodes for name, item in episode.schema.items()}
        return Schema(fields.values())
