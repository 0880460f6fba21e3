"""`open`: open a recording of any format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from storage.core.arguments import instance
from storage.errors import DataFileError, RolloutDataError, UsageError

from ..remote.locations import DataDir, Origin, RemoteOptions, checked_remote, origins_of
from ..sources.recordings.open_episodes import open_episodes
from ..sources.recordings.recording import Recording


def open(
    path: DataDir,
    format: str | None = None,
    *,
    remote: RemoteOptions | None = None,
    **options: Any,
) -> Recording:
    """Open recorded experience of any format.

    Args:
        path: A file or folder, or a URL of block files, a LeRobot set or HDF5 files.
        format: Name of the format; None detects it from the content.
        remote: Options for reading a URL.
        **options: Options of the format, such as `on_bad_index="rebuild"`.

    Raises:
        DataFileError: The data are unreadable or have no known format, or the format cannot be read
            from a URL.
        UsageError: The path does not exist, or the format or an option is unknown.
    """
    if format is not None:
        instance("format", format, "a name", str)
    origin = _origin_of("path", path)
    if remote is not None:
        remote = checked_remote(remote)

    if not hasattr(path, "origin"):
        origin = Origin(origin.path, format, options, remote=remote)
    elif format is not None or options or remote is not None:
        raise UsageError(
            f"path is {path!r}, which is an open recording. Omit format, remote and the options, "
            "or pass the path of its files."
        )
    return Recording(origin, open_episodes(origin))


def open_source(name: str, source: DataDir) -> Recording:
    """Open a path or a `Recording`. Errors name the argument `name`."""
    origin = _origin_of(name, source)
    return Recording(origin, open_episodes(origin))


def present_part(recording: Recording) -> tuple[Recording, list[DataFileError]]:
    """Select the episodes of a recording whose files have not changed since it was opened.

    Returns:
        A recording of the unchanged episodes, and the errors of the changed episodes.
    """
    removed = recording.removed()
    if removed:
        recording = recording.select(name for name in recording.ids if name not in removed)
    return recording, list(removed.values())


def check_any_readable(
    recording: Recording,
    num_readable: int,
    problems: Sequence[RolloutDataError],
) -> None:
    """Check that at least one episode of a recording can be read.

    Args:
        recording: The recording.
        num_readable: Number of readable episodes.
        problems: Errors of the unreadable episodes.

    Raises:
        DataFileError: No episode is readable. The error contains the first problem.
    """
    if not num_readable:
        message = f"{str(recording.path)!r} has no readable episode."
        if problems:
            message += f" {problems[0]}"
        raise DataFileError(message)


def _origin_of(name: str, source: Any) -> Origin:
    origins = origins_of(source, name)
    if len(origins) > 1:
        raise UsageError(
            f"{name} must be one path, got {len(origins)} paths. Pass the list to a dataset, or "
            "to merge()."
        )
    return origins[0]
