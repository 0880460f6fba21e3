"""Rows of packed fields: every dtype and shape is read back bit by bit, as separate tensors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from storage import DictBuffer, TrajectoryDictBuffer, TrajectoryDictBufferMultiDim
from storage.core.fields import Schema
from storage.core.packed_rows import Cut, Target
from storage.core.records import make_field
from storage.errors import SchemaError, UsageError
from storage.ring.ring_store import RingStore
from storage.ring.trajectory_ends import find_ends
from storage.ring.window_bounds import Boundaries

DTYPES = [
    "float32",
    "float64",
    "float16",
    "bfloat16",
    "int8",
    "int64",
    "uint8",
    "uint16",
    "bool",
    "complex64",
]
SHAPES = [(1,), (3,), (2, 2), (0,), (1, 0, 2), (1100,)]

field_lists = st.lists(
    st.tuples(st.sampled_from(DTYPES), st.sampled_from(SHAPES)), min_size=1, max_size=5
)


def random_bits(
    num_rows: int, lanes: int, dtype: torch.dtype, shape: tuple[int, ...], seed: int
) -> torch.Tensor:
    actual = torch.empty((num_rows, lanes, *shape), dtype=dtype)
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 2 if dtype is torch.bool else 256, actual.nbytes, np.uint8)
    return torch.from_numpy(bits).view(dtype).view(actual.shape) if actual.numel() else actual


def bits_of(leaf: torch.Tensor) -> bytes:
    if not leaf.numel():
        return b""
    return (
        (leaf.contiguous().view(torch.int16) if leaf.dtype is torch.bfloat16 else leaf)
        .numpy()
        .tobytes()
    )


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    is_alike = one.dtype is other.dtype and one.shape == other.shape
    return is_alike and bits_of(one) == bits_of(other)


@given(fields=field_lists, lanes=st.integers(1, 2), contiguous=st.booleans(), data=st.data())
def test_every_read_of_a_ring_keeps_every_bit(
    fields: list, lanes: int, contiguous: bool, data: st.DataObject
) -> None:
    schema = Schema([make_field(f"f{i}", shape, dtype) for i, (dtype, shape) in enumerate(fields)])
    names = data.draw(st.lists(st.sampled_from(list(schema)), unique=True))
    ring = RingStore(5, lanes, schema, num_guards=data.draw(st.integers(0, 2)))
    rows = {
        name: random_bits(5, lanes, field.torch_dtype, tuple(field.shape), i)
        for i, (name, field) in enumerate(schema.items())
    }
    ring.write(list(rows.values()))
    lane, row = torch.tensor([lanes - 1, 0, 0]), torch.tensor([0, 3, 1])
    places = ring.place(lane, row)
    gathered = ring.gather(places, contiguous)
    assert list(gathered) == list(schema)
    for name, leaf in rows.items():
        assert same_bits(gathered[name], leaf[row, lane])
        assert not contiguous or gathered[name].is_contiguous()
    if ring.num_guards:
        pairs = ring.rows(places, ring.cut_of(ring.names, tuple(names), contiguous))
        assert list(pairs) == [*schema, "next"] if names else list(schema)
        for name, leaf in rows.items():
            assert same_bits(pairs[name], leaf[row, lane])
            assert not contiguous or pairs[name].is_contiguous()
        for name in names:
            assert same_bits(pairs["next"][name], rows[name][row + 1, lane])
    cut = ring.cut_of(ring.names, tuple(names), contiguous, nested=False, apart=True)
    windows = ring.windows(ring.place(lane[:2], torch.tensor([0, 2])), 2, cut)
    for name, leaf in rows.items():
        assert same_bits(windows[name], torch.cat([leaf[[0, 1], lanes - 1], leaf[[2, 3], 0]]))
        assert not contiguous or windows[name].is_contiguous()
    for name in names:
        assert same_bits(
            windows[f"next/{name}"],
            torch.cat([rows[name][[1, 2], lanes - 1], rows[name][[3, 4], 0]]),
        )


def buffers() -> dict:
    rows = {
        "observation": torch.ones(6, 3),
        "action": torch.ones(6, 2),
        "done": torch.zeros(6, 1, dtype=torch.bool),
    }
    plain = DictBuffer(capacity=6, end_key="done")
    plain.extend(rows)
    windows = TrajectoryDictBufferMultiDim(capacity=6, seq_length=2)
    windows.extend(rows)
    expert = TrajectoryDictBuffer([{"observation": torch.ones(6, 3)}], "cpu", 2)
    return {
        "sample": plain.sample(4),
        "transitions": plain.sample_transitions(4),
        "next": plain.sample_transitions(4)["next"],
        "steps": plain.sample_transitions(4, num_frames=2, at_end="mark"),
        "windows": windows.sample(4),
        "expert": expert.sample(4),
    }


@pytest.mark.parametrize("name", list(buffers()))
def test_a_sample_may_be_changed_in_place_by_tensors_with_gradients(name: str) -> None:
    leaf = buffers()[name]["observation"]
    scale = torch.full((3,), 2.0, requires_grad=True)
    leaf.mul_(scale)
    leaf.sum().backward()
    assert scale.grad is not None and scale.grad.sum() > 0


@given(
    slots=st.integers(1, 9),
    lanes=st.integers(1, 3),
    sizes=st.lists(st.integers(1, 20), min_size=1, max_size=8),
    seed=st.integers(0, 999),
    is_array=st.booleans(),
)
def test_ages_count_the_rows_since_a_trajectory_began(
    slots: int, lanes: int, sizes: list[int], seed: int, is_array: bool
) -> None:
    ring = RingStore(slots, lanes, Schema([make_field("x", (1,), "float32")]))
    boundaries = Boundaries(ring)
    generator, model = torch.Generator().manual_seed(seed), torch.zeros(0, lanes, dtype=torch.bool)
    for size in sizes:
        ends = torch.rand(size, lanes, generator=generator) < 0.3
        boundaries.note(ends.numpy() if is_array else ends)
        ring.total += size
        model = torch.cat([model, ends])
        for lane in range(lanes):
            begun = [0, *(row + 1 for row in range(len(model)) if model[row, lane])]
            expected = [
                row - max(first for first in begun if first <= row) for row in range(len(model) + 1)
            ]
            ids = torch.arange(ring.oldest, ring.total + 1)
            assert (
                boundaries.age(torch.full_like(ids, lane), ids).tolist() == expected[ring.oldest :]
            )


@pytest.mark.parametrize("width", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.float32])
def test_any_flag_that_is_not_zero_ends_a_trajectory(width: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    flags = [(torch.rand(50, 2, width, generator=generator) < 0.2).to(dtype) for _ in range(2)]
    leaves, places = [torch.zeros(50, 2, 3), *flags], [(1, width), (2, width)]
    expected = [
        [any(bool(x.any()) for x in (flags[0][i, j], flags[1][i, j])) for j in range(2)]
        for i in range(50)
    ]
    assert find_ends(leaves, places).tolist() == expected
    assert find_ends([leaf.numpy() for leaf in leaves], places).tolist() == expected
    assert (
        not find_ends(leaves, []).any()
        and not find_ends([leaf.numpy() for leaf in leaves], []).any()
    )


def test_a_cut_has_the_requested_nesting_and_order_and_checks_name_clashes() -> None:
    ring = RingStore(
        4, 1, Schema([make_field("a/b", (2,), "float32"), make_field("c", (), "int64")])
    )
    ring.write([torch.arange(8.0).view(4, 1, 2), torch.arange(4).view(4, 1)])
    places = torch.tensor([2, 0])
    asked = [
        Target(1, "c", "x/later"),
        Target(0, "c", "y"),
        Target(0, "a/b", "x/now"),
        Target(1, "c", "y"),
    ]
    actual = ring.rows(places, Cut(ring.groups, asked))
    assert list(actual) == ["x", "y"] and list(actual["x"]) == ["later", "now"]
    assert actual["x"]["later"].tolist() == actual["y"].tolist() == [3, 1]
    assert actual["x"]["now"].tolist() == [[4, 5], [0, 1]]
    assert list(ring.rows(places, Cut(ring.groups, [Target(0, "a/b", "a/b")], nested=False))) == [
        "a/b"
    ]
    with pytest.raises(
        SchemaError, match="'x/now' cannot be nested, because 'x' is a field itself"
    ):
        Cut(ring.groups, [Target(0, "c", "x"), Target(0, "a/b", "x/now")])


def test_next_rows_of_a_ring_without_guards_raise() -> None:
    ring = RingStore(4, 1, Schema([make_field("a", (2,), "float32")]), num_guards=0)
    with pytest.raises(UsageError, match="next_keys without apart=True requires num_guards"):
        ring.cut_of((), ("a",))
