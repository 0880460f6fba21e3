"""Notes of a block: what its writer said of whole episodes, and the texts that frames refer to.

One rule: a block that is opened gives their sizes and places only; a note is read when it is asked for, and checked
against its own checksum. `FORMAT.md` is the specification.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from storage.core.durable_files import crc32
from storage.errors import CorruptFileError

#: The two kinds: JSON objects by number of the trajectory; texts by their `text_id`.
EPISODES, TEXTS = "episodes", "texts"
#: What is to be done in an episode, under this name in what is said of it.
TASK = "task"
#: The datasets of a kind, and the attribute of the file with the CRC-32 of both tables.
TABLE, BYTES, NOTES_CRC = "table", "bytes", "notes_crc"
NOTE_DTYPE = np.dtype([("key", "<i8"), ("num_bytes", "<u4"), ("checksum", "<u4")])
#: Of one note, and of all that is said of one episode.
MAX_NOTE_BYTES = 1 << 20
#: Bytes that are read at once, or one note if it is larger.
_PORTION_BYTES = 1 << 20
#: Kind -> (key, UTF-8), as they are written.
Notes = Mapping[str, Sequence[tuple[int, bytes]]]


def text_id(text: str) -> int:
    """Return the number that stands for a text in every file: 8 bytes of BLAKE2b of its UTF-8, as int64; 0 for ""."""
    digest = blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True) if text else 0


def note_tables(notes: Notes) -> dict[str, np.ndarray]:
    """Return the datasets of both kinds by name; nothing where there is no note."""
    found: dict[str, np.ndarray] = {}
    for kind in (EPISODES, TEXTS) if any(notes.values()) else ():
        listed = sorted(notes.get(kind, ()), key=lambda note: note[0])  # of one episode in their order
        rows = [(key, len(data), crc32(data)) for key, data in listed]
        found[f"{kind}/{TABLE}"] = np.array(rows, NOTE_DTYPE)
        found[f"{kind}/{BYTES}"] = np.frombuffer(b"".join(data for _, data in listed), np.uint8)
    return found


def tables_crc(tables: Mapping[str, np.ndarray]) -> int:
    """CRC-32 of the tables of both kinds."""
    return crc32(tables[f"{TEXTS}/{TABLE}"], crc32(tables[f"{EPISODES}/{TABLE}"]))


@dataclass(frozen=True, eq=False)
class NoteTable:
    """Where the notes of one kind are in a file.

    Attributes:
        keys: int64 `[K]`, ascending; an episode has as many as were given of it.
        bounds: int64 `[K + 1]`, the first byte of each in the file, and the end of the last.
        checksums: uint32 `[K]`, CRC-32 of each.
    """

    keys: np.ndarray
    bounds: np.ndarray
    checksums: np.ndarray

    @classmethod
    def checked(cls, table: np.ndarray, offset: int, num_bytes: int) -> NoteTable:
        """Check a table against the bytes `offset : offset + num_bytes` that hold its notes.

        Raises:
            CorruptFileError: Without the place.
        """
        sizes = table["num_bytes"].astype(np.int64)
        is_right = sizes.sum() == num_bytes and sizes.max(initial=0) <= MAX_NOTE_BYTES
        if not is_right or (table["key"][1:] < table["key"][:-1]).any():
            expected = f"notes of at most {MAX_NOTE_BYTES} bytes, in order, in {num_bytes} bytes"
            raise CorruptFileError("read", "", expected, f"{int(sizes.sum())} bytes")
        return cls(table["key"].copy(), offset + np.append(0, np.cumsum(sizes)), table["checksum"].copy())

    def of(self, key: int) -> range:
        """Return the places of the notes of one key."""
        return range(int(self.keys.searchsorted(key, "left")), int(self.keys.searchsorted(key, "right")))

    def read(
        self, read_bytes: Callable[[int, int], np.ndarray], places: range | None = None
    ) -> Iterator[tuple[int, bytes | None]]:
        """Yield (key, UTF-8) of these notes, or of all, in order; None stands for one that is damaged."""
        start, stop = (places.start, places.stop) if places is not None else (0, len(self.keys))
        while start < stop:
            within = int(np.searchsorted(self.bounds, self.bounds[start] + _PORTION_BYTES, "right")) - 1
            end = min(max(start + 1, within), stop)
            data = read_bytes(int(self.bounds[start]), int(self.bounds[end]))
            cuts = (self.bounds[start : end + 1] - self.bounds[start]).tolist()
            columns = self.keys[start:end].tolist(), cuts[:-1], cuts[1:], self.checksums[start:end].tolist()
            for key, low, high, expected in zip(*columns, strict=True):
                part = data[low:high]
                yield key, part.tobytes() if crc32(part) == expected else None
            start = end
