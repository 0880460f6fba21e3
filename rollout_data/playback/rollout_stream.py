"""`RolloutStream`: epochs, batches and resuming of a stream of recorded trajectories.

A batch takes three steps. `plan_next` computes the frames of all ranks with integers. `read` reads
the frames of this process. `commit` stores the new position. A failed read moves no cursor.
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
from .passes import PassOptions, PassScheduler, Undecided
from .rollout_file_base import RolloutFileBase, refuse_collation
from .step_planner import (
    ALL,
    PassOrder,
    Plan,
    Position,
    StreamState,
    assign_next,
    plan_steps,
    share_of,
)
from .stream_state import Misfit, check_settings, position_in, state_at
from .transition import Transition
from .unreadable_trajectories import ReadableCheck, leave_out, report_missing


class RolloutStream(RolloutFileBase[Transition]):
    """The order of the batches of a `RolloutDataset`, which checks and documents the options."""

    _origins: list[Origin]
    _passes: PassOptions
    _batch_options: dict[str, Any]
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
        """Initialize the state of a stream before its first batch.

        `shard` is the share of the envs that this process reads, as returned by `checked_shard`.
        """
        self._chosen_shard = shard
        #: Rank of the process that sent this copy to a worker.
        self._sender = process_group.ALONE
        self._epoch = 0
        #: Whether a batch of the epoch was delivered.
        self._is_used = False
        #: The thread that prefetches; None without `prefetch()`.
        self.prefetch_thread: PrefetchedItems[Any] | None = None
        #: The thread of an abandoned iteration, which may still read one batch.
        self.abandoned_reader: Worker | None = None
        self._board = Board()
        self._num_iterations = 0
        #: Synchronizes scans of the folders across processes.
        self.agree: Agree = process_group.alone
        #: Whether this copy receives its scans from the process of a `RolloutLoader`.
        self._receives_scans = False
        self.num_dropped_frames = 0
        self._reset_state()

    def _reset_state(self) -> None:
        """Reset to the state before the first batch."""
        self.wait_for_abandoned_reader()
        self._source: LiveSource | None = None
        #: The `PassScheduler` of the epoch; None before the first batch.
        self._scheduler: Any = None
        self._position: Position | None = None
        self._shard = current_shard(self._chosen_shard)
        #: The envs of this rank, as a slice of the envs of all ranks.
        self._own_envs = ALL
        #: The loaded state; None after the first delivered batch.
        self._saved: dict[str, Any] | None = None
        self._saved_name = ""
        self._skip: int | None = None
        #: Whether the next iteration in this worker resumes the loaded state.
        self._resumes = False
        self._is_started = False
        self._readable = ReadableCheck()
        #: Names and errors of trajectories that this process could not read.
        self.losses: list[Any] = []

    def __getstate__(self) -> dict[str, Any]:
        """Return the options without opened files. A copy opens the files itself."""
        unpickled = {
            "_source", "_scheduler", "_position", "_readahead", "reader", "prefetch_thread", "abandoned_reader",
        }  # fmt: skip
        state = {name: value for name, value in self.__dict__.items() if name not in unpickled}
        state["_sender"] = self._rank()
        state["agree"] = self.agree if self._receives_scans else process_group.alone
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.prefetch_thread = None
        self.abandoned_reader = None
        self._reset_state()
        self._saved, self._saved_name = state["_saved"], state["_saved_name"]
        self._resumes = state["_resumes"]

    def _rank(self) -> Shard:
        """Return the rank of this process, whose envs it reads.

        A worker process has the rank of its parent. If it was not forked, torch.distributed is not
        initialized in it, so the rank is sent with the stream.
        """
        shard = current_shard(self._chosen_shard)
        if shard.total > 1:
            process_group.refuse_second_split()
        is_unknown = self._chosen_shard is None and shard == process_group.ALONE
        return self._sender if is_unknown and is_in_worker() else shard

    # Contents

    @property
    def source(self) -> LiveSource:
        """Source of the trajectories in the folders. It is opened at the first access."""
        if self._source is None:
            self._source = self.new_source()
        return self._source

    def new_source(self) -> LiveSource:
        """Open the folders as a new source.

        With an option that waits for data, the folders may be missing at first.
        """
        is_awaited = self._passes.waits_for_data
        return LiveSource(
            self._origins,
            self.verify_on_open,
            self._chunk_cache_bytes,
            self._remote,
            is_awaited=is_awaited,
        )

    @property
    def problems(self) -> list[RolloutDataError]:
        """Errors for data that were unreadable, repaired or left out, in order of discovery."""
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
        """Number of passes of which every trajectory was assigned to an env."""
        if self._position is None:
            return 0
        state, pass_order, _ = self._position
        return pass_order.number + int(
            state.is_exhausted.any() and not self._passes.has_pass(pass_order.number + 1)
        )

    def wait_for_abandoned_reader(self) -> None:
        """Wait until the thread of an abandoned prefetch has finished its last read."""
        reader = self.abandoned_reader
        self.abandoned_reader = None
        if reader is not None and reader.owner.is_own:
            reader.close()

    # Epochs

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch; later epochs count on from it.

        The number determines the permutations and starting frames of an epoch. Each reset begins
        the next epoch, and each iteration resets. Persistent workers receive the number too.
        """
        epoch = whole("epoch", epoch, 0)
        if self._saved is not None and self._saved["epoch"] == epoch:
            # The next iteration resumes the loaded state, which belongs to this epoch.
            return
        if self._saved is not None:
            self._reset_state()
        self._epoch = epoch
        self._is_used = False
        if self._read_message() is not None:
            self._write_message(self._epoch, self._saved_name)

    def _new_scheduler(self, num_envs: int) -> PassScheduler:
        """Create the scheduler of the current epoch.

        `num_envs` is the number of envs of all ranks together.
        """
        self._shard = self._rank()
        self._own_envs = self._shard.part_of(num_envs)
        if not self._receives_scans:
            self.agree = process_group.agreement_of(self._shard)
            if is_in_worker():
                self.agree = partial(self._board.agree, self._group())
        keeps_on = {"none": None, "ram": torch.device("cpu"), "device": self.device}[self.cache]
        # A strong reference would be a cycle. Files should be unmapped at once when the stream is
        # deleted, not by the garbage collector later.
        stream = weakref.proxy(self)
        scheduler = PassScheduler(
            self.source,
            self._passes,
            self._epoch,
            keeps_on,
            skips=self.on_error == "skip",
            agree=lambda number, scan: stream.agree(number, scan),
            is_cut_off=self._shard.total > 1 and is_in_worker() and not self._receives_scans,
            is_shared=self.is_for_workers or is_in_worker(),
        )
        self._scheduler = scheduler
        return scheduler

    def _raise_undecided(self, pass_order: PassOrder, in_use: Int64s) -> None:
        """Raise `Undecided` if there is a pass after `pass_order`. Arguments as `NextPass`.

        Batches that are planned ahead use this function, because only the next batch may scan.
        """
        if self._passes.has_pass(pass_order.number + 1):
            raise Undecided

    def reset_all(self) -> None:
        self.wait_for_abandoned_reader()
        if not is_in_worker() and (message := self._read_message()) is not None:
            self._epoch = message[0]
            self._is_used = False
            self._write_message()
        if self._is_used:
            self._epoch = self._epoch + 1
            self._is_used = False
        num_envs = self.num_envs * self._rank().total
        scheduler = self._new_scheduler(num_envs)
        pass_order = scheduler.first()
        self._check_enough(pass_order, num_envs)
        state, pass_order = assign_next(
            StreamState.fresh(num_envs), np.arange(num_envs), pass_order, scheduler.following
        )
        self._saved = None
        self.num_dropped_frames = 0
        self._go_to(Position(state, pass_order, left=1))

    def _check_enough(self, pass_order: PassOrder, num_envs: int) -> None:
        num = len(pass_order.trajectories)
        loops = max(1, self._passes.dataset_loops)
        if num and (self._passes.is_endless or num * loops >= num_envs):
            return
        text = f"{str(self.data_dir)!r} has {num} trajectories for {num_envs} envs"
        if self._shard.total > 1:
            text += f" in {self._shard.total} ranks"
        text += ". Use fewer envs, more passes (dataset_loops) or more data."
        if self.problems:
            text += f" The first of {len(self.problems)} problems: {self.problems[0]}"
        raise UsageError(text)

    def refresh_handlers(self, env_ids: torch.Tensor) -> None:
        ids = self._checked_ids(env_ids)
        self._check_single_process()
        self._ensure_started()
        state, pass_order, left = self.position
        self._position = Position(
            *assign_next(state, np.sort(ids.numpy()), pass_order, self._scheduler.following), left
        )

    def _check_single_process(self) -> None:
        """Raise `UsageError` if other processes plan the batches of this stream too.

        They would not know that single envs have advanced.
        """
        if self._shard.total * current_worker().total > 1:
            raise UsageError(
                f"single envs cannot advance, because several processes read {str(self.data_dir)!r} "
                f"together (ranks: {self._shard.total}, workers: {current_worker().total}). "
                "Use all envs, or open the dataset with shard='none' and a seed for each rank."
            )

    def plan_next(
        self,
        num_steps: int,
        envs: Int64s | None = None,
        after: Position | None = None,
        is_read: bool = True,
    ) -> tuple[Plan, Position]:
        """Plan the next steps of this process; return the plan and the next position.

        Args:
            num_steps: Steps T.
            envs: The envs that advance; None: all.
            after: Position at which the steps begin; None: the current position.
            is_read: Whether this process reads the frames. If not, the plan is needed only for the
                next position, and contains no env.

        Raises:
            DatasetExhausted: The epoch has no further batch.
            Undecided: The folders must be scanned first; only with `after`.
        """
        if after is None:
            self.wait_for_abandoned_reader()
        position = after or self.position
        if self._scheduler.is_due(position, self.agree is process_group.alone):
            if after is not None:
                raise Undecided
            position = self._scheduler.refreshed(position)
            self._position = position
        state, pass_order, num_left = position
        if self._is_over(state):
            raise DatasetExhausted(
                f"all {self.num_dataset_looped} passes over {str(self.data_dir)!r} are finished. "
                "Call reset() to start again."
            )
        following = self._scheduler.following if after is None else self._raise_undecided
        share = self._own_envs if is_read or self.drop_last else slice(0)
        plan, state, pass_order = plan_steps(state, pass_order, num_steps, following, envs, share)
        if self.drop_last and not plan.is_full:
            self.num_dropped_frames = int((plan.num_valid + state.left[self._own_envs]).sum())
            raise DatasetExhausted(
                f"the {self.num_dropped_frames} frames left in {str(self.data_dir)!r} do not fill a "
                "batch. Pass drop_last=False to deliver them."
            )
        return plan, Position(state, pass_order, max(0, num_left - 1))

    def _is_over(self, state: StreamState) -> bool:
        """Return whether this rank has delivered its last batch of the epoch."""
        if self.even == "pad" or self._shard.total == 1:
            return bool(state.is_exhausted.all())
        ranks = [self._shard.number] if self.even == "none" else range(self._shard.total)
        shares = [Shard(rank, self._shard.total).part_of(len(state.is_exhausted)) for rank in ranks]
        return any(bool(state.is_exhausted[share].all()) for share in shares)

    def get_batch(self, num_transitions_per_env: int | None = None) -> Transition:
        """Return the next batch, `[T, num_envs, ...]`; without T one step, `[num_envs, ...]`.

        The batch is a `Transition`, or a dict of tensors with `as_dict`. Memory is time first, so
        that `flatten(0, 1)` is a view.

        Raises:
            DatasetExhausted: All passes were delivered. It is a `StopIteration` too.
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
        """Read the frames of a plan. Unreadable trajectories are left out or raise an error.

        Args:
            plan: The plan.
            position: Position after the plan. Deleted files that are not needed from there on are
                closed.
            envs: Envs to read (ascending); None: all envs of the plan.
            without_time: Whether the batch has no time axis. The plan must have one step.
        """
        chosen = plan if envs is None else share_of(plan, envs)
        self.losses += report_missing(self._scheduler, chosen)
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
        """Close files that were deleted and that are not needed from a position on."""
        index = position.pass_order.source.index
        self.source.release(lambda: index.blocks_of(self._scheduler.needed(position)))

    def commit(self, position: Position) -> None:
        """Set the position. All frames before it count as delivered."""
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
        """Return the next batch; in a DataLoader worker, the next batch of this worker."""
        # `load_state_dict` sets `_resumes` for the next `iter`. torchdata may call `iter` first.
        self._resumes = False
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
        """Return the position of the stream as plain data. All ranks return the same state.

        Batches that were only prefetched do not count as delivered.

        Raises:
            UsageError: Workers of a plain DataLoader have read the batches.
        """
        if not is_in_worker() and self._read_message() is not None:
            raise UsageError(
                f"workers of a DataLoader read {str(self.data_dir)!r}, so this process does not know "
                "the position. Use the state_dict() of rollout_data.loader(dataset, "
                "num_workers=...) or of torchdata's StatefulDataLoader."
            )
        if self._saved is not None:
            return dict(self._saved)
        is_between_epochs = not self._is_started or (not self._is_used and self.is_over())
        if is_between_epochs:
            return {"version": 1, "is_started": False, "epoch": self._epoch + int(self._is_used)}
        state = state_at(self.position, self._scheduler)
        return state if current_worker().total == 1 else {**state, "skip": self._skip}

    @property
    def position(self) -> Position:
        """The position after the last delivered batch."""
        assert self._position is not None
        return self._position

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a `state_dict`, with any number of ranks and workers.

        The next batches are the same as without the interruption. Trajectories recorded since then
        do not change them. Frames of trajectories deleted since then are not `valid`. `num_envs`
        must be this rank's share of the envs in the state. The next iteration (`iter(dataset)`)
        resumes too. If the epoch of the state is over, the iteration begins the next epoch.

        Raises:
            UsageError: The state has another dataset, number of envs or setting.
        """
        if not isinstance(state, Mapping):
            raise UsageError(f"state must be the result of state_dict(), got {repr(state)[:100]}.")
        self._reset_state()
        if state.get("is_started", True):
            self._restore(state)
            self._saved = dict(state)
            self._saved_name = secrets.token_hex(8)
        else:
            self._epoch = whole("epoch", state.get("epoch", 0), 0)
            self._is_used = False
        if is_in_worker():
            # Only torchdata's StatefulDataLoader loads a state in a worker. It starts new workers in
            # each epoch, so the next iteration of this worker must resume.
            self._resumes = True
            self._write_message(self._epoch + self._is_used, "")
        else:
            if self._read_message() is not None:
                self._board.write(f"state_{self._rank().number}", (self._saved, self._saved_name))
            self._write_message()

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
            position = position_in(saved, self._new_scheduler(num_envs))
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
                text = f"the state does not fit {str(self.data_dir)!r}: {cause}"
            else:
                problem = f"{type(cause).__name__}: {cause}"
                if isinstance(cause, RolloutDataError):
                    problem = cause.message.rstrip(".")
                text = (
                    f"the state for {str(self.data_dir)!r} is damaged ({problem}). "
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
        message = self._read_message()
        is_new = self._saved is not None and (message is None or message[1] != self._saved_name)
        return self if is_new and not self.is_over() else super().__iter__()

    def _ensure_started(self) -> None:
        if not self._is_started and self._saved is not None:
            self._restore(self._saved)
        super()._ensure_started()

    def is_over(self) -> bool:
        """Return whether the epoch has no further batch."""
        return self.next_position() is None

    def _read_message(self) -> Any:
        """Read the message that the worker processes of this rank have left for the next iteration.

        It is (next epoch, name of the state that the workers have resumed), or None.
        """
        return self._board.read(f"next_{self._rank().number}")

    def _write_message(self, *message: Any) -> None:
        """Replace the message of `_read_message`, or remove it if there are no arguments."""
        self._board.write(f"next_{self._rank().number}", message or None)

    def _group(self) -> str:
        """Return the name of the group of workers that read this epoch together."""
        worker: Any = get_worker_info()
        return f"{self._rank().number}_{worker.seed - worker.id}_{self._num_iterations}"

    def _begin_in_worker(self) -> Iterator[Transition]:
        """Begin an epoch in a worker of a plain DataLoader. The workers agree on it by messages."""
        if self._passes.refresh_s is not None and not self._receives_scans:
            raise UsageError(
                "refresh_s does not work with the workers of a plain DataLoader. "
                f"Read {str(self.data_dir)!r} with rollout_data.loader(dataset, num_workers=...)."
            )
        if self._resumes:
            self._ensure_started()
            self._resumes = False
            return self
        self._shard = self._rank()
        self._skip = None
        while not self._board.write(
            f"{self._group()}_of_{current_worker().number}", None, is_final=True
        ):
            # The name is taken: this worker belonged to a group of this name in an earlier epoch,
            # because the loader has used the same seed again. Use the next name.
            self._num_iterations += 1
        sent = self._board.read(f"state_{self._shard.number}")
        if sent is not None:
            self._saved, self._saved_name = sent
        epoch = self._epoch + self._is_used if self._saved is None else self._saved["epoch"]
        while (begun := self._board.read(self._group())) is None:
            following, continued = self._read_message() or (epoch, "")
            is_resumed = self._saved_name not in ("", continued)
            if self._board.write(
                self._group(), (epoch if is_resumed else following, is_resumed), is_final=True
            ):
                self._write_message(1 + (epoch if is_resumed else following), self._saved_name)
        self._epoch, is_resumed = begun
        self._is_used = False
        if is_resumed and self._saved is not None:
            self._restore(self._saved)
            if not self.is_over():
                return self
            self._write_message(self._epoch + 2, self._saved_name)
        return super().__iter__()

    def follow(self, saved: dict[str, Any], agree: Agree) -> None:
        """Prepare this copy of the stream for the workers of a `RolloutLoader`.

        Args:
            saved: State that the workers resume.
            agree: Function that receives the results of scans from the process of the loader.
        """
        self._saved = saved
        self.agree = agree
        self._receives_scans = True
        self._resumes = True

    def _go_to(self, position: Position) -> None:
        self._position = position
        self._is_started = True
        self._readahead = ReadAhead(self.num_envs)
        self.reader = BatchReader(BatchOptions(self.device, **self._batch_options))
