"""Which byte is damaged, where a CRC-32 disagrees.

One rule: what one wrong byte explains is said to be that byte, anything else only to be among all of them.
"""

from __future__ import annotations

from functools import lru_cache

from storage.errors import CorruptFileError

from .row_layout import StoredColumn

_POLYNOMIAL = 0xEDB88320
#: More bytes are not searched, which takes a quarter of a second for a million.
_MAX_SEARCHED = 1 << 22


class DamagedRowsError(CorruptFileError):
    """Rows of a block that their checksum contradicts.

    Attributes:
        trajectory: Number within the writer.
        fields: Those that may be wrong.
        frames: (first, stop) of those that may be wrong; (T, T) for the observation after the last.
    """

    trajectory = -1
    fields: tuple[str, ...] = ()
    frames = (0, 0)


@lru_cache(maxsize=1)
def _table() -> tuple[list[int], dict[int, int], frozenset[int]]:
    """Return the table of CRC-32, the entry of each leading byte, and what single bytes leave."""
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (_POLYNOMIAL if value & 1 else 0)
        table.append(value)
    return table, {value >> 24: byte for byte, value in enumerate(table)}, frozenset(table[1:])


def damaged_byte(difference: int, num_bytes: int) -> int | None:
    """Find the one byte whose change explains `difference`, the XOR of two CRC-32 of `num_bytes` bytes; None if none.

    The register is run backwards over zeros from the end until a single byte can have brought it about. Of other damage
    a byte is named by chance in one of 2**24 / `num_bytes` cases.
    """
    table, entry_of, singles = _table()
    state = difference
    for place in range(num_bytes - 1, -1, -1) if num_bytes <= _MAX_SEARCHED else ():
        if state in singles:
            return place
        entry = entry_of[state >> 24]
        state = (state ^ table[entry]) << 8 & 0xFFFFFFFF | entry
    return None


def located(column: StoredColumn, difference: int, start: int, stop: int) -> tuple[tuple[str, ...], int, int]:
    """Return which fields and rows of `start:stop` are damaged: (fields, first row, stop)."""
    place = damaged_byte(difference, (stop - start) * column.row_bytes) if difference else None
    if place is None:
        return tuple(column.offsets), start, stop
    row, byte = divmod(place, column.row_bytes)
    before = [name for name, offset in column.offsets.items() if offset <= byte]
    return (max(before, key=lambda name: column.offsets[name]),), start + row, start + row + 1
