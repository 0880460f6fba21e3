"""The datasets of a block file as HDF5 knows them: found, checked, and read or located.

One rule: what a file declares is compared with what it must be before anything is read, so that no declaration
costs memory or leads out of the file. What the tables mean is decided in `block_header.py`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from storage.errors import CorruptFileError
from storage.hdf5_files import member

#: A larger table must be written: a hole in a file costs its sender nothing, and its reader memory.
MAX_HOLLOW_BYTES = 1 << 20
#: Size of a row of the table of fragments.
FRAGMENT_BYTES = 64
#: A table with a row for each fragment, of 128 rewards or 256 columns at most, may be zeros as a whole, up to a size.
MAX_HOLLOW_ROW_BYTES, MAX_HOLLOW_TABLE_BYTES = 1024, 64 << 20


def corrupt(path: Path, expected: str, got: str) -> CorruptFileError:
    """Build the error for a damaged block."""
    advice = f"Run 'rollout-data verify --repair {path.parent}' to set it aside; the other blocks stay readable"
    return CorruptFileError("read the block", repr(str(path)), expected, got, advice)


def _dataset(path: Path, file: h5py.File, name: str) -> h5py.Dataset:
    node = member(file, name, path)
    if not isinstance(node, h5py.Dataset) or node.chunks is not None:
        raise corrupt(path, f"a dataset {name!r} stored contiguously", "something else")
    return node


def read_table(
    path: Path, file: h5py.File, name: str, file_bytes: int, dtype: np.dtype[Any], shape: tuple[int, ...]
) -> np.ndarray:
    """Read a table of this dtype and shape, -1 for any size; nothing is read of another one, or of a hollow one."""
    dataset = _dataset(path, file, name)
    is_shape = dataset.ndim == len(shape) and all(n in (-1, m) for n, m in zip(shape, dataset.shape, strict=True))
    if dataset.dtype != dtype or not is_shape:
        raise corrupt(path, f"{name!r} as {dtype} of shape {shape}", f"{dataset.dtype} of shape {dataset.shape}")
    declared = int(dataset.size) * dtype.itemsize
    if declared > file_bytes:
        raise corrupt(path, f"a table {name!r} within the {file_bytes} bytes of the file", f"{declared} bytes")
    # What takes little more than the fragments, which were read before, may be zeros and thus become a hole in a copy.
    wide = min(shape[0] * MAX_HOLLOW_ROW_BYTES, MAX_HOLLOW_TABLE_BYTES)
    may_be_hollow = declared <= max(MAX_HOLLOW_BYTES, shape[0] * FRAGMENT_BYTES, wide)
    if not may_be_hollow and _is_hollow(path, dataset.id.get_offset(), declared):
        raise corrupt(path, f"a table {name!r} that was written", f"{declared} bytes with a hole in them")
    return np.asarray(dataset[()])


def _is_hollow(path: Path, offset: int | None, num_bytes: int) -> bool:
    """Whether a part of the file is not on the disk; no, where the file system cannot tell."""
    if offset is None:
        return True
    with open(path, "rb", buffering=0) as file:
        return os.lseek(file.fileno(), offset, os.SEEK_HOLE) < offset + num_bytes


def locate(path: Path, file: h5py.File, name: str, dtype: np.dtype[Any], file_bytes: int) -> tuple[int, int]:
    """Find where a column's rows lie: (byte offset, number of rows)."""
    dataset = _dataset(path, file, name)
    if dataset.dtype != dtype or dataset.ndim != 1:
        raise corrupt(
            path, f"{name!r} as one row of {dtype} per frame", f"{dataset.dtype} in {dataset.ndim} dimensions"
        )
    num_rows = int(dataset.shape[0])
    offset = dataset.id.get_offset()
    if num_rows == 0:
        return 0, 0
    if offset is None or offset % 64 or offset + num_rows * dtype.itemsize > file_bytes:
        raise corrupt(
            path, f"{num_rows} rows of {name!r} at a multiple of 64 within {file_bytes} bytes", f"offset {offset}"
        )
    return int(offset), num_rows
