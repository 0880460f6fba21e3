"""`RolloutStream`: epochs, batches and resuming of a stream of recorded trajectories.

A batch takes three steps. `plan_next` computes the frames of all ranks with integers. `read` reads
the frames of this process. `commit` keeps the new position. So a failed read moves no cursor.
"""

from __future__ import annotations

import secrets
import weakref
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import get_worker_info

from storage.core.arguments import whole
from storage.core.threads import Worker
from storage.errors import DataFileError, DatasetExhausted, RolloutDataError, UsageError
from storage.live.prefetch import PrefetchedItems

from ..blocks.trajectory_index import Int64s
from ..remote.locations import Origin
from ..sources.epoch import Even as Even
from ..sources.live_source import LiveSource
from ..sources.processes import process_group
from ..sources.processes.process_group import (
    Agree,
    Board,
    Shard,
    current_shard,
    current_worker,
    is_in_worker,
)
from .batch_reader import BatchOptions, BatchReader, ReadAhead
from .passes import Dealer, PassOptions, Undecided
from .rollout_file_base import RolloutFileBase, refuse_collation
from .step_planner import ALL, Deal, Plan, Position, StreamState, deal_next, plan_steps, share_of
from .stream_state import Misfit, check_settings, position_in, state_at
from .transition import Transition
from .unreadable_trajectories import ReadableCheck, leave_out


