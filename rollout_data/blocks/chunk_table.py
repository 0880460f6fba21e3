"""Chunk tables: where the chunks of a coded component lie in a block, and how they become rows.

One rule: a table is checked whole before a chunk is read, so that no chunk lies outside the file, belongs to
two fragments, or declares more rows than its bytes can hold.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise

import numpy as np

from storage.codecs.codec_chains import AUTO, ChunkCodec, chunk_codec, codec_of, find_codec, most_chunk_frames
from storage.core.durable_files import crc32
from storage.core.fields import Field, Schema
from storage.errors import CorruptFileError

#: Names of the datasets of a coded component; older blocks do not have the last one.
CHUNKS, OFFSETS, CHUNK_CHECKSUMS = "chunks", "offsets", "checksums"


@dataclass(frozen=True)
class Coding:
    """How one field is coded in one block.

    Attributes:
        codec: Name of its codec; never "auto", but what that chose.
        max_error: Largest absolute error that was measured when the block was written.
        frames_per_chunk: Frames of a chunk at most; 0 for a field that is not kept in chunks.
    """

    codec: str
    max_error: float = 0.0
    frames_per_chunk: int = 0

    @property
    def chain(self) -> ChunkCodec:
        """What makes the chunks: the codec without the part that keeps rows rows."""
        return find_codec(self.codec).chunks or chunk_codec("raw")


def codings_text(codings: Mapping[str, Coding]) -> str:
    """Write codings as the attribute `codecs` of a block; "" without any."""
    return json.dumps({name: asdict(coding) for name, coding in codings.items()}) if codings else ""


def read_codings(text: str, schema: Schema) -> dict[str, Coding]:
    """Read what `codings_text` wrote; every field that is kept in chunks must be there.

    Raises:
        ValueError, LookupError, TypeError, RolloutDataError: It is not such a text, or contradicts the schema.
    """
    found = {}
    for name, item in (json.loads(text) if text else {}).items():
        coding = Coding(str(item["codec"]), float(item["max_error"]), int(item["frames_per_chunk"]))
        declared = codec_of(schema[name])
        actual = codec_of(Field(name, (), schema[name].dtype, coding.codec))
        is_same = coding.codec == declared.name or (declared.name == AUTO and actual.is_lossless)
        if not (is_same and coding.max_error >= 0 and coding.frames_per_chunk >= (declared.chunks is not None)):
            raise ValueError(f"field {name!r} coded as {coding}")
        found[name] = coding
    missing = [name for name, field in schema.items() if codec_of(field).chunks is not None and name not in found]
    if missing:
        raise ValueError(f"no coding of field {missing[0]!r}")
    return found


@dataclass(frozen=True, eq=False)
class ChunkTable:
    """The chunks of one column of one table.

    Attributes:
        codec: Decodes them.
        field: What a row is when decoded: dtype and shape.
        row_bytes: Size of a row in memory, padded.
        rows: int64 `[C + 1]`, first row of each chunk; the last entry is the number of rows.
        places: int64 `[C + 1]`, where each chunk begins in the file. A chunk without bytes stands for rows
            that no fragment names.
        sums: int64 `[C]`, CRC-32 of each chunk; -1 where it is not known.
    """

    codec: ChunkCodec
    field: Field
    row_bytes: int
    rows: np.ndarray
    places: np.ndarray
    sums: np.ndarray

    @property
    def offsets(self) -> np.ndarray:
        """The dataset `offsets`: int64 `[C + 1, 2]`, first row and byte of each chunk, counted from the first."""
        return np.stack([self.rows, self.places - self.places[0]], axis=1).astype("<i8")

    def check(self, first: np.ndarray, stop: np.ndarray, frames_per_chunk: int, place: int, num_bytes: int) -> str:
        """Return what is wrong with the table; "" if nothing is.

        Args:
            first, stop: int64 `[F]`, rows of the fragments.
            frames_per_chunk: How many rows a chunk has at most.
            place, num_bytes: Where the dataset of chunks begins in the file, and its size.
        """
        # Neighbours are compared, not subtracted: a difference of hostile numbers may wrap to a right one.
        if self.rows[0] != 0 or (self.rows[1:] <= self.rows[:-1]).any():
            return "rows that ascend from 0"
        is_descending = (self.places[1:] < self.places[:-1]).any()
        if is_descending or self.places[0] != place or self.places[-1] != place + num_bytes:
            return f"chunks that fill {num_bytes} bytes one after the other"
        counts = np.diff(self.rows)
        sizes = np.diff(self.places)
        is_used = sizes > 0
        most_rows = min(frames_per_chunk, most_chunk_frames(self.field.row_bytes))
        if (counts[is_used] > most_rows).any():
            return f"chunks of at most {most_rows} rows"
        most = self.codec.max_expansion
        # Compared as floats: a product of hostile numbers may not fit into an integer.
        if (counts[is_used] * float(self.field.row_bytes) > most * sizes[is_used].astype(np.float64)).any():
            return "chunks as large as their rows need"
        used_before = np.append(0, np.cumsum(is_used))
        named = stop > first
        low = np.searchsorted(self.rows, first[named])
        high = np.searchsorted(self.rows, stop[named])
        inside = np.minimum(high, len(self.rows) - 1)
        is_bound = (self.rows[np.minimum(low, len(self.rows) - 1)] == first[named]) & (self.rows[inside] == stop[named])
        if not is_bound.all() or (used_before[inside] - used_before[low] != inside - low).any():
            return "whole chunks for every fragment"
        return ""

    def byte_ranges(self, first: np.ndarray, stop: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where the chunks of rows `first:stop` begin and end in the file; rows of whole fragments only."""
        return self.places[np.searchsorted(self.rows, first)], self.places[np.searchsorted(self.rows, stop)]

    def chunks_of(self, start: int, stop: int) -> tuple[list[int], list[int]]:
        """Return where the chunks of rows `start:stop`, of whole fragments, begin and end, and their checksums."""
        first, last = np.searchsorted(self.rows, [start, stop]).tolist()
        return self.places[first : last + 1].tolist(), self.sums[first:last].tolist()

    def decode(self, chunk: np.ndarray, num_rows: int, out: np.ndarray | None = None) -> np.ndarray:
        """Decode a chunk's bytes to rows: `[num_rows, row_bytes]` uint8, contiguous; without `out` to new memory.

        Raises:
            CorruptFileError: Without the place, which the caller knows.
        """
        frames = (num_rows, *self.field.shape)
        dtype = self.field.numpy_dtype
        num_bytes = self.field.row_bytes
        is_padded = self.row_bytes != num_bytes
        if out is not None and not is_padded:
            self.codec.decode(chunk, out.reshape(-1).view(dtype).reshape(frames))
            return out
        values = self.codec.decoded(chunk, frames, dtype).reshape(-1).view(np.uint8).reshape(num_rows, num_bytes)
        if not is_padded:
            return values
        out = np.empty((num_rows, self.row_bytes), np.uint8) if out is None else out
        out[:, num_bytes:] = 0
        out[:, :num_bytes] = values
        return out

    def read(self, start: int, stop: int, read_bytes: Callable[[int, int], np.ndarray]) -> np.ndarray:
        """Decode rows `start:stop`: a new `[stop - start, row_bytes]` uint8 array; zeros where no chunk is.

        `read_bytes` gives the bytes `start:stop` of the file.
        """
        rows = np.zeros((stop - start, self.row_bytes), np.uint8)
        first = int(np.searchsorted(self.rows, start, "right")) - 1
        for number in range(first, int(np.searchsorted(self.rows, stop))) if start < stop else ():
            low, high, place, end = (int(part[number + k]) for part in (self.rows, self.places) for k in (0, 1))
            if place == end:
                continue
            chunk = read_bytes(place, end)
            check_sum(chunk, int(self.sums[number]), f" of chunk {number}")
            decoded = self.decode(chunk, high - low)
            begin = max(low, start)
            finish = min(high, stop)
            rows[begin - start : finish - start] = decoded[begin - low : finish - low]
        return rows


