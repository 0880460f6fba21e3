"""Memory of buffers: its size, and how the leaves of a sample share it."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

from storage import DictBuffer, ReplayBuffer, TrajectoryDictBufferMultiDim, ZBuffer
from tests.pretend_cuda import PretendCuda


def rows(num_rows: int) -> dict[str, torch.Tensor]:
    return {
        "observation": torch.rand(num_rows, 4),
        "reward": torch.rand(num_rows, 1),
        "wide": torch.rand(num_rows, 1024),
        "done": torch.zeros(num_rows, 1, dtype=torch.bool),
    }


def test_memory_is_allocated_once() -> None:
    buffer = DictBuffer(capacity=6, end_key="done", generator=0)
    buffer.extend(rows(2))
    addresses = {name: leaf.data_ptr() for name, leaf in buffer.storage.items()}
    num_bytes = buffer.num_bytes
    for num_rows in (3, 1, 9):
        buffer.extend(rows(num_rows))
    assert {name: leaf.data_ptr() for name, leaf in buffer.storage.items()} == addresses
    assert buffer.num_bytes == num_bytes


@pytest.mark.parametrize("contiguous", [False, True])
def test_leaves_of_a_sample_below_4_kib_are_views_of_one_tensor(contiguous: bool) -> None:
    buffer = DictBuffer(capacity=6, contiguous=contiguous, generator=0)
    buffer.extend(rows(6))
    sample = buffer.sample(5)
    if contiguous:
        assert all(leaf.is_contiguous() for leaf in sample.values())
        return
    row_bytes = {leaf.stride(0) * leaf.itemsize for name, leaf in sample.items() if name != "wide"}
    assert len(row_bytes) == 1
    starts = [leaf.data_ptr() for name, leaf in sample.items() if name != "wide"]
    assert max(starts) - min(starts) < row_bytes.pop() < 4096
    assert sample["wide"].is_contiguous()


def test_the_age_of_a_row_takes_four_bytes() -> None:
    sizes = []
    for end_key in (None, "done"):
        buffer = DictBuffer(capacity=10_000, end_key=end_key)
        buffer.extend({"x": torch.zeros(1, 100), "done": torch.zeros(1, 1)})
        sizes.append(buffer.num_bytes)
    # One more row is stored for the observation after the newest row.
    assert 4 <= (sizes[1] - sizes[0]) / 10_000 < 4.1


def test_seq_length_rows_of_each_environment_are_stored_twice() -> None:
    sizes = []
    for seq_length in (2, 12):
        buffer = TrajectoryDictBufferMultiDim(
            capacity=100, n_dim=2, seq_length=seq_length, end_key="done"
        )
        buffer.extend({"observation": torch.zeros(1, 3, 100), "done": torch.zeros(1, 3, 1)})
        sizes.append(buffer.num_bytes)
    num_bytes_of_a_row = 4 * 101
    assert sizes[1] - sizes[0] == 10 * 3 * num_bytes_of_a_row


class Labelled(DictBuffer):
    label = "none"


@pytest.mark.parametrize(
    "way", [copy.copy, copy.deepcopy, lambda buffer: pickle.loads(pickle.dumps(buffer))]
)
def test_attributes_of_a_subclass_are_not_copied(way: Any) -> None:
    buffer = Labelled(4, generator=0)
    buffer.extend({"x": torch.ones(2, 1)})
    buffer.label = "mine"
    twin = way(buffer)
    assert type(twin) is Labelled
    assert (twin.label, len(twin)) == ("none", 2)


@pytest.mark.gpu
def test_rows_on_the_host_are_sent_in_one_pinned_copy(cuda_device: PretendCuda | None) -> None:
    if cuda_device is None:
        pytest.skip("copies are counted on the pretended device")
    buffer = DictBuffer(100, "cuda", generator=0)
    for _ in range(2):
        buffer.extend(rows(5))
    cuda_device.reset()
    cuda_device.lateness = 1  # copies are counted, also while events are late
    num_before = cuda_device.num_copies
    buffer.extend(rows(5))
    assert cuda_device.num_copies == num_before + 1
    assert cuda_device.reset().pageable_copies.total() == 0


@pytest.mark.gpu
def test_pairs_and_vectors_on_the_host_are_sent_in_one_pinned_copy(
    cuda_device: PretendCuda | None,
) -> None:
    if cuda_device is None:
        pytest.skip("copies are counted on the pretended device")
    pairs = ReplayBuffer(3, 8, "cuda", generator=0)
    vectors = ZBuffer(8, 3, "cuda", generator=0)
    for add in (lambda x: pairs.insert(x, x + 1), vectors.add):
        add(torch.zeros(2, 3))
        cuda_device.reset()
        cuda_device.lateness = 1  # copies are counted, also while events are late
        num_before = cuda_device.num_copies
        x = torch.ones(4, 3)
        add(x)
        x.fill_(7)
        assert cuda_device.num_copies == num_before + 1
        assert cuda_device.reset().pageable_copies.total() == 0
    torch.cuda.synchronize()
    assert set(pairs.sample(200)[0].flatten().tolist()) == {0.0, 1.0}
    assert set(vectors.sample(200).flatten().tolist()) == {0.0, 1.0}


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("capacity", "num_envs", "num_places"),
    [(6400, 1, 100), (640, 1, 64), (640, 80, 160), (128, 1, 64)],
)
def test_extend_waits_for_final_observations_of_more_than_a_quarter_of_the_rows(
    capacity: int, num_envs: int, num_places: int, cuda_device: PretendCuda | None
) -> None:
    if cuda_device is None:
        pytest.skip("waits are counted on the pretended device")
    num_without_waits = max(num_places, capacity // 4)
    for num_rows in (num_places, num_places + num_envs, num_without_waits + num_envs):
        buffer = DictBuffer(capacity, "cuda", num_envs=num_envs, end_key="done", generator=0)
        record = {"x": torch.zeros(num_rows, 1).cuda(), "done": torch.ones(num_rows, 1).cuda()}
        first = {name: leaf[:num_envs] for name, leaf in record.items()}
        for _ in range(2):
            buffer.extend(first, final={"x": first["x"]})
        num_bytes = buffer.num_bytes
        cuda_device.reset()
        buffer.extend(record, final={"x": record["x"]})
        assert (cuda_device.reset().num_waits > 0) == (num_rows > num_without_waits)
        assert buffer.num_bytes > num_bytes or num_rows <= num_places
        assert num_rows == num_places or buffer.num_lost_finals == 0
