"""An HDF5 file of episodes whose structure is known before a row is read.

One rule: the structure is made in memory and rows go to their places, so nothing is copied twice. Until the file is
complete it has a name with a dot; the note of the conversion in it says which episodes are there.
"""

from __future__ import annotations

import os
import time
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar, NamedTuple

import h5py
import numpy as np

from storage.core.durable_files import sync_path
from storage.core.fields import Field
from storage.errors import CorruptFileError, UsageError
from storage.saving.hdf5_files import MAX_HEAP_BYTES, SparseFile, begin_file, member, open_hdf5, reserve, write_at

from ...writing.conversion_record import NOTE_DATASET, ConversionNote, files_line
from ...writing.target_files import ALWAYS_READ_BYTES, FileSum, changed_file, check_file, checksum_of, gaps
from ..episode_writer import EpisodeToWrite, ForeignWriter, SharedFields, occupied

Array = np.ndarray[Any, Any]
_ALIGNMENT = 64
_PART_BYTES = 1 << 23
#: Room for the last line of the note.
_FINISH_BYTES = 512


class Rows(NamedTuple):
    """Rows of an episode in a file.

    Attributes:
        group: The group of all datasets of the episode; "" if the datasets hold all episodes.
        start: First row.
        num_rows: Number of rows; None if the datasets hold this episode only.
    """

    group: str
    start: int = 0
    num_rows: int | None = None

    def datasets(self, names: Mapping[str, Any]) -> list[str]:
        """Return the datasets with rows of the episode."""
        return [name for name in names if not self.group or name.startswith(f"{self.group}/")]

    def range_of(self, offset: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> tuple[int, int]:
        """Return the first byte and the number of bytes of the rows in a dataset at an offset."""
        row_bytes = dtype.itemsize * prod(shape[1:])
        num_rows = shape[0] if self.num_rows is None else self.num_rows
        return offset + self.start * row_bytes, num_rows * row_bytes


class EpisodeFile:
    """A file that is being written.

    Args:
        path: Where it is when it is complete.
        datasets: Name -> dtype and shape; rows come later, by `write`.
        contents: Name -> small datasets that are known.
        attributes: Group -> its attributes.
        conversion: The note of the conversion.
        rows: Id of an episode -> its rows.
        note_name: Dataset of the note: bytes, with room for the line of each episode.

    Attributes:
        written: Ids of the episodes that are in it.
    """

    def __init__(
        self,
        path: Path,
        datasets: Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]],
        contents: Mapping[str, Any],
        attributes: Mapping[str, Mapping[str, Any]],
        conversion: ConversionNote,
        rows: Mapping[str, Rows],
        note_name: str = NOTE_DATASET,
    ) -> None:
        self._rows = rows
        lines = conversion.blank_lines({name: one.datasets(datasets) for name, one in rows.items()})
        first = conversion.first_line().encode()
        places = np.cumsum([len(first), *map(len, lines.values())]).tolist()
        self._places = dict(zip(lines, places[:-1], strict=True))
        self._place_of_finish = places[-1]
        self._note_name = note_name
        self._datasets = {**datasets, note_name: (np.dtype("u1"), (places[-1] + _FINISH_BYTES,))}
        self._names = list(datasets)
        self.path = path
        header = SparseFile()
        with begin_file(header, _ALIGNMENT, keeps_order=True) as file:
            names = (*self._datasets, *contents)
            parents = {str(one) for name in names for one in PurePosixPath(name).parents}
            for name in sorted(parents - {"."}):
                _make_group(file, name)
            self._offsets = {name: reserve(file, name, dtype, shape) for name, (dtype, shape) in self._datasets.items()}
            for name, content in contents.items():
                file.create_dataset(name, data=content)
            for group, told in attributes.items():
                _check_attributes(path, told)
                file.require_group(group).attrs.update(told)
        path.parent.mkdir(parents=True, exist_ok=True)
        # Minari's file has its name before the description of the dataset is there.
        self._partial = path if path.exists() else partial_of(path)
        noted = self._note_of_mine(header, conversion)
        self.written = set[str]() if noted is None else {*noted.rows}
        if noted is None:
            self._check_other_layout(conversion)
            self._partial = partial_of(path)
            sizes = [*map(len, lines.values()), _FINISH_BYTES]
            blank = b"".join(b" " * (size - 1) + b"\n" for size in sizes)
            self._begin(header, first + blank)
        self._file = os.open(self._partial, os.O_RDWR)
        if noted is not None and len(noted.first_line()) == len(conversion.first_line()):
            self.write(note_name, np.frombuffer(first, np.uint8))  # another state of the source from here on

    def _begin(self, header: SparseFile, note: bytes) -> None:
        """Create the file with its structure and note, which appears as a whole."""
        new = self.path.with_name(f".{self.path.name}.begun")
        descriptor = os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            header.write_to(descriptor)
            write_at(descriptor, memoryview(note), self._offsets[self._note_name])
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.rename(new, self._partial)

    def _check_other_layout(self, conversion: ConversionNote) -> None:
        """Raise UsageError if a file of the same episodes has another structure: it was changed or cut."""
        there = note_in_file(self._partial, self._note_name) if conversion.rows else None
        if there is not None and _without_rows(there) == _without_rows(conversion):
            raise changed_file(self.path, self._partial, "another structure or size")

    def _note_of_mine(self, header: SparseFile, conversion: ConversionNote) -> ConversionNote | None:
        """Return the note of a file that was begun with just this structure; None if there is no such file."""
        try:
            with open(self._partial, "rb") as begun:
                same = all(os.pread(begun.fileno(), len(data), offset) == data for offset, data in _last(header))
                if not same or os.fstat(begun.fileno()).st_size != header.size:
                    return None
                size = prod(self._datasets[self._note_name][1])
                text = os.pread(begun.fileno(), size, self._offsets[self._note_name]).decode()
        except (OSError, UnicodeDecodeError):
            return None
        noted = ConversionNote.parse(text)
        if noted is None or _without_rows(noted) != _without_rows(conversion):
            return None
        return noted

    def write(self, name: str, rows: Array, start: int = 0) -> None:
        """Write rows of a dataset from row `start` on."""
        dtype, shape = self._datasets[name]
        data = np.ascontiguousarray(rows, dtype).reshape(-1).view(np.uint8).data
        write_at(self._file, data, self._offsets[name] + start * dtype.itemsize * prod(shape[1:]))

    def note(self, episode: str, line: str) -> None:
        """Note that all rows of an episode are there."""
        self.write(self._note_name, np.frombuffer(line.encode(), np.uint8), self._places[episode])

    def stored_sums(self, episode: str) -> dict[str, str]:
        """Return the checksum of the rows of an episode in each dataset."""
        rows = self._rows[episode]
        found = dict[str, str]()
        for name in rows.datasets(dict.fromkeys(self._names)):
            place = rows.range_of(self._offsets[name], *self._datasets[name])
            found[name] = checksum_of(self._file, [place])
        return found

    def finish(self, files: Mapping[str, FileSum], is_last: bool) -> None:
        """Rename the complete file, with the last line of the note.

        Args:
            files: Sizes and checksums of other files of the target.
            is_last: Whether no other file has to take its place before the target is complete.
        """
        size = os.fstat(self._file).st_size
        covered = [Rows("").range_of(self._offsets[name], *about) for name, about in self._datasets.items()]
        time_ns = time.time_ns()
        about = {"size": size, "checksum": checksum_of(self._file, gaps(covered, size)), "mtime_ns": time_ns}
        line = files_line(files, finish={**about, "is_last": is_last})
        padded = line[:-1].ljust(_FINISH_BYTES - 1) + "\n"
        self.write(self._note_name, np.frombuffer(padded.encode(), np.uint8), self._place_of_finish)
        # The file cannot hold its own checksum; with this time its rows need not be read again.
        os.utime(self._file, ns=(time_ns, time_ns))
        os.fsync(self._file)
        if self._partial != self.path:
            os.rename(self._partial, self.path)
            self._partial = self.path
        sync_path(self.path.parent)

    @property
    def is_open(self) -> bool:
        """Whether the file is still written."""
        return self._file >= 0

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _without_rows(note: ConversionNote) -> ConversionNote:
    return replace(note, rows={}, source="")


