"""Ranks of real process groups, and the loaders of trainers. Unsupported ways raise an error."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rollout_data import RolloutDataset
from tests.files.recorded import record

ROOT = Path(__file__).parents[2]
LENGTHS = [5, 3, 6, 4, 2, 7, 5, 3, 4, 4, 6, 2]
ALL = sorted((number, frame) for number, length in enumerate(LENGTHS) for frame in range(length))


def needs(name):
    return pytest.mark.skipif(
        importlib.util.find_spec(name) is None,
        reason=f"{name} is not installed: make test-trainers",
    )


def run_ranks(*readings):
    """Let two ranks read in several ways, one after another: arguments of `ranks.read`."""
    for reading in readings:
        record(Path(reading["data_dir"]), LENGTHS, num_envs=3)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "-m",
    ]
    command += ["tests.files.ranks", json.dumps(readings)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)


def found_by_ranks(folder, run):
    """Return what each rank has read from a folder: batches and error."""
    paths = [folder / f"rank{rank}.json" for rank in range(2)]
    assert all(path.exists() for path in paths), run.stderr[-3000:]
    return [json.loads(path.read_text()) for path in paths]


def read_by_ranks(folder, reading, **options):
    return found_by_ranks(
        folder, run_ranks({"data_dir": str(folder / "data"), "reading": reading, **options})
    )


def delivered(ranks, stop=None):
    """Return the valid (trajectory, frame) of all ranks."""
    batches = [batch for rank in ranks for batch in rank["batches"][:stop]]
    return sorted((n, f) for batch in batches for step in batch for n, f, valid in step if valid)


#: Ways of reading that need nothing but torch: reading, num_workers, start method.
PLAIN = [("plain", 0, "fork"), ("plain", 2, "spawn"), ("plain", 2, "forkserver")]
LIVE = [("prefetch", 0, "fork"), ("loader", 2, "fork")]
REFRESHED = [("prefetch", 0, "fork", 0.0), ("loader", 2, "fork", 0.01)]


@pytest.fixture(scope="module")
def by_torch(tmp_path_factory):
    """Results of all ranks for the ways above, from one start of torchrun."""
    folders = {way: tmp_path_factory.mktemp("ranks") for way in PLAIN + LIVE + REFRESHED}
    names = ("reading", "num_workers", "start_method", "refresh_s")
    run = run_ranks(
        *(
            {"data_dir": str(folder / "data"), **dict(zip(names, way, strict=False))}
            for way, folder in folders.items()
        )
    )
    return lambda way: found_by_ranks(folders[way], run)


@pytest.mark.parametrize("way", PLAIN, ids=lambda way: way[2])
def test_ranks_under_torchrun_share_the_data_with_any_worker_start_method(by_torch, way):
    ranks = by_torch(way)
    assert [rank["error"] for rank in ranks] == [None, None]
    assert len(ranks[0]["batches"]) == len(ranks[1]["batches"])
    assert delivered(ranks) == sorted(3 * ALL)
    assert 0 < len(delivered(ranks[:1])) < len(ALL) * 3


@pytest.mark.parametrize("way", LIVE + REFRESHED, ids=lambda way: way[0])
def test_rank_0_decides_beside_live_writers(by_torch, way):
    ranks = by_torch(way)
    assert [rank["error"] for rank in ranks] == [None, None]
    assert len(ranks[0]["batches"]) == len(ranks[1]["batches"])
    counts = {}
    for frame in delivered(ranks):
        counts[frame] = counts.get(frame, 0) + 1
    assert all(counts[frame] == 3 for frame in ALL)  # of the first pass on
    assert max(counts.values()) == 3
    # later passes have data that were written during the first pass
    assert max(number for number, _ in counts) >= 20
    whole = {
        number: {count for (n, _), count in counts.items() if n == number} for number, _ in counts
    }
    # A pass has all of a trajectory, or nothing of it.
    assert all(len(actual) == 1 for actual in whole.values())


@needs("accelerate")
@pytest.mark.parametrize(
    ("reading", "shard", "num_workers", "start_method"),
    [
        ("accelerate", "auto", 0, "fork"),
        ("accelerate", "auto", 2, "fork"),
        ("accelerate", "auto", 1, "spawn"),
        ("accelerate", "own", 0, "fork"),
        ("accelerate-shard", "auto", 0, "fork"),
        ("accelerate-shard", "own", 0, "fork"),
    ],
)
def test_accelerate_that_splits_a_sharded_dataset_raises_with_advice(
    tmp_path, reading, shard, num_workers, start_method
):
    options = {"num_workers": num_workers, "start_method": start_method}
    ranks = read_by_ranks(tmp_path, reading, shard=shard, as_dict=True, **options)
    assert "shard='none' and as_dict=True" in ranks[0]["error"]


@needs("accelerate")
@pytest.mark.parametrize(
    ("reading", "shard", "as_dict"),
    [
        ("accelerate", "none", True),
        ("accelerate-shard", "none", True),
        ("accelerate-loader", "auto", False),
    ],
)
def test_accelerate_dispatches_an_unsharded_dataset_and_leaves_the_loader_alone(
    tmp_path, reading, shard, as_dict
):
    ranks = read_by_ranks(tmp_path, reading, shard=shard, as_dict=as_dict)
    assert [rank["error"] for rank in ranks] == [None, None]
    if reading == "accelerate-shard":  # accelerate fills its last batches with the first batches
        assert set(delivered(ranks)) == set(ALL) and len(delivered(ranks)) >= 3 * len(ALL)
    else:
        assert delivered(ranks) == sorted(3 * ALL)


@needs("lightning")
@pytest.mark.parametrize("num_workers", [0, 2])
def test_lightning_fabric_leaves_the_loader_alone(tmp_path, num_workers):
    ranks = read_by_ranks(tmp_path, "fabric", num_workers=num_workers)
    assert [rank["error"] for rank in ranks] == [None, None]
    assert delivered(ranks) == sorted(3 * ALL)


@needs("torchdata")
@pytest.mark.parametrize(
    ("num_workers", "lives_on"), [(0, False), (1, False), (2, False), (1, True), (2, True)]
)
def test_a_stateful_data_loader_resumes_at_its_position(tmp_path, num_workers, lives_on):
    from torchdata.stateful_dataloader import StatefulDataLoader

    record(tmp_path, LENGTHS)

    def loader():
        dataset = RolloutDataset(tmp_path, 4, 2, True, device="cpu", num_transitions_per_env=2)
        return StatefulDataLoader(
            dataset, batch_size=None, num_workers=num_workers, persistent_workers=lives_on
        )

    def values(batches):
        return [batch.observation.tolist() for batch in batches]

    expected = values(loader())
    first, batches = loader(), []
    for batch in first:
        batches.append(batch)
        if len(batches) == 5:
            state = (
                json.loads(json.dumps(first.state_dict(), default=repr))
                if num_workers == 0
                else first.state_dict()
            )
            break
    second = loader()
    second.load_state_dict(state)
    assert values(batches) + values(second) == expected
    following = list(second)  # the next epoch, in another order
    assert (
        sum(int(batch.valid.sum()) for batch in following) == 2 * len(ALL)
        and values(following) != expected
    )


def test_batches_as_dicts_have_only_tensors(tmp_path):
    record(tmp_path, LENGTHS)
    item = RolloutDataset(tmp_path, 4, device="cpu", num_transitions_per_env=2).get_batch(2)
    dataset = RolloutDataset(tmp_path, 4, device="cpu", num_transitions_per_env=2, as_dict=True)
    batch = dataset.get_batch(2)
    assert all(isinstance(value, torch.Tensor) for value in batch.values())
    assert set(batch) == {
        name for name, value in item._asdict().items() if isinstance(value, torch.Tensor)
    }
    assert all(torch.equal(value, getattr(item, name)) for name, value in batch.items())
    collated = torch.utils.data.default_collate([batch, dataset.get_batch(2)])
    assert collated["observation"].shape == (2, 2, 4, 3)
    observation, _, _, done, info = dataset.get_transition_batch()
    assert info["time_outs"].shape == done.shape == (4,)
    assert info["transition"]["observation"] is observation
