"""Statistics of recorded fields, for normalization: one pass over the frames, kept in a file.

One rule: the file is a cache. It is used only for the very files, trajectories and settings that it was made from, it
may be deleted at any time, and where it cannot be written that costs the time, not the result.
"""

from __future__ import annotations

import json
import os
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from storage.core.durable import crc32, replace_file
from storage.core.fields import DTYPES, Field
from storage.core.memory import on_host
from storage.errors import RolloutDataError, UsageError

from ..format.header import DATA
from ..frames.store import FrameStore
from ..index.folder import stamp_of
from ..index.index import Int64s
from .quantiles import Array, Quantiles, quantiles_of

_CACHE_VERSION = 2
#: Bytes of rows that are read at once.
_PORTION_BYTES = 8 << 20
#: The last (or first) axis of a field of three axes is that of channels if it has at most so many.
_MAX_CHANNELS = 4
_BAD_CACHE = (
    OSError, LookupError, ValueError, TypeError, AttributeError, EOFError, ArithmeticError, MemoryError, RuntimeError,
    zipfile.BadZipFile, zlib.error,
)  # fmt: skip
_ARRAYS = ("mean", "std", "min", "max", "quantiles")


@dataclass(frozen=True, eq=False)
class FieldStatistics:
    """What the values of one field are like.

    A field of one axis has statistics for each of its elements; one of more axes for each of its channels (three
    axes, the last or the first of at most 4), or for all its elements together. All tensors broadcast against the
    field: float32, but float64 for fields of float64 and of integers of 32 bits or more. Values that are not finite
    go into them as numpy's functions take them.

    Attributes:
        mean, std: `std` is that of the population (divided by n); 0 for constants.
        min, max: Least and greatest value.
        quantiles: `[Q, ...]`, one for each of `levels`.
        levels: As asked for, in [0, 1].
        quantile_error: By how much the rank of a quantile may be off, as a part of all values; 0 where exact: fields
            of one byte, and fields whose values take at most 64 MiB.
        num_frames: Frames that were looked at.
    """

    mean: torch.Tensor
    std: torch.Tensor
    min: torch.Tensor
    max: torch.Tensor
    quantiles: torch.Tensor
    levels: tuple[float, ...]
    quantile_error: float
    num_frames: int


def compute_statistics(
    store: FrameStore,
    folder: Path | None,
    trajectories: Int64s,
    names: Sequence[str],
    levels: Sequence[float],
    use_cache: bool = True,
    progress: bool = True,
) -> dict[str, FieldStatistics]:
    """Give the statistics of fields over all frames of some trajectories; see `WindowDataset.statistics`.

    The cache lies in `folder`, the data folder; None keeps it in the user's cache folder.

    Raises:
        UsageError: A level lies outside [0, 1], or there is no frame.
    """
    try:
        checked = tuple(float(level) for level in levels)
    except (TypeError, ValueError):
        checked = (np.nan,)
    if not all(0 <= level <= 1 for level in checked):
        raise UsageError("compute quantiles", "", "a list of levels in [0, 1]", repr(levels))
    if not store.index.lengths[trajectories].sum():
        raise UsageError("compute statistics", "", "at least one frame", "none")
    about = {"version": _CACHE_VERSION, "fields": [store.layouts[DATA].schema[name].to_json() for name in names]}
    about |= {"levels": list(checked), "data": _fingerprint(store, trajectories)}
    # One file for each question, so that a training and a validation split do not take turns.
    question = [about["fields"], about["levels"], crc32(trajectories.tobytes())]
    if folder is None:
        question.append([os.path.abspath(block.path.parent) for block in store.index.blocks[:1]])
    if folder is None:  # data of other systems are left as they are
        folder = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "rollout_data"
    path = folder / f".statistics_{crc32(json.dumps(question).encode()):08x}.npz"
    found = _load(path, about, names, checked) if use_cache else None
    if found is None:
        found = _compute(store, trajectories, names, checked, progress)
        if use_cache:
            _save(path, about, found)
    return found


def _compute(
    store: FrameStore, trajectories: Int64s, names: Sequence[str], levels: tuple[float, ...], progress: bool
) -> dict[str, FieldStatistics]:
    layout, num_frames = store.layouts[DATA], int(store.index.lengths[trajectories].sum())
    summaries = {name: _Summary(layout.schema[name], num_frames) for name in names}
    columns = {layout.column_of[name].name: layout.column_of[name] for name in names}
    total = num_frames * len(columns)
    with tqdm(total=total, desc="statistics", unit=" frames", unit_scale=True, disable=not progress) as bar:
        for column in columns.values():
            inside = [name for name in names if name in column.offsets]
            for rows in _portions(store, trajectories, column.name, column.row_bytes):
                for name in inside:
                    summaries[name].add(layout.decoded(name, rows))
                bar.update(len(rows))
    return {name: summary.result(levels) for name, summary in summaries.items()}


