"""One order for any number of ranks and workers: the stream of all envs does not depend on how it
is read and resumed.
"""

from __future__ import annotations

import json
import multiprocessing
import pickle
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rollout_data
from rollout_data import RolloutDataset
from rollout_data.blocks.block import Block
from rollout_data.blocks.block_header import FRAGMENT_DTYPE
from rollout_data.sources.processes.listing_messages import ListingMessages
from rollout_data.sources.processes.process_group import Shard, agreement_of
from storage.errors import RolloutDataError, UsageError
from tests.files.recorded import record

NUM_ENVS = 12  # of all ranks: 1, 2, 3 and 4 ranks have equal shares


def opened(data_dir, shard=(0, 1), num_envs=NUM_ENVS, **options):
    number, total = shard
    share = (number + 1) * num_envs // total - number * num_envs // total
    return RolloutDataset(data_dir, share, device="cpu", shard=shard, **options)


def seen(batch):
    """Return the content of a batch env by env: lists of (trajectory, frame, valid, is_first,
    is_last).
    """
    columns = [
        batch.observation[..., 0],
        batch.observation[..., 1],
        batch.valid,
        batch.is_first,
        batch.is_last,
    ]
    return torch.stack([column.long() for column in columns], -1).transpose(0, 1).tolist()


def next_of_all(ranks, num_steps):
    """Join the next batch of every rank; None when all ranks end together."""
    batches = []
    for rank in ranks:
        try:
            batches.append(rank.get_batch(num_steps))
        except StopIteration:
            batches.append(None)
    if None in batches:
        assert batches == [None] * len(ranks)  # all ranks have the same number of batches
        return None
    assert [batch.stream_id for batch in batches] == list(range(len(ranks)))
    return [env for batch in batches for env in seen(batch)]


lengths = st.lists(st.integers(1, 9), min_size=NUM_ENVS, max_size=30)


@settings(max_examples=30, deadline=None)
@given(
    lengths=lengths,
    num_steps=st.integers(1, 6),
    shuffle=st.booleans(),
    loops=st.integers(1, 2),
    drop=st.booleans(),
)
def test_the_batches_of_all_ranks_are_one_stream(
    tmp_path_factory, lengths, num_steps, shuffle, loops, drop
):
    data_dir = tmp_path_factory.mktemp("data")
    record(data_dir, lengths, num_envs=3)
    options = {
        "dataset_loops": loops, "random_shuffle_traj_order": shuffle, "starting_frame_range": (0, 3), "drop_last": drop
    }  # fmt: skip
    runs = {
        total: [opened(data_dir, (rank, total), **options) for rank in range(total)]
        for total in (1, 2, 3, 4)
    }
    while True:
        actual = {total: next_of_all(ranks, num_steps) for total, ranks in runs.items()}
        assert all(batch == actual[1] for batch in actual.values())
        if actual[1] is None:
            break
    dropped = {
        total: sum(rank.num_dropped_frames for rank in ranks) for total, ranks in runs.items()
    }
    assert len(set(dropped.values())) == 1


class LiveFolder:
    """A folder to which trajectories are added, and from which delivered trajectories are
    deleted.
    """

    def __init__(self, data_dir):
        self.data_dir, self.count, self.blocks = data_dir, 0, {}
        self.add([4] * NUM_ENVS)

    def add(self, new_lengths):
        """Record trajectories, each in its own block, with a new writer."""
        before = set(self.data_dir.glob("*.h5"))
        for length in new_lengths:
            record(self.data_dir, [length], first_number=self.count)
            (path,) = set(self.data_dir.glob("*.h5")) - before
            before.add(path)
            self.blocks[self.count] = path
            self.count += 1

    def delete(self, numbers):
        for number in numbers:
            self.blocks.pop(number).unlink()


@pytest.mark.each_value
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("refresh_s", [None, 0.0])
@pytest.mark.parametrize(("shuffle", "latest"), [(False, 0), (True, 0), (True, NUM_ENVS)])
def test_resuming_with_other_numbers_of_ranks_equals_the_uninterrupted_sequence_beside_writers(
    tmp_path, seed, shuffle, latest, refresh_s
):
    chance = random.Random(seed)
    num_steps, folder = chance.randint(1, 5), LiveFolder(tmp_path)
    options = {
        "dataset_loops": 0, "random_shuffle_traj_order": shuffle, "starting_frame_range": (0, 2),
        "keep_latest_n_trajs": latest, "seed": 3, "refresh_s": refresh_s,
    }  # fmt: skip
    uninterrupted = [opened(folder.data_dir, **options)]
    ranks = [opened(folder.data_dir, (rank, 3), **options) for rank in range(3)]
    begun, delivered, number_of_pass, age = set(), set(), 0, 0
    for _ in range(20):
        expected = next_of_all(uninterrupted, num_steps)
        assert next_of_all(ranks, num_steps) == expected
        assert all(valid for env in expected for *_, valid, _, _ in env)
        age += 1
        if number_of_pass != (number_of_pass := uninterrupted[0].state_dict()["pass"]):
            begun, delivered, age = set(), set(), 0
        elif age > 1:  # trajectories that begin now were assigned in this pass
            begun |= {number for env in expected for number, _, _, is_first, _ in env if is_first}
            delivered |= begun & {
                number for env in expected for number, _, _, _, is_last in env if is_last
            }
        event = chance.choice(["", "add", "delete", "resume", "resume"])
        if event == "add":
            folder.add([chance.randint(1, 6) for _ in range(chance.randint(1, 3))])
        elif event == "delete":
            state = ranks[0].state_dict()
            writers = {path.name.split("_")[1]: number for number, path in folder.blocks.items()}
            playing = {writers[state["writers"][writer]] for writer, _ in state["trajectory"]}
            deleted = sorted((delivered & set(folder.blocks)) - playing)[:2]
            if len(folder.blocks) - len(deleted) >= NUM_ENVS:
                folder.delete(deleted)
        elif event == "resume":
            states = [json.loads(json.dumps(rank.state_dict())) for rank in ranks]
            assert all(state == states[0] for state in states)
            total = chance.randint(1, 4)
            ranks = [opened(folder.data_dir, (rank, total), **options) for rank in range(total)]
            for rank in ranks:
                rank.load_state_dict(states[0])


