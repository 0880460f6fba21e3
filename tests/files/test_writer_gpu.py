"""Recording tensors that live on a GPU."""

from __future__ import annotations

import pytest
import torch

from rollout_data.writing.rollout_writer import RolloutWriter
from tests.files.readback import trajectories_of


@pytest.mark.gpu
def test_tensors_on_a_gpu_are_recorded_like_those_on_the_cpu(tmp_path):
    generator = torch.Generator().manual_seed(0)
    depth = torch.rand(7, 5, 8, 8, generator=generator)
    values = {
        "observation": {"state": torch.randn(7, 5, 3, generator=generator), "depth": depth},
        "action": torch.randn(7, 5, 2, generator=generator).to(torch.bfloat16),
        "reward": torch.randn(7, 5, 1, generator=generator),
        "done": torch.rand(7, 5, generator=generator) < 0.3,
    }
    values["final_observation"] = {name: value + 1 for name, value in values["observation"].items()}

    def on(device, value):
        return {name: on(device, item) for name, item in value.items()} if isinstance(value, dict) else value.to(device)

    def at(t, value):
        return {name: at(t, item) for name, item in value.items()} if isinstance(value, dict) else value[t]

    options = {"obs_disassemble_mapping": {"depth": "normalized_image"}, "durable": False}
    with RolloutWriter(tmp_path / "cpu", 5, **options) as writer:
        writer.add_rollout(**values)
    with RolloutWriter(tmp_path / "gpu", 5, **options) as writer:
        for t in range(3):
            writer.add(**at(t, on("cuda", values)))
        writer.add_rollout(**at(slice(3, None), on("cuda", values)))
    pairs = zip(trajectories_of(tmp_path / "cpu"), trajectories_of(tmp_path / "gpu"), strict=True)
    for expected, got in pairs:
        assert (got.env, got.flags, got.length) == (expected.env, expected.flags, expected.length)
        assert all((got.column(name) == expected.column(name)).all() for name in expected.fields)
        assert (got.finals is None) == (expected.finals is None)
