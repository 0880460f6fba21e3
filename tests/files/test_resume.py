"""Resuming at any point equals an uninterrupted stream, also if files were added."""

from __future__ import annotations

import copy
import json
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rollout_data
from rollout_data import RolloutDataset
from storage.errors import UsageError
from tests.files.recorded import drain, record


def same(first, second):
    return all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
        for a, b in zip(first, second, strict=True)
    )


def four_trajectories(data_dir):
    """Record four trajectories. Return a function that opens them, and the number of batches."""
    record(data_dir, [5, 9, 7, 3])

    def opened():
        return RolloutDataset(data_dir, 2, device="cpu", num_transitions_per_env=2)

    return opened, drain(opened(), 2)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 8), min_size=1, max_size=8),
    calls=st.lists(st.integers(1, 5), min_size=1, max_size=6),
    after=st.integers(1, 6),
    grows=st.booleans(),
    cache=st.sampled_from(["none", "ram"]),
    shuffle=st.booleans(),
    loops=st.sampled_from([1, 2, 0]),
)
def test_resume_at_any_point_equals_never_having_stopped(
    tmp_path_factory, lengths, calls, after, grows, cache, shuffle, loops
):
    data_dir = tmp_path_factory.mktemp("data")
    record(data_dir, lengths, with_final=True)

    def opened():
        return RolloutDataset(
            data_dir,
            min(2, len(lengths)),
            loops,
            shuffle,
            starting_frame_range=(0, 3),
            device="cpu",
            cache=cache,
        )

    item = opened()
    for num_steps in calls:
        try:
            item.get_batch(num_steps)
        except StopIteration:
            break
    state = json.loads(json.dumps(item.state_dict()))
    other = opened()
    if grows:
        # Data that were added after the state was saved must not change the current pass.
        others_first_pass = sum(lengths) if loops != 1 else 10**9
        record(data_dir, [3, 1], first_number=50)
    other.load_state_dict(state)
    assert other.state_dict() == state
    delivered = 0
    for _ in range(6):
        try:
            expected = item.get_batch(after)
        except StopIteration:
            with pytest.raises(StopIteration):
                other.get_batch(after)
            return
        assert same(expected, other.get_batch(after))
        delivered += after
        if grows and delivered >= others_first_pass:
            return


def test_an_interrupted_epoch_continues_through_the_data_loader(tmp_path):
    record(tmp_path, [5, 6, 7])

    def opened():
        return RolloutDataset(tmp_path, 2, device="cpu", num_transitions_per_env=2)

    whole = list(opened())
    first = opened()
    iterator = iter(first)
    begun = [next(iterator), next(iterator)]
    second = opened()
    second.load_state_dict(first.state_dict())
    rest = list(torch.utils.data.DataLoader(second, batch_size=None))
    assert len(begun) + len(rest) == len(whole)
    assert all(same(a, b) for a, b in zip(begun + rest, whole, strict=True))
    assert len(list(second)) == len(whole)  # the next epoch starts from the beginning


def test_the_state_of_an_unread_dataset_can_be_loaded(tmp_path):
    record(tmp_path, [5, 6])
    dataset = RolloutDataset(tmp_path, 1, device="cpu")
    state = dataset.state_dict()
    dataset.get_batch(3)
    dataset.load_state_dict(state)
    assert dataset.get_batch(3).observation[:, 0, :2].tolist() == [[0, 0], [0, 1], [0, 2]]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"num_envs": 3}, "it has num_envs=2, and this dataset has num_envs=3"),
        ({"seed": 1}, "it has seed=0, and this dataset has seed=1"),
        ({"dataset_loops": 2}, "it has dataset_loops=1, and this dataset has dataset_loops=2"),
    ],
)
def test_a_state_of_other_settings_raises(tmp_path, change, text):
    record(tmp_path, [5, 6, 7])
    first = RolloutDataset(tmp_path, 2, device="cpu")
    first.get_batch(1)
    arguments = {"num_envs": 2, **change}
    with pytest.raises(UsageError, match=text):
        RolloutDataset(tmp_path, device="cpu", **arguments).load_state_dict(first.state_dict())


def test_a_state_whose_trajectories_are_all_deleted_raises(tmp_path):
    record(tmp_path, [5, 6], flush_every=1)
    dataset = RolloutDataset(tmp_path, 1, device="cpu")
    dataset.get_batch(1)
    state = dataset.state_dict()
    for path in tmp_path.glob("rollout_*.h5"):
        path.unlink()
    record(tmp_path, [5, 6])  # by another writer, for the next pass
    with pytest.raises(UsageError, match=r"trajectory 0 of writer .* no longer exists"):
        RolloutDataset(tmp_path, 1, device="cpu").load_state_dict(state)


