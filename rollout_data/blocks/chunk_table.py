"""Chunk tables: byte ranges of the chunks of a coded component in a block, and their decoding.

A table is checked before a chunk is read: no chunk lies outside the file, belongs to two fragments,
or declares more rows than its bytes can hold.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from storage.codecs.codec_chains import (
    AUTO,
    ChunkCodec,
    chunk_codec,
    codec_of,
    find_codec,
    most_chunk_frames,
)
from storage.core.durable_files import crc32
from storage.core.fields import Field, Schema
from storage.errors import CorruptFileError

# Names of the datasets of a coded component.
CHUNKS = "chunks"
OFFSETS = "offsets"
#: Name of the dataset of chunk checksums, which older blocks lack.
CHUNK_CHECKSUMS = "checksums"


@dataclass(frozen=True)
class Coding:
    """Coding of a field in a block.

    Attributes:
        codec: Name of the codec. For "auto", the name of the codec that was chosen.
        max_error: Largest absolute error, measured when the block was written.
        frames_per_chunk: Frames of a chunk, at most; 0 for a field that is not stored in chunks.
    """

    codec: str
    max_error: float = 0.0
    frames_per_chunk: int = 0

    @property
    def chain(self) -> ChunkCodec:
        """Codec of the chunks, without the value codec that converts single rows."""
        return find_codec(self.codec).chunks or chunk_codec("raw")


def codings_text(codings: Mapping[str, Coding]) -> str:
    """Return codings as JSON for the attribute `codecs` of a block; "" if there are none."""
    if not codings:
        return ""
    return json.dumps({name: asdict(coding) for name, coding in codings.items()})


def read_codings(text: str, schema: Schema) -> dict[str, Coding]:
    """Parse the result of `codings_text`. Every field that is stored in chunks must have a coding.

    Raises:
        ValueError, LookupError, TypeError, RolloutDataError: The text is damaged, or contradicts
            the schema.
    """
    codings = {}
    for name, item in (json.loads(text) if text else {}).items():
        coding = Coding(
            codec=str(item["codec"]),
            max_error=float(item["max_error"]),
            frames_per_chunk=int(item["frames_per_chunk"]),
        )
        declared = codec_of(schema[name])
        actual = codec_of(Field(name, (), schema[name].dtype, coding.codec))
        is_declared = coding.codec == declared.name
        is_chosen = declared.name == AUTO and actual.is_lossless
        least_frames = 0 if declared.chunks is None else 1
        has_valid_numbers = coding.max_error >= 0 and coding.frames_per_chunk >= least_frames
        if not (is_declared or is_chosen) or not has_valid_numbers:
            raise ValueError(f"field {name!r} coded as {coding}")
        codings[name] = coding
    for name, field in schema.items():
        if codec_of(field).chunks is not None and name not in codings:
            raise ValueError(f"no coding of field {name!r}")
    return codings


@dataclass(frozen=True, eq=False)
class ChunkTable:
    """The chunks of one column of one table.

    Attributes:
        codec: Codec of the chunks.
        field: Dtype and shape of a decoded row.
        row_bytes: Size of a row in memory, padding included.
        rows: First row of each chunk, then the number of rows, int64 `[C + 1]`.
        places: Offset of each chunk in the file, then the end of the last chunk, int64 `[C + 1]`. A
            chunk of 0 bytes contains only rows that belong to no fragment.
        sums: CRC-32 of each chunk, or -1 if it is unknown, int64 `[C]`.
    """

    codec: ChunkCodec
    field: Field
    row_bytes: int
    rows: np.ndarray
    places: np.ndarray
    sums: np.ndarray

    @property
    def offsets(self) -> np.ndarray:
        """Dataset `offsets`: first row and byte of each chunk, from 0 on, int64 `[C + 1, 2]`."""
        return np.stack([self.rows, self.places - self.places[0]], axis=1).astype("<i8")

    def check(
        self,
        first: np.ndarray,
        stop: np.ndarray,
        frames_per_chunk: int,
        place: int,
        num_bytes: int,
    ) -> str:
        """Return the first property that the table violates; "" if it is valid.

        Args:
            first, stop: Rows of the fragments, int64 `[F]`.
            frames_per_chunk: Rows of a chunk, at most.
            place: Offset of the dataset of chunks in the file.
            num_bytes: Size of the dataset of chunks.
        """
        # Neighbours are compared, since a difference of hostile numbers may wrap.
        if self.rows[0] != 0 or (self.rows[1:] <= self.rows[:-1]).any():
            return "ascending rows from 0"
        is_descending = (self.places[1:] < self.places[:-1]).any()
        if is_descending or self.places[0] != place or self.places[-1] != place + num_bytes:
            return f"contiguous chunks of {num_bytes} bytes"
        counts = np.diff(self.rows)
        sizes = np.diff(self.places)
        is_used = sizes > 0
        most_rows = min(frames_per_chunk, most_chunk_frames(self.field.row_bytes))
        if (counts[is_used] > most_rows).any():
            return f"chunks of at most {most_rows} rows"
        # Compared as floats, since a product of hostile numbers may not fit into an integer.
        decoded_bytes = counts[is_used] * float(self.field.row_bytes)
        most_bytes = self.codec.max_expansion * sizes[is_used].astype(np.float64)
        if (decoded_bytes > most_bytes).any():
            return "chunks of the size of their rows"

        num_used_before = np.append(0, np.cumsum(is_used))
        has_rows = stop > first
        low = np.searchsorted(self.rows, first[has_rows])
        high = np.searchsorted(self.rows, stop[has_rows])
        last = len(self.rows) - 1
        high = np.minimum(high, last)
        begins_at_chunk = self.rows[np.minimum(low, last)] == first[has_rows]
        ends_at_chunk = self.rows[high] == stop[has_rows]
        if not (begins_at_chunk & ends_at_chunk).all():
            return "complete chunks for every fragment"
        if (num_used_before[high] - num_used_before[low] != high - low).any():
            return "complete chunks for every fragment"
        return ""

    def byte_ranges(self, first: np.ndarray, stop: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return where whole fragments start and stop in the file: fragment i has rows `first[i]:stop[i]`."""
        starts = self.places[np.searchsorted(self.rows, first)]
        return starts, self.places[np.searchsorted(self.rows, stop)]

    def chunks_of(self, start: int, stop: int) -> tuple[list[int], list[int]]:
        """Return file offsets and checksums of the chunks of a fragment, rows `start:stop`."""
        first, last = np.searchsorted(self.rows, [start, stop]).tolist()
        return self.places[first : last + 1].tolist(), self.sums[first:last].tolist()

    def decode(self, chunk: np.ndarray, num_rows: int, out: np.ndarray | None = None) -> np.ndarray:
        """Decode a chunk to rows: contiguous uint8 `[num_rows, row_bytes]`, `out` or new memory.

        Raises:
            CorruptFileError: The chunk is damaged. The error does not name the file.
        """
        frames = (num_rows, *self.field.shape)
        dtype = self.field.numpy_dtype
        num_bytes = self.field.row_bytes
        is_padded = self.row_bytes != num_bytes
        if out is not None and not is_padded:
            self.codec.decode(chunk, out.reshape(-1).view(dtype).reshape(frames))
            return out
        values = self.codec.decoded(chunk, frames, dtype)
        values = values.reshape(-1).view(np.uint8).reshape(num_rows, num_bytes)
        if not is_padded:
            return values
        if out is None:
            out = np.empty((num_rows, self.row_bytes), np.uint8)
        out[:, num_bytes:] = 0
        out[:, :num_bytes] = values
        return out

    def read(
        self,
        start: int,
        stop: int,
        read_bytes: Callable[[int, int], np.ndarray],
    ) -> np.ndarray:
        """Decode rows `start:stop`: a new uint8 array `[stop - start, row_bytes]`.

        Rows without a chunk are zeros.

        Args:
            start: First row.
            stop: One past the last row.
            read_bytes: Function that returns the bytes `start:stop` of the file.
        """
        rows = np.zeros((stop - start, self.row_bytes), np.uint8)
        if start >= stop:
            return rows
        first = int(np.searchsorted(self.rows, start, "right")) - 1
        for number in range(first, int(np.searchsorted(self.rows, stop))):
            place, place_end = self.places[number : number + 2].tolist()
            if place == place_end:
                continue
            chunk = read_bytes(place, place_end)
            check_sum(chunk, int(self.sums[number]), f" of chunk {number}")
            low, high = self.rows[number : number + 2].tolist()
            decoded = self.decode(chunk, high - low)
            begin = max(low, start)
            end = min(high, stop)
            rows[begin - start : end - start] = decoded[begin - low : end - low]
        return rows


