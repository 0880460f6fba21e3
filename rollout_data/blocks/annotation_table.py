"""Annotations (notes) of a block: metadata of episodes, and texts that frames refer to.

The two kinds of annotations are `EPISODES` and `TEXTS`. Each kind has a table in the block file.
Opening a block reads only the sizes and offsets of annotations. An annotation itself is read on
demand and compared with its own checksum. `FORMAT.md` is the specification.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from storage.core.durable_files import crc32
from storage.errors import CorruptFileError

#: Annotations of this kind are JSON objects with the metadata of an episode. Their key is the
#: trajectory number.
EPISODES = "episodes"
#: Annotations of this kind are texts that frames refer to. Their key is the `text_id` of the text.
TEXTS = "texts"
#: Key of the task description in the metadata of an episode.
TASK = "task"
# Names of the two HDF5 datasets that store annotations of one kind. "table" contains the key, size
# and checksum of each annotation. "bytes" contains the UTF-8 texts, one after another.
TABLE = "table"
BYTES = "bytes"
#: HDF5 attribute of the block file: CRC-32 of the tables of both kinds of annotations.
NOTES_CRC = "notes_crc"
NOTE_DTYPE = np.dtype([("key", "<i8"), ("num_bytes", "<u4"), ("checksum", "<u4")])
#: Largest size of one annotation, and of all metadata of one episode, in bytes.
MAX_NOTE_BYTES = 1 << 20
#: Bytes per read of consecutive annotations. A larger annotation is read at once.
_PORTION_BYTES = 1 << 20
#: Annotations to write: maps each kind to (key, UTF-8 text) pairs.
Notes = Mapping[str, Sequence[tuple[int, bytes]]]


def text_id(text: str) -> int:
    """Return the id of a text: an 8-byte BLAKE2b hash of the UTF-8 text as int64; 0 for "".

    The id is the same in every file.
    """
    if not text:
        return 0
    digest = blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def note_tables(notes: Notes) -> dict[str, np.ndarray]:
    """Build the HDF5 datasets that store annotations, by name; {} without annotations."""
    datasets: dict[str, np.ndarray] = {}
    if not any(notes.values()):
        return datasets
    for kind in (EPISODES, TEXTS):
        # The sort must be stable, since later annotations of an episode replace earlier ones.
        ordered = sorted(notes.get(kind, ()), key=lambda note: note[0])
        rows = [(key, len(data), crc32(data)) for key, data in ordered]
        content = b"".join(data for _, data in ordered)
        datasets[f"{kind}/{TABLE}"] = np.array(rows, NOTE_DTYPE)
        datasets[f"{kind}/{BYTES}"] = np.frombuffer(content, np.uint8)
    return datasets


def tables_crc(tables: Mapping[str, np.ndarray]) -> int:
    """Compute the CRC-32 of both annotation tables. `tables` maps names of datasets to arrays."""
    return crc32(tables[f"{TEXTS}/{TABLE}"], crc32(tables[f"{EPISODES}/{TABLE}"]))


@dataclass(frozen=True, eq=False)
class NoteTable:
    """Keys, byte ranges and checksums of the annotations of one kind in a block file.

    Attributes:
        keys: Ascending keys, int64 `[K]`. An episode may have several annotations.
        bounds: Offset of each annotation in the file, then the end of the last, int64 `[K + 1]`.
        checksums: CRC-32 of each annotation, uint32 `[K]`.
    """

    keys: np.ndarray
    bounds: np.ndarray
    checksums: np.ndarray

    @classmethod
    def checked(cls, table: np.ndarray, offset: int, num_bytes: int) -> NoteTable:
        """Check an annotation table and build a `NoteTable` from it.

        Args:
            table: The stored table, `[K]` of `NOTE_DTYPE`.
            offset: Byte offset in the file of the joined annotations.
            num_bytes: Size in bytes of the joined annotations.

        Raises:
            CorruptFileError: The table is invalid. The error does not name the file.
        """
        sizes = table["num_bytes"].astype(np.int64)
        has_valid_sizes = sizes.sum() == num_bytes and sizes.max(initial=0) <= MAX_NOTE_BYTES
        is_sorted = (table["key"][1:] >= table["key"][:-1]).all()
        if not has_valid_sizes or not is_sorted:
            raise CorruptFileError(
                f"the table of annotations is invalid: expected annotations of {num_bytes} bytes "
                f"in total, of at most {MAX_NOTE_BYTES} bytes each, sorted by key, got "
                f"{int(sizes.sum())} bytes."
            )
        bounds = offset + np.append(0, np.cumsum(sizes))
        return cls(table["key"].copy(), bounds, table["checksum"].copy())

    def of(self, key: int) -> range:
        """Return the positions of all annotations of one episode or text, given its key."""
        start = int(self.keys.searchsorted(key, "left"))
        return range(start, int(self.keys.searchsorted(key, "right")))

    def read(
        self,
        read_bytes: Callable[[int, int], np.ndarray],
        places: range | None = None,
    ) -> Iterator[tuple[int, bytes | None]]:
        """Yield (key, UTF-8 text) for each annotation in order; (key, None) if it is damaged.

        Args:
            read_bytes: Function that returns the bytes `start:stop` of the file.
            places: Positions in this table of the annotations to read; None reads all.
        """
        if places is None:
            places = range(len(self.keys))
        start = places.start
        while start < places.stop:
            limit = self.bounds[start] + _PORTION_BYTES
            last_fitting = int(np.searchsorted(self.bounds, limit, "right")) - 1
            stop = min(max(start + 1, last_fitting), places.stop)
            data = read_bytes(int(self.bounds[start]), int(self.bounds[stop]))
            cuts = (self.bounds[start : stop + 1] - self.bounds[start]).tolist()
            keys = self.keys[start:stop].tolist()
            checksums = self.checksums[start:stop].tolist()
            for key, low, high, expected in zip(keys, cuts[:-1], cuts[1:], checksums, strict=True):
                part = data[low:high]
                yield key, part.tobytes() if crc32(part) == expected else None
            start = stop
