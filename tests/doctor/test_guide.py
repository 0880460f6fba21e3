"""DOCTOR.md lists each rule of the table with its thresholds, and shows the output of the command."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rollout_data.tools.cli.command_line import main
from rollout_data.tools.doctor.rule_table import RULES

GUIDE = (Path(__file__).parents[2] / "rollout_data" / "DOCTOR.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.code)
def test_the_guide_has_the_row_of_every_rule(rule) -> None:
    assert rule.guide_row() in GUIDE.splitlines()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.code)
def test_the_row_of_a_rule_has_the_default_of_each_threshold(rule) -> None:
    (row,) = re.findall(rf"^\| {rule.code} .*$", GUIDE, re.MULTILINE)
    listed = {name: float(value) for value, name in re.findall(r"([\d.e+-]+) \(`(\w+)`\)", row)}
    assert listed == rule.defaults


def test_the_guide_has_no_row_without_a_rule() -> None:
    assert set(re.findall(r"^\| ([A-Z]{3}\d\d) ", GUIDE, re.MULTILINE)) == {
        rule.code for rule in RULES
    }


def test_the_example_prints_the_output_in_the_guide(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    exec(
        compile(re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)[0], "DOCTOR.md", "exec"),
        {"__name__": "block"},
    )
    call, shown = re.findall(r"```console\n\$ rollout-data (.*?)\n(.*?)```", GUIDE, re.DOTALL)[0]
    assert main(call.split()) == 1
    assert capsys.readouterr().out == shown
