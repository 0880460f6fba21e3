"""Opening recordings."""

from __future__ import annotations

from typing import Any

from storage.errors import UsageError

from ..remote.access import DataDir, Origin, RemoteOptions, origins_of
from .recording import Recording, open_origin


def open(path: DataDir, format: str | None = None, *, remote: RemoteOptions | None = None, **options: Any) -> Recording:
    """Open recorded experience of any format, by what it contains.

    Args:
        path: A file or folder, or a URL of block files, a LeRobot set or HDF5 files.
        format: Its format; None finds it out from the content.
        remote: How a URL is read.
        **options: Of the format, such as `on_bad_index="rebuild"`.

    Raises:
        DataFileError: It is of no known format, or of one that is not read at a URL, or cannot be read.
        UsageError: There is nothing at the path; the format or an option is not known.
    """
    found, *others = origins_of(path, "call rollout_data.open", "path")
    if others:
        raise UsageError("open", f"{path!r}", "one path", f"{1 + len(others)}", "Give the list to a dataset")
    if not hasattr(path, "origin"):
        found = Origin(found.path, format, options, remote=remote)
    elif format is not None or options or remote is not None:
        raise UsageError("open", f"{path!r}", "no other format or options", f"{format!r} and {options!r}")
    return Recording(found, open_origin(found))