@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_workers_resume_a_state_together_and_state_dict_of_the_dataset_raises(
    tmp_path, num_workers
):
    opened, plain = four_trajectories(tmp_path)
    dataset = opened()
    dataset.get_batch(2)
    dataset.load_state_dict(dataset.state_dict())
    loader = torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=num_workers)
    assert all(same(a, b) for a, b in zip(loader, plain[1:], strict=True))
    with pytest.raises(
        UsageError, match=r"workers of a DataLoader read .*rollout_data\.loader\(dataset"
    ):
        dataset.state_dict()
    dataset.reset()
    assert dataset.state_dict()["epoch"] == 1


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_every_epoch_has_its_own_order_and_set_epoch_reaches_living_workers(
    tmp_path, num_workers, persistent
):
    record(tmp_path, [1] * 12)

    def opened():
        return RolloutDataset(
            tmp_path, 2, random_shuffle_traj_order=True, device="cpu", num_transitions_per_env=2
        )

    def order(batches):
        return [int(value) for batch in batches for value in batch.observation[..., 0].T.flatten()]

    expected = []
    for epoch in range(5):
        dataset = opened()
        dataset.set_epoch(epoch)
        expected.append(order(dataset))
    assert len({tuple(item) for item in expected}) == 5
    dataset = opened()
    options = {"num_workers": num_workers, "persistent_workers": persistent and num_workers > 0}
    loader = torch.utils.data.DataLoader(dataset, batch_size=None, **options)
    result = []
    for _ in range(2):
        torch.manual_seed(0)  # the loader draws its own seed from this
        result.append(order(loader))
    assert result == expected[:2]
    dataset.set_epoch(3)
    assert [order(loader) for _ in range(2)] == expected[3:]
    dataset.set_epoch(0)
    assert [order(dataset.prefetch()) for _ in range(3)] == expected[:3]
    assert order(dataset) == expected[3]


def test_a_state_of_the_end_of_an_epoch_starts_the_next_epoch(tmp_path):
    record(tmp_path, [3, 4, 5, 2])

    def opened():
        return RolloutDataset(
            tmp_path, 2, random_shuffle_traj_order=True, device="cpu", num_transitions_per_env=2
        )

    first = opened()
    assert list(first)
    state, second = first.state_dict(), list(first)
    for num_workers in (0, 2):
        dataset = opened()
        dataset.load_state_dict(state)
        loader = torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=num_workers)
        assert all(same(a, b) for a, b in zip(loader, second, strict=True))
        assert len(list(loader)) > 0
    dataset = opened()
    dataset.load_state_dict(state)
    assert all(same(a, b) for a, b in zip(dataset.prefetch(), second, strict=True))
    dataset.load_state_dict(state)
    assert all(same(a, b) for a, b in zip(rollout_data.loader(dataset, 2), second, strict=True))


def test_a_pickled_dataset_starts_from_the_beginning(tmp_path):
    record(tmp_path, [5, 6])
    dataset = RolloutDataset(tmp_path, 1, device="cpu")
    dataset.get_batch(3)
    for other in (pickle.loads(pickle.dumps(dataset)), copy.deepcopy(dataset)):
        assert other.get_batch(1).observation[0, 0, 1] == 0
    assert dataset.get_batch(1).observation[0, 0, 1] == 3


