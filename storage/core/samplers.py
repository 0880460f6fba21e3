"""Index producers: who is drawn, as tensors of indices. Nothing here moves a row.

One rule: a producer is a pure function of its arguments and a generator that is handed in. Windows
are drawn in `ring/windows.py`, which alone knows their bounds.
"""

from __future__ import annotations

import torch

from ..errors import UsageError
from . import arguments

#: Up to this many rows 32 random bits are enough; this many more bits make torch draw 64 for more rows, any version:
#: some take 64 bits for 2 ** 28 numbers and more, others for 2 ** 32 and more.
_MAX_SHORT, _MORE_BITS = 1 << 20, 12


def generator_on(generator: torch.Generator | int | None, device: torch.device | None = None) -> torch.Generator:
    """Take a generator, seed a new one, or seed one once from torch's default generator.

    It is on `device`; if that is None, a given one is anywhere, and a new one on the CPU.
    """
    if isinstance(generator, torch.Generator):
        if device is not None and generator.device.type != device.type:
            expected = f"one on {device.type}, where the rows are"
            raise UsageError("use the generator", "", expected, f"one on {generator.device}")
        return generator
    if generator is None:
        seed = int(torch.randint(2**63 - 1, (), device="cpu"))
    else:
        seed = arguments.seed("create a generator", "a torch.Generator, None or a seed", generator)
    return torch.Generator(device or "cpu").manual_seed(seed)


def uniform(num_rows: int, num_draws: int, generator: torch.Generator, first: int = 0) -> torch.Tensor:
    """Draw indices of `num_rows` from `first` on, uniformly but for one part in 4096, with replacement: `[num_draws]`.

    torch takes the remainder of 32 random bits for few numbers, so that the first ones would come oftener, by up to
    `num_rows / 2 ** 32`. For more than 2 ** 20 rows it is asked for a number out of more, for which it takes 64 bits.
    """
    return fill_uniform(torch.empty(num_draws, dtype=torch.int64, device=generator.device), num_rows, generator, first)


def fill_uniform(out: torch.Tensor, num_rows: int, generator: torch.Generator, first: int = 0) -> torch.Tensor:
    """Draw into `[num_draws]` int64 what `uniform` draws."""
    if num_rows <= _MAX_SHORT:
        return out.random_(first, first + num_rows, generator=generator)  # in 2/3 of the time of `randint`
    return out.random_(num_rows << _MORE_BITS, generator=generator).bitwise_right_shift_(_MORE_BITS).add_(first)


def below(choices: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Draw a number below each of `[num]` int64: the remainder of 62 random bits, uniform to one part in 2 ** 40."""
    bits = torch.randint(1 << 62, choices.shape, generator=generator, device=choices.device)
    return bits % choices


class Weighted:
    """Draw indices in proportion to weights, with replacement.

    Args:
        weights: `[num]`, finite and >= 0, not all 0; few enough for sums in float64.

    An index of weight 0 is never drawn.
    """

    def __init__(self, weights: torch.Tensor) -> None:
        masses = weights.to(torch.float64)
        self._sums = masses.cumsum(0)
        if not len(masses) or not bool(torch.isfinite(self._sums[-1])) or bool((masses < 0).any()):
            raise UsageError("draw by weight", "", "finite weights >= 0", str(weights.tolist())[:60])
        if float(self._sums[-1]) <= 0:
            raise UsageError("draw by weight", "", "a weight above 0", "none")
        self._last = int(masses.nonzero()[-1])

    def draw(self, num_draws: int, generator: torch.Generator) -> torch.Tensor:
        """Draw `[num_draws]` int64."""
        points = torch.rand(num_draws, dtype=torch.float64, generator=generator, device=generator.device)
        # The first sum above the point: an index without weight has the sum of the one before it.
        return torch.searchsorted(self._sums, points * self._sums[-1], right=True).clamp_(max=self._last)


def distinct(num_rows: int, num_draws: int, generator: torch.Generator) -> torch.Tensor:
    """Draw different indices below `num_rows`, in random order: `[num_draws]` int64, at most `num_rows` of them.

    Takes time in proportion to `num_draws` where that is much less than `num_rows`.
    """
    if num_draws * 4 > num_rows:
        return torch.randperm(num_rows, generator=generator, device=generator.device)[:num_draws]
    found = uniform(num_rows, num_draws, generator)
    while True:
        # First copies in the order they came; what is left of equally likely draws is equally likely.
        values, inverse = torch.unique(found, return_inverse=True)
        if len(values) == num_draws:
            return found
        place = torch.arange(len(found), device=found.device)
        first = torch.full_like(values, len(found)).scatter_reduce_(0, inverse, place, "amin")
        found = found[first.sort().values]
        found = torch.cat([found, uniform(num_rows, num_draws - len(found), generator)])
