"""Rules, defects, findings and the result of an examination, as plain values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from dataclasses import field as attribute
from typing import Any

from ...formats.episode_writer import plain

GROUPS = (
    "structure",
    "ends",
    "values",
    "time",
    "learning",
    "images",
    "statistics",
    "files",
    "provenance",
)
#: From the mildest to the worst.
SEVERITIES = ("info", "warning", "error")
#: Maximum number of frame ranges of a finding.
MAX_FRAMES = 20
Settings = Mapping[str, float]


class Inapplicable(Exception):
    """Raised if a rule cannot be applied to this recording. The text is the reason."""


@dataclass(frozen=True)
class Defect:
    """A defect as the function of a rule reports it. Defects of one field become one finding.

    Attributes:
        field: Name of the field; None if the defect concerns the whole recording.
        message: A sentence with the numbers.
        trajectories: Places in the recording.
        frames: (trajectory, start, stop), worst first. Only `MAX_FRAMES` are kept.
        evidence: The compared numbers. The thresholds are added later.
        severity: One of `SEVERITIES`; "" for the severity of the rule.
        advice: The next step; "" for the advice of the rule.
        left_out: Names of trajectories that opening leaves out. They have no place in the
            recording. Each name ends with a number.
    """

    field: str | None = None
    message: str = ""
    trajectories: Iterable[int] = ()
    frames: Iterable[Sequence[int]] = ()
    evidence: Mapping[str, Any] = attribute(default_factory=dict)
    severity: str = ""
    advice: str = ""
    left_out: Iterable[str] = ()


Check = Callable[[Any, Settings], Iterable[Defect]]


@dataclass(frozen=True)
class RegisteredCheck:
    """The function of a rule, and the collectors that it needs."""

    function: Check
    collectors: tuple[type[Any], ...] = ()


#: Rule code -> check. `checks` fills it when the modules of `rules` are imported.
CHECKS: dict[str, RegisteredCheck] = {}


def checks(code: str, *collectors: type[Any]) -> Callable[[Check], Check]:
    """Register a function as the check of a rule. See `Rule.check` and `Rule.collectors`."""

    def register(check: Check) -> Check:
        CHECKS[code] = RegisteredCheck(check, collectors)
        return check

    return register


@dataclass(frozen=True)
class Rule:
    """A row of `rules.csv`, the table of rules.

    Attributes:
        code: Such as "VAL01".
        name: Such as "not finite".
        group: One of `GROUPS`.
        severity: One of `SEVERITIES`.
        needs: The most expensive input: "M" metadata, "T" tables of episodes, "D" data,
            "G" pictures.
        repair: "K" leaves out trajectories, "N" splits them or leaves out rows or fields,
            "S" recomputes metadata and sums, "-" is advice only.
        title: The defect, in a sentence.
        advice: The next step.
        condition: The condition of a defect. `{name}` stands in the place of a threshold.
        check: Called with the `Scan` and the settings. Yields defects, or raises `Inapplicable`.
        defaults: Thresholds by name. `--set CODE.name=value` changes one.
        compares: Whether the rule compares episodes. It is then skipped below 8 episodes or
            100 frames.
        absolute: Whether a defect keeps its severity if more than half of the episodes have it.
        collectors: `Collector` classes whose objects this rule needs besides `Facts`.
        problems: Kinds of `RolloutDataError` that the rule reports if opening or reading met them.
    """

    code: str
    name: str
    group: str
    severity: str
    needs: str
    repair: str
    title: str
    advice: str
    condition: str
    check: Check
    defaults: Settings = attribute(default_factory=dict)
    compares: bool = False
    absolute: bool = False
    collectors: tuple[type[Any], ...] = ()
    problems: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the fields that are plain data."""
        names = ("code", "name", "group", "severity", "needs", "repair", "title", "advice")
        description: dict[str, Any] = {name: getattr(self, name) for name in names}
        description["defaults"] = dict(self.defaults)
        return description

    def guide_row(self) -> str:
        """Return the row of this rule in the table of `DOCTOR.md`, with its thresholds."""
        thresholds = {name: f"{value:g} (`{name}`)" for name, value in self.defaults.items()}
        cells = (
            f"{self.code} {self.name}",
            self.severity,
            self.needs,
            self.repair,
            self.title,
            self.condition.format(**thresholds),
        )
        return f"| {' | '.join(cells)} |"


@dataclass(frozen=True)
class Finding:
    """One defect, with all trajectories that show it.

    Attributes:
        code: Code of the rule.
        name: Name of the rule.
        group: Group of the rule.
        severity: Severity of the rule, or a lower one.
        title: The defect, in a sentence.
        message: A sentence with the numbers.
        advice: The next step.
        repair: As `Rule.repair`.
        field: Name of the field; None if the finding concerns the whole recording.
        trajectories: Numbers: `places`, ascending, then the numbers at the ends of `left_out`.
        frames: Up to 20 (trajectory, start, stop), worst first.
        evidence: The compared numbers, with the thresholds.
        left_out: Names of trajectories that opening leaves out, because a part of them is missing
            or damaged.
        script: Python code that changes the values in a new folder; "" if `repair` handles the
            defect, or nothing can.
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
        """Trajectories that are not left out, as places in `rollout_data.open(path)`."""
        num_places = len(self.trajectories) - len(self.left_out)
        return self.trajectories[:num_places]


@dataclass(frozen=True)
class Diagnosis:
    """The result of an examination.

    Attributes:
        rules: The chosen rules.
        findings: Errors first, then in the order of the table of rules.
        skipped: (code, reason) of rules that could not be applied.
        summary: Path, format, and the number of episodes, frames and findings of each severity.
    """

    rules: tuple[Rule, ...]
    findings: tuple[Finding, ...]
    skipped: tuple[tuple[str, str], ...]
    summary: dict[str, Any]

    def at_least(self, severity: str) -> list[Finding]:
        """Return the findings of this severity or worse."""
        reached = SEVERITIES[SEVERITIES.index(severity) :]
        return [finding for finding in self.findings if finding.severity in reached]

    def as_dict(self) -> dict[str, Any]:
        """Return the diagnosis as plain data, in the form of the JSON output."""
        diagnosis: dict[str, Any] = plain(
            {
                "rules": [rule.as_dict() for rule in self.rules],
                "findings": [asdict(finding) for finding in self.findings],
                "skipped": [{"code": code, "why": reason} for code, reason in self.skipped],
                "summary": self.summary,
            }
        )
        return diagnosis
