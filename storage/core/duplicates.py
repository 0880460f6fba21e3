"""`Unique`: what cannot be copied says so.

One rule: an object that owns files or threads is neither pickled nor copied; stores are, by `saving/store.py`.
"""

from __future__ import annotations

from typing import ClassVar, NoReturn

from ..errors import UsageError


class Unique:
    """Refuses copies of what owns files or threads, in words instead of those of the first lock inside."""

    _instead: ClassVar[str] = "Make another one"

    def __reduce__(self) -> NoReturn:
        raise UsageError(f"pickle or copy a {type(self).__name__}, which owns files or threads", advice=self._instead)
