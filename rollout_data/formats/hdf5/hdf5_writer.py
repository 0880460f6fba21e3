"""Base of writers of HDF5 files whose structure is known before a row is read.

The structure of the file is built in memory. Rows are then written directly to their offsets in the
file. An incomplete file has a hidden name. A dataset of the file contains the conversion record,
with a line per written episode.
"""

from __future__ import annotations

import os
import time
from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar, NamedTuple

import h5py
import numpy as np

from storage.core.durable_files import replace_file, sync_path
from storage.core.fields import Field
from storage.errors import CorruptFileError, UsageError
from storage.saving.hdf5_files import (
    MAX_HEAP_BYTES,
    SparseFile,
    begin_file,
    member,
    open_hdf5,
    reserve,
    write_at,
)

from ...writing.conversion_record import NOTE_DATASET, ConversionNote, files_line
from ...writing.target_files import (
    ALWAYS_READ_BYTES,
    FileSum,
    changed_file,
    check_file,
    checksum_of,
    gaps,
)
from ..episode_writer import EpisodeToWrite, ForeignWriter, SharedFields, occupied

Array = np.ndarray[Any, Any]
#: Dtype and shape of a dataset, or of a row of a dataset.
Form = tuple[np.dtype[Any], tuple[int, ...]]
_ALIGNMENT = 64
#: Bytes of a field copied at a time.
_PART_BYTES = 1 << 23
#: Bytes reserved for the last line of the conversion record.
_FINISH_BYTES = 512


class EpisodeRows(NamedTuple):
    """Location of the rows of an episode in a file.

    Attributes:
        group: Group with the datasets of the episode; "" if all episodes share the datasets.
        start: First row of the episode in the datasets.
        num_rows: Number of rows; None if the datasets contain only this episode.
    """

    group: str
    start: int = 0
    num_rows: int | None = None

    def datasets(self, names: Mapping[str, Any]) -> list[str]:
        """Select the names of the datasets that contain rows of the episode."""
        return [name for name in names if not self.group or name.startswith(f"{self.group}/")]

    def range_of(
        self,
        offset: int,
        dtype: np.dtype[Any],
        shape: tuple[int, ...],
    ) -> tuple[int, int]:
        """Return where a dataset contains the rows of the episode: offset in the file, and bytes.

        Args:
            offset: Offset of the dataset in the file.
            dtype: Dtype of the dataset.
            shape: Shape of the dataset.
        """
        row_bytes = dtype.itemsize * prod(shape[1:])
        num_rows = shape[0] if self.num_rows is None else self.num_rows
        return offset + self.start * row_bytes, num_rows * row_bytes


