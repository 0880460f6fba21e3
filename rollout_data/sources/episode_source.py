"""Files of other systems as a kind of source: what their readers give, in pieces of episodes.

One rule: all episodes of a stream have the same fields, those of most of them. What an episode lacks reads as NaN, and
an episode that does not fit is left out; both are reported once. Files are looked at once, when they are opened.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from storage.core.fields import Field, Schema
from storage.errors import CorruptFileError, DataFileError, UsageError, nearest

from ..blocks.annotation_table import text_id
from ..blocks.block import Block, Key
from ..blocks.block_header import (
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
from ..blocks.missing_trajectories import NONE_GONE, Lengths
from ..blocks.row_layout import RowLayout
from ..blocks.trajectory_index import TrajectoryIndex
from ..remote.locations import Origin
from .cached_frames import FileFrames
from .episode_reader import EpisodeInfo, ForeignReader
from .format_registry import detect, holds_files_of_others, open_foreign
from .frame_store import GONE, FrameStore, Place
from .shared_memory import Spot
from .source_kind import BlocksInUse, Kind, Origins, conventions

#: Small rows are read in pieces of about this size, and so much of them is kept.
_PIECE_BYTES, _CACHE_BYTES = 4 << 20, 512 << 20
#: What a batch has of its own.
RESERVED = (
    "done", "timeout", "end_unknown", "is_first", "is_last", "valid", "mask", "next_mask", "stream_id", "extras",
    "next_observation", "next_privileged_observation",
)  # fmt: skip
FLOATS = ("float16", "bfloat16", "float32", "float64")
#: Its origin's number and its own in the reader.
_Found = tuple[int, int]


class Readers(Kind):
    """Files of other systems; a piece of an episode is a block."""

    format = ""
    about = "files of another system"

    def __init__(self, source: Origins) -> None:
        self._source = source
        self._readers = [_opened(origin) for origin in source.origins]
        self.format = " and ".join(dict.fromkeys(reader.format for reader in self._readers))
        self._sight, self._last = (Readers, self._readers), self._store()
        for reader in self._readers:
            for problem in reader.problems:
                source.report(problem)
            for remark in reader.advice:
                source.advise(remark)

    @staticmethod
    def is_there(path: Path) -> bool:
        # Several files are refused by `open_foreign`, with their names; as blocks of ours they would be damaged ones.
        return detect(path) is not None or holds_files_of_others(path)

    @property
    def metadata(self) -> dict[str, Any]:
        found = dict(self._readers[0].metadata)
        return {"frame_rate_hz": found["fps"], **found} if "fps" in found else found

    @property
    def conventions(self) -> set[tuple[str, str]]:
        episodes = (self._readers[number].episodes[episode].metadata for number, episode in self._chosen())
        return conventions([*(reader.metadata for reader in self._readers), *episodes])

    def refresh(self, in_use: BlocksInUse) -> None:
        """Do nothing: what was found is played."""

    def snapshot(self, upto: Mapping[str, int] | None = None, gone: Lengths = NONE_GONE) -> FrameStore:
        return self._last

    def sight(self) -> Any:
        return self._sight

    def adopt(self, sight: Any, spot: Spot | None) -> bool:
        if sight is not None and sight is not self._sight:
            _, self._readers = self._sight = sight
            self._last = self._store()
        return sight is not None

    def _chosen(self) -> list[_Found]:
        """Return the episodes that are read."""
        found: list[_Found] = []
        for number, (origin, reader) in enumerate(zip(self._source.origins, self._readers, strict=True)):
            names = [info.name for info in reader.episodes]
            found += [(number, one) for one in sorted(chosen_episodes(names, origin.ids, reader.path))]
        return found

    def _store(self) -> FrameStore:
        chosen = self._chosen()
        infos = [self._readers[number].episodes[episode] for number, episode in chosen]
        fit = common_fields([info.schema for info in infos])
        self._report(fit, infos)
        kept = [(key, info) for key, info in zip(chosen, infos, strict=True) if info.schema not in fit.left_out]
        if kept:
            self._source.check_schema(fit.schema, self._source.paths[0])
        texts = self._common_texts([info for _, info in kept], fit.schema)
        layouts = _layouts(Schema([*fit.schema.values(), *texts.values()]))
        size = max(1, _PIECE_BYTES // max(1, layouts[DATA].frame_bytes))
        blocks: list[Block] = []
        places: dict[Key, _Found] = {}
        for place, (key, info) in enumerate(kept):
            for block in self._pieces(place, key, info, size, list(layouts[FINAL].schema)):
                places[block.key] = key
                blocks.append(block)

        def read(block: Block, place: Place) -> np.ndarray:
            return read_part(block, place, 0, int(block.fragments["length"][0]))

        def read_part(block: Block, place: Place, first: int, stop: int) -> np.ndarray:
            number, episode = places[block.key]
            reader = self._readers[number]
            column = layouts[place[0]].columns[place[1]]
            start = int(block.fragments["start"][0]) + first
            length = stop - first
            table = np.zeros(length if place[0] == DATA else 1, layouts[place[0]].numpy_dtype(column))
            info = reader.episodes[episode]
            names = [name for name in column.offsets if name in info.schema or name in texts]
            if place[0] == DATA:
                values = reader.read_fields(episode, names, start, start + length)
            else:
                values = {name: reader.read_final(episode, name)[None] for name in names}
            for name in texts.keys() & values.keys():
                values[name] = np.array([*map(text_id, values[name])], np.int64)
            for name in column.offsets:
                table[name] = _filled(block, name, values.get(name), table[name].shape)
            return table.view(np.uint8).reshape(len(table), column.row_bytes)

        def file_of(block: Block, place: Place, row: int) -> Path:
            number, episode = places[block.key]
            reader = self._readers[number]
            step = int(block.fragments["start"][0]) + row
            names = [
                name for name in layouts[DATA].columns[place[1]].offsets if name in reader.episodes[episode].schema
            ]
            for name in names:  # the field that is damaged tells
                try:
                    reader.read(episode, name, step, step + 1)
                except DataFileError:
                    return reader.file_of(episode, name, step)
            return reader.file_of(episode, names[0], step) if names else reader.path

        def group_of(block: Block, place: Place) -> tuple[int | None, int]:
            names = list(layouts[place[0]].columns[place[1]].offsets)
            number, episode = places[block.key]
            reader = self._readers[number]
            if place[0] != DATA or len(names) != 1 or names[0] not in reader.episodes[episode].schema:
                return None, 0
            num_rows = reader.rows_read_together(episode, names[0])
            return num_rows, 0 if num_rows is None else int(block.fragments["start"][0]) % num_rows

        losses = (*GONE, DataFileError)
        group_bytes = self._source.chunk_cache_bytes
        store = FileFrames(
            TrajectoryIndex(blocks), layouts, read, losses, _CACHE_BYTES, read_part, file_of, group_of, group_bytes
        )
        store.told_tasks = [info.task for _, info in kept]
        store.told_names = [info.name for _, info in kept]
        store.told_texts = partial(self._texts, [key for key, _ in kept], list(texts))
        return store

    def _common_texts(self, infos: Sequence[EpisodeInfo], schema: Schema) -> dict[str, Field]:
        """Return the text fields of all episodes as fields of the numbers of their texts; report the others."""
        counts = Counter(name for info in infos for name in info.texts)
        found: dict[str, Field] = {}
        for name, count in counts.items():
            is_free = name not in schema and not schema.below(name) and name.partition("/")[0] not in RESERVED
            if is_free and count == len(infos):
                found[name] = Field(name, (), "int64", is_text=True)
                continue
            expected = "texts in all episodes" if is_free else "a name that no other field and no batch has"
            where = f"of {str(self._source.paths[0])!r}"
            advice = "Read it from the episodes of rollout_data.open"
            self._source.report(DataFileError(f"stream the texts {name!r}", where, expected, "another", advice))
        return found

    def _texts(self, episodes: Sequence[_Found], names: Sequence[str]) -> set[str]:
        """Read all texts of some fields; episodes that cannot be read have none."""
        found: set[str] = set()
        for number, episode in episodes if names else ():
            reader = self._readers[number]
            with suppress(DataFileError):  # reading the rows raises it again
                for values in reader.read_fields(episode, names, 0, reader.episodes[episode].length).values():
                    found.update(values)
        return found

    def _report(self, fit: Fit, infos: Sequence[EpisodeInfo]) -> None:
        """Name the episodes that are left out, and the fields that are."""
        where = ", ".join(repr(str(path)) for path in self._source.paths)
        said = [(schema, "Left out of streams", difference) for schema, difference in fit.left_out.items()]
        said += [(schema, "Read as NaN", f"no {', '.join(map(repr, names))}") for schema, names in fit.lacking.items()]
        for schema, advice, got in said:
            names = [repr(info.name) for info in infos if info.schema == schema]
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            action = f"stream all of episode {', '.join(names[:3])}{more}"
            expected = "the fields of most episodes"
            self._source.report(DataFileError(action, f"of {where}", expected, got, advice))
        for name, why in fit.dropped.items():
            action = f"stream the field {name!r}"
            advice = "Read it from the episodes of rollout_data.open"
            self._source.report(DataFileError(action, f"of {where}", why, "another", advice))

    def _pieces(self, place: int, key: _Found, info: EpisodeInfo, size: int, finals: Sequence[str]) -> list[Block]:
        """Cut an episode, the `place`-th of all, into blocks of `size` steps."""
        number, episode = key
        reader = self._readers[number]
        starts = range(0, info.length, size)
        has_final = bool(finals) and all(name in info.final for name in finals)
        blocks: list[Block] = []
        for start in starts:
            length = min(size, info.length - start)
            is_last = start + size >= info.length
            flags = (0 if start else FIRST) | (end_flags(info) if is_last else 0)
            row = (episode, 0, flags, start, length, 0, 0 if is_last and has_final else -1, place, -1)
            writer = f"{self._source.labels[number]}{reader.format}"
            fragments = np.array([row], FRAGMENT_DTYPE)
            blocks.append(Block(reader.path, writer, len(blocks), fragments, name=f"{number}:{episode}:{start}"))
        return blocks


def _layouts(schema: Schema) -> dict[str, RowLayout]:
    """Return the layouts of `layouts_of`, each picture apart: a damaged one does not take other fields along."""
    pictures = [name for name, field in schema.items() if len(field.shape) > 1]
    return {table: RowLayout(layout.schema, pictures) for table, layout in layouts_of(schema).items()}


def _opened(origin: Origin) -> ForeignReader:
    if origin.opened is not None:  # a copy: two threads may read at once
        copied: ForeignReader = pickle.loads(pickle.dumps(origin.opened))
        return copied
    return open_foreign(origin.path, origin.format, **origin.options)


def chosen_episodes(names: Sequence[str], ids: Sequence[str] | None, path: Path) -> list[int]:
    """Return the numbers of episodes by their names, in this order; None is all.

    Raises:
        UsageError: There is none of a name.
    """
    if ids is None:
        return list(range(len(names)))
    number_of = {name: number for number, name in enumerate(names)}
    for name in ids:
        if name not in number_of:
            expected = f"one of {len(number_of)} names, such as {nearest(name, number_of, 4)}"
            raise UsageError("find the episode", f"in {str(path)!r}", expected, repr(name))
    return [number_of[name] for name in ids]


def end_flags(info: EpisodeInfo) -> int:
    """The flags of the last fragment of an episode."""
    if info.terminated or info.truncated:
        return TERMINATED if info.terminated else TRUNCATED
    return OPEN | (END_UNKNOWN if None in (info.terminated, info.truncated) else 0)


class Fit(NamedTuple):
    """The fields of a stream of episodes, and what does not fit.

    Attributes:
        schema: The fields.
        left_out: Schemas of episodes that are not streamed -> how they differ.
        lacking: Schemas of other episodes -> names of the fields that are NaN there.
        dropped: Names of fields that are not streamed -> what would be needed.
        forms: Schemas of the episodes that are streamed, each once.
    """

    schema: Schema
    left_out: dict[Schema, str]
    lacking: dict[Schema, list[str]]
    dropped: dict[str, str]
    forms: list[Schema]


def common_fields(schemas: Iterable[Schema], keeps_episodes: bool = False) -> Fit:
    """Find the fields of a stream: all fields of all episodes that do not contradict those of most.

    A field that some lack becomes one of floats, for the NaN; pictures and other integers of several axes have to be in
    all.

    Args:
        schemas: Fields of each episode.
        keeps_episodes: Leave out pictures that some episodes lack, instead of these episodes.
    """
    fields: dict[str, Field] = {}
    left_out: dict[Schema, str] = {}
    counts = Counter(schemas)
    there = dict.fromkeys(name for schema in counts for name in schema)
    taken = [name for name in there if name.partition("/")[0] in RESERVED]
    dropped = dict.fromkeys(taken, "a name that batches do not use themselves")
    for schema, _ in counts.most_common():
        mine = {name: item for name, item in schema.items() if item.num_elements and name not in dropped}
        missing = [name for name, field in fields.items() if name not in mine and not _can_lack(field)]
        difference = f"no {missing[0]!r}" if missing and not keeps_episodes else _difference(fields, mine)
        if difference:
            left_out[schema] = difference
            continue
        for name in missing:
            del fields[name]
            dropped[name] = "a field of all episodes"
        new = [name for name in mine if name not in fields]
        if fields:
            dropped |= {name: "a field of all episodes" for name in new if not _can_lack(mine[name])}
        fields |= {name: mine[name] for name in new if name not in dropped}
    kept = [schema for schema in counts if schema not in left_out]
    lacking = {schema: names for schema in kept if (names := [name for name in fields if name not in schema])}
    for name in {name for names in lacking.values() for name in names}:
        if fields[name].dtype not in FLOATS:
            wide = "float64" if fields[name].numpy_dtype.itemsize > 2 else "float32"
            fields[name] = replace(fields[name], dtype=wide)
    return Fit(Schema(fields.values()), left_out, lacking, dropped, kept)


def _can_lack(field: Field) -> bool:
    return field.dtype in FLOATS or len(field.shape) <= 1


def _difference(fields: Mapping[str, Field], mine: Mapping[str, Field]) -> str:
    """Return why fields do not go with those that were found before; "" if they do."""
    for name, field in fields.items():
        if name in mine and (field.dtype, field.shape) != (mine[name].dtype, mine[name].shape):
            other = mine[name]
            return f"{name!r} as {other.dtype}{list(other.shape)} instead of {field.dtype}{list(field.shape)}"
    for known, name in ((known, name) for known in fields for name in mine):
        if known.startswith(f"{name}/") or name.startswith(f"{known}/"):
            return f"{name!r} instead of {known!r}"
    return ""


def _filled(block: Block, name: str, values: Any, shape: tuple[int, ...]) -> Any:
    """Check what a reader gave for a field; NaN where it is not there."""
    if values is None:
        return np.nan
    if np.shape(values) != shape:
        where = f"episode {block.fragments['trajectory'][0]} of {str(block.path)!r}"
        raise CorruptFileError("read", where, f"{name!r} of shape {shape}", str(np.shape(values)))
    return values
