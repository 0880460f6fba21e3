"""`AdvancedReplayBuffer` equals a list of rows after any sequence of calls, and draws by the closed form."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from storage import AdvancedReplayBuffer
from tests.managed.naive_model import PriorityModel, item, number_of

PRIORITY = st.sampled_from([None, None, 0.0, 1e-6, 0.5, 1.0, 2.0, 30.0])
LIMIT = st.sampled_from([math.inf, math.inf, 1, 2, 5])


def check(buffer: AdvancedReplayBuffer, model: PriorityModel) -> None:
    """Check that count, law of draws and largest priority equal those of the model."""
    assert buffer.check_valid() == (True, "")
    assert buffer.count() == len(model.rows) and buffer.push_count == model.total
    assert buffer.max_priority == model.max_priority
    weights = buffer.state_dict()["tensors"]["weights"]
    expected = model.probabilities()
    assert float(weights.sum()) > 0 or not expected
    for row_id, chance in expected.items():
        assert float(weights[row_id % model.size] / weights.sum()) == pytest.approx(
            chance, rel=1e-9, abs=1e-300
        )
    assert int((weights > 0).sum()) == sum(chance > 0 for chance in expected.values())


@settings(max_examples=60)
@given(
    data=st.data(),
    size=st.integers(1, 40),
    max_use=LIMIT,
    max_staleness=LIMIT,
    alpha=st.sampled_from([0, 0.6, 1]),
)
def test_any_sequence_of_calls_equals_the_model(
    data: st.DataObject, size: int, max_use: float, max_staleness: float, alpha: float
) -> None:
    buffer = AdvancedReplayBuffer(
        size,
        max_use=max_use,
        max_staleness=max_staleness,
        alpha=alpha,
        anneal_step=10,
        generator=0,
        min_sample_ratio=0,
    )
    model, iteration, num_draws, given_out = (
        PriorityModel(size, max_use, max_staleness, alpha),
        0,
        0,
        [0],
    )
    for _ in range(data.draw(st.integers(1, 12))):
        kind = data.draw(st.sampled_from(["push", "push", "batch", "sample", "tensors", "update"]))
        iteration += data.draw(st.integers(0, 2))
        if kind == "push":
            new = data.draw(
                st.lists(st.tuples(PRIORITY, st.one_of(st.none(), st.integers(-3, 0))), max_size=5)
            )
            items = []
            for number, (priority, age) in enumerate(new, model.total):
                more = {} if age is None else {"collect_iter": [iteration, iteration + age]}
                items.append(
                    item(number, **more, **({} if priority is None else {"priority": priority}))
                )
            buffer.push(items)
            for number, (priority, age) in enumerate(new, model.total):
                model.push(number, priority, None if age is None else iteration + age)
        elif kind == "sample":
            num_drawn = data.draw(st.integers(1, 10))
            actual = buffer.sample(num_drawn, iteration)
            model.drop_stale(iteration)
            chances = model.probabilities()
            if not chances:
                assert actual is None
                continue
            beta = 0.4 + 0.6 * min(1, num_draws / 10)
            num_draws += 1
            row_ids = [int(x["replay_unique_id"].rpartition("_")[2]) for x in actual]
            assert [number_of(x) for x in actual] == row_ids
            for x, row_id in zip(actual, row_ids, strict=True):
                row = model.row(row_id)
                assert (
                    x["IS"] == pytest.approx(model.importance(row_id, beta), rel=1e-9)
                    and 0 < x["IS"] <= 1
                )
                assert x["priority"] == pytest.approx(row.priority, rel=1e-12)
                assert x["staleness"] == (
                    -1 if row.collected is None else iteration - row.collected
                )
                assert x["replay_buffer_idx"] == row_id % size
            assert [x["use"] for x in actual] == model.drawn(row_ids)
            # One draw per interval of equal mass: never more than one away from what is expected.
            for row_id, num_copies in Counter(row_ids).items():
                assert abs(num_copies - chances[row_id] * num_drawn) < 2
            given_out += row_ids
        elif kind == "update":
            ids = data.draw(st.lists(st.sampled_from(given_out), max_size=6))
            priorities = data.draw(
                st.lists(st.floats(0, 100), min_size=len(ids), max_size=len(ids))
            )
            names = [f"buffer_{row_id}" for row_id in ids]
            dead_before = buffer.num_dead_updates
            applied = buffer.update({"replay_unique_id": names, "priority": priorities})
            assert applied == model.update(ids, priorities)
            assert buffer.num_dead_updates - dead_before == len(ids) - applied
        check(buffer, model)


@settings(max_examples=40)
@given(data=st.data(), size=st.integers(1, 100), alpha=st.sampled_from([0.3, 1.0]), max_use=LIMIT)
def test_tensor_methods_equal_the_model(
    data: st.DataObject, size: int, alpha: float, max_use: float
) -> None:
    buffer = AdvancedReplayBuffer(
        size, alpha=alpha, max_use=max_use, generator=0, min_sample_ratio=0, anneal_step=0
    )
    model = PriorityModel(size, max_use, alpha=alpha)
    for _ in range(data.draw(st.integers(1, 6))):
        num_rows = data.draw(st.integers(0, 130))
        numbers = torch.arange(model.total, model.total + num_rows)
        priorities = data.draw(st.one_of(st.none(), st.floats(0, 10)))
        ids = buffer.extend_tensors(
            {"x": {"y": numbers.float().unsqueeze(1)}, "z": numbers.numpy()}, priorities
        )
        for number in numbers.tolist():
            model.push(number, priorities, None)
        assert ids.tolist() == list(range(max(model.total - min(size, num_rows), 0), model.total))
        check(buffer, model)
        if not model.probabilities():
            with pytest.raises(ValueError, match=r"buffer 'buffer' has .* too few for a batch"):
                buffer.sample_tensors(4)
            continue
        batch, weights, ids = buffer.sample_tensors(data.draw(st.integers(1, 50)))
        assert torch.equal(batch["x"]["y"][:, 0].long(), ids) and torch.equal(batch["z"], ids)
        assert weights.dtype == torch.float32 and ids.dtype == torch.int64
        for row_id, weight in zip(ids.tolist(), weights.tolist(), strict=True):
            assert weight == pytest.approx(model.importance(row_id, 0.4), rel=1e-6)
        model.drawn(ids.tolist())
        new = torch.rand(len(ids), generator=torch.Generator().manual_seed(0)) * 5
        assert buffer.update_priorities(ids, new) == model.update(
            ids.tolist(), new.double().tolist()
        )
        check(buffer, model)


def test_counts_of_draws_follow_the_priorities() -> None:
    generator = torch.Generator().manual_seed(1)
    buffer = AdvancedReplayBuffer(500, generator=0, max_use=None)
    buffer.extend_tensors({"x": torch.arange(500.0)}, torch.rand(500, generator=generator) ** 3)
    counts = torch.zeros(500, dtype=torch.float64)
    for _ in range(400):
        counts += torch.bincount(buffer.sample_tensors(100)[2], minlength=500)
    weights = buffer.state_dict()["tensors"]["weights"]
    expected = weights / weights.sum() * 40_000
    statistic = float(((counts - expected) ** 2 / expected).sum())
    assert statistic < 500 + 4 * math.sqrt(1000)
    uses = {x["replay_buffer_idx"]: x["use"] for x in buffer.sample(200)}
    assert all(use - counts[slot] >= 1 for slot, use in uses.items())


def test_beta_grows_to_one_over_anneal_step_draws_and_stays_there() -> None:
    buffer = AdvancedReplayBuffer(4, beta=0.4, anneal_step=4, generator=0)
    buffer.extend_tensors({"x": torch.zeros(4, 1)}, torch.tensor([1.0, 2.0, 3.0, 4.0]))
    betas = []
    for number in range(7):
        betas.append(buffer.beta)
        (buffer.sample if number % 2 else buffer.sample_tensors)(2)
    assert betas == pytest.approx([0.4, 0.55, 0.7, 0.85, 1.0, 1.0, 1.0])
    assert buffer.sample(100) is None and buffer.beta == 1.0
    fixed = AdvancedReplayBuffer(4, anneal_step=0, generator=0)
    fixed.extend_tensors({"x": torch.zeros(4, 1)})
    fixed.sample(4)
    assert fixed.beta == 0.4


def test_stale_items_are_dropped_in_any_order_of_collection() -> None:
    buffer = AdvancedReplayBuffer(5000, max_staleness=10, generator=0)
    order = torch.randperm(4000, generator=torch.Generator().manual_seed(0))
    buffer.extend_tensors({"x": torch.zeros(4000, 1)}, collect_iter=order // 40)
    for iteration in range(10, 60):
        for _ in range(2):
            assert buffer.sample_check(10, iteration)
            assert buffer.count() == 4000 - 40 * (iteration - 9)
    assert buffer.check_valid() == (True, "")
