"""Epochs of windows: `WindowLoader`, which reads ahead in a thread, and `WindowMixture` of several datasets.

One rule: where a window stands in an epoch is a function of (seed, epoch) and of its name, so that
where all ranks stand is two numbers: the epoch, and the key of the last window that was delivered.
Windows that are gone move no other.
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
from .worker_batches import WindowBatches, collate_windows

#: Version of a state of a loader.
_VERSION = 3
_CREATE = "create a WindowLoader"
_MIX = "create a WindowMixture"
_SAMPLER = "call WindowMixture.sampler"


class WindowMixture(WindowBatches):
    """Windows of several recordings, which must have the same fields, deltas and masks.

    Args:
        datasets: The members: `WindowDataset`s, paths and `Recording`s, or one of them. Their
            windows are numbered one after the other.
        weights: How probable each member is, of any sum; None makes all windows equally probable.
            They become whole numbers once, when the mixture is made: multiplied by a power of two
            and rounded, so that the largest of n has about 62 - log2(n) bits. What is above 0
            becomes at least 1.
        **options: Of `WindowDataset`, for the members that are paths or recordings.

    `draw`, `sampler()` and `WindowLoader` go by the weights; numbers and `len` do not.

    Raises:
        UsageError: Members or weights do not fit together; a member that has a weight has no
            window.
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
                _MIX, "", "datasets as a dataset, a path or a list of such", type(datasets).__name__
            )
        arguments.options_of(
            "WindowMixture", options, WindowMixture, WindowDataset, but=["data_dir"]
        )
        listed: Any = (
            [datasets] if isinstance(datasets, WindowDataset) or is_one(datasets) else datasets
        )
        self.datasets = [
            one if isinstance(one, WindowDataset) else WindowDataset(one, **options)
            for one in listed
        ]
        if not self.datasets:
            raise UsageError(_MIX, "", "at least one", "none")
        if options and all(isinstance(one, WindowDataset) for one in listed):
            raise UsageError(
                _MIX, "", "no options, as all members are datasets", ", ".join(options)
            )
        self._given = weights
        if any(dataset.is_remote for dataset in self.datasets):
            advice = "Copy them first, or load each by a WindowLoader of its own"
            raise UsageError(_MIX, "", "files of this machine", "URLs", advice)
        first = self.datasets[0].form
        for number, dataset in enumerate(self.datasets):
            if dataset.form != first:
                parts = [
                    f"{a} instead of {b}"
                    for a, b in zip(dataset.form, first, strict=False)
                    if a != b
                ]
                got = parts[0] if parts else "others"
                raise UsageError(
                    _MIX, f"with number {number}", "the fields and deltas of number 0", got
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
            raise UsageError(_MIX, f"with number {empty}", "windows, or no weight", "no window")

    def _open(self) -> None:
        super()._open()
        sizes = np.array([dataset.opened_as[3] for dataset in self.datasets], np.int64)
        if not sizes.any():
            raise UsageError(_MIX, "", "windows in at least one", "none")
        try:
            given = np.asarray(sizes if self._given is None else self._given, np.float64)
        except (TypeError, ValueError):
            given = np.zeros(0)
        if given.shape != sizes.shape or not (
            np.isfinite(given).all() and (given >= 0).all() and given.any()
        ):
            raise UsageError(
                _MIX, "", f"weights as {len(sizes)} numbers >= 0, some above 0", repr(self._given)
            )
        whole_parts = whole_weights(given)
        self._ends, self._num_draws = np.cumsum(whole_parts), int(sizes.sum())
        total = int(self._ends[-1])
        self.weights = whole_parts / total
        # A turn holds more draws than an epoch has, save for one in 10^9.
        num_expected = self._num_draws + 6 * math.isqrt(self._num_draws) + 10
        #: Arrivals of each window of a member in one turn, on average.
        self._means = [
            Fraction(num_expected * part, total * max(size, 1))
            for part, size in zip(whole_parts.tolist(), sizes.tolist(), strict=True)
        ]
        self.opened_as = [dataset.opened_as for dataset in self.datasets]
        self._first = np.append(0, np.cumsum([len(dataset) for dataset in self.datasets]))

    def __len__(self) -> int:
        """Count the windows of all members."""
        return int(self._first[-1])

    @property
    def texts(self) -> dict[int, str]:
        """The texts of all members by their numbers; see `WindowDataset`."""
        return {number: text for dataset in self.datasets for number, text in dataset.texts.items()}

    def statistics(
        self,
        quantiles: Sequence[float] = (0.01, 0.99),
        *,
        use_cache: bool = True,
        progress: bool = True,
    ) -> dict[str, FieldStatistics]:
        """Summarize each recorded field over the frames of all members; each frame counts once, whatever the weights.

        It is kept in a file of the user's cache folder; see `WindowDataset.statistics`.
        """
        parts = [dataset.frames for dataset in self.datasets]
        names = self.datasets[0].field_names
        return compute_statistics(
            "call WindowMixture.statistics", parts, None, names, quantiles, use_cache, progress
        )

    def read(self, windows: Sequence[int] | np.ndarray, allocate: Allocate) -> dict[str, Any]:
        member, numbers = self._located("call WindowMixture.batch", windows)
        used = np.unique(member).tolist()
        if len(used) <= 1:
            only = used[0] if used else 0
            return self.datasets[only].read(numbers, allocate)
        out: dict[str, torch.Tensor] = {}
        for one in used:
            places = np.flatnonzero(member == one)
            part = self.datasets[one].read(numbers[places], self._pool.empty)
            for name, values in flatten(part).items():
                if name not in out:
                    out[name] = allocate((len(numbers), *values.shape[1:]), values.dtype)
                _as_array(out[name])[places] = _as_array(values)
        return unflatten(out)

    @property
    def num_lost_windows(self) -> int:
        """Windows of all members that were skipped; see `WindowDataset`."""
        return sum(dataset.num_lost_windows for dataset in self.datasets)

    def readable(
        self, windows: Sequence[int] | np.ndarray, on_error: OnError | None = None
    ) -> Int64s:
        member, numbers = self.locate(windows)
        kept = np.ones(len(member), bool)
        for one in np.unique(member).tolist():
            dataset = self.datasets[one]
            places = np.flatnonzero(member == one)
            if (on_error or dataset.on_error) == "skip":
                kept[places] = np.isin(numbers[places], dataset.readable(numbers[places]))
        return (self._first[member] + numbers)[kept]

    def damage(self, windows: Sequence[int] | np.ndarray, problem: DataFileError) -> DataFileError:
        member, numbers = self.locate(windows)
        found = (
            self.datasets[one].damage(numbers[member == one], problem)
            for one in np.unique(member).tolist()
        )
        return next((one for one in found if one is not problem), problem)

    def at(self, opened_as: Any, may_lack: bool = False) -> WindowMixture:
        """Return the mixture of its members as they were opened; see `WindowDataset`."""
        if self.opened_as == opened_as:
            return self
        members = [
            each.at(one, may_lack) for each, one in zip(self.datasets, opened_as, strict=True)
        ]
        earlier: WindowMixture = object.__new__(type(self))
        earlier.__setstate__({**self.__getstate__(), "datasets": members})
        return earlier

    def shuffled(self, epoch: Epoch, until: Sequence[Any] | None = None) -> tuple[Int64s, Int64s]:
        """Draw as many windows as there are, with replacement and by the weights; and when each is drawn, ascending.

        A function of the epoch and of the names of the windows: see `arrivals`. With `until`, a
        time and the name of a window, those up to this draw.
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
        """Draw windows for one turn: their numbers, and their times, ascending."""
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
        """Name a window: its member, and its name there."""
        member = int(np.searchsorted(self._first, window, side="right")) - 1
        return [member, *self.datasets[member].name(window - int(self._first[member]))]

    def num_upto(self, name: Sequence[Any]) -> int:
        """Count the windows up to the one of this name."""
        member, *rest = name
        num_there: int = self.datasets[member].num_upto(rest)
        return num_there + int(self._first[member])

    def locate(self, windows: Sequence[int] | np.ndarray) -> tuple[Int64s, Int64s]:
        """Return the member of each window, and its number there: int64 `[B]` both."""
        return self._located("call WindowMixture.locate", windows)

    def _located(self, action: str, windows: Sequence[int] | np.ndarray) -> tuple[Int64s, Int64s]:
        numbers = checked_windows(action, windows, len(self))
        member = np.searchsorted(self._first, numbers, side="right") - 1
        return member, numbers - self._first[member]

    def draw(self, num_samples: int, generator: np.random.Generator) -> Int64s:
        """Draw windows with replacement: a member by weight, then one of its windows, all equally probable."""
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
        """Return a sampler for a `DataLoader`: `num_samples` draws an epoch (None: as many as there are windows).

        With shard="auto" every rank of torch.distributed has to call this: the mixture becomes that
        of rank 0.
        """
        told = agreement_of(current_shard(checked_shard(shard, _SAMPLER)))(
            0, lambda: self.opened_as
        )
        if told != self.opened_as:
            self.__setstate__(self.at(told).__getstate__())
        num_samples = (
            len(self) if num_samples is None else whole(_SAMPLER, "num_samples", num_samples, 0)
        )
        return MixtureSampler(self, num_samples, seed, even, shard)


class MixtureSampler(Shown, Sampler[int]):
    """Draws of a mixture, a function of (seed, epoch); each iteration is the next epoch.

    Rank r of W takes the draws r, r + W, ...; `even` and `shard` are as in `WindowLoader`. Trainers
    that split samplers themselves, as accelerate and Lightning do, need `shard="none"`.
    """

    def __init__(
        self, mixture: WindowMixture, num_samples: int, seed: int, even: Even, shard: ShardChoice
    ) -> None:
        self.mixture = mixture
        self.num_samples = num_samples
        self.seed = whole(_SAMPLER, "seed", seed, 0)
        self.even = choice(_SAMPLER, "even", even, get_args(Even))
        self._shard = checked_shard(shard, _SAMPLER)
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be that of another epoch, and count on from there."""
        self.epoch = whole("call MixtureSampler.set_epoch", "epoch", epoch, 0)

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
    """Count the draws up to one that may be deleted; see `num_upto`.

    Args:
        windows: A `WindowDataset` or `WindowMixture`.
        draws: int64 `[K]`, numbers of its windows, in order.
        keys: int64 `[K]`, ascending.
        last: Key of the draw, and the name of its window.
    """
    key, *name = last
    return num_upto(draws, keys, key, windows.num_upto(name))


def _as_array(tensor: torch.Tensor) -> np.ndarray:
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


class WindowLoader(Shown):
    """Iterate over the windows of a dataset in batches; one iteration is one epoch.

    A gather takes less time than handing its result from a worker process over, so a thread reads
    ahead instead. Leaving an iteration stops the thread, which may still end the batch that it is
    reading. Leaving an iteration and beginning another one goes on with the same epoch; going on
    with the old one as well raises, so `zip(loader, loader)` does. Ranks share an epoch: of each W
    * B windows in its order, rank r of W takes the r-th B, so that all have equally many batches.
    Under torch.distributed, every rank has to make the loader; all take the windows that rank 0
    sees.

    Args:
        dataset: A `WindowDataset`, or a `WindowMixture`, whose epochs are draws with replacement,
            by weight.
        batch_size: B, of each rank.
        shuffle: A new permutation for each (seed, epoch); False goes through the windows in order.
        seed: See above.
        drop_last: Leave out a last batch that has less than B windows for each rank.
        device: Where batches are delivered.
        num_ahead: Batches that are read ahead.
        even: How ranks share n windows of such a batch: "pad" gives each ceil(n / W), less than W
            of them being the first of the epoch again; "drop" gives each floor(n / W); "none" what
            there is: some may have a batch less.
        shard: "auto" asks torch.distributed, "none" gives each process all windows, (rank, W) gives
            that share.
        on_error: "skip" or "raise", for windows whose data are damaged; None does what the dataset
            does. A batch is shorter by the windows that are skipped, perhaps empty; order, ranks
            and resume stay the same.

    A loader whose epochs have no batch warns (`RolloutDataWarning`), unless its dataset has no
    window and did.

    Raises:
        UsageError: An argument is wrong; an iteration goes on after another one was begun.
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
            None if on_error is None else choice(_CREATE, "on_error", on_error, get_args(OnError))
        )
        if not isinstance(dataset, WindowBatches):
            expected = "dataset as a WindowDataset or a WindowMixture"
            advice = "A RolloutDataset gives its batches itself"
            raise UsageError(_CREATE, "", expected, type(dataset).__name__, advice)
        self.batch_size = whole(_CREATE, "batch_size", batch_size, 1)
        self.even = choice(_CREATE, "even", even, get_args(Even))
        self._shard = checked_shard(shard, _CREATE)
        self.shuffle = arguments.flag(_CREATE, "shuffle", shuffle)
        self.drop_last = arguments.flag(_CREATE, "drop_last", drop_last)
        self.seed = whole(_CREATE, "seed", seed, 0)
        self.device = arguments.device(_CREATE, "device", device)
        self.num_ahead = whole(_CREATE, "num_ahead", num_ahead, 1)
        self.dataset: WindowDataset | WindowMixture = self._as_rank_0_has(dataset)
        if len(self.dataset) and not len(self):
            about = f"batch_size {batch_size}, drop_last {drop_last}, ranks {current_shard(self._shard).total}"
            text = f"a WindowLoader has no batch: there are too few of {len(self.dataset)} windows ({about})"
            warnings.warn(text, RolloutDataWarning, stacklevel=2)
        #: Counts iterations that were begun and jumps: an iteration from before is over.
        self._turn = 0
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch, and count on from there."""
        self._go_to(whole("call WindowLoader.set_epoch", "epoch", epoch, 0))
        self._turn += 1

    def _go_to(self, epoch: int) -> None:
        self.epoch = epoch  #: The epoch that the next batch belongs to.
        self._position = 0
        self._windows = self.dataset
        self._until: Any = None  # the last key of an epoch that was begun elsewhere
        self._ordered: tuple[Int64s, np.ndarray | None] | None = None

    def _as_rank_0_has(self, windows: Any, opened_as: Any = None) -> Any:
        """Return windows as rank 0 has them, as far as it still does if they were `opened_as` this."""

        def look() -> Any:
            return (
                windows.opened_as
                if opened_as is None
                else windows.at(opened_as, may_lack=True).opened_as
            )

        return windows.at(agreement_of(current_shard(self._shard))(0, look))

    def __len__(self) -> int:
        """Count the batches of a whole epoch of this rank."""
        return int((np.diff(self._bounds(0, len(self.dataset))) > 0).sum())

    def __getitem__(self, window: Any) -> Any:
        """Raise `UsageError`: a loader is iterated over; a `DataLoader` takes its `dataset`."""
        expected = "a loop over it"
        advice = "A DataLoader takes the WindowDataset, with collate_fn=dataset.collate"
        raise UsageError("take an item of a WindowLoader", "", expected, f"[{window!r}]", advice)

    @property
    def num_lost_windows(self) -> int:
        """Windows of the dataset that were skipped; see `WindowDataset`."""
        return self.dataset.num_lost_windows

    def order(self, epoch: int) -> Int64s:
        """Return the windows of an epoch of all ranks in order, int64."""
        epoch = whole("call WindowLoader.order", "epoch", epoch, 0)
        return self._order(epoch)[0]

    def _order(self, epoch: int) -> tuple[Int64s, np.ndarray | None]:
        """The windows of an epoch, and the ascending keys that a shuffled order goes by."""
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
        windows, bounds = self._windows, self._bounds(start, len(order))
        ahead_of = windows.ahead(Epoch(self.seed, epoch) if self.shuffle else None)

        def read(first: int, stop: int) -> Any:
            ahead_of(first, stop)
            return collate_windows(
                windows.batch(order.take(np.arange(first, stop), mode="wrap"), self.on_error)
            )

        batches = (read(first, stop) for first, stop in bounds.tolist() if first < stop)
        # No `with` block: an iteration that the garbage collector drops must not wait for its
        # thread.
        ahead = iter(PipelinedDataCollector(batches, self.device, self.num_ahead))
        for number, batch in enumerate(ahead, 1):
            if number < len(bounds):
                self._position = start + number * global_size
            else:  # here, so that no state stands at the end of an epoch
                self._go_to(epoch + 1)
            yield batch
            del batch
            if self._turn != turn:
                ahead.close()
                got = "another one that was begun since, or a loader that was set to another place"
                raise UsageError(
                    "go on with an iteration", "over a WindowLoader", "one at a time", got
                )
        self._go_to(epoch + 1)

    def state_dict(self) -> dict[str, Any]:
        """Where all ranks stand after the last batch that was delivered, in plain data: the same in each of them."""
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
        """Go on where `state_dict` was taken, in any number of ranks and with any batch size: the same windows follow.

        The epoch goes on with the windows that it began with, as far as they are still there; later
        ones have those of the dataset. Under torch.distributed every rank has to call this.

        Raises:
            UsageError: The state belongs to other windows or to another order, or is of an earlier
                version.
            DataFileError: Trajectories of the epoch are gone, and the folder is of the older
                layout. `set_epoch` begins another epoch.
        """
        action = "call WindowLoader.load_state_dict"
        version = state.get("version") if isinstance(state, Mapping) else None
        if version != _VERSION:
            advice = "set_epoch begins an epoch"
            raise UsageError(action, "", f"a state of version {_VERSION}", repr(version), advice)
        position = whole(action, "position", state.get("position"), 0)
        windows = self.dataset
        if position:
            windows = self._as_rank_0_has(windows, state["windows"])
        lacks_some = position > 0 and windows.opened_as != state["windows"]
        expected = {"num_windows": len(windows)} if position and not lacks_some else {}
        for name, value in {**expected, "shuffle": self.shuffle, "seed": self.seed}.items():
            if state.get(name) != value:
                raise UsageError(action, "", f"{name} = {value}", repr(state.get(name)))
        after: Any = state.get("after")
        if position and not isinstance(after, (list, tuple)):
            expected_name = "the name of the last window that was delivered"
            raise UsageError(action, "", expected_name, repr(after), "set_epoch begins an epoch")
        self.set_epoch(whole(action, "epoch", state["epoch"], 0))
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
