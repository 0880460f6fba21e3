"""Writing and publishing of block files.

A block is written to a temporary file, which is flushed and then renamed. Readers therefore never
find an incomplete block. A block never changes afterwards. `FORMAT.md` is the specification;
`block_header.py` reads blocks.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import h5py
import numpy as np
import torch

from storage.core.durable_files import crc32, replace_file
from storage.core.threads import each
from storage.errors import UsageError
from storage.saving.hdf5_files import SparseFile, begin_file, kind_of, reserve, write_at

from .annotation_table import NOTES_CRC, note_tables, tables_crc
from .block_content import BlockContent, CodedRows, ColumnRows, code_tables
from .block_header import (
    ABOUT,
    CODECS,
    FORMAT_NAME,
    FORMAT_VERSION,
    PART_BYTES,
    header_crc,
    layouts_of,
    row_ranges,
)
from .chunk_table import CHUNK_CHECKSUMS, CHUNKS, OFFSETS, Coding, codings_text

#: The rows of a column start at a multiple of this number of bytes (a memory page), so that the
#: rows of several files can be mapped to adjacent addresses.
DATA_ALIGNMENT = 4096
TEMPORARY_PREFIX = ".tmp_"
_SYNC_FILE_RANGE_WRITE = 2


def block_name(writer: str, sequence: int) -> str:
    """Return the file name of a block. Names of one writer's blocks sort by sequence number."""
    return f"rollout_{writer}_{sequence:06d}.h5"


def write_block(
    folder: Path, content: BlockContent, durable: bool = True, num_threads: int | None = None
) -> Path:
    """Write a block file under a temporary name, then rename it to its name in `folder`.

    Args:
        folder: An existing folder.
        content: Content of the block.
        durable: Flush the file before the rename, and the folder after it. Otherwise publishing is
            atomic if the process crashes, but not if the machine crashes.
        num_threads: Maximum number of threads that encode chunks; None uses torch's number.

    Returns:
        The path of the published block.

    Raises:
        OSError: The disk is full, or the folder was deleted or is read-only. No partial file
            remains.
    """
    path = folder / block_name(content.writer, content.sequence)
    if path.exists():
        raise UsageError(f"the block {str(path)!r} exists already. Use another writer name.")
    # `recover_dead_writers` recognizes a killed writer's temporary file by this form of the name.
    temporary = path.with_name(TEMPORARY_PREFIX + path.name)
    try:
        with replace_file(path, temporary=temporary, durable=durable) as new:
            write_block_file(new, content, durable, num_threads)
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
    return path


def write_block_file(
    path: Path, content: BlockContent, starts_writeback: bool, num_threads: int | None = None
) -> None:
    """Write a block to a new file without flushing it.

    Args:
        path: Path of the new file, which must not exist.
        content: Content of the block; not modified.
        starts_writeback: Start to write rows to the disk while the next rows are encoded.
        num_threads: Maximum number of threads that encode chunks; None uses torch's number.

    Raises:
        OSError: The file cannot be written.
    """
    coded, codings = code_tables(content, num_threads)
    content = replace(content, rows=coded)
    header = SparseFile()
    plain = {
        "fragments": content.fragments,
        "reward_sums": content.reward_sums,
        **note_tables(content.notes),
    }
    with begin_file(header, DATA_ALIGNMENT) as file, open(path, "xb", buffering=0) as out:
        offsets = _reserve_tables(file, content, plain)
        _write_tables(file, content, codings, plain)
        file.close()
        header.write_to(out.fileno())
        tables = _write_rows(out.fileno(), content, offsets, starts_writeback, num_threads)
        for name, values in (tables | plain).items():
            write_at(
                out.fileno(),
                np.ascontiguousarray(values).reshape(-1).view(np.uint8).data,
                offsets[name],
            )


