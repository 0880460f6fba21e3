"""`WindowLoader`: batches of windows, epoch by epoch. `WindowMixture`: several joined datasets.

The position of a window in an epoch depends only on (seed, epoch) and on the name of the window.
The state of all ranks is therefore two numbers: the epoch, and the key of the last delivered
window. Deleted windows do not change the order of the remaining windows.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import count
from typing import Any, get_args

import numpy as np
import torch
from torch.utils.data import Sampler

from storage.core import arguments
from storage.core.arguments import choice, whole
from storage.core.fields import flatten, unflatten
from storage.core.object_summary import Shown
from storage.core.random_indices import RANDOM_BITS, scaled, whole_weights
from storage.errors import DataFileError, RolloutDataWarning, UsageError
from storage.live.prefetch import PipelinedDataCollector

from ..blocks.row_layout import Allocate
from ..blocks.trajectory_index import Int64s
from ..remote.locations import DataDir, is_one
from ..sources.epoch import Epoch, Even, num_upto, rank_batches
from ..sources.origins import mixed_conventions
from ..sources.processes.process_group import (
    ShardChoice,
    agreement_of,
    checked_shard,
    current_shard,
)
from ..sources.recordings.field_statistics import FieldStatistics, compute_statistics
from .skipped_windows import OnError
from .window_dataset import WindowDataset
from .window_index import arrivals, checked_windows, turn_of
from .worker_batches import WindowBatches

#: Version of the format of `state_dict`.
_VERSION = 3
_SAMPLER = "call WindowMixture.sampler"


class WindowMixture(WindowBatches):
    """Map-style dataset of the windows of several recordings with the same fields and deltas.

    Args:
        datasets: Members: a list of `WindowDataset`s, paths and `Recording`s, or a single member.
            Windows are numbered consecutively over the members.
        weights: Probability of each member, up to a common factor; None makes all windows equally
            probable. Weights are converted to integers once, when the mixture is created:
            multiplied by a power of two and rounded, so that the largest of n weights has about
            62 - log2(n) bits. Positive weights become at least 1.
        **options: Options of `WindowDataset` for members that are paths or recordings.

    `draw`, `sampler()` and `WindowLoader` use the weights. Window numbers and `len` do not.

    Raises:
        UsageError: Members have different fields or deltas, or a weighted member has no window.
    """

    def __init__(
        self,
        datasets: WindowDataset | DataDir | Sequence[WindowDataset | DataDir],
        weights: Sequence[float] | None = None,
        **options: Any,
    ) -> None:
        if (
            not isinstance(datasets, Iterable)
            and not isinstance(datasets, WindowDataset)
            and not is_one(datasets)
        ):
            raise UsageError(
                "datasets must be a dataset, a path or a list of datasets and paths, got "
                f"{type(datasets).__name__}."
            )
        arguments.options_of(
            "WindowMixture", options, WindowMixture, WindowDataset, but=["data_dir"]
        )
        listed: Any = (
            [datasets] if isinstance(datasets, WindowDataset) or is_one(datasets) else datasets
        )
        self.datasets = [
            member if isinstance(member, WindowDataset) else WindowDataset(member, **options)
            for member in listed
        ]
        if not self.datasets:
            raise UsageError("datasets is empty.")
        if options and all(isinstance(member, WindowDataset) for member in listed):
            raise UsageError(
                f"the options {', '.join(options)} are not used, since all datasets are open. "
                "Pass them to WindowDataset."
            )
        self._weights_argument = weights
        if any(dataset.is_remote for dataset in self.datasets):
            raise UsageError(
                "a mixture cannot read URLs. Copy the data to this machine, or use a WindowLoader "
                "for each dataset."
            )
        first = self.datasets[0].form
        for number, dataset in enumerate(self.datasets):
            if dataset.form != first:
                parts = [
                    f"{a} instead of {b}"
                    for a, b in zip(dataset.form, first, strict=False)
                    if a != b
                ]
                difference = f": {parts[0]}" if parts else ""
                raise UsageError(
                    f"dataset {number} has other fields or deltas than dataset 0{difference}."
                )
        for remark in mixed_conventions(
            set().union(*(dataset.conventions for dataset in self.datasets))
        ):
            warnings.warn(str(remark), RolloutDataWarning, stacklevel=2)
        if any(dataset.on_error == "skip" for dataset in self.datasets):
            self.on_error = "skip"
        self._open()
        sizes = np.diff(self._first)
        if ((self.weights > 0) & (sizes == 0)).any():
            empty = int(np.flatnonzero((self.weights > 0) & (sizes == 0))[0])
            raise UsageError(
                f"dataset {empty} has no windows, and its weight is above 0. Set its weight to 0."
            )

    def _open(self) -> None:
        super()._open()
        sizes = np.array([dataset.opened_as[3] for dataset in self.datasets], np.int64)
        if not sizes.any():
            raise UsageError("the datasets have no windows.")
        try:
            weights = np.asarray(
                sizes if self._weights_argument is None else self._weights_argument, np.float64
            )
        except (TypeError, ValueError):
            weights = np.zeros(0)
        if weights.shape != sizes.shape or not (
            np.isfinite(weights).all() and (weights >= 0).all() and weights.any()
        ):
            raise UsageError(
                f"weights must be {len(sizes)} numbers >= 0, at least one above 0, got "
                f"{self._weights_argument!r}."
            )
        whole_parts = whole_weights(weights)
        self._ends = np.cumsum(whole_parts)
        self._num_draws = int(sizes.sum())
        total = int(self._ends[-1])
        self.weights = whole_parts / total
        # The number of draws in a turn is random. Six standard deviations more than needed are
        # expected, so that a second turn is computed in only one of 10^9 epochs.
        num_expected = self._num_draws + 6 * math.isqrt(self._num_draws) + 10
        #: For each member: how often one of its windows is drawn in one turn, on average. A turn is
        #: one call of `arrivals`.
        self._means = [
            Fraction(num_expected * part, total * max(size, 1))
            for part, size in zip(whole_parts.tolist(), sizes.tolist(), strict=True)
        ]
        self.opened_as = [dataset.opened_as for dataset in self.datasets]
        self._first = np.append(0, np.cumsum([len(dataset) for dataset in self.datasets]))

    def __len__(self) -> int:
        """Return the number of windows of all members."""
        return int(self._first[-1])

    @property
    def texts(self) -> dict[int, str]:
        """Map from text number to text, for all members; see `WindowDataset.texts`."""
        return {number: text for dataset in self.datasets for number, text in dataset.texts.items()}

    def statistics(
        self,
        quantiles: Sequence[float] = (0.01, 0.99),
        *,
        use_cache: bool = True,
        progress: bool = True,
    ) -> dict[str, FieldStatistics]:
        """Compute statistics of each recorded field over the frames of all members.

        Each frame counts once. Weights are ignored. The result is cached in a file of the user's
        cache folder; see `WindowDataset.statistics`.
        """
        parts = [dataset.frames for dataset in self.datasets]
        names = self.datasets[0].field_names
        return compute_statistics(parts, None, names, quantiles, use_cache, progress)

    def read(self, windows: Sequence[int] | np.ndarray, allocate: Allocate) -> dict[str, Any]:
        member, numbers = self._locate(windows)
        used = np.unique(member).tolist()
        # If there are several members, a batch with windows of only one is copied too. All batches
        # then have the same strides, so that a compiled learner is compiled once.
        if len(self.datasets) == 1 or not used:
            return self.datasets[0].read(numbers, allocate)
        out: dict[str, torch.Tensor] = {}
        for number in used:
            places = np.flatnonzero(member == number)
            part = self.datasets[number].read(numbers[places], self._pool.empty)
            for name, values in flatten(part).items():
                if name not in out:
                    out[name] = allocate((len(numbers), *values.shape[1:]), values.dtype)
                _as_array(out[name])[places] = _as_array(values)
        return unflatten(out)

    @property
    def num_lost_windows(self) -> int:
        """Number of skipped windows of all members; see `WindowDataset.num_lost_windows`."""
        return sum(dataset.num_lost_windows for dataset in self.datasets)

    def readable(
        self, windows: Sequence[int] | np.ndarray, on_error: OnError | None = None
    ) -> Int64s:
        member, numbers = self.locate(windows)
        kept = np.ones(len(member), bool)
        for number in np.unique(member).tolist():
            dataset = self.datasets[number]
            places = np.flatnonzero(member == number)
            if (on_error or dataset.on_error) == "skip":
                kept[places] = np.isin(numbers[places], dataset.readable(numbers[places]))
        return (self._first[member] + numbers)[kept]

    def damage(self, windows: Sequence[int] | np.ndarray, problem: DataFileError) -> DataFileError:
        member, numbers = self.locate(windows)
        problems = (
            self.datasets[number].damage(numbers[member == number], problem)
            for number in np.unique(member).tolist()
        )
        return next((known for known in problems if known is not problem), problem)

    def at(self, opened_as: Any, may_lack: bool = False) -> WindowMixture:
        """Return a mixture whose members read earlier snapshots; see `WindowDataset.at`."""
        if self.opened_as == opened_as:
            return self
        members = [
            each.at(opened, may_lack) for each, opened in zip(self.datasets, opened_as, strict=True)
        ]
        earlier: WindowMixture = object.__new__(type(self))
        earlier.__setstate__({**self.__getstate__(), "datasets": members})
        return earlier

    def shuffled(self, epoch: Epoch, until: Sequence[Any] | None = None) -> tuple[Int64s, Int64s]:
        """Draw the windows of an epoch by weight, with replacement.

        The draws depend only on the epoch and the names of the windows. Each draw has a random
        time, by which the draws are sorted; see `arrivals`.

        Args:
            epoch: Epoch of the draws.
            until: Last draw to return, as [time, *window name]. None: return as many draws as the
                mixture has windows.

        Returns:
            The numbers of the drawn windows in order, and the ascending times of the draws.
        """
        draws = times = np.zeros(0, np.int64)
        for turn in count():
            later, later_times = self._arrivals(epoch, turn)
            draws = np.append(draws, later)
            times = np.append(times, later_times)
            is_enough = (
                len(draws) >= self._num_draws if until is None else turn >= turn_of(until[0])
            )
            if is_enough:
                break
        num_draws = self._num_draws if until is None else _num_upto_draw(self, draws, times, until)
        return draws[:num_draws], times[:num_draws]

    def _arrivals(self, epoch: Epoch, turn: int) -> tuple[Int64s, Int64s]:
        """Draw windows of all members for one turn: a period of the random times of draws.

        Returns:
            The numbers of the drawn windows in order, and the ascending times of the draws.
        """
        windows = []
        times = []
        for member, dataset in enumerate(self.datasets):
            place, time = arrivals(
                dataset.random_keys(epoch.with_purpose(member, turn)), self._means[member], turn
            )
            windows.append(self._first[member] + place)
            times.append(time)
        ordered, order = torch.sort(torch.from_numpy(np.concatenate(times)), stable=True)
        return np.concatenate(windows)[order.numpy()], ordered.numpy()

    def name(self, window: int) -> list[Any]:
        """Return the name of a window: index of its dataset, then its name in that dataset."""
        member = int(np.searchsorted(self._first, window, side="right")) - 1
        return [member, *self.datasets[member].name(window - int(self._first[member]))]

    def num_upto(self, name: Sequence[Any]) -> int:
        """Return the number of windows up to and including `name`, in the order of names."""
        member, *rest = name
        num_there: int = self.datasets[member].num_upto(rest)
        return num_there + int(self._first[member])

    def locate(self, windows: Sequence[int] | np.ndarray) -> tuple[Int64s, Int64s]:
        """Return the dataset of each window, as an index into `datasets`, and its number there.

        Both results are int64 `[B]`.
        """
        return self._locate(windows)

    def _locate(self, windows: Sequence[int] | np.ndarray) -> tuple[Int64s, Int64s]:
        numbers = checked_windows(windows, len(self))
        member = np.searchsorted(self._first, numbers, side="right") - 1
        return member, numbers - self._first[member]

    def draw(self, num_samples: int, generator: np.random.Generator) -> Int64s:
        """Draw windows with replacement. Each draw chooses a member by weight, then a window of it.

        Returns:
            Numbers of the drawn windows, int64 `[num_samples]`.
        """
        bits = generator.integers(1 << RANDOM_BITS, size=(num_samples, 2))
        member = np.searchsorted(self._ends, scaled(bits[:, 0], int(self._ends[-1])), side="right")
        sizes = np.diff(self._first)[member]
        windows: Int64s = self._first[member] + scaled(bits[:, 1], sizes)
        return windows

    def sampler(
        self,
        num_samples: int | None = None,
        seed: int = 0,
        *,
        even: Even = "pad",
        shard: ShardChoice = "auto",
    ) -> MixtureSampler:
        """Return a sampler that draws `num_samples` windows per epoch, for a `DataLoader`.

        None means the number of windows of the mixture. With shard="auto", all ranks of
        torch.distributed use the mixture of rank 0, so every rank must call this method.
        """
        agreed = agreement_of(current_shard(checked_shard(shard)))(0, lambda: self.opened_as)
        if agreed != self.opened_as:
            self.__setstate__(self.at(agreed).__getstate__())
        num_samples = len(self) if num_samples is None else whole("num_samples", num_samples, 0)
        return MixtureSampler(self, num_samples, seed, even, shard)


class MixtureSampler(Shown, Sampler[int]):
    """Sampler of window numbers of a mixture. Each iteration is the next epoch.

    The drawn windows depend on (seed, epoch). Rank r of W takes the draws r, r + W, ... The options
    `even` and `shard` are as in `WindowLoader`. Pass `shard="none"` to trainers that divide a
    sampler among ranks themselves, such as accelerate and Lightning.
    """

    def __init__(
        self, mixture: WindowMixture, num_samples: int, seed: int, even: Even, shard: ShardChoice
    ) -> None:
        self.mixture = mixture
        self.num_samples = num_samples
        self.seed = whole("seed", seed, 0)
        self.even = choice("even", even, get_args(Even))
        self._shard = checked_shard(shard)
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration; each later iteration adds 1."""
        self.epoch = whole("epoch", epoch, 0)

    def _places(self) -> Int64s:
        bounds = rank_batches(0, self.num_samples, 1, current_shard(self._shard), self.even, False)
        places: Int64s = bounds[bounds[:, 0] < bounds[:, 1], 0]
        return places

    def __len__(self) -> int:
        return len(self._places())

    def __iter__(self) -> Iterator[int]:
        order = self.mixture.draw(self.num_samples, Epoch(self.seed, self.epoch).generator())
        self.epoch += 1
        return iter(order.take(self._places(), mode="wrap").tolist())


