"""Reading and checking of block files: the header, rows, annotations and their checksums.

All values of a file are checked against its length and against each other before they are used.
`FORMAT.md` is the specification; `write_block.py` writes blocks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from storage.core.arguments import is_url
from storage.core.durable_files import crc32
from storage.core.fields import Schema
from storage.errors import (
    CorruptFileError,
    DataFileError,
    ForeignFileError,
    RolloutDataError,
    UnsafeFileError,
)
from storage.saving.hdf5_files import Guarded, attribute, member, open_hdf5

from .annotation_table import (
    BYTES,
    EPISODES,
    NOTE_DTYPE,
    NOTES_CRC,
    TABLE,
    TEXTS,
    NoteTable,
    tables_crc,
)
from .chunk_table import (
    CHUNK_CHECKSUMS,
    CHUNKS,
    OFFSETS,
    ChecksumError,
    ChunkTable,
    Coding,
    check_parts,
    read_codings,
)
from .damaged_rows import DamagedRowsError, located
from .row_layout import RowLayout

FORMAT_NAME = "rollout-data"
METADATA_NAME = "metadata.json"
FORMAT_VERSION = 1
#: HDF5 attributes that the checksum of the header covers, in this order.
ABOUT = ("schema", "writer", "sequence", "created_ns")
#: HDF5 attribute of blocks with encoded fields. The checksum of the header covers it too.
CODECS = "codecs"
# The two tables of a block: rows of frames, and rows of final observations.
DATA = "data"
FINAL = "final"
# Bits of the flags of a fragment, which state whether the trajectory starts or ends in it, and how.
FIRST = 1
TERMINATED = 2
TRUNCATED = 4
OPEN = 8
TENTATIVE = 16
DROPPED = 32
#: Flag of a fragment whose final observation has no privileged part. The stored final row then
#: repeats the privileged observation of the last frame.
FINAL_OBSERVATION_ONLY = 64
#: Flag, in addition to `OPEN`, of a trajectory whose original data do not state how it ended. It is
#: set only in memory.
END_UNKNOWN = 128
#: Flags for the ways in which a trajectory ends. Its last fragment has at least one of these flags.
ENDS = TERMINATED | TRUNCATED | OPEN | DROPPED
#: Flags for the ways in which a trajectory ends that is kept, that is, not dropped.
COMPLETE = TERMINATED | TRUNCATED | OPEN
#: Maximum size of a metadata.json in bytes. A larger file is damaged or malicious.
MAX_METADATA_BYTES = 1 << 24
#: Maximum number of characters of an HDF5 attribute of a block.
MAX_TEXT_BYTES = 1 << 17
# A table may be a hole in a sparse file: it needs no disk space, but its reader needs memory. The
# following limits keep a small malicious file from filling the memory. `_Tables.read` applies them.
#: Maximum bytes of a table that is a hole, if the block has few fragments.
MAX_HOLLOW_BYTES = 1 << 20
#: Maximum bytes per fragment of a table that is a hole: 128 rewards or 256 checksums.
MAX_HOLLOW_ROW_BYTES = 1024
#: Maximum bytes of a table that is a hole, if the block has many fragments.
MAX_HOLLOW_TABLE_BYTES = 64 << 20

#: Bytes of rows that are written or checked at a time. 1 MiB stays in the second-level cache; 4 MiB
#: took a third longer.
PART_BYTES = 1 << 20

FRAGMENT_DTYPE = np.dtype(
    [
        ("trajectory", "<i8"),  # number of the trajectory within its writer
        ("env", "<i4"),
        ("flags", "<u4"),
        ("start", "<i8"),  # first frame, counted from the start of the trajectory
        ("length", "<i8"),
        ("row", "<i8"),  # first row in the table "data"
        ("final_row", "<i8"),  # row in the table "final"; -1 without a final observation
        ("end_time_ns", "<i8"),  # time of the last frame, ns since the epoch
        ("policy_version", "<i8"),  # -1 if the version is unknown
    ]
)


def corrupt(path: Path, problem: str, *, kind: str = "", episode: str = "") -> CorruptFileError:
    """Build the error for a damaged block at `path`; `problem` describes the damage."""
    advice = f"Run 'rollout-data verify --repair {path.parent}' to set it aside."
    if is_url(path):
        advice = "Push an intact copy."
    return CorruptFileError(
        f"The block {str(path)!r} is damaged: {problem.rstrip('.')}. {advice} The other blocks "
        "are read.",
        kind=kind,
        episode=episode,
    )


@lru_cache(maxsize=64)
def layouts_of(schema: Schema) -> dict[str, RowLayout]:
    """Return the row layouts of the tables: "data" for frames, "final" for final observations."""
    observation = schema.below("observation").values()
    privileged = schema.below("privileged_observation").values()
    final = Schema([*observation, *privileged])
    return {DATA: RowLayout(schema), FINAL: RowLayout(final)}


@lru_cache(maxsize=64)
def _schema_of(text: str) -> Schema:
    return Schema.from_json(json.loads(text))


@dataclass(frozen=True)
class BlockHeader:
    """Header of a block file: everything except the rows, with methods to read rows.

    Attributes:
        path: The file.
        schema: All fields.
        writer: Name of the writer. With `sequence`, it identifies the block.
        sequence: Number of the block among the blocks of its writer.
        fragments: Table of fragments, `[F]` of `FRAGMENT_DTYPE`.
        reward_sums: Sum of the rewards of each fragment, float64 `[F, R]`; R = 0 without rewards.
        locations: For each table, maps columns to (byte offset in the file, number of rows). The
            offset of an encoded column is the offset of its first chunk.
        checksums: For each table, the CRC-32 of each fragment's rows or chunks, uint32
            `[F, columns]`.
        file_bytes: Size of the file in bytes.
        codings: Maps fields with a codec to their coding. Blocks of earlier releases only have
            the codings of fields that are stored in chunks.
        chunks: For each table, maps encoded columns to their chunk tables.
        fetch: Function that returns the bytes `start:stop` of a remote file; None for a local file.
        notes: Maps kinds of annotations to their tables; empty if there are no annotations.
    """

    path: Path
    schema: Schema
    writer: str
    sequence: int
    fragments: np.ndarray
    reward_sums: np.ndarray
    locations: Mapping[str, Mapping[str, tuple[int, int]]]
    checksums: Mapping[str, np.ndarray]
    file_bytes: int
    codings: Mapping[str, Coding]
    chunks: Mapping[str, Mapping[str, ChunkTable]]
    fetch: Callable[[int, int], np.ndarray] | None = None
    notes: Mapping[str, NoteTable] = field(default_factory=dict)

    @property
    def layouts(self) -> dict[str, RowLayout]:
        return layouts_of(self.schema)

    @property
    def num_frames(self) -> int:
        """Total number of frames of all fragments."""
        return int(self.fragments["length"].sum())

    def read_rows(self, table: str, column: str, start: int, stop: int) -> np.ndarray:
        """Read and decode rows `start:stop` of a column: a new array, uint8 `[n, row_bytes]`."""
        offset, num_rows = self.locations[table][column]
        row_bytes = self.layouts[table].columns[column].row_bytes
        if not 0 <= start <= stop <= num_rows:
            raise CorruptFileError(
                f"{str(self.path)!r} has {num_rows} rows of {table}/{column}. Rows "
                f"{start}:{stop} do not exist."
            )
        if column not in self.chunks[table]:
            data = self.read_bytes(offset + start * row_bytes, offset + stop * row_bytes)
            return data.reshape(-1, row_bytes)
        try:
            return self.chunks[table][column].read(start, stop, self.read_bytes)
        except CorruptFileError as cause:
            raise corrupt(self.path, f"{table}/{column}, {cause.message}") from cause

    def stored_at(
        self,
        table: str,
        column: str,
        start: int,
        stop: int,
    ) -> tuple[list[int], list[int]]:
        """Return the byte offsets in the file and the CRC-32 values of the chunks of one fragment.

        The fragment has the rows `start:stop`. The last offset is the end of the last chunk. Rows
        without chunks count as one chunk with the checksum -1, which means unknown.
        """
        chunks = self.chunks[table].get(column)
        if chunks is not None:
            return chunks.chunks_of(start, stop)
        offset = self.locations[table][column][0]
        row_bytes = self.layouts[table].columns[column].row_bytes
        return [offset + start * row_bytes, offset + stop * row_bytes], [-1]

    def read_notes(self, kind: str, key: int | None = None) -> Iterator[tuple[int, str]]:
        """Yield (key, text) for each annotation of a kind, in order.

        With `key`, only annotations with this key are read.

        Raises:
            CorruptFileError: An annotation is damaged.
        """
        table = self.notes.get(kind)
        if table is None:
            return
        places = None if key is None else table.of(key)
        for note_key, data in table.read(self.read_bytes, places):
            try:
                if data is None:
                    raise ValueError("wrong checksum")
                text = data.decode()
            except ValueError as cause:
                problem = f"annotation {note_key} of {kind!r} is damaged, {cause}"
                raise corrupt(self.path, problem) from None
            yield note_key, text

    def read_bytes(self, start: int, stop: int) -> np.ndarray:
        """Read bytes `start:stop` of the file: a new uint8 array."""
        if self.fetch is not None:
            return self.fetch(start, stop)
        data = np.fromfile(self.path, np.uint8, stop - start, offset=start)
        if len(data) < stop - start:
            raise corrupt(
                self.path,
                f"it ends after {len(data)} of the {stop - start} bytes at offset {start}",
            )
        return data


def header_crc(
    fragments: np.ndarray,
    reward_sums: np.ndarray,
    about: Iterable[object],
    offsets: Iterable[np.ndarray] = (),
) -> int:
    """Compute the CRC-32 of a block header.

    Args:
        fragments: Table of fragments, `[F]` of `FRAGMENT_DTYPE`.
        reward_sums: Sum of the rewards of each fragment, float64 `[F, R]`.
        about: Values of the HDF5 attributes that `ABOUT` names, then of the attribute `CODECS` if
            there are encoded fields.
        offsets: Datasets `offsets` of the encoded columns, see `ChunkTable.offsets`.
    """
    text = np.frombuffer("\n".join(map(str, about)).encode(), np.uint8)
    crc = 0
    for part in (fragments, reward_sums, text, *offsets):
        crc = crc32(np.ascontiguousarray(part), crc)
    return crc


def read_header(path: Path, opened: Guarded | None = None) -> BlockHeader:
    """Read and check the header of a block.

    Args:
        path: The file.
        opened: Open remote file; None opens the local file.

    Raises:
        FileNotFoundError: The file does not exist.
        CorruptFileError: The file is truncated or damaged, or its values are inconsistent.
        ForeignFileError: The file is no block, or a block of a newer release.
        UnsafeFileError: The file refers to other files by links, or by external or virtual storage.
    """
    # Do not convert paths: the class of a `RemotePath` is needed to fetch the file.
    path = path if isinstance(path, Path) else Path(path)
    try:
        with open_hdf5(path, opened) as (file, guarded):
            return _read_open_file(path, file, guarded)
    except ForeignFileError:
        raise
    except UnsafeFileError as cause:
        raise UnsafeFileError(f"The block {str(path)!r} is not opened: {cause.message}") from cause
    except CorruptFileError as cause:
        if "signature not found" in cause.message:
            raise ForeignFileError(f"{str(path)!r} is no HDF5 file.") from cause
        problem = cause.message.replace(repr(str(path)), "it", 1)
        raise corrupt(path, problem, kind=cause.kind, episode=cause.episode) from cause
    except DataFileError:  # A remote file could not be fetched. It may be intact.
        raise
    except RolloutDataError as cause:
        # Other errors are raised for an invalid schema, which here means that the file is damaged.
        raise corrupt(path, f"invalid schema, {cause.message}", kind="header") from cause


def _header_error(problem: str) -> CorruptFileError:
    """Build the error for a damaged block header. The caller adds the file name."""
    return CorruptFileError(f"{problem}.", kind="header")


def _read_open_file(path: Path, file: h5py.File, guarded: Guarded) -> BlockHeader:
    """Read and check the header of an open block. The caller adds the file name to errors."""
    tables = _Tables(path, file, guarded)
    schema, codings = _read_attributes(path, file)
    fragments = tables.read("fragments", FRAGMENT_DTYPE, (-1,))
    reward_sums = tables.read("reward_sums", np.dtype("<f8"), (len(fragments), -1))
    locations: dict[str, dict[str, tuple[int, int]]] = {}
    chunks: dict[str, dict[str, ChunkTable]] = {}
    checksums = {}
    for table, layout in layouts_of(schema).items():
        locations[table] = {}
        chunks[table] = {}
        ranges = row_ranges(table, fragments)
        for name, column in layout.columns.items():
            place = f"{table}/{name}"
            if column.is_coded:
                chunk_table = _read_chunks(tables, place, codings[name], layout, ranges)
                chunks[table][name] = chunk_table
                locations[table][name] = (int(chunk_table.places[0]), int(chunk_table.rows[-1]))
            else:
                locations[table][name] = tables.locate(place, layout.numpy_dtype(column))
        shape = (len(fragments), len(layout.columns))
        checksums[table] = tables.read(f"checksums/{table}", np.dtype("<u4"), shape)

    about = {name: attribute(file, name) for name in ABOUT}
    if codings:
        about[CODECS] = attribute(file, CODECS)
    offsets = []
    for columns in chunks.values():
        offsets += [chunk_table.offsets for chunk_table in columns.values()]
    expected = int(attribute(file, "header_crc"))
    checksum = header_crc(fragments, reward_sums, about.values(), offsets)
    if checksum != expected:
        raise _header_error(f"expected header checksum {expected:08x}, got {checksum:08x}")
    writer = about["writer"]
    sequence = int(about["sequence"])
    if not isinstance(writer, str) or sequence < 0:
        raise _header_error(f"writer {writer!r} or sequence number {sequence} is invalid")
    _check_rows(fragments, locations)

    return BlockHeader(
        path=path,
        schema=schema,
        writer=writer,
        sequence=sequence,
        fragments=fragments,
        reward_sums=reward_sums,
        locations=locations,
        checksums=checksums,
        file_bytes=tables.file_bytes,
        codings=codings,
        chunks=chunks,
        notes=_read_notes(tables),
    )


def _check_rows(
    fragments: np.ndarray,
    locations: Mapping[str, Mapping[str, tuple[int, int]]],
) -> None:
    """Check that all columns of a table have as many rows as the fragments need.

    Args:
        fragments: Table of fragments, `[F]` of `FRAGMENT_DTYPE`.
        locations: As in `BlockHeader`.
    """
    sizes = {}
    for table, columns in locations.items():
        sizes[table] = {num_rows for _, num_rows in columns.values()}
    if any(len(counts) > 1 for counts in sizes.values()):
        raise _header_error(f"columns have different numbers of rows, {sizes}")
    num_rows = next(iter(sizes[DATA]), 0)
    num_finals = next(iter(sizes[FINAL]), 0)
    check_fragments(fragments, num_rows, num_finals)
    num_frames = int(fragments["length"].sum())
    if num_frames > num_rows:
        raise _header_error(
            f"the fragments have {num_frames} frames, but the table 'data' has {num_rows} rows"
        )


def _read_notes(tables: _Tables) -> dict[str, NoteTable]:
    """Read and check the tables of annotations.

    Returns:
        Maps the kinds of annotations to their tables; {} if the file has no annotations.
    """
    expected = attribute(tables.file, NOTES_CRC)
    kinds = (EPISODES, TEXTS)
    if expected is None and not any(kind in tables.file for kind in kinds):
        return {}
    stored = {}
    for kind in kinds:
        name = f"{kind}/{TABLE}"
        stored[name] = tables.read(name, NOTE_DTYPE, (-1,))
    if expected is None:
        raise _header_error("the checksum of the annotations is missing")
    checksum = tables_crc(stored)
    if checksum != int(expected):
        raise _header_error(
            f"expected checksum {int(expected):08x} of the annotations, got {checksum:08x}"
        )
    notes = {}
    for kind in kinds:
        offset, num_bytes = tables.locate(f"{kind}/{BYTES}", np.dtype("u1"))
        notes[kind] = NoteTable.checked(stored[f"{kind}/{TABLE}"], offset, num_bytes)
    return notes


def _read_chunks(
    tables: _Tables,
    place: str,
    coding: Coding,
    layout: RowLayout,
    ranges: tuple[np.ndarray, np.ndarray],
) -> ChunkTable:
    """Read and check the chunk table of an encoded column.

    Args:
        tables: Datasets of the block.
        place: Name of the column's HDF5 group: "table/column".
        coding: Coding of the column.
        layout: Row layout of the table.
        ranges: First and stop row of each fragment, `[F]` each.

    Raises:
        CorruptFileError: The table is invalid, for example if a chunk has rows of two fragments.
    """
    offsets = tables.read(f"{place}/{OFFSETS}", np.dtype("<i8"), (-1, 2))
    if not len(offsets):
        raise _header_error(f"the table {OFFSETS!r} of {place} is empty")
    start, num_bytes = tables.locate(f"{place}/{CHUNKS}", np.dtype("u1"))
    num_chunks = len(offsets) - 1
    sums = np.full(num_chunks, -1)  # Blocks of earlier releases have no checksums of chunks.
    if CHUNK_CHECKSUMS in tables.file[place]:
        stored_sums = tables.read(f"{place}/{CHUNK_CHECKSUMS}", np.dtype("<u4"), (num_chunks,))
        sums = stored_sums.astype(np.int64)
    column = layout.columns[place.partition("/")[2]]
    rows, places = np.ascontiguousarray(offsets.T, np.int64)
    chunk_table = ChunkTable(
        codec=coding.chain,
        field=layout.stored[column.name],
        row_bytes=column.row_bytes,
        rows=rows,
        places=places + start,
        sums=sums,
    )
    violated = chunk_table.check(*ranges, coding.frames_per_chunk, start, num_bytes)
    if violated:
        raise _header_error(f"the chunk table of {place} is invalid: expected {violated}")
    return chunk_table


class _Tables:
    """Reader of the HDF5 datasets of an open block.

    Declared sizes and offsets are checked before memory is allocated.
    """

    def __init__(self, path: Path, file: h5py.File, guarded: Guarded) -> None:
        self._path = path
        self.file = file
        self._guarded = guarded
        self.file_bytes = guarded.num_bytes

    def _find(self, name: str) -> h5py.Dataset:
        dataset = member(self.file, name, self._path)
        if not isinstance(dataset, h5py.Dataset) or dataset.chunks is not None:
            raise _header_error(f"{name!r} is no contiguous dataset")
        return dataset

    def read(self, name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray:
        """Read the dataset `name`; -1 in `shape` accepts any size.

        Raises:
            CorruptFileError: The dataset has another dtype or shape, is larger than the file, or
                contains a large hole of a sparse file.
        """
        dataset = self._find(name)
        is_shape = dataset.ndim == len(shape)
        if is_shape:
            is_shape = all(n in (-1, m) for n, m in zip(shape, dataset.shape, strict=True))
        if dataset.dtype != dtype or not is_shape:
            raise _header_error(
                f"{name!r} has dtype {dataset.dtype} and shape {dataset.shape}, expected {dtype} "
                f"and {shape}"
            )
        num_bytes = int(dataset.size) * dtype.itemsize
        if num_bytes > self.file_bytes:
            raise _header_error(
                f"table {name!r} has {num_bytes} bytes, but the file has {self.file_bytes} bytes"
            )

        # A small table of zeros may be a hole if a tool copied the file as a sparse file. The limit
        # grows with the number of fragments, which is known: their table was read first.
        of_fragments = shape[0] * FRAGMENT_DTYPE.itemsize
        of_rows = min(shape[0] * MAX_HOLLOW_ROW_BYTES, MAX_HOLLOW_TABLE_BYTES)
        if num_bytes > max(MAX_HOLLOW_BYTES, of_fragments, of_rows):
            offset = dataset.id.get_offset()
            if offset is None or not self._guarded.is_written(num_bytes, offset):
                raise _header_error(
                    f"table {name!r} was not written completely: a hole in its {num_bytes} bytes"
                )
        return np.asarray(dataset[()])

    def locate(self, name: str, dtype: np.dtype[Any]) -> tuple[int, int]:
        """Return a pair (byte offset, number of rows) of a dataset; (0, 0) if it is empty."""
        dataset = self._find(name)
        if dataset.dtype != dtype or dataset.ndim != 1:
            raise _header_error(
                f"{name!r} has dtype {dataset.dtype} and {dataset.ndim} dimensions, expected "
                f"{dtype} and 1"
            )
        num_rows = int(dataset.shape[0])
        offset = dataset.id.get_offset()
        if num_rows == 0:
            return 0, 0
        if offset is None or offset % 64 or offset + num_rows * dtype.itemsize > self.file_bytes:
            raise _header_error(
                f"the {num_rows} rows of {name!r} are at offset {offset}, expected a multiple of "
                f"64 within {self.file_bytes} bytes"
            )
        return int(offset), num_rows


def open_block(path: Path, verify: bool = False) -> BlockHeader:
    """Read and check the header of a block; with `verify`, also check all rows and annotations.

    Raises the errors of `read_header` and, with `verify`, of `check_contents`.
    """
    header = read_header(path)
    if verify:
        check_contents(header)
    return header


def check_contents(header: BlockHeader) -> None:
    """Check the checksums of all rows and annotations of a block.

    Raises:
        CorruptFileError: A checksum is wrong. The error is about the first wrong checksum.
    """
    for _, error in damaged_fragments(header):
        raise error
    for kind in header.notes:
        for _ in header.read_notes(kind):
            pass


def damaged_fragments(header: BlockHeader) -> Iterator[tuple[int, DamagedRowsError]]:
    """Check all rows of a block; yield (fragment number, error) for each wrong checksum."""
    is_remote = header.fetch is not None
    with nullcontext() if is_remote else open(header.path, "rb", buffering=0) as file:
        # All fragments are read into the same memory, since new memory for each doubles the time.
        memory = np.empty(PART_BYTES, np.uint8)

        def read(start: int, stop: int) -> Iterator[np.ndarray]:
            if file is None:
                yield header.read_bytes(start, stop)
                return
            file.seek(start)
            while start < stop:
                num_bytes = file.readinto(memory[: stop - start].data)
                if not num_bytes:
                    return
                yield memory[:num_bytes]
                start += num_bytes

        for table, columns in header.locations.items():
            first, end = row_ranges(table, header.fragments)
            ranges = list(zip(first.tolist(), end.tolist(), strict=True))
            for column, sums in zip(columns, header.checksums[table].T, strict=True):
                checks = zip(ranges, sums.tolist(), strict=True)
                for number, ((start, stop), expected) in enumerate(checks):
                    if start >= stop:
                        continue
                    bounds, chunk_sums = header.stored_at(table, column, start, stop)
                    try:
                        check_parts(read, bounds, chunk_sums, expected)
                    except ChecksumError as wrong:
                        yield number, _damage(header, table, column, number, wrong)


def _damage(
    header: BlockHeader,
    table: str,
    column: str,
    number: int,
    wrong: ChecksumError,
) -> DamagedRowsError:
    """Build the error for a fragment whose rows have a wrong checksum.

    The error names field and frame if a single wrong byte explains the checksum.
    """
    fragment = header.fragments[number]
    trajectory = int(fragment["trajectory"])
    first_rows, stop_rows = row_ranges(table, header.fragments)
    low = int(first_rows[number])
    difference = 0
    if column not in header.chunks[table]:
        difference = wrong.checksum ^ wrong.expected
    stored = header.layouts[table].columns[column]
    fields, first, last = located(stored, difference, low, int(stop_rows[number]))

    start = int(fragment["start"])
    if table == DATA:
        frames = (start + first - low, start + last - low)
        subject = f"Frames {frames[0]}:{frames[1]} of trajectory {trajectory}"
    else:
        length = start + int(fragment["length"])
        frames = (length, length)
        subject = f"Final values of trajectory {trajectory}"
    error = DamagedRowsError(
        f"{subject} in {str(header.path)!r} are damaged: field "
        f"{' or '.join(map(repr, fields))}, column {table}/{column}, {wrong.message} Run "
        f"'rollout-data verify --repair {header.path.parent}' to keep the intact trajectories."
    )
    error.trajectory = trajectory
    error.fields = fields
    error.frames = frames
    return error


def row_ranges(table: str, fragments: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return a pair (first row, stop row) of arrays `[F]`: the rows of each fragment in `table`.

    The two are equal for a fragment without rows in the table.
    """
    if table == DATA:
        return fragments["row"], fragments["row"] + fragments["length"]
    final = fragments["final_row"]
    return np.maximum(final, 0), np.maximum(final + 1, 0)


