"""Which rows of a ring are followed by another of their trajectory: what a draw of transitions asks of each candidate.

One rule: one bool a row, set as rows are written. A quarter of the memory of the ages, which say the same of the row
behind, is looked up from nearer caches; and nothing has to be counted around the end of the ring.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..core.host_arrays import zeroed
from .ring import RingStore


class Pairs:
    """Two rows behind each other, by the first, on the CPU.

    Args:
        ring: The rows, with what was written so far.
        ages: `[num_slots, num_lanes]`, their ages.

    Attributes:
        followed: `[num_slots * num_lanes]`, as the ages lie; of rows that are not live, anything.
    """

    def __init__(self, ring: RingStore, ages: npt.NDArray[np.int32]) -> None:
        self._num_slots = ring.num_slots
        self._rows: npt.NDArray[np.bool_] = zeroed(tuple(ages.shape), torch.bool, torch.device("cpu")).numpy()
        np.not_equal(ages[1:], 0, out=self._rows[:-1])
        np.not_equal(ages[0], 0, out=self._rows[-1])
        self._rows[(ring.total - 1) % ring.num_slots] = False
        self.followed = self._rows.reshape(-1)
        # Sets one in a third of the time of an array.
        self._view = self.followed.data

    def note_row(self, slot: int, continues: bool) -> None:
        """Note a row of the only lane that is written to a slot, and whether it continues a trajectory."""
        self._view[slot - 1] = continues
        self._view[slot] = False

    def note(self, first: int, ages: npt.NDArray[Any]) -> None:
        """Note rows with these ages, `[n, num_lanes]`, written from this row id on; n is at most `num_slots`."""
        num_rows, before = len(ages), (first - 1) % self._num_slots
        continues, num_first = ages != 0, min(num_rows, self._num_slots - before)
        self._rows[before : before + num_first] = continues[:num_first]
        self._rows[: num_rows - num_first] = continues[num_first:]
        self._rows[(before + num_rows) % self._num_slots] = False
