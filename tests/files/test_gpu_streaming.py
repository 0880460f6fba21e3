"""Streaming to a CUDA device; these skip themselves where there is none."""

from __future__ import annotations

import pytest
import torch

from rollout_data import RolloutDataset
from tests.files.recorded import drain, record

pytestmark = pytest.mark.gpu


def to_cpu(batch):
    return [value.cpu() if isinstance(value, torch.Tensor) else value for value in batch]


@pytest.mark.parametrize("cache", ["none", "ram", "device"])
def test_batches_on_the_gpu_hold_what_batches_on_the_cpu_hold(tmp_path, cache):
    record(tmp_path, [9, 1, 30, 4, 17], num_envs=2, with_final=True)
    expected = drain(RolloutDataset(tmp_path, 3, 2, device="cpu"), 6)
    batches = drain(RolloutDataset(tmp_path, 3, 2, device="cuda", cache=cache), 6)
    for batch, other in zip(expected, batches, strict=True):
        assert other.observation.is_cuda and other.done.is_cuda
        for one, two in zip(batch, to_cpu(other), strict=True):
            assert torch.equal(one, two) if isinstance(one, torch.Tensor) else one == two


def test_prefetched_batches_arrive_on_the_gpu_complete(tmp_path):
    record(tmp_path, [400] * 4)
    plain = drain(RolloutDataset(tmp_path, 4, 3, device="cpu"), 8)
    dataset = RolloutDataset(tmp_path, 4, 3, device="cpu", num_transitions_per_env=8)
    for batch, expected in zip(dataset.prefetch(3, device="cuda"), plain, strict=True):
        # The sum runs on the consumer's stream: it must wait for the copy.
        assert float(batch.observation.double().sum()) == float(expected.observation.double().sum())


def test_a_data_loader_worker_stays_off_the_gpu(tmp_path):
    record(tmp_path, [9, 9])
    dataset = RolloutDataset(tmp_path, 2, device="cuda", num_transitions_per_env=3)
    loader = torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=1, multiprocessing_context="spawn")
    assert all(not batch.observation.is_cuda for batch in loader)
