"""Damaged and hostile chunks of coded components are reported, need little memory, and are never
returned.
"""

from __future__ import annotations

import json
import shutil
import tracemalloc

import h5py
import numpy as np
import pytest
import torch

from rollout_data import RolloutDataset, WindowDataset
from rollout_data.blocks.block_header import (
    ABOUT,
    CODECS,
    DATA,
    header_crc,
    open_block,
    read_header,
)
from rollout_data.tools.cli.command_line import main
from storage.codecs import packers
from storage.errors import CorruptFileError, RolloutDataError, RolloutDataWarning, UsageError
from tests.files import coded
from tests.files.readback import trajectories_of
from tests.files.test_block_file_damage import check_flips, used_bytes


def read_envs(folder):
    """Read everything with `RolloutDataset`."""
    dataset = RolloutDataset(folder, 2, device="cpu", flatten_observations=False)
    for _ in dataset:
        pass


def read_windows(folder):
    """Read everything with `WindowDataset`."""
    dataset = WindowDataset(folder, 3)
    dataset.__getitems__(range(len(dataset)))


def damage(path, name="rgb", table="data"):
    """Flip a bit in the middle of a component's chunks."""
    header = read_header(path)
    chunks = header.chunks[table][f"observation/{name}"]
    place = int(chunks.places[0] + chunks.places[-1]) // 2
    data = bytearray(path.read_bytes())
    data[place] ^= 0x10
    path.write_bytes(data)
    return int(np.searchsorted(chunks.places, place, side="right")) - 1


def test_verify_reports_a_damaged_chunk_and_repair_drops_its_trajectory(folder, capsys):
    good = trajectories_of(folder)
    path = sorted(folder.glob("*.h5"))[0]
    damage(path)
    assert main(["verify", str(folder)]) == 1
    assert "column data/observation/rgb, expected checksum " in capsys.readouterr().out
    with pytest.warns(RolloutDataWarning, match="observation/rgb"), pytest.raises(RolloutDataError):
        RolloutDataset(folder, 2, device="cpu", verify_on_open=True).get_batch(60)
    assert main(["verify", "--repair", str(folder)]) == 1
    capsys.readouterr()
    assert main(["verify", str(folder)]) == 0
    left = trajectories_of(folder)
    assert len(left) == len(good) - 1
    for item in left:
        same = next(other for other in good if other.number == item.number)
        assert all(
            np.array_equal(item.column(name), same.column(name), equal_nan=True)
            for name in item.fields
        )
        assert (item.finals is None) == (same.finals is None)


@pytest.mark.each_value
@pytest.mark.parametrize(
    "dataset", [read_envs, read_windows], ids=["RolloutDataset", "WindowDataset"]
)
@pytest.mark.parametrize("name", coded.CODECS)
def test_decoding_a_chunk_with_a_flipped_bit_raises(folder, name, dataset):
    path = sorted(folder.glob("*.h5"))[0]
    number = damage(path, name)
    text = rf"'{path}'.* chunk {number} of data/observation/{name}, expected checksum [0-9a-f]{{8}}"
    with pytest.raises(CorruptFileError, match=text):
        dataset(folder)
    header = read_header(path)
    row = int(header.chunks[DATA][f"observation/{name}"].rows[number])
    with pytest.raises(
        CorruptFileError,
        match=rf"data/observation/{name}, expected checksum .* of chunk {number}, got [0-9a-f]{{8}}",
    ):
        header.read_rows(DATA, f"observation/{name}", row, row + 1)


def test_a_flipped_bit_of_a_chunk_checksum_is_reported_by_verify_and_decoding(folder):
    path = sorted(folder.glob("*.h5"))[0]
    with h5py.File(path, "r+") as file:
        sums = file["data/observation/rgb/checksums"]
        sums[1] ^= 4
    with pytest.raises(
        CorruptFileError,
        match=r"column data/observation/rgb, expected checksum .* of chunk 1, got ",
    ):
        open_block(path, verify=True)
    with pytest.raises(
        CorruptFileError, match="chunk 1 of data/observation/rgb, expected checksum"
    ):
        read_envs(folder)


def without_sums(file):
    """Remove the checksums of chunks, as in blocks of earlier versions."""
    for table in ("data", "final"):
        for name in coded.CODECS:
            del file[f"{table}/observation/{name}/checksums"]


