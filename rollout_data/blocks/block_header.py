"""Reading a block: its header with all checks, its rows and their checksums.

One rule: nothing from a file is used before it was checked against the file's length and against itself.
`FORMAT.md` is the specification, `write.py` the writing side.
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
from storage.errors import CorruptFileError, DataFileError, ForeignFileError, RolloutDataError, UnsafeFileError
from storage.saving.hdf5_files import Guarded, attribute, member, open_hdf5

from .annotation_table import BYTES, EPISODES, NOTE_DTYPE, NOTES_CRC, TABLE, TEXTS, NoteTable, tables_crc
from .chunk_table import CHUNK_CHECKSUMS, CHUNKS, OFFSETS, ChunkTable, Coding, check_parts, read_codings
from .damaged_rows import DamagedRowsError, located
from .row_layout import RowLayout

FORMAT_NAME = "rollout-data"
METADATA_NAME = "metadata.json"
FORMAT_VERSION = 1
#: Attributes under the header's checksum, in this order.
ABOUT = ("schema", "writer", "sequence", "created_ns")
#: One more, in blocks with coded fields only.
CODECS = "codecs"
#: The two tables of rows in a block.
DATA, FINAL = "data", "final"
#: Flags of a fragment.
FIRST, TERMINATED, TRUNCATED, OPEN, TENTATIVE, DROPPED = 1, 2, 4, 8, 16, 32
#: The privileged part of the fragment's final row was not given; it repeats the last frame's.
FINAL_OBSERVATION_ONLY = 64
#: Beside `OPEN`, in memory only: the file does not tell how the trajectory ended.
END_UNKNOWN = 128
#: A fragment with one of these is the last of its trajectory.
ENDS = TERMINATED | TRUNCATED | OPEN | DROPPED
#: A trajectory ended by one of these is complete.
COMPLETE = TERMINATED | TRUNCATED | OPEN
#: No metadata.json and no attribute of a block needs more; a larger one is damage or an attack.
MAX_METADATA_BYTES = 1 << 24
MAX_TEXT_BYTES = 1 << 17
#: A larger table must be written: a hole in a file costs its sender nothing, and its reader memory.
MAX_HOLLOW_BYTES = 1 << 20
#: A table with a row for each fragment, of 128 rewards or 256 columns at most, may be zeros as a whole, up to a size.
MAX_HOLLOW_ROW_BYTES, MAX_HOLLOW_TABLE_BYTES = 1024, 64 << 20

#: Rows are written and checked in parts that stay in the second-level cache: parts of 4 MiB took a third longer.
PART_BYTES = 1 << 20

FRAGMENT_DTYPE = np.dtype(
    [
        ("trajectory", "<i8"),  # number within the writer
        ("env", "<i4"),
        ("flags", "<u4"),
        ("start", "<i8"),  # first frame, counted from the trajectory's start
        ("length", "<i8"),
        ("row", "<i8"),  # first row in data/
        ("final_row", "<i8"),  # row in final/, or -1
        ("end_time_ns", "<i8"),  # when the last frame was recorded
        ("policy_version", "<i8"),  # or -1
    ]
)


def corrupt(path: Path, expected: str, got: str) -> CorruptFileError:
    """Build the error for a damaged block."""
    advice = f"Run 'rollout-data verify --repair {path.parent}' to set it aside; the other blocks stay readable"
    if is_url(path):
        advice = "Publish it again from where it is intact; the other blocks stay readable"
    return CorruptFileError("read the block", repr(str(path)), expected, got, advice)


@lru_cache(maxsize=64)
def layouts_of(schema: Schema) -> dict[str, RowLayout]:
    """Return the row layout of each table of a block: all fields, and those of a true final observation."""
    final = [*schema.below("observation").values(), *schema.below("privileged_observation").values()]
    return {DATA: RowLayout(schema), FINAL: RowLayout(Schema(final))}


@lru_cache(maxsize=64)
def _schema_of(text: str) -> Schema:
    return Schema.from_json(json.loads(text))


@dataclass(frozen=True)
class BlockHeader:
    """What is known of a block without reading a row.

    Attributes:
        path: The file.
        schema: All fields, as users see them.
        writer: Who wrote it; with `sequence` it names the block.
        sequence: Position among the writer's blocks.
        fragments: `[F]` of `FRAGMENT_DTYPE`.
        reward_sums: `[F, R]` float64; R = 0 where no rewards were recorded.
        locations: Table -> column -> (byte offset in the file, number of rows); of its chunks, where it is coded.
        checksums: Table -> `[F, columns]` uint32, CRC-32 of each fragment's rows or chunks.
        file_bytes: Size of the file.
        codings: Field -> how it is coded, of the fields that have a codec; in older blocks of those in chunks only.
        chunks: Table -> column -> where its chunks are, of the coded columns.
        fetch: Reads bytes `start:stop` where the file is not on this machine.
        notes: Kind -> where its notes are; empty where nothing was noted.
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
        """How many frames its fragments have in all."""
        return int(self.fragments["length"].sum())

    def read_rows(self, table: str, column: str, start: int, stop: int) -> np.ndarray:
        """Read rows `start:stop` of a column, decoded: a new `[stop - start, row_bytes]` uint8 array."""
        offset, num_rows = self.locations[table][column]
        row_bytes = self.layouts[table].columns[column].row_bytes
        if not 0 <= start <= stop <= num_rows:
            raise CorruptFileError(f"read rows {start}:{stop} of", repr(str(self.path)), f"rows in 0:{num_rows}")
        if column not in self.chunks[table]:
            return self.read_bytes(offset + start * row_bytes, offset + stop * row_bytes).reshape(-1, row_bytes)
        try:
            return self.chunks[table][column].read(start, stop, self.read_bytes)
        except CorruptFileError as cause:
            raise corrupt(self.path, f"{cause.expected} in {table}/{column}", cause.got) from cause

    def stored_at(self, table: str, column: str, start: int, stop: int) -> tuple[list[int], list[int]]:
        """Return where rows `start:stop`, of a fragment, are in the file: bounds of chunks, and their checksums."""
        if (chunks := self.chunks[table].get(column)) is not None:
            return chunks.chunks_of(start, stop)
        offset = self.locations[table][column][0]
        row_bytes = self.layouts[table].columns[column].row_bytes
        return [offset + start * row_bytes, offset + stop * row_bytes], [-1]

    def read_notes(self, kind: str, key: int | None = None) -> Iterator[tuple[int, str]]:
        """Yield (key, text) of the notes of a kind, of one key or of all, in order.

        Raises:
            CorruptFileError: One is damaged.
        """
        if (table := self.notes.get(kind)) is None:
            return
        for found, data in table.read(self.read_bytes, None if key is None else table.of(key)):
            try:
                if data is None:
                    raise ValueError("another checksum")
                text = data.decode()
            except ValueError as cause:
                raise corrupt(self.path, f"the note {found} of {kind!r} as UTF-8 of its checksum", str(cause)) from None
            yield found, text

    def read_bytes(self, start: int, stop: int) -> np.ndarray:
        """Read bytes `start:stop` of the file: a new uint8 array."""
        if self.fetch is not None:
            return self.fetch(start, stop)
        data = np.fromfile(self.path, np.uint8, stop - start, offset=start)
        if len(data) < stop - start:
            raise corrupt(self.path, f"{stop - start} bytes at {start}", f"{len(data)}")
        return data


