"""Files of other systems as a kind of source: the episodes of their readers, cut into pieces that stand for blocks.

All episodes of a stream have the same fields, those of most episodes. A field that an episode lacks reads as NaN, and
an episode with contradicting fields is left out; both are reported once. Files are listed once, when they are opened.
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
#: Names that a batch uses itself.
RESERVED = (
    "done", "timeout", "end_unknown", "is_first", "is_last", "valid", "mask", "next_mask", "stream_id", "extras",
    "next_observation", "next_privileged_observation",
)  # fmt: skip
FLOATS = ("float16", "bfloat16", "float32", "float64")
#: Number of the origin, and number of the episode in its reader.
_EpisodeKey = tuple[int, int]


class Readers(Kind):
    """Files of other systems as a source; a piece of an episode stands for a block."""

    format = ""
    about = "files of another system"

    def __init__(self, source: Origins) -> None:
        self._source = source
        self._readers = [_opened(origin) for origin in source.origins]
        self.format = " and ".join(dict.fromkeys(reader.format for reader in self._readers))
        self._listing = (Readers, self._readers)
        self._last = self._store()
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
        metadata = dict(self._readers[0].metadata)
        if "fps" in metadata:
            metadata.setdefault("frame_rate_hz", metadata["fps"])
        return metadata

    @property
    def conventions(self) -> set[tuple[str, str]]:
        episodes = (self._readers[number].episodes[episode].metadata for number, episode in self._chosen())
        return conventions([*(reader.metadata for reader in self._readers), *episodes])

    def refresh(self, in_use: BlocksInUse) -> None:
        """Do nothing: files of other systems are listed once."""

    def snapshot(self, upto: Mapping[str, int] | None = None, gone: Lengths = NONE_GONE) -> FrameStore:
        return self._last

    def listing(self) -> Any:
        return self._listing

    def adopt(self, listing: Any, spot: Spot | None) -> bool:
        if listing is not None and listing is not self._listing:
            self._listing = listing
            _, self._readers = listing
            self._last = self._store()
        return listing is not None

    def _chosen(self) -> list[_EpisodeKey]:
        """Return the episodes that are read."""
        keys: list[_EpisodeKey] = []
        for number, (origin, reader) in enumerate(zip(self._source.origins, self._readers, strict=True)):
            names = [info.name for info in reader.episodes]
            episodes = sorted(chosen_episodes(names, origin.ids, reader.path))
            keys += [(number, episode) for episode in episodes]
        return keys

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
        places: dict[Key, _EpisodeKey] = {}
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
            for name in names:  # find the field that is damaged
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
        store.episode_tasks = [info.task for _, info in kept]
        store.episode_names = [info.name for _, info in kept]
        store.read_texts = partial(self._texts, [key for key, _ in kept], list(texts))
        return store

    def _common_texts(self, infos: Sequence[EpisodeInfo], schema: Schema) -> dict[str, Field]:
        """Return the text fields of all episodes as fields of the numbers of their texts; report the others."""
        counts = Counter(name for info in infos for name in info.texts)
        fields: dict[str, Field] = {}
        for name, count in counts.items():
            is_free = name not in schema and not schema.below(name) and name.partition("/")[0] not in RESERVED
            if is_free and count == len(infos):
                fields[name] = Field(name, (), "int64", is_text=True)
                continue
            expected = "texts in all episodes" if is_free else "a name that no other field and no batch has"
            where = f"of {str(self._source.paths[0])!r}"
            advice = "Read it from the episodes of rollout_data.open"
            self._source.report(DataFileError(f"stream the texts {name!r}", where, expected, "another", advice))
        return fields

    def _texts(self, episodes: Sequence[_EpisodeKey], names: Sequence[str]) -> set[str]:
        """Read all texts of some fields; episodes that cannot be read have none."""
        texts: set[str] = set()
        for number, episode in episodes if names else ():
            reader = self._readers[number]
            length = reader.episodes[episode].length
            with suppress(DataFileError):  # reading the rows raises it again
                for values in reader.read_fields(episode, names, 0, length).values():
                    texts.update(values)
        return texts

    def _report(self, fit: Fit, infos: Sequence[EpisodeInfo]) -> None:
        """Report episodes that are left out, fields that read as NaN, and fields that are left out."""
        where = ", ".join(repr(str(path)) for path in self._source.paths)
        differences = [(schema, "Left out of streams", difference) for schema, difference in fit.left_out.items()]
        for schema, names in fit.lacking.items():
            differences.append((schema, "Read as NaN", f"no {', '.join(map(repr, names))}"))
        for schema, advice, got in differences:
            names = [repr(info.name) for info in infos if info.schema == schema]
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            action = f"stream all of episode {', '.join(names[:3])}{more}"
            expected = "the fields of most episodes"
            self._source.report(DataFileError(action, f"of {where}", expected, got, advice))
        for name, why in fit.dropped.items():
            action = f"stream the field {name!r}"
            advice = "Read it from the episodes of rollout_data.open"
            self._source.report(DataFileError(action, f"of {where}", why, "another", advice))

    def _pieces(self, place: int, key: _EpisodeKey, info: EpisodeInfo, size: int, finals: Sequence[str]) -> list[Block]:
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
    """Return the layouts of `layouts_of` with a column for each picture, so that a damaged one costs no other field."""
    pictures = [name for name, field in schema.items() if len(field.shape) > 1]
    return {table: RowLayout(layout.schema, pictures) for table, layout in layouts_of(schema).items()}


def _opened(origin: Origin) -> ForeignReader:
    if origin.opened is not None:  # a copy: two threads may read at once
        copied: ForeignReader = pickle.loads(pickle.dumps(origin.opened))
        return copied
    return open_foreign(origin.path, origin.format, **origin.options)


def chosen_episodes(names: Sequence[str], ids: Sequence[str] | None, path: Path) -> list[int]:
    """Return the numbers of the episodes with the names `ids`, in this order; of all where `ids` is None.

    Raises:
        UsageError: No episode has one of the names.
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
    """Return the flags of the last fragment of an episode."""
    if info.terminated or info.truncated:
        return TERMINATED if info.terminated else TRUNCATED
    return OPEN | (END_UNKNOWN if None in (info.terminated, info.truncated) else 0)


