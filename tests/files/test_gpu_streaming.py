"""Streaming to a CUDA device; these skip themselves where there is none."""

from __future__ import annotations

import pytest
import torch

from rollout_data import RolloutDataset, WindowDataset, WindowLoader
from tests.files.recorded import drain, record
from tests.test_device_calls import no_waits

pytestmark = pytest.mark.gpu


def to_cpu(batch):
    return [value.cpu() if isinstance(value, torch.Tensor) else value for value in batch]


@pytest.mark.parametrize("cache", ["none", "ram", "device"])
def test_batches_on_the_gpu_equal_batches_on_the_cpu(tmp_path, cache):
    record(tmp_path, [9, 1, 30, 4, 17], num_envs=2, with_final=True)
    expected = drain(RolloutDataset(tmp_path, 3, 2, device="cpu"), 6)
    batches = drain(RolloutDataset(tmp_path, 3, 2, device="cuda", cache=cache), 6)
    for batch, other in zip(expected, batches, strict=True):
        assert other.observation.is_cuda and other.done.is_cuda
        for item, two in zip(batch, to_cpu(other), strict=True):
            assert torch.equal(item, two) if isinstance(item, torch.Tensor) else item == two


def equal_batches(batch, other):
    return all(
        torch.equal(item, two) if isinstance(item, torch.Tensor) else item == two
        for item, two in zip(to_cpu(batch), to_cpu(other), strict=True)
    )


@pytest.mark.each_value
@pytest.mark.parametrize("with_final", [False, True])
@pytest.mark.parametrize("num_steps", [1, 24])
@pytest.mark.parametrize("cache", ["ram", "device"])
def test_playback_on_the_gpu_does_not_wait_and_equals_the_cpu(
    any_device, tmp_path, cache, num_steps, with_final
):
    lengths = [9, 1, 30, 4, 17] * 3 + [6]
    ends = ["terminated", "truncated", "terminated", "truncated", "terminated"] * 3 + ["open"]
    record(tmp_path, lengths, num_envs=2, with_final=with_final, ends=ends)
    options = {
        "dataset_loops": 0,
        "random_shuffle_traj_order": True,
        "starting_frame_range": (0, 3),
        "seed": 1,
    }
    expected = RolloutDataset(tmp_path, 6, device="cpu", **options)
    dataset = RolloutDataset(tmp_path, 6, device="cuda", cache=cache, **options)
    dataset.reset()  # the cache is filled here
    for _ in range(12):
        batch = expected.get_batch(num_steps)
        with no_waits():
            other = dataset.get_batch(num_steps)
        assert other.observation.is_cuda
        assert equal_batches(batch, other)


def test_without_final_privileged_observations_the_next_ones_follow_the_stream_on_a_device(
    any_device, tmp_path
):
    record(tmp_path, [3, 5, 2], with_final="observation")
    for cache in ("none", "ram", "device"):
        expected = drain(RolloutDataset(tmp_path, 2, 4, device="cpu"), 4)
        batches = drain(RolloutDataset(tmp_path, 2, 4, device="cuda", cache=cache), 4)
        assert all(map(equal_batches, expected, batches))


def test_windows_are_copied_to_the_device_without_a_wait(any_device, tmp_path):
    record(tmp_path, [40, 30], with_final=True)
    windows = WindowDataset(tmp_path, 4, next_observations=True)
    expected = WindowLoader(windows, 8, seed=3)
    loader = WindowLoader(windows, 8, seed=3, device="cuda")
    with no_waits():
        batches = list(loader)
    for batch, other in zip(batches, expected, strict=True):
        assert batch["observation"].is_cuda
        assert torch.equal(batch["observation"].cpu(), other["observation"])
        assert torch.equal(batch["next_observation"].cpu(), other["next_observation"])


def test_prefetched_batches_on_the_gpu_are_complete(tmp_path):
    record(tmp_path, [400] * 4)
    plain = drain(RolloutDataset(tmp_path, 4, 3, device="cpu"), 8)
    dataset = RolloutDataset(tmp_path, 4, 3, device="cpu", num_transitions_per_env=8)
    for batch, expected in zip(dataset.prefetch(3, device="cuda"), plain, strict=True):
        # The sum runs on the consumer's stream: it must wait for the copy.
        assert float(batch.observation.double().sum()) == float(expected.observation.double().sum())


def test_a_data_loader_worker_does_not_use_the_gpu(tmp_path):
    record(tmp_path, [9, 9])
    dataset = RolloutDataset(tmp_path, 2, device="cuda", num_transitions_per_env=3)
    loader = torch.utils.data.DataLoader(
        dataset, batch_size=None, num_workers=1, multiprocessing_context="spawn"
    )
    assert all(not batch.observation.is_cuda for batch in loader)