class EpisodeFile:
    """An HDF5 file that is being written.

    Args:
        path: Final path of the file.
        datasets: Maps names of the datasets to write later to (dtype, shape).
        contents: Maps names of small datasets to their values.
        attributes: Maps names of groups to their attributes.
        conversion: Conversion record of the target.
        rows: Maps episode ids to locations of rows.
        note_name: Name of the dataset of the conversion record, with bytes reserved for the line of
            each episode.

    Attributes:
        written: Ids of the episodes in the file.
    """

    def __init__(
        self,
        path: Path,
        datasets: Mapping[str, Form],
        contents: Mapping[str, Any],
        attributes: Mapping[str, Mapping[str, Any]],
        conversion: ConversionNote,
        rows: Mapping[str, EpisodeRows],
        note_name: str = NOTE_DATASET,
    ) -> None:
        self.path = path
        self._rows = rows
        self._note_name = note_name
        self._names = list(datasets)

        names_of = {episode: part.datasets(datasets) for episode, part in rows.items()}
        lines = conversion.blank_lines(names_of)
        first_line = conversion.first_line().encode()
        #: Maps each episode id to the offset of its line in the conversion record.
        self._places: dict[str, int] = {}
        place = len(first_line)
        for episode, line in lines.items():
            self._places[episode] = place
            place += len(line)
        self._place_of_finish = place
        note_form: Form = (np.dtype("u1"), (place + _FINISH_BYTES,))
        self._datasets: dict[str, Form] = {**datasets, note_name: note_form}

        header = self._header(contents, attributes)
        path.parent.mkdir(parents=True, exist_ok=True)
        # A Minari file gets its final name before `metadata.json` is written, so an unfinished
        # target may have a file with the final name.
        self._partial = path if path.exists() else partial_of(path)
        note = self._note_of_same_structure(header, conversion)
        self.written: set[str] = set() if note is None else {*note.rows}
        if note is None:
            self._check_other_layout(conversion)
            self._partial = partial_of(path)
            sizes = [*map(len, lines.values()), _FINISH_BYTES]
            blank = b"".join(b" " * (size - 1) + b"\n" for size in sizes)
            self._begin(header, first_line + blank)
        self._file = os.open(self._partial, os.O_RDWR)
        if note is not None and len(note.first_line()) == len(conversion.first_line()):
            # The first line contains the state of the source. It is written again, because the
            # source may have changed since the file was created.
            self.write(note_name, np.frombuffer(first_line, np.uint8))

    def _header(
        self,
        contents: Mapping[str, Any],
        attributes: Mapping[str, Mapping[str, Any]],
    ) -> SparseFile:
        """Build the file without its rows in memory, and set the offsets of the datasets."""
        header = SparseFile()
        with begin_file(header, _ALIGNMENT, keeps_order=True) as file:
            names = (*self._datasets, *contents)
            groups = {str(parent) for name in names for parent in PurePosixPath(name).parents}
            for group in sorted(groups - {"."}):
                _make_group(file, group)
            self._offsets = {}
            for name, (dtype, shape) in self._datasets.items():
                self._offsets[name] = reserve(file, name, dtype, shape)
            for name, content in contents.items():
                file.create_dataset(name, data=content)
            for group, values in attributes.items():
                _check_attributes(self.path, values)
                file.require_group(group).attrs.update(values)
        return header

    def _begin(self, header: SparseFile, note: bytes) -> None:
        """Create the file with its structure and an empty conversion record, atomically."""
        temporary = self.path.with_name(f".{self.path.name}.begun")
        with (
            replace_file(self._partial, temporary=temporary) as new,
            open(new, "wb", buffering=0) as file,
        ):
            header.write_to(file.fileno())
            write_at(file.fileno(), memoryview(note), self._offsets[self._note_name])

    def _check_other_layout(self, conversion: ConversionNote) -> None:
        """Raise `UsageError` if an existing file of the same episodes has a different structure."""
        if not conversion.rows:
            return
        note = note_in_file(self._partial, self._note_name)
        if note is not None and _without_rows(note) == _without_rows(conversion):
            raise changed_file(self.path, self._partial, "its structure or size differs")

    def _note_of_same_structure(
        self,
        header: SparseFile,
        conversion: ConversionNote,
    ) -> ConversionNote | None:
        """Read the conversion record of an existing file; None if its structure differs."""
        try:
            with open(self._partial, "rb") as file:
                descriptor = file.fileno()
                if os.fstat(descriptor).st_size != header.size:
                    return None
                for offset, data in _final_writes(header):
                    if os.pread(descriptor, len(data), offset) != data:
                        return None
                _, shape = self._datasets[self._note_name]
                text = os.pread(descriptor, prod(shape), self._offsets[self._note_name]).decode()
        except (OSError, UnicodeDecodeError):
            return None
        note = ConversionNote.parse(text)
        if note is None or _without_rows(note) != _without_rows(conversion):
            return None
        return note

    def dtype_of(self, name: str) -> np.dtype[Any]:
        """Return the dtype of a dataset."""
        return self._datasets[name][0]

    def write(self, name: str, rows: Array, start: int = 0) -> None:
        """Write rows into a dataset, starting at row `start`."""
        dtype, shape = self._datasets[name]
        data = np.ascontiguousarray(rows, dtype).reshape(-1).view(np.uint8).data
        row_bytes = dtype.itemsize * prod(shape[1:])
        write_at(self._file, data, self._offsets[name] + start * row_bytes)

    def note(self, episode: str, line: str) -> None:
        """Write the line of an episode in the conversion record. Its rows are already written."""
        self.write(self._note_name, np.frombuffer(line.encode(), np.uint8), self._places[episode])

    def stored_sums(self, episode: str) -> dict[str, str]:
        """Map the name of each dataset of an episode to the checksum of the episode's rows."""
        rows = self._rows[episode]
        sums = {}
        for name in rows.datasets(dict.fromkeys(self._names)):
            dtype, shape = self._datasets[name]
            part = rows.range_of(self._offsets[name], dtype, shape)
            sums[name] = checksum_of(self._file, [part])
        return sums

    def finish(self, files: Mapping[str, FileSum], is_last: bool) -> None:
        """Write the last line of the conversion record, and rename the complete file.

        Args:
            files: Maps names of other files of the target to size and checksum.
            is_last: Whether this completes the target. False if another file follows.
        """
        size = os.fstat(self._file).st_size
        covered = []
        for name, (dtype, shape) in self._datasets.items():
            covered.append(EpisodeRows("").range_of(self._offsets[name], dtype, shape))
        time_ns = time.time_ns()
        finish = {
            "size": size,
            "checksum": checksum_of(self._file, gaps(covered, size)),
            "mtime_ns": time_ns,
            "is_last": is_last,
        }
        line = files_line(files, finish=finish)
        padded = line[:-1].ljust(_FINISH_BYTES - 1) + "\n"
        data = np.frombuffer(padded.encode(), np.uint8)
        self.write(self._note_name, data, self._place_of_finish)
        # A file cannot contain its own checksum. Its rows are trusted while its modification time
        # is equal to the time in the conversion record.
        os.utime(self._file, ns=(time_ns, time_ns))
        os.fsync(self._file)
        if self._partial != self.path:
            os.rename(self._partial, self.path)
            self._partial = self.path
        sync_path(self.path.parent)

    @property
    def is_open(self) -> bool:
        """Whether the file is open."""
        return self._file >= 0

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _without_rows(note: ConversionNote) -> ConversionNote:
    return replace(note, rows={}, source="")


