"""Opening recordings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from storage.core.arguments import instance
from storage.errors import DataFileError, RolloutDataError, UsageError

from ..remote.locations import DataDir, Origin, RemoteOptions, checked_remote, origins_of
from ..sources.recording import Recording, open_origin


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
    if format is not None:
        instance("call rollout_data.open", "format", format, "as a name", str)
    found = _origin_of("call rollout_data.open", "path", path)
    if remote is not None:
        remote = checked_remote("call rollout_data.open", remote)
    if not hasattr(path, "origin"):
        found = Origin(found.path, format, options, remote=remote)
    elif format is not None or options or remote is not None:
        expected = "no other format or options"
        got = f"{format!r} and {options!r}"
        raise UsageError("call rollout_data.open", f"with path={path!r}", expected, got)
    return Recording(found, open_origin(found))


def open_source(action: str, name: str, source: DataDir) -> Recording:
    """Open the source of a call, a path or a `Recording`; errors name the call and its argument."""
    found = _origin_of(action, name, source)
    return Recording(found, open_origin(found))


def present_part(recording: Recording) -> tuple[Recording, list[DataFileError]]:
    """Return the episodes whose files are as they were when the recording was opened, and errors of the others."""
    removed = recording.removed()
    if removed:
        recording = recording.select(one for one in recording.ids if one not in removed)
    return recording, list(removed.values())


def check_any_readable(recording: Recording, num_readable: int, problems: Sequence[RolloutDataError]) -> None:
    """Check that at least one episode of a recording can be read; `problems` tell why others cannot.

    Raises:
        DataFileError: There is none.
    """
    if not num_readable:
        where = repr(str(recording.path))
        reason = str(problems[0]) if problems else ""
        raise DataFileError("read", where, "an episode that can be read", "none", reason)


def _origin_of(action: str, name: str, source: Any) -> Origin:
    found, *others = origins_of(source, action, name)
    if others:
        advice = "Give the list to a dataset, or to merge"
        raise UsageError(action, "", f"{name} as one path", f"{1 + len(others)} paths", advice)
    return found
