"""Write one block and publish it.

One rule: a block is complete or absent. Its bytes go to a temporary name and are flushed; a rename publishes
them, and nothing is modified afterwards. `FORMAT.md` is the specification, `header.py` the reading side.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import h5py
import numpy as np
import torch

from storage.core.durable_files import crc32, sync_path
from storage.core.threads import each
from storage.errors import UsageError
from storage.saving.hdf5_files import SparseFile, begin_file, kind_of, reserve, write_at

from .annotation_table import NOTES_CRC, note_tables, tables_crc
from .block_content import BlockContent, CodedRows, RowSource, code_tables
from .block_header import ABOUT, CODECS, FORMAT_NAME, FORMAT_VERSION, PART_BYTES, header_crc, layouts_of, row_ranges
from .chunk_table import CHUNK_CHECKSUMS, CHUNKS, OFFSETS, Coding, codings_text

#: Rows start at a multiple of this, so that files can be mapped side by side.
DATA_ALIGNMENT = 4096
TEMPORARY_PREFIX = ".tmp_"
_SYNC_FILE_RANGE_WRITE = 2


def block_name(writer: str, sequence: int) -> str:
    """File name of a block; names of one writer sort by sequence."""
    return f"rollout_{writer}_{sequence:06d}.h5"


def write_block(folder: Path, content: BlockContent, durable: bool = True, num_threads: int | None = None) -> Path:
    """Write a block into `folder` and publish it in one step.

    Args:
        folder: An existing folder.
        content: What to write; not changed.
        durable: Flush the file before and the folder after the rename. Without, publishing is
            still atomic for a crash of the process, but not for one of the machine.
        num_threads: Threads that code, at most; None takes torch's number.

    Returns:
        The path of the published block.

    Raises:
        OSError: The disk is full, the folder is gone or read-only. Nothing is left behind.
    """
    path = folder / block_name(content.writer, content.sequence)
    if path.exists():
        advice = "Use another writer name"
        raise UsageError("publish the block", repr(str(path)), "a free name", "an existing file", advice)
    temporary = path.with_name(TEMPORARY_PREFIX + path.name)
    try:
        _write_file(temporary, content, durable, num_threads)
        os.rename(temporary, path)
    except BaseException as error:  # Ctrl-C too: nothing is left behind
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename = error.filename or str(path)
        raise
    if durable:
        sync_path(folder)
    return path


def _write_file(path: Path, content: BlockContent, durable: bool, num_threads: int | None) -> None:
    coded, codings = code_tables(content, num_threads)
    content = replace(content, rows=coded)
    header = SparseFile()
    plain = {"fragments": content.fragments, "reward_sums": content.reward_sums, **note_tables(content.notes)}
    with begin_file(header, DATA_ALIGNMENT) as file, open(path, "xb", buffering=0) as out:
        offsets = _reserve_tables(file, content, plain)
        _write_tables(file, content, codings, plain)
        file.close()
        header.write_to(out.fileno())
        tables = _write_rows(out.fileno(), content, offsets, durable, num_threads)
        for name, values in (tables | plain).items():
            write_at(out.fileno(), np.ascontiguousarray(values).reshape(-1).view(np.uint8).data, offsets[name])
        if durable:
            os.fsync(out.fileno())


def _write_rows(
    descriptor: int,
    content: BlockContent,
    offsets: Mapping[str, int],
    starts_writeback: bool,
    num_threads: int | None,
) -> dict[str, np.ndarray]:
    """Write all rows; give `checksums/<table>`: `[F, columns]` uint32, CRC-32 of each fragment's rows or chunks."""
    pieces = list[_Piece]()
    checksums = {}
    part_bytes = PART_BYTES
    for table, columns in content.rows.items():
        values = checksums[f"checksums/{table}"] = np.zeros((len(content.fragments), len(columns)), "<u4")
        for position, (name, source) in enumerate(columns.items()):
            ranges = row_ranges(table, content.fragments)
            if isinstance(source, CodedRows):
                ranges = source.table.byte_ranges(*ranges)
            offset = offsets[f"{table}/{name}"]
            num_bytes = source.num_rows * source.row_bytes
            pieces += _cut(source, offset, ranges, values[:, position])
            part_bytes = max(part_bytes, source.row_bytes)
            # The disk's blocks are allocated at once, which makes writing a tenth faster. Not `os.posix_fallocate`,
            # which writes to every block where the file system cannot do better.
            if num_bytes >= PART_BYTES:
                _hasten("fallocate64", descriptor, 0, offset, num_bytes)
    num_threads = min(2, torch.get_num_threads() if num_threads is None else num_threads)  # more wait for the file
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
    """Rows `start:stop` of a column whose first row is at byte `offset` of the file, and the fragments in them.

    `spans` are the rows of these fragments, `checksums[places]` receives their CRC-32.
    """

    source: RowSource
    offset: int
    start: int
    stop: int
    spans: list[tuple[int, int]]
    checksums: np.ndarray
    places: list[int]

    def write(self, descriptor: int, memory: np.ndarray, starts_writeback: bool) -> None:
        """Gather, check and write the rows, a part after the other; `memory` holds at least one row."""
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
            if starts_writeback:  # at once, so that the flush has little left to do
                _hasten("sync_file_range", descriptor, self.offset + low * row_bytes, len(part), _SYNC_FILE_RANGE_WRITE)
        self.checksums[self.places] = sums


