"""One order of windows for any number of ranks: equal shares, and states that any number of ranks
can load.
"""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from rollout_data import RolloutDataWarning, WindowDataset, WindowLoader, WindowMixture
from storage.errors import DataFileError, UsageError
from tests.files import recorded
from tests.formats.folders import NaiveFolder

EVENS = ("pad", "drop", "none")
SIZES = (1, 3, 16, 25, 31)


@pytest.fixture(scope="module")
def datasets(tmp_path_factory):
    """Datasets of different sizes, and a mixture, by their number of windows.

    Each window is one frame.
    """
    result = {}
    for size in SIZES:
        path = tmp_path_factory.mktemp(f"windows{size}")
        recorded.record(path, [size], first_number=size)
        result[size] = WindowDataset(path, 1)
    result["mixture"] = WindowMixture([result[16], result[25]], [1, 2])
    return result


def names(batch):
    return batch["observation"][:, 0, 2].tolist()


def all_names(dataset):
    return names(dataset.__getitems__(range(len(dataset))))


def side_by_side(loaders, num_batches):
    """Join the next batches of all ranks. Return also the sizes of the ranks."""
    batches, sizes = [], []
    iterators = [iter(loader) for loader in loaders]
    for _ in range(num_batches):
        parts = [
            names(batch) if batch is not None else []
            for batch in (next(iterator, None) for iterator in iterators)
        ]
        if not any(parts):
            break
        batches.append(list(chain(*parts)))
        sizes.append([len(part) for part in parts])
    for item in iterators:
        item.close()
    return batches, sizes


def model(orders, epoch, position, size, num_ranks, even, drop_last):
    """Return the next batch of all ranks, and the epoch and position after it, computed from the
    rules alone.
    """
    while True:
        order = orders[epoch]
        wanted = order[position : position + size]
        position += size
        if len(wanted) < size and drop_last:
            wanted = []
        if even == "drop":
            wanted = wanted[: len(wanted) - len(wanted) % num_ranks]
        repeated = 0
        while wanted and even == "pad" and len(wanted) % num_ranks:
            wanted = [*wanted, order[repeated % len(order)]]
            repeated += 1
        left = len(order) - position
        is_over = left < size if drop_last else left < (num_ranks if even == "drop" else 1)
        if wanted:
            return wanted, (epoch + 1, 0) if is_over else (epoch, position)
        epoch, position = epoch + 1, 0


LEGS = st.lists(
    st.tuples(st.integers(1, 4), st.integers(1, 9), st.integers(0, 4)), min_size=1, max_size=6
)


