"""`SumTree`, `MinTree`, `MaxTree`: one number per row, and what all of them come to, kept up to date.

One rule: a leaf is written exactly as it was given, and every block above it is reduced anew from
what lies below it. No difference is ever added to a sum, so that nothing drifts, however large the
numbers that were there before.

Blocks are 16 wide, and levels are added until the top has at most 2**12 of them; its running sum is
taken anew at each draw. Chosen by measurement of a whole sample and update of `AdvancedReplayBuffer` (two
busy cores, 10^6 rows, batches of 256 / 4096, one thread, microseconds), by the size of the top:

    62500 (one level)  277 / 1498    3907 (two)  206 / 1217    245 (three)  213 / 1322

and, when a draw was slower, by width: 16 with two levels 384 / 1420, 32 with one 440 / 1619, with two 416 /
1618. A draw and a write alone (`python -m benchmarks prioritized --only structure`) took 86 / 539 then, a
heap of pairs in numpy 217 / 1020, rejection 51 / 270 where weights are even and 382 / 10200 where they are
skewed; rejection also draws independently, not one from each of n strata. At 256 more than half goes to
the calls, not to the numbers: fewer calls count for more than less arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf, nextafter
from typing import Any, ClassVar

import numpy as np
import torch

from ..core.host_arrays import column_of, library, own, take_rows, tensor_of
from ..core.modes import lasting
from ..errors import UsageError
from .tree_scratch import WIDTH, Scratch, Strata

_SHIFT = WIDTH.bit_length() - 1
#: Leaves are a whole number of these, for who looks at them in larger pieces.
BLOCK = 128
#: Levels are added until no more than so many blocks are left.
MAX_TOP = 1 << 12
#: Blocks that are looked at together, which bounds the memory for that.
_MAX_ROWS = 1 << 14
#: Where more than one place in so many is written, reducing everything is quicker.
_MANY = 16
#: From so many points on their strata tell where most of them are; looking for each takes three times as long.
_MANY_POINTS = 1 << 10


class WideTree:
    """A number per place, all reduced by one operation; float64.

    Args:
        capacity: Places, numbered from 0.
        device: Where the numbers are; the code is the same everywhere.

    Indices are int64 tensors on `device`, in range: whoever calls has checked them.
    """

    #: Value of places that nobody wrote; leaves any result as it is.
    NEUTRAL: ClassVar[float]
    _along: ClassVar[Callable[..., torch.Tensor]]
    _along_own: ClassVar[Callable[..., Any]]

    @lasting
    def __init__(self, capacity: int, device: torch.device | str = "cpu") -> None:
        if not isinstance(capacity, int) or isinstance(capacity, bool) or capacity < 1:
            raise UsageError("create a tree", "", "a capacity >= 1", repr(capacity))
        self.capacity = capacity
        self.device = torch.device(device)
        self._is_on_cpu = self.device.type == "cpu"
        sizes = [capacity]
        while sizes[-1] > MAX_TOP:
            sizes.append(-(-sizes[-1] // WIDTH))
        #: The leaves first, the top last; each but the top is a whole number of blocks.
        places = [-(-size // BLOCK) * BLOCK for size in sizes]
        self._levels = [column_of(size, self.NEUTRAL, torch.float64, self.device) for size in places]
        self._blocks = [level.view(-1, WIDTH) for level in self._levels[:-1]]
        self._own_blocks = [own(blocks) for blocks in self._blocks]
        self._own_levels = [own(level) for level in self._levels]
        self._leaves = self._own_levels[0]
        #: Blocks of each level but the top, with the numbers above them that they come to.
        self._steps_up = list(zip(self._own_blocks, self._own_levels[1:], strict=True))
        self._max_refreshed = self._levels[0].shape[0] // _MANY
        self._scratch = self._memory = Scratch(0, self.device)

    def leaves_view(self) -> torch.Tensor:
        """Show all numbers, `[capacity]` float64, sharing memory; not to be written to."""
        return self._levels[0][: self.capacity]

    def blocks_view(self) -> torch.Tensor:
        """Show the numbers in blocks, `[num, BLOCK]`, sharing memory; what is behind the last place is neutral."""
        return self._levels[0].view(-1, BLOCK)

    def read(self, index: torch.Tensor) -> torch.Tensor:
        """Give the numbers at `[n]` places."""
        return self._levels[0].index_select(0, index)

    def write(self, index: torch.Tensor, values: torch.Tensor) -> None:
        """Set `[n]` places to `[n]` float64 values; where a place is named twice the last value counts."""
        self.exchange(own(index), own(values))

    def exchange(self, index: Any, values: Any) -> Any:
        """Do what `write` does, with what `own` gives; give the numbers before."""
        leaves = self._leaves
        before = leaves[index]
        if isinstance(leaves, torch.Tensor):
            values = _last_values(leaves, index, values)
        leaves[index] = values  # numpy writes in order
        self._refresh(index)
        return before

    def fill(self, index: torch.Tensor, value: float) -> None:
        """Set `[n]` places to one value."""
        self._levels[0].index_fill_(0, index, value)
        self._refresh(own(index))

    def clear(self) -> None:
        """Set every place to the neutral value."""
        for level in self._levels:
            level.fill_(self.NEUTRAL)

    def rebuild(self, values: torch.Tensor) -> None:
        """Set all places, `[capacity]`, at once."""
        self._levels[0][: self.capacity].copy_(values)
        self._refresh_all()

    def reduce(self, start: int = 0, stop: int | None = None) -> float:
        """Reduce places `start` to `stop`; the neutral value if there are none."""
        stop = self.capacity if stop is None else stop
        if start == 0 and stop == self.capacity:
            return float(self._along(self._levels[-1], 0))
        parts = [self._levels[0][:0]]
        for level in self._levels:
            first, last = -(-start // WIDTH), stop // WIDTH
            if level is self._levels[-1] or first >= last:
                parts.append(level[start:stop])
                break
            parts += [level[start : first * WIDTH], level[last * WIDTH : stop]]
            start, stop = first, last
        found = torch.cat(parts)
        return float(self._along(found, 0)) if len(found) else self.NEUTRAL

    def check_valid(self) -> tuple[bool, str]:
        """Tell whether every block is what lies below it, and where it is not."""
        for number, (blocks, above) in enumerate(self._steps_up):
            wrong = tensor_of(self._reduced(blocks) != above[: blocks.shape[0]]).nonzero()
            if len(wrong):
                return False, f"block {int(wrong[0])} of level {number} is not what lies below it"
        return True, ""

    def _reduced(self, blocks: Any) -> Any:
        """Reduce each block, always in the same order; as `own` gives them."""
        return self._along(blocks, 1) if isinstance(blocks, torch.Tensor) else self._along_own(blocks)

    def _refresh(self, index: Any) -> None:
        """Reduce anew all blocks above some places; blocks that are named twice come out the same twice."""
        num_places = index.shape[0]
        if num_places > self._max_refreshed:
            self._refresh_all()
            return
        for blocks, above in self._steps_up:
            index = index >> _SHIFT
            if num_places >= blocks.shape[0]:  # in order, each once
                above[: blocks.shape[0]] = self._reduced(blocks)
                continue
            for start in range(0, num_places, _MAX_ROWS):
                part = index[start : start + _MAX_ROWS] if num_places > _MAX_ROWS else index
                rows = self._scratch_for(part.shape[0]).own_rows
                take_rows(blocks, part, rows)
                above[part] = self._reduced(rows)

    def _refresh_all(self) -> None:
        for blocks, above in self._steps_up:
            above[: blocks.shape[0]] = self._reduced(blocks)

    def _scratch_for(self, num_rows: int) -> Scratch:
        """Give memory for so many blocks; fresh memory of this size would cost more than all the rest."""
        if self._scratch.num_rows != num_rows:
            if self._memory.num_rows < num_rows:
                self._memory = Scratch(num_rows, self.device)
            self._scratch = self._memory.first(num_rows)
        return self._scratch


class SumTree(WideTree):
    """Weights >= 0 per place, and draws in proportion to them.

    A place of weight 0 is never found, whatever rounding does: at each level the first running sum
    *above* the mass is taken, and the mass is kept below the last one.
    """

    NEUTRAL = 0.0
    _along = staticmethod(torch.sum)
    #: A third of the time that `np.sum` takes for short rows.
    _along_own = staticmethod(partial(np.einsum, "ij->i"))

    @lasting
    def __init__(self, capacity: int, device: torch.device | str = "cpu") -> None:
        super().__init__(capacity, device)
        #: 0, then the running sums of the top.
        self._sums = torch.zeros(self._levels[-1].shape[0] + 1, dtype=torch.float64, device=self.device)
        self._top_sums = self._sums[1:]
        self._own_sums, self._own_top_sums = own(self._sums), own(self._top_sums)
        self._zero = own(self._sums.new_zeros(()))
        #: Blocks of each level but the top, with their numbers in one row, from the top down.
        self._steps_down = list(zip(self._own_blocks, self._own_levels[:-1], strict=True))[::-1]
        self._strata = Strata(0, self.device)

    def find(self, masses: torch.Tensor) -> torch.Tensor | None:
        """Find where the running sum of weights first exceeds `[n]` masses in [0, total]; None if all are 0."""
        total = self._add_up()
        return tensor_of(self._descend(own(masses.clamp(max=nextafter(total, 0))))) if total > 0 else None

    def draw(self, num_draws: int, generator: torch.Generator) -> torch.Tensor | None:
        """Draw one place from each of `num_draws` intervals of equal mass; `[num_draws]`, ascending.

        None if there is no mass. Each place is drawn `num_draws * weight / total` times on average,
        and less than two times more or less than that in one draw (stratified, Schaul et al. 2016, B.2.1).
        """
        drawn = self.draw_weights(num_draws, generator)
        return None if drawn is None else tensor_of(drawn[0])

    def draw_weights(self, num_draws: int, generator: torch.Generator) -> tuple[Any, Any] | None:
        """Draw as `draw` does; give places and their weights, new, as `own` gives them."""
        total = self._add_up()
        if total <= 0:
            return None
        if self._strata.num_points != num_draws:
            self._strata = Strata(num_draws, self.device)
        points = self._strata.draw(total, generator)
        is_quick = self._is_on_cpu and 0 < num_draws <= _MAX_ROWS
        if not is_quick or points[-1] >= total:  # they ascend
            points = points.clip(max=nextafter(total, 0))
        if is_quick:
            places = self._descend_quickly(points)
            weights = self._leaves[places]
            if np.minimum.reduce(weights) > 0:
                return places, weights
        places = self._descend(points)
        return places, self._leaves[places]

    def _add_up(self) -> float:
        """Take the running sums of the top anew; give the last."""
        torch.cumsum(self._levels[-1], 0, out=self._top_sums)
        return float(self._own_sums[-1])

    def _descend_quickly(self, masses: Any) -> Any:
        """Do what `_descend` does, on the CPU; where rounding puts a mass behind its block the last place is found.

        That place may have no weight: whoever calls must look. Running sums start at minus what is left of the
        mass, never below 0 but for rounding: up to the place before the one that is found they are not above 0.
        """
        node = self._search_top(masses)
        left = self._own_sums[node]
        left -= masses
        memory = self._scratch_for(masses.shape[0])
        for blocks, level in self._steps_down:
            blocks.take(node, 0, memory.own_rows, "clip")
            memory.first_column += left
            torch.cumsum(memory.rows, 1, out=memory.sums)
            place = memory.count_not_above_zero()
            node <<= _SHIFT
            node += place
            if level is not self._leaves:
                place += memory.starts
                left = memory.flat_sums[place]
                left -= level[node]
        return node

    def _search_top(self, points: Any) -> Any:
        """Count the running sums of the top that are at most each point, one point in each stratum, on the CPU."""
        num_points, sums = points.shape[0], self._own_top_sums
        if num_points < _MANY_POINTS:
            return sums.searchsorted(points, "right")
        # A sum is in one stratum: above all points before it, below all behind. Rounding may mistake the next for it.
        first = np.minimum(sums / sums[-1] * num_points, num_points - 1).astype(np.int64)
        first += points[first] < sums
        return np.bincount(first, minlength=num_points + 1)[:num_points].cumsum()

    def _descend(self, masses: Any) -> Any:
        """Find places from the running sums of the top down; masses are below the last one."""
        if masses.shape[0] > _MAX_ROWS:
            parts = [tensor_of(self._descend(own(part))) for part in torch.split(tensor_of(masses), _MAX_ROWS)]
            return own(torch.cat(parts))
        xp = library(self.device)
        # Ascending masses make numpy's search twice as quick.
        node = xp.searchsorted(self._own_top_sums, masses, side="right")
        before = self._own_sums[node]
        memory = self._scratch_for(masses.shape[0])
        for blocks in reversed(self._blocks):
            rows = torch.index_select(blocks, 0, tensor_of(node), out=memory.rows)
            sums = own(torch.cumsum(rows, 1, out=memory.sums))
            # What is left of the mass inside the block; rounding must not put it outside.
            below = xp.nextafter(sums[:, -1], self._zero)
            masses = xp.minimum(xp.maximum(masses - before, self._zero), below)
            place = _first_above(sums, masses)
            node = node * WIDTH + place
            if blocks is not self._blocks[0]:
                at = tensor_of(place).unsqueeze(1)
                before = own((tensor_of(sums).gather(1, at) - rows.gather(1, at)).squeeze(1))
        return node


def _first_above(sums: Any, masses: Any) -> Any:
    """Find in each row of running sums the first that is above the row's mass; there is one."""
    if isinstance(sums, torch.Tensor):
        return torch.searchsorted(sums, masses.unsqueeze(1), right=True).squeeze(1)
    # Looking at all of a row takes less than guessing at half of what is left.
    return (sums > masses[:, None]).argmax(1)