def check_parts(
    read: Callable[[int, int], Iterable[np.ndarray]], bounds: Sequence[int], sums: Sequence[int], expected: int
) -> None:
    """Compare bytes that are read in parts with the CRC-32 of all, and of each chunk between two bounds (-1: unknown).

    Raises:
        CorruptFileError: Without the place.
    """
    total = 0
    wrong = ("", "")
    for number, ((start, stop), known) in enumerate(zip(pairwise(bounds), sums, strict=True)):
        own = min(known, 0)
        for part in read(start, stop):
            total = crc32(part, total)
            own = crc32(part, own) if known >= 0 else known
        if own != known and not wrong[0]:
            wrong = f"{known:08x} of chunk {number}", f"{own:08x}"
    if total != expected:
        wrong = f"{expected:08x}", f"{total:08x}"
    if wrong[0]:
        raise CorruptFileError("decode a chunk", "", f"checksum {wrong[0]}", wrong[1])


def check_sum(chunk: np.ndarray, expected: int, where: str = "") -> None:
    """Compare a chunk's bytes with their CRC-32 (-1: unknown); `CorruptFileError`, without the place, if it differs."""
    if expected >= 0 and (got := crc32(chunk)) != expected:
        raise CorruptFileError("decode a chunk", "", f"checksum {expected:08x}{where}", f"{got:08x}")
