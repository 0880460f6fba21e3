"""Checking and repairing a data folder.

One rule: nothing is deleted. A damaged block goes to a subfolder under its own name; what of it
is intact is published again in its place, without the trajectories that lost a part.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from storage.core import arguments
from storage.errors import RolloutDataError, UsageError

from ..format.header import DROPPED, METADATA_NAME, damaged_fragments, read_header
from ..format.rows import BlockContent, gathered
from ..format.write import write_block
from ..index.folder import INDEX_CACHE_NAME, BlockFolder, save_index_cache
from ..index.index import TrajectoryIndex
from ..index.metadata import load_metadata, publish_metadata
from ..writing.journal import DeadWriter, recover_dead_writers

#: Where damaged files go.
DAMAGED_FOLDER = "damaged"


@dataclass
class FolderReport:
    """What a check of a folder found.

    Attributes:
        num_blocks, num_trajectories, num_frames: What is intact.
        num_broken: Trajectories of which a block is missing.
        problems: File name -> what is wrong with it.
        moved: Files that were set aside.
        salvaged: File name -> number of trajectories of it that were given up; the others are kept.
        dead_writers: Writers that had died, whose remains were removed.
    """

    num_blocks: int = 0
    num_trajectories: int = 0
    num_frames: int = 0
    num_broken: int = 0
    problems: dict[str, RolloutDataError] = field(default_factory=dict)
    moved: list[Path] = field(default_factory=list)
    salvaged: dict[str, int] = field(default_factory=dict)
    dead_writers: list[DeadWriter] = field(default_factory=list)


def check_folder(data_dir: str | os.PathLike[str]) -> FolderReport:
    """Check every block of a folder with all its checksums; change nothing."""
    folder = BlockFolder(data_dir, verify_on_open=True)
    folder.refresh()
    index = TrajectoryIndex(list(folder.blocks.values()))
    return FolderReport(len(folder.blocks), len(index), index.num_frames, index.num_broken, dict(folder.problems))


def repair_folder(data_dir: str | os.PathLike[str]) -> FolderReport:
    """Set damaged files aside, keep what is intact of them, clean up after dead writers, renew the index cache.

    Returns:
        What was found and done; its counts are those after the repair.
    """
    folder = Path(data_dir)
    found = check_folder(folder)
    dead = recover_dead_writers(folder)
    moved, salvaged = [], {}
    described = load_metadata(folder)
    for name in sorted(found.problems):
        content, num_lost = _intact_part(folder / name)
        moved.append(_set_aside(folder / name))
        if content is not None:
            write_block(folder, content)
            salvaged[name] = num_lost
    if METADATA_NAME in found.problems and described is not None and (rebuilt := load_metadata(folder)) is not None:
        publish_metadata(folder, replace(rebuilt, context=described.context), "repair")
    (folder / INDEX_CACHE_NAME).unlink(missing_ok=True)
    save_index_cache(folder)
    after = check_folder(folder)
    after.problems, after.moved, after.salvaged, after.dead_writers = found.problems, moved, salvaged, dead
    return after


def _set_aside(path: Path) -> Path:
    folder = path.parent / DAMAGED_FOLDER
    folder.mkdir(exist_ok=True)
    target, number = folder / path.name, 1
    while target.exists():
        target, number = folder / f"{path.name}.{number}", number + 1
    return path.rename(target)


def _intact_part(path: Path) -> tuple[BlockContent | None, int]:
    """Read what is intact of a block whose header is: (content or None, number of trajectories given up)."""
    try:
        header = read_header(path)
        damaged = {number for number, _ in damaged_fragments(header)}
    except (RolloutDataError, OSError):
        return None, 0
    if not damaged or path.name != f"rollout_{header.writer}_{header.sequence:06d}.h5":
        return None, 0  # a whole block that does not belong here: other fields, or a second copy
    lost = np.unique(header.fragments["trajectory"][sorted(damaged)])
    is_lost = np.isin(header.fragments["trajectory"], lost)
    fragments, sums = header.fragments[~is_lost], header.reward_sums[~is_lost]
    # A trajectory that lost a part is void as a whole, its parts in other blocks included.
    tombs = np.zeros(len(lost), header.fragments.dtype)
    firsts = header.fragments[[int(np.argmax(header.fragments["trajectory"] == number)) for number in lost]]
    for name in ("trajectory", "env", "start", "end_time_ns"):
        tombs[name] = firsts[name]
    tombs["flags"], tombs["final_row"], tombs["policy_version"] = DROPPED, -1, -1
    rows, fragments = gathered([(header, one) for one in np.concatenate([fragments, tombs])])
    sums = np.concatenate([sums, np.zeros((len(tombs), sums.shape[1]))])
    errors = {name: coding.max_error for name, coding in header.codings.items()}
    codecs = {name: coding.codec for name, coding in header.codings.items()}
    content = BlockContent(header.schema, header.writer, header.sequence, fragments, sums, rows, errors, codecs)
    return content, len(lost)


def check_is_folder(data_dir: str | os.PathLike[str]) -> Path:
    """Give the path of an existing folder, or raise."""
    path = arguments.path("open the data folder", "", data_dir)
    if not path.is_dir():
        raise UsageError("open the data folder", repr(str(path)), "a folder", "a file" if path.exists() else "nothing")
    return path
