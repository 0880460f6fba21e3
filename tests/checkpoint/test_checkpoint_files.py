"""Checkpoint files can be read by any tool. Damaged or hostile files raise one clear error."""

from __future__ import annotations

import io
import os
import pickle
import struct
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import lz4.frame
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.checkpoints.checkpoint_files import (
    MissingCheckpointError,
    load_checkpoint,
    load_checkpoint_meta,
    load_checkpoint_parallel,
)
from storage.checkpoints.checkpoint_saver import AsyncCheckpointSaver
from storage.codecs.lz4_frames import BLOCK_BYTES, Lz4Writer, decode, scan_frames, skippable_frame
from storage.errors import (
    CorruptFileError,
    DataFileError,
    ForeignFileError,
    UnsafeFileError,
    UsageError,
)

LOADERS = [load_checkpoint, load_checkpoint_parallel]


def example() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    return {
        "w": torch.randn(1000, generator=generator),
        "mask": torch.zeros(3_000_000, dtype=torch.bool),
        "half": torch.ones(5, dtype=torch.bfloat16),
        "opt": [{"step": 3, "name": "adam"}, (1, None)],
    }


def equal(a: Any, b: Any) -> bool:
    return (
        a.keys() == b.keys()
        and a["opt"] == b["opt"]
        and all(torch.equal(a[k], b[k]) for k in ("w", "mask", "half"))
    )


