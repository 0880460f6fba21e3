"""Block files: write one block and publish it, check the checksums of one.

One rule: a block is complete or absent. Its bytes go to a temporary name and are flushed; a
rename publishes them, and nothing is modified afterwards. `FORMAT.md` is the specification,
`block_header.py` the reading side.
"""

from __future__ import annotations

import json
import os
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.lib.stride_tricks import as_strided

from storage.errors import CorruptFileError, UsageError
from storage.fields import Schema

from .block_header import ABOUT, DATA, FORMAT_NAME, FORMAT_VERSION, BlockHeader, header_crc, layouts_of, read_header

#: Rows start at a multiple of this, so that files can be mapped side by side.
DATA_ALIGNMENT = 4096
TEMPORARY_PREFIX = ".tmp_"
_MAX_BUFFERS_A_WRITE = 1024


@dataclass
class BlockContent:
    """What goes into one block.

    Attributes:
        schema: All fields, as users see them.
        writer: Who writes; with `sequence` it names the block.
        sequence: Position among the writer's blocks.
        fragments: `[F]` of `FRAGMENT_DTYPE`; `row` counts env-major through `rows`.
        reward_sums: `[F, R]` float64; R = 0 without rewards.
        rows: Table -> column -> `[E, T, row_bytes]` uint8, each `[T, row_bytes]` contiguous.
            The row `r` of the table is `[r // T, r % T]`; no fragment crosses an `E`.
    """

    schema: Schema
    writer: str
    sequence: int
    fragments: np.ndarray
    reward_sums: np.ndarray
    rows: Mapping[str, Mapping[str, np.ndarray]]


def block_name(writer: str, sequence: int) -> str:
    """File name of a block; names of one writer sort by sequence."""
    return f"rollout_{writer}_{sequence:06d}.h5"


