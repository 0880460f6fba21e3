"""`WindowDataset`: numbered windows of trajectories, for sequence models and action chunks.

A batch is first computed as integer frame numbers. Then one gather per kind of row copies the
frames. `window_index.py` numbers the windows; `window_reader.py` plans and reads their fields.
"""

from __future__ import annotations

import multiprocessing
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, get_args

import numpy as np
import torch

from storage.core import arguments
from storage.core.arguments import choice, flag, whole
from storage.core.durable_files import crc32
from storage.errors import (
    DataFileError,
    RolloutDataError,
    RolloutDataWarning,
    UnansweredError,
    UsageError,
)

from ..blocks.annotation_table import TASK
from ..blocks.annotations import Notes
from ..blocks.block_header import DATA
from ..blocks.row_layout import Allocate
from ..blocks.trajectory_index import Int64s, LostBlockError
from ..remote.locations import DataDirs, RemoteOptions, checked_remote, present_origins_of
from ..sources.epoch import Epoch
from ..sources.live_source import LiveSource
from ..sources.processes.shared_memory import Spot
from ..sources.recordings.field_statistics import FieldStatistics, Frames, compute_statistics
from ..sources.rows.chunk_decoder import CHUNK_CACHE_BYTES
from ..sources.rows.row_source import RowSource
from .chunked_order import ChunkedOrder, Route
from .skipped_windows import OnError, WindowLosses
from .window_index import (
    Padding,
    Split,
    SplitOptions,
    WindowIndex,
    checked_windows,
    choose_trajectories,
)
from .window_reader import (
    MASK,
    MAX_FRAMES,
    NEXT,
    NEXT_MASK,
    WindowPlan,
    WindowReader,
    checked_delta,
    damaged_frame,
    plan_windows,
)
from .worker_batches import WindowBatches


