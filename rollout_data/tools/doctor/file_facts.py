"""What files tell besides rows: the blocks of a folder of ours, and the problems that readers of any format met.

One rule: nothing raises for bad data, and no row is read.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from storage.core.durable_files import open_regular
from storage.core.fields import Schema
from storage.errors import CorruptFileError, ForeignFileError, RolloutDataError, UnsafeFileError, UsageError
from storage.saving.hdf5_files import open_hdf5

from ...blocks.block import FIRST_EDIT
from ...blocks.block_folder import BAD_CACHE, INDEX_CACHE_NAME, block_entries, stamp_of
from ...blocks.block_header import DROPPED, ENDS, FIRST, FRAGMENT_DTYPE, BlockHeader, read_header
from .batched_reading import Array
from .findings import Defect

_BLOCK = re.compile(r"rollout_(.+)_(\d+)\.h5")
_PARTS = np.dtype([*FRAGMENT_DTYPE.descr, ("writer", "<i8"), ("sequence", "<i8"), ("block", "<i8")])
_MAX_FRAGMENTS = 1 << 22
_MAX_CACHE_BYTES = 1 << 28


class Files:
    """The files of the recording of a `Scan`.

    Attributes:
        folder: Where blocks of ours are; None for other formats.
        headers: File name -> header, of the blocks that have one.
        bad: File name -> why a block has none.
    """

    def __init__(self, scan: Any) -> None:
        self._scan = scan
        path = scan.recording.path if scan.failure is None else Path(str(scan.path))
        is_ours = path.is_dir() and scan.metadata.get("format") in (None, "rollout-data")
        is_ours &= scan.failure is not None or scan.recording.format == "rollout-data"
        self.path = path
        self.folder = path if is_ours else None
        self.headers: dict[str, BlockHeader] = {}
        self.bad: dict[str, RolloutDataError] = {}
        for name in sorted(one.name for one in block_entries(path)) if is_ours else ():
            try:
                self.headers[name] = read_header(path / name)
            except RolloutDataError as problem:
                self.bad[name] = problem
            except OSError as error:
                self.bad[name] = CorruptFileError("read the block", repr(name), "a readable file", str(error))

    @cached_property
    def writers(self) -> list[str]:
        """Names of the writers, in the numbering of `parts`."""
        return sorted({header.writer for header in self.headers.values()})

    @cached_property
    def parts(self) -> Array:
        """All fragments, those of a trajectory one after the other; without trajectories that were dropped.

        A second copy of a block is left out. `writer` and `block` are positions in `writers` and `headers`.
        """
        tables = [np.zeros(0, _PARTS)]
        seen = set()
        for number, header in enumerate(self.headers.values()):
            if (header.writer, header.sequence) not in seen:
                table = np.zeros(len(header.fragments), _PARTS)
                for name in FRAGMENT_DTYPE.names or ():
                    table[name] = header.fragments[name]
                table["writer"], table["sequence"] = self.writers.index(header.writer), header.sequence
                table["block"] = number
                tables.append(table)
                seen.add((header.writer, header.sequence))
        found = np.concatenate(tables)
        key = found["writer"] << 40 | found["trajectory"]
        found = found[~np.isin(key, key[found["flags"] & DROPPED > 0])]
        return found[np.lexsort((found["sequence"], found["start"], found["trajectory"], found["writer"]))]

    @cached_property
    def steps(self) -> tuple[Array, Array]:
        """Which of `parts` is the first of its trajectory, and by how many frames each is off the one before it."""
        parts = self.parts
        is_first = np.ones(len(parts), bool)
        same = (parts["writer"][1:] == parts["writer"][:-1]) & (parts["trajectory"][1:] == parts["trajectory"][:-1])
        is_first[1:] = ~same
        off = parts["start"].copy()
        off[1:] -= np.where(same, parts["start"][:-1] + parts["length"][:-1], 0)
        return is_first, np.where(parts["length"] > 0, off, 0)

    def names(self, which: Array) -> list[str]:
        """Name the trajectories of some of `parts`, each once."""
        rows = self.parts[which]
        pairs = zip(rows["writer"].tolist(), rows["trajectory"].tolist(), strict=True)
        return list(dict.fromkeys(f"{self.writers[writer]}:{number}" for writer, number in pairs))

    def holes(self) -> Iterator[tuple[str, int, int]]:
        """Yield (writer, first, stop) of the blocks that are gone between others."""
        bad = [match.groups() for name in self.bad if (match := _BLOCK.fullmatch(name))]
        for writer in self.writers:
            there = {header.sequence for header in self.headers.values() if header.writer == writer}
            there |= {int(sequence) for name, sequence in bad if name == writer}
            listed = sorted(one for one in there if one < FIRST_EDIT)
            for before, after in pairwise(listed):
                if after > before + 1:
                    yield writer, before + 1, after

    def lost(self, writer: str, first: int, stop: int, is_there: bool = False) -> list[str]:
        """Name the trajectories that had frames in the blocks `first:stop` of a writer, as far as the others tell.

        Numbers that no other block has are of blocks that are there, and cannot be read; in one that is gone they may
        have been dropped.
        """
        parts = self.parts[self.parts["writer"] == (self.writers.index(writer) if writer in self.writers else -1)]
        before = parts[parts["sequence"] < first]
        after = parts[parts["sequence"] >= stop]
        ended = set(before["trajectory"][before["flags"] & ENDS > 0].tolist())
        numbers = set(before["trajectory"].tolist()) - ended
        begun = dict(zip(before["trajectory"].tolist(), (before["start"] + before["length"]).tolist(), strict=True))
        heads = after[np.unique(after["trajectory"], return_index=True)[1]]
        is_later = (heads["flags"] & FIRST) == 0
        later = zip(heads["trajectory"][is_later].tolist(), heads["start"][is_later].tolist(), strict=True)
        for number, start in later:
            (numbers.add if begun.get(number, 0) < start else numbers.discard)(number)
        if is_there and (len(before) or first == 0):
            new = heads["trajectory"][~is_later]
            last = int(heads["trajectory"].max(initial=-1))
            numbers |= {*range(int(before["trajectory"].max(initial=-1)) + 1, int(new.min(initial=last + 1)))}
        return [f"{writer}:{number}" for number in sorted(numbers)]

    def named_by(self, name: str) -> list[str]:
        """Name the trajectories of a block without a header: those in its table, or else those that others lack."""
        match = _BLOCK.fullmatch(name)
        writer, sequence = (match[1], int(match[2])) if match else ("", 0)
        if (episode := self.bad[name].episode) and match:
            return [f"{writer}:{episode}"]
        try:
            with open_hdf5(self.path / name) as (file, _):
                table = file["fragments"]
                if table.dtype == FRAGMENT_DTYPE and table.shape[0] < _MAX_FRAGMENTS:
                    numbers = np.unique(table[()]["trajectory"])
                    return [f"{writer}:{number}" for number in numbers[(numbers >= 0) & (numbers < 1 << 40)].tolist()]
        except (RolloutDataError, OSError, LookupError, AttributeError, TypeError, ValueError, RuntimeError):
            pass  # no table can be read: what the cache and the other blocks tell remains
        found = self._cached.get(name, [])
        return [f"{writer}:{one}" for one in found] or self.lost(writer, sequence, sequence + 1, is_there=True)

    @cached_property
    def _cached(self) -> dict[str, list[int]]:
        """Return the trajectories in each block by the index cache; none if it is damaged."""
        path = self.path / INDEX_CACHE_NAME
        with suppress(*BAD_CACHE):
            if stamp_of(path) is not None and path.stat().st_size <= _MAX_CACHE_BYTES:
                with np.load(path, allow_pickle=False) as cache:
                    if all(member.compress_type == zipfile.ZIP_STORED for member in cache.zip.infolist()):
                        about, parts = json.loads(bytes(cache["about"])), cache["fragments"]["trajectory"]
                        found = zip(about["names"], np.split(parts, about["bounds"][1:-1]), strict=True)
                        return {name: np.unique(one).tolist() for name, one in found}
        return {}

    @cached_property
    def _places(self) -> dict[str, int]:
        found = self._scan.recording.ids if self._scan.failure is None else []
        return {name: place for place, name in enumerate(found)}

    def named(self, names: Iterable[str]) -> dict[str, Any]:
        """Return `trajectories` and `left_out` of a `Defect` for episodes by their names."""
        places = list[int]()
        left_out = list[str]()
        for name in dict.fromkeys(names):
            place = self._places.get(name)
            if place is None:  # the older layout names episodes "folder:number"
                of_folder = [at for one, at in self._places.items() if one.rpartition(":")[0].endswith(name)]
                places += of_folder if name and self._scan.metadata.get("format") is None else []
                left_out += [name] if name[-1:].isdecimal() and not of_folder else []
            else:
                places.append(place)
        return {"trajectories": places, "left_out": left_out}

    @cached_property
    def problems(self) -> Sequence[RolloutDataError]:
        """What opening met, advice included, and what blocks without a header are."""
        failure = [] if self._scan.failure is None else [self._scan.failure]
        noted = [*self._scan.problems, *self._scan.advice]
        problems = [one for one in noted if self.folder is None or one.kind not in ("", "header")]
        return [*failure, *problems] if not self.bad else problems

    def told(self, *kinds: str) -> Iterator[Defect]:
        """Report blocks without a header, and the problems of some kinds that were met so far."""
        for name, problem in self.bad.items():
            if self._kind_of_block(name) in kinds:
                yield Defect(message=f"{name}: {problem}", evidence={"block": name}, **self.named(self.named_by(name)))
        met = [(problem, [problem.episode] if problem.episode else []) for problem in self.problems]
        ids = self._scan.recording.ids if self._scan.unreadable else []
        met += [(one, [ids[place]]) for place, one in self._scan.unreadable if isinstance(one, RolloutDataError)]
        for problem, names in met:
            if kind_of(problem) in kinds:
                yield Defect(message=str(problem), **self.named(names))

    def _kind_of_block(self, name: str) -> str:
        kind = kind_of(self.bad[name])
        return "header" if kind == "unreadable" and is_whole_hdf5(self.path / name) else kind


def kind_of(problem: RolloutDataError) -> str:
    """Return the kind of a problem: as its finder noted, otherwise by its type."""
    if isinstance(problem, UnsafeFileError):
        return "unsafe"
    is_damage = isinstance(problem, (CorruptFileError, ForeignFileError)) and not isinstance(problem, UsageError)
    return problem.kind or ("unreadable" if is_damage else "")


def usual(schemas: Iterable[Schema]) -> Schema:
    """Return the most frequent of some schemas."""
    counts: dict[Schema, int] = {}
    for schema in schemas:
        counts[schema] = counts.get(schema, 0) + 1
    return max(counts, key=lambda schema: counts[schema])


def is_whole_hdf5(path: Path) -> bool:
    """Return whether a file begins as HDF5 does and is as long as it says there."""
    try:
        with open(open_regular(path), "rb") as file:
            head = file.read(48)
    except (RolloutDataError, OSError):
        return False
    at = 40 if head[8:9] < b"\x02" else 28
    return head[:8] == b"\x89HDF\r\n\x1a\n" and path.stat().st_size >= int.from_bytes(head[at : at + 8], "little")
