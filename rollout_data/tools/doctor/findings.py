"""Findings and rules as values: what a rule declares, what it reports, and the answer to a whole examination.

One rule: nothing here looks at data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from dataclasses import field as attribute
from typing import Any

from ...formats.episode_writer import plain

GROUPS = ("structure", "ends", "values", "time", "learning", "images", "statistics", "files", "provenance")
#: From the least to the worst.
SEVERITIES = ("info", "warning", "error")
MAX_FRAMES = 20
Settings = Mapping[str, float]


class Inapplicable(Exception):
    """Raised by a rule that cannot be applied to this recording; the text says why."""


@dataclass(frozen=True)
class Found:
    """What the function of a rule reports; those of one field become one finding.

    Attributes:
        field: Name of the field; None if it is about the whole.
        message: A sentence with the numbers.
        trajectories: Places in the recording.
        frames: (trajectory, start, stop), worst first; more than `MAX_FRAMES` are cut off.
        evidence: The numbers compared; the thresholds are added.
        severity, advice: "" takes the rule's.
        left_out: Names of trajectories that opening leaves out, so that they have no place; each ends with a number.
    """

    field: str | None = None
    message: str = ""
    trajectories: Iterable[int] = ()
    frames: Iterable[Sequence[int]] = ()
    evidence: Mapping[str, Any] = attribute(default_factory=dict)
    severity: str = ""
    advice: str = ""
    left_out: Iterable[str] = ()


Check = Callable[[Any, Settings], Iterable[Found]]
#: Code -> the function that looks for it and what the pass gathers for that; `checks` fills it.
CHECKS: dict[str, tuple[Check, tuple[type[Any], ...]]] = {}


def checks(code: str, *collectors: type[Any]) -> Callable[[Check], Check]:
    """Make a function that of the rule with this code; see `Rule.check`, `Rule.collectors`."""

    def register(check: Check) -> Check:
        CHECKS[code] = check, collectors
        return check

    return register


@dataclass(frozen=True)
class Rule:
    """A row of `rules.csv`, the table of rules.

    Attributes:
        code, name: Such as "VAL01", "not finite".
        group, severity: One of `GROUPS`, of `SEVERITIES`.
        needs: "M" metadata, "T" tables of episodes, "D" data, "G" pictures: the most expensive one.
        repair: "K" leaves out trajectories, "N" splits them or leaves out rows or fields, "S" recomputes what
            follows from the data, "-" is advice only.
        title: What is wrong, in a sentence.
        advice: What to do.
        check: Called with the `Scan` and the settings; yields `Found`, or raises `Inapplicable`.
        defaults: Thresholds by name, which `--set CODE.name=value` changes.
        compares: It compares episodes: skipped below 8 episodes or 100 frames.
        absolute: What more than half of the episodes show is a defect all the same.
        collectors: Each a `Collector`, what the pass has to gather for it besides `Facts`.
        problems: Kinds of `RolloutDataError` that it reports where opening or reading met them.
    """

    code: str
    name: str
    group: str
    severity: str
    needs: str
    repair: str
    title: str
    advice: str
    check: Check
    defaults: Settings = attribute(default_factory=dict)
    compares: bool = False
    absolute: bool = False
    collectors: tuple[type[Any], ...] = ()
    problems: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Describe the rule without its functions."""
        names = ("code", "name", "group", "severity", "needs", "repair", "title", "advice")
        return {**{name: getattr(self, name) for name in names}, "defaults": dict(self.defaults)}


@dataclass(frozen=True)
class Finding:
    """One defect, with all trajectories that show it.

    Attributes:
        code, name, group, severity, title, advice, repair: Of the rule; `severity` may be lowered.
        message: A sentence with the numbers.
        field: Name of the field; None if it is about the whole.
        trajectories: Numbers: the `places`, ascending, then for each of `left_out` the number that its name ends with.
        frames: Up to 20 (trajectory, start, stop), worst first.
        evidence: The numbers compared, with the threshold.
        left_out: Names of the trajectories that opening leaves out, because a part of them is missing or damaged.
        script: Python code that changes the values in a new folder; "" if `repair` mends it, or nothing can.
    """

    code: str
    name: str
    group: str
    severity: str
    title: str
    message: str
    advice: str
    repair: str
    field: str | None
    trajectories: tuple[int, ...]
    frames: tuple[tuple[int, int, int], ...]
    evidence: dict[str, Any]
    left_out: tuple[str, ...] = ()
    script: str = ""

    @property
    def places(self) -> tuple[int, ...]:
        """Places in `rollout_data.open(path)` of the trajectories that opening does not leave out."""
        return self.trajectories[: len(self.trajectories) - len(self.left_out)]


@dataclass(frozen=True)
class Diagnosis:
    """What an examination found.

    Attributes:
        rules: Those that were asked for.
        findings: Errors first, then in the order of the table.
        skipped: (code, why) of rules that could not be applied.
        summary: Counts: episodes, frames, findings of each severity; the path and its format.
    """

    rules: tuple[Rule, ...]
    findings: tuple[Finding, ...]
    skipped: tuple[tuple[str, str], ...]
    summary: dict[str, Any]

    def at_least(self, severity: str) -> list[Finding]:
        """Return the findings of this severity or worse."""
        return [one for one in self.findings if SEVERITIES.index(one.severity) >= SEVERITIES.index(severity)]

    def as_dict(self) -> dict[str, Any]:
        """Return everything as JSON has it."""
        found: dict[str, Any] = plain(
            {
                "rules": [rule.as_dict() for rule in self.rules],
                "findings": [asdict(finding) for finding in self.findings],
                "skipped": [{"code": code, "why": why} for code, why in self.skipped],
                "summary": self.summary,
            }
        )
        return found