class Files(dict[str, bytes]):
    """Contents by name, which hypothesis does not print."""

    __repr__ = object.__repr__


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Return the bytes of the same checkpoint, plain and compressed."""
    folder = tmp_path_factory.mktemp("saved")
    with AsyncCheckpointSaver() as saver:
        for compress in (False, True):
            saver.save_async(
                example(), folder / "a.pt", compress=compress, level=0, meta={"step": 7}
            )
    return Files((name, (folder / name).read_bytes()) for name in ("a.pt", "a.pt.lz4"))


def written(folder: Path, name: str, content: bytes) -> Path:
    (folder / name).write_bytes(content)
    return folder / name


@pytest.mark.parametrize("name", ["a.pt", "a.pt.lz4"])
@pytest.mark.parametrize("load", LOADERS)
def test_both_loaders_read_both_forms(
    tmp_path: Path, saved: dict[str, bytes], name: str, load: Any
) -> None:
    path = written(tmp_path, name, saved[name])
    assert equal(load(path), example()) and equal(load(tmp_path / "a.pt"), example())
    assert load_checkpoint_meta(tmp_path / "a.pt") == {"step": 7}


def test_other_tools_read_the_files(tmp_path: Path, saved: dict[str, bytes]) -> None:
    assert equal(torch.load(io.BytesIO(saved["a.pt"]), weights_only=True), example())
    assert equal(
        torch.load(written(tmp_path, "b.pt", saved["a.pt"]), weights_only=True, mmap=True),
        example(),
    )
    assert equal(
        torch.load(io.BytesIO(lz4.frame.decompress(saved["a.pt.lz4"])), weights_only=True),
        example(),
    )
    information = lz4.frame.get_frame_info(saved["a.pt.lz4"])
    assert information["content_checksum"] and not information["block_linked"]
    assert information["block_size"] == BLOCK_BYTES
    assert len(saved["a.pt.lz4"]) < 30_000 < len(saved["a.pt"])


def test_tensors_that_share_memory_are_stored_once(tmp_path: Path) -> None:
    weight = torch.arange(100_000.0)
    with AsyncCheckpointSaver() as saver:
        saver.save_async(
            {"encoder": weight, "tied": weight, "view": weight[10:20]}, tmp_path / "a.pt"
        )
    assert (tmp_path / "a.pt").stat().st_size < 1.1 * weight.nbytes
    loaded = load_checkpoint(tmp_path / "a.pt")
    assert loaded["tied"].data_ptr() == loaded["encoder"].data_ptr()


def test_files_of_torch_save_are_read(tmp_path: Path) -> None:
    torch.save(example(), tmp_path / "torch.pt")
    assert equal(load_checkpoint(tmp_path / "torch.pt"), example())
    assert load_checkpoint_meta(tmp_path / "torch.pt") is None
    (tmp_path / "tool.pt.lz4").write_bytes(lz4.frame.compress((tmp_path / "torch.pt").read_bytes()))
    for load in LOADERS:
        assert equal(load(tmp_path / "tool.pt"), example())


def test_load_checkpoint_reads_the_newer_of_two_files(tmp_path: Path) -> None:
    """Trap N5: also if both files have the same modification time."""
    with AsyncCheckpointSaver() as saver:
        for value in range(6):
            saver.save_async({"value": value}, tmp_path / "a.pt", compress=value % 2 == 0)
            saver.wait()
            assert load_checkpoint(tmp_path / "a.pt") == {"value": value}
    assert load_checkpoint(tmp_path / "a.pt.lz4") == {"value": 4}


def test_a_missing_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        MissingCheckpointError,
        match=r"^Neither '.*a.pt' nor '.*a.pt.lz4' exists\.",
    ):
        load_checkpoint(tmp_path / "a.pt")
    with pytest.raises(FileNotFoundError):
        load_checkpoint_meta(tmp_path / "a.pt.lz4")


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("evil",)


@pytest.mark.parametrize("compress", [False, True])
def test_only_weights_are_loaded_by_default(tmp_path: Path, compress: bool) -> None:
    """Trap N5."""
    with AsyncCheckpointSaver() as saver:
        saver.save_async({"x": Path("a")}, tmp_path / "a.pt", compress=compress, weights_only=False)
    for load in LOADERS:
        with pytest.raises(
            UnsafeFileError, match=r"not loaded by default: pathlib.*weights_only=False"
        ):
            load(tmp_path / "a.pt")
        assert load(tmp_path / "a.pt", weights_only=False) == {"x": Path("a")}
    torch.save({"x": Evil()}, tmp_path / "evil.pt")
    with pytest.raises(UnsafeFileError):
        load_checkpoint(tmp_path / "evil.pt")
    assert not Path("evil").exists()


@pytest.mark.parametrize("name", ["a.pt", "a.pt.lz4"])
@pytest.mark.parametrize("load", LOADERS)
@settings(max_examples=60)
@given(data=st.data())
def test_a_flipped_bit_is_reported_or_harmless(
    tmp_path_factory: pytest.TempPathFactory,
    saved: dict[str, bytes],
    name: str,
    load: Any,
    data: st.DataObject,
) -> None:
    content = bytearray(saved[name])
    # Both ends have headers and tables. The bytes between are mostly zeros of the mask.
    place = data.draw(
        st.integers(0, len(content) - 1) | st.integers(0, 6000) | st.integers(-4000, -1)
    )
    content[place] ^= 1 << data.draw(st.integers(0, 7))
    path = written(tmp_path_factory.mktemp("flipped"), name, content)
    try:
        actual = load(path)
    except DataFileError as error:
        assert str(error).startswith(repr(str(path)))
    else:
        assert equal(actual, example())


@pytest.mark.parametrize("name", ["a.pt", "a.pt.lz4"])
@pytest.mark.parametrize("load", LOADERS)
def test_a_truncated_file_is_reported(
    tmp_path: Path, saved: dict[str, bytes], name: str, load: Any
) -> None:
    size = len(saved[name]) - (len(skippable_frame(b'{"step": 7}')) if name.endswith("lz4") else 0)
    for stop in sorted(
        {0, 1, 3, 4, 7, 20, 100, size // 3, size // 2, size - 5, size - 4, size - 1}
    ):
        with pytest.raises(DataFileError, match=rf"^'{tmp_path / name}' "):
            load(written(tmp_path, name, saved[name][:stop]))


def hostile() -> dict[str, bytes]:
    def header(source_size: int = 0) -> bytes:
        return lz4.frame.LZ4FrameCompressor(block_size=7, block_linked=False).begin(
            source_size=source_size
        )

    plain = lz4.frame.compress(b"a" * 10_000, block_size=7)
    return {
        "content of 2^60 bytes": header(source_size=1 << 60) + plain[7:],
        "a block of 2^31 - 1 bytes": header() + b"\xff\xff\xff\x7f" + b"x" * 100,
        "a block outside the file": header() + b"\x00\x00\x10\x00" + b"x" * 100,
        "a block that is no LZ4": header() + b"\x08\x00\x00\x00" + b"\xff" * 8 + bytes(4),
        "a block that copies from before its start": header()
        + b"\x05\x00\x00\x00"
        + b"\x0f\xff\xff\x01\x50"
        + bytes(4),
        "a frame that never ends": header() + b"\x04\x00\x00\x80abcd" * 1000,
        "a skipped frame of 4 GiB": plain + b"\x50\x2a\x4d\x18\xff\xff\xff\xffabc",
        "a frame of zeros that is no zip": plain,
        "a reserved block size": b"\x04\x22\x4d\x18\x60\x10\x00" + bytes(50),
        "no content": header() + bytes(4),
    }


@pytest.mark.parametrize("name", hostile())
@pytest.mark.parametrize("load", LOADERS)
def test_a_hostile_frame_raises_without_allocating_memory(
    tmp_path: Path, name: str, load: Any
) -> None:
    path = written(tmp_path, "a.pt.lz4", hostile()[name])
    tracemalloc.start()
    try:
        with pytest.raises(DataFileError, match=r"^'.*a.pt.lz4' (is|needs|starts|cannot) .*\.$"):
            load(path)
        # One block and the buffer of a zip reader, far less than the declared size.
        assert tracemalloc.get_traced_memory()[1] < 30 << 20
    finally:
        tracemalloc.stop()


def zip64_of(size: int) -> bytes:
    """Return an archive whose single member declares `size` bytes."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({}))
        archive.infolist()[0].file_size = archive.infolist()[0].compress_size = size
    return out.getvalue()


