"""Opening recordings."""

from __future__ import annotations

from typing import Any

from storage.errors import UsageError

from ..remote.access import DataDir, Origin, origins_of
from .recording import Recording, open_origin


def open(path: DataDir, format: str | None = None, **options: Any) -> Recording:
    """Open recorded experience of any format, by what it contains.

    Args:
        path: A file or folder, or a URL of a folder of block files.
        format: Its format; None finds it out from the content.
        **options: Of the format, such as `on_bad_index="rebuild"`.

    Raises:
        DataFileError: It is of no known format, or cannot be read.
        UsageError: There is nothing at the path; the format or an option is not known.
    """
    found, *others = origins_of(path)
    if others:
        raise UsageError("open", f"{path!r}", "one path", f"{1 + len(others)}", "Give the list to a dataset")
    if not hasattr(path, "origin"):
        found = Origin(found.path, format, options)
    elif format is not None or options:
        raise UsageError("open", f"{path!r}", "no other format or options", f"{format!r} and {options!r}")
    return Recording(found, open_origin(found))
