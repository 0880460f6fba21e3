"""MCAP files: where the messages of each topic lie; read in one pass that needs neither summary nor index.

One rule: a file that breaks off gives what is whole; a chunk is unpacked into the size that it declares, and compared
with its checksum. A record is u8 kind, u64 length, the bytes.
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
from .tfrecord import open_map

_SCHEMA = 3
_CHANNEL = 4
_MESSAGE = 5
_CHUNK = 6
_METADATA = 12
_DATA_END = 15
_MAX_CHUNK_BYTES = 1 << 28
_MAX_MESSAGES = 1 << 23
_MAX_METADATA = 4096
_MAX_TEXT_BYTES = 1 << 20
_MAX_TOPICS = 4096
#: Texts of 3 bytes make lists of 64 in memory.
_MAX_MESSAGE_BYTES = 1 << 24
#: Bytes that a byte of a file unpacks to, on the average, at most; a small file may unpack to more.
_MAX_EXPANSION, _FREE_BYTES = 256, 1 << 26
_DAMAGE = (struct.error, ValueError, LookupError, RuntimeError, EOFError, OSError)


class Chunk(NamedTuple):
    """Where the packed messages of a chunk lie, and what comes out."""

    start: int
    stop: int
    compression: str
    num_bytes: int
    checksum: int


@dataclass
class Topic:
    """Messages of one name and encoding.

    Attributes:
        name, encoding, schema: As the channel tells; the schema is its text.
        times: `[n]` int64 log times, ns, ascending.
        places: `[n, 3]` int64: number of the chunk, -1 for none, and start and stop in it.
    """

    name: str
    encoding: str
    schema: bytes
    times: np.ndarray[Any, Any] = field(default_factory=lambda: np.empty(0, np.int64))
    places: np.ndarray[Any, Any] = field(default_factory=lambda: np.empty((0, 3), np.int64))


class Log:
    """The topics of a file.

    Attributes:
        path: The file.
        topics: By name.
        metadata: Records of texts: (name, key -> value).
        num_left_out: How many more of them there are.
        is_whole: Whether the file ends as it should.

    Raises:
        CorruptFileError: A chunk or record is damaged, or declares too much.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.topics = dict[str, Topic]()
        self.metadata = list[tuple[str, dict[str, str]]]()
        self._chunks: list[Chunk] = []
        self._num_text_bytes_left = _MAX_TEXT_BYTES
        self.num_left_out = 0
        self._latest: tuple[int, Any] = (-1, b"")
        self._known = KnownFiles()
        self._schemas: dict[int, bytes] = {}
        self._channels: dict[int, str] = {}
        found: dict[str, array[int]] = {}
        data = open_map(path, self._known)
        unpacked = 0
        self.is_whole = bytes(data[-len(MCAP_MAGIC) :]) == MCAP_MAGIC and len(data) > len(MCAP_MAGIC)
        with damage_named("read", repr(str(path)), "records of MCAP", *_DAMAGE):
            if bytes(data[: len(MCAP_MAGIC)]) != MCAP_MAGIC:
                raise ValueError("another beginning")
            for kind, start, stop in _records(data, len(MCAP_MAGIC)):
                if kind == _DATA_END:
                    break
                if kind == _CHUNK:
                    self._chunks.append(_chunk(data, start, stop))
                    unpacked += self._chunks[-1].num_bytes
                    if unpacked > max(_FREE_BYTES, len(data) * _MAX_EXPANSION):
                        raise ValueError(f"more than {unpacked} bytes unpacked")
                    inner = self._unpacked(len(self._chunks) - 1, data)
                    for one in _records(inner, 0):
                        if one[0] not in (_SCHEMA, _CHANNEL, _MESSAGE):
                            raise ValueError(f"a record of kind {one[0]} in a chunk")
                        self._take(inner, *one, len(self._chunks) - 1, found)
                else:
                    self._take(data, kind, start, stop, -1, found)
            else:
                self.is_whole = False
        self._latest = (-1, b"")
        for name, items in found.items():
            rows = np.frombuffer(items, np.int64).reshape(-1, 4)
            rows = rows[np.argsort(rows[:, 0], kind="stable")]
            self.topics[name].times = rows[:, 0].copy()
            self.topics[name].places = rows[:, 1:].copy()

    def messages(self, topic: Topic, rows: Any) -> Iterator[bytes]:
        """Yield the messages of a topic, by their numbers.

        Raises:
            ValueError: One is too large.
        """
        data = open_map(self.path, self._known)
        for number, start, stop in topic.places[rows].tolist():
            if stop - start > _MAX_MESSAGE_BYTES:
                raise ValueError(f"a message of {stop - start} bytes")
            yield bytes((data if number < 0 else self._unpacked(number, data))[start:stop])

    def _take(
        self, data: memoryview, kind: int, start: int, stop: int, chunk: int, found: dict[str, array[int]]
    ) -> None:
        if kind == _MESSAGE:
            channel, _, time = struct.unpack_from("<HIQ", data[start:stop])
            items = found[self._channels[channel]]
            if time >> 63 or len(items) > 4 * _MAX_MESSAGES:
                raise ValueError(f"at most {_MAX_MESSAGES} messages of a topic")
            items.extend((time, chunk, start + 22, max(stop, start + 22)))
        elif kind == _SCHEMA:
            (number,) = struct.unpack_from("<H", data[start:stop])
            _, at = _text(data, start + 2, stop)
            _, at = _text(data, at, stop)
            self._schemas[number] = bytes(data[at + 4 : stop])[:_MAX_TEXT_BYTES]
        elif kind == _CHANNEL:
            number, schema = struct.unpack_from("<HH", data[start:stop])
            name, at = _text(data, start + 4, stop)
            encoding, _ = _text(data, at, stop)
            if self.topics.setdefault(name, Topic(name, encoding, self._schemas.get(schema, b""))).encoding != encoding:
                raise ValueError(f"one encoding of {name!r}")
            if len(self.topics) > _MAX_TOPICS:
                raise ValueError(f"more than {_MAX_TOPICS} topics")
            self._channels[number] = name
            found.setdefault(name, array("q"))
        elif kind == _METADATA and (len(self.metadata) == _MAX_METADATA or stop - start > self._num_text_bytes_left):
            self.num_left_out += 1
        elif kind == _METADATA:
            name, at = _text(data, start, stop)
            texts = []
            at = at + 4
            while at < stop:
                one, at = _text(data, at, stop)
                texts.append(one)
            self.metadata.append((name, dict(zip(texts[::2], texts[1::2], strict=True))))
            self._num_text_bytes_left -= stop - start

    def _unpacked(self, number: int, data: memoryview) -> memoryview:
        """Unpack a chunk; the latest is kept."""
        if self._latest[0] != number:
            chunk = self._chunks[number]
            unpacked = _unpack(data[chunk.start : chunk.stop], chunk)
            if len(unpacked) != chunk.num_bytes or (chunk.checksum and crc32(unpacked) != chunk.checksum):
                where = f"chunk {number} of {str(self.path)!r}"
                raise CorruptFileError("read", where, f"{chunk.num_bytes} bytes of their checksum", "others")
            self._latest = number, bytes(unpacked)
        return memoryview(self._latest[1])


