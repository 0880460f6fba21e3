"""`EpisodeSource`: the only interface between data and their readers.

`FileSource` implements the interface for files of other systems, `RowSource` for rows: block
folders, trajectory folders, remote blocks, copies in memory, and files of other systems as rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from storage.core.fields import Schema
from storage.errors import DataFileError, RolloutDataError, UsageError

from ..blocks.block import Block
from .episode_info import EpisodeInfo
from .episode_table import column_of
from .video_range import VideoRange

Int64s = np.ndarray[Any, np.dtype[np.int64]]


class EpisodeSource(ABC):
    """Immutable snapshot of the episodes of one or several files or folders.

    Recordings, the doctor, edits, reports and `convert` read fields of episodes by name. Playback,
    windows and statistics read packed rows of many episodes by the methods of `RowSource`.

    The source of a recording may be pickled. Any source may be used in a forked process.

    Attributes:
        format: Name of the format: a key of `formats.registry.FORMATS`, or a format of ours.
        path: Absolute path of the file or folder; the first path if there are several.
        metadata: Metadata of the whole source. "lossy": names of the fields that were stored with
            loss. "control_mode": how actions control the robot, "unknown" if the file does not
            state it.
        episodes: Descriptions of the episodes, in the order of their numbers, not of their names.
        problems: Errors, not raised, for data that were not read, were repaired or were left out.
        advice: Errors, not raised, for data that are read as stored but look wrong, such as copied
            actions.
        splits: Name of a split ("train", "valid") -> names of its episodes, if the file has splits.
            Splits may overlap.
        scanner: Class (`Scanner`) that scans the folder for new episodes; None for a file that is
            read once.
    """

    format: str = ""
    path: Path
    metadata: dict[str, Any]
    problems: list[RolloutDataError]
    advice: list[RolloutDataError]
    splits: Mapping[str, Sequence[str]]
    scanner: Any = None

    @property
    @abstractmethod
    def episodes(self) -> Sequence[EpisodeInfo]:
        """Descriptions of the episodes."""

    @abstractmethod
    def read(self, number: int, name: str, start: int, stop: int) -> Any:
        """Read the steps `start:stop` of a field of episode `number`, which must be in range.

        Returns:
            `[stop - start, *shape]` of the field's dtype, bfloat16 as float32. The array may be a
            read-only map of the file. A text field returns a list of str.

        Raises:
            DataFileError: The steps cannot be read.
        """

    def read_fields(
        self, number: int, names: Sequence[str], start: int, stop: int
    ) -> dict[str, Any]:
        """Read several fields: name -> values as in `read`.

        A format overrides this method if it can open its file once for all fields.
        """
        return {name: self.read(number, name, start, stop) for name in names}

    def read_many(
        self, numbers: Int64s, names: Sequence[str], starts: Int64s, counts: Int64s
    ) -> dict[str, np.ndarray[Any, Any]]:
        """Read numeric fields of several episodes: `counts` steps from `starts`, int64 `[k]` each.

        Returns:
            Field -> `[sum of counts, *shape]`, the steps of one episode after the other.
        """
        pieces = zip(numbers.tolist(), starts.tolist(), (starts + counts).tolist(), strict=True)
        parts = [self.read_fields(number, names, start, stop) for number, start, stop in pieces]
        if len(parts) == 1:
            return parts[0]
        return {name: np.concatenate([part[name] for part in parts]) for name in names}

    def read_final(self, number: int, name: str) -> Any:
        """Read a field of the final observation, see `EpisodeInfo.final`: `[*shape]` or a str."""
        raise UsageError(
            f"episode {self.episodes[number].name!r} of {str(self.path)!r} has no final "
            f"observation {name!r}."
        )

    def schemas(self) -> tuple[Int64s, list[Schema]]:
        """Return each episode's position in a list of schemas, int64 `[N]`, and that list."""
        position_of: dict[Schema, int] = {}
        positions = [
            position_of.setdefault(info.schema, len(position_of)) for info in self.episodes
        ]
        return np.array(positions, np.int64), list(position_of)

    def column(self, name: str) -> np.ndarray[Any, Any]:
        """Return a column of the table of episodes. Returns are NaN, since no row is read."""
        return column_of(self.episodes, name)

    def file_of(self, number: int, name: str, step: int) -> Path:
        """Return the file that holds a field of a step of episode `number`, for errors."""
        return self.path

    def video(self, number: int, name: str) -> VideoRange | None:
        """Return the video frames of a field of episode `number`; None if the field is no video."""
        return None

    def rounded(self, number: int) -> dict[str, tuple[int, int]]:
        """Return the integers of episode `number` that were rounded to floats when read so far.

        Returns:
            Field -> (number of changed values, largest difference).
        """
        return {}

    def removed(self, numbers: Iterable[int]) -> dict[int, DataFileError]:
        """Return the error of each episode whose file was removed or replaced since opening."""
        return {}

    def check_present(self, numbers: Iterable[int]) -> None:
        """Raise the error of the first episode whose file was removed or replaced since opening."""
        for error in self.removed(numbers).values():
            raise error

    @property
    def blocks(self) -> list[Block]:
        """Blocks of a block folder when it was opened, edits included; [] for other formats."""
        return []
