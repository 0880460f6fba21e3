"""The benchmark of devices runs on the CPU: each case of each section is measured."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks import device


def lines_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    assert device.main(["--device", "cpu", "--small", *arguments]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize("section", device.SECTIONS)
def test_every_case_of_a_section_is_measured_on_the_cpu(
    section: str, capsys: pytest.CaptureFixture[str]
) -> None:
    first, *lines, last = lines_of(capsys, "--only", section)
    assert first["device"] == "cpu"
    assert last["section"] == "end"
    assert lines
    for line in lines:
        assert "error" not in line, line
        assert line["section"] == section
        assert "skipped" in line or line["us"] > 0


def test_the_memory_section_prints_the_bytes_of_a_transition(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = lines_of(capsys, "--only", "memory")
    actual = {line["case"]: line for line in lines if "case" in line}
    assert actual["DictBuffer"]["bytes"] > 0
    for sizes in device.TRANSITIONS:
        line = actual[f"bytes of {sizes}"]
        for name, num_bytes in sizes.bytes("cpu").items():
            assert line[name] == pytest.approx(num_bytes, abs=0.01)
