"""Columns of a store in a folder: `buffer.hdf5` and `config.json`.

One rule: rows pass through chunks of memory, whatever the store's size. What the columns mean is not known
here, nor how a folder takes the place of another (see `durable.py`).
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt
import torch

from .checksums import crc32
from .durable import existing_folder
from .errors import CorruptFileError, DataFileError, SchemaError, UnsafeFileError
from .fields import Field, Schema, dtype_name
from .host_arrays import viewable
from .records import make_field

COLUMNS_NAME, CONFIG_NAME, FINALS_NAME = "buffer.hdf5", "config.json", "finals.hdf5"
#: All that a saved buffer consists of.
OWN_NAMES = frozenset({COLUMNS_NAME, CONFIG_NAME, FINALS_NAME})
#: Rows pass through memory of this size, twice: one chunk is laid out while the other is written.
CHUNK_BYTES = 8 << 20
#: Threads that read ahead, however many fields there are; several, as checksums take as long as reading.
_NUM_READERS = 4
#: So much is written before flushing begins.
_FLUSH_BYTES = 128 << 20
#: Bytes that one of a compressed dataset may stand for; deflate makes 1032 of it at most.
_MAX_GAIN = 1100
#: Attribute of datasets whose numpy type does not say the dtype.
_DTYPE_TAG = "torch_dtype"
_CRC_TAG = "crc32"
#: Entry of the config, and attribute of each file, that says which save they are of.
SAVE_ID = "save_id"


class MissingFolderError(DataFileError, FileNotFoundError):
    """A folder that should be loaded is not there."""

    __str__ = DataFileError.__str__


#: (field name, first row, last row) -> that part of the column, `[rows, ...]`.
ReadRows = Callable[[str, int, int], torch.Tensor]
#: (bytes, sum of those before them) -> sum.
AddUp = Callable[[Any, int], int]
#: (first row, rows, the sum up to their end).
_Chunk = tuple[int, npt.NDArray[Any], int]


def file_keys(names: list[str], separator: str) -> dict[str, str]:
    """Join the levels of names by `separator`: flat name -> key in the file. Ambiguity is an error."""
    if not isinstance(separator, str) or not separator or "/" in separator:
        raise SchemaError("save columns", "", "a separator that is not empty and has no '/'", repr(separator))
    for name in names:
        for part in name.split("/"):
            if separator in part:
                expected = f"keys without the separator {separator!r}"
                raise SchemaError("save the field", repr(name), expected, repr(part), "Give another separator")
    keys = {name: name.replace("/", separator) for name in names}
    for name, key in keys.items():
        # HDF5 would end the first too early, take the second for the folder itself, and knows no others.
        if "\0" in key or key in ("", ".") or any("\ud800" <= letter <= "\udfff" for letter in key):
            raise SchemaError("save the field", repr(name), "a key that is text, not '.', without null", repr(key))
    return keys


def write_columns(
    path: Path,
    schema: Schema,
    num_rows: int,
    lead: tuple[int, ...],
    read: ReadRows,
    keys: Mapping[str, str],
    save_id: str = "",
) -> None:
    """Write `[num_rows, *lead, *event]` datasets, with checksums, a chunk at a time.

    Args:
        path: The new file.
        schema: The fields.
        num_rows: Rows of each.
        lead: Axes between the rows and the event.
        read: Gives parts of a column, from any device; called in order.
        keys: Names in the file.
        save_id: Tells files of one save from those of another; "" for none.
    """
    with h5py.File(path, "w", libver=("v110", "v110"), track_order=True) as file, _Appender(path) as appender:
        datasets = {
            name: _create(file, keys[name], (num_rows, *lead, *field.shape), field) for name, field in schema.items()
        }
        if save_id:
            file.attrs[SAVE_ID] = save_id
        file.flush()
        for name, field in schema.items():
            row_bytes = max(1, field.row_bytes * int(np.prod(lead, dtype=np.int64)))
            step = max(1, CHUNK_BYTES // row_bytes)
            place = datasets[name].id.get_offset() or 0
            # Two rooms, for all chunks: fresh memory for each would cost as much as writing it.
            shape = (2, min(step, num_rows), *lead, *field.shape)
            rooms = torch.empty(shape, dtype=field.torch_dtype, device="cpu")
            crc = 0
            for number, start in enumerate(range(0, num_rows, step)):
                part = rooms[number % 2][: num_rows - start].copy_(read(name, start, min(start + step, num_rows)))
                data = _bytes(_as_array(part))
                appender.put(data, place + start * row_bytes)
                crc = crc32(data, crc)
            appender.wait()
            datasets[name].attrs[_CRC_TAG] = np.uint32(crc)


def _create(file: h5py.File, key: str, shape: tuple[int, ...], field: Field) -> h5py.Dataset:
    """Make a contiguous dataset whose place in the file is known at once."""
    options = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    options.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    options.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    dtype = h5py.h5t.py_create(_file_dtype(field), logical=True)
    dataset = h5py.Dataset(h5py.h5d.create(file.id, key.encode(), dtype, h5py.h5s.create_simple(shape), options))
    if field.dtype == "bfloat16":
        dataset.attrs[_DTYPE_TAG] = "bfloat16"
    return dataset


class _Appender:
    """Write chunks in a thread while the next one is laid out, and flush them to the disk in another.

    Two chunks are in memory. When the file is closed little is left to be flushed, which takes a third of the time
    of saving otherwise.
    """

    def __init__(self, path: Path) -> None:
        self._handle = os.open(path, os.O_WRONLY)
        self._writer, self._flusher = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self._written: Future[None] | None = None
        self._flushed: Future[None] | None = None
        self._unflushed_bytes = 0

    def __enter__(self) -> _Appender:
        return self

    def put(self, data: memoryview | bytes, place: int) -> None:
        """Begin to write a chunk, which must not change until then; wait until the one before it is written."""
        following = self._writer.submit(self._write, data, place)
        self.wait()
        self._written = following
        self._unflushed_bytes += len(data)
        if self._unflushed_bytes >= _FLUSH_BYTES and (self._flushed is None or self._flushed.done()):
            if self._flushed is not None:
                self._flushed.result()
            self._flushed, self._unflushed_bytes = self._flusher.submit(os.fdatasync, self._handle), 0

    def __exit__(self, kind: object, *_: object) -> None:
        self._writer.shutdown()
        self._flusher.shutdown()
        os.close(self._handle)
        if kind is None:
            self.wait()
            if self._flushed is not None:
                self._flushed.result()

    def wait(self) -> None:
        """Wait until all chunks are written; raise what went wrong."""
        if self._written is not None:
            self._written.result()

    def _write(self, data: memoryview | bytes, place: int) -> None:
        written = 0
        while written < len(data):
            written += os.pwrite(self._handle, data[written:], place + written)


class ColumnFile:
    """Read what `write_columns` wrote, or what an earlier system did.

    Args:
        path: The file.
        separator: Joins levels of names in it.
        save_id: Of the save that the file should be of, if that is known and the file tells.

    Raises:
        CorruptFileError, UnsafeFileError: Naming the file and the dataset.
    """

    def __init__(self, path: Path, separator: str, save_id: object = None) -> None:
        self.path = path
        _check_is_file(path)
        try:
            self._file = h5py.File(path, "r", driver="sec2")  # whose handle is a descriptor
        except OSError as cause:
            raise CorruptFileError("open", repr(str(path)), "an HDF5 file", str(cause).splitlines()[0]) from cause
        found = self._file.attrs.get(SAVE_ID)
        if save_id is not None and found is not None and str(found) != save_id:
            self.close()
            raise CorruptFileError("load", repr(str(path)), f"a file of the save {save_id!r}", f"one of {str(found)!r}")
        self._handle = self._file.id.get_vfd_handle()
        self._datasets = {key: self._dataset(key) for key in self._file}
        self.names = {key.replace(separator, "/"): key for key in self._datasets}
        self.shapes = {name: self._datasets[key].shape for name, key in self.names.items()}

    def __enter__(self) -> ColumnFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    @property
    def num_rows(self) -> int:
        """Rows of every dataset; unequal numbers are an error."""
        lengths = {name: shape[0] for name, shape in self.shapes.items()}
        if len(set(lengths.values())) > 1:
            raise SchemaError("load", repr(str(self.path)), "datasets of equal length", str(lengths))
        return next(iter(lengths.values()), 0)

    def schema(self, num_lead: int) -> Schema:
        """Say which fields there are; `num_lead` axes come before the event."""
        return Schema(
            make_field(name, self._datasets[key].shape[num_lead:], self._dtype(key)) for name, key in self.names.items()
        )

    def rows(self) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
        """Yield (first row, rows of every dataset), as `chunks` does; together they take as much memory as one does.

        Whoever lays fields side by side passes through his memory once instead of once per field.
        """
        row_bytes = sum(_row_bytes(self._datasets[key]) for key in self.names.values())
        step = max(1, CHUNK_BYTES // max(1, row_bytes))
        with ThreadPoolExecutor(_NUM_READERS) as pool:
            for parts in zip(*(self._checked_chunks(name, step, pool) for name in self.names), strict=True):
                yield parts[0][0], {name: part for name, (_, part) in zip(self.names, parts, strict=True)}

    def chunks(self, name: str) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (first row, rows) of a dataset, and check its checksum at the end, if it has one.

        The rows are there until the next ones are asked for, which are read meanwhile: two chunks are in memory.
        """
        step = max(1, CHUNK_BYTES // max(1, _row_bytes(self._datasets[self.names[name]])))
        with ThreadPoolExecutor(_NUM_READERS) as pool:
            yield from self._checked_chunks(name, step, pool)

    def _checked_chunks(self, name: str, step: int, pool: ThreadPoolExecutor) -> Iterator[tuple[int, torch.Tensor]]:
        key = self.names[name]
        dataset = self._datasets[key]
        is_bfloat16 = self._dtype(key) == "bfloat16"
        expected, crc = dataset.attrs.get(_CRC_TAG), 0
        add_up = crc32 if expected is not None else _no_sum
        is_plain = _is_plain(dataset)
        parts = self._raw_chunks(dataset, step, add_up, pool) if is_plain else _decoded_chunks(dataset, step, add_up)
        for start, part, crc_so_far in parts:
            crc = crc_so_far
            tensor = torch.from_numpy(viewable(part))
            yield start, tensor.view(torch.bfloat16) if is_bfloat16 else tensor
        if expected is not None and crc != int(expected):
            raise CorruptFileError("load", f"{name!r} of {str(self.path)!r}", f"checksum {expected:08x}", f"{crc:08x}")

    def _raw_chunks(
        self, dataset: h5py.Dataset, step: int, add_up: AddUp, pool: ThreadPoolExecutor
    ) -> Iterator[_Chunk]:
        """Read rows from where they stand in the file, a chunk ahead."""
        place, row_bytes = dataset.id.get_offset(), _row_bytes(dataset)
        room = [np.empty((min(step, len(dataset)), *dataset.shape[1:]), dataset.dtype) for _ in range(2)]

        def read(start: int, crc: int) -> tuple[npt.NDArray[Any], int]:
            part = room[start // step % 2][: len(dataset) - start]
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

    def _dataset(self, key: str) -> h5py.Dataset:
        where = f"{key!r} of {str(self.path)!r}"
        link = self._file.get(key, getlink=True)
        if not isinstance(link, h5py.HardLink):
            raise UnsafeFileError("load", where, "a dataset in the file itself", type(link).__name__)
        found = self._file[key]
        if not isinstance(found, h5py.Dataset):
            raise CorruptFileError("load", where, "a dataset", type(found).__name__)
        if found.is_virtual or found.external:
            raise UnsafeFileError("load", where, "data in the file itself", "a reference to other files")
        if not found.shape:
            raise CorruptFileError("load", where, "rows", f"shape {found.shape}")
        file_bytes = os.fstat(self._handle).st_size
        packed_bytes = 0 if found.chunks is None else min(found.id.get_storage_size(), file_bytes)
        if found.size * found.dtype.itemsize > max(file_bytes, packed_bytes * _MAX_GAIN):
            raise CorruptFileError("load", where, "a file that holds its data", f"{file_bytes} bytes")
        return found

    def _dtype(self, key: str) -> str:
        dataset = self._datasets[key]
        tag = str(dataset.attrs.get(_DTYPE_TAG, ""))
        if tag == "bfloat16" and dataset.dtype.itemsize == 2:
            return tag
        if dataset.dtype.kind == "c":
            return str(dataset.dtype.newbyteorder("="))
        return dtype_name(dataset.dtype, f"of {key!r} in {str(self.path)!r}")


def write_config(path: Path, config: Mapping[str, Any]) -> None:
    """Write JSON; checked for being JSON before the file is made."""
    text = json.dumps(config, indent=1)
    path.write_text(text + "\n", encoding="utf-8")


def read_config(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a folder's `config.json`."""
    path = existing_folder(folder) / CONFIG_NAME
    try:
        try:
            text = _text(path)
        except FileNotFoundError:  # perhaps it was replaced at this moment: look again
            path = existing_folder(folder) / CONFIG_NAME
            text = _text(path)
        found = json.loads(text)
    except FileNotFoundError as cause:
        raise MissingFolderError("load", repr(str(folder)), f"a folder with {CONFIG_NAME}", "none") from cause
    except (OSError, ValueError, RecursionError) as cause:
        raise CorruptFileError("read", repr(str(path)), "JSON", str(cause)) from cause
    if not isinstance(found, dict):
        raise CorruptFileError("read", repr(str(path)), "a JSON object", type(found).__name__)
    return found


def _text(path: Path) -> str:
    _check_is_file(path)
    return path.read_text(encoding="utf-8")


def _check_is_file(path: Path) -> None:
    """Refuse a pipe or device, which would be waited for; that nothing is there, opening says."""
    with suppress(OSError):
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise CorruptFileError("open", repr(str(path)), "a file", "something else")


def _file_dtype(field: Field) -> np.dtype[Any]:
    return np.dtype("<i2") if field.dtype == "bfloat16" else field.numpy_dtype


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
    return int(dataset.dtype.itemsize) * int(np.prod(dataset.shape[1:], dtype=np.int64))


def _no_sum(data: Any, crc: int) -> int:
    """Add up nothing, for files of earlier systems, which have no checksums."""
    return crc


def _bytes(part: npt.NDArray[Any]) -> memoryview | bytes:
    return np.ascontiguousarray(part).reshape(-1).view(np.uint8).data if part.size else b""
