"""The trees equal a plain list, and draws follow the law of the weights, after any writes."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import accumulate

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from storage import MaxSegmentTree, MinSegmentTree, MinTree, SegmentTree, SumSegmentTree, SumTree

KINDS = {"sum": (SumSegmentTree, math.fsum, 0.0), "min": (MinSegmentTree, min, math.inf)}
KINDS["max"] = (MaxSegmentTree, max, -math.inf)
#: Few values that are far apart, so that sums round, and zeros, so that gaps come up.
WEIGHTS = st.sampled_from([0.0, 0.0, 5e-324, 1e-12, 0.1, 1.0, 3.0, 1e12])

#: Weights between which no float64 can hold both, many of them none at all.
EXTREMES = st.sampled_from(
    [0.0, 0.0, 0.0, 0.0, 5e-324, 1e-300, 1e-16, 0.1, 1.0, 1.0 + 2**-52, 1e16, 1e300]
)
#: What rounding may move a point by, in units of the sum's last place: each level adds up a block,
#: the top all of it.
SLACK_ULPS = 256


def sized(data: st.DataObject) -> int:
    """Draw a capacity: one block, a full last block, or a last block with gaps."""
    return data.draw(st.sampled_from([1, 2, 3, 31, 33, 100, 1025, 4096, 4097, 5000, 66_000]))


@settings(max_examples=60)
@given(data=st.data(), kind=st.sampled_from(sorted(KINDS)))
def test_a_tree_equals_a_list(data: st.DataObject, kind: str) -> None:
    make, reduce, neutral = KINDS[kind]
    capacity = sized(data)
    tree, model = make(capacity), [neutral] * capacity
    for _ in range(data.draw(st.integers(1, 4))):
        places = data.draw(st.lists(st.integers(0, capacity - 1), max_size=50))
        values = data.draw(st.lists(WEIGHTS, min_size=len(places), max_size=len(places)))
        tree[torch.tensor(places, dtype=torch.int64)] = torch.tensor(values, dtype=torch.float64)
        for place, value in zip(places, values, strict=True):
            model[place] = value
        assert tree.check_valid() == (True, "")
    start = data.draw(st.integers(0, capacity))
    end = data.draw(st.integers(start, capacity))
    expected = reduce(model[start:end]) if end > start else neutral
    assert tree.reduce(start, end) == pytest.approx(expected, rel=1e-12)
    assert tree.reduce() == pytest.approx(reduce(model), rel=1e-12)
    assert tree[torch.arange(capacity)].tolist() == model
    assert [tree[0], tree[-1]] == [model[0], model[-1]]


@settings(max_examples=80)
@given(data=st.data())
def test_a_prefix_sum_selects_its_own_place_and_never_a_zero_weight(data: st.DataObject) -> None:
    capacity = sized(data)
    tree = SumSegmentTree(capacity)
    weights = np.zeros(capacity)
    places = data.draw(st.lists(st.integers(0, capacity - 1), min_size=1, max_size=60))
    weights[places] = data.draw(st.lists(WEIGHTS, min_size=len(places), max_size=len(places)))
    tree[torch.arange(capacity)] = torch.from_numpy(weights)
    total = tree.reduce()
    if total == 0:
        with pytest.raises(ValueError, match="all values of the tree are 0"):
            tree.find_prefixsum_idx(0.0)
        return
    shares = data.draw(st.lists(st.floats(0, 1), min_size=1, max_size=40))
    masses = torch.tensor([*shares, 0.0, 1.0], dtype=torch.float64) * total
    actual = tree.find_prefixsum_idx(masses)
    assert (tree[actual] > 0).all()
    # A mass lies inside its place's stretch, up to the rounding of sums.
    ends = np.cumsum(weights)
    slack = 1e-12 * ends[-1]
    own = actual.numpy()
    assert (masses.numpy() <= ends[own] + slack).all()
    assert (masses.numpy() >= ends[own] - weights[own] - slack).all()
    assert actual[-2] == np.flatnonzero(weights)[0]


def test_a_single_weight_anywhere_is_always_found() -> None:
    for capacity in (1, 33, 2000, 9000):
        for place in {0, capacity // 2, capacity - 1}:
            tree = SumSegmentTree(capacity)
            tree[place] = 0.3
            assert tree[place] == tree.reduce() == 0.3, "Python's numbers are kept in float64"
            assert [tree.find_prefixsum_idx(x) for x in (0.0, 0.1, 0.3)] == [place] * 3
            assert tree.find_prefixsum_idx(torch.tensor([[0.0, 0.3]])).tolist() == [[place, place]]


def test_sums_have_no_rounding_drift_after_large_values_are_replaced() -> None:
    tree = SumSegmentTree(5000)
    everywhere = torch.arange(5000)
    for _ in range(3):
        tree[everywhere] = torch.full((5000,), 1e15, dtype=torch.float64)
        tree[everywhere] = torch.full((5000,), 0.1, dtype=torch.float64)
    assert tree.reduce() == pytest.approx(500.0, rel=1e-13)
    tree[everywhere] = 0.0
    assert tree.reduce() == 0.0


def test_draws_have_the_law_of_the_weights_one_per_interval() -> None:
    tree = SumTree(5000)
    weights = torch.rand(5000, dtype=torch.float64) ** 4
    weights[::3] = 0
    tree.rebuild(weights)
    generator = torch.Generator().manual_seed(0)
    num_draws, num_rounds = 64, 2000
    counts = torch.zeros(5000)
    for _ in range(num_rounds):
        actual = tree.draw(num_draws, generator)
        assert (actual.diff() >= 0).all()
        ends = weights.cumsum(0)
        strata = torch.arange(num_draws) * (ends[-1] / num_draws)
        assert (ends[actual] >= strata - 1e-9).all() and (
            (ends - weights)[actual] <= strata + ends[-1] / num_draws
        ).all()
        counts += torch.bincount(actual, minlength=5000)
    expected = weights / weights.sum() * num_draws * num_rounds
    assert counts[::3].sum() == 0
    usual = expected >= 5
    statistic = ((counts - expected)[usual] ** 2 / expected[usual]).sum()
    # Strata make the counts steadier than independent draws, never less steady.
    num_usual = int(usual.sum())
    assert statistic < num_usual + 4 * math.sqrt(2 * num_usual)
    rare = ~usual & (weights > 0)
    assert abs(counts[rare].sum() - expected[rare].sum()) < 5 * math.sqrt(
        float(expected[rare].sum()) + 1
    )


@pytest.mark.parametrize("capacity", [3000, 300_000])
@pytest.mark.parametrize("num_draws", [1, 500, 5000])
def test_blocks_of_any_width_have_the_same_law(capacity: int, num_draws: int) -> None:
    tree = SumTree(capacity)
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(capacity, dtype=torch.float64, generator=generator) ** 20
    weights[torch.arange(capacity) % 5 > 0] = 0
    tree.write(torch.arange(capacity), weights)
    for _ in range(10):
        counts = torch.bincount(tree.draw(num_draws, generator), minlength=capacity)
        assert not counts[weights == 0].any()
        assert ((counts - num_draws * weights / weights.sum()).abs() < 2.001).all()


def check_drawn(tree: SumTree, num_draws: int, generator: torch.Generator) -> None:
    """Check in exact numbers that each place has a weight, and that its interval of the running sum
    overlaps its stratum.
    """
    weights = [Fraction(x) for x in tree.leaves_view().tolist()]
    total = sum(weights)
    drawn = tree.draw_weights(num_draws, generator)
    if total == 0:
        assert drawn is None
        return
    places, actual, least = drawn
    assert least == float(min(weight for weight in weights if weight))
    assert len(places) == num_draws and (places >= 0).all() and (places < tree.capacity).all()
    assert (actual > 0).all() and actual.tolist() == [float(weights[place]) for place in places]
    slack = SLACK_ULPS * Fraction(math.ulp(float(total)))
    ends = list(accumulate(weights))
    for number, place in enumerate(places.tolist()):
        first, last = total * number / num_draws, total * (number + 1) / num_draws
        assert ends[place] - weights[place] - slack <= last and ends[place] + slack >= first


@settings(max_examples=25)
@given(data=st.data())
def test_rounding_moves_no_draw_out_of_its_stratum_or_to_a_zero_weight(
    data: st.DataObject,
) -> None:
    tree = SumTree(sized(data))
    for _ in range(data.draw(st.integers(1, 3))):
        places = data.draw(st.lists(st.integers(0, tree.capacity - 1), min_size=1, max_size=60))
        values = data.draw(st.lists(EXTREMES, min_size=len(places), max_size=len(places)))
        tree.write(torch.tensor(places), torch.tensor(values, dtype=torch.float64))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    for num_draws in data.draw(
        st.lists(st.sampled_from([1, 2, 7, 64, 300, 1500]), min_size=1, max_size=3)
    ):
        check_drawn(tree, num_draws, generator)


def test_at_most_lists_the_values_up_to_a_bound() -> None:
    tree, numbers = MinTree(9000), torch.randint(0, 50, (9000,)).double()
    tree.rebuild(numbers)
    for bound in (-1.0, 0.0, 7.0, 100.0):
        assert torch.equal(tree.at_most(bound), (numbers <= bound).nonzero().squeeze(1))
    tree.put(np.array([5, 8999]), math.inf)
    assert 5 not in tree.at_most(100.0).tolist() and len(tree.at_most(100.0)) == 8998
    tree.clear()
    assert tree.reduce() == math.inf and not len(tree.at_most(1e300))


def test_d11_every_operation_is_computed_and_named() -> None:
    values = torch.tensor([4.0, -2.0, 9.0])
    result = {}
    for name, function in (("sum", sum), ("min", min), ("max", max)):
        for operation in (name, function):
            tree = SegmentTree(3, operation)
            tree[[0, 1, 2]] = values
            result[name] = (
                tree.reduce(),
                tree.reduce(0, 1),
                tree.reduce(1, 1),
                tree.neutral_element,
            )
    assert result == {
        "sum": (11, 4, 0, 0),
        "min": (-2, 4, math.inf, math.inf),
        "max": (9, 4, -math.inf, -math.inf),
    }
    with pytest.raises(ValueError, match="got 'mean'"):
        SegmentTree(3, "mean")


def test_invalid_indices_and_values_raise_and_change_nothing() -> None:
    tree = SumSegmentTree(4)
    tree[[0, 1, 2]] = [1.0, 0.0, 2.0]
    before = tree[torch.arange(4)]
    wrong = [
        (IndexError, lambda: tree.__setitem__(4, 1.0)),
        (IndexError, lambda: tree.__setitem__([0, -5], 1.0)),
        (IndexError, lambda: tree.reduce(3, 2)),
        (IndexError, lambda: tree.reduce(0, 5)),
        (IndexError, lambda: tree[7]),
        (ValueError, lambda: tree.__setitem__(0, math.nan)),
        (ValueError, lambda: tree.__setitem__([0, 1], [1.0, math.inf])),
        (ValueError, lambda: tree.__setitem__([0, 1], [1.0, 2.0, 3.0])),
        (ValueError, lambda: tree[torch.tensor([0.5])]),
        (ValueError, lambda: tree.find_prefixsum_idx(3.1)),
        (ValueError, lambda: tree.find_prefixsum_idx(-0.1)),
        (ValueError, lambda: tree.find_prefixsum_idx(math.nan)),
        (ValueError, lambda: MinSegmentTree(3).find_prefixsum_idx(0.0)),
        (ValueError, lambda: SumSegmentTree(0)),
        (ValueError, lambda: SumSegmentTree(True)),
    ]
    for error, call in wrong:
        with pytest.raises(error):
            call()
    assert torch.equal(tree[torch.arange(4)], before)
    tree[3] = -1.0
    assert tree.reduce() == 2.0
    with pytest.raises(ValueError, match="must be >= 0"):
        tree.find_prefixsum_idx(0.0)


@pytest.mark.gpu
def test_a_tree_on_the_gpu_equals_one_on_the_cpu() -> None:
    generator = torch.Generator().manual_seed(0)
    pair = [kind(5000, device) for kind in (SumTree, MinTree) for device in ("cpu", "cuda")]
    for _ in range(5):
        places = torch.randint(5000, (3000,), generator=generator)  # many are named twice
        values = torch.rand(3000, dtype=torch.float64, generator=generator)
        for tree in pair:
            tree.write(places.to(tree.device), values.to(tree.device))
    for here, there in (pair[:2], pair[2:]):
        assert torch.equal(here.leaves_view(), there.leaves_view().cpu())
        assert there.check_valid()[0]
    weights = pair[0].leaves_view()
    total = float(weights.sum())
    masses = torch.linspace(0, 1, 777, dtype=torch.float64) * total
    actual = pair[1].find(masses.cuda()).cpu()
    assert (weights[actual] > 0).all()
    # Devices round running sums differently: a mass may fall beside the border of two places.
    after = weights.cumsum(0)[actual]
    before = after - weights[actual]
    rounding = 1e-12 * total
    assert ((before <= masses + rounding) & (masses <= after + rounding)).all()
    assert torch.equal(pair[2].at_most(0.5), pair[3].at_most(0.5).cpu())
    drawn = pair[1].draw(64, torch.Generator("cuda").manual_seed(0))
    assert drawn.is_cuda and (pair[1].read(drawn) > 0).all()
