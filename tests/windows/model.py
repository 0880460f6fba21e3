"""Expected windows, computed frame by frame from the recorded steps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tests.files.recorded import Recorded, observation_of


@dataclass(frozen=True)
class Expected:
    """One window of one field."""

    values: np.ndarray
    mask: np.ndarray
    done: np.ndarray
    timeout: np.ndarray


def anchors(length: int, deltas: list[int], stride: int, padding: str) -> list[int]:
    """Return the anchors of a trajectory. `deltas` are those of all fields."""
    if padding != "none":
        return list(range(0, length, stride))
    inside = [t for t in range(length) if all(0 <= t + d < length for d in deltas)]
    return inside[::stride]


def window(one: Recorded, anchor: int, deltas: list[int], padding: str) -> Expected:
    """Return the observation, mask and flags of a window."""
    rows, mask, done, timeout = [], [], [], []
    for delta in deltas:
        frame = anchor + delta
        exists = 0 <= frame < one.length
        nearest = min(max(frame, 0), one.length - 1)
        is_read = exists or padding != "zero"
        rows.append(observation_of(one.number, nearest) if is_read else np.zeros(3, np.float32))
        is_last = nearest == one.length - 1 and is_read
        mask.append(exists)
        done.append(is_last)
        timeout.append(is_last and one.end != "terminated")
    return Expected(np.stack(rows), np.array(mask), np.array(done), np.array(timeout))


def next_window(
    one: Recorded, anchor: int, deltas: list[int], padding: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return the next observations of a window, and whether they were recorded."""
    rows, mask = [], []
    for delta in deltas:
        frame = anchor + delta + 1
        actual = window(one, anchor, [delta + 1], padding)
        row, exists = actual.values[0], bool(actual.mask[0])
        if frame == one.length and one.has_final:
            row, exists = observation_of(one.number, frame - 0.5), True
        rows.append(row)
        mask.append(exists)
    return np.stack(rows), np.array(mask)
