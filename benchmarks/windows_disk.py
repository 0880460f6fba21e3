"""Windows from files: random windows of recorded trajectories, with low-dimensional fields and with
images.

The limit gathers the same windows from one tensor in memory into a reused output. A memcpy of as
many bytes is also measured. 512 trajectories have 512 frames of 235 + 235 + 12 + 1 floats (500 MB).
The HDF5 datasets have one group per trajectory. Each window is sliced from its group, and torch's
default collate joins the windows. The dataset of robomimic reads the same file, from the disk and
with everything in memory. Files are read once before the measurement.

The same windows are read from four more folders. One has trajectories of 80 frames. One is as
written by a writer that flushes every 24 steps. One is that folder after packing. One is that
folder while its writer is open, with unfinished trajectories.
"""

from __future__ import annotations

import gc
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import repeat
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
from tqdm import trange

from rollout_data import RolloutWriter, WindowDataset, WindowLoader
from rollout_data.tools.edit.pack_folder import pack_dataset

from . import data, harness, peers
from .harness import LIMIT, OURS, PEER, Call, Case, Contender
from .images import image_set

#: Promised time divided by the limit: `DataLoader` without workers, our loader, `DataLoader` with
#: one worker.
REACH = {"workers": 4.0, "loader": 2.5, "one": 2.0}
IMAGE_REACH = {"raw": 1.5, "lz4": 8.0}
LENGTH, BATCH = 10, 256
IMAGE_LENGTH, IMAGE_BATCH = 8, 32
#: Promised seconds of a batch whose bytes cost nothing: 32 windows of 8 frames of 6 floats.
SMALL_LENGTH, SMALL_BATCH, SMALL_REACH_S = 8, 32, 50e-6
SMALL_WIDTHS = {"observation": 4, "action": 1}
#: Batches before the clock starts: enough to touch every page.
WARM_BATCHES = 1500
SLOW_WARM_BATCHES = 4
KEYS = ("observation", "privileged_observation")
#: Frames of short trajectories, and their number; frames between two flushes.
SHORT_LENGTH, NUM_SHORT, FLUSHED_STEPS = 80, 2048, 24
#: Steps and environments of the folders that are flushed often.
RECORDED_STEPS, RECORDED_ENVS = 240, 512


def cases(quick: bool) -> Iterator[Case]:
    """Yield low-dimensional windows with 0, 1 and 2 workers, then image windows raw and coded."""
    length, num_trajectories = (32, 16) if quick else (512, 512)
    tag = "quick" if quick else "long"
    rollout = cache(lambda: data.generated(length, num_trajectories))
    ours = data.made_once(f"windows-{tag}", lambda path: data.record(path, rollout()))
    theirs = data.made_once(
        f"windows-{tag}-hdf5", lambda path: _record_groups(path / "data.hdf5", rollout())
    )
    rollout.cache_clear()
    for num_workers in (0, 1, 2):
        yield _low_dimensional(ours, theirs / "data.hdf5", num_workers, quick)
    yield from _other_folders(tag, quick)
    yield _small(tag, quick)
    yield _images(tag, quick)


def _low_dimensional(ours: Path, theirs: Path, num_workers: int, quick: bool) -> Case:
    dataset = WindowDataset(ours, LENGTH)
    warm = 10 if quick else WARM_BATCHES
    take = _endless if num_workers == 0 else _in_rounds
    reach = {0: REACH["workers"], 1: REACH["one"]}.get(num_workers)
    row_bytes = _row_bytes(dataset)
    contenders = [
        _gather_limit(dataset.num_frames, row_bytes, LENGTH, BATCH),
        _memcpy(BATCH * LENGTH * row_bytes),
        take("DataLoader", ours, lambda: _torch_loader(dataset, num_workers), warm, OURS, reach),
    ]
    if num_workers == 0:
        contenders.append(
            _endless(
                "WindowLoader",
                ours,
                lambda: WindowLoader(dataset, BATCH, drop_last=True),
                warm,
                OURS,
                REACH["loader"],
            )
        )

    def groups() -> Any:
        return _plain_loader(GroupWindows(theirs, LENGTH), num_workers)

    contenders.append(take("HDF5 groups", theirs.parent, groups, SLOW_WARM_BATCHES, PEER))
    for mode in ("none", "low_dim") if num_workers == 0 else ("none",):
        contenders.append(
            take(
                f"robomimic, cache {mode}",
                theirs.parent,
                lambda mode=mode: _plain_loader(_robomimic(theirs, mode), num_workers),
                SLOW_WARM_BATCHES,
                PEER,
            )
        )
    workers = {0: "no workers", 1: "1 worker", 2: "2 workers"}[num_workers]
    return Case(
        f"L={LENGTH} B={BATCH}, {workers}", tuple(contenders), num_bytes=BATCH * LENGTH * row_bytes
    )


