"""Image sequences: all or some frames are decoded unchanged.

Bytes that are no blob raise one error and need little memory.
"""

from __future__ import annotations

import json
import struct
import tracemalloc
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from storage import compress_image_seq, decompress_image_seq, decompress_many
from storage.codecs import codec_chains as codecs
from storage.core.fields import DTYPES
from storage.errors import (
    CorruptFileError,
    FieldTypeError,
    RolloutDataError,
    SchemaError,
    UsageError,
)
from tests.codecs.chains import LOSSLESS, frames, same_bits, smooth


@settings(max_examples=60)
@given(frames(), st.sampled_from(LOSSLESS), st.integers(1, 10), st.data())
def test_all_frames_and_any_choice_of_frames_are_decoded(array, codec, step, data):
    blob = compress_image_seq(array, codec=codec, frames_per_chunk=step)
    count, shape = len(array), array.shape[1:]
    assert same_bits(decompress_image_seq(blob, shape, count, array.dtype), array)
    indices = data.draw(st.lists(st.integers(0, count - 1), max_size=12))
    assert same_bits(decompress_image_seq(blob, shape, count, array.dtype, indices), array[indices])


@pytest.mark.parametrize("level", [0, 1, 9, 12])
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_every_dtype_is_decoded_as_tensor_or_array(dtype, level):
    torch_dtype, numpy_dtype = DTYPES[dtype]
    images = torch.from_numpy(smooth(9, (4, 5), "f4")).mul(9).to(torch_dtype)
    blob = compress_image_seq(images, level)
    assert isinstance(blob, bytes)
    back = decompress_image_seq(blob, (4, 5), 9, torch_dtype)
    assert back.dtype == torch_dtype and torch.equal(
        back.view(torch.uint8), images.view(torch.uint8)
    )
    if dtype != "bfloat16":
        array = decompress_image_seq(memoryview(blob), [4, 5], 9, numpy_dtype, torch.tensor([8, 0]))
        assert isinstance(array, np.ndarray) and same_bits(array, images.numpy()[[8, 0]])
        assert same_bits(
            decompress_image_seq(compress_image_seq(images.numpy(), level), (4, 5), 9, dtype),
            images.numpy(),
        )


def test_repeating_images_shrink_and_higher_levels_shrink_more():
    images = smooth(64, (32, 32), "u1")
    sizes = [len(compress_image_seq(images, level)) for level in (0, 9)]
    assert images.nbytes > sizes[0] > sizes[1]


def test_sequences_may_be_empty_or_have_frames_without_values():
    for shape in ((0, 4, 4), (5, 0, 3), (3,), (0,)):
        array = np.zeros(shape, np.float32)
        assert same_bits(
            decompress_image_seq(compress_image_seq(array), shape[1:], shape[0], np.float32), array
        )
    assert decompress_many([], (4,), 3, np.uint8).shape == (0, 3, 4)


@pytest.mark.parametrize("num_threads", [None, 1, 2, 7])
def test_many_blobs_fill_one_output(num_threads):
    stacks = np.stack([smooth(20, (64, 64, 3), "u1", seed) for seed in range(6)])
    blobs = [compress_image_seq(stack) for stack in stacks]
    for _ in range(4):  # the number of threads depends on measurements
        assert same_bits(
            decompress_many(blobs, (64, 64, 3), 20, np.uint8, num_threads=num_threads), stacks
        )
    out = torch.zeros(6, 3, 64, 64, 3, dtype=torch.uint8)
    got = decompress_many(
        blobs, (64, 64, 3), 20, torch.uint8, [19, 0, 19], num_threads=num_threads, out=out
    )
    assert got is out and same_bits(out.numpy(), stacks[:, [19, 0, 19]])
    with pytest.raises(
        SchemaError, match=r"out must be contiguous uint8 of shape \(6, 20, 64, 64, 3\)"
    ):
        decompress_many(blobs, (64, 64, 3), 20, np.uint8, out=np.zeros((6, 20, 64, 64, 3), np.int8))


def test_a_failure_in_any_thread_reaches_the_caller():
    images = smooth(8, (64, 64, 3), "u1")
    bad = remade(
        compress_image_seq(images),
        lambda about: None,
        chunk=lambda data: data[:1] + bytes(len(data) - 1),
    )
    for _ in range(4):
        with pytest.raises(CorruptFileError, match="damaged: chunk 0: "):
            decompress_many(
                [compress_image_seq(images)] * 30 + [bad], (64, 64, 3), 8, np.uint8, num_threads=2
            )