@settings(max_examples=30, deadline=None)
@given(
    which=st.sampled_from([*SIZES[1:], "mixture"]),
    legs=LEGS,
    even=st.sampled_from(EVENS),
    drop_last=st.booleans(),
    shuffle=st.booleans(),
)
@pytest.mark.filterwarnings("ignore:a WindowLoader has no batch")
def test_resuming_with_any_number_of_ranks_keeps_the_order_of_one_rank(
    datasets, which, legs, even, drop_last, shuffle
):
    dataset = datasets[which]
    alone = WindowLoader(dataset, 1, seed=2, shuffle=shuffle)
    orders = [list(chain(*map(names, alone))) for _ in range(len(legs) * 4 + 2)]
    epoch, position, state = 0, 0, None
    for num_ranks, batch_size, num_batches in legs:
        if drop_last or even == "drop":
            batch_size = min(batch_size, len(dataset) // num_ranks)
            if not batch_size:
                continue
        loaders = [
            WindowLoader(
                dataset,
                batch_size,
                seed=2,
                shuffle=shuffle,
                even=even,
                drop_last=drop_last,
                shard=(rank, num_ranks),
            )
            for rank in range(num_ranks)
        ]
        for loader in loaders if state is not None else ():
            loader.load_state_dict(json.loads(json.dumps(state)))
        left = num_batches
        while left:
            got, sizes = side_by_side(loaders, left)
            assert got, "an epoch is never empty"
            for batch, parts in zip(got, sizes, strict=True):
                expected, (epoch, position) = model(
                    orders, epoch, position, num_ranks * batch_size, num_ranks, even, drop_last
                )
                assert batch == expected
                assert even == "none" or len(set(parts)) == 1
            left -= len(got)
        states = [loader.state_dict() for loader in loaders]
        if num_batches:
            state = states[0]
        assert num_batches == 0 or even == "none" or all(item == state for item in states)


@pytest.mark.each_value
@pytest.mark.parametrize("which", [*SIZES, "mixture"])
@pytest.mark.parametrize(("drop_last", "even"), [(False, "pad"), (True, "pad"), (False, "drop")])
@pytest.mark.filterwarnings("ignore:a WindowLoader has no batch")
def test_all_ranks_have_the_same_number_of_batches(datasets, which, drop_last, even):
    dataset = datasets[which]
    for num_ranks in range(1, 5):
        loaders = [
            WindowLoader(dataset, 4, drop_last=drop_last, even=even, shard=(rank, num_ranks))
            for rank in range(num_ranks)
        ]
        expected = [list(map(names, loader)) for loader in loaders]
        assert (
            {len(batches) for batches in expected}
            == {len(loader) for loader in loaders}
            == {len(loaders[0])}
        )
        for parts in zip(*expected, strict=True):
            assert len({len(part) for part in parts}) == 1


def test_even_pads_or_drops_25_windows_in_batches_of_4(datasets):
    def batches_of(**options):
        loaders = [
            WindowLoader(datasets[25], 4, shuffle=False, shard=(rank, 2), **options)
            for rank in range(2)
        ]
        actual = [list(map(names, loader)) for loader in loaders]
        assert [len(loader) for loader in loaders] == [len(batches) for batches in actual]
        return actual

    windows = all_names(datasets[25])
    full = [[windows[8 * k + 4 * r : 8 * k + 4 * r + 4] for k in range(3)] for r in range(2)]
    padded = [[*full[0], windows[24:]], [*full[1], windows[:1]]]
    assert batches_of() == batches_of(even="pad") == padded
    assert (
        batches_of(drop_last=True)
        == batches_of(even="drop")
        == batches_of(drop_last=True, even="none")
        == full
    )
    assert batches_of(even="none") == [[*full[0], windows[24:]], full[1]]


def test_a_single_rank_reads_each_window_once(datasets):
    for even in EVENS:
        for shard in ("none", "auto", (0, 1)):
            batches = list(map(names, WindowLoader(datasets[25], 4, even=even, shard=shard)))
            assert [len(batch) for batch in batches] == [4] * 6 + [1]
            assert sorted(chain(*batches)) == all_names(datasets[25])


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("num_after", [0, 1])
def test_a_state_of_the_end_of_an_epoch_starts_the_next_epoch(datasets, drop_last, num_after):
    loader = WindowLoader(datasets[25], 4, drop_last=drop_last)
    state = None
    for number, _ in enumerate(loader, 1):
        if number == len(loader):
            state = loader.state_dict()
    state = state if num_after == 0 else loader.state_dict()
    again = WindowLoader(datasets[25], 4, drop_last=drop_last)
    again.load_state_dict(state)
    assert again.epoch == 1
    for _ in range(2):
        second = list(map(names, loader))
        assert list(map(names, again)) == second and len(second) == len(loader)


def test_a_state_after_the_last_batch_starts_the_next_epoch(datasets):
    loader = WindowLoader(datasets[3], 3)
    for epoch in range(3):
        for _ in loader:
            break
        assert loader.epoch == epoch + 1


def test_set_epoch_starts_that_epoch_and_the_next_ones_follow(datasets):
    loader = WindowLoader(datasets[25], 4)
    epochs = [list(map(names, loader)) for _ in range(4)]
    assert len({tuple(chain(*epoch)) for epoch in epochs}) == 4
    loader.set_epoch(1)
    assert [list(map(names, loader)) for _ in range(3)] == epochs[1:]


def test_a_state_of_another_version_raises_and_names_set_epoch(datasets):
    loader = WindowLoader(datasets[25], 4, seed=7)
    next(iter(loader))
    state = loader.state_dict()
    for version in (2, 4):
        with pytest.raises(
            UsageError,
            match=f"the state has version {version}, expected 3. Call set_epoch to begin an epoch",
        ):
            loader.load_state_dict({**state, "version": version})


@pytest.mark.parametrize("is_mixture", [False, True])
def test_a_resumed_epoch_ignores_new_blocks(tmp_path, is_mixture):
    def opened():
        dataset = WindowDataset(tmp_path, 2, padding="repeat", split="train")
        return WindowMixture([dataset, dataset]) if is_mixture else dataset

    recorded.record(tmp_path, [5, 17, 9], num_envs=2, flush_every=4, writer_name="b")
    whole, loader = (WindowLoader(opened(), 4, seed=1) for _ in range(2))
    expected = list(map(names, whole))
    for batch in loader:
        assert names(batch) == expected[0]
        break
    state = json.loads(json.dumps(loader.state_dict()))
    recorded.record(tmp_path, [8, 30], first_number=40, writer_name="a")
    again = WindowLoader(opened(), 4, seed=1)
    again.load_state_dict(state)
    assert list(map(names, again)) == expected[1:]
    assert len(list(again)) == len(again) > len(expected)


LENGTHS = (5, 2, 9, 4, 7, 3, 8, 6, 2, 5)


@pytest.mark.each_value
@pytest.mark.filterwarnings("ignore::storage.errors.RolloutDataWarning")
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("is_mixture", "shuffle"), [(False, True), (False, False), (True, True), (True, False)]
)
def test_deleted_windows_are_left_out_and_the_others_keep_their_order(
    tmp_path, is_mixture, shuffle, seed
):
    chance = np.random.default_rng(seed)

    def opened(split="train"):
        options = {"padding": "repeat", "split": split, "validation_fraction": 0.2}
        first = WindowDataset(tmp_path / "first", 2, **options)
        if not is_mixture:
            return first
        second = WindowDataset(tmp_path / "second", 2, **options)
        return WindowMixture([first, second, first], [1, 3, 1])

    folders = [tmp_path / "first", tmp_path / "second"]
    for number, folder in enumerate(folders):
        if seed % 2:
            recorded.record(
                folder, LENGTHS, 2, first_number=20 * number, flush_every=3, writer_name="b0"
            )
            continue
        for k in range(0, len(LENGTHS), 2):
            recorded.record(
                folder, LENGTHS[k : k + 2], 2, first_number=20 * number + k, writer_name=f"b{k}"
            )
    expected = list(chain(*map(names, WindowLoader(opened(), 1, seed=seed, shuffle=shuffle))))
    state, position = None, 0
    for size in (2, 1, 1, 100):
        loaders = [
            WindowLoader(opened(), 3, seed=seed, shuffle=shuffle, shard=(rank, 2))
            for rank in range(2)
        ]
        for loader in loaders if state is not None else ():
            loader.load_state_dict(json.loads(json.dumps(state)))
        kept = set(all_names(opened(None))) if state is not None else set(expected)
        expected = [item for k, item in enumerate(expected) if k < position or item in kept]
        assert loaders[0].epoch == (position == len(expected))
        if loaders[0].epoch:
            break
        batches, _ = side_by_side(loaders, size)
        got = list(chain(*batches))
        if size == 100:
            assert got[: len(expected) - position] == expected[position:]
            assert len(got) - len(expected) + position in (0, 1)  # the pad that makes ranks equal
            break
        assert got == expected[position : position + len(got)]
        position += len(got)
        state = loaders[0].state_dict()
        recorded.record(folders[0], [3, 4], first_number=100 + 10 * size, writer_name=f"a{size}")
        for folder in folders[: 1 + is_mixture]:
            # The oldest of one writer, or all of any of several
            old = sorted(folder.glob("rollout_b*.h5"))
            old[0 if seed % 2 else chance.integers(len(old))].unlink()


