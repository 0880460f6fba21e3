"""Episodes as users bring them -> one table of frames, lengths, and what is known of each episode.

One rule: boundaries come from the episodes' lengths, never from flags; a flag that contradicts them
is an error, or a place to split, as the caller chooses. Nothing of the caller's is changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from ..core.fields import Schema
from ..core.records import Key, RecordReader, flat_name
from ..core.tree import flatten, unflatten
from ..errors import SchemaError, UsageError

_ACTION = "make a trajectory buffer"
_FILE_NAME = "file_name"


@dataclass
class Episodes:
    """Checked episodes.

    Attributes:
        schema: The fields of a frame.
        rows: Per episode its leaves `[T, 1, *event]` in the schema's order.
        motion_ids: Per episode its id; None where there is none.
        file_names: Per episode the file that it came from; None if not given.
    """

    schema: Schema
    rows: list[list[torch.Tensor]] = field(default_factory=list)
    motion_ids: list[Any] = field(default_factory=list)
    file_names: list[str | None] = field(default_factory=list)

    @property
    def lengths(self) -> list[int]:
        """Frames of each episode."""
        return [len(leaves[0]) for leaves in self.rows]


def read_episodes(
    episodes: Iterable[Mapping[str, Any]],
    end_key: Key,
    motion_id_key: Key,
    file_names: Iterable[str | None] | None,
    split_on_end: bool,
) -> Episodes:
    """Check episodes and cut out what describes them.

    Raises:
        UsageError, SchemaError, FieldTypeError: Naming the episode and the leaf that does not fit.
    """
    listed = list(episodes)
    names = [None] * len(listed) if file_names is None else list(file_names)
    if not listed or len(names) != len(listed):
        expected = "at least one episode" if not listed else f"{len(listed)} file names, one per episode"
        raise UsageError(_ACTION, "", expected, "none" if not listed else str(len(names)))
    end_name, motion_name = flat_name(end_key), flat_name(motion_id_key)
    parts = [_take_apart(flatten(episode), motion_name) for episode in listed]
    # A motion id that only some episodes have is known of them, but no column.
    keeps_ids = all(motion_name in columns for columns, _, _ in parts)
    reader = RecordReader(1, False, auto_unsqueeze=True, narrow=False)
    found: Episodes | None = None
    for number, (columns, motion_id, own_name) in enumerate(parts):
        if not keeps_ids:
            columns.pop(motion_name, None)
        rows = _read_one(reader, columns, end_name, number)
        found = found or Episodes(reader.schema or Schema([]))
        place = list(found.schema).index(end_name)
        for piece in _cut(rows, place, split_on_end, f"episode {number}"):
            found.rows.append(piece)
            found.motion_ids.append(motion_id)
            found.file_names.append(names[number] or own_name)
    assert found is not None
    return found


def _take_apart(columns: dict[str, Any], motion_name: str) -> tuple[dict[str, Any], Any, str | None]:
    """Split an episode into columns, motion id and file name."""
    file_name = columns.pop(_FILE_NAME, None)
    value: Any = columns.get(motion_name)
    if value is None or isinstance(value, (str, int, float)):
        columns.pop(motion_name, None)
        return columns, value, file_name
    if getattr(value, "ndim", 1) == 0:
        return {name: leaf for name, leaf in columns.items() if name != motion_name}, value.item(), file_name
    first = torch.as_tensor(value, device="cpu")[:1].flatten().tolist()
    return columns, (first[0] if len(first) == 1 else first or None), file_name


def _read_one(reader: RecordReader, columns: dict[str, Any], end_name: str, number: int) -> list[torch.Tensor]:
    if not columns:
        raise UsageError(_ACTION, f"of episode {number}", "columns", "none")
    length = len(next(iter(columns.values())))
    if end_name not in columns:
        columns = {**columns, end_name: torch.zeros((length, 1), dtype=torch.bool, device="cpu")}
    try:
        rows = reader.read(unflatten(columns))
    except SchemaError as error:
        error.where = f"{error.where} in episode {number}"
        raise
    if rows is None or not rows.num_rows:
        raise UsageError(_ACTION, f"of episode {number}", "at least one frame", "none")
    if reader.schema is None:
        reader.freeze(rows.schema, 1)
    return rows.tensors


def _cut(rows: list[torch.Tensor], place: int, split_on_end: bool, where: str) -> list[list[torch.Tensor]]:
    """Cut an episode where a flag inside it says so; set the flags of all pieces anew."""
    length = len(rows[0])
    inside = (rows[place] != 0).flatten(1).any(1)[:-1].nonzero().flatten().tolist()
    if inside and not split_on_end:
        advice = "Cut it there, or give split_on_end=True"
        raise UsageError(
            _ACTION, f"of {where}", "an end flag on the last frame only", f"one on frame {inside[0]}", advice
        )
    bounds = [0, *(step + 1 for step in inside), length]
    pieces = [[leaf[start:stop] for leaf in rows] for start, stop in pairwise(bounds)]
    for piece in pieces:
        flags = torch.zeros_like(piece[place])
        flags[-1] = 1
        piece[place] = flags
    return pieces
