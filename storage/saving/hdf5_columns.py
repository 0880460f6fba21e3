"""Columns of numbers in an HDF5 file: written and read in chunks, with a checksum each.

One rule: rows pass through chunks of memory, whatever their number. HDF5 itself writes into memory only, and what is
read is first checked against the length of the file. What the columns mean is not known here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from math import prod
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt
import torch

from ..core.durable_files import crc32
from ..core.fields import DTYPES, Schema, dtype_name
from ..core.records import COMPLEX_DTYPES, make_field
from ..core.threads import Worker
from ..errors import CorruptFileError, SchemaError
from .hdf5_files import Allowance, SparseFile, attribute, begin_file, member, open_hdf5, reserve, write_at

#: Rows pass through memory of this size, twice: one chunk is filled while the other is written or used.
CHUNK_BYTES = 8 << 20
#: Threads that read ahead, however many columns there are; several, as checksums take as long as reading.
_NUM_READERS = 4
#: So much is written before it is flushed beside the writing; to flush all at the end takes a third longer.
_FLUSH_BYTES = 128 << 20
#: Rows start at a multiple of this, so that they can be mapped.
_ALIGNMENT = 64
#: Attribute of each file, and entry of the config, that says which save they are of.
SAVE_ID = "save_id"
#: Attributes of datasets: the dtype where numpy has none, and the checksum.
_DTYPE_TAG, _CRC_TAG = "torch_dtype", "crc32"
#: Name -> dtype in memory and in the file.
_DTYPES = {**DTYPES, **COMPLEX_DTYPES, "bfloat16": (torch.bfloat16, np.dtype("<i2"))}


class Table:
    """Rows of several columns; here of tensors, which are not copied.

    Attributes:
        shapes: Of each column by name, rows first.
        dtypes: Names of their dtypes.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = dict(tensors)
        self.shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        self.dtypes = {name: name_of(tensor) for name, tensor in tensors.items()}

    @property
    def num_rows(self) -> int:
        """Rows of every column; unequal numbers are an error."""
        lengths = {name: shape[0] for name, shape in self.shapes.items()}
        if len(set(lengths.values())) > 1:
            raise SchemaError("load rows", expected="columns of equal length", got=str(lengths))
        return next(iter(lengths.values()), 0)

    def schema(self, num_lead: int) -> Schema:
        """Return which fields there are; `num_lead` axes come before the event."""
        if any(len(shape) < num_lead for shape in self.shapes.values()):
            raise SchemaError("load rows", expected=f"columns of at least {num_lead} axes", got=str(self.shapes))
        return Schema(make_field(name, shape[num_lead:], self.dtypes[name]) for name, shape in self.shapes.items())

    def rows(self) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
        """Yield (first row, rows of every column) from the first row to the last; a chunk lasts until the next one."""
        yield 0, self._tensors

    def read(self, name: str) -> torch.Tensor:
        """Return all rows of a column."""
        return self._tensors[name]


def write_columns(path: Path, columns: Mapping[str, torch.Tensor], save_id: str) -> None:
    """Write tensors from any device as datasets.

    Args:
        path: The new file.
        columns: By the name in the file, rows first; they may be views.
        save_id: Tells files of one save from those of another.

    Raises:
        OSError: The disk is full.
    """
    header = SparseFile()
    num_unflushed = 0
    with ExitStack() as stack:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        stack.callback(os.close, handle)
        writer = Worker("a save", 0)
        flusher = Worker("the flushing of a save", 0)
        stack.callback(writer.close)
        stack.callback(flusher.close)
        file = stack.enter_context(begin_file(header, _ALIGNMENT, keeps_order=True))
        places = {name: reserve(file, name, _DTYPES[name_of(x)][1], tuple(x.shape)) for name, x in columns.items()}
        file.attrs[SAVE_ID] = save_id
        for name, column in columns.items():
            place = places[name]
            crc = 0
            for data in _chunks_of(column):
                writer.submit(write_at, handle, data, place)  # waits until the chunk before it is written
                place = place + len(data)
                crc = crc32(data, crc)
                num_unflushed = num_unflushed + len(data)
                if num_unflushed >= _FLUSH_BYTES and not flusher.num_pending:
                    flusher.submit(os.fdatasync, handle)
                    num_unflushed = 0
            file[name].attrs[_CRC_TAG] = np.uint32(crc)
            if column.dtype is torch.bfloat16:
                file[name].attrs[_DTYPE_TAG] = "bfloat16"
        file.close()
        header.write_to(handle)


def _chunks_of(column: torch.Tensor) -> Iterator[memoryview]:
    """Lay out the rows of a column; the bytes of a chunk last until the next but one."""
    step = _chunk_rows(prod(column.shape[1:]) * column.element_size())
    # Fresh memory for each chunk would cost as much as writing it.
    rooms = torch.empty((2, min(step, len(column)), *column.shape[1:]), dtype=column.dtype, device="cpu")
    for number, part in enumerate(torch.split(column, step)):
        yield _bytes(_as_array(rooms[number % 2][: len(part)].copy_(part)))


