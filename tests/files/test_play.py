"""Output and files of `rollout-data play`."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

import rollout_data
from rollout_data import RolloutWriter
from rollout_data.formats.encoded_images import axes_of
from rollout_data.tools.cli.command_line import main
from rollout_data.tools.cli.export_images import save_gif, save_mp4
from rollout_data.tools.cli.play_command import ASCII_BARS, BARS, describe_episode, play
from storage.errors import UsageError

LENGTHS, SIDES = (8, 100), (12, 17)
PICTURES = {"rgb": (*SIDES, 3), "first": (3, *SIDES), "grey": SIDES, "one": (*SIDES, 1)}


def shade(t: int) -> int:
    return 20 + 2 * t


@pytest.fixture(scope="module")
def walk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two episodes: `ramp` rises by 1, `spike` is 9 in frame 41, `hole` NaN in frame 3; pictures get brighter."""
    folder = tmp_path_factory.mktemp("data") / "walk"
    with RolloutWriter(folder, 1, durable=False, metadata={"frame_rate_hz": 10}) as writer:
        for number, length in enumerate(LENGTHS):
            for t in range(length):
                observation = {
                    "ramp": np.array([[t, -t]], np.float64),
                    "spike": np.array([[9.0 if t == 41 else 0.0]]),
                    "hole": np.array([[math.nan if t == 3 else 1.0]]),
                    "lidar": np.full((1, 15), float(t)),
                    "depth": np.full((1, *SIDES), t / 200, np.float32),
                    **{
                        name: np.full((1, *shape), shade(t), np.uint8)
                        for name, shape in PICTURES.items()
                    },
                }
                writer.add(
                    observation=observation,
                    action=np.zeros((1, 1)),
                    reward=np.ones((1, 1)),
                    done=[t == length - 1],
                    episode=[
                        {"task": "pick\nthe cube", "success": True}
                        if t == length - 1 and number
                        else None
                    ],
                )
    return folder


def line_of(text: str, name: str) -> str:
    (line,) = [line for line in text.splitlines() if line.startswith(name)]
    return line.removeprefix(name).strip()


def test_bars_follow_the_values(walk: Path) -> None:
    text = play(walk)
    assert line_of(text, "observation/ramp[0]").startswith(BARS)
    assert line_of(text, "observation/ramp[1]").startswith(BARS[::-1])
    assert line_of(text, "observation/ramp[0]").endswith(" 0 .. 7")
    assert line_of(text, "observation/hole[0]")[:5] == BARS[4] * 3 + "!" + BARS[4]
    assert line_of(text, "observation/rgb, mean").startswith(BARS)
    assert "3 more: --field observation/lidar" in text and "lidar[12]" not in text
    assert "lidar[14]" in play(walk, fields=["observation/lidar"])


def test_a_spike_is_visible_with_any_number_of_bars(walk: Path) -> None:
    for width in (20, 40, 80, 200):
        bars = play(walk, "1", ["observation/spike"], width=width).splitlines()[-1]
        assert bars.count(BARS[-1]) == 1, width


def test_the_first_lines_have_the_end_the_success_and_the_task(walk: Path) -> None:
    ids = rollout_data.open(walk).ids
    head, task, *_ = play(walk, ids[1]).splitlines()
    assert (
        head == f"{ids[1]}: 100 frames, terminated, success (2 of 2)"
        and task == "task: pick the cube"
    )
    assert play(walk, "1") == play(walk, ids[1]) == play(rollout_data.open(walk), ids[1])


@pytest.mark.parametrize("width", [1, 7, 20, 33, 59, 60, 80, 300])
@pytest.mark.parametrize("bars", [BARS, ASCII_BARS])
def test_no_line_is_longer_than_the_terminal(walk: Path, width: int, bars: str) -> None:
    lines = play(walk, width=width, bars=bars).splitlines()
    assert max(map(len, lines)) <= max(width, 2)
    assert bars == BARS or all(line.isascii() for line in lines)


