"""Arrow files, mapped: ranges of rows, by the interface of `ParquetFile`.

One rule: pyarrow takes as much memory as a compressed buffer claims to unpack to, so that claims are summed up first.
They are where the description of a batch, a FlatBuffer, says (Arrow's format, Message.fbs).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from storage.errors import CorruptFileError

from ..input_checks import KnownFiles, damage_named, optional

#: What a batch of rows may unpack to.
_MAX_BATCH_BYTES = 1 << 28
#: Before the first message of a file.
_MAGIC_BYTES = 8
_RECORD_BATCH = "record batch"
_EARLY_COMPRESSION = b"experimental_compression"


class ArrowFile:
    """One Arrow file; opened for each read.

    Args:
        path: The file.
        known: States of files that were read before; the file must have kept its own.

    Attributes:
        path: The file.
        num_rows: Rows in it.
        types: Column -> its arrow type, in order.

    Raises:
        CorruptFileError: It is damaged, or has changed.
        UsageError: pyarrow is missing.
    """

    def __init__(self, path: Path, known: KnownFiles) -> None:
        self.path = path
        self._known = known
        with self._opened() as (schema, batches):
            self.types: dict[str, Any] = dict(zip(schema.names, schema.types, strict=True))
            self.num_rows = sum(batch.num_rows for batch in batches)

    def batches(self, columns: Mapping[str, int | None], start: int, stop: int) -> Iterator[dict[str, Any]]:
        """Yield rows `start:stop` of some columns, as they lie in the file: column -> an arrow array."""
        position = 0
        with self._opened() as (_, batches):
            for batch in batches:
                first = max(start - position, 0)
                last = min(stop - position, batch.num_rows)
                if first < last:
                    yield {name: batch.column(name).slice(first, last - first) for name in columns}
                position += batch.num_rows

    def _batches(self, ipc: Any, mapped: Any, schema: Any, count: int) -> Iterator[Any]:
        """Read the batches of the file as a stream, whose messages are given before anything in them is unpacked."""
        mapped.seek(_MAGIC_BYTES)
        messages = iter(ipc.MessageReader.open_stream(mapped))
        next(messages, None)  # the schema
        for _ in range(count):
            message = next(messages, None)
            if message is None or message.type != _RECORD_BATCH:
                got = "fewer" if message is None else f"a {message.type}"
                raise CorruptFileError("read", repr(str(self.path)), f"{count} batches of rows", got)
            claimed = _claimed_bytes(message)
            most = max(_MAX_BATCH_BYTES, message.body.size) if claimed else self.path.stat().st_size
            if claimed <= most:
                batch = ipc.read_record_batch(message, schema)
                batch.validate()  # its arrays lie within the file
                claimed = batch.nbytes
            if claimed > most:
                raise CorruptFileError("read", repr(str(self.path)), f"a batch of at most {most} bytes", str(claimed))
            yield batch

    @contextmanager
    def _opened(self) -> Iterator[Any]:
        self._known.check(self.path)
        pyarrow, ipc = (optional(name, "pyarrow", "formats", "Arrow files") for name in ("pyarrow", "pyarrow.ipc"))
        damage = (
            pyarrow.ArrowException,
            OSError,
            ValueError,
            LookupError,
            TypeError,
            NotImplementedError,
            struct.error,
        )
        with (
            damage_named("read", repr(str(self.path)), "an intact Arrow file", *damage),
            pyarrow.memory_map(os.fspath(self.path)) as mapped,
            ipc.open_file(mapped) as file,
        ):
            yield file.schema, self._batches(ipc, mapped, file.schema, file.num_record_batches)


def _claimed_bytes(message: Any) -> int:
    """Return what the compressed buffers of a batch claim to unpack to; 0 where none is compressed."""
    data = bytes(message.metadata)
    body = message.body
    batch = _reference(data, _field(data, _reference(data, 0), 2))
    buffers = _field(data, batch, 2)
    if not buffers or not (_field(data, batch, 3) or _EARLY_COMPRESSION in data):
        return 0
    start = _reference(data, buffers)
    places = struct.iter_unpack("<qq", data[start + 4 : start + 4 + 16 * _number("<I", data, start)])
    return sum(max(0, _number("<q", body, place)) for place, length in places if length)


def _number(kind: str, data: Any, place: int) -> int:
    if place < 0:
        raise ValueError("a place before the data")
    found: int = struct.unpack_from(kind, data, place)[0]
    return found


def _reference(data: bytes, place: int) -> int:
    """Follow an offset."""
    return place + _number("<I", data, place)


def _field(data: bytes, table: int, number: int) -> int:
    """Return where a field of a table is; 0 if it is absent."""
    offsets = table - _number("<i", data, table)
    at = 4 + 2 * number
    offset = _number("<H", data, offsets + at) if at < _number("<H", data, offsets) else 0
    return table + offset if offset else 0