def _read_attributes(path: Path, file: h5py.File) -> tuple[Schema, dict[str, Coding]]:
    """Check format and version of a block; return its schema and the codings of its fields."""
    format_name = attribute(file, "format")
    if format_name != FORMAT_NAME:
        raise ForeignFileError(
            f"{str(path)!r} has format {format_name!r}, expected {FORMAT_NAME!r}."
        )
    version = int(attribute(file, "version"))
    if version != FORMAT_VERSION:
        raise ForeignFileError(
            f"The block {str(path)!r} has version {version}, expected {FORMAT_VERSION}. Use the "
            "release that wrote it."
        )
    texts = {"schema": attribute(file, "schema"), "codecs": attribute(file, CODECS) or ""}
    for name, text in texts.items():
        if not isinstance(text, str) or len(text) > MAX_TEXT_BYTES:
            raise _header_error(
                f"the attribute {name!r} is no JSON text of at most {MAX_TEXT_BYTES} characters"
            )
    schema = _schema_of(texts["schema"])
    return schema, read_codings(texts["codecs"], schema)


def check_fragments(
    fragments: np.ndarray,
    num_rows: int | np.ndarray,
    num_finals: int | np.ndarray,
) -> None:
    """Check that the rows of every fragment are inside the tables of its block.

    Args:
        fragments: Table of fragments, `[F]` of `FRAGMENT_DTYPE`.
        num_rows, num_finals: Numbers of rows in the tables `data` and `final` of each fragment's
            block: int64 `[F]`, or one number for all fragments.

    Raises:
        CorruptFileError: A fragment has rows outside its table. The error does not name the file.
    """
    row = fragments["row"]
    length = fragments["length"]
    final = fragments["final_row"]
    # The bitwise OR of several numbers is negative if any of the numbers is negative.
    signs = row | length | (final + 1)
    signs = signs | fragments["start"] | fragments["env"] | fragments["trajectory"]
    is_wrong = (signs < 0) | (row > num_rows - length) | (final >= num_finals)
    if is_wrong.any():
        first = int(np.argmax(is_wrong))
        raise CorruptFileError(
            f"fragment {first} lies outside the rows of its block: {fragments[first]}.",
            kind="outside",
            episode=str(fragments["trajectory"][first]),
        )
