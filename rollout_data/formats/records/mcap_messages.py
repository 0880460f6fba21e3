"""Scanner of MCAP files: offsets of the messages of each topic, found in one pass over the file.

A file is a sequence of records: a u8 opcode, a u64 length, and the content. A chunk is a record
with compressed records. Chunks are decompressed to at most their declared size and compared with
their checksum. The complete messages of a truncated file are read.

The package `mcap` does not limit the decompressed size: with it, a crafted file took over 60 s.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from storage.core.durable_files import crc32
from storage.errors import CorruptFileError

from ..format_detection import MCAP_MAGIC
from ..input_checks import KnownFiles, damage_named, optional

# Opcodes: the kinds of MCAP records.
_SCHEMA = 3
_CHANNEL = 4
_MESSAGE = 5
_CHUNK = 6
_METADATA = 12
_DATA_END = 15
_MAX_CHUNK_BYTES = 1 << 28
_MAX_MESSAGES = 1 << 23
#: Maximum number of metadata records kept in memory.
_MAX_METADATA = 4096
_MAX_TEXT_BYTES = 1 << 20
_MAX_TOPICS = 4096
#: Maximum number of bytes of a JSON message. 3 bytes of JSON can need 64 bytes in memory.
_MAX_MESSAGE_BYTES = 1 << 24
#: Maximum average number of decompressed bytes per byte of a file.
_MAX_EXPANSION = 256
#: Number of decompressed bytes that is allowed even for a small file.
_FREE_BYTES = 1 << 26
#: Bytes of the header of a message record.
_MESSAGE_HEAD_BYTES = 22
_DAMAGE = (struct.error, ValueError, LookupError, RuntimeError, EOFError, OSError)


class McapChunk(NamedTuple):
    """A compressed chunk of messages in a file.

    Attributes:
        start, stop: Offsets of the compressed bytes in the file.
        compression: "", "lz4" or "zstd".
        num_bytes: Number of decompressed bytes.
        checksum: CRC-32 of the decompressed bytes; 0 without a checksum.
    """

    start: int
    stop: int
    compression: str
    num_bytes: int
    checksum: int


@dataclass
class Topic:
    """A topic: messages that share a name and an encoding.

    Attributes:
        name, encoding: Name of the topic and encoding of its messages, from the channel record.
        schema: Text of the schema.
        times: Ascending log times in ns, `[n]` int64.
        places: `[n, 3]` int64: number of the chunk, start and stop of each message. The number is
            -1 for a message outside of chunks, whose offsets are positions in the file.
    """

    name: str
    encoding: str
    schema: bytes
    times: np.ndarray[Any, Any] = field(default_factory=lambda: np.empty(0, np.int64))
    places: np.ndarray[Any, Any] = field(default_factory=lambda: np.empty((0, 3), np.int64))


class Log:
    """The topics and the metadata of an MCAP file.

    Attributes:
        path: Path of the file.
        topics: Maps topic names to topics.
        metadata: Metadata records as pairs of a name and a dict.
        num_left_out: Number of omitted metadata records.
        is_whole: Whether the file is not truncated.

    Raises:
        CorruptFileError: A chunk or record is damaged, or declares a size above the limits.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.topics = dict[str, Topic]()
        self.metadata = list[tuple[str, dict[str, str]]]()
        self._chunks: list[McapChunk] = []
        self._num_text_bytes_left = _MAX_TEXT_BYTES
        self.num_left_out = 0
        self._latest: tuple[int, Any] = (-1, b"")
        self._known = KnownFiles()
        self._schemas: dict[int, bytes] = {}
        self._channels: dict[int, str] = {}
        #: Maps topic names to flat arrays with the time, chunk, start and stop of each message.
        self._found: dict[str, array[int]] = {}
        data = self._known.map(path)
        with damage_named(repr(str(path)), *_DAMAGE):
            self.is_whole = self._scan(data)
        self._latest = (-1, b"")
        for name, values in self._found.items():
            rows = np.frombuffer(values, np.int64).reshape(-1, 4)
            rows = rows[np.argsort(rows[:, 0], kind="stable")]
            self.topics[name].times = rows[:, 0].copy()
            self.topics[name].places = rows[:, 1:].copy()
        del self._found

    def _scan(self, data: memoryview) -> bool:
        """Read all records; return whether the file is complete.

        Raises:
            ValueError: The file is damaged, or declares a size above the limits.
        """
        if bytes(data[: len(MCAP_MAGIC)]) != MCAP_MAGIC:
            raise ValueError("the file does not start like an MCAP file")
        num_unpacked = 0
        for kind, start, stop in _records(data, len(MCAP_MAGIC)):
            if kind == _DATA_END:
                is_longer = len(data) > len(MCAP_MAGIC)
                return is_longer and bytes(data[-len(MCAP_MAGIC) :]) == MCAP_MAGIC
            if kind != _CHUNK:
                self._add_record(data, kind, start, stop, -1)
                continue

            number = len(self._chunks)
            self._chunks.append(_chunk(data, start, stop))
            num_unpacked += self._chunks[-1].num_bytes
            if num_unpacked > max(_FREE_BYTES, len(data) * _MAX_EXPANSION):
                raise ValueError(f"the chunks declare at least {num_unpacked} bytes")
            unpacked = self._unpacked(number, data)
            for inner_kind, inner_start, inner_stop in _records(unpacked, 0):
                if inner_kind not in (_SCHEMA, _CHANNEL, _MESSAGE):
                    raise ValueError(f"chunk {number} contains a record of type {inner_kind}")
                self._add_record(unpacked, inner_kind, inner_start, inner_stop, number)
        return False

    def messages(self, topic: Topic, rows: Any) -> Iterator[bytes]:
        """Yield the content of some messages of a topic; `rows` are the numbers of the messages.

        Raises:
            ValueError: A message is larger than `_MAX_MESSAGE_BYTES`.
        """
        data = self._known.map(self.path)
        for number, start, stop in topic.places[rows].tolist():
            if stop - start > _MAX_MESSAGE_BYTES:
                raise ValueError(f"a message has {stop - start} bytes, more than the limit")
            yield bytes((data if number < 0 else self._unpacked(number, data))[start:stop])

    def _add_record(self, data: memoryview, kind: int, start: int, stop: int, chunk: int) -> None:
        """Add a record to the topics or the metadata. Records of other kinds are ignored."""
        if kind == _MESSAGE:
            channel, _, time = struct.unpack_from("<HIQ", data[start:stop])
            values = self._found[self._channels[channel]]
            if time >> 63:
                raise ValueError(f"a message has the invalid log time {time} ns")
            if len(values) > 4 * _MAX_MESSAGES:
                raise ValueError(f"a topic has more than {_MAX_MESSAGES} messages")
            first = start + _MESSAGE_HEAD_BYTES
            values.extend((time, chunk, first, max(stop, first)))
        elif kind == _SCHEMA:
            (number,) = struct.unpack_from("<H", data[start:stop])
            _, position = _text(data, start + 2, stop)
            _, position = _text(data, position, stop)
            self._schemas[number] = bytes(data[position + 4 : stop])[:_MAX_TEXT_BYTES]
        elif kind == _CHANNEL:
            self._add_channel(data, start, stop)
        elif kind == _METADATA:
            if len(self.metadata) == _MAX_METADATA or stop - start > self._num_text_bytes_left:
                self.num_left_out += 1
                return
            name, position = _text(data, start, stop)
            position += 4
            texts = []
            while position < stop:
                text, position = _text(data, position, stop)
                texts.append(text)
            self.metadata.append((name, dict(zip(texts[::2], texts[1::2], strict=True))))
            self._num_text_bytes_left -= stop - start

    def _add_channel(self, data: memoryview, start: int, stop: int) -> None:
        number, schema = struct.unpack_from("<HH", data[start:stop])
        name, position = _text(data, start + 4, stop)
        encoding, _ = _text(data, position, stop)
        topic = self.topics.setdefault(name, Topic(name, encoding, self._schemas.get(schema, b"")))
        if topic.encoding != encoding:
            raise ValueError(f"topic {name!r} has several encodings")
        if len(self.topics) > _MAX_TOPICS:
            raise ValueError(f"there are more than {_MAX_TOPICS} topics")
        self._channels[number] = name
        self._found.setdefault(name, array("q"))

    def _unpacked(self, number: int, data: memoryview) -> memoryview:
        """Return the decompressed bytes of a chunk. The latest chunk is cached.

        Raises:
            CorruptFileError: The size or the checksum is wrong.
        """
        if self._latest[0] != number:
            chunk = self._chunks[number]
            unpacked = _unpack(data[chunk.start : chunk.stop], chunk)
            is_valid = not chunk.checksum or crc32(unpacked) == chunk.checksum
            if len(unpacked) != chunk.num_bytes or not is_valid:
                raise CorruptFileError(
                    f"Chunk {number} of {str(self.path)!r} is damaged: its size or checksum is "
                    "wrong."
                )
            self._latest = (number, bytes(unpacked))
        return memoryview(self._latest[1])


