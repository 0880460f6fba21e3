"""`FileSource`: the base class of readers of files of other systems."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from storage.core import arguments
from storage.errors import CorruptFileError, DataFileError

from .episode_info import EpisodeInfo
from .episode_source import EpisodeSource


class FileSource(EpisodeSource):
    """Reader of a file or folder of another system, created by `formats.open_foreign`.

    Each format implements `scan` and `read`. Opening a file reads the descriptions of episodes, and
    `read` reads rows. Nothing is written or executed. A reader keeps no file open, so it may be
    pickled. A damaged episode is left out and added to `problems`. If no episode can be read,
    opening raises `DataFileError`.

    Attributes:
        options: Checked arguments of `open` for this format.
    """

    #: Default values of the options of this format, which `open(path, **options)` accepts.
    OPTIONS: ClassVar[Mapping[str, Any]] = {}
    episodes: Sequence[EpisodeInfo] = ()

    def __init__(self, path: Path, options: Mapping[str, Any]) -> None:
        self.path = path
        self.options = {**self.OPTIONS, **options}
        self.metadata = {"lossy": [], "control_mode": "unknown"}
        self.problems = []
        self.advice = []
        self.splits: dict[str, Sequence[str]] = {}
        # Taken before the scan, so a change during the scan is noticed later.
        self._scanned_state = self.listing_state()
        if "on_bad_index" in self.OPTIONS:
            arguments.choice("on_bad_index", self.options["on_bad_index"], ("refuse", "rebuild"))
        self.episodes = self.scan()

    @abstractmethod
    def scan(self) -> Sequence[EpisodeInfo]:
        """Read the descriptions of all episodes from the file.

        Also sets `metadata`, `problems`, `advice` and `splits`.

        Raises:
            DataFileError: The file or folder cannot be read.
            UsageError: An option is invalid for this file.
        """

    def listing_state(self) -> Any:
        """Return a value that changes when episodes are added to the files or removed from them.

        None means that the files are listed only when they are opened.
        """
        return None

    def has_changed(self) -> bool:
        """Return whether episodes were added or removed since the files were opened."""
        return bool(self.listing_state() != self._scanned_state)

    def reopened(self) -> FileSource:
        """Return a new reader of the same files, in which known episodes keep their numbers."""
        return type(self)(self.path, self.options)

    def number_of(self, episode: int) -> int:
        """Return the number of an episode in the trajectory index, by its place in `episodes`."""
        return episode

    def rows_read_together(self, number: int, name: str) -> int | None:
        """Return how many consecutive steps of a field must be decoded to read one of them.

        The number is the steps per compressed chunk of the file, counted from step 0 of the
        episode. It is 1 if each step is decoded separately, such as an encoded picture. None means
        that callers may read many steps at once, because further steps cost little. Examples are
        small rows, and frames of a video, which are decoded from a key frame on.
        """
        return None

    def checked_some(self, episodes: list[EpisodeInfo], noun: str) -> list[EpisodeInfo]:
        """Check that a file contains at least one readable episode; return the episodes.

        Args:
            episodes: The readable episodes.
            noun: Name of episodes in this format, for the error.

        Raises:
            DataFileError: There are no episodes. The first problem is raised if there is one.
        """
        if episodes:
            return episodes
        if self.problems:
            raise self.problems[0]
        raise CorruptFileError(f"{str(self.path)!r} contains no {noun}.")

    def distrust(self, message: str) -> None:
        """Raise or report an error, since the index in the file contradicts the data.

        With the option `on_bad_index="rebuild"`, the error is only added to `problems`.

        Raises:
            CorruptFileError: `on_bad_index` is "refuse".
        """
        if self.options["on_bad_index"] == "rebuild":
            self.problems.append(CorruptFileError(message, kind="counts"))
            return
        advice = 'Pass on_bad_index="rebuild" to read the episodes without the index.'
        raise CorruptFileError(f"{message} {advice}", kind="counts")

    def problem(self, message: str, *, kind: str = "", episode: str = "") -> DataFileError:
        """Report data that were unreadable or left out. Returns the exception in `problems`."""
        error = DataFileError(message, kind=kind, episode=episode)
        self.problems.append(error)
        return error

    def advise(self, message: str, *, kind: str = "", episode: str = "") -> DataFileError:
        """Report suspicious data that are read unchanged. Returns the remark in `advice`."""
        remark = DataFileError(message, kind=kind, episode=episode)
        self.advice.append(remark)
        return remark
