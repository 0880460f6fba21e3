"""Natural sort order of names, by the numbers in them."""

from __future__ import annotations

import re


def natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key that orders names by the numbers in them: "run_2" before "run_10"."""
    return [
        (int(part), part) if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)
    ]