def _portions(store: FrameStore, trajectories: Int64s, column: str, row_bytes: int) -> Iterator[torch.Tensor]:
    """Read all frames of some trajectories in order: `[n, row_bytes]` uint8, the same memory again and again."""
    lengths = store.index.lengths[trajectories]
    stops = np.cumsum(lengths)
    size = max(1, _PORTION_BYTES // row_bytes)
    memory = torch.empty((min(size, int(stops[-1])), row_bytes // 4), dtype=torch.int32, device=store.device)
    for start in range(0, int(stops[-1]), size):
        stop = min(start + size, int(stops[-1]))
        low, high = np.searchsorted(stops, [start, stop - 1], side="right")
        which = np.arange(low, high + 1)
        begin = np.maximum(stops[which] - lengths[which], start)
        count = np.minimum(stops[which], stop) - begin
        kept = np.flatnonzero(count > 0)
        which, begin, count = which[kept], begin[kept], count[kept]
        frame = begin - (stops[which] - lengths[which])
        runs = store.locate(trajectories[which], frame, count, begin - start)
        out = memory[: stop - start]
        store.copy((DATA, column), runs, 1, out)
        yield out.view(torch.uint8).cpu()


class _Summary:
    """The statistics of one field while its values come in."""

    def __init__(self, field: Field, num_frames: int) -> None:
        self._axis, self._shape = _channels(field.shape)
        # bfloat16 has no numpy type; its values are float32 values.
        self._dtype = np.dtype(np.float32) if field.dtype == "bfloat16" else DTYPES[field.dtype][1]
        is_wide = field.dtype == "float64" or (self._dtype.kind in "iu" and self._dtype.itemsize > 2)
        self._result_dtype = torch.float64 if is_wide else torch.float32
        num_columns = int(np.prod(self._shape, dtype=np.int64))
        self._quantiles: Quantiles = quantiles_of(
            num_frames * field.num_elements // num_columns, num_columns, self._dtype
        )
        self._num_frames, self._count = 0, 0
        self._sum, self._squares = np.zeros(num_columns), np.zeros(num_columns)
        self._min, self._max = np.full(num_columns, np.inf), np.full(num_columns, -np.inf)

    def add(self, values: torch.Tensor) -> None:
        """Take `[n, *shape]` values. Portions are joined as in Chan et al. 1979."""
        array = on_host(values)
        self._num_frames += len(array)
        columns = _columns(array, self._axis)
        self._quantiles.add(columns)
        wide = columns.astype(np.float64)
        with np.errstate(invalid="ignore", over="ignore"):
            total = wide.sum(axis=0)
            mean = total / len(wide)
            self._min, self._max = np.minimum(self._min, wide.min(axis=0)), np.maximum(self._max, wide.max(axis=0))
            wide -= mean
            shift, share = mean - self._sum / max(1, self._count), len(wide) / (self._count + len(wide))
            self._squares += np.einsum("nc,nc->c", wide, wide) + shift**2 * self._count * share
            self._sum += total
        self._count += len(wide)

    def result(self, levels: tuple[float, ...]) -> FieldStatistics:
        # The mean of a constant is off by rounding, and with it every square.
        self._squares[(self._min == self._max) & np.isfinite(self._min)] = 0
        with np.errstate(invalid="ignore"):
            found = {"mean": self._sum / self._count, "std": np.sqrt(self._squares / self._count), "min": self._min}
            found |= {"max": self._max, "quantiles": self._quantiles.at(levels)}
        shapes = {name: (len(levels), *self._shape) if name == "quantiles" else self._shape for name in found}
        tensors = {
            name: torch.from_numpy(value.reshape(shapes[name])).to(self._result_dtype) for name, value in found.items()
        }
        return FieldStatistics(
            **tensors, levels=levels, quantile_error=self._quantiles.error, num_frames=self._num_frames
        )


def _channels(shape: tuple[int, ...]) -> tuple[int | None, tuple[int, ...]]:
    """Which axis of a field has statistics of its own (None for none), and the shape of the result."""
    if len(shape) <= 1:
        return (0 if shape else None), shape
    axis = next((axis for axis in (2, 0) if len(shape) == 3 and shape[axis] <= _MAX_CHANNELS), None)
    return axis, tuple(size if number == axis else 1 for number, size in enumerate(shape))


def _columns(values: Array, axis: int | None) -> Array:
    """Bring `[n, *shape]` into the form `[rows, columns]`."""
    if axis is None:
        return values.reshape(-1, 1)
    return np.moveaxis(values, 1 + axis, -1).reshape(-1, values.shape[1 + axis])


def _fingerprint(store: FrameStore, trajectories: Int64s) -> str:
    """What changes when a file, or the choice of trajectories, does."""
    files = []
    for block in store.index.blocks:
        try:
            files.append([os.path.abspath(block.path), stamp_of(block.path)])
        except OSError:
            files.append([os.path.abspath(block.path), None])
    index = store.index
    chosen = np.stack([trajectories, index.number[trajectories], index.lengths[trajectories]])
    return f"{crc32(json.dumps(files).encode()):08x}{crc32(chosen.tobytes()):08x}"


def _save(path: Path, about: Mapping[str, Any], found: Mapping[str, FieldStatistics]) -> None:
    """Write the cache, where that is possible."""
    arrays: dict[str, Any] = {}
    for number, statistics in enumerate(found.values()):
        arrays |= {f"{number}/{name}": getattr(statistics, name).numpy() for name in _ARRAYS}
        arrays[f"{number}/about"] = np.array([statistics.quantile_error, statistics.num_frames])
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replace_file(path) as new, open(new, "wb") as file:
            np.savez(file, about=np.frombuffer(json.dumps(about).encode(), np.uint8), **arrays)
    except (OSError, RolloutDataError):  # a folder for reading only
        pass


def _load(
    path: Path, about: Mapping[str, Any], names: Sequence[str], levels: tuple[float, ...]
) -> dict[str, FieldStatistics] | None:
    """Read the cache; None if it is not there, damaged, or made from something else."""
    try:
        if stamp_of(path) is None:
            return None
        with np.load(path, allow_pickle=False) as file:
            if json.loads(bytes(file["about"])) != json.loads(json.dumps(about)):
                return None
            found = {}
            for number, name in enumerate(names):
                arrays = {part: torch.from_numpy(file[f"{number}/{part}"]) for part in _ARRAYS}
                error, num_frames = file[f"{number}/about"].tolist()
                found[name] = FieldStatistics(**arrays, levels=levels, quantile_error=error, num_frames=int(num_frames))
            return found
    except _BAD_CACHE:
        return None
