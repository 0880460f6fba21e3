"""Video of LeRobot sets stays video: packets are copied if possible. The report lists videos that are encoded again."""

from __future__ import annotations

import hashlib
import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyarrow", reason="the extra `formats` is missing")
av = pytest.importorskip("av", reason="the extra `video` is missing")
import pyarrow as pa  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402

import rollout_data  # noqa: E402
from rollout_data import RolloutWriter  # noqa: E402
from storage.errors import UsageError  # noqa: E402

LENGTHS = [7, 12, 5, 9]
FPS = 20
CAMERA = "observation.images.front"
COPIED = (
    "packets of 'observation/images.front' are copied from a video file that several episodes share"
)


def pictures(episode: int, length: int) -> np.ndarray:
    """Smooth pictures that move: `[length, 48, 64, 3]` uint8."""
    y, x = np.mgrid[:48, :64]
    frames = [
        np.stack([y * 2 + 9 * frame, x * 2 + 30 * episode, y + x + 5 * frame], -1) % 256
        for frame in range(length)
    ]
    return np.array(frames, np.uint8)


def record(folder: Path, cameras: tuple[str, ...] = ("front",), size: int = 48) -> Path:
    with RolloutWriter(
        folder, 1, writer_name="arm", durable=False, metadata={"frame_rate_hz": FPS}
    ) as writer:
        for episode, length in enumerate(LENGTHS):
            rows = pictures(episode, length)[:, :size]
            for frame in range(length):
                state = np.array([[episode, frame]], np.float32)
                is_last = frame == length - 1
                notes: dict[str, Any] = (
                    {"episode": [{"success": episode % 2 == 0, "task": "lift"}]} if is_last else {}
                )
                seen: dict[str, Any] = {}
                for camera in cameras:
                    parts = camera.split("/")
                    inner: dict[str, Any] = seen
                    for part in parts[:-1]:
                        inner = inner.setdefault(part, {})
                    inner[parts[-1]] = rows[frame][None]
                writer.add(
                    observation={"state": state, **seen},
                    action=state,
                    terminated=[is_last],
                    **notes,
                )
    return folder