def _records(data: memoryview, position: int) -> Iterator[tuple[int, int, int]]:
    """Yield (opcode, start, stop) of each complete record after a position."""
    while position + 9 <= len(data):
        kind = data[position]
        num_bytes = int.from_bytes(data[position + 1 : position + 9], "little")
        start = position + 9
        if num_bytes > len(data) - start:
            return
        yield kind, start, start + num_bytes
        position = start + num_bytes


def _text(data: memoryview, position: int, stop: int) -> tuple[str, int]:
    """Read a text after its u32 length; return the text and the position after it."""
    num_bytes = int.from_bytes(data[position : position + 4], "little")
    start = position + 4
    if start + num_bytes > stop:
        raise ValueError(f"a text of {num_bytes} bytes exceeds its record")
    return bytes(data[start : start + num_bytes]).decode(), start + num_bytes


def _chunk(data: memoryview, start: int, stop: int) -> McapChunk:
    """Parse the header of a chunk record."""
    _, _, num_bytes, checksum = struct.unpack_from("<QQQI", data[start:stop])
    compression, position = _text(data, start + 28, stop)
    num_stored_bytes = int.from_bytes(data[position : position + 8], "little")
    first = position + 8
    if first + num_stored_bytes > stop or num_bytes > _MAX_CHUNK_BYTES:
        raise ValueError(f"a chunk declares {num_bytes} bytes")
    return McapChunk(first, first + num_stored_bytes, compression, num_bytes, checksum)


def _unpack(data: memoryview, chunk: McapChunk) -> Any:
    """Decompress a chunk, up to one byte more than its declared size.

    The additional byte shows that a chunk is larger than declared, without decompressing all of it.
    """
    if not chunk.compression:
        return data
    if chunk.compression == "lz4":
        frame = optional("lz4.frame", "lz4", "mcap", "chunks of LZ4")
        return frame.LZ4FrameDecompressor().decompress(bytes(data), chunk.num_bytes + 1)
    if chunk.compression == "zstd":
        zstandard = optional("zstandard", "zstandard", "mcap", "chunks of Zstandard")
        with damage_named("A chunk", zstandard.ZstdError):
            decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_CHUNK_BYTES)
            reader = decompressor.stream_reader(bytes(data))
            return reader.read(chunk.num_bytes + 1)
    raise ValueError(f"compression {chunk.compression[:40]!r} is unknown")
