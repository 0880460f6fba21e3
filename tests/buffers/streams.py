"""Identifiable data for the tests of buffers, and naive models of the buffers.

Every value encodes its lane and row: `observation = [lane, row id]`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import torch

from storage import TrajectoryDictBufferMultiDim


@dataclass
class Naive:
    """A list of rows per lane, which a ring must equal."""

    capacity: int
    num_lanes: int
    #: Whether row t of lane i ended a trajectory: `ends[t][i]`.
    ends: list[list[bool]] = field(default_factory=list)

    def add(self, ends: torch.Tensor) -> None:
        self.ends += ends.tolist()

    @property
    def total(self) -> int:
        return len(self.ends)

    @property
    def oldest(self) -> int:
        return max(0, self.total - self.capacity)

    def windows(self, length: int) -> set[tuple[int, int]]:
        """Return (lane, id of the first row) of every window of stored rows within one
        trajectory.
        """
        actual = set()
        for lane in range(self.num_lanes):
            for first in range(self.oldest, self.total - length + 1):
                if not any(self.ends[row][lane] for row in range(first, first + length - 1)):
                    actual.add((lane, first))
        return actual

    def segments(self) -> list[tuple[int, int, int]]:
        """Return (lane, first row, number of rows) of the stored part of every trajectory."""
        result = []
        for lane in range(self.num_lanes):
            first = self.oldest
            for row in range(self.oldest, self.total):
                if self.ends[row][lane] or row == self.total - 1:
                    result.append((lane, first, row - first + 1))
                    first = row + 1
        return result

    def law_by_trajectory(self, length: int) -> dict[tuple[int, int], float]:
        """Return the probability of every window if trajectories are drawn first."""
        eligible = [segment for segment in self.segments() if segment[2] >= length]
        law: dict[tuple[int, int], float] = {}
        for lane, first, num_rows in eligible:
            num_starts = num_rows - length + 1
            for start in range(first, first + num_starts):
                law[lane, start] = 1 / len(eligible) / num_starts
        return law


def rows(first: int, ends: torch.Tensor) -> dict:
    """Create `[n, lanes]` rows, with row ids from `first` on."""
    num_rows, num_lanes = ends.shape
    lane = torch.arange(num_lanes).expand(num_rows, num_lanes)
    row = torch.arange(first, first + num_rows).unsqueeze(1).expand(num_rows, num_lanes)
    return {
        "observation": torch.stack([lane, row], -1).float(),
        "extra": {"both": (lane * 100_000 + row).unsqueeze(-1)},
        "done": ends.unsqueeze(-1),
    }


def drawn_windows(buffer: TrajectoryDictBufferMultiDim, num_draws: int, length: int) -> Counter:
    """Draw windows, check every row of them, and count (lane, first row)."""
    batch = buffer.sample(num_draws * length, length)
    observation = batch["observation"].view(num_draws, length, 2).long()
    lane, first = observation[:, 0, 0], observation[:, 0, 1]
    steps = torch.arange(length)
    assert torch.equal(observation[..., 0], lane.unsqueeze(1).expand(-1, length))
    assert torch.equal(observation[..., 1], first.unsqueeze(1) + steps)
    if "next" in batch:
        following = batch["next"]["observation"].view(num_draws, length, 2).long()
        assert torch.equal(following[..., 0], observation[..., 0])
        assert torch.equal(following[..., 1], observation[..., 1] + 1)
    return Counter(zip(lane.tolist(), first.tolist(), strict=True))


def chi_square_bound(num_kinds: int) -> float:
    """Return the value that chi-square exceeds with probability 0.001 (Wilson and Hilferty's
    approximation).
    """
    df = max(num_kinds - 1, 1)
    return df * (1 - 2 / (9 * df) + 3.0902 * (2 / (9 * df)) ** 0.5) ** 3


def chi_square(counts: Counter, law: dict[tuple[int, int], float]) -> float:
    num_draws = sum(counts.values())
    return sum(
        (counts[key] - num_draws * share) ** 2 / (num_draws * share) for key, share in law.items()
    )
