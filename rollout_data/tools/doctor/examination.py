"""Examine a recording: run the chosen rules on one `Scan` and collect their findings.

A rule that raises an unexpected error becomes the finding FIL00, and the other rules still run. If
a remote store does not answer, the examination ends with an error.
"""

from __future__ import annotations

import errno
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from storage.core import arguments
from storage.errors import (
    DataFileError,
    RolloutDataError,
    RolloutDataWarning,
    UnansweredError,
    UsageError,
    nearest,
)

from ...formats.open_recording import open, open_source
from ...remote.locations import DataDir
from ...sources.recordings.recording import Recording
from .findings import (
    MAX_FRAMES,
    SEVERITIES,
    Defect,
    Diagnosis,
    Finding,
    Inapplicable,
    Rule,
    Settings,
)
from .rule_table import FAILED, RULES
from .rules.change_scripts import change_script
from .scan import Scan

#: Error numbers of the operating system if it refuses to open a path. The doctor raises such an
#: error. It is no finding, because it does not show that the recording is defective.
_REFUSED = (errno.ENAMETOOLONG, errno.EACCES, errno.ELOOP)


def doctor(
    path: DataDir,
    *,
    only: Sequence[str] = (),
    skip: Sequence[str] = (),
    settings: Mapping[str, float] | None = None,
    sample: int | None = None,
    progress: bool = False,
) -> Diagnosis:
    """Examine a recording of any format for defects, by the rules in `DOCTOR.md`.

    The recording is not changed.

    Args:
        path: A file or folder of any format, or a `Recording`.
        only: Codes of the rules to run, or beginnings of codes such as "VAL"; () runs all.
        skip: Codes of rules, or beginnings of codes, to leave out.
        settings: Thresholds that replace defaults, such as {"VAL05.ranges": 100}.
        sample: Maximum number of episodes whose data are read, evenly spaced. None means all.
        progress: Show a progress bar.

    Raises:
        UsageError: The path does not exist, or a rule, threshold or number is invalid.
        AccessError, FetchError: A remote store refuses access, or does not answer.
    """
    progress = arguments.flag("progress", progress)
    rules = chosen_rules(only, skip)
    changed = _changed_thresholds(settings)
    if sample is not None:
        arguments.whole("sample", sample, 1)
    recording, failure = opened(path)
    scan = Scan(
        path,
        recording,
        failure,
        sample,
        collectors=[collector for rule in rules for collector in rule.collectors],
        with_pictures=any(rule.needs == "G" for rule in rules),
        progress=progress,
    )
    return diagnose(scan, rules, changed)


def diagnose(scan: Scan, rules: Sequence[Rule], changed: Mapping[str, Settings]) -> Diagnosis:
    """Run rules on a scan, and collect their findings in a diagnosis.

    Args:
        scan: Scan of the recording, which has the collectors of all `rules`.
        rules: Rules to run, from `rule_table.RULES`.
        changed: Map from rule code to thresholds that replace defaults of the rule.
    """
    findings: list[Finding] = []
    skipped: list[tuple[str, str]] = []
    for rule in rules:
        settings = {**rule.defaults, **changed.get(rule.code, {})}
        try:
            defects, reason = _check(rule, scan, settings)
            if rule.problems:
                # A check may read data. Errors of reading are known only after the check.
                defects += scan.files.defects(*rule.problems)
            findings += _findings(rule, defects, scan, settings)
            if reason and not defects:
                skipped.append((rule.code, reason))
        except UnansweredError:
            raise
        except Exception as error:  # noqa: BLE001 - any failure of a rule is a finding
            findings += _findings(FAILED, [_failure(rule, error)], scan, {})
    findings.sort(key=lambda finding: -SEVERITIES.index(finding.severity))
    return Diagnosis(tuple(rules), tuple(findings), tuple(skipped), _summary(scan, findings))


def _check(rule: Rule, scan: Scan, settings: Settings) -> tuple[list[Defect], str]:
    """Run the check function of a rule.

    Returns:
        The defects, and the reason why the rule cannot be applied. The reason is "" if the rule
        was applied.
    """
    if rule.compares and scan.is_small:
        return [], "fewer than 8 episodes or 100 frames to compare"
    try:
        return list(rule.check(scan, settings)), ""
    except Inapplicable as reason:
        return [], str(reason)


def opened(path: DataDir) -> tuple[Recording | None, RolloutDataError | None]:
    """Open a recording for an examination, and rebuild its index if the index is damaged.

    Returns:
        The recording and None, or None and the error if the recording cannot be opened.
    """
    if isinstance(path, Recording):
        return path, None
    with warnings.catch_warnings():
        # Findings report the same problems as the warnings.
        warnings.simplefilter("ignore", RolloutDataWarning)
        try:
            return open_source("path", path), None
        except UnansweredError:
            raise
        except (DataFileError, OSError) as error:
            if isinstance(error, UsageError) or _is_refused(error, path):
                raise
            # Formats without an index do not support `on_bad_index`, and raise an error.
            with suppress(RolloutDataError, OSError):
                return open(path, on_bad_index="rebuild"), None
            if isinstance(error, RolloutDataError):
                return None, error
            return None, DataFileError(f"{str(path)!r} cannot be opened: {error}.")


def _is_refused(error: Exception, path: DataDir) -> bool:
    """Return whether the operating system refused to open the path, for example by permissions.

    Such an error does not show that the recording is defective.
    """
    reason: BaseException | None = error
    if isinstance(error, DataFileError) and not os.path.isfile(str(path)):
        reason = error.__cause__
    return isinstance(reason, OSError) and reason.errno in _REFUSED