def _records(data: memoryview, at: int) -> Iterator[tuple[int, int, int]]:
    """Yield kind, start and stop of the records that are whole."""
    while at + 9 <= len(data):
        kind = data[at]
        size = int.from_bytes(data[at + 1 : at + 9], "little")
        if size > len(data) - at - 9:
            return
        yield kind, at + 9, at + 9 + size
        at += 9 + size


def _text(data: memoryview, at: int, stop: int) -> tuple[str, int]:
    size = int.from_bytes(data[at : at + 4], "little")
    if at + 4 + size > stop:
        raise ValueError(f"a text of {size} bytes")
    return bytes(data[at + 4 : at + 4 + size]).decode(), at + 4 + size


def _chunk(data: memoryview, start: int, stop: int) -> Chunk:
    _, _, num_bytes, checksum = struct.unpack_from("<QQQI", data[start:stop])
    compression, at = _text(data, start + 28, stop)
    size = int.from_bytes(data[at : at + 8], "little")
    if at + 8 + size > stop or num_bytes > _MAX_CHUNK_BYTES:
        raise ValueError(f"a chunk of {num_bytes} bytes")
    return Chunk(at + 8, at + 8 + size, compression, num_bytes, checksum)


def _unpack(data: memoryview, chunk: Chunk) -> Any:
    if not chunk.compression:
        return data
    if chunk.compression == "lz4":
        frame = optional("lz4.frame", "lz4", "mcap", "chunks of LZ4")
        return frame.LZ4FrameDecompressor().decompress(bytes(data), chunk.num_bytes + 1)
    if chunk.compression == "zstd":
        zstandard = optional("zstandard", "zstandard", "mcap", "chunks of Zstandard")
        with damage_named("unpack", "a chunk", "Zstandard", zstandard.ZstdError):
            reader = zstandard.ZstdDecompressor(max_window_size=_MAX_CHUNK_BYTES).stream_reader(bytes(data))
            return reader.read(chunk.num_bytes + 1)
    raise ValueError(f"the compression {chunk.compression[:40]!r}")
