"""The notes of a folder of blocks, for tests."""

from __future__ import annotations

from pathlib import Path

from rollout_data.blocks.annotations import Notes
from rollout_data.blocks.block_folder import BlockFolder
from rollout_data.blocks.block_header import layouts_of
from rollout_data.blocks.trajectory_index import TrajectoryIndex
from rollout_data.sources.rows.row_source import RowSource
from rollout_data.sources.rows.unmapped_rows import BlockFiles
from storage.core.fields import Schema


def notes_of(folder: Path) -> tuple[Notes, RowSource]:
    """Return the notes of the blocks of a folder, and a store of its index."""
    opened = BlockFolder(folder)
    opened.refresh()
    assert not opened.problems
    return Notes(), BlockFiles(
        TrajectoryIndex(list(opened.blocks.values())), layouts_of(opened.schema or Schema([]))
    )
