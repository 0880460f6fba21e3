"""Limits of declared texts, fields and tables, so that no declaration costs time or memory."""

from __future__ import annotations

import json
import tracemalloc

import h5py
import numpy as np
import pytest
import torch

from rollout_data.blocks.block_content import ArrayRows, BlockContent
from rollout_data.blocks.block_folder import BlockFolder
from rollout_data.blocks.block_header import (
    DROPPED,
    FRAGMENT_DTYPE,
    MAX_HOLLOW_BYTES,
    layouts_of,
    open_block,
)
from rollout_data.blocks.folder_metadata import load_metadata
from rollout_data.blocks.row_layout import RowLayout
from rollout_data.blocks.write_block import write_block
from storage import AdvancedReplayBuffer
from storage.core.fields import MAX_FIELDS, Field, Schema
from storage.errors import CorruptFileError, SchemaError
from tests.files.test_block_file_damage import block, change, replace, set_attribute

__all__ = ["block"]  # the fixture


def many_fields(count: int) -> list[dict]:
    """Return fields of one row each, as in the JSON of a schema. Each needs more than 64 bytes."""
    return [
        {"name": f"field {number:06d}", "shape": [], "dtype": "bool", "codec": "raw"}
        for number in range(count)
    ]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (many_fields(2000), "the attribute 'schema' is no JSON text of at most 131072 characters"),
        (
            [{"name": "a", "shape": [1] * 31, "dtype": "bool"}],
            "has 31 dimensions, expected at most 30",
        ),
    ],
    ids=["text", "dimensions"],
)
def test_a_schema_outside_of_the_format_limits_raises(block, tmp_path, fields, text):
    with pytest.raises(CorruptFileError, match=text):
        open_block(change(block, tmp_path, set_attribute("schema", json.dumps(fields))))


def test_too_many_fields_in_metadata_are_reported_as_damage(tmp_path):
    for count, is_taken in ((MAX_FIELDS, True), (MAX_FIELDS + 1, False)):
        (tmp_path / "metadata.json").write_text(json.dumps({"fields": many_fields(count)}))
        assert (load_metadata(tmp_path) is not None) is is_taken
        BlockFolder(tmp_path).refresh()


def test_too_many_fields_raise_before_a_file_is_written():
    buffer = AdvancedReplayBuffer(4, generator=0)
    with pytest.raises(SchemaError, match="at most 4096 fields, got more"):
        buffer.push([{str(number): torch.zeros(1) for number in range(MAX_FIELDS + 1)}])
    assert len(buffer) == 0
    buffer.push([{str(number): torch.zeros(1) for number in range(MAX_FIELDS)}])
    assert len(buffer) == 1


def test_duplicate_field_names_are_all_named():
    with pytest.raises(SchemaError, match="duplicate field names: a, c"):
        Schema([Field(name, ()) for name in "cabac"])


def test_fields_are_compared_once_by_name(monkeypatch):
    """The work grows linearly with the number of fields: each missing field is looked up by
    name.
    """
    schema = Schema.from_json(
        [{"name": f"a{number}", "shape": [4096], "dtype": "bool"} for number in range(1000)]
    )
    monkeypatch.setattr(Field, "__eq__", lambda *_: pytest.fail("compared fields"))
    assert list(RowLayout(schema).columns) == list(schema)


def reserve(file, name, dtype, shape):
    """Create a table with space in the file that was never written (a hole)."""
    settings = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    settings.set_layout(h5py.h5d.CONTIGUOUS)
    settings.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    settings.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    del file[name]
    kind = h5py.h5t.py_create(dtype, logical=True)
    h5py.h5d.create(file.id, name.encode(), kind, h5py.h5s.create_simple(shape), settings)


def hollow_fragments(file):
    dtype, count = file["fragments"].dtype, 1 << 20
    reserve(file, "fragments", dtype, (count,))
    replace(file, "reward_sums", shape=(count, 0), dtype="<f8")


def hollow_sums(file):
    reserve(file, "reward_sums", np.dtype("<f8"), (len(file["fragments"]), 1 << 22))


def hollow_checksums(file):
    reserve(file, "checksums/data", np.dtype("<u4"), (1 << 24, 2))


def list_of_texts(file):
    file.attrs["writer"] = ["w"] * 1000


def huge_attribute(file):
    file.attrs["sequence"] = np.bytes_(b"0" * (1 << 25))


HOLLOW = [hollow_fragments, hollow_sums, hollow_checksums, list_of_texts, huge_attribute]


@pytest.mark.parametrize("edit", HOLLOW, ids=[edit.__name__ for edit in HOLLOW])
def test_declared_sizes_allocate_no_memory(block, tmp_path, edit):
    path = change(block, tmp_path, edit)
    tracemalloc.start()
    with pytest.raises(CorruptFileError) as caught:
        open_block(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert str(path) in str(caught.value) and peak < 4_000_000


NUMBERS = [Field("observation", (3,))]
IMAGES = [Field(f"observation/{number}", (4096,), "uint8") for number in range(17)]


@pytest.mark.parametrize(
    ("table", "fields", "num_rewards"),
    [
        ("reward_sums", NUMBERS, 8),
        ("reward_sums", NUMBERS, 9),
        ("reward_sums", NUMBERS, 128),
        ("checksums/data", IMAGES, 1),
        ("checksums/final", IMAGES, 1),
    ],
)
def test_holes_of_a_sparse_copy_are_read_as_zeros(tmp_path, table, fields, num_rewards):
    """A table with a row per fragment may be all zeros. `cp --sparse` turns it into a hole."""
    count = 40_000
    fragments = np.zeros(count, FRAGMENT_DTYPE)
    fragments["trajectory"], fragments["final_row"], fragments["flags"] = (
        np.arange(count),
        -1,
        DROPPED,
    )
    fragments["end_time_ns"], fragments["policy_version"] = 1, -1
    schema = Schema(fields)
    tables = {
        name: {
            column: ArrayRows(np.zeros((0, spot.row_bytes), np.uint8))
            for column, spot in layout.columns.items()
        }
        for name, layout in layouts_of(schema).items()
    }
    content = BlockContent(schema, "w", 0, fragments, np.zeros((count, num_rewards)), tables)
    path = write_block(tmp_path, content, durable=False)
    with h5py.File(path) as file:
        offset, num_bytes = file[table].id.get_offset(), file[table].nbytes
    data, copy = path.read_bytes(), tmp_path / "copy.h5"
    with open(copy, "wb") as file:
        file.write(data[:offset])
        file.seek(offset + num_bytes)
        file.write(data[offset + num_bytes :])
        file.truncate(len(data))
    assert copy.read_bytes() == data and num_bytes > MAX_HOLLOW_BYTES
    assert len(open_block(copy).fragments) == count


@pytest.mark.parametrize(
    ("num_rows", "num_rewards"), [(40_000, 129), (70_000, 128)], ids=["row", "table"]
)
def test_a_file_with_a_too_large_hole_raises(block, tmp_path, num_rows, num_rewards):
    def edit(file):
        replace(file, "fragments", data=np.resize(file["fragments"][:], num_rows))
        reserve(file, "reward_sums", np.dtype("<f8"), (num_rows, num_rewards))

    path = change(block, tmp_path, edit)
    with pytest.raises(CorruptFileError, match="table 'reward_sums' was not written completely"):
        open_block(path)
