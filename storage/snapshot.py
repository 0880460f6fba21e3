"""Save and load any store: its tensors as HDF5 columns, everything else as `config.json`.

One rule: what a store's state is, the store says: arguments to make an equal one, numbers, and tensors by
name. A folder with `config.json` is complete (see `durable.py`).
"""

from __future__ import annotations

import json
import os
import threading
import warnings
from abc import abstractmethod
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import h5py
import numpy as np
import torch

from .checksums import crc32
from .duplicates import Duplicable
from .durable import existing_folder, replace_folder
from .errors import (
    CorruptFileError,
    DataFileError,
    ForeignFileError,
    MissingFieldError,
    RolloutDataError,
    RolloutDataWarning,
    SchemaError,
    nearest,
)
from .fields import DTYPES, dtype_name
from .modes import lasting
from .records import COMPLEX_DTYPES

FORMAT = "rollout-data snapshot"
VERSION = 1
CONFIG, COLUMNS = "config.json", "columns.hdf5"
_DTYPES = {**DTYPES, **COMPLEX_DTYPES}
_CHUNK_BYTES = 16 * 1024 * 1024
#: What values of wrong kinds make Python and torch raise.
_NONSENSE = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
_Store = TypeVar("_Store", bound="Snapshotted")

#: Name -> class, for everything that can be loaded by `load_store`.
STORES: dict[str, type[Snapshotted]] = {}


@dataclass(frozen=True)
class State:
    """All that a store is, taken apart.

    Attributes:
        arguments: JSON-able keywords that make an equal, empty store.
        numbers: JSON-able counters and flags.
        tensors: By name, levels joined by "/".
    """

    arguments: dict[str, Any]
    numbers: dict[str, Any]
    tensors: dict[str, torch.Tensor]