def _check_attributes(path: Path, attributes: Mapping[str, Any]) -> None:
    """Raise `UsageError` for a text attribute that is too large for the readers."""
    for name, value in attributes.items():
        if not isinstance(value, str):
            continue
        num_bytes = len(value.encode("utf-8", "surrogatepass"))
        if num_bytes > MAX_HEAP_BYTES:
            raise UsageError(
                f"attribute {name!r} of {str(path)!r} has {num_bytes} bytes, expected at most "
                f"{MAX_HEAP_BYTES}. Remove large values from the metadata."
            )


def _make_group(file: h5py.File, name: str) -> None:
    """Create a group without a creation time, so that equal episodes give equal bytes."""
    settings = h5py.h5p.create(h5py.h5p.GROUP_CREATE)
    settings.set_obj_track_times(False)
    h5py.h5g.create(file.id, name.encode(), gcpl=settings)


def _final_writes(header: SparseFile) -> Iterator[tuple[int, bytes]]:
    """Yield the offset and the final bytes of each range written to a file in memory.

    If later writes overlap a range, its final bytes differ from the bytes that were written first.
    """
    ends = [offset + len(data) for offset, data in header.writes]
    content = bytearray(max(ends, default=header.size))
    for offset, data in header.writes:
        content[offset : offset + len(data)] = data
    for offset, data in header.writes:
        yield offset, bytes(content[offset : offset + len(data)])


def partial_of(path: Path) -> Path:
    """Return the hidden path at which a file is written until it is complete."""
    return path.with_name(f".{path.name}.partial")


