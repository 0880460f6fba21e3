"""A copy of a nested object shares nothing with the original, and keeps the sharing within it."""

from __future__ import annotations

import copy
from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from storage.checkpoints.checkpoint_saver import copy_object
from storage.core.memory import BufferPool

Pair = namedtuple("Pair", "first second")
DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.bool,
    torch.int64,
    torch.uint8,
    torch.complex64,
    torch.float64,
]


@dataclass
class Agent:
    weights: torch.Tensor
    extra: dict[str, Any] = field(default_factory=dict)


class Plain:
    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


def same(a: Any, b: Any) -> bool:
    """Return whether nested objects are equal, with their types.

    Tensors are compared by bytes, so NaN equals NaN.
    """
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        bits = [torch.view_as_real(x) if x.is_complex() else x for x in (a, b)]
        return (
            a.shape == b.shape
            and a.dtype == b.dtype
            and torch.equal(*(x.float().nan_to_num(7.25) for x in bits))
        )
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return same(vars(a), vars(b)) if hasattr(a, "__dict__") else a == b


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Draw views of a storage: sliced, transposed, expanded, empty, of every kind of dtype."""
    dtype = draw(st.sampled_from(DTYPES))
    base = torch.arange(60).reshape(3, 4, 5).to(dtype)
    kind = draw(
        st.sampled_from(["whole", "slice", "column", "transposed", "expanded", "empty", "scalar"])
    )
    return {
        "whole": base,
        "slice": base[1:],
        "column": base[:, 1:3, ::2],
        "transposed": base.transpose(0, 2),
        "expanded": base[0, 0].expand(6, 5),
        "empty": base[:0],
        "scalar": base[2, 3, 4],
    }[kind]


LEAVES = tensors() | st.integers() | st.text(max_size=3) | st.none() | st.binary(max_size=3)
NESTED = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=2), inner, max_size=4)
        | st.tuples(inner, inner)
        | st.builds(Pair, inner, inner)
        | st.builds(Agent, tensors(), st.dictionaries(st.text(max_size=2), inner, max_size=2))
    ),
    max_leaves=12,
)


def tensors_in(obj: Any) -> list[torch.Tensor]:
    if isinstance(obj, torch.Tensor):
        return [obj]
    inner = (
        obj.values() if isinstance(obj, dict) else obj if isinstance(obj, (list, tuple)) else None
    )
    if inner is None:
        inner = vars(obj).values() if hasattr(obj, "__dict__") else ()
    return [tensor for item in inner for tensor in tensors_in(item)]


@given(NESTED)
def test_a_copy_does_not_follow_later_changes(obj: Any) -> None:
    expected = copy.deepcopy(obj)
    copied = copy_object(obj, BufferPool())
    assert same(copied, expected)
    for tensor in tensors_in(obj):
        tensor.untyped_storage().fill_(1)
    assert same(copied, expected)
    for item, other in zip(tensors_in(copied), tensors_in(expected), strict=True):
        assert item.stride() == other.stride() or not item.numel() or item.is_contiguous()


def test_nested_values_are_copied() -> None:
    """Trap N1."""
    state = {
        "model": {"w": torch.ones(3)},
        "list": [torch.ones(3), (torch.ones(3),)],
        "agent": Agent(torch.ones(3)),
    }
    state["plain"] = Plain(torch.ones(3))
    copied = copy_object(state, BufferPool())
    for tensor in tensors_in(state):
        tensor.zero_()
    assert [tensor.sum().item() for tensor in tensors_in(copied)] == [3.0] * 5


def test_tensors_that_share_memory_share_memory_in_the_copy() -> None:
    base = torch.arange(1000.0)
    state = {
        "a": base[100:300],
        "b": base[200:400].view(10, 20),
        "c": base[100:300],
        "bytes": base[200:202].view(torch.int8),
    }
    state["again"] = state["a"]
    copied = copy_object(state, BufferPool())
    assert copied["again"] is copied["a"]
    assert same(copied, state)
    # The bytes from the first to the last view, not the whole storage.
    assert copied["a"].untyped_storage().nbytes() <= 300 * 4 + 64
    copied["a"][150] = -1
    assert copied["b"].flatten()[50] == -1 and copied["c"][150] == -1
    assert base.min() == 0


def test_a_small_view_of_a_large_tensor_is_copied_alone() -> None:
    wide = torch.arange(10_000.0).reshape(100, 100)
    copied = copy_object({"column": wide[:, 3], "row": torch.arange(10_000.0)[50:60]}, BufferPool())
    assert (
        copied["column"].untyped_storage().nbytes() == 400
        and copied["column"].tolist() == wide[:, 3].tolist()
    )
    assert copied["row"].untyped_storage().nbytes() == 40


def test_modules_optimizers_cycles_and_attributes_are_copied() -> None:
    net = torch.nn.Linear(4, 2)
    net.weight.requires_grad_(False)
    state: dict[str, Any] = {
        "net": net,
        "ordered": OrderedDict(a=torch.ones(1)),
        "weights": net.state_dict(),
    }
    state["self"] = state
    copied = copy_object(state, BufferPool())
    assert copied["self"] is copied and copied["weights"]._metadata == state["weights"]._metadata
    with torch.no_grad():
        net.bias.zero_()
    assert (
        isinstance(copied["net"].weight, torch.nn.Parameter)
        and not copied["net"].weight.requires_grad
    )
    assert copied["net"].bias.requires_grad and copied["net"].bias.abs().sum() > 0
    assert copied["net"].bias.grad_fn is None


def test_tensors_in_a_graph_are_detached() -> None:
    x = torch.ones(3, requires_grad=True)
    copied = copy_object({"y": x * 2, "conj": torch.tensor([1 + 2j]).conj()}, BufferPool())
    assert not copied["y"].requires_grad and copied["y"].tolist() == [2, 2, 2]
    assert copied["conj"].tolist() == [1 - 2j]


def test_tensors_that_are_not_plain_memory_are_left_to_deepcopy() -> None:
    state = {"sparse": torch.eye(3).to_sparse(), "meta": torch.empty(3, device="meta")}
    copied = copy_object(state, BufferPool())
    assert (
        torch.equal(copied["sparse"].to_dense(), torch.eye(3))
        and copied["meta"].device.type == "meta"
    )
    assert copied["sparse"] is not state["sparse"]


def test_a_value_that_cannot_be_copied_raises_at_once() -> None:
    with pytest.raises(TypeError):
        copy_object({"lock": __import__("threading").Lock()}, BufferPool())


def test_the_memory_of_a_deleted_copy_is_reused() -> None:
    pool, state = BufferPool(), {"w": torch.randn(100_000), "b": torch.randn(50_000)}
    first = copy_object(state, pool)
    second = copy_object(state, pool)
    assert first["w"].data_ptr() != second["w"].data_ptr() and pool.num_allocated == 2
    del first
    third = copy_object(state, pool)
    assert pool.num_allocated == 2 and pool.num_reused == 1
    kept = third["b"]
    del third, second
    copy_object(state, pool), copy_object(state, pool)
    assert torch.equal(kept, state["b"])


# It copies raw memory of tensors, which the pretended device does not have.
@pytest.mark.real_gpu
def test_tensors_on_a_gpu_come_to_the_cpu_as_they_were() -> None:
    base = torch.arange(1 << 22, device="cuda")
    state = {
        "a": base[10:1000],
        "b": base[500:].view(torch.float64),
        "c": base[::3],
        "cpu": torch.ones(3),
    }
    for _ in range(3):
        torch.cuda._sleep(10_000_000)  # later work is queued behind this
        base.add_(1)
        copied = copy_object(state, BufferPool())
        base.add_(1)
        assert {tensor.device.type for tensor in tensors_in(copied)} == {"cpu"}
        assert torch.equal(copied["a"] + 1, state["a"].cpu()) and torch.equal(
            copied["c"] + 1, state["c"].cpu()
        )
        assert copied["a"].untyped_storage().data_ptr() == copied["b"].untyped_storage().data_ptr()