class Fit(NamedTuple):
    """The fields of a stream of episodes, and the episodes and fields that do not fit.

    Attributes:
        schema: The fields.
        left_out: Schema of episodes that are not streamed -> how it differs.
        lacking: Schema of other episodes -> names of the fields that are NaN there.
        dropped: Name of a field that is not streamed -> the condition that it does not meet.
        forms: Schemas of the episodes that are streamed, each once.
    """

    schema: Schema
    left_out: dict[Schema, str]
    lacking: dict[Schema, list[str]]
    dropped: dict[str, str]
    forms: list[Schema]


def common_fields(schemas: Iterable[Schema], keeps_episodes: bool = False) -> Fit:
    """Find the fields of a stream: those of all episodes that do not contradict the fields of most episodes.

    A field that some episodes lack becomes one of floats, as it reads as NaN there. Pictures and other integers of
    several axes have to be in all episodes.

    Args:
        schemas: The fields of each episode.
        keeps_episodes: Leave out pictures that some episodes lack, instead of leaving out these episodes.
    """
    fields: dict[str, Field] = {}
    left_out: dict[Schema, str] = {}
    counts = Counter(schemas)
    all_names = dict.fromkeys(name for schema in counts for name in schema)
    taken = [name for name in all_names if name.partition("/")[0] in RESERVED]
    dropped = dict.fromkeys(taken, "a name that batches do not use themselves")
    for schema, _ in counts.most_common():
        own_fields = {name: field for name, field in schema.items() if field.num_elements and name not in dropped}
        missing = [name for name, field in fields.items() if name not in own_fields and not _can_lack(field)]
        difference = f"no {missing[0]!r}" if missing and not keeps_episodes else _difference(fields, own_fields)
        if difference:
            left_out[schema] = difference
            continue
        for name in missing:
            del fields[name]
            dropped[name] = "a field of all episodes"
        new = [name for name in own_fields if name not in fields]
        if fields:
            dropped |= {name: "a field of all episodes" for name in new if not _can_lack(own_fields[name])}
        fields |= {name: own_fields[name] for name in new if name not in dropped}
    kept = [schema for schema in counts if schema not in left_out]
    lacking_of = {schema: [name for name in fields if name not in schema] for schema in kept}
    lacking = {schema: names for schema, names in lacking_of.items() if names}
    for name in {name for names in lacking.values() for name in names}:
        if fields[name].dtype not in FLOATS:
            wide = "float64" if fields[name].numpy_dtype.itemsize > 2 else "float32"
            fields[name] = replace(fields[name], dtype=wide)
    return Fit(Schema(fields.values()), left_out, lacking, dropped, kept)


def _can_lack(field: Field) -> bool:
    """Return whether episodes without a field can be streamed with it, as NaN."""
    return field.dtype in FLOATS or len(field.shape) <= 1


def _difference(fields: Mapping[str, Field], others: Mapping[str, Field]) -> str:
    """Return how the fields of other episodes contradict `fields`; "" if they do not."""
    for name, field in fields.items():
        other = others.get(name, field)
        if (field.dtype, field.shape) != (other.dtype, other.shape):
            return f"{name!r} as {other.dtype}{list(other.shape)} instead of {field.dtype}{list(field.shape)}"
    for known in fields:
        for name in others:
            if known.startswith(f"{name}/") or name.startswith(f"{known}/"):
                return f"{name!r} instead of {known!r}"
    return ""


def _filled(block: Block, name: str, values: Any, shape: tuple[int, ...]) -> Any:
    """Return the values of a field that a reader returned, checked; NaN where the episode lacks the field."""
    if values is None:
        return np.nan
    if np.shape(values) != shape:
        where = f"episode {block.fragments['trajectory'][0]} of {str(block.path)!r}"
        raise CorruptFileError("read", where, f"{name!r} of shape {shape}", str(np.shape(values)))
    return values
