"""A compressed record is restored bit by bit, as new tensors. The source does not change."""

from __future__ import annotations

import pickle
import threading
from typing import Any

import lz4.block
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.codecs.compressed_tensor_dict import CompressedTensorDict
from storage.errors import CorruptFileError, MissingFieldError, UsageError

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.bool,
    torch.int64,
    torch.uint8,
    torch.complex64,
]


def record() -> dict[str, Any]:
    return {
        "obs": {
            "mask": torch.zeros(50, 64, 64, dtype=torch.bool),
            "depth": torch.rand(8, 8),
            "task": "walk",
        },
        "count": torch.arange(10_000),
        "noise": torch.randint(0, 256, (4000,), dtype=torch.uint8),
    }


@settings(max_examples=60)
@given(
    dtype=st.sampled_from(DTYPES),
    shape=st.lists(st.integers(0, 7), max_size=3),
    level=st.sampled_from([0, 3, 9, 16]),
    transposed=st.booleans(),
    cache=st.integers(0, 1),
)
def test_tensors_of_every_dtype_and_shape_are_restored(
    dtype: torch.dtype, shape: list[int], level: int, transposed: bool, cache: int
) -> None:
    tensor = torch.randint(0, 3, shape).to(dtype)
    if transposed and tensor.dim() > 1:
        tensor = tensor.transpose(0, 1)
    expected = tensor.clone()
    packed = CompressedTensorDict({"x": tensor}, ["x"], level, cache)
    for _ in range(3):
        actual = packed["x"]
        assert (
            actual.dtype == dtype
            and actual.shape == expected.shape
            and torch.equal(actual, expected)
        )
        actual.zero_()  # writable, and not shared
    assert torch.equal(tensor, expected)


def test_the_source_record_does_not_change() -> None:
    """Trap N9."""
    given_, expected = record(), record()
    expected["obs"]["depth"], expected["noise"] = (
        given_["obs"]["depth"].clone(),
        given_["noise"].clone(),
    )
    packed = CompressedTensorDict(given_, [("obs", "mask"), "count"])
    assert packed.compressed_keys == ("obs/mask", "count")
    packed["obs"]["depth"].zero_()
    packed["noise"].zero_()
    packed.decompress()["count"].zero_()
    assert list(given_) == list(expected) and list(given_["obs"]) == list(expected["obs"])
    assert all(torch.equal(given_[key], expected[key]) for key in ("count", "noise"))
    assert all(torch.equal(given_["obs"][key], expected["obs"][key]) for key in ("mask", "depth"))
    assert torch.equal(packed["count"], expected["count"])


def test_a_compressed_tensordict_is_a_mapping() -> None:
    packed = CompressedTensorDict(record(), ["obs"])
    assert list(packed) == ["obs", "count", "noise"] and len(packed) == 3
    assert packed.compressed_keys == ("obs/mask", "obs/depth")
    assert "obs" in packed and "obs/mask" in packed and ("obs", "task") in packed
    assert "obs/m" not in packed and 3 not in packed and "ob" not in packed
    assert packed["obs/task"] == packed[("obs", "task")] == packed["obs"]["task"] == "walk"
    assert packed.get("nothing") is None
    with pytest.raises(
        MissingFieldError, match=r"unknown field 'obs/maks'. The fields are 'obs/mask'"
    ):
        packed["obs/maks"]
    with pytest.raises(KeyError):
        packed["nothing"]


def test_a_missing_key_is_an_error_unless_it_may_be_missing() -> None:
    with pytest.raises(KeyError, match=r"no tensor has the name 'obs/maks' .* 'obs/mask'"):
        CompressedTensorDict(record(), ["obs/maks"])
    with pytest.raises(
        UsageError, match=r"field 'obs/task' of compress_keys must be a tensor, got str"
    ):
        CompressedTensorDict(record(), ["obs/task"])
    assert CompressedTensorDict(
        record(), ["obs/maks", "count"], missing_ok=True
    ).compressed_keys == ("count",)


