"""How the chunks of one folder hang together: which are kept, and which trajectories they make.

One rule: pure decisions on chunks that were scanned already. A folder is one trajectory by the
layout's intention; where it holds more, or less than all of it, that is repaired and reported.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from storage.errors import CorruptFileError, DataFileError

from ..format.header import FIRST, FRAGMENT_DTYPE, OPEN, TERMINATED, TRUNCATED
from .trajectory_chunk import Chunk, chunk_problem


class Pieces(NamedTuple):
    """The fragments of one folder.

    Attributes:
        fragments: `FRAGMENT_DTYPE`; `trajectory` counts from 0 within the folder, times are 0.
        chunk: int64, position of each fragment's chunk among the kept ones; ascending.
    """

    fragments: np.ndarray
    chunk: np.ndarray


def join_chunks(folder: Path, chunks: Sequence[Chunk]) -> tuple[list[Chunk], list[DataFileError]]:
    """Choose the chunks that make one run of frames from 0 on; report all others.

    Of chunks with equal START the newest is kept (a resumed collector writes the same frames
    again). The length of the arrays rules over END in the name.
    """
    problems: list[DataFileError] = []
    newest: dict[int, Chunk] = {}
    for chunk in sorted(chunks, key=lambda chunk: (chunk.file.mtime_ns, chunk.file.stop, chunk.file.path)):
        start = chunk.file.start
        if chunk.num_frames == 0:
            problems.append(chunk_problem(chunk.file.path, "at least one frame", "none", "Left out"))
            continue
        if start in newest:
            got = f"also the newer {chunk.file.path.name!r}"
            advice = "The older one is left out"
            problems.append(chunk_problem(newest[start].file.path, f"one chunk from frame {start} on", got, advice))
        newest[start] = chunk
    kept: list[Chunk] = []
    position = 0
    while position in newest:
        kept.append(newest.pop(position))
        position += kept[-1].num_frames
        problems += _check_name(kept[-1])
    if newest:
        problems.append(_gap(folder, position, [newest[start].file.path.name for start in sorted(newest)]))
    return kept, problems


def _check_name(chunk: Chunk) -> list[DataFileError]:
    named = chunk.file.stop - chunk.file.start
    if named == chunk.num_frames:
        return []
    advice = "Read at the length of its arrays"
    return [chunk_problem(chunk.file.path, f"{named} frames, as its name says", f"{chunk.num_frames}", advice)]


def _gap(folder: Path, position: int, names: list[str]) -> DataFileError:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    advice = f"Read the first {position} frames and left out the rest" if position else "Skipped the folder"
    expected = f"a chunk from frame {position} on"
    return CorruptFileError("read the trajectory", repr(str(folder)), expected, f"only {names[0]!r}{more}", advice)


def cut_trajectories(folder: Path, chunks: Sequence[Chunk]) -> tuple[Pieces, list[DataFileError]]:
    """Cut the joined chunks of a folder at every recorded end.

    A last trajectory without an end is open: the recording stopped before it ended.
    """
    lengths = np.array([chunk.num_frames for chunk in chunks], np.int64)
    total = int(lengths.sum())
    chunk_starts = np.cumsum(lengths) - lengths
    ends = np.concatenate([chunk.ends + start for chunk, start in zip(chunks, chunk_starts, strict=True)])
    kinds = np.where(np.concatenate([chunk.is_timeout for chunk in chunks]), TRUNCATED, TERMINATED)
    stops = ends + 1
    if not len(stops) or stops[-1] < total:
        stops, kinds = np.append(stops, total), np.append(kinds, OPEN)
    firsts = np.append(0, stops[:-1])
    pieces = _fragments(chunk_starts, firsts, stops, kinds)
    if len(firsts) == 1:
        return pieces, []
    inside = int((stops < total).sum())
    got = f"{inside} inside" + (f", the first at frame {int(ends[0])}" if inside else "")
    advice = f"Split into {len(firsts)} trajectories"
    return pieces, [DataFileError("read as one trajectory", repr(str(folder)), "an end at the last frame", got, advice)]


def _fragments(chunk_starts: np.ndarray, firsts: np.ndarray, stops: np.ndarray, kinds: np.ndarray) -> Pieces:
    """Make a fragment of every run of frames that lies in one chunk and one trajectory."""
    starts = np.union1d(chunk_starts, firsts)
    fragments = np.zeros(len(starts), FRAGMENT_DTYPE)
    chunk = np.searchsorted(chunk_starts, starts, side="right") - 1
    trajectory = np.searchsorted(firsts, starts, side="right") - 1
    fragments["trajectory"] = trajectory
    fragments["start"] = starts - firsts[trajectory]
    fragments["length"] = np.diff(np.append(starts, stops[-1]))
    fragments["row"] = starts - chunk_starts[chunk]
    fragments["final_row"] = fragments["policy_version"] = -1
    is_last = starts + fragments["length"] == stops[trajectory]
    fragments["flags"] = np.where(fragments["start"] == 0, FIRST, 0) | np.where(is_last, kinds[trajectory], 0)
    return Pieces(fragments, chunk)
