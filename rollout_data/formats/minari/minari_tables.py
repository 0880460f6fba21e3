"""Minari's Arrow and Parquet files: `<id>/part-0.*`, one folder an episode.

One rule: every column has T + 1 rows; the last ones of actions, rewards and ends are nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from storage.core.fields import DTYPES, Field, Schema
from storage.errors import CorruptFileError, DataFileError, UnsafeFileError

from ...sources.episode_reader import EpisodeInfo, ForeignReader
from ..encoded_images import decode_picture, picture_shape
from ..format_detection import MINARI_METADATA, minari_folder
from ..hdf5.hdf5_datasets import numbered
from ..hdf5.hdf5_episodes import Told
from ..input_checks import KnownFiles, file_inside, read_object
from ..parquet import ParquetFile, as_rows, first_row, shared_texts
from .arrow_file import ArrowFile
from .minari_metadata import ENDS, INFOS, STEP_FIELDS, check_totals, describe

_KINDS: dict[str, type[Any]] = {".arrow": ArrowFile, ".parquet": ParquetFile}
_TEXT = "text"
_PICTURE = "picture"


class Leaf(NamedTuple):
    """A column, or a part of a structure in it.

    Attributes:
        column: Its name.
        parts: Names of the structures below it.
        shape: Of a row as it is given.
        dtype: Key of `DTYPES`, "text" or "picture".
    """

    column: str
    parts: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str


class TableReader(ForeignReader):
    """Reads a dataset whose data are tables; the files are opened for each read."""

    format = "minari"
    OPTIONS: ClassVar[Mapping[str, Any]] = {"on_bad_index": "refuse"}

    def scan(self) -> Sequence[EpisodeInfo]:
        folder = minari_folder(self.path)
        assert folder is not None, "as it was detected"
        self._about = describe(self.path, folder)
        self.metadata = {**self._about.metadata, **self.metadata}
        self._known = KnownFiles()
        self._leaves: dict[tuple[Any, ...], dict[str, Leaf]] = {}
        episodes: list[EpisodeInfo] = []
        with os.scandir(folder) as listed:
            is_folder = {one.name: one.is_dir(follow_symlinks=False) for one in listed}
        for name in numbered(list(is_folder), ""):
            try:
                if not is_folder[name]:
                    raise UnsafeFileError("read", repr(str(folder / name)), "a folder", "a link or a file")
                episodes.append(self._describe(folder / name))
            except DataFileError as cause:
                self.problems.append(cause.of("", name))
        return check_totals(self, self.checked_some(episodes, "an episode"))

    def _describe(self, folder: Path) -> EpisodeInfo:
        told = read_object(file_inside(folder, MINARI_METADATA))
        parts = _parts(folder)
        files = self._opened(parts)
        rows = sum(file.num_rows for file in files)
        if rows < 2 or told.get("total_steps", rows - 1) != rows - 1:
            expected = f"{told.get('total_steps', 1)} steps, of a row each, and one more"
            raise CorruptFileError("read", repr(str(folder)), expected, f"{rows} rows").of("counts")
        found = self._leaves_of(files[0])
        if any(file.types != files[0].types for file in files):
            raise CorruptFileError("read", repr(str(folder)), "parts with the same columns", "others")
        kinds = {name: "uint8" if leaf.dtype == _PICTURE else leaf.dtype for name, leaf in found.items()}
        texts = tuple(name for name, kind in kinds.items() if kind == _TEXT)
        schema = Schema(Field(name, found[name].shape, kind) for name, kind in kinds.items() if kind != _TEXT)
        about: dict[str, Any] = {
            ours: bool(self._rows(files, Leaf(name, (), (), "bool"), name, rows - 2, rows - 1)[0])
            for name, ours in ENDS.items()
            if name in files[0].types
        }
        spoken = [Field(name, (), "int64", is_text=True) for name in texts if name.partition("/")[0] == "observation"]
        final = Schema([*schema.below("observation").values(), *spoken])
        about["metadata"] = Told(told, partial(self._last_infos, parts, found, rows))
        return EpisodeInfo(folder.name, rows - 1, schema, texts, final, source=(parts, found), **about)

    def _leaves_of(self, file: Any) -> dict[str, Leaf]:
        """Return what the columns hold, once for all files with the same columns."""
        same = tuple((name, str(kind)) for name, kind in file.types.items())
        if same not in self._leaves:
            found: dict[str, Leaf] = {}
            for column, kind in file.types.items():
                if column in STEP_FIELDS or column == INFOS:
                    for parts, leaf in _walk(kind, ()):
                        name = "/".join((STEP_FIELDS.get(column, column), *parts))
                        if (made := self._leaf(file, column, parts, leaf, name)) is not None:
                            found[name] = made
            self._leaves[same] = found
        return self._leaves[same]

    def _leaf(self, file: Any, column: str, parts: tuple[str, ...], kind: Any, name: str) -> Leaf | None:
        where = f"{name!r} of {str(file.path)!r}"
        first = _of(next(file.batches({column: None}, 0, 1))[column], parts)
        sizes, dtype = first_row(first)
        if dtype == "binary":
            self.metadata["lossy"].append(name)
            shape = self._about.shape_of(name, picture_shape(first[0].as_py() or b"", where))
            return Leaf(column, parts, shape, _PICTURE)
        if dtype != _TEXT and dtype not in DTYPES:
            self.problem("read the column", where, "numbers, texts or pictures", str(kind), "It is left out")
            return None
        return Leaf(column, parts, self._about.shape_of(name, sizes), dtype)

    def read(self, number: int, name: str, start: int, stop: int) -> Any:
        parts, leaves = self.episodes[number].source
        return self._rows(self._opened(parts), leaves[name], name, start, stop)

    def read_final(self, number: int, name: str) -> Any:
        info = self.episodes[number]
        parts, leaves = info.source
        files = self._opened(parts)
        value = self._rows(files, leaves[name], name, info.length, info.length + 1)[0]
        return value if leaves[name].dtype == _TEXT else np.asarray(value)

    def _opened(self, parts: Sequence[Path]) -> list[Any]:
        """Open the parts of an episode's table."""
        for path in parts:
            self._known.check(path)
        files = [file_inside(path.parent, path.name) for path in parts]
        return [_KINDS[path.suffix](path, self._known) for path in files]

    def _rows(self, files: Sequence[Any], leaf: Leaf, name: str, start: int, stop: int) -> Any:
        found: list[Any] = []
        for file in files:
            # A structure may have parts of several widths: the largest is a bound for all.
            widths = [prod(one.shape) for one in self._leaves_of(file).values() if one.column == leaf.column]
            width = None if leaf.dtype in (_TEXT, _PICTURE) else max(widths, default=prod(leaf.shape))
            low = max(start, 0)
            high = min(stop, file.num_rows)
            for batch in file.batches({leaf.column: width}, low, high) if low < high else ():
                found.append(_taken(_of(batch[leaf.column], leaf.parts), leaf, f"{name!r} of {str(file.path)!r}"))
            start = start - file.num_rows
            stop = stop - file.num_rows
        if leaf.dtype == _TEXT:
            return [text for part in found for text in part]
        dtype = np.uint8 if leaf.dtype == _PICTURE else leaf.dtype
        return np.concatenate(found) if found else np.empty((0, *leaf.shape), dtype)

    def _last_infos(self, parts: Sequence[Path], leaves: Mapping[str, Leaf], rows: int) -> dict[str, Any]:
        """Read the last row of the infos."""
        files = self._opened(parts)
        return {
            f"final/{'/'.join((leaf.column, *leaf.parts))}": self._rows(files, leaf, name, rows - 1, rows)[0]
            for name, leaf in leaves.items()
            if leaf.column == INFOS
        }


