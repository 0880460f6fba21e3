"""The header of a block file: its tables, their checks, and where the rows lie.

One rule: nothing from a file is believed before it was checked against the file's length and
against itself. Rows are not read here; `FORMAT.md` is the specification.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from storage.checksums import crc32
from storage.errors import CorruptFileError, DataFileError, ForeignFileError, RolloutDataError
from storage.fields import Schema
from storage.hdf5_files import GuardedFile

from .block_tables import FRAGMENT_BYTES, corrupt, locate, read_table
from .chunk_table import CHUNK_CHECKSUMS, CHUNKS, OFFSETS, ChunkTable, Coding, read_codings, table_of
from .layout import RowLayout

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
#: A fragment with one of these is the last of its trajectory.
ENDS = TERMINATED | TRUNCATED | OPEN | DROPPED
#: A trajectory ended by one of these is complete.
COMPLETE = TERMINATED | TRUNCATED | OPEN
#: No metadata.json and no attribute of a block needs more; a larger one is damage or an attack.
MAX_METADATA_BYTES = 1 << 24
MAX_TEXT_BYTES = 1 << 17

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
assert FRAGMENT_DTYPE.itemsize == FRAGMENT_BYTES


def final_schema(schema: Schema) -> Schema:
    """The fields of a true final observation: observation and privileged observation."""
    return Schema([*schema.below("observation").values(), *schema.below("privileged_observation").values()])


@lru_cache(maxsize=64)
def layouts_of(schema: Schema) -> dict[str, RowLayout]:
    """Give the row layout of each table of a block with these fields."""
    return {DATA: RowLayout(schema), FINAL: RowLayout(final_schema(schema))}


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
        created_ns: Wall-clock time of writing, nanoseconds since the epoch.
        fragments: `[F]` of `FRAGMENT_DTYPE`.
        reward_sums: `[F, R]` float64; R = 0 where no rewards were recorded.
        locations: Table -> column -> (byte offset in the file, number of rows); of its chunks, where it is coded.
        checksums: Table -> `[F, columns]` uint32, CRC-32 of each fragment's rows or chunks.
        file_bytes: Size of the file.
        codings: Field -> how it is coded, of the fields that have a codec; in older blocks of those in chunks only.
        chunks: Table -> column -> where its chunks are, of the coded columns.
    """

    path: Path
    schema: Schema
    writer: str
    sequence: int
    created_ns: int
    fragments: np.ndarray
    reward_sums: np.ndarray
    locations: Mapping[str, Mapping[str, tuple[int, int]]]
    checksums: Mapping[str, np.ndarray]
    file_bytes: int
    codings: Mapping[str, Coding]
    chunks: Mapping[str, Mapping[str, ChunkTable]]

    @property
    def layouts(self) -> dict[str, RowLayout]:
        return layouts_of(self.schema)

    @property
    def num_frames(self) -> int:
        return int(self.fragments["length"].sum())

    def read_rows(self, table: str, column: str, start: int, stop: int) -> np.ndarray:
        """Read rows `start:stop` of a column, decoded: a new `[stop - start, row_bytes]` uint8 array."""
        offset, num_rows = self.locations[table][column]
        row_bytes = self.layouts[table].columns[column].row_bytes
        if not 0 <= start <= stop <= num_rows:
            raise CorruptFileError(f"read rows {start}:{stop} of", repr(str(self.path)), f"rows in 0:{num_rows}")
        if column not in self.chunks[table]:
            data = self.read_bytes(offset + start * row_bytes, offset + stop * row_bytes)
            return data.reshape(stop - start, row_bytes)
        try:
            return self.chunks[table][column].read(start, stop, self.read_bytes)
        except CorruptFileError as cause:
            raise corrupt(self.path, f"{cause.expected} in {table}/{column}", cause.got) from cause

    def read_bytes(self, start: int, stop: int) -> np.ndarray:
        """Read bytes `start:stop` of the file: a new uint8 array."""
        wanted = stop - start
        with open(self.path, "rb", buffering=0) as file:
            data = bytearray(wanted)
            view, done = memoryview(data), 0
            file.seek(start)
            while done < wanted and (count := file.readinto(view[done:])):
                done += count
        if done < wanted:
            raise corrupt(self.path, f"{wanted} bytes at {start}", f"{done}")
        return np.frombuffer(data, np.uint8)

    def read_stored(self, table: str, column: str, start: int, stop: int) -> np.ndarray:
        """Read what is under the checksum of a fragment with the rows `start:stop`: rows, or its chunks' bytes."""
        if column not in self.chunks[table]:
            return self.read_rows(table, column, start, stop)
        first, end = self.chunks[table][column].byte_ranges(np.array([start]), np.array([stop]))
        return self.read_bytes(int(first[0]), int(end[0]))


