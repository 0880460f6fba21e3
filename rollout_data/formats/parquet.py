"""Read ranges of rows from untrusted Parquet files with pyarrow, in bounded memory.

The sizes declared in a file are compared with the length of the file before data are read. Rows are
decoded in batches.

pyarrow decodes the rows. Footers and page headers are also parsed here: pyarrow allocates the sizes
that they declare, and ends the process for some contradictory footers (3 of 600 with a flipped bit).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from storage.core.lru_cache import LruCache
from storage.errors import CorruptFileError

from ..sources.rows.chunk_decoder import row_cache
from .input_checks import ARROW_DAMAGE, KnownFiles, damage_named, file_inside, optional

#: Maximum bytes decoded at a time, unless a single row is larger.
_BATCH_BYTES = 1 << 25
#: Maximum number of rows decoded at a time.
_BATCH_ROWS = 1 << 16
#: Maximum number of rows that a file may declare per byte of its length.
_ROWS_PER_BYTE = 1 << 4
#: Maximum decoded bytes of a column of a row group: the larger of `_MAX_COLUMN_BYTES` and
#: `_MAX_EXPANSION` times the length of the file.
_MAX_COLUMN_BYTES = 1 << 27
_MAX_EXPANSION = 4
#: Maximum number of rows of an integer column that is read at once: 64 MiB of int64.
_MAX_WHOLE_ROWS = 1 << 23
#: Limits of the number of values in a column of lists with unknown lengths. The column may have at
#: most `_VALUES_PER_BYTE` values per byte of the file, and at most `_VALUES_PER_ROW` values per row
#: plus `_MANY_VALUES`. One value per byte of the file plus one per row are always allowed.
_VALUES_PER_BYTE = 1 << 5
_VALUES_PER_ROW = 1 << 6
_MANY_VALUES = 1 << 20
#: Maximum number of cached footers per folder.
_MAX_FOOTERS = 64
#: Maximum bytes of cached encoded row groups per folder.
_KEPT_GROUP_BYTES = 128 << 20
#: Number of texts converted to Python objects at a time, before duplicates are removed.
_TEXTS_AT_ONCE = 64
#: Maps names of Arrow types to names of dtypes, or "text". Other names are equal to dtype names.
_TYPE_NAMES = {
    "halffloat": "float16",
    "float": "float32",
    "double": "float64",
    "string": "text",
    "string_view": "text",
}
# Numbers of the fields to read from the footer, a tree of Thrift structs (parquet.thrift).
_ROW_GROUPS = 4
_COLUMNS = 1
_COLUMN_METADATA = 3
_KIND = 1
_NUM_VALUES = 5
_NUM_BYTES = 6
_STATISTICS = 12
_NULL_COUNT = 3
_LEAST = 6
_LARGEST = 5
#: Number of the physical type BYTE_ARRAY, the type of texts.
_BYTES = 6
_NUM_STORED_BYTES = 7
#: Field numbers of the offsets of the first data page and of the dictionary page.
_FIRST_PAGES = (9, 11)
# Field numbers of the Thrift struct of a page header: decoded bytes, stored bytes, and the structs of
# both page versions, which state the number of values.
_PAGE_BYTES = 2
_PAGE_STORED_BYTES = 3
_PAGE_VALUES = (5, 8)
_MAX_HEADER_BYTES = 1 << 16
Array = np.ndarray[Any, Any]
#: Maps the name of each numeric Arrow type to a numpy dtype.
_NUMPY_TYPES = {
    "halffloat": "float16",
    "float": "float32",
    "double": "float64",
    **{f"int{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
}


def arrow() -> tuple[Any, Any]:
    """Import pyarrow, and its module for Parquet files.

    Raises:
        UsageError: pyarrow is missing.
    """
    pyarrow = optional("pyarrow", "pyarrow", "formats", "Parquet files")
    parquet = optional("pyarrow.parquet", "pyarrow", "formats", "Parquet files")
    return pyarrow, parquet


class ParquetFile:
    """A Parquet file. The footer stays in memory; the file is opened for each read.

    Args:
        path: Path of the file.
        known: States of files at their first use. Reading a file that has changed since raises an
            error.

    Attributes:
        path: Path of the file.
        num_rows: Number of rows of the file.
        types: Maps column names to Arrow types without extension types, in the order of the file.
        declared_types: Maps column names to Arrow types in the schema of the file.

    Raises:
        CorruptFileError: The file is damaged, has changed, or declares more data than can fit in
            its length.
        UsageError: pyarrow is missing.
    """

    def __init__(self, path: Path, known: KnownFiles | None = None) -> None:
        self.path = path
        self._num_bytes = path.stat().st_size
        self._known = KnownFiles() if known is None else known
        self._footer: Any = None
        self._known_sizes: dict[tuple[int, int], tuple[int, int, int]] = {}
        with self._opened() as file:
            self._footer = file.metadata
            schema = file.schema_arrow
        self.num_rows: int = self._footer.num_rows
        self.declared_types: dict[str, Any] = dict(zip(schema.names, schema.types, strict=True))
        self.types: dict[str, Any] = {}
        for name, declared in self.declared_types.items():
            self.types[name] = plain_type(declared)
        sizes = []
        for number in range(self._footer.num_row_groups):
            sizes.append(self._footer.row_group(number).num_rows)
        #: First row of each row group, then the total number of rows.
        self._starts = np.cumsum([0, *sizes])
        #: Maps the name of each column to the positions of its leaf columns in the footer.
        self._leaves: dict[str, range] = {}
        num_leaves = 0
        for name, plain in self.types.items():
            self._leaves[name] = range(num_leaves, num_leaves + _num_leaves(plain))
            num_leaves += _num_leaves(plain)

        has_repeated_name = len(self.types) != len(schema.names)
        if has_repeated_name:
            raise self._corrupt("has duplicate column names")
        if min(sizes, default=0) < 0 or self._starts[-1] != self.num_rows:
            declared = f"{self.num_rows} rows in total"
            raise self._corrupt(f"is damaged: the row groups have {sizes[:8]} rows, not {declared}")
        most_rows = self._num_bytes * _ROWS_PER_BYTE
        if self.num_rows > most_rows:
            limit = f"at most {most_rows} rows are possible in {self._num_bytes} bytes"
            raise self._corrupt(f"declares {self.num_rows} rows, but {limit}")

    def batches(
        self,
        columns: Mapping[str, int | None],
        start: int,
        stop: int,
        batch_rows: int = _BATCH_ROWS,
    ) -> Iterator[dict[str, Any]]:
        """Read rows `start:stop` of some columns in batches.

        Args:
            columns: Maps column names to the number of values per row; None if unknown, as for
                texts.
            start: First row.
            stop: One past the last row.
            batch_rows: Maximum number of rows decoded at a time. Large rows reduce this number.

        Yields:
            Arrow arrays of the next rows by column name.
        """
        first_group = int(np.searchsorted(self._starts, start, "right")) - 1
        stop_group = (
            int(np.searchsorted(self._starts, stop, "left")) if start < stop else first_group
        )
        groups = range(first_group, stop_group)
        for name, width in columns.items():
            batch_rows = min(batch_rows, self._batch_rows(name, width, groups))

        position = int(self._starts[first_group])
        with self._opened() as file:
            batches = file.iter_batches(batch_rows, list(groups), list(columns), use_threads=False)
            while position < stop and groups:
                batch = next(batches, None)
                if batch is None:
                    raise self._corrupt(f"ends before the rows {position}:{stop}")
                first = max(start - position, 0)
                num_rows = min(stop - position, len(batch)) - first
                if num_rows > 0:
                    rows = {}
                    for name in columns:
                        rows[name] = plain_array(batch.column(name)).slice(first, num_rows)
                    yield rows
                position += len(batch)

    def groups(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield (start, stop) of each row group that overlaps the rows `start:stop`."""
        for low, high in pairwise(self._starts.tolist()):
            if low < stop and high > start:
                yield low, high

    def integers(self, names: Sequence[str]) -> dict[str, Array]:
        """Read all rows of integer or boolean columns. Map column names to int64 `[rows]`."""
        for name in names:
            if name not in self.types:
                raise self._corrupt(f"has no column {name!r}")
            type_name = str(self.types[name])
            if type_name != "bool" and not type_name.startswith(("int", "uint")):
                raise self._corrupt(f"has type {type_name} in column {name!r}, expected integers")
        if self.num_rows > _MAX_WHOLE_ROWS:
            raise self._corrupt(f"has {self.num_rows} rows, expected at most {_MAX_WHOLE_ROWS}")

        batches = list(self.batches(dict.fromkeys(names, 1), 0, self.num_rows))
        columns = {}
        for name in names:
            where = f"{name!r} of {str(self.path)!r}"
            columns[name] = as_rows([batch[name] for batch in batches], (), where).astype(np.int64)
        return columns

    def bounds(self, name: str) -> tuple[int, int] | None:
        """Read the minimum and maximum of an integer column from the footer, without reading rows.

        The result is None if the footer states no minimum and maximum, if the file has several row
        groups, or if values are missing.
        """
        type_name = str(self.types.get(name, "none"))
        if self._footer.num_row_groups != 1 or type_name not in ("int32", "int64"):
            return None
        statistics = self._columns[0][self._leaves[name][0]].get(_STATISTICS, {})
        least = statistics.get(_LEAST)
        largest = statistics.get(_LARGEST)
        if statistics.get(_NULL_COUNT):
            return None
        if not isinstance(least, bytes) or not isinstance(largest, bytes):
            return None
        return int.from_bytes(least, "little", signed=True), int.from_bytes(
            largest, "little", signed=True
        )

    def _batch_rows(self, name: str, width: int | None, groups: range) -> int:
        """Check the declared sizes of a column, and return the number of rows per batch."""
        if name not in self.types:
            raise self._corrupt(f"has no column {name!r}")
        row_bytes = 1
        most_bytes = max(_MAX_COLUMN_BYTES, self._num_bytes * _MAX_EXPANSION)
        for group in groups:
            most_values = self._most_values(group, width)
            for leaf in self._leaves[name]:
                kind, num_values, num_bytes = self._sizes(group, leaf)
                if num_values > most_values or num_bytes > most_bytes:
                    declared = f"{num_values} values in {num_bytes} bytes for column {name!r}"
                    limit = f"at most {most_values} values in {most_bytes} bytes"
                    raise self._corrupt(f"declares {declared}, expected {limit}")
                # A repeated text is stored once, so every row may be as large as the whole column.
                row_bytes = max(row_bytes, num_bytes if kind == _BYTES else 8 * (width or 1))
        return max(1, _BATCH_BYTES // row_bytes)

    def _most_values(self, group: int, width: int | None) -> int:
        """Return the maximum number of values that a column may declare in a row group."""
        num_rows = int(self._starts[group + 1] - self._starts[group])
        if width is not None:
            return num_rows * max(width, 1)
        by_bytes = self._num_bytes * _VALUES_PER_BYTE
        by_rows = self.num_rows * _VALUES_PER_ROW + _MANY_VALUES
        return num_rows + max(self._num_bytes, min(by_bytes, by_rows))

    def _sizes(self, group: int, leaf: int) -> tuple[int, int, int]:
        """Return physical type, number of values and decoded bytes of a leaf column in a row group.

        The page headers are read as well as the footer, because Arrow allocates the sizes declared
        in page headers.
        """
        if (group, leaf) not in self._known_sizes:
            column = self._columns[group][leaf]
            with self._damaged_footer():
                values_in_pages, bytes_in_pages = self._page_sizes(column)
                num_values = max(column[_NUM_VALUES], values_in_pages)
                num_bytes = max(column[_NUM_BYTES], bytes_in_pages)
                sizes = (int(column[_KIND]), int(num_values), int(num_bytes))
            self._known_sizes[group, leaf] = sizes
        return self._known_sizes[group, leaf]

    def _page_sizes(self, column: Mapping[int, Any]) -> tuple[int, int]:
        """Sum the numbers of values and of decoded bytes that the page headers of a column state.

        Args:
            column: Metadata of the column in the footer.
        """
        num_values = 0
        num_bytes = 0
        position = min(column[first] for first in _FIRST_PAGES if first in column)
        end = position + column[_NUM_STORED_BYTES]
        with self._known.open(self.path) as file:
            while position < end:
                file.seek(position)
                page = _Thrift(file.read(min(_MAX_HEADER_BYTES, end - position)))
                header = page.value(_Thrift.STRUCT)
                # A negative size would lead back to an earlier page, in an endless loop.
                position += page.position + max(0, header[_PAGE_STORED_BYTES])
                num_values += sum(header[part][1] for part in _PAGE_VALUES if part in header)
                num_bytes += header[_PAGE_BYTES]
        return num_values, num_bytes

    @cached_property
    def _columns(self) -> list[list[dict[int, Any]]]:
        """Column metadata in the footer, nested by row group, leaf column and Thrift field number.

        The footer is parsed here, because pyarrow ends the process if sizes, histograms and types
        of a footer contradict each other.
        """
        with self._damaged_footer(), self._known.open(self.path) as file:
            file.seek(-8, os.SEEK_END)
            size = int.from_bytes(file.read(4), "little")
            file.seek(-8 - size, os.SEEK_END)
            groups = _Thrift(file.read(size)).value(_Thrift.STRUCT)[_ROW_GROUPS]
            return [
                [dict(column[_COLUMN_METADATA]) for column in group[_COLUMNS]] for group in groups
            ]

    def _damaged_footer(self) -> Any:
        """Convert errors of parsing a footer or a page header into `CorruptFileError`."""
        kinds = (OSError, LookupError, TypeError, ValueError, RecursionError)
        return damage_named(f"The footer of {str(self.path)!r}", *kinds)

    @contextmanager
    def _opened(self) -> Iterator[Any]:
        self._known.check(self.path)
        pyarrow, parquet = arrow()
        damage = (pyarrow.ArrowException, *ARROW_DAMAGE)
        with (
            damage_named(repr(str(self.path)), *damage),
            parquet.ParquetFile(os.fspath(self.path), metadata=self._footer) as file,
        ):
            yield file

    def _corrupt(self, problem: str) -> CorruptFileError:
        return CorruptFileError(f"{str(self.path)!r} {problem}.")


class KeptRows:
    """Cached rows of some columns of a row group, as batches of Arrow arrays.

    Attributes:
        nbytes: Number of bytes of the cached rows.
    """

    def __init__(self) -> None:
        self._batches: list[dict[str, Any]] = []
        self.nbytes = 0

    def append(self, batch: dict[str, Any]) -> None:
        """Append the batch with the next rows."""
        self._batches.append(batch)
        self.nbytes += sum(array.nbytes for array in batch.values())

    def slices(self, start: int, stop: int) -> Iterator[dict[str, Any]]:
        """Yield the rows `start:stop` as dicts that map column names to views of Arrow arrays."""
        for batch in self._batches:
            num_rows = len(next(iter(batch.values())))
            first = max(start, 0)
            last = min(stop, num_rows)
            if first < last:
                yield {name: array.slice(first, last - first) for name, array in batch.items()}
            start -= num_rows
            stop -= num_rows


class ParquetFiles:
    """Parquet files of a folder by their names, opened at their first use.

    At most `_MAX_FOOTERS` footers are cached.

    Args:
        root: Path of the folder. A file name that leads out of the folder is an error.
        known: States of files at their first use. Reading a file that has changed since raises an
            error.
    """

    def __init__(self, root: Path, known: KnownFiles | None = None) -> None:
        self._root = root
        self._known = KnownFiles() if known is None else known
        self._files: LruCache[str, ParquetFile] = LruCache(_MAX_FOOTERS)
        self._groups = row_cache(_KEPT_GROUP_BYTES)
        self._large_groups: set[tuple[str, int, tuple[str, ...]]] = set()

    def __getitem__(self, name: str) -> ParquetFile:
        file = self._files.get(name)
        if file is None:
            self._known.check(self._root / name)
            file = ParquetFile(file_inside(self._root, name), self._known)
            self._files.put(name, file)
        return file

    def kept_batches(
        self,
        name: str,
        columns: Mapping[str, int | None],
        start: int,
        stop: int,
    ) -> Iterator[dict[str, Any]]:
        """Yield rows of some columns in batches. Recently read row groups are cached.

        Without the cache, reading a few rows decodes all earlier rows of their row group.

        Args:
            name: Name of the file.
            columns: Maps column names to the number of values per row; None if unknown.
            start: First row.
            stop: One past the last row.
        """
        file = self[name]
        for group_start, group_stop in file.groups(start, stop):
            self._known.check(file.path)
            first = max(start, group_start)
            last = min(stop, group_stop)
            group = self._kept_group(name, columns, group_start, group_stop)
            if group is None:
                yield from file.batches(columns, first, last)
            else:
                yield from group.slices(first - group_start, last - group_start)

    def _kept_group(
        self,
        name: str,
        columns: Mapping[str, int | None],
        start: int,
        stop: int,
    ) -> KeptRows | None:
        """Return a row group from the cache, reading it at its first use.

        The result is None if the row group is too large for the cache.
        """
        key = (name, start, tuple(columns))
        if key in self._large_groups:
            return None
        group: KeptRows | None = self._groups.get(key)
        if group is None:
            group = KeptRows()
            for batch in self[name].batches(columns, start, stop):
                group.append(batch)
                if group.nbytes > _KEPT_GROUP_BYTES:
                    self._large_groups.add(key)
                    return None
            self._groups.put(key, group)
        return group

    def __reduce__(self) -> tuple[Any, ...]:
        return ParquetFiles, (self._root, self._known)


class _Thrift:
    """Parser of Thrift's compact protocol, the encoding of Parquet's footers.

    A struct is returned as a dict that maps field numbers to values.
    """

    STRUCT = 12
    _TRUE = 1
    _BYTE = 3
    _LAST_INTEGER = 6
    _DOUBLE = 7
    _BINARY = 8
    _SET = 10

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.position = 0

    def value(self, kind: int) -> Any:
        """Read the next value; `kind` is its type number in the protocol."""
        if self._BYTE < kind <= self._LAST_INTEGER:
            number = self._number()
            return number >> 1 ^ -(number & 1)
        if kind == self.STRUCT:
            return self._struct()
        if kind == self._BINARY:
            return self._bytes(self._number())
        if kind < self._BYTE:
            # A boolean has no bytes of its own. Its type number is 1 for True and 2 for False.
            return kind == self._TRUE
        if kind in (self._BYTE, self._DOUBLE):
            return self._bytes(1 if kind == self._BYTE else 8)
        if kind > self._SET:
            raise LookupError(f"unknown value type {kind}")
        head = self._bytes(1)[0]
        num_values = head >> 4 if head < 0xF0 else self._number()
        value_kind = max(head & 15, self._BYTE)
        return [self.value(value_kind) for _ in range(num_values)]

    def _struct(self) -> dict[int, Any]:
        values = dict[int, Any]()
        field = 0
        while True:
            head = self._data[self.position]
            self.position += 1
            if head == 0:
                return values
            step = head >> 4
            field = field + step if step else self.value(self._LAST_INTEGER)
            values[field] = self.value(head & 15)

    def _number(self) -> int:
        """Read an unsigned varint (7 bits per byte)."""
        number = 0
        shift = 0
        while True:
            byte = self._data[self.position]
            self.position += 1
            if byte < 128 or shift >= 64:
                return number | byte << shift
            number |= (byte & 127) << shift
            shift += 7

    def _bytes(self, num_bytes: int) -> bytes:
        start = self.position
        self.position += num_bytes
        if self.position > len(self._data):
            raise LookupError("the data end too early")
        return self._data[start : self.position]


def plain_type(arrow_type: Any) -> Any:
    """Return an Arrow type with extension types replaced by their storage types.

    A file may declare extension types of an imported package such as `datasets`. Their storage
    types are ordinary Arrow types.
    """
    pyarrow, _ = arrow()
    if isinstance(arrow_type, pyarrow.BaseExtensionType):
        return plain_type(arrow_type.storage_type)
    if not has_extension(arrow_type):
        return arrow_type
    if pyarrow.types.is_struct(arrow_type):
        fields = [field.with_type(plain_type(field.type)) for field in arrow_type]
        return pyarrow.struct(fields)
    value_type = plain_type(arrow_type.value_type)
    if pyarrow.types.is_fixed_size_list(arrow_type):
        return pyarrow.list_(value_type, arrow_type.list_size)
    if pyarrow.types.is_large_list(arrow_type):
        return pyarrow.large_list(value_type)
    return pyarrow.list_(value_type)


def has_extension(arrow_type: Any) -> bool:
    """Return whether an Arrow type is, or contains, an extension type."""
    pyarrow, _ = arrow()
    if isinstance(arrow_type, pyarrow.BaseExtensionType):
        return True
    return any(map(has_extension, _inner_types(arrow_type)))


def plain_array(array: Any) -> Any:
    """Return an Arrow array with extension types replaced by their storage types."""
    pyarrow, _ = arrow()
    if isinstance(array.type, pyarrow.BaseExtensionType):
        return plain_array(array.storage)
    return array.cast(plain_type(array.type)) if has_extension(array.type) else array


def _inner_types(arrow_type: Any) -> list[Any]:
    """Return the field types of a struct, or the value type of a list; [] for other types."""
    return [arrow_type.field(number).type for number in range(arrow_type.num_fields)]


def _num_leaves(arrow_type: Any) -> int:
    """Return the number of columns in which Parquet stores an Arrow type: one per nested field."""
    return sum(map(_num_leaves, _inner_types(arrow_type))) or 1


def is_list(array: Any) -> bool:
    """Return whether the values of an Arrow array are lists, of fixed or variable size."""
    return "list" in str(array.type).partition("<")[0]


def first_row(array: Any) -> tuple[tuple[int, ...], str]:
    """Return the shape of the first row of an Arrow array of nested lists, and the value type.

    The value type is the name of a dtype, "text", "binary" or the name of another Arrow type.
    """
    sizes = []
    while is_list(array) and len(array) and array[0].is_valid:
        array = array[0].values
        sizes.append(len(array))
    name = (
        str(array.type).removeprefix("dictionary<values=").partition(",")[0].removeprefix("large_")
    )
    stored = name if array.type.num_fields == 0 else str(array.type)
    return tuple(sizes), _TYPE_NAMES.get(name, stored)


def shared_texts(array: Any, known: dict[str, str]) -> list[str]:
    """Return the texts of an Arrow array. Equal texts are the same object; null becomes "".

    A dictionary page stores a text once for any number of rows, so copies could need much more
    memory than the file.

    Args:
        array: Arrow array of texts, possibly dictionary-encoded.
        known: Maps each text to the object to return for equal texts. New texts are added.
    """
    texts: list[str] = []
    for start in range(0, len(array), _TEXTS_AT_ONCE):
        for text in array.slice(start, _TEXTS_AT_ONCE).to_pylist():
            text = "" if text is None else str(text)
            texts.append(known.setdefault(text, text))
    return texts


def as_rows(arrays: Sequence[Any], shape: tuple[int, ...], where: str) -> Array:
    """Convert Arrow arrays of numbers, or of flat or nested lists of numbers, to a numpy array.

    Returns:
        A new array `[rows, *shape]`.

    Raises:
        CorruptFileError: A row has a different shape, or a value is null.
    """
    parts = [_numbers(array, shape, where) for array in arrays]
    return np.concatenate(parts) if parts else np.empty((0, *shape))


def _numbers(array: Any, shape: tuple[int, ...], where: str) -> Array:
    num_rows = len(array)
    sizes = []
    while is_list(array):
        lengths = array.value_lengths()
        size = lengths[0].as_py() if len(lengths) else 0
        if lengths.null_count or (_as_numpy(lengths) != size).any():
            raise CorruptFileError(
                f"{where} has rows of different lengths, expected rows of shape {shape}."
            )
        sizes.append(size)
        array = array.flatten()
    got = tuple(sizes)
    if num_rows and (prod(got) != prod(shape) or (len(got) > 1 and got != shape)):
        raise CorruptFileError(f"{where} has rows of shape {got}, expected {shape}.")
    if array.null_count:
        raise CorruptFileError(f"{where} has {array.null_count} missing values (null).")
    return _as_numpy(array).reshape(num_rows, *shape)


def _as_numpy(array: Any) -> Array:
    """Return the values of an Arrow array without nulls, mostly as a view.

    Arrow's method `to_numpy` would import pandas if installed, which takes 0.8 s and 60 MB.
    """
    type_name = str(array.type)
    _, data = array.buffers() if array.type.num_buffers == 2 else (None, None)
    if data is not None and type_name == "bool":
        bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")
        return bits[array.offset : array.offset + len(array)].astype(bool)
    if data is None or type_name not in _NUMPY_TYPES:
        values: Array = array.to_numpy(zero_copy_only=False)
        return values
    dtype = np.dtype(_NUMPY_TYPES[type_name])
    return np.frombuffer(data, dtype, len(array), array.offset * dtype.itemsize)