@pytest.mark.parametrize(
    ("episode", "fields", "message"),
    [
        ("7", [], "'7'"),
        (
            None,
            ["observation/rmp"],
            "has no field 'observation/rmp'. Choose from 'observation/ramp'",
        ),
        (None, ["obs"], "'obs'"),
    ],
)
def test_an_unknown_episode_or_field_raises_with_its_name(
    walk: Path, episode: str | None, fields: list[str], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        play(walk, episode, fields)


def test_an_episode_larger_than_a_part_is_described_like_a_small_one(tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=(120, 1, 2)).astype(np.float32)
    wide = np.zeros((120, 1, 80_000), np.float32)  # 77 MB as float64, more than a part
    wide[..., :2] = values
    with RolloutWriter(tmp_path / "walk", 1, durable=False) as writer:
        done = np.arange(120)[:, None] == 119
        observation = {"narrow": values, "wide": wide}
        writer.add_rollout(observation=observation, action=values, done=done)
    curves = describe_episode(tmp_path / "walk", "0")["curves"]
    by_field = {
        name: [item for item in curves if item["name"].startswith(f"observation/{name}")]
        for name in observation
    }
    assert len(by_field["narrow"]) == 2 and len(by_field["wide"]) > 2
    for narrow, wide_one in zip(by_field["narrow"], by_field["wide"], strict=False):
        np.testing.assert_equal({**wide_one, "name": narrow["name"]}, narrow)


@pytest.mark.parametrize("field", [*PICTURES, "depth"])
def test_a_gif_and_a_video_show_every_frame(walk: Path, tmp_path: Path, field: str) -> None:
    image, av = pytest.importorskip("PIL.Image"), pytest.importorskip("av")
    episode, name = rollout_data.open(walk)[1], f"observation/{field}"
    wanted = np.array([t / 200 * 255 if field == "depth" else shade(t) for t in range(100)])
    assert (
        save_gif(episode, tmp_path / "x.gif", name)
        == save_mp4(episode, tmp_path / "x.mp4", name)
        == 100
    )
    with image.open(tmp_path / "x.gif") as file:
        shades = []
        for number in range(file.n_frames):
            file.seek(number)
            assert file.size == SIDES[::-1] and file.info["duration"] == 50
            shades.append(np.asarray(file.convert("RGB")).mean())
    assert np.abs(np.array(shades) - wanted).max() <= 1
    with av.open(str(tmp_path / "x.mp4")) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    assert np.abs(np.array([frame.mean() for frame in frames]) - wanted).max() < 4
    assert frames[0].shape == (12, 18, 3)


def test_the_command_writes_files_at_the_rate_of_the_recording(
    walk: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image, path = pytest.importorskip("PIL.Image"), str(tmp_path / "new" / "x.gif")
    call = ["play", str(walk), "--field", "observation/rgb", "--gif", path, "--json"]
    assert main(call) == 0
    about = json.loads(capsys.readouterr().out)
    assert (
        about["files"] == {path: 8}
        and about["length"] == 8
        and len(about["curves"][0]["values"]) == 8
    )
    with image.open(path) as file:
        assert file.info["duration"] == 100
    assert main(["play", str(walk), "--field", "action", "--gif", path]) == 2
    assert "has no pictures. Choose one of 'observation/depth'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("shape", "axes"),
    [((), ""), ((64,), ""), ((3, 3), ""), ((4, 4), ""), ((64, 64), "HW"), ((64, 48, 3), "HWC"), ((3, 64, 48), "CHW"),
     ((1, 8, 8), "CHW"), ((5, 64, 48), ""), ((2, 64, 48, 3), ""), ((0, 64, 3), "")],
)  # fmt: skip
def test_pictures_are_recognized_by_their_shape(shape: tuple[int, ...], axes: str) -> None:
    assert axes_of(shape) == axes
