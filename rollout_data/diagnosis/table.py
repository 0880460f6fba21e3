"""The table of rules: one row each, from the files of their groups; help, `--list-rules` and tests are made from it."""

from __future__ import annotations

from .finding import Rule
from .rules.ends import ENDS
from .rules.images import IMAGES
from .rules.learning import LEARNING
from .rules.rotations import ROTATIONS
from .rules.stored import STORED
from .rules.structure import STRUCTURE
from .rules.timing import TIMING
from .rules.values import VALUES


def _nothing(scan: object, settings: object) -> tuple[()]:
    """Find nothing: others' failures are reported under this rule."""
    return ()


FAILED = Rule(
    "FIL00",
    "rule failed",
    "files",
    "warning",
    "M",
    "-",
    "a rule failed, and what it would have found is unknown",
    "report it with the message; --skip leaves the rule out",
    _nothing,
    absolute=True,
)
_GROUPS = (STRUCTURE, ENDS, (*VALUES, *ROTATIONS), TIMING, LEARNING, IMAGES, (FAILED, *STORED))
#: All rules, in the order of `DOCTOR.md`.
RULES: tuple[Rule, ...] = tuple(rule for group in _GROUPS for rule in sorted(group, key=lambda one: one.code))