@pytest.mark.each_value
@pytest.mark.parametrize("copied", ["", "deepcopy", "pickle"])
@pytest.mark.parametrize(("num_workers", "persistent"), [(0, False), (1, False), (1, True)])
def test_only_the_first_epoch_of_a_loader_continues_a_state(
    tmp_path, num_workers, persistent, copied
):
    opened, plain = four_trajectories(tmp_path)
    first = opened()
    for _ in range(3):
        first.get_batch(2)
    dataset = opened()
    dataset.load_state_dict(first.state_dict())
    dataset = {
        "": lambda x: x,
        "deepcopy": copy.deepcopy,
        "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    }[copied](dataset)
    options = {"num_workers": num_workers, "persistent_workers": persistent}
    loader = torch.utils.data.DataLoader(dataset, batch_size=None, **options)
    for expected in (plain[3:], plain, plain):
        batches = list(loader)
        assert len(batches) == len(expected)
        assert all(same(a, b) for a, b in zip(batches, expected, strict=True))
    del loader
    assert len(list(dataset)) == len(plain)


@pytest.mark.parametrize("num_read", [0, 1, 4])
def test_prefetch_delivers_the_same_batches_and_its_state_counts_delivered_batches(
    tmp_path, num_read
):
    opened, plain = four_trajectories(tmp_path)
    dataset = opened()
    prefetched = dataset.prefetch(3)
    for number, batch in enumerate(prefetched):
        assert same(batch, plain[number])
        if number + 1 == num_read:
            state = prefetched.state_dict()
            break
    else:
        state = opened().state_dict()
    other = opened()
    other.load_state_dict(state)
    rest = drain(other, 2)
    assert len(rest) == len(plain) - num_read
    assert all(same(a, b) for a, b in zip(rest, plain[num_read:], strict=True))
    if num_read:
        assert same(dataset.get_batch(2), plain[num_read])  # leaving the loop resets the dataset


@pytest.mark.parametrize("ending", ["close", "drop", "exhaust"])
def test_one_thread_at_a_time_reads_ahead_of_a_dataset(tmp_path, ending):
    opened, plain = four_trajectories(tmp_path)
    dataset = opened()
    first = dataset.prefetch(3)
    batches = iter(first)
    assert same(next(batches), plain[0])
    for other in (dataset.prefetch(), first):
        with pytest.raises(UsageError, match="another thread already reads ahead"):
            next(iter(other))
    copied = copy.deepcopy(dataset)  # belongs to no dataset
    assert same(next(iter(copied.prefetch())), plain[0])
    assert same(next(batches), plain[1])
    num_read = 2
    if ending == "close":
        first.close()
    elif ending == "drop":
        del batches
    else:
        assert len(list(batches)) == len(plain) - num_read
        num_read = 0  # the next iteration is the next epoch
    rest = list(dataset.prefetch())
    assert num_read + len(rest) == len(plain)
    assert all(same(a, b) for a, b in zip(rest, plain[num_read:], strict=True))
    if ending == "close":  # a closed iterator stays closed, and does not change the dataset
        second = dataset.prefetch()
        assert list(batches) == [] and len(list(second)) == len(plain)


@pytest.mark.parametrize(
    "change",
    [
        {"frame": [10**6, 0]}, {"frame": [-5, 0]}, {"frame": [0]}, {"position": 3}, {"dealt": 10**6}, {"dealt": [1]},
        {"bounds": None}, {"bounds": [[0, "x", 0]]}, {"skip": 1}, {"epoch": -1}, {"epoch": None},
        {"pass": -1}, {"pass": 10**9},
        {"writers": []}, {"settings": None}, {"frame": None}, {"shard": None}, {"trajectory": [[0, 0]]},
        {"version": 2}, {"upto": {}}, {"num_in_pass": 1}, {"dealt": ["0", "x", 0]},
    ],
)  # fmt: skip
def test_a_forged_state_raises(tmp_path, change):
    record(tmp_path, [5, 6, 7])
    dataset = RolloutDataset(tmp_path, 2, device="cpu")
    dataset.get_batch(2)
    with pytest.raises(UsageError, match=r"^RolloutDataset\.load_state_dict: "):
        dataset.load_state_dict({**dataset.state_dict(), **change})


def test_a_loaded_state_reaches_persistent_workers_and_copies(tmp_path):
    opened, plain = four_trajectories(tmp_path)
    dataset, other = opened(), opened()
    other.get_batch(2)
    state = other.state_dict()
    loader = torch.utils.data.DataLoader(
        dataset, batch_size=None, num_workers=2, persistent_workers=True
    )
    assert len(list(loader)) == len(plain)
    dataset.load_state_dict(state)
    assert all(same(a, b) for a, b in zip(loader, plain[1:], strict=True))
    assert len(list(loader)) == len(plain)
    dataset.load_state_dict(state)
    copies = [copy.deepcopy(dataset) for _ in range(3)]
    read = [list(copies[0]), list(copies[1].prefetch()), drain(copies[2], 2)]
    for batches in read:
        assert all(same(a, b) for a, b in zip(batches, plain[1:], strict=True))


def test_a_state_has_the_number_of_the_next_epoch(tmp_path):
    record(tmp_path, [1] * 8)

    def opened():
        return RolloutDataset(tmp_path, 1, random_shuffle_traj_order=True, device="cpu")

    def order(dataset):
        return [int(batch.observation[0, 0]) for batch in dataset]

    dataset = opened()
    epochs = [order(dataset) for _ in range(4)]
    for choose, expected in ((lambda item: None, 1), (lambda item: item.set_epoch(3), 3)):
        first, second = opened(), opened()
        assert order(first) == epochs[0]
        choose(first)
        for state in (first.state_dict(), copy.deepcopy(first).state_dict()):
            second.load_state_dict(state)
            assert order(second) == epochs[expected]
        assert order(first) == epochs[expected]