class Snapshotted(Duplicable):
    """Gives a store `state_dict`, `load_state_dict`, `save`, `load` and copies.

    A subclass says in `_get_state` what it is and takes it back in `_set_state`; both hold its lock.
    """

    device: torch.device
    rng: torch.Generator
    _lock: threading.RLock

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        STORES[cls.__name__] = cls

    @abstractmethod
    def _get_state(self) -> State:
        """Take this apart; the tensors may share memory with it."""

    @abstractmethod
    def _set_state(self, numbers: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        """Take over a state with equal arguments; the tensors are on this device and ours to keep.

        What does not fit raises before anything is changed.
        """

    @classmethod
    def _from_arguments(cls: type[_Store], arguments: Mapping[str, Any], device: torch.device) -> _Store:
        make: Any = cls
        made: _Store = make(**arguments, device=device)
        return made

    def _recipe(self) -> dict[str, Any]:
        found = {"arguments": self._get_state().arguments, "device": self.device}
        return found | {"output_device": vars(self).get("output_device")}

    @classmethod
    def _from_recipe(cls, recipe: Mapping[str, Any]) -> Any:
        made: Any = cls._from_arguments(recipe["arguments"], recipe["device"])
        if recipe["output_device"] is not None:
            made.output_device = recipe["output_device"]
        return made

    def state_dict(self) -> dict[str, Any]:
        """Copy everything, the random state too; tensors stay on this device."""
        state = self._copy_state()
        return {
            "class": type(self).__name__,
            "version": VERSION,
            "arguments": state.arguments,
            "numbers": state.numbers,
            "tensors": state.tensors,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave, from any device; nothing is changed if it does not fit.

        Raises:
            SchemaError: The state is of another class or version, or of a store made with other arguments.
        """
        if not isinstance(state, Mapping):
            raise SchemaError("load a state", "", "a mapping", type(state).__name__)
        if state.get("version", VERSION) != VERSION:
            raise SchemaError("load a state", "", f"version {VERSION}", repr(state["version"]))
        for key in ("class", "arguments", "numbers", "tensors"):
            if key not in state:
                raise MissingFieldError("load a state", "", f"the key {key!r}", ", ".join(map(repr, state)))
            if key != "class" and not isinstance(state[key], Mapping):
                raise SchemaError("load a state", f"with {key!r}", "a mapping", type(state[key]).__name__)
        self._check_state(state["class"], state["arguments"])
        self._take_state(state["numbers"], state["tensors"])

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write everything into `directory`, atomically; an earlier save there is replaced.

        What is written is one moment, whatever other threads add meanwhile; for the time of the call
        it takes as much memory again.

        Raises:
            DataFileError: There is a file, or a folder with anything else in it.
        """
        state = self._copy_state()
        config = {
            "class": type(self).__name__,
            "device": str(self.device),
            "arguments": state.arguments,
            "numbers": state.numbers,
        }
        write_snapshot(Path(directory), config, state.tensors)

    @classmethod
    def load(cls: type[_Store], directory: str | os.PathLike[str], device: torch.device | str | None = None) -> _Store:
        """Make a store from what `save` wrote.

        Args:
            directory: What was given to `save`.
            device: Where to put it; None for where it was, or the CPU if that is not here.

        Raises:
            DataFileError: The folder is missing, damaged, of another format or of another class.
        """
        config = read_config(Path(directory))
        kind = STORES.get(config["class"])
        if kind is None or not issubclass(kind, cls):
            options = nearest(str(config["class"]), (name for name, known in STORES.items() if issubclass(known, cls)))
            raise ForeignFileError("load a store from", repr(str(directory)), options, repr(config["class"]))
        wanted = None if device is None else torch.device(device)
        try:
            made = kind._from_arguments(config["arguments"], _device(config["device"], wanted))
            made._take_state(config["numbers"], read_columns(Path(directory), config))
        except _NONSENSE as cause:
            is_ours = isinstance(cause, RolloutDataError) and not isinstance(cause, SchemaError)
            if is_ours or isinstance(cause, torch.cuda.OutOfMemoryError):
                raise
            got = str(cause) if isinstance(cause, SchemaError) else f"{type(cause).__name__}: {cause}"
            raise CorruptFileError("load a store from", repr(str(directory)), "a whole state", got) from cause
        return made

    def _copy_state(self) -> State:
        """Copy everything as it is at one moment, on this device."""
        with self._lock:
            state = self._get_state()
            return State(
                state.arguments, state.numbers, {name: x.detach().clone() for name, x in state.tensors.items()}
            )

    @lasting
    def _take_state(self, numbers: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        """Take over a state whose arguments were checked; raise `SchemaError` if it is not whole."""
        with self._lock:
            for name in self._get_state().numbers:
                if name not in numbers:
                    raise MissingFieldError("load a state", f"without {name!r}")
            for name, tensor in tensors.items():
                if not isinstance(tensor, torch.Tensor):
                    raise SchemaError("load a state", f"with {name!r}", "a tensor", type(tensor).__name__)
            try:
                torch.Generator(self.rng.device).set_state(tensors["rng"])
                self._set_state(numbers, {name: _onto(x, self.device, name) for name, x in tensors.items()})
            except _NONSENSE as cause:
                if isinstance(cause, RolloutDataError):
                    raise
                raise SchemaError("load a state", "", "what state_dict() gave", f"{cause}") from cause

    def _check_state(self, name: str, arguments: Mapping[str, Any]) -> None:
        if name != type(self).__name__:
            raise SchemaError("load a state", "", f"one of {type(self).__name__}", f"one of {name}")
        mine = self._get_state().arguments
        for key in (*mine, *arguments):
            if mine.get(key) != arguments.get(key):
                got = repr(arguments.get(key))
                raise SchemaError("load a state", "", f"one with {key}={mine.get(key)!r}", got, "Make an equal store")


def checked_count(numbers: Mapping[str, Any], name: str, low: int, high: int) -> int:
    """Give a count of a loaded state; raise `SchemaError` if it is no int from `low` to `high`."""
    count = numbers[name]
    if not isinstance(count, int) or isinstance(count, bool) or not low <= count <= high:
        raise SchemaError("load a state", f"with {name!r}", f"an int from {low} to {high}", repr(count))
    return count


def load_store(directory: str | os.PathLike[str], device: torch.device | str | None = None) -> Any:
    """Load a store of whatever class was saved in `directory`; see `Snapshotted.load`."""
    return Snapshotted.load(directory, device)


def write_snapshot(directory: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
    """Write a snapshot folder; it takes the place of an earlier one."""
    with replace_folder(directory, (CONFIG, COLUMNS)) as new:
        columns = _write_columns(new / COLUMNS, tensors)
        text = json.dumps({"format": FORMAT, "version": VERSION, **config, "columns": columns}, indent=1)
        (new / CONFIG).write_text(text, encoding="utf-8")


def read_config(directory: Path) -> dict[str, Any]:
    """Read and check `config.json` of a snapshot folder."""
    path = existing_folder(directory) / CONFIG
    _check_is_file(path)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as cause:
        raise DataFileError("load a store from", repr(str(directory)), f"a folder with {CONFIG}", "none") from cause
    except (ValueError, OSError, RecursionError) as cause:
        raise CorruptFileError("read", repr(str(path)), "JSON", str(cause)) from cause
    if not isinstance(config, dict) or config.get("format") != FORMAT or config.get("version") != VERSION:
        got = f"{config.get('format')} {config.get('version')}" if isinstance(config, dict) else type(config).__name__
        raise ForeignFileError("load a store from", repr(str(directory)), f"{FORMAT} {VERSION}", got)
    config.setdefault("device", "cpu")
    for key, kind in {"class": str, "device": str, "arguments": dict, "numbers": dict, "columns": list}.items():
        if not isinstance(config.get(key), kind):
            got = type(config[key]).__name__ if key in config else "none"
            raise CorruptFileError("read", repr(str(path)), f"{key!r} as a {kind.__name__}", got)
    return config


def read_columns(directory: Path, config: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Read all tensors of a snapshot onto the CPU; sizes are checked before anything is allocated."""
    path = existing_folder(directory) / COLUMNS
    found: dict[str, torch.Tensor] = {}
    _check_is_file(path)
    try:
        with h5py.File(path, "r") as file, open(path, "rb", buffering=0) as raw:
            size = path.stat().st_size
            places = [(column, _find(file, column, size, path)) for column in config["columns"]]
            for column, offset in places:
                found[column["name"]] = _read_column(raw, column, offset, path)
    except FileNotFoundError as cause:
        raise DataFileError("load a store from", repr(str(directory)), f"the file {COLUMNS}", "none") from cause
    except (OSError, KeyError, RuntimeError) as cause:
        if isinstance(cause, DataFileError):
            raise
        raise CorruptFileError(
            "read", repr(str(path)), "an HDF5 file with the columns of its config", str(cause)
        ) from cause
    return found


def _check_is_file(path: Path) -> None:
    """Refuse what is there and is no file: opening a pipe would wait for ever."""
    if path.exists() and not path.is_file():
        raise CorruptFileError("read", repr(str(path)), "a regular file", "something else")


def _write_columns(path: Path, tensors: Mapping[str, torch.Tensor]) -> list[dict[str, Any]]:
    """Stream every tensor into a contiguous dataset; a second thread computes the checksums meanwhile."""
    columns: list[dict[str, Any]] = []
    with h5py.File(path, "w") as file, ThreadPoolExecutor(1) as pool:
        for name, tensor in tensors.items():
            dtype = str(tensor.dtype).removeprefix("torch.")
            dtype = dtype if dtype in COMPLEX_DTYPES else dtype_name(tensor.dtype, repr(name))
            dataset = file.create_dataset(name, tuple(tensor.shape), _DTYPES[dtype][1])
            crc: Future[int] | None = None
            rows = max(1, _CHUNK_BYTES // max(1, tensor[:1].nbytes if tensor.dim() else tensor.nbytes))
            for start in range(0, len(tensor) if tensor.dim() else 1, rows):
                part = _to_numpy(tensor[start : start + rows] if tensor.dim() else tensor, dtype)
                crc = pool.submit(_extend_crc, crc, part)
                if part.size:
                    dataset[(slice(start, start + len(part)),) if tensor.dim() else ()] = part
            value = crc.result() if crc is not None else 0
            columns.append({"name": name, "dtype": dtype, "shape": list(tensor.shape), "crc32": value})
    return columns


def _extend_crc(before: Future[int] | None, part: np.ndarray[Any, Any]) -> int:
    return crc32(part.reshape(-1).view(np.uint8).data if part.size else b"", before.result() if before else 0)


def _to_numpy(tensor: torch.Tensor, dtype: str) -> np.ndarray[Any, Any]:
    on_cpu = tensor.detach().cpu().contiguous()
    array: np.ndarray[Any, Any] = (on_cpu.view(torch.uint16) if dtype == "bfloat16" else on_cpu).numpy()
    return array


def _find(file: h5py.File, column: Mapping[str, Any], file_size: int, path: Path) -> int:
    """Find where a column's bytes stand in the file; refuse anything that is not plainly there."""
    shape, (_, numpy_dtype) = tuple(column["shape"]), _DTYPES[column["dtype"]]
    dataset = file[column["name"]]
    num_bytes = prod(shape) * numpy_dtype.itemsize
    offset = dataset.id.get_offset() if isinstance(dataset, h5py.Dataset) else None
    is_plain = isinstance(dataset, h5py.Dataset) and dataset.shape == shape and dataset.dtype == numpy_dtype
    if not is_plain or (num_bytes and (offset is None or offset + num_bytes > file_size)):
        expected = f"{column['dtype']} of shape {list(shape)} inside the file for {column['name']!r}"
        raise CorruptFileError("read", repr(str(path)), expected, "something else")
    return int(offset or 0)


def _read_column(raw: Any, column: Mapping[str, Any], offset: int, path: Path) -> torch.Tensor:
    torch_dtype, _ = _DTYPES[column["dtype"]]
    tensor = torch.empty(column["shape"], dtype=torch_dtype, device="cpu")
    data = tensor.reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else memoryview(bytearray())
    raw.seek(offset)
    crc = 0
    for start in range(0, len(data), _CHUNK_BYTES):
        part = data[start : start + _CHUNK_BYTES]
        if raw.readinto(part) != len(part):
            raise CorruptFileError("read", repr(str(path)), f"{len(data)} bytes of {column['name']!r}", "fewer")
        crc = crc32(part, crc)
    if crc != column["crc32"]:
        where = f"{str(path)!r}, column {column['name']!r}"
        raise CorruptFileError("read", where, f"checksum {column['crc32']:08x}", f"{crc:08x}")
    return tensor


def _onto(tensor: torch.Tensor, device: torch.device, name: str) -> torch.Tensor:
    """Copy to a device; random states stay on the CPU."""
    return tensor.detach().clone() if name == "rng" else tensor.detach().to(device, copy=True)


def _device(saved: str, wanted: torch.device | str | None) -> torch.device:
    if wanted is not None:
        return torch.device(wanted)
    if torch.device(saved).type == "cuda" and not torch.cuda.is_available():
        warnings.warn(f"{saved!r} is not here; the store is loaded onto the CPU", RolloutDataWarning)
        return torch.device("cpu")
    return torch.device(saved)
