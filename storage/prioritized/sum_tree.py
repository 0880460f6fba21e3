"""`SumTree`, `MinTree`, `MaxTree`: one number per row, reduced to the sum, minimum or maximum.

A tree has two levels: its numbers (the leaves), and the reduction of each block of leaves. A write
sets leaves and recomputes their blocks. No difference is added to a sum, so rounding errors do not
accumulate.

A sum is the last element of a running sum from left to right. Its result does not depend on the
vector width of the processor or the number of threads, unlike `torch.sum` and `np.add.reduce`.

A draw computes the running sum of all blocks, and the running sum of one block per draw. On other
devices than the CPU each block is one leaf, since one kernel computes the running sum of all
leaves.

Time of a sample and an update of `AdvancedReplayBuffer` with 10^6 rows, in batches of 32, 256 and
4096, in microseconds (one thread, shortest of many calls in one run):

    blocks of 32 leaves (two levels)                 288    385    1722
    blocks of 64 leaves (two levels)                 273    413    3020
    three levels of 16, with a search per draw       239    331    1530

Three levels are not used, since the faster tree needed 150 lines more.

Small calls take as long as their number of operations. So on the CPU the code uses numpy arrays
(`own` in `core/memory.py`). Variables named `own_...` share the memory of the tensor.
"""

from __future__ import annotations

from math import inf, nextafter
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from ..core import arguments
from ..core.memory import filled, last_copies, lasting, own, tensor_of

#: Minimum number of leaves per block on the CPU.
_MIN_WIDTH = 16
#: Maximum ratio of the number of blocks to the number of leaves in a block, on the CPU. A call sums
#: all blocks once, but the leaves of one block for each draw. So the ratio may be large.
_BLOCKS_PER_LEAF = 1 << 10
#: Maximum number of cached working memories. There is one for each number of indices per call.
_MAX_MEMORIES = 4
#: Draws on a device use this share of the sum of weights. The rounded random numbers then stay
#: below the sum.
_ALMOST_ALL = 1 - 2.0**-50


class DrawnWeights(NamedTuple):
    """Indices that a `SumTree` has drawn, and their weights.

    Attributes:
        places: `[n]` int64, drawn indices: an array on the CPU, else a tensor.
        weights: `[n]` float64, weights of the indices: an array on the CPU, else a tensor. On a
            device, the weight is 0 where an index of weight 0 was replaced; see `SumTree`.
        least: Least weight above 0 of the tree: a float on the CPU, else a 0-d tensor.
    """

    places: Any
    weights: Any
    least: Any


class _Memory:
    """Memory for `num` draws or writes, reused by calls of the same size.

    Each tensor has an array over the same memory, since their conversion takes 4 microseconds. The
    allocation of fresh memory takes longer than the computation.

    Attributes:
        rows: `[num, width]` float64, the leaves of one block per draw or write.
        points: `[num]` float64, a random number per draw.
        numbers: `[num]` float64, the numbers 0, 1, ..., `num - 1`.
    """

    @lasting
    def __init__(self, num: int, width: int) -> None:
        self.rows = torch.empty((num, width), dtype=torch.float64, device="cpu")
        self.own_rows = self.rows.numpy()
        self.points = torch.empty(num, dtype=torch.float64, device="cpu")
        self.own_points = self.points.numpy()
        self.numbers = np.arange(num, dtype=np.float64)


