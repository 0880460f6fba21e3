"""`PrioritizedRows`: priorities of a fixed number of rows, draws in proportion to them, importance weights.

One rule: a row's weight is priority ** alpha, or 0 if it may not be drawn; nothing else decides. What a row
holds, and why it may not be drawn, is not known here. Places and values come and go as `own` gives them.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any

import torch

from ..core import arguments
from ..core.memory import filled, lasting, library, own
from ..errors import UsageError
from .sum_tree import BLOCK, SumTree, last_copies

#: Sums of all weights stay below this, far from the largest float64.
_MAX_SUM = 1e300
#: The least importance weight, as float32, and the least weight of a priority above 0: rounding makes no 0 of them.
_LEAST_IMPORTANCE, _LEAST_WEIGHT = torch.finfo(torch.float32).tiny, torch.finfo(torch.float64).tiny
_BITS_OF_INF = int(torch.tensor(inf, dtype=torch.float64).view(torch.int64))
_BLOCK_SHIFT = BLOCK.bit_length() - 1


@dataclass(frozen=True)
class PriorityRule:
    """How priorities become probabilities and importance weights (Schaul et al. 2016, eq. 1 and section 3.4).

    Attributes:
        alpha: Exponent of priorities, >= 0; 0 draws uniformly.
        beta: Exponent of importance weights at the first draw, in [0, 1]; 1 corrects fully.
        anneal_step: Draws over which beta grows linearly to 1; 0 keeps it.
        eps: Added to every priority that is updated, so that none stays at 0.
    """

    alpha: float = 0.6
    beta: float = 0.4
    anneal_step: float = 1e5
    eps: float = 1e-5

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name == "beta":
                arguments.real("prioritize rows", name, value, "in [0, 1]", lambda beta: 0 <= beta <= 1)
            else:
                arguments.real("prioritize rows", name, value, ">= 0", lambda number: 0 <= number < inf)

    def weight(self, priority: float) -> float:
        """Give priority ** alpha; inf where float64 ends, above 0 for every priority above 0."""
        try:
            return max(float(priority**self.alpha), min(priority, _LEAST_WEIGHT))
        except OverflowError:
            return inf

    def beta_after(self, num_draws: int) -> float:
        """Give beta of the draw that follows `num_draws` draws."""
        share = min(1.0, num_draws / self.anneal_step) if self.anneal_step else 0.0
        return self.beta + (1.0 - self.beta) * share


class PrioritizedRows:
    """Priorities of `capacity` rows, none of which may be drawn at first.

    Args:
        capacity: Rows, numbered from 0.
        rule: How priorities are used.
        device: Where everything is.

    Attributes:
        priorities: `[capacity]` float64, as they were set.
        max_priority: The largest ever noted, 1 at first; what new rows get.
        num_draws: Draws so far, which decide `beta`.
    """

    @lasting
    def __init__(self, capacity: int, rule: PriorityRule, device: torch.device | str = "cpu") -> None:
        self.rule = rule
        self.device = torch.device(device)
        self.priorities = filled((capacity,), 0, torch.float64, self.device)
        self._own_priorities = own(self.priorities)
        self.max_priority = 1.0
        self.num_draws = 0
        self._weights = SumTree(capacity, self.device)
        self._least = _LeastWeight(self._weights)
        self._max_weight = _MAX_SUM / capacity

    @property
    def beta(self) -> float:
        """Exponent of the next draw's importance weights."""
        return self.rule.beta_after(self.num_draws)

    def weights(self, num_rows: int | None = None) -> torch.Tensor:
        """Copy the weights of the first rows, float64; None is all."""
        return self._weights.leaves_view()[:num_rows].clone()

    def has_mass(self, index: torch.Tensor | None = None) -> bool:
        """Tell whether one of `[n]` rows, or of all, may be drawn."""
        if index is None:
            return bool(self._least.value() < inf)
        return bool((self._weights.read(index) > 0).any())

    def checked(self, priorities: Any, num_rows: int) -> tuple[Any, float]:
        """Give `[num_rows]` float64 of priorities of any form, or of one for all; and the largest.

        Raises:
            UsageError: A priority is negative or not finite, too large to be summed, or there are not as many.
        """
        action = "take priorities"
        try:
            if isinstance(priorities, torch.Tensor):
                given = priorities.detach()
            else:  # torch would make float32 of Python's numbers, which are float64
                given = torch.as_tensor(priorities, dtype=torch.float64, device=self.device)
        except (TypeError, ValueError, RuntimeError) as cause:
            raise UsageError(action, "", "numbers", type(priorities).__name__) from cause
        if given.is_complex() or given.layout is not torch.strided:
            raise UsageError(action, "", "real numbers", f"{given.layout} {given.dtype}")
        given = given.to(self.device, torch.float64)
        found = own(given)
        if found.ndim and found.shape != (num_rows,):
            if given.numel() != num_rows:
                raise UsageError(action, "", f"{num_rows} of them", f"shape {list(found.shape)}")
            found = found.reshape(num_rows)
        if not num_rows:
            return own(torch.zeros(0, dtype=torch.float64, device=self.device)), 0.0
        least, largest = float(found.min()), float(found.max())
        if not 0 <= least <= largest < inf:  # a NaN spoils both
            wrong = next(x for x in found.reshape(-1).tolist() if not 0 <= x < inf)
            raise UsageError(action, "", "finite numbers >= 0", str(wrong))
        if self.rule.weight(largest + self.rule.eps) > self._max_weight:
            raise UsageError(action, "", "numbers whose weights can be summed", str(largest))
        return found if found.ndim else own(given.expand(num_rows)), largest

    def set(self, places: Any, priorities: Any) -> None:
        """Let `[n]` rows be drawn with `[n]` checked priorities; of a row named twice the last counts."""
        priorities = last_copies(places, priorities, self._weights.capacity)
        weights = priorities**self.rule.alpha
        if self.rule.alpha > 1:  # otherwise none is less than its priority below 1
            weights = weights.clip(min=priorities.clip(max=_LEAST_WEIGHT))
        self._own_priorities[places] = priorities
        self._least.note(places, self._weights.exchange(places, weights), weights)

    def fill(self, places: Any, priority: float) -> None:
        """Let `[n]` rows be drawn with one priority."""
        self._own_priorities[places] = priority
        self.weigh(places, self.rule.weight(priority))

    def weigh(self, places: Any, weight: float) -> None:
        """Give `[n]` rows one weight; with 0 they are not drawn any more."""
        old = self._weights.exchange(places, weight)
        self._least.note(places, old, old * 0 + weight)

    def update(self, places: Any, priorities: Any, largest: float) -> None:
        """Set rows to checked priorities plus eps, and note the largest."""
        self.set(places, priorities + self.rule.eps)
        self.max_priority = max(self.max_priority, largest)

    def clear(self) -> None:
        """Remove every row; the largest priority and the draws are forgotten too."""
        self._weights.clear()
        self._least.note_first(self._weights.capacity)
        self.max_priority, self.num_draws = 1.0, 0

    def draw(self, num_draws: int, generator: torch.Generator) -> tuple[Any, Any] | None:
        """Draw rows, one from each of `num_draws` intervals of equal mass.

        Returns:
            Rows `[num_draws]` int64, ascending, and their importance weights `[num_draws]` float64,
            (P / P_min) ** -beta in (0, 1]; None if no row may be drawn.
        """
        drawn = self._weights.draw_weights(num_draws, generator)
        return None if drawn is None else (drawn[0], self._importance(self._least.value(), drawn[1]))

    def draw_among(self, candidates: torch.Tensor, num_draws: int, generator: torch.Generator) -> Any:
        """Draw as `draw` does, but only among `[m]` rows; takes time in proportion to m."""
        if not self.has_mass(candidates):
            return None
        weights = self._weights.read(candidates)
        some = SumTree(len(weights), self.device)
        some.rebuild(weights)
        drawn = some.draw_weights(num_draws, generator)
        assert drawn is not None
        return own(candidates)[drawn[0]], self._importance(_least_positive(weights), drawn[1])

    def restore(self, weights: torch.Tensor, priorities: torch.Tensor) -> None:
        """Take over, as new rows, weights and priorities of the first rows, `[n]` each."""
        self._weights.rebuild(weights)
        self._least.note_first(len(weights))
        self.priorities[: len(priorities)].copy_(priorities)

    def check_valid(self) -> tuple[bool, str]:
        """Tell whether sums and least weight are those of the weights, and which is not."""
        least = _least_positive(self._weights.leaves_view())
        if self._least.value() != least:
            return False, f"the least weight is {least}, not {self._least.value()}"
        return self._weights.check_valid()

    def _importance(self, least: Any, weights: Any) -> Any:
        """Give the importance weights of a draw, which is counted, in (0, 1], also as float32."""
        # Not the other way round: that overflows where weights are hardly above 0.
        least = weights * 0 + least  # torch divides a number by multiplying with 1 / weights
        found = ((least / weights) ** self.beta).clip(min=_LEAST_IMPORTANCE)
        self.num_draws += 1
        return found


