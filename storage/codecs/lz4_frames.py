"""LZ4 frames: compress a stream while it is written, decode it whole or block by block.

One rule: what stands in a frame is believed only as far as the file is long. All sizes are checked
against the file before anything is decoded, and nothing is allocated for a size that is only declared.
The frames are standard ones (LZ4 frame format 1.6) of independent 4 MiB blocks with a checksum of the
content, so that any tool reads them and blocks decode in parallel.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, BinaryIO

import lz4.block
import lz4.frame
import numpy as np
import numpy.typing as npt

from ..errors import CorruptFileError, ForeignFileError, UsageError

MAGIC = b"\x04\x22\x4d\x18"
#: A frame of this number is skipped by readers of LZ4; ours hold what the writer had to say besides.
SKIPPABLE_MAGIC = b"\x50\x2a\x4d\x18"
MIN_LEVEL, MAX_LEVEL = -65537, lz4.frame.COMPRESSIONLEVEL_MAX
#: LZ4 needs at least one byte for so many bytes of output.
_MAX_RATIO = 255
_MAX_BLOCK_BYTES = {4: 1 << 16, 5: 1 << 18, 6: 1 << 20, 7: 4 << 20}
#: Of what is written, and how many blocks may wait to be.
BLOCK_BYTES, _MAX_WAITING = 4 << 20, 4


def check_level(level: int) -> int:
    """Give back a level that LZ4 knows: below 0 faster, 0 fast, 3 to 12 smaller and much slower."""
    if isinstance(level, bool) or not isinstance(level, int) or not MIN_LEVEL <= level <= MAX_LEVEL:
        raise UsageError("compress", "", f"a level from {MIN_LEVEL} to {MAX_LEVEL}", repr(level))
    return level


class Lz4Writer:
    """A file to write to that passes one LZ4 frame on to `file`, in a thread: the caller compresses meanwhile.

    Args:
        file: Gets the frame; closed by whoever opened it.
        level: See `check_level`.

    Leaving the `with` block without an error completes the frame. What was written may be changed
    as soon as `write` has returned. Memory: 6 blocks of 4 MiB.
    """

    def __init__(self, file: BinaryIO, level: int = 0) -> None:
        self._file = file
        self._stream = lz4.frame.LZ4FrameCompressor(
            block_size=lz4.frame.BLOCKSIZE_MAX4MB,
            block_linked=False,
            content_checksum=True,
            compression_level=check_level(level),
        )
        self._pool, self._waiting = ThreadPoolExecutor(1, "lz4"), deque[Future[int]]()
        self._pass_on(self._stream.begin())

    def __enter__(self) -> Lz4Writer:
        return self

    def __exit__(self, failure: object, *_: object) -> None:
        with self._pool:
            if failure is None:
                self._pass_on(self._stream.flush())
                self._wait(0)

    def write(self, data: Any) -> int:
        """Append bytes; blocks while `file` cannot keep up; raises what writing to it raised."""
        new = memoryview(data).cast("B")
        for start in range(0, len(new), BLOCK_BYTES):
            self._pass_on(self._stream.compress(new[start : start + BLOCK_BYTES]))
        return len(new)

    def flush(self) -> None:
        """Do nothing: blocks are passed on as they are full."""

    def _pass_on(self, coded: bytes) -> None:
        self._wait(_MAX_WAITING - 1)
        try:
            self._waiting.append(self._pool.submit(self._file.write, coded))
        except RuntimeError:  # while the interpreter exits no thread takes work any more
            self._wait(0)
            self._file.write(coded)

    def _wait(self, most: int) -> None:
        """Wait until at most so many writes have not ended."""
        while len(self._waiting) > most:
            self._waiting.popleft().result()


def skippable_frame(content: bytes) -> bytes:
    """Make a frame that readers of LZ4 skip."""
    return SKIPPABLE_MAGIC + len(content).to_bytes(4, "little") + content


@dataclass(frozen=True)
class Frame:
    """Where a frame stands in a file, and its blocks.

    Attributes:
        start, stop: Its bytes.
        is_skippable: It holds no data; `blocks` is its content.
        is_independent: Its blocks decode alone.
        has_block_checksums: Each block is followed by its checksum.
        max_block_bytes: Bytes that a block decodes to at most; all but the last may be smaller only
            where the writer flushed.
        blocks: (start, stop) of each block with its size before it and its checksum behind it.
    """

    start: int
    stop: int
    is_skippable: bool
    is_independent: bool
    has_block_checksums: bool
    max_block_bytes: int
    blocks: tuple[tuple[int, int], ...]

    @property
    def most_bytes(self) -> int:
        """Bytes that the frame decodes to at most."""
        return min(len(self.blocks) * self.max_block_bytes, _MAX_RATIO * (self.stop - self.start))


def scan_frames(data: memoryview, name: str) -> list[Frame]:
    """Find the frames of a file, and the blocks of each, decoding nothing.

    Args:
        data: The whole file.
        name: Names it in errors.

    Raises:
        CorruptFileError: The file ends early, or a size in it cannot be.
        ForeignFileError: It is no LZ4 file, or needs a dictionary.
    """
    frames: list[Frame] = []
    place = _Place(data, name)
    while place.at < len(data):
        start = place.at
        magic = place.take(4)
        if magic[1:] == SKIPPABLE_MAGIC[1:] and magic[0] & 0xF0 == 0x50:
            size = place.number(4)
            place.skip(size)
            frames.append(Frame(start, place.at, True, False, False, 0, ((place.at - size, place.at),)))
        elif magic == MAGIC:
            frames.append(_scan_frame(place, start))
        elif frames:
            raise place.corrupt("the end of the file or another LZ4 frame", f"the bytes {magic.hex()} at {start}")
        else:
            raise ForeignFileError("read", repr(name), "an LZ4 frame", f"the bytes {magic.hex()}")
    return frames


def decode(data: memoryview, frames: list[Frame], name: str, num_threads: int = 1) -> npt.NDArray[np.uint8]:
    """Decode all frames into memory.

    Args:
        data: The whole file.
        frames: What `scan_frames` found in it.
        name: Names the file in errors.
        num_threads: With 1 all checksums are compared; with more, full independent blocks decode in
            parallel, and none is: for callers with checksums of their own.

    Returns:
        `[num_bytes]`, new.

    Raises:
        CorruptFileError: A checksum is wrong, or a block does not decode.
    """
    frames = [frame for frame in frames if not frame.is_skippable]
    # An upper bound, of which only what is written to becomes memory.
    out, size = np.empty(sum(frame.most_bytes for frame in frames), np.uint8), 0
    for frame in frames:
        if num_threads > 1 and frame.is_independent and not frame.has_block_checksums:
            found = _decode_blocks(out[size : size + frame.most_bytes], data, frame, name, num_threads)
            if found is not None:
                size += found
                continue
        for part in _decode_stream(data, frame, name):
            out[size : size + len(part)] = np.frombuffer(part, np.uint8)
            size += len(part)
    return out[:size]


class _Place:
    """A position in a file that cannot leave it."""

    def __init__(self, data: memoryview, name: str) -> None:
        self.data, self.name, self.at = data, name, 0

    def take(self, num_bytes: int) -> bytes:
        start = self.at
        self.skip(num_bytes)
        return bytes(self.data[start : self.at])

    def number(self, num_bytes: int) -> int:
        return int.from_bytes(self.take(num_bytes), "little")

    def skip(self, num_bytes: int) -> None:
        if num_bytes > len(self.data) - self.at:
            raise self.corrupt(f"{num_bytes} more bytes at {self.at}", f"a file of {len(self.data)} bytes")
        self.at += num_bytes

    def corrupt(self, expected: str, got: str) -> CorruptFileError:
        return CorruptFileError("read", repr(self.name), expected, got, "The file is damaged or was cut off")


def _scan_frame(place: _Place, start: int) -> Frame:
    flags, block_code = place.take(2)
    most = _MAX_BLOCK_BYTES.get(block_code >> 4)
    if flags >> 6 != 1 or flags & 2 or block_code & 0x8F or most is None:
        raise place.corrupt("the header of an LZ4 frame", f"the bytes {flags:02x}{block_code:02x} at {start + 4}")
    declared = place.number(8) if flags & 8 else 0
    if flags & 1:
        raise ForeignFileError("read", repr(place.name), "an LZ4 frame without a dictionary", "one that needs it")
    place.skip(1)
    has_block_checksums, blocks = bool(flags & 16), []
    while True:
        first = place.at
        size = place.number(4)
        if not size:
            break
        size &= 0x7FFFFFFF
        if size > most:
            raise place.corrupt(f"a block of at most {most} bytes at {first}", str(size))
        place.skip(size + 4 * has_block_checksums)
        blocks.append((first, place.at))
    place.skip(4 * bool(flags & 4))
    if declared > _MAX_RATIO * (place.at - start):
        raise place.corrupt(f"data that {place.at - start} bytes can hold", f"a declared size of {declared} bytes")
    return Frame(start, place.at, False, bool(flags & 32), has_block_checksums, most, tuple(blocks))


def _decode_stream(data: memoryview, frame: Frame, name: str) -> Iterator[bytes]:
    decoder = lz4.frame.LZ4FrameDecompressor()
    starts = [frame.start, *(start for start, _ in frame.blocks), frame.blocks[-1][1] if frame.blocks else frame.start]
    for start, stop in zip(starts, [*starts[1:], frame.stop], strict=True):
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
        raise _undecodable(name, "it goes on behind its end")


def _decode_blocks(
    out: npt.NDArray[np.uint8], data: memoryview, frame: Frame, name: str, num_threads: int
) -> int | None:
    """Decode independent blocks in a pool; give the bytes of all, or None if some block but the last is not full."""

    def decode_one(place: int) -> int:
        first, stop = frame.blocks[place]
        size = int.from_bytes(data[first : first + 4], "little")
        part: Any = data[first + 4 : stop]
        if not size >> 31:
            try:
                part = lz4.block.decompress(part, uncompressed_size=frame.max_block_bytes)
            except lz4.block.LZ4BlockError as cause:
                raise _undecodable(name, cause, f"block at {first}") from cause
        start = place * frame.max_block_bytes
        if len(part) > len(out) - start:
            raise _undecodable(name, f"{len(part)} bytes", f"block at {first}")
        out[start : start + len(part)] = np.frombuffer(part, np.uint8)
        return len(part)

    with ThreadPoolExecutor(num_threads, "lz4") as pool:
        sizes = list(pool.map(decode_one, range(len(frame.blocks))))
    is_full = all(size == frame.max_block_bytes for size in sizes[:-1])
    return sum(sizes) if is_full else None


def _undecodable(name: str, cause: object, where: str = "") -> CorruptFileError:
    place = f"{name!r}, {where}" if where else repr(name)
    return CorruptFileError("decode", place, "an intact LZ4 frame", str(cause), "The file is damaged")
