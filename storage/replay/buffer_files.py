"""Buffers in folders: `DictBuffer.save` and `load`, and the registry that `load_buffer` reads.

One rule: a folder says which class it is in `config.json["__target__"]`, whose last dotted part is
looked up exactly. Rows are written as they lie, so that folders of earlier systems, which do the
same, load too.
"""

from __future__ import annotations

import os
import secrets
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from ..core.duplicates import Duplicable
from ..core.durable import existing_folder, replace_folder
from ..errors import CorruptFileError, ForeignFileError, RolloutDataError, RolloutDataWarning, SchemaError, nearest
from ..ring.ring import RingStore
from ..saving.column_files import (
    COLUMNS_NAME,
    CONFIG_NAME,
    FINALS_NAME,
    NONSENSE,
    OWN_NAMES,
    SAVE_ID,
    Column,
    ColumnFile,
    device_for,
    load_one_save,
    open_columns,
    read_config,
    whole_column,
    write_columns,
)
from ..saving.plain_files import write_json

if TYPE_CHECKING:
    from ..ring.final_rows import FinalRows
    from .ring_buffer import RingBuffer

FORMAT, VERSION = "rollout-data buffer", 1
_DEFAULT_SEPARATOR = "-"
_FINAL_KEYS = "row_key"
_Buffer = TypeVar("_Buffer", bound="RingBuffer")

#: Last part of `__target__` -> what opens the folder. Classes add themselves with `can_load`.
LOADERS: dict[str, Callable[..., Any]] = {}


class FolderBuffer(Duplicable):
    """Gives a buffer `size`, `empty` and `load`."""

    @abstractmethod
    def __len__(self) -> int:
        """Rows that are held."""

    def size(self) -> int:
        """Rows that are held."""
        return len(self)

    def empty(self) -> bool:
        """Tell whether nothing is held."""
        return len(self) == 0

    @classmethod
    def load(cls: type[_Self], path: str | os.PathLike[str], device: torch.device | str | None = None) -> _Self:
        """Make a buffer from what `save` wrote, here or in an earlier system.

        Args:
            path: The folder.
            device: Where to keep it; None for where it was, or the CPU if that is not here.
        """
        return load_one_save(path, lambda config: cls._of_save(path, config, device))

    @classmethod
    @abstractmethod
    def _of_save(
        cls: type[_Self], path: str | os.PathLike[str], config: dict[str, Any], device: torch.device | str | None
    ) -> _Self:
        """Make a buffer of a folder with this config."""


_Self = TypeVar("_Self", bound=FolderBuffer)
_Class = TypeVar("_Class", bound=type[FolderBuffer])


class UnknownBufferError(ForeignFileError, ValueError):
    """A folder holds a buffer of a class that is not known here."""


def can_load(cls: _Class) -> _Class:
    """Make a class known to `load_buffer` by its name."""
    LOADERS[cls.__name__] = cls.load
    return cls


def load_buffer(path: str | os.PathLike[str], device: torch.device | str | None = None) -> Any:
    """Load whatever buffer was saved in a folder.

    Args:
        path: The folder.
        device: Where to keep it; None for where it was, or the CPU if that is not here.

    Raises:
        UnknownBufferError: The folder names no class, or one that is not known (a `ValueError`).
    """
    target = read_config(path).get("__target__")
    name = target.rsplit(".", 1)[-1] if isinstance(target, str) else ""
    if name not in LOADERS:
        got = f"the class {target!r}" if target else "no '__target__' in its config.json"
        raise UnknownBufferError("load a buffer from", repr(str(path)), nearest(name, LOADERS), got)
    return LOADERS[name](path, device)


@contextmanager
def all_or_nothing(buffer: Any) -> Iterator[None]:
    """Undo what a block did to a buffer if it raises; the block replaces attributes and changes none of them.

    What is not one of our errors comes from a state that `state_dict` did not give, and becomes a `SchemaError`.
    """
    before, drawn = dict(vars(buffer)), buffer.generator.get_state()
    try:
        yield
    except BaseException as cause:
        vars(buffer).clear()
        vars(buffer).update(before)
        buffer.generator.set_state(drawn)
        if isinstance(cause, RolloutDataError) or not isinstance(cause, NONSENSE):
            raise
        expected = "what state_dict() of an equal buffer gave"
        raise SchemaError("load a state", "", expected, f"{type(cause).__name__}: {cause}") from cause


