"""The trajectory index: which frames exist, and in which rows of which block they lie.

One rule: arrays, never a Python object per trajectory or frame. All trajectories stand one after
the other in a virtual frame axis, in the order in which they were completed; a prefix sum over
fragments turns virtual frames into rows. `folder.py` finds the blocks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from storage.core.durable import crc32
from storage.errors import DataFileError

from ..format.header import COMPLETE, DROPPED, FRAGMENT_DTYPE, TENTATIVE, TERMINATED, TRUNCATED

Int64s = np.ndarray[Any, np.dtype[np.int64]]
#: Of a block: its file, and its name in there; "" if it is the whole file.
Key = tuple[Path, str]
#: What is the same only as long as the block is the same: its key, size and time of the last change in ns.
Identity = tuple[Key, int, int]
_NUM_NAMED = 3


class End(IntEnum):
    """How a trajectory ended: UNKNOWN if it is in progress, was cut off, or its file does not tell."""

    UNKNOWN, TERMINATED, TRUNCATED = 0, 1, 2


class LostBlockError(DataFileError):
    """A block that an index knows is gone or damaged: its trajectories cannot be played to their end.

    Attributes:
        key: The block's.
        block: Its number in the index that knows it.
    """

    key: Key = Path(), ""
    block = -1


@dataclass(frozen=True, eq=False)
class Block:
    """What the index and the frame stores need to know of one file, or of a part of one.

    Attributes:
        path: The file.
        writer: Whose trajectory numbers its fragments use; unique among all data folders.
        sequence: Position among the blocks of its writer.
        fragments: `[F]` of `FRAGMENT_DTYPE`.
        places: (table, column) -> (byte offset, number of rows); empty for foreign files.
        file_bytes: Size of the file.
        mtime_ns: When it was last written: with the size, what tells it from another file of the same name.
        name: Tells it from the other blocks of its file.
    """

    path: Path
    writer: str
    sequence: int
    fragments: np.ndarray
    places: Mapping[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    file_bytes: int = 0
    mtime_ns: int = 0
    name: str = ""

    @property
    def key(self) -> Key:
        """Where it is."""
        return self.path, self.name

    @property
    def identity(self) -> Identity:
        """What is the same only as long as the block is the same."""
        return self.key, self.file_bytes, self.mtime_ns


class Runs(NamedTuple):
    """Consecutive rows of one block each, in the order of their destination.

    Each array is int64 `[R]`: `target` is the first row of the output, then block, first row of
    the block and number of rows.
    """

    target: Int64s
    block: Int64s
    row: Int64s
    num_rows: Int64s


_ARRAYS = [
    "first_frame",
    "fragment_frame",
    "fragment_block",
    "fragment_row",
    "flags",
    "end_time_ns",
    "env",
    "writer",
    "number",
    "final_block",
    "final_row",
]

#: What the index needs of a fragment.
_COLUMNS = ("trajectory", "env", "flags", "start", "length", "row", "final_row", "end_time_ns")
_ALL, _TERMINATED = slice(None), int(End.TERMINATED)


class TrajectoryIndex:
    """An immutable snapshot of all trajectories, in the order of their completion.

    Attributes:
        blocks: The files, in the numbering of `fragment_block` and `final_block`.
        first_frame: int64 `[M + 1]`, where each trajectory starts on the virtual frame axis.
        flags: uint32 `[M]`, the flags of `format/header.py` of all its fragments together.
        end: uint8 `[M]`, an `End`.
        env, number, end_time_ns: int64 `[M]`, recorded env, number within the writer, end.
        writer: int64 `[M]`, position in `writers`.
        final_block, final_row: int64 `[M]`, where the true final observation lies, -1 if nowhere.
        num_present: The blocks from this position on are gone from their folder.
        num_dropped: Trajectories that a writer declared void.
        num_broken: Trajectories left out because a part of them is missing.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        built: Mapping[str, np.ndarray] | None = None,
        num_present: int | None = None,
    ) -> None:
        self.blocks = tuple(blocks)
        self.num_present = len(self.blocks) if num_present is None else num_present
        self.writers = sorted({block.writer for block in self.blocks})
        self._broken_writers = np.zeros(0, np.int64)
        if built is None:
            self._build(_fragments_of(self.blocks, self.writers))
        else:
            vars(self).update({name: built[name] for name in _ARRAYS})
            self.num_dropped, self.num_broken = map(int, built["counts"])
        is_terminated = np.where(self.flags & TERMINATED, np.uint8(End.TERMINATED), np.uint8(End.UNKNOWN))
        self.end = np.where(self.flags & TRUNCATED, np.uint8(End.TRUNCATED), is_terminated)

    def _build(self, parts: SimpleNamespace) -> None:
        """Choose the trajectories and their order; lay their frames one after the other."""
        parts = _taken(parts, np.lexsort((parts.end_time_ns, parts.start, parts.trajectory, parts.writer)))
        is_head = _changes(parts.writer, parts.trajectory)
        first, group = np.flatnonzero(is_head), np.cumsum(is_head) - 1
        flags = np.bitwise_or.reduceat(parts.flags, first)
        lengths = np.add.reduceat(parts.length, first)
        ends = np.maximum.reduceat(parts.end_time_ns, first)
        finals = np.maximum.reduceat(np.where(parts.final_row >= 0, np.arange(len(group)), -1), first)
        before = np.cumsum(parts.length) - parts.length
        is_gap = (parts.length > 0) & (parts.start != before - before[first][group])
        is_dropped = (flags & DROPPED) > 0
        is_broken = np.logical_or.reduceat(is_gap, first) & ~is_dropped
        is_undecided = ((flags & TENTATIVE) > 0) & ((flags & (TERMINATED | TRUNCATED)) == 0)
        self._broken_writers = np.unique(parts.writer[first[is_broken]])
        self.num_dropped, self.num_broken = int(is_dropped.sum()), int(is_broken.sum())
        kept = np.flatnonzero(~is_broken & ~is_dropped & ~is_undecided & (lengths > 0))
        kept = kept[np.lexsort((parts.trajectory[first[kept]], parts.writer[first[kept]], ends[kept]))]
        heads, finals = first[kept], finals[kept]
        self.flags, self.end_time_ns = flags[kept], ends[kept]
        self.env, self.writer, self.number = parts.env[heads], parts.writer[heads], parts.trajectory[heads]
        self.final_block = np.where(finals >= 0, parts.block[finals], -1)
        self.final_row = np.where(finals >= 0, parts.final_row[finals], -1)
        rank = np.full(len(first), -1, np.int64)
        rank[kept] = np.arange(len(kept))
        rank = rank[group]
        used = np.flatnonzero((rank >= 0) & (parts.length > 0))
        used = used[np.argsort(rank[used], kind="stable")]
        parts, rank = _taken(parts, used), rank[used]
        # Fragments that follow each other in a trajectory and in a block are one.
        is_head = _changes(rank)
        is_start = is_head | _changes(parts.block, parts.row - np.cumsum(parts.length) + parts.length)
        frame = np.cumsum(parts.length) - parts.length
        num_frames = int(parts.length.sum())
        self.fragment_block, self.fragment_row = parts.block[is_start], parts.row[is_start]
        self.fragment_frame = np.append(frame[is_start], num_frames)
        self.first_frame = np.append(frame[is_head], num_frames)

    def arrays(self) -> dict[str, np.ndarray]:
        """All that was computed, in the form that `__init__` takes as `built` for the same blocks."""
        counts = np.array([self.num_dropped, self.num_broken])
        return {"counts": counts, **{name: vars(self)[name] for name in _ARRAYS}}

    def check_valid(self, num_rows: Int64s, num_finals: Int64s) -> tuple[bool, str]:
        """Check an index that was not built here: (ok, reason).

        Args:
            num_rows, num_finals: int64 `[B]`, rows in the two tables of each block.
        """
        sizes = np.diff(self.fragment_frame)
        block, row = self.fragment_block, self.fragment_row
        has_final = self.final_row >= 0
        columns = (self.env, self.writer, self.number, self.final_block, self.final_row, self.end_time_ns)
        rules = {
            "one entry a trajectory": all(len(column) == len(self) == len(self.first_frame) - 1 for column in columns),
            "one entry a fragment": len(sizes) == len(block) == len(row),
            "frames from 0 on": self.fragment_frame[:1].tolist() == self.first_frame[:1].tolist() == [0],
            "frames in order": bool((sizes > 0).all() and (np.diff(self.first_frame) > 0).all()),
            "trajectories of whole fragments": bool(np.isin(self.first_frame, self.fragment_frame).all()),
            "as many frames in fragments": self.fragment_frame[-1:].tolist() == self.first_frame[-1:].tolist(),
            "known writers": bool(((self.writer >= 0) & (self.writer < len(self.writers))).all()),
            "known blocks": _within(block, len(num_rows)) and _within(self.final_block[has_final], len(num_rows)),
        }
        failed = [name for name, holds in rules.items() if not holds]
        if failed:
            return False, failed[0]
        if bool(((row < 0) | (row > num_rows[block] - sizes)).any()):
            return False, "rows within their block"
        if bool((self.final_row[has_final] >= num_finals[self.final_block[has_final]]).any()):
            return False, "final rows within their block"
        return True, ""

    def __len__(self) -> int:
        return len(self.flags)

    @property
    def num_frames(self) -> int:
        return int(self.first_frame[-1])

    @property
    def num_fragments(self) -> int:
        return len(self.fragment_row)

    @property
    def lengths(self) -> Int64s:
        """int64 `[M]`: frames of each trajectory; a new array."""
        return np.diff(self.first_frame)

    def is_complete(self) -> np.ndarray:
        """bool `[M]`: the trajectory will not grow any more."""
        return (self.flags & COMPLETE) > 0

    def is_present(self) -> np.ndarray:
        """bool `[M]`: all its blocks are still in their folder."""
        present = np.ones(len(self), bool)
        if self.num_present < len(self.blocks):
            gone = np.flatnonzero(self.fragment_block >= self.num_present)
            present[np.searchsorted(self.first_frame, self.fragment_frame[gone], side="right") - 1] = False
        return present

    def missing_blocks(self) -> dict[str, list[tuple[int, int]]]:
        """Writer -> the numbers of blocks, as (start, stop), that are not here; of writers with broken trajectories.

        Not for an index that was `built` elsewhere.
        """
        found = {}
        for writer in (self.writers[number] for number in self._broken_writers.tolist()):
            present = sorted(block.sequence for block in self.blocks if block.writer == writer)
            pairs = zip([-1, *present], present, strict=False)
            found[writer] = [(before + 1, after) for before, after in pairs if after > before + 1]
        return found

    def trajectories_in(self, blocks: Sequence[int]) -> Int64s:
        """Trajectories with a frame or the final observation in one of these blocks, int64, ascending."""
        frames = self.fragment_frame[:-1][np.isin(self.fragment_block, blocks)]
        played = np.searchsorted(self.first_frame, frames, side="right") - 1
        return np.union1d(played, np.flatnonzero(np.isin(self.final_block, blocks)))

    def blocks_of(self, trajectories: Int64s) -> list[Block]:
        """The blocks that hold frames or final observations of these trajectories."""
        bounds = np.searchsorted(self.fragment_frame, self.first_frame)
        parts = [self.fragment_block[bounds[t] : bounds[t + 1]] for t in np.unique(trajectories).tolist()]
        finals = self.final_block[trajectories]
        used = np.unique(np.concatenate([finals[finals >= 0], *parts]))
        return [self.blocks[block] for block in used.tolist()]

    def writers_upto(self) -> dict[str, int]:
        """Writer -> the last sequence number among the blocks that are present."""
        found: dict[str, int] = {}
        for block in self.blocks[: self.num_present]:
            found[block.writer] = max(found.get(block.writer, -1), block.sequence)
        return found

    def lost_block(self, block: int, got: str) -> LostBlockError:
        """Build the error for a block that cannot be read any more; it names the trajectories."""
        keys = self.keys(self.trajectories_in([block]))
        named = [f"{number} of writer {writer!r}" for writer, number in keys[:_NUM_NAMED]]
        named += [f"{len(keys) - _NUM_NAMED} more"] if len(keys) > _NUM_NAMED else []
        action, expected = f"play trajectory {', '.join(named)}", "the file as it was when it was found"
        advice = "A stream goes on with other trajectories; for windows, open the dataset again"
        lost = LostBlockError(action, f"in {str(self.blocks[block].path)!r}", expected, got, advice)
        lost.key, lost.block = self.blocks[block].key, block
        return lost

    def is_timeout(self, trajectories: Int64s | slice = _ALL) -> np.ndarray:
        """bool, for each of these: the value after its last frame counts, as far as is known."""
        is_timeout: np.ndarray = self.end[trajectories] != _TERMINATED
        return is_timeout

    def random_keys(self, trajectories: Int64s, seed: int, with_folder: bool = True) -> np.ndarray:
        """uint64, a random number for each of these: see `random_keys`.

        With several folders, `with_folder` tells trajectories of equal names in two of them apart.
        """
        names = self.writers if with_folder else [name[name.find(":") + 1 :] for name in self.writers]
        return random_keys(names, self.writer[trajectories], self.number[trajectories], seed)

    def name(self, trajectory: int) -> list[Any]:
        """Name a trajectory so that its place in the order is known when it is gone: end, writer, number."""
        writer = self.writers[int(self.writer[trajectory])]
        return [int(self.end_time_ns[trajectory]), writer, int(self.number[trajectory])]

    def num_before(self, end_time_ns: int, writer: str, number: int) -> int:
        """Count the trajectories that come before one of this name, whether or not it is here."""
        first = int(np.searchsorted(self.end_time_ns, end_time_ns))
        ties = slice(first, int(np.searchsorted(self.end_time_ns, end_time_ns, side="right")))
        place = bisect_left(self.writers, writer)
        is_before = self.writer[ties] < place
        if place < len(self.writers) and self.writers[place] == writer:
            is_before |= (self.writer[ties] == place) & (self.number[ties] < number)
        return first + int(np.count_nonzero(is_before))

    def keys(self, trajectories: Int64s) -> list[tuple[str, int]]:
        """Name trajectories so that another snapshot of the same folders can find them."""
        writers, numbers = self.writer[trajectories].tolist(), self.number[trajectories].tolist()
        return [(self.writers[writer], number) for writer, number in zip(writers, numbers, strict=True)]

    def find(self, keys: Sequence[tuple[str, int]]) -> Int64s:
        """Positions of trajectories named by `keys`, int64; -1 for those that are not here."""
        near = np.flatnonzero(np.isin(self.number, np.array([number for _, number in keys], np.int64)))
        at = dict(zip(self.keys(near), near.tolist(), strict=True))
        return np.array([at.get(key, -1) for key in keys], np.int64)

    def locate(self, trajectory: Int64s, frame: Int64s, count: Int64s, target: Int64s) -> Runs:
        """Turn pieces of trajectories into runs of rows, vectorized.

        Args:
            trajectory, frame, count: int64 `[P]`: `count` frames from `frame` on, within the trajectory.
            target: int64 `[P]`, ascending: the first output row of each piece.

        Returns:
            Runs sorted by target; a piece makes one run for each fragment that it touches.
        """
        start = self.first_frame[trajectory] + frame
        stop = start + count
        fragment = self.fragment_frame.searchsorted(start, side="right") - 1
        if (stop > self.fragment_frame[fragment + 1]).any():
            num_runs = self.fragment_frame.searchsorted(stop - 1, side="right") - fragment
            piece = np.repeat(np.arange(len(start)), num_runs)
            step = np.arange(len(piece)) - np.repeat(np.cumsum(num_runs) - num_runs, num_runs)
            fragment, start, stop, target = fragment[piece] + step, start[piece], stop[piece], target[piece]
            low = np.maximum(self.fragment_frame[fragment], start)
            stop = np.minimum(self.fragment_frame[fragment + 1], stop)
            target, start = target + low - start, low
        row = self.fragment_row[fragment] + start - self.fragment_frame[fragment]
        return Runs(target, self.fragment_block[fragment], row, stop - start)


