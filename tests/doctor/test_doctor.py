"""The examination as a whole: the chosen rules, their findings, and rules that fail."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from rollout_data import RolloutWriter, doctor
from rollout_data.tools.cli.command_line import main
from storage.errors import UsageError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Twelve episodes of 30 frames; one number of episode 3 is NaN."""
    rng = np.random.default_rng(0)
    with RolloutWriter(tmp_path / "walk", num_envs=1, durable=False) as writer:
        for number in range(12):
            observation = rng.standard_normal((30, 1, 4)).astype(np.float32)
            if number == 3:
                observation[7, 0, 2] = np.nan
            action, ends = (
                rng.standard_normal((30, 1, 2)).astype(np.float32),
                np.arange(30)[:, None] == 29,
            )
            writer.add_rollout(
                observation=observation,
                action=action,
                reward=action[..., 0],
                terminated=ends,
                truncated=~ends & ends,
            )
    return tmp_path / "walk"


def test_a_finding_names_code_field_trajectory_and_frame(folder: Path) -> None:
    (finding,) = doctor(folder, only=["VAL01"]).findings
    assert (finding.code, finding.severity, finding.field) == ("VAL01", "error", "observation")
    assert (finding.trajectories, finding.frames) == ((3,), ((3, 7, 8),))


def test_the_answer_is_json_with_the_four_parts(folder: Path) -> None:
    about = json.loads(json.dumps(doctor(folder).as_dict()))
    assert list(about) == ["rules", "findings", "skipped", "summary"]
    assert about["summary"]["episodes"] == 12 and about["summary"]["frames"] == 360


def test_a_sample_reads_only_some_episodes(folder: Path) -> None:
    assert doctor(folder, only=["VAL"], sample=2).summary["examined"] == 2


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("value", [np.nan, np.inf, 3e38])
@pytest.mark.parametrize(
    "bad", [slice(0, None), slice(0, 12), slice(3, 4)], ids=["all", "half", "one"]
)
def test_no_rule_fails_or_warns_about_infinite_numbers_and_black_pictures(
    tmp_path: Path, bad: slice, value: float
) -> None:
    rng = np.random.default_rng(0)
    steps = np.cumsum(rng.standard_normal((24, 40, 1, 4)), axis=1).astype(np.float32)
    quat = np.abs(steps) / np.linalg.norm(steps, axis=-1, keepdims=True)
    camera = rng.integers(1, 255, (24, 40, 1, 16, 16, 3), dtype=np.uint8)
    steps[bad, ..., 1], quat[bad], camera[bad] = value, value, 0
    done = np.arange(40)[:, None] == 39
    metadata = {"frame_rate_hz": 50, "statistics": {"action": {"mean": [0] * 4, "std": [1] * 4}}}
    with RolloutWriter(tmp_path, 1, durable=False, metadata=metadata) as writer:
        for k in range(24):
            observation = {"state": steps[k], "quat": quat[k], "camera": camera[k]}
            writer.add_rollout(
                observation=observation, action=steps[k], reward=steps[k, ..., 1], done=done
            )
    assert not [finding.message for finding in doctor(tmp_path).findings if finding.code == "FIL00"]


@pytest.mark.parametrize(
    "wrong", [{"only": ["VAL99"]}, {"skip": [""]}, {"settings": {"VAL01.none": 1}}, {"sample": 0}]
)
def test_unknown_rules_thresholds_and_numbers_are_the_callers_mistakes(
    folder: Path, wrong: dict
) -> None:
    with pytest.raises(UsageError):
        doctor(folder, **wrong)


def test_an_episode_read_in_pieces_has_the_sum_of_its_rewards(tmp_path: Path) -> None:
    rng, done = np.random.default_rng(0), np.arange(100)[:, None] == 99
    with RolloutWriter(tmp_path, 1, durable=False) as writer:  # 64 pictures are a piece
        pictures, values = np.zeros((100, 1, 100, 120, 3), np.uint8), rng.random((100, 1, 2)) + 1
        writer.add_rollout(
            observation={"camera": pictures}, action=values, reward=values[..., 0], done=done
        )
    assert [
        finding.code for finding in doctor(tmp_path).findings if finding.code.startswith("STA")
    ] == []


def test_a_recording_that_cannot_be_opened_is_examined_without_an_exception(tmp_path: Path) -> None:
    diagnosis = doctor(tmp_path, only=["VAL"])
    assert diagnosis.summary["episodes"] == 0 and {code for code, _ in diagnosis.skipped} >= {
        "VAL01"
    }


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ([], 1),
        (["--skip", "VAL01"], 0),
        (["--only", "VAL03"], 0),
        (["--set", "VAL01.none=1"], 2),
        (["--only", "NIX"], 2),
    ],
)
def test_the_exit_code_is_1_with_a_finding_of_the_chosen_severity(
    folder: Path, given: list[str], code: int
) -> None:
    assert main(["doctor", str(folder), *given]) == code
