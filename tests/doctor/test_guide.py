"""DOCTOR.md lists the rules as the table has them, and shows what the command prints."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rollout_data.tools.cli.command_line import main
from rollout_data.tools.doctor.rule_table import RULES

GUIDE = (Path(__file__).parents[2] / "rollout_data" / "DOCTOR.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.code)
def test_the_guide_has_the_row_of_every_rule(rule) -> None:
    assert f"| {rule.code} {rule.name} | {rule.severity} | {rule.needs} | {rule.repair} | {rule.title} |" in GUIDE


def test_the_guide_has_no_row_without_a_rule() -> None:
    assert set(re.findall(r"^\| ([A-Z]{3}\d\d) ", GUIDE, re.MULTILINE)) == {rule.code for rule in RULES}


def test_the_example_prints_what_the_guide_shows(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)[0], "DOCTOR.md", "exec"), {"__name__": "block"})
    call, shown = re.findall(r"```console\n\$ rollout-data (.*?)\n(.*?)```", GUIDE, re.DOTALL)[0]
    assert main(call.split()) == 1
    assert capsys.readouterr().out == shown
