"""Each value that is saved by default is loaded by default.

No code of a file runs. Saving any other value raises an error.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import enum
import http
import os
import pickle
import random
import subprocess
import sys
import threading
import zipfile
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
import torch

from storage import AsyncCheckpointSaver, load_checkpoint, load_checkpoint_parallel
from storage.checkpoints.checkpoint_files import load_checkpoint as load
from storage.errors import UnsafeFileError, UsageError

ROOT = Path(__file__).parents[2]


class Color(enum.Enum):
    RED = 1
    BLUE = "b"


class Bits(enum.Flag):
    A = 1
    B = 2


class Level(enum.IntEnum):
    HIGH = 5


class Sly(enum.Enum):
    ONE = 1
    calls: ClassVar[list[Any]] = []

    @classmethod
    def _missing_(cls, value: object) -> Any:
        raise AssertionError("code ran")


class Agent:
    class Mode(enum.Enum):
        TRAIN = "train"

    class Inner:
        class Deep(enum.IntFlag):
            X = 1
            Y = 2


@dataclasses.dataclass
class Config:
    rate: float = 1.0


class Pair(NamedTuple):
    a: int
    b: int


def back(tmp_path: Path, checkpoint: Any, compress: bool = False) -> Any:
    with AsyncCheckpointSaver() as saver:
        saver.save_async(checkpoint=checkpoint, path=tmp_path / "a.pt", compress=compress)
    return load_checkpoint(tmp_path / "a.pt", device="cpu")


ARRAYS = {
    "float": np.arange(6.0).reshape(2, 3),
    "columns first": np.asfortranarray(np.arange(6).reshape(2, 3)),
    "half": np.ones(3, np.float16),
    "wide": np.ones(2, np.longdouble),
    "flags": np.array([True, False]),
    "complex": np.array([1j]),
    "no axis": np.array(4),
    "no rows": np.zeros((0, 3), np.float32),
    "a view": np.arange(20)[::3],
    "texts": np.array(["a", "bc"]),
    "bytes": np.array([b"a", b"bc"]),
    "times": np.array(["2020-01-01"], "datetime64[D]"),
    "spans": np.array([3], "timedelta64[s]"),
    "objects": np.array([1, "a", None, 2.5, Color.RED], object),
}


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("name", ARRAYS)
def test_numpy_arrays_are_loaded(tmp_path: Path, name: str, compress: bool) -> None:
    array = ARRAYS[name]
    actual = back(tmp_path, {"x": [array]}, compress)["x"][0]
    assert (
        type(actual) is np.ndarray and actual.dtype == array.dtype and actual.shape == array.shape
    )
    assert actual.tolist() == array.tolist()


def test_an_array_of_the_other_byte_order_has_the_same_values(tmp_path: Path) -> None:
    assert back(tmp_path, np.arange(3, dtype=">i4")).tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "value",
    [np.float64(0.1), np.float32(3.5), np.int8(-3), np.bool_(True), np.complex64(1j), np.str_("x"), np.bytes_(b"q"),
     np.datetime64("2020-01-01", "s"), np.timedelta64(3, "D"), np.longdouble(1) / 3],
)  # fmt: skip
def test_numpy_scalars_are_loaded(tmp_path: Path, value: Any) -> None:
    actual = back(tmp_path, {"x": value})["x"]
    assert type(actual) is type(value) and actual == value and actual.dtype == value.dtype


def test_random_states_are_loaded_and_continue(tmp_path: Path) -> None:
    generator, own = np.random.default_rng(3), torch.Generator().manual_seed(4)
    philox, old = np.random.Generator(np.random.Philox(5)), np.random.RandomState(6)
    python = random.Random(7)
    states = {
        "torch": own.get_state(),
        "global torch": torch.get_rng_state(),
        "numpy": generator.bit_generator.state,
        "philox": philox.bit_generator.state,
        "old numpy": old.get_state(),
        "global numpy": np.random.get_state(),
        "python": python.getstate(),
    }
    expected = (
        torch.rand(1, generator=own).item(),
        generator.random(),
        philox.random(),
        old.rand(),
        python.random(),
    )
    actual = back(tmp_path, states)
    own.set_state(actual["torch"])
    generator.bit_generator.state, philox.bit_generator.state = actual["numpy"], actual["philox"]
    old.set_state(actual["old numpy"])
    python.setstate(actual["python"])
    again = (
        torch.rand(1, generator=own).item(),
        generator.random(),
        philox.random(),
        old.rand(),
        python.random(),
    )
    assert again == expected
    assert torch.equal(actual["global torch"], states["global torch"])
    assert actual["global numpy"][1].tolist() == states["global numpy"][1].tolist()


def test_namespaces_are_loaded(tmp_path: Path) -> None:
    arguments = argparse.Namespace(
        rate=0.1, inner=argparse.Namespace(seed=np.int64(3), w=torch.ones(2)), names=["a"]
    )
    actual = back(tmp_path, {"args": arguments})["args"]
    assert type(actual) is argparse.Namespace and actual.rate == 0.1 and actual.names == ["a"]
    assert (
        type(actual.inner) is argparse.Namespace
        and actual.inner.seed == 3
        and actual.inner.w.tolist() == [1, 1]
    )


@pytest.mark.parametrize(
    "member",
    [Color.RED, Color.BLUE, Bits.A, Bits.A | Bits.B, Bits(0), Level.HIGH, http.HTTPStatus.OK, Agent.Mode.TRAIN,
     Agent.Inner.Deep.X | Agent.Inner.Deep.Y],
)  # fmt: skip
def test_a_member_of_an_enum_is_loaded_as_the_same_member(
    tmp_path: Path, member: enum.Enum
) -> None:
    actual = back(tmp_path, {"x": member, member: 1})
    assert actual["x"] is member and actual[member] == 1


def test_plain_values_are_loaded(tmp_path: Path) -> None:
    checkpoint = {
        "od": collections.OrderedDict(a=1), "count": collections.Counter("aab"), "set": {1, 2}, "none": None,
        "bytes": (b"", b"ab", bytearray(b"x")), "ints": (2**200, -(2**70), True), "size": torch.Size([1]),
        "dtype": torch.float32, "device": torch.device("cpu"), 3: "key", (1, "k"): 2.5, "npdt": np.dtype("f4"),
    }  # fmt: skip
    actual = back(tmp_path, checkpoint)
    assert actual == checkpoint and [type(actual[key]) for key in actual] == [
        type(checkpoint[key]) for key in checkpoint
    ]


#: A rejected part -> its path in `{"agent": [0, {"x": part}]}`.
REFUSED = {
    "path": (Path("x"), "['x']"),
    "dataclass": (Config(), "['x']"),
    "named tuple": (Pair(1, 2), "['x']"),
    "module": (torch.nn.Linear(1, 1), "['x']"),
    "lock": (threading.Lock(), "['x']"),
    "function": (len, "['x']"),
    "lambda": (lambda: 1, "['x']"),
    "class": (Config, "['x']"),
    "frozen set": (frozenset([1]), "['x']"),
    "structured array": (np.zeros(2, [("a", "f4")]), "['x']"),
    "masked array": (np.ma.zeros(2), "['x']"),
    "generator": (torch.Generator(), "['x']"),
    "generator of numpy": (np.random.default_rng(0), "['x']"),
    "integer": (1 << 3000, "['x']"),
    "in a namespace": (argparse.Namespace(y=argparse.Namespace(z=Config())), r"['x'].y.z"),
    "in an array": (np.array([[1, Config()]], object), "['x'][0, 1]"),
    "in a tuple in a dict": ({"y": (1, Path("x"))}, "['x']['y'][1]"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_saving_a_part_that_cannot_be_loaded_raises(tmp_path: Path, name: str) -> None:
    part, where = REFUSED[name]
    with AsyncCheckpointSaver() as saver:
        with pytest.raises(UsageError) as caught:
            saver.save_async({"w": torch.ones(2), "agent": [0, {"x": part}]}, tmp_path / "a.pt")
        assert f"checkpoint['agent'][1]{where} of " in str(caught.value)
        assert saver.num_pending == 0 and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "part", [Color, Agent.Mode, np.ndarray, np.dtype], ids=["enum", "inner enum", "array", "dtype"]
)
def test_saving_and_loading_a_class_raises(tmp_path: Path, part: type) -> None:
    checkpoint = {"agent": [1, {"kind": part, "member": Color.RED}]}
    with AsyncCheckpointSaver() as saver:
        with pytest.raises(UsageError, match=r"checkpoint\['agent'\]\[1\]\['kind'\]"):
            saver.save_async(checkpoint, tmp_path / "saved.pt")
        saver.save_async(checkpoint, tmp_path / "saved.pt", weights_only=False)
    with pytest.raises(
        UnsafeFileError, match=r"checkpoint\['agent'\]\[1\]\['kind'\] is a class or a function"
    ):
        load_checkpoint(tmp_path / "saved.pt")
    assert load_checkpoint(tmp_path / "saved.pt", weights_only=False)["agent"][1]["kind"] is part


def test_an_array_of_an_unsupported_dtype_raises_with_the_dtype(tmp_path: Path) -> None:
    array = np.zeros(3, [("a", "i4"), ("b", "U3")])
    with AsyncCheckpointSaver() as saver, pytest.raises(UsageError, match="the numpy dtype 'V16'"):
        saver.save_async({"table": array}, tmp_path / "saved.pt")


def test_saving_a_key_that_cannot_be_loaded_raises_with_the_key(tmp_path: Path) -> None:
    with (
        AsyncCheckpointSaver() as saver,
        pytest.raises(
            UsageError, match=r"key \(1, .*Path\('a'\)\) of checkpoint\[1\] of .* is pathlib"
        ),
    ):
        saver.save_async({(1, Path("a")): 1}, tmp_path / "a.pt")


def test_a_checkpoint_with_a_reference_cycle_is_checked_once(tmp_path: Path) -> None:
    circle: dict[str, Any] = {"x": [1]}
    circle["x"].append(circle)
    actual = back(tmp_path, circle)
    assert actual["x"][1] is actual


def test_weights_only_false_saves_and_loads_any_value(tmp_path: Path) -> None:
    with AsyncCheckpointSaver() as saver:
        saver.save_async({"x": Config(2.0)}, tmp_path / "a.pt", weights_only=False)
    with pytest.raises(
        UnsafeFileError, match=r"default: tests\.checkpoint\.test_what_is_loaded\.Config\."
    ):
        load_checkpoint(tmp_path / "a.pt")
    assert load_checkpoint(tmp_path / "a.pt", weights_only=False) == {"x": Config(2.0)}


def test_an_enum_that_is_not_imported_raises_with_its_name(tmp_path: Path) -> None:
    from tests.checkpoint.imported_later import Phase

    with AsyncCheckpointSaver() as saver:
        saver.save_async({"phase": Phase.WARM_UP}, tmp_path / "a.pt")
    text = f"import storage; storage.load_checkpoint({str(tmp_path / 'a.pt')!r})"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    asked = [sys.executable, "-c", text]
    failed = subprocess.run(asked, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert failed.returncode and "UnsafeFileError" in failed.stderr
    assert (
        "tests.checkpoint.imported_later.Phase. For an enum, import 'tests.checkpoint.imported_later'"
        in (failed.stderr)
    )
    asked[2] = (
        f"import tests.checkpoint.imported_later as m; {text[:-1]})['phase'] is m.Phase.WARM_UP or 1/0"
    )
    subprocess.run(asked, check=True, cwd=tmp_path, env=environment)


# Files from unknown sources


def with_pickle(tmp_path: Path, content: bytes) -> Path:
    """Write a checkpoint with the pickle `content`."""
    torch.save({"w": 1}, tmp_path / "a.pt")
    with (
        zipfile.ZipFile(tmp_path / "a.pt") as source,
        zipfile.ZipFile(tmp_path / "b.pt", "w") as target,
    ):
        for member in source.infolist():
            target.writestr(
                member.filename,
                content if member.filename.endswith("data.pkl") else source.read(member),
            )
    return tmp_path / "b.pt"


def named(name: str) -> bytes:
    module, _, attribute = name.rpartition(".")
    return f"c{module}\n{attribute}\n".encode()


ME = __name__
HOSTILE = {
    "calls a class": named(f"{ME}.Config") + b")R.",
    "calls a class beside an enum": named("builtins.getattr") + named(f"{ME}.Agent") + b")R.",
    "takes a method of a class": named("builtins.getattr")
    + named(f"{ME}.Agent")
    + b"X\x08\x00\x00\x00__init__\x86R.",
    "takes an attribute of a module": named("builtins.getattr")
    + named("os.path")
    + b"X\x04\x00\x00\x00join\x86R.",
    "a value that no member has": named(f"{ME}.Sly") + b"K\x09\x85R.",
    "several values": named(f"{ME}.Color") + b"K\x01K\x02\x86R.",
    "makes an enum": named("enum.Enum") + b"X\x01\x00\x00\x00aX\x01\x00\x00\x00b\x86R.",
    "an array of any size": named("numpy.ndarray") + b"J\x00\x00\x00\x40\x85R.",
    "an array that is begun large": (
        named("numpy._core.multiarray._reconstruct")
        + named("numpy.ndarray")
        + b"J\x00\x00\x00\x40\x85C\x01b\x87R."
    ),
    "a dtype of fields": named("numpy.dtype") + b"X\x05\x00\x00\x00f4,f4\x85R.",
    "a scalar without bytes": named("numpy._core.multiarray.scalar")
    + named("numpy.dtype")
    + b"X\x02\x00\x00\x00f8\x85RN\x86R.",
    "a namespace with arguments": named("argparse.Namespace") + b"K\x01\x85R.",
    "a namespace of a method": named("argparse.Namespace.mro") + b")R.",
    "bytes of any size": named("builtins.bytes") + b"J\x00\x00\x00\x40\x85R.",
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("loader", [load, load_checkpoint_parallel])
def test_a_hostile_pickle_raises_one_clear_error(tmp_path: Path, name: str, loader: Any) -> None:
    path = with_pickle(tmp_path, b"\x80\x02" + HOSTILE[name])
    with pytest.raises(
        UnsafeFileError if "class" in name or "module" in name else Exception
    ) as caught:
        loader(path)
    assert str(caught.value).startswith(repr(str(path)))
    assert "code ran" not in str(caught.value)


def test_loads_in_several_threads_do_not_disturb_each_other(tmp_path: Path) -> None:
    with AsyncCheckpointSaver() as saver:
        saver.save_async({"x": np.ones(3), "e": Color.RED}, tmp_path / "a.pt")
    failures: list[BaseException] = []

    def read() -> None:
        try:
            for _ in range(20):
                assert load_checkpoint(tmp_path / "a.pt")["e"] is Color.RED
        except BaseException as failure:  # noqa: BLE001
            failures.append(failure)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_the_safe_globals_of_torch_do_not_change(tmp_path: Path) -> None:
    torch.serialization.add_safe_globals([np.dtype])
    try:
        before = set(torch.serialization.get_safe_globals())
        back(tmp_path, {"x": np.ones(3), "e": Color.RED, "n": argparse.Namespace(a=1)})
        assert set(torch.serialization.get_safe_globals()) - before <= set(
            torch.serialization.get_safe_globals()
        )
        assert before <= set(torch.serialization.get_safe_globals())
        torch.save(np.ones(3), tmp_path / "array.pt")
        with pytest.raises(pickle.UnpicklingError):
            torch.load(tmp_path / "array.pt", weights_only=True)
    finally:
        torch.serialization.clear_safe_globals()


# device=


def test_device_is_a_synonym_of_map_location(tmp_path: Path) -> None:
    back(tmp_path, {"w": torch.ones(2)})
    for loader in (load_checkpoint, load_checkpoint_parallel):
        assert loader(tmp_path / "a.pt", device="meta")["w"].device.type == "meta"
        assert loader(tmp_path / "a.pt", "meta")["w"].device.type == "meta"
        assert loader(tmp_path / "a.pt", device=torch.device("cpu"))["w"].device.type == "cpu"
        with pytest.raises(
            UsageError, match=r"device is 'cpu' and map_location is 'meta'. Pass only one"
        ):
            loader(tmp_path / "a.pt", "meta", device="cpu")
        with pytest.raises(UsageError, match="device must be a torch device"):
            loader(tmp_path / "a.pt", device="nowhere")
