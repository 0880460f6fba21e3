"""Random draws of row numbers, as tensors of indices.

A draw is a function of its arguments and a generator. Draws use integer arithmetic, so that their
results are equal on every processor. Windows are drawn in `ring/window_bounds.py`.
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

#: Up to this many rows 32 random bits are enough; this many more bits make torch draw 64 for more
#: rows, any version: some take 64 bits for 2 ** 28 numbers and more, others for 2 ** 32 and more.
_MAX_SHORT, _MORE_BITS = 1 << 20, 12
#: Random bits of a draw by `scaled`. Sums of whole weights stay below this power of two.
RANDOM_BITS = 62
_HALF_BITS = RANDOM_BITS // 2
_LOW_HALF = (1 << _HALF_BITS) - 1


class _SeedSource:
    """Seeds for objects without a generator of their own.

    Args:
        initial_seed: What seeds are made from, with a running number; None takes
            `torch.initial_seed()`.
    """

    def __init__(self, initial_seed: int | None = None) -> None:
        self._initial_seed = initial_seed
        #: Initial seed -> numbers of the objects made since torch has had it; of the latest seed
        #: only.
        self._numbers: dict[int, count[int]] = {}

    def next_seed(self) -> int:
        """Return the seed of the next object. Reads torch's default generator, and draws nothing from it."""
        initial_seed = torch.initial_seed() if self._initial_seed is None else self._initial_seed
        # One step for the interpreter: threads get different numbers without a lock, which forks
        # would inherit.
        number = next(self._numbers.setdefault(initial_seed, count()))
        for other in [seed for seed in self._numbers if seed != initial_seed]:
            self._numbers.pop(other, None)
        return int(
            np.random.SeedSequence([initial_seed, number]).generate_state(1, np.uint64)[0] >> 1
        )


_seeds = _SeedSource()


@contextmanager
def seeds_from(initial_seed: int) -> Iterator[None]:
    """Seed objects that are made in the block from a number, in the place of `torch.initial_seed()`."""
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
    action: str = "create a generator",
) -> torch.Generator:
    """Return a given generator, or a new one.

    Args:
        generator: A `torch.Generator`, or a seed. None seeds the new generator from
            `torch.initial_seed()` and the number of objects made since that value changed: a
            program that calls `torch.manual_seed` first repeats, and two objects draw differently.
            torch's default generator is read, never used up or seeded.
        device: Device of the generator. None: a given one is anywhere, a new one on the CPU.
        action: The user's call, for errors.
    """
    if isinstance(generator, torch.Generator):
        if device is not None and generator.device.type != device.type:
            expected = f"a generator on {device.type}, where the rows are"
            raise UsageError(action, "", expected, f"one on {generator.device}")
        return generator
    if generator is None:
        seed = _seeds.next_seed()
    else:
        seed = arguments.seed(action, "generator as a torch.Generator, None or a seed", generator)
    return torch.Generator(device or "cpu").manual_seed(seed)


def whole_weights(weights: Any, num_bits: int = RANDOM_BITS) -> npt.NDArray[np.int64]:
    """Turn weights into whole numbers whose sum is below `2 ** num_bits`.

    All weights are multiplied by one power of two and rounded, so that the largest of n has about
    `num_bits - log2(n)` bits. A weight above 0 becomes at least 1. The result is the same on every
    processor, because these operations are exact.

    Args:
        weights: `[n]`, n > 0, finite and >= 0.
        num_bits: At most 62.
    """
    values = np.asarray(weights, np.float64)
    largest_bits = num_bits - len(values).bit_length()
    # A largest weight of m * 2**e, 0.5 <= m < 1, becomes m * 2**largest_bits.
    _, exponent = np.frexp(values.max())
    found = np.rint(np.ldexp(values, largest_bits - int(exponent))).astype(np.int64)
    found[(found == 0) & (values > 0)] = 1
    return found


def whole_weights_on_device(weights: torch.Tensor) -> torch.Tensor:
    """Do what `whole_weights` does with `[n]` float64 on any device, without waiting for it."""
    largest_bits = RANDOM_BITS - len(weights).bit_length()
    _, exponent = torch.frexp(weights.max())
    found = torch.ldexp(weights, largest_bits - exponent).round().long()
    return torch.where((found == 0) & (weights > 0), 1, found)


