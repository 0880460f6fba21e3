"""A pickle is read as data: arrays of numpy are restored, and nothing else happens."""

import builtins
import collections
import io
import os
import pickle
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_data.formats.trajectory_folders.restricted_pickle import (
    MAX_OPERATIONS,
    describe_pickle,
)
from storage.errors import CorruptFileError, DataFileError, ForeignFileError, UnsafeFileError

PATH = Path("chunk.pickle")
#: Where numpy 2 keeps what its pickles name.
CORE = "numpy._core"
MAX_PEAK_BYTES = 1 << 20


def describe(data: bytes) -> dict[str, Any]:
    return describe_pickle(io.BytesIO(data), PATH)


def read(data: bytes, key: str = "a") -> np.ndarray:
    return describe(data)[key].read(io.BytesIO(data), PATH)


def short(text: str) -> bytes:
    return b"\x8c" + bytes([len(text)]) + text.encode()


def call(module: str, name: str, arguments: bytes = b")") -> bytes:
    """Return the pickle of a dict with one value, which is made by calling a global."""
    return b"\x80\x04}" + short("a") + short(module) + short(name) + b"\x93" + arguments + b"Rs."


DTYPE = short("numpy") + short("dtype") + b"\x93" + short("f4") + b"\x89\x88\x87R"
DTYPE_STATE = b"(K\x03" + short("<") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
NEW_ARRAY = (
    short(f"{CORE}.multiarray")
    + short("_reconstruct")
    + b"\x93"
    + short("numpy")
    + short("ndarray")
)
NEW_ARRAY += b"\x93K\x00\x85C\x01b\x87R"


def array(
    shape: bytes, data: bytes = b"C\x04\x00\x00\x80?", dtype: bytes = DTYPE + DTYPE_STATE
) -> bytes:
    """Return the pickle of a dict with one array, whose state is written by hand."""
    return (
        b"\x80\x04}" + short("a") + NEW_ARRAY + b"(K\x01" + shape + dtype + b"\x89" + data + b"tbs."
    )


numbers = st.sampled_from(
    ["b1", "i1", "<i2", "<i4", "<i8", "u1", "<u2", "<u4", "<u8", "<f2", "<f4", "<f8", ">f4", ">i8"]
)
arrays = numbers.flatmap(
    lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, min_side=0, max_side=4))
)


