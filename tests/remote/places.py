"""Recordings in a folder and on a file system of fsspec, and the data that are read from both."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from pathlib import Path
from tempfile import NamedTemporaryFile

import fsspec
import numpy as np
import torch

from benchmarks.lagging import LaggingFileSystem
from rollout_data import RemoteOptions, RolloutWriter, WindowDataset, WindowLoader, push
from storage.core.fields import flatten
from tests.files.recorded import record

#: Chunks of so few frames that short recordings have many.
SMALL = {"chunk_bytes": 4096, "num_chunks": 3}


class Store(LaggingFileSystem):
    """A folder for uploads. An object appears complete or not at all, and no object is replaced."""

    protocol = ("gs", "hf", "store")

    def put_file(self, lpath: str, rpath: str, mode: str = "overwrite", **options) -> None:
        self.pipe_file(rpath, Path(lpath).read_bytes(), mode)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options) -> None:
        assert mode == "create"
        target = self.root / self._answer(path, None, len(value))
        target.parent.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile(dir=self.root, prefix=".upload") as file:
            file.write(value)
            file.flush()
            os.link(file.name, target)

    def size(self, path: str) -> int:
        return (self.root / str(self._strip_protocol(path)).strip("/")).stat().st_size


class KilledAt:
    """Kills its process at the n-th request of a path with an ending, before the answer; see
    `Store.fails`.
    """

    def __init__(self, number: int, ending: str = "") -> None:
        self.left, self.ending, self.lock = number, ending, threading.Lock()

    def __call__(self, path: str, start: int | None, stop: int | None) -> None:
        with self.lock:
            self.left -= path.endswith(self.ending)
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)


def pushed_until_killed(folder: Path, url: str, number: int, ending: str = "") -> None:
    """Push a folder in another process, which is killed at a request; see `KilledAt`."""

    def work() -> None:
        Store.fails = staticmethod(KilledAt(number, ending))
        push(folder, url)

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join(100)
    assert process.exitcode == -signal.SIGKILL


def store_at(root: Path, protocol: str, latency_s: float = 0.0) -> None:
    """Let URLs of a protocol lead to a `Store` below a folder."""
    Store.start(root, latency_s)
    fsspec.register_implementation(protocol, Store, clobber=True)


def uneven(folder: Path, num_trajectories: int = 60, seed: int = 0) -> Path:
    """Record trajectories of 1 to 59 frames, some of them over several blocks."""
    lengths = np.random.default_rng(seed).integers(1, 60, num_trajectories).tolist()
    record(folder, lengths, num_envs=3, with_final=True, flush_every=37)
    return folder


def coded(folder: Path) -> Path:
    """Record two components, one of them in chunks."""
    generator = np.random.default_rng(0)
    with RolloutWriter(folder, 4, durable=False, obs_disassemble_mapping={"rgb": "lz4"}) as writer:
        for step in range(90):
            rgb = generator.integers(0, 4, (4, 8, 8, 3)).astype(np.uint8)
            observation = {"rgb": rgb, "state": generator.normal(size=(4, 3)).astype(np.float32)}
            writer.add(
                observation=observation, action=np.ones((4, 2)), done=np.full(4, step % 30 == 29)
            )
    return folder


def in_memory(folder: Path, name: str) -> str:
    """Copy a folder to fsspec's file system in memory. Return its URL."""
    system = fsspec.filesystem("memory")
    for path in folder.iterdir():
        if path.name[0] != ".":
            system.pipe_file(f"/{name}/{path.name}", path.read_bytes())
    return f"memory://{name}"


def lagging(folder: Path, latency_s: float = 0.0) -> str:
    """Serve a folder by the file system that counts requests and fails on demand.

    Return its URL.
    """
    LaggingFileSystem.start(folder.parent, latency_s)
    return f"lagging://{folder.name}"


def same(one, other) -> bool:
    """Return whether two batches are equal bit for bit."""
    first, second = flatten(dict(one)), flatten(dict(other))
    return first.keys() == second.keys() and all(
        torch.equal(first[name], second[name]) for name in first
    )


def far_windows(url: str, length: int = 4, **options) -> WindowDataset:
    chosen = {**SMALL, **options.pop("remote", {})}
    return WindowDataset(url, length, remote=RemoteOptions(**chosen), **options)


def check_epoch(
    near: WindowDataset, far: WindowDataset, batch_size: int = 16, **options
) -> WindowLoader:
    """Check that an epoch of the remote dataset has all windows once, equal to those of the local
    dataset.
    """
    loader = WindowLoader(far, batch_size, **options)
    order = loader.order(loader.epoch)
    assert sorted(order.tolist()) == list(range(len(near)))
    position = 0
    for batch in loader:
        numbers = order[position : position + batch_size]
        assert same(batch, near.__getitems__(numbers))
        position += len(numbers)
    assert position == len(near)
    return loader
