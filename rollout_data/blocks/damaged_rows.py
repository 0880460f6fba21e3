"""Locate a damaged byte by the difference between the expected and the actual CRC-32.

If a single wrong byte explains the difference, the error names the field and the row of this byte.
Otherwise the error names all rows that the checksum covers.
"""

from __future__ import annotations

from functools import lru_cache

from storage.errors import CorruptFileError

from .row_layout import StoredColumn

_POLYNOMIAL = 0xEDB88320
#: Maximum bytes of rows in which a damaged byte is located. A million bytes take a quarter of a
#: second.
_MAX_SEARCHED = 1 << 22


class DamagedRowsError(CorruptFileError):
    """The rows of a fragment in a block have a wrong checksum.

    Attributes:
        trajectory: Number of the trajectory within its writer.
        fields: Fields that may be wrong.
        frames: (first, stop) of the frames that may be wrong; (T, T) for the observation after the
            last frame.
    """

    trajectory = -1
    fields: tuple[str, ...] = ()
    frames = (0, 0)


@lru_cache(maxsize=1)
def _crc_tables() -> tuple[list[int], dict[int, int], frozenset[int]]:
    """Compute the tables that are needed to calculate a CRC-32 backwards, from its last byte on.

    Returns:
        The usual table of 256 CRC-32 values. The index in this table of each highest byte, which is
        unique. The set of CRC-32 values that a single nonzero byte causes.
    """
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (_POLYNOMIAL if value & 1 else 0)
        table.append(value)
    numbers = {value >> 24: number for number, value in enumerate(table)}
    return table, numbers, frozenset(table[1:])


def damaged_byte(difference: int, num_bytes: int) -> int | None:
    """Return the position of a single wrong byte that explains a difference between CRC-32 values.

    The result is None if no single byte explains the difference. The CRC register is run backwards
    over zeros from the last byte, until a single byte can have caused its state. If several bytes
    are wrong, a wrong position is returned in one of 2**24 / `num_bytes` cases.

    Args:
        difference: XOR of the two checksums.
        num_bytes: Number of bytes that the checksum covers.
    """
    if num_bytes > _MAX_SEARCHED:
        return None
    table, numbers, effects = _crc_tables()
    state = difference
    for position in range(num_bytes - 1, -1, -1):
        if state in effects:
            return position
        number = numbers[state >> 24]
        state = (state ^ table[number]) << 8 & 0xFFFFFFFF | number
    return None


def located(
    column: StoredColumn,
    difference: int,
    start: int,
    stop: int,
) -> tuple[tuple[str, ...], int, int]:
    """Return the fields and the range of rows in which the rows `start:stop` are damaged.

    If a single byte is wrong, this is one field of one row. Otherwise these are all fields of all
    rows. The result is a triple (field names, first row, stop row).

    Args:
        column: Column of the rows.
        difference: XOR of the expected and actual checksum; 0 if it is unknown.
        start, stop: Range of rows that the checksum covers.
    """
    position = None
    if difference:
        position = damaged_byte(difference, (stop - start) * column.row_bytes)
    if position is None:
        return tuple(column.offsets), start, stop
    row, byte = divmod(position, column.row_bytes)
    field = max(
        (name for name, offset in column.offsets.items() if offset <= byte),
        key=column.offsets.__getitem__,
    )
    return (field,), start + row, start + row + 1
