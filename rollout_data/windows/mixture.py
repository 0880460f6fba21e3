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
from ..index.agreement import ShardChoice, agreement_of, checked_shard, current_shard
from ..index.index import Int64s
from .dataset import WindowDataset
from .index import Even, arrivals, checked_even, checked_windows, rank_batches
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
        self._given = weights
        self._check_alike()
        self._open()
        sizes = np.diff(self._first)
        if ((self.weights > 0) & (sizes == 0)).any():
            empty = int(np.flatnonzero((self.weights > 0) & (sizes == 0))[0])
            raise UsageError("mix datasets", f"with number {empty}", "windows, or no weight", "no window")

    def _open(self) -> None:
        super()._open()
        sizes = np.array([dataset.num_at_first for dataset in self.datasets], np.int64)
        if not sizes.any():
            raise UsageError("mix datasets", "", "windows in at least one", "none")
        try:
            given = np.asarray(sizes if self._given is None else self._given, np.float64)
        except (TypeError, ValueError):
            given = np.zeros(0)
        if given.shape != sizes.shape or not (np.isfinite(given).all() and (given >= 0).all() and given.any()):
            raise UsageError("mix datasets", "", f"{len(sizes)} weights >= 0, some of them above", repr(self._given))
        #: Arrivals of each window in the time of one draw.
        self._rates = given / given.sum() / np.maximum(sizes, 1)
        self.weights, self._num_draws = given / given.sum(), int(sizes.sum())
        self.opened_as = [dataset.opened_as for dataset in self.datasets]
        self._first = np.append(0, np.cumsum([len(dataset) for dataset in self.datasets]))

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

    def at(self, opened_as: Any, may_lack: bool = False) -> WindowMixture:
        """Give the mixture of its members as they were opened; see `WindowDataset`."""
        if self.opened_as == opened_as:
            return self
        members = [each.at(one, may_lack) for each, one in zip(self.datasets, opened_as, strict=True)]
        earlier: WindowMixture = object.__new__(type(self))
        earlier.__setstate__({**self.__getstate__(), "datasets": members})
        return earlier

    def shuffled(self, seed: Sequence[int], until: float | None = None) -> tuple[Int64s, np.ndarray]:
        """Draw as many windows as there are, with replacement and by the weights; and when each is drawn, ascending.

        A function of `seed` and of the names of the windows: see `arrivals`. With `until` those up to this time.
        """
        limit = self._num_draws + 6 * self._num_draws**0.5 + 10 if until is None else until
        while True:
            found = [
                arrivals(dataset.random_keys([*seed, member]), rate, limit)
                for member, (dataset, rate) in enumerate(zip(self.datasets, self._rates.tolist(), strict=True))
            ]
            windows = np.concatenate([first + place for first, (place, _) in zip(self._first, found, strict=False)])
            if until is not None or len(windows) >= self._num_draws:
                break
            limit *= 1.1
        times, order = torch.sort(torch.from_numpy(np.concatenate([times for _, times in found])))
        num_draws = self._num_draws if until is None else len(windows)
        return windows[order.numpy()[:num_draws]], times.numpy()[:num_draws]

    def name(self, window: int) -> list[Any]:
        """Name a window: its member, and its name there."""
        member = int(np.searchsorted(self._first, window, side="right")) - 1
        return [member, *self.datasets[member].name(window - int(self._first[member]))]

    def num_upto(self, name: Sequence[Any]) -> int:
        """Count the windows up to the one of this name."""
        member, *rest = name
        num_there: int = self.datasets[member].num_upto(rest)
        return num_there + int(self._first[member])

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
        """Give a sampler for a `DataLoader`: `num_samples` draws an epoch (None: as many as there are windows).

        With shard="auto" every rank of torch.distributed has to call this: the mixture becomes that of rank 0.
        """
        told = agreement_of(current_shard(checked_shard(shard)))(0, lambda: self.opened_as)
        if told != self.opened_as:
            self.__setstate__(self.at(told).__getstate__())
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