def _check_attributes(path: Path, attributes: Mapping[str, Any]) -> None:
    """Raise `UsageError` if an attribute is a text that would not be read again."""
    for name, value in attributes.items():
        num_bytes = len(value.encode("utf-8", "surrogatepass")) if isinstance(value, str) else 0
        if num_bytes > MAX_HEAP_BYTES:
            where = f"{name!r} of {str(path)!r}"
            expected = f"a text of at most {MAX_HEAP_BYTES} bytes"
            raise UsageError("write", where, expected, f"{num_bytes} bytes", "Remove what is large from it")


def _make_group(file: h5py.File, name: str) -> None:
    """Create a group without the time of its making, so that the same episodes make the same bytes."""
    settings = h5py.h5p.create(h5py.h5p.GROUP_CREATE)
    settings.set_obj_track_times(False)
    h5py.h5g.create(file.id, name.encode(), gcpl=settings)


def _last(header: SparseFile) -> Iterator[tuple[int, bytes]]:
    """What the file's structure is in the end: writes that no later one lies over."""
    written = bytearray(header.size if not header.writes else max(offset + len(data) for offset, data in header.writes))
    for offset, data in header.writes:
        written[offset : offset + len(data)] = data
    for offset, data in header.writes:
        yield offset, bytes(written[offset : offset + len(data)])