def _num_upto_draw(windows: Any, draws: Int64s, keys: Int64s, last: Sequence[Any]) -> int:
    """Return the number of draws up to and including a draw of an earlier snapshot.

    If the window of this draw was deleted, the result is the number of draws before it.

    Args:
        windows: A `WindowDataset` or `WindowMixture`.
        draws: int64 `[K]`, numbers of the drawn windows, in order.
        keys: int64 `[K]`, sort keys of the draws, ascending.
        last: The draw to find: [sort key, *window name].
    """
    key, *name = last
    return num_upto(draws, keys, key, windows.num_upto(name))


def _as_array(tensor: torch.Tensor) -> np.ndarray:
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


class WindowLoader(Shown):
    """Iterable over batches of windows; one iteration is one epoch.

    A background thread prefetches batches, since a gather takes less time than a transfer from a
    worker process. `break` stops the thread, which may first complete its current batch. The next
    iteration resumes the same epoch. Only one iteration may be active: the older of two raises, as
    in `zip(loader, loader)`.

    An epoch is divided among W ranks: of each W * B windows in the order of the epoch, rank r takes
    the r-th B windows, so that all ranks have the same number of batches. Under torch.distributed,
    every rank must create the loader, and all ranks use the windows that rank 0 finds.

    Args:
        dataset: A `WindowDataset`, or a `WindowMixture`, whose epochs are weighted draws with
            replacement.
        batch_size: Windows in a batch of one rank, B.
        shuffle: Use a new permutation for each (seed, epoch). False keeps the order of the numbers.
        seed: Seed of the permutations or draws.
        drop_last: Leave out the last batch if it has less than B windows per rank.
        device: Device of the batches.
        num_ahead: Number of batches to prefetch.
        even: Rule by which ranks share the n windows of an incomplete last batch. "pad": each rank
            gets ceil(n / W) windows, where less than W windows are repeated from the start of the
            epoch. "drop": each rank gets floor(n / W) windows. "none": the first ranks get the
            remainder, so some ranks may have one batch less.
        shard: "auto" uses the rank of torch.distributed, "none" gives each process all windows, and
            (rank, W) selects a share.
        on_error: "skip" or "raise", for windows with damaged data; None uses the option of the
            dataset. Skipped windows make a batch shorter, perhaps empty. Order, ranks and resume
            stay the same.

    If the windows are too few for a batch, the loader warns (`RolloutDataWarning`). If the dataset
    has no window, only the dataset warns.

    Raises:
        UsageError: An argument is invalid, or an iteration continues after another was started.
    """

    def __init__(
        self,
        dataset: WindowDataset | WindowMixture,
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        device: torch.device | str = "cpu",
        num_ahead: int = 2,
        even: Even = "pad",
        shard: ShardChoice = "auto",
        on_error: OnError | None = None,
    ) -> None:
        self.on_error = (
            None if on_error is None else choice("on_error", on_error, get_args(OnError))
        )
        if not isinstance(dataset, WindowBatches):
            raise UsageError(
                f"dataset must be a WindowDataset or a WindowMixture, got {type(dataset).__name__}. "
                "Iterate over a RolloutDataset itself, or use rollout_data.loader."
            )
        self.batch_size = whole("batch_size", batch_size, 1)
        self.even = choice("even", even, get_args(Even))
        self._shard = checked_shard(shard)
        self.shuffle = arguments.flag("shuffle", shuffle)
        self.drop_last = arguments.flag("drop_last", drop_last)
        self.seed = whole("seed", seed, 0)
        self.device = arguments.device("device", device)
        self.num_ahead = whole("num_ahead", num_ahead, 1)
        self.dataset: WindowDataset | WindowMixture = self._open_as_rank_0(dataset)
        if len(self.dataset) and not len(self):
            text = (
                f"a WindowLoader has no batch: {len(self.dataset)} windows are too few "
                f"(batch_size {batch_size}, drop_last {drop_last}, "
                f"ranks {current_shard(self._shard).total})"
            )
            warnings.warn(text, RolloutDataWarning, stacklevel=2)
        #: Counts iterations and changes of the position, such as `set_epoch`. A running iteration
        #: raises an error if this count increases, because its batches would no longer be the next.
        self._turn = 0
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Jump to the start of an epoch; each later iteration adds 1."""
        self._go_to(whole("epoch", epoch, 0))
        self._turn += 1

    def _go_to(self, epoch: int) -> None:
        #: Epoch of the next batch.
        self.epoch = epoch
        self._position = 0
        self._windows = self.dataset
        #: The last window of the epoch in a loaded state, as [key, *name]; None in other epochs.
        self._until: Any = None
        self._ordered: tuple[Int64s, np.ndarray | None] | None = None

    def _open_as_rank_0(self, windows: Any, opened_as: Any = None) -> Any:
        """Return a dataset that reads the same snapshot of the folders as rank 0.

        Args:
            windows: Dataset of this rank.
            opened_as: Snapshot of a saved state; None: the snapshot that rank 0 has opened. Rank 0
                leaves out windows that were deleted since the state was saved.
        """

        def snapshot_to_open() -> Any:
            return (
                windows.opened_as
                if opened_as is None
                else windows.at(opened_as, may_lack=True).opened_as
            )

        return windows.at(agreement_of(current_shard(self._shard))(0, snapshot_to_open))

    def __len__(self) -> int:
        """Return the number of batches of this rank in a complete epoch."""
        return int((np.diff(self._bounds(0, len(self.dataset))) > 0).sum())

    def __getitem__(self, window: Any) -> Any:
        """Raise `UsageError`: a loader has no items. Pass `loader.dataset` to a `DataLoader`."""
        raise UsageError(
            f"a WindowLoader has no items, got [{window!r}]. Iterate over it, or pass its dataset "
            "to a DataLoader with collate_fn=dataset.collate."
        )

    @property
    def num_lost_windows(self) -> int:
        """Number of skipped windows of the dataset; see `WindowDataset.num_lost_windows`."""
        return self.dataset.num_lost_windows

    def order(self, epoch: int) -> Int64s:
        """Return the window numbers of an epoch in order, for all ranks together, int64."""
        epoch = whole("epoch", epoch, 0)
        return self._order(epoch)[0]

    def _order(self, epoch: int) -> tuple[Int64s, np.ndarray | None]:
        """Return the window numbers of an epoch in order, and their ascending sort keys.

        The keys are None without shuffling.
        """
        windows = self._windows if epoch == self.epoch else self.dataset
        if not self.shuffle:
            return np.arange(len(windows)), None
        return windows.shuffled(
            Epoch(self.seed, epoch), self._until if epoch == self.epoch else None
        )

    def _bounds(self, start: int, stop: int) -> Int64s:
        return rank_batches(
            start, stop, self.batch_size, current_shard(self._shard), self.even, self.drop_last
        )

    def __iter__(self) -> Iterator[dict[str, Any]]:
        epoch = self.epoch
        start = self._position
        self._ordered = self._ordered or self._order(epoch)
        order = self._ordered[0]
        self._turn += 1
        turn = self._turn
        global_size = self.batch_size * current_shard(self._shard).total
        windows = self._windows
        bounds = self._bounds(start, len(order))
        ahead_of = windows.ahead(Epoch(self.seed, epoch) if self.shuffle else None)

        def read(first: int, stop: int) -> Any:
            ahead_of(first, stop)
            return WindowBatches.collate(
                windows.batch(order.take(np.arange(first, stop), mode="wrap"), self.on_error)
            )

        batches = (read(first, stop) for first, stop in bounds.tolist() if first < stop)
        # Not in a `with` block: it would wait for the thread when the garbage collector deletes an
        # abandoned iteration.
        ahead = iter(PipelinedDataCollector(batches, self.device, self.num_ahead))
        for number, batch in enumerate(ahead, 1):
            if number < len(bounds):
                self._position = start + number * global_size
            else:  # Advance before `yield`: a state that is saved now starts at the next epoch.
                self._go_to(epoch + 1)
            yield batch
            del batch
            if self._turn != turn:
                ahead.close()
                raise UsageError(
                    "this iteration ended, since a newer iteration has begun or the position of "
                    "the loader was changed. Iterate once at a time."
                )
        self._go_to(epoch + 1)

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last delivered batch as plain data.

        The state is the same on each rank and restores all ranks.
        """
        place: dict[str, Any] = {
            "epoch": self.epoch,
            "position": self._position,
            "windows": self._windows.opened_as,
        }
        if self._position:
            self._ordered = self._ordered or self._order(self.epoch)
            order, keys = self._ordered
            last = self._position - 1
            place["after"] = self._windows.name(int(order[last]))
            place["until"] = None
            if keys is not None:
                place["after"] = [int(keys[last]), *place["after"]]
                place["until"] = [int(keys[-1]), *self._windows.name(int(order[-1]))]
        settings = {"num_windows": len(self._windows), "shuffle": self.shuffle, "seed": self.seed}
        return {"version": _VERSION, **place, **settings}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a `state_dict()`, with any number of ranks and any batch size.

        The remaining windows of the saved epoch follow in the same order, without deleted windows.
        Later epochs contain all windows of this dataset. Under torch.distributed every rank must
        call this method.

        Raises:
            UsageError: The state has other windows, another order or another format version.
            DataFileError: Trajectories of the epoch were deleted, and the folder has the older
                layout. Call `set_epoch` to start another epoch.
        """
        version = state.get("version") if isinstance(state, Mapping) else None
        if version != _VERSION:
            raise UsageError(
                f"the state has version {version!r}, expected {_VERSION}. "
                "Call set_epoch to begin an epoch without it."
            )
        position = whole("position", state.get("position"), 0)
        windows = self.dataset
        if position:
            windows = self._open_as_rank_0(windows, state["windows"])
        lacks_some = position > 0 and windows.opened_as != state["windows"]
        expected = {"num_windows": len(windows)} if position and not lacks_some else {}
        for name, value in {**expected, "shuffle": self.shuffle, "seed": self.seed}.items():
            if state.get(name) != value:
                raise UsageError(
                    f"the state has {name}={state.get(name)!r}, and this loader has {name}={value}."
                )
        after: Any = state.get("after")
        if position and not isinstance(after, (list, tuple)):
            raise UsageError(
                "the state is damaged: its item 'after' must be the name of a window, got "
                f"{after!r}. "
                "Call set_epoch to begin an epoch without it."
            )
        self.set_epoch(whole("epoch", state["epoch"], 0))
        self._windows = windows
        self._position = position
        self._until = state.get("until")
        order, keys = self._order(self.epoch)
        self._ordered = order, keys
        if lacks_some and keys is None:
            self._position = windows.num_upto(after)
        elif lacks_some and keys is not None:
            self._position = _num_upto_draw(windows, order, keys, after)
        if position and not len(self._bounds(self._position, len(order))):
            self._go_to(self.epoch + 1)