def note_in_file(path: Path, name: str) -> ConversionNote | None:
    """Return the conversion record in an HDF5 file; None if the file has no record.

    Raises:
        CorruptFileError: The file is damaged or truncated.
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
    """Base of writers of one HDF5 file with all episodes. `begin` creates the file."""

    is_laid_out_first = True
    #: Name of the dataset with the conversion record.
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
            if not place.exists():
                continue
            try:
                note = note_in_file(place, cls.NOTE) if place.is_file() else None
            except CorruptFileError as error:
                state = f"is a damaged file ({error.message.rstrip('.')})"
                raise occupied(place, state) from error
            if note is None:
                raise occupied(place, f"has no dataset {cls.NOTE!r} of a conversion")
            return note
        return None

    @classmethod
    def is_finished(cls, path: Path) -> bool:
        return cls.file_at(path).exists()

    @classmethod
    @abstractmethod
    def rows_of(cls, note: ConversionNote) -> dict[str, EpisodeRows]:
        """Map episode ids to the locations of the rows of the episodes in the file."""

    @classmethod
    def check_files(cls, path: Path, note: ConversionNote, is_finished: bool) -> None:
        """Compare the rows of a file with the checksums in its conversion record.

        Other programs may add datasets and attributes to a complete file, as robomimic adds masks.
        The rows must keep their offsets.

        Raises:
            UsageError: Rows were changed or removed, or the file was truncated.
        """
        file = cls.file_at(path)
        finish: Mapping[str, Any] = note.finish or {}
        if is_finished or finish.get("is_last"):
            for name, noted in note.files_of_all.items():
                check_file(path, path / name, noted)
        place = file if file.exists() else partial_of(file)
        status = os.stat(place)
        size = finish.get("size", 0) if is_finished else 0
        if type(size) is int and status.st_size < size:
            raise changed_file(path, place, f"it has {status.st_size} bytes, expected {size}")
        has_noted_time = (status.st_size, status.st_mtime_ns) == (size, finish.get("mtime_ns"))
        if is_finished and has_noted_time and size > ALWAYS_READ_BYTES:
            return

        with open_hdf5(place) as (opened, _), open(place, "rb") as raw:
            descriptor = raw.fileno()
            covered = cls._check_rows(path, place, note, opened, descriptor)
            note_dataset = _dataset(opened, cls.NOTE)
            if is_finished and status.st_size == size and note_dataset is not None:
                covered.append(EpisodeRows("").range_of(*note_dataset))
                if checksum_of(descriptor, gaps(covered, size)) != finish.get("checksum"):
                    change = "its content beside the rows of episodes differs"
                    raise changed_file(path, place, change)

    @classmethod
    def _check_rows(
        cls,
        path: Path,
        place: Path,
        note: ConversionNote,
        opened: h5py.File,
        descriptor: int,
    ) -> list[tuple[int, int]]:
        """Compare the rows of episodes with their checksums, and return their byte ranges.

        Args:
            path: Path of the target.
            place: Path of the HDF5 file of the target.
            note: Conversion record in the file.
            opened: The file, opened with h5py.
            descriptor: File descriptor for reading.
        """
        size = os.fstat(descriptor).st_size
        rows = cls.rows_of(note)
        covered = []
        for episode, sums in note.stored.items():
            for name, checksum in sums.items():
                dataset = _dataset(opened, name)
                if dataset is None or episode not in rows:
                    raise changed_file(path, place, f"dataset {name!r} is missing")
                part = rows[episode].range_of(*dataset)
                covered.append(part)
                if sum(part) > size or checksum_of(descriptor, [part]) != checksum:
                    change = f"{name!r} of episode {episode!r} differs"
                    raise changed_file(path, place, change)
        return covered

    def begin_note(self) -> bool:
        """Do nothing, because the conversion record is created with the structure of the file."""
        return False

    def make_file(
        self,
        datasets: Mapping[str, Form],
        contents: Mapping[str, Any],
        attributes: Mapping[str, Mapping[str, Any]],
    ) -> set[str]:
        """Create the file, or open an incomplete file. Return the ids of the episodes in the file.

        Args:
            datasets: Maps names of datasets to (dtype, shape).
            contents: Maps names of small datasets to their values.
            attributes: Maps names of groups to their attributes.
        """
        path = self.file_at(self.path)
        rows = self.rows_of(self.conversion)
        self._file = EpisodeFile(
            path,
            datasets,
            contents,
            attributes,
            self.conversion,
            rows,
            self.NOTE,
        )
        if self.conversion.rows and not self._file.written:
            self.begin_again()
        return {*self._file.written}

    def save_line(self, episode: str, line: str) -> None:
        self._file.note(episode, line)
        self.written.add(episode)

    def stored_sums(self, episode: EpisodeToWrite) -> dict[str, str]:
        return self._file.stored_sums(episode.id)

    def copy(
        self,
        episode: EpisodeToWrite,
        name: str,
        dataset: str,
        first: int = 0,
        steps: range | None = None,
    ) -> None:
        """Copy steps of a field into a dataset, a few megabytes at a time.

        A field that is missing from the episode is written as False or NaN.

        Args:
            episode: The episode.
            name: Name of the field.
            dataset: Name of the dataset.
            first: First row in the dataset.
            steps: Steps to copy; None for all.
        """
        steps = range(episode.length) if steps is None else steps
        field = episode.schema[name] if name in episode.schema else self._fields.schema[name]
        at_once = max(1, _PART_BYTES // max(1, field.row_bytes))
        for start in steps[::at_once]:
            stop = min(start + at_once, steps.stop)
            rows = self._fields.read(episode, name, start, stop)
            self._file.write(dataset, rows, first + start - steps.start)
        self.changed("bfloat16 is written as float32", episode, field.dtype == "bfloat16")

    def write_rewards(
        self,
        episode: EpisodeToWrite,
        dataset: str,
        first: int = 0,
        num_steps: int | None = None,
    ) -> None:
        """Write the recorded rewards of an episode, or a constant if the episode has no rewards.

        The constant is the option `missing_reward`.

        Args:
            episode: The episode.
            dataset: Name of the dataset.
            first: First row in the dataset.
            num_steps: Number of steps to write; None for all.
        """
        stop = episode.length if num_steps is None else num_steps
        dtype = self._file.dtype_of(dataset)
        has_rewards = has_number(episode, "reward")
        if has_rewards:
            values = episode.read("reward", 0, stop)
            rewards = self.cast(values, dtype, "reward", episode).reshape(-1)
        else:
            rewards = np.full(stop, self.options["missing_reward"], dtype)
        self._file.write(dataset, rewards, first)
        self.changed("rewards are made up by missing_reward", episode, not has_rewards)

    def close(self) -> None:
        if self.is_complete and self._file.is_open:
            self.finish()
        self._file.close()

    def finish(self) -> None:
        """Rename the complete file."""
        self._file.finish({}, is_last=True)


def _dataset(
    file: h5py.File,
    name: str,
) -> tuple[int, np.dtype[Any], tuple[int, ...]] | None:
    """Return the offset, dtype and shape of a contiguous dataset; None for other objects."""
    dataset = file.get(name)
    if not isinstance(dataset, h5py.Dataset) or dataset.chunks is not None or not dataset.shape:
        return None
    offset = dataset.id.get_offset()
    if offset is None and dataset.size:
        return None
    return offset or 0, dataset.dtype, dataset.shape


def written_dtype(field: Field) -> np.dtype[Any]:
    """Return the dtype of a field in an HDF5 file: float32 for bfloat16, otherwise unchanged."""
    return np.dtype("<f4") if field.dtype == "bfloat16" else field.numpy_dtype


def has_number(episode: EpisodeToWrite, name: str) -> bool:
    """Return whether an episode has a numeric field with one value per step."""
    return name in episode.schema and episode.schema[name].num_elements == 1


def without_left_out(shared: SharedFields, names: Collection[str]) -> SharedFields:
    """Remove fields from the reported list of omitted fields, because the writer computes them."""
    left_out = {name: why for name, why in shared.left_out.items() if name not in names}
    return replace(shared, left_out=left_out)