def random_keys(names: Sequence[str], writer: Int64s, number: Int64s, seed: int) -> np.ndarray:
    """uint64, a number for each trajectory: a function of (seed, name of its writer, number within it) alone."""
    sums = np.array([crc32(name.encode()) for name in names], np.uint64)
    key = sums[writer] << np.uint64(32) ^ number.astype(np.uint64)
    return mixed(key ^ mixed(np.full(1, seed % 2**64, np.uint64)))


def mixed(x: np.ndarray) -> np.ndarray:
    """Scramble uint64 numbers, one to one: the finalizer of splitmix64 (Steele et al. 2014)."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    scrambled: np.ndarray = x ^ x >> np.uint64(31)
    return scrambled


def _within(values: Int64s, stop: int) -> bool:
    return bool(((values >= 0) & (values < stop)).all())


def _fragments_of(blocks: Sequence[Block], writers: Sequence[str]) -> SimpleNamespace:
    """The fragments of all blocks as columns `[F]`, with the numbers of their block and writer."""
    sizes = np.array([len(block.fragments) for block in blocks], np.int64)
    number = {name: number for number, name in enumerate(writers)}
    table = np.concatenate([np.zeros(0, FRAGMENT_DTYPE), *(block.fragments for block in blocks)])
    columns = {name: np.ascontiguousarray(table[name]) for name in _COLUMNS}
    writer = np.array([number[block.writer] for block in blocks], np.int64)
    return SimpleNamespace(block=np.repeat(np.arange(len(blocks)), sizes), writer=np.repeat(writer, sizes), **columns)


def _taken(columns: SimpleNamespace, order: Int64s) -> SimpleNamespace:
    return SimpleNamespace(**{name: column[order] for name, column in vars(columns).items()})


def _changes(*columns: Int64s) -> np.ndarray:
    """bool, the row differs from the one before it in one of the columns; True for the first."""
    is_new = np.ones(len(columns[0]), bool)
    is_new[1:] = np.any([column[1:] != column[:-1] for column in columns], axis=0)
    return is_new
