"""`Store`: state, folders, pickles and copies of anything that holds rows; and the one registry of classes.

One rule: a store says what its state is and takes one back; everything else happens here. `BufferStore` is a `Store`
whose folders are laid out as those of earlier systems.
"""

from __future__ import annotations

import hashlib
import os
import threading
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import isabstract
from typing import Any, ClassVar, TypeVar

import torch

from ..core.arguments import is_whole
from ..core.durable_files import existing_folder
from ..core.memory import StreamOrder, lasting
from ..core.object_summary import Shown
from ..errors import (
    CorruptFileError,
    ForeignFileError,
    MissingFieldError,
    RolloutDataError,
    RolloutDataWarning,
    SchemaError,
    nearest,
)
from .hdf5_columns import SAVE_ID, name_of, open_columns
from .saved_folder import (
    COLUMNS,
    CONFIG_NAME,
    NONSENSE,
    check_version,
    device_for,
    load_one_save,
    read_config,
    write_folder,
)

FORMAT = "rollout-data snapshot"
VERSION = 1
_LOAD = "load a state"
#: Keys of a config, and what they are.
_CONFIG = {"class": str, "device": str, "arguments": dict, "numbers": dict, "columns": list}
#: Sizes of the states of generators on the CPU and on CUDA.
_RNG_BYTES = {5056, 16}
_Store = TypeVar("_Store", bound="Store")

#: Name -> class, for everything that can be loaded by `load_store`; classes are added as they are defined.
STORES: dict[str, type[Store]] = {}


class UnknownBufferError(ForeignFileError, ValueError):
    """A folder holds a store of a class that is not known here."""


@dataclass(frozen=True)
class State:
    """All that a store is, taken apart.

    Attributes:
        arguments: JSON-able keywords that make an equal, empty store.
        numbers: JSON-able counters and flags.
        tensors: By name, levels joined by "/"; `rng`, the random state, `Store` adds if it is missing.
    """

    arguments: dict[str, Any]
    numbers: dict[str, Any]
    tensors: dict[str, torch.Tensor]


