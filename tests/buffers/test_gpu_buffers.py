"""The same buffers on CUDA; skipped without a device."""

from __future__ import annotations

import pytest
import torch

from storage import (
    DictBuffer,
    TrajectoryDictBuffer,
    TrajectoryDictBufferMultiDim,
    ZBuffer,
    load_buffer,
)

from .streams import Naive, chi_square, chi_square_bound, drawn_windows, rows

pytestmark = pytest.mark.gpu


def test_uniform_sampling_and_adding_never_wait_for_the_device() -> None:
    buffer = DictBuffer(capacity=1000, device="cuda", generator=0)
    z = ZBuffer(100, 8, "cuda", generator=0)
    row = {
        "a": {"b": torch.rand(64, 3, device="cuda")},
        "c": torch.ones(64, 1, dtype=torch.bool, device="cuda"),
    }
    latent = torch.rand(5, 8, device="cuda")
    buffer.extend(row)
    z.add(latent)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            buffer.extend(row)
            z.add(latent)
            batch, actual = buffer.sample(256), z.sample(7)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert (
        batch["a"]["b"].device.type == "cuda" and bool(batch["c"].all()) and actual.shape == (7, 8)
    )


@pytest.mark.parametrize("start_mode", ["uniform", "trajectory"])
def test_windows_on_the_device_follow_their_law(start_mode: str) -> None:
    buffer = TrajectoryDictBufferMultiDim(
        capacity=14,
        n_dim=2,
        device="cuda",
        output_device="cpu",
        end_key="done",
        start_mode=start_mode,
        generator=0,
    )
    naive = Naive(14, 3)
    for size in (3, 1, 1, 20, 5):
        ends = torch.rand(size, 3) < 0.2
        buffer.extend(rows(naive.total, ends))
        naive.add(ends)
    law = naive.law_by_trajectory(3)
    if start_mode == "uniform":
        law = dict.fromkeys(law, 1 / len(law))
    counts = drawn_windows(buffer, 100_000, 2)
    assert set(counts) == set(law) and chi_square(counts, law) < chi_square_bound(len(law))


def test_transitions_and_experts_on_the_device() -> None:
    buffer = DictBuffer(capacity=60, num_envs=2, device="cuda", end_key="done", generator=0)
    for step in range(50):
        observation = torch.full((2, 1), float(step), device="cuda")
        done = torch.full((2, 1), step % 6 == 5, device="cuda")
        buffer.extend(
            {"observation": observation, "reward": observation, "done": done},
            final={"observation": observation + 0.5},
        )
    batch = buffer.sample_transitions(500)
    step, following = batch["observation"], batch["next"]["observation"]
    assert torch.equal(following, torch.where(step % 6 == 5, step + 0.5, step + 1))
    assert buffer.sample_transitions(50, num_steps=3, num_frames=2)["observation"].shape == (
        50,
        2,
        1,
    )
    expert = TrajectoryDictBuffer([{"observation": torch.zeros(9, 2)}], "cuda", 3, generator=0)
    expert.update_priorities([2.0], [0])
    assert expert.sample(6)["observation"].device.type == "cuda"


def test_streams_are_ordered_by_events() -> None:
    # The pretended device executes at once, so only a GPU can show a missing order by its values.
    # tests/storage/test_stream_order.py shows that the streams wait.
    buffer = DictBuffer(capacity=64, device="cuda", generator=0)
    side = torch.cuda.Stream()
    buffer.extend({"x": torch.zeros(64, 4096, device="cuda")})
    for number in range(1, 30):
        with torch.cuda.stream(side):
            torch.cuda._sleep(1_000_000)
            buffer.extend({"x": torch.full((64, 4096), float(number), device="cuda")})
        assert bool((buffer.sample(64)["x"] == number).all())


def test_a_saved_buffer_moves_between_devices(tmp_path) -> None:
    buffer = DictBuffer(capacity=8, device="cuda")
    buffer.extend({"x": torch.arange(5.0).unsqueeze(1)})
    buffer.save(tmp_path / "b")
    assert load_buffer(tmp_path / "b").device.type == "cuda"
    assert load_buffer(tmp_path / "b", device="cpu").storage["x"][:5].flatten().tolist() == [
        0,
        1,
        2,
        3,
        4,
    ]
