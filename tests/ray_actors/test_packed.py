"""Trees of tensors become bytes and trees again. Each used part of memory is copied once."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch

from storage import DictBuffer
from storage.ray_actors.packed_results import join, pack, unpack


def sent(tree: Any) -> Any:
    """Return the tree that arrives at another process."""
    buffers: list[Any] = []
    data = pickle.dumps(pack(tree), protocol=5, buffer_callback=buffers.append)
    return unpack(pickle.loads(data, buffers=[memoryview(bytes(buffer)) for buffer in buffers]))


@pytest.mark.filterwarnings("error")
def test_packed_trees_are_restored_unchanged() -> None:
    dtypes = (
        torch.bool,
        torch.uint8,
        torch.int16,
        torch.bfloat16,
        torch.float16,
        torch.float64,
        torch.complex64,
    )
    base = torch.arange(2000).view(40, 50)
    tree = {
        "columns": {str(dtype): base.to(dtype)[3:9, ::2] for dtype in dtypes},
        "views": (base[:, 1], base[7], base.t(), base[5:5], base[0, 0], base[:1].expand(9, 50)),
        "rest": [
            np.arange(6, dtype=np.uint16)[::-1],
            None,
            "text",
            3,
            np.array(["x"]),
            {"leaf": torch.ones(2)},
        ],
    }
    actual = sent(tree)
    assert (
        list(actual) == list(tree)
        and actual["rest"][1:4] == [None, "text", 3]
        and actual["rest"][4].tolist() == ["x"]
    )
    assert isinstance(actual["rest"][0], np.ndarray) and actual["rest"][0].tolist() == [
        5,
        4,
        3,
        2,
        1,
        0,
    ]
    pairs = [(actual["columns"][name], leaf) for name, leaf in tree["columns"].items()]
    pairs += [
        *zip(actual["views"], tree["views"], strict=True),
        (actual["rest"][5]["leaf"], torch.ones(2)),
    ]
    for mine, leaf in pairs:
        assert mine.dtype == leaf.dtype and mine.shape == leaf.shape and torch.equal(mine, leaf)


def test_a_sample_is_one_buffer_and_a_small_view_of_a_large_tensor_is_copied() -> None:
    buffer = DictBuffer(capacity=100)
    buffer.extend(
        {
            "a": torch.randn(100, 5),
            "b": torch.rand(100, 3) < 0.5,
            "c": {"d": torch.randn(100, 1).double()},
        }
    )
    buffers = pack(buffer.sample(64))[0]
    assert len(buffers) == 1 and buffers[0].nbytes <= 64 * (20 + 3 + 8 + 8)
    large = torch.zeros(1 << 20)
    assert sum(item.nbytes for item in pack([large[:2], large[-2:]])[0]) < 100


def test_parts_are_joined_along_the_first_axis() -> None:
    parts = [({"x": torch.full((n, 2), n), "y": np.full(n, n)}, ["item"] * n) for n in (1, 2)]
    (fields, items) = join(parts)
    assert fields["x"][:, 0].tolist() == fields["y"].tolist() == [1, 2, 2] and items == ["item"] * 3
    assert join([parts[0], None]) is None and join(parts[:1]) is parts[0]