def check_parts(
    read: Callable[[int, int], Iterable[np.ndarray]],
    bounds: Sequence[int],
    sums: Sequence[int],
    expected: int,
) -> None:
    """Compare bytes that are read in parts with the CRC-32 of each chunk and of all bytes.

    Args:
        read: Function that yields the bytes `start:stop` of the file in parts.
        bounds: Bounds of the chunks in the file.
        sums: CRC-32 of each chunk; -1 if it is unknown.
        expected: CRC-32 of all bytes.

    Raises:
        ChecksumError: A checksum is wrong. The error does not name the file.
    """
    total = 0
    wrong: ChecksumError | None = None
    for number, ((start, stop), known) in enumerate(zip(pairwise(bounds), sums, strict=True)):
        chunk_sum = 0
        for part in read(start, stop):
            total = crc32(part, total)
            if known >= 0:
                chunk_sum = crc32(part, chunk_sum)
        if known >= 0 and chunk_sum != known and wrong is None:
            wrong = ChecksumError(known, chunk_sum, f" of chunk {number}")
    if total != expected:
        wrong = ChecksumError(expected, total)
    if wrong is not None:
        raise wrong


class ChecksumError(CorruptFileError):
    """The bytes of a chunk have another checksum than the block states.

    Args:
        expected: CRC-32 in the block.
        checksum: CRC-32 of the bytes.
        where: Text after the expected checksum.
    """

    def __init__(self, expected: int, checksum: int, where: str = "") -> None:
        super().__init__(f"expected checksum {expected:08x}{where}, got {checksum:08x}.")
        self.expected = expected
        self.checksum = checksum

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.expected, self.checksum), self.__dict__


def check_sum(chunk: np.ndarray, expected: int, where: str = "") -> None:
    """Compare a chunk with its CRC-32. A CRC-32 of -1 is unknown and not compared.

    Raises:
        ChecksumError: The checksums differ. The error does not name the file.
    """
    if expected < 0:
        return
    checksum = crc32(chunk)
    if checksum != expected:
        raise ChecksumError(expected, checksum, where)
