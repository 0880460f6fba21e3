"""The texts of subtasks: a table that numbers them, and the field of numbers of each frame."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from storage.errors import CorruptFileError

from ..input_checks import file_inside
from ..parquet import ParquetFile, arrow, shared_texts
from .lerobot_info import Info
from .lerobot_language import arrow_type, describe

TABLE_NAME = "meta/subtasks.parquet"
#: Field of the numbers; the field of their texts, which is also a column of the table.
NUMBER, TEXT = "subtask_index", "subtask"
#: Metadata key of a recording: number as text -> text, in the order of the table.
SUBTASKS = "subtasks"
Array = np.ndarray[Any, Any]


def read_subtasks(info: Info) -> tuple[dict[int, str], Any]:
    """Read the table of a set: number -> text, and the description of its Arrow types.

    Raises:
        CorruptFileError: It is damaged, has other columns, or has a number twice.
    """
    file = ParquetFile(file_inside(info.path, TABLE_NAME))
    others = [name for name in file.types if name != NUMBER]
    if len(others) != 1 or "string" not in str(file.types[others[0]]):
        expected = f"the columns {NUMBER!r} and {TEXT!r}"
        raise CorruptFileError("read", repr(str(file.path)), expected, str(list(file.types)))
    numbers = file.integers([NUMBER])[NUMBER].tolist()
    known: dict[str, str] = {}
    texts: list[str] = []
    for batch in file.batches({others[0]: None}, 0, file.num_rows):
        texts += shared_texts(batch[others[0]], known)
    subtasks = dict(zip(numbers, texts, strict=True))
    if len(subtasks) != len(numbers):
        raise CorruptFileError("read", repr(str(file.path)), f"each {NUMBER} once", "one twice")
    kinds = {name: describe(kind) or "string" for name, kind in file.declared_types.items()}
    return subtasks, {"struct": kinds}


def stated_subtasks(metadata: Mapping[str, Any]) -> dict[int, str]:
    """Return the table in metadata of a recording: number -> text; empty without one."""
    stated = metadata.get(SUBTASKS)
    items = list(stated.items()) if isinstance(stated, Mapping) else []
    is_table = all(str(number).lstrip("-").isdecimal() and isinstance(text, str) for number, text in items)
    return {int(number): text for number, text in items} if is_table else {}


def with_pairs(subtasks: Mapping[int, str], pairs: Iterable[tuple[int, str]]) -> dict[int, str]:
    """Return a table with the texts of some frames; a text whose number is taken gets the next free one."""
    table = dict(subtasks)
    for number, text in dict.fromkeys(pairs):
        if table.get(number, "") == text or text in table.values():
            continue
        is_free = number not in table and number >= 0
        table[number if is_free else max(table, default=-1) + 1] = text
    return table


def numbers_of(subtasks: Mapping[int, str], texts: Iterable[str], recorded: Array) -> Array:
    """Return the number of each text, of the dtype of `recorded`, whose numbers stay where they are right.

    Numbers without a text, such as -1, stay where the text is empty.
    """
    number_of: dict[str, int] = {}
    for number, text in subtasks.items():
        number_of.setdefault(text, number)
    pairs = zip(recorded.reshape(-1).tolist(), texts, strict=True)
    found = [number if subtasks.get(number, "") == text else number_of[text] for number, text in pairs]
    numbers: Array = np.array(found, recorded.dtype).reshape(recorded.shape)
    return numbers


def subtask_table(subtasks: Mapping[int, str], described: Any) -> Any:
    """Return the Arrow table of numbers and texts.

    Args:
        subtasks: Number -> text.
        described: Description of its Arrow types; None for those that LeRobot writes.
    """
    pyarrow, _ = arrow()
    columns = {}
    for field in arrow_type(described or {"struct": {NUMBER: "int64", TEXT: "string"}}):
        values = list(subtasks) if field.name == NUMBER else list(subtasks.values())
        columns[field.name] = pyarrow.array(values, field.type)
    return pyarrow.table(columns)
