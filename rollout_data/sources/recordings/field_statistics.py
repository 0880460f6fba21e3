"""Statistics of recorded fields, for normalization: computed in one pass, cached in a file.

A cache file is valid only for the same files, trajectories and settings. It may always be deleted.
If it cannot be written, the statistics are computed at each call. Quantiles are exact if the values
take at most 64 MiB; otherwise their error is bounded and returned.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from storage.core.arguments import flag
from storage.core.durable_files import crc32, replace_file
from storage.core.fields import DTYPES, Field
from storage.core.memory import on_host
from storage.errors import RolloutDataError, UsageError

from ...blocks.block_folder import BAD_CACHE, stamp_of
from ...blocks.block_header import DATA
from ...blocks.trajectory_index import Int64s
from ..rows.row_source import Rows, RowSource

_CACHE_VERSION = 2
#: Bytes of rows that are read at a time.
_PORTION_BYTES = 8 << 20
#: Maximum size of an axis that is treated as channels: the last, or else first, of three axes.
_MAX_CHANNELS = 4
#: Maximum bytes of a field's values that are kept in memory to compute exact quantiles.
_EXACT_BYTES = 64 << 20
#: Rows per buffer of a `QuantileSketch`.
_SKETCH_ROWS = 4096
Array = np.ndarray[Any, Any]
#: A source, and the numbers of the selected episodes in it, int64.
Frames = tuple[RowSource, Int64s]
_ARRAYS = ("mean", "std", "min", "max", "quantiles")


@dataclass(frozen=True, eq=False)
class FieldStatistics:
    """Mean, standard deviation, extremes and quantiles of one field.

    A field of one axis has statistics per element. A field of three axes with at most 4 channels
    has statistics per channel. Other fields have one set of statistics for all elements.

    All tensors broadcast against the field. They are float64 for fields of float64 or of integers
    of 32 bits or more, else float32. Non-finite values are treated as in numpy's functions.

    Attributes:
        mean, std: Mean and population standard deviation (divided by n, 0 for constants).
        min, max: Smallest and largest value.
        quantiles: One quantile per level, `[Q, ...]`.
        levels: The requested levels, in [0, 1].
        quantile_error: Largest error of the rank of a quantile, as a fraction of all values. 0 for
            fields of one byte, and for fields whose values take at most 64 MiB.
        num_frames: Number of frames.
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
    parts: Sequence[Frames],
    folder: Path | None,
    names: Sequence[str],
    levels: Sequence[float],
    use_cache: bool = True,
    progress: bool = True,
) -> dict[str, FieldStatistics]:
    """Compute statistics of fields over all frames, or load them from the cache.

    See `WindowDataset.statistics`. Text fields are skipped.

    Args:
        parts: Sources and selected episodes.
        folder: Folder of the cache file; None uses the user's cache folder.
        names: Names of the fields.
        levels: Levels of the quantiles, in [0, 1].
        use_cache: Whether to read and write the cache file.
        progress: Whether to show a progress bar.

    Raises:
        UsageError: A level is outside [0, 1], or there are no frames.
    """
    try:
        checked = tuple(float(level) for level in levels)
    except (TypeError, ValueError):
        checked = (np.nan,)
    if not all(0 <= level <= 1 for level in checked):
        raise UsageError(f"quantiles must be a list of levels in [0, 1], got {levels!r}.")
    use_cache = flag("use_cache", use_cache)
    progress = flag("progress", progress)
    parts = [
        (snapshot, trajectories)
        for snapshot, trajectories in parts
        if snapshot.index.lengths[trajectories].sum()
    ]
    if not parts:
        raise UsageError("the data have no frames.")
    schema = parts[0][0].layouts[DATA].schema
    names = [name for name in names if not schema[name].is_text]
    about = {
        "version": _CACHE_VERSION,
        "fields": [schema[name].to_json() for name in names],
        "levels": list(checked),
        "data": [_fingerprint(*part) for part in parts],
    }
    path = _cache_path(folder, [about["fields"], about["levels"]], parts)
    statistics = _load(path, about, names, checked) if use_cache else None
    if statistics is None:
        statistics = _compute(parts, names, checked, progress)
        if use_cache:
            _save(path, about, statistics)
    return statistics


def _cache_path(folder: Path | None, settings: list[Any], parts: Sequence[Frames]) -> Path:
    """Return the path of the cache file for these settings and trajectories.

    Different selections, such as training and validation, have different files. The user's cache
    folder is shared by all data folders, so the path of the data is part of the name there.
    """
    key = [*settings]
    key += [crc32(trajectories.tobytes()) for _, trajectories in parts]
    if folder is None:
        for snapshot, _ in parts:
            first_block = snapshot.index.blocks[:1]
            key.append([os.path.abspath(block.path.parent) for block in first_block])
        cache_home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        folder = Path(cache_home) / "rollout_data"
    return folder / f".statistics_{crc32(json.dumps(key).encode()):08x}.npz"