def _write_rows(
    descriptor: int,
    content: BlockContent,
    offsets: Mapping[str, int],
    starts_writeback: bool,
    num_threads: int | None,
) -> dict[str, np.ndarray]:
    """Write all rows of a block to the reserved offsets of its file.

    Returns:
        Maps `checksums/<table>` to the CRC-32 of each fragment's rows or chunks, uint32
        `[F, columns]`.
    """
    pieces = list[_Piece]()
    checksums = {}
    part_bytes = PART_BYTES
    for table, columns in content.rows.items():
        values = checksums[f"checksums/{table}"] = np.zeros(
            (len(content.fragments), len(columns)), "<u4"
        )
        for position, (name, source) in enumerate(columns.items()):
            ranges = row_ranges(table, content.fragments)
            if isinstance(source, CodedRows):
                ranges = source.table.byte_ranges(*ranges)
            offset = offsets[f"{table}/{name}"]
            num_bytes = source.num_rows * source.row_bytes
            pieces += _cut(source, offset, ranges, values[:, position])
            part_bytes = max(part_bytes, source.row_bytes)
            # Allocating the space of the rows first makes writing a tenth faster.
            # `os.posix_fallocate` is not used, since it writes to every disk block if the file
            # system does not support preallocation.
            if num_bytes >= PART_BYTES:
                _try_system_call("fallocate64", descriptor, 0, offset, num_bytes)
    if num_threads is None:
        num_threads = torch.get_num_threads()
    num_threads = min(2, num_threads)  # More threads would only wait for writes to the file.
    memories = [np.empty(part_bytes, np.uint8) for _ in range(num_threads)]

    def write(piece: _Piece) -> None:
        memory = memories.pop()
        try:
            piece.write(descriptor, memory, starts_writeback)
        finally:
            memories.append(memory)

    each(write, pieces, num_threads)
    return checksums


@dataclass(frozen=True, eq=False)
class _Piece:
    """Consecutive rows of a column that one thread writes, and the fragments in them.

    Attributes:
        source: All rows of the column.
        offset: Byte offset in the file of the first row of the column.
        start, stop: Range of rows of this piece.
        spans: Rows (first, stop) of each fragment in the piece.
        checksums: Output: CRC-32 of each fragment of the column, uint32 `[F]`.
        places: Indices in `checksums` of the fragments in the piece.
    """

    source: ColumnRows
    offset: int
    start: int
    stop: int
    spans: list[tuple[int, int]]
    checksums: np.ndarray
    places: list[int]

    def write(self, descriptor: int, memory: np.ndarray, starts_writeback: bool) -> None:
        """Copy the rows from the source to the file and compute the checksums.

        Rows are read in parts that fit in `memory`, which must have space for at least one row.
        """
        row_bytes = self.source.row_bytes
        sums = [0] * len(self.spans)
        rows_a_part = len(memory) // row_bytes
        for low in range(self.start, self.stop, rows_a_part):
            high = min(self.stop, low + rows_a_part)
            out = memory[: (high - low) * row_bytes].reshape(high - low, row_bytes)
            part = self.source.read(low, high, out).reshape(-1).data
            for number, (first, last) in enumerate(self.spans):
                begin = max(first, low) - low
                end = min(last, high) - low
                if begin < end:
                    sums[number] = crc32(part[begin * row_bytes : end * row_bytes], sums[number])
            write_at(descriptor, part, self.offset + low * row_bytes)
            # The disk then writes in the background, so the flush at the end takes less time.
            if starts_writeback:
                place = self.offset + low * row_bytes
                _try_system_call(
                    "sync_file_range", descriptor, place, len(part), _SYNC_FILE_RANGE_WRITE
                )
        self.checksums[self.places] = sums


