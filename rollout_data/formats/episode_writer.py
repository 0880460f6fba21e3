"""Writing episodes as another system's files: what each writer does, whatever the format.

One rule: an episode is written whole or not at all, also when the process is killed; what a format cannot hold is in
the report, once for each kind of it. A format is one file here and one line in `formats.py`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar, Protocol

import numpy as np

from storage.core.durable_files import read_text, sync_path
from storage.core.fields import Field, Schema
from storage.errors import UsageError

from ..sources.episode_reader import ABSENT
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
    """What a writer is given: an `Episode` of any recording."""

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
        """Return where the video of a field is; None if the field is not stored as video."""

    @property
    def final_observation(self) -> Any:
        """The observation after the last step: an array, a dict of arrays by flat names, or None."""


#: What metadata of a recording say of its files, which follows from the episodes.
DERIVED = frozenset((
    "format", "version", "fields", "obs_segments", "obs_disassemble_mapping", "success_traj_only",
    "total_timesteps", "total_trajectories",
))  # fmt: skip
_FLOATS = ("float16", "bfloat16", "float32", "float64")
#: Metadata that tell nothing.
_NOTHING: tuple[Any, ...] = ("unknown", "", None, [], {})


#: Metadata of a recording that change when it gains episodes.
_OF_ALL = frozenset((
    "total", "total_chunks", "total_episodes", "total_frames", "total_samples", "total_steps", "total_tasks",
    "total_timesteps", "total_trajectories", "total_videos", "size", "splits", "tasks", "trajectory_counter",
))  # fmt: skip
_MAX_NOTE_BYTES = 1 << 30
#: Of a metadata.json that is read up to twice of it: fields take the rest.
_MAX_METADATA_BYTES = 1 << 23


class ForeignWriter(ABC):
    """Write episodes one after the other; made by `formats.writer_class(name)(path, episodes, metadata, options)`.

    All are known from the beginning, without a row of theirs, and are given to `add` in their order. A path that this
    class has begun with the same episodes is taken up: `written` tells which are there already.

    The target has a note inside itself (`conversion_note.py`). An episode is noted before it becomes present, so an
    episode that is present without a line in the note does not exist; a line without its episode counts as nothing.

    Attributes:
        format: Key of `formats.WRITERS`.
        path: The file or folder.
        episodes: All that are to be written.
        metadata: Of the recording that is written.
        options: Arguments of `convert` for this format.
        conversion: The note of the target.
        written: Ids of the episodes that are there.
        num_earlier: Episodes that an earlier conversion had written, also if they have to be written again.
        left_out: Ids of those whose `add` failed, as they cannot be read; `convert` fills it.
    """

    format: ClassVar[str]
    #: Counts changes of what this class writes: another version does not resume a conversion.
    VERSION: ClassVar[int] = 2
    #: Names of the arguments that `convert(..., **options)` takes for this format, with their defaults.
    OPTIONS: ClassVar[Mapping[str, Any]] = {}
    #: Names in the metadata of a recording that the format holds; None is all.
    HOLDS: ClassVar[frozenset[str] | None] = frozenset()
    #: All places are chosen before a row is written: leaving out an episode means to begin again without it.
    is_laid_out_first: ClassVar[bool] = False
    #: A complete target takes episodes that its source has gained.
    can_grow: ClassVar[bool] = False
    #: Patterns of the files and folders in the target that are removed to begin again.
    MADE: ClassVar[tuple[str, ...]] = ()
    #: Files that exist as soon as an episode exists.
    BEGUN: ClassVar[tuple[str, ...]] = ()
    #: The file that makes a target complete.
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
        except UsageError:  # before anything else was written
            if is_new:
                (self.note_folder / NOTE_NAME).unlink()
                with suppress(OSError):
                    self.note_folder.rmdir()
            raise
        self.num_earlier = len(self.written) or self._num_removed
        if self.HOLDS is not None and (lost := sorted(_told(metadata) - self.HOLDS)):
            self._noted[f"metadata of the recording are left out: {', '.join(lost)}"] = [one.id for one in episodes]

    def _own_note(self) -> ConversionNote:
        noted = self.noted(self.path)
        if noted is not None and self.is_finished(self.path):
            raise occupied(self.path, "the complete target of a conversion")
        note = self.planned(self.episodes, self.metadata, self.options)
        if noted is not None:
            note.resume(noted)
        return note

    @classmethod
    def all_options(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return options with defaults, as JSON has them but for NaN; numbers are floats, so that 20 is 20.0."""
        given = {**cls.OPTIONS, **options}
        found = {name: value if isinstance(value, float) else plain(value) for name, value in given.items()}
        return {name: float(value) if type(value) is int else value for name, value in found.items()}

    @classmethod
    def effective(
        cls,
        options: Mapping[str, Any],
        path: Path,
        episodes: Sequence[EpisodeToWrite],
        metadata: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Return what options amount to for a recording: options with equal results are the same options.

        Args:
            options: As `all_options` returns them.
            path: The target.
            episodes: All episodes of the recording.
            metadata: Metadata of the recording.
        """
        return dict(options)

    @classmethod
    def planned(
        cls, episodes: Iterable[EpisodeToWrite], metadata: Mapping[str, Any], options: Mapping[str, Any]
    ) -> ConversionNote:
        """Return the note of a conversion that has written nothing yet."""
        return ConversionNote(
            format=cls.format,
            version=cls.VERSION,
            options=plain(cls.all_options(options)),
            metadata=shortened(metadata, without=_OF_ALL),
            episodes=[described(episode) for episode in episodes],
        )

    @classmethod
    def noted(cls, path: Path) -> ConversionNote | None:
        """Return the note in a target; None if nothing is there.

        Raises:
            UsageError: Something without a note is there.
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
        """Compare the files of a target with their sizes and checksums in the note.

        An episode is noted before its files take their places, so the episode that was noted last may lack them.

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
            if first is None or (episode == note.unplaced and not (folder / first).exists()):
                continue
            for name, noted in files.items():
                check_file(path, folder / name, note.files_of_all.get(name, noted))
        for name, noted in note.files_of_all.items():
            if is_finished or name != cls.LAST:
                check_file(path, folder / name, noted)

    def begin_note(self) -> bool:
        """Write the note with the lines of the episodes that are there; without them remove what else is there.

        Returns:
            Whether there was no note.
        """
        self.note_folder.mkdir(parents=True, exist_ok=True)
        place = self.note_folder / NOTE_NAME
        text = self.conversion.text()
        is_new = not place.exists()
        if not is_new and self.conversion.rows and _text_of(place) == text:
            return is_new
        new = self.note_folder / f"{NOTE_NAME}.new"
        new.write_text(text, "utf-8")
        sync_path(new)
        os.replace(new, place)
        sync_path(self.note_folder)
        if not is_new and not self.conversion.rows:
            for pattern in self.MADE:
                for path in self.note_folder.glob(pattern):
                    remove(path)
        return is_new

    def begin_again(self) -> None:
        """Forget and remove all episodes that are there."""
        self._num_removed = len(self.conversion.rows)
        self.conversion.forget()
        self.begin_note()

    def note(self, episode: EpisodeToWrite, files: Mapping[str, Path] | None = None) -> None:
        """Note the checksums of an episode; called when all of it is written, before it takes its place.

        Args:
            episode: The episode.
            files: Names of its files in the target -> where each file is now. The first one takes its place last.

        Raises:
            DataFileError: A part of the episode that the writer did not read cannot be read.
        """
        summed = episode if isinstance(episode, SummedEpisode) else SummedEpisode(episode)
        conversion = self.conversion
        sums = summed.sums()
        conversion.rows.pop(episode.id, None)  # the episode that is noted last is the last one
        conversion.rows[episode.id] = sums
        conversion.files[episode.id] = {name: file_sum(path) for name, path in (files or {}).items()}
        conversion.stored[episode.id] = self.stored_sums(episode)
        conversion.unplaced = episode.id if files else ""
        self.save_line(episode.id, conversion.line_of(episode.id))

    def stored_sums(self, episode: EpisodeToWrite) -> dict[str, str]:
        """Return the checksum of each dataset of an episode in an HDF5 target."""
        return {}

    def note_files(self, files: Mapping[str, Path], published: Collection[str] = ()) -> None:
        """Note files of all episodes, before the file that makes the target complete takes its place.

        Args:
            files: Names in the target -> where each file is now.
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
        """Note that files of all episodes are written again, until `note_files`."""
        append_line(self.note_folder / NOTE_NAME, open_line())
        self.conversion.files_of_all.clear()

    def note_finish(self) -> None:
        """Note that the target is complete, after the file that makes it complete took its place."""
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
        """Make the file or folder, or take it up; give the ids of the episodes that are in it."""

    @abstractmethod
    def add(self, episode: EpisodeToWrite) -> None:
        """Write an episode and `note` it; afterwards it is there, whatever happens.

        Raises:
            DataFileError: It cannot be read; nothing of it is there.
            UsageError: The format cannot hold such an episode at all.
        """

    @abstractmethod
    def close(self) -> None:
        """Write what concerns all episodes. Idempotent."""

    @property
    def report(self) -> dict[str, list[str]]:
        """What was changed or left out -> the ids of the episodes, in the order in which it was met."""
        casts = {cast.text(*key): cast.episodes for key, cast in self._casts.items()}
        return {**self._noted, **casts}

    @property
    def is_complete(self) -> bool:
        """Return whether all episodes are there that can be read."""
        done = self.written if self.is_laid_out_first else self.written | self.left_out
        return len(done) == len(self.episodes)

    def changed(self, what: str, episode: EpisodeToWrite, holds: Any = True) -> None:
        """Note in the report, once, that something of an episode was changed or left out, if that holds."""
        if holds and episode.id not in (noted := self._noted.setdefault(what, []))[-1:]:
            noted.append(episode.id)

    def fitting_metadata(self) -> dict[str, Any]:
        """Return the metadata of the recording for metadata.json; the largest are left out of too many."""
        found = {name: plain(value) for name, value in self.metadata.items()}
        sizes = {name: json_bytes({name: value}, _MAX_METADATA_BYTES, indent=2) for name, value in found.items()}
        for name in sorted(sizes, key=lambda name: -sizes[name]):
            if sum(sizes.values()) <= _MAX_METADATA_BYTES:
                break
            for episode in self.episodes:
                self.changed(f"metadata {name!r} of the recording are left out: they are too large", episode)
            del found[name], sizes[name]
        return found

    def fitting(self, said: Mapping[str, Any], most_bytes: int, episode: EpisodeToWrite) -> dict[str, Any]:
        """Return metadata of an episode that take at most so many bytes as JSON; the largest are left out of more."""
        sizes = {name: json_bytes(value, most_bytes) + len(json.dumps(name)) + 4 for name, value in said.items()}
        while sum(sizes.values()) > most_bytes:
            name = max(reversed(sizes), key=sizes.__getitem__)  # of equal ones the first stays
            self.changed(f"metadata {name!r} is left out: it is too large", episode)
            del sizes[name]
        return {name: value for name, value in said.items() if name in sizes}

    def reshaped(self, name: str, shape: tuple[int, ...], episode: EpisodeToWrite) -> None:
        """Note in the report if a step of a field is read with another shape: a number as a vector of one, or back."""
        own = episode.schema[name].shape if name in episode.schema else shape
        self.changed(f"field {name!r} has the shape {list(shape)}, not {list(own)}", episode, own != shape)

    def cast(self, rows: Any, dtype: Any, name: str, episode: EpisodeToWrite) -> Array:
        """Convert rows of a field to a dtype; the report counts the values that change."""
        values = np.asarray(rows)
        if values.dtype == dtype:
            return values
        with np.errstate(over="ignore", invalid="ignore"):
            converted = values.astype(dtype)
        num_changed, difference = _change(values, converted)
        if num_changed:
            key = name, str(values.dtype), str(converted.dtype)
            self._casts.setdefault(key, _Cast()).add(num_changed, difference, episode.id)
        return converted

    def rounded(self, name: str, num_values: int, difference: int, episode: EpisodeToWrite) -> None:
        """Count integers of a field that the reader of the source rounded to floats."""
        self._casts.setdefault((name, "integers", "float64"), _Cast()).add(num_values, difference, episode.id)

    def join(self, columns: Mapping[str, Any], dtype: Any, episode: EpisodeToWrite) -> Array:
        """Join fields side by side: name -> `[T, *shape]` to `[T, sum of elements]` of one dtype."""
        parts = [self.cast(rows, dtype, name, episode) for name, rows in columns.items()]
        return np.concatenate([part.reshape(len(part), math.prod(part.shape[1:])) for part in parts], axis=1)


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
        most = str(self.difference) if isinstance(self.difference, int) else f"{self.difference:.6g}"
        return f"field {name!r} ({before}) is written as {after}: {change}, by at most {most}"


#: Integers up to 2 to this power are exact in a float of so many bytes.
_EXACT_BITS = {2: 11, 4: 24, 8: 53}


def _change(before: Array, after: Array) -> tuple[int, float]:
    """Count the values that differ after a conversion to another dtype; return the largest difference as well."""
    old = before.reshape(-1)
    new = after.reshape(-1)
    if old.dtype.kind == "b":
        return 0, 0
    if old.dtype.kind == "f":
        with np.errstate(over="ignore", invalid="ignore"):
            is_changed = (old != new) & ~(np.isnan(old) & np.isnan(new))
            differences = np.abs(old[is_changed].astype(np.float64) - new[is_changed].astype(np.float64))
        return len(differences), float(differences.max(initial=0))
    if new.dtype.kind == "f":
        limit = 2 ** _EXACT_BITS[new.dtype.itemsize]
        is_inexact = (old > limit) | (old < -limit) if old.dtype.kind == "i" else old > limit
        old = old[is_inexact]
        new = new[is_inexact]
    # Python's integers: a difference of two numbers of 64 bits is exact in no dtype of numpy.
    pairs = zip(old.tolist(), new.tolist(), strict=True)
    differing = [abs(int(two) - one) if np.isfinite(two) else math.inf for one, two in pairs if one != two]
    return len(differing), max(differing, default=0)


def note_in_folder(folder: Path, target: Path) -> ConversionNote | None:
    """Return the note in a folder of a target; None if the target is not there, or an empty folder.

    Raises:
        UsageError: Something without a note is there.
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
    """Return the text of a note as it is written at once; "" if it is damaged."""
    note = ConversionNote.parse(read_text(place, max_bytes=_MAX_NOTE_BYTES))
    return "" if note is None or note.has_damaged_lines else note.text()


def occupied(path: Path, got: str) -> UsageError:
    """Return the error of a target that is no target of an earlier conversion."""
    expected = "an empty folder, or one of an earlier conversion"
    advice = "Choose another place, or remove it"
    return UsageError("write", repr(str(path)), expected, got, advice)


def remove(path: Path) -> None:
    """Remove a file, or a folder with all that is in it."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@dataclass(frozen=True)
class SharedFields:
    """Fields of a target in which every episode has the same fields; made by `shared_fields`.

    Attributes:
        schema: Numeric fields of the target.
        texts: Text fields of the target.
        left_out: Field of some episode that the target does not have -> the reason.
    """

    schema: Schema
    texts: tuple[str, ...]
    left_out: Mapping[str, str]

    def filled(self, episode: EpisodeToWrite) -> list[str]:
        """Return the fields that an episode lacks; `read` returns False or NaN for them."""
        return [name for name in self.schema if name not in episode.schema]

    def absent(self, episode: EpisodeToWrite, read_name: Callable[[str], str] = str) -> list[str]:
        """Return the fields to note under `ABSENT`: filled ones, and those that an earlier conversion filled.

        Args:
            episode: Episode of the target.
            read_name: Returns the name under which a field of the target is read.
        """
        noted: Any = episode.metadata.get(ABSENT)
        earlier = [name for name in noted if isinstance(name, str)] if isinstance(noted, list) else []
        filled = [name for name in self.schema if name not in episode.schema or name in earlier]
        joined = [name for name in earlier if any(str(one) in self.schema for one in PurePosixPath(name).parents)]
        return [*map(read_name, filled), *joined]

    def read(self, episode: EpisodeToWrite, name: str, start: int = 0, stop: int | None = None) -> Array:
        """Read steps of a numeric field: `[stop - start, *shape]`; False or NaN if the episode lacks the field."""
        end = episode.length if stop is None else stop
        if name in episode.schema:
            return np.asarray(episode.read(name, start, end))
        field = self.schema[name]
        shape = (end - start, *field.shape)
        if field.dtype == "bool":
            return np.zeros(shape, bool)
        return np.full(shape, np.nan, "<f4" if field.dtype == "bfloat16" else field.numpy_dtype)

    def changes(self, episode: EpisodeToWrite) -> Iterator[str]:
        """Yield a line of the report for each field of an episode that is filled or left out."""
        for name in self.filled(episode):
            value = "False" if self.schema[name].dtype == "bool" else "NaN"
            yield f"field {name!r} is {value} in episodes that lack it"
        for name, reason in self.left_out.items():
            if name in episode.schema or name in episode.texts:
                yield f"field {name!r} is left out: {reason}"


def shared_fields(
    episodes: Sequence[EpisodeToWrite],
    depth: Collection[str] = (),
    has_one_form: bool = True,
    ignored: Collection[str] = (),
) -> SharedFields:
    """Choose the fields of a target in which every episode has the same fields.

    Flags and floats that some episodes lack are filled with False and NaN. Rewards, actions, integers, texts and
    pictures that some lack are left out, as are fields that differ in shape or dtype.

    Args:
        episodes: Episodes of the target.
        depth: Fields of depth pictures.
        has_one_form: Whether a field has one dtype and shape in the target. False keeps fields that differ.
        ignored: Fields that the target makes itself; they are in no part of the result.

    Raises:
        UsageError: A field has the name of a group of fields.
    """
    owners: dict[str, dict[tuple[str, tuple[int, ...]], str]] = defaultdict(dict)
    fields: dict[str, Field] = {}
    counts: dict[str, int] = defaultdict(int)
    texts: dict[str, int] = defaultdict(int)
    for episode in episodes:
        for name, field in episode.schema.items():
            if name in ignored:
                continue
            fields.setdefault(name, field)
            owners[name].setdefault((field.dtype, field.shape), episode.id)
            counts[name] += 1
        for name in episode.texts:
            texts[name] += 1
    left_out: dict[str, str] = {}
    for name in (*fields, *texts):
        for group in map(str, PurePosixPath(name).parents):
            if group in fields or group in texts:
                where = f"the field {name!r}"
                expected = f"no field {group!r} in any episode"
                raise UsageError("write", where, expected, "both", "Rename one of them")
    for name, field in fields.items():
        if name in texts:
            left_out[name] = "it is a text in some episodes and a number in others"
        elif has_one_form and len(owners[name]) > 1:
            forms = [f"{dtype}{list(shape)} in episode {one!r}" for (dtype, shape), one in owners[name].items()]
            left_out[name] = f"it is {' and '.join(forms[:2])}"
        elif counts[name] < len(episodes) and not can_be_filled(field, depth):
            left_out[name] = "not all episodes have it"
    for name, count in texts.items():
        if name not in fields and count < len(episodes):
            left_out[name] = "not all episodes have it"
    kept = Schema(field for name, field in fields.items() if name not in left_out)
    return SharedFields(kept, tuple(name for name in texts if name not in left_out), left_out)


def can_be_filled(field: Field, depth: Collection[str] = ()) -> bool:
    """Return whether False or NaN may be written for a field that an episode lacks; `depth`: names of depth images."""
    if field.name.partition("/")[0] in ("action", "reward"):
        return False
    if field.dtype == "bool":
        return len(field.shape) <= 1
    is_picture = field.name in depth or (len(field.shape) == 3 and axes_of(field.shape))
    return field.dtype in _FLOATS and not is_picture


def has_unknown_end(episode: EpisodeToWrite) -> bool:
    """Return whether the source does not tell how the episode ended."""
    ends = episode.terminated, episode.truncated
    return None in ends and not any(ends) and not has_open_end(episode)


def has_open_end(episode: EpisodeToWrite) -> bool:
    """Return whether the recording stopped before the episode ended, as far as the source tells."""
    ends = episode.terminated, episode.truncated
    return ends == (False, False) or (ends == (None, None) and episode.metadata.get("ends") == "open")


def finals_of(episode: EpisodeToWrite) -> dict[str, Array]:
    """Return the observation after the last step by our names: `[*shape]` each; {} if there is none."""
    final = episode.final_observation
    named = final if isinstance(final, dict) else {} if final is None else {"": final}
    found = {f"observation/{name}".rstrip("/"): np.asarray(value) for name, value in named.items()}
    return {name: value for name, value in found.items() if name in episode.schema}


def _told(metadata: Mapping[str, Any]) -> set[str]:
    """Name what tells something; arrays, which do not compare as one, always do."""
    plain = {name: value for name, value in metadata.items() if isinstance(value, (str, list, dict, type(None)))}
    return metadata.keys() - DERIVED - {name for name, value in plain.items() if value in _NOTHING}
