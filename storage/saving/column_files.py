"""Columns of a store in a folder: `buffer.hdf5` and `config.json`.

One rule: rows pass through chunks of memory, whatever the store's size. What the columns mean is not known
here, nor how a folder takes the place of another (see `core/durable.py`).
"""

from __future__ import annotations

import errno
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import h5py
import numpy as np
import numpy.typing as npt
import torch

from ..core.checksums import crc32
from ..core.durable import existing_folder
from ..core.fields import DTYPES, Schema, dtype_name
from ..core.host_arrays import viewable
from ..core.records import COMPLEX_DTYPES, make_field
from ..errors import CorruptFileError, DataFileError, RolloutDataError, RolloutDataWarning, SchemaError
from .hdf5 import Allowance, SparseFile, attribute, begin_file, member, open_hdf5, reserve, write_at
from .plain_files import read_json

COLUMNS_NAME, CONFIG_NAME, FINALS_NAME = "buffer.hdf5", "config.json", "finals.hdf5"
#: All that a saved buffer consists of.
OWN_NAMES = frozenset({COLUMNS_NAME, CONFIG_NAME, FINALS_NAME})
#: Rows pass through memory of this size, twice: one chunk is laid out while the other is written.
CHUNK_BYTES = 8 << 20
#: Threads that read ahead, however many fields there are; several, as checksums take as long as reading.
_NUM_READERS = 4
#: So much is written before flushing begins.
_FLUSH_BYTES = 128 << 20
#: Rows start at a multiple of this, so that they can be mapped.
_ALIGNMENT = 64
#: Attribute of datasets whose numpy type does not say the dtype.
_DTYPE_TAG = "torch_dtype"
_CRC_TAG = "crc32"
#: Name -> dtype in memory and in the file.
_DTYPES = {**DTYPES, **COMPLEX_DTYPES, "bfloat16": (torch.bfloat16, np.dtype("<i2"))}
#: Entry of the config, and attribute of each file, that says which save they are of.
SAVE_ID = "save_id"
#: What values of wrong kinds make Python and torch raise.
NONSENSE = (ArithmeticError, AttributeError, LookupError, MemoryError, RuntimeError, TypeError, ValueError)
#: A folder that is saved anew each time while it is read is read so often; a read takes about as long as a save.
_MAX_READS, _MAX_LOOKS = 1000, 10
_Made = TypeVar("_Made")


class MissingFolderError(DataFileError, FileNotFoundError):
    """A folder that should be loaded is not there."""

    __str__ = DataFileError.__str__


@dataclass(frozen=True)
class Column:
    """A dataset to be written.

    Attributes:
        shape: Rows first.
        dtype: By name.
        read: (first row, last row) -> that part, `[rows, ...]`, from any device; called in order.
    """

    shape: tuple[int, ...]
    dtype: str
    read: Callable[[int, int], torch.Tensor]


#: (bytes, sum of those before them) -> sum.
AddUp = Callable[[Any, int], int]
#: (first row, rows, the sum up to their end).
_Chunk = tuple[int, npt.NDArray[Any], int]