def chosen_rules(only: Sequence[str], skip: Sequence[str]) -> list[Rule]:
    """Return the rules whose codes start with a text in `only`, without those in `skip`.

    Raises:
        UsageError: No rule code starts with one of the texts.
    """
    codes = [rule.code for rule in RULES]
    for argument, values in (("only", only), ("skip", skip)):
        for prefix in arguments.names(argument, values):
            is_known = any(code.startswith(prefix) for code in codes)
            if not prefix or not is_known:
                raise UsageError(
                    f"{argument} has the unknown rule {prefix!r}. "
                    f"The rules are {nearest(prefix, codes)}."
                )
    rules = list(RULES)
    if only:
        rules = [rule for rule in rules if rule.code.startswith(tuple(only))]
    if skip:
        rules = [rule for rule in rules if not rule.code.startswith(tuple(skip))]
    return rules


def _changed_thresholds(settings: Any) -> dict[str, dict[str, float]]:
    """Check thresholds such as {"VAL05.ranges": 1}, and group them: {"VAL05": {"ranges": 1.0}}."""
    if not isinstance(settings, Mapping | None):
        raise UsageError(f"settings must be a mapping of thresholds, got {settings!r}.")
    known = {f"{rule.code}.{name}": (rule.code, name) for rule in RULES for name in rule.defaults}
    changed: dict[str, dict[str, float]] = {}
    for key, value in (settings or {}).items():
        if key not in known:
            raise UsageError(
                f"settings has the unknown threshold {key!r}. "
                f"The thresholds are {nearest(str(key), known)}."
            )
        number = arguments.real(f"settings[{key!r}]", value, "a number", _is_any_number)
        code, name = known[key]
        changed.setdefault(code, {})[name] = number
    return changed


def _is_any_number(number: float) -> bool:
    return True


def _findings(
    rule: Rule,
    defects: Iterable[Defect],
    scan: Scan,
    settings: Settings,
) -> list[Finding]:
    """Combine the defects that a rule has found into one finding per field."""
    by_field: dict[str | None, list[Defect]] = {}
    for defect in defects:
        by_field.setdefault(defect.field, []).append(defect)
    return [_finding(rule, parts, scan, settings) for parts in by_field.values()]


def _finding(rule: Rule, defects: Sequence[Defect], scan: Scan, settings: Settings) -> Finding:
    """Combine all defects that a rule has found in one field into a finding."""
    places = sorted({int(place) for defect in defects for place in defect.trajectories})
    left_out = tuple(dict.fromkeys(name for defect in defects for name in defect.left_out))
    ranges = [frames for defect in defects for frames in defect.frames][:MAX_FRAMES]
    frames = tuple((int(place), int(start), int(stop)) for place, start, stop in ranges)
    messages = dict.fromkeys(defect.message for defect in defects if defect.message)
    advices = [defect.advice for defect in defects if defect.advice]
    severity = max((defect.severity or rule.severity for defect in defects), key=SEVERITIES.index)

    evidence: dict[str, Any] = {}
    # If several defects have evidence of the same name, the first defect takes precedence.
    for defect in reversed(defects):
        evidence.update(defect.evidence)
    if len(settings) == 1:
        evidence["threshold"] = next(iter(settings.values()))
    elif settings:
        evidence["threshold"] = dict(settings)

    is_frequent = not scan.is_small and len(places) > 0.5 * len(scan.examined)
    if is_frequent and not rule.absolute and severity != "info":
        severity = "info"
        evidence["typical"] = True

    return Finding(
        code=rule.code,
        name=rule.name,
        group=rule.group,
        severity=severity,
        title=rule.title,
        message="; ".join(messages) or rule.title,
        advice=advices[0] if advices else rule.advice,
        repair=rule.repair,
        field=defects[0].field,
        trajectories=(*places, *map(_last_number, left_out)),
        frames=frames,
        evidence=evidence,
        left_out=left_out,
        script=_script(rule, scan),
    )


def _last_number(name: str) -> int:
    """Return the number at the end of a trajectory name, such as 7 for "writer:7"."""
    start = len(name.rstrip("0123456789"))
    return int(name[start:])


def _script(rule: Rule, scan: Scan) -> str:
    """Return the script that corrects the defects of a rule in a copy of the recording.

    The result is "" if the rule has no script, or if the recording cannot be opened.
    """
    if scan.failure is not None:
        return ""
    path = scan.path if isinstance(scan.path, (str, os.PathLike)) else scan.recording.path
    return change_script(rule, scan.recording, str(path))


def _failure(rule: Rule, error: Exception) -> Defect:
    name = type(error).__name__
    message = f"rule {rule.code} failed: {name}: {error}"
    return Defect(message=message, evidence={"rule": rule.code, "error": name})


def _summary(scan: Scan, findings: Sequence[Finding]) -> dict[str, Any]:
    is_open = scan.failure is None
    summary: dict[str, Any] = {
        "path": str(scan.recording.path if is_open else scan.path),
        "format": scan.recording.format if is_open else None,
        "episodes": scan.num_episodes,
        "frames": int(np.sum(scan.lengths)) if is_open else 0,
        "examined": len(scan.examined),
    }
    for severity in reversed(SEVERITIES):
        summary[severity] = sum(finding.severity == severity for finding in findings)
    return summary
