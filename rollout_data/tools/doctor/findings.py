"""Data classes of `doctor`: rules, the defects they find, findings and the diagnosis."""

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
#: Severities of findings, the least severe first.
SEVERITIES = ("info", "warning", "error")
#: Maximum number of frame ranges that a finding stores.
MAX_FRAMES = 20
Settings = Mapping[str, float]


class Inapplicable(Exception):
    """Raised if a rule cannot be applied to a recording. The message is the reason."""


@dataclass(frozen=True)
class Defect:
    """Defect of a recording that the check function of a rule has found.

    All defects that a rule finds in one field are combined into one finding.

    Attributes:
        field: Name of the field; None if the defect concerns the whole recording.
        message: Sentence about the defect, with measured values.
        trajectories: Indices of the affected episodes in the recording.
        frames: Affected frame ranges as (episode, start, stop), the worst first. A finding stores
            the first 20 ranges of its defects.
        evidence: Measured values by name. The finding adds the thresholds.
        severity: One of `SEVERITIES`; "" means the severity of the rule.
        advice: Next step for the user; "" means the advice of the rule.
        left_out: Names of affected trajectories that are not in the opened recording, because they
            are incomplete or damaged. Each name ends with a number.
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
    """Check function of a rule, and the collector classes that it needs."""

    function: Check
    collectors: tuple[type[Any], ...] = ()


#: Check function of each rule code. Importing the modules in `rules/` adds the entries.
CHECKS: dict[str, RegisteredCheck] = {}


def checks(code: str, *collectors: type[Any]) -> Callable[[Check], Check]:
    """Return a decorator that registers a function as the check function of the rule `code`.

    `collectors` are the collector classes whose results the function reads by `Scan.collected`.
    """

    def register(check: Check) -> Check:
        CHECKS[code] = RegisteredCheck(check, collectors)
        return check

    return register


@dataclass(frozen=True)
class Rule:
    """Rule of the doctor: a row of `rules.csv` with its check function.

    Attributes:
        code: Code of the rule, such as "VAL01".
        name: Short name, such as "not finite".
        group: One of `GROUPS`.
        severity: One of `SEVERITIES`.
        needs: Most expensive input that the rule reads: "M" metadata, "T" tables of episodes, "D"
            data, "G" images.
        repair: What `repair` does: "K" removes trajectories, "N" splits them or removes rows or
            fields, "S" recomputes metadata and sums, "-" nothing.
        title: Sentence that describes the defect.
        advice: Next step for the user.
        condition: Condition of a defect for `DOCTOR.md`, with `{name}` for a threshold.
        check: Function of the `Scan` and the settings that yields defects, or raises
            `Inapplicable`.
        defaults: Default thresholds by name. `--set CODE.name=value` replaces one.
        compares: Whether the rule compares episodes, so that it needs 8 episodes and 100 frames.
        absolute: Whether a defect keeps its severity if more than half of the episodes have it.
            Otherwise such a defect becomes "info".
        collectors: Collector classes that the check function needs.
        problems: Kinds of errors of opening or reading that the rule reports as defects.
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
        """Return the attributes of the rule as a dict of JSON values, for `--list-rules --json`."""
        names = ("code", "name", "group", "severity", "needs", "repair", "title", "advice")
        description: dict[str, Any] = {name: getattr(self, name) for name in names}
        description["defaults"] = dict(self.defaults)
        return description

    def guide_row(self) -> str:
        """Return the Markdown row of this rule for `DOCTOR.md`, with its thresholds."""
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
    """Defects that a rule has found in one field, or in the recording as a whole.

    Attributes:
        code: Code of the rule.
        name: Name of the rule.
        group: Group of the rule.
        severity: Worst severity of the defects. It is lowered to "info" if more than half of the
            episodes are affected and the rule is not `absolute`.
        title: Sentence that describes the defect.
        message: Sentence about the defect in this recording, with measured values.
        advice: Next step for the user.
        repair: What `repair` does; see `Rule.repair`.
        field: Name of the field; None if the finding concerns the whole recording.
        trajectories: Indices in `places`, then the numbers at the ends of the names in `left_out`.
        frames: Up to 20 frame ranges (episode, start, stop), the worst first.
        evidence: Measured values and thresholds by name.
        left_out: Names of affected trajectories that are not in the opened recording, because they
            are incomplete or damaged.
        script: Python script that writes a copy of the recording with corrected values; "" if the
            rule has none.
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
        """Indices of the affected episodes in `rollout_data.open(path)`, ascending."""
        num_places = len(self.trajectories) - len(self.left_out)
        return self.trajectories[:num_places]


@dataclass(frozen=True)
class Diagnosis:
    """Result of an examination by `doctor`.

    Attributes:
        rules: Rules that were chosen.
        findings: Findings, the most severe first, then in the order of the rules.
        skipped: Rules that could not be applied, as (code, reason).
        summary: Path, format, and the number of episodes, frames and findings of each severity.
    """

    rules: tuple[Rule, ...]
    findings: tuple[Finding, ...]
    skipped: tuple[tuple[str, str], ...]
    summary: dict[str, Any]

    def at_least(self, severity: str) -> list[Finding]:
        """Return the findings with this severity or a worse one."""
        reached = SEVERITIES[SEVERITIES.index(severity) :]
        return [finding for finding in self.findings if finding.severity in reached]

    def as_dict(self) -> dict[str, Any]:
        """Return the diagnosis as JSON values, as printed by `doctor --json`."""
        diagnosis: dict[str, Any] = plain(
            {
                "rules": [rule.as_dict() for rule in self.rules],
                "findings": [asdict(finding) for finding in self.findings],
                "skipped": [{"code": code, "why": reason} for code, reason in self.skipped],
                "summary": self.summary,
            }
        )
        return diagnosis
