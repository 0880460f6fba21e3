"""Measure image fields, `[T, H, W, C]` or `[T, C, H, W]`, such as brightness and sharpness.

Images are uint8, or floats in [0, 1] or [0, 255]. Each image is decoded once. For speed, about 512
pixels of each frame are compared with limits and with the previous frame. They are called compared
pixels. Only every fifth frame is measured in all pixels. It is called an examined frame.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations
from typing import Any

import numpy as np

from .batched_reading import Array, Batch, Collector
from .field_facts import runs_of

#: Interval in frames at which all pixels are measured.
EVERY = 5
#: Number of rows, and of columns, in the grid of mean colours.
GRID = 4
_CHANNELS = (1, 3, 4)
#: Approximate number of compared pixels per frame.
_NUM_PIXELS = 512
#: Brightness below which a pixel counts as black, as a fraction of white.
_BLACK = 4 / 255


class Camera:
    """Measurements of one image field, for each of E episodes.

    Attributes:
        is_first: Whether the channels are the first axis of an image.
        size: Height and width in pixels.
        channels: Number of channels.
        low: `[E]`, smallest stored value of the compared pixels of all frames.
        high: `[E]`, largest stored value of the compared pixels of all frames.
        dark: int64 `[E]`, number of black frames.
        num_examined: int64 `[E]`, number of examined frames.
        bright: int64 `[E]`, number of examined frames in which over 30 % of the pixels are white.
        repeats: int64 `[E]`, number of frames that equal the previous frame.
        hold: int64 `[E]`, length of the longest run of repeated frames while the action changes.
        sharp: `[E]`, variance of the Laplacian, summed over examined frames.
        grid: `[E, 16, C]`, mean colour of each of 4 x 4 cells, summed over examined frames.
        variation: `[E, 2, 2]`, mean absolute difference of adjacent pixels, summed over examined
            frames. The second axis is the layout of the channels: as the schema declares it, and
            the other one. The third axis is the direction: vertical, and horizontal.
    """

    def __init__(self, name: str, scan: Any) -> None:
        self.name = name
        shape = scan.schema[name].shape
        self.is_first = shape[2] not in _CHANNELS
        self.size = shape[1:] if self.is_first else shape[:2]
        self.channels = shape[0] if self.is_first else shape[2]

        count = scan.num_episodes
        self.low = np.full(count, np.inf)
        self.high = np.full(count, -np.inf)
        self.dark = np.zeros(count, np.int64)
        self.num_examined = np.zeros(count, np.int64)
        self.bright = np.zeros(count, np.int64)
        self.repeats = np.zeros(count, np.int64)
        self.hold = np.zeros(count, np.int64)
        self.sharp = np.zeros(count)
        self.grid = np.zeros((count, GRID * GRID, self.channels))
        self.variation = np.zeros((count, 2, 2))
        #: Run of repeated frames that continues in the next batch, by episode: a pair (length,
        #: whether the action changes during the run).
        self._open_runs: dict[int, tuple[int, bool]] = {}

    def add(self, batch: Batch, moves: Callable[[int, int], bool]) -> None:
        """Measure the images of a batch.

        Args:
            batch: Batch that has the field.
            moves: Function that takes a range of rows, start and stop. Returns whether the action
                changes in these rows.
        """
        frames = batch.values[self.name]
        pixels = frames.reshape(len(frames), -1)
        pixels = pixels[:, :: max(1, pixels.shape[1] // _NUM_PIXELS)]
        for part, number in enumerate(batch.numbers.tolist()):
            start = int(batch.starts[part])
            rows = slice(int(batch.offsets[part]), int(batch.offsets[part + 1]))
            self.low[number] = min(self.low[number], float(pixels[rows].min()))
            self.high[number] = max(self.high[number], float(pixels[rows].max()))
            is_repeat = _repeats(frames[rows], pixels[rows])
            self.repeats[number] += int(is_repeat.sum())
            self._add_runs(number, is_repeat, rows.start, start > 0, moves)
            self._add_brightness(number, frames[rows], pixels[rows], batch.overlap)

            is_due = (np.arange(start, start + rows.stop - rows.start) % EVERY) == 0
            is_due[: batch.overlap] = False
            if is_due.any():
                self._examine(number, frames[rows][is_due], self._white(number, frames.dtype))

    def _add_runs(
        self,
        number: int,
        is_repeat: Array,
        first_row: int,
        is_continued: bool,
        moves: Callable[[int, int], bool],
    ) -> None:
        """Find runs of repeated frames during which the action changes.

        In such a run, the camera probably is frozen. `hold` is set to the length of the longest run
        of the episode.

        Args:
            number: Index of the episode.
            is_repeat: bool `[n]`, whether each frame of the episode in the batch equals the
                previous frame.
            first_row: First row of the episode in the batch.
            is_continued: Whether the episode has rows in the previous batch.
            moves: Function that takes a range of rows, start and stop. Returns whether the action
                changes in these rows.
        """
        length_before, moved_before = self._open_runs.pop(number, (0, False))
        for begin, end in runs_of(is_repeat):
            # The action must change in both halves of the run. Otherwise a robot at rest that
            # starts to move in the last frame would count as a frozen camera.
            middle = first_row + (begin + end) // 2
            is_moving = moves(first_row + begin - 1, middle) and moves(middle, first_row + end)
            length = end - begin
            if begin == 1 and is_continued:
                length += length_before
                is_moving = is_moving or moved_before
            if is_moving:
                self.hold[number] = max(self.hold[number], length)
            if end == len(is_repeat):
                self._open_runs[number] = (length, is_moving)

    def _add_brightness(self, number: int, frames: Array, pixels: Array, overlap: int) -> None:
        """Count the black frames of an episode in a batch.

        The first `overlap` frames are skipped, because the previous batch has counted them. For
        speed, all pixels of a frame are tested only if its compared pixels are black.
        """
        limit = _BLACK * self._white(number, frames.dtype)
        candidates = np.flatnonzero(pixels[overlap:].max(1) < limit) + overlap
        self.dark[number] += sum(float(frames[row].max()) < limit for row in candidates)

    def _white(self, number: int, dtype: np.dtype[Any]) -> float:
        """Return the value of a white pixel in an episode: 1.0 or 255.0."""
        is_unit = dtype.kind == "f" and self.high[number] <= 1.5
        return 1.0 if is_unit else 255.0

    def _examine(self, number: int, frames: Array, white: float) -> None:
        """Measure the colours, the sharpness and the channel layout of examined frames."""
        count = len(frames)
        declared = self._oriented(frames, False).astype(np.float32) / white * 255
        other = self._oriented(frames, True).astype(np.float32) / white * 255
        self.num_examined[number] += count
        self.bright[number] += int(((declared >= 254).mean((1, 2, 3)) > 0.3).sum())
        for layout, values in enumerate((declared, other)):
            down = np.abs(np.diff(values, axis=1)).mean()
            right = np.abs(np.diff(values, axis=2)).mean()
            self.variation[number, layout] += count * np.array([down, right])

        grey = declared.mean(3)
        laplacian = np.diff(grey, 2, axis=1)[:, :, 1:-1] + np.diff(grey, 2, axis=2)[:, 1:-1]
        self.sharp[number] += float(laplacian.var((1, 2)).sum())

        height, width = self.size
        cell_height = max(1, height // GRID)
        cell_width = max(1, width // GRID)
        cells = declared[:, : cell_height * GRID, : cell_width * GRID]
        cells = cells.reshape(count, GRID, cell_height, GRID, cell_width, -1)
        self.grid[number] += cells.mean((2, 4)).sum(0).reshape(GRID * GRID, -1)

    def _oriented(self, frames: Array, is_other: bool) -> Array:
        """Convert stored frames to images with the channels last, `[n, H, W, C]`.

        The schema declares whether the stored channels are the first or the last axis. With
        `is_other`, the opposite is assumed.
        """
        is_channel_first = self.is_first != is_other
        shape = (self.channels, *self.size) if is_channel_first else (*self.size, self.channels)
        pictures: Array = frames.reshape(len(frames), *shape)
        return np.moveaxis(pictures, 1, -1) if is_channel_first else pictures

    def mean(self, sums: Array) -> Array:
        """Divide sums over the examined frames, `[E, ...]`, by the number of these frames."""
        counts = np.maximum(1, self.num_examined)
        means: Array = sums / counts.reshape(-1, *[1] * (sums.ndim - 1))
        return means


def _repeats(frames: Array, pixels: Array) -> Array:
    """Return `[n]` bool: whether each frame equals the previous frame.

    For speed, all pixels of a frame are compared only if its compared pixels `pixels` are equal.
    """
    is_repeat = np.zeros(len(frames), bool)
    is_repeat[1:] = (pixels[1:] == pixels[:-1]).all(1)
    candidates = np.flatnonzero(is_repeat)
    is_repeat[candidates] = [np.array_equal(frames[row], frames[row - 1]) for row in candidates]
    return is_repeat


class Cameras(Collector):
    """Collector of measurements of all image fields.

    Attributes:
        cameras: Map from image field to its measurements.
        is_unlike: Map from each pair of image fields with equal shapes to whether they differ in
            any frame.
    """

    def __init__(self, scan: Any) -> None:
        super().__init__(scan)
        names = [name for name, field in scan.schema.items() if _is_camera(field)]
        self.cameras = {name: Camera(name, scan) for name in names}
        self.is_unlike: dict[tuple[str, str], bool] = {}
        for pair in combinations(names, 2):
            if scan.schema[pair[0]].shape == scan.schema[pair[1]].shape:
                self.is_unlike[pair] = False
        #: For each action field, the smallest range of values that counts as a change: `[D]`.
        self._least: dict[str, Array] = {}
        for name in scan.group("action"):
            self._least[name] = 0.01 * scan.sample_facts[name].range_98

    def add(self, batch: Batch) -> None:
        def moves(start: int, stop: int) -> bool:
            return any(self._moved(batch, start, stop))

        for name, camera in self.cameras.items():
            if name in batch.values:
                camera.add(batch, moves)
        for pair, is_unlike in self.is_unlike.items():
            if not is_unlike and batch.values.keys() >= {*pair}:
                first, second = (batch.values[name][::EVERY] for name in pair)
                self.is_unlike[pair] = not np.array_equal(first, second)

    def _moved(self, batch: Batch, start: int, stop: int) -> Iterator[bool]:
        """Yield for each action field whether it changes in the rows `start:stop`."""
        for name, least in self._least.items():
            if name in batch.values:
                with np.errstate(invalid="ignore", over="ignore"):
                    ranges = np.ptp(batch.columns(name)[:, start:stop], axis=1)
                yield bool((ranges > least).any())


def _is_camera(field: Any) -> bool:
    """Return whether a field has images of at least 8 x 8 pixels with 1, 3 or 4 channels."""
    shape = field.shape
    if len(shape) != 3 or min(shape) == 0 or sorted(shape)[1] < 8:
        return False
    has_channels = shape[2] in _CHANNELS or shape[0] in _CHANNELS
    return has_channels and field.dtype in ("uint8", "float16", "float32", "float64")
