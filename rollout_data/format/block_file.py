"""Block files: write one block and publish it, check the checksums of one.

One rule: a block is complete or absent. Its bytes go to a temporary name and are flushed; a
rename publishes them, and nothing is modified afterwards. `FORMAT.md` is the specification,
`header.py` the reading side.
"""

from __future__ import annotations

import _thread
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from storage.core.checksums import crc32
from storage.core.durable import sync_path
from storage.core.fields import Schema
from storage.core.threads import num_processors
from storage.core.work_split import WorkSplit
from storage.errors import CorruptFileError, UsageError
from storage.saving.hdf5 import SparseFile, begin_file, kind_of, reserve, write_at

from .chunk_table import CHUNK_CHECKSUMS, CHUNKS, OFFSETS, Coding, codings_text
from .coded_rows import CodedRows, CodingOptions, code_tables
from .header import ABOUT, CODECS, DATA, FORMAT_NAME, FORMAT_VERSION, BlockHeader, header_crc, layouts_of, read_header
from .row_source import RowSource
from .row_writing import RowWriting, row_ranges

#: Rows start at a multiple of this, so that files can be mapped side by side.
DATA_ALIGNMENT = 4096
TEMPORARY_PREFIX = ".tmp_"
#: Parts that the thread which also writes the tables gathers ahead of its helper.
_NUM_AHEAD = 3


@dataclass
class BlockContent:
    """What goes into one block.

    Attributes:
        schema: All fields, as users see them.
        writer: Who writes; with `sequence` it names the block.
        sequence: Position among the writer's blocks.
        fragments: `[F]` of `FRAGMENT_DTYPE`.
        reward_sums: `[F, R]` float64; R = 0 without rewards.
        rows: Table -> column -> its rows; a column that is kept in chunks is coded when the block is
            written, unless it comes as `CodedRows`.
        max_errors: Field -> largest error that a codec made of the values that are in `rows`.
        codecs: Field that is coded "auto" -> its codec. The first block that is written with such a
            mapping decides; the writer keeps it.
        frames_per_chunk: Frames of a chunk at most, where columns are coded; None is what suits the codec.
    """

    schema: Schema
    writer: str
    sequence: int
    fragments: np.ndarray
    reward_sums: np.ndarray
    rows: Mapping[str, Mapping[str, RowSource]]
    max_errors: Mapping[str, float] = field(default_factory=dict)
    codecs: MutableMapping[str, str] = field(default_factory=dict)
    frames_per_chunk: int | None = None


def block_name(writer: str, sequence: int) -> str:
    """File name of a block; names of one writer sort by sequence."""
    return f"rollout_{writer}_{sequence:06d}.h5"


