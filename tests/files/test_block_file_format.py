"""The file format: the reader of FORMAT.md, and unchanged reading of recordings of earlier
versions.
"""

from __future__ import annotations

import re
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

import rollout_data
from rollout_data.blocks.block_folder import read_metadata
from rollout_data.blocks.block_header import open_block
from rollout_data.writing.rollout_writer import RolloutWriter
from storage.core.fields import flatten
from tests.files import golden
from tests.files.readback import Recorded, end_of, trajectories_of

FORMAT, CODECS = (
    (Path(rollout_data.__file__).parent / name).read_text(encoding="utf-8")
    for name in ("FORMAT.md", "CODECS.md")
)
FOLDERS = sorted(path for path in golden.FOLDER.glob("v*/*") if path.is_dir())


def reference_reader(name="read_folder"):
    (code, notes), (chunks,) = (
        re.findall(r"```python\n(.*?)```", text, re.DOTALL) for text in (FORMAT, CODECS)
    )
    assert len(code.splitlines()) <= 40
    assert "rollout_data" not in code + chunks + notes and "torch" not in code + chunks + notes
    names: dict = {}
    exec(chunks + code + notes, names)
    return names[name]


def check_reference(folder: Path) -> list[Recorded]:
    expected = trajectories_of(folder)
    got = reference_reader()(folder)
    got = {
        key: item
        for key, item in got.items()
        if any(len(rows) for name, rows in item.items() if "/" not in name and name != "flags")
    }
    assert sorted(got) == [(item.writer, item.number) for item in expected]
    for item in expected:
        theirs = got[(item.writer, item.number)]
        assert theirs["flags"] == item.flags
        for name in item.fields:
            np.testing.assert_array_equal(theirs[name], item.column(name), err_msg=name)
        for name, final in (item.finals or {}).items():
            np.testing.assert_array_equal(theirs["final/" + name], final)
    return expected


@pytest.mark.parametrize("name", golden.RECORDINGS)
def test_the_reader_in_format_md_reads_what_we_write(tmp_path, name):
    golden.record(name, tmp_path)
    assert check_reference(tmp_path)


@pytest.mark.parametrize("name", golden.RECORDINGS)
def test_attributes_have_the_types_that_h5py_writes(tmp_path, name):
    """They are written by faster low-level functions. Other tools must not notice."""
    golden.record(name, tmp_path)
    for path in tmp_path.glob("rollout_*.h5"):
        with (
            h5py.File(path) as ours,
            h5py.File(tmp_path / "theirs", "w", libver=("v108", "v108")) as theirs,
        ):
            assert (
                ours.id.get_create_plist().get_version()
                == theirs.id.get_create_plist().get_version()
            )
            for key, value in ours.attrs.items():
                theirs.attrs[key] = value
                item, other = ours.attrs.get_id(key), theirs.attrs.get_id(key)
                assert (
                    item.get_type().encode() == other.get_type().encode()
                    and item.shape == other.shape == ()
                )
                assert item.get_storage_size() == other.get_storage_size()
                assert type(value) is (str if h5py.check_string_dtype(item.dtype) else np.int64)


def test_there_are_golden_files_of_the_present_version():
    assert {path.name for path in FOLDERS if path.parent.name == "v1"} == set(golden.RECORDINGS)


@pytest.mark.parametrize(
    "folder", FOLDERS, ids=lambda folder: f"{folder.parent.name}-{folder.name}"
)
def test_golden_files_are_read_unchanged(folder):
    steps, _, _, options = golden.RECORDINGS[folder.name]
    actual = trajectories_of(folder)
    for item in actual:
        start = START[folder.name][item.number]
        for t in range(item.length):
            expected = flat(steps(start + t))
            for name, rows in item.fields.items():
                row, want = np.concatenate(rows)[t], expected[name][item.env]
                want = want.float().numpy() if want.dtype == torch.bfloat16 else want.numpy()
                tolerance = 0.5 / 255 + 1e-7 if (folder.name, name) in IMAGES else 0
                np.testing.assert_allclose(row, want, atol=tolerance, rtol=0, err_msg=name)
                assert row.dtype == want.dtype and row.shape == want.shape
    assert [(item.number, item.env, item.length, end_of(item)) for item in actual] == ENDS[
        folder.name
    ]
    metadata = read_metadata(folder)
    assert metadata["made_by"] == "tests"
    assert metadata["total_trajectories"] == len(actual)
    assert metadata["obs_disassemble_mapping"] == options.get("obs_disassemble_mapping", {})


#: Trajectory number -> step at which it started.
START = {
    "dtypes": {0: 0, 1: 0, 2: 4, 3: 6},
    "components": {1: 0, 3: 3},
    "coded": {0: 0, 1: 0, 2: 5, 3: 11},
}
IMAGES = {("components", "observation/depth"), ("coded", "observation/image")}
ENDS = {
    "dtypes": [
        (0, 0, 4, "terminated"),
        (1, 1, 6, "truncated"),
        (2, 0, 5, "open"),
        (3, 1, 3, "open"),
    ],
    "coded": [
        (0, 0, 11, "terminated"),
        (1, 1, 5, "truncated"),
        (2, 1, 15, "open"),
        (3, 0, 9, "open"),
    ],
    "components": [(1, 1, 5, "truncated"), (3, 0, 4, "truncated")],
}


def flat(step):
    tensors = {
        name: value for name, value in flatten(step).items() if isinstance(value, torch.Tensor)
    }
    return {name: value for name, value in tensors.items() if not name.startswith("final")}


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", golden.DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 3), (1500,)])
def test_every_dtype_and_shape_is_read_back_with_the_same_bytes(tmp_path, dtype, shape):
    torch_dtype = getattr(torch, dtype)
    values = torch.randint(0, 256, (2, *shape, torch_dtype.itemsize), dtype=torch.uint8)
    values = (values % 2 if dtype == "bool" else values).view(torch_dtype).view(2, *shape)
    with RolloutWriter(tmp_path, 2, durable=False) as writer:
        writer.add(observation=values, action=values, reward=values)
    header = open_block(next(tmp_path.glob("*.h5")), verify=True)
    assert header.schema["observation"].dtype == dtype and header.schema["reward"].shape == shape
    for name in ("observation", "action", "reward"):
        layout = header.layouts["data"]
        rows = torch.from_numpy(header.read_rows("data", layout.column_of[name].name, 0, 2))
        got = layout.decoded(name, rows).contiguous()
        assert torch.equal(got.view(torch.uint8), values.contiguous().view(torch.uint8))


def test_a_block_is_plain_hdf5_without_stray_bytes(tmp_path):
    with RolloutWriter(tmp_path, 1, durable=False) as writer:
        writer.add(
            observation=np.ones((1, 3), np.uint8),
            action=np.full(1, 2.5),
            odd=np.ones((1, 5), np.int8),
        )
    with h5py.File(next(tmp_path.glob("*.h5"))) as file:
        frames = file["data/frames"]
        assert (
            frames.chunks is None
            and frames.compression is None
            and frames.id.get_offset() % 4096 == 0
        )
        assert frames["observation"].tolist() == [[1, 1, 1]] and frames["action"].tolist() == [2.5]
        row = np.fromfile(
            file.filename, np.uint8, frames.dtype.itemsize, offset=frames.id.get_offset()
        )
    assert frames_gaps(row) == [0] * 8


def frames_gaps(row):
    """Return the bytes between observation (0:3), action (8:16), odd (16:21) and the end of the row
    (24).
    """
    assert len(row) == 24
    return [*row[3:8].tolist(), *row[21:24].tolist()]
