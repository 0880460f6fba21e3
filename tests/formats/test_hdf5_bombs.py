"""HDF5 files that declare or unpack to too much data raise an error before memory is allocated."""

from __future__ import annotations

import json
import random
import resource
import zlib
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import rollout_data
from storage.errors import CorruptFileError
from tests.formats.hdf5_files import actions, edited, robomimic, values
from tests.formats.test_robomimic_files import check_demo


def test_declared_sizes_allocate_no_memory(tmp_path: Path) -> None:
    def grow(file: h5py.File) -> None:
        del file["data/demo_9/actions"]
        file.create_dataset("data/demo_9/actions", (1, 1 << 40), "f8", chunks=(1, 1 << 20))

    recording = rollout_data.open(edited(robomimic(tmp_path / "x.hdf5"), grow))
    assert len(recording) == 2 and "bytes, more than a file of" in str(recording.problems[0])


def _chunk(data: bytes, **storage: Any) -> Any:
    """Return a change that writes an observation of one chunk with any data."""

    def change(file: h5py.File) -> None:
        dataset = file.create_dataset(
            "data/demo_9/obs/bomb", (1, 6), "f8", chunks=(1, 6), **storage
        )
        dataset.id.write_direct_chunk((0, 0), data)

    return change


def _zeros(file: h5py.File) -> None:
    """A gigabyte of zeros in small chunks of the stated size."""
    dataset = file.create_dataset(
        "data/demo_9/obs/bomb", (1, 1 << 30), "u1", chunks=(1, 1 << 23), compression="gzip"
    )
    for place in range(0, 1 << 30, 1 << 23):
        dataset.id.write_direct_chunk((0, place), zlib.compress(bytes(1 << 23), 9))


def _packed_twice(file: h5py.File) -> None:
    settings = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    settings.set_chunk((1, 6))
    settings.set_deflate(9)
    settings.set_deflate(9)
    space, kind = h5py.h5s.create_simple((1, 6)), h5py.h5t.IEEE_F64LE
    h5py.h5d.create(file["data/demo_9/obs"].id, b"bomb", kind, space, settings)


#: What unpacks to more than a file should hold -> what is said, at the opening or the reading of
#: its demo.
BOMBS: dict[str, tuple[Any, str]] = {
    "a chunk of gzip": (
        _chunk(zlib.compress(random.Random(0).randbytes(600_000)), compression="gzip"),
        "a chunk has more than 52 bytes",
    ),
    "a chunk of LZF": (
        _chunk(b"\0a" + b"\xe0\xff\0" * (1 << 21), compression="lzf"),
        "more than 52 bytes",
    ),
    "zeros": (_zeros, "1073741824 bytes, more than a file of"),
    "gzip in gzip": (_packed_twice, r"filters \[1, 1\]"),
    "another filter": (_chunk(bytes(9), scaleoffset=4), r"filters \[6\]"),
}


@pytest.mark.parametrize("what", BOMBS)
def test_data_that_unpack_to_too_much_are_refused_before_they_are_unpacked(
    tmp_path: Path, what: str
) -> None:
    change, message = BOMBS[what]
    recording = rollout_data.open(edited(robomimic(tmp_path / "x.hdf5"), change))
    with pytest.raises(CorruptFileError, match=message):
        raise (
            recording.problems[0]
            if recording.problems
            else AssertionError(recording[1].observation["bomb"].shape)
        )
    check_demo(recording[0], 2, 3)


def test_valid_large_chunks_are_read(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (1, 600_000), "u1")
    storage = {"compression": "gzip", "chunks": noise.shape, "shuffle": True, "fletcher32": True}
    path = robomimic(tmp_path / "x.hdf5")
    edited(path, lambda file: file.create_dataset("data/demo_9/obs/noise", data=noise, **storage))
    np.testing.assert_array_equal(rollout_data.open(path)[1].observation["noise"], noise)


@pytest.mark.parametrize("user_block", [0, 512])
def test_a_text_with_a_declared_size_of_gigabytes_allocates_no_memory(
    tmp_path: Path, user_block: int
) -> None:
    text = json.dumps({"env_name": "Lift", "type": 1, "note": "x" * 77})
    with h5py.File(tmp_path / "x.hdf5", "w", userblock_size=user_block) as file:
        file.create_group("data").attrs["env_args"] = text
        file["data/demo_0/actions"], file["data/demo_0/obs/low"] = actions(0, 3), values(0, 3)
    whole = (tmp_path / "x.hdf5").read_bytes()
    assert rollout_data.open(tmp_path / "x.hdf5").metadata["env_name"] == "Lift"
    described = len(text).to_bytes(4, "little") + (whole.index(b"GCOL") - user_block).to_bytes(
        8, "little"
    )
    assert whole.count(described) == 1
    (tmp_path / "x.hdf5").write_bytes(whole.replace(described, b"\0\0\0\xf0" + described[4:]))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(
        CorruptFileError, match="a text of 4026531840 bytes, expected at most 1048576"
    ):
        rollout_data.open(tmp_path / "x.hdf5")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 19  # KiB
