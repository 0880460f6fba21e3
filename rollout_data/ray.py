"""`read_rollouts` and `write_rollouts`: a data folder as a source and a sink of Ray Data, for preprocessing.

One rule: a trajectory is read, and has to be written, as a whole. What is written becomes part of the folder when all
of it is there, and once, also where tasks fail and run again. To feed a learner use `RolloutDataset`.
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

#: Columns besides the recorded fields: which trajectory, which of its frames, how many it has.
_TRAJECTORY, _FRAME, _LENGTH = _PLACE = ("trajectory", "frame", "length")
_NEXT, _MASK = "next_", "next_mask"


def read_rollouts(data_dir: DataDirs, *, rows_per_task: int = 8192, **options: Any) -> Any:
    """Read recorded trajectories as a `ray.data.Dataset`, a row for each frame.

    Args:
        data_dir: A folder or a list of folders, on a file system that all machines see.
        rows_per_task: Frames that one task reads: whole trajectories, as many as fit, at least one. Ray cuts what is
            larger than its `target_max_block_size` (128 MiB).
        options: Of `WindowDataset`: `fields`, `split`, `validation_fraction`, `seed`; `next_observations=False` halves
            what is read, without true final observations. `on_error="skip"` leaves out whole trajectories, those with
            damaged frames.

    Columns are named as fields, levels joined by "/", and have their dtypes (bfloat16 as float32, which is exact). More
    columns: `done`, `timeout`, `next_mask`; `trajectory`, `frame` and `length`, int64, which `write_rollouts` needs.
    """
    import ray.data

    rows_per_task = arguments.whole("read rollouts", "rows_per_task", rows_per_task, 1)
    windows = WindowDataset(data_dir, **{"next_observations": True, **options})
    starts, tasks, first = np.concatenate(([0], np.cumsum(windows.lengths))), [], 0
    while first < len(windows.lengths):
        stop = max(first + 1, int(np.searchsorted(starts, starts[first] + rows_per_task, "right")) - 1)
        tasks.append({_TRAJECTORY: first, _FRAME: starts[first : stop + 1]})
        first = stop
    asked = ray.data.from_items(tasks, override_num_blocks=max(1, len(tasks)))
    return asked.map_batches(partial(_read, windows), batch_size=1)


def _read(windows: WindowDataset, asked: dict[str, Any]) -> dict[str, Any]:
    """Read trajectories from a number on, which begin at these frames, less the last."""
    (first,), (starts,) = asked[_TRAJECTORY], asked[_FRAME]
    starts = np.asarray(starts, np.int64)
    frames, lengths = np.arange(starts[0], starts[-1]), np.diff(starts)
    numbers = np.arange(first, first + len(lengths))
    flat = flatten(dict(windows.__getitems__(frames)))
    if len(flat["mask"]) < len(frames):  # damaged frames were skipped: their trajectories are left out as a whole
        place = np.repeat(np.arange(len(lengths)), lengths)
        is_whole = np.bincount(place[np.isin(frames, windows.readable(frames))], minlength=len(lengths)) == lengths
        frames, numbers = frames[is_whole[place]], numbers[is_whole]
        starts, lengths = starts[:-1][is_whole], lengths[is_whole]
        flat = flatten(dict(windows.__getitems__(frames)))
    else:
        starts = starts[:-1]
    if clash := [name for name in _PLACE if name in flat]:
        raise UsageError("read rollouts", f"with the field {clash[0]!r}", "other names than " + ", ".join(_PLACE))
    columns = {name: on_host(leaf[:, 0]) for name, leaf in flat.items() if name != "mask"}
    columns[_TRAJECTORY] = np.repeat(numbers, lengths)
    columns[_FRAME] = frames - np.repeat(starts, lengths)
    columns[_LENGTH] = np.repeat(lengths, lengths)
    return columns


def write_rollouts(dataset: Any, data_dir: str | os.PathLike[str], **options: Any) -> None:
    """Write rows as `read_rollouts` gives them into a data folder; trajectories get new numbers, in any order.

    Args:
        dataset: A `ray.data.Dataset` with `done`, `timeout`, `trajectory`, `frame` and `length` as they were. Whole
            trajectories may be missing.
        data_dir: A folder, new or not, on a file system that all machines see.
        options: Of `RolloutWriter`: `obs_disassemble_mapping`, `metadata`, ...

    Policy versions are not kept, and a trajectory that was cut becomes a truncated one.

    Raises:
        UsageError: Not all frames of a trajectory came to one task; nothing was written.
    """
    from ray.data import Datasink
    from ray.data.block import BlockAccessor

    folder = arguments.path("write rollouts into", "", data_dir).absolute()
    staging = folder / f".ray-{secrets.token_hex(4)}"

    class RolloutSink(Datasink):
        def write(self, blocks: Iterable[Any], ctx: Any) -> str:
            full = (block for block in map(BlockAccessor.for_block, blocks) if block.num_rows())
            parts = [block.to_batch_format("numpy") for block in full]
            place = staging / secrets.token_hex(8)
            if parts:
                with RolloutWriter(place, 1, **options) as writer:
                    _write(writer, {name: np.concatenate([part[name] for part in parts]) for name in parts[0]})
            return str(place)

        def on_write_complete(self, write_result: Any) -> None:
            for place in map(Path, write_result.write_returns):
                if (metadata := load_metadata(place)) is not None:
                    publish_metadata(folder, metadata, staging.name)
                for path in sorted(place.glob("rollout_*.h5")):
                    path.rename(folder / path.name)
            shutil.rmtree(staging, ignore_errors=True)

        def on_write_failed(self, error: Exception) -> None:
            shutil.rmtree(staging, ignore_errors=True)

    dataset.write_datasink(RolloutSink())


def _write(writer: RolloutWriter, columns: dict[str, np.ndarray]) -> None:
    order = np.lexsort((columns[_FRAME], columns[_TRAJECTORY]))
    for rows in np.split(order, np.flatnonzero(np.diff(columns[_TRAJECTORY][order])) + 1):
        one = {name: column[rows] for name, column in columns.items()}
        length = int(one[_LENGTH][0])
        if not np.array_equal(one[_FRAME], np.arange(length)):
            where, advice = f"trajectory {one[_TRAJECTORY][0]}", "Call dataset.sort('trajectory') first"
            raise UsageError("write", where, f"frames 0:{length} in one task", f"{len(rows)} of them", advice)
        done, timeout = (one.pop(name)[:, None].astype(bool) for name in ("done", "timeout"))
        given = {name: x[:, None] for name, x in one.items() if name not in _PLACE and not name.startswith(_NEXT)}
        for part in ("observation", "privileged_observation"):
            masks = [x[-1] for name, x in one.items() if f"{name}/".startswith(f"{_MASK}/{part}/")]
            if masks and all(masks):
                below = {name: x[-1:] for name, x in one.items() if f"{name}/".startswith(f"{_NEXT}{part}/")}
                given |= {f"final_{name.removeprefix(_NEXT)}": x for name, x in below.items()}
        writer.add_rollout(unflatten(given), terminated=done & ~timeout, truncated=timeout)