def remade(blob: bytes, change, chunk=lambda data: data, ends=lambda ends: None) -> bytes:
    """Return a blob with a changed header and right checksums, as an attacker would write it."""
    length = struct.unpack("<I", blob[8:12])[0]
    about = json.loads(blob[12 : 12 + length])
    count = -(-about["num_frames"] // about["frames_per_chunk"])
    table = 12 + length
    places = np.frombuffer(blob[table : table + 8 * count], "<u8").copy()
    first = table + 12 * count + 4
    chunks = [
        blob[first + a : first + b]
        for a, b in zip([0, *places[:-1].tolist()], places.tolist(), strict=True)
    ]
    chunks = [chunk(part) for part in chunks]
    places[:] = np.cumsum([len(part) for part in chunks])
    ends(places)
    change(about)
    text = json.dumps(about).encode()
    sums = np.array([zlib.crc32(part) for part in chunks], "<u4")
    head = b"rdimages" + struct.pack("<I", len(text)) + text + places.tobytes() + sums.tobytes()
    return head + struct.pack("<I", zlib.crc32(head)) + b"".join(chunks)


IMAGES = smooth(16, (8, 8), "<f4")
BLOB = compress_image_seq(IMAGES, codec="delta+split+lz4")
HUGE = 1 << 60


def refused(blob: bytes, shape=(8, 8), count=16, dtype=np.float32) -> RolloutDataError:
    """Check that decompression raises one clear error and needs almost no memory."""
    tracemalloc.start()
    try:
        with pytest.raises(RolloutDataError) as caught:
            decompress_image_seq(blob, shape, count, dtype)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 200_000, f"{peak} bytes for an error"
    assert_is_clear(caught.value)
    return caught.value


def assert_is_clear(error):
    """Check that an error names the argument or the blob, and compares the frames if they differ."""
    names = (
        "compressed_data is damaged: ",
        "'compressed_data' ",
        "decompress_image_seq: the blob ",
    )
    assert str(error).startswith(names)


def test_the_unchanged_copy_of_a_blob_is_valid():
    assert remade(BLOB, lambda about: None) == BLOB


@pytest.mark.parametrize(
    ("change", "count", "shape"),
    [
        ({"num_frames": HUGE}, HUGE, (8, 8)),
        ({"num_frames": HUGE, "frames_per_chunk": HUGE}, HUGE, (8, 8)),
        ({"num_frames": 1 << 40, "frames_per_chunk": 1 << 39}, 1 << 40, (8, 8)),
        ({"shape": [HUGE]}, 16, (HUGE,)),
        ({"shape": [1 << 20, 1 << 20]}, 16, (1 << 20, 1 << 20)),
        ({"frames_per_chunk": HUGE}, 16, (8, 8)),
        ({"frames_per_chunk": 0}, 16, (8, 8)),
        ({"frames_per_chunk": 4.5}, 16, (8, 8)),
        ({"num_frames": -1}, 16, (8, 8)),
        ({"num_frames": True}, 1, (8, 8)),
        ({"codec": "lz5"}, 16, (8, 8)),
        ({"codec": ["lz4"]}, 16, (8, 8)),
    ],
)
def test_declared_sizes_are_checked_against_the_bytes(change, count, shape):
    error = refused(remade(BLOB, lambda about: about.update(change)), shape, count)
    assert isinstance(error, CorruptFileError)


def test_no_chunk_of_several_frames_exceeds_the_limit(monkeypatch):
    large = compress_image_seq(IMAGES, frames_per_chunk=100)
    monkeypatch.setattr(codecs, "LARGEST_CHUNK_BYTES", 5 * IMAGES[0].nbytes + 1)
    text = "declares 16 frames in chunks of 100, expected at most 5 per chunk"
    assert text in str(refused(large))
    for blob in (
        compress_image_seq(IMAGES, frames_per_chunk=10**6),
        compress_image_seq(IMAGES, frames_per_chunk=5),
    ):
        header = blob[12 : 12 + struct.unpack("<I", blob[8:12])[0]]
        assert json.loads(header)["frames_per_chunk"] == 5
        assert same_bits(decompress_image_seq(blob, (8, 8), 16, np.float32), IMAGES)
    monkeypatch.setattr(codecs, "LARGEST_CHUNK_BYTES", 7)  # one frame is always allowed
    blob = compress_image_seq(IMAGES, frames_per_chunk=2)
    assert same_bits(decompress_image_seq(blob, (8, 8), 16, np.float32, [9]), IMAGES[9:10])


@pytest.mark.parametrize(
    "ends",
    [
        lambda ends: ends.__setitem__(-1, HUGE),
        lambda ends: ends.__setitem__(0, HUGE),
        lambda ends: ends.__setitem__(0, ends[1] + 1),
        lambda ends: ends.__setitem__(-1, (1 << 64) - 1),
        lambda ends: ends.__setitem__(-1, ends[-1] - 1),
    ],
)
def test_chunks_outside_the_blob_raise(ends):
    assert "the chunks end at" in str(refused(remade(BLOB, lambda about: None, ends=ends)))


def test_truncations_and_flipped_bits_are_reported():
    for size in range(0, len(BLOB), 3):
        assert isinstance(refused(BLOB[:size]), CorruptFileError)
    assert isinstance(refused(BLOB + b"x"), CorruptFileError)
    data = bytearray(BLOB)
    for place in range(0, len(data), 3):
        data[place] ^= 1 << place % 8
        refused(bytes(data))
        data[place] ^= 1 << place % 8


def test_a_wrong_checksum_raises_before_decoding():
    data = bytearray(BLOB)
    data[-1] ^= 1
    text = str(refused(bytes(data)))
    assert "damaged: expected checksum " in text and "of chunk 1, got " in text
    same = decompress_image_seq(bytes(data), (8, 8), 16, np.float32, range(8))
    assert same_bits(same, IMAGES[:8]), "chunks that are not needed are not looked at"


@settings(max_examples=300)
@given(st.binary(max_size=300), st.booleans())
def test_random_bytes_raise(data, has_magic):
    refused((b"rdimages" if has_magic else b"") + data)


@settings(max_examples=200)
@given(st.integers(0, len(BLOB) - 1), st.binary(min_size=1, max_size=40), st.booleans())
def test_any_overwritten_part_raises_or_changes_no_image(place, data, is_repaired):
    changed = bytearray(BLOB)
    changed[place : place + len(data)] = data[: len(BLOB) - place]
    if is_repaired:  # with right checksums the codec must find the error
        try:
            changed = bytearray(remade(bytes(changed), lambda about: None))
        except (
            ValueError,
            KeyError,
            TypeError,
            IndexError,
            OverflowError,
            MemoryError,
            struct.error,
        ):
            return
    try:
        back = decompress_image_seq(bytes(changed), (8, 8), 16, np.float32)
    except RolloutDataError as error:
        assert_is_clear(error)
    else:
        assert back.shape == IMAGES.shape and (is_repaired or same_bits(back, IMAGES))


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        (
            lambda: decompress_image_seq(BLOB, (8, 9), 16, "f4"),
            SchemaError,
            "16 frames of dtype float32 and shape (8, 8), expected 16 of dtype float32 and "
            "shape (8, 9).",
        ),
        (
            lambda: decompress_image_seq(BLOB, (8, 8), 15, "f4"),
            SchemaError,
            "expected 15 of",
        ),
        (
            lambda: decompress_image_seq(BLOB, (8, 8), 16, "i4"),
            SchemaError,
            "expected 16 of dtype int32 and shape (8, 8)",
        ),
        (
            lambda: decompress_image_seq(BLOB, (8, 8), 16, "c8"),
            FieldTypeError,
            "dtype c8 of the images",
        ),
        (
            lambda: decompress_image_seq(BLOB, (8, 8), 16, "nothing"),
            FieldTypeError,
            "dtype nothing of the images",
        ),
        (
            lambda: decompress_image_seq(BLOB, (8, -8), 16, "f4"),
            UsageError,
            "sizes of image_shape must be >= 0",
        ),
        (lambda: decompress_image_seq(BLOB, (8, 8.5), 16, "f4"), UsageError, "an integer"),
        (
            lambda: decompress_image_seq(BLOB, (8, 8), 16, "f4", [16]),
            UsageError,
            "indices must be in 0:16, got [16]",
        ),
        (
            lambda: decompress_image_seq(BLOB, (8, 8), 16, "f4", [-1]),
            UsageError,
            "indices must be in 0:16",
        ),
        (
            lambda: decompress_image_seq(BLOB, (8, 8), 16, "f4", [0.5]),
            UsageError,
            "indices must be integer ids",
        ),
        (
            lambda: decompress_image_seq("text", (8, 8), 16, "f4"),
            UsageError,
            "compressed_data must be bytes, got str",
        ),
        (
            lambda: decompress_many([BLOB], (8, 8), 16, "f4", num_threads=0),
            UsageError,
            "num_threads must be >= 1",
        ),
        (lambda: compress_image_seq(IMAGES, 17), UsageError, "level must be in 0:17, got 17"),
        (lambda: compress_image_seq(IMAGES, 1.5), UsageError, "level must be an integer in 0:17"),
        (lambda: compress_image_seq(np.float32(1)), SchemaError, "a stack of frames"),
        (lambda: compress_image_seq(IMAGES.astype("c8")), FieldTypeError, "complex64"),
        (
            lambda: compress_image_seq(IMAGES, frames_per_chunk=0),
            UsageError,
            "frames_per_chunk must be >= 1",
        ),
        (
            lambda: compress_image_seq(IMAGES > 0, codec="uint16+lz4"),
            FieldTypeError,
            "float16, float32 or float64",
        ),
    ],
)
def test_wrong_arguments_raise_with_the_reason(call, kind, text):
    with pytest.raises(kind) as caught:
        call()
    assert text in str(caught.value)


