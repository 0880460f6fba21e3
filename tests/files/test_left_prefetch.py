"""Loaders with a thread that reads ahead, which the garbage collector drops while the thread reads.

The collector may run inside any call, also in a call with a lock that the thread needs. So it must
not wait for the thread.
"""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch

from rollout_data import RolloutDataset, WindowDataset, WindowLoader
from tests.files.recorded import drain, record

#: Seconds, much longer than a read. If a call takes this long, it has waited for the thread.
WAIT_S = 60.0


class Gate:
    """Blocks the second read of a dataset until it is opened."""

    def __init__(self) -> None:
        self.is_reached = threading.Event()
        self.is_open = threading.Event()
        self.has_opened: list[bool] = []
        self.has_ended = threading.Event()
        self._num_reads = 0

    def pass_through(self) -> None:
        self._num_reads += 1
        if self._num_reads == 2:
            self.is_reached.set()
            self.has_opened.append(self.is_open.wait(WAIT_S))
            self.has_ended.set()


class GatedWindows(WindowDataset):
    gate: Gate

    def batch(self, *arguments: Any, **options: Any) -> Any:
        self.gate.pass_through()
        return super().batch(*arguments, **options)


class GatedDataset(RolloutDataset):
    gate: Gate

    def read(self, *arguments: Any, **options: Any) -> Any:
        self.gate.pass_through()
        return super().read(*arguments, **options)


def drop_in_a_cycle(batches: list[Any]) -> None:
    cycle: list[Any] = [batches.pop()]
    cycle.append(cycle)
    del cycle
    gc.collect()


def test_dropping_an_iteration_of_windows_does_not_wait(tmp_path):
    record(tmp_path, [8])
    dataset = GatedWindows(tmp_path, 2)
    dataset.gate = Gate()
    loader = WindowLoader(dataset, 2, shuffle=False)
    batches = [iter(loader)]
    first = next(batches[0])
    assert dataset.gate.is_reached.wait(WAIT_S)
    drop_in_a_cycle(batches)
    dataset.gate.is_open.set()
    rest = list(loader)  # goes on with the same epoch
    assert dataset.gate.has_ended.wait(WAIT_S)
    assert dataset.gate.has_opened == [True]
    delivered = torch.cat([batch["observation"] for batch in [first, *rest]])
    expected = torch.cat(
        [
            batch["observation"]
            for batch in WindowLoader(WindowDataset(tmp_path, 2), 2, shuffle=False)
        ]
    )
    assert torch.equal(delivered, expected)


@pytest.mark.parametrize("goes_on_by", ["prefetch", "get_batch"])
def test_dropping_a_prefetch_does_not_wait_and_the_next_read_does(tmp_path, goes_on_by):
    record(tmp_path, [5, 9, 7, 3])
    plain = drain(RolloutDataset(tmp_path, 2, device="cpu", num_transitions_per_env=2), 2)
    dataset = GatedDataset(tmp_path, 2, device="cpu", num_transitions_per_env=2)
    dataset.gate = Gate()
    batches = [iter(dataset.prefetch())]
    assert torch.equal(next(batches[0]).observation, plain[0].observation)
    assert dataset.gate.is_reached.wait(WAIT_S)
    drop_in_a_cycle(batches)
    num_reads_ended = len(dataset.gate.has_opened)
    opener = threading.Timer(0.05, dataset.gate.is_open.set)
    opener.start()
    rest = list(dataset.prefetch()) if goes_on_by == "prefetch" else drain(dataset, 2)
    opener.join()
    assert num_reads_ended == 0 and dataset.gate.has_opened == [True]
    assert len(rest) == len(plain) - 1
    for batch, expected in zip(rest, plain[1:], strict=True):
        assert torch.equal(batch.observation, expected.observation)
