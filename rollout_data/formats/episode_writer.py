"""`ForeignWriter`: base class of the writers of all formats.

An episode is written completely or not at all, even if the process is killed. The target contains a
conversion record: the source, the options, and a line of checksums per written episode. The report
lists data that a format cannot store, one line for each kind of change. A new format needs one file
in this folder and one line in `registry.py`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar, Protocol

import numpy as np

from storage.core.durable_files import read_text, replace_file
from storage.core.fields import Field, Schema
from storage.errors import UsageError

from ..sources.episode_info import ABSENT
from ..sources.video_range import VideoRange
from ..writing.conversion_record import (
    NOTE_NAME,
    ConversionNote,
    SummedEpisode,
    append_line,
    described,
    files_line,
    left_out_line,
    open_line,
    placed_line,
    shortened,
)
from ..writing.json_values import json_bytes
from ..writing.json_values import plain as plain
from ..writing.target_files import changed_file, check_file, file_sum
from .encoded_images import axes_of

Array = np.ndarray[Any, Any]


class EpisodeToWrite(Protocol):
    """Interface of the episodes that writers read, a subset of `Episode`."""

    id: str
    length: int
    schema: Schema
    texts: Collection[str]
    terminated: bool | None
    truncated: bool | None
    final: Collection[str]
    success: bool | None
    task: str
    metadata: Mapping[str, Any]

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Any:
        """Read steps `start:stop` of a field: `[stop - start, *shape]`, or a list of texts."""

    def video(self, name: str) -> VideoRange | None:
        """Return the video file and time range of a field; None if the field is not a video."""

    @property
    def final_observation(self) -> Any:
        """Observation after the last step: an array, a dict of arrays, or None if it is unknown."""


#: Names of metadata that are derived from the files and episodes of a recording.
DERIVED = frozenset((
    "format", "version", "fields", "obs_segments", "obs_disassemble_mapping", "success_traj_only",
    "total_timesteps", "total_trajectories",
))  # fmt: skip
_FLOATS = ("float16", "bfloat16", "float32", "float64")
#: Metadata values that mean "no value".
_NOTHING: tuple[Any, ...] = ("unknown", "", None, [], {})
#: Names of metadata that change when a recording gains episodes.
_OF_ALL = frozenset((
    "total", "total_chunks", "total_episodes", "total_frames", "total_samples", "total_steps", "total_tasks",
    "total_timesteps", "total_trajectories", "total_videos", "size", "splits", "tasks", "trajectory_counter",
))  # fmt: skip
_MAX_NOTE_BYTES = 1 << 30
#: Maximum bytes of metadata in a metadata.json. Readers accept twice as many, so that the
#: description of the fields fits too.
_MAX_METADATA_BYTES = 1 << 23


class ForeignWriter(ABC):
    """Base class of the writers of all formats.

    `registry.writer_class(name)(path, episodes, metadata, options)` creates a writer. The
    descriptions of all episodes are passed to the constructor, and the rows are read later. Call
    `add` with the episodes in order. An unfinished target of the same episodes is resumed, and
    `written` has the ids of its episodes.

    The target contains a conversion record (`writing/conversion_record.py`). The line of an episode
    is written to the record before the files of the episode are renamed to their final names, so
    every episode in the target has a line. A line without files is ignored.

    Attributes:
        format: Name of the format, a key of `registry.WRITERS`.
        path: File or folder of the target.
        episodes: All episodes to write, in the order of the target.
        metadata: Metadata of the recording.
        options: Arguments of `convert` for this format.
        conversion: Content of the conversion record in the target.
        written: Ids of the episodes in the target.
        num_earlier: Number of episodes that an earlier conversion had written. Episodes that have
            to be written again are included.
        left_out: Ids of unreadable episodes; set by `convert`.
    """

    format: ClassVar[str]
    #: Version of the written files. A target of a different version is not resumed.
    VERSION: ClassVar[int] = 2
    #: Maps each option of `convert` for this format to its default value.
    OPTIONS: ClassVar[Mapping[str, Any]] = {}
    #: Names of the recording's metadata that the format can store; None means all names.
    HOLDS: ClassVar[frozenset[str] | None] = frozenset()
    #: Whether the file layout is fixed before the first row is written. If an episode turns out to
    #: be unreadable, the conversion then restarts without this episode.
    is_laid_out_first: ClassVar[bool] = False
    #: Whether a conversion adds new episodes of the source to a complete target.
    can_grow: ClassVar[bool] = False
    #: Glob patterns of the written files and folders. A conversion that starts again removes them.
    MADE: ClassVar[tuple[str, ...]] = ()
    #: Names of files that exist as soon as the target has an episode.
    BEGUN: ClassVar[tuple[str, ...]] = ()
    #: Name of the file that is written last and marks the target as complete.
    LAST: ClassVar[str] = ""

    def __init__(
        self,
        path: Path,
        episodes: Sequence[EpisodeToWrite],
        metadata: Mapping[str, Any],
        options: Mapping[str, Any],
        conversion: ConversionNote | None = None,
    ) -> None:
        self.path = path
        self.episodes = episodes
        self.metadata = metadata
        self.options = self.all_options(options)
        self._noted: dict[str, list[str]] = {}
        self._casts: dict[tuple[str, str, str], _Cast] = {}
        self.conversion = self._own_note() if conversion is None else conversion
        self.left_out: set[str] = set(self.conversion.left_out)
        self._num_removed = 0

        is_new = self.begin_note()
        try:
            self.written: set[str] = self.begin() & self.conversion.rows.keys()
        except UsageError:
            # Nothing but the new conversion record was written. Its removal restores the target.
            if is_new:
                (self.note_folder / NOTE_NAME).unlink()
                with suppress(OSError):
                    self.note_folder.rmdir()
            raise
        self.num_earlier = len(self.written) or self._num_removed

        lost = [] if self.HOLDS is None else sorted(_meaningful(metadata) - self.HOLDS)
        if lost:
            change = f"metadata of the recording are left out: {', '.join(lost)}"
            self._noted[change] = [episode.id for episode in episodes]

    def _own_note(self) -> ConversionNote:
        """Load the conversion record of an unfinished target, or create a record for a new target.

        Raises:
            UsageError: The target is complete, or has files that are not part of a conversion.
        """
        earlier = self.noted(self.path)
        if earlier is not None and self.is_finished(self.path):
            raise occupied(self.path, "is the complete target of a conversion")
        note = self.planned(self.episodes, self.metadata, self.options)
        if earlier is not None:
            note.resume(earlier)
        return note

    @classmethod
    def all_options(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return all options of the format as JSON values. Options not passed have default values.

        Integers become floats, so that 20 equals 20.0. NaN is preserved.
        """
        values: dict[str, Any] = {}
        for name, option in {**cls.OPTIONS, **options}.items():
            value = option if isinstance(option, float) else plain(option)
            values[name] = float(value) if type(value) is int else value
        return values

    @classmethod
    def effective(
        cls,
        options: Mapping[str, Any],
        path: Path,
        episodes: Sequence[EpisodeToWrite],
        metadata: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Return the option values that a conversion of this recording uses.

        Values that the options leave open are derived from the recording. A conversion may be
        resumed with different options if they lead to the same values.

        Args:
            options: All options of the format, with default values.
            path: Path of the target.
            episodes: All episodes of the recording.
            metadata: Metadata of the recording.
        """
        return dict(options)

    @classmethod
    def planned(
        cls,
        episodes: Iterable[EpisodeToWrite],
        metadata: Mapping[str, Any],
        options: Mapping[str, Any],
    ) -> ConversionNote:
        """Return the conversion record to store in a new target, before any episode is written."""
        return ConversionNote(
            format=cls.format,
            version=cls.VERSION,
            options=plain(cls.all_options(options)),
            metadata=shortened(metadata, without=_OF_ALL),
            episodes=[described(episode) for episode in episodes],
        )

    @classmethod
    def noted(cls, path: Path) -> ConversionNote | None:
        """Return the conversion record in a target; None if the target is missing or empty.

        Raises:
            UsageError: The target has content, but no conversion record.
        """
        return note_in_folder(path, path)

    @classmethod
    def is_finished(cls, path: Path) -> bool:
        """Return whether a target with a conversion record is complete."""
        return False

    @classmethod
    def note_folder_of(cls, path: Path) -> Path:
        """Return the folder that contains the conversion record of a target."""
        return path

    @property
    def note_folder(self) -> Path:
        """Folder that contains the conversion record of this target."""
        return self.note_folder_of(self.path)

    @classmethod
    def check_files(cls, path: Path, note: ConversionNote, is_finished: bool) -> None:
        """Compare the files of a target with the sizes and checksums in its conversion record.

        The files of the last episode may be missing, because the line of an episode is written
        before its files get their final names.

        Raises:
            UsageError: A file was removed or changed after it was written.
        """
        folder = cls.note_folder_of(path)
        is_finished |= note.finish is not None
        for name in cls.BEGUN if note.rows else ():
            if not (folder / name).exists():
                raise changed_file(path, folder / name, "it was removed")
        for episode in note.rows:
            files = note.files.get(episode, {})
            first = next(iter(files), None)
            if first is None:
                continue
            if episode == note.unplaced and not (folder / first).exists():
                continue
            for name, noted_sum in files.items():
                check_file(path, folder / name, note.files_of_all.get(name, noted_sum))
        for name, noted_sum in note.files_of_all.items():
            if is_finished or name != cls.LAST:
                check_file(path, folder / name, noted_sum)

    def begin_note(self) -> bool:
        """Write the conversion record, with a line for each episode in the target.

        If the conversion record lists no episodes, the files of an earlier conversion are removed.

        Returns:
            Whether the target had no conversion record.
        """
        self.note_folder.mkdir(parents=True, exist_ok=True)
        place = self.note_folder / NOTE_NAME
        text = self.conversion.text()
        is_new = not place.exists()
        if not is_new and self.conversion.rows and _text_of(place) == text:
            return is_new
        # If the process is killed here, only this temporary file is left. `note_in_folder` treats
        # such a folder as empty.
        with replace_file(place, temporary=self.note_folder / f"{NOTE_NAME}.new") as new:
            new.write_text(text, "utf-8")
        if not is_new and not self.conversion.rows:
            for pattern in self.MADE:
                for path in self.note_folder.glob(pattern):
                    remove(path)
        return is_new

    def begin_again(self) -> None:
        """Remove all episodes from the target and its conversion record."""
        self._num_removed = len(self.conversion.rows)
        self.conversion.forget()
        self.begin_note()

    def note(self, episode: EpisodeToWrite, files: Mapping[str, Path] | None = None) -> None:
        """Append the checksums of an episode to the conversion record.

        Call this when the files of the episode are complete, before they are renamed.

        Args:
            episode: The episode.
            files: Maps the final name of each file of the episode to its temporary path. The first
                file is renamed last.

        Raises:
            DataFileError: A field is unreadable. Fields that the writer has not read are read here.
        """
        summed = episode if isinstance(episode, SummedEpisode) else SummedEpisode(episode)
        conversion = self.conversion
        sums = summed.sums()
        # An episode that is written again moves to the end, because `rows` is in writing order.
        conversion.rows.pop(episode.id, None)
        conversion.rows[episode.id] = sums
        conversion.files[episode.id] = {
            name: file_sum(path) for name, path in (files or {}).items()
        }
        conversion.stored[episode.id] = self.stored_sums(episode)
        conversion.unplaced = episode.id if files else ""
        self.save_line(episode.id, conversion.line_of(episode.id))

    def stored_sums(self, episode: EpisodeToWrite) -> dict[str, str]:
        """Map each HDF5 dataset to the checksum of an episode's rows; {} for other formats."""
        return {}

    def note_files(self, files: Mapping[str, Path], published: Collection[str] = ()) -> None:
        """Append checksums of shared files to the conversion record.

        A shared file contains data of all episodes. Call this before the last file is renamed.

        Args:
            files: Maps final names in the target to current paths.
            published: Ids of the episodes in these files.
        """
        sums = {name: file_sum(path) for name, path in files.items()}
        self.conversion.files_of_all.update(sums)
        self.conversion.published.update(published)
        append_line(self.note_folder / NOTE_NAME, files_line(sums, published), is_durable=True)

    def note_placed(self) -> None:
        """Record that the files of the last written episode were renamed to their final names."""
        if self.conversion.unplaced:
            append_line(self.note_folder / NOTE_NAME, placed_line())
            self.conversion.unplaced = ""

    def note_open(self) -> None:
        """Record that the files shared by all episodes are being rewritten.

        The recorded checksums of these files are dropped. `note_files` records new checksums.
        """
        append_line(self.note_folder / NOTE_NAME, open_line())
        self.conversion.files_of_all.clear()

    def note_finish(self) -> None:
        """Record that the target is complete. Call this after its last file was renamed."""
        append_line(self.note_folder / NOTE_NAME, files_line({}, finish={}), is_durable=True)

    def leave_out(self, episode: EpisodeToWrite) -> None:
        """Record that an episode is unreadable and left out."""
        self.left_out.add(episode.id)
        self.conversion.left_out.add(episode.id)
        if not self.is_laid_out_first:
            self.save_line(episode.id, left_out_line(episode.id))

    def save_line(self, episode: str, line: str) -> None:
        """Append the line of an episode to the conversion record."""
        append_line(self.note_folder / NOTE_NAME, line)

    @abstractmethod
    def begin(self) -> set[str]:
        """Create the target, or open an unfinished target. Return the ids of its episodes."""

    @abstractmethod
    def add(self, episode: EpisodeToWrite) -> None:
        """Write an episode and its line in the conversion record.

        After the return, the episode is in the target, even if the process is killed.

        Raises:
            DataFileError: The episode is unreadable. No part of the episode is in the target.
            UsageError: The format cannot store the episode.
        """

    @abstractmethod
    def close(self) -> None:
        """Write the files that all episodes share, and finish the target. Idempotent."""

    @property
    def report(self) -> dict[str, list[str]]:
        """Changes in order of occurrence, each with the ids of the changed episodes."""
        casts = {cast.text(*key): cast.episodes for key, cast in self._casts.items()}
        return {**self._noted, **casts}

    @property
    def is_complete(self) -> bool:
        """Whether the target contains all readable episodes."""
        done = self.written if self.is_laid_out_first else self.written | self.left_out
        return len(done) == len(self.episodes)

    def changed(self, what: str, episode: EpisodeToWrite, holds: Any = True) -> None:
        """Report a change that writing makes to an episode, such as a field that is left out.

        The report lists an episode once per change.

        Args:
            what: Description of the change, a line of the report.
            episode: The changed episode.
            holds: Whether the change happened. If false, nothing is added.
        """
        if not holds:
            return
        ids = self._noted.setdefault(what, [])
        if episode.id not in ids[-1:]:
            ids.append(episode.id)

    def fitting_metadata(self) -> dict[str, Any]:
        """Return the metadata of the recording, reduced to the size limit of metadata.json.

        If the metadata are too large, the largest values are left out.
        """
        metadata = {name: plain(value) for name, value in self.metadata.items()}
        sizes = {}
        for name, value in metadata.items():
            sizes[name] = json_bytes({name: value}, _MAX_METADATA_BYTES, indent=2)

        for name in sorted(sizes, key=sizes.__getitem__, reverse=True):
            if sum(sizes.values()) <= _MAX_METADATA_BYTES:
                break
            change = f"metadata {name!r} of the recording are left out: they are too large"
            for episode in self.episodes:
                self.changed(change, episode)
            del metadata[name]
            del sizes[name]
        return metadata

    def fitting(
        self,
        metadata: Mapping[str, Any],
        most_bytes: int,
        episode: EpisodeToWrite,
    ) -> dict[str, Any]:
        """Return the metadata of an episode, limited to `most_bytes` bytes of JSON.

        If the metadata are too large, the largest values are left out.
        """
        sizes = {}
        for name, value in metadata.items():
            sizes[name] = json_bytes(value, most_bytes) + len(json.dumps(name)) + 4

        while sum(sizes.values()) > most_bytes:
            # The last of several equally large values is removed first.
            name = max(reversed(sizes), key=sizes.__getitem__)
            self.changed(f"metadata {name!r} is left out: it is too large", episode)
            del sizes[name]
        return {name: value for name, value in metadata.items() if name in sizes}

    def reshaped(self, name: str, shape: tuple[int, ...], episode: EpisodeToWrite) -> None:
        """Report that readers of the target return a field with a different shape.

        For example, a scalar becomes a vector of one number.
        """
        own = episode.schema[name].shape if name in episode.schema else shape
        change = f"field {name!r} has the shape {list(shape)}, not {list(own)}"
        self.changed(change, episode, own != shape)

    def cast(self, rows: Any, dtype: Any, name: str, episode: EpisodeToWrite) -> Array:
        """Convert rows of a field to a dtype, and report the number of changed values."""
        values = np.asarray(rows)
        if values.dtype == dtype:
            return values
        with np.errstate(over="ignore", invalid="ignore"):
            converted = values.astype(dtype)
        num_changed, difference = _change(values, converted)
        if num_changed:
            key = (name, str(values.dtype), str(converted.dtype))
            self._casts.setdefault(key, _Cast()).add(num_changed, difference, episode.id)
        return converted

    def rounded(self, name: str, num_values: int, difference: int, episode: EpisodeToWrite) -> None:
        """Report integers that the reader of the source rounded to floats."""
        self._casts.setdefault((name, "integers", "float64"), _Cast()).add(
            num_values, difference, episode.id
        )

    def join(self, columns: Mapping[str, Any], dtype: Any, episode: EpisodeToWrite) -> Array:
        """Concatenate fields, each `[T, *shape]`, to one array `[T, sum of elements]`."""
        parts = [self.cast(rows, dtype, name, episode) for name, rows in columns.items()]
        return np.concatenate(
            [part.reshape(len(part), math.prod(part.shape[1:])) for part in parts], axis=1
        )


@dataclass
class _Cast:
    """Number of values that changed when a field was converted to another dtype.

    Attributes:
        num_values: Number of changed values.
        difference: Largest difference between an old and a new value.
        episodes: Ids of the episodes with changed values.
    """

    num_values: int = 0
    difference: float = 0
    episodes: list[str] = dataclasses.field(default_factory=list)

    def add(self, num_values: int, difference: float, episode: str) -> None:
        """Count changed values of an episode."""
        self.num_values += num_values
        self.difference = max(self.difference, difference)
        if episode not in self.episodes[-1:]:
            self.episodes.append(episode)

    def text(self, name: str, before: str, after: str) -> str:
        """Describe the change of field `name` from dtype `before` to `after`, for the report."""
        change = "1 value changes" if self.num_values == 1 else f"{self.num_values} values change"
        most = (
            str(self.difference) if isinstance(self.difference, int) else f"{self.difference:.6g}"
        )
        return f"field {name!r} ({before}) is written as {after}: {change}, by at most {most}"


#: Maps the bytes of a float dtype to n: all integers up to 2**n are exact in this dtype.
_EXACT_BITS = {2: 11, 4: 24, 8: 53}


def _change(before: Array, after: Array) -> tuple[int, float]:
    """Return the number of values that a dtype conversion changes, and the largest difference.

    A NaN that stays NaN is not a change.

    Args:
        before: Array of the original dtype.
        after: The same values, converted to another dtype.
    """
    old = before.reshape(-1)
    new = after.reshape(-1)
    if old.dtype.kind == "b":
        return 0, 0
    if old.dtype.kind == "f":
        with np.errstate(over="ignore", invalid="ignore"):
            is_changed = (old != new) & ~(np.isnan(old) & np.isnan(new))
            differences = np.abs(
                old[is_changed].astype(np.float64) - new[is_changed].astype(np.float64)
            )
        return len(differences), float(differences.max(initial=0))
    if new.dtype.kind == "f":
        # Smaller integers are exact in the float dtype. The slow loop below skips them.
        limit = 2 ** _EXACT_BITS[new.dtype.itemsize]
        is_inexact = (old > limit) | (old < -limit) if old.dtype.kind == "i" else old > limit
        old = old[is_inexact]
        new = new[is_inexact]

    # Differences are Python integers, because no numpy dtype can hold all differences of two 64-bit
    # integers.
    exact_differences: list[float] = []
    for value, changed in zip(old.tolist(), new.tolist(), strict=True):
        if value != changed:
            exact_differences.append(
                abs(int(changed) - value) if np.isfinite(changed) else math.inf
            )
    return len(exact_differences), max(exact_differences, default=0)


def note_in_folder(folder: Path, target: Path) -> ConversionNote | None:
    """Read the conversion record from a folder.

    The result is None if the target does not exist, or is an empty folder.

    Raises:
        UsageError: The target has content, but no conversion record.
    """
    place = folder / NOTE_NAME
    if place.is_file():
        note = ConversionNote.parse(read_text(place, max_bytes=_MAX_NOTE_BYTES))
        if note is None:
            raise occupied(target, f"has a damaged {NOTE_NAME!r}")
        return note
    if target.is_dir():
        if {path.name for path in target.iterdir()} - {f"{NOTE_NAME}.new"}:
            raise occupied(target, f"contains files but no {NOTE_NAME!r} of a conversion")
    elif target.exists():
        raise occupied(target, "is a file that no conversion wrote")
    return None


def _text_of(place: Path) -> str:
    """Return the text of a conversion record without duplicate lines; "" if it is damaged."""
    note = ConversionNote.parse(read_text(place, max_bytes=_MAX_NOTE_BYTES))
    return "" if note is None or note.has_damaged_lines else note.text()


def occupied(path: Path, state: str) -> UsageError:
    """Build the error for a target whose content must not be overwritten.

    Args:
        path: Path of the target.
        state: End of the sentence "target ...", such as "is a file".
    """
    return UsageError(
        f"target {str(path)!r} {state}. Choose an empty target, or remove the existing files."
    )


def remove(path: Path) -> None:
    """Remove a file or a folder with its content."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@dataclass(frozen=True)
class SharedFields:
    """Fields to write for every episode of a target.

    If an episode lacks a numeric field, the field is filled with False or NaN.

    Attributes:
        schema: Numeric fields of the target.
        texts: Text fields of the target.
        left_out: Maps the name of each omitted field to the reason.
    """

    schema: Schema
    texts: tuple[str, ...]
    left_out: Mapping[str, str]

    def filled(self, episode: EpisodeToWrite) -> list[str]:
        """Return the names of fields that an episode lacks. `read` fills them with False or NaN."""
        return [name for name in self.schema if name not in episode.schema]

    def absent(self, episode: EpisodeToWrite, read_name: Callable[[str], str] = str) -> list[str]:
        """Return the names of the fields that are filled with False or NaN in an episode.

        Writers store the names in the metadata of the episode under `ABSENT`, because the values of
        these fields were not recorded. Fields that an earlier conversion filled are included.

        Args:
            episode: Episode of the target.
            read_name: Function that maps the name of a field to its name in a reader of the target.
        """
        earlier = earlier_absent(episode)
        filled = [name for name in self.schema if name not in episode.schema or name in earlier]
        return [*map(read_name, filled), *parts_of_fields(earlier, self.schema)]

    def read(
        self, episode: EpisodeToWrite, name: str, start: int = 0, stop: int | None = None
    ) -> Array:
        """Read steps of a numeric field: `[stop - start, *shape]`.

        A missing field is read as False or NaN.
        """
        end = episode.length if stop is None else stop
        if name in episode.schema:
            return np.asarray(episode.read(name, start, end))
        field = self.schema[name]
        shape = (end - start, *field.shape)
        if field.dtype == "bool":
            return np.zeros(shape, bool)
        return np.full(shape, np.nan, "<f4" if field.dtype == "bfloat16" else field.numpy_dtype)

    def changes(self, episode: EpisodeToWrite) -> Iterator[str]:
        """Yield a line of the report for each filled or omitted field of an episode."""
        for name in self.filled(episode):
            value = "False" if self.schema[name].dtype == "bool" else "NaN"
            yield f"field {name!r} is {value} in episodes without it"
        for name, reason in self.left_out.items():
            if name in episode.schema or name in episode.texts:
                yield f"field {name!r} is left out: {reason}"


def earlier_absent(episode: EpisodeToWrite) -> list[str]:
    """Return the names of an episode's fields that an earlier conversion filled."""
    names: Any = plain(episode.metadata.get(ABSENT))
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def parts_of_fields(names: Iterable[str], schema: Mapping[str, Field]) -> list[str]:
    """Select the names of parts of a field, such as "a/b" if the schema has the field "a"."""
    return [
        name for name in names if any(str(group) in schema for group in PurePosixPath(name).parents)
    ]


def shared_fields(
    episodes: Sequence[EpisodeToWrite],
    depth: Collection[str] = (),
    has_one_form: bool = True,
    ignored: Collection[str] = (),
) -> SharedFields:
    """Choose the fields to write if all episodes of a target must have the same fields.

    Missing flags are filled with False, and missing floats with NaN. Rewards, actions, integers,
    texts and pictures are left out if an episode lacks them. Fields with several shapes or dtypes
    are left out too.

    Args:
        episodes: Episodes of the target.
        depth: Names of fields with depth pictures.
        has_one_form: Whether the target needs one dtype and shape per field. False keeps fields
            with several dtypes or shapes.
        ignored: Names of fields that the target computes itself. The result excludes these fields.

    Raises:
        UsageError: A field has the name of a group of fields.
    """
    # For each field: maps (dtype, shape) to the id of the first episode with this dtype and shape.
    forms: dict[str, dict[tuple[str, tuple[int, ...]], str]] = defaultdict(dict)
    fields: dict[str, Field] = {}
    counts: dict[str, int] = defaultdict(int)
    text_counts: dict[str, int] = defaultdict(int)
    for episode in episodes:
        for name, field in episode.schema.items():
            if name in ignored:
                continue
            fields.setdefault(name, field)
            forms[name].setdefault((field.dtype, field.shape), episode.id)
            counts[name] += 1
        for name in episode.texts:
            text_counts[name] += 1
    _check_no_group_is_field({**fields, **text_counts})

    left_out: dict[str, str] = {}
    for name, field in fields.items():
        if name in text_counts:
            left_out[name] = "it is a text in some episodes and a number in others"
        elif has_one_form and len(forms[name]) > 1:
            examples = []
            for (dtype, shape), episode_id in forms[name].items():
                examples.append(f"{dtype}{list(shape)} in episode {episode_id!r}")
            left_out[name] = f"it is {' and '.join(examples[:2])}"
        elif counts[name] < len(episodes) and not can_be_filled(field, depth):
            left_out[name] = "not all episodes have it"
    for name, count in text_counts.items():
        if name not in fields and count < len(episodes):
            left_out[name] = "not all episodes have it"

    kept = Schema(field for name, field in fields.items() if name not in left_out)
    kept_texts = tuple(name for name in text_counts if name not in left_out)
    return SharedFields(kept, kept_texts, left_out)


def _check_no_group_is_field(names: Collection[str]) -> None:
    """Raise `UsageError` if a field has the name of a group of fields: "a" and "a/b"."""
    for name in names:
        for group in map(str, PurePosixPath(name).parents):
            if group in names:
                raise UsageError(
                    f"field {name!r} cannot be written beside field {group!r}, because a name "
                    "cannot be both a field and a group. Rename one of the fields."
                )


def can_be_filled(field: Field, depth: Collection[str] = ()) -> bool:
    """Return whether a field may be filled with False or NaN in episodes that lack it.

    `depth` has the names of fields with depth pictures.
    """
    if field.name.partition("/")[0] in ("action", "reward"):
        return False
    if field.dtype == "bool":
        return len(field.shape) <= 1
    is_picture = field.name in depth or (len(field.shape) == 3 and axes_of(field.shape))
    return field.dtype in _FLOATS and not is_picture


def has_unknown_end(episode: EpisodeToWrite) -> bool:
    """Return whether the source does not state how the episode ended."""
    ends = (episode.terminated, episode.truncated)
    return None in ends and not any(ends) and not has_open_end(episode)


def has_open_end(episode: EpisodeToWrite) -> bool:
    """Return whether the source states that the recording stopped before the episode ended."""
    ends = (episode.terminated, episode.truncated)
    if ends == (None, None):
        return episode.metadata.get("ends") == "open"
    return ends == (False, False)


def finals_of(episode: EpisodeToWrite) -> dict[str, Array]:
    """Map observation fields to their values after the last step; {} if they are unknown."""
    final = episode.final_observation
    if final is None:
        return {}
    parts = final if isinstance(final, dict) else {"": final}
    fields = {}
    for part, value in parts.items():
        name = f"observation/{part}".rstrip("/")
        if name in episode.schema:
            fields[name] = np.asarray(value)
    return fields


def _meaningful(metadata: Mapping[str, Any]) -> set[str]:
    """Return the names of metadata values that are neither empty nor derived from the episodes."""
    names = set()
    for name, value in metadata.items():
        # `in` fails for arrays. An array always counts as a value.
        is_comparable = isinstance(value, (str, list, dict, type(None)))
        if name not in DERIVED and not (is_comparable and value in _NOTHING):
            names.add(name)
    return names
