"""Windows by priority equal a list of all windows, after any sequence of steps and updates."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from storage import BufferEmptyError, PrioritizedWindows, sequence_priorities


class Model:
    """All steps, in a list per environment; windows by (environment, last step)."""

    def __init__(self, capacity: int, length: int, stride: int) -> None:
        self.capacity, self.length, self.stride = capacity, length, stride
        self.ends: list[list[bool]] = []
        self.priorities: dict[tuple[int, int], float] = {}
        self.max_priority = 1.0

    def extend(self, ends: list[list[bool]]) -> None:
        before = len(self.ends)
        self.ends += ends
        total, lanes = len(self.ends), len(self.ends[0])
        kept = {}
        for lane in range(lanes):
            age = -1
            for row in range(total):
                age = 0 if row == 0 or self.ends[row - 1][lane] else age + 1
                past = age - (self.length - 1)
                is_window = past >= 0 and (past % self.stride == 0 or self.ends[row][lane])
                if is_window and row - (self.length - 1) >= total - self.capacity:
                    if row >= before:
                        kept[lane, row] = self.max_priority
                    elif (lane, row) in self.priorities:
                        kept[lane, row] = self.priorities[lane, row]
                # A step that was not the last of its trajectory when it came stays as it was.
        self.priorities = kept


def steps(first: int, ends: list[list[bool]]) -> dict[str, torch.Tensor]:
    done = torch.tensor(ends).unsqueeze(-1)
    row = torch.arange(first, first + len(ends)).view(-1, 1, 1).expand(-1, done.shape[1], 1)
    lane = torch.arange(done.shape[1]).view(1, -1, 1).expand(len(ends), -1, 1)
    return {
        "x": {"code": row * 10 + lane},
        "hidden": row.float().expand(-1, -1, 3).contiguous(),
        "done": done,
    }


@settings(max_examples=40)
@given(data=st.data(), lanes=st.integers(1, 3), length=st.integers(1, 5), stride=st.integers(1, 4))
def test_any_sequence_of_calls_equals_the_model(
    data: st.DataObject, lanes: int, length: int, stride: int
) -> None:
    capacity = data.draw(st.integers(length, 20))
    buffer = PrioritizedWindows(
        capacity, length, stride=stride, generator=0, alpha=1.0, anneal_step=0
    )
    model, total, seen = Model(capacity, length, stride), 0, []
    for _ in range(data.draw(st.integers(1, 6))):
        row = st.lists(st.sampled_from([False, False, False, True]), min_size=lanes, max_size=lanes)
        ends = data.draw(st.lists(row, min_size=1, max_size=25))
        buffer.extend(steps(total, ends))
        model.extend(ends)
        total += len(ends)
        assert buffer.check_valid() == (True, "") and len(buffer) == len(model.priorities)
        if not model.priorities:
            with pytest.raises(BufferEmptyError):
                buffer.sample(1)
            continue
        batch, weights, ids = buffer.sample(8)
        assert batch["x"]["code"].shape == (8, length, 1) and batch["hidden"].shape == (
            8,
            length,
            3,
        )
        code = batch["x"]["code"][..., 0]
        assert (code.diff(dim=1) == 10).all()
        assert torch.equal(batch["hidden"][..., 0].long(), code // 10)
        least, mass = min(model.priorities.values()), sum(model.priorities.values())
        assert float(buffer.state_dict()["tensors"]["weights"].sum()) == pytest.approx(
            mass, rel=1e-9
        )
        names = [(int(last) % 10, int(last) // 10) for last in code[:, -1]]
        for name, weight in zip(names, weights.tolist(), strict=True):
            assert weight == pytest.approx((model.priorities[name] / least) ** -0.4, rel=1e-5)
        seen += list(zip(ids.tolist(), names, strict=True))
        chosen = data.draw(st.lists(st.sampled_from(seen), max_size=5))
        values = [0.5 + number for number in range(len(chosen))]
        alive = [name in model.priorities for _, name in chosen]
        dead = buffer.num_dead_updates
        assert buffer.update_priorities(
            torch.tensor([i for i, _ in chosen], dtype=torch.int64), values
        ) == sum(alive)
        assert buffer.num_dead_updates - dead == len(alive) - sum(alive)
        for (_, name), value, is_alive in zip(chosen, values, alive, strict=True):
            if is_alive:
                model.priorities[name] = value + 1e-5
                model.max_priority = max(model.max_priority, value)


def test_windows_are_drawn_by_their_priorities() -> None:
    buffer = PrioritizedWindows(50, 4, generator=0, alpha=1.0)
    buffer.extend(steps(0, [[i in (19, 40), i == 30] for i in range(60)]))
    _, _, ids = buffer.sample(len(buffer))
    assert len(set(ids.tolist())) == len(buffer), "equal priorities: one each"
    priorities = (torch.arange(len(ids)) % 5 + 1).double()
    buffer.update_priorities(ids, priorities)
    counts = {int(i): 0 for i in ids}
    for _ in range(300):
        for i in buffer.sample(40)[2].tolist():
            counts[i] += 1
    expected = priorities / priorities.sum() * 300 * 40
    actual = torch.tensor([counts[int(i)] for i in ids])
    assert float(((actual - expected) ** 2 / expected).sum()) < len(ids) + 4 * math.sqrt(
        2 * len(ids)
    )


def test_invalid_arguments_raise_and_change_nothing() -> None:
    for arguments in ((3, 4), (0, 1), (4, 0)):
        with pytest.raises(ValueError, match=r"^PrioritizedWindows: "):
            PrioritizedWindows(*arguments)
    buffer = PrioritizedWindows(10, 2, generator=0)
    assert buffer.update_priorities([1, 2], [1.0, 2.0]) == 0 and buffer.num_dead_updates == 2
    with pytest.raises(KeyError, match="done"):
        buffer.extend({"x": torch.zeros(3, 1, 1)})
    buffer.extend(steps(0, [[False]] * 5))
    for bad in (-1.0, math.nan):
        with pytest.raises(ValueError, match="priorities must be finite and >= 0"):
            buffer.update_priorities([1, 2], [1.0, bad])
    with pytest.raises(ValueError, match="has 2 lanes, expected 1"):
        buffer.extend(steps(0, [[False, True]]))
    assert len(buffer) == 4 and buffer.max_priority == 1.0


def test_updates_of_negative_ids_are_counted_as_dead() -> None:
    # So that the mark falls into the slot of step 0, no window
    buffer = PrioritizedWindows(4, 2, generator=0)
    buffer.extend(steps(0, [[False]] * 3))
    before = buffer.state_dict()["tensors"]
    ids = torch.tensor([-(1 << 62), -1, -4])
    assert buffer.update_priorities(ids, [5.0, 6.0, 7.0]) == 0
    assert buffer.num_dead_updates == 3 and buffer.max_priority == 1.0
    assert buffer.check_valid() == (True, "")
    for name, tensor in buffer.state_dict()["tensors"].items():
        assert torch.equal(tensor, before[name]), name


def test_any_value_of_any_end_field_ends_a_trajectory_and_a_field_without_values_ends_none() -> (
    None
):
    data = steps(0, [[False]] * 4)
    data["ends"] = {
        "two": torch.zeros(4, 1, 2),
        "none": torch.zeros(4, 1, 0),
        "one": torch.zeros(4, 1, 1),
    }
    data["ends"]["two"][1, 0, 1] = -0.5
    buffer = PrioritizedWindows(4, 2, end_key=["done", "ends"], generator=0)
    buffer.extend(data)
    assert sorted(buffer.sample(2)[2].tolist()) == [1, 3]
    endless = PrioritizedWindows(4, 2, end_key=[], generator=0)
    endless.extend(data)
    assert sorted(endless.sample(3)[2].tolist()) == [1, 2, 3]


def test_priorities_of_sequences_mix_the_largest_and_the_mean() -> None:
    errors = torch.tensor([[1.0, -3.0], [0.0, 2.0], [5.0, 1.0]])
    assert sequence_priorities(errors).tolist() == pytest.approx(
        [0.9 * 3 + 0.1 * 2, 0.9 * 2 + 0.1, 0.9 * 5 + 0.1 * 3]
    )
    mask = torch.tensor([[False, True], [False, False], [True, True]])
    assert sequence_priorities(errors, 0.5, mask).tolist() == pytest.approx([3.0, 0.0, 4.0])
    with pytest.raises(ValueError, match="errors"):
        sequence_priorities(torch.zeros(3))
