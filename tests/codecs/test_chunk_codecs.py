"""Chunks are decoded to the encoded frames, bit by bit for lossless chains.

Damage raises one clear error.
"""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.codecs import lz4_frames as lz4
from storage.codecs.codec_chains import (
    AUTO,
    STAGES,
    check_codec,
    choose_codec,
    chunk_codec,
    chunk_frames,
    find_codec,
    stored_field,
)
from storage.codecs.codec_stages import (
    IMAGE_MAX_ERROR,
    decode_image,
    encode_image,
    image_error,
    scratch_bytes,
    shuffle,
    shuffled_bytes,
    unshuffle,
)
from storage.codecs.packers import PACKERS
from storage.core.fields import Field
from storage.errors import CorruptFileError, FieldTypeError, UsageError
from tests.codecs.chains import LOSSLESS, frames, same_bits, smooth


def decoded(name: str, chunk: bytes, like: np.ndarray) -> np.ndarray:
    out = np.full(like.shape, 7).astype(like.dtype)
    chunk_codec(name).decode(np.frombuffer(chunk, np.uint8), out)
    return out


@pytest.mark.parametrize("name", LOSSLESS)
@settings(max_examples=15)
@given(array=frames())
def test_lossless_chains_restore_every_bit(name, array):
    chunk, error = chunk_codec(name).encode(array)
    assert error == 0 and chunk_codec(name).is_lossless
    assert same_bits(decoded(name, chunk, array), array)
    assert len(chunk) <= array.nbytes + 1, "what does not shrink is stored plain"


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", ["u1", "<f4"])
@pytest.mark.parametrize("packer", STAGES["packer"])
def test_no_chunk_exceeds_the_maximal_expansion_of_its_codec(packer, dtype):
    pytest.importorskip(PACKERS[packer].module or "lz4")
    for name in (packer, f"shuffle+{packer}", *([f"uint16+{packer}"] if dtype == "<f4" else [])):
        for size in (1 << 16, 5 << 20, 20 << 20):
            black = np.zeros((1, size // np.dtype(dtype).itemsize), dtype)
            chunk, _ = chunk_codec(name).encode(black)
            assert black.nbytes <= chunk_codec(name).max_expansion * len(chunk)
            assert same_bits(decoded(name, chunk, black), black)


@given(
    st.sampled_from(["shuffle", "split", "bitshuffle"]),
    st.sampled_from([1, 2, 4, 8]),
    st.binary(max_size=2000),
)
def test_shuffles_are_permutations_of_bytes_or_bits(name, size, data):
    items = np.frombuffer(data[: len(data) // size * size], f"u{size}")
    shuffled = shuffle(name, items)
    assert len(shuffled) == shuffled_bytes(name, len(items), size)
    assert np.unpackbits(shuffled).sum() == np.unpackbits(items.view(np.uint8)).sum()
    out = np.empty_like(items)
    unshuffle(name, shuffled, out, np.empty(scratch_bytes(len(shuffled)), np.uint8))
    assert same_bits(out, items)


def test_byte_planes_are_stored_one_after_the_other():
    items = np.array([0x03020100, 0x13121110], "<u4")
    assert shuffle("shuffle", items).tobytes().hex() == "00100111" + "02120313"
    assert shuffle("split", items).tobytes().hex() == "00011011" + "02120313"


def test_a_bit_plane_of_equal_bits_is_one_run():
    planes = shuffle("bitshuffle", np.full(64, 0b101, np.uint8)).reshape(8, 8)
    assert [set(plane.tolist()) for plane in planes] == [{255}, {0}, {255}, *[{0}] * 5]


@pytest.mark.parametrize("dtype", ["<f2", "<f4", "<f8"])
@pytest.mark.parametrize(
    "name", ["uint16", "uint16+lz4", "uint16+shuffle+lz4", "uint16+delta+bitshuffle+lz4hc"]
)
def test_linear_counts_lose_half_a_step_and_report_it(name, dtype):
    array = (3 * smooth(5, (7, 9), dtype)).astype(dtype)
    chunk, error = chunk_codec(name).encode(array)
    back = decoded(name, chunk, array)
    assert not chunk_codec(name).is_lossless
    actual = np.abs(back.astype(np.float64) - array.astype(np.float64)).max()
    step = float(array.max() - array.min()) / 65535
    assert error == actual <= 0.5 * step + 2 * float(np.spacing(np.abs(array).max()))


@settings(max_examples=200)
@given(st.lists(st.floats(width=32), min_size=1, max_size=40))
def test_linear_counts_measure_their_error_for_any_floats(values):
    array = np.array(values, np.float32)[:, None]
    chunk, error = chunk_codec("uint16+lz4").encode(array)
    back = decoded("uint16+lz4", chunk, array)
    finite = np.isfinite(array)
    assert same_bits(back[np.isinf(array)], array[np.isinf(array)])
    assert (np.isnan(back) == np.isnan(array)).all()
    if finite.any():
        assert (
            np.abs(back[finite].astype(np.float64) - array[finite].astype(np.float64)).max()
            == error
        )
        width = float(array[finite].max()) - float(array[finite].min())
        rounding = 4 * 2.0**-24 * float(np.abs(array[finite].astype(np.float64)).max())
        assert error <= 0.5001 * width / 65532 + rounding + 1e-37


def test_a_codec_with_a_range_clips_values_outside():
    array = np.array([[0.0, 0.0012, 70.0, -1.0]], np.float32)
    chunk, error = chunk_codec("uint16(0,65.535)+lz4").encode(array)
    back = decoded("uint16(0,65.535)+lz4", chunk, array)
    np.testing.assert_allclose(back, [[0, 0.001, 65.535, 0]], atol=1e-5)
    assert error == np.abs(back.astype(np.float64) - array).max() and error > 4


def test_images_round_to_nearest_and_all_counts_are_exact_both_ways():
    counts = torch.arange(256, dtype=torch.uint8)
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        assert torch.equal(encode_image(decode_image(counts, dtype)), counts)
    values = torch.linspace(0, 1, 10001, dtype=torch.float64)
    assert image_error(values) <= IMAGE_MAX_ERROR + 1e-7
    assert torch.equal(
        encode_image(torch.tensor([0.5 / 255 + 1e-4, 0.5 / 255 - 1e-4])),
        torch.tensor([1, 0]).byte(),
    )
    assert torch.equal(encode_image(counts), counts) and torch.equal(
        decode_image(counts, torch.uint8), counts
    )
    assert image_error(torch.tensor([1.5])) == 0.5 and image_error(
        torch.tensor([float("nan")])
    ) == float("inf")


@pytest.mark.parametrize(
    ("dtype", "rounding"), [("bfloat16", 2**-9), ("float16", 2**-12), ("float32", 2**-25)]
)
def test_images_differ_by_half_a_level_and_the_rounding_of_their_dtype(dtype, rounding):
    if dtype == "float32":
        values = (torch.arange(255) + 0.5).div(255)
    else:  # every possible value
        values = torch.arange(1 << 16).to(torch.int32).to(torch.int16).view(getattr(torch, dtype))
        values = values[(values >= 0) & (values <= 1)]
    assert 0.4 / 255 < image_error(values) <= IMAGE_MAX_ERROR + rounding
    for name in ("normalized_image", "normalized_image+lz4"):
        assert find_codec(name).max_error == IMAGE_MAX_ERROR


@pytest.mark.parametrize("bits", [0x7FA00000, 0xFFA00001])
def test_a_signalling_nan_is_a_nan_without_a_warning(bits):
    array = np.array([[bits, 0x3F800000]], np.uint32).view(np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        chunk, error = chunk_codec("uint16+lz4").encode(array)
        back = decoded("uint16+lz4", chunk, array)
    assert error == 0 and np.isnan(back[0, 0]) and back[0, 1] == 1


@pytest.mark.parametrize(
    "name", [name for name in LOSSLESS if name.split("+")[-1] in PACKERS] + ["uint16+split+lz4"]
)
def test_damaged_chunks_raise_or_fill_exactly_the_output(name):
    array = smooth(4, (8, 8), "<f4")
    chunk, _ = chunk_codec(name).encode(array)
    rng = np.random.default_rng(0)
    with pytest.raises(CorruptFileError, match="the header of the chunk is damaged: b''"):
        decoded(name, b"", array)
    for cut in rng.integers(1, len(chunk), 10):
        with pytest.raises(CorruptFileError, match=r"^the .*(chunk|block|frame) .*\.$"):
            decoded(name, chunk[:cut], array)
    guard = np.zeros((3, *array.shape), array.dtype)
    for place in rng.integers(0, len(chunk), 60):
        bad = bytearray(chunk)
        bad[place] ^= 1 << int(rng.integers(8))
        try:
            chunk_codec(name).decode(np.frombuffer(bad, np.uint8), guard[1])
        except CorruptFileError:
            pass
        assert not guard[0].any() and not guard[2].any(), "nothing is written beside the output"
    for wrong in (array[:3], np.concatenate([array, array])):
        with pytest.raises(CorruptFileError):
            decoded(name, chunk, wrong)


@pytest.mark.parametrize("is_packed", [True, False])
def test_a_chunk_without_bytes_or_header_raises(is_packed):
    codec, frames = chunk_codec("lz4"), np.random.default_rng(0).integers(0, 256, (3, 40), np.uint8)
    frames = np.full_like(frames, 7) if is_packed else frames
    chunk = np.frombuffer(codec.encode(frames)[0], np.uint8)
    assert chunk[0] == is_packed
    out = np.empty_like(frames)
    codec.decode(chunk, out)
    assert np.array_equal(out, frames)
    for bad in (chunk[:0], chunk[:1], chunk[:-1], np.append(np.uint8(2), chunk[1:])):
        with pytest.raises(CorruptFileError, match=r"^the .*(chunk|block) .*\.$"):
            codec.decode(bad, out)


def test_a_block_of_lz4_is_decoded_whole_or_raises():
    data = bytes(range(256)) * 8
    block = lz4.compress(data)
    assert lz4.decompress(block, len(data)) == data and lz4.decompress(lz4.compress(b""), 0) == b""
    for size in (0, 10, len(data) - 1, len(data) + 1, 255 * len(block) + 1, 1 << 33):
        with pytest.raises(CorruptFileError):
            lz4.decompress(block, size)
    with pytest.raises(CorruptFileError):
        lz4.decompress(b"", len(data))


#: Next step in errors about the order of stages.
ORDER = "The order of stages is quantizer+delta+shuffle+packer, each at most once."


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("lz5", "codec 'lz5' has the unknown stage 'lz5'. The stages are 'lz4', "),
        ("lz4+shuffle", f"codec 'lz4+shuffle' has 'shuffle' after 'lz4'. {ORDER}"),
        ("normalized_image+lz4+delta", f"has 'delta' after 'lz4'. {ORDER}"),
        ("shuffle+shuffle", f"codec 'shuffle+shuffle' has 'shuffle' after 'shuffle'. {ORDER}"),
        ("lz4+uint16(0,1)", f"has 'uint16(0,1)' after 'lz4'. {ORDER}"),
        ("lz4+normalized_image", f"has 'normalized_image' after 'lz4'. {ORDER}"),
        (
            "normalized_image+normalized_image",
            f"has 'normalized_image' after 'normalized_image'. {ORDER}",
        ),
        ("lz4+delt", "codec 'lz4+delt' has the unknown stage 'delt'. The stages are 'delta', "),
        (
            "uint16(3,1)+lz4",
            "needs uint16(low,high) with finite numbers low < high, got 'uint16(3,1)'.",
        ),
        ("uint16(a,b)", "needs uint16(low,high) with finite numbers low < high"),
        ("normalized_image+uint16", f"has 'uint16' after 'normalized_image'. {ORDER}"),
        ("auto+lz4", "codec 'auto+lz4' combines 'auto' with other stages. Pass 'auto'."),
        ("", "codec '' has the unknown stage ''"),
        ("+lz4", "codec '+lz4' has the unknown stage ''"),
    ],
)
def test_an_unknown_codec_raises_with_the_known_codecs(name, text):
    with pytest.raises(UsageError) as caught:
        find_codec(name)
    assert text in str(caught.value)


def test_each_codec_reports_whether_and_how_much_it_loses():
    assert (
        find_codec("raw").is_lossless,
        find_codec("raw").max_error,
        find_codec("raw").chunks,
    ) == (True, 0, None)
    image = find_codec("normalized_image+shuffle+lz4")
    assert (image.is_lossless, image.max_error, image.stored_dtype) == (
        False,
        IMAGE_MAX_ERROR,
        "uint8",
    )
    assert image.chunks == chunk_codec("shuffle+lz4")
    linear = find_codec("uint16+lz4")
    assert (linear.is_lossless, linear.max_error, linear.stored_dtype) == (False, None, None)
    assert find_codec("delta+lz4hc").is_lossless and find_codec(AUTO).is_lossless


@pytest.mark.parametrize(
    ("codec", "dtype", "is_right"),
    [
        ("normalized_image", "float16", True),
        ("normalized_image", "uint8", True),
        ("normalized_image+lz4", "int64", False),
        ("uint16+lz4", "float64", True),
        ("uint16+lz4", "bfloat16", False),
        ("uint16+lz4", "uint8", False),
        ("delta+lz4", "bool", True),
        ("auto", "bfloat16", True),
    ],
)
def test_codecs_accept_only_the_dtypes_that_they_can_restore(codec, dtype, is_right):
    field = Field("a", (3,), dtype, codec)
    if not is_right:
        wanted = "a floating dtype or uint8" if "image" in codec else "float16, float32 or float64"
        with pytest.raises(
            FieldTypeError,
            match=rf"^field 'a' has dtype {dtype}\. Codec .* needs {wanted}\.$",
        ):
            check_codec(field)
        return
    check_codec(field)
    assert stored_field(field).dtype == ("uint8" if "image" in codec else dtype)


def test_auto_keeps_raw_if_compression_saves_less_than_a_tenth():
    rng = np.random.default_rng(0)
    assert choose_codec([]) == "raw"
    assert choose_codec([rng.integers(0, 256, (40, 16, 16, 3), np.uint8)]) == "raw"
    assert choose_codec([rng.standard_normal((8, 64)).astype(np.float32)] * 5) == "raw"
    for array in (
        smooth(40, (16, 16), "<f4"),
        smooth(40, (16, 16), "u1"),
        smooth(40, (16, 16), "<i2"),
    ):
        name = choose_codec([array[:8], array[8:16]])
        assert name != "raw" and chunk_codec(name).is_lossless
        assert len(chunk_codec(name).encode(array)[0]) < 0.9 * array.nbytes


def test_chunks_have_one_to_eight_frames():
    sizes = (0, 1, 64 << 10, 128 * 128 * 3, 300_000, 1 << 30)
    assert [chunk_frames(size, "lz4hc") for size in sizes] == [8, 8, 8, 8, 1, 1]
    assert [chunk_frames(size, "split+lz4") for size in sizes] == [8, 8, 3, 4, 1, 1]
    assert (
        chunk_frames(128 * 128 * 3, AUTO) == 4
        and chunk_frames(128 * 128 * 3, "shuffle+blosc2zstd") == 8
    )
