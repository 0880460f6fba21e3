"""`SampleShares`: how many items of a sample come from which source, and in which positions.

One rule: pure decisions from names, shares and a generator; nobody is asked for an item here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ..core.arguments import check_count
from ..errors import UsageError

#: How far the sum of shares may be off.
SLACK = 1e-6
_ACTION = "share out a sample"


class SampleShares:
    """Share out samples among sources.

    Args:
        names: The sources.
        check_name: Raises for a name that is not one of them.
        ratio: Name -> share, or None; with one source it may be missing.

    Attributes:
        ratio: The share of every source; None if there are several and nobody said.
    """

    def __init__(
        self, names: Sequence[str], check_name: Callable[[Any], Any], ratio: Mapping[str, float] | None
    ) -> None:
        self._names, self._check_name = list(names), check_name
        if ratio is None and len(self._names) == 1:
            ratio = dict.fromkeys(self._names, 1.0)
        self.ratio = None if ratio is None else self.checked(ratio)

    def checked(self, ratio: Any) -> dict[str, float]:
        """Check shares; give one for every source.

        Raises:
            KeyError: A name is not known.
            UsageError: A share is not in [0, 1], or they do not sum to 1.
        """
        if not isinstance(ratio, Mapping):
            raise UsageError(_ACTION, "", "a ratio by name", type(ratio).__name__)
        for name, share in ratio.items():
            self._check_name(name)
            is_number = isinstance(share, (int, float, np.integer, np.floating)) and not isinstance(share, bool)
            if not is_number or not 0 <= share <= 1 + SLACK:
                raise UsageError(_ACTION, f"with {name!r}", "shares in [0, 1]", repr(share))
        total = math.fsum(ratio.values())
        if not abs(total - 1) <= SLACK:
            raise UsageError(_ACTION, "", "shares that sum to 1", f"{total} of {dict(ratio)}")
        return {name: float(ratio.get(name, 0)) for name in self._names}

    def share_out(
        self, batch_size: int | Mapping[str, int], ratio: Mapping[str, float] | None, generator: torch.Generator
    ) -> tuple[list[int] | None, dict[str, int]]:
        """Draw how many items each source gives, one from each of `batch_size` equal intervals, and their order.

        Returns:
            A permutation of the items of all sources, one source after another, uniform, so that every position is
            of each source with the probability of its share; None if numbers by name were given. The number by source.
        """
        if isinstance(batch_size, Mapping):
            return None, self._sizes(batch_size)
        size = check_count("sample", "batch_size", batch_size, 0)
        shares = {name: share for name, share in self._for_call(ratio).items() if share > 0}
        names, ends = list(shares), np.cumsum(list(shares.values()))
        drawn = torch.rand(size, dtype=torch.float64, generator=generator, device="cpu").numpy()
        points = (np.arange(size) + drawn) / max(size, 1)
        places = np.minimum(np.searchsorted(ends, points * ends[-1], side="right"), len(names) - 1)
        counts = np.bincount(places, minlength=len(names)).tolist()
        order = torch.randperm(size, generator=generator, device="cpu").tolist()
        return order, dict(zip(names, counts, strict=True))

    def _for_call(self, ratio: Mapping[str, float] | None) -> dict[str, float]:
        """Take the shares of this call, else the configured ones, which no call changes."""
        if ratio is not None:
            return self.checked(ratio)
        if self.ratio is None:
            raise UsageError(_ACTION, "", "a sample_ratio", "none", "Give it here or in the configuration")
        return self.ratio

    def _sizes(self, batch_size: Mapping[str, int]) -> dict[str, int]:
        for name in batch_size:
            self._check_name(name)
        return {name: check_count("sample", f"batch_size of {name!r}", n, 0) for name, n in batch_size.items()}
