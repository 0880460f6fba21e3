"""Content of a page, read without a browser."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any


def embedded(page: Path, name: str) -> Any:
    """Return one of the JSON texts of a page."""
    actual = re.search(
        rf'<script type="application/json" id="{name}">(.*?)</script>', page.read_text(), re.DOTALL
    )
    assert actual
    return json.loads(actual[1])