def test_older_blocks_without_checksums_of_chunks_are_read_checked_and_packed(
    folder, folders, tmp_path
):
    (tmp_path / "old").mkdir()
    for path in sorted(folder.glob("*.h5")):
        remade(path, tmp_path / "old", without_sums).replace(path)
    assert main(["verify", str(folder)]) == 0
    assert main(["pack", str(folder), str(tmp_path / "packed")]) == 0
    packed = read_header(next((tmp_path / "packed").glob("*.h5")))
    assert all(
        (table.sums >= 0).all() for tables in packed.chunks.values() for table in tables.values()
    )
    batches = [
        RolloutDataset(path, 2, device="cpu", flatten_observations=False).get_batch(20).observation
        for path in (folder, folders[0])
    ]
    assert all(torch.equal(batches[0][name], batches[1][name]) for name in ("rgb", "segments"))


def test_an_undecodable_chunk_raises_and_moves_no_cursor(folder):
    path = sorted(folder.glob("*.h5"))[0]
    header = read_header(path)
    chunks = header.chunks[DATA]["observation/rgb"]
    data = bytearray(path.read_bytes())
    start, stop = int(chunks.places[1]), int(chunks.places[2])
    data[start + 1 : stop] = b"\xff" * (stop - start - 1)
    path.write_bytes(data)
    dataset = RolloutDataset(folder, 2, device="cpu")
    before = dataset.get_batch(1) and dataset.state_dict()
    text = rf"The block '{path}' is damaged: chunk \d+ of data/observation/rgb, "
    for _ in range(2):
        with pytest.raises(CorruptFileError, match=text):
            dataset.get_batch(20)
        assert dataset.state_dict() == before


def test_flipped_bits_are_reported_or_without_effect(folders, tmp_path):
    path = sorted(folders[0].glob("*.h5"))[1]
    rng = np.random.default_rng(1)
    chosen = sorted(rng.choice(used_bytes(path), 150, replace=False).tolist())
    header = read_header(path)
    with h5py.File(path) as file:  # every kind of table of a coded component
        for name in ("offsets", "checksums", "chunks"):
            start = file[f"data/observation/rgb/{name}"].id.get_offset()
            chosen += range(start, start + 12)
    assert header.chunks
    counts = check_flips(path, tmp_path / path.name, chosen, [1])
    assert counts["CorruptFileError"] > 30


def remade(path, tmp_path, edit):
    """Return a copy of a block with other offsets or codecs and a right checksum, as an attacker
    would write it.
    """
    copy = tmp_path / path.name
    shutil.copy(path, copy)
    with h5py.File(copy, "r+") as file:
        edit(file)
        schema = json.loads(file.attrs["schema"])
        places = [
            f"{table}/{field['name']}/offsets" for table in ("data", "final") for field in schema
        ]
        about = [file.attrs[name] for name in (*ABOUT, CODECS) if name in file.attrs]
        offsets = [
            file[place][()] for place in places if place in file and file[place].size < 10**6
        ]
        file.attrs["header_crc"] = header_crc(
            file["fragments"][()], file["reward_sums"][()], about, offsets
        )
    return copy


def offset(row, part, value):
    def edit(file):
        file["data/observation/rgb/offsets"][row, part] = value

    edit.__name__ = f"offset {row} {part} {value}"
    return edit


def coding(**change):
    def edit(file):
        codings = json.loads(file.attrs[CODECS])
        codings["observation/rgb"].update(change)
        file.attrs[CODECS] = json.dumps(codings)

    edit.__name__ = f"coding {change}"
    return edit


def without_coding(file):
    codings = json.loads(file.attrs[CODECS])
    del codings["observation/rgb"]
    file.attrs[CODECS] = json.dumps(codings)


def without_codings(file):
    del file.attrs[CODECS]


def one_huge_chunk(file):
    del file["data/observation/rgb/offsets"]
    size = len(file["data/observation/rgb/chunks"])
    file["data/observation/rgb/offsets"] = np.array([[0, 0], [1 << 60, size]])


def other_checksums(file):
    del file["data/observation/rgb/checksums"]
    file["data/observation/rgb/checksums"] = np.zeros(1, np.uint32)


def other_shape(file):
    del file["data/observation/rgb/offsets"]
    file["data/observation/rgb/offsets"] = np.zeros((3, 3), np.int64)


def huge_offsets(file):
    del file["data/observation/rgb/offsets"]
    kind = h5py.h5t.NATIVE_INT64
    settings = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    settings.set_chunk((1 << 10, 2))
    h5py.h5d.create(
        file.id,
        b"data/observation/rgb/offsets",
        kind,
        h5py.h5s.create_simple((1 << 60, 2)),
        settings,
    )


