"""Numeric columns in an HDF5 file, written and read in chunks, with a checksum per column.

A chunk has a fixed size in bytes, so that large columns are written without a second copy in
memory. The HDF5 library only writes the header of the file, to memory. Sizes in a file are compared
with the length of the file before memory is allocated.
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
from .hdf5_files import (
    Allowance,
    SparseFile,
    attribute,
    begin_file,
    member,
    open_hdf5,
    reserve,
    write_at,
)

#: Bytes per chunk of rows. While one chunk is written or used, the next chunk is filled.
CHUNK_BYTES = 8 << 20
#: Number of threads that prefetch chunks. Computing checksums takes as long as reading.
_NUM_READERS = 4
#: Bytes between flushes in the background. A single flush at the end takes a third longer.
_FLUSH_BYTES = 128 << 20
#: Alignment of the rows in a file, in bytes, so that the rows can be mapped into memory.
_ALIGNMENT = 64
#: Name of the save id, in the attributes of each file and in the config.
SAVE_ID = "save_id"
#: Attribute that marks datasets of bfloat16, which numpy does not have.
_DTYPE_TAG = "torch_dtype"
#: Attribute of datasets that contains their checksum.
_CRC_TAG = "crc32"
#: Torch dtype in memory and numpy dtype in the file, by the name of the dtype.
_DTYPES = {**DTYPES, **COMPLEX_DTYPES, "bfloat16": (torch.bfloat16, np.dtype("<i2"))}


class Table:
    """Columns in memory, with equal numbers of rows.

    Attributes:
        shapes: Shape of each column by name, rows first.
        dtypes: Name of the dtype of each column by name.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = dict(tensors)
        self.shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        self.dtypes = {name: name_of(tensor) for name, tensor in tensors.items()}

    @property
    def num_rows(self) -> int:
        """Number of rows of every column. Raises `SchemaError` if the numbers differ."""
        lengths = {name: shape[0] for name, shape in self.shapes.items()}
        if len(set(lengths.values())) > 1:
            raise SchemaError(f"the columns have different lengths: {lengths}.")
        return next(iter(lengths.values()), 0)

    def schema(self, num_lead: int) -> Schema:
        """Return the columns as fields. The first `num_lead` axes of columns are not event axes."""
        if any(len(shape) < num_lead for shape in self.shapes.values()):
            raise SchemaError(
                f"the columns must have at least {num_lead} axes, got the shapes {self.shapes}."
            )
        return Schema(
            make_field(name, shape[num_lead:], self.dtypes[name])
            for name, shape in self.shapes.items()
        )

    def rows(self) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
        """Yield all rows in chunks: (number of the first row, rows of each column by name).

        The tensors of a chunk are only valid until the next chunk is requested.
        """
        yield 0, self._tensors

    def read(self, name: str) -> torch.Tensor:
        """Return all rows of a column."""
        return self._tensors[name]


