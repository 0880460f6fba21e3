"""`RowSource`: episodes as packed rows, which playback, windows and statistics read in bulk.

Callers choose the frames of a batch and pass them as `Rows`. `LostBlockError` means that a file was
deleted or damaged after it was indexed. After other errors, a read can be repeated.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, overload

import numpy as np
import torch

from storage.core.fields import Schema
from storage.errors import CorruptFileError, DataFileError

from ...blocks.annotations import Notes
from ...blocks.block import Block
from ...blocks.block_header import DATA, FINAL, BlockHeader, damaged_fragments, read_header
from ...blocks.folder_metadata import ENDS
from ...blocks.row_layout import RowLayout
from ...blocks.trajectory_index import End, Int64s, LostBlockError, Runs, TrajectoryIndex
from ...remote.locations import RemotePath
from ..episode_info import ABSENT, NO_FIELDS, EpisodeInfo
from ..episode_source import EpisodeSource
from ..episode_table import column_of

#: A (table, column) pair, which names one kind of row. The table is "data" for frames and "final"
#: for observations after the last step.
Place = tuple[str, str]
#: Exceptions that opening a file raises if it was deleted or replaced.
GONE = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError)
_CPU = torch.device("cpu")
#: Bytes of one trajectory that a stream prefetches at a time.
_STRETCH_BYTES = 256 * 1024
_ENDS = np.array(["open", "terminated", "truncated", "unknown"])


class Rows(NamedTuple):
    """K ranges of frames to read, each within one episode, and their output rows.

    Attributes:
        episode: Episode number of each range, int64 `[K]`.
        start: First frame of each range, int64 `[K]`.
        num_frames: Number of frames of each range, int64 `[K]`.
        target: First output row of each range, int64 `[K]`. Frame `start + k` is copied to row
            `target + k`.
    """

    episode: Int64s
    start: Int64s
    num_frames: Int64s
    target: Int64s


class FetchedRows:
    """Prefetched rows, which a source keeps in memory until the caller drops them."""

    def drop(self) -> None:
        """Release the rows, and cancel their fetching."""


class RowSource(EpisodeSource):
    """Base class of snapshots that read episodes as rows of fixed size.

    A row contains the fields of a frame that are stored together. Each subclass reads rows from
    another storage: mapped files, files read on demand, remote files, or memory.
    `LiveSource.snapshot` creates a source. The source of a recording also has the metadata,
    problems and advice of its folder; for a stream, `LiveSource` has them.

    Attributes:
        index: The episodes as arrays: lengths, ends, writers, and positions of their frames.
        layouts: Maps the tables "data" and "final" to their row layouts.
        device: Device of the rows.
        is_lost: Whether each episode is known to be unreadable, bool `[num_episodes]`. Streams
            skip such episodes.
        notes: Reader of the annotations in block files: metadata of episodes and texts of frames.
        read_header: Function that reads the header of a block in the index.
        episode_tasks: Task of each episode; None for block files, which store it as annotation.
        read_texts: Function that reads the texts of all text fields; None for block files.
        episode_names: Name of each episode; None for block files.
        listing: Result of the folder scan, for other processes; None for snapshots of a stream.
        reopening: Function and arguments that open this snapshot in another process; None for
            snapshots of a stream.
    """

    #: Whether the rows are in block files on this machine, so that their checksums can be checked.
    has_local_blocks = False

    def __init__(
        self, index: TrajectoryIndex, layouts: Mapping[str, RowLayout], device: torch.device = _CPU
    ) -> None:
        self.index = index
        self.layouts = layouts
        self.device = device
        self.is_lost = np.zeros(len(index), bool)
        self.read_header: Callable[[Block], BlockHeader] = _header_of
        self.episode_tasks: Sequence[str] | None = None
        self.read_texts: Callable[[], Iterable[str]] | None = None
        self.episode_names: Sequence[str] | None = None
        self.path = Path()
        self.metadata = {}
        self.problems = []
        self.advice = []
        self.splits = {}
        self.notes = Notes()
        self.listing: Any = None
        self.reopening: tuple[Callable[..., RowSource], tuple[Any, ...]] | None = None
        self._texts: dict[int, str] | None = None
        self._last_rows: tuple[tuple[int, str, int, int], torch.Tensor] | None = None
        #: Episodes whose damaged metadata were added to `problems`.
        self._damaged_notes = set[int]()

    def __reduce__(self) -> Any:
        """Pickle the listing of the files. An unpickled copy opens the same files."""
        if self.reopening is None:
            raise TypeError("only the source of a recording can be pickled")
        return self.reopening

    # Descriptions of episodes
    @property
    def episodes(self) -> TrajectoryInfos:
        # Not cached: the object refers to this source, and a reference cycle keeps files mapped.
        return TrajectoryInfos(self, self._damaged_notes)

    @cached_property
    def numeric_fields(self) -> Schema:
        """The recorded fields of a frame, except text fields."""
        return Schema(field for field in self.layouts[DATA].schema.values() if not field.is_text)

    @cached_property
    def text_names(self) -> tuple[str, ...]:
        """Names of the text fields of a frame."""
        return tuple(name for name, field in self.layouts[DATA].schema.items() if field.is_text)

    @property
    def blocks(self) -> list[Block]:
        return [self.notes.kept(block) for block in self.index.blocks]

    def name_of(self, episode: int) -> str:
        """Return the name of an episode, which is "writer:number" in block files."""
        if self.episode_names is not None:
            return self.episode_names[episode]
        writer, number = self.index.keys(np.array([episode]))[0]
        return f"{writer[writer.find(':') + 1 :]}:{number}"

    def schemas(self) -> tuple[Int64s, list[Schema]]:
        if self._noted is None:
            return super().schemas()
        noted = self._noted.get(ABSENT)
        if noted is None:
            return np.zeros(len(self.index), np.int64), [self.numeric_fields]
        position_of: dict[Schema, int] = {}
        position_of_names: dict[tuple[str, ...], int] = {}
        absent = [tuple(names or ()) for names in noted]
        for names in dict.fromkeys(absent):
            # The schema does not contain all absent fields, for example no end flags.
            schema = _without(self.numeric_fields, names)
            position_of_names[names] = position_of.setdefault(schema, len(position_of))
        return np.array([position_of_names[names] for names in absent], np.int64), list(position_of)

    def column(self, name: str) -> np.ndarray[Any, Any]:
        if self._noted is None:
            return column_of(self.episodes, name)
        index = self.index
        writers = [writer[writer.find(":") + 1 :] for writer in index.writers] or [""]
        writer = np.array(writers)[index.writer]
        if name == "id":
            return np.char.add(np.char.add(writer, ":"), index.number.astype(str))
        if name == "ends":
            is_unknown = (index.end == End.UNKNOWN) & index.is_end_unknown()
            ends: np.ndarray[Any, Any] = _ENDS[np.where(is_unknown, 3, index.end)]
            return ends
        if name == "length":
            return index.lengths
        if name == "return":
            return np.full(len(index), np.nan)
        noted = self._noted.get("end_time_ns" if name == "time" else name, [])
        if name == "success":
            success = np.full(len(index), -1, np.int8)
            for number, value in enumerate(noted):
                if isinstance(value, bool):
                    success[number] = value
            return success
        # Use the metadata first: those of a converted episode contain its original values.
        stored = {"env": index.env.astype(np.int64), "writer": writer, "time": index.end_time_ns}
        values = stored.get(name, np.full(len(index), ""))
        value_type = str if values.dtype.kind == "U" else int
        if any(type(value) is value_type for value in noted):
            pairs = zip(noted, values.tolist(), strict=True)
            values = np.array(
                [value if type(value) is value_type else other for value, other in pairs]
            )
        if name != "time":
            return values
        return np.where(values == 0, np.datetime64("NaT"), values.astype("datetime64[ns]"))

    @cached_property
    def _noted(self) -> dict[str, list[Any]] | None:
        """Columns of the episode table that are read from annotations.

        The dict maps each key to a list with one value per episode. The property is None if an
        annotation is damaged.
        """
        try:
            return self.notes.columns(
                self, {"env", "writer", "end_time_ns", "success", "task", ABSENT}
            )
        except CorruptFileError:
            return None

    def removed(self, numbers: Iterable[int]) -> dict[int, DataFileError]:
        if isinstance(self.path, RemotePath):
            return {}
        asked = np.array(list(numbers), np.int64)
        changed = {block.path for block in self.index.blocks_of(asked) if not _is_as_found(block)}
        errors: dict[int, DataFileError] = {}
        for number in asked.tolist() if changed else ():
            lost = [
                block for block in self.index.blocks_of(np.array([number])) if block.path in changed
            ]
            if lost:
                errors[number] = self._removed_error(number, lost[0])
        return errors

    def damaged(self, numbers: Iterable[int]) -> dict[int, DataFileError]:
        if not self.has_local_blocks:
            return {}
        asked = np.array(list(numbers), np.int64)
        errors: dict[tuple[str, int], DataFileError] = {}
        for block in self.index.blocks_of(asked):
            # Retention may delete a block in the meantime. Reading its episodes reports that.
            with suppress(FileNotFoundError):
                for _, error in damaged_fragments(self.read_header(block)):
                    errors[block.writer, error.trajectory] = error
        keys = zip(asked.tolist(), self.index.keys(asked), strict=True)
        return {number: errors[key] for number, key in keys if key in errors}

    def _removed_error(self, number: int, block: Block) -> DataFileError:
        writer, within = self.index.keys(np.array([number]))[0]
        name = f"{writer[writer.find(':') + 1 :]}:{within}"
        is_replaced = block.path.exists()
        change = "replaced" if is_replaced else "removed, as by prune"
        error = LostBlockError(
            f"Episode {name!r} of {str(self.path)!r} cannot be read: its file "
            f"{str(block.path)!r} was {change}. The other episodes are read. Call refresh() to "
            "list the present episodes.",
            episode=name,
        )
        error.key = block.key
        return error

    # Reading of fields by name
    def read(self, number: int, name: str, start: int, stop: int) -> Any:
        self.check_present([number])
        column = self.layouts[DATA].column_of[name].name
        wanted = number, column, start, stop
        # Keep the last rows, since callers usually read all fields of the same steps.
        if self._last_rows is None or self._last_rows[0] != wanted:
            rows = self.column_rows(
                column, *(np.array([value]) for value in (number, start, stop - start))
            )
            self._last_rows = wanted, rows
        values: np.ndarray[Any, Any] = self._array((DATA, name), self._last_rows[1]).copy()
        if not self.layouts[DATA].schema[name].is_text:
            return values
        return self._texts_of(name, values.reshape(-1))

    def read_many(
        self, numbers: Int64s, names: Sequence[str], starts: Int64s, counts: Int64s
    ) -> dict[str, Any]:
        self.check_present(numbers.tolist())
        column_of_field = self.layouts[DATA].column_of
        columns = {column_of_field[name].name: column_of_field[name] for name in names}
        values = dict[str, Any]()
        for column in columns.values():
            rows = self.column_rows(column.name, numbers, starts, counts)
            for name in names:
                if name in column.offsets:
                    values[name] = self._array((DATA, name), rows)
        return values

    def read_final(self, number: int, name: str) -> Any:
        self.check_present([number])
        column = self.layouts[FINAL].column_of[name].name
        values = self._array((FINAL, name), self.final_rows(column, np.array([number])))
        if self.layouts[FINAL].schema[name].is_text:
            return self._texts_of(name, values[:1].reshape(-1))[0]
        return values[0, ...]

    def _array(self, place: Place, rows: torch.Tensor) -> np.ndarray[Any, Any]:
        """Decode a field in rows of its column to an array; bfloat16 becomes float32.

        `place` is (table, field).
        """
        values = self.layouts[place[0]].decoded(place[1], rows)
        array: np.ndarray[Any, Any] = (
            values.float() if values.dtype == torch.bfloat16 else values
        ).numpy()
        return array

    def _texts_of(self, name: str, numbers: np.ndarray[Any, Any]) -> list[str]:
        """Return the texts with these ids; `name` is the text field, for errors."""
        if self._texts is None:
            self._texts = self.notes.texts(self)
        missing = sorted(set(numbers.tolist()) - self._texts.keys())
        if missing:
            raise DataFileError(
                f"A text of {name!r} in {str(self.path)!r} was damaged and set aside (id "
                f"{missing[0]}). Read the other fields of the episode."
            )
        return [self._texts[number] for number in numbers.tolist()]

    # Reading of rows, for batches
    def read_rows(self, rows: Rows, length: int, out: Mapping[str, torch.Tensor]) -> None:
        """Copy rows of several columns to tensors on `device`.

        Args:
            rows: Frames in ascending order of their targets. No range crosses the end of a window.
            length: Number of rows per window, if the frames cover all output rows. 0 if they may
                cover only a part of the output.
            out: Maps columns to output tensors: int32 `[num_windows, length, row_bytes / 4]` with
                any strides, or contiguous `[num_rows, row_bytes / 4]`.

        Raises:
            DataFileError: Rows cannot be read. A `LostBlockError` names the episodes of a deleted
                file.
        """
        runs = self.locate(rows)
        for column, tensor in out.items():
            self._copy((DATA, column), runs, length, tensor)

    def column_rows(
        self, column: str, episode: Int64s, start: Int64s, count: Int64s
    ) -> torch.Tensor:
        """Read one column of frames `start[i]:start[i] + count[i]` of episodes, concatenated.

        Returns:
            New uint8 tensor `[sum(count), row_bytes]`.
        """
        num_words = self.layouts[DATA].columns[column].row_bytes // 4
        out = torch.empty((int(count.sum()), num_words), dtype=torch.int32)
        if len(out):
            self.read_rows(Rows(episode, start, count, np.cumsum(count) - count), 0, {column: out})
            self.note_read_once(out.nbytes)
        return out.view(torch.uint8)

    def final_rows(self, column: str, episodes: Int64s) -> torch.Tensor:
        """Read one column of the final observations of K episodes: new uint8 `[K, row_bytes]`.

        All episodes must have a final observation.
        """
        runs = self.locate_finals(episodes)
        width = self.layouts[FINAL].columns[column].row_bytes // 4
        out = torch.empty((len(episodes), width), dtype=torch.int32, device=self.device)
        self._copy((FINAL, column), runs, 1, out)
        return out.view(torch.uint8)

    def probe(self, episode: int) -> None:
        """Read the first frame of an episode to check that it can be read.

        Raises:
            DataFileError: The frame cannot be read.
        """
        for column in list(self.layouts[DATA].columns)[:1]:
            number = np.array([episode])
            self.column_rows(column, number, np.zeros_like(number), np.ones_like(number))

    def file_of_row(self, column: str, episode: int, frame: int) -> Path:
        """Return the file that contains one column of frame `frame` of an episode."""
        first = np.zeros(1, np.int64)
        runs = self.index.locate(np.array([episode]), np.array([frame]), first + 1, first)
        return self._file_of(
            self.index.blocks[int(runs.block[0])], (DATA, column), int(runs.row[0])
        )

    def prefetch(self, rows: Rows) -> None:
        """Fetch rows in the background that will be read soon; does nothing for rows in memory."""

    def fetch_rows(self, column: str, rows: Rows) -> FetchedRows:
        """Fetch rows of one column in the background; keep them until the result is dropped.

        Unlike `prefetch`, the caller chooses how many rows are kept. Does nothing for local rows.
        """
        return FetchedRows()

    def fetch_final_rows(self, column: str, episodes: Int64s) -> FetchedRows:
        """Fetch rows of final observations in the background, see `fetch_rows`.

        All episodes must have a final observation.
        """
        return FetchedRows()

    def storage_order(self, episodes: Int64s) -> Int64s:
        """Return the order in which to read episodes: positions sorted by their place in the files."""
        first = self.index.first_fragment[episodes]
        order: Int64s = np.lexsort(
            (self.index.fragment_row[first], self.index.fragment_block[first])
        )
        return order

    def is_resident(self, rows: Rows) -> bool:
        """Return whether rows need no prefetch, since their first frames are in memory."""
        return True

    def stretch_bytes(self, num_envs: int) -> int:
        """Return the bytes of one trajectory to prefetch at a time.

        Playback reads `num_envs` trajectories in parallel, so all of them prefetch this amount.
        """
        return _STRETCH_BYTES

    def note_read_once(self, num_bytes: int) -> None:
        """Count bytes of rows that are not read again, so that mapped memory can be released."""

    def locate(self, rows: Rows) -> Runs:
        """Convert ranges of frames to runs of rows in blocks."""
        return self.index.locate(*rows)

    def locate_finals(self, episodes: Int64s) -> Runs:
        """Return the rows of the final observations of episodes, one run per episode."""
        block = self.index.final_block[episodes]
        row = self.index.final_row[episodes]
        return Runs(np.arange(len(row)), block, row, np.ones(len(row), np.int64))

    @abstractmethod
    def _copy(self, place: Place, runs: Runs, length: int, out: torch.Tensor) -> None:
        """Copy runs of rows of one column to `out`."""

    def _file_of(self, block: Block, place: Place, row: int) -> Path:
        return block.path


class TrajectoryInfos(Sequence[EpisodeInfo]):
    """Sequence of the descriptions of all trajectories; each is built when it is accessed.

    Args:
        source: Source of the trajectories.
        damaged_notes: Numbers of trajectories whose damaged metadata were added to the problems of
            `source`; updated in place.
    """

    def __init__(self, source: RowSource, damaged_notes: set[int]) -> None:
        self._source = source
        self._damaged_notes = damaged_notes

    def __len__(self) -> int:
        return len(self._source.index)

    def __iter__(self) -> Iterator[EpisodeInfo]:
        return (self[number] for number in range(len(self)))

    @overload
    def __getitem__(self, number: int) -> EpisodeInfo: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[EpisodeInfo]: ...
    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return [self[position] for position in range(len(self))[number]]
        source = self._source
        index = source.index
        label, within = index.keys(np.array([number]))[0]
        writer = label[label.find(":") + 1 :]
        end = index.end[number]
        has_end = end != End.UNKNOWN
        is_open = not has_end and not index.is_end_unknown(np.array([number]))[0]
        noted = self._notes_of(number)
        noted.pop(ENDS, None)
        absent = noted.pop(ABSENT, None) or ()
        task = noted.pop("task", None)
        success = noted.pop("success", None)
        metadata = {
            "env": int(index.env[number]),
            "writer": writer,
            "end_time_ns": int(index.end_time_ns[number]),
        }
        metadata |= noted
        # Names such as end flags are not fields of the schema, so they stay in the metadata.
        other_names = [name for name in absent if name not in source.numeric_fields]
        if other_names:
            metadata[ABSENT] = other_names
        if is_open:
            metadata[ENDS] = "open"
        return EpisodeInfo(
            name=f"{writer}:{within}",
            length=int(index.lengths[number]),
            schema=_without(source.numeric_fields, absent),
            texts=source.text_names,
            final=source.layouts[FINAL].schema if index.final_row[number] >= 0 else NO_FIELDS,
            terminated=bool(end == End.TERMINATED) if has_end else None,
            truncated=bool(end == End.TRUNCATED) if has_end else None,
            success=success if isinstance(success, bool) else None,
            task=task if isinstance(task, str) else "",
            metadata=metadata,
        )

    def _notes_of(self, number: int) -> dict[str, Any]:
        """Return the metadata of a trajectory from annotations.

        Damaged metadata add an error to the problems, and the result is {}.
        """
        try:
            return self._source.notes.of(self._source, number)
        except CorruptFileError as problem:
            if number not in self._damaged_notes:
                self._damaged_notes.add(number)
                self._source.problems.append(problem.of("note"))
            return {}


def _without(schema: Schema, names: Sequence[str]) -> Schema:
    """Return a schema without the fields `names`; the same object if `names` is empty."""
    return (
        Schema(field for field in schema.values() if field.name not in names) if names else schema
    )


def _header_of(block: Block) -> BlockHeader:
    return read_header(block.path)


def _is_as_found(block: Block) -> bool:
    """Return whether the file of a block exists and was not replaced since it was opened."""
    try:
        status = block.path.stat()
    except FileNotFoundError:
        return False
    is_stamped = bool(block.mtime_ns)
    return not is_stamped or (status.st_size, status.st_mtime_ns) == (
        block.file_bytes,
        block.mtime_ns,
    )
