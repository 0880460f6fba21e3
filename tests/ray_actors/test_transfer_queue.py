"""Rows through TransferQueue: one process adds rows, another draws them, whole and with equal
probability.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip(
    "transfer_queue", reason="TransferQueue is not installed: pip install TransferQueue"
)
pytest.importorskip("ray", reason="ray is not installed: pip install 'rollout-data[ray]'")

from storage.adapters.transfer_queue import TransferQueueBuffer
from storage.errors import BufferEmptyError, UsageError
from tests.ray_actors.actors import check_rows, rows


def test_rows_of_two_processes_are_drawn_whole_until_they_are_cleared(cluster: Any) -> None:
    import transfer_queue
    from omegaconf import OmegaConf

    @cluster.remote(num_cpus=0)
    def add(first: int) -> None:
        TransferQueueBuffer("steps").extend(rows(first, 30))

    # The cluster of the tests has two processors
    few = {"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}
    transfer_queue.init(OmegaConf.create(few))
    try:
        buffer = TransferQueueBuffer("steps", seed=0)
        with pytest.raises(BufferEmptyError):
            buffer.sample(1)
        buffer.extend(rows(0, 30))
        cluster.get(add.remote(30))
        numbers = torch.tensor(check_rows(buffer.sample(6000)))
        assert len(buffer) == 60 and len(numbers) == 6000
        counts = torch.bincount(numbers, minlength=60)
        assert float(((counts - 100) ** 2 / 100).sum()) < 59 + 5 * 118**0.5
        with pytest.raises(UsageError, match="batch_size must be >= 1"):
            buffer.sample(0)
        buffer.clear()
        assert len(buffer) == 0
    finally:
        transfer_queue.close()
