"""Startup: open a dataset of many short trajectories, and assign one to every environment.

The limit of opening is to read the bytes of the index file once. The limit of a reset is one gather
of the lengths of the drawn trajectories. Trajectories have 10 frames of 8 + 2 + 1 floats, with
1,000 trajectories per rollout. A large dataset of 10^9 frames in 10^6 trajectories has only zeros
in sparse files: 16 GB that need 0.23 GB of the disk.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from tqdm import trange

import rollout_data
from rollout_data import RolloutDataset, RolloutWriter

from . import data
from .harness import LIMIT, OURS, PEER, Call, Case, Contender

WIDTHS = {"observation": 8, "action": 2}
LENGTH = 10
ENVS_PER_ROLLOUT = 1000
#: Promised seconds for 100,000 trajectories with the index cache, and for a reset of 4096
#: environments.
REACH_OPEN_S, REACH_RESET_S = 0.2, 0.020
#: Promises for 10^6 trajectories of 1,000 frames. In addition to the bytes of the index, opening
#: needs less than 100 MB. A batch does the same work as with 10^4 trajectories. Rows have only 16
#: bytes here, so misses of the processor's caches cost time.
REACH_OPEN_LARGE_S, REACH_LARGE_BYTES, REACH_GROWTH = 1.0, 100e6, 1.7
#: Promised seconds for the table of 10^6 episodes, and for one filter.
REACH_TABLE_S = 2.0
#: Batches that are played before the clock starts, then played again: their pages are in memory.
NUM_WARM = 120


def cases(quick: bool) -> Iterator[Case]:
    """Yield opening and resetting for 10,000 and 100,000 trajectories."""
    num_envs = 64 if quick else 4096
    for num_trajectories in (2000,) if quick else (10_000, 100_000):
        folder = data.made_once(
            f"startup-{num_trajectories}", lambda path, num=num_trajectories: _record(path, num)
        )
        yield _opening(folder, num_trajectories)
        yield _resetting(folder, num_trajectories, num_envs)
    yield from _large(*((2000, 10, 64) if quick else (1_000_000, 1000, 4096)))
    yield tabulating(2000 if quick else 1_000_000)


def _large(num_trajectories: int, length: int, num_envs: int) -> Iterator[Case]:
    """Yield opening a large dataset, and a batch of it compared with a batch of a dataset of a
    hundredth of its size.
    """
    folders = {
        num: data.made_once(
            f"startup-sparse-{num}-{length}", lambda path, num=num: _record_zeros(path, num, length)
        )
        for num in (num_trajectories // 100, num_trajectories)
    }
    folder = folders[num_trajectories]
    yield Case(
        f"open {num_trajectories:,} trajectories of {length} frames",
        (
            Contender("read the index file", lambda: _read(folder), LIMIT),
            Contender(
                "open and reset 1 environment",
                lambda: _opening_within(folder),
                OURS,
                reach_s=REACH_OPEN_LARGE_S,
            ),
        ),
    )
    few, many = (
        Contender(
            f"{num:,} trajectories", lambda path=path: _batches(path, num_envs), role, reach=reach
        )
        for (num, path), (role, reach) in zip(
            folders.items(), ((LIMIT, None), (OURS, REACH_GROWTH)), strict=True
        )
    )
    yield Case(f"a batch of {num_envs} envs x 24, trajectories of {length} frames", (few, many))


def tabulating(num_episodes: int) -> Case:
    """Return the case of `table` and `filter` of a new recording of one-frame episodes."""
    folder = data.made_once(
        f"startup-sparse-{num_episodes}-1", lambda path: _record_zeros(path, num_episodes, 1)
    )
    table = rollout_data.open(folder).table
    opened: list[rollout_data.Recording] = []

    def reopen() -> None:
        """Open the folder again, because a recording caches its table."""
        opened[:] = [rollout_data.open(folder)]

    calls: dict[str, Call] = {
        "table": lambda: opened[0].table,
        "filter": lambda: opened[0].filter(ends="terminated"),
    }
    return Case(
        f"table of {num_episodes:,} episodes",
        (
            Contender("copy the table", lambda: table.copy, LIMIT),
            *(
                Contender(name, lambda call=call: call, before=reopen, reach_s=REACH_TABLE_S)
                for name, call in calls.items()
            ),
        ),
    )


def _opening_within(folder: Path) -> Call:
    """Check in another process how much memory opening needs, before it is timed."""
    script = (
        "import sys, resource\nfrom pathlib import Path\nimport torch\nfrom benchmarks import startup\n"
        "def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024\n"
        "before = peak()\ndataset = startup._open(Path(sys.argv[1]), 1)\nprint(peak() - before)"
    )
    root = Path(__file__).parents[1]
    run = subprocess.run(
        [sys.executable, "-c", script, folder], cwd=root, capture_output=True, text=True, check=True
    )
    beyond = int(run.stdout) - (folder / ".index.npz").stat().st_size
    assert beyond < REACH_LARGE_BYTES, (
        f"opening takes {beyond / 1e6:.0f} MB beyond the bytes of the index"
    )
    return lambda: _open(folder, 1)


def _batches(folder: Path, num_envs: int) -> Call:
    dataset = RolloutDataset(
        folder, num_envs, 0, True, starting_frame_range=(0, 1000), device="cpu"
    )
    for _ in range(NUM_WARM):
        dataset.get_batch(24)
    dataset.set_epoch(0)
    dataset.reset()
    return lambda: dataset.get_batch(24)


def _record_zeros(folder: Path, num_trajectories: int, length: int) -> None:
    """Record zeros, at most 10,000 trajectories per file, and make each file sparse."""
    num_together = min(num_trajectories, 10_000)
    zeros = torch.zeros(length, num_together, 4)
    done = torch.zeros(length, num_together, dtype=torch.bool)
    done[-1] = True
    with RolloutWriter(folder, num_together, durable=False, block_bytes=1 << 40) as writer:
        for _ in trange(num_trajectories // num_together, desc="recording zeros", leave=False):
            writer.add_rollout(
                observation=zeros[..., :2], action=zeros[..., 2:3], reward=zeros[..., 3], done=done
            )
            writer.flush()
            _make_sparse(max(folder.glob("*.h5")))


def _make_sparse(path: Path) -> None:
    """Rewrite a file without its zeros."""
    sparse = path.with_suffix(".sparse")
    with open(path, "rb") as file, open(sparse, "wb") as out:
        while part := file.read(1 << 16):
            if any(part):
                out.write(part)
            else:
                out.seek(len(part), os.SEEK_CUR)
        out.truncate(file.tell())
    os.replace(sparse, path)


def _opening(folder: Path, num_trajectories: int) -> Case:
    reach_s = REACH_OPEN_S if num_trajectories == 100_000 else None
    peers = () if num_trajectories == 100_000 else _peers(num_trajectories)
    return Case(
        f"open {num_trajectories:,} trajectories",
        (
            Contender("read the index file", lambda: _read(folder), LIMIT),
            Contender(
                "open and reset 1 environment",
                lambda: lambda: _open(folder, 1),
                OURS,
                reach_s=reach_s,
            ),
            Contender(
                "likewise, nothing in the page cache",
                lambda: lambda: _open(folder, 1),
                before=lambda: data.forget(folder),
            ),
            *peers,
        ),
    )


def _resetting(folder: Path, num_trajectories: int, num_envs: int) -> Case:
    reach_s = REACH_RESET_S if num_trajectories == 100_000 else None
    return Case(
        f"reset {num_envs} environments, {num_trajectories:,} trajectories",
        (
            Contender("one gather", lambda: _gather(num_trajectories, num_envs), LIMIT),
            Contender("reset", lambda: _open(folder, num_envs).reset, OURS, reach_s=reach_s),
            Contender("reset and first batch", lambda: _first_batch(folder, num_envs), OURS),
        ),
    )


def _record(folder: Path, num_trajectories: int) -> None:
    rollout = data.generated(LENGTH, ENVS_PER_ROLLOUT, WIDTHS)
    with RolloutWriter(folder, ENVS_PER_ROLLOUT, durable=False) as writer:
        for _ in trange(num_trajectories // ENVS_PER_ROLLOUT, desc="recording", leave=False):
            writer.add_rollout(**rollout)


def _read(folder: Path) -> Call:
    path = folder / ".index.npz"
    return lambda: path.read_bytes()


def _open(folder: Path, num_envs: int) -> RolloutDataset:
    """Open a dataset and assign the first trajectories, because the constructor alone reads
    nothing.
    """
    dataset = RolloutDataset(
        folder, num_envs, dataset_loops=0, random_shuffle_traj_order=True, device="cpu"
    )
    dataset.reset()
    return dataset


def _first_batch(folder: Path, num_envs: int) -> Call:
    dataset = _open(folder, num_envs)

    def call() -> object:
        dataset.reset()
        return dataset.get_batch(1)

    return call


def _gather(num_trajectories: int, num_envs: int) -> Call:
    lengths = torch.full((num_trajectories,), LENGTH)
    order = torch.randperm(num_trajectories)[:num_envs]
    return lambda: lengths.index_select(0, order)


def _peers(num_trajectories: int) -> tuple[Contender, ...]:
    """Return the peers: trajectory folders that are listed, and one JSON record per trajectory."""
    rollout = data.generated(LENGTH, num_trajectories, WIDTHS)
    folders = data.made_once(
        f"startup-{num_trajectories}-folders", lambda path: data.record_folders(path, rollout)
    )
    records = data.made_once(
        f"startup-{num_trajectories}-json", lambda path: _write_records(path, num_trajectories)
    )

    def list_folders() -> int:
        num_frames = 0
        for trajectory in sorted(folders.iterdir()):
            if trajectory.is_dir():
                stops = [int(path.stem.split("_")[2]) for path in trajectory.iterdir()]
                num_frames += max(stops)
        return num_frames

    def parse_records() -> int:
        lines = (records / "index.jsonl").read_text(encoding="utf-8").splitlines()
        return sum(json.loads(line)["length"] for line in lines)

    def read_first_chunks() -> list[np.ndarray]:
        chunks = []
        for trajectory in sorted(folders.glob("trajectory_*")):
            with open(next(trajectory.iterdir()), "rb") as file:
                chunks.append(pickle.load(file)["observations"])
        return chunks

    return (
        Contender("trajectory folders, listed", lambda: list_folders, PEER),
        Contender("trajectory folders, first chunks read", lambda: read_first_chunks, PEER),
        Contender("JSON record per trajectory", lambda: parse_records, PEER),
    )


def _write_records(folder: Path, num_trajectories: int) -> None:
    folder.mkdir(parents=True)
    lines = [
        json.dumps(
            {
                "id": number,
                "env": number,
                "start": 0,
                "length": LENGTH,
                "file": f"block_{number // 1000}.h5",
            }
        )
        for number in range(num_trajectories)
    ]
    (folder / "index.jsonl").write_text("\n".join(lines), encoding="utf-8")
