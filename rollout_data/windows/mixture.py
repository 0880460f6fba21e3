"""WindowMixture: windows of several datasets as one, drawn by weight.

One rule: a mixture is numbers and weights; its members read. Numbers count through the members in order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler

from storage.core.arguments import whole
from storage.core.tree import flatten, unflatten
from storage.errors import UsageError

from ..frames.cut import Allocate
from ..index.index import Int64s
from ..index.sharding import ShardChoice, checked_shard, current_shard
from .dataset import WindowDataset
from .index import Even, checked_even, checked_windows, rank_batches
from .shared import WindowBatches


class WindowMixture(WindowBatches):
    """Windows of several `WindowDataset`s, which must have the same fields, deltas and masks.

    Args:
        datasets: The members; their windows are numbered one after the other.
        weights: How probable each member is, of any sum; None makes all windows equally probable.

    `draw`, `sampler()` and `WindowLoader` go by the weights; numbers and `len` do not.

    Raises:
        UsageError: Members or weights do not fit together; a member that has a weight has no window.
    """

    def __init__(self, datasets: Sequence[WindowDataset], weights: Sequence[float] | None = None) -> None:
        self.datasets = list(datasets)
        if not self.datasets:
            raise UsageError("mix datasets", "", "at least one", "none")
        sizes = np.array([len(dataset) for dataset in self.datasets], np.int64)
        if not sizes.any():
            raise UsageError("mix datasets", "", "windows in at least one", "none")
        try:
            given = sizes.astype(np.float64) if weights is None else np.asarray(weights, np.float64)
        except (TypeError, ValueError):
            given = np.zeros(0)
        if given.shape != sizes.shape or not (np.isfinite(given).all() and (given >= 0).all() and given.sum() > 0):
            raise UsageError("mix datasets", "", f"{len(sizes)} weights >= 0, some of them above", repr(weights))
        if ((given > 0) & (sizes == 0)).any():
            empty = int(np.flatnonzero((given > 0) & (sizes == 0))[0])
            raise UsageError("mix datasets", f"with number {empty}", "windows, or no weight", "no window")
        self.weights, self._given = given / given.sum(), weights
        self.opened_as = [dataset.opened_as for dataset in self.datasets]
        self._first = np.append(0, np.cumsum(sizes))
        self._check_alike()
        self._open()

    def _check_alike(self) -> None:
        first = self.datasets[0].form
        for number, dataset in enumerate(self.datasets):
            if dataset.form != first:
                parts = [f"{a} instead of {b}" for a, b in zip(dataset.form, first, strict=False) if a != b]
                got = parts[0] if parts else "others"
                raise UsageError("mix datasets", f"with number {number}", "the fields and deltas of number 0", got)

    def __len__(self) -> int:
        """Count the windows of all members."""
        return int(self._first[-1])

    def read(self, windows: Sequence[int] | np.ndarray, allocate: Allocate) -> dict[str, Any]:
        numbers = checked_windows(windows, len(self))
        member = np.searchsorted(self._first, numbers, side="right") - 1
        used = np.unique(member).tolist()
        if len(used) <= 1:
            only = used[0] if used else 0
            return self.datasets[only].read(numbers - self._first[only], allocate)
        out: dict[str, torch.Tensor] = {}
        for one in used:
            places = np.flatnonzero(member == one)
            part = self.datasets[one].read(numbers[places] - self._first[one], self._pool.empty)
            for name, values in flatten(part).items():
                if name not in out:
                    out[name] = allocate((len(numbers), *values.shape[1:]), values.dtype)
                _as_array(out[name])[places] = _as_array(values)
        return unflatten(out)

    def at(self, opened_as: Any) -> WindowMixture:
        """Give the mixture of its members as they were opened; see `WindowDataset`."""
        if self.opened_as == opened_as:
            return self
        return WindowMixture([each.at(one) for each, one in zip(self.datasets, opened_as, strict=True)], self._given)

    def locate(self, windows: Sequence[int] | np.ndarray) -> tuple[Int64s, Int64s]:
        """Tell the member of each window, and its number there: int64 `[B]` both."""
        numbers = checked_windows(windows, len(self))
        member = np.searchsorted(self._first, numbers, side="right") - 1
        return member, numbers - self._first[member]

    def draw(self, num_samples: int, generator: np.random.Generator) -> Int64s:
        """Draw windows with replacement: a member by weight, then one of its windows, all equally probable."""
        member = generator.choice(len(self.datasets), num_samples, p=self.weights)
        sizes = np.diff(self._first)[member]
        windows: Int64s = self._first[member] + np.minimum(
            (generator.random(num_samples) * sizes).astype(np.int64), sizes - 1
        )
        return windows

    def sampler(
        self, num_samples: int | None = None, seed: int = 0, *, even: Even = "pad", shard: ShardChoice = "auto"
    ) -> MixtureSampler:
        """Give a sampler for a `DataLoader`: `num_samples` draws an epoch (None: as many as there are windows)."""
        num_samples = len(self) if num_samples is None else whole("open the dataset", "num_samples", num_samples, 0)
        return MixtureSampler(self, num_samples, seed, even, shard)


class MixtureSampler(Sampler[int]):
    """Draws of a mixture, a function of (seed, epoch); each iteration is the next epoch.

    Rank r of W takes the draws r, r + W, ...; `even` and `shard` are as in `WindowLoader`. Trainers that split samplers
    themselves, as accelerate and Lightning do, need `shard="none"`.
    """

    def __init__(self, mixture: WindowMixture, num_samples: int, seed: int, even: Even, shard: ShardChoice) -> None:
        self.mixture, self.num_samples, self.seed = mixture, num_samples, whole("open the dataset", "seed", seed, 0)
        self.even, self._shard, self.epoch = checked_even(even), checked_shard(shard), 0

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be that of another epoch, and count on from there."""
        self.epoch = whole("open the dataset", "epoch", epoch, 0)

    def _places(self) -> Int64s:
        bounds = rank_batches(0, self.num_samples, 1, current_shard(self._shard), self.even, False)
        places: Int64s = bounds[bounds[:, 0] < bounds[:, 1], 0]
        return places

    def __len__(self) -> int:
        return len(self._places())

    def __iter__(self) -> Iterator[int]:
        order = self.mixture.draw(self.num_samples, np.random.default_rng([self.seed, self.epoch]))
        self.epoch += 1
        return iter(order.take(self._places(), mode="wrap").tolist())


def _as_array(tensor: torch.Tensor) -> np.ndarray:
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
