"""Memory that a draw from a tree works in: points, the blocks that are looked at, and their running sums.

One rule: nothing here is kept from one draw to the next but the memory itself.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..core.host_arrays import own
from ..core.modes import lasting

#: Numbers that are reduced into one; `count_not_above_zero` counts on 16.
WIDTH = 16
#: Multiplying by this adds all bytes into the highest, which this shift leaves.
_EVERY_BYTE, _TOP_BYTE = np.uint64(0x0101010101010101), np.uint64(56)


class Strata:
    """Memory for `num_points` points, one in each of as many intervals of equal length."""

    @lasting
    def __init__(self, num_points: int, device: torch.device) -> None:
        self.num_points = num_points
        self._starts = own(torch.arange(num_points, dtype=torch.float64, device=device))
        self._memory = torch.empty(num_points, dtype=torch.float64, device=device)
        self._points = own(self._memory)

    def draw(self, total: float, generator: torch.Generator) -> Any:
        """Draw points in [0, total), ascending, as `own` gives them; they last until the next call."""
        self._memory.uniform_(generator=generator)
        points = self._points
        points += self._starts
        points *= total / max(1, self.num_points)
        return points


class Scratch:
    """Memory for looking at `num_rows` blocks, and for their running sums."""

    @lasting
    def __init__(self, num_rows: int, device: torch.device, of: Scratch | None = None) -> None:
        self.num_rows = num_rows
        if of is None:
            self.rows, self.sums = torch.empty((2, num_rows, WIDTH), dtype=torch.float64, device=device)
            self._is_below = np.empty((num_rows, WIDTH), np.bool_)
            self._counts = np.empty(num_rows, np.int64)
            #: Where each row starts in `flat_sums`.
            self.starts = np.arange(num_rows) * WIDTH
        else:
            self.rows, self.sums = of.rows[:num_rows], of.sums[:num_rows]
            self._is_below, self._counts = of._is_below[:num_rows], of._counts[:num_rows]
            self.starts = of.starts[:num_rows]
        self.own_rows, self.own_sums, self.flat_sums = own(self.rows), own(self.sums), own(self.sums.view(-1))
        self.first_column = self.own_rows[:, 0]
        self._last_is_below = self._is_below[:, -1]
        # Exactly two words of eight flags each: with another `WIDTH` this fails, as counting them would.
        self._first_eight, self._second_eight = self._is_below.view(np.uint64).T
        self._words = self._counts.view(np.uint64)

    def first(self, num_rows: int) -> Scratch:
        """Share the first rows of this memory."""
        return Scratch(num_rows, self.rows.device, self)

    def count_not_above_zero(self) -> Any:
        """Count in each row, on the CPU, the running sums but the last that are not above 0; `[num_rows]`, shared.

        Sums ascend, so that this is the first place that is above 0, or the last place. Flags are bytes: eight
        are added up by one multiplication, without the jumps of a search that processors guess wrongly.
        """
        np.less_equal(self.own_sums, 0.0, out=self._is_below)
        self._last_is_below.fill(False)
        words = self._words
        np.add(self._first_eight, self._second_eight, out=words)
        words *= _EVERY_BYTE
        words >>= _TOP_BYTE
        return self._counts
