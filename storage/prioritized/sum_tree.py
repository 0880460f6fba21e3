"""`SumTree`, `MinTree`, `MaxTree`: one number per row, and the sum, least or largest of all, kept up to date.

`LeastWeight` is the least number above 0 of a `SumTree`.

One rule: a leaf is written exactly as given, and every block above it is reduced anew from the numbers
below it. No difference is ever added to a sum, so that rounding errors do not accumulate. A sum is the
last of running sums, which are added from left to right: the result does not depend on how many numbers
a processor adds at once, nor on the number of threads. (`torch.sum` and `np.einsum` depend on it.)

Blocks are 16 wide; levels are added until the top has at most 2**12 numbers, whose running sum is computed
at each draw. Measured for a whole sample and update of `AdvancedReplayBuffer` (10^6 rows, batches of 256 /
4096, one thread, microseconds), by the size of the top:

    62500 (one level)  277 / 1498    3907 (two)  206 / 1217    245 (three)  213 / 1322

A draw and a write alone took 86 / 539, a heap of pairs in numpy 217 / 1020, rejection 51 / 270 where weights
are even and 382 / 10200 where they are skewed; rejection also draws independently, not one per stratum.

Most time goes to the number of calls, not to arithmetic. So on the CPU memory is handled as arrays of numpy
(`own` in `core/memory.py`); variables named `own_...` share the memory of the tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf, nextafter
from typing import Any, ClassVar

import numpy as np
import torch

from ..core import arguments
from ..core.memory import filled, last_copies, lasting, library, own, take_rows, tensor_of

#: Numbers that are reduced to one.
WIDTH = 16
_SHIFT = WIDTH.bit_length() - 1
#: Levels are a whole number of these, for code that looks at leaves in larger pieces.
BLOCK = 128
_BLOCK_SHIFT = BLOCK.bit_length() - 1
#: Multiplying by this adds all bytes into the highest, which this shift leaves.
_EVERY_BYTE, _TOP_BYTE = np.uint64(0x0101010101010101), np.uint64(56)
#: Levels are added until the top has at most this many numbers.
MAX_TOP = 1 << 12
#: On other devices than the CPU the number of launches counts: a running sum of so many numbers is one.
_MAX_TOP_ON_DEVICE = 1 << 22
#: Sizes of calls whose memory is kept: of draws, of updates, and of rows that are added.
_MAX_MEMORIES = 4
#: From this many draws on their intervals say in a third of the time where most of them are.
_MANY_POINTS = 1 << 10


class _Memory:
    """Memory for looking at `num` blocks, kept for calls of the same size; fresh memory costs more than the work."""

    @lasting
    def __init__(self, num: int, device: torch.device) -> None:
        self.num = num
        self.rows, self.sums = torch.empty((2, num, WIDTH), dtype=torch.float64, device=device)
        self.own_rows = own(self.rows)
        self.own_sums = own(self.sums)
        self.first_column = self.own_rows[:, 0]
        self.last_sums = self.own_sums[:, -1]
        self.flat_sums = self.own_sums.reshape(-1)
        #: Where each row starts in `flat_sums`.
        self.starts = own(torch.arange(0, num * WIDTH, WIDTH, device=device))
        #: A point for each block, and 0, 1, ...
        self.points = torch.empty(num, dtype=torch.float64, device=device)
        self.own_points = own(self.points)
        self.numbers = own(torch.arange(num, dtype=torch.float64, device=device))
        self._is_below = np.empty((num, WIDTH), np.bool_)
        self._last_is_below = self._is_below[:, -1]
        self._first_eight, self._second_eight = self._is_below.view(np.uint64).T
        self._count = np.empty(num, np.int64)
        self._words = self._count.view(np.uint64)

    def first_above_zero(self) -> Any:
        """Find in each row the first running sum that is above 0, or the last one: `[num]`, for `own` code.

        Flags are bytes: one multiplication adds up eight of them, without the jumps of a search that processors
        guess wrongly. A draw of 4096 takes 1.7 times as long with a search.
        """
        if isinstance(self.own_sums, torch.Tensor):
            return (self.own_sums[:, :-1] <= 0).sum(1)
        np.less_equal(self.own_sums, 0.0, out=self._is_below)
        self._last_is_below.fill(False)
        words = self._words
        np.add(self._first_eight, self._second_eight, out=words)
        words *= _EVERY_BYTE
        words >>= _TOP_BYTE
        return self._count


class WideTree:
    """A float64 number per place, all reduced by one operation.

    Args:
        capacity: Places, numbered from 0.
        device: Where the numbers are.

    Indices are int64 tensors on `device`, in range; they are not checked here.
    """

    #: Value of places that were never written; leaves any result as it is.
    NEUTRAL: ClassVar[float]
    _along: ClassVar[Callable[..., torch.Tensor]]

    @lasting
    def __init__(self, capacity: int, device: torch.device | str = "cpu") -> None:
        self.capacity = arguments.whole("create a tree", "capacity", capacity, 1)
        self.device = arguments.device("create a tree", "device", device)
        # Elsewhere one leaf more takes what is written nowhere; its value must stay neutral.
        sizes = [capacity if self.device.type == "cpu" else capacity + 1]
        max_top = MAX_TOP if self.device.type == "cpu" else _MAX_TOP_ON_DEVICE
        while sizes[-1] > max_top:
            sizes.append(-(-sizes[-1] // WIDTH))
        #: The leaves first, the top last; each but the top is a whole number of blocks.
        places = [-(-size // BLOCK) * BLOCK for size in sizes]
        self._levels = [filled((size,), self.NEUTRAL, torch.float64, self.device) for size in places]
        self._own_levels = [own(level) for level in self._levels]
        self._library = library(self.device)
        self._is_on_cpu = self.device.type == "cpu"
        #: `[num, WIDTH]` blocks of each level but the top, from the leaves up.
        self._blocks = [level.reshape(-1, WIDTH) for level in self._own_levels[:-1]]
        self._steps_up = list(zip(self._blocks, self._own_levels[1:], strict=True))
        self._memories: dict[int, _Memory] = {}

    def leaves_view(self) -> torch.Tensor:
        """Show all numbers, `[capacity]` float64, sharing memory; not to be written to."""
        return self._levels[0][: self.capacity]

    def blocks_view(self) -> torch.Tensor:
        """Show the leaves as `[num, BLOCK]`, sharing memory; neutral behind the last place."""
        return self._levels[0].view(-1, BLOCK)

    def read(self, index: torch.Tensor) -> torch.Tensor:
        """Copy the numbers at `[n]` places."""
        return self._levels[0].index_select(0, index)

    def write(self, index: torch.Tensor, values: torch.Tensor) -> None:
        """Set `[n]` places to `[n]` float64 values; of a place that is named twice the last value stays."""
        self.exchange(own(index), last_copies(own(index), own(values), self.capacity))

    def put(self, index: Any, values: Any) -> None:
        """Set `[n]` places to values of `last_copies`."""
        self._own_levels[0][index] = values
        self._refresh(index)

    def exchange(self, index: Any, values: Any) -> Any:
        """Set `[n]` places to values of `last_copies`, or to one value; give the numbers before, as `own` does."""
        leaves = self._own_levels[0]
        before = leaves[index]
        if self._is_on_cpu or isinstance(values, torch.Tensor):
            leaves[index] = values
        else:
            leaves.index_fill_(0, index, values)  # `leaves[index] = number` makes the host wait
        self._refresh(index)
        return before

    def fill(self, index: torch.Tensor, value: float) -> None:
        """Set `[n]` places to one value."""
        self.exchange(own(index), value)

    def clear(self) -> None:
        """Set every place to the neutral value."""
        for level in self._levels:
            level.fill_(self.NEUTRAL)

    def rebuild(self, values: torch.Tensor) -> None:
        """Set the first places, `[n]`, at once."""
        num = len(values)
        self._levels[0][:num].copy_(values)
        for blocks, above in self._steps_up:
            num = -(-num // WIDTH)
            above[:num] = self._reduced(blocks[:num])

    def reduce(self, start: int = 0, stop: int | None = None) -> float:
        """Reduce places `start` to `stop`; the neutral value if there are none."""
        stop = self.capacity if stop is None else stop
        if start == 0 and stop == self.capacity:
            return float(self._along(self._levels[-1], 0))
        parts = [self._levels[0][:0]]
        for level in self._levels:
            first = -(-start // WIDTH)
            last = stop // WIDTH
            if level is self._levels[-1] or first >= last:
                parts.append(level[start:stop])
                break
            parts += [level[start : first * WIDTH], level[last * WIDTH : stop]]
            start = first
            stop = last
        found = torch.cat(parts)
        return float(self._along(found, 0)) if len(found) else self.NEUTRAL

    def check_valid(self) -> tuple[bool, str]:
        """Return whether every number above the leaves is that of its block, and which is not."""
        for level, (blocks, above) in enumerate(self._steps_up):
            wrong = tensor_of(self._reduced(blocks) != above[: len(blocks)]).nonzero()
            if len(wrong):
                return False, f"block {int(wrong[0])} of level {level} is not what lies below it"
        return True, ""

    def _reduced(self, blocks: Any) -> Any:
        """Reduce each block, always in the same order."""
        return own(self._along(tensor_of(blocks), 1))

    def _refresh(self, index: Any) -> None:
        """Reduce all blocks above some places anew; of a block that is named twice both results are the same."""
        for blocks, above in self._steps_up:
            index = index >> _SHIFT
            if len(index) >= len(blocks):  # in order, each once
                above[: len(blocks)] = self._reduced(blocks)
            else:
                memory = self._memory_for(len(index))
                take_rows(blocks, index, memory.own_rows)
                above[index] = self._reduced_rows(memory)

    def _reduced_rows(self, memory: _Memory) -> Any:
        """Reduce the blocks that were copied into a memory."""
        return self._reduced(memory.own_rows)

    def _memory_for(self, num: int) -> _Memory:
        found = self._memories.get(num)
        if found is None:
            if len(self._memories) >= _MAX_MEMORIES:
                self._memories.clear()
            found = self._memories[num] = _Memory(num, self.device)
        return found


def _last_running_sum(values: torch.Tensor, dim: int) -> torch.Tensor:
    return values.cumsum(dim).select(dim, -1)


class SumTree(WideTree):
    """Weights >= 0 per place, and draws in proportion to them.

    A place of weight 0 is never found, whatever rounding does.
    """

    NEUTRAL = 0.0
    _along = staticmethod(_last_running_sum)

    @lasting
    def __init__(self, capacity: int, device: torch.device | str = "cpu") -> None:
        super().__init__(capacity, device)
        #: 0, then the running sums of the top.
        self._sums = torch.zeros(len(self._levels[-1]) + 1, dtype=torch.float64, device=self.device)
        self._top_sums = self._sums[1:]
        self._own_sums = own(self._sums)
        self._own_top_sums = own(self._top_sums)
        #: Blocks of each level but the top, with their numbers in one row, from the top down.
        self._steps_down = list(zip(self._blocks, self._own_levels[:-1], strict=True))[::-1]

    def find(self, masses: torch.Tensor) -> torch.Tensor | None:
        """Find where the running sum of weights first exceeds `[n]` masses in [0, total]; None if all are 0."""
        total = float(self._add_up())
        masses = own(masses.clamp(max=nextafter(total, 0)))
        return tensor_of(self._descend(self._search(masses), masses, is_careful=True)) if total > 0 else None

    def draw(self, num_draws: int, generator: torch.Generator) -> torch.Tensor | None:
        """Draw one place from each of `num_draws` intervals of equal mass; `[num_draws]`, ascending.

        None if there is no mass. Each place is drawn `num_draws * weight / total` times on average,
        and less than two times more or less than that in one draw (stratified, Schaul et al. 2016, B.2.1).
        """
        drawn = self.draw_weights(num_draws, generator)
        return None if drawn is None else tensor_of(drawn[0])

    def draw_weights(self, num_draws: int, generator: torch.Generator) -> tuple[Any, Any] | None:
        """Draw as `draw` does; give places and their weights, new, as `own` gives them.

        On other devices than the CPU the host does not know whether there is mass: without any, some place is drawn.
        """
        total = self._add_up()
        if self._is_on_cpu and total <= 0:
            return None
        memory = self._memory_for(num_draws)
        memory.points.uniform_(generator=generator)
        masses = memory.own_points
        masses += memory.numbers
        masses *= total / max(1, num_draws)
        # Elsewhere than on the CPU a search does not go beyond the last place.
        if self._is_on_cpu and num_draws and masses[-1] >= total:  # they ascend
            masses = masses.clip(max=nextafter(total, 0))
        is_long = num_draws >= _MANY_POINTS and isinstance(masses, np.ndarray)
        node = self._search_strata(masses) if is_long else self._search(masses)
        places = self._descend(node, masses, is_careful=not self._is_on_cpu)
        weights = self._own_levels[0][places]
        if not self._is_on_cpu:
            return places, weights
        if self._library.count_nonzero(weights) < num_draws:  # in half the time of `min`
            places = self._descend(self._search(masses), masses, is_careful=True)
            weights = self._own_levels[0][places]
        return places, weights

    def _reduced_rows(self, memory: _Memory) -> Any:
        torch.cumsum(memory.rows, 1, out=memory.sums)
        return memory.last_sums

    def total(self) -> Any:
        """Return the sum of all weights: a float on the CPU, elsewhere a tensor."""
        return self._add_up()

    def _add_up(self) -> Any:
        """Compute the running sums of the top; return the last, as `total` does."""
        torch.cumsum(self._levels[-1], 0, out=self._top_sums)
        return float(self._own_sums[-1]) if self._is_on_cpu else self._sums[-1]

    def _search(self, masses: Any) -> Any:
        """Count the running sums of the top that are at most each mass."""
        sums = self._own_top_sums
        if isinstance(sums, torch.Tensor):
            # CUDA rounds each running sum by itself, so that a place without weight may seem to add some. So the place
            # found is replaced by the last one with weight up to it, or the first one. The last place is not looked at:
            # it is found if no other is.
            last = (len(sums) if self._steps_down else self.capacity) - 1
            found = torch.searchsorted(sums[:last], masses, right=True)
            ranks = (self._levels[-1] > 0).cumsum(0)
            return torch.searchsorted(ranks[:last], ranks.index_select(0, found).clamp_(min=1))
        return sums.searchsorted(masses, "right")

    def _search_strata(self, masses: Any) -> Any:
        """Do what `_search` does, but for rounding, on the CPU, for one mass in each of as many equal intervals.

        A sum is above all masses of the intervals before its own, and below all behind it.
        """
        num = len(masses)
        sums = self._own_top_sums
        first = np.minimum(sums / sums[-1] * num, num - 1).astype(np.int64)
        first += masses[first] < sums
        return np.bincount(first, minlength=num + 1)[:num].cumsum()

    def _descend(self, node: Any, masses: Any, is_careful: bool) -> Any:
        """Find places from blocks of the top down: in each block the first running sum above what is left of a mass.

        Running sums start at minus what is left. Rounding may keep all of them below 0, or begin above; then the last
        or first place of the block is found, which may have no weight, or, with `is_careful`, another that has one.
        """
        if not self._steps_down:
            return node
        left = self._own_sums[node]
        left -= masses  # below 0 from here on
        memory = self._memory_for(len(masses))
        first_column = memory.first_column
        rows = memory.rows
        sums = memory.sums
        for blocks, level in self._steps_down:
            take_rows(blocks, node, memory.own_rows)
            first_column += left
            torch.cumsum(rows, 1, out=sums)
            place = memory.first_above_zero()
            if is_careful and isinstance(place, torch.Tensor):
                place = _first_with_weight(sums, blocks[node] > 0)
            elif is_careful:
                is_behind = memory.last_sums <= 0
                has_weight = tensor_of(blocks[node[is_behind]]) > 0
                place[is_behind] = own((has_weight * torch.arange(WIDTH, device=self.device)).amax(1))
            node <<= _SHIFT
            node += place
            if level is not self._own_levels[0]:
                place += memory.starts
                left = memory.flat_sums[place]
                left -= level[node]
                if is_careful:
                    left[left > 0] = 0
        return node


def _first_with_weight(sums: torch.Tensor, has_weight: torch.Tensor) -> torch.Tensor:
    """Find in each block the first place with weight whose running sum is above 0, or the last one with weight.

    Args:
        sums: `[n, WIDTH]` running sums.
        has_weight: `[n, WIDTH]` bool.
    """
    places = torch.arange(WIDTH, device=sums.device)
    first = torch.where(has_weight & (sums > 0), places, WIDTH).amin(1)
    last = torch.where(has_weight, places, 0).amax(1)
    return torch.where(first < WIDTH, first, last)


class MinTree(WideTree):
    """The least of one number per place; places that were never written count as infinite."""

    NEUTRAL = inf
    _along = staticmethod(torch.amin)

    def at_most(self, bound: float) -> torch.Tensor:
        """List the places whose number is at most `bound`, ascending; blocks without one are not looked into."""
        found = (self._levels[-1] <= bound).nonzero().squeeze(1)
        for level in reversed(self._levels[:-1]):
            is_in = level.view(-1, WIDTH).index_select(0, found) <= bound
            row, place = is_in.nonzero(as_tuple=True)
            found = (found.index_select(0, row) << _SHIFT).add_(place)
        return found


class MaxTree(WideTree):
    """The largest of one number per place; places that were never written count as minus infinite."""

    NEUTRAL = -inf
    _along = staticmethod(torch.amax)


class LeastWeight:
    """The least weight above 0 of a tree, exactly.

    It is known until a row that had it is written; then the blocks written since then are looked at again. A tree of
    least numbers would cost as much at every write as the sums do.

    Args:
        tree: A tree that was not written to, or is cleared.
    """

    @lasting
    def __init__(self, tree: SumTree) -> None:
        self._blocks = tree.blocks_view()
        self._own_weights = own(tree.leaves_view())
        #: Of each block the least weight above 0 when it was last looked at; 0 or inf if there was none.
        self._least = filled((len(self._blocks),), 0, torch.float64, tree.device)
        self._is_written = filled((len(self._blocks),), 0, torch.bool, tree.device)
        self._is_on_cpu = tree.device.type == "cpu"
        self._own_is_written = own(self._is_written)
        self._library = library(tree.device)
        self._value: float | None = inf

    def note(self, places: Any, old: Any, new: Any) -> None:
        """Note that `[n]` weights, n > 0, were `old` and that `new` were written, as `own` gives them."""
        if not self._is_on_cpu:
            return
        self._own_is_written[places >> _BLOCK_SHIFT] = True
        if self._value is None or float(self._library.minimum(old, new).min()) > self._value:
            return  # nearly always
        if bool(((old > 0) & (old <= self._value)).any()):
            self._value = None
        else:  # what is there now: `new` has also weights that were overwritten by later copies of a row
            self._value = min(self._value, float(least_positive(tensor_of(self._own_weights[places]))))

    def note_first(self, num_places: int) -> None:
        """Note that the first weights were written."""
        self._is_written[: -(-num_places // BLOCK)] = True
        self._value = None

    def value(self) -> Any:
        """Return the least weight above 0; inf if all are 0: a float on the CPU, elsewhere a tensor.

        There all weights are looked at, which is three launches; a look at what was written would be ten.
        """
        if not self._is_on_cpu:
            return least_positive(self._own_weights)
        if self._value is None:
            written = self._is_written.nonzero().squeeze(1)
            self._least[written] = least_positive(self._blocks.index_select(0, written))
            self._is_written[written] = False
            self._value = float(least_positive(self._least))
        return self._value


def least_positive(weights: torch.Tensor) -> torch.Tensor:
    """Return the least number above 0 along the last axis; inf where there is none."""
    return torch.where(weights > 0, weights, inf).amin(-1)