def _other_folders(tag: str, quick: bool) -> Iterator[Case]:
    """Read the windows of short trajectories, and of a folder as recorded, packed and live."""
    num_short = 64 if quick else NUM_SHORT
    short = data.made_once(
        f"windows-{tag}-short",
        lambda path: data.record(path, data.generated(SHORT_LENGTH, num_short)),
    )
    num_steps, num_envs = (48, 16) if quick else (RECORDED_STEPS, RECORDED_ENVS)
    rollout = cache(lambda: data.generated(num_steps, num_envs))
    recorded = data.made_once(
        f"windows-{tag}-recorded", lambda path: data.record(path, rollout(), FLUSHED_STEPS)
    )
    packed = data.made_once(f"windows-{tag}-packed", lambda path: _pack(recorded, path))
    live = data.DATA / f"windows-{tag}-live"
    shutil.rmtree(live, ignore_errors=True)
    with RolloutWriter(live, num_envs, durable=False) as writer:
        for start in range(0, num_steps, FLUSHED_STEPS):
            part = {name: value[start : start + FLUSHED_STEPS] for name, value in rollout().items()}
            writer.add_rollout(**part)
            writer.flush()
        # An unfinished trajectory of every environment.
        writer.add_rollout(**{name: value[:FLUSHED_STEPS] for name, value in rollout().items()})
        writer.flush()
        rollout.cache_clear()
        folders = {
            f"trajectories of {SHORT_LENGTH} frames": short,
            "folder as recorded": recorded,
            "folder packed": packed,
            "folder live": live,
        }
        for name, folder in folders.items():
            yield _other_folder(name, folder, quick)
    shutil.rmtree(live, ignore_errors=True)


