"""`ForeignWriter`: base of the writers of all formats.

An episode is written whole or not at all, also when the process is killed. The report lists data
that a format cannot hold, one line for each kind of change. A format is one file here and one line
in `registry.py`.
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
    """The part of an `Episode` that writers use."""

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
        """Read steps of one field: `[stop - start, *shape]`, or a list of texts."""

    def video(self, name: str) -> VideoRange | None:
        """Return the place of a field's video; None if the field is not stored as video."""

    @property
    def final_observation(self) -> Any:
        """The observation after the last step: an array, a dict of arrays by flat names, or None."""


#: Metadata of a recording that follow from its files and episodes.
DERIVED = frozenset((
    "format", "version", "fields", "obs_segments", "obs_disassemble_mapping", "success_traj_only",
    "total_timesteps", "total_trajectories",
))  # fmt: skip
_FLOATS = ("float16", "bfloat16", "float32", "float64")
#: Values of metadata without content.
_NOTHING: tuple[Any, ...] = ("unknown", "", None, [], {})
#: Metadata of a recording that change when it gains episodes.
_OF_ALL = frozenset((
    "total", "total_chunks", "total_episodes", "total_frames", "total_samples", "total_steps", "total_tasks",
    "total_timesteps", "total_trajectories", "total_videos", "size", "splits", "tasks", "trajectory_counter",
))  # fmt: skip
_MAX_NOTE_BYTES = 1 << 30
#: Bytes of metadata in a metadata.json. Readers accept twice as many, and fields take the rest.
_MAX_METADATA_BYTES = 1 << 23


