"""Windows through DataLoader workers, through our loader, and in mixtures."""

from __future__ import annotations

import pickle
from itertools import chain

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Subset

from rollout_data import WindowDataset, WindowLoader, WindowMixture
from rollout_data.windows.worker_batches import NUM_PLACES
from storage.core.fields import flatten
from storage.errors import DataFileError, UsageError
from tests.files import coded, recorded
from tests.formats.folders import NaiveFolder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("windows")
    recorded.record(path, [5, 17, 9, 30, 12], num_envs=2, with_final=True, flush_every=4)
    return path


@pytest.fixture
def dataset(folder):
    return WindowDataset(
        folder, 4, padding="zero", delta={"action": [-1, 3]}, next_observations=True
    )


def check_same(ours, theirs):
    ours, theirs = flatten(ours), flatten(theirs)
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert ours[name].dtype == theirs[name].dtype and torch.equal(ours[name], theirs[name]), (
            name
        )


@pytest.mark.parametrize(
    ("num_workers", "context"), [(0, None), (1, "fork"), (2, "fork"), (1, "spawn")]
)
def test_a_data_loader_yields_the_batches_of_the_dataset(dataset, num_workers, context):
    loader = DataLoader(
        dataset,
        7,
        collate_fn=dataset.collate,
        num_workers=num_workers,
        multiprocessing_context=context,
    )
    kept = list(loader)  # more batches at once than places in shared memory
    assert len(kept) == -(-len(dataset) // 7) > 0
    for number, batch in enumerate(kept):
        check_same(
            batch, dataset.__getitems__(list(range(len(dataset)))[7 * number : 7 * number + 7])
        )


def test_batches_of_workers_are_valid_while_they_are_referenced(dataset):
    class Often(torch.utils.data.Sampler):
        def __iter__(self):
            return iter([[k % len(dataset), 3] for k in range(4 * NUM_PLACES)])

        def __len__(self):
            return 4 * NUM_PLACES

    loader = DataLoader(dataset, batch_sampler=Often(), collate_fn=dataset.collate, num_workers=1)
    held = [(k, batch) for k, batch in enumerate(loader) if k % 3 == 0]
    rows = [(k, batch["observation"][0].numpy()) for k, batch in enumerate(loader) if k % 2]
    for k, batch in held:
        check_same(batch, dataset.__getitems__([k % len(dataset), 3]))
    for k, row in rows:
        assert (row == dataset[k % len(dataset)]["observation"].numpy()).all()


def test_workers_read_windows_of_coded_components(tmp_path):
    dataset = WindowDataset(coded.record(tmp_path), 3, stride=5)
    loader = DataLoader(dataset, 4, collate_fn=dataset.collate, num_workers=1)
    for number, batch in enumerate(loader):
        check_same(batch, dataset.__getitems__(range(len(dataset))[4 * number : 4 * number + 4]))


def test_a_subset_and_a_list_of_windows_collate(dataset):
    chosen = [3, 0, 11]
    (batch,) = DataLoader(Subset(dataset, chosen), 3, collate_fn=dataset.collate)
    check_same(batch, dataset.__getitems__(chosen))
    check_same(dataset.collate([dataset[k] for k in chosen]), dataset.__getitems__(chosen))
    with pytest.raises(UsageError, match="collate requires a batch or a list of windows"):
        dataset.collate([1, 2])


def test_a_pickled_dataset_keeps_the_snapshot_of_the_original(folder, tmp_path):
    recorded.record(tmp_path, [5, 6], writer_name="w")
    dataset = WindowDataset(tmp_path, 3)
    before = pickle.dumps(dataset)
    recorded.record(tmp_path, [7], writer_name="w")
    copy = pickle.loads(before)
    assert len(copy) == len(dataset) == 7 and len(WindowDataset(tmp_path, 3)) == 12
    check_same(copy.__getitems__([0, -1]), dataset.__getitems__([0, 6]))


def test_windows_are_indexed_like_a_list(dataset):
    check_same(dataset[-1], dataset[len(dataset) - 1])
    check_same(dataset[np.int64(3)], dataset[3])
    check_same(
        dataset.__getitems__(np.array([1, -2], np.int32)),
        dataset.__getitems__([1, len(dataset) - 2]),
    )
    assert dataset.__getitems__([])["observation"].shape == (0, 4, 3)
    for wrong in (len(dataset), -len(dataset) - 1):
        with pytest.raises(
            IndexError,
            match=f"WindowDataset: window must be an integer in .*, got {wrong}",
        ):
            dataset[wrong]
    with pytest.raises(UsageError):
        dataset[1.5]


def test_a_batch_belongs_to_the_caller(dataset):
    first = dataset.__getitems__([0, 1])
    copy = {name: value.clone() for name, value in flatten(first).items()}
    for value in flatten(dataset.__getitems__([0, 1])).values():
        value.zero_()
    assert all(torch.equal(value, copy[name]) for name, value in flatten(first).items())


def test_contiguous_fields_share_no_memory(folder):
    views, own = (WindowDataset(folder, 3, contiguous=flag) for flag in (False, True))
    check_same(views.__getitems__([1, 2]), own.__getitems__([1, 2]))
    assert all(value.is_contiguous() for value in flatten(own.__getitems__([1, 2])).values())


# Our loader


def numbers_of(loader):
    """Return the windows of each batch, identified by their first observation."""
    return [tuple(batch["observation"][:, 0, 2].tolist()) for batch in loader]


@pytest.fixture
def plain(folder):
    return WindowDataset(folder, 3)


def test_an_epoch_has_every_window_once_and_epochs_differ(plain):
    loader = WindowLoader(plain, 8, seed=3)
    first, second = numbers_of(loader), numbers_of(loader)
    everything = sorted(plain.__getitems__(range(len(plain)))["observation"][:, 0, 2].tolist())
    assert sorted(chain(*first)) == sorted(chain(*second)) == everything
    assert first != second and len(first) == len(loader) and loader.epoch == 2
    loader.set_epoch(0)
    assert numbers_of(loader) == first
    assert numbers_of(WindowLoader(plain, 8, seed=4)) != first


def test_without_shuffling_windows_are_in_order_and_drop_last_drops(plain):
    batches = list(WindowLoader(plain, 8, shuffle=False, drop_last=True))
    assert len(batches) == len(plain) // 8
    check_same(batches[1], plain.__getitems__(range(8, 16)))


@pytest.mark.parametrize("num_seen", [0, 1, 4])
def test_a_resumed_loader_repeats_and_skips_nothing(plain, num_seen):
    whole = WindowLoader(plain, 8, seed=5)
    expected = numbers_of(whole) + numbers_of(whole)
    loader = WindowLoader(plain, 8, seed=5)
    seen = []
    for _, batch in zip(range(num_seen), loader, strict=False):
        seen.append(tuple(batch["observation"][:, 0, 2].tolist()))
    state = loader.state_dict()
    assert state["position"] == 8 * num_seen
    again = WindowLoader(plain, 8, seed=5)
    again.load_state_dict(state)
    assert seen + numbers_of(again) + numbers_of(again) == expected
    with pytest.raises(UsageError, match="the state has seed=5, and this loader has seed=6"):
        WindowLoader(plain, 8, seed=6).load_state_dict(state)


def test_a_new_iteration_ends_the_older_iteration(plain):
    loader = WindowLoader(plain, 8, seed=5)
    with pytest.raises(UsageError, match="a newer iteration has begun"):
        list(zip(loader, loader, strict=True))
    assert loader.state_dict()["position"] == 16
    rest = numbers_of(loader)
    assert rest == numbers_of(WindowLoader(plain, 8, seed=5))[2:]
    old = iter(loader)
    next(old)
    loader.set_epoch(0)
    with pytest.raises(UsageError, match="the position of the loader was changed"):
        next(old)
    assert numbers_of(loader)[2:] == rest


def test_a_failure_reaches_the_consumer(tmp_path):
    chunk = NaiveFolder(tmp_path).chunk(0, 0, 8, done=True)
    loader = WindowLoader(WindowDataset(tmp_path, 2), 4)
    chunk.unlink()
    with pytest.raises(DataFileError, match=r"Trajector.* 0 .*cannot be read"):
        next(iter(loader))


# Mixtures


@pytest.fixture
def mixture(folder, tmp_path):
    recorded.record(tmp_path, [8, 3], first_number=50)
    return WindowMixture([WindowDataset(folder, 3), WindowDataset(tmp_path, 3)], weights=[1, 3])


def test_a_mixture_numbers_the_windows_of_its_members_consecutively(mixture):
    first, second = mixture.datasets
    assert len(mixture) == len(first) + len(second)
    chosen = [len(mixture) - 1, 0, len(first), 5, -2]
    expected = [second[-1], first[0], second[0], first[5], second[-2]]
    check_same(mixture.__getitems__(chosen), mixture.collate(expected))
    check_same(mixture[len(first) + 1], second[1])
    assert [part.tolist() for part in mixture.locate([0, len(first)])] == [[0, 1], [0, 0]]
    with pytest.raises(IndexError):
        mixture[len(mixture)]


def test_draws_follow_the_weights_and_are_uniform_within_a_member(mixture):
    num = 60_000
    drawn = mixture.draw(num, np.random.default_rng(0))
    sizes = [len(dataset) for dataset in mixture.datasets]
    share = np.repeat([0.25 / sizes[0], 0.75 / sizes[1]], sizes)
    counts = np.bincount(drawn, minlength=len(mixture))
    chi_square = ((counts - num * share) ** 2 / (num * share)).sum()
    degrees = len(mixture) - 1
    assert chi_square < degrees + 5 * np.sqrt(2 * degrees)


def test_loaders_accept_a_mixture(mixture):
    sampler = mixture.sampler(20, seed=1)
    runs = [
        list(DataLoader(mixture, 6, sampler=sampler, collate_fn=mixture.collate, num_workers=n))
        for n in (0, 1)
    ]
    assert [len(batch["reward"]) for batch in runs[0]] == [6, 6, 6, 2]
    assert any(not torch.equal(a["reward"], b["reward"]) for a, b in zip(*runs, strict=True))
    sampler.set_epoch(0)
    check_same(
        next(iter(DataLoader(mixture, 6, sampler=sampler, collate_fn=mixture.collate))), runs[0][0]
    )
    loader = WindowLoader(mixture, 6, seed=1)
    assert numbers_of(loader) != numbers_of(loader)


@pytest.mark.filterwarnings("ignore:there is no window")
def test_members_with_different_fields_raise(folder, tmp_path):
    first = WindowDataset(folder, 3)
    with pytest.raises(UsageError, match="dataset 1 has other fields or deltas than dataset 0"):
        WindowMixture([first, WindowDataset(folder, 4)])
    for wrong in ([1], "ab", {0: 1}, [1, None], [1, -1]):
        with pytest.raises(UsageError, match="weights must be 2 numbers"):
            WindowMixture([first, first], weights=wrong)
    with pytest.raises(UsageError, match="dataset 1 has no windows, and its weight is above 0"):
        WindowMixture(
            [first, WindowDataset(folder, 3, split="validation", validation_fraction=0)],
            weights=[1, 1],
        )
