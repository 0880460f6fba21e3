"""The table of rules: rows of `rules.csv`, each with its function; help, `--list-rules` and tests are made from it."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

from .findings import CHECKS, Rule
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

#: Importing these names the function of each rule.
_FILES = (
    structure_rules,
    episode_end_rules,
    value_rules,
    rotation_rules,
    timing_rules,
    learning_rules,
    image_rules,
    stored_data_rules,
)


def _nothing(scan: object, settings: object) -> tuple[()]:
    """Look for nothing: the rule reports problems only, or others' failures."""
    return ()


def _rows() -> Iterator[Rule]:
    with open(Path(__file__).with_name("rules.csv"), newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            compared, problems, thresholds = (row.pop(key).split() for key in ("compared", "problems", "defaults"))
            defaults = {name: float(value) for name, _, value in (one.partition("=") for one in thresholds)}
            check, collectors = CHECKS.get(row["code"], (_nothing, ()))
            yield Rule(
                **row,
                check=check,
                defaults=defaults,
                compares="compares" in compared,
                absolute="absolute" in compared,
                collectors=collectors,
                problems=tuple(problems),
            )


#: All rules, in the order of `DOCTOR.md`.
RULES: tuple[Rule, ...] = tuple(_rows())
FAILED = next(rule for rule in RULES if rule.code == "FIL00")
