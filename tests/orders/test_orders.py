"""Orders equal the stored ones on every processor and with any number of threads.

`tests/data/orders.json` is written by `python -m tests.orders.everything --write`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from decimal import Context, Decimal
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy._core._multiarray_umath import __cpu_dispatch__ as numpy_features

from rollout_data import WindowDataset, WindowLoader, WindowMixture
from storage import AdvancedReplayBuffer, SumTree
from storage.core.random_indices import Weighted, scaled, whole_weights
from storage.prioritized.rounded_power import rounded_power
from tests.files.recorded import record
from tests.orders import everything
from tests.orders.everything import global_states

ROOT = Path(__file__).parents[2]
#: Processors that can do less, and another number of threads.
MACHINES = {
    "no vectors": {
        "NPY_DISABLE_CPU_FEATURES": " ".join(numpy_features),
        "ATEN_CPU_CAPABILITY": "default",
    },
    "no vectors of torch": {"ATEN_CPU_CAPABILITY": "default", "OMP_NUM_THREADS": "2"},
}


@pytest.fixture(scope="module")
def stored():
    return json.loads(everything.STORED.read_text())


def test_orders_equal_the_stored_ones_and_no_global_generator_is_used(stored):
    before = global_states()
    assert everything.all_orders() == stored
    assert global_states() == before


@pytest.mark.parametrize("machine", MACHINES)
def test_orders_equal_the_stored_ones_on_another_processor(stored, machine):
    run = subprocess.run(
        [sys.executable, "-m", "tests.orders.everything"],
        cwd=ROOT,
        env={**os.environ, **MACHINES[machine]},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == stored


def test_every_store_and_loader_has_a_stored_order(stored):
    assert list(stored) == list(everything.ORDERS)
    assert all(entry["length"] >= 12 for entry in stored.values())


@pytest.mark.parametrize("num_threads", [1, 2])
def test_draws_do_not_depend_on_the_number_of_threads(stored, tmp_path, num_threads):
    names = (
        "prioritized_rows_of_a_deep_tree",
        "sums_of_a_tree",
        "rollout_mini_batches",
        "expert_windows",
    )
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        actual = {name: everything.ORDERS[name](tmp_path) for name in names}
    finally:
        torch.set_num_threads(before)
    for name, numbers in actual.items():
        assert numbers[: everything.NUM_SHOWN] == stored[name]["first"], name


# Integers instead of floats


@settings(max_examples=300)
@given(bits=st.integers(0, 2**62 - 1), choices=st.integers(0, 2**62))
def test_scaled_bits_are_the_exact_product(bits, choices):
    expected = bits * choices >> 62
    assert scaled(np.array([bits]), choices).tolist() == [expected]
    assert scaled(torch.tensor([bits]), torch.tensor([choices])).tolist() == [expected]


WEIGHTS = st.lists(
    st.one_of(st.just(0.0), st.floats(0, 1e308), st.integers(0, 9)), min_size=1, max_size=40
)


@settings(max_examples=300)
@given(weights=WEIGHTS, num_bits=st.integers(30, 62))
def test_whole_weights_keep_proportions(weights, num_bits):
    if not any(weights):
        return
    actual = whole_weights(weights, num_bits).tolist()
    assert sum(actual) < 2**num_bits
    unit = max(weights) / max(actual)
    for weight, whole in zip(weights, actual, strict=True):
        assert (whole > 0) == (weight > 0)
        assert whole == pytest.approx(weight / unit, rel=1e-12, abs=1)


def test_weights_that_are_small_integers_are_kept_exactly():
    first, *others = whole_weights([1, 2, 5, 0]).tolist()
    assert others == [2 * first, 5 * first, 0]


def test_weighted_draws_never_return_an_index_without_weight():
    weights = torch.tensor([0.0, 1e-30, 0.0, 3.0, 0.0])
    drawn = Weighted(weights).draw(20_000, torch.Generator().manual_seed(0))
    assert set(drawn.tolist()) <= {1, 3}


@settings(max_examples=200)
@given(base=st.floats(1e-300, 1e300), exponent=st.sampled_from([0.0, 0.3, 0.5, 0.6, 0.9]))
def test_a_rounded_power_is_the_true_power_rounded(base, exponent):
    exact = Context(prec=50)
    true_power = float(exact.power(Decimal(base), Decimal(exponent)))
    expected = (np.array([true_power]).view(np.int64) + (1 << 19)) >> 20 << 20
    got = rounded_power(np.array([base]), exponent)
    assert got.view(np.int64).tolist() == expected.tolist()
    assert got[0] == pytest.approx(base**exponent, rel=2e-10)


def test_a_power_near_a_rounding_boundary_does_not_depend_on_its_last_bits():
    # Halfway between two rounded numbers, where the last bit of `pow` would decide.
    exact, exponent = Context(prec=60), 0.6
    halfway = (np.arange(1, 200, dtype=np.int64) << 40) + (1023 << 52) + (1 << 19)
    middles = halfway.view(np.float64).tolist()
    bases = np.array(
        [float(exact.power(Decimal(item), 1 / Decimal(exponent))) for item in middles] * 2
    )
    true_powers = np.array(
        [float(exact.power(Decimal(float(base)), Decimal(exponent))) for base in bases]
    )
    expected = (true_powers.view(np.int64) + (1 << 19)) >> 20 << 20
    assert rounded_power(bases, exponent).view(np.int64).tolist() == expected.tolist()


def test_equal_priorities_have_equal_weights_at_any_index():
    # numpy's own power differs between the places of an array.
    buffer = AdvancedReplayBuffer(1003, generator=0)
    buffer.extend_tensors({"x": torch.zeros(1003, 1)}, torch.full((1003,), 0.7123456789))
    weights = buffer.state_dict()["tensors"]["weights"]
    assert len(weights.unique()) == 1


def test_sums_of_a_tree_are_added_from_left_to_right():
    values = torch.rand(16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    tree = SumTree(16)
    tree.write(torch.arange(16), values)
    expected = 0.0
    for value in values.tolist():
        expected += value
    assert tree.reduce() == expected


# Mixtures


@pytest.fixture(scope="module")
def members(tmp_path_factory):
    result = []
    for number, lengths in enumerate(([6, 7], [20, 11, 9], [1])):
        folder = tmp_path_factory.mktemp(f"member{number}")
        record(folder, lengths, first_number=10 * number, writer_name=f"writer{number}")
        result.append(WindowDataset(folder, 1))
    return result


@pytest.mark.parametrize(
    "weights", [None, [1, 2, 3], [0.7, 0.29, 0.01], [1, 0, 1], [1e-9, 1e9, 1e9]]
)
def test_shares_of_a_mixture_follow_its_weights(members, weights):
    mixture = WindowMixture(members, weights)
    sizes = np.array([len(member) for member in members])
    shares = np.array(sizes if weights is None else weights, float)
    by_window = np.repeat(shares / shares.sum() / sizes, sizes)
    loader = WindowLoader(mixture, 8, seed=1)
    draws = {
        "epochs": np.concatenate([loader.order(epoch) for epoch in range(800)]),
        "sampler": np.array(list(mixture.sampler(40_000, seed=1))),
    }
    for name, drawn in draws.items():
        counts = np.bincount(drawn, minlength=len(mixture))
        expected = len(drawn) * by_window
        assert not counts[expected == 0].any(), name
        is_common = expected > 5
        deviation = ((counts - expected)[is_common] ** 2 / expected[is_common]).sum()
        degrees = is_common.sum() - 1
        assert deviation < degrees + 5 * np.sqrt(2 * degrees), name


def test_draws_of_an_epoch_are_independent_of_each_other(members):
    mixture = WindowMixture(members[:2], [1, 1])
    loader = WindowLoader(mixture, 8, seed=2)
    orders = np.array([loader.order(epoch) for epoch in range(3000)])
    is_first_member = orders < len(members[0])
    counts = is_first_member.sum(1)
    num = orders.shape[1]
    # Of independent draws the number of one member has the variance of a binomial distribution.
    assert counts.mean() == pytest.approx(num / 2, abs=5 * np.sqrt(num / 4 / 3000))
    assert counts.var() == pytest.approx(num / 4, rel=0.15)


def names_of(loader):
    return [int(name) for batch in loader for name in batch["observation"][:, 0, 2]]


@pytest.mark.each_value
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("weights", [None, [1, 5]])
def test_a_removed_window_does_not_change_the_order_of_the_others(tmp_path, num_ranks, weights):
    for number, folder in enumerate(("a", "b")):
        for block in range(5):
            record(
                tmp_path / folder,
                [9 + block],
                first_number=10 * number + block,
                writer_name=f"{folder}{block}",
            )

    def loader(rank=0, num_ranks=1):
        mixture = WindowMixture([WindowDataset(tmp_path / folder, 1) for folder in "ab"], weights)
        return WindowLoader(mixture, 2, seed=5, shard=(rank, num_ranks), even="none")

    whole = names_of(loader())
    loaders = [loader(rank, num_ranks) for rank in range(num_ranks)]
    iterators = [iter(loader) for loader in loaders]
    for _ in range(3):
        for item in iterators:
            next(item)
    state = json.loads(json.dumps(loaders[0].state_dict()))
    for item in iterators:
        item.close()
    num_delivered = 3 * 2 * num_ranks
    next((tmp_path / "b").glob("rollout_b1*.h5")).unlink()
    next((tmp_path / "a").glob("rollout_a3*.h5")).unlink()
    expected = [name for name in whole[num_delivered:] if name // 1000 not in (3, 11)]
    for num_later in (1, 2, 4):
        parts = []
        for rank in range(num_later):
            later = loader(rank, num_later)
            later.load_state_dict(state)
            parts.append([[int(name) for name in batch["observation"][:, 0, 2]] for batch in later])
        got = []
        for place in range(max(map(len, parts))):
            got += [name for part in parts if place < len(part) for name in part[place]]
        assert got == expected
