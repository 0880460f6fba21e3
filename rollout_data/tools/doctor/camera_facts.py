"""What the pass finds of pictures, `[T, H, W, C]` or `[T, C, H, W]`: bytes, or floats in [0, 1] or [0, 255].

One rule: a picture is decoded once; all frames are looked at in some pixels, one frame in five in all of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np

from .batched_reading import Array, Batch, Collector
from .field_facts import runs_of

EVERY = 5
GRID = 4
_CHANNELS = (1, 3, 4)


class Camera:
    """One field of pictures.

    Attributes:
        is_first: Channels are the first axis of a row.
        low, high: `[E]`, of some pixels; of floats as they are.
        dark: int64 `[E]`, frames whose brightest pixel is black.
        bright: int64 `[E]`, looked-at frames of which a large part is white; `looked` how many were looked at.
        hold, repeats: int64 `[E]`: the longest run of equal frames while the action moves, and how many equal the one
            before.
        sharp: `[E]`, mean variance of the Laplacian.
        grid: `[E, 16, C]`, mean colours.
        variation: `[E, 2, 2]`, mean difference of neighbours (down, right), as declared and read in the other layout.
    """

    def __init__(self, name: str, scan: Any) -> None:
        self.name = name
        count = scan.num_episodes
        shape = scan.schema[name].shape
        self.is_first = shape[2] not in _CHANNELS
        self.size = shape[1:] if self.is_first else shape[:2]
        self.channels = shape[0] if self.is_first else shape[2]
        self.low = np.full(count, np.inf)
        self.high = np.full(count, -np.inf)
        self.dark, self.bright, self.looked, self.hold, self.repeats = np.zeros((5, count), np.int64)
        self.sharp = np.zeros(count)
        self.grid = np.zeros((count, GRID * GRID, self.channels))
        self.variation = np.zeros((count, 2, 2))
        self._tails: dict[int, tuple[int, bool]] = defaultdict(lambda: (0, False))

    def add(self, batch: Batch, moves: Callable[[int, int], bool]) -> None:
        """Take the rows of a batch; `moves(start, stop)` tells whether the action moves in some of them."""
        rows = batch.values[self.name]
        some = rows.reshape(len(rows), -1)
        some = some[:, :: max(1, some.shape[1] // 512)]
        for number, start, low, stop in zip(
            batch.numbers.tolist(), batch.starts.tolist(), batch.offsets[:-1], batch.offsets[1:], strict=True
        ):
            part = some[low:stop]
            first = int(batch.overlap)
            self.low[number] = min(self.low[number], float(part.min()))
            self.high[number] = max(self.high[number], float(part.max()))
            equal = np.zeros(len(part), bool)
            equal[1:] = (part[1:] == part[:-1]).all(1)
            at = np.flatnonzero(equal)
            equal[at] = [np.array_equal(rows[low + one], rows[low + one - 1]) for one in at]
            self.repeats[number] += int(equal.sum())
            before, self._tails[number] = self._tails[number], (0, False)
            for begin, end in runs_of(equal):
                middle = low + (begin + end) // 2  # a robot that starts in the last frame does not move
                run = end - begin, moves(low + begin - 1, middle) and moves(middle, low + end)
                if begin == 1 and start:  # goes on from the piece before
                    run = run[0] + before[0], run[1] or before[1]
                self.hold[number] = max(self.hold[number], run[0] * run[1])
                self._tails[number] = run if end == len(equal) else (0, False)
            white = 1.0 if self.is_unit(number, rows.dtype) else 255.0
            dark = np.flatnonzero(part[first:].max(1) < 4 / 255 * white) + low + first
            self.dark[number] += sum(float(rows[one].max()) < 4 / 255 * white for one in dark)
            chosen = np.arange(low + first, stop)[(-(start + first)) % EVERY :: EVERY]
            if len(chosen):
                self._look(number, rows[chosen], white)

    def is_unit(self, number: int, dtype: np.dtype[Any]) -> bool:
        """Return whether white is 1."""
        return bool(dtype.kind == "f" and self.high[number] <= 1.5)

    def _look(self, number: int, frames: Array, white: float) -> None:
        told, other = (self._oriented(frames, flag).astype(np.float32) / white * 255 for flag in (False, True))
        count, (height, width) = len(frames), self.size
        self.looked[number] += count
        self.bright[number] += int(((told >= 254).mean((1, 2, 3)) > 0.3).sum())
        for place, one in enumerate((told, other)):
            down = np.abs(np.diff(one, axis=1)).mean()
            right = np.abs(np.diff(one, axis=2)).mean()
            self.variation[number, place] += count * np.array([down, right])
        grey = told.mean(3)
        edges = np.diff(grey, 2, axis=1)[:, :, 1:-1] + np.diff(grey, 2, axis=2)[:, 1:-1]
        self.sharp[number] += float(edges.var((1, 2)).sum())
        high = max(1, height // GRID)
        wide = max(1, width // GRID)
        cells = told[:, : high * GRID, : wide * GRID].reshape(count, GRID, high, GRID, wide, -1)
        self.grid[number] += cells.mean((2, 4)).sum(0).reshape(GRID * GRID, -1)

    def _oriented(self, frames: Array, is_other: bool) -> Array:
        """Return frames as `[n, H, W, C]`, or as if their bytes lay in the other layout."""
        shape = (self.channels, *self.size) if self.is_first != is_other else (*self.size, self.channels)
        found: Array = frames.reshape(len(frames), *shape)
        return found.transpose(0, 2, 3, 1) if self.is_first != is_other else found

    def mean(self, values: Array) -> Array:
        """Divide sums over looked-at frames by their number."""
        found: Array = values / np.maximum(1, self.looked).reshape(-1, *[1] * (values.ndim - 1))
        return found


class Cameras(Collector):
    """All fields of pictures.

    Attributes:
        found: Field -> `Camera`.
        unlike: Pairs of fields -> whether a frame of them differs.
    """

    def __init__(self, scan: Any) -> None:
        super().__init__(scan)
        shapes = {name: field.shape for name, field in scan.schema.items()}
        names = [
            name
            for name, shape in shapes.items()
            if len(shape) == 3 and min(shape) > 0 and (shape[2] in _CHANNELS or shape[0] in _CHANNELS)
            and sorted(shape)[1] >= 8 and scan.schema[name].dtype in ("uint8", "float16", "float32", "float64")
        ]  # fmt: skip
        self.found = {name: Camera(name, scan) for name in names}
        pairs = [(one, other) for at, one in enumerate(names) for other in names[at + 1 :]]
        self.unlike = dict.fromkeys([pair for pair in pairs if shapes[pair[0]] == shapes[pair[1]]], False)
        self._least = {name: 0.01 * scan.pending[name].range_98 for name in scan.group("action")}

    def add(self, batch: Batch) -> None:
        columns = {name: batch.columns(name) for name in self._least if self.found and name in batch.values}

        def moves(start: int, stop: int) -> bool:
            with np.errstate(invalid="ignore", over="ignore"):
                ranges = [(np.ptp(one[:, start:stop], axis=1), self._least[name]) for name, one in columns.items()]
            return any(bool((size > least).any()) for size, least in ranges)

        for name, camera in self.found.items():
            if name in batch.values:
                camera.add(batch, moves)
        for pair, is_unlike in self.unlike.items():
            if not is_unlike and all(name in batch.values for name in pair):
                one, other = (batch.values[name][::EVERY] for name in pair)
                self.unlike[pair] = not np.array_equal(one, other)
