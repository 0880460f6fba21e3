"""Read the files of a writer with naive code."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rollout_data.blocks.block_header import (
    DROPPED,
    ENDS,
    FIRST,
    OPEN,
    TENTATIVE,
    TERMINATED,
    TRUNCATED,
    BlockHeader,
    open_block,
)


@dataclass
class Recorded:
    """One trajectory in the blocks of a folder."""

    writer: str
    number: int
    env: int
    flags: int = 0
    fields: dict[str, list[np.ndarray]] = field(default_factory=dict)
    finals: dict[str, np.ndarray] | None = None
    reward_sum: np.ndarray | None = None
    versions: list[int] = field(default_factory=list)
    end_time_ns: int = 0

    @property
    def length(self) -> int:
        return len(self.versions)

    def column(self, name: str) -> np.ndarray:
        return np.concatenate(self.fields[name])


def blocks_of(folder: Path) -> list[BlockHeader]:
    """Open and verify every block, by writer and sequence."""
    return [open_block(path, verify=True) for path in sorted(Path(folder).glob("rollout_*.h5"))]


def field_values(header: BlockHeader, table: str, name: str, start: int, stop: int) -> np.ndarray:
    """Read the rows of a field in the form that users receive; bfloat16 as float32."""
    layout = header.layouts[table]
    rows = header.read_rows(table, layout.column_of[name].name, start, stop)
    values = layout.decoded(name, torch.from_numpy(rows))
    return (values.float() if values.dtype == torch.bfloat16 else values).numpy()


def trajectories_of(folder: Path) -> list[Recorded]:
    """Read all trajectories in the order of their numbers, and check each frame."""
    result: dict[tuple[str, int], Recorded] = {}
    for header in blocks_of(folder):
        for fragment, reward_sum in zip(header.fragments, header.reward_sums, strict=True):
            key = (header.writer, int(fragment["trajectory"]))
            if fragment["flags"] & DROPPED or (key in result and result[key].flags & DROPPED):
                result.setdefault(key, Recorded(*key, int(fragment["env"]))).flags |= DROPPED
                continue  # a void trajectory has no other fragment
            is_first = bool(fragment["flags"] & FIRST)
            assert is_first == (key not in result), "FIRST on the first fragment, and only there"
            item = result.setdefault(key, Recorded(*key, int(fragment["env"])))
            assert item.env == fragment["env"] and item.length == fragment["start"], (
                "fragments follow each other"
            )
            assert not item.flags & ENDS, "nothing follows an end"
            _append(item, header, fragment, reward_sum)
    return [item for _, item in sorted(result.items()) if _exists(item)]


def _append(one: Recorded, header: BlockHeader, fragment: Any, reward_sum: np.ndarray) -> None:
    start, stop = int(fragment["row"]), int(fragment["row"] + fragment["length"])
    for name in header.schema:
        one.fields.setdefault(name, []).append(field_values(header, "data", name, start, stop))
    one.flags |= int(fragment["flags"])
    one.versions += [int(fragment["policy_version"])] * (stop - start)
    one.reward_sum = reward_sum if one.reward_sum is None else one.reward_sum + reward_sum
    assert int(fragment["end_time_ns"]) >= one.end_time_ns
    one.end_time_ns = int(fragment["end_time_ns"])
    if (row := int(fragment["final_row"])) >= 0:
        layout = header.layouts["final"]
        one.finals = {
            name: field_values(header, "final", name, row, row + 1)[0] for name in layout.schema
        }


def _exists(one: Recorded) -> bool:
    undecided = one.flags & TENTATIVE and not one.flags & (TERMINATED | TRUNCATED)
    return not one.flags & DROPPED and not undecided and one.length > 0


def end_of(one: Recorded) -> str:
    """Return the name of the end: "terminated", "truncated", "both", "open" or "" (in progress)."""
    names = {
        TERMINATED: "terminated",
        TRUNCATED: "truncated",
        TERMINATED | TRUNCATED: "both",
        OPEN: "open",
        0: "",
    }
    return names[one.flags & (TERMINATED | TRUNCATED | OPEN)]
