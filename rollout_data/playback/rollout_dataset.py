"""RolloutDataset: recorded rollouts as batches of parallel streams.

Arguments are checked here; `rollout_stream.py` has the order of batches.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
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
from .observation_components import join_components
from .passes import PassOptions, frame_range, wait_for_trajectories
from .rollout_stream import Even, RolloutStream
from .transition import Transition

Cache = Literal["none", "ram", "device"]
OnError = Literal["raise", "skip"]
Interpolation = Literal["nearest", "linear"]


class RolloutDataset(RolloutStream):
    """Stream recorded trajectories into `num_envs` parallel streams, in order, with random starts.

    Every env plays one trajectory after the other. When a trajectory ends, its env takes the next
    unused one; the other envs do not change. Reads block files and files of other systems (see
    FORMATS.md). Files are opened with the first batch.

    Args:
        data_dir: A folder, a file of any format that `rollout_data.open` knows, a `Recording`, or a
            list of them of one format. Or URLs of folders of block files; see `remote`.
        num_envs: Parallel streams of each rank. The streams of all ranks are planned alike in every
            process, and are the same for any number of ranks and workers. The workers of a rank
            read its batches in turns.
        dataset_loops: Number of passes over all trajectories; below 1 without end.
        random_shuffle_traj_order: Shuffle the trajectories of a pass: a permutation that depends on
            (seed, epoch, pass).
        keep_latest_n_trajs: N > 0 reads only the newest N complete trajectories. The stream waits
            until there are N, and scans for newer ones before every pass.
        starting_frame_range: Half-open range of the frame at which a trajectory starts.
        device: Device of the batches; None is CUDA if there is one. In DataLoader workers always
            the CPU.
        num_transitions_per_env: Steps T of the batches of iteration; None is one step without a
            time axis.
        seed: Seed of permutations and starting frames.
        cache: "none" reads the mapped files. "ram" copies the frames into memory first. "device"
            copies them into the memory of `device`, so that a batch never leaves it. With "ram" and
            "device" only filling the cache waits for a GPU. Blocks are never modified. If another
            program truncates a mapped file, every process that reads it ends, as with any mapped
            file.
        flatten_observations: Join components along the last axis in `obs_segments` order; False
            returns dicts.
        mark_first_frame: Set `done` on the first delivered frame of a trajectory, so that recurrent
            learners reset. `is_first` marks this frame in either case.
        drop_last: Stop before the first batch that an env cannot fill, and count the undelivered
            frames in `num_dropped_frames`. False continues until all envs are exhausted. Exhausted
            envs repeat their last transition with `valid=False`.
        verify_on_open: Compare every checksum when a block is first seen.
        wait_timeout_s: Seconds to wait for `keep_latest_n_trajs` trajectories, or with `refresh_s`
            for the first one. The folder may be missing until then.
        contiguous: Copy every field to contiguous memory of its own, in place of a view of rows.
        frame_rate_hz: Frames per second for `get_batch_by_time`; None takes it from the metadata.
        interpolation: "nearest" or "linear", for `get_batch_by_time`.
        chunk_cache_bytes: Bytes of decoded chunks of coded components, and of decoded pictures of
            other systems' files, that are kept, most recently used; 0 for none. LeRobot sets also
            keep 128 MiB of encoded pictures.
        shard: The share of the envs that this process reads. "auto": the share of its rank in
            torch.distributed, where rank 0 decides which trajectories a pass uses. "none": all
            envs, for trainers that split batches themselves. (rank, world size): that share.
        even: The end of an epoch for several ranks. "pad": all ranks end when the last env of all
            ranks is exhausted. "drop": all ranks end when one rank has no frame left. "none": each
            rank ends when its own envs are exhausted.
        on_error: "skip" leaves out the rest of a trajectory with damaged data, lists it in
            `problems`, and continues. Deleted files are always left out so. "raise" raises.
        as_dict: Return batches as plain dicts of tensors: recorded fields, extras and flags,
            without None.
        refresh_s: Scan for new trajectories within a pass too. Envs that become free take the new
            trajectories within this many seconds, before the rest of the pass. None scans between
            passes only. The stream reads complete trajectories only, and waits for the first one up
            to `wait_timeout_s`.
        texts: Add `task` to the extras: the number of the task of the episode, int64
            `[T, num_envs]`; see the attribute `texts`.
        remote: Options of files behind a network. Rows that envs need next are prefetched. Each
            rank and worker fetches its own rows.

    Attributes:
        problems: Data that were not read, were repaired or were left out, as errors.
        advice: Remarks on data that are read as they are stored, such as copied actions.
        num_lost_trajectories: Trajectories that could not be read to their end; their other frames
            have `valid=False`.
        num_dropped_frames: Frames that `drop_last` left undelivered.

    Raises:
        UsageError: An argument is invalid, or there are fewer trajectories than envs (at reset).
        WaitTimeoutError: There were fewer than `keep_latest_n_trajs` trajectories in time.
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
        self._origins = present_origins_of(data_dir)
        if num_transitions_per_env is not None:
            num_transitions_per_env = whole("num_transitions_per_env", num_transitions_per_env, 1)
        self.num_transitions_per_env = num_transitions_per_env
        self.cache = choice("cache", cache, get_args(Cache))
        self.interpolation = choice("interpolation", interpolation, get_args(Interpolation))
        self.even = choice("even", even, get_args(Even))
        self.on_error = choice("on_error", on_error, get_args(OnError))
        self.drop_last = flag("drop_last", drop_last)
        self.as_dict = flag("as_dict", as_dict)
        self.verify_on_open = flag("verify_on_open", verify_on_open)
        self._chunk_cache_bytes = whole("chunk_cache_bytes", chunk_cache_bytes, 0)
        self._remote = checked_remote(remote)
        if refresh_s is not None:
            refresh_s = real("refresh_s", refresh_s, ">= 0 seconds", lambda seconds: seconds >= 0)
        self._passes = PassOptions(
            whole("dataset_loops", dataset_loops, -(1 << 62)),
            flag("random_shuffle_traj_order", random_shuffle_traj_order),
            whole("keep_latest_n_trajs", keep_latest_n_trajs, 0),
            frame_range(starting_frame_range),
            whole("seed", seed, 0),
            real("wait_timeout_s", wait_timeout_s, ">= 0 seconds", lambda seconds: seconds >= 0),
            refresh_s=refresh_s,
        )
        self._notes = Notes()
        self._batch_options = {
            "flatten_observations": flag("flatten_observations", flatten_observations),
            "mark_first_frame": flag("mark_first_frame", mark_first_frame),
            "contiguous": flag("contiguous", contiguous),
            "notes": self._notes if flag("texts", texts) else None,
        }
        self._frame_rate_hz = None if frame_rate_hz is None else _frame_rate(frame_rate_hz)
        self._begin_unread(checked_shard(shard))

    # Contents

    @property
    def metadata(self) -> dict[str, Any]:
        """Contents of metadata.json of the (first) folder."""
        return self.source.metadata

    @property
    def texts(self) -> dict[int, str]:
        """Map from number to text, for text fields and `task`. Each access reads all files."""
        return self._notes.texts(self._snapshot())

    @property
    def num_trajectories(self) -> int:
        """Number of trajectories in the folders at the last scan."""
        return len(self._snapshot().index)

    @property
    def num_frames(self) -> int:
        """Number of frames in the folders at the last scan."""
        return self._snapshot().index.num_frames

    def statistics(
        self,
        quantiles: Sequence[float] = (0.01, 0.99),
        *,
        use_cache: bool = True,
        progress: bool = True,
    ) -> dict[str, FieldStatistics]:
        """Compute statistics of each field over all present frames; see `WindowDataset.statistics`."""
        source = self.new_source()
        source.refresh()
        snapshot = source.snapshot()
        folder = source.paths[0] if source.holds_blocks and not source.is_remote else None
        parts = [(snapshot, np.arange(len(snapshot.index)))]
        names = list(snapshot.layouts[DATA].schema)
        return compute_statistics(parts, folder, names, quantiles, use_cache, progress)

    def _snapshot(self) -> RowSource:
        if self._position is not None:
            snapshot: RowSource = self._position.pass_order.source
            return snapshot
        self.source.refresh()
        return self.source.snapshot()

    def get_buffer(self, num_transitions_per_env: int | None = None) -> Transition:
        """Allocate a batch of zeros with the fields and shapes of `get_batch`."""
        self._ensure_started()
        return self.reader.empty(
            self._snapshot(),
            self._checked_steps(num_transitions_per_env),
            self.num_envs,
        )

    def fill_transition(
        self, buffer: Transition, env_ids: torch.Tensor | None = None
    ) -> Transition:
        """Write the next step of `env_ids` into their rows of a `[num_envs, ...]` buffer.

        The other envs do not advance.
        """
        self._ensure_started()
        ids = np.sort(self._checked_ids(env_ids).numpy())
        some = ids if len(ids) < self.num_envs else None
        if some is not None:
            self._check_single_process()
        plan, position = self.plan_next(1, some)
        batch = self.read(plan, position, some, without_time=True)
        write_into(buffer, batch, torch.from_numpy(ids))
        self.commit(position)
        return buffer

    def fill_rollout(self, buffer: Transition, num_transitions_per_env: int) -> Transition:
        """Write the next T steps into a `[T, num_envs, ...]` buffer in one plan."""
        num_steps = arguments.whole("num_transitions_per_env", num_transitions_per_env, 1)
        self._ensure_started()
        plan, position = self.plan_next(num_steps)
        write_into(buffer, self.read(plan, position), None)
        self.commit(position)
        return buffer

    def prefetch(
        self, num_batches: int = 2, device: torch.device | str | None = None
    ) -> PrefetchedBatches:
        """Return an iterable whose batches a thread prefetches and copies to `device` (None: the dataset's).

        Its `state_dict()` is the state after the last delivered batch.
        """
        num_batches = arguments.whole("num_batches", num_batches, 1)
        return PrefetchedBatches(self, num_batches, arguments.optional_device("device", device))

    # Names from the published description

    def read_dataset_directory(self) -> bool:
        """Wait up to `wait_timeout_s` until the folders have enough trajectories; return True.

        Enough are `keep_latest_n_trajs` complete trajectories, or as many as the envs need to
        start. No cursor moves; a running stream finds new trajectories by itself.

        Raises:
            WaitTimeoutError: There were fewer after `wait_timeout_s`.
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
        """Return the half-open range of frames of a file or a trajectory, as (start, stop).

        Args:
            filename: Name of a chunk file of the older layout, `traj_START_END.pickle`, with or
                without its folder. The result is (START, END), and no file is read. Or the name of
                a trajectory, "writer:number", as in `ids` of `rollout_data.open(data_dir)`. The
                result is (0, number of frames).

        Raises:
            UsageError: The name has neither form, or there is not exactly one such trajectory.
        """
        name = os.fsdecode(filename) if isinstance(filename, (str, os.PathLike)) else repr(filename)
        frames = chunk_frames(name)
        if frames is not None:
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
            examples = " or ".join(
                repr(f"{known}:{number}")
                for known, number in index.keys(places[:2] if len(places) else slice(0, 1))
            )
            raise UsageError(
                f"filename {name!r} is not the name of one trajectory. "
                f"Pass {examples or 'WRITER:NUMBER'}, or 'traj_START_END.pickle'."
            )
        return 0, int(index.lengths[places[0]])

    def assemble_obs_components(self, traj_data: Mapping[str, Any]) -> torch.Tensor:
        """Join the components of a trajectory's observation in the order of batches of this dataset.

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
        return join_components(fields, traj_data).to(self.device)

    # Lookup by time

    @property
    def frame_rate_hz(self) -> float:
        rate = self._frame_rate_hz
        if rate is None:
            recorded = self.metadata.get("frame_rate_hz")
            rate = None if recorded is None else _frame_rate(recorded)
        if rate is None:
            raise UsageError(
                f"the metadata of {str(self.data_dir)!r} has no frame_rate_hz. "
                "Pass frame_rate_hz to RolloutDataset."
            )
        return rate

    def reference_num_frames(self, env_ids: torch.Tensor) -> torch.Tensor:
        ids = self._checked_ids(env_ids)
        self._ensure_started()
        return torch.from_numpy(self.position.pass_order.lengths[self._played(ids)])

    def read_frames_at(self, env_ids: torch.Tensor, position: torch.Tensor) -> Transition:
        ids = self._checked_ids(env_ids)
        self._ensure_started()
        frames = self._checked_frames(ids, position)
        reader = BatchReader(
            BatchOptions(self.device, **{**self._batch_options, "mark_first_frame": False})
        )
        is_linear = self.interpolation == "linear"
        return reader.frames_at(self.position.pass_order, self._played(ids), frames, is_linear)

    def _checked_frames(self, ids: torch.Tensor, position: Any) -> npt.NDArray[np.float64]:
        """Return the positions of `read_frames_at`: float64 `[len(ids)]`, each within its trajectory."""
        last = self.reference_num_frames(ids).numpy() - 1
        try:
            frames = torch.as_tensor(position, dtype=torch.float64, device="cpu").numpy()
            is_right = frames.shape == last.shape and bool(((frames >= 0) & (frames <= last)).all())
        except (TypeError, ValueError, RuntimeError):
            is_right = False
        if not is_right:
            raise UsageError(
                f"position must have shape ({len(ids)},) and values from 0 to "
                f"{last.tolist()[:8]}, got {repr(position)[:100]}."
            )
        return frames

    def _played(self, env_ids: torch.Tensor) -> Int64s:
        """Return the numbers of the trajectories that envs of this process play, int64."""
        played: Int64s = self.position.state.trajectory[self._own_envs][env_ids.numpy()]
        return played


def _frame_rate(value: Any) -> float:
    return real("frame_rate_hz", value, "> 0 frames per second", lambda rate: 0 < rate < math.inf)