class ForeignWriter(ABC):
    """Write episodes one after the other.

    `registry.writer_class(name)(path, episodes, metadata, options)` creates a writer. All episodes
    are known from the beginning, without their rows, and are passed to `add` in their order. An
    unfinished target of the same episodes is resumed: `written` names the episodes that it has
    already.

    The target contains a note (`writing/conversion_record.py`). An episode is noted before its
    files take their places, so every present episode has a line in the note. A line without its
    episode is ignored.

    Attributes:
        format: Key of `registry.WRITERS`.
        path: The file or folder.
        episodes: All episodes of the target.
        metadata: Metadata of the recording.
        options: Arguments of `convert` for this format.
        conversion: The note of the target.
        written: Ids of the episodes in the target.
        num_earlier: Episodes that an earlier conversion had written, also if they have to be
            written again.
        left_out: Ids of the episodes that cannot be read; `convert` adds them.
    """

    format: ClassVar[str]
    #: Version of the written files. A conversion of another version is not resumed.
    VERSION: ClassVar[int] = 2
    #: Options of `convert` for this format -> default.
    OPTIONS: ClassVar[Mapping[str, Any]] = {}
    #: Metadata of a recording that the format can hold; None means all.
    HOLDS: ClassVar[frozenset[str] | None] = frozenset()
    #: Whether all places are chosen before a row is written. Leaving out an episode then begins
    #: again without it.
    is_laid_out_first: ClassVar[bool] = False
    #: Whether new episodes of the source are added to a complete target.
    can_grow: ClassVar[bool] = False
    #: Patterns of files and folders in the target that are removed before a conversion begins
    #: again.
    MADE: ClassVar[tuple[str, ...]] = ()
    #: Files that exist once the target has an episode.
    BEGUN: ClassVar[tuple[str, ...]] = ()
    #: File that marks the target as complete.
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
            # Nothing but the note was written so far.
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
        """Return a new note, or that of an unfinished target.

        Raises:
            UsageError: The target is complete, or holds other files.
        """
        earlier = self.noted(self.path)
        if earlier is not None and self.is_finished(self.path):
            raise occupied(self.path, "the complete target of a conversion")
        note = self.planned(self.episodes, self.metadata, self.options)
        if earlier is not None:
            note.resume(earlier)
        return note

    @classmethod
    def all_options(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return options with defaults as JSON values.

        NaN stays, and integers become floats: 20 equals 20.0.
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
        """Return the effect of options on a recording.

        Options with equal effects may resume each other's targets.

        Args:
            options: Result of `all_options`.
            path: The target.
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
        """Return the note of a conversion before its first episode."""
        return ConversionNote(
            format=cls.format,
            version=cls.VERSION,
            options=plain(cls.all_options(options)),
            metadata=shortened(metadata, without=_OF_ALL),
            episodes=[described(episode) for episode in episodes],
        )

    @classmethod
    def noted(cls, path: Path) -> ConversionNote | None:
        """Return the note in a target; None if the target does not exist or is empty.

        Raises:
            UsageError: The target has other content.
        """
        return note_in_folder(path, path)

    @classmethod
    def is_finished(cls, path: Path) -> bool:
        """Return whether a target with a note is complete."""
        return False

    @classmethod
    def note_folder_of(cls, path: Path) -> Path:
        """Return the folder with the note of a target."""
        return path

    @property
    def note_folder(self) -> Path:
        """The folder with the note."""
        return self.note_folder_of(self.path)

    @classmethod
    def check_files(cls, path: Path, note: ConversionNote, is_finished: bool) -> None:
        """Compare the files of a target with the sizes and checksums in the note.

        The files of the last episode may be missing, since an episode is noted before its files
        take their places.

        Raises:
            UsageError: A file was removed or changed after it was written.
        """
        folder = cls.note_folder_of(path)
        is_finished |= note.finish is not None
        for name in cls.BEGUN if note.rows else ():
            if not (folder / name).exists():
                raise changed_file(path, folder / name, "a removed file")
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
        """Write the note with the lines of the episodes in the target.

        If there are none, remove earlier files.

        Returns:
            Whether the target had no note.
        """
        self.note_folder.mkdir(parents=True, exist_ok=True)
        place = self.note_folder / NOTE_NAME
        text = self.conversion.text()
        is_new = not place.exists()
        if not is_new and self.conversion.rows and _text_of(place) == text:
            return is_new
        # A folder that holds nothing but this temporary file counts as empty, see `note_in_folder`.
        with replace_file(place, temporary=self.note_folder / f"{NOTE_NAME}.new") as new:
            new.write_text(text, "utf-8")
        if not is_new and not self.conversion.rows:
            for pattern in self.MADE:
                for path in self.note_folder.glob(pattern):
                    remove(path)
        return is_new

    def begin_again(self) -> None:
        """Remove all episodes from the target and its note."""
        self._num_removed = len(self.conversion.rows)
        self.conversion.forget()
        self.begin_note()

    def note(self, episode: EpisodeToWrite, files: Mapping[str, Path] | None = None) -> None:
        """Note the checksums of an episode.

        To be called when its files are written, before they take their places.

        Args:
            episode: The episode.
            files: Names of its files in the target -> current path. The first file takes its place
                last.

        Raises:
            DataFileError: A field that the writer did not read cannot be read.
        """
        summed = episode if isinstance(episode, SummedEpisode) else SummedEpisode(episode)
        conversion = self.conversion
        sums = summed.sums()
        conversion.rows.pop(episode.id, None)  # The episode moves to the end of the note.
        conversion.rows[episode.id] = sums
        conversion.files[episode.id] = {
            name: file_sum(path) for name, path in (files or {}).items()
        }
        conversion.stored[episode.id] = self.stored_sums(episode)
        conversion.unplaced = episode.id if files else ""
        self.save_line(episode.id, conversion.line_of(episode.id))

    def stored_sums(self, episode: EpisodeToWrite) -> dict[str, str]:
        """Return the checksum of each dataset of an episode in an HDF5 target."""
        return {}

    def note_files(self, files: Mapping[str, Path], published: Collection[str] = ()) -> None:
        """Note files that belong to all episodes, before the last file takes its place.

        Args:
            files: Names in the target -> current path.
            published: Ids of episodes that are in these files.
        """
        sums = {name: file_sum(path) for name, path in files.items()}
        self.conversion.files_of_all.update(sums)
        self.conversion.published.update(published)
        append_line(self.note_folder / NOTE_NAME, files_line(sums, published), is_durable=True)

    def note_placed(self) -> None:
        """Note that the files of the last episode have taken their places."""
        if self.conversion.unplaced:
            append_line(self.note_folder / NOTE_NAME, placed_line())
            self.conversion.unplaced = ""

    def note_open(self) -> None:
        """Note that the files of all episodes are being rewritten, until `note_files`."""
        append_line(self.note_folder / NOTE_NAME, open_line())
        self.conversion.files_of_all.clear()

    def note_finish(self) -> None:
        """Note that the target is complete, after its last file took its place."""
        append_line(self.note_folder / NOTE_NAME, files_line({}, finish={}), is_durable=True)

    def leave_out(self, episode: EpisodeToWrite) -> None:
        """Note that an episode cannot be read."""
        self.left_out.add(episode.id)
        self.conversion.left_out.add(episode.id)
        if not self.is_laid_out_first:
            self.save_line(episode.id, left_out_line(episode.id))

    def save_line(self, episode: str, line: str) -> None:
        """Append the line of an episode to the note."""
        append_line(self.note_folder / NOTE_NAME, line)

    @abstractmethod
    def begin(self) -> set[str]:
        """Create the target, or open an unfinished one. Returns the ids of the episodes in it."""

    @abstractmethod
    def add(self, episode: EpisodeToWrite) -> None:
        """Write an episode and `note` it.

        Afterwards the target has it, even if the process is killed.

        Raises:
            DataFileError: The episode cannot be read. The target has no part of it.
            UsageError: The format cannot hold the episode.
        """

    @abstractmethod
    def close(self) -> None:
        """Write what concerns all episodes. Idempotent."""

    @property
    def report(self) -> dict[str, list[str]]:
        """Changes and omissions -> ids of the episodes, in the order of their first occurrence."""
        casts = {cast.text(*key): cast.episodes for key, cast in self._casts.items()}
        return {**self._noted, **casts}

    @property
    def is_complete(self) -> bool:
        """Whether the target has all episodes that can be read."""
        done = self.written if self.is_laid_out_first else self.written | self.left_out
        return len(done) == len(self.episodes)

    def changed(self, what: str, episode: EpisodeToWrite, holds: Any = True) -> None:
        """Add a change of an episode to the report, once per episode.

        Args:
            what: Line of the report.
            episode: The episode.
            holds: Whether the change took place; if false, nothing is added.
        """
        if not holds:
            return
        ids = self._noted.setdefault(what, [])
        if episode.id not in ids[-1:]:
            ids.append(episode.id)

    def fitting_metadata(self) -> dict[str, Any]:
        """Return the metadata of the recording for metadata.json.

        If they are too large, the largest are left out.
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
        """Return the metadata of an episode in at most `most_bytes` as JSON.

        The largest are left out.
        """
        sizes = {}
        for name, value in metadata.items():
            sizes[name] = json_bytes(value, most_bytes) + len(json.dumps(name)) + 4

        while sum(sizes.values()) > most_bytes:
            name = max(reversed(sizes), key=sizes.__getitem__)  # Of equal sizes the first stays.
            self.changed(f"metadata {name!r} is left out: it is too large", episode)
            del sizes[name]
        return {name: value for name, value in metadata.items() if name in sizes}

    def reshaped(self, name: str, shape: tuple[int, ...], episode: EpisodeToWrite) -> None:
        """Report a field whose steps are read with another shape: a number as a vector of one, or the reverse."""
        own = episode.schema[name].shape if name in episode.schema else shape
        change = f"field {name!r} has the shape {list(shape)}, not {list(own)}"
        self.changed(change, episode, own != shape)

    def cast(self, rows: Any, dtype: Any, name: str, episode: EpisodeToWrite) -> Array:
        """Convert rows of a field to a dtype. The report counts the values that change."""
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
        """Add integers that the reader of the source rounded to floats to the report."""
        self._casts.setdefault((name, "integers", "float64"), _Cast()).add(
            num_values, difference, episode.id
        )

    def join(self, columns: Mapping[str, Any], dtype: Any, episode: EpisodeToWrite) -> Array:
        """Concatenate fields: name -> `[T, *shape]` to `[T, sum of elements]` of one dtype."""
        parts = [self.cast(rows, dtype, name, episode) for name, rows in columns.items()]
        return np.concatenate(
            [part.reshape(len(part), math.prod(part.shape[1:])) for part in parts], axis=1
        )


@dataclass
class _Cast:
    """Values of a field that a conversion to another dtype changed.

    Attributes:
        num_values: Changed values.
        difference: Largest difference between an old and a new value.
        episodes: Ids of their episodes.
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
        """Describe the change for the report."""
        change = "1 value changes" if self.num_values == 1 else f"{self.num_values} values change"
        most = (
            str(self.difference) if isinstance(self.difference, int) else f"{self.difference:.6g}"
        )
        return f"field {name!r} ({before}) is written as {after}: {change}, by at most {most}"


#: Bytes of a float -> the power of 2 up to which it represents all integers.
_EXACT_BITS = {2: 11, 4: 24, 8: 53}


def _change(before: Array, after: Array) -> tuple[int, float]:
    """Return the number of values that a conversion to another dtype changed, and the largest difference."""
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
        limit = 2 ** _EXACT_BITS[new.dtype.itemsize]
        is_inexact = (old > limit) | (old < -limit) if old.dtype.kind == "i" else old > limit
        old = old[is_inexact]
        new = new[is_inexact]

    # Python's integers, since no dtype of numpy holds every difference of two 64-bit integers.
    exact_differences: list[float] = []
    for value, changed in zip(old.tolist(), new.tolist(), strict=True):
        if value != changed:
            exact_differences.append(
                abs(int(changed) - value) if np.isfinite(changed) else math.inf
            )
    return len(exact_differences), max(exact_differences, default=0)


def note_in_folder(folder: Path, target: Path) -> ConversionNote | None:
    """Return the note in a folder of a target.

    None if the target does not exist, or is an empty folder.

    Raises:
        UsageError: The target has other content.
    """
    place = folder / NOTE_NAME
    if place.is_file():
        note = ConversionNote.parse(read_text(place, max_bytes=_MAX_NOTE_BYTES))
        if note is None:
            raise occupied(target, f"a folder whose {NOTE_NAME!r} cannot be read")
        return note
    if target.is_dir():
        if {path.name for path in target.iterdir()} - {f"{NOTE_NAME}.new"}:
            raise occupied(target, f"a folder without {NOTE_NAME!r}")
    elif target.exists():
        raise occupied(target, "a file")
    return None


def _text_of(place: Path) -> str:
    """Return the text of a note without repeated lines; "" if the note is damaged."""
    note = ConversionNote.parse(read_text(place, max_bytes=_MAX_NOTE_BYTES))
    return "" if note is None or note.has_damaged_lines else note.text()


def occupied(path: Path, got: str) -> UsageError:
    """Return the error of a target that has other content."""
    expected = "an empty folder, or one of an earlier conversion"
    advice = "Choose another place, or remove it"
    return UsageError("write", repr(str(path)), expected, got, advice)


def remove(path: Path) -> None:
    """Remove a file or a folder with its content."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@dataclass(frozen=True)
class SharedFields:
    """Fields of a target in which every episode has the same fields. `shared_fields` creates them.

    Attributes:
        schema: Numeric fields of the target.
        texts: Text fields of the target.
        left_out: Fields that the target does not have -> reason.
    """

    schema: Schema
    texts: tuple[str, ...]
    left_out: Mapping[str, str]

    def filled(self, episode: EpisodeToWrite) -> list[str]:
        """Return the fields that are missing from an episode.

        `read` returns False or NaN for them.
        """
        return [name for name in self.schema if name not in episode.schema]

    def absent(self, episode: EpisodeToWrite, read_name: Callable[[str], str] = str) -> list[str]:
        """Return the fields to note under `ABSENT`: fields that this or an earlier conversion filled.

        Args:
            episode: Episode of the target.
            read_name: Returns the name under which a field of the target is read.
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
        """Yield a line of the report for each filled and each omitted field of an episode."""
        for name in self.filled(episode):
            value = "False" if self.schema[name].dtype == "bool" else "NaN"
            yield f"field {name!r} is {value} in episodes that lack it"
        for name, reason in self.left_out.items():
            if name in episode.schema or name in episode.texts:
                yield f"field {name!r} is left out: {reason}"


def earlier_absent(episode: EpisodeToWrite) -> list[str]:
    """Return the fields that an earlier conversion noted under `ABSENT`."""
    names: Any = plain(episode.metadata.get(ABSENT))
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def parts_of_fields(names: Iterable[str], schema: Mapping[str, Field]) -> list[str]:
    """Return the names below a field of a schema, such as "a/b" below the field "a"."""
    return [
        name for name in names if any(str(group) in schema for group in PurePosixPath(name).parents)
    ]


def shared_fields(
    episodes: Sequence[EpisodeToWrite],
    depth: Collection[str] = (),
    has_one_form: bool = True,
    ignored: Collection[str] = (),
) -> SharedFields:
    """Choose the fields of a target in which every episode has the same fields.

    Missing flags are filled with False, and missing floats with NaN. Rewards, actions, integers,
    texts and pictures that some episodes lack are left out. So are fields that differ in shape or
    dtype.

    Args:
        episodes: Episodes of the target.
        depth: Fields of depth pictures.
        has_one_form: Whether the target needs one dtype and shape per field. False keeps fields
            that differ.
        ignored: Fields that the target computes itself. They are in no part of the result.

    Raises:
        UsageError: A field has the name of a group of fields.
    """
    # Field -> its forms -> the first episode that has this form.
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
                expected = f"no field {group!r} in any episode"
                raise UsageError(
                    "write", f"the field {name!r}", expected, "both", "Rename one of them"
                )


def can_be_filled(field: Field, depth: Collection[str] = ()) -> bool:
    """Return whether False or NaN may replace a missing field.

    `depth` has the names of depth images.
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
    """Return the observation after the last step: field name -> `[*shape]`; {} if there is none."""
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
    """Return the names of metadata that have content and do not follow from the episodes."""
    names = set()
    for name, value in metadata.items():
        # Arrays do not compare as a whole. They count as content.
        is_comparable = isinstance(value, (str, list, dict, type(None)))
        if name not in DERIVED and not (is_comparable and value in _NOTHING):
            names.add(name)
    return names
