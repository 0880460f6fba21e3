"""Check, repair and pack a folder of block files.

Repairing moves a damaged block to a subfolder and writes its intact trajectories to a new block.
Packing copies bytes and never decodes them. Trajectories, their order and values stay the same.
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
from ...sources.recordings.recordings_in_folder import check_single
from ...writing.conversion_record import note_replaced
from ...writing.writer_journal import DeadWriter, recover_dead_writers
from ..doctor.examination import opened
from ..doctor.file_facts import ExaminedFiles
from ..doctor.scan import Scan
from .copied_blocks import PackSummary, intact_part, write_packed
from .edits import Edits, write_part
from .merge_split import new_folder

#: Subfolder to which `repair_folder` moves damaged files.
DAMAGED_FOLDER = "damaged"
#: Temporary subfolder for the new blocks while a folder is packed in place.
STAGING_FOLDER = ".packing"


@dataclass
class FolderReport:
    """Result of checking or repairing a folder.

    Attributes:
        num_blocks: Number of intact blocks.
        num_trajectories: Number of intact trajectories.
        num_frames: Number of intact frames.
        num_broken: Number of trajectories with a missing block.
        problems: Error of each damaged file, by file name.
        lost: Names of the trajectories in each unreadable block, as far as known, by file name.
        moved: New paths of the damaged files that a repair has moved.
        salvaged: Number of trajectories that a repair has dropped from each partly damaged block,
            by file name. The other trajectories of the block are kept.
        dead_writers: Writers whose process ended before `close`. Their files were removed.
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


class _FolderWithProgress(BlockFolder):
    """Folder that shows a progress bar while its blocks are opened."""

    @cached_property
    def _bar(self) -> Any:
        num_blocks = len(block_entries(self.data_dir))
        return tqdm(total=num_blocks, desc="check", unit=" blocks", leave=False)

    def _open_block(self, path: Path, stamp: FileStamp) -> BlockHeader:
        self._bar.update()
        return super()._open_block(path, stamp)


def open_folder(
    data_dir: str | os.PathLike[str],
    verify: bool = False,
    progress: bool = False,
) -> BlockFolder:
    """Open a folder of block files, and check that it has data.

    Args:
        data_dir: The folder.
        verify: Check all checksums, which reads all files.
        progress: Show a progress bar.

    Raises:
        UsageError: The folder does not exist, or contains several recordings.
        DataFileError: The folder has neither blocks nor the metadata of a dataset.
    """
    folder_type = _FolderWithProgress if progress else BlockFolder
    folder = folder_type.at(data_dir, verify)
    has_block_files = any(name.startswith("rollout_") for name in folder.problems)
    if folder.schema is None and not has_block_files:
        check_single(folder.data_dir)
        raise DataFileError(
            f"{str(folder.data_dir)!r} has neither blocks (rollout_*.h5) nor a {METADATA_NAME} "
            "with fields. Pass a folder of block files."
        )
    return folder


def check_folder(data_dir: str | os.PathLike[str], progress: bool = False) -> FolderReport:
    """Check all checksums of every block in a folder, without changing anything.

    Raises:
        UsageError, DataFileError: See `open_folder`.
    """
    return _report(open_folder(data_dir, verify=True, progress=progress))


def _report(folder: BlockFolder) -> FolderReport:
    index = folder.index
    return FolderReport(
        len(folder.blocks),
        len(index),
        index.num_frames,
        index.num_broken,
        dict(folder.problems),
        lost=_trajectories_of_bad_blocks(folder) if folder.problems else {},
    )


def _trajectories_of_bad_blocks(folder: BlockFolder) -> dict[str, list[str]]:
    """Return the names of the trajectories in each unreadable block, by file name.

    Blocks without known trajectories are left out.
    """
    files = ExaminedFiles(Scan(folder.data_dir, *opened(folder.data_dir)))
    trajectories = {name: files.trajectories_of_bad_block(name) for name in files.bad}
    return {name: names for name, names in trajectories.items() if names}


