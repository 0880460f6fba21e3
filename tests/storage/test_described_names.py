"""Names of the published descriptions: collectors, compression, prefix sums, monitors and images."""

from __future__ import annotations

import math
from itertools import pairwise

import lz4.frame
import numpy as np
import pytest
import torch

from storage import (
    CompressedDataCollector,
    CompressedTensorDict,
    PerformanceMonitor,
    PipelinedDataCollector,
    PrefixSum,
    compress_image,
    compress_image_seq,
    decompress_image,
    decompress_image_seq,
    load_checkpoint,
)
from storage.checkpoints.checkpoint_saver import AsyncCheckpointSaver
from storage.errors import (
    CorruptFileError,
    FieldTypeError,
    MissingFieldError,
    SchemaError,
    UsageError,
)

# Collectors


def records(num=3):
    return [
        {"obs": torch.full((64, 4), float(k)), "next": {"obs": torch.zeros(64, 4)}, "step": k}
        for k in range(num)
    ]


def test_a_pipelined_collector_accepts_keywords():
    collector = PipelinedDataCollector(base_collector=records(), device="meta", prefetch_count=2)
    assert [item["step"] for item in collector] == [0, 1, 2] == [item["step"] for item in collector]
    assert (
        collector.base_collector[0]["step"] == 0
        and next(iter(collector))["obs"].device.type == "meta"
    )
    collector.close()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"base_collector": 3}, "base_collector must be an iterable, got int"),
        ({"base_collector": [], "prefetch_count": 0}, "prefetch_count must be >= 1, got 0"),
        ({"base_collector": [], "device": "nowhere"}, "device must be a torch device"),
    ],
)
def test_a_wrong_argument_of_a_pipelined_collector_is_named(options, text):
    with pytest.raises(UsageError, match=f"^PipelinedDataCollector: {text}"):
        PipelinedDataCollector(**options)


def test_a_compressed_collector_yields_compressed_records():
    for options in (
        {},
        {"compress_keys": ["obs"]},
        {"compress_keys": "next"},
        {"compress": True, "compress_keys": ()},
    ):
        collector = CompressedDataCollector(base_collector=records(), **options)
        for _ in range(2):
            actual = list(collector)
            assert all(type(item) is CompressedTensorDict for item in actual)
            assert [item["step"] for item in actual] == [0, 1, 2]
            assert [float(item["obs"].mean()) for item in actual] == [0, 1, 2]
        chosen = options.get("compress_keys", ["obs", "next"])
        expected = {"obs": ("obs",), "next": ("next/obs",)}
        names = [
            name
            for key in (chosen if isinstance(chosen, list) else [chosen] if chosen else [])
            for name in expected[key]
        ]
        assert sorted(actual[0].compressed_keys) == sorted(names)
        assert not names or actual[0].ratio() > 10


def test_a_compressed_collector_can_be_turned_off():
    source = records()
    assert all(
        a is b for a, b in zip(CompressedDataCollector(source, compress=False), source, strict=True)
    )


def test_a_compressed_collector_accepts_named_tuples_and_is_prefetched():
    from rollout_data import Transition as Streamed

    row = torch.zeros(4, 3)
    flags = torch.zeros(4, dtype=torch.bool)
    batch = Streamed(row, None, row + 1, None, flags, flags, row + 2, None, flags, flags)
    [actual] = PipelinedDataCollector(
        CompressedDataCollector([batch], compress_keys=["observation"]), "cpu"
    )
    assert isinstance(actual, CompressedTensorDict) and actual.compressed_keys == ("observation",)
    assert torch.equal(actual["action"], row + 1) and "reward" not in actual


def test_a_missing_key_of_a_record_raises():
    with pytest.raises(MissingFieldError, match="'observation'"):
        list(CompressedDataCollector(records(), compress_keys=["observation"]))
    with pytest.raises(
        UsageError,
        match=r"^CompressedDataCollector: base_collector must be an iterable, got int",
    ):
        CompressedDataCollector(3)
    with pytest.raises(
        UsageError,
        match=r"^CompressedDataCollector: compress must be True or False, got 'lz4'",
    ):
        CompressedDataCollector([], compress="lz4")


def test_a_compressed_tensordict_accepts_keywords():
    actual = CompressedTensorDict(tensordict=records(1)[0], compress_keys=["obs"])
    assert actual.compressed_keys == ("obs",) and actual["obs"].sum() == 0
    with pytest.raises(
        UsageError,
        match=r"^CompressedTensorDict: tensordict must be a nested mapping, got int",
    ):
        CompressedTensorDict(3)


def test_a_tensordict_is_a_record():
    tensordict = pytest.importorskip("tensordict")
    source = tensordict.TensorDict(
        {"obs": torch.ones(64, 4), "next": {"obs": torch.zeros(64, 4)}}, batch_size=[64]
    )
    for actual in (
        CompressedTensorDict(source, ["obs"]),
        next(iter(CompressedDataCollector([source]))),
    ):
        assert "obs" in actual.compressed_keys and torch.equal(
            actual["next"]["obs"], torch.zeros(64, 4)
        )