def test_sizes_count_the_stored_bytes() -> None:
    data = record()
    packed = CompressedTensorDict(data, ["obs/mask", "noise"])
    assert packed.ratio() > 30
    assert packed.nbytes < 6000 + data["obs"]["depth"].nbytes + data["count"].nbytes
    # A leaf that does not become smaller is stored raw.
    noise = CompressedTensorDict({"noise": data["noise"]}, ["noise"])
    assert (
        noise.nbytes == 4000 and noise.ratio() == 1.0 and torch.equal(noise["noise"], data["noise"])
    )
    nothing = CompressedTensorDict({"noise": data["noise"]})
    assert nothing.nbytes == 4000 and nothing.ratio() == 1.0 and nothing.compressed_keys == ()
    assert repr(nothing) == "CompressedTensorDict(0 of 1 leaves compressed, 4000 bytes, ratio 1.00)"


def test_a_cache_keeps_the_most_recently_used_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trap N9: a leaf is not decoded at each access."""
    decoded = []
    decompress = lz4.block.decompress

    def counted(block: Any, *args: Any, **options: Any) -> Any:
        actual = decompress(block, *args, **options)
        decoded.append(chr(actual[0]))
        return actual

    monkeypatch.setattr(lz4.block, "decompress", counted)
    names = ("a", "b", "c")
    packed = CompressedTensorDict(
        {name: torch.full((100,), ord(name)) for name in names}, names, cache=2
    )
    for name in "aabbacaab":
        assert (packed[name].sub_(ord(name)) == 0).all()
    assert decoded == ["a", "b", "c", "b"]


def test_leaves_larger_than_a_part_are_restored() -> None:
    """Parts have 64 MiB."""
    tensor = torch.zeros((64 << 20) + 1000, dtype=torch.uint8)
    tensor[[0, (64 << 20) - 1, 64 << 20, -1]] = torch.arange(1, 5, dtype=torch.uint8)
    packed = CompressedTensorDict({"x": tensor}, ["x"])
    assert packed.ratio() > 200 and torch.equal(packed["x"], tensor)


def test_to_moves_leaves_when_they_are_read() -> None:
    packed = CompressedTensorDict(record(), ["count"], cache=1)
    moved = packed.to("meta")
    assert {moved["count"].device.type, moved["noise"].device.type} == {"meta"} and moved[
        "obs/task"
    ] == "walk"
    assert packed["count"].device.type == packed["noise"].device.type == "cpu"
    made = CompressedTensorDict(record(), ["count"], device="meta")
    assert {made["count"].device.type, made["noise"].device.type} == {"meta"}


def test_a_compressed_tensordict_is_picklable_and_readable_from_threads() -> None:
    packed = pickle.loads(
        pickle.dumps(CompressedTensorDict(record(), ["count", "obs/mask"], cache=1))
    )
    wrong = []

    def read() -> None:
        for _ in range(50):
            if packed["count"].sum() != 9999 * 5000 or packed["obs/mask"].any():
                wrong.append(1)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_damaged_bytes_raise_one_clear_error() -> None:
    saved = pickle.dumps(CompressedTensorDict({"x": torch.zeros(10_000)}, ["x"]))
    block = lz4.block.compress(bytes(40_000), store_size=False)
    assert saved.count(block) == 1
    for damaged in (b"\xff" * len(block), bytes(len(block)), block[1:] + block[:1]):
        packed = pickle.loads(saved.replace(block, damaged))
        with pytest.raises(CorruptFileError, match=r"^Field 'x' is damaged: the LZ4 block "):
            packed["x"]


@pytest.mark.parametrize(
    "arguments", [{"level": 99}, {"level": -1}, {"level": 1.5}, {"cache": -1}, {"cache": True}]
)
def test_arguments_are_checked(arguments: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        CompressedTensorDict({}, **arguments)


@pytest.mark.gpu
def test_tensors_are_restored_on_the_gpu() -> None:
    packed = CompressedTensorDict({"x": torch.zeros(1000, device="cuda")}, ["x"], cache=1)
    for _ in range(2):
        assert packed["x"].device.type == "cuda"
    assert packed.to("cpu")["x"].device.type == "cpu"


@pytest.mark.parametrize(
    ("data", "keys", "text"),
    [
        (5, (), "tensordict must be a nested mapping, got int"),
        ({"a": torch.ones(2)}, 5, "compress_keys must be field names, got 5"),
    ],
)
def test_a_value_that_is_not_a_record_raises(data: Any, keys: Any, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        CompressedTensorDict(data, keys)
