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

from ..format.header import DROPPED, METADATA_NAME, BlockHeader, damaged_fragments, read_header
from ..format.rows import BlockContent, gathered
from ..format.write import write_block
from ..index.folder import INDEX_CACHE_NAME, BlockFolder, save_index_cache
from ..index.index import TrajectoryIndex
from ..index.metadata import load_metadata, publish_metadata
from ..writing.journal import DeadWriter, recover_dead_writers

#: A fragment that a new block is made of: the block that has its rows, the fragment, and the sum of its rewards.
Part = tuple[BlockHeader, np.void, np.ndarray]
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
    lost = set(header.fragments["trajectory"][sorted(damaged)].tolist())
    parts: list[Part] = []
    tombs: dict[int, Part] = {}
    for fragment, reward_sum in zip(header.fragments, header.reward_sums, strict=True):
        if (number := int(fragment["trajectory"])) not in lost:
            parts.append((header, fragment, reward_sum))
        elif (
            number not in tombs
        ):  # a trajectory that lost a part is void as a whole, its parts in other blocks included
            tomb = fragment.copy()
            tomb["flags"], tomb["length"], tomb["final_row"], tomb["policy_version"] = DROPPED, 0, -1, -1
            tombs[number] = header, tomb, np.zeros_like(reward_sum)
    codecs = {name: coding.codec for name, coding in header.codings.items()}
    return rebuilt([*parts, *tombs.values()], header.writer, header.sequence, codecs), len(lost)


def rebuilt(parts: list[Part], writer: str, sequence: int, codecs: dict[str, str]) -> BlockContent:
    """Make a block of fragments of other blocks; their rows stay coded as they are."""
    errors: dict[str, float] = {}
    for header, _, _ in parts:
        errors |= {name: max(errors.get(name, 0.0), one.max_error) for name, one in header.codings.items()}
    tables, fragments = gathered([(header, fragment) for header, fragment, _ in parts])
    sums = np.stack([reward_sum for _, _, reward_sum in parts])
    return BlockContent(parts[0][0].schema, writer, sequence, fragments, sums, tables, errors, codecs)


def check_is_folder(data_dir: str | os.PathLike[str]) -> Path:
    """Give the path of an existing folder, or raise."""
    path = arguments.path("open the data folder", "", data_dir)
    if not path.is_dir():
        raise UsageError("open the data folder", repr(str(path)), "a folder", "a file" if path.exists() else "nothing")
    return path
