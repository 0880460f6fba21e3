"""`SegmentTree`: numbers by index and their reduction over any range.

This file checks arguments and converts them to tensors. The trees of `sum_tree.py` compute the
results.
"""

from __future__ import annotations

from typing import Any

import torch

from ..core import arguments
from ..core.records import numbers
from ..errors import OutOfRangeError, UsageError
from .sum_tree import BlockTree, MaxTree, MinTree, SumTree

#: A searched mass may exceed the sum of all numbers by this share, because callers round.
_SLACK = 1e-9
_KINDS: dict[str, type[BlockTree]] = {"sum": SumTree, "min": MinTree, "max": MaxTree}


class SegmentTree:
    """`capacity` float64 numbers and their sum, minimum or maximum over any range of indices.

    Args:
        capacity: Number of numbers, at least 1; not necessarily a power of two.
        operation: "sum" (neutral element 0), "min" (inf) or "max" (-inf), or Python's function of
            that name. All numbers are the neutral element at first.
        device: Device of the numbers.
    """

    def __init__(
        self, capacity: int, operation: Any = "sum", device: torch.device | str = "cpu"
    ) -> None:
        name = (
            operation
            if isinstance(operation, str)
            else getattr(operation, "__name__", repr(operation))
        )
        self._tree = _KINDS[arguments.choice("operation", name, _KINDS)](capacity, device)
        #: Whether a number below 0 was ever set. Only then, searches must check all numbers.
        self._may_be_negative = False

    @property
    def capacity(self) -> int:
        """Number of numbers in the tree."""
        return self._tree.capacity

    @property
    def device(self) -> torch.device:
        """Device of the numbers and of returned tensors."""
        return self._tree.device

    @property
    def neutral_element(self) -> float:
        """Result of `reduce` for an empty range: 0, inf or -inf."""
        return self._tree.NEUTRAL

    def __len__(self) -> int:
        return self.capacity

    def __getitem__(self, index: Any) -> Any:
        """Return the number at an index as a float, or the numbers at indices as a tensor."""
        wanted = self._indices(index)
        values = self._tree.read(wanted.flatten()).view(wanted.shape)
        return values if _is_many(index) else float(values)

    def __setitem__(self, index: Any, value: Any) -> None:
        """Set one number, or the numbers at a tensor or list of indices.

        Many indices take as many values, or one value for all. If an index is repeated, its last
        value stays. A call that raises sets nothing.

        Raises:
            IndexError: An index is out of range.
            ValueError: A value is NaN; in a tree of sums, also if a value is infinite.
        """
        wanted = self._indices(index)
        values = numbers("value", value).to(self.device, torch.float64)
        if values.dim() and values.shape != wanted.shape:
            raise UsageError(
                f"values have shape {list(values.shape)}, expected [] or {list(wanted.shape)}."
            )
        is_sum = isinstance(self._tree, SumTree)
        wrong = ~torch.isfinite(values) if is_sum else torch.isnan(values)
        if bool(wrong.any()):
            condition = "finite" if is_sum else "numbers other than NaN"
            raise UsageError(
                f"values must be {condition}, got {float(values[wrong].flatten()[0])}."
            )
        self._may_be_negative |= bool((values < 0).any())
        self._tree.write(wanted.flatten(), values.expand(wanted.shape).flatten())

    def reduce(self, start: int = 0, end: int | None = None) -> float:
        """Return the sum, minimum or maximum of the numbers at the indices `start:end`.

        `end` None means the capacity. The result for an empty range is the neutral element.

        Raises:
            IndexError: The range is out of bounds, or its end is before its start.
        """
        stop = self.capacity if end is None else end
        if (
            not all(arguments.is_whole(x) for x in (start, stop))
            or not 0 <= start <= stop <= self.capacity
        ):
            raise OutOfRangeError(
                f"start and end must satisfy 0 <= start <= end <= {self.capacity}, got {start} and "
                f"{stop}."
            )
        return self._tree.reduce(int(start), int(stop))

    def find_prefixsum_idx(self, mass: Any) -> Any:
        """Return the first index at which the running sum of the numbers exceeds `mass`.

        Args:
            mass: A number, or a tensor or list of numbers, in `[0, reduce()]`.

        Returns:
            An int, or an int64 tensor of the shape of `mass`. The number at a returned index is
            above 0 in spite of rounding. If the mass is the total sum, the result is the last index
            whose number changes the float64 sum.

        Raises:
            ValueError: The operation is not "sum", all numbers are 0, a number is negative, or a
                mass is out of range.
        """
        tree = self._tree
        if not isinstance(tree, SumTree):
            raise UsageError(
                f"find_prefixsum_idx requires a tree of sums, got a {type(self).__name__}."
            )
        masses = numbers("mass", mass).to(self.device, torch.float64)
        if self._may_be_negative and bool((tree.leaves_view() < 0).any()):
            least = float(tree.leaves_view().min())
            raise UsageError(f"the values of the tree must be >= 0, got {least}.")
        total = tree.reduce()
        if total <= 0:
            raise UsageError("all values of the tree are 0. Set a value above 0 first.")
        # A mass that the caller computed may exceed the sum by a rounding error. Such a mass is
        # accepted and treated as the sum.
        is_coarse = isinstance(mass, torch.Tensor) and mass.is_floating_point()
        slack = max(_SLACK, torch.finfo(mass.dtype).eps if is_coarse else 0.0)
        outside = ~((masses >= 0) & (masses <= total * (1 + slack)))
        if bool(outside.any()):
            raise UsageError(
                f"mass must be in [0, {total}], got {float(masses[outside].flatten()[0])}."
            )
        indices = tree.find(masses.flatten())
        assert indices is not None
        return indices.view(masses.shape) if _is_many(mass) else int(indices)

    def check_valid(self) -> tuple[bool, str]:
        """Check the invariants: return (whether all hold, a description of the first violation)."""
        return self._tree.check_valid()

    def _indices(self, index: Any) -> torch.Tensor:
        """Check indices; return int64 indices >= 0. Negative indices count from the end."""
        wanted = numbers("index", index).to(self.device)
        if wanted.numel() and (wanted.is_floating_point() or wanted.dtype is torch.bool):
            raise UsageError(f"index must have an integer dtype, got {wanted.dtype}.")
        wanted = wanted.long()
        outside = (wanted < -self.capacity) | (wanted >= self.capacity)
        if bool(outside.any()):
            raise OutOfRangeError(
                f"index must be in {-self.capacity}:{self.capacity}, got "
                f"{int(wanted[outside].flatten()[0])}."
            )
        return torch.where(wanted < 0, wanted + self.capacity, wanted)


class SumSegmentTree(SegmentTree):
    """A `SegmentTree` with the operation "sum"."""

    def __init__(self, capacity: int, device: torch.device | str = "cpu") -> None:
        super().__init__(capacity, "sum", device)


class MinSegmentTree(SegmentTree):
    """A `SegmentTree` with the operation "min"."""

    def __init__(self, capacity: int, device: torch.device | str = "cpu") -> None:
        super().__init__(capacity, "min", device)


class MaxSegmentTree(SegmentTree):
    """A `SegmentTree` with the operation "max"."""

    def __init__(self, capacity: int, device: torch.device | str = "cpu") -> None:
        super().__init__(capacity, "max", device)


def _is_many(value: Any) -> bool:
    return getattr(value, "ndim", 0) > 0 or isinstance(value, (list, tuple))