class _LeastWeight:
    """The least weight above 0 of a tree, exactly.

    It is known until a row that had it, or a lesser weight, is written; then the blocks written since then are looked
    at again. A tree of least numbers would cost as much at every write as the sums do.
    """

    @lasting
    def __init__(self, tree: SumTree) -> None:
        self._blocks = tree.blocks_view()
        #: How far the bits of each block's least weight are below those of inf, so that blank memory says inf.
        self._below_inf = filled((len(self._blocks),), 0, torch.int64, tree.device)
        self._is_written = filled((len(self._blocks),), 0, torch.bool, tree.device)
        self._own_is_written = own(self._is_written)
        self._library = library(tree.device)
        self._value: float | None = inf

    def note(self, places: Any, old: Any, new: Any) -> None:
        """Note that `[n]` weights were `old` and that `new` were written."""
        self._own_is_written[places >> _BLOCK_SHIFT] = True
        if self._value is None or not len(places) or float(self._library.minimum(old, new).min()) > self._value:
            return
        if bool(((old > 0) & (old <= self._value)).any()) or bool(((new > 0) & (new < self._value)).any()):
            self._value = None

    def note_first(self, num_rows: int) -> None:
        """Note that the first weights were written."""
        self._is_written[: -(-num_rows // BLOCK)] = True
        self._value = None

    def value(self) -> float:
        """Give the least weight above 0; inf if all are 0."""
        if self._value is None:
            written = self._is_written.nonzero().squeeze(1)
            rows = self._blocks.index_select(0, written)
            least = torch.where(rows > 0, rows, inf).amin(1)
            self._below_inf[written] = _BITS_OF_INF - least.view(torch.int64)
            self._is_written[written] = False
            self._value = float((_BITS_OF_INF - self._below_inf.amax()).view(torch.float64))
        return self._value


def _least_positive(weights: torch.Tensor) -> float:
    return float(torch.where(weights > 0, weights, inf).amin())