def write_block(folder: Path, content: BlockContent, durable: bool = True) -> Path:
    """Write a block into `folder` and publish it in one step.

    Args:
        folder: An existing folder.
        content: What to write; not changed.
        durable: Flush the file before and the folder after the rename. Without, publishing is
            still atomic for a crash of the process, but not for one of the machine.

    Returns:
        The path of the published block.

    Raises:
        OSError: The disk is full, the folder is gone or read-only. Nothing is left behind.
    """
    path = folder / block_name(content.writer, content.sequence)
    if path.exists():
        raise UsageError(
            "publish the block", repr(str(path)), "a free name", "an existing file", "Use another writer name"
        )
    temporary = path.with_name(TEMPORARY_PREFIX + path.name)
    try:
        places = _write_header(temporary, content)
        with open(temporary, "r+b", buffering=0) as file:
            # Checksums cost as much as the copy into the page cache: they run beside it, or beside
            # the flush, where the processor has nothing to do (54 -> 43 ms for 50 MB; 30 ms is one write).
            with _Beside(lambda: None if durable else _checksums(content)) as checksums:
                for table, columns in content.rows.items():
                    for name, rows in columns.items():
                        _write_rows(file.fileno(), places[f"{table}/{name}"], rows)
            with _Beside(lambda: os.fsync(file.fileno()) if durable else None):
                values = checksums.value or _checksums(content)
            for table, numbers in values.items():
                _write_rows(file.fileno(), places[f"checksums/{table}"], numbers.view(np.uint8)[None])
            if durable:
                os.fsync(file.fileno())
        os.rename(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        sync_folder(folder)
    return path


class _Beside:
    """Call a function in a thread while the `with` block runs; a failure is raised at its end.

    Not a `ThreadPoolExecutor`, which refuses work while the interpreter exits: then, or where no
    thread can be started any more, the function is called first.
    """

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self._failure: BaseException | None = None
        self.value: Any = None
        self._thread: threading.Thread | None = threading.Thread(target=self._call, name="block", daemon=True)

    def _call(self) -> None:
        try:
            self.value = self._function()
        except BaseException as error:  # noqa: BLE001 - handed to the caller
            self._failure = error

    def __enter__(self) -> _Beside:
        try:
            assert self._thread is not None
            self._thread.start()
        except RuntimeError:
            self._thread = None
            self._call()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self._thread is not None:
            self._thread.join()
        if error is None and self._failure is not None:
            raise self._failure


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_block(path: Path, verify: bool = False) -> BlockHeader:
    """Read and check a block's header (see `read_header`); with `verify` check all its rows too."""
    header = read_header(path)
    if verify:
        for _, error in damaged_fragments(header):
            raise error
    return header


def damaged_fragments(header: BlockHeader) -> Iterator[tuple[int, CorruptFileError]]:
    """Check every checksum of a block; yield (fragment number, error) for each that is wrong."""
    for table, columns in header.locations.items():
        for position, column in enumerate(columns):
            bounds = (bound.tolist() for bound in row_ranges(table, header.fragments))
            for number, (fragment, start, stop) in enumerate(zip(header.fragments, *bounds, strict=True)):
                if start == stop:
                    continue
                expected = int(header.checksums[table][number, position])
                got = zlib.crc32(header.read_rows(table, column, start, stop).data)
                if got != expected:
                    first = int(fragment["start"])
                    frames = f"{first}:{first + int(fragment['length'])}" if table == DATA else "after the last"
                    yield (
                        number,
                        CorruptFileError(
                            f"read frames {frames} of trajectory {int(fragment['trajectory'])}",
                            f"in {str(header.path)!r}, column {table}/{column}",
                            f"checksum {expected:08x}",
                            f"{got:08x}",
                            f"Run 'rollout-data verify --repair {header.path.parent}' to keep the intact trajectories",
                        ),
                    )


def _checksums(content: BlockContent) -> dict[str, np.ndarray]:
    """CRC-32 of every fragment's rows: table -> `[F, columns]` uint32."""
    found = {}
    for table, columns in content.rows.items():
        values = np.zeros((len(content.fragments), len(columns)), "<u4")
        first, stop = row_ranges(table, content.fragments)
        for position, rows in enumerate(columns.values()):
            # One flat view: slicing it costs a tenth of slicing the array, a thousand times a block.
            step, row_bytes, rows_per_env = rows.strides[0], rows.shape[2], max(1, rows.shape[1])
            start = first // rows_per_env * step + first % rows_per_env * row_bytes
            flat = as_strided(rows, (max(0, len(rows) - 1) * step + rows_per_env * row_bytes,), (1,)).data
            bounds = zip(start.tolist(), (start + (stop - first) * row_bytes).tolist(), strict=True)
            values[:, position] = [zlib.crc32(flat[low:high]) if high > low else 0 for low, high in bounds]
        found[table] = values
    return found


def row_ranges(table: str, fragments: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """First row and end of every fragment in one of the two tables; equal where it has none."""
    if table == DATA:
        return fragments["row"], fragments["row"] + fragments["length"]
    final = fragments["final_row"]
    return np.maximum(final, 0), np.maximum(final + 1, 0)


def _write_header(path: Path, content: BlockContent) -> dict[str, int]:
    """Create the HDF5 file with its tables and room for the rows; give the room's offsets."""
    places: dict[str, int] = {}
    text = json.dumps(content.schema.to_json())
    with h5py.File(
        path, "x", libver=("v108", "v108"), alignment_threshold=1, alignment_interval=DATA_ALIGNMENT
    ) as file:
        file.attrs["format"] = FORMAT_NAME
        file.attrs["version"] = FORMAT_VERSION
        about = (text, content.writer, content.sequence, time.time_ns())
        for name, value in zip(ABOUT, about, strict=True):
            file.attrs[name] = value
        file.attrs["header_crc"] = header_crc(content.fragments, content.reward_sums, about)
        file.create_dataset("fragments", data=content.fragments)
        file.create_dataset("reward_sums", data=content.reward_sums)
        for table, layout in layouts_of(content.schema).items():
            for name, column in layout.columns.items():
                rows = content.rows[table][name]
                num_rows = rows.shape[0] * rows.shape[1]
                places[f"{table}/{name}"] = _reserve(file, f"{table}/{name}", layout.numpy_dtype(column), (num_rows,))
            shape = (len(content.fragments), len(layout.columns))
            places[f"checksums/{table}"] = _reserve(file, f"checksums/{table}", np.dtype("<u4"), shape)
    return places


def _reserve(file: h5py.File, name: str, dtype: np.dtype, shape: tuple[int, ...]) -> int:
    """Create a contiguous dataset whose bytes are written later, without HDF5; give its file offset."""
    settings = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    settings.set_layout(h5py.h5d.CONTIGUOUS)
    settings.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    settings.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    links = h5py.h5p.create(h5py.h5p.LINK_CREATE)
    links.set_create_intermediate_group(True)
    space = h5py.h5s.create_simple(shape)
    kind = h5py.h5t.py_create(dtype, logical=True)
    return h5py.h5d.create(file.id, name.encode(), kind, space, settings, lcpl=links).get_offset() or 0


def _write_rows(descriptor: int, offset: int, rows: np.ndarray) -> None:
    """Write `[E, T, row_bytes]` to the file at `offset`, many envs a call."""
    buffers = [part.reshape(-1).data for part in (rows.reshape(1, *_flat(rows)) if rows.flags.c_contiguous else rows)]
    for first in range(0, len(buffers), _MAX_BUFFERS_A_WRITE):
        pending = [buffer for buffer in buffers[first : first + _MAX_BUFFERS_A_WRITE] if len(buffer)]
        while pending:
            written = os.pwritev(descriptor, pending, offset)
            offset += written
            while pending and written >= len(pending[0]):
                written -= len(pending.pop(0))
            if pending and written:
                pending[0] = pending[0][written:]


def _flat(rows: np.ndarray) -> tuple[int, ...]:
    return (rows.size,)