def test_a_state_that_does_not_fit_raises(tmp_path):
    recorded.record(tmp_path, [5], writer_name="a")
    recorded.record(tmp_path, [6], writer_name="b")
    loader = WindowLoader(WindowDataset(tmp_path, 1), 4)
    next(iter(loader))
    state = loader.state_dict()
    sorted(tmp_path.glob("rollout_*.h5"))[0].unlink()
    with pytest.raises(UsageError, match=r"\[0, 2, 1\] instead of \[0, 1, 1\]"):
        WindowLoader(WindowDataset(tmp_path, 2), 4).load_state_dict(state)
    again = WindowLoader(WindowDataset(tmp_path, 1), 4)
    again.set_epoch(loader.epoch + 1)
    assert len(list(again)) == 2


def test_an_epoch_of_trajectory_folders_resumes_only_with_the_same_windows(tmp_path):
    folder = NaiveFolder(tmp_path)
    folder.chunk(0, 0, 8, done=True)
    loader = WindowLoader(WindowDataset(tmp_path, 2), 4)
    next(iter(loader))
    folder.chunk(1, 0, 8, done=True)
    with pytest.raises(DataFileError, match="have changed since the dataset was opened"):
        WindowLoader(WindowDataset(tmp_path, 2), 4).load_state_dict(loader.state_dict())


def test_a_version_1_state_within_an_epoch_of_a_shuffled_mixture_raises(datasets):
    loader = WindowLoader(datasets["mixture"], 4, seed=0)
    next(iter(loader))
    # An earlier version does not name the last window
    state = {
        **loader.state_dict(),
        "after": None,
    }
    with pytest.raises(UsageError, match="Call set_epoch to begin an epoch"):
        loader.load_state_dict(state)
    loader.set_epoch(1)
    assert len(next(iter(loader))["observation"]) == 4


