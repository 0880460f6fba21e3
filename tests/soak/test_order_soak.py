"""For minutes: the order of all envs for every number of ranks and workers, each in other
processes.

A run is divided into parts of random sizes, beside a writer and deletions. Rank 0 changes the
folder between two batches.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import random
import shutil
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import rollout_data
from tests.files.test_one_order import NUM_ENVS, LiveFolder, opened, seen

pytestmark = pytest.mark.soak
NUM_BATCHES, NUM_STEPS = 24, 3
OPTIONS = {
    "dataset_loops": 0, "random_shuffle_traj_order": True, "starting_frame_range": (0, 2), "seed": 3,
    "num_transitions_per_env": NUM_STEPS,
}  # fmt: skip
SIZES = list(itertools.product((1, 2, 3, 4), repeat=2))


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any], list[Any]]:
    """One process that reads a folder while it changes: all its files, its batches, and the changes
    before each batch.
    """
    folder, pool, chance = (
        tmp_path_factory.mktemp("folder"),
        tmp_path_factory.mktemp("pool"),
        random.Random(5),
    )
    live = LiveFolder(folder)
    shutil.copytree(folder, pool, dirs_exist_ok=True)
    changes: list[Any] = [[[], []]]
    changes[0][0] = [path.name for path in folder.glob("*.h5")]
    dataset, batches, number_of_pass, age = opened(folder, **OPTIONS), [], 0, 0
    begun: set[int] = set()
    delivered: set[int] = set()
    for _ in range(NUM_BATCHES):
        batch = seen(dataset.get_batch(NUM_STEPS))
        batches.append(batch)
        state = dataset.state_dict()
        if number_of_pass != (number_of_pass := state["pass"]):
            begun, delivered, age = set(), set(), 0
        elif (age := age + 1) > 1:  # what begins now was dealt in this pass
            begun |= {number for env in batch for number, _, _, is_first, _ in env if is_first}
            delivered |= begun & {
                number for env in batch for number, _, _, _, is_last in env if is_last
            }
        before = {path.name for path in folder.glob("*.h5")}
        if chance.random() < 0.5:
            live.add([chance.randint(1, 7) for _ in range(chance.randint(1, 3))])
        writers = {path.name.split("_")[1]: number for number, path in live.blocks.items()}
        playing = {writers[state["writers"][writer]] for writer, _ in state["trajectory"]}
        deleted = sorted((delivered & set(live.blocks)) - playing)[: chance.randint(0, 2)]
        live.delete(deleted if len(live.blocks) - len(deleted) >= NUM_ENVS else [])
        after = {path.name for path in folder.glob("*.h5")}
        for name in after - before:
            shutil.copy2(folder / name, pool / name)
        changes.append([sorted(after - before), sorted(before - after)])
    return pool, batches, changes


def play(folder: Path, pool: Path, leg: dict[str, Any], rank: int, total: int) -> None:
    """Run one rank: read a part and write the batches.

    Rank 0 changes the folder before each batch.
    """
    store = dist.FileStore(str(folder / f".{leg['name']}"), total)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=total, timeout=timedelta(seconds=120)
    )
    data, actual = folder / "data", []
    dataset = opened(data, (rank, total), **OPTIONS)
    dataset = rollout_data.RolloutDataset(data, dataset.num_envs, device="cpu", **OPTIONS)
    loader = rollout_data.loader(dataset, leg["workers"], **leg["options"])
    if leg["state"] is not None:
        loader.load_state_dict(leg["state"])
    batches = iter(loader)
    for come, deleted in leg["changes"]:
        if rank == 0:
            for name in come:
                shutil.copy2(pool / name, data / name)
            for name in deleted:
                (data / name).unlink()
        dist.barrier()
        actual.append(seen(next(batches)))
        dist.barrier()
    result = {"batches": actual, "state": loader.state_dict()}
    (folder / f"{leg['name']}_{rank}.json").write_text(json.dumps(result))
    batches.close()
    dist.destroy_process_group()


def rank_process(*arguments: Any) -> None:
    try:
        play(*arguments)
        os._exit(0)
    except BaseException:  # noqa: BLE001 - the test sees the exit status, a reader why
        traceback.print_exc()
        os._exit(1)


@pytest.mark.parametrize("start_method", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize(("ranks", "workers"), SIZES)
def test_ranks_and_workers_of_all_numbers_resume_the_uninterrupted_sequence(
    tmp_path: Path,
    uninterrupted: tuple[Path, list[Any], list[Any]],
    ranks: int,
    workers: int,
    start_method: str,
) -> None:
    pool, expected, changes = uninterrupted
    chance = random.Random(16 * ranks + 4 * workers + len(start_method))
    (tmp_path / "data").mkdir()
    shutil.copy2(pool / "metadata.json", tmp_path / "data" / "metadata.json")
    cuts = [0, *sorted(chance.sample(range(2, NUM_BATCHES - 1), 2)), NUM_BATCHES]
    sizes = [(ranks, workers), chance.choice(SIZES), (ranks, workers)]
    state, actual = None, []
    for number, ((total, num_workers), first, stop) in enumerate(
        zip(sizes, cuts, cuts[1:], strict=False)
    ):
        options = {"multiprocessing_context": start_method, "timeout": 120}
        leg = {"name": f"leg{number}", "workers": num_workers, "options": options}
        leg |= {"changes": changes[first:stop], "state": state}
        context = multiprocessing.get_context("fork")
        processes = [
            context.Process(target=rank_process, args=(tmp_path, pool, leg, rank, total))
            for rank in range(total)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(300)
        assert [process.exitcode for process in processes] == [0] * total
        results = [
            json.loads((tmp_path / f"leg{number}_{rank}.json").read_text()) for rank in range(total)
        ]
        assert all(result["state"] == results[0]["state"] for result in results)
        state = results[0]["state"]
        sides = zip(*(result["batches"] for result in results), strict=True)
        actual += [[env for batch in side for env in batch] for side in sides]
    assert actual == expected