def header_crc(
    fragments: np.ndarray, reward_sums: np.ndarray, about: Iterable[object], offsets: Iterable[np.ndarray] = ()
) -> int:
    """CRC-32 of the fragment table, the reward sums, the attributes in `ABOUT`, and what coded fields add."""
    text = "\n".join(map(str, about)).encode()
    crc = crc32(np.ascontiguousarray(reward_sums), crc32(np.ascontiguousarray(fragments)))
    crc = crc32(text, crc)
    for table in offsets:
        crc = crc32(np.ascontiguousarray(table), crc)
    return crc


def read_header(path: Path) -> BlockHeader:
    """Read and check the header of a block.

    Raises:
        FileNotFoundError: It is not there (any more).
        CorruptFileError: Truncated, damaged or contradicting itself.
        ForeignFileError: Not a block, or of a newer version.
        UnsafeFileError: It points outside itself (links, external or virtual storage).
    """
    path = Path(path)
    found = os.stat(path)
    if not stat.S_ISREG(found.st_mode):  # opening a pipe would wait for ever
        raise corrupt(path, "a file", "a folder, pipe or device")
    try:
        with GuardedFile(path) as guarded, h5py.File(guarded, "r", locking=False) as file:
            if file.id.get_create_plist().get_sizes() != (8, 8):  # the guard reads no other
                raise corrupt(path, "sizes and places of 8 bytes", "others")
            return _read_open_file(path, file, found.st_size)
    except (DataFileError, FileNotFoundError, PermissionError, MemoryError):
        raise
    except OSError as cause:
        if "signature not found" in str(cause):
            raise ForeignFileError("read the block", repr(str(path)), "an HDF5 file", "another format") from cause
        raise corrupt(path, "an intact HDF5 file", str(cause).split("\n")[0]) from cause
    except RolloutDataError as cause:  # a schema that cannot be is the file's fault here, not the caller's
        raise corrupt(path, "an intact schema", str(cause)) from cause
    except (KeyError, ValueError, TypeError, RuntimeError, AttributeError, OverflowError, RecursionError) as cause:
        raise corrupt(path, "an intact header", f"{type(cause).__name__}: {cause}") from cause


def _read_open_file(path: Path, file: h5py.File, file_bytes: int) -> BlockHeader:
    attributes = file.attrs
    schema = _schema_of(_checked_text(path, attributes))
    fragments = read_table(path, file, "fragments", file_bytes, FRAGMENT_DTYPE, (-1,))
    reward_sums = read_table(path, file, "reward_sums", file_bytes, np.dtype("<f8"), (len(fragments), -1))
    about = [attributes[name] for name in ABOUT]
    codings, coded = _read_coded(path, file, schema, file_bytes)
    about += [attributes[CODECS]] if codings else []
    offsets = [found.offsets for columns in coded.values() for found in columns.values()]
    if (crc := header_crc(fragments, reward_sums, about, offsets)) != int(attributes["header_crc"]):
        raise corrupt(path, f"header checksum {int(attributes['header_crc']):08x}", f"{crc:08x}")
    writer, sequence = attributes["writer"], int(attributes["sequence"])
    if not isinstance(writer, str) or sequence < 0:
        raise corrupt(path, "a writer's name and a sequence number", f"{writer!r} and {sequence}")
    locations, checksums = {}, {}
    for table, layout in layouts_of(schema).items():
        locations[table] = {
            name: coded[table][name].location
            if column.is_coded
            else locate(path, file, f"{table}/{name}", layout.numpy_dtype(column), file_bytes)
            for name, column in layout.columns.items()
        }
        shape = (len(fragments), len(layout.columns))
        checksums[table] = read_table(path, file, f"checksums/{table}", file_bytes, np.dtype("<u4"), shape)
    header = BlockHeader(
        path=path,
        schema=schema,
        writer=writer,
        sequence=sequence,
        created_ns=int(attributes["created_ns"]),
        fragments=fragments,
        reward_sums=reward_sums,
        locations=locations,
        checksums=checksums,
        file_bytes=file_bytes,
        codings=codings,
        chunks={table: {name: found.table for name, found in columns.items()} for table, columns in coded.items()},
    )
    _check_fragments(header)
    _check_chunks(header, coded)
    return header


@dataclass(frozen=True, eq=False)
class _Coded:
    """A coded column as it stands in the file: its table as read and as used, place and size of its chunks."""

    offsets: np.ndarray
    table: ChunkTable
    place: int
    num_bytes: int

    @property
    def location(self) -> tuple[int, int]:
        return self.place, int(self.table.rows[-1])