class RolloutStream(RolloutFileBase[Transition]):
    """The order of the batches of a `RolloutDataset`, which checks and documents the options."""

    _origins: list[Origin]
    _passes: PassOptions
    _look: dict[str, Any]
    even: Even
    cache: str
    on_error: str
    drop_last: bool
    verify_on_open: bool
    _chunk_cache_bytes: int
    _remote: Any
    as_dict: bool
    #: Whether a loader has workers, which map the frames and the index of this process.
    is_for_workers = False

    def _begin_unread(self, shard: Shard | None) -> None:
        """Initialize the state of an unread stream; see `checked_shard` for `shard`."""
        self._chosen_shard = shard
        #: Rank of the process that sent this copy to a worker.
        self._travelled = process_group.ALONE
        self._epoch = 0
        #: Whether a batch of the epoch was delivered.
        self._is_used = False
        #: The thread that prefetches; None if there is none.
        self.lent_to: PrefetchedItems[Any] | None = None
        #: The thread of an abandoned iteration, which may still read one batch.
        self.left_reader: Worker | None = None
        self._board = Board()
        self._num_iterations = 0
        #: Synchronizes scans of the folders across processes.
        self.agree: Agree = process_group.alone
        #: Whether the process of a `RolloutLoader` sends the scans.
        self._is_told = False
        self.num_dropped_frames = 0
        self._forget()

    def _forget(self) -> None:
        """Reset to the state before the first batch."""
        self.wait_for_left_reader()
        self._source: LiveSource | None = None
        #: A `Dealer` from the first batch on.
        self._dealer: Any = None
        self._position: Position | None = None
        self._shard = current_shard(self._chosen_shard)
        #: The envs of this rank among those of all ranks.
        self._mine = ALL
        #: The loaded state, until a batch was delivered.
        self._saved: dict[str, Any] | None = None
        self._saved_name = ""
        self._skip: int | None = None
        #: Whether the next iteration in this worker resumes the loaded state.
        self._is_continued = False
        self._is_started = False
        self._readable = ReadableCheck()
        #: Names and errors of trajectories that this process could not read.
        self.losses: list[Any] = []

    def __getstate__(self) -> dict[str, Any]:
        """A copy opens its files where it arrives, and starts from the beginning."""
        unpickled = {
            "_source", "_dealer", "_position", "_readahead", "reader", "lent_to", "left_reader",
        }  # fmt: skip
        state = {name: value for name, value in self.__dict__.items() if name not in unpickled}
        state["_travelled"] = self._rank()
        state["agree"] = self.agree if self._is_told else process_group.alone
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.lent_to = None
        self.left_reader = None
        self._forget()
        self._saved, self._saved_name = state["_saved"], state["_saved_name"]
        self._is_continued = state["_is_continued"]

    def _rank(self) -> Shard:
        """Return the share of this process.

        A worker that was not forked has no process group: its share is that of its parent process.
        """
        shard = current_shard(self._chosen_shard)
        if shard.total > 1:
            process_group.refuse_second_split()
        is_unknown = self._chosen_shard is None and shard == process_group.ALONE
        return self._travelled if is_unknown and is_in_worker() else shard

    # Contents

    @property
    def source(self) -> LiveSource:
        """The opened folders."""
        if self._source is None:
            self._source = self.new_source()
        return self._source

    def new_source(self) -> LiveSource:
        """Open the folders again; they may be missing while trajectories are still recorded."""
        is_awaited = self._passes.are_data_coming
        return LiveSource(
            self._origins,
            self.verify_on_open,
            self._chunk_cache_bytes,
            self._remote,
            is_awaited=is_awaited,
        )

    @property
    def problems(self) -> list[RolloutDataError]:
        """Data that were not read, were repaired or were left out, as errors in order of discovery."""
        return self.source.problems

    @property
    def advice(self) -> list[RolloutDataError]:
        """Remarks on data that are read as they are stored; see `Recording.advice`."""
        return self.source.advice

    @property
    def num_lost_trajectories(self) -> int:
        """Number of trajectories that could not be read to their end."""
        return self.source.num_lost_trajectories

    @property
    def num_dataset_looped(self) -> int:
        """Number of passes of which all trajectories were started."""
        if self._position is None:
            return 0
        state, deal, _ = self._position
        return deal.number + int(
            state.is_exhausted.any() and not self._passes.has_pass(deal.number + 1)
        )

    def wait_for_left_reader(self) -> None:
        """Wait until the thread of an abandoned prefetch has finished its last read."""
        reader = self.left_reader
        self.left_reader = None
        if reader is not None and reader.owner.is_own:
            reader.close()

    # Epochs

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch; later epochs count on from it.

        The number determines the permutations and starting frames of an epoch. Each reset, hence
        each iteration, begins the next epoch. The number also reaches persistent workers.
        """
        epoch = whole("epoch", epoch, 0)
        if self._saved is not None and self._saved["epoch"] == epoch:
            return  # the loaded state belongs to this epoch and is resumed
        if self._saved is not None:
            self._forget()
        self._epoch = epoch
        self._is_used = False
        if self._noted() is not None:
            self._note(self._epoch, self._saved_name)

    def _new_dealer(self, num_envs: int) -> Dealer:
        """Create the dealer of this process for `num_envs` envs of all ranks, for the current rank and epoch."""
        self._shard = self._rank()
        self._mine = self._shard.part_of(num_envs)
        if not self._is_told:
            self.agree = process_group.agreement_of(self._shard)
            if is_in_worker():
                self.agree = partial(self._board.agree, self._group())
        keeps_on = {"none": None, "ram": torch.device("cpu"), "device": self.device}[self.cache]
        # Without a circle of references, files are unmapped with the last reference to the stream.
        stream = weakref.proxy(self)
        dealer = Dealer(
            self.source,
            self._passes,
            self._epoch,
            keeps_on,
            skips=self.on_error == "skip",
            agree=lambda number, look: stream.agree(number, look),
            is_cut_off=self._shard.total > 1 and is_in_worker() and not self._is_told,
            is_shared=self.is_for_workers or is_in_worker(),
        )
        self._dealer = dealer
        return dealer

    def _undecided(self, deal: Deal, in_use: Int64s) -> None:
        """Raise `Undecided`: the pass after `deal` needs a scan of the folders first."""
        if self._passes.has_pass(deal.number + 1):
            raise Undecided

    def reset_all(self) -> None:
        self.wait_for_left_reader()
        if not is_in_worker() and (noted := self._noted()) is not None:  # workers have read
            self._epoch = noted[0]
            self._is_used = False
            self._note()
        if self._is_used:
            self._epoch = self._epoch + 1
            self._is_used = False
        num_envs = self.num_envs * self._rank().total
        dealer = self._new_dealer(num_envs)
        deal = dealer.first()
        self._check_enough(deal, num_envs)
        state, deal = deal_next(
            StreamState.fresh(num_envs), np.arange(num_envs), deal, dealer.following
        )
        self._saved = None
        self.num_dropped_frames = 0
        self._go_to(Position(state, deal, left=1))

    def _check_enough(self, deal: Deal, num_envs: int) -> None:
        num = len(deal.order)
        loops = max(1, self._passes.dataset_loops)
        if num and (self._passes.is_endless or num * loops >= num_envs):
            return
        text = f"{self.data_dir!r} has {num} trajectories for {num_envs} envs"
        if self._shard.total > 1:
            text += f" in {self._shard.total} ranks"
        text += ". Use fewer envs, more passes (dataset_loops) or more data."
        if self.problems:
            text += f" The first of {len(self.problems)} problems: {self.problems[0]}"
        raise UsageError(text)

    def refresh_handlers(self, env_ids: torch.Tensor) -> None:
        ids = self._checked_ids(env_ids)
        self._check_alone()
        self._ensure_started()
        state, deal, left = self.position
        self._position = Position(
            *deal_next(state, np.sort(ids.numpy()), deal, self._dealer.following), left
        )

    def _check_alone(self) -> None:
        """Raise if other processes plan the same stream, since they cannot be notified."""
        if self._shard.total * current_worker().total > 1:
            raise UsageError(
                f"several processes share the order of {self.data_dir!r} (ranks: "
                f"{self._shard.total}, workers: {current_worker().total}), so single envs cannot "
                "advance. Use all envs, or open the dataset with shard='none' and a seed for "
                "each rank."
            )

    def plan_next(
        self,
        num_steps: int,
        envs: Int64s | None = None,
        after: Position | None = None,
        is_read: bool = True,
    ) -> tuple[Plan, Position]:
        """Plan the next steps of this process; return the plan, and the position after it.

        Args:
            num_steps: Steps T.
            envs: The envs that advance; None: all.
            after: Position at which the steps begin; None: the current one.
            is_read: Whether this process reads the frames. If not, the plan has no env.

        Raises:
            DatasetExhausted: There is no further batch.
            Undecided: `after` is given, and the folders must be scanned first.
        """
        if after is None:
            self.wait_for_left_reader()
        position = after or self.position
        if self._dealer.is_due(position, self.agree is process_group.alone):
            if after is not None:
                raise Undecided
            position = self._dealer.refreshed(position)
            self._position = position
        state, deal, num_left = position
        if self._is_over(state):
            raise DatasetExhausted(
                f"all {self.num_dataset_looped} passes over {self.data_dir!r} are finished. "
                "Call reset() to start again."
            )
        following = self._dealer.following if after is None else self._undecided
        share = self._mine if is_read or self.drop_last else slice(0)
        plan, state, deal = plan_steps(state, deal, num_steps, following, envs, share)
        if self.drop_last and not plan.is_full:
            self.num_dropped_frames = int((plan.num_valid + state.left[self._mine]).sum())
            raise DatasetExhausted(
                f"the {self.num_dropped_frames} frames left in {self.data_dir!r} do not fill a "
                "batch. Pass drop_last=False to deliver them."
            )
        return plan, Position(state, deal, max(0, num_left - 1))

    def _is_over(self, state: StreamState) -> bool:
        """Return whether this rank has nothing more to deliver in this epoch."""
        if self.even == "pad" or self._shard.total == 1:
            return bool(state.is_exhausted.all())
        ranks = [self._shard.number] if self.even == "none" else range(self._shard.total)
        shares = [Shard(rank, self._shard.total).part_of(len(state.is_exhausted)) for rank in ranks]
        return any(bool(state.is_exhausted[share].all()) for share in shares)

    def get_batch(self, num_transitions_per_env: int | None = None) -> Transition:
        """Return the next batch: a `Transition` of `[T, num_envs, ...]`, or `[num_envs, ...]` without T.

        Memory is time first, so that `flatten(0, 1)` is a view. With `as_dict` the batch is a dict
        of tensors.

        Raises:
            DatasetExhausted: All passes were delivered; also a `StopIteration`.
        """
        steps = self._checked_steps(num_transitions_per_env)
        self._ensure_started()
        plan, position = self.plan_next(steps or 1)
        batch = self.read(plan, position, without_time=steps is None)
        self.commit(position)
        return cast(Transition, batch.tensors()) if self.as_dict else batch

    def read(
        self, plan: Plan, position: Position, envs: Int64s | None = None, without_time: bool = False
    ) -> Transition:
        """Read the frames of a plan; then release deleted files that the position after it does not need."""
        chosen = plan if envs is None else share_of(plan, envs)
        while True:
            try:
                self._readahead.before(plan)
                batch = self.reader.read(chosen, self._shard.number, without_time)
            except DataFileError as problem:
                self.losses += leave_out(self.source, plan, problem, self.on_error == "skip")
            else:
                self._readable.check(self.source, position, batch, self.on_error == "skip")
                self.release(position)
                return batch

    def release(self, position: Position) -> None:
        """Close deleted files that are not needed at a position."""
        index = position.deal.source.index
        self.source.release(lambda: index.blocks_of(self._dealer.needed(position)))

    def commit(self, position: Position) -> None:
        """Count the frames before a position as delivered."""
        self._position = position
        self._saved = None
        self._is_used = True

    def next_position(self) -> Position | None:
        """Return the position after the next batch of the iteration; None if there is no batch."""
        self._ensure_started()
        try:
            return self.plan_next(self.num_transitions_per_env or 1, is_read=False)[1]
        except DatasetExhausted:
            return None

    def __next__(self) -> Transition:
        """Return the next batch; in a DataLoader worker the next batch of this worker."""
        # torchdata may load a state after `iter`.
        self._is_continued = False
        worker = current_worker()
        if worker.total > 1:
            for _ in range(worker.number if self._skip is None else self._skip):
                position = self.next_position()
                if position is None:
                    raise StopIteration
                self.commit(position)
            self._skip = worker.total - 1
        return super().__next__()

    # Resuming

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the stream of all ranks as plain data, the same in every rank.

        Batches that were only prefetched do not count as delivered.

        Raises:
            UsageError: Workers of a plain DataLoader have read the batches.
        """
        if not is_in_worker() and self._noted() is not None:
            raise UsageError(
                f"workers of a DataLoader read {self.data_dir!r}, so this process does not know "
                "the position. Use the state_dict() of rollout_data.loader(dataset, "
                "num_workers=...) or of torchdata's StatefulDataLoader."
            )
        if self._saved is not None:
            return dict(self._saved)
        is_between_epochs = not self._is_started or (not self._is_used and self.is_over())
        if is_between_epochs:
            return {"version": 1, "is_started": False, "epoch": self._epoch + int(self._is_used)}
        state = state_at(self.position, self._passes, self._dealer.epoch)
        return state if current_worker().total == 1 else {**state, "skip": self._skip}

    @property
    def position(self) -> Position:
        """The position after the last delivered batch."""
        assert self._position is not None
        return self._position

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a `state_dict`, on any number of ranks and workers: the next batches are the same.

        Trajectories recorded since do not change them. Frames of trajectories that were deleted
        since are not `valid`. `num_envs` must be this rank's share of the envs in the state. The
        next iteration (`iter(dataset)`) resumes too. If the epoch of the state is over, the
        iteration begins the next epoch.

        Raises:
            UsageError: The state belongs to another dataset, number of envs or setting.
        """
        if not isinstance(state, Mapping):
            raise UsageError(f"state must be the result of state_dict(), got {repr(state)[:100]}.")
        self._forget()
        if state.get("is_started", True):
            self._restore(state)
            self._saved = dict(state)
            self._saved_name = secrets.token_hex(8)
        else:
            self._epoch = whole("epoch", state.get("epoch", 0), 0)
            self._is_used = False
        if is_in_worker():
            # A worker of torchdata's StatefulDataLoader; the next epoch has other workers.
            self._is_continued = True
            self._note(self._epoch + self._is_used, "")
        else:
            if self._noted() is not None:  # persistent workers
                self._board.write(f"state_{self._rank().number}", (self._saved, self._saved_name))
            self._note()

    def _restore(self, saved: Mapping[str, Any]) -> None:
        saved = dict(saved)
        try:
            skip = saved.pop("skip", None)
            if skip is not None and not is_in_worker():
                raise Misfit(
                    "the state belongs to a worker of a DataLoader. Load the state of the "
                    "DataLoader."
                )
            num_envs = whole("num_envs", saved["settings"]["num_envs"], 1)
            check_settings(saved, self._passes, self.num_envs, self._rank().part_of(num_envs))
            self._epoch = whole("epoch", saved["epoch"], 0)
            position = position_in(saved, self._new_dealer(num_envs))
        except (
            Misfit,
            KeyError,
            IndexError,
            TypeError,
            ValueError,
            AttributeError,
            OverflowError,
        ) as cause:
            if isinstance(cause, Misfit):
                text = f"the state does not fit {self.data_dir!r}: {cause}"
            else:
                text = (
                    f"the state for {self.data_dir!r} is damaged ({type(cause).__name__}: {cause}). "
                    "Load the result of state_dict()."
                )
            raise UsageError(text) from cause
        self._is_used = True
        self._skip = skip
        self._go_to(position)

    def __iter__(self) -> Iterator[Transition]:
        refuse_collation()
        if is_in_worker():
            return self._begin_in_worker()
        noted = self._noted()
        is_new = self._saved is not None and (noted is None or noted[1] != self._saved_name)
        return self if is_new and not self.is_over() else super().__iter__()

    def _ensure_started(self) -> None:
        if not self._is_started and self._saved is not None:  # a copy
            self._restore(self._saved)
        super()._ensure_started()

    def is_over(self) -> bool:
        """Return whether the epoch has no further batch."""
        return self.next_position() is None

    def _noted(self) -> Any:
        """Return the note of the workers of this rank: next epoch, and name of the resumed state; or None."""
        return self._board.read(f"next_{self._rank().number}")

    def _note(self, *note: Any) -> None:
        """Write the note that `_noted` reads; without arguments remove it."""
        self._board.write(f"next_{self._rank().number}", note or None)

    def _group(self) -> str:
        """Return the name of the group of workers that read this epoch together."""
        worker: Any = get_worker_info()
        return f"{self._rank().number}_{worker.seed - worker.id}_{self._num_iterations}"

    def _begin_in_worker(self) -> Iterator[Transition]:
        """Begin the epoch that the workers of this plain DataLoader agree on by notes."""
        if self._passes.refresh_s is not None and not self._is_told:
            raise UsageError(
                "refresh_s does not work with the workers of a plain DataLoader. "
                f"Read {self.data_dir!r} with rollout_data.loader(dataset, num_workers=...)."
            )
        if self._is_continued:
            self._ensure_started()
            self._is_continued = False
            return self
        self._shard = self._rank()
        self._skip = None
        while not self._board.write(
            f"{self._group()}_of_{current_worker().number}", None, is_final=True
        ):
            # This worker read that group: an earlier epoch, perhaps of the same seed.
            self._num_iterations += 1
        sent = self._board.read(f"state_{self._shard.number}")
        if sent is not None:
            self._saved, self._saved_name = sent
        epoch = self._epoch + self._is_used if self._saved is None else self._saved["epoch"]
        while (begun := self._board.read(self._group())) is None:
            following, continued = self._noted() or (epoch, "")
            is_resumed = self._saved_name not in ("", continued)
            if self._board.write(
                self._group(), (epoch if is_resumed else following, is_resumed), is_final=True
            ):
                self._note(1 + (epoch if is_resumed else following), self._saved_name)
        self._epoch, is_resumed = begun
        self._is_used = False
        if is_resumed and self._saved is not None:
            self._restore(self._saved)
            if not self.is_over():
                return self
            self._note(self._epoch + 2, self._saved_name)
        return super().__iter__()

    def follow(self, saved: dict[str, Any], agree: Agree) -> None:
        """Prepare this copy for a worker of `rollout_data.loader`, which resumes a state and receives scans."""
        self._saved = saved
        self.agree = agree
        self._is_told = True
        self._is_continued = True

    def _go_to(self, position: Position) -> None:
        self._position = position
        self._is_started = True
        self._readahead = ReadAhead(self.num_envs)
        self.reader = BatchReader(BatchOptions(self.device, **self._look))
