"""Edits: blocks without frames that drop or annotate trajectories of their writer.

An edit repeats all earlier changes to the trajectories of its writer, so it replaces older edits. A
change to the trajectories of several writers needs one block per writer. These blocks are the parts
of the edit, and readers ignore the edit unless all its parts exist. `FORMAT.md` is the
specification; `tools/edit/` writes edits.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping

from .block import FIRST_EDIT, Block

#: Exclusive upper limit of the number of blocks of one edit. The sequence number of an edit is
#: `FIRST_EDIT` + generation * `MAX_PARTS` + number of blocks.
MAX_PARTS = 10**6
_NAME = re.compile(r"rollout_([A-Za-z0-9-]{1,100})_(\d{16,18})\.h5")


def edit_sequence(generation: int, num_parts: int) -> int:
    """Compute the sequence number of an edit, which all blocks of this edit have in common.

    Args:
        generation: Number of the edit in its folder, counted from 1. Newer edits have a higher
            generation.
        num_parts: Number of parts of the edit.
    """
    return FIRST_EDIT + generation * MAX_PARTS + num_parts


def generation_of(sequence: int) -> int:
    """Return the number of an edit in its folder, counted from 1, from its sequence number."""
    return (sequence - FIRST_EDIT) // MAX_PARTS


def named_edit(name: str) -> tuple[str, int] | None:
    """Parse the file name of an edit; return (writer, sequence number), or None for other files."""
    match = _NAME.fullmatch(name)
    if match is None or int(match[2]) < FIRST_EDIT:
        return None
    return match[1], int(match[2])


def ignored_edits(blocks: Mapping[str, Block], names: Iterable[str]) -> set[str]:
    """Return the file names of edits that a newer edit replaces, or that have missing parts.

    Readers ignore these edits.

    Args:
        blocks: Maps file names to blocks, for the blocks that can be read.
        names: Names of all files in the folder. A damaged part of an edit counts as existing.
    """
    edits = {name: block for name, block in blocks.items() if block.is_edit}
    if not edits:
        return set()
    num_parts: Counter[int] = Counter()
    for name in names:
        edit = named_edit(name)
        if edit is not None:
            num_parts[edit[1]] += 1

    newest: dict[str, int] = {}
    for block in edits.values():
        is_complete = num_parts[block.sequence] >= block.sequence % MAX_PARTS
        if is_complete:
            newest[block.writer] = max(block.sequence, newest.get(block.writer, 0))
    return {name for name, block in edits.items() if newest.get(block.writer) != block.sequence}