def encode(
    path: Path,
    frames: np.ndarray,
    key_frames: list[int],
    options: dict[str, str],
    encoder: str = "libx264",
) -> None:
    """Encode frames with key frames at some places only."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream(
            encoder, rate=Fraction(FPS), options={"g": "1000", "sc_threshold": "0", **options}
        )
        stream.height, stream.width, stream.pix_fmt = *frames.shape[1:3], "yuv420p"
        for number, pixels in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts, frame.time_base = number, Fraction(1, FPS)
            if number in key_frames:
                frame.pict_type = av.video.frame.PictureType.I
            container.mux(stream.encode(frame))
        container.mux(stream.encode())


def share_one_file(
    target: Path, key_frames: list[int], options: dict[str, str], encoder: str = "libx264"
) -> None:
    """Move all episodes of a set of version 3 into one video file."""
    video = target / "videos" / CAMERA / "chunk-000"
    for file in video.iterdir():
        file.unlink()
    frames = np.concatenate([pictures(episode, length) for episode, length in enumerate(LENGTHS)])
    encode(video / "file-000.mp4", frames, key_frames, options, encoder)
    entries = target / "meta/episodes/chunk-000/file-000.parquet"
    table = pq.read_table(entries)
    starts = np.cumsum([0, *LENGTHS[:-1]]) / FPS
    for name, values in (("file_index", [0] * len(LENGTHS)), ("from_timestamp", starts.tolist())):
        column = f"videos/{CAMERA}/{name}"
        table = table.set_column(table.column_names.index(column), column, pa.array(values))
    pq.write_table(table, entries)


def digests(folder: Path) -> list[str]:
    return [hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.rglob("*.mp4"))]


@pytest.mark.parametrize(
    ("version", "video"), [("v3.0", "h264"), ("v2.1", "h264"), ("v3.0", "av1")]
)
def test_video_files_of_one_episode_are_copied_as_they_are(
    tmp_path: Path, version: str, video: str
) -> None:
    rollout_data.convert(
        record(tmp_path / "own"), tmp_path / "set", "lerobot", video=video, progress=False
    )
    source = rollout_data.open(tmp_path / "set")
    kept = source.filter(success=True)
    done = rollout_data.convert(kept, tmp_path / "kept", "lerobot", version=version, progress=False)
    assert done.changes == {}
    assert digests(tmp_path / "kept") == digests(tmp_path / "set")[::2]
    back = rollout_data.open(tmp_path / "kept")
    for mine, theirs in zip(kept, back, strict=True):
        np.testing.assert_array_equal(
            theirs["observation/images.front"], mine["observation/images.front"]
        )
    infos = [
        json.loads((tmp_path / name / "meta/info.json").read_text())["features"]
        for name in ("set", "kept")
    ]
    assert infos[0][CAMERA] == infos[1][CAMERA]
    assert infos[1][CAMERA]["dtype"] == "video"


STARTS = np.cumsum([0, *LENGTHS[:-1]]).tolist()


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("key_frames", "options", "copied"),
    [
        (STARTS, {"bf": "0"}, ["0", "1", "2", "3"]),
        ([0, STARTS[2]], {"bf": "0"}, ["0", "2"]),
        (list(range(0, sum(LENGTHS), 3)), {"bf": "2"}, None),
        ([0], {"bf": "3", "b-adapt": "0"}, None),
    ],
)
@pytest.mark.parametrize("version", ["v3.0", "v2.1"])
def test_ranges_of_shared_video_files_are_copied_at_key_frames_and_encoded_again_elsewhere(
    tmp_path: Path,
    version: str,
    key_frames: list[int],
    options: dict[str, str],
    copied: list[str] | None,
) -> None:
    rollout_data.convert(
        record(tmp_path / "own"), tmp_path / "set", "lerobot", video="h264", progress=False
    )
    share_one_file(tmp_path / "set", key_frames, options)
    source = rollout_data.open(tmp_path / "set")
    done = rollout_data.convert(
        source, tmp_path / "kept", "lerobot", version=version, progress=False
    )
    named = set(done.changes.get(COPIED, ()))
    again = {
        name
        for what, ids in done.changes.items()
        if "encoded again as h264, with loss" in what
        for name in ids
    }
    assert named | again == set(source.ids) and not named & again
    if copied is not None:
        assert named == set(copied)
    back = rollout_data.open(tmp_path / "kept")
    assert back.problems == []
    for mine, theirs in zip(source, back, strict=True):
        expected, got = mine["observation/images.front"], theirs["observation/images.front"]
        if mine.id in named:
            np.testing.assert_array_equal(got, expected)
        assert np.abs(got.astype(int) - expected).mean() < 6
    assert rollout_data.open(tmp_path / "kept").metadata["features"][CAMERA]["dtype"] == "video"


@pytest.mark.parametrize(
    ("codec", "encoder", "options"),
    [
        ("av1", "libsvtav1", {"g": "2", "crf": "30"}),
        (
            "hevc",
            "libx265",
            {"x265-params": "keyint=2:min-keyint=2:bframes=0:scenecut=0:log-level=none"},
        ),
        ("vp9", "libvpx-vp9", {"g": "2", "keyint_min": "2", "lag-in-frames": "0"}),
    ],
)
def test_ranges_of_shared_video_stay_in_their_codec_and_are_copied_at_key_frames(
    tmp_path: Path, codec: str, encoder: str, options: dict[str, str]
) -> None:
    rollout_data.convert(
        record(tmp_path / "own"), tmp_path / "set", "lerobot", video="h264", progress=False
    )
    share_one_file(tmp_path / "set", [], options, encoder)
    info_path = tmp_path / "set/meta/info.json"
    info = json.loads(info_path.read_text())
    info["features"][CAMERA]["info"]["video.codec"] = codec
    info_path.write_text(json.dumps(info))
    source = rollout_data.open(tmp_path / "set")
    done = rollout_data.convert(source, tmp_path / "kept", "lerobot", progress=False)
    assert done.changes[COPIED] == [
        item for item, start in zip(source.ids, STARTS, strict=True) if start % 2 == 0
    ]
    (again,) = [
        ids for what, ids in done.changes.items() if f"encoded again as {codec}, with loss" in what
    ]
    assert again == [item for item, start in zip(source.ids, STARTS, strict=True) if start % 2]
    for number, path in enumerate(sorted((tmp_path / "kept").rglob("*.mp4"))):
        with av.open(str(path)) as container:
            stream = container.streams.video[0]
            assert (stream.codec.canonical_name, stream.frames) == (codec, LENGTHS[number])
    for mine, theirs in zip(source, rollout_data.open(tmp_path / "kept"), strict=True):
        expected, got = mine["observation/images.front"], theirs["observation/images.front"]
        assert np.abs(got.astype(int) - expected).mean() < (6 if mine.id in again else 1e-9)


def test_statistics_of_copied_video_are_those_of_its_frames(tmp_path: Path) -> None:
    rollout_data.convert(
        record(tmp_path / "own"), tmp_path / "set", "lerobot", video="h264", progress=False
    )
    rollout_data.convert(tmp_path / "set", tmp_path / "again", "lerobot", progress=False)
    pixels = (
        np.concatenate(
            [
                episode["observation/images.front"]
                for episode in rollout_data.open(tmp_path / "again")
            ]
        )
        / 255
    )
    got = json.loads((tmp_path / "again/meta/stats.json").read_text())[CAMERA]
    np.testing.assert_allclose(np.ravel(got["q10"]), np.quantile(pixels, 0.1, axis=(0, 1, 2)))
    np.testing.assert_allclose(np.ravel(got["mean"]), pixels.mean((0, 1, 2)))


def test_png_and_another_codec_are_written_on_request(tmp_path: Path) -> None:
    rollout_data.convert(
        record(tmp_path / "own"), tmp_path / "set", "lerobot", video="h264", progress=False
    )
    source = rollout_data.open(tmp_path / "set")
    done = rollout_data.convert(source, tmp_path / "png", "lerobot", video="", progress=False)
    assert list(done.changes) == ["the note that pictures were stored with loss is left out"]
    assert rollout_data.open(tmp_path / "png").metadata["features"][CAMERA]["dtype"] == "image"
    done = rollout_data.convert(source, tmp_path / "av1", "lerobot", video="av1", progress=False)
    assert list(done.changes) == ["pictures are stored as video, with loss"]


def test_a_groot_set_has_all_cameras_as_video_or_is_refused(tmp_path: Path) -> None:
    cameras = ("front", "left/rgb", "right/rgb")
    source = record(tmp_path / "own", cameras)
    done = rollout_data.convert(
        source, tmp_path / "set", "lerobot", version="v2.1", groot=True, progress=False
    )
    assert "pictures are stored as video, with loss" in done.changes
    modality = json.loads((tmp_path / "set/meta/modality.json").read_text())["video"]
    assert modality == {
        name: {"original_key": f"observation.images.{key}"}
        for name, key in (("front", "front"), ("left_rgb", "left.rgb"), ("right_rgb", "right.rgb"))
    }
    assert len(list((tmp_path / "set").rglob("*.mp4"))) == 3 * len(LENGTHS)
    for name, options, folder in (
        ("png", {"video": ""}, source),
        ("odd", {}, record(tmp_path / "small", size=47)),
    ):
        with pytest.raises(UsageError, match="front"):
            rollout_data.convert(
                folder,
                tmp_path / name,
                "lerobot",
                version="v2.1",
                groot=True,
                progress=False,
                **options,
            )


def test_video_of_depth_becomes_pictures_of_the_same_depth_and_is_reported(tmp_path: Path) -> None:
    codes = np.arange(7 * 48 * 64).reshape(7, 48, 64) % 4096
    rollout_data.convert(
        record(tmp_path / "own"), tmp_path / "set", "lerobot", video="h264", progress=False
    )
    info_path = tmp_path / "set/meta/info.json"
    info = json.loads(info_path.read_text())
    about = {"is_depth_map": True, "depth_unit": "mm", "video.codec": "hevc"}
    info["features"][CAMERA] |= {"shape": [48, 64, 1], "info": about}
    info_path.write_text(json.dumps(info))
    for number, path in enumerate(sorted((tmp_path / "set").rglob("*.mp4"))):
        with av.open(str(path), "w") as container:
            stream = container.add_stream(
                "libx265", rate=FPS, options={"x265-params": "lossless=1:log-level=none"}
            )
            stream.height, stream.width, stream.pix_fmt = 48, 64, "gray12le"
            for place in range(LENGTHS[number]):
                pixels = ((codes[place % 7] + number) % 4096).astype(np.uint16)
                frame = av.VideoFrame.from_ndarray(pixels, format="gray12le")
                frame.pts, frame.time_base = place, Fraction(1, FPS)
                container.mux(stream.encode(frame))
            container.mux(stream.encode())
    source = rollout_data.open(tmp_path / "set")
    assert source[0].schema["observation/images.front"].dtype == "uint16"
    done = rollout_data.convert(source, tmp_path / "kept", "lerobot", progress=False)
    assert done.changes["video of depth is written as TIFF pictures or numbers"] == [
        "0",
        "1",
        "2",
        "3",
    ]
    for mine, theirs in zip(source, rollout_data.open(tmp_path / "kept"), strict=True):
        np.testing.assert_array_equal(
            theirs["observation/images.front"], mine["observation/images.front"]
        )
        assert len(np.unique(mine["observation/images.front"])) > 100


def test_a_copy_states_the_codec_and_the_pixels_that_its_video_files_hold(tmp_path: Path) -> None:
    rollout_data.convert(
        record(tmp_path / "own"), tmp_path / "set", "lerobot", video="h264", progress=False
    )
    info_path = tmp_path / "set/meta/info.json"
    info = json.loads(info_path.read_text())
    right = info["features"][CAMERA]["info"]
    stated = {
        **right,
        "video.codec": "av1",
        "video.pix_fmt": "yuv444p",
        "video.fps": 50,
        "has_audio": False,
    }
    info["features"][CAMERA]["info"] = stated
    info_path.write_text(json.dumps(info))
    for name, options in (("copy", {}), ("same", {"video": "h264"})):
        done = rollout_data.convert(
            tmp_path / "set", tmp_path / name, "lerobot", progress=False, **options
        )
        described = json.loads((tmp_path / name / "meta/info.json").read_text())["features"][
            CAMERA
        ]["info"]
        assert described == right
        about = "the description of 'observation/images.front' has"
        assert done.changes == {
            f"{about} video.codec 'h264' instead of 'av1'": ["0", "1", "2", "3"],
            f"{about} video.pix_fmt 'yuv420p' instead of 'yuv444p'": ["0", "1", "2", "3"],
            f"{about} video.fps 20.0 instead of 50": ["0", "1", "2", "3"],
        }
        assert digests(tmp_path / name) == digests(tmp_path / "set")
    again = rollout_data.convert(tmp_path / "set", tmp_path / "copy", "lerobot", progress=False)
    assert again.num_present == 4


def test_video_of_another_codec_than_the_first_is_encoded_again_and_reported(
    tmp_path: Path,
) -> None:
    rollout_data.convert(
        record(tmp_path / "own"), tmp_path / "set", "lerobot", video="h264", progress=False
    )
    file = sorted((tmp_path / "set").rglob("*.mp4"))[2]
    encode(file, pictures(2, LENGTHS[2]), [0], {"crf": "10", "b:v": "0"}, "libvpx-vp9")
    done = rollout_data.convert(tmp_path / "set", tmp_path / "copy", "lerobot", progress=False)
    why = "its video is vp9, unlike that of the first episode"
    assert done.changes[
        f"'observation/images.front' is encoded again as h264, with loss: {why}"
    ] == ["2"]
    copies = sorted((tmp_path / "copy").rglob("*.mp4"))
    for path in copies:
        with av.open(str(path)) as container:
            assert container.streams.video[0].codec_context.codec.canonical_name == "h264"
    assert digests(tmp_path / "copy")[:2] == digests(tmp_path / "set")[:2]


def test_a_copy_lacks_the_camera_of_a_damaged_video_or_with_a_filter_its_episode(
    tmp_path: Path,
) -> None:
    rollout_data.convert(
        record(tmp_path / "own"), tmp_path / "set", "lerobot", video="h264", progress=False
    )
    file = sorted((tmp_path / "set").rglob("*.mp4"))[1]
    file.write_bytes(file.read_bytes()[:100])
    recording = rollout_data.open(tmp_path / "set")
    done = rollout_data.convert(recording, tmp_path / "whole", "lerobot", progress=False)
    name = "observation/images.front"
    assert done.changes[f"field {name!r} is left out: not all episodes have it"] == ["0", "2", "3"]
    assert [problem.episode for problem in done.problems] == ["1"] and done.num_episodes == 4
    kept = recording.filter(lambda episode: name in episode.schema)
    rollout_data.convert(kept, tmp_path / "kept", "lerobot", progress=False)
    assert digests(tmp_path / "kept") == [digests(tmp_path / "set")[place] for place in (0, 2, 3)]