def test_the_draws_of_a_mixture_follow_the_weights_and_are_independent(datasets):
    mixture = WindowMixture([datasets[3], datasets[16]], [1, 2])
    loader = WindowLoader(mixture, len(mixture), seed=0)
    draws = np.array([loader.order(epoch) for epoch in range(4000)])
    share = np.repeat([1 / 9, 2 / 48], [3, 16])

    def check(counts, share):
        expected = counts.sum() * share
        degrees = len(share) - 1
        assert ((counts - expected) ** 2 / expected).sum() < degrees + 5 * np.sqrt(2 * degrees)

    check(np.bincount(draws.ravel(), minlength=19), share)
    for column in (0, 18):  # wherever in the epoch
        check(np.bincount(draws[:, column], minlength=19), share)
    pairs = draws[:, :-1] * 19 + draws[:, 1:]
    check(np.bincount(pairs[:, ::2].ravel(), minlength=361), np.outer(share, share).ravel())
    is_repeated = (draws[:, :1] == draws[:, 1:]).any(axis=1).mean()
    assert abs(is_repeated - (share * (1 - (1 - share) ** 18)).sum()) < 0.04


def test_wrong_shards_raise(datasets):
    with pytest.raises(UsageError, match="even must be one of 'pad'"):
        WindowLoader(datasets[3], 1, even="padded")
    for wrong in ("all", (2, 2), 3):
        with pytest.raises(UsageError, match="expected 'auto', 'none' or"):
            WindowLoader(datasets[3], 1, shard=wrong)
        with pytest.raises(UsageError, match="expected 'auto', 'none' or"):
            datasets["mixture"].sampler(shard=wrong)
    with pytest.raises(UsageError, match="even"):
        datasets["mixture"].sampler(even=None)
    with pytest.warns(RolloutDataWarning, match="no batch: 3 windows are too few"):
        assert len(WindowLoader(datasets[3], 1, even="drop", shard=(0, 4))) == 0


@settings(max_examples=40, deadline=None)
@given(
    num=st.integers(0, 40),
    num_ranks=st.integers(1, 5),
    even=st.sampled_from(EVENS),
    epoch=st.integers(0, 3),
)
def test_the_draws_of_a_sampler_are_divided_among_ranks(datasets, num, num_ranks, even, epoch):
    mixture = datasets["mixture"]
    samplers = [
        mixture.sampler(num, 3, even=even, shard=(rank, num_ranks)) for rank in range(num_ranks)
    ]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    alone = mixture.draw(num, np.random.default_rng([3, epoch])).tolist()
    total = {"pad": -(-num // num_ranks) * num_ranks, "drop": num - num % num_ranks, "none": num}[
        even
    ]
    expected = [alone[place % num] for place in range(total)]
    shares = [list(sampler) for sampler in samplers]
    assert shares == [expected[rank::num_ranks] for rank in range(num_ranks)]
    assert [sampler.epoch for sampler in samplers] == [epoch + 1] * num_ranks
    assert (
        even == "none"
        or len({len(share) for share in shares} | {len(sampler) for sampler in samplers}) == 1
    )


def test_a_sampler_continues_over_epochs_with_persistent_workers(datasets):
    mixture = datasets["mixture"]
    sampler = mixture.sampler(12, seed=1)
    loader = DataLoader(
        mixture,
        4,
        sampler=sampler,
        collate_fn=mixture.collate,
        num_workers=1,
        persistent_workers=True,
    )
    epochs = [list(map(names, loader)) for _ in range(3)]
    assert len({tuple(chain(*epoch)) for epoch in epochs}) == 3
    sampler.set_epoch(1)
    assert [list(map(names, loader)) for _ in range(2)] == epochs[1:]


def mixture_names(mixture, rank):
    return names(mixture.__getitems__(list(mixture.sampler(seed=1, shard=(rank, 2)))))


def test_two_ranks_of_torch_distributed_read_disjoint_windows(tmp_path):
    for folder in (tmp_path, tmp_path / "only first"):
        recorded.record(folder, [25], writer_name="first")
    alone = WindowLoader(WindowDataset(tmp_path, 1), 25, seed=1)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "tests.windows.two_ranks", str(tmp_path)]
    root = Path(__file__).parents[2]
    run = subprocess.run(
        command, cwd=root, capture_output=True, text=True, timeout=240, check=False
    )
    assert run.returncode == 0, run.stderr
    ranks = json.loads(run.stdout.splitlines()[-1])
    assert [rank["len"] for rank in ranks] == [4, 4]
    for epoch in range(2):
        batches = [rank["epochs"][epoch] for rank in ranks]
        assert [[len(batch) for batch in own] for own in batches] == [[4, 4, 4, 1]] * 2
        # Of the first writer's windows: rank 0 saw no others
        ((expected,),) = [list(map(names, alone))]
        assert list(chain(*(first + second for first, second in zip(*batches, strict=True)))) == [
            *expected,
            expected[0],
        ]
    first, second = (rank["draws"] for rank in ranks)
    mixture = WindowMixture([WindowDataset(tmp_path / "only first", 1)])
    assert first == mixture_names(mixture, 0) and second == mixture_names(mixture, 1)
