"""`TrajectoryReplayBuffer`: whole trajectories on disk, their steps sampled as if in memory.

One rule: every step of the newest trajectories is drawn with equal probability, wherever it is; what is counted is
what is live. Where rows are is decided in `live.py`, how files are written in `saver.py`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from storage.core import arguments
from storage.core.fields import unflatten
from storage.core.object_summary import Shown
from storage.core.records import Key
from storage.core.threads import OwnCondition, Owned, Owner
from storage.errors import ClosedError, MissingFieldError, UsageError
from storage.live.monitors import PerformanceMonitor

from ..blocks.row_layout import RowLayout
from .live_trajectories import LiveTrajectories, check_fields
from .replay_folder import Counters, check_json, folded, read_folder, save_to, share_of
from .trajectory_cache import TrajectoryCache
from .trajectory_files import FORMATS, Entry
from .trajectory_rows import Leaves, layout_of, pack, take_apart, unpack
from .trajectory_saver import TrajectorySaver

#: Policy versions may be negative, such as -1 of an unknown one.
_LEAST_VERSION = -(1 << 62)


class TrajectoryReplayBuffer(Shown, Owned):
    """Keep trajectories of `[T, B, ...]` tensors and sample their steps, from any thread.

    Args:
        seed: Of this buffer's own random numbers.
        enable_cache: Keep trajectories in memory besides their files; without `auto_save` they are in any case.
        cache_size: How many, with `auto_save`; 0 for all.
        sample_window_size: Samples are drawn from this many of the newest trajectories; 0 for all. Without
            `auto_save` older ones are given up.
        auto_save: Write every trajectory to `auto_save_path`, in the background. The folder is a
            checkpoint at any time: `load_checkpoint` reads it, also after a crash.
        auto_save_path: A folder of this buffer alone.
        trajectory_format: "h5" writes our block files, of which single rows are read; "pt" writes
            `torch.save` files and "pkl" pickles, both read whole, for other tools.
        max_trajectories: How many of the newest are kept; None for all. The auto-saved files of others are
            deleted once as many newer ones are on the disk and in its index, so that a crash leaves the former or
            the latter.
        drop_first: Leaves that may have `T + e` rows, one before the first step of each of e epochs.
        drop_last: Leaves that may have `T + e` rows, one after the last step of each.
        trusted: Read pickles, which may run any code. Needed for "pkl".
        max_pending_saves: How many trajectories may wait to be written; adding waits beyond that.
        rank, world_size: Which of several that save under one path: in `rank_<rank>`, with ids of its own.
        load_path: A checkpoint to begin with, as `load_checkpoint` reads it; with `world_size` this rank's share.
        save_path: Another name of `auto_save_path`, which turns `auto_save` on.
        monitor: Told how long things take, waiting included: `trajectories/add`, `/sample`, `/save_checkpoint`,
            `/load_checkpoint`, and `/write` (one file, in the background).
    """

    def __init__(
        self,
        seed: int = 1234,
        enable_cache: bool = True,
        cache_size: int = 5,
        sample_window_size: int = 100,
        auto_save: bool = False,
        auto_save_path: str | os.PathLike[str] = "",
        trajectory_format: str = "h5",
        *,
        max_trajectories: int | None = None,
        drop_first: Sequence[str] = (),
        drop_last: Sequence[str] = (),
        trusted: bool = False,
        max_pending_saves: int = 8,
        rank: int = 0,
        world_size: int = 1,
        monitor: PerformanceMonitor | None = None,
        load_path: str | os.PathLike[str] | None = None,
        save_path: str | os.PathLike[str] | None = None,
    ) -> None:
        what = arguments.creating(self)
        if load_path is not None:
            load_path = arguments.path(what, "load_path", load_path)
        if save_path is not None:
            save_path = arguments.path(what, "save_path", save_path)
            if auto_save_path and os.fspath(auto_save_path) != os.fspath(save_path):
                got = f"{str(save_path)!r} and {str(auto_save_path)!r}"
                raise UsageError(what, "", "save_path or auto_save_path", got)
            auto_save = True
            auto_save_path = save_path
        self.trajectory_format = arguments.choice(what, "trajectory_format", trajectory_format, FORMATS)
        self.trusted = arguments.flag(what, "trusted", trusted)
        auto_save = arguments.flag(what, "auto_save", auto_save)
        enable_cache = arguments.flag(what, "enable_cache", enable_cache)
        if trajectory_format == "pkl" and not trusted:
            advice = "Reading pickles runs what they say"
            raise UsageError(what, "as 'pkl'", "trusted=True", "trusted=False", advice)
        if auto_save and not auto_save_path:
            raise UsageError(what, "", "auto_save_path with auto_save", "none")
        self.seed = arguments.seed(what, "seed", seed)
        self.auto_save = auto_save
        self.auto_save_path = arguments.path(what, "auto_save_path", auto_save_path or "").absolute()
        self.sample_window_size = arguments.whole(what, "sample_window_size", sample_window_size, 0)
        self.max_trajectories = max_trajectories
        if max_trajectories is not None:
            self.max_trajectories = arguments.whole(what, "max_trajectories", max_trajectories, 1)
        self.drop_first = arguments.names(what, "drop_first", drop_first)
        self.drop_last = arguments.names(what, "drop_last", drop_last)
        self.rng = torch.Generator().manual_seed(self.seed)
        cache_size = arguments.whole(what, "cache_size", cache_size, 0)
        self._cache_size = cache_size if enable_cache else None
        max_pending_saves = arguments.whole(what, "max_pending_saves", max_pending_saves, 1)
        rank, world_size = self._next_id, self._id_step = _rank_of(what, rank, world_size)
        self._monitor = monitor
        self._is_closed = False
        self._owner = Owner("a buffer with auto_save")
        self._lock: Any = OwnCondition(self._owner) if auto_save else threading.RLock()
        self._live = self._empty_state()
        self._saver: TrajectorySaver | None = None
        if auto_save:
            folder = self.auto_save_path / f"rank_{rank}" if world_size > 1 else self.auto_save_path
            self._saver = TrajectorySaver(
                folder.resolve(),
                trajectory_format,
                max_pending_saves,
                self.max_trajectories,
                self._lock,
                lambda trajectory_id: self._live.note_moved([trajectory_id]),  # of what is live by then
                self._counters,
                self._timed,
            )
            # Never over the files of an earlier run.
            self._next_id += -(-self._saver.first_free_id // world_size) * world_size
        if load_path is not None:
            try:
                self.load_checkpoint(load_path, world_size > 1, rank, world_size)
            except BaseException:
                self.close()
                raise

    def __len__(self) -> int:
        with self._lock:
            return len(self._live.entries)

    @property
    def size(self) -> int:
        """How many trajectories are live."""
        return len(self)

    @property
    def total_samples(self) -> int:
        """Steps of all live trajectories, T * B of each."""
        with self._lock:
            return self._live.num_samples

    @property
    def trajectory_ids(self) -> list[int]:
        """Ids of the live trajectories, oldest first."""
        with self._lock:
            return list(self._live.entries)

    @property
    def cached_ids(self) -> list[int]:
        """Ids of the trajectories that are in memory."""
        with self._lock:
            return [] if self._live.cache is None else self._live.cache.ids

    def add(self, trajectory: Any, *, weights_version: int | None = None) -> int:
        """Copy a trajectory in; see `add_trajectories`. Gives its id."""
        return self._add("call TrajectoryReplayBuffer.add", [trajectory], weights_version)[0]

    def add_trajectories(self, trajectories: Iterable[Any], *, weights_version: int | None = None) -> list[int]:
        """Copy trajectories in, oldest first.

        Args:
            trajectories: Nested mappings or dataclasses of `[T, B, ...]` tensors or arrays; T and B may
                differ from one to the next, keys too. Leaves that are str, numbers or lists belong to
                the trajectory as a whole; None is left out.
            weights_version: Number of the policy that acted; by default that of a leaf `weights_version`.

        Returns:
            Their ids, which count up and are never used again.

        Raises:
            SchemaError: A leaf has other leading sizes than the first of rewards, actions and the rest, or
                another dtype or shape than it had before. Nothing is added.
            BackgroundError: An earlier trajectory could not be saved. Nothing is added.
        """
        action = "call TrajectoryReplayBuffer.add_trajectories"
        if isinstance(trajectories, (str, Mapping)) or not isinstance(trajectories, Iterable):
            expected = "trajectories as an iterable of mappings or dataclasses"
            got = type(trajectories).__name__
            raise UsageError(action, "", expected, got)
        return self._add(action, trajectories, weights_version)

    def _add(self, action: str, trajectories: Iterable[Any], weights_version: int | None) -> list[int]:
        if weights_version is not None:
            weights_version = arguments.whole(action, "weights_version", weights_version, _LEAST_VERSION)
        taken = [take_apart(one, self.drop_first, self.drop_last, action=action) for one in trajectories]
        layouts = [layout_of(one.tensors, "of a trajectory") for one in taken]
        for one in taken:
            check_json(one.info)
        with self._lock:
            self._check_usable("add a trajectory")
            fields = dict(self._live.fields)
            for layout in layouts:
                check_fields(fields, layout.schema.values())
        if self._saver is not None:
            self._saver.warn_of_earlier()
        with self._timed("add"):
            return [self._take(one, layout, weights_version) for one, layout in zip(taken, layouts, strict=True)]

    def sample(
        self,
        num_chunks: int,
        keys: Collection[Key] | None = None,
        *,
        min_weights_version: int | None = None,
        contiguous: bool = False,
    ) -> dict[str, Any]:
        """Draw steps uniformly, with replacement, from the `sample_window_size` newest trajectories.

        Args:
            num_chunks: How many, >= 1.
            keys: The leaves wanted, by flat name ("obs/state") or tuple (("obs", "state")), or inner mappings for all
                below them; None for those that every trajectory of the window has.
            min_weights_version: Draw only from trajectories of this policy version or a later one.
            contiguous: Make every tensor contiguous; otherwise small ones are views into packed rows.

        Returns:
            Nested dict of `[num_chunks, ...]` tensors on the CPU, all of them new.

        Raises:
            BufferEmptyError: There is nothing to draw from.
            MissingFieldError: A drawn trajectory does not have a key (a `KeyError`).
            UsageError: `keys` is no list of keys; a str is none.
            DataFileError: A trajectory's file is gone or damaged.

        After an error the random state is what it was.
        """
        action = "call TrajectoryReplayBuffer.sample"
        num_chunks = arguments.whole(action, "num_chunks", num_chunks, 1)
        contiguous = arguments.flag(action, "contiguous", contiguous)
        if min_weights_version is not None:
            min_weights_version = arguments.whole(action, "min_weights_version", min_weights_version, _LEAST_VERSION)
        with self._timed("sample"), self._lock:
            self._check_usable("sample")
            return self._live.sample(num_chunks, self.rng, keys, min_weights_version, contiguous)

    def get(self, trajectory_id: int) -> dict[str, Any]:
        """Return a whole trajectory: nested, `[T, B, ...]`, with its other leaves. A `KeyError` if it is not live."""
        with self._lock:
            entry = self._find("get", trajectory_id)
            return unflatten({**entry.info, **unpack(entry.layout, self._live.rows_of(entry), entry.shape)})

    def about(self, trajectory_id: int) -> dict[str, Any]:
        """Return what the index says of a live trajectory: shape, uuid, weights version, ..."""
        with self._lock:
            return self._find("about", trajectory_id).to_json()

    def clear_cache(self) -> None:
        """Free the memory of the cache. Without `auto_save` it is the only place, and everything goes."""
        with self._lock:
            if self._saver is None:
                self._live = self._empty_state()
            else:
                self._live.clear_cache()

    def clear(self) -> None:
        """Forget every trajectory; auto-saved files stay, and ids continue."""
        with self._lock:
            self._live = self._empty_state()
            if self._saver is not None:
                self._saver.name([])

    def flush(self) -> None:
        """Wait until every trajectory is saved; raises what saving one failed with."""
        if self._saver is not None and not self._is_closed:
            self._saver.flush()

    def close(self) -> None:
        """Save what is not saved yet, stop the thread, free all; raises a failure. Idempotent."""
        with self._lock:
            was_closed = self._is_closed
            self._is_closed = True
        if was_closed:
            return
        try:
            if self._saver is not None:
                self._saver.close()
        finally:
            self.clear()

    def save_checkpoint(self, directory: str | os.PathLike[str]) -> None:
        """Write every live trajectory and what this buffer needs to go on, atomically.

        An earlier checkpoint there is replaced. Saved files are linked where the file system can, otherwise copied.
        Without `auto_save` adding and sampling wait meanwhile.

        Raises:
            DataFileError: There is a file, or a folder with other files.
            BackgroundError: A trajectory could not be saved.
        """
        folder = arguments.path("call TrajectoryReplayBuffer.save_checkpoint", "directory", directory)
        with self._timed("save_checkpoint"):
            self.flush()
            with self._lock:
                self._check_usable("save a checkpoint")
                if self._saver is not None and folder.resolve() == self._saver.folder.resolve():
                    return  # it is one: the index has just been written
                save_to(folder, list(self._live.entries.values()), self._counters(), self._live.rows_of)

    def load_checkpoint(
        self,
        directory: str | os.PathLike[str],
        is_distributed: bool = False,
        local_rank: int = 0,
        world_size: int = 1,
        *,
        min_weights_version: int | None = None,
        verify: bool = True,
    ) -> None:
        """Take over a checkpoint, or an existing folder of trajectories, in the place of what is here.

        Args:
            directory: What `save_checkpoint` or `auto_save` wrote, or another system (`pt` or `pkl` files with
                an index); a folder of `rank_<r>` folders is taken as one.
            is_distributed: Take only this rank's share: contiguous, the shares differ by one at most.
            local_rank: Which share.
            world_size: Of how many.
            min_weights_version: Leave out trajectories of earlier policies, and of unknown ones.
            verify: Compare the checksums of all rows; otherwise only what is needed to find them.

        The random state is restored; sharded, each rank gets one of its own derived from it. With `auto_save` the
        files are linked, or copied where there are no links, into the folder of this buffer, whose index names them.
        With a warning, those whose ids others there have stay where they are, and what was there keeps its files.

        Raises:
            UsageError: Bad rank or world size.
            DataFileError: Something is missing or damaged; nothing was changed.
        """
        action = "call TrajectoryReplayBuffer.load_checkpoint"
        rank, step = _rank_of(action, local_rank, world_size, "local_rank")
        is_distributed = arguments.flag(action, "is_distributed", is_distributed)
        verify = arguments.flag(action, "verify", verify)
        if min_weights_version is not None:
            min_weights_version = arguments.whole(action, "min_weights_version", min_weights_version, _LEAST_VERSION)
        rank, step = (rank, step) if is_distributed else (0, 1)
        folder = arguments.path(action, "directory", directory).absolute()
        self._check_usable("load a checkpoint")
        with self._timed("load_checkpoint"):
            if self._saver is not None:
                self._saver.wait()
            entries, counters = read_folder(folder, self.trusted, verify)
            entries = [one for one in entries if one.is_recent(min_weights_version)]
            live = self._empty_state()
            for entry in share_of(entries, rank, step)[-live.capacity or None :]:
                live.append(entry, live.rows_of(entry) if self._saver is None else None)
            with self._lock:
                self._check_usable("load a checkpoint")
                if self._saver is not None:
                    self._saver.adopt(live.entries.values(), folder, is_distributed)
                self._live = live
                if self._saver is not None:
                    self._saver.name(live.entries.values())
                    self._saver.warn_of_earlier()
                if counters.rng is not None:
                    self.rng.set_state(folded(counters.rng, rank, step) if step > 1 else counters.rng)
                self._next_id = max(counters.next_id, self._next_id) + rank
                self._id_step = step

    def _take(self, one: Leaves, layout: RowLayout, weights_version: int | None) -> int:
        """Copy a checked trajectory in; give its id."""
        rows = pack(layout, one.tensors, self._live.pool)
        version = weights_version if weights_version is not None else one.info.get("weights_version")
        with self._lock:
            entry = Entry(self._next_id, layout, one.shape, one.info, weights_version=version)
            self._next_id += self._id_step
            self._live.append(entry, rows)
            if self._saver is not None:
                entry.rows = rows
                self._saver.expect(entry)
        if self._saver is not None:
            self._saver.submit(entry)  # may wait, hence without the lock
        return entry.trajectory_id

    def _find(self, method: str, trajectory_id: int) -> Entry:
        self._check_usable("get the trajectory")
        entry = self._live.entries.get(trajectory_id) if arguments.is_whole(trajectory_id) else None
        if entry is None:
            raise MissingFieldError(
                f"call TrajectoryReplayBuffer.{method}",
                "",
                f"trajectory_id as one of {len(self)} live ids",
                repr(trajectory_id),
            )
        return entry

    def _empty_state(self) -> LiveTrajectories:
        # Without files the cache is the store, and what goes is decided here.
        limits = [self.max_trajectories, None if self.auto_save else self.sample_window_size]
        capacity = min((limit for limit in limits if limit), default=0)
        cache_size = self._cache_size if self.auto_save else capacity
        cache = None if cache_size is None else TrajectoryCache(cache_size)
        return LiveTrajectories(self.sample_window_size, capacity, cache, self.trusted)

    def _counters(self) -> Counters:
        return Counters(self.seed, self._next_id, self.trajectory_format, self.rng.get_state())

    def _timed(self, what: str) -> AbstractContextManager[None]:
        return nullcontext() if self._monitor is None else self._monitor.timer(f"trajectories/{what}")

    def _check_usable(self, action: str) -> None:
        if self._is_closed:
            raise ClosedError(action, "", "an open buffer", "a closed one")
        if self._saver is not None:
            self._saver.check()


def _rank_of(action: str, rank: Any, world_size: Any, name: str = "rank") -> tuple[int, int]:
    """Check a rank and the number of ranks."""
    world_size = arguments.whole(action, "world_size", world_size, 1)
    return arguments.whole(action, name, rank, 0, world_size - 1), world_size
