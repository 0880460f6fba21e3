"""Columns of numbers in an HDF5 file: written and read in chunks, with a checksum each.

One rule: rows pass through chunks of memory, whatever their number. HDF5 itself writes into memory only, and what is
read is first checked against the length of the file. What the columns mean is not known here.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt
import torch

from ..core.durable import crc32
from ..core.fields import DTYPES, Schema, dtype_name
from ..core.records import COMPLEX_DTYPES, make_field
from ..errors import CorruptFileError, SchemaError
from .hdf5 import Allowance, SparseFile, attribute, begin_file, member, open_hdf5, reserve, write_at

#: Rows pass through memory of this size, twice: one chunk is filled while the other is written or used.
CHUNK_BYTES = 8 << 20
#: Threads that read ahead, however many columns there are; several, as checksums take as long as reading.
_NUM_READERS = 4
#: So much is written before flushing begins.
_FLUSH_BYTES = 128 << 20
#: Rows start at a multiple of this, so that they can be mapped.
_ALIGNMENT = 64
#: Attribute of each file, and entry of the config, that says which save they are of.
SAVE_ID = "save_id"
#: Attributes of datasets: the dtype where numpy has none, and the checksum.
_DTYPE_TAG, _CRC_TAG = "torch_dtype", "crc32"
#: Name -> dtype in memory and in the file.
_DTYPES = {**DTYPES, **COMPLEX_DTYPES, "bfloat16": (torch.bfloat16, np.dtype("<i2"))}


class Table(ABC):
    """Rows of several columns, in memory or in a file.

    Attributes:
        shapes: Of each column by name, rows first.
    """

    shapes: dict[str, tuple[int, ...]]

    @abstractmethod
    def dtype(self, name: str) -> str:
        """Give the name of a column's dtype."""

    @abstractmethod
    def rows(self) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
        """Yield (first row, rows of every column) from the first row to the last; a chunk lasts until the next one."""

    @abstractmethod
    def read(self, name: str) -> torch.Tensor:
        """Give all rows of a column."""

    @property
    def num_rows(self) -> int:
        """Rows of every column; unequal numbers are an error."""
        lengths = {name: shape[0] for name, shape in self.shapes.items()}
        if len(set(lengths.values())) > 1:
            raise SchemaError("load rows", expected="columns of equal length", got=str(lengths))
        return next(iter(lengths.values()), 0)

    def schema(self, num_lead: int) -> Schema:
        """Say which fields there are; `num_lead` axes come before the event."""
        if any(len(shape) < num_lead for shape in self.shapes.values()):
            raise SchemaError("load rows", expected=f"columns of at least {num_lead} axes", got=str(self.shapes))
        return Schema(make_field(name, shape[num_lead:], self.dtype(name)) for name, shape in self.shapes.items())