def _cut(source: RowSource, offset: int, ranges: tuple[np.ndarray, np.ndarray], checksums: np.ndarray) -> list[_Piece]:
    """Cut the rows of a column at starts of fragments, into pieces of a part at most, or of one fragment."""
    if not source.num_rows:
        return []
    first, last = ranges
    order = np.flatnonzero(last > first)
    order = order[np.argsort(first[order], kind="stable")]
    spans = list(zip(first[order].tolist(), last[order].tolist(), strict=True))
    ends = last[order].tolist()
    places = order.tolist()
    rows_a_part = max(1, PART_BYTES // source.row_bytes)
    numbers = [0]
    rows = [0]
    while numbers[-1] < len(spans):
        number = max(numbers[-1] + 1, bisect_right(ends, rows[-1] + rows_a_part))
        numbers.append(number)
        rows.append(spans[number][0] if number < len(spans) else source.num_rows)
    if not spans:
        numbers = [0, 0]
        rows = [0, source.num_rows]
    return [
        _Piece(source, offset, start, stop, spans[a:b], checksums, places[a:b])
        for (start, stop), (a, b) in zip(pairwise(rows), pairwise(numbers), strict=True)
    ]


def _hasten(name: str, *numbers: int) -> None:
    """Call a function of Linux for which Python has no name, if it is there.

    What it returns does not matter: it only hastens what follows, which reports errors.
    """
    if (function := _system_call(name)) is not None:
        function(*map(ctypes.c_int64, numbers))


@lru_cache(maxsize=2)
def _system_call(name: str) -> Callable[..., object] | None:
    is_known = sys.platform.startswith("linux") and ctypes.sizeof(ctypes.c_void_p) == 8
    return getattr(ctypes.CDLL(None), name, None) if is_known else None


def _reserve_tables(file: h5py.File, content: BlockContent, plain: Mapping[str, np.ndarray]) -> dict[str, int]:
    """Make room for plain tables, rows and checksums, which HDF5 does not write; give the file offsets."""
    offsets = {name: reserve(file, name, one.dtype, one.shape) for name, one in plain.items()}
    for table, layout in layouts_of(content.schema).items():
        for name, column in layout.columns.items():
            shape = (content.rows[table][name].num_rows,)
            place = f"{table}/{name}"
            inner = f"{place}/{CHUNKS}" if column.is_coded else place
            dtype = np.dtype("u1") if column.is_coded else layout.numpy_dtype(column)
            offsets[place] = reserve(file, inner, dtype, shape)
        num_checksums = (len(content.fragments), len(layout.columns))
        offsets[f"checksums/{table}"] = reserve(file, f"checksums/{table}", np.dtype("<u4"), num_checksums)
    return offsets


def _write_tables(
    file: h5py.File, content: BlockContent, codings: Mapping[str, Coding], plain: Mapping[str, np.ndarray]
) -> None:
    """Write what describes the rows: attributes and tables of chunks."""
    created_ns = time.time_ns() if content.created_ns is None else content.created_ns
    values = (json.dumps(content.schema.to_json()), content.writer, content.sequence, created_ns)
    about: dict[str, str | int] = dict(zip(ABOUT, values, strict=True))
    about |= {CODECS: codings_text(codings)} if codings else {}
    offsets = _write_offsets(file, content, codings)
    crc = header_crc(content.fragments, content.reward_sums, about.values(), offsets)
    about |= {"header_crc": crc, **({NOTES_CRC: tables_crc(plain)} if any(content.notes.values()) else {})}
    for name, value in {"format": FORMAT_NAME, "version": FORMAT_VERSION, **about}.items():
        # A quarter of the time of `file.attrs[name] = value`.
        dtype = h5py.string_dtype() if isinstance(value, str) else np.dtype("<i8")
        created = h5py.h5a.create(file.id, name.encode(), kind_of(dtype), h5py.h5s.create_simple(()))
        created.write(np.array(value, dtype))


def _write_offsets(file: h5py.File, content: BlockContent, codings: Mapping[str, Coding]) -> list[np.ndarray]:
    """Write the tables of chunks; give what `header_crc` covers: where chunks lie, not their checksums."""
    offsets = []
    for table, columns in content.rows.items():
        for name, source in columns.items():
            if isinstance(source, CodedRows):
                offsets.append(source.table.offsets)
                file.create_dataset(f"{table}/{name}/{OFFSETS}", data=offsets[-1])
                file.create_dataset(f"{table}/{name}/{CHUNK_CHECKSUMS}", data=source.table.sums.astype("<u4"))
                schema_field = content.schema[name]
                coding = codings[name]
                file[f"{table}/{name}"].attrs.update(
                    codec=coding.codec,
                    dtype=schema_field.dtype,
                    frame_shape=np.array(schema_field.shape, "<i8"),
                    frames_per_chunk=coding.frames_per_chunk,
                    max_error=coding.max_error,
                )
    return offsets
