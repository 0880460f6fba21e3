"""The pretended device of `pretend_cuda.py` counts, raises and delays as documented."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.pretend_cuda import PretendCuda, WaitError

if torch.cuda.is_available():
    pytest.skip("a real device is present", allow_module_level=True)

WAITING: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda x: x[0].item(),
    "float": lambda x: float(x.sum()),
    "truth": lambda x: bool((x > 1).any()),
    "tolist": lambda x: x.tolist(),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 1],
    "masked store of a tensor": lambda x: x.__setitem__(x > 1, x[x > 1]),
    "unique": lambda x: x.unique(),
    "to the host": lambda x: x.cpu(),
    "from the host": lambda x: x.copy_(torch.ones(4)),
    "a number as a tensor": lambda x: torch.as_tensor(0.5, device="cuda"),
    "an index on the host": lambda x: x[torch.tensor([0, 2])],
    "repeats of unknown number": lambda x: x.repeat_interleave(
        torch.ones_like(x, dtype=torch.int64)
    ),
}
ASYNCHRONOUS: dict[str, Callable[[torch.Tensor], Any]] = {
    "arithmetic": lambda x: (x * 2).add_(1).cumsum(0),
    "where": lambda x: torch.where(x > 1, x, 0.0),
    "masked fill": lambda x: x.masked_fill_(x > 1, 0.0),
    "masked store of a number": lambda x: x.__setitem__(x > 1, 0.0),
    "gather": lambda x: x[torch.zeros(2, dtype=torch.int64, device="cuda")],
    "random numbers": lambda x: torch.randint(
        4, (3,), device="cuda", generator=torch.Generator("cuda")
    ),
    "a full tensor": lambda x: torch.full((3,), 0.5, device=x.device),
    "from pinned memory": lambda x: x.copy_(torch.ones(4).pin_memory(), non_blocking=True),
    "to pinned memory": lambda x: torch.empty(4, pin_memory=True).copy_(x, non_blocking=True),
}


@pytest.mark.parametrize("name", WAITING)
def test_operations_that_need_a_host_value_wait(name: str) -> None:
    with PretendCuda() as device:
        x = torch.arange(4.0, device="cuda")
        device.reset()
        WAITING[name](x)
        assert device.counts.num_waits >= 1
        with device.strict(), pytest.raises(WaitError):
            WAITING[name](x)


@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_operations_that_need_no_host_value_do_not_wait(name: str) -> None:
    with PretendCuda() as device:
        x = torch.arange(4.0, device="cuda")
        with device.strict():
            ASYNCHRONOUS[name](x)
        assert not device.counts.pageable_copies


def test_values_equal_those_of_the_cpu() -> None:
    here = torch.arange(24.0).view(2, 3, 4)
    with PretendCuda():
        there = here.to("cuda")
        assert there.device == torch.device("cuda", 0)
        for index in (
            (0,),
            (slice(1, None), None),
            (..., 2),
            (0, [1, 2]),
            (slice(None), torch.tensor([2, 0])),
            here > 5,
        ):
            assert torch.equal(there[index].cpu(), here[index])
        there[1, torch.tensor([0, 2], device="cuda")] = 7.0
        copied = there.cpu()
    here[1, torch.tensor([0, 2])] = 7.0
    assert torch.equal(copied, here)


def test_pageable_copies_are_counted_and_refused_by_a_strict_device() -> None:
    with PretendCuda() as device:
        torch.ones(4).to("cuda", non_blocking=True)
        assert device.counts.pageable_copies.total() == 1
        assert device.counts.num_waits == 0
        with device.strict(), pytest.raises(WaitError, match="pageable"):
            torch.ones(4).to("cuda", non_blocking=True)


def test_tensors_on_the_device_do_not_become_arrays() -> None:
    with PretendCuda():
        x = torch.ones(3, device="cuda")
        with pytest.raises(TypeError):
            x.numpy()
        with pytest.raises(TypeError):
            np.asarray(x)


def test_operands_on_two_devices_raise() -> None:
    with PretendCuda():
        x = torch.ones(3, device="cuda")
        with pytest.raises(RuntimeError, match="same device"):
            x + torch.ones(3)
        with pytest.raises(RuntimeError, match="generator"):
            torch.rand(3, device="cuda", generator=torch.Generator())


def test_an_asynchronous_copy_has_garbage_until_its_event_completes() -> None:
    with PretendCuda(lateness=4):
        x = torch.arange(3.0, device="cuda")
        target = torch.empty(3, pin_memory=True)
        target.copy_(x, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        x.zero_()  # comes after the copy
        assert not torch.equal(target, torch.arange(3.0))
        num_queries = 1
        while not copied.query():
            num_queries += 1
        assert num_queries > 1
        assert torch.equal(target, torch.arange(3.0))


def test_a_pinned_source_that_changes_too_early_raises() -> None:
    with PretendCuda(lateness=4):
        source = torch.ones(3).pin_memory()
        source.to("cuda", non_blocking=True)
        source.zero_()
        with pytest.raises(AssertionError, match="pinned memory was changed"):
            torch.cuda.synchronize()


def test_threads_use_the_pretended_device() -> None:
    results = []
    with PretendCuda() as device:
        thread = threading.Thread(
            target=lambda: results.append(float(torch.ones(3, device="cuda").sum()))
        )
        thread.start()
        thread.join()
        assert results == [3.0]
        assert device.counts.num_waits == 1


def test_leaving_the_pretended_device_restores_torch_and_threading() -> None:
    generator, thread_run = torch.Generator, threading.Thread.run
    with PretendCuda():
        assert torch.cuda.is_available()
    assert torch.Generator is generator
    assert threading.Thread.run is thread_run
    assert not torch.cuda.is_available()
