"""Files of other systems: open a set, draw windows, convert the set.

The sets have 1,000 episodes of 100 frames of 32 + 8 + 1 floats (16 MB), written by our writers. The
limit of opening lists the episodes with h5py, or reads the tables with pyarrow. The limit of
windows gathers the same windows from memory into a reused output. The limit of converting reads the
same fields and writes as many bytes. Windows of pictures are from the same frames of 128 x 128
pixels, stored as pictures (ours raw, LeRobot's as PNG) or as H.264. LeRobot's own dataset class
reads LeRobot's set. lerobot requires another version of torch: install it with --no-deps.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from torch.utils.data import DataLoader

import rollout_data
from rollout_data import WindowDataset

from . import data, peers
from .harness import LIMIT, OURS, PEER, Call, Case, Contender
from .images import FRAME_RATE_HZ, image_set

#: Windows of pictures: episodes, frames of each episode, and windows of a batch.
PICTURES, PICTURE_BATCH = (8, 64), 32
NUM_EPISODES, NUM_STEPS, WIDTHS = 1000, 100, {"observation": 32, "action": 8}
LENGTH, BATCH = 10, 256
#: Operators of torchvision. They may be declared only once.
_operators: Any = None
#: Promise: a set of 1,000 episodes opens within half a second.
REACH_OPEN_S = 0.5
#: Format -> the file or folder below its folder, and options for writing it.
SETS: dict[str, tuple[str, dict[str, Any]]] = {
    "rollout-data": ("set", {}),
    "robomimic": ("set.hdf5", {"next_obs": True}),
    "minari": ("bench/set-v0", {}),
    "lerobot": ("set", {"fps": 30}),
}


def cases(quick: bool) -> Iterator[Case]:
    """Yield opening, windows and conversion for each format."""
    num_episodes = 20 if quick else NUM_EPISODES
    tag = "quick" if quick else "long"
    rollout = data.generated(NUM_STEPS, num_episodes, WIDTHS)
    source = data.made_once(f"formats-{tag}", lambda path: data.record(path, rollout))
    sets = {name: _made(name, tag, source) for name in SETS}
    for name, path in sets.items():
        yield _opening(name, path, num_episodes)
    for name, path in sets.items():
        yield _windows(name, path)
    for name in sets:
        yield _converting(name, source, num_episodes)
    for coding in ("", "h264"):
        yield _pictures(coding, quick)


def _made(name: str, tag: str, source: Path) -> Path:
    below, options = SETS[name]

    def make(folder: Path) -> None:
        (folder / below).parent.mkdir(parents=True, exist_ok=True)
        rollout_data.convert(source, folder / below, name, progress=False, **options)

    return data.made_once(f"formats-{tag}-{name}", make) / below


def _opening(name: str, path: Path, num_episodes: int) -> Case:
    def opened() -> int:
        recording = rollout_data.open(path)
        assert len(recording) == num_episodes
        return int(recording[num_episodes // 2].length)

    contenders = [
        Contender("list the episodes", lambda: lambda: _listed(name, path), LIMIT),
        Contender("rollout_data.open", lambda: opened, OURS, reach_s=REACH_OPEN_S),
    ]
    if name == "minari":
        contenders.append(
            Contender("minari", lambda: lambda: _minari(path)[num_episodes // 2], PEER)
        )
    if name == "robomimic":
        contenders.append(Contender("robomimic", lambda: lambda: _robomimic(path)[0], PEER))
    if name == "lerobot":
        contenders.append(Contender("lerobot", lambda: lambda: lerobot_set(path)[0], PEER))
    return Case(f"open {num_episodes:,} episodes, {name}", tuple(contenders))


def _listed(name: str, path: Path) -> int:
    """Read the number and the lengths of the episodes."""
    if name == "lerobot":
        parquet = peers.load("pyarrow", "parquet")
        return sum(
            parquet.read_table(file, columns=["length"]).num_rows
            for file in path.glob("meta/episodes/*/*")
        )
    if name == "rollout-data":
        return sum(len(file.read_bytes()) for file in path.glob(".index.npz"))
    with h5py.File(path if name == "robomimic" else path / "data" / "main_data.hdf5") as file:
        group = file["data"] if name == "robomimic" else file
        key = "num_samples" if name == "robomimic" else "total_steps"
        return sum(int(group[demo].attrs[key]) for demo in group)


def _windows(name: str, path: Path) -> Case:
    dataset = WindowDataset(path, LENGTH)
    row_bytes = 4 * (sum(WIDTHS.values()) + 1)

    def gathered() -> Call:
        words = torch.ones(dataset.num_frames, row_bytes // 4)
        windows = words.as_strided(
            (len(words) - LENGTH + 1, LENGTH * words.shape[1]), (words.shape[1], 1)
        )
        out, rng = torch.empty(BATCH, windows.shape[1]), np.random.default_rng(0)
        draws = [torch.from_numpy(rng.integers(0, len(windows), BATCH)) for _ in range(64)]
        turns = _endless(lambda: draws)
        return lambda: torch.index_select(windows, 0, next(turns), out=out)

    contenders = [
        Contender("gather from memory", gathered, LIMIT),
        Contender(
            "WindowDataset", lambda: _batches(lambda: _loader(dataset, dataset.collate)), OURS
        ),
    ]
    if name == "robomimic":
        contenders.append(
            Contender("robomimic", lambda: _batches(lambda: _loader(_robomimic(path))), PEER)
        )
    if name == "lerobot":
        fields = ["observation.state", "action", "next.reward"]
        contenders.append(
            Contender("lerobot", lambda: _batches(lambda: _loader(lerobot_set(path, fields))), PEER)
        )
    return Case(
        f"windows L={LENGTH} B={BATCH}, {name}",
        tuple(contenders),
        num_bytes=BATCH * LENGTH * row_bytes,
    )


def _pictures(coding: str, quick: bool) -> Case:
    num, num_steps = (2, 16) if quick else PICTURES
    frames = image_set(num, num_steps)["rgb"]
    kind, folder = coding or "pictures", data.DATA / f"formats-rgb-{coding or 'raw'}"
    shutil.rmtree(folder, ignore_errors=True)
    chains = {"rgb": f"{coding}:crf=23"} if coding else {}
    with rollout_data.RolloutWriter(
        folder / "ours", num, obs_disassemble_mapping=chains, durable=False
    ) as writer:
        observation = {"rgb": torch.from_numpy(frames).transpose(0, 1)}
        done = torch.arange(num_steps)[:, None].expand(-1, num) == num_steps - 1
        writer.add_rollout(
            observation=observation, action=torch.zeros(num_steps, num, 1), done=done
        )

    def read_by_lerobot() -> Call:
        if not (path := folder / "theirs").exists():
            options: dict[str, Any] = {"video": coding, "fps": int(FRAME_RATE_HZ)}
            rollout_data.convert(folder / "ours", path, "lerobot", progress=False, **options)
        read = lerobot_set(path, ["observation.images.rgb"])
        return _batches(lambda: DataLoader(read, PICTURE_BATCH, shuffle=True, drop_last=True))

    dataset = WindowDataset(
        folder / "ours", LENGTH, fields=["observation"], padding="repeat", chunk_cache_bytes=0
    )
    loader = partial(
        DataLoader, dataset, PICTURE_BATCH, shuffle=True, drop_last=True, collate_fn=dataset.collate
    )
    rows = torch.from_numpy(frames).reshape(num * num_steps, -1)
    first = torch.from_numpy(
        np.random.default_rng(0).integers(0, len(rows) - LENGTH + 1, PICTURE_BATCH)
    )
    places, out = (
        (first[:, None] + torch.arange(LENGTH)).flatten(),
        rows.new_empty(PICTURE_BATCH * LENGTH, rows.shape[1]),
    )
    contenders = (
        Contender(
            "gather from memory",
            lambda: lambda: torch.index_select(rows, 0, places, out=out),
            LIMIT,
        ),
        Contender("WindowDataset", lambda: _batches(loader), OURS),
        Contender("lerobot", read_by_lerobot, PEER),
    )
    size = PICTURE_BATCH * LENGTH * frames[0, 0].nbytes
    return Case(
        f"windows L={LENGTH} B={PICTURE_BATCH} of RGB as {kind}", contenders, num_bytes=size
    )


def _endless(make: Callable[[], Any]) -> Iterator[Any]:
    while True:
        yield from make()


def _batches(make: Callable[[], Any]) -> Call:
    batches = _endless(make)
    for _ in range(3):
        next(batches)
    return lambda: next(batches)


def _loader(dataset: Any, collate: Any = None) -> Any:
    return DataLoader(dataset, BATCH, shuffle=True, drop_last=True, collate_fn=collate)


def _converting(name: str, source: Path, num_episodes: int) -> Case:
    below, options = SETS[name]
    target = data.DATA / "formats-converted"

    def clear() -> None:
        shutil.rmtree(target, ignore_errors=True)
        (target / below).parent.mkdir(parents=True)

    def read_and_write() -> None:
        with open(target / "raw", "wb", buffering=0) as out:
            for episode in rollout_data.open(source):
                for field in episode.schema:
                    out.write(np.ascontiguousarray(episode.read(field)).data)

    def convert() -> None:
        rollout_data.convert(source, target / below, name, progress=False, **options)

    return Case(
        f"convert {num_episodes:,} episodes to {name}",
        (
            Contender("read and write each field", lambda: read_and_write, LIMIT, before=clear),
            Contender("convert", lambda: convert, OURS, before=clear, reach=2.0),
        ),
        num_bytes=4 * num_episodes * NUM_STEPS * (sum(WIDTHS.values()) + 1),
    )


def _minari(path: Path) -> Any:
    return peers.load("minari").MinariDataset(path / "data")


def load_lerobot() -> Any:
    """Import LeRobot's dataset class. Raises `PeerMissing` if that fails."""
    global _operators
    if _operators is None:
        # torchvision for CUDA cannot load its operators with torch for CPUs. No operator is called.
        _operators = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            with suppress(RuntimeError):
                _operators.define(f"{name}(Tensor dets, Tensor scores, float threshold) -> Tensor")
    return peers.load("lerobot", "datasets.lerobot_dataset")


