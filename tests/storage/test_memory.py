"""`BufferPool`: memory is reused if and only if no tensor uses it."""

from __future__ import annotations

import gc
import pickle
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.core.memory import MIN_HUGE_BYTES, MIN_POOLED_BYTES, BufferPool

SIZE = MIN_POOLED_BYTES


def test_a_dropped_buffer_is_reused():
    pool = BufferPool()
    first = pool.take(SIZE)
    address = first.data_ptr()
    del first
    assert pool.take(SIZE).data_ptr() == address
    assert (pool.num_allocated, pool.num_reused) == (1, 1)


@pytest.mark.parametrize(
    "hold",
    [
        lambda t: t,
        lambda t: t[10:20],
        lambda t: t.view(torch.float32).view(2, -1)[1],
        lambda t: t.numpy(),
        lambda t: t.numpy()[::2],
        lambda t: t.untyped_storage(),
        lambda t: memoryview(t.numpy()),
        lambda t: torch.from_dlpack(t),
        lambda t: t.detach(),
        lambda t: torch.nn.Parameter(t.view(torch.float32)),
    ],
)
def test_a_buffer_is_not_reused_while_a_view_of_it_exists(hold):
    pool = BufferPool()
    held = hold(pool.take(SIZE))
    assert pool.num_lent == 1
    other = pool.take(SIZE)
    assert pool.num_allocated == 2
    del other
    del held
    gc.collect()
    assert pool.num_lent == 0


def test_an_autograd_graph_keeps_its_buffer():
    pool = BufferPool()
    weight = torch.ones(4, SIZE // 16, requires_grad=True)
    loss = (weight * pool.empty((4, SIZE // 16), torch.float32).fill_(2)).sum()
    pool.empty((4, SIZE // 16), torch.float32).fill_(7)
    loss.backward()
    assert torch.equal(weight.grad, torch.full_like(weight, 2))


@pytest.mark.parametrize(
    "size", [0, 1, SIZE - 1, SIZE, SIZE + 1, MIN_HUGE_BYTES, MIN_HUGE_BYTES + 4097]
)
def test_every_size_is_exact_writable_and_contiguous(size):
    tensor = BufferPool().take(size)
    tensor.fill_(3)
    assert tensor.shape == (size,) and tensor.untyped_storage().nbytes() == size
    assert int(tensor.sum()) == 3 * size


def test_empty_has_the_requested_shape_and_dtype():
    tensor = BufferPool().empty((100, 7, 64), torch.float64)
    assert tensor.shape == (100, 7, 64) and tensor.dtype == torch.float64 and tensor.is_contiguous()
    assert BufferPool().empty((0, 3), torch.int16).shape == (0, 3)


def test_a_buffer_far_too_large_is_not_wasted_on_a_small_request():
    pool = BufferPool()
    del [pool.take(SIZE * 4)][:]
    assert pool.take(SIZE).untyped_storage().nbytes() == SIZE
    assert pool.num_allocated == 2


def test_the_pool_keeps_no_more_buffers_than_allowed():
    pool = BufferPool(max_buffers=2)
    held = [pool.take(SIZE) for _ in range(5)]
    assert pool.num_kept == 2
    assert len({tensor.data_ptr() for tensor in held}) == 5
    held.clear()
    pool.take(SIZE * 3)
    assert pool.num_kept == 2
    pool.clear()
    assert pool.num_kept == 0


def test_a_pickled_pool_arrives_empty():
    pool = BufferPool(max_buffers=3)
    held = pool.take(SIZE)
    copy = pickle.loads(pickle.dumps(pool))
    assert (copy.max_buffers, copy.num_kept) == (3, 0)
    assert copy.take(SIZE).data_ptr() != held.data_ptr()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 4 * SIZE)), max_size=40))
def test_no_two_living_tensors_ever_share_memory(steps):
    pool = BufferPool(max_buffers=3)
    living: list[tuple[int, torch.Tensor]] = []
    for number, (is_drop, size) in enumerate(steps):
        if is_drop and living:
            living.pop(size % len(living))
        else:
            living.append((number % 251, pool.take(size).fill_(number % 251)))
        for value, tensor in living:
            assert bool((tensor == value).all())


def test_threads_never_receive_the_same_buffer():
    pool, failures = BufferPool(max_buffers=4), []

    def work(value: int) -> None:
        for _ in range(200):
            array = pool.take(SIZE).fill_(value).numpy()
            if not np.all(array == value):
                failures.append(value)

    threads = [threading.Thread(target=work, args=(value,)) for value in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
