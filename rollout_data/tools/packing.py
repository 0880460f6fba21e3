"""Packing: rewrite a finished dataset into a few large blocks, each trajectory's rows side by side.

One rule: bytes are copied, never decoded; trajectories, their order and their values stay the
same. Only complete new files are published, and old ones are removed last.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from storage.core import arguments
from storage.errors import DataFileError, UsageError

from ..format.header import DATA, DROPPED, ENDS, FIRST, OPEN, TENTATIVE, BlockHeader, open_block
from ..format.write import write_block
from ..index.folder import BlockFolder, save_index_cache
from ..index.index import TrajectoryIndex
from ..index.metadata import load_metadata, publish_metadata
from ..writing.journal import recover_dead_writers
from .repair import Part, check_folder, check_is_folder, rebuilt

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
        expected, got = "a folder that no writer records into", f"a writer with {alive[0].name!r}"
        raise UsageError("pack", repr(str(folder)), expected, got)
    report = check_folder(folder)
    if report.problems:
        name, problem = next(iter(report.problems.items()))
        advice = f"Run 'rollout-data verify --repair {folder}' first"
        raise DataFileError("pack", repr(str(folder)), "intact blocks", f"{name!r}", advice) from problem
    return [open_block(path) for path in sorted(folder.glob("rollout_*.h5"))]


def _trajectories(headers: list[BlockHeader]) -> Iterator[list[Part]]:
    """Yield the fragments of each trajectory in order, trajectories in the order of completion."""
    parts: dict[tuple[str, int], list[Part]] = {}
    for header in headers:
        for fragment, reward_sum in zip(header.fragments, header.reward_sums, strict=True):
            part = header, fragment.copy(), reward_sum.copy()
            parts.setdefault((header.writer, int(fragment["trajectory"])), []).append(part)
    folder = BlockFolder(headers[0].path.parent)
    folder.refresh()
    index = TrajectoryIndex(list(folder.blocks.values()))
    for writer, number in zip(index.writer.tolist(), index.number.tolist(), strict=True):
        name = index.writers[writer].rpartition(":")[2]
        yield sorted(parts[name, number], key=lambda part: (part[1]["start"], part[0].sequence))


def _write_packed(headers: list[BlockHeader], target: Path, writer: str, block_bytes: int) -> PackSummary:
    num_trajectories = num_frames = num_blocks = num_in_block = 0
    codecs: dict[str, str] = {}  # what "auto" chose
    block: list[Part] = []
    for parts in _trajectories(headers) if headers else ():
        length = sum(int(fragment["length"]) for _, fragment, _ in parts)
        if num_in_block and (num_in_block + length) * parts[0][0].layouts[DATA].frame_bytes > block_bytes:
            _write_block(target, block, writer, num_blocks, codecs)
            num_blocks, num_in_block, block = num_blocks + 1, 0, []
        for place, (_, fragment, _) in enumerate(parts):
            fragment["trajectory"] = num_trajectories
            fragment["flags"] = (fragment["flags"] & ~np.uint32(TENTATIVE | FIRST)) | (0 if place else FIRST)
        if not fragment["flags"] & ENDS:  # its writer died: nothing will follow
            fragment["flags"] |= OPEN
        num_trajectories, num_frames = num_trajectories + 1, num_frames + length
        num_in_block += length
        block += parts
    if block:
        _write_block(target, block, writer, num_blocks, codecs)
        num_blocks += 1
    return PackSummary(num_trajectories, num_frames, len(headers), num_blocks)


def _write_block(folder: Path, parts: list[Part], writer: str, sequence: int, codecs: dict[str, str]) -> None:
    content = rebuilt(parts, writer, sequence, codecs)
    content.fragments, content.reward_sums = _joined(content.fragments, content.reward_sums)
    assert not (content.fragments["flags"] & DROPPED).any()
    write_block(folder, content)


def _joined(fragments: np.ndarray, reward_sums: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Make one of neighbours of a trajectory and of one policy version: fragments and reward sums."""
    kept: list[np.void] = []
    sums: list[np.ndarray] = []
    for fragment, reward_sum in zip(fragments, reward_sums, strict=True):
        is_same = kept and (fragment["policy_version"] == kept[-1]["policy_version"] or fragment["length"] == 0)
        if is_same and not fragment["flags"] & FIRST:
            last = kept[-1]
            last["length"] += fragment["length"]
            last["flags"] |= fragment["flags"]
            for name in ("end_time_ns", "final_row"):
                last[name] = max(last[name], fragment[name])
            sums[-1] += reward_sum
        else:
            kept.append(fragment)
            sums.append(reward_sum)
    return np.array(kept, fragments.dtype), np.stack(sums)


def _replace(folder: Path, staged: Path, old: list[Path]) -> None:
    """Publish the new blocks, then remove the old.

    A death in between leaves trajectories twice, never none.
    """
    for path in sorted(staged.glob("rollout_*.h5")):
        path.rename(folder / path.name)
    for path in old:
        path.unlink(missing_ok=True)
