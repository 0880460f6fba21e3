"""`LeastWeight`: the least weight above 0, exactly, without looking at all of them.

One rule: the least changes only if it is undercut, or if a row that had it is written. In the first
case it is the new one; in the second the blocks that were written since are looked at again. A tree
of least numbers would cost as much at every write as the sums do.
"""

from __future__ import annotations

from math import inf
from typing import Any

import torch

from ..core.host_arrays import library, own
from ..core.modes import lasting
from .sum_tree import BLOCK, SumTree

_SHIFT = BLOCK.bit_length() - 1


class LeastWeight:
    """Watch the weights of a tree.

    Args:
        tree: Whoever writes to it tells `note`.
    """

    @lasting
    def __init__(self, tree: SumTree) -> None:
        self._blocks = tree.blocks_view()
        self._least = torch.full((self._blocks.shape[0],), inf, dtype=torch.float64, device=tree.device)
        self._is_written = torch.zeros(self._blocks.shape[0], dtype=torch.bool, device=tree.device)
        self._own_written, self._weights = own(self._is_written), own(tree.leaves_view())
        self._library = library(tree.device)
        #: None if a row that had it was written.
        self._value: float | None = inf

    def note(self, index: Any, old: Any, new: Any) -> None:
        """Note that `[n]` weights were `old` and that `new` were written; as `own` gives them.

        `new` may be one number for all; of a row that is named twice one of its weights is there now.
        """
        self._own_written[index >> _SHIFT] = True
        if self._value is None or not index.shape[0]:
            return
        if float(self._library.minimum(old, new).min()) > self._value:
            return  # nearly always
        if _least_positive(old) <= self._value:
            self._value = None
        elif _least_positive(new) < self._value:
            self._value = min(self._value, _least_positive(self._weights[index]))

    def note_all(self) -> None:
        """Note that all weights were written."""
        self._is_written.fill_(True)
        self._value = None

    def value(self) -> float:
        """Give the least weight above 0; inf if all are 0."""
        if self._value is None:
            written = self._is_written.nonzero().squeeze(1)
            rows = self._blocks.index_select(0, written)
            self._least.index_copy_(0, written, torch.where(rows > 0, rows, inf).amin(1))
            self._is_written.fill_(False)
            self._value = float(self._least.amin())
        return self._value


def _least_positive(weights: Any) -> float:
    least = float(weights.min())
    if least > 0:
        return least
    positive = weights[weights > 0]
    return float(positive.min()) if positive.shape[0] else inf
