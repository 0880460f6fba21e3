"""Windows behind a network: whole epochs of overlapping windows in random order, from a file system
with latency.

The limit is `WindowLoader` on the same local files, which are in the page cache. 3 blocks of 136 MB
have trajectories of 96 frames of 347 floats. Windows of 10 frames have 13.9 kB. Each request takes
30 ms, at most 32 requests run at once, and 64 chunks of 1 MiB are cached. Promised are at most
twice the local time, and at most two requests for 1,000 windows; each epoch checks this. The S3
server runs in another process of this machine, without latency. Another contender requests the same
bytes from it without reading windows.
"""

from __future__ import annotations

import atexit
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from rollout_data import RemoteOptions, WindowDataset, WindowLoader, push

from . import data, peers
from .harness import LIMIT, OURS, PEER, Call, Case, Contender

LENGTH, BATCH = 10, 256
LATENCY_S, REACH, MAX_REQUESTS = 0.03, 2.0, 2.0
WIDTHS = {"observation": 235, "privileged_observation": 99, "action": 12}


def cases(quick: bool) -> Iterator[Case]:
    """Yield epochs of `WindowLoader`: local files and files with latency, then local files and an
    S3 server.
    """
    num_steps = 32 if quick else 96
    large = _recorded(f"remote-{num_steps}", num_steps, 16 if quick else 1024, 3)
    late = Contender(
        f"{1000 * LATENCY_S:.0f} ms late", lambda: _late(large, quick), OURS, reach=REACH
    )
    yield _case(large, late)
    # It copies a file per request.
    small = _recorded(f"remote-small-{num_steps}", num_steps, 16 if quick else 128, 1)
    alone = Contender("requests for the same bytes, 32 at once", lambda: _bytes_alone(small), PEER)
    yield _case(small, Contender("S3 server of this machine", lambda: _from_s3(small), PEER), alone)


def _recorded(name: str, num_steps: int, num_envs: int, num_blocks: int) -> Path:
    def make(folder: Path) -> None:
        for seed in range(num_blocks):
            data.record(folder, data.generated(num_steps, num_envs, WIDTHS, seed))

    return data.made_once(name, make)


def _case(folder: Path, *contenders: Contender) -> Case:
    num_windows = len(WindowDataset(folder, LENGTH))
    local = Contender("local files", lambda: _epochs(WindowDataset(folder, LENGTH)), LIMIT)
    name = f"an epoch of {num_windows:,} windows, L={LENGTH} B={BATCH}"
    return Case(name, (local, *contenders), num_windows * LENGTH * 347 * 4)


def _epochs(
    dataset: WindowDataset, check: Callable[[int], None] = lambda num_windows: None
) -> Call:
    loader = WindowLoader(dataset, BATCH)

    def call() -> None:
        for _ in loader:
            pass
        check(len(dataset))

    call()
    return call


def _late(folder: Path, quick: bool) -> Call:
    peers.load("fsspec")
    from .lagging import LaggingFileSystem

    LaggingFileSystem.start(folder.parent, LATENCY_S)
    dataset = WindowDataset(f"lagging://{folder.name}", LENGTH)
    LaggingFileSystem.requests.clear()

    def check(num_windows: int) -> None:
        rate = 1000 * len(LaggingFileSystem.requests) / num_windows
        LaggingFileSystem.requests.clear()
        assert quick or rate <= MAX_REQUESTS, f"{rate:.2f} requests for 1,000 windows"

    return _epochs(dataset, check)


@cache
def _in_s3(folder: Path) -> RemoteOptions:
    """Start a server and upload a folder to s3://bench/walk. Return the options for reading it."""
    peers.load("s3fs")
    peers.load("moto", "server")
    boto3 = peers.load("boto3")
    command = [sys.executable, "-u", "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    atexit.register(server.kill)
    assert server.stdout is not None
    address = next(line.rsplit(maxsplit=1)[1] for line in server.stdout if "Running on" in line)
    # keeps reading the log of the server
    threading.Thread(target=deque, args=(server.stdout, 0), daemon=True).start()
    keys = {
        "aws_access_key_id": "none",
        "aws_secret_access_key": "none",
        "region_name": "us-east-1",
    }
    boto3.client("s3", endpoint_url=address, **keys).create_bucket(Bucket="bench")
    options = RemoteOptions(
        storage_options={"key": "none", "secret": "none", "endpoint_url": address}
    )
    push(folder, "s3://bench/walk", remote=options)
    return options


def _from_s3(folder: Path) -> Call:
    return _epochs(WindowDataset("s3://bench/walk", LENGTH, remote=_in_s3(folder)))


def _bytes_alone(folder: Path) -> Call:
    """Fetch the blocks by requests of 1 MiB each, without using them."""
    options = _in_s3(folder)
    system = peers.load("s3fs").S3FileSystem(**options.storage_options)
    step = options.chunk_bytes
    parts = [
        (path.name, low)
        for path in folder.glob("*.h5")
        for low in range(0, path.stat().st_size, step)
    ]
    pool = ThreadPoolExecutor(options.num_requests)

    def fetch(part: tuple[str, int]) -> int:
        name, low = part
        return len(system.cat_file(f"s3://bench/walk/{name}", start=low, end=low + step))

    return lambda: sum(pool.map(fetch, parts))
