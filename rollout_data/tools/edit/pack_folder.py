"""Check, repair and pack a data folder.

One rule: nothing that is intact is lost. Repairing moves a damaged block to a subfolder and publishes what of it is
intact in its place, without the trajectories that lost a part. Packing copies bytes and never decodes them;
trajectories, their order and values stay the same, and old files are removed when the new ones are there.
"""

from __future__ import annotations

import os
import secrets
import shutil
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from tqdm import tqdm

from storage.core import arguments
from storage.errors import DataFileError, RolloutDataError, UsageError

from ...blocks.block_folder import (
    INDEX_CACHE_NAME,
    BlockFolder,
    FileStamp,
    block_entries,
    save_index_cache,
)
from ...blocks.block_header import METADATA_NAME, BlockHeader
from ...blocks.edit_blocks import named_edit
from ...blocks.folder_metadata import load_metadata, publish_metadata
from ...blocks.write_block import write_block
from ...sources.recordings_in_folder import check_single
from ...writing.conversion_record import note_replaced
from ...writing.writer_journal import DeadWriter, recover_dead_writers
from ..doctor.examination import opened
from ..doctor.file_facts import Files
from ..doctor.scan import Scan
from .copied_blocks import PackSummary, intact_part, write_packed
from .edits import Edits, write_part
from .merge_split import new_folder

#: Where damaged files go, and the new blocks of an unfinished packing in place.
DAMAGED_FOLDER, STAGING_FOLDER = "damaged", ".packing"


@dataclass
class FolderReport:
    """What a check of a folder found.

    Attributes:
        num_blocks, num_trajectories, num_frames: What is intact.
        num_broken: Trajectories of which a block is missing.
        problems: File name -> what is wrong with it.
        lost: File name -> the trajectories with frames in it, of blocks that cannot be read, as far as others tell.
        moved: Files that were set aside.
        salvaged: File name -> number of trajectories of it that were given up; the others are kept, without those of
            their notes that are damaged.
        dead_writers: Writers that had died, whose remains were removed.
    """

    num_blocks: int
    num_trajectories: int
    num_frames: int
    num_broken: int
    problems: dict[str, RolloutDataError]
    lost: dict[str, list[str]] = field(default_factory=dict)
    moved: list[Path] = field(default_factory=list)
    salvaged: dict[str, int] = field(default_factory=dict)
    dead_writers: list[DeadWriter] = field(default_factory=list)


class _Watched(BlockFolder):
    """A folder that shows how many of its blocks were checked."""

    @cached_property
    def _bar(self) -> Any:
        return tqdm(total=len(block_entries(self.data_dir)), desc="check", unit=" blocks", leave=False)

    def _open_block(self, path: Path, stamp: FileStamp) -> BlockHeader:
        self._bar.update()
        return super()._open_block(path, stamp)


def open_folder(data_dir: str | os.PathLike[str], verify: bool = False, progress: bool = False) -> BlockFolder:
    """Open a data folder, with `verify` checking all checksums, with `progress` behind a progress bar.

    Raises:
        UsageError: There is no such folder, or it holds recordings and is none itself.
        DataFileError: It holds neither blocks nor the metadata of a dataset.
    """
    folder = (_Watched if progress else BlockFolder).at(data_dir, verify)
    if folder.schema is None and not any(name.startswith("rollout_") for name in folder.problems):
        check_single("open the data folder", folder.data_dir)
        expected = f"blocks (rollout_*.h5), or a {METADATA_NAME} that names fields"
        raise DataFileError("open the data folder", repr(str(folder.data_dir)), expected, "neither")
    return folder


def check_folder(data_dir: str | os.PathLike[str], progress: bool = False) -> FolderReport:
    """Check every block of a folder with all its checksums; change nothing. Errors are those of `open_folder`."""
    return _report(open_folder(data_dir, verify=True, progress=progress))


def _report(folder: BlockFolder) -> FolderReport:
    index = folder.index
    counts = len(folder.blocks), len(index), index.num_frames, index.num_broken
    return FolderReport(*counts, dict(folder.problems), _lost(folder) if folder.problems else {})


def _lost(folder: BlockFolder) -> dict[str, list[str]]:
    files = Files(Scan(folder.data_dir, *opened("verify", folder.data_dir)))
    trajectories = {name: files.trajectories_of_bad_block(name) for name in files.bad}
    return {name: lost for name, lost in trajectories.items() if lost}


