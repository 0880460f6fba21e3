"""Pictures are decoded to the encoded values.

Damaged, wrong-sized and too large pictures are rejected by their header.
"""

import io
import zlib
from pathlib import Path

import numpy as np
import pytest

from rollout_data.formats.encoded_images import decode_picture, encode_picture, picture_format
from rollout_data.formats.input_checks import file_inside, read_object
from storage.errors import CorruptFileError, UnsafeFileError

Image = pytest.importorskip("PIL.Image", reason="the extra `formats` is missing")


def made(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    return (np.arange(np.prod(shape)).reshape(shape) * 3 % 251).astype(dtype)


def saved(mode: str, kind: str, size: tuple[int, int] = (10, 8), **options: object) -> bytes:
    out = io.BytesIO()
    Image.new(mode, size).save(out, kind, **options)
    return out.getvalue()


@pytest.mark.parametrize(
    ("shape", "dtype", "kind"),
    [
        ((8, 10, 1), "uint8", "PNG"),
        ((8, 10, 3), "uint8", "PNG"),
        ((8, 10, 4), "uint8", "PNG"),
        ((1, 1, 3), "uint8", "PNG"),
        ((8, 10), "uint16", "TIFF"),
        ((8, 10), "float32", "TIFF"),
    ],
)
def test_a_picture_is_decoded_unchanged(shape: tuple[int, ...], dtype: str, kind: str) -> None:
    pixels = made(shape, dtype)
    data = encode_picture(pixels)
    assert picture_format(data) == kind
    for expected in (shape, None):
        got = decode_picture(data, "", expected)
        assert got.dtype == pixels.dtype
        np.testing.assert_array_equal(got, pixels)


@pytest.mark.parametrize("mode", ["1", "P", "LA", "CMYK", "YCbCr"])
def test_other_colours_become_rgb(mode: str) -> None:
    kind = "JPEG" if mode in ("CMYK", "YCbCr") else "PNG"
    assert decode_picture(saved(mode, kind), "", (8, 10, 3)).dtype == np.uint8


def test_grey_becomes_rgb_only_if_three_channels_are_declared() -> None:
    grey = encode_picture(made((8, 10, 1), "uint8"))
    assert (decode_picture(grey, "", (8, 10, 3)) == made((8, 10, 1), "uint8")).all()
    assert decode_picture(grey, "").shape == (8, 10, 1)
    with pytest.raises(CorruptFileError, match="expected shape"):
        decode_picture(encode_picture(made((8, 10, 3), "uint8")), "", (8, 10, 1))


def test_big_endian_depth_is_delivered_in_this_machines_order() -> None:
    data = bytearray(encode_picture(made((8, 10), "uint16")))
    head = b"MM\0*" + (8).to_bytes(4, "big") + (7).to_bytes(2, "big")
    tags = [(256, 10), (257, 8), (258, 16), (259, 1), (262, 1), (273, 98), (279, 160)]
    entries = b"".join(
        tag.to_bytes(2, "big") + b"\0\4\0\0\0\1" + value.to_bytes(4, "big") for tag, value in tags
    )
    data = bytearray(head + entries + b"\0\0\0\0")
    assert len(data) == 98
    got = decode_picture(bytes(data) + made((8, 10), ">u2").tobytes(), "", (8, 10))
    assert got.dtype == np.dtype("uint16")
    np.testing.assert_array_equal(got, made((8, 10), "uint16"))


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")  # pillow's word for cut tags of a TIFF
def test_every_truncated_picture_is_refused() -> None:
    for data in (
        encode_picture(made((8, 10, 3), "uint8")),
        encode_picture(made((8, 10), "uint16")),
    ):
        pixels = decode_picture(data, "")
        for length in range(len(data)):
            try:
                got = decode_picture(data[:length], "frame 3 of 'x'")
            except CorruptFileError as error:
                assert "frame 3 of 'x'" in str(error)
            else:  # what is missing is not of the pixels
                np.testing.assert_array_equal(got, pixels)


def test_a_declared_size_allocates_no_memory() -> None:
    ihdr = b"IHDR" + (30_000).to_bytes(4, "big") * 2 + bytes([8, 2, 0, 0, 0])
    bomb = b"\x89PNG\r\n\x1a\n\0\0\0\r" + ihdr + zlib.crc32(ihdr).to_bytes(4, "big")
    for shape in (None, (8, 10, 3)):
        with pytest.raises(CorruptFileError):
            decode_picture(bomb + b"\0\0\0\0IEND\xaeB`\x82", "", shape)
    with pytest.raises(CorruptFileError, match="pixels, expected at most 67108864"):
        decode_picture(saved("1", "PNG", (8193, 8193)), "")
    with pytest.raises(CorruptFileError, match="8 x 10 pixels, expected 9 x 10"):
        decode_picture(saved("L", "PNG"), "", (9, 10, 1))


def test_other_kinds_of_files_are_refused() -> None:
    with pytest.raises(CorruptFileError, match="PNG, JPEG or TIFF"):
        decode_picture(saved("RGB", "BMP"), "")
    with pytest.raises(CorruptFileError, match="a compressed TIFF"):
        decode_picture(saved("L", "TIFF", compression="tiff_lzw"), "")


def test_a_file_name_cannot_leave_its_folder(tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "set", tmp_path / "elsewhere"
    root.mkdir()
    elsewhere.write_text("{}")
    (root / "own").write_text("{}")
    (root / "link").symlink_to(elsewhere)
    (root / "good").symlink_to(root / "own")
    assert read_object(file_inside(root, "good")) == {}
    for name in ("../elsewhere", str(elsewhere), "link", "x/../../elsewhere", ".", "own\0"):
        with pytest.raises(UnsafeFileError):
            file_inside(root, name)
    with pytest.raises(CorruptFileError, match="is missing"):
        file_inside(root, "other")


def test_a_snapshot_of_the_hub_may_link_to_its_blobs(tmp_path: Path) -> None:
    root = tmp_path / "datasets--a--b" / "snapshots" / "0123"
    for folder in (root, root.parents[1] / "blobs", tmp_path / "blobs"):
        folder.mkdir(parents=True)
        (folder / "blob").write_text("{}")
    (root / "link").symlink_to(root.parents[1] / "blobs" / "blob")
    (root / "out").symlink_to(tmp_path / "blobs" / "blob")
    assert file_inside(root, "link").is_file()
    with pytest.raises(UnsafeFileError):
        file_inside(root, "out")


@pytest.mark.parametrize("text", ["", "[1]", "{", "nope", "[" * 100_000, '{"a": "\\ud8"}'])
def test_a_file_that_is_not_a_json_object_raises(tmp_path: Path, text: str) -> None:
    path = tmp_path / "info.json"
    path.write_text(text)
    with pytest.raises(CorruptFileError):
        read_object(path)


def test_nan_and_infinity_as_written_by_python_are_read(tmp_path: Path) -> None:
    path = tmp_path / "info.json"
    path.write_text('{"low": -Infinity, "crc32": "kept"}')
    assert read_object(path) == {"low": -np.inf, "crc32": "kept"}
