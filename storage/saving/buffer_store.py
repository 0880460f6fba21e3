"""`BufferStore`: `Store` in the folder layout of earlier systems, `config.json` and `buffer.hdf5`.

The config is not nested. The last part of its entry `__target__` is the name of the class. Rows are
written in the order of the slots, one dataset per field. Numbers that are missing in configs of
earlier systems are computed from the rows.
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
#: Text that joins the levels of a key in files of configs without `nested_key_separator`.
KEY_SEPARATOR = "-"
#: Column of the table of final observations that contains the keys of their rows.
ROW_KEY = "row_key"
_Self = TypeVar("_Self", bound="BufferStore")


class BufferStore(Store):
    """Store of rows. Its state has tensors `buffer/...`, and `finals/...` for final observations.

    A subclass implements `_get_state`, `_set_tables` and, for earlier saves, `_of_flat`.

    Attributes:
        generator: Random generator of the samples.
        nested_key_separator: Text that joins the levels of a key in saved files.
    """

    generator: torch.Generator
    nested_key_separator: str = KEY_SEPARATOR

    @property
    def rng(self) -> torch.Generator:  # type: ignore[override]
        """Alias of `generator`, under the name that `Store` uses."""
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
            nested_key_separator: Text that joins the levels of keys; None for the buffer's
                `nested_key_separator`.

        Raises:
            SchemaError: A key is ambiguous or is not a valid name in HDF5.
            DataFileError: The path is a file, or a folder with other content.
            WriteError: The folder cannot be written, for example because the disk is full. The
                earlier save is unchanged. Also an `OSError`.
            UsageError: An earlier call on a GPU was wrong; the save is complete.
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
        """Return the constructor arguments in a `config.json`. Earlier systems stored fewer of them."""

    @abstractmethod
    def _set_tables(self, numbers: Mapping[str, Any], tables: Mapping[str, Table]) -> None:
        """Load a state with equal arguments.

        An implementation only replaces attributes, and raises an error for a state that does not
        match.
        """

    def _set_state(self, numbers: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        self._set_tables(
            numbers, {name: Table(columns) for name, columns in _tables(tensors).items()}
        )

    def _own(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor  # `_set_tables` copies the rows once, into the memory of the buffer.

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
        # Only a buffer that never had a row is saved without rows.
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
        drawn = torch.tensor(
            list(bytes.fromhex(config.get("generator", ""))), dtype=torch.uint8, device="cpu"
        )
        drawn = random_state_for(made.rng, drawn)
        if drawn.shape == made.rng.get_state().shape:  # Earlier systems save no random state.
            made.rng.set_state(drawn)
        return made

    def _of_earlier(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Convert the flat state dict of an earlier release to the current form."""
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
    """Return the number of steps that were ever written to a saved ring, one slot per step.

    The newest steps are live: at most `num_slots`. Configs of earlier systems lack this number.
    Some have the slot of the next step instead. Their files may contain all slots of a ring that is
    not full.

    Args:
        numbers: Numbers of the config.
        num_rows: Number of slots in the file.
        num_slots: Number of slots of the ring.
        rows_per_slot: Number of rows of a slot, one per environment.

    Raises:
        SchemaError: The numbers contradict each other or the file.
    """
    has_total = "total" in numbers
    is_full = numbers.get("_is_full")
    position = int(numbers["_idx"]) // rows_per_slot if "_idx" in numbers else None
    num_live = num_rows
    if not has_total and is_full is False and position is not None and num_rows == num_slots:
        num_live = position  # The other slots are unwritten.

    # The position after the last slot is the first slot.
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
            f"not match {num_rows} rows in {num_slots} slots."
        )
    return total


def _tables(tensors: Mapping[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    """Return the columns of each table: the tensors named `table/column`, by table and column.

    Tensors with other names are left out.
    """
    tables: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        table, _, column = name.partition("/")
        if column:
            tables.setdefault(table, {})[column] = tensor
    return tables


def column_name(key: str, separator: str, table: str = ROWS) -> str:
    """Convert the name `key` of a dataset in a table's file to the name of its column."""
    return key if table == FINALS and key == ROW_KEY else key.replace(separator, "/")


def _file_keys(names: Iterable[str], separator: str, table: str) -> list[str]:
    """Return names with their levels joined by `separator`.

    Raises:
        SchemaError: Two names become equal, or a name is invalid in HDF5.
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
        # HDF5 ends a name at a null character, reads "." as the group itself, and cannot encode
        # lone surrogates.
        if "\0" in key or key in ("", ".") or any("\ud800" <= letter <= "\udfff" for letter in key):
            raise SchemaError(
                f"field {name!r} would have the name {key!r} in the file. A name must be valid "
                "UTF-8 without null characters, and not '.'."
            )
        if key in keys:
            raise SchemaError(f"a field of final rows must not have the name {ROW_KEY!r}.")
        keys.append(key)
    return keys
