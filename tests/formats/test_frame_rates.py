"""A LeRobot set has the frame rate of its recording, or the conversion raises an error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyarrow", reason="the extra `formats` is missing")

import rollout_data
from rollout_data import RolloutWriter
from storage.errors import UsageError


def record(
    folder: Path,
    metadata: dict[str, Any] | None = None,
    time_hz: float | None = None,
    notes: dict[str, Any] | None = None,
    jitter_s: float = 0.0,
    decimals: int | None = None,
) -> Path:
    """Record two episodes of 30 frames; `time_hz` adds the field `timestamp`."""
    rng = np.random.default_rng(0)
    with RolloutWriter(
        folder, 1, writer_name=folder.name, durable=False, metadata=metadata
    ) as writer:
        for frame in range(60):
            row = np.full((1, 2), frame, np.float32)
            is_last = frame % 30 == 29
            fields: dict[str, Any] = {}
            if time_hz is not None:
                time_s = frame % 30 / time_hz + rng.uniform(0, jitter_s)
                fields["timestamp"] = np.array(
                    [time_s if decimals is None else round(time_s, decimals)]
                )
            if notes and is_last:
                fields["episode"] = [notes]
            writer.add(observation=row, action=row, terminated=[is_last], **fields)
    return folder


def converted_fps(source: Any, target: Path, **options: Any) -> float:
    rollout_data.convert(source, target, "lerobot", progress=False, **options)
    fps: float = json.loads((target / "meta/info.json").read_text())["fps"]
    return fps


STATED: dict[str, tuple[dict[str, Any], float]] = {
    "frame_rate_hz": ({"metadata": {"frame_rate_hz": 50}}, 50),
    "fps": ({"metadata": {"fps": 25}}, 25),
    "frame_rate_hz before fps": ({"metadata": {"frame_rate_hz": 30, "fps": 29.97}}, 30),
    "a note of the episodes": ({"notes": {"frame_rate_hz": 12.5}}, 12.5),
    "recorded times": ({"time_hz": 20}, 20),
    "recorded times that vary": ({"time_hz": 15, "jitter_s": 0.0001}, 15),
    "recorded times in whole milliseconds": ({"time_hz": 30, "decimals": 3}, 30),
    "a statement and times in whole milliseconds": (
        {"metadata": {"fps": 30}, "time_hz": 30, "decimals": 3},
        30,
    ),
    "recorded times of 29.97 Hz": ({"time_hz": 29.97}, 29.97),
    "a statement before recorded times": ({"metadata": {"fps": 20}, "time_hz": 20.1}, 20),
}


@pytest.mark.parametrize("name", STATED)
def test_a_converted_set_has_the_stored_frame_rate(tmp_path: Path, name: str) -> None:
    options, expected = STATED[name]
    actual = converted_fps(record(tmp_path / "own", **options), tmp_path / "set")
    assert actual == pytest.approx(expected, rel=2e-3)
    episode = rollout_data.open(tmp_path / "set")[1]
    np.testing.assert_allclose(episode["timestamp"], np.arange(30) / actual, atol=2e-3)


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "nothing": ({}, {}, "is unknown. Pass fps="),
    "a value that is no rate": (
        {"metadata": {"frame_rate_hz": "fast"}},
        {},
        "frame_rate_hz of the recording",
    ),
    "another fps=": (
        {"metadata": {"frame_rate_hz": 30}},
        {"fps": 10},
        "frame_rate_hz of the recording",
    ),
    "another fps= than the times": ({"time_hz": 20}, {"fps": 50}, "'timestamp' of episode"),
    "two statements": ({"metadata": {"frame_rate_hz": 30, "fps": 50}}, {}, "fps of the recording"),
    "times against a statement": (
        {"metadata": {"fps": 30}, "time_hz": 20},
        {},
        "'timestamp' of episode",
    ),
    "a note against the recording": (
        {"metadata": {"fps": 30}, "notes": {"frame_rate_hz": 20}},
        {},
        "of episode 'own:0'",
    ),
    "too many frames per second": ({}, {"fps": 5000}, "below 5000 Hz"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_unknown_contradictory_or_too_high_frame_rate_raises(tmp_path: Path, name: str) -> None:
    recorded, options, words = REFUSED[name]
    with pytest.raises(UsageError) as caught:
        converted_fps(record(tmp_path / "own", **recorded), tmp_path / "set", **options)
    assert words in str(caught.value)
    assert not (tmp_path / "set" / "meta" / "info.json").exists()


def test_a_requested_frame_rate_within_one_percent_is_written_and_reported(tmp_path: Path) -> None:
    source = record(tmp_path / "own", {"frame_rate_hz": 29.97})
    done = rollout_data.convert(source, tmp_path / "set", "lerobot", fps=30, progress=False)
    assert done.changes["frames are written as 30 a second instead of 29.97"] == ["own:0", "own:1"]


def test_merged_episodes_keep_their_own_frame_rates(tmp_path: Path) -> None:
    sources = [
        record(tmp_path / "slow", {"frame_rate_hz": 20, "env": "x"}),
        record(tmp_path / "fast", {"fps": 50, "env": "x"}),
        record(
            tmp_path / "noted", {"frame_rate_hz": 20, "env": "x"}, notes={"frame_rate_hz": 20.1}
        ),
        record(tmp_path / "silent", {"env": "x"}),
    ]
    rollout_data.merge(sources, tmp_path / "all")
    merged = rollout_data.open(tmp_path / "all")
    rates = {episode.id: episode.metadata.get("frame_rate_hz") for episode in merged}
    expected = {"slow": 20, "fast": 50, "noted": 20.1, "silent": None}
    assert rates == {
        f"{name}:{number}": rate for name, rate in expected.items() for number in (0, 1)
    }
    assert "frame_rate_hz" not in merged.metadata
    assert merged.metadata["env"] == "x"
    with pytest.raises(UsageError, match=r"frame_rate_hz of episode 'fast:0'"):
        converted_fps(merged, tmp_path / "set")
    fast = merged.filter(lambda episode: episode.id.startswith("fast"))
    assert converted_fps(fast, tmp_path / "fast_set") == 50
    rollout_data.merge([tmp_path / "all", sources[1]], tmp_path / "again")
    again = {
        episode.id: episode.metadata.get("frame_rate_hz")
        for episode in rollout_data.open(tmp_path / "again")
    }
    assert {name: rate for name, rate in again.items() if name in rates} == rates


def test_merged_sets_of_equal_frame_rates_store_one_rate(tmp_path: Path) -> None:
    sources = [record(tmp_path / name, {"frame_rate_hz": 20}) for name in ("a", "b")]
    rollout_data.merge(sources, tmp_path / "all")
    merged = rollout_data.open(tmp_path / "all")
    assert merged.metadata["frame_rate_hz"] == 20
    assert converted_fps(merged, tmp_path / "set") == 20


def test_an_equal_rate_under_two_metadata_keys_is_kept_in_a_merge(tmp_path: Path) -> None:
    sources = [record(tmp_path / "a", {"frame_rate_hz": 20}), record(tmp_path / "b", {"fps": 20})]
    rollout_data.merge(sources, tmp_path / "all")
    merged = rollout_data.open(tmp_path / "all")
    assert [episode.metadata["frame_rate_hz"] for episode in merged] == [20] * 4
    assert converted_fps(merged, tmp_path / "set") == 20


def test_an_episode_of_unknown_rate_beside_others_raises_with_its_name(tmp_path: Path) -> None:
    sources = [record(tmp_path / "a", {"frame_rate_hz": 20}), record(tmp_path / "silent")]
    rollout_data.merge(sources, tmp_path / "all")
    with pytest.raises(
        UsageError, match=r"frame rate of episode 'silent:0' is unknown\. Pass fps="
    ):
        converted_fps(tmp_path / "all", tmp_path / "set")
    assert converted_fps(tmp_path / "all", tmp_path / "said", fps=20) == 20


def test_a_rate_from_numpy_is_recorded_as_a_number(tmp_path: Path) -> None:
    source = record(tmp_path / "own", {"frame_rate_hz": np.float32(12.5)})
    assert rollout_data.open(source).metadata["frame_rate_hz"] == 12.5
    assert converted_fps(source, tmp_path / "set") == 12.5


@pytest.mark.parametrize(
    "target", ["robomimic", "minari", "d4rl", "isaaclab", "rlinf", "trajectory-folders"]
)
def test_a_target_keeps_the_frame_rate_or_reports_its_omission(tmp_path: Path, target: str) -> None:
    source = record(tmp_path / "own", {"frame_rate_hz": 20})
    options = {} if target in ("isaaclab", "rlinf") else {"missing_reward": 0.0}
    path = tmp_path / ("set.hdf5" if target in ("robomimic", "d4rl", "isaaclab") else "set")
    done = rollout_data.convert(source, path, target, progress=False, **options)
    is_kept = rollout_data.open(path).metadata.get("frame_rate_hz") == 20
    assert is_kept != any("frame_rate_hz" in change for change in done.changes)