def test_a_state_determines_the_uneven_num_envs_of_each_rank(tmp_path):
    record(tmp_path, [5] * 20)
    whole = [opened(tmp_path, num_envs=10)]
    next_of_all(whole, 3)
    state = whole[0].state_dict()
    ranks = [opened(tmp_path, (rank, 4), num_envs=10) for rank in range(4)]
    for rank in ranks:
        rank.load_state_dict(state)
    assert [rank.num_envs for rank in ranks] == [2, 3, 2, 3]
    assert next_of_all(ranks, 4) == next_of_all(whole, 4)
    with pytest.raises(
        UsageError, match=r"it has num_envs=10 \(2 for this rank\), and this dataset has num_envs=3"
    ):
        RolloutDataset(tmp_path, 3, device="cpu", shard=(0, 4)).load_state_dict(state)


@pytest.mark.each_value
@pytest.mark.parametrize("context", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize("plain", [True, False], ids=["DataLoader", "loader"])
def test_batches_do_not_depend_on_the_number_or_start_method_of_workers(tmp_path, context, plain):
    record(tmp_path, [3, 4, 5, 6, 2, 7, 1] * 4)
    options = {"num_transitions_per_env": 2, "random_shuffle_traj_order": True, "dataset_loops": 2}
    expected = [seen(batch) for batch in opened(tmp_path, **options)]
    for total, num_workers in [(1, 2), (2, 1), (2, 3), (3, 2)] if context == "fork" else [(1, 2)]:
        ranks = []
        for rank in range(total):
            dataset = opened(tmp_path, (rank, total), **options)
            with_workers = {"num_workers": num_workers, "multiprocessing_context": context}
            if plain:
                batches = torch.utils.data.DataLoader(dataset, batch_size=None, **with_workers)
            else:
                batches = rollout_data.loader(dataset, **with_workers)
            ranks.append([seen(batch) for batch in batches])
        assert len({len(batches) for batches in ranks}) == 1
        assert [
            [env for batch in side for env in batch] for side in zip(*ranks, strict=True)
        ] == expected


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_the_state_of_a_loader_counts_delivered_batches_and_resumes_with_any_num_workers(
    tmp_path, num_workers
):
    folder = LiveFolder(tmp_path)
    folder.add([3, 6, 2])
    options = {"num_transitions_per_env": 2, "random_shuffle_traj_order": True, "dataset_loops": 6}
    direct, read = opened(tmp_path, **options), opened(tmp_path, **options)
    loader = rollout_data.loader(read, num_workers)
    for number, batch in enumerate(loader, 1):
        assert seen(batch) == seen(direct.get_batch(2))
        assert loader.state_dict() == direct.state_dict()
        if number == 2:
            # Both read it from the next pass on, however far workers have read ahead.
            folder.add([5, 5])
        if number == 9:
            break
    state = json.loads(json.dumps(loader.state_dict()))
    other = rollout_data.loader(opened(tmp_path, **options), {0: 3, 1: 0, 3: 2}[num_workers])
    other.load_state_dict(state)
    rest = [seen(batch) for batch in other]
    assert rest == [seen(batch) for batch in iter_rest(direct)] and len(rest) > 3


def iter_rest(dataset):
    while True:
        try:
            yield dataset.get_batch(2)
        except StopIteration:
            return


def test_a_new_iteration_of_a_loader_ends_the_older_iteration(tmp_path):
    record(tmp_path, [3] * 9)
    dataset = RolloutDataset(tmp_path, 3, 4, device="cpu", num_transitions_per_env=2)
    expected = [batch.observation.tolist() for batch in dataset]
    batches = rollout_data.loader(dataset, num_workers=1)
    older, another = iter(batches), iter(batches)
    next(older), next(another)
    newer = iter(batches)
    actual = [next(newer).observation.tolist()]
    another.close()
    actual += [next(newer).observation.tolist()]
    with pytest.raises(UsageError, match="newer"):
        next(older)
    assert actual + [batch.observation.tolist() for batch in newer] == expected


# torch reports a killed worker by a signal at any time, sometimes within this call.
@pytest.mark.soak
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_a_killed_worker_raises_one_error_and_the_next_batch_follows(tmp_path, context):
    record(tmp_path, [5, 3, 4, 6] * 400)
    command = [sys.executable, "-m", "tests.files.killed_worker", str(tmp_path), context]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=170
    )
    assert "the next batch followed" in done.stdout, done.stderr


