"""Writing a block: its rows and checksums for any layout of fragments, and its errors."""

from __future__ import annotations

import errno
import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_data.blocks.block_content import ArrayRows, BlockContent
from rollout_data.blocks.block_header import DATA, FINAL, FRAGMENT_DTYPE, layouts_of, open_block
from rollout_data.blocks.write_block import write_block
from storage.core.fields import Field, Schema
from tests.faults import instead_of

NUM_FRAGMENTS, LENGTH = 30, 50
SMALL = Schema([Field("observation", (500,), "float32"), Field("action", (2,), "float32")])
#: Three rows of the image fit into the part that is written at a time.
LARGE = Schema([Field("image", (300, 1024), "uint8"), Field("action", (2,), "float32")])


class CopiedRows(ArrayRows):
    """Rows that are assembled in the memory of the block."""

    def read(self, start, stop, out):
        out[:] = super().read(start, stop, out)
        return out


class FailingRows(ArrayRows):
    """Rows whose third read raises `error`."""

    def __init__(self, rows, error):
        super().__init__(rows)
        self.error, self.num_reads = error, 0

    def read(self, start, stop, out):
        self.num_reads += 1
        if self.num_reads == 3:
            raise self.error
        return super().read(start, stop, out)


def content(schema=SMALL, spans=None, num_rows=NUM_FRAGMENTS * LENGTH, rows=ArrayRows, seed=0):
    """Return a block of random rows whose fragments have these spans."""
    spans = (
        [(k * LENGTH, (k + 1) * LENGTH) for k in range(NUM_FRAGMENTS)] if spans is None else spans
    )
    fragments = np.zeros(len(spans), FRAGMENT_DTYPE)
    fragments["trajectory"], fragments["flags"] = np.arange(len(spans)), 1 | 2
    fragments["row"], fragments["length"] = [a for a, _ in spans], [b - a for a, b in spans]
    fragments["final_row"] = fragments["policy_version"] = -1
    generator, sizes = np.random.default_rng(seed), {DATA: num_rows, FINAL: 0}
    tables = {
        table: {
            name: rows(generator.integers(0, 256, (sizes[table], column.row_bytes), np.uint8))
            for name, column in layout.columns.items()
        }
        for table, layout in layouts_of(schema).items()
    }
    return BlockContent(schema, "w", 0, fragments, np.zeros((len(spans), 0)), tables)


def check(path, expected):
    """Compare the rows of a block with expected rows, and check its checksums."""
    header = open_block(path, verify=True)
    for name, source in expected.rows[DATA].items():
        actual = header.read_rows(DATA, name, 0, source.num_rows)
        assert np.array_equal(actual, ArrayRows.read(source, 0, source.num_rows, actual))


@pytest.fixture(autouse=True, scope="module")
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@settings(max_examples=25)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 9), st.booleans()), max_size=9),
    seed=st.integers(0, 99),
    rows=st.sampled_from([ArrayRows, CopiedRows]),
)
def test_rows_and_checksums_do_not_depend_on_the_parts_of_a_write(
    tmp_path_factory, lengths, seed, rows
):
    """Some of the lengths are fragments. The others are rows without a fragment."""
    generator = np.random.default_rng(seed)
    ends = np.cumsum([length for length, _ in lengths], dtype=np.int64)
    spans = [
        (int(end) - length, int(end))
        for end, (length, is_named) in zip(ends, lengths, strict=True)
        if is_named
    ]
    spans = [spans[place] for place in generator.permutation(len(spans))]
    made = content(LARGE, spans, sum(length for length, _ in lengths), rows, seed)
    path = write_block(tmp_path_factory.mktemp("rows"), made, durable=False)
    check(path, made)


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()]
)
def test_an_error_while_gathering_rows_leaves_no_block(tmp_path, error):
    with pytest.raises(type(error)) as caught:
        write_block(tmp_path, content(rows=lambda rows: FailingRows(rows, error)), durable=False)
    assert caught.value is error and not list(tmp_path.iterdir())


@pytest.mark.parametrize("durable", [True, False])
def test_a_durable_block_is_flushed_before_it_is_renamed(tmp_path, durable):
    events = []

    def flush(fsync, descriptor):
        events.append(("flush", os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def rename(call, source, target):
        events.append(("rename", str(target)))
        call(source, target)

    with instead_of("fsync", flush), instead_of("replace", rename), instead_of("rename", rename):
        path = write_block(tmp_path, content(), durable=durable)
    temporary = str(path.with_name(f".tmp_{path.name}"))
    flushed = [("flush", temporary), ("rename", str(path)), ("flush", str(tmp_path))]
    assert events == (flushed if durable else [("rename", str(path))])