RAGGED = [smooth(count, (6, 5), "u1", count) for count in (3, 17, 1, 9)]
RAGGED_BLOBS = [compress_image_seq(stack, frames_per_chunk=4) for stack in RAGGED]


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("dtype", [np.uint8, torch.uint8])
def test_blobs_of_different_lengths_and_indices_are_decoded_together(dtype, num_threads):
    lists = [[2, 0], None, [], np.array([8, 8, 1, 0])]
    for indices in (None, lists, [None, range(3, 9), [0], None], [0]):
        own = indices if isinstance(indices, list) and indices != [0] else [indices] * 4
        expected = [
            stack if item is None else stack[list(item)]
            for stack, item in zip(RAGGED, own, strict=True)
        ]
        got = decompress_many(RAGGED_BLOBS, (6, 5), [3, 17, 1, 9], dtype, indices, num_threads)
        assert len(got) == 4
        for frames_of_one, wanted in zip(got, expected, strict=True):
            assert same_bits(np.asarray(frames_of_one), wanted)
            assert isinstance(frames_of_one, torch.Tensor) == (dtype is torch.uint8)
        total = sum(map(len, expected))
        shape = (4, 1, 6, 5) if indices == [0] else (total, 6, 5)
        out = torch.zeros(shape, dtype=dtype) if dtype is torch.uint8 else np.zeros(shape, dtype)
        got = decompress_many(
            RAGGED_BLOBS, (6, 5), np.array([3, 17, 1, 9]), dtype, indices, num_threads, out
        )
        assert (got is out) == (indices == [0])
        assert same_bits(np.asarray(out).reshape(-1, 6, 5), np.concatenate(expected))