def test_several_workers_beside_a_live_writer_deliver_each_frame_once(tmp_path):
    folder = LiveFolder(tmp_path)
    dataset = opened(tmp_path, num_transitions_per_env=1, dataset_loops=2, num_envs=4)
    frames = []
    for number, batch in enumerate(
        torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=3)
    ):
        frames += (
            [(n, f) for env in seen(batch) for n, f, valid, _, _ in env if valid]
            if number < 12
            else []
        )
        if number < 8:
            folder.add([2])
    assert sorted(frames) == [(number, frame) for number in range(NUM_ENVS) for frame in range(4)]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_several_ranks_beside_a_live_writer_need_rollout_data_loader(tmp_path, num_ranks):
    folder = LiveFolder(tmp_path)
    dataset = opened(
        tmp_path, (1 % num_ranks, num_ranks), num_envs=2, num_transitions_per_env=1, dataset_loops=4
    )
    batches = iter(torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=1))
    next(batches)
    folder.add([2])
    if num_ranks == 1:
        assert len(list(batches)) > 3
    else:
        with pytest.raises(
            UsageError,
            match=r" changed before this pass\. .* several ranks\. Use rollout_data\.loader\(",
        ):
            list(batches)


@pytest.mark.parametrize("even", ["pad", "drop", "none"])
def test_even_decides_whether_ranks_end_together(tmp_path, even):
    record(tmp_path, [4, 4, 4, 10])
    ranks = [
        opened(tmp_path, (rank, 2), num_envs=2, num_transitions_per_env=2, even=even)
        for rank in range(2)
    ]
    numbers = [len(list(rank)) for rank in ranks]
    # Rank 0 plays trajectories of 4 and 4 frames, rank 1 of 4 and 10.
    assert numbers == {"pad": [7, 7], "drop": [4, 4], "none": [4, 7]}[even]


def test_reset_of_some_envs_raises_with_several_ranks(tmp_path):
    record(tmp_path, [5] * 12)
    dataset = opened(tmp_path, (1, 2), num_envs=4)
    dataset.get_batch(2)
    with pytest.raises(UsageError, match=r"single envs cannot advance.*ranks: 2, .*shard='none'"):
        dataset.reset([0])
    dataset.reset()
    assert dataset.get_batch(1).observation[0, :, 1].tolist() == [0, 0]


@pytest.mark.parametrize("shard", ["all", (2, 2), (-1, 2), (0,), 3, None])
def test_an_invalid_shard_raises(tmp_path, shard):
    with pytest.raises(UsageError, match="expected 'auto', 'none' or"):
        RolloutDataset(tmp_path, 1, shard=shard)


def look_in_rank(rank, meeting, answers):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=2
    )

    def look():
        raise ZeroDivisionError("no folder is like this")

    try:
        agreement_of(Shard(rank, 2))(0, look)
    except RolloutDataError as problem:
        answers.put(str(problem))


def test_an_error_of_the_scan_of_rank_0_reaches_all_ranks(tmp_path):
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    ranks = [
        context.Process(target=look_in_rank, args=(rank, tmp_path / "meet", answers))
        for rank in range(2)
    ]
    for rank in ranks:
        rank.start()
    try:
        results = [answers.get(timeout=150) for _ in ranks]
    finally:
        for rank in ranks:
            rank.join(10)
            rank.kill()
    assert results[0] == results[1] and "ZeroDivisionError: no folder is like this" in results[0]


def test_processes_exchange_only_new_blocks():
    chance, blocks = random.Random(0), []
    sender, receiver, last = ListingMessages(), ListingMessages(), None
    for number in range(200):
        blocks = [block for block in blocks if chance.random() < 0.9]
        fragments = np.zeros(1000, FRAGMENT_DTYPE)
        blocks += [
            Block(Path(f"{number}_{item}.h5"), "w", item, fragments, {}, 9, number)
            for item in range(2)
        ]
        chance.shuffle(blocks) if number % 20 == 0 else None
        listing = (
            last
            if number % 7 == 3
            else ("blocks", None, len(blocks), [(0, block) for block in blocks])
        )
        message = sender.shorten(listing)
        assert sender.restore(message) is (None if listing is last else listing)
        stored = pickle.dumps(message)
        restored = receiver.restore(pickle.loads(stored))
        assert (restored is None) == (listing is last)
        assert listing is last or [block.path for _, block in restored[3]] == [
            block.path for _, block in listing[3]
        ]
        assert len(stored) < 5 * fragments.nbytes  # two blocks are new, or four
        last = listing