def write_block(
    folder: Path, content: BlockContent, durable: bool = True, in_haste: bool | Callable[[], bool] = True
) -> Path:
    """Write a block into `folder` and publish it in one step.

    Args:
        folder: An existing folder.
        content: What to write; not changed.
        durable: Flush the file before and the folder after the rename. Without, publishing is
            still atomic for a crash of the process, but not for one of the machine.
        in_haste: Use a second thread, at the cost of whatever else wants to run; or a function, asked again
            and again, that says from when on.

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
        _write_file(temporary, content, durable, in_haste)
        os.rename(temporary, path)
    except BaseException:  # Ctrl-C too: nothing is left behind
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        sync_path(folder)
    return path


def _write_file(path: Path, content: BlockContent, durable: bool, in_haste: bool | Callable[[], bool]) -> None:
    """Write all of a block under a temporary name; in haste, a thread begins with the rows during the tables."""
    is_awaited = in_haste if callable(in_haste) else lambda: in_haste
    splits = WorkSplit(num_processors() if is_awaited() else 1)
    options = CodingOptions(content.codecs, content.max_errors, content.frames_per_chunk)
    coded = code_tables(content.schema, content.fragments, content.rows, options, splits)
    content, codings = replace(content, rows=coded[0]), coded[1]
    header = SparseFile()
    with begin_file(header, DATA_ALIGNMENT) as file, open(path, "xb", buffering=0) as out:
        descriptor = out.fileno()
        offsets = _reserve_tables(file, content)
        writing = RowWriting(descriptor, content.rows, offsets, content.fragments, starts_writeback=durable)
        with _Helper(writing.work, is_awaited) as helper:
            helper.ask()
            _write_tables(file, content, codings)
            file.close()
            header.write_to(descriptor)
            writing.work(before_each=helper.ask, num_ahead=_NUM_AHEAD)
        tables = {f"checksums/{table}": values for table, values in writing.checksums.items()}
        for name, values in (tables | _plain_tables(content)).items():
            write_at(descriptor, np.ascontiguousarray(values).reshape(-1).view(np.uint8).data, offsets[name])
        if durable:
            os.fsync(descriptor)


class _Helper:
    """Calls a function in a thread beside the `with` block, from when it is wanted; a failure is raised at the end.

    Not a `ThreadPoolExecutor`, which refuses work while the interpreter exits: then, or where no thread can
    be started any more, the block does all of the work. Nor a `threading.Thread`, whose start waits for the
    thread to begin: 0.2 ms and more, in which tables could be written. One that begins after the end does nothing.
    """

    def __init__(self, function: Callable[[], object], is_wanted: Callable[[], bool]) -> None:
        self._function: Callable[[], object] | None = function
        self._is_wanted = is_wanted
        self._is_asked = num_processors() < 2
        self._failure: BaseException | None = None
        self._at_work = threading.Lock()

    def ask(self) -> None:
        """Start the thread if it is wanted now and was not before."""
        if self._is_asked or not self._is_wanted():
            return
        self._is_asked = True
        with suppress(RuntimeError):
            _thread.start_new_thread(self._call, ())

    def _call(self) -> None:
        with self._at_work:
            if self._function is None:
                return
            try:
                self._function()
            except BaseException as error:  # noqa: BLE001 - handed to the caller
                self._failure = error

    def _end(self) -> None:
        with self._at_work:
            self._function = None

    def __enter__(self) -> _Helper:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            self._end()
        except BaseException:  # Ctrl-C: wait all the same, or it goes on to write when its file is closed
            self._end()
            raise
        if self._failure is not None and (error is None or isinstance(error, Exception)):
            raise self._failure  # a full disk stops both; the thread's own words for it are the clearer ones


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
                if (wrong := _wrong_sum(header, table, column, (start, stop), number, position)) is not None:
                    first = int(fragment["start"])
                    frames = f"{first}:{first + int(fragment['length'])}" if table == DATA else "after the last"
                    yield (
                        number,
                        CorruptFileError(
                            f"read frames {frames} of trajectory {int(fragment['trajectory'])}",
                            f"in {str(header.path)!r}, column {table}/{column}",
                            *wrong,
                            f"Run 'rollout-data verify --repair {header.path.parent}' to keep the intact trajectories",
                        ),
                    )


def _wrong_sum(
    header: BlockHeader, table: str, column: str, rows: tuple[int, int], number: int, position: int
) -> tuple[str, str] | None:
    """Check what a fragment has in one column, and each of its chunks: (expected, got) if it is wrong."""
    data, expected = header.read_stored(table, column, *rows), int(header.checksums[table][number, position])
    if (got := crc32(data.data)) != expected:
        return f"checksum {expected:08x}", f"{got:08x}"
    if column in header.chunks[table]:
        try:
            header.chunks[table][column].check_chunks(*rows, data)
        except CorruptFileError as error:
            return error.expected, error.got
    return None


def _plain_tables(content: BlockContent) -> dict[str, np.ndarray]:
    return {"fragments": content.fragments, "reward_sums": content.reward_sums}


def _reserve_tables(file: h5py.File, content: BlockContent) -> dict[str, int]:
    """Make room for fragments, rows and checksums, which HDF5 does not write; give the file offsets."""
    offsets: dict[str, int] = {}
    for name, values in _plain_tables(content).items():
        offsets[name] = reserve(file, name, values.dtype, values.shape)
    for table, layout in layouts_of(content.schema).items():
        for name, column in layout.columns.items():
            shape, place = (content.rows[table][name].num_rows,), f"{table}/{name}"
            inner = f"{place}/{CHUNKS}" if column.is_coded else place
            dtype = np.dtype("u1") if column.is_coded else layout.numpy_dtype(column)
            offsets[place] = reserve(file, inner, dtype, shape)
        num_checksums = (len(content.fragments), len(layout.columns))
        offsets[f"checksums/{table}"] = reserve(file, f"checksums/{table}", np.dtype("<u4"), num_checksums)
    return offsets


def _write_tables(file: h5py.File, content: BlockContent, codings: Mapping[str, Coding]) -> None:
    """Write what describes the rows: attributes and tables of chunks."""
    values = (_text_of(content.schema), content.writer, content.sequence, time.time_ns())
    about: dict[str, str | int] = dict(zip(ABOUT, values, strict=True))
    about |= {CODECS: codings_text(codings)} if codings else {}
    offsets = _write_offsets(file, content, codings)
    crc = header_crc(content.fragments, content.reward_sums, about.values(), offsets)
    for name, value in {"format": FORMAT_NAME, "version": FORMAT_VERSION, **about, "header_crc": crc}.items():
        _set_attribute(file, name, value)


def _write_offsets(file: h5py.File, content: BlockContent, codings: Mapping[str, Coding]) -> list[np.ndarray]:
    """Write the tables of chunks; give what `header_crc` covers: where chunks lie, not their checksums."""
    offsets = []
    for table, columns in content.rows.items():
        for name, source in columns.items():
            if isinstance(source, CodedRows):
                offsets.append(source.table.offsets)
                file.create_dataset(f"{table}/{name}/{OFFSETS}", data=offsets[-1])
                file.create_dataset(f"{table}/{name}/{CHUNK_CHECKSUMS}", data=source.table.sums.astype("<u4"))
                schema_field, coding = content.schema[name], codings[name]
                file[f"{table}/{name}"].attrs.update(
                    codec=coding.codec,
                    dtype=schema_field.dtype,
                    frame_shape=np.array(schema_field.shape, "<i8"),
                    frames_per_chunk=coding.frames_per_chunk,
                    max_error=coding.max_error,
                )
    return offsets


@lru_cache(maxsize=64)
def _text_of(schema: Schema) -> str:
    return json.dumps(schema.to_json())


def _set_attribute(file: h5py.File, name: str, value: str | int) -> None:
    """Write a text or number as h5py does, in a quarter of the time of `file.attrs[name] = value`."""
    dtype = h5py.string_dtype() if isinstance(value, str) else np.dtype("<i8")
    h5py.h5a.create(file.id, name.encode(), kind_of(dtype), _scalar()).write(np.array(value, dtype))


@lru_cache(maxsize=1)
def _scalar() -> Any:
    return h5py.h5s.create_simple(())
