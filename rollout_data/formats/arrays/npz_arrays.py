"""Arrays of an npz file: described without reading them, mapped where stored plainly, else unpacked piece by piece.

One rule: what a file declares is compared with its bytes before memory is taken, and a pickled object is refused.
"""

from __future__ import annotations

import os
import zipfile
import zlib
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO, Any, BinaryIO

import numpy as np

from storage.core.durable_files import crc32, open_regular
from storage.core.fields import MAX_DIMENSIONS
from storage.errors import CorruptFileError, DataFileError, UnsafeFileError

from ..input_checks import KnownFiles, first_bytes

Array = np.ndarray[Any, Any]
_ZIP_MAGIC = b"PK\3\4"
_MAX_MEMBERS = 4096
_MAX_HEAD_BYTES = 10_000
#: Bytes of the last record of a zip file with the longest comment.
_ZIP_END_BYTES = 22 + 0xFFFF
#: Bit of the flags of a member whose name is UTF-8.
_UTF_8 = 0x800
#: DEFLATE gives no more for a byte.
_MAX_EXPANSION = 1032
#: States of zlib, 40 KB each, are kept at distances of at least this, at most the second number for an array.
_MIN_SPACING, _MAX_STATES = 1 << 20, 256
#: Of a packed array at once: the first number of bytes, or the second for each packed one. Zeros alone shrink further.
_FREE_BYTES, _MAX_READ_EXPANSION = 1 << 28, 256
#: What a damaged file makes zipfile and numpy raise.
_DAMAGE = (
    zipfile.BadZipFile, zlib.error, ValueError, SyntaxError, EOFError, NotImplementedError, RuntimeError, LookupError,
)  # fmt: skip


def is_zip(path: Path) -> bool:
    """Return whether a file begins as a zip archive does."""
    return first_bytes(path, len(_ZIP_MAGIC)) == _ZIP_MAGIC


