"""Arrays of zarr, formats 2 and 3, in a folder or zip file: rows are read chunk by chunk.

One rule: sizes are limited when an array is described, and a chunk is decoded into memory of the size that its array
says. Only compressors are known, nothing that could run code as filters of objects could.
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
from ..records.tfrecord import crc32c
from .npz_arrays import Array, check_count, member_begin

MAX_META_BYTES = 1 << 20
_MAX_CHUNK_BYTES = 1 << 28
_MAX_CHUNKS = 1 << 16
_MAX_ARRAYS = 256
#: Chunks that were never written, and so take no bytes of a file, are few unless the array is small.
_MAX_UNWRITTEN_BYTES, _MIN_WRITTEN = 1 << 26, 1 / 16
_COMPRESSORS = ("blosc", "zstd", "lz4", "gzip", "zlib", "imagecodecs_jpegxl")
_NOWHERE = (1 << 64) - 1
_DAMAGE = (zipfile.BadZipFile, zlib.error, ValueError, TypeError, LookupError, AttributeError, RuntimeError, EOFError)


class Store:
    """Named pieces of bytes: the files of a folder, or the members of a zip file, as they were when it was opened.

    Attributes:
        names: In no order.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._members = dict[str, zipfile.ZipInfo]()
        self._listed: list[zipfile.ZipInfo] = []
        self._known = KnownFiles()
        if path.is_dir():
            found = ((folder, name) for folder, _, names in os.walk(path) for name in names)
            self.names = {os.path.relpath(os.path.join(*one), path) for one in found}
            for name in self.names:
                self._known.check(path / name)
        else:
            opening = damage_named("open", repr(str(path)), "a zip file", *_DAMAGE)
            with opening, self._known.open(path) as file, zipfile.ZipFile(file) as archive:
                self._listed = archive.infolist()
                check_count(file, len(self._listed))
            self._members = {member.filename: member for member in self._listed}
            self.names = set(self._members)

    def get(self, name: str, start: int, num_bytes: int) -> bytes:
        """Read bytes of a piece; fewer at its end. A negative start counts from the end."""
        member = self._members.get(name)
        path = self._path if member else self._path / name
        self._known.check(path)
        with self._known.open(path if member else file_inside(self._path, name)) as file:
            begin, size = (member_begin(file, member), member.compress_size) if member else (0, file.seek(0, 2))
            if member and member.compress_type == zipfile.ZIP_DEFLATED:
                file.seek(begin)
                most = start + num_bytes if start >= 0 else _MAX_CHUNK_BYTES
                data = zlib.decompressobj(-zlib.MAX_WBITS).decompress(file.read(size), most)
                _check_member(member, data)
                return data[start:][:num_bytes]
            if member and (member.compress_type != zipfile.ZIP_STORED or member.flag_bits & 1):
                raise DataFileError("read", repr(name), "a member that is stored or deflated", "another")
            first = max(0, size + start) if start < 0 else min(start, size)
            file.seek(begin + first)
            data = file.read(min(num_bytes, size - first))
            if member:
                _check_member(member, data)
            return data

    def json(self, name: str) -> Any:
        """Parse a small piece."""
        with damage_named("read", f"{name!r} of {str(self._path)!r}", "an intact piece", *_DAMAGE):
            text = self.get(name, 0, MAX_META_BYTES).decode(errors="replace")
        return parse_json(text, self._path / name)

    def check_names(self, arrays: Collection[ZarrArray]) -> None:
        """Check the names of members of a zip file that are no chunk of an array, or are listed twice.

        A chunk with a damaged name in the directory would count as one that was never written.

        Raises:
            CorruptFileError: A member has another name in the directory than in its own head.
        """
        counts = Counter(member.filename for member in self._listed)
        others = [
            member
            for member in self._listed
            if counts[member.filename] > 1 or not any(array.has_piece(member.filename) for array in arrays)
        ]
        with damage_named("open", repr(str(self._path)), "intact names of its members", *_DAMAGE):
            if others:
                with self._known.open(self._path) as file:
                    for member in others:
                        member_begin(file, member)


