"""Configs of saved folders, read as one changes them by hand: without the checksum, which earlier saves lack too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def config_of(path: Path) -> dict[str, Any]:
    """Read a `config.json` without its checksum; whatever is written in its place is loaded as it is."""
    config = json.loads(path.read_text())
    del config["crc32"]
    return config
