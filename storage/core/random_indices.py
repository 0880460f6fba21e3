"""Random draws of row indices, as tensors.

A draw depends only on its arguments and a generator. Draws use integer arithmetic, so that results
are equal on every processor.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..errors import UsageError
from . import arguments

#: Maximum number of rows for which torch's draws from 32 random bits are uniform enough.
_MAX_SHORT = 1 << 20
#: Low bits that are appended to each number in a draw from more rows, and dropped at the end.
#: For the larger numbers, above 2 ** 32, every version of torch uses 64 random bits.
_MORE_BITS = 12
#: Random bits per weighted draw, and maximum bits of the sum of integer weights.
RANDOM_BITS = 62
_HALF_BITS = RANDOM_BITS // 2
_LOW_HALF = (1 << _HALF_BITS) - 1


class _SeedSource:
    """Source of seeds for objects that are created without a generator.

    Each seed combines `initial_seed` with the number of objects created so far.

    Args:
        initial_seed: Any integer; None for `torch.initial_seed()` at the time of each call.
    """

    def __init__(self, initial_seed: int | None = None) -> None:
        self._initial_seed = initial_seed
        #: Counter of created objects by initial seed. Only the latest seed has a counter.
        self._numbers: dict[int, count[int]] = {}

    def next_seed(self) -> int:
        """Return a seed for a new object. torch's default generator is read, not advanced."""
        initial_seed = torch.initial_seed() if self._initial_seed is None else self._initial_seed
        # `next` of a `count` is atomic, so that threads get different numbers without a lock.
        # A forked process could inherit a lock in its locked state.
        number = next(self._numbers.setdefault(initial_seed, count()))
        for other in [seed for seed in self._numbers if seed != initial_seed]:
            self._numbers.pop(other, None)
        return int(
            np.random.SeedSequence([initial_seed, number]).generate_state(1, np.uint64)[0] >> 1
        )


_seeds = _SeedSource()


@contextmanager
def seeds_from(initial_seed: int) -> Iterator[None]:
    """Seed generators created in the block from `initial_seed`, not from `torch.initial_seed()`."""
    global _seeds
    before = _seeds
    _seeds = _SeedSource(initial_seed)
    try:
        yield
    finally:
        _seeds = before


def generator_on(
    generator: torch.Generator | int | None,
    device: torch.device | None = None,
) -> torch.Generator:
    """Return a random generator: the argument itself, or a new generator for a seed.

    Args:
        generator: A `torch.Generator` or a seed. None: the new generator is seeded from
            `torch.initial_seed()` and the number of objects created since that seed changed.
            Results are then reproducible after `torch.manual_seed`, and two objects draw
            differently. torch's default generator is read, but neither advanced nor seeded.
        device: Required device of the generator. None: any device, and the CPU for a new generator.
    """
    if isinstance(generator, torch.Generator):
        if device is not None and generator.device.type != device.type:
            raise UsageError(
                f"generator is on {generator.device}, but the rows are on {device.type}. Pass a "
                f"generator on {device.type}, or a seed."
            )
        return generator
    if generator is None:
        seed = _seeds.next_seed()
    else:
        expected = "a torch.Generator, None or a seed of 64 bits"
        seed = arguments.seed("generator", generator, expected)
    return torch.Generator(device or "cpu").manual_seed(seed)


def whole_weights(weights: Any, num_bits: int = RANDOM_BITS) -> npt.NDArray[np.int64]:
    """Convert weights to integers in nearly the same proportions; their sum is < `2 ** num_bits`.

    All weights are multiplied by the same power of two and rounded. The largest of n weights then
    has about `num_bits - log2(n)` bits. A weight above 0 becomes at least 1. Multiplication
    by a power of two and rounding are exact, so that results are equal on every processor.

    Args:
        weights: Finite weights >= 0, `[n]`, n > 0.
        num_bits: Bits of the sum, at most 62.
    """
    values = np.asarray(weights, np.float64)
    largest_bits = num_bits - len(values).bit_length()
    # A largest weight of m * 2**e, 0.5 <= m < 1, becomes m * 2**largest_bits.
    _, exponent = np.frexp(values.max())
    integers = np.rint(np.ldexp(values, largest_bits - int(exponent))).astype(np.int64)
    integers[(integers == 0) & (values > 0)] = 1
    return integers


def whole_weights_on_device(weights: torch.Tensor) -> torch.Tensor:
    """Convert weights to integers in nearly the same proportions, without a wait for the device.

    The results are those of `whole_weights` for weights on the CPU.

    Args:
        weights: `[n]` float64 on any device, finite and >= 0.
    """
    largest_bits = RANDOM_BITS - len(weights).bit_length()
    _, exponent = torch.frexp(weights.max())
    integers = torch.ldexp(weights, largest_bits - exponent).round().long()
    return torch.where((integers == 0) & (weights > 0), 1, integers)


