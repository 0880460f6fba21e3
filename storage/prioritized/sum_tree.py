"""`SumTree`, `MinTree`, `MaxTree`: one number per row, reduced to the sum, minimum or maximum.

`LeastWeight` is the least number above 0 of a `SumTree`.

A write sets leaves and recomputes every block above them. No difference is added to a sum, so
rounding errors do not accumulate. A sum is the last element of a running sum from left to right.
Its result does not depend on the vector width of the processor or the number of threads, unlike
`torch.sum` and `np.einsum`.

Blocks are 16 numbers wide. Levels are added until the top has at most 2**12 numbers. Each draw
computes the running sum of the top. Time of a sample and an update of `AdvancedReplayBuffer` (10^6
rows, batches of 256 / 4096, one thread, microseconds), by the size of the top:

    62500 (one level)  277 / 1498    3907 (two)  206 / 1217    245 (three)  213 / 1322

A draw and a write of the tree without the buffer took 86 / 539. A binary heap in numpy took 217 /
1020. Rejection sampling took 51 / 270 with even weights and 382 / 10200 with skewed weights; its
draws are independent instead of stratified.

Most time is spent on the number of calls, not on arithmetic. So on the CPU the code uses numpy
arrays (`own` in `core/memory.py`). Variables named `own_...` share the memory of the tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf, nextafter
from typing import Any, ClassVar

import numpy as np
import torch

from ..core import arguments
from ..core.memory import filled, last_copies, lasting, library, own, take_rows, tensor_of

#: Numbers per block; a block is reduced to one number of the level above.
WIDTH = 16
_SHIFT = WIDTH.bit_length() - 1
#: Numbers per piece of leaves in `blocks_view`. The size of each level is a multiple of it.
BLOCK = 128
_BLOCK_SHIFT = BLOCK.bit_length() - 1
#: Factor that adds all bytes of a word into its highest byte, and shift that extracts that byte.
_EVERY_BYTE, _TOP_BYTE = np.uint64(0x0101010101010101), np.uint64(56)
#: Maximum size of the top level on the CPU, in numbers.
MAX_TOP = 1 << 12
#: Maximum size of the top level on other devices, where a running sum takes one kernel launch.
_MAX_TOP_ON_DEVICE = 1 << 22
#: Maximum number of sizes of calls (draws, updates, additions of rows) whose memory is kept.
_MAX_MEMORIES = 4
#: Minimum number of draws for `_search_strata`, which takes a third of the time of a search.
_MANY_POINTS = 1 << 10
#: Share of the total mass from which a device draws, so that no rounded mass reaches the total.
_ALMOST_ALL = 1 - 2.0**-50


class _Memory:
    """Scratch memory for `num` blocks, reused by calls of the same size.

    The allocation of fresh memory takes longer than the computation.
    """

    @lasting
    def __init__(self, num: int, device: torch.device) -> None:
        self.num = num
        self.rows, self.sums = torch.empty((2, num, WIDTH), dtype=torch.float64, device=device)
        self.own_rows = own(self.rows)
        self.own_sums = own(self.sums)
        self.first_column = self.own_rows[:, 0]
        self.last_sums = self.own_sums[:, -1]
        self.flat_sums = self.own_sums.reshape(-1)
        #: Offset of each row in `flat_sums`.
        self.starts = own(torch.arange(0, num * WIDTH, WIDTH, device=device))
        #: A random number for each draw, and the numbers 0, 1, ..., `num - 1`.
        self.points = torch.empty(num, dtype=torch.float64, device=device)
        self.own_points = own(self.points)
        self.numbers = own(torch.arange(num, dtype=torch.float64, device=device))
        self._is_below = np.empty((num, WIDTH), np.bool_)
        self._last_is_below = self._is_below[:, -1]
        self._first_eight, self._second_eight = self._is_below.view(np.uint64).T
        self._count = np.empty(num, np.int64)
        self._words = self._count.view(np.uint64)

    def first_above_zero(self) -> Any:
        """Return the position of the first sum above 0 in each row, else `WIDTH - 1`: `[num]`.

        The flags are bytes, and one multiplication adds eight of them. A search has branches that
        processors mispredict: with it a draw of 4096 takes 1.7 times as long.
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
    """Tree over float64 numbers by index. Each level reduces blocks of `WIDTH` numbers to one.

    Args:
        capacity: Number of numbers, which are the leaves.
        device: Device of the numbers.

    Indices are int64 tensors on `device`. The caller ensures that they are in range.
    """

    #: Value of leaves that were never written: the neutral element of the operation.
    NEUTRAL: ClassVar[float]
    _along: ClassVar[Callable[..., torch.Tensor]]

    @lasting
    def __init__(self, capacity: int, device: torch.device | str = "cpu") -> None:
        self.capacity = arguments.whole("capacity", capacity, 1)
        self.device = arguments.device("device", device)
        # Other devices have one more leaf, the target of writes that must change no number.
        sizes = [capacity if self.device.type == "cpu" else capacity + 1]
        max_top = MAX_TOP if self.device.type == "cpu" else _MAX_TOP_ON_DEVICE
        while sizes[-1] > max_top:
            sizes.append(-(-sizes[-1] // WIDTH))
        #: Size of each level, from the leaves to the top, rounded up to a multiple of `BLOCK`.
        places = [-(-size // BLOCK) * BLOCK for size in sizes]
        self._levels = [
            filled((size,), self.NEUTRAL, torch.float64, self.device) for size in places
        ]
        self._own_levels = [own(level) for level in self._levels]
        self._library = library(self.device)
        self._is_on_cpu = self.device.type == "cpu"
        #: Blocks `[num, WIDTH]` of each level except the top, from the leaves upward.
        self._blocks = [level.reshape(-1, WIDTH) for level in self._own_levels[:-1]]
        self._steps_up = list(zip(self._blocks, self._own_levels[1:], strict=True))
        self._memories: dict[int, _Memory] = {}
        #: Tensors of the numbers 0, 1, ..., each at least twice as long as the previous tensor. All
        #: are kept, since other streams may still read them.
        self._numbers = [torch.arange(BLOCK, device=self.device)]

    def numbers(self, num: int) -> torch.Tensor:
        """Return a tensor of the numbers 0, 1, ..., `num - 1`, which callers must not change."""
        if len(self._numbers[-1]) < num:
            self._add_numbers(num)
        return self._numbers[-1][:num]

    @lasting
    def _add_numbers(self, num: int) -> None:
        num = max(num, 2 * len(self._numbers[-1]))
        self._numbers.append(torch.arange(num, device=self.device))

    def leaves_view(self) -> torch.Tensor:
        """Return a view of all leaves, `[capacity]` float64. Callers must not write to the view."""
        return self._levels[0][: self.capacity]

    def blocks_view(self) -> torch.Tensor:
        """Return the leaves as a view `[num, BLOCK]`. Entries after the last leaf are neutral."""
        return self._levels[0].view(-1, BLOCK)

    def read(self, index: torch.Tensor) -> torch.Tensor:
        """Return a copy of the leaves at `[n]` indices."""
        return self._levels[0].index_select(0, index)

    def write(self, index: torch.Tensor, values: torch.Tensor) -> None:
        """Set the leaves at `[n]` indices to `[n]` values. The last value of an index stays."""
        self.exchange(own(index), last_copies(own(index), own(values), self.capacity))

    def put(self, index: Any, values: Any) -> None:
        """Set the leaves at `[n]` indices to `[n]` values. Equal indices must have equal values."""
        self._own_levels[0][index] = values
        self._refresh(index)

    def exchange(self, index: Any, values: Any) -> Any:
        """Set the leaves at `[n]` indices, as `put` or to one number. Return the old numbers."""
        leaves = self._own_levels[0]
        before = leaves[index]
        if self._is_on_cpu or isinstance(values, torch.Tensor):
            leaves[index] = values
        else:
            leaves.index_fill_(0, index, values)  # `leaves[index] = number` would block the host.
        self._refresh(index)
        return before

    def fill(self, index: torch.Tensor, value: float) -> None:
        """Set the leaves at `[n]` indices to one number."""
        self.exchange(own(index), value)

    def clear(self) -> None:
        """Set all leaves to the neutral value."""
        for level in self._levels:
            level.fill_(self.NEUTRAL)

    def rebuild(self, values: torch.Tensor) -> None:
        """Set the first n leaves to `[n]` values and recompute the levels above."""
        num = len(values)
        self._levels[0][:num].copy_(values)
        for blocks, above in self._steps_up:
            num = -(-num // WIDTH)
            above[:num] = self._reduced(blocks[:num])

    def reduce(self, start: int = 0, stop: int | None = None) -> float:
        """Return the reduction of the leaves `start:stop`; the neutral value for an empty range."""
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
        """Check that every number above the leaves is the reduction of its block.

        Returns whether all numbers are correct, and a description of the first wrong number.
        """
        for level, (blocks, above) in enumerate(self._steps_up):
            wrong = tensor_of(self._reduced(blocks) != above[: len(blocks)]).nonzero()
            if len(wrong):
                return False, f"block {int(wrong[0])} of level {level} is not what lies below it"
        return True, ""

    def _reduced(self, blocks: Any) -> Any:
        """Return the reduction of each block `[n]`, computed in a fixed order."""
        return own(self._along(tensor_of(blocks), 1))

    def _refresh(self, index: Any) -> None:
        """Recompute the numbers above the leaves at `[n]` indices. Indices may be repeated."""
        for blocks, above in self._steps_up:
            index = index >> _SHIFT
            if len(index) >= len(blocks):  # The reduction of all blocks is less work.
                above[: len(blocks)] = self._reduced(blocks)
            else:
                memory = self._memory_for(len(index))
                take_rows(blocks, index, memory.own_rows)
                above[index] = self._reduced_rows(memory)

    def _reduced_rows(self, memory: _Memory) -> Any:
        """Return the sum or minimum of each block of weights in `memory`."""
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
    """Tree of weights >= 0 by index, and draws of indices in proportion to the weights.

    An index of weight 0 is never drawn, in spite of rounding. A device rounds each running sum
    separately, so an index of weight 0 may seem to add mass there. Such an index is replaced by the
    index of the least weight above 0.
    """

    NEUTRAL = 0.0
    _along = staticmethod(_last_running_sum)

    @lasting
    def __init__(self, capacity: int, device: torch.device | str = "cpu") -> None:
        super().__init__(capacity, device)
        #: Running sums of the top, after a leading 0.
        self._sums = torch.zeros(len(self._levels[-1]) + 1, dtype=torch.float64, device=self.device)
        self._top_sums = self._sums[1:]
        self._own_sums = own(self._sums)
        self._own_top_sums = own(self._top_sums)
        #: Blocks of each level except the top, and the same numbers as one flat level, from the top
        #: down.
        self._steps_down = list(zip(self._blocks, self._own_levels[:-1], strict=True))[::-1]

    def find(self, masses: torch.Tensor) -> torch.Tensor | None:
        """Return the indices at which the running sum of weights first exceeds `[n]` masses.

        The masses are in [0, total]. Returns None if all weights are 0.
        """
        total = float(self._add_up())
        if total <= 0:
            return None
        masses = own(masses.clamp(max=nextafter(total, 0)))
        places = self._descend(self._search(masses), masses, is_careful=True)
        return tensor_of(places) if self._is_on_cpu else self._with_weight(places)[0]

    def draw(self, num_draws: int, generator: torch.Generator) -> torch.Tensor | None:
        """Draw one index from each of `num_draws` intervals of equal mass: `[num_draws]`, sorted.

        Each index is drawn `num_draws * weight / total` times on average. The number of one call
        differs from that average by less than 2 (stratified sampling, Schaul et al. 2016, B.2.1).
        Returns None if all weights are 0.
        """
        drawn = self.draw_weights(num_draws, generator)
        return None if drawn is None else tensor_of(drawn[0])

    def draw_weights(self, num_draws: int, generator: torch.Generator) -> tuple[Any, Any] | None:
        """Draw as `draw` does. Return indices and weights: arrays on the CPU, else tensors."""
        if not self._is_on_cpu:
            return self.draw_on_device(num_draws, generator)[:2]
        total = self._add_up()
        if total <= 0:
            return None
        memory = self._memory_for(num_draws)
        memory.points.uniform_(generator=generator)
        masses = memory.own_points
        masses += memory.numbers
        masses *= total / max(1, num_draws)
        if num_draws and masses[-1] >= total:  # Masses are ascending.
            masses = masses.clip(max=nextafter(total, 0))
        is_long = num_draws >= _MANY_POINTS
        node = self._search_strata(masses) if is_long else self._search(masses)
        places = self._descend(node, masses, is_careful=False)
        weights = self._own_levels[0][places]
        # `count_nonzero` takes half the time of a check by `min`.
        if np.count_nonzero(weights) < num_draws:
            places = self._descend(self._search(masses), masses, is_careful=True)
            weights = self._own_levels[0][places]
        return places, weights

    def draw_on_device(
        self, num_draws: int, generator: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Draw as `draw` does on a device other than the CPU. The host does not wait.

        Returns:
            Indices and their weights, `[num_draws]`, and the least weight above 0. A replaced index
            has the weight 0. If all weights are 0, the least weight is inf, and the indices are
            arbitrary.
        """
        total = self._add_up()
        width = _ALMOST_ALL / max(1, num_draws)
        masses = torch.empty(num_draws, dtype=torch.float64, device=self.device)
        masses.uniform_(0, width, generator=generator)
        masses.add_(self.numbers(num_draws), alpha=width).mul_(total)
        places = self._descend(self._search(masses), masses, is_careful=False)
        return self._with_weight(places)

    def _with_weight(self, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Replace indices of weight 0. Return indices, their old weights and the least weight."""
        leaves = self._levels[0][: self.capacity]
        least, place = torch.threshold(leaves, 0.0, inf).min(0)
        weights = leaves.index_select(0, places)
        return torch.where(weights > 0, places, place), weights, least

    def _reduced_rows(self, memory: _Memory) -> Any:
        torch.cumsum(memory.rows, 1, out=memory.sums)
        return memory.last_sums

    def total(self) -> Any:
        """Return the sum of all weights: a float on the CPU, else a 0-d tensor."""
        return self._add_up()

    def _add_up(self) -> Any:
        """Compute the running sums of the top; return the sum of all weights as `total` does."""
        torch.cumsum(self._levels[-1], 0, out=self._top_sums)
        return float(self._own_sums[-1]) if self._is_on_cpu else self._sums[-1]

    def _search(self, masses: Any) -> Any:
        """Return the top position of each mass: the number of running sums <= the mass."""
        sums = self._own_top_sums
        if isinstance(sums, torch.Tensor):
            # The last position is the result if no other matches.
            last = (len(sums) if self._steps_down else self.capacity) - 1
            return torch.searchsorted(sums[:last], masses, right=True)
        return sums.searchsorted(masses, "right")

    def _search_strata(self, masses: Any) -> Any:
        """Return the result of `_search`, up to rounding, for one mass in each of equal intervals.

        A running sum is above all masses of earlier intervals and below all masses of later
        intervals. So only the mass in its own interval is compared. Runs on the CPU only.
        """
        num = len(masses)
        sums = self._own_top_sums
        first = np.minimum(sums / sums[-1] * num, num - 1).astype(np.int64)
        first += masses[first] < sums
        return np.bincount(first, minlength=num + 1)[:num].cumsum()

    def _descend(self, node: Any, masses: Any, is_careful: bool) -> Any:
        """Return the indices of the leaves of masses, starting at the positions `node` of the top.

        In each block the position of a mass is the first running sum above the remaining mass.
        Running sums start at minus the remaining mass, so they are compared with 0. By rounding,
        all sums may be below 0, or the first may be above 0. Then the last or the first position is
        the result, even if its weight is 0. With `is_careful`, which has an effect only on the CPU,
        a position with a weight above 0 is the result.
        """
        if not self._steps_down:
            return node
        left = self._own_sums[node]
        # `left` is minus the remaining mass, and thus below 0.
        left -= masses
        memory = self._memory_for(len(masses))
        first_column = memory.first_column
        rows = memory.rows
        sums = memory.sums
        for blocks, level in self._steps_down:
            take_rows(blocks, node, memory.own_rows)
            first_column += left
            torch.cumsum(rows, 1, out=sums)
            place = memory.first_above_zero()
            if is_careful and self._is_on_cpu:
                is_behind = memory.last_sums <= 0
                has_weight = tensor_of(blocks[node[is_behind]]) > 0
                place[is_behind] = own(
                    (has_weight * torch.arange(WIDTH, device=self.device)).amax(1)
                )
            node <<= _SHIFT
            node += place
            if level is not self._own_levels[0]:
                place += memory.starts
                left = memory.flat_sums[place]
                left -= level[node]
                if is_careful and self._is_on_cpu:
                    left[left > 0] = 0
        return node


class MinTree(WideTree):
    """A tree of minima; numbers that were never written are inf."""

    NEUTRAL = inf
    _along = staticmethod(torch.amin)

    def at_most(self, bound: float) -> torch.Tensor:
        """Return the indices of numbers <= `bound`, ascending. Skips blocks of larger numbers."""
        found = (self._levels[-1] <= bound).nonzero().squeeze(1)
        for level in reversed(self._levels[:-1]):
            is_in = level.view(-1, WIDTH).index_select(0, found) <= bound
            row, place = is_in.nonzero(as_tuple=True)
            found = (found.index_select(0, row) << _SHIFT).add_(place)
        return found


class MaxTree(WideTree):
    """A tree of maxima; numbers that were never written are -inf."""

    NEUTRAL = -inf
    _along = staticmethod(torch.amax)


class LeastWeight:
    """The exact least weight above 0 of a tree.

    The value stays known until an index with the least weight is written. Then the blocks that were
    written since the last computation are read again. A `MinTree` would double the cost of a write.

    Args:
        tree: A new or cleared tree.
    """

    @lasting
    def __init__(self, tree: SumTree) -> None:
        self._is_on_cpu = tree.device.type == "cpu"
        self._blocks = tree.blocks_view()
        #: Other devices read all weights and need no memory per block.
        num_blocks = len(self._blocks) if self._is_on_cpu else 0
        self._own_weights = own(tree.leaves_view())
        #: Least weight above 0 of each block at its last computation; 0 or inf for none.
        self._least = filled((num_blocks,), 0, torch.float64, tree.device)
        self._is_written = filled((num_blocks,), 0, torch.bool, tree.device)
        self._own_is_written = own(self._is_written)
        self._library = library(tree.device)
        self._value: float | None = inf

    def note(self, places: Any, old: Any, new: Any) -> None:
        """Record a write at `[n]` indices, n > 0: the weights `old` were replaced by `new`."""
        if not self._is_on_cpu:
            return
        self._own_is_written[places >> _BLOCK_SHIFT] = True
        if self._value is None or float(self._library.minimum(old, new).min()) > self._value:
            return  # Usually, the least weight stays the same.
        if bool(((old > 0) & (old <= self._value)).any()):
            self._value = None
        # `new` may contain weights that a later copy of the same row overwrote: read the leaves.
        else:
            self._value = min(
                self._value, float(least_positive(tensor_of(self._own_weights[places])))
            )

    def note_first(self, num_places: int) -> None:
        """Record a write of the first `num_places` weights."""
        if not self._is_on_cpu:
            return
        self._is_written[: -(-num_places // BLOCK)] = True
        self._value = None

    def value(self) -> Any:
        """Return the least weight above 0, inf if all are 0: a float on the CPU, else a 0-d tensor.

        On other devices all weights are read, which takes two kernel launches; reading only
        written blocks would take ten.
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
    """Return the least number above 0 along the last axis; inf if no number is above 0."""
    return torch.threshold(weights, 0.0, inf).amin(-1)
