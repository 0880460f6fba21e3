"""Check, repair and pack a data folder.

One rule: nothing that is intact is lost. Repairing moves a damaged block to a subfolder and publishes what of it is
intact in its place, without the trajectories that lost a part. Packing copies bytes and never decodes them;
trajectories, their order and values stay the same, and old files are removed when the new ones are there.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from storage.core import arguments
from storage.errors import DataFileError, RolloutDataError, UsageError

from ..format.header import (
    DATA,
    DROPPED,
    ENDS,
    FIRST,
    METADATA_NAME,
    OPEN,
    TENTATIVE,
    BlockHeader,
    damaged_fragments,
    read_header,
)
from ..format.notes import EPISODES, TEXTS
from ..format.rows import BlockContent, gathered
from ..format.write import block_name, write_block
from ..index.folder import INDEX_CACHE_NAME, BlockFolder, save_index_cache
from ..index.index import TrajectoryIndex
from ..index.metadata import load_metadata, publish_metadata
from ..writing.journal import DeadWriter, recover_dead_writers

#: A fragment that a new block is made of: the block that has its rows, the fragment, and the sum of its rewards.
Part = tuple[BlockHeader, np.void, np.ndarray]
#: Kind -> (key, UTF-8) of the notes of a new block.
_Notes = dict[str, list[tuple[int, bytes]]]
#: Where damaged files go, and the new blocks of an unfinished packing in place.
DAMAGED_FOLDER, STAGING_FOLDER = "damaged", ".packing"


@dataclass
class FolderReport:
    """What a check of a folder found.

    Attributes:
        num_blocks, num_trajectories, num_frames: What is intact.
        num_broken: Trajectories of which a block is missing.
        problems: File name -> what is wrong with it.
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
    moved: list[Path] = field(default_factory=list)
    salvaged: dict[str, int] = field(default_factory=dict)
    dead_writers: list[DeadWriter] = field(default_factory=list)


@dataclass(frozen=True)
class PackSummary:
    """What packing did: trajectories, frames, and the number of blocks before and after."""

    num_trajectories: int
    num_frames: int
    num_blocks_before: int
    num_blocks_after: int


def open_folder(data_dir: str | os.PathLike[str], verify: bool = False) -> BlockFolder:
    """Open a data folder, with `verify` checking all checksums.

    Raises:
        UsageError: There is no such folder.
        DataFileError: It holds neither blocks nor the metadata of a dataset.
    """
    folder = BlockFolder(data_dir, verify_on_open=verify)
    folder.refresh()
    if folder.schema is None and not any(name.startswith("rollout_") for name in folder.problems):
        expected = f"blocks (rollout_*.h5), or a {METADATA_NAME} that names fields"
        raise DataFileError("open the data folder", repr(str(folder.data_dir)), expected, "neither")
    return folder


def check_folder(data_dir: str | os.PathLike[str]) -> FolderReport:
    """Check every block of a folder with all its checksums; change nothing. Errors are those of `open_folder`."""
    return _report(open_folder(data_dir, verify=True))


def _report(folder: BlockFolder) -> FolderReport:
    index = TrajectoryIndex(list(folder.blocks.values()))
    return FolderReport(len(folder.blocks), len(index), index.num_frames, index.num_broken, dict(folder.problems))