class Store(Shown, ABC):
    """Gives a store `state_dict`, `load_state_dict`, `save`, `load`, pickling and copies.

    A subclass has the attributes below and implements `_get_state` and `_set_state`; the lock is held during both.
    If its constructor does not take `State.arguments`, `device` and `generator`, it overrides `_from_arguments` too.
    Copies are made from the state, so that attributes that a subclass adds are copied only if its state has them.

    Attributes:
        device: Where the rows are.
        rng: Draws the samples.
        _lock: Held by every method that reads or writes rows.
        _order: Orders reads and writes of rows among streams; absent if parts of the store have orders of their own.
    """

    #: Whether all of its memory is in its state, also rows that were not yet written.
    _is_saved_whole: ClassVar[bool] = False
    device: torch.device
    rng: torch.Generator
    _lock: threading.RLock
    _order: StreamOrder

    def __init_subclass__(cls, is_saved_whole: bool = False, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls._is_saved_whole |= is_saved_whole
        STORES[cls.__name__] = cls

    @abstractmethod
    def _get_state(self) -> State:
        """Take this apart, but for the random state; the tensors may share memory with it, and be views."""

    @abstractmethod
    def _set_state(self, numbers: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        """Take over a state with equal arguments, but for the random state; the tensors are on this device, and ours.

        What does not fit raises. Attributes that were replaced by then get their old values back, so that a method
        either replaces attributes only, or checks everything before it writes to memory.
        """

    @classmethod
    def _from_arguments(cls, arguments: Mapping[str, Any], device: torch.device) -> Any:
        """Make an equal, empty store without drawing from torch's own generator; its random state comes next."""
        make: Any = cls
        return make(**arguments, device=device, generator=0)

    def _options(self) -> dict[str, Any]:
        """List attributes besides the state that copies in memory have too."""
        return {name: vars(self)[name] for name in ("output_device", "nested_key_separator") if name in vars(self)}

    def state_dict(self) -> dict[str, Any]:
        """Copy everything, the random state too; tensors stay on this device."""
        return {"class": type(self).__name__, "version": VERSION, **vars(self.copy_state())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave, from any device; nothing is changed if it does not fit.

        Raises:
            SchemaError: The state is of another class or version, or of a store made with other arguments.
        """
        self.check_form(state)
        self.check_equal(state["class"], state["arguments"])
        self.take_state(state["numbers"], state["tensors"])

    def check_form(self, state: Mapping[str, Any]) -> None:
        """Raise `SchemaError` if a state does not have the form of this version."""
        if not isinstance(state, Mapping):
            raise SchemaError(_LOAD, "", "state as a mapping", type(state).__name__)
        if state.get("version", VERSION) != VERSION:
            raise SchemaError(_LOAD, "", f"version {VERSION}", repr(state["version"]))
        for key in ("class", "arguments", "numbers", "tensors"):
            if key not in state:
                raise MissingFieldError(_LOAD, "", f"the key {key!r}", ", ".join(map(repr, state)))
            if key != "class" and not isinstance(state[key], Mapping):
                raise SchemaError(_LOAD, f"with {key!r}", "a mapping", type(state[key]).__name__)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write everything into `folder`, atomically; an earlier save there is replaced.

        Other threads wait meanwhile, so that what is written is one moment; little memory is taken.

        Raises:
            DataFileError: There is a file, or a folder with anything else in it.
            WriteError: The folder cannot be written, as on a full disk; the earlier save stays. Also an `OSError`.
        """
        with self._lock:
            state = self._whole_state()
            columns = [{"name": name, "dtype": name_of(x), "shape": list(x.shape)} for name, x in state.tensors.items()]
            about = {"format": FORMAT, "version": VERSION, "class": type(self).__name__, "device": str(self.device)}
            about |= {"arguments": state.arguments, "numbers": state.numbers, "columns": columns}
            write_folder(folder, {COLUMNS: state.tensors}, about)

    @classmethod
    def load(cls: type[_Store], folder: str | os.PathLike[str], device: torch.device | str | None = None) -> _Store:
        """Make a store from what `save` wrote.

        Args:
            folder: What was given to `save`.
            device: Where to keep it; None for where it was, or the CPU if that is not here.

        Raises:
            DataFileError: The folder is missing, damaged, of another format or of another class.
        """
        return load_one_save(folder, lambda config: cls._of_save(folder, config, device))

    def copy_state(self) -> State:
        """Copy everything as it is at one moment, on this device."""
        with self._lock:
            state = self._whole_state()
            for name, x in state.tensors.items():
                state.tensors[name] = x.detach().clone(memory_format=torch.contiguous_format)
            if hasattr(self, "_order"):
                self._order.record(is_write=False)
            return state

    def check_equal(self, name: str, arguments: Mapping[str, Any]) -> None:
        """Raise `SchemaError` if a state is of another class than this, or of a store made with other arguments."""
        if name != type(self).__name__:
            raise SchemaError(_LOAD, "", f"one of {type(self).__name__}", f"one of {name}")
        mine = self._get_state().arguments
        for key in (*mine, *arguments):
            if mine.get(key) != arguments.get(key):
                got = repr(arguments.get(key))
                raise SchemaError(_LOAD, "", f"one with {key}={mine.get(key)!r}", got, "Make an equal store")

    def __reduce__(self) -> tuple[Any, ...]:
        with self._lock:
            return _remade, (type(self), self.device, self._options(), vars(self.copy_state()))

    def _whole_state(self) -> State:
        state = self._get_state()
        return State(state.arguments, state.numbers, {"rng": self.rng.get_state(), **state.tensors})

    @classmethod
    def _of_save(
        cls: type[_Store], folder: str | os.PathLike[str], config: dict[str, Any], device: torch.device | str | None
    ) -> _Store:
        where = repr(str(folder))
        check_version(folder, config, FORMAT, VERSION)
        config.setdefault("device", "cpu")
        for key, expected in _CONFIG.items():
            if not isinstance(config.get(key), expected):
                got = type(config[key]).__name__ if key in config else "none"
                raise CorruptFileError("read", f"{CONFIG_NAME} in {where}", f"{key!r} as a {expected.__name__}", got)
        kind = STORES.get(config["class"])
        if kind is None or not issubclass(kind, cls):
            options = nearest(config["class"], (name for name, known in STORES.items() if issubclass(known, cls)))
            raise ForeignFileError("load a store from", where, options, repr(config["class"]))
        try:
            tensors = _read_tensors(folder, config)
            if kind._is_saved_whole:
                kind._check_sizes(config["arguments"], tensors)
            made: Any = kind._from_arguments(config["arguments"], device_for(config["device"], device))
            made.take_state(config["numbers"], tensors)
        except SchemaError as cause:
            raise CorruptFileError("load a store from", where, "a whole state", str(cause)) from cause
        return made  # type: ignore[no-any-return]

    @classmethod
    def _check_sizes(cls, arguments: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        """Raise before memory is taken for an empty store that would be larger than the filled one in the file."""
        empty = cls._from_arguments(arguments, torch.device("meta"))._get_state().tensors
        num_bytes, most = (sum(x.nbytes for x in found.values()) for found in (empty, tensors))
        if num_bytes > most:
            raise SchemaError(_LOAD, "", f"arguments of a store of at most {most} bytes", str(num_bytes))

    @lasting
    def take_state(self, numbers: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        """Take over a state whose arguments were checked; nothing is changed if it is not whole."""
        with self._lock, self.unchanged_on_failure():
            try:
                for name, tensor in tensors.items():
                    if not isinstance(tensor, torch.Tensor):
                        raise SchemaError(_LOAD, f"with {name!r}", "a tensor", type(tensor).__name__)
                rng = self._random_state(tensors["rng"].cpu())
                torch.Generator(self.rng.device).set_state(rng)
                self._set_state(numbers, {name: self._own(x) for name, x in tensors.items() if name != "rng"})
                self.rng.set_state(rng)
            except RolloutDataError:
                raise
            except KeyError as cause:
                raise MissingFieldError(_LOAD, f"without {cause}") from cause
            except NONSENSE as cause:
                expected, got = "what state_dict() of an equal store gave", f"{type(cause).__name__}: {cause}"
                raise SchemaError(_LOAD, "", expected, got) from cause

    @contextmanager
    def unchanged_on_failure(self) -> Iterator[None]:
        """Put attributes and random state back if the block raises."""
        before = dict(vars(self))
        drawn = self.rng.get_state()
        try:
            yield
        except BaseException:
            object.__setattr__(self, "__dict__", before)
            self.rng.set_state(drawn)
            raise

    def _random_state(self, saved: torch.Tensor) -> torch.Tensor:
        """Return what the generator is set to for a saved random state; may replace the generator before."""
        return random_state_for(self.rng, saved)

    def _own(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor of a state to where the rows are."""
        return tensor.detach().to(self.device, copy=True)


def load_store(path: str | os.PathLike[str], device: torch.device | str | None = None) -> Any:
    """Load whatever buffer or storage was saved in a folder, here or, as a buffer, by an earlier system.

    `load_buffer` does the same.

    Args:
        path: The folder.
        device: Where to keep it; None for where it was, or the CPU if that is not here.

    Raises:
        UnknownBufferError: The folder names no class, or one that is not known (a `ValueError`).
        DataFileError: It is missing, or damaged.
    """
    config = read_config(path)
    target = config.get("class", config.get("__target__"))
    name = target.rsplit(".", 1)[-1] if isinstance(target, str) else ""
    if name not in STORES:
        got = f"the class {target!r}" if target else "no '__target__' and no 'class' in its config.json"
        known = nearest(name, (name for name, kind in STORES.items() if not isabstract(kind)))
        raise UnknownBufferError("load a store from", repr(str(path)), known, got)
    return STORES[name].load(path, device)


def load_buffer(path: str | os.PathLike[str], device: torch.device | str | None = None) -> Any:
    """Load whatever buffer or storage was saved in a folder; see `load_store`."""
    return load_store(path, device)


def random_state_for(generator: torch.Generator, saved: torch.Tensor) -> torch.Tensor:
    """Return a saved random state, or, if it is that of a generator on another kind of device, one seeded from it.

    The new state depends on the saved one only: loads of one save draw alike. A warning says that they draw other
    numbers than the saved store would have drawn.
    """
    if saved.numel() not in _RNG_BYTES - {generator.get_state().numel()}:
        return saved
    digest = hashlib.blake2b(saved.numpy().tobytes(), digest_size=8).digest()
    text = (
        f"the saved random state is that of a generator on another device than {generator.device}; the generator is "
        "reseeded and draws other numbers"
    )
    warnings.warn(text, RolloutDataWarning, stacklevel=4)
    return torch.Generator(generator.device).manual_seed(int.from_bytes(digest, "little") >> 1).get_state()


def checked_count(numbers: Mapping[str, Any], name: str, low: int, high: int) -> int:
    """Return a count of a loaded state; raise `SchemaError` if it is no int from `low` to `high`."""
    count = numbers[name]
    if not is_whole(count) or not low <= count <= high:
        raise SchemaError(_LOAD, f"with {name!r}", f"an int from {low} to {high}", repr(count))
    return int(count)


def checked_tensor(
    tensors: Mapping[str, torch.Tensor], name: str, dtype: torch.dtype, shape: Sequence[int]
) -> torch.Tensor:
    """Return a tensor of a loaded state; raise `SchemaError` if it has another dtype or shape."""
    found = tensors[name]
    if found.dtype != dtype or list(found.shape) != list(shape):
        expected = f"{dtype} {list(shape)}"
        got = f"{found.dtype} {list(found.shape)}"
        raise SchemaError(_LOAD, f"with {name!r}", expected.removeprefix("torch."), got.removeprefix("torch."))
    return found


def _remade(kind: type[Store], device: torch.device, options: Mapping[str, Any], state: Mapping[str, Any]) -> Any:
    made = kind._from_arguments(state["arguments"], device)
    vars(made).update(options)
    made.take_state(state["numbers"], state["tensors"])
    return made


def _read_tensors(folder: str | os.PathLike[str], config: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Read all tensors of a folder onto the CPU; sizes are checked before anything is allocated."""
    path = existing_folder(folder) / f"{COLUMNS}.hdf5"
    found = {}
    columns = {column["name"]: column for column in config["columns"]}
    with open_columns(path, config.get(SAVE_ID), columns) as file:
        for name, column in columns.items():
            dtype = file.dtypes[name]
            is_old = column["dtype"] == "bfloat16" and dtype == "uint16"  # earlier saves do not mark them
            if list(file.shapes[name]) != column["shape"] or not (is_old or dtype == column["dtype"]):
                where = f"{name!r} of {str(path)!r}"
                got = f"{dtype} of shape {list(file.shapes[name])}"
                raise CorruptFileError("read", where, f"{column['dtype']} of shape {column['shape']}", got)
            file.sums[name] = column.get("crc32", file.sums[name])  # earlier saves have them there
            found[name] = file.read(name)
            if is_old:
                found[name] = found[name].view(torch.bfloat16)
    return found
