"""Texts of subtasks: a table of numbered texts, and a field with a number per frame."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from storage.errors import CorruptFileError

from ..input_checks import file_inside
from ..parquet import ParquetFile, arrow, shared_texts
from .lerobot_language import arrow_type, describe

TABLE_NAME = "meta/subtasks.parquet"
#: Name of the field with the numbers, and of the column with the numbers in the table.
NUMBER = "subtask_index"
#: Name of the field with the texts, and of the column with the texts in the table.
TEXT = "subtask"
#: Metadata key of a recording: maps subtask numbers (as texts) to subtask texts, in table order.
SUBTASKS = "subtasks"
Array = np.ndarray[Any, Any]


def read_subtasks(folder: Path) -> tuple[dict[int, str], Any]:
    """Read the table of subtasks in the folder of a dataset.

    Returns:
        A dict that maps numbers to texts, and the description of the Arrow types of the table.

    Raises:
        CorruptFileError: The table is damaged, has other columns, or has a number twice.
    """
    file = ParquetFile(file_inside(folder, TABLE_NAME))
    others = [name for name in file.types if name != NUMBER]
    if len(others) != 1 or "string" not in str(file.types[others[0]]):
        raise CorruptFileError(
            f"{str(file.path)!r} has the columns {list(file.types)}, expected {NUMBER!r} and "
            f"{TEXT!r}."
        )
    subtasks = numbered_texts(file, NUMBER, others[0])
    if len(subtasks) != file.num_rows:
        raise CorruptFileError(f"{str(file.path)!r} has a duplicate {NUMBER}.")
    types = {
        name: describe(type_name) or "string" for name, type_name in file.declared_types.items()
    }
    return subtasks, {"struct": types}


def numbered_texts(file: ParquetFile, number_column: str, text_column: str) -> dict[int, str]:
    """Read numbers and their texts from two columns. The last text of a number is used."""
    numbers = file.integers([number_column])[number_column].tolist()
    known: dict[str, str] = {}
    texts: list[str] = []
    for batch in file.batches({text_column: None}, 0, file.num_rows):
        texts += shared_texts(batch[text_column], known)
    return dict(zip(numbers, texts, strict=True))


def stated_subtasks(metadata: Mapping[str, Any]) -> dict[int, str]:
    """Map subtask numbers to texts, as stated by metadata; {} without a valid table."""
    stated = metadata.get(SUBTASKS)
    if not isinstance(stated, Mapping):
        return {}
    for number, text in stated.items():
        is_number = str(number).lstrip("-").isdecimal()
        if not is_number or not isinstance(text, str):
            return {}
    return {int(number): text for number, text in stated.items()}


def with_pairs(subtasks: Mapping[int, str], pairs: Iterable[tuple[int, str]]) -> dict[int, str]:
    """Add the subtasks of frames to a copy of a table of subtasks.

    If the number of a text already belongs to a different text, the text gets the next free number.

    Args:
        subtasks: Maps numbers to texts.
        pairs: Number and text of each frame.
    """
    table = dict(subtasks)
    for number, text in dict.fromkeys(pairs):
        if table.get(number, "") == text or text in table.values():
            continue
        is_free = number not in table and number >= 0
        table[number if is_free else max(table, default=-1) + 1] = text
    return table


def numbers_of(subtasks: Mapping[int, str], texts: Iterable[str], recorded: Array) -> Array:
    """Return the subtask number of each text.

    A recorded number is kept if the table maps the number to the text. A recorded number without a
    text, such as -1, is also kept if the table does not have the number.

    Args:
        subtasks: Maps numbers to texts.
        texts: Text of each frame.
        recorded: Number of each frame.

    Returns:
        A new array of the shape and dtype of `recorded`.
    """
    number_of: dict[str, int] = {}
    for number, text in subtasks.items():
        number_of.setdefault(text, number)
    numbers = []
    for number, text in zip(recorded.reshape(-1).tolist(), texts, strict=True):
        is_right = subtasks.get(number, "") == text
        numbers.append(number if is_right else number_of[text])
    result: Array = np.array(numbers, recorded.dtype).reshape(recorded.shape)
    return result


def subtask_table(subtasks: Mapping[int, str], description: Any) -> Any:
    """Build the Arrow table of subtasks.

    Args:
        subtasks: Maps numbers to texts.
        description: Description of the Arrow types; None for the types that LeRobot writes.
    """
    pyarrow, _ = arrow()
    columns = {}
    for field in arrow_type(description or {"struct": {NUMBER: "int64", TEXT: "string"}}):
        values = list(subtasks) if field.name == NUMBER else list(subtasks.values())
        columns[field.name] = pyarrow.array(values, field.type)
    return pyarrow.table(columns)