def scaled(bits: Any, choices: Any) -> Any:
    """Map random numbers of 62 bits to [0, choices): `bits * choices / 2**62`, rounded down.

    All results are equally likely: the number of `bits` values that map to a result differs by at
    most one between results. The product is computed in parts of 31 bits, since it has up to 124
    bits.

    Args:
        bits: int64 array or tensor of numbers in [0, 2**62).
        choices: Number of possible results, in [0, 2**62]: an int, or an array or tensor with one
            number per element of `bits`.
    """
    high = bits >> _HALF_BITS
    low = bits & _LOW_HALF
    choices_high = choices >> _HALF_BITS
    choices_low = choices & _LOW_HALF
    middle = high * choices_low + (low * choices_low >> _HALF_BITS)
    rest = (middle & _LOW_HALF) + low * choices_high
    return high * choices_high + (middle >> _HALF_BITS) + (rest >> _HALF_BITS)


def random_bits(num_draws: int, generator: torch.Generator) -> torch.Tensor:
    """Draw 62 random bits per draw: `[num_draws]` int64 in [0, 2**62)."""
    return torch.randint(
        1 << RANDOM_BITS, (num_draws,), generator=generator, device=generator.device
    )


def uniform(
    num_rows: int, num_draws: int, generator: torch.Generator, first: int = 0
) -> torch.Tensor:
    """Draw indices in `[first, first + num_rows)` with replacement: `[num_draws]` int64.

    Probabilities of two indices differ by at most one part in 4096. torch computes the remainder of
    32 random bits, so that low indices are more likely by up to `num_rows / 2 ** 32`. For more than
    2 ** 20 rows this function draws from a wider range, for which torch uses 64 random bits.
    """
    return fill_uniform(
        torch.empty(num_draws, dtype=torch.int64, device=generator.device),
        num_rows,
        generator,
        first,
    )


def fill_uniform(
    out: torch.Tensor, num_rows: int, generator: torch.Generator, first: int = 0
) -> torch.Tensor:
    """Fill `out`, an int64 tensor, with indices drawn from `[first, first + num_rows)`.

    Draws are uniform and with replacement.
    """
    if num_rows <= _MAX_SHORT:
        # `random_` takes 2/3 of the time of `randint`.
        return out.random_(first, first + num_rows, generator=generator)
    return (
        out.random_(num_rows << _MORE_BITS, generator=generator)
        .bitwise_right_shift_(_MORE_BITS)
        .add_(first)
    )


def below(choices: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Draw an integer in [0, c) for each element c of `choices`: `[num]` int64.

    The result is the remainder of 62 random bits. With up to 2 ** 22 choices, draws are uniform to
    one part in 2 ** 40.
    """
    bits = torch.randint(1 << 62, choices.shape, generator=generator, device=choices.device)
    return bits % choices


class Weighted:
    """Random draws of indices in proportion to weights, with replacement.

    An index of weight 0 is never drawn.

    Args:
        weights: `[num]`, finite and >= 0, not all 0. Weights on other devices than the CPU are not
            checked.
    """

    def __init__(self, weights: torch.Tensor) -> None:
        self._total: Any
        if not weights.is_cpu:
            self._ends = whole_weights_on_device(weights.double()).cumsum(0)
            self._total = self._ends[-1]
            return
        values = weights.to(torch.float64).numpy()
        if not len(values) or not np.isfinite(values).all() or (values < 0).any():
            raise UsageError(
                f"weights must be finite numbers >= 0, got {str(weights.tolist())[:60]}."
            )
        if not values.any():
            raise UsageError("all weights are 0. At least one weight must be above 0.")
        ends = np.cumsum(whole_weights(values))
        self._total = int(ends[-1])
        self._ends = torch.from_numpy(ends).to(weights.device)

    def draw(self, num_draws: int, generator: torch.Generator) -> torch.Tensor:
        """Draw indices, `[num_draws]` int64."""
        points = scaled(random_bits(num_draws, generator), self._total)
        # `_ends` are the sums of the weights up to and including each index.
        # `right=True` returns the first index whose sum is above the point. The sum of an index of
        # weight 0 equals the sum of the index before it, so that this index is never returned.
        return torch.searchsorted(self._ends, points, right=True)


def distinct(num_rows: int, num_draws: int, generator: torch.Generator) -> torch.Tensor:
    """Draw distinct indices below `num_rows` in random order: `[num_draws]` int64.

    `num_draws` is at most `num_rows`. If it is much smaller, the time depends only on `num_draws`.
    """
    if num_draws * 4 > num_rows:
        return torch.randperm(num_rows, generator=generator, device=generator.device)[:num_draws]
    drawn = uniform(num_rows, num_draws, generator)
    while True:
        # Keep the first occurrence of each index, in the order of the draws.
        # The kept indices are still a uniform sample, because all draws are equally likely.
        values, inverse = torch.unique(drawn, return_inverse=True)
        if len(values) == num_draws:
            return drawn
        place = torch.arange(len(drawn), device=drawn.device)
        first = torch.full_like(values, len(drawn)).scatter_reduce_(0, inverse, place, "amin")
        drawn = drawn[first.sort().values]
        drawn = torch.cat([drawn, uniform(num_rows, num_draws - len(drawn), generator)])
