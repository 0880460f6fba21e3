"""Configs of saved folders without the checksum, so that tests can edit them by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def config_of(path: Path) -> dict[str, Any]:
    """Read a `config.json` and remove its checksum.

    A config without a checksum can be edited and still be loaded.
    """
    config = json.loads(path.read_text())
    del config["crc32"]
    return config
