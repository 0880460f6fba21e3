"""Table of all rules: the rows of `rules.csv` with their check functions.

The help text, `--list-rules`, the table in `DOCTOR.md` and tests are generated from it.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

from .findings import CHECKS, RegisteredCheck, Rule
from .rules import (
    episode_end_rules,
    image_rules,
    learning_rules,
    rotation_rules,
    stored_data_rules,
    structure_rules,
    timing_rules,
    value_rules,
)

#: Modules with check functions. Importing them registers the functions in `CHECKS`.
_RULE_MODULES = (
    structure_rules,
    episode_end_rules,
    value_rules,
    rotation_rules,
    timing_rules,
    learning_rules,
    image_rules,
    stored_data_rules,
)


def _no_check(scan: object, settings: object) -> tuple[()]:
    """Return no defects. This is the check of rules that only report errors of other code."""
    return ()


def _read_rules() -> Iterator[Rule]:
    """Read the rules in `rules.csv` and combine them with their check functions."""
    with open(Path(__file__).with_name("rules.csv"), newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            compared = row.pop("compared").split()
            problems = row.pop("problems").split()
            defaults = _thresholds(row.pop("defaults"))
            check = CHECKS.get(row["code"], RegisteredCheck(_no_check))
            yield Rule(
                **row,
                check=check.function,
                defaults=defaults,
                compares="compares" in compared,
                absolute="absolute" in compared,
                collectors=check.collectors,
                problems=tuple(problems),
            )


def _thresholds(text: str) -> dict[str, float]:
    """Parse thresholds written as "name=value name=value"."""
    thresholds = {}
    for pair in text.split():
        name, _, value = pair.partition("=")
        thresholds[name] = float(value)
    return thresholds


#: All rules, in the order of `DOCTOR.md`.
RULES: tuple[Rule, ...] = tuple(_read_rules())
#: Rule FIL00, which reports exceptions raised by the check functions of other rules.
FAILED = next(rule for rule in RULES if rule.code == "FIL00")