def _read_coded(
    path: Path, file: h5py.File, schema: Schema, file_bytes: int
) -> tuple[dict[str, Coding], dict[str, dict[str, _Coded]]]:
    """Read how fields are coded and, for table -> coded column, where its chunks are; nothing is checked yet."""
    text = file.attrs.get(CODECS, "")
    if not isinstance(text, str) or len(text) > MAX_TEXT_BYTES:
        raise corrupt(path, f"codecs as JSON text of at most {MAX_TEXT_BYTES} characters", type(text).__name__)
    codings = read_codings(text, schema)
    found: dict[str, dict[str, _Coded]] = {}
    for table, layout in layouts_of(schema).items():
        found[table] = {}
        for name, column in layout.columns.items():
            if column.is_coded:
                offsets = read_table(path, file, f"{table}/{name}/{OFFSETS}", file_bytes, np.dtype("<i8"), (-1, 2))
                if not len(offsets):
                    raise corrupt(path, f"offsets of {table}/{name}", "none")
                place, num_bytes = locate(path, file, f"{table}/{name}/{CHUNKS}", np.dtype("u1"), file_bytes)
                sums = None  # older blocks have none
                if CHUNK_CHECKSUMS in file[f"{table}/{name}"]:
                    place_of_sums, shape = f"{table}/{name}/{CHUNK_CHECKSUMS}", (len(offsets) - 1,)
                    sums = read_table(path, file, place_of_sums, file_bytes, np.dtype("<u4"), shape)
                chunks = table_of(codings[name], layout, column, offsets, place, sums)
                found[table][name] = _Coded(offsets, chunks, place, num_bytes)
    return codings, found


def _check_chunks(header: BlockHeader, coded: Mapping[str, Mapping[str, _Coded]]) -> None:
    """Check that every fragment has chunks of its own, inside the file."""
    for table, columns in coded.items():
        first, stop = row_ranges(table, header.fragments)
        for name, found in columns.items():
            most = header.codings[name].frames_per_chunk
            if wrong := found.table.check(first, stop, most, found.place, found.num_bytes):
                raise corrupt(header.path, f"{wrong} in {table}/{name}", "another table")


def row_ranges(table: str, fragments: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """First row and end of every fragment in one of the two tables; equal where it has none."""
    if table == DATA:
        return fragments["row"], fragments["row"] + fragments["length"]
    final = fragments["final_row"]
    return np.maximum(final, 0), np.maximum(final + 1, 0)


def _checked_text(path: Path, attributes: Any) -> str:
    """Check format and version, and that each attribute is one small value; give the schema's text."""
    for name in ("format", "version", "header_crc", CODECS, *ABOUT):
        found = attributes.get_id(name) if name in attributes else None
        if found is not None and (found.shape != () or found.get_storage_size() > MAX_TEXT_BYTES):
            raise corrupt(path, f"one value as attribute {name!r}", f"shape {found.shape}")
    kind = attributes.get("format")
    if kind != FORMAT_NAME:
        raise ForeignFileError("read the block", repr(str(path)), f"format {FORMAT_NAME!r}", repr(kind))
    version = int(attributes["version"])
    if version != FORMAT_VERSION:
        raise ForeignFileError(
            "read the block",
            repr(str(path)),
            f"version {FORMAT_VERSION}",
            str(version),
            "Use the release that wrote it",
        )
    text = attributes["schema"]
    if not isinstance(text, str) or len(text) > MAX_TEXT_BYTES:
        raise corrupt(path, f"a schema as JSON text of at most {MAX_TEXT_BYTES} characters", type(text).__name__)
    return text


def _check_fragments(header: BlockHeader) -> None:
    """Check that every fragment lies inside the tables of its own block."""
    fragments = header.fragments
    sizes = {table: {rows for _, rows in columns.values()} for table, columns in header.locations.items()}
    if any(len(counts) > 1 for counts in sizes.values()):
        raise corrupt(header.path, "as many rows in every column", str(sizes))
    num_rows, num_finals = (next(iter(sizes[table]), 0) for table in (DATA, FINAL))
    row, length, final = fragments["row"], fragments["length"], fragments["final_row"]
    is_wrong = (row < 0) | (length < 0) | (row > num_rows - length) | (final < -1) | (final >= num_finals)
    is_wrong |= (fragments["start"] < 0) | (fragments["env"] < 0) | (fragments["trajectory"] < 0)
    if is_wrong.any():
        first = int(np.argmax(is_wrong))
        raise corrupt(
            header.path,
            f"fragments within {num_rows} rows and {num_finals} final rows",
            f"{fragments[first]} at {first}",
        )
    if int(length.sum()) > num_rows:
        raise corrupt(header.path, f"each of {num_rows} rows in one fragment", f"{int(length.sum())} frames")