class BlockTree:
    """Float64 numbers by index, and the reduction of each block of numbers.

    Args:
        capacity: Number of numbers, which are the leaves.
        device: Device of the numbers.

    Attributes:
        width: Number of leaves per block.

    Indices are int64 tensors on `device`. The caller ensures that they are in range.
    """

    #: Value of leaves that were never written: the neutral element of the operation.
    NEUTRAL: ClassVar[float]

    @lasting
    def __init__(self, capacity: int, device: torch.device | str = "cpu") -> None:
        self.capacity = arguments.whole("capacity", capacity, 1)
        self.device = arguments.device("device", device)
        self._is_on_cpu = self.device.type == "cpu"
        num_leaves = self.capacity
        self.width = 1
        if self._is_on_cpu:
            self.width = _MIN_WIDTH
            while self.width**2 * _BLOCKS_PER_LEAF < num_leaves:
                self.width *= 2
        else:
            # An unused leaf: callers write to it to skip an entry without waiting for the device.
            num_leaves += 1
        self._num_blocks = -(-num_leaves // self.width)
        self._leaves = self._filled(self._num_blocks * self.width)
        self._blocks = self._leaves.view(-1, self.width)
        #: Reduction of each block, `[num_blocks]`.
        self._tops = self._leaves if self.width == 1 else self._filled(self._num_blocks)
        self._own_leaves = own(self._leaves)
        self._own_blocks = own(self._blocks)
        self._own_tops = own(self._tops)
        self._memories: dict[int, _Memory] = {}
        #: Tensors of the numbers 0, 1, 2 and so on. Each tensor is at least twice as long as the
        #: previous tensor. All tensors are kept, since other streams may still read them.
        self._numbers = [torch.arange(128, device=self.device)]

    def _filled(self, num: int) -> torch.Tensor:
        return filled((num,), self.NEUTRAL, torch.float64, self.device)

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
        return self._leaves[: self.capacity]

    def read(self, index: torch.Tensor) -> torch.Tensor:
        """Return a copy of the leaves at `[n]` indices."""
        return self._leaves.index_select(0, index)

    def write(self, index: torch.Tensor, values: torch.Tensor) -> None:
        """Set the leaves at `[n]` indices to `[n]` values. The last value of an index stays."""
        self.put(own(index), last_copies(own(index), own(values), self.capacity))

    def put(self, index: Any, values: Any) -> None:
        """Set the leaves at `[n]` indices to `[n]` values, or all to one number.

        This is `write` without conversions. Indices and values are arrays on the CPU, else tensors.
        On other devices than the CPU, equal indices must have equal values.
        """
        if self._is_on_cpu or isinstance(values, torch.Tensor):
            self._own_leaves[index] = values
        else:
            self._leaves.index_fill_(0, index, values)  # An assignment would block the host.
        if self.width == 1:
            return
        if len(index) >= self._num_blocks:  # Recomputing all blocks takes less time.
            self._set_tops(slice(None), self._blocks)
        else:
            block = index // self.width
            self._set_tops(block, self._gathered(block).rows)

    def clear(self) -> None:
        """Set all leaves to the neutral value."""
        self._leaves.fill_(self.NEUTRAL)
        self._tops.fill_(self.NEUTRAL)

    def rebuild(self, values: torch.Tensor) -> None:
        """Set the first n leaves to `[n]` values, and recompute their blocks."""
        self._leaves[: len(values)].copy_(values)
        if self.width > 1:
            first_blocks = slice(-(-len(values) // self.width))
            self._set_tops(first_blocks, self._blocks[first_blocks])

    def reduce(self, start: int = 0, stop: int | None = None) -> float:
        """Return the reduction of the leaves `start:stop`; the neutral value for an empty range."""
        stop = self.capacity if stop is None else stop
        first = -(-start // self.width)
        # The last block may have padding behind the last leaf, which does not change the result.
        last = self._num_blocks if stop == self.capacity else stop // self.width
        if first > last:
            parts = self._leaves[start:stop]
        else:
            head = self._leaves[start : first * self.width]
            tail = self._leaves[last * self.width : stop]
            parts = torch.cat([head, self._tops[first:last], tail])
        return float(self._reduced(parts.unsqueeze(0))[0]) if len(parts) else self.NEUTRAL

    def check_valid(self) -> tuple[bool, str]:
        """Check that the stored reduction of every block is correct.

        Returns whether all numbers are correct, and a description of the first wrong number.
        """
        if bool((self._leaves[self.capacity :] != self.NEUTRAL).any()):
            return False, "a leaf behind the last is not neutral"
        wrong = tensor_of(self._reduced(self._blocks) != self._own_tops).nonzero()
        if len(wrong):
            return False, f"the reduction of block {int(wrong[0])} is not that of its leaves"
        return True, ""

    @staticmethod
    def _reduced(rows: torch.Tensor) -> Any:
        """Reduce each of `[n, m]` rows in a fixed order. Returns an array on the CPU."""
        raise NotImplementedError

    def _set_tops(self, block: Any, rows: torch.Tensor) -> None:
        """Recompute and store the reductions of some blocks after their leaves changed.

        Args:
            block: `[n]` indices of the blocks, or a slice.
            rows: `[n, width]`, the leaves of each of these blocks.
        """
        self._own_tops[block] = self._reduced(rows)

    def _gathered(self, block: Any) -> _Memory:
        """Copy the leaves of `[n]` blocks to reused memory and return it."""
        memory = self._memory(len(block))
        # With numpy's default mode "raise", `take` would copy through a temporary buffer.
        self._own_blocks.take(block, 0, memory.own_rows, "clip")
        return memory

    def _memory(self, num: int) -> _Memory:
        memory = self._memories.get(num)
        if memory is None:
            if len(self._memories) >= _MAX_MEMORIES:
                self._memories.clear()
            memory = self._memories[num] = _Memory(num, self.width)
        return memory


class SumTree(BlockTree):
    """Tree of weights >= 0 by index, and draws of indices in proportion to the weights.

    An index of weight 0 is never drawn, in spite of rounding. On the CPU the running sum grows only
    at weights above 0, so the first running sum above a mass is at such a weight. A device rounds
    each running sum separately, so an index of weight 0 may seem to add mass there. Such an index
    is replaced by the index of the least weight above 0.
    """

    NEUTRAL = 0.0

    @lasting
    def __init__(self, capacity: int, device: torch.device | str = "cpu") -> None:
        super().__init__(capacity, device)
        #: Running sums of the blocks, after a leading 0.
        self._sums = torch.zeros(self._num_blocks + 1, dtype=torch.float64, device=self.device)
        self._own_sums = own(self._sums)
        self._running = self._sums[1:]
        self._own_running = own(self._running)
        #: Least weight above 0 of each block, inf if all are 0. Not used on devices.
        num_least = self._num_blocks if self._is_on_cpu else 0
        self._least_of_blocks = own(filled((num_least,), inf, torch.float64, self.device))
        #: Least weight above 0 of all blocks; None if it must be computed from the blocks again.
        self._least: float | None = inf

    def total(self) -> Any:
        """Return the sum of all weights: a float on the CPU, else a 0-d tensor."""
        torch.cumsum(self._tops, 0, out=self._running)
        return float(self._own_sums[-1]) if self._is_on_cpu else self._sums[-1]

    def least(self) -> Any:
        """Return the least weight above 0, inf if all are 0: a float on the CPU, else a 0-d tensor.

        On other devices all weights are read.
        """
        if not self._is_on_cpu:
            return least_positive(self.leaves_view())
        if self._least is None:
            self._least = float(self._least_of_blocks.min())
        return self._least

    def clear(self) -> None:
        super().clear()
        self._least_of_blocks[:] = inf
        self._least = None

    def find(self, masses: torch.Tensor) -> torch.Tensor | None:
        """Return the indices at which the running sum of weights first exceeds `[n]` masses.

        The masses are in [0, total]. Returns None if all weights are 0.
        """
        total = float(self.total())
        if total <= 0:
            return None
        masses = masses.clamp(max=nextafter(total, 0))
        if self._is_on_cpu:
            return tensor_of(self._located(masses.numpy()))
        return tensor_of(self._located_on_device(masses).places)

    def draw(self, num_draws: int, generator: torch.Generator) -> torch.Tensor | None:
        """Draw one index from each of `num_draws` intervals of equal mass: `[num_draws]`, sorted.

        Each index is drawn `num_draws * weight / total` times on average. The number of one call
        differs from that average by less than 2 (stratified sampling, Schaul et al. 2016, B.2.1).
        Returns None if all weights are 0.
        """
        drawn = self.draw_weights(num_draws, generator)
        return None if drawn is None else tensor_of(drawn.places)

    def draw_weights(
        self, num_draws: int, generator: torch.Generator, least: torch.Tensor | None = None
    ) -> DrawnWeights | None:
        """Draw one index from each of `num_draws` intervals of equal mass, and return weights too.

        The distribution is that of `draw`. On the CPU, returns None if all weights are 0. On other
        devices the host does not wait, and the result is never None. If all weights are 0, the
        least weight is then inf, and the indices are arbitrary.

        Args:
            num_draws: Number of draws.
            generator: Random generator on the device of the tree.
            least: On a device, a 0-d float64 tensor that receives the least weight above 0; None
                allocates it.
        """
        total = self.total()
        if not self._is_on_cpu:
            width = _ALMOST_ALL / max(1, num_draws)
            points = torch.empty(num_draws, dtype=torch.float64, device=self.device)
            points.uniform_(0, width, generator=generator)
            points.add_(self.numbers(num_draws), alpha=width)
            return self._located_on_device(points.mul_(total), least)
        if total <= 0:
            return None
        memory = self._memory(num_draws)
        memory.points.uniform_(generator=generator)
        masses = memory.own_points
        masses += memory.numbers
        masses *= total / max(1, num_draws)
        places = self._located(np.minimum(masses, nextafter(total, 0)))
        return DrawnWeights(places, self._own_leaves[places], self.least())

    def _located(self, masses: Any) -> Any:
        """Find, on the CPU, the index at which the running sum of weights exceeds each mass.

        Every mass is below the sum of all weights. The running sum of a block starts with the sum
        of all blocks before it. Its last element equals the sum including the block exactly, so at
        least one element is above the mass.
        """
        block = self._own_running.searchsorted(masses, "right")
        memory = self._gathered(block)
        torch.cumsum(memory.rows, 1, out=memory.rows)
        memory.own_rows += self._own_sums[block][:, None]
        return block * self.width + (memory.own_rows > masses[:, None]).argmax(1)

    def _located_on_device(
        self, masses: torch.Tensor, least: torch.Tensor | None = None
    ) -> DrawnWeights:
        """Find, on a device, the index at which the running sum of weights exceeds each mass.

        Every mass is below the sum of all weights.
        """
        leaves = self.leaves_view()
        # Without the last running sum in the search, the result is a valid index for any mass.
        places = torch.searchsorted(self._running[: self.capacity - 1], masses, right=True)
        least = leaves.new_empty(()) if least is None else least
        place = places.new_empty(())
        torch.min(torch.threshold(leaves, 0.0, inf), 0, out=(least, place))
        weights = leaves.index_select(0, places)
        return DrawnWeights(torch.where(weights > 0, places, place), weights, least)

    @staticmethod
    def _reduced(rows: torch.Tensor) -> Any:
        return own(rows.cumsum(1))[:, -1]

    def _set_tops(self, block: Any, rows: torch.Tensor) -> None:
        super()._set_tops(block, rows)
        self._least_of_blocks[block] = least_positive(rows).numpy()
        self._least = None


class MinTree(BlockTree):
    """Tree of numbers that returns their minimum. Numbers that were never written are inf."""

    NEUTRAL = inf

    def at_most(self, bound: float) -> torch.Tensor:
        """Return the indices of numbers <= `bound`, ascending. Skips blocks of larger numbers."""
        block = (self._tops <= bound).nonzero().squeeze(1)
        is_in = self._blocks.index_select(0, block) <= bound
        row, position = is_in.nonzero(as_tuple=True)
        return block.index_select(0, row).mul_(self.width).add_(position)

    @staticmethod
    def _reduced(rows: torch.Tensor) -> Any:
        return own(rows.amin(1))


class MaxTree(BlockTree):
    """Tree of numbers that returns their maximum. Numbers that were never written are -inf."""

    NEUTRAL = -inf

    @staticmethod
    def _reduced(rows: torch.Tensor) -> Any:
        return own(rows.amax(1))


def least_positive(weights: torch.Tensor) -> torch.Tensor:
    """Return the least number above 0 along the last axis; inf if no number is above 0."""
    return torch.threshold(weights, 0.0, inf).amin(-1)