def header_crc(
    fragments: np.ndarray, reward_sums: np.ndarray, about: Iterable[object], offsets: Iterable[np.ndarray] = ()
) -> int:
    """CRC-32 of the fragment table, the reward sums, the attributes in `ABOUT`, and what coded fields add."""
    text = np.frombuffer("\n".join(map(str, about)).encode(), np.uint8)
    crc = 0
    for part in (fragments, reward_sums, text, *offsets):
        crc = crc32(np.ascontiguousarray(part), crc)
    return crc


def read_header(path: Path, opened: Guarded | None = None) -> BlockHeader:
    """Read and check the header of a block, `opened` if it is not on this machine.

    Raises:
        FileNotFoundError: It is not there (any more).
        CorruptFileError: Truncated, damaged or contradicting itself.
        ForeignFileError: Not a block, or of a newer version.
        UnsafeFileError: It points outside itself (links, external or virtual storage).
    """
    path = path if isinstance(path, Path) else Path(path)  # one behind a network stays what it is
    try:
        with open_hdf5(path, opened) as (file, guarded):
            return _read_open_file(path, file, guarded)
    except ForeignFileError:
        raise
    except UnsafeFileError as cause:
        raise UnsafeFileError("read the block", repr(str(path)), cause.expected, cause.got) from cause
    except CorruptFileError as cause:
        if "signature not found" in cause.got:
            raise ForeignFileError("read the block", repr(str(path)), "an HDF5 file", "another format") from cause
        raise corrupt(path, cause.expected, cause.got).of(cause.kind, cause.episode) from cause
    except DataFileError:  # it could not be fetched
        raise
    except RolloutDataError as cause:  # a schema that cannot be is the file's fault here, not the caller's
        raise corrupt(path, "an intact schema", str(cause)).of("header") from cause