# PrefixSum


@pytest.mark.parametrize(
    "make",
    [lambda: PrefixSum(2), lambda: PrefixSum(max_len=2), PrefixSum, lambda: PrefixSum(np.int64(2))],
)
def test_a_prefix_sum_holds_more_than_its_max_len(make):
    actual = make()
    assert len(actual) == 0 and actual.ar.tolist() == actual.prefix_sum.tolist() == []
    for val in (3, 0, 4, 2):
        actual.add(val=val)
    assert (
        actual.ar.tolist() == [3, 0, 4, 2]
        and actual.prefix_sum.tolist() == [3, 3, 7, 9]
        and actual.total == 9
    )
    assert [actual.get_range_idx(idx) for idx in range(9)] == [0, 0, 0, 2, 2, 2, 2, 3, 3]
    assert actual.get_range_idx(np.array([[0, 8]])).tolist() == [[0, 3]]
    for idx in (-1, 9):
        with pytest.raises(IndexError):
            actual.get_range_idx(idx)
    actual.pop_oldest(2)
    assert (
        actual.ar.tolist() == [4, 2]
        and actual.prefix_sum.tolist() == [4, 6]
        and actual.get_range_idx(4) == 1
    )


@pytest.mark.parametrize("lengths", [[3, 4], (3, 4), np.array([3, 4]), iter([3, 4])])
def test_a_prefix_sum_of_an_iterable_begins_with_its_lengths(lengths):
    assert PrefixSum(lengths).prefix_sum.tolist() == [3, 7]


def test_arrays_of_a_prefix_sum_are_new():
    actual = PrefixSum([3, 4])
    actual.ar[:] = 9
    actual.prefix_sum[:] = 9
    assert actual.prefix_sum.tolist() == [3, 7] and actual.prefix_sum.dtype == np.int64


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: PrefixSum(-1), "PrefixSum: max_len must be >= 0, got -1"),
        (
            lambda: PrefixSum(max_len=1.5),
            "PrefixSum: max_len must be an integer >= 0, got 1.5",
        ),
        (
            lambda: PrefixSum(2.5),
            "PrefixSum: lengths must be a list of lengths or a number, got 2.5",
        ),
        (lambda: PrefixSum().add(-1), "PrefixSum.add: val must be >= 0, got -1"),
    ],
)
def test_a_wrong_argument_of_a_prefix_sum_is_named(call, text):
    with pytest.raises(UsageError, match=f"^{text}"):
        call()


# PerformanceMonitor


def test_a_report_is_flat_and_in_seconds():
    monitor = PerformanceMonitor(window=3)
    for duration in (9.0, 1.0, 2.0, 3.0):
        monitor.record(key="training", duration=duration)
    monitor.record("load", 0.5)
    assert monitor.report() == pytest.approx(
        {"training_mean": 2.0, "training_std": math.sqrt(2 / 3), "load_mean": 0.5, "load_std": 0.0}
    )
    assert monitor.timings == {"training": [1.0, 2.0, 3.0], "load": [0.5]}
    assert (
        monitor.summary()["training"]["count"] == 3 and monitor.summary()["training"]["max"] == 3.0
    )
    assert monitor.snapshot()["training/mean"] == 2.0
    monitor.timings["training"].append(5.0)
    assert monitor.timings["training"] == [1.0, 2.0, 3.0]
    with pytest.raises(
        UsageError,
        match=r"^PerformanceMonitor\.record: duration must be finite seconds >= 0, got -1",
    ):
        monitor.record("training", -1)


# Images


@pytest.mark.parametrize("channels", [None, 1, 2, 3, 4])
def test_a_pil_image_is_restored_as_a_pil_image(channels):
    Image = pytest.importorskip("PIL.Image")
    shape = (5, 7) if channels is None else (5, 7, channels)
    pixels = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    plain = pixels[..., 0] if channels == 1 else pixels
    mode = {None: "L", 1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}[channels]
    for value in (pixels, torch.from_numpy(pixels), Image.fromarray(plain)):
        for level in (0, 16):
            actual = decompress_image(compress_image(value, level))
            assert isinstance(actual, Image.Image) and actual.mode == mode and actual.size == (7, 5)
            assert np.array_equal(np.asarray(actual), plain)


def test_images_of_unsupported_modes_raise():
    Image = pytest.importorskip("PIL.Image")
    for mode in ("P", "1", "CMYK", "YCbCr", "HSV", "I", "F"):
        with pytest.raises(UsageError, match=f"image has mode '{mode}', expected L, LA, RGB, RGBA"):
            compress_image(Image.new(mode, (4, 4)))
    with pytest.raises(FieldTypeError, match="image has dtype float32, expected uint8"):
        compress_image(np.zeros((4, 4), np.float32))
    for shape in ((4,), (2, 4, 4, 3), (4, 4, 5), (4, 4, 0)):
        with pytest.raises(SchemaError, match=r"expected \(H, W\) or \(H, W, 1 to 4\)"):
            compress_image(np.zeros(shape, np.uint8))


