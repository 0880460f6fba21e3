"""`FileSource`: the base class of the readers of other systems' files."""

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
    """The episodes of a file or folder of another system; created by `formats.open_foreign`.

    A format implements `scan` and `read`. Opening reads descriptions, `read` reads rows; nothing is
    written or executed. It keeps no open file, so that it may be pickled. Damage of one episode
    leaves that episode out and is a problem, damage of the whole is a `DataFileError`.

    Attributes:
        options: Arguments of `open` for this format, checked.
    """

    #: Names of the arguments that `open(path, **options)` takes for this format, with their
    #: defaults.
    OPTIONS: ClassVar[Mapping[str, Any]] = {}
    episodes: Sequence[EpisodeInfo] = ()

    def __init__(self, path: Path, options: Mapping[str, Any]) -> None:
        self.path = path
        self.options = {**self.OPTIONS, **options}
        self.metadata = {"lossy": [], "control_mode": "unknown"}
        self.problems = []
        self.advice = []
        self.splits: dict[str, Sequence[str]] = {}
        if "on_bad_index" in self.OPTIONS:
            arguments.choice(
                "open", "on_bad_index", self.options["on_bad_index"], ("refuse", "rebuild")
            )
        self.episodes = self.scan()

    @abstractmethod
    def scan(self) -> Sequence[EpisodeInfo]:
        """Read the descriptions: fill `metadata`, `problems`, `advice` and `splits`, and return the episodes.

        Raises:
            DataFileError: Nothing can be read.
            UsageError: The options do not fit.
        """

    def rows_read_together(self, number: int, name: str) -> int | None:
        """Return how many consecutive steps of a field are decoded together, counted from step 0 of the episode.

        It is 1 where each row is decoded by itself, as an encoded picture is. None means that
        neighbours cost little more, as those of small rows and of a video do.
        """
        return None

    def checked_some(self, episodes: list[EpisodeInfo], what: str) -> list[EpisodeInfo]:
        """Return the episodes.

        Raises:
            DataFileError: There is none; the first problem, if there is one.
        """
        if not episodes:
            raise (self.problems or [CorruptFileError("read", repr(str(self.path)), what, "none")])[
                0
            ]
        return episodes

    def distrust(self, where: str, expected: str, got: str, advice: str = "") -> None:
        """Refuse an index that contradicts its data, or note it if `on_bad_index` is "rebuild".

        Raises:
            CorruptFileError: `on_bad_index` is "refuse".
        """
        is_refused = self.options["on_bad_index"] == "refuse"
        if is_refused:
            rebuild = 'Open it with on_bad_index="rebuild" to read what is there'
            advice = f"{advice}. {rebuild}" if advice else rebuild
        error = CorruptFileError("believe", where, expected[:200], got[:200], advice).of("counts")
        if is_refused:
            raise error
        self.problems.append(error)

    def problem(
        self, action: str, where: str, expected: str, got: str, advice: str = ""
    ) -> DataFileError:
        """Note data that were not read, were repaired or were left out; return the problem."""
        noted = DataFileError(action, where, expected, got, advice)
        self.problems.append(noted)
        return noted

    def advise(
        self, action: str, where: str, expected: str, got: str, advice: str = ""
    ) -> DataFileError:
        """Note a remark on data that are read as they are stored; return it."""
        noted = DataFileError(action, where, expected, got, advice)
        self.advice.append(noted)
        return noted
