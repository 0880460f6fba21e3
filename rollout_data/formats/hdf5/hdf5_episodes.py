"""Base of readers of episodes that are groups in HDF5 files.

`Hdf5Reader.layout` maps the datasets of an episode to fields. Every episode is checked against its
layout: the first episodes when the file is opened, later episodes at their first read, because
opening a dataset takes 40 us.
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

from ...sources.episode_info import ABSENT, EpisodeInfo
from ...sources.file_source import FileSource
from ..encoded_images import decode_picture, picture_shape
from ..input_checks import parse_json
from .hdf5_datasets import DatasetInfo, Files, OpenFile

#: Number of datasets that are checked when a file is opened. Others are checked when first read.
_CHECKED_AT_ONCE = 600
#: Maximum bytes of a metadata dataset.
_MAX_METADATA_BYTES = 1 << 20
#: Minimum bytes of a large row, such as a picture. Large rows are read in complete chunks.
_LARGE_ROW_BYTES = 16 << 10
#: Bytes of large rows read at once from a dataset without chunks.
_UNCHUNKED_BYTES = 1 << 18
#: Maximum number of end flags to read. For a longer episode, only the last flag is read.
_MAX_FLAGS = 1 << 16
_JPEG_START = b"\xff\xd8"
_JPEG_END = b"\xff\xd9"
#: Reserved field names. A dataset with such a name but another meaning gets the prefix "other/".
_RESERVED = ("action", "observation", "reward", "terminated", "truncated")


class DatasetColumn(NamedTuple):
    """The dataset that contains a field.

    Attributes:
        path: Path of the dataset below the group of the episode.
        shape: Shape of a row of the field, with as many elements as a row of the dataset.
        kind: Name of the dtype, such as "float32", or "text".
        first: Row of step 0 in the dataset. For a final observation: its row, counted from row T.
        is_picture: Whether rows are encoded pictures.
    """

    path: str
    shape: tuple[int, ...]
    kind: str
    first: int = 0
    is_picture: bool = False


@dataclass(frozen=True)
class Layout:
    """Mapping of the datasets of an episode to fields and metadata.

    Attributes:
        columns: Maps field names to datasets.
        final: Maps field names of the final observation to datasets.
        metadata: Maps paths of metadata datasets to the row to read, counted from the end; None
            reads all rows.
    """

    columns: dict[str, DatasetColumn] = field(default_factory=dict)
    final: dict[str, DatasetColumn] = field(default_factory=dict)
    metadata: dict[str, int | None] = field(default_factory=dict)

    @cached_property
    def schema(self) -> Schema:
        fields = []
        for name, column in self.columns.items():
            if column.kind != "text":
                fields.append(Field(name, column.shape, column.kind))
        return Schema(fields)

    @cached_property
    def final_schema(self) -> Schema:
        return Schema(_final_field(name, column) for name, column in self.final.items())

    @cached_property
    def texts(self) -> tuple[str, ...]:
        return tuple(name for name, column in self.columns.items() if column.kind == "text")


def _final_field(name: str, column: DatasetColumn) -> Field:
    is_text = column.kind == "text"
    return Field(name, column.shape, "int64" if is_text else column.kind, is_text=is_text)


class EpisodeGroup(NamedTuple):
    """Location of an episode: file, group, and layout of the datasets in the group."""

    path: Path
    group: str
    layout: Layout


class LazyMetadata(Mapping[str, Any]):
    """Metadata of an episode, partly read from the file at the first access.

    Args:
        known: Values in memory, which take precedence over values in the file.
        load: Function that reads the values in the file.
    """

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


class Hdf5Reader(FileSource):
    """Base of readers of episodes in groups of HDF5 files. Subclasses set the class variables."""

    #: Maps each dataset or group with a row per step to the name of its field.
    STEPS: ClassVar[Mapping[str, str]] = {}
    #: Keys of `STEPS` whose datasets have T + 1 rows. The last row is the final observation. If there
    #: are such keys, unlisted datasets may have T + 1 rows too. Their last row becomes metadata.
    WITH_FINAL: ClassVar[tuple[str, ...]] = ()
    #: Maps datasets of end flags, one per step, to attributes of `EpisodeInfo`. The flag of the last
    #: step becomes the value of the attribute.
    ENDS: ClassVar[Mapping[str, str]] = {}
    #: Datasets and groups that become metadata.
    METADATA: ClassVar[tuple[str, ...]] = ()
    #: Dataset, or group of datasets, whose number of rows is the number of steps.
    COUNTED: ClassVar[str] = "actions"
    #: HDF5 attribute of an episode group with the number of steps; "" if the format has none.
    STATED: ClassVar[str] = ""
    #: Subgroups of an episode group. Their members and the members of the episode group determine
    #: the fields of the episode.
    GROUPS: ClassVar[tuple[str, ...]] = ()
    #: HDF5 attributes of episode groups that do not become metadata. `STATED` need not be listed.
    ATTRIBUTES: ClassVar[tuple[str, ...]] = ()

    def __init__(self, path: Path, options: Mapping[str, Any]) -> None:
        self.files = Files()
        #: Datasets of unreadable types, reported once for all episodes.
        self.unread = set[str]()
        super().__init__(path, options)

    def num_rows(self, file: OpenFile, node: Any) -> int:
        """Return the number of rows of the datasets of an episode.

        Raises:
            CorruptFileError: There are no rows, or an attribute contradicts the number.
        """
        counted = file.open(self.COUNTED, node)
        while isinstance(counted, h5py.h5g.GroupID):
            members = file.members(counted)
            counted = file.open(members[0], counted) if members else None
        where = file.place(node)
        if not getattr(counted, "shape", ()):
            raise CorruptFileError(f"{where} has no dataset {self.COUNTED!r} with steps.")
        num_rows = int(counted.shape[0])
        stated = file.attribute(node, self.STATED) if self.STATED else None
        if stated is not None and stated != num_rows:
            raise CorruptFileError(
                f"{where} has {num_rows} rows of {self.COUNTED!r}, but its attribute "
                f"{self.STATED!r} is {stated}.",
                kind="counts",
            )
        return num_rows

    def length(self, file: OpenFile, node: Any) -> int:
        """Return the number of steps of an episode without reading its layout."""
        return self.num_rows(file, node)

    def layout(
        self,
        file: OpenFile,
        group: str,
        datasets: Mapping[str, DatasetInfo],
    ) -> tuple[int, Layout]:
        """Return the number of steps and the layout of the episode in a group.

        Raises:
            DataFileError: The datasets contradict each other.
        """
        maker = LayoutMaker(self, file, group, datasets)
        for path in datasets:
            self.add_dataset(maker, path)
        return maker.length, maker.layout

    def add_dataset(self, maker: LayoutMaker, path: str) -> None:
        """Add a dataset to the layout of an episode, as a field or as metadata."""
        head, _, rest = path.partition("/")
        if head in self.METADATA:
            maker.layout.metadata[path] = None
            return
        if head not in self.STEPS:
            if head not in self.ENDS:
                maker.add_other(path, has_final=bool(self.WITH_FINAL))
            return
        name = f"{self.STEPS[head]}/{rest}".rstrip("/")
        has_final = head in self.WITH_FINAL
        if self.is_picture(maker, path, name):
            maker.add_pictures(name, path, has_final)
        else:
            maker.add(name, path, has_final)

    def is_picture(self, maker: LayoutMaker, path: str, name: str) -> bool:
        """Return whether the rows of a dataset are encoded pictures."""
        return False

    def shape_of(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of a picture field; `shape` is `[H, W, C]` of the stored pictures."""
        return shape

    def facts(self, file: OpenFile, node: Any, length: int) -> dict[str, Any]:
        """Return the end, task, success and metadata of an episode, as arguments of `EpisodeInfo`.

        The value of "metadata" is completed later by the attributes of the group. The optional key
        "repeated" has the names of fields whose final observation only repeats the last
        observation. The episode gets no final observation of these fields.
        """
        return {name: self.flag(file, node, path, length) for path, name in self.ENDS.items()}

    def flag(self, file: OpenFile, node: Any, name: str, length: int) -> bool | None:
        """Return the last flag of a dataset `[T]` or `[T, 1]`; None if the dataset is missing.

        Raises:
            CorruptFileError: The dataset has a different shape.
        """
        dataset = file.open(name, node)
        if not isinstance(dataset, h5py.h5d.DatasetID):
            return None
        info = file.describe(dataset)
        where = f"{name!r} of {file.place(node)}"
        if info.kind not in DTYPES or info.shape not in ((length,), (length, 1)):
            raise CorruptFileError(
                f"{where} has dtype {info.kind or 'unknown'} and shape {info.shape}, expected a "
                f"flag for each of {length} steps.",
                kind="counts",
            )
        start = 0 if length <= _MAX_FLAGS else length - 1
        values = file.rows("", info, start, length, dataset).astype(bool)
        if values[:-1].any() and name != "success":
            step = int(np.argmax(values))
            message = (
                f"{where} is True before the last step, at step {step}. The episode is not cut."
            )
            self.advise(message, kind="inside", episode=file.name(node).rpartition("/")[2])
        return bool(values[-1])

    def collect(self, path: Path, parent: str, names: Iterable[str]) -> list[EpisodeInfo]:
        """Return the episodes in groups of a file. Damaged episodes are reported and left out.

        Args:
            path: The file.
            parent: Group above the episodes.
            names: Groups of the episodes below `parent`.
        """
        episodes: list[EpisodeInfo] = []
        layouts: dict[tuple[str, ...], Layout] = {}
        with self.files.use(path) as file:
            above = file.group(parent)
            for name in names:
                group = f"{parent}/{name}" if parent else name
                try:
                    with reported(f"{group!r} of {file.where}"):
                        node = file.group(name, above)
                        episodes.append(self._episode(file, group, name, node, layouts))
                except DataFileError as cause:
                    if file.num_links_left < 0:
                        raise
                    self.problems.append(cause.of("", name))
        return episodes

    def _episode(
        self,
        file: OpenFile,
        group: str,
        name: str,
        node: Any,
        layouts: dict[tuple[str, ...], Layout],
    ) -> EpisodeInfo:
        """Return the description of the episode in a group.

        Args:
            file: The file.
            group: Path of the group.
            name: Name of the episode.
            node: The open group.
            layouts: Maps the dataset names of earlier episodes to layouts. A new layout is added.
        """
        length, layout = self._layout_of(file, group, node, layouts)
        source = EpisodeGroup(file.path, group, layout)
        facts = self.facts(file, node, length)
        load = partial(self.read_metadata, source)
        facts["metadata"] = LazyMetadata(facts.get("metadata", {}), load)
        repeated = facts.pop("repeated", ())
        final = [field for field in layout.final_schema.values() if field.name not in repeated]
        return EpisodeInfo(
            name=name,
            length=length,
            schema=layout.schema,
            texts=layout.texts,
            final=Schema(final),
            source=source,
            **facts,
        )

    def _layout_of(
        self,
        file: OpenFile,
        group: str,
        node: Any,
        layouts: dict[tuple[str, ...], Layout],
    ) -> tuple[int, Layout]:
        """Return the length and the layout of an episode.

        The layout of the first episodes is read from their datasets. Later episodes with the same
        dataset names get the same layout, and are checked at their first read.
        """
        names = self._names(file, node)
        num_checked = len(file.checked) * len(names)
        if num_checked < _CHECKED_AT_ONCE or names not in layouts:
            length, layout = self.layout(file, group, file.datasets(group))
            file.checked.add(group)
            if layouts.get(names) == layout:
                layout = layouts[names]  # Equal layouts share one object.
            layouts[names] = layout
        else:
            length = self.length(file, node)
            layout = layouts[names]
        if length < 1:
            raise CorruptFileError(f"{file.place(node)} has no steps.")
        return length, layout

    def _names(self, file: OpenFile, node: Any) -> tuple[str, ...]:
        """Return the names that determine the layout: the members of an episode and of `GROUPS`."""
        names = file.members(node)
        for group in self.GROUPS:
            below = file.open(group, node) if group in names else None
            if isinstance(below, h5py.h5g.GroupID):
                names += [f"{group}/{name}" for name in file.members(below)]
        return tuple(names)

    def read_metadata(self, source: EpisodeGroup) -> dict[str, Any]:
        """Read the metadata of an episode from its HDF5 attributes and its metadata datasets."""
        with self.files.use(source.path) as file:
            datasets = file.datasets(source.group)
            node = file.group(source.group)
            metadata = file.attributes(node, (*self.ATTRIBUTES, self.STATED))
            metadata |= absent_fields(metadata.get(ABSENT))
            for name, row in source.layout.metadata.items():
                path = f"{source.group}/{name}"
                info = datasets[name]
                if row is not None:
                    start = info.shape[0] + row
                    metadata[f"final/{name}"] = file.rows(path, info, start, start + 1)[0]
                    continue
                value = file.read_small(path, info, _MAX_METADATA_BYTES)
                if value is not None:
                    metadata[name] = value
        return metadata

    def checked_datasets(self, file: OpenFile, info: EpisodeInfo) -> dict[str, DatasetInfo]:
        """Return the datasets of an episode. The first call checks them against the layout.

        Raises:
            CorruptFileError: The length or the fields differ from the layout.
        """
        group = info.source.group
        layout = info.source.layout
        datasets = file.datasets(group)
        if group in file.checked:
            return datasets
        where = f"{group!r} of {file.where}"
        length, actual = self.layout(file, group, datasets)
        if length != info.length:
            message = f"{where} has {length} steps, expected {info.length}."
            raise CorruptFileError(message, kind="counts")
        if actual != layout:
            difference = layout.schema.difference(actual.schema)
            difference = difference or "the final observations differ"
            raise CorruptFileError(
                f"{where} has different fields from the previous episodes: {difference}.",
                kind="fields",
            )
        file.checked.add(group)
        return datasets

    def file_of(self, number: int, name: str, step: int) -> Path:
        path: Path = self.episodes[number].source.path
        return path

    def read(self, number: int, name: str, start: int, stop: int) -> Any:
        info = self.episodes[number]
        column = info.source.layout.columns[name]
        return self.read_rows(info, column, column.first + start, column.first + stop)

    def rows_read_together(self, number: int, name: str) -> int | None:
        info = self.episodes[number]
        column = info.source.layout.columns[name]
        if column.is_picture:
            return 1
        row_bytes = info.schema[name].row_bytes
        if row_bytes < _LARGE_ROW_BYTES or column.first:
            return None
        with self.files.use(info.source.path) as file:
            chunk_rows = self.checked_datasets(file, info)[column.path].chunk_rows
        return chunk_rows or max(1, _UNCHUNKED_BYTES // row_bytes)

    def read_final(self, number: int, name: str) -> Any:
        info = self.episodes[number]
        column = info.source.layout.final[name]
        row = info.length + column.first
        value = self.read_rows(info, column, row, row + 1)[0]
        return value if column.kind == "text" else np.asarray(value)

    def read_rows(self, info: EpisodeInfo, column: DatasetColumn, start: int, stop: int) -> Any:
        """Read rows of a field; `start` and `stop` are row numbers in the dataset."""
        path, group, _ = info.source
        with self.files.use(path) as file:
            dataset = self.checked_datasets(file, info)[column.path]
            rows = file.rows(f"{group}/{column.path}", dataset, start, stop)
        if column.kind == "text":
            return rows
        if column.is_picture:
            where = f"{column.path!r} of {info.name!r} of {str(path)!r}"
            rows = _decoded(rows, (*column.shape, 1)[:3], where)
        return rows.reshape(len(rows), *column.shape)


class LayoutMaker:
    """Builder of the layout of an episode.

    Args:
        reader: Reader that collects the problems.
        file: File of the episode.
        group: Path of the group of the episode.
        datasets: Maps paths below the group to descriptions of datasets.

    Attributes:
        layout: Layout of the datasets added so far.
        length: Number of steps.
    """

    def __init__(
        self,
        reader: Hdf5Reader,
        file: OpenFile,
        group: str,
        datasets: Mapping[str, DatasetInfo],
    ) -> None:
        node = file.group(group)
        self.file = file
        self.group = group
        self.datasets = datasets
        self.layout = Layout()
        self.length = reader.num_rows(file, node)
        self._reader = reader
        self._where = file.place(node)

    def check_rows(self, path: str, num_extra: int = 0) -> None:
        """Check that a dataset has a row per step and `num_extra` additional rows.

        Raises:
            CorruptFileError: The dataset has more or fewer rows.
        """
        shape = self.datasets[path].shape
        num_rows = self.length + num_extra
        if not shape or shape[0] != num_rows:
            got = f"{shape[0]} rows" if shape else "a single value"
            message = f"{self._where} has {got} of {path!r}, expected {num_rows} rows."
            raise CorruptFileError(message, kind="counts")

    def add(self, name: str, path: str, has_final: bool = False) -> None:
        """Add a dataset as a field, if its type is readable.

        Args:
            name: Name of the field.
            path: Path of the dataset.
            has_final: Whether the dataset has an additional row, the final observation.
        """
        self.check_rows(path, int(has_final))
        is_added = self._add(self.layout.columns, name, path)
        if is_added and has_final:
            self._add(self.layout.final, name, path)

    def add_pictures(self, name: str, path: str, has_final: bool) -> None:
        """Add a dataset of encoded pictures as a field. The first picture determines the shape.

        Raises:
            CorruptFileError: The number of rows is wrong, or the first row is not a picture.
        """
        self.check_rows(path, int(has_final))
        where = f"{path!r} of {self._where}"
        lossy = self._reader.metadata["lossy"]
        num_rows = min(self.length + has_final, 1)
        first = self.file.rows(f"{self.group}/{path}", self.datasets[path], 0, num_rows)
        shape: tuple[int, ...] = (0, 0, 3)
        if len(first):
            shape = picture_shape(_without_padding(first[0], where), where)
            is_jpeg = bytes(first[0][:2]) == _JPEG_START
            if is_jpeg and name not in lossy:
                lossy.append(name)
        column = DatasetColumn(path, self._reader.shape_of(name, shape), "uint8", is_picture=True)
        self.layout.columns[name] = column
        if has_final:
            self.layout.final[name] = column

    def add_final(self, name: str, path: str, row: int) -> None:
        """Add a row of a dataset to the final observation. `row` is counted from row T."""
        self._add(self.layout.final, name, path, row)

    def add_other(self, path: str, has_final: bool = False) -> None:
        """Add a dataset that the format does not define.

        It becomes a field if it has a row per step, otherwise metadata.

        Args:
            path: Path of the dataset.
            has_final: Whether the dataset may have T + 1 rows; the last row is then metadata.
        """
        info = self.datasets[path]
        is_reserved = path.split("/")[0] in _RESERVED
        name = f"other/{path}" if is_reserved else path
        is_step_field = bool(info.shape) and name not in self.layout.columns
        num_extra = info.shape[0] - self.length if is_step_field else -1
        if num_extra == 1 and has_final and info.kind in DTYPES:
            self._add(self.layout.columns, path, path)
            self.layout.metadata[path] = -1
        elif num_extra == 0:
            self._add(self.layout.columns, name, path)
        else:
            self.layout.metadata[path] = None

    def _add(self, columns: dict[str, DatasetColumn], name: str, path: str, first: int = 0) -> bool:
        """Add a column if the type of its dataset is readable; return whether it was added."""
        info = self.datasets[path]
        is_text_table = info.kind == "text" and len(info.shape) != 1
        if info.kind in ("", "bytes") or is_text_table:
            self._report_unread(path)
            return False
        if len(columns) >= MAX_FIELDS:
            raise CorruptFileError(f"{self._where} has more than {MAX_FIELDS} fields.")
        columns[name] = DatasetColumn(path, row_shape(name, info), info.kind, first)
        return True

    def _report_unread(self, path: str) -> None:
        if path in self._reader.unread:
            return
        self._reader.unread.add(path)
        self._reader.problem(
            f"{path!r} of {self._where} contains neither numbers nor texts. The dataset is left "
            "out."
        )


def row_shape(name: str, info: DatasetInfo) -> tuple[int, ...]:
    """Return the shape of a row of a field. A reward `[T, 1]` becomes `[T]`."""
    shape = info.shape[1:]
    return () if name == "reward" and shape == (1,) else shape


def absent_fields(text: Any) -> dict[str, list[str]]:
    """Parse the list of an episode's fields that a conversion filled with False or NaN.

    Args:
        text: JSON list of names.

    Returns:
        A dict with the names under the key `ABSENT`; {} if the text is not a JSON list of names.
    """
    with suppress(CorruptFileError):
        names = parse_json(text, Path(ABSENT)) if isinstance(text, str) else None
        if isinstance(names, list):
            return {ABSENT: [name for name in names if isinstance(name, str)]}
    return {}


def is_encoded(info: DatasetInfo) -> bool:
    """Return whether the rows of a dataset may be encoded pictures, optionally zero-padded."""
    has_bytes = info.kind == "bytes" and len(info.shape) == 1
    has_padded_bytes = info.kind == "uint8" and len(info.shape) == 2
    return has_bytes or has_padded_bytes


def _decoded(rows: Any, shape: tuple[int, ...], where: str) -> np.ndarray[Any, Any]:
    """Decode encoded pictures to an array `[n, *shape]`."""
    if not len(rows):
        return np.empty((0, *shape), np.uint8)
    return np.stack([decode_picture(_without_padding(row, where), where, shape) for row in rows])


def _without_padding(row: Any, where: str) -> bytes:
    """Return the bytes of an encoded picture without trailing padding.

    Raises:
        CorruptFileError: The picture is a truncated JPEG.
    """
    data = bytes(row).rstrip(b"\0")
    if data[:2] != _JPEG_START:
        return data
    end = data.rfind(_JPEG_END)
    if end < 0:
        raise CorruptFileError(f"{where} contains a truncated JPEG.")
    return data[: end + len(_JPEG_END)]