def test_a_value_that_is_not_an_image_raises_one_clear_error():
    blob = compress_image(np.zeros((4, 4), np.uint8))
    two = compress_image_seq(np.zeros((2, 4, 4), np.uint8))
    for data in (
        b"",
        b"abc",
        blob[:-1],
        blob[:20],
        two,
        bytes(100),
        blob[:30] + b"\xff" + blob[31:],
    ):
        with pytest.raises(CorruptFileError):
            decompress_image(data)


IMAGES = np.random.default_rng(1).integers(0, 256, (6, 4, 5, 3), np.uint8)


def test_a_sequence_is_uint8_by_default():
    actual = decompress_image_seq(
        compressed_data=compress_image_seq(IMAGES), image_shape=(4, 5, 3), batch_size=6
    )
    assert (
        isinstance(actual, np.ndarray)
        and actual.dtype == np.uint8
        and np.array_equal(actual, IMAGES)
    )


@pytest.mark.parametrize("linked", [True, False])
@pytest.mark.parametrize("parts", [1, 2])
def test_plain_lz4_frames_are_read(linked, parts):
    content = IMAGES.tobytes()
    cuts = np.linspace(0, len(content), parts + 1).astype(int)
    frames = b"".join(
        lz4.frame.compress(content[a:b], block_linked=linked, content_checksum=True)
        for a, b in pairwise(cuts)
    )
    assert np.array_equal(decompress_image_seq(frames, (4, 5, 3), 6), IMAGES)
    assert np.array_equal(
        decompress_image_seq(frames, (4, 5, 3), 6, indices=[5, 0, 5]), IMAGES[[5, 0, 5]]
    )
    tensor = decompress_image_seq(bytearray(frames), (4, 5, 3), 6, torch.uint8)
    assert isinstance(tensor, torch.Tensor) and np.array_equal(tensor.numpy(), IMAGES)
    wide = lz4.frame.compress(np.arange(12, dtype="<f4").tobytes())
    assert (
        decompress_image_seq(wide, (3,), 4, np.float32).tolist()
        == np.arange(12.0).reshape(4, 3).tolist()
    )


@pytest.mark.parametrize(
    ("shape", "batch_size"), [((4, 5, 3), 5), ((4, 5, 3), 7), ((4, 5), 6), ((400, 500, 300), 6)]
)
def test_lz4_frames_of_another_size_are_an_error(shape, batch_size):
    with pytest.raises(CorruptFileError, match=f"{batch_size} images of dtype uint8"):
        decompress_image_seq(lz4.frame.compress(IMAGES.tobytes()), shape, batch_size)


def test_damaged_lz4_frames_are_an_error():
    frame = lz4.frame.compress(IMAGES.tobytes(), content_checksum=True)
    for data in (
        frame[:-1],
        frame[:40],
        frame[:100] + bytes([frame[100] ^ 1]) + frame[101:],
        frame + b"more",
    ):
        with pytest.raises(CorruptFileError):
            decompress_image_seq(data, (4, 5, 3), 6)


def test_a_compression_bomb_decodes_to_the_requested_size_at_most():
    bomb = lz4.frame.compress(bytes(64 << 20))
    with pytest.raises(CorruptFileError, match="decodes to more than 360 bytes"):
        decompress_image_seq(bomb, (4, 5, 3), 6)


# Levels


@pytest.mark.parametrize("level", [0, 1, 3, 9, 12, 13, 16])
def test_levels_0_to_16_are_accepted_everywhere(tmp_path, level):
    assert np.array_equal(
        decompress_image_seq(compress_image_seq(IMAGES, level), (4, 5, 3), 6), IMAGES
    )
    actual = CompressedTensorDict({"x": torch.zeros(1000)}, ["x"], level=level)
    assert actual["x"].sum() == 0 and actual.compressed_keys == ("x",)
    assert (
        next(iter(CompressedDataCollector([{"x": torch.zeros(1000)}], level=level)))["x"].sum() == 0
    )
    with AsyncCheckpointSaver() as saver:
        saver.save_async({"x": torch.zeros(1000)}, tmp_path / "a.pt", compress=True, level=level)
    assert load_checkpoint(tmp_path / "a.pt")["x"].sum() == 0


@pytest.mark.parametrize("level", [17, -1, True, 1.5, "9", None])
def test_other_levels_are_refused_everywhere(tmp_path, level):
    for call in (
        lambda: compress_image_seq(IMAGES, level),
        lambda: compress_image(IMAGES[0], level),
        lambda: CompressedTensorDict({}, level=level),
        lambda: CompressedDataCollector([], level=level),
        lambda: AsyncCheckpointSaver().save_async({}, tmp_path / "a.pt", True, level),
    ):
        with pytest.raises(UsageError, match=rf"level must be .*in 0:17, got {level!r}"):
            call()