def write_columns(path: Path, columns: Mapping[str, Column], save_id: str) -> dict[str, int]:
    """Write datasets with checksums, a chunk at a time; give the checksums. HDF5 itself writes into memory only.

    Args:
        path: The new file.
        columns: By the name in the file.
        save_id: Tells files of one save from those of another.

    Raises:
        OSError: The disk is full.
    """
    header, sums = SparseFile(), {}
    with begin_file(header, _ALIGNMENT, keeps_order=True) as file, _Appender(path) as appender:
        places = {key: reserve(file, key, _DTYPES[column.dtype][1], column.shape) for key, column in columns.items()}
        file.attrs[SAVE_ID] = save_id
        for key, column in columns.items():
            num_rows, (torch_dtype, dtype) = column.shape[0], _DTYPES[column.dtype]
            row_bytes = max(1, prod(column.shape[1:]) * dtype.itemsize)
            step = max(1, CHUNK_BYTES // row_bytes)
            # Two rooms, for all chunks: fresh memory for each would cost as much as writing it.
            shape = (2, min(step, num_rows), *column.shape[1:])
            rooms = torch.empty(shape, dtype=torch_dtype, device="cpu")
            crc = 0
            for number, start in enumerate(range(0, num_rows, step)):
                part = rooms[number % 2][: num_rows - start].copy_(column.read(start, min(start + step, num_rows)))
                data = _bytes(_as_array(part))
                appender.put(data, places[key] + start * row_bytes)
                crc = crc32(data, crc)
            appender.wait()
            sums[key] = crc
            file[key].attrs[_CRC_TAG] = np.uint32(crc)
            if column.dtype == "bfloat16":
                file[key].attrs[_DTYPE_TAG] = column.dtype
        file.close()
        header.write_to(appender.handle)
    return sums


class _Appender:
    """Write chunks in a thread while the next one is laid out, and flush them to the disk in another.

    Two chunks are in memory. When the file is closed little is left to be flushed, which takes a third of the time
    of saving otherwise.
    """

    def __init__(self, path: Path) -> None:
        self.handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._writer, self._flusher = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self._written: Future[None] | None = None
        self._flushed: Future[None] | None = None
        self._unflushed_bytes = 0

    def __enter__(self) -> _Appender:
        return self

    def put(self, data: memoryview | bytes, place: int) -> None:
        """Begin to write a chunk, which must not change until then; wait until the one before it is written."""
        following = self._writer.submit(write_at, self.handle, memoryview(data), place)
        self.wait()
        self._written = following
        self._unflushed_bytes += len(data)
        if self._unflushed_bytes >= _FLUSH_BYTES and (self._flushed is None or self._flushed.done()):
            if self._flushed is not None:
                self._flushed.result()
            self._flushed, self._unflushed_bytes = self._flusher.submit(os.fdatasync, self.handle), 0

    def __exit__(self, kind: object, *_: object) -> None:
        self._writer.shutdown()
        self._flusher.shutdown()
        os.close(self.handle)
        if kind is None:
            self.wait()
            if self._flushed is not None:
                self._flushed.result()

    def wait(self) -> None:
        """Wait until all chunks are written; raise what went wrong."""
        if self._written is not None:
            self._written.result()


@contextmanager
def open_columns(
    path: Path, separator: str, save_id: object = None, names: list[str] | None = None
) -> Iterator[ColumnFile]:
    """Open what `write_columns` wrote, or what an earlier system did.

    Args:
        path: The file.
        separator: Joins levels of names in it.
        save_id: Of the save that the file should be of, if that is known and the file tells.
        names: Which datasets; None for all that are not in groups.

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
            keys = {key.replace(separator, "/"): key for key in (file if names is None else names)}
            yield ColumnFile(path, handle, {name: member(file, key, path) for name, key in keys.items()})
    except FileNotFoundError as cause:
        raise CorruptFileError("load", repr(str(path.parent)), f"the file {path.name}", "none") from cause


class ColumnFile:
    """Read the datasets of an open file; nothing is read of those that are not plainly there.

    Args:
        path: The file.
        handle: Its descriptor.
        datasets: By the names of fields.
    """

    def __init__(self, path: Path, handle: int, datasets: Mapping[str, Any]) -> None:
        self.path, self._handle, self._datasets = path, handle, datasets
        allowance = Allowance(os.fstat(handle).st_size)
        for name, found in datasets.items():
            where = f"{name!r} of {str(path)!r}"
            if not isinstance(found, h5py.Dataset) or not found.shape or found.dtype.kind not in "biufc":
                got = f"{found.dtype} of shape {found.shape}" if isinstance(found, h5py.Dataset) else "a group"
                raise CorruptFileError("load", where, "rows of numbers", got)
            allowance.take(found, where)
        self.shapes = {name: tuple(found.shape) for name, found in datasets.items()}

    @property
    def num_rows(self) -> int:
        """Rows of every dataset; unequal numbers are an error."""
        lengths = {name: shape[0] for name, shape in self.shapes.items()}
        if len(set(lengths.values())) > 1:
            raise SchemaError("load", repr(str(self.path)), "datasets of equal length", str(lengths))
        return next(iter(lengths.values()), 0)

    def schema(self, num_lead: int) -> Schema:
        """Say which fields there are; `num_lead` axes come before the event."""
        return Schema(make_field(name, shape[num_lead:], self.dtype(name)) for name, shape in self.shapes.items())

    def dtype(self, name: str) -> str:
        """Give the name of a dataset's dtype."""
        dtype = self._datasets[name].dtype
        if attribute(self._datasets[name], _DTYPE_TAG) == "bfloat16" and dtype.itemsize == 2:
            return "bfloat16"
        if dtype.kind == "c":
            return str(dtype.newbyteorder("="))
        return dtype_name(dtype, f"of {name!r} in {str(self.path)!r}")

    def read(self, name: str, crc: int | None = None) -> torch.Tensor:
        """Read a dataset whole; compare its checksum with `crc` instead of its own."""
        found = torch.empty(self.shapes[name], dtype=_DTYPES[self.dtype(name)][0], device="cpu")
        into = _as_array(found) if _is_plain(self._datasets[name]) else None
        with ThreadPoolExecutor(1) as pool:
            for first, rows in self._checked_chunks(name, self._step(name), pool, crc, into):
                if into is None:
                    found[first : first + len(rows)] = rows
        return found

    def rows(self) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
        """Yield (first row, rows of every dataset), as `chunks` does; together they take as much memory as one does.

        Whoever lays fields side by side passes through his memory once instead of once per field.
        """
        row_bytes = sum(map(_row_bytes, self._datasets.values()))
        step = max(1, CHUNK_BYTES // max(1, row_bytes))
        with ThreadPoolExecutor(_NUM_READERS) as pool:
            for parts in zip(*(self._checked_chunks(name, step, pool) for name in self.shapes), strict=True):
                yield parts[0][0], {name: part for name, (_, part) in zip(self.shapes, parts, strict=True)}

    def chunks(self, name: str) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (first row, rows) of a dataset, and check its checksum at the end, if it has one.

        The rows are there until the next ones are asked for, which are read meanwhile: two chunks are in memory.
        """
        with ThreadPoolExecutor(_NUM_READERS) as pool:
            yield from self._checked_chunks(name, self._step(name), pool)

    def _step(self, name: str) -> int:
        return max(1, CHUNK_BYTES // max(1, _row_bytes(self._datasets[name])))

    def _checked_chunks(
        self, name: str, step: int, pool: ThreadPoolExecutor, expected: int | None = None, into: Any = None
    ) -> Iterator[tuple[int, torch.Tensor]]:
        dataset = self._datasets[name]
        is_bfloat16 = self.dtype(name) == "bfloat16"
        expected, crc = attribute(dataset, _CRC_TAG) if expected is None else expected, 0
        add_up = crc32 if expected is not None else _no_sum
        is_plain = _is_plain(dataset)
        parts = (
            self._raw_chunks(dataset, step, add_up, pool, into) if is_plain else _decoded_chunks(dataset, step, add_up)
        )
        for start, part, crc_so_far in parts:
            crc = crc_so_far
            tensor = torch.from_numpy(viewable(part))
            yield start, tensor.view(torch.bfloat16) if is_bfloat16 else tensor
        if expected is not None and crc != int(expected):
            raise CorruptFileError("load", f"{name!r} of {str(self.path)!r}", f"checksum {expected:08x}", f"{crc:08x}")

    def _raw_chunks(
        self, dataset: h5py.Dataset, step: int, add_up: AddUp, pool: ThreadPoolExecutor, into: Any
    ) -> Iterator[_Chunk]:
        """Read rows from where they stand in the file, a chunk ahead, into an array if there is one."""
        place, row_bytes = dataset.id.get_offset(), _row_bytes(dataset)
        num_rows = min(step, len(dataset)) if into is None else 0
        room = [np.empty((num_rows, *dataset.shape[1:]), dataset.dtype) for _ in range(2)]

        def read(start: int, crc: int) -> tuple[npt.NDArray[Any], int]:
            part = room[start // step % 2][: len(dataset) - start] if into is None else into[start : start + step]
            data, done = _bytes(part), 0
            while done < len(data):
                count = os.preadv(self._handle, [data[done:]], place + start * row_bytes + done)
                if not count:
                    expected = f"{len(dataset)} rows of {dataset.name!r}"
                    raise CorruptFileError("read", repr(str(self.path)), expected, "fewer")
                done += count
            return part, add_up(data, crc)

        following = pool.submit(read, 0, 0)
        for start in range(0, len(dataset), step):
            part, crc = following.result()
            if start + step < len(dataset):
                following = pool.submit(read, start + step, crc)
            yield start, part, crc


def read_config(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a folder's `config.json`."""
    for _ in range(_MAX_LOOKS):
        try:
            return read_json(existing_folder(folder) / CONFIG_NAME)
        except FileNotFoundError as error:  # perhaps it was replaced at this moment: look again
            cause = error
    raise MissingFolderError("load", repr(str(folder)), f"a folder with {CONFIG_NAME}", "none") from cause


def load_one_save(path: str | os.PathLike[str], load: Callable[[dict[str, Any]], _Made]) -> _Made:
    """Load a folder by its config; again, as long as another process saves meanwhile and the files are not of one save.

    Args:
        path: The folder.
        load: Loads what a config says; raises if a file is of another save.
    """
    config = read_config(path)
    for _ in range(_MAX_READS):
        try:
            with as_damage(path):
                return load(config)
        except (RolloutDataError, OSError):
            newer = read_config(path)
            if newer.get(SAVE_ID) == config.get(SAVE_ID):
                raise
            config = newer
    with as_damage(path):
        return load(config)


@contextmanager
def as_damage(path: str | os.PathLike[str]) -> Iterator[None]:
    """Report what a folder's content makes Python raise as damage to the folder, and name it in every error."""
    try:
        yield
    except (*NONSENSE, OSError, RolloutDataError) as cause:
        if isinstance(cause, RolloutDataError):
            if str(path) not in cause.where:
                cause.where = f"{cause.where} from {str(path)!r}".strip()
            raise
        is_no_memory = isinstance(cause, OSError) and cause.errno == errno.ENOMEM  # mapping so much was refused
        is_damage = is_no_memory or isinstance(cause, NONSENSE)
        if not is_damage or isinstance(cause, torch.cuda.OutOfMemoryError):
            raise
        got = f"{type(cause).__name__}: {cause}"
        raise CorruptFileError("load", repr(str(path)), "what save() wrote", got) from cause


def _as_array(part: torch.Tensor) -> npt.NDArray[Any]:
    return (part.view(torch.int16) if part.dtype is torch.bfloat16 else part).numpy()


def _is_plain(dataset: h5py.Dataset) -> bool:
    """Tell whether the rows stand in the file as they are in memory, and nothing in them is a reference."""
    if dataset.chunks is not None or not dataset.size or dataset.dtype.kind not in "biufc":
        return False
    is_same = dataset.id.get_type() == h5py.h5t.py_create(dataset.dtype, logical=True)
    return bool(is_same) and dataset.id.get_offset() is not None


def _decoded_chunks(dataset: h5py.Dataset, step: int, add_up: AddUp) -> Iterator[_Chunk]:
    """Read rows that are compressed, or nowhere in the file because nobody wrote them."""
    crc = 0
    for start in range(0, len(dataset), step):
        part = dataset[start : start + step]
        crc = add_up(_bytes(part), crc)
        yield start, part, crc


def _row_bytes(dataset: h5py.Dataset) -> int:
    return int(dataset.dtype.itemsize) * int(prod(dataset.shape[1:]))


def _no_sum(data: Any, crc: int) -> int:
    """Add up nothing, for files of earlier systems, which have no checksums."""
    return crc


def _bytes(part: npt.NDArray[Any]) -> memoryview | bytes:
    return np.ascontiguousarray(part).reshape(-1).view(np.uint8).data if part.size else b""


def whole_column(leaf: torch.Tensor) -> Column:
    """Describe a tensor as a dataset to be written."""
    return Column(tuple(leaf.shape), str(leaf.dtype).removeprefix("torch."), lambda first, last: leaf[first:last])


def device_for(saved: Any, wanted: torch.device | str | None) -> torch.device:
    """Choose where to load to: the argument wins; a device that is not here becomes the CPU, with a warning."""
    if wanted is not None:
        return torch.device(wanted)
    found = torch.device(saved if isinstance(saved, str) else "cpu")
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        warnings.warn(f"{saved!r} is not here; the buffer is loaded onto the CPU", RolloutDataWarning, stacklevel=3)
        return torch.device("cpu")
    return found