def repair_folder(data_dir: str | os.PathLike[str]) -> FolderReport:
    """Set damaged files aside, keep what is intact of them, clean up after dead writers, renew the index cache.

    Returns:
        What was found and done; its counts are those after the repair.
    """
    found, folder = check_folder(data_dir), BlockFolder(data_dir, verify_on_open=True)
    path, described = folder.data_dir, load_metadata(folder.data_dir)
    dead = recover_dead_writers(path)
    moved, salvaged = [], {}
    for name in sorted(found.problems):
        content, num_lost = _intact_part(path / name)
        moved.append(_set_aside(path / name))
        if content is not None:
            write_block(path, content)
            salvaged[name] = num_lost
    if METADATA_NAME in found.problems and described is not None and (rebuilt := load_metadata(path)) is not None:
        publish_metadata(path, replace(rebuilt, context=described.context), "repair")
    (path / INDEX_CACHE_NAME).unlink(missing_ok=True)
    save_index_cache(path)
    folder.refresh()
    return replace(_report(folder), problems=found.problems, moved=moved, salvaged=salvaged, dead_writers=dead)


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
        damaged = [number for number, _ in damaged_fragments(header)]
        notes, num_lost_notes = _intact_notes(header)
    except (RolloutDataError, OSError):
        return None, 0
    if not (damaged or num_lost_notes) or path.name != block_name(header.writer, header.sequence):
        return None, 0  # a whole block that does not belong here: other fields, or a second copy
    lost = set(header.fragments["trajectory"][damaged].tolist())
    parts: list[Part] = []
    tombs: dict[int, Part] = {}  # a trajectory that lost a part is void as a whole, its parts in other blocks included
    for fragment, reward_sum in zip(header.fragments, header.reward_sums, strict=True):
        if (number := int(fragment["trajectory"])) not in lost:
            parts.append((header, fragment, reward_sum))
        elif number not in tombs:
            tomb = fragment.copy()
            tomb["flags"], tomb["length"], tomb["final_row"], tomb["policy_version"] = DROPPED, 0, -1, -1
            tombs[number] = header, tomb, np.zeros_like(reward_sum)
    codecs = {name: coding.codec for name, coding in header.codings.items()}
    content = _rebuilt([*parts, *tombs.values()], header.writer, header.sequence, codecs)
    content.notes = {**notes, EPISODES: [note for note in notes[EPISODES] if note[0] not in lost]}
    return content, len(lost)


def _intact_notes(header: BlockHeader) -> tuple[_Notes, int]:
    """Read what is intact of the notes of a block, and count the others."""
    found, num_lost = _Notes({EPISODES: [], TEXTS: []}), 0
    for kind, table in header.notes.items():
        listed = list(table.read(header.read_bytes))
        found[kind] = [(key, data) for key, data in listed if data is not None]
        num_lost += len(listed) - len(found[kind])
    return found, num_lost


def _said(parts: list[Part], number: int) -> list[tuple[int, bytes]]:
    """Read what was said of the episode of these parts, in order, for its new number."""
    headers = {id(header): header for header, _, _ in parts}.values()
    old = int(parts[0][1]["trajectory"])
    return [(number, text.encode()) for header in headers for _, text in header.read_notes(EPISODES, old)]


def _texts(parts: list[Part]) -> list[tuple[int, bytes]]:
    headers = {id(header): header for header, _, _ in parts}.values()
    return list({key: text.encode() for header in headers for key, text in header.read_notes(TEXTS)}.items())


