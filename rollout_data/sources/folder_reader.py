"""Our own folders, of block files or of the older trajectory layout, through the interface of foreign files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple, overload

import numpy as np
import torch

from storage.core.fields import Schema
from storage.errors import CorruptFileError, DataFileError, RolloutDataError

from ..blocks.annotations import Notes
from ..blocks.block import Block
from ..blocks.block_header import DATA, FINAL
from ..blocks.folder_metadata import ENDS
from ..blocks.trajectory_index import End, Int64s, LostBlockError
from ..remote.locations import Origin, RemotePath
from .block_source import Blocks
from .episode_reader import ABSENT, NO_FIELDS, EpisodeInfo, ForeignReader
from .episode_table import column_of
from .frame_store import FrameStore
from .source import Source
from .source_kind import Kind

#: Id of a converted episode in its source; noted besides its metadata and `ABSENT`.
SOURCE_ID = "id"
#: An edit that is replaced while its notes are read is looked up so often.
_MAX_LOOKS = 100
_ENDS = np.array(["open", "terminated", "truncated", "unknown"])


class Snapshot(NamedTuple):
    """What a reader has found in a folder; see the attributes of `FolderReader`."""

    listing: Any
    metadata: dict[str, Any]
    problems: list[RolloutDataError]
    advice: list[RolloutDataError]


class FolderReader(ForeignReader):
    """The trajectories that a folder held when it was opened; an episode's name is "writer:number".

    Args:
        origin: Where the folder is.
        kind: How it is read.
        snapshot: What an earlier reader of it has found; None: the folder is looked at.

    Attributes:
        store: The trajectories and their rows.
        listing: What was found, for `Source.adopt`.
    """

    format = ""

    def __init__(self, origin: Origin, kind: type[Kind], snapshot: Snapshot | None = None) -> None:
        self.format = kind.format
        self._origin = origin
        self.kind = kind
        self._snapshot = snapshot
        super().__init__(origin.path, {})

    def __reduce__(self) -> Any:
        snapshot = Snapshot(self.listing, self.metadata, self.problems, self.advice)
        return type(self), (self._origin, self.kind, snapshot)

    def scan(self) -> Sequence[EpisodeInfo]:
        self._source = source = Source(self._origin)
        self._texts: dict[int, str] | None = None
        self._last: tuple[tuple[int, str, int, int], torch.Tensor] | None = None
        self.notes = Notes()
        if self._snapshot is not None:
            self.listing, self.metadata, self.problems, self.advice = self._snapshot
            source.adopt(self.listing)
            self.store: FrameStore = source.snapshot()
            return _Infos(self.store, self.notes, self.problems)
        self.store = self._looked_up()
        self.listing = source.listing()
        if self.kind is Blocks:
            kind, schema, num_present, placed = self.listing
            self.listing = kind, schema, num_present, [(folder, self.notes.kept(block)) for folder, block in placed]
        self.metadata = source.metadata
        self.problems = source.problems
        self.advice = source.advice
        return _Infos(self.store, self.notes, self.problems)

    @property
    def blocks(self) -> list[Block]:
        """The blocks of the folder as it was opened, edits with their notes."""
        return [self.notes.kept(block) for block in self.store.index.blocks]

    def _looked_up(self) -> FrameStore:
        """Return what the folder holds now; look again where an edit was replaced meanwhile."""
        for _ in range(_MAX_LOOKS):
            self._source.refresh()
            store = self._source.snapshot()
            self.notes = Notes()
            try:
                self.notes.keep_edits(store)
                return store
            except FileNotFoundError:
                continue
        where = repr(str(self.path))
        got = "edits that were replaced at each look"
        raise DataFileError("open", where, "edits that stay while they are read", got, "Open it again later")

    def removed(self, numbers: Iterable[int]) -> dict[int, DataFileError]:
        """Return the episodes of which a file was removed or replaced since the folder was opened: number -> why."""
        if isinstance(self.path, RemotePath):
            return {}
        index = self.store.index
        asked = np.array(list(numbers), np.int64)
        changed = {block.path for block in index.blocks_of(asked) if not _is_as_found(block)}
        errors: dict[int, DataFileError] = {}
        for number in asked.tolist() if changed else ():
            lost = [block for block in index.blocks_of(np.array([number])) if block.path in changed]
            if lost:
                errors[number] = self._removed(number, lost[0])
        return errors

    def _removed(self, number: int, block: Block) -> DataFileError:
        writer, within = self.store.index.keys(np.array([number]))[0]
        name = f"{writer[writer.find(':') + 1 :]}:{within}"
        is_replaced = block.path.exists()
        got = f"{'another one' if is_replaced else 'none any more'} at {str(block.path)!r}"
        change = "replaced" if is_replaced else "removed, as by prune"
        advice = f"It was {change}; the other episodes are read, and refresh() lists what is there now"
        error = LostBlockError("read the episode", f"{name!r} of {str(self.path)!r}", "its file", got, advice)
        error.key = block.key
        return error.of("", name)

    def check_there(self, numbers: Iterable[int]) -> None:
        """Raise an error that names the first episode of which a file was removed or replaced."""
        for error in self.removed(numbers).values():
            raise error

    def read(self, number: int, name: str, start: int, stop: int) -> Any:
        self.check_there([number])
        values = self._rows(number, name, start, stop)
        if not self.store.layouts[DATA].schema[name].is_text:
            return values
        return self._named(name, values.reshape(-1))

    def _named(self, name: str, numbers: np.ndarray[Any, Any]) -> list[str]:
        """Return the texts of a field by their numbers."""
        if self._texts is None:
            self._texts = self.notes.texts(self.store)
        if lost := sorted(set(numbers.tolist()) - self._texts.keys()):
            where = f"of {name!r} in {str(self.path)!r}"
            expected = "the text of each number"
            raise DataFileError("read the texts", where, expected, f"none of {lost[0]}", "It was damaged and set aside")
        return [self._texts[one] for one in numbers.tolist()]

    def _rows(self, number: int, name: str, start: int, stop: int) -> np.ndarray[Any, Any]:
        column = self.store.layouts[DATA].column_of[name]
        wanted = number, column.name, start, stop
        if self._last is None or self._last[0] != wanted:  # the fields of one row are asked for one after the other
            one = np.array([number])
            self._last = wanted, self.store.rows(column.name, one, one * 0 + start, one * 0 + stop - start)
        found: np.ndarray[Any, Any] = self.store.array((DATA, name), self._last[1]).copy()
        return found

    def read_many(self, numbers: Int64s, names: Sequence[str], starts: Int64s, counts: Int64s) -> dict[str, Any]:
        self.check_there(numbers.tolist())
        column_of = self.store.layouts[DATA].column_of
        found = dict[str, Any]()
        for column in {column_of[name].name: column_of[name] for name in names}.values():
            rows = self.store.rows(column.name, numbers, starts, counts)
            found |= {name: self.store.array((DATA, name), rows) for name in names if name in column.offsets}
        return found

    # All episodes at once, from the index and the notes; episode by episode where a note is damaged

    def schemas(self) -> tuple[Int64s, list[Schema]]:
        if self._noted is None:
            return super().schemas()
        every = Schema(field for field in self.store.layouts[DATA].schema.values() if not field.is_text)
        places: dict[Schema, int] = {}
        place_of: dict[tuple[str, ...], int] = {}
        absent = [tuple(names or ()) for names in self._column(ABSENT)]
        for names in dict.fromkeys(absent):
            # Names that are no fields here make no other schema.
            place_of[names] = places.setdefault(_without(every, names), len(places))
        return np.array([place_of[names] for names in absent], np.int64), list(places)

    def column(self, name: str) -> np.ndarray[Any, Any]:
        """A column of the table of all episodes; returns are NaN."""
        if self._noted is None:
            return column_of(self.episodes, name)
        index = self.store.index
        named = np.array([writer[writer.find(":") + 1 :] for writer in index.writers] or [""])[index.writer]
        if name == "id":
            return np.char.add(np.char.add(named, ":"), index.number.astype(str))
        if name == "ends":
            found: np.ndarray[Any, Any] = _ENDS[
                np.where((index.end == End.UNKNOWN) & index.is_end_unknown(), 3, index.end)
            ]
            return found
        if name in ("length", "return"):
            return index.lengths if name == "length" else np.full(len(index), np.nan)
        if name == "success":
            return np.array([int(one) if isinstance(one, bool) else -1 for one in self._column(name)], np.int8)
        # What is noted of a converted episode comes before what the file says.
        known = {"env": index.env.astype(np.int64), "writer": named, "time": index.end_time_ns}
        values = known.get(name, np.full(len(index), ""))
        told = self._column("end_time_ns" if name == "time" else name)
        kind = str if values.dtype.kind == "U" else int
        if any(type(one) is kind for one in told):
            values = np.array([a if type(a) is kind else b for a, b in zip(told, values.tolist(), strict=True)])
        if name != "time":
            return values
        return np.where(values == 0, np.datetime64("NaT"), values.astype("datetime64[ns]"))

    def _column(self, name: str) -> list[Any]:
        """Return what was noted under a name, for each episode; None where nothing was."""
        return (self._noted or {}).get(name) or [None] * len(self.store.index)

    @cached_property
    def _noted(self) -> dict[str, list[Any]] | None:
        """What was noted under all names that are asked for, each note parsed once; None if one is damaged."""
        try:
            return self.notes.columns(self.store, {"env", "writer", "end_time_ns", "success", "task", ABSENT})
        except CorruptFileError:
            return None

    def read_final(self, number: int, name: str) -> Any:
        self.check_there([number])
        column = self.store.layouts[FINAL].column_of[name].name
        found: np.ndarray[Any, Any] = self.store.array((FINAL, name), self.store.finals(column, np.array([number])))
        is_text = self.store.layouts[FINAL].schema[name].is_text
        return self._named(name, found[:1].reshape(-1))[0] if is_text else found[0, ...]


def _is_as_found(block: Block) -> bool:
    """Return whether the file of a block is there, and the one that was opened."""
    try:
        about = block.path.stat()
    except FileNotFoundError:
        return False
    is_stamped = bool(block.mtime_ns)
    return not is_stamped or (about.st_size, about.st_mtime_ns) == (block.file_bytes, block.mtime_ns)


class _Infos(Sequence[EpisodeInfo]):
    """Descriptions of trajectories, each made when it is asked for."""

    def __init__(self, store: FrameStore, notes: Notes, problems: list[RolloutDataError]) -> None:
        self._store = store
        self._index = store.index
        self._notes = notes
        self._problems = problems
        self._unsaid = set[int]()
        fields = list(store.layouts[DATA].schema.values())
        self._schema = Schema(field for field in fields if not field.is_text)
        self._texts = tuple(field.name for field in fields if field.is_text)
        self._final = store.layouts[FINAL].schema

    def __len__(self) -> int:
        return len(self._index)

    @overload
    def __getitem__(self, number: int) -> EpisodeInfo: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[EpisodeInfo]: ...
    def __getitem__(self, number: Any) -> Any:
        index = self._index
        if isinstance(number, slice):
            return [self[one] for one in range(len(self))[number]]
        labelled, within = index.keys(np.array([number]))[0]
        writer = labelled[labelled.find(":") + 1 :]
        end = index.end[number]
        final = self._final if index.final_row[number] >= 0 else NO_FIELDS
        is_known = end != End.UNKNOWN
        is_open = not index.is_end_unknown(np.array([number]))[0]
        said = self._said(number)
        said.pop(ENDS, None)
        absent = said.pop(ABSENT, ())
        task = said.pop("task", None)
        success = said.pop("success", None)
        about = {"env": int(index.env[number]), "writer": writer, "end_time_ns": int(index.end_time_ns[number])}
        # Flags of the end, and parts of a joined observation, are no fields that could be left out.
        others = [name for name in absent or () if name not in self._schema]
        said = {**about, **said, **({ABSENT: others} if others else {})} | (
            {ENDS: "open"} if is_open and not is_known else {}
        )
        return EpisodeInfo(
            name=f"{writer}:{within}",
            length=int(index.lengths[number]),
            schema=_without(self._schema, absent),
            texts=self._texts,
            final=final,
            terminated=bool(end == End.TERMINATED) if is_known else None,
            truncated=bool(end == End.TRUNCATED) if is_known else None,
            success=success if isinstance(success, bool) else None,
            task=task if isinstance(task, str) else "",
            metadata=said,
        )

    def _said(self, number: int) -> dict[str, Any]:
        """Return the notes of a trajectory; damaged ones count as none, and are a problem."""
        try:
            return self._notes.of(self._store, number)
        except CorruptFileError as problem:
            if number not in self._unsaid:
                self._unsaid.add(number)
                self._problems.append(problem.of("note"))
            return {}

    def __iter__(self) -> Iterator[EpisodeInfo]:
        return (self[number] for number in range(len(self)))


def _without(schema: Schema, absent: Sequence[str] | None) -> Schema:
    return Schema(one for one in schema.values() if one.name not in absent) if absent else schema
