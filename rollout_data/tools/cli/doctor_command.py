"""The command `doctor`: findings as text or as JSON."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from storage.errors import RolloutDataError, UsageError

from ...sources.recordings_in_folder import recordings_in
from ..doctor import examination
from ..doctor.findings import SEVERITIES, Diagnosis, Finding, Rule
from ..doctor.rules.change_scripts import CHANGES
from .commands import Answer
from .list_recordings import as_lines, rows_about

_SHOWN = 8


def doctor(options: argparse.Namespace) -> Answer:
    only = _codes(options.only)
    skip = _codes(options.skip)
    if options.explain or options.list_rules:
        rules = examination.chosen_rules("examine", _codes(options.explain) or only, skip)
        lines = _explained(rules) if options.explain else [_row(rule) for rule in rules]
        return Answer([rule.as_dict() for rule in rules], lines)
    if options.data_dir is None:
        raise UsageError(
            "examine",
            "",
            "a file or folder",
            "none",
            "Give one, or --list-rules, or --explain CODE",
        )
    chosen = {
        "only": only,
        "skip": skip,
        "settings": dict(map(_setting, options.set)),
        "sample": options.sample,
    }
    if several := recordings_in(options.data_dir):
        return _of_several(several, chosen, options)
    found = examination.doctor(options.data_dir, **chosen, progress=options.progress)
    code = 1 if found.at_least(options.fail_on) else 0
    return Answer(found.as_dict(), _lines(found), code)


def _of_several(
    paths: Sequence[Path],
    chosen: Mapping[str, Any],
    options: argparse.Namespace,
) -> Answer:
    """Examine several recordings and answer with a row for each."""
    codes: list[int] = []

    def counts(path: Path) -> dict[str, int | None]:
        try:
            found = examination.doctor(path, **chosen, progress=options.progress)
        except (RolloutDataError, OSError):  # the row has the error of opening it
            codes.append(1)
            return {f"{name}s": None for name in reversed(SEVERITIES)}
        codes.append(1 if found.at_least(options.fail_on) else 0)
        return {f"{name}s": found.summary[name] for name in reversed(SEVERITIES)}

    rows = rows_about(paths, counts)
    line = "'rollout-data doctor PATH' of one of them names its findings"
    return Answer(rows, [*as_lines(rows), line], max(codes))


def _codes(text: str | None) -> list[str]:
    return [code.strip().upper() for code in text.split(",")] if text else []


def _setting(pair: str) -> tuple[str, float]:
    name, _, value = pair.partition("=")
    try:
        return name, float(value)
    except ValueError:
        expected = "CODE.name=number, as in VAL05.ranges=100"
        raise UsageError("set", repr(name), expected, repr(pair)) from None


def _row(rule: Rule) -> str:
    return f"{rule.code}  {rule.severity:<7}  {rule.needs} {rule.repair}  {rule.name}: {rule.title}"


def _explained(rules: Sequence[Rule]) -> Iterator[str]:
    needs = {"M": "metadata", "T": "tables of episodes", "D": "data", "G": "pictures"}
    repair = {
        "K": "leaves the trajectories out",
        "N": "splits them, or leaves out rows or fields",
        "S": "recomputes what is stored",
        "-": "none",
    }
    for rule in rules:
        yield f"{rule.code} {rule.name} ({rule.severity}, {rule.group})"
        yield f"  {rule.title}"
        yield f"  advice: {rule.advice}"
        script = "; a finding has a script" if rule.code in CHANGES else ""
        yield f"  reads: {needs[rule.needs]}; repair: {repair[rule.repair]}{script}"
        for name, value in rule.defaults.items():
            yield f"  --set {rule.code}.{name}={value:g}"


def _lines(found: Diagnosis) -> Iterator[str]:
    """Yield the lines of the findings, the worst first, then of the summary and of the scripts."""
    for one in found.findings:
        yield f"{one.severity} {one.code} {one.name}: {one.message}"
        if place := _place(one):
            yield f"  in {place}"
        yield f"  -> {one.advice}{'; the script is below' if one.script else ''}"
    about = found.summary
    counts = ", ".join(_counted(about[name], name) for name in reversed(SEVERITIES))
    size = f"{about['episodes']:,} episodes, {about['frames']:,} frames"
    yield f"{size}: {counts}; {len(found.skipped)} rules do not apply"
    for script in dict.fromkeys(one.script for one in found.findings if one.script):
        yield ""
        yield from script.splitlines()


def _counted(count: int, name: str) -> str:
    return f"{count:,} {name}{'' if count == 1 else 's'}"


def _place(one: Finding) -> str:
    numbers = ", ".join([*map(str, one.places), *one.left_out][:_SHOWN])
    more = f" and {len(one.trajectories) - _SHOWN:,} more" if len(one.trajectories) > _SHOWN else ""
    frames = ", ".join(f"{number}[{start}:{stop}]" for number, start, stop in one.frames[:3])
    listed = f"trajectories {numbers}{more}" if numbers else ""
    return f"{listed}; frames {frames}" if frames else listed
