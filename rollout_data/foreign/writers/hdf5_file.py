"""An HDF5 file of episodes whose structure is known before a row is read.

One rule: the structure is made in memory and rows go to their places, so nothing is copied twice. Until the file is
complete it has a name with a dot, and a list beside it of the episodes that are in it; a killed process is taken up.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any

import h5py
import numpy as np

from storage.core.durable import sync_path
from storage.core.fields import Field
from storage.errors import UsageError
from storage.saving.hdf5 import SparseFile, begin_file, reserve, write_at

from ..writer import EpisodeToWrite, ForeignWriter, SharedFields

Array = np.ndarray[Any, Any]
_ALIGNMENT = 64
_PART_BYTES = 1 << 23


class EpisodeFile:
    """A file that is being written.

    Args:
        path: Where it is when it is complete.
        datasets: Name -> dtype and shape; rows come later, by `write`.
        contents: Name -> small datasets that are known.
        attributes: Group -> its attributes.

    Attributes:
        written: Ids of the episodes that are in it.

    Raises:
        UsageError: There is a file of that name.
    """

    def __init__(
        self,
        path: Path,
        datasets: Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]],
        contents: Mapping[str, Any],
        attributes: Mapping[str, Mapping[str, Any]],
    ) -> None:
        if path.exists():
            raise UsageError("write", repr(str(path)), "a free name", "an existing file", "Choose another name")
        self.path, self._datasets, header = path, datasets, SparseFile()
        self._partial = path.with_name(f".{path.name}.partial")
        self._list = path.with_name(f".{path.name}.written")
        with begin_file(header, _ALIGNMENT, keeps_order=True) as file:
            parents = {str(one) for name in (*datasets, *contents) for one in PurePosixPath(name).parents}
            for name in sorted(parents - {"."}):
                _make_group(file, name)
            self._offsets = {name: reserve(file, name, dtype, shape) for name, (dtype, shape) in datasets.items()}
            for name, content in contents.items():
                file.create_dataset(name, data=content)
            for group, told in attributes.items():
                file.require_group(group).attrs.update(told)
        path.parent.mkdir(parents=True, exist_ok=True)
        self.written = set[str]()
        if self._is_mine(header):
            lines = self._list.read_text("utf-8").splitlines(keepends=True)
            self.written = {json.loads(line) for line in lines if line.endswith("\n")}
        self._file = os.open(self._partial, os.O_RDWR | os.O_CREAT, 0o666)
        if not self.written:
            os.ftruncate(self._file, 0)
            header.write_to(self._file)
            self._list.write_text("", "utf-8")

    def _is_mine(self, header: SparseFile) -> bool:
        """True if a file was begun with just this structure."""
        try:
            with open(self._partial, "rb") as begun:
                same = all(os.pread(begun.fileno(), len(data), offset) == data for offset, data in _last(header))
                return same and os.fstat(begun.fileno()).st_size == header.size and self._list.exists()
        except OSError:
            return False

    def write(self, name: str, rows: Array, start: int = 0) -> None:
        """Write rows of a dataset from row `start` on."""
        dtype, shape = self._datasets[name]
        data = np.ascontiguousarray(rows, dtype).reshape(-1).view(np.uint8).data
        write_at(self._file, data, self._offsets[name] + start * dtype.itemsize * prod(shape[1:]))

    def note(self, episode: str) -> None:
        """Note that all rows of an episode are there."""
        with open(self._list, "a", encoding="utf-8") as listed:
            listed.write(json.dumps(episode) + "\n")
        self.written.add(episode)

    def close(self, is_complete: bool) -> None:
        """Give the file its name, if it is complete. Idempotent."""
        if self._file < 0:
            return
        if is_complete:
            os.fsync(self._file)
            os.rename(self._partial, self.path)
            self._list.unlink(missing_ok=True)
            sync_path(self.path.parent)
        os.close(self._file)
        self._file = -1


def _make_group(file: h5py.File, name: str) -> None:
    """Create a group without the time of its making, so that the same episodes make the same bytes."""
    settings = h5py.h5p.create(h5py.h5p.GROUP_CREATE)
    settings.set_obj_track_times(False)
    h5py.h5g.create(file.id, name.encode(), gcpl=settings)


def _last(header: SparseFile) -> Iterator[tuple[int, bytes]]:
    """What the file's structure is in the end: writes that no later one lies over."""
    written = bytearray(header.size if not header.writes else max(offset + len(data) for offset, data in header.writes))
    for offset, data in header.writes:
        written[offset : offset + len(data)] = data
    for offset, data in header.writes:
        yield offset, bytes(written[offset : offset + len(data)])


class Hdf5Writer(ForeignWriter):
    """Writes a file whose structure is that of all episodes; `begin` makes it."""

    is_laid_out_first = True
    _file: EpisodeFile

    _fields: SharedFields

    def copy(
        self, episode: EpisodeToWrite, name: str, dataset: str, first: int = 0, steps: range | None = None
    ) -> None:
        """Write steps of a field, all by default, into a dataset from row `first` on, a few megabytes at a time.

        A field that the episode lacks is False or NaN.
        """
        steps = range(episode.length) if steps is None else steps
        field = episode.schema[name] if name in episode.schema else self._fields.schema[name]
        at_once = max(1, _PART_BYTES // max(1, field.row_bytes))
        for start in steps[::at_once]:
            rows = self._fields.read(episode, name, start, min(start + at_once, steps.stop))
            self._file.write(dataset, rows, first + start - steps.start)
        is_widened = field.dtype == "bfloat16"
        self.changed("bfloat16 is written as float32", episode, is_widened)

    def close(self) -> None:
        self._file.close(self.is_complete)


def written_dtype(field: Field) -> np.dtype[Any]:
    """The dtype in which other systems get a field."""
    return np.dtype("<f4") if field.dtype == "bfloat16" else field.numpy_dtype