def write_columns(path: Path, columns: Mapping[str, torch.Tensor], save_id: str) -> None:
    """Write columns to a new HDF5 file, one dataset per column.

    Args:
        path: Path of the new file.
        columns: Tensors on any device by name in the file, rows first. Views are accepted.
        save_id: Id of the save, which is written to all its files.

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
        places = {
            name: reserve(file, name, _DTYPES[name_of(x)][1], tuple(x.shape))
            for name, x in columns.items()
        }
        file.attrs[SAVE_ID] = save_id
        for name, column in columns.items():
            place = places[name]
            crc = 0
            for data in _chunks_of(column):
                # `submit` waits until the previous chunk is written.
                writer.submit(write_at, handle, data, place)
                place += len(data)
                crc = crc32(data, crc)
                num_unflushed += len(data)
                if num_unflushed >= _FLUSH_BYTES and not flusher.num_pending:
                    flusher.submit(os.fdatasync, handle)
                    num_unflushed = 0
            file[name].attrs[_CRC_TAG] = np.uint32(crc)
            if column.dtype is torch.bfloat16:
                file[name].attrs[_DTYPE_TAG] = "bfloat16"
        file.close()
        header.write_to(handle)


def _chunks_of(column: torch.Tensor) -> Iterator[memoryview]:
    """Yield the bytes of a column in chunks of whole rows.

    Two buffers alternate. A chunk is overwritten when the second chunk after it is requested.
    """
    step = _chunk_rows(prod(column.shape[1:]) * column.element_size())
    # Reuse the buffers, because new memory for a chunk would cost as much as writing the chunk.
    buffers = torch.empty(
        (2, min(step, len(column)), *column.shape[1:]), dtype=column.dtype, device="cpu"
    )
    for number, part in enumerate(torch.split(column, step)):
        chunk = buffers[number % 2][: len(part)].copy_(part)
        yield _bytes(_as_array(chunk))


@contextmanager
def open_columns(
    path: Path, save_id: object, names: Iterable[str] | Callable[[str], str]
) -> Iterator[StoredTable]:
    """Open the HDF5 file of a save, also of an earlier system, as a table of columns.

    Args:
        path: Path of the file.
        save_id: Expected id of the save; None for any id. A file without an id is accepted.
        names: Names of the datasets to read. Instead, a function that maps the name of a dataset to
            the name of its column, to read all datasets.

    Raises:
        CorruptFileError: The file is missing or damaged. In the block, errors of the HDF5 library
            about the file are converted to this error.
        UnsafeFileError: The file refers to other files.
    """
    try:
        with open_hdf5(path) as (file, handle):
            id_of_file = attribute(file, SAVE_ID)
            if save_id is not None and id_of_file is not None and str(id_of_file) != save_id:
                raise CorruptFileError(
                    f"{str(path)!r} belongs to another save: expected id {save_id!r}, got "
                    f"{str(id_of_file)!r}."
                )
            if callable(names):
                keys = {names(key): key for key in file}
            else:
                keys = {name: name for name in names}
            datasets = {name: member(file, key, path) for name, key in keys.items()}
            yield StoredTable(path, handle.fileno(), datasets)
    except FileNotFoundError as cause:
        raise CorruptFileError(
            f"{str(path.parent)!r} does not contain the file {path.name}."
        ) from cause


class StoredTable(Table):
    """Table whose columns are datasets of an open HDF5 file.

    Args:
        path: Path of the file.
        handle: Descriptor of the file.
        datasets: Datasets by name of the column.

    Attributes:
        sums: Expected checksum of each column by name; None if unknown.

    Raises:
        CorruptFileError: A dataset does not consist of rows of numbers, or all datasets together
            are larger than the file.
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
        for name, dataset in datasets.items():
            where = f"{name!r} of {str(path)!r}"
            if not isinstance(dataset, h5py.Dataset):
                raise CorruptFileError(f"{where} is a group, expected a dataset of numbers.")
            if not dataset.shape or dataset.dtype.kind not in "biufc":
                raise CorruptFileError(
                    f"{where} has dtype {dataset.dtype} and shape {dataset.shape}, expected rows "
                    "of numbers."
                )
            allowance.take(dataset, where)
            self.shapes[name] = tuple(dataset.shape)
            self.dtypes[name] = _dtype_of(dataset, where)
            self.sums[name] = attribute(dataset, _CRC_TAG)

    def rows(self) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
        num_rows = self.num_rows
        step = _chunk_rows(sum(map(_row_bytes, self._datasets.values())))
        buffers = [
            {name: self._empty(name, min(step, num_rows)) for name in self.shapes} for _ in range(2)
        ]
        with ThreadPoolExecutor(_NUM_READERS) as pool:

            def prefetch(first: int) -> dict[str, Future[torch.Tensor]]:
                num_left = num_rows - first
                if num_left <= 0:
                    return {}
                outs = buffers[first // step % 2]
                return {
                    name: pool.submit(self._fill, name, first, out[:num_left])
                    for name, out in outs.items()
                }

            following = prefetch(0)
            for first in range(0, num_rows, step):
                parts = {name: part.result() for name, part in following.items()}
                following = prefetch(first + step)
                yield first, parts

    def read(self, name: str) -> torch.Tensor:
        num_rows = self.shapes[name][0]
        step = _chunk_rows(_row_bytes(self._datasets[name]))
        rows = self._empty(name, num_rows)
        for first in range(0, num_rows, step):
            self._fill(name, first, rows[first : first + step])
        return rows

    def _empty(self, name: str, num_rows: int) -> torch.Tensor:
        return torch.empty(
            (num_rows, *self.shapes[name][1:]), dtype=_DTYPES[self.dtypes[name]][0], device="cpu"
        )

    def _fill(self, name: str, first: int, out: torch.Tensor) -> torch.Tensor:
        """Read the rows of a column from row `first` on into `out`, and return `out`.

        The rows of a column must be read in order, because the checksum is computed during reading.
        The call that reads the last row compares the checksum.
        """
        dataset = self._datasets[name]
        array = _as_array(out)
        data = _bytes(array)
        place = _place(dataset)
        if place is None and array.size:
            dataset.read_direct(array, np.s_[first : first + len(out)])
        elif place is not None:
            self._read_at(place + first * _row_bytes(dataset), data, name)
        expected = self.sums[name]
        if expected is None:
            return out
        crc = crc32(data, self._sums_so_far[name] if first else 0)
        self._sums_so_far[name] = crc
        is_end = first + len(out) == len(dataset)
        if is_end and crc != int(expected):
            raise CorruptFileError(
                f"{name!r} of {str(self._path)!r} is damaged: expected checksum "
                f"{int(expected):08x}, got {crc:08x}."
            )
        return out

    def _read_at(self, place: int, data: memoryview, name: str) -> None:
        while data:
            count = os.preadv(self._handle, [data], place)
            if not count:
                raise CorruptFileError(
                    f"{str(self._path)!r} is truncated: rows of {name!r} are missing."
                )
            data = data[count:]
            place += count


def name_of(tensor: torch.Tensor) -> str:
    """Return the name of a tensor's dtype, such as "float32"."""
    return str(tensor.dtype).removeprefix("torch.")


def _dtype_of(dataset: h5py.Dataset, where: str) -> str:
    if attribute(dataset, _DTYPE_TAG) == "bfloat16" and dataset.dtype.itemsize == 2:
        return "bfloat16"
    if dataset.dtype.kind == "c":
        return str(dataset.dtype.newbyteorder("="))
    return dtype_name(dataset.dtype, where)


def _chunk_rows(row_bytes: int) -> int:
    return max(1, CHUNK_BYTES // max(1, row_bytes))


def _as_array(part: torch.Tensor) -> npt.NDArray[Any]:
    if part.dtype is torch.bfloat16:  # numpy does not have bfloat16.
        part = part.view(torch.int16)
    return part.numpy()


def _bytes(part: npt.NDArray[Any]) -> memoryview:
    return part.reshape(-1).view(np.uint8).data if part.size else memoryview(b"")


def _row_bytes(dataset: h5py.Dataset) -> int:
    return int(dataset.dtype.itemsize) * int(prod(dataset.shape[1:]))


def _place(dataset: h5py.Dataset) -> int | None:
    """Return the file offset of the rows of a dataset, to read them without the HDF5 library.

    Returns None if there are no rows, or if the library must decompress or convert them.
    """
    if dataset.chunks is not None or not dataset.size:
        return None
    is_same = dataset.id.get_type() == h5py.h5t.py_create(dataset.dtype, logical=True)
    return dataset.id.get_offset() if is_same and dataset.dtype.isnative else None
