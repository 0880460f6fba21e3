"""Episodes of another system's files: what each reader gives, whatever the format.

One rule: opening reads descriptions, `read` reads rows, and nothing is written, executed or guessed. What a file does
not tell is None, what it lacks is absent. A format is one file here and one line in `formats.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from storage.core import arguments
from storage.core.fields import Schema
from storage.errors import CorruptFileError, DataFileError, RolloutDataError, UsageError

from .video_range import VideoRange

Int64s = np.ndarray[Any, np.dtype[np.int64]]
NO_FIELDS = Schema([])
#: Metadata of a converted episode: names of its fields that were False or NaN because the source lacks them.
ABSENT = "absent_fields"


@dataclass(frozen=True, eq=False)
class EpisodeInfo:
    """What is known of an episode without reading a row.

    Attributes:
        name: As in the file: "demo_10", "17".
        length: Steps T; at least 1.
        schema: Its numeric fields, one row per step: "action", "reward", "observation" where the file has a single
            array, otherwise "observation/<name>"; any other field by its name in the file. Names are those of the
            source without a leading "observation.", "observations/" or "obs/"; nested ones are joined by "/".
        texts: Names of its text fields, one text per step.
        final: Fields of the observation after the last step, as named in `schema` and `texts`; empty where the file has
            none. `is_text` marks a text.
        terminated, truncated: How it ended; None where the file does not tell.
        success: None where the file does not tell.
        task: What was to be done, in words; "".
        metadata: Anything else that belongs to it: plain values, texts and small arrays.
        source: What the reader needs to find it again.
    """

    name: str
    length: int
    schema: Schema
    texts: tuple[str, ...] = ()
    final: Schema = NO_FIELDS
    terminated: bool | None = None
    truncated: bool | None = None
    success: bool | None = None
    task: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    source: Any = None


class ForeignReader(ABC):
    """The episodes of one file or folder; made by `formats.open_foreign`.

    A reader may be pickled, and used in a forked process: it keeps no open file. Opening checks what it reads; damage
    of one episode leaves that episode out and is a problem, damage of the whole is a `DataFileError`.

    Attributes:
        format: Key of `formats.registry.FORMATS`.
        path: The file or folder, absolute.
        options: Arguments of `open` for this format, checked.
        metadata: Of the whole: what the file says, and "lossy", the names of fields that were stored with loss, and
            "control_mode", how actions control the robot, "unknown" where the file does not tell.
        episodes: In the order of their numbers (never of their names as text).
        problems: Data that were not read, were repaired or were left out, each as an error that was not raised.
        advice: Remarks on data that are read as they are stored, such as actions that were copied; the same form.
        splits: Name -> names of episodes, where the file names parts of itself ("train", "valid"); they may overlap.
        kind: Kind of source that reads folders of our own; None of other formats.
    """

    format: str
    #: Names of the arguments that `open(path, **options)` takes for this format, with their defaults.
    OPTIONS: ClassVar[Mapping[str, Any]] = {}
    kind: Any = None

    def __init__(self, path: Path, options: Mapping[str, Any]) -> None:
        self.path, self.options = path, {**self.OPTIONS, **options}
        self.metadata: dict[str, Any] = {"lossy": [], "control_mode": "unknown"}
        self.problems: list[RolloutDataError] = []
        self.advice: list[RolloutDataError] = []
        self.splits: dict[str, Sequence[str]] = {}
        if "on_bad_index" in self.OPTIONS:
            arguments.choice("open", "on_bad_index", self.options["on_bad_index"], ("refuse", "rebuild"))
        self.episodes: Sequence[EpisodeInfo] = self.scan()

    @abstractmethod
    def scan(self) -> Sequence[EpisodeInfo]:
        """Read the descriptions: fill `metadata`, `problems`, `advice` and `splits`, give the episodes.

        Raises:
            DataFileError: Nothing can be read.
            UsageError: The options do not fit.
        """

    @abstractmethod
    def read(self, number: int, name: str, start: int, stop: int) -> Any:
        """Read the steps `start:stop` of one field of episode `number`, which is in range.

        Returns:
            `[stop - start, *shape]` of the field's dtype, bfloat16 as float32; may be a read-only map of the file. Of
            texts a list of str.

        Raises:
            DataFileError: They cannot be read.
        """

    def file_of(self, number: int, name: str, step: int) -> Path:
        """Return the file that holds a field of a step of episode `number`, for errors."""
        return self.path

    def rows_read_together(self, number: int, name: str) -> int | None:
        """Return how many consecutive steps of a field are decoded together, counted from step 0 of the episode.

        It is 1 where each row is decoded by itself, as an encoded picture is. None means that neighbours cost little
        more, as those of small rows and of a video do.
        """
        return None

    def read_fields(self, number: int, names: Sequence[str], start: int, stop: int) -> dict[str, Any]:
        """Read several fields as `read` does: name -> values. A reader that can opens its file once for them."""
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
        return parts[0] if len(parts) == 1 else {name: np.concatenate([part[name] for part in parts]) for name in names}

    def schemas(self) -> tuple[Int64s, list[Schema]]:
        """Which fields each episode has: int64 `[num_episodes]`, places in the list of schemas."""
        places: dict[Schema, int] = {}
        which = [places.setdefault(info.schema, len(places)) for info in self.episodes]
        return np.array(which, np.int64), list(places)

    def read_final(self, number: int, name: str) -> Any:
        """Read a field of the observation after the last step, of those in `EpisodeInfo.final`: `[*shape]` or a str."""
        where = f"of episode {self.episodes[number].name!r} of {str(self.path)!r}"
        got = "no such observation"
        raise UsageError("read the final observation", where, f"a format with {name!r}", got)

    def video(self, number: int, name: str) -> VideoRange | None:
        """Return where the video of a field of episode `number` is; None if the field is not stored as video."""
        return None

    def rounded(self, number: int) -> dict[str, tuple[int, int]]:
        """Return the integers of episode `number` that reading rounded to floats so far.

        Returns:
            Field -> (number of changed values, largest difference).
        """
        return {}

    def checked_some(self, episodes: list[EpisodeInfo], what: str) -> list[EpisodeInfo]:
        """Return the episodes.

        Raises:
            DataFileError: There is none; the first problem, if there is one.
        """
        if not episodes:
            raise (self.problems or [CorruptFileError("read", repr(str(self.path)), what, "none")])[0]
        return episodes

    def distrust(self, where: str, expected: str, got: str, advice: str = "") -> None:
        """Refuse an index that contradicts its data, or note it if `on_bad_index` is "rebuild".

        Raises:
            CorruptFileError: It is not.
        """
        is_refused = self.options["on_bad_index"] == "refuse"
        advice += f'{". " if advice else ""}Open it with on_bad_index="rebuild" to read what is there' * is_refused
        error = CorruptFileError("believe", where, expected[:200], got[:200], advice).of("counts")
        if is_refused:
            raise error
        self.problems.append(error)

    def problem(self, action: str, where: str, expected: str, got: str, advice: str = "") -> DataFileError:
        """Note data that were not read, were repaired or were left out; returns the problem."""
        noted = DataFileError(action, where, expected, got, advice)
        self.problems.append(noted)
        return noted

    def advise(self, action: str, where: str, expected: str, got: str, advice: str = "") -> DataFileError:
        """Note a remark on data that are read as they are stored; returns it."""
        noted = DataFileError(action, where, expected, got, advice)
        self.advice.append(noted)
        return noted
