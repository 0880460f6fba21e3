"""Playback: stream recorded frames as endless `[T, N, ...]` batches, and pass each through one
`Linear`.

The limit is a memcpy of the bytes of one batch from memory into a reused output, and the same
`Linear` on contiguous observations. A batch has N windows of T + 1 frames; the next observations
are views of the same frames. For batches of one step, the limit is only the memcpy of one row per
environment, and making the batch is measured. 1,024 trajectories have 512 frames (1 GB).
Environments are at random positions, so that some change trajectory in every batch. Frames have 235
+ 235 + 12 + 1 floats and a flag.

Short trajectories have 80 frames each. A folder "as recorded" has fragments of 24 frames, as
written by a writer that flushes after each rollout. "packed" is the same folder after packing.
"live" is the same folder while a writer adds a rollout before each 10 batches; each batch scans the
folder.
"""

from __future__ import annotations

import dataclasses
import functools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from rollout_data import RolloutDataset, RolloutWriter
from rollout_data.tools.edit.pack_folder import pack_dataset

from . import baselines, data, harness
from .harness import LIMIT, OURS, PEER, Call, Case, Contender

#: Promised time divided by the limit: whole trajectories, fragments of 64 frames, cache="ram".
REACH = {"contiguous": 1.5, "fragments": 1.5, "ram": 1.25}
#: Outputs of the layer that reads the observations.
NUM_OUTPUTS = 64
COLD_REACH = 4.0
#: Passes before the clock starts, so that every page is in the page tables of the process. `_fresh`
#: measures without them.
WARM_PASSES = 2
LIMIT_SOURCES = 4
COLD_ENVS, COLD_STEPS, COLD_BATCHES = 512, 24, 10
#: Trajectories of few frames, and sizes of their batches.
SHORT_LENGTH, NUM_SHORT, SHORT_SIZES = 80, 2048, ((64, 1), (1024, 1), (1024, 24))
#: Steps and environments of a recorded folder, steps of a rollout, and new environments.
RECORDED_STEPS, RECORDED_ENVS, ROLLOUT_STEPS, LIVE_ENVS = 240, 1024, 24, 64
LIVE_BATCHES = 10


