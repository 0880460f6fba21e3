"""`EpisodeSource`: the interface through which all readers access episodes.

`FileSource` implements it for files of other systems. `RowSource` implements it for packed rows:
block folders, trajectory folders, remote blocks, copies in memory, and files of other systems that
are read as rows.
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
    windows and statistics read packed rows of many episodes with the methods of `RowSource`.

    The source of a recording may be pickled. Any source may be used in a forked process.

    Attributes:
        format: Name of the format: a key of `formats.registry.FORMATS`, or a format of this
            library.
        path: Absolute path of the file or folder; the first path if there are several.
        metadata: Metadata of all episodes together. "lossy": names of the fields that were stored
            with loss. "control_mode": how actions control the robot, "unknown" if the file does
            not state it.
        episodes: Descriptions of the episodes, in the order of their numbers.
        problems: Exceptions, not raised, for data that were unreadable, repaired or left out.
        advice: Exceptions, not raised, for data that are read as stored but look wrong, such as
            copied actions.
        splits: Maps names of splits ("train", "valid") to names of episodes, if the file has
            splits. Splits may overlap.
        scanner: `Scanner` class that lists new episodes in the folder; None for a file that is
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
        """Descriptions of all episodes, in the order of their numbers."""

    @abstractmethod
    def read(self, number: int, name: str, start: int, stop: int) -> Any:
        """Read steps `start:stop` of the field `name` in episode `number`.

        The steps must exist.

        Returns:
            Array `[stop - start, *shape]` of the field's dtype, float32 for bfloat16. It may be a
            read-only map of the file. For a text field, a list of str.

        Raises:
            DataFileError: The steps cannot be read.
        """

    def read_fields(
        self, number: int, names: Sequence[str], start: int, stop: int
    ) -> dict[str, Any]:
        """Read several fields of an episode; map each name to the values that `read` returns.

        Formats override this method if one read of the file returns several fields.
        """
        return {name: self.read(number, name, start, stop) for name in names}

    def read_many(
        self, numbers: Int64s, names: Sequence[str], starts: Int64s, counts: Int64s
    ) -> dict[str, np.ndarray[Any, Any]]:
        """Read steps `starts[i]:starts[i] + counts[i]` of several numeric fields and K episodes.

        Args:
            numbers: Episode numbers, int64 `[K]`.
            names: Names of the fields.
            starts: First step of each episode to read, int64 `[K]`.
            counts: Number of steps of each episode to read, int64 `[K]`.

        Returns:
            Maps fields to the concatenated steps of all episodes: `[sum(counts), *shape]`.
        """
        pieces = zip(numbers.tolist(), starts.tolist(), (starts + counts).tolist(), strict=True)
        parts = [self.read_fields(number, names, start, stop) for number, start, stop in pieces]
        if len(parts) == 1:
            return parts[0]
        return {name: np.concatenate([part[name] for part in parts]) for name in names}

    def read_final(self, number: int, name: str) -> Any:
        """Read a field of the observation after the last step: an array of its shape, or a str."""
        raise UsageError(
            f"episode {self.episodes[number].name!r} of {str(self.path)!r} has no final "
            f"observation {name!r}."
        )

    def schemas(self) -> tuple[Int64s, list[Schema]]:
        """Return all distinct schemas, and which of them each of the N episodes has.

        The result is a pair: int64 `[N]` positions in the list, and the list of schemas.
        """
        position_of: dict[Schema, int] = {}
        positions = [
            position_of.setdefault(info.schema, len(position_of)) for info in self.episodes
        ]
        return np.array(positions, np.int64), list(position_of)

    def column(self, name: str) -> np.ndarray[Any, Any]:
        """Return the column `name` of the episode table.

        No rows are read, so the column "return" (sum of rewards) is NaN.
        """
        return column_of(self.episodes, name)

    def file_of(self, number: int, name: str, step: int) -> Path:
        """Return the file that contains step `step` of a field, to name it in error messages."""
        return self.path

    def video(self, number: int, name: str) -> VideoRange | None:
        """Return the part of a video file that stores a field of an episode.

        The result is None if the field is not stored as a video.
        """
        return None

    def rounded(self, number: int) -> dict[str, tuple[int, int]]:
        """Return the fields whose integers lost precision when they were read as floats.

        Returns:
            Maps fields to (number of changed values, largest difference).
        """
        return {}

    def removed(self, numbers: Iterable[int]) -> dict[int, DataFileError]:
        """Return an error for each episode whose file was removed or replaced since opening."""
        return {}

    def damaged(self, numbers: Iterable[int]) -> dict[int, DataFileError]:
        """Check the stored checksums of episodes; return an error for each damaged episode.

        The result is {} for formats that have no checksums, or that check them in each read.
        """
        return {}

    def check_present(self, numbers: Iterable[int]) -> None:
        """Raise `DataFileError` if an episode's file was removed or replaced since opening."""
        for error in self.removed(numbers).values():
            raise error

    @property
    def blocks(self) -> list[Block]:
        """The blocks of the snapshot, edits included; [] for formats other than block files."""
        return []
