"""Windows from a ring that searches all end flags for the trajectories before every draw.

`RescanRing` stores columns `[time, lanes, *event]`. A draw lists the trajectories with one
`nonzero` over the flags, chooses a trajectory that is long enough and a start, and gathers with
indices, all with torch. Earlier systems and the samplers of other libraries do this when the ring
has changed. `lean=True` is the fastest way to the same list that we found: it copies the flags lane
by lane, and uses numpy's `flatnonzero`. No other library is known to do that.
"""

from __future__ import annotations

import numpy as np
import torch


class RescanRing:
    """A full ring of columns that stores only the end flags of trajectories.

    Args:
        columns: `[slots, lanes, *event]`, among them observation, action and done.
        length: Rows of a window.
        lean: Whether the list is made the shortest way.
    """

    def __init__(self, columns: dict[str, torch.Tensor], length: int, lean: bool = False) -> None:
        self._columns, self._length, self._cursor, self._lean = columns, length, 0, lean
        self._flags = columns["done"].squeeze(-1)
        self._by_lane = self._flags.t().contiguous().numpy()

    def extend(self, row: dict[str, torch.Tensor]) -> None:
        """Replace the oldest step of all lanes."""
        for name, leaf in row.items():
            self._columns[name][self._cursor] = leaf[0]
        if self._lean:
            self._by_lane[:, self._cursor] = row["done"][0, :, 0].numpy()
        self._cursor = (self._cursor + 1) % len(self._flags)

    def draw(self, num_windows: int) -> dict[str, torch.Tensor]:
        """Draw windows of `length` rows, and the observation one row later."""
        lane, first, last = self._lean_list() if self._lean else self._list()
        lengths = last - first + 1
        fits = (lengths > self._length).nonzero().squeeze(1)
        chosen = fits[torch.randint(len(fits), (num_windows,))]
        start = first[chosen] + (torch.rand(num_windows) * (lengths[chosen] - self._length)).long()
        time = (start.unsqueeze(1) + torch.arange(self._length)).flatten()
        lanes = lane[chosen].repeat_interleave(self._length)
        batch = {name: self._columns[name][time, lanes] for name in ("observation", "action")}
        return {**batch, "next/observation": self._columns["observation"][time + 1, lanes]}

    def _list(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """List trajectories: lane, first slot and last slot.

        All end at the end of the memory and at the newest row.
        """
        ends = self._flags.clone()
        ends[self._cursor - 1] = ends[-1] = True
        lane, last = ends.t().nonzero(as_tuple=True)
        first = torch.cat([last.new_zeros(1), last[:-1] + 1])
        first[1:][lane[1:] != lane[:-1]] = 0
        return lane, first, last

    def _lean_list(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        written, num_slots = self._by_lane[:, self._cursor - 1].copy(), len(self._flags)
        self._by_lane[:, self._cursor - 1] = self._by_lane[:, -1] = True
        last = np.flatnonzero(self._by_lane)
        self._by_lane[:, self._cursor - 1] = written
        first = np.empty_like(last)
        first[0], first[1:] = 0, last[:-1] + 1
        lane = last // num_slots
        before = lane * num_slots
        return (
            torch.from_numpy(lane),
            torch.from_numpy(first - before),
            torch.from_numpy(last - before),
        )
