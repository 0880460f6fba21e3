"""Read arrays of zarr formats 2 and 3 from a folder or zip file, chunk by chunk.

A chunk is the part of an array that is compressed as one. A file of the store contains a piece of
an array: one chunk, or a shard of several chunks.

Sizes are limited when the description of an array is read. A chunk is decoded to at most its
declared size. Filters raise an error, because a filter that unpickles objects could run code.

The package `zarr` has no such limits: with it, a file of 1 MB took 2 GB of memory.
"""

from __future__ import annotations

import os
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from storage.core.fields import DTYPES, MAX_DIMENSIONS
from storage.errors import CorruptFileError, DataFileError, UnsafeFileError

from ..input_checks import KnownFiles, damage_named, file_inside, optional, parse_json
from ..records.crc32c import crc32c
from .npz_arrays import Array, check_count, member_begin

MAX_META_BYTES = 1 << 20
_MAX_CHUNK_BYTES = 1 << 28
_MAX_CHUNKS = 1 << 16
_MAX_ARRAYS = 256
#: Maximum bytes of an array that may have any number of unwritten chunks. Unwritten chunks take no
#: bytes in the store, so a small store could declare an array of any size.
_MAX_UNWRITTEN_BYTES = 1 << 26
#: Minimum share of the files of an array that must exist if the array is larger than
#: `_MAX_UNWRITTEN_BYTES`.
_MIN_WRITTEN = 1 / 16
_COMPRESSORS = ("blosc", "zstd", "lz4", "gzip", "zlib", "imagecodecs_jpegxl")
#: Value of both the offset and the size of an unwritten chunk in the index of a shard.
_UNWRITTEN = (1 << 64) - 1
_DAMAGE = (
    zipfile.BadZipFile,
    zlib.error,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    RuntimeError,
    EOFError,
)


