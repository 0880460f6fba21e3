"""Programs that fork while a thread of an object is working; `python -m tests.checkpoint.forked
NAME FOLDER`.

The child leaves through the `with` blocks and exit hooks that it has inherited, and then as those
of `multiprocessing` do: HDF5 itself does not survive its own exit in the child of a process that
was making a file in a thread.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

import rollout_data
from rollout_data import (
    RecordingWrapper,
    RolloutDataset,
    RolloutWriter,
    TrajectoryReplayBuffer,
    WindowDataset,
    WindowLoader,
)
from storage import AsyncCheckpointSaver, PipelinedDataCollector, load_checkpoint
from storage.errors import UsageError
from tests.files.simulator_fakes import IsaacLab

PARENT = os.getpid()
N = 2


def fork(work: Callable[[], None]) -> None:
    """Run `work` in a child, which must end without an error within a time limit."""
    process = os.fork()
    if not process:
        work()
        sys.exit(0)
    end_s = time.monotonic() + 100
    while True:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            break
        if time.monotonic() > end_s:
            os.kill(process, 9)
            os.waitpid(process, 0)
            raise TimeoutError("the child hangs")
        time.sleep(0.005)
    assert os.waitstatus_to_exitcode(status) == 0, status


def refused(calls: Iterable[Callable[[], Any]]) -> None:
    """Check that each call raises an error that names the process of the object."""
    for number, call in enumerate(calls):
        try:
            call()
        except UsageError as error:
            assert f"runs only in process {PARENT}, not in" in str(error), error
            assert f"its child {os.getpid()}" in str(error), error
        else:
            raise AssertionError(f"call {number} is not refused")


def step(number: int) -> dict[str, Any]:
    code = torch.arange(N) + 10.0 * number
    return {
        "observation": code[:, None].repeat(1, 50),
        "action": code[:, None],
        "reward": code,
        "done": torch.full((N,), number % 20 == 19),
    }


def record(folder: Path, num_steps: int = 100) -> Path:
    with RolloutWriter(folder, N, durable=False) as writer:
        for number in range(num_steps):
            writer.add(**step(number))
    return folder


def rewards(folder: Path) -> list[float]:
    dataset = WindowDataset(folder, length=1)
    return sorted(float(dataset[number]["reward"]) for number in range(len(dataset)))


def writer(folder: Path) -> None:
    with RolloutWriter(folder, N, block_bytes=4000, durable=False) as own:

        def child() -> None:
            rollout = {name: value[None] for name, value in step(0).items()}
            calls = [
                lambda: own.add(**step(0)),
                lambda: own.add_rollout(**rollout),
                lambda: own.discard([0]),
                own.flush,
                own.close,
                lambda: own.schema,
                *(
                    partial(getattr, own, f"num_{name}")
                    for name in ("frames", "finished_frames", "trajectories")
                ),
            ]
            refused([*calls, *calls])

        for number in range(300):
            own.add(**step(number))
            if number % 60 == 30:
                fork(child)
    assert rewards(folder) == [float(e + 10 * n) for n in range(300) for e in range(N)]
    assert not [name for name in os.listdir(folder) if "tmp" in name]


def wrapper(folder: Path) -> None:
    env, closed, actions = IsaacLab("torch"), [], torch.zeros(3, 2)
    env.close = lambda: closed.append(os.getpid())
    with RecordingWrapper(env, folder, durable=False) as own:
        own.reset()

        def child() -> None:
            refused([lambda: own.step(actions), own.close])
            with own:  # leaving it is silent
                pass
            assert not closed

        for number in range(40):
            own.step(actions)
            if number == 20:
                fork(child)
    assert closed == [PARENT] and own.rollout_writer.num_frames == 3 * 40


def saver(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with AsyncCheckpointSaver(max_queue_size=8) as own:

        def child() -> None:
            save = partial(own.save_async, {"x": 1}, folder / "child")
            calls = [save, own.wait, lambda: own.wait(1.0), lambda: own.num_pending]
            refused([*calls, own.shutdown, partial(own.shutdown, wait=False)])

        for number in range(6):
            own.save_async(
                {"x": torch.full((1 << 20,), float(number))},
                folder / f"{number}",
                compress=number % 2 == 1,
            )
            if number in (1, 4):
                fork(child)
        own.wait()
    actual = sorted(os.listdir(folder))
    assert actual == ["0", "1.lz4", "2", "3.lz4", "4", "5.lz4"], actual
    for number in range(6):
        assert bool((load_checkpoint(folder / f"{number}")["x"] == number).all())


def unused_saver(folder: Path) -> None:
    own = AsyncCheckpointSaver()
    fork(lambda: refused([lambda: own.save_async({}, folder / "x")]))
    own.shutdown()


def collector(folder: Path) -> None:
    own = PipelinedDataCollector(range(1000), prefetch_count=2)
    items = iter(own)
    seen = [next(items) for _ in range(3)]

    def child() -> None:
        refused([lambda: next(items), lambda: iter(own), items.close, own.close])
        with items:  # leaving it is silent
            pass
        another = PipelinedDataCollector(range(5))
        assert list(another) == list(range(5))

    fork(child)
    seen += items
    assert seen == list(range(1000))
    fork(lambda: check(list(own) == list(range(1000))))  # it has no running job
    assert list(own) == list(range(1000))


def check(is_so: bool) -> None:
    assert is_so


def prefetch(folder: Path) -> None:
    record(folder)
    dataset = RolloutDataset(folder, num_envs=N, num_transitions_per_env=5)
    whole = [
        batch.reward.clone()
        for batch in RolloutDataset(folder, num_envs=N, num_transitions_per_env=5)
    ]
    ahead = dataset.prefetch(2)
    batches = iter(ahead)
    seen = [next(batches).reward.clone() for _ in range(4)]

    def child() -> None:
        another = dataset.prefetch(1)
        refused(
            [
                lambda: next(iter(ahead)),
                lambda: next(iter(another)),
                ahead.close,
                ahead.state_dict,
                lambda: next(batches),
            ]
        )
        fresh = RolloutDataset(folder, num_envs=N, num_transitions_per_env=5)
        assert len(list(fresh)) == len(whole)
        assert len(rewards(folder)) == 200

    fork(child)
    seen += [batch.reward.clone() for batch in batches]
    assert len(seen) == len(whole) and all(map(torch.equal, seen, whole))


def loader(folder: Path) -> None:
    record(folder)
    whole = [
        batch.reward.clone()
        for batch in RolloutDataset(folder, num_envs=N, num_transitions_per_env=5)
    ]
    dataset = RolloutDataset(folder, num_envs=N, num_transitions_per_env=5)
    batches = iter(rollout_data.loader(dataset, 2, multiprocessing_context="fork"))
    seen = [next(batches).reward.clone() for _ in range(2)]

    def child() -> None:
        nonlocal batches
        refused([lambda: next(batches)])
        batches = iter(())  # objects that the child drops still work in the parent
        # The exit hook of `multiprocessing` ends the workers of the process that forked.
        os._exit(0)

    fork(child)
    seen += [batch.reward.clone() for batch in batches]
    assert len(seen) == len(whole) and all(map(torch.equal, seen, whole))


def windows(folder: Path) -> None:
    loader = WindowLoader(WindowDataset(record(folder), length=4), 3, shuffle=False)
    batches = iter(loader)
    seen = [next(batches)["reward"].clone() for _ in range(2)]

    def child() -> None:
        refused([lambda: next(batches)])
        loader.set_epoch(0)
        assert len(list(loader)) == len(loader)

    fork(child)
    seen += [batch["reward"].clone() for batch in batches]
    again = [batch["reward"] for batch in loader]
    assert len(seen) == len(loader) and all(map(torch.equal, seen, again))


def trajectories(folder: Path) -> None:
    def one(number: int) -> dict[str, Any]:
        return {"rewards": torch.full((5, N, 1), float(number)), "obs": torch.zeros(5, N, 400)}

    own = TrajectoryReplayBuffer(auto_save=True, auto_save_path=folder, sample_window_size=0)

    def child() -> None:
        refused(
            [
                lambda: own.add(one(0)),
                lambda: own.add_trajectories([one(0)]),
                lambda: own.sample(1),
                lambda: own.get(0),
                lambda: own.about(0),
                lambda: own.trajectory_ids,
                lambda: own.cached_ids,
                lambda: len(own),
                lambda: own.size,
                lambda: own.total_samples,
                own.flush,
                own.clear,
                own.clear_cache,
                lambda: own.save_checkpoint(folder.with_name("elsewhere")),
                lambda: own.load_checkpoint(folder),
                own.close,
            ]
        )
        with own:  # leaving it is silent
            pass

    for number in range(30):
        own.add(one(number))
        if number % 8 == 5:
            fork(child)
    own.close()
    loaded = TrajectoryReplayBuffer(sample_window_size=0)
    loaded.load_checkpoint(folder)
    assert [float(loaded.get(i)["rewards"][0, 0, 0]) for i in loaded.trajectory_ids] == list(
        range(30)
    )
    in_memory = TrajectoryReplayBuffer()
    in_memory.add(one(7))
    fork(lambda: check(in_memory.sample(3)["rewards"].eq(7).all()))


def workers(folder: Path) -> None:
    """Reading needs no thread of the parent: forked workers of a loader continue, also beside a
    writer.
    """
    record(folder)
    with RolloutWriter(folder.with_name("other"), N, durable=False) as own:
        own.add(**step(0))
        dataset = RolloutDataset(folder, num_envs=N, num_transitions_per_env=5)
        assert (
            len(
                list(
                    DataLoader(
                        dataset, batch_size=None, num_workers=2, multiprocessing_context="fork"
                    )
                )
            )
            > 0
        )
        single = WindowDataset(folder, length=1)
        options = {
            "num_workers": 2,
            "multiprocessing_context": "fork",
            "collate_fn": single.collate,
        }
        actual = DataLoader(single, batch_size=20, **options)
        assert sum(len(batch["reward"]) for batch in actual) == 200
        own.add(**step(1))
    assert rewards(folder.with_name("other")) == [0.0, 1.0, 10.0, 11.0]


PROGRAMS = {
    program.__name__: program
    for program in (
        writer,
        wrapper,
        saver,
        unused_saver,
        collector,
        prefetch,
        loader,
        windows,
        trajectories,
        workers,
    )
}

if __name__ == "__main__":
    try:
        PROGRAMS[sys.argv[1]](Path(sys.argv[2]))
    except SystemExit as left:
        atexit._run_exitfuncs()
        os._exit(left.code)