def cases(quick: bool) -> Iterator[Case]:
    """Yield warm playback for growing N and T, real MuJoCo rollouts, and a cold page cache."""
    length, num_trajectories = (32, 64) if quick else (512, 1024)
    sizes = (8, 64) if quick else (64, 1024, 4096)
    tag = "quick" if quick else "long"
    rollout = functools.cache(lambda: data.generated(length, num_trajectories))
    contiguous = data.made_once(
        f"playback-{tag}-contiguous", lambda path: data.record(path, rollout())
    )
    fragments = data.made_once(
        f"playback-{tag}-fragments",
        lambda path: data.record(path, rollout(), min(data.FRAGMENT, length // 2)),
    )
    folders = data.made_once(
        f"playback-{tag}-folders", lambda path: data.record_folders(path, rollout())
    )
    rollout.cache_clear()
    row_bytes = data.row_bytes(data.generated(1, 1))
    for num_envs in sizes:
        for num_steps in (1, 24):
            yield _warm(num_envs, num_steps, row_bytes, length, contiguous, fragments, folders)
    yield _fresh(sizes[-1], contiguous, row_bytes, length)
    yield _cold(fragments, folders, row_bytes, length, quick)
    yield from _real(tag, quick, 64 if quick else 256)
    yield from _short(tag, quick)
    yield _recorded_packed_live(tag, quick)


def _short(tag: str, quick: bool) -> Iterator[Case]:
    """Play short trajectories: environments change trajectory often."""
    num_trajectories = 64 if quick else NUM_SHORT
    rollout = functools.cache(lambda: data.generated(SHORT_LENGTH, num_trajectories))
    folder = data.made_once(f"playback-{tag}-short", lambda path: data.record(path, rollout()))
    folders = data.made_once(
        f"playback-{tag}-short-folders", lambda path: data.record_folders(path, rollout())
    )
    rollout.cache_clear()
    row_bytes = data.row_bytes(data.generated(1, 1))
    for num_envs, num_steps in SHORT_SIZES[:1] if quick else SHORT_SIZES:
        case = _warm(num_envs, num_steps, row_bytes, SHORT_LENGTH, folder, folder, folders)
        contenders = [entry for entry in case.contenders if entry.name != "fragments"]
        name = f"trajectories of {SHORT_LENGTH} frames, {case.name}"
        yield dataclasses.replace(case, name=name, contenders=tuple(contenders))


def _recorded_packed_live(tag: str, quick: bool) -> Case:
    """Play a folder as recorded, packed, and while a writer adds to it."""
    num_steps, num_envs = (48, 16) if quick else (RECORDED_STEPS, RECORDED_ENVS)
    rollout = functools.cache(lambda: data.generated(num_steps, num_envs))
    recorded = data.made_once(
        f"playback-{tag}-recorded", lambda path: data.record(path, rollout(), ROLLOUT_STEPS)
    )
    packed = data.made_once(f"playback-{tag}-packed", lambda path: _packed(recorded, path))
    live = data.DATA / f"playback-{tag}-live"
    rollout.cache_clear()
    row_bytes = data.row_bytes(data.generated(1, 1))
    added = data.generated(num_steps, min(LIVE_ENVS, num_envs))
    writers: list[RolloutWriter] = []

    def prepare_live() -> Call:
        shutil.rmtree(live, ignore_errors=True)
        shutil.copytree(recorded, live)
        writers.append(RolloutWriter(live, added["done"].shape[1], durable=False))
        dataset = _dataset(live, num_envs, num_steps, refresh_s=0)

        def call() -> float:
            writers[0].add_rollout(**added)
            writers[0].flush()
            start_s = harness.clock()
            for _ in range(LIVE_BATCHES):
                dataset.get_batch(ROLLOUT_STEPS)
            return (harness.clock() - start_s) / LIVE_BATCHES

        call()
        return call

    def close_live() -> None:
        while writers:
            writers.pop().close()
        shutil.rmtree(live, ignore_errors=True)

    def ours(name: str, folder: Path) -> Contender:
        def prepare() -> Call:
            dataset = _dataset(folder, num_envs, num_steps)
            for _ in range(WARM_PASSES * dataset.num_frames // (num_envs * ROLLOUT_STEPS)):
                dataset.get_batch(ROLLOUT_STEPS)
            return lambda: dataset.get_batch(ROLLOUT_STEPS)

        return Contender(name, prepare, OURS)

    return Case(
        f"recorded, packed and live folders, N={num_envs} T={ROLLOUT_STEPS}",
        (
            _limit(num_envs, ROLLOUT_STEPS, row_bytes),
            ours("as recorded", recorded),
            ours("packed", packed),
            Contender("live", prepare_live, OURS, own_clock=True, close=close_live),
        ),
        num_bytes=num_envs * (ROLLOUT_STEPS + 1) * row_bytes,
    )


def _packed(recorded: Path, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pack_dataset(recorded, path)


def _real(tag: str, quick: bool, length: int) -> Iterator[Case]:
    task, num_envs = "Humanoid-v5", 8 if quick else 64
    folder = data.made_once(
        f"playback-{tag}-humanoid",
        lambda path: data.record(path, data.mujoco(task, length, num_envs)),
    )
    row_bytes, width = _row_bytes_of(folder), _width_of(folder)
    for num_steps in (1, 24):
        yield Case(
            f"{task} N={num_envs} T={num_steps}",
            (
                _limit(num_envs, num_steps, row_bytes, width),
                _ours("recorded", folder, num_envs, num_steps, length),
            ),
            num_bytes=num_envs * (num_steps + 1) * row_bytes,
        )


def _warm(
    num_envs: int,
    num_steps: int,
    row_bytes: int,
    length: int,
    contiguous: Path,
    fragments: Path,
    folders: Path,
) -> Case:
    is_wide = num_envs == 4096 and num_steps == 24
    reach_s = {(1024, 1): 1e-3, (64, 1): 80e-6}.get((num_envs, num_steps))

    def folder_reader() -> Call:
        first = np.random.default_rng(0).integers(0, length, num_envs)
        reader = baselines.FolderReader(folders, num_envs, first)
        return _used(lambda: reader.batch(num_steps)["observations"][:-1], num_steps)

    def ours(name: str, folder: Path, cache: Literal["none", "ram"] = "none") -> Contender:
        key = "ram" if cache == "ram" else name
        return _ours(
            name,
            folder,
            num_envs,
            num_steps,
            length,
            cache,
            REACH[key] if is_wide else None,
            reach_s,
        )

    return Case(
        f"N={num_envs} T={num_steps}",
        (
            _limit(num_envs, num_steps, row_bytes, data.WIDTHS["observation"]),
            ours("contiguous", contiguous),
            ours("fragments", fragments),
            ours("cache=ram", fragments, "ram"),
            Contender("trajectory folders", folder_reader, PEER),
        ),
        num_bytes=num_envs * (num_steps + 1) * row_bytes,
    )


def _used(observations: Callable[[], torch.Tensor], num_steps: int) -> Call:
    """Make a batch and pass its observations `[T, N, D]` through one layer.

    Batches of one step are only made.
    """
    if num_steps == 1:
        return observations
    layer = torch.nn.Linear(observations().shape[-1], NUM_OUTPUTS, device="cpu")

    @torch.inference_mode()
    def call() -> object:
        return layer(observations().flatten(0, 1))

    return call


def _limit(num_envs: int, num_steps: int, row_bytes: int, width: int = 0) -> Contender:
    """Copy the bytes of a batch.

    The source is several batches long, so that it is not in the cache.

    With a `width` of observations, also pass as many contiguous observations through one layer.
    """
    # The next step reads the rows after a step again.
    num_rows = num_steps + 1 if num_steps > 1 else 1
    num_floats = num_envs * num_rows * row_bytes // 4

    def prepare() -> Call:
        source, target = torch.ones(LIMIT_SOURCES, num_floats), torch.empty(num_floats)
        observation = torch.ones(num_steps, num_envs, width)
        turn = 0

        def copied() -> torch.Tensor:
            nonlocal turn
            turn = (turn + 1) % LIMIT_SOURCES
            target.copy_(source[turn])
            return observation

        return _used(copied, num_steps if width else 1)

    return Contender("memcpy + Linear" if width and num_steps > 1 else "memcpy", prepare, LIMIT)


def _ours(
    name: str,
    folder: Path,
    num_envs: int,
    num_steps: int,
    length: int,
    cache: Literal["none", "ram"] = "none",
    reach: float | None = None,
    reach_s: float | None = None,
) -> Contender:
    def prepare() -> Call:
        dataset = _dataset(folder, num_envs, length, cache)
        num_batches = WARM_PASSES * dataset.num_frames // (num_envs * num_steps)
        for _ in range(num_batches):
            dataset.get_batch(num_steps)
        return _used(lambda: dataset.get_batch(num_steps).observation, num_steps)

    return Contender(name, prepare, OURS, reach=reach, reach_s=reach_s)


def _dataset(
    folder: Path,
    num_envs: int,
    length: int,
    cache: Literal["none", "ram"] = "none",
    refresh_s: float | None = None,
) -> RolloutDataset:
    """Open a dataset for endless playback, with random starts in trajectories of a length."""
    return RolloutDataset(
        folder, num_envs, dataset_loops=0, random_shuffle_traj_order=True, starting_frame_range=(0, length),
        device="cpu", cache=cache, refresh_s=refresh_s,
    )  # fmt: skip


def _width_of(folder: Path) -> int:
    return int(RolloutDataset(folder, 1, device="cpu").get_batch(1).observation.shape[-1])


def _row_bytes_of(folder: Path) -> int:
    batch = RolloutDataset(folder, 1, device="cpu").get_batch(1)
    columns = (
        batch.observation,
        batch.privileged_observation,
        batch.action,
        batch.reward,
        batch.done,
    )
    return sum(
        column[0, 0].numel() * column.element_size() for column in columns if column is not None
    )


def _fresh(num_envs: int, folder: Path, row_bytes: int, length: int, num_batches: int = 5) -> Case:
    """Play the first batches of a process: the files are in the page cache, but no page is
    mapped.
    """

    def play() -> None:
        dataset = _dataset(folder, num_envs, length)
        for _ in range(num_batches):
            dataset.get_batch(24)

    return Case(
        f"N={num_envs} T=24, open and first {num_batches} batches",
        (
            _limit(num_envs, 24 * num_batches, row_bytes),
            Contender("contiguous", lambda: play, OURS),
        ),
        num_bytes=num_envs * 25 * num_batches * row_bytes,
    )


def _cold(folder: Path, folders: Path, row_bytes: int, length: int, quick: bool) -> Case:
    """Play without pages in the page cache.

    The limit reads as many bytes from the start of the same files.
    """
    num_envs, num_steps = (8, 4) if quick else (COLD_ENVS, COLD_STEPS)
    num_bytes = num_envs * num_steps * COLD_BATCHES * row_bytes
    buffer = bytearray(8 << 20)

    def read() -> None:
        missing = num_bytes
        for path in sorted(folder.glob("rollout_*.h5")):
            with open(path, "rb", buffering=0) as file:
                while missing > 0 and (
                    count := file.readinto(memoryview(buffer)[: min(len(buffer), missing)])
                ):
                    missing -= count

    def play(make: Callable[[], Call]) -> Callable[[], Call]:
        def call() -> None:
            batch = make()
            for _ in range(COLD_BATCHES):
                batch()

        return lambda: call

    def ours() -> Call:
        dataset = _dataset(folder, num_envs, length)
        return lambda: dataset.get_batch(num_steps)

    def theirs() -> Call:
        reader = baselines.FolderReader(
            folders, num_envs, np.random.default_rng(0).integers(0, length, num_envs)
        )
        return lambda: reader.batch(num_steps)

    return Case(
        f"cold page cache, N={num_envs} T={num_steps}, {COLD_BATCHES} batches",
        (
            Contender("sequential read", lambda: read, LIMIT, before=lambda: data.forget(folder)),
            Contender(
                "open and play",
                play(ours),
                OURS,
                before=lambda: data.forget(folder),
                reach=COLD_REACH,
            ),
            Contender(
                "trajectory folders", play(theirs), PEER, before=lambda: data.forget(folders)
            ),
        ),
        num_bytes=num_bytes,
        num_repeats=5,
    )
