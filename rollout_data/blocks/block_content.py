"""The rows of a block while it is written: from memory or from other blocks, and as chunks where they are coded.

One rule: chunks follow the order of rows and end where fragments end; chunks that exist are copied, never
decoded, unless two blocks of one field were coded differently. Where they are written is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Protocol

import numpy as np

from storage.codecs.codec_chains import AUTO, choose_codec, chunk_frames, codec_of, most_chunk_frames
from storage.core.durable_files import crc32
from storage.core.fields import Schema
from storage.core.threads import each_part

from .annotation_table import Notes
from .block_header import DATA, FRAGMENT_DTYPE, BlockHeader, layouts_of, row_ranges
from .chunk_table import ChunkTable, Coding
from .row_layout import StoredColumn

#: Chunks that "auto" tries.
_NUM_SAMPLES = 8


class RowSource(Protocol):
    """The rows of one column of a block, read part by part, so that a block never exists twice; by several threads.

    Attributes:
        num_rows: How many there are.
        row_bytes: Bytes of each.
    """

    num_rows: int
    row_bytes: int

    def read(self, start: int, stop: int, out: np.ndarray) -> np.ndarray:
        """Return the rows `start:stop` as C-contiguous uint8 `[stop - start, row_bytes]`: in `out`, or a view."""
        ...


class ArrayRows:
    """Rows that are in memory as they will be in the file: uint8 `[R, row_bytes]`, C-contiguous."""

    def __init__(self, rows: np.ndarray) -> None:
        self._rows = rows
        self.num_rows, self.row_bytes = rows.shape

    def read(self, start: int, stop: int, out: np.ndarray) -> np.ndarray:
        return self._rows[start:stop]


class CodedRows:
    """The chunks of a column: a `RowSource` of single bytes.

    Attributes:
        coding: How they are coded.
        table: Which rows they hold; its places count from 0.
        data: uint8, the chunks one after the other.
    """

    def __init__(self, coding: Coding, table: ChunkTable, data: np.ndarray) -> None:
        self.coding = coding
        self.table = table
        self.data = data
        self.num_rows = len(data)
        self.row_bytes = 1

    def read(self, start: int, stop: int, out: np.ndarray) -> np.ndarray:
        return self.data[start:stop, None]


def _decoded(source: RowSource) -> RowSource:
    """Return rows as they are before coding."""
    if not isinstance(source, CodedRows):
        return source
    table = source.table
    data = source.data
    return ArrayRows(table.read(0, int(table.rows[-1]), lambda start, stop: data[start:stop]))


@dataclass
class BlockContent:
    """What goes into one block.

    Attributes:
        schema, writer, sequence, fragments, reward_sums: As of `BlockHeader`.
        rows: Table -> column -> its rows; a column that is kept in chunks is coded when the block is
            written, unless it comes as `CodedRows`.
        max_errors: Field -> largest error that a codec made of the values that are in `rows`.
        codecs: Field that is coded "auto" -> its codec. The first block that is written with such a
            mapping decides; the writer keeps it.
        frames_per_chunk: Frames of a chunk at most, where columns are coded; None is what suits the codec.
        notes: What was said of episodes, by number of the trajectory, and the texts of frames.
        created_ns: When it was made; None is now.
    """

    schema: Schema
    writer: str
    sequence: int
    fragments: np.ndarray
    reward_sums: np.ndarray
    rows: Mapping[str, Mapping[str, RowSource]]
    max_errors: Mapping[str, float] = field(default_factory=dict)
    codecs: MutableMapping[str, str] = field(default_factory=dict)
    frames_per_chunk: int | None = None
    notes: Notes = field(default_factory=dict)
    created_ns: int | None = None


def code_tables(
    content: BlockContent, num_threads: int | None
) -> tuple[dict[str, dict[str, RowSource]], dict[str, Coding]]:
    """Code the columns of a block that are kept in chunks, as far as they are not coded yet.

    Returns:
        The tables with coded columns, and how every field with a codec is coded.
    """
    coded = {table: dict(columns) for table, columns in content.rows.items()}
    codings = {}
    for name, item in content.schema.items():
        codec = codec_of(item)
        error = content.max_errors.get(name, 0.0)
        if codec.chunks is None:
            if not codec.is_lossless:
                codings[name] = Coding(codec.name, error)
            continue
        own = {table: columns[name] for table, columns in coded.items() if name in columns}
        names = {source.coding.codec for source in own.values() if isinstance(source, CodedRows)}
        if len(names) != 1 or any(rows.num_rows for rows in own.values() if not isinstance(rows, CodedRows)):
            # A field has one codec in both tables: what was coded otherwise is decoded and coded anew.
            names = set()
            own = {table: _decoded(rows) for table, rows in own.items()}
        frames = {
            table: _Frames(rows, name, table, codec.name, content)
            for table, rows in own.items()
            if not isinstance(rows, CodedRows)
        }
        chosen = names.pop() if names else _chosen(codec.name, name, frames.values(), content.codecs)
        own |= {table: part.coded(chosen, error, num_threads) for table, part in frames.items()}
        for table, rows in own.items():
            coded[table][name] = rows
        codings[name] = _common([rows.coding for rows in own.values() if isinstance(rows, CodedRows)])
    return coded, codings


def frames_per_chunk(content: BlockContent, table: str, codec: str, row_bytes: int) -> int:
    """How many frames a chunk of this table has; final rows are asked for one by one."""
    if table != DATA:
        return 1
    return min(content.frames_per_chunk or chunk_frames(row_bytes, codec), most_chunk_frames(row_bytes))


def _chosen(codec: str, name: str, tables: Iterable[_Frames], chosen: MutableMapping[str, str]) -> str:
    if codec != AUTO:
        return codec
    if name not in chosen:
        sample = next((found for frames in tables if (found := frames.sample())), [])
        if not sample:
            return "raw"  # decided when there is something to try on
        chosen[name] = choose_codec(sample)
    return chosen[name]


def _common(codings: Sequence[Coding]) -> Coding:
    """The coding of chunks that are put together; the codec of all is the same."""
    assert len({coding.codec for coding in codings}) == 1, "chunks of one codec would be read as of another"
    error = max(coding.max_error for coding in codings)
    return replace(codings[0], max_error=error, frames_per_chunk=max(coding.frames_per_chunk for coding in codings))


class _Frames:
    """The rows of a column as frames, cut into chunks at fragments and within them."""

    def __init__(self, source: RowSource, name: str, table: str, codec: str, content: BlockContent) -> None:
        layout = layouts_of(content.schema)[table]
        self._source = source
        self._field = layout.stored[name]
        self._row_bytes = layout.columns[name].row_bytes
        self._per_chunk = per_chunk = frames_per_chunk(content, table, codec, self._field.row_bytes)
        ranges = row_ranges(table, content.fragments)
        #: First row of each chunk, and the end; which chunks a fragment names.
        self._bounds = [0]
        self._used = list[int]()
        for low, high in sorted({(int(a), int(b)) for a, b in zip(*ranges, strict=True) if b > a}):
            self._bounds += [low] if low > self._bounds[-1] else []
            cuts = [*range(low + per_chunk, high, per_chunk), high]
            self._used += range(len(self._bounds) - 1, len(self._bounds) - 1 + len(cuts))
            self._bounds += cuts
        self._bounds += [source.num_rows] if source.num_rows > self._bounds[-1] else []

    def read(self, number: int) -> np.ndarray:
        """Read the frames of a chunk: `[n, *shape]`."""
        low, high = self._bounds[number : number + 2]
        rows = self._source.read(low, high, np.empty((high - low, self._row_bytes), np.uint8))
        values = np.ascontiguousarray(rows[:, : self._field.row_bytes])
        return values.reshape(-1).view(self._field.numpy_dtype).reshape(high - low, *self._field.shape)

    def sample(self) -> list[np.ndarray]:
        """Read some chunks, spread evenly."""
        return [self.read(number) for number in self._used[:: -(-len(self._used) // _NUM_SAMPLES) or 1]]

    def coded(self, codec: str, error: float, num_threads: int | None) -> CodedRows:
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
        coding = replace(coding, max_error=max(coding.max_error, float(errors.max(initial=0.0))))
        return CodedRows(coding, table, np.frombuffer(b"".join(chunks), np.uint8))


def gathered(parts: Sequence[tuple[BlockHeader, np.void]]) -> tuple[dict[str, dict[str, RowSource]], np.ndarray]:
    """Put the rows of fragments, of blocks of one schema, one after the other: the tables and `[F]` fragments."""
    fragments = np.array([fragment for _, fragment in parts], FRAGMENT_DTYPE)
    tables: dict[str, dict[str, RowSource]] = {}
    for table, layout in parts[0][0].layouts.items():
        bounds = [bound.tolist() for bound in row_ranges(table, fragments)]
        ranges = [(header, a, b) for (header, _), a, b in zip(parts, *bounds, strict=True) if b > a]
        tables[table] = {
            name: _joined([_as_stored(header, table, name, a, b) for header, a, b in ranges], column)
            for name, column in layout.columns.items()
        }
    fragments["row"] = np.cumsum(fragments["length"]) - fragments["length"]
    finals = np.flatnonzero(fragments["final_row"] >= 0)
    fragments["final_row"][finals] = np.arange(len(finals))
    return tables, fragments


def _as_stored(header: BlockHeader, table: str, column: str, start: int, stop: int) -> RowSource:
    """Read the rows `start:stop`, which are whole fragments, of a column: its chunks, where it is coded."""
    if column not in header.chunks[table]:
        return ArrayRows(header.read_rows(table, column, start, stop))
    found = header.chunks[table][column]
    low, high = np.searchsorted(found.rows, [start, stop])
    places = found.places[low : high + 1]
    data = header.read_bytes(int(places[0]), int(places[-1]))
    bounds = places - places[0]
    sums = found.sums[low:high]
    if (sums < 0).any():  # of an older block
        sums = np.array([crc32(data[a:b]) for a, b in pairwise(bounds.tolist())], np.int64)
    part = replace(found, rows=found.rows[low : high + 1] - found.rows[low], places=bounds, sums=sums)
    return CodedRows(header.codings[column], part, data)


def _joined(parts: Sequence[RowSource], column: StoredColumn) -> RowSource:
    """Put rows one after the other; chunks stay as they are if all are coded alike, otherwise all are decoded."""
    coded = [part for part in parts if isinstance(part, CodedRows)]
    if coded and len({part.coding.codec for part in coded}) == 1:
        tables = [part.table for part in coded]
        rows, places = (
            np.append(0, np.cumsum(np.concatenate([np.diff(getattr(table, name)) for table in tables])))
            for name in ("rows", "places")
        )
        table = replace(tables[0], rows=rows, places=places, sums=np.concatenate([one.sums for one in tables]))
        return CodedRows(_common([part.coding for part in coded]), table, np.concatenate([p.data for p in coded]))
    empty = np.zeros((0, column.row_bytes), np.uint8)
    return ArrayRows(np.concatenate([empty, *(part.read(0, part.num_rows, empty) for part in map(_decoded, parts))]))
