"""Transitions that are drawn while rows are added: after every write they equal the pairs of a list
of all rows.
"""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from storage import DictBuffer, UsageError

NUM_DRAWS = 3000


@given(
    num_slots=st.integers(1, 7),
    num_envs=st.integers(1, 3),
    sizes=st.lists(st.one_of(st.just(1), st.integers(0, 21)), min_size=1, max_size=12),
    first_draw=st.integers(0, 3),
    is_bfloat16=st.booleans(),
    seed=st.integers(0, 999),
)
def test_pairs_equal_those_of_a_list_for_every_way_of_adding_rows(
    num_slots: int, num_envs: int, sizes: list[int], first_draw: int, is_bfloat16: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    buffer = DictBuffer(
        capacity=num_slots * num_envs, num_envs=num_envs, end_key="done", generator=seed
    )
    rows: list[list[tuple[int, bool]]] = [[] for _ in range(num_envs)]
    for step, size in enumerate(sizes):
        done = torch.rand(size, num_envs, generator=generator) < 0.3
        _extend(buffer, rows, done, torch.bfloat16 if is_bfloat16 else torch.float32)
        if step >= first_draw and len(buffer):
            assert _drawn(buffer) == _listed(rows, num_slots)
    if len(buffer):
        copy = DictBuffer(
            capacity=num_slots * num_envs, num_envs=num_envs, end_key="done", generator=seed
        )
        copy.load_state_dict(buffer.state_dict())
        assert _drawn(copy) == _listed(rows, num_slots)
        _extend(copy, rows, torch.zeros(1, num_envs, dtype=torch.bool), buffer.storage["x"].dtype)
        assert _drawn(copy) == _listed(rows, num_slots)


def test_pairs_of_single_rows_equal_those_of_a_list() -> None:
    buffer = DictBuffer(capacity=5, end_key="done", generator=0)
    rows: list[list[tuple[int, bool]]] = [[]]
    for step in range(30):
        _extend(buffer, rows, torch.tensor([[step % 4 == 2]]), torch.float32)
        assert _drawn(buffer) == _listed(rows, 5)


def test_pairs_after_clear_have_only_new_rows() -> None:
    buffer = DictBuffer(capacity=4, end_key="done", generator=0)
    rows: list[list[tuple[int, bool]]] = [[]]
    _extend(buffer, rows, torch.zeros(6, 1, dtype=torch.bool), torch.float32)
    assert _drawn(buffer) == _listed(rows, 4)
    buffer.clear()
    rows[0].clear()
    for _ in range(6):
        _extend(buffer, rows, torch.zeros(1, 1, dtype=torch.bool), torch.float32)
        assert _drawn(buffer) == _listed(rows, 4)


def test_an_earlier_draw_does_not_change_later_rows() -> None:
    early, late = (DictBuffer(capacity=50, end_key="done", generator=3) for _ in range(2))
    data = {"x": torch.arange(40.0).view(-1, 1), "done": torch.arange(40).view(-1, 1) % 7 == 0}
    early.extend(data)
    early.sample_transitions(4, next_keys="x")
    late.extend(data)
    late.load_state_dict(early.state_dict())
    for buffer in (early, late):
        buffer.extend(data)
    first, second = (buffer.sample_transitions(64, next_keys="x")["x"] for buffer in (early, late))
    assert torch.equal(first, second)


def _extend(
    buffer: DictBuffer, rows: list[list[tuple[int, bool]]], done: torch.Tensor, dtype: torch.dtype
) -> None:
    """Add steps whose value counts the steps of all envs, below 256, which bfloat16 represents
    exactly.
    """
    first = len(rows[0])
    counted = torch.arange(first, first + len(done)).unsqueeze(1).expand(done.shape)
    envs = torch.arange(done.shape[1]).expand(done.shape)
    buffer.extend(
        {
            "x": counted.reshape(-1, 1).to(dtype),
            "env": envs.reshape(-1, 1),
            "done": done.reshape(-1, 1),
        }
    )
    for env, column in enumerate(rows):
        column += [(first + step, bool(done[step, env])) for step in range(len(done))]


def _listed(rows: list[list[tuple[int, bool]]], num_slots: int) -> set[tuple[int, int, int]]:
    """List all pairs of stored rows of one trajectory: env, first, second."""
    return {
        (env, first, second)
        for env, column in enumerate(rows)
        for (first, is_end), (second, _) in zip(
            column[-num_slots:], column[-num_slots:][1:], strict=False
        )
        if not is_end
    }


def _drawn(buffer: DictBuffer) -> set[tuple[int, int, int]]:
    """Collect the pairs of many draws; an empty set if none can be drawn."""
    try:
        actual: dict[str, Any] = buffer.sample_transitions(NUM_DRAWS, next_keys=("x", "env"))
    except UsageError:
        return set()
    assert torch.equal(actual["env"], actual["next"]["env"])
    columns = (actual["env"], actual["x"], actual["next"]["x"])
    return set(zip(*(column.flatten().int().tolist() for column in columns), strict=True))