def test_equal_numbers_of_frames_are_stacked_for_every_form_of_indices():
    equal = [compress_image_seq(stack[:3]) for stack in RAGGED[:2]]
    stacks = np.stack([RAGGED[0], RAGGED[1][:3]])
    for size in (3, [3, 3], (3, 3), torch.tensor([3, 3])):
        assert same_bits(decompress_many(equal, (6, 5), size, np.uint8), stacks)
    nested = [[0, 2], [1, 0]]
    wanted = np.stack([stacks[0][[0, 2]], stacks[1][[1, 0]]])
    for indices in (nested, np.array(nested), torch.tensor(nested), tuple(nested)):
        assert same_bits(decompress_many(equal, (6, 5), 3, np.uint8, indices), wanted)
    assert same_bits(decompress_many(equal[:1], (6, 5), [3], np.uint8, [[1]]), stacks[:1, [1]])
    assert decompress_many([], (6, 5), [], np.uint8).shape == (0, 0, 6, 5)


@pytest.mark.parametrize(
    ("size", "indices", "kind", "text"),
    [
        (
            [3, 17],
            None,
            UsageError,
            "batch_size and indices must have one entry per blob, or be the same for all blobs, "
            "got 2 sizes and 2 lists for 4 blobs.",
        ),
        ([3, 17, 1, 9], [[0]] * 3, UsageError, "got 4 sizes and 3 lists for 4 blobs."),
        (
            [3, 17, 1, 9],
            [[0], [0], [1], [0]],
            UsageError,
            "indices must be in 0:1, got [1]",
        ),
        ([3, 17, 1, 9], [2], UsageError, "indices must be in 0:1, got [2]"),
        ([3, 17, 9, 1], None, SchemaError, "expected 9 of dtype uint8"),
        ([3, 17, 1, 1.5], None, UsageError, "an integer"),
        (3, None, SchemaError, "has 17 frames of dtype uint8"),
    ],
)
def test_lengths_and_indices_that_do_not_fit_their_blob_raise(size, indices, kind, text):
    with pytest.raises(kind) as caught:
        decompress_many(RAGGED_BLOBS, (6, 5), size, np.uint8, indices)
    assert text in str(caught.value)