@given(arrays, st.integers(3, 5), st.randoms(use_true_random=False))
def test_pickled_numpy_arrays_are_read_exactly(
    written: np.ndarray, protocol: int, chance: Any
) -> None:
    axes = list(range(written.ndim))
    chance.shuffle(axes)
    written = written.transpose(axes)
    got = read(pickle.dumps({"a": written, "b": [1]}, protocol=protocol))
    assert (got.dtype, got.shape) == (written.dtype, written.shape)
    assert got.tobytes() == written.tobytes()


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_both_module_names_of_numpy_are_read(protocol: int) -> None:
    written = np.arange(6, dtype=np.float32).reshape(2, 3)
    data = pickle.dumps({"a": written}, protocol=3)
    new, old = (b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n")
    either = data.replace(new, old) if new in data else data.replace(old, new)
    assert either != data
    np.testing.assert_array_equal(read(either), written)
    np.testing.assert_array_equal(read(pickle.dumps({"a": written}, protocol=protocol)), written)


def test_plain_containers_and_scalars_are_read() -> None:
    written = collections.OrderedDict(
        a=np.float32(0.1), t=(np.ones(2),), l=[1, -2.5, True, None, "x", 2**70, b"y"]
    )
    written["d"] = {"e": (1, 2, 3, 4)}
    data = pickle.dumps(written)
    content = describe(data)
    assert list(content) == ["a", "t", "l", "d"]
    assert read(data) == np.float32(0.1)
    np.testing.assert_array_equal(content["t"][0].read(io.BytesIO(data), PATH), np.ones(2))
    assert content["l"][:6] == [1, -2.5, True, None, "x", 2**70]
    assert content["d"] == {"e": (1, 2, 3, 4)}


def test_builtin_containers_may_be_called() -> None:
    items = b"]" + short("x") + b"K\x05\x86a\x85"
    assert describe(call("builtins", "dict", items))["a"] == {"x": 5}
    assert describe(call("collections", "OrderedDict", items))["a"] == {"x": 5}
    assert describe(call("builtins", "list", items))["a"] == [("x", 5)]
    assert describe(call("builtins", "tuple", items))["a"] == (("x", 5),)


class Gadget:
    """Runs code when an unrestricted unpickler reads it."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.reduced = (function, arguments)

    def __reduce__(self) -> Any:
        return self.reduced


class Plain:
    """An ordinary object, for NEWOBJ and BUILD."""

    def __init__(self) -> None:
        self.value = 1


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize(
    "function", [os.system, builtins.eval, builtins.exec, getattr, __import__, np.load, open]
)
def test_code_is_refused_by_name_and_never_run(
    function: Any, protocol: int, tmp_path: Path
) -> None:
    marker = tmp_path / "ran"
    for content in (
        {"a": Gadget(function, f"touch {marker}")},
        Gadget(function, f"open({str(marker)!r}, 'w')"),
    ):
        with pytest.raises(
            UnsafeFileError,
            match=r"contains the global '\w+(\.\w+)*',.* No code of the file was run",
        ) as error:
            describe(pickle.dumps(content, protocol=protocol))
        assert function.__name__ in str(error.value)
    assert not marker.exists()


@pytest.mark.parametrize("protocol", range(6))
def test_objects_are_refused(protocol: int) -> None:
    with pytest.raises(UnsafeFileError, match=r"the global '(copy_?reg._reconstructor|.*Plain)'"):
        describe(pickle.dumps({"a": Plain()}, protocol=protocol))


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("numpy.core.numeric", "fromfunction"),
        (f"{CORE}.numeric", "fromfile"),
        (f"{CORE}.multiarray", "fromstring"),
        ("numpy.core.multiarray", "_reconstruct.__globals__"),
        ("numpy.core", "multiarray._reconstruct"),
        ("numpy.core.numeric", "_frombuffer.__globals__.__getitem__"),
        ("numpy.testing._private.utils", "runstring"),
        ("numpy", "fromfile"),
        ("numpy", "ndarray.tofile"),
        ("numpy", "matrix"),
        ("copyreg", "_reconstructor"),
        ("copyreg", "add_extension"),
        ("functools", "partial"),
        ("collections", "defaultdict"),
        ("builtins", "bytearray"),
        ("builtins", "set"),
        ("_codecs", "encode"),
        ("torch._utils", "_rebuild_tensor_v2"),
        ("posix", "system"),
    ],
)
def test_every_other_global_is_refused_by_name(module: str, name: str) -> None:
    with pytest.raises(UnsafeFileError) as error:
        describe(call(module, name))
    assert str(error.value) == (
        f"'chunk.pickle' contains the global '{module}.{name}', but a pickle may only contain "
        "arrays and plain containers. No code of the file was run. Check where the file comes from."
    )


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (b"(S'touch x'\nios\nsystem\n.", "os.system"),
        (b"(ios\nsystem\n.", "os.system"),
        (b"cos\nsystem\n(S'touch x'\ntR.", "os.system"),
        (b"\x80\x02(cos\nsystem\no.", "os.system"),
        (b"\x80\x02}(K\x01o.", "the operation OBJ"),
        (b"\x80\x02}N\x81.", "the operation NEWOBJ"),
        (b"\x80\x02}N\x92.", "the operation NEWOBJ_EX"),
        (b"\x80\x02\x82\x01.", "the operation EXT1"),
        (b"\x80\x02\x84\x01\x00\x00\x00.", "the operation EXT4"),
        (b"\x80\x02Pname\n.", "the operation PERSID"),
        (b"\x80\x02}Q.", "the operation BINPERSID"),
        (b"\x80\x05\x97.", "the operation NEXT_BUFFER"),
        (b"\x80\x04}]}b.", "an assignment of attributes to a list"),
        (b"\x80\x04}}b.", "an assignment of attributes to a dict"),
        (b"\x80\x04})R.", "a call of dict"),
        (b"\x80\x04" + short("os") + b")R.", "a call of str"),
        (call("numpy", "ndarray", b"J\xff\xff\xff\x7f\x85\x85"), "a call of numpy.ndarray"),
        (call("numpy", "dtype", short("O8") + b"\x89\x88\x87"), "an array of objects"),
        (call("numpy", "dtype", short("O") + b"\x89\x88\x87"), "an array of objects"),
        (call("numpy", "dtype", b"N\x89\x88\x87"), "a dtype of NoneType"),
        (call(f"{CORE}.multiarray", "_reconstruct", b"NNN\x87"), "an array of type NoneType"),
        (array(b"K\x01\x85", b"](K\x01e"), "an array of objects"),
        (
            array(b"K\x01\x85", dtype=DTYPE + DTYPE_STATE.replace(b"NNN", b"N})")),
            "a dtype that is not a plain number",
        ),
        (
            array(b"K\x01\x85", dtype=DTYPE + DTYPE_STATE.replace(b"K\x00tb", b"K\x3ftb")),
            "a dtype that is not a plain number",
        ),
        (
            array(b"K\x01\x85")[:-2] + b"(K\x01K\x01\x85N\x89C\x00tbs.",
            "an assignment of attributes to a PickledArray",
        ),
    ],
)
def test_other_ways_to_run_or_build_things_are_refused(data: bytes, named: str) -> None:
    with pytest.raises(UnsafeFileError) as error:
        describe(data)
    assert named in str(error.value)


def test_object_arrays_of_numpy_are_refused() -> None:
    for protocol in (3, 4, 5):
        with pytest.raises(UnsafeFileError, match="an array of objects"):
            describe(pickle.dumps({"a": np.array([{}, None], object)}, protocol=protocol))


@pytest.mark.parametrize("dtype", ["U3", "S3", "c8", "M8[s]", [("x", "f4")], "longdouble"])
def test_arrays_of_other_than_plain_numbers_are_refused(dtype: Any) -> None:
    with pytest.raises(DataFileError, match=r"not supported\. Supported dtypes are b1, i1"):
        describe(pickle.dumps({"a": np.zeros(2, dtype)}))


BIG = b"\x8a\x08" + struct.pack("<q", 1 << 60)


@pytest.mark.parametrize(
    "data",
    [
        array(BIG + b"\x85"),
        array(BIG + BIG + b"\x86"),
        array(b"J\xff\xff\xff\xff\x85"),
        array(b"\x88\x85"),
        array(short("x") + b"\x85"),
        array(b"]"),
        array(b"(" + b"K\x01" * 60 + b"t"),
        array(b"K\x01\x85", data=b"\x8e" + struct.pack("<Q", 1 << 62)),
        array(b"K\x01\x85", data=b"\x96" + struct.pack("<Q", 1 << 35)),
        array(b"K\x01\x85", data=b"B\xff\xff\xff\xff"),
        array(b"K\x01\x85", data=b"T\xff\xff\xff\xff"),
        array(b"K\x01\x85", data=b"N"),
        array(b"K\x01\x85", dtype=b"N"),
        call(
            f"{CORE}.numeric",
            "_frombuffer",
            b"(C\x04abcd" + DTYPE + BIG + b"\x85" + short("C") + b"t",
        ),
        call(
            f"{CORE}.numeric",
            "_frombuffer",
            b"(C\x04abcd" + DTYPE + b"K\x01\x85" + short("X") + b"t",
        ),
        call(
            f"{CORE}.numeric",
            "_frombuffer",
            b"(C\x04abcd" + DTYPE + b"K\x01\x85" + short("K") + b"K\x09\x85t",
        ),
        call(f"{CORE}.multiarray", "scalar", DTYPE + b"C\x01a\x86"),
        b"\x80\x04\x95" + struct.pack("<Q", 1 << 60) + b"}.",
        b"\x80\x04\x8d" + struct.pack("<Q", 1 << 60) + b".",
        b"\x80\x04X\xff\xff\xff\xff.",
        b"\x80\x04\x8b\xff\xff\xff\x7f.",
        b"\x80\x04\x8b\xff\xff\xff\xff.",
        b"I" + b"9" * 5000 + b"\n.",
        b"\x80\x04}" + short("a") + NEW_ARRAY + b"s.",
    ],
)
def test_declared_sizes_are_checked_against_the_file_before_allocation(data: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(CorruptFileError):
            describe(data)
        assert tracemalloc.get_traced_memory()[1] < MAX_PEAK_BYTES
    finally:
        tracemalloc.stop()


def test_a_memo_at_a_huge_index_allocates_no_memory() -> None:
    tracemalloc.start()
    assert describe(b"\x80\x04}r\xff\xff\xff\xff.") == {}
    assert tracemalloc.get_traced_memory()[1] < MAX_PEAK_BYTES
    tracemalloc.stop()


@pytest.mark.parametrize(
    "bomb",
    [
        b"(" * (MAX_OPERATIONS + 1),
        b"]" * (MAX_OPERATIONS + 1),
        b")" + b"\x85" * (MAX_OPERATIONS + 1),
        b"]\x94" + b"h\x00h\x00\x86\x94" * MAX_OPERATIONS,
        b"](" + b"N" * 1000 + b"e\x94" + b"cbuiltins\nlist\nh\x00\x85R" * 200,
    ],
)
def test_bombs_of_nesting_memo_and_copies_raise(bomb: bytes) -> None:
    with pytest.raises(UnsafeFileError, match=f"has more than {MAX_OPERATIONS} pickle operations"):
        describe(b"\x80\x04" + bomb)


def test_nesting_within_the_limit_is_harmless() -> None:
    depth = MAX_OPERATIONS // 2
    assert "a" in describe(b"\x80\x04}" + short("a") + b")" + b"\x85" * depth + b"s.")
    with pytest.raises(ForeignFileError, match="a pickled tuple, expected a dict of arrays"):
        describe(b"\x80\x04)" + b"\x85" * depth + b".")


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_every_truncation_is_reported(protocol: int) -> None:
    data = pickle.dumps({"a": np.arange(20, dtype=np.float32), "b": [1, (2,)]}, protocol=protocol)
    for length in range(len(data)):
        with pytest.raises(CorruptFileError):
            describe(data[:length])


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_every_flipped_bit_is_an_error_or_other_data_of_the_same_size(protocol: int) -> None:
    data = pickle.dumps({"a": np.arange(3, dtype=np.float32)}, protocol=protocol)
    for position in range(len(data) * 8):
        flipped = bytearray(data)
        flipped[position // 8] ^= 1 << position % 8
        try:
            content = describe(bytes(flipped))
        except DataFileError:
            continue
        assert len(content) <= 1


@given(st.binary(max_size=200))
def test_random_bytes_raise_a_file_error(noise: bytes) -> None:
    for data in (noise, b"\x80\x04" + noise, b"\x80\x04}(" + noise):
        try:
            assert isinstance(describe(data), dict)
        except DataFileError:
            pass


@pytest.mark.parametrize(
    "garbage",
    [
        b"",
        b"not a pickle at all",
        b"PK\x03\x04" + bytes(30),
        b"\x89HDF\r\n\x1a\n",
        bytes(64),
        b"{}",
        b".",
    ],
)
def test_garbage_is_reported_as_damage(garbage: bytes) -> None:
    with pytest.raises(CorruptFileError, match=r"'chunk\.pickle' is (damaged|truncated): "):
        describe(garbage)


def test_bytes_behind_the_end_are_reported() -> None:
    with pytest.raises(CorruptFileError, match="is damaged: 3 bytes follow the end of the pickle"):
        describe(pickle.dumps({}) + b"abc")


def test_a_newer_protocol_is_foreign() -> None:
    with pytest.raises(ForeignFileError, match=r"protocol 6\. Protocols up to 5 are supported"):
        describe(b"\x80\x06}.")


def test_keys_other_than_text_are_refused() -> None:
    with pytest.raises(CorruptFileError, match="the keys of a dict must be texts"):
        describe(pickle.dumps({1: 2}))


def test_a_file_that_shrank_is_reported_at_reading() -> None:
    data = pickle.dumps({"a": np.arange(100)})
    stored = describe(data)["a"]
    with pytest.raises(CorruptFileError, match="the file has shrunk"):
        stored.read(io.BytesIO(data[:200]), PATH)
