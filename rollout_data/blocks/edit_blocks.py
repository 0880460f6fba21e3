"""Edits: blocks without frames that void trajectories of their writer, or say something of them.

One rule: an edit states all that holds for its writer, so that a newer one replaces it; the parts of one edit, a block
for each writer, hold together or not at all. `FORMAT.md` is the specification, `editing/` makes them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping

from .block import FIRST_EDIT, Block

#: An edit's sequence number is `FIRST_EDIT` + its generation times this + its number of parts.
MAX_PARTS = 10**6
_NAME = re.compile(r"rollout_([A-Za-z0-9-]{1,100})_(\d{16,18})\.h5")


def edit_sequence(generation: int, num_parts: int) -> int:
    """Return the sequence number of the parts of an edit."""
    return FIRST_EDIT + generation * MAX_PARTS + num_parts


def generation_of(sequence: int) -> int:
    """Return the generation of an edit, counted from 1."""
    return (sequence - FIRST_EDIT) // MAX_PARTS


def named_edit(name: str) -> tuple[str, int] | None:
    """Return writer and sequence number of an edit by the name of its file; None if it is named as something else."""
    found = _NAME.fullmatch(name)
    return (found[1], int(found[2])) if found and int(found[2]) >= FIRST_EDIT else None


def not_in_force(blocks: Mapping[str, Block], names: Iterable[str]) -> set[str]:
    """Name the edits among blocks that do not hold: those with a newer one, and those that lack a part.

    Args:
        blocks: File name -> block, of those that can be read.
        names: Of all files: a part that is there and damaged does not void the others.
    """
    edits = {name: block for name, block in blocks.items() if block.is_edit}
    if not edits:
        return set()
    num_there = Counter(found[1] for found in map(named_edit, names) if found is not None)
    whole = [block for block in edits.values() if num_there[block.sequence] >= block.sequence % MAX_PARTS]
    newest: dict[str, int] = {}
    for block in whole:
        newest[block.writer] = max(block.sequence, newest.get(block.writer, 0))
    return {name for name, block in edits.items() if newest.get(block.writer) != block.sequence}