def repair_folder(data_dir: str | os.PathLike[str], progress: bool = False) -> FolderReport:
    """Move damaged files to the subfolder "damaged", and keep their intact trajectories.

    Files of dead writers are removed, and the index cache is rewritten.

    Returns:
        Report with the problems before the repair and the counts after it.
    """
    folder = open_folder(data_dir, verify=True, progress=progress)
    path = folder.data_dir
    problems = dict(folder.problems)
    metadata_before = load_metadata(path)
    dead_writers = recover_dead_writers(path)
    moved: list[Path] = []
    salvaged: dict[str, int] = {}
    for name in tqdm(sorted(problems), desc="repair", unit=" files", disable=not progress):
        content, num_dropped = intact_part(path / name)
        moved.append(_move_damaged(path / name))
        edit = named_edit(name)
        if content is not None:
            write_block(path, content)
            salvaged[name] = num_dropped
        elif edit is not None and folder.schema is not None:
            # Readers ignore all edits if an edit block is missing. So replace it by an empty one.
            write_part(path, folder.schema, *edit, Edits())
    metadata = load_metadata(path)
    if METADATA_NAME in problems and metadata_before is not None and metadata is not None:
        metadata = replace(metadata, context=metadata_before.context)
        publish_metadata(path, metadata, "repair")
    (path / INDEX_CACHE_NAME).unlink(missing_ok=True)
    save_index_cache(path)
    folder.refresh()
    return replace(
        _report(folder),
        problems=problems,
        moved=moved,
        salvaged=salvaged,
        dead_writers=dead_writers,
    )


def _move_damaged(path: Path) -> Path:
    """Move a file to the subfolder "damaged" under a free name. Returns the new path."""
    folder = path.parent / DAMAGED_FOLDER
    folder.mkdir(exist_ok=True)
    target = folder / path.name
    number = 1
    while target.exists():
        target = folder / f"{path.name}.{number}"
        number += 1
    return path.rename(target)


def pack_dataset(
    data_dir: str | os.PathLike[str],
    out_dir: str | os.PathLike[str] | None = None,
    block_bytes: int = 1 << 30,
    progress: bool = False,
) -> PackSummary:
    """Rewrite the blocks of a folder so that the frames of each trajectory are contiguous.

    Trajectories are written in the order in which they ended.

    Args:
        data_dir: A folder without a running writer. Every block must be intact.
        out_dir: A new or empty folder for the result; None replaces the blocks in place.
        block_bytes: Maximum bytes of a block. A block with one large trajectory may be larger.
        progress: Show progress bars.

    Raises:
        UsageError: A writer is running in `data_dir`, or `out_dir` is not empty or is in
            `data_dir`.
        DataFileError: A block is damaged, or the folder has no blocks. Nothing was changed.
    """
    arguments.whole("block_bytes", block_bytes, 1)
    folder = _open_finished(data_dir, progress)
    writer = f"packed-{secrets.token_hex(4)}"
    if out_dir is None:
        return _pack_in_place(folder, writer, block_bytes, progress)
    source = folder.data_dir
    with new_folder("out_dir", out_dir, source) as target:
        summary = write_packed(folder, target, writer, block_bytes, progress=progress)
        metadata = load_metadata(source)
        if metadata is not None:
            publish_metadata(target, metadata, writer)
        save_index_cache(target)
    return summary


def _pack_in_place(
    folder: BlockFolder,
    writer: str,
    block_bytes: int,
    progress: bool,
) -> PackSummary:
    """Replace the blocks of a folder with packed blocks.

    A crash may leave trajectories in both old and new blocks, but never removes one. Dropped
    trajectories stay dropped.
    """
    source = folder.data_dir
    staging = source / STAGING_FOLDER
    # An earlier call may have left this folder in a crash. All old blocks exist until their packed
    # blocks are moved out of it, so it can be deleted.
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir()
    try:
        summary = write_packed(folder, staging, writer, block_bytes, progress=progress)
        new_paths = []
        for path in sorted(staging.glob("rollout_*.h5")):
            new_paths.append(path.rename(source / path.name))
        old_blocks = sorted(folder.blocks.values(), key=lambda block: block.is_edit)
        note_replaced(source, [block.path for block in old_blocks], new_paths)
        # Edit blocks are last in `old_blocks`. If they were deleted first, the dropped trajectories
        # in old data blocks would reappear.
        for block in (*old_blocks, *folder.replaced.values()):
            block.path.unlink(missing_ok=True)
        save_index_cache(source)
        return summary
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _open_finished(data_dir: str | os.PathLike[str], progress: bool) -> BlockFolder:
    """Open a folder for packing, after checking that it is intact and has no running writer.

    Raises:
        UsageError: A writer is running.
        DataFileError: A block is damaged.
    """
    recover_dead_writers(Path(data_dir))
    folder = open_folder(data_dir, verify=True, progress=progress)
    where = repr(str(folder.data_dir))
    journals = sorted(folder.data_dir.glob(".rollout_*.journal"))
    if journals:
        raise UsageError(
            f"a writer records into {where}, as {journals[0].name!r} shows. Close the writer first."
        )
    for name, problem in folder.problems.items():
        raise DataFileError(
            f"{name!r} in {where} is damaged. "
            f"Run 'rollout-data verify --repair {folder.data_dir}' first."
        ) from problem
    return folder
