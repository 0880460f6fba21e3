"""TFRecord files, and the messages `tf.train.Example` in them: places of values, found without reading these.

One rule: a record's checksum is compared before a value of it is given, sizes with the bytes that are there.
A record is u64 length, u32 masked CRC-32C of that, the bytes, u32 masked CRC-32C of these.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from storage.errors import CorruptFileError

from ..input_checks import KnownFiles

Array = np.ndarray[Any, Any]
#: Kinds of values, by their field in the message `Feature`.
BYTES, FLOATS, INTEGERS = 1, 2, 3
_VARINT = 0
_FIXED64 = 1
_BYTES = 2
_FIXED32 = 5
_MAX_FEATURES = 4096
_PIECE_BYTES = 1 << 20
_BITS = np.arange(32, dtype=np.uint32)


class Feature(NamedTuple):
    """Where the values of a feature lie in a file: its kind, and the bytes of its list."""

    kind: int
    start: int
    stop: int


def open_map(path: Path, known: KnownFiles) -> memoryview:
    """Map a file for reading; it has the state that is `known`."""
    with known.open(path) as file:
        size = file.seek(0, 2)
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b"")


def records(data: memoryview, path: Path) -> Iterator[tuple[int, int]]:
    """Yield where each record starts and stops; only lengths are read.

    Raises:
        CorruptFileError: When a record breaks off, or its length is damaged; those before it were given.
    """
    at = 0
    while at < len(data):
        head = data[at : at + 12]
        start = at + 12
        size = int.from_bytes(head[:8], "little")
        if len(head) < 12 or int.from_bytes(head[8:], "little") != masked_crc32c(head[:8]):
            raise CorruptFileError(
                "read", f"{str(path)!r} at byte {at}", "the length of a record", "damage, or the end"
            )
        if size > len(data) - start - 4:
            got = f"{len(data) - start}, the file was cut"
            raise CorruptFileError("read", f"{str(path)!r} at byte {at}", f"a record of {size} bytes", got)
        yield start, start + size
        at = start + size + 4


def check_record(data: memoryview, start: int, stop: int, path: Path) -> None:
    """Compare the checksum of a record with its bytes."""
    stated = int.from_bytes(data[stop : stop + 4], "little")
    found = masked_crc32c(data[start:stop])
    if stated != found:
        where = f"the record at byte {start} of {str(path)!r}"
        raise CorruptFileError("read", where, f"checksum {stated:08x}", f"{found:08x}").of("checksum")


def features(data: memoryview, start: int, stop: int) -> dict[str, Feature]:
    """Find the features of the `Example` in `data[start:stop]`.

    Raises:
        ValueError: It is none.
    """
    found: dict[str, Feature] = {}
    for _, low, high in _fields(data, start, stop):
        for _, entry, end in _fields(data, low, high):
            parts = {number: span for number, *span in _fields(data, entry, end)}
            if 1 not in parts or 2 not in parts or len(found) == _MAX_FEATURES:
                raise ValueError(f"a name and values in each of at most {_MAX_FEATURES} features")
            name = bytes(data[slice(*parts[1])]).decode()
            for kind, first, last in _fields(data, *parts[2]):
                if kind not in (BYTES, FLOATS, INTEGERS):
                    raise ValueError("values of an unknown kind")
                found[name] = Feature(kind, first, last)
    return found


def items(data: memoryview, feature: Feature, most: int) -> list[memoryview]:
    """List the values of a feature of bytes.

    Raises:
        ValueError: There are more than `most`, or it is of another kind.
    """
    found: list[memoryview] = []
    for _, start, stop in _fields(data, feature.start, feature.stop):
        if feature.kind != BYTES or len(found) == most:
            raise ValueError(f"more than {most} values, or numbers")
        found.append(data[start:stop])
    return found


def count(data: memoryview, feature: Feature) -> int:
    """Count the numbers of a feature of numbers."""
    packed = _packed(data, feature)
    if feature.kind == FLOATS:
        return len(packed) // 4
    return sum(
        int(np.count_nonzero(packed[at : at + _PIECE_BYTES] < 128)) for at in range(0, len(packed), _PIECE_BYTES)
    )


def numbers(data: memoryview, feature: Feature, start: int, stop: int) -> Array:
    """Decode the numbers `start:stop` of a feature: float32 or int64, a new array.

    Raises:
        ValueError: They are not there.
    """
    packed = _packed(data, feature)
    if feature.kind == FLOATS:
        found: Array = packed[4 * start : 4 * stop].copy().view("<f4")
    else:
        out = [np.empty(0, np.int64)]
        done = 0
        for piece, ends in _pieces(packed):
            low = max(0, start - done)
            high = min(len(ends), stop - done)
            if low < high:
                out.append(_varints(piece, ends[low - 1] if low else 0, ends[low:high]))
            done += len(ends)
            if done >= stop:
                break
        found = np.concatenate(out)
    if len(found) != stop - start:
        raise ValueError(f"{stop} numbers expected")
    return found


def _packed(data: memoryview, feature: Feature) -> Array:
    spans = [(start, stop) for _, start, stop in _fields(data, feature.start, feature.stop)]
    if feature.kind == BYTES or len(spans) > 1:
        raise ValueError("numbers that are packed expected")
    start, stop = spans[0] if spans else (0, 0)
    return np.frombuffer(data[start:stop], np.uint8)


def _pieces(packed: Array) -> Iterator[tuple[Array, Array]]:
    """Yield pieces of packed integers, each with the places where its numbers end."""
    at = 0
    while at < len(packed):
        piece = packed[at : at + _PIECE_BYTES]
        ends = np.flatnonzero(piece < 128) + 1
        if not len(ends):
            raise ValueError("a number without an end")
        yield piece, ends
        at += int(ends[-1])


def _varints(piece: Array, begin: int, ends: Array) -> Array:
    """Decode the integers of 7 bits per byte that follow each other from `begin` on and end at `ends`."""
    starts = np.concatenate([[begin], ends[:-1]])
    lengths = ends - starts
    if lengths.max() > 10:
        raise ValueError("a number of more than 10 bytes")
    found = np.zeros(len(ends), np.uint64)
    for place in range(int(lengths.max())):
        has = lengths > place
        found[has] |= (piece[starts[has] + place] & 127).astype(np.uint64) << np.uint64(7 * place)
    integers: Array = found.view(np.int64)
    return integers


def _fields(data: memoryview, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Yield number, start and stop of the fields of bytes in a message; those of other kinds are skipped."""
    at = start
    while at < stop:
        tag, at = _varint(data, at, stop)
        size = {_FIXED64: 8, _FIXED32: 4}.get(tag & 7, 0)
        if tag & 7 in (_VARINT, _BYTES):
            size, at = _varint(data, at, stop)
            size = 0 if tag & 7 == _VARINT else size
        elif not size:
            raise ValueError(f"a field of kind {tag & 7}")
        if size > stop - at:
            raise ValueError(f"a field of {size} bytes in {stop - at}")
        if tag & 7 == _BYTES:
            yield tag >> 3, at, at + size
        at += size