def _check_member(member: zipfile.ZipInfo, data: bytes) -> None:
    """Raise if the whole content of a member of a zip file contradicts the checksum that the archive has of it."""
    if len(data) == member.file_size and zlib.crc32(data) != member.CRC:
        raise zipfile.BadZipFile(f"{member.filename!r} has another checksum than stored")


_Codecs = Sequence[tuple[str, Mapping[str, Any]]]


@dataclass(frozen=True)
class ZarrArray:
    """An array of a store, not read yet.

    Attributes:
        name: Where it stands, "data/action".
        dtype: As stored; the byte order may be foreign.
        chunks: Shape of what is coded at once.
        pieces: Shape of the pieces of the store: `chunks`, or that of the shards.
        codecs: Name and settings of a compressor and a checksum, if any.
        key: Text before the place of a piece in its name, and what separates the numbers of the place.
        fill: Value of what was not written.
        order: "C" or "F", that of the values of a chunk.
        index_at_end: Of shards.
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
        """Whether pictures were coded with loss."""
        return any(
            name == "imagecodecs_jpegxl" and settings.get("lossless") is not True for name, settings in self.codecs
        )

    def has_piece(self, name: str) -> bool:
        """Return whether a piece of a store is one of this array by its name."""
        prefix, separator = self.key
        if not name.startswith(prefix):
            return False
        numbers = name.removeprefix(prefix).split(separator)
        counts = [-(-size // piece) for size, piece in zip(self.shape, self.pieces, strict=True)]
        if len(numbers) != len(counts):
            return False
        return all(
            number.isdecimal() and str(int(number)) == number and int(number) < count
            for number, count in zip(numbers, counts, strict=True)
        )

    def read(self, store: Store, start: int, stop: int) -> Array:
        """Read the rows `start:stop`: `[stop - start, ...]`, little-endian, a new array."""
        where = f"rows {start}:{stop} of {self.name!r}"
        limits = [(start, stop), *((0, size) for size in self.shape[1:])]
        grid = [range(low // size, -(-high // size)) for (low, high), size in zip(limits, self.chunks, strict=True)]
        with damage_named("read", where, f"chunks of {self.dtype}{list(self.chunks)}", *_DAMAGE):
            out = np.empty([high - low for low, high in limits], self.dtype.newbyteorder("<"))
            for place in product(*grid):
                chunk = self._chunk(store, place)
                target = []
                source = []
                for number, size, (low, high) in zip(place, self.chunks, limits, strict=True):
                    first = max(low, number * size)
                    last = min(high, (number + 1) * size)
                    target.append(slice(first - low, last - low))
                    source.append(slice(first - number * size, last - number * size))
                out[tuple(target)] = self.fill if chunk is None else chunk[tuple(source)]
        return out

    def _chunk(self, store: Store, place: tuple[int, ...]) -> Array | None:
        """Decode a chunk; None if it was not written. Those of the latest rows are kept: the next are often in them."""
        if place not in self._latest:
            num_bytes = prod(self.chunks) * self.dtype.itemsize
            packed = self._packed(store, place, 2 * num_bytes + (1 << 16))
            found = None
            if packed is not None:
                data = _decode(packed, self.codecs, num_bytes)
                found = np.frombuffer(data, self.dtype, prod(self.chunks)).reshape(self.chunks, order=self.order)
            if place[0] != next(iter(self._latest), place)[0]:
                self._latest.clear()
            self._latest[place] = found
            return found
        return self._latest[place]

    def _packed(self, store: Store, place: tuple[int, ...], most_bytes: int) -> bytes | None:
        """Read the bytes of a chunk: a piece by itself, or a part of a shard, whose index says which."""
        within = [size // chunk for size, chunk in zip(self.pieces, self.chunks, strict=True)]
        prefix, separator = self.key
        numbers = [str(number // count) for number, count in zip(place, within, strict=True)]
        name = prefix + separator.join(numbers)
        if name not in store.names:
            return None
        if self.pieces == self.chunks:
            return store.get(name, 0, most_bytes)
        index_bytes = 16 * prod(within) + 4
        index = store.get(name, -index_bytes if self.index_at_end else 0, index_bytes)
        _check_crc(index)
        inner = np.ravel_multi_index([number % count for number, count in zip(place, within, strict=True)], within)
        offset, size = (int(one) for one in np.frombuffer(index, "<u8", 2, 16 * int(inner)))
        if offset == size == _NOWHERE:
            return None
        if size > most_bytes:
            raise ValueError(f"a chunk of {size} bytes")
        return store.get(name, offset, size)


def _check_crc(data: bytes) -> None:
    if len(data) < 4 or crc32c(data[:-4]) != int.from_bytes(data[-4:], "little"):
        raise ValueError("another checksum than stored")


def _decode(data: bytes, codecs: _Codecs, num_bytes: int) -> Any:
    """Decode a chunk into exactly `num_bytes`."""
    out: Any = bytearray(num_bytes)
    for name, _ in reversed(codecs):
        if name == "crc32c":
            _check_crc(data)
            data = data[:-4]
        elif name in ("gzip", "zlib"):
            wbits = zlib.MAX_WBITS | (16 if name == "gzip" else 0)
            data = zlib.decompressobj(wbits).decompress(data, num_bytes + 1)
        elif name == "imagecodecs_jpegxl":
            pixels = optional("imagecodecs", "imagecodecs", "jpegxl", "chunks of JPEG XL").jpegxl_decode(data)
            data = np.ascontiguousarray(pixels).tobytes()
        else:
            is_whole = [int.from_bytes(data[at : at + 4], "little") for at in (4, 12)] == [num_bytes, len(data)]
            if name == "blosc" and not is_whole:  # the library believes these sizes
                raise ValueError("a chunk that declares another size")
            optional(f"numcodecs.{name}", "numcodecs", "zarr", f"chunks of {name}").decompress(data, out)
            data = out
    if len(data) != num_bytes:
        raise ValueError(f"{len(data)} bytes in a chunk of {num_bytes}")
    return data


def find_arrays(store: Store, leave_out: Callable[[str], None]) -> dict[str, ZarrArray]:
    """Describe the arrays of a store by their names; those of texts and of no axis are left out by name.

    Raises:
        CorruptFileError: A description is damaged, or declares more than there is.
        UnsafeFileError: An array holds objects.
    """
    found: dict[str, ZarrArray] = {}
    for name in sorted(store.names):
        folder, _, last = name.rpartition("/")
        about = store.json(name) if last in (".zarray", "zarr.json") else None
        is_described = isinstance(about, dict) and (last == ".zarray" or about.get("node_type") in ("array", "group"))
        if last in (".zarray", "zarr.json") and not is_described:
            raise CorruptFileError("read", repr(name), "the description of an array or a group", repr(about)[:100])
        if len(found) == _MAX_ARRAYS:
            raise CorruptFileError("read", repr(name), f"at most {_MAX_ARRAYS} arrays", "more")
        if isinstance(about, dict) and (last == ".zarray" or about.get("node_type") == "array"):
            if about.get("shape") == [] or _holds_texts(about):
                leave_out(folder)
                continue
            with damage_named("read", repr(name), "the description of an array", *_DAMAGE):
                found[folder] = _of_format_2(folder, about) if last == ".zarray" else _of_format_3(folder, about)
                _check_sizes(found[folder], store)
    store.check_names(found.values())
    return found


def _holds_texts(about: Mapping[str, Any]) -> bool:
    kind = about.get("dtype", about.get("data_type"))
    filters = about.get("filters")
    if isinstance(kind, dict):
        kind = kind.get("name")
    is_packed = kind == "|O" and filters == [{"id": "vlen-utf8"}]
    return isinstance(kind, str) and (is_packed or kind[1:2] in ("U", "S") or kind in ("string", "fixed_length_utf32"))


def _of_format_2(name: str, about: Mapping[str, Any]) -> ZarrArray:
    compressor = about.get("compressor")
    filters = about.get("filters")
    if filters or about["dtype"] == "|O":
        raise UnsafeFileError("read", repr(name), "numbers without filters", str(filters)[:100], "Nothing was run")
    codecs = [(compressor["id"], compressor)] if compressor else []
    chunks = tuple(map(int, about["chunks"]))
    key = (f"{name}/", about.get("dimension_separator", "."))
    fill = about.get("fill_value")
    dtype = np.dtype(str(about["dtype"]))
    shape = tuple(map(int, about["shape"]))
    return ZarrArray(name, shape, dtype, chunks, chunks, codecs, key, _fill(fill, dtype), about.get("order", "C"))


def _of_format_3(name: str, about: Mapping[str, Any]) -> ZarrArray:
    if about["data_type"] not in DTYPES:
        raise UnsafeFileError("read", repr(name), "numbers", str(about["data_type"])[:100], "Nothing was run")
    keys = about["chunk_key_encoding"]
    pieces = tuple(map(int, about["chunk_grid"]["configuration"]["chunk_shape"]))
    is_default = keys["name"] == "default"
    separator = keys.get("configuration", {}).get("separator", "/" if is_default else ".")
    codecs = _codecs_3(about["codecs"])
    chunks = pieces
    at_end = True
    if codecs and codecs[0][0] == "sharding_indexed":
        settings = codecs[0][1]
        if [one for one, _ in _codecs_3(settings["index_codecs"])[1:]] != ["crc32c"] or len(codecs) > 1:
            raise ValueError("a shard of another kind")
        chunks = tuple(map(int, settings["chunk_shape"]))
        at_end = settings.get("index_location", "end") == "end"
        codecs = _codecs_3(settings["codecs"])
    order = "big" if codecs and codecs[0][1].get("endian") == "big" else "little"
    if not codecs or codecs[0][0] != "bytes":
        raise ValueError(f"the codec {codecs[0][0] if codecs else 'none'!r}")
    dtype = DTYPES[about["data_type"]][1].newbyteorder("<" if order == "little" else ">")
    key = (f"{name}/c{separator}" if is_default else f"{name}/", separator)
    shape = tuple(map(int, about["shape"]))
    fill = _fill(about.get("fill_value"), dtype)
    return ZarrArray(name, shape, dtype, chunks, pieces, codecs[1:], key, fill, "C", at_end)


def _codecs_3(listed: Sequence[Mapping[str, Any]]) -> list[tuple[str, Mapping[str, Any]]]:
    return [(one["name"].removeprefix("numcodecs."), one.get("configuration") or {}) for one in listed]


def _fill(value: Any, dtype: np.dtype[Any]) -> Any:
    return dtype.type(0 if value is None else float(value) if isinstance(value, str) else value)


def _check_sizes(array: ZarrArray, store: Store) -> None:
    """Compare what an array declares with limits and with the pieces that are there."""
    names = [name for name, _ in array.codecs]
    if names[-1:] == ["crc32c"]:
        names.pop()
    if len(names) > 1 or not set(names) <= set(_COMPRESSORS):
        raise ValueError(f"{names} instead of one of {', '.join(_COMPRESSORS)}")
    sizes = (array.shape, array.chunks, array.pieces)
    if not 0 < len(array.shape) <= MAX_DIMENSIONS or len({*map(len, sizes)}) != 1 or array.dtype.kind not in "biuf":
        raise ValueError(f"{array.dtype} {sizes}"[:200])
    if min(array.shape) < 0 or min(array.chunks) < 1 or any(map(int.__mod__, array.pieces, array.chunks)):
        raise ValueError(f"{sizes}"[:200])
    num_bytes = prod(array.chunks) * array.dtype.itemsize
    of_row = prod(-(-size // chunk) for size, chunk in zip(array.shape[1:], array.chunks[1:], strict=True))
    within = prod(array.pieces) // prod(array.chunks)
    if num_bytes * of_row > _MAX_CHUNK_BYTES or max(of_row, within) > _MAX_CHUNKS:
        raise ValueError(f"{of_row} chunks of {num_bytes} bytes for a row, {within} in a shard")
    declared = prod(-(-size // piece) for size, piece in zip(array.shape, array.pieces, strict=True))
    there = sum(name.startswith(array.key[0]) for name in store.names)
    if there < declared * _MIN_WRITTEN and prod(array.shape) * array.dtype.itemsize > _MAX_UNWRITTEN_BYTES:
        raise ValueError(f"{there} of {declared} chunks")
