"""Scripts of rules: each writes a recording without the finding.

A user runs the printed text, and may change the paths in `source = ...` and `target = ...` first.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import rollout_data
from rollout_data import RolloutWriter, doctor
from rollout_data.tools.cli.command_line import main
from rollout_data.tools.doctor.rule_table import RULES
from rollout_data.tools.doctor.rules.change_scripts import CHANGES
from tests.doctor.sets import Case, wrong_cases
from tests.editing.folders import files

pytestmark = pytest.mark.filterwarnings("ignore::storage.errors.RolloutDataWarning")
CASES = [case for case in wrong_cases() if case.code in CHANGES]


def cases_of_own_format() -> list[Case]:
    return [case for case in CASES if case.name.endswith("/own")]


def one_case_of_each_other_format() -> list[Case]:
    kept_ends = [case for case in CASES if not case.name.endswith("/own") and case.code != "END11"]
    others = {case.name.partition("/")[2]: case for case in kept_ends}
    return list(others.values())


def run_printed_script(path: Path, code: str, target: Path, capsys) -> None:
    """Run the script that the command prints, with another name of the new folder."""
    main(["doctor", str(path), "--only", code])
    (script,) = {finding.script for finding in doctor(path, only=[code]).findings}
    assert script in capsys.readouterr().out
    assert script.startswith(f"# {code} ") and f"source = {str(path)!r}\n" in script
    chosen = script.replace(f"target = {str(path) + '-changed'!r}\n", f"target = {str(target)!r}\n")
    assert chosen != script
    exec(compile(chosen, f"script of {code}", "exec"), {"__name__": "script"})


@pytest.mark.parametrize("case", cases_of_own_format(), ids=lambda case: f"{case.code}-{case.name}")
def test_the_printed_script_removes_the_finding(case: Case, tmp_path: Path, capsys) -> None:
    path, named = case.written(tmp_path / "wrong", 0)
    before = files(path)
    run_printed_script(path, case.code, tmp_path / "changed", capsys)
    assert files(path) == before
    assert not doctor(tmp_path / "changed", only=[case.code]).findings
    old = rollout_data.open(path)
    new = rollout_data.open(tmp_path / "changed")
    assert len(new) == len(old)
    if case.code != "END11":
        assert new.column("ends").tolist() == old.column("ends").tolist()
    for number, (before, after) in enumerate(zip(old, new, strict=True)):
        assert (before.task, before.success) == (after.task, after.success)
        assert list(before.final) == list(after.final)
        if named and number not in named:
            for name in before.schema:
                assert np.array_equal(before.read(name), after.read(name)), name


@pytest.mark.parametrize("case", one_case_of_each_other_format(), ids=lambda case: case.name)
def test_a_script_converts_another_format_first(case: Case, tmp_path: Path, capsys) -> None:
    path, _ = case.written(tmp_path / "wrong", 0)
    run_printed_script(path, case.code, tmp_path / "changed", capsys)
    assert not doctor(tmp_path / "changed", only=[case.code]).findings
    old = rollout_data.open(path)
    new = rollout_data.open(tmp_path / "changed")
    assert new.column("ends").tolist() == old.column("ends").tolist()


def test_a_script_keeps_codecs_texts_notes_metadata_and_open_ends(tmp_path: Path, capsys) -> None:
    rng = np.random.default_rng(0)
    about = {"metadata": {"env": "Arm"}, "obs_disassemble_mapping": {"pose": "shuffle+lz4"}}
    with RolloutWriter(tmp_path / "arm", 1, durable=False, **about) as writer:
        for number in range(9):
            steps = np.cumsum(rng.normal(size=(40, 1, 3)), axis=0).astype(np.float32)
            size = np.float32(1000 if number in (2, 5) else 1)
            is_last = np.arange(40)[:, None] == 39
            last = {"pose": steps[-1] * size, "joint": {"left": steps[-1]}}
            writer.add_rollout(
                observation={"pose": steps * size, "joint": {"left": steps}},
                action=rng.normal(size=(40, 1, 2)).astype(np.float32),
                phase=[["reach" if step < 20 else "lift"] for step in range(40)],
                truncated=is_last & (number < 8),
                final_observation=last if number < 8 else None,
                episode=[{"task": f"lift {number}"}] + [None] * 39,
            )
    run_printed_script(tmp_path / "arm", "VAL10", tmp_path / "changed", capsys)
    old = rollout_data.open(tmp_path / "arm")
    new = rollout_data.open(tmp_path / "changed")
    assert new.metadata["env"] == "Arm"
    assert new.metadata["obs_disassemble_mapping"] == {"pose": "shuffle+lz4"}
    for before, after in zip(old, new, strict=True):
        assert (before.task, before.truncated) == (after.task, after.truncated)
        assert before.schema == after.schema
        assert before.read("phase") == after.read("phase")
        assert np.array_equal(before.observation["joint/left"], after.observation["joint/left"])
    for place in (2, 5):
        factors = old[place].observation["pose"] / new[place].observation["pose"]
        final_factors = old[place].final_observation["pose"] / new[place].final_observation["pose"]
        assert factors.min() > 500
        assert np.allclose(factors, factors.min()) and np.allclose(final_factors, factors.min())


def test_each_rule_with_a_script_has_a_case_and_only_advice() -> None:
    assert {case.code for case in cases_of_own_format()} == CHANGES.keys()
    assert {rule.repair for rule in RULES if rule.code in CHANGES} == {"-"}