class TensorTable(Table):
    """Columns in memory, which are not copied."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = dict(tensors)
        self.shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}

    def dtype(self, name: str) -> str:
        return _name_of(self._tensors[name])

    def rows(self) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
        yield 0, self._tensors

    def read(self, name: str) -> torch.Tensor:
        return self._tensors[name]


def write_columns(path: Path, columns: Mapping[str, torch.Tensor], save_id: str) -> dict[str, int]:
    """Write tensors from any device as datasets; give their checksums.

    Args:
        path: The new file.
        columns: By the name in the file, rows first; they may be views.
        save_id: Tells files of one save from those of another.

    Raises:
        OSError: The disk is full.
    """
    header, sums = SparseFile(), {}
    with begin_file(header, _ALIGNMENT, keeps_order=True) as file, _Appender(path) as appender:
        places = {name: reserve(file, name, _DTYPES[_name_of(x)][1], tuple(x.shape)) for name, x in columns.items()}
        file.attrs[SAVE_ID] = save_id
        for name, column in columns.items():
            sums[name] = _write_column(appender, column, places[name])
            file[name].attrs[_CRC_TAG] = np.uint32(sums[name])
            if column.dtype is torch.bfloat16:
                file[name].attrs[_DTYPE_TAG] = "bfloat16"
        file.close()
        header.write_to(appender.handle)
    return sums


def _write_column(appender: _Appender, column: torch.Tensor, place: int) -> int:
    row_bytes = prod(column.shape[1:]) * column.element_size()
    step = max(1, CHUNK_BYTES // max(1, row_bytes))
    # Two rooms, for all chunks: fresh memory for each would cost as much as writing it.
    rooms = torch.empty((2, min(step, len(column)), *column.shape[1:]), dtype=column.dtype, device="cpu")
    crc = 0
    for number, part in enumerate(torch.split(column, step)):
        data = _bytes(_as_array(rooms[number % 2][: len(part)].copy_(part)))
        appender.put(data, place + number * step * row_bytes)
        crc = crc32(data, crc)
    appender.wait()
    return crc


class _Appender:
    """Write a chunk in a thread while the next one is laid out, and flush to the disk in another.

    When the file is closed little is left to be flushed, which takes a third of the time of saving otherwise.
    """

    def __init__(self, path: Path) -> None:
        self.handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._pool = ThreadPoolExecutor(2)
        self._written: Future[None] = self._pool.submit(lambda: None)
        self._flushed = self._written
        self._unflushed_bytes = 0

    def put(self, data: memoryview, place: int) -> None:
        """Begin to write a chunk, which must not change until then; wait until the one before it is written."""
        following = self._pool.submit(write_at, self.handle, data, place)
        self.wait()
        self._written = following
        self._unflushed_bytes += len(data)
        if self._unflushed_bytes >= _FLUSH_BYTES and self._flushed.done():
            self._flushed.result()
            self._flushed, self._unflushed_bytes = self._pool.submit(os.fdatasync, self.handle), 0

    def wait(self) -> None:
        """Wait until all chunks are written; raise what went wrong."""
        self._written.result()

    def __enter__(self) -> _Appender:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._pool.shutdown()
        os.close(self.handle)
        if kind is None:
            self.wait()
            self._flushed.result()


@contextmanager
def open_columns(
    path: Path,
    save_id: object = None,
    names: Iterable[str] | None = None,
    separator: str = "/",
    unsplit: str | None = None,
) -> Iterator[ColumnFile]:
    """Open what `write_columns` wrote, or what an earlier system did.

    Args:
        path: The file.
        save_id: Of the save that the file should be of, if that is known and the file tells.
        names: Which datasets; None for all that are not in groups.
        separator: Joins levels of names in the file.
        unsplit: A dataset whose name has no levels, whatever is in it.

    Raises:
        CorruptFileError, UnsafeFileError: Naming the file and the dataset; also for what the block raises because
            of the file.
    """
    try:
        with open_hdf5(path) as (file, handle):
            found = attribute(file, SAVE_ID)
            if save_id is not None and found is not None and str(found) != save_id:
                got = f"one of {str(found)!r}"
                raise CorruptFileError("load", repr(str(path)), f"a file of the save {save_id!r}", got)
            found_names = file if names is None else names
            keys = {key if key == unsplit else key.replace(separator, "/"): key for key in found_names}
            yield ColumnFile(path, handle, {name: member(file, key, path) for name, key in keys.items()})
    except FileNotFoundError as cause:
        raise CorruptFileError("load", repr(str(path.parent)), f"the file {path.name}", "none") from cause


class ColumnFile(Table):
    """The datasets of an open file.

    Args:
        path: The file.
        handle: Its descriptor.
        datasets: By the names of columns.

    Raises:
        CorruptFileError: A dataset is no rows of numbers, or all are together larger than the file.
    """

    def __init__(self, path: Path, handle: int, datasets: Mapping[str, Any]) -> None:
        self._path, self._handle, self._datasets = path, handle, datasets
        allowance = Allowance(os.fstat(handle).st_size)
        for name, found in datasets.items():
            where = f"{name!r} of {str(path)!r}"
            if not isinstance(found, h5py.Dataset) or not found.shape or found.dtype.kind not in "biufc":
                got = f"{found.dtype} of shape {found.shape}" if isinstance(found, h5py.Dataset) else "a group"
                raise CorruptFileError("load", where, "rows of numbers", got)
            allowance.take(found, where)
        self.shapes = {name: tuple(found.shape) for name, found in datasets.items()}

    def dtype(self, name: str) -> str:
        dtype = self._datasets[name].dtype
        if attribute(self._datasets[name], _DTYPE_TAG) == "bfloat16" and dtype.itemsize == 2:
            return "bfloat16"
        if dtype.kind == "c":
            return str(dtype.newbyteorder("="))
        return dtype_name(dtype, f"of {name!r} in {str(self._path)!r}")

    def rows(self) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
        step = max(1, CHUNK_BYTES // max(1, sum(map(_row_bytes, self._datasets.values()))))
        with ThreadPoolExecutor(_NUM_READERS) as pool:
            rooms = {name: self._empty(name, (2, step)) for name in self.shapes}
            chunks = (self._chunks(name, rooms[name], step, pool) for name in self.shapes)
            for first, parts in zip(range(0, self.num_rows, step), zip(*chunks, strict=True), strict=True):
                yield first, dict(zip(self.shapes, parts, strict=True))

    def read(self, name: str, crc: int | None = None) -> torch.Tensor:
        """Read a column whole; compare its checksum with `crc` instead of its own."""
        found = self._empty(name, ())
        step = max(1, CHUNK_BYTES // max(1, _row_bytes(self._datasets[name])))
        with ThreadPoolExecutor(1) as pool:
            for _ in self._chunks(name, found, step, pool, crc):
                pass
        return found

    def _empty(self, name: str, lead: tuple[int, ...]) -> torch.Tensor:
        """Give memory for a column, or with `lead` for chunks of its rows: `[chunks, rows, ...]`."""
        num_rows, *rest = self.shapes[name]
        shape = (*lead[:-1], min(lead[-1], num_rows), *rest) if lead else (num_rows, *rest)
        return torch.empty(shape, dtype=_DTYPES[self.dtype(name)][0], device="cpu")

    def _chunks(
        self, name: str, out: torch.Tensor, step: int, pool: ThreadPoolExecutor, crc: int | None = None
    ) -> Iterator[torch.Tensor]:
        """Read rows into `out`, a chunk ahead, and compare their checksum at the end, if there is one.

        `out` is as long as the column, or two chunks that take turns.
        """
        dataset = self._datasets[name]
        num_rows, is_whole = len(dataset), out.shape == self.shapes[name]
        expected = attribute(dataset, _CRC_TAG) if crc is None else crc
        place, row_bytes = _place(dataset), _row_bytes(dataset)

        def read(start: int, crc: int) -> tuple[torch.Tensor, int]:
            part = out[start : start + step] if is_whole else out[start // step % 2][: num_rows - start]
            array = _as_array(part)
            if place is None and array.size:
                dataset.read_direct(array, np.s_[start : start + len(part)])
            elif place is not None:
                self._read_at(place + start * row_bytes, _bytes(array), name)
            return part, 0 if expected is None else crc32(_bytes(array), crc)

        so_far, starts = 0, range(0, num_rows, step)
        following = pool.submit(read, 0, 0)
        for start in starts:
            part, so_far = following.result()
            if start != starts[-1]:
                following = pool.submit(read, start + step, so_far)
            yield part
        if expected is not None and so_far != int(expected):
            where = f"{name!r} of {str(self._path)!r}"
            raise CorruptFileError("load", where, f"checksum {int(expected):08x}", f"{so_far:08x}")

    def _read_at(self, place: int, data: memoryview, name: str) -> None:
        while data:
            count = os.preadv(self._handle, [data], place)
            if not count:
                raise CorruptFileError("read", repr(str(self._path)), f"all rows of {name!r}", "fewer")
            data, place = data[count:], place + count


def _name_of(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _as_array(part: torch.Tensor) -> npt.NDArray[Any]:
    return (part.view(torch.int16) if part.dtype is torch.bfloat16 else part).numpy()


def _bytes(part: npt.NDArray[Any]) -> memoryview:
    return part.reshape(-1).view(np.uint8).data if part.size else memoryview(b"")


def _row_bytes(dataset: h5py.Dataset) -> int:
    return int(dataset.dtype.itemsize) * int(prod(dataset.shape[1:]))


def _place(dataset: h5py.Dataset) -> int | None:
    """Say where rows stand in the file as they are in memory; None if HDF5 must unpack or convert them."""
    if dataset.chunks is not None or not dataset.size:
        return None
    is_same = dataset.id.get_type() == h5py.h5t.py_create(dataset.dtype, logical=True)
    return dataset.id.get_offset() if is_same and dataset.dtype.isnative else None
