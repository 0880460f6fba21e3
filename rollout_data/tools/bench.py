"""How fast a recording streams on this machine, beside a plain copy of the same bytes."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Mapping
from itertools import count, cycle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader
from tqdm import tqdm

from storage.errors import UsageError

from ..recordings.opening import open as open_recording
from ..recordings.recording import Recording
from ..remote.access import DataDir
from ..streaming.delivery import loader
from ..streaming.rollout_dataset import RolloutDataset
from ..windows.dataset import WindowDataset

NUM_REPEATS, NUM_WORKERS = 5, (0, 2)
#: Of a batch of playback; of a batch of windows.
_NUM_ENVS, _NUM_STEPS, _NUM_WINDOWS, _WINDOW = 64, 24, 256, 10
#: What is copied lies in as many batches, so that it is not in the processor's cache.
_NUM_SOURCES, _READ_BYTES = 8, 1 << 20


def bench(source: DataDir, *, seconds: float = 0.2, progress: bool = False) -> dict[str, Any]:
    """Measure playback and windows of a recording, in order and at random, through `DataLoader` with 0 and 2 workers.

    Each figure is the median of five. After each, as many bytes as a batch has are copied in memory by one thread, five
    times too: the limit. What the page cache holds is not read from the disk.

    Args:
        source: A path of any format, or a `Recording`.
        seconds: How long one measurement takes.
        progress: Show a progress bar.

    Returns:
        `cases`: a dict each, `what`, `order`, `workers`, `frames_per_s`, `bytes_per_s` of decoded values, and
        `times_limit`, the time of a batch over that of the copy; `plain_read_bytes_per_s` of the files as they are.

    Raises:
        UsageError: There is no frame, or `seconds` is not positive.
    """
    if not 0 < seconds < math.inf:
        raise UsageError("measure", repr(str(source)), "seconds > 0", repr(seconds))
    recording = source if isinstance(source, Recording) else open_recording(source)
    files = [recording.path] if recording.path.is_file() else sorted(recording.path.rglob("*"))
    files = [path for path in files if path.is_file() and path.stat().st_size]
    lengths = [recording.info(place).length for place in range(len(recording))]
    window = max(1, min(_WINDOW, int(np.median(lengths)))) if lengths else 1
    made = {"playback": (_playback, len(lengths)), "windows": (_windows, window)}
    cases = [(what, is_random, workers) for what in made for is_random in (False, True) for workers in NUM_WORKERS]
    rows = []
    for what, is_random, workers in tqdm(cases, desc="bench", disable=not progress):
        make, size = made[what]
        batches, num_frames = make(recording, is_random, workers, size)
        about = {"what": what, "order": "random" if is_random else "in order", "workers": workers}
        rows.append({**about, **_measured(iter(batches), num_frames, workers, seconds)})
    plain_s, num_bytes = _times(_pieces(files), 0, seconds) if files else (math.inf, 0)
    return {
        "path": str(recording.path),
        "format": recording.format,
        "num_frames": sum(lengths),
        "plain_read_bytes_per_s": num_bytes / plain_s,
        "cases": rows,
    }


def _playback(recording: Recording, is_random: bool, workers: int, num_episodes: int) -> tuple[Any, int]:
    num_envs = max(1, min(_NUM_ENVS, num_episodes))
    options: dict[str, Any] = {"as_dict": True, "flatten_observations": False, "shard": "none", "device": "cpu"}
    dataset = RolloutDataset(recording, num_envs, 0, is_random, num_transitions_per_env=_NUM_STEPS, **options)
    return loader(dataset, num_workers=workers), num_envs * _NUM_STEPS


def _windows(recording: Recording, is_random: bool, workers: int, length: int) -> tuple[Any, int]:
    dataset, rng = WindowDataset(recording, length), np.random.default_rng(0)
    size = min(_NUM_WINDOWS, len(dataset))
    orders = (rng.permutation(len(dataset)) if is_random else np.arange(len(dataset)) for _ in count())
    sampler = (
        order[first : first + size].tolist() for order in orders for first in range(0, len(order) - size + 1, size)
    )
    return DataLoader(dataset, batch_sampler=sampler, collate_fn=dataset.collate, num_workers=workers), size * length


def _measured(batches: Any, num_frames: int, workers: int, seconds: float) -> dict[str, float]:
    own_s, num_bytes = _times(iter(batches), 1 + 2 * workers, seconds)
    source, target = torch.ones(_NUM_SOURCES, num_bytes, dtype=torch.uint8), torch.empty(num_bytes, dtype=torch.uint8)
    copies = (target.copy_(source[number % _NUM_SOURCES]) for number in count())  # the workers have ended
    limit_s, _ = _times(copies, 1, seconds)
    return {"frames_per_s": num_frames / own_s, "bytes_per_s": num_bytes / own_s, "times_limit": own_s / limit_s}


def _times(batches: Iterator[Any], num_ahead: int, seconds: float) -> tuple[float, int]:
    """Give the median of the seconds that a batch takes, and its bytes; those that were read ahead do not count."""
    num_bytes, found = _num_bytes(next(batches)), []
    for _ in range(NUM_REPEATS):
        for _ in range(num_ahead):
            next(batches)
        start_s, num_batches, elapsed_s = time.perf_counter(), 0, 0.0
        while elapsed_s < seconds or not num_batches:
            next(batches)
            num_batches, elapsed_s = num_batches + 1, time.perf_counter() - start_s
        found.append(elapsed_s / num_batches)
    return statistics.median(found), num_bytes


def _num_bytes(batch: Any) -> int:
    return sum(map(_num_bytes, batch.values())) if isinstance(batch, Mapping) else getattr(batch, "nbytes", 0)


def _pieces(files: list[Path]) -> Iterator[memoryview]:
    """Read files one after the other, again and again, into a buffer; gives it whenever it is full."""
    buffer, filled = memoryview(bytearray(_READ_BYTES)), 0
    for path in cycle(files):
        with open(path, "rb", buffering=0) as file:
            while num_read := file.readinto(buffer[filled:]):
                filled = (filled + num_read) % _READ_BYTES
                if not filled:
                    yield buffer


def bench_as_text(about: Mapping[str, Any]) -> list[str]:
    """Lay `bench`'s answer out for people: a line for each case."""
    head = f"{about['path']}: {about['num_frames']:,} frames, {about['format']}"
    plain = f"plain read of the files: {about['plain_read_bytes_per_s'] / 1e6:,.0f} MB/s"
    titles = f"{'what':<10}{'order':<10}{'workers':>7}{'frames/s':>13}{'MB/s':>9}  x limit (a copy of the same bytes)"
    rows = [
        f"{row['what']:<10}{row['order']:<10}{row['workers']:>7}{row['frames_per_s']:>13,.0f}"
        f"{row['bytes_per_s'] / 1e6:>9,.0f}  {row['times_limit']:.2f}"
        for row in about["cases"]
    ]
    return [head, plain, titles, *rows]