def _parts(folder: Path) -> list[Path]:
    """List the parts of an episode's table."""
    names = [name for name in os.listdir(folder) if name[0] != "." and Path(name).suffix in _KINDS]
    suffix = Path(names[0]).suffix if names else ".parquet"
    parts = numbered([name.removesuffix(suffix) for name in names], "part-")
    if not parts or len(parts) != len(names):
        raise CorruptFileError("read", repr(str(folder)), "files part-<n>.arrow or .parquet", f"{sorted(names)}")
    return [folder / f"{part}{suffix}" for part in parts]


def _walk(kind: Any, parts: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the parts of structures in a column, and what they hold."""
    if str(kind).startswith("struct<"):
        for number in range(kind.num_fields):
            yield from _walk(kind.field(number).type, (*parts, kind.field(number).name))
    else:
        yield parts, kind


def _of(array: Any, parts: Sequence[str]) -> Any:
    for part in parts:
        array = array.field(part)
    return array


def _taken(array: Any, leaf: Leaf, where: str) -> Any:
    """Turn an arrow array into rows as they are given."""
    if leaf.dtype == _TEXT:
        return shared_texts(array, {})
    if leaf.dtype == _PICTURE:
        pictures = [decode_picture(data or b"", where, (*leaf.shape, 1)[:3]) for data in array.to_pylist()]
        return np.stack(pictures).reshape(-1, *leaf.shape)
    return as_rows([array], leaf.shape, where)
