"""Packing: rewrite a finished dataset into a few large blocks, each trajectory's rows side by side.

One rule: bytes are copied, never decoded; trajectories, their order and their values stay the
same. Only complete new files are published, and old ones are removed last.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from storage.core import arguments
from storage.errors import DataFileError, UsageError

from ..format.header import DATA, DROPPED, ENDS, FIRST, OPEN, TENTATIVE, BlockHeader, open_block
from ..format.rows import BlockContent, gathered
from ..format.write import write_block
from ..index.folder import BlockFolder, save_index_cache
from ..index.index import TrajectoryIndex
from ..index.metadata import load_metadata, publish_metadata
from ..writing.journal import recover_dead_writers
from .repair import check_folder, check_is_folder

#: Holds the new blocks of an unfinished packing in place.
STAGING_FOLDER = ".packing"


@dataclass(frozen=True)
class PackSummary:
    """What packing did: trajectories, frames, and the number of blocks before and after."""

    num_trajectories: int
    num_frames: int
    num_blocks_before: int
    num_blocks_after: int


def pack_dataset(
    data_dir: str | os.PathLike[str], out_dir: str | os.PathLike[str] | None = None, block_bytes: int = 1 << 30
) -> PackSummary:
    """Rewrite the trajectories of a folder contiguously, in the order of their completion.

    Args:
        data_dir: A folder without a living writer. Every block must be intact.
        out_dir: A new or empty folder for the result; None replaces the blocks in place.
        block_bytes: Size of a block at most, except that a trajectory is not cut.

    Raises:
        UsageError: A writer is at work in `data_dir`, or `out_dir` is not empty.
        DataFileError: A block is damaged; nothing was changed.
    """
    source = check_is_folder(data_dir)
    target = source / STAGING_FOLDER if out_dir is None else arguments.path("pack into", "", out_dir)
    if out_dir is None and target.exists():
        shutil.rmtree(target)  # of a packing that was interrupted; the old blocks are still there
    target.mkdir(parents=True, exist_ok=True)
    if any(target.iterdir()):
        raise UsageError("pack into", repr(str(target)), "a new or empty folder", "files in it")
    try:
        headers = _open_all(source)
        writer = f"packed-{secrets.token_hex(4)}"
        summary = _write_packed(headers, target, writer, block_bytes)
        if out_dir is None:
            _replace(source, target, [header.path for header in headers])
        elif (metadata := load_metadata(source)) is not None:
            publish_metadata(target, metadata, writer)
        save_index_cache(source if out_dir is None else target)
        return summary
    finally:
        if out_dir is None:
            shutil.rmtree(target, ignore_errors=True)


def _open_all(folder: Path) -> list[BlockHeader]:
    recover_dead_writers(folder)
    if alive := sorted(folder.glob(".rollout_*.journal")):
        expected, got = "a folder that nobody records into", f"a writer with {alive[0].name!r}"
        raise UsageError("pack", repr(str(folder)), expected, got)
    report = check_folder(folder)
    if report.problems:
        name, problem = next(iter(report.problems.items()))
        advice = f"Run 'rollout-data verify --repair {folder}' first"
        raise DataFileError("pack", repr(str(folder)), "intact blocks", f"{name!r}", advice) from problem
    return [open_block(path) for path in sorted(folder.glob("rollout_*.h5"))]


def _trajectories(headers: list[BlockHeader]) -> Iterator[list[tuple[BlockHeader, int]]]:
    """Yield the fragments of each trajectory in order, trajectories in the order of completion."""
    parts: dict[tuple[str, int], list[tuple[BlockHeader, int]]] = {}
    for header in headers:
        for number, trajectory in enumerate(header.fragments["trajectory"].tolist()):
            parts.setdefault((header.writer, trajectory), []).append((header, number))
    folder = BlockFolder(headers[0].path.parent)
    folder.refresh()
    index = TrajectoryIndex(list(folder.blocks.values()))
    for writer, number in zip(index.writer.tolist(), index.number.tolist(), strict=True):
        name = index.writers[writer].rpartition(":")[2]
        yield sorted(parts[name, number], key=lambda part: (part[0].fragments[part[1]]["start"], part[0].sequence))


@dataclass
class _Packed:
    """A block in the making."""

    writer: str
    sequence: int = 0
    num_rows: int = 0
    parts: list[tuple[BlockHeader, np.void]] = field(default_factory=list)
    sums: list[np.ndarray] = field(default_factory=list)
    codecs: dict[str, str] = field(default_factory=dict)

    def add(self, parts: list[tuple[BlockHeader, int]], number: int) -> None:
        """Append a trajectory, fragment by fragment."""
        for place, (header, one) in enumerate(parts):
            fragment = header.fragments[one].copy()
            fragment["trajectory"] = number
            fragment["flags"] = (fragment["flags"] & ~np.uint32(TENTATIVE | FIRST)) | (0 if place else FIRST)
            self.parts.append((header, fragment))
            self.sums.append(header.reward_sums[one].copy())
            self.num_rows += int(fragment["length"])
        if not fragment["flags"] & ENDS:  # its writer died: nothing will follow
            fragment["flags"] |= OPEN

    def _joined(self, fragments: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Make one of neighbours of a trajectory and of one policy version: fragments and reward sums."""
        kept: list[np.void] = []
        sums: list[np.ndarray] = []
        for fragment, reward_sum in zip(fragments, self.sums, strict=True):
            is_same = kept and (fragment["policy_version"] == kept[-1]["policy_version"] or fragment["length"] == 0)
            if is_same and not fragment["flags"] & FIRST:
                last = kept[-1]
                last["length"] += fragment["length"]
                last["flags"] |= fragment["flags"]
                last["end_time_ns"] = max(last["end_time_ns"], fragment["end_time_ns"])
                last["final_row"] = max(last["final_row"], fragment["final_row"])
                sums[-1] += reward_sum
            else:
                kept.append(fragment)
                sums.append(reward_sum)
        return np.array(kept, fragments.dtype), np.stack(sums)

    def write(self, folder: Path) -> None:
        errors: dict[str, float] = {}
        for header, _ in self.parts:
            errors |= {name: max(errors.get(name, 0.0), one.max_error) for name, one in header.codings.items()}
        tables, fragments = gathered(self.parts)
        fragments, sums = self._joined(fragments)
        assert not (fragments["flags"] & DROPPED).any()
        place = self.parts[0][0].schema, self.writer, self.sequence
        write_block(folder, BlockContent(*place, fragments, sums, tables, errors, self.codecs))
        self.sequence, self.num_rows, self.parts, self.sums = self.sequence + 1, 0, [], []


def _write_packed(headers: list[BlockHeader], target: Path, writer: str, block_bytes: int) -> PackSummary:
    if not headers:
        return PackSummary(0, 0, 0, 0)
    packed = _Packed(writer)
    frame_bytes = headers[0].layouts[DATA].frame_bytes
    num_trajectories = num_frames = 0
    for parts in _trajectories(headers):
        length = sum(int(header.fragments[one]["length"]) for header, one in parts)
        if packed.num_rows and (packed.num_rows + length) * frame_bytes > block_bytes:
            packed.write(target)
        packed.add(parts, num_trajectories)
        num_trajectories, num_frames = num_trajectories + 1, num_frames + length
    if packed.num_rows:
        packed.write(target)
    return PackSummary(num_trajectories, num_frames, len(headers), packed.sequence)


def _replace(folder: Path, staged: Path, old: list[Path]) -> None:
    """Publish the new blocks, then remove the old.

    A death in between leaves trajectories twice, never none.
    """
    for path in sorted(staged.glob("rollout_*.h5")):
        path.rename(folder / path.name)
    for path in old:
        path.unlink(missing_ok=True)
