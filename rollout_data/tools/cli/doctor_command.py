"""Function of the command `doctor`: print findings, a list of rules, or explanations of rules."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from storage.errors import RolloutDataError, UsageError

from ...sources.recordings.recordings_in_folder import recordings_in
from ..doctor import examination
from ..doctor.findings import SEVERITIES, Diagnosis, Finding, Rule
from ..doctor.rules.change_scripts import CHANGES
from .commands import Answer
from .list_recordings import recording_rows, rows_as_text

#: Maximum number of trajectories that are listed for a finding.
_MAX_LISTED = 8
#: Maximum number of frame ranges that are listed for a finding.
_MAX_RANGES = 3


def doctor(options: argparse.Namespace) -> Answer:
    only = _codes(options.only)
    skip = _codes(options.skip)
    if options.explain or options.list_rules:
        rules = examination.chosen_rules(_codes(options.explain) or only, skip)
        lines = _explained(rules) if options.explain else [_rule_line(rule) for rule in rules]
        return Answer([rule.as_dict() for rule in rules], lines)
    if options.data_dir is None:
        raise UsageError(
            "the file or folder to examine is missing. Pass its path, --list-rules or "
            "--explain CODE."
        )
    chosen = {
        "only": only,
        "skip": skip,
        "settings": dict(map(_setting, options.set)),
        "sample": options.sample,
    }
    recordings = recordings_in(options.data_dir)
    if recordings:
        return _examine_several(recordings, chosen, options)
    diagnosis = examination.doctor(options.data_dir, **chosen, progress=options.progress)
    code = 1 if diagnosis.at_least(options.fail_on) else 0
    return Answer(diagnosis.as_dict(), _lines(diagnosis), code)


def _examine_several(
    paths: Sequence[Path],
    chosen: Mapping[str, Any],
    options: argparse.Namespace,
) -> Answer:
    """Examine several recordings, and return a table with the counts of their findings.

    The exit code is the largest exit code of all recordings.
    """
    columns = [f"{severity}s" for severity in reversed(SEVERITIES)]
    codes: list[int] = []

    def counts(path: Path) -> dict[str, int | None]:
        try:
            diagnosis = examination.doctor(path, **chosen, progress=options.progress)
        except (RolloutDataError, OSError):  # The table shows the error in the row of this path.
            codes.append(1)
            return dict.fromkeys(columns)
        codes.append(1 if diagnosis.at_least(options.fail_on) else 0)
        numbers = [diagnosis.summary[severity] for severity in reversed(SEVERITIES)]
        return dict(zip(columns, numbers, strict=True))

    rows = recording_rows(paths, counts)
    line = "run 'rollout-data doctor PATH' for one recording to see its findings"
    return Answer(rows, [*rows_as_text(rows), line], max(codes))


def _codes(text: str | None) -> list[str]:
    return [code.strip().upper() for code in text.split(",")] if text else []


def _setting(pair: str) -> tuple[str, float]:
    name, _, value = pair.partition("=")
    try:
        return name, float(value)
    except ValueError:
        raise UsageError(f"{pair!r} is not CODE.name=number, such as VAL05.ranges=100.") from None


def _rule_line(rule: Rule) -> str:
    return f"{rule.code}  {rule.severity:<7}  {rule.needs} {rule.repair}  {rule.name}: {rule.title}"


def _explained(rules: Sequence[Rule]) -> Iterator[str]:
    needs = {"M": "metadata", "T": "tables of episodes", "D": "data", "G": "pictures"}
    repair = {
        "K": "removes the trajectories",
        "N": "splits the trajectories, or removes rows or fields",
        "S": "recomputes metadata or sums",
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


def _lines(diagnosis: Diagnosis) -> Iterator[str]:
    """Yield the lines of a diagnosis: findings (worst first), summary, repair scripts."""
    for finding in diagnosis.findings:
        yield f"{finding.severity} {finding.code} {finding.name}: {finding.message}"
        place = _place(finding)
        if place:
            yield f"  in {place}"
        yield f"  -> {finding.advice}{'; the script is below' if finding.script else ''}"

    summary = diagnosis.summary
    counts = ", ".join(_counted(summary[name], name) for name in reversed(SEVERITIES))
    size = f"{summary['episodes']:,} episodes, {summary['frames']:,} frames"
    yield f"{size}: {counts}; {len(diagnosis.skipped)} rules do not apply"

    scripts = [finding.script for finding in diagnosis.findings if finding.script]
    for script in dict.fromkeys(scripts):
        yield ""
        yield from script.splitlines()


def _counted(count: int, name: str) -> str:
    return f"{count:,} {name}{'' if count == 1 else 's'}"


def _place(finding: Finding) -> str:
    """Return the trajectories and frames of a finding as text; "" for the whole recording."""
    trajectories = [*map(str, finding.places), *finding.left_out]
    if not trajectories:
        return _frames(finding)
    text = f"trajectories {', '.join(trajectories[:_MAX_LISTED])}"
    num_more = len(finding.trajectories) - _MAX_LISTED
    if num_more > 0:
        text += f" and {num_more:,} more"
    return text + _frames(finding)


def _frames(finding: Finding) -> str:
    frames = [f"{number}[{start}:{stop}]" for number, start, stop in finding.frames[:_MAX_RANGES]]
    return f"; frames {', '.join(frames)}" if frames else ""
