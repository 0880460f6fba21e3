"""Episodes in HDF5 files: which datasets hold their fields, and where.

One rule: a reader says once, in `layout`, what the datasets of an episode mean. Every episode is checked against it,
the first ones when the file is opened and the others when they are first read, as opening a dataset takes 40 us.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import h5py
import numpy as np

from storage.core.fields import DTYPES, MAX_FIELDS, Field, Schema
from storage.errors import CorruptFileError, DataFileError
from storage.saving.hdf5_files import reported

from ...sources.episode_reader import ABSENT, EpisodeInfo, ForeignReader
from ..encoded_images import decode_picture, picture_shape
from ..input_checks import parse_json
from .hdf5_datasets import Files, Found, OpenFile

#: Datasets that are checked while a file is opened.
_CHECKED_AT_ONCE = 600
#: What is metadata may be this large.
_MAX_ASIDE_BYTES = 1 << 20
#: Rows of at least this size, such as pictures, are read by the chunks of the file.
_LARGE_ROW_BYTES = 16 << 10
#: Of large rows that are not in chunks, about so many bytes are read at once: nothing is decoded there.
_UNCHUNKED_BYTES = 1 << 18
#: Of more steps only the last is looked at.
_MAX_FLAGS = 1 << 16
#: Names of ours, not to be taken by other datasets.
_JPEG_START, _JPEG_END = b"\xff\xd8", b"\xff\xd9"
_OURS = ("action", "observation", "reward", "terminated", "truncated")


class Column(NamedTuple):
    """Where the rows of a field lie.

    Attributes:
        path: Of the dataset, below the episode's group.
        shape: Of a row as it is given; of as many numbers as the file's.
        kind: Key of `DTYPES` as it is given, or "text".
        first: Row of step 0; of a final observation, its row counted from T.
        is_picture: Rows are files of pictures.
    """

    path: str
    shape: tuple[int, ...]
    kind: str
    first: int = 0
    is_picture: bool = False


@dataclass(frozen=True)
class Layout:
    """What the datasets of an episode mean.

    Attributes:
        columns: Its fields.
        final: The fields of the observation after the last step.
        aside: Datasets that are metadata -> which row is, counted from the end; None for all.
    """

    columns: dict[str, Column] = field(default_factory=dict)
    final: dict[str, Column] = field(default_factory=dict)
    aside: dict[str, int | None] = field(default_factory=dict)

    @cached_property
    def schema(self) -> Schema:
        return _schema(self.columns)

    @cached_property
    def final_schema(self) -> Schema:
        return Schema(_final_field(name, column) for name, column in self.final.items())

    @cached_property
    def texts(self) -> tuple[str, ...]:
        return tuple(name for name, column in self.columns.items() if column.kind == "text")


class Source(NamedTuple):
    """Where an episode lies."""

    path: Path
    group: str
    layout: Layout


class Told(Mapping[str, Any]):
    """Metadata of an episode, of which the most is read when it is first asked for."""

    def __init__(self, known: Mapping[str, Any], load: Callable[[], dict[str, Any]]) -> None:
        self._known = known
        self._load = load

    @cached_property
    def _all(self) -> dict[str, Any]:
        return {**self._load(), **self._known}

    def __getitem__(self, name: str) -> Any:
        return self._known[name] if name in self._known else self._all[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)


class Hdf5Reader(ForeignReader):
    """Reads episodes that are groups of HDF5 files; a format says in a few tables what their datasets are."""

    #: Dataset or group of an episode -> our name; it has a row per step.
    STEPS: ClassVar[Mapping[str, str]] = {}
    #: Those of `STEPS` with one row more, the final observation. Where a format has some, the datasets that no table
    #: names may have one row more too, which is metadata.
    AFTER: ClassVar[tuple[str, ...]] = ()
    #: Dataset of a truth value per step -> attribute of the episode that the last one is.
    ENDS: ClassVar[Mapping[str, str]] = {}
    #: Datasets and groups that are metadata.
    ASIDE: ClassVar[tuple[str, ...]] = ()
    #: Dataset, or group of some, whose rows are the steps, and the attribute that tells their number too.
    COUNTED: ClassVar[str] = "actions"
    STATED: ClassVar[str] = ""
    #: Groups whose members, beside those of the episode, tell episodes of different fields apart.
    GROUPS: ClassVar[tuple[str, ...]] = ()
    #: Attributes of episodes, besides `STATED`, that are given otherwise than by their names.
    KNOWN: ClassVar[tuple[str, ...]] = ()

    def __init__(self, path: Path, options: Mapping[str, Any]) -> None:
        self.files, self.unread = Files(), set[str]()  # those of no type that is read, named once
        super().__init__(path, options)

    def num_rows(self, file: OpenFile, node: Any) -> int:
        """Return the rows of an episode's datasets.

        Raises:
            CorruptFileError: There are none, or its attribute tells another number.
        """
        counted = file.open(self.COUNTED, node)
        while isinstance(counted, h5py.h5g.GroupID):
            members = file.members(counted)
            counted = file.open(members[0], counted) if members else None
        if not getattr(counted, "shape", ()):
            raise CorruptFileError("read", file.place(node), f"the dataset {self.COUNTED!r}", "none")
        rows = int(counted.shape[0])
        stated = file.attribute(node, self.STATED) if self.STATED else None
        if stated is not None and stated != rows:
            expected = f"{rows} steps, as it has {self.COUNTED}"
            raise CorruptFileError("read", file.place(node), expected, f"{self.STATED} {stated}").of("counts")
        return rows

    def length(self, file: OpenFile, node: Any) -> int:
        """Return the steps of an episode by a quick look at its group."""
        return self.num_rows(file, node)

    def layout(self, file: OpenFile, group: str, found: Mapping[str, Found]) -> tuple[int, Layout]:
        """Return how many steps the episode in a group has, and what its datasets mean.

        Raises:
            DataFileError: They contradict each other.
        """
        maker = LayoutMaker(self, file, group, found)
        for path in found:
            self.put(maker, path)
        return maker.length, maker.layout

    def put(self, maker: LayoutMaker, path: str) -> None:
        """Add a dataset to the layout."""
        head, _, rest = path.partition("/")
        name = f"{self.STEPS.get(head, '')}/{rest}".rstrip("/")
        if head in self.ASIDE:
            maker.layout.aside[path] = None
        elif head not in self.STEPS:
            if head not in self.ENDS:
                maker.add_other(path, has_last=bool(self.AFTER))
        elif self.is_picture(maker, path, name):
            maker.add_pictures(name, path, has_last=head in self.AFTER)
        else:
            maker.add(name, path, has_last=head in self.AFTER)

    def is_picture(self, maker: LayoutMaker, path: str, name: str) -> bool:
        """Return whether the rows of a dataset are files of pictures."""
        return False

    def shape_of(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of a field of pictures, which are `[H, W, C]`."""
        return shape

    def about(self, file: OpenFile, node: Any, length: int) -> dict[str, Any]:
        """Return the rest of `EpisodeInfo` for the episode in a group; "metadata" is completed by its attributes.

        "repeated" names fields of the final observation that only repeat the last one.
        """
        return {ours: self.flag(file, node, name, length) for name, ours in self.ENDS.items()}

    def flag(self, file: OpenFile, node: Any, name: str, length: int) -> bool | None:
        """Return the last of the truth values of an episode's steps, `[T]` or `[T, 1]`; None if there are none.

        Raises:
            CorruptFileError: There are more or fewer.
        """
        if not isinstance(dataset := file.open(name, node), h5py.h5d.DatasetID):
            return None
        found = file.describe(dataset)
        if found.kind not in DTYPES or found.shape not in ((length,), (length, 1)):
            where = f"{name!r} of {file.place(node)}"
            raise CorruptFileError("read", where, f"{length} truth values", f"{found.kind} {found.shape}").of("counts")
        values = file.rows("", found, 0 if length <= _MAX_FLAGS else length - 1, length, dataset).astype(bool)
        if values[:-1].any() and name != "success":
            where = f"{name!r} of {file.place(node)}"
            step = int(np.argmax(values))
            wrong = self.advise("cut the episode", where, "true for its last step only", f"true for step {step}")
            wrong.of("inside", file.name(node).rpartition("/")[2]).advice = "It is kept"
        return bool(values[-1])

    def collect(self, path: Path, parent: str, names: Iterable[str]) -> list[EpisodeInfo]:
        """List the episodes in groups of a file; one that is damaged is left out, and a problem."""
        episodes: list[EpisodeInfo] = []
        known: dict[tuple[str, ...], Layout] = {}
        with self.files.use(path) as file:
            above = file.group(parent)
            for name in names:
                group = f"{parent}/{name}" if parent else name
                try:
                    with reported(f"{group!r} of {file.where}"):
                        node = file.group(name, above)
                        length, layout = self._layout_of(file, group, node, known)
                        about, source = self.about(file, node, length), Source(path, group, layout)
                        about["metadata"] = Told(about.get("metadata", {}), partial(self.aside, source))
                        repeated = about.pop("repeated", ())
                        final = [one for one in layout.final_schema.values() if one.name not in repeated]
                        parts = layout.schema, layout.texts, Schema(final)
                        episodes.append(EpisodeInfo(name, length, *parts, source=source, **about))
                except DataFileError as cause:
                    if file.num_links_left < 0:
                        raise
                    self.problems.append(cause.of("", name))
        return episodes

    def _layout_of(
        self, file: OpenFile, group: str, node: Any, known: dict[tuple[str, ...], Layout]
    ) -> tuple[int, Layout]:
        """Return the length and layout of an episode, of the first ones by all their datasets; `known` grows."""
        same = self._names(file, node)
        if len(file.checked) * len(same) < _CHECKED_AT_ONCE or same not in known:
            length, layout = self.layout(file, group, file.survey(group))
            file.checked.add(group)
            known[same] = layout = known[same] if known.get(same) == layout else layout
        else:
            length = self.length(file, node)
            layout = known[same]
        if length < 1:
            raise CorruptFileError("read", file.place(node), "at least 1 step", str(length))
        return length, layout

    def _names(self, file: OpenFile, node: Any) -> tuple[str, ...]:
        """Name the members of an episode and of its `GROUPS`, which tell its fields."""
        names = file.members(node)
        for name in [name for name in self.GROUPS if name in names]:
            below = file.open(name, node)
            names += [f"{name}/{one}" for one in (file.members(below) if hasattr(below, "links") else ())]
        return tuple(names)

    def aside(self, source: Source) -> dict[str, Any]:
        """Read the attributes of an episode, and the datasets that are metadata."""
        with self.files.use(source.path) as file:
            found = file.survey(source.group)
            told = file.attributes(file.group(source.group), (*self.KNOWN, self.STATED))
            told |= absent_fields(told.get(ABSENT))
            for name, row in source.layout.aside.items():
                path = f"{source.group}/{name}"
                one = found[name]
                if row is not None:
                    last = one.shape[0] + row
                    told[f"final/{name}"] = file.rows(path, one, last, last + 1)[0]
                elif (whole := file.whole(path, one, _MAX_ASIDE_BYTES)) is not None:
                    told[name] = whole
        return told

    def check(self, file: OpenFile, info: EpisodeInfo) -> dict[str, Found]:
        """Find the datasets of an episode, and see at its first reading whether they are as was assumed."""
        _, group, layout = info.source
        found = file.survey(group)
        if group not in file.checked:
            where = f"{group!r} of {file.where}"
            length, now = self.layout(file, group, found)
            if length != info.length:
                raise CorruptFileError("read", where, f"{info.length} steps", str(length)).of("counts")
            if now != layout:
                got = layout.schema.difference(now.schema) or "other final observations"
                raise CorruptFileError("read", where, "fields as in the episodes before it", got).of("fields")
            file.checked.add(group)
        return found

    def file_of(self, number: int, name: str, step: int) -> Path:
        path: Path = self.episodes[number].source.path
        return path

    def read(self, number: int, name: str, start: int, stop: int) -> Any:
        info = self.episodes[number]
        column = info.source.layout.columns[name]
        return self.rows(info, column, column.first + start, column.first + stop)

    def rows_read_together(self, number: int, name: str) -> int | None:
        info = self.episodes[number]
        column = info.source.layout.columns[name]
        if column.is_picture:
            return 1
        if info.schema[name].row_bytes < _LARGE_ROW_BYTES or column.first:
            return None
        with self.files.use(info.source.path) as file:
            chunk_rows = self.check(file, info)[column.path].chunk_rows
        return chunk_rows or max(1, _UNCHUNKED_BYTES // info.schema[name].row_bytes)

    def read_final(self, number: int, name: str) -> Any:
        info = self.episodes[number]
        column = info.source.layout.final[name]
        row = info.length + column.first
        value = self.rows(info, column, row, row + 1)[0]
        return value if column.kind == "text" else np.asarray(value)

    def rows(self, info: EpisodeInfo, column: Column, start: int, stop: int) -> Any:
        """Read rows of the dataset of a field, counted in the dataset."""
        path, group, _ = info.source
        with self.files.use(path) as file:
            found = self.check(file, info)[column.path]
            rows = file.rows(f"{group}/{column.path}", found, start, stop)
        if column.is_picture:
            where = f"{column.path!r} of {info.name!r} of {str(path)!r}"
            size = (*column.shape, 1)[:3]
            pictures = [decode_picture(_cut(row, where), where, size) for row in rows]
            rows = np.stack(pictures) if pictures else np.empty((0, *size), np.uint8)
        return rows if column.kind == "text" else rows.reshape(len(rows), *column.shape)


class LayoutMaker:
    """Sorts the datasets of one episode into a layout.

    Args:
        reader: Notes what is not read.
        file: It is in this one.
        group: Of the episode.
        found: The datasets.
    """

    def __init__(self, reader: Hdf5Reader, file: OpenFile, group: str, found: Mapping[str, Found]) -> None:
        node = file.group(group)
        self.file = file
        self.group = group
        self.found = found
        self.layout = Layout()
        self._reader = reader
        self._where = file.place(node)
        self.length = reader.num_rows(file, node)

    def check_rows(self, path: str, rows: int = 0) -> None:
        """Compare the rows of a dataset with the steps, and `rows` more.

        Raises:
            CorruptFileError: It has more or fewer.
        """
        shape = self.found[path].shape
        if not shape or shape[0] != self.length + rows:
            expected = f"{self.length + rows} rows of {path!r}"
            raise CorruptFileError("read", self._where, expected, f"shape {shape}").of("counts")

    def add(self, name: str, path: str, has_last: bool = False) -> None:
        """Make a dataset a field, if its type is read; with a row more that one is the final observation."""
        self.check_rows(path, int(has_last))
        if self._put(self.layout.columns, name, path) and has_last:
            self._put(self.layout.final, name, path)

    def add_pictures(self, name: str, path: str, has_last: bool) -> None:
        """Make a dataset of encoded pictures a field; the header of the first one tells their shape.

        Raises:
            CorruptFileError: It has more or fewer rows, or the first one is no picture.
        """
        self.check_rows(path, int(has_last))
        where = f"{path!r} of {self._where}"
        lossy = self._reader.metadata["lossy"]
        first = self.file.rows(f"{self.group}/{path}", self.found[path], 0, min(self.length + has_last, 1))
        shape = picture_shape(_cut(first[0], where), where) if len(first) else (0, 0, 3)
        self.layout.columns[name] = Column(path, self._reader.shape_of(name, shape), "uint8", is_picture=True)
        if has_last:
            self.layout.final[name] = self.layout.columns[name]
        if len(first) and bytes(first[0][:2]) == _JPEG_START and name not in lossy:
            lossy.append(name)

    def add_final(self, name: str, path: str, row: int) -> None:
        """Make a row of a dataset, counted from T, a field of the final observation."""
        self._put(self.layout.final, name, path, row)

    def add_other(self, path: str, has_last: bool = False) -> None:
        """Make a dataset a field by its own name if it has a row per step, otherwise metadata.

        With `has_last` it may also have T + 1 rows, of which the last is metadata.
        """
        found = self.found[path]
        own = f"other/{path}" if path.split("/")[0] in _OURS else path
        rows = found.shape[0] - self.length if found.shape and own not in self.layout.columns else -1
        if rows == 1 and has_last and found.kind in DTYPES:
            self._put(self.layout.columns, path, path)
            self.layout.aside[path] = -1
        elif rows == 0:
            self._put(self.layout.columns, own, path)
        else:
            self.layout.aside[path] = None

    def _put(self, columns: dict[str, Column], name: str, path: str, first: int = 0) -> bool:
        found = self.found[path]
        if found.kind in ("", "bytes") or (found.kind == "text" and len(found.shape) != 1):
            if path not in self._reader.unread:
                self._reader.unread.add(path)
                where = f"{path!r} of {self._where}"
                expected = "numbers or texts"
                self._reader.problem("read the dataset", where, expected, "another type", "It is left out")
            return False
        if len(columns) >= MAX_FIELDS:
            raise CorruptFileError("read", self._where, f"at most {MAX_FIELDS} fields", "more")
        shape = () if name == "reward" and found.shape[1:] == (1,) else found.shape[1:]
        columns[name] = Column(path, shape, found.kind, first)
        return True


def absent_fields(text: Any) -> dict[str, list[str]]:
    """Parse the names of fields that an episode lacked when it was written, a JSON list; {} if there is none."""
    with suppress(CorruptFileError):
        names = parse_json(text, Path(ABSENT)) if isinstance(text, str) else None
        if isinstance(names, list):
            return {ABSENT: [name for name in names if isinstance(name, str)]}
    return {}


def is_encoded(found: Found) -> bool:
    """Return whether the rows of a dataset can be files of pictures, perhaps with zeros after them."""
    return (found.kind == "bytes" and len(found.shape) == 1) or (found.kind == "uint8" and len(found.shape) == 2)


def _cut(row: Any, where: str) -> bytes:
    """Remove what follows a picture."""
    data = bytes(row).rstrip(b"\0")
    if data[:2] != _JPEG_START:
        return data
    if (end := data.rfind(_JPEG_END)) < 0:
        raise CorruptFileError("decode the picture", where, "an intact picture", "a JPEG that breaks off")
    return data[: end + 2]


def _final_field(name: str, column: Column) -> Field:
    is_text = column.kind == "text"
    return Field(name, column.shape, "int64" if is_text else column.kind, is_text=is_text)


def _schema(columns: Mapping[str, Column]) -> Schema:
    return Schema(Field(name, one.shape, one.kind) for name, one in columns.items() if one.kind != "text")
