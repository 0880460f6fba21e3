"""Naive models of the buffers: plain lists, item by item."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import Any


@dataclass
class Row:
    row_id: int
    value: float
    priority: float
    collected: int | None
    uses: int = 0


@dataclass
class PriorityModel:
    """A prioritized buffer of rows, oldest first."""

    size: int
    max_use: float = inf
    max_staleness: float = inf
    alpha: float = 0.6
    eps: float = 1e-5
    rows: list[Row] = field(default_factory=list)
    total: int = 0
    max_priority: float = 1.0

    def push(self, value: float, priority: float | None, collected: int | None) -> None:
        initial = self.max_priority if priority is None else priority
        self.max_priority = max(self.max_priority, initial)
        self.rows = [row for row in self.rows if row.row_id > self.total - self.size]
        self.rows.append(Row(self.total, value, initial, collected))
        self.total += 1

    def drop_stale(self, iteration: int) -> None:
        self.rows = [
            r
            for r in self.rows
            if r.collected is None or iteration - r.collected < self.max_staleness
        ]

    def drawn(self, row_ids: list[int]) -> list[int]:
        """Count uses. Return the use count of each copy, and drop rows that are used up."""
        uses = []
        for row_id in row_ids:
            row = self.row(row_id)
            assert row is not None
            row.uses += 1
            uses.append(row.uses)
        self.rows = [row for row in self.rows if row.uses < self.max_use]
        return uses

    def update(self, row_ids: list[int], priorities: list[float]) -> int:
        num_applied = 0
        for row_id, priority in zip(row_ids, priorities, strict=True):
            row = self.row(row_id)
            if row is not None:
                row.priority = priority + self.eps
                self.max_priority = max(self.max_priority, priority)
                num_applied += 1
        return num_applied

    def row(self, row_id: int) -> Row | None:
        return next((row for row in self.rows if row.row_id == row_id), None)

    def probabilities(self) -> dict[int, float]:
        weights = {row.row_id: row.priority**self.alpha for row in self.rows}
        total = sum(weights.values())
        return {row_id: weight / total for row_id, weight in weights.items()} if total else {}

    def importance(self, row_id: int, beta: float) -> float:
        chances = self.probabilities()
        least = min(chance for chance in chances.values() if chance > 0)
        return ((len(self.rows) * chances[row_id]) / (len(self.rows) * least)) ** -beta


def item(number: int, **more: Any) -> dict[str, Any]:
    """Create an item whose leaves all encode its number."""
    import numpy as np
    import torch

    return {
        "observation": {
            "joints": torch.full((3,), float(number)),
            "depth": torch.full((2, 2), number),
        },
        "reward": torch.tensor(float(number)),
        "array": np.full(2, number, np.float64),
        "note": f"item {number}",
        "sequence": [number, {"deep": (number,)}],
        **more,
    }


def number_of(found: dict[str, Any]) -> int:
    """Return the number of an item, after a check that all leaves agree."""
    number = int(found["reward"])
    assert (found["observation"]["joints"] == number).all() and found["observation"][
        "joints"
    ].shape == (3,)
    assert (found["observation"]["depth"] == number).all() and found["observation"][
        "depth"
    ].shape == (2, 2)
    assert (found["array"] == number).all() and found["array"].dtype == "float64"
    assert found["note"] == f"item {number}" and found["sequence"] == [number, {"deep": (number,)}]
    return number