def _wrong(expected: str, got: object) -> CorruptFileError:
    """Build an error without the place, which `read_header` knows."""
    return CorruptFileError("read", "", expected, str(got)).of("header")


def _read_open_file(path: Path, file: h5py.File, guarded: Guarded) -> BlockHeader:
    tables = _Tables(path, file, guarded)
    schema, codings = _read_attributes(path, file)
    fragments = tables.read("fragments", FRAGMENT_DTYPE, (-1,))
    reward_sums = tables.read("reward_sums", np.dtype("<f8"), (len(fragments), -1))
    locations: dict[str, dict[str, tuple[int, int]]] = {}
    chunks: dict[str, dict[str, ChunkTable]] = {}
    checksums = {}
    for table, layout in layouts_of(schema).items():
        locations[table], chunks[table], ranges = {}, {}, row_ranges(table, fragments)
        for name, column in layout.columns.items():
            if column.is_coded:
                found = chunks[table][name] = _read_chunks(tables, f"{table}/{name}", codings[name], layout, ranges)
                locations[table][name] = int(found.places[0]), int(found.rows[-1])
            else:
                locations[table][name] = tables.locate(f"{table}/{name}", layout.numpy_dtype(column))
        checksums[table] = tables.read(f"checksums/{table}", np.dtype("<u4"), (len(fragments), len(layout.columns)))
    about = {name: attribute(file, name) for name in (*ABOUT, *([CODECS] if codings else []))}
    offsets = [one.offsets for of in chunks.values() for one in of.values()]
    expected = attribute(file, "header_crc")
    if (crc := header_crc(fragments, reward_sums, about.values(), offsets)) != int(expected):
        raise _wrong(f"header checksum {int(expected):08x}", f"{crc:08x}")
    writer = about["writer"]
    sequence = int(about["sequence"])
    if not isinstance(writer, str) or sequence < 0:
        raise _wrong("a writer's name and a sequence number", f"{writer!r} and {sequence}")
    sizes = {table: {rows for _, rows in columns.values()} for table, columns in locations.items()}
    if any(len(counts) > 1 for counts in sizes.values()):
        raise _wrong("as many rows in every column", sizes)
    num_rows, num_finals = (next(iter(sizes[table]), 0) for table in (DATA, FINAL))
    check_fragments(fragments, num_rows, num_finals)
    if (num_frames := int(fragments["length"].sum())) > num_rows:
        raise _wrong(f"each of {num_rows} rows in one fragment", f"{num_frames} frames").of("shared")
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


def _read_notes(tables: _Tables) -> dict[str, NoteTable]:
    """Read where the notes are; a file without a trace of them has none."""
    expected = attribute(tables.file, NOTES_CRC)
    kinds = (EPISODES, TEXTS)
    if expected is None and not any(kind in tables.file for kind in kinds):
        return {}
    found = {f"{kind}/{TABLE}": tables.read(f"{kind}/{TABLE}", NOTE_DTYPE, (-1,)) for kind in kinds}
    if expected is None or tables_crc(found) != int(expected):
        raise _wrong(f"notes with the checksum {expected}", f"{tables_crc(found)}")
    places = {kind: tables.locate(f"{kind}/{BYTES}", np.dtype("u1")) for kind in kinds}
    return {kind: NoteTable.checked(found[f"{kind}/{TABLE}"], *places[kind]) for kind in kinds}


