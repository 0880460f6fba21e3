"""Options and answers of the doctor, as its guide describes them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from rollout_data import RolloutWriter, doctor
from rollout_data.tools.cli.command_line import main
from rollout_data.tools.doctor.episode_boundaries import Jumps
from rollout_data.tools.doctor.rule_table import RULES

GUIDE = (Path(__file__).parents[2] / "rollout_data" / "DOCTOR.md").read_text(encoding="utf-8")
PYTHON_TYPES = {"object": dict, "array": list, "string": str, "integer": int, "null": type(None)}


def recorded(
    path: Path, num_episodes: int = 12, not_finite: int = 0, scaled: int = 0, **options: object
) -> Path:
    """Record episodes of 40 frames; the first ones have a NaN, or values of another unit."""
    rng = np.random.default_rng(0)
    is_last = np.arange(40)[:, None] == 39
    with RolloutWriter(path, 1, durable=False, **options) as writer:
        for number in range(num_episodes):
            angles = np.sin(0.1 * np.arange(40)[:, None, None] + rng.uniform(0, 6, (1, 1, 4)))
            angles[5, 0, 1] = np.nan if number < not_finite else 0
            angles *= 57.3 if number < scaled else 1
            clock = 0.02 * np.arange(40.0)[:, None]
            writer.add_rollout(
                observation=angles,
                action=rng.normal(size=(40, 1, 2)),
                clock=clock,
                truncated=is_last,
            )
    return path


def check(value: object, schema: dict, place: str) -> None:
    """Check that a value matches a JSON schema, for the keywords that the guide uses."""
    types = schema.get("type", [])
    kinds = tuple(PYTHON_TYPES[name] for name in ([types] if isinstance(types, str) else types))
    assert not kinds or isinstance(value, kinds), place
    assert "enum" not in schema or value in schema["enum"], place
    if isinstance(value, dict):
        assert set(schema.get("required", [])) <= set(value), place
        for name, inner in schema.get("properties", {}).items():
            if name in value:
                check(value[name], inner, f"{place}.{name}")
    if isinstance(value, list):
        assert schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)), place
        for item in value:
            check(item, schema.get("items", {}), f"{place}[]")


def test_the_json_has_the_form_of_the_guide(tmp_path, capsys) -> None:
    schema = json.loads(re.findall(r"```json\n(.*?)```", GUIDE, re.DOTALL)[0])
    main(["doctor", str(recorded(tmp_path / "walk", not_finite=1, scaled=1)), "--json"])
    about = json.loads(capsys.readouterr().out)
    assert about["findings"] and about["skipped"]
    check(about, schema, "")


def test_a_finding_has_20_frame_ranges_at_most_and_all_trajectories(tmp_path) -> None:
    (finding,) = doctor(recorded(tmp_path / "walk", 30, not_finite=25), only=["VAL01"]).findings
    assert len(finding.trajectories) == 25 and len(finding.frames) == 20


@pytest.mark.parametrize(
    ("option", "code"), [([], 0), (["--fail-on", "warning"], 0), (["--fail-on", "info"], 1)]
)
def test_the_exit_code_is_1_from_the_chosen_severity_on(tmp_path, option, code) -> None:
    walk = recorded(tmp_path / "walk")
    assert [finding.severity for finding in doctor(walk, only=["PRV01"]).findings] == ["info"]
    assert main(["doctor", str(walk), "--only", "PRV01", *option]) == code


def test_rules_are_listed_and_their_thresholds_explained(capsys) -> None:
    assert main(["doctor", "--list-rules"]) == 0
    listed = capsys.readouterr().out
    assert all(rule.code in listed for rule in RULES)
    assert main(["doctor", "--explain", "VAL05"]) == 0
    assert "ranges" in capsys.readouterr().out


@pytest.mark.parametrize(("num_episodes", "found"), [(7, []), (8, ["VAL10"])])
def test_comparisons_between_episodes_need_8_of_them(tmp_path, num_episodes, found) -> None:
    walk = recorded(tmp_path / "walk", num_episodes, scaled=1)
    assert [finding.code for finding in doctor(walk, only=["VAL10"]).findings] == found


def test_a_role_in_the_metadata_names_the_field_of_times(tmp_path) -> None:
    without = doctor(recorded(tmp_path / "without"), only=["TIM"])
    named = doctor(
        recorded(tmp_path / "named", metadata={"roles": {"clock": "time"}}), only=["TIM"]
    )
    assert {code for code, _ in named.skipped} < {code for code, _ in without.skipped}


@pytest.mark.parametrize("role", ["time", "success", "quaternion", "task_index"])
def test_a_role_of_a_field_of_another_width_is_ignored(tmp_path, role) -> None:
    metadata = {"roles": {role: ["action"]}}
    diagnosis = doctor(recorded(tmp_path / "walk", metadata=metadata, not_finite=1))
    codes = {finding.code for finding in diagnosis.findings}
    assert "VAL01" in codes and "FIL00" not in codes


def test_an_error_of_a_collector_fails_only_the_rules_that_need_it(tmp_path, monkeypatch) -> None:
    def add(self: Jumps, batch: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(Jumps, "add", add)
    findings = doctor(recorded(tmp_path / "walk", not_finite=1)).findings
    failures = [finding.evidence for finding in findings if finding.code == "FIL00"]
    assert failures == [{"rule": "END03", "error": "ZeroDivisionError"}]
    assert "VAL01" in {finding.code for finding in findings}


@pytest.mark.parametrize(("num_frozen", "severity"), [(2, "warning"), (8, "info")])
def test_a_defect_of_more_than_half_of_the_episodes_is_an_info(
    tmp_path, num_frozen, severity
) -> None:
    rng = np.random.default_rng(0)
    is_last = np.arange(40)[:, None] == 39
    with RolloutWriter(tmp_path / "walk", 1, durable=False) as writer:
        for number in range(12):
            action = rng.normal(size=(40, 1, 2))
            action[:] = action[0] if number < num_frozen else action
            writer.add_rollout(
                observation=rng.normal(size=(40, 1, 2)), action=action, truncated=is_last
            )
    (finding,) = doctor(tmp_path / "walk", only=["LRN10"]).findings
    assert (finding.severity, len(finding.trajectories)) == (severity, num_frozen)
