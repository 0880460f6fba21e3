"""The examination: chooses rules, runs them over one scan, and gathers what they find.

One rule: no rule ends the run; one that fails is itself the finding FIL00. A store that does not answer ends it.
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
from storage.errors import DataFileError, RolloutDataError, RolloutDataWarning, UnansweredError, UsageError, nearest

from ...formats.open_recording import open, open_source
from ...remote.locations import DataDir
from ...sources.recording import Recording
from .findings import MAX_FRAMES, SEVERITIES, Defect, Diagnosis, Finding, Inapplicable, Rule, Settings
from .rule_table import FAILED, RULES
from .rules.change_scripts import change_script
from .scan import Scan


def doctor(
    path: DataDir,
    *,
    only: Sequence[str] = (),
    skip: Sequence[str] = (),
    settings: Mapping[str, float] | None = None,
    sample: int | None = None,
    progress: bool = False,
) -> Diagnosis:
    """Examine a recording of any format by the rules of `DOCTOR.md`; nothing is changed.

    Args:
        path: A file or folder of any format, or a `Recording`.
        only: Codes of the rules to run, or beginnings of codes such as "VAL"; () is all.
        skip: Codes of rules, or beginnings of codes, to leave out.
        settings: Thresholds to change: {"VAL05.ranges": 100}.
        sample: Read the data of this number of episodes at most, evenly spread.
        progress: Show a progress bar.

    Raises:
        UsageError: There is nothing at the path; a rule, a threshold or a number is not known.
        AccessError, FetchError: The store refuses access, or does not answer.
    """
    action = "call rollout_data.doctor"
    progress = arguments.flag(action, "progress", progress)
    rules = chosen_rules(action, only, skip)
    changed = _changed(action, settings)
    if sample is not None:
        arguments.whole(action, "sample", sample, 1)
    recording, failure = opened(action, path)
    kinds = [kind for rule in rules for kind in rule.collectors]
    with_pictures = any(rule.needs == "G" for rule in rules)
    return diagnose(Scan(path, recording, failure, sample, kinds, with_pictures, progress), rules, changed)


def diagnose(scan: Scan, rules: Sequence[Rule], changed: Mapping[str, Settings]) -> Diagnosis:
    """Run rules over a scan that gathers what they need.

    Args:
        scan: Of the recording.
        rules: Rows of the table.
        changed: Code -> thresholds that differ from the rule's.
    """
    findings: list[Finding] = []
    skipped: list[tuple[str, str]] = []
    for rule in rules:
        settings = {**rule.defaults, **changed.get(rule.code, {})}
        try:
            found, why = _checked(rule, scan, settings)
            found += scan.files.told(*rule.problems) if rule.problems else ()  # checks may read, and meet more
            findings += _gathered(rule, found, scan, settings)
            skipped += [(rule.code, why)] if why and not found else []
        except UnansweredError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a rule did not expect is a finding
            findings += _gathered(FAILED, [_failure(rule, error)], scan, {})
    findings.sort(key=lambda one: -SEVERITIES.index(one.severity))
    return Diagnosis(tuple(rules), tuple(findings), tuple(skipped), _summary(scan, scan.path, findings))


def _checked(rule: Rule, scan: Scan, settings: Settings) -> tuple[list[Defect], str]:
    """Return what a rule finds, and why it cannot be applied, or ""."""
    if rule.compares and scan.is_small:
        return [], "fewer than 8 episodes or 100 frames to compare"
    try:
        return list(rule.check(scan, settings)), ""
    except Inapplicable as why:
        return [], str(why)


def opened(action: str, path: DataDir) -> tuple[Recording | None, RolloutDataError | None]:
    """Open what is to be examined, by its rows where its index is bad: (recording, None) or (None, why not)."""
    with warnings.catch_warnings():
        if not isinstance(path, Recording):  # what would be warned of is reported
            warnings.simplefilter("ignore", RolloutDataWarning)
        try:
            return (path if isinstance(path, Recording) else open_source(action, "path", path)), None
        except UnansweredError:
            raise
        except (DataFileError, OSError) as error:
            is_of_folder = isinstance(error, DataFileError) and not os.path.isfile(str(path))
            reason = error.__cause__ if is_of_folder else error
            is_refused = isinstance(reason, OSError) and reason.errno in (errno.ENAMETOOLONG, errno.EACCES, errno.ELOOP)
            if is_refused or isinstance(error, UsageError):
                raise  # there is nothing to examine
            with suppress(RolloutDataError, OSError):  # no format but those with an index has this option
                return open(path, on_bad_index="rebuild"), None
            if isinstance(error, RolloutDataError):
                return None, error
            return None, DataFileError("open", repr(str(path)), "", str(error))


def chosen_rules(action: str, only: Sequence[str], skip: Sequence[str]) -> list[Rule]:
    """Return the rules of some codes, or beginnings of codes.

    Raises:
        UsageError: There is none.
    """
    codes = [rule.code for rule in RULES]
    for name, given in (("only", only), ("skip", skip)):
        for one in arguments.names(action, name, given):
            if not any(code.startswith(one) for code in codes) or not one:
                raise UsageError(action, "", f"{name} with codes of rules, {nearest(one, codes)}", repr(one))
    kept = [rule for rule in RULES if not only or rule.code.startswith(tuple(only))]
    return [rule for rule in kept if not (skip and rule.code.startswith(tuple(skip)))]


def _changed(action: str, settings: Any) -> dict[str, dict[str, float]]:
    """Return {"VAL05": {"ranges": 100.0}} for {"VAL05.ranges": 100}."""
    known = {f"{rule.code}.{name}": (rule.code, name) for rule in RULES for name in rule.defaults}
    found: dict[str, dict[str, float]] = {}
    if not isinstance(settings, Mapping | None):
        raise UsageError(action, "", "settings as a mapping of thresholds", repr(settings))
    for key, value in (settings or {}).items():
        if key not in known:
            raise UsageError(action, "", f"settings among {nearest(str(key), known)}", repr(key))
        code, name = known[key]
        found.setdefault(code, {})[name] = arguments.real(
            action, f"settings[{key!r}]", value, "a number", lambda number: True
        )
    return found


def _gathered(rule: Rule, found: Iterable[Defect], scan: Scan, settings: Settings) -> list[Finding]:
    """Make one finding of what was reported for each field."""
    by_field: dict[str | None, list[Defect]] = {}
    for one in found:
        by_field.setdefault(one.field, []).append(one)
    return [_finding(rule, field, parts, scan, settings) for field, parts in by_field.items()]


def _finding(rule: Rule, field: str | None, parts: Sequence[Defect], scan: Scan, settings: Settings) -> Finding:
    places = sorted({int(place) for part in parts for place in part.trajectories})
    left_out = tuple(dict.fromkeys(name for part in parts for name in part.left_out))
    numbers = [int(name[len(name.rstrip("0123456789")) :]) for name in left_out]
    frames = [(int(place), int(start), int(stop)) for part in parts for place, start, stop in part.frames]
    severity = max((part.severity or rule.severity for part in parts), key=SEVERITIES.index)
    is_typical = not rule.absolute and not scan.is_small and len(places) > 0.5 * len(scan.examined)
    evidence = {name: value for part in reversed(parts) for name, value in part.evidence.items()}
    if settings:
        evidence["threshold"] = next(iter(settings.values())) if len(settings) == 1 else dict(settings)
    if is_typical and severity != "info":
        severity, evidence["typical"] = "info", True
    message = "; ".join(dict.fromkeys(part.message for part in parts if part.message)) or rule.title
    advice = next((part.advice for part in parts if part.advice), rule.advice)
    return Finding(
        **{name: getattr(rule, name) for name in ("code", "name", "group", "title", "repair")},
        severity=severity,
        message=message,
        advice=advice,
        field=field,
        trajectories=(*places, *numbers),
        frames=tuple(frames[:MAX_FRAMES]),
        evidence=evidence,
        left_out=left_out,
        script=_script(rule, scan),
    )


def _script(rule: Rule, scan: Scan) -> str:
    """Return the script of a rule for the recording that is examined; "" without one."""
    if scan.failure is not None:
        return ""
    path = scan.path if isinstance(scan.path, (str, os.PathLike)) else scan.recording.path
    return change_script(rule, scan.recording, str(path))


def _failure(rule: Rule, error: Exception) -> Defect:
    message = f"rule {rule.code} failed: {type(error).__name__}: {error}"
    return Defect(message=message, evidence={"rule": rule.code, "error": type(error).__name__})


def _summary(scan: Scan, path: Any, findings: Sequence[Finding]) -> dict[str, Any]:
    is_open = scan.failure is None
    counts = {name: sum(one.severity == name for one in findings) for name in reversed(SEVERITIES)}
    return {
        "path": str(scan.recording.path if is_open else path),
        "format": scan.recording.format if is_open else None,
        "episodes": scan.num_episodes,
        "frames": int(np.sum(scan.lengths)) if is_open else 0,
        "examined": len(scan.examined),
        **counts,
    }