class WindowDataset(WindowBatches):
    """Map-style dataset of numbered windows of trajectories, which reads a batch in one call.

    A window belongs to a frame `t` of a trajectory, its anchor. It contains the frames `t + delta`
    of each field. Read it with a `DataLoader` with `collate_fn=dataset.collate`, or with
    `WindowLoader`. The dataset is a snapshot of the folders. Pickled copies, as in spawned workers,
    open the same files again.

    Args:
        data_dir: A folder, a file of any format of `rollout_data.open`, a `Recording`, or a list of
            one of these kinds. Or URLs of folders of block files, such as "s3://bucket/walk"; see
            `remote`.
        length: L: fields without an entry in `delta` have the frames `t .. t + L - 1`.
        stride: Frames between the anchors of a trajectory.
        delta: Map from field or name prefix to the list of frames relative to the anchor, in the
            order of the output. Example for a frame stack and an action chunk:
            `{"observation": [-1, 0], "action": range(16)}`.
        padding: "none": only windows whose frames all exist. "repeat" (or "edge") and "zero": every
            `stride`-th frame is an anchor; frames outside the trajectory are copies of the nearest
            frame, or zeros.
        fields: Names or name prefixes; None means all fields. Two fields are computed: `done` is
            True on the last frame of a trajectory; `timeout` is also True there if the trajectory
            was truncated or cut.
        split: "train" or "validation"; None means all trajectories.
        validation_fraction: Of M trajectories, round(M * fraction) are for validation.
        seed: Seed of the split. The split of a trajectory depends on (seed, writer, trajectory
            number), not on the folder. `pack` creates new writers and therefore other splits.
        next_observations: Add `next_observation` (and `next_privileged_observation`): one frame
            later; after the last frame, the recorded final observation.
        flatten_observations: Join the components of an observation along the last axis in
            `obs_segments` order, as in `RolloutDataset`: `[B, L, D]` with one mask. `delta` must
            contain the same frames for all components. Statistics stay per component.
        contiguous: Copy every field to its own contiguous memory, instead of a view of rows.
        texts: Add `task`: number of the episode's task, int64 `[B]`; see the attribute `texts`.
        verify_on_open: Check every checksum when a block is first opened.
        chunk_cache_bytes: Bytes of the cache of decoded chunks and of decoded images of other
            formats, least recently used removed first; 0 disables it. LeRobot data sets cache
            another 128 MiB of encoded images.
        remote: Options for reading files over a network.
        on_error: "skip" leaves out windows with damaged or deleted data: the batch is shorter, or
            empty, and all other windows stay in their batches. "raise" raises an error with the
            file, the episode and the frame.

    A batch is a nested dict of `[B, L, *shape]` tensors on the CPU; the caller owns it. Raw fields
    are views of rows gathered for the batch. `mask` is True for frames that exist: bool `[B, L]`,
    or with `delta` one mask per field, nested like the fields. `next_mask` is nested likewise; it
    is False where no true next observation was recorded.

    A dataset without windows is empty. It warns with the reason (`RolloutDataWarning`): the split
    has no trajectory, or all trajectories are too short.

    Attributes:
        problems: Exceptions for data that were unreadable, repaired or left out.
        advice: Remarks on suspicious data that are read unchanged, such as copied actions.
        num_lost_windows: Number of different windows skipped by any worker process.
        opened_as: Short list of plain data that identifies the snapshot; an argument of `at`. The
            fourth entry is the number of windows when the dataset was first opened.

    Raises:
        UsageError: An argument is invalid, or nothing was recorded.
    """

    _not_pickled = (
        "_pool",
        "_shared",
        "_source",
        "_snapshot",
        "_windows",
        "_reader",
        "plan",
        "trajectories",
    )

    def __init__(
        self,
        data_dir: DataDirs,
        length: int = 1,
        stride: int = 1,
        *,
        delta: Mapping[str, Iterable[int]] | None = None,
        padding: Padding = "none",
        fields: Sequence[str] | None = None,
        split: Split | None = None,
        validation_fraction: float = 0.1,
        seed: int = 0,
        next_observations: bool = False,
        flatten_observations: bool = False,
        contiguous: bool = False,
        texts: bool = False,
        verify_on_open: bool = False,
        chunk_cache_bytes: int = CHUNK_CACHE_BYTES,
        remote: RemoteOptions | None = None,
        on_error: OnError = "raise",
    ) -> None:
        self.on_error = choice("on_error", on_error, get_args(OnError))
        self.losses = WindowLosses()
        #: A window that was readable at the last check. The next check tries it first.
        self._intact = 0
        self.data_dir = data_dir
        self._origins = present_origins_of(data_dir)
        self.padding = choice("padding", padding, get_args(Padding))
        self.length = whole("length", length, 1, MAX_FRAMES)
        self.stride = whole("stride", stride, 1, MAX_FRAMES)
        self._delta = checked_delta(delta)
        self._fields = None if fields is None else arguments.names("fields", fields)
        self._split = SplitOptions(split, validation_fraction, whole("seed", seed, 0))
        self._next_observations = flag("next_observations", next_observations)
        self._contiguous = flag("contiguous", contiguous)
        self._flatten_observations = flag("flatten_observations", flatten_observations)
        self._has_texts = flag("texts", texts)
        self._notes = Notes()
        self._verify_on_open = flag("verify_on_open", verify_on_open)
        self._remote = checked_remote(remote)
        self._chunk_cache_bytes = whole("chunk_cache_bytes", chunk_cache_bytes, 0)
        self.opened_as: Any = None
        #: Shared memory with the index of trajectories, which a spawned worker maps instead of
        #: reading all headers. None in other processes.
        self._spot: Spot | None = None
        self._may_lack = False
        self._open()
        if not len(self):
            warnings.warn(self._why_empty(), RolloutDataWarning, stacklevel=2)

    def _open(self) -> None:
        """Open the folders. An unpickled copy opens the same snapshot as the original.

        The snapshot is identified by `opened_as`, which is None in a new dataset.
        """
        super()._open()
        self._source = LiveSource(
            self._origins, self._verify_on_open, self._chunk_cache_bytes, self._remote
        )
        before = [*(self.opened_as or []), *5 * [None]]
        upto, fingerprint, first_of_training, num_windows, form = before[:5]
        if self._source.adopt(None, self._spot):
            self._snapshot: RowSource = self._source.snapshot()
        else:
            self._source.refresh()
            self._snapshot = self._source.snapshot(upto)
        self.trajectories, first_of_training = choose_trajectories(
            self._snapshot.index, self._split, first_of_training
        )
        if not len(self._snapshot.layouts[DATA].schema):
            text = f"{str(self.data_dir)!r} has no recorded trajectories."
            if self.problems:
                text += f" {self.problems[0]}"
            raise UsageError(text)
        if not len(self._snapshot.index) and self.problems and self.opened_as is None:
            cause = self.problems[0]
            raise DataFileError(
                f"{str(self.data_dir)!r} has no readable trajectory. {cause}"
            ) from cause
        may_lack = self._may_lack and upto is not None
        self._may_lack = False
        found_now = _fingerprint(self._snapshot, self.trajectories)
        if self.opened_as is not None and found_now != fingerprint and not may_lack:
            raise DataFileError(
                f"the trajectories in {str(self.data_dir)!r} have changed since the dataset was opened. "
                "Open the dataset again."
            )
        layout = self._snapshot.layouts[DATA]
        next_observations = self._next_observations
        self.plan: WindowPlan = plan_windows(
            layout,
            self.length,
            self._delta,
            self._fields,
            next_observations,
            self._flatten_observations,
        )
        for field in self.plan.fields:
            if field.name.split("/")[0] in (MASK, NEXT_MASK):
                raise UsageError(
                    f"the field name {field.name!r} is reserved for masks of windows. Rename the field."
                )
        pads = self.padding != "none"
        self._windows = WindowIndex(
            self._snapshot.index, self.trajectories, *self.plan.reach, self.stride, pads
        )
        form_now = [
            self._windows.first_anchor,
            self._windows.least_length,
            self.stride,
            *self._chunks(),
        ]
        if form not in (None, form_now):
            raise UsageError(
                f"the windows of {str(self.data_dir)!r} have other options than the saved windows: "
                f"{form_now} instead of {form} (first anchor, least trajectory length, stride, and "
                "for URLs frames per chunk and chunks per group). Pass the options of the saved "
                "dataset."
            )
        if upto is None and self._source.holds_blocks:
            upto = self._snapshot.index.writers_upto()
        num_windows = len(self) if num_windows is None else num_windows
        self.opened_as = [upto, found_now, first_of_training, num_windows, form_now]
        mask_is_one = self._delta is None
        self._reader = WindowReader(
            self._snapshot,
            self.plan,
            self.trajectories,
            self.padding,
            mask_is_one,
            self._contiguous,
        )

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle. For a spawned worker it includes the index in shared memory."""
        is_for_worker = multiprocessing.context.get_spawning_popen() is not None
        return {
            **super().__getstate__(),
            "_spot": self._source.shared(self._snapshot) if is_for_worker else None,
        }

    def _why_empty(self) -> str:
        where = f"{str(self.data_dir)!r} has no window"
        num = len(self.trajectories)
        if not num and self._split.split is None:
            return f"{where}: no trajectory is selected"
        if not num:
            total = int(self._snapshot.index.is_present().sum())
            fraction = self._split.validation_fraction
            return (
                f"{where}: split {self._split.split!r} has none of {total} trajectories "
                f"(validation_fraction={fraction})"
            )
        return (
            f"{where}: a window of length {self.length} and stride {self.stride} requires "
            f"{self._windows.least_length} frames, and the longest of {num} trajectories has "
            f"{int(self._windows.lengths.max())}. Decrease length or stride, or pass padding."
        )

    def at(self, opened_as: Any, may_lack: bool = False) -> WindowDataset:
        """Return a dataset that reads an earlier snapshot of the folders.

        Args:
            opened_as: Attribute `opened_as` of a dataset that has opened the snapshot.
            may_lack: Whether trajectories of the snapshot may be missing.

        Raises:
            DataFileError: Trajectories of the snapshot were deleted, and `may_lack` is False. For
                a folder of the older layout, the error is raised with `may_lack` too: such a folder
                does not record which trajectories were added later.
        """
        if self.opened_as == opened_as:
            return self
        # Remote windows are shuffled in chunks of files. Without a trajectory, the bounds of chunks
        # and thus the order would differ.
        may_lack &= not self._source.is_remote
        earlier: WindowDataset = object.__new__(type(self))
        earlier.__setstate__({**self.__getstate__(), "opened_as": opened_as, "_may_lack": may_lack})
        return earlier

    @property
    def is_remote(self) -> bool:
        """Whether the files are read over a network."""
        return self._source.is_remote

    def __len__(self) -> int:
        """Return the number of windows."""
        return len(self._windows)

    @property
    def problems(self) -> list[RolloutDataError]:
        """Errors about data that were unreadable, repaired or left out, oldest first."""
        for problem in self.losses.new_problems():
            self._source.report(problem)
        return self._source.problems

    @property
    def advice(self) -> list[RolloutDataError]:
        """Remarks about suspicious data that are read unchanged, such as copied actions.

        See `Recording.advice`.
        """
        return self._source.advice

    @property
    def num_lost_windows(self) -> int:
        """Number of different windows that were skipped because of damaged or deleted data."""
        return len(self.losses)

    @property
    def metadata(self) -> dict[str, Any]:
        """Content of metadata.json of the first folder."""
        return self._source.metadata

    @property
    def conventions(self) -> set[tuple[str, str]]:
        """Pairs (name, value) from the metadata, for control modes and quaternion orders."""
        return self._source.conventions

    @property
    def texts(self) -> dict[int, str]:
        """Map from number to text. Text fields and `task` contain the numbers.

        Each access reads all files.
        """
        return self._notes.texts(self._snapshot)

    @property
    def num_trajectories(self) -> int:
        """Number of trajectories of this split, including trajectories without windows."""
        return len(self.trajectories)

    @property
    def lengths(self) -> Int64s:
        """Number of frames of each trajectory of this split, int64 `[M]`."""
        return self._windows.lengths

    @property
    def num_frames(self) -> int:
        """Total number of frames of the trajectories of this split."""
        return int(self._windows.lengths.sum())

    @property
    def form(self) -> tuple[str, ...]:
        """Description of the batches as text. Batches of datasets with equal forms can be mixed."""
        schema = self._snapshot.layouts[DATA].schema
        words = [
            f"next {self._next_observations}, masks {'one' if self._delta is None else 'by field'}"
        ]
        words += [f"with {TASK}"] if self._has_texts else []
        words += [f"{field.name} joined" for field in self.plan.fields if field.is_joined]
        for field in self.plan.fields:
            for source in field.sources:
                what = (
                    f"{schema[source].dtype}{list(schema[source].shape)}"
                    if field.rows
                    else "bool[]"
                )
                words.append(f"{NEXT * field.is_next}{source} {what} at {field.deltas.tolist()}")
        return tuple(words)

    def locate(self, windows: Sequence[int] | np.ndarray) -> tuple[list[tuple[str, int]], Int64s]:
        """Return (writer, trajectory number) of each window, and the anchors, int64 `[B]`."""
        place, anchor = self._windows.find(checked_windows(windows, len(self)))
        return self._snapshot.index.keys(self.trajectories[place]), anchor

    def shuffled(self, epoch: Epoch, until: Sequence[Any] | None = None) -> tuple[Int64s, Int64s]:
        """Return the numbers of all windows in the shuffled order of an epoch, and their sort keys.

        The sort keys are ascending, int64. The order depends only on the epoch and the names of the
        windows. Windows of remote files have the order of `ChunkedOrder`. This class ignores
        `until`; `WindowMixture` uses it.
        """
        if self._source.is_remote:
            return self._chunked(epoch).windows(), np.arange(len(self))
        keys = self._windows.random_keys(epoch) ^ np.uint64(1 << 63)
        # torch sorts in a third of numpy's time, but sorts no uint64. With the top bit flipped,
        # int64 numbers have the order of the uint64 numbers.
        ordered, windows = torch.sort(torch.from_numpy(keys.view(np.int64)), stable=True)
        return windows.numpy(), ordered.numpy()

    def ahead(self, epoch: Epoch | None) -> Callable[[int, int], None]:
        if not self._source.is_remote:
            return super().ahead(epoch)
        return Route(self._snapshot, self.plan, self._windows, self._chunked(epoch)).advance

    def _chunks(self) -> list[int]:
        """Return the chunk size of remote files as [frames per chunk, chunks per group].

        The result is [] for local files, which are not read in chunks. A window may contain frames
        outside of the chunk of its anchor. So a chunk has fewer frames than fit into `chunk_bytes`,
        to leave room for these frames.
        """
        if not self._source.is_remote:
            return []
        columns = self._snapshot.layouts[DATA].columns
        reaches = [shape.reach for shape in self.plan.shapes]
        row_bytes = sum(columns[name].row_bytes for name in self.plan.columns)
        beyond = max(high for _, high in reaches) - min(low for low, _ in reaches) if reaches else 0
        return [
            max(1, self._remote.chunk_bytes // max(1, row_bytes) - beyond),
            self._remote.num_chunks,
        ]

    def _chunked(self, epoch: Epoch | None) -> ChunkedOrder:
        place = self._snapshot.storage_order(self.trajectories)
        num_frames, num_chunks = self._chunks()
        return ChunkedOrder(self._windows, place, num_frames, num_chunks, epoch)

    def random_keys(self, epoch: Epoch) -> np.ndarray:
        """Return a random sort key for each window, uint64."""
        return self._windows.random_keys(epoch)

    def name(self, window: int) -> list[Any]:
        """Return the name of a window, which identifies the window in every snapshot of the folder.

        A name is a list: end time of the trajectory, writer, number of the trajectory, number of
        the window in the trajectory. Names are ordered. The order of two names does not change when
        windows are deleted.
        """
        return self._windows.name(window)

    def num_upto(self, name: Sequence[Any]) -> int:
        """Return the number of windows up to and including `name`, in the order of names."""
        return self._windows.num_upto(*name)

    def read(self, windows: Sequence[int] | np.ndarray, allocate: Allocate) -> dict[str, Any]:
        place, anchor = self._windows.find(checked_windows(windows, len(self)))
        batch = self._reader.read(place, anchor, allocate)
        if self._has_texts and TASK not in batch:
            tasks = torch.from_numpy(self._notes.tasks(self._snapshot)[self.trajectories[place]])
            batch[TASK] = allocate(tasks.shape, tasks.dtype).copy_(tasks)
        return batch

    def readable(
        self, windows: Sequence[int] | np.ndarray, on_error: OnError | None = None
    ) -> Int64s:
        numbers = checked_windows(windows, len(self))
        problems = [self._problem_of(number) for number in numbers.tolist()]
        kept: Int64s = numbers[[problem is None for problem in problems]]
        if len(numbers) and not len(kept):
            self._check_readable()
        return kept

    def _check_readable(self) -> None:
        """Raise `DataFileError` if no window is readable."""
        for window in (self._intact, *range(len(self))):
            trajectory = self.trajectories[self._windows.find(np.array([window]))[0]]
            if self._snapshot.is_lost[trajectory].any():
                continue
            problem = self._failure_of(window)
            if problem is None:
                self._intact = window
                return
            # If a block file was deleted, no window of its trajectories is readable. Mark these
            # trajectories as lost, instead of trying each window.
            if isinstance(problem, LostBlockError) and not isinstance(
                problem.__cause__, DataFileError
            ):
                self._snapshot.is_lost[self._snapshot.index.trajectories_in([problem.block])] = True
        where = repr(", ".join(map(str, self._source.paths)))
        cause = self.problems[-1]
        raise DataFileError(
            f"{where} has {len(self)} windows, and none is readable. {cause}"
        ) from cause

    def _problem_of(self, window: int) -> DataFileError | None:
        """Return the error of an unreadable window, and record it; None if it is readable."""
        problem = self._damage_of(window)
        if problem is not None and (name := self.name(window)) not in self.losses:
            self.losses.add(name, problem)
            self._source.report(problem)
        return problem

    def _failure_of(self, window: int) -> DataFileError | None:
        """Try to read a window and return the error; None if the window is readable."""
        place, anchor = self._windows.find(np.array([window]))
        try:
            self._reader.read(place, anchor, self._pool.empty)
        except UnansweredError:
            raise
        except DataFileError as problem:
            return problem
        return None

    def _damage_of(self, window: int) -> DataFileError | None:
        """Return an error with the file, episode and frame of a damaged window; None if intact."""
        problem = self._failure_of(window)
        if problem is None:
            return None
        place, anchor = self._windows.find(np.array([window]))
        trajectory = int(self.trajectories[place[0]])
        length = int(self._windows.lengths[place[0]])
        return (
            damaged_frame(self._snapshot, self.plan, trajectory, int(anchor[0]), length) or problem
        )

    def damage(self, windows: Sequence[int] | np.ndarray, problem: DataFileError) -> DataFileError:
        problems = (
            self._damage_of(number) for number in checked_windows(windows, len(self)).tolist()
        )
        return next((candidate for candidate in problems if candidate is not None), problem)

    def statistics(
        self,
        quantiles: Sequence[float] = (0.01, 0.99),
        *,
        use_cache: bool = True,
        progress: bool = True,
    ) -> dict[str, FieldStatistics]:
        """Compute statistics of each recorded field, such as mean and range, for normalization.

        The statistics cover each frame of this split once. They are computed in one pass, in
        bounded memory, and cached in a file in the data folder. For trajectory folders and URLs,
        the cache is in the user's cache folder. The cache is rewritten when the data change. If the
        cache cannot be written, the next call computes the statistics again.
        """
        is_beside = self._source.holds_blocks and not self._source.is_remote
        folder = self._source.paths[0] if is_beside else None
        return compute_statistics(
            [self.frames],
            folder,
            self.field_names,
            quantiles,
            use_cache,
            progress,
        )

    @property
    def frames(self) -> Frames:
        """Snapshot of the data, and the trajectories of this split, for statistics."""
        return self._snapshot, self.trajectories

    @property
    def field_names(self) -> list[str]:
        """Names of the recorded fields in a batch, without flags and next observations."""
        read = [field for field in self.plan.fields if field.rows and not field.is_next]
        return [source for field in read for source in field.sources]


def _fingerprint(snapshot: RowSource, trajectories: Int64s) -> int:
    index = snapshot.index
    columns = (
        index.first_frame[trajectories],
        index.number[trajectories],
        index.lengths[trajectories],
    )
    return crc32(np.stack([*columns, index.writer[trajectories]]).tobytes())
