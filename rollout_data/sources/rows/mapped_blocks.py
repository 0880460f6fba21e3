"""`MappedBlocks`: rows of memory-mapped block files, copied directly from the page cache."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import lcm

import numpy as np
import torch

from storage.core.threads import each

from ...blocks.block import Block, Identity
from ...blocks.block_header import DATA, corrupt, read_header
from ...blocks.row_layout import RowLayout
from ...blocks.trajectory_index import Int64s, Runs, TrajectoryIndex
from . import mapped_files
from .chunk_decoder import CHUNK_CACHE_BYTES, ChunkFiles, row_cache
from .gather_rows import gather
from .mapped_files import PAGE_BYTES, Arena
from .row_source import Place, Rows, RowSource

#: Key of the address range that contains entire block files, from which chunks are decoded.
_WHOLE = ("", "")
#: Maximum number of mappings; the kernel allows 65,530 per process by default.
_MAX_MAPPINGS = 50_000
#: Number of bytes after which the mapped pages of rows that are read only once are released.
_MAX_READ_ONCE_BYTES = 64 << 20
#: Bytes that the kernel maps around a row at a page fault.
_MAPPED_AROUND_BYTES = 64 << 10
#: Number of threads that request pages from the kernel if data must be read from disk.
_NUM_ADVISERS = 4
#: Maximum number of runs for which a single thread requests pages.
_FEW_RUNS = 8
#: Number of runs to check before prefetching. If all are in memory, no prefetch is needed.
_NUM_PROBES = 16


class FileMap:
    """Memory maps of many blocks: one arena (address range) per column.

    `add` maps further blocks. Decoded chunks are cached, up to `chunk_cache_bytes`.
    """

    def __init__(
        self,
        layouts: Mapping[str, RowLayout],
        blocks: Sequence[Block],
        chunk_cache_bytes: int = CHUNK_CACHE_BYTES,
    ) -> None:
        self.layouts = layouts
        self.places = [
            (table, column) for table, layout in layouts.items() for column in layout.columns
        ]
        coded = [
            (table, column)
            for table, column in self.places
            if layouts[table].columns[column].is_coded
        ]
        self.places += [_WHOLE] if coded else []
        plain = [place for place in self.places if place not in coded]
        self.arenas = {
            place: Arena(self._row_bytes(place), self._size(place, blocks)) for place in plain
        }
        cache = row_cache(chunk_cache_bytes)
        self.chunks = {
            place: ChunkFiles(place, self._row_bytes(place), self.arenas[_WHOLE], cache)
            for place in coded
        }
        #: Mapped blocks, each with the number of its first row in every arena.
        self.mapped: dict[Identity, tuple[Block, list[int]]] = {}
        self.num_unmapped = 0

    def unmap(self, identities: Iterable[Identity]) -> None:
        """Unmap blocks. Reading the blocks from a snapshot raises `LostBlockError` afterwards."""
        for block, rows in map(self.mapped.pop, identities):
            for place, first in zip(self.places, rows, strict=True):
                (self.chunks.get(place) or self.arenas[place]).unmap(
                    first, self._at(block, place)[1]
                )
            self.num_unmapped += 1

    def has_room(self, blocks: Sequence[Block]) -> bool:
        """Return whether the arenas have address space for the blocks that are not mapped yet."""
        new = [block for block in blocks if block.identity not in self.mapped]
        return all(
            mapped.free_bytes >= self._size(place, new) for place, mapped in self.arenas.items()
        )

    def _row_bytes(self, place: Place) -> int:
        return 1 if place == _WHOLE else self.layouts[place[0]].columns[place[1]].row_bytes

    def _at(self, block: Block, place: Place) -> tuple[int, int]:
        """Return where a column starts in the file of a block, in bytes, and its number of rows."""
        return (0, block.file_bytes) if place == _WHOLE else block.places[place]

    def _size(self, place: Place, blocks: Sequence[Block]) -> int:
        """Return how much address space in bytes one column of these blocks needs at most."""
        row_bytes = self._row_bytes(place)
        return sum(
            self._at(block, place)[1] * row_bytes + lcm(row_bytes, PAGE_BYTES) + PAGE_BYTES
            for block in blocks
        )

    def add(self, block: Block) -> None:
        """Map a block, unless it is mapped already. A mapped block stays readable if deleted.

        Raises:
            FileNotFoundError: The block is not mapped, and its file does not exist.
            CorruptFileError: The file is truncated.
        """
        if block.identity in self.mapped:
            return
        header = read_header(block.path) if self.chunks else None
        if header is not None and header.file_bytes != block.file_bytes:
            raise corrupt(block.path, f"expected {block.file_bytes} bytes, got {header.file_bytes}")
        rows = {
            place: mapped.map_file(block.path, *self._at(block, place))
            for place, mapped in self.arenas.items()
        }
        if header is not None:
            rows |= {
                place: chunks.add(header, rows[_WHOLE]) for place, chunks in self.chunks.items()
            }
        self.mapped[block.identity] = block, [rows[place] for place in self.places]


def can_map(blocks: Iterable[Block]) -> bool:
    """Return whether this system supports mapping, and all blocks can be mapped at once."""
    return mapped_files.is_supported and sum(len(block.places) for block in blocks) <= _MAX_MAPPINGS


class MappedBlocks(RowSource):
    """Rows of memory-mapped block files. Rows of compressed columns are decoded from chunks."""

    has_local_blocks = True

    def __init__(
        self, index: TrajectoryIndex, layouts: Mapping[str, RowLayout], files: FileMap
    ) -> None:
        super().__init__(index, layouts)
        self.files = files
        nowhere = (None, [0] * len(files.places))
        rows = np.array(
            [files.mapped.get(block.identity, nowhere)[1] for block in index.blocks], np.int64
        )
        #: For each column, the first arena row of each of the B blocks, int64 `[B]`.
        rows = rows.reshape(len(index.blocks), len(files.places)).T.copy()
        self._first_rows: dict[Place, Int64s] = dict(zip(files.places, rows, strict=True))
        self._num_unmapped = -1
        self._num_read_once = 0
        #: Whether each block was unmapped, bool `[B]`; None if no block was unmapped.
        self._is_unmapped: np.ndarray | None = None

    def _copy(self, place: Place, runs: Runs, length: int, out: torch.Tensor) -> None:
        self._check_mapped(runs)
        first = self._first(place, runs)
        if place in self.files.chunks:
            self.files.chunks[place].copy(first, runs, out)
        else:
            gather(self.files.arenas[place].words_view, runs, first, length, out)

    def _check_mapped(self, runs: Runs) -> None:
        if self._num_unmapped != self.files.num_unmapped:
            self._num_unmapped = self.files.num_unmapped
            is_unmapped = np.array(
                [block.identity not in self.files.mapped for block in self.index.blocks]
            )
            self._is_unmapped = is_unmapped if is_unmapped.any() else None
        if self._is_unmapped is None:
            return
        is_lost = self._is_unmapped[runs.block]
        if is_lost.any():
            raise self.index.lost_block(int(runs.block[np.argmax(is_lost)]))

    def prefetch(self, rows: Rows) -> None:
        runs = self.locate(rows)
        for place in self.files.places:
            if place[0] == DATA:
                files = self.files.chunks.get(place) or self.files.arenas[place]
                _advise(files, self._first(place, runs), runs.num_rows)

    def is_resident(self, rows: Rows) -> bool:
        runs = self.locate(rows)
        arenas = [
            (place, mapped) for place, mapped in self.files.arenas.items() if place[0] == DATA
        ]
        return all(
            mapped.is_resident(row)
            for place, mapped in arenas
            for row in self._first(place, runs).tolist()
        )

    def note_read_once(self, num_bytes: int) -> None:
        self._num_read_once += max(num_bytes, _MAPPED_AROUND_BYTES)
        if self._num_read_once >= _MAX_READ_ONCE_BYTES:
            self._num_read_once = 0
            for mapped in self.files.arenas.values():
                mapped.let_go()

    def _first(self, place: Place, runs: Runs) -> Int64s:
        return self._first_rows[place][runs.block] + runs.row


def _advise(files: Arena | ChunkFiles, first: Int64s, num_rows: Int64s) -> None:
    """Prefetch runs of rows: request that the kernel reads them from disk in the background.

    Runs that are already in memory are left out.
    """
    if isinstance(files, Arena):
        # Check the middle of each run, since its first and last page also contain other rows.
        middle = (first + num_rows // 2).tolist()
        if all(map(files.is_resident, middle[:: max(1, len(middle) // _NUM_PROBES)])):
            return
        is_away = [not files.is_resident(row) for row in middle]
        first = first[is_away]
        num_rows = num_rows[is_away]
    # Requesting 256 KiB from disk takes about 0.1 ms, so several threads send requests.
    num_parts = 1 if len(first) <= _FEW_RUNS else _NUM_ADVISERS
    parts = [(first[part::num_parts], num_rows[part::num_parts]) for part in range(num_parts)]
    each(lambda part: files.will_need(*part), parts, num_parts)
