"""Padding: splitting and joining are inverse for any event rank and any pattern of dones."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from storage import SchemaError, split_and_pad_trajectories, unpad_trajectories
from storage.core.fields import signed


def naive_split(x, dones):
    """Split env by env with plain loops."""
    trajectories = []
    for env in range(x.shape[1]):
        start = 0
        for t in range(x.shape[0]):
            if dones[t, env] or t == x.shape[0] - 1:
                trajectories.append(x[start : t + 1, env])
                start = t + 1
    return trajectories


@given(
    st.integers(1, 8),
    st.integers(1, 6),
    st.lists(st.integers(1, 3), max_size=3),
    st.sampled_from([0.0, 0.3, 1.0]),
    st.sampled_from(
        [
            torch.float32,
            torch.uint8,
            torch.bool,
            torch.int64,
            torch.float16,
            torch.uint16,
            torch.uint64,
        ]
    ),
    st.integers(0, 100),
)
def test_splitting_equals_the_naive_loop_and_joining_undoes_it(
    num_steps, num_envs, event, rate, dtype, seed
):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(1, 200, (num_steps, num_envs, *event), generator=generator).to(dtype)
    dones = torch.rand(num_steps, num_envs, generator=generator) < rate
    expected = naive_split(x, dones)
    padded, masks = split_and_pad_trajectories(x, dones)
    assert padded.dtype == dtype and masks.dtype == torch.bool
    assert (
        padded.shape == (num_steps, len(expected), *event)
        and int(masks.sum()) == num_steps * num_envs
    )
    for k, trajectory in enumerate(expected):
        assert masks[:, k].tolist() == [t < len(trajectory) for t in range(num_steps)]
        assert torch.equal(padded[: len(trajectory), k], trajectory)
        assert not signed(padded)[len(trajectory) :, k].any()
    assert torch.equal(unpad_trajectories(padded, masks), x)


@pytest.mark.parametrize("num_steps", [1, 2, 3, 4])
def test_every_pattern_of_dones_comes_back(num_steps):
    dones = torch.tensor(list(itertools.product([0, 1], repeat=num_steps))).T
    x = torch.arange(dones.numel()).reshape(dones.shape)
    padded, masks = split_and_pad_trajectories(x, dones.unsqueeze(-1).float())
    assert torch.equal(unpad_trajectories(padded, masks), x)


def test_a_nested_dict_is_split_leaf_by_leaf():
    x = {"a": torch.randn(3, 2, 4), "b": {"c": torch.ones(3, 2, dtype=torch.uint8)}}
    padded, masks = split_and_pad_trajectories(x, torch.zeros(3, 2))
    assert padded["b"]["c"].dtype == torch.uint8
    assert torch.equal(unpad_trajectories(padded, masks)["a"], x["a"])


def test_i12_padding_is_zero_in_the_fields_own_dtype_whatever_memory_held():
    for _ in range(3):
        junk = torch.full((50, 40, 8), float("nan"))
        del junk
        padded, masks = split_and_pad_trajectories(torch.ones(10, 8, 8), torch.rand(10, 8) < 0.5)
        assert not padded[~masks].any() and padded[masks].eq(1).all()


def test_gradients_flow_through_both():
    x = torch.randn(4, 3, 2, requires_grad=True)
    padded, masks = split_and_pad_trajectories(x, torch.rand(4, 3) < 0.5)
    (unpad_trajectories(padded, masks) * 2).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 2))


def test_wrong_shapes_give_exact_errors():
    with pytest.raises(SchemaError) as caught:
        split_and_pad_trajectories(torch.zeros(3, 2), torch.zeros(3, 4))
    assert str(caught.value) == (
        "split_and_pad_trajectories: x has shape (3, 2), expected (3, 4, ...)."
    )
    masks = torch.tensor([[True, True], [False, True], [False, False]])
    masks[0, 0] = False
    with pytest.raises(SchemaError) as caught:
        unpad_trajectories(torch.zeros(3, 2), masks)
    assert str(caught.value) == (
        "unpad_trajectories: masks have 2 True values, expected a multiple of 3, the number of steps."
    )
    with pytest.raises(
        SchemaError, match=r"dones have shape \(0, 2\), expected \(T, B\) or \(T, B, 1\)"
    ):
        split_and_pad_trajectories(torch.zeros(0, 2), torch.zeros(0, 2))
    for wrong, got in (
        (torch.ones(3, 2, 1, dtype=torch.bool), r"shape \(3, 2, 1\)"),
        ([True], "list"),
    ):
        with pytest.raises(
            SchemaError, match=rf"masks must be a tensor of shape \(T, n\), got {got}"
        ):
            unpad_trajectories(torch.zeros(3, 2), wrong)
