"""Blocks made of fragments of other blocks, whose bytes are copied and never decoded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

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
    """What packing did: trajectories, frames, and the number of blocks before and after."""

    num_trajectories: int
    num_frames: int
    num_blocks_before: int
    num_blocks_after: int


#: A fragment that a new block is made of: the block that has its rows, the fragment, and the sum of its rewards.
Part = tuple[BlockHeader, np.void, np.ndarray]
#: Kind -> (key, UTF-8) of the notes of a new block.
Notes = dict[str, list[tuple[int, bytes]]]


def intact_part(path: Path) -> tuple[BlockContent | None, int]:
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
    content = rebuilt([*parts, *tombs.values()], header.writer, header.sequence, codecs)
    content.notes = {**notes, EPISODES: [note for note in notes[EPISODES] if note[0] not in lost]}
    return content, len(lost)


def _intact_notes(header: BlockHeader) -> tuple[Notes, int]:
    """Read what is intact of the notes of a block, and count the others."""
    found = Notes({EPISODES: [], TEXTS: []})
    num_lost = 0
    for kind, table in header.notes.items():
        listed = list(table.read(header.read_bytes))
        found[kind] = [(key, data) for key, data in listed if data is not None]
        num_lost += len(listed) - len(found[kind])
    return found, num_lost


def rebuilt(parts: list[Part], writer: str, sequence: int, codecs: dict[str, str]) -> BlockContent:
    """Make a block of fragments of other blocks; their rows stay coded as they are."""
    errors: dict[str, float] = {}
    for header, _, _ in parts:
        errors |= {name: max(errors.get(name, 0.0), one.max_error) for name, one in header.codings.items()}
    tables, fragments = gathered([(header, fragment) for header, fragment, _ in parts])
    sums = np.stack([reward_sum for _, _, reward_sum in parts])
    return BlockContent(parts[0][0].schema, writer, sequence, fragments, sums, tables, errors, codecs)


def _said(parts: list[Part], number: int, edits: Mapping[str, BlockHeader]) -> list[tuple[int, bytes]]:
    """Read what was said of the episode of these parts, in order, for its new number."""
    headers = {id(header): header for header, _, _ in parts}
    if (edit := edits.get(parts[0][0].writer)) is not None:
        headers[id(edit)] = edit
    old = int(parts[0][1]["trajectory"])
    return [(number, text.encode()) for header in headers.values() for _, text in header.read_notes(EPISODES, old)]


def _texts(parts: list[Part]) -> list[tuple[int, bytes]]:
    headers = {id(header): header for header, _, _ in parts}.values()
    return list({key: text.encode() for header in headers for key, text in header.read_notes(TEXTS)}.items())


def _trajectories(folder: BlockFolder) -> Iterator[list[Part]]:
    """Yield the fragments of each trajectory in order, trajectories in the order of completion."""
    index = folder.index
    parts: dict[tuple[str, int], list[Part]] = {}
    for block in index.blocks:
        header = read_header(block.path)
        for fragment, reward_sum in zip(header.fragments, header.reward_sums, strict=True):
            part = header, fragment.copy(), reward_sum.copy()
            parts.setdefault((block.writer, int(fragment["trajectory"])), []).append(part)
    for writer, number in zip(index.writer.tolist(), index.number.tolist(), strict=True):
        yield sorted(parts[index.writers[writer], number], key=lambda part: (part[1]["start"], part[0].sequence))


def write_packed(
    folder: BlockFolder,
    target: Path,
    writer: str,
    block_bytes: int,
    origins: Sequence[tuple[int, int]] = (),
    progress: bool = False,
) -> PackSummary:
    """Write the trajectories of a folder into blocks of a new writer, in the order of their completion.

    Args:
        folder: Without damaged blocks.
        target: Another folder.
        writer: A name that is free there.
        block_bytes: Size of a block at most, except that a trajectory is not cut.
        origins: (env, end in ns) of each trajectory, in place of what is recorded; the blocks then tell no other time.
        progress: Show a progress bar.
    """
    num_trajectories = num_frames = num_in_block = 0
    codecs: dict[str, str] = {}  # what "auto" chose
    blocks: list[list[Part]] = [[]]
    said: list[list[tuple[int, bytes]]] = [[]]
    edits = {block.writer: read_header(block.path) for block in folder.blocks.values() if block.is_edit}
    for parts in _trajectories(folder):
        length = sum(int(fragment["length"]) for _, fragment, _ in parts)
        if num_in_block and (num_in_block + length) * parts[0][0].layouts[DATA].frame_bytes > block_bytes:
            num_in_block = 0
            blocks = [*blocks, []]
            said = [*said, []]
        said[-1] += _said(parts, num_trajectories, edits)
        for place, (_, fragment, _) in enumerate(parts):
            fragment["trajectory"] = num_trajectories
            if origins:
                fragment["env"], fragment["end_time_ns"] = origins[num_trajectories]
            fragment["flags"] = (fragment["flags"] & ~np.uint32(TENTATIVE | FIRST)) | (0 if place else FIRST)
        if not fragment["flags"] & ENDS:  # its writer died: nothing will follow
            fragment["flags"] |= OPEN
        num_trajectories = num_trajectories + 1
        num_frames = num_frames + length
        num_in_block += length
        blocks[-1] += parts
    blocks = [block for block in blocks if block]
    for sequence, block in enumerate(tqdm(blocks, desc="pack", unit=" blocks", disable=not progress)):
        content = rebuilt(block, writer, sequence, codecs)
        content.notes = {EPISODES: said[sequence], TEXTS: _texts(block)}
        content.fragments, content.reward_sums = _joined(content.fragments, content.reward_sums)
        assert not (content.fragments["flags"] & DROPPED).any()
        content.created_ns = int(content.fragments["end_time_ns"].max()) if origins else None
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