@pytest.mark.parametrize("size", [1 << 60, 1 << 33, 1 << 20, 0])
def test_a_hostile_archive_raises_one_clear_error(tmp_path: Path, size: int) -> None:
    path = written(tmp_path, "a.pt", zip64_of(size))
    with pytest.raises(CorruptFileError, match=r"^'.*a.pt' is truncated or damaged: "):
        load_checkpoint(path)


def test_an_archive_member_outside_the_file_raises_one_clear_error(
    tmp_path: Path, saved: dict[str, bytes]
) -> None:
    content = saved["a.pt"]
    end = content.rfind(b"PK\x05\x06")
    size, place = struct.unpack_from("<II", content, end + 12)
    for moved in (1, 64, 1 << 20):
        # If a directory declares a later start, every member begins before the file.
        directory = (
            content[: end + 12] + struct.pack("<II", size, place + moved) + content[end + 20 :]
        )
        path = written(tmp_path, "x", directory)
        for load in (*LOADERS, load_checkpoint_meta):
            with pytest.raises(DataFileError, match=rf"^{str(path)!r} is truncated or damaged"):
                load(path)


def test_a_compressed_archive_member_raises(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "bomb.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(1 << 24))
    with pytest.raises(CorruptFileError, match=r"member 'archive/data.pkl' has 16777216 bytes"):
        load_checkpoint(tmp_path / "bomb.pt")


def test_a_pickle_that_declares_a_too_large_storage_raises(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(10)}, tmp_path / "a.pt")
    for size in (11, 1 << 20, 1 << 60):
        with (
            zipfile.ZipFile(tmp_path / "a.pt") as source,
            zipfile.ZipFile(tmp_path / "b.pt", "w") as target,
        ):
            for member in source.infolist():
                content = source.read(member)
                if member.filename.endswith("data.pkl"):
                    # The number of values in the storage, and the tensor's length.
                    number = pickle.dumps(size, 2)[2:-1]
                    assert content.count(b"K\n") == 2
                    content = content.replace(b"K\n", number)
                target.writestr(member.filename, content)
        with pytest.raises(DataFileError, match=r"^'.*b.pt' "):
            load_checkpoint(tmp_path / "b.pt")


@pytest.mark.parametrize(
    "content",
    [b"", b"\x80\x02junk", b"\x80\x02.", b"\x80\x02r\xff\xff\xff\x7f.", b"\x80\x02h\x05."],
)
@pytest.mark.parametrize("weights_only", [True, False])
def test_an_invalid_pickle_raises_one_clear_error(
    tmp_path: Path, content: bytes, weights_only: bool
) -> None:
    torch.save({"w": torch.ones(10)}, tmp_path / "a.pt")
    with (
        zipfile.ZipFile(tmp_path / "a.pt") as source,
        zipfile.ZipFile(tmp_path / "b.pt", "w") as target,
    ):
        for member in source.infolist():
            target.writestr(
                member.filename,
                content if member.filename.endswith("data.pkl") else source.read(member),
            )
    with pytest.raises(DataFileError, match=r"^'.*b.pt' (is|contains|cannot) .*: ."):
        load_checkpoint(tmp_path / "b.pt", weights_only=weights_only)


