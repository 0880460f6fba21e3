"""Windows in workers of a `DataLoader`, and their use of shared memory."""

from __future__ import annotations

import copy
import gc
import pickle
import resource

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import ConcatDataset, DataLoader, Dataset

from rollout_data import WindowDataset, WindowLoader, WindowMixture
from rollout_data.windows import worker_batches
from rollout_data.windows.worker_batches import NUM_PLACES, WorkerMemory
from storage.errors import MissingFieldError
from tests.files import recorded

from .test_window_loading import check_same


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    path = tmp_path_factory.mktemp("windows")
    recorded.record(path, [5, 17, 9, 30, 12], num_envs=2, flush_every=4)
    return WindowDataset(path, 4)


class Doubled(Dataset):
    """A dataset of a user that contains ours."""

    def __init__(self, windows):
        self.windows = windows

    def __len__(self):
        return len(self.windows)

    def __getitem__(self, number):
        return self.windows[number]["observation"] * 2


def through_a_worker(dataset, **options):
    return list(DataLoader(dataset, num_workers=1, multiprocessing_context="fork", **options))


def test_workers_read_single_windows(dataset):
    size = range(len(dataset))
    for number, window in zip(size, through_a_worker(dataset, batch_size=None), strict=True):
        check_same(window, dataset[number])
    doubled = torch.cat(through_a_worker(Doubled(dataset), batch_size=4))
    assert torch.equal(doubled, 2 * dataset.__getitems__(size)["observation"])
    twice = ConcatDataset([dataset, dataset])
    batches = through_a_worker(twice, batch_size=4, collate_fn=dataset.collate)
    assert sum(len(batch["reward"]) for batch in batches) == len(twice)
    mixture = WindowMixture([dataset, dataset])
    for number, window in zip(range(3), through_a_worker(mixture, batch_size=None), strict=False):
        check_same(window, mixture[number])


def with_more(batch):
    batch["observation"].mul_(-1)
    batch["action"] = batch["action"] + 1
    del batch["privileged_observation"]
    return {"whole": batch, "reward": batch["reward"], "number of": len(batch["reward"])}


def test_a_collate_function_may_change_and_divide_a_batch(dataset):
    held = []
    for _ in range(3):
        batches = through_a_worker(dataset, batch_size=4, collate_fn=with_more)
        assert len(batches) > NUM_PLACES
        held += [(4 * k, batch) for k, batch in enumerate(batches)]
    for first, got in held:
        expected = with_more(dataset.__getitems__(range(len(dataset))[first : first + 4]))
        check_same(got["whole"], expected["whole"])
        assert torch.equal(got["reward"], expected["reward"]) and got["number of"] == len(
            expected["reward"]
        )


@pytest.mark.parametrize(
    "take", [copy.copy, copy.deepcopy, lambda batch: pickle.loads(pickle.dumps(batch))]
)
def test_copies_of_a_batch_are_plain_dicts(dataset, take):
    memory = WorkerMemory()
    for _ in range(2):
        batch = memory.make(lambda allocate: dataset.read([0, 3], allocate))
        assert type(take(batch)) is dict
        check_same(take(batch), dataset.__getitems__([0, 3]))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_batches_are_plain_dicts_that_pytree_traverses(dataset, num_workers):
    mixture = WindowMixture([dataset, dataset])
    for windows in (dataset, mixture):
        loader = DataLoader(windows, 4, num_workers=num_workers, collate_fn=windows.collate)
        for batch in (*loader, *WindowLoader(windows, 4)):
            assert type(batch) is dict and all(
                type(leaf) is torch.Tensor for leaf in tree_leaves(batch)
            )
            check_same(tree_map(lambda leaf: leaf.clone(), batch), batch)
    check_same(
        next(iter(DataLoader(dataset, 4, collate_fn=dataset.collate))),
        dataset.__getitems__(range(4)),
    )


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_missing_collate_function_raises_with_its_name(dataset, num_workers):
    with pytest.raises(MissingFieldError, match=r"collate_fn=dataset\.collate"):
        list(DataLoader(dataset, 4, num_workers=num_workers))
    with pytest.raises(
        KeyError, match=r"the batch has no field 'obs'. The fields are observation, "
    ):
        dataset.__getitems__([0])["obs"]


# Shared memory


def test_shared_buffers_have_the_size_of_their_batch_and_are_reused():
    memory, num_bytes = WorkerMemory(), 1 << 20

    def read(allocate):
        return {
            "rows": allocate((num_bytes,), torch.uint8),
            "mask": torch.ones(100, dtype=torch.bool),
        }

    for _ in range(5):
        batch = memory.make(read)
        del batch
    assert [place.num_bytes for place in memory.places] == [num_bytes + 128]
    held = [memory.make(read) for _ in range(3)]
    assert len(memory.places) == len(held)
    assert len({batch["rows"].data_ptr() for batch in held}) == len(held)


def test_without_enough_shared_memory_batches_are_pickled(dataset):
    memory, limits = WorkerMemory(), resource.getrlimit(resource.RLIMIT_FSIZE)
    # No place can be as large as a batch
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        for _ in range(3):
            check_same(
                memory.make(lambda allocate: dataset.read([1, 2], allocate)),
                dataset.__getitems__([1, 2]),
            )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not memory.places


def test_larger_batches_use_larger_shared_buffers(dataset):
    memory = WorkerMemory()
    for numbers in ([0], [1], range(20), range(20), [2]):
        check_same(
            memory.make(lambda allocate, n=numbers: dataset.read(n, allocate)),
            dataset.__getitems__(numbers),
        )
    assert len(memory.places) == 1


def test_shared_memory_of_workers_is_freed_at_their_end(dataset):
    loader = DataLoader(
        dataset, 4, collate_fn=dataset.collate, num_workers=2, persistent_workers=True
    )
    kept = list(loader)[-1]
    assert worker_batches.mapped
    del loader
    gc.collect()
    assert not worker_batches.mapped
    check_same(kept, dataset.__getitems__(range(len(dataset))[4 * ((len(dataset) - 1) // 4) :]))
