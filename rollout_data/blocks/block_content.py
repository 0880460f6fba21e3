"""Content of a block before it is written to a file, and the encoding of its columns.

Rows come from memory or from other blocks. Fields with a chunk codec are compressed in chunks of
consecutive rows. A chunk never contains rows of two fragments, so a fragment can be copied without
decoding it. Chunks are decoded only if the blocks use different codecs for the field.
`write_block.py` writes the content.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Protocol

import numpy as np

from storage.codecs.codec_chains import (
    AUTO,
    choose_codec,
    chunk_frames,
    codec_of,
    most_chunk_frames,
)
from storage.core.durable_files import crc32
from storage.core.fields import Schema
from storage.core.threads import each_part

from .annotation_table import Notes
from .block_header import DATA, FRAGMENT_DTYPE, BlockHeader, layouts_of, row_ranges
from .chunk_table import ChunkTable, Coding
from .row_layout import StoredColumn

#: Number of chunks that the codec "auto" encodes with every candidate codec to choose one.
_NUM_SAMPLES = 8


class ColumnRows(Protocol):
    """Interface of the rows of one column that will be written to a block.

    Rows are read in parts, so that memory never contains two copies of a block. Thread-safe.

    Attributes:
        num_rows: Number of rows.
        row_bytes: Bytes of a row.
    """

    num_rows: int
    row_bytes: int

    def read(self, start: int, stop: int, out: np.ndarray) -> np.ndarray:
        """Return rows `start:stop`, C-contiguous uint8 `[stop - start, row_bytes]`.

        The result is `out`, filled, or a view of existing memory.
        """
        ...


class ArrayRows:
    """Rows of a column that are in memory: C-contiguous uint8 `[R, row_bytes]`."""

    def __init__(self, rows: np.ndarray) -> None:
        self._rows = rows
        self.num_rows = len(rows)
        self.row_bytes = rows.shape[1]

    def read(self, start: int, stop: int, out: np.ndarray) -> np.ndarray:
        return self._rows[start:stop]


class CodedRows:
    """Rows of a column that are already encoded as chunks, ready to be written to a file.

    Chunks have different sizes. Therefore each byte counts as one row: `num_rows` is the number of
    bytes.

    Attributes:
        coding: Codec and largest error of the chunks.
        table: Rows and byte bounds of the chunks. Bounds count from the start of `data`.
        data: All chunks, one after another, uint8.
    """

    def __init__(self, coding: Coding, table: ChunkTable, data: np.ndarray) -> None:
        self.coding = coding
        self.table = table
        self.data = data
        self.num_rows = len(data)
        self.row_bytes = 1

    def read(self, start: int, stop: int, out: np.ndarray) -> np.ndarray:
        return self.data[start:stop, None]


def _decoded(source: ColumnRows) -> ColumnRows:
    """Decode the rows of a column; rows that are not encoded are returned unchanged."""
    if not isinstance(source, CodedRows):
        return source
    data = source.data

    def read_bytes(start: int, stop: int) -> np.ndarray:
        return data[start:stop]

    num_rows = int(source.table.rows[-1])
    return ArrayRows(source.table.read(0, num_rows, read_bytes))


@dataclass
class BlockContent:
    """Content of a block before it is written: schema, fragments, rows and annotations.

    Attributes:
        schema, writer, sequence, fragments, reward_sums: As in `BlockHeader`.
        rows: Maps the tables "data" and "final" to mappings of columns to rows. Rows that are
            stored in chunks are encoded by `write_block`, unless they are `CodedRows`.
        max_errors: Maps fields to the largest absolute error of their values in `rows`, caused by
            an earlier lossy encoding.
        codecs: Maps fields with the codec "auto" to the chosen codec. `write_block` adds the
            codecs that it chooses. A writer passes the same mapping with each of its blocks.
        frames_per_chunk: Maximum number of frames per chunk; None for the default of the codec.
        notes: Annotations to write: metadata of episodes by trajectory number, and frame texts.
        created_ns: Time of creation; None means now.
    """

    schema: Schema
    writer: str
    sequence: int
    fragments: np.ndarray
    reward_sums: np.ndarray
    rows: Mapping[str, Mapping[str, ColumnRows]]
    max_errors: Mapping[str, float] = field(default_factory=dict)
    codecs: MutableMapping[str, str] = field(default_factory=dict)
    frames_per_chunk: int | None = None
    notes: Notes = field(default_factory=dict)
    created_ns: int | None = None


def code_tables(
    content: BlockContent,
    num_threads: int | None,
) -> tuple[dict[str, dict[str, ColumnRows]], dict[str, Coding]]:
    """Encode all columns of a block whose codec compresses chunks of rows.

    Columns that are already encoded are not encoded again.

    Returns:
        The mapping `content.rows` with encoded columns, and the coding of each field with a codec.
    """
    tables = {table: dict(columns) for table, columns in content.rows.items()}
    codings = {}
    for name, field_of_block in content.schema.items():
        codec = codec_of(field_of_block)
        if codec.chunks is None:
            if not codec.is_lossless:
                codings[name] = Coding(codec.name, content.max_errors.get(name, 0.0))
            continue
        sources = {table: columns[name] for table, columns in tables.items() if name in columns}
        coded = _code_field(content, name, codec.name, sources, num_threads)
        for table, rows in coded.items():
            tables[table][name] = rows
        codings[name] = _common_coding([rows.coding for rows in coded.values()])
    return tables, codings


def _code_field(
    content: BlockContent,
    name: str,
    codec: str,
    sources: Mapping[str, ColumnRows],
    num_threads: int | None,
) -> dict[str, CodedRows]:
    """Encode the rows of a field with one codec for both tables of the block.

    Args:
        content: Content of the block.
        name: Name of the field.
        codec: Declared codec of the field, which may be "auto".
        sources: Maps tables to the rows of the field.
        num_threads: Maximum number of threads; None uses torch's number.

    Returns:
        Maps tables to the encoded rows.
    """
    coded = {table: rows for table, rows in sources.items() if isinstance(rows, CodedRows)}
    codecs = {rows.coding.codec for rows in coded.values()}
    has_uncoded = any(rows.num_rows for table, rows in sources.items() if table not in coded)
    if len(codecs) != 1 or has_uncoded:
        # A field has one codec per block. Chunks of several codecs are decoded and encoded again.
        sources = {table: _decoded(rows) for table, rows in sources.items()}
        coded = {}
        codecs = set()

    frames = {}
    for table, rows in sources.items():
        if table not in coded:
            frames[table] = _Frames(rows, name, table, codec, content)
    chosen = codecs.pop() if codecs else _chosen(codec, name, frames.values(), content.codecs)
    error = content.max_errors.get(name, 0.0)
    result = {}
    for table in sources:
        if table in coded:
            result[table] = coded[table]
        else:
            result[table] = frames[table].coded(chosen, error, num_threads)
    return result


def frames_per_chunk(content: BlockContent, table: str, codec: str, row_bytes: int) -> int:
    """Compute the maximum number of frames per chunk of a column.

    In the table "final" it is 1, since final observations are read one at a time.
    """
    if table != DATA:
        return 1
    num_frames = content.frames_per_chunk or chunk_frames(row_bytes, codec)
    return min(num_frames, most_chunk_frames(row_bytes))


def _chosen(
    codec: str,
    name: str,
    tables: Iterable[_Frames],
    chosen: MutableMapping[str, str],
) -> str:
    """Return the codec of the field `name`. For "auto", encode a sample of chunks to choose it.

    A codec that was chosen is added to the mapping `chosen`, and reused by later calls.
    """
    if codec != AUTO:
        return codec
    if name not in chosen:
        for frames in tables:
            sample = frames.sample()
            if sample:
                chosen[name] = choose_codec(sample)
                return chosen[name]
        return "raw"  # Without rows there is no sample, so a later block chooses.
    return chosen[name]


def _common_coding(codings: Sequence[Coding]) -> Coding:
    """Merge the codings of parts of a column that are stored together. All must have one codec."""
    names = {coding.codec for coding in codings}
    assert len(names) == 1, "chunks of one codec would be read as of another"
    return Coding(
        codec=codings[0].codec,
        max_error=max(coding.max_error for coding in codings),
        frames_per_chunk=max(coding.frames_per_chunk for coding in codings),
    )


class _Frames:
    """Decoded frames of one field, divided into chunks that end where a fragment ends."""

    def __init__(
        self,
        source: ColumnRows,
        name: str,
        table: str,
        codec: str,
        content: BlockContent,
    ) -> None:
        layout = layouts_of(content.schema)[table]
        self._source = source
        self._field = layout.stored[name]
        self._row_bytes = layout.columns[name].row_bytes
        self._per_chunk = frames_per_chunk(content, table, codec, self._field.row_bytes)
        #: Chunk k contains the rows `_bounds[k]:_bounds[k + 1]`.
        self._bounds = [0]
        #: Numbers of the chunks that contain rows of a fragment. Other chunks are stored empty.
        self._used = list[int]()
        first, stop = row_ranges(table, content.fragments)
        for low, high in sorted(set(zip(first.tolist(), stop.tolist(), strict=True))):
            if high <= low:
                continue
            if low > self._bounds[-1]:
                self._bounds.append(low)
            cuts = [*range(low + self._per_chunk, high, self._per_chunk), high]
            first_chunk = len(self._bounds) - 1
            self._used += range(first_chunk, first_chunk + len(cuts))
            self._bounds += cuts
        if source.num_rows > self._bounds[-1]:
            self._bounds.append(source.num_rows)

    def read(self, number: int) -> np.ndarray:
        """Return the frames of chunk `number`: `[n, *shape]`."""
        low, high = self._bounds[number : number + 2]
        rows = self._source.read(low, high, np.empty((high - low, self._row_bytes), np.uint8))
        values = np.ascontiguousarray(rows[:, : self._field.row_bytes]).reshape(-1)
        return values.view(self._field.numpy_dtype).reshape(high - low, *self._field.shape)

    def sample(self) -> list[np.ndarray]:
        """Read a sample of evenly spaced chunks, with which codecs are compared."""
        step = max(1, -(-len(self._used) // _NUM_SAMPLES))
        return [self.read(number) for number in self._used[::step]]

    def coded(self, codec: str, error: float, num_threads: int | None) -> CodedRows:
        """Encode all chunks that contain rows of fragments, in parallel threads.

        `error` is the largest error that an earlier lossy encoding has caused in the values.
        """
        coding = Coding(codec, error, self._per_chunk)
        chunks = [b""] * (len(self._bounds) - 1)
        errors = np.zeros(len(chunks))

        def code(start: int, stop: int) -> None:
            for number in self._used[start:stop]:
                chunks[number], errors[number] = coding.chain.encode(self.read(number))

        each_part(code, len(self._used), self._bounds[-1] * self._row_bytes, num_threads)
        rows = np.array(self._bounds, np.int64)
        places = np.cumsum([0, *map(len, chunks)])
        sums = np.array([*map(crc32, chunks)], np.int64)
        table = ChunkTable(coding.chain, self._field, self._row_bytes, rows, places, sums)
        measured = float(errors.max(initial=0.0))
        coding = replace(coding, max_error=max(coding.max_error, measured))
        return CodedRows(coding, table, np.frombuffer(b"".join(chunks), np.uint8))


def gathered(
    parts: Sequence[tuple[BlockHeader, np.void]],
) -> tuple[dict[str, dict[str, ColumnRows]], np.ndarray]:
    """Concatenate the rows of F fragments, which may be in different blocks of the same schema.

    Args:
        parts: Header of the block, and entry of its table of fragments, for each fragment.

    Returns:
        The rows, as in `BlockContent.rows`, and the table of fragments `[F]` with the positions of
        their rows in the result.
    """
    fragments = np.array([fragment for _, fragment in parts], FRAGMENT_DTYPE)
    tables: dict[str, dict[str, ColumnRows]] = {}
    for table, layout in parts[0][0].layouts.items():
        first, stop = row_ranges(table, fragments)
        ranges = []
        for (header, _), low, high in zip(parts, first.tolist(), stop.tolist(), strict=True):
            if high > low:
                ranges.append((header, low, high))
        tables[table] = {}
        for name, column in layout.columns.items():
            sources = [_as_stored(header, table, name, low, high) for header, low, high in ranges]
            tables[table][name] = _joined(sources, column)

    fragments["row"] = np.cumsum(fragments["length"]) - fragments["length"]
    finals = np.flatnonzero(fragments["final_row"] >= 0)
    fragments["final_row"][finals] = np.arange(len(finals))
    return tables, fragments


def _as_stored(header: BlockHeader, table: str, column: str, start: int, stop: int) -> ColumnRows:
    """Read the rows of a fragment in a column as they are stored: encoded chunks stay encoded.

    `start` and `stop` are the bounds of the fragment, so they are also bounds of chunks.
    """
    if column not in header.chunks[table]:
        return ArrayRows(header.read_rows(table, column, start, stop))
    chunks = header.chunks[table][column]
    low, high = np.searchsorted(chunks.rows, [start, stop])
    places = chunks.places[low : high + 1]
    data = header.read_bytes(int(places[0]), int(places[-1]))
    bounds = places - places[0]
    sums = chunks.sums[low:high]
    if (sums < 0).any():  # Blocks of earlier releases have no checksums of chunks.
        computed = [crc32(data[first:end]) for first, end in pairwise(bounds.tolist())]
        sums = np.array(computed, np.int64)
    rows = chunks.rows[low : high + 1] - chunks.rows[low]
    part = replace(chunks, rows=rows, places=bounds, sums=sums)
    return CodedRows(header.codings[column], part, data)


def _joined(parts: Sequence[ColumnRows], column: StoredColumn) -> ColumnRows:
    """Concatenate the rows of a column from several blocks.

    Encoded chunks are copied if all blocks have the same codec; otherwise they are decoded.
    """
    coded = [part for part in parts if isinstance(part, CodedRows)]
    if len({part.coding.codec for part in coded}) == 1:
        tables = [part.table for part in coded]
        table = replace(
            tables[0],
            rows=_joined_bounds([table.rows for table in tables]),
            places=_joined_bounds([table.places for table in tables]),
            sums=np.concatenate([table.sums for table in tables]),
        )
        coding = _common_coding([part.coding for part in coded])
        return CodedRows(coding, table, np.concatenate([part.data for part in coded]))
    rows = [np.zeros((0, column.row_bytes), np.uint8)]
    for part in map(_decoded, parts):
        rows.append(part.read(0, part.num_rows, rows[0]))
    return ArrayRows(np.concatenate(rows))


def _joined_bounds(bounds: Sequence[np.ndarray]) -> np.ndarray:
    """Compute the bounds of the chunks of several blocks after they were concatenated.

    For example, the bounds [0, 2, 5] and [7, 8] become [0, 2, 5, 6].
    """
    sizes = np.concatenate([np.diff(part) for part in bounds])
    return np.append(0, np.cumsum(sizes))
