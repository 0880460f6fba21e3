"""Chunk tables: byte ranges of the chunks of an encoded field in a block, and their decoding.

A table is checked before a chunk is read: no chunk is outside the file, contains rows of two
fragments, or declares more rows than its bytes can contain.
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

# Names of the HDF5 datasets of an encoded field.
CHUNKS = "chunks"
OFFSETS = "offsets"
#: Name of the dataset of chunk checksums. Blocks of earlier releases do not have it.
CHUNK_CHECKSUMS = "checksums"


@dataclass(frozen=True)
class Coding:
    """How a field is encoded in a block.

    Attributes:
        codec: Name of the codec; for "auto", the name of the chosen codec.
        max_error: Largest absolute error, measured when the block was written.
        frames_per_chunk: Maximum number of frames per chunk; 0 if the field has no chunks.
    """

    codec: str
    max_error: float = 0.0
    frames_per_chunk: int = 0

    @property
    def chain(self) -> ChunkCodec:
        """Codec that compresses entire chunks, after the values of single rows were converted."""
        return find_codec(self.codec).chunks or chunk_codec("raw")


def codings_text(codings: Mapping[str, Coding]) -> str:
    """Return the JSON text for the HDF5 attribute `codecs`: the coding of each field.

    The text is "" if there are no codings.
    """
    if not codings:
        return ""
    return json.dumps({name: asdict(coding) for name, coding in codings.items()})


def read_codings(text: str, schema: Schema) -> dict[str, Coding]:
    """Parse the JSON text that describes how each field of a block is encoded.

    Every field that is stored in chunks must have a coding.

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
            raise ValueError(
                f"the coding of field {name!r} contradicts its codec {declared.name!r}: {coding}"
            )
        codings[name] = coding
    for name, field in schema.items():
        if codec_of(field).chunks is not None and name not in codings:
            raise ValueError(f"the coding of field {name!r} is missing")
    return codings


@dataclass(frozen=True, eq=False)
class ChunkTable:
    """Rows, byte ranges and checksums of the C chunks of one column of one table.

    Attributes:
        codec: Codec of the chunks.
        field: Dtype and shape of a decoded row.
        row_bytes: Bytes of a row in memory, padding included.
        rows: First row of each chunk, then the number of rows, int64 `[C + 1]`.
        places: Byte offset of each chunk in the file, then the end of the last chunk, int64
            `[C + 1]`. A chunk of 0 bytes contains only rows that belong to no fragment.
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
        """Content of the HDF5 dataset `offsets`: (first row, first byte) of each chunk.

        The last entry is (number of rows, number of bytes). Bytes are counted from the start of the
        first chunk. Shape and dtype: int64 `[C + 1, 2]`.
        """
        return np.stack([self.rows, self.places - self.places[0]], axis=1).astype("<i8")

    def check(
        self,
        first: np.ndarray,
        stop: np.ndarray,
        frames_per_chunk: int,
        place: int,
        num_bytes: int,
    ) -> str:
        """Return the first condition that this table violates; "" if the table is valid.

        Args:
            first, stop: First and stop row of each fragment, int64 `[F]`.
            frames_per_chunk: Maximum number of rows per chunk.
            place: Byte offset of the dataset `chunks` in the file.
            num_bytes: Size of the dataset `chunks`.
        """
        # Neighbours are compared, since differences of numbers in a malicious file may overflow.
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
        # Products are computed in floats, since integers in a malicious file may overflow.
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
        """Return a pair (start, stop) of arrays: the byte range of each fragment in the file.

        Fragment i has the rows `first[i]:stop[i]`. All arrays are int64 `[F]`.
        """
        starts = self.places[np.searchsorted(self.rows, first)]
        return starts, self.places[np.searchsorted(self.rows, stop)]

    def chunks_of(self, start: int, stop: int) -> tuple[list[int], list[int]]:
        """Return the byte offsets and the CRC-32 values of the chunks of one fragment.

        The fragment has the rows `start:stop`. The last offset is the end of the last chunk.
        """
        first, last = np.searchsorted(self.rows, [start, stop]).tolist()
        return self.places[first : last + 1].tolist(), self.sums[first:last].tolist()

    def decode(self, chunk: np.ndarray, num_rows: int, out: np.ndarray | None = None) -> np.ndarray:
        """Decode a chunk to rows: contiguous uint8 `[num_rows, row_bytes]`.

        The result is `out`, or new memory if `out` is None.

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

        Rows that belong to no fragment are zeros.

        Args:
            start: First row.
            stop: One past the last row.
            read_bytes: Function that returns the bytes `start:stop` of the file.

        Raises:
            CorruptFileError: A chunk is damaged. The error does not name the file.
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
    """Check the bytes of consecutive chunks against the CRC-32 of each chunk and of all together.

    Args:
        read: Function that yields the bytes `start:stop` of the file in parts, to save memory.
        bounds: Byte offset of each chunk in the file, then the end of the last chunk.
        sums: CRC-32 of each chunk; -1 if it is unknown.
        expected: CRC-32 of the bytes of all chunks.

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
    """The CRC-32 of bytes that were read differs from the CRC-32 that the block contains.

    Args:
        expected: CRC-32 that the block contains.
        checksum: CRC-32 of the bytes that were read.
        where: Name of the bytes for the message, such as " of chunk 3".
    """

    def __init__(self, expected: int, checksum: int, where: str = "") -> None:
        super().__init__(f"expected checksum {expected:08x}{where}, got {checksum:08x}.")
        self.expected = expected
        self.checksum = checksum

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.expected, self.checksum), self.__dict__


def check_sum(chunk: np.ndarray, expected: int, where: str = "") -> None:
    """Compare the CRC-32 of a chunk with `expected`. If `expected` is -1, it is not compared.

    Raises:
        ChecksumError: The checksums differ. The error does not name the file.
    """
    if expected < 0:
        return
    checksum = crc32(chunk)
    if checksum != expected:
        raise ChecksumError(expected, checksum, where)
