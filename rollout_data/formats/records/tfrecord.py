"""TFRecord files, and the offsets of values in their messages `tf.train.Example`.

A record consists of a u64 length, the u32 masked CRC-32C of the length, the content, and the u32
masked CRC-32C of the content.

TensorFlow, whose reader copies every value, would be a dependency of hundreds of MB. This module
only needs positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from storage.errors import CorruptFileError

from .crc32c import crc32c

Array = np.ndarray[Any, Any]
# Kinds of value lists: field numbers in the protobuf message `Feature`.
BYTES = 1
FLOATS = 2
INTEGERS = 3
# Protobuf wire types of the fields of a message.
_VARINT = 0
_FIXED64 = 1
_BYTES = 2
_FIXED32 = 5
_MAX_FEATURES = 4096
#: Bytes of packed integers decoded at a time.
_PIECE_BYTES = 1 << 20


class FeatureValues(NamedTuple):
    """Location of the values of a feature in a file.

    Attributes:
        kind: `BYTES`, `FLOATS` or `INTEGERS`.
        start, stop: Offsets of the value list in the file.
    """

    kind: int
    start: int
    stop: int


def records(data: memoryview, path: Path) -> Iterator[tuple[int, int]]:
    """Yield the offsets (start, stop) of each record; read only the lengths.

    Raises:
        CorruptFileError: A record is truncated, or its length is damaged. Earlier records have
            already been yielded.
    """
    position = 0
    while position < len(data):
        head = data[position : position + 12]
        num_bytes = int.from_bytes(head[:8], "little")
        if len(head) < 12 or int.from_bytes(head[8:], "little") != masked_crc32c(head[:8]):
            raise CorruptFileError(
                f"{str(path)!r} is damaged: byte {position} does not start a record."
            )
        start = position + 12
        if num_bytes > len(data) - start - 4:
            raise CorruptFileError(
                f"{str(path)!r} is truncated: the record at byte {position} has "
                f"{len(data) - start} of {num_bytes} bytes."
            )
        yield start, start + num_bytes
        position = start + num_bytes + 4


def check_record(data: memoryview, start: int, stop: int, path: Path) -> None:
    """Compare the checksum of a record with its bytes.

    Raises:
        CorruptFileError: The checksum differs.
    """
    stated = int.from_bytes(data[stop : stop + 4], "little")
    checksum = masked_crc32c(data[start:stop])
    if stated != checksum:
        raise CorruptFileError(
            f"The record at byte {start} of {str(path)!r} is damaged: expected checksum "
            f"{stated:08x}, got {checksum:08x}.",
            kind="checksum",
        )


def features(data: memoryview, start: int, stop: int) -> dict[str, FeatureValues]:
    """Map the feature names of a `tf.train.Example` to the locations of the values.

    The message is `data[start:stop]`.

    Raises:
        ValueError: The bytes are not an `Example`.
    """
    by_name: dict[str, FeatureValues] = {}
    for _, list_start, list_stop in _fields(data, start, stop):
        for _, entry_start, entry_stop in _fields(data, list_start, list_stop):
            parts = {}
            for number, part_start, part_stop in _fields(data, entry_start, entry_stop):
                parts[number] = (part_start, part_stop)
            if 1 not in parts or 2 not in parts:
                raise ValueError("a feature has no name or no values")
            if len(by_name) == _MAX_FEATURES:
                raise ValueError(f"there are more than {_MAX_FEATURES} features")
            name_start, name_stop = parts[1]
            name = bytes(data[name_start:name_stop]).decode()
            for kind, first, last in _fields(data, *parts[2]):
                if kind not in (BYTES, FLOATS, INTEGERS):
                    raise ValueError(f"feature {name!r} has values of the unknown type {kind}")
                by_name[name] = FeatureValues(kind, first, last)
    return by_name


def items(data: memoryview, feature: FeatureValues, most: int) -> list[memoryview]:
    """Return the values of a feature of kind `BYTES`, as views.

    Raises:
        ValueError: There are more than `most` values, or the feature has a different kind.
    """
    values: list[memoryview] = []
    for _, start, stop in _fields(data, feature.start, feature.stop):
        if feature.kind != BYTES:
            raise ValueError("a feature has numbers, expected byte strings")
        if len(values) == most:
            raise ValueError(f"a feature has more than {most} values")
        values.append(data[start:stop])
    return values


def count(data: memoryview, feature: FeatureValues) -> int:
    """Return the number of values of a feature of kind `FLOATS` or `INTEGERS`."""
    packed = _packed(data, feature)
    if feature.kind == FLOATS:
        return len(packed) // 4
    num_integers = 0
    for start in range(0, len(packed), _PIECE_BYTES):
        is_last_byte = packed[start : start + _PIECE_BYTES] < 128
        num_integers += int(np.count_nonzero(is_last_byte))
    return num_integers


def numbers(data: memoryview, feature: FeatureValues, start: int, stop: int) -> Array:
    """Decode the numbers `start:stop` of a feature as a new array of float32 or int64.

    Raises:
        ValueError: The feature has fewer than `stop` numbers.
    """
    packed = _packed(data, feature)
    if feature.kind == FLOATS:
        values: Array = packed[4 * start : 4 * stop].copy().view("<f4")
    else:
        values = _integers(packed, start, stop)
    if len(values) != stop - start:
        raise ValueError(f"a feature has fewer than {stop} numbers")
    return values


def _integers(packed: Array, start: int, stop: int) -> Array:
    """Decode the packed integers `start:stop`; fewer integers if the list is shorter."""
    parts = [np.empty(0, np.int64)]
    num_passed = 0
    for piece, ends in _pieces(packed):
        low = max(0, start - num_passed)
        high = min(len(ends), stop - num_passed)
        if low < high:
            begin = ends[low - 1] if low else 0
            parts.append(_varints(piece, begin, ends[low:high]))
        num_passed += len(ends)
        if num_passed >= stop:
            break
    return np.concatenate(parts)


def _packed(data: memoryview, feature: FeatureValues) -> Array:
    """Return a uint8 view of the packed numbers of a feature."""
    spans = [(start, stop) for _, start, stop in _fields(data, feature.start, feature.stop)]
    if feature.kind == BYTES or len(spans) > 1:
        raise ValueError("the numbers of a feature are not packed")
    start, stop = spans[0] if spans else (0, 0)
    return np.frombuffer(data[start:stop], np.uint8)


def _pieces(packed: Array) -> Iterator[tuple[Array, Array]]:
    """Divide packed integers into pieces that end where an integer ends.

    Yields:
        The bytes of a piece, and the end offset in the piece of each integer: int64 `[n]`.
    """
    position = 0
    while position < len(packed):
        piece = packed[position : position + _PIECE_BYTES]
        ends = np.flatnonzero(piece < 128) + 1
        if not len(ends):
            raise ValueError("a number has no end")
        yield piece, ends
        position += int(ends[-1])


def _varints(piece: Array, begin: int, ends: Array) -> Array:
    """Decode consecutive varints, integers with 7 bits per byte.

    Args:
        piece: The bytes, uint8.
        begin: Offset of the first integer.
        ends: End offset of each integer.
    """
    starts = np.concatenate([[begin], ends[:-1]])
    lengths = ends - starts
    if lengths.max() > 10:
        raise ValueError("a number has more than 10 bytes")
    values = np.zeros(len(ends), np.uint64)
    for number in range(int(lengths.max())):
        has_byte = lengths > number
        bits = (piece[starts[has_byte] + number] & 127).astype(np.uint64)
        values[has_byte] |= bits << np.uint64(7 * number)
    integers: Array = values.view(np.int64)
    return integers


def _fields(data: memoryview, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Yield (field number, start, stop) of the length-delimited fields of a message.

    Fields of other wire types are skipped.
    """
    position = start
    while position < stop:
        tag, position = _varint(data, position, stop)
        wire_type = tag & 7
        if wire_type == _VARINT:
            _, position = _varint(data, position, stop)
            continue
        if wire_type == _BYTES:
            num_bytes, position = _varint(data, position, stop)
        elif wire_type == _FIXED64:
            num_bytes = 8
        elif wire_type == _FIXED32:
            num_bytes = 4
        else:
            raise ValueError(f"a field has the unknown type {wire_type}")
        if num_bytes > stop - position:
            raise ValueError(f"a field has {stop - position} of {num_bytes} bytes")
        if wire_type == _BYTES:
            yield tag >> 3, position, position + num_bytes
        position += num_bytes


def _varint(data: memoryview, position: int, stop: int) -> tuple[int, int]:
    """Return the varint at a position, and the position after the varint."""
    value = 0
    for number in range(min(10, stop - position)):
        byte = data[position + number]
        value |= (byte & 127) << 7 * number
        if byte < 128:
            return value, position + number + 1
    raise ValueError("a number is truncated")


def masked_crc32c(data: memoryview | bytes) -> int:
    """Compute the masked CRC-32C of TFRecord: the CRC rotated right by 15 bits, plus 0xa282ead8."""
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
