"""Picture sets of four times the size of the cache: windows of 2 RGB frames of 128 x 128 pixels,
stored as PNG.

Each figure is from a new process, which opens the set and reads batches of 64 windows. The first
figure is the opening with the first batch, the second is the median of the next batches. Imports
are not timed. The process counts decoded pictures and the growth of its memory. `chunk_cache_bytes`
is a quarter of the decoded pictures, less than the default, so that the set can be small. The limit
decodes as many pictures from memory with PIL.
"""

from __future__ import annotations

import io
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.utils.data import DataLoader

import rollout_data
from rollout_data import WindowDataset, WindowLoader

from . import data, harness, peers
from .formats import lerobot_set, load_lerobot
from .harness import LIMIT, OURS, PEER, Call, Case, Contender
from .images import convert_to_lerobot, image_set, record_rgb

NUM_EPISODES, NUM_STEPS = 10, 120
LENGTH, BATCH, NUM_BATCHES = 2, 64, 8
#: Bytes of the decoded pictures, as a multiple of the bytes of the cache.
TIMES_CACHE = 4
CAMERA = "observation.images.rgb"


def cases(quick: bool) -> Iterator[Case]:
    """Yield the first batch of a process, and its next batches."""
    num_episodes, num_steps = (2, 24) if quick else (NUM_EPISODES, NUM_STEPS)
    tag = "quick" if quick else "long"
    rendered = cache(lambda: image_set(num_episodes, num_steps)["rgb"])
    own = data.made_once(f"pictures-{tag}-own", lambda path: record_rgb(path, rendered(), "lz4"))
    lerobot = data.made_once(
        f"pictures-{tag}-lerobot",
        lambda path: convert_to_lerobot(own, path / "set"),
    )
    batch = 8 if quick else BATCH
    sets = {
        "WindowLoader, LeRobot's PNG": ("ours", OURS, lerobot / "set"),
        "WindowLoader, our lz4": ("ours", OURS, own),
        "lerobot": ("lerobot", PEER, lerobot / "set"),
    }
    picture_bytes = 128 * 128 * 3
    cache_bytes = num_episodes * num_steps * picture_bytes // TIMES_CACHE
    results: dict[str, list[dict[str, float]]] = {name: [] for name in sets}
    for is_first in (True, False):
        contenders = [Contender("decode from memory", lambda: _decoding(own, batch), LIMIT)]
        for name, (reader, role, path) in sets.items():
            command = [reader, str(path), str(cache_bytes), str(batch), harness.clock.__name__]
            contenders.append(_contender(name, role, command, results[name], is_first))
        which = "open and first batch" if is_first else "next batches"
        yield Case(
            f"{which}, B={batch} L={LENGTH} of RGB, {TIMES_CACHE} times the cache",
            tuple(contenders),
            num_bytes=batch * LENGTH * picture_bytes,
            num_repeats=5,
        )


def _decoding(own: Path, batch: int) -> Call:
    image = peers.load("pillow", "Image")
    episode = rollout_data.open(own)[0]
    pictures = []
    for pixels in episode.observation["rgb"]:
        file = io.BytesIO()
        image.fromarray(pixels).save(file, "PNG", compress_level=1)
        pictures.append(file.getvalue())
    chosen = [pictures[number % len(pictures)] for number in range(batch * LENGTH)]

    def call() -> object:
        return np.stack([np.asarray(image.open(io.BytesIO(picture))) for picture in chosen])

    return call


def _contender(
    name: str, role: str, command: list[str], results: list[dict[str, float]], is_first: bool
) -> Contender:
    """Measure a reader in new processes. The second case uses the processes of the first."""
    unread = iter(results)

    def run() -> dict[str, float]:
        root = Path(__file__).parents[1]
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", __name__, *command],
            cwd=root,
            env={**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())},
            capture_output=True,
            text=True,
        )
        last = (done.stdout.strip().splitlines() or [""])[-1]
        if done.returncode:
            raise RuntimeError((done.stderr.strip().splitlines() or ["no output"])[-1])
        measured: dict[str, float] = json.loads(last)
        return measured

    def call() -> float:
        if is_first:
            results.append(run())
            return results[-1]["first_s"]
        return next(unread)["batch_s"]

    def prepare() -> Call:
        if command[0] == "lerobot":
            lerobot_set(Path(command[1]), [CAMERA], LENGTH)
        return call

    def note() -> str:
        last = results[-1]
        decoded = last["num_first"] if is_first else last["num_next"]
        return f"{decoded:.0f} pictures decoded a batch, +{last['grown_bytes'] / 1e6:.0f} MB"

    return Contender(name, prepare, role, own_clock=True, note=note)


def read_set(
    reader: str, path: Path, cache_bytes: int, batch: int, clock: Callable[[], float]
) -> dict[str, float]:
    """Open a set and read batches. Return times, decoded pictures and growth of memory."""
    loaders: dict[str, Callable[[], Any]] = {
        "ours": lambda: WindowLoader(
            WindowDataset(path, LENGTH, fields=["observation"], chunk_cache_bytes=cache_bytes),
            batch,
            drop_last=True,
            seed=1,
        ),
        "lerobot": lambda: DataLoader(
            lerobot_set(path, [CAMERA], LENGTH), batch, shuffle=True, drop_last=True
        ),
    }
    if reader == "lerobot":
        load_lerobot()
    image = peers.load("pillow", "Image")
    peers.load("pillow", "PngImagePlugin")
    peers.load("pyarrow", "parquet")
    with mock.patch.object(image, "open", wraps=image.open) as decode:
        memory_bytes = _resident_bytes()
        start_s = clock()
        batches = iter(loaders[reader]())
        next(batches)
        first_s = clock() - start_s
        num_first = decode.call_count
        times_s = []
        for _ in range(NUM_BATCHES):
            start_s = clock()
            if next(batches, None) is None:
                break
            times_s.append(clock() - start_s)
        return {
            "first_s": first_s,
            "batch_s": statistics.median(times_s) if times_s else first_s,
            "num_first": num_first,
            "num_next": (decode.call_count - num_first) / max(1, len(times_s)),
            "grown_bytes": _resident_bytes() - memory_bytes,
        }


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    _, reader, path, cache_bytes, batch, clock = sys.argv
    measured = read_set(reader, Path(path), int(cache_bytes), int(batch), getattr(time, clock))
    sys.stdout.write(json.dumps(measured) + "\n")
