"""Damaged and hostile blocks are reported with their defect.

They are never returned as data, and never end the process.
"""

from __future__ import annotations

import multiprocessing
import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest

from rollout_data.blocks.block_header import ABOUT, BlockHeader, header_crc, open_block
from rollout_data.writing.rollout_writer import RolloutWriter
from storage.errors import (
    CorruptFileError,
    DataFileError,
    ForeignFileError,
    RolloutDataError,
    UnsafeFileError,
)


@pytest.fixture(scope="module")
def block(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("block")
    with RolloutWriter(folder, 2, writer_name="w", durable=False) as writer:
        for t in range(3):
            image = np.full((2, 33, 32), t, np.float32)
            writer.add(
                observation={"state": np.full((2, 3), t, np.float32), "image": image},
                action=np.full(2, t),
                reward=np.full(2, t, np.float32),
                done=[t == 1, False],
                final_observation={"state": np.full((2, 3), 9, np.float32), "image": image},
            )
    return folder / "rollout_w_000000.h5"


def content(header: BlockHeader) -> tuple:
    """Return everything that a reader reads from a block."""
    rows = [
        header.read_rows(table, column, 0, num_rows).tobytes()
        for table, columns in header.locations.items()
        for column, (_, num_rows) in columns.items()
    ]
    about = (
        header.schema,
        header.writer,
        header.sequence,
        header.fragments.tobytes(),
        header.reward_sums.tobytes(),
    )
    return (*about, *rows)


def outcome(path: Path, good: tuple) -> str:
    try:
        got = content(open_block(path, verify=True))
    except RolloutDataError as error:
        assert str(path) in str(error), "the text names the file"
        return type(error).__name__
    return "same" if got == good else "different"


def used_bytes(path: Path) -> list[int]:
    """Return positions of a file outside of long runs of zeros."""
    data = np.fromfile(path, np.uint8)
    near = np.convolve(data != 0, np.ones(9), "same") > 0
    return np.flatnonzero(near).tolist()


def check_flips(path: Path, work: Path, positions: list[int], bits: list[int]) -> dict[str, int]:
    good = content(open_block(path, verify=True))
    data = bytearray(path.read_bytes())
    counts: dict[str, int] = {}
    for position in positions:
        for bit in bits:
            data[position] ^= 1 << bit
            work.write_bytes(data)
            data[position] ^= 1 << bit
            actual = outcome(work, good)
            counts[actual] = counts.get(actual, 0) + 1
            assert actual != "different", f"bit {bit} of byte {position} was returned as data"
    return counts


def test_flipped_bits_are_reported_or_without_effect(block, tmp_path):
    rng = np.random.default_rng(0)
    positions = used_bytes(block)
    chosen = sorted(rng.choice(positions, 200, replace=False).tolist())
    counts = check_flips(block, tmp_path / block.name, chosen, [int(rng.integers(8))])
    assert counts["CorruptFileError"] > 16


def test_flipped_bits_of_every_row_are_reported(block, tmp_path):
    header = open_block(block)
    (offset, num_rows), layout = header.locations["data"]["frames"], header.layouts["data"]
    end = offset + num_rows * layout.columns["frames"].row_bytes
    counts = check_flips(block, tmp_path / block.name, list(range(offset, end)), [3])
    assert counts == {"DamagedRowsError": end - offset}


def test_truncation_at_any_length_is_reported(block, tmp_path):
    good, data = content(open_block(block)), block.read_bytes()
    lengths = sorted({0, 1, 7, 8, 100, *range(0, len(data), 1999), len(data) - 1})
    header = open_block(block)
    ends = [offset + rows * header.layouts[table].columns[name].row_bytes
            for table, columns in header.locations.items() for name, (offset, rows) in columns.items()]  # fmt: skip
    for length in [*lengths, *(end - 1 for end in ends)]:
        (tmp_path / block.name).write_bytes(data[:length])
        assert outcome(tmp_path / block.name, good) in ("CorruptFileError", "ForeignFileError"), (
            length
        )


def heap_headers(data: bytes) -> list[int]:
    """Return positions of the header of the heap of texts, and of the headers of its objects."""
    heap = data.index(b"GCOL")
    size, at, actual = int.from_bytes(data[heap + 8 : heap + 16], "little"), 16, list(range(16))
    while at + 16 <= size:
        actual += range(at, at + 16)
        is_free = data[heap + at : heap + at + 2] == b"\0\0"
        num_bytes = int.from_bytes(data[heap + at + 8 : heap + at + 16], "little")
        at += num_bytes if is_free else 16 + -(-num_bytes // 8) * 8
    return [heap + item for item in actual]


def test_flipped_bits_of_the_global_heap_never_hang_a_reader(block, tmp_path):
    """HDF5 may follow wrong sizes in it without end, so the reader runs in a process with a time
    limit.
    """
    positions = heap_headers(block.read_bytes())
    assert len(positions) > 16 * 4, "an object for each text, and the rest"
    arguments = (block, tmp_path / block.name, positions, list(range(8)))
    process = multiprocessing.get_context("fork").Process(target=check_flips, args=arguments)
    process.start()
    process.join(150)
    is_waiting = process.is_alive()
    process.kill()
    process.join()
    assert not is_waiting and process.exitcode == 0


def test_a_block_with_sizes_of_less_than_8_bytes_raises(tmp_path):
    settings = h5py.h5p.create(h5py.h5p.FILE_CREATE)
    settings.set_sizes(8, 4)
    file = h5py.h5f.create(str(tmp_path / "x.h5").encode(), fcpl=settings)
    with h5py.File(file) as opened:
        opened.attrs["format"] = "rollout-data"
    with pytest.raises(
        CorruptFileError, match="it has HDF5 offsets of 8 bytes and lengths of 4 bytes, expected 8"
    ):
        open_block(tmp_path / "x.h5")


def test_a_huge_global_heap_raises_before_it_is_read(tmp_path):
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        file.attrs["format"] = "a" * (2 << 20)
    with pytest.raises(
        CorruptFileError, match=r"has a text of 2.* bytes, expected at most 1048576"
    ):
        open_block(path)


def change(block: Path, tmp_path: Path, edit) -> Path:
    path = tmp_path / block.name
    shutil.copy(block, path)
    with h5py.File(path, "r+") as file:
        edit(file)
    return path


def replace(file: h5py.File, name: str, **options) -> None:
    del file[name]
    file.create_dataset(name, **options)


def soft_link(file):
    del file["data/frames"]
    file["data/frames"] = h5py.SoftLink("/final/frames")


def link_to_other_file(file):
    del file["data"]
    file["data"] = h5py.ExternalLink("/etc/passwd", "/")


def external_storage(file):
    dtype, shape = file["data/frames"].dtype, file["data/frames"].shape
    replace(
        file,
        "data/frames",
        shape=shape,
        dtype=dtype,
        external=[("/etc/passwd", 0, h5py.h5f.UNLIMITED)],
    )


def virtual_storage(file):
    dtype, shape = file["data/frames"].dtype, file["data/frames"].shape
    del file["data/frames"]
    layout = h5py.VirtualLayout(shape, dtype)
    layout[:] = h5py.VirtualSource("/etc/passwd", "x", shape)
    file.create_virtual_dataset("data/frames", layout)


def huge_table(file):
    replace(file, "fragments", shape=(1 << 54,), dtype=file["fragments"].dtype, chunks=(1,))


def huge_contiguous_table(file):
    settings = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    settings.set_layout(h5py.h5d.CONTIGUOUS)
    settings.set_alloc_time(h5py.h5d.ALLOC_TIME_LATE)
    del file["reward_sums"]
    space = h5py.h5s.create_simple((1 << 57,))
    h5py.h5d.create(file.id, b"reward_sums", h5py.h5t.IEEE_F64LE, space, settings)


def huge_column(file):
    dtype = file["data/frames"].dtype
    settings = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    settings.set_layout(h5py.h5d.CONTIGUOUS)
    settings.set_alloc_time(h5py.h5d.ALLOC_TIME_LATE)
    del file["data/frames"]
    space = h5py.h5s.create_simple(((1 << 60) // dtype.itemsize,))
    h5py.h5d.create(
        file.id, b"data/frames", h5py.h5t.py_create(dtype, logical=True), space, settings
    )


def compressed_bomb(file):
    table = file["fragments"][()]
    replace(file, "fragments", data=np.repeat(table, 100_000), compression="gzip")


def object_strings(file):
    replace(file, "reward_sums", data=["a", "b"], dtype=h5py.string_dtype())


def sign(file):
    """Write the right checksum of a changed header, as an attacker would do."""
    about = [file.attrs[name] for name in ABOUT]
    file.attrs["header_crc"] = header_crc(file["fragments"][()], file["reward_sums"][()], about)


def set_attribute(name, value):
    def edit(file):
        file.attrs[name] = value
        sign(file)

    edit.__name__ = f"{name}_{str(value)[:12]}"
    return edit


def wrong_fragment(member, value):
    def edit(file):
        table = file["fragments"][()]
        table[member][0] = value
        file["fragments"][...] = table
        sign(file)

    edit.__name__ = f"{member}_{value}"
    return edit


HOSTILE = [
    (soft_link, UnsafeFileError),
    (link_to_other_file, UnsafeFileError),
    (external_storage, UnsafeFileError),
    (virtual_storage, UnsafeFileError),
    (huge_table, CorruptFileError),
    (huge_contiguous_table, CorruptFileError),
    (huge_column, CorruptFileError),
    (compressed_bomb, CorruptFileError),
    (object_strings, CorruptFileError),
    (set_attribute("version", 2), ForeignFileError),
    (set_attribute("version", "x"), CorruptFileError),
    (set_attribute("format", "other"), ForeignFileError),
    (set_attribute("format", np.arange(3)), DataFileError),
    (set_attribute("schema", "["), CorruptFileError),
    (set_attribute("schema", "[" * 50_000), CorruptFileError),
    (
        set_attribute("schema", '[{"name": "a", "shape": [9999999999999], "dtype": "float64"}]'),
        CorruptFileError,
    ),
    (set_attribute("schema", '[{"name": "a", "shape": [-1], "dtype": "float64"}]'), DataFileError),
    (set_attribute("schema", '[{"name": "a", "shape": [2], "dtype": "object"}]'), DataFileError),
    (
        set_attribute("schema", '[{"name": "a", "shape": [2], "dtype": "float32", "codec": "x"}]'),
        DataFileError,
    ),
    (set_attribute("schema", "{}"), CorruptFileError),
    (set_attribute("schema", 5), CorruptFileError),
    (set_attribute("writer", np.arange(4)), CorruptFileError),
    (set_attribute("sequence", -3), CorruptFileError),
    (wrong_fragment("row", 1 << 62), CorruptFileError),
    (wrong_fragment("row", -1), CorruptFileError),
    (wrong_fragment("length", 1 << 62), CorruptFileError),
    (wrong_fragment("length", -1), CorruptFileError),
    (wrong_fragment("final_row", 7), CorruptFileError),
    (wrong_fragment("final_row", -2), CorruptFileError),
    (wrong_fragment("start", -1), CorruptFileError),
    (wrong_fragment("env", -1), CorruptFileError),
    (wrong_fragment("trajectory", -5), CorruptFileError),
]


@pytest.mark.parametrize(("edit", "kind"), HOSTILE, ids=[edit.__name__ for edit, _ in HOSTILE])
def test_a_hostile_block_raises(block, tmp_path, edit, kind):
    path = change(block, tmp_path, edit)
    with pytest.raises(kind) as caught:
        open_block(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "data", [b"", b"hello", b"\x89HDF\r\n\x1a\n", b"\x89HDF\r\n\x1a\n" + bytes(500), bytes(10_000)]
)
def test_a_file_that_is_not_a_block_raises(tmp_path, data):
    path = tmp_path / "rollout_a_000000.h5"
    path.write_bytes(data)
    with pytest.raises(DataFileError, match=r"rollout_a_000000\.h5"):
        open_block(path)


def test_a_plain_hdf5_file_is_reported_as_foreign(tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["data"] = np.arange(3)
    with pytest.raises(ForeignFileError, match="has format None, expected 'rollout-data'"):
        open_block(tmp_path / "x.h5")


def test_a_missing_block_raises_as_missing(tmp_path):
    with pytest.raises(FileNotFoundError):
        open_block(tmp_path / "x.h5")


def test_reading_needs_little_memory_whatever_a_file_declares(block, tmp_path):
    """The reader runs in a process with 2 GiB more address space than it uses."""
    paths = []
    for edit in (huge_table, huge_contiguous_table, huge_column, compressed_bomb):
        (tmp_path / edit.__name__).mkdir()
        paths.append(change(block, tmp_path / edit.__name__, edit))
    process = multiprocessing.get_context("fork").Process(
        target=_open_all_in_little_memory, args=(paths,)
    )
    process.start()
    process.join(150)
    assert process.exitcode == 0


def _open_all_in_little_memory(paths: list[Path]) -> None:
    import resource

    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (2 << 30),) * 2)
    for path in paths:
        with pytest.raises(CorruptFileError):
            open_block(path)
