"""Video: the number of pictures is unchanged, and their largest error is measured.

Damage raises one clear error.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rollout_data import RolloutDataset, RolloutWriter, WindowDataset
from rollout_data.tools.cli.command_line import main
from storage import compress_image_seq, decompress_image_seq
from storage.codecs.codec_chains import check_codec, chunk_codec, find_codec
from storage.codecs.video_codec import CODERS
from storage.core.fields import Field
from storage.errors import CorruptFileError, FieldTypeError, UsageError

pytest.importorskip("av", reason="needs the extra video")
SHAPES = [
    (8, 64, 96, 3),
    (1, 64, 64, 3),
    (5, 33, 47, 3),
    (4, 3, 70, 66),
    (3, 17, 19),
    (2, 65, 64, 1),
]


def scene(shape: tuple[int, ...], first: int = 0) -> np.ndarray:
    """Return smooth waves that move. Four times the number of the frame is its mean brightness."""
    is_first = len(shape) == 4 and shape[-1] not in (1, 3)
    num, height, width = shape[0], *(shape[2:] if is_first else shape[1:3])
    y, x = np.mgrid[:height, :width]
    frames = np.array(
        [
            80 + 4 * (first + f) + 20 * np.sin((x + 2 * f) / 9) * np.cos((y - f) / 13)
            for f in range(num)
        ]
    )
    if len(shape) == 4:
        frames = np.repeat(
            frames[:, None] if is_first else frames[..., None],
            shape[1 if is_first else -1],
            1 if is_first else -1,
        )
    return frames.astype(np.uint8)


def decoded(name: str, chunk: bytes, like: np.ndarray) -> np.ndarray:
    out = np.full(like.shape, 7, np.uint8)
    chunk_codec(name).decode(np.frombuffer(chunk, np.uint8), out)
    return out


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("coder", CODERS)
def test_decoded_pictures_are_within_the_measured_error(coder, shape):
    frames = scene(shape)
    chunk, error = chunk_codec(f"{coder}:crf=10").encode(frames)
    difference = np.abs(decoded(f"{coder}:crf=10", chunk, frames).astype(int) - frames)
    assert difference.max() == error <= 16 and difference.mean() < 2.5
    assert not chunk_codec(coder).is_lossless and find_codec(coder).max_error is None
    worse = chunk_codec(f"{coder}:crf=50").encode(frames)
    assert len(worse[0]) <= len(chunk) and worse[1] >= error


@pytest.mark.parametrize("coder", CODERS)
def test_noise_is_stored_raw_if_video_is_not_smaller(coder):
    frames = np.random.default_rng(0).integers(0, 256, (1, 8, 8), dtype=np.uint8)
    chunk, error = chunk_codec(f"{coder}:crf=0").encode(frames)
    assert error == 0 and (decoded(f"{coder}:crf=0", chunk, frames) == frames).all()


def test_names_and_fields_are_checked():
    for name in ("h264:crf=52", "h264:crf=-1", "h264+lz4", "uint16+h264", "h265", "av1:preset=3"):
        with pytest.raises(UsageError, match="codec"):
            find_codec(name)
    check_codec(Field("observation/rgb", (48, 64, 3), "uint8", "h264:crf=20"))
    for shape, dtype in (
        ((48, 64, 3), "float32"),
        ((48, 64, 4), "uint8"),
        ((7,), "uint8"),
        ((0, 4, 3), "uint8"),
    ):
        with pytest.raises(
            FieldTypeError,
            match=r"field 'observation/rgb' is .* A video codec needs uint8 pictures",
        ):
            check_codec(Field("observation/rgb", shape, dtype, "h264"))


@pytest.mark.parametrize("coder", CODERS)
def test_damage_is_an_error_or_pictures_of_the_same_size(coder):
    frames = scene((4, 64, 64, 3))
    chunk, _ = chunk_codec(coder).encode(frames)
    refused = 0
    for place in range(0, len(chunk), 7):
        for damaged in (
            chunk[:place],
            chunk[:place] + bytes([chunk[place] ^ 0x55]) + chunk[place + 1 :],
        ):
            try:
                decoded(coder, damaged, frames)
            except CorruptFileError:
                refused += 1
    assert refused > 10
    large, _ = chunk_codec(coder).encode(scene((4, 512, 512, 3)))
    # a small picture is found by its field, a large picture by its stream
    with pytest.raises(CorruptFileError):
        decoded(coder, large, frames)
    more, _ = chunk_codec(coder).encode(scene((5, 64, 64, 3)))
    with pytest.raises(CorruptFileError, match="video has 5 frames, expected 4"):
        decoded(coder, more, frames)


def test_recordings_of_video_are_streamed_and_read_as_windows_with_their_error(tmp_path, capsys):
    frames, codec = scene((40, 64, 96, 3)), {"rgb": "h264:crf=18"}
    with RolloutWriter(tmp_path, 1, obs_disassemble_mapping=codec) as writer:
        for number, frame in enumerate(frames):
            values = {
                "rgb": torch.from_numpy(frame)[None],
                "state": torch.full((1, 2), float(number)),
            }
            writer.add(
                observation=values, action=torch.zeros(1, 1), done=torch.tensor([number % 20 == 19])
            )
    assert sum(path.stat().st_size for path in tmp_path.glob("*.h5")) < frames.nbytes / 4
    dataset = RolloutDataset(tmp_path, 1, device="cpu", flatten_observations=False)
    batch = dataset.get_batch(40)
    order = batch.observation["state"][:, 0, 0].long()
    assert (
        np.abs(batch.observation["rgb"][:, 0].numpy().astype(int) - frames[order.numpy()]).max()
        <= 30
    )
    windows = WindowDataset(tmp_path, length=3)
    for number in (0, 7, 17, 18, 35):
        window = windows[number]
        shown = window["observation"]["rgb"].numpy().astype(int)
        assert (
            np.abs(shown - frames[window["observation"]["state"][:, 0].long().numpy()]).mean() < 2.5
        )
    assert main(["info", str(tmp_path)]) == 0 and "h264:crf=18" in capsys.readouterr().out
    assert main(["verify", str(tmp_path)]) == 0


def test_a_sequence_in_memory_may_be_video():
    frames = torch.from_numpy(scene((20, 64, 64, 3)))
    blob = compress_image_seq(frames, codec="h264:crf=18")
    assert len(blob) < frames.numel() / 10
    assert (
        decompress_image_seq(blob, (64, 64, 3), 20, torch.uint8).int() - frames.int()
    ).abs().float().mean() < 2.5
