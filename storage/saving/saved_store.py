"""`Store`: base class of objects with rows that can be saved, pickled and copied.

A subclass implements `_get_state` and `_set_state`. `BufferStore` is a `Store` whose folders have
the layout of earlier systems. `STORES` contains all subclasses by name, for `load_store`.

Two stores are equal if they have the same class and the same constructor arguments. A state can
only be loaded into a store that is equal to the store of the state.
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

from ..core.arguments import is_whole, optional_device
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
#: Required keys of `config.json`, with the types of their values.
_CONFIG = {"class": str, "device": str, "arguments": dict, "numbers": dict, "columns": list}
#: Sizes in bytes of the state of a `torch.Generator` on the CPU and on CUDA.
_RNG_BYTES = {5056, 16}
_Store = TypeVar("_Store", bound="Store")

#: Classes that `load_store` can load, by name. Each definition of a subclass of `Store` adds it.
STORES: dict[str, type[Store]] = {}


class UnknownBufferError(ForeignFileError, ValueError):
    """A folder contains a store of an unknown class."""


@dataclass(frozen=True)
class State:
    """The complete state of a store.

    Attributes:
        arguments: Constructor arguments of the store, as JSON values.
        numbers: Counters and flags, as JSON values.
        tensors: Tensors by name, with levels joined by "/". The tensor `rng` is the random state,
            which `Store` adds unless the subclass sets it.
    """

    arguments: dict[str, Any]
    numbers: dict[str, Any]
    tensors: dict[str, torch.Tensor]


class Store(Shown, ABC):
    """Base class of buffers and storages that can be saved, loaded, pickled and copied.

    A subclass sets the attributes below and implements `_get_state` and `_set_state`. The lock is
    held during both methods, and `_order` orders them with work on other CUDA streams. A subclass
    whose constructor does not accept `State.arguments`, `device` and `generator` also overrides
    `_from_arguments`. Pickles and copies are made from the state, so that they contain only the
    attributes in the state.

    Attributes:
        device: Device of the rows.
        rng: Random generator of the samples.
        _lock: Lock held by every method that reads or writes rows.
        _order: Synchronization of the CUDA streams that read and write rows. If each part of a
            store has its own `StreamOrder`, that of the store is for the CPU and does nothing.
    """

    #: Whether saves contain the whole memory of the store, including unwritten rows.
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
        """Return the state without the random state. Tensors may be views of the store's memory."""

    @abstractmethod
    def _set_state(self, numbers: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        """Load the state, without the random state, of a store with the same class and arguments.

        The tensors are on the store's device, and the store may keep them. An implementation raises
        an error for a state that does not match the store. The caller then restores the attributes,
        but not the memory of tensors. Therefore an implementation must either only replace
        attributes, or check the whole state before it writes to memory.
        """

    @classmethod
    def _from_arguments(cls, arguments: Mapping[str, Any], device: torch.device) -> Any:
        """Create an empty store with the constructor arguments of a saved store.

        This does not advance torch's default generator. The caller sets the random state.
        """
        make: Any = cls
        return make(**arguments, device=device, generator=0)

    def _options(self) -> dict[str, Any]:
        """Return attributes that pickles and copies contain in addition to the state, by name."""
        return {
            name: vars(self)[name]
            for name in ("output_device", "nested_key_separator")
            if name in vars(self)
        }

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the state, including the random state, on the device of the store."""
        return {"class": type(self).__name__, "version": VERSION, **vars(self.copy_state())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a result of `state_dict` from any device. After an error the store is unchanged.

        Raises:
            SchemaError: The state belongs to another class or version, or to a store with other
                arguments.
        """
        self.check_form(state)
        self.check_equal(state["class"], state["arguments"])
        self.take_state(state["numbers"], state["tensors"])

    def check_form(self, state: Mapping[str, Any]) -> None:
        """Check that a state has the keys, types and version of a result of `state_dict`."""
        if not isinstance(state, Mapping):
            raise SchemaError(f"state must be a mapping, got {type(state).__name__}.")
        if state.get("version", VERSION) != VERSION:
            raise SchemaError(f"the state has version {state['version']!r}, expected {VERSION}.")
        for key in ("class", "arguments", "numbers", "tensors"):
            if key not in state:
                raise MissingFieldError(
                    f"the state has no key {key!r}. It has {', '.join(map(repr, state))}."
                )
            if key != "class" and not isinstance(state[key], Mapping):
                raise SchemaError(
                    f"{key!r} of the state must be a mapping, got {type(state[key]).__name__}."
                )

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the state to a folder atomically, and replace an earlier save.

        Other threads wait during the save, so that the save is consistent. Rows are not copied.

        Raises:
            DataFileError: The path is a file, or a folder with other content.
            WriteError: The folder cannot be written, for example because the disk is full. The
                earlier save is unchanged. `WriteError` is an `OSError`.
            UsageError: An earlier call on a GPU was invalid. The save is complete nevertheless.
        """
        with self._lock, self._order.reads:
            state = self._whole_state()
            columns = [
                {"name": name, "dtype": name_of(x), "shape": list(x.shape)}
                for name, x in state.tensors.items()
            ]
            about = {
                "format": FORMAT,
                "version": VERSION,
                "class": type(self).__name__,
                "device": str(self.device),
            }
            about |= {"arguments": state.arguments, "numbers": state.numbers, "columns": columns}
            write_folder(folder, {COLUMNS: state.tensors}, about)
            self._raise_after_save()

    def raise_deferred(self, wait: bool = False) -> None:
        """Raise the oldest error of earlier calls on a GPU, if a call failed.

        Args:
            wait: Whether to wait for the GPU. Otherwise only errors that have arrived are raised.
        """
        if hasattr(self, "_order"):
            with self._lock:
                self._order.deferred.raise_arrived(wait)

    def _raise_after_save(self) -> None:
        try:
            self.raise_deferred(wait=True)
        except RolloutDataError as error:
            error.message += " The save is complete."
            raise

    @classmethod
    def load(
        cls: type[_Store], folder: str | os.PathLike[str], device: torch.device | str | None = None
    ) -> _Store:
        """Load a store from the folder of a save.

        Args:
            folder: Folder that `save` has written.
            device: Device of the store. None for the saved device, or for the CPU if the saved
                device does not exist.

        Raises:
            DataFileError: The folder is missing or damaged, or has another format or class.
        """
        device = optional_device("device", device)
        return load_one_save(folder, lambda config: cls._of_save(folder, config, device))

    def copy_state(self) -> State:
        """Return a consistent copy of the state, on the device of the store."""
        with self._lock, self._order.reads:
            state = self._whole_state()
            for name, x in state.tensors.items():
                state.tensors[name] = x.detach().clone(memory_format=torch.contiguous_format)
            return state

    def check_equal(self, name: str, arguments: Mapping[str, Any]) -> None:
        """Check that a state is of a store with the same class and constructor arguments.

        Args:
            name: Name of the class in the state.
            arguments: Constructor arguments in the state.
        """
        if name != type(self).__name__:
            raise SchemaError(f"the state belongs to a {name}, expected a {type(self).__name__}.")
        own = self._get_state().arguments
        for key in (*own, *arguments):
            if own.get(key) != arguments.get(key):
                raise SchemaError(
                    f"the state has {key}={arguments.get(key)!r}, this object has "
                    f"{key}={own.get(key)!r}. Create an object with equal arguments."
                )

    def __reduce__(self) -> tuple[Any, ...]:
        with self._lock:
            return _remade, (type(self), self.device, self._options(), vars(self.copy_state()))

    def _whole_state(self) -> State:
        state = self._get_state()
        return State(state.arguments, state.numbers, {"rng": self.rng.get_state(), **state.tensors})

    @classmethod
    def _of_save(
        cls: type[_Store],
        folder: str | os.PathLike[str],
        config: dict[str, Any],
        device: torch.device | str | None,
    ) -> _Store:
        where = repr(str(folder))
        check_version(folder, config, FORMAT, VERSION)
        config.setdefault("device", "cpu")
        for key, expected in _CONFIG.items():
            if not isinstance(config.get(key), expected):
                if key not in config:
                    raise CorruptFileError(f"{CONFIG_NAME} of {where} has no key {key!r}.")
                raise CorruptFileError(
                    f"{key!r} in {CONFIG_NAME} of {where} must be a {expected.__name__}, got "
                    f"{type(config[key]).__name__}."
                )
        saved_class = STORES.get(config["class"])
        if saved_class is None or not issubclass(saved_class, cls):
            loadable = [
                name for name, store_class in STORES.items() if issubclass(store_class, cls)
            ]
            raise ForeignFileError(
                f"{where} contains a {config['class']!r}, which {cls.__name__} does not load. It "
                f"loads {nearest(config['class'], loadable)}."
            )
        try:
            tensors = _read_tensors(folder, config)
            if saved_class._is_saved_whole:
                saved_class._check_sizes(config["arguments"], tensors)
            store: Any = saved_class._from_arguments(
                config["arguments"], device_for(config["device"], device)
            )
            store.take_state(config["numbers"], tensors)
        except SchemaError as cause:
            raise CorruptFileError(f"{where} is damaged: {cause.message}") from cause
        return store  # type: ignore[no-any-return]

    @classmethod
    def _check_sizes(
        cls, arguments: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
    ) -> None:
        """Check that the saved tensors are at least as large as a store with these arguments.

        Otherwise, wrong arguments in a damaged folder could allocate too much memory.
        """
        empty = cls._from_arguments(arguments, torch.device("meta"))._get_state().tensors
        empty_bytes = sum(x.nbytes for x in empty.values())
        saved_bytes = sum(x.nbytes for x in tensors.values())
        if empty_bytes > saved_bytes:
            raise SchemaError(
                f"the saved arguments describe a store of {empty_bytes} bytes, but the saved "
                f"tensors have only {saved_bytes} bytes."
            )

    @lasting
    def take_state(self, numbers: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        """Load the state of a store with the same class and constructor arguments.

        After an error this store is unchanged.

        Args:
            numbers: Counters and flags of the state.
            tensors: Tensors of the state, on any device.
        """
        with self._lock, self._order.writes, self.unchanged_on_failure():
            try:
                for name, tensor in tensors.items():
                    if not isinstance(tensor, torch.Tensor):
                        raise SchemaError(
                            f"{name!r} of the state must be a tensor, got {type(tensor).__name__}."
                        )
                rng = self._random_state(tensors["rng"].cpu())
                torch.Generator(self.rng.device).set_state(rng)
                self._set_state(
                    numbers, {name: self._own(x) for name, x in tensors.items() if name != "rng"}
                )
                self.rng.set_state(rng)
            except RolloutDataError:
                raise
            except KeyError as cause:
                raise MissingFieldError(f"the state has no {cause}.") from cause
            except NONSENSE as cause:
                raise SchemaError(
                    f"the state is invalid: {type(cause).__name__}: {cause}. Pass a result of "
                    "state_dict() of an equal object."
                ) from cause

    @contextmanager
    def unchanged_on_failure(self) -> Iterator[None]:
        """Restore the attributes and the random state if the block raises an error."""
        attributes = dict(vars(self))
        random_state = self.rng.get_state()
        try:
            yield
        except BaseException:
            object.__setattr__(self, "__dict__", attributes)
            self.rng.set_state(random_state)
            raise

    def _random_state(self, saved: torch.Tensor) -> torch.Tensor:
        """Convert a saved random state to a state of this store's generator.

        A subclass may replace `rng` in this method.
        """
        return random_state_for(self.rng, saved)

    def _own(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor of a state to the device of the store."""
        return tensor.detach().to(self.device, copy=True)


def load_store(path: str | os.PathLike[str], device: torch.device | str | None = None) -> Any:
    """Load a saved buffer or storage of any class, including buffers of earlier systems.

    `load_buffer` is an alias.

    Args:
        path: Folder that `save` has written.
        device: Device of the store. None for the saved device, or for the CPU if the saved device
            does not exist.

    Raises:
        UnknownBufferError: The config has no class, or an unknown class.
        DataFileError: The folder is missing or damaged.
    """
    config = read_config(path)
    target = config.get("class", config.get("__target__"))
    name = target.rsplit(".", 1)[-1] if isinstance(target, str) else ""
    if name not in STORES:
        loadable = [name for name, store_class in STORES.items() if not isabstract(store_class)]
        problem = (
            f"has the unknown class {target!r}" if target else "has no '__target__' or 'class'"
        )
        raise UnknownBufferError(
            f"config.json of {str(path)!r} {problem}. The classes are {nearest(name, loadable)}."
        )
    return STORES[name].load(path, device)


def load_buffer(path: str | os.PathLike[str], device: torch.device | str | None = None) -> Any:
    """Load a saved buffer or storage of any class. This is an alias of `load_store`."""
    return load_store(path, device)


def random_state_for(generator: torch.Generator, saved: torch.Tensor) -> torch.Tensor:
    """Convert a saved random state for a generator, which may be of another device type.

    CPU and CUDA have different forms of random states. For the same device type, the result is
    `saved`. For another device type, the result is seeded from `saved`, and a warning is issued.
    All loads of a save then draw the same numbers, but not those of the saved store.
    """
    if saved.numel() not in _RNG_BYTES - {generator.get_state().numel()}:
        return saved
    digest = hashlib.blake2b(saved.numpy().tobytes(), digest_size=8).digest()
    text = (
        f"The saved random state belongs to another device than {generator.device}. The generator "
        "is seeded from it and draws different numbers."
    )
    warnings.warn(text, RolloutDataWarning, stacklevel=4)
    return (
        torch.Generator(generator.device)
        .manual_seed(int.from_bytes(digest, "little") >> 1)
        .get_state()
    )


def checked_count(numbers: Mapping[str, Any], name: str, low: int, high: int) -> int:
    """Check that a number of a loaded state is an integer in [`low`, `high`], and return it."""
    count = numbers[name]
    if not is_whole(count) or not low <= count <= high:
        raise SchemaError(
            f"{name!r} of the state must be an integer in {low}:{high + 1}, got {count!r}."
        )
    return int(count)


def checked_tensor(
    tensors: Mapping[str, torch.Tensor], name: str, dtype: torch.dtype, shape: Sequence[int]
) -> torch.Tensor:
    """Check the dtype and the shape of a tensor of a loaded state, and return the tensor."""
    tensor = tensors[name]
    if tensor.dtype != dtype or list(tensor.shape) != list(shape):
        expected = f"{str(dtype).removeprefix('torch.')} of shape {tuple(shape)}"
        raise SchemaError(
            f"{name!r} of the state is {name_of(tensor)} of shape {tuple(tensor.shape)}, expected "
            f"{expected}."
        )
    return tensor


# Existing pickles contain the name of this function. Do not rename it.
def _remade(
    store_class: type[Store],
    device: torch.device,
    options: Mapping[str, Any],
    state: Mapping[str, Any],
) -> Any:
    """Build a store from the content of a pickle."""
    store = store_class._from_arguments(state["arguments"], device)
    vars(store).update(options)
    store.take_state(state["numbers"], state["tensors"])
    return store


def _read_tensors(
    folder: str | os.PathLike[str], config: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """Read all tensors of a folder to the CPU. Sizes are checked before memory is allocated."""
    path = existing_folder(folder) / f"{COLUMNS}.hdf5"
    tensors = {}
    columns = {column["name"]: column for column in config["columns"]}
    with open_columns(path, config.get(SAVE_ID), columns) as file:
        for name, column in columns.items():
            dtype = file.dtypes[name]
            # Saves of earlier releases store bfloat16 as uint16, without a mark.
            is_untagged = column["dtype"] == "bfloat16" and dtype == "uint16"
            has_dtype = is_untagged or dtype == column["dtype"]
            if not has_dtype or list(file.shapes[name]) != column["shape"]:
                raise CorruptFileError(
                    f"{name!r} of {str(path)!r} is {dtype} of shape {list(file.shapes[name])}, "
                    f"expected {column['dtype']} of shape {column['shape']}."
                )
            # Saves of earlier releases have the checksums in the config.
            file.sums[name] = column.get("crc32", file.sums[name])
            tensors[name] = file.read(name)
            if is_untagged:
                tensors[name] = tensors[name].view(torch.bfloat16)
    return tensors
