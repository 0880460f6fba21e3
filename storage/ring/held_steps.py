"""The newest steps of many lanes, held back so that several are written at once.

One rule: what is held back is written before anybody can read it; the ring sees to that. A step of many lanes goes to
as many places in memory, and waits for each; four at a time wait half as long per step (57 instead of 120 microseconds
for 1,024 lanes of 336 bytes, of which six are held back now).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..core.fields import Schema
from ..core.row_layout import Group

#: Steps that are held back at most, and their memory, which should stay in a processor's own cache.
_MAX_STEPS, _MAX_BYTES = 8, 2 << 20
#: Pieces of this size are written at the speed of memory: so many rows of a lane as make one, and not more.
_PIECE_BYTES = 2048
#: Less than one step in so many is held back, so that they take next to no memory beside the ring.
_MIN_SLOTS_PER_STEP = 256


class HeldSteps:
    """Room for some steps, their fields side by side as in the ring.

    Args:
        schema: The fields.
        groups: How they lie.
        memory: `[lanes, slots, width]` on the CPU, of each group; where steps go in the end.
    """

    def __init__(self, schema: Schema, groups: list[Group], memory: list[torch.Tensor]) -> None:
        num_lanes, num_slots, _ = memory[0].shape
        row_bytes = max(1, sum(group.row_bytes for group in groups))
        limits = (_PIECE_BYTES // row_bytes, _MAX_BYTES // (num_lanes * row_bytes), num_slots // _MIN_SLOTS_PER_STEP)
        #: Steps that are held back at most.
        self.most = max(1, min(_MAX_STEPS, *limits))
        #: Steps that are held back, and the slot of the first.
        self.num, self.first = 0, 0
        rooms = [torch.zeros((self.most, num_lanes, group.width), dtype=group.unit, device="cpu") for group in groups]
        self._moves = [(base.numpy(), room.numpy()) for base, room in zip(memory, rooms, strict=True)]
        self._steps: list[list[npt.NDArray[Any]]] = []
        for step in range(self.most):
            columns: dict[str, torch.Tensor] = {}
            for group, room in zip(groups, rooms, strict=True):
                columns.update(group.views(room[step]))
            self._steps.append([columns[name].numpy() for name in schema])

    @property
    def num_bytes(self) -> int:
        """Memory of the steps."""
        return sum(room.nbytes for _, room in self._moves)

    def add(self, slot: int, leaves: list[npt.NDArray[Any]]) -> None:
        """Hold a step back, `[1, lanes, *event]` per field; if others are, it is the one after them.

        Nothing is lost by an exception at any point (Ctrl-C): the caller does the same again, here as in `settle`.
        """
        if not self.num:
            self.first = slot
        place = slot - self.first
        for array, leaf in zip(self._steps[place], leaves, strict=True):
            array[...] = leaf[0]
        self.num = place + 1

    def settle(self) -> None:
        """Write what is held back."""
        first, num = self.first, self.num
        for memory, room in self._moves:
            memory[:, first : first + num] = room[:num].swapaxes(0, 1)
        self.num = 0

    def touches(self, slots: npt.NDArray[np.int64], length: int) -> bool:
        """Tell whether one of the windows of `length` rows that begin at these slots holds a row that is held back."""
        return bool(((slots > self.first - length) & (slots < self.first + self.num)).any())
