"""Collect facts about the files of a recording: block headers, and errors of reading them.

Damaged files raise no error here. Their errors are stored, so that rules can report them.

A trajectory may be stored in several blocks. Its rows in one block are called a fragment. The blocks
of a writer have ascending sequence numbers.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from storage.core.durable_files import open_regular
from storage.core.fields import Schema
from storage.errors import (
    CorruptFileError,
    ForeignFileError,
    RolloutDataError,
    UnsafeFileError,
    UsageError,
)
from storage.saving.hdf5_files import open_hdf5

from ...blocks.block import FIRST_EDIT
from ...blocks.block_folder import BAD_CACHE, INDEX_CACHE_NAME, block_entries, stamp_of
from ...blocks.block_header import (
    DROPPED,
    ENDS,
    FIRST,
    FORMAT_NAME,
    FRAGMENT_DTYPE,
    BlockHeader,
    read_header,
)
from .batched_reading import Array
from .findings import Defect

_BLOCK = re.compile(r"rollout_(.+)_(\d+)\.h5")
_PARTS = np.dtype(
    [
        *FRAGMENT_DTYPE.descr,
        ("writer", "<i8"),
        ("sequence", "<i8"),
        ("block", "<i8"),
    ]
)
#: Maximum number of fragments of a block that are read. A table with more fragments is damaged.
_MAX_FRAGMENTS = 1 << 22
#: Exclusive upper limit of trajectory numbers. A table with larger numbers is damaged.
_MAX_TRAJECTORY = 1 << 40
#: Maximum bytes of an index cache that is read.
_MAX_CACHE_BYTES = 1 << 28
#: Exceptions that reading a damaged table of fragments may raise.
_BAD_TABLE = (
    RolloutDataError,
    OSError,
    LookupError,
    AttributeError,
    TypeError,
    ValueError,
    RuntimeError,
)


class ExaminedFiles:
    """Files of the examined recording: block headers, fragments and errors.

    Attributes:
        path: File or folder of the recording.
        folder: The same path if it is a folder of block files, else None.
        headers: Header of each readable block, by file name.
        bad: Error of each block whose header is unreadable, by file name.
    """

    def __init__(self, scan: Any) -> None:
        self._scan = scan
        self.path = scan.recording.path if scan.failure is None else Path(str(scan.path))
        self.folder: Path | None = None
        self.headers: dict[str, BlockHeader] = {}
        self.bad: dict[str, RolloutDataError] = {}
        if not self._is_block_folder():
            return
        self.folder = self.path
        for name in sorted(entry.name for entry in block_entries(self.path)):
            try:
                self.headers[name] = read_header(self.path / name)
            except RolloutDataError as problem:
                self.bad[name] = problem
            except OSError as error:
                self.bad[name] = CorruptFileError(f"block {name!r} cannot be read: {error}.")

    def _is_block_folder(self) -> bool:
        if not self.path.is_dir():
            return False
        if self._scan.metadata.get("format") not in (None, FORMAT_NAME):
            return False
        return self._scan.failure is not None or self._scan.recording.format == FORMAT_NAME

    @cached_property
    def writers(self) -> list[str]:
        """Names of the writers. The field `writer` of `parts` is an index into this list."""
        return sorted({header.writer for header in self.headers.values()})

    @cached_property
    def parts(self) -> Array:
        """Table of the fragments in all blocks, sorted by writer, trajectory and frame.

        Dropped trajectories and second copies of a block are left out. `writer` and `block` are
        indices into `writers` and `headers`.
        """
        tables = [np.zeros(0, _PARTS)]
        seen = set()
        for block, header in enumerate(self.headers.values()):
            if (header.writer, header.sequence) in seen:
                continue
            seen.add((header.writer, header.sequence))
            table = np.zeros(len(header.fragments), _PARTS)
            for name in FRAGMENT_DTYPE.names or ():
                table[name] = header.fragments[name]
            table["writer"] = self.writers.index(header.writer)
            table["sequence"] = header.sequence
            table["block"] = block
            tables.append(table)
        parts = np.concatenate(tables)
        key = parts["writer"] << 40 | parts["trajectory"]
        dropped = key[parts["flags"] & DROPPED > 0]
        parts = parts[~np.isin(key, dropped)]
        keys = [parts[name] for name in ("sequence", "start", "trajectory", "writer")]
        return parts[np.lexsort(keys)]

    @cached_property
    def steps(self) -> tuple[Array, Array]:
        """Gaps and overlaps between the P fragments in `parts`, as two arrays.

        bool `[P]`: whether a fragment is the first one of its trajectory.
        int64 `[P]`: number of frames that are missing before a fragment. It is negative if the
        fragment overlaps the previous fragment of its trajectory.
        """
        parts = self.parts
        is_first = np.ones(len(parts), bool)
        is_first[1:] = parts["writer"][1:] != parts["writer"][:-1]
        is_first[1:] |= parts["trajectory"][1:] != parts["trajectory"][:-1]
        expected = np.zeros(len(parts), np.int64)
        expected[1:] = parts["start"][:-1] + parts["length"][:-1]
        expected[is_first] = 0
        missing = parts["start"] - expected
        return is_first, np.where(parts["length"] > 0, missing, 0)

    def names(self, chosen: Array) -> list[str]:
        """Return the names of the trajectories in chosen rows of `parts`, without duplicates.

        Args:
            chosen: Index array or mask that selects rows of `parts`.
        """
        rows = self.parts[chosen]
        pairs = zip(rows["writer"].tolist(), rows["trajectory"].tolist(), strict=True)
        return list(dict.fromkeys(f"{self.writers[writer]}:{number}" for writer, number in pairs))

    def holes(self) -> Iterator[tuple[str, int, int]]:
        """Yield each gap in the sequence numbers of a writer's blocks, as (writer, first, stop).

        The blocks `first` to `stop - 1` are missing.
        """
        matches = [_BLOCK.fullmatch(name) for name in self.bad]
        bad = [match.groups() for match in matches if match]
        for writer in self.writers:
            headers = [header for header in self.headers.values() if header.writer == writer]
            present = {header.sequence for header in headers}
            present |= {int(sequence) for name, sequence in bad if name == writer}
            data_blocks = sorted(sequence for sequence in present if sequence < FIRST_EDIT)
            for before, after in pairwise(data_blocks):
                if after > before + 1:
                    yield writer, before + 1, after

    def trajectories_in(
        self,
        writer: str,
        first: int,
        stop: int,
        exists: bool = False,
    ) -> list[str]:
        """Infer which trajectories have frames in the missing or unreadable blocks `first:stop`.

        They are inferred from the readable blocks of the writer. A trajectory that begins before
        the gap has frames in the gap unless it ends before it. So does a trajectory that continues
        after the gap with missing frames.

        Args:
            writer: Name of the writer.
            first: Sequence number of the first block in the gap.
            stop: Sequence number of the last block in the gap, plus 1.
            exists: Whether the files of the blocks exist but are unreadable. Then they also have
                the trajectories whose numbers no readable block has. Otherwise these numbers may
                belong to trajectories that were dropped.

        Returns:
            Names of the trajectories, in ascending order.
        """
        parts = self.parts[:0]
        if writer in self.writers:
            parts = self.parts[self.parts["writer"] == self.writers.index(writer)]
        before = parts[parts["sequence"] < first]
        after = parts[parts["sequence"] >= stop]

        # These trajectories begin before the gap and do not end before it.
        has_end = before["flags"] & ENDS > 0
        numbers = set(before["trajectory"].tolist()) - set(before["trajectory"][has_end].tolist())

        # These trajectories continue after the gap. They have frames in the gap only if their first
        # frame after the gap does not follow their last frame before it.
        stops = before["start"] + before["length"]
        stop_of = dict(zip(before["trajectory"].tolist(), stops.tolist(), strict=True))
        heads = after[np.unique(after["trajectory"], return_index=True)[1]]
        is_beginning = (heads["flags"] & FIRST) > 0
        for head in heads[~is_beginning]:
            number = int(head["trajectory"])
            if stop_of.get(number, 0) < head["start"]:
                numbers.add(number)
            else:
                numbers.discard(number)

        if exists and (len(before) or first == 0):
            # These trajectories begin and end in the gap. Numbers ascend in the order of beginning.
            last_known = int(heads["trajectory"].max(initial=-1))
            unknown_from = int(before["trajectory"].max(initial=-1)) + 1
            begun_later = heads["trajectory"][is_beginning]
            unknown_stop = int(begun_later.min(initial=last_known + 1))
            numbers |= set(range(unknown_from, unknown_stop))
        return [f"{writer}:{number}" for number in sorted(numbers)]

    def trajectories_of_bad_block(self, name: str) -> list[str]:
        """Return the names of the trajectories in a block with an unreadable header.

        The first available source is used: the error of the block, its table of fragments, the
        index cache of the folder, or else `trajectories_in`.
        """
        match = _BLOCK.fullmatch(name)
        writer = match[1] if match else ""
        sequence = int(match[2]) if match else 0
        episode = self.bad[name].episode
        if episode and match:
            return [f"{writer}:{episode}"]
        numbers = self._numbers_in_table(name)
        if numbers is None:
            numbers = self._cached_numbers.get(name, [])
            if not numbers:
                return self.trajectories_in(writer, sequence, sequence + 1, exists=True)
        return [f"{writer}:{number}" for number in numbers]

    def _numbers_in_table(self, name: str) -> list[int] | None:
        """Read the trajectory numbers in the table of fragments of a block.

        Returns None if the table is unreadable.
        """
        with suppress(*_BAD_TABLE), open_hdf5(self.path / name) as (file, _):
            table = file["fragments"]
            if table.dtype == FRAGMENT_DTYPE and table.shape[0] < _MAX_FRAGMENTS:
                numbers = np.unique(table[()]["trajectory"])
                is_valid = (numbers >= 0) & (numbers < _MAX_TRAJECTORY)
                return list(numbers[is_valid].tolist())
        return None

    @cached_property
    def _cached_numbers(self) -> dict[str, list[int]]:
        """Trajectory numbers of each block in the index cache; {} if the cache is damaged."""
        path = self.path / INDEX_CACHE_NAME
        with suppress(*BAD_CACHE):
            if stamp_of(path) is None or path.stat().st_size > _MAX_CACHE_BYTES:
                return {}
            with np.load(path, allow_pickle=False) as cache:
                members = cache.zip.infolist()
                if any(member.compress_type != zipfile.ZIP_STORED for member in members):
                    return {}
                about = json.loads(bytes(cache["about"]))
                numbers = cache["fragments"]["trajectory"]
                by_block = np.split(numbers, about["bounds"][1:-1])
                blocks = zip(about["names"], by_block, strict=True)
                return {name: np.unique(part).tolist() for name, part in blocks}
        return {}

    @cached_property
    def _place_of(self) -> dict[str, int]:
        """Map from the name of an episode to its index in the recording."""
        names = self._scan.recording.ids if self._scan.failure is None else []
        return {name: place for place, name in enumerate(names)}

    def located(self, names: Iterable[str]) -> dict[str, Any]:
        """Return keyword arguments of `Defect` that name the affected episodes.

        "trajectories" has the indices of the episodes. "left_out" has the names that the recording
        does not contain, because these episodes are damaged. The name of a trajectory folder stands
        for all episodes in it.
        """
        places: list[int] = []
        left_out: list[str] = []
        for name in dict.fromkeys(names):
            if name in self._place_of:
                places.append(self._place_of[name])
                continue
            in_folder = self._places_in_folder(name)
            if name and self._scan.metadata.get("format") is None:
                places += in_folder
            if name[-1:].isdecimal() and not in_folder:
                left_out.append(name)
        return {"trajectories": places, "left_out": left_out}

    def _places_in_folder(self, folder: str) -> list[int]:
        """Return the indices of the episodes in a trajectory folder.

        The format of trajectory folders names an episode "folder:number".
        """
        places = self._place_of.items()
        return [place for name, place in places if name.rpartition(":")[0].endswith(folder)]

    @cached_property
    def problems(self) -> Sequence[RolloutDataError]:
        """Errors and advice from opening the recording.

        Errors of unreadable block headers are left out, because `bad` has them.
        """
        noted = [*self._scan.problems, *self._scan.advice]
        if self.folder is not None:
            noted = [problem for problem in noted if problem.kind not in ("", "header")]
        if self._scan.failure is not None and not self.bad:
            return [self._scan.failure, *noted]
        return noted

    def defects(self, *kinds: str) -> Iterator[Defect]:
        """Yield a defect for each error that has one of `kinds`.

        Errors of reading blocks and of opening the recording are known. Errors of reading episodes
        are included only if the data were read before this call.
        """
        for name, problem in self.bad.items():
            if self._kind_of_bad_block(name) in kinds:
                trajectories = self.located(self.trajectories_of_bad_block(name))
                message = f"{name}: {problem}"
                yield Defect(message=message, evidence={"block": name}, **trajectories)
        for problem in self.problems:
            if kind_of(problem) in kinds:
                names = [problem.episode] if problem.episode else []
                yield Defect(message=str(problem), **self.located(names))
        for place, error in self._scan.unreadable:
            if isinstance(error, RolloutDataError) and kind_of(error) in kinds:
                yield Defect(message=str(error), trajectories=[place])

    def _kind_of_bad_block(self, name: str) -> str:
        kind = kind_of(self.bad[name])
        if kind == "unreadable" and is_whole_hdf5(self.path / name):
            return "header"
        return kind


def kind_of(problem: RolloutDataError) -> str:
    """Return the kind of a problem, such as "unreadable" or "unsafe"; "" if it is unknown.

    The kind is the attribute `kind` of the error. If that is empty, the class of the error decides.
    """
    if isinstance(problem, UnsafeFileError):
        return "unsafe"
    if problem.kind:
        return problem.kind
    is_of_file = isinstance(problem, (CorruptFileError, ForeignFileError))
    return "unreadable" if is_of_file and not isinstance(problem, UsageError) else ""


def most_frequent(schemas: Iterable[Schema]) -> Schema:
    """Return the most frequent schema; the first one if several are equally frequent."""
    return Counter(schemas).most_common(1)[0][0]


def is_whole_hdf5(path: Path) -> bool:
    """Return whether a file is HDF5 and has at least the size that its superblock states."""
    try:
        with open(open_regular(path), "rb") as file:
            head = file.read(48)
    except (RolloutDataError, OSError):
        return False
    is_old_superblock = head[8:9] < b"\x02"
    offset = 40 if is_old_superblock else 28
    stated_bytes = int.from_bytes(head[offset : offset + 8], "little")
    return head.startswith(b"\x89HDF\r\n\x1a\n") and path.stat().st_size >= stated_bytes