class Unpacking:
    """The bytes of a deflated member from any place on: zlib's state is kept every few MiB once it was passed.

    Args:
        path, offset: Where the packed bytes begin.
        known: The state of the file.
        packed_bytes, num_bytes: Their number, packed and unpacked.
        checksum: CRC-32 of the unpacked ones; compared when the end is reached.

    Attributes:
        most_bytes: What may be asked for at once: a small file may unpack to more than there is memory.
    """

    def __init__(
        self, path: Path, known: KnownFiles, offset: int, packed_bytes: int, num_bytes: int, checksum: int
    ) -> None:
        self._arguments = (path, known, offset, packed_bytes, num_bytes, checksum)
        self.most_bytes = max(_FREE_BYTES, packed_bytes * _MAX_READ_EXPANSION)
        self._spacing = max(_MIN_SPACING, -(-num_bytes // _MAX_STATES))
        # Piece -> (state of zlib, packed bytes before it, CRC-32 of what is before it). Set by number, not appended
        # to: two threads may pass the same place.
        self._states: dict[int, tuple[Any, int, int]] = {0: (zlib.decompressobj(-zlib.MAX_WBITS), 0, 0)}
        self._latest: tuple[int, bytes] = (-1, b"")

    def __reduce__(self) -> Any:
        return Unpacking, self._arguments

    def read(self, start: int, stop: int) -> bytearray:
        """Unpack the bytes `start:stop`."""
        out = bytearray()
        while (at := start + len(out)) < stop:
            number, within = divmod(at, self._spacing)
            out += memoryview(self._piece(number))[within : within + stop - at]
        return out

    def _piece(self, number: int) -> bytes:
        while (known := max(self._states)) < number:
            self._unpack(known)
        latest, data = self._latest
        if latest != number:
            data = self._unpack(number)
            self._latest = number, data
        return data

    def _unpack(self, number: int) -> bytes:
        path, known_file, offset, packed_bytes, num_bytes, checksum = self._arguments
        known, position, crc = self._states[number]
        state = known.copy()
        out = bytearray()
        wanted = min(self._spacing, num_bytes - number * self._spacing)
        try:
            with known_file.open(path) as file:
                while len(out) < wanted:
                    file.seek(offset + position)
                    data = file.read(min(1 << 16, packed_bytes - position))
                    piece = state.decompress(data, wanted - len(out))
                    position += len(data) - len(state.unconsumed_tail)
                    out += piece
                    if not piece and (state.eof or not data):
                        raise zlib.error(f"only {number * self._spacing + len(out)} bytes")
        except zlib.error as cause:
            raise CorruptFileError("unpack", repr(str(path)), f"{num_bytes} bytes", str(cause)) from cause
        crc = crc32(out, crc)
        if number * self._spacing + wanted == num_bytes and crc != checksum:
            raise CorruptFileError("unpack", repr(str(path)), f"checksum {checksum:08x}", f"{crc:08x}")
        self._states[number + 1] = state, position, crc
        return bytes(out)


@dataclass(frozen=True)
class NpzArray:
    """An array of an npz file, not read yet.

    Attributes:
        dtype: As stored; the byte order may be foreign.
        shape: As stored; known to be as large as its bytes.
        is_fortran: Whether columns follow each other in the file, not rows.
        offset: Where its bytes begin, in the file or in `packed`.
        known: The state of the file, which every read compares.
    """

    path: Path
    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    is_fortran: bool
    offset: int
    packed: Unpacking | None
    known: KnownFiles

    def __len__(self) -> int:
        return self.shape[0] if self.shape else 0

    def read(self, start: int = 0, stop: int | None = None) -> Array:
        """Return the rows `start:stop`, little-endian: a read-only map of the file if they lie aligned, else a copy."""
        if not self.shape:
            only: Array = self._stored((1,), 0)[0]
            return only
        stop = self.shape[0] if stop is None else min(stop, self.shape[0])
        start = min(start, stop)
        if self.is_fortran and len(self.shape) > 1:  # of columns that are packed all are unpacked
            whole: Array = self._stored(self.shape[::-1], 0).transpose()
            return whole[start:stop]
        row_bytes = prod(self.shape[1:]) * self.dtype.itemsize
        return self._stored((stop - start, *self.shape[1:]), start * row_bytes)

    def _stored(self, shape: tuple[int, ...], skipped: int) -> Array:
        num_bytes = prod(shape) * self.dtype.itemsize
        begin = self.offset + skipped
        self.known.check(self.path)
        found: Array
        if not num_bytes:
            found = np.empty(shape, self.dtype)
        elif self.packed:
            if num_bytes > self.packed.most_bytes:
                expected = f"at most {self.packed.most_bytes} bytes at once"
                raise CorruptFileError("unpack", self.where, expected, str(num_bytes))
            found = np.frombuffer(self.packed.read(begin, begin + num_bytes), self.dtype).reshape(shape)
        else:
            try:
                with self.known.open(self.path) as file:
                    found = np.memmap(file, self.dtype, "r", begin, shape).view(np.ndarray)
            except ValueError as cause:
                raise CorruptFileError("read", self.where, f"{num_bytes} bytes at {begin}", "fewer") from cause
        little = self.dtype.newbyteorder("<")
        return found if found.flags.aligned and little == self.dtype else found.astype(little)

    @property
    def where(self) -> str:
        """Its name and file, for errors."""
        return f"{self.name!r} of {str(self.path)!r}"


def array_names(path: Path) -> set[str]:
    """Return the names of the arrays of an npz file; none of any other file."""
    return {name.removesuffix(".npy") for name in member_names(path) if name.endswith(".npy")}


def member_names(path: Path) -> set[str]:
    """Return the names in a zip file; none of a damaged one or of any other file."""
    if not is_zip(path):
        return set()
    try:
        with open(open_regular(path), "rb") as file, zipfile.ZipFile(file) as archive:
            return set(archive.namelist())
    except (OSError, DataFileError, *_DAMAGE):
        return set()


def read_npz(path: Path) -> dict[str, NpzArray]:
    """Describe the arrays of an npz file by their names.

    Raises:
        CorruptFileError: It is no such file, is damaged, or declares more than its bytes can be.
        UnsafeFileError: An array holds pickled objects.
    """
    found: dict[str, NpzArray] = {}
    known = KnownFiles()
    try:
        with known.open(path) as file, zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            check_count(file, len(members))
            if len(members) > _MAX_MEMBERS:
                raise CorruptFileError("read", repr(str(path)), f"at most {_MAX_MEMBERS} arrays", str(len(members)))
            for member in members:
                name = member.filename.removesuffix(".npy")
                if name in found:
                    raise CorruptFileError("read", repr(str(path)), "each array once", f"{name!r} twice")
                if member.filename != name:
                    found[name] = _describe(path, known, name, file, archive, member)
    except _DAMAGE as cause:
        got = f"{type(cause).__name__}: {cause}"[:200]
        raise CorruptFileError("read", repr(str(path)), "an npz file", got) from cause
    return found


def check_count(file: BinaryIO, num_members: int) -> None:
    """Raise if a zip file's end says another number of members than its directory lists.

    `zipfile` reads over an entry that a damaged length of the one before it covers.
    """
    file.seek(max(0, file.seek(0, 2) - _ZIP_END_BYTES))
    tail = file.read()
    place = tail.rfind(b"PK\5\6")
    count = int.from_bytes(tail[place + 10 : place + 12], "little")
    if count not in (num_members, 0xFFFF):  # the latter: a number that needs more bytes stands elsewhere
        raise zipfile.BadZipFile(f"{num_members} members are listed, but its end says {count}")


def _describe(
    path: Path, known: KnownFiles, name: str, file: BinaryIO, archive: zipfile.ZipFile, member: zipfile.ZipInfo
) -> NpzArray:
    where = f"{name!r} of {str(path)!r}"
    is_packed = member.compress_type == zipfile.ZIP_DEFLATED
    if member.flag_bits & 1 or not (is_packed or member.compress_type == zipfile.ZIP_STORED):
        raise DataFileError("read", where, "an array that is stored or deflated", "another compression or encryption")
    most = member.compress_size * _MAX_EXPANSION if is_packed else member.compress_size
    begin = member_begin(file, member)
    if member.file_size > most or begin + member.compress_size > os.fstat(file.fileno()).st_size:
        got = f"{member.file_size} bytes of {member.compress_size} in the file"
        raise CorruptFileError("read", where, "an array as large as its bytes", got)
    with archive.open(member) as stream:
        dtype, shape, is_fortran, head_bytes = _read_head(stream, where)
    if head_bytes + prod(shape) * dtype.itemsize != member.file_size:
        got = f"{dtype}{list(shape)[:8]} in {member.file_size} bytes"
        raise CorruptFileError("read", where, "an array as large as its bytes", got)
    packed = Unpacking(path, known, begin, member.compress_size, member.file_size, member.CRC) if is_packed else None
    return NpzArray(path, name, dtype, shape, is_fortran, head_bytes + (0 if is_packed else begin), packed, known)


def member_begin(file: BinaryIO, member: zipfile.ZipInfo) -> int:
    """Return where the bytes of a member begin: behind its own head, whose length the directory does not tell."""
    file.seek(max(0, member.header_offset))
    head = file.read(30)
    if member.header_offset < 0 or len(head) < 30 or head[:4] != b"PK\3\4":
        raise zipfile.BadZipFile(f"no member at {member.header_offset}")
    num_name, num_extra = (int.from_bytes(head[at : at + 2], "little") for at in (26, 28))
    name = file.read(num_name).decode("utf-8" if member.flag_bits & _UTF_8 else "cp437")
    if name != member.orig_filename:
        raise zipfile.BadZipFile(f"the name {name!r} in the member and {member.orig_filename!r} in the directory")
    return member.header_offset + 30 + num_name + num_extra


def _read_head(stream: IO[bytes], where: str) -> tuple[np.dtype[Any], tuple[int, ...], bool, int]:
    version = np.lib.format.read_magic(stream)
    if version not in ((1, 0), (2, 0)):
        raise DataFileError("read", where, "npy 1.0 or 2.0", ".".join(map(str, version)))
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, is_fortran, dtype = read(stream, max_header_size=_MAX_HEAD_BYTES)
    if dtype.hasobject:
        raise UnsafeFileError("read", where, "numbers or texts", "pickled objects", "Nothing in the file was run")
    if len(shape) > MAX_DIMENSIONS or any(size < 0 for size in shape):
        raise ValueError(f"the shape {list(shape)[:8]}")
    return dtype, shape, is_fortran, stream.tell()
