"""RolloutDataset: recorded rollouts as batches of parallel streams.

Arguments are checked here; `rollout_stream.py` has the order of batches.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch

from storage.core import arguments
from storage.core.arguments import choice, flag, real, whole
from storage.errors import UsageError

from ..blocks.annotations import Notes
from ..blocks.block_header import DATA
from ..blocks.trajectory_index import Int64s
from ..remote.locations import DataDirs, RemoteOptions, checked_remote, present_origins_of
from ..sources.format_registry import chunk_frames
from ..sources.processes.process_group import ShardChoice, checked_shard
from ..sources.recordings.field_statistics import FieldStatistics, compute_statistics
from ..sources.rows.chunk_decoder import CHUNK_CACHE_BYTES
from ..sources.rows.row_source import RowSource
from .batch_reader import OBSERVATION, BatchOptions, BatchReader, write_into
from .loader import PrefetchedBatches
from .observation_components import assembled
from .passes import CREATE, PassOptions, frame_range, wait_for_trajectories
from .rollout_stream import Even, RolloutStream
from .transition import Transition

Cache = Literal["none", "ram", "device"]
OnError = Literal["raise", "skip"]
Interpolation = Literal["nearest", "linear"]
_flag, _whole = partial(flag, CREATE), partial(whole, CREATE)
_real, _choice = partial(real, CREATE), partial(choice, CREATE)


class RolloutDataset(RolloutStream):
    """Stream recorded trajectories into `num_envs` parallel streams, in order, with random starts.

    Every env plays one trajectory after the other; when one ends, that env alone takes the next
    unused one. Reads block files, and files of other systems (see FORMATS.md). Nothing is read
    before the first batch.

    Args:
        data_dir: A folder, a file of any format that `rollout_data.open` knows, a `Recording`, or a
            list of them of one kind; or URLs of folders of block files, see `remote`.
        num_envs: Parallel streams of each rank. Those of all ranks are one stream, planned alike in
            every process and the same for any number of ranks and workers; workers of a rank read
            its batches in turns.
        dataset_loops: How often all trajectories are delivered; below 1 without end.
        random_shuffle_traj_order: Deal them in an order that is a permutation by (seed, epoch,
            pass).
        keep_latest_n_trajs: N > 0 reads only the newest N complete trajectories, waits until there
            are N, and looks for newer ones at every pass.
        starting_frame_range: Half-open range of the frame at which a trajectory starts.
        device: Where batches are delivered; None is CUDA if there is one. In DataLoader workers
            always the CPU.
        num_transitions_per_env: T of the batches of iteration; None is one step without a time
            axis.
        seed: Of permutations and starting frames.
        cache: "none" reads the mapped files, "ram" copies the frames into memory first, "device"
            into the memory of `device`, so that a batch never leaves it. With "ram" and "device" a
            batch on a GPU waits for nothing; filling the cache does. Blocks are never modified; if
            another program truncates a mapped one, every process that reads it ends, as with any
            mapped file.
        flatten_observations: Join components along the last axis in `obs_segments` order; False
            gives dicts.
        mark_first_frame: Mark the first frame delivered of a trajectory as done, by which recurrent
            learners reset. `is_first` tells it in either case.
        drop_last: Stop at the first batch that not every env can fill, and count what is left in
            `num_dropped_frames`. False goes on until all envs are exhausted; the exhausted repeat
            their last transition with `valid=False`.
        verify_on_open: Check every checksum when a block is first seen.
        wait_timeout_s: How long to wait for `keep_latest_n_trajs` trajectories, or with `refresh_s`
            for the first one; the folder may be missing until then.
        contiguous: Give every field contiguous memory of its own, rather than a view of rows.
        frame_rate_hz: For `get_batch_by_time`; None takes it from the metadata.
        interpolation: "nearest" or "linear", for `get_batch_by_time`.
        chunk_cache_bytes: How much of the decoded chunks of coded components, and of the decoded
            pictures of other systems' files, is kept, those used last; 0 for none. LeRobot sets
            keep 128 MiB of encoded ones besides.
        shard: Which share of the envs this process reads. "auto": that of its rank in
            torch.distributed, where rank 0 decides for all which trajectories a pass may use.
            "none": all of it, for trainers that split batches themselves. (rank, world size): that
            share.
        even: When ranks end. "pad": all together, when the last env of all ranks is exhausted;
            "drop": all together, when one rank has nothing left; "none": each when its own envs are
            exhausted.
        on_error: "skip" leaves out what is left of a trajectory whose data are damaged, names it in
            `problems` and goes on. A file that is gone is always left out so.
        as_dict: Give batches as plain dicts of tensors: what was recorded and the flags, no None,
            extras among them.
        refresh_s: Look for new trajectories within a pass too, so that those that were published
            are dealt within this many seconds, to envs that become free, before the rest of the
            pass. None looks between passes only. Reads complete trajectories only; waits for the
            first one, up to `wait_timeout_s`.
        texts: Add `task` to the extras: the number of the task noted of the episode, int64 `[T,
            num_envs]`; see the attribute `texts`.
        remote: How files behind a network are read: what envs need next is fetched ahead. Several
            ranks and workers fetch what they read, each for itself.

    Attributes:
        problems: What could not be read, was repaired or left out, as exceptions.
        advice: Remarks on data that are read as they are stored, such as copied actions.
        num_lost_trajectories: Trajectories that could not be read to their end; the rest has
            `valid=False`.
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
        interpolation: Interpolation = "nearest",
        chunk_cache_bytes: int = CHUNK_CACHE_BYTES,
        shard: ShardChoice = "auto",
        even: Even = "pad",
        on_error: OnError = "raise",
        as_dict: bool = False,
        refresh_s: float | None = None,
        texts: bool = False,
        remote: RemoteOptions | None = None,
    ) -> None:
        super().__init__(data_dir, num_envs, device)
        self._origins = present_origins_of(data_dir, CREATE, "data_dir")
        if num_transitions_per_env is not None:
            num_transitions_per_env = _whole("num_transitions_per_env", num_transitions_per_env, 1)
        self.num_transitions_per_env = num_transitions_per_env
        self.cache = _choice("cache", cache, get_args(Cache))
        self.interpolation = _choice("interpolation", interpolation, get_args(Interpolation))
        self.even = _choice("even", even, get_args(Even))
        self.on_error = _choice("on_error", on_error, get_args(OnError))
        self.drop_last = _flag("drop_last", drop_last)
        self.as_dict = _flag("as_dict", as_dict)
        self.verify_on_open = _flag("verify_on_open", verify_on_open)
        self._chunk_cache_bytes = _whole("chunk_cache_bytes", chunk_cache_bytes, 0)
        self._remote = checked_remote(CREATE, remote)
        self._passes = PassOptions(
            _whole("dataset_loops", dataset_loops, -(1 << 62)),
            _flag("random_shuffle_traj_order", random_shuffle_traj_order),
            _whole("keep_latest_n_trajs", keep_latest_n_trajs, 0),
            frame_range(starting_frame_range),
            _whole("seed", seed, 0),
            _real("wait_timeout_s", wait_timeout_s, ">= 0 seconds", lambda seconds: seconds >= 0),
            refresh_s=None
            if refresh_s is None
            else _real("refresh_s", refresh_s, ">= 0 seconds", lambda s: s >= 0),
        )
        self._notes = Notes()
        self._look = {
            "flatten_observations": _flag("flatten_observations", flatten_observations),
            "mark_first_frame": _flag("mark_first_frame", mark_first_frame),
            "contiguous": _flag("contiguous", contiguous),
            "notes": self._notes if _flag("texts", texts) else None,
        }
        self._frame_rate_hz = None if frame_rate_hz is None else _frame_rate(frame_rate_hz)
        self._begin_unread(checked_shard(shard, CREATE))

    # What there is

    @property
    def metadata(self) -> dict[str, Any]:
        """Contents of metadata.json of the (first) folder."""
        return self.source.metadata

    @property
    def texts(self) -> dict[int, str]:
        """The texts that fields of texts and `task` have the numbers of; read from all files at each call."""
        return self._notes.texts(self._snapshot())

    @property
    def num_trajectories(self) -> int:
        """Trajectories in the folders, as last seen."""
        return len(self._snapshot().index)

    @property
    def num_frames(self) -> int:
        """Frames in the folders, as last seen."""
        return self._snapshot().index.num_frames

    def statistics(
        self,
        quantiles: Sequence[float] = (0.01, 0.99),
        *,
        use_cache: bool = True,
        progress: bool = True,
    ) -> dict[str, FieldStatistics]:
        """Summarize each recorded field over all frames that there are now; see `WindowDataset.statistics`."""
        source = self.new_source()
        source.refresh()
        snapshot = source.snapshot()
        folder = source.paths[0] if source.holds_blocks and not source.is_remote else None
        parts = [(snapshot, np.arange(len(snapshot.index)))]
        names = list(snapshot.layouts[DATA].schema)
        return compute_statistics(
            arguments.calling(self, "statistics"),
            parts,
            folder,
            names,
            quantiles,
            use_cache,
            progress,
        )

    def _snapshot(self) -> RowSource:
        if self._position is not None:
            snapshot: RowSource = self._position.deal.source
            return snapshot
        self.source.refresh()
        return self.source.snapshot()

    def get_buffer(self, num_transitions_per_env: int | None = None) -> Transition:
        """Allocate a batch of zeros in the form that `get_batch` gives."""
        self._ensure_started()
        return self.reader.empty(
            self._snapshot(),
            self._checked_steps(num_transitions_per_env, "get_buffer"),
            self.num_envs,
        )

    def fill_transition(
        self, buffer: Transition, env_ids: torch.Tensor | None = None
    ) -> Transition:
        """Write the next step of `env_ids` into those rows of a `[num_envs, ...]` buffer; only they move on."""
        self._ensure_started()
        ids = np.sort(self._checked_ids("fill_transition", env_ids).numpy())
        some = ids if len(ids) < self.num_envs else None
        if some is not None:
            self._check_alone("fill the rows of some envs")
        plan, position = self.plan_next(1, some)
        batch = self.read(plan, position, some, without_time=True)
        write_into(arguments.calling(self, "fill_transition"), buffer, batch, torch.from_numpy(ids))
        self.commit(position)
        return buffer

    def fill_rollout(self, buffer: Transition, num_transitions_per_env: int) -> Transition:
        """Write the next T steps into a `[T, num_envs, ...]` buffer in one plan."""
        action = arguments.calling(self, "fill_rollout")
        num_steps = arguments.whole(action, "num_transitions_per_env", num_transitions_per_env, 1)
        self._ensure_started()
        plan, position = self.plan_next(num_steps)
        write_into(action, buffer, self.read(plan, position), None)
        self.commit(position)
        return buffer

    def prefetch(
        self, num_batches: int = 2, device: torch.device | str | None = None
    ) -> PrefetchedBatches:
        """Iterate with batches read ahead by a thread and copied to `device` (None: the dataset's).

        `state_dict()` of the iterator tells what was delivered, not what was read ahead.
        """
        action = arguments.calling(self, "prefetch")
        num_batches = arguments.whole(action, "num_batches", num_batches, 1)
        return PrefetchedBatches(
            self, num_batches, arguments.optional_device(action, "device", device)
        )

    # Names from the published description

    def read_dataset_directory(self) -> bool:
        """Wait until the folders hold enough trajectories, up to `wait_timeout_s`; return True.

        Enough are `keep_latest_n_trajs` complete trajectories, or as many as the environments need
        to start. No cursor moves; a stream that is under way finds new trajectories by itself.

        Raises:
            WaitTimeoutError: There were not enough in time.
            UsageError: There is no folder, and neither `keep_latest_n_trajs` nor `refresh_s`
                announces data.
        """
        loops = self._passes.dataset_loops
        num_envs = self.num_envs * self._rank().total
        needed = 1 if self._passes.is_endless else -(-num_envs // loops)
        wait_for_trajectories(
            self.new_source(), self._passes.keep_latest_n_trajs or needed, self._passes
        )
        return True

    def get_frame_range(self, filename: str | os.PathLike[str]) -> tuple[int, int]:
        """Return the half-open range of frames that a file or a trajectory holds.

        Args:
            filename: A chunk file of the older layout, with or without its folder: the numbers in
                the name `traj_START_END.pickle` are returned, and no file is read. Or the name of a
                trajectory, "writer:number" (`ids` of `rollout_data.open(data_dir)`): `(0, length)`.

        Raises:
            UsageError: It is neither.
        """
        name = os.fsdecode(filename) if isinstance(filename, (str, os.PathLike)) else repr(filename)
        if (frames := chunk_frames(name)) is not None:
            return frames
        index = self._snapshot().index
        writer, _, number = name.rpartition(":")
        # Writers of several folders have the number of their folder before their names.
        writers = [
            known for known in index.writers if writer in (known, known[known.find(":") + 1 :])
        ]
        keys = [(known, int(number)) for known in writers] if number.isdecimal() else []
        places = index.find(keys)
        places = places[places >= 0]
        if len(places) != 1:
            expected = "filename as 'traj_START_END.pickle', or the name of one trajectory"
            first = index.keys(places[:2] if len(places) else slice(0, 1))
            if first:
                expected += ", such as " + " or ".join(
                    repr(f"{known}:{number}") for known, number in first
                )
            raise UsageError(
                f"call {type(self).__name__}.get_frame_range", "", expected, repr(name)
            )
        return 0, int(index.lengths[places[0]])

    def assemble_obs_components(self, traj_data: Mapping[str, Any]) -> torch.Tensor:
        """Join the components of a trajectory's observation as the batches of this dataset have them joined.

        Args:
            traj_data: Arrays or tensors `[T, ...]` by name: `obs_<component>` as chunk files of the
                older layout have them, `observation/<component>`, a mapping of components below
                `observation`, or the component alone. Counts of a coded component (uint8 of
                `normalized_image`) are decoded. Other keys are ignored. Where the dataset has no
                components: `observations`, `observation` or `obs`.

        Returns:
            `[T, D]` in `obs_segments` order, on the device of the dataset; new memory.

        Raises:
            MissingFieldError: A component is missing.
            SchemaError, FieldTypeError: A component has another shape or dtype.
        """
        schema = self._snapshot().layouts[DATA].schema
        fields = [field for name, field in schema.items() if name.partition("/")[0] == OBSERVATION]
        return assembled(
            f"call {type(self).__name__}.assemble_obs_components", fields, traj_data
        ).to(self.device)

    # Lookup by time

    @property
    def frame_rate_hz(self) -> float:
        rate = self._frame_rate_hz
        if rate is None and (found := self.metadata.get("frame_rate_hz")) is not None:
            rate = _frame_rate(found)
        if rate is None:
            advice = "Give frame_rate_hz, or record it in the metadata"
            raise UsageError(
                "look frames up by time",
                f"in {self.data_dir!r}",
                "a known frame rate",
                "none",
                advice,
            )
        return rate

    def reference_num_frames(self, env_ids: torch.Tensor) -> torch.Tensor:
        ids = self._checked_ids("reference_num_frames", env_ids)
        self._ensure_started()
        return torch.from_numpy(self.position.deal.lengths[self._played(ids)])

    def read_frames_at(self, env_ids: torch.Tensor, position: torch.Tensor) -> Transition:
        ids = self._checked_ids("read_frames_at", env_ids)
        self._ensure_started()
        frames = self._checked_frames(ids, position)
        reader = BatchReader(BatchOptions(self.device, **{**self._look, "mark_first_frame": False}))
        is_linear = self.interpolation == "linear"
        return reader.frames_at(self.position.deal, self._played(ids), frames, is_linear)

    def _checked_frames(self, ids: torch.Tensor, position: Any) -> npt.NDArray[np.float64]:
        """Check positions of `read_frames_at`: float64 `[len(ids)]`, each within the trajectory of its env."""
        last = self.reference_num_frames(ids).numpy() - 1
        try:
            frames = torch.as_tensor(position, dtype=torch.float64, device="cpu").numpy()
            is_right = frames.shape == last.shape and bool(((frames >= 0) & (frames <= last)).all())
        except (TypeError, ValueError, RuntimeError):
            is_right = False
        if not is_right:
            expected = f"position as {len(ids)} numbers of frames, from 0 up to {last.tolist()[:8]}"
            raise UsageError(
                arguments.calling(self, "read_frames_at"), "", expected, repr(position)[:100]
            )
        return frames

    def _played(self, env_ids: torch.Tensor) -> Int64s:
        """Which trajectories envs of this process are at."""
        played: Int64s = self.position.state.trajectory[self._mine][env_ids.numpy()]
        return played


def _frame_rate(value: Any) -> float:
    return _real("frame_rate_hz", value, "> 0 frames per second", lambda rate: 0 < rate < math.inf)