def partial_of(path: Path) -> Path:
    """Return where a file is until it is complete."""
    return path.with_name(f".{path.name}.partial")


def note_in_file(path: Path, name: str) -> ConversionNote | None:
    """Return the note in an HDF5 file; None if it has none.

    Raises:
        CorruptFileError: The file is damaged, or cut.
    """
    with open_hdf5(path) as (file, _):
        if name not in file:
            return None
        try:
            text = member(file, name, path)[()].tobytes().decode()
        except (UnicodeDecodeError, AttributeError):
            return None
    return ConversionNote.parse(text)


class Hdf5Writer(ForeignWriter):
    """Writes a file whose structure is that of all episodes; `begin` makes it."""

    is_laid_out_first = True
    #: Dataset of the note.
    NOTE: ClassVar[str] = NOTE_DATASET
    _file: EpisodeFile

    _fields: SharedFields

    @classmethod
    def file_at(cls, path: Path) -> Path:
        """Return the HDF5 file of a target."""
        return path

    @classmethod
    def noted(cls, path: Path) -> ConversionNote | None:
        file = cls.file_at(path)
        for place in (file, partial_of(file)):
            if place.exists():
                try:
                    note = note_in_file(place, cls.NOTE) if place.is_file() else None
                except CorruptFileError as error:
                    raise occupied(place, f"a damaged file, {error.got}") from error
                if note is None:
                    raise occupied(place, f"something without the dataset {cls.NOTE!r} of a conversion")
                return note
        return None

    @classmethod
    def is_finished(cls, path: Path) -> bool:
        return cls.file_at(path).exists()

    @classmethod
    @abstractmethod
    def rows_of(cls, note: ConversionNote) -> dict[str, Rows]:
        """Return the rows of each episode that is written."""

    @classmethod
    def check_files(cls, path: Path, note: ConversionNote, is_finished: bool) -> None:
        """Compare the rows of a file with their checksums in its note.

        Datasets and attributes may be added to a complete file, as robomimic adds masks. Its rows stay where they are.

        Raises:
            UsageError: Rows were changed or removed, or the file was cut.
        """
        file = cls.file_at(path)
        finish: Mapping[str, Any] = note.finish or {}
        for name, noted in note.files_of_all.items() if is_finished or finish.get("is_last") else ():
            check_file(path, path / name, noted)
        place = file if file.exists() else partial_of(file)
        found = os.stat(place)
        size = finish.get("size", 0) if is_finished else 0
        if type(size) is int and found.st_size < size:
            raise changed_file(path, place, f"{found.st_size} bytes instead of {size}")
        is_as_noted = is_finished and (found.st_size, found.st_mtime_ns) == (size, finish.get("mtime_ns"))
        if is_as_noted and size > ALWAYS_READ_BYTES:
            return
        rows = cls.rows_of(note)
        covered = list[tuple[int, int]]()
        with open_hdf5(place) as (opened, _), open(place, "rb") as raw:
            for episode, sums in note.stored.items():
                for name, checksum in sums.items():
                    about = _dataset(opened, name)
                    if about is None or episode not in rows:
                        raise changed_file(path, place, f"no dataset {name!r}")
                    part = rows[episode].range_of(*about)
                    covered.append(part)
                    if sum(part) > found.st_size or checksum_of(raw.fileno(), [part]) != checksum:
                        raise changed_file(path, place, f"other content of {name!r} in episode {episode!r}")
            note_of_mine = _dataset(opened, cls.NOTE)
            if is_finished and found.st_size == size and note_of_mine is not None:
                covered.append(Rows("").range_of(*note_of_mine))
                if checksum_of(raw.fileno(), gaps(covered, size)) != finish.get("checksum"):
                    raise changed_file(path, place, "other content beside the rows of episodes")

    def begin_note(self) -> bool:
        """Do nothing: the note is made with the structure of the file."""
        return False

    def make_file(
        self,
        datasets: Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]],
        contents: Mapping[str, Any],
        attributes: Mapping[str, Mapping[str, Any]],
    ) -> set[str]:
        """Make the file, or take it up; return the ids of the episodes that are in it."""
        path = self.file_at(self.path)
        rows = self.rows_of(self.conversion)
        self._file = EpisodeFile(path, datasets, contents, attributes, self.conversion, rows, self.NOTE)
        if self.conversion.rows and not self._file.written:
            self.begin_again()
        return {*self._file.written}

    def save_line(self, episode: str, line: str) -> None:
        self._file.note(episode, line)
        self.written.add(episode)

    def stored_sums(self, episode: EpisodeToWrite) -> dict[str, str]:
        return self._file.stored_sums(episode.id)

    def copy(
        self, episode: EpisodeToWrite, name: str, dataset: str, first: int = 0, steps: range | None = None
    ) -> None:
        """Write steps of a field, all by default, into a dataset from row `first` on, a few megabytes at a time.

        A field that the episode lacks is False or NaN.
        """
        steps = range(episode.length) if steps is None else steps
        field = episode.schema[name] if name in episode.schema else self._fields.schema[name]
        at_once = max(1, _PART_BYTES // max(1, field.row_bytes))
        for start in steps[::at_once]:
            rows = self._fields.read(episode, name, start, min(start + at_once, steps.stop))
            self._file.write(dataset, rows, first + start - steps.start)
        is_widened = field.dtype == "bfloat16"
        self.changed("bfloat16 is written as float32", episode, is_widened)

    def close(self) -> None:
        if self.is_complete and self._file.is_open:
            self.finish()
        self._file.close()

    def finish(self) -> None:
        """Rename the complete file."""
        self._file.finish({}, is_last=True)


def _dataset(file: h5py.File, name: str) -> tuple[int, np.dtype[Any], tuple[int, ...]] | None:
    """Return the offset, dtype and shape of a contiguous dataset; None if there is none."""
    found = file.get(name)
    if not isinstance(found, h5py.Dataset) or found.chunks is not None or not found.shape:
        return None
    offset = found.id.get_offset()
    if offset is None and found.size:
        return None
    return offset or 0, found.dtype, found.shape


def written_dtype(field: Field) -> np.dtype[Any]:
    """The dtype in which other systems get a field."""
    return np.dtype("<f4") if field.dtype == "bfloat16" else field.numpy_dtype