def scaled(bits: Any, choices: Any) -> Any:
    """Return `bits * choices / 2**62`, rounded down: numbers below `choices` from 62 random bits.

    The number of bits that lead to the same number differs by one at most.

    Args:
        bits: int64 array or tensor of numbers in [0, 2**62).
        choices: Number, or array or tensor like `bits`, in [0, 2**62].
    """
    high = bits >> _HALF_BITS
    low = bits & _LOW_HALF
    choices_high = choices >> _HALF_BITS
    choices_low = choices & _LOW_HALF
    middle = high * choices_low + (low * choices_low >> _HALF_BITS)
    rest = (middle & _LOW_HALF) + low * choices_high
    return high * choices_high + (middle >> _HALF_BITS) + (rest >> _HALF_BITS)


def random_bits(num_draws: int, generator: torch.Generator) -> torch.Tensor:
    """Draw `[num_draws]` int64 in [0, 2**62)."""
    return torch.randint(
        1 << RANDOM_BITS, (num_draws,), generator=generator, device=generator.device
    )


def uniform(
    num_rows: int, num_draws: int, generator: torch.Generator, first: int = 0
) -> torch.Tensor:
    """Draw indices of `num_rows` from `first` on, uniformly but for one part in 4096, with replacement: `[num_draws]`.

    torch takes the remainder of 32 random bits for few numbers, so that the first ones would come
    oftener, by up to `num_rows / 2 ** 32`. For more than 2 ** 20 rows it is asked for a number out
    of more, for which it takes 64 bits.
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
    """Draw into `[num_draws]` int64 what `uniform` draws."""
    if num_rows <= _MAX_SHORT:
        return out.random_(
            first, first + num_rows, generator=generator
        )  # in 2/3 of the time of `randint`
    return (
        out.random_(num_rows << _MORE_BITS, generator=generator)
        .bitwise_right_shift_(_MORE_BITS)
        .add_(first)
    )


def below(choices: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Draw a number below each of `[num]` int64: the remainder of 62 random bits, uniform to one part in 2 ** 40."""
    bits = torch.randint(1 << 62, choices.shape, generator=generator, device=choices.device)
    return bits % choices


class Weighted:
    """Draw indices in proportion to weights, with replacement.

    Args:
        weights: `[num]`, finite and >= 0, not all 0. They become whole numbers once: see
            `whole_weights`. Only those on the CPU are checked.

    An index of weight 0 is never drawn.
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
                "draw by weight", "", "finite weights >= 0", str(weights.tolist())[:60]
            )
        if not values.any():
            raise UsageError("draw by weight", "", "a weight above 0", "none")
        ends = np.cumsum(whole_weights(values))
        self._total = int(ends[-1])
        self._ends = torch.from_numpy(ends).to(weights.device)

    def draw(self, num_draws: int, generator: torch.Generator) -> torch.Tensor:
        """Draw `[num_draws]` int64."""
        points = scaled(random_bits(num_draws, generator), self._total)
        # The first end above the point: an index without weight has the end of the one before it.
        return torch.searchsorted(self._ends, points, right=True)


def distinct(num_rows: int, num_draws: int, generator: torch.Generator) -> torch.Tensor:
    """Draw different indices below `num_rows`, in random order: `[num_draws]` int64, at most `num_rows` of them.

    Takes time in proportion to `num_draws` where that is much less than `num_rows`.
    """
    if num_draws * 4 > num_rows:
        return torch.randperm(num_rows, generator=generator, device=generator.device)[:num_draws]
    found = uniform(num_rows, num_draws, generator)
    while True:
        # First copies in the order they came; what is left of equally likely draws is equally
        # likely.
        values, inverse = torch.unique(found, return_inverse=True)
        if len(values) == num_draws:
            return found
        place = torch.arange(len(found), device=found.device)
        first = torch.full_like(values, len(found)).scatter_reduce_(0, inverse, place, "amin")
        found = found[first.sort().values]
        found = torch.cat([found, uniform(num_rows, num_draws - len(found), generator)])
