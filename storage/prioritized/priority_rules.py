"""`PriorityRule` and `Limits`: how priorities become probabilities, and when a row does not count any more.

One rule: numbers that are given once and checked here; nothing changes, and no row is known.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any

import torch

from ..core import arguments
from .rounded_power import rounded_power


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

    def weights(self, priorities: Any) -> Any:
        """Return priorities ** alpha of what `own` gives; those of arrays are rounded, see `rounded_power`."""
        if isinstance(priorities, torch.Tensor):
            return priorities**self.alpha
        return rounded_power(priorities, self.alpha)

    def largest_priority(self, largest_weight: float) -> float:
        """Return the priority of a weight above 1, up to rounding; inf where float64 ends."""
        try:
            return largest_weight ** (1 / self.alpha) if self.alpha else inf
        except OverflowError:
            return inf


@dataclass(frozen=True)
class Limits:
    """When a row is over.

    Attributes:
        max_use: After this number of draws; `inf` or None for no limit.
        max_staleness: This number of learner iterations after it was collected; `inf` or None for no limit.
    """

    max_use: float | None = inf
    max_staleness: float | None = inf

    def __post_init__(self) -> None:
        if self.max_use is not None:
            arguments.real("limit rows", "max_use", self.max_use, ">= 1, or inf", lambda x: x >= 1)
        if self.max_staleness is not None:
            arguments.real("limit rows", "max_staleness", self.max_staleness, ">= 0, or inf", lambda x: x >= 0)