def _compute(
    parts: Sequence[Frames], names: Sequence[str], levels: tuple[float, ...], progress: bool
) -> dict[str, FieldStatistics]:
    num_frames = sum(
        int(snapshot.index.lengths[trajectories].sum()) for snapshot, trajectories in parts
    )
    schema = parts[0][0].layouts[DATA].schema
    summaries = {name: _Summary(schema[name], num_frames) for name in names}
    with tqdm(desc="statistics", unit=" frames", unit_scale=True, disable=not progress) as bar:
        for snapshot, trajectories in parts:
            layout = snapshot.layouts[DATA]
            columns = {layout.column_of[name].name: layout.column_of[name] for name in names}
            bar.total = (bar.total or 0) + int(snapshot.index.lengths[trajectories].sum()) * len(
                columns
            )
            for column in columns.values():
                inside = [name for name in names if name in column.offsets]
                for rows in _portions(snapshot, trajectories, column.name, column.row_bytes):
                    for name in inside:
                        summaries[name].add(layout.decoded(name, rows))
                    bar.update(len(rows))
    return {name: summary.result(levels) for name, summary in summaries.items()}


def _portions(
    snapshot: RowSource, trajectories: Int64s, column: str, row_bytes: int
) -> Iterator[torch.Tensor]:
    """Yield rows of a column, trajectory after trajectory: uint8 `[n, row_bytes]`.

    All results share the same memory, so a result is valid until the next one is yielded.
    """
    lengths = snapshot.index.lengths[trajectories]
    stops = np.cumsum(lengths)
    size = max(1, _PORTION_BYTES // row_bytes)
    memory = torch.empty(
        (min(size, int(stops[-1])), row_bytes // 4), dtype=torch.int32, device=snapshot.device
    )
    for start in range(0, int(stops[-1]), size):
        stop = min(start + size, int(stops[-1]))
        # Positions in `trajectories` of the trajectories that contain the rows `start:stop`.
        low, high = np.searchsorted(stops, [start, stop - 1], side="right")
        places = np.arange(low, high + 1)
        places = places[lengths[places] > 0]
        first_rows = stops[places] - lengths[places]
        begin = np.maximum(first_rows, start)
        count = np.minimum(stops[places], stop) - begin
        rows = Rows(trajectories[places], begin - first_rows, count, begin - start)
        out = memory[: stop - start]
        snapshot.read_rows(rows, 1, {column: out})
        yield out.view(torch.uint8).cpu()


class _Summary:
    """Statistics of one field, updated with each portion of values."""

    def __init__(self, field: Field, num_frames: int) -> None:
        self._axis, self._shape = _channels(field.shape)
        # numpy has no bfloat16, so its values are processed as float32.
        self._dtype = np.dtype(np.float32) if field.dtype == "bfloat16" else DTYPES[field.dtype][1]
        is_wide = field.dtype == "float64" or (
            self._dtype.kind in "iu" and self._dtype.itemsize > 2
        )
        self._result_dtype = torch.float64 if is_wide else torch.float32
        num_columns = int(np.prod(self._shape, dtype=np.int64))
        self._quantiles: Quantiles = quantiles_of(
            num_frames * field.num_elements // num_columns, num_columns, self._dtype
        )
        self._num_frames = 0
        self._count = 0
        self._sum = np.zeros(num_columns)
        self._squares = np.zeros(num_columns)
        self._min = np.full(num_columns, np.inf)
        self._max = np.full(num_columns, -np.inf)

    def add(self, values: torch.Tensor) -> None:
        """Add values `[n, *shape]`. Mean and variance are merged as in Chan et al. 1979."""
        array = on_host(values)
        self._num_frames += len(array)
        columns = _columns(array, self._axis)
        self._quantiles.add(columns)
        wide = columns.astype(np.float64)
        with np.errstate(invalid="ignore", over="ignore"):
            total = wide.sum(axis=0)
            mean = total / len(wide)
            self._min, self._max = (
                np.minimum(self._min, wide.min(axis=0)),
                np.maximum(self._max, wide.max(axis=0)),
            )
            wide -= mean
            shift = mean - self._sum / max(1, self._count)
            share = len(wide) / (self._count + len(wide))
            self._squares += np.einsum("nc,nc->c", wide, wide) + shift**2 * self._count * share
            self._sum += total
        self._count += len(wide)

    def result(self, levels: tuple[float, ...]) -> FieldStatistics:
        # The variance of a constant must be 0, but rounding errors of the mean make it positive.
        self._squares[(self._min == self._max) & np.isfinite(self._min)] = 0
        with np.errstate(invalid="ignore"):
            values = {
                "mean": self._sum / self._count,
                "std": np.sqrt(self._squares / self._count),
                "min": self._min,
            }
            values |= {"max": self._max, "quantiles": self._quantiles.at(levels)}
        shapes = {
            name: (len(levels), *self._shape) if name == "quantiles" else self._shape
            for name in values
        }
        tensors = {
            name: torch.from_numpy(value.reshape(shapes[name])).to(self._result_dtype)
            for name, value in values.items()
        }
        return FieldStatistics(
            **tensors,
            levels=levels,
            quantile_error=self._quantiles.error,
            num_frames=self._num_frames,
        )


def _channels(shape: tuple[int, ...]) -> tuple[int | None, tuple[int, ...]]:
    """Return the axis of channels, whose elements get separate statistics, and the result's shape.

    The axis is None if all elements of a field have common statistics.
    """
    if len(shape) <= 1:
        return (0 if shape else None), shape
    axis = next((axis for axis in (2, 0) if len(shape) == 3 and shape[axis] <= _MAX_CHANNELS), None)
    return axis, tuple(size if number == axis else 1 for number, size in enumerate(shape))


def _columns(values: Array, axis: int | None) -> Array:
    """Reshape values `[n, *shape]` to `[rows, columns]`, one column per channel."""
    if axis is None:
        return values.reshape(-1, 1)
    return np.moveaxis(values, 1 + axis, -1).reshape(-1, values.shape[1 + axis])


def _fingerprint(snapshot: RowSource, trajectories: Int64s) -> str:
    """Return a text that changes if the files or the selected trajectories change."""
    files: list[list[Any]] = []
    for path in dict.fromkeys(block.path for block in snapshot.index.blocks):
        try:
            stamps = (
                [stamp_of(entry) for entry in sorted(path.rglob("*"))]
                if path.is_dir()
                else stamp_of(path)
            )
            files.append([os.path.abspath(path), stamps])
        except OSError:
            files.append([os.path.abspath(path), None])
    index = snapshot.index
    chosen = np.stack([trajectories, index.number[trajectories], index.lengths[trajectories]])
    return f"{crc32(json.dumps(files).encode()):08x}{crc32(chosen.tobytes()):08x}"


def _save(path: Path, about: Mapping[str, Any], by_field: Mapping[str, FieldStatistics]) -> None:
    """Write the cache file, if its folder is writable."""
    arrays: dict[str, Any] = {}
    for number, statistics in enumerate(by_field.values()):
        arrays |= {f"{number}/{name}": getattr(statistics, name).numpy() for name in _ARRAYS}
        arrays[f"{number}/about"] = np.array([statistics.quantile_error, statistics.num_frames])
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replace_file(path) as new, open(new, "wb") as file:
            np.savez(file, about=np.frombuffer(json.dumps(about).encode(), np.uint8), **arrays)
    except (OSError, RolloutDataError):  # A read-only folder only costs time at the next call.
        pass


def _load(
    path: Path, about: Mapping[str, Any], names: Sequence[str], levels: tuple[float, ...]
) -> dict[str, FieldStatistics] | None:
    """Load statistics from the cache file; None if it is missing, damaged or stale."""
    try:
        if stamp_of(path) is None:
            return None
        with np.load(path, allow_pickle=False) as file:
            if json.loads(bytes(file["about"])) != json.loads(json.dumps(about)):
                return None
            statistics = {}
            for number, name in enumerate(names):
                arrays = {part: torch.from_numpy(file[f"{number}/{part}"]) for part in _ARRAYS}
                error, num_frames = file[f"{number}/about"].tolist()
                statistics[name] = FieldStatistics(
                    **arrays, levels=levels, quantile_error=error, num_frames=int(num_frames)
                )
            return statistics
    except BAD_CACHE:
        return None


class ByteCounts:
    """Exact quantiles of one-byte values, from the counts of the 256 possible values."""

    def __init__(self, num_columns: int, dtype: np.dtype[Any]) -> None:
        self._lowest = -128 if dtype.kind == "i" else 0
        self._counts = np.zeros((num_columns, 256), np.int64)
        self.error = 0.0

    def add(self, values: Array) -> None:
        for column, counts in enumerate(self._counts):
            shifted = values[:, column].astype(np.int16) - self._lowest
            counts += np.bincount(shifted, minlength=256)

    def at(self, levels: Sequence[float]) -> Array:
        """Return the quantiles at these levels, interpolated linearly: `[num_levels, columns]`."""
        num_upto = np.cumsum(self._counts, axis=1)
        values = np.empty((len(levels), len(num_upto)))
        for column, stops in enumerate(num_upto):
            position = np.asarray(levels) * (stops[-1] - 1)
            below = np.searchsorted(stops, np.floor(position), side="right")
            above = np.searchsorted(stops, np.ceil(position), side="right")
            share = position - np.floor(position)
            values[:, column] = below + (above - below) * share + self._lowest
        return values


class QuantileSketch:
    """Approximate quantiles in bounded memory, by merging and halving sorted buffers.

    Values fill a buffer of k rows, which is sorted when it is full. It becomes a buffer of level 0.
    Two buffers of a level are merged, and every second row of the result is dropped. The remaining
    k rows become a buffer of the next level. A row of level j represents 2**j values. As long as no
    row was dropped, the quantiles equal those of `numpy.quantile`.

    The method is from Munro and Paterson 1980, analysed by Manku, Rajagopalan and Lindsay 1998.
    Dropping rows of level j changes the rank of a quantile by at most 2**j. `error` is the sum of
    these changes divided by the number n of values. It is at most log2(n / k) / (2 k): 0.001 for
    10^6 values, 0.0023 for 10^9.
    """

    def __init__(
        self, num_columns: int, dtype: np.dtype[Any], num_rows: int = _SKETCH_ROWS
    ) -> None:
        self._filling = np.empty((num_rows, num_columns), dtype)
        self._num_filled = self._count = 0
        self._has_nan = np.zeros(num_columns, bool)
        self._levels: list[Array | None] = []
        self._next_offset: list[int] = []
        self._moved = 0

    @property
    def error(self) -> float:
        return self._moved / max(1, self._count)

    def add(self, values: Array) -> None:
        while len(values):
            part = values[: len(self._filling) - self._num_filled]
            self._filling[self._num_filled : self._num_filled + len(part)] = part
            self._num_filled += len(part)
            self._count += len(part)
            values = values[len(part) :]
            if self._num_filled == len(self._filling):
                rows = np.sort(self._filling, axis=0)
                self._has_nan |= np.isnan(rows[-1])  # NaN sorts last, and halving may drop it.
                self._carry(rows)
                self._num_filled = 0

    def _carry(self, rows: Array) -> None:
        """Add a sorted buffer to the sketch.

        Each level stores at most one buffer. If level 0 has a buffer, both are merged and halved,
        and the result is added to the next level in the same way.
        """
        for level, other in enumerate(self._levels):
            if other is None:
                self._levels[level] = rows
                return
            both = np.sort(np.concatenate([other, rows]), axis=0, kind="stable")
            # Alternate between even and odd rows, so that errors of successive halvings cancel.
            rows = both[self._next_offset[level] :: 2]
            self._next_offset[level] ^= 1
            self._moved += 1 << level
            self._levels[level] = None
        self._levels.append(rows)
        self._next_offset.append(0)

    def at(self, levels: Sequence[float]) -> Array:
        """Return the approximate quantiles at these levels: `[num_levels, columns]`."""
        parts = [(self._filling[: self._num_filled], 1)]
        parts += [(rows, 1 << level) for level, rows in enumerate(self._levels) if rows is not None]
        if not self._moved:
            rows = np.concatenate([rows for rows, _ in parts])
            return np.stack(
                [np.quantile(column.astype(np.float64), levels) for column in rows.T], axis=1
            )
        weights = np.concatenate([np.full(len(rows), weight) for rows, weight in parts])
        wanted = np.asarray(levels) * self._count
        quantiles = np.empty((len(levels), self._filling.shape[1]))
        for column in range(quantiles.shape[1]):
            values = np.concatenate([rows[:, column] for rows, _ in parts]).astype(np.float64)
            order = np.argsort(values, kind="stable")
            place = np.searchsorted(np.cumsum(weights[order]), wanted, side="left")
            quantiles[:, column] = values[order[np.minimum(place, len(order) - 1)]]
            if self._has_nan[column] or np.isnan(values).any():
                quantiles[:, column] = np.nan
        return quantiles


Quantiles = ByteCounts | QuantileSketch


def quantiles_of(num_rows: int, num_columns: int, dtype: np.dtype[Any]) -> Quantiles:
    """Create the quantile accumulator for columns of this size and dtype."""
    if dtype.kind in "biu" and dtype.itemsize == 1:
        return ByteCounts(num_columns, dtype)
    is_exact = num_rows * num_columns * dtype.itemsize <= _EXACT_BYTES
    return QuantileSketch(num_columns, dtype, num_rows if is_exact else _SKETCH_ROWS)
