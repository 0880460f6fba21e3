"""Rows and checksums of a block, however its fragments lie and however it is cut into parts."""

from __future__ import annotations

import os
import threading
import zlib

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rollout_data.format import row_writing
from rollout_data.format.header import FRAGMENT_DTYPE
from rollout_data.format.row_source import ArrayRows
from rollout_data.format.row_writing import RowWriting


class CopiedRows(ArrayRows):
    """Rows that are put together in the memory of whoever writes them."""

    def read(self, start: int, stop: int, out: np.ndarray) -> np.ndarray:
        out[:] = super().read(start, stop, out)
        return out


@given(
    lengths=st.lists(st.tuples(st.integers(1, 40), st.booleans()), max_size=20),
    row_bytes=st.sampled_from([1, 3, 50, 500]),
    part_bytes=st.integers(1, 600),
    seed=st.integers(0, 99),
    num_threads=st.integers(1, 3),
    num_ahead=st.integers(1, 3),
)
def test_rows_and_checksums_do_not_depend_on_parts_and_threads(
    tmp_path_factory, lengths, row_bytes, part_bytes, seed, num_threads, num_ahead
):
    """Of the lengths, those marked are fragments; the others are rows that no fragment names."""
    generator = np.random.default_rng(seed)
    ends = np.cumsum([length for length, _ in lengths], dtype=np.int64)
    spans = [(int(end) - length, int(end)) for end, (length, is_named) in zip(ends, lengths, strict=True) if is_named]
    spans = [spans[place] for place in generator.permutation(len(spans))]
    fragments = np.zeros(len(spans), FRAGMENT_DTYPE)
    fragments["row"], fragments["length"] = [a for a, _ in spans], [b - a for a, b in spans]
    num_rows = sum(length for length, _ in lengths)
    wide = generator.integers(0, 256, (num_rows, row_bytes), dtype=np.uint8)
    narrow = generator.integers(0, 256, (num_rows, 2), dtype=np.uint8)
    path = tmp_path_factory.mktemp("rows") / "rows"
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR)
    before, row_writing.PART_BYTES = row_writing.PART_BYTES, part_bytes
    try:
        tables = {"data": {"wide": CopiedRows(wide), "narrow": ArrayRows(narrow)}}
        places = {"data/wide": 64, "data/narrow": 64 + wide.nbytes}
        writing = RowWriting(descriptor, tables, places, fragments, starts_writeback=False)
        others = [threading.Thread(target=writing.work) for _ in range(num_threads - 1)]
        for other in others:
            other.start()
        writing.work(num_ahead=num_ahead)
        for other in others:
            other.join()
    finally:
        row_writing.PART_BYTES = before
        os.close(descriptor)
    assert path.read_bytes()[64:] == wide.tobytes() + narrow.tobytes()
    for values, sums in zip((wide, narrow), writing.checksums["data"].T, strict=True):
        assert sums.tolist() == [zlib.crc32(values[start:stop].tobytes()) for start, stop in spans]
