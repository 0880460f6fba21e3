"""What metadata tell of an origin, and what they should not tell."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

#: What should be known -> keys that tell it.
ORIGINS: dict[str, tuple[str, ...]] = {
    "env": ("env", "env_name", "env_id", "env_args", "env_spec", "task", "dataset_id", "robot_type", "robot"),
    "policy": ("policy", "policy_version", "algorithm", "agent", "collector", "operator", "training_policy_logdir"),
    "version": ("version", "software", "env_version", "commit", "commit_info", "code_version", "library_version"),
    "rate": ("frame_rate_hz", "fps", "control_freq", "rate_hz", "dt", "frequency_hz"),
}
_TOKEN = (
    r"\b(?:hf_|gh[pousr]_|github_pat_|glpat-|sk-|xox[abpr]-|AKIA|AIza)[A-Za-z0-9_-]{12,}|\beyJ[\w-]{10,}\.[\w-]{10,}"
)
_SECRETS = {
    "a token": re.compile(_TOKEN + r"|-----BEGIN [A-Z ]*PRIVATE KEY[\s\S]*"),
    "a mail address": re.compile(r"\b[\w.+-]+@[\w-]+(?:\.[\w-]+)*\.[A-Za-z]{2,}\b"),
    "a home directory": re.compile(r"(?:/home/|/Users/|[A-Za-z]:\\Users\\)[^/\\\s\"']+"),
}
_KEYS = re.compile(r"(?i).*(api_?key|token|secret|passw(or)?d|credential)s?$")
_MAX_DEPTH = 8
_MAX_TEXT = 1 << 16
#: A shorter text is no secret, whatever it is called.
_MIN_SECRET, _MASK = 8, "***"


def secrets_of(about: Any, key: str = "metadata", depth: int = 0) -> Iterator[tuple[str, str, str]]:
    """Yield (where, what, masked text) of each secret in nested metadata."""
    if isinstance(about, Mapping):
        for name, value in about.items() if depth < _MAX_DEPTH else ():
            yield from secrets_of(value, f"{key}.{name}", depth + 1)
    elif isinstance(about, (list, tuple)):
        for value in about[:100] if depth < _MAX_DEPTH else ():
            yield from secrets_of(value, key, depth + 1)
    elif isinstance(about, str):
        matches = [(what, found[0]) for what, text in _SECRETS.items() if (found := text.search(about[:_MAX_TEXT]))]
        if not matches and _KEYS.match(key) and len(about) >= _MIN_SECRET and " " not in about:
            matches = [("a token", about)]
        for what, secret in matches:
            yield key, what, f"{secret[:3]}{'*' * 8}"


def masked(about: Any, key: str = "") -> Any:
    """Return nested metadata with `***` in place of what `secrets_of` finds."""
    if isinstance(about, Mapping):
        return {name: masked(value, str(name)) for name, value in about.items()}
    if isinstance(about, (list, tuple)):
        return [masked(value, key) for value in about]
    if not isinstance(about, str):
        return about
    if _KEYS.match(key) and len(about) >= _MIN_SECRET and " " not in about:
        return _MASK
    for text in _SECRETS.values():
        about = text.sub(_MASK, about)
    return about
