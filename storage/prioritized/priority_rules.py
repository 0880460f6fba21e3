"""`PriorityRule` and `Limits`: the exponents of priorities, and the limits of age and use of a row.

Both classes are immutable, and their constructors check the numbers.
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
    """Exponents of priorities and importance weights (Schaul et al. 2016, eq. 1 and section 3.4).

    Attributes:
        alpha: Exponent of priorities, >= 0; 0 for uniform draws.
        beta: Exponent of importance weights at the first draw, in [0, 1]; 1 for a full correction.
        anneal_step: Number of draws over which beta grows linearly to 1; 0 for a constant beta.
        eps: Number added to every updated priority, so that no priority stays 0.
    """

    alpha: float = 0.6
    beta: float = 0.4
    anneal_step: float = 1e5
    eps: float = 1e-5

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name == "beta":
                arguments.real(name, value, "in [0, 1]", lambda beta: 0 <= beta <= 1)
            else:
                arguments.real(name, value, ">= 0", lambda number: 0 <= number < inf)

    def weights(self, priorities: Any) -> Any:
        """Compute the weights of rows: `priorities ** alpha`, a tensor for a tensor, else an array.

        The weights in an array are rounded, so that they are equal on every processor.
        """
        if isinstance(priorities, torch.Tensor):
            return priorities**self.alpha
        return rounded_power(priorities, self.alpha)

    def largest_priority(self, largest_weight: float) -> float:
        """Return the largest priority whose weight does not exceed `largest_weight`.

        `largest_weight` is above 1. The result is exact up to rounding. It is inf if alpha is 0 or
        the priority exceeds the range of float64.
        """
        try:
            return largest_weight ** (1 / self.alpha) if self.alpha else inf
        except OverflowError:
            return inf


@dataclass(frozen=True)
class Limits:
    """Limits of age and use. A row that reaches a limit is removed.

    Attributes:
        max_use: Maximum number of draws of a row; `inf` or None for no limit.
        max_staleness: Maximum number of learner iterations since the collection of a row; `inf` or
            None for no limit.
    """

    max_use: float | None = inf
    max_staleness: float | None = inf

    def __post_init__(self) -> None:
        if self.max_use is not None:
            arguments.real("max_use", self.max_use, ">= 1, or inf", lambda x: x >= 1)
        if self.max_staleness is not None:
            arguments.real("max_staleness", self.max_staleness, ">= 0, or inf", lambda x: x >= 0)
