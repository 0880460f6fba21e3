"""`JoinedFiles`: episodes of files of other systems, read as rows with common fields."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from storage.core.fields import Schema
from storage.errors import CorruptFileError, DataFileError

from ...blocks.annotation_table import text_id
from ...blocks.block import Block, Key
from ...blocks.block_header import (
    DATA,
    END_UNKNOWN,
    FINAL,
    FIRST,
    FRAGMENT_DTYPE,
    OPEN,
    TERMINATED,
    TRUNCATED,
    layouts_of,
)
from ...blocks.row_layout import RowLayout
from ...blocks.trajectory_index import TrajectoryIndex
from ..episode_info import EpisodeInfo
from ..file_source import FileSource
from .row_source import GONE, Place
from .unmapped_rows import UnmappedRows

#: Approximate bytes of the small fields in a block. A block is a part of an episode that is read at
#: once.
_PIECE_BYTES = 4 << 20
#: Size in bytes of the cache of small fields.
_CACHE_BYTES = 512 << 20
#: Position of a file in a list of files, and number of an episode in the file.
EpisodeKey = tuple[int, int]


class JoinedFiles(UnmappedRows):
    """Episodes of several files of other systems as rows with common fields.

    Each episode is divided into blocks of a few MiB. A field that is missing from an episode reads
    as NaN. Texts are read as ids; see `text_id`.

    Args:
        files: The opened files.
        labels: For each file, the prefix of its writer name.
        keys: The episodes, in order.
        schema: Numeric fields of the rows.
        texts: Text fields of the rows, as int64 fields for the ids.
        max_group_bytes: Size in bytes of the cache of large rows, such as decoded images.
    """

    reads_parts = True

    def __init__(
        self,
        files: Sequence[FileSource],
        labels: Sequence[str],
        keys: Sequence[EpisodeKey],
        schema: Schema,
        texts: Schema,
        max_group_bytes: int,
    ) -> None:
        layouts = _layouts(Schema([*schema.values(), *texts.values()]))
        num_rows = max(1, _PIECE_BYTES // max(1, layouts[DATA].frame_bytes))
        finals = list(layouts[FINAL].schema)
        blocks: list[Block] = []
        key_of: dict[Key, EpisodeKey] = {}
        for position, key in enumerate(keys):
            for block in _pieces(files[key[0]], labels[key[0]], key, position, num_rows, finals):
                key_of[block.key] = key
                blocks.append(block)
        super().__init__(
            TrajectoryIndex(blocks), layouts, (*GONE, DataFileError), _CACHE_BYTES, max_group_bytes
        )
        self._files = files
        self._key_of = key_of
        self._text_names = tuple(texts)
        infos = [files[number].episodes[episode] for number, episode in keys]
        self.episode_tasks = [info.task for info in infos]
        self.episode_names = [info.name for info in infos]
        self.read_texts = partial(_read_texts, files, keys, self._text_names)

    def read_block(self, block: Block, place: Place) -> np.ndarray:
        return self.read_part(block, place, 0, int(block.fragments["length"][0]))

    def read_part(self, block: Block, place: Place, start: int, stop: int) -> np.ndarray:
        number, episode = self._key_of[block.key]
        file = self._files[number]
        schema = file.episodes[episode].schema
        column = self.layouts[place[0]].columns[place[1]]
        names = [name for name in column.offsets if name in schema or name in self._text_names]
        values: dict[str, Any]
        if place[0] == DATA:
            first = int(block.fragments["start"][0]) + start
            table = np.zeros(stop - start, self.layouts[DATA].numpy_dtype(column))
            values = file.read_fields(episode, names, first, first + len(table))
        else:
            table = np.zeros(1, self.layouts[FINAL].numpy_dtype(column))
            values = {name: file.read_final(episode, name)[None] for name in names}
        for name in column.offsets:
            if name not in values:
                table[name] = np.nan
                continue
            stored = values[name]
            if name in self._text_names:
                stored = np.array([text_id(text) for text in stored], np.int64)
            table[name] = _checked(block, name, stored, table[name].shape)
        return table.view(np.uint8).reshape(len(table), column.row_bytes)

    def group_of(self, block: Block, place: Place) -> tuple[int | None, int]:
        names = list(self.layouts[place[0]].columns[place[1]].offsets)
        number, episode = self._key_of[block.key]
        file = self._files[number]
        if place[0] != DATA or len(names) != 1 or names[0] not in file.episodes[episode].schema:
            return None, 0
        num_rows = file.rows_read_together(episode, names[0])
        if num_rows is None:
            return None, 0
        return num_rows, int(block.fragments["start"][0]) % num_rows

    def _file_of(self, block: Block, place: Place, row: int) -> Path:
        number, episode = self._key_of[block.key]
        file = self._files[number]
        step = int(block.fragments["start"][0]) + row
        schema = file.episodes[episode].schema
        names = [name for name in self.layouts[DATA].columns[place[1]].offsets if name in schema]
        for name in names:
            try:
                file.read(episode, name, step, step + 1)
            except DataFileError:  # This field is damaged, so errors name its file.
                return file.file_of(episode, name, step)
        return file.file_of(episode, names[0], step) if names else file.path


def _pieces(
    file: FileSource,
    label: str,
    key: EpisodeKey,
    position: int,
    num_rows: int,
    finals: Sequence[str],
) -> list[Block]:
    """Divide an episode into blocks that are read and cached separately.

    Args:
        file: The file.
        label: Prefix of the writer name.
        key: Numbers of the file and of the episode in it.
        position: Position among all episodes, which orders the trajectories of the index.
        num_rows: Maximum number of steps per block.
        finals: Fields of a final observation.
    """
    number, episode = key
    info = file.episodes[episode]
    trajectory = file.number_of(episode)
    has_final = bool(finals) and all(name in info.final for name in finals)
    blocks: list[Block] = []
    for start in range(0, info.length, num_rows):
        length = min(num_rows, info.length - start)
        is_last = start + num_rows >= info.length
        flags = 0 if start else FIRST
        if is_last:
            flags |= end_flags(info)
        final_row = 0 if is_last and has_final else -1
        row = (trajectory, 0, flags, start, length, 0, final_row, position, -1)
        fragments = np.array([row], FRAGMENT_DTYPE)
        name = f"{number}:{trajectory}:{start}"
        blocks.append(Block(file.path, f"{label}{file.format}", len(blocks), fragments, name=name))
    return blocks


def _layouts(schema: Schema) -> dict[str, RowLayout]:
    """Return the row layouts of a schema, with a separate column for each image field.

    Fields of one column are read together. A damaged image therefore leaves other fields readable.
    """
    pictures = [name for name, field in schema.items() if len(field.shape) > 1]
    return {
        table: RowLayout(layout.schema, pictures) for table, layout in layouts_of(schema).items()
    }


def end_flags(info: EpisodeInfo) -> int:
    """Return the flags of the last fragment of an episode, which state how it ended."""
    if info.terminated or info.truncated:
        return TERMINATED if info.terminated else TRUNCATED
    return OPEN | (END_UNKNOWN if None in (info.terminated, info.truncated) else 0)


def _checked(block: Block, name: str, values: Any, shape: tuple[int, ...]) -> Any:
    """Return the values of a field; raise `CorruptFileError` if they do not have this shape."""
    if np.shape(values) != shape:
        raise CorruptFileError(
            f"{name!r} of episode {block.fragments['trajectory'][0]} in {str(block.path)!r} has "
            f"shape {np.shape(values)}, expected {shape}."
        )
    return values


def _read_texts(
    files: Sequence[FileSource], keys: Sequence[EpisodeKey], names: Sequence[str]
) -> set[str]:
    """Read all distinct texts in these text fields. Unreadable episodes are left out."""
    texts: set[str] = set()
    for number, episode in keys if names else ():
        file = files[number]
        with suppress(DataFileError):  # Reading the rows of the episode raises this error.
            for values in file.read_fields(
                episode, names, 0, file.episodes[episode].length
            ).values():
                texts.update(values)
    return texts