def moved(part, *steps):
    """Add a number to every offset.

    Offsets may wrap around, so that their differences stay the same.
    """

    def edit(file):
        actual = file["data/observation/rgb/offsets"]
        add = np.array([sum(steps[: row + 1]) for row in range(len(actual))], object)
        wrapped = [
            (int(a) + int(b) + 2**63) % 2**64 - 2**63
            for a, b in zip(actual[:, part], add, strict=True)
        ]
        actual[:, part] = np.array(wrapped, np.int64)

    edit.__name__ = f"moved {part} {steps}"
    return edit


EDITS = [
    *(moved(1, step) for step in (1 << 20, 10**9, 1 << 60, 1 << 62, -1, -(1 << 62))),
    *(moved(part, 0, *[1 << 62] * 4) for part in (0, 1)),
    moved(1, 0, 0, (1 << 63) - (1 << 40)),
    offset(0, 0, 3),
    offset(0, 1, 5),
    offset(1, 0, 7),
    offset(1, 0, 1 << 60),
    offset(1, 1, 1 << 60),
    offset(1, 1, -1),
    offset(-1, 0, 1 << 62),
    offset(-1, 1, 1 << 62),
    offset(-1, 1, 10**6),
    offset(2, 1, 0),
    one_huge_chunk,
    other_shape,
    other_checksums,
    huge_offsets,
    coding(codec="lz5"),
    coding(codec="lz4hc"),
    coding(codec="normalized_image+lz4"),
    coding(frames_per_chunk=0),
    coding(frames_per_chunk=2),
    coding(frames_per_chunk="x"),
    coding(max_error=-1.0),
    coding(max_error=None),
    without_coding,
    without_codings,
    lambda file: file.attrs.__setitem__(CODECS, "[" * 50_000),
    lambda file: file.attrs.__setitem__(CODECS, 5),
    lambda file: file.attrs.__setitem__(
        CODECS, '{"nothing": {"codec": "lz4", "max_error": 0, "frames_per_chunk": 8}}'
    ),
]


@pytest.mark.each_value
@pytest.mark.parametrize("has_sums", [True, False])
@pytest.mark.parametrize("edit", EDITS, ids=[edit.__name__ for edit in EDITS])
def test_hostile_tables_of_chunks_raise_without_allocating_memory(
    folders, tmp_path, edit, has_sums
):
    def edits(file):
        edit(file)
        if not (has_sums or edit is other_checksums):  # an attacker leaves them out
            without_sums(file)

    path = remade(sorted(folders[0].glob("*.h5"))[0], tmp_path, edits)
    tracemalloc.start()
    with pytest.raises(CorruptFileError) as caught:
        header = open_block(path, verify=True)
        # The table may be right and its chunks damaged.
        header.read_rows(DATA, "observation/rgb", 0, 20)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert str(path) in str(caught.value) and peak < 4_000_000


def test_the_unchanged_copy_of_a_block_is_valid(folders, tmp_path):
    open_block(remade(sorted(folders[0].glob("*.h5"))[0], tmp_path, lambda file: None), verify=True)


def test_blocks_that_need_a_missing_extra_are_reported_but_not_moved(folder, monkeypatch, capsys):
    def rename(file):
        codings = json.loads(file.attrs[CODECS])
        schema = json.loads(file.attrs["schema"])
        for field in schema:
            if field["name"] == "observation/rgb":
                field["codec"] = codings[field["name"]]["codec"] = "zstd"
        file.attrs["schema"], file.attrs[CODECS] = json.dumps(schema), json.dumps(codings)

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    packers._module.cache_clear()
    for path in sorted(folder.glob("*.h5")):
        (folder / "new").mkdir(exist_ok=True)
        remade(path, folder / "new", rename).replace(path)
    shutil.rmtree(folder / "new")
    for name in ("metadata.json", ".index.npz"):
        (folder / name).unlink()
    assert main(["verify", "--repair", str(folder)]) == 0, "checksums need no package"
    assert not (folder / "damaged").exists()
    text = "codec 'zstd' needs the package zstandard. Install the extra 'codecs'"
    with pytest.raises(UsageError, match=text):
        RolloutDataset(folder, 2, device="cpu").get_batch(3)
    with pytest.raises(
        UsageError,
        match="obs_disassemble_mapping of 'rgb': codec 'zstd' needs the package zstandard",
    ):
        coded.record(folder / "other", codecs={"rgb": "zstd"})