def lerobot_set(path: Path, fields: Sequence[str] = (), length: int = LENGTH) -> Any:
    """Open a set with LeRobot's dataset class, for windows of `length` frames of some fields."""
    module = load_lerobot()
    if module.CODEBASE_VERSION != "v3.0":
        raise peers.PeerMissing(f"lerobot: reads sets of version {module.CODEBASE_VERSION}")
    fps = json.loads((path / "meta" / "info.json").read_text(encoding="utf-8"))["fps"]
    times = {name: [frame / fps for frame in range(length)] for name in fields}
    return module.LeRobotDataset(
        "bench/set", root=path, delta_timestamps=times or None, video_backend="pyav"
    )


def _robomimic(path: Path) -> Any:
    module, observations = (
        peers.load("robomimic", "utils.dataset"),
        peers.load("robomimic", "utils.obs_utils"),
    )
    observations.initialize_obs_utils_with_obs_specs({"obs": {"low_dim": ["state"]}})
    return module.SequenceDataset(
        hdf5_path=str(path), obs_keys=["state"], dataset_keys=("actions", "rewards"), frame_stack=1, seq_length=LENGTH,
        pad_frame_stack=False, pad_seq_length=False, goal_mode=None, hdf5_cache_mode=None, load_next_obs=False,
    )  # fmt: skip
