"""Parquet files of other systems, through pyarrow: ranges of rows as numpy arrays, in bounded memory.

One rule: what a file declares is compared with its size before it is read, and rows are decoded in batches.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import accumulate, pairwise
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from storage.errors import CorruptFileError

from ..sources.chunk_decoder import RowCache
from .input_checks import KnownFiles, damage_named, file_inside, optional

#: Decoded at a time; one row may be larger.
_BATCH_BYTES, _BATCH_ROWS = 1 << 25, 1 << 16
#: No row takes less than a sixteenth of a byte; no column of a row group unpacks to more than these.
_ROWS_PER_BYTE, _MAX_COLUMN_BYTES, _MAX_EXPANSION = 1 << 4, 1 << 27, 4
#: Columns of integers are read as a whole: 64 MiB each.
_MAX_WHOLE_ROWS = 1 << 23
#: Of columns in lists of unknown lengths, where they have more values than the file has bytes: the least of both.
_VALUES_PER_BYTE, _VALUES_PER_ROW, _MANY_VALUES = 1 << 5, 1 << 6, 1 << 20
_MAX_FOOTERS = 64
#: Row groups of encoded pictures are kept as they are stored, of all files of a folder together.
_KEPT_GROUP_BYTES = 128 << 20
#: Rows whose texts are copies of their own for a moment.
_TEXTS_AT_ONCE = 64
#: Arrow's names -> ours.
_KINDS = {"halffloat": "float16", "float": "float32", "double": "float64", "string": "text", "string_view": "text"}
#: Numbers of fields in a footer: of the file, a row group, a column in it, and its statistics; the kind of texts.
_ROW_GROUPS, _COLUMNS, _ABOUT_COLUMN = 4, 1, 3
_KIND = 1
_NUM_VALUES = 5
_NUM_BYTES = 6
_STATISTICS = 12
_NULL_COUNT = 3
_LEAST_AND_LARGEST = (6, 5)
_BYTES = 6
_NUM_STORED_BYTES = 7
_FIRST_PAGES = (9, 11)
#: The same in the header of a page: unpacked and stored bytes, and what says how many values it has.
_PAGE_BYTES, _PAGE_STORED_BYTES, _PAGE_VALUES, _MAX_HEADER_BYTES = 2, 3, (5, 8), 1 << 16
Array = np.ndarray[Any, Any]


def arrow() -> tuple[Any, Any]:
    """Import pyarrow, and its module for Parquet files.

    Raises:
        UsageError: It is missing.
    """
    pyarrow, parquet = (
        optional(name, "pyarrow", "formats", "Parquet files") for name in ("pyarrow", "pyarrow.parquet")
    )
    return pyarrow, parquet


class ParquetFile:
    """One file; its footer is kept, the file is opened for each read.

    Args:
        path: The file.
        known: States of files that were read before; the file must have kept its own.

    Attributes:
        path: The file.
        num_rows: Rows in it.
        types: Column -> its arrow type without extension types, in order.
        declared_types: The same as they are declared.

    Raises:
        CorruptFileError: It is damaged, has changed, or declares more than it can hold.
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
        self.types: dict[str, Any] = {name: plain_type(kind) for name, kind in self.declared_types.items()}
        sizes = [self._footer.row_group(number).num_rows for number in range(self._footer.num_row_groups)]
        self._starts = np.cumsum([0, *sizes])
        ends = list(accumulate(map(_num_leaves, self.types.values()), initial=0))
        self._leaves = {name: range(*bounds) for name, bounds in zip(self.types, pairwise(ends), strict=True)}
        if len(self.types) != len(schema.names) or min(sizes, default=0) < 0 or self._starts[-1] != self.num_rows:
            raise self._damaged("columns with names of their own, and the rows of all row groups", "others")
        if self.num_rows > (most := self._num_bytes * _ROWS_PER_BYTE):
            raise self._damaged(f"at most {most} rows in {self._num_bytes} bytes", str(self.num_rows))

    def batches(
        self, columns: Mapping[str, int | None], start: int, stop: int, batch_rows: int = _BATCH_ROWS
    ) -> Iterator[dict[str, Any]]:
        """Read rows `start:stop` of some columns, a few at a time.

        Args:
            columns: Column -> how many numbers a row has, or None where that is not known, as of texts.
            start: First row.
            stop: One past the last row.
            batch_rows: How many rows are decoded at a time, if they are not large.

        Yields:
            Column -> an arrow array of the next rows; see `as_rows`.
        """
        low = int(np.searchsorted(self._starts, start, "right")) - 1
        groups = range(low, int(np.searchsorted(self._starts, stop, "left")) if start < stop else low)
        batch_rows = min([batch_rows, *(self._batch_rows(name, width, groups) for name, width in columns.items())])
        position = int(self._starts[low])
        with self._opened() as file:
            batches = file.iter_batches(batch_rows, list(groups), list(columns), use_threads=False)
            while position < stop and groups:
                if (batch := next(batches, None)) is None:
                    raise self._damaged(f"the rows {start}:{stop}", f"those up to {position}")
                first = max(start - position, 0)
                last = min(stop - position, len(batch))
                if first < last:
                    yield {name: plain_array(batch.column(name)).slice(first, last - first) for name in columns}
                position += len(batch)

    def groups(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield the first row and the end of each row group with some of the rows `start:stop`."""
        for low, high in pairwise(self._starts.tolist()):
            if low < stop and high > start:
                yield low, high

    def integers(self, names: Sequence[str]) -> dict[str, Array]:
        """Read whole columns of integers or truth values: name -> `[rows]` int64."""
        for name in names:
            kind = str(self.types.get(name, "none"))
            if kind != "bool" and not kind.startswith(("int", "uint")):
                raise self._damaged(f"the column {name!r} of integers", kind)
        if self.num_rows > _MAX_WHOLE_ROWS:
            raise self._damaged(f"at most {_MAX_WHOLE_ROWS} rows", str(self.num_rows))
        parts = list(self.batches(dict.fromkeys(names, 1), 0, self.num_rows))
        where = f"of {str(self.path)!r}"
        return {
            name: as_rows([part[name] for part in parts], (), f"{name!r} {where}").astype(np.int64) for name in names
        }

    def bounds(self, name: str) -> tuple[int, int] | None:
        """Return the least and the largest number of a column of integers, as the footer says; None if it does not."""
        kind = str(self.types.get(name, "none"))
        if self._footer.num_row_groups != 1 or kind not in ("int32", "int64"):
            return None
        found = self._columns[0][self._leaves[name][0]].get(_STATISTICS, {})
        least, largest = (found.get(field) for field in _LEAST_AND_LARGEST)
        if found.get(_NULL_COUNT) or not (isinstance(least, bytes) and isinstance(largest, bytes)):
            return None
        return int.from_bytes(least, "little", signed=True), int.from_bytes(largest, "little", signed=True)

    def _batch_rows(self, name: str, width: int | None, groups: range) -> int:
        """Return how many rows of a column to decode at a time, after comparing what it declares."""
        if name not in self.types:
            raise self._damaged(f"the column {name!r}", "none of that name")
        largest = 1
        most_packed = min(self._num_bytes * _VALUES_PER_BYTE, self.num_rows * _VALUES_PER_ROW + _MANY_VALUES)
        for group in groups:
            for leaf in self._leaves[name]:
                kind, num_values, num_bytes = self._sizes(group, leaf)
                num_rows = int(self._starts[group + 1] - self._starts[group])
                most_values = (
                    num_rows * max(width, 1) if width is not None else num_rows + max(self._num_bytes, most_packed)
                )
                most_bytes = max(_MAX_COLUMN_BYTES, self._num_bytes * _MAX_EXPANSION)
                if num_values > most_values or num_bytes > most_bytes:
                    got = f"{num_values} values in {num_bytes} bytes"
                    raise self._damaged(f"at most {most_values} values, {most_bytes} bytes of {name!r}", got)
                # A text that is repeated is stored once: as many rows may each be all that there is.
                largest = max(largest, num_bytes if kind == _BYTES else 8 * (width or 1))
        return max(1, _BATCH_BYTES // largest)

    def _sizes(self, group: int, leaf: int) -> tuple[int, int, int]:
        """Return the kind of a column of a row group, and how many values and unpacked bytes it has.

        Its pages are asked as well as the footer: Arrow takes the memory that they declare.
        """
        if (group, leaf) not in self._known_sizes:
            about = self._columns[group][leaf]
            with self._footer_named(), self._known.open(self.path) as file:
                position = min(about[first] for first in _FIRST_PAGES if first in about)
                end = position + about[_NUM_STORED_BYTES]
                num_values = 0
                num_bytes = 0
                while position < end:
                    file.seek(position)
                    page = _Thrift(file.read(min(_MAX_HEADER_BYTES, end - position)))
                    header = page.value(_Thrift.STRUCT)
                    position += page.position + max(0, header[_PAGE_STORED_BYTES])
                    num_values += sum(header[kind][1] for kind in _PAGE_VALUES if kind in header)
                    num_bytes += header[_PAGE_BYTES]
                num_values = max(about[_NUM_VALUES], num_values)
                num_bytes = max(about[_NUM_BYTES], num_bytes)
                self._known_sizes[group, leaf] = int(about[_KIND]), int(num_values), int(num_bytes)
        return self._known_sizes[group, leaf]

    @cached_property
    def _columns(self) -> list[list[dict[int, Any]]]:
        """Row group -> column -> what the footer says of it.

        Not by Arrow: where it finds sizes, histograms and types that contradict each other, it ends the process.
        """
        with self._footer_named(), self._known.open(self.path) as file:
            file.seek(-8, os.SEEK_END)
            size = int.from_bytes(file.read(4), "little")
            file.seek(-8 - size, os.SEEK_END)
            groups = _Thrift(file.read(size)).value(_Thrift.STRUCT)[_ROW_GROUPS]
            return [[dict(column[_ABOUT_COLUMN]) for column in group[_COLUMNS]] for group in groups]

    def _footer_named(self) -> Any:
        kinds = (OSError, LookupError, TypeError, ValueError, RecursionError)
        return damage_named("read", repr(str(self.path)), "an intact footer, and headers of pages", *kinds)

    @contextmanager
    def _opened(self) -> Iterator[Any]:
        self._known.check(self.path)
        pyarrow, parquet = arrow()
        damage = (pyarrow.ArrowException, OSError, ValueError, LookupError, TypeError, NotImplementedError)
        expected = "an intact Parquet file"
        with (
            damage_named("read", repr(str(self.path)), expected, *damage),
            parquet.ParquetFile(os.fspath(self.path), metadata=self._footer) as file,
        ):
            yield file

    def _damaged(self, expected: str, got: str) -> CorruptFileError:
        return CorruptFileError("read", repr(str(self.path)), expected, got)


class KeptRows:
    """Rows of some columns of a row group, as arrow arrays: what `ParquetFile.batches` yields.

    Attributes:
        nbytes: Bytes of the rows.
    """

    def __init__(self) -> None:
        self._batches: list[dict[str, Any]] = []
        self.nbytes = 0

    def append(self, batch: dict[str, Any]) -> None:
        """Take the next rows."""
        self._batches.append(batch)
        self.nbytes += sum(array.nbytes for array in batch.values())

    def slices(self, start: int, stop: int) -> Iterator[dict[str, Any]]:
        """Yield the rows `start:stop`: column -> an arrow array, a view."""
        for batch in self._batches:
            num_rows = len(next(iter(batch.values())))
            first = max(start, 0)
            last = min(stop, num_rows)
            if first < last:
                yield {name: array.slice(first, last - first) for name, array in batch.items()}
            start -= num_rows
            stop -= num_rows


class ParquetFiles(dict[str, ParquetFile]):
    """The files of one folder by their names, opened when asked for; the footers of a few are kept.

    Args:
        root: The folder; a name that leads out of it is refused.
        known: States of the files that were read before.
    """

    def __init__(self, root: Path, known: KnownFiles | None = None) -> None:
        self._root = root
        self._known = KnownFiles() if known is None else known
        self._groups = RowCache(_KEPT_GROUP_BYTES)
        self._large_groups: set[tuple[str, int, tuple[str, ...]]] = set()

    def __missing__(self, name: str) -> ParquetFile:
        if len(self) == _MAX_FOOTERS:
            del self[next(iter(self))]
        self._known.check(self._root / name)
        self[name] = ParquetFile(file_inside(self._root, name), self._known)
        return self[name]

    def kept_batches(
        self, name: str, columns: Mapping[str, int | None], start: int, stop: int
    ) -> Iterator[dict[str, Any]]:
        """Read as `ParquetFile.batches` does, and keep the row groups that were read last, as they are encoded.

        Reading a few rows of a row group takes as long as reading all rows before them.
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

    def _kept_group(self, name: str, columns: Mapping[str, int | None], start: int, stop: int) -> KeptRows | None:
        """Return a row group that is kept, read if it is not there; None if it is too large."""
        key = name, start, tuple(columns)
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
    """Values in Thrift's compact protocol, as Parquet's footers have them: a struct is a dict by numbers of fields."""

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
        """Read the next value, of a kind in the numbers of the protocol."""
        if self._BYTE < kind <= self._LAST_INTEGER:
            number = self._number()
            return number >> 1 ^ -(number & 1)
        if kind == self.STRUCT:
            return self._struct()
        if kind == self._BINARY:
            return self._bytes(self._number())
        if kind < self._BYTE:  # the kind is the value
            return kind == self._TRUE
        if kind in (self._BYTE, self._DOUBLE):
            return self._bytes(1 if kind == self._BYTE else 8)
        if kind > self._SET:
            raise LookupError(f"a value of kind {kind}, which such files have none of")
        head = self._bytes(1)[0]
        num = head >> 4 if head < 0xF0 else self._number()
        kind = max(head & 15, self._BYTE)
        return [self.value(kind) for _ in range(num)]

    def _struct(self) -> dict[int, Any]:
        found = dict[int, Any]()
        field = 0
        while head := self._data[self.position]:
            self.position += 1
            field = field + (head >> 4) if head >> 4 else self.value(self._LAST_INTEGER)
            found[field] = self.value(head & 15)
        self.position += 1
        return found

    def _number(self) -> int:
        number = shift = 0
        while (byte := self._data[self.position]) & 128 and shift < 64:
            number = number | (byte & 127) << shift
            shift = shift + 7
            self.position = self.position + 1
        self.position += 1
        return number | byte << shift

    def _bytes(self, num: int) -> bytes:
        self.position += num
        if self.position > len(self._data):
            raise LookupError("it ends too early")
        return self._data[self.position - num : self.position]


def plain_type(kind: Any) -> Any:
    """Return an Arrow type without extension types, which packages such as `datasets` register when imported."""
    pyarrow, _ = arrow()
    if isinstance(kind, pyarrow.BaseExtensionType):
        return plain_type(kind.storage_type)
    if not has_extension(kind):
        return kind
    if pyarrow.types.is_struct(kind):
        return pyarrow.struct([field.with_type(plain_type(field.type)) for field in kind])
    if pyarrow.types.is_fixed_size_list(kind):
        return pyarrow.list_(plain_type(kind.value_type), kind.list_size)
    make = pyarrow.large_list if pyarrow.types.is_large_list(kind) else pyarrow.list_
    return make(plain_type(kind.value_type))


def has_extension(kind: Any) -> bool:
    """Return whether an Arrow type is an extension type, or a list or struct of such."""
    pyarrow, _ = arrow()
    is_nested = not isinstance(kind, pyarrow.BaseExtensionType) and kind.num_fields
    inner = [kind.field(number).type for number in range(kind.num_fields)] if is_nested else []
    return isinstance(kind, pyarrow.BaseExtensionType) or any(map(has_extension, inner))


def plain_array(array: Any) -> Any:
    """Return an Arrow array as its type without extension types stores it."""
    pyarrow, _ = arrow()
    if isinstance(array.type, pyarrow.BaseExtensionType):
        return plain_array(array.storage)
    return array.cast(plain_type(array.type)) if has_extension(array.type) else array


def _num_leaves(kind: Any) -> int:
    return sum(_num_leaves(kind.field(number).type) for number in range(kind.num_fields)) if kind.num_fields else 1


def is_list(array: Any) -> bool:
    """Return whether the values of an arrow array are lists, of fixed size or not."""
    return "list" in str(array.type).partition("<")[0]


def first_row(array: Any) -> tuple[tuple[int, ...], str]:
    """Return the sizes of the nested lists in the first row of an arrow array, and what they hold.

    Returns:
        Sizes, and a key of `DTYPES`, "text", "binary" or arrow's own name.
    """
    sizes = []
    while is_list(array) and len(array) and array[0].is_valid:
        array = array[0].values
        sizes.append(len(array))
    name = str(array.type).removeprefix("dictionary<values=").partition(",")[0].removeprefix("large_")
    return tuple(sizes), _KINDS.get(name, name if array.type.num_fields == 0 else str(array.type))


def shared_texts(array: Any, known: dict[str, str]) -> list[str]:
    """Return the texts of an Arrow array; equal ones are one object, "" stands for missing ones.

    A dictionary page stores a text once for any number of rows: copies of it would take memory that the file has not.

    Args:
        array: Texts, also as a dictionary.
        known: The texts so far; grows.
    """
    texts: list[str] = []
    for start in range(0, len(array), _TEXTS_AT_ONCE):
        for text in array.slice(start, _TEXTS_AT_ONCE).to_pylist():
            text = "" if text is None else str(text)
            texts.append(known.setdefault(text, text))
    return texts


def as_rows(arrays: Sequence[Any], shape: tuple[int, ...], where: str) -> Array:
    """Make a numpy array of arrow arrays of numbers or of lists of them, nested or in one level.

    Returns:
        `[rows, *shape]`, new.

    Raises:
        CorruptFileError: A row has another shape, or lacks a number.
    """
    parts = [_numbers(array, shape, where) for array in arrays]
    return np.concatenate(parts) if parts else np.empty((0, *shape))


def _numbers(array: Any, shape: tuple[int, ...], where: str) -> Array:
    num_rows = len(array)
    sizes = []
    while is_list(array):
        lengths = array.value_lengths()
        size = lengths[0].as_py() if len(lengths) else 0
        if lengths.null_count or (lengths.to_numpy(zero_copy_only=False) != size).any():
            raise CorruptFileError("read", where, f"rows of the shape {shape}", "rows of several lengths")
        sizes.append(size)
        array = array.flatten()
    got = tuple(sizes)
    if num_rows and (prod(got) != prod(shape) or (len(got) > 1 and got != shape)):
        raise CorruptFileError("read", where, f"rows of the shape {shape}", str(got))
    if array.null_count:
        raise CorruptFileError("read", where, "a value in every row", f"none in {array.null_count}")
    rows: Array = array.to_numpy(zero_copy_only=False).reshape(num_rows, *shape)
    return rows