def _pack(recorded: Path, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pack_dataset(recorded, path)


def _other_folder(name: str, folder: Path, quick: bool) -> Case:
    dataset = WindowDataset(folder, LENGTH)
    warm = 10 if quick else WARM_BATCHES
    row_bytes = _row_bytes(dataset)

    def own_loader() -> Any:
        return WindowLoader(dataset, BATCH, drop_last=True)

    contenders = [
        _gather_limit(dataset.num_frames, row_bytes, LENGTH, BATCH),
        _endless("DataLoader", folder, lambda: _torch_loader(dataset, 0), warm, OURS, 2.5),
        _endless("WindowLoader", folder, own_loader, warm, OURS, REACH["loader"]),
    ]
    return Case(
        f"L={LENGTH} B={BATCH}, {name}", tuple(contenders), num_bytes=BATCH * LENGTH * row_bytes
    )


def _small(tag: str, quick: bool) -> Case:
    rollout = data.generated(32 if quick else 512, 16, SMALL_WIDTHS)
    folder = data.made_once(f"windows-{tag}-small", lambda path: data.record(path, rollout))
    dataset, warm = WindowDataset(folder, SMALL_LENGTH), 10 if quick else WARM_BATCHES
    loader = _endless(
        "DataLoader", folder, lambda: _torch_loader(dataset, 0, SMALL_BATCH), warm, OURS
    )
    contenders = (
        _gather_limit(dataset.num_frames, _row_bytes(dataset), SMALL_LENGTH, SMALL_BATCH),
        replace(loader, reach_s=SMALL_REACH_S),
    )
    return Case(f"L={SMALL_LENGTH} B={SMALL_BATCH}, small rows", contenders)


def _row_bytes(dataset: WindowDataset) -> int:
    window = dataset[0]
    names = [field.name for field in dataset.plan.fields if field.rows]
    leaves = [_leaf(window, name) for name in names]
    return sum(leaf[0].numel() * leaf.element_size() for leaf in leaves)


def _leaf(window: Any, name: str) -> torch.Tensor:
    for part in name.split("/"):
        window = window[part]
    observations: torch.Tensor = window
    return observations


def _warm(folder: Path) -> None:
    """Read the files once, because some machines remove idle pages from the page cache."""
    buffer = bytearray(8 << 20)
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass


def _gather_limit(num_frames: int, row_bytes: int, length: int, batch: int) -> Contender:
    """Gather random windows from memory, all fields of a frame in one row, into a reused output."""

    def prepare() -> Call:
        words = torch.ones(num_frames, row_bytes // 4)
        windows = words.as_strided(
            (num_frames - length + 1, length * words.shape[1]), (words.shape[1], 1)
        )
        out, rng = torch.empty(batch, windows.shape[1]), np.random.default_rng(0)
        # Drawn before: choosing windows is not part of the limit.
        draws = [torch.from_numpy(rng.integers(0, len(windows), batch)) for _ in range(256)]
        turn = 0

        def call() -> object:
            nonlocal turn
            turn = (turn + 1) % len(draws)
            return torch.index_select(windows, 0, draws[turn], out=out)

        return call

    return Contender("gather from memory", prepare, LIMIT)


def _memcpy(num_bytes: int) -> Contender:
    def prepare() -> Call:
        source, target = torch.ones(8, num_bytes // 4), torch.empty(num_bytes // 4)
        turn = 0

        def call() -> object:
            nonlocal turn
            turn = (turn + 1) % len(source)
            return target.copy_(source[turn])

        return call

    return Contender("memcpy", prepare, PEER)


def _endless(
    name: str,
    folder: Path,
    make: Callable[[], Any],
    num_warm: int,
    role: str,
    reach: float | None = None,
) -> Contender:
    """Return batches of a loader, epoch after epoch.

    The loader is closed at the end of the case.
    """
    iterators: list[Iterator[Any]] = []
    # Batches that were read before the clock starts cost nothing, so these and many more batches
    # are read first.
    num_timed, num_ahead = max(1, num_warm // 5), 3 if num_warm > SLOW_WARM_BATCHES else 0

    def prepare() -> Call:
        _warm(folder)
        loader = make()

        def batches() -> Iterator[Any]:
            while True:
                yield from loader

        iterators.append(batches())
        for _ in range(num_warm):
            next(iterators[0])
        return call

    def call() -> float:
        for _ in range(num_ahead):
            next(iterators[0])
        start_s = harness.clock()
        for _ in range(num_timed):
            next(iterators[0])
        return (harness.clock() - start_s) / num_timed

    def close() -> None:
        if iterators:
            iterators.pop().close()  # type: ignore[attr-defined]
        gc.collect()

    return Contender(name, prepare, role, reach=reach, own_clock=True, close=close)


def _in_rounds(
    name: str,
    folder: Path,
    make: Callable[[], Any],
    num_warm: int,
    role: str,
    reach: float | None = None,
) -> Contender:
    """Return batches of new workers that end after each round.

    Living workers would use the processor while others are measured.
    """
    num_timed = max(8, num_warm // 5)

    def call() -> float:
        batches = (batch for loader in repeat(make()) for batch in loader)
        for _ in range(num_warm):
            next(batches)
        start_s = harness.clock()
        for _ in range(num_timed):
            next(batches)
        elapsed_s = harness.clock() - start_s
        batches.close()
        gc.collect()
        return elapsed_s / num_timed

    def prepare() -> Call:
        _warm(folder)
        return call

    return Contender(name, prepare, role, reach=reach, own_clock=True)


def _torch_loader(dataset: WindowDataset, num_workers: int, batch: int = BATCH) -> Any:
    return DataLoader(
        dataset, batch, shuffle=True, drop_last=True, collate_fn=dataset.collate, num_workers=num_workers,
        persistent_workers=num_workers > 0,
    )  # fmt: skip


def _plain_loader(dataset: Dataset[Any], num_workers: int, batch: int = BATCH) -> Any:
    return DataLoader(
        dataset,
        batch,
        shuffle=True,
        drop_last=True,
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
    )


# Peers


def _record_groups(path: Path, rollout: data.Rollout) -> None:
    """Write one HDF5 group per trajectory in the layout of robomimic."""
    path.parent.mkdir(parents=True, exist_ok=True)
    num_steps, num_envs = rollout["done"].shape
    with h5py.File(path, "w") as file:
        groups = file.create_group("data")
        groups.attrs["total"] = num_steps * num_envs
        groups.attrs["env_args"] = json.dumps(
            {"env_name": "generated", "type": 1, "env_kwargs": {}}
        )
        for env in trange(num_envs, desc="HDF5 groups", leave=False):
            group = groups.create_group(f"demo_{env}")
            group.attrs["num_samples"] = num_steps
            for key in KEYS:
                group.create_dataset(f"obs/{key}", data=rollout[key][:, env].numpy())
            group.create_dataset("actions", data=rollout["action"][:, env].numpy())
            group.create_dataset("rewards", data=rollout["reward"][:, env].numpy())
            group.create_dataset("dones", data=rollout["done"][:, env].numpy().astype(np.int64))


class GroupWindows(Dataset[Any]):
    """Windows of an HDF5 file with one group per trajectory: each is sliced from the open file,
    field by field.
    """

    def __init__(self, path: Path, length: int) -> None:
        self.path, self.length = path, length
        self.file: h5py.File | None = None
        with h5py.File(path, "r") as file:
            self.names = sorted(file["data"], key=lambda name: int(name.rpartition("_")[2]))
            sizes = [int(file[f"data/{name}"].attrs["num_samples"]) for name in self.names]
        counts = np.maximum(0, np.array(sizes) - length + 1)
        self.place = np.repeat(np.arange(len(sizes)), counts)
        self.start = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)

    def __len__(self) -> int:
        return len(self.place)

    def __getitem__(self, number: int) -> dict[str, Any]:
        if self.file is None:  # opened in the process that reads
            self.file = h5py.File(self.path, "r", swmr=True, libver="latest")
        group = self.file["data"][self.names[self.place[number]]]
        start = self.start[number]
        part = slice(start, start + self.length)
        observation = {key: group["obs"][key][part] for key in group["obs"]}
        return {
            "obs": observation,
            **{name: group[name][part] for name in ("actions", "rewards", "dones")},
        }


def _robomimic(path: Path, cache: str) -> Dataset[Any]:
    """Return the dataset of robomimic for the same file."""
    module = peers.load("robomimic", "utils.dataset")
    observations = peers.load("robomimic", "utils.obs_utils")
    observations.initialize_obs_utils_with_obs_specs({"obs": {"low_dim": list(KEYS)}})
    dataset: Dataset[Any] = module.SequenceDataset(
        hdf5_path=str(path), obs_keys=KEYS, dataset_keys=("actions", "rewards", "dones"), frame_stack=1,
        seq_length=LENGTH, pad_frame_stack=False, pad_seq_length=False, goal_mode=None,
        hdf5_cache_mode=None if cache == "none" else cache, hdf5_use_swmr=True, load_next_obs=False,
    )  # fmt: skip
    return dataset


# Images


def _images(tag: str, quick: bool) -> Case:
    """Yield windows of RGB and depth: raw, with lossless codecs, and with gzip in HDF5 groups."""
    num_trajectories, num_frames = (2, 24) if quick else (8, 200)
    episodes: list[dict[str, np.ndarray]] = []

    def frames() -> dict[str, np.ndarray]:
        if not episodes:
            images = image_set(num_trajectories, num_frames)
            episodes.append({"rgb": images["rgb"], "depth": images["depth_noisy"]})
        return episodes[0]

    folders = {
        name: data.made_once(
            f"windows-{tag}-images-{name}",
            lambda path, codecs=codecs: _record_images(path, frames(), codecs),
        )
        for name, codecs in (("raw", {}), ("lz4", {"rgb": "lz4", "depth": "uint16+shuffle+lz4"}))
    }
    gzip = data.made_once(
        f"windows-{tag}-images-gzip",
        lambda path: _record_image_groups(path / "data.hdf5", frames()),
    )
    episodes.clear()
    frame_bytes = _row_bytes(_image_windows(folders["raw"]))
    num_warm = 4 if quick else 60
    ways: list[tuple[str, Path, bool]] = [
        ("raw", folders["raw"], True),
        ("lz4", folders["lz4"], False),
        ("lz4, kept in memory", folders["lz4"], True),
    ]
    contenders = [
        _gather_limit(num_trajectories * num_frames, frame_bytes, IMAGE_LENGTH, IMAGE_BATCH),
        _memcpy(IMAGE_BATCH * IMAGE_LENGTH * frame_bytes),
    ]
    for name, folder, keeps in ways:

        def ours(folder: Path = folder, keeps: bool = keeps) -> Any:
            return WindowLoader(_image_windows(folder, keeps), IMAGE_BATCH, drop_last=True)

        contenders.append(
            _endless(f"WindowLoader, {name}", folder, ours, num_warm, OURS, IMAGE_REACH[name[:3]])
        )

    def gzip_groups() -> Any:
        return _plain_loader(ImageGroups(gzip / "data.hdf5"), 0, IMAGE_BATCH)

    contenders.append(_endless("HDF5 groups, gzip", gzip, gzip_groups, 1, PEER))
    name = f"images, L={IMAGE_LENGTH} B={IMAGE_BATCH}"
    return Case(name, tuple(contenders), num_bytes=IMAGE_BATCH * IMAGE_LENGTH * frame_bytes)


def _image_windows(folder: Path, keeps: bool = True) -> WindowDataset:
    """Open windows of images.

    Unless `keeps` is set, each batch is decoded again, as in a large dataset.
    """
    options = {} if keeps else {"chunk_cache_bytes": 0}
    return WindowDataset(folder, IMAGE_LENGTH, fields=["observation"], **options)


def _record_images(folder: Path, frames: dict[str, np.ndarray], codecs: dict[str, str]) -> None:
    num_trajectories, num_frames = frames["rgb"].shape[:2]
    with RolloutWriter(
        folder,
        num_trajectories,
        durable=False,
        block_bytes=data.BLOCK_BYTES,
        obs_disassemble_mapping=codecs,
    ) as writer:
        for frame in range(num_frames):
            writer.add(
                observation={name: values[:, frame] for name, values in frames.items()},
                action=np.zeros((num_trajectories, 7), np.float32),
                done=np.full(num_trajectories, frame == num_frames - 1),
            )


def _record_image_groups(path: Path, frames: dict[str, np.ndarray]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        for number in range(len(frames["rgb"])):
            for name, values in frames.items():
                file.create_dataset(
                    f"data/demo_{number}/obs/{name}",
                    data=values[number],
                    compression="gzip",
                    chunks=(1, *values.shape[2:]),
                )


class ImageGroups(Dataset[Any]):
    """Windows of images from HDF5 groups."""

    def __init__(self, path: Path) -> None:
        self.file = h5py.File(path, "r")
        self.groups = [self.file["data"][name]["obs"] for name in self.file["data"]]
        self.num_windows = len(self.groups[0]["rgb"]) - IMAGE_LENGTH + 1

    def __len__(self) -> int:
        return len(self.groups) * self.num_windows

    def __getitem__(self, number: int) -> dict[str, Any]:
        which, start = divmod(number, self.num_windows)
        return {
            name: values[start : start + IMAGE_LENGTH]
            for name, values in self.groups[which].items()
        }
