"""An enum of a module that a program has not imported when it loads a checkpoint."""

from __future__ import annotations

import enum


class Phase(enum.Enum):
    WARM_UP = 1
