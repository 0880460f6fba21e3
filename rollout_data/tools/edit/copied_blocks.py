"""Build new blocks from fragments of other blocks, by copying encoded rows without decoding.

A fragment has the rows of a trajectory in one block. In this module, a part of a trajectory is a
`CopiedFragment`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from storage.errors import RolloutDataError

from ...blocks.annotation_table import EPISODES, TEXTS
from ...blocks.block_content import BlockContent, gathered
from ...blocks.block_folder import BlockFolder
from ...blocks.block_header import (
    DATA,
    DROPPED,
    ENDS,
    FIRST,
    OPEN,
    TENTATIVE,
    BlockHeader,
    damaged_fragments,
    read_header,
)
from ...blocks.write_block import block_name, write_block


@dataclass(frozen=True)
class PackSummary:
    """Result of packing a folder into fewer blocks.

    Attributes:
        num_trajectories: Number of trajectories in the new blocks.
        num_frames: Number of frames in the new blocks.
        num_blocks_before: Number of blocks before packing.
        num_blocks_after: Number of blocks after packing.
    """

    num_trajectories: int
    num_frames: int
    num_blocks_before: int
    num_blocks_after: int


class CopiedFragment(NamedTuple):
    """Fragment of an existing block that is copied to a new block.

    Attributes:
        header: Header of the existing block, which contains the rows of the fragment.
        fragment: Entry for the table of fragments in the new block, `FRAGMENT_DTYPE`.
        reward_sum: Sum of the rewards of the fragment.
    """

    header: BlockHeader
    fragment: np.void
    reward_sum: np.ndarray


#: Annotations of a block, as pairs (key, UTF-8 bytes). They are grouped by kind: `EPISODES` has the
#: metadata of trajectories, and `TEXTS` has the texts in rows.
Notes = dict[str, list[tuple[int, bytes]]]


def parts_of(header: BlockHeader) -> list[CopiedFragment]:
    """Return all fragments of the block with this header."""
    rows = zip(header.fragments, header.reward_sums, strict=True)
    return [CopiedFragment(header, fragment, reward_sum) for fragment, reward_sum in rows]


def intact_part(path: Path) -> tuple[BlockContent | None, int]:
    """Build a block with the intact trajectories and annotations of a damaged block.

    Returns:
        The content of the new block, and the number of damaged trajectories. The content is None
        if no new block is needed. Either the header is unreadable, so that nothing can be kept, or
        the block is intact, and was reported because it has other fields or is a second copy.
    """
    try:
        header = read_header(path)
        damaged = [number for number, _ in damaged_fragments(header)]
        notes, num_damaged_notes = _intact_notes(header)
    except (RolloutDataError, OSError):
        return None, 0
    is_whole = not damaged and not num_damaged_notes
    if is_whole or path.name != block_name(header.writer, header.sequence):
        return None, 0

    damaged_trajectories = set(header.fragments["trajectory"][damaged].tolist())
    parts: list[CopiedFragment] = []
    # The new block also drops each damaged trajectory, so that readers ignore its parts in other
    # blocks.
    tombstones: dict[int, CopiedFragment] = {}
    for part in parts_of(header):
        number = int(part.fragment["trajectory"])
        if number not in damaged_trajectories:
            parts.append(part)
        elif number not in tombstones:
            tombstones[number] = _tombstone(part)
    codecs = {name: coding.codec for name, coding in header.codings.items()}
    all_parts = [*parts, *tombstones.values()]
    content = rebuilt(all_parts, header.writer, header.sequence, codecs)
    notes[EPISODES] = [note for note in notes[EPISODES] if note[0] not in damaged_trajectories]
    content.notes = notes
    return content, len(damaged_trajectories)


def _tombstone(part: CopiedFragment) -> CopiedFragment:
    """Build a fragment without rows whose flag `DROPPED` makes readers skip a trajectory."""
    fragment = part.fragment.copy()
    fragment["flags"] = DROPPED
    fragment["length"] = 0
    fragment["final_row"] = -1
    fragment["policy_version"] = -1
    return CopiedFragment(part.header, fragment, np.zeros_like(part.reward_sum))


def _intact_notes(header: BlockHeader) -> tuple[Notes, int]:
    """Return the intact annotations of a block, and the number of damaged annotations."""
    notes: Notes = {EPISODES: [], TEXTS: []}
    num_damaged = 0
    for kind, table in header.notes.items():
        stored = list(table.read(header.read_bytes))
        notes[kind] = [(key, data) for key, data in stored if data is not None]
        num_damaged += len(stored) - len(notes[kind])
    return notes, num_damaged


def rebuilt(
    parts: Sequence[CopiedFragment],
    writer: str,
    sequence: int,
    codecs: dict[str, str],
) -> BlockContent:
    """Build the content of a block from the fragments `parts`, whose rows are copied.

    Args:
        parts: Fragments in the order of the new block, all with the same fields.
        writer: Name of the writer of the new block.
        sequence: Sequence number of the new block.
        codecs: Codec of each encoded field. Codecs of the first block that is written are added.
    """
    errors: dict[str, float] = {}
    for part in parts:
        for name, coding in part.header.codings.items():
            errors[name] = max(errors.get(name, 0.0), coding.max_error)
    tables, fragments = gathered([(part.header, part.fragment) for part in parts])
    reward_sums = np.stack([part.reward_sum for part in parts])
    schema = parts[0].header.schema
    return BlockContent(
        schema,
        writer,
        sequence,
        fragments,
        reward_sums,
        tables,
        errors,
        codecs,
    )


def _headers_of(parts: Sequence[CopiedFragment]) -> list[BlockHeader]:
    """Return the headers of the blocks that contain `parts`, without duplicates."""
    return list({id(part.header): part.header for part in parts}.values())


def _episode_notes(
    parts: Sequence[CopiedFragment],
    number: int,
    edits: Mapping[str, BlockHeader],
) -> list[tuple[int, bytes]]:
    """Return the annotations of a trajectory, oldest first, as pairs (`number`, UTF-8 bytes).

    Args:
        parts: All fragments of the trajectory.
        number: Number of the trajectory in the new blocks.
        edits: Header of the edit block of each writer, by writer name.
    """
    headers = _headers_of(parts)
    edit = edits.get(parts[0].header.writer)
    if edit is not None:
        headers.append(edit)
    old_number = int(parts[0].fragment["trajectory"])
    notes = []
    for header in headers:
        notes += [(number, text.encode()) for _, text in header.read_notes(EPISODES, old_number)]
    return notes


def _texts(parts: Sequence[CopiedFragment]) -> list[tuple[int, bytes]]:
    """Return the table of texts for a block with `parts`, as pairs (key, UTF-8 bytes).

    A row of a text field stores only the key of its text.
    """
    texts: dict[int, bytes] = {}
    for header in _headers_of(parts):
        for key, text in header.read_notes(TEXTS):
            texts[key] = text.encode()
    return list(texts.items())


def _trajectories(folder: BlockFolder) -> Iterator[list[CopiedFragment]]:
    """Yield the fragments of each trajectory, in the order in which trajectories ended."""
    index = folder.index
    parts: dict[tuple[str, int], list[CopiedFragment]] = {}
    for block in index.blocks:
        header = read_header(block.path)
        for part in parts_of(header):
            key = block.writer, int(part.fragment["trajectory"])
            copied = CopiedFragment(header, part.fragment.copy(), part.reward_sum.copy())
            parts.setdefault(key, []).append(copied)
    for writer, number in zip(index.writer.tolist(), index.number.tolist(), strict=True):
        yield sorted(parts[index.writers[writer], number], key=_place_in_trajectory)


def _place_in_trajectory(part: CopiedFragment) -> tuple[int, int]:
    return int(part.fragment["start"]), part.header.sequence


def write_packed(
    folder: BlockFolder,
    target: Path,
    writer: str,
    block_bytes: int,
    origins: Sequence[tuple[int, int]] = (),
    progress: bool = False,
) -> PackSummary:
    """Write the trajectories of a folder as blocks of a new writer, in the order of their ends.

    Args:
        folder: Folder to read, without damaged blocks.
        target: Folder for the new blocks.
        writer: A name that no writer in `target` has.
        block_bytes: Maximum bytes of a block. A block with one large trajectory may be larger.
        origins: Environment number and end time in ns of each trajectory, which replace the
            recorded values. With them, the creation time of a block is its latest end time.
        progress: Show a progress bar.
    """
    edits: dict[str, BlockHeader] = {}
    for block in folder.blocks.values():
        if block.is_edit:
            edits[block.writer] = read_header(block.path)

    num_trajectories = 0
    num_frames = 0
    num_frames_in_block = 0
    contents: list[list[CopiedFragment]] = []
    notes: list[list[tuple[int, bytes]]] = []
    for parts in _trajectories(folder):
        length = sum(int(part.fragment["length"]) for part in parts)
        frame_bytes = parts[0].header.layouts[DATA].frame_bytes
        is_full = num_frames_in_block and (num_frames_in_block + length) * frame_bytes > block_bytes
        if is_full or not contents:
            num_frames_in_block = 0
            contents.append([])
            notes.append([])
        notes[-1] += _episode_notes(parts, num_trajectories, edits)
        _renumber(parts, num_trajectories)
        if origins:
            _replace_origin(parts, *origins[num_trajectories])
        contents[-1] += parts
        num_trajectories += 1
        num_frames += length
        num_frames_in_block += length

    codecs: dict[str, str] = {}  # Filled by the first block, so that all blocks have its codecs.
    bar = tqdm(contents, desc="pack", unit=" blocks", disable=not progress)
    for sequence, parts in enumerate(bar):
        content = rebuilt(parts, writer, sequence, codecs)
        content.notes = {EPISODES: notes[sequence], TEXTS: _texts(parts)}
        content.fragments, content.reward_sums = _joined(content.fragments, content.reward_sums)
        assert not (content.fragments["flags"] & DROPPED).any()
        content.created_ns = int(content.fragments["end_time_ns"].max()) if origins else None
        write_block(target, content)
    return PackSummary(num_trajectories, num_frames, len(folder.blocks), len(contents))


def _renumber(parts: Sequence[CopiedFragment], number: int) -> None:
    """Set the number and the flags of all fragments of a trajectory, in place."""
    for part in parts:
        part.fragment["trajectory"] = number
        part.fragment["flags"] &= ~np.uint32(TENTATIVE | FIRST)
    parts[0].fragment["flags"] |= FIRST
    last = parts[-1].fragment
    if not last["flags"] & ENDS:  # The writer of the trajectory died before it ended.
        last["flags"] |= OPEN


def _replace_origin(parts: Sequence[CopiedFragment], env: int, end_time_ns: int) -> None:
    for part in parts:
        part.fragment["env"] = env
        part.fragment["end_time_ns"] = end_time_ns


def _joined(fragments: np.ndarray, reward_sums: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Join successive fragments of the same trajectory and policy version to one fragment.

    Returns:
        The joined fragments, and their reward sums.
    """
    joined: list[np.void] = []
    sums: list[np.ndarray] = []
    for fragment, reward_sum in zip(fragments, reward_sums, strict=True):
        if not joined or not _continues(joined[-1], fragment):
            joined.append(fragment)
            sums.append(reward_sum)
            continue
        last = joined[-1]
        last["length"] += fragment["length"]
        last["flags"] |= fragment["flags"]
        last["end_time_ns"] = max(last["end_time_ns"], fragment["end_time_ns"])
        last["final_row"] = max(last["final_row"], fragment["final_row"])
        sums[-1] += reward_sum
    return np.array(joined, fragments.dtype), np.stack(sums)


def _continues(last: np.void, fragment: np.void) -> bool:
    """Return whether `fragment` continues `last` with the same policy version, or is empty."""
    is_same_policy = fragment["policy_version"] == last["policy_version"]
    is_empty = fragment["length"] == 0
    return bool(is_same_policy or is_empty) and not fragment["flags"] & FIRST
