"""`read_rollouts` and `write_rollouts`: read and write data folders with Ray Data.

Use these functions to preprocess data, and `RolloutDataset` to feed a learner. Each task reads or
writes complete trajectories. Written trajectories are added to the folder together, after all tasks
have succeeded, even if Ray ran some tasks twice.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from storage.core import arguments
from storage.core.fields import flatten, unflatten
from storage.core.memory import on_host
from storage.errors import UsageError

from .blocks.folder_metadata import load_metadata, publish_metadata
from .remote.locations import DataDirs
from .windows.window_dataset import WindowDataset
from .writing.rollout_writer import RolloutWriter

__all__ = ["read_rollouts", "write_rollouts"]

# Columns that are added to the recorded fields, so that `write_rollouts` can sort the rows.
_TRAJECTORY = "trajectory"  # int64, unique in the data set
_FRAME = "frame"  # int64, from 0 in each trajectory
_LENGTH = "length"  # int64, number of frames of the trajectory
_ADDED_COLUMNS = (_TRAJECTORY, _FRAME, _LENGTH)
_NEXT_PREFIX = "next_"
_NEXT_MASK = "next_mask"


def read_rollouts(data_dir: DataDirs, *, rows_per_task: int = 8192, **options: Any) -> Any:
    """Read recorded trajectories as a `ray.data.Dataset` with one row per frame.

    Args:
        data_dir: A folder or a list of folders, on a file system that all machines can access.
        rows_per_task: Maximum number of frames per task. A task reads complete trajectories, at
            least one. Ray splits blocks that are larger than its `target_max_block_size` (128 MiB).
        options: Options of `WindowDataset`: `fields`, `split`, `validation_fraction`, `seed`.
            `next_observations=False` reads half of the bytes, without final observations.
            `on_error="skip"` leaves out each trajectory that has a damaged frame.

    Returns:
        A dataset with a column for each field, such as "observation/joint_pos". Columns have the
        dtypes of the fields; bfloat16 becomes float32, which is exact. Further columns are `done`,
        `timeout` and `next_mask`, and `trajectory`, `frame` and `length` (int64), which
        `write_rollouts` needs.
    """
    import ray.data

    rows_per_task = arguments.whole("rows_per_task", rows_per_task, 1)
    windows = WindowDataset(data_dir, **{"next_observations": True, **options})
    starts = np.concatenate(([0], np.cumsum(windows.lengths)))
    num_trajectories = len(windows.lengths)
    tasks = []
    first = 0
    while first < num_trajectories:
        num_fitting = int(np.searchsorted(starts, starts[first] + rows_per_task, "right")) - 1
        stop = max(first + 1, num_fitting)
        tasks.append({_TRAJECTORY: first, _FRAME: starts[first : stop + 1]})
        first = stop
    dataset = ray.data.from_items(tasks, override_num_blocks=max(1, len(tasks)))
    return dataset.map_batches(partial(_read_trajectories, windows), batch_size=1)


def _read_trajectories(windows: WindowDataset, task: dict[str, Any]) -> dict[str, Any]:
    """Read the trajectories of one task of `read_rollouts`. The result maps columns to arrays.

    Args:
        windows: Dataset with windows of one frame.
        task: A batch of one row: "trajectory" is the number of the first trajectory. "frame" is an
            array of the first frame of each trajectory, then the first frame of the next task.
    """
    first = task[_TRAJECTORY][0]
    bounds = np.asarray(task[_FRAME][0], np.int64)
    starts = bounds[:-1]
    lengths = np.diff(bounds)
    numbers = np.arange(first, first + len(lengths))
    frames = np.arange(bounds[0], bounds[-1])
    fields = flatten(dict(windows.__getitems__(frames)))
    if len(fields["mask"]) < len(frames):
        # Damaged frames were skipped. Leave out their trajectories, since `write_rollouts` requires
        # complete trajectories.
        place = np.repeat(np.arange(len(lengths)), lengths)
        is_readable = np.isin(frames, windows.readable(frames))
        is_whole = np.bincount(place[is_readable], minlength=len(lengths)) == lengths
        frames = frames[is_whole[place]]
        numbers = numbers[is_whole]
        starts = starts[is_whole]
        lengths = lengths[is_whole]
        fields = flatten(dict(windows.__getitems__(frames)))
    for name in _ADDED_COLUMNS:
        if name in fields:
            raise UsageError(
                f"the field name {name!r} is reserved for an added column. Reserved names: "
                f"{', '.join(_ADDED_COLUMNS)}."
            )
    columns = {name: on_host(leaf[:, 0]) for name, leaf in fields.items() if name != "mask"}
    columns[_TRAJECTORY] = np.repeat(numbers, lengths)
    columns[_FRAME] = frames - np.repeat(starts, lengths)
    columns[_LENGTH] = np.repeat(lengths, lengths)
    return columns


def write_rollouts(dataset: Any, data_dir: str | os.PathLike[str], **options: Any) -> None:
    """Write a dataset with the columns of `read_rollouts` to a data folder.

    Args:
        dataset: A `ray.data.Dataset` with the columns `done`, `timeout`, `trajectory`, `frame` and
            `length` unchanged. All frames of a trajectory may be missing, but not some of them.
        data_dir: A new or existing folder, on a file system that all machines can access.
        options: Options of `RolloutWriter`: `obs_disassemble_mapping`, `metadata`, ...

    Trajectories get new numbers, in any order. Policy versions are not stored. Open trajectories,
    whose recording was cut, become truncated trajectories.

    Raises:
        UsageError: The frames of a trajectory are in several tasks. Nothing was written.
    """
    from ray.data import Datasink
    from ray.data.block import BlockAccessor

    folder = arguments.path("", data_dir).absolute()
    staging = folder / f".ray-{secrets.token_hex(4)}"

    class RolloutSink(Datasink):
        def write(self, blocks: Iterable[Any], ctx: Any) -> str:
            accessors = [BlockAccessor.for_block(block) for block in blocks]
            parts = [
                accessor.to_batch_format("numpy") for accessor in accessors if accessor.num_rows()
            ]
            task_folder = staging / secrets.token_hex(8)
            if parts:
                columns = {
                    name: np.concatenate([part[name] for part in parts]) for name in parts[0]
                }
                with RolloutWriter(task_folder, 1, **options) as writer:
                    _write_trajectories(writer, columns)
            return str(task_folder)

        def on_write_complete(self, write_result: Any) -> None:
            for task_folder in map(Path, write_result.write_returns):
                metadata = load_metadata(task_folder)
                if metadata is not None:
                    publish_metadata(folder, metadata, staging.name)
                for path in sorted(task_folder.glob("rollout_*.h5")):
                    path.rename(folder / path.name)
            shutil.rmtree(staging, ignore_errors=True)

        def on_write_failed(self, error: Exception) -> None:
            shutil.rmtree(staging, ignore_errors=True)

    dataset.write_datasink(RolloutSink())


def _write_trajectories(writer: RolloutWriter, columns: dict[str, np.ndarray]) -> None:
    """Write the trajectories in the rows of one task.

    Raises:
        UsageError: The rows do not contain all frames of a trajectory.
    """
    order = np.lexsort((columns[_FRAME], columns[_TRAJECTORY]))
    cuts = np.flatnonzero(np.diff(columns[_TRAJECTORY][order])) + 1
    for rows in np.split(order, cuts):
        trajectory = {name: column[rows] for name, column in columns.items()}
        length = int(trajectory[_LENGTH][0])
        if not np.array_equal(trajectory[_FRAME], np.arange(length)):
            raise UsageError(
                f"a task has {len(rows)} of {length} frames of trajectory "
                f"{trajectory[_TRAJECTORY][0]}. Call dataset.sort('trajectory') first."
            )
        done = trajectory.pop("done")[:, None].astype(bool)
        timeout = trajectory.pop("timeout")[:, None].astype(bool)
        record = {
            name: values[:, None]
            for name, values in trajectory.items()
            if name not in _ADDED_COLUMNS and not name.startswith(_NEXT_PREFIX)
        }
        record |= _final_observations(trajectory)
        writer.add_rollout(unflatten(record), terminated=done & ~timeout, truncated=timeout)


def _final_observations(trajectory: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Map names such as "final_observation" to the final observations, `[1, *shape]` each.

    `observation` and `privileged_observation` are left out as a whole if a component has no value
    after the last frame.

    Args:
        trajectory: Maps columns to the values of all frames of one trajectory.
    """
    finals: dict[str, np.ndarray] = {}
    for kind in ("observation", "privileged_observation"):
        masks = [
            values[-1]
            for name, values in trajectory.items()
            if _is_below(name, f"{_NEXT_MASK}/{kind}")
        ]
        if not masks or not all(masks):
            continue
        for name, values in trajectory.items():
            if _is_below(name, f"{_NEXT_PREFIX}{kind}"):
                finals[f"final_{name.removeprefix(_NEXT_PREFIX)}"] = values[-1:]
    return finals


def _is_below(name: str, parent: str) -> bool:
    return name == parent or name.startswith(f"{parent}/")