def _read_chunks(
    tables: _Tables, place: str, coding: Coding, layout: RowLayout, ranges: tuple[np.ndarray, np.ndarray]
) -> ChunkTable:
    """Read where the chunks of a coded column are; every fragment must have chunks of its own, inside the file."""
    offsets = tables.read(f"{place}/{OFFSETS}", np.dtype("<i8"), (-1, 2))
    if not len(offsets):
        raise _wrong(f"offsets of {place}", "none")
    start, num_bytes = tables.locate(f"{place}/{CHUNKS}", np.dtype("u1"))
    sums = np.full(len(offsets) - 1, -1)  # older blocks have none
    if CHUNK_CHECKSUMS in tables.file[place]:
        sums = tables.read(f"{place}/{CHUNK_CHECKSUMS}", np.dtype("<u4"), (len(offsets) - 1,)).astype(np.int64)
    column = layout.columns[place.partition("/")[2]]
    rows, places = np.ascontiguousarray(offsets.T, np.int64)
    found = ChunkTable(coding.chain, layout.stored[column.name], column.row_bytes, rows, places + start, sums)
    if wrong := found.check(*ranges, coding.frames_per_chunk, start, num_bytes):
        raise _wrong(f"{wrong} in {place}", "another table")
    return found


class _Tables:
    """The datasets of an open block. No declaration costs memory or leads out of the file: it is checked first."""

    def __init__(self, path: Path, file: h5py.File, guarded: Guarded) -> None:
        self._path = path
        self.file = file
        self._guarded = guarded
        self.file_bytes = guarded.num_bytes

    def _find(self, name: str) -> h5py.Dataset:
        dataset = member(self.file, name, self._path)
        if not isinstance(dataset, h5py.Dataset) or dataset.chunks is not None:
            raise _wrong(f"a dataset {name!r}, stored contiguously", type(dataset).__name__)
        return dataset

    def read(self, name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray:
        """Read a table of this dtype and shape, -1 for any size; nothing is read of another one, or of a hollow one."""
        dataset = self._find(name)
        is_shape = dataset.ndim == len(shape) and all(n in (-1, m) for n, m in zip(shape, dataset.shape, strict=True))
        if dataset.dtype != dtype or not is_shape:
            raise _wrong(f"{name!r} as {dtype} of shape {shape}", f"{dataset.dtype} of shape {dataset.shape}")
        declared = int(dataset.size) * dtype.itemsize
        if declared > self.file_bytes:
            raise _wrong(f"a table {name!r} within the {self.file_bytes} bytes of the file", f"{declared} bytes")
        # What takes little more than the fragments, which were read before, may be zeros, hence a hole in a copy.
        wide = min(shape[0] * MAX_HOLLOW_ROW_BYTES, MAX_HOLLOW_TABLE_BYTES)
        may_be_hollow = declared <= max(MAX_HOLLOW_BYTES, shape[0] * FRAGMENT_DTYPE.itemsize, wide)
        if not may_be_hollow:
            offset = dataset.id.get_offset()
            if offset is None or not self._guarded.is_written(declared, offset):
                raise _wrong(f"a table {name!r} that was written", f"{declared} bytes with a hole in them")
        return np.asarray(dataset[()])

    def locate(self, name: str, dtype: np.dtype[Any]) -> tuple[int, int]:
        """Find where a column's rows lie: (byte offset, number of rows)."""
        dataset = self._find(name)
        if dataset.dtype != dtype or dataset.ndim != 1:
            raise _wrong(f"{name!r} as one row of {dtype} per frame", f"{dataset.dtype} in {dataset.ndim} dimensions")
        num_rows = int(dataset.shape[0])
        offset = dataset.id.get_offset()
        if num_rows == 0:
            return 0, 0
        if offset is None or offset % 64 or offset + num_rows * dtype.itemsize > self.file_bytes:
            where = f"at a multiple of 64 within {self.file_bytes} bytes"
            raise _wrong(f"{num_rows} rows of {name!r} {where}", f"offset {offset}")
        return int(offset), num_rows


def open_block(path: Path, verify: bool = False) -> BlockHeader:
    """Read and check a block's header (see `read_header`); with `verify` check all its rows too."""
    header = read_header(path)
    if verify:
        check_contents(header)
    return header


def check_contents(header: BlockHeader) -> None:
    """Raise the first error that the checksums of rows and notes show."""
    for _, error in damaged_fragments(header):
        raise error
    for kind in header.notes:
        for _ in header.read_notes(kind):
            pass


def damaged_fragments(header: BlockHeader) -> Iterator[tuple[int, DamagedRowsError]]:
    """Check every checksum of a block; yield (fragment number, error) for each that is wrong."""
    with nullcontext() if header.fetch is not None else open(header.path, "rb", buffering=0) as file:
        memory = np.empty(PART_BYTES, np.uint8)  # one for all, as new memory for each fragment took twice the time

        def read(start: int, stop: int) -> Iterator[np.ndarray]:
            if file is None:
                yield header.read_bytes(start, stop)
                return
            file.seek(start)
            while start < stop and (num_bytes := file.readinto(memory[: stop - start].data)):
                yield memory[:num_bytes]
                start += num_bytes

        for table, columns in header.locations.items():
            ranges = list(zip(*(bound.tolist() for bound in row_ranges(table, header.fragments)), strict=True))
            for column, sums in zip(columns, header.checksums[table].T, strict=True):
                for number, ((start, stop), expected) in enumerate(zip(ranges, sums.tolist(), strict=True)):
                    try:
                        if start < stop:
                            check_parts(read, *header.stored_at(table, column, start, stop), expected)
                    except CorruptFileError as wrong:
                        yield number, _damage(header, table, column, number, wrong)


def _damage(header: BlockHeader, table: str, column: str, number: int, wrong: CorruptFileError) -> DamagedRowsError:
    """Build the error for damaged rows of a fragment; it names the field and the frame if one byte explains it."""
    advice = f"Run 'rollout-data verify --repair {header.path.parent}' to keep the intact trajectories"
    fragment = header.fragments[number]
    stored = header.layouts[table].columns[column]
    low, stop = (int(bound[number]) for bound in row_ranges(table, header.fragments))
    is_coded = column in header.chunks[table]
    difference = 0 if is_coded else int(wrong.got, 16) ^ int(wrong.expected.removeprefix("checksum "), 16)
    fields, first, last = located(stored, difference, low, stop)
    start = int(fragment["start"]) - low if table == DATA else int(fragment["start"] + fragment["length"]) - low
    frames = f"{first + start}:{last + start}" if table == DATA else "after the last"
    action = f"read frames {frames} of trajectory {int(fragment['trajectory'])}"
    where = f"in {str(header.path)!r}, field {' or '.join(map(repr, fields))}, column {table}/{column}"
    found = DamagedRowsError(action, where, wrong.expected, wrong.got, advice)
    found.trajectory = int(fragment["trajectory"])
    found.fields = fields
    found.frames = (first + start, last + start) if table == DATA else (start + low, start + low)
    return found


def row_ranges(table: str, fragments: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """First row and end of every fragment in one of the two tables; equal where it has none."""
    if table == DATA:
        return fragments["row"], fragments["row"] + fragments["length"]
    final = fragments["final_row"]
    return np.maximum(final, 0), np.maximum(final + 1, 0)


def _read_attributes(path: Path, file: h5py.File) -> tuple[Schema, dict[str, Coding]]:
    """Check format and version; give the fields and how they are coded."""
    where = repr(str(path))
    kind = attribute(file, "format")
    if kind != FORMAT_NAME:
        raise ForeignFileError("read the block", where, f"format {FORMAT_NAME!r}", repr(kind))
    if (version := int(attribute(file, "version"))) != FORMAT_VERSION:
        expected = f"version {FORMAT_VERSION}"
        advice = "Use the release that wrote it"
        raise ForeignFileError("read the block", where, expected, str(version), advice)
    texts = {"a schema": attribute(file, "schema"), "codecs": attribute(file, CODECS) or ""}
    for name, text in texts.items():
        if not isinstance(text, str) or len(text) > MAX_TEXT_BYTES:
            raise _wrong(f"{name} as JSON text of at most {MAX_TEXT_BYTES} characters", type(text).__name__)
    schema = _schema_of(texts["a schema"])
    return schema, read_codings(texts["codecs"], schema)


def check_fragments(fragments: np.ndarray, num_rows: int | np.ndarray, num_finals: int | np.ndarray) -> None:
    """Check that every fragment lies inside tables of this size, or of these sizes, int64 `[F]`.

    Raises:
        CorruptFileError: Without the place.
    """
    row = fragments["row"]
    length = fragments["length"]
    final = fragments["final_row"]
    signs = row | length | (final + 1) | fragments["start"] | fragments["env"] | fragments["trajectory"]
    is_wrong = (signs < 0) | (row > num_rows - length) | (final >= num_finals)
    if is_wrong.any():
        first = int(np.argmax(is_wrong))
        what = "fragments within the rows of their block"
        wrong = CorruptFileError("read", "", what, f"{fragments[first]} at {first}")
        raise wrong.of("outside", str(fragments["trajectory"][first]))