def _cut(
    source: ColumnRows,
    offset: int,
    ranges: tuple[np.ndarray, np.ndarray],
    checksums: np.ndarray,
) -> list[_Piece]:
    """Divide the rows of a column into pieces of about `PART_BYTES`. No fragment is divided.

    A fragment that is larger than `PART_BYTES` forms its own piece.

    Args:
        source: Rows of the column.
        offset: Byte offset in the file of the first row.
        ranges: First and stop row of each fragment, int64 `[F]` each.
        checksums: Output for the CRC-32 of each fragment, uint32 `[F]`.
    """
    if not source.num_rows:
        return []
    first, last = ranges
    order = np.flatnonzero(last > first)
    order = order[np.argsort(first[order], kind="stable")]
    spans = list(zip(first[order].tolist(), last[order].tolist(), strict=True))
    ends = last[order].tolist()
    places = order.tolist()
    if not spans:
        return [_Piece(source, offset, 0, source.num_rows, [], checksums, [])]

    rows_a_piece = max(1, PART_BYTES // source.row_bytes)
    pieces = []
    start = 0
    low = 0
    while low < len(spans):
        # The piece contains the fragments `low:high`, at least one, and the rows `start:stop`.
        high = max(low + 1, bisect_right(ends, start + rows_a_piece))
        stop = spans[high][0] if high < len(spans) else source.num_rows
        piece = _Piece(source, offset, start, stop, spans[low:high], checksums, places[low:high])
        pieces.append(piece)
        start = stop
        low = high
    return pieces


def _try_system_call(name: str, *numbers: int) -> None:
    """Call a function of Linux that Python does not provide. Does nothing on other systems.

    The result is ignored: the call only makes writing faster, and a later write or flush of the
    same bytes reports any error.
    """
    function = _system_call(name)
    if function is not None:
        function(*map(ctypes.c_int64, numbers))


@lru_cache(maxsize=2)
def _system_call(name: str) -> Callable[..., object] | None:
    is_known = sys.platform.startswith("linux") and ctypes.sizeof(ctypes.c_void_p) == 8
    return getattr(ctypes.CDLL(None), name, None) if is_known else None


def _reserve_tables(
    file: h5py.File, content: BlockContent, plain: Mapping[str, np.ndarray]
) -> dict[str, int]:
    """Create the HDF5 datasets of a block without their content; return their byte offsets by name.

    Rows, checksums and the arrays `plain` are later written at these offsets without HDF5.
    """
    offsets = {name: reserve(file, name, array.dtype, array.shape) for name, array in plain.items()}
    for table, layout in layouts_of(content.schema).items():
        for name, column in layout.columns.items():
            shape = (content.rows[table][name].num_rows,)
            place = f"{table}/{name}"
            inner = f"{place}/{CHUNKS}" if column.is_coded else place
            dtype = np.dtype("u1") if column.is_coded else layout.numpy_dtype(column)
            offsets[place] = reserve(file, inner, dtype, shape)
        num_checksums = (len(content.fragments), len(layout.columns))
        offsets[f"checksums/{table}"] = reserve(
            file, f"checksums/{table}", np.dtype("<u4"), num_checksums
        )
    return offsets


def _write_tables(
    file: h5py.File,
    content: BlockContent,
    codings: Mapping[str, Coding],
    plain: Mapping[str, np.ndarray],
) -> None:
    """Write the HDF5 attributes and the chunk tables of a block."""
    created_ns = time.time_ns() if content.created_ns is None else content.created_ns
    schema_text = json.dumps(content.schema.to_json())
    values = (schema_text, content.writer, content.sequence, created_ns)
    attributes: dict[str, str | int] = dict(zip(ABOUT, values, strict=True))
    if codings:
        attributes[CODECS] = codings_text(codings)
    offsets = _write_offsets(file, content, codings)
    crc = header_crc(content.fragments, content.reward_sums, attributes.values(), offsets)
    attributes["header_crc"] = crc
    if any(content.notes.values()):
        attributes[NOTES_CRC] = tables_crc(plain)
    for name, value in {"format": FORMAT_NAME, "version": FORMAT_VERSION, **attributes}.items():
        # The low-level calls take a quarter of the time of `file.attrs[name] = value`.
        dtype = h5py.string_dtype() if isinstance(value, str) else np.dtype("<i8")
        created = h5py.h5a.create(
            file.id, name.encode(), kind_of(dtype), h5py.h5s.create_simple(())
        )
        created.write(np.array(value, dtype))


def _write_offsets(
    file: h5py.File, content: BlockContent, codings: Mapping[str, Coding]
) -> list[np.ndarray]:
    """Write the chunk tables; return the datasets `offsets`, which the header checksum covers."""
    offsets = []
    for table, columns in content.rows.items():
        for name, source in columns.items():
            if not isinstance(source, CodedRows):
                continue
            place = f"{table}/{name}"
            offsets.append(source.table.offsets)
            file.create_dataset(f"{place}/{OFFSETS}", data=offsets[-1])
            checksums = source.table.sums.astype("<u4")
            file.create_dataset(f"{place}/{CHUNK_CHECKSUMS}", data=checksums)
            field = content.schema[name]
            coding = codings[name]
            file[place].attrs.update(
                codec=coding.codec,
                dtype=field.dtype,
                frame_shape=np.array(field.shape, "<i8"),
                frames_per_chunk=coding.frames_per_chunk,
                max_error=coding.max_error,
            )
    return offsets