@contextmanager
def open_columns(path: Path, save_id: object, names: Iterable[str] | Callable[[str], str]) -> Iterator[StoredTable]:
    """Open what `write_columns` wrote, or what an earlier system did.

    Args:
        path: The file.
        save_id: Of the save that the file should be of, if that is known and the file tells; or None.
        names: Of the datasets to read; or what turns each key of the file into the name of a column.

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
            keys = {names(key): key for key in file} if callable(names) else {name: name for name in names}
            yield StoredTable(path, handle.fileno(), {name: member(file, key, path) for name, key in keys.items()})
    except FileNotFoundError as cause:
        raise CorruptFileError("load", repr(str(path.parent)), f"the file {path.name}", "none") from cause


class StoredTable(Table):
    """The datasets of an open file.

    Args:
        path: The file.
        handle: Its descriptor.
        datasets: By the names of columns.

    Attributes:
        sums: Checksums that columns should have; None where that is not known.

    Raises:
        CorruptFileError: A dataset is no rows of numbers, or all are together larger than the file.
    """

    def __init__(self, path: Path, handle: int, datasets: Mapping[str, Any]) -> None:
        self._path = path
        self._handle = handle
        self._datasets = datasets
        self.shapes = {}
        self.dtypes = {}
        self.sums: dict[str, int | None] = {}
        self._sums_so_far: dict[str, int] = {}
        allowance = Allowance(os.fstat(handle).st_size)
        for name, found in datasets.items():
            where = f"{name!r} of {str(path)!r}"
            if not isinstance(found, h5py.Dataset) or not found.shape or found.dtype.kind not in "biufc":
                got = f"{found.dtype} of shape {found.shape}" if isinstance(found, h5py.Dataset) else "a group"
                raise CorruptFileError("read", where, "rows of numbers", got)
            allowance.take(found, where)
            self.shapes[name], self.dtypes[name] = tuple(found.shape), _dtype_of(found, where)
            self.sums[name] = attribute(found, _CRC_TAG)

    def rows(self) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
        num_rows, step = self.num_rows, _chunk_rows(sum(map(_row_bytes, self._datasets.values())))
        rooms = [{name: self._empty(name, min(step, num_rows)) for name in self.shapes} for _ in range(2)]
        with ThreadPoolExecutor(_NUM_READERS) as pool:

            def ask(first: int) -> dict[str, Future[torch.Tensor]]:
                num_left = num_rows - first
                outs = rooms[first // step % 2] if num_left > 0 else {}
                return {name: pool.submit(self._fill, name, first, out[:num_left]) for name, out in outs.items()}

            following = ask(0)
            for first in range(0, num_rows, step):
                parts = {name: part.result() for name, part in following.items()}
                following = ask(first + step)
                yield first, parts

    def read(self, name: str) -> torch.Tensor:
        num_rows = self.shapes[name][0]
        step = _chunk_rows(_row_bytes(self._datasets[name]))
        found = self._empty(name, num_rows)
        for first in range(0, num_rows, step):
            self._fill(name, first, found[first : first + step])
        return found

    def _empty(self, name: str, num_rows: int) -> torch.Tensor:
        return torch.empty((num_rows, *self.shapes[name][1:]), dtype=_DTYPES[self.dtypes[name]][0], device="cpu")

    def _fill(self, name: str, first: int, out: torch.Tensor) -> torch.Tensor:
        """Read rows from `first` on into `out`; in order, so that the checksum is known after the last ones."""
        dataset = self._datasets[name]
        array = _as_array(out)
        data = _bytes(array)
        place = _place(dataset)
        if place is None and array.size:
            dataset.read_direct(array, np.s_[first : first + len(out)])
        elif place is not None:
            self._read_at(place + first * _row_bytes(dataset), data, name)
        if (expected := self.sums[name]) is not None:
            crc = self._sums_so_far[name] = crc32(data, self._sums_so_far[name] if first else 0)
            if first + len(out) == len(dataset) and crc != int(expected):
                where = f"{name!r} of {str(self._path)!r}"
                raise CorruptFileError("load", where, f"checksum {int(expected):08x}", f"{crc:08x}")
        return out

    def _read_at(self, place: int, data: memoryview, name: str) -> None:
        while data:
            count = os.preadv(self._handle, [data], place)
            if not count:
                raise CorruptFileError("read", repr(str(self._path)), f"all rows of {name!r}", "fewer")
            data = data[count:]
            place = place + count


def name_of(tensor: torch.Tensor) -> str:
    """Return the name of a tensor's dtype."""
    return str(tensor.dtype).removeprefix("torch.")


def _dtype_of(dataset: h5py.Dataset, where: str) -> str:
    if attribute(dataset, _DTYPE_TAG) == "bfloat16" and dataset.dtype.itemsize == 2:
        return "bfloat16"
    if dataset.dtype.kind == "c":
        return str(dataset.dtype.newbyteorder("="))
    return dtype_name(dataset.dtype, f"of {where}")


def _chunk_rows(row_bytes: int) -> int:
    return max(1, CHUNK_BYTES // max(1, row_bytes))


def _as_array(part: torch.Tensor) -> npt.NDArray[Any]:
    return (part.view(torch.int16) if part.dtype is torch.bfloat16 else part).numpy()


def _bytes(part: npt.NDArray[Any]) -> memoryview:
    return part.reshape(-1).view(np.uint8).data if part.size else memoryview(b"")


def _row_bytes(dataset: h5py.Dataset) -> int:
    return int(dataset.dtype.itemsize) * int(prod(dataset.shape[1:]))


def _place(dataset: h5py.Dataset) -> int | None:
    """Return where rows stand in the file as they are in memory; None if HDF5 must unpack or convert them."""
    if dataset.chunks is not None or not dataset.size:
        return None
    is_same = dataset.id.get_type() == h5py.h5t.py_create(dataset.dtype, logical=True)
    return dataset.id.get_offset() if is_same and dataset.dtype.isnative else None