@pytest.mark.parametrize(
    "content", [b"", b"abc", b"hello world, this is no checkpoint", bytes(100)]
)
def test_a_file_of_another_format_raises(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(
        ForeignFileError, match=r"A checkpoint is a zip archive of torch.save or an LZ4 frame"
    ):
        load_checkpoint(written(tmp_path, "a.pt", content))


@pytest.mark.parametrize("num_threads", [0, True, 1.5])
def test_the_number_of_threads_is_checked(num_threads: Any) -> None:
    with pytest.raises(UsageError, match=r"num_threads must be .*>= 1"):
        load_checkpoint_parallel("a.pt", num_threads=num_threads)


@settings(max_examples=30)
@given(
    sizes=st.lists(
        st.sampled_from([0, 1, 1000, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1]), max_size=3
    ),
    level=st.sampled_from([0, 3, 16]),
    is_noise=st.booleans(),
)
def test_a_stream_of_any_parts_is_one_lz4_frame(
    sizes: list[int], level: int, is_noise: bool
) -> None:
    content = [
        os.urandom(size) if is_noise else bytes([place]) * size for place, size in enumerate(sizes)
    ]
    out = io.BytesIO()
    with Lz4Writer(out, level) as writer:
        for part in content:
            buffer = bytearray(part)
            assert writer.write(buffer) == len(part)
            buffer[:] = b"x" * len(buffer)  # the caller may change written tensors
    assert lz4.frame.decompress(out.getvalue()) == b"".join(content)
    data = memoryview(out.getvalue() + skippable_frame(b"more"))
    frames = scan_frames(data, "test")
    for num_threads in (1, 3):
        assert decode(data, frames, "test", num_threads).tobytes() == b"".join(content)


@pytest.mark.parametrize("block_size", [4, 5, 6, 7])
@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize("checksums", [False, True])
def test_lz4_frames_of_other_writers_are_decoded(
    block_size: int, linked: bool, checksums: bool
) -> None:
    content = torch.arange(300_000).numpy().tobytes()
    options: dict[str, Any] = {
        "block_size": block_size,
        "block_linked": linked,
        "block_checksum": checksums,
    }
    compressor = lz4.frame.LZ4FrameCompressor(
        **options, content_checksum=checksums, auto_flush=True
    )
    flushed = (
        compressor.begin() + compressor.compress(content[:999]) + compressor.compress(content[999:])
    )
    whole = lz4.frame.compress(content, **options, content_checksum=checksums, store_size=True)
    data = memoryview(whole + flushed + compressor.flush())
    for num_threads in (1, 2):
        assert (
            decode(data, scan_frames(data, "test"), "test", num_threads).tobytes()
            == content + content
        )


def test_a_write_error_of_the_file_is_raised_unchanged() -> None:
    class Full(io.RawIOBase):
        num_left = 1

        def write(self, data: Any) -> int:
            self.num_left -= 1
            if self.num_left < 0:
                raise OSError(28, "No space left on device")
            return len(data)

    with pytest.raises(OSError, match="No space left"), Lz4Writer(Full()) as writer:
        for _ in range(10):
            writer.write(bytes(BLOCK_BYTES))


@pytest.mark.parametrize("path", [5, None, b"file", ["file"]])
def test_a_value_that_is_not_a_path_raises(path: Any) -> None:
    for load in (load_checkpoint, load_checkpoint_parallel, load_checkpoint_meta):
        with pytest.raises(
            UsageError, match=r"^load_checkpoint.*: path must be a str or a path object, got "
        ):
            load(path)
    with AsyncCheckpointSaver() as saver:
        with pytest.raises(
            UsageError, match=r"save_async: path must be a str or a path object, got "
        ):
            saver.save_async({}, path)
        assert saver.num_pending == 0
