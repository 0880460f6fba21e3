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

from storage.durable import as_path
from storage.errors import DataFileError, UsageError

from .block_file import BlockContent, open_block, write_block
from .block_folder import BlockFolder, save_index_cache
from .block_header import DATA, DROPPED, ENDS, FINAL, FIRST, OPEN, TENTATIVE, BlockHeader
from .coded_rows import joined, rows_as_stored
from .index import TrajectoryIndex
from .journal import recover_dead_writers
from .metadata import load_metadata, publish_metadata
from .repair import check_folder, check_is_folder
from .row_source import RowSource

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
        data_dir: A folder that nobody records into now. Every block must be intact.
        out_dir: A new or empty folder for the result; None replaces the blocks in place.
        block_bytes: Size of a block at most, except that a trajectory is not cut.

    Raises:
        UsageError: A writer is at work in `data_dir`, or `out_dir` is not empty.
        DataFileError: A block is damaged; nothing was changed.
    """
    source = check_is_folder(data_dir)
    target = source / STAGING_FOLDER if out_dir is None else as_path(out_dir, "pack into")
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
        raise UsageError(
            "pack", repr(str(folder)), "a folder that nobody records into", f"a writer with {alive[0].name!r}"
        )
    report = check_folder(folder)
    if report.problems:
        name, problem = next(iter(report.problems.items()))
        advice = f"Run 'rollout-data verify --repair {folder}' first"
        raise DataFileError("pack", repr(str(folder)), "intact blocks", f"{name!r}", advice) from problem
    return [open_block(path) for path in sorted(folder.glob("rollout_*.h5"))]


class _Source:
    """The fragments of all blocks, by trajectory."""

    def __init__(self, headers: list[BlockHeader]) -> None:
        self.headers = headers
        self._parts: dict[tuple[str, int], list[tuple[int, int]]] = {}
        for place, header in enumerate(headers):
            for number, trajectory in enumerate(header.fragments["trajectory"].tolist()):
                self._parts.setdefault((header.writer, trajectory), []).append((place, number))

    def trajectories(self) -> Iterator[list[tuple[BlockHeader, int]]]:
        """Yield the fragments of each trajectory in order, trajectories in the order of completion."""
        folder = BlockFolder(self.headers[0].path.parent)
        folder.refresh()
        index = TrajectoryIndex(list(folder.blocks.values()))
        for writer, number in zip(index.writer.tolist(), index.number.tolist(), strict=True):
            name = index.writers[writer].rpartition(":")[2]
            parts = [(self.headers[place], one) for place, one in self._parts[(name, number)]]
            yield sorted(parts, key=lambda part: (part[0].fragments[part[1]]["start"], part[0].sequence))


@dataclass
class _Packed:
    """A block in the making."""

    header: BlockHeader
    writer: str
    sequence: int = 0

    def __post_init__(self) -> None:
        self.codecs: dict[str, str] = {}
        self.clear()

    def clear(self) -> None:
        self.fragments: list[np.void] = []
        self.sums: list[np.ndarray] = []
        self.rows: dict[str, dict[str, list[RowSource]]] = {
            table: {column: [] for column in layout.columns} for table, layout in self.header.layouts.items()
        }
        self.max_errors: dict[str, float] = {}
        self.num_rows = self.num_finals = 0

    def add(self, parts: list[tuple[BlockHeader, int]], number: int) -> None:
        """Append a trajectory, fragment by fragment; neighbours of one policy version become one."""
        first = True
        for header, one in parts:
            fragment = header.fragments[one].copy()
            start, stop = int(fragment["row"]), int(fragment["row"] + fragment["length"])
            for name, coding in header.codings.items():
                self.max_errors[name] = max(self.max_errors.get(name, 0.0), coding.max_error)
            for column, rows in self.rows[DATA].items():
                rows.append(rows_as_stored(header, DATA, column, start, stop))
            if (final := int(fragment["final_row"])) >= 0:
                for column, rows in self.rows[FINAL].items():
                    rows.append(rows_as_stored(header, FINAL, column, final, final + 1))
                fragment["final_row"] = self.num_finals
                self.num_finals += 1
            fragment["trajectory"], fragment["row"] = number, self.num_rows
            fragment["flags"] = (fragment["flags"] & ~np.uint32(TENTATIVE | FIRST)) | (FIRST if first else 0)
            self.num_rows += stop - start
            if not first and self._joins(fragment):
                self._join(fragment, header.reward_sums[one])
            else:
                self.fragments.append(fragment)
                self.sums.append(header.reward_sums[one].copy())
            first = False
        if not self.fragments[-1]["flags"] & ENDS:  # its writer died: nothing will follow
            self.fragments[-1]["flags"] |= OPEN

    def _joins(self, fragment: np.void) -> bool:
        return bool(fragment["policy_version"] == self.fragments[-1]["policy_version"] or fragment["length"] == 0)

    def _join(self, fragment: np.void, reward_sum: np.ndarray) -> None:
        last = self.fragments[-1]
        last["length"] += fragment["length"]
        last["flags"] |= fragment["flags"]
        last["end_time_ns"] = max(last["end_time_ns"], fragment["end_time_ns"])
        if fragment["final_row"] >= 0:
            last["final_row"] = fragment["final_row"]
        self.sums[-1] += reward_sum

    def write(self, folder: Path) -> None:
        tables: dict[str, dict[str, RowSource]] = {
            table: {name: joined(self.rows[table][name], column) for name, column in layout.columns.items()}
            for table, layout in self.header.layouts.items()
        }
        fragments = np.array(self.fragments, self.header.fragments.dtype)
        assert not (fragments["flags"] & DROPPED).any()
        sums = np.stack(self.sums)
        content = BlockContent(
            self.header.schema, self.writer, self.sequence, fragments, sums, tables, self.max_errors, self.codecs
        )
        write_block(folder, content)
        self.sequence += 1
        self.clear()


def _write_packed(headers: list[BlockHeader], target: Path, writer: str, block_bytes: int) -> PackSummary:
    if not headers:
        return PackSummary(0, 0, 0, 0)
    packed = _Packed(headers[0], writer)
    frame_bytes = headers[0].layouts[DATA].frame_bytes
    num_trajectories = num_frames = 0
    for parts in _Source(headers).trajectories():
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
