"""Writing the page: every format, wrong calls, and episodes that do not fit."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import rollout_data
from rollout_data import RolloutWriter, report
from rollout_data.sources.recordings.recording import Recording
from rollout_data.tools.cli.command_line import main
from rollout_data.tools.cli.play_command import BARS
from rollout_data.tools.report import report_page as pages
from storage.errors import UsageError
from tests.reporting.reading import embedded

pytest.importorskip("plotly")
DATA = Path(__file__).parents[1] / "data"


def write(folder: Path, num_episodes: int = 12, width: int = 2, length: int = 30) -> Path:
    """Record episodes of noise."""
    rng = np.random.default_rng(0)
    with RolloutWriter(folder, 1, durable=False) as writer:
        for _ in range(num_episodes):
            done = np.zeros((length, 1), bool)
            done[-1] = True
            values = rng.normal(size=(length, 1, width)).astype(np.float32)
            writer.add_rollout(
                observation=values, action=values[..., :2], reward=values[..., 0], done=done
            )
    return folder


#: One recording of each format that has a sample.
SAMPLES = (
    "formats/aloha/encoded",
    "formats/d4rl/hopper_scripted.hdf5",
    "formats/isaaclab/recorder.hdf5",
    "formats/lerobot_v21/groot_video",
    "formats/libero/KITCHEN_SCENE_put_the_cube_demo.hdf5",
    "formats/maniskill/trajectory.state.pd_joint_delta_pos.cpu.h5",
    "formats/minari/cartpole-hdf5-v0",
    "formats/motion_npz/clip.npz",
    "formats/ogbench/pointy-navigate-v0-val.npz",
    "formats/rlds/no_reward_set",
    "formats/robomimic/layout_no_next_obs.hdf5",
    "formats/zarr/v2_dir.zarr",
    "golden/v1/coded",
    "humenv",
    "rlinf/ckpt_pt",
    "trajectory_folders",
)


@pytest.mark.filterwarnings("ignore")  # of readers, of what they leave out
@pytest.mark.parametrize("sample", SAMPLES)
def test_a_recording_of_any_format_has_a_page(sample: str, tmp_path: Path) -> None:
    recording = rollout_data.open(DATA / sample)
    made = report(recording, tmp_path / "page.html")
    content, shown = embedded(made, "page"), embedded(made, "shown")
    assert sorted(content["table"]["number"]) == list(range(len(recording))) and len(shown) == len(
        recording
    )
    assert {name for name, field in recording.schema.items() if len(field.shape) < 2} <= {
        column["name"].partition("[")[0] for column in content["curves"]
    }
    has_pictures = any(
        len(field.shape) == 3 and min(field.shape[:2]) >= 8 for field in recording.schema.values()
    )
    assert not any(item.get("caption", "").startswith(":") for item in content["findings"])
    assert (
        bool(content["sheet"]) == any(item["pictures"] for item in shown.values()) >= has_pictures
    )


def test_episodes_that_do_not_fit_are_left_out_and_counted_on_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path / "walk", num_episodes=40)
    monkeypatch.setattr(
        pages, "MAX_PAGE_BYTES", report(folder, tmp_path / "page.html").stat().st_size - 5000
    )
    made = report(folder, tmp_path / "page.html")
    assert made.stat().st_size < pages.MAX_PAGE_BYTES and len(embedded(made, "shown")) < 40
    assert any("did not fit" in note["text"] for note in embedded(made, "page")["notes"])


def test_there_are_curves_of_every_episode_that_a_finding_or_an_outlier_opens(
    tmp_path: Path,
) -> None:
    folder, rng = tmp_path / "walk", np.random.default_rng(0)
    with RolloutWriter(folder, 1, durable=False) as writer:
        for number in range(420):
            values = rng.normal(size=(20, 1, 2))
            values[3, 0, 0] = np.nan if number < 90 else 0.5
            values[:, 0, 1] = values[:, 0, 1] if number < 320 else 2.0
            action, done = rng.normal(size=(20, 1, 1)), np.arange(20)[:, None] == 19
            writer.add_rollout(observation=values, action=action, reward=action[..., 0], done=done)
    made = report(folder, tmp_path / "page.html")
    content, shown = embedded(made, "page"), set(map(int, embedded(made, "shown")))
    opened = {item["heading"].split()[0]: item["trajectory"] for item in content["findings"]}
    assert opened["VAL04"] >= 320 and set(opened.values()) - {None} <= shown
    (points,) = (
        item["customdata"]
        for item in content["figures"][-1]["figure"]["traces"]
        if "customdata" in item
    )
    assert len(points) == 20 and set(points) <= shown


def test_a_wide_field_has_one_chart_of_all_dimensions(tmp_path: Path) -> None:
    content = embedded(report(write(tmp_path / "wide", width=300), tmp_path / "page.html"), "page")
    titles = [field["title"] for field in content["fields"]]
    assert titles == ["observation (all 300 dimensions)", "action[0]", "action[1]", "reward"]
    content = embedded(
        report(write(tmp_path / "middle", width=100), tmp_path / "page.html"), "page"
    )
    assert (
        len(content["fields"]) == 64
        and content["fields"][0]["title"] == "observation (all 100 dimensions)"
    )
    assert any("64 of 104 dimensions are drawn" in note["text"] for note in content["notes"])


def test_constant_dimensions_are_drawn_last_and_are_the_evidence_of_their_finding(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "walk"
    with RolloutWriter(folder, 1, durable=False) as writer:
        values = np.random.default_rng(0).normal(size=(200, 1, 100))
        values[..., :50] = 1
        writer.add_rollout(
            observation=values, action=values[..., 50:52], done=np.arange(200)[:, None] == 199
        )
    content = embedded(report(folder, tmp_path / "page.html"), "page")
    assert {f"observation[{place}]" for place in range(50, 100)} < {
        field["title"] for field in content["fields"]
    }
    (finding,) = (item for item in content["findings"] if "VAL03" in item["heading"])
    assert (
        finding["names"] == [f"observation[{place}]" for place in range(3)]
        and len(finding["paths"]) == 3
    )
    assert finding["caption"].endswith("the whole recording") and finding["opens"] is None


def test_invisible_characters_are_shown_by_codes_and_equal_spans_are_shaded_once(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "walk"
    with RolloutWriter(folder, 1, durable=False) as writer:
        for number in range(10):
            values, done = (
                np.random.default_rng(number).normal(size=(30, 1, 2)),
                np.arange(30)[:, None] == 29,
            )
            values[10:14] = np.nan if number == 4 else values[10:14]
            notes = {"task": "pick \u202egnp.exe\x1b[31m \\u202e", "success": number != 4}
            writer.add_rollout(
                observation=values, action=values, done=done, episode=[[notes]] + [None] * 29
            )
    made = report(folder, tmp_path / "page.html")
    content, shown = embedded(made, "page"), embedded(made, "shown")["4"]
    assert set(content["table"]["task"]) == {r"pick \u202egnp.exe\u001b[31m \u202e"}
    assert [card["note"] for card in content["cards"] if card["label"] == "trajectories"] == [
        "30 frames each"
    ]
    assert len(shown["shapes"]) == 1
    assert [note["text"] for note in shown["annotations"]] == [
        "end: terminated, failure ✗",
        "VAL01",
    ]


def test_the_largest_numbers_can_be_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "walk"
    with RolloutWriter(folder, 1, durable=False) as writer:
        for number in range(3):
            values, done = (
                np.random.default_rng(number).normal(size=(30, 1, 2)),
                np.arange(30)[:, None] == 29,
            )
            values[3:5, 0, 0] = 1.7e308, -1.7e308
            writer.add_rollout(observation=values, action=values, reward=values[..., 0], done=done)
    content = embedded(report(folder, tmp_path / "page.html"), "page")
    (band,) = content["bands"]
    assert (min(band["pack"]["low"]), max(band["pack"]["high"])) == (-1e300, 1e300)
    assert main(["play", str(folder)]) == 0
    text = capsys.readouterr()
    assert (
        text.err == ""
        and "-1.7e+308 .. 1.7e+308" in text.out
        and BARS[0] in text.out
        and BARS[-1] in text.out
    )


def test_field_names_keep_their_slashes_if_a_recording_lies_in_the_root_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RolloutWriter(tmp_path / "walk", 1, durable=False) as writer:
        values = np.full((9, 1, 2), np.nan)
        writer.add_rollout(
            observation={"walk": values}, action=values, done=np.arange(9)[:, None] == 8
        )
    recording = rollout_data.open(tmp_path / "walk")
    monkeypatch.setattr(Recording, "path", Path("/walk"))  # where tests may not write
    content = embedded(report(recording, tmp_path / "page.html"), "diagnosis")
    assert content["summary"]["path"] == "walk" and "observation/walk" in {
        item["field"] for item in content["findings"]
    }


def test_a_page_inside_the_recording_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path / "walk")
    before = sorted(path.name for path in folder.iterdir())
    with pytest.raises(
        UsageError, match=r"which lies in the recording\. Choose a path outside of it"
    ):
        report(folder, folder / "page.html")
    with pytest.raises(UsageError, match="nowhere"):
        report(tmp_path / "nowhere", tmp_path / "page.html")
    assert sorted(path.name for path in folder.iterdir()) == before
    with pytest.raises(UsageError, match="has no episodes to report"):
        report(
            rollout_data.open(folder).filter(length=lambda length: length > 100),
            tmp_path / "page.html",
        )
    assert not (tmp_path / "page.html").exists()
    monkeypatch.chdir(folder)
    assert report(".", "../page.html").exists()


def test_the_command_prints_the_path_of_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = write(tmp_path / "walk"), tmp_path / "page.html"
    assert main(["report", str(folder), "--out", str(out), "--compare", str(folder)]) == 0
    assert "page.html" in capsys.readouterr().out
    assert main(["report", str(folder), "--out", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "page": str(out),
        "num_bytes": out.stat().st_size,
    }