def save_buffer(
    buffer: Any,
    folder: str | os.PathLike[str],
    config: Mapping[str, Any],
    ring: RingStore | None,
    separator: str = _DEFAULT_SEPARATOR,
    finals: FinalRows | None = None,
) -> None:
    """Write a buffer; its lock is held meanwhile, and two chunks of memory.

    Args:
        buffer: Its class, device and random state are written.
        folder: Is replaced.
        config: What else makes an equal buffer, as JSON.
        ring: Its live rows are written, with lanes if the buffer has `_has_lanes_in_file`; None for none.
        separator: Joins levels of keys.
        finals: Are written too.
    """
    has_lanes = getattr(buffer, "_has_lanes_in_file", False)
    keys = file_keys([] if ring is None else list(ring.schema), separator)
    if finals is not None and _FINAL_KEYS in keys.values():
        raise SchemaError("save final rows", "", f"fields of other names than {_FINAL_KEYS!r}", "one of that name")
    save_id = secrets.token_hex(8)
    about = {
        "__target__": f"{type(buffer).__module__}.{type(buffer).__qualname__}",
        "device": str(buffer.device),
        **config,
        SAVE_ID: save_id,
        "generator": random_state(buffer.generator),
    }
    with replace_folder(folder, OWN_NAMES) as new:
        write_json(new / CONFIG_NAME, about)
        if ring is None:
            return

        def read(name: str, first: int, last: int) -> torch.Tensor:
            rows = ring.slots_view(name)[first:last]
            return rows if has_lanes else rows.squeeze(1)

        lead = (ring.num_live, ring.num_lanes) if has_lanes else (ring.num_live,)
        columns = {
            keys[name]: Column((*lead, *field.shape), field.dtype, partial(read, name))
            for name, field in ring.schema.items()
        }
        write_columns(new / COLUMNS_NAME, columns, save_id)
        if finals is not None:
            row_keys, leaves = finals.live()
            parts = {_FINAL_KEYS: row_keys.unsqueeze(1), **{keys[name]: leaf for name, leaf in leaves.items()}}
            write_columns(new / FINALS_NAME, {key: whole_column(leaf) for key, leaf in parts.items()}, save_id)


def file_keys(names: list[str], separator: str) -> dict[str, str]:
    """Join the levels of names by `separator`: flat name -> key in the file. Ambiguity is an error."""
    if not isinstance(separator, str) or not separator or "/" in separator:
        raise SchemaError("save columns", "", "a separator that is not empty and has no '/'", repr(separator))
    for name in names:
        for part in name.split("/"):
            if separator in part:
                expected = f"keys without the separator {separator!r}"
                raise SchemaError("save the field", repr(name), expected, repr(part), "Give another separator")
    keys = {name: name.replace("/", separator) for name in names}
    for name, key in keys.items():
        # HDF5 would end the first too early, take the second for the folder itself, and knows no others.
        if "\0" in key or key in ("", ".") or any("\ud800" <= letter <= "\udfff" for letter in key):
            raise SchemaError("save the field", repr(name), "a key that is text, not '.', without null", repr(key))
    return keys


def save_ring(buffer: RingBuffer, folder: str | os.PathLike[str], separator: str) -> None:
    """Write a buffer on a ring."""
    config = {
        "format": FORMAT,
        "version": VERSION,
        "nested_key_separator": separator,
        "has_finals": buffer._finals is not None,
        "_idx": buffer._idx,
        "_is_full": buffer._is_full,
        **buffer._counters(),
        **buffer._config(),
    }
    save_buffer(buffer, folder, config, buffer._ring, separator, buffer._finals)


