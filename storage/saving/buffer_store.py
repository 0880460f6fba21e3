"""`BufferStore`: store that is saved in the layout of earlier systems, which can be loaded too.

A folder contains `config.json`, `buffer.hdf5` with the rows, and `finals.hdf5` if there are final
observations. The config is a flat JSON object, whose key `__target__` contains the module and the
name of the class. Each HDF5 file has one dataset per field.
The rows of a ring are written in the order of its slots. A slot has the rows of one step, one per
environment. Numbers that are missing in configs of earlier systems are computed from the rows.
"""

from __future__ import annotations

import os
import warnings
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar

import torch

from ..core.durable_files import existing_folder
from ..errors import RolloutDataWarning, SchemaError
from .hdf5_columns import SAVE_ID, Table, open_columns
from .saved_folder import FINALS, ROWS, SUFFIX, check_version, device_for, write_folder
from .saved_store import Store, random_state_for

FORMAT = "rollout-data buffer"
VERSION = 1
#: Default separator between the levels of a field name in files.
KEY_SEPARATOR = "-"
#: Column with the key of each final observation, in the table of final observations.
ROW_KEY = "row_key"
_Self = TypeVar("_Self", bound="BufferStore")


class BufferStore(Store):
    """Store that is saved in the folder layout of earlier systems.

    In the state, the tensors of rows have names `buffer/...`, and those of final observations have
    names `finals/...`. A subclass implements `_get_state`, `_set_tables` and `_of_flat`.

    Attributes:
        generator: Random generator of the samples.
        nested_key_separator: Text that joins the levels of a field name in saved files.
    """

    generator: torch.Generator
    nested_key_separator: str = KEY_SEPARATOR

    @property
    def rng(self) -> torch.Generator:  # type: ignore[override]
        """Random generator of the samples: the attribute `generator`."""
        return self.generator

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of rows."""

    def size(self) -> int:
        """Return the number of rows."""
        return len(self)

    def empty(self) -> bool:
        """Return whether there are no rows."""
        return len(self) == 0

    def save(self, folder: str | os.PathLike[str], nested_key_separator: str | None = None) -> None:
        """Write the state to a folder atomically, and replace an earlier save.

        Other threads wait during the save, so that the save is consistent. Rows are not copied.

        Args:
            folder: Folder for `buffer.hdf5` and `config.json`.
            nested_key_separator: Text that joins the levels of a field name in the file. None for
                the attribute `nested_key_separator`.

        Raises:
            SchemaError: The name of a field contains the separator, or is not a valid name in HDF5.
            DataFileError: The path is a file, or a folder with other content.
            WriteError: The folder cannot be written, for example because the disk is full. The
                earlier save is unchanged. `WriteError` is an `OSError`.
            UsageError: An earlier call on a GPU was invalid. The save is complete nevertheless.
        """
        separator = (
            self.nested_key_separator if nested_key_separator is None else nested_key_separator
        )
        if not isinstance(separator, str) or not separator or "/" in separator:
            raise SchemaError(
                f"nested_key_separator must be a non-empty str without '/', got {separator!r}."
            )
        with self._lock, self._order.reads:
            state = self._get_state()
            tables = {}
            for table, columns in _tables(state.tensors).items():
                keys = _file_keys(columns, separator, table)
                tables[table] = dict(zip(keys, columns.values(), strict=True))
            about = {
                "__target__": f"{type(self).__module__}.{type(self).__qualname__}",
                "device": str(self.device),
                "format": FORMAT,
                "version": VERSION,
                **state.numbers,
                **state.arguments,
                "nested_key_separator": separator,
                "generator": self.rng.get_state().numpy().tobytes().hex(),
            }
            write_folder(folder, tables, about)
            self._raise_after_save()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a result of `state_dict` from any device. After an error the buffer is unchanged.

        Raises:
            SchemaError: The state belongs to another class or version, or to a buffer with other
                arguments.
        """
        is_earlier = isinstance(state, Mapping) and "tensors" not in state
        super().load_state_dict(self._of_earlier(state) if is_earlier else state)

    @classmethod
    @abstractmethod
    def _of_flat(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the constructor arguments from the `config.json` of a save.

        Configs of earlier systems do not contain all arguments.
        """

    @abstractmethod
    def _set_tables(self, numbers: Mapping[str, Any], tables: Mapping[str, Table]) -> None:
        """Load a saved state into a store with equal constructor arguments.

        An implementation replaces attributes, but does not write to existing tensors. It raises an
        error for a state that does not match the store.
        """

    def _set_state(self, numbers: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        self._set_tables(
            numbers, {name: Table(columns) for name, columns in _tables(tensors).items()}
        )

    def _own(self, tensor: torch.Tensor) -> torch.Tensor:
        # Not copied, because `_set_tables` copies the rows into the memory of the buffer.
        return tensor

    @classmethod
    def _of_save(
        cls: type[_Self],
        folder: str | os.PathLike[str],
        config: dict[str, Any],
        device: torch.device | str | None,
    ) -> _Self:
        check_version(folder, {"format": FORMAT, "version": VERSION, **config}, FORMAT, VERSION)
        made: _Self = cls._from_arguments(
            cls._of_flat(config), device_for(config.get("device"), device)
        )
        separator = made.nested_key_separator = config.get("nested_key_separator", KEY_SEPARATOR)
        paths = {table: existing_folder(folder) / f"{table}{SUFFIX}" for table in (ROWS, FINALS)}
        # The save of a buffer that never had a row contains no file of rows.
        is_empty = "format" in config and not config.get("num_lanes") and not config.get("total", 1)
        if is_empty and not paths[ROWS].exists():
            paths.clear()
        elif not config.get("has_finals", paths[FINALS].exists()):
            del paths[FINALS]
        with ExitStack() as files:
            tables: dict[str, Table] = {}
            for table, path in paths.items():
                names = partial(column_name, separator=separator, table=table)
                tables[table] = files.enter_context(open_columns(path, config.get(SAVE_ID), names))
            with made._order.writes:
                made._set_tables(config, tables)
        saved_bytes = list(bytes.fromhex(config.get("generator", "")))
        random_state = torch.tensor(saved_bytes, dtype=torch.uint8, device="cpu")
        random_state = random_state_for(made.rng, random_state)
        # Saves of earlier systems have no random state.
        if random_state.shape == made.rng.get_state().shape:
            made.rng.set_state(random_state)
        return made

    def _of_earlier(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Convert a state dict of an earlier release to the current form."""
        flat = {**state, **state.get("config", {})}
        tensors = {"rng": state["generator"]} if "generator" in state else {}
        for table, key in ((ROWS, "columns"), (FINALS, "final_columns")):
            tensors |= {f"{table}/{name}": rows for name, rows in state.get(key, {}).items()}
        if "final_keys" in state:
            tensors[f"{FINALS}/{ROW_KEY}"] = state["final_keys"].unsqueeze(1)
        return {
            "class": type(self).__name__,
            "arguments": self._of_flat(flat),
            "numbers": flat,
            "tensors": tensors,
        }


def rows_written(
    numbers: Mapping[str, Any], num_rows: int, num_slots: int, rows_per_slot: int
) -> int:
    """Return the number of steps that were ever written to a saved ring.

    Each step is written to one slot. A full ring overwrites its oldest step. The config contains
    the number of steps as `total`. Configs of earlier systems do not contain `total`, but some
    contain the row of the next step as `_idx`. The files of earlier systems may also contain the
    unwritten slots of a ring.

    Args:
        numbers: Numbers of the config.
        num_rows: Number of slots in the file.
        num_slots: Number of slots of the ring.
        rows_per_slot: Number of rows of a slot, one per environment.

    Raises:
        SchemaError: The numbers contradict each other or the size of the file.
    """
    has_total = "total" in numbers
    is_full = numbers.get("_is_full")
    position = int(numbers["_idx"]) // rows_per_slot if "_idx" in numbers else None
    num_live = num_rows
    if not has_total and is_full is False and position is not None and num_rows == num_slots:
        num_live = position  # The file also contains unwritten slots.

    # In a ring, the position after the last slot is the first slot.
    cursor = 0 if position == num_slots else position
    if has_total:
        total = int(numbers["total"])
    elif num_live < num_slots:
        total = num_live
    else:
        total = num_slots + (cursor or 0)
    if cursor is None and not has_total:
        text = (
            "The saved config does not contain the position of the next row. Slot "
            f"{total % num_slots} is assumed from the number of rows."
        )
        warnings.warn(text, RolloutDataWarning, stacklevel=5)

    is_other_count = total < 0 or min(total, num_slots) != num_live
    is_other_cursor = cursor not in (None, total % num_slots)
    is_short = is_full is True and num_live < num_slots
    if is_other_count or is_other_cursor or is_short:
        raise SchemaError(
            f"total is {total}, _idx is {numbers.get('_idx')} and _is_full is {is_full}, which do "
            f"not match {num_rows} saved steps in a ring of {num_slots} steps."
        )
    return total


def _tables(tensors: Mapping[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    """Group tensors with names `table/column`: return a dict of columns for each table.

    Tensors without "/" in their names are left out.
    """
    tables: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        table, _, column = name.partition("/")
        if column:
            tables.setdefault(table, {})[column] = tensor
    return tables


def column_name(key: str, separator: str, table: str = ROWS) -> str:
    """Convert the name of a dataset in a file to the flat name of its column."""
    return key if table == FINALS and key == ROW_KEY else key.replace(separator, "/")


def _file_keys(names: Iterable[str], separator: str, table: str) -> list[str]:
    """Convert the flat names of columns to the names of their datasets in a file.

    Raises:
        SchemaError: Two dataset names are equal, or a dataset name is invalid in HDF5.
    """
    keys: list[str] = []
    for name in names:
        key = name.replace("/", separator)
        if table == FINALS and name == ROW_KEY:
            key = name
        elif any(separator in part for part in name.split("/")):
            raise SchemaError(
                f"a key of field {name!r} contains the separator {separator!r}. Pass another "
                "nested_key_separator."
            )
        # HDF5 ends a name at a null character and reads "." as the group itself.
        # Lone surrogates cannot be encoded in UTF-8.
        if "\0" in key or key in ("", ".") or any("\ud800" <= letter <= "\udfff" for letter in key):
            raise SchemaError(
                f"field {name!r} would have the name {key!r} in the file. A name must be valid "
                "UTF-8 without null characters, and not '.'."
            )
        if key in keys:
            raise SchemaError(f"a field of final rows must not have the name {ROW_KEY!r}.")
        keys.append(key)
    return keys
