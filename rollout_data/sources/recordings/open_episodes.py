"""`open_episodes`: open the episodes of one file or folder of any format as a source."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from storage.errors import DataFileError, RolloutDataError, UsageError

from ...blocks.annotations import Notes
from ...remote.local_copy import local_origin
from ...remote.locations import Origin, RemoteOptions
from ..block_scanner import BlockScanner
from ..episode_source import EpisodeSource
from ..file_scanner import FileScanner
from ..format_registry import open_foreign
from ..live_source import LiveSource, scanner_of
from ..rows.row_source import RowSource
from .recordings_in_folder import check_single

#: Key in the metadata of a converted episode. Its value is the name of the episode in the original
#: data.
SOURCE_ID = "id"
#: Maximum number of scans. A scan is repeated if an edit is replaced while it is read.
_MAX_SCANS = 100


def open_episodes(origin: Origin) -> EpisodeSource:
    """Open a file or folder of any format as a source; an open recording returns its own source.

    Raises:
        DataFileError: The format is unknown, or the data cannot be read.
    """
    if origin.opened is not None:
        opened: EpisodeSource = origin.opened
        return opened
    origin = local_origin(origin, origin.remote or RemoteOptions())
    scanner = scanner_of(origin)
    if scanner in (None, BlockScanner) and origin.format is None:
        check_single(origin.path)
    if scanner is None or scanner is FileScanner:
        return open_foreign(origin.path, origin.format, **origin.options)
    if origin.options:
        raise UsageError(
            f"{scanner.format} has no option {next(iter(origin.options))!r}, which is passed for "
            f"{str(origin.path)!r}."
        )
    return _open_folder(origin)


def _open_folder(origin: Origin) -> RowSource:
    """Scan a folder and open its episodes. The scan is repeated if an edit was replaced meanwhile."""
    live = LiveSource(origin)
    for _ in range(_MAX_SCANS):
        live.refresh()
        source = live.snapshot()
        source.notes = Notes()
        try:
            source.notes.keep_edits(source)
        except FileNotFoundError:
            continue
        listing = live.listing()
        if live.holds_blocks:
            scanner, schema, num_present, placed = listing
            placed = [(folder, source.notes.kept(block)) for folder, block in placed]
            listing = scanner, schema, num_present, placed
        return _described(source, origin, listing, live.metadata, live.problems, live.advice)
    raise DataFileError(
        f"The edits of {str(origin.path)!r} changed while they were read. Open it again later."
    )


def _open_again(origin: Origin, listing: Any, *known: Any) -> RowSource:
    """Open a folder again without a scan, to unpickle its source from an earlier listing."""
    live = LiveSource(origin)
    live.adopt(listing)
    return _described(live.snapshot(), origin, listing, *known)


def _described(
    source: RowSource,
    origin: Origin,
    listing: Any,
    metadata: dict[str, Any],
    problems: list[RolloutDataError],
    advice: list[RolloutDataError],
) -> RowSource:
    """Add to a snapshot of a folder all that a recording needs; return the snapshot.

    This sets its path, format, metadata and problems, and the function that unpickles it.
    """
    source.path = origin.path
    source.listing = listing
    source.scanner = listing[0]
    source.format = source.scanner.format
    source.metadata = metadata
    source.problems = problems
    source.advice = advice
    source.reopening = (
        _open_again,
        (replace(origin, opened=None), listing, metadata, problems, advice),
    )
    return source
