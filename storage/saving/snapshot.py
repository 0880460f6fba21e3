"""Save and load any store: its tensors as HDF5 columns, everything else as `config.json`.

One rule: what a store's state is, the store says: arguments to make an equal one, numbers, and tensors by
name. A folder with `config.json` is complete (see `core/durable.py`).
"""

from __future__ import annotations

import os
import secrets
import threading
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch

from ..core.duplicates import Duplicable
from ..core.durable import as_path, existing_folder, replace_folder
from ..core.modes import lasting
from ..errors import CorruptFileError, ForeignFileError, MissingFieldError, RolloutDataError, SchemaError, nearest
from .column_files import (
    CONFIG_NAME,
    NONSENSE,
    SAVE_ID,
    device_for,
    load_one_save,
    open_columns,
    whole_column,
    write_columns,
)
from .plain_files import write_json

FORMAT = "rollout-data snapshot"
VERSION = 1
COLUMNS = "columns.hdf5"
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

    #: Whether all of its memory is in its state, the rows that were not yet written too.
    _is_saved_whole: ClassVar[bool] = False
    device: torch.device
    rng: torch.Generator
    _lock: threading.RLock

    def __init_subclass__(cls, is_saved_whole: bool = False, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls._is_saved_whole |= is_saved_whole
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
        return {"class": type(self).__name__, "version": VERSION, **vars(self._copy_state())}

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
        write_snapshot(as_path(directory, "save the store"), config, state.tensors)

    @classmethod
    def load(cls: type[_Store], directory: str | os.PathLike[str], device: torch.device | str | None = None) -> _Store:
        """Make a store from what `save` wrote.

        Args:
            directory: What was given to `save`.
            device: Where to put it; None for where it was, or the CPU if that is not here.

        Raises:
            DataFileError: The folder is missing, damaged, of another format or of another class.
        """
        return load_one_save(directory, lambda config: cls._of_save(as_path(directory, "load a store"), config, device))

    @classmethod
    def _of_save(
        cls: type[_Store], directory: Path, config: dict[str, Any], device: torch.device | str | None
    ) -> _Store:
        where = repr(str(directory))
        check_config(directory, config)
        kind = STORES.get(config["class"])
        if kind is None or not issubclass(kind, cls):
            options = nearest(config["class"], (name for name, known in STORES.items() if issubclass(known, cls)))
            raise ForeignFileError("load a store from", where, options, repr(config["class"]))
        try:
            tensors = read_columns(directory, config)
            if kind._is_saved_whole:
                kind._check_sizes(config["arguments"], tensors)
            made = kind._from_arguments(config["arguments"], device_for(config["device"], device))
            made._take_state(config["numbers"], tensors)
        except SchemaError as cause:
            raise CorruptFileError("load a store from", where, "a whole state", str(cause)) from cause
        return made

    @classmethod
    def _check_sizes(cls, arguments: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        """Raise before memory is taken for an empty store that would be larger than the filled one in the file."""
        empty = cls._from_arguments(arguments, torch.device("meta"))._get_state().tensors
        num_bytes, most = (sum(x.nbytes for x in found.values()) for found in (empty, tensors))
        if num_bytes > most:
            raise SchemaError("load a state", "", f"arguments of a store of at most {most} bytes", str(num_bytes))

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
            except NONSENSE as cause:
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
    with replace_folder(directory, (CONFIG_NAME, COLUMNS)) as new:
        save_id = secrets.token_hex(8)
        columns = {name: whole_column(tensor) for name, tensor in tensors.items()}
        sums = write_columns(new / COLUMNS, columns, save_id)
        listed = [
            {"name": name, "dtype": column.dtype, "shape": list(column.shape), "crc32": sums[name]}
            for name, column in columns.items()
        ]
        about = {"format": FORMAT, "version": VERSION, **config, SAVE_ID: save_id, "columns": listed}
        write_json(new / CONFIG_NAME, about)


def check_config(directory: Path, config: dict[str, Any]) -> None:
    """Check what a snapshot folder's `config.json` says of itself."""
    if config.get("format") != FORMAT or config.get("version") != VERSION:
        got = f"{config.get('format')} {config.get('version')}"
        raise ForeignFileError("load a store from", repr(str(directory)), f"{FORMAT} {VERSION}", got)
    config.setdefault("device", "cpu")
    for key, kind in {"class": str, "device": str, "arguments": dict, "numbers": dict, "columns": list}.items():
        if not isinstance(config.get(key), kind):
            got = type(config[key]).__name__ if key in config else "none"
            where = repr(str(directory / CONFIG_NAME))
            raise CorruptFileError("read", where, f"{key!r} as a {kind.__name__}", got)


def read_columns(directory: Path, config: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Read all tensors of a snapshot onto the CPU; sizes are checked before anything is allocated."""
    path, found = existing_folder(directory) / COLUMNS, {}
    columns = {column["name"]: column for column in config["columns"]}
    with open_columns(path, "/", config.get(SAVE_ID), list(columns)) as file:
        for name, column in columns.items():
            dtype = file.dtype(name)
            is_old = column["dtype"] == "bfloat16" and dtype == "uint16"  # earlier saves do not mark them
            if list(file.shapes[name]) != column["shape"] or not (is_old or dtype == column["dtype"]):
                where, got = f"{name!r} of {str(path)!r}", f"{dtype} of shape {list(file.shapes[name])}"
                raise CorruptFileError("read", where, f"{column['dtype']} of shape {column['shape']}", got)
            found[name] = file.read(name, column["crc32"])
            if is_old:
                found[name] = found[name].view(torch.bfloat16)
    return found


def _onto(tensor: torch.Tensor, device: torch.device, name: str) -> torch.Tensor:
    """Copy to a device; random states stay on the CPU."""
    return tensor.detach().clone() if name == "rng" else tensor.detach().to(device, copy=True)
