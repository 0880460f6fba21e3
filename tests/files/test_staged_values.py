"""Values between `add` and the file are copied in runs for any memory layout of the caller.

Rewards are summed.
"""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_data import RolloutWriter
from tests.files.readback import blocks_of, trajectories_of

N = 3
SHAPES = {"observation": ((2, 2), "float32"), "action": ((), "bool"), "wide": ((1500,), "int16")}
#: Memory layouts of a `[T, N, ...]` array.
LYING = {
    "in order": np.ascontiguousarray,
    "envs first": lambda values: np.ascontiguousarray(values.swapaxes(0, 1)).swapaxes(0, 1),
    "in Fortran's order": np.asfortranarray,
    "every other": lambda values: np.repeat(values, 2, axis=1)[:, ::2],
    "the same for all": lambda values: np.broadcast_to(values[:, :1], values.shape),
}


@settings(max_examples=40, deadline=None)
@given(
    parts=st.lists(
        st.tuples(st.sampled_from([0, 1, 1, 2, 7]), st.sampled_from(sorted(LYING))), max_size=6
    ),
    seed=st.integers(0, 99),
    block_bytes=st.sampled_from([1, 50_000, 1 << 20]),
)
def test_steps_of_any_memory_layout_are_copied(tmp_path_factory, parts, seed, block_bytes):
    generator, folder = np.random.default_rng(seed), tmp_path_factory.mktemp("data")
    expected: dict[str, list[np.ndarray]] = {name: [] for name in SHAPES}
    with RolloutWriter(folder, N, durable=False, block_bytes=block_bytes) as writer:
        for count, lying in parts:
            fields = {}
            for name, (shape, dtype) in SHAPES.items():
                values = generator.integers(
                    0, 2 if dtype == "bool" else 99, (count, N, *shape)
                ).astype(dtype)
                fields[name] = LYING[lying](values)
                fields[name].flags.writeable = False
                expected[name].append(fields[name].copy())
            writer.add_rollout(fields)
            if count == 1:
                writer.add({name: values[0] for name, values in fields.items()})
                for name, values in fields.items():
                    expected[name].append(values.copy())
    actual = trajectories_of(folder)
    assert len(actual) == (N if any(count for count, _ in parts) else 0)
    for trajectory in actual:
        for name, copies in expected.items():
            np.testing.assert_array_equal(
                trajectory.column(name), np.concatenate(copies)[:, trajectory.env]
            )


@pytest.mark.parametrize("shape", [(), (1,), (2, 2)])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "bool", "int64"])
def test_reward_sums_equal_a_naive_sum_for_every_dtype(tmp_path, dtype, shape):
    """Trajectories of env e have e + 1 frames. NaN and Inf are data, and cause no warning."""
    generator = torch.Generator().manual_seed(0)
    rewards = (torch.randn(12, N, *shape, generator=generator, dtype=torch.float64) * 50).to(
        getattr(torch, dtype)
    )
    if rewards.is_floating_point():
        rewards[3, 1], rewards[4, 1], rewards[5, 1], rewards[7, 2] = (
            torch.nan,
            torch.inf,
            -torch.inf,
            torch.inf,
        )
    done = (torch.arange(12)[:, None] + 1) % (torch.arange(N) + 1) == 0
    action = torch.zeros(12, N, 1)
    with (
        warnings.catch_warnings(),
        RolloutWriter(tmp_path, N, durable=False, max_pending_blocks=1) as writer,
    ):
        warnings.simplefilter("error")
        writer.add_rollout(observation=action, action=action, reward=rewards, done=done)
    (block,) = blocks_of(tmp_path)
    wide = rewards.double().numpy().reshape(12, N, -1)
    assert len(block.fragments) == 12 + 6 + 4
    for fragment, got in zip(block.fragments, block.reward_sums, strict=True):
        start = int(fragment["row"]) % 12
        with np.errstate(invalid="ignore"):
            expected = wide[start : start + int(fragment["length"]), fragment["env"]].sum(axis=0)
        np.testing.assert_allclose(got, expected, rtol=1e-12)
