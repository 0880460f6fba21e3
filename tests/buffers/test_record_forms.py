"""Records are stored equally from every kind of mapping, array and dtype, in any order of kinds."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from storage import DictBuffer
from storage.errors import FieldTypeError, SchemaError


class Duck:
    """The part of a `TensorDict` that looks like a mapping. Its length is that of its batch."""

    def __init__(self, leaves: dict[str, Any]) -> None:
        self.leaves = leaves

    def keys(self) -> Any:
        return self.leaves.keys()

    def items(self) -> Any:
        return self.leaves.items()

    def get(self, key: str) -> Any:
        return self.leaves[key]

    def __len__(self) -> int:
        return 1


MAPPINGS: list[Callable[[dict[str, Any]], Any]] = [
    dict, OrderedDict, UserDict, Duck, lambda leaves: defaultdict(list, leaves),
]  # fmt: skip
DTYPES = {"float32": np.float32, "float64": np.float64, "int64": np.int64}


def record(
    start: int, num: int, mapping: Callable[[dict[str, Any]], Any], dtype: str, tensors: bool
) -> Any:
    """Create rows with identifiable values: `start`, `start` + 1, ..."""
    values = np.arange(start, start + num)[:, None]
    leaves: dict[str, Any] = {
        "x": np.repeat(values, 3, 1).astype(DTYPES[dtype]),
        "done": values % 5 == 4,
    }
    if tensors:
        leaves = {name: torch.from_numpy(leaf) for name, leaf in leaves.items()}
    return mapping({"x": leaves["x"], "next": mapping({"done": leaves["done"]})})


FORMS = st.tuples(
    st.integers(0, 4),
    st.sampled_from(MAPPINGS),
    st.sampled_from(sorted(DTYPES)),
    st.booleans(),
    st.integers(1, 3),
)


@settings(max_examples=60)
@given(
    forms=st.lists(FORMS, min_size=1, max_size=6),
    lanes=st.sampled_from([1, 2]),
    narrow=st.booleans(),
)
def test_rows_do_not_depend_on_the_type_of_the_record(
    forms: list[Any], lanes: int, narrow: bool
) -> None:
    buffer, num_rows = (
        DictBuffer(capacity=64, num_envs=lanes, end_key=("next", "done"), narrow=narrow),
        0,
    )
    buffer.extend(record(0, 2 * lanes, dict, "float64" if narrow else "float32", False))
    num_rows += 2 * lanes
    for num, mapping, dtype, tensors, times in forms:
        for _ in range(times):
            buffer.extend(record(num_rows, num * lanes, mapping, dtype, tensors))
            num_rows += num * lanes
    kept = buffer.storage
    assert (
        len(buffer) == min(64, num_rows)
        and buffer.total == num_rows
        and kept["x"].dtype is torch.float32
    )
    expected = np.arange(num_rows)[-64:] if num_rows > 64 else np.arange(num_rows)
    assert sorted(kept["x"].reshape(-1, 3)[:, 0].tolist()[: len(buffer)]) == sorted(
        expected.tolist()
    )
    assert bool(
        (kept["next"]["done"].reshape(-1) == (kept["x"].reshape(-1, 3)[:, 0] % 5 == 4)).all()
    )


WRONG: list[tuple[str, Callable[[], Any], type[Exception]]] = [
    ("another shape", lambda: {"x": np.zeros((2, 4), "f4"), "next": {"done": np.zeros((2, 1), bool)}}, SchemaError),
    ("another length", lambda: {"x": np.zeros((2, 3), "f4"), "next": {"done": np.zeros((1, 1), bool)}}, SchemaError),
    ("one more leaf", lambda: {**record(0, 2, dict, "float32", False), "y": np.zeros((2, 1))}, SchemaError),
    ("one leaf less", lambda: {"x": np.zeros((2, 3), "f4")}, SchemaError),
    ("another name", lambda: defaultdict(list, z=np.zeros((2, 3), "f4"), next={}), SchemaError),
    ("no numbers", lambda: {"x": np.array([["a"] * 3] * 2), "next": {"done": np.zeros((2, 1), bool)}}, FieldTypeError),
    ("complex", lambda: {"x": np.zeros((2, 3), "c8"), "next": {"done": np.zeros((2, 1), bool)}}, FieldTypeError),
    ("numbers as flags", lambda: {"x": np.zeros((2, 3), "f4"), "next": {"done": np.full((2, 1), 0.5)}}, FieldTypeError),
    ("no axes", lambda: {"x": np.zeros((), "f4"), "next": {"done": np.zeros((2, 1), bool)}}, SchemaError),
]  # fmt: skip


@pytest.mark.parametrize(("what", "wrong", "kind"), WRONG, ids=[what for what, *_ in WRONG])
def test_a_record_of_another_structure_raises_and_is_unchanged(
    what: str, wrong: Callable[[], Any], kind: type[Exception]
) -> None:
    buffer = DictBuffer(capacity=64)
    for _ in range(3):
        buffer.extend(record(0, 2, dict, "float32", False))
    given_ = wrong()
    names = list(given_)
    for _ in range(2):  # its form is not stored as a known form
        with pytest.raises(kind):
            buffer.extend(given_)
    assert list(given_) == names and len(buffer) == 6


def _odd() -> Iterator[Any]:
    yield torch.zeros(2, 3, requires_grad=True)
    yield torch.nn.Parameter(torch.zeros(2, 3))
    yield torch.zeros(2, 3, dtype=torch.bfloat16)
    yield np.zeros((2, 3), ">f4")
    yield np.zeros((2, 3), "f2")
    yield [[0.0] * 3] * 2
    yield np.zeros((3, 2), "f4").T
    read_only = np.zeros((2, 3), "f4")
    read_only.flags.writeable = False
    yield read_only


@pytest.mark.parametrize("leaf", list(_odd()), ids=lambda leaf: f"{type(leaf).__name__}")
def test_leaves_of_mixed_types_are_accepted(leaf: Any) -> None:
    buffer = DictBuffer(capacity=64)
    for start in (2, 4):
        buffer.extend(record(start, 2, dict, "float32", False))
        buffer.extend({"x": leaf, "next": {"done": np.zeros((2, 1), bool)}})
        buffer.extend({"x": leaf, "next": {"done": np.zeros((2, 1), bool)}})
    assert buffer.storage["x"][:12, 0].tolist() == [2, 3, 0, 0, 0, 0, 4, 5, 0, 0, 0, 0]
