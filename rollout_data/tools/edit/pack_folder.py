"""Check, repair and pack a data folder.

Repairing moves a damaged block to a subfolder and writes its intact trajectories in its place.
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
from ..doctor.file_facts import Files
from ..doctor.scan import Scan
from .copied_blocks import PackSummary, intact_part, write_packed
from .edits import Edits, write_part
from .merge_split import new_folder

#: Folder of damaged files.
DAMAGED_FOLDER = "damaged"
#: Folder of the new blocks of an unfinished packing in place.
STAGING_FOLDER = ".packing"


@dataclass
class FolderReport:
    """The result of a check of a folder.

    Attributes:
        num_blocks: Intact blocks.
        num_trajectories: Intact trajectories.
        num_frames: Intact frames.
        num_broken: Trajectories of which a block is missing.
        problems: File name -> its problem.
        lost: File name -> known trajectories with frames in it, of blocks that cannot be read.
        moved: Damaged files in their new place.
        salvaged: File name -> number of damaged trajectories that were dropped. The other
            trajectories are kept, without damaged notes.
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
    """A folder that shows a progress bar while its blocks are opened."""

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
    """Open a data folder.

    Args:
        data_dir: The folder.
        verify: Compare all checksums.
        progress: Show a progress bar.

    Raises:
        UsageError: The folder does not exist, or is no recording itself but contains recordings.
        DataFileError: The folder has neither blocks nor the metadata of a dataset.
    """
    folder_type = _FolderWithProgress if progress else BlockFolder
    folder = folder_type.at(data_dir, verify)
    has_block_files = any(name.startswith("rollout_") for name in folder.problems)
    if folder.schema is None and not has_block_files:
        check_single(folder.data_dir)
        raise DataFileError(
            f"{str(folder.data_dir)!r} has neither blocks (rollout_*.h5) nor a {METADATA_NAME} "
            "with fields."
        )
    return folder


def check_folder(data_dir: str | os.PathLike[str], progress: bool = False) -> FolderReport:
    """Check every block of a folder with all its checksums. Nothing is changed.

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
    """Return name -> known trajectories of blocks that cannot be read."""
    files = Files(Scan(folder.data_dir, *opened(folder.data_dir)))
    trajectories = {name: files.trajectories_of_bad_block(name) for name in files.bad}
    return {name: names for name, names in trajectories.items() if names}


def repair_folder(data_dir: str | os.PathLike[str], progress: bool = False) -> FolderReport:
    """Move damaged files to a subfolder, and keep their intact trajectories.

    Files of dead writers are removed, and the index cache is written again.

    Returns:
        Problems before, counts after the repair.
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
            # Without this empty part the edits of other writers would be ignored.
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
    """Move a file to the folder of damaged files, under a free name, and return its new path."""
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
    """Rewrite the trajectories of a folder contiguously, in the order of their completion.

    Args:
        data_dir: A folder without a running writer. Every block must be intact.
        out_dir: A new or empty folder for the result; None replaces the blocks in place.
        block_bytes: Maximum bytes of a block. A block with one large trajectory may be larger.
        progress: Show progress bars.

    Raises:
        UsageError: A writer is running in `data_dir`, or `out_dir` is not empty or lies in
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
    """Replace the blocks of a folder by packed blocks.

    If the process is killed, trajectories may exist twice, but no trajectory is lost. Dropped
    trajectories stay dropped.
    """
    source = folder.data_dir
    staging = source / STAGING_FOLDER
    # An interrupted packing may have left this folder. The old blocks still exist in that case.
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir()
    try:
        summary = write_packed(folder, staging, writer, block_bytes, progress=progress)
        new_paths = []
        for path in sorted(staging.glob("rollout_*.h5")):
            new_paths.append(path.rename(source / path.name))
        old_blocks = sorted(folder.blocks.values(), key=lambda block: block.is_edit)
        note_replaced(source, [block.path for block in old_blocks], new_paths)
        for block in (*old_blocks, *folder.replaced.values()):  # Blocks of edits are deleted last.
            block.path.unlink(missing_ok=True)
        save_index_cache(source)
        return summary
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _open_finished(data_dir: str | os.PathLike[str], progress: bool) -> BlockFolder:
    """Open a folder of intact blocks without a running writer.

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
