"""RolloutDataset: recorded rollouts as batches of parallel streams: plan, gather, commit.

One rule: `get_batch` plans with integers, reads what the plan says, and only then moves on; a
failed read leaves every cursor where it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import numpy as np
import torch

from storage.errors import DatasetExhausted, RolloutDataError, UsageError, nearest
from storage.prefetch import PrefetchedItems

from .base import RolloutFileBase
from .batches import BatchOptions, BatchReader
from .chunk_files import CHUNK_CACHE_BYTES
from .cursor import Deal, Int64s, Plan, StreamState, deal_next, plan_steps
from .dataset_arguments import flag, frame_rate, real, whole
from .dealer import Dealer
from .file_frames import LostBlockError
from .frames import FrameStore
from .lookup import empty_batch, frames_at, write_into
from .passes import PassOptions, frame_range
from .prefetch import PrefetchedBatches
from .readahead import ReadAhead
from .resume import Position, position_of, restore, state_at
from .sharding import FirstEpoch, Shard, current_shard
from .source_base import DataDirs, Source, absolute_paths
from .sources import open_source
from .transition import Transition

Cache = Literal["none", "ram", "device"]
_CACHES = ("none", "ram", "device")
_INTERPOLATIONS = ("nearest", "linear")


class RolloutDataset(RolloutFileBase):
    """Stream recorded trajectories into `num_envs` parallel streams, in order, with random starts.

    Every env plays one trajectory after the other; when one ends, that env alone takes the next
    unused one. Reads block files, and folders of the older `trajectory_*/traj_*_*.pickle` layout.
    Nothing is read before the first batch.

    Args:
        data_dir: A folder or a list of folders.
        num_envs: Parallel streams.
        dataset_loops: How often all trajectories are delivered; below 1 for ever.
        random_shuffle_traj_order: Deal them in an order that is a permutation by (seed, pass).
        keep_latest_n_trajs: N > 0 reads only the newest N complete trajectories, waits until there
            are N, and looks for newer ones at every pass.
        starting_frame_range: Half-open range of the frame at which a trajectory starts.
        device: Where batches are delivered; None is CUDA if there is one. In DataLoader workers
            always the CPU.
        num_transitions_per_env: T of the batches of iteration; None is one step without a time axis.
        seed: Of permutations and starting frames.
        cache: "none" reads the mapped files, "ram" copies the frames into memory first, "device" into
            the memory of `device`, so that a batch never leaves it. Blocks are never modified; whoever
            truncates a mapped one ends every process that reads it, as with any mapped file.
        flatten_observations: Join components along the last axis in `obs_segments` order; False
            gives dicts.
        mark_first_frame: Mark the first frame delivered of a trajectory as done, by which recurrent
            learners reset. `is_first` tells it in either case.
        drop_last: Stop at the first batch that not every env can fill, and count what is left in
            `num_dropped_frames`. False goes on until all envs are exhausted; the exhausted repeat
            their last transition with `valid=False`.
        verify_on_open: Check every checksum when a block is first seen.
        wait_timeout_s: How long to wait for `keep_latest_n_trajs`.
        contiguous: Give every field contiguous memory of its own, rather than a view of rows.
        frame_rate_hz: For `get_batch_by_time`; None takes it from the metadata.
        interpolation: "nearest" or "linear", for `get_batch_by_time`.
        chunk_cache_bytes: How much of the decoded chunks of coded components is kept, those used last; 0 for none.

    Attributes:
        problems: What could not be read, was repaired or left out, as exceptions.
        num_dropped_frames: Frames that `drop_last` left undelivered.

    Raises:
        UsageError: An argument is wrong, or there are fewer trajectories than envs (at reset).
        WaitTimeoutError: `keep_latest_n_trajs` did not come in time.
    """

    def __init__(
        self,
        data_dir: DataDirs,
        num_envs: int,
        dataset_loops: int = 1,
        random_shuffle_traj_order: bool = False,
        keep_latest_n_trajs: int = 0,
        starting_frame_range: tuple[int, int] = (0, 1),
        device: torch.device | str | None = None,
        *,
        num_transitions_per_env: int | None = None,
        seed: int = 0,
        cache: Cache = "none",
        flatten_observations: bool = True,
        mark_first_frame: bool = True,
        drop_last: bool = False,
        verify_on_open: bool = False,
        wait_timeout_s: float = 60.0,
        contiguous: bool = False,
        frame_rate_hz: float | None = None,
        interpolation: Literal["nearest", "linear"] = "nearest",
        chunk_cache_bytes: int = CHUNK_CACHE_BYTES,
    ) -> None:
        super().__init__(data_dir, num_envs, device)
        self._paths = absolute_paths(data_dir)
        for name, value, allowed in (("cache", cache, _CACHES), ("interpolation", interpolation, _INTERPOLATIONS)):
            if value not in allowed:
                raise UsageError(
                    "open the dataset", repr(data_dir), f"{name} {nearest(str(value), allowed)}", repr(value)
                )
        self.num_transitions_per_env = self._checked_steps(num_transitions_per_env)
        self.cache, self.drop_last, self.interpolation = cache, flag("drop_last", drop_last), interpolation
        self.verify_on_open = flag("verify_on_open", verify_on_open)
        self._chunk_cache_bytes = whole("chunk_cache_bytes", chunk_cache_bytes, 0)
        self.num_dropped_frames = 0
        self._passes = PassOptions(
            whole("dataset_loops", dataset_loops, -(1 << 62)),
            flag("random_shuffle_traj_order", random_shuffle_traj_order),
            whole("keep_latest_n_trajs", keep_latest_n_trajs, 0),
            frame_range(starting_frame_range),
            whole("seed", seed, 0),
            real("wait_timeout_s", wait_timeout_s, "seconds >= 0", lambda seconds: seconds >= 0),
        )
        self._look = {
            "flatten_observations": flag("flatten_observations", flatten_observations),
            "mark_first_frame": flag("mark_first_frame", mark_first_frame),
            "contiguous": flag("contiguous", contiguous),
        }
        self._frame_rate_hz = None if frame_rate_hz is None else frame_rate(frame_rate_hz)
        self._epoch = 0
        self._lent_to: PrefetchedItems[Any] | None = None  # while a thread reads ahead
        self._saved_for: FirstEpoch | None = None  # the epoch of workers that continues the state just loaded
        self._forget()

    def _forget(self) -> None:
        """Be as before the first batch."""
        self._source: Source | None = None
        self._dealer: Dealer | None = None
        self._deal: Deal | None = None
        self._state = StreamState.fresh(self.num_envs)
        self._shard = Shard(0, 1)
        self._saved: dict[str, Any] | None = None  # the state just loaded, until a batch was delivered
        self._reader: BatchReader | None = None
        self._readahead: ReadAhead | None = None
        self._is_started = False

    def __getstate__(self) -> dict[str, Any]:
        """A pickled dataset opens its files anew where it arrives, and starts from the beginning."""
        state = self.__dict__.copy()
        for name in ("_source", "_dealer", "_deal", "_reader", "_readahead", "_state", "_lent_to"):
            del state[name]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lent_to = None
        self._forget()
        self._saved = state["_saved"]

    # What there is

    @property
    def source(self) -> Source:
        """The opened folders."""
        if self._source is None:
            self._source = open_source(self._paths, self.verify_on_open, self._chunk_cache_bytes)
        return self._source

    @property
    def problems(self) -> list[RolloutDataError]:
        """What could not be read, was repaired or left out, as exceptions, in the order in which it was found."""
        return self.source.problems

    @property
    def metadata(self) -> dict[str, Any]:
        """Contents of metadata.json of the (first) folder."""
        return self.source.metadata

    @property
    def num_trajectories(self) -> int:
        """Trajectories in the folders, as last seen."""
        return len(self._store().index)

    @property
    def num_frames(self) -> int:
        """Frames in the folders, as last seen."""
        return self._store().index.num_frames

    @property
    def num_dataset_looped(self) -> int:
        """How many passes were dealt out completely."""
        if self._deal is None:
            return 0
        is_over = bool(self._state.is_exhausted.any()) and not self._passes.has_pass(self._deal.number + 1)
        return self._deal.number + int(is_over)

    def _store(self) -> FrameStore:
        if self._deal is not None:
            return self._deal.source
        self.source.refresh()
        return self.source.snapshot()

    # Passes

    def set_epoch(self, epoch: int) -> None:
        """Let the next reset shuffle otherwise; equal epochs give equal orders. For `DataLoader` epochs."""
        self._epoch = int(epoch)

    def _new_dealer(self) -> Dealer:
        """What orders passes for this process; made anew when the shard or the epoch may have changed."""
        self._shard = current_shard()
        keeps_on = {"none": None, "ram": torch.device("cpu"), "device": self.device}[self.cache]
        self._dealer = Dealer(self.source, self._passes, self._shard, self._epoch, keeps_on)
        return self._dealer

    # Streams (see RolloutFileBase)

    def reset_all(self) -> None:
        dealer = self._new_dealer()
        deal = dealer.first()
        self._check_enough(deal)
        state, deal = deal_next(StreamState.fresh(self.num_envs), np.arange(self.num_envs), deal, dealer.following)
        self._saved, self._reader, self.num_dropped_frames = None, None, 0
        self._go_to(Position(state, deal))

    def _check_enough(self, deal: Deal) -> None:
        num_trajectories = len(deal.order)
        available = num_trajectories * max(1, self._passes.dataset_loops)
        if num_trajectories and (self._passes.is_endless or available >= self.num_envs):
            return
        among = "" if self._shard.total == 1 else f" for each of {self._shard.total} workers"
        left_out = f" ({len(self.problems)} problems, the first: {self.problems[0]})" if self.problems else ""
        raise UsageError(
            f"start {self.num_envs} envs",
            f"on {self.data_dir!r}",
            f"at least {self.num_envs} trajectories{among}",
            f"{num_trajectories}{left_out}",
            "Use fewer envs, more passes (dataset_loops) or more data",
        )

    def refresh_handlers(self, env_ids: torch.Tensor) -> None:
        assert self._deal is not None and self._dealer is not None
        self._state, self._deal = deal_next(self._state, env_ids.numpy(), self._deal, self._dealer.following)

    def _plan(self, num_steps: int, envs: Int64s | None = None) -> tuple[Plan, StreamState, Deal]:
        assert self._deal is not None and self._dealer is not None
        if self._state.is_exhausted.all():
            raise DatasetExhausted(
                "read another batch",
                f"from {self.data_dir!r}",
                "",
                f"all {self.num_dataset_looped} passes were delivered",
                "reset() starts again",
            )
        envs = np.arange(self.num_envs) if envs is None else envs
        plan, state, deal = plan_steps(self._state, self._deal, num_steps, self._dealer.following, envs)
        if self.drop_last and (plan.num_valid[envs] < num_steps).any():
            left = deal.lengths[state.trajectory] - state.frame
            self.num_dropped_frames = int(plan.num_valid.sum() + left[~state.is_exhausted].sum())
            raise DatasetExhausted(
                "fill another batch",
                f"from {self.data_dir!r}",
                "",
                f"{self.num_dropped_frames} frames are left",
                "drop_last=False delivers them",
            )
        return plan, state, deal

    def _read(self, plan: Plan, envs: Int64s, without_time: bool = False) -> Transition:
        if self._reader is None:
            self._reader = BatchReader(BatchOptions(self.device, **self._look))
        return self._reader.read(plan, envs, self._shard.number, without_time)

    def get_batch(self, num_transitions_per_env: int | None = None) -> Transition:
        """Give the next batch: a `Transition` of `[T, num_envs, ...]`, or `[num_envs, ...]` without T.

        Raises:
            DatasetExhausted: Everything was delivered; also a `StopIteration`.
        """
        steps = self._checked_steps(num_transitions_per_env)
        self._ensure_started()
        batch, state, deal = self._next(steps or 1, np.arange(self.num_envs), without_time=steps is None)
        self._commit(state, deal)
        return batch

    def _next(self, num_steps: int, envs: Int64s, without_time: bool) -> tuple[Transition, StreamState, Deal]:
        """Plan and read the next steps of `envs`; it is gone on without trajectories that turn out to be lost."""
        while True:
            plan, state, deal = self._plan(num_steps, envs)
            if self._readahead is not None:
                self._readahead.before(plan)
            try:
                return self._read(plan, envs, without_time), state, deal
            except LostBlockError as lost:
                assert self._deal is not None and self._dealer is not None
                self._state, self._deal = self._dealer.without(lost, self._state, self._deal)

    def _commit(self, state: StreamState, deal: Deal) -> None:
        self._state, self._deal, self._saved = state, deal, None

    def get_buffer(self, num_transitions_per_env: int | None = None) -> Transition:
        """Allocate a batch of zeros in the form that `get_batch` gives."""
        self._ensure_started()
        return empty_batch(
            self._store(), self._batch_options(), self._checked_steps(num_transitions_per_env), self.num_envs
        )

    def _batch_options(self) -> BatchOptions:
        return BatchOptions(self.device, **self._look)

    def fill_transition(self, buffer: Transition, env_ids: torch.Tensor | None = None) -> Transition:
        """Write the next step of `env_ids` into those rows of a `[num_envs, ...]` buffer; only they move on."""
        self._ensure_started()
        ids = np.sort(self._checked_ids(env_ids).numpy())
        step, state, deal = self._next(1, ids, without_time=True)
        write_into(buffer, step, torch.from_numpy(ids))
        self._commit(state, deal)
        return buffer

    def fill_rollout(self, buffer: Transition, num_transitions_per_env: int) -> Transition:
        """Write the next T steps into a `[T, num_envs, ...]` buffer in one plan."""
        write_into(buffer, self.get_batch(num_transitions_per_env), None)
        return buffer

    def prefetch(self, num_batches: int = 2, device: torch.device | str | None = None) -> PrefetchedBatches:
        """Iterate with batches read ahead by a thread and copied to `device` (None: the dataset's).

        `state_dict()` of the iterator tells what was delivered, not what was read ahead.
        """
        return PrefetchedBatches(self, num_batches, device)

    # Lookup by time

    @property
    def frame_rate_hz(self) -> float:
        rate = self._frame_rate_hz
        if rate is None and (found := self.metadata.get("frame_rate_hz")) is not None:
            rate = frame_rate(found)
        if rate is None:
            raise UsageError(
                "look frames up by time",
                f"in {self.data_dir!r}",
                "a known frame rate",
                "none",
                "Give frame_rate_hz, or record it in the metadata",
            )
        return rate

    def reference_num_frames(self, env_ids: torch.Tensor) -> torch.Tensor:
        assert self._deal is not None
        return torch.from_numpy(self._deal.lengths[self._state.trajectory[env_ids.numpy()]])

    def read_frames_at(self, env_ids: torch.Tensor, position: torch.Tensor) -> Transition:
        assert self._deal is not None
        trajectory = self._state.trajectory[env_ids.numpy()]
        reader = BatchReader(self._batch_options())
        return frames_at(reader, self._deal, trajectory, position.numpy(), self.interpolation == "linear")

    # Resuming

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands: a few integers per env, plain data. Nothing that was only read ahead."""
        if self._saved is not None:
            return dict(self._saved)
        return state_at(self, position_of(self)) if self._is_started else {"version": 1, "is_started": False}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken: the next batches are the same, also if blocks have come since.

        The next iteration (`iter(dataset)`) continues too, instead of starting again.

        Raises:
            UsageError: The state belongs to another dataset, number of envs, shard or setting.
        """
        if not isinstance(state, Mapping):
            raise UsageError("continue the stream", "", "what state_dict() gave", repr(state)[:100])
        self._forget()
        if state.get("is_started", True):
            restore(self, state)
            self._saved, self._saved_for = dict(state), FirstEpoch()

    def __iter__(self) -> Iterator[Transition]:
        if self._saved is not None and self._saved_for is not None and self._saved_for.is_now():
            if not self._is_started or self._shard != current_shard():  # a copy in a DataLoader worker
                restore(self, self._saved)
            return self
        return super().__iter__()

    def _go_to(self, position: Position) -> None:
        self._state, self._deal = position
        self._readahead = ReadAhead(self.num_envs)
        self._is_started = True
