"""Read memory-mapped Arrow files, with the interface of `ParquetFile`.

pyarrow allocates the declared size of a compressed buffer. The sum of the declared sizes is
therefore checked before a batch is read. The sizes are in the description of the batch, a
FlatBuffer (Arrow's format, Message.fbs).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from storage.errors import CorruptFileError

from ..input_checks import ARROW_DAMAGE, KnownFiles, damage_named, optional

#: Maximum bytes of a decompressed batch. If a stored batch is larger, its own size is the limit.
_MAX_BATCH_BYTES = 1 << 28
#: Number of bytes before the first message of a file.
_MAGIC_BYTES = 8
_RECORD_BATCH = "record batch"
#: Key with which early versions of Arrow mark compressed batches, in the metadata of the message.
_EARLY_COMPRESSION = b"experimental_compression"
#: Field numbers in the FlatBuffer tables of Message.fbs: header of a message, buffers and
#: compression of a batch.
_HEADER = 2
_BUFFERS = 2
_COMPRESSION = 3
#: Number of bytes of the offset and length of a buffer.
_BUFFER_BYTES = 16


class ArrowFile:
    """An Arrow file that is opened for each read.

    Args:
        path: The file.
        known: States (inode, size, time) in which files were first opened. Reading a file with
            another state raises an error.

    Attributes:
        path: The file.
        num_rows: Number of rows.
        types: Maps column names to Arrow types, in the order of the file.

    Raises:
        CorruptFileError: The file is damaged, or has changed.
        UsageError: pyarrow is not installed.
    """

    def __init__(self, path: Path, known: KnownFiles) -> None:
        self.path = path
        self._known = known
        with self._opened() as (schema, batches):
            self.types: dict[str, Any] = dict(zip(schema.names, schema.types, strict=True))
            self.num_rows = sum(batch.num_rows for batch in batches)

    def batches(
        self,
        columns: Mapping[str, int | None],
        start: int,
        stop: int,
    ) -> Iterator[dict[str, Any]]:
        """Yield the rows `start:stop` of some columns, one batch of the file at a time.

        Yields:
            Arrow arrays of the next rows by column name, views of the memory map.
        """
        position = 0
        with self._opened() as (_, batches):
            for batch in batches:
                first = max(start - position, 0)
                last = min(stop - position, batch.num_rows)
                if first < last:
                    yield {name: batch.column(name).slice(first, last - first) for name in columns}
                position += batch.num_rows

    def _batches(self, ipc: Any, mapped: Any, schema: Any, num_batches: int) -> Iterator[Any]:
        """Yield the batches of the file after comparing their declared sizes with limits.

        The file is read as a stream of messages, because the sizes in a message can be checked
        before pyarrow decompresses its buffers.
        """
        mapped.seek(_MAGIC_BYTES)
        messages = iter(ipc.MessageReader.open_stream(mapped))
        next(messages, None)  # The first message is the schema.
        where = repr(str(self.path))
        for _ in range(num_batches):
            message = next(messages, None)
            if message is None or message.type != _RECORD_BATCH:
                got = "ends early" if message is None else f"contains a {message.type}"
                raise CorruptFileError(f"{where} {got}, expected {num_batches} batches of rows.")
            stated_bytes = _unpacked_bytes(message)
            if stated_bytes:
                most_bytes = max(_MAX_BATCH_BYTES, message.body.size)
                self._check_size(stated_bytes, most_bytes)
            else:
                most_bytes = self.path.stat().st_size
            batch = ipc.read_record_batch(message, schema)
            batch.validate()  # Checks that arrays lie within the file.
            self._check_size(batch.nbytes, most_bytes)
            yield batch

    def _check_size(self, num_bytes: int, most_bytes: int) -> None:
        if num_bytes > most_bytes:
            raise CorruptFileError(
                f"{str(self.path)!r} has a batch of {num_bytes} bytes, expected at most "
                f"{most_bytes}."
            )

    @contextmanager
    def _opened(self) -> Iterator[Any]:
        """Open the file; yield its schema and an iterator of its batches."""
        self._known.check(self.path)
        pyarrow = optional("pyarrow", "pyarrow", "formats", "Arrow files")
        ipc = optional("pyarrow.ipc", "pyarrow", "formats", "Arrow files")
        damage = (pyarrow.ArrowException, struct.error, *ARROW_DAMAGE)
        with (
            damage_named(repr(str(self.path)), *damage),
            pyarrow.memory_map(os.fspath(self.path)) as mapped,
            ipc.open_file(mapped) as file,
        ):
            yield file.schema, self._batches(ipc, mapped, file.schema, file.num_record_batches)


def _unpacked_bytes(message: Any) -> int:
    """Return the declared unpacked bytes of a batch; 0 without compression."""
    data = bytes(message.metadata)
    header = _field(data, _reference(data, 0), _HEADER)
    batch = _reference(data, header)
    buffers = _field(data, batch, _BUFFERS)
    is_compressed = _field(data, batch, _COMPRESSION) or _EARLY_COMPRESSION in data
    if not buffers or not is_compressed:
        return 0
    vector = _reference(data, buffers)
    first = vector + struct.calcsize("<I")
    num_bytes = _BUFFER_BYTES * _number("<I", data, vector)
    total = 0
    for offset, length in struct.iter_unpack("<qq", data[first : first + num_bytes]):
        if length:
            total += max(0, _number("<q", message.body, offset))
    return total


def _number(number_format: str, data: Any, offset: int) -> int:
    if offset < 0:
        raise ValueError("an offset is negative")
    number: int = struct.unpack_from(number_format, data, offset)[0]
    return number


def _reference(data: bytes, offset: int) -> int:
    """Return the offset to which the FlatBuffer reference at `offset` points."""
    return offset + _number("<I", data, offset)


def _field(data: bytes, table: int, number: int) -> int:
    """Return the offset of a field of a FlatBuffer table; 0 if the field is missing."""
    offsets = table - _number("<i", data, table)
    place = 4 + 2 * number
    if place >= _number("<H", data, offsets):
        return 0
    offset = _number("<H", data, offsets + place)
    return table + offset if offset else 0
