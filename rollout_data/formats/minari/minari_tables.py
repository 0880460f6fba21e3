"""Reader of Minari datasets in Arrow or Parquet files: a folder per episode, with `part-0.*`.

A table has T + 1 rows for an episode of T steps, because it includes the final observation. The
last row of actions, rewards and end flags is padding.
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

from ...sources.episode_info import EpisodeInfo
from ...sources.file_source import FileSource
from ..encoded_images import decode_picture, picture_shape
from ..format_detection import MINARI_METADATA, minari_folder
from ..hdf5.hdf5_datasets import numbered
from ..hdf5.hdf5_episodes import LazyMetadata
from ..input_checks import KnownFiles, file_inside, read_object
from ..parquet import ParquetFile, as_rows, first_row, shared_texts
from .arrow_file import ArrowFile
from .minari_metadata import ENDS, INFOS, STEP_FIELDS, check_totals, read_description

_FILE_TYPES: dict[str, type[Any]] = {".arrow": ArrowFile, ".parquet": ParquetFile}
_TEXT = "text"
_PICTURE = "picture"


class TableLeaf(NamedTuple):
    """A column of a table, or a part of a struct column, that becomes a field.

    Attributes:
        column: Name of the column.
        parts: Names of the nested struct fields that lead to the leaf, outermost first.
        shape: Shape of a row of the field.
        dtype: Name of the dtype, such as "float32", or "text" or "picture".
    """

    column: str
    parts: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str


class TableReader(FileSource):
    """Reader of a dataset with a table per episode. The files are opened for each read."""

    format = "minari"
    OPTIONS: ClassVar[Mapping[str, Any]] = {"on_bad_index": "refuse"}

    def scan(self) -> Sequence[EpisodeInfo]:
        folder = minari_folder(self.path)
        assert folder is not None, "as it was detected"
        self._description = read_description(self.path, folder)
        self.metadata = {**self._description.metadata, **self.metadata}
        self._known = KnownFiles()
        #: Leaves by field name, for each set of column names and types that occurs in the files.
        self._leaves: dict[tuple[Any, ...], dict[str, TableLeaf]] = {}
        with os.scandir(folder) as entries:
            is_folder = {entry.name: entry.is_dir(follow_symlinks=False) for entry in entries}
        episodes: list[EpisodeInfo] = []
        for name in numbered(list(is_folder), ""):
            try:
                if not is_folder[name]:
                    raise UnsafeFileError(
                        f"{str(folder / name)!r} is a link or a file, expected a folder."
                    )
                episodes.append(self._episode(folder / name))
            except DataFileError as cause:
                self.problems.append(cause.of("", name))
        self.checked_some(episodes, "episode")
        check_totals(self, episodes)
        return episodes

    def _episode(self, folder: Path) -> EpisodeInfo:
        """Return the description of the episode in a folder."""
        metadata = read_object(file_inside(folder, MINARI_METADATA))
        paths = _part_paths(folder)
        files = self._opened(paths)
        num_rows = sum(file.num_rows for file in files)
        length = num_rows - 1
        where = repr(str(folder))
        if length < 1 or metadata.get("total_steps", length) != length:
            stated = metadata.get("total_steps", 1)
            raise CorruptFileError(
                f"{where} has {num_rows} rows. An episode of {stated} steps needs one row more "
                "than steps.",
                kind="counts",
            )
        leaves = self._leaves_of(files[0])
        if any(file.types != files[0].types for file in files):
            raise CorruptFileError(f"{where} has parts with different columns.")

        schema, texts = _fields_of(leaves)
        final = list(schema.below("observation").values())
        for name in texts:
            if name.partition("/")[0] == "observation":
                final.append(Field(name, (), "int64", is_text=True))
        return EpisodeInfo(
            name=folder.name,
            length=length,
            schema=schema,
            texts=texts,
            final=Schema(final),
            metadata=LazyMetadata(metadata, partial(self._last_infos, paths, leaves, length)),
            source=(paths, leaves),
            **self._ends(files, length),
        )

    def _ends(self, files: Sequence[Any], length: int) -> dict[str, Any]:
        """Read whether an episode was terminated or truncated."""
        ends = {}
        for column, name in ENDS.items():
            if column in files[0].types:
                leaf = TableLeaf(column, (), (), "bool")
                ends[name] = bool(self._rows(files, leaf, column, length - 1, length)[0])
        return ends

    def _leaves_of(self, file: Any) -> dict[str, TableLeaf]:
        """Map field names to the columns, or nested parts of columns, that contain the fields.

        The result is cached for files with the same columns.
        """
        key = tuple((name, str(arrow_type)) for name, arrow_type in file.types.items())
        if key not in self._leaves:
            leaves: dict[str, TableLeaf] = {}
            for column, arrow_type in file.types.items():
                if column not in STEP_FIELDS and column != INFOS:
                    continue
                for parts, leaf_type in _walk(arrow_type, ()):
                    name = "/".join((STEP_FIELDS.get(column, column), *parts))
                    leaf = self._leaf(file, column, parts, leaf_type, name)
                    if leaf is not None:
                        leaves[name] = leaf
            self._leaves[key] = leaves
        return self._leaves[key]

    def _leaf(
        self,
        file: Any,
        column: str,
        parts: tuple[str, ...],
        leaf_type: Any,
        name: str,
    ) -> TableLeaf | None:
        """Build the leaf of a field from its first row; None if its type cannot be read."""
        where = f"{name!r} of {str(file.path)!r}"
        batch = next(file.batches({column: None}, 0, 1))
        first = _part_of(batch[column], parts)
        sizes, dtype = first_row(first)
        if dtype == "binary":
            self.metadata["lossy"].append(name)
            sizes = picture_shape(first[0].as_py() or b"", where)
            dtype = _PICTURE
        elif dtype != _TEXT and dtype not in DTYPES:
            self.problem(
                f"{where} has the type {leaf_type}, which is neither a number, a text nor a "
                "picture. The column is left out."
            )
            return None
        return TableLeaf(column, parts, self._description.shape_of(name, sizes), dtype)

    def rows_read_together(self, number: int, name: str) -> int | None:
        _, leaves = self.episodes[number].source
        return 1 if leaves[name].dtype == _PICTURE else None

    def read(self, number: int, name: str, start: int, stop: int) -> Any:
        paths, leaves = self.episodes[number].source
        return self._rows(self._opened(paths), leaves[name], name, start, stop)

    def read_final(self, number: int, name: str) -> Any:
        length = self.episodes[number].length
        value = self.read(number, name, length, length + 1)[0]
        return value if isinstance(value, str) else np.asarray(value)

    def _opened(self, paths: Sequence[Path]) -> list[Any]:
        """Open the files of the table of an episode."""
        for path in paths:
            self._known.check(path)
        files = [file_inside(path.parent, path.name) for path in paths]
        return [_FILE_TYPES[path.suffix](path, self._known) for path in files]

    def _rows(self, files: Sequence[Any], leaf: TableLeaf, name: str, start: int, stop: int) -> Any:
        """Read rows of a field. Row numbers continue from file to file."""
        values: list[Any] = []
        first = 0
        for file in files:
            low = max(start - first, 0)
            high = min(stop - first, file.num_rows)
            first += file.num_rows
            if low >= high:
                continue
            where = f"{name!r} of {str(file.path)!r}"
            for batch in file.batches({leaf.column: self._width(file, leaf)}, low, high):
                values.append(_values(_part_of(batch[leaf.column], leaf.parts), leaf, where))
        if leaf.dtype == _TEXT:
            return [text for texts in values for text in texts]
        dtype = np.uint8 if leaf.dtype == _PICTURE else leaf.dtype
        return np.concatenate(values) if values else np.empty((0, *leaf.shape), dtype)

    def _width(self, file: Any, leaf: TableLeaf) -> int | None:
        """Return the maximum number of values per row in the column of a leaf; None if unknown."""
        if leaf.dtype in (_TEXT, _PICTURE):
            return None
        leaves = self._leaves_of(file).values()
        widths = [prod(other.shape) for other in leaves if other.column == leaf.column]
        return max(widths, default=prod(leaf.shape))

    def _last_infos(
        self,
        paths: Sequence[Path],
        leaves: Mapping[str, TableLeaf],
        row: int,
    ) -> dict[str, Any]:
        """Read the last row of the column `infos` as metadata."""
        files = self._opened(paths)
        infos = {}
        for name, leaf in leaves.items():
            if leaf.column == INFOS:
                key = "/".join(("final", leaf.column, *leaf.parts))
                infos[key] = self._rows(files, leaf, name, row, row + 1)[0]
        return infos


def _fields_of(leaves: Mapping[str, TableLeaf]) -> tuple[Schema, tuple[str, ...]]:
    """Return the numeric fields and the names of the text fields."""
    fields = []
    texts = []
    for name, leaf in leaves.items():
        if leaf.dtype == _TEXT:
            texts.append(name)
        else:
            dtype = "uint8" if leaf.dtype == _PICTURE else leaf.dtype
            fields.append(Field(name, leaf.shape, dtype))
    return Schema(fields), tuple(texts)


def _part_paths(folder: Path) -> list[Path]:
    """Return the files of the table of an episode, in order."""
    names = []
    for name in os.listdir(folder):
        if not name.startswith(".") and Path(name).suffix in _FILE_TYPES:
            names.append(name)
    suffix = Path(names[0]).suffix if names else ".parquet"
    parts = numbered([name.removesuffix(suffix) for name in names], "part-")
    if not parts or len(parts) != len(names):
        raise CorruptFileError(
            f"{str(folder)!r} contains the files {sorted(names)}, expected part-<n>.arrow or "
            "part-<n>.parquet."
        )
    return [folder / f"{part}{suffix}" for part in parts]


def _walk(arrow_type: Any, parts: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield (names of the nested struct fields, type) for each leaf of an Arrow type."""
    if not str(arrow_type).startswith("struct<"):
        yield parts, arrow_type
        return
    for number in range(arrow_type.num_fields):
        field = arrow_type.field(number)
        yield from _walk(field.type, (*parts, field.name))


def _part_of(array: Any, parts: Sequence[str]) -> Any:
    for part in parts:
        array = array.field(part)
    return array


def _values(array: Any, leaf: TableLeaf, where: str) -> Any:
    """Convert an Arrow array to rows of the field."""
    if leaf.dtype == _TEXT:
        return shared_texts(array, {})
    if leaf.dtype == _PICTURE:
        size = (*leaf.shape, 1)[:3]
        pictures = [decode_picture(data or b"", where, size) for data in array.to_pylist()]
        return np.stack(pictures).reshape(-1, *leaf.shape)
    return as_rows([array], leaf.shape, where)