class Store:
    """The files of a zarr folder, or the members of a zarr zip file, by name.

    Reading a file that has changed since the store was opened raises an error.

    Attributes:
        names: Names of all files or members.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._members = dict[str, zipfile.ZipInfo]()
        self._listed: list[zipfile.ZipInfo] = []
        self._known = KnownFiles()
        if path.is_dir():
            self.names = set[str]()
            for folder, _, names in os.walk(path):
                for name in names:
                    self.names.add(os.path.relpath(os.path.join(folder, name), path))
            for name in self.names:
                self._known.check(path / name)
        else:
            opening = damage_named(repr(str(path)), *_DAMAGE)
            with opening, self._known.open(path) as file, zipfile.ZipFile(file) as archive:
                self._listed = archive.infolist()
                check_count(file, len(self._listed))
            self._members = {member.filename: member for member in self._listed}
            self.names = set(self._members)

    def get(self, name: str, start: int, num_bytes: int) -> bytes:
        """Read up to `num_bytes` bytes of a file; a negative `start` counts from its end."""
        member = self._members.get(name)
        if member is not None:
            return self._get_of_zip(member, name, start, num_bytes)
        path = self._path / name
        self._known.check(path)
        with self._known.open(file_inside(self._path, name)) as file:
            size = file.seek(0, 2)
            first = max(0, size + start) if start < 0 else min(start, size)
            file.seek(first)
            return file.read(min(num_bytes, size - first))

    def _get_of_zip(
        self,
        member: zipfile.ZipInfo,
        name: str,
        start: int,
        num_bytes: int,
    ) -> bytes:
        """Read up to `num_bytes` bytes of a zip member; a negative `start` counts from its end."""
        with self._known.open(self._path) as file:
            begin = member_begin(file, member)
            size = member.compress_size
            if member.compress_type == zipfile.ZIP_DEFLATED:
                file.seek(begin)
                most_bytes = start + num_bytes if start >= 0 else _MAX_CHUNK_BYTES
                unpacker = zlib.decompressobj(-zlib.MAX_WBITS)
                data = unpacker.decompress(file.read(size), most_bytes)
                _check_member(member, data)
                return data[start:][:num_bytes]
            is_encrypted = bool(member.flag_bits & 1)
            if member.compress_type != zipfile.ZIP_STORED or is_encrypted:
                raise DataFileError(
                    f"{name!r} of {str(self._path)!r} is encrypted or has an unknown compression. "
                    "Only stored and deflated members are read."
                )
            first = max(0, size + start) if start < 0 else min(start, size)
            file.seek(begin + first)
            data = file.read(min(num_bytes, size - first))
            _check_member(member, data)
            return data

    def json(self, name: str) -> Any:
        """Read a small file of the store and parse the content as JSON."""
        with damage_named(f"{name!r} of {str(self._path)!r}", *_DAMAGE):
            text = self.get(name, 0, MAX_META_BYTES).decode(errors="replace")
        return parse_json(text, self._path / name)

    def check_names(self, arrays: Collection[ZarrArray]) -> None:
        """Check that the zip directory has no damaged name of a chunk.

        A chunk with a damaged name would count as unwritten. Only names that are listed twice or
        belong to no array are checked here. Reading a member checks the other names.

        Raises:
            CorruptFileError: A member has different names in the zip directory and in its local
                header.
        """
        counts = Counter(member.filename for member in self._listed)
        others = []
        for member in self._listed:
            name = member.filename
            if counts[name] > 1 or not any(array.has_piece(name) for array in arrays):
                others.append(member)
        with damage_named(repr(str(self._path)), *_DAMAGE):
            if others:
                with self._known.open(self._path) as file:
                    for member in others:
                        member_begin(file, member)


def _check_member(member: zipfile.ZipInfo, data: bytes) -> None:
    """Raise `BadZipFile` if the content of a member has a wrong checksum.

    A part of the content is not checked, because the checksum covers the whole content.
    """
    if len(data) != member.file_size:
        return
    checksum = zlib.crc32(data)
    if checksum != member.CRC:
        raise zipfile.BadZipFile(
            f"{member.filename!r} has checksum {checksum:08x}, expected {member.CRC:08x}"
        )


_Codecs = Sequence[tuple[str, Mapping[str, Any]]]


@dataclass(frozen=True)
class ZarrArray:
    """An array of a store. Rows are read on request.

    Attributes:
        name: Path of the array in the store, such as "data/action".
        shape: Shape of the whole array.
        dtype: Stored dtype, possibly big-endian.
        chunks: Shape of a chunk, the unit of compression.
        pieces: Shape of the piece of the array in one file of the store: the shape of a chunk or of
            a shard.
        codecs: (name, settings) of the compressor and of the checksum, if any.
        key: Prefix of the file names of the array, and separator of the numbers in the names.
        fill: Value of unwritten chunks.
        order: Order of the values of a chunk, "C" or "F".
        index_at_end: Whether the index of a shard is at its end.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    chunks: tuple[int, ...]
    pieces: tuple[int, ...]
    codecs: _Codecs
    key: tuple[str, str]
    fill: Any = 0
    order: Any = "C"
    index_at_end: bool = True
    _latest: dict[tuple[int, ...], Array | None] = field(default_factory=dict, compare=False)

    @property
    def is_lossy(self) -> bool:
        """Whether the array was compressed with loss."""
        for name, settings in self.codecs:
            if name == "imagecodecs_jpegxl" and settings.get("lossless") is not True:
                return True
        return False

    def has_piece(self, name: str) -> bool:
        """Return whether `name` is a file with chunks of this array."""
        prefix, separator = self.key
        if not name.startswith(prefix):
            return False
        numbers = name.removeprefix(prefix).split(separator)
        counts = _num_blocks(self.shape, self.pieces)
        if len(numbers) != len(counts):
            return False
        for number, count in zip(numbers, counts, strict=True):
            is_canonical = number.isdecimal() and str(int(number)) == number
            if not is_canonical or int(number) >= count:
                return False
        return True

    def read(self, store: Store, start: int, stop: int) -> Array:
        """Read the rows `start:stop` as a new little-endian array `[stop - start, ...]`."""
        where = f"The part {start}:{stop} of {self.name!r}"
        bounds = [(start, stop)] + [(0, size) for size in self.shape[1:]]
        chunk_ranges = []
        for (low, high), size in zip(bounds, self.chunks, strict=True):
            chunk_ranges.append(range(low // size, -(-high // size)))

        with damage_named(where, *_DAMAGE):
            rows = np.empty([high - low for low, high in bounds], self.dtype.newbyteorder("<"))
            for place in product(*chunk_ranges):
                chunk = self._chunk(store, place)
                target = []
                source = []
                for number, size, (low, high) in zip(place, self.chunks, bounds, strict=True):
                    first = max(low, number * size)
                    last = min(high, (number + 1) * size)
                    target.append(slice(first - low, last - low))
                    source.append(slice(first - number * size, last - number * size))
                rows[tuple(target)] = self.fill if chunk is None else chunk[tuple(source)]
        return rows

    def _chunk(self, store: Store, place: tuple[int, ...]) -> Array | None:
        """Return a decoded chunk; None for an unwritten chunk, which consists of fill values.

        The chunks of the most recent rows are cached, because the next rows are often in the same
        chunks.
        """
        if place in self._latest:
            return self._latest[place]
        num_values = prod(self.chunks)
        num_bytes = num_values * self.dtype.itemsize
        packed = self._packed(store, place, 2 * num_bytes + (1 << 16))
        chunk = None
        if packed is not None:
            data = _decode(packed, self.codecs, num_bytes)
            values = np.frombuffer(data, self.dtype, num_values)
            chunk = values.reshape(self.chunks, order=self.order)
        if place[0] != next(iter(self._latest), place)[0]:
            self._latest.clear()
        self._latest[place] = chunk
        return chunk

    def _packed(self, store: Store, place: tuple[int, ...], most_bytes: int) -> bytes | None:
        """Read the compressed bytes of a chunk: a complete file, or a part of a shard.

        The result is None if the chunk is unwritten.
        """
        prefix, separator = self.key
        per_piece = [piece // chunk for piece, chunk in zip(self.pieces, self.chunks, strict=True)]
        piece_numbers = []
        inner_numbers = []
        for number, count in zip(place, per_piece, strict=True):
            piece_numbers.append(str(number // count))
            inner_numbers.append(number % count)
        name = prefix + separator.join(piece_numbers)
        if name not in store.names:
            return None
        if self.pieces == self.chunks:
            return store.get(name, 0, most_bytes)

        # The index of a shard consists of the u64 offset and size of each chunk, and a CRC-32C.
        index_bytes = 16 * prod(per_piece) + 4
        index = store.get(name, -index_bytes if self.index_at_end else 0, index_bytes)
        _check_crc(index)
        inner = int(np.ravel_multi_index(inner_numbers, per_piece))
        offset, size = np.frombuffer(index, "<u8", 2, 16 * inner).tolist()
        if offset == size == _UNWRITTEN:
            return None
        if size > most_bytes:
            raise ValueError(f"a chunk has {size} bytes, more than {most_bytes}")
        return store.get(name, offset, size)


def _num_blocks(shape: Sequence[int], block_shape: Sequence[int]) -> list[int]:
    """Return the number of blocks along each axis. The last block may be incomplete."""
    return [-(-size // block) for size, block in zip(shape, block_shape, strict=True)]


def _check_crc(data: bytes) -> None:
    """Raise `ValueError` if the last 4 bytes are not the CRC-32C of the bytes before them."""
    if len(data) < 4 or crc32c(data[:-4]) != int.from_bytes(data[-4:], "little"):
        raise ValueError("the checksum of a chunk or of the index of a shard is wrong")


def _decode(data: bytes, codecs: _Codecs, num_bytes: int) -> Any:
    """Decode a chunk; raise `ValueError` if the result does not have `num_bytes` bytes."""
    out: Any = bytearray(num_bytes)
    for name, _ in reversed(codecs):
        if name == "crc32c":
            _check_crc(data)
            data = data[:-4]
        elif name in ("gzip", "zlib"):
            wbits = zlib.MAX_WBITS | (16 if name == "gzip" else 0)
            data = zlib.decompressobj(wbits).decompress(data, num_bytes + 1)
        elif name == "imagecodecs_jpegxl":
            imagecodecs = optional("imagecodecs", "imagecodecs", "jpegxl", "chunks of JPEG XL")
            data = np.ascontiguousarray(imagecodecs.jpegxl_decode(data)).tobytes()
        else:
            if name == "blosc":
                # The blosc library does not check these sizes itself.
                unpacked_bytes = int.from_bytes(data[4:8], "little")
                packed_bytes = int.from_bytes(data[12:16], "little")
                if unpacked_bytes != num_bytes or packed_bytes != len(data):
                    raise ValueError("a chunk declares a wrong size")
            codec = optional(f"numcodecs.{name}", "numcodecs", "zarr", f"chunks of {name}")
            codec.decompress(data, out)
            data = out
    if len(data) != num_bytes:
        raise ValueError(f"a chunk has {len(data)} bytes, expected {num_bytes}")
    return data


def find_arrays(store: Store, leave_out: Callable[[str], None]) -> dict[str, ZarrArray]:
    """Find the arrays of a store by name. Rows are not read yet.

    Arrays of texts and arrays without axes are left out. `leave_out` is called with their names.

    Raises:
        CorruptFileError: A description is damaged, or declares more data than the store has.
        UnsafeFileError: An array contains objects.
    """
    arrays: dict[str, ZarrArray] = {}
    for name in sorted(store.names):
        folder, _, file_name = name.rpartition("/")
        if file_name not in (".zarray", "zarr.json"):
            continue
        description = store.json(name)
        is_format_2 = file_name == ".zarray"
        node_type = description.get("node_type") if isinstance(description, dict) else None
        is_node = is_format_2 or node_type in ("array", "group")
        if not isinstance(description, dict) or not is_node:
            raise CorruptFileError(
                f"{name!r} describes neither an array nor a group: {repr(description)[:100]}."
            )
        if not is_format_2 and node_type == "group":
            continue
        if len(arrays) == _MAX_ARRAYS:
            raise CorruptFileError(f"{name!r} exceeds the limit of {_MAX_ARRAYS} arrays.")
        if description.get("shape") == [] or _holds_texts(description):
            leave_out(folder)
            continue
        with damage_named(repr(name), *_DAMAGE):
            parse = _of_format_2 if is_format_2 else _of_format_3
            array = parse(folder, description)
            _check_sizes(array, store)
            arrays[folder] = array
    store.check_names(arrays.values())
    return arrays


def _holds_texts(about: Mapping[str, Any]) -> bool:
    """Return whether the JSON description of an array declares texts."""
    dtype = about.get("dtype", about.get("data_type"))
    if isinstance(dtype, dict):
        dtype = dtype.get("name")
    if not isinstance(dtype, str):
        return False
    if dtype == "|O":
        return about.get("filters") == [{"id": "vlen-utf8"}]
    return dtype[1:2] in ("U", "S") or dtype in ("string", "fixed_length_utf32")


def _of_format_2(name: str, about: Mapping[str, Any]) -> ZarrArray:
    compressor = about.get("compressor")
    filters = about.get("filters")
    if filters or about["dtype"] == "|O":
        content = f"filters {str(filters)[:100]}" if filters else "pickled objects"
        raise UnsafeFileError(
            f"{name!r} has {content}. Only numbers without filters are read. No code of the file "
            "was run."
        )
    codecs = [(compressor["id"], compressor)] if compressor else []
    chunks = tuple(map(int, about["chunks"]))
    key = (f"{name}/", about.get("dimension_separator", "."))
    dtype = np.dtype(str(about["dtype"]))
    shape = tuple(map(int, about["shape"]))
    fill = _fill(about.get("fill_value"), dtype)
    order = about.get("order", "C")
    return ZarrArray(name, shape, dtype, chunks, chunks, codecs, key, fill, order)


def _of_format_3(name: str, about: Mapping[str, Any]) -> ZarrArray:
    if about["data_type"] not in DTYPES:
        data_type = str(about["data_type"])[:100]
        raise UnsafeFileError(
            f"{name!r} has data type {data_type}. Only numbers are read. No code of the file was "
            "run."
        )
    keys = about["chunk_key_encoding"]
    pieces = tuple(map(int, about["chunk_grid"]["configuration"]["chunk_shape"]))
    is_default = keys["name"] == "default"
    separator = keys.get("configuration", {}).get("separator", "/" if is_default else ".")
    codecs = _codecs_3(about["codecs"])
    chunks = pieces
    at_end = True
    if codecs and codecs[0][0] == "sharding_indexed":
        settings = codecs[0][1]
        index_codecs = [codec for codec, _ in _codecs_3(settings["index_codecs"])]
        if index_codecs[1:] != ["crc32c"] or len(codecs) > 1:
            raise ValueError("the index codecs of the shards are not supported")
        chunks = tuple(map(int, settings["chunk_shape"]))
        at_end = settings.get("index_location", "end") == "end"
        codecs = _codecs_3(settings["codecs"])
    first_codec, first_settings = codecs[0] if codecs else ("none", {})
    if first_codec != "bytes":
        raise ValueError(f"the first codec is {first_codec!r}, expected 'bytes'")
    is_big_endian = first_settings.get("endian") == "big"
    dtype = DTYPES[about["data_type"]][1].newbyteorder(">" if is_big_endian else "<")
    key = (f"{name}/c{separator}" if is_default else f"{name}/", separator)
    shape = tuple(map(int, about["shape"]))
    fill = _fill(about.get("fill_value"), dtype)
    return ZarrArray(name, shape, dtype, chunks, pieces, codecs[1:], key, fill, "C", at_end)


def _codecs_3(listed: Sequence[Mapping[str, Any]]) -> list[tuple[str, Mapping[str, Any]]]:
    """Return (name, settings) of each codec in a list of codecs of a zarr 3 description."""
    codecs = []
    for codec in listed:
        name = codec["name"].removeprefix("numcodecs.")
        codecs.append((name, codec.get("configuration") or {}))
    return codecs


def _fill(value: Any, dtype: np.dtype[Any]) -> Any:
    """Convert a declared fill value to a dtype. JSON declares NaN and infinities as texts."""
    if value is None:
        return dtype.type(0)
    return dtype.type(float(value) if isinstance(value, str) else value)


def _check_sizes(array: ZarrArray, store: Store) -> None:
    """Check the declared sizes of an array against limits and against the files of the store.

    Raises:
        ValueError: A size is too large, or contradicts another size.
    """
    names = [name for name, _ in array.codecs]
    if names[-1:] == ["crc32c"]:
        names.pop()
    if len(names) > 1 or not set(names) <= set(_COMPRESSORS):
        known = ", ".join(_COMPRESSORS)
        raise ValueError(f"the codecs are {names}, expected at most one of {known}")
    sizes = (array.shape, array.chunks, array.pieces)
    has_equal_dimensions = len({*map(len, sizes)}) == 1
    wrong_sizes = f"shape, chunks and pieces are {sizes}"[:200]
    if not 0 < len(array.shape) <= MAX_DIMENSIONS or not has_equal_dimensions:
        raise ValueError(wrong_sizes)
    if array.dtype.kind not in "biuf":
        raise ValueError(f"dtype {array.dtype} is not a number")
    if min(array.shape) < 0 or min(array.chunks) < 1:
        raise ValueError(wrong_sizes)
    if any(piece % chunk for piece, chunk in zip(array.pieces, array.chunks, strict=True)):
        raise ValueError(wrong_sizes)

    chunk_bytes = prod(array.chunks) * array.dtype.itemsize
    chunks_per_row = prod(_num_blocks(array.shape[1:], array.chunks[1:]))
    chunks_per_shard = prod(array.pieces) // prod(array.chunks)
    has_many_chunks = max(chunks_per_row, chunks_per_shard) > _MAX_CHUNKS
    if chunk_bytes * chunks_per_row > _MAX_CHUNK_BYTES or has_many_chunks:
        raise ValueError(
            f"a row has {chunks_per_row} chunks of {chunk_bytes} bytes and a shard has "
            f"{chunks_per_shard} chunks, which is too large"
        )

    num_declared = prod(_num_blocks(array.shape, array.pieces))
    num_written = sum(name.startswith(array.key[0]) for name in store.names)
    is_large = prod(array.shape) * array.dtype.itemsize > _MAX_UNWRITTEN_BYTES
    if is_large and num_written < num_declared * _MIN_WRITTEN:
        raise ValueError(f"only {num_written} of {num_declared} chunks are in the store")
