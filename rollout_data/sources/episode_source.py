"""`EpisodeSource`: the only interface between data and their readers.

`FileSource` implements it for files of other systems, `RowSource` for rows: block folders,
trajectory folders, remote blocks, copies in memory, and files of other systems as rows.
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
    """The episodes of one or several files or folders, as a snapshot that does not change.

    Recordings, the doctor, edits, reports and `convert` read fields of episodes by name. Playback,
    windows and statistics read packed rows of many episodes, which the subclass `RowSource` adds.

    A source may be pickled, and used in a forked process.

    Attributes:
        format: Name of the format: a key of `formats.registry.FORMATS`, or of a folder of ours.
        path: The file or folder, absolute; the first of several.
        metadata: Metadata of the whole. "lossy": names of the fields that were stored with loss.
            "control_mode": how actions control the robot, "unknown" where the file does not state
            it.
        episodes: Descriptions, in the order of the episodes' numbers (never of their names as
            text).
        problems: Data that were not read, were repaired or were left out, as errors that were not
            raised.
        advice: Remarks on data that are read as they are stored, such as copied actions; the same
            form.
        splits: Name -> names of episodes, where the file names parts of itself ("train", "valid");
            they may overlap.
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
        """Read the steps `start:stop` of one field of episode `number`, which is in range.

        Returns:
            `[stop - start, *shape]` of the field's dtype, bfloat16 as float32; may be a read-only
            map of the file. Of texts a list of str.

        Raises:
            DataFileError: The steps cannot be read.
        """

    def read_fields(
        self, number: int, names: Sequence[str], start: int, stop: int
    ) -> dict[str, Any]:
        """Read several fields as `read` does: name -> values. A format may open its file once for all of them."""
        return {name: self.read(number, name, start, stop) for name in names}

    def read_many(
        self, numbers: Int64s, names: Sequence[str], starts: Int64s, counts: Int64s
    ) -> dict[str, np.ndarray[Any, Any]]:
        """Read numeric fields of several episodes, `counts` steps of each from `starts` on, int64 `[k]` each.

        Returns:
            Field -> `[sum of counts, *shape]`, one episode after the other.
        """
        pieces = zip(numbers.tolist(), starts.tolist(), (starts + counts).tolist(), strict=True)
        parts = [self.read_fields(number, names, start, stop) for number, start, stop in pieces]
        if len(parts) == 1:
            return parts[0]
        return {name: np.concatenate([part[name] for part in parts]) for name in names}

    def read_final(self, number: int, name: str) -> Any:
        """Read a field of the observation after the last step, of those in `EpisodeInfo.final`: `[*shape]` or a str."""
        where = f"of episode {self.episodes[number].name!r} of {str(self.path)!r}"
        got = "no such observation"
        raise UsageError("read the final observation", where, f"a format with {name!r}", got)

    def schemas(self) -> tuple[Int64s, list[Schema]]:
        """Return the schema of each episode: int64 `[num_episodes]`, positions in the list of schemas."""
        position_of: dict[Schema, int] = {}
        positions = [
            position_of.setdefault(info.schema, len(position_of)) for info in self.episodes
        ]
        return np.array(positions, np.int64), list(position_of)

    def column(self, name: str) -> np.ndarray[Any, Any]:
        """Return a column of the table of all episodes; returns are NaN, since no row is read."""
        return column_of(self.episodes, name)

    def file_of(self, number: int, name: str, step: int) -> Path:
        """Return the file that holds a field of a step of episode `number`, for errors."""
        return self.path

    def video(self, number: int, name: str) -> VideoRange | None:
        """Return the part of a video that holds a field of episode `number`; None if the field is no video."""
        return None

    def rounded(self, number: int) -> dict[str, tuple[int, int]]:
        """Return the integers of episode `number` that reading rounded to floats so far.

        Returns:
            Field -> (number of changed values, largest difference).
        """
        return {}

    def removed(self, numbers: Iterable[int]) -> dict[int, DataFileError]:
        """Return the episodes of which a file was removed or replaced since the source was opened: number -> error."""
        return {}

    def check_present(self, numbers: Iterable[int]) -> None:
        """Raise the error of the first of some episodes of which a file was removed or replaced."""
        for error in self.removed(numbers).values():
            raise error

    @property
    def blocks(self) -> list[Block]:
        """The blocks of a folder of block files as it was opened, edits with their notes; [] of other formats."""
        return []
