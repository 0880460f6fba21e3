"""LZ4 blocks in memory and LZ4 frames in files, by the package `lz4`.

Sizes in the data are not trusted. A block must decode to the number of bytes that the caller
expects. All sizes in a frame are checked against the length of the file before memory is allocated.

Written frames are standard (LZ4 frame format 1.6), with independent blocks of 4 MiB and a checksum
of the content. Other LZ4 tools read these frames, and blocks decode in parallel.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, BinaryIO

import lz4.block
import lz4.frame
import numpy as np
import numpy.typing as npt

from ..core.arguments import whole
from ..core.threads import Worker, each
from ..errors import CorruptFileError, ForeignFileError

Bytes = npt.NDArray[np.uint8]
#: Largest ratio of decoded to compressed bytes that LZ4 can reach. Data that declare a larger ratio
#: are damaged or an attack.
MAX_EXPANSION = 255
#: Default level of high compression. Level 12 is 1 to 3 % smaller and takes twice the time.
DEFAULT_HIGH_LEVEL = 9
MAGIC = b"\x04\x22\x4d\x18"
#: First bytes of a frame that LZ4 readers skip. Metadata of the writer are stored in such frames.
SKIPPABLE_MAGIC = b"\x50\x2a\x4d\x18"
_MAX_LEVEL = lz4.frame.COMPRESSIONLEVEL_MAX
_MAX_BLOCK_BYTES = {4: 1 << 16, 5: 1 << 18, 6: 1 << 20, 7: 4 << 20}
#: Decoded bytes of a written block.
BLOCK_BYTES = 4 << 20
#: Maximum number of compressed blocks that wait to be written.
_MAX_WAITING = 4


def check_level(level: Any) -> int:
    """Check a level and return it: 0 is fast, 1 to 12 compress better, 13 to 16 equal 12."""
    return whole("level", level, 0, _MAX_LEVEL)


def compress(data: Any, level: int = 0) -> bytes:
    """Compress a buffer to an LZ4 block without a stored size. `level` is as in `check_level`."""
    if level > 0:
        return bytes(
            lz4.block.compress(data, mode="high_compression", compression=level, store_size=False)
        )
    return bytes(lz4.block.compress(data, mode="default", store_size=False))


def decompress(block: Any, num_bytes: int) -> bytearray:
    """Decode a block of exactly `num_bytes`.

    Raises:
        CorruptFileError: The block is damaged or holds another number of bytes.
    """
    if num_bytes > MAX_EXPANSION * len(block):
        raise CorruptFileError(
            f"the LZ4 block has {len(block)} bytes, expected at least "
            f"{-(-num_bytes // MAX_EXPANSION)}."
        )
    decoded: bytearray | None = None
    with suppress(lz4.block.LZ4BlockError, OverflowError):
        decoded = lz4.block.decompress(block, uncompressed_size=num_bytes, return_bytearray=True)
    if decoded is None:
        raise CorruptFileError(f"the LZ4 block of {num_bytes} decoded bytes is damaged.")
    if len(decoded) != num_bytes:
        raise CorruptFileError(
            f"the LZ4 block decodes to {len(decoded)} bytes, expected {num_bytes}."
        )
    return decoded


class Lz4Writer:
    """A binary file that writes one LZ4 frame to another file.

    `write` compresses the data in the thread of the caller, and a background thread writes the
    blocks. Leaving the `with` block without an error completes the frame. The caller may change its
    data as soon as `write` returns. Takes 6 blocks of 4 MiB of memory.

    Args:
        file: Receives the frame. The caller closes it.
        level: As in `check_level`.
    """

    def __init__(self, file: BinaryIO, level: int = 0) -> None:
        self._file = file
        self._stream = lz4.frame.LZ4FrameCompressor(
            block_size=lz4.frame.BLOCKSIZE_MAX4MB,
            block_linked=False,
            content_checksum=True,
            compression_level=check_level(level),
        )
        self._worker = Worker("lz4", max_pending=_MAX_WAITING)
        self._worker.submit(file.write, self._stream.begin())

    def __enter__(self) -> Lz4Writer:
        return self

    def __exit__(self, failure: object, *_: object) -> None:
        try:
            if failure is None:
                self._worker.submit(self._file.write, self._stream.flush())
                self._worker.drain()
        finally:
            self._worker.close()

    def write(self, data: Any) -> int:
        """Append bytes. Waits while too many blocks are pending, and raises errors of `file`."""
        view = memoryview(data).cast("B")
        for start in range(0, len(view), BLOCK_BYTES):
            self._worker.submit(
                self._file.write, self._stream.compress(view[start : start + BLOCK_BYTES])
            )
        return len(view)

    def flush(self) -> None:
        """Do nothing, as only full blocks are written."""


def skippable_frame(content: bytes) -> bytes:
    """Return a frame that readers of LZ4 skip."""
    return SKIPPABLE_MAGIC + len(content).to_bytes(4, "little") + content


@dataclass(frozen=True)
class Frame:
    """Position of an LZ4 frame and of its blocks in a file.

    Attributes:
        start, stop: Byte range of the frame.
        is_skippable: Whether LZ4 readers skip the frame, which contains metadata instead of blocks.
        is_parallel: Whether the blocks decode independently and have no checksums of their own.
        max_block_bytes: Maximum number of decoded bytes of a block. A block before the last is
            smaller only if the writer flushed it.
        blocks: Byte range of each block, including the size before and the checksum after the
            block. In a skippable frame, the only range is that of the metadata.
    """

    start: int
    stop: int
    is_skippable: bool
    is_parallel: bool
    max_block_bytes: int
    blocks: tuple[tuple[int, int], ...]

    @property
    def most_bytes(self) -> int:
        """Maximum number of decoded bytes of the frame."""
        return min(
            len(self.blocks) * self.max_block_bytes, MAX_EXPANSION * (self.stop - self.start)
        )


def scan_frames(data: memoryview, name: str) -> list[Frame]:
    """Return the positions of the frames of a file and of their blocks, without decoding.

    Args:
        data: The whole file.
        name: Name of the file in errors.

    Raises:
        CorruptFileError: The file is truncated, or a size in it is impossible.
        ForeignFileError: The file is no LZ4 file, or needs a dictionary.
    """
    frames: list[Frame] = []
    reader = _Reader(data, name)
    while reader.position < len(data):
        start = reader.position
        magic = reader.read(4)
        if magic[1:] == SKIPPABLE_MAGIC[1:] and magic[0] & 0xF0 == 0x50:
            size = reader.read_integer(4)
            content_start = reader.position
            reader.skip(size)
            content = (content_start, reader.position)
            frames.append(Frame(start, reader.position, True, False, 0, (content,)))
        elif magic == MAGIC:
            frames.append(_scan_frame(reader, start))
        elif frames:
            raise reader.corrupt(
                f"the bytes {magic.hex()} at offset {start} do not start an LZ4 frame"
            )
        else:
            raise ForeignFileError(f"{name!r} is not an LZ4 file: it starts with {magic.hex()}.")
    return frames


def decode(data: memoryview, frames: list[Frame], name: str, num_threads: int = 1) -> Bytes:
    """Decode all frames of a file and return their bytes.

    Args:
        data: The whole file.
        frames: Frames of the file, from `scan_frames`.
        name: Name of the file in errors.
        num_threads: Number of threads. One thread compares all checksums. Several threads decode
            independent blocks in parallel and compare no checksums of frames, for callers that have
            checksums of their own.

    Returns:
        uint8 `[num_bytes]`, new memory.

    Raises:
        CorruptFileError: A checksum is wrong, or a block does not decode.
    """
    frames = [frame for frame in frames if not frame.is_skippable]
    # The size is an upper bound. Pages that are not written take no memory.
    out = np.empty(sum(frame.most_bytes for frame in frames), np.uint8)
    size = 0
    for frame in frames:
        if num_threads > 1 and frame.is_parallel:
            num_bytes = _decode_blocks(
                out[size : size + frame.most_bytes], data, frame, name, num_threads
            )
            if num_bytes is not None:
                size += num_bytes
                continue
        for part in _decode_stream(data, frame, name):
            out[size : size + len(part)] = np.frombuffer(part, np.uint8)
            size += len(part)
    return out[:size]


def decode_exactly(data: memoryview, num_bytes: int, name: str) -> Bytes:
    """Decode frames of exactly `num_bytes` bytes to new uint8 memory. Compares all checksums.

    Raises:
        CorruptFileError: The frames are damaged or hold another number of bytes.
        ForeignFileError: The data are no LZ4 frame.
    """
    frames = [frame for frame in scan_frames(data, name) if not frame.is_skippable]
    most = sum(frame.most_bytes for frame in frames)
    if num_bytes > most:
        raise CorruptFileError(f"{name!r} decodes to {most} bytes at most, expected {num_bytes}.")
    out = np.empty(num_bytes, np.uint8)
    size = 0
    for frame in frames:
        for part in _decode_stream(data, frame, name):
            if len(part) > num_bytes - size:
                raise CorruptFileError(f"{name!r} decodes to more than {num_bytes} bytes.")
            out[size : size + len(part)] = np.frombuffer(part, np.uint8)
            size += len(part)
    if size != num_bytes:
        raise CorruptFileError(f"{name!r} decodes to {size} bytes, expected {num_bytes}.")
    return out


class _Reader:
    """Reader of the bytes of a file, in order. Reads past the end raise `CorruptFileError`."""

    def __init__(self, data: memoryview, name: str) -> None:
        self.data = data
        self.name = name
        self.position = 0

    def read(self, num_bytes: int) -> bytes:
        start = self.position
        self.skip(num_bytes)
        return bytes(self.data[start : self.position])

    def read_integer(self, num_bytes: int) -> int:
        return int.from_bytes(self.read(num_bytes), "little")

    def skip(self, num_bytes: int) -> None:
        if num_bytes > len(self.data) - self.position:
            raise CorruptFileError(
                f"{self.name!r} is truncated: it has {len(self.data)} bytes, expected at least "
                f"{self.position + num_bytes}."
            )
        self.position += num_bytes

    def corrupt(self, problem: str) -> CorruptFileError:
        return CorruptFileError(f"{self.name!r} is damaged: {problem}.")


def _scan_frame(reader: _Reader, start: int) -> Frame:
    """Read the header and the block sizes of the frame that starts at offset `start`.

    The magic number of the frame was already read.
    """
    flags, block_code = reader.read(2)
    most = _MAX_BLOCK_BYTES.get(block_code >> 4)
    if flags >> 6 != 1 or flags & 2 or block_code & 0x8F or most is None:
        raise reader.corrupt(
            f"the bytes {flags:02x}{block_code:02x} at offset {start + 4} do not start the header "
            "of an LZ4 frame"
        )
    declared = reader.read_integer(8) if flags & 8 else 0
    if flags & 1:
        raise ForeignFileError(f"{reader.name!r} needs an LZ4 dictionary, which is not supported.")
    reader.skip(1)
    has_block_checksums = bool(flags & 16)
    blocks = []
    while True:
        first = reader.position
        size = reader.read_integer(4)
        if not size:
            break
        size &= 0x7FFFFFFF
        if size > most:
            raise reader.corrupt(
                f"the block at offset {first} has {size} bytes, expected at most {most}"
            )
        reader.skip(size + 4 * has_block_checksums)
        blocks.append((first, reader.position))
    reader.skip(4 * bool(flags & 4))
    if declared > MAX_EXPANSION * (reader.position - start):
        raise reader.corrupt(
            f"a frame of {reader.position - start} bytes declares {declared} decoded bytes"
        )
    is_parallel = bool(flags & 32) and not has_block_checksums
    return Frame(start, reader.position, False, is_parallel, most, tuple(blocks))


def _decode_stream(data: memoryview, frame: Frame, name: str) -> Iterator[bytes]:
    """Yield the decoded content of a frame in parts, comparing all checksums."""
    decoder = lz4.frame.LZ4FrameDecompressor()
    # The decoder copies input that it has not read yet, so it gets one block at a time.
    bounds = [frame.start, *(start for start, _ in frame.blocks)]
    bounds.append(frame.blocks[-1][1] if frame.blocks else frame.start)
    bounds.append(frame.stop)
    for start, stop in pairwise(bounds):
        part: Any = data[start:stop]
        while not decoder.eof:
            try:
                yield decoder.decompress(part, max_length=frame.max_block_bytes)
            except RuntimeError as cause:
                raise _undecodable(name, cause) from cause
            if decoder.needs_input:
                break
            part = b""
    if not decoder.eof:
        raise _undecodable(name, "an LZ4 frame has no end")


def _decode_blocks(
    out: Bytes, data: memoryview, frame: Frame, name: str, num_threads: int
) -> int | None:
    """Decode independent blocks in parallel.

    Returns:
        Number of decoded bytes. None if a block before the last is not full. `out` then has gaps,
        since each block is written to its position after full blocks.
    """

    def decode_block(number: int) -> int:
        first, stop = frame.blocks[number]
        size = int.from_bytes(data[first : first + 4], "little")
        part: Any = data[first + 4 : stop]
        if not size >> 31:
            try:
                part = lz4.block.decompress(part, uncompressed_size=frame.max_block_bytes)
            except lz4.block.LZ4BlockError as cause:
                raise _undecodable(name, cause, first) from cause
        start = number * frame.max_block_bytes
        if len(part) > len(out) - start:
            raise _undecodable(
                name, f"expected at most {len(out) - start} decoded bytes, got {len(part)}", first
            )
        out[start : start + len(part)] = np.frombuffer(part, np.uint8)
        return len(part)

    sizes = each(decode_block, range(len(frame.blocks)), num_threads)
    is_full = all(size == frame.max_block_bytes for size in sizes[:-1])
    return sum(sizes) if is_full else None


def _undecodable(name: str, cause: object, offset: int | None = None) -> CorruptFileError:
    block = "" if offset is None else f"LZ4 block at offset {offset}: "
    return CorruptFileError(f"{name!r} is damaged: {block}{cause}.")
