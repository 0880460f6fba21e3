"""Search metadata for the origin of the data, and for private data such as tokens."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

#: Facts about the origin of the data. For each fact, the metadata keys that may state it.
ORIGINS: dict[str, tuple[str, ...]] = {
    "env": (
        "env",
        "env_name",
        "env_id",
        "env_args",
        "env_spec",
        "task",
        "dataset_id",
        "robot_type",
        "robot",
    ),
    "policy": (
        "policy",
        "policy_version",
        "algorithm",
        "agent",
        "collector",
        "operator",
        "training_policy_logdir",
    ),
    "version": (
        "version",
        "software",
        "env_version",
        "commit",
        "commit_info",
        "code_version",
        "library_version",
    ),
    "rate": ("frame_rate_hz", "fps", "control_freq", "rate_hz", "dt", "frequency_hz"),
}
_TOKEN = (
    r"\b(?:hf_|gh[pousr]_|github_pat_|glpat-|sk-|xox[abpr]-|AKIA|AIza)[A-Za-z0-9_-]{12,}"
    r"|\beyJ[\w-]{10,}\.[\w-]{10,}"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY[\s\S]*"
)
#: Regular expression for each kind of private data.
_SECRETS = {
    "a token": re.compile(_TOKEN),
    "a mail address": re.compile(r"\b[\w.+-]+@[\w-]+(?:\.[\w-]+)*\.[A-Za-z]{2,}\b"),
    "a home directory": re.compile(r"(?:/home/|/Users/|[A-Za-z]:\\Users\\)[^/\\\s\"']+"),
}
#: Pattern of metadata keys whose values are secrets.
_SECRET_KEYS = re.compile(r"(?i).*(api_?key|token|secret|passw(or)?d|credential)s?$")
#: Minimum length of a value that counts as a secret because of its key, in characters.
_MIN_SECRET = 8
#: Maximum depth to which nested metadata are searched.
_MAX_DEPTH = 8
#: Maximum number of items that are searched in a list.
_MAX_ITEMS = 100
#: Maximum number of characters that are searched in a text.
_MAX_TEXT = 1 << 16
_MASK = "***"


def secrets_of(
    metadata: Any,
    key: str = "metadata",
    depth: int = 0,
) -> Iterator[tuple[str, str, str]]:
    """Yield private data in nested metadata, each as (key, kind, masked text).

    Args:
        metadata: Metadata, or a value in it.
        key: Dotted path of keys that leads to `metadata`.
        depth: Number of levels above `metadata`.
    """
    if isinstance(metadata, str):
        for kind, secret in _secrets_in_text(metadata, key):
            yield key, kind, f"{secret[:3]}{'*' * 8}"
    elif depth >= _MAX_DEPTH:
        return
    elif isinstance(metadata, Mapping):
        for name, value in metadata.items():
            yield from secrets_of(value, f"{key}.{name}", depth + 1)
    elif isinstance(metadata, (list, tuple)):
        for value in metadata[:_MAX_ITEMS]:
            yield from secrets_of(value, key, depth + 1)


def _secrets_in_text(text: str, key: str) -> list[tuple[str, str]]:
    """Return the first match of each kind of private data in a text, as (kind, match)."""
    secrets = []
    for kind, pattern in _SECRETS.items():
        match = pattern.search(text[:_MAX_TEXT])
        if match:
            secrets.append((kind, match[0]))
    if not secrets and _is_secret_by_key(text, key):
        secrets.append(("a token", text))
    return secrets


def _is_secret_by_key(text: str, key: str) -> bool:
    return bool(_SECRET_KEYS.match(key)) and len(text) >= _MIN_SECRET and " " not in text


def masked(metadata: Any, key: str = "") -> Any:
    """Return a copy of nested metadata in which `***` replaces private data."""
    if isinstance(metadata, Mapping):
        return {name: masked(value, str(name)) for name, value in metadata.items()}
    if isinstance(metadata, (list, tuple)):
        return [masked(value, key) for value in metadata]
    if not isinstance(metadata, str):
        return metadata
    if _is_secret_by_key(metadata, key):
        return _MASK
    for pattern in _SECRETS.values():
        metadata = pattern.sub(_MASK, metadata)
    return metadata
