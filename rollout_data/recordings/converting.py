"""Converting recordings from format to format, one episode at a time."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from storage.core import arguments
from storage.errors import DataFileError, RolloutDataError, UsageError, nearest

from ..foreign.formats import EXPORTS, WRITERS, writer_class
from ..foreign.writer import ForeignWriter
from ..format.header import damaged_fragments, read_header
from ..index.folder import BlockFolder
from ..remote.access import DataDir, RemotePath
from .opening import open
from .own_writer import OWN, OwnWriter
from .recording import Recording


@dataclass(frozen=True)
class Conversion:
    """What a conversion did.

    Attributes:
        num_episodes: Episodes in the result.
        num_present: How many of them an earlier conversion had written.
        changes: What was changed or left out -> the ids of the episodes.
        problems: Data that were not read, were repaired or were left out.
        advice: Remarks on data that were written as they are stored; see `Recording.advice`.
    """

    num_episodes: int
    num_present: int
    changes: Mapping[str, Sequence[str]]
    problems: Sequence[RolloutDataError]
    advice: Sequence[RolloutDataError] = ()


def convert(
    source: DataDir, target: str | os.PathLike[str], to: str = OWN, *, progress: bool = True, **options: Any
) -> Conversion:
    """Write the episodes of a recording in another format; in memory there is a part of one episode at a time.

    A conversion that was stopped goes on when it is called again: episodes that are there are not written again.

    Args:
        source: A path of any format, or a `Recording`.
        target: The new file or folder, or that of an earlier conversion of the same source.
        to: The format.
        progress: Show a progress bar.
        **options: Of the format that is written.

    Returns:
        What was changed or left out. An episode that cannot be read is left out and is among the problems.

    Raises:
        UsageError: The format or an option is not known, or the target holds something else.
        DataFileError: The source cannot be read.
    """
    if to not in (formats := (OWN, *WRITERS, *EXPORTS)):
        raise UsageError("convert", f"to {to!r}", nearest(to, formats), repr(to))
    kind: type[ForeignWriter] = OwnWriter if to == OWN else writer_class(to)
    if unknown := [name for name in options if name not in kind.OPTIONS]:
        known = nearest(unknown[0], kind.OPTIONS) if kind.OPTIONS else "no option"
        raise UsageError("convert", f"to {to!r}", known, repr(unknown[0]))
    recording = source if isinstance(source, Recording) else open(source)
    path = arguments.path("convert", "", target).absolute()
    if recording.path in (path, *path.parents):
        raise UsageError("convert", repr(str(path)), "another place for the result", "that of the source")
    problems, damaged = list(recording.problems), _damaged(recording)
    while True:
        writer = kind(path, recording, recording.metadata, options)
        num_present = len(writer.written)
        try:
            for episode in tqdm(recording, desc="convert", unit=" episodes", disable=not progress):
                try:
                    if episode.id in damaged:  # in the result they would have right checksums
                        raise damaged[episode.id]
                    if episode.id not in writer.written:
                        writer.add(episode)
                except DataFileError as problem:
                    problems.append(problem)
                    writer.left_out.add(episode.id)
        finally:
            writer.close()
        if not (writer.left_out and kind.is_laid_out_first):
            break
        recording = recording.select(one for one in recording.ids if one not in writer.left_out)
    unread = {one for what, ids in writer.report.items() if what.startswith("the episode is left out") for one in ids}
    num_episodes = len(recording) - len(unread | writer.left_out)
    return Conversion(num_episodes, num_present, writer.report, problems, list(recording.advice))


def _damaged(recording: Recording) -> dict[str, DataFileError]:
    """Give the episodes of block files on this machine whose rows their checksums contradict: id -> error."""
    found: dict[str, DataFileError] = {}
    if recording.format == OWN and not isinstance(recording.path, RemotePath):
        for block in BlockFolder.at(recording.path).blocks.values():
            with suppress(FileNotFoundError):  # removed by retention: its episodes tell
                for _, error in damaged_fragments(read_header(block.path)):
                    found[f"{block.writer}:{error.trajectory}"] = error
    return found
