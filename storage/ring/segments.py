"""Which trajectories of a ring have ended and still have live rows: what is drawn from trajectory by trajectory.

One rule: noted as they end and forgotten as their last row is overwritten, so that nothing is searched for.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from .ring import RingStore


class Segments:
    """The ended trajectories that still have live rows, oldest end first.

    Args:
        ring: The ring.
    """

    def __init__(self, ring: RingStore) -> None:
        self._ring = ring
        #: Lane, id of the last row, number of rows; `[3, room]`, of which `_first` to `_last` count.
        self._rows = np.zeros((3, 64), np.int64)
        self._first, self._last = 0, 0

    def note(self, ends: npt.NDArray[np.bool_], next_ages: torch.Tensor, total: int) -> None:
        """Note the ends `[n, lanes]` of rows that are about to be written at `total`."""
        step, lane = np.nonzero(ends)
        if not len(step):
            return
        # Sorted by lane, the previous end of each lane stands before it; the first counts from its lane's age.
        order = np.lexsort((step, lane))
        previous = np.empty(len(order), np.int64)
        previous[1:] = step[order][:-1]
        is_first = np.ones(len(order), bool)
        is_first[1:] = lane[order][1:] != lane[order][:-1]
        ages = next_ages.cpu().numpy().astype(np.int64)
        previous = np.where(is_first, -1 - ages[lane[order]], previous)
        num_rows = np.empty(len(order), np.int64)
        num_rows[order] = step[order] - previous
        self._append(np.stack([lane, step + total, num_rows]))

    def clear(self) -> None:
        """Forget every trajectory."""
        self._first, self._last = 0, 0

    def listed(self) -> torch.Tensor:
        """Give those with live rows, `[3, num]` int64 on the ring's device: lane, last row, number of rows."""
        ends = self._rows[1, self._first : self._last]
        self._first += int(np.searchsorted(ends, self._ring.oldest))
        return torch.from_numpy(self._rows[:, self._first : self._last]).to(self._ring.device)

    def _append(self, rows: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> None:
        num_new = rows.shape[1]
        if self._last + num_new > self._rows.shape[1]:
            ends = self._rows[1, self._first : self._last]
            self._first += int(np.searchsorted(ends, self._ring.oldest))
            kept = self._rows[:, self._first : self._last]
            room = np.zeros((3, 2 * (kept.shape[1] + num_new)), np.int64)
            room[:, : kept.shape[1]] = kept
            self._rows, self._first, self._last = room, 0, kept.shape[1]
        self._rows[:, self._last : self._last + num_new] = rows
        self._last += num_new
