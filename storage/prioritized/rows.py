"""`PrioritizedRows`: priorities of a fixed number of rows, draws in proportion to them, importance weights.

One rule: a row's weight is priority ** alpha, or 0 if it may not be drawn; nothing else decides.
What a row holds, and why one may not be drawn, is known elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, isfinite
from typing import Any

import numpy as np
import torch

from ..core.host_arrays import column_of, own, tensor_of
from ..core.modes import lasting
from ..errors import UsageError
from .least_weight import LeastWeight
from .sum_tree import SumTree

#: Sums of all weights stay below this, far from where float64 ends.
_MAX_SUM = 1e300
#: The least that rounding makes of an importance weight, as float32, and of a weight: 0 would not be learned, or drawn.
_LEAST_IMPORTANCE, _LEAST_WEIGHT = torch.finfo(torch.float32).tiny, torch.finfo(torch.float64).tiny


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
        wanted = {"alpha": ">= 0", "beta": "in [0, 1]", "anneal_step": ">= 0", "eps": ">= 0"}
        for name, words in wanted.items():
            value = getattr(self, name)
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and isfinite(value)
            if not is_number or value < 0 or (name == "beta" and value > 1):
                raise UsageError("prioritize rows", "", f"{name} {words}", repr(value))

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
        num_draws: Draws so far, which is how far beta has come.
    """

    @lasting
    def __init__(self, capacity: int, rule: PriorityRule, device: torch.device | str = "cpu") -> None:
        self.rule = rule
        self.device = torch.device(device)
        self.priorities = column_of(capacity, 0, torch.float64, self.device)
        self._own_priorities = own(self.priorities)
        self.max_priority = 1.0
        self.num_draws = 0
        self._weights = SumTree(capacity, self.device)
        self._least = LeastWeight(self._weights)
        self._max_weight = _MAX_SUM / capacity

    @property
    def capacity(self) -> int:
        return self._weights.capacity

    @property
    def beta(self) -> float:
        """Exponent of the next draw's importance weights."""
        return self.rule.beta_after(self.num_draws)

    @property
    def total(self) -> float:
        """Sum of all weights."""
        return self._weights.reduce()

    def has_mass(self, index: torch.Tensor) -> bool:
        """Tell whether one of `[n]` rows may be drawn."""
        return bool((self._weights.read(index) > 0).any())

    def weights(self) -> torch.Tensor:
        """Copy all weights, `[capacity]` float64."""
        return self._weights.leaves_view().clone()

    def checked_own(self, priorities: Any, num_rows: int) -> tuple[Any, float]:
        """Do what `checked` does; gives what `own` gives."""
        if self._is_plain(priorities):
            # What nearly all callers give, in few calls; what is wrong with it is said by `checked`.
            values = priorities.numpy().astype(np.float64)
            if values.shape == (num_rows,) and num_rows:
                largest = float(np.maximum.reduce(values))
                if np.minimum.reduce(values) >= 0 and self._fits(largest):
                    return values, largest
        found, largest = self.checked(priorities, num_rows)
        return own(found), largest

    def checked(self, priorities: Any, num_rows: int) -> tuple[torch.Tensor, float]:
        """Give `[num_rows]` float64 of what was handed in, and the largest; or raise, also for later overflow.

        Raises:
            UsageError: A priority is negative or not finite, too large to be summed, or there are not as many.
        """
        action = "take priorities"
        try:
            # Python's numbers are float64, which torch would make float32.
            dtype = None if isinstance(priorities, torch.Tensor) else torch.float64
            found = torch.as_tensor(priorities, dtype=dtype, device=self.device).detach()
        except (TypeError, ValueError, RuntimeError) as cause:
            raise UsageError(action, "", "numbers", type(priorities).__name__) from cause
        if found.is_complex() or found.layout is not torch.strided:
            raise UsageError(action, "", "real numbers", f"{found.layout} {found.dtype}")
        found = found.to(torch.float64)
        if found.dim() and found.numel() == num_rows:
            found = found.reshape(num_rows)
        if found.dim() and found.shape != (num_rows,):
            raise UsageError(action, "", f"{num_rows} of them", f"shape {list(found.shape)}")
        if not num_rows:
            return found.new_zeros(0), 0.0
        values = own(found)
        least, largest = float(values.min()), float(values.max())
        if not 0 <= least <= largest < inf:  # a NaN spoils both
            wrong = found[~((found >= 0) & (found < inf))].flatten()[0]
            raise UsageError(action, "", "finite numbers >= 0", str(float(wrong)))
        if not self._fits(largest):
            raise UsageError(action, "", "numbers whose weights can be summed", str(largest))
        return found if found.dim() else found.expand(num_rows), largest

    def set(self, index: torch.Tensor, priorities: torch.Tensor) -> None:
        """Let `[n]` rows be drawn with `[n]` checked priorities; of a row named twice the last counts."""
        if not index.shape[0]:
            return
        self._set(own(index), own(priorities))

    def fill(self, index: torch.Tensor, priority: float) -> None:
        """Let `[n]` rows be drawn with one priority."""
        weight = self.rule.weight(priority)
        self.priorities.index_fill_(0, index, priority)
        self._fill(index, weight)

    def update(self, index: torch.Tensor, priorities: torch.Tensor, largest: float) -> None:
        """Set rows to what a learner found, plus eps."""
        if index.shape[0]:
            self.update_own(own(index), own(priorities), largest)

    def update_own(self, places: Any, priorities: Any, largest: float) -> None:
        """Do what `update` does for at least one row, with what `own` gives."""
        self._set(places, priorities + self.rule.eps)
        self.note(largest)

    def note(self, largest: float) -> None:
        """Note that there was a priority of this size."""
        self.max_priority = max(self.max_priority, largest)

    def remove(self, index: torch.Tensor) -> None:
        """Let `[n]` rows not be drawn any more."""
        self._fill(index, 0.0)

    def clear(self) -> None:
        """Remove every row; the largest priority and the draws are forgotten too."""
        self._weights.clear()
        self._least.note_all()
        self.max_priority, self.num_draws = 1.0, 0

    def draw(self, num_draws: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Draw rows, one from each of `num_draws` intervals of equal mass.

        Returns:
            Rows `[num_draws]` int64, ascending, and their importance weights `[num_draws]` float64,
            (P / P_min) ** -beta in (0, 1]; None if no row may be drawn.
        """
        drawn = self.draw_own(num_draws, generator)
        return None if drawn is None else (tensor_of(drawn[0]), tensor_of(drawn[1]))

    def draw_own(self, num_draws: int, generator: torch.Generator) -> tuple[Any, Any] | None:
        """Do what `draw` does; gives what `own` gives."""
        drawn = self._weights.draw_weights(num_draws, generator)
        if drawn is None:
            return None
        places, weights = drawn
        return places, self._importance(self._least.value(), weights)

    def draw_among(
        self, candidates: torch.Tensor, num_draws: int, generator: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Draw as `draw` does, but only among `[m]` rows; takes time in proportion to m."""
        weights = self._weights.read(candidates)
        some = SumTree(max(1, len(weights)), self.device)
        some.rebuild(weights if len(weights) else weights.new_zeros(1))
        place = some.draw(num_draws, generator)
        if place is None:
            return None
        importance = self._importance(float(weights[weights > 0].min()), own(some.read(place)))
        return candidates.index_select(0, place), tensor_of(importance)

    def restore(self, weights: torch.Tensor, priorities: torch.Tensor) -> None:
        """Take over all weights and priorities, `[capacity]` each."""
        self._weights.rebuild(weights)
        self._least.note_all()
        self.priorities.copy_(priorities)

    def check_valid(self) -> tuple[bool, str]:
        """Tell whether sums and least weight are those of the weights, and where not."""
        weights = self._weights.leaves_view()
        least = float(torch.where(weights > 0, weights, inf).amin())
        if self._least.value() != least:
            return False, f"the least weight is {least}, not {self._least.value()}"
        return self._weights.check_valid()

    def _is_plain(self, priorities: Any) -> bool:
        """Tell whether priorities are a tensor that numpy sees as it is."""
        if type(priorities) is not torch.Tensor or self._own_priorities is self.priorities:
            return False
        is_float = priorities.dtype in (torch.float32, torch.float64)
        return is_float and priorities.is_cpu and not priorities.requires_grad and priorities.layout is torch.strided

    def _fits(self, largest: float) -> bool:
        """Tell whether weights up to that of a priority are finite and can be summed."""
        return largest < inf and self.rule.weight(largest + self.rule.eps) <= self._max_weight

    def _importance(self, least: float, weights: Any) -> Any:
        """Give the importance weights of a draw, which is counted, in (0, 1], also as float32."""
        # Not the other way round: that overflows where weights are hardly above 0.
        found = ((least / weights) ** self.beta).clip(min=_LEAST_IMPORTANCE)
        self.num_draws += 1
        return found

    def _set(self, places: Any, values: Any) -> None:
        weights = values**self.rule.alpha
        if self.rule.alpha > 1:  # otherwise none is less than its priority below 1
            weights = weights.clip(min=values.clip(max=_LEAST_WEIGHT))
        self._least.note(places, self._weights.exchange(places, weights), weights)
        if self._own_priorities is self.priorities:
            self.priorities.index_copy_(0, places, self._last(places, values))
        else:
            self._own_priorities[places] = values  # in order

    def _fill(self, index: torch.Tensor, weight: float) -> None:
        old = self._weights.read(index)
        self._weights.fill(index, weight)
        if index.shape[0]:
            self._least.note(own(index), own(old), own(old.new_full((1,), weight)))

    def _last(self, index: torch.Tensor, priorities: torch.Tensor) -> torch.Tensor:
        """Give every copy of a row the priority of its last copy: the one whose weight was kept."""
        order = torch.arange(len(index), device=index.device)
        last = torch.zeros(self.capacity, dtype=torch.int64, device=index.device)
        last.scatter_reduce_(0, index, order, "amax", include_self=False)
        return priorities.index_select(0, last.index_select(0, index))
