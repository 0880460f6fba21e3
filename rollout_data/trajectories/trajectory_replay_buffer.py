"""`TrajectoryReplayBuffer`: store trajectories in memory or on disk and sample their steps.

Every step of the newest trajectories is drawn with equal probability. `live_trajectories.py`
draws the steps, `row_gatherer.py` reads the rows, and `trajectory_saver.py` writes the files.
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
from ..sources.trajectory_checkpoints.checkpoint_folder import FORMATS
from .live_trajectories import LiveTrajectories, add_fields
from .replay_folder import (
    Counters,
    check_json,
    random_state_of_rank,
    read_folder,
    save_to,
    share_of,
)
from .trajectory_cache import TrajectoryCache
from .trajectory_files import Entry
from .trajectory_rows import FlatTrajectory, flatten_trajectory, layout_of, pack, unpack
from .trajectory_saver import TrajectorySaver

#: Smallest allowed policy version. Some programs use -1 for an unknown version.
_LEAST_VERSION = -(1 << 62)


class TrajectoryReplayBuffer(Shown, Owned):
    """Replay buffer of trajectories, `[T, B, ...]` tensors, that samples steps. Thread-safe.

    Args:
        seed: Seed of the random numbers of this buffer.
        enable_cache: Keep trajectories in memory in addition to their files. Without `auto_save`
            all trajectories are in memory.
        cache_size: Maximum number of trajectories in memory with `auto_save`; 0 means all.
        sample_window_size: Number of newest trajectories to draw samples from; 0 means all. Without
            `auto_save`, older trajectories are removed.
        auto_save: Write every trajectory to `auto_save_path` in the background. The folder is
            always a valid checkpoint, which `load_checkpoint` reads, even after a crash.
        auto_save_path: Folder for the files. No other buffer may use this folder.
        trajectory_format: "h5" writes block files, from which single rows can be read. "pt" writes
            files of `torch.save`, and "pkl" writes pickles, for other tools. Files of both formats
            must be read completely.
        max_trajectories: Maximum number of live trajectories; None means no limit. The oldest
            trajectory is removed first. Its auto-saved file is deleted after `max_trajectories`
            newer files and their index were written, so a crash loses no live trajectory.
        drop_first: Names of leaves that may have `T + e` rows for e epochs: an additional row
            before the first step of each epoch. The additional rows are dropped.
        drop_last: Names of leaves that may have `T + e` rows for e epochs: an additional row after
            the last step of each epoch. The additional rows are dropped.
        trusted: Allow reading pickles, which may run any code. Required for "pkl".
        max_pending_saves: Maximum number of trajectories that wait to be written. `add` blocks
            while this number of trajectories waits.
        rank, world_size: Rank of this buffer among all buffers that save to the same path, and the
            number of these buffers. Each saves to its folder `rank_<rank>` and has its own ids.
        load_path: Checkpoint to load during construction with `load_checkpoint`. If `world_size` is
            set, only the share of this rank is loaded.
        save_path: Alias of `auto_save_path` that also enables `auto_save`.
        monitor: Monitor that records durations, with waiting times: `trajectories/add`, `/sample`,
            `/save_checkpoint`, `/load_checkpoint`, and `/write` for one file in the background.
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
        if load_path is not None:
            load_path = arguments.path("load_path", load_path)
        if save_path is not None:
            save_path = arguments.path("save_path", save_path)
            if auto_save_path and os.fspath(auto_save_path) != os.fspath(save_path):
                raise UsageError(
                    f"save_path is {str(save_path)!r} and auto_save_path is "
                    f"{str(auto_save_path)!r}. Pass only save_path."
                )
            auto_save = True
            auto_save_path = save_path
        self.trajectory_format = arguments.choice("trajectory_format", trajectory_format, FORMATS)
        self.trusted = arguments.flag("trusted", trusted)
        auto_save = arguments.flag("auto_save", auto_save)
        enable_cache = arguments.flag("enable_cache", enable_cache)
        if trajectory_format == "pkl" and not trusted:
            raise UsageError(
                "trajectory_format='pkl' requires trusted=True, since reading a pickle can run "
                "code."
            )
        if auto_save and not auto_save_path:
            raise UsageError("auto_save requires auto_save_path.")
        self.seed = arguments.seed("seed", seed)
        self.auto_save = auto_save
        self.auto_save_path = arguments.path("auto_save_path", auto_save_path or "").absolute()
        self.sample_window_size = arguments.whole("sample_window_size", sample_window_size, 0)
        self.max_trajectories = max_trajectories
        if max_trajectories is not None:
            self.max_trajectories = arguments.whole("max_trajectories", max_trajectories, 1)
        self.drop_first = arguments.names("drop_first", drop_first)
        self.drop_last = arguments.names("drop_last", drop_last)
        self.rng = torch.Generator().manual_seed(self.seed)
        cache_size = arguments.whole("cache_size", cache_size, 0)
        self._cache_size = cache_size if enable_cache else None
        max_pending_saves = arguments.whole("max_pending_saves", max_pending_saves, 1)
        rank, world_size = self._next_id, self._id_step = _rank_of(rank, world_size)
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
                # Not `self._live.note_moved`, because loading a checkpoint replaces `_live`.
                lambda trajectory_id: self._live.note_moved([trajectory_id]),
                self._counters,
                self._timed,
            )
            # New ids start above the ids of earlier files, so no earlier file is overwritten.
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
        """Number of trajectories in the buffer."""
        return len(self)

    @property
    def total_samples(self) -> int:
        """Number of steps of all trajectories in the buffer: the sum of T * B."""
        with self._lock:
            return self._live.num_samples

    @property
    def trajectory_ids(self) -> list[int]:
        """Ids of the trajectories in the buffer, oldest first."""
        with self._lock:
            return list(self._live.entries)

    @property
    def cached_ids(self) -> list[int]:
        """Ids of the trajectories in the memory cache, oldest first."""
        with self._lock:
            return [] if self._live.cache is None else self._live.cache.ids

    def add(self, trajectory: Any, *, weights_version: int | None = None) -> int:
        """Copy a trajectory into the buffer and return its id.

        See `add_trajectories` for the form of a trajectory and for errors.
        """
        return self._add([trajectory], weights_version)[0]

    def add_trajectories(
        self, trajectories: Iterable[Any], *, weights_version: int | None = None
    ) -> list[int]:
        """Copy trajectories, oldest first, into the buffer and return their ids.

        Args:
            trajectories: Nested mappings or dataclasses of `[T, B, ...]` tensors or arrays. T, B
                and keys may differ between trajectories. Texts, numbers and lists are metadata of
                the trajectory. A leaf that is None is ignored.
            weights_version: Version of the recording policy; by default the leaf
                `weights_version`.

        Returns:
            Ids of the added trajectories. Ids ascend and are never reused.

        Raises:
            SchemaError: The leading sizes of the leaves differ, or the dtype or shape of a leaf
                differs from earlier trajectories. No trajectory is added.
            BackgroundError: An earlier trajectory could not be saved. No trajectory is added.
        """
        if isinstance(trajectories, (str, Mapping)) or not isinstance(trajectories, Iterable):
            raise UsageError(
                "trajectories must be an iterable of mappings or dataclasses, got "
                f"{type(trajectories).__name__}."
            )
        return self._add(trajectories, weights_version)

    def _add(self, trajectories: Iterable[Any], weights_version: int | None) -> list[int]:
        if weights_version is not None:
            weights_version = arguments.whole("weights_version", weights_version, _LEAST_VERSION)
        checked = []
        for trajectory in trajectories:
            flat = flatten_trajectory(trajectory, self.drop_first, self.drop_last)
            check_json(flat.info)
            checked.append((flat, layout_of(flat.tensors, "of a trajectory")))
        with self._lock:
            self._check_usable()
            fields = dict(self._live.fields)
            for _, layout in checked:
                add_fields(fields, layout.schema.values())
        if self._saver is not None:
            self._saver.warn_of_earlier()
        with self._timed("add"):
            return [self._append(flat, layout, weights_version) for flat, layout in checked]

    def sample(
        self,
        num_chunks: int,
        keys: Collection[Key] | None = None,
        *,
        min_weights_version: int | None = None,
        contiguous: bool = False,
    ) -> dict[str, Any]:
        """Draw random steps with replacement from the `sample_window_size` newest trajectories.

        Args:
            num_chunks: Number of steps, >= 1.
            keys: Leaves to return, as flat names ("obs/state") or tuples (("obs", "state")). The
                name of a nested mapping selects all leaves in it. None selects the leaves that are
                in each of the newest trajectories.
            min_weights_version: Use only trajectories of this policy version or later.
            contiguous: Return contiguous tensors. Otherwise small tensors are strided views of
                packed rows.

        Returns:
            Nested dict of new tensors `[num_chunks, ...]` on the CPU.

        Raises:
            BufferEmptyError: The buffer has no trajectory (of `min_weights_version` or later).
            MissingFieldError: A sampled trajectory lacks a key (a `KeyError`).
            UsageError: `keys` is not a list of keys, for example a str.
            DataFileError: The file of a trajectory was deleted or is damaged.

        An error leaves the random state unchanged.
        """
        num_chunks = arguments.whole("num_chunks", num_chunks, 1)
        contiguous = arguments.flag("contiguous", contiguous)
        if min_weights_version is not None:
            min_weights_version = arguments.whole(
                "min_weights_version", min_weights_version, _LEAST_VERSION
            )
        with self._timed("sample"), self._lock:
            self._check_usable()
            return self._live.sample(num_chunks, self.rng, keys, min_weights_version, contiguous)

    def get(self, trajectory_id: int) -> dict[str, Any]:
        """Return a copy of a trajectory as a nested dict of tensors `[T, B, ...]` and metadata.

        Raises:
            MissingFieldError: The buffer does not have this trajectory (a `KeyError`).
        """
        with self._lock:
            entry = self._entry(trajectory_id)
            rows = self._live.gatherer.trajectory_rows(entry)
            return unflatten({**entry.info, **unpack(entry.layout, rows, entry.shape)})

    def about(self, trajectory_id: int) -> dict[str, Any]:
        """Return the shape, uuid, weights version and metadata of a trajectory as a dict."""
        with self._lock:
            return self._entry(trajectory_id).to_json()

    def clear_cache(self) -> None:
        """Free the memory of cached trajectories.

        Without `auto_save` all trajectories are in the cache, so they are removed from the buffer.
        """
        with self._lock:
            if self._saver is None:
                self._live = self._empty_state()
            else:
                self._live.clear_cache()

    def clear(self) -> None:
        """Remove all trajectories. Auto-saved files are kept, and ids are not reused."""
        with self._lock:
            self._live = self._empty_state()
            if self._saver is not None:
                self._saver.list_only([])

    def flush(self) -> None:
        """Wait until all trajectories are saved. Raises `BackgroundError` if saving failed."""
        if self._saver is not None and not self._is_closed:
            self._saver.flush()

    def close(self) -> None:
        """Save all trajectories, stop the thread and free the memory.

        Raises `BackgroundError` if saving failed. Further calls do nothing.
        """
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
        """Write all trajectories and the random state of this buffer to a folder, atomically.

        An earlier checkpoint is replaced. Auto-saved files are linked, or copied if hard links are
        impossible. Without `auto_save`, `add` and `sample` block until the checkpoint is written.

        Raises:
            DataFileError: The path is a file, or a folder with other files.
            BackgroundError: A trajectory could not be saved.
        """
        folder = arguments.path("directory", directory)
        with self._timed("save_checkpoint"):
            self.flush()
            with self._lock:
                self._check_usable()
                if self._saver is not None and folder.resolve() == self._saver.folder.resolve():
                    # `flush` has just written the index, so the folder is a checkpoint already.
                    return
                entries = list(self._live.entries.values())
                save_to(folder, entries, self._counters(), self._live.gatherer.trajectory_rows)

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
        """Replace all trajectories of this buffer with those of a checkpoint folder.

        Args:
            directory: A folder of `save_checkpoint`, of `auto_save`, or of an earlier system with
                `pt` or `pkl` files and an index. Several `rank_<r>` folders in it are loaded
                together.
            is_distributed: Load only the share of this rank. Shares are contiguous. The sizes of
                shares differ by at most one trajectory.
            local_rank: Rank of this process.
            world_size: Number of ranks.
            min_weights_version: Skip trajectories of earlier or unknown policy versions.
            verify: Check the checksums of all rows. Otherwise only headers are checked.

        The random state is restored. With `is_distributed`, each rank derives its own random state
        from the random state in the checkpoint. With `auto_save` the files are linked or copied
        into the folder of this buffer and added to its index. If the folder has another file with
        the id of a loaded trajectory, a warning is issued and the trajectory stays in `directory`.
        Earlier files in the folder of this buffer are kept.

        Raises:
            UsageError: The rank or world size is invalid.
            DataFileError: A file is missing or damaged. The buffer is unchanged.
        """
        rank, id_step = _rank_of(local_rank, world_size, "local_rank")
        is_distributed = arguments.flag("is_distributed", is_distributed)
        verify = arguments.flag("verify", verify)
        if min_weights_version is not None:
            min_weights_version = arguments.whole(
                "min_weights_version", min_weights_version, _LEAST_VERSION
            )
        if not is_distributed:
            rank = 0
            id_step = 1
        folder = arguments.path("directory", directory).absolute()
        self._check_usable()
        with self._timed("load_checkpoint"):
            if self._saver is not None:
                self._saver.wait()
            entries, counters = read_folder(folder, self.trusted, verify)
            entries = [entry for entry in entries if entry.is_recent(min_weights_version)]
            live = self._live_of(share_of(entries, rank, id_step))
            with self._lock:
                self._check_usable()
                if self._saver is not None:
                    self._saver.adopt(live.entries.values(), folder, is_distributed)
                self._live = live
                if self._saver is not None:
                    self._saver.list_only(live.entries.values())
                    self._saver.warn_of_earlier()
                if counters.rng is not None:
                    is_share = id_step > 1
                    rng = (
                        random_state_of_rank(counters.rng, rank, id_step)
                        if is_share
                        else counters.rng
                    )
                    self.rng.set_state(rng)
                # The ids of a rank are `rank` plus multiples of `id_step`, counted from the same
                # number on all ranks. So two ranks never use the same id.
                first_id = counters.next_id + rank
                num_used = max(0, self._next_id - first_id)
                self._next_id = first_id + -(-num_used // id_step) * id_step
                self._id_step = id_step

    def _live_of(self, entries: Sequence[Entry]) -> LiveTrajectories:
        """Create the table of trajectories of a buffer from loaded trajectories.

        If there are more trajectories than the buffer can have, only the newest are used. Without
        `auto_save` their rows are read into memory.
        """
        live = self._empty_state()
        newest = entries[-live.capacity :] if live.capacity else entries
        for entry in newest:
            rows = None
            if self._saver is None:
                rows = live.gatherer.trajectory_rows(entry)
            live.append(entry, rows)
        return live

    def _append(
        self, trajectory: FlatTrajectory, layout: RowLayout, weights_version: int | None
    ) -> int:
        """Add a trajectory that passed all checks. Return its id."""
        rows = pack(layout, trajectory.tensors, self._live.gatherer.pool)
        version = weights_version
        if version is None:
            version = trajectory.info.get("weights_version")
        with self._lock:
            entry = Entry(
                self._next_id, layout, trajectory.shape, trajectory.info, weights_version=version
            )
            self._next_id += self._id_step
            self._live.append(entry, rows)
            if self._saver is not None:
                entry.rows = rows
                self._saver.expect(entry)
        if self._saver is not None:
            self._saver.submit(entry)  # Called without the lock, because it may block.
        return entry.trajectory_id

    def _entry(self, trajectory_id: int) -> Entry:
        """Return the trajectory with this id.

        Raises:
            MissingFieldError: The buffer has no such trajectory.
        """
        self._check_usable()
        entry = self._live.entries.get(trajectory_id) if arguments.is_whole(trajectory_id) else None
        if entry is None:
            raise MissingFieldError(
                f"trajectory_id {trajectory_id!r} is not in the buffer, which has {len(self)} "
                "trajectories."
            )
        return entry

    def _empty_state(self) -> LiveTrajectories:
        # Without `auto_save` there are no files, so the cache must hold all trajectories.
        limits = [self.max_trajectories, None if self.auto_save else self.sample_window_size]
        capacity = min((limit for limit in limits if limit), default=0)
        cache_size = self._cache_size if self.auto_save else capacity
        cache = None if cache_size is None else TrajectoryCache(cache_size)
        return LiveTrajectories(self.sample_window_size, capacity, cache, self.trusted)

    def _counters(self) -> Counters:
        return Counters(self.seed, self._next_id, self.trajectory_format, self.rng.get_state())

    def _timed(self, name: str) -> AbstractContextManager[None]:
        if self._monitor is None:
            return nullcontext()
        return self._monitor.timer(f"trajectories/{name}")

    def _check_usable(self) -> None:
        if self._is_closed:
            raise ClosedError("the buffer is closed.")
        if self._saver is not None:
            self._saver.check()


def _rank_of(rank: Any, world_size: Any, name: str = "rank") -> tuple[int, int]:
    """Check and return a rank and a world size. Raise `UsageError` if a value is invalid."""
    world_size = arguments.whole("world_size", world_size, 1)
    return arguments.whole(name, rank, 0, world_size - 1), world_size