def _varint(data: memoryview, at: int, stop: int) -> tuple[int, int]:
    value = 0
    for place in range(10):
        if at + place >= stop:
            break
        byte = data[at + place]
        value |= (byte & 127) << 7 * place
        if byte < 128:
            return value, at + place + 1
    raise ValueError("a number that breaks off")


@lru_cache(maxsize=1)
def _tables() -> tuple[Array, Array]:
    """Return CRC-32C (Castagnoli) of one more byte, `[256]`, and of two, `[65536]`, uint32."""
    one = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        one = (one >> 1) ^ ((one & 1) * np.uint32(0x82F63B78))
    two = np.arange(1 << 16, dtype=np.uint32)
    two = one[two & 255] ^ (two >> 8)
    return one, one[two & 255] ^ (two >> 8)


def masked_crc32c(data: memoryview | bytes) -> int:
    """Compute the masked CRC-32C of bytes: rotated right by 15, plus 0xa282ead8."""
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def crc32c(data: memoryview | bytes) -> int:
    """Compute the CRC-32C of bytes, 100 to 200 MB/s: all lanes, parts of the data, advance together, then join."""
    stored, (one, two) = np.frombuffer(data, np.uint8), _tables()
    lanes = 1 << len(stored).bit_length() // 2 if len(stored) >= 256 else 1
    width = len(stored) // lanes & ~1 if lanes > 1 else 0
    words = stored[: width * lanes].reshape(lanes, width).view("<u2")
    crcs = np.zeros(lanes, np.uint32)
    low: Array = crcs.view("<u2")[::2]
    for column in np.ascontiguousarray(words.T):
        following = two[low ^ column]
        crcs >>= 16
        crcs ^= following
    over = _over(width)
    while len(crcs) > 1:  # the left of each pair passes over the bytes of the right one
        crcs = _apply(over, crcs[::2]) ^ crcs[1::2]
        over = _apply(over, over)
    crc = int((_apply(over, np.full(1, 0xFFFFFFFF, np.uint32)) ^ crcs)[0])
    for byte in stored[width * lanes :].tolist():
        crc = int(one[(crc ^ byte) & 255]) ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def _over(num_bytes: int) -> Array:
    """Return the linear map of a CRC by a number of zero bytes: what becomes of each of its 32 bits."""
    found: Array = np.uint32(1) << _BITS
    power = _tables()[0][found & 255] ^ (found >> 8)
    while num_bytes:
        found = _apply(power, found) if num_bytes & 1 else found
        power = _apply(power, power)
        num_bytes >>= 1
    return found


def _apply(linear: Array, crcs: Array) -> Array:
    found: Array = np.bitwise_xor.reduce((crcs[:, None] >> _BITS & 1) * linear, axis=1)
    return found