def repair_folder(data_dir: str | os.PathLike[str], progress: bool = False) -> FolderReport:
    """Set damaged files aside, keep what is intact of them, clean up after dead writers, renew the index cache.

    Returns:
        What was found and done; its counts are those after the repair.
    """
    folder = open_folder(data_dir, verify=True, progress=progress)
    found = _report(folder)
    path = folder.data_dir
    described = load_metadata(folder.data_dir)
    dead = recover_dead_writers(path)
    moved = []
    salvaged = {}
    for name in tqdm(sorted(found.problems), desc="repair", unit=" files", disable=not progress):
        content, num_lost = intact_part(path / name)
        moved.append(_set_aside(path / name))
        if content is not None:
            write_block(path, content)
            salvaged[name] = num_lost
        elif (part := named_edit(name)) is not None and folder.schema is not None:
            write_part(path, folder.schema, *part, Edits())  # without it the edits of other writers would not hold
    if METADATA_NAME in found.problems and described is not None and (rebuilt := load_metadata(path)) is not None:
        publish_metadata(path, replace(rebuilt, context=described.context), "repair")
    (path / INDEX_CACHE_NAME).unlink(missing_ok=True)
    save_index_cache(path)
    folder.refresh()
    return replace(_report(folder), problems=found.problems, moved=moved, salvaged=salvaged, dead_writers=dead)


def _set_aside(path: Path) -> Path:
    folder = path.parent / DAMAGED_FOLDER
    folder.mkdir(exist_ok=True)
    target = folder / path.name
    number = 1
    while target.exists():
        target = folder / f"{path.name}.{number}"
        number = number + 1
    return path.rename(target)


def pack_dataset(
    data_dir: str | os.PathLike[str],
    out_dir: str | os.PathLike[str] | None = None,
    block_bytes: int = 1 << 30,
    progress: bool = False,
) -> PackSummary:
    """Rewrite the trajectories of a folder contiguously, in the order of their completion.

    Args:
        data_dir: A folder without a living writer. Every block must be intact.
        out_dir: A new or empty folder for the result; None replaces the blocks in place.
        block_bytes: Size of a block at most, except that a trajectory is not cut.
        progress: Show progress bars.

    Raises:
        UsageError: A writer is at work in `data_dir`, or `out_dir` is not empty, or lies in it.
        DataFileError: A block is damaged, or there is none; nothing was changed.
    """
    arguments.whole("pack", "block_bytes", block_bytes, 1)
    folder = _finished(data_dir, progress)
    source = folder.data_dir
    writer = f"packed-{secrets.token_hex(4)}"
    if out_dir is not None:
        with new_folder("pack", "out_dir", out_dir, source) as made:
            summary = write_packed(folder, made, writer, block_bytes, progress=progress)
            if (metadata := load_metadata(source)) is not None:
                publish_metadata(made, metadata, writer)
            save_index_cache(made)
        return summary
    target = source / STAGING_FOLDER
    shutil.rmtree(target, ignore_errors=True)  # of a packing that was interrupted; the old blocks are still there
    target.mkdir()
    try:
        summary = write_packed(folder, target, writer, block_bytes, progress=progress)
        new = [source / path.name for path in sorted(target.glob("rollout_*.h5"))]
        for path in new:  # a death in between leaves trajectories twice, never none,
            (target / path.name).rename(path)
        old = sorted(folder.blocks.values(), key=lambda block: block.is_edit)  # and none that was dropped
        note_replaced(source, [block.path for block in old], new)
        for block in (*old, *folder.replaced.values()):
            block.path.unlink(missing_ok=True)
        save_index_cache(source)
        return summary
    finally:
        shutil.rmtree(target, ignore_errors=True)


def _finished(data_dir: str | os.PathLike[str], progress: bool) -> BlockFolder:
    """Open a folder of intact blocks that no writer records into."""
    recover_dead_writers(Path(data_dir))
    folder = open_folder(data_dir, verify=True, progress=progress)
    where = repr(str(folder.data_dir))
    if alive := sorted(folder.data_dir.glob(".rollout_*.journal")):
        raise UsageError(
            "pack",
            where,
            "a folder that no writer records into",
            f"a writer with {alive[0].name!r}",
        )
    for name, problem in folder.problems.items():
        advice = f"Run 'rollout-data verify --repair {folder.data_dir}' first"
        raise DataFileError("pack", where, "intact blocks", repr(name), advice) from problem
    return folder