def _rebuilt(parts: list[Part], writer: str, sequence: int, codecs: dict[str, str]) -> BlockContent:
    """Make a block of fragments of other blocks; their rows stay coded as they are."""
    errors: dict[str, float] = {}
    for header, _, _ in parts:
        errors |= {name: max(errors.get(name, 0.0), one.max_error) for name, one in header.codings.items()}
    tables, fragments = gathered([(header, fragment) for header, fragment, _ in parts])
    sums = np.stack([reward_sum for _, _, reward_sum in parts])
    return BlockContent(parts[0][0].schema, writer, sequence, fragments, sums, tables, errors, codecs)


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
        DataFileError: A block is damaged, or there is none; nothing was changed.
    """
    folder = _finished(data_dir)
    source = folder.data_dir
    target = source / STAGING_FOLDER if out_dir is None else arguments.path("pack into", "", out_dir)
    if out_dir is None and target.exists():
        shutil.rmtree(target)  # of a packing that was interrupted; the old blocks are still there
    target.mkdir(parents=True, exist_ok=True)
    if any(target.iterdir()):
        raise UsageError("pack into", repr(str(target)), "a new or empty folder", "files in it")
    try:
        writer = f"packed-{secrets.token_hex(4)}"
        summary = _write_packed(folder, target, writer, block_bytes)
        if out_dir is None:  # a death in between leaves trajectories twice, never none
            for path in sorted(target.glob("rollout_*.h5")):
                path.rename(source / path.name)
            for block in folder.blocks.values():
                block.path.unlink(missing_ok=True)
        elif (metadata := load_metadata(source)) is not None:
            publish_metadata(target, metadata, writer)
        save_index_cache(source if out_dir is None else target)
        return summary
    finally:
        if out_dir is None:
            shutil.rmtree(target, ignore_errors=True)


def _finished(data_dir: str | os.PathLike[str]) -> BlockFolder:
    """Open a folder of intact blocks that no writer records into."""
    recover_dead_writers(Path(data_dir))
    folder = open_folder(data_dir, verify=True)
    where = repr(str(folder.data_dir))
    if alive := sorted(folder.data_dir.glob(".rollout_*.journal")):
        raise UsageError("pack", where, "a folder that no writer records into", f"a writer with {alive[0].name!r}")
    for name, problem in folder.problems.items():
        advice = f"Run 'rollout-data verify --repair {folder.data_dir}' first"
        raise DataFileError("pack", where, "intact blocks", repr(name), advice) from problem
    return folder


def _trajectories(folder: BlockFolder) -> Iterator[list[Part]]:
    """Yield the fragments of each trajectory in order, trajectories in the order of completion."""
    index = TrajectoryIndex(list(folder.blocks.values()))
    parts: dict[tuple[str, int], list[Part]] = {}
    for block in index.blocks:
        header = read_header(block.path)
        for fragment, reward_sum in zip(header.fragments, header.reward_sums, strict=True):
            part = header, fragment.copy(), reward_sum.copy()
            parts.setdefault((block.writer, int(fragment["trajectory"])), []).append(part)
    for writer, number in zip(index.writer.tolist(), index.number.tolist(), strict=True):
        yield sorted(parts[index.writers[writer], number], key=lambda part: (part[1]["start"], part[0].sequence))


def _write_packed(folder: BlockFolder, target: Path, writer: str, block_bytes: int) -> PackSummary:
    num_trajectories = num_frames = num_in_block = 0
    codecs: dict[str, str] = {}  # what "auto" chose
    blocks: list[list[Part]] = [[]]
    said: list[list[tuple[int, bytes]]] = [[]]
    for parts in _trajectories(folder):
        length = sum(int(fragment["length"]) for _, fragment, _ in parts)
        if num_in_block and (num_in_block + length) * parts[0][0].layouts[DATA].frame_bytes > block_bytes:
            num_in_block, blocks, said = 0, [*blocks, []], [*said, []]
        said[-1] += _said(parts, num_trajectories)
        for place, (_, fragment, _) in enumerate(parts):
            fragment["trajectory"] = num_trajectories
            fragment["flags"] = (fragment["flags"] & ~np.uint32(TENTATIVE | FIRST)) | (0 if place else FIRST)
        if not fragment["flags"] & ENDS:  # its writer died: nothing will follow
            fragment["flags"] |= OPEN
        num_trajectories, num_frames = num_trajectories + 1, num_frames + length
        num_in_block += length
        blocks[-1] += parts
    blocks = [block for block in blocks if block]
    for sequence, block in enumerate(blocks):
        content = _rebuilt(block, writer, sequence, codecs)
        content.notes = {EPISODES: said[sequence], TEXTS: _texts(block)}
        content.fragments, content.reward_sums = _joined(content.fragments, content.reward_sums)
        assert not (content.fragments["flags"] & DROPPED).any()
        write_block(target, content)
    return PackSummary(num_trajectories, num_frames, len(folder.blocks), len(blocks))


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