class MinTree(WideTree):
    """The least of one number per place; places that nobody wrote count as infinite."""

    NEUTRAL = inf
    _along = staticmethod(torch.amin)
    _along_own = staticmethod(partial(np.min, axis=1))

    def at_most(self, bound: float) -> torch.Tensor:
        """List the places whose number is at most `bound`, ascending; blocks without one are not looked into."""
        found = (self._levels[-1] <= bound).nonzero().squeeze(1)
        for blocks in reversed(self._blocks):
            is_in = blocks.index_select(0, found) <= bound
            row, place = is_in.nonzero(as_tuple=True)
            found = (found.index_select(0, row) << _SHIFT).add_(place)
        return found


class MaxTree(WideTree):
    """The largest of one number per place; places that nobody wrote count as minus infinite."""

    NEUTRAL = -inf
    _along = staticmethod(torch.amax)
    _along_own = staticmethod(partial(np.max, axis=1))


def _last_values(leaves: torch.Tensor, index: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Give every copy of a place the value of its last copy, so that the order of writing does not matter."""
    order = torch.arange(len(index), dtype=torch.float64, device=index.device)
    leaves.index_fill_(0, index, -1.0)
    leaves.scatter_reduce_(0, index, order, "amax")
    return values.index_select(0, leaves.index_select(0, index).long())