def load_ring(
    cls: type[_Buffer],
    path: str | os.PathLike[str],
    config: Mapping[str, Any],
    device: torch.device | str | None,
) -> _Buffer:
    """Make a buffer of what `save_ring`, or an earlier system, wrote."""
    folder = existing_folder(path)
    if config.get("format", FORMAT) != FORMAT or config.get("version", VERSION) != VERSION:
        got = f"{config.get('format')} {config.get('version')}"
        raise ForeignFileError("load", repr(str(path)), f"{FORMAT} {VERSION}", got, "Update this package")
    if "capacity" not in config:
        raise CorruptFileError("load", repr(str(path)), "'capacity' in its config.json", "none")
    separator = config.get("nested_key_separator", _DEFAULT_SEPARATOR)
    place = device_for(config.get("device"), device)
    buffer = cls(device=place, nested_key_separator=separator, **cls._arguments(config))
    # Only a buffer that never held a row is saved without them.
    if (folder / COLUMNS_NAME).exists() or "format" not in config or config.get("num_lanes") or config.get("total"):
        with open_columns(folder / COLUMNS_NAME, separator, config.get(SAVE_ID)) as file:
            _restore_rows(buffer, file, config, path)
        if config.get("has_finals", (folder / FINALS_NAME).exists()):
            with open_columns(folder / FINALS_NAME, separator, config.get(SAVE_ID)) as file:
                columns = {name: file.read(name) for name in file.shapes}
            # A separator that is in the key of the rows is in no other name.
            buffer._restore_finals(columns.pop(_FINAL_KEYS.replace(separator, "/")).squeeze(1), columns)
    if "generator" in config:
        restore_generator(buffer.generator, config["generator"])
    return buffer


def random_state(generator: torch.Generator) -> str:
    """Give a generator's state as text."""
    return generator.get_state().numpy().tobytes().hex()


def restore_generator(generator: torch.Generator, state: str) -> None:
    """Set a generator's state, if it is one of the same kind (CUDA's are not the CPU's)."""
    saved = torch.tensor(list(bytes.fromhex(state)), dtype=torch.uint8, device="cpu")
    if saved.shape == generator.get_state().shape:
        generator.set_state(saved)


def _restore_rows(buffer: RingBuffer, file: ColumnFile, config: Mapping[str, Any], path: Any) -> None:
    live, num_slots, where = file.num_rows, buffer._num_slots, repr(str(path))
    if live > num_slots:
        raise SchemaError("load", where, f"at most {num_slots} rows, the capacity", f"{live} rows")
    total = _total(config, live, num_slots, buffer._rows_per_slot, where)
    num_lead = 2 if buffer._has_lanes_in_file else 1
    shapes = list(file.shapes.values())
    if not shapes:
        return
    if any(len(shape) < num_lead for shape in shapes):
        raise CorruptFileError("load", where, f"datasets of at least {num_lead} axes", str(file.shapes))
    num_lanes = shapes[0][1] if num_lead == 2 else 1

    def parts() -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
        for first, part in file.rows():
            yield first, {name: rows if num_lead == 2 else rows.unsqueeze(1) for name, rows in part.items()}

    buffer._restore(file.schema(num_lead), num_lanes, total, config, parts())


def _total(config: Mapping[str, Any], live: int, num_slots: int, rows_per_slot: int, where: str) -> int:
    """Say how many rows were ever written; earlier systems only say where the next one goes."""
    if "_idx" in config:
        cursor = int(config["_idx"]) // rows_per_slot
    else:
        cursor = live % num_slots
        text = f"{where} does not say where the next row goes; slot {cursor} follows from its number of rows"
        warnings.warn(text, RolloutDataWarning, stacklevel=5)
    if not 0 <= cursor < num_slots or (live < num_slots and cursor != live):
        raise SchemaError("load", where, f"a write cursor that fits {live} rows", f"_idx {config['_idx']}")
    total = int(config.get("total", live if live < num_slots else num_slots + cursor))
    if total % num_slots != cursor or min(total, num_slots) != live:
        raise SchemaError("load", where, f"a total that fits {live} rows and slot {cursor}", str(total))
    return total


def accepted_share(counters: Mapping[str, Any]) -> float:
    """Give the share of candidates that were accepted lately."""
    share = float(counters.get("accepted_share", 1.0))
    if not 0 < share <= 1:
        raise SchemaError("load a state", "", "an accepted_share above 0, at most 1", str(share))
    return max(share, 1e-3)  # no smaller one is ever saved


def oldest_ages(counters: Mapping[str, Any], num_lanes: int, most: int) -> torch.Tensor:
    """Give the ages of each lane's oldest row; in saves without them it begins its trajectory."""
    ages = torch.tensor(counters.get("oldest_ages", [0] * num_lanes), device="cpu")
    if ages.dtype is not torch.int64 or ages.shape != (num_lanes,) or not bool(((ages >= 0) & (ages <= most)).all()):
        expected = f"oldest_ages of {num_lanes} lanes, 0 to {most}"
        raise SchemaError("load a state", "", expected, repr(counters["oldest_ages"])[:100])
    return ages
