"""HDF5 files of other systems as nested dicts of arrays and texts: every rule for reading them is here.

One rule: nothing in the file is trusted. Data are taken from the file itself, by hard links only, and are compared with
its length before they are read; groups and datasets are counted, as links can make a cycle; texts and numbers are the
only values. What they mean is decided by the caller.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from storage.core.fields import dtype_name
from storage.errors import CorruptFileError, FieldTypeError
from storage.saving.hdf5 import Allowance, attribute, member, open_hdf5

#: Groups in groups, and datasets of a group and all below it.
_MAX_DEPTH, _MAX_MEMBERS = 64, 4096


class ForeignHdf5:
    """An open HDF5 file of another system; made by `open_foreign_hdf5`."""

    def __init__(self, file: h5py.File, path: Path, num_bytes: int) -> None:
        self._file, self.path, self._allowance = file, path, Allowance(num_bytes)

    def attribute(self, name: str) -> Any:
        """Give an attribute of the file, one small value; None if there is none, or another kind of value."""
        return attribute(self._file, name)

    def read_group(self, name: str) -> dict[str, Any]:
        """Read a group: nested dicts of arrays, and of texts, of which an array gives its first.

        Raises:
            CorruptFileError: There is no such group, or it holds more than its file can.
            FieldTypeError: A dataset holds neither numbers nor texts.
            UnsafeFileError: A link leads out of the file.
        """
        group = member(self._file, name, self.path)
        if not isinstance(group, h5py.Group):
            raise CorruptFileError("read", repr(str(self.path)), f"a group {name!r}", "a dataset")
        return self._read(group, iter(range(_MAX_MEMBERS)), 1)

    def _read(self, group: h5py.Group, numbers: Iterator[int], depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name in group:
            if depth > _MAX_DEPTH or next(numbers, None) is None:
                expected = f"at most {_MAX_DEPTH} groups in groups and {_MAX_MEMBERS} datasets"
                raise CorruptFileError("read", repr(str(self.path)), expected, "more, or a cycle")
            one = member(group, name, self.path)
            is_group = isinstance(one, h5py.Group)
            found[name] = self._read(one, numbers, depth + 1) if is_group else self._read_dataset(one)
        return found

    def _read_dataset(self, dataset: h5py.Dataset) -> Any:
        where = f"{dataset.name!r} of {str(self.path)!r}"
        is_text = h5py.check_string_dtype(dataset.dtype) is not None
        if not is_text and dataset.dtype.kind not in "biuf":
            raise FieldTypeError("read the dataset", where, "numbers", str(dataset.dtype))
        if dataset.size is None or (is_text and not dataset.size):  # the one has no shape, the other no first text
            raise CorruptFileError("read the dataset", where, "values", "none")
        self._allowance.take(dataset, where)
        if is_text:
            return str(dataset.asstr()[(0,) * dataset.ndim])
        dtype_name(dataset.dtype, f"of {where}")
        return np.asarray(dataset[()])


@contextmanager
def open_foreign_hdf5(path: Path) -> Iterator[ForeignHdf5]:
    """Open a file for reading.

    Raises:
        CorruptFileError: Damaged, or no HDF5 file.
    """
    with open_hdf5(path) as (file, handle):
        yield ForeignHdf5(file, path, os.fstat(handle).st_size)
